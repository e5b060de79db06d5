"""Sources that tests of streams read: what they do is a script, and they note what is done to them.

A script is a sequence of chunks. An exception in it is raised, an `anyio.Event` waited for, `HANG` waits for ever;
everything else is yielded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from resilience_pipeline import ResiliencePipelineBuilder, ResilienceStream

T = TypeVar("T")

B = ResiliencePipelineBuilder


class Hang:
    """In a script: wait for ever."""


HANG = Hang()

#: Where tests of streams run; see `tests/streams/conftest.py`.
MODES = ["asyncio", "asyncio+owner", "trio"]


async def tick(turns: int = 30) -> None:
    """Let every other task run as far as it gets without waiting for anything real."""
    for _ in range(turns):
        await checkpoint()


async def play(item: object) -> bool:
    """Do what an item of a script says; whether it is a chunk."""
    if isinstance(item, BaseException):
        raise item
    if isinstance(item, anyio.Event):
        await item.wait()
    elif isinstance(item, Hang):
        await anyio.sleep_forever()
    else:
        return True
    return False


class Sources:
    """A factory of async generators; its n-th call plays the n-th script, the last one from then on."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = scripts
        self.calls = 0
        self.opened = 0
        self.closed = 0
        self.peak = 0
        #: The tasks that opened, read or closed.
        self.tasks: set[int] = set()
        self.arguments: list[tuple[Any, ...]] = []

    @property
    def open(self) -> int:
        return self.opened - self.closed

    def next_script(self) -> list[Any]:
        script = self.scripts[min(self.calls, len(self.scripts) - 1)]
        self.calls += 1
        return script

    def note_task(self) -> None:
        self.tasks.add(anyio.get_current_task().id)

    def note_open(self) -> None:
        self.note_task()
        self.opened += 1
        self.peak = max(self.peak, self.open)

    def note_closed(self) -> None:
        self.note_task()
        self.closed += 1

    def __call__(self, *arguments: Any) -> AsyncGenerator[Any, None]:
        self.arguments.append(arguments)
        return self._stream(self.next_script())

    async def play(self, item: object) -> bool:
        return await play(item)

    async def _stream(self, script: list[Any]) -> AsyncGenerator[Any, None]:
        self.note_open()
        try:
            for item in script:
                if await self.play(item):
                    yield item
                    self.note_task()
        finally:
            self.note_closed()


class Closable:
    """A source that is no generator: its `aclose` and what that does can be replaced."""

    def __init__(
        self, *script: Any, closing: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._script = iter(script)
        self._closing = closing
        #: How often closing has begun, and ended as it should.
        self.closings = 0
        self.closed = 0

    def __aiter__(self) -> Closable:
        return self

    async def __anext__(self) -> Any:
        for item in self._script:
            if await play(item):
                return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self.closings += 1
        if self._closing is not None:
            await self._closing()
        self.closed += 1


class Managed:
    """An async context manager around a source; notes how it was left."""

    def __init__(
        self,
        value: Any,
        *,
        swallows: bool = False,
        raises: BaseException | None = None,
        leaving: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._value = value
        self._swallows = swallows
        self._raises = raises
        self._leaving = leaving
        self.entered = 0
        self.left = 0
        self.told: list[BaseException | None] = []

    async def __aenter__(self) -> Any:
        await checkpoint()
        self.entered += 1
        return self._value

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.told.append(error)
        if self._leaving is not None:
            await self._leaving()
        self.left += 1
        if self._raises is not None:
            raise self._raises
        return self._swallows


async def drain(stream: AsyncIterable[T]) -> list[T]:
    return [chunk async for chunk in stream]


async def drain_within(stream: ResilienceStream[T]) -> list[T]:
    """Read a stream to its end within `async with`."""
    async with stream:
        return [chunk async for chunk in stream]


async def collect(stream: AsyncIterable[T], into: list[T]) -> None:
    async for chunk in stream:
        into.append(chunk)


async def take_and_wait(stream: ResilienceStream[T], into: list[T]) -> None:
    """Read within `async with` for as long as chunks come."""
    async with stream:
        async for chunk in stream:
            into.append(chunk)


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group, or the error that is no group."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


class Running:
    """What runs in a task of its own, started with `tasks.start_soon(running, …)` or `in_task`."""

    def __init__(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> None:
        self._fn = fn
        self._args = args
        self.scope = anyio.CancelScope()
        self.task: asyncio.Task[Any] | None = None
        self.done = False
        self.cancelled = False
        self.value: Any = None
        self.error: BaseException | None = None
        #: On asyncio: cancellation requests that are left over in the end, those by `task.cancel()` included.
        self.cancelling = 0

    async def __call__(self) -> None:
        self.task = _asyncio_task()
        try:
            with self.scope:
                await self._run()
        finally:
            self.done = True
            if self.task is not None:
                self.cancelling = self.task.cancelling()

    async def _run(self) -> None:
        try:
            self.value = await self._fn(*self._args)
        except Exception as error:
            self.error = error
        except BaseException:
            self.cancelled = True
            raise

    def cancel(self, how: str = "scope") -> None:
        """Cancel by the enclosing scope, or on asyncio by `task.cancel()`."""
        if how == "scope":
            self.scope.cancel()
        else:
            assert self.task is not None
            self.task.cancel()


def _asyncio_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
