"""`aclose` from another task than the reader's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

from resilience_pipeline import ResilienceStream
from support.streaming import HANG, B, Closable, Managed, Running, Sources, drain, tick

pytestmark = pytest.mark.anyio


async def drain_and_go_on(stream: ResilienceStream[Any]) -> list[Any]:
    """Read a stream and wait for something else afterwards, where a left-over cancellation would hit."""
    chunks = await drain(stream)
    await tick(3)
    return chunks


@pytest.mark.parametrize("before", [[], ["a", "b"]], ids=["first", "later"])
@pytest.mark.parametrize("strategies", ["none", "all"])
async def test_a_pending_pull_ends_the_readers_loop(before: list[Any], strategies: str) -> None:
    """Streams: `aclose()` from another task while a chunk is awaited ends the reader's loop cleanly."""
    sources = Sources([*before, HANG])
    pipeline: Any = B().build()
    if strategies == "all":
        pipeline = (
            B()
            .add_fallback(fallback_value="spare")
            .add_timeout("1h")
            .add_retry(delay=0)
            .add_circuit_breaker()
            .add_concurrency_limiter(1)
            .build()
        )
    stream = pipeline.execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        assert sources.open == 0
        await tick()
        assert (running.value, running.error, running.cancelled) == (before, None, False)
        assert running.cancelling == 0
    assert sources.calls == 1
    assert stream.committed is bool(before)


async def test_while_a_retry_waits() -> None:
    """Streams: at every stage before the first chunk: during the pause between attempts."""
    sources = Sources([OSError()])
    stream = B().add_retry(delay="1h").build().execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, running.cancelling) == ([], 0)
    assert sources.calls == 1


async def test_while_queueing_for_a_permit() -> None:
    """Streams: at every stage before the first chunk: in a limiter's queue, whose place is given back."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    ready = anyio.Event()
    holder, queued, later = (
        pipeline.execute_stream(Sources(script)) for script in ([ready], [1], [2])
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, holder)
        await tick()
        running = Running(drain_and_go_on, queued)
        tasks.start_soon(running)
        await tick()
        await queued.aclose()
        await tick()
        assert running.value == []
        third = Running(drain, later)
        tasks.start_soon(third)
        await tick()
        ready.set()
        await tick()
        assert third.value == [2]


async def test_while_a_hook_waits() -> None:
    """Streams: at every stage before the first chunk: while a strategy's hook runs."""

    async def on_retry(_: object) -> None:
        await anyio.sleep_forever()

    stream = B().add_retry(delay=0, on_retry=on_retry).build().execute_stream(Sources([OSError()]))
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert running.value == []


async def test_between_two_pulls_the_next_one_ends() -> None:
    """Small print: after its close a stream gives `StopAsyncIteration` for ever."""
    sources = Sources([1, 2, 3])
    stream = B().build().execute_stream(sources)
    assert await anext(stream) == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
    assert await drain(stream) == []
    assert sources.closed == 1


async def test_before_the_first_pull() -> None:
    """Streams: closing is allowed before the first chunk, from any task."""
    sources = Sources([1])
    stream = B().build().execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
    assert await drain(stream) == []
    assert sources.calls == 0


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_it_returns_when_the_source_is_closed(before: list[Any]) -> None:
    """Streams: `await stream.aclose()` closes at once, not at some later time."""
    closed: list[bool] = []

    async def source() -> AsyncIterator[Any]:
        try:
            for chunk in before:
                yield chunk
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await tick(10)
            closed.append(True)

    stream = B().build().execute_stream(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, stream)
        await tick()
        await stream.aclose()
        assert closed == [True]


async def test_several_tasks_may_close_at_once() -> None:
    """Streams: closing is idempotent; each returns when the source is closed."""
    closed: list[bool] = []

    async def slowly() -> None:
        await tick(10)
        closed.append(True)

    stream = B().build().execute_stream(lambda: Closable("a", HANG, closing=slowly))
    finished: list[bool] = []

    async def close() -> None:
        await stream.aclose()
        finished.append(bool(closed))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, stream)
        await tick()
        for _ in range(3):
            tasks.start_soon(close)
    assert finished == [True] * 3
    assert closed == [True]


async def test_a_block_waits_for_the_close_that_another_task_has_begun() -> None:
    """Streams: the source is closed before the `async with` ends, in every case."""
    release = anyio.Event()
    closable = Closable(1, 2, closing=release.wait)
    stream = B().build().execute_stream(lambda: closable)
    assert await anext(stream) == 1

    async def leave() -> int:
        async with stream:
            assert await drain(stream) == []
        return closable.closed

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
        await tick()
        leaving = Running(leave)
        tasks.start_soon(leaving)
        await tick()
        assert not leaving.done
        release.set()
        await tick()
        assert leaving.value == 1


async def test_a_reader_that_is_closing_already_is_not_interrupted() -> None:
    """Design, rule 5: a source's exit at its natural end is not cut short by somebody's `aclose`."""
    release = anyio.Event()
    manager = Managed(Sources([1])(), leaving=release.wait)
    stream = B().build().execute_stream(lambda: manager)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        assert manager.told == [None]
        closing = Running(stream.aclose)
        tasks.start_soon(closing)
        await tick()
        assert not closing.done
        release.set()
        await tick()
        assert closing.done
        assert (running.value, running.error, running.cancelling) == ([1], None, 0)
        assert (closing.error, closing.cancelled) == (None, False)
    assert manager.left == 1


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_source_that_does_not_listen_ends_the_loop_all_the_same(before: list[Any]) -> None:
    """Streams: the reader's loop ends cleanly although the source swallows the interruption and goes on."""

    async def source() -> AsyncIterator[Any]:
        for chunk in before:
            yield chunk
        with suppress(BaseException):  # the fault this is about
            await anyio.sleep_forever()
        yield "too late"

    stream = B().build().execute_stream(source)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, running.error, running.cancelling) == (before, None, 0)


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_source_that_ends_when_interrupted(before: list[Any]) -> None:
    """Design, rule 5: the interruption is taken back also where the source makes an end of it."""

    async def source() -> AsyncIterator[Any]:
        for chunk in before:
            yield chunk
        try:
            await anyio.sleep_forever()
        except BaseException:
            return

    stream = B().build().execute_stream(source)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, running.error, running.cancelling) == (before, None, 0)


async def fail() -> None:
    raise OSError("cleanup")


async def with_bad_cleanup() -> AsyncIterator[Any]:
    try:
        yield "a"
        await anyio.sleep_forever()
    finally:
        await fail()


BAD_CLEANUPS: dict[str, Callable[[], Any]] = {
    "generator": with_bad_cleanup,
    "own aclose": lambda: Closable("a", HANG, closing=fail),
    "manager": lambda: Managed(Sources(["a", HANG])(), raises=OSError("cleanup")),
}


@pytest.mark.parametrize("kind", BAD_CLEANUPS)
async def test_an_error_of_the_cleanup_goes_to_whoever_closes(kind: str) -> None:
    """Small print: an error raised by the source's cleanup surfaces from `aclose`, not in the reader's loop."""
    stream = B().build().execute_stream(BAD_CLEANUPS[kind])
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        with pytest.raises(OSError, match="cleanup"):
            await stream.aclose()
        await stream.aclose()
        await tick()
        assert (running.value, running.error, running.cancelling) == (["a"], None, 0)


async def test_before_the_first_chunk_an_error_of_the_cleanup_is_swallowed() -> None:
    """Streams: errors of closing something discarded are swallowed: nothing has been handed over yet."""

    async def source() -> AsyncIterator[Any]:
        try:
            await anyio.sleep_forever()
            yield 1
        finally:
            await fail()

    stream = B().build().execute_stream(source)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, running.error, running.cancelling) == ([], None, 0)


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_the_readers_own_cancellation_wins(before: list[Any]) -> None:
    """Design, rule 5: cancelled by its caller and interrupted at once, the reader is cancelled."""
    stream = B().build().execute_stream(Sources([*before, HANG]))
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        closing = Running(stream.aclose)
        tasks.start_soon(closing)
        running.cancel()
        await tick()
        assert running.cancelled
        assert closing.done
        assert closing.error is None


async def test_a_closer_that_is_cancelled_leaves_the_close_to_the_reader() -> None:
    """Streams: cancelling who waits for the close does not undo it."""
    release = anyio.Event()

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()

    stream = B().build().execute_stream(source)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_and_go_on, stream)
        tasks.start_soon(running)
        await tick()
        closing = Running(stream.aclose)
        tasks.start_soon(closing)
        await tick()
        closing.cancel()
        await tick()
        assert closing.cancelled
        release.set()
        await tick()
        assert running.value == [1]


@pytest.mark.parametrize("before", [[], ["a"]], ids=["first", "later"])
async def test_a_source_may_close_its_own_stream(before: list[Any]) -> None:
    """Called from within the source, `aclose` asks for the close and does not wait for itself."""
    streams: list[ResilienceStream[Any]] = []

    async def source() -> AsyncIterator[Any]:
        for chunk in before:
            yield chunk
        await streams[0].aclose()
        await anyio.sleep_forever()

    streams.append(B().build().execute_stream(source))
    with anyio.fail_after(5):
        assert await drain_and_go_on(streams[0]) == before


@pytest.mark.parametrize("waits", [True, False], ids=["after a wait", "at once"])
@pytest.mark.parametrize("before", [[], ["a"], ["a", "b"]], ids=["first", "second", "later"])
async def test_a_source_that_closes_its_own_stream_and_goes_on_leaves_no_cancellation(
    before: list[Any], waits: bool
) -> None:
    """What it yields afterwards is dropped, and nothing of the close hits the reader later on."""
    streams: list[ResilienceStream[Any]] = []
    closed: list[str] = []

    async def source() -> AsyncIterator[Any]:
        try:
            for chunk in before:
                yield chunk
            if waits:
                await anyio.lowlevel.checkpoint()
            await streams[0].aclose()
            yield "too late"
        finally:
            closed.append("closed")

    streams.append(B().build().execute_stream(source))
    with anyio.fail_after(5):
        assert await drain_and_go_on(streams[0]) == before
        await tick(3)
    assert closed == ["closed"]


async def test_a_hook_that_closes_the_stream_leaves_no_cancellation() -> None:
    """Called by a hook after whose end nothing is waited for, it ends the loop and nothing else."""
    streams: list[ResilienceStream[Any]] = []

    async def close(event: object) -> bool:
        await streams[0].aclose()
        return False

    async def source() -> AsyncIterator[Any]:
        yield "a"

    pipeline = B().add_retry(should_handle=close).build()
    streams.append(pipeline.execute_stream(source))
    with anyio.fail_after(5):
        assert await drain_and_go_on(streams[0]) == []
        await tick(3)


async def test_a_sources_cleanup_may_close_its_own_stream() -> None:
    """Closing is idempotent, also when it comes from what is being closed."""
    streams: list[ResilienceStream[Any]] = []
    closable = Closable(1, 2, closing=lambda: streams[0].aclose())
    streams.append(B().build().execute_stream(lambda: closable))
    with anyio.fail_after(5):
        assert await anext(streams[0]) == 1
        await streams[0].aclose()
    assert closable.closed == 1
