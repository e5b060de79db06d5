"""Attempts side by side: each in a task of its own, one of which will do.

Mechanism of hedging, without its rules: who enters, who has come in, and that in the end nobody is
left running. What is raised in an attempt stays with its entrant, so no group of errors ever comes
about, and nothing is printed of those that nobody asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .._context import ResilienceContext, enter
from .._locks import Lock
from .._outcome import Failure, Rejected, Success
from ._base import Handler, Site

if TYPE_CHECKING:
    from ..runtime import Child, Runtime, Waiter


class Entrant:
    """One attempt of a race.

    Attributes:
        number: Its number, from 0; `context` is its own.
        began: When it was launched; `ended`, when it came in.
        delay: Seconds between the launch before and this one.
        is_in: Whether it has come to its end; `result` and `error` tell how.
        abandoned: Whether it was left alone, in a thread that can't be stopped.
        judged: Whether somebody has looked at how it ended; `outcome` is for whoever that was.
        was_told: Whether listeners know of it.
        handled: Whether it was judged, and is not to win.
    """

    __slots__ = (
        "abandoned",
        "began",
        "child",
        "context",
        "delay",
        "ended",
        "error",
        "handled",
        "is_in",
        "judged",
        "number",
        "outcome",
        "result",
        "was_told",
    )

    def __init__(self, number: int, context: ResilienceContext, began: float, delay: float) -> None:
        self.number = number
        self.context = context
        self.began = self.ended = began
        self.delay = delay
        self.child: Child | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.outcome: Success[Any] | Rejected[Any] | Failure | None = None
        self.is_in = False
        self.abandoned = False
        self.judged = self.handled = self.was_told = False


class Race:
    """The attempts of one execution, in the order of their launch."""

    __slots__ = ("_lock", "_next", "_now", "_runtime", "_site", "_waiter", "entrants")

    def __init__(
        self,
        runtime: Runtime,
        next: Handler,  # noqa: A002
        site: Site,
    ) -> None:
        self._runtime = runtime
        self._next = next
        self._now = runtime.now
        self._site = site
        #: Who has come in, and who was left alone: in threads both may happen at once.
        self._lock = Lock()
        self._waiter: Waiter | None = None
        self.entrants: list[Entrant] = []

    # ---- entering

    def launch(self, context: ResilienceContext) -> None:
        """Start an attempt in a task of its own."""
        entrant = self._entrant(context)

        def gone() -> None:
            # Whoever has come in has told so; told twice, the next wait would be cut short.
            if not entrant.is_in:
                entrant.error = RuntimeError("an attempt's task was cancelled before it began")
                entrant.is_in = True
                self._wake()

        entrant.child = self._runtime.spawn(lambda: self._run(entrant), gone)

    def fail(self, context: ResilienceContext, error: Exception) -> None:
        """Enter an attempt that has failed before it could be started."""
        entrant = self._entrant(context)
        entrant.error = error
        entrant.is_in = True

    def _entrant(self, context: ResilienceContext) -> Entrant:
        now = self._now()
        delay = now - self.entrants[-1].began if self.entrants else 0.0
        entrant = Entrant(len(self.entrants), context, now, delay)
        self.entrants.append(entrant)
        return entrant

    async def _run(self, entrant: Entrant) -> None:
        enter(entrant.context)  # for this task alone, so that nothing is to be taken back
        discard = self._site.discarder(entrant.context) if self._runtime.abandons else None
        try:
            entrant.result = await self._next(entrant.context)
        except BaseException as error:  # noqa: BLE001 - whoever decides the race raises it, or nobody
            entrant.error = self._runtime.carried(error)
        ended = self._now()
        with self._lock:
            entrant.is_in = True
            abandoned = entrant.abandoned
            if not abandoned:
                entrant.ended = ended
        if abandoned:
            result, entrant.result, entrant.error = entrant.result, None, None
            if result is not None and discard is not None:
                await self._runtime.shielded(partial(discard, result), math.inf)
        else:
            self._wake()

    # ---- watching

    @property
    def is_running(self) -> bool:
        """Whether anybody is still on the way."""
        return not all(entrant.is_in for entrant in self.entrants)

    def unjudged(self) -> Entrant | None:
        """The first, by number, of those who have come in and were not looked at."""
        for entrant in self.entrants:
            if entrant.is_in and not entrant.judged:
                return entrant
        return None

    async def wait(self, seconds: float = math.inf) -> bool:
        """Wait until somebody comes in, for so long at most; whether somebody has."""
        until = self._now() + seconds
        while self.unjudged() is None:
            # Woken for nothing new it waits on for what is left.
            if not await self._wait(lambda: self.unjudged() is not None, until - self._now()):
                return self.unjudged() is not None
        return True

    async def _wait(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Wait for a change, for so long at most; whether there was one."""
        self._waiter = self._runtime.waiter()
        try:
            # Looked at after the waiter is there, or a wake-up from elsewhere would be lost.
            return is_over() or await self._waiter.wait(seconds)
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            waiter.wake()

    # ---- the end

    async def call_off(self) -> None:
        """Cancel everybody who is on the way, once, and wait until they have gone.

        Out of reach of the caller's cancellation, which comes out afterwards. In threads, which
        can't be stopped, they are left alone instead, and close themselves what they bring.
        """
        now = self._now()
        with self._lock:
            running = [entrant for entrant in self.entrants if not entrant.is_in]
            for entrant in running:
                entrant.abandoned, entrant.ended = self._runtime.abandons, now
        for entrant in running:
            if entrant.child is not None:  # or it was interrupted where it was started
                entrant.child.cancel()
        if running and not self._runtime.abandons:
            await self._runtime.shielded(self._all_in, math.inf)

    async def _all_in(self) -> None:
        while self.is_running:
            await self._wait(lambda: not self.is_running, math.inf)

    def raise_interrupt(self) -> None:
        """Let out what is no `Exception` and no cancellation, and what nobody has looked at."""
        for entrant in self.entrants:
            if entrant.judged or isinstance(entrant.error, Exception | None):
                continue
            entrant.judged = True
            if not self._runtime.is_cancellation(entrant.error):
                raise entrant.error

    def abandon(self) -> None:
        """Cancel everybody where nothing can be awaited any more."""
        for entrant in self.entrants:
            if not entrant.is_in and entrant.child is not None:
                entrant.child.cancel_soon()
