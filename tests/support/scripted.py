"""Callables that play a script, tasks that can be cancelled one by one, and bounded turns of the loop."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from resilience_pipeline.testing import VirtualClock


class Scripted:
    """A coroutine function that plays one item a call, the last one again and again.

    An exception (class or instance) is raised, anything else returned.
    """

    def __init__(self, *script: Any, clock: VirtualClock | None = None, takes: float = 0.0) -> None:
        self._script = script
        self._clock = clock
        self._takes = takes
        self.calls = 0
        self.starts: list[float] = []
        self.arguments: list[tuple[Any, ...]] = []

    async def __call__(self, *args: Any) -> Any:
        item = self._script[min(self.calls, len(self._script) - 1)]
        self.calls += 1
        self.arguments.append(args)
        if self._clock is not None:
            self.starts.append(self._clock.now())
            if self._takes:
                await self._clock.sleep(self._takes)
        if isinstance(item, BaseException) or (
            isinstance(item, type) and issubclass(item, BaseException)
        ):
            raise item
        return item


class Hanging:
    """A coroutine function that never returns; it counts how often it was called and cancelled."""

    def __init__(self) -> None:
        self.calls = 0
        self.cancelled = 0

    async def __call__(self) -> int:
        self.calls += 1
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        raise AssertionError("woken from for ever")


class Closable:
    """A result that notes its closing; `method` is the name it is closed by."""

    def __init__(self, method: str = "aclose") -> None:
        self.closed = 0
        setattr(self, method, self._aclose if method == "aclose" else self._close)

    async def _aclose(self) -> None:
        await checkpoint()
        self.closed += 1

    def _close(self) -> None:
        self.closed += 1


class Background:
    """A call in a task of its own, with a scope to cancel just that."""

    def __init__(self, call: Callable[[], Awaitable[Any]]) -> None:
        self._call = call
        self.scope = anyio.CancelScope()
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None

    async def run(self) -> None:
        with self.scope:
            try:
                self.value = await self._call()
            except BaseException as error:
                self.error = error
                if not isinstance(error, Exception):
                    raise
            finally:
                self.done = True

    def cancel(self) -> None:
        self.scope.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether the call has ended with a cancellation."""
        return self.done and isinstance(self.error, anyio.get_cancelled_exc_class())


def spawn(tasks: TaskGroup, call: Callable[..., Awaitable[Any]], *args: Any) -> Background:
    """Start `call(*args)` in the task group."""
    background = Background(partial(call, *args))
    tasks.start_soon(background.run)
    return background


async def tick(turns: int = 20) -> None:
    """Let every ready task run a number of turns; nothing here waits for time to pass."""
    for _ in range(turns):
        await checkpoint()


async def raised_by(call: Callable[..., Awaitable[Any]], *args: Any) -> Exception:
    """Give the exception that `call(*args)` raises."""
    try:
        value = await call(*args)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised; got {value!r}")


def traceback_length(error: BaseException) -> int:
    """Number of the entries of an exception's traceback."""
    return len(traceback.extract_tb(error.__traceback__))


def contexts_of(error: BaseException) -> list[BaseException]:
    """The chain of an exception's contexts, nearest first."""
    chain: list[BaseException] = []
    while error.__context__ is not None:
        error = error.__context__
        chain.append(error)
    return chain
