"""When a stream runs, who may read it and how often, and what it says of itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from resilience_pipeline import MisuseError, ResilienceContext, ResilienceStream
from support.streaming import HANG, B, Closable, Running, Sources, drain, tick

pytestmark = pytest.mark.anyio


# ---- laziness ---------------------------------------------------------------------------------


async def test_making_a_stream_runs_nothing() -> None:
    """Streams: `execute_stream` returns at once, nothing runs until the first pull."""
    sources = Sources([1])
    stream = B().add_retry().build().execute_stream(sources)
    await tick()
    assert sources.calls == 0
    await stream.aclose()


async def test_entering_the_block_runs_nothing() -> None:
    """Streams, in small print: entering `async with` runs nothing either."""
    sources = Sources([1])
    async with B().add_retry().build().execute_stream(sources):
        await tick()
        assert sources.calls == 0
    assert sources.calls == 0


async def test_entering_the_block_gives_the_stream() -> None:
    stream = B().build().execute_stream(Sources([1]))
    async with stream as entered:
        assert entered is stream


async def test_the_first_pull_connects() -> None:
    """Streams, in small print: the first pull connects."""
    sources = Sources([1, 2])
    async with B().build().execute_stream(sources, "a", 5) as stream:
        assert await anext(stream) == 1
        assert sources.arguments == [("a", 5)]


async def test_a_stream_is_an_async_iterator() -> None:
    stream = B().build().execute_stream(Sources([1]))
    assert isinstance(stream, AsyncIterator)
    assert isinstance(stream, ResilienceStream)
    assert await drain(stream) == [1]


async def test_a_stream_closed_before_its_first_pull_never_asks_for_its_source() -> None:
    """RT-20: closed before the first pull, the source is never asked for, and there are no chunks."""
    sources = Sources([1])
    stream = B().build().execute_stream(sources)
    await stream.aclose()
    assert await drain(stream) == []
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert sources.calls == 0


# ---- once -------------------------------------------------------------------------------------


async def test_a_second_loop_after_break_is_refused() -> None:
    """Streams, in small print: a second `async for` after `break` is `MisuseError`."""
    async with B().build().execute_stream(Sources([1, 2, 3])) as stream:
        async for _ in stream:
            break
        with pytest.raises(MisuseError, match="read once"):
            aiter(stream)
        with pytest.raises(MisuseError):
            await drain(stream)


async def test_a_second_loop_after_the_end_is_refused() -> None:
    """Streams, in small print: a second `async for` after the end is `MisuseError`."""
    stream = B().build().execute_stream(Sources([1]))
    assert await drain(stream) == [1]
    with pytest.raises(MisuseError):
        await drain(stream)


async def test_a_second_loop_over_a_stream_closed_unread_is_refused() -> None:
    """Streams: one stream, once."""
    stream = B().build().execute_stream(Sources([1]))
    await stream.aclose()
    assert await drain(stream) == []
    with pytest.raises(MisuseError):
        await drain(stream)


async def test_a_refused_second_loop_leaves_the_stream_readable() -> None:
    """A `MisuseError` for the consumer is no failure of the source."""
    async with B().build().execute_stream(Sources([1, 2, 3])) as stream:
        async for _ in stream:
            break
        with pytest.raises(MisuseError):
            await drain(stream)
        assert await anext(stream) == 2


async def test_a_loop_after_a_pull_goes_on_where_it_is() -> None:
    """Small print: `async for` after an `anext` goes on where it is."""
    stream = B().build().execute_stream(Sources([1, 2, 3]))
    assert await anext(stream) == 1
    assert await drain(stream) == [2, 3]


async def test_the_first_loop_after_pulls_to_the_end_is_empty() -> None:
    """Small print: `async for` after an `anext` goes on where it is, which may be the end."""
    stream = B().build().execute_stream(Sources([1]))
    assert await anext(stream) == 1
    assert await anext(stream, "end") == "end"
    assert await drain(stream) == []


async def test_looping_over_ones_iterator_is_one_iteration() -> None:
    """An iterator is its own iterator: asking again before anything was pulled is harmless."""
    stream = B().build().execute_stream(Sources([1, 2]))
    assert await drain(aiter(aiter(stream))) == [1, 2]


@pytest.mark.parametrize("script", [[1], [1, OSError()], [OSError()]], ids=["end", "late", "early"])
async def test_after_its_end_or_its_error_a_stream_has_ended_for_ever(script: list[Any]) -> None:
    """Small print: after an error or its end a stream gives `StopAsyncIteration` for ever."""
    sources = Sources(script)
    stream = B().build().execute_stream(sources)
    got: list[Any] = []
    try:
        async for chunk in stream:
            got.append(chunk)
    except OSError:
        pass
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert sources.calls == 1


async def test_after_its_close_a_stream_has_ended_for_ever() -> None:
    """Small print: after its close a stream gives `StopAsyncIteration` for ever."""
    stream = B().build().execute_stream(Sources([1, 2, 3]))
    assert await anext(stream) == 1
    await stream.aclose()
    for _ in range(3):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_after_a_cancelled_pull_a_stream_has_ended() -> None:
    """Source systems, trap 3: a source whose pull was cancelled is dead and never resumed."""
    sources = Sources([1, HANG, 2])
    stream = B().build().execute_stream(sources)
    assert await anext(stream) == 1
    with anyio.move_on_after(0):
        await anext(stream)
    assert sources.open == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


# ---- one consumer -----------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_pull_beside_another_tasks_pull_is_refused(before: list[Any]) -> None:
    """Streams: a pull while another task's pull is pending raises, and leaves that one alone."""
    ready = anyio.Event()
    stream = B().build().execute_stream(Sources([*before, ready, "b"]))
    for chunk in before:
        assert await anext(stream) == chunk
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        with pytest.raises(MisuseError, match="one consumer"):
            await anext(stream)
        assert not running.done
        ready.set()
        await tick()
        assert running.value == "b"
    assert await drain(stream) == []


# ---- committed --------------------------------------------------------------------------------


async def test_a_stream_is_committed_with_its_first_chunk() -> None:
    """Streams: `stream.committed` tells which side of the line one is on."""
    ready = anyio.Event()
    stream = B().build().execute_stream(Sources([ready, 1]))
    assert not stream.committed
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, stream)
        await tick()
        assert not stream.committed
        ready.set()
    assert stream.committed


async def test_an_empty_stream_is_committed_at_its_end() -> None:
    """Streams, in small print: `committed` is true after an empty stream's end."""
    stream = B().build().execute_stream(Sources([]))
    assert await drain(stream) == []
    assert stream.committed


async def test_a_fallbacks_value_commits() -> None:
    """Streams, in small print: `committed` is true after a fallback's value."""
    pipeline = B().add_fallback(fallback_value="spare").build()
    stream = pipeline.execute_stream(Sources([OSError()]))
    assert await drain(stream) == ["spare"]
    assert stream.committed


async def test_a_stream_that_failed_before_its_first_chunk_is_not_committed() -> None:
    stream = B().build().execute_stream(Sources([ConnectionError()]))
    with pytest.raises(ConnectionError):
        await drain(stream)
    assert not stream.committed


# ---- misuse at the call -----------------------------------------------------------------------


@pytest.mark.parametrize("given", [[1, 2], None, "text", Closable(1)], ids=repr)
async def test_what_is_not_callable_is_refused_at_the_call(given: Any) -> None:
    """Streams, in small print: `execute_stream` of something not callable raises at the call."""
    with pytest.raises(MisuseError, match="takes a function"):
        B().build().execute_stream(given)


async def test_a_coroutine_in_place_of_its_function_is_closed_and_refused() -> None:
    """Small print: an object where its function belongs is `MisuseError`; a coroutine is closed."""

    async def connect() -> AsyncIterator[int]:
        return Sources([1])()

    coroutine = connect()
    with pytest.raises(MisuseError):
        B().build().execute_stream(coroutine)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cannot reuse"):
        await coroutine


async def test_an_async_generator_in_place_of_its_function_is_refused() -> None:
    """Small print: an object where its function belongs is `MisuseError`."""
    with pytest.raises(MisuseError):
        B().build().execute_stream(Sources([1])())  # type: ignore[arg-type]


async def test_a_context_that_serves_another_execution_is_refused() -> None:
    """Small print: one context serves one execution at a time."""
    context = ResilienceContext()
    pipeline = B().build()
    sources = Sources([1])

    async def inside() -> None:
        stream = pipeline.execute_stream(sources, context=context)
        with pytest.raises(MisuseError, match="another execution"):
            await anext(stream)
        assert await anext(stream, "end") == "end"

    await pipeline.execute(inside, context=context)
    assert sources.calls == 0
