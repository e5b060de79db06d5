"""Everything a virtual clock needs of the event loop it is used in: one host class a library.

A host lives for one call of the clock. Neither asyncio nor trio is imported before somebody else
has done so. What looks after an `autojump` clock lives in the loop's own queue (asyncio) or its
system nursery (trio), and the clock holds neither: a loop that is over is never kept.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    import asyncio

    from trio.lowlevel import TrioToken

    from ._clock import Party, Timeline, TimerHandle

    Loop: TypeAlias = asyncio.AbstractEventLoop | TrioToken

_logger = logging.getLogger("resilience_pipeline.testing")

_RECHECK: Final = 0.001  # seconds of real time until an idle loop looks at the busy ones again
_BLIND_TURNS: Final = 100  # on a loop that doesn't show its ready queue (uvloop)


class AsyncioHost:
    """The asyncio loop that runs in this thread."""

    __slots__ = ("loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    async def checkpoint(self) -> None:
        """Let other tasks run once."""
        import asyncio

        await asyncio.sleep(0)

    async def wait_until(self, register: Callable[[Callable[[], object]], TimerHandle]) -> None:
        """Register a timer and wait until it has called what it was given, in any thread."""
        loop = self.loop
        woken = loop.create_future()

        def wake() -> None:
            if _running_loop() is loop:
                _resolve(woken)
            else:
                with suppress(RuntimeError):  # closed: nobody is left to be woken
                    loop.call_soon_threadsafe(_resolve, woken)

        timer = register(wake)
        try:
            await woken
        finally:
            timer.cancel()

    async def wait_all_blocked(self) -> None:
        """Wait until every other task waits too."""
        blocked = self.loop.create_future()
        look = _WhenBlocked(self.loop, lambda: _resolve(blocked))
        try:
            await blocked
        finally:
            look.cancel()

    def run_soon(self, run: Callable[[], object]) -> bool:
        """Have a function called in the loop's next turn; False: there won't be one."""
        self.loop.call_soon(run)
        return True

    def run_due(self, timeline: Timeline, due: Iterable[TimerHandle]) -> None:
        """Run timers that fell due, in order."""
        # From the loop, not from the task that advances: a callback that cancels just that task
        # finds it waiting, so that the cancellation arrives there and nowhere later.
        for timer in due:
            self.loop.call_soon(timeline.run, timer, self.loop)

    def watch(self, timeline: Timeline, party: Party) -> bool:
        """Jump whenever everybody waits, until the party has ended; False: too late for that."""

        def look() -> None:
            self.run_due(timeline, timeline.jump(self.loop, party))
            if party.idle:
                self.loop.call_later(_RECHECK, start)
            elif not party.ended:
                start()
            elif timeline.threads.waiting:
                timeline.jump_from_thread()

        def start() -> None:
            party.stirred = False
            _WhenBlocked(self.loop, look)

        start()
        return True


class _WhenBlocked:
    """Calls a function once an asyncio loop has nothing left to run.

    That is so when its ready queue was empty in two consecutive turns: between them the loop polls
    for what arrived from outside. Several of these in one loop disregard each other's turns in the
    queue; they would wait for each other for ever.
    """

    __slots__ = ("_handle", "_loop", "_quiet", "_then")

    def __init__(self, loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
        self._loop = loop
        self._then = then
        self._quiet = 0
        self._handle = loop.call_soon(self._turn)

    def cancel(self) -> None:
        self._handle.cancel()

    def _turn(self) -> None:
        self._quiet = self._quiet + 1 if self._nothing_ready() else 0
        if self._quiet >= (2 if hasattr(self._loop, "_ready") else _BLIND_TURNS):
            self._then()
        else:
            self._handle = self._loop.call_soon(self._turn)

    def _nothing_ready(self) -> bool:
        ready: Iterable[object] = getattr(self._loop, "_ready", ())
        with suppress(RuntimeError):  # another thread adds to it meanwhile: something is ready
            return all(self._is_turn(handle) for handle in tuple(ready))
        return False

    @classmethod
    def _is_turn(cls, handle: object) -> bool:
        callback = getattr(handle, "_callback", None)
        if getattr(callback, "__func__", None) is cls._turn:
            return True
        # anyio asks a task that holds its cancellation back again in every turn.
        return getattr(callback, "__qualname__", "") == "CancelScope._deliver_cancellation"


class TrioHost:
    """The trio run of this thread; methods as in `AsyncioHost`."""

    __slots__ = ("loop",)

    def __init__(self, token: TrioToken) -> None:
        self.loop = token

    async def checkpoint(self) -> None:
        import trio

        await trio.lowlevel.checkpoint()

    async def wait_until(self, register: Callable[[Callable[[], object]], TimerHandle]) -> None:
        import trio

        token = self.loop
        woken = trio.Event()

        def wake() -> None:
            if trio.lowlevel.in_trio_task() and trio.lowlevel.current_trio_token() is token:
                woken.set()
            else:
                with suppress(trio.RunFinishedError):  # nobody is left to be woken
                    token.run_sync_soon(woken.set)

        timer = register(wake)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    async def wait_all_blocked(self) -> None:
        from trio.testing import wait_all_tasks_blocked

        await wait_all_tasks_blocked()

    def run_soon(self, run: Callable[[], object]) -> bool:
        import trio

        try:
            self.loop.run_sync_soon(_run_logged, run)
        except trio.RunFinishedError:
            return False
        return True

    def run_due(self, timeline: Timeline, due: Iterable[TimerHandle]) -> None:
        for timer in due:
            _run_logged(partial(timeline.run, timer))

    def watch(self, timeline: Timeline, party: Party) -> bool:
        import trio

        async def look() -> None:
            try:
                while not party.ended:
                    party.stirred = False
                    await self.wait_all_blocked()
                    self.run_due(timeline, timeline.jump(self.loop, party))
                    if party.idle:
                        await trio.sleep(_RECHECK)
            finally:
                timeline.leave(self.loop, party)
                if timeline.threads.waiting:
                    _run_logged(timeline.jump_from_thread)

        try:
            trio.lowlevel.spawn_system_task(look, name=repr(timeline))
        except RuntimeError:  # the run is over but for its last cleanups
            return False
        return True


Host: TypeAlias = AsyncioHost | TrioHost


def current_host() -> Host | None:
    """Find the loop this is called in, if any."""
    loop = None
    if "asyncio" in sys.modules:
        import asyncio

        loop = _running_loop()
        if loop is not None and asyncio.current_task(loop) is not None:
            return AsyncioHost(loop)
    if "trio" in sys.modules:  # which may itself run inside asyncio's callbacks, as a guest
        import trio

        if trio.lowlevel.in_trio_task():
            return TrioHost(trio.lowlevel.current_trio_token())
    return None if loop is None else AsyncioHost(loop)


def is_running(loop: Loop) -> bool:
    """Say whether a loop is at work; one of trio's always is while anybody can ask."""
    ask: Callable[[], bool] | None = getattr(loop, "is_running", None)
    return ask is None or ask()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    from asyncio import events

    # Not `get_running_loop`: every sleeper asks, and to catch its error costs four times as much.
    return events._get_running_loop()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _run_logged(run: Callable[[], object]) -> None:
    """Call a function on trio, which has no exception handler: an error would end the whole run."""
    try:
        run()
    except Exception:
        _logger.exception("Exception in a callback of a VirtualClock")
