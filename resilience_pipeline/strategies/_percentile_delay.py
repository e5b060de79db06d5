"""Latencies seen lately, and how long the slow ones of them took.

Pure: no clock, no event loop. The window is kept twice, in the order of arrival to know what goes,
and in the order of size to read a percentile from, so that reading costs the same whatever the
window, and noting a call a search and a shift in one small array: for up to ten thousand calls hardly
more than for twenty. In return the percentile is exact, which a moving estimate is not.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from typing import Any

from attrs import field, frozen

from .._locks import Lock
from .._options import checked, count, is_number, rule, shown, to_seconds

#: Fewer than this say nothing about a percentile.
_ENOUGH = 20


_PERCENTILE = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}


def _is_percentile(value: Any) -> str | None:
    good = is_number(value) and 0 < value < 1
    return None if good else "a number between 0 and 1, such as 0.95"


@checked
@frozen(repr=False)
class PercentileDelay:
    """A hedging delay learnt from the pipeline's own recent latencies, for `delay_generator`.

    Hedges what is slower than most: with 0.95 about one call in twenty is hedged. What counts is
    how long first attempts take until they are accepted. One that was beaten by a hedge counts with
    the time it had taken by then, so that hedging does not hide the slowness it answers. One that
    came out handled does not count.

    Args:
        percentile: Which share of calls is faster, between 0 and 1, by nearest rank.
        min: Shortest delay in seconds (any duration form).
        max: Longest delay in seconds; `math.inf` for no limit.
        window: Number of the latest calls that are looked at, at least 20.
        initial: The delay in seconds until 20 calls have been seen; kept between `min` and `max`.

    Raises:
        OptionsError: One or more options have bad values.
    """

    percentile: float = field(metadata=rule(_is_percentile, _PERCENTILE))
    min: float = field(default=0.0, kw_only=True, converter=to_seconds)
    max: float = field(default=math.inf, kw_only=True, converter=to_seconds)
    window: int = field(default=1000, kw_only=True, metadata=count(minimum=_ENOUGH))
    initial: float = field(default=2.0, kw_only=True, converter=to_seconds)

    def _problems(self) -> Iterator[str]:
        if is_number(self.min) and is_number(self.max) and self.min > self.max:
            yield f"min must not be longer than max, got {self.min!r} and {self.max!r}"

    def start(self) -> LatencyWindow:
        """Make the state of one pipeline, which has seen no call yet."""
        return LatencyWindow(self)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults, as in a call."""
        return f"PercentileDelay({shown(self)})"


class LatencyWindow:
    """What one pipeline has seen of a `PercentileDelay`'s calls."""

    __slots__ = ("_arrived", "_lock", "_options", "_sorted")

    def __init__(self, options: PercentileDelay) -> None:
        self._options = options
        self._lock = Lock()
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def note(self, seconds: float) -> None:
        """Note how long a call took; the oldest is forgotten for it once the window is full."""
        with self._lock:
            if len(self._arrived) >= self._options.window:
                oldest = self._arrived.popleft()
                del self._sorted[bisect_left(self._sorted, oldest)]
            self._arrived.append(seconds)
            insort(self._sorted, seconds)

    def delay(self) -> float:
        """Seconds after which a call is slow."""
        options = self._options
        with self._lock:
            seen = len(self._sorted)
            if seen < _ENOUGH:
                found = options.initial
            else:
                # Rounded, or the 55th percentile of 20 would be the 12th: 0.55 is a little more.
                rank = math.ceil(round(options.percentile * seen, 9))
                found = self._sorted[max(rank, 1) - 1]
        return min(max(found, options.min), options.max)
