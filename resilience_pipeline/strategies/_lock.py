"""Lock: one call inside at a time, except for those that the one inside makes itself.

Who owns the lock is told by a token of one ownership, a `_Hold`. It is kept in a context variable
while the inside runs, so child tasks, worker threads and the source of a stream have it too, and it
counts the calls that are inside on its account. The one that ends last passes the lock on, and the
next owner gets a token of its own: an old one is worth nothing, whoever still has it.

Interleavings that were thought through:

1. A release finds somebody waiting: the lock goes to the head of the queue under the guard, with a
   new token, then the head is woken. It is never free in between, so nobody overtakes.
2. A child of the owner comes in while the owner goes out: counting and passing on are one step under
   the guard. Either the child is counted, and the lock stays, or its token is old, and it queues.
3. The head is cancelled, or its time runs out, after the lock was handed to it and before it runs:
   leaving the queue tells. Whose time ran out uses it (the hand-over wins), who is cancelled passes
   it on.
4. The head's event loop has been closed: waking it fails, and the lock goes to the next one. It is
   closed after the head was woken and before that ran: the next one who finds the lock held takes it
   back. Where both notice at once, the one who takes the grant out of the queue passes the lock on.
5. The garbage collector closes an abandoned call in the middle of a guarded block of the same thread:
   who joins a queue looks whether it is still the one that will be served.
6. The source of a stream runs in a copy of the context in which it was opened, and so has the token
   in each step and while it is closed. The consumer's own code between two chunks does not have it.

Two locks taken in opposite order by two callers wait for each other for ever. That is not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, Final

from attrs import field, frozen

from .._cancellation import Orphans
from .._context import ResilienceContext
from .._errors import LockRejectedError, MisuseError
from .._locks import Lock as Guard
from .._options import (
    UNSET,
    boolean,
    checked,
    function,
    instance,
    text_or_none,
    to_name,
    to_seconds_or_none,
)
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site, Strategy, call_user, origin
from ._waiters import WaiterQueue

#: What is locked where no `key=` says it.
_WHOLE: Final = UNSET


class _Hold:
    """One ownership of a lock, from its grant until the last call inside has ended.

    Attributes:
        calls: How many are inside on its account.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 1


class _Place:
    """What there is of one key, for as long as somebody owns it.

    Attributes:
        hold: Who owns it now, or has been handed it and has not run yet.
        queue: Who waits for it; `None` while nobody has.
    """

    __slots__ = ("hold", "queue")

    def __init__(self) -> None:
        self.hold = _Hold()
        self.queue: WaiterQueue[Any] | None = None


#: The ownerships of the call chain that runs this code, outermost first; some may be over.
_chain: ContextVar[tuple[_Hold, ...]] = ContextVar("resilience_pipeline.locks", default=())


class ResilienceLock:
    """A lock that several pipelines share, from any event loop and any thread.

    Pass it to `add_lock` of each of them: what is inside one of them then keeps out what is inside
    another. With `key=` it is as many locks as there are keys; those that nobody holds take no
    memory.

    Example:
        >>> accounts = ResilienceLock()
        >>> deposits = ResiliencePipelineBuilder().add_lock(accounts).build()
        >>> transfers = ResiliencePipelineBuilder().add_lock(accounts).add_retry().build()
    """

    __slots__ = ("__weakref__", "_guard", "_places")

    def __init__(self) -> None:
        self._guard = Guard()
        #: By key, what is held; nothing is kept of what is free.
        self._places: dict[Hashable, _Place] = {}

    def __repr__(self) -> str:
        """Show whether it is held, under how many keys, and how many wait."""
        with self._guard:
            places = dict(self._places)
        if not places:
            return "<ResilienceLock free>"
        keys = len(places) - (_WHOLE in places)
        held = f"held for {keys} {'key' if keys == 1 else 'keys'}" if keys else "held"
        waiting = sum(len(place.queue or ()) for place in places.values())
        return f"<ResilienceLock {held}{f', {waiting} waiting' if waiting else ''}>"

    # ---- for the strategy

    def _counts(self) -> tuple[int, int]:
        """How many are held, of one or more keys, and how many calls wait."""
        with self._guard:
            places = list(self._places.values())
        return len(places), sum(len(place.queue or ()) for place in places)

    def _enter(self, key: Hashable, chain: tuple[_Hold, ...]) -> _Hold | None:
        """Own the lock if it is free, or share in an ownership of the chain's, or neither."""
        with self._guard:
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = _Place()
                return place.hold
            for mine in chain:
                if mine is place.hold and mine.calls:
                    mine.calls += 1
                    return mine
            return None

    def _join(self, key: Hashable, waiter: Any) -> tuple[_Place, WaiterQueue[Any]] | None:
        """Queue up behind whoever has the lock; `None` if nobody has it any more."""
        self._recover(key)
        with self._guard:
            place = self._places.get(key)
            if place is None:
                return None
            queue = place.queue
            if queue is None:
                queue = place.queue = WaiterQueue()
            queue.join(waiter)
            if self._places.get(key) is place:
                return place, queue
            queue.leave(waiter)  # see 5 above
            return None

    def _quit(self, place: _Place, queue: WaiterQueue[Any], waiter: Any) -> _Hold | None:
        """Stop waiting; give the ownership, if it has been handed over before."""
        with self._guard:
            return place.hold if queue.leave(waiter) else None

    def _leave(self, key: Hashable, hold: _Hold) -> None:
        """Count one less inside; with the last one the lock goes to the next, or is free."""
        with self._guard:
            hold.calls -= 1
            if hold.calls:
                return
            place = self._places[key]
            heir = self._next(key, place)
        self._wake(key, place, heir)

    def _next(self, key: Hashable, place: _Place) -> Any:
        """Hand the lock to the head of the queue, under the guard; the caller wakes it."""
        heir = None if place.queue is None else place.queue.grant()
        if heir is None:
            del self._places[key]
        else:
            place.hold = _Hold()
        return heir

    def _wake(self, key: Hashable, place: _Place, heir: Any) -> None:
        """Wake who was handed the lock, or the first after that who can be reached."""
        while heir is not None and not heir.wake():
            with self._guard:
                if place.queue is None or not place.queue.leave(heir):
                    return  # taken back by somebody else, who has passed it on
                heir = self._next(key, place)

    def _recover(self, key: Hashable) -> None:
        """Pass on what was handed to somebody whose event loop has been closed since."""
        with self._guard:
            place = self._places.get(key)
            if place is None or place.queue is None or not place.queue.take_back():
                return
            heir = self._next(key, place)
        self._wake(key, place, heir)


class LockRejectedEvent(StrategyEvent):
    """What is told of a call that has waited for a lock as long as it may.

    Attributes:
        context: The execution's context.
    """

    name = "OnLockRejected"
    severity: Severity = Severity.ERROR


@checked
@frozen(repr=False)
class Lock(Strategy[LockRejectedError]):
    """Let one call be inside at a time, first come first served.

    A call that is made inside of the owner, by the same task, a child task or a worker thread of its
    own, passes at once; several of them at a time are not kept apart. The lock stays held until the
    outermost call and all those inside have ended. A stream holds it from the first pull until it
    has been closed, which its end does too. It holds for all event loops and threads together.

    Args:
        lock: A `ResilienceLock`, to share it with other pipelines; by default each `build()` makes
            one of its own.
        key: A function of the context, plain or a coroutine function, that says which of many locks
            is meant: an account, say. Anything hashable. By default there is one lock.
        reentrant: Whether calls inside of the owner pass. If not, they wait like anybody else, and
            an owner that waits for one of them waits for ever, or for `max_wait`.
        max_wait: Longest time to wait for the lock in seconds (any duration form); `None` for no
            limit.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    lock: ResilienceLock | None = field(
        default=None, metadata=instance(ResilienceLock, "a ResilienceLock")
    )
    key: Callable[[ResilienceContext], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    reentrant: bool = field(default=True, kw_only=True, metadata=boolean())
    max_wait: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with the shared lock or one of its own."""
        return _BoundLock(self, next, site).handle


class _BoundLock:
    __slots__ = ("_key", "_lock", "_next", "_options", "_site")

    def __init__(self, options: Lock, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._key = options.key
        self._lock = ResilienceLock() if options.lock is None else options.lock
        self._next = next
        self._site = site

    def health(self) -> dict[str, Any]:
        held, queued = self._lock._counts()
        # One that is shared outlives the pipeline.
        idle = not held or self._options.lock is not None
        return {"held": held, "queued": queued, "idle": idle}

    async def handle(self, context: ResilienceContext) -> Any:
        key = _WHOLE if self._key is None else await self._ask_key(self._key, context)
        around = _chain.get()
        hold = self._lock._enter(key, around if self._options.reentrant else ())
        if hold is None:
            hold = await self._wait(key, context, around)
        token = _chain.set(around if hold in around else (*filter(_is_held, around), hold))
        if context._sync is not None or context._stream is not None:
            return await self._run(context, partial(self._lock._leave, key, hold), token)
        try:
            return await self._next(context)
        finally:
            _restore(token)
            self._lock._leave(key, hold)

    async def _run(
        self, context: ResilienceContext, release: Callable[[], object], token: Token[Any]
    ) -> Any:
        """Run the inside of a stream, or of a call in a thread, which may outlive it."""
        stream, around = context._stream, context._sync
        held = False
        if around is not None:
            # Held by what this call leaves behind in threads, not by what others did.
            context._sync = inside = Orphans(around)
            release = partial(inside.when_gone, release)
        try:
            if stream is None:
                return await self._next(context)
            # What a strategy inside gave in place of a source is one from here on.
            result = await stream.adopted(context, await self._next(context))
            held = stream.hold(result, release)
            return result
        finally:
            context._sync = around
            _restore(token)
            if not held:
                release()

    async def _wait(
        self, key: Hashable, context: ResilienceContext, chain: tuple[_Hold, ...]
    ) -> _Hold:
        """Own the lock in turn, or raise."""
        waiter = context.runtime.waiter()
        while (joined := self._lock._join(key, waiter)) is None:
            hold = self._lock._enter(key, chain if self._options.reentrant else ())
            if hold is not None:
                return hold
        try:
            if self._options.max_wait != 0:
                await waiter.wait(self._options.max_wait)
        except BaseException:
            hold = self._lock._quit(*joined, waiter)
            if hold is not None:
                self._lock._leave(key, hold)
            raise
        hold = self._lock._quit(*joined, waiter)
        if hold is None:
            if self._site.wants(LockRejectedEvent):
                self._site.report(LockRejectedEvent(context=context))
            raise self._refusal(context)
        return hold

    def _refusal(self, context: ResilienceContext) -> LockRejectedError:
        reason = f"the lock did not become free within max_wait={self._options.max_wait:g} s"
        return self._site.reject(LockRejectedError, context, reason)

    async def _ask_key(
        self, key_of: Callable[[ResilienceContext], object], context: ResilienceContext
    ) -> Hashable:
        key = await call_user(key_of, context, "key")
        try:
            hash(key)
        except TypeError as error:
            where = origin(self._site.pipeline_name, self._site.strategy_name)
            msg = f"{where}: key= must give something hashable, it gave {key!r}"
            raise MisuseError(msg) from error
        return key


def _is_held(hold: _Hold) -> bool:
    return hold.calls > 0


def _restore(token: Token[Any]) -> None:
    """Take back the ownership that was set for the inside."""
    try:  # noqa: SIM105 - `suppress` costs each call two bare ones
        _chain.reset(token)
    except ValueError:
        # An abandoned coroutine is closed by the garbage collector, wherever that happens to run;
        # the context it was set in is gone.
        pass
