"""Many calls at once: whether a call gets dearer by what else is in flight."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import evolve, frozen

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder, SlidingWindow

from . import measure
from .measure import Loop, Settings, Timings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row

#: How many calls are in flight together.
SIZES = (10, 100, 1_000, 10_000, 100_000)

#: How many the contract speaks of.
_BOUNDED = 10_000

BARE = "bare"

#: Calls of a sample, at least: as many crowds as that takes.
_CALLS = 2_000

_Park: TypeAlias = "asyncio.Future[None]"
_Guest: TypeAlias = Callable[[_Park], Awaitable[None]]


async def _bare(park: _Park) -> None:
    await park


def _through(pipeline: ResiliencePipeline[Exception]) -> _Guest:
    async def call(park: _Park) -> None:
        await pipeline.execute(_bare, park)

    return call


def _timeout() -> Mapping[str, _Guest]:
    async def by_hand(park: _Park) -> None:
        async with asyncio.timeout(10):
            await park

    return {OURS: _through(ResiliencePipelineBuilder().add_timeout(10).build()), BY_HAND: by_hand}


def _permits() -> Mapping[str, _Guest]:
    return {OURS: _through(ResiliencePipelineBuilder().add_concurrency_limiter(1_000_000).build())}


def _queue() -> Mapping[str, _Guest]:
    semaphore = asyncio.Semaphore(1)

    async def by_hand(park: _Park) -> None:
        async with semaphore:
            await park

    builder = ResiliencePipelineBuilder().add_concurrency_limiter(1, math.inf)
    return {OURS: _through(builder.build()), BY_HAND: by_hand}


def _window() -> Mapping[str, _Guest]:
    window = SlidingWindow(1_000_000_000, "1s")
    return {OURS: _through(ResiliencePipelineBuilder().add_rate_limiter(window).build())}


def _keys() -> Mapping[str, _Guest]:
    """Make a limiter for each call: as many keys as calls are in use, and all of them come and go."""
    numbers = itertools.count()
    builder = ResiliencePipelineBuilder()
    return {OURS: _through(builder.add_concurrency_limiter(1, key=lambda _: next(numbers)).build())}


def _stack() -> Mapping[str, _Guest]:
    builder = (
        ResiliencePipelineBuilder()
        .add_concurrency_limiter(1_000_000)
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker()
        .add_timeout(10)
    )
    return {OURS: _through(builder.build())}


def _crowded(call: _Guest, crowd: int) -> Loop:
    """Make a loop whose calls are all in flight together, `crowd` at a time, `_CALLS` at least."""
    crowds = made(crowd) // crowd

    async def guest(park: _Park) -> None:
        await call(park)

    async def loop(count: int) -> None:
        event_loop = asyncio.get_running_loop()
        for _ in range(count * crowds):
            park = event_loop.create_future()
            tasks: list[asyncio.Task[Any]] = [
                event_loop.create_task(guest(park)) for _ in range(crowd)
            ]
            event_loop.call_soon(park.set_result, None)
            await asyncio.wait(tasks)

    return loop


@frozen
class Growing:
    """The row of one way to be in flight."""

    guests: Callable[[], Mapping[str, _Guest]]
    bound: Bound | None = None

    def loops(self, size: int) -> dict[str, Loop]:
        """Make the loops of so many in flight; each counts in steps of `made(size)` calls."""
        guests = {BARE: _bare, **self.guests()}
        return {name: _crowded(guest, size) for name, guest in guests.items()}

    async def __call__(self, settings: Settings) -> Result:
        sizes = SIZES[:2] if settings.quick else SIZES
        loops = {size: self.loops(size) for size in sizes}
        # A hundred thousand calls take a second: few rounds are enough for samples that long.
        fewer = evolve(settings, rounds=min(settings.rounds, 3))
        named = {
            f"{name}, {size}": loop for size, some in loops.items() for name, loop in some.items()
        }
        timings = await measure.compare(_crowded(_bare, sizes[0]), named, fewer)
        growth = {name: _growth(timings, name, sizes) for name in loops[sizes[0]]}
        few, *_, many = (size for size in sizes if size <= _BOUNDED)
        bounded = growth[OURS][str(many)] / growth[OURS][str(few)]
        return Result(
            cost=f"× {bounded:.2f} of 10",
            growth=growth,
            checks=() if self.bound is None else (Checked(self.bound, bounded),),
        )


def _growth(timings: Timings, name: str, sizes: Sequence[int]) -> dict[str, float]:
    """Nanoseconds of a call by the number in flight."""
    return {str(size): timings.least(f"{name}, {size}") / made(size) for size in sizes}


def made(crowd: int) -> int:
    """How many calls a crowd's loop makes for a count of one."""
    return crowd * -(-_CALLS // crowd)


ROWS = (
    Row(
        "10,000 calls in flight under one timeout",
        Growing(_timeout, Bound(1.3, "× of 10 in flight")),
    ),
    Row("10,000 calls in flight in a concurrency limiter", Growing(_permits)),
    Row("10,000 calls waiting in its queue", Growing(_queue)),
    Row("10,000 calls in flight in a sliding window", Growing(_window)),
    Row("10,000 calls in flight in a limiter, a key each", Growing(_keys)),
    Row("10,000 calls in flight in the stack of four", Growing(_stack)),
)
