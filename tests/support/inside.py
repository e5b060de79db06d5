"""Callbacks that tests of limiters and circuit breakers look into: who is inside, and until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from resilience_pipeline import ResiliencePipeline, Success


async def ok() -> int:
    return 1


async def boom() -> int:
    raise ConnectionError("boom")


class Room:
    """A coroutine function in which each call stays until it is let out by the name it was given.

    Attributes:
        entered: Names in the order in which they came in.
        left: Names in the order in which they went out, whatever the way.
        inside: How many are in at the moment.
        peak: The most there ever were.
    """

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.left: list[Any] = []
        self.inside = 0
        self.peak = 0
        self._doors: dict[Any, anyio.Event] = {}
        self._errors: dict[Any, Exception] = {}

    async def __call__(self, name: Any = None) -> Any:
        self.entered.append(name)
        self.inside += 1
        self.peak = max(self.peak, self.inside)
        door = self._doors[name] = anyio.Event()
        try:
            await door.wait()
        finally:
            self._doors.pop(name, None)
            self.inside -= 1
            self.left.append(name)
        if name in self._errors:
            raise self._errors.pop(name)
        return name

    @property
    def names(self) -> list[Any]:
        """Who is inside, first come first."""
        return list(self._doors)

    def let_out(self, name: Any = None, error: Exception | None = None) -> None:
        """Have a call return its name, or raise `error`."""
        if error is not None:
            self._errors[name] = error
        self._doors[name].set()

    def let_all_out(self) -> None:
        """Have all calls that are inside return."""
        for name in self.names:
            self.let_out(name)


async def free_permits(pipeline: ResiliencePipeline[Any], at_most: int = 20) -> int:
    """Count how many calls a pipeline lets in at once; its queue, if it has one, is not used."""
    inside = 0
    refused = anyio.Event()

    async def stay() -> None:
        nonlocal inside
        inside += 1
        await refused.wait()

    async def enter() -> None:
        if not isinstance(await pipeline.settle(stay), Success):
            refused.set()

    async with anyio.create_task_group() as tasks:
        for number in range(at_most):
            tasks.start_soon(enter)
            for _ in range(5):
                await anyio.lowlevel.checkpoint()
            if refused.is_set() or inside <= number:
                break
        refused.set()
        found = inside
        tasks.cancel_scope.cancel()
    return found


class StepClock:
    """A clock that shows what the test has set it to, and on which nobody waits."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing waits {seconds} s here")

    def call_at(self, when: float, callback: Callable[[], object]) -> Any:
        raise AssertionError(f"nothing is to happen at {when} here")
