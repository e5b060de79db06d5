"""A service: instances with so many workers and a queue each, and times at which they are down."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence

from attrs import field, frozen

from resilience_pipeline.runtime import Clock


@frozen
class Outage:
    """A time during which nothing is worked on.

    Attributes:
        start: When it begins, in seconds.
        end: When it is over.
        refusing: Whether calls are refused meanwhile. Otherwise the service hangs: calls are taken
            in, as long as there is room in the queue, and wait.
    """

    start: float
    end: float
    refusing: bool = False

    def has(self, moment: float) -> bool:
        return self.start <= moment < self.end


@frozen(eq=False)
class Instance:
    """One instance: `workers` that each take `service_time` a call, first come first served.

    What its caller has given up on is worked on all the same, as in most services there are: they
    find out when they write the answer.

    Attributes:
        clock: Drives it.
        workers: Calls that are worked on at once.
        service_time: Seconds that each takes, but for an outage that comes in between.
        queue: Calls that may wait; further ones are refused.
        outage: When it is down.
        refusal_time: Seconds after which a call that is refused fails.
    """

    clock: Clock
    workers: int
    service_time: float
    queue: int
    outage: Outage
    refusal_time: float = 0.01
    _free_at: list[float] = field(init=False)
    #: When each of the calls that are here will be done with.
    _done_at: deque[float] = field(init=False, factory=deque)

    @_free_at.default
    def _all_free(self) -> list[float]:
        return [0.0] * self.workers

    async def call(self) -> None:
        """Have a call worked on.

        Raises:
            ConnectionError: It was refused.
        """
        now = self.clock.now()
        if (self.outage.refusing and self.outage.has(now)) or self._is_full(now):
            await self.clock.sleep(self.refusal_time)
            raise ConnectionError
        done = self._end_of_work_from(max(now, self._free_at[0]))
        heapq.heapreplace(self._free_at, done)
        self._done_at.append(done)
        await self.clock.sleep(done - now)

    def _is_full(self, now: float) -> bool:
        here = self._done_at
        while here and here[0] <= now:
            here.popleft()
        return len(here) >= self.workers + self.queue

    def _end_of_work_from(self, begin: float) -> float:
        outage = self.outage
        if outage.has(begin):
            begin = outage.end
        end = begin + self.service_time
        return end + (outage.end - outage.start) * (begin < outage.start < end)


@frozen(eq=False)
class Service:
    """Instances behind a balancer, which gives each call to one of them by chance.

    Attributes:
        clock: Drives it.
        instances: The instances.
        arrivals: Calls by the second in which they came.
    """

    clock: Clock
    instances: Sequence[Instance]
    seed: int = 1
    arrivals: Counter[int] = field(factory=Counter)
    _chance: random.Random = field(init=False)

    @_chance.default
    def _seeded(self) -> random.Random:
        return random.Random(self.seed)

    async def call(self) -> None:
        """Have a call worked on.

        Raises:
            ConnectionError: It was refused.
        """
        self.arrivals[int(self.clock.now())] += 1
        await self.instances[int(self._chance.random() * len(self.instances))].call()
