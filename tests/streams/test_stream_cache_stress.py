"""Many readers of shared streams, joining, leaving and being cancelled, against a model that keeps it simple.

One step at a time the model says exactly what comes out. At random, all at once, what has to hold for each reader and
each source is looked at when all is over. Everything random follows from a test's seed, trio's order of tasks included.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from attrs import define, field

from resilience_pipeline import CacheControl, ResiliencePipelineBuilder, ResilienceStream
from support.repeatable import repeatable
from support.streaming import tick

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("_repeatable")]

KEYS = 3


@pytest.fixture
def _repeatable(seed: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with repeatable(seed, monkeypatch):
        yield


@define(eq=False)
class Run:
    """One run of a source: what it gives, how it ends, and what was done with it."""

    key: int
    number: int
    length: int
    fails: bool
    produced: int = 0
    is_closed: bool = False


class Factory:
    """A factory of sources that plays runs made by `random`, one after another for each key."""

    def __init__(self, random: Random, *, pauses: bool) -> None:
        self._random = random
        self._pauses = pauses
        self.runs: list[Run] = []

    async def __call__(self, key: int) -> AsyncIterator[tuple[int, int, int]]:
        random = self._random
        run = Run(key, len(self.runs), random.randrange(6), random.random() < 0.3)
        self.runs.append(run)
        try:
            for position in range(run.length):
                await self._pause()
                run.produced += 1
                yield (key, run.number, position)
            await self._pause()
            if run.fails:
                raise ConnectionError(run.number)
        finally:
            run.is_closed = True
            await self._pause()

    async def _pause(self) -> None:
        if self._pauses:
            for _ in range(self._random.randrange(4)):
                await checkpoint()


# ---- one step at a time -----------------------------------------------------------------------


@define(eq=False)
class ModelStream:
    """What is known of a run: who reads it, how far it has been read, and whether it is over."""

    run: Run
    read: int = 0
    is_over: bool = False
    is_private: bool = False
    readers: set[ModelReader] = field(factory=set)


@define(eq=False)
class ModelReader:
    key: int
    stream: ModelStream | None = None
    position: int = 0
    is_over: bool = False


class Model:
    """A cache of streams, by the words of the contract."""

    def __init__(self, max_chunks: int | None, *, cache_errors: bool) -> None:
        self.max_chunks = max_chunks
        self.cache_errors = cache_errors
        self.found: dict[int, ModelStream] = {}
        self.streams: list[ModelStream] = []

    def pull(self, reader: ModelReader, runs: list[Run]) -> Any:
        """What a reader's next pull gives: a chunk, "end", or "error"; the real one was made before."""
        if reader.is_over:
            return "end"
        if reader.stream is None:
            if reader.key not in self.found:
                started = ModelStream(runs[len(self.streams)])
                self.streams.append(started)
                self.found[reader.key] = started
            reader.stream = self.found[reader.key]
            reader.stream.readers.add(reader)
        stream = reader.stream
        if reader.position == stream.read and not stream.is_over:
            self._advance(stream)
        if reader.position < stream.read:
            reader.position += 1
            return (reader.key, stream.run.number, reader.position - 1)
        self._leave(reader)
        return "error" if stream.run.fails else "end"

    def _advance(self, stream: ModelStream) -> None:
        key = stream.run.key
        if stream.read < stream.run.length:
            stream.read += 1
            if self.max_chunks is not None and stream.read > self.max_chunks:
                stream.is_private = True
        else:
            stream.is_over = True
        is_found = self.found.get(key) is stream
        is_forgotten = stream.is_over and stream.run.fails and not self.cache_errors
        if is_found and (stream.is_private or is_forgotten):
            del self.found[key]

    def leave(self, reader: ModelReader) -> None:
        if not reader.is_over:
            self._leave(reader)

    def _leave(self, reader: ModelReader) -> None:
        reader.is_over = True
        stream = reader.stream
        if stream is None:
            return
        stream.readers.discard(reader)
        if not stream.readers and not stream.is_over:
            stream.is_over = True
            if self.found.get(reader.key) is stream:
                del self.found[reader.key]

    def forget(self, key: int) -> None:
        self.found.pop(key, None)


async def pull(stream: ResilienceStream[Any]) -> Any:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return "end"
    except ConnectionError:
        return "error"


@pytest.mark.parametrize("seed", range(12))
async def test_step_by_step_like_the_model(seed: int) -> None:
    """Whatever readers do one after another, each pull gives what the model says, of the same run."""
    random = Random(seed)
    max_chunks = random.choice([None, None, 1, 3])
    cache_errors = random.random() < 0.5
    factory = Factory(random, pauses=True)
    control = CacheControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_cache(
            key=lambda event: event.args,
            max_chunks=max_chunks,
            cache_errors=cache_errors,
            control=control,
        )
        .build()
    )
    model = Model(max_chunks, cache_errors=cache_errors)
    readers: list[tuple[ResilienceStream[Any], ModelReader]] = []
    for _ in range(250):
        action = random.random()
        if not readers or action < 0.2:
            key = random.randrange(KEYS)
            readers.append((pipeline.execute_stream(factory, key), ModelReader(key)))
        elif action < 0.85:
            stream, reader = random.choice(readers)
            got = await pull(stream)
            assert got == model.pull(reader, factory.runs)
        elif action < 0.95:
            stream, reader = readers.pop(random.randrange(len(readers)))
            if random.random() < 0.5:
                await stream.aclose()
            else:
                del stream
                await tick()
            model.leave(reader)
        else:
            key = random.randrange(KEYS)
            control.invalidate((key,))
            model.forget(key)
        assert [run.produced for run in factory.runs] == [each.read for each in model.streams]
        assert [run.is_closed for run in factory.runs] == [each.is_over for each in model.streams]
    in_flight = sum(not each.is_over for each in model.streams)
    stored = sum(each.is_over for each in model.found.values())
    statistics = control.statistics()
    assert (statistics.in_flight, statistics.size) == (in_flight, stored)
    for stream, _ in readers:
        await stream.aclose()


# ---- all at once ------------------------------------------------------------------------------


class Crowd:
    """Readers in tasks of their own, each of which notes what it got and how it ended."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.factory = Factory(self.random, pauses=True)
        self.control = CacheControl()
        self.max_chunks = self.random.choice([None, 2])
        self.pipeline = (
            ResiliencePipelineBuilder()
            .add_cache(
                key=lambda event: event.args, max_chunks=self.max_chunks, control=self.control
            )
            .build()
        )
        self.completed: list[list[Any]] = []

    async def reader(self) -> None:
        random = self.random
        await self.dawdle()
        stream = self.pipeline.execute_stream(self.factory, random.randrange(KEYS))
        got: list[Any] = []
        most, how = random.randrange(8), random.choice(["close", "cancel", "drop", "other task"])
        ended = "left"
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                if how in {"cancel", "other task"}:
                    tasks.start_soon(self.disturb, stream, how, scope)
                try:
                    while len(got) < most:
                        got.append(await anext(stream))
                        await self.dawdle()
                except StopAsyncIteration:
                    ended = "end or closed" if how == "other task" else "end"
                except ConnectionError as error:
                    ended, number = "error", error.args[0]
                    self.check(got, ended)
                    got = [chunk for chunk in got if chunk[1] == number]
                tasks.cancel_scope.cancel()
        self.check(got, ended)
        if how == "close" or (how == "other task" and random.random() < 0.5):
            await stream.aclose()
        del stream

    async def disturb(
        self, stream: ResilienceStream[Any], how: str, scope: anyio.CancelScope
    ) -> None:
        for _ in range(self.random.randrange(30)):
            await checkpoint()
        if how == "cancel":
            scope.cancel()
        else:
            await stream.aclose()

    def check(self, got: list[Any], ended: str) -> None:
        """What a reader got is the beginning of one run, all of it if it came to the end."""
        assert [position for _, _, position in got] == [*range(len(got))]
        numbers = {number for _, number, _ in got}
        assert len(numbers) <= 1, "chunks of two runs"
        if numbers and ended in {"end", "error"}:
            run = self.factory.runs[numbers.pop()]
            assert len(got) == run.length, "cut short"
            assert run.fails == (ended == "error")
            if ended == "end":
                self.completed.append(got)

    async def dawdle(self) -> None:
        for _ in range(self.random.randrange(5)):
            await checkpoint()


async def all_at_once(seed: int) -> Crowd:
    crowd = Crowd(seed)
    async with anyio.create_task_group() as tasks:
        for _ in range(60):
            tasks.start_soon(crowd.reader)
    gc.collect()
    await tick(60)
    return crowd


@pytest.mark.parametrize("seed", range(2))
async def test_a_seed_repeats_itself(seed: int) -> None:
    """What the file promises: the same seed is the same run, so that a failing one can be looked into."""
    first, second = [await all_at_once(seed) for _ in range(2)]
    assert first.completed == second.completed
    assert first.random.random() == second.random.random()


@pytest.mark.parametrize("seed", range(20))
async def test_all_at_once(seed: int) -> None:
    """No reader sees a gap, a repetition or a false end; no source is left open, and none is read twice."""
    crowd = await all_at_once(seed)
    statistics = crowd.control.statistics()
    assert statistics.in_flight == 0
    assert all(run.is_closed for run in crowd.factory.runs)
    assert statistics.hits + statistics.misses <= 60 + len(crowd.factory.runs)
    stored = 0
    before = len(crowd.factory.runs)
    for key in range(KEYS):
        stream = crowd.pipeline.execute_stream(crowd.factory, key)
        async with stream:
            await pull(stream)
        stored += len(crowd.factory.runs) == before
        before = len(crowd.factory.runs)
    assert stored == statistics.size


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
@pytest.mark.parametrize("seed", range(10))
async def test_calls_at_once(seed: int) -> None:
    """Callers of a few keys come, go and are cancelled: each gets a value of its key, none a stranger's end."""
    random = Random(seed)
    running: dict[int, int] = {}
    calls = 0

    async def load(key: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        number = calls
        running[key] = running.get(key, 0) + 1
        try:
            for _ in range(random.randrange(8)):
                await checkpoint()
            if number % 5 == 0:  # no lot: in some order of tasks none would fall on an error
                raise ConnectionError(key)
            return key, number
        finally:
            running[key] -= 1

    control = CacheControl()
    pipeline = ResiliencePipelineBuilder().add_cache(max_size=2, control=control).build()
    ends: list[str] = []

    async def caller() -> None:
        for _ in range(random.randrange(10)):
            await checkpoint()
        key = random.randrange(5)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                if random.random() < 0.4:
                    tasks.start_soon(cancel_soon, scope)
                try:
                    value = await pipeline.execute(load, key)
                    assert value[0] == key
                    ends.append("value")
                except ConnectionError as error:
                    ends.append("error" if error.args == (key,) else "a stranger's error")
                tasks.cancel_scope.cancel()
                return
        assert scope.cancel_called
        ends.append("cancelled")

    async def cancel_soon(scope: anyio.CancelScope) -> None:
        for _ in range(random.randrange(12)):
            await checkpoint()
        scope.cancel()

    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(caller)
        await tick()
        assert control.statistics().in_flight == 0
        assert not any(running.values())
    assert {"value", "error", "cancelled"} == set(ends)
    assert calls == control.statistics().misses
