"""The lock and streams: held from the first pull to the close; inside is the source, and not its consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from resilience_pipeline import LockRejectedError, ResilienceLock
from resilience_pipeline.testing import VirtualClock
from support.calls import ok
from support.inside import Room
from support.scripted import spawn
from support.streaming import HANG, B, Sources, collect, drain, tick

on_each_loop = pytest.mark.anyio

FREE, HELD = "<ResilienceLock free>", "<ResilienceLock held>"


class Locked:
    """A lock, a pipeline with it, and a look at it from outside that does not wait."""

    def __init__(self) -> None:
        self.lock = ResilienceLock()
        self.pipeline = B().add_lock(self.lock).build()
        self._look = B().add_lock(self.lock, max_wait=0).build()

    async def is_free(self) -> bool:
        """Whether a caller like the one who asks gets in at once."""
        return (await self._look.settle(ok)).ok


@pytest.fixture
def locked() -> Locked:
    return Locked()


@on_each_loop
async def test_it_is_held_from_the_first_pull_to_the_close(locked: Locked) -> None:
    """LK-6: a second stream's first pull waits until the first stream has been closed."""
    first = locked.pipeline.execute_stream(Sources([1, 2, HANG]))
    second = locked.pipeline.execute_stream(Sources(["a"]))
    got: list[Any] = []
    assert await locked.is_free()  # nothing is held before the first pull
    assert await anext(first) == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, second, got)
        assert await anext(first) == 2
        await tick()
        assert got == []
        await first.aclose()
        await tick()
        assert got == ["a"]
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_a_stream_that_is_never_pulled_acquires_nothing(locked: Locked) -> None:
    """LK-6: never iterated, not even within `async with`."""
    async with locked.pipeline.execute_stream(Sources([1])):
        assert await locked.is_free()
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_streams_are_served_in_the_order_of_their_first_pulls(locked: Locked) -> None:
    """First come first served: the order of pulls, not of creation; calls queue with them."""
    streams = {name: locked.pipeline.execute_stream(Sources([name])) for name in "ab"}
    room, got = Room(), []
    async with anyio.create_task_group() as tasks:
        spawn(tasks, locked.pipeline.execute, room)
        await tick()

        async def note(name: str) -> None:
            got.append(name)

        tasks.start_soon(collect, streams["b"], got)
        await tick()
        tasks.start_soon(locked.pipeline.execute, note, "call")
        await tick()
        tasks.start_soon(collect, streams["a"], got)
        await tick()
        room.let_all_out()
    assert got == ["b", "call", "a"]


@on_each_loop
async def test_calls_and_streams_inside_the_source_pass(locked: Locked) -> None:
    """RE-6: nested call, nested stream, recursive stream on the same lock while producing."""

    async def source(depth: int) -> AsyncIterator[int]:
        yield await locked.pipeline.execute(ok)
        if depth:
            async with locked.pipeline.execute_stream(source, depth - 1) as inner:
                async for chunk in inner:
                    yield chunk + 1
        yield await locked.pipeline.execute(ok)

    assert await drain(locked.pipeline.execute_stream(source, 3)) == [1, 2, 3, 4, 4, 3, 2, 1]
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_the_cleanup_of_the_source_is_inside(locked: Locked) -> None:
    """1.4: the source's cleanup runs as the holder, so a `finally` may take the lock."""
    cleaned: list[Any] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            with anyio.CancelScope(shield=True):
                cleaned.append(await locked.pipeline.execute(ok))

    async with locked.pipeline.execute_stream(source) as stream:
        assert await anext(stream) == 1
    assert cleaned == [1]
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_the_consumers_code_between_two_chunks_is_not_inside(locked: Locked) -> None:
    """1.4: ownership is bound to the pulls; a call in the loop's body waits like any other."""
    async with locked.pipeline.execute_stream(Sources([1, 2])) as stream:
        async for _ in stream:
            assert not await locked.is_free()
    assert await locked.is_free()


@on_each_loop
async def test_a_task_that_the_consumer_starts_in_between_is_no_child(locked: Locked) -> None:
    """Trap 5: what is bound for a pull is not seen at the yield, nor by tasks that are started there."""
    async with (
        anyio.create_task_group() as tasks,
        locked.pipeline.execute_stream(Sources([1, HANG])) as stream,
    ):
        await anext(stream)
        contender = spawn(tasks, locked.pipeline.execute, ok)
        await tick()
        assert not contender.done
        await stream.aclose()
        await tick()
        assert contender.value == 1


@on_each_loop
async def test_an_escaped_stream_keeps_it_held_until_it_is_closed(locked: Locked) -> None:
    """RE-3: a nested stream that outlives its outer call counts; one never iterated adds nothing."""

    async def outer() -> Any:
        stream = locked.pipeline.execute_stream(Sources([1, HANG]))
        assert await anext(stream) == 1
        return stream, locked.pipeline.execute_stream(Sources([1]))

    stream, never = await locked.pipeline.execute(outer)
    assert not await locked.is_free()
    await stream.aclose()
    assert await locked.is_free()
    assert never.committed is False


@on_each_loop
@pytest.mark.parametrize("error", [None, OSError("late")], ids=["end", "error"])
async def test_an_escaped_stream_releases_at_its_end_or_error(
    locked: Locked, error: Exception | None
) -> None:
    """RE-3: all ends of an escaped stream count: its last chunk, and its failure."""

    async def outer() -> Any:
        stream = locked.pipeline.execute_stream(Sources([1, *([] if error is None else [error])]))
        assert await anext(stream) == 1
        return stream

    stream = await locked.pipeline.execute(outer)
    assert not await locked.is_free()
    if error is None:
        assert await drain(stream) == []
    else:
        with pytest.raises(OSError, match="late"):
            await anext(stream)
    assert await locked.is_free()


@on_each_loop
async def test_of_two_escaped_streams_the_last_one_releases(locked: Locked) -> None:
    """The lock is held until every child still inside has ended."""

    async def outer() -> Any:
        streams = [locked.pipeline.execute_stream(Sources([1, HANG])) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        return streams

    streams = await locked.pipeline.execute(outer)
    for stream in streams:
        assert not await locked.is_free()
        await stream.aclose()
    assert await locked.is_free()


@on_each_loop
async def test_a_failed_attempt_gives_it_back_before_the_next(locked: Locked) -> None:
    """retry(lock(stream)): the failed source is closed first, the lock free during back-off."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_retry(delay=10).add_lock(locked.lock).build()
    sources = Sources([OSError()], [1])
    async with anyio.create_task_group() as tasks:
        reading = spawn(tasks, drain, pipeline.execute_stream(sources))
        await tick()
        assert (sources.calls, sources.open) == (1, 0)
        assert await locked.is_free()
        await clock.advance(10)
        await tick()
        assert reading.value == [1]
    assert await locked.is_free()


@on_each_loop
async def test_around_a_retry_it_is_held_across_the_back_off(locked: Locked) -> None:
    """lock(retry(stream)): one ownership for all attempts."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_lock(locked.lock).add_retry(delay=10).build()
    async with anyio.create_task_group() as tasks:
        reading = spawn(tasks, drain, pipeline.execute_stream(Sources([OSError()], [1])))
        await tick()
        assert not await locked.is_free()
        await clock.advance(10)
        await tick()
        assert reading.value == [1]
    assert await locked.is_free()


@on_each_loop
async def test_each_source_of_a_resumed_stream_runs_inside(locked: Locked) -> None:
    """lock(retry(resumable)): what runs in place of a source that failed owns the lock as well."""
    runs = 0

    async def source() -> AsyncIterator[int]:
        nonlocal runs
        runs += 1
        yield await locked.pipeline.execute(ok)
        if runs == 1:
            raise OSError
        yield await locked.pipeline.execute(ok) + 1

    pipeline = B().add_lock(locked.lock).add_retry(delay=0, resumable=True).build()
    async with pipeline.execute_stream(source) as stream:
        assert await anext(stream) == 1
        assert await anext(stream) == 2
        assert repr(locked.lock) == HELD
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_inside_a_resuming_retry_each_source_takes_it_anew(locked: Locked) -> None:
    """retry(resumable, lock): given back with the source that failed, taken by the next."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_retry(delay=10, resumable=True).add_lock(locked.lock).build()
    async with anyio.create_task_group() as tasks:
        stream = pipeline.execute_stream(Sources([1, OSError()], [1, 2, HANG]))
        assert await anext(stream) == 1
        assert repr(locked.lock) == HELD
        second = spawn(tasks, anext, stream)
        await tick()
        assert repr(locked.lock) == FREE
        await clock.advance(10)
        await tick()
        assert second.value == 2
        assert repr(locked.lock) == HELD
        await stream.aclose()
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_a_fallback_inside_runs_as_the_owner(locked: Locked) -> None:
    """What takes the place of a source is run inside as well, and the lock is held to its close."""

    async def spare() -> AsyncIterator[int]:
        yield await locked.pipeline.execute(ok)

    pipeline = B().add_lock(locked.lock).add_fallback(lambda _: spare()).build()
    async with pipeline.execute_stream(Sources([OSError()])) as stream:
        assert await anext(stream) == 1
        assert repr(locked.lock) == HELD
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_hedged_sources_inside_run_as_the_owner(locked: Locked) -> None:
    """Attempts are children of the owner; the winner's source is one still."""

    async def source() -> AsyncIterator[int]:
        yield await locked.pipeline.execute(ok)
        yield await locked.pipeline.execute(ok)

    pipeline = B().add_lock(locked.lock).add_hedging(delay=0).build()
    assert await drain(pipeline.execute_stream(source)) == [1, 1]
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_a_waiting_stream_that_is_closed_leaves_the_queue(locked: Locked) -> None:
    """LK-4: closed by another task while its first pull waits, it never starts its source."""
    sources = Sources([1])
    stream = locked.pipeline.execute_stream(sources)
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, locked.pipeline.execute, room)
        await tick()
        reading = spawn(tasks, drain, stream)
        await tick()
        await stream.aclose()
        await tick()
        assert reading.value == []
        room.let_all_out()
    assert sources.calls == 0
    assert repr(locked.lock) == FREE


@on_each_loop
async def test_a_streams_wait_is_bounded_by_max_wait(locked: Locked) -> None:
    """Contract: `max_wait` raises `LockRejectedError`, at the first pull."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_lock(locked.lock, max_wait=5).build()
    sources = Sources([1])
    async with locked.pipeline.execute_stream(Sources([1, 2])) as stream:
        await anext(stream)
        with pytest.raises(LockRejectedError):
            await anext(pipeline.execute_stream(sources))
    assert sources.calls == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_a_stream_cancelled_around_its_hand_over_does_not_start(turns: int) -> None:
    """1.10, 7: the check after the hand-off, for streams: the source starts only if it goes on."""
    locked, sources = Locked(), Sources([1, HANG])
    first = locked.pipeline.execute_stream(Sources([1, HANG]))
    await anext(first)
    waiter = asyncio.create_task(drain(locked.pipeline.execute_stream(sources)))
    await tick()
    await first.aclose()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await tick()
    assert sources.open == 0
    assert repr(locked.lock) == FREE
