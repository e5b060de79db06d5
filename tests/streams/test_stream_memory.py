"""A stream that is over keeps nothing alive, and neither does what it failed with: no cycle waits for the collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import ResilienceStream
from resilience_pipeline.testing import VirtualClock
from support.streaming import B, tick

pytestmark = pytest.mark.anyio


class LateError(Exception):
    pass


class Source:
    """Gives numbers, then raises, hangs or ends."""

    def __init__(self, chunks: int, then: str) -> None:
        self._left = chunks
        self._then = then

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> int:
        await checkpoint()
        if self._left:
            self._left -= 1
            return self._left
        if self._then == "raise":
            raise LateError
        if self._then == "hang":
            await anyio.sleep_forever()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await checkpoint()


class Watch:
    """Makes streams and tells what of them is still alive."""

    def __init__(self) -> None:
        self._watched: list[ref[Any]] = []

    def stream(self, chunks: int, then: str, **options: Any) -> ResilienceStream[int]:
        def connect() -> Source:
            source = Source(chunks, then)
            self._watched.append(ref(source))
            return source

        clock = options.get("clock")
        pipeline = (
            B(clock=clock)
            .add_fallback(fallback_value=0, should_handle=KeyError)
            .add_retry(max_retry_attempts=1, delay=0)
            .add_concurrency_limiter(1)
            .add_timeout("1h")
            .build()
        )
        stream = pipeline.execute_stream(connect)
        self._watched.append(ref(stream))
        return stream

    def note(self, error: Exception) -> None:
        self._watched.append(ref(error))

    def alive(self) -> list[Any]:
        return [each() for each in self._watched if each() is not None]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def read_to_its_end(watch: Watch) -> None:
    async for _ in watch.stream(2, "end"):
        pass


async def leave_the_loop(watch: Watch) -> None:
    async for _ in watch.stream(2, "end"):
        break


async def leave_the_block(watch: Watch) -> None:
    async with watch.stream(2, "end") as stream:
        await anext(stream)


async def fail_late(watch: Watch) -> None:
    try:
        async for _ in watch.stream(1, "raise"):
            pass
    except LateError as error:
        watch.note(error)


async def fail_early(watch: Watch) -> None:
    try:
        async for _ in watch.stream(0, "raise"):
            pass
    except LateError as error:
        watch.note(error)


async def time_out(watch: Watch) -> None:
    clock = VirtualClock(autojump=True)
    try:
        async for _ in watch.stream(0, "hang", clock=clock):
            pass
    except TimeoutError as error:
        watch.note(error)


async def _read_within(stream: ResilienceStream[int], scope: anyio.CancelScope) -> None:
    with scope:
        async with stream:
            async for _ in stream:
                pass


def cancelled(chunks: int) -> Callable[[Watch], Any]:
    async def cancel(watch: Watch) -> None:
        scope = anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_within, watch.stream(chunks, "hang"), scope)
            await tick()
            scope.cancel()

    return cancel


def closed_by_another(chunks: int) -> Callable[[Watch], Any]:
    async def close(watch: Watch) -> None:
        stream = watch.stream(chunks, "hang")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read_within, stream, anyio.CancelScope())
            await tick()
            await stream.aclose()

    return close


WAYS: dict[str, Callable[[Watch], Any]] = {
    "read to its end": read_to_its_end,
    "left by break": leave_the_loop,
    "left with its block": leave_the_block,
    "failed late": fail_late,
    "failed early": fail_early,
    "timed out": time_out,
    "cancelled before its first chunk": cancelled(0),
    "cancelled later": cancelled(1),
    "closed by another task before its first chunk": closed_by_another(0),
    "closed by another task later": closed_by_another(1),
}


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_kept_of_a_stream_that_is_over(way: str) -> None:
    """Performance, memory: nothing kept per finished call; design, rule 13: no name bound to an exception."""
    watch = Watch()
    await WAYS[way](watch)
    await tick()
    assert watch.alive() == []


class Chunk:
    """Something that can be watched."""


@pytest.mark.parametrize("pauses", [0, 2], ids=["ready", "awaited"])
async def test_a_chunk_that_was_delivered_is_not_kept(pauses: int) -> None:
    """It belongs to its consumer, however long the next one takes."""
    watched: list[ref[Chunk]] = []

    def make() -> Chunk:
        chunk = Chunk()
        watched.append(ref(chunk))
        return chunk

    async def source() -> Any:
        for _ in range(4):
            for _ in range(pauses):
                await checkpoint()
            yield make()

    stream = B().add_retry().build().execute_stream(source)
    async with stream:
        for number in range(3):
            chunk = await anext(stream)
            assert watched[number]() is chunk
            del chunk
            assert watched[number]() is None
