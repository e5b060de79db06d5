"""asyncio's runtime: the queues of time limits, several loops, clocks in other threads, other loop implementations."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import weakref
from asyncio.events import _set_running_loop
from collections.abc import Awaitable, Callable
from contextvars import Context
from datetime import timedelta
from typing import Any

import pytest
from typing_extensions import TypeVarTuple

from resilience_pipeline import ResiliencePipelineBuilder, TimeoutRejectedError
from resilience_pipeline._errors import DeadlineReached
from resilience_pipeline.runtime import TimerHandle, _asyncio, current_runtime
from resilience_pipeline.runtime._asyncio import AsyncioRuntime
from support.jumping import JumpingLoop
from support.scripted import tick

Ts = TypeVarTuple("Ts")


class CountingLoop(JumpingLoop):
    """Counts the timers that are armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = 0

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self.armed += 1
        return super().call_at(when, callback, *args, context=context)


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario in a loop of its own whose time jumps."""

    async def scenario() -> None:
        await main()

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(scenario())


def the_loop() -> CountingLoop:
    """The loop that runs the scenario."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CountingLoop)
    return loop


def queues() -> dict[float, _asyncio._DeadlineQueue]:
    """The queues of limits of the running loop, by length."""
    return _asyncio._queues_of(asyncio.get_running_loop())


def running() -> int:
    """Time limits in the queues."""
    return sum(len(queue.running) for queue in queues().values())


async def value(argument: object) -> object:
    """Give the argument back, without suspending."""
    return argument


async def suspend(_: object) -> None:
    """Suspend once."""
    await asyncio.sleep(0)


async def hang(_: object) -> None:
    """Never end by itself."""
    await asyncio.get_running_loop().create_future()


# ---- the queues ------------------------------------------------------------------------------------


def test_limits_of_one_length_expire_in_the_order_they_were_set() -> None:
    """Each at its own time, though one timer serves them all."""
    expired: list[tuple[int, float]] = []

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        start = loop.time()

        async def limited(number: int) -> None:
            await asyncio.sleep(number)
            with pytest.raises(DeadlineReached):
                await runtime.within(5, hang, None)
            expired.append((number, round(loop.time() - start, 6)))

        async with asyncio.TaskGroup() as tasks:
            for number in (2, 0, 3, 1):
                tasks.create_task(limited(number))

    run(main)
    assert expired == [(0, 5), (1, 6), (2, 7), (3, 8)]


def test_limits_in_a_loop_that_runs_within_a_step_of_another_are_its_own() -> None:
    """As with packages that let loops nest: the loop around, which was used last, stands still."""
    runtime = AsyncioRuntime()
    ends: list[str] = []

    async def inside() -> None:
        with pytest.raises(DeadlineReached):
            await runtime.within(5, hang, None)
        ends.append("inside")

    async def main() -> None:
        loop = the_loop()
        await runtime.within(5, value, None)
        _set_running_loop(None)
        try:
            run(inside)
        finally:
            _set_running_loop(loop)
        with pytest.raises(DeadlineReached):
            await runtime.within(5, hang, None)
        ends.append("around")

    run(main)
    assert ends == ["inside", "around"]


def test_limits_of_one_instant_expire_in_one_turn() -> None:
    """None of them waits for another timer."""
    turns: set[float] = set()

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()

        async def limited() -> None:
            with pytest.raises(DeadlineReached):
                await runtime.within(5, hang, None)
            turns.add(loop.time())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(100):
                tasks.create_task(limited())
        assert loop.armed == 1

    run(main)
    assert len(turns) == 1


def test_a_thousand_limits_in_flight_take_one_timer() -> None:
    """Constant work per call: the timer is for the first of them, and armed once."""

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        go = loop.create_future()

        async def inside(_: object) -> None:
            await go

        calls = [asyncio.create_task(runtime.within(5, inside, None)) for _ in range(1000)]
        await tick(3)
        assert running() == 1000
        assert loop.armed == 1
        go.set_result(None)
        await asyncio.gather(*calls)
        assert running() == 0
        assert loop.armed == 1

    run(main)


def test_calls_one_after_another_share_a_timer() -> None:
    """Whoever finishes leaves the timer as it is: there is one per length of time, not one per call."""

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        for _ in range(1000):
            await runtime.within(5, suspend, None)
        assert loop.armed == 1
        assert running() == 0

    run(main)


def test_the_timer_is_set_again_for_whoever_is_first_now() -> None:
    """The first finished long ago when the timer fires; the limit of the next one is exact all the same."""

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        start = loop.time()
        await runtime.within(5, suspend, None)  # arms the timer for 5
        await asyncio.sleep(3)
        with pytest.raises(DeadlineReached):
            await runtime.within(5, hang, None)
        assert loop.time() - start == pytest.approx(8)

    run(main)


def test_a_call_that_ends_in_the_middle_of_the_queue_is_forgotten() -> None:
    """Taken out at once, and those around it are not disturbed."""
    ended: list[tuple[str, float]] = []

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        start = loop.time()

        async def limited(name: str, seconds: float) -> None:
            try:
                await runtime.within(5, asyncio.sleep, seconds)
            except DeadlineReached:
                name += " expired"
            ended.append((name, round(loop.time() - start, 6)))

        async with asyncio.TaskGroup() as tasks:
            for name, seconds in (("first", 9), ("middle", 2), ("last", 9)):
                tasks.create_task(limited(name, seconds))
            await asyncio.sleep(1)
            assert running() == 3
            await asyncio.sleep(1.5)
            assert running() == 2
        assert running() == 0

    run(main)
    assert ended == [("middle", 2), ("first expired", 5), ("last expired", 5)]


async def use_up_the_queues() -> None:
    """Have limits of as many lengths running as there are queues for."""
    for number in range(64):
        await AsyncioRuntime().within(1000 + number, value, None)


QUEUED = pytest.mark.parametrize("queued", [True, False], ids=["queue", "timer of its own"])


@QUEUED
@pytest.mark.parametrize("way", ["value", "error", "expiry", "cancel"])
def test_nothing_is_kept_of_a_finished_call(way: str, queued: bool) -> None:
    """However it ended: the queue is empty, and what the call held is freed without a collector."""

    class Held:
        pass

    async def inside(held: Held) -> None:
        if way == "error":
            raise KeyError
        if way != "value":
            await hang(None)

    async def main() -> None:
        if not queued:
            await use_up_the_queues()
        held = Held()
        gone = weakref.ref(held)

        async def call(held: Held) -> None:
            try:
                await AsyncioRuntime().within(5, inside, held)
            except (KeyError, DeadlineReached):
                return

        gc.disable()
        try:
            task = asyncio.create_task(call(held))
            del held
            await tick(3)
            if way == "cancel":
                task.cancel()
            await asyncio.wait([task])
            task_gone = weakref.ref(task)
            del task
            await tick(3)
            assert running() == 0
            assert gone() is None
            assert task_gone() is None
        finally:
            gc.enable()

    run(main)


def test_a_queue_is_forgotten_once_it_was_idle_for_its_length() -> None:
    """Generated limits, each of another length, don't pile up."""

    async def main() -> None:
        runtime = AsyncioRuntime()
        for number in range(50):
            await runtime.within(5 + number / 100, suspend, None)
        assert len(queues()) == 50
        await asyncio.sleep(6)
        assert queues() == {}
        await runtime.within(5, suspend, None)
        assert len(queues()) == 1

    run(main)


def test_a_queue_in_use_is_not_forgotten() -> None:
    """A call that is still under its limit when the timer fires keeps the queue."""

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        start = loop.time()
        await runtime.within(5, suspend, None)
        await asyncio.sleep(4)
        other = asyncio.create_task(runtime.within(5, hang, None))
        await asyncio.sleep(2)
        assert len(queues()) == 1
        assert running() == 1
        with pytest.raises(DeadlineReached):
            await other
        assert loop.time() - start == pytest.approx(9)
        assert queues() == {}

    run(main)


def test_too_many_lengths_fall_back_to_timers_of_their_own() -> None:
    """Past 64 lengths at once no further queue is made, and each limit holds all the same."""
    expired: list[float] = []

    async def main() -> None:
        runtime, loop = AsyncioRuntime(), the_loop()
        start = loop.time()
        lengths = [round(1 + number / 1000, 6) for number in range(200)]

        async def limited(seconds: float) -> None:
            with pytest.raises(DeadlineReached):
                await runtime.within(seconds, hang, None)
            expired.append(round(loop.time() - start, 6))

        async with asyncio.TaskGroup() as tasks:
            for seconds in lengths:
                tasks.create_task(limited(seconds))
            await tick(3)
            assert len(queues()) == 64
            assert loop.armed == 200
        assert expired == lengths
        assert queues() == {}
        # One more without a queue that ends in time, and one that fails: their timers are gone.
        for number in range(70):
            await runtime.within(5 + number, value, None)
        assert len(queues()) == 64
        await asyncio.sleep(1000)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(main)


@QUEUED
def test_an_expiry_cancels_exactly_once(queued: bool) -> None:
    """As `asyncio.timeout` does: a cleanup that waits is not cancelled again."""
    log: list[str] = []

    async def inside(_: object) -> None:
        try:
            await hang(None)
        finally:
            log.append("cancelled")
            await asyncio.sleep(10)
            log.append("cleaned up")

    async def main() -> None:
        runtime = AsyncioRuntime()
        if not queued:
            await use_up_the_queues()
        with pytest.raises(DeadlineReached) as caught:
            await runtime.within(5, inside, None)
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run(main)
    assert log == ["cancelled", "cleaned up"]


@pytest.mark.parametrize("with_clock", [False, True], ids=["own time", "clock"])
def test_requests_are_counted_from_entry(with_clock: bool) -> None:
    """Rule 5: a task that swallowed a cancellation before, and kept its count, still has its limits."""

    async def main() -> None:
        runtime = AsyncioRuntime(HandClock() if with_clock else None)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)
        assert task.cancelling() == 1
        with pytest.raises(DeadlineReached):
            await runtime.within(5, tick_and_hang if with_clock else hang, runtime)
        assert task.cancelling() == 1

    async def tick_and_hang(runtime: AsyncioRuntime) -> None:
        assert isinstance(runtime.clock, HandClock)
        asyncio.get_running_loop().call_soon(runtime.clock.fire)
        await hang(None)

    run(main)


# ---- several loops ---------------------------------------------------------------------------------


def test_loops_one_after_another_have_queues_of_their_own() -> None:
    """One runtime, many loops: the armed timer of a closed loop is nobody's any more."""
    runtime = AsyncioRuntime()
    pipeline = ResiliencePipelineBuilder().add_timeout(5).build()

    async def main() -> None:
        assert queues() == {}
        await runtime.within(5, suspend, None)
        assert len(queues()) == 1
        with pytest.raises(TimeoutRejectedError):
            await pipeline.execute(hang, None)
        await runtime.within(5, suspend, None)  # leaves a timer armed

    for _ in range(3):
        run(main)


def test_a_closed_loop_is_forgotten_with_its_queues() -> None:
    """Nothing of ours keeps a loop alive."""
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(the_loop()))
        await AsyncioRuntime().within(5, suspend, None)

    for _ in range(3):
        run(main)
    gc.collect()
    assert [loop() for loop in loops] == [None, None, None]
    assert not [loop for loop in _asyncio._queues_of_loops if isinstance(loop, CountingLoop)]


def test_loops_in_threads_run_at_once() -> None:
    """Each thread's loop expires its own limits, under one pipeline."""
    pipeline = ResiliencePipelineBuilder().add_timeout(5).build()
    barrier = threading.Barrier(4)
    finished: list[float] = []

    async def main() -> None:
        loop = the_loop()
        start = loop.time()
        barrier.wait(30)
        for _ in range(50):
            assert await pipeline.execute(value, 1) == 1
            with pytest.raises(TimeoutRejectedError):
                await pipeline.execute(hang, None)
        assert running() == 0
        finished.append(round(loop.time() - start, 6))

    threads = [threading.Thread(target=run, args=(main,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == [250] * 4


def test_loops_that_take_turns_in_one_thread_keep_apart() -> None:
    """What a thread remembers of the loop it ran last is no other loop's."""
    runtime = AsyncioRuntime()
    first, second = CountingLoop(), CountingLoop()
    try:
        for _ in range(3):
            for loop in (first, second):
                loop.run_until_complete(runtime.within(5, suspend, None))
                assert list(_asyncio._queues_of_loops[loop]) == [5]
        assert _asyncio._queues_of_loops[first] is not _asyncio._queues_of_loops[second]
        assert (first.armed, second.armed) == (1, 1)
    finally:
        first.close()
        second.close()


# ---- clocks of the user's own -----------------------------------------------------------------------


class HandClock:
    """A clock that does what it is told, in whichever thread and at whatever moment."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self.cancelled = 0

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)

    def call_at(self, when: float, callback: Callable[[], object]) -> TimerHandle:
        self.callbacks.append(callback)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def fire(self) -> None:
        """Call what was registered last."""
        self.callbacks[-1]()


@pytest.mark.asyncio
async def test_an_expiry_from_another_thread_reaches_the_task() -> None:
    """Through the loop's own door."""
    clock = HandClock()

    async def inside(_: object) -> None:
        thread = threading.Thread(target=clock.fire)
        thread.start()
        thread.join()
        await hang(None)

    with pytest.raises(DeadlineReached):
        await AsyncioRuntime(clock).within(5, inside, None)
    assert clock.cancelled == 1


@pytest.mark.parametrize("fired_in", ["a thread", "the task itself"])
@pytest.mark.asyncio
async def test_an_expiry_that_comes_too_late_does_no_harm(fired_in: str) -> None:
    """The call has ended when the clock's callback gets to the loop: the caller's next wait is not cancelled."""
    clock = HandClock()

    async def inside(argument: str) -> str:
        if fired_in == "a thread":
            thread = threading.Thread(target=clock.fire)
            thread.start()
            thread.join()
        else:
            clock.fire()
        return argument

    assert await AsyncioRuntime(clock).within(5, inside, "value") == "value"
    await tick()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


def test_an_expiry_after_the_loop_was_closed_does_no_harm() -> None:
    """A clock outlives the loops it drives."""
    clock = HandClock()

    async def leave_behind() -> None:
        left = asyncio.create_task(AsyncioRuntime(clock).within(5, hang, None))
        await tick(2)
        assert not left.done()

    asyncio.run(leave_behind())
    clock.fire()
    assert clock.cancelled == 1


# ---- tasks of the library's own ----------------------------------------------------------------------


def test_nothing_is_kept_of_a_task_that_has_ended() -> None:
    """The set that keeps the library's tasks alive lets them go, and nobody prints their errors."""
    reported: list[object] = []

    async def fail() -> None:
        raise KeyError

    async def main() -> None:
        the_loop().set_exception_handler(lambda _, context: reported.append(context))
        before = len(_asyncio._children)
        current_runtime().spawn(fail, lambda: None)
        assert len(_asyncio._children) == before + 1
        await tick()
        assert len(_asyncio._children) == before
        gc.collect()

    run(main)
    assert reported == []


def test_a_task_nobody_else_holds_is_not_collected() -> None:
    """The loop keeps weak references only; an abandoned stream's owner has nobody else."""
    ended: list[str] = []

    async def main() -> None:
        async def wait() -> None:
            await asyncio.sleep(5)
            ended.append("ended")

        current_runtime().spawn(wait, lambda: None)
        await tick()
        gc.collect()
        await asyncio.sleep(6)

    run(main)
    assert ended == ["ended"]


# ---- other loops -----------------------------------------------------------------------------------


def _uvloop() -> asyncio.AbstractEventLoop:
    uvloop = pytest.importorskip("uvloop", reason="uvloop is optional and not installed here")
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


ON_REAL_LOOPS = pytest.mark.parametrize(
    "make_loop", [asyncio.new_event_loop, _uvloop], ids=["asyncio", "uvloop"]
)


@pytest.mark.parametrize(
    "big",
    [math.inf, 1e308, 10**30, timedelta.max, "999999h", "876000h"],
    ids=["inf", "1e308", "10**30", "timedelta.max", "999999h", "100 years"],
)
@ON_REAL_LOOPS
def test_enormous_limits_end_nothing(
    big: Any, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Case TO-09: nothing overflows, nothing fires at once, on asyncio's loop and on uvloop."""
    pipeline = ResiliencePipelineBuilder().add_timeout(big).build()

    async def main() -> None:
        async def inside() -> str:
            await tick(50)
            return "value"

        assert await pipeline.execute(inside) == "value"

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("big", [math.inf, 1e308, 1e12, "876000h"], ids=str)
@ON_REAL_LOOPS
def test_enormous_delays_wait(big: Any, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Case TO-09: a retry that would wait for ever waits, and can be cancelled."""
    pipeline = ResiliencePipelineBuilder().add_retry(delay=big).build()
    calls: list[int] = []

    async def fail() -> None:
        calls.append(1)
        raise ConnectionError

    async def main() -> None:
        task = asyncio.create_task(pipeline.execute(fail))
        await tick(50)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
    assert calls == [1]


@pytest.mark.realtime
@ON_REAL_LOOPS
def test_a_limit_expires_in_real_time(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Neither early nor never, on a loop that nobody has doctored."""
    pipeline = ResiliencePipelineBuilder().add_timeout(0.01).build()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            start = loop.time()
            with pytest.raises(TimeoutRejectedError):
                await pipeline.execute(hang, None)
            assert loop.time() - start >= 0.009
            assert await pipeline.execute(value, 1) == 1

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks that start at once came with 3.12")
def test_limits_hold_in_tasks_that_start_at_once() -> None:
    """With asyncio's eager task factory a call may run, and end, within `create_task`."""
    pipeline = ResiliencePipelineBuilder().add_timeout(5).build()

    async def main() -> None:
        the_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        task = asyncio.create_task(pipeline.execute(value, 1))
        assert task.done()
        assert task.result() == 1
        with pytest.raises(TimeoutRejectedError):
            await asyncio.create_task(pipeline.execute(hang, None))
        assert running() == 0

    run(main)
