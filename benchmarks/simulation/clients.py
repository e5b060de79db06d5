"""Those who call: some wait for their answer before they call again, some don't."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

from attrs import field, frozen

from resilience_pipeline.runtime import Clock

#: What a client does to have its call made; false if it failed.
Call = Callable[[], Awaitable[bool]]


@frozen(eq=False)
class Clients:
    """So many clients on one clock.

    Attributes:
        clock: Drives them.
        number: How many there are.
        pause: Seconds from one call of a client to its next one, on average.
        waiting: Whether the pause begins when the call has ended. Not so, a client calls at its own
            pace whatever becomes of its calls, as a program does that has users of its own.
        answered: Calls that got an answer, by the second in which they began; `failed` the others.
    """

    clock: Clock
    number: int
    pause: float
    waiting: bool = False
    seed: int = 2
    answered: Counter[int] = field(factory=Counter)
    failed: Counter[int] = field(factory=Counter)

    async def run(self, call: Call, until: float) -> None:
        """Have all of them call until it is so late, and wait for their last calls."""
        one = self._one_that_waits if self.waiting else self._one
        async with asyncio.TaskGroup() as calls:
            for number in range(self.number):
                calls.create_task(one(call, until, random.Random(self.seed + number), calls))

    async def _one(
        self, call: Call, until: float, chance: random.Random, calls: asyncio.TaskGroup
    ) -> None:
        await self._wait(chance)
        while self.clock.now() < until:
            calls.create_task(self._make(call))
            await self._wait(chance)

    async def _one_that_waits(
        self, call: Call, until: float, chance: random.Random, _: asyncio.TaskGroup
    ) -> None:
        await self._wait(chance)
        while self.clock.now() < until:
            await self._make(call)
            await self._wait(chance)

    async def _wait(self, chance: random.Random) -> None:
        await self.clock.sleep(chance.uniform(0, 2 * self.pause))

    async def _make(self, call: Call) -> None:
        began = int(self.clock.now())
        well = await call()
        (self.answered if well else self.failed)[began] += 1
