"""When a rate limit lets the next call through: token bucket, fixed and sliding window.

Knows no clock, lock, queue or error: `now` is an argument and calls come one at a time. A state
tells the truth about waiting; who waits, and for how long, is decided elsewhere.

Invariants:

- Whether a permit is granted and how long a refused call has to wait are read from one number, the
  time at which the permit falls due. So the call after exactly that wait is granted, at any clock
  value, unless somebody else came first.
- Everything is computed from an anchor, never by adding up small differences: no fraction of a
  permit is lost or won however often the state is asked.
- Time doesn't run backwards here. A reading slightly behind the latest one was overtaken by another
  thread on its way and counts as the latest. One far behind means that the clock was set back: time
  then goes on from where it was. Either way no permit appears, and nobody is locked out for long.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque

__all__ = ["FixedWindowState", "SlidingWindowState", "TokenBucketState"]

# How far behind the latest reading, in seconds, one may lie and still be taken for overtaken.
# Moving time for such readings would hand out a little too much each time two threads cross.
_OVERTAKEN = 1.0


class _LimitState(ABC):
    """What the three have in common: steady time, and the step from a due time to an answer.

    A subclass works in steady time: the clock's, plus what was lost when the clock was set back.
    """

    __slots__ = ("_latest", "_offset")

    def __init__(self) -> None:
        self._latest = -math.inf
        self._offset = 0.0

    def try_acquire(self, now: float) -> float:
        """Take a permit if there is one.

        Args:
            now: The time in seconds, on the clock that every call of this state uses.

        Returns:
            0.0 when a permit was taken; otherwise the seconds until one can be had.
        """
        time = now + self._offset
        if time < self._latest:
            time, self._offset = self._behind(now)
        self._latest = time
        due = self._due(time, 1)
        if time < due:
            return _wait(now, self._offset, due)
        self._take(time)
        return 0.0

    def wait_for(self, now: float, permits: int) -> float:
        """Tell how long a queue would need to take some permits, each as soon as it can be had.

        Takes nothing and changes nothing.

        Args:
            now: The time in seconds, on the clock that every call of this state uses.
            permits: How many permits are wanted in all, at least 1.

        Returns:
            Seconds until the last of them is had; 0.0 if all are there.
        """
        time, offset = self._view(now)
        due = self._due(time, permits)
        return 0.0 if time >= due else _wait(now, offset, due)

    def available(self, now: float) -> int:
        """Tell how many permits could be had now.

        Args:
            now: The time in seconds, on the clock that every call of this state uses.
        """
        time = self._view(now)[0]
        few, many = 0, self._most()
        while few < many:
            middle = (few + many + 1) // 2
            if self._due(time, middle) <= time:
                few = middle
            else:
                many = middle - 1
        return few

    def is_idle(self, now: float) -> bool:
        """Tell whether a fresh state would give the same answers from now on.

        Args:
            now: The time in seconds, on the clock that every call of this state uses.
        """
        return self._is_fresh(self._view(now)[0])

    @abstractmethod
    def _most(self) -> int:
        """The most permits that can ever be had at once."""

    @abstractmethod
    def _due(self, time: float, permits: int) -> float:
        """When the last of `permits` permits could be had; at or before `time` if it can be now."""

    @abstractmethod
    def _take(self, time: float) -> None:
        """Count a permit, known to be due, as taken."""

    @abstractmethod
    def _is_fresh(self, time: float) -> bool:
        """Whether nothing that was taken counts any more."""

    def _view(self, now: float) -> tuple[float, float]:
        time = now + self._offset
        return (time, self._offset) if time >= self._latest else self._behind(now)

    def _behind(self, now: float) -> tuple[float, float]:
        """Steady time, and the offset that goes with it, for a reading behind the latest one."""
        overtaken = self._latest - (now + self._offset) <= _OVERTAKEN
        return self._latest, self._offset if overtaken else self._latest - now


class TokenBucketState(_LimitState):
    """A bucket that starts full and refills evenly, a permit at a time going out.

    In any time t at most `capacity + rate_per_second * t` permits are granted.

    Args:
        capacity: The most permits the bucket holds, at least 1.
        rate_per_second: Permits that flow in each second, above 0.
    """

    __slots__ = ("_anchor", "_capacity", "_full_at", "_rate", "_taken")

    def __init__(self, capacity: float, rate_per_second: float) -> None:
        super().__init__()
        self._capacity = capacity
        self._rate = rate_per_second
        # The bucket was last full at the anchor; since then so many whole permits went out.
        self._anchor = -math.inf
        self._taken = 0
        self._full_at = -math.inf

    def _most(self) -> int:
        return math.floor(self._capacity)

    def _due(self, time: float, permits: int) -> float:
        anchor, taken = (self._anchor, self._taken) if time < self._full_at else (time, 0)
        return anchor + (taken + permits - self._capacity) / self._rate

    def _take(self, time: float) -> None:
        if time >= self._full_at:
            self._anchor = time
            self._taken = 0
        self._taken += 1
        self._full_at = self._anchor + self._taken / self._rate

    def _is_fresh(self, time: float) -> bool:
        return time >= self._full_at


class FixedWindowState(_LimitState):
    """So many permits per window, a window starting with its first permit.

    Around the edge of two windows up to twice `permits` can be granted in a short time.

    Args:
        permits: Permits in each window, at least 1.
        window: Length of a window in seconds, above 0.
    """

    __slots__ = ("_end", "_permits", "_taken", "_window")

    def __init__(self, permits: int, window: float) -> None:
        super().__init__()
        self._permits = permits
        self._window = window
        self._end = -math.inf
        self._taken = 0

    def _most(self) -> int:
        return self._permits

    def _due(self, time: float, permits: int) -> float:
        if time >= self._end:
            return self._nth_window(time, permits)
        left = self._permits - self._taken
        return time if permits <= left else self._nth_window(self._end, permits - left)

    def _nth_window(self, first: float, permits: int) -> float:
        """Start of the window that holds the last of `permits`, unused windows from `first` on."""
        windows = (permits - 1) // self._permits
        # Zero windows of infinite length are no time, not NaN.
        return first + windows * self._window if windows else first

    def _take(self, time: float) -> None:
        if time >= self._end:
            self._end = time + self._window
            self._taken = 0
        self._taken += 1

    def _is_fresh(self, time: float) -> bool:
        return time >= self._end


class _Segment:
    """Permits granted close together, which come back together.

    Attributes:
        start: When the first was granted.
        expires: When they no longer count: a window after the last was granted.
        count: How many they are.
    """

    __slots__ = ("count", "expires", "start")

    def __init__(self, start: float, expires: float, count: int) -> None:
        self.start = start
        self.expires = expires
        self.count = count


class _Segments:
    """The permits that may still count.

    Starts lie a segment's length apart, so the window, and the one segment that is leaving it, hold
    no more than a segment above what the window is divided into.

    Attributes:
        row: The segments, oldest first, which is also the first to expire.
        taken: The sum of their counts.
    """

    __slots__ = ("_length", "_window", "row", "taken")

    def __init__(self, window: float, length: float) -> None:
        self._window = window
        self._length = length
        self.row: deque[_Segment] = deque()
        self.taken = 0

    def copy(self) -> _Segments:
        copy = _Segments(self._window, self._length)
        copy.row.extend(_Segment(old.start, old.expires, old.count) for old in self.row)
        copy.taken = self.taken
        return copy

    def expired(self, time: float) -> int:
        """How many of `taken` no longer count."""
        count = 0
        for segment in self.row:
            if time < segment.expires:
                break
            count += segment.count
        return count

    def add(self, time: float, count: int) -> None:
        """Count permits taken now, and let go what no longer counts."""
        row = self.row
        while row and time >= row[0].expires:
            self.taken -= row.popleft().count
        self.taken += count
        expires = _expiry(time, self._window)
        if not row or time - row[-1].start >= self._length:
            row.append(_Segment(time, expires, count))
        else:
            row[-1].expires = expires
            row[-1].count += count


class SlidingWindowState(_LimitState):
    """So many permits in any stretch of one window's length, wherever it is laid.

    A stretch includes its start and not its end. Permits are remembered in segments, and a segment
    counts until a window after its *last* permit: never too many are granted, while a permit may
    come back up to one segment's length late. With no more than `segments + 1` permits each is
    remembered by itself and comes back on time.

    Args:
        permits: Permits in any window, at least 1.
        window: Length of the window in seconds, above 0.
        segments: How finely the window is divided, at least 1. No more than `segments + 1` counters
            are kept.
    """

    __slots__ = ("_limit", "_permits", "_segments", "_window")

    def __init__(self, permits: int, window: float, segments: int) -> None:
        super().__init__()
        self._permits = permits
        self._window = window
        self._limit = segments + 1
        length = 0.0 if permits <= self._limit else window / segments
        self._segments = _Segments(window, length)

    def _most(self) -> int:
        return self._permits

    def _due(self, time: float, permits: int) -> float:
        segments = self._segments
        free = self._permits - segments.taken + segments.expired(time)
        if permits <= free:
            return time
        # Nothing is free, so nothing has expired and the first segment is the next to come back.
        if free == 0 and permits <= segments.row[0].count:
            return segments.row[0].expires
        return self._foresee(time, permits, free)

    def _foresee(self, time: float, permits: int, free: int) -> float:
        """Play the queue on a copy: when a permit is taken decides when it comes back."""
        # A round of the limit either merges segments or repeats the round before, a window later.
        # It can merge no oftener than there are segments, so a long queue needn't be played whole.
        rounds = max(0, (permits - 1) // self._permits - self._limit)
        left = permits - rounds * self._permits
        ahead = self._segments.copy()
        while True:
            count = min(left, free)
            if count:
                ahead.add(time, count)
            left -= count
            if not left:
                return time + rounds * self._window if rounds else time
            time = ahead.row[0].expires
            free = ahead.expired(time)

    def _take(self, time: float) -> None:
        self._segments.add(time, 1)

    def _is_fresh(self, time: float) -> bool:
        row = self._segments.row
        return not row or time >= row[-1].expires


def _expiry(time: float, window: float) -> float:
    """The first moment that lies a whole window after `time`; the sum may be rounded below it."""
    expires = time + window
    return math.nextafter(expires, math.inf) if expires - time < window else expires


def _wait(now: float, offset: float, due: float) -> float:
    """The seconds after which a clock that shows `now` has, by its own sums, reached `due`.

    Both differences may be rounded down; a call after such a wait would be refused again.
    """
    reading = due - offset
    while reading + offset < due:
        reading = math.nextafter(reading, math.inf)
    wait = reading - now
    while now + wait < reading:
        wait = math.nextafter(wait, math.inf)
    return wait
