"""Slow calls of a closed circuit: what share of the calls took longer than they may.

Pure: no lock, no clock; `now` is an argument and the user of this class holds a lock around each
call.

A call counts once: when it ends, or as a slow one when it passes the limit, whichever is first. No
timer tells when that is: whoever looks next counts all that have passed it since, at the moments at
which they did, so that calls that never come back count too.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from ._rolling_window import RollingWindow


class RunningCall:
    """The ticket of a call that is watched.

    Attributes:
        epoch: The circuit's epoch when it began.
        slow_at: Past this moment it is slow.
    """

    __slots__ = ("epoch", "slow_at")

    def __init__(self, epoch: int, slow_at: float) -> None:
        self.epoch = epoch
        self.slow_at = slow_at


class SlowCalls:
    """The calls of one circuit, running and counted.

    Args:
        duration: Seconds a call may take without being slow.
        ratio: Share of slow calls, 0 to 1, from which on there are too many.
        minimum_throughput: Calls in the window before the share counts.
        sampling_duration: Length of the window in seconds.
    """

    __slots__ = (
        "_interrupted",
        "_latest",
        "_minimum_throughput",
        "_ratio",
        "_running",
        "_window",
        "duration",
    )

    def __init__(
        self,
        *,
        duration: float,
        ratio: float,
        minimum_throughput: int,
        sampling_duration: float,
    ) -> None:
        self.duration = duration
        self._ratio = ratio
        self._minimum_throughput = minimum_throughput
        self._window = RollingWindow(sampling_duration)
        # In the order in which they began, which is that in which they become slow. No dict: taking
        # from its front over and over skips ever more dead entries.
        self._running: OrderedDict[RunningCall, None] = OrderedDict()
        self._latest = -math.inf
        #: Whether slow calls that were interrupted have been counted since somebody looked.
        self._interrupted = False

    def begin(self, epoch: int, now: float) -> RunningCall:
        """Watch a call that begins."""
        call = RunningCall(epoch, now + self.duration)
        self._running[call] = None
        return call

    def forget(self, call: RunningCall) -> None:
        """Watch a call no more; if it has not been counted it never is."""
        self._running.pop(call, None)

    def interrupt(self, call: RunningCall, now: float) -> None:
        """Watch a call no more that was cancelled; if it was slow by then it counts, else it never does.

        That is told by the next one who looks: who is cancelled has no time for it.
        """
        if self._running.pop(call, call) is None and now > call.slow_at:
            self._count(call.slow_at, slow=True)
            self._interrupted = True

    def end(self, call: RunningCall, now: float) -> bool:
        """Count a call that has ended, unless it counted before; whether it is a slow one."""
        if call not in self._running:
            return False
        del self._running[call]
        slow = now > call.slow_at
        self._count(now, slow=slow)
        return slow

    def pass_over(self, now: float) -> bool:
        """Count the running calls that have passed the limit by now; whether any has since the last look."""
        passed, self._interrupted = self._interrupted, False
        while self._running:
            call = next(iter(self._running), None)
            if call is None or now <= call.slow_at:
                break
            if self._running.pop(call, call) is call:
                continue  # the collector has closed it in between
            self._count(call.slow_at, slow=True)
            passed = True
        return passed

    def too_many(self, now: float) -> bool:
        """Whether the share of slow calls is reached."""
        throughput, slow = self._window.counts(now)
        return throughput >= self._minimum_throughput and slow / throughput >= self._ratio

    def is_idle(self, now: float) -> bool:
        """Whether nothing runs and nothing is counted."""
        return not self._running and self._window.counts(now) == (0, 0)

    def reset(self) -> None:
        """Forget everything."""
        self._running.clear()
        self._interrupted = False
        self._window.reset()

    def _count(self, when: float, *, slow: bool) -> None:
        # A window knows no past: what is noticed late counts no earlier than what is in already.
        self._latest = when = max(when, self._latest)
        if slow:
            self._window.record_failure(when)
        else:
            self._window.record_success(when)
