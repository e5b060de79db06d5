"""What a cache has stored: entries by key, bounded in number and in age.

Pure bookkeeping: no lock, no clock (`now` is an argument), no event loop; calls in flight are none
of its business. Its user calls every method under a lock of its own.

Rules:
1. An entry is fresh while its age, counted from when it was put, is below `ttl`; at `ttl` it is
   dropped, or kept as stale up to and including `ttl + grace`, if it may be served then.
2. With more than `max_size` entries the least recently used one goes; to be looked up is to be used.
3. Whoever removes an entry names it: what another one has put under the key meanwhile stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Entry(Generic[V]):
    """Something that is stored.

    Attributes:
        value: What.
        put_at: When it was put.
        may_be_stale: Whether it may be served past its `ttl`.
    """

    __slots__ = ("may_be_stale", "put_at", "value")

    def __init__(self, value: V, put_at: float, may_be_stale: bool) -> None:
        self.value = value
        self.put_at = put_at
        self.may_be_stale = may_be_stale


class CacheStore(Generic[V]):
    """Entries by key; every operation takes constant time, on average.

    Args:
        max_size: Entries at most.
        ttl: Seconds for which an entry is fresh; `math.inf` for ever.
        grace: Seconds after that for which it can be served as stale; `None` for not at all.

    Attributes:
        evictions: How many entries had to make room for others.
    """

    __slots__ = ("_by_age", "_entries", "_grace", "_max_size", "_ttl", "evictions")

    def __init__(self, max_size: float, ttl: float, grace: float | None) -> None:
        self._max_size = max_size
        self._ttl = ttl
        self._grace = grace
        #: In the order of use, and in that of age, the oldest first.
        self._entries: OrderedDict[Hashable, Entry[V]] = OrderedDict()
        self._by_age: OrderedDict[Hashable, Entry[V]] = OrderedDict()
        self.evictions = 0

    def __len__(self) -> int:
        """Return the number of entries, stale ones included."""
        return len(self._entries)

    def get(self, key: Hashable, now: float) -> Entry[V] | None:
        """Give the fresh entry of a key; it has been used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now - entry.put_at < self._ttl:
            self._entries.move_to_end(key)
            return entry
        if not self._may_serve(entry, now):
            self.remove(key, entry)
        return None

    def get_stale(self, key: Hashable, now: float) -> Entry[V] | None:
        """Give the entry of a key, for want of a fresh one, if it may be served."""
        entry = self._entries.get(key)
        if entry is None or not self._may_serve(entry, now):
            return None
        self._entries.move_to_end(key)
        return entry

    def put(self, key: Hashable, value: V, now: float, *, may_be_stale: bool = True) -> None:
        """Store a value in place of what was there; what has to go for it goes."""
        self.drop(key)
        self._entries[key] = self._by_age[key] = Entry(value, now, may_be_stale)
        self.expire(now)
        while len(self._entries) > self._max_size:
            del self._by_age[self._entries.popitem(last=False)[0]]
            self.evictions += 1

    def remove(self, key: Hashable, entry: Entry[V]) -> bool:
        """Remove this very entry; false if it is not there any more."""
        if self._entries.get(key) is not entry:
            return False
        self.drop(key)
        return True

    def drop(self, key: Hashable) -> bool:
        """Remove whatever is stored under a key; whether anything was."""
        self._by_age.pop(key, None)
        return self._entries.pop(key, None) is not None

    def clear(self) -> None:
        """Remove everything."""
        self._entries.clear()
        self._by_age.clear()

    def expire(self, now: float) -> None:
        """Remove what is too old, as far as nothing older is kept."""
        while self._by_age:
            key, entry = next(iter(self._by_age.items()))
            if now - entry.put_at < self._ttl or self._may_serve(entry, now):
                return
            self.drop(key)

    def _may_serve(self, entry: Entry[V], now: float) -> bool:
        if self._grace is None or not entry.may_be_stale:
            return False
        return now - entry.put_at <= self._ttl + self._grace
