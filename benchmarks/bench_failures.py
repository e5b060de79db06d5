"""Calls that fail, are slow or are refused: what the strategies are there for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder

from . import baselines, peers
from .bench_calls import BARE, suspending, work
from .measure import Loop, repeat, repeat_with
from .rows import BY_HAND, OURS, bare_calls, by_hand, call_row


class FailingThrice:
    """Fails three times, then succeeds, over and over."""

    def __init__(self) -> None:
        self._calls = 0

    async def __call__(self) -> None:
        self._calls += 1
        if self._calls % 4:
            raise ConnectionError


def _failing() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_retry(max_retry_attempts=3, delay=0).build()
    return {
        OURS: repeat_with(pipeline.execute, FailingThrice()),
        BY_HAND: repeat_with(baselines.Retry(attempts=4, delay=0).run, FailingThrice()),
        **peers.loops(peers.retries(0), FailingThrice().__call__),
    }


async def fail() -> None:
    raise ConnectionError


def _open_circuit() -> ResiliencePipeline[Exception]:
    return (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration="1h")
        .build()
    )


def _rejected(pipeline: ResiliencePipeline[Exception]) -> Loop:
    """Make the loop of refusals that come as outcomes."""

    async def loop(count: int) -> None:
        for _ in range(2):
            await pipeline.settle(fail)
        for _ in range(count):
            await pipeline.settle(work)

    return loop


def _raising(call: Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]) -> Loop:
    """Make the loop of refusals that come as exceptions, the circuit opened by the first calls."""

    async def loop(count: int) -> None:
        for _ in range(count):
            try:  # noqa: SIM105 - as one would write it, and `suppress` has a cost
                await call(fail)
            except Exception:  # noqa: BLE001 - the library's own, or the call's before it opens
                pass

    return loop


def _peer_raising(call: Callable[[], Awaitable[object]]) -> Loop:
    """Make the same loop of something that has been decorated."""

    async def loop(count: int) -> None:
        for _ in range(count):
            try:  # noqa: SIM105
                await call()
            except Exception:  # noqa: BLE001
                pass

    return loop


def _settled() -> Mapping[str, Loop]:
    breaker = baselines.CircuitBreaker(failures=2, seconds=3600)
    return {OURS: _rejected(_open_circuit()), BY_HAND: _raising(breaker.run)}


def _raised() -> Mapping[str, Loop]:
    breaker = baselines.CircuitBreaker(failures=2, seconds=3600)
    decorated = peers.decorated(peers.breakers(2, 3600), fail)
    # Raises the same exception again and again, whose traceback grows by each refusal: it would slow
    # down whatever is measured beside it.
    decorated.pop("purgatory", None)
    return {
        OURS: _raising(_open_circuit().execute),
        BY_HAND: _raising(breaker.run),
        **{name: _peer_raising(call) for name, call in decorated.items()},
    }


def _fallback() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_fallback(fallback_value=None).build()
    return {
        OURS: repeat_with(pipeline.execute, fail),
        BY_HAND: repeat_with(baselines.Fallback(None).run, fail),
        **peers.loops(peers.FALLBACK, fail),
    }


class SlowAndQuick:
    """The first of every two calls hangs until it is cancelled, the second waits a turn of the loop."""

    def __init__(self) -> None:
        self._calls = 0

    async def __call__(self) -> None:
        self._calls += 1
        if self._calls % 2:
            await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(0)


def _hedging_primary() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_hedging(delay="1h").build()
    return {
        OURS: repeat_with(pipeline.execute, suspending),
        BY_HAND: repeat_with(baselines.Hedging(3600).run, suspending),
        **peers.loops(peers.hedges(3600), suspending),
    }


def _hedging_secondary() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_hedging(delay=0).build()
    return {
        OURS: repeat_with(pipeline.execute, SlowAndQuick()),
        BY_HAND: repeat_with(baselines.Hedging(0).run, SlowAndQuick()),
        **peers.loops(peers.hedges(0), SlowAndQuick().__call__),
    }


ROWS = (
    call_row(
        "three failures, then success, zero delay",
        bare=BARE,
        contenders=_failing,
        bounds=[by_hand(1.2)],
    ),
    call_row(
        "hedging, the first attempt wins",
        bare=repeat(suspending),
        contenders=_hedging_primary,
    ),
    call_row(
        "hedging, the second attempt wins",
        bare=repeat(suspending),
        contenders=_hedging_secondary,
    ),
    call_row(
        "rejected by an open circuit, through settle",
        bare=BARE,
        contenders=_settled,
        bounds=[bare_calls(20)],
    ),
    call_row(
        "rejected by an open circuit, through an exception",
        bare=BARE,
        contenders=_raised,
    ),
    call_row("an error, replaced by a fallback", bare=BARE, contenders=_fallback),
)
