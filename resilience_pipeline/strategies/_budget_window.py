"""What a retry budget has counted lately, and whether there is enough for one more.

Knows no clock, lock or strategy: `now` is an argument, calls come one at a time, and time never runs
backwards between them.

Firsts are what executions would have cost without any retry or hedging, extras what those add. An
extra is granted if and only if ::

    extras + 1 <= ratio * firsts + min_per_second * window

over the last `window` seconds. Both are counted in ten slices of the window. A slice starts with the
first event after the last one is full and is dropped as a whole: of firsts a window after it started,
of extras a window after the last one in it. A first is therefore counted for the window at most, an
extra for the window at least. However the events fall, no stretch of the window's length sees more
extras than the formula grants; what is lost to the slices is at most a tenth of the window.

Invariants: never more than thirteen slices of a kind, whatever the traffic; asking changes no later
answer; an extra that is given back was never there.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["BudgetWindow", "Slice"]

_SLICES = 10


class Slice:
    """Events of one slice.

    Attributes:
        start: When it started; `end` is when it is full.
        latest: The time of the last extra in it.
        count: How many there are.
        is_counted: Whether they are in the window still.
    """

    __slots__ = ("count", "end", "is_counted", "latest", "start")

    def __init__(self, start: float, end: float) -> None:
        self.start = self.latest = start
        self.end = end
        self.count = 0
        self.is_counted = True


class BudgetWindow:
    """Firsts and extras of the last `window` seconds.

    Args:
        ratio: Extras for each first, at least 0.
        min_per_second: Extras a second that need no first, at least 0.
        window: Length of the window in seconds, above 0 and finite.
    """

    __slots__ = (
        "_extra_slices",
        "_extras",
        "_first_slices",
        "_firsts",
        "_floor",
        "_per_first",
        "_unit",
        "_window",
    )

    def __init__(self, ratio: float, min_per_second: float, window: float) -> None:
        self._window = window
        self._first_slices: deque[Slice] = deque()
        self._extra_slices: deque[Slice] = deque()
        self._firsts = 0
        self._extras = 0
        # The formula in whole numbers: as floats 0.1 * 3 is more than 0.3, and 0.29 * 100 less
        # than 29.
        ratio_numerator, ratio_denominator = as_written(ratio)
        rate_numerator, rate_denominator = as_written(min_per_second)
        window_numerator, window_denominator = as_written(window)
        floor_denominator = rate_denominator * window_denominator
        self._unit = ratio_denominator * floor_denominator
        self._per_first = ratio_numerator * floor_denominator
        self._floor = rate_numerator * window_numerator * ratio_denominator

    def first(self, now: float) -> None:
        """Count a first attempt.

        Args:
            now: The time in seconds, not before that of an earlier call.
        """
        slices = self._first_slices
        # On the path of every call: while the slice is open this is all that happens.
        if slices and now < slices[-1].end:
            slices[-1].count += 1
        else:
            self._drop_old(now)
            self._count(slices, now)
        self._firsts += 1

    def spend(self, now: float) -> Slice | None:
        """Count an extra attempt, if it is granted.

        Args:
            now: The time in seconds, not before that of an earlier call.

        Returns:
            What it was counted in, to give it back to; `None` if it is refused.
        """
        self._drop_old(now)
        if (self._extras + 1) * self._unit > self._per_first * self._firsts + self._floor:
            return None
        self._extras += 1
        return self._count(self._extra_slices, now)

    def give_back(self, counted_in: Slice) -> None:
        """Take back an extra attempt that has not been made.

        Args:
            counted_in: What `spend` gave for it. Once that is out of the window there is nothing to
                take back.
        """
        if counted_in.is_counted:
            counted_in.count -= 1
            self._extras -= 1

    def is_empty(self, now: float) -> bool:
        """Whether a new window would give the same answers.

        Args:
            now: The time in seconds, not before that of an earlier call.
        """
        self._drop_old(now)
        return not self._first_slices and not self._extra_slices

    def _count(self, slices: deque[Slice], now: float) -> Slice:
        if not slices or now >= slices[-1].end:
            # Late on a large clock a short slice can be less than the clock's own step. Events of
            # one and the same moment share a slice even then, which bounds their number.
            end = max(now + self._window / _SLICES, math.nextafter(now, math.inf))
            slices.append(Slice(now, end))
        newest = slices[-1]
        newest.latest = now
        newest.count += 1
        return newest

    def _drop_old(self, now: float) -> None:
        firsts, extras, window = self._first_slices, self._extra_slices, self._window
        while firsts and now - firsts[0].start >= window:
            self._firsts -= firsts.popleft().count
        while extras and now - extras[0].latest >= window:
            dropped = extras.popleft()
            dropped.is_counted = False
            self._extras -= dropped.count


def as_written(number: float) -> tuple[int, int]:
    """Give a finite number as a fraction of whole numbers, numerator first.

    What its decimal digits say, not the binary number next to that: 0.3 is three tenths.
    """
    if isinstance(number, int):
        return number, 1
    digits, _, exponent = float.__repr__(number).partition("e")
    whole, _, decimals = digits.partition(".")
    power = int(exponent or 0) - len(decimals)
    numerator = int(whole + decimals)
    return (numerator * 10**power, 1) if power >= 0 else (numerator, 10**-power)
