"""What is simulated: pipelines between clients and a service that is down for a minute."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from attrs import evolve, frozen

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder, Retry, RetryBudget
from resilience_pipeline.runtime import Clock

from .backend import Instance, Outage, Service
from .clients import Clients
from .clock import Ticks
from .figures import Run

#: Seconds: how long a run lasts, and when the service is down.
LENGTH, DOWN, UP = 150, 30, 90

#: Seconds until an attempt is given up.
TIMEOUT = 1.0

Make: TypeAlias = Callable[[Clock], ResiliencePipeline[Exception]]


@frozen
class Setting:
    """What is around a pipeline.

    Attributes:
        outages: When each instance is down; there are as many instances.
        waiting: Whether clients wait for their answer before they call again.
        clients: How many there are; each calls once a second.
        queue: Seconds of work that an instance's queue has room for.
    """

    outages: Sequence[Outage]
    waiting: bool = False
    clients: int = 500
    queue: float = 2.0


#: A lock in its database, say: the service takes calls in and finishes none.
HANGING = Setting([Outage(DOWN, UP)] * 2)

#: The same, for clients that wait for their answer before they call again.
PATIENT = Setting([Outage(DOWN, UP)] * 2, waiting=True)

#: Nobody listens at its port.
REFUSING = Setting([Outage(DOWN, UP, refusing=True)] * 2)

#: One of its two instances goes on refusing for a while.
HALF_WELL = Setting([Outage(DOWN, UP, refusing=True), Outage(DOWN, UP + 20, refusing=True)])


#: What retries where anything does.
RETRY = Retry(max_retry_attempts=3, delay="200ms", backoff_type="exponential", use_jitter=True)


def _builder(clock: Clock) -> ResiliencePipelineBuilder:
    return ResiliencePipelineBuilder(clock=clock, random=random.Random(3).random)


def no_retries(clock: Clock) -> ResiliencePipeline[Exception]:
    return _builder(clock).add_timeout(TIMEOUT).build()


def three_retries(clock: Clock) -> ResiliencePipeline[Exception]:
    return _builder(clock).add(RETRY).add_timeout(TIMEOUT).build()


def with_budget(clock: Clock) -> ResiliencePipeline[Exception]:
    return (
        _builder(clock)
        .add(evolve(RETRY, budget=RetryBudget(ratio=0.1)))
        .add_timeout(TIMEOUT)
        .build()
    )


def with_breaker(clock: Clock, probes: int = 1) -> ResiliencePipeline[Exception]:
    return (
        _builder(clock)
        .add(evolve(RETRY, max_retry_after=0))  # an open circuit is not waited for
        .add_circuit_breaker(
            failure_ratio=0.3,
            minimum_throughput=50,
            sampling_duration=5,
            break_duration=2,
            half_open_probes=probes,
        )
        .add_timeout(TIMEOUT)
        .build()
    )


def with_ten_probes(clock: Clock) -> ResiliencePipeline[Exception]:
    return with_breaker(clock, probes=10)


#: By the names that the pictures give them.
THROUGH_AN_OUTAGE: Mapping[str, Make] = {
    "no retries": no_retries,
    "three retries": three_retries,
    "retries with a budget": with_budget,
    "retries with a breaker": with_breaker,
}
RECOVERING: Mapping[str, Make] = {
    "budget, no breaker": with_budget,
    "breaker, one trial call": with_breaker,
    "breaker, ten trial calls": with_ten_probes,
}


def run(make: Make, setting: Setting) -> Run:
    """Simulate one pipeline, which all clients share, between them and the service."""
    collecting = gc.isenabled()
    gc.disable()  # calls leave no cycles, and looking for them is a quarter of the time
    try:
        return asyncio.run(_run(make, setting))
    finally:
        if collecting:
            gc.enable()


async def _run(make: Make, setting: Setting) -> Run:
    clock = Ticks()
    share = setting.clients / len(setting.outages)
    instances = [
        Instance(
            clock,
            # They can do a fifth more than what the clients ask for.
            workers=round(share * 0.06),
            service_time=0.05,
            queue=round(share * 1.2 * setting.queue),
            outage=outage,
        )
        for outage in setting.outages
    ]
    service = Service(clock, instances)
    clients = Clients(clock, setting.clients, pause=1.0, waiting=setting.waiting)
    pipeline = make(clock)

    async def call() -> bool:
        return (await pipeline.settle(service.call)).ok

    await clients.run(call, LENGTH)
    return Run.of(service.arrivals, clients.answered, clients.failed, LENGTH)
