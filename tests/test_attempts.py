"""The history of attempts that `settle` gives: one record for each try of a retry."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    Attempt,
    Failure,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    RetryEvent,
    Success,
    TimeoutRejectedError,
    current_context,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Hanging, Scripted, spawn, tick

B = ResiliencePipelineBuilder


@pytest.mark.anyio
async def test_each_try_has_a_record_with_numbers_delays_and_durations() -> None:
    """Numbered from 0, the delay before it (0 before the first), durations in virtual seconds."""
    clock = VirtualClock(autojump=True)
    first, second = ConnectionError("first"), ConnectionError("second")
    fn = Scripted(first, second, "value", clock=clock, takes=3)
    pipeline = B(clock=clock).add_retry(delay=5, backoff_type="linear").build()
    outcome = await pipeline.settle(fn)
    assert outcome == Success("value")
    assert outcome.attempts == (
        Attempt(number=0, outcome=Failure(first), duration=3.0, delay=0.0),
        Attempt(number=1, outcome=Failure(second), duration=3.0, delay=5.0),
        Attempt(number=2, outcome=Success("value"), duration=3.0, delay=10.0),
    )
    assert outcome.attempt_count == 3


@pytest.mark.anyio
@pytest.mark.parametrize("start", [0.0, 1e6])
async def test_durations_do_not_depend_on_where_the_clock_stands(start: float) -> None:
    """A clock at zero is a clock like any other."""
    clock = VirtualClock(autojump=True, start=start)
    fn = Scripted(ConnectionError, 1, clock=clock, takes=2)
    outcome = await B(clock=clock).add_retry(delay=1).build().settle(fn)
    assert [attempt.duration for attempt in outcome.attempts] == [2.0, 2.0]


@pytest.mark.anyio
async def test_the_duration_is_that_of_the_try_alone() -> None:
    """Neither predicate, hook nor wait is part of it."""
    clock = VirtualClock(autojump=True)

    async def slow(event: object) -> bool:
        await clock.sleep(100)
        return True

    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=50, should_handle=slow, on_retry=slow)
        .build()
    )
    outcome = await pipeline.settle(Scripted(ConnectionError, clock=clock, takes=2))
    assert [attempt.duration for attempt in outcome.attempts] == [2.0, 2.0]
    assert [attempt.delay for attempt in outcome.attempts] == [0.0, 50.0]


@pytest.mark.anyio
async def test_a_first_success_that_a_fallback_replaces_is_noted_as_it_was() -> None:
    """The record is of the try, and the outcome of the call."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_fallback(fallback_value="better", should_handle=handle_result(lambda it: it == "poor"))
        .add_retry()
        .build()
    )
    outcome = await pipeline.settle(Scripted("poor", clock=clock, takes=2))
    assert outcome == Success("better")
    assert outcome.attempts == (Attempt(number=0, outcome=Success("poor"), duration=2.0),)


@pytest.mark.anyio
async def test_a_first_success_of_a_call_that_fails_is_noted_as_it_was() -> None:
    """Here a hook of a strategy around raises, and the try had given None."""

    def fail(event: object) -> None:
        raise LookupError

    pipeline = (
        B()
        .add_fallback(
            fallback_value=1, should_handle=handle_result(lambda it: it is None), on_fallback=fail
        )
        .add_retry()
        .build()
    )
    outcome = await pipeline.settle(Scripted(None))
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, LookupError)
    assert [attempt.outcome for attempt in outcome.attempts] == [Success(None)]


@pytest.mark.anyio
async def test_a_first_success_is_one_try() -> None:
    """With a retry that was not needed there is one record."""
    outcome = await B().add_retry().build().settle(Scripted(1))
    assert [attempt.number for attempt in outcome.attempts] == [0]
    assert outcome.attempts[0].outcome == Success(1)
    assert outcome.attempts[0].hedged is False
    assert outcome.attempt_count == 1


@pytest.mark.anyio
async def test_without_a_retry_there_is_a_single_record() -> None:
    """A pipeline that makes no attempts of its own made one, successful or not."""
    clock = VirtualClock(autojump=True)
    error = ConnectionError("down")
    for pipeline in (B(clock=clock).build(), B(clock=clock).add_timeout(60).build()):
        outcome: Any = await pipeline.settle(Scripted("value", clock=clock, takes=4))
        assert outcome.attempts == (Attempt(number=0, outcome=Success("value"), duration=4.0),)
        outcome = await pipeline.settle(Scripted(error, clock=clock, takes=4))
        assert outcome.attempts == (Attempt(number=0, outcome=Failure(error), duration=4.0),)
        assert outcome.attempt_count == 1


@pytest.mark.anyio
async def test_delays_are_those_really_waited() -> None:
    """Generated delays and demands of a server stand in the records as they were waited."""
    clock = VirtualClock(autojump=True)
    refused = TimeoutRejectedError("elsewhere", retry_after=30)
    pipeline = (
        B(clock=clock)
        .add_retry(delay=1, delay_generator=lambda event: "7s" if event.attempt == 0 else None)
        .build()
    )
    outcome = await pipeline.settle(Scripted(ConnectionError, refused, ConnectionError, 1))
    assert [attempt.delay for attempt in outcome.attempts] == [0.0, 7.0, 30.0, 1.0]
    assert clock.now() == 38.0


@pytest.mark.anyio
async def test_numbers_agree_with_the_contexts_and_the_hooks() -> None:
    """Small print: records are numbered like `context.attempt`."""
    inside: list[int] = []
    hooked: list[int] = []

    async def fn() -> None:
        inside.append(current_context().attempt)
        raise ConnectionError

    def note(event: RetryEvent) -> None:
        hooked.append(event.attempt)

    outcome = await B().add_retry(delay=0, on_retry=note).build().settle(fn)
    assert [attempt.number for attempt in outcome.attempts] == inside == [0, 1, 2, 3]
    assert hooked == [0, 1, 2]


@pytest.mark.anyio
async def test_the_latest_64_are_kept_and_all_are_counted() -> None:
    """Of 200 tries the last 64 have records, numbered as they were; the count is the true one."""
    pipeline = B().add_retry(max_retry_attempts=math.inf, delay=0).build()
    outcome = await pipeline.settle(Scripted(*[ConnectionError] * 199, 1))
    assert [attempt.number for attempt in outcome.attempts] == list(range(136, 200))
    assert outcome.attempt_count == 200


@pytest.mark.anyio
@pytest.mark.parametrize("failures", [62, 63, 64])
async def test_around_the_bound(failures: int) -> None:
    """63, 64 and 65 tries: nothing is lost before it has to be."""
    pipeline = B().add_retry(max_retry_attempts=100, delay=0).build()
    outcome = await pipeline.settle(Scripted(*[ConnectionError] * failures, 1))
    assert len(outcome.attempts) == min(failures + 1, 64)
    assert outcome.attempt_count == failures + 1


@pytest.mark.anyio
async def test_nested_retries_show_the_inner_tries_in_order() -> None:
    """Of all outer attempts, in order; the count counts the same."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(ConnectionError, clock=clock, takes=1)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=10)
        .add_retry(max_retry_attempts=2, delay=2)
        .build()
    )
    outcome = await pipeline.settle(fn)
    assert fn.calls == 6
    assert [attempt.number for attempt in outcome.attempts] == [0, 1, 2, 0, 1, 2]
    assert [attempt.duration for attempt in outcome.attempts] == [1.0] * 6
    assert [attempt.delay for attempt in outcome.attempts][:3] == [0.0, 2.0, 2.0]
    assert [attempt.delay for attempt in outcome.attempts][4:] == [2.0, 2.0]
    assert outcome.attempt_count == 6


@pytest.mark.anyio
async def test_a_retry_in_a_nested_pipeline_is_the_innermost_too() -> None:
    """`add_pipeline` makes its retry this pipeline's own."""
    inner = B().add_retry(max_retry_attempts=2, delay=0).build()
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).add_pipeline(inner).build()
    outcome = await pipeline.settle(Scripted(ConnectionError))
    assert [attempt.number for attempt in outcome.attempts] == [0, 1, 2, 0, 1, 2]
    assert outcome.attempt_count == 6


@pytest.mark.anyio
async def test_a_retry_of_another_pipeline_in_the_callback_leaves_no_record_here() -> None:
    """What the callback does is its own affair."""
    inner = B().add_retry(max_retry_attempts=5, delay=0).build()
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).build()
    outcome = await pipeline.settle(inner.execute, Scripted(ConnectionError))
    assert [attempt.number for attempt in outcome.attempts] == [0, 1]
    assert outcome.attempt_count == 2


@pytest.mark.anyio
async def test_an_attempt_that_never_reached_the_inner_retry_is_recorded_by_the_outer() -> None:
    """A refusal between the two retries is a try of the outer one."""
    limits = iter([0, 5])
    pipeline = (
        B()
        .add_retry(max_retry_attempts=1, delay=0)
        .add_timeout(5, timeout_generator=lambda event: next(limits))
        .add_retry(max_retry_attempts=1, delay=0)
        .build()
    )
    outcome = await pipeline.settle(Scripted(ConnectionError, 1))
    assert [type(attempt.outcome) for attempt in outcome.attempts] == [Rejected, Failure, Success]
    assert outcome.attempt_count == 3


@pytest.mark.anyio
async def test_refused_and_timed_out_tries_are_shown_as_rejected() -> None:
    """Records show outcomes as `settle` would."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_retry(max_retry_attempts=1, delay=0).add_timeout(5).build()
    outcome = await pipeline.settle(Hanging())
    assert isinstance(outcome, Rejected)
    assert [type(attempt.outcome) for attempt in outcome.attempts] == [Rejected, Rejected]
    assert [attempt.duration for attempt in outcome.attempts] == [5.0, 5.0]


@pytest.mark.anyio
async def test_handled_results_are_recorded_as_successes_of_their_try() -> None:
    """What was returned, whether it was kept or not."""
    bad = handle_result(lambda value: value == "error")
    pipeline = B().add_retry(delay=0, should_handle=bad).build()
    outcome = await pipeline.settle(Scripted("error", "fine"))
    assert [attempt.outcome for attempt in outcome.attempts] == [Success("error"), Success("fine")]


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["should_handle", "on_retry", "delay_generator"])
async def test_a_try_is_recorded_although_user_code_raised_about_it(place: str) -> None:
    """The try happened; what came out of the call is the user's error."""

    def fail(event: object) -> Any:
        raise KeyError(place)

    error = ConnectionError("down")
    options: dict[str, Any] = {"delay": 0, place: fail}
    outcome = await B().add_retry(**options).build().settle(Scripted(error))
    assert type(outcome.error) is KeyError
    assert [attempt.outcome for attempt in outcome.attempts] == [Failure(error)]


@pytest.mark.anyio
async def test_the_history_is_no_part_of_equality() -> None:
    """Two outcomes with equal values are equal, however they came about."""
    pipeline = B().add_retry(delay=0).build()
    at_once = await pipeline.settle(Scripted(1))
    after_all = await pipeline.settle(Scripted(ConnectionError, 1))
    assert at_once == after_all == Success(1)
    assert len(at_once.attempts) != len(after_all.attempts)


@pytest.mark.anyio
async def test_each_execution_has_its_own_history() -> None:
    """Concurrent calls, and calls with one context after another, do not see each other's tries."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_retry(delay=1).build()
    async with anyio.create_task_group() as tasks:
        calls = [
            spawn(tasks, pipeline.settle, Scripted(*[ConnectionError] * failures, 1, clock=clock))
            for failures in range(4)
        ]
    assert [call.value.attempt_count for call in calls] == [1, 2, 3, 4]
    context = ResilienceContext()
    for _ in range(2):
        outcome = await pipeline.settle(Scripted(ConnectionError, 1), context=context)
        assert outcome.attempt_count == 2


@pytest.mark.anyio
async def test_records_are_frozen_and_copy() -> None:
    """One frozen record per try, equal to its copy."""
    outcome = await B().add_retry(delay=0).build().settle(Scripted(ConnectionError, 1))
    record: Any = outcome.attempts[1]
    assert copy.copy(record) == record
    with pytest.raises(AttributeError):
        record.number = 7


@pytest.mark.anyio
async def test_a_cancelled_call_has_no_outcome() -> None:
    """Cancellation passes through `settle`, whatever tries were made."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_retry(delay=10).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, partial(pipeline.settle, Scripted(ConnectionError)))
        await clock.advance(5)
        call.cancel()
        await tick()
        assert call.cancelled
        assert call.value is None
