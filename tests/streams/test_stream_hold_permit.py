"""`hold_streams=True`: a stream keeps its permit until it is closed, and gives it back once, whichever way it is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import (
    ConcurrencyLimiter,
    ConcurrencyLimiterRejectedError,
    OptionsError,
    ResilienceLock,
    ResilienceStream,
    TimeoutRejectedError,
    handle_result,
)
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.testing import VirtualClock
from support.inside import Room, free_permits
from support.streaming import HANG, B, Closable, Managed, Running, Sources, drain, tick

on_each_loop = pytest.mark.anyio


def holding(permits: int = 1, queue: int = 0, clock: VirtualClock | None = None) -> Any:
    builder = B(clock=clock)
    return builder.add_concurrency_limiter(permits, queue, hold_streams=True).build()


# ---- while it is open -------------------------------------------------------------------------


@on_each_loop
async def test_a_stream_keeps_its_permit_beyond_its_first_chunk() -> None:
    """Concurrency limiter: `hold_streams=True` keeps a stream's permit until the stream is closed."""
    pipeline = holding(2)
    streams = [pipeline.execute_stream(Sources([1, 2, HANG])) for _ in range(2)]
    for stream in streams:
        assert [await anext(stream), await anext(stream)] == [1, 2]
    refused = Sources([1])
    with pytest.raises(ConcurrencyLimiterRejectedError):
        await anext(pipeline.execute_stream(refused))
    assert refused.calls == 0
    await streams[0].aclose()
    assert await free_permits(pipeline) == 1
    await streams[1].aclose()
    assert await free_permits(pipeline) == 2


@on_each_loop
@pytest.mark.parametrize("options", [{}, {"hold_streams": False}])
async def test_without_it_the_permit_is_free_from_the_first_chunk_on(
    options: dict[str, Any],
) -> None:
    """Case ST-21: by default ten streams are open under two permits."""
    pipeline = B().add_concurrency_limiter(2, **options).build()
    streams = [pipeline.execute_stream(Sources([1, HANG])) for _ in range(10)]
    assert [await anext(stream) for stream in streams] == [1] * 10
    assert await free_permits(pipeline) == 2
    for stream in streams:
        await stream.aclose()
    assert await free_permits(pipeline) == 2


@on_each_loop
async def test_a_stream_that_is_never_pulled_takes_none() -> None:
    """MC-6: never iterated takes none, not even within `async with`."""
    pipeline = holding()
    async with pipeline.execute_stream(Sources([1])) as stream:
        assert await free_permits(pipeline) == 1
        await stream.aclose()
    del stream
    assert await free_permits(pipeline) == 1


@on_each_loop
async def test_calls_give_theirs_back_when_they_return() -> None:
    """Concurrency limiter: `hold_streams` is about streams alone."""
    pipeline, room = holding(2), Room()
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(pipeline.execute, room, name)
        await tick()
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await pipeline.execute(room, "c")
        room.let_all_out()
        await tick()
        assert await free_permits(pipeline) == 2
    closable = Closable(1)
    result = await pipeline.execute(_give, closable)
    assert (result, closable.closed) == (closable, 0)
    assert await free_permits(pipeline) == 2


async def _give(value: Any) -> Any:
    return value


@on_each_loop
async def test_streams_and_calls_share_the_permits() -> None:
    """Concurrency limiter: at most `permit_limit` inside, of whatever kind."""
    pipeline = holding()
    stream = pipeline.execute_stream(Sources([1, HANG]))
    await anext(stream)
    with pytest.raises(ConcurrencyLimiterRejectedError):
        await pipeline.execute(_give, 1)
    await stream.aclose()
    assert await pipeline.execute(_give, 1) == 1


@on_each_loop
async def test_a_fallback_inside_holds_for_its_own_stream() -> None:
    """Concurrency limiter: what takes the place of a source inside is a stream like any other."""
    pipeline = (
        B()
        .add_concurrency_limiter(1, hold_streams=True)
        .add_fallback(lambda _: Sources(["x", HANG])())
        .build()
    )
    stream = pipeline.execute_stream(Sources([OSError()]))
    assert await anext(stream) == "x"
    assert await free_permits(pipeline) == 0
    await stream.aclose()
    assert await free_permits(pipeline) == 1


class Replacing(Strategy[Any]):
    """A strategy of one's own that gives a source in place of what it was given."""

    name = "Replacing"

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: Any) -> Any:
            if context.operation_key == "call":
                return await next(context)
            return Sources(["x", HANG])()

        return handle


@on_each_loop
async def test_so_does_a_strategy_of_ones_own_that_gives_a_source() -> None:
    """Streams: what a strategy puts in place of a source is made one; its permit is kept as well."""
    pipeline = B().add_concurrency_limiter(1, hold_streams=True).add(Replacing()).build()
    async with pipeline.execute_stream(Sources([1])) as stream:
        assert await anext(stream) == "x"
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await pipeline.execute(_give, 1, operation_key="call")
    assert await pipeline.execute(_give, 1, operation_key="call") == 1


@on_each_loop
async def test_a_source_that_ended_before_the_line_keeps_it_until_the_stream_has_ended() -> None:
    """Streams: the permit comes back at the end of the stream: not while held chunks are undelivered."""
    pipeline = holding()
    stream = pipeline.execute_stream(Sources(["", ""]), commit_when=bool)
    assert await anext(stream) == ""
    assert await free_permits(pipeline) == 0
    assert await drain(stream) == [""]
    assert await free_permits(pipeline) == 1


# ---- every way out ----------------------------------------------------------------------------

Streams = Callable[..., ResilienceStream[Any]]


async def read_to_its_end(stream: Streams) -> None:
    assert await drain(stream(Sources([1, 2]))) == [1, 2]


async def read_an_empty_one(stream: Streams) -> None:
    assert await drain(stream(Sources([]))) == []


async def break_within_a_block(stream: Streams) -> None:
    async with stream(Sources([1, 2])) as chunks:
        async for _ in chunks:
            break


async def close_it(stream: Streams) -> None:
    chunks = stream(Sources([1, 2]))
    await anext(chunks)
    for _ in range(3):
        await chunks.aclose()


async def close_it_after_its_end(stream: Streams) -> None:
    chunks = stream(Sources([1]))
    await drain(chunks)
    await chunks.aclose()


async def close_it_from_another_task(stream: Streams) -> None:
    chunks = stream(Sources([1, HANG]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, chunks)
        await tick()
        await chunks.aclose()


async def close_it_before_its_first_chunk(stream: Streams) -> None:
    chunks = stream(Sources([HANG]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, chunks)
        await tick()
        await chunks.aclose()


async def _cancel(stream: Streams, source: Any) -> None:
    async def read() -> None:
        async with stream(source) as chunks:
            await drain(chunks)

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled


async def cancel_it(stream: Streams) -> None:
    await _cancel(stream, Sources([1, HANG]))


async def cancel_it_before_its_first_chunk(stream: Streams) -> None:
    await _cancel(stream, Sources([HANG]))


async def fail_late(stream: Streams) -> None:
    with pytest.raises(OSError, match="late"):
        await drain(stream(Sources([1, OSError("late")])))


async def fail_early(stream: Streams) -> None:
    with pytest.raises(OSError, match="early"):
        await drain(stream(Sources([OSError("early")])))


async def fail_to_close(stream: Streams) -> None:
    chunks = stream(lambda: Managed(Sources([1, 2])(), raises=OSError("closing")))
    await anext(chunks)
    with pytest.raises(OSError, match="closing"):
        await chunks.aclose()


async def give_no_source(stream: Streams) -> None:
    with pytest.raises(TypeError):
        await anext(stream(lambda: 1))


async def be_idle_too_long(stream: Streams) -> None:
    with pytest.raises(TimeoutRejectedError):
        await drain(stream(Sources([1, HANG]), idle_timeout=5))


async def take_too_long(stream: Streams) -> None:
    with pytest.raises(TimeoutRejectedError):
        await drain(stream(Sources([1, HANG]), total_timeout=5))


async def take_too_long_for_a_first_chunk(stream: Streams) -> None:
    with pytest.raises(TimeoutRejectedError):
        await drain(stream(Sources([HANG]), total_timeout=5))


async def leave_held_chunks_undelivered(stream: Streams) -> None:
    async with stream(Sources(["", "", "a"]), commit_when=bool) as chunks:
        await anext(chunks)


async def drop_it(stream: Streams) -> None:
    chunks = stream(Sources([1, 2]))
    await anext(chunks)
    del chunks
    gc.collect()
    await tick()


async def drop_its_loop(stream: Streams) -> None:
    async for _ in stream(Sources([1, 2])):
        break
    gc.collect()
    await tick()


WAYS: dict[str, Callable[[Streams], Awaitable[None]]] = {
    way.__name__: way
    for way in (
        read_to_its_end,
        read_an_empty_one,
        break_within_a_block,
        close_it,
        close_it_after_its_end,
        close_it_from_another_task,
        close_it_before_its_first_chunk,
        cancel_it,
        cancel_it_before_its_first_chunk,
        fail_late,
        fail_early,
        fail_to_close,
        give_no_source,
        be_idle_too_long,
        take_too_long,
        take_too_long_for_a_first_chunk,
        leave_held_chunks_undelivered,
        drop_it,
        drop_its_loop,
    )
}


@on_each_loop
@pytest.mark.parametrize("way", WAYS)
async def test_the_permit_comes_back_exactly_once_whichever_way_it_is_left(way: str) -> None:
    """Case ST-21: with `hold_streams=True` given back exactly once at the close, by every way out."""
    pipeline = holding(2, clock=VirtualClock(autojump=True))
    for _ in range(3):
        await WAYS[way](pipeline.execute_stream)
        assert await free_permits(pipeline) == 2


@on_each_loop
@pytest.mark.parametrize("way", WAYS)
async def test_a_lock_is_given_back_whichever_way_a_stream_is_left(way: str) -> None:
    """LK-6: released on end, error, break, close, cancellation, expiry: as the permit is."""
    lock = ResilienceLock()
    pipeline = B(clock=VirtualClock(autojump=True)).add_lock(lock).build()
    for _ in range(3):
        await WAYS[way](pipeline.execute_stream)
        assert repr(lock) == "<ResilienceLock free>"


@on_each_loop
@pytest.mark.parametrize("way", WAYS)
async def test_so_does_that_of_a_stream_that_could_be_resumed(way: str) -> None:
    """Case ST-21: also where a retry inside would go on with another source."""
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_concurrency_limiter(2, hold_streams=True)
        .add_retry(delay=0, max_retry_attempts=1, resumable=True)
        .build()
    )
    await WAYS[way](pipeline.execute_stream)
    assert await free_permits(pipeline) == 2


@on_each_loop
async def test_the_permit_is_kept_until_the_closing_has_ended() -> None:
    """Concurrency limiter: until the stream is closed, not until somebody begins to close it."""
    release = anyio.Event()
    pipeline = holding()
    stream = pipeline.execute_stream(lambda: Closable(1, HANG, closing=release.wait))
    await anext(stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)
        await tick()
        assert await free_permits(pipeline) == 0
        release.set()
        await tick()
        assert await free_permits(pipeline) == 1


# ---- with other strategies --------------------------------------------------------------------


@on_each_loop
async def test_a_source_discarded_by_an_outer_retry_gives_it_back() -> None:
    """Case ST-21: a handled first chunk: its permit is back before the next attempt asks for one."""
    sources = Sources(["bad", HANG], ["good", HANG])
    is_bad = handle_result(lambda chunk: chunk == "bad")
    pipeline = (
        B()
        .add_retry(delay=0, should_handle=is_bad)
        .add_concurrency_limiter(1, hold_streams=True)
        .build()
    )
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "good"
    assert (sources.calls, sources.closed) == (2, 1)
    assert await free_permits(pipeline) == 0
    await stream.aclose()
    assert await free_permits(pipeline) == 1


@on_each_loop
async def test_resumed_sources_inside_each_give_theirs_back() -> None:
    """Case ST-21: the limiter within a resuming retry: a failed source's permit serves the next."""
    sources = Sources([1, OSError()], [1, 2, HANG])
    pipeline = (
        B().add_retry(delay=0, resumable=True).add_concurrency_limiter(1, hold_streams=True).build()
    )
    stream = pipeline.execute_stream(sources)
    assert [await anext(stream), await anext(stream)] == [1, 2]
    assert await free_permits(pipeline) == 0
    await stream.aclose()
    assert await free_permits(pipeline) == 1


@on_each_loop
async def test_a_losing_hedge_gives_it_back_before_the_first_chunk_is_out() -> None:
    """Case ST-19, ST-21: losers are closed and awaited, and so their permits are free."""
    clock = VirtualClock(autojump=True)
    sources = Sources([HANG], ["second", HANG])
    pipeline = (
        B(clock=clock).add_hedging(delay=1).add_concurrency_limiter(2, hold_streams=True).build()
    )
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "second"
    assert await free_permits(pipeline) == 1
    await stream.aclose()
    assert await free_permits(pipeline) == 2


@on_each_loop
async def test_a_hook_that_raises_after_the_first_chunk_leaks_none() -> None:
    """Hooks: an exception raised by a hook never leaks a permit."""

    def fail(_: object) -> bool:
        raise LookupError

    pipeline = (
        B()
        .add_circuit_breaker(should_handle=fail)
        .add_concurrency_limiter(1, hold_streams=True)
        .build()
    )
    with pytest.raises(LookupError):
        await anext(pipeline.execute_stream(Sources([1, HANG])))
    with pytest.raises(LookupError):  # it was let in
        await pipeline.execute(_give, 1)


@on_each_loop
async def test_queued_streams_get_it_in_order() -> None:
    """Concurrency limiter: first come first served, nobody overtakes; woken by the close, not by a chunk."""
    pipeline = holding(1, 3)
    first = pipeline.execute_stream(Sources([1, 2, HANG]))
    await anext(first)
    order: list[int] = []
    streams = [pipeline.execute_stream(Sources([number, HANG])) for number in range(3)]

    async def wait_for(stream: ResilienceStream[int]) -> None:
        order.append(await anext(stream))

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(wait_for, stream)
            await tick()
        await anext(first)
        await tick()
        assert order == []
        for number, stream in enumerate([first, *streams[:2]]):
            await stream.aclose()
            await tick()
            assert order == list(range(number + 1))
    await streams[2].aclose()
    assert await free_permits(pipeline) == 1


@on_each_loop
async def test_a_queued_stream_that_is_cancelled_leaves_its_place() -> None:
    """Concurrency limiter: a cancelled waiter gives its place back."""
    pipeline = holding(1, 1)
    first = pipeline.execute_stream(Sources([1, HANG]))
    await anext(first)
    async with anyio.create_task_group() as tasks:
        waiting = Running(anext, pipeline.execute_stream(Sources([2])))
        tasks.start_soon(waiting)
        await tick()
        waiting.cancel()
        await tick()
        later = Running(drain, pipeline.execute_stream(Sources([3])))
        tasks.start_soon(later)
        await tick()
        assert not later.done
        await first.aclose()
        await tick()
        assert (waiting.cancelled, later.value) == (True, [3])


@on_each_loop
@pytest.mark.parametrize("value", [None, 1, 0, "yes"])
async def test_what_is_no_bool_is_refused(value: Any) -> None:
    """Head of the contract: a bad value raises `OptionsError` that names it."""
    with pytest.raises(OptionsError, match="hold_streams"):
        ConcurrencyLimiter(1, hold_streams=value)


# ---- event loops that end ---------------------------------------------------------------------

Main = Callable[[], Awaitable[Any]]


def on_asyncio(main: Main) -> Any:
    async def run() -> Any:
        return await main()

    return asyncio.run(run())


def on_trio(main: Main) -> Any:
    return trio.run(main)


RUNS: dict[str, Callable[[Main], Any]] = {"asyncio": on_asyncio, "trio": on_trio}
each_run = pytest.mark.parametrize("loop", RUNS)


class Endless:
    """A source that is no generator: nothing but the library closes it."""

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        return 1

    async def aclose(self) -> None:
        pass


@each_run
def test_a_loop_closed_under_an_open_stream_gives_it_back_when_that_is_dropped(loop: str) -> None:
    """Case ST-21: by whichever way the stream is left; design, rule 14: dead loops hold nothing for ever."""
    pipeline = holding()
    kept: list[Any] = []

    async def main() -> None:
        kept.append(pipeline.execute_stream(Endless))
        await anext(kept[0])

    RUNS[loop](main)
    kept.clear()
    gc.collect()
    assert RUNS[loop](lambda: free_permits(pipeline)) == 1


@each_run
def test_a_stream_left_as_the_last_thing_of_a_loop_gives_it_back(loop: str) -> None:
    """Case ST-21: a `break` out of the loop right before `asyncio.run` ends leaks no permit."""
    pipeline = holding()

    async def main() -> None:
        async for _ in pipeline.execute_stream(Endless):
            break

    for _ in range(2):
        RUNS[loop](main)
    assert RUNS[loop](lambda: free_permits(pipeline)) == 1


@each_run
def test_a_stream_cancelled_with_its_loop_gives_it_back(loop: str) -> None:
    """Case ST-21: an error that ends the loop cancels the reader, which closes the stream."""
    pipeline = holding()

    async def read() -> None:
        async with pipeline.execute_stream(Sources([1, HANG])) as stream:
            await drain(stream)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await tick()
            raise KeyError

    with pytest.raises(ExceptionGroup):
        RUNS[loop](main)
    assert RUNS[loop](lambda: free_permits(pipeline)) == 1
