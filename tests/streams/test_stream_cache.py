"""Cached streams: one source, many readers, each with a cursor of its own; replayed when it is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    Cache,
    CacheControl,
    CacheStatistics,
    MisuseError,
    PropertyKey,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResilienceStream,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.streaming import (
    HANG,
    Closable,
    Managed,
    Running,
    Sources,
    collect,
    drain,
    drain_within,
    tick,
)

pytestmark = pytest.mark.anyio
B = ResiliencePipelineBuilder


def cached(**options: Any) -> ResiliencePipeline[Any]:
    return B().add_cache(**options).build()


async def take(stream: ResilienceStream[Any], count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


# ---- sharing ----------------------------------------------------------------------------------


async def test_catalogue_ca_13_a_finished_stream_is_replayed() -> None:
    """Its source ran once; chunks and end are the same."""
    sources = Sources([1, None, "", 2])
    pipeline = cached()
    for _ in range(3):
        assert await drain(pipeline.execute_stream(sources)) == [1, None, "", 2]
    assert (sources.calls, sources.closed) == (1, 1)


async def test_catalogue_ca_08_only_what_is_asked_for_is_produced() -> None:
    """Never iterated, never called; of an infinite source three chunks asked are three produced."""
    produced = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal produced
        while True:
            produced += 1
            yield produced

    pipeline = cached()
    stream = pipeline.execute_stream(endless)
    await tick()
    assert produced == 0
    async with stream, pipeline.execute_stream(endless) as other:
        assert await take(stream, 3) == [1, 2, 3]
        assert await take(other, 2) == [1, 2]
        await tick()
        assert produced == 3


async def test_catalogue_ca_09_readers_at_once_share_one_source() -> None:
    """Both get everything, each chunk is produced once."""
    sources = Sources([*range(20)])
    pipeline = cached()
    got: list[list[int]] = [[], [], []]
    async with anyio.create_task_group() as tasks:
        for into in got:
            tasks.start_soon(collect, pipeline.execute_stream(sources), into)
    assert got == [[*range(20)]] * 3
    assert (sources.calls, sources.closed) == (1, 1)


async def test_catalogue_ca_10_one_error_for_all_who_wait() -> None:
    """Readers that wait for the first chunk make one pull; its error reaches each, as its own."""
    gate = anyio.Event()
    sources = Sources([gate, ConnectionError("down")], [1])
    pipeline = cached()
    async with anyio.create_task_group() as tasks:
        readers = [Running(drain, pipeline.execute_stream(sources)) for _ in range(3)]
        for reader in readers:
            tasks.start_soon(reader)
        await tick()
        gate.set()
    assert sources.calls == 1
    errors = [reader.error for reader in readers]
    assert [str(error) for error in errors] == ["down"] * 3
    assert len({id(error) for error in errors}) == 3
    assert await drain(pipeline.execute_stream(sources)) == [1]


async def test_catalogue_ca_11_the_first_leaves_and_the_second_goes_on() -> None:
    """Who began is nobody special, and readers take turns in being ahead."""
    sources = Sources([*range(6)])
    pipeline = cached()
    async with pipeline.execute_stream(sources) as other:
        async with pipeline.execute_stream(sources) as one:
            assert await take(one, 2) == [0, 1]
            assert await take(other, 3) == [0, 1, 2]
            assert await take(one, 2) == [2, 3]
        assert sources.closed == 0
        assert await drain(other) == [3, 4, 5]
    assert (sources.calls, sources.closed) == (1, 1)


async def test_catalogue_ca_12_the_last_to_leave_closes_and_forgets() -> None:
    """With two readers only the second one's leaving closes; the next one starts anew."""
    sources = Sources([1, 2, 3])
    control = CacheControl()
    pipeline = cached(control=control)
    one, other = (pipeline.execute_stream(sources) for _ in range(2))
    assert await take(one, 1) == await take(other, 1) == [1]
    await one.aclose()
    assert sources.closed == 0
    await other.aclose()
    assert sources.closed == 1
    assert control.statistics() == CacheStatistics(hits=1, misses=1)
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert sources.calls == 2


async def test_catalogue_ca_14_a_stored_error_comes_after_its_prefix() -> None:
    """With `cache_errors`: prefix, then the error, one call, each time a fresh copy."""
    sources = Sources([1, 2, ConnectionError("down")])
    pipeline = cached(cache_errors=True)
    errors = []
    for _ in range(3):
        got: list[int] = []
        with pytest.raises(ConnectionError, match="down") as caught:
            await collect(pipeline.execute_stream(sources), got)
        assert got == [1, 2]
        errors.append(caught.value)
    assert sources.calls == 1
    assert len({id(error) for error in errors}) == 3


@pytest.mark.parametrize("who", [0, 1])
async def test_catalogue_ca_15_a_cancelled_reader_ends_itself_alone(who: int) -> None:
    """Also in the middle of a pull that both wait for: the other one drains the rest."""
    gate = anyio.Event()
    sources = Sources([1, gate, 2, 3])
    pipeline = cached()
    got: list[list[int]] = [[], []]
    readers = [Running(collect, pipeline.execute_stream(sources), into) for into in got]
    async with anyio.create_task_group() as tasks:
        for reader in readers:
            tasks.start_soon(reader)
            await tick()
        readers[who].cancel()
        await tick()
        assert readers[who].cancelled
        assert sources.closed == 0
        gate.set()
    assert got[who] == [1]
    assert got[1 - who] == [1, 2, 3]
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert sources.calls == 1


async def test_with_the_last_cancelled_reader_the_source_is_closed() -> None:
    """It is closed before the cancellation comes out, and forgotten."""
    sources = Sources([1, HANG], [7])
    pipeline = cached()
    async with anyio.create_task_group() as tasks:
        readers = [Running(drain, pipeline.execute_stream(sources)) for _ in range(2)]
        for reader in readers:
            tasks.start_soon(reader)
        await tick()
        readers[0].cancel()
        await tick()
        assert sources.open == 1
        readers[1].cancel()
        await tick()
        assert (sources.open, readers[1].cancelled) == (0, True)
    assert await drain(pipeline.execute_stream(sources)) == [7]


async def test_the_last_reader_is_cancelled_before_the_first_chunk() -> None:
    """What opens the source is cancelled and awaited."""
    sources = Sources([HANG], [7])
    pipeline = cached()
    async with anyio.create_task_group() as tasks:
        reader = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(reader)
        await tick()
        reader.cancel()
    assert (sources.opened, sources.closed) == (1, 1)
    assert await drain(pipeline.execute_stream(sources)) == [7]


async def test_a_late_reader_gets_the_prefix_at_once() -> None:
    """While the source is stuck, and also when it fails afterwards."""
    gate = anyio.Event()
    sources = Sources([1, 2, gate, ConnectionError("down")])
    pipeline = cached()
    early: list[int] = []
    late: list[int] = []
    readers = [Running(collect, pipeline.execute_stream(sources), into) for into in (early, late)]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(readers[0])
        await tick()
        tasks.start_soon(readers[1])
        await tick()
        assert late == [1, 2]
        gate.set()
    assert [type(reader.error) for reader in readers] == [ConnectionError] * 2
    assert late == early == [1, 2]


async def test_a_failed_stream_is_not_kept() -> None:
    """Without `cache_errors` the next reader starts a new source."""
    sources = Sources([1, ConnectionError("down")], [1, 2])
    pipeline = cached()
    with pytest.raises(ConnectionError):
        await drain(pipeline.execute_stream(sources))
    assert await drain(pipeline.execute_stream(sources)) == [1, 2]


async def test_an_empty_stream_is_kept() -> None:
    """A source without a chunk is a successful stream."""
    sources = Sources([])
    pipeline = cached()
    assert [await drain(pipeline.execute_stream(sources)) for _ in range(2)] == [[], []]
    assert sources.calls == 1


async def test_other_arguments_are_other_streams() -> None:
    """The key is made as for calls."""
    sources = Sources(["a"], ["b"])
    pipeline = cached()
    for _ in range(2):
        assert await drain(pipeline.execute_stream(sources, 1)) == ["a"]
        assert await drain(pipeline.execute_stream(sources, True)) == ["b"]
    with pytest.raises(MisuseError, match="key="):
        await drain(pipeline.execute_stream(sources, []))


async def test_a_call_and_a_stream_with_one_key_are_two_things() -> None:
    """A stream's chunks are no call's result."""
    sources = Sources([1, 2])

    async def call() -> str:
        return "value"

    control = CacheControl()
    pipeline = cached(key=lambda _: "k", control=control)
    for _ in range(2):
        assert await drain(pipeline.execute_stream(sources)) == [1, 2]
        assert await pipeline.execute(call) == "value"
    control.invalidate("k")
    assert control.statistics().size == 0


# ---- leaving ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 1])
async def test_another_task_closes_a_reader_that_waits(chunks: int) -> None:
    """Its loop ends cleanly; the other reader goes on."""
    gate = anyio.Event()
    sources = Sources([*range(chunks), gate, "last"])
    pipeline = cached()
    streams = [pipeline.execute_stream(sources) for _ in range(2)]
    readers = [Running(drain, stream) for stream in streams]
    async with anyio.create_task_group() as tasks:
        for reader in readers:
            tasks.start_soon(reader)
        await tick()
        await streams[0].aclose()
        await tick()
        assert readers[0].done
        assert (readers[0].error, readers[0].cancelled) == (None, False)
        assert sources.closed == 0
        gate.set()
    assert readers[0].value in ([*range(chunks)], None)
    assert readers[1].value == [*range(chunks), "last"]


async def test_another_task_closes_the_only_reader_that_waits() -> None:
    """Then the source is closed when `aclose` returns."""
    sources = Sources([1, HANG])
    pipeline = cached()
    stream = pipeline.execute_stream(sources)
    reader = Running(drain, stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reader)
        await tick()
        await stream.aclose()
        assert sources.closed == 1
    assert reader.value == [1]


async def test_a_dropped_reader_leaves() -> None:
    """A stream that is let go of is closed by Python's finaliser, the last one with its source."""
    sources = Sources([1, 2, 3])
    pipeline = cached()
    async with pipeline.execute_stream(sources) as kept:
        assert await take(kept, 1) == [1]
        dropped = pipeline.execute_stream(sources)
        assert await take(dropped, 2) == [1, 2]
        del dropped
        gc.collect()
        assert await take(kept, 1) == [2]
        assert sources.closed == 0
    assert sources.closed == 1
    last = pipeline.execute_stream(sources)
    await take(last, 1)
    del last
    gc.collect()
    await tick()
    assert sources.closed == 2


async def test_an_error_of_the_sources_cleanup_comes_to_the_last_who_leaves() -> None:
    """As without a cache: an error raised by the source's cleanup on the close surfaces."""

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            raise LookupError("cleanup")

    pipeline = cached()
    one, other = (pipeline.execute_stream(source) for _ in range(2))
    await take(one, 1)
    await take(other, 1)
    await one.aclose()
    with pytest.raises(LookupError, match="cleanup"):
        await other.aclose()


async def test_a_source_that_closes_its_only_reader() -> None:
    """It does not wait for itself."""
    streams: list[ResilienceStream[int]] = []

    async def source() -> AsyncIterator[int]:
        yield 1
        await streams[0].aclose()
        yield 2

    pipeline = cached()
    streams.append(pipeline.execute_stream(source))
    with anyio.fail_after(5):
        assert await drain(streams[0]) == [1]


async def test_a_stream_that_reads_itself_does_not_wait_for_itself() -> None:
    """A source that asks for its own key gets a source of its own."""
    calls = 0

    async def source() -> AsyncIterator[int]:
        nonlocal calls
        calls += 1
        number = calls
        if number == 1:
            async for chunk in pipeline.execute_stream(source):
                yield chunk
        yield number

    pipeline = cached()
    with anyio.fail_after(5):
        assert await drain(pipeline.execute_stream(source)) == [2, 1]


async def test_a_source_that_is_an_object_is_closed_once() -> None:
    """Any async iterable, in a context manager or not, is left as without a cache."""
    closable = Closable(1, 2)
    managed = Managed(closable)
    pipeline = cached()
    assert await drain(pipeline.execute_stream(lambda: managed)) == [1, 2]
    assert (managed.left, closable.closings) == (1, 1)


async def test_a_source_that_holds_a_scope_open() -> None:
    """It is opened, read and closed in one task, which no reader is."""

    async def source() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            with anyio.fail_after(50):
                yield 1
                yield 2
            tasks.cancel_scope.cancel()

    pipeline = cached()
    got: list[list[int]] = [[], []]
    async with anyio.create_task_group() as tasks:
        for into in got:
            tasks.start_soon(collect, pipeline.execute_stream(source), into)
    assert got == [[1, 2], [1, 2]]
    async with B().add_cache().build().execute_stream(source) as stream:
        assert await anext(stream) == 1


# ---- bounds -----------------------------------------------------------------------------------


async def test_past_max_chunks_a_stream_is_no_longer_shared() -> None:
    """Contract: current readers go on, nothing is stored, and who comes later has its own source."""
    sources = Sources([*range(6)])
    control = CacheControl()
    pipeline = cached(max_chunks=3, control=control)
    async with pipeline.execute_stream(sources) as one, pipeline.execute_stream(sources) as other:
        assert await take(one, 3) == [0, 1, 2]
        assert await take(other, 1) == [0]
        assert sources.calls == 1
        assert await take(one, 1) == [3]
        async with pipeline.execute_stream(sources) as late:
            assert await take(late, 1) == [0]
        assert sources.calls == 2
        assert await drain(one) == [4, 5]
        assert await drain(other) == [1, 2, 3, 4, 5]
    assert control.statistics().size == 0
    assert sources.open == 0


async def test_exactly_max_chunks_are_stored() -> None:
    """The bound is what may be kept."""
    sources = Sources([1, 2, 3])
    pipeline = cached(max_chunks=3)
    for _ in range(2):
        assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert sources.calls == 1


async def test_past_max_chunks_nothing_is_kept_that_nobody_will_read() -> None:
    """A stream may go on for ever: what all readers have passed is let go of."""

    class Chunk:
        """Can be weakly referenced."""

    refs: list[weakref.ref[Chunk]] = []

    async def endless() -> AsyncIterator[Chunk]:
        while True:
            chunk = Chunk()
            refs.append(weakref.ref(chunk))
            yield chunk
            del chunk

    pipeline = cached(max_chunks=5)
    async with pipeline.execute_stream(endless) as fast, pipeline.execute_stream(endless) as slow:
        await anext(slow)
        for _ in range(100):
            await anext(fast)
        assert sum(ref() is not None for ref in refs) >= 95  # the slow one has to get them yet
        for _ in range(99):
            await anext(slow)
        assert sum(ref() is not None for ref in refs) <= 2
        for _ in range(100):
            await anext(fast)
        await slow.aclose()
        for _ in range(100):
            await anext(fast)
        assert sum(ref() is not None for ref in refs) <= 2


# ---- time and errors --------------------------------------------------------------------------


async def test_a_stream_is_as_old_as_its_end() -> None:
    """`ttl` counts from the end of the stream."""
    clock = VirtualClock()
    sources = Sources([1, 2])
    pipeline = B(clock=clock).add_cache(ttl=10).build()
    async with pipeline.execute_stream(sources) as stream:
        await take(stream, 1)
        await clock.advance(20)
        assert await drain(stream) == [2]
    await clock.advance(9)
    assert await drain(pipeline.execute_stream(sources)) == [1, 2]
    assert sources.calls == 1
    await clock.advance(1)
    await drain(pipeline.execute_stream(sources))
    assert sources.calls == 2


async def test_a_stale_stream_is_served_when_its_source_fails_before_a_chunk() -> None:
    """Past a first chunk the failure comes out: nothing can be taken back."""
    clock = VirtualClock()
    sources = Sources(["old"], [ConnectionError("down")], ["new", ConnectionError("cut")])
    control = CacheControl()
    pipeline = B(clock=clock).add_cache(ttl=10, stale_if_error=100, control=control).build()
    await drain(pipeline.execute_stream(sources))
    await clock.advance(10)
    context = ResilienceContext()
    assert await drain(pipeline.execute_stream(sources, context=context)) == ["old"]
    assert isinstance(context.properties.get(Cache.STALE), ConnectionError)
    assert control.statistics().stale_hits == 1
    got: list[str] = []
    with pytest.raises(ConnectionError, match="cut"):
        await collect(pipeline.execute_stream(sources), got)
    assert got == ["new"]


async def test_invalidating_a_stream_in_flight() -> None:
    """Its readers get it, it isn't stored, and who comes later starts anew."""
    control = CacheControl()
    sources = Sources(["a", "b"], ["c"])
    pipeline = cached(control=control)
    async with pipeline.execute_stream(sources) as stream:
        await take(stream, 1)
        control.invalidate((None, sources, ()))
        assert await drain(pipeline.execute_stream(sources)) == ["c"]
        assert await drain(stream) == ["b"]
    assert await drain(pipeline.execute_stream(sources)) == ["c"]
    assert (sources.calls, sources.open) == (2, 0)


# ---- among other strategies -------------------------------------------------------------------


async def test_a_retry_inside_opens_for_all() -> None:
    """The source is guarded up to its first chunk once, not for each reader."""
    gate = anyio.Event()
    sources = Sources([gate, ConnectionError("down")], [1, 2])
    pipeline = B().add_cache().add_retry(delay=0).build()
    got: list[list[int]] = [[], []]
    async with anyio.create_task_group() as tasks:
        for into in got:
            tasks.start_soon(collect, pipeline.execute_stream(sources), into)
        await tick()
        gate.set()
    assert got == [[1, 2], [1, 2]]
    assert (sources.calls, sources.closed) == (2, 2)


async def test_a_retry_outside_repeats_for_its_reader() -> None:
    """And is defeated by a cache that keeps errors."""
    sources = Sources([ConnectionError("down")], [1])
    pipeline = B().add_retry(delay=0).add_cache().build()
    assert await drain(pipeline.execute_stream(sources)) == [1]
    defeated = B().add_retry(delay=0).add_cache(cache_errors=True).build()
    failing = Sources([ConnectionError("down")], [1])
    with pytest.raises(ConnectionError):
        await drain(defeated.execute_stream(failing))
    assert failing.calls == 1


async def test_a_resumable_retry_outside_goes_on_with_a_new_source() -> None:
    """The failed stream is forgotten; the next is read from its start, for this reader."""
    sources = Sources([1, 2, ConnectionError("cut")], [1, 2, 3])
    pipeline = B().add_retry(delay=0, resumable=True).add_cache().build()
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert sources.calls == 2


async def test_a_resumable_retry_inside_goes_on_for_all() -> None:
    """Readers see one stream, which is stored."""
    sources = Sources([1, 2, ConnectionError("cut")], [1, 2, 3])
    pipeline = B().add_cache().add_retry(delay=0, resumable=True).build()
    got: list[list[int]] = [[], []]
    async with anyio.create_task_group() as tasks:
        for into in got:
            tasks.start_soon(collect, pipeline.execute_stream(sources), into)
    assert got == [[1, 2, 3]] * 2
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert sources.calls == 2


async def test_hedging_inside_and_outside() -> None:
    """One source wins, for all; losers are closed."""
    for builder in (B().add_cache().add_hedging(delay=0), B().add_hedging(delay=0).add_cache()):
        sources = Sources([1, 2, 3])
        pipeline = builder.build()
        for _ in range(2):
            assert await drain_within(pipeline.execute_stream(sources)) == [1, 2, 3]
        await tick()
        assert sources.open == 0


async def test_a_time_limit_inside_is_the_sources() -> None:
    """Its expiry is every reader's own rejection."""
    clock = VirtualClock()
    sources = Sources([HANG])
    pipeline = B(clock=clock).add_cache().add_timeout(5).build()
    async with anyio.create_task_group() as tasks:
        readers = [Running(drain, pipeline.execute_stream(sources)) for _ in range(2)]
        for reader in readers:
            tasks.start_soon(reader)
        await tick()
        await clock.advance(5)
    assert [type(reader.error) for reader in readers] == [TimeoutRejectedError] * 2
    assert (sources.calls, sources.closed) == (1, 1)


@pytest.mark.parametrize("limit", ["idle_timeout", "total_timeout"])
async def test_a_readers_time_limit_is_its_own(limit: str) -> None:
    """It ends one reader; the other waits on and gets the rest."""
    clock = VirtualClock()
    gate = anyio.Event()
    sources = Sources([1, gate, 2])
    pipeline = B(clock=clock).add_cache().build()
    options: dict[str, Any] = {limit: 5}
    limited = Running(drain, pipeline.execute_stream(sources, **options))
    patient = Running(drain, pipeline.execute_stream(sources))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(limited)
        await tick()
        tasks.start_soon(patient)
        await tick()
        await clock.advance(5)
        await tick()
        assert isinstance(limited.error, TimeoutRejectedError)
        assert sources.closed == 0
        gate.set()
    assert patient.value == [1, 2]


async def test_a_permit_inside_is_held_until_the_source_is_closed() -> None:
    """`hold_streams` inside: one permit for all readers; outside: one for each."""
    sources = Sources([1, 2])
    inside = B().add_cache().add_concurrency_limiter(1, hold_streams=True).build()
    async with inside.execute_stream(sources) as one, inside.execute_stream(sources) as other:
        assert await take(one, 1) == await take(other, 1) == [1]
        with pytest.raises(Exception, match="1 calls are inside"):
            await drain(inside.execute_stream(Sources([3])))
    assert await drain(inside.execute_stream(Sources([3]))) == [3]


async def test_every_reader_has_its_own_line() -> None:
    """`commit_when` is asked about each reader's chunks; what is held is delivered in order."""
    sources = Sources(["", "", "token", "more"])
    pipeline = cached()
    stream = pipeline.execute_stream(sources, commit_when=bool)
    other = pipeline.execute_stream(sources)
    async with stream, other:
        assert await anext(stream) == ""
        assert stream.committed
        assert await drain(other) == ["", "", "token", "more"]
        assert await drain(stream) == ["", "token", "more"]
    assert sources.calls == 1


async def test_the_line_of_the_first_reader_guards_the_source() -> None:
    """A retry inside repeats up to it."""
    sources = Sources(["", ConnectionError("down")], ["", "token"])
    pipeline = B().add_cache().add_retry(delay=0).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=bool)) == ["", "token"]


NOTE: PropertyKey[str] = PropertyKey("note")


async def test_the_source_runs_in_the_first_readers_context() -> None:
    """Its properties are merged into the first reader's context, as far as written before the line."""
    seen: list[Any] = []

    async def source() -> AsyncIterator[int]:
        current_context().properties.set(NOTE, "inside")
        seen.append(current_context().operation_key)
        yield 1
        seen.append(current_context().operation_key)

    pipeline = cached(key=lambda _: "k")
    context = ResilienceContext(operation_key="op")
    assert await drain(pipeline.execute_stream(source, context=context)) == [1]
    assert seen == ["op", "op"]
    assert context.properties.get(NOTE) == "inside"


async def test_two_readers_of_two_streams_that_read_each_other() -> None:
    """A circle of sources is not waited for."""
    pipeline = cached()
    runs: list[str] = []

    async def source(mine: str, other: str) -> AsyncIterator[str]:
        runs.append(mine)
        yield mine
        if len(runs) < 5:
            async for chunk in pipeline.execute_stream(source, other, mine):
                yield chunk

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            readers = [
                Running(drain, pipeline.execute_stream(source, *names))
                for names in (("a", "b"), ("b", "a"))
            ]
            for reader in readers:
                tasks.start_soon(reader)
    assert readers[0].value[:2] == ["a", "b"]
    assert readers[1].value[:2] == ["b", "a"]


async def test_nothing_of_a_failed_stream_is_kept() -> None:
    """Chunks and frames go with the last reader, without the garbage collector."""

    class Chunk:
        """Can be weakly referenced."""

    refs: list[weakref.ref[Any]] = []

    async def source() -> AsyncIterator[Chunk]:
        chunk = Chunk()
        refs.append(weakref.ref(chunk))
        yield chunk
        raise ConnectionError

    async def read() -> None:
        with pytest.raises(ConnectionError):
            async for _ in pipeline.execute_stream(source):
                pass

    pipeline = cached()
    gc.collect()
    gc.disable()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(partial(read))
        await tick()
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
