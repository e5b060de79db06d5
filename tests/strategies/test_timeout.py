"""Timeout: what it cancels, whose cancellation it converts, and what it keeps.

Rows `TO-nn` are those of the Polly dossier, `seed TO-n` those of the first seed's tests, `case TO-nn` those of the
collected cases. What is marked `realtime` runs on the loop's own clock, which has a path of its own in the runtime; the
outcome of each depends on no machine's speed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    ExecutionRejectedError,
    Failure,
    MisuseError,
    OptionsError,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    ResilienceStream,
    Success,
    Timeout,
    TimeoutEvent,
    TimeoutGeneratorEvent,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Hanging, Scripted, contexts_of, raised_by, spawn, tick

B = ResiliencePipelineBuilder


def limited(clock: VirtualClock | None, *limits: float) -> Any:
    """Build nested timeouts, outermost first, named by their places."""
    builder: Any = B("limited", clock=clock)
    for place, limit in enumerate(limits):
        builder.add_timeout(limit, name=f"limit {place}")
    return builder.build()


# ---- Polly --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_expiry_cancels_the_inside_and_is_reported_once() -> None:
    """TO-01: after 12 s the callback is cancelled; the hook got the limit and the context, once."""
    clock = VirtualClock()
    events: list[TimeoutEvent] = []
    hang = Hanging()
    context = ResilienceContext("key")
    pipeline = B(clock=clock).add_timeout(12, on_timeout=events.append).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, partial(pipeline.execute, hang, context=context))
        await clock.advance(11.999)
        assert not call.done
        await clock.advance(0.001)
        assert call.done
    assert isinstance(call.error, TimeoutRejectedError)
    assert hang.cancelled == 1
    assert [(event.timeout, event.context) for event in events] == [(12.0, context)]


@pytest.mark.anyio
async def test_the_hook_is_not_cancelled_itself() -> None:
    """TO-01: the hook runs after the cancellation, so what it awaits is not cancelled."""
    clock = VirtualClock(autojump=True)
    noted: list[float] = []

    async def hook(event: TimeoutEvent) -> None:
        await clock.sleep(3)
        noted.append(clock.now())

    pipeline = B(clock=clock).add_timeout(12, on_timeout=hook).build()
    assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert noted == [15.0]


@pytest.mark.anyio
@pytest.mark.parametrize("generated", [0, 0.0, -1, -math.inf, timedelta(seconds=-1), "0s"])
async def test_a_generated_limit_that_has_passed_starts_nothing(generated: Any) -> None:
    """TO-02 as the contract has it: zero or less is used up before the start."""
    events: list[TimeoutEvent] = []
    fn = Scripted(1)
    pipeline = (
        B()
        .add_timeout(5, timeout_generator=lambda event: generated, on_timeout=events.append)
        .build()
    )
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, TimeoutRejectedError)
    assert error.timeout == 0.0
    assert fn.calls == 0
    assert [event.timeout for event in events] == [0.0]


@pytest.mark.anyio
@pytest.mark.parametrize("generated", [None, math.inf])
async def test_a_generated_limit_of_none_or_infinity_is_no_limit(generated: float | None) -> None:
    """TO-02: such a call may take as long as it likes, whatever the static limit says."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(5, timeout_generator=lambda event: generated).build()
    assert await pipeline.execute(Scripted("late", clock=clock, takes=1e6)) == "late"


@pytest.mark.anyio
async def test_the_generator_is_asked_with_the_context_at_every_entry() -> None:
    """TO-03: once for each time the strategy is entered, a retry's attempts included."""
    asked: list[TimeoutGeneratorEvent] = []
    context = ResilienceContext("key")

    def limit(event: TimeoutGeneratorEvent) -> int:
        asked.append(event)
        return 5

    pipeline = B().add_retry(delay=0).add_timeout(1, timeout_generator=limit).build()
    await pipeline.execute(Scripted(ConnectionError, ConnectionError, 1), context=context)
    assert [event.context for event in asked] == [context] * 3
    await pipeline.execute(Scripted(1), context=context)
    assert len(asked) == 4


@pytest.mark.anyio
@pytest.mark.parametrize("generated", [2, 20])
async def test_the_generated_limit_takes_the_place_of_the_static_one(generated: int) -> None:
    """TO-03: longer or shorter; the error and the hook name what held for this call."""
    clock = VirtualClock(autojump=True)
    events: list[TimeoutEvent] = []
    pipeline = (
        B(clock=clock)
        .add_timeout(5, timeout_generator=lambda event: generated, on_timeout=events.append)
        .build()
    )
    error = await raised_by(pipeline.execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert error.timeout == events[0].timeout == clock.now() == generated


@pytest.mark.anyio
@pytest.mark.parametrize("generated", [3, 3.0, timedelta(seconds=3), "3s", "3000ms"], ids=repr)
async def test_a_generator_may_give_any_duration_form(generated: Any) -> None:
    """Small print: generators may return any duration form."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(9, timeout_generator=lambda event: generated).build()
    await raised_by(pipeline.execute, Hanging())
    assert clock.now() == 3.0


@pytest.mark.anyio
async def test_a_generator_may_be_a_coroutine_function() -> None:
    """Its awaitable answer is awaited, and the time it takes is not part of the limit."""
    clock = VirtualClock(autojump=True)

    async def limit(event: TimeoutGeneratorEvent) -> float:
        await clock.sleep(100)
        return 3.0

    pipeline = B(clock=clock).add_timeout(9, timeout_generator=limit).build()
    await raised_by(pipeline.execute, Hanging())
    assert clock.now() == 103.0


@pytest.mark.anyio
@pytest.mark.parametrize("generated", [True, math.nan, "soon", [3]], ids=repr)
async def test_a_generator_that_gives_no_duration_is_an_error(generated: Any) -> None:
    """The message names the option and shows the value; nothing is started."""
    fn = Scripted(1)
    pipeline = B().add_timeout(9, timeout_generator=lambda event: generated).build()
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, OptionsError)
    assert "timeout_generator" in str(error)
    assert repr(generated) in str(error)
    assert fn.calls == 0


@pytest.mark.anyio
async def test_without_a_generator_the_static_limit_holds_and_is_reported() -> None:
    """TO-04: the hook and the error name the configured limit."""
    clock = VirtualClock(autojump=True)
    events: list[TimeoutEvent] = []
    pipeline = B(clock=clock).add_timeout("1m30s", on_timeout=events.append).build()
    error = await raised_by(pipeline.execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert error.timeout == events[0].timeout == 90.0


@pytest.mark.anyio
async def test_a_cancellation_before_expiry_stays_one() -> None:
    """TO-05, seed TO-4: no rejection, no hook, nothing left waiting on the clock."""
    clock = VirtualClock()
    events: list[TimeoutEvent] = []
    hang = Hanging()
    pipeline = B(clock=clock).add_timeout(12, on_timeout=events.append).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, hang)
        await clock.advance(11)
        call.cancel()
        await tick()
        assert call.cancelled
        await clock.advance(11)
    assert hang.cancelled == 1
    assert events == []
    assert clock.pending == 0


def _retry_around(clock: VirtualClock) -> Any:
    return B(clock=clock).add_retry(delay=1).add_timeout(12).build()


def _retry_inside(clock: VirtualClock) -> Any:
    return B(clock=clock).add_timeout(12).add_retry(delay=1).build()


def _three_nested(clock: VirtualClock) -> Any:
    return limited(clock, 10, 20, 30)


@pytest.mark.anyio
@pytest.mark.parametrize("build", [_retry_around, _retry_inside, _three_nested])
async def test_a_callers_cancel_comes_out_of_any_stack_as_one(
    build: Callable[[VirtualClock], Any],
) -> None:
    """TO-06: through retry around timeout, timeout around retry and three nested timeouts."""
    clock = VirtualClock()
    hang = Hanging()
    pipeline = build(clock)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, hang)
        await clock.advance(5)
        call.cancel()
        await tick()
        assert call.cancelled
    assert call.scope.cancelled_caught
    assert hang.calls == 1
    assert clock.pending == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("build", [_retry_around, _retry_inside, _three_nested])
async def test_a_callers_cancel_keeps_its_message(build: Callable[[VirtualClock], Any]) -> None:
    """TO-06 on asyncio: the very request of the caller comes out, its message and its count."""
    task = asyncio.create_task(build(VirtualClock()).execute(Hanging()))
    await asyncio.sleep(0)
    task.cancel("shutting down")
    with pytest.raises(asyncio.CancelledError, match="shutting down"):
        await task
    assert task.cancelling() == 1


@pytest.mark.asyncio
async def test_an_unrelated_cancellation_passes_unchanged() -> None:
    """TO-07: the cancellation of something that the callback waited for is not ours to convert."""
    somebody_elses: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    somebody_elses.cancel("theirs")

    async def fn() -> int:
        return await somebody_elses

    with pytest.raises(asyncio.CancelledError, match="theirs"):
        await B().add_timeout(60).build().execute(fn)


@pytest.mark.anyio
async def test_a_real_expiry_inside_a_scope_that_is_not_cancelled_is_a_rejection() -> None:
    """TO-08: scopes around the call change nothing about our own expiry."""
    clock = VirtualClock(autojump=True)
    with anyio.CancelScope() as scope, anyio.move_on_after(3600):
        error = await raised_by(B(clock=clock).add_timeout(5).build().execute, Hanging())
        assert isinstance(error, TimeoutRejectedError)
        await checkpoint()
    assert not scope.cancelled_caught


@pytest.mark.anyio
async def test_after_a_success_nothing_of_the_limit_is_left() -> None:
    """TO-09: no timer waits, and the caller's later work is not cancelled."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_timeout(5).build()
    assert await pipeline.execute(Scripted(1)) == 1
    assert clock.pending == 0
    await clock.advance(100)
    await checkpoint()


@pytest.mark.asyncio
async def test_after_an_expiry_the_task_counts_no_cancellation() -> None:
    """TO-09 on asyncio: our request is taken back, so the task can go on."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(5).build()
    task = asyncio.current_task()
    assert task is not None
    for _ in range(3):
        await raised_by(pipeline.execute, Hanging())
        assert task.cancelling() == 0
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_settle_shows_the_rejection_with_its_source_and_a_traceback() -> None:
    """TO-10: `Rejected`, naming pipeline, strategy and operation, raised like any error."""
    clock = VirtualClock(autojump=True)
    pipeline = B("llm", clock=clock).add_timeout(5, name="per attempt").build()
    outcome = await pipeline.settle(Hanging(), operation_key="ask")
    assert isinstance(outcome, Rejected)
    error = outcome.error
    assert isinstance(error, TimeoutRejectedError)
    assert error.pipeline_name == "llm"
    assert error.strategy_name == "per attempt"
    assert error.operation_key == "ask"
    assert error.retry_after is None
    assert error.__traceback__ is not None


@pytest.mark.asyncio
async def test_the_error_shows_where_the_time_was_spent() -> None:
    """TO-10: its cause is the cancellation, whose traceback leads into the callback."""
    clock = VirtualClock(autojump=True)

    async def the_slow_part() -> None:
        await clock.sleep(60)

    error = await raised_by(B(clock=clock).add_timeout(5).build().execute, the_slow_part)
    assert isinstance(error.__cause__, asyncio.CancelledError)
    names = [entry.name for entry in traceback.extract_tb(error.__cause__.__traceback__)]
    assert "the_slow_part" in names


def test_the_error_exposes_the_limit() -> None:
    """TO-12: an error made with a limit shows it, and is a builtin `TimeoutError` too."""
    error = TimeoutRejectedError("late", timeout=12.5)
    assert error.timeout == 12.5
    assert isinstance(error, TimeoutError)
    assert isinstance(error, ExecutionRejectedError)
    assert not isinstance(error, asyncio.CancelledError)


@pytest.mark.anyio
async def test_the_message_names_pipeline_strategy_and_limit() -> None:
    """TO-12: a reader of a log knows which limit of which pipeline it was."""
    clock = VirtualClock(autojump=True)
    pipeline = B("llm", clock=clock).add_timeout("2.5s", name="per attempt").build()
    message = str(await raised_by(pipeline.execute, Hanging()))
    assert "llm" in message
    assert "per attempt" in message
    assert "2.5" in message


@pytest.mark.anyio
@pytest.mark.parametrize("caller_first", [True, False])
async def test_the_caller_wins_a_tie(caller_first: bool) -> None:
    """TO-13: cancelled and expired at the same instant, in either order, is a cancellation."""
    clock = VirtualClock()
    events: list[TimeoutEvent] = []
    pipeline = B(clock=clock).add_timeout(5, on_timeout=events.append).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        if caller_first:
            clock.call_at(5, call.cancel)  # before the call has had a turn to set its limit
        else:
            await tick()
            clock.call_at(5, call.cancel)
        await clock.advance(5)
        assert call.cancelled
    assert events == []


@pytest.mark.asyncio
@pytest.mark.parametrize("caller_first", [True, False])
async def test_the_caller_wins_a_tie_of_plain_task_cancels(caller_first: bool) -> None:
    """TO-13 with asyncio's own cancellation: one request of the caller's is left."""
    clock = VirtualClock()
    task = asyncio.create_task(B(clock=clock).add_timeout(5).build().execute(Hanging()))
    if caller_first:
        clock.call_at(5, task.cancel)
    else:
        await asyncio.sleep(0)
        clock.call_at(5, task.cancel)
    await clock.advance(5)
    assert task.cancelled()
    assert task.cancelling() == 1


@pytest.mark.anyio
async def test_a_callers_cancel_while_the_inside_winds_up_after_expiry_wins() -> None:
    """TO-13: the cancel that arrives between expiry and end is the caller's, and comes out."""
    clock = VirtualClock()

    async def fn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(10)
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, B(clock=clock).add_timeout(5).build().execute, fn)
        await clock.advance(6)
        assert not call.done
        call.cancel()
        await clock.advance(9)
        assert call.cancelled


@pytest.mark.anyio
@pytest.mark.parametrize("came_out", ["value", "error"])
async def test_what_came_out_while_the_caller_was_cancelled_is_untouched(came_out: str) -> None:
    """TO-13: a value or an error of the callback is neither rewritten nor lost."""
    error = ConnectionError("down")
    with anyio.CancelScope() as scope:

        async def fn() -> str:
            scope.cancel()
            if came_out == "error":
                raise error
            return "value"

        outcome = await B().add_timeout(60).build().settle(fn)
        assert outcome == (Success("value") if came_out == "value" else Failure(error))


# ---- seed ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_in_time_out_of_time_and_errors_of_its_own() -> None:
    """Seed TO-1: a value in time, a rejection when too slow, the callback's own error as it is."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(5).build()
    assert await pipeline.execute(Scripted("in time", clock=clock, takes=4.9)) == "in time"
    late = await raised_by(pipeline.execute, Scripted("late", clock=clock, takes=5.1))
    assert isinstance(late, TimeoutRejectedError)
    error = ConnectionError("down")
    assert await raised_by(pipeline.execute, Scripted(error, clock=clock, takes=1)) is error


@pytest.mark.anyio
async def test_no_limit_runs_the_call_as_it_is() -> None:
    """Seed TO-3: `math.inf` is no limit, and sets no timer."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_timeout(math.inf).build()
    pending: list[int] = []

    async def fn() -> str:
        pending.append(clock.pending)
        return "value"

    assert await pipeline.execute(fn) == "value"
    assert pending == [0]


# ---- streams ------------------------------------------------------------------------------------


class _Sources:
    """A stream's factory: chunks with pauses before them; it counts what it opened and closed."""

    def __init__(self, clock: VirtualClock, *script: tuple[float, Any]) -> None:
        self._clock = clock
        self._script = script
        self.opened = 0
        self.closed = 0

    async def __call__(self) -> AsyncIterator[Any]:
        return self._source()

    async def _source(self) -> AsyncIterator[Any]:
        self.opened += 1
        try:
            for pause, item in self._script:
                await self._clock.sleep(pause)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


async def drain(stream: ResilienceStream[Any]) -> list[Any]:
    """Read a stream to its end."""
    async with stream:
        return [chunk async for chunk in stream]


@pytest.mark.anyio
async def test_a_stream_that_stalls_before_its_first_chunk_times_out() -> None:
    """Seed TO-5: the source was made once, and is closed before the error comes out."""
    clock = VirtualClock(autojump=True)
    sources = _Sources(clock, (60, "late"))
    pipeline = B(clock=clock).add_timeout(5).build()
    error = await raised_by(drain, pipeline.execute_stream(sources))
    assert isinstance(error, TimeoutRejectedError)
    assert clock.now() == 5.0
    assert sources.opened == sources.closed == 1


@pytest.mark.anyio
async def test_the_limit_covers_connect_and_first_chunk_together_for_each_attempt() -> None:
    """Case ST-11: one limit over both, a new one for each attempt, each source closed."""
    clock = VirtualClock(autojump=True)
    sources = _Sources(clock, (1, "late"))

    async def slow_connect() -> AsyncIterator[Any]:
        await clock.sleep(1.5)
        return await sources()

    pipeline = B(clock=clock).add_retry(max_retry_attempts=2, delay=0).add_timeout(2).build()
    error = await raised_by(drain, pipeline.execute_stream(slow_connect))
    assert isinstance(error, TimeoutRejectedError)
    assert clock.now() == 6.0
    assert sources.opened == sources.closed == 3


@pytest.mark.anyio
async def test_after_the_first_chunk_there_is_no_limit() -> None:
    """Case ST-13: a long healthy stream is not cut."""
    clock = VirtualClock(autojump=True)
    sources = _Sources(clock, (1, "a"), (100, "b"), (1000, "c"))
    pipeline = B(clock=clock).add_timeout(2).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b", "c"]
    assert clock.now() == 1101.0


@pytest.mark.anyio
async def test_a_slow_consumer_is_no_timeout() -> None:
    """Seed TO-7: the consumer's own time never counts."""
    clock = VirtualClock(autojump=True)
    sources = _Sources(clock, (1, "a"), (1, "b"))
    got = []
    async with B(clock=clock).add_timeout(2).build().execute_stream(sources) as stream:
        async for chunk in stream:
            await clock.sleep(120)
            got.append(chunk)
    assert got == ["a", "b"]


@pytest.mark.anyio
async def test_a_source_that_fails_within_the_limit_is_no_timeout() -> None:
    """Seed TO-8: its own error comes out."""
    clock = VirtualClock(autojump=True)
    error = OSError("refused")
    pipeline = B(clock=clock).add_timeout(2).build()
    assert await raised_by(drain, pipeline.execute_stream(_Sources(clock, (1, error)))) is error


@pytest.mark.anyio
async def test_leaving_a_stream_early_awaits_the_sources_cleanup() -> None:
    """Seed TO-9: after `async with` the source is closed."""
    clock = VirtualClock(autojump=True)
    sources = _Sources(clock, (1, "a"), (1, "b"))
    async with B(clock=clock).add_timeout(2).build().execute_stream(sources) as stream:
        async for chunk in stream:
            assert chunk == "a"
            break
    assert sources.closed == 1
    assert clock.pending == 0


# ---- the collected cases ------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.realtime
async def test_case_to_01_the_callbacks_own_timeout_error_passes() -> None:
    """Case TO-01: an inner limit of the callback's own is a plain `TimeoutError` and a failure."""
    pipeline = B("x").add_timeout(60).build()

    async def fn() -> None:
        with anyio.fail_after(0.001):
            await anyio.sleep_forever()

    assert type(await raised_by(pipeline.execute, fn)) is TimeoutError
    assert isinstance(await pipeline.settle(fn), Failure)


@pytest.mark.asyncio
@pytest.mark.realtime
async def test_case_to_01_an_inner_asyncio_timeout_passes() -> None:
    """Case TO-01 with `asyncio.timeout`, which counts cancellations as we do."""
    pipeline = B("x").add_timeout(60).build()

    async def fn() -> None:
        async with asyncio.timeout(0.001):
            await asyncio.Event().wait()

    assert type(await raised_by(pipeline.execute, fn)) is TimeoutError
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.anyio
@pytest.mark.realtime
async def test_case_to_01_our_own_expiry_is_ours() -> None:
    """Case TO-01: on the loop's own clock, with the limit in the error."""
    hang = Hanging()
    error = await raised_by(B().add_timeout(0.01).build().execute, hang)
    assert isinstance(error, TimeoutRejectedError)
    assert error.timeout == 0.01
    assert hang.cancelled == 1


@pytest.mark.anyio
@pytest.mark.realtime
async def test_case_to_03_what_was_finished_past_the_deadline_is_kept() -> None:
    """Case TO-03: the callback blocked past its limit and returned: the item is not lost."""
    events: list[TimeoutEvent] = []
    pipeline = B().add_timeout(0.005, on_timeout=events.append).build()
    items = ["item"]

    async def fn() -> str:
        time.sleep(0.02)  # noqa: ASYNC251 - blocks the loop past the deadline on purpose
        return items.pop()

    assert await pipeline.execute(fn) == "item"
    assert events == []  # small print: a late value that is kept runs no `on_timeout`


@pytest.mark.anyio
@pytest.mark.realtime
async def test_case_to_03_no_item_is_lost_around_the_deadline() -> None:
    """Case TO-03: whichever side of the deadline the callback ends on, items out + left == items in."""
    items = list(range(300))
    pipeline = B().add_timeout(0.0005).build()

    async def fn(pause: float) -> int:
        await anyio.sleep(pause)
        return items.pop()

    out = 0
    for turn in range(300):
        outcome = await pipeline.settle(fn, 0.0004 + turn % 20 * 0.00001)
        out += outcome.ok
        assert outcome.ok or isinstance(outcome.error, TimeoutRejectedError)
        await checkpoint()
    assert out + len(items) == 300


@pytest.mark.anyio
async def test_case_to_03_another_error_past_the_deadline_is_kept() -> None:
    """Case TO-03: what the callback raises while it is being cancelled comes out, without a hook."""
    clock = VirtualClock(autojump=True)
    events: list[TimeoutEvent] = []

    async def fn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise KeyError("clean-up failed")

    pipeline = B(clock=clock).add_timeout(5, on_timeout=events.append).build()
    assert type(await raised_by(pipeline.execute, fn)) is KeyError
    assert events == []
    await checkpoint()


async def _swallow() -> str:
    try:
        await anyio.sleep_forever()
    except anyio.get_cancelled_exc_class():
        return "partial"
    raise AssertionError("woken from for ever")


@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize("virtual", [True, False])
async def test_case_to_05_a_swallowed_cancellation_leaves_nothing_behind(virtual: bool) -> None:
    """Case TO-05: what came out is kept, and the caller can go on waiting."""
    clock = VirtualClock(autojump=True) if virtual else None
    pipeline = B(clock=clock).add_timeout(0.01).build()
    for _ in range(3):
        assert await pipeline.execute(_swallow) == "partial"
        await checkpoint()
        await checkpoint()


@pytest.mark.asyncio
@pytest.mark.realtime
@pytest.mark.parametrize("virtual", [True, False])
async def test_case_to_05_the_task_counts_no_cancellation(virtual: bool) -> None:
    """Case TO-05 on asyncio: the strategy takes its own request back."""
    clock = VirtualClock(autojump=True) if virtual else None
    task = asyncio.current_task()
    assert task is not None
    assert await B(clock=clock).add_timeout(0.01).build().execute(_swallow) == "partial"
    assert task.cancelling() == 0


@pytest.mark.anyio
async def test_case_to_07_time_counts_from_entry() -> None:
    """Case TO-07: neither building, wrapping nor waiting to be called uses the limit up."""
    clock = VirtualClock()
    fn = Scripted(1, clock=clock, takes=4)
    pipeline = B(clock=clock).add_timeout(5).build()
    await clock.advance(100)
    call = pipeline.wrap(fn)
    await clock.advance(100)
    async with anyio.create_task_group() as tasks:
        running = spawn(tasks, call)
        await clock.advance(4)
        assert running.value == 1


@pytest.mark.anyio
async def test_case_to_07_a_streams_time_counts_from_its_first_pull() -> None:
    """Case TO-07: `execute_stream` starts nothing, and neither does `async with`."""
    clock = VirtualClock()
    sources = _Sources(clock, (4, 1))
    stream = B(clock=clock).add_timeout(5).build().execute_stream(sources)
    await clock.advance(100)

    async def consume() -> Any:
        async with stream:
            await clock.sleep(100)
            return await anext(stream)

    async with anyio.create_task_group() as tasks:
        running = spawn(tasks, consume)
        await clock.advance(100)
        assert sources.opened == 1
        await clock.advance(4)
        assert running.value == 1


_HUGE: list[Any] = [math.inf, 1e308, 10**30, 10**400, timedelta.max, "999999h", 1e10]


@pytest.mark.anyio
@pytest.mark.parametrize("limit", _HUGE, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("virtual", [True, False])
async def test_case_to_09_enormous_limits_do_not_fire(limit: Any, virtual: bool) -> None:
    """Case TO-09: "practically never" overflows no timer and does not fire at once."""
    pipeline = B(clock=VirtualClock() if virtual else None).add_timeout(limit).build()

    async def fn() -> int:
        await tick()
        return 1

    assert await pipeline.execute(fn) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("delay", [1e10, 1e12, 1e308, 10**400, timedelta.max])
@pytest.mark.parametrize("virtual", [True, False])
async def test_case_to_09_an_enormous_delay_is_waited(delay: Any, virtual: bool) -> None:
    """Case TO-09: a retry with such a delay waits, and can be cancelled."""
    fn = Scripted(ConnectionError)
    pipeline = B(clock=VirtualClock() if virtual else None).add_retry(delay=delay).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await tick()
        assert not call.done
        call.cancel()
    assert fn.calls == 1


@pytest.mark.asyncio
async def test_case_to_11_a_cancelled_task_of_somebody_else_is_not_ours() -> None:
    """Case TO-11: it passes as a cancellation, is neither converted, counted nor retried."""
    calls = 0
    other = asyncio.create_task(asyncio.Event().wait())

    async def fn() -> None:
        nonlocal calls
        calls += 1
        await other

    pipeline = B().add_retry(delay=0).add_circuit_breaker().add_timeout(60).build()
    for run in (pipeline.execute, pipeline.settle):
        calls = 0
        running = asyncio.create_task(run(fn))
        await asyncio.sleep(0)
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert calls == 1
        assert running.cancelling() == 0


# ---- nesting ------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("limits", "place"),
    [((10, 5), 1), ((5, 10), 0), ((5, 5), 0), ((9, 3, 6), 1), ((3, 9, 6), 0), ((9, 6, 3), 2)],
    ids=str,
)
async def test_of_nested_limits_the_right_one_is_named(
    limits: tuple[float, ...], place: int
) -> None:
    """The shortest one's name and limit are in the error; of equal ones the outer's."""
    clock = VirtualClock(autojump=True)
    error = await raised_by(limited(clock, *limits).execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert error.strategy_name == f"limit {place}"
    assert error.timeout == limits[place]
    assert clock.now() == limits[place]


@pytest.mark.anyio
@pytest.mark.realtime
@pytest.mark.parametrize(("limits", "place"), [((60, 0.01), 1), ((0.01, 60), 0)], ids=str)
async def test_of_nested_limits_in_real_time_the_right_one_is_named(
    limits: tuple[float, ...], place: int
) -> None:
    """The same on the loop's own clock."""
    error = await raised_by(limited(None, *limits).execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert error.strategy_name == f"limit {place}"
    assert error.timeout == 0.01


@pytest.mark.anyio
async def test_an_inner_rejection_passes_an_outer_limit() -> None:
    """The outer timeout neither converts nor reports the inner one's expiry."""
    clock = VirtualClock(autojump=True)
    events: list[tuple[str, float]] = []
    pipeline = (
        B(clock=clock)
        .add_timeout(10, on_timeout=lambda event: events.append(("outer", event.timeout)))
        .add_timeout(5, on_timeout=lambda event: events.append(("inner", event.timeout)))
        .build()
    )
    await raised_by(pipeline.execute, Hanging())
    assert events == [("inner", 5.0)]


@pytest.mark.anyio
async def test_a_limit_around_a_retry_covers_attempts_and_waits() -> None:
    """The expiry during a wait ends the retry; the last failure is in the chain of contexts."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(ConnectionError("down"), clock=clock)
    pipeline = B(clock=clock).add_timeout(10).add_retry(max_retry_attempts=100, delay=4).build()
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, TimeoutRejectedError)
    assert fn.starts == [0.0, 4.0, 8.0]
    assert clock.now() == 10.0


@pytest.mark.anyio
async def test_a_limit_inside_a_retry_is_new_for_each_attempt() -> None:
    """Slow, then in time: the second attempt has the whole limit again."""
    clock = VirtualClock(autojump=True)
    slow, quick = Hanging(), Scripted("ok", clock=clock, takes=4)
    turns: Any = itertools.chain([slow], itertools.repeat(quick))
    pipeline = B(clock=clock).add_retry(delay=1).add_timeout(5).build()

    async def fn() -> Any:
        return await next(turns)()

    assert await pipeline.execute(fn) == "ok"
    assert clock.now() == 10.0


@pytest.mark.anyio
async def test_a_timeout_of_a_pipeline_in_the_callback_is_a_failure_of_the_callback() -> None:
    """`Rejected` is this pipeline's own; another's rejection passes and keeps its names."""
    clock = VirtualClock(autojump=True)
    inner = B("db", clock=clock).add_timeout(1).build()
    outer = B("api", clock=clock).add_timeout(60).build()
    outcome = await outer.settle(inner.execute, Hanging())
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, TimeoutRejectedError)
    assert outcome.error.pipeline_name == "db"


# ---- expiry: once, awaited, in order ------------------------------------------------------------


@pytest.mark.anyio
async def test_the_inside_is_awaited_and_the_hook_runs_after_it() -> None:
    """No work outlives the call: clean-up first, then `on_timeout`, then the error."""
    clock = VirtualClock(autojump=True)
    order: list[tuple[str, float]] = []

    async def fn() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(7)
            order.append(("clean-up", clock.now()))

    pipeline = (
        B(clock=clock)
        .add_timeout(5, on_timeout=lambda event: order.append(("hook", clock.now())))
        .build()
    )
    assert isinstance(await raised_by(pipeline.execute, fn), TimeoutRejectedError)
    assert order == [("clean-up", 12.0), ("hook", 12.0)]


@pytest.mark.asyncio
@pytest.mark.realtime
@pytest.mark.parametrize("virtual", [True, False])
async def test_on_asyncio_expiry_cancels_exactly_once(virtual: bool) -> None:
    """Small print: as with `asyncio.timeout`, a clean-up may await without a shield."""
    clock = VirtualClock(autojump=True) if virtual else None
    cleaned_up = False

    async def fn() -> None:
        nonlocal cleaned_up
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            cleaned_up = True

    error = await raised_by(B(clock=clock).add_timeout(0.01).build().execute, fn)
    assert isinstance(error, TimeoutRejectedError)
    assert cleaned_up


@pytest.mark.anyio
@pytest.mark.realtime
async def test_many_calls_under_one_limit_all_expire() -> None:
    """One strategy serves any number of calls: each one is cancelled and rejected."""
    pipeline = B().add_timeout(0.005).build()
    hang = Hanging()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, hang) for _ in range(200)]
    assert all(isinstance(call.value, Rejected) for call in calls)
    assert hang.cancelled == 200


@pytest.mark.anyio
@pytest.mark.realtime
async def test_many_different_generated_limits_all_expire() -> None:
    """Limits of as many lengths as there are calls."""
    lengths = iter([0.001 + number * 0.00001 for number in range(200)])
    pipeline = B().add_timeout(5, timeout_generator=lambda event: next(lengths)).build()
    hang = Hanging()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, hang) for _ in range(200)]
    assert all(isinstance(call.value, Rejected) for call in calls)
    assert len({call.value.error.timeout for call in calls}) == 200


# ---- hooks --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_hooks_may_be_coroutine_functions_or_return_awaitables() -> None:
    """A plain function that returns an awaitable counts as a coroutine function."""
    clock = VirtualClock(autojump=True)
    done: list[str] = []

    async def hook(event: TimeoutEvent) -> None:
        await checkpoint()
        done.append("coroutine function")

    async def note() -> None:
        await checkpoint()
        done.append("awaitable")

    def plain(event: TimeoutEvent) -> Awaitable[None]:
        return note()

    for each in (hook, plain):
        pipeline = B(clock=clock).add_timeout(5, on_timeout=each).build()
        assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert done == ["coroutine function", "awaitable"]


@pytest.mark.anyio
@pytest.mark.parametrize("as_coroutine", [False, True])
async def test_an_error_of_the_hook_surfaces_with_the_rejection_as_context(
    as_coroutine: bool,
) -> None:
    """Small print, case LT-05: the attempt's failure, the timeout itself, is its `__context__`."""
    clock = VirtualClock(autojump=True)

    def fail(event: TimeoutEvent) -> None:
        raise KeyError("hook")

    async def fail_later(event: TimeoutEvent) -> None:
        await checkpoint()
        raise KeyError("hook")

    hook = fail_later if as_coroutine else fail
    pipeline = B(clock=clock).add_timeout(5, on_timeout=hook).build()
    error = await raised_by(pipeline.execute, Hanging())
    assert type(error) is KeyError
    assert isinstance(error.__context__, TimeoutRejectedError)
    outcome = await pipeline.settle(Hanging())
    assert isinstance(outcome, Failure)
    assert type(outcome.error) is KeyError


@pytest.mark.anyio
async def test_an_error_of_the_hook_is_an_ordinary_failure_further_out() -> None:
    """A retry around it tries again."""
    clock = VirtualClock(autojump=True)

    def fail(event: TimeoutEvent) -> None:
        raise KeyError("hook")

    hang = Hanging()
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=0, should_handle=KeyError)
        .add_timeout(5, on_timeout=fail)
        .build()
    )
    assert type(await raised_by(pipeline.execute, hang)) is KeyError
    assert hang.calls == 3


@pytest.mark.anyio
async def test_an_error_of_the_generator_surfaces_and_nothing_is_started() -> None:
    """Case CW-05: a raising `timeout_generator` ends in the outcome."""

    def fail(event: TimeoutGeneratorEvent) -> float:
        raise KeyError("generator")

    fn = Scripted(1)
    pipeline = B().add_timeout(5, timeout_generator=fail).build()
    assert type(await raised_by(pipeline.execute, fn)) is KeyError
    assert isinstance(await pipeline.settle(fn), Failure)
    assert fn.calls == 0


@pytest.mark.anyio
async def test_a_hook_cancelled_by_the_caller_keeps_the_rejection() -> None:
    """The cancellation comes out, the rejection that was on its way is its context."""
    clock = VirtualClock()

    async def hook(event: TimeoutEvent) -> None:
        await anyio.sleep_forever()

    pipeline = B(clock=clock).add_timeout(5, on_timeout=hook).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        await clock.advance(5)
        assert not call.done
        call.cancel()
        await tick()
        assert call.cancelled
    assert call.error is not None
    assert any(isinstance(each, TimeoutRejectedError) for each in contexts_of(call.error))


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0.000001, 0.000001),
        (5, 5.0),
        (2.5, 2.5),
        (timedelta(minutes=2), 120.0),
        ("9ms", 0.009),
        ("10s", 10.0),
        ("1.5s", 1.5),
        ("25h", 90_000.0),
        ("1m30s", 90.0),
        (math.inf, math.inf),
    ],
)
def test_limits_that_are_taken(given: Any, seconds: float) -> None:
    """TO-11 as the contract has it: anything above zero; it reads back in seconds."""
    assert Timeout(given).timeout == seconds
    assert Timeout(timeout=given).timeout == seconds


_BAD: list[tuple[str, Any]] = [
    *(
        ("timeout", value)
        for value in [
            0,
            0.0,
            -1,
            -math.inf,
            math.nan,
            True,
            False,
            None,
            "",
            "0s",
            "soon",
            "10",
            "-1s",
            b"1s",
            timedelta(0),
            timedelta(seconds=-1),
            [1],
        ]
    ),
    *(("timeout_generator", value) for value in [3, "1s"]),
    *(("on_timeout", value) for value in [3, "hook"]),
    *(("name", value) for value in [3, b"x"]),
]


@pytest.mark.parametrize(("option", "value"), _BAD, ids=lambda value: repr(value)[:40])
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """TO-11: an `OptionsError` names the option."""
    options: dict[str, Any] = {"timeout": 5} | {option: value}
    with pytest.raises(OptionsError) as caught:
        Timeout(**options)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{option} ")


def test_every_bad_option_at_once() -> None:
    """One error lists all four."""
    options: dict[str, Any] = {
        "timeout": 0,
        "timeout_generator": 3,
        "on_timeout": "hook",
        "name": 3,
    }
    with pytest.raises(OptionsError) as caught:
        Timeout(**options)
    assert len(caught.value.problems) == 4
    for option in options:
        assert option in str(caught.value)


def test_a_bad_limit_is_told_the_accepted_forms() -> None:
    """The message shows what may be written instead."""
    with pytest.raises(OptionsError, match=r"500ms.*10s.*1m30s"):
        Timeout("soon")


def test_the_limit_is_required() -> None:
    """There is no default: `Timeout()` is a `TypeError` that names what is missing."""
    make: Any = Timeout
    with pytest.raises(TypeError, match="timeout"):
        make()
    with pytest.raises(TypeError, match="timeout"):
        make(timeout_generator=lambda event: 5)


def test_only_the_limit_is_positional() -> None:
    """Everything else stands behind the `*`."""
    make: Any = Timeout
    with pytest.raises(TypeError):
        make(5, lambda event: 5)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("timeout_genarator", "timeout_generator"),
        ("ontimeout", "on_timeout"),
        ("on_timout", "on_timeout"),
    ],
)
def test_a_misspelt_option_is_a_type_error_that_suggests(misspelt: str, meant: str) -> None:
    """Small print: on the class and on the builder alike."""
    options: dict[str, Any] = {misspelt: None}
    for make in (Timeout, B().add_timeout):
        with pytest.raises(TypeError, match=f"{misspelt!r}.*{meant!r}"):
            make(5, **options)


async def _nothing() -> None:
    """Be a coroutine."""


@pytest.mark.parametrize("option", ["timeout_generator", "on_timeout"])
def test_a_coroutine_where_its_function_belongs_is_a_misuse(option: str) -> None:
    """Small print: `on_timeout=hook()` is a `MisuseError`, and the coroutine is closed."""
    options: dict[str, Any] = {option: _nothing()}
    with pytest.raises(MisuseError, match=option):
        Timeout(5, **options)


def test_the_builder_takes_the_same_options() -> None:
    """`add_timeout(...)` is `add(Timeout(...))`, and returns the builder."""
    builder = B()
    assert builder.add_timeout("10s", name="total") is builder
    (timeout,) = builder.build().strategies
    assert isinstance(timeout, Timeout)
    assert (timeout.timeout, timeout.name) == (10.0, "total")
    assert Timeout(5).name == "Timeout"


def test_options_are_immutable() -> None:
    """What was checked stays as it was."""
    timeout: Any = Timeout(5)
    with pytest.raises(AttributeError):
        timeout.timeout = -1


def test_repr_reads_like_a_call() -> None:
    """The limit, and what differs from the defaults."""
    assert repr(Timeout("10s")) == "Timeout(10.0)"
    assert repr(Timeout(10, name="total")) == "Timeout(10.0, name='total')"
