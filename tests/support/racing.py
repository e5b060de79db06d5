"""Sources that race: scripts in virtual time, one factory for each attempt, losers that take their time."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from resilience_pipeline.testing import VirtualClock
from support.streaming import (
    Sources,
)


class After:
    """In a script: wait so many seconds of the virtual clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Timed(Sources):
    """Sources whose scripts may wait for a virtual clock; they note when they were opened and closed."""

    def __init__(self, clock: VirtualClock, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self._clock = clock
        self.opened_at: list[float] = []
        self.closed_at: list[float] = []

    async def play(self, item: object) -> bool:
        if isinstance(item, After):
            await self._clock.sleep(item.seconds)
            return False
        return await super().play(item)

    def note_open(self) -> None:
        super().note_open()
        self.opened_at.append(self._clock.now())

    def note_closed(self) -> None:
        super().note_closed()
        self.closed_at.append(self._clock.now())


class Each:
    """A factory whose n-th call is the n-th of some factories."""

    def __init__(self, *factories: Callable[[], Any]) -> None:
        self._factories = factories
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return self._factories[self.calls - 1]()


@contextmanager
def nothing_reported() -> Iterator[None]:
    """Fail if asyncio's loop is told of an error that nobody asked for."""
    reports: list[dict[str, Any]] = []
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, report: reports.append(report))
    try:
        yield
        gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert reports == []


def stubborn(clock: VirtualClock, seconds: float, log: list[str]) -> Callable[[], Any]:
    """Make a factory of sources that never speak, and take their time to go."""

    async def source() -> AsyncIterator[str]:
        try:
            await anyio.sleep_forever()
            yield ""
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(seconds)
            log.append("closed")

    return source
