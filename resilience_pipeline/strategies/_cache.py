"""Cache: keep results, do once what several callers want at once, replay streams.

Here are the options, the events and the control; what a cache does is in `_bound_cache`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, ClassVar, Never
from weakref import WeakSet

from attrs import field, frozen

from .._context import PropertyKey, ResilienceContext
from .._locks import Lock
from .._options import (
    boolean,
    checked,
    count,
    function,
    instance,
    rule,
    text_or_none,
    to_name,
    to_seconds_or_none,
)
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site, Strategy
from ._cache_key import CacheKeyEvent, frozen_key

if TYPE_CHECKING:
    from ._bound_cache import BoundCache


class CacheStaleEvent(StrategyEvent):
    """A cache has served what is past its `ttl`, because refreshing it failed.

    Attributes:
        context: The execution's context.
        error: What refreshing failed with.
        age: Seconds since the served value was stored.
    """

    name = "OnStale"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    error: Exception
    age: float


@frozen(kw_only=True)
class CacheStatistics:
    """What the caches of one control have done, added up.

    Attributes:
        hits: Calls that were served what is stored, or joined a call in flight.
        misses: Calls that ran what is inside.
        stale_hits: Calls, counted as one of these already, that were served a stale value.
        in_flight: Calls and streams that are running inside now.
        size: Results that are stored now.
        evictions: Results that had to make room for others.
    """

    hits: int = 0
    misses: int = 0
    stale_hits: int = 0
    in_flight: int = 0
    size: int = 0
    evictions: int = 0


class CacheControl:
    """Reads and empties caches; one control may drive many, built before or after.

    Give it to `add_cache(control=...)`. All methods may be called from any thread.
    """

    __slots__ = ("_caches", "_lock")

    def __init__(self) -> None:
        self._lock = Lock()
        # Weak: a control may outlive the pipelines it drove.
        self._caches: WeakSet[BoundCache] = WeakSet()

    def invalidate(self, key: object) -> None:
        """Forget what is stored under a key; what is in flight is not stored, and joined no more.

        Args:
            key: What the cache's `key` gave, or by default `(operation_key, fn, args)`.

        Raises:
            MisuseError: It can't be hashed.
        """
        frozen = frozen_key(key, "CacheControl.invalidate()", "the key")
        for cache in self._driven():
            cache.invalidate(frozen)

    def clear(self) -> None:
        """Forget everything, as `invalidate` does with one key."""
        for cache in self._driven():
            cache.clear()

    def statistics(self) -> CacheStatistics:
        """Give what the caches have done so far, added up."""
        each = [cache.statistics() for cache in self._driven()]
        return CacheStatistics(
            hits=sum(one.hits for one in each),
            misses=sum(one.misses for one in each),
            stale_hits=sum(one.stale_hits for one in each),
            in_flight=sum(one.in_flight for one in each),
            size=sum(one.size for one in each),
            evictions=sum(one.evictions for one in each),
        )

    def __repr__(self) -> str:
        """Show how many caches there are."""
        return f"<CacheControl of {len(self._driven())} caches>"

    def _driven(self) -> list[BoundCache]:
        with self._lock:
            return list(self._caches)

    def _attach(self, cache: BoundCache) -> None:
        with self._lock:
            self._caches.add(cache)


def _is_max_chunks(value: object) -> str | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    good = value is None or whole or value == math.inf
    return None if good else "a whole number of at least 1, math.inf, or None"


@checked
@frozen(repr=False)
class Cache(Strategy[Never]):
    """Keep results, and run what several callers want at once only once.

    Calls with one key that come while one is in flight wait for that one. It runs in a task of its
    own, with the context variables of the first caller, so that a caller who is cancelled leaves
    alone; with the last one it is cancelled too. In synchronous calls it runs in the first caller's
    thread. Whoever waits gets the same object, or an error of its own.

    Streams are recorded and replayed: readers share one source and each has a cursor of its own.
    Every reader that stays to the end makes a stored stream of it.

    Results are handed to many and closed by none: don't cache what has to be closed.
    `idempotent=False` makes no difference here.

    Args:
        max_size: Results stored at most, at least 1; the least recently used goes first. `math.inf`
            for no bound.
        ttl: Seconds (any duration form) from a result's coming out for which it is served; `None`
            for ever, 0 to store nothing and only join calls that come at once.
        key: Function of a `CacheKeyEvent` giving what makes two calls equal, which can be hashed.
            The default is `(operation_key, fn, args)`. Values of different types are kept apart.
        cache_errors: Whether errors are stored too, and raised again as copies. A `MisuseError`
            never is, nor is a cancellation.
        stale_if_error: Seconds (any duration form) past its `ttl` for which a result is served if
            running the call again fails. `None` for not at all. Without a `ttl` nothing is stale.
        max_chunks: Chunks of a stream that are kept, at least 1. One that has more is not shared any
            more: its readers go on, and it is not stored. `None` for no bound.
        control: Reads and empties the cache by hand.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    #: The property of a context whose execution was served a stale value: what refreshing failed
    #: with.
    STALE: ClassVar[PropertyKey[Exception]] = PropertyKey("resilience_pipeline.cache_stale")

    max_size: float = field(default=1024, kw_only=True, metadata=count(minimum=1, infinite=True))
    ttl: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    key: Callable[[CacheKeyEvent], Hashable | Awaitable[Hashable]] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    cache_errors: bool = field(default=False, kw_only=True, metadata=boolean())
    stale_if_error: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    max_chunks: float | None = field(default=None, kw_only=True, metadata=rule(_is_max_chunks))
    control: CacheControl | None = field(
        default=None, kw_only=True, metadata=instance(CacheControl, "a CacheControl")
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with an empty cache."""
        from ._bound_cache import BoundCache  # not before somebody wants a cache

        cache = BoundCache(self, next, site)
        if self.control is not None:
            self.control._attach(cache)
        return cache.handle
