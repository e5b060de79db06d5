"""Lock: one inside at a time, in turn; who passes at once, until when it is held, and that it is never lost."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import gc
import math
import pickle
import weakref
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from resilience_pipeline import (
    ExecutionRejectedError,
    Failure,
    Lock,
    LockRejectedError,
    LockRejectedEvent,
    MisuseError,
    OptionsError,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
)
from resilience_pipeline.telemetry import Severity
from resilience_pipeline.testing import VirtualClock, capture_events
from support.inside import Room, boom, ok
from support.scripted import Background, Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder
ACCOUNT = PropertyKey[Any]("account")


def account_of(context: ResilienceContext) -> Any:
    return context.properties.get(ACCOUNT)


def at(account: Any) -> ResilienceContext:
    return ResilienceContext(properties={ACCOUNT: account})


class Locked:
    """Pipelines of one shared lock, and the room their calls stay in."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        self.room = Room()
        self.lock = ResilienceLock()
        self.pipeline = B(name="svc", clock=self.clock).add_lock(self.lock, **options).build()

    async def arrive(self, tasks: TaskGroup, name: Any) -> Background:
        """Start a call that stays in the room, and let it get as far as it can."""
        call = spawn(tasks, self.pipeline.settle, self.room, name)
        await tick(5)
        return call

    def check_free(self) -> None:
        assert repr(self.lock) == "<ResilienceLock free>"


# --- mutual exclusion --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_one_is_inside_at_a_time_first_come_first_served() -> None:
    """LK-1: no lost updates, peak 1, in the order of arrival."""
    locked = Locked()
    async with anyio.create_task_group() as tasks:
        calls = [await locked.arrive(tasks, number) for number in range(20)]
        while locked.room.names:
            locked.room.let_out(locked.room.names[0])
            await tick()
    assert locked.room.peak == 1
    assert locked.room.entered == list(range(20))
    assert [call.value for call in calls] == [Success(number) for number in range(20)]
    locked.check_free()


@pytest.mark.anyio
async def test_deposits_of_many_tasks_are_all_counted() -> None:
    """LK-1, the bank: read, wait, write: without the lock 40 in place of 100, with it all of it."""
    balance = 0
    pipeline = B().add_lock().build()

    async def deposit() -> None:
        nonlocal balance
        found = balance
        await anyio.lowlevel.checkpoint()
        balance = found + 1

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(pipeline.execute, deposit)
    assert balance == 100


@pytest.mark.anyio
async def test_different_locks_overlap() -> None:
    """LK-1: two locks, peak 2; each build has a lock of its own, though from the same options."""
    room, builder = Room(), B().add_lock()
    one, other = builder.build(), builder.build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.execute, room, "one")
        tasks.start_soon(other.execute, room, "other")
        await tick()
        assert room.inside == 2
        room.let_all_out()


@pytest.mark.anyio
async def test_pipelines_share_a_lock_that_they_are_given() -> None:
    """Contract: `ResilienceLock()` may be shared by pipelines, and is then one lock for all."""
    lock, room = ResilienceLock(), Room()
    one = B().add_lock(lock).build()
    other = B().add_retry(delay=0).add_lock(lock).build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.execute, room, "one")
        await tick()
        tasks.start_soon(other.execute, room, "other")
        await tick()
        assert room.names == ["one"]
        room.let_out("one")
        await tick()
        assert room.names == ["other"]
        room.let_out("other")


@pytest.mark.anyio
async def test_a_pipeline_that_is_nested_in_two_others_has_one_lock() -> None:
    """Contract: the state of a nested pipeline is shared with whoever else uses it."""
    inner, room = B().add_lock().build(), Room()
    one, other = (B().add_pipeline(inner).build() for _ in range(2))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.execute, room, "one")
        await tick()
        tasks.start_soon(other.execute, room, "other")
        await tick()
        assert room.names == ["one"]
        room.let_out("one")
        await tick()
        room.let_out("other")


@pytest.mark.anyio
async def test_it_is_given_back_whatever_comes_out() -> None:
    """LK-2, LK-5: a value, an error, a misuse, a cancellation, and what is no `Exception`."""

    class Stop(BaseException):
        pass

    async def stop() -> int:
        raise Stop

    locked = Locked()
    no_coroutine: Any = lambda: 1  # noqa: E731 - what a user might hand in
    for _ in range(2):
        assert await locked.pipeline.execute(ok) == 1
        assert isinstance(await locked.pipeline.settle(boom), Failure)
        assert isinstance(await raised_by(locked.pipeline.execute, no_coroutine), MisuseError)
        with pytest.raises(Stop):
            await locked.pipeline.execute(stop)
        locked.check_free()
        async with anyio.create_task_group() as tasks:
            hanging = spawn(tasks, locked.pipeline.execute, Hanging())
            await tick()
            waiter = spawn(tasks, locked.pipeline.execute, ok)
            await tick()
            hanging.cancel()
            await tick()
            assert waiter.value == 1
    locked.check_free()


@pytest.mark.anyio
async def test_newcomers_do_not_overtake() -> None:
    """The lock goes from one to the next; whoever comes in between finds it held."""
    locked = Locked()
    arrived = 0

    async with anyio.create_task_group() as tasks:

        async def arrive() -> None:
            nonlocal arrived
            spawn(tasks, locked.pipeline.execute, locked.room, arrived)
            arrived += 1
            await anyio.lowlevel.checkpoint()

        for _ in range(20):
            await arrive()
        while locked.room.names:
            locked.room.let_out(locked.room.names[0])
            if arrived < 60:
                await arrive()
            await tick(5)
    assert locked.room.entered == list(range(60))
    assert locked.room.peak == 1


@pytest.mark.asyncio
async def test_a_newcomer_in_the_very_turn_of_a_release_does_not_overtake() -> None:
    """Between the release and the waiter's next step the lock belongs to the waiter."""
    pipeline = B().add_lock().build()
    order: list[str] = []
    newcomers: list[asyncio.Task[None]] = []

    async def enter(name: str) -> None:
        order.append(name)

    async def hold(until: asyncio.Event) -> None:
        await until.wait()
        outside = contextvars.Context()
        newcomers.append(asyncio.create_task(pipeline.execute(enter, "newcomer"), context=outside))

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
async def test_a_cancelled_waiter_never_runs_and_the_holder_is_left_alone() -> None:
    """LK-4: queued and cancelled: the callback never starts; the holder keeps the lock."""
    locked, record = Locked(), Scripted(1)
    async with anyio.create_task_group() as tasks:
        inside = await locked.arrive(tasks, "holder")
        waiter = spawn(tasks, locked.pipeline.execute, record)
        await tick()
        third = spawn(tasks, locked.pipeline.execute, ok)
        await tick()
        waiter.cancel()
        await tick()
        assert waiter.cancelled
        assert not inside.done
        assert not third.done
        locked.room.let_all_out()
        await tick()
        assert third.value == 1
    assert record.calls == 0
    locked.check_free()


@pytest.mark.anyio
async def test_who_is_cancelled_already_does_not_acquire() -> None:
    """LK-4: already cancelled, with the lock held by somebody else, never gets it."""
    locked, record = Locked(), Scripted(1)
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        with anyio.CancelScope() as scope:
            scope.cancel()
            await locked.pipeline.execute(record)
        assert scope.cancelled_caught
        locked.room.let_all_out()
    assert record.calls == 0
    locked.check_free()


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_it_is_not_lost_when_a_waiter_is_cancelled_around_its_hand_over(
    turns: int, cancelled_first: bool
) -> None:
    """Hand-off race: handed to a waiter that is being cancelled it goes to the next, at any moment."""
    locked = Locked()
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        waiter = await locked.arrive(tasks, "cancelled")
        second = await locked.arrive(tasks, "next")
        if cancelled_first:
            waiter.cancel()
            await tick(turns)
            locked.room.let_out("holder")
        else:
            locked.room.let_out("holder")
            await tick(turns)
            waiter.cancel()
        await tick()
        assert waiter.cancelled
        assert locked.room.names == ["next"]
        locked.room.let_all_out()
        await tick()
        assert second.value == Success("next")
    assert locked.room.peak == 1
    locked.check_free()


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_it_is_not_lost_when_a_task_is_cancelled_around_its_hand_over(turns: int) -> None:
    """The same by `task.cancel()`: it comes out, is not taken back, and the next one gets in."""
    locked = Locked()
    calls = []
    for name in ("holder", "cancelled", "next"):
        calls.append(asyncio.create_task(locked.pipeline.execute(locked.room, name)))
        await tick()
    locked.room.let_out("holder")
    for _ in range(turns):
        await asyncio.sleep(0)
    calls[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[1]
    await tick()
    assert locked.room.names == ["next"]
    locked.room.let_all_out()
    assert await calls[2] == "next"
    assert await calls[0] == "holder"
    locked.check_free()


@pytest.mark.asyncio
async def test_cancelled_right_after_the_hand_over_it_does_not_begin() -> None:
    """1.10, 7: cancelled at the very moment of the hand-off, calls and streams do not start."""
    locked, record, finished = Locked(), Scripted(1), asyncio.Event()

    async def holder() -> None:
        await finished.wait()
        asyncio.get_running_loop().call_soon(waiter.cancel)

    first = asyncio.create_task(locked.pipeline.execute(holder))
    await tick()
    waiter = asyncio.create_task(locked.pipeline.execute(record))
    await tick()
    second = asyncio.create_task(locked.pipeline.execute(ok))
    await tick()
    finished.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert await second == 1
    assert record.calls == 0
    await first


@pytest.mark.asyncio
async def test_it_passes_through_a_row_of_cancelled_waiters() -> None:
    """Whoever is handed it and can't use it passes it on, one after the other."""
    locked = Locked()
    holder = asyncio.create_task(locked.pipeline.execute(locked.room, "holder"))
    await tick()
    waiters = [asyncio.create_task(locked.pipeline.execute(locked.room, n)) for n in range(20)]
    last = asyncio.create_task(locked.pipeline.execute(locked.room, "last"))
    await tick()
    locked.room.let_out("holder")
    for waiter in waiters:
        waiter.cancel()
    outcomes = await asyncio.gather(*waiters, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
    await tick()
    assert locked.room.entered == ["holder", "last"]
    locked.room.let_all_out()
    assert await last == "last"
    await holder
    locked.check_free()


@pytest.mark.anyio
async def test_a_timeout_outside_ends_the_wait() -> None:
    """CO-1, timeout(lock(fn)): bounds the wait, and the waiter leaves the queue instead of running later."""
    clock, room, record = VirtualClock(), Room(), Scripted(1)
    lock = ResilienceLock()
    holding = B().add_lock(lock).build()
    pipeline = B(clock=clock).add_timeout(5).add_lock(lock).build()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, holding.execute, room)
        await tick()
        waiter = spawn(tasks, pipeline.execute, record)
        await tick()
        await clock.advance(5)
        assert isinstance(waiter.error, TimeoutRejectedError)
        room.let_all_out()
        await tick()
    assert record.calls == 0
    assert repr(lock) == "<ResilienceLock free>"


# --- max_wait ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_waiting_is_bounded_by_max_wait() -> None:
    """Contract: past `max_wait` a `LockRejectedError`, which is an `ExecutionRejectedError`."""
    locked, record = Locked(max_wait=2), Scripted(1)
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        waiter = spawn(tasks, locked.pipeline.settle, record)
        await tick()
        await locked.clock.advance(1.99)
        assert not waiter.done
        await locked.clock.advance(0.02)
        assert isinstance(waiter.value, Rejected)
        error = waiter.value.error
        assert isinstance(error, LockRejectedError)
        assert isinstance(error, ExecutionRejectedError)
        locked.room.let_all_out()
    assert record.calls == 0
    locked.check_free()


@pytest.mark.anyio
async def test_a_refusal_names_pipeline_strategy_operation_and_limit() -> None:
    """Errors: data as attributes, the number that was exceeded in the message; no `retry_after`."""
    locked = Locked(max_wait="500ms", name="account")
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        waiter = spawn(tasks, locked.pipeline.execute, ok)
        context = ResilienceContext(operation_key="deposit")
        labelled = Background(lambda: locked.pipeline.execute(ok, context=context))
        tasks.start_soon(labelled.run)
        await tick()
        await locked.clock.advance(1)
        locked.room.let_all_out()
    error: Any = labelled.error
    assert (error.pipeline_name, error.strategy_name) == ("svc", "account")
    assert (error.operation_key, error.retry_after) == ("deposit", None)
    assert str(error) == (
        "pipeline 'svc', strategy 'account': the lock did not become free within max_wait=0.5 s"
    )
    assert waiter.error is not error
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is LockRejectedError
        assert (str(twin), twin.strategy_name) == (str(error), "account")


@pytest.mark.anyio
@pytest.mark.parametrize("max_wait", [0, 2])
async def test_listeners_are_told_of_a_refusal(max_wait: float) -> None:
    """`OnLockRejected`, an error like the refusals of limiters."""
    locked = Locked(max_wait=max_wait, name="account")
    context = ResilienceContext(operation_key="deposit")
    with capture_events() as events:
        async with anyio.create_task_group() as tasks:
            await locked.arrive(tasks, "holder")
            refused = Background(lambda: locked.pipeline.settle(ok, context=context))
            tasks.start_soon(refused.run)
            await tick()
            await locked.clock.advance(max_wait)
            locked.room.let_all_out()
    (event,) = [each for each in events if isinstance(each, LockRejectedEvent)]
    assert (event.name, event.severity) == ("OnLockRejected", Severity.ERROR)
    assert (event.pipeline_name, event.strategy_name) == ("svc", "account")
    assert event.context is context
    assert (event.operation_key, event.outcome) == ("deposit", None)
    assert isinstance(refused.value, Rejected)


@pytest.mark.anyio
async def test_a_max_wait_of_zero_does_not_wait() -> None:
    """`max_wait=0` passes when the lock is free, and is refused at once when it is not."""
    locked = Locked(max_wait=0)
    assert await locked.pipeline.execute(ok) == 1
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        assert isinstance(await locked.pipeline.settle(ok), Rejected)
        locked.room.let_all_out()
    locked.check_free()


@pytest.mark.anyio
@pytest.mark.parametrize("grant_first", [True, False])
async def test_when_hand_over_and_expiry_fall_together_the_call_runs(grant_first: bool) -> None:
    """A lock that was handed over is used, though the time is up in the same turn."""
    locked = Locked(max_wait=2)
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        waiter = await locked.arrive(tasks, "waiter")
        if grant_first:
            locked.room.let_out("holder")
            await locked.clock.advance(2)
        else:
            await locked.clock.advance(1.999999)
            locked.room.let_out("holder")
            await locked.clock.advance(0.000001)
        await tick()
        if not waiter.done:
            locked.room.let_out("waiter")
            await tick()
        assert waiter.value == Success("waiter")
    locked.check_free()


# --- reentrancy --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_call_inside_the_owner_passes_at_once() -> None:
    """RE-1: nested, recursive, mutually recursive, three levels: no deadlock."""
    lock = ResilienceLock()
    one, other = B().add_lock(lock).build(), B().add_lock(lock).build()

    async def count_down(n: int) -> int:
        if n == 0:
            return 0
        return 1 + await one.execute(count_up, n - 1)

    async def count_up(n: int) -> int:
        if n == 0:
            return 0
        return 1 + await other.execute(count_down, n - 1)

    assert await one.execute(count_down, 9) == 9
    assert repr(lock) == "<ResilienceLock free>"


@pytest.mark.anyio
async def test_it_stays_held_until_the_outermost_call_ends() -> None:
    """RE-1: the end of a nested call does not let anybody in."""
    locked, left = Locked(), anyio.Event()

    async def outer() -> None:
        await locked.pipeline.execute(ok)
        await left.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(locked.pipeline.execute, outer)
        await tick()
        contender = spawn(tasks, locked.pipeline.execute, ok)
        await tick()
        assert not contender.done
        left.set()
        await tick()
        assert contender.value == 1


@pytest.mark.anyio
async def test_an_error_deep_inside_releases_all() -> None:
    """RE-2: a throw three levels deep lets go of all of them."""
    locked = Locked()

    async def middle() -> int:
        return await locked.pipeline.execute(boom)

    async def outer() -> int:
        return await locked.pipeline.execute(middle)

    with pytest.raises(ConnectionError):
        await locked.pipeline.execute(outer)
    locked.check_free()


@pytest.mark.anyio
async def test_a_child_task_of_the_owner_passes_and_siblings_overlap() -> None:
    """Contract: the same task or a child passes at once; siblings inside one holder are not kept apart."""
    locked = Locked()

    async def outer() -> None:
        async with anyio.create_task_group() as children:
            for name in "abc":
                children.start_soon(locked.pipeline.execute, locked.room, name)
            await tick()
            assert locked.room.inside == 3
            locked.room.let_all_out()

    await locked.pipeline.execute(outer)
    assert locked.room.peak == 3
    locked.check_free()


@pytest.mark.anyio
@pytest.mark.parametrize("failing", [False, True])
async def test_escaped_children_keep_it_held_until_all_have_ended(failing: bool) -> None:
    """RE-3: held until the outermost call and every child still inside has ended, however that ends."""
    locked = Locked()
    async with anyio.create_task_group() as tasks:

        async def outer() -> None:
            for name in ("first", "second"):
                spawn(tasks, locked.pipeline.execute, locked.room, name)
            await tick()

        await locked.pipeline.execute(outer)
        contender = spawn(tasks, locked.pipeline.execute, ok)
        await tick()
        error = ConnectionError() if failing else None
        for name in ("second", "first"):
            assert not contender.done
            locked.room.let_out(name, error)
            await tick()
        assert contender.value == 1
    locked.check_free()


@pytest.mark.anyio
async def test_who_waits_behind_escaped_work_can_be_cancelled() -> None:
    """RE-4: the contender leaves; the holder is unaffected."""
    locked, record = Locked(), Scripted(1)
    async with anyio.create_task_group() as tasks:

        async def outer() -> None:
            spawn(tasks, locked.pipeline.execute, locked.room, "escaped")
            await tick()

        await locked.pipeline.execute(outer)
        contender = spawn(tasks, locked.pipeline.execute, record)
        await tick()
        contender.cancel()
        await tick()
        assert contender.cancelled
        assert locked.room.names == ["escaped"]
        locked.room.let_all_out()
    assert record.calls == 0
    locked.check_free()


@pytest.mark.anyio
async def test_an_ownership_that_was_given_up_queues_like_any_other() -> None:
    """Contract: a child that calls after its owner has left is recognised, and waits its turn."""
    locked, released = Locked(), anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def escaped() -> int:
            await released.wait()
            return await locked.pipeline.execute(ok)

        async def outer() -> Background:
            return spawn(tasks, escaped)

        stale = await locked.pipeline.execute(outer)
        await locked.arrive(tasks, "next")
        released.set()
        await tick()
        assert not stale.done
        locked.room.let_all_out()
        await tick()
        assert stale.value == 1
    locked.check_free()


@pytest.mark.anyio
async def test_an_old_ownership_is_not_mistaken_for_that_of_the_one_who_comes_back() -> None:
    """Each hand-over makes a new ownership: a child of an earlier call does not share in a later one."""
    locked, released = Locked(), anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def escaped() -> int:
            await released.wait()
            return await locked.pipeline.execute(ok)

        async def outer() -> Background:
            return spawn(tasks, escaped)

        started: list[Background] = []

        async def same_task() -> None:
            started.append(await locked.pipeline.execute(outer))
            await locked.pipeline.execute(locked.room, "again")

        tasks.start_soon(same_task)
        await tick()
        released.set()
        await tick()
        assert not started[0].done
        locked.room.let_out("again")
        await tick()
        assert started[0].value == 1


@pytest.mark.anyio
async def test_a_stale_child_that_gets_its_turn_is_an_owner_of_its_own() -> None:
    """Its own calls inside pass, and it gives the lock back at its end."""
    locked, released = Locked(), anyio.Event()

    async def nested() -> int:
        return await locked.pipeline.execute(ok)

    async with anyio.create_task_group() as tasks:

        async def escaped() -> int:
            await released.wait()
            return await locked.pipeline.execute(nested)

        async def outer() -> Background:
            return spawn(tasks, escaped)

        stale = await locked.pipeline.execute(outer)
        released.set()
        await tick()
        assert stale.value == 1
    locked.check_free()


@pytest.mark.anyio
async def test_ownership_does_not_leak_into_the_caller() -> None:
    """After the call its task owns nothing: a task it starts then is a stranger."""
    locked = Locked()
    await locked.pipeline.execute(ok)
    async with anyio.create_task_group() as tasks:
        await locked.arrive(tasks, "holder")
        child = spawn(tasks, locked.pipeline.execute, ok)
        await tick()
        assert not child.done
        locked.room.let_all_out()
        await tick()
        assert child.value == 1


@pytest.mark.anyio
async def test_two_locks_nested_keep_the_outer_ownership() -> None:
    """RE-5: the ownership of the outer survives the inner's exit, and a real wait on the inner."""
    outer_lock, inner_lock, room = ResilienceLock(), ResilienceLock(), Room()
    outer, inner = B().add_lock(outer_lock).build(), B().add_lock(inner_lock).build()
    seen: list[str] = []

    async def work() -> None:
        await inner.execute(ok)  # has to wait for the room
        seen.append(repr(outer_lock))
        assert await outer.execute(ok) == 1
        seen.append(repr(inner_lock))

    async with anyio.create_task_group() as tasks:
        spawn(tasks, inner.execute, room)
        await tick()
        call = spawn(tasks, outer.execute, work)
        await tick()
        contender = spawn(tasks, outer.execute, ok)
        await tick()
        assert not call.done
        room.let_all_out()
        await tick()
        assert (call.done, contender.value) == (True, 1)
    assert seen == ["<ResilienceLock held, 1 waiting>", "<ResilienceLock free>"]


@pytest.mark.anyio
async def test_three_locks_nested_are_all_owned_inside() -> None:
    """1.5: A around B around C restores each enclosing ownership on exit."""
    a, b, c = (B().add_lock().build() for _ in range(3))

    async def innermost() -> int:
        return sum([await each.execute(ok) for each in (a, b, c)])

    async def middle() -> int:
        return await c.execute(innermost) + await a.execute(ok) + await b.execute(ok)

    async def outermost() -> int:
        return await b.execute(middle) + await a.execute(ok)

    assert await a.execute(outermost) == 6


@pytest.mark.anyio
async def test_two_locks_in_opposite_order_wait_until_max_wait() -> None:
    """1.5: still a deadlock, which is not detected; `max_wait` turns it into an error."""
    clock = VirtualClock()
    a, b = (B(clock=clock).add_lock(max_wait=5).build() for _ in range(2))

    async def both(first: Any, second: Any) -> Any:
        async def inside() -> Any:
            await tick()
            return await second.execute(ok)

        return await first.execute(inside)

    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, both, a, b), spawn(tasks, both, b, a)]
        await tick(100)
        assert not any(call.done for call in calls)
        await clock.advance(5)
    assert any(isinstance(call.error, LockRejectedError) for call in calls)
    assert [await each.execute(ok) for each in (a, b)] == [1, 1]


@pytest.mark.anyio
async def test_without_reentrancy_a_nested_call_waits_like_any_other() -> None:
    """LK-3: recursion, direct and mutual, waits for itself, for `max_wait` if there is one."""
    locked = Locked(reentrant=False, max_wait=3)

    async def outer() -> Any:
        return await locked.pipeline.settle(ok)

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, locked.pipeline.execute, outer)
        await tick()
        assert not call.done
        await locked.clock.advance(3)
        assert isinstance(call.value, Rejected)
        assert isinstance(call.value.error, LockRejectedError)
    locked.check_free()


@pytest.mark.anyio
async def test_without_reentrancy_a_child_task_waits_for_its_turn() -> None:
    """A child that its parent does not wait for comes after it, and there is no deadlock."""
    locked = Locked(reentrant=False)
    async with anyio.create_task_group() as tasks:

        async def outer() -> Background:
            child = spawn(tasks, locked.pipeline.execute, locked.room)
            await tick()
            assert locked.room.inside == 0
            return child

        child = await locked.pipeline.execute(outer)
        await tick()
        locked.room.let_all_out()
        await tick()
        assert child.done
    locked.check_free()


@pytest.mark.anyio
async def test_whether_a_nested_call_passes_is_said_by_its_own_pipeline() -> None:
    """`reentrant` is of the pipeline that is called; the lock is the same for both."""
    lock, clock = ResilienceLock(), VirtualClock()
    passing = B(clock=clock).add_lock(lock).build()
    waiting = B(clock=clock).add_lock(lock, reentrant=False, max_wait=0).build()

    async def call(pipeline: Any) -> Any:
        return (await pipeline.settle(ok)).ok

    assert await waiting.execute(call, passing)
    assert not await passing.execute(call, waiting)
    assert await passing.execute(call, passing)


@pytest.mark.anyio
async def test_a_lock_around_itself_in_one_pipeline_passes() -> None:
    """Two layers with one lock are one ownership."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).add_retry(delay=0).add_lock(lock).build()
    assert await pipeline.execute(ok) == 1
    assert repr(lock) == "<ResilienceLock free>"


# --- order -------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("held", [True, False])
async def test_held_across_the_back_off_or_not_by_order(held: bool) -> None:
    """CO-1: lock(retry(fn)) holds it during back-off; retry(lock(fn)) gives it back for that."""
    clock, lock = VirtualClock(), ResilienceLock()
    builder = B(clock=clock)
    if held:
        builder.add_lock(lock).add_retry(delay=10)
    else:
        builder.add_retry(delay=10).add_lock(lock)
    pipeline = builder.build()
    flaky = Scripted(ConnectionError, 1)
    other = B().add_lock(lock).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, flaky)
        await tick()
        assert (flaky.calls, call.done) == (1, False)
        contender = spawn(tasks, other.execute, ok)
        await tick()
        assert contender.done is not held
        await clock.advance(10)
        await tick()
        assert (call.value, contender.value) == (1, 1)


@pytest.mark.anyio
async def test_hedges_inside_share_the_lock_and_outside_take_turns() -> None:
    """Inside, attempts are children of the owner; outside, each has to wait for the lock."""
    room = Room()
    names = iter(range(10))

    async def enter() -> Any:
        return await room(next(names))

    inside = B().add_lock().add_hedging(delay=0).build()
    outside = B().add_hedging(delay=0).add_lock().build()
    async with anyio.create_task_group() as tasks:
        for pipeline, peak in ((inside, 2), (outside, 1)):
            call = spawn(tasks, pipeline.execute, enter)
            await tick()
            assert room.inside == peak
            room.let_all_out()
            await tick()
            assert call.done


@pytest.mark.anyio
async def test_an_attempt_that_never_got_the_lock_was_never_started() -> None:
    """`idempotent=False`: a refusal by the lock may be repeated, as the callback never ran."""
    lock, clock, record = ResilienceLock(), VirtualClock(), Scripted(1)
    holding, room = B().add_lock(lock).build(), Room()
    pipeline = B(clock=clock).add_retry(delay=5).add_lock(lock, max_wait=1).build()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, holding.execute, room)
        await tick()
        call = Background(lambda: pipeline.execute(record, idempotent=False))
        tasks.start_soon(call.run)
        await tick()
        await clock.advance(1)
        room.let_all_out()
        await tick()
        await clock.advance(5)
        await tick()
        assert call.value == 1
    assert record.calls == 1


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_each_key_has_a_lock_of_its_own() -> None:
    """Contract: `key=` gives a lock per key; equal keys keep each other out."""
    lock, room = ResilienceLock(), Room()
    pipeline = B().add_lock(lock, key=account_of).build()
    async with anyio.create_task_group() as tasks:

        async def call(account: Any, name: Any) -> None:
            await pipeline.execute(room, name, context=at(account))

        for account, name in (("a", 1), ("b", 2), ("a", 3), (None, 4)):
            tasks.start_soon(call, account, name)
            await tick()
        assert room.names == [1, 2, 4]
        assert repr(lock) == "<ResilienceLock held for 3 keys, 1 waiting>"
        room.let_all_out()
        await tick()
        assert room.names == [3]
        assert repr(lock) == "<ResilienceLock held for 1 key>"
        room.let_all_out()
    assert repr(lock) == "<ResilienceLock free>"


@pytest.mark.anyio
async def test_reentrancy_is_by_key() -> None:
    """The bank: `transfer` holds two accounts and calls what locks each of them again."""
    pipeline = B().add_lock(key=account_of).build()
    balances = {"a": 100, "b": 100}

    async def add(account: str, amount: int) -> None:
        found = balances[account]
        await anyio.lowlevel.checkpoint()
        balances[account] = found + amount

    async def locked(account: str, fn: Any, *args: Any) -> Any:
        return await pipeline.execute(fn, *args, context=at(account))

    async def transfer(source: str, target: str, amount: int) -> None:
        async def both() -> None:
            await locked(source, add, source, -amount)
            await locked(target, add, target, amount)

        first, second = sorted((source, target))  # or two of them could wait for each other
        await locked(first, lambda: locked(second, both))

    async with anyio.create_task_group() as tasks:
        for _ in range(25):
            tasks.start_soon(transfer, "a", "b", 3)
            tasks.start_soon(transfer, "b", "a", 2)
    assert balances == {"a": 75, "b": 125}


@pytest.mark.anyio
async def test_pipelines_that_share_a_lock_share_its_keys() -> None:
    """One account is one account, whichever pipeline asks for it; without a key it is another lock."""
    lock, room = ResilienceLock(), Room()
    one, other = (B().add_lock(lock, key=account_of).build() for _ in range(2))
    whole = B().add_lock(lock).build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: one.execute(room, "one", context=at("a")))
        await tick()
        tasks.start_soon(lambda: other.execute(room, "other", context=at("a")))
        tasks.start_soon(whole.execute, room, "whole")
        await tick()
        assert room.names == ["one", "whole"]
        room.let_all_out()
        await tick()
        room.let_all_out()


@pytest.mark.anyio
async def test_keys_that_nobody_holds_or_waits_for_are_forgotten() -> None:
    """Rule 15: what is remembered per key has a bound, and forgetting changes no answer."""

    class Key:
        pass

    lock, clock = ResilienceLock(), VirtualClock()
    pipeline = B(clock=clock).add_lock(lock, key=account_of, max_wait=1).build()

    async def use(key: Key) -> None:
        """Hold it, be refused, and leave the queue."""

        def call(fn: Any) -> Any:
            return pipeline.execute(fn, context=at(key))

        room = Room()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, room)
            await tick()
            refused = spawn(tasks, call, ok)
            leaver = spawn(tasks, call, ok)
            await tick()
            leaver.cancel()
            await clock.advance(1)
            assert isinstance(refused.error, LockRejectedError)
            room.let_all_out()

    known = []
    for _ in range(3):
        key = Key()
        known.append(weakref.ref(key))
        await use(key)
        del key
    gc.collect()
    assert repr(lock) == "<ResilienceLock free>"
    assert [each() for each in known] == [None] * 3


@pytest.mark.anyio
async def test_a_key_may_be_a_coroutine_function() -> None:
    """Functions of the user's may be plain or coroutine functions."""

    async def key(context: ResilienceContext) -> Any:
        await anyio.lowlevel.checkpoint()
        return context.operation_key

    pipeline, room = B().add_lock(key=key).build(), Room()
    async with anyio.create_task_group() as tasks:
        for name in "aab":
            spawn(tasks, partial(pipeline.execute, room, name, operation_key=name))
        await tick()
        assert sorted(room.names) == ["a", "b"]
        room.let_all_out()
        await tick()
        room.let_all_out()


@pytest.mark.anyio
async def test_an_unhashable_key_is_a_misuse_that_names_the_option() -> None:
    """Misuse says what was given and what to do; the lock is untouched."""
    lock = ResilienceLock()
    pipeline = B(name="svc").add_lock(lock, key=lambda _: ["a"]).build()
    error = await raised_by(pipeline.execute, ok)
    assert isinstance(error, MisuseError)
    assert str(error) == (
        "pipeline 'svc', strategy 'Lock': key= must give something hashable, it gave ['a']"
    )
    assert repr(lock) == "<ResilienceLock free>"


@pytest.mark.anyio
async def test_an_error_of_the_key_function_comes_out_and_takes_nothing() -> None:
    """An exception of a function of the user's surfaces; nothing is held."""

    def key(_: ResilienceContext) -> Any:
        raise LookupError("no account")

    lock = ResilienceLock()
    pipeline = B().add_lock(lock, key=key).build()
    with pytest.raises(LookupError, match="no account"):
        await pipeline.execute(ok)
    assert repr(lock) == "<ResilienceLock free>"


# --- what is left behind -----------------------------------------------------------------------


def test_waiters_of_a_loop_that_is_gone_are_skipped() -> None:
    """Rule 14: a waiter left behind by a dead loop is passed over, and the next one gets the lock."""
    pipeline = B().add_lock().build()
    first, gone = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def hold(until: asyncio.Event) -> None:
        await until.wait()

    async def start() -> tuple[asyncio.Event, asyncio.Task[None]]:
        event = asyncio.Event()
        task = asyncio.create_task(pipeline.execute(hold, event))
        await asyncio.sleep(0)
        return event, task

    event, holder = first.run_until_complete(start())
    left = [gone.create_task(pipeline.execute(ok))]
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()

    async def finish() -> int:
        waiter = asyncio.create_task(pipeline.execute(ok))
        await asyncio.sleep(0)
        event.set()
        await holder
        return await waiter

    assert first.run_until_complete(finish()) == 1
    first.close()
    _forget(left)


def test_a_lock_handed_to_a_loop_that_was_closed_then_is_taken_back() -> None:
    """Woken after its loop had gone: the next one who finds the lock held takes it back."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()
    first, gone = asyncio.new_event_loop(), asyncio.new_event_loop()
    left: list[asyncio.Task[Any]] = []

    async def call() -> int:
        return await pipeline.execute(ok)

    async def stay() -> None:
        while not left:  # noqa: ASYNC110 - set between two runs of this loop
            await asyncio.sleep(0)

    holder = first.create_task(pipeline.execute(stay))
    first.run_until_complete(asyncio.sleep(0))
    left.append(gone.create_task(pipeline.execute(ok)))
    gone.run_until_complete(asyncio.sleep(0))
    first.run_until_complete(holder)  # hands it over to a loop that will never run again
    gone.close()
    assert repr(lock) == "<ResilienceLock held>"
    assert first.run_until_complete(call()) == 1
    assert repr(lock) == "<ResilienceLock free>"
    _forget(left)
    assert first.run_until_complete(call()) == 1
    first.close()


def _forget(left: list[asyncio.Task[Any]]) -> None:
    """Have tasks collected that nobody can await any more, without a word about them."""
    while left:
        left.pop()._log_destroy_pending = False  # type: ignore[attr-defined]
    gc.collect()


def test_taken_back_while_its_waiter_is_being_woken_it_is_passed_on_once() -> None:
    """Two find at once that the waiter's loop is gone: one of them passes the lock on."""
    lock = ResilienceLock()

    class Gone:
        def is_alive(self) -> bool:
            return False

        def wake(self) -> bool:
            lock._recover("key")  # another thread's, in between
            return False

    class Woken:
        count = 0

        def is_alive(self) -> bool:
            return True

        def wake(self) -> bool:
            Woken.count += 1
            return True

    hold = lock._enter("key", ())
    assert hold is not None
    for waiter in (Gone(), Woken(), Woken()):
        assert lock._join("key", waiter) is not None
    lock._leave("key", hold)
    assert Woken.count == 1


def test_an_abandoned_call_gives_it_back_when_it_is_collected() -> None:
    """A coroutine that is closed by the garbage collector releases, in a context of another."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()

    async def hang() -> None:
        await asyncio.get_running_loop().create_future()

    loop = asyncio.new_event_loop()
    left = [loop.create_task(pipeline.execute(hang))]
    loop.run_until_complete(asyncio.sleep(0))
    assert repr(lock) == "<ResilienceLock held>"
    loop.close()
    _forget(left)
    assert repr(lock) == "<ResilienceLock free>"


# --- options -----------------------------------------------------------------------------------


def test_defaults() -> None:
    """Contract: the signature and its defaults; options read back under their names."""
    lock = Lock()
    assert (lock.lock, lock.key, lock.reentrant, lock.max_wait) == (None, None, True, None)
    assert lock.name == "Lock"
    assert repr(lock) == "Lock()"
    shared = ResilienceLock()
    assert Lock(shared).lock is shared


@pytest.mark.parametrize("max_wait", [2, 2.0, timedelta(seconds=2), "2s", "2000ms"])
def test_max_wait_takes_every_duration_form(max_wait: Any) -> None:
    """Durations read back as seconds."""
    assert Lock(max_wait=max_wait).max_wait == 2


def test_an_endless_max_wait_is_no_limit() -> None:
    """`math.inf` means for ever where that makes sense."""
    assert Lock(max_wait=math.inf).max_wait == math.inf


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lock", object()),
        ("lock", ResilienceLock),
        ("key", "account"),
        ("reentrant", 1),
        ("max_wait", -1),
        ("max_wait", True),
        ("name", 1),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """VA-1: refused when the strategy is made, with what it may be."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError, match=f"{option} must be"):
        Lock(**options)


def test_all_bad_options_are_reported_at_once() -> None:
    """Contract: every bad field in one error."""
    bad: Any = {"lock": 1, "key": 2, "reentrant": "no", "max_wait": "soon"}
    with pytest.raises(OptionsError) as caught:
        Lock(**bad)
    assert len(caught.value.problems) == 4


def test_only_the_lock_is_positional() -> None:
    """The signature: everything after `lock` by name."""
    make: Any = Lock
    with pytest.raises(TypeError):
        make(None, account_of)


def test_a_pipeline_reads_like_its_builder_call() -> None:
    """`repr(pipeline)` shows the options that are not the default ones."""
    pipeline = B().add_lock(reentrant=False, max_wait=5).build()
    assert "add_lock(reentrant=False, max_wait=5" in repr(pipeline)
