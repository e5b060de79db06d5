"""Concurrency limiter: who is let in, who waits and in which order, and that no permit is ever lost."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from collections.abc import AsyncIterator, Callable, Generator
from datetime import timedelta
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from resilience_pipeline import (
    ConcurrencyLimiter,
    ConcurrencyLimiterRejectedError,
    ConcurrencyLimiterRejectedEvent,
    Failure,
    MisuseError,
    OptionsError,
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import Room, boom, free_permits, ok
from support.scripted import Background, Hanging, Scripted, raised_by, spawn, tick


class Limited:
    """A pipeline of one limiter on a clock of its own, and the room its calls stay in."""

    def __init__(self, permit_limit: int, queue_limit: float = 0, **options: Any) -> None:
        self.clock = VirtualClock()
        self.room = Room()
        self.pipeline: ResiliencePipeline[ConcurrencyLimiterRejectedError] = (
            ResiliencePipelineBuilder(name="svc", clock=self.clock)
            .add_concurrency_limiter(permit_limit, queue_limit, **options)
            .build()
        )

    async def arrive(self, tasks: TaskGroup, name: Any) -> Background:
        """Start a call that stays in the room, and let it get as far as it can."""
        call = spawn(tasks, self.pipeline.settle, self.room, name)
        await tick(5)
        return call

    async def refusal(self) -> ConcurrencyLimiterRejectedError:
        outcome = await self.pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert isinstance(outcome.error, ConcurrencyLimiterRejectedError)
        return outcome.error

    async def check_permits(self, count: int) -> None:
        assert await free_permits(self.pipeline) == count


# --- the limit ---------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_at_most_permit_limit_are_inside(limit: int) -> None:
    """MC-1: the peak is the limit; with a limit of 1 strictly one after another."""
    limited = Limited(limit, math.inf)
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            spawn(tasks, limited.pipeline.execute, limited.room, number)
        await tick()
        while limited.room.names:
            assert limited.room.inside == min(limit, 20 - len(limited.room.left))
            limited.room.let_out(limited.room.names[0])
            await tick()
    assert (limited.room.peak, len(limited.room.left)) == (limit, 20)


@pytest.mark.anyio
async def test_more_permits_than_calls_let_all_in_at_once() -> None:
    """MC-1: a limit above the number of calls holds nobody up."""
    limited = Limited(50)
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            spawn(tasks, limited.pipeline.execute, limited.room, number)
        await tick()
        assert limited.room.inside == 10
        limited.room.let_all_out()


@pytest.mark.anyio
async def test_nesting_means_the_smaller_limit() -> None:
    """MC-3: two limiters around one call: both hold."""
    room = Room()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_concurrency_limiter(5, 100)
        .add_concurrency_limiter(2, 100)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            spawn(tasks, pipeline.execute, room, number)
        await tick()
        while room.names:
            room.let_out(room.names[0])
            await tick()
    assert (room.peak, len(room.left)) == (2, 10)


@pytest.mark.anyio
async def test_a_permit_is_given_back_whatever_comes_out() -> None:
    """RL-01, MC-4: a value, an error, a misuse, a cancellation: once each, and the queue goes on."""
    limited = Limited(1, 5)
    no_coroutine: Any = lambda: 1  # noqa: E731 - what a user might hand in
    for _ in range(3):
        assert await limited.pipeline.execute(ok) == 1
        assert isinstance(await limited.pipeline.settle(boom), Failure)
        assert isinstance(await raised_by(limited.pipeline.execute, no_coroutine), MisuseError)
        async with anyio.create_task_group() as tasks:
            hanging = spawn(tasks, limited.pipeline.execute, Hanging())
            await tick()
            hanging.cancel()
    await limited.check_permits(1)


@pytest.mark.anyio
async def test_a_permit_is_given_back_after_a_base_exception() -> None:
    """What is no `Exception` passes, and releases on its way."""

    class Stop(BaseException):
        pass

    async def stop() -> int:
        raise Stop

    limited = Limited(1)
    for _ in range(3):
        with pytest.raises(Stop):
            await limited.pipeline.execute(stop)
    await limited.check_permits(1)


@pytest.mark.anyio
async def test_errors_inside_let_the_next_one_in() -> None:
    """MC-4: a call that fails frees its place like any other."""
    limited = Limited(1, 5)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, n) for n in range(3)]
        limited.room.let_out(0, ConnectionError())
        await tick()
        limited.room.let_out(1, ConnectionError())
        await tick()
        limited.room.let_out(2)
    assert [type(call.value) for call in calls] == [Failure, Failure, Success]


# --- the queue ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_without_a_queue_a_call_beyond_the_limit_is_refused_at_once() -> None:
    """Contract: beyond the limit and the queue `ConcurrencyLimiterRejectedError` at once."""
    limited = Limited(2)
    calls = Scripted(1)
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            spawn(tasks, limited.pipeline.execute, limited.room, number)
        await tick()
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await limited.pipeline.execute(calls)
        limited.room.let_all_out()
    assert calls.calls == 0


@pytest.mark.anyio
async def test_up_to_queue_limit_wait_and_the_next_is_refused() -> None:
    """Contract: two inside, three in the queue, the sixth refused; then all five come through."""
    limited = Limited(2, 3)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, n) for n in range(6)]
        assert [call.done for call in calls] == [False] * 5 + [True]
        assert isinstance(calls[5].value, Rejected)
        for _ in range(5):
            limited.room.let_out(limited.room.names[0])
            await tick()
    assert limited.room.entered == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_an_endless_queue_only_ever_waits() -> None:
    """`queue_limit=math.inf` refuses nobody."""
    limited = Limited(1, math.inf)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, n) for n in range(500)]
        for number in range(500):
            limited.room.let_out(number)
            await tick(5)
    assert all(call.value == Success(number) for number, call in enumerate(calls))


@pytest.mark.anyio
async def test_first_come_first_served() -> None:
    """MC-2: calls start in the order of their arrival; each gets its own result."""
    limited = Limited(2, 100)
    async with anyio.create_task_group() as tasks:
        calls = []
        for number in range(30):
            calls.append(spawn(tasks, limited.pipeline.execute, limited.room, number))
            await tick(3)
        for _ in range(30):
            limited.room.let_out(limited.room.names[-1])
            await tick()
    assert limited.room.entered == list(range(30))
    assert [call.value for call in calls] == list(range(30))


@pytest.mark.anyio
async def test_newcomers_do_not_overtake() -> None:
    """Case CL-03: with each call that ends a new one arrives, and nobody is let in out of turn."""
    limited = Limited(2, 100)
    arrived = 0

    async with anyio.create_task_group() as tasks:

        async def arrive() -> None:
            nonlocal arrived
            spawn(tasks, limited.pipeline.execute, limited.room, arrived)
            arrived += 1
            await anyio.lowlevel.checkpoint()

        for _ in range(50):
            await arrive()
        while limited.room.names:
            limited.room.let_out(limited.room.names[0])
            if arrived < 100:
                await arrive()
            await tick(5)
    assert limited.room.entered == list(range(100))
    assert limited.room.peak == 2


@pytest.mark.asyncio
async def test_a_newcomer_in_the_very_turn_of_a_release_does_not_overtake() -> None:
    """Case CL-03: between the release and the waiter's next step the permit belongs to the waiter."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, 5).build()
    order: list[str] = []
    newcomers: list[asyncio.Task[None]] = []

    async def enter(name: str) -> None:
        order.append(name)

    async def hold(until: asyncio.Event) -> None:
        await until.wait()
        # Runs, eagerly, in the same step in which the permit is given back.
        newcomers.append(asyncio.create_task(pipeline.execute(enter, "newcomer")))

    event = asyncio.Event()
    holder = asyncio.create_task(pipeline.execute(hold, event))
    await asyncio.sleep(0)
    waiter = asyncio.create_task(pipeline.execute(enter, "waiter"))
    await asyncio.sleep(0)
    event.set()
    await asyncio.gather(holder, waiter)
    await newcomers[0]
    assert order == ["waiter", "newcomer"]


# --- leaving the queue -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_cancelled_waiter_gives_its_place_back_at_once() -> None:
    """Case CL-01: the next one takes it; the cancelled call's callback never starts."""
    limited = Limited(1, 1)
    record = Scripted(1)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        waiter = spawn(tasks, limited.pipeline.execute, record)
        await tick()
        await limited.refusal()
        waiter.cancel()
        await tick()
        assert waiter.cancelled
        third = spawn(tasks, limited.pipeline.execute, ok)
        await tick()
        assert not third.done
        limited.room.let_all_out()
        await tick()
        assert third.value == 1
    assert record.calls == 0


@pytest.mark.anyio
async def test_cancelling_all_waiters_leaves_the_one_inside_alone() -> None:
    """MC-5: who waits is dropped and never runs; the running one completes."""
    limited = Limited(1, 10)
    record = Scripted(1)
    async with anyio.create_task_group() as tasks:
        inside = spawn(tasks, limited.pipeline.execute, limited.room, "inside")
        await tick()
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as waiting:
                for _ in range(5):
                    waiting.start_soon(limited.pipeline.execute, record)
                await tick()
                scope.cancel()
        assert not inside.done
        limited.room.let_all_out()
        await tick()
        assert inside.value == "inside"
    assert record.calls == 0
    await limited.check_permits(1)


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_no_permit_is_lost_when_a_waiter_is_cancelled_around_its_grant(
    turns: int, cancelled_first: bool
) -> None:
    """Contract: a permit handed to a waiter that is being cancelled goes to the next, at any moment."""
    limited = Limited(1, 5)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room, "holder")
        await tick()
        waiter = spawn(tasks, limited.pipeline.execute, limited.room, "cancelled")
        await tick()
        second = spawn(tasks, limited.pipeline.execute, limited.room, "next")
        await tick()
        if cancelled_first:
            waiter.cancel()
            await tick(turns)
            limited.room.let_out("holder")
        else:
            limited.room.let_out("holder")
            await tick(turns)
            waiter.cancel()
        await tick()
        assert waiter.cancelled
        assert limited.room.names == ["next"]
        limited.room.let_all_out()
        await tick()
        assert second.value == "next"
    assert limited.room.peak == 1
    await limited.check_permits(1)


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_no_permit_is_lost_when_a_task_is_cancelled_around_its_grant(turns: int) -> None:
    """The same by `task.cancel()`: it comes out, is not taken back, and the next one gets in."""
    limited = Limited(1, 5)
    holder = asyncio.create_task(limited.pipeline.execute(limited.room, "holder"))
    await tick()
    waiter = asyncio.create_task(limited.pipeline.execute(limited.room, "cancelled"))
    await tick()
    second = asyncio.create_task(limited.pipeline.execute(limited.room, "next"))
    await tick()
    limited.room.let_out("holder")
    for _ in range(turns):
        await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await tick()
    assert limited.room.names == ["next"]
    limited.room.let_all_out()
    assert await second == "next"
    assert await holder == "holder"
    await limited.check_permits(1)


@pytest.mark.asyncio
async def test_a_task_cancelled_right_after_its_grant_never_starts_its_callback() -> None:
    """Case CL-01: granted, but not yet running: the permit goes on, the call does not begin."""
    limited = Limited(1, 5)
    record = Scripted(1)
    finished = asyncio.Event()

    async def holder() -> None:
        await finished.wait()
        asyncio.get_running_loop().call_soon(waiter.cancel)

    first = asyncio.create_task(limited.pipeline.execute(holder))
    await tick()
    waiter = asyncio.create_task(limited.pipeline.execute(record))
    await tick()
    second = asyncio.create_task(limited.pipeline.execute(ok))
    await tick()
    finished.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await second == 1
    assert record.calls == 0
    await first


@pytest.mark.asyncio
async def test_a_permit_passes_through_a_row_of_cancelled_waiters() -> None:
    """Rule 3: whoever is granted something and can't use it passes it on, one after the other."""
    limited = Limited(1, 100)
    holder = asyncio.create_task(limited.pipeline.execute(limited.room, "holder"))
    await tick()
    waiters = [asyncio.create_task(limited.pipeline.execute(limited.room, n)) for n in range(20)]
    last = asyncio.create_task(limited.pipeline.execute(limited.room, "last"))
    await tick()
    limited.room.let_out("holder")
    for waiter in waiters:
        waiter.cancel()
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await tick()
    assert limited.room.entered == ["holder", "last"]
    limited.room.let_all_out()
    assert await last == "last"
    await holder


@pytest.mark.anyio
async def test_a_timeout_outside_ends_the_wait_in_the_queue() -> None:
    """Composition: a limit around the limiter bounds the wait; the place is given back."""
    clock = VirtualClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock).add_timeout(2).add_concurrency_limiter(1, 1).build()
    )
    limited = Limited(1)
    async with anyio.create_task_group() as tasks:
        inside = spawn(tasks, pipeline.settle, limited.room)
        await tick()
        waiting = spawn(tasks, pipeline.settle, ok)
        await tick()
        assert isinstance(await pipeline.settle(ok), Rejected)
        await clock.advance(2)
        assert isinstance(waiting.value, Rejected)
        assert isinstance(inside.value, Rejected)
    assert await pipeline.execute(ok) == 1


# --- max_wait ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_waiting_is_bounded_by_max_wait() -> None:
    """Case CL-05: past it the limiter's own rejection, and the permit does not go to who gave up."""
    limited = Limited(1, 5, max_wait=2)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        waiting = spawn(tasks, limited.pipeline.settle, ok)
        await limited.clock.advance(1.999)
        assert not waiting.done
        await limited.clock.advance(0.001)
        assert isinstance(waiting.value, Rejected)
        error = waiting.value.error
        assert isinstance(error, ConcurrencyLimiterRejectedError)
        assert "max_wait=2" in str(error)
        limited.room.let_all_out()
        await tick()
        assert await limited.pipeline.execute(ok) == 1
    assert limited.clock.pending == 0


class HandClock:
    """A clock whose timers go off when the test says so, in the middle of its own step."""

    def __init__(self) -> None:
        self.timers: list[Callable[[], object]] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")

    def call_at(self, when: float, callback: Callable[[], object]) -> anyio.CancelScope:
        self.timers.append(callback)
        return anyio.CancelScope()  # something with a `cancel`


class Pause:
    """Awaited by a coroutine that is driven by hand: gives control back once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@pytest.mark.anyio
@pytest.mark.parametrize("grant_first", [True, False])
async def test_when_grant_and_expiry_fall_together_the_call_runs(grant_first: bool) -> None:
    """Case CL-05: both happen before the waiter can run; the grant wins, never both, never neither."""
    clock = HandClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock).add_concurrency_limiter(1, 5, max_wait=2).build()
    )

    async def hold() -> None:
        await Pause()

    holder = pipeline.execute(hold)
    holder.send(None)
    async with anyio.create_task_group() as tasks:
        waiting = spawn(tasks, pipeline.settle, ok)
        await tick()
        [expire] = clock.timers
        if not grant_first:
            expire()
        with pytest.raises(StopIteration):
            holder.send(None)
        if grant_first:
            expire()
        assert not waiting.done
        await tick()
        assert waiting.value == Success(1)
    assert await free_permits(pipeline) == 1


@pytest.mark.anyio
async def test_a_permit_that_comes_when_the_wait_is_over_stays_free() -> None:
    """Case CL-05: release and expiry at one instant, in whichever order: the permit is not lost."""
    for _ in range(20):
        limited = Limited(1, 5, max_wait=2)
        async with anyio.create_task_group() as tasks:
            spawn(tasks, limited.pipeline.execute, limited.room)
            await tick()
            limited.clock.call_at(2, limited.room.let_all_out)
            waiting = spawn(tasks, limited.pipeline.settle, ok)
            await limited.clock.advance(2)
            assert waiting.value == Success(1) or isinstance(waiting.value, Rejected)
        await limited.check_permits(1)


@pytest.mark.anyio
async def test_a_max_wait_of_zero_does_not_wait() -> None:
    """`max_wait=0`: a permit that is not free by the next turn is not waited for."""
    limited = Limited(1, 5, max_wait=0)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        waiting = spawn(tasks, limited.pipeline.settle, ok)
        await limited.clock.advance(0)
        assert isinstance(waiting.value, Rejected)
        limited.room.let_all_out()
    assert await limited.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_an_endless_max_wait_is_no_limit() -> None:
    """`math.inf` means for ever where that makes sense."""
    limited = Limited(1, 5, max_wait=math.inf)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        waiting = spawn(tasks, limited.pipeline.settle, ok)
        await limited.clock.advance(1e9)
        assert not waiting.done
        limited.room.let_all_out()
        await tick()
        assert waiting.value == Success(1)


@pytest.mark.anyio
async def test_max_wait_means_nothing_without_a_queue() -> None:
    """Small print: who has no place to wait in is refused at once."""
    limited = Limited(1, max_wait=100)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        await limited.refusal()
        limited.room.let_all_out()


@pytest.mark.anyio
async def test_max_wait_bounds_the_queue_and_not_the_call() -> None:
    """Small print: time inside is the call's own."""
    limited = Limited(1, 5, max_wait=2)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, limited.pipeline.execute, limited.room, "slow")
        await limited.clock.advance(1000)
        assert not call.done
        limited.room.let_all_out()
        await tick()
        assert call.value == "slow"


@pytest.mark.anyio
async def test_cancelled_in_a_bounded_wait_no_timer_is_left() -> None:
    """Case CL-05: nothing goes on in the background for who has gone."""
    limited = Limited(1, 5, max_wait=2)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        waiting = spawn(tasks, limited.pipeline.execute, ok)
        await tick()
        waiting.cancel()
        await tick()
        assert waiting.cancelled
        assert limited.clock.pending == 0
        limited.room.let_all_out()
    await limited.check_permits(1)


@pytest.mark.anyio
async def test_max_wait_holds_on_the_loops_own_clock() -> None:
    """The same without a clock of the user's own, with a wait that is over as soon as it began."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, 5, max_wait="1ms").build()
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, room)
        await tick()
        assert isinstance(await pipeline.settle(ok), Rejected)
        room.let_all_out()
    assert await pipeline.execute(ok) == 1


# --- rejections and their hook -----------------------------------------------------------------


@pytest.mark.anyio
async def test_a_refusal_names_pipeline_strategy_operation_and_limits() -> None:
    """Errors: who refused, and the numbers that were exceeded; nobody knows when to come back."""
    limited = Limited(2, 1, name="pool")
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            spawn(tasks, limited.pipeline.execute, limited.room, number)
        await tick()
        outcome = await limited.pipeline.settle(ok, operation_key="get")
        assert isinstance(outcome, Rejected)
        error = outcome.error
        assert (error.pipeline_name, error.strategy_name) == ("svc", "pool")
        assert (error.operation_key, error.retry_after) == ("get", None)
        for part in ("'svc'", "'pool'", "2 calls", "1 wait"):
            assert part in str(error)
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is ConcurrencyLimiterRejectedError
            assert (str(twin), twin.strategy_name) == (str(error), "pool")
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_each_refusal_is_a_new_error() -> None:
    """Rule 13: raise new errors, never stored ones."""
    limited = Limited(1)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        assert len({id(error) for error in [await limited.refusal() for _ in range(5)]}) == 5
        limited.room.let_all_out()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_on_rejected_is_told_before_the_error_comes_out(kind: str) -> None:
    """RL-02, RL-04: one event with the context, for a full queue and for a wait that was too long."""
    events: list[ConcurrencyLimiterRejectedEvent] = []

    async def note(event: ConcurrencyLimiterRejectedEvent) -> None:
        await anyio.lowlevel.checkpoint()
        events.append(event)

    hook: Any = events.append if kind == "plain" else note
    limited = Limited(1, 1, max_wait=2, on_rejected=hook)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        spawn(tasks, lambda: limited.pipeline.settle(ok, operation_key="waited"))
        await tick()
        await limited.pipeline.settle(ok, operation_key="full")
        await limited.clock.advance(2)
        limited.room.let_all_out()
    assert all(isinstance(event, ConcurrencyLimiterRejectedEvent) for event in events)
    assert [event.context.operation_key for event in events] == ["full", "waited"]
    assert await limited.pipeline.execute(ok) == 1
    assert len(events) == 2


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("queued", [False, True])
async def test_on_rejected_that_raises_surfaces_and_gives_nothing_away(
    kind: str, queued: bool
) -> None:
    """Case LT-05: the hook's error comes out, the refusal as its context; no permit is made or lost."""

    def plain(event: object) -> None:
        raise KeyError

    async def asynchronous(event: object) -> None:
        await anyio.lowlevel.checkpoint()
        raise KeyError

    hook = plain if kind == "plain" else asynchronous
    limited = Limited(1, 1 if queued else 0, max_wait=2, on_rejected=hook)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        call = spawn(tasks, limited.pipeline.settle, ok)
        await limited.clock.advance(2)
        assert isinstance(call.value, Failure)
        error = call.value.error
        assert isinstance(error, KeyError)
        assert isinstance(error.__context__, ConcurrencyLimiterRejectedError)
        limited.room.let_all_out()
        await tick()
    await limited.check_permits(1)


@pytest.mark.anyio
async def test_cancelled_in_its_hook_a_refused_call_gives_nothing_away() -> None:
    """Cancel at every await."""
    limited = Limited(1, on_rejected=lambda event: anyio.sleep_forever())
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        refused = spawn(tasks, limited.pipeline.execute, ok)
        await tick()
        assert not refused.done
        refused.cancel()
        await tick()
        assert refused.cancelled
        limited.room.let_all_out()
    assert await limited.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_hook_may_use_the_pipeline_itself() -> None:
    """Outside locks: a call made in `on_rejected` is a call like any other."""
    outcomes: list[Any] = []

    async def on_rejected(event: object) -> None:
        if not outcomes:
            outcomes.append("asking")
            outcomes.append(await limited.pipeline.settle(ok))

    limited: Limited = Limited(1, on_rejected=on_rejected)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room)
        await tick()
        await limited.refusal()
        limited.room.let_all_out()
    assert isinstance(outcomes[1], Rejected)


# --- state -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_each_build_has_permits_of_its_own() -> None:
    """State is born in `build()`: two builds are two limits."""
    builder = ResiliencePipelineBuilder().add_concurrency_limiter(1)
    one, two = builder.build(), builder.build()
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, one.execute, room)
        await tick()
        assert isinstance(await one.settle(ok), Rejected)
        assert await two.execute(ok) == 1
        room.let_all_out()


@pytest.mark.anyio
async def test_nesting_a_pipeline_shares_its_limit() -> None:
    """Small print: a limit is shared by nesting one pipeline in others."""
    shared = ResiliencePipelineBuilder(name="pool").add_concurrency_limiter(1).build()
    one = ResiliencePipelineBuilder(name="one").add_pipeline(shared).build()
    two = ResiliencePipelineBuilder(name="two").add_pipeline(shared).build()
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, one.execute, room)
        await tick()
        outcome = await two.settle(ok)
        assert isinstance(outcome, Rejected)
        assert outcome.error.pipeline_name == "pool"
        assert isinstance(await shared.settle(ok), Rejected)
        room.let_all_out()
    assert await two.execute(ok) == 1


@pytest.mark.anyio
async def test_a_retry_outside_takes_a_permit_for_each_attempt() -> None:
    """Composition: inside a retry the permit is free while the retry waits."""
    clock = VirtualClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_retry(max_retry_attempts=1, delay=10)
        .add_concurrency_limiter(1)
        .build()
    )
    fails_once = Scripted(ConnectionError, 1)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fails_once)
        await tick()
        assert await pipeline.execute(ok) == 1
        await clock.advance(10)
        assert call.value == 1


# --- streams -----------------------------------------------------------------------------------


async def endless() -> AsyncIterator[int]:
    while True:
        yield 1


async def silent() -> AsyncIterator[int]:
    await anyio.sleep_forever()
    yield 1


async def failing() -> AsyncIterator[int]:
    raise ConnectionError
    yield 1


async def empty() -> AsyncIterator[int]:
    return
    yield 1


@pytest.mark.anyio
async def test_a_stream_holds_its_permit_until_its_first_chunk_only() -> None:
    """Case ST-21, B-6: ten streams are open under a limit of two; one cancelled early frees its own."""
    limited = Limited(2)
    streams = [limited.pipeline.execute_stream(endless) for _ in range(10)]
    assert [await anext(stream) for stream in streams] == [1] * 10
    async with anyio.create_task_group() as tasks:
        pull = spawn(tasks, limited.pipeline.execute_stream(silent).__anext__)
        await tick()
        pull.cancel()
        await tick()
        assert pull.cancelled
    await limited.check_permits(2)
    for stream in streams:
        await stream.aclose()


@pytest.mark.anyio
async def test_a_stream_takes_a_permit_while_it_connects() -> None:
    """Streams: until its first chunk a stream is inside like any call."""
    limited = Limited(1)
    async with anyio.create_task_group() as tasks:
        pull = spawn(tasks, limited.pipeline.execute_stream(silent).__anext__)
        await tick()
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await anext(limited.pipeline.execute_stream(endless))
        pull.cancel()
    await limited.check_permits(1)


@pytest.mark.anyio
@pytest.mark.parametrize("factory", [failing, empty])
async def test_a_stream_without_a_first_chunk_gives_its_permit_back(
    factory: Callable[[], AsyncIterator[int]],
) -> None:
    """B-13, MC-6: on an error and on an early end."""
    limited = Limited(1)
    for _ in range(3):
        with pytest.raises((ConnectionError, StopAsyncIteration)):
            await anext(limited.pipeline.execute_stream(factory))
    await limited.check_permits(1)


@pytest.mark.anyio
async def test_a_stream_left_early_or_never_read_holds_nothing() -> None:
    """MC-6: break and close after the first chunk; never iterated takes none."""
    limited = Limited(1)
    unread = limited.pipeline.execute_stream(endless)
    async with limited.pipeline.execute_stream(endless) as stream:
        async for _ in stream:
            break
    await limited.check_permits(1)
    await unread.aclose()


@pytest.mark.anyio
async def test_streams_wait_in_the_same_queue_as_calls() -> None:
    """First come, first served, whatever kind the calls are of."""
    limited = Limited(1, 5)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.pipeline.execute, limited.room, "call")
        await tick()
        stream = limited.pipeline.execute_stream(endless)
        pull = spawn(tasks, stream.__anext__)
        await tick()
        last = spawn(tasks, limited.pipeline.execute, limited.room, "last")
        await tick()
        assert not pull.done
        limited.room.let_out("call")
        await tick()
        assert pull.value == 1
        assert limited.room.names == ["last"]
        limited.room.let_all_out()
        await stream.aclose()
    assert last.value == "last"


def test_a_permit_taken_back_while_its_waiter_is_being_woken_is_passed_on_once() -> None:
    """Interleavings 3 and 4 at once: two find that the waiter's loop is gone, and one of them passes it on."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, 5).build()
    bound: Any = pipeline._head
    limiter = bound.__self__

    class Gone:
        def is_alive(self) -> bool:
            return False

        def wake(self) -> bool:
            limiter._recover()  # another thread's, in between
            return False

    with limiter._lock:
        assert limiter._take()
        limiter._queue.join(Gone())
    limiter._release()
    assert limiter.free == 1


# --- options -----------------------------------------------------------------------------------


def test_defaults() -> None:
    """Options read back under their names."""
    options = ConcurrencyLimiter(5)
    assert (options.permit_limit, options.queue_limit) == (5, 0)
    assert (options.max_wait, options.on_rejected) == (None, None)
    assert options.name == "ConcurrencyLimiter"


@pytest.mark.parametrize("max_wait", [2, 2.0, "2s", timedelta(seconds=2)])
def test_max_wait_takes_every_duration_form(max_wait: Any) -> None:
    """Durations: read back in seconds."""
    assert ConcurrencyLimiter(1, 2, max_wait=max_wait).max_wait == 2.0


def test_the_limits_are_positional_or_named() -> None:
    """Signature: `(permit_limit, queue_limit=0, *, ...)`."""
    assert ConcurrencyLimiter(2, 3) == ConcurrencyLimiter(permit_limit=2, queue_limit=3)
    with pytest.raises(TypeError):
        ConcurrencyLimiter(2, 3, 4)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        ConcurrencyLimiter()  # type: ignore[call-arg]


BAD_OPTIONS = [
    ("permit_limit", 0),
    ("permit_limit", -1),
    ("permit_limit", 1.0),
    ("permit_limit", True),
    ("permit_limit", "5"),
    ("permit_limit", None),
    ("permit_limit", math.nan),
    ("queue_limit", -1),
    ("queue_limit", 1.5),
    ("queue_limit", False),
    ("queue_limit", math.nan),
    ("queue_limit", -math.inf),
    ("queue_limit", None),
    ("max_wait", -1),
    ("max_wait", "soon"),
    ("max_wait", math.nan),
    ("max_wait", True),
    ("on_rejected", 5),
    ("name", 5),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """RL-08, bad input: an `OptionsError`, also a `ValueError`, that names the option."""
    options: dict[str, Any] = {"permit_limit": 1, option: value}
    with pytest.raises(OptionsError) as caught:
        ConcurrencyLimiter(**options)
    assert isinstance(caught.value, ValueError)
    [problem] = caught.value.problems
    assert problem.startswith(f"{option} must be ")


def test_all_bad_options_are_reported_at_once() -> None:
    """One error lists every bad field."""
    bad: dict[str, Any] = {"permit_limit": 0, "queue_limit": -1, "max_wait": "soon"}
    with pytest.raises(OptionsError) as caught:
        ResiliencePipelineBuilder().add_concurrency_limiter(**bad)
    assert len(caught.value.problems) == 3


def test_a_misspelt_option_is_corrected() -> None:
    """Options: the right name is suggested."""
    options: dict[str, Any] = {"que_limit": 5}
    with pytest.raises(TypeError, match="'queue_limit'"):
        ConcurrencyLimiter(1, **options)
