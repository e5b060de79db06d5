"""Leaving a stream, at every stage and in every way: its source is closed, once, by the right task."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from support.streaming import (
    HANG,
    B,
    Closable,
    Running,
    Sources,
    drain,
    drain_within,
    take_and_wait,
    tick,
)

pytestmark = pytest.mark.anyio


# ---- by the consumer --------------------------------------------------------------------------


async def test_the_block_closes_the_source_before_it_ends() -> None:
    """Streams: `async with` closes the source on the way out, in every case, before it ends."""
    log: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await tick(5)
            log.append("closed")

    async with B().build().execute_stream(source) as stream:
        async for _ in stream:
            break
        log.append("leaving")
    log.append("left")
    assert log == ["leaving", "closed", "left"]


async def test_a_break_closes_the_source() -> None:
    """RT-19, B-10, TO-9: break: the source's cleanup has run."""
    sources = Sources([1, 2, 3])
    async with B().build().execute_stream(sources) as stream:
        async for _ in stream:
            break
    assert sources.closed == 1


async def test_a_manual_close_closes_the_source() -> None:
    """RT-19: manual close: the source's cleanup has run."""
    sources = Sources([1, 2, 3])
    stream = B().build().execute_stream(sources)
    await anext(stream)
    await stream.aclose()
    assert sources.closed == 1


async def test_an_error_in_the_loop_closes_the_source_and_is_no_failure_of_it() -> None:
    """RT-19, case ST-03: the consumer's exception comes out, the source is closed, nothing is repeated."""
    sources = Sources([1, 2, 3])
    mine = KeyError("mine")

    async def read() -> None:
        async with B().add_retry(delay=0).build().execute_stream(sources) as stream:
            async for _ in stream:
                raise mine

    with pytest.raises(KeyError) as caught:
        await read()
    assert caught.value is mine
    assert (sources.calls, sources.closed) == (1, 1)


async def test_the_end_closes_the_source() -> None:
    """Streams: at the end, the loop's own end, the source is closed already."""
    closable = Closable(1, 2)
    assert await drain(B().build().execute_stream(lambda: closable)) == [1, 2]
    assert closable.closed == 1


async def test_an_error_of_the_source_closes_it() -> None:
    """Streams: a source that failed is closed, without anything the consumer has to do."""
    closable = Closable(1, OSError("late"))
    with pytest.raises(OSError, match="late"):
        await drain(B().build().execute_stream(lambda: closable))
    assert closable.closed == 1


@pytest.mark.parametrize("chunks", [0, 1, 3, 4], ids=["unread", "one", "all", "past the end"])
async def test_closing_is_idempotent(chunks: int) -> None:
    """Streams: closing is idempotent, allowed before the first chunk; the source is closed once."""
    closable = Closable(1, 2, 3)
    async with B().build().execute_stream(lambda: closable) as stream:
        for _ in range(chunks):
            await anext(stream, None)
        for _ in range(3):
            await stream.aclose()
    assert closable.closings == closable.closed == (0 if chunks == 0 else 1)


async def test_an_empty_stream_is_closed() -> None:
    closable = Closable()
    assert await drain_within(B().build().execute_stream(lambda: closable)) == []
    assert closable.closed == 1


# ---- dropped ----------------------------------------------------------------------------------


async def test_a_stream_that_is_dropped_is_closed_soon() -> None:
    """Streams: plain `async for … break` closes it as soon as Python lets the stream go."""
    sources = Sources([1, 2, 3])
    async for _ in B().build().execute_stream(sources):
        break
    gc.collect()
    await tick()
    assert sources.closed == 1


async def test_a_dropped_stream_that_was_never_read_leaves_nothing() -> None:
    """RT-20: a stream never read asks for no source, when dropped either."""
    sources = Sources([1])
    B().build().execute_stream(sources)
    gc.collect()
    await tick()
    assert sources.calls == 0


async def test_a_dropped_source_that_is_no_generator_is_closed_soon() -> None:
    """Streams: closing reaches the source's own `aclose`, which nobody else would call."""
    closable = Closable(1, 2)
    async for _ in B().build().execute_stream(lambda: closable):
        break
    gc.collect()
    await tick()
    assert closable.closed == 1


async def test_errors_of_closing_what_was_dropped_reach_nobody() -> None:
    """Streams: nobody is left to hear of it."""

    async def fail() -> None:
        raise OSError("closing")

    closable = Closable(1, 2, closing=fail)
    async for _ in B().build().execute_stream(lambda: closable):
        break
    gc.collect()
    await tick()
    assert closable.closings == 1


# ---- cancelled --------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_cancelled_consumer_closes_the_source(before: list[Any]) -> None:
    """Case ST-03: cancelling the consumer closes the source, also without `async with`."""
    closable = Closable(*before, HANG)
    got: list[Any] = []
    async with anyio.create_task_group() as tasks:
        stream = B().build().execute_stream(lambda: closable)
        running = Running(_read_into, stream, got)
        tasks.start_soon(running)
        await tick()
        running.cancel()
        await tick()
        assert running.cancelled
        assert closable.closed == 1
    assert got == before


async def _read_into(stream: Any, got: list[Any]) -> None:
    async for chunk in stream:
        got.append(chunk)


@pytest.mark.parametrize("mode", ["asyncio", "asyncio+owner"], indirect=True)
@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_cancelled_task_closes_the_source(before: list[Any]) -> None:
    """Case ST-03: `task.cancel()`: the source is closed and the task ends cancelled."""
    sources = Sources([*before, HANG])
    got: list[Any] = []
    stream = B().add_retry(delay=0).build().execute_stream(sources)
    task = asyncio.create_task(take_and_wait(stream, got))
    await tick()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert sources.closed == sources.calls == 1
    assert got == before


async def test_a_cancelled_pull_leaves_later_work_of_the_task_alone() -> None:
    """Design, rule 5: nothing of the cancellation is left once it has come out."""
    sources = Sources([HANG])
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_soon, scope)
            await anext(B().add_timeout("1h").build().execute_stream(sources))
    await tick(3)
    assert sources.closed == 1
    assert await drain(B().build().execute_stream(Sources([1]))) == [1]


async def _cancel_soon(scope: anyio.CancelScope) -> None:
    await tick(5)
    scope.cancel()


async def test_a_source_is_told_of_the_end_by_the_consumers_cancellation_once() -> None:
    """Streams, in small print: a given-up source is cancelled once, so that on asyncio its cleanup may await."""
    seen: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        except BaseException:
            seen.append("cancelled")
            with anyio.CancelScope(shield=True):
                await tick(5)
            seen.append("cleaned up")
            raise

    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, B().build().execute_stream(source), [])
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert seen == ["cancelled", "cleaned up"]


# ---- who closes -------------------------------------------------------------------------------


async def test_one_task_opens_reads_and_closes() -> None:
    """Design, rule 6: one task, in one context, opens, reads and closes a source."""
    sources = Sources([1, 2, 3])
    async with B().add_timeout("1h").add_retry().build().execute_stream(sources) as stream:
        await anext(stream)
        await anext(stream)
    assert len(sources.tasks) == 1


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_on_asyncio_the_consumers_own_task_does() -> None:
    """Streams: opened, read and closed in the consumer's own task."""
    sources = Sources([1, 2, 3])
    async with B().add_timeout("1h").add_retry().build().execute_stream(sources) as stream:
        await anext(stream)
    assert sources.tasks == {anyio.get_current_task().id}


@pytest.mark.parametrize("mode", ["asyncio+owner", "trio"], indirect=True)
async def test_with_an_owner_any_task_may_read_and_close() -> None:
    """Streams: where an owner task runs the source any task may read and close."""

    async def source() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            yield 1
            yield 2
            yield 3

    stream = B().add_timeout("1h").build().execute_stream(source)
    got: list[int] = []

    async def pull() -> None:
        got.append(await anext(stream))

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
    assert got == [1, 2]
    assert await anext(stream, "end") == "end"
