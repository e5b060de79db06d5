"""Sources whose scripts take time by a virtual clock."""

from __future__ import annotations

from typing import Any

from resilience_pipeline.testing import VirtualClock
from support.streaming import Sources


class Pause:
    """In a timed script: seconds to wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class TimedSources(Sources):
    """Sources whose scripts may hold pauses by a virtual clock."""

    def __init__(self, clock: VirtualClock, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self._clock = clock

    async def play(self, item: object) -> bool:
        if not isinstance(item, Pause):
            return await super().play(item)
        await self._clock.sleep(item.seconds)
        return False
