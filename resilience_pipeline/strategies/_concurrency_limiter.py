"""Concurrency limiter: at most so many calls inside at once.

Interleavings that were thought through:

1. A release finds somebody waiting: the permit goes to the head of the queue under the lock, then
   the head is woken. A newcomer in between finds no free permit and a queue, and joins it.
2. The head is cancelled, or its time runs out, after it was handed the permit and before it runs:
   `leave` tells, and the permit is used (time ran out: the grant wins) or passed on (cancelled).
3. The head's event loop has been closed: waking it fails, and the permit goes to the next one.
4. It is closed after the head was woken and before that ran: the next one who finds no free permit
   takes it back.
5. Permits are put down and, while nobody waits, taken up without the lock, in one step each. Another
   thread may join the queue at any moment, so both sides look once more: who has put a permit down,
   for somebody waiting; who has joined, for a permit. Nobody overtakes: who sees somebody waiting
   leaves a permit alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from attrs import field, frozen

from .._cancellation import Orphans
from .._context import ResilienceContext
from .._errors import ConcurrencyLimiterRejectedError
from .._locks import Lock
from .._options import (
    boolean,
    checked,
    count,
    function,
    positive_duration,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site, Strategy, announce
from ._keyed import keyed
from ._waiters import WaiterQueue


class ConcurrencyLimiterRejectedEvent(StrategyEvent):
    """What a concurrency limiter's `on_rejected` is given.

    Attributes:
        context: The execution's context.
    """

    #: Of both limiters, which are one in Polly.
    name = "OnRateLimiterRejected"
    severity: Severity = Severity.ERROR
    context: ResilienceContext


@checked
@frozen(repr=False)
class ConcurrencyLimiter(Strategy[ConcurrencyLimiterRejectedError]):
    """Let at most `permit_limit` calls be inside at once.

    Further calls wait in a queue, first come first served, or are refused. A stream holds its
    permit until its first chunk, or to its end and close. The limit holds for all event loops
    together that use the pipeline.

    Args:
        permit_limit: Calls inside at once, at least 1.
        queue_limit: Calls that may wait, at least 0; `math.inf` never refuses.
        max_wait: Longest time in the queue in seconds (any duration form); `None` for no limit.
        key: Function of the context that gives a key (a host, a tenant): each has permits and a
            queue of its own. `None`: all calls share them.
        max_keys: Keys that are kept, at least 1; keys with permits or waiters may be more.
        key_idle: Seconds (any duration form) after which a key that nobody used is let go.
        hold_streams: Whether a stream keeps its permit until it has been closed, which its end does
            too.
        on_rejected: Hook called with a `ConcurrencyLimiterRejectedEvent` before the error is
            raised.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    permit_limit: int = field(metadata=count(minimum=1))
    queue_limit: float = field(default=0, metadata=count(minimum=0, infinite=True))
    max_wait: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    key: Callable[[ResilienceContext], Any] | None = field(
        default=None, kw_only=True, metadata=function("a function of the context")
    )
    max_keys: int = field(default=1024, kw_only=True, metadata=count(minimum=1))
    key_idle: float = field(
        default=600.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    hold_streams: bool = field(default=False, kw_only=True, metadata=boolean())
    on_rejected: Callable[[ConcurrencyLimiterRejectedEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with permits of its own."""

        def make(_: object = None) -> tuple[_BoundConcurrencyLimiter, Handler]:
            bound = _BoundConcurrencyLimiter(self, next, site)
            return bound, bound.handle_holding if self.hold_streams else bound.handle

        return make()[1] if self.key is None else keyed(self, site, make).handle


class _BoundConcurrencyLimiter:
    __slots__ = ("_free", "_lock", "_next", "_options", "_queue", "_site", "_unused", "_waiting")

    def __init__(self, options: ConcurrencyLimiter, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._lock = Lock()
        # Permits that have been given back, and how many were never taken so far.
        self._free: deque[Literal[True]] = deque()
        self._unused = options.permit_limit
        self._queue: WaiterQueue[Any] = WaiterQueue()
        self._waiting = self._queue.waiting

    def is_idle(self, now: float) -> bool:  # noqa: ARG002 - the protocol's
        """Whether all permits are free and nobody waits or was granted one."""
        with self._lock:
            return self.free == self._options.permit_limit and self._queue.is_empty

    @property
    def free(self) -> int:
        """How many permits nobody has."""
        return len(self._free) + self._unused

    def health(self) -> dict[str, Any]:
        with self._lock:
            free, queued, unused = self.free, len(self._queue), self._queue.is_empty
        permits = self._options.permit_limit
        return {
            "permits": permits,
            "free": free,
            "queued": queued,
            "idle": free == permits and unused,
        }

    async def handle(self, context: ResilienceContext) -> Any:
        # Without the lock, see 5 above: twice through it would cost three bare calls.
        try:
            admitted = not self._waiting and self._free.pop()
        except IndexError:
            admitted = False
        if not admitted:
            await self._wait(context)
        around = context._sync
        if around is not None:
            return await self._run_in_thread(context, around)
        inside = self._next  # called as a method it would cost an eighth of a bare call more
        try:
            return await inside(context)
        finally:
            self._free.append(True)
            if self._waiting:
                self._pass_on()

    async def _run_in_thread(self, context: ResilienceContext, around: Orphans) -> Any:
        """Run the inside; the permit is held by what this call leaves behind, not by what others did."""
        context._sync = inside = Orphans(around)
        try:
            return await self._next(context)
        finally:
            context._sync = around
            inside.when_gone(self._release)

    async def handle_holding(self, context: ResilienceContext) -> Any:
        """Do the same, but leave the permit of a stream to whoever closes that."""
        stream = context._stream
        if stream is None:
            return await self.handle(context)
        await self._wait(context)
        held = False
        around = context._sync
        inside = None if around is None else Orphans(around)
        context._sync = inside
        try:
            # What a strategy inside gave in place of a source is one from here on.
            result = await stream.adopted(context, await self._next(context))
            held = stream.hold(result, self._release)
            return result
        finally:
            context._sync = around
            if not held:
                if inside is None:
                    self._release()
                else:
                    inside.when_gone(self._release)

    async def _wait(self, context: ResilienceContext) -> None:
        """Get a permit in turn, by waiting for it if need be, or raise."""
        with self._lock:
            if self._take():
                return
        waiter = context.runtime.waiter()
        self._recover()
        with self._lock:
            admitted, queued = self._admit_or_join(waiter)
        if admitted:
            return
        if not queued:
            limits = f"{self._options.permit_limit} calls are inside"
            waiting = f" and {self._options.queue_limit} wait" if self._options.queue_limit else ""
            await self._refuse(context, limits + waiting)
        if self._free:
            self._pass_on()
        try:
            await waiter.wait(self._options.max_wait)
        except BaseException:
            with self._lock:
                granted = self._queue.leave(waiter)
            if granted:
                self._release()
            raise
        with self._lock:
            granted = self._queue.leave(waiter)
        if not granted:
            await self._refuse(
                context, f"no permit was free within max_wait={self._options.max_wait:g} s"
            )

    def _admit_or_join(self, waiter: Any) -> tuple[bool, bool]:
        """Take a permit that has become free meanwhile, or a place in the queue, or neither."""
        if self._take():
            return True, False
        if len(self._queue) >= self._options.queue_limit:
            self._queue.drop_dead()
        if len(self._queue) >= self._options.queue_limit:
            return False, False
        self._queue.join(waiter)
        return False, True

    def _release(self) -> None:
        """Hand the permit to the first who waits and can be reached, or set it free."""
        while True:
            with self._lock:
                waiter = self._queue.grant()
                if waiter is None:
                    self._free.append(True)
                    return
            if waiter.wake():
                return
            with self._lock:
                if not self._queue.leave(waiter):
                    return  # taken back by somebody else, who has passed it on

    def _take(self) -> bool:
        """Take a permit, under the lock, if nobody waits for one."""
        if self._waiting:
            return False
        if self._unused > 0:
            self._unused -= 1
            return True
        try:
            self._free.pop()
        except IndexError:
            return False
        return True

    def _pass_on(self) -> None:
        """Hand permits that lie free to those who wait."""
        while self._waiting:
            with self._lock:
                try:
                    self._free.pop()
                except IndexError:
                    return
            self._release()

    def _recover(self) -> None:
        """Pass on permits that were handed to somebody whose event loop has been closed since."""
        while True:
            with self._lock:
                if not self._queue.take_back():
                    return
            self._release()

    async def _refuse(self, context: ResilienceContext, reason: str) -> None:
        error = self._site.reject(ConcurrencyLimiterRejectedError, context, reason)
        try:
            on_rejected = self._options.on_rejected
            if on_rejected is not None or self._site.wants(ConcurrencyLimiterRejectedEvent):
                event = ConcurrencyLimiterRejectedEvent(context=context)
                await announce(self._site, event, on_rejected, "on_rejected", error)
            raise error
        finally:
            del error
