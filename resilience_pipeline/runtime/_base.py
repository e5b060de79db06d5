"""The seam between policy and mechanism: the `Runtime` protocol and the `Clock` protocol.

Strategies reach time, waiting and cancellation through `context.runtime` and nothing else, so one
copy of each serves every event loop, plain threads and virtual time. A runtime knows no strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
C = TypeVar("C")

#: Longer than this is "for ever": beyond it timers of some loops and platforms overflow.
FOREVER = 100 * 365 * 86_400.0


class TimerHandle(Protocol):
    """What `Clock.call_at` returns."""

    def cancel(self) -> object:
        """See to it that the callback is not called; harmless when it was or is cancelled."""


class Clock(Protocol):
    """A clock of the user's own, given to a builder as `clock=`.

    It drives every wait, time limit and window of the pipelines built with it. Times are seconds
    from an arbitrary start and never run backwards.
    """

    def now(self) -> float:
        """Return the time now."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait `seconds`; a checkpoint even when that is 0, for ever when it is `math.inf`."""

    def call_at(self, when: float, callback: Callable[[], object]) -> TimerHandle:
        """Call `callback` once it is `when` or later, from any thread, but not from inside this."""
        ...


class Waiter(ABC):
    """One task (or thread) waiting for one wake-up that may come from anywhere."""

    __slots__ = ()

    @abstractmethod
    def wake(self) -> bool:
        """Wake the waiting side, from any thread, loop or callback.

        Returns:
            False if it can't be reached any more because its loop has been closed.
        """

    @abstractmethod
    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until `wake` was called.

        Args:
            timeout: Seconds to wait at most; `None` or `math.inf` for no limit.

        Returns:
            Whether the wake-up came; False if the time ran out before.
        """

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the waiting side's loop still exists."""


class Interruption(ABC):
    """Lets somebody else end what one task is doing, without it counting as its cancellation."""

    __slots__ = ()

    @abstractmethod
    async def guard(self, call: Callable[[C], Awaitable[T]], argument: C) -> T:
        """Run `call(argument)`.

        Raises:
            DeadlineReached: `interrupt` is what ended it.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Cancel what the task is doing, from another task of the same loop."""

    @abstractmethod
    async def confirm(self, error: BaseException | None) -> bool:
        """Take the interruption back; whether `error`, raised outside of `guard`, is that alone."""

    @abstractmethod
    def is_mine(self) -> bool:
        """Whether it was made by the running task."""


class Child(ABC):
    """A task of the library's own, started by `Runtime.spawn`."""

    __slots__ = ()

    def needs_shield(self) -> bool:
        """Whether this task, calling, has been cancelled for good and a shield would nest.

        A shield that is a scope may not be put around the end of scopes that were opened before it.
        """
        return False

    @abstractmethod
    def cancel(self) -> None:
        """Cancel what the task is doing; from the task's own loop."""

    @abstractmethod
    def cancel_soon(self) -> None:
        """Cancel it from wherever one is, finalisers and other threads included."""


class Spawner(Protocol):
    """Starts tasks of an event loop from anywhere."""

    def __call__(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> bool:
        """Start `fn()` in a task of its own.

        Args:
            fn: What to run; it may not raise.
            ended: Called when the task has ended, also if it was cancelled before it began.

        Returns:
            Whether it could: an event loop that has been closed starts nothing any more.
        """
        ...


class Runtime(ABC):
    """Mechanism: everything that waits, cancels or reads a clock.

    Attributes:
        clock: The user's own clock, or `None`.
        abandons: Whether what runs here can't be stopped, but only be given up on.
        owns_sources: Whether a time limit is a scope here, so that a stream's source has to live in
            a task of its own: a scope may not end before those that were opened inside it.
    """

    __slots__ = ("clock",)

    abandons = False
    owns_sources = False

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    @abstractmethod
    def now(self) -> float:
        """Return monotonic seconds, comparable between all runtimes with the same clock."""

    @abstractmethod
    def sleep(self, seconds: float) -> Awaitable[None]:
        """Wait. Always a checkpoint, also for 0; `math.inf` waits until cancelled.

        Within `testing.instant` a wait that has an end is a checkpoint alone.
        """

    def checkpoints(self) -> Callable[[], Awaitable[None]]:
        """Give what makes a checkpoint each time it is called; for those who make many."""
        return partial(self.sleep, 0)

    @abstractmethod
    async def within(
        self,
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
        expired: Callable[[C, BaseException | None], Awaitable[T]] | None = None,
        late: Callable[[T], Awaitable[object]] | None = None,
    ) -> T:
        """Run `call(argument)` and cancel it once it has taken `seconds`.

        A value or another error that comes out anyway is kept, and a cancellation by the caller
        stays one, even if both happen.

        Args:
            seconds: The limit, above zero and finite.
            call: What to run.
            argument: What to give it.
            expired: What to run in the end if the limit passed and that is what ended the call; it
                is given the argument and, where there is one, the cancellation that came out.
            late: Called with a result that comes after the limit, where what runs is not stopped
                but left alone.

        Raises:
            DeadlineReached: That is what ended the call, and `expired` was not given.
        """

    @abstractmethod
    async def shielded(self, fn: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        """Run `fn()` in this very task, holding the caller's cancellation back meanwhile.

        A cancellation that was held back comes out afterwards. After `timeout` seconds what runs is
        cancelled once and nothing is held back any more; `math.inf` for no such limit.
        """

    @abstractmethod
    def is_cancellation(self, error: BaseException) -> bool:
        """Whether `error` is how a cancellation of the task it was raised in shows."""

    def is_cancelled(self) -> bool:
        """Whether somebody wants the calling task cancelled; true where that can't be told."""
        return True

    def carried(self, error: BaseException) -> BaseException:
        """Give what another task is to raise for an error that ended one."""
        return error

    @abstractmethod
    def place(self) -> tuple[int, object]:
        """Tell where the caller runs: the thread's identity, and its event loop or `None`.

        What is done by another loop of the same thread can't be waited for.
        """

    @abstractmethod
    def waiter(self) -> Waiter:
        """Make a waiter for the calling task."""

    @abstractmethod
    def interruption(self) -> Interruption:
        """Make an interruption of what the calling task does next."""

    @abstractmethod
    def spawn(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> Child:
        """Start `fn()` in a task of its own that needs no task group of the user's.

        Args:
            fn: What to run; it may not raise. It gets a copy of the current context variables.
            ended: Called when the task has ended, also if it was cancelled before it began.
        """

    @abstractmethod
    def first_steps(self) -> Awaitable[None]:
        """Let every task spawned so far run until it waits for something, or ends."""

    @abstractmethod
    def spawner(self) -> Spawner:
        """Make a function that starts a task in this event loop from anywhere, finalisers included."""
