"""A call through pipelines: none, each strategy alone, the stack of four, and calls that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder, TokenBucket

from . import baselines
from .measure import Loop, repeat, repeat_with
from .rows import BY_HAND, OURS, bare_calls, by_hand, call_row


async def work() -> None:
    """The bare call: returns at once, which makes the ratios to it the harshest possible."""


async def suspending() -> None:
    """A call that waits once, one trip round the event loop."""
    await asyncio.sleep(0)


class FailingThrice:
    """Fails three times, then succeeds, over and over."""

    def __init__(self) -> None:
        self._calls = 0

    async def __call__(self) -> None:
        self._calls += 1
        if self._calls % 4:
            raise ConnectionError


BARE = repeat(work)


def _empty() -> Mapping[str, Loop]:
    return {OURS: repeat_with(ResiliencePipeline.empty.execute, work)}


def _retry() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_retry(max_retry_attempts=3, delay=1).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Retry(attempts=4, delay=1).run, work),
    }


def _timeout() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_timeout(10).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Timeout(10).run, work),
    }


def _breaker() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_circuit_breaker().build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.CircuitBreaker(failures=10, seconds=5).run, work),
    }


def _concurrency_limiter() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(100, 100).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.ConcurrencyLimiter(100).run, work),
    }


def _rate_limiter() -> Mapping[str, Loop]:
    bucket = TokenBucket(1_000_000_000, 1_000_000_000)
    pipeline = ResiliencePipelineBuilder().add_rate_limiter(bucket).build()
    limiter = baselines.RateLimiter(1_000_000_000, 1_000_000_000)
    return {OURS: repeat_with(pipeline.execute, work), BY_HAND: repeat_with(limiter.run, work)}


def stack() -> ResiliencePipeline[Exception]:
    """Make the stack of four that the contract's table is about."""
    return (
        ResiliencePipelineBuilder(name="stack")
        .add_concurrency_limiter(20_000)
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=10)
        .add_timeout(10)
        .build()
    )


def stack_by_hand() -> baselines.Stack:
    return baselines.Stack(
        permits=20_000, attempts=4, delay=1, failures=10, break_seconds=5, timeout=10
    )


def _stack() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack().execute, work),
        BY_HAND: repeat_with(stack_by_hand().run, work),
    }


def _suspending_stack() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack().execute, suspending),
        BY_HAND: repeat_with(stack_by_hand().run, suspending),
    }


def _failing() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_retry(max_retry_attempts=3, delay=0).build()
    return {
        OURS: repeat_with(pipeline.execute, FailingThrice()),
        BY_HAND: repeat_with(baselines.Retry(attempts=4, delay=0).run, FailingThrice()),
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


def _settled() -> Mapping[str, Loop]:
    breaker = baselines.CircuitBreaker(failures=2, seconds=3600)
    return {OURS: _rejected(_open_circuit()), BY_HAND: _raising(breaker.run)}


def _raised() -> Mapping[str, Loop]:
    breaker = baselines.CircuitBreaker(failures=2, seconds=3600)
    return {OURS: _raising(_open_circuit().execute), BY_HAND: _raising(breaker.run)}


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
    }


def _hedging_secondary() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_hedging(delay=0).build()
    return {
        OURS: repeat_with(pipeline.execute, SlowAndQuick()),
        BY_HAND: repeat_with(baselines.Hedging(0).run, SlowAndQuick()),
    }


ROWS = (
    call_row("empty pipeline", bare=BARE, contenders=_empty, bounds=[bare_calls(8)]),
    call_row("retry alone", bare=BARE, contenders=_retry, bounds=[bare_calls(9)]),
    call_row("timeout alone", bare=BARE, contenders=_timeout, bounds=[by_hand(0.4)]),
    call_row("circuit breaker alone", bare=BARE, contenders=_breaker),
    call_row("concurrency limiter alone", bare=BARE, contenders=_concurrency_limiter),
    call_row("rate limiter alone", bare=BARE, contenders=_rate_limiter),
    call_row(
        "limiter + retry + breaker + timeout",
        bare=BARE,
        contenders=_stack,
        bounds=[by_hand(0.45), bare_calls(28)],
    ),
    call_row(
        "the same, the call suspending once",
        bare=repeat(suspending),
        contenders=_suspending_stack,
        bounds=[by_hand(0.75)],
    ),
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
)
