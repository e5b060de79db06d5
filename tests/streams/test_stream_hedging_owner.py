"""Streams that won a race: whoever reads, closes or drops them, their owner task ends with them (case HG-03)."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    ResilienceStream,
)
from resilience_pipeline.testing import VirtualClock
from support.racing import Each, nothing_reported, stubborn
from support.streaming import (
    HANG,
    B,
    Running,
    Sources,
    collect,
    drain,
    leaves,
    tick,
)

pytestmark = pytest.mark.anyio

# ---- owner tasks ------------------------------------------------------------------------------


async def holding_a_task_group(chunks: int, log: list[str]) -> AsyncIterator[int]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep_forever)
        with anyio.fail_after(3600):
            try:
                for chunk in range(chunks):
                    yield chunk
            finally:
                log.append("closed")
        tasks.cancel_scope.cancel()


async def test_the_winner_outlives_the_race_with_all_it_holds() -> None:
    """Case HG-03: a stream's winning source keeps its owner until it is closed, its task group open."""
    log: list[str] = []
    pipeline = B().add_hedging(max_hedged_attempts=2, delay=0).build()
    factory = Each(Sources([HANG]), partial(holding_a_task_group, 100, log), Sources([HANG]))
    async with pipeline.execute_stream(factory) as stream:
        assert [chunk async for chunk in stream] == list(range(100))
    assert log == ["closed"]


@pytest.mark.parametrize("way", ["end", "close"])
async def test_another_task_may_read_and_close_the_winner(way: str) -> None:
    """Streams: where hedging is in the pipeline, an owner task, and then any task may read and close."""
    log: list[str] = []
    factory = Each(Sources([HANG]), partial(holding_a_task_group, 5, log))
    stream = B().add_hedging(delay=0).build().execute_stream(factory)
    assert await anext(stream) == 0
    rest: list[int] = []

    async def go_on() -> None:
        if way == "end":
            await collect(stream, rest)
        else:
            rest.append(await anext(stream))
            await stream.aclose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(go_on)
    assert rest == ([1, 2, 3, 4] if way == "end" else [1])
    assert log == ["closed"]
    assert await anext(stream, "over") == "over"


async def test_each_chunk_may_be_read_by_another_task() -> None:
    """Streams: any task may read, one after another."""
    log: list[str] = []
    factory = Each(Sources([HANG]), partial(holding_a_task_group, 5, log))
    stream = B().add_hedging(delay=0).build().execute_stream(factory)
    got: list[int] = []

    async def read_one() -> None:
        got.append(await anext(stream))

    for _ in range(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_one)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
    assert (got, log) == ([0, 1, 2, 3, 4], ["closed"])


class Scopes:
    """Sources that hold a scope of their own open over their yields; `trigger` makes it go off."""

    def __init__(self) -> None:
        self._fuse = anyio.Event()
        self._scope: anyio.CancelScope | None = None
        self.closed = 0

    def trigger(self) -> None:
        self._fuse.set()
        if self._scope is not None:
            self._scope.deadline = anyio.current_time() - 1

    async def _chunks(self) -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            self.closed += 1

    async def _background(self) -> None:
        await self._fuse.wait()
        raise OSError("background")

    async def task_group(self) -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._background)
            async with aclosing(self._generator()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def fail_after(self) -> AsyncIterator[int]:
        with anyio.fail_after(3600) as self._scope:
            async with aclosing(self._generator()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def move_on_after(self) -> AsyncIterator[int]:
        with anyio.move_on_after(3600) as self._scope:
            async with aclosing(self._generator()) as chunks:
                async for chunk in chunks:
                    yield chunk
        yield 2

    def _generator(self) -> AsyncGenerator[int, None]:
        chunks: Any = self._chunks()
        return chunks  # type: ignore[no-any-return]

    @asynccontextmanager
    async def manager_with_task_group(self) -> AsyncIterator[AsyncIterator[int]]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._background)
            yield self._chunks()

    @asynccontextmanager
    async def manager_with_fail_after(self) -> AsyncIterator[AsyncIterator[int]]:
        with anyio.fail_after(3600) as self._scope:
            yield self._chunks()


@pytest.mark.parametrize("moment", ["while a chunk is awaited", "between two chunks"])
@pytest.mark.parametrize(
    ("kind", "comes"),
    [
        ("task_group", "background"),
        ("fail_after", TimeoutError),
        ("move_on_after", 2),
        ("manager_with_task_group", "background"),
        ("manager_with_fail_after", TimeoutError),
    ],
)
async def test_a_scope_of_the_sources_own_that_goes_off_is_seen_by_the_source(
    kind: str, comes: Any, moment: str
) -> None:
    """Case ST-05: a scope held open across yields works, at whatever moment it goes off; the reader gets what the
    source makes of it, and no cancellation that nobody asked for.
    """
    scopes = Scopes()
    factory = Each(Sources([HANG]), getattr(scopes, kind))
    stream = B().add_hedging(delay=0).build().execute_stream(factory)
    assert await anext(stream) == 1
    if moment == "between two chunks":
        scopes.trigger()
        await tick()
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        scopes.trigger()
        await tick()
        assert running.done
        assert not running.cancelled
    if comes == "background":
        assert running.error is not None
        assert [str(leaf) for leaf in leaves(running.error)] == [comes]
    elif comes is TimeoutError:
        assert type(running.error) is TimeoutError
    else:
        assert (running.value, running.error) == (comes, None)
    await stream.aclose()
    assert scopes.closed == 1


@pytest.mark.parametrize("kind", ["task_group", "fail_after", "manager_with_fail_after"])
async def test_a_scope_that_goes_off_before_the_first_chunk_is_a_failed_attempt(kind: str) -> None:
    """Streams, retry: a stream that fails before yielding is tried again, be it by its own time limit."""
    scopes = Scopes()
    patient = scopes._chunks
    hangs = Sources([HANG])
    scopes._chunks = hangs  # type: ignore[method-assign]
    factory = Each(getattr(scopes, kind), patient)
    stream = B().add_hedging(delay="1h").build().execute_stream(factory)
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        scopes.trigger()
        await tick()
        assert (running.value, running.error) == (1, None)
    await stream.aclose()
    assert (hangs.closed, scopes.closed) == (1, 1)


# ---- closed by another task -------------------------------------------------------------------


@pytest.mark.parametrize("script", [[HANG], ["a", HANG]], ids=["before", "after"])
@pytest.mark.parametrize("outside", [False, True], ids=["alone", "among others"])
async def test_closed_by_another_task_the_loop_ends_cleanly(
    script: list[Any], outside: bool
) -> None:
    """Streams: `aclose()` from another task ends the reader's loop cleanly, all raced sources closed."""
    sources = Sources([HANG], script)
    builder = B().add_fallback(fallback_value=1).add_timeout("1h").add_retry(delay=0)
    pipeline = (builder if outside else B()).add_hedging(delay=0).build()
    stream = pipeline.execute_stream(sources)

    async def read() -> list[Any]:
        chunks = await drain(stream)
        await tick(3)
        return chunks

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        assert sources.opened == 2
        await stream.aclose()
        assert sources.open == 0
        await tick()
        assert (running.value, running.error) == (script[:-1], None)
        assert running.cancelling == 0
    assert stream.committed is (len(script) > 1)
    assert sources.calls == 2


async def test_closed_by_another_task_while_a_hook_runs() -> None:
    """Streams: at every stage before the first chunk: while a race's hook runs."""
    sources = Sources([HANG])

    async def on_hedging(_: object) -> None:
        await anyio.sleep_forever()

    stream = B().add_hedging(delay=0, on_hedging=on_hedging).build().execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, sources.opened, sources.closed) == ([], 1, 1)


async def test_closed_by_another_task_while_losers_end() -> None:
    """Streams: at every stage before the first chunk: the winner, not handed out yet, is closed as well."""
    clock = VirtualClock()
    log: list[str] = []
    winner = Sources(["a", "b"])
    stream = (
        B(clock=clock)
        .add_hedging(delay=1)
        .build()
        .execute_stream(Each(stubborn(clock, 3, log), winner))
    )
    async with anyio.create_task_group() as tasks:
        reader = Running(drain, stream)
        tasks.start_soon(reader)
        await clock.advance(2)
        assert winner.open == 1
        closer = Running(stream.aclose)
        tasks.start_soon(closer)
        await tick()
        assert not closer.done
        await clock.advance(2)
        assert closer.done
        assert (reader.value, reader.error, reader.cancelled) == ([], None, False)
    assert (log, winner.closed) == (["closed"], 1)


# ---- let go -----------------------------------------------------------------------------------


async def test_a_dropped_stream_is_closed_soon() -> None:
    """Streams: a plain `async for` that is left closes the winner as soon as Python lets the stream go."""
    log: list[str] = []
    factory = Each(Sources([HANG]), partial(holding_a_task_group, 5, log))
    with nothing_reported():
        async for _ in B().add_hedging(delay=0).build().execute_stream(factory):
            break
        gc.collect()
        await tick()
        assert log == ["closed"]


class ClosedInstead:
    """Runs a coroutine until this is cancelled: then that is not cancelled, but closed, as by its finaliser."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        while True:
            try:
                request = self._coroutine.send(value)
            except StopIteration as stop:
                return stop.value
            try:
                value = yield request
            except BaseException:
                self._coroutine.close()
                raise
            if hasattr(value, "error"):  # trio sends its cancellation as a value
                self._coroutine.close()
                return value.unwrap()


async def pull(stream: ResilienceStream[Any]) -> Any:
    return await anext(stream)


async def test_a_pull_that_is_closed_in_the_middle_lets_all_sources_go() -> None:
    """Design, rule 4: where nothing can be awaited any more the race is let go, and no source stays open."""
    sources = Sources([HANG])
    stream = B().add_hedging(max_hedged_attempts=2, delay=0).build().execute_stream(sources)

    async def read() -> None:
        await ClosedInstead(pull(stream))

    with nothing_reported():
        async with anyio.create_task_group() as tasks:
            running = Running(read)
            tasks.start_soon(running)
            await tick()
            assert sources.open == 3
            running.cancel()
        await tick()
        assert (sources.opened, sources.closed) == (3, 3)
        assert await anext(stream, "over") == "over"
