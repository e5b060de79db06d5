"""Virtual time: order, settling, cancellation, jumping, several loops and threads."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest
import trio
from anyio.lowlevel import checkpoint

from resilience_pipeline.testing import VirtualClock


async def note_after(clock: VirtualClock, seconds: float, log: list[tuple[str, float]]) -> None:
    """Sleep once and note under which time it ended."""
    await clock.sleep(seconds)
    log.append((f"slept {seconds}", clock.now()))


# --- Advancing -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_time_stands_still_until_advanced() -> None:
    """Nothing but `advance` moves the clock, and it moves by exactly what was asked for."""
    clock = VirtualClock(start=10)
    assert clock.now() == 10.0
    await checkpoint()
    assert clock.now() == 10.0
    await clock.advance(2.5)
    assert clock.now() == 12.5


@pytest.mark.anyio
async def test_sleepers_wake_in_order_of_time() -> None:
    """Each sleeper wakes at its own time, whatever the order in which they fell asleep."""
    clock = VirtualClock()
    log: list[tuple[str, float]] = []
    async with anyio.create_task_group() as tasks:
        for seconds in (3, 1, 2):
            tasks.start_soon(note_after, clock, seconds, log)
        await clock.advance(2)
        assert log == [("slept 1", 1.0), ("slept 2", 2.0)]
        await clock.advance(1)
    assert log[2:] == [("slept 3", 3.0)]


@pytest.mark.anyio
async def test_callbacks_of_one_instant_run_in_order_of_registration() -> None:
    """Ties are settled by who registered first."""
    clock = VirtualClock()
    log: list[int] = []
    for number in range(20):
        clock.call_at(1.0, partial(log.append, number))
    await clock.advance(1)
    assert log == list(range(20))


@pytest.mark.anyio
async def test_tasks_run_between_instants() -> None:
    """What a woken task does is done before the next timer fires."""
    clock = VirtualClock()
    log: list[str] = []

    async def work() -> None:
        await clock.sleep(1)
        for _ in range(5):
            await checkpoint()
        log.append("worked")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        clock.call_at(1.5, partial(log.append, "later"))
        await clock.advance(2)
        assert log == ["worked", "later"]


@pytest.mark.anyio
async def test_tasks_that_were_just_started_are_let_to_their_wait_first() -> None:
    """`advance` starts when everybody waits, so a task started just before it isn't missed."""
    clock = VirtualClock()
    log: list[tuple[str, float]] = []

    async def start_late() -> None:
        for _ in range(10):
            await checkpoint()
        await note_after(clock, 1, log)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(start_late)
        await clock.advance(1)
        assert log == [("slept 1", 1.0)]


@pytest.mark.anyio
async def test_timers_registered_on_the_way_are_kept() -> None:
    """A chain of sleeps within the target runs to its end in one `advance`."""
    clock = VirtualClock()
    log: list[float] = []

    async def tick() -> None:
        for _ in range(4):
            await clock.sleep(0.5)
            log.append(clock.now())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tick)
        await clock.advance(1.75)
        assert log == [0.5, 1.0, 1.5]
        assert clock.now() == 1.75
        await clock.advance(0.25)
    assert log[3:] == [2.0]


@pytest.mark.anyio
async def test_callback_may_register_another_for_the_same_instant() -> None:
    """A callback registered for the present runs within the same `advance`, not inside the first."""
    clock = VirtualClock()
    log: list[str] = []

    def first() -> None:
        clock.call_at(clock.now(), partial(log.append, "second"))
        clock.call_at(0.0, partial(log.append, "third"))
        log.append("first")

    clock.call_at(1, first)
    await clock.advance(1)
    assert log == ["first", "second", "third"]
    assert clock.now() == 1.0


@pytest.mark.anyio
async def test_rounding_does_not_leave_a_sleeper_behind() -> None:
    """Three sleeps of 0.1 s are over after 0.3 s, although floats add up to a little more."""
    clock = VirtualClock()
    log: list[float] = []

    async def thrice() -> None:
        for _ in range(3):
            await clock.sleep(0.1)
        log.append(clock.now())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thrice)
        await clock.advance(0.3)
        assert log == [pytest.approx(0.3)]


@pytest.mark.anyio
async def test_overlapping_advances_do_not_add_up() -> None:
    """Two tasks that advance at once both get there, and the clock ends at the later target."""
    clock = VirtualClock()
    log: list[tuple[str, float]] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(note_after, clock, 2, log)
        tasks.start_soon(clock.advance, 3)
        tasks.start_soon(clock.advance, 1)
    assert log == [("slept 2", 2.0)]
    assert clock.now() == 3.0


@pytest.mark.anyio
async def test_two_clocks_in_one_loop_are_independent() -> None:
    """Advancing one clock while another jumps by itself hangs neither."""
    steered, jumping = VirtualClock(), VirtualClock(autojump=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(jumping.sleep, 100)
        tasks.start_soon(steered.advance, 1)
    assert (steered.now(), jumping.now()) == (1.0, 100.0)


@pytest.mark.anyio
async def test_cancelled_advance_leaves_the_clock_where_it_got_to() -> None:
    """Cancelling `advance` at an instant stops it there; a later one goes on."""
    clock = VirtualClock()
    log: list[str] = []
    clock.call_at(2, partial(log.append, "second"))
    with anyio.CancelScope() as scope:
        clock.call_at(1, scope.cancel)
        await clock.advance(5)
    assert scope.cancelled_caught
    assert (clock.now(), log) == (1.0, [])
    await clock.advance(1)
    assert (clock.now(), log) == (2.0, ["second"])


# --- Timers --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_cancelled_handle_does_not_fire() -> None:
    """A cancelled callback isn't called, cancelling again is harmless, others are untouched."""
    clock = VirtualClock()
    log: list[str] = []
    handle = clock.call_at(1, partial(log.append, "cancelled"))
    clock.call_at(1, partial(log.append, "kept"))
    handle.cancel()
    handle.cancel()
    assert clock.pending == 1
    await clock.advance(2)
    assert log == ["kept"]
    assert clock.pending == 0


@pytest.mark.anyio
async def test_cancelling_after_it_was_called_does_nothing() -> None:
    """A handle whose callback has run can still be cancelled, to no effect."""
    clock = VirtualClock()
    log: list[str] = []
    handle = clock.call_at(1, partial(log.append, "called"))
    await clock.advance(1)
    handle.cancel()
    await clock.advance(1)
    assert log == ["called"]
    assert clock.pending == 0


@pytest.mark.anyio
async def test_callback_can_cancel_another_of_its_instant() -> None:
    """A callback cancelled by an earlier one of the same instant isn't called."""
    clock = VirtualClock()
    log: list[str] = []
    clock.call_at(1, lambda: second.cancel())
    second = clock.call_at(1, partial(log.append, "second"))
    for later in (2, 3, 4):
        clock.call_at(later, partial(log.append, "later"))
    await clock.advance(1)
    assert (log, clock.pending) == ([], 3)


@pytest.mark.anyio
async def test_cancelled_timers_are_swept() -> None:
    """Many timers that are made and cancelled don't pile up, and what they held is let go."""

    class Held:
        def callback(self) -> None: ...

    clock = VirtualClock()
    log: list[float] = []
    clock.call_at(7, lambda: log.append(clock.now()))
    for number in range(1_000):
        clock.call_at(5 + number, lambda: log.append(-1)).cancel()
    held = Held()
    seen = weakref.ref(held)
    handle = clock.call_at(9, held.callback)
    del held
    handle.cancel()
    gc.collect()
    assert seen() is None
    assert clock.pending == 1
    assert sum(type(thing) is type(handle) for thing in gc.get_objects()) < 100
    await clock.advance(2_000)
    assert log == [7.0]


@pytest.mark.anyio
@pytest.mark.parametrize("when", [5.0, 4.0, -math.inf])
async def test_time_that_is_not_ahead_is_due_in_the_next_turn(when: float) -> None:
    """A callback for now or the past is never called inside `call_at`, and needs no `advance`."""
    clock = VirtualClock(start=5)
    called = anyio.Event()
    clock.call_at(when, called.set)
    assert not called.is_set()
    await called.wait()
    assert clock.now() == 5.0


@pytest.mark.anyio
async def test_timer_due_already_can_be_cancelled() -> None:
    """A callback for now that is cancelled in the same turn isn't called."""
    clock = VirtualClock()
    log: list[str] = []
    clock.call_at(0, partial(log.append, "called")).cancel()
    await clock.advance(0)
    assert log == []


@pytest.mark.anyio
async def test_timer_made_outside_of_a_loop_fires_in_the_one_that_advances() -> None:
    """A timer of a thread without a loop, due already or later, waits for the next `advance`."""
    clock = VirtualClock(start=5)
    log: list[tuple[str, float]] = []

    def register() -> None:
        clock.call_at(6, lambda: log.append(("later", clock.now())))
        clock.call_at(3, lambda: log.append(("due", clock.now())))

    await anyio.to_thread.run_sync(register)
    assert (log, clock.pending) == ([], 2)
    await clock.advance(0)
    assert log == [("due", 5.0)]
    await clock.advance(1)
    assert log == [("due", 5.0), ("later", 6.0)]


@pytest.mark.anyio
async def test_callback_sees_the_context_it_was_registered_in() -> None:
    """Context variables are those of the caller of `call_at`, as with the loops' own timers."""
    variable = ContextVar("variable", default="unset")
    clock = VirtualClock()
    seen: list[str] = []
    variable.set("registered")
    clock.call_at(1, lambda: seen.append(variable.get()))
    variable.set("advanced")
    await clock.advance(1)
    assert seen == ["registered"]


@pytest.mark.anyio
async def test_raising_callback_is_reported_and_stops_no_other(
    anyio_backend_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in a callback goes to asyncio's exception handler or to the log, and no further."""
    clock = VirtualClock()
    log: list[str] = []

    def fail() -> None:
        raise LookupError("callback")

    reported: list[object] = []
    on_asyncio = anyio_backend_name == "asyncio"
    if on_asyncio:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, details: reported.append(details["exception"])
        )
    with caplog.at_level(logging.ERROR, "resilience_pipeline"):
        clock.call_at(0, fail)
        clock.call_at(1, fail)
        clock.call_at(1, partial(log.append, "same instant"))
        clock.call_at(2, partial(log.append, "later"))
        await clock.advance(3)
    if on_asyncio:
        asyncio.get_running_loop().set_exception_handler(None)
    else:
        reported = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [repr(error) for error in reported] == ["LookupError('callback')"] * 2
    assert log == ["same instant", "later"]
    assert (clock.now(), clock.pending) == (3.0, 0)


# --- Sleeping ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_cancelled_sleep_leaves_nothing_behind() -> None:
    """A sleeper that is cancelled is taken off the clock."""
    clock = VirtualClock()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 5)
        await clock.advance(1)
        assert clock.pending == 1
        tasks.cancel_scope.cancel()
    assert clock.pending == 0
    await clock.advance(10)


@pytest.mark.anyio
@pytest.mark.parametrize("clock", [VirtualClock(), VirtualClock(autojump=True)], ids=repr)
async def test_infinite_sleep_ends_only_by_cancellation(clock: VirtualClock) -> None:
    """`sleep(math.inf)` waits however far the clock moves, and no jump ever reaches it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, math.inf)
        await clock.advance(1e12)
        assert clock.pending == 1
        tasks.cancel_scope.cancel()
    assert clock.pending == 0
    assert math.isfinite(clock.now())


@pytest.mark.anyio
@pytest.mark.parametrize("seconds", [0, 0.0, -1, -math.inf])
async def test_sleep_of_nothing_lets_others_run(seconds: float) -> None:
    """A sleep of 0 or less needs no `advance`, but other tasks get their turn."""
    clock = VirtualClock()
    log: list[str] = []

    async def other() -> None:
        log.append("other")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        while not log:
            await clock.sleep(seconds)
    assert clock.now() == 0.0


@pytest.mark.anyio
async def test_sleep_of_nothing_is_a_cancellation_point() -> None:
    """A cancellation that was requested is delivered at a sleep of 0."""
    clock = VirtualClock()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await clock.sleep(0)
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_sleep_shorter_than_the_clock_can_tell_ends() -> None:
    """A sleep that rounding makes nothing of is over at once."""
    clock = VirtualClock(start=1e9)
    await clock.sleep(1e-12)
    assert clock.now() == 1e9


# --- Jumping -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_autojump_wakes_sleepers_one_after_another() -> None:
    """With `autojump` a lone sleeper returns at once, and several wake in order of time."""
    clock = VirtualClock(autojump=True)
    await clock.sleep(3600)
    assert clock.now() == 3600.0
    log: list[tuple[str, float]] = []
    async with anyio.create_task_group() as tasks:
        for seconds in (30, 10, 20):
            tasks.start_soon(note_after, clock, seconds, log)
    assert log == [("slept 10", 3610.0), ("slept 20", 3620.0), ("slept 30", 3630.0)]


@pytest.mark.anyio
async def test_autojump_waits_for_tasks_that_run() -> None:
    """The clock doesn't jump while a task has something to do, however many turns that takes."""
    clock = VirtualClock(autojump=True)
    times: set[float] = set()

    async def work() -> None:
        for _ in range(200):
            await checkpoint()
            times.add(clock.now())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 1)
        tasks.start_soon(work)
    assert times == {0.0}
    assert clock.now() == 1.0


@pytest.mark.anyio
async def test_autojump_fires_callbacks() -> None:
    """Timers count as something to jump to, those that a callback registers too."""
    clock = VirtualClock(autojump=True)
    done = anyio.Event()
    clock.call_at(5, lambda: clock.call_at(9, done.set))
    await done.wait()
    assert clock.now() == 9.0


@pytest.mark.anyio
async def test_autojump_stops_when_nothing_is_registered(anyio_backend_name: str) -> None:
    """Once nothing waits on the clock, nothing of it runs in the loop, and time stands still."""
    clock = VirtualClock(autojump=True)
    await clock.sleep(1)
    clock.call_at(50, lambda: None).cancel()
    for _ in range(3):
        await VirtualClock().advance(0)
    if anyio_backend_name == "asyncio":
        loop = asyncio.get_running_loop()
        assert not [handle for handle in vars(loop)["_ready"] if "_WhenBlocked" in repr(handle)]
    else:
        root = trio.lowlevel.current_root_task()
        assert root is not None
        names = [task.name for nursery in root.child_nurseries for task in nursery.child_tasks]
        assert not [name for name in names if "VirtualClock" in name]
    assert clock.now() == 1.0


@pytest.mark.anyio
async def test_autojump_does_not_overtake_advance() -> None:
    """While somebody advances an `autojump` clock it goes only as far as told; then it jumps on."""
    clock = VirtualClock(autojump=True)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 10)
        await clock.advance(4)
        assert clock.now() == 4.0
    assert clock.now() == 10.0


@pytest.mark.anyio
async def test_autojump_timeout_beats_a_longer_sleep() -> None:
    """A deadline made with `call_at` and a sleep race in virtual time, each time with one winner."""
    clock = VirtualClock(autojump=True)
    for limit, wins in ((5, True), (15, False)):
        scope = anyio.CancelScope()
        deadline = clock.call_at(clock.now() + limit, scope.cancel)
        with scope:
            await clock.sleep(10)
        deadline.cancel()
        assert scope.cancelled_caught is wins
    assert clock.now() == 15.0


# --- Loops and threads ---------------------------------------------------------------------------


def run_on(backend: str, main: Callable[[], Awaitable[object]]) -> None:
    """Run a coroutine function in a new loop, which is over afterwards."""
    anyio.run(main, backend=backend)


@pytest.mark.parametrize("autojump", [False, True])
def test_one_clock_serves_several_loops_one_after_another(autojump: bool) -> None:
    """A clock made outside any loop keeps its time from loop to loop and waits for none that died."""
    clock = VirtualClock(autojump=autojump)
    log: list[tuple[str, float]] = []

    async def main() -> None:
        clock.call_at(clock.now() + 100, lambda: None)  # outlives its loop
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note_after, clock, 2, log)
            if not autojump:
                await clock.advance(2)

    for backend in ("asyncio", "trio", "asyncio", "trio"):
        run_on(backend, main)
    assert log == [("slept 2", time) for time in (2.0, 4.0, 6.0, 8.0)]


def test_loop_that_stopped_for_good_is_not_kept() -> None:
    """An `autojump` clock with a timer left over doesn't hold the loop it was registered in."""
    clock = VirtualClock(autojump=True)
    loop = asyncio.new_event_loop()

    async def leave_a_timer() -> None:
        clock.call_at(10, lambda: None)

    loop.run_until_complete(leave_a_timer())
    loop.close()
    seen = weakref.ref(loop)
    del loop
    gc.collect()
    assert seen() is None
    assert clock.pending == 1


def in_threads(*mains: Callable[[], object]) -> None:
    """Run functions in a thread each, and wait for all of them."""
    errors: list[BaseException] = []

    def guarded(main: Callable[[], object]) -> None:
        try:
            main()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(main,), daemon=True) for main in mains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []


@pytest.mark.parametrize("elsewhere", [False, True])
def test_loop_that_is_suspended_holds_up_no_other(elsewhere: bool) -> None:
    """A loop that isn't running now, but may again, is waited for by nobody and goes on later."""
    clock = VirtualClock(autojump=True)
    sleepers: list[asyncio.Task[None]] = []
    with asyncio.Runner() as first, asyncio.Runner() as second:

        async def start() -> None:
            sleepers.append(asyncio.create_task(clock.sleep(5)))
            await asyncio.sleep(0)

        async def finish() -> None:
            await sleepers[0]

        if elsewhere:
            in_threads(lambda: first.run(start()))
        else:
            first.run(start())
        second.run(clock.sleep(3))
        assert clock.now() == 3.0
        first.run(finish())
        assert clock.now() == 5.0


@pytest.mark.parametrize(
    "backends", [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "asyncio")]
)
def test_advance_wakes_sleepers_of_other_threads(backends: tuple[str, str]) -> None:
    """A sleeper in another thread's loop is woken there when this thread's loop advances."""
    clock = VirtualClock()
    asleep = threading.Event()
    log: list[tuple[str, float]] = []
    sleeping_backend, advancing_backend = backends

    async def sleeper() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(note_after, clock, 5, log)
            await anyio.wait_all_tasks_blocked()
            asleep.set()

    async def advancer() -> None:
        await anyio.to_thread.run_sync(asleep.wait)
        await clock.advance(5)

    in_threads(
        partial(run_on, sleeping_backend, sleeper), partial(run_on, advancing_backend, advancer)
    )
    assert log == [("slept 5", 5.0)]


@pytest.mark.parametrize(
    "backends", [("asyncio", "asyncio"), ("asyncio", "trio"), ("trio", "trio")]
)
def test_autojump_waits_until_the_loops_of_all_threads_are_idle(backends: tuple[str, str]) -> None:
    """Two loops in two threads see the same times as if they were tasks of one loop."""
    clock = VirtualClock(autojump=True)
    both = threading.Barrier(2)
    times: dict[str, list[float]] = {"often": [], "rarely": []}

    async def sleep_repeatedly(name: str, seconds: float, number: int) -> None:
        clock.call_at(1, lambda: None)  # nobody jumps before both loops wait
        both.wait(10)
        await clock.sleep(1)
        for _ in range(number):
            await clock.sleep(seconds)
            times[name].append(clock.now())

    in_threads(
        partial(run_on, backends[0], partial(sleep_repeatedly, "often", 1, 10)),
        partial(run_on, backends[1], partial(sleep_repeatedly, "rarely", 4.5, 2)),
    )
    assert times["often"] == [float(second) for second in range(2, 12)]
    assert times["rarely"] == [5.5, 10.0]


def test_neither_library_is_imported_on_its_account() -> None:
    """Making a clock and a timer imports neither asyncio nor trio."""
    program = (
        "import sys; from resilience_pipeline.testing import VirtualClock;"
        "before = set(sys.modules); VirtualClock(autojump=True).call_at(1, print);"
        "sys.exit(bool({'asyncio', 'trio'} & (set(sys.modules) - before)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


# --- asyncio alone -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_timer_that_cancels_the_advancing_task_leaves_no_stray_cancellation() -> None:
    """The cancellation arrives at the `advance` that fired the timer, and exactly once."""
    clock = VirtualClock()
    task = asyncio.current_task()
    assert task is not None
    clock.call_at(1, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await clock.advance(5)
    assert task.uncancel() == 0
    assert clock.now() == 1.0
    await asyncio.sleep(0)
    await clock.advance(1)
    assert clock.now() == 2.0


@pytest.mark.asyncio
async def test_sleepers_of_one_instant_wake_in_the_order_they_fell_asleep_in() -> None:
    """On asyncio ties between sleepers are settled like those between callbacks."""
    clock = VirtualClock()
    log: list[int] = []

    async def sleeper(number: int) -> None:
        await clock.sleep(1)
        log.append(number)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(sleeper(number))
        await clock.advance(1)
        assert log == list(range(10))


def test_loop_that_hides_its_ready_queue() -> None:
    """On uvloop, where idleness can't be seen, a number of turns stands for it."""
    uvloop = pytest.importorskip("uvloop")
    log: list[tuple[str, float]] = []

    async def main() -> None:
        jumping, steered = VirtualClock(autojump=True), VirtualClock()
        await jumping.sleep(5)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(note_after(steered, 2, log))
            await steered.advance(3)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert log == [("slept 2", 2.0)]


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [True, "1", None, 1j])
async def test_what_is_no_number_is_refused(bad: float) -> None:
    """Durations and times must be real numbers; `bool` is none."""
    clock = VirtualClock()
    with pytest.raises(TypeError, match="seconds must be a number of seconds, got"):
        await clock.advance(bad)
    with pytest.raises(TypeError, match="seconds must be a number of seconds, got"):
        await clock.sleep(bad)
    with pytest.raises(TypeError, match="when must be a number of seconds, got"):
        clock.call_at(bad, print)
    with pytest.raises(TypeError, match="start must be a number of seconds, got"):
        VirtualClock(start=bad)


@pytest.mark.anyio
@pytest.mark.parametrize("bad", [-1, -0.001, math.inf, -math.inf, math.nan])
async def test_advance_refuses_what_leads_nowhere(bad: float) -> None:
    """The clock can't go back, nor for ever, nor by NaN; after a refusal it works as before."""
    clock = VirtualClock()
    with pytest.raises(ValueError, match="seconds must"):
        await clock.advance(bad)
    await clock.advance(1)
    assert clock.now() == 1.0


@pytest.mark.anyio
async def test_nan_is_refused() -> None:
    """NaN is neither a time nor a duration."""
    clock = VirtualClock()
    with pytest.raises(ValueError, match="seconds must be a number of seconds, got nan"):
        await clock.sleep(math.nan)
    with pytest.raises(ValueError, match="when must be a number of seconds, got nan"):
        clock.call_at(math.nan, print)
    with pytest.raises(ValueError, match="start must be a finite number of seconds, got inf"):
        VirtualClock(start=math.inf)


def test_callback_must_be_callable() -> None:
    """An object where the callback belongs is refused at once."""
    callback: Any = 5
    with pytest.raises(TypeError, match="callback must be callable, got 5"):
        VirtualClock().call_at(1, callback)


@pytest.mark.parametrize("method", ["sleep", "advance"])
def test_waiting_needs_a_loop(method: str) -> None:
    """Outside of asyncio and trio there is nobody to wait, and the error says so."""
    coroutine = getattr(VirtualClock(), method)(1)
    with pytest.raises(RuntimeError, match=rf"VirtualClock\.{method}\(\) must be awaited in"):
        coroutine.send(None)


def test_repr_tells_time_and_waiters() -> None:
    """The clock and its handles can be read in a failed assertion."""
    clock = VirtualClock(start=1.5, autojump=True)
    handle = clock.call_at(2, print)
    assert repr(clock) == "<VirtualClock now=1.5 pending=1 autojump>"
    assert repr(handle) == "<TimerHandle when=2.0 callback=<built-in function print>>"
    handle.cancel()
    assert repr(clock) == "<VirtualClock now=1.5 pending=0 autojump>"
    assert repr(handle) == "<TimerHandle when=2.0 done>"
    assert VirtualClock.__module__ == "resilience_pipeline.testing"
