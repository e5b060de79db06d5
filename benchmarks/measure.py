"""The method: how a figure comes about.

Only ratios within one run mean anything, because a machine's speed wanders by a quarter within
seconds. It also has other things to do, so what is read is the time that the processor gave this
process (all threads), not the time that passed: nothing that is measured sleeps. Everything that is compared is timed in *interleaved*
rounds, in random order within a round, the bare call before and after each of them, and what is
reported are medians of the ratios of single rounds. The garbage collector is off while a sample
runs and tidies up between samples.

Nothing here knows what is measured.
"""

from __future__ import annotations

import gc
import math
import random
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping
from statistics import median
from time import process_time
from typing import Self, TypeAlias

from attrs import frozen

#: Makes so many calls, one after another. Written out as a loop, so that nothing but the call and
#: the loop itself is in the figure.
Loop: TypeAlias = Callable[[int], Awaitable[object]]


@frozen(kw_only=True)
class Settings:
    """How thoroughly to measure.

    Attributes:
        rounds: Samples of each contender.
        sample: Seconds that a sample shall last.
        quick: Whether to shrink whatever else takes long: for trying out that everything works.
        random: Draws the order within a round.
    """

    rounds: int = 25
    sample: float = 0.02
    quick: bool = False
    random: random.Random

    @classmethod
    def thorough(cls, rounds: int = 25) -> Settings:
        return cls(rounds=rounds, random=random.Random())

    @classmethod
    def smoke(cls) -> Settings:
        return cls(rounds=1, sample=0.001, quick=True, random=random.Random())


@frozen(kw_only=True)
class Timings:
    """What a comparison gave: nanoseconds of a call, sample by sample, a round per index.

    Attributes:
        bare: The bare call, as it was around each contender.
        times: The contenders, by name.
    """

    bare: Mapping[str, tuple[float, ...]]
    times: Mapping[str, tuple[float, ...]]

    def ns(self, name: str) -> float:
        """Median nanoseconds of a call."""
        return median(self.times[name])

    def least(self, name: str) -> float:
        """Fewest nanoseconds of a call: whatever else the machine did has only added to it."""
        return min(self.times[name])

    def in_bare_calls(self, name: str) -> float:
        """Median of a contender's ratios to the bare call around it."""
        return median(map(_divide, self.times[name], self.bare[name]))

    def ratio(self, name: str, other: str) -> float:
        """Median of the ratios of two contenders within a round."""
        return median(map(_divide, self.times[name], self.times[other]))

    def over(self, name: str, other: str) -> float:
        """Median of the nanoseconds by which one contender is slower within a round."""
        return median(map(_subtract, self.times[name], self.times[other]))


def _divide(a: float, b: float) -> float:
    return a / b


def _subtract(a: float, b: float) -> float:
    return a - b


async def compare(bare: Loop, contenders: Mapping[str, Loop], settings: Settings) -> Timings:
    """Time contenders side by side.

    Args:
        bare: The yardstick: what all contenders do, and nothing around it.
        contenders: The loops, by name.
        settings: How thoroughly.
    """
    counts = {name: await _calibrated(loop, settings.sample) for name, loop in contenders.items()}
    bare_count = max(1, await _calibrated(bare, settings.sample) // 4)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    around: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(settings.rounds):
        settings.random.shuffle(order)
        for name in order:
            before = await _sample(bare, bare_count)
            times[name].append(await _sample(contenders[name], counts[name]))
            after = await _sample(bare, bare_count)
            around[name].append((before + after) / 2)
    return Timings(
        bare={name: tuple(samples) for name, samples in around.items()},
        times={name: tuple(samples) for name, samples in times.items()},
    )


async def _calibrated(loop: Loop, seconds: float) -> int:
    """Find how many calls make a sample; warms everything up on the way."""
    count = 1
    while True:
        taken = await _sample(loop, count) * count / 1e9
        if taken >= seconds / 2 or count >= 1 << 24:
            return max(1, math.ceil(count * seconds / max(taken, 1e-9)))
        count *= 2


async def _sample(loop: Loop, count: int) -> float:
    """Nanoseconds of a call, from so many of them."""
    gc.collect()
    gc.disable()
    try:
        started = process_time()
        await loop(count)
        return (process_time() - started) / count * 1e9
    finally:
        gc.enable()


def repeat(fn: Callable[[], Awaitable[object]]) -> Loop:
    """Make the loop of `await fn()`."""

    async def loop(count: int) -> None:
        for _ in range(count):
            await fn()

    return loop


def repeat_with(
    fn: Callable[[Callable[[], Awaitable[object]]], Awaitable[object]],
    call: Callable[[], Awaitable[object]],
) -> Loop:
    """Make the loop of `await fn(call)`."""

    async def loop(count: int) -> None:
        for _ in range(count):
            await fn(call)

    return loop


class Allocated:
    """Bytes that are allocated and stay, between two moments.

    Example:
        >>> with Allocated() as allocated:
        ...     kept = make()
        ...     allocated.now()
    """

    def __enter__(self) -> Self:
        gc.collect()
        tracemalloc.start()
        self._start = tracemalloc.get_traced_memory()[0]
        return self

    def now(self) -> int:
        """Bytes since the block was entered, what is garbage not counted."""
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - self._start

    def __exit__(self, *_: object) -> None:
        tracemalloc.stop()
