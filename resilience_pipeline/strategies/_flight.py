"""Single flight: calls that are equal and come at once are made once, and all wait for that one.

A strategy other than the cache can use it as it is, see `Flights.call`. Who does the work, and what
callers in other event loops and threads see of it, is in `_shared_work`.

Interleavings that were thought through, beside those there:

1. It ends in the moment in which a caller is cancelled: the caller leaves, the result is there for
   the others.
2. It ends, and before anybody has taken what it brought all are cancelled: unless that is kept, the
   last of them closes it.
3. The last caller leaves, and what is cancelled brings a result all the same: nobody takes it, and it
   is closed; the caller has waited for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from .._context import ResilienceContext
from ._shared_error import SharedError
from ._shared_work import InFlight, SharedWork, may_wait_for, waits_no_more_for

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ._base import Handler

#: Closes a result that nobody will receive; see `Site.discard`.
Discard: TypeAlias = Callable[[ResilienceContext, Any], Coroutine[Any, Any, None]]


class Flight(SharedWork):
    """A call, and all who wait for what it gives.

    Attributes:
        result: What it gave.
        error: What it raised, if that is an `Exception`.
    """

    __slots__ = ("_is_claimed", "_passengers", "error", "result")

    def __init__(self, table: InFlight[Any], key: Hashable, context: ResilienceContext) -> None:
        super().__init__(table, key, context)
        self._passengers = {context}
        self.result: Any = None
        self.error: SharedError | None = None
        #: Whether somebody has the result, or it is kept.
        self._is_claimed = False

    def join(self, context: ResilienceContext) -> None:
        """Be one more who waits; under the lock."""
        self._passengers.add(context)

    async def ride(
        self,
        context: ResilienceContext,
        call: Handler,
        discard: Discard,
    ) -> bool:
        """Wait for its end, and if one is the first start it.

        Args:
            context: That of the caller, who has boarded.
            call: What to call with the flight's context.
            discard: Closes a result that nobody waits for any more.

        Returns:
            Whether there is something to `take`; if not, one has to board again.
        """
        runtime = context.runtime
        is_starter = context is self._starter
        try:
            if is_starter:
                await self._start(runtime, context, call, discard)
            await self.wait(runtime)
        except GeneratorExit:  # nothing may be awaited any more
            if self._leave(context):
                self.call_off(soon=True)
            raise
        except BaseException:
            await self._depart(runtime, context, discard)
            raise
        finally:
            waits_no_more_for(self)
            if is_starter:
                self.account_for(context, is_good=self.is_over)
            else:
                context._invocations += self.context._invocations
        if not self.is_lost:
            return True
        error = self.take_interrupt(is_starter=is_starter)
        self._leave(context)
        try:
            if error is not None:
                raise error
        finally:
            del error
        return False

    async def _depart(self, runtime: Runtime, context: ResilienceContext, discard: Discard) -> None:
        """Leave before one has got anything; see to it that nothing is left behind."""
        if self._leave(context):
            self.call_off(soon=self.is_elsewhere(runtime))
            if not runtime.abandons:
                await runtime.shielded(partial(self.wait, runtime), math.inf)
        elif (result := self._unclaimed()) is not None:
            await runtime.shielded(partial(discard, context, result), math.inf)

    def take(self, context: ResilienceContext) -> Any:
        """Give the result, or raise the error: for each caller one of its own."""
        try:
            if self.error is None:
                self._is_claimed = True
                return self.result
            raise self.error.take(context.execution)
        finally:
            self._leave(context)

    def _leave(self, context: ResilienceContext) -> bool:
        """Leave, once; whether one is the last to leave what is still in flight."""
        with self._table.lock:
            if context not in self._passengers:
                return False
            self._passengers.remove(context)
            if context is self._starter:
                self._starter = None
            if self._passengers:
                return False
            if self.is_over:
                # An error's traceback leads to frames that lead here.
                self.error = None
                if self._is_claimed:
                    self.result = None
                return False
            self._table.remove(self)
            return True

    def _unclaimed(self) -> Any:
        """Give the result to the one who is to close it, if nobody has taken it or will."""
        with self._table.lock:
            if self._passengers or self._is_claimed:
                return None
            result, self.result = self.result, None
            return result

    # ---- in its task

    async def _start(
        self,
        runtime: Runtime,
        context: ResilienceContext,
        call: Handler,
        discard: Discard,
    ) -> None:
        step = partial(self._run, runtime, call, discard)
        if self._is_sync:
            await self.do_here(step, partial(self._starter_left, context))
            return

        async def fly() -> None:
            self.enter()
            await step()

        self._spawn(runtime, fly)

    def _starter_left(self, context: ResilienceContext) -> None:
        if self._leave(context):
            self.call_off(soon=True)

    async def _run(
        self,
        runtime: Runtime,
        call: Handler,
        discard: Discard,
    ) -> None:
        try:
            result = await call(self.context)
        except GeneratorExit:  # the loop is gone
            self.lose(None)
            raise
        except Exception as error:  # noqa: BLE001 - each caller raises it
            self._land(None, SharedError(error, self.context.execution))
        except BaseException as error:  # noqa: BLE001 - it is raised by one caller, or by nobody
            self.lose(error, runtime)
        else:
            if not self._land(result, None):
                try:
                    # Who left last waits for this too.
                    with suppress(Exception):  # nobody is left to hear of it
                        await runtime.shielded(partial(discard, self.context, result), math.inf)
                finally:
                    self.lose(None)
        finally:
            self.context.end()

    def _land(self, result: Any, error: SharedError | None) -> bool:
        """Come to its end; false if nobody is left to take what it brings, nor will ever be."""
        with self._table.lock:
            if error is None and not self._passengers:
                return False
            if self._passengers:
                self.result, self.error = result, error
            self._is_claimed = self._end()
        self.wake_all()
        return True


class Flights(InFlight[Flight]):
    """Calls in flight, by key."""

    __slots__ = ()

    def board(self, key: Hashable, context: ResilienceContext) -> Flight | None:
        """Join the call in flight, or begin one, under the lock; `None` if it can't be waited for."""
        flight = self.find(key)
        if flight is None:
            flight = Flight(self, key, context)
            self.add(flight)
            may_wait_for(flight)
            return flight
        if not flight.is_within_reach(context.runtime.place()) or not may_wait_for(flight):
            return None
        flight.join(context)
        return flight

    async def call(
        self,
        key: Hashable,
        context: ResilienceContext,
        call: Handler,
        discard: Discard,
    ) -> Any:
        """Call, or wait for the call in flight that has the same key.

        Args:
            key: What makes two calls equal.
            context: The execution's context.
            call: What to call; it gets a context of its own, a copy of that of the first caller.
            discard: Closes a result that comes when nobody waits for it any more; see
                `Site.discard`.

        Returns:
            What the call gave: the same object for every caller. What it raised is a copy for all
            but one.
        """
        while True:
            with self.lock:
                flight = self.board(key, context)
            if flight is None:
                return await call(context)
            if await flight.ride(context, call, discard):
                return flight.take(context)
