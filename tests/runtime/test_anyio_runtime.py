"""trio's runtime: scopes that nest, owner tasks without a nursery of the user's, other threads and finished runs."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import ResiliencePipelineBuilder, TimeoutRejectedError
from resilience_pipeline._errors import DeadlineReached
from resilience_pipeline.runtime import TimerHandle, current_runtime
from resilience_pipeline.runtime._anyio import AnyioRuntime
from support.scripted import tick


def run(main: Callable[..., Awaitable[Any]]) -> None:
    """Run a scenario in a trio run of its own whose time jumps."""
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def hang(_: object) -> None:
    """Never end by itself."""
    await trio.sleep_forever()


def test_only_the_own_scope_is_converted() -> None:
    """A scope of the caller's around a limit, and one of the callback's inside, stay what they are."""

    async def main() -> None:
        runtime = AnyioRuntime()

        async def inside(_: object) -> str:
            with trio.move_on_after(1) as own:
                await trio.sleep_forever()
            assert own.cancelled_caught
            return "the callback's own"

        assert await runtime.within(5, inside, None) == "the callback's own"
        with trio.move_on_after(1) as callers:
            await runtime.within(5, hang, None)
        assert callers.cancelled_caught
        with trio.move_on_after(5) as callers:
            await runtime.within(5, hang, None)
        assert callers.cancelled_caught

    run(main)


def test_errors_beside_the_cancellation_are_kept() -> None:
    """A task group inside that answers the expiry with an error of a child: that error comes out, not a time-out."""

    async def main() -> None:
        async def fail_when_cancelled() -> None:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("while cleaning up")

        async def inside(_: object) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail_when_cancelled)
                await trio.sleep_forever()

        with pytest.raises(ExceptionGroup) as caught:
            await AnyioRuntime().within(5, inside, None)
        assert [type(error) for error in caught.value.exceptions] == [KeyError]

    run(main)


def test_a_task_group_inside_that_only_ends_is_an_expiry() -> None:
    """The cancellation of all its children is taken together as one."""

    async def main() -> None:
        async def inside(_: object) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(trio.sleep_forever)

        with pytest.raises(DeadlineReached):
            await AnyioRuntime().within(5, inside, None)

    run(main)


def test_a_limit_does_not_reach_the_callers_own_scope() -> None:
    """Once the inside has ended, a limit that passes later hits nobody."""

    async def main() -> None:
        runtime = AnyioRuntime()

        async def inside(argument: str) -> str:
            await trio.sleep(4.999)
            return argument

        with trio.CancelScope() as scope:
            assert await runtime.within(5, inside, "value") == "value"
            await trio.sleep(10)
        assert not scope.cancelled_caught

    run(main)


# ---- tasks without a nursery ------------------------------------------------------------------------


def test_spawned_tasks_end_with_the_run() -> None:
    """The main task has ended: what the library still runs is cancelled, and its end is told."""
    log: list[str] = []

    async def main() -> None:
        async def wait() -> None:
            try:
                await trio.sleep_forever()
            finally:
                log.append("cleaned up")

        AnyioRuntime().spawn(wait, lambda: log.append("ended"))
        await tick(3)

    run(main)
    assert log == ["cleaned up", "ended"]


def test_spawned_tasks_survive_the_scope_they_were_spawned_in() -> None:
    """They belong to no scope of the user's; only `cancel` ends them."""
    log: list[str] = []

    async def main() -> None:
        async def wait() -> None:
            try:
                await trio.sleep_forever()
            finally:
                log.append("cleaned up")

        with trio.CancelScope() as scope:
            child = AnyioRuntime().spawn(wait, lambda: log.append("ended"))
            scope.cancel()
            await tick()
        assert scope.cancelled_caught
        await tick()
        assert log == []
        child.cancel()
        await tick()
        assert log == ["cleaned up", "ended"]

    run(main)


def test_nothing_is_left_of_ended_tasks() -> None:
    """The run has as many tasks afterwards as before."""

    async def main() -> None:
        before = trio.lowlevel.current_statistics().tasks_living
        runtime = AnyioRuntime()
        children = [runtime.spawn(trio.sleep_forever, lambda: None) for _ in range(10)]
        await tick(3)
        assert trio.lowlevel.current_statistics().tasks_living == before + 10
        for child in children:
            child.cancel()
        await tick(3)
        assert trio.lowlevel.current_statistics().tasks_living == before

    run(main)


def test_everything_can_be_told_to_a_run_that_is_over() -> None:
    """Waking, cancelling, starting: each finds nobody, and says so or does nothing."""
    left: dict[str, Any] = {}

    async def main() -> None:
        runtime = current_runtime()
        left["waiter"] = runtime.waiter()
        left["child"] = runtime.spawn(trio.sleep_forever, lambda: None)
        left["spawn"] = runtime.spawner()
        left["interruption"] = runtime.interruption()
        await tick(3)

    run(main)
    assert not left["waiter"].wake()
    left["child"].cancel_soon()
    assert not left["spawn"](tick, lambda: None)
    left["interruption"].interrupt()


# ---- clocks of the user's own, other threads -----------------------------------------------------------


class HandClock:
    """A clock that does what it is told, in whichever thread."""

    def __init__(self) -> None:
        self.callback: Callable[[], object] = lambda: None

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        await anyio.lowlevel.checkpoint()

    def call_at(self, when: float, callback: Callable[[], object]) -> TimerHandle:
        self.callback = callback
        return self

    def cancel(self) -> None:
        """Nothing: a callback may be on its way already."""

    def fire_in_a_thread(self) -> None:
        thread = threading.Thread(target=self.callback)
        thread.start()
        thread.join()


def test_an_expiry_from_another_thread_reaches_the_task() -> None:
    """Through the run's own door."""
    clock = HandClock()

    async def main() -> None:
        async def inside(_: object) -> None:
            clock.fire_in_a_thread()
            await trio.sleep_forever()

        with pytest.raises(DeadlineReached):
            await AnyioRuntime(clock).within(5, inside, None)

    trio.run(main)


def test_an_expiry_that_comes_too_late_does_no_harm() -> None:
    """The call has ended when the clock's callback gets to the run: the caller goes on undisturbed."""
    clock = HandClock()

    async def main() -> None:
        async def inside(argument: str) -> str:
            clock.fire_in_a_thread()
            return argument

        with trio.CancelScope() as scope:
            assert await AnyioRuntime(clock).within(5, inside, "value") == "value"
            await tick()
        assert not scope.cancelled_caught

    trio.run(main)
    clock.callback()  # and the run may be over


def test_runs_in_threads_wake_each_other() -> None:
    """Case CL-07: two runs hand a permit to and fro."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, queue_limit=10).build()
    inside = [0]
    most: list[int] = []

    async def main() -> None:
        async def touch() -> None:
            inside[0] += 1
            most.append(inside[0])
            await tick(1)
            inside[0] -= 1

        for _ in range(100):
            await pipeline.execute(touch)

    threads = [threading.Thread(target=trio.run, args=(main,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 300
    assert max(most) == 1


# ---- limits in a pipeline -------------------------------------------------------------------------------


def test_a_time_limit_needs_no_scope_of_the_callers() -> None:
    """Expired or not, pipeline by pipeline, in whatever order the scopes around are left."""
    pipeline = ResiliencePipelineBuilder().add_timeout(5).build()

    async def main() -> None:
        async def source() -> Any:
            with trio.CancelScope():
                yield 1
                async with trio.open_nursery():
                    yield 2

        with pytest.raises(TimeoutRejectedError):
            await pipeline.execute(trio.sleep_forever)
        async with pipeline.execute_stream(source) as stream:
            assert [chunk async for chunk in stream] == [1, 2]
        async with pipeline.execute_stream(source) as stream:
            assert await anext(stream) == 1

    run(main)
