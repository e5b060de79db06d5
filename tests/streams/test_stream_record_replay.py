"""Record and replay of streams: chunks and end are recorded when they were read, and given again."""

from __future__ import annotations

import gc
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    OptionsError,
    RecordingNotFoundError,
    RecordReplayKeyEvent,
    ResiliencePipeline,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import spawn
from support.streaming import HANG, B, Closable, Managed, Running, Sources, collect, drain, tick

on_each_loop = pytest.mark.anyio


def keyed(event: RecordReplayKeyEvent) -> Any:
    return list(event.args)


class Directory:
    """A directory for recordings, and pipelines on it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pipeline(
        self, mode: Any = "incremental", *, clock: Any = None, **options: Any
    ) -> ResiliencePipeline[Any]:
        options = {"key": keyed, **options}
        return B(clock=clock).add_record_replay(self.path, mode=mode, **options).build()

    @property
    def contents(self) -> list[Any]:
        return [json.loads(file.read_text("utf-8")) for file in sorted(self.path.iterdir())]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def never(*_: object) -> Any:
    raise AssertionError("called")


# ---- recorded and replayed --------------------------------------------------------------------


@on_each_loop
@pytest.mark.parametrize("mode_of", ["record", "incremental"])
async def test_chunks_and_end_are_recorded_and_replayed(directory: Directory, mode_of: str) -> None:
    """Contract: streams record their chunks and their end; the source is not run again."""
    sources = Sources([1, "two", None, {"three": []}])
    chunks = await drain(directory.pipeline(mode_of).execute_stream(sources, "a"))
    assert directory.contents == [{"key": ["a"], "chunks": chunks}]
    assert await drain(directory.pipeline("replay").execute_stream(never, "a")) == chunks
    assert await drain(directory.pipeline().execute_stream(sources, "a")) == chunks
    assert (sources.calls, sources.open) == (1, 0)


@on_each_loop
async def test_an_empty_stream_is_a_recording(directory: Directory) -> None:
    """An end without a chunk is a success, and comes back as that."""
    assert await drain(directory.pipeline().execute_stream(Sources([]))) == []
    assert directory.contents == [{"key": [], "chunks": []}]
    assert await drain(directory.pipeline("replay").execute_stream(never)) == []


@on_each_loop
async def test_chunks_pass_while_they_are_recorded(directory: Directory) -> None:
    """1.4: live: the first one is there long before the last."""
    gate = anyio.Event()
    stream = directory.pipeline().execute_stream(Sources([1, gate, 2]))
    assert await anext(stream) == 1
    assert directory.contents == []
    gate.set()
    assert await drain(stream) == [2]
    assert directory.contents == [{"key": [], "chunks": [1, 2]}]


@on_each_loop
async def test_a_miss_comes_with_the_first_pull(directory: Directory) -> None:
    """RR-1: nothing is run before, and nothing written."""
    stream = directory.pipeline("replay").execute_stream(never, "a")
    with pytest.raises(RecordingNotFoundError):
        await anext(stream)
    assert directory.contents == []


@on_each_loop
async def test_a_call_and_a_stream_of_one_key_are_two_recordings(directory: Directory) -> None:
    """A stream is never replayed as a call, nor the other way round."""

    async def call(_: str) -> int:
        return 1

    pipeline = directory.pipeline()
    await pipeline.execute(call, "a")
    assert await drain(pipeline.execute_stream(Sources(["chunk"]), "a")) == ["chunk"]
    assert await pipeline.execute(call, "a") == 1
    assert len(directory.contents) == 2


@on_each_loop
async def test_encode_and_decode_see_each_chunk(directory: Directory) -> None:
    """Contract: `encode` and `decode` take over, for chunks as for values."""
    options: dict[str, Any] = {"encode": list, "decode": tuple}
    chunks = [(1,), (2, 3)]
    assert await drain(directory.pipeline(**options).execute_stream(Sources(chunks))) == chunks
    assert directory.contents[0]["chunks"] == [[1], [2, 3]]
    replayed = directory.pipeline("replay", **options).execute_stream(never)
    assert await drain(replayed) == chunks


@on_each_loop
async def test_held_chunks_are_recorded_too(directory: Directory) -> None:
    """With `commit_when=`, what came before the line is a part of the stream, ended there or not."""
    pipeline = directory.pipeline()
    for number, script in enumerate((["", "", "a", "b"], ["", ""])):
        stream = pipeline.execute_stream(Sources(script), number, commit_when=bool)
        assert await drain(stream) == script
        replayed = pipeline.execute_stream(never, number, commit_when=bool)
        assert await drain(replayed) == script


@on_each_loop
async def test_a_context_manager_is_recorded_by_what_it_gives(directory: Directory) -> None:
    """Entered and left as ever; its exit comes before the recording."""
    manager = Managed(Sources([1, 2])())
    assert await drain(directory.pipeline().execute_stream(lambda: manager)) == [1, 2]
    assert (manager.entered, manager.left) == (1, 1)
    assert len(directory.contents) == 1


# ---- what is not recorded ---------------------------------------------------------------------


async def leave(pipeline: Any, source: Any) -> None:
    async with pipeline.execute_stream(source) as stream:
        await anext(stream)


async def read_all_chunks_and_not_the_end(pipeline: Any, source: Any) -> None:
    async with pipeline.execute_stream(source) as stream:
        for _ in range(2):
            await anext(stream)


async def never_pull(pipeline: Any, source: Any) -> None:
    async with pipeline.execute_stream(source):
        pass


async def drop(pipeline: Any, source: Any) -> None:
    stream = pipeline.execute_stream(source)
    await anext(stream)
    del stream
    gc.collect()
    await tick()


async def close_from_another_task(pipeline: Any, source: Any) -> None:
    stream = pipeline.execute_stream(source)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drain, stream)
        await tick()
        await stream.aclose()


async def cancel(pipeline: Any, source: Any) -> None:
    async def read() -> None:
        async with pipeline.execute_stream(source) as chunks:
            await drain(chunks)

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        running.cancel()


async def run_out_of_time(pipeline: Any, source: Any) -> None:
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(source, idle_timeout=5))


Way = Callable[[Any, Any], Awaitable[None]]


@on_each_loop
@pytest.mark.parametrize(
    ("way", "script"),
    [
        (leave, [1, 2]),
        (read_all_chunks_and_not_the_end, [1, 2]),
        (never_pull, [1, 2]),
        (drop, [1, 2]),
        (close_from_another_task, [1, HANG]),
        (cancel, [1, HANG]),
        (cancel, [HANG]),
        (run_out_of_time, [1, HANG]),
    ],
)
async def test_a_stream_left_early_is_not_recorded(
    directory: Directory, way: Way, script: list[Any]
) -> None:
    """Contract: left early, by whatever way, there is no recording; the next one is made."""
    pipeline = directory.pipeline(clock=VirtualClock(autojump=True), record_errors=True)
    await way(pipeline, Sources(script))
    assert directory.contents == []
    assert await drain(pipeline.execute_stream(Sources([3]))) == [3]
    assert directory.contents == [{"key": [], "chunks": [3]}]


@on_each_loop
async def test_held_chunks_that_nobody_read_make_no_recording(directory: Directory) -> None:
    """The source had ended, but its consumer left before."""
    pipeline = directory.pipeline()
    async with pipeline.execute_stream(Sources(["", ""]), commit_when=bool) as stream:
        await anext(stream)
    assert directory.contents == []


@on_each_loop
async def test_a_source_that_fails_to_close_makes_no_recording(directory: Directory) -> None:
    """What the consumer got was an error, and no end."""
    manager = Managed(Sources([1])(), raises=OSError("closing"))
    with pytest.raises(OSError, match="closing"):
        await drain(directory.pipeline().execute_stream(lambda: manager))
    assert directory.contents == []


# ---- errors -----------------------------------------------------------------------------------


@on_each_loop
@pytest.mark.parametrize("chunks", [[], [1, 2]], ids=["early", "late"])
async def test_an_error_is_recorded_only_by_flag_with_its_prefix(
    directory: Directory, chunks: list[int]
) -> None:
    """RR-5: prefix and error are replayed; without the flag nothing is kept."""
    sources = Sources([*chunks, ConnectionResetError(104, "reset")])
    for record_errors in (False, True):
        assert directory.contents == []
        got: list[Any] = []
        stream = directory.pipeline(record_errors=record_errors).execute_stream(sources)
        with pytest.raises(ConnectionResetError):
            await collect(stream, got)
        assert got == chunks
    assert directory.contents[0]["chunks"] == chunks
    replayed: list[Any] = []
    with pytest.raises(ConnectionResetError) as caught:
        await collect(directory.pipeline("replay").execute_stream(never), replayed)
    assert replayed == chunks
    assert caught.value.errno == 104


@on_each_loop
async def test_an_error_that_the_context_manager_swallows_is_an_end(directory: Directory) -> None:
    """What the consumer got is what is recorded."""
    manager = Managed(Sources([1, OSError()])(), swallows=True)
    pipeline = directory.pipeline(record_errors=True)
    assert await drain(pipeline.execute_stream(lambda: manager)) == [1]
    assert directory.contents == [{"key": [], "chunks": [1]}]


@on_each_loop
@pytest.mark.parametrize("script", [[(1,)], [1, (2,), 3]], ids=["first", "later"])
async def test_a_chunk_that_json_cannot_hold_is_refused(
    directory: Directory, script: list[Any]
) -> None:
    """`OptionsError` at the chunk, which the message shows; the source is closed, nothing kept."""
    sources = Sources(script)
    with pytest.raises(OptionsError, match=r"value is of type tuple.*the value is \(\d,\)"):
        await drain(directory.pipeline(record_errors=True).execute_stream(sources))
    assert (sources.calls, sources.open) == (1, 0)
    assert directory.contents == []


@on_each_loop
async def test_a_failed_write_warns_and_the_stream_ends_well(tmp_path: Path) -> None:
    """1.4, 1.10: a write failure after the last chunk does not surface as a stream error."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    pipeline = Directory(blocked).pipeline("record")
    with pytest.warns(RuntimeWarning, match="nothing was recorded"):
        assert await drain(pipeline.execute_stream(Sources([1, 2]))) == [1, 2]


@on_each_loop
async def test_a_broken_file_is_an_error(directory: Directory) -> None:
    """RR-7: chunks have to be a list, and what the error says has to exist."""
    await drain(directory.pipeline().execute_stream(Sources([1])))
    (file,) = directory.path.iterdir()
    file.write_text('{"key": [], "chunks": 1}')
    with pytest.raises(OptionsError, match='no list of "chunks"'):
        await drain(directory.pipeline("replay").execute_stream(never))


# ---- with other strategies --------------------------------------------------------------------


@on_each_loop
async def test_around_a_resuming_retry_the_whole_is_recorded(directory: Directory) -> None:
    """What the consumer read, over two sources, in one recording."""
    pipeline = (
        B()
        .add_record_replay(directory.path, mode="incremental", key=keyed)
        .add_retry(delay=0, resumable=True)
        .build()
    )
    sources = Sources([1, 2, OSError()], [1, 2, 3])
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert directory.contents == [{"key": [], "chunks": [1, 2, 3]}]
    assert sources.open == 0


@on_each_loop
async def test_inside_a_retry_each_attempt_is_replayed_for_itself(directory: Directory) -> None:
    """A recorded failure before the first chunk defeats the retry, as a cached one does."""
    pipeline = (
        B()
        .add_retry(delay=0, max_retry_attempts=2)
        .add_record_replay(directory.path, mode="incremental", key=keyed, record_errors=True)
        .build()
    )
    sources = Sources([OSError("first")], [1])
    with pytest.raises(OSError, match="first"):
        await drain(pipeline.execute_stream(sources))
    assert sources.calls == 1


@on_each_loop
async def test_a_replayed_stream_is_a_stream_like_any_other(directory: Directory) -> None:
    """It is closed, left early and bounded like one; another strategy may hold it."""
    await drain(directory.pipeline().execute_stream(Sources([1, 2, 3])))
    pipeline = (
        B()
        .add_concurrency_limiter(1, hold_streams=True)
        .add_record_replay(directory.path, key=keyed)
        .build()
    )
    for _ in range(2):
        async with pipeline.execute_stream(never) as stream:
            assert await anext(stream) == 1


@on_each_loop
async def test_a_lock_outside_is_given_back_after_a_recorded_stream(directory: Directory) -> None:
    """What is held for a source is released when the recording one has been closed."""
    pipeline = (
        B()
        .add_lock()
        .add_record_replay(directory.path, mode="incremental", key=keyed)
        .add_concurrency_limiter(1, hold_streams=True)
        .build()
    )
    for number in range(3):
        assert await drain(pipeline.execute_stream(Sources([1]), number)) == [1]
        async with pipeline.execute_stream(Sources([1, 2]), "early") as stream:
            await anext(stream)


@on_each_loop
async def test_a_source_is_closed_as_without_a_recording(directory: Directory) -> None:
    """The consumer's close reaches it once, also when it is no generator."""
    source = Closable(1, 2)
    async with directory.pipeline().execute_stream(lambda: source) as stream:
        await anext(stream)
    assert source.closed == 1


# ---- equal streams at once --------------------------------------------------------------------


@on_each_loop
async def test_equal_streams_at_once_make_one_run_and_one_file(directory: Directory) -> None:
    """Contract: concurrent equal misses make one call and one file; the others get it when it is there."""
    gate = anyio.Event()
    sources = Sources([1, gate, 2])
    pipeline = directory.pipeline()
    async with anyio.create_task_group() as tasks:
        readers = [spawn(tasks, drain, pipeline.execute_stream(sources, "a")) for _ in range(3)]
        other = spawn(tasks, drain, pipeline.execute_stream(Sources(["b"]), "b"))
        await tick()
        assert other.value == ["b"]
        gate.set()
    assert [reader.value for reader in readers] == [[1, 2]] * 3
    assert (sources.calls, len(directory.contents)) == (1, 2)


@on_each_loop
async def test_when_the_first_is_left_early_the_next_runs_it(directory: Directory) -> None:
    """There is nothing for the others then: one of them reads it."""
    sources = Sources([1, 2])
    pipeline = directory.pipeline()
    first = pipeline.execute_stream(sources)
    await anext(first)
    async with anyio.create_task_group() as tasks:
        readers = [spawn(tasks, drain, pipeline.execute_stream(sources)) for _ in range(2)]
        await tick()
        assert sources.calls == 1
        await first.aclose()
    assert [reader.value for reader in readers] == [[1, 2]] * 2
    assert sources.calls == 2


@on_each_loop
async def test_a_failure_in_the_middle_is_nothing_for_the_others(directory: Directory) -> None:
    """They would not get the chunks before it, so they run it themselves."""
    gate = anyio.Event()
    sources = Sources([1, gate, OSError()], [1, 2])
    pipeline = directory.pipeline()
    async with anyio.create_task_group() as tasks:
        first = spawn(tasks, drain, pipeline.execute_stream(sources))
        await tick()
        second = spawn(tasks, drain, pipeline.execute_stream(sources))
        await tick()
        gate.set()
    assert isinstance(first.error, OSError)
    assert second.value == [1, 2]


@on_each_loop
async def test_a_failure_before_the_first_chunk_is_everybodys(directory: Directory) -> None:
    """As with calls: one run, and an error for each."""
    gate = anyio.Event()
    sources = Sources([gate, ConnectionResetError(104, "reset")], [1])
    pipeline = directory.pipeline()
    async with anyio.create_task_group() as tasks:
        readers = [spawn(tasks, drain, pipeline.execute_stream(sources)) for _ in range(2)]
        await tick()
        gate.set()
    assert [type(reader.error) for reader in readers] == [ConnectionResetError] * 2
    assert readers[0].error is not readers[1].error
    assert sources.calls == 1


@on_each_loop
async def test_one_task_may_read_two_equal_streams_by_turns(directory: Directory) -> None:
    """It would wait for itself: the second is run, too."""
    sources = Sources([1, 2])
    pipeline = directory.pipeline()
    with anyio.fail_after(5):
        one, other = (pipeline.execute_stream(sources) for _ in range(2))
        assert [(chunk, await anext(other)) async for chunk in one] == [(1, 1), (2, 2)]
        assert await drain(other) == []
    assert sources.calls == 2
    assert directory.contents == [{"key": [], "chunks": [1, 2]}]


@on_each_loop
async def test_a_stream_dropped_while_others_wait_lets_them_go_on(directory: Directory) -> None:
    """Closed by Python's finaliser: the flight ends with it."""
    sources = Sources([1, 2])
    pipeline = directory.pipeline()
    streams = [pipeline.execute_stream(sources)]
    await anext(streams[0])
    async with anyio.create_task_group() as tasks:
        reader = spawn(tasks, drain, pipeline.execute_stream(sources))
        await tick()
        streams.clear()
        gc.collect()
    assert reader.value == [1, 2]
