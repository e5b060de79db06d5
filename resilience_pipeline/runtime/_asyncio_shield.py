"""asyncio: run something in the very task one is in, out of reach of that task's cancellation.

A second task, as `asyncio.shield` takes one, won't do to close a source: what holds a cancel scope
or a task group open has to be closed in the task that opened it. So the task runs the closing
itself, but waits for stand-ins: futures that are done when what the closing waits for is, and that
hold back a request to cancel the task.

Whose request is it? The closing may cancel its own task: time limits, task groups and anyio's
scopes do. `Task.cancel` reaches the stand-in within the call of whoever asks, and context variables
tell who that is: what the closing starts carries its mark.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, CancelledError, Future, Task, current_task
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import partial
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: Turns of the loop in which the inside of a shield only spins until it is taken to wait for the
#: cancellation that is held back: anyio's checkpoints do so in a cancelled scope.
_SPINS = 100

_shields: ContextVar[tuple[Shield, ...]] = ContextVar("resilience_pipeline.shields", default=())


def is_shielded() -> bool:
    """Whether the calling task's cancellation is being held back."""
    return any(shield.is_up() for shield in _shields.get())


class Shield:
    """Keeps one piece of a task's work from the task's cancellation, until it is lowered."""

    __slots__ = ("_held", "_inner", "_late", "_loop", "_lowered", "_self_asked", "_spins", "_task")

    def __init__(self, loop: AbstractEventLoop, task: Task[Any]) -> None:
        self._loop = loop
        self._task: Any = task
        #: What the inside waits for.
        self._inner: Future[Any] = loop.create_future()
        #: The arguments of a cancellation from outside.
        self._held: tuple[Any, ...] | None = None
        self._lowered = False
        self._late = False
        self._self_asked = False
        self._spins = 0

    async def run(self, fn: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `fn()`; the caller's cancellation is held back for `raise_held`."""
        around = _shields.get()
        _shields.set((*around, self))
        try:
            result: T = await self._drive(fn())
        finally:
            self._lowered = True
            _shields.set(around)
        return result

    def is_up(self) -> bool:
        """Whether the calling task is the one shielded, and still is."""
        return not self._lowered and current_task(self._loop) is self._task

    def expire(self) -> None:
        """Cancel the inside once, and hold nothing back any more."""
        self._lowered = True
        if not self._inner.cancel():
            self._late = True

    def raise_held(self) -> None:
        """Raise the cancellation that was held back, unless whoever asked for it took it back."""
        if self._held is not None and self._task.cancelling():
            raise CancelledError(*self._held)

    def cancel(self, message: Any) -> bool:
        """Be told that somebody cancels the task; whether that has been seen to."""
        if current_task(self._loop) is self._task:  # asked for while the task ran, told now
            from_inside = self._self_asked
        else:
            from_inside = self in _shields.get()
        if not from_inside:
            self._held = () if message is None else (message,)
            if not self._lowered:
                return True
        return self._inner.cancel(message)

    @coroutine
    def _drive(self, inside: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        outstanding = self._task._must_cancel  # from before, and so from outside
        resume: Any = partial(inside.send, None)
        try:
            while True:
                try:
                    request = resume()
                except StopIteration as stop:
                    return stop.value
                self._self_asked = self._task._must_cancel and not outstanding
                outstanding = False
                try:
                    yield from self._wait_for(request)
                except GeneratorExit:
                    inside.close()
                    raise
                except BaseException as error:  # noqa: BLE001 - passed on
                    resume = partial(inside.throw, error)
                else:
                    resume = partial(inside.send, None)
        finally:
            resume = None  # or an error, its traceback and this frame would hold one another

    def _wait_for(self, request: Any) -> Generator[Any, Any, None]:
        if request is None:  # a turn of the loop
            self._spins += self._held is not None
            if self._spins > _SPINS and not self._lowered:
                self._lowered = True
                raise CancelledError(*(self._held or ()))
            request = self._loop.create_future()
            self._loop.call_soon(_set_done, request)
        elif getattr(request, "_asyncio_future_blocking", None) is not True:
            yield request  # nothing a task can wait for: have it say so
            return
        else:
            self._spins = 0
            request._asyncio_future_blocking = False
        self._inner = request
        stand_in = _StandIn(self, self._loop)
        request.add_done_callback(stand_in.finish)
        yield from stand_in
        if self._late:
            self._late = False
            raise CancelledError
        request.result()


class _StandIn(Future[None]):
    """What a shielded task waits for."""

    def __init__(self, shield: Shield, loop: AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._shield = shield

    def cancel(self, msg: Any = None) -> bool:
        return self._shield.cancel(msg)

    def finish(self, _: Future[Any]) -> None:
        _set_done(self)


def _set_done(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)
