"""A stream that has been handed to its consumer: what each further chunk costs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping

from resilience_pipeline import ResiliencePipelineBuilder

from . import baselines, measure
from .measure import Loop, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Contenders, Result, Row

_SOURCE = "source"


def _source(chunks: int) -> Callable[[], AsyncGenerator[int, None]]:
    async def connect() -> AsyncGenerator[int, None]:
        for chunk in range(chunks):
            yield chunk

    return connect


async def _bare(count: int) -> None:
    async for _ in _source(count)():
        pass


def _ours() -> Loop:
    pipeline = (
        ResiliencePipelineBuilder()
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker()
        .add_timeout(10)
        .build()
    )

    async def loop(count: int) -> None:
        async for _ in pipeline.execute_stream(_source(count)):
            pass

    return loop


async def _by_hand(count: int) -> None:
    async for _ in baselines.guarded_stream(_source(count), attempts=4, delay=1):
        pass


def _handing_over() -> Loop:
    # A hedge that never starts: its source lives in an owner task all the same.
    pipeline = ResiliencePipelineBuilder().add_hedging(delay="1h").build()

    async def loop(count: int) -> None:
        async for _ in pipeline.execute_stream(_source(count)):
            pass

    return loop


async def _handing_over_by_hand(count: int) -> None:
    async for _ in baselines.owned_stream(_source(count)):
        pass


def _committed() -> Mapping[str, Loop]:
    return {OURS: _ours(), BY_HAND: _by_hand, _SOURCE: _bare}


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


ROWS = (
    _chunk_row(
        "a committed stream, per chunk",
        _committed,
        Bound(60, "ns over the source"),
    ),
    _chunk_row("a stream with an owner task, per chunk", _handed_over),
)
