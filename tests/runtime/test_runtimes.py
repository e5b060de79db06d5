"""What every runtime promises, on asyncio and trio, in the loop's own time and with a virtual clock."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Literal

import anyio
import pytest
import trio
from attrs import frozen

from resilience_pipeline._errors import DeadlineReached
from resilience_pipeline.runtime import Runtime, Spawner, Waiter, current_runtime
from resilience_pipeline.runtime._base import FOREVER
from resilience_pipeline.testing import VirtualClock
from support.jumping import JumpingLoop
from support.scripted import spawn, tick

HUGE = pytest.mark.parametrize("huge", [FOREVER, 1e12, 1e308, math.inf], ids="{:g}".format)


@pytest.fixture(params=["own time", "clock"])
def timing(request: pytest.FixtureRequest) -> Literal["own time", "clock"]:
    """Whose time it is."""
    chosen: Literal["own time", "clock"] = request.param
    return chosen


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest, timing: str) -> tuple[str, dict[str, object]]:
    """The loop; its own time jumps, so that nobody waits for it."""
    options: dict[str, object] = {}
    if timing == "own time" and request.param == "asyncio":
        options["loop_factory"] = JumpingLoop
    elif timing == "own time":
        options["clock"] = trio.testing.MockClock(autojump_threshold=0)
    return request.param, options


@frozen
class Bench:
    """A runtime and the time it lives in."""

    runtime: Runtime
    clock: VirtualClock | None
    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]

    def pending(self) -> int:
        """Timers that are armed, as far as that can be seen."""
        return 0 if self.clock is None else self.clock.pending


@pytest.fixture
async def bench(timing: str) -> Bench:
    """The runtime under test."""
    if timing == "own time":
        start = anyio.current_time()
        return Bench(current_runtime(), None, lambda: anyio.current_time() - start, anyio.sleep)
    clock = VirtualClock(autojump=True)
    return Bench(current_runtime(clock), clock, clock.now, clock.sleep)


async def value(argument: object) -> object:
    """Give the argument back."""
    return argument


async def hang(_: object) -> None:
    """Never end by itself."""
    await anyio.sleep_forever()


def not_being_cancelled() -> bool:
    """Whether no request to cancel the running task is left over; on trio nothing of the kind exists."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return task is None or task.cancelling() == 0


# ---- now and sleep -------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_now_is_the_clocks_time_or_the_machines(bench: Bench) -> None:
    """Monotonic seconds, the same for all runtimes of one clock."""
    before = bench.runtime.now()
    if bench.clock is not None:
        assert before == bench.clock.now()
        await bench.runtime.sleep(5)
        assert bench.runtime.now() == before + 5
    else:
        await tick()
        assert bench.runtime.now() >= before


@pytest.mark.parametrize("seconds", [0.001, 1, 86_400 * 3])
@pytest.mark.anyio
async def test_sleep_waits_as_long_as_it_is_told(bench: Bench, seconds: float) -> None:
    """Neither shorter nor longer."""
    await bench.runtime.sleep(seconds)
    assert bench.now() == pytest.approx(seconds, abs=1e-8)


@pytest.mark.anyio
async def test_sleeping_no_time_lets_others_run(bench: Bench) -> None:
    """Rule 10: a wait of 0 is a checkpoint too."""
    ran: list[int] = []

    async def other() -> None:
        ran.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for _ in range(2):  # on trio tasks of one turn run in any order
            await bench.runtime.sleep(0)
        assert ran == [1]
    assert bench.now() == 0


@HUGE
@pytest.mark.anyio
async def test_a_huge_sleep_waits_until_it_is_cancelled(bench: Bench, huge: float) -> None:
    """Case TO-09: what is longer than any timer can express is waited for all the same."""
    async with anyio.create_task_group() as tasks:
        sleeper = spawn(tasks, bench.runtime.sleep, huge)
        await bench.sleep(1e6)
        assert not sleeper.done
        sleeper.cancel()
        await tick()
        assert sleeper.cancelled


# ---- within --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_within_gives_what_comes_in_time(bench: Bench) -> None:
    """The value comes out, and the limit is over with it: what the caller does next is not cancelled."""

    async def inside(argument: str) -> str:
        await bench.sleep(3)
        return argument

    assert await bench.runtime.within(5, inside, "in time") == "in time"
    assert bench.now() == pytest.approx(3)
    assert bench.pending() == 0
    await bench.sleep(100)
    await tick()
    assert not_being_cancelled()


@pytest.mark.anyio
async def test_within_lets_errors_pass(bench: Bench) -> None:
    """Whatever the inside raises is not touched, a `TimeoutError` of its own included."""
    own = TimeoutError("the driver's")

    async def fail(_: object) -> None:
        await bench.sleep(1)
        raise own

    with pytest.raises(TimeoutError) as caught:
        await bench.runtime.within(5, fail, None)
    assert caught.value is own
    assert bench.pending() == 0


@pytest.mark.anyio
async def test_within_cancels_once_the_limit_has_passed(bench: Bench) -> None:
    """Exactly then; the inside is awaited, nothing is left of the request."""
    ended: list[float] = []

    async def inside(_: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(bench.now())

    with pytest.raises(DeadlineReached):
        await bench.runtime.within(5, inside, None)
    assert ended == [pytest.approx(5)]
    assert not_being_cancelled()
    await bench.sleep(1)


@pytest.mark.anyio
async def test_within_waits_for_the_cleanup(bench: Bench) -> None:
    """No work outlives the call: what was cancelled has ended when the deadline is reported."""

    async def inside(_: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await bench.sleep(2)

    with pytest.raises(DeadlineReached):
        await bench.runtime.within(5, inside, None)
    assert bench.now() == pytest.approx(7)


@pytest.mark.parametrize("kept", ["value", "error"])
@pytest.mark.anyio
async def test_within_keeps_what_comes_out_anyway(bench: Bench, kept: str) -> None:
    """Case TO-05: the inside swallowed the cancellation, so there was no expiry."""

    async def swallow(_: object) -> str:
        try:
            await anyio.sleep_forever()
        except BaseException:
            if kept == "value":
                return "partial"
            raise KeyError("instead") from None
        return "unreachable"

    if kept == "value":
        assert await bench.runtime.within(5, swallow, None) == "partial"
    else:
        with pytest.raises(KeyError, match="instead"):
            await bench.runtime.within(5, swallow, None)
    assert not_being_cancelled()
    await bench.sleep(10)


# A virtual clock moves only while everybody waits.
@pytest.mark.parametrize("timing", ["own time"])
@pytest.mark.anyio
async def test_a_value_that_blocked_past_its_limit_is_kept(bench: Bench) -> None:
    """Case TO-03: the limit passed while the inside was at work, and then it was done."""

    async def inside(_: object) -> str:
        await bench.sleep(1)
        time = asyncio._get_running_loop() or trio.lowlevel.current_clock()
        assert isinstance(time, JumpingLoop | trio.testing.MockClock)
        time.jump(10)
        return "late"

    assert await bench.runtime.within(5, inside, None) == "late"
    await tick()
    assert not_being_cancelled()
    await bench.sleep(10)


@HUGE
@pytest.mark.anyio
async def test_a_huge_limit_is_none(bench: Bench, huge: float) -> None:
    """Case TO-09: nothing overflows, nothing fires early, no timer is armed."""
    armed: list[int] = []

    async def inside(argument: str) -> str:
        armed.append(bench.pending())
        await bench.sleep(1e6)
        return argument

    assert await bench.runtime.within(huge, inside, "in time") == "in time"
    assert armed == [0]


@pytest.mark.parametrize("seconds", [1e-9, 1e-300, 5e-324])
@pytest.mark.anyio
async def test_a_tiny_limit_expires(bench: Bench, seconds: float) -> None:
    """However short, it is a limit, and it ends what waits."""
    with pytest.raises(DeadlineReached):
        await bench.runtime.within(seconds, hang, None)


@pytest.mark.parametrize(
    ("outer", "inner", "reported_by"), [(3, 5, "outer"), (5, 3, "inner"), (5, 5, "outer")]
)
@pytest.mark.anyio
async def test_nested_limits_are_told_apart(
    bench: Bench, outer: float, inner: float, reported_by: str
) -> None:
    """The one that passed reports; where both pass at once, the outer one does."""
    reports: list[str] = []

    async def inside(_: object) -> None:
        try:
            await bench.runtime.within(inner, hang, None)
        except DeadlineReached:
            reports.append("inner")

    try:
        await bench.runtime.within(outer, inside, None)
    except DeadlineReached:
        reports.append("outer")
    assert reports == [reported_by]
    assert bench.now() == pytest.approx(3 if outer != inner else 5)
    assert not_being_cancelled()


@pytest.mark.anyio
async def test_within_leaves_the_callers_cancellation_alone(bench: Bench) -> None:
    """Before the limit, and together with it: a scope of the caller's gets its cancellation back."""
    with anyio.CancelScope() as scope:

        async def cancel_and_wait(_: object) -> None:
            scope.cancel()
            await anyio.sleep_forever()

        await bench.runtime.within(5, cancel_and_wait, None)
    assert scope.cancelled_caught
    assert bench.now() == 0
    assert bench.pending() == 0
    assert not_being_cancelled()


# ---- shielded --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_shielded_gives_what_comes_out(bench: Bench) -> None:
    """A value or an error, undisturbed."""

    async def give() -> str:
        await bench.sleep(1)
        return "value"

    async def fail() -> str:
        await bench.sleep(1)
        raise KeyError("error")

    assert await bench.runtime.shielded(give, 5) == "value"
    with pytest.raises(KeyError, match="error"):
        await bench.runtime.shielded(fail, 5)
    assert bench.pending() == 0
    await bench.sleep(10)


@pytest.mark.anyio
async def test_shielded_sees_the_callers_context_variables(bench: Bench) -> None:
    """Values that the caller set are there."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    variable.set("the caller's")

    async def look() -> str:
        await tick(2)
        return variable.get()

    assert await bench.runtime.shielded(look, 5) == "the caller's"


@pytest.mark.anyio
async def test_shielded_holds_a_cancellation_back(bench: Bench) -> None:
    """It comes out when the inside has ended."""
    log: list[str] = []

    with anyio.CancelScope() as scope:

        async def inside() -> None:
            await tick(3)
            log.append("ended")

        async def cancel() -> None:
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            await bench.runtime.shielded(inside, 5)
            log.append("went on")
    assert scope.cancelled_caught
    assert log == ["ended"]
    assert not_being_cancelled()


@pytest.mark.anyio
async def test_shielded_in_a_scope_that_is_cancelled_already(bench: Bench) -> None:
    """Level-triggered or not: what begins under a shield runs to its end."""
    log: list[str] = []

    async def inside() -> None:
        await tick(3)
        log.append("ended")

    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        finally:
            await bench.runtime.shielded(inside, 5)
    assert scope.cancelled_caught
    assert log == ["ended"]
    assert not_being_cancelled()


@pytest.mark.parametrize("timeout", [0, 2])
@pytest.mark.anyio
async def test_shielded_ends_after_its_timeout(bench: Bench, timeout: float) -> None:
    """What takes longer is cancelled, and a `TimeoutError` tells."""
    ended: list[float] = []

    async def inside() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(bench.now())

    with pytest.raises(TimeoutError, match=str(timeout)):
        await bench.runtime.shielded(inside, timeout)
    assert ended == [pytest.approx(timeout)]
    assert not_being_cancelled()
    await bench.sleep(1)


@HUGE
@pytest.mark.anyio
async def test_shielded_for_ever(bench: Bench, huge: float) -> None:
    """An endless timeout is none."""

    async def inside() -> str:
        await bench.sleep(1e6)
        return "ended"

    assert await bench.runtime.shielded(inside, huge) == "ended"


@pytest.mark.anyio
async def test_a_limit_inside_a_shield_is_its_own(bench: Bench) -> None:
    """What is closed may use time limits of its own."""

    async def inside() -> str:
        try:
            await bench.runtime.within(1, hang, None)
        except DeadlineReached:
            return "limited"
        return "unreachable"

    assert await bench.runtime.shielded(inside, 5) == "limited"
    assert bench.now() == pytest.approx(1)
    assert not_being_cancelled()


# ---- waiter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [None, 5.0, math.inf])
@pytest.mark.anyio
async def test_a_waiter_is_woken(bench: Bench, timeout: float | None) -> None:
    """By another task, once or more often; then no timer is left."""
    waiter = bench.runtime.waiter()
    woken: list[bool] = []

    async def wait() -> None:
        woken.append(await waiter.wait(timeout))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await tick()
        assert woken == []
        assert waiter.wake()
        assert waiter.wake()
        await tick()
        assert woken == [True]
    assert bench.pending() == 0


@pytest.mark.parametrize("timeout", [None, 5.0, 0.0])
@pytest.mark.anyio
async def test_a_waiter_that_was_woken_before_does_not_wait(
    bench: Bench, timeout: float | None
) -> None:
    """A wake-up is not lost when it comes first."""
    waiter = bench.runtime.waiter()
    waiter.wake()
    assert await waiter.wait(timeout)
    assert bench.now() == 0


@pytest.mark.parametrize("timeout", [0.0, -1.0, 2.0])
@pytest.mark.anyio
async def test_a_waiter_gives_up_after_its_timeout(bench: Bench, timeout: float) -> None:
    """False, exactly then; what has passed already is no longer waited for."""
    assert not await bench.runtime.waiter().wait(timeout)
    assert bench.now() == pytest.approx(max(timeout, 0))


# Which of two timers of one instant comes first, is known only of a virtual clock's.
@pytest.mark.parametrize("timing", ["clock"])
@pytest.mark.anyio
async def test_a_wake_up_wins_over_a_timeout_of_the_same_turn(bench: Bench) -> None:
    """Case CL-05: woken, and out of time before it ran."""
    assert bench.clock is not None
    waiter = bench.runtime.waiter()
    woken: list[bool] = []

    async def wait() -> None:
        woken.append(await waiter.wait(5))

    bench.clock.call_at(5, waiter.wake)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
    assert woken == [True]


@pytest.mark.anyio
async def test_a_waiter_is_woken_from_another_thread(bench: Bench) -> None:
    """Case CL-07: the wake-up goes through the waiting side's own loop."""
    waiter = bench.runtime.waiter()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(waiter.wake()))
    thread.start()
    assert await waiter.wait()
    thread.join()
    assert answers == [True]


@pytest.mark.anyio
async def test_a_cancelled_waiter_leaves_no_timer(bench: Bench) -> None:
    """Its wait ends with the cancellation; a later wake-up does no harm."""
    waiter = bench.runtime.waiter()
    async with anyio.create_task_group() as tasks:
        waiting = spawn(tasks, waiter.wait, 5.0)
        await tick()
        waiting.cancel()
        await tick()
        assert waiting.cancelled
    assert bench.pending() == 0
    waiter.wake()
    await tick()


@pytest.mark.anyio
async def test_a_waiter_is_alive_while_its_loop_is(bench: Bench) -> None:
    """Asked by whoever looks for dead ones in a queue."""
    assert bench.runtime.waiter().is_alive()


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_waiter_of_a_finished_loop_is_dead(loop: str) -> None:
    """Case CL-07: waking says that it can't be reached, so that its permit goes to another."""
    waiters: list[Waiter] = []

    async def leave_behind() -> None:
        waiters.append(current_runtime().waiter())

    anyio.run(leave_behind, backend=loop)
    assert not waiters[0].is_alive()
    assert not waiters[0].wake()


# ---- interruption ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_interruption_ends_what_is_guarded(bench: Bench) -> None:
    """As a signal of its own kind, and not as a cancellation; nothing is left of it."""
    interruption = bench.runtime.interruption()

    async def interrupt() -> None:
        interruption.interrupt()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        with pytest.raises(DeadlineReached):
            await interruption.guard(hang, None)
        await tick()
        assert not_being_cancelled()


@pytest.mark.parametrize("kept", ["value", "error"])
@pytest.mark.anyio
async def test_an_interruption_keeps_what_comes_out_anyway(bench: Bench, kept: str) -> None:
    """Swallowed, it is taken back."""
    interruption = bench.runtime.interruption()

    async def interrupt() -> None:
        interruption.interrupt()

    async def swallow(_: object) -> str:
        try:
            await anyio.sleep_forever()
        except BaseException:
            if kept == "value":
                return "partial"
            raise KeyError("instead") from None
        return "unreachable"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(interrupt)
        if kept == "value":
            assert await interruption.guard(swallow, None) == "partial"
        else:
            with pytest.raises(KeyError, match="instead"):
                await interruption.guard(swallow, None)
        await tick()
        assert not_being_cancelled()


@pytest.mark.anyio
async def test_an_uninterrupted_guard_changes_nothing(bench: Bench) -> None:
    """Values and errors pass, and the caller's cancellation stays one."""
    assert await bench.runtime.interruption().guard(value, 1) == 1
    with anyio.CancelScope() as scope:
        scope.cancel()
        await bench.runtime.interruption().guard(hang, None)
    assert scope.cancelled_caught
    await tick()
    assert not_being_cancelled()


@pytest.mark.anyio
async def test_a_cancellation_together_with_an_interruption_stays_one(bench: Bench) -> None:
    """Rule 5: the caller wins."""
    interruption = bench.runtime.interruption()
    with anyio.CancelScope() as scope:

        async def both() -> None:
            scope.cancel()
            interruption.interrupt()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(both)
            await interruption.guard(hang, None)
    assert scope.cancelled_caught
    await tick()
    assert not_being_cancelled()


# ---- spawn and spawner -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_spawned_task_runs_and_tells_its_end(bench: Bench) -> None:
    """It needs no task group of the user's, sees the caller's context variables and changes only its own."""
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    variable.set("the caller's")
    log: list[str] = []

    async def run() -> None:
        log.append(variable.get())
        variable.set("its own")
        await tick(2)
        log.append("ran")

    bench.runtime.spawn(run, lambda: log.append("ended"))
    await tick()
    assert log == ["the caller's", "ran", "ended"]
    assert variable.get() == "the caller's"


@pytest.mark.parametrize(
    "when", ["before it began", "while it waits", "from a thread", "when it has ended"]
)
@pytest.mark.anyio
async def test_a_spawned_task_is_cancelled(bench: Bench, when: str) -> None:
    """At any time; its end is told exactly once."""
    log: list[str] = []

    async def run() -> None:
        if when == "when it has ended":
            return
        try:
            await anyio.sleep_forever()
        finally:
            log.append("cleaned up")

    child = bench.runtime.spawn(run, lambda: log.append("ended"))
    if when != "before it began":
        await tick()
    if when == "from a thread":
        thread = threading.Thread(target=child.cancel_soon)
        thread.start()
        thread.join()
    else:
        child.cancel()
    await tick()
    assert log[-1:] == ["ended"]
    assert log.count("ended") == 1
    assert ("cleaned up" in log) or when in {"before it began", "when it has ended"}


@pytest.mark.parametrize("where", ["here", "in a thread"])
@pytest.mark.anyio
async def test_a_spawner_starts_tasks_from_anywhere(bench: Bench, where: str) -> None:
    """Finalisers call it, and they run wherever they are."""
    spawn_soon = bench.runtime.spawner()
    log: list[str] = []

    async def run() -> None:
        log.append("ran")

    arguments = (run, lambda: log.append("ended"))
    if where == "here":
        spawn_soon(*arguments)
    else:
        thread = threading.Thread(target=spawn_soon, args=arguments)
        thread.start()
        thread.join()
    await tick()
    assert log == ["ran", "ended"]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_spawner_of_a_finished_loop_does_nothing(loop: str) -> None:
    """There is nowhere to run, and finalisers may not raise; it says so."""
    spawners: list[Spawner] = []
    ran: list[int] = []

    async def leave_behind() -> None:
        spawners.append(current_runtime().spawner())

    async def run() -> None:
        ran.append(1)

    anyio.run(leave_behind, backend=loop)
    assert spawners[0](run, lambda: None) is False
    assert ran == []
