"""Cache: keep results, do once what several callers want at once, replay streams.

What is stored is in `_cache_store`, what is in flight in `_flight` and `_shared_stream`; one lock
guards them together, so that a caller finds a call in flight or what has come of it, and nothing in
between. Here is what is a hit, what is stored, and what is served although it is stale.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, ClassVar, Final, Literal, Never
from weakref import WeakSet

from attrs import field, frozen

from .._context import PropertyKey, ResilienceContext
from .._errors import MisuseError
from .._event import Event
from .._locks import Lock
from .._options import (
    boolean,
    checked,
    count,
    function,
    instance,
    positive_duration,
    rule,
    text_or_none,
    to_name,
    to_seconds_or_none,
)
from ._base import Handler, Site, Strategy, call_user, origin
from ._cache_key import CacheKeyEvent, frozen_key
from ._cache_store import CacheStore
from ._flight import Flight, Flights
from ._shared_error import SharedError
from ._shared_stream import (
    RecordingReader,
    SharedStream,
    SourceLostError,
    StreamReader,
)
from ._shared_work import InFlight, SharedWork, may_wait_for


class CacheStaleEvent(Event):
    """A cache has served what is past its `ttl`, because refreshing it failed.

    Attributes:
        context: The execution's context.
        error: What refreshing failed with.
        age: Seconds since the served value was stored.
    """

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
        self._caches: WeakSet[_BoundCache] = WeakSet()

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

    def _driven(self) -> list[_BoundCache]:
        with self._lock:
            return list(self._caches)

    def _attach(self, cache: _BoundCache) -> None:
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
            for ever.
        key: Function of a `CacheKeyEvent` giving what makes two calls equal, which can be hashed.
            The default is `(operation_key, fn, args)`. Values of different types are kept apart.
        cache_errors: Whether errors are stored too, and raised again as copies. A `MisuseError`
            never is.
        stale_if_error: Seconds (any duration form) past its `ttl` for which a result is served if
            running the call again fails. `None` for not at all.
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
    ttl: float | None = field(
        default=None, kw_only=True, converter=to_seconds_or_none, metadata=positive_duration()
    )
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

    def _problems(self) -> list[str]:
        if self.stale_if_error is not None and self.ttl is None:
            return ["stale_if_error needs a ttl: without one nothing is ever stale"]
        return []

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with an empty cache."""
        cache = _BoundCache(self, next, site)
        if self.control is not None:
            self.control._attach(cache)
        return cache.handle


Kind = Literal["call", "stream", "sync stream"]
_KINDS: Final[tuple[Kind, ...]] = ("call", "stream", "sync stream")


class _Stored:
    """What came of a call: a value, or an error if those are kept."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any, error: SharedError | None) -> None:
        self.value = value
        self.error = error


class _Stale:
    """What a flight gives in place of its error."""

    __slots__ = ("age", "error", "value")

    def __init__(self, value: Any, error: Exception, age: float) -> None:
        self.value = value
        self.error = error
        self.age = age


class _BoundCache:
    __slots__ = (
        "__weakref__",
        "_flights",
        "_hits",
        "_lock",
        "_misses",
        "_next",
        "_now",
        "_options",
        "_site",
        "_stale_hits",
        "_store",
        "_streams",
    )

    def __init__(self, options: Cache, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._now = site.now
        self._lock = Lock()
        ttl = math.inf if options.ttl is None else options.ttl
        self._store: CacheStore[Any] = CacheStore(options.max_size, ttl, options.stale_if_error)
        self._flights = Flights(self._landed, self._lock)
        self._streams: InFlight[SharedStream] = InFlight(self._stream_landed, self._lock)
        self._hits = self._misses = self._stale_hits = 0

    async def handle(self, context: ResilienceContext) -> Any:
        key = await self._key_of(context)
        if context._stream is not None:
            return await self._handle_stream(context, key)
        while True:
            with self._lock:
                entry = self._store.get(key, self._now())
                flight = None
                if entry is not None:
                    self._hits += 1
                else:
                    flight = self._flights.board(key, context)
                    self._count(flight is not None and not flight.is_started_by(context))
            if entry is not None:
                stored: _Stored = entry.value
                if stored.error is not None:
                    raise stored.error.take(context.execution)
                return stored.value
            if flight is None:
                return await self._next(context)
            if await flight.ride(context, self._next, self._site.discard):
                result = flight.take(context)
                return self._served(context, result) if isinstance(result, _Stale) else result

    async def _handle_stream(self, context: ResilienceContext, key: Hashable) -> Any:
        stream = context._stream
        assert stream is not None
        while True:
            with self._lock:
                entry = self._store.get(key, self._now())
                reader = shared = None
                if entry is not None:
                    self._hits += 1
                else:
                    shared, reader = self._attach(key, context)
            if entry is not None:
                return await stream.share(RecordingReader(entry.value, context))
            if shared is None or reader is None:
                return await self._next(context)
            try:
                return await self._share(context, shared, reader)
            except SourceLostError:  # before it gave anything: to be opened once more
                continue
            except Exception as error:
                stale = reader.stale
                if stale is None:
                    raise
                failure = error
            try:
                recording = self._served(context, _Stale(stale.value, failure, stale.age))
            finally:
                del failure
            return await stream.share(RecordingReader(recording, context))

    # ---- keys

    async def _key_of(self, context: ResilienceContext) -> Hashable:
        fn, args = context._fn, context._args
        assert fn is not None
        make: Any = self._options.key
        if make is None:
            key: Any = (context.operation_key, fn, args)
            what = "the function, or an argument,"
        else:
            key = await call_user(make, CacheKeyEvent(context=context, fn=fn, args=args), "key")
            what = "what key= gave"
        frozen = frozen_key(key, origin(self._site.pipeline_name, self._site.strategy_name), what)
        return _of_kind(_kind_of(context), frozen)

    # ---- what is in flight

    def _count(self, is_hit: bool) -> None:
        if is_hit:
            self._hits += 1
        else:
            self._misses += 1

    def _attach(
        self, key: Hashable, context: ResilienceContext
    ) -> tuple[SharedStream | None, StreamReader | None]:
        """Read what is being read, or begin to, under the lock; neither if it can't be waited for."""
        shared = self._streams.find(key)
        self._count(shared is not None)
        if shared is None:
            maximum = self._options.max_chunks
            shared = SharedStream(
                self._streams,
                key,
                context,
                self._next,
                math.inf if maximum is None else maximum,
                self._site.close_timeout,
            )
            self._streams.add(shared)
            may_wait_for(shared)
        elif not self._can_join(shared, context):
            self._hits, self._misses = self._hits - 1, self._misses + 1
            return None, None
        return shared, shared.attach(context)

    @staticmethod
    def _can_join(work: SharedWork, context: ResilienceContext) -> bool:
        return work.is_within_reach(context.runtime.place()) and may_wait_for(work)

    async def _share(
        self, context: ResilienceContext, shared: SharedStream, reader: StreamReader
    ) -> Any:
        assert context._stream is not None
        is_starter, primed = shared.is_started_by(context), None
        try:
            if is_starter:
                shared.start(context.runtime)
            primed = await context._stream.share(reader)
        except BaseException:
            reader.abandon()  # unless it has left already
            raise
        finally:
            if is_starter:
                shared.account_for(context, is_good=primed is not None)
        return primed

    # ---- what comes of it

    def _landed(self, flight: Flight) -> None:
        """Keep what came of a call, under the lock."""
        if flight.is_lost:
            return
        key, now = flight.key, self._now()
        if flight.error is None:
            self._store.put(key, _Stored(flight.result, None), now)
            return
        error = flight.error.error
        stale = self._stale(key, now, error)
        if stale is not None:
            flight.result, flight.error = stale, None
        elif self._is_kept(error):
            stored = _Stored(None, flight.error.to_store())
            self._store.put(key, stored, now, may_be_stale=False)

    def _stream_landed(self, shared: SharedStream) -> None:
        """Keep what came of a stream, under the lock."""
        if shared.is_lost:
            return
        key, now = shared.key, self._now()
        if shared.error is None:
            self._store.put(key, shared.recording(), now)
            return
        error = shared.error.error
        if shared.is_empty:
            shared.stale = self._stale(key, now, error)
            if shared.stale is not None:
                return
        if self._is_kept(error):
            recording = shared.recording(shared.error.to_store())
            self._store.put(key, recording, now, may_be_stale=False)

    def _is_kept(self, error: BaseException) -> bool:
        return self._options.cache_errors and not isinstance(error, MisuseError)

    def _stale(self, key: Hashable, now: float, error: BaseException) -> _Stale | None:
        if isinstance(error, MisuseError) or not isinstance(error, Exception):
            return None
        entry = self._store.get_stale(key, now)
        if entry is None:
            return None
        value = entry.value.value if isinstance(entry.value, _Stored) else entry.value
        return _Stale(value, error, max(0.0, now - entry.put_at))

    def _served(self, context: ResilienceContext, stale: _Stale) -> Any:
        """Serve a stale value, and tell of it."""
        with self._lock:
            self._stale_hits += 1
        self._report(CacheStaleEvent(context=context, error=stale.error, age=stale.age))
        return stale.value

    @staticmethod
    def _report(event: CacheStaleEvent) -> None:
        # Not the event, which holds the context: the two would hold one another, and the error.
        event.context.properties.set(Cache.STALE, event.error)

    # ---- by hand

    def invalidate(self, frozen: Hashable) -> None:
        with self._lock:
            for kind in _KINDS:
                key = _of_kind(kind, frozen)
                self._store.drop(key)
                self._flights.pop(key)
                self._streams.pop(key)

    def clear(self) -> None:
        with self._lock:
            self._store.clear()
            self._flights.clear()
            self._streams.clear()

    def statistics(self) -> CacheStatistics:
        with self._lock:
            self._store.expire(self._now())
            return CacheStatistics(
                hits=self._hits,
                misses=self._misses,
                stale_hits=self._stale_hits,
                in_flight=self._flights.count + self._streams.count,
                size=len(self._store),
                evictions=self._store.evictions,
            )


def _kind_of(context: ResilienceContext) -> Kind:
    if context._stream is None:
        return "call"
    return "stream" if context._sync is None else "sync stream"


def _of_kind(kind: Kind, frozen: Hashable) -> Hashable:
    return kind, frozen
