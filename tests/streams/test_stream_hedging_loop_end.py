"""Event loops that end while a race or the stream that won it is open: in silence, with every source closed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import (
    ResilienceStream,
)
from support.streaming import (
    B,
    tick,
)

# ---- the end of the loop ----------------------------------------------------------------------


class LastSources:
    """Sources of which all but the last hang; each holds a task group open, and notes its closing."""

    def __init__(self, hanging: int) -> None:
        self._hanging = hanging
        self.opened = 0
        self.closed = 0

    async def __call__(self) -> AsyncIterator[int]:
        self.opened += 1
        hangs = self.opened <= self._hanging
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep_forever)
                if hangs:
                    await anyio.sleep_forever()
                yield 1
                yield 2
        finally:
            self.closed += 1


def run_asyncio(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


RUNS: dict[str, Callable[[Any], None]] = {"asyncio": run_asyncio, "trio": trio.run}


@contextmanager
def no_noise(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    """Nothing is printed, and nothing logged but the hedges, not even when the rubbish is collected."""
    yield
    gc.collect()
    assert capsys.readouterr().err == ""
    assert {record.name for record in caplog.records} <= {"resilience_pipeline"}
    assert all("OnHedging" in message for message in caplog.messages)


@pytest.mark.parametrize("loop", RUNS)
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "dropped"])
def test_the_loop_ends_with_a_hedged_stream_open(
    loop: str, kept: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Case HG-01: `asyncio.run` and `trio.run` end in silence, and the source that won is closed."""
    sources, streams = LastSources(1), []

    async def main() -> None:
        stream = B().add_hedging(delay=0).build().execute_stream(sources)
        assert await anext(stream) == 1
        if kept:
            streams.append(stream)

    with no_noise(capsys, caplog):
        RUNS[loop](main)
        assert (sources.opened, sources.closed) == (2, 2)
        streams.clear()


@pytest.mark.parametrize("loop", RUNS)
@pytest.mark.parametrize("hanging", [9, 1], ids=["racing", "reading"])
def test_the_loop_ends_under_a_reader(
    loop: str, hanging: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Case HG-01: so they do while a task that nobody waits for races its sources, or reads the winner."""
    sources = LastSources(hanging)
    tasks: list[Any] = []

    async def read() -> None:
        async for _ in B().add_hedging(delay=0).build().execute_stream(sources):
            await anyio.sleep_forever()

    async def main() -> None:
        if loop == "asyncio":
            tasks.append(asyncio.get_running_loop().create_task(read()))
        else:
            trio.lowlevel.spawn_system_task(read)
        await tick()
        assert sources.opened == 2

    with no_noise(capsys, caplog):
        RUNS[loop](main)
        assert (sources.opened, sources.closed) == (2, 2)


@pytest.mark.parametrize("loop", RUNS)
def test_one_pipeline_races_on_loop_after_loop(loop: str) -> None:
    """Design: no event loop at build time; a loop that ended with a stream open leaves nothing to the next."""
    pipeline = B().add_concurrency_limiter(1).add_hedging(delay=0).build()
    streams: list[ResilienceStream[int]] = []

    async def main() -> None:
        streams.append(pipeline.execute_stream(LastSources(1)))
        assert await anext(streams[-1]) == 1

    for _ in range(3):
        RUNS[loop](main)
