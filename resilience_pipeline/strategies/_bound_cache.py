"""What a cache does: what is a hit, what is stored, and what is served although it is stale.

What is stored is in `_cache_store`, what is in flight in `_flight` and `_shared_stream`; one lock
guards them together, so that a caller finds a call in flight or what has come of it, and nothing in
between.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, Final, Literal, TypeGuard

from .._context import ResilienceContext
from .._errors import MisuseError
from .._locks import Lock
from .._predicates import is_future_cancellation
from ._base import Handler, Site, call_user, origin
from ._cache import Cache, CacheStaleEvent, CacheStatistics
from ._cache_key import CacheKeyEvent, default_key, frozen_key
from ._cache_store import CacheStore
from ._flight import Flight, Flights
from ._shared_error import SharedError
from ._shared_stream import RecordingReader, SharedStream, SourceLostError, StreamReader
from ._shared_work import InFlight, SharedWork, may_wait_for

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


class BoundCache:
    __slots__ = (
        "__weakref__",
        "_flights",
        "_hits",
        "_lock",
        "_misses",
        "_next",
        "_now",
        "_options",
        "_origin",
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
        self._origin = origin(site.pipeline_name, site.strategy_name)
        self._hits = self._misses = self._stale_hits = 0

    async def handle(self, context: ResilienceContext) -> Any:
        by_default = self._options.key is None
        key = self._default_key(context) if by_default else await self._made_key(context)
        if context._stream is not None:
            return await self._handle_stream(context, key)
        while True:
            now = self._now()
            with self._lock:
                entry = self._store.get(key, now)
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
            now = self._now()
            with self._lock:
                entry = self._store.get(key, now)
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

    def _default_key(self, context: ResilienceContext) -> Hashable:
        fn = context._fn
        assert fn is not None
        key = default_key(context.operation_key, fn, context._args, self._origin)
        return key if context._stream is None else _of_kind(_kind_of(context), key)

    async def _made_key(self, context: ResilienceContext) -> Hashable:
        fn, make = context._fn, self._options.key
        assert fn is not None
        assert make is not None
        event = CacheKeyEvent(context=context, fn=fn, args=context._args)
        made = await call_user(make, event, "key")
        return _of_kind(_kind_of(context), frozen_key(made, self._origin, "what key= gave"))

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
        primed = None
        try:
            if reader.began:
                shared.start(context.runtime)
            primed = await context._stream.share(reader)
        except BaseException:
            reader.abandon()  # unless it has left already
            raise
        finally:
            if reader.began:
                shared.account_for(context, is_good=primed is not None)
            else:
                context._invocations += shared.context._invocations
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
        return self._options.cache_errors and _is_failure(error)

    def _stale(self, key: Hashable, now: float, error: BaseException) -> _Stale | None:
        if not _is_failure(error):
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
        context.properties.set(Cache.STALE, stale.error)
        if self._site.wants(CacheStaleEvent):
            event = CacheStaleEvent(context=context, error=stale.error, age=stale.age)
            self._site.report(event)
        return stale.value

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

    def health(self) -> dict[str, Any]:
        counts = self.statistics()
        # What is stored may be lost at any time, but who comes has to find what is in flight.
        return {
            "size": counts.size,
            "in_flight": counts.in_flight,
            "hits": counts.hits,
            "misses": counts.misses,
            "idle": not counts.in_flight,
        }


def _is_failure(error: BaseException) -> TypeGuard[Exception]:
    """Whether an error says something about what was called: a cancellation, a future's too, doesn't."""
    if not isinstance(error, Exception) or isinstance(error, MisuseError):
        return False
    return not is_future_cancellation(type(error))


def _kind_of(context: ResilienceContext) -> Kind:
    if context._stream is None:
        return "call"
    return "stream" if context._sync is None else "sync stream"


def _of_kind(kind: Kind, frozen: Hashable) -> Hashable:
    # No frozen key is a pair that begins with text.
    return frozen if kind == "call" else (kind, frozen)
