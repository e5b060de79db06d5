"""Fallbacks: values and streams in place of what failed before its first chunk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from resilience_pipeline import CircuitBreakerControl, TimeoutRejectedError
from resilience_pipeline.testing import VirtualClock
from support.streaming import HANG, B, Closable, Managed, Running, Sources, collect, drain, tick

pytestmark = pytest.mark.anyio


def failing() -> Sources:
    return Sources([OSError("primary")])


@pytest.mark.parametrize("value", ["spare", None, 0, "", [1, 2], {}], ids=repr)
async def test_a_value_becomes_one_chunk(value: Any) -> None:
    """B-7: a fallback value is exactly one chunk, `None` and a list included."""
    pipeline = B().add_fallback(fallback_value=value).build()
    assert await drain(pipeline.execute_stream(failing())) == [value]


async def test_an_actions_value_becomes_one_chunk() -> None:
    """B-7: so is what a coroutine action returns."""

    async def action(_: object) -> str:
        return "spare"

    pipeline = B().add_fallback(action).build()
    assert await drain(pipeline.execute_stream(failing())) == ["spare"]


async def test_a_stream_is_iterated() -> None:
    """B-7, case FB-05: the failed source is closed before the substitute is iterated."""
    primary = failing()
    closed_before: list[int] = []

    async def backup() -> AsyncIterator[str]:
        closed_before.append(primary.closed)
        yield "x"
        yield "y"

    pipeline = B().add_fallback(lambda _: backup()).build()
    assert await drain(pipeline.execute_stream(primary)) == ["x", "y"]
    assert closed_before == [1]


async def test_a_source_that_opens_and_then_fails_is_replaced() -> None:
    """Case FB-05: "until the first chunk" includes the first read."""
    first = failing()

    async def connect() -> Any:
        await anyio.lowlevel.checkpoint()
        return first()

    pipeline = B().add_fallback(lambda _: Sources(["backup"])()).build()
    assert await drain(pipeline.execute_stream(connect)) == ["backup"]
    assert first.closed == 1


async def test_an_async_iterable_value_is_iterated() -> None:
    """Streams, in small print: the value may be an async iterable."""
    pipeline = B().add_fallback(fallback_value=Closable(1, 2)).build()
    assert await drain(pipeline.execute_stream(failing())) == [1, 2]


async def test_a_context_manager_is_entered_and_left() -> None:
    """Streams, in small print: the action may return a context manager."""
    manager = Managed(Sources([1, 2])())
    pipeline = B().add_fallback(lambda _: manager).build()
    async with pipeline.execute_stream(failing()) as stream:
        assert await anext(stream) == 1
        assert (manager.entered, manager.left) == (1, 0)
    assert manager.left == 1


async def test_a_contextlib_manager_from_a_coroutine_action_is_entered_and_left() -> None:
    """Streams, in small print: the action may return a context manager."""
    log: list[str] = []

    @asynccontextmanager
    async def connection() -> AsyncIterator[AsyncIterator[int]]:
        log.append("enter")
        yield Sources([1])()
        log.append("exit")

    async def action(_: object) -> Any:
        return connection()

    pipeline = B().add_fallback(action).build()
    assert await drain(pipeline.execute_stream(failing())) == [1]
    assert log == ["enter", "exit"]


async def test_an_empty_fallback_stream_is_a_success() -> None:
    """Streams: a source that ends without a chunk is a successful, empty stream."""
    pipeline = B().add_fallback(lambda _: Sources([])()).build()
    assert await drain(pipeline.execute_stream(failing())) == []


async def test_a_fallback_stream_is_closed_when_left() -> None:
    """FB-5: the active one is closed on break."""
    backup = Sources([1, 2])
    pipeline = B().add_fallback(lambda _: backup()).build()
    async with pipeline.execute_stream(failing()) as stream:
        async for _ in stream:
            break
    assert backup.closed == 1


async def test_chained_fallbacks_are_each_called_once() -> None:
    """FB-5: chained fallbacks: the last that fails hands on to the one around it."""
    middle, last = Sources([OSError("middle")]), Sources([1, 2])
    pipeline = B().add_fallback(lambda _: last()).add_fallback(lambda _: middle()).build()
    async with pipeline.execute_stream(failing()) as stream:
        assert await anext(stream) == 1
        assert (middle.calls, middle.closed) == (1, 1)
    assert (last.calls, last.closed) == (1, 1)


async def test_nothing_is_replaced_after_the_first_chunk() -> None:
    """FB-4: fails after items: the primary's error, prefix kept, fallback not called."""
    called: list[object] = []
    pipeline = B().add_fallback(called.append).build()
    got: list[str] = []
    with pytest.raises(OSError, match="late"):
        await collect(pipeline.execute_stream(Sources(["a", OSError("late")])), got)
    assert (got, called) == (["a"], [])


async def test_a_cancellation_calls_no_fallback() -> None:
    """FB-2: cancellation: the fallback is not called."""
    called: list[object] = []
    pipeline = B().add_fallback(called.append).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(Sources([HANG])))
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled
    assert called == []


async def test_a_fallback_stream_is_guarded_like_any_other() -> None:
    """Streams: failing before its first chunk, it is the outcome, with the primary's as context."""
    backup = Sources([ValueError("backup")])
    pipeline = B().add_fallback(lambda _: backup()).build()
    with pytest.raises(ValueError, match="backup") as caught:
        await drain(pipeline.execute_stream(failing()))
    assert backup.closed == 1
    assert str(caught.value.__context__) == "primary"


async def test_what_is_outside_of_a_fallback_sees_its_streams_failure() -> None:
    """Streams: a fallback's stream that fails is the outcome that a retry outside retries."""
    backup = Sources([ValueError("backup")], ["second time"])
    primary = failing()
    pipeline = B().add_retry(delay=0).add_fallback(lambda _: backup()).build()
    assert await drain(pipeline.execute_stream(primary)) == ["second time"]
    assert (primary.calls, backup.calls) == (2, 2)


async def test_a_time_out_outside_covers_a_fallbacks_first_chunk() -> None:
    """Streams: primed like any other, so the limit around it reaches its first chunk."""
    clock = VirtualClock(autojump=True)
    backup = Sources([HANG])
    pipeline = B(clock=clock).add_timeout(5).add_fallback(lambda _: backup()).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(failing()))
    assert backup.closed == 1


async def test_a_fallback_replaces_a_first_chunk_time_out() -> None:
    """Streams: timeout: time to first chunk; slow is a rejection, which a fallback handles."""
    clock = VirtualClock(autojump=True)
    slow = Sources([HANG])
    pipeline = B(clock=clock).add_fallback(fallback_value="spare").add_timeout(5).build()
    assert await drain(pipeline.execute_stream(slow)) == ["spare"]
    assert slow.closed == 1


async def test_a_fallbacks_error_after_its_first_chunk_reaches_the_loop() -> None:
    """Streams: after commit, errors pass as they are."""
    backup = Sources([1, ValueError("late")])
    pipeline = B().add_retry(delay=0).add_fallback(lambda _: backup()).build()
    got: list[int] = []
    with pytest.raises(ValueError, match="late"):
        await collect(pipeline.execute_stream(failing()), got)
    assert (got, backup.calls) == ([1], 1)


async def test_a_backup_pipeline_takes_over() -> None:
    """B-14: the primary's circuit is open: the consumer sees only the backup's chunks."""
    control = CircuitBreakerControl()
    control.isolate()
    backup = Sources([1, 2])
    spare = B(name="backup").add_retry(delay=0).build()
    pipeline = (
        B()
        .add_fallback(lambda _: spare.execute_stream(backup))
        .add_circuit_breaker(control=control)
        .build()
    )
    primary = Sources(["primary"])
    assert await drain(pipeline.execute_stream(primary)) == [1, 2]
    assert (primary.calls, backup.calls, backup.closed) == (0, 1, 1)


async def test_a_backup_pipeline_is_not_opened_after_a_chunk() -> None:
    """B-14: the primary fails after a chunk: the backup is never opened."""
    backup = Sources([1, 2])
    spare = B().build()
    pipeline = B().add_fallback(lambda _: spare.execute_stream(backup)).build()
    with pytest.raises(OSError, match="late"):
        await drain(pipeline.execute_stream(Sources(["a", OSError("late")])))
    assert backup.calls == 0


async def test_a_class_as_value_is_a_chunk() -> None:
    """A class whose instances could be iterated is itself no stream."""
    pipeline = B().add_fallback(fallback_value=Closable).build()
    assert await drain(pipeline.execute_stream(failing())) == [Closable]
