"""Streams: what it costs to begin one, and what each chunk costs once its consumer has it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from functools import partial

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder

from . import baselines, measure, peer_stacks, peers
from .measure import Loop, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Contenders, Result, Row, call_row

_SOURCE = "source"


async def _chunks(count: int) -> AsyncGenerator[int, None]:
    for chunk in range(count):
        yield chunk


def _read(connect: Callable[[int], AsyncIterable[int]]) -> Loop:
    """Make the loop of the chunks of one stream."""

    async def loop(count: int) -> None:
        async for _ in connect(count):
            pass

    return loop


_bare = _read(_chunks)


def _guarding() -> ResiliencePipeline[Exception]:
    return (
        ResiliencePipelineBuilder()
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker()
        .add_timeout(10)
        .build()
    )


def _ours() -> Loop:
    pipeline = _guarding()
    return _read(lambda count: pipeline.execute_stream(_chunks, count))


_by_hand = _read(
    lambda count: baselines.guarded_stream(lambda: _chunks(count), attempts=4, delay=1)
)


def _handing_over() -> Loop:
    # A hedge that never starts: its source lives in an owner task all the same.
    pipeline = ResiliencePipelineBuilder().add_hedging(delay="1h").build()
    return _read(lambda count: pipeline.execute_stream(_chunks, count))


_handing_over_by_hand = _read(lambda count: baselines.owned_stream(lambda: _chunks(count)))


def _committed() -> Mapping[str, Loop]:
    return {
        OURS: _ours(),
        BY_HAND: _by_hand,
        _SOURCE: _bare,
        **{
            name: _read(connect)
            for name, connect in peers.decorated(peer_stacks.STREAM, _chunks).items()
        },
    }


def _handed_over() -> Mapping[str, Loop]:
    return {OURS: _handing_over(), BY_HAND: _handing_over_by_hand, _SOURCE: _bare}


def _chunk_row(what: str, contenders: Contenders, *bounds: Bound) -> Row:
    """Make the row of what a chunk costs over what its source does for it."""

    async def run(settings: Settings) -> Result:
        loops = contenders()
        timings = await measure.compare(_bare, loops, settings)
        over = timings.over(OURS, _SOURCE)
        return Result(
            cost=f"+ {over:,.0f} ns a chunk",
            ns={name: timings.ns(name) for name in loops},
            bare={name: timings.in_bare_calls(name) for name in loops},
            ratios={name: timings.ratio(name, BY_HAND) for name in loops},
            checks=tuple(Checked(bound, over) for bound in bounds),
        )

    return Row(what, run, _bare, contenders)


def _to_the_first_chunk() -> Mapping[str, Loop]:
    pipeline = _guarding()
    return {
        OURS: _opened(lambda: pipeline.execute_stream(_chunks, 1)),
        BY_HAND: _opened(lambda: baselines.guarded_stream(lambda: _chunks(1), attempts=4, delay=1)),
        **{
            name: _opened(partial(connect, 1))
            for name, connect in peers.decorated(peer_stacks.STREAM, _chunks).items()
        },
    }


def _opened(connect: Callable[[], AsyncIterable[int]]) -> Loop:
    """Make the loop of streams of one chunk: begun, committed, read to the end."""

    async def loop(count: int) -> None:
        for _ in range(count):
            async for _ in connect():
                pass

    return loop


ROWS = (
    call_row(
        "a stream of one chunk, begun and ended",
        bare=_opened(lambda: _chunks(1)),
        contenders=_to_the_first_chunk,
    ),
    _chunk_row(
        "a committed stream, per chunk",
        _committed,
        Bound(60, "ns over the source"),
    ),
    _chunk_row("a stream with an owner task, per chunk", _handed_over),
)
