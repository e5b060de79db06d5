"""Look at a coroutine from outside: where it suspends, and when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterator
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Driven(Generic[T]):
    """Runs a coroutine in the task that awaits this, and tells of each of its suspensions.

    Args:
        coroutine: What to run.
        suspended: Called with what is being waited for, before the event loop gets to see it.
        resumed: Called before the coroutine goes on.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, T],
        suspended: Callable[[Any], None],
        resumed: Callable[[], None],
    ) -> None:
        self.coroutine = coroutine
        self._suspended = suspended
        self._resumed = resumed

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[Any], Any] = self.coroutine.send
        value: Any = None
        while True:
            try:
                request = step(value)
            except StopIteration as stop:
                result: T = stop.value
                return result
            self._suspended(request)
            try:
                value = yield request
                step = self.coroutine.send
            except BaseException as error:
                value, step = error, self.coroutine.throw
            self._resumed()


def frames(coroutine: Any) -> Iterator[FrameType]:
    """The frames of a suspended coroutine and of what it awaits, outermost first."""
    inner = coroutine
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None)
        if frame is not None:
            yield frame
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
