"""A caller of a cache is cancelled at each of its turns: all state is back, and nobody else notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import CacheControl, ResiliencePipelineBuilder
from support.scripted import tick

pytestmark = pytest.mark.anyio

TURNS = range(45)


class World:
    """A cache around a limiter of one permit, a call and a source that take their time."""

    def __init__(self) -> None:
        self.control = CacheControl()
        self.pipeline = (
            ResiliencePipelineBuilder()
            .add_cache(control=self.control)
            .add_retry(delay=0)
            .add_concurrency_limiter(1, hold_streams=True)
            .build()
        )
        self.inside = 0
        self.begun = 0

    async def load(self) -> str:
        self.begun += 1
        self.inside += 1
        try:
            await tick(3)
            if self.begun == 1:
                raise ConnectionError
            await tick(3)
            return "v"
        finally:
            self.inside -= 1

    async def source(self) -> AsyncIterator[int]:
        self.begun += 1
        self.inside += 1
        try:
            await tick(3)
            if self.begun == 1:
                raise ConnectionError
            for number in range(3):
                yield number
                await tick(2)
        finally:
            try:
                await checkpoint()  # on trio, cancelled, it goes no further
            finally:
                self.inside -= 1

    async def call(self) -> str:
        return await self.pipeline.execute(self.load)

    async def read(self) -> list[int]:
        async with self.pipeline.execute_stream(self.source) as stream:
            return [number async for number in stream]

    async def check(self, what: Callable[[], Coroutine[Any, Any, Any]], expected: Any) -> None:
        """Nothing is left behind, the permit is there, and what is stored is whole."""
        await tick()
        assert self.inside == 0
        assert self.control.statistics().in_flight == 0
        with anyio.fail_after(10):
            assert await what() == expected
            self.control.clear()
            assert await what() == expected


@pytest.fixture(params=["call", "stream"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def pick(world: World, kind: str) -> tuple[Callable[[], Coroutine[Any, Any, Any]], Any]:
    return (world.call, "v") if kind == "call" else (world.read, [0, 1, 2])


@pytest.mark.parametrize("turns", TURNS)
async def test_the_only_caller_is_cancelled(kind: str, turns: int) -> None:
    """What it wanted alone is cancelled, awaited and forgotten."""
    world = World()
    what, expected = pick(world, kind)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(what)
        await tick(turns)
        tasks.cancel_scope.cancel()
    await world.check(what, expected)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("turns", TURNS[::2])
async def test_one_of_two_is_cancelled(kind: str, turns: int, *, first: bool) -> None:
    """The other gets all of it, whoever it was that began."""
    world = World()
    what, expected = pick(world, kind)
    got: list[Any] = []

    async def stay() -> None:
        got.append(await what())

    scope = anyio.CancelScope()

    async def leave() -> None:
        with scope:
            await what()

    async with anyio.create_task_group() as tasks:
        for caller in (leave, stay) if first else (stay, leave):
            tasks.start_soon(caller)
            await checkpoint()
            await checkpoint()
        await tick(turns)
        scope.cancel()
    assert got == [expected]
    await world.check(what, expected)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("turns", TURNS)
async def test_by_a_tasks_cancel(kind: str, turns: int) -> None:
    """On asyncio the same, and the cancellation comes out as one, once."""
    world = World()
    what, expected = pick(world, kind)
    task = asyncio.ensure_future(what())
    await tick(turns)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    await world.check(what, expected)


@pytest.mark.parametrize("turns", TURNS[::3])
async def test_all_leave_in_one_turn(kind: str, turns: int) -> None:
    """Whoever is the last of them sees to the end."""
    world = World()
    what, expected = pick(world, kind)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(what)
        await tick(turns)
        tasks.cancel_scope.cancel()
    await world.check(what, expected)


@pytest.mark.parametrize("turns", TURNS[::3])
async def test_the_time_of_the_caller_is_up(kind: str, turns: int) -> None:
    """A stream that is closed by another task, and a call in a scope of its own, leave nothing."""
    world = World()
    what, expected = pick(world, kind)
    stream = world.pipeline.execute_stream(world.source)

    async def read() -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await tick(turns)
        await stream.aclose()
    assert world.inside == 0
    await world.check(what, expected)
