"""What a call keeps while it is in flight, and that it keeps nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .bench_calls import stack, stack_by_hand, work
from .measure import Allocated, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row


async def _bytes_in_flight(
    make: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]], calls: int
) -> float:
    """Bytes a call, its task included, with so many of them in flight."""
    loop = asyncio.get_running_loop()

    async def crowd(park: asyncio.Future[None]) -> float:
        async def guarded() -> None:
            await make(parked)

        async def parked() -> None:
            await park

        with Allocated() as allocated:
            tasks = [loop.create_task(guarded()) for _ in range(calls)]
            await asyncio.sleep(0)
            taken = allocated.now()
        park.set_result(None)
        await asyncio.gather(*tasks)
        return taken / calls

    await crowd(loop.create_future())  # queues, caches and free lists have their size now
    return await crowd(loop.create_future())


async def _in_flight(settings: Settings) -> Result:
    calls = 100 if settings.quick else 2_000
    bare = await _bytes_in_flight(lambda fn: fn(), calls)
    taken = {
        OURS: await _bytes_in_flight(stack().execute, calls) - bare,
        BY_HAND: await _bytes_in_flight(stack_by_hand().run, calls) - bare,
    }
    return Result(
        cost=f"{taken[OURS]:,.0f} B",
        ratios={OURS: taken[OURS] / taken[BY_HAND]},
        checks=(Checked(Bound(1_300, "bytes"), taken[OURS]),),
    )


async def _kept(settings: Settings) -> Result:
    calls = 100 if settings.quick else 5_000
    execute = stack().execute
    for _ in range(calls):
        await execute(work)
    with Allocated() as allocated:
        for _ in range(calls):
            await execute(work)
        kept = allocated.now() / calls
    # A deadline queue's dictionary, once, is no growth; an object a call would be 16 bytes at
    # least.
    return Result(
        cost=f"{max(kept, 0.0):.1f} B",
        checks=(Checked(Bound(1, "byte"), kept if not settings.quick else 0.0),),
    )


ROWS = (
    Row("memory per call in flight, stack of four", _in_flight),
    Row("memory kept per finished call", _kept),
)
