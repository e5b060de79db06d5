"""Running a synchronous call in the thread that makes it.

Apart from the rest of what is done for threads, which most calls never need; see `_threads`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from .._errors import MisuseError
from ._base import Clock

T = TypeVar("T")


class Presence(Protocol):
    """What a clock that has to know of them is told of threads at work in synchronous calls."""

    def enter(self) -> None:
        """This one is at work."""

    def leave(self) -> None:
        """It is not any more."""

    def announce(self) -> None:
        """One more is going to be at work."""

    def adopt(self) -> None:
        """This is one that has been announced."""

    def withdraw(self) -> None:
        """One that has been announced won't be."""


def presence(clock: Clock | None) -> Presence | None:
    """Find what a clock wants to be told, if it is one that does."""
    return getattr(clock, "_threads_at_work", None)


def run(call: Awaitable[T]) -> T:
    """Run something that waits for nothing but this module's waits, in the calling thread.

    Raises:
        MisuseError: It waits for something of an event loop's.
    """
    steps: Any = call if hasattr(call, "send") else _awaiting(call)
    try:
        steps.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    steps.close()
    msg = (
        "something in a synchronous call waits for an event loop: use execute(), settle() or "
        "execute_stream() in one, or plain functions here"
    )
    raise MisuseError(msg)


async def _awaiting(call: Awaitable[T]) -> T:
    """Make a coroutine of an awaitable, which may wait with any iterator."""
    return await call


def run_here(call: Awaitable[T], clock: Clock | None) -> T:
    """Run a whole synchronous call, of which a clock may have to know."""
    at_work = presence(clock)
    if at_work is None:
        return run(call)
    at_work.enter()
    try:
        return run(call)
    finally:
        at_work.leave()
