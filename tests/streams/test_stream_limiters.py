"""Limiters hold a permit until the first chunk, and give it back once, whatever becomes of the stream."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    ConcurrencyLimiterRejectedError,
    RateLimiterRejectedError,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.streaming import HANG, B, Running, Sources, drain, tick

pytestmark = pytest.mark.anyio


async def test_a_long_stream_holds_no_permit() -> None:
    """B-6: stream 2 gets its first chunk while stream 1 is still open after its own."""
    pipeline = B().add_concurrency_limiter(1).build()
    async with (
        pipeline.execute_stream(Sources([1, HANG])) as first,
        pipeline.execute_stream(Sources([2, HANG])) as second,
    ):
        assert [await anext(first), await anext(second)] == [1, 2]


async def test_ten_streams_are_open_under_two_permits() -> None:
    """Case ST-21: permits are held until the first chunk; a cancelled first pull gives its own back."""
    pipeline = B().add_concurrency_limiter(2).build()
    streams = [pipeline.execute_stream(Sources([1, HANG])) for _ in range(10)]
    assert [await anext(stream) for stream in streams] == [1] * 10
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            running = Running(anext, pipeline.execute_stream(Sources([HANG])))
            tasks.start_soon(running)
            await tick()
            running.cancel()
            await tick()
    ready = anyio.Event()
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(drain, pipeline.execute_stream(Sources([ready])))
        await tick()
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await anext(pipeline.execute_stream(Sources([1])))
        ready.set()
    for stream in streams:
        await stream.aclose()


@pytest.mark.parametrize(
    "script", [[], ["a"], [OSError()], ["a", OSError()]], ids=["empty", "end", "early", "late"]
)
async def test_the_permit_is_free_again_whatever_became_of_the_stream(script: list[Any]) -> None:
    """B-13, MC-6: the slot is freed on end and on error, before the first chunk or after it."""
    pipeline = B().add_concurrency_limiter(1).build()
    for _ in range(3):
        try:
            await drain(pipeline.execute_stream(Sources(script)))
        except OSError:
            assert any(isinstance(item, OSError) for item in script)


async def test_the_permit_is_free_again_after_leaving_early() -> None:
    """MC-6: the slot is freed on break."""
    pipeline = B().add_concurrency_limiter(1).build()
    for _ in range(3):
        async with pipeline.execute_stream(Sources([1, 2])) as stream:
            async for _ in stream:
                break


async def test_a_stream_that_is_never_read_takes_no_permit() -> None:
    """MC-6: never iterated takes none, not even within `async with`."""
    pipeline = B().add_concurrency_limiter(1).build()
    async with pipeline.execute_stream(Sources([1])):
        assert await drain(pipeline.execute_stream(Sources([2]))) == [2]


async def test_a_reader_already_cancelled_takes_no_permit() -> None:
    """MC-6: already aborted takes none."""
    sources = Sources([HANG])
    pipeline = B().add_concurrency_limiter(1).build()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anext(pipeline.execute_stream(sources))
    assert sources.open == 0
    assert await drain(pipeline.execute_stream(Sources([2]))) == [2]


async def test_a_queued_stream_opens_once_the_first_chunk_of_another_is_there() -> None:
    """B-6: the permit passes on with the first chunk, not with the end."""
    ready = anyio.Event()
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    waiting = Sources([2])
    async with anyio.create_task_group() as tasks:
        first, second = (
            pipeline.execute_stream(Sources([ready, 1, HANG])),
            Running(drain, pipeline.execute_stream(waiting)),
        )
        opening = Running(anext, first)
        tasks.start_soon(opening)
        await tick()
        tasks.start_soon(second)
        await tick()
        assert waiting.calls == 0
        ready.set()
        await tick()
        assert (opening.value, second.value) == (1, [2])
    await first.aclose()


async def test_a_rate_limiter_takes_its_permit_at_the_start_and_holds_nothing() -> None:
    """Streams, in small print: a rate limiter takes its permit at the start; chunks are free."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_rate_limiter(TokenBucket(2, 1)).build()
    for _ in range(2):
        assert await drain(pipeline.execute_stream(Sources([1, 2, 3, 4]))) == [1, 2, 3, 4]
    refused = Sources([1])
    with pytest.raises(RateLimiterRejectedError):
        await drain(pipeline.execute_stream(refused))
    assert refused.calls == 0
