"""Callables for races: each call takes its time on a virtual clock, comes to its end, and notes how."""

from __future__ import annotations

from typing import Any

from resilience_pipeline.testing import VirtualClock


class Racers:
    """A coroutine function whose n-th call waits so many seconds, then raises or returns.

    Attributes:
        starts: When each call began.
        running: How many run at the moment; `peak` is the most there ever were.
        cut: Numbers of the calls that did not come to their end, in the order in which they were cut short.
    """

    def __init__(self, clock: VirtualClock, *plans: tuple[float, Any]) -> None:
        self._clock = clock
        self._plans = plans
        self.starts: list[float] = []
        self.cut: list[int] = []
        self.running = 0
        self.peak = 0

    @property
    def calls(self) -> int:
        return len(self.starts)

    async def __call__(self, *_: object) -> Any:
        number = self.calls
        seconds, end = self._plans[min(number, len(self._plans) - 1)]
        self.starts.append(self._clock.now())
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self._clock.sleep(seconds)
        except BaseException:
            self.cut.append(number)
            raise
        finally:
            self.running -= 1
        if isinstance(end, BaseException):
            raise end
        return end
