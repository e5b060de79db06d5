"""Retry: what is repeated and when; hooks, jitter and the limit of time.

Rows `RT-nn` are those of the Polly dossier, `seed RT-n` those of the first seed's tests, `case RT-nn` those of the
collected cases. The delay formulas are tested with `_backoff`, Retry-After in `test_retry_after`, the history of attempts
in `test_attempts`; further parts of retry are in `test_retry_*` beside this file.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError as FutureCancelledError
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    Failure,
    MisuseError,
    OptionsError,
    OutcomeEvent,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    Retry,
    RetryDelayEvent,
    RetryEvent,
    TimeoutRejectedError,
    current_context,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import (
    Closable,
    Hanging,
    Scripted,
    contexts_of,
    raised_by,
    spawn,
    tick,
    traceback_length,
)

B = ResiliencePipelineBuilder


def always(event: OutcomeEvent) -> bool:
    """Handle every outcome, results included."""
    return True


# ---- Polly: what is repeated, and how often -----------------------------------------------------


@pytest.mark.anyio
async def test_a_handled_result_is_retried_until_the_attempts_are_used_up() -> None:
    """RT-18: twelve retries mean twelve hooks, and the last result comes out."""
    events: list[RetryEvent] = []
    fn = Scripted(*range(20))
    pipeline = (
        B()
        .add_retry(max_retry_attempts=12, delay=0, should_handle=always, on_retry=events.append)
        .build()
    )
    assert await pipeline.execute(fn) == 12
    assert len(events) == 12


@pytest.mark.anyio
async def test_the_last_exception_comes_out_as_it_is() -> None:
    """RT-19, seed RT-3: three hooks, then the very object that the last attempt raised, unwrapped."""
    errors = [ConnectionError(number) for number in range(4)]
    events: list[RetryEvent] = []
    pipeline = B().add_retry(delay=0, on_retry=events.append).build()
    error = await raised_by(pipeline.execute, Scripted(*errors))
    assert error is errors[3]
    assert error.__cause__ is None
    assert error.__context__ is None
    assert len(events) == 3


@pytest.mark.anyio
async def test_on_retry_sees_numbers_delays_and_outcomes() -> None:
    """RT-20: linear from 2 s gives attempts 0, 1, 2 and delays 2, 4, 6 with what failed."""
    clock = VirtualClock(autojump=True)
    errors = [ConnectionError(number) for number in range(3)]
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=clock).add_retry(delay=2, backoff_type="linear", on_retry=events.append).build()
    )
    assert await pipeline.execute(Scripted(*errors, "ok")) == "ok"
    assert [event.attempt for event in events] == [0, 1, 2]
    assert [event.delay for event in events] == [2.0, 4.0, 6.0]
    assert [event.outcome.error for event in events] == errors
    assert clock.now() == 12.0


@pytest.mark.anyio
async def test_on_retry_sees_how_long_the_attempt_ran() -> None:
    """RT-21: one minute of virtual time is reported as one minute, from the first attempt on."""
    clock = VirtualClock(autojump=True)
    events: list[RetryEvent] = []
    pipeline = B(clock=clock).add_retry(max_retry_attempts=2, on_retry=events.append).build()
    await pipeline.execute(Scripted(ConnectionError, ConnectionError, 1, clock=clock, takes=60))
    assert [event.duration for event in events] == [60.0, 60.0]


@pytest.mark.anyio
async def test_duration_is_that_of_the_attempt_alone() -> None:
    """RT-21: neither the predicate nor the wait before the attempt is part of its duration."""
    clock = VirtualClock(autojump=True)
    events: list[RetryEvent] = []

    async def slow(event: OutcomeEvent) -> bool:
        await clock.sleep(7)
        return event.outcome.error is not None

    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=5, should_handle=slow, on_retry=events.append)
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError, clock=clock, takes=3))
    assert [event.duration for event in events] == [3.0, 3.0]


@pytest.mark.anyio
async def test_max_delay_caps_what_is_waited_and_reported() -> None:
    """RT-22: linear from 2 s under a cap of 123 ms reports and waits 123 ms every time."""
    clock = VirtualClock(autojump=True)
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=clock)
        .add_retry(delay=2, backoff_type="linear", max_delay="123ms", on_retry=events.append)
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    assert [event.delay for event in events] == [0.123] * 3
    assert clock.now() == pytest.approx(0.369)


@pytest.mark.anyio
async def test_infinite_retries_survive_thousands_of_failures() -> None:
    """RT-16: with jittered exponential delays under a cap, 2,049 failures end in the success."""
    clock = VirtualClock(autojump=True)
    delays: list[float] = []
    pipeline = (
        B(clock=clock)
        .add_retry(
            max_retry_attempts=math.inf,
            backoff_type="exponential",
            use_jitter=True,
            max_delay=30,
            on_retry=lambda event: delays.append(event.delay),
        )
        .build()
    )
    assert await pipeline.execute(Scripted(*[ConnectionError] * 2_049, 1)) == 1
    assert len(delays) == 2_049
    assert all(0 < delay <= 30 for delay in delays)


@pytest.mark.anyio
async def test_with_infinite_attempts_none_is_the_last() -> None:
    """RT-45: attempts are numbered on and on, and each failure is retried."""
    numbers: list[int] = []
    pipeline = (
        B()
        .add_retry(
            max_retry_attempts=math.inf,
            delay=0,
            on_retry=lambda event: numbers.append(event.attempt),
        )
        .build()
    )
    assert await pipeline.execute(Scripted(*[ConnectionError] * 300, 1)) == 1
    assert numbers == list(range(300))


# ---- Polly: delay_generator ---------------------------------------------------------------------


@pytest.mark.anyio
async def test_generated_delays_are_used_and_reported() -> None:
    """RT-23: a generator is asked once a retry; what it gives is waited and reported."""
    clock = VirtualClock(autojump=True)
    events: list[RetryEvent] = []
    asked: list[RetryDelayEvent] = []

    def delay(event: RetryDelayEvent) -> str:
        asked.append(event)
        return "120ms"

    pipeline = B(clock=clock).add_retry(delay_generator=delay, on_retry=events.append).build()
    await pipeline.settle(Scripted(ConnectionError))
    assert len(asked) == 3
    assert [event.delay for event in events] == [0.12] * 3
    assert clock.now() == pytest.approx(0.36)


@pytest.mark.anyio
@pytest.mark.parametrize("given", [None, -1, -0.001, timedelta(seconds=-1), -math.inf])
async def test_a_generator_that_declines_leaves_the_computed_delay(given: Any) -> None:
    """RT-24, RT-26: `None` and negatives mean the configured delay."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=3, delay_generator=lambda event: given)
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    assert clock.now() == 6.0


@pytest.mark.anyio
async def test_a_generated_delay_of_zero_does_not_touch_the_clock() -> None:
    """RT-25: 0 is a value: retries go on although time stands still."""
    clock = VirtualClock()
    fn = Scripted(ConnectionError, ConnectionError, 1)
    pipeline = B(clock=clock).add_retry(delay=3, delay_generator=lambda event: 0).build()
    assert await pipeline.execute(fn) == 1
    assert clock.now() == 0.0
    assert clock.pending == 0


@pytest.mark.anyio
async def test_a_generator_gets_context_numbers_and_outcomes() -> None:
    """RT-27: it sees attempts 0, 1, 2, what failed, and the execution's context."""
    errors = [ConnectionError(number) for number in range(4)]
    asked: list[RetryDelayEvent] = []

    def delay(event: RetryDelayEvent) -> int:
        asked.append(event)
        return 0

    context = ResilienceContext("key")
    pipeline = B().add_retry(delay_generator=delay).build()
    await pipeline.settle(Scripted(*errors), context=context)
    assert [event.attempt for event in asked] == [0, 1, 2]
    assert [event.outcome.error for event in asked] == errors[:3]
    assert all(event.context is context for event in asked)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "given", [5, 5.0, timedelta(seconds=5), "5s", "5000ms"], ids=lambda value: repr(value)
)
async def test_a_generator_may_give_any_duration_form(given: Any) -> None:
    """Small print: generators may return any duration form."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock).add_retry(max_retry_attempts=1, delay_generator=lambda e: given).build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    assert clock.now() == 5.0


@pytest.mark.anyio
async def test_a_generator_may_be_a_coroutine_function() -> None:
    """A generator's awaitable answer is awaited."""
    clock = VirtualClock(autojump=True)

    async def delay(event: RetryDelayEvent) -> float:
        await checkpoint()
        return 4.0

    pipeline = B(clock=clock).add_retry(max_retry_attempts=1, delay_generator=delay).build()
    await pipeline.settle(Scripted(ConnectionError))
    assert clock.now() == 4.0


@pytest.mark.anyio
async def test_a_generated_delay_is_not_capped_by_max_delay() -> None:
    """`max_delay` caps the computed delay only."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=1, max_delay=2, delay_generator=lambda e: 30)
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    assert clock.now() == 30.0


@pytest.mark.anyio
@pytest.mark.parametrize("given", [True, math.nan, "soon", b"5s", [5]])
async def test_a_generator_that_gives_no_duration_is_an_error(given: Any) -> None:
    """What is no duration ends the call with a message that names the option and shows the value."""
    pipeline = B().add_retry(delay_generator=lambda event: given).build()
    fn = Scripted(ConnectionError("down"))
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, OptionsError)
    assert "delay_generator" in str(error)
    assert repr(given) in str(error)
    assert any(isinstance(each, ConnectionError) for each in contexts_of(error))
    assert fn.calls == 1


# ---- Polly: outcomes, defaults, context ---------------------------------------------------------


@pytest.mark.anyio
async def test_settle_captures_what_the_last_attempt_raised() -> None:
    """RT-35: the exception ends in the outcome, nothing is raised."""
    error = ConnectionError("down")
    outcome = await B().add_retry(delay=0).build().settle(Scripted(error))
    assert outcome == Failure(error)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("item", "calls"),
    [
        (ConnectionError, 2),
        (TimeoutError, 2),
        (ValueError, 2),
        (TimeoutRejectedError("of another pipeline"), 2),
        (BrokenCircuitError("of another pipeline"), 2),
        (OptionsError("bad"), 2),
        (MisuseError("wrong"), 1),
        (FutureCancelledError, 1),
        (asyncio.CancelledError, 1),
        (None, 1),
        (False, 1),
        (-1, 1),
    ],
    ids=repr,
)
async def test_the_default_predicate(item: Any, calls: int) -> None:
    """RT-40: every `Exception` but misuse and cancelled futures is retried, results never are."""
    fn = Scripted(item)
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).build()
    came_out: object
    try:
        came_out = await pipeline.execute(fn)
    except BaseException as error:
        came_out = error
    assert came_out is item or type(came_out) is item
    assert fn.calls == calls


def test_defaults() -> None:
    """RT-41: three retries, constant 2 s, no jitter, no generator, no hook, named after its class."""
    retry = Retry()
    assert retry.max_retry_attempts == 3
    assert retry.delay == 2.0
    assert retry.backoff_type == "constant"
    assert retry.use_jitter is False
    assert retry.max_delay is None
    assert retry.delay_generator is None
    assert retry.on_retry is None
    assert retry.respect_retry_after is True
    assert retry.max_retry_after == 60.0
    assert retry.max_elapsed is None
    assert retry.name == "Retry"


_ATTEMPT = PropertyKey[list[str]]("seen")


@pytest.mark.anyio
async def test_a_property_of_the_caller_is_seen_by_hooks_and_attempts() -> None:
    """RT-43: what the caller put on the context is there in every attempt and hook, and afterwards."""
    context = ResilienceContext(properties={_ATTEMPT: []})

    async def fn() -> None:
        current_context().properties.get(_ATTEMPT).append("fn")
        raise ConnectionError

    def note(event: RetryEvent) -> None:
        event.context.properties.get(_ATTEMPT).append("hook")

    pipeline = B().add_retry(max_retry_attempts=2, delay=0, on_retry=note).build()
    await pipeline.settle(fn, context=context)
    assert context.properties.get(_ATTEMPT) == ["fn", "hook", "fn", "hook", "fn"]


@pytest.mark.anyio
async def test_one_retry_serves_results_of_several_types() -> None:
    """RT-44: one pipeline handles `"error"` of string calls and -1 of integer calls."""
    bad = handle_result(lambda value: value == "error") | handle_result(lambda value: value == -1)
    pipeline = B().add_retry(delay=0, should_handle=bad).build()
    assert await pipeline.execute(Scripted("error", "fine")) == "fine"
    assert await pipeline.execute(Scripted(-1, -1, 5)) == 5


@pytest.mark.anyio
async def test_the_attempt_number_is_on_the_context_from_zero() -> None:
    """`context.attempt` is this attempt's number."""
    numbers: list[int] = []

    async def fn() -> None:
        numbers.append(current_context().attempt)
        raise ConnectionError

    await B().add_retry(delay=0).build().settle(fn)
    assert numbers == [0, 1, 2, 3]


# ---- seed ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_first_success_runs_no_hook() -> None:
    """Seed RT-1: one call with the arguments given, no hook, no delay asked for."""
    events: list[object] = []
    fn = Scripted("value")
    pipeline = B().add_retry(on_retry=events.append, delay_generator=events.append).build()
    assert await pipeline.execute(fn, 1, "two") == "value"
    assert fn.arguments == [(1, "two")]
    assert events == []


@pytest.mark.anyio
async def test_two_failures_then_success() -> None:
    """Seed RT-2, RT-4, RT-5: the value comes out, a hook per retry in order, same arguments each time."""
    first, second = ConnectionError("first"), ConnectionError("second")
    fn = Scripted(first, second, "value")
    seen: list[tuple[int, Exception | None]] = []
    pipeline = (
        B()
        .add_retry(
            max_retry_attempts=2,
            delay=0,
            on_retry=lambda event: seen.append((event.attempt, event.outcome.error)),
        )
        .build()
    )
    assert await pipeline.execute(fn, [1], None) == "value"
    assert seen == [(0, first), (1, second)]
    assert fn.arguments == [([1], None)] * 3


@pytest.mark.anyio
async def test_what_the_predicate_refuses_comes_out_at_once() -> None:
    """Seed RT-6: one call, no hook, the same error object."""
    error = ValueError("fatal")
    events: list[RetryEvent] = []
    fn = Scripted(error)
    pipeline = B().add_retry(delay=0, should_handle=ConnectionError, on_retry=events.append).build()
    assert await raised_by(pipeline.execute, fn) is error
    assert fn.calls == 1
    assert events == []


@pytest.mark.anyio
async def test_a_transient_then_a_fatal_error() -> None:
    """Seed RT-7: the fatal one comes out, after two calls."""
    fatal = ValueError("fatal")
    fn = Scripted(ConnectionError("transient"), fatal)
    pipeline = B().add_retry(delay=0, should_handle=handle(ConnectionError)).build()
    assert await raised_by(pipeline.execute, fn) is fatal
    assert fn.calls == 2


@pytest.mark.anyio
async def test_the_predicate_is_asked_about_the_last_attempt_too() -> None:
    """It sees attempts 0 to 3 of four, the last for telemetry; the last outcome comes out anyhow."""
    numbers: list[int] = []

    def note(event: OutcomeEvent) -> bool:
        numbers.append(event.attempt)
        return True

    await B().add_retry(delay=0, should_handle=note).build().settle(Scripted(ConnectionError))
    assert numbers == [0, 1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({"delay": "100ms"}, [0, 0.1, 0.2]),
        ({"delay": 100, "backoff_type": "exponential"}, [0, 100, 300, 700, 1500]),
        ({"delay": 100, "backoff_type": "exponential", "max_delay": 150}, [0, 100, 250, 400]),
        ({"delay": 100, "backoff_type": "linear"}, [0, 100, 300, 600]),
        ({"delay": timedelta(minutes=1)}, [0, 60, 120]),
        ({"delay": "1m30s", "max_delay": timedelta(seconds=80)}, [0, 80, 160]),
    ],
    ids=str,
)
async def test_attempts_start_when_the_delays_say(
    options: dict[str, Any], starts: list[float]
) -> None:
    """Seed RT-9: attempts begin exactly where the formula and the cap put them."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(ConnectionError, clock=clock)
    options["max_retry_attempts"] = len(starts) - 1
    await B(clock=clock).add_retry(**options).build().settle(fn)
    assert fn.starts == pytest.approx(starts)


@pytest.mark.anyio
async def test_a_timeout_inside_is_retried() -> None:
    """Seed RT-11: each attempt gets a limit of its own, and its expiry is a failure like any other."""
    clock = VirtualClock(autojump=True)
    hang = Hanging()
    pipeline = B(clock=clock).add_retry(max_retry_attempts=2, delay=0).add_timeout(5).build()
    error = await raised_by(pipeline.execute, hang)
    assert isinstance(error, TimeoutRejectedError)
    assert hang.calls == hang.cancelled == 3
    assert clock.now() == 15.0


# ---- the collected cases ------------------------------------------------------------------------


@pytest.mark.anyio
async def test_case_rt_01_a_cancellation_is_shown_to_nobody() -> None:
    """Case RT-01: one call, the predicate never asked, the cancellation out within the same turn."""
    asked: list[OutcomeEvent] = []
    hooked: list[RetryEvent] = []

    def anything_but_value_errors(event: OutcomeEvent) -> bool:
        asked.append(event)
        return not isinstance(event.outcome.error, ValueError)

    hang = Hanging()
    pipeline = (
        B()
        .add_retry(
            max_retry_attempts=5,
            delay=0.01,
            should_handle=anything_but_value_errors,
            on_retry=hooked.append,
        )
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, hang)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert hang.calls == 1
    assert asked == []
    assert hooked == []


@pytest.mark.asyncio
async def test_case_rt_01_a_task_cancel_comes_out_within_the_turn() -> None:
    """Case RT-01 with asyncio's own cancellation."""
    hang = Hanging()
    task = asyncio.create_task(
        B().add_retry(max_retry_attempts=5, delay=0.01, should_handle=always).build().execute(hang)
    )
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert task.cancelled()
    assert hang.calls == 1


@pytest.mark.anyio
async def test_case_rt_03_exponential_delays_do_not_overflow() -> None:
    """Case RT-03: past attempt 1024 every delay is still the maximum, and the poller lives."""
    clock = VirtualClock(autojump=True)
    delays: list[float] = []
    pipeline = (
        B(clock=clock)
        .add_retry(
            max_retry_attempts=math.inf,
            delay=1,
            backoff_type="exponential",
            max_delay=5,
            on_retry=lambda event: delays.append(event.delay),
        )
        .build()
    )
    await pipeline.execute(Scripted(*[ConnectionError] * 1_100, 1))
    assert delays[:3] == [1.0, 2.0, 4.0]
    assert set(delays[3:]) == {5.0}


@pytest.mark.anyio
async def test_case_rt_03_an_overflowing_delay_without_maximum_waits_for_ever() -> None:
    """Case RT-03: without a maximum what no float holds is a wait until cancelled."""
    clock = VirtualClock()
    delays: list[float] = []
    pipeline = (
        B(clock=clock)
        .add_retry(
            delay=1e308,
            backoff_type="linear",
            # The first wait is skipped, so that the second one can be looked at.
            delay_generator=lambda event: 0 if event.attempt == 0 else None,
            on_retry=lambda event: delays.append(event.delay),
        )
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Scripted(ConnectionError))
        await clock.advance(1e12)
        assert delays == [0.0, math.inf]
        assert not call.done
        call.cancel()


@pytest.mark.anyio
@pytest.mark.parametrize("backoff_type", ["constant", "linear", "exponential"])
@pytest.mark.parametrize("use_jitter", [True, "full"])
async def test_case_rt_05_jitter_stays_below_the_maximum(
    backoff_type: Any, use_jitter: Any
) -> None:
    """Case RT-05: the cap comes last, and the delay in the event is the one really waited."""
    clock = VirtualClock(autojump=True)
    delays: list[float] = []
    fn = Scripted(ConnectionError, clock=clock)
    pipeline = (
        B(clock=clock)
        .add_retry(
            delay=10,
            max_delay=10,
            backoff_type=backoff_type,
            use_jitter=use_jitter,
            max_retry_attempts=20,
            on_retry=lambda event: delays.append(event.delay),
        )
        .build()
    )
    for _ in range(10):
        delays.clear()
        fn.starts.clear()
        await pipeline.settle(fn)
        assert len(delays) == 20
        assert all(0 <= delay <= 10 for delay in delays)
        waits = [later - earlier for earlier, later in itertools.pairwise(fn.starts)]
        assert waits == pytest.approx(delays)


@pytest.mark.anyio
async def test_case_rt_09_no_pause_outlives_the_limit() -> None:
    """Case RT-09: the outcome comes out at 4, when the next attempt could only start at 8."""
    clock = VirtualClock()
    fn = Scripted(ConnectionError, clock=clock)
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=10, delay=4, max_elapsed=5, on_retry=events.append)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await clock.advance(4)
        await tick()
        assert call.done
    assert isinstance(call.error, ConnectionError)
    assert fn.starts == [0.0, 4.0]
    # Small print: without waiting and without `on_retry`.
    assert [event.attempt for event in events] == [0]


@pytest.mark.anyio
async def test_case_rt_11_concurrent_calls_share_no_counter() -> None:
    """Case RT-11: fifty calls at once make four attempts each, and each one's events say 0, 1, 2."""
    clock = VirtualClock(autojump=True)
    numbers: dict[object, list[int]] = {index: [] for index in range(50)}

    def log(event: RetryEvent) -> None:
        error = event.outcome.error
        assert error is not None
        numbers[error.args[0]].append(event.attempt)

    pipeline = B(clock=clock).add_retry(delay=0.01, on_retry=log).build()
    scripts = [Scripted(ConnectionError(index), clock=clock, takes=0.001) for index in range(50)]
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, script) for script in scripts]
    assert [script.calls for script in scripts] == [4] * 50
    assert all(seen == [0, 1, 2] for seen in numbers.values())
    assert [call.value.error.args[0] for call in calls] == list(range(50))
    assert {call.value.attempt_count for call in calls} == {4}


@pytest.mark.anyio
@pytest.mark.parametrize("instances", [1, 2, 3])
async def test_case_rt_13_a_stored_exception_does_not_grow(instances: int) -> None:
    """Case RT-13: a traceback's length does not depend on the attempts of one execution, whether one
    stored exception is raised again and again or several take turns.
    """
    lengths: set[int] = set()
    for attempts in (instances, 20 * instances):
        stored = [ConnectionError(number) for number in range(instances)]
        turns = itertools.cycle(stored)

        async def fn(turns: Iterator[Exception] = turns) -> None:
            raise next(turns)

        pipeline = B().add_retry(max_retry_attempts=attempts, delay=0).build()
        lengths.add(traceback_length(await raised_by(pipeline.execute, fn)))
    assert len(lengths) == 1


@pytest.mark.anyio
async def test_case_rt_13_one_retry_inside_another_does_not_grow_it_either() -> None:
    """Case RT-13: nested retries and other layers in between add no entry per attempt."""
    lengths: set[int] = set()
    for attempts in (1, 8):
        stored = ConnectionError("down")

        async def fn(stored: Exception = stored) -> None:
            raise stored

        pipeline = (
            B()
            .add_retry(max_retry_attempts=attempts, delay=0)
            .add_timeout(60)
            .add_retry(max_retry_attempts=attempts, delay=0)
            .build()
        )
        lengths.add(traceback_length(await raised_by(pipeline.execute, fn)))
    assert len(lengths) == 1


@pytest.mark.anyio
async def test_the_last_traceback_shows_where_the_last_attempt_failed() -> None:
    """What comes out still ends in the callback that raised it."""
    stored = ConnectionError("down")

    async def the_culprit() -> None:
        raise stored

    error = await raised_by(B().add_retry(delay=0).build().execute, the_culprit)
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    assert entry is not None
    assert entry.tb_frame.f_code.co_name == "the_culprit"


@pytest.mark.anyio
async def test_case_rt_15_a_write_is_not_sent_twice() -> None:
    """Case RT-15: timed out says nothing about whether it happened: no repetition, one charge."""
    clock = VirtualClock(autojump=True)
    charge = Hanging()
    pipeline = B(clock=clock).add_retry(delay=0).add_circuit_breaker().add_timeout(1).build()
    error = await raised_by(partial(pipeline.execute, charge, idempotent=False))
    assert isinstance(error, TimeoutRejectedError)
    assert charge.calls == 1


@pytest.mark.anyio
async def test_case_rt_15_what_never_reached_the_callback_is_repeated() -> None:
    """Case RT-15: an open circuit refuses before the callback, so all four attempts are made."""
    control = CircuitBreakerControl()
    charge = Scripted("charged")
    pipeline = B().add_retry(delay=0).add_circuit_breaker(control=control).add_timeout(1).build()
    control.isolate()
    outcome = await pipeline.settle(charge, idempotent=False)
    assert isinstance(outcome, Rejected)
    assert charge.calls == 0
    assert len(outcome.attempts) == 4


@pytest.mark.anyio
async def test_case_rt_17_an_open_circuit_is_not_hammered() -> None:
    """Case RT-17: the refusal's `retry_after` is what is waited, and the attempt after it succeeds."""
    clock = VirtualClock()
    waits: list[float] = []
    pipeline = (
        B(clock=clock)
        .add_retry(
            max_retry_attempts=3, delay=0.01, on_retry=lambda event: waits.append(event.delay)
        )
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration=5)
        .build()
    )
    fn = Scripted(ConnectionError, ConnectionError, 1)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await clock.advance(0.02)
        # The second failure opened the circuit, the third attempt was refused.
        assert waits == [0.01, 0.01, pytest.approx(4.99)]
        assert fn.calls == 2
        await clock.advance(4.9)
        assert not call.done
        await clock.advance(0.1)
        assert call.value == 1
    assert fn.calls == 3


# ---- max_elapsed --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_retry_may_start_exactly_at_the_limit() -> None:
    """No retry starts *later*: one at the very end of `max_elapsed` is made."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(ConnectionError, clock=clock)
    await B(clock=clock).add_retry(delay=4, max_elapsed=8).build().settle(fn)
    assert fn.starts == [0.0, 4.0, 8.0]


@pytest.mark.anyio
async def test_the_running_attempt_is_never_cut() -> None:
    """An attempt that outlives `max_elapsed` runs to its end, and its value comes out."""
    clock = VirtualClock(autojump=True)
    fn = Scripted("late", clock=clock, takes=100)
    pipeline = B(clock=clock).add_retry(max_elapsed=5).build()
    assert await pipeline.execute(fn) == "late"
    assert clock.now() == 100.0


@pytest.mark.anyio
async def test_the_limit_counts_from_the_start_of_the_first_attempt() -> None:
    """Attempts and waits alike use it up; the second failure at 7 can't be followed by one at 9."""
    clock = VirtualClock(autojump=True, start=1_000)
    fn = Scripted(ConnectionError, clock=clock, takes=2.5)
    await B(clock=clock).add_retry(delay=2, max_elapsed=8).build().settle(fn)
    assert fn.starts == [1_000.0, 1_004.5]
    assert clock.now() == 1_007.0


@pytest.mark.anyio
async def test_a_hook_that_takes_its_time_lets_no_retry_start_too_late() -> None:
    """`max_elapsed` is about when a retry starts, whatever used the time up."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(ConnectionError("down"), clock=clock)

    async def slow(event: RetryEvent) -> None:
        await clock.sleep(30)

    pipeline = B(clock=clock).add_retry(delay=1, max_elapsed=10, on_retry=slow).build()
    error = await raised_by(pipeline.execute, fn)
    assert str(error) == "down"
    assert fn.starts == [0.0]
    assert clock.now() == 30.0


@pytest.mark.anyio
async def test_a_result_given_up_at_the_limit_comes_out_open() -> None:
    """The outcome in hand comes out as it is, so a result is not closed."""
    clock = VirtualClock(autojump=True)
    result = Closable()
    pipeline = B(clock=clock).add_retry(delay=4, max_elapsed=3, should_handle=always).build()
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0


@pytest.mark.anyio
async def test_retry_after_beyond_max_elapsed_is_not_waited_for() -> None:
    """A demand that would overrun the limit ends the call at once."""
    clock = VirtualClock(autojump=True)
    refused = BrokenCircuitError("elsewhere", retry_after=20)
    pipeline = B(clock=clock).add_retry(delay=1, max_elapsed=10).build()
    assert await raised_by(pipeline.execute, Scripted(refused)) is refused
    assert clock.now() == 0.0


@pytest.mark.anyio
async def test_max_elapsed_zero_allows_retries_that_start_at_once() -> None:
    """With no time passing, a retry at delay 0 does not start later than the first attempt."""
    clock = VirtualClock()
    fn = Scripted(ConnectionError, 1)
    assert await B(clock=clock).add_retry(delay=0, max_elapsed=0).build().execute(fn) == 1


# ---- jitter -------------------------------------------------------------------------------------


def _delays(random: Callable[[], float], **options: Any) -> list[float]:
    """Run one failing call and give the delays that were reported."""
    delays: list[float] = []
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock, random=random)
        .add_retry(on_retry=lambda event: delays.append(event.delay), **options)
        .build()
    )
    anyio.run(pipeline.settle, Scripted(ConnectionError))
    return delays


@pytest.mark.parametrize(
    ("options", "draws", "expected"),
    [
        ({"delay": 1, "use_jitter": True}, [0, 0.4, 0.6], [0.75, 0.95, 1.05]),
        (
            {"delay": 1, "backoff_type": "linear", "use_jitter": True},
            [0, 0.5, 0.4],
            [0.75, 2.0, 2.85],
        ),
        (
            {"delay": 1, "backoff_type": "exponential", "use_jitter": True},
            [0.1, 0.9, 0.3],
            [0.4285109, 2.2158896, 0.8568731],
        ),
        (
            {"delay": 8, "backoff_type": "exponential", "use_jitter": "full", "max_delay": 20},
            [0.5, 0.25, 0.5],
            [4.0, 4.0, 10.0],
        ),
    ],
    ids=["constant", "linear", "exponential", "full"],
)
def test_the_builders_random_makes_jitter_reproducible(
    options: dict[str, Any], draws: list[float], expected: list[float]
) -> None:
    """Small print: jitter by formula, one draw of the builder's `random=` for each delay."""
    source = iter(draws)
    assert _delays(lambda: next(source), **options) == pytest.approx(expected)
    assert next(source, None) is None


@pytest.mark.anyio
async def test_decorrelated_jitter_begins_anew_with_each_execution() -> None:
    """The previous point of the curve belongs to the execution, so two calls draw equal series."""
    clock = VirtualClock(autojump=True)
    delays: list[float] = []
    pipeline = (
        B(clock=clock, random=lambda: 0.5)
        .add_retry(
            delay=1,
            backoff_type="exponential",
            use_jitter=True,
            on_retry=lambda event: delays.append(event.delay),
        )
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    await pipeline.settle(Scripted(ConnectionError))
    assert delays[:3] == pytest.approx([0.8974049, 1.0930035, 2.0357480])
    assert delays[3:] == delays[:3]
