"""Single flight by itself: a strategy that joins equal calls and keeps nothing, by `Flights.call`."""

from __future__ import annotations

from typing import Any, Never

import anyio
import pytest

from resilience_pipeline import Failure, ResilienceContext, ResiliencePipelineBuilder
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.strategies._flight import Flights
from support.scripted import Closable, raised_by, spawn, tick

pytestmark = pytest.mark.anyio


class Joining(Strategy[Never]):
    """Joins calls with equal arguments."""

    name = "joining"

    def __init__(self) -> None:
        self.flights = Flights()

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            return await self.flights.call(context._args, context, next, site.discard)

        return handle


class World:
    def __init__(self, result: Any = "v") -> None:
        self.strategy = Joining()
        self.pipeline = ResiliencePipelineBuilder().add(self.strategy).build()
        self.gate = anyio.Event()
        self.calls = 0
        self.result = result

    async def load(self, *_: object) -> Any:
        self.calls += 1
        await self.gate.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def test_calls_at_once_are_one_and_nothing_is_kept() -> None:
    """The next call is made anew."""
    world = World()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, world.pipeline.execute, world.load, "a") for _ in range(4)]
        other = spawn(tasks, world.pipeline.execute, world.load, "b")
        await tick()
        assert (world.calls, world.strategy.flights.count) == (2, 2)
        world.gate.set()
    assert [call.value for call in (*calls, other)] == ["v"] * 5
    assert await world.pipeline.execute(world.load, "a") == "v"
    assert (world.calls, world.strategy.flights.count) == (3, 0)


async def test_everybody_gets_an_error_of_its_own() -> None:
    """And it is forgotten."""
    world = World(ConnectionError("down"))
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, world.pipeline.settle, world.load) for _ in range(3)]
        await tick()
        world.gate.set()
    assert all(isinstance(call.value, Failure) for call in calls)
    assert len({id(call.value.error) for call in calls}) == 3
    assert isinstance(await raised_by(world.pipeline.execute, world.load), ConnectionError)
    assert world.calls == 2


async def test_what_wants_itself_goes_by_itself() -> None:
    """It does not wait for what it is inside of."""
    world = World()
    runs: list[int] = []

    async def load() -> int:
        runs.append(1)
        return 7 if len(runs) == 2 else await world.pipeline.execute(load)

    with anyio.fail_after(5):
        assert await world.pipeline.execute(load) == 7


async def test_what_nobody_waits_for_any_more_is_closed() -> None:
    """A call that brings something although it was cancelled."""
    thing = Closable()
    world = World()

    async def stubborn() -> Closable:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            return thing
        raise AssertionError

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, world.pipeline.execute, stubborn)
        await tick()
        call.cancel()
    assert thing.closed == 1
    assert world.strategy.flights.count == 0
