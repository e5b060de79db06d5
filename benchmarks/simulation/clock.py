"""Time in steps: thousands of sleepers share an instant, and the virtual clock is asked once for each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

from resilience_pipeline.testing import VirtualClock

#: Instants of a second.
_RATE = 100

_ALMOST = 1 - 1e-6  # what lies less than the rest behind an instant is meant to be at it


class Timer:
    """A callback that may be taken back."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Ticks:
    """A clock for pipelines and models that moves in steps of a hundredth of a second.

    Waits end at the first step at which they are over. What falls due together comes in the order in
    which it was asked for, so a run is the same each time.
    """

    def __init__(self) -> None:
        self._clock = VirtualClock(autojump=True)
        self._number = 0
        self._now = 0.0
        self._due: dict[int, list[Timer | asyncio.Future[None]]] = {}

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if seconds < math.inf:
            self._add(self._now + seconds, woken)
        await woken

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(callback)
        if when < math.inf:
            self._add(when, timer)
        return timer

    def _add(self, when: float, entry: Timer | asyncio.Future[None]) -> None:
        number = int(when * _RATE + _ALMOST)
        if number <= self._number:
            number = self._number + 1
        due = self._due.get(number)
        if due is None:
            due = self._due[number] = []
            self._clock.call_at(number / _RATE, partial(self._go_to, number))
        due.append(entry)

    def _go_to(self, number: int) -> None:
        self._number = number
        self._now = number / _RATE
        for entry in self._due.pop(number):
            if not isinstance(entry, Timer):
                if not entry.done():  # not cancelled
                    entry.set_result(None)
            elif entry.callback is not None:
                entry.callback()
