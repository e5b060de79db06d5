"""Case LT-05: hooks, predicates and generators that raise, in every strategy, and what is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    Failure,
    RateLimiterRejectedError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    TokenBucket,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, boom, hang, ok, running, tick

pytestmark = pytest.mark.anyio

PERMITS = 2


class Hook:
    """A function of the user's that raises as long as it is told to, and is quiet after that."""

    def __init__(self, quiet: Any = None) -> None:
        self.raising = True
        self.calls = 0
        self._quiet = quiet

    def __call__(self, _: object) -> Any:
        self.calls += 1
        if self.raising:
            raise KeyError(self.calls)
        return self._quiet


class AsyncHook(Hook):
    async def __call__(self, _: object) -> Any:
        await checkpoint()
        return super().__call__(_)


class Limit:
    """A rate limit of the user's own that raises."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def try_acquire(self, now: float) -> Any:
        return self._hook(now)


def _breaker(**options: Any) -> Callable[[Any], Any]:
    return lambda builder: builder.add_circuit_breaker(
        failure_ratio=0.5, minimum_throughput=2, break_duration=30, **options
    )


Add = Callable[[ResiliencePipelineBuilder[Any]], ResiliencePipelineBuilder[Any]]

#: By the name of the place: what adds a strategy with a given function there, and what the function
#: gives when it doesn't raise.
PLACES: dict[str, tuple[Callable[[Any, CircuitBreakerControl], Add], Any]] = {
    "retry.should_handle": (
        lambda f, _: lambda b: b.add_retry(max_retry_attempts=2, delay=0, should_handle=f),
        False,
    ),
    "retry.where": (
        lambda f, _: (
            lambda b: b.add_retry(
                max_retry_attempts=2, delay=0, should_handle=handle(ConnectionError, where=f)
            )
        ),
        False,
    ),
    "retry.handle_result": (
        lambda f, _: (
            lambda b: b.add_retry(max_retry_attempts=2, delay=0, should_handle=handle_result(f))
        ),
        False,
    ),
    "retry.delay_generator": (
        lambda f, _: lambda b: b.add_retry(max_retry_attempts=2, delay=0, delay_generator=f),
        0,
    ),
    "retry.on_retry": (
        lambda f, _: lambda b: b.add_retry(max_retry_attempts=2, delay=0, on_retry=f),
        None,
    ),
    "breaker.should_handle": (lambda f, c: _breaker(should_handle=f, control=c), False),
    "breaker.break_duration_generator": (
        lambda f, c: _breaker(break_duration_generator=f, control=c),
        30,
    ),
    "breaker.on_opened": (lambda f, c: _breaker(on_opened=f, control=c), None),
    "breaker.on_half_opened": (lambda f, c: _breaker(on_half_opened=f, control=c), None),
    "breaker.on_closed": (lambda f, c: _breaker(on_closed=f, control=c), None),
    "timeout.timeout_generator": (
        lambda f, _: lambda b: b.add_timeout(1, timeout_generator=f),
        None,
    ),
    "timeout.on_timeout": (lambda f, _: lambda b: b.add_timeout(5, on_timeout=f), None),
    "fallback.should_handle": (
        lambda f, _: lambda b: b.add_fallback(fallback_value=9, should_handle=f),
        False,
    ),
    "fallback.on_fallback": (
        lambda f, _: lambda b: b.add_fallback(fallback_value=9, on_fallback=f),
        None,
    ),
    "fallback.fallback_action": (lambda f, _: lambda b: b.add_fallback(f), 9),
    "limiter.on_rejected": (
        lambda f, _: lambda b: b.add_concurrency_limiter(PERMITS, on_rejected=f),
        None,
    ),
    "limiter.on_rejected after max_wait": (
        lambda f, _: lambda b: b.add_concurrency_limiter(PERMITS, 1, max_wait=1, on_rejected=f),
        None,
    ),
    "rate_limiter.on_rejected": (
        lambda f, _: lambda b: b.add_rate_limiter(TokenBucket(PERMITS, 1), on_rejected=f),
        None,
    ),
    "rate_limiter.limiter": (lambda f, _: lambda b: b.add_rate_limiter(Limit(f)), 0.0),
    "rate_limiter.limiter with a queue": (
        lambda f, _: lambda b: b.add_rate_limiter(Limit(f), queue_limit=2),
        0.0,
    ),
}


async def disturb(
    pipeline: ResiliencePipeline[Any], clock: VirtualClock, errors: list[Exception]
) -> None:
    """Send calls of every kind through: good, failing, cancelled, too slow, too many."""

    async def settle(call: Callable[[], Any]) -> None:
        outcome = await pipeline.settle(call)
        if isinstance(outcome, Failure):
            errors.append(outcome.error)

    for call in (ok, boom, boom, boom, ok):
        await settle(call)
    async with running(settle, hang) as scope:
        scope.cancel()
    async with running(settle, hang):
        await clock.advance(10)
    async with running(settle, hang), running(settle, hang), running(settle, hang):
        await settle(ok)
        await clock.advance(2)
    for call in (ok, boom, boom, boom, ok):
        await clock.advance(31)
        await settle(call)
    await clock.advance(31)
    async with running(settle, hang):
        await settle(ok)


async def permits(pipeline: ResiliencePipeline[Any]) -> int:
    """How many of some calls at once get inside."""
    inside = 0

    async def stay() -> None:
        nonlocal inside
        inside += 1
        await hang()

    async with anyio.create_task_group() as tasks:
        for _ in range(PERMITS + 2):
            tasks.start_soon(pipeline.settle, stay)
        await tick()
        tasks.cancel_scope.cancel()
    return inside


@pytest.mark.parametrize("kind", [Hook, AsyncHook], ids=["plain", "coroutine"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_function_that_raises_leaves_everything_in_order(
    place: str, kind: type[Hook]
) -> None:
    """Case LT-05: its error surfaces; then all permits are free, the circuit works, no task is alive."""
    add, quiet = PLACES[place]
    hook = kind(quiet)
    control = CircuitBreakerControl()
    clock = VirtualClock()
    builder = B(clock=clock).add_concurrency_limiter(PERMITS + 1)
    add(hook, control)(builder)
    pipeline = builder.add_concurrency_limiter(PERMITS).build()
    errors: list[Exception] = []

    await disturb(pipeline, clock, errors)
    raised = [error for error in errors if type(error) is KeyError]
    assert hook.calls
    assert len(raised) == hook.calls  # each one came out, and none of them twice

    hook.raising = False
    await clock.advance(60)
    assert await pipeline.execute(ok) == 1  # the very next call, as the probe if need be
    assert control.state == "closed"
    await clock.advance(60)
    assert await permits(pipeline) == PERMITS
    await clock.advance(60)
    assert await permits(pipeline) == PERMITS


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


#: The places that are asked with a failure of the callback at hand.
WITH_FAILURE = [
    "retry.should_handle",
    "retry.where",
    "retry.delay_generator",
    "retry.on_retry",
    "breaker.should_handle",
    "breaker.break_duration_generator",
    "breaker.on_opened",
    "fallback.should_handle",
    "fallback.on_fallback",
    "fallback.fallback_action",
]


@pytest.mark.parametrize("kind", [Hook, AsyncHook], ids=["plain", "coroutine"])
@pytest.mark.parametrize("place", WITH_FAILURE)
async def test_what_it_raises_has_the_failure_as_its_context(place: str, kind: type[Hook]) -> None:
    """Case LT-05: an exception raised by a hook has the attempt's failure as its `__context__`."""
    hook = kind()
    builder = B(clock=VirtualClock())
    PLACES[place][0](hook, CircuitBreakerControl())(builder)
    pipeline = builder.build()
    failure = BoomError("the attempt's")

    async def fail() -> None:
        raise failure

    while not hook.calls:
        outcome = await pipeline.settle(fail)
    assert isinstance(outcome.error, KeyError)
    assert outcome.error.__context__ is failure
    assert list(chain(outcome.error)) == [outcome.error, failure]


@pytest.mark.parametrize("kind", [Hook, AsyncHook], ids=["plain", "coroutine"])
@pytest.mark.parametrize(
    ("place", "rejection"),
    [
        ("timeout.on_timeout", TimeoutRejectedError),
        ("limiter.on_rejected", ConcurrencyLimiterRejectedError),
        ("rate_limiter.on_rejected", RateLimiterRejectedError),
    ],
)
async def test_what_it_raises_has_the_rejection_as_its_context(
    place: str, rejection: type[ExecutionRejectedError], kind: type[Hook]
) -> None:
    """Case LT-05: with a rejection at hand, that is the `__context__`."""
    hook = kind()
    clock = VirtualClock(autojump=True)
    builder = B(clock=clock)
    PLACES[place][0](hook, CircuitBreakerControl())(builder)
    pipeline = builder.build()
    outcomes: list[Any] = []

    async def settle() -> None:
        outcomes.append(await pipeline.settle(partial(clock.sleep, 20)))

    async with anyio.create_task_group() as tasks:
        for _ in range(PERMITS + 1):
            tasks.start_soon(settle)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    for error in errors:
        assert isinstance(error, KeyError)
        assert isinstance(error.__context__, rejection)


async def test_it_is_an_ordinary_failure_to_what_is_outside() -> None:
    """What a hook raises is retried, counted and replaced by the strategies outside of its own."""
    hook = Hook()
    control = CircuitBreakerControl()
    pipeline = (
        B()
        .add_fallback(fallback_value=9, should_handle=KeyError)
        .add_circuit_breaker(control=control)
        .add_retry(max_retry_attempts=2, delay=0, should_handle=KeyError)
        .add_fallback(fallback_value=1, on_fallback=hook)
        .build()
    )
    assert await pipeline.execute(boom) == 9
    assert hook.calls == 3
    assert control.metrics.failures == 1


async def test_a_circuit_whose_on_opened_raises_is_open() -> None:
    """The transition is finished before the hook is called: calls after it are refused."""
    hook = Hook()
    pipeline = (
        B().add_circuit_breaker(failure_ratio=1, minimum_throughput=2, on_opened=hook).build()
    )
    for _ in range(2):
        outcome = await pipeline.settle(boom)
    assert isinstance(outcome.error, KeyError)
    with pytest.raises(BrokenCircuitError):
        await pipeline.execute(ok)
    assert hook.calls == 1


async def test_a_circuit_whose_on_closed_raises_is_closed() -> None:
    """A probe whose hook raises has had its verdict: the error surfaces, the transition stands."""
    hook = Hook()
    clock = VirtualClock()
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, on_closed=hook, control=control)
        .build()
    )
    for _ in range(2):
        await pipeline.settle(boom)
    await clock.advance(5)
    with pytest.raises(KeyError):
        await pipeline.execute(ok)
    assert control.state == "closed"
    assert await pipeline.execute(ok) == 1
