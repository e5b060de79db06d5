"""Time limits in plain threads: what is given up on runs on, unobserved, and holds what it holds."""

from __future__ import annotations

import gc
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    Failure,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TimeoutEvent,
    TimeoutRejectedError,
    TokenBucket,
    current_context,
)
from resilience_pipeline._cancellation import NEVER, Cancelled, running_flag
from resilience_pipeline.runtime._here import run_here
from resilience_pipeline.testing import VirtualClock
from support.beside import (
    LIMIT,
    PATIENCE,
    SHORT,
    Beside,
    Closable,
    Gate,
    HandClock,
    let_go,
    see,
    until,
)
from support.calls import BoomError

B = ResiliencePipelineBuilder
COLOUR: PropertyKey[str] = PropertyKey("colour")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(autojump=True)


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


@pytest.fixture
def gate(hand: HandClock) -> Iterator[Gate]:
    """What is inside when its limit passes; it is opened at the end, whatever came of the test."""
    one = Gate(clock=hand)
    yield one
    let_go(one)


def slow(clock: VirtualClock, seconds: float, result: Any = None) -> Callable[[], Any]:
    """User code that takes so long by the clock, or until it is given up on."""

    def fn() -> Any:
        run_here(clock.sleep(seconds), clock)
        return result

    return fn


def ok() -> int:
    return 1


def boom() -> NoReturn:
    raise BoomError


def refuses(pipeline: ResiliencePipeline[Any]) -> bool:
    return isinstance(pipeline.settle_sync(ok), Rejected)


# ---- where attempts run -----------------------------------------------------------------------


def test_an_attempt_runs_in_a_worker_thread() -> None:
    """With a timeout in the pipeline attempts run in worker threads."""
    pipeline = B().add_timeout(60).build()
    assert pipeline.execute_sync(threading.get_ident) != threading.get_ident()


def test_what_is_outside_the_timeout_stays_in_the_callers_thread() -> None:
    """Hooks of strategies outside run in the caller's thread."""
    seen: list[int] = []
    pipeline = (
        B()
        .add_retry(delay=0, on_retry=lambda _: seen.append(threading.get_ident()))
        .add_timeout(60)
        .build()
    )
    pipeline.settle_sync(boom)
    assert set(seen) == {threading.get_ident()}


def test_context_variables_are_carried_over() -> None:
    """A copy of the caller's: what the attempt sets stays its own."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    colour.set("red")

    def fn() -> str:
        seen = colour.get()
        colour.set("blue")
        return seen

    assert B().add_timeout(60).build().execute_sync(fn) == "red"
    assert colour.get() == "red"


def test_each_attempt_gets_the_callers_variables() -> None:
    """A retry outside the timeout: the next attempt sees nothing of the last one's."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[str] = []

    def fn() -> NoReturn:
        seen.append(colour.get())
        colour.set("blue")
        raise BoomError

    B().add_retry(max_retry_attempts=1, delay=0).add_timeout(60).build().settle_sync(fn)
    assert seen == ["none", "none"]


def test_the_context_in_the_worker_is_that_of_the_execution() -> None:
    """`current_context()` has the attempt's number, and what it writes is read outside."""
    context = ResilienceContext(operation_key="key")
    seen: list[tuple[int, str | None]] = []

    def fn() -> None:
        here = current_context()
        seen.append((here.attempt, here.operation_key))
        here.properties[COLOUR] = f"of {here.attempt}"
        if here.attempt == 0:
            raise BoomError

    B().add_retry(delay=0).add_timeout(60).build().execute_sync(fn, context=context)
    assert seen == [(0, "key"), (1, "key")]
    assert context.properties[COLOUR] == "of 1"


# ---- expiry -----------------------------------------------------------------------------------


def test_a_call_in_time_comes_out(clock: VirtualClock) -> None:
    """A value within the limit."""
    assert B(clock=clock).add_timeout(5).build().execute_sync(slow(clock, 4, "done")) == "done"
    assert clock.now() == 4


def test_expiry_is_a_timeout_rejection(clock: VirtualClock) -> None:
    """`TimeoutRejectedError(timeout=…)`, also a builtin `TimeoutError`, at the limit."""
    pipeline = B(name="p", clock=clock).add_timeout(5).build()
    with pytest.raises(TimeoutRejectedError) as caught:
        pipeline.execute_sync(slow(clock, 10))
    assert clock.now() == 5
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.timeout == 5
    assert caught.value.pipeline_name == "p"


@pytest.mark.realtime
def test_expiry_in_real_time() -> None:
    """Without a clock the limit is one of real time, and the caller leaves its attempt behind."""
    gate = Gate()
    with pytest.raises(TimeoutRejectedError):
        B().add_timeout(SHORT).build().execute_sync(gate)
    assert not gate.left.is_set()
    let_go(gate)


def test_the_time_counts_from_where_the_timeout_is_entered(clock: VirtualClock) -> None:
    """A retry outside gives each attempt the whole limit."""
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=1, use_jitter=False, backoff_type="constant")
        .add_timeout(5)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(slow(clock, 100))
    assert clock.now() == 5 + 1 + 5 + 1 + 5


def test_a_timeout_around_a_retry_ends_its_wait(clock: VirtualClock) -> None:
    """The whole of the attempts and the waits between them is limited."""
    calls: list[float] = []

    def fn() -> NoReturn:
        calls.append(clock.now())
        raise BoomError

    pipeline = (
        B(clock=clock)
        .add_timeout(5)
        .add_retry(max_retry_attempts=9, delay=2, backoff_type="constant", use_jitter=False)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(fn)
    assert calls == [0, 2, 4]
    assert clock.now() == 5


def test_a_value_that_is_there_before_the_limit_is_looked_at_is_kept(clock: VirtualClock) -> None:
    """A result that arrives at its deadline comes out, or the rejection: never neither, never both."""
    result = Closable()

    def fn() -> Closable:
        running_flag.set(NEVER)  # or its sleep may end as given up on, and it has no result
        run_here(clock.sleep(5), clock)
        return result

    outcome = B(clock=clock).add_timeout(5).build().settle_sync(fn)
    if isinstance(outcome, Success):
        assert outcome.value is result
        assert not result.closings
    else:
        assert isinstance(outcome, Rejected)
        see(result.closed)


def test_an_error_before_the_limit_is_kept(clock: VirtualClock) -> None:
    """The error of an attempt in time comes out as it is."""

    def fn() -> NoReturn:
        run_here(clock.sleep(4), clock)
        raise BoomError

    with pytest.raises(BoomError):
        B(clock=clock).add_timeout(5).build().execute_sync(fn)


def test_the_users_own_timeout_error_passes_through() -> None:
    """Only its own expiry is converted."""
    error = TimeoutError("a driver's")

    def fn() -> NoReturn:
        raise error

    outcome = B().add_timeout(60).build().settle_sync(fn)
    assert isinstance(outcome, Failure)
    assert outcome.error is error


@pytest.mark.parametrize("limit", [0, -1, -math.inf])
def test_a_limit_that_has_expired_starts_nothing(limit: float) -> None:
    """A generator's ≤ 0: the inside is not started, `error.timeout` is 0, `on_timeout` runs."""
    calls: list[int] = []
    seen: list[float] = []
    pipeline = (
        B()
        .add_timeout(
            60,
            timeout_generator=lambda _: limit,
            on_timeout=lambda event: seen.append(event.timeout),
        )
        .build()
    )
    with pytest.raises(TimeoutRejectedError) as caught:
        pipeline.execute_sync(calls.append, 1)
    assert (calls, seen, caught.value.timeout) == ([], [0], 0)


def test_on_timeout_runs_in_the_callers_thread_with_the_callers_context(
    clock: VirtualClock,
) -> None:
    """`on_timeout(event)`: context, timeout."""
    context = ResilienceContext()
    seen: list[tuple[TimeoutEvent, int]] = []
    pipeline = (
        B(clock=clock)
        .add_timeout(5, on_timeout=lambda event: seen.append((event, threading.get_ident())))
        .build()
    )
    pipeline.settle_sync(slow(clock, 10), context=context)
    ((event, thread),) = seen
    assert event.context is context
    assert event.timeout == 5
    assert thread == threading.get_ident()


def test_a_raising_on_timeout_surfaces_with_the_rejection_as_its_context(
    clock: VirtualClock,
) -> None:
    """An exception raised by a hook surfaces to the caller."""

    def on_timeout(_: object) -> NoReturn:
        raise KeyError

    pipeline = B(clock=clock).add_timeout(5, on_timeout=on_timeout).build()
    with pytest.raises(KeyError) as caught:
        pipeline.execute_sync(slow(clock, 10))
    assert isinstance(caught.value.__context__, TimeoutRejectedError)


def test_of_two_nested_timeouts_the_inner_is_named(clock: VirtualClock) -> None:
    """Of two nested timeouts the right one is named."""
    pipeline = B(clock=clock).add_timeout(9, name="outer").add_timeout(5, name="inner").build()
    with pytest.raises(TimeoutRejectedError) as caught:
        pipeline.execute_sync(slow(clock, 20))
    assert (caught.value.strategy_name, caught.value.timeout) == ("inner", 5)
    assert clock.now() == 5


def test_of_two_nested_timeouts_the_outer_is_named(clock: VirtualClock) -> None:
    """The other way round."""
    pipeline = B(clock=clock).add_timeout(5, name="outer").add_timeout(9, name="inner").build()
    with pytest.raises(TimeoutRejectedError) as caught:
        pipeline.execute_sync(slow(clock, 20))
    assert (caught.value.strategy_name, caught.value.timeout) == ("outer", 5)
    assert clock.now() == 5


def test_a_breaker_outside_counts_the_expiry(clock: VirtualClock) -> None:
    """Put the timeout inside the breaker to have slow calls counted."""
    control = CircuitBreakerControl()
    pipeline = B(clock=clock).add_circuit_breaker(control=control).add_timeout(5).build()
    pipeline.settle_sync(slow(clock, 10))
    assert (control.metrics.throughput, control.metrics.failures) == (1, 1)


def test_a_breaker_inside_sees_a_cancellation_and_counts_nothing(hand: HandClock) -> None:
    """A circuit breaker inside a timeout sees a wait's end as a cancellation, which is no evidence."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_timeout(LIMIT)
        .add_circuit_breaker(control=control)
        .add_retry(delay=PATIENCE)
        .build()
    )
    Beside(hand.expire, LIMIT, 2)
    assert isinstance(pipeline.settle_sync(boom), Rejected)
    assert control.metrics.throughput == 0
    ends(pipeline)
    assert control.metrics.throughput == 1, "the call that found the other gone"
    assert control.metrics.failures == 0


def test_a_fallback_replaces_an_expired_call(clock: VirtualClock) -> None:
    """A timeout's rejection is an ordinary failure to what is outside."""
    pipeline = B(clock=clock).add_fallback(fallback_value="other").add_timeout(5).build()
    assert pipeline.execute_sync(slow(clock, 10)) == "other"


# ---- what runs on -----------------------------------------------------------------------------


def test_a_late_result_is_closed_once(hand: HandClock, gate: Gate) -> None:
    """What a call that timed out brings later is closed."""
    gate.result = Closable()
    B(clock=hand).add_timeout(LIMIT).build().settle_sync(gate)
    assert not gate.result.closings
    let_go(gate)
    see(gate.result.closed)
    assert gate.result.closings == 1


@pytest.mark.parametrize("outer", ["retry", "timeout", "hedging"])
def test_a_late_result_is_closed_once_through_more_strategies(
    hand: HandClock, gate: Gate, outer: str
) -> None:
    """However many strategies it would have passed."""
    gate.result = Closable()
    builder: Any = B(clock=hand).add_timeout(LIMIT)
    if outer == "retry":
        builder = builder.add_retry()
    elif outer == "timeout":
        builder = builder.add_timeout(60)
    else:
        builder = builder.add_hedging(delay=60)
    builder.build().settle_sync(gate)
    let_go(gate)
    see(gate.result.closed)
    assert gate.result.closings == 1


def test_a_late_result_whose_close_fails_is_nobodys_concern(
    hand: HandClock, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of closing something discarded are swallowed."""
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    closed = threading.Event()

    class Broken:
        def close(self) -> None:
            closed.set()
            raise BoomError

    gate.result = Broken()
    pipeline = B(clock=hand).add_concurrency_limiter(1, queue_limit=1).add_timeout(LIMIT).build()
    pipeline.settle_sync(gate)
    let_go(gate)
    see(closed)
    assert isinstance(pipeline.settle_sync(lambda: 1), Success), "the permit is back"
    assert not printed


@pytest.mark.parametrize("error", [BoomError("late"), KeyboardInterrupt(), SystemExit(3)])
def test_a_late_exception_is_printed_nowhere(
    hand: HandClock,
    gate: Gate,
    error: BaseException,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A timed-out call's exception is nowhere printed."""
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    gate.error = error
    pipeline = B(clock=hand).add_concurrency_limiter(1, queue_limit=1).add_timeout(LIMIT).build()
    pipeline.settle_sync(gate)
    let_go(gate)
    assert isinstance(pipeline.settle_sync(ok), Success)  # when the permit is back it has ended
    gc.collect()
    assert not printed
    assert capfd.readouterr() == ("", "")


def test_the_attempt_is_told_that_nobody_waits(hand: HandClock) -> None:
    """`current_context().cancelled` lets cooperative code stop early: `is_set()`, `wait(seconds)`."""
    seen: list[bool] = []
    done = threading.Event()

    def fn() -> None:
        cancelled = current_context().cancelled
        seen.append(cancelled.is_set())
        hand.expire()
        seen.append(cancelled.wait(PATIENCE))
        seen.append(cancelled.is_set())
        done.set()

    with pytest.raises(TimeoutRejectedError):
        B(clock=hand).add_timeout(LIMIT).build().execute_sync(fn)
    see(done)
    assert seen == [False, True, True]


def test_the_callers_own_flag_is_not_set(hand: HandClock) -> None:
    """Only what was given up on is told: outside, the call goes on."""
    told = threading.Event()
    seen: list[bool] = []

    def fn() -> None:
        hand.expire()
        current_context().cancelled.wait(PATIENCE)
        told.set()

    pipeline = (
        B(clock=hand)
        .add_fallback(lambda _: current_context().cancelled.is_set())
        .add_timeout(LIMIT, on_timeout=lambda e: seen.append(e.context.cancelled.is_set()))
        .build()
    )
    assert pipeline.execute_sync(fn) is False
    see(told)
    assert seen == [False]


def test_the_next_attempt_has_a_flag_of_its_own(hand: HandClock, gate: Gate) -> None:
    """A retry after a timeout: the new attempt is not told of the old one's end."""

    def fn() -> bool:
        if current_context().attempt == 0:
            gate()
        return current_context().cancelled.is_set()

    assert B(clock=hand).add_retry(delay=0).add_timeout(LIMIT).build().execute_sync(fn) is False


@pytest.mark.parametrize("limited", [False, True], ids=["not limited", "limited"])
def test_in_a_call_that_nobody_gives_up_on_the_flag_is_not_set(limited: bool) -> None:
    """Also where no time limit is in the pipeline there is a flag to look at."""
    pipeline: Any = B().add_timeout(60).build() if limited else ResiliencePipeline.empty
    assert pipeline.execute_sync(lambda: current_context().cancelled.is_set()) is False
    assert pipeline.execute_sync(lambda: current_context().cancelled.wait(0)) is False


def test_both_of_two_nested_attempts_are_told(hand: HandClock) -> None:
    """An outer limit that passes gives up on what is inside of an inner one too."""
    done = threading.Event()

    def fn() -> None:
        hand.expire()
        if current_context().cancelled.wait(PATIENCE):
            done.set()

    with pytest.raises(TimeoutRejectedError):
        B(clock=hand).add_timeout(LIMIT).add_timeout(60).build().execute_sync(fn)
    see(done)


def test_a_pipeline_within_an_abandoned_call_is_told_too(hand: HandClock) -> None:
    """A pipeline called by the callback of a call that was given up on."""
    done = threading.Event()
    inner = B(clock=hand).add_timeout(60).build()

    def fn() -> None:
        hand.expire()
        if current_context().cancelled.wait(PATIENCE):
            done.set()

    with pytest.raises(TimeoutRejectedError):
        B(clock=hand).add_timeout(LIMIT).build().execute_sync(inner.execute_sync, fn)
    see(done)


# ---- what was given up on starts nothing more -------------------------------------------------


def ends(pipeline: ResiliencePipeline[Any]) -> None:
    """Wait until what was left behind inside a limiter of one permit has ended."""
    assert pipeline.execute_sync(ok) == 1


def test_the_wait_of_an_inner_retry_ends_at_once(hand: HandClock) -> None:
    """A retry inside an abandoned call waits no more and makes no further attempt."""
    calls: list[int] = []

    def fn() -> NoReturn:
        calls.append(1)
        raise BoomError

    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_timeout(LIMIT)
        .add_retry(max_retry_attempts=5, delay=PATIENCE)
        .build()
    )
    Beside(hand.expire, LIMIT, 2)
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(fn)
    ends(pipeline)
    assert len(calls) == 1


@pytest.mark.parametrize("delay", [0, 1e-9])
def test_an_inner_retry_makes_no_attempt_after_a_late_failure(
    hand: HandClock, gate: Gate, delay: float
) -> None:
    """An attempt that fails late is the last: there is a checkpoint also at delay 0."""
    gate.error = BoomError()
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_timeout(LIMIT)
        .add_retry(max_retry_attempts=5, delay=delay)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    let_go(gate)
    ends(pipeline)
    assert gate.calls == 1


def test_a_queue_inside_an_abandoned_call_is_left(hand: HandClock) -> None:
    """A call that waits for a permit when its time is up gives its place back, and starts nothing."""
    limited = B(clock=hand).add_concurrency_limiter(1, queue_limit=1).build()
    pipeline = B(clock=hand).add_timeout(LIMIT).add_pipeline(limited).build()
    held = Gate()
    holder = Beside(limited.execute_sync, held)
    see(held.entered)
    calls: list[int] = []
    bound: Any = limited

    def expire_when_queued() -> None:
        until(lambda: len(bound._head.__self__._queue))
        hand.expire()

    Beside(expire_when_queued)
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(calls.append, 1)
    let_go(held)
    holder.result()
    assert limited.execute_sync(ok) == 1
    assert not calls


def test_a_rate_limiters_queue_inside_an_abandoned_call_is_left() -> None:
    """The same at a rate limiter."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock).add_timeout(1).add_rate_limiter(TokenBucket(1, 0.1), queue_limit=1).build()
    )
    assert pipeline.execute_sync(ok) == 1
    calls: list[int] = []
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(calls.append, 1)
    run_here(clock.sleep(20), clock)
    assert pipeline.execute_sync(ok) == 1, "the place in the queue is free, and the next permit"
    assert not calls


def test_a_new_call_of_a_pipeline_in_an_abandoned_call_starts_nothing(
    hand: HandClock, gate: Gate
) -> None:
    """A callback that goes on after it was given up on gets nowhere through a pipeline."""
    calls: list[int] = []
    came_out: list[BaseException] = []
    done = threading.Event()
    inner: ResiliencePipeline[Any] = B(clock=hand).add_retry().build()

    def fn() -> None:
        gate()
        try:
            inner.execute_sync(calls.append, 1)
        except BaseException as error:
            came_out.append(error)
        finally:
            done.set()

    with pytest.raises(TimeoutRejectedError):
        B(clock=hand).add_timeout(LIMIT).build().execute_sync(fn)
    let_go(gate)
    see(done)
    assert not calls
    assert isinstance(came_out[0], Cancelled)
    assert not isinstance(came_out[0], Exception)


def test_a_fallback_inside_an_abandoned_call_replaces_nothing_that_was_cancelled(
    hand: HandClock,
    gate: Gate,
) -> None:
    """Cancellation is never a failure: a cancelled wait is not replaced, counted or settled."""
    actions: list[int] = []
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_timeout(LIMIT)
        .add_fallback(lambda _: actions.append(1))
        .add_retry(delay=PATIENCE)
        .build()
    )
    Beside(hand.expire, LIMIT, 2)
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(boom)
    ends(pipeline)
    assert not actions


def test_an_inner_timeout_of_an_abandoned_call_is_silent(hand: HandClock, gate: Gate) -> None:
    """An inner limit that would pass later reports nothing: nobody is left."""
    reports: list[object] = []
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1)
        .add_timeout(LIMIT)
        .add_timeout(60, on_timeout=reports.append)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    let_go(gate)
    ends(pipeline)
    assert not reports


# ---- permits ----------------------------------------------------------------------------------


def test_a_limiter_outside_keeps_the_permit_until_the_call_ends(
    hand: HandClock, gate: Gate
) -> None:
    """A call that timed out keeps its limiter permit until it ends."""
    pipeline = B(clock=hand).add_concurrency_limiter(1).add_timeout(LIMIT).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    assert refuses(pipeline)
    assert refuses(pipeline)


def test_a_limiter_outside_gets_the_permit_back_when_the_call_ends(
    hand: HandClock, gate: Gate
) -> None:
    """And then it goes to whoever waits."""
    pipeline = B(clock=hand).add_concurrency_limiter(1, queue_limit=1).add_timeout(LIMIT).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    waiting = Beside(pipeline.execute_sync, ok)
    let_go(gate)
    assert waiting.result() == 1


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_permit_is_given_back_once(hand: HandClock, gate: Gate, where: str) -> None:
    """Never twice: afterwards as many are let in as before."""
    builder: Any = B(clock=hand)
    builder = (
        builder.add_timeout(LIMIT).add_concurrency_limiter(2, queue_limit=9)
        if where == "inside"
        else builder.add_concurrency_limiter(2, queue_limit=9).add_timeout(LIMIT)
    )
    pipeline = builder.build()
    limiter = B(clock=hand).add_pipeline(pipeline).build()
    for _ in range(2):
        limiter.settle_sync(gate)
    let_go(gate)
    head: Any = pipeline._head
    if where == "inside":
        head = inspect.getclosurevars(head).nonlocals["inside"]
    bound = head.__self__
    until(lambda: bound.free == 2)
    assert bound.free == 2


def test_a_limiter_inside_keeps_the_permit_until_the_call_ends(hand: HandClock, gate: Gate) -> None:
    """With the limiter inside the timeout too."""
    pipeline = B(clock=hand).add_timeout(LIMIT).add_concurrency_limiter(1).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    assert isinstance(pipeline.settle_sync(ok).error, ConcurrencyLimiterRejectedError)


def test_with_the_limiter_outside_the_retry_attempts_share_one_permit(
    hand: HandClock, gate: Gate
) -> None:
    """The first attempt runs on, and the second is let in all the same."""
    pipeline = (
        B(clock=hand).add_concurrency_limiter(1).add_retry(delay=0).add_timeout(LIMIT).build()
    )

    def fn() -> int:
        if current_context().attempt == 0:
            gate()
        return current_context().attempt

    assert pipeline.execute_sync(fn) == 1
    assert refuses(pipeline), "the first attempt still has it"


def test_with_the_limiter_inside_the_retry_an_attempt_that_runs_on_keeps_its_own(
    hand: HandClock,
    gate: Gate,
) -> None:
    """The second attempt needs a permit of its own, and there is none."""
    pipeline = (
        B(clock=hand)
        .add_retry(max_retry_attempts=1, delay=0)
        .add_concurrency_limiter(1)
        .add_timeout(LIMIT)
        .build()
    )
    with pytest.raises(ConcurrencyLimiterRejectedError):
        pipeline.execute_sync(gate)
    assert gate.calls == 1


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_an_attempt_that_has_ended_gives_its_permit_back_though_another_runs_on(
    hand: HandClock, gate: Gate, where: str
) -> None:
    """A call keeps its permit until *it* ends: not until an earlier attempt's call does."""
    builder: Any = B(clock=hand).add_retry(max_retry_attempts=3, delay=0)
    builder = (
        builder.add_timeout(LIMIT).add_concurrency_limiter(2)
        if where == "inside"
        else builder.add_concurrency_limiter(2).add_timeout(LIMIT)
    )

    def fn() -> int:
        attempt = current_context().attempt
        if attempt == 0:
            gate()
        if attempt == 1:
            raise BoomError
        return attempt

    # The first attempt has one of the two; the second and the third get the other in turn.
    assert builder.build().execute_sync(fn) == 2


def test_a_limiter_around_a_nested_timeout_waits_for_the_innermost(
    hand: HandClock, gate: Gate
) -> None:
    """What an inner limit has left behind is inside of the outer limiter too."""
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1)
        .add_timeout(60)
        .add_fallback(fallback_value="given up")
        .add_timeout(LIMIT)
        .build()
    )
    assert pipeline.execute_sync(gate) == "given up"
    assert refuses(pipeline)


def test_a_pipeline_called_in_an_orphan_keeps_its_own_permit(hand: HandClock, gate: Gate) -> None:
    """A limiter of a pipeline that the abandoned callback calls."""
    inner = B(clock=hand).add_concurrency_limiter(1, queue_limit=1).build()
    outer = B(clock=hand).add_timeout(LIMIT).build()
    with pytest.raises(TimeoutRejectedError):
        outer.execute_sync(inner.execute_sync, gate)
    queued = Beside(inner.execute_sync, ok)
    assert gate.calls == 1
    let_go(gate)
    assert queued.result() == 1


# ---- nothing is left --------------------------------------------------------------------------


def test_a_context_serves_the_next_call_while_an_orphan_runs_on(
    hand: HandClock, gate: Gate
) -> None:
    """An orphan has a context of its own: the caller's is free, and is not touched by it."""
    context = ResilienceContext()
    pipeline = B(clock=hand).add_retry(max_retry_attempts=1, delay=0).add_timeout(LIMIT).build()
    pipeline.settle_sync(gate, context=context)
    seen = pipeline.execute_sync(lambda: current_context().attempt, context=context)
    let_go(gate)
    assert seen == 0
    assert context.attempt == 0


def test_an_orphan_writes_where_the_caller_can_read(hand: HandClock) -> None:
    """Properties written before the limit passed are there afterwards."""
    context = ResilienceContext()
    done = threading.Event()

    def fn() -> None:
        current_context().properties[COLOUR] = "red"
        hand.expire()
        current_context().cancelled.wait(PATIENCE)
        done.set()

    B(clock=hand).add_timeout(LIMIT).build().settle_sync(fn, context=context)
    assert context.properties[COLOUR] == "red"
    see(done)


def test_settled_attempts_show_the_expiry(clock: VirtualClock) -> None:
    """Each attempt's outcome and duration."""
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=1, use_jitter=False)
        .add_timeout(5)
        .build()
    )
    outcome = pipeline.settle_sync(slow(clock, 100))
    assert [attempt.duration for attempt in outcome.attempts] == [5, 5]
    assert all(isinstance(attempt.outcome, Rejected) for attempt in outcome.attempts)
