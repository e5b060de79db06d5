"""An asyncio event loop whose own time jumps to the next timer, for what runs without a clock of ours."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """Nobody waits for time to pass: when nothing is ready, it is as late as the next timer wants.

    What happens outside of the loop, in threads or sockets, is waited for only when no timer is armed.
    """

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Be that much later, as a callback that blocks would have it."""
        self._now += seconds


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.jump(timeout)
        return ready
