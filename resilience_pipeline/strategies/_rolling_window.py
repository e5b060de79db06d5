"""How many calls succeeded and failed lately: the window a circuit breaker looks at.

Knows no clock, lock or breaker: `now` is an argument, calls come one at a time, and what the
counts mean is for others to say.

The window is a row of slices. A slice starts with the first event after the last one is full and
lasts a fixed part of the window; it is dropped as a whole once it started a window ago. An event
is therefore counted for at least the window less one slice, and at most the window.

Invariants: no more than `slices + 1` slices are kept, whatever the traffic; counting costs the same
however much is in the window; asking changes no later answer. Time that runs backwards counts as no
time: the whole window moves back with the clock, so that nothing is lost, nothing is counted twice
and nothing outlives its time by the length of the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

__all__ = ["RollingWindow"]


class RollingWindow:
    """Counts of successes and failures over the last `duration` seconds.

    Args:
        duration: Length of the window in seconds, above 0; `math.inf` never forgets.
        slices: Number of parts the window is dropped in, at least 1.
    """

    __slots__ = (
        "_duration",
        "_end",
        "_failures",
        "_past",
        "_past_failures",
        "_past_throughput",
        "_slice_length",
        "_start",
        "_successes",
    )

    def __init__(self, duration: float, slices: int = 10) -> None:
        self._duration = duration
        self._slice_length = duration / slices
        # Full slices, oldest first, as (start, throughput, failures), and their sums.
        self._past: deque[tuple[float, int, int]] = deque()
        self._past_throughput = 0
        self._past_failures = 0
        # The open slice; before the first event one that no moment falls into.
        self._start = -math.inf
        self._end = -math.inf
        self._successes = 0
        self._failures = 0

    def reset(self) -> None:
        """Forget all counts."""
        self._past.clear()
        self._past_throughput = 0
        self._past_failures = 0
        self._start = -math.inf
        self._end = -math.inf
        self._successes = 0
        self._failures = 0

    def record_success(self, now: float) -> None:
        """Count a success.

        Args:
            now: The time in seconds, on the clock that every call of this window uses.
        """
        # On the path of every call: while the slice is open this is all that happens.
        if not self._start <= now < self._end:
            self._move_to(now)
        self._successes += 1

    def record_successes(self, times: Sequence[float]) -> None:
        """Count several successes, at least one.

        Args:
            times: The time of each, in the order they came in.
        """
        if self._start <= min(times) and max(times) < self._end:
            self._successes += len(times)
        else:
            for now in times:
                self.record_success(now)

    def record_failure(self, now: float) -> None:
        """Count a failure.

        Args:
            now: The time in seconds, on the clock that every call of this window uses.
        """
        if not self._start <= now < self._end:
            self._move_to(now)
        self._failures += 1

    def counts(self, now: float) -> tuple[int, int]:
        """Tell what is in the window.

        Args:
            now: The time in seconds, on the clock that every call of this window uses.

        Returns:
            The throughput (successes and failures together) and the failures among it.
        """
        if now < self._start:
            self._step_back(now)
        elif now - self._start >= self._duration:
            self.reset()
        self._drop_old(now)
        failures = self._past_failures + self._failures
        return self._past_throughput + self._successes + self._failures, failures

    def _move_to(self, now: float) -> None:
        """Make the open slice one that takes an event at `now`."""
        if now < self._start:
            self._step_back(now)
            return
        throughput = self._successes + self._failures
        if throughput:
            self._past.append((self._start, throughput, self._failures))
            self._past_throughput += throughput
            self._past_failures += self._failures
        self._open_slice(now)
        self._successes = 0
        self._failures = 0
        self._drop_old(now)

    def _open_slice(self, now: float) -> None:
        self._start = now
        # Late on a large clock a short slice can be less than the clock's own step. Events of one
        # and the same moment share a slice even then, which keeps the number of slices bounded.
        self._end = max(now + self._slice_length, math.nextafter(now, math.inf))

    def _drop_old(self, now: float) -> None:
        past = self._past
        while past and now - past[0][0] >= self._duration:
            _, throughput, failures = past.popleft()
            self._past_throughput -= throughput
            self._past_failures -= failures

    def _step_back(self, now: float) -> None:
        """Move all slices back so that the open one starts now."""
        step = self._start - now
        self._past = deque(
            (start - step, throughput, failures) for start, throughput, failures in self._past
        )
        self._open_slice(now)
