"""Rate limiter: at most so many calls in so much time.

The head of the queue waits for its permit by itself, the others wait to become the head: no
background task, and one timer however long the queue. Whoever leaves, for whatever reason, wakes
the next head in the same turn.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import field, frozen

from .. import _instant
from .._context import ResilienceContext, refuse_awaitable
from .._errors import MisuseError, RateLimiterRejectedError
from .._locks import Lock
from .._options import (
    REFERENCE,
    checked,
    count,
    function,
    is_number,
    positive_duration,
    positive_number,
    rule,
    shown,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site, Strategy, announce
from ._buckets import FixedWindowState, SlidingWindowState, TokenBucketState
from ._keyed import keyed
from ._waiters import WaiterQueue

if TYPE_CHECKING:
    from ..runtime import Waiter


@runtime_checkable
class SupportsRateLimit(Protocol):
    """A rate limit of one's own: an adapter for a store that several processes share, say."""

    def try_acquire(self, now: float) -> float | Awaitable[float]:
        """Take a permit if there is one.

        Called under no lock of the library's, from any thread and event loop.

        Args:
            now: The time by the pipeline's clock, in seconds.

        Returns:
            0.0 when granted, else the seconds until it is worth asking again.
        """
        ...


class _State(Protocol):
    def try_acquire(self, now: float) -> float: ...
    def wait_for(self, now: float, permits: int) -> float: ...
    def available(self, now: float) -> int: ...
    def is_idle(self, now: float) -> bool: ...


class RateLimit(ABC):
    """A built-in limit as a value: its state is born in `build()`, so two builds are two limits."""

    __slots__ = ()

    @abstractmethod
    def start(self) -> _State:
        """Make a fresh state."""

    def __repr__(self) -> str:
        """Show the options."""
        return f"{type(self).__name__}({shown(self)})"


def _capacity() -> dict[str, Any]:
    def check(value: Any) -> str | None:
        good = is_number(value) and 1 <= value < float("inf")
        return None if good else "a finite number of at least 1"

    return rule(check, {"type": "number", "minimum": 1})


@checked
@frozen(repr=False)
class TokenBucket(RateLimit):
    """A bucket that starts full and refills evenly: bursts up to `capacity`, then a steady rate.

    In any time t at most `capacity + refill_rate * t / per` calls pass.

    Args:
        capacity: Permits the bucket holds, at least 1.
        refill_rate: Permits that flow in during each `per`, above zero.
        per: Seconds (any duration form), above zero and finite.

    Raises:
        OptionsError: One or more options have bad values.
    """

    capacity: float = field(metadata=_capacity())
    refill_rate: float = field(metadata=positive_number())
    per: float = field(default=1.0, converter=to_seconds, metadata=positive_number())

    def start(self) -> _State:
        """Make a full bucket."""
        return TokenBucketState(self.capacity, self.refill_rate / self.per)


@checked
@frozen(repr=False)
class FixedWindow(RateLimit):
    """At most `permits` calls per window; a window starts with its first permit.

    Around the edge of two windows up to twice as many can pass in a short time; `SlidingWindow` has
    no such edge.

    Args:
        permits: Calls per window, at least 1.
        window: Its length in seconds (any duration form), above zero.

    Raises:
        OptionsError: One or more options have bad values.
    """

    permits: int = field(metadata=count(minimum=1))
    window: float = field(converter=to_seconds, metadata=positive_duration())

    def start(self) -> _State:
        """Make an unused window."""
        return FixedWindowState(self.permits, self.window)


@checked
@frozen(repr=False)
class SlidingWindow(RateLimit):
    """At most `permits` calls in any stretch of `window`.

    Args:
        permits: Calls in any window, at least 1.
        window: Its length in seconds (any duration form), above zero.
        segments: How finely permits come back, at least 1: the more segments, the sooner, and the
            more counters are kept.

    Raises:
        OptionsError: One or more options have bad values.
    """

    permits: int = field(metadata=count(minimum=1))
    window: float = field(converter=to_seconds, metadata=positive_duration())
    segments: int = field(default=10, metadata=count(minimum=1))

    def start(self) -> _State:
        """Make an unused window."""
        return SlidingWindowState(self.permits, self.window, self.segments)


class _Shared:
    """A built-in state behind a lock, so that check and take are one step for all threads.

    The clock is read within: a thread that is held up between reading it and the lock would look
    like a clock that was set back.
    """

    __slots__ = ("_lock", "_now", "_state")

    def __init__(self, state: _State, now: Callable[[], float]) -> None:
        self._lock = Lock()
        self._state = state
        self._now = now

    def try_acquire(self) -> float:
        with self._lock:
            return self._state.try_acquire(self._now())

    def is_idle(self) -> bool:
        with self._lock:
            return self._state.is_idle(self._now())

    def wait_for(self, permits: int) -> float:
        with self._lock:
            return self._state.wait_for(self._now(), permits)

    def health(self) -> dict[str, Any]:
        with self._lock:
            state, now = self._state, self._now()
            return {
                "available": state.available(now),
                "retry_after": state.wait_for(now, 1),
                "idle": state.is_idle(now),
            }


class RateLimiterRejectedEvent(StrategyEvent):
    """What a rate limiter's `on_rejected` is given.

    Attributes:
        context: The execution's context.
        retry_after: Seconds until a permit could be had, or `None` if the limiter can't tell.
    """

    name = "OnRateLimiterRejected"
    severity: Severity = Severity.ERROR
    context: ResilienceContext
    retry_after: float | None


def _limiter() -> dict[str, Any]:
    expected = (
        "TokenBucket(...), FixedWindow(...), SlidingWindow(...) or an object with try_acquire(now)"
    )

    def check(value: Any) -> str | None:
        if isinstance(value, type):
            return expected
        return None if isinstance(value, RateLimit | SupportsRateLimit) else expected

    return rule(check, REFERENCE)


@checked
@frozen(repr=False)
class RateLimiter(Strategy[RateLimiterRejectedError]):
    """Let calls start only as fast as a rate limit allows.

    Further calls are refused, with the true time until a permit could be had, or wait in a queue,
    first come first served. The limit holds for all event loops together that use the pipeline.

    Args:
        limiter: `TokenBucket`, `FixedWindow` or `SlidingWindow`, or an object of your own with a
            method `try_acquire(now)`, see `SupportsRateLimit`.
        queue_limit: Calls that may wait, at least 0; `math.inf` never refuses.
        max_wait: Longest time in the queue in seconds (any duration form); a call that is known to
            have to wait longer is refused at once. `None` for no limit.
        key: Function of the context that gives a key (a host, a tenant): each has a limit and a
            queue of its own. Needs one of the built-in limits. `None`: all calls share one.
        max_keys: Keys that are kept, at least 1; keys with waiters or a limit that is used up in
            part may be more.
        key_idle: Seconds (any duration form) after which a key that nobody used is let go.
        on_rejected: Hook called with a `RateLimiterRejectedEvent` before the error is raised.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    limiter: RateLimit | SupportsRateLimit = field(metadata=_limiter())
    queue_limit: float = field(default=0, kw_only=True, metadata=count(minimum=0, infinite=True))
    max_wait: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    key: Callable[[ResilienceContext], Any] | None = field(
        default=None, kw_only=True, metadata=function("a function of the context")
    )
    max_keys: int = field(default=1024, kw_only=True, metadata=count(minimum=1))
    key_idle: float = field(
        default=600.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    on_rejected: Callable[[RateLimiterRejectedEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with a limit of its own unless `limiter` is an object."""

        def make(_: object = None) -> tuple[_BoundRateLimiter, Handler]:
            bound = _BoundRateLimiter(self, next, site)
            return bound, bound.handle

        return make()[1] if self.key is None else keyed(self, site, make).handle

    def _problems(self) -> Iterator[str]:
        limiter: object = self.limiter
        foreign = isinstance(limiter, SupportsRateLimit) and not isinstance(limiter, type)
        if self.key is not None and foreign:
            yield (
                "key needs a limiter whose state can be made for each key: TokenBucket, "
                f"FixedWindow or SlidingWindow, got {self.limiter!r}"
            )


class _Place:
    """A place in the queue; whoever holds it may wait several times."""

    __slots__ = ("waiter",)

    def __init__(self, waiter: Waiter) -> None:
        self.waiter = waiter

    def wake(self) -> bool:
        return self.waiter.wake()

    def is_alive(self) -> bool:
        return self.waiter.is_alive()


class _BoundRateLimiter:
    __slots__ = ("_lock", "_next", "_options", "_own", "_queue", "_site")

    def __init__(self, options: RateLimiter, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._lock = Lock()
        self._queue: WaiterQueue[_Place] = WaiterQueue()
        #: Our own state knows how long a whole queue has to wait; a foreign one doesn't.
        self._own: _Shared | None = None
        if isinstance(options.limiter, RateLimit):
            self._own = _Shared(options.limiter.start(), site.now)

    def is_idle(self, now: float) -> bool:  # noqa: ARG002 - it reads the clock under its lock
        """Whether nobody waits and the limit is as good as new."""
        with self._lock:
            return self._queue.is_empty and (self._own is None or self._own.is_idle())

    async def handle(self, context: ResilienceContext) -> Any:
        if self._queue:
            await self._wait(context)
        else:
            own = self._own
            wait = await self._ask() if own is None else own.try_acquire()
            if wait > 0:
                await self._wait(context, wait)
        return await self._next(context)

    def health(self) -> dict[str, Any]:
        # What a limit of the user's own knows, and keeps, is not ours to tell.
        foreign = {"available": None, "retry_after": None, "idle": True}
        limit = foreign if self._own is None else self._own.health()
        with self._lock:
            queued = len(self._queue)
        return {**limit, "queued": queued, "idle": limit["idle"] and not queued}

    async def _ask(self) -> float:
        """Ask the limit, whoever made it; what a foreign one answers is looked at."""
        if self._own is not None:
            return self._own.try_acquire()
        limiter: Any = self._options.limiter
        wait: Any = limiter.try_acquire(self._site.now())
        if inspect.isawaitable(wait):
            refuse_awaitable(wait, f"try_acquire() of {limiter!r}")
            wait = await wait
        if not is_number(wait):
            msg = (
                f"try_acquire() of {limiter!r} must give 0.0 when a permit was granted, else the seconds "
                f"until it is worth asking again; it gave {wait!r}"
            )
            raise MisuseError(msg)
        return wait  # type: ignore[no-any-return]

    async def _wait(self, context: ResilienceContext, asked: float | None = None) -> None:
        """Get a permit by waiting for it, or raise; `asked` is what the limiter said just now."""
        place = _Place(context.runtime.waiter())
        # A queue may be long, or stuck, only by places whose event loop is gone.
        if not self._join(place, asked) and not (self._drop_dead() and self._join(place, asked)):
            await self._refuse(context, self._known_wait(asked))
        max_wait = self._options.max_wait
        deadline = None if max_wait is None else self._site.now() + max_wait
        try:
            granted, asked = await self._until_granted(context, place, deadline)
        finally:
            self._leave(place)
        if not granted:
            await self._refuse(context, self._known_wait(asked))

    def _known_wait(self, asked: float | None) -> float | None:
        """Seconds until a newcomer could have a permit, as far as the limiter can tell."""
        if self._own is None:
            return asked
        return self._own.wait_for(len(self._queue) + 1)

    def _join(self, place: _Place, asked: float | None) -> bool:
        """Take a place in the queue, if there is one and it can be of use."""
        max_wait = self._options.max_wait
        with self._lock:
            head = self._queue.head
            if head is not None and not head.is_alive():
                return False
            if len(self._queue) >= self._options.queue_limit:
                return False
            wait = None if max_wait is None else self._known_wait(asked)
            if wait is not None and max_wait is not None and wait > max_wait:
                return False
            self._queue.join(place)
        return True

    def _drop_dead(self) -> bool:
        """Forget places whose event loop is gone; whether there were any."""
        with self._lock:
            old_head = self._queue.head
            dropped = self._queue.drop_dead()
            head = self._queue.head
        if head is not None and head is not old_head:
            head.wake()
        return dropped

    async def _until_granted(
        self, context: ResilienceContext, place: _Place, deadline: float | None
    ) -> tuple[bool, float | None]:
        """Wait for the turn, then for a permit; whether it was granted, and what the limiter said last."""
        while not self._is_head(place):
            left = None if deadline is None else deadline - self._site.now()
            if not await place.waiter.wait(left) and not self._is_head(place):
                return False, None
            # Replaced before looking again, so that a wake-up in between is not lost.
            place.waiter = context.runtime.waiter()
        while (wait := await self._ask()) > 0:
            if deadline is not None and self._site.now() + wait > deadline:
                return False, wait
            takes_no_time = _instant.watching
            await context.runtime.sleep(wait)
            if takes_no_time:
                break  # to ask again would give the same answer for ever
        return True, 0.0

    def _is_head(self, place: _Place) -> bool:
        with self._lock:
            return self._queue.head is place

    def _leave(self, place: _Place) -> None:
        """Leave the queue, and wake the next head if that was one's own place."""
        with self._lock:
            was_head = self._queue.head is place
            self._queue.leave(place)
        while was_head:
            with self._lock:
                head = self._queue.head
            if head is None or head.wake():
                return
            with self._lock:
                self._queue.leave(head)

    async def _refuse(self, context: ResilienceContext, retry_after: float | None) -> None:
        when = "" if retry_after is None else f"; a permit can be had in {retry_after:g} s"
        reason = f"the limit {self._options.limiter!r} is used up{when}"
        error = self._site.reject(
            RateLimiterRejectedError, context, reason, retry_after=retry_after
        )
        try:
            on_rejected = self._options.on_rejected
            if on_rejected is not None or self._site.wants(RateLimiterRejectedEvent):
                event = RateLimiterRejectedEvent(context=context, retry_after=retry_after)
                await announce(self._site, event, on_rejected, "on_rejected", error)
            raise error
        finally:
            del error
