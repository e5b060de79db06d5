"""Context managers as sources: what they are told, and what becomes of what they answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from support.streaming import (
    HANG,
    B,
    Managed,
    Running,
    Sources,
    collect,
    drain,
    take_and_wait,
    tick,
)

pytestmark = pytest.mark.anyio


class ServiceError(Exception):
    """What a client makes of the errors of its transport."""


async def test_a_manager_is_told_the_error_before_the_first_chunk() -> None:
    """Case ST-17: `__aexit__` saw the failure."""
    error = OSError("early")
    manager = Managed(Sources([error])())
    with pytest.raises(OSError, match="early"):
        await drain(B().build().execute_stream(lambda: manager))
    assert manager.told == [error]


async def test_a_manager_is_told_the_error_after_the_first_chunk() -> None:
    """Streams, in small print: a source's context manager gets the error in `__aexit__`."""
    error = OSError("late")
    manager = Managed(Sources([1, error])())
    with pytest.raises(OSError, match="late"):
        await drain(B().build().execute_stream(lambda: manager))
    assert manager.told == [error]


@pytest.mark.parametrize("chunks", [1, 3], ids=["left early", "read to the end"])
async def test_a_manager_is_told_nothing_when_nothing_failed(chunks: int) -> None:
    """Streams: it is left as its own block would be: by a break, or at the end."""
    manager = Managed(Sources([1, 2])())
    async with B().build().execute_stream(lambda: manager) as stream:
        for _ in range(chunks):
            await anext(stream, None)
    assert manager.told == [None]


async def test_a_manager_is_not_told_the_consumers_error() -> None:
    """Streams: an exception in the consumer's loop body is not a failure of the source."""
    manager = Managed(Sources([1, 2])())

    async def read() -> None:
        async with B().build().execute_stream(lambda: manager) as stream:
            async for _ in stream:
                raise KeyError

    with pytest.raises(KeyError):
        await read()
    assert manager.told == [None]


async def test_a_manager_is_told_of_a_cancelled_pull() -> None:
    """Streams: cancelling the consumer closes the source; its manager sees a cancellation."""
    manager = Managed(Sources([1, HANG])())
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, B().build().execute_stream(lambda: manager), [])
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert len(manager.told) == 1
    assert isinstance(manager.told[0], anyio.get_cancelled_exc_class())


# ---- swallowing -------------------------------------------------------------------------------


async def test_what_a_manager_suppresses_before_the_first_chunk_is_a_failed_attempt() -> None:
    """Streams, in small print: what it suppresses before commit is still a failed attempt."""
    managers = [
        Managed(Sources([OSError("early")])(), swallows=True),
        Managed(Sources(["ok"])(), swallows=True),
    ]
    made = iter(managers)
    pipeline = B().add_retry(delay=0).build()
    assert await drain(pipeline.execute_stream(lambda: next(made))) == ["ok"]
    assert [each.left for each in managers] == [1, 1]


async def test_what_a_manager_suppresses_before_the_first_chunk_comes_out() -> None:
    """Streams, in small print: a failed attempt with nobody to handle it is the caller's error."""
    error = OSError("early")
    manager = Managed(Sources([error])(), swallows=True)
    with pytest.raises(OSError, match="early") as caught:
        await drain(B().build().execute_stream(lambda: manager))
    assert caught.value is error


async def test_what_a_manager_suppresses_after_the_first_chunk_ends_the_stream() -> None:
    """Streams: after commit, hands off: an error that its own manager suppresses is an end."""
    manager = Managed(Sources([1, OSError("late"), 2])(), swallows=True)
    stream = B().add_retry(delay=0).build().execute_stream(lambda: manager)
    assert await drain(stream) == [1]
    assert manager.left == 1


async def test_a_manager_that_suppresses_everything_does_not_suppress_a_cancellation() -> None:
    """Design: cancellation passes through everything; a caller's cancel always comes out as one."""
    manager = Managed(Sources([1, HANG])(), swallows=True)
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, B().build().execute_stream(lambda: manager), [])
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled


# ---- translating ------------------------------------------------------------------------------


def translating(*script: Any) -> Any:
    @asynccontextmanager
    async def connection() -> AsyncIterator[AsyncIterator[Any]]:
        try:
            yield Sources(list(script))()
        except OSError as error:
            raise ServiceError("translated") from error

    return connection()


async def test_a_manager_may_translate_an_error_before_the_first_chunk() -> None:
    """Streams: the attempt's outcome is what its context manager makes of it, `raise … from`."""
    with pytest.raises(ServiceError, match="translated") as caught:
        await drain(B().build().execute_stream(translating, OSError("early")))
    assert str(caught.value.__cause__) == "early"


async def test_strategies_see_the_translated_error() -> None:
    """Streams: a predicate is asked about the error as the client raises it."""
    made = iter([translating(OSError("early")), translating("ok")])
    pipeline = B().add_retry(delay=0, should_handle=ServiceError).build()
    assert await drain(pipeline.execute_stream(lambda: next(made))) == ["ok"]


async def test_a_manager_may_translate_an_error_after_the_first_chunk() -> None:
    """Streams: so does the consumer's loop."""
    got: list[int] = []
    with pytest.raises(ServiceError, match="translated"):
        await collect(B().build().execute_stream(translating, 1, OSError("late")), got)
    assert got == [1]


async def test_a_contextlib_manager_that_lets_the_error_pass_changes_nothing() -> None:
    """Streams: errors pass as they are, by identity and without notes."""
    error = OSError("late")

    @asynccontextmanager
    async def connection() -> AsyncIterator[AsyncIterator[Any]]:
        try:
            yield Sources([1, error])()
        finally:
            await tick(2)

    with pytest.raises(OSError, match="late") as caught:
        await drain(B().build().execute_stream(connection))
    assert caught.value is error
    assert not hasattr(error, "__notes__")


@pytest.mark.parametrize("chunks", [[], ["a"]], ids=["first", "later"])
async def test_a_managers_own_time_limit_comes_out_as_it_makes_it(chunks: list[str]) -> None:
    """The cancellation is its scope's, taken back at its exit: what comes out is the error made of it."""
    sources = Sources([*chunks, HANG])

    @asynccontextmanager
    async def limited() -> AsyncIterator[AsyncIterator[Any]]:
        with anyio.CancelScope() as scope:
            limit.append(scope)
            yield sources()
        if scope.cancelled_caught:
            raise TimeoutError

    limit: list[anyio.CancelScope] = []
    got: list[Any] = []
    async with anyio.create_task_group() as tasks:
        running = Running(collect, B().build().execute_stream(limited), got)
        tasks.start_soon(running)
        await tick()
        limit[0].cancel()
    assert (type(running.error), got, running.cancelling) == (TimeoutError, chunks, 0)
    assert sources.open == 0


async def test_a_manager_that_fails_when_its_caller_is_cancelled_does_not_hide_the_cancellation() -> (
    None
):
    """Case ST-03: whatever its exit makes of it, a cancel that nobody took back comes out."""
    manager = Managed(Sources([HANG])(), raises=TimeoutError("mine"))
    async with anyio.create_task_group() as tasks:
        running = Running(drain, B().build().execute_stream(lambda: manager))
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled
