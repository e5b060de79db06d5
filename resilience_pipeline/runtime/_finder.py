"""Which runtime a call gets: that of whatever runs it, looked for when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from sys import modules
from typing import Any, ClassVar, TypeAlias

from ._base import Clock, Runtime


class RuntimeFinder:
    """Finds the runtime of whatever event loop runs the calling task.

    Looks at what is running now, not at what is imported: asyncio and trio may take turns, run at
    once in several threads, or one inside the other (trio's guest mode).

    Args:
        clock: The clock that shall drive the runtimes, in place of the loop's own.

    Attributes:
        asyncio: The runtime of asyncio, once it has been found. Its `within` may be called without
            looking for it again: where no task of asyncio runs, it does that itself.
    """

    __slots__ = ("_clock", "_in_task", "_trio", "asyncio")

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self.asyncio: Runtime | None = None
        self._trio: Runtime | None = None
        self._in_task: Callable[[], bool]

    def find(self) -> Runtime:
        """Return the runtime of the event loop that runs the calling task.

        Raises:
            RuntimeError: No supported event loop runs in this thread.
        """
        # An event loop can only run if its library has been imported by whoever started it. So
        # which one runs, a question that costs as much as two bare calls, is only asked where there
        # are two.
        if self.asyncio is not None and ("trio" not in modules or self._in_task()):
            return self.asyncio
        return self.search()

    def search(self) -> Runtime:
        """Do the same without trusting in what was found before.

        Raises:
            RuntimeError: No supported event loop runs in this thread.
        """
        asyncio: Any = modules.get("asyncio")
        if asyncio is not None and _in_asyncio_task(asyncio):
            if self.asyncio is None:
                from ..telemetry._listeners import connect_log
                from ._asyncio import AsyncioRuntime, in_task

                connect_log()  # asyncio has imported `logging` by now

                self._in_task = in_task
                self.asyncio = AsyncioRuntime(self._clock, self.search)
            return self.asyncio
        trio: Any = modules.get("trio")
        if trio is not None and trio.lowlevel.in_trio_task():
            if self._trio is None:
                from ._anyio import AnyioRuntime

                self._trio = AnyioRuntime(self._clock)
            return self._trio
        msg = "no task of asyncio or trio runs here: pipelines are executed within an event loop"
        raise RuntimeError(msg)


class ThreadFinder:
    """Finds the runtime of synchronous calls, whatever else runs in the thread.

    Args:
        clock: The clock that shall drive it.
    """

    __slots__ = ("_clock", "_found")

    #: None of these calls runs in a task of asyncio.
    asyncio: ClassVar[None] = None

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._found: Runtime | None = None

    def find(self) -> Runtime:
        """Return the runtime."""
        if self._found is None:
            from ._threads import ThreadRuntime

            self._found = ThreadRuntime(self._clock)
        return self._found


#: What an execution finds its runtime with.
Finder: TypeAlias = RuntimeFinder | ThreadFinder

#: Those of all pipelines without a clock of their own.
finder, thread_finder = RuntimeFinder(), ThreadFinder()


def current_runtime(clock: Clock | None = None) -> Runtime:
    """Return the runtime of the event loop that runs the calling task.

    Args:
        clock: The clock that shall drive it, in place of the loop's own.

    Raises:
        RuntimeError: No supported event loop runs in this thread.
    """
    return RuntimeFinder(clock).find()


def _in_asyncio_task(asyncio: Any) -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:
        return False
