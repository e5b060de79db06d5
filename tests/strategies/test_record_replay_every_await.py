"""Record and replay, cut short at every turn: nothing is half written, nobody waits for ever, all is closed.

Everything of the user's takes a moment, the key's function included. Whatever is cut, an equal call afterwards finds
either a whole recording or none, and is served.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import OptionsError, RecordReplayKeyEvent, ResiliencePipelineBuilder
from support.scripted import Background, spawn, tick

B = ResiliencePipelineBuilder
TURNS = range(14)


class Service:
    """What is called: a call and a stream that take some turns, and count."""

    def __init__(self) -> None:
        self.calls = 0
        self.open = 0
        self.result: Any = "value"

    async def call(self) -> Any:
        self.calls += 1
        self.open += 1
        try:
            for _ in range(3):
                await checkpoint()
        finally:
            self.open -= 1
        return self.result

    async def stream(self) -> AsyncIterator[Any]:
        self.calls += 1
        self.open += 1
        try:
            for chunk in (1, 2):
                await checkpoint()
                yield chunk
        finally:
            self.open -= 1


class Journey:
    """A pipeline on an empty directory, and equal calls through it."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.directory = directory
        self.service = Service()
        self.is_stream = kind == "stream"
        self.expected: Any = [1, 2] if self.is_stream else "value"

        async def key(_: RecordReplayKeyEvent) -> str:
            await checkpoint()
            return "key"

        self.pipeline = B().add_record_replay(directory, mode="incremental", key=key).build()

    async def go(self) -> Any:
        if not self.is_stream:
            return await self.pipeline.execute(self.service.call)
        async with self.pipeline.execute_stream(self.service.stream) as stream:
            return [chunk async for chunk in stream]

    def check_files(self, at_most: int = 1) -> None:
        """There is a whole recording, or none; and nothing else."""
        files = list(self.directory.iterdir())
        assert len(files) <= at_most
        for file in files:
            recording = json.loads(file.read_text("utf-8"))
            assert recording[("chunks" if self.is_stream else "value")] == self.expected


@pytest.fixture(params=["call", "stream"])
def journey(request: pytest.FixtureRequest, tmp_path: Path) -> Journey:
    return Journey(tmp_path, request.param)


@pytest.mark.anyio
@pytest.mark.parametrize("turns", TURNS)
async def test_alone(journey: Journey, turns: int) -> None:
    """A call that is cancelled leaves no recording of half of it, and the next one is served."""
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, journey.go)
        await tick(turns)
        call.cancel()
    assert journey.service.open == 0
    journey.check_files()
    with anyio.fail_after(5):
        assert await journey.go() == journey.expected
    journey.check_files()
    assert len(list(journey.directory.iterdir())) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("cut", [[0], [1], [0, 1], [1, 2], [0, 1, 2, 3]], ids=str)
async def test_beside_equal_ones(journey: Journey, turns: int, cut: list[int]) -> None:
    """Whoever is cancelled, those who make the call among them, the others get it; nobody is left waiting."""
    calls: list[Background] = []
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                calls.append(spawn(tasks, journey.go))
                await checkpoint()
            await tick(turns)
            for number in cut:
                calls[number].cancel()
        for number, call in enumerate(calls):
            assert call.value == journey.expected or (number in cut and call.cancelled)
        assert await journey.go() == journey.expected
    assert journey.service.open == 0
    # One call, and one more for each of those who were cancelled while they made it.
    assert journey.service.calls <= 1 + len(cut)
    journey.check_files()


@pytest.mark.anyio
@pytest.mark.parametrize("turns", TURNS)
async def test_a_value_that_is_refused_is_closed_once(tmp_path: Path, turns: int) -> None:
    """Closing takes a moment, and is not cut short by who cancels the call meanwhile."""

    class Thing:
        begun = closed = 0

        async def aclose(self) -> None:
            self.begun += 1
            await checkpoint()
            await checkpoint()
            self.closed += 1

    journey = Journey(tmp_path, "call")
    journey.service.result = thing = Thing()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, journey.go)
        await tick(turns)
        call.cancel()
    assert call.cancelled or isinstance(call.error, OptionsError)
    assert thing.begun == thing.closed <= 1
    journey.check_files(at_most=0)
    journey.service.result = "value"
    assert await journey.go() == "value"
