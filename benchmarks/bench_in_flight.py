"""Many calls at once under one time limit: whether a call gets dearer by what else is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from resilience_pipeline import ResiliencePipelineBuilder

from . import measure
from .measure import Loop, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row

_FEW, _MANY = 10, 10_000

_Park: TypeAlias = "asyncio.Future[None]"


async def _bare(park: _Park) -> None:
    await park


async def _by_hand(park: _Park) -> None:
    async with asyncio.timeout(10):
        await park


def _ours() -> Callable[[_Park], Awaitable[None]]:
    pipeline = ResiliencePipelineBuilder().add_timeout(10).build()

    async def call(park: _Park) -> None:
        await pipeline.execute(_bare, park)

    return call


def _crowded(call: Callable[[_Park], Awaitable[None]], crowd: int) -> Loop:
    """Make a loop whose calls are all in flight together, `crowd` at a time."""

    async def guest(park: _Park) -> None:
        await call(park)

    async def loop(count: int) -> None:
        event_loop = asyncio.get_running_loop()
        for _ in range(-(-count // crowd)):
            park = event_loop.create_future()
            tasks: list[asyncio.Task[Any]] = [
                event_loop.create_task(guest(park)) for _ in range(crowd)
            ]
            event_loop.call_soon(park.set_result, None)
            await asyncio.wait(tasks)

    return loop


async def _in_flight(settings: Settings) -> Result:
    kinds = {"bare": _bare, BY_HAND: _by_hand, OURS: _ours()}
    loops = {
        f"{name}, {crowd:,} in flight": _crowded(call, crowd)
        for name, call in kinds.items()
        for crowd in (_FEW, _MANY)
    }
    # A sample takes in the whole crowd at least once, so every sample has that many calls.
    whole = {name: _in_crowds(loop) for name, loop in loops.items()}
    timings = await measure.compare(_in_crowds(_crowded(_bare, _FEW)), whole, settings)
    few, many = (f"{OURS}, {crowd:,} in flight" for crowd in (_FEW, _MANY))
    growth = timings.ratio(many, few)
    return Result(
        cost=f"× {growth:.2f} of {_FEW}",
        ns={name: timings.ns(name) / _MANY for name in loops},
        checks=(Checked(Bound(1.3, "× of 10 in flight"), growth),),
    )


def _in_crowds(loop: Loop) -> Loop:
    return lambda count: loop(count * _MANY)


ROWS = (Row("10,000 calls in flight under one timeout", _in_flight),)
