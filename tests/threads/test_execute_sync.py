"""Calls in plain threads: `execute_sync`, `settle_sync`, and `wrap` of what is not async."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

import resilience_pipeline
from resilience_pipeline import (
    BrokenCircuitError,
    ConcurrencyLimiterRejectedError,
    Failure,
    MisuseError,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    SyncResilienceStream,
    TimeoutRejectedError,
    TokenBucket,
    current_context,
)
from resilience_pipeline.runtime._here import run_here
from resilience_pipeline.testing import VirtualClock
from support.calls import BoomError

B = ResiliencePipelineBuilder
EMPTY: ResiliencePipeline[Any] = ResiliencePipeline.empty
COLOUR: PropertyKey[str] = PropertyKey("colour")


def ok() -> int:
    return 1


def boom() -> NoReturn:
    raise BoomError("boom")


def echo(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


async def coroutine_function() -> int:
    return 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class Failing:
    """Fails so many times, then gives how often it was called."""

    def __init__(self, failures: int) -> None:
        self.calls = 0
        self._failures = failures

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self._failures:
            raise BoomError(f"failure {self.calls}")
        return self.calls


def full(clock: VirtualClock | None = None) -> ResiliencePipeline[Any]:
    """One of everything."""
    return (
        B(name="full", clock=clock)
        .add_fallback(fallback_value="replaced")
        .add_rate_limiter(TokenBucket(100, 100))
        .add_concurrency_limiter(2, queue_limit=2)
        .add_retry(max_retry_attempts=2, delay=1, use_jitter=False)
        .add_circuit_breaker()
        .add_hedging(delay=60)
        .add_timeout("30s")
        .build()
    )


# ---- calling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [(), (1,), (1, "two", None)])
def test_arguments_reach_the_function(args: tuple[Any, ...]) -> None:
    """`execute_sync(fn, *args)` calls `fn(*args)`."""
    assert EMPTY.execute_sync(echo, *args) == (args, {})


def test_keyword_arguments_go_by_partial() -> None:
    """Keyword arguments for `fn`: `functools.partial`."""
    assert EMPTY.execute_sync(partial(echo, 1, a=2), 3) == ((1, 3), {"a": 2})


@pytest.mark.parametrize("result", [None, 0, "", [], ()])
def test_a_falsy_result_is_a_result(result: object) -> None:
    """What `fn` returns comes out as it is."""
    assert full().execute_sync(lambda: result) is result


def test_the_error_itself_comes_out() -> None:
    """The last attempt's outcome is never wrapped."""
    error = BoomError("mine")

    def fail() -> NoReturn:
        raise error

    pipeline = B().add_retry(max_retry_attempts=1, delay=0).add_timeout(60).build()
    with pytest.raises(BoomError) as caught:
        pipeline.execute_sync(fail)
    assert caught.value is error


def test_a_call_goes_through_every_strategy() -> None:
    """The synchronous twin runs the same strategies: two failures, two retries, no fallback."""
    clock = VirtualClock(autojump=True)
    fn = Failing(2)
    assert full(clock).execute_sync(fn) == 3
    assert fn.calls == 3


def test_waits_between_attempts_are_waited_in_the_clocks_time() -> None:
    """A retry's delays are those of an event loop: 1 + 2 + 4 seconds."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=3, delay=1, backoff_type="exponential", use_jitter=False)
        .build()
    )
    assert pipeline.execute_sync(Failing(3)) == 4
    assert clock.now() == 7


def test_without_timeout_or_hedging_everything_stays_in_the_callers_thread() -> None:
    """With no timeout or hedging a synchronous call runs in the caller's thread from end to end."""
    seen: list[int] = []

    def note(*_: object) -> None:
        seen.append(threading.get_ident())

    def fn() -> NoReturn:
        note()
        raise BoomError

    pipeline = (
        B()
        .add_fallback(fallback_value=1, on_fallback=note)
        .add_rate_limiter(TokenBucket(10, 10), queue_limit=1)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_retry(max_retry_attempts=2, delay=0, on_retry=note)
        .add_circuit_breaker(minimum_throughput=2, on_opened=note)
        .build()
    )
    assert pipeline.execute_sync(fn) == 1
    assert len(seen) >= 5
    assert set(seen) == {threading.get_ident()}


@pytest.mark.parametrize("limit", [float("inf"), None], ids=["inf", "generated None"])
def test_a_timeout_without_a_limit_needs_no_thread(limit: float | None) -> None:
    """`math.inf` and a generator's `None` mean no limit for this call."""
    builder = (
        B().add_timeout(float("inf"))
        if limit is not None
        else B().add_timeout(1, timeout_generator=lambda _: None)
    )
    assert builder.build().execute_sync(threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in a worker"])
def test_an_interrupt_of_the_function_passes_every_strategy(
    interrupt: type[BaseException], threaded: bool
) -> None:
    """`KeyboardInterrupt`, `SystemExit`, `GeneratorExit` are not handled, retried or settled."""
    calls: list[int] = []

    def fn() -> NoReturn:
        calls.append(1)
        raise interrupt

    builder = B().add_fallback(fallback_value=1).add_retry(delay=0).add_circuit_breaker()
    pipeline = (builder.add_timeout(60) if threaded else builder).build()
    with pytest.raises(interrupt):
        pipeline.settle_sync(fn)
    assert len(calls) == 1


def test_the_current_context_is_that_of_the_call_and_is_gone_after_it() -> None:
    """`current_context()` holds inside the call and nowhere else."""
    assert EMPTY.execute_sync(lambda: current_context().pipeline_name) is None
    named: ResiliencePipeline[Any] = B(name="mine").add_retry().build()
    assert named.execute_sync(lambda: current_context().pipeline_name) == "mine"
    with pytest.raises(LookupError):
        current_context()


def test_a_context_of_ones_own_serves_the_call() -> None:
    """`context=`: its `operation_key` holds, and its properties can be read afterwards."""
    context = ResilienceContext(operation_key="mine", properties={COLOUR: "red"})

    def fn() -> str:
        seen = f"{current_context().operation_key} {current_context().properties[COLOUR]}"
        current_context().properties[COLOUR] = "blue"
        return seen

    pipeline = B().add_retry().add_timeout(60).build()
    assert pipeline.execute_sync(fn, context=context, operation_key="not") == "mine red"
    assert context.properties[COLOUR] == "blue"


def test_a_context_serves_one_call_at_a_time_and_one_after_the_other() -> None:
    """One context serves one execution at a time."""
    context = ResilienceContext()
    inner = partial(EMPTY.execute_sync, ok, context=context)
    with pytest.raises(MisuseError, match="still serves"):
        EMPTY.execute_sync(inner, context=context)
    assert EMPTY.execute_sync(ok, context=context) == 1


def test_a_context_serves_an_event_loop_after_a_thread() -> None:
    """After a synchronous call a context can be used for an asynchronous one."""
    context = ResilienceContext()
    pipeline = B().add_timeout(60).build()
    assert pipeline.execute_sync(ok, context=context) == 1
    assert asyncio.run(pipeline.execute(coroutine_function, context=context)) == 1
    assert isinstance(pipeline.settle_sync(ok, context=context), Success)


def test_the_operation_key_is_on_the_rejection() -> None:
    """`operation_key` labels the call."""
    pipeline = B(name="p").add_timeout(1, timeout_generator=lambda _: 0).build()
    with pytest.raises(TimeoutRejectedError) as caught:
        pipeline.execute_sync(ok, operation_key="key")
    assert caught.value.operation_key == "key"
    assert caught.value.pipeline_name == "p"


def test_what_is_not_idempotent_runs_once() -> None:
    """`idempotent=False`: only attempts whose callback was never invoked are repeated."""
    fn = Failing(5)
    pipeline = B().add_retry(max_retry_attempts=3, delay=0).build()
    with pytest.raises(BoomError):
        pipeline.execute_sync(fn, idempotent=False)
    assert fn.calls == 1


def test_what_is_not_idempotent_is_repeated_when_it_was_not_invoked() -> None:
    """An attempt refused by a limiter inside never reached the callback."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=3, delay=1)
        .add_rate_limiter(TokenBucket(1, 1))
        .build()
    )
    assert pipeline.execute_sync(ok, idempotent=False) == 1
    fn = Failing(0)
    assert pipeline.execute_sync(fn, idempotent=False) == 1
    assert fn.calls == 1


def test_a_timed_out_call_that_is_not_idempotent_is_not_repeated() -> None:
    """The callback ran in a worker thread: the retry outside knows that it was invoked."""
    clock = VirtualClock(autojump=True)
    calls: list[int] = []

    def slow() -> None:
        calls.append(1)
        run_here(clock.sleep(10), clock)

    pipeline = B(clock=clock).add_retry(max_retry_attempts=3, delay=0).add_timeout(1).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(slow, idempotent=False)
    assert len(calls) == 1


def test_a_one_shot_argument_is_refused_before_a_second_attempt() -> None:
    """A second attempt with a generator among `args` is `MisuseError`, from the failure."""

    def consume(items: Iterator[int]) -> NoReturn:
        list(items)
        raise BoomError

    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(MisuseError, match="exhausted argument") as caught:
        pipeline.execute_sync(consume, (x for x in [1]))
    assert isinstance(caught.value.__cause__, BoomError)


# ---- settling ---------------------------------------------------------------------------------


def test_a_value_settles_as_a_success() -> None:
    """`Success(value)`."""
    outcome = full().settle_sync(ok)
    assert isinstance(outcome, Success)
    assert outcome.value == 1


def test_an_error_of_the_function_settles_as_a_failure() -> None:
    """`Failure(error)` for the callback's own errors."""
    outcome = B().add_timeout(60).build().settle_sync(boom)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, BoomError)


def test_a_refusal_settles_as_a_rejection() -> None:
    """`Rejected(error)` when one of this pipeline's own strategies refused."""
    pipeline = B().add_circuit_breaker(failure_ratio=1, minimum_throughput=2).build()
    for _ in range(2):
        pipeline.settle_sync(boom)
    outcome = pipeline.settle_sync(ok)
    assert isinstance(outcome, Rejected)
    assert isinstance(outcome.error, BrokenCircuitError)


def test_a_timeout_in_a_worker_thread_is_this_pipelines_own() -> None:
    """A rejection made inside a worker thread of the same call settles as `Rejected`."""
    pipeline = (
        B()
        .add_timeout(60)
        .add_hedging(max_hedged_attempts=1, delay=60)
        .add_timeout(50, timeout_generator=lambda _: 0, name="inner")
        .build()
    )
    outcome = pipeline.settle_sync(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.error.strategy_name == "inner"


def test_another_pipelines_rejection_out_of_the_function_is_a_failure() -> None:
    """A rejection that came out of `fn` from another pipeline is no refusal of this one's."""
    other = B().add_timeout(1, timeout_generator=lambda _: 0).build()
    outcome = B().add_timeout(60).build().settle_sync(other.execute_sync, ok)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, TimeoutRejectedError)


def test_an_outcome_has_its_attempts() -> None:
    """Attempts are numbered from 0, with their outcomes, durations and delays."""
    clock = VirtualClock(autojump=True)
    fail_once = Failing(1)

    def fn() -> int:
        run_here(clock.sleep(2), clock)
        return fail_once()

    pipeline = B(clock=clock).add_retry(delay=3, use_jitter=False).build()
    outcome = pipeline.settle_sync(fn)
    assert outcome.attempt_count == 2
    first, second = outcome.attempts
    assert (first.number, first.duration, first.delay) == (0, 2, 0)
    assert isinstance(first.outcome, Failure)
    assert (second.number, second.duration, second.delay) == (1, 2, 3)
    assert isinstance(second.outcome, Success)


def test_a_call_without_retries_has_one_attempt() -> None:
    """Also without a strategy that makes attempts there was one."""
    outcome = EMPTY.settle_sync(ok)
    assert [attempt.number for attempt in outcome.attempts] == [0]
    assert outcome.attempt_count == 1


def test_attempts_inside_a_timeout_are_known_outside() -> None:
    """A retry that runs in a worker thread, inside a timeout, notes its attempts all the same."""
    outcome = B().add_timeout(60).add_retry(delay=0).build().settle_sync(Failing(1))
    assert [attempt.number for attempt in outcome.attempts] == [0, 1]


def test_misuse_is_settled_too() -> None:
    """`settle_sync` never raises for an `Exception`."""
    outcome = EMPTY.settle_sync(cast(Any, 1))
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, MisuseError)
    assert isinstance(EMPTY.settle_sync(ok, context=cast(Any, 1)), Failure)


def test_a_context_can_be_used_after_a_settled_failure() -> None:
    """The context is let go of, however the call ended."""
    context = ResilienceContext()
    assert isinstance(EMPTY.settle_sync(boom, context=context), Failure)
    assert isinstance(EMPTY.settle_sync(ok, context=context), Success)


# ---- misuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize("not_callable", [1, None, "text", object()])
def test_what_cant_be_called_is_refused(not_callable: Any) -> None:
    """An object where its function belongs is `MisuseError`."""
    with pytest.raises(MisuseError, match=r"execute_sync\(\) takes a function"):
        EMPTY.execute_sync(not_callable)


def test_a_coroutine_in_place_of_a_function_is_refused_and_closed() -> None:
    """A coroutine is closed, so no warning of one never awaited comes out."""
    coroutine = coroutine_function()
    with pytest.raises(MisuseError, match="pass the function itself"):
        EMPTY.execute_sync(cast(Any, coroutine))
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


#: To the type checker too, what it returns would have to be awaited.
refused: Callable[[], object] = coroutine_function


class AsyncObject:
    async def __call__(self) -> int:
        return 1

    async def method(self) -> int:
        return 1


class Awaitable:
    def __await__(self) -> Iterator[Any]:
        yield


ASYNC: dict[str, Callable[[], Any]] = {
    "coroutine function": coroutine_function,
    "async generator function": async_generator,
    "object with an async call": AsyncObject(),
    "async method": AsyncObject().method,
    "partial": partial(coroutine_function),
    "partial of an async object": partial(AsyncObject()),
    "lambda": lambda: coroutine_function(),
    "returned awaitable": Awaitable,
}


@pytest.mark.parametrize("threaded", [False, True], ids=["here", "in a worker"])
@pytest.mark.parametrize("kind", ASYNC)
def test_async_code_is_refused(kind: str, threaded: bool) -> None:
    """Async callables in a synchronous call are `MisuseError` that says what to call instead."""
    calls = 0
    fn = ASYNC[kind]

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return fn()

    builder = B().add_fallback(fallback_value=1).add_retry(delay=0).add_circuit_breaker()
    pipeline = (builder.add_hedging(delay=-1).add_timeout(60) if threaded else builder).build()
    with pytest.raises(MisuseError, match=r"execute\(\)"):
        pipeline.execute_sync(counted)
    assert calls == 1, "no strategy retries, hedges or replaces a misuse"


def test_a_refused_function_is_named() -> None:
    """The message says which function, and what it returned."""
    with pytest.raises(MisuseError, match=r"coroutine_function.*<coroutine object"):
        EMPTY.execute_sync(refused)


def test_a_misuse_is_counted_by_no_breaker() -> None:
    """`MisuseError` counts as nothing."""
    control = resilience_pipeline.CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(minimum_throughput=2, control=control).build()
    for _ in range(3):
        with pytest.raises(MisuseError):
            pipeline.execute_sync(refused)
    assert control.metrics.throughput == 0


async def async_hook(_: object) -> Any:
    raise AssertionError("it is never awaited")


HOOKS: dict[str, Callable[[], ResiliencePipeline[Any]]] = {
    "on_retry": lambda: B().add_retry(delay=0, on_retry=async_hook).build(),
    "delay_generator": lambda: B().add_retry(delay=0, delay_generator=async_hook).build(),
    "on_fallback": lambda: B().add_fallback(fallback_value=1, on_fallback=async_hook).build(),
    "fallback_action": lambda: B().add_fallback(async_hook).build(),
    "timeout_generator": lambda: B().add_timeout(60, timeout_generator=async_hook).build(),
    "on_timeout": lambda: (
        B().add_timeout(60, timeout_generator=lambda _: 0, on_timeout=async_hook).build()
    ),
    "on_hedging": lambda: B().add_hedging(delay=-1, on_hedging=async_hook).build(),
    "action_generator": lambda: B().add_hedging(delay=-1, action_generator=async_hook).build(),
    "should_handle": lambda: B().add_retry(delay=0, should_handle=async_hook).build(),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_an_async_hook_is_refused_by_its_name(hook: str) -> None:
    """Async hooks, predicates and generators in a synchronous call raise `MisuseError` naming them."""
    with pytest.raises(MisuseError, match=hook):
        HOOKS[hook]().execute_sync(boom)


@pytest.mark.parametrize("hook", ["on_opened", "break_duration_generator"])
def test_an_async_hook_of_a_breaker_that_opens_is_refused_by_its_name(hook: str) -> None:
    """Those of a circuit breaker, in the call that opens it."""
    options: dict[str, Any] = {"minimum_throughput": 2, hook: async_hook}
    pipeline = B().add_circuit_breaker(**options).build()
    pipeline.settle_sync(boom)
    with pytest.raises(MisuseError, match=hook):
        pipeline.execute_sync(boom)


@pytest.mark.parametrize("hook", ["on_half_opened", "on_closed"])
def test_an_async_hook_of_a_breaker_that_closes_is_refused_by_its_name(hook: str) -> None:
    """Those of a circuit breaker, in the call that probes it."""
    clock = VirtualClock()
    options: dict[str, Any] = {"minimum_throughput": 2, hook: async_hook}
    pipeline = B(clock=clock).add_circuit_breaker(**options, break_duration=5).build()
    for _ in range(2):
        pipeline.settle_sync(boom)
    run_here(clock_advanced(clock, 5), clock)
    with pytest.raises(MisuseError, match=hook):
        pipeline.execute_sync(ok)


async def clock_advanced(clock: VirtualClock, seconds: float) -> None:
    await clock.advance(seconds)


@pytest.mark.parametrize("where", ["fallback", "breaker", "hedging"])
def test_an_async_predicate_is_refused_by_its_name(where: str) -> None:
    """`should_handle` of every strategy."""
    builders: dict[str, ResiliencePipeline[Any]] = {
        "fallback": B().add_fallback(fallback_value=1, should_handle=async_hook).build(),
        "breaker": B().add_circuit_breaker(should_handle=async_hook).build(),
        "hedging": B().add_hedging(delay=-1, should_handle=async_hook).build(),
    }
    with pytest.raises(MisuseError, match="should_handle"):
        builders[where].execute_sync(boom)


def test_an_async_hedging_delay_generator_is_refused_by_its_name() -> None:
    """`delay_generator` of hedging, asked while the first attempt is on its way."""
    gone = threading.Event()
    pipeline = B().add_hedging(delay_generator=async_hook).build()
    try:
        with pytest.raises(MisuseError, match="delay_generator"):
            pipeline.execute_sync(gone.wait, 30)
    finally:
        gone.set()


def test_an_async_on_rejected_is_refused_by_its_name() -> None:
    """`on_rejected` of both limiters."""
    pipeline = B().add_rate_limiter(TokenBucket(1, 1), on_rejected=async_hook).build()
    pipeline.execute_sync(ok)
    with pytest.raises(MisuseError, match="on_rejected"):
        pipeline.execute_sync(ok)
    nested = B().add_concurrency_limiter(1, on_rejected=async_hook).build()
    with pytest.raises(MisuseError, match="on_rejected"):
        nested.execute_sync(nested.execute_sync, ok)


def test_an_async_limiter_of_ones_own_is_refused_by_its_name() -> None:
    """`SupportsRateLimit.try_acquire` as a coroutine function."""

    class Shared:
        async def try_acquire(self, now: float) -> float:
            return 0.0

    pipeline = B().add_rate_limiter(cast(Any, Shared())).build()
    with pytest.raises(MisuseError, match="try_acquire"):
        pipeline.execute_sync(ok)


def test_a_pipeline_with_async_hooks_that_are_not_called_runs() -> None:
    """Looked at is what came back, not what a hook looks like."""
    assert B().add_retry(on_retry=async_hook).build().execute_sync(ok) == 1


def test_a_pipeline_serves_threads_and_a_loop_with_hooks_that_fit_each() -> None:
    """One pipeline serves both: its plain hooks run in both."""
    seen: list[int] = []
    pipeline = B().add_retry(delay=0, on_retry=lambda event: seen.append(event.attempt)).build()

    async def failing() -> NoReturn:
        raise BoomError

    pipeline.settle_sync(boom)
    asyncio.run(pipeline.settle(failing))
    assert seen == [0, 1, 2] * 2


# ---- nesting ----------------------------------------------------------------------------------


def test_a_call_within_a_call_is_one_of_its_own() -> None:
    """Pipelines nest through the callback; the outer context is back after the inner call."""
    outer: ResiliencePipeline[Any] = B(name="outer").add_retry().build()
    inner: ResiliencePipeline[Any] = B(name="inner").add_timeout(60).build()

    def fn() -> list[str | None]:
        seen = [inner.execute_sync(lambda: current_context().pipeline_name)]
        return [*seen, current_context().pipeline_name]

    assert outer.execute_sync(fn) == ["inner", "outer"]


def test_an_added_pipeline_keeps_its_state() -> None:
    """`add_pipeline`: state stays shared with whoever else uses it."""
    shared = B(name="shared").add_rate_limiter(TokenBucket(1, 0.001)).build()
    outer = B(name="outer").add_timeout(60).add_pipeline(shared).build()
    assert outer.execute_sync(ok) == 1
    outcome = outer.settle_sync(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.error.pipeline_name == "shared"
    assert isinstance(shared.settle_sync(ok), Rejected)


@pytest.mark.parametrize("position", ["outside", "inside"])
def test_an_added_pipeline_goes_by_its_own_clock(position: str) -> None:
    """A clock of the nested pipeline's own drives its strategies and nothing else."""
    outer_clock, inner_clock = VirtualClock(autojump=True), VirtualClock(autojump=True)
    inner = B(clock=inner_clock).add_retry(max_retry_attempts=1, delay=5, use_jitter=False).build()
    builder = B(clock=outer_clock)
    if position == "outside":
        builder = builder.add_retry(max_retry_attempts=1, delay=3, use_jitter=False)
    else:
        builder = builder.add_pipeline(inner)
    if position == "outside":
        pipeline: Any = builder.add_pipeline(inner).build()
    else:
        pipeline = builder.add_retry(max_retry_attempts=1, delay=3, use_jitter=False).build()
    with pytest.raises(BoomError):
        pipeline.execute_sync(boom)
    # Outside, the nested one waits once in each of two attempts; inside, the other way round.
    expected = (3, 10) if position == "outside" else (6, 5)
    assert (outer_clock.now(), inner_clock.now()) == expected


def test_an_added_pipeline_goes_by_the_clock_around_it() -> None:
    """Without a clock of its own a nested pipeline goes by that of the pipeline around."""
    clock = VirtualClock(autojump=True)
    inner = B().add_timeout(2).add_retry(max_retry_attempts=1, delay=5, use_jitter=False).build()
    pipeline = B(clock=clock).add_pipeline(inner).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(boom)
    assert clock.now() == 2


def test_a_limiter_refuses_a_call_within_its_own() -> None:
    """A limit is a limit in one thread too."""
    pipeline = B().add_concurrency_limiter(1).build()
    with pytest.raises(ConcurrencyLimiterRejectedError):
        pipeline.execute_sync(pipeline.execute_sync, ok)
    assert pipeline.execute_sync(ok) == 1


# ---- inside and without event loops -----------------------------------------------------------


def test_a_synchronous_call_works_inside_a_running_loop() -> None:
    """It blocks the loop's thread, as any synchronous code does, and starts nothing in the loop."""

    async def main() -> tuple[Any, int]:
        before = len(asyncio.all_tasks())
        result = full().execute_sync(lambda: 7)
        return result, len(asyncio.all_tasks()) - before

    assert asyncio.run(main()) == (7, 0)


def test_waits_of_a_synchronous_call_inside_a_running_loop_are_its_threads() -> None:
    """Inside a task of asyncio a synchronous call's delays go by its own clock all the same."""
    clock = VirtualClock(autojump=True)

    async def main() -> int:
        pipeline = B(clock=clock).add_retry(delay=1, use_jitter=False).add_timeout(60).build()
        return pipeline.execute_sync(Failing(1))

    assert asyncio.run(main()) == 2
    assert clock.now() == 1


def test_an_async_call_within_a_synchronous_one_gets_its_own_loop() -> None:
    """`fn` may start an event loop and use the same pipeline in it."""
    pipeline = B().add_retry().add_timeout(60).build()
    assert pipeline.execute_sync(lambda: asyncio.run(pipeline.execute(coroutine_function))) == 1


def test_a_synchronous_call_within_an_async_one_may_have_no_async_hook() -> None:
    """The call that runs decides, not the loop around it: and the async call's hooks may be async."""
    noted: list[object] = []

    async def on_retry(event: object) -> None:
        noted.append(event)

    inner = B().add_retry(delay=0, on_retry=on_retry).build()
    outer = B().add_retry(delay=0, max_retry_attempts=1, on_retry=on_retry).build()
    calls: list[str] = []

    async def fn() -> None:
        calls.append(type(inner.settle_sync(boom).error).__name__)
        raise BoomError

    async def main() -> None:
        await outer.settle(fn)

    asyncio.run(main())
    assert calls == ["MisuseError", "MisuseError"]
    assert len(noted) == 1


_NO_LOOP = """
import sys
from resilience_pipeline import ResiliencePipelineBuilder as B, TokenBucket, handle

def fails_once():
    calls.append(1)
    if len(calls) % 2:
        raise ConnectionError
    return 1

def stream():
    calls.append(1)
    if len(calls) % 2:
        raise ConnectionError
    yield 1
    yield 2

def build():
    return (
        B()
        .add_fallback(fallback_value=9)
        .add_rate_limiter(TokenBucket(100, 100), queue_limit=2, max_wait=30)
        .add_concurrency_limiter(2, queue_limit=2, max_wait=30, hold_streams=True)
        .add_retry(delay=0.001)
        .add_circuit_breaker()
        .add_hedging(delay=0.001)
        .add_timeout(60)
        .build()
    )

calls = []
pipeline = build()
assert pipeline.execute_sync(fails_once) == 1
assert pipeline.settle_sync(fails_once).value == 1
assert pipeline.wrap(fails_once)() == 1
with pipeline.execute_stream_sync(stream, idle_timeout=60, total_timeout=60) as chunks:
    assert list(chunks) == [1, 2]
assert list(pipeline.wrap(stream)()) == [1, 2]
early = pipeline.execute_stream_sync(stream)
assert next(early) == 1
early.close()
dropped = pipeline.execute_stream_sync(stream)
assert next(dropped) == 1
del dropped
timed_out = B().add_retry(delay=0, max_retry_attempts=1).add_timeout(1, timeout_generator=lambda e: 0)
assert not timed_out.build().settle_sync(fails_once).ok
loops = [name for name in sys.modules if name.partition(".")[0] in ("asyncio", "trio", "uvloop")]
assert not loops, loops
"""


def test_no_event_loop_is_imported_by_synchronous_calls() -> None:
    """Synchronous execution never starts an event loop: neither asyncio nor trio is imported."""
    root = str(Path(resilience_pipeline.__file__).parent.parent)
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import sys; sys.path.insert(0, {root!r})\n{_NO_LOOP}",
        ],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_no_event_loop_is_set_by_synchronous_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No event loop is made where asyncio is imported already."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("an event loop was asked for")

    for name in ("new_event_loop", "run", "get_event_loop"):
        monkeypatch.setattr(asyncio, name, refuse)
    assert full().execute_sync(ok) == 1


# ---- wrapping ---------------------------------------------------------------------------------


def test_a_plain_function_stays_one() -> None:
    """`wrap` keeps name, docstring, signature and kind."""

    def fetch(item: int, *, twice: bool = False) -> int:
        """Fetch it."""
        return item * (2 if twice else 1)

    wrapped = full().wrap(fetch)
    assert wrapped(3) == 3
    assert wrapped(3, twice=True) == 6
    assert wrapped(item=4) == 4
    assert wrapped.__name__ == "fetch"
    assert wrapped.__qualname__ == fetch.__qualname__
    assert wrapped.__module__ == fetch.__module__
    assert wrapped.__doc__ == "Fetch it."
    assert inspect.signature(wrapped) == inspect.signature(fetch)
    assert inspect.isfunction(wrapped)
    assert not inspect.iscoroutinefunction(wrapped)
    assert not inspect.isgeneratorfunction(wrapped)


def test_a_wrapped_function_runs_through_the_pipeline() -> None:
    """Through `execute_sync`: it is retried."""
    fn = Failing(2)
    assert B().add_retry(delay=0).build().wrap(fn)() == 3


@pytest.mark.parametrize("parenthesised", [False, True])
def test_wrap_is_a_decorator_with_and_without_arguments(parenthesised: bool) -> None:
    """`@pipeline.wrap` and `@pipeline.wrap(idempotent=False)`."""
    pipeline = B().add_retry(delay=0).build()
    calls = 0
    decorate: Any = pipeline.wrap(idempotent=False) if parenthesised else pipeline.wrap

    def fn() -> None:
        nonlocal calls
        calls += 1
        raise BoomError

    with pytest.raises(BoomError):
        decorate(fn)()
    assert calls == (1 if parenthesised else 4)


def test_the_wrappers_operation_key_labels_every_call() -> None:
    """`wrap(fn, operation_key=…)`."""
    wrapped = EMPTY.wrap(lambda: current_context().operation_key, operation_key="key")
    assert wrapped() == "key"


class Client:
    """Methods of every kind, each wrapped where it is defined."""

    retrying = B().add_retry(delay=0).build()

    def __init__(self) -> None:
        self.calls = 0

    @retrying.wrap
    def method(self, item: int) -> tuple[Client, int]:
        """A method."""
        self.calls += 1
        if self.calls < 2:
            raise BoomError
        return self, item

    @staticmethod
    @retrying.wrap
    def inner_static(item: int) -> int:
        return item

    @staticmethod
    def _static(item: int) -> int:
        return item

    outer_static: Any = cast(Any, retrying).wrap(_static)

    @classmethod
    @retrying.wrap
    def inner_class(cls, item: int) -> tuple[type[Client], int]:
        return cls, item

    @classmethod
    def _class(cls, item: int) -> tuple[type[Client], int]:
        return cls, item

    outer_class: Any = cast(Any, retrying).wrap(_class)


def test_a_wrapped_method_is_bound_to_its_object() -> None:
    """`wrap` works on methods."""
    client = Client()
    assert client.method(5) == (client, 5)
    assert client.calls == 2
    assert Client.method.__doc__ == "A method."


@pytest.mark.parametrize("name", ["inner_static", "outer_static"])
def test_a_wrapped_static_method_stays_one(name: str) -> None:
    """On either side of `@staticmethod`."""
    assert getattr(Client, name)(5) == 5
    assert getattr(Client(), name)(5) == 5


@pytest.mark.parametrize("name", ["inner_class", "outer_class"])
def test_a_wrapped_class_method_stays_one(name: str) -> None:
    """On either side of `@classmethod`."""
    assert getattr(Client, name)(5) == (Client, 5)
    assert getattr(Client(), name)(5) == (Client, 5)


def test_a_bound_method_can_be_wrapped() -> None:
    """A method of one object, as a function."""
    client = Client()
    client.calls = 5
    wrapped = EMPTY.wrap(client.method)
    assert wrapped(1) == (client, 1)
    assert wrapped.__name__ == "method"


def test_a_partial_can_be_wrapped() -> None:
    """A `partial` keeps what is left of its signature, and the name of its function."""

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    wrapped = EMPTY.wrap(partial(add, 1))
    assert wrapped(2) == 3
    assert wrapped.__name__ == "add"
    assert wrapped.__doc__ == "Add."
    assert list(inspect.signature(wrapped).parameters) == ["b"]


def test_a_callable_object_can_be_wrapped() -> None:
    """An object with a plain `__call__` becomes a plain function with its class's name."""

    class Adder:
        """Adds."""

        def __call__(self, a: int, b: int) -> int:
            return a + b

    wrapped = EMPTY.wrap(Adder())
    assert wrapped(1, b=2) == 3
    assert wrapped.__name__ == "Adder"
    assert wrapped.__doc__ == "Adds."
    assert list(inspect.signature(wrapped).parameters) == ["a", "b"]


def test_a_lambda_and_a_builtin_can_be_wrapped() -> None:
    """Whatever can be called and is not async is a plain function to `wrap`."""
    wrap: Any = EMPTY.wrap
    assert wrap(lambda a: a + 1)(1) == 2
    assert wrap(len)([1, 2]) == 2


def test_a_class_can_be_wrapped() -> None:
    """A class is a function that makes its objects."""
    assert isinstance(EMPTY.wrap(Failing)(1), Failing)


def test_a_plain_function_that_returns_an_awaitable_is_a_plain_function() -> None:
    """To `wrap` a plain function that returns an awaitable is a plain function: calling it is misuse."""
    wrapped = EMPTY.wrap(lambda: coroutine_function())
    assert not inspect.iscoroutinefunction(wrapped)
    with pytest.raises(MisuseError):
        cast(Any, wrapped)()


def numbers(n: int) -> Iterator[int]:
    """Count."""
    yield from range(n)


class GeneratorObject:
    def __call__(self, n: int) -> Iterator[int]:
        yield from range(n)

    def method(self, n: int) -> Iterator[int]:
        yield from range(n)


@pytest.mark.parametrize(
    "fn",
    [numbers, partial(numbers), GeneratorObject(), GeneratorObject().method],
    ids=["function", "partial", "object", "method"],
)
def test_a_generator_function_gives_a_stream(fn: Callable[[int], Iterator[int]]) -> None:
    """A generator function gives a `SyncResilienceStream`."""
    with cast(Any, EMPTY.wrap(fn)(3)) as stream:
        assert isinstance(stream, SyncResilienceStream)
        assert list(stream) == [0, 1, 2]


def test_a_wrapped_generator_function_is_retried_up_to_its_first_chunk() -> None:
    """It runs through `execute_stream_sync`, with its keyword arguments."""
    calls = 0

    @B().add_retry(delay=0).build().wrap
    def chunks(n: int, *, start: int) -> Iterator[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise BoomError
        yield from range(start, n)

    assert chunks.__name__ == "chunks"
    assert list(chunks(3, start=1)) == [1, 2]
    assert calls == 2


def test_a_plain_function_that_returns_a_generator_is_a_plain_function() -> None:
    """What it looks like decides about `wrap`: its result comes out as it is."""
    generator = EMPTY.wrap(lambda: numbers(2))()
    assert inspect.isgenerator(generator)
    assert list(generator) == [0, 1]


@pytest.mark.parametrize("not_callable", [1, "text", object()])
def test_what_cant_be_called_cant_be_wrapped(not_callable: Any) -> None:
    """`wrap` of what is no function is `MisuseError`, at once."""
    with pytest.raises(MisuseError, match=r"wrap\(\) takes a function"):
        EMPTY.wrap(not_callable)


def test_a_wrapped_function_is_one_for_every_thread() -> None:
    """Calls at once from several threads are calls of their own."""
    wrapped = full().wrap(lambda n: n * 2)
    results: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(cast(Any, wrapped)(n))) for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [0, 2]
