"""Threads that wait on a virtual clock: who is at work, and who waits.

A clock that jumps has to know when everybody waits. Of threads it knows those that are in a
synchronous call, or work for one; whoever waits says so, and whoever wakes another says it for that
one, so that nobody seems to wait who is about to run.
"""

from __future__ import annotations

import threading
from time import sleep
from typing import TYPE_CHECKING, Final

from resilience_pipeline.runtime._threads import Signal

from ._loops import current_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._clock import Timeline, TimerHandle, VirtualClock
    from ._loops import Host, Loop

_RECHECK: Final = 0.001  # seconds of real time until whoever moves the clock looks again


class ThreadsAtWork:
    """How many threads are in synchronous calls on one clock and do not wait.

    Attributes:
        suspended: Event loops in one of whose tasks such a call was made: nothing moves there until
            it returns.
        waiting: How many threads in such calls wait.
    """

    __slots__ = ("_here", "_timeline", "count", "suspended", "waiting")

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._here = threading.local()
        self.count = self.waiting = 0
        self.suspended: set[Loop] = set()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is one of them."""
        return self._calls_here() > 0

    def _calls_here(self) -> int:
        calls: int = getattr(self._here, "calls", 0)
        return calls

    def enter(self) -> None:
        """Count this thread, once however many calls it is in."""
        if not self.is_here:
            self._suspend(current_host())
            self.announce()
        self.adopt()

    def leave(self) -> None:
        """Take that back; the last one lets those who wait go on."""
        self._here.calls -= 1
        if not self.is_here:
            self._resume()
            self.withdraw()

    def _suspend(self, host: Host | None) -> None:
        if host is not None:
            self._here.loop = host.loop
            with self._timeline.lock:
                self.suspended.add(host.loop)

    def _resume(self) -> None:
        loop: Loop | None = getattr(self._here, "loop", None)
        if loop is not None:
            self._here.loop = None
            with self._timeline.lock:
                self.suspended.discard(loop)

    def announce(self) -> None:
        """Count a thread that is going to begin."""
        with self._timeline.lock:
            self.count += 1

    def adopt(self) -> None:
        """Be a thread that has been announced."""
        self._here.calls = self._calls_here() + 1

    def withdraw(self) -> None:
        """Take back an announcement, or count a thread no more."""
        with self._timeline.lock:
            self.count -= 1
        self._timeline.jump_from_thread()


class ThreadSignal(Signal):
    """What a thread waits for on a virtual clock."""

    __slots__ = ("_is_blocked", "_is_released", "_timeline")

    def __init__(self, clock: VirtualClock, timeline: Timeline) -> None:
        super().__init__(clock)
        self._timeline = timeline
        self._is_blocked = self._is_released = False

    def _release(self) -> None:
        with self._timeline.lock:
            if self._is_released:
                return
            self._is_released = True
            if self._is_blocked:
                self._timeline.threads.count += 1
                self._timeline.threads.waiting -= 1
        self._lock.release()

    def _block(self) -> None:
        timeline = self._timeline
        with timeline.lock:
            if timeline.threads.is_here and not self._is_released:
                self._is_blocked = True
                timeline.threads.count -= 1
                timeline.threads.waiting += 1
        timeline.jump_from_thread()
        try:
            self._lock.acquire()
        except BaseException:  # a KeyboardInterrupt
            self._release()
            raise


class ThreadHost:
    """A thread that uses a virtual clock by itself; methods as in `AsyncioHost`."""

    __slots__ = ("_clock", "_timeline")

    def __init__(self, clock: VirtualClock, timeline: Timeline) -> None:
        self._clock = clock
        self._timeline = timeline

    async def checkpoint(self) -> None:
        """Do nothing: threads need no turn."""

    async def wait_until(self, register: Callable[[Callable[[], object]], TimerHandle]) -> None:
        """Register a timer and wait until it has called what it was given."""
        signal = ThreadSignal(self._clock, self._timeline)
        timer = register(signal.set)
        try:
            signal.wait(None)
        finally:
            timer.cancel()

    async def wait_all_blocked(self) -> None:
        """Wait until every thread in a synchronous call waits, or has left it."""
        mine = self._timeline.threads.is_here
        while self._timeline.threads.count > mine:
            sleep(_RECHECK)  # noqa: ASYNC251 - there is no event loop here

    def run_due(self, timeline: Timeline, due: Iterable[TimerHandle]) -> None:
        """Run timers that fell due, in order."""
        for timer in due:
            timeline.run(timer)
