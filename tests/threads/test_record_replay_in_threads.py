"""Record and replay in threads: the same recordings, and one call for equal ones of all loops and threads."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from resilience_pipeline import (
    RecordingNotFoundError,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
)
from resilience_pipeline.strategies._record_replay import (
    _BoundRecordReplay,  # pyright: ignore[reportPrivateUsage]
)
from support.beside import LIMIT, Beside, Gate, HandClock, let_go, see, until

B = ResiliencePipelineBuilder


@pytest.fixture
def _restless() -> Iterator[None]:
    """Have threads take turns after a few instructions: what can come between two steps does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def contents(directory: Path) -> list[Any]:
    return [json.loads(file.read_text("utf-8")) for file in sorted(directory.iterdir())]


def key(event: Any) -> Any:
    return list(event.args)


def test_what_a_loop_has_recorded_a_thread_replays_and_the_other_way_round(tmp_path: Path) -> None:
    """One format for all: a value, and a stream."""

    async def fetch(number: int) -> list[int]:
        return [number]

    async def count(number: int) -> Any:
        for each in range(number):
            yield each

    def never(*_: object) -> Any:
        raise AssertionError("called")

    pipeline = B().add_record_replay(tmp_path, mode="incremental", key=key).build()

    async def in_a_loop() -> Any:
        return await pipeline.execute(fetch, 1), [
            chunk async for chunk in pipeline.execute_stream(count, 3)
        ]

    recorded = asyncio.run(in_a_loop())
    assert pipeline.execute_sync(never, 1) == [1]
    assert list(pipeline.execute_stream_sync(never, 3)) == [0, 1, 2]
    pipeline.execute_sync(lambda _: [2], 2)
    assert list(pipeline.execute_stream_sync(lambda n: iter(range(n)), 2)) == [0, 1]

    async def again() -> Any:
        return await pipeline.execute(never, 2), [
            chunk async for chunk in pipeline.execute_stream(never, 2)
        ]

    assert recorded == ([1], [0, 1, 2])
    assert trio.run(again) == ([2], [0, 1])
    with pytest.raises(RecordingNotFoundError):
        B().add_record_replay(tmp_path).build().execute_sync(never, 3)


@pytest.mark.usefixtures("_restless")
def test_equal_misses_of_threads_and_loops_make_one_call_and_one_file(tmp_path: Path) -> None:
    """Contract: equal concurrent misses make one call and one file, whoever they are."""
    pipeline = B().add_record_replay(tmp_path, mode="incremental", key=key).build()
    calls: list[int] = []
    start = threading.Barrier(4)

    def call(number: int) -> int:
        calls.append(number)
        return number

    async def coroutine(number: int) -> int:
        await asyncio.sleep(0)
        return call(number)

    async def trio_coroutine(number: int) -> int:
        await trio.lowlevel.checkpoint()
        return call(number)

    numbers = range(50)

    def in_a_thread() -> list[int]:
        start.wait()
        return [pipeline.execute_sync(call, number) for number in numbers]

    def in_asyncio() -> Any:
        async def main() -> Any:
            return await asyncio.gather(*(pipeline.execute(coroutine, n) for n in numbers))

        start.wait()
        return asyncio.run(main())

    def in_trio() -> Any:
        async def main() -> Any:
            return [await pipeline.execute(trio_coroutine, number) for number in numbers]

        start.wait()
        return trio.run(main)

    results = [Beside(body) for body in (in_a_thread, in_a_thread, in_asyncio, in_trio)]
    assert [each.result() for each in results] == [list(numbers)] * 4
    assert sorted(calls) == list(numbers)
    assert sorted(each["value"] for each in contents(tmp_path)) == list(numbers)


@pytest.mark.usefixtures("_restless")
def test_many_threads_that_begin_to_record_remove_old_recordings_once(tmp_path: Path) -> None:
    """The first call of all starts afresh: nothing that another one has recorded since is lost."""
    old = B().add_record_replay(tmp_path, mode="incremental", key=key).build()
    for number in range(20):
        old.execute_sync(lambda n: -n, number)
    pipeline = B().add_record_replay(tmp_path, mode="record", key=key).build()
    start = threading.Barrier(8)

    def body(first: int) -> None:
        start.wait()
        for number in range(first, 40, 8):
            pipeline.execute_sync(lambda n: n, number)

    for each in [Beside(body, first) for first in range(8)]:
        each.result()
    assert sorted(each["value"] for each in contents(tmp_path)) == list(range(40))


def test_a_call_that_timed_out_inside_is_a_failure_and_what_it_brings_later_is_not_recorded(
    tmp_path: Path,
) -> None:
    """The call has ended for its caller; nobody knows what would have come of it."""
    clock = HandClock()
    gate = Gate(clock=clock)
    pipeline = (
        B(clock=clock)
        .add_record_replay(tmp_path, mode="incremental", key=key)
        .add_timeout(LIMIT)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    let_go(gate)
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_was_given_up_on_while_it_waits_for_an_equal_one_is_let_go(
    tmp_path: Path,
) -> None:
    """timeout(record): its wait ends, the one that is under way is not touched."""
    clock = HandClock()
    recording = B(clock=clock).add_record_replay(tmp_path, mode="incremental", key=key).build()
    pipeline = B(clock=clock).add_timeout(LIMIT).add_pipeline(recording).build()
    gate = Gate(result=1)
    first = Beside(recording.execute_sync, gate)
    see(gate.entered)
    bound: _BoundRecordReplay = recording._head.__self__  # type: ignore[attr-defined]

    def expire_when_it_waits() -> None:
        (flight,) = bound._flights._flights.values()
        until(lambda: flight.is_awaited)
        clock.expire()

    beside = Beside(expire_when_it_waits)
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    beside.result()
    let_go(gate)
    assert first.result() == 1
    assert gate.calls == 1
    assert recording.execute_sync(gate) == 1


def test_a_stream_of_synchronous_code_is_recorded_when_it_was_read(tmp_path: Path) -> None:
    """Streams record their chunks and their end; left early there is no recording."""
    pipeline = B().add_record_replay(tmp_path, mode="incremental", key=key).build()
    closed: list[str] = []

    def source() -> Iterator[int]:
        try:
            yield from (1, 2)
        finally:
            closed.append("closed")

    with pipeline.execute_stream_sync(source) as stream:
        assert next(stream) == 1
    assert (closed, list(tmp_path.iterdir())) == (["closed"], [])
    assert list(pipeline.execute_stream_sync(source)) == [1, 2]
    assert contents(tmp_path) == [{"key": [], "chunks": [1, 2]}]
    assert list(pipeline.execute_stream_sync(source)) == [1, 2]
    assert len(closed) == 2
