"""What a pipeline keeps, what a call keeps while it is in flight, and that it keeps nothing afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeAlias

from resilience_pipeline import ResiliencePipelineBuilder

from . import baselines, peer_stacks, peers
from .bench_calls import stack, stack_by_hand, work
from .measure import Allocated, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row

_Call: TypeAlias = Callable[[], Awaitable[None]]
_Decorate: TypeAlias = Callable[[_Call], Callable[[], Awaitable[object]]]
_Run: TypeAlias = Callable[[_Call], Awaitable[object]]


async def _bytes_in_flight(decorate: _Decorate, calls: int) -> float:
    """Bytes a call, its task included, with so many of them in flight."""
    loop = asyncio.get_running_loop()

    async def crowd(park: asyncio.Future[None]) -> float:
        async def parked() -> None:
            await park

        call = decorate(parked)

        async def guarded() -> None:
            await call()

        with Allocated() as allocated:
            tasks = [loop.create_task(guarded()) for _ in range(calls)]
            await asyncio.sleep(0)
            taken = allocated.now()
        park.set_result(None)
        await asyncio.gather(*tasks)
        return taken / calls

    await crowd(loop.create_future())  # queues, caches and free lists have their size now
    return await crowd(loop.create_future())


async def _under_timeout(settings: Settings) -> Result:
    ours = ResiliencePipelineBuilder().add_timeout(10).build().execute
    taken = await _in_flight(settings, ours, baselines.Timeout(10).run)
    return _sized(taken, Bound(1_300, "bytes"))


async def _in_stack(settings: Settings) -> Result:
    taken = await _in_flight(settings, stack().execute, stack_by_hand().run)
    for name, peer in peers.installed(peer_stacks.STACK).items():
        taken[name] = await _beside_bare(settings, peer)
    return _sized(taken)


async def _in_flight(settings: Settings, ours: _Run, by_hand: _Run) -> dict[str, float]:
    return {
        OURS: await _beside_bare(settings, lambda fn: partial(ours, fn)),
        BY_HAND: await _beside_bare(settings, lambda fn: partial(by_hand, fn)),
    }


async def _beside_bare(settings: Settings, decorate: _Decorate) -> float:
    """Bytes that guarding a call takes beside the call itself and its task."""
    calls = 100 if settings.quick else 2_000
    bare = await _bytes_in_flight(lambda fn: fn, calls)
    return await _bytes_in_flight(decorate, calls) - bare


async def _built(settings: Settings) -> Result:
    count = 5 if settings.quick else 100
    taken = {OURS: _bytes_each(stack, count), BY_HAND: _bytes_each(stack_by_hand, count)}
    for name, peer in peers.installed(peer_stacks.STACK).items():
        taken[name] = _bytes_each(partial(peer, work), count)
    return _sized(taken)


def _bytes_each(make: Callable[[], object], count: int) -> float:
    make()  # what is imported and cached once
    with Allocated() as allocated:
        kept = [make() for _ in range(count)]
        return allocated.now() / len(kept)


def _sized(taken: Mapping[str, float], *bounds: Bound) -> Result:
    """Make the result of sizes in bytes."""
    return Result(
        cost=f"{taken[OURS]:,.0f} B",
        sizes=taken,
        ratios={name: size / taken[BY_HAND] for name, size in taken.items()},
        checks=tuple(Checked(bound, taken[OURS]) for bound in bounds),
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
    Row("memory per pipeline, stack of four", _built),
    Row("memory per call in flight, one timeout", _under_timeout),
    Row("memory per call in flight, stack of four", _in_stack),
    Row("memory kept per finished call", _kept),
)
