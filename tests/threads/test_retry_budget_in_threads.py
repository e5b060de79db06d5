"""One retry budget for threads and event loops at once: exact whoever comes in between, and hedges left in threads.

Threads take turns after a few instructions here, and begin together.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import trio

from resilience_pipeline import (
    ResilienceContext,
    ResiliencePipelineBuilder,
    RetryBudget,
    RetryEvent,
    Strategy,
    TokenBucket,
    current_context,
)
from resilience_pipeline._context import ExecutionMark
from resilience_pipeline.strategies import Handler, Site
from support.beside import PATIENCE, Gate, see, until
from support.calls import BoomError
from support.inside import StepClock

B = ResiliencePipelineBuilder

THREADS = 16


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Have threads take turns after a few instructions: what can come between two steps does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def at_once(*bodies: Callable[[], object]) -> None:
    """Run each in a thread of its own, from one moment on; what one raises comes out."""
    start, errors = threading.Barrier(len(bodies)), list[BaseException]()

    def run(body: Callable[[], object]) -> None:
        try:
            start.wait(PATIENCE)
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


class Fails:
    """Fails each time, and counts exactly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.calls = 0

    def __call__(self) -> NoReturn:
        with self._lock:
            self.calls += 1
        raise BoomError

    async def in_loop(self) -> NoReturn:
        self()


def only(extras: int) -> RetryBudget:
    """A budget of so many extras, for longer than a test takes."""
    return RetryBudget(ratio=0, min_per_second=extras / 100_000, window=100_000)


def left(budget: RetryBudget) -> int:
    """How many extras there are; afterwards there are none."""
    fails = Fails()
    B().add_retry(max_retry_attempts=math.inf, delay=0, budget=budget).build().settle_sync(fails)
    return fails.calls - 1


# ---- exact under stress ---------------------------------------------------------------------------


def test_sixteen_threads_make_exactly_what_is_granted() -> None:
    """3,200 failing calls, of which each would like three more attempts, and 1,000 extras."""
    fails, budget = Fails(), only(1_000)
    pipeline = B().add_retry(delay=0, budget=budget).build()

    def body() -> None:
        for _ in range(200):
            pipeline.settle_sync(fails)

    at_once(*[body] * THREADS)
    assert fails.calls == THREADS * 200 + 1_000
    assert left(budget) == 0


def test_firsts_are_counted_exactly() -> None:
    """A tenth of 3,201 is 320: what was not spent in the run is there afterwards, and no more."""
    fails, budget = Fails(), RetryBudget(ratio=0.1, min_per_second=0, window=100_000)
    pipeline = B().add_retry(delay=0, max_retry_attempts=1, budget=budget).build()

    def body() -> None:
        for _ in range(200):
            pipeline.settle_sync(fails)

    at_once(*[body] * THREADS)
    assert fails.calls - THREADS * 200 + left(budget) == 320


def test_what_is_given_back_is_counted_exactly() -> None:
    """Half of the retries are kept from starting by their hook; all of theirs can be had again."""
    fails, budget = Fails(), only(500)

    def hook(event: RetryEvent) -> None:
        if event.context.operation_key == "never again":
            raise RuntimeError

    pipeline = B().add_retry(delay=0, on_retry=hook, budget=budget).build()

    def body() -> None:
        for _ in range(50):
            pipeline.settle_sync(fails)
            pipeline.settle_sync(fails, operation_key="never again")

    at_once(*[body] * THREADS)
    assert fails.calls - THREADS * 100 + left(budget) == 500


def test_threads_asyncio_and_trio_share_it_exactly() -> None:
    """Eight threads, four loops of asyncio and one of trio, through two pipelines, retry and hedging."""
    fails, budget = Fails(), only(400)
    retry = B().add_retry(delay=0, budget=budget).build()
    hedging = B().add_hedging(delay=-1, budget=budget).build()

    def in_thread() -> None:
        for _ in range(30):
            retry.settle_sync(fails)
            hedging.settle_sync(fails)

    async def in_loop() -> None:
        for _ in range(30):
            await retry.settle(fails.in_loop)
            await hedging.settle(fails.in_loop)

    at_once(
        *[in_thread] * 8,
        *[lambda: asyncio.run(in_loop())] * 4,
        lambda: trio.run(in_loop),
    )
    assert fails.calls - 13 * 60 + left(budget) == 400


def test_an_execution_is_new_to_each_once() -> None:
    """Sixteen threads ask for two counters: each is told so once."""
    for _ in range(200):
        mark, counters, told = ExecutionMark(), (object(), object()), list[object]()

        def body(mark: ExecutionMark = mark, counters: Any = counters, told: Any = told) -> None:
            told.extend(counter for counter in counters if mark.is_new_to(counter))

        at_once(*[body] * 4)
        assert sorted(map(id, told)) == sorted(map(id, counters))


def test_attempts_side_by_side_are_one_first() -> None:
    """Hedged attempts in threads get to the retry inside at once; the execution counts once."""
    budget = RetryBudget(ratio=0.1, min_per_second=0, window=100_000)
    together = threading.Barrier(3)

    class Meets:
        def try_acquire(self, now: float) -> float:
            together.wait(PATIENCE)
            return 0.0

    pipeline = (
        B()
        .add_hedging(max_hedged_attempts=2, delay=0)
        .add_rate_limiter(Meets())
        .add_retry(delay=0, budget=budget)
        .build()
    )
    for _ in range(9):
        pipeline.execute_sync(int)
        until(lambda: together.n_waiting == 0)
    assert left(budget) == 1


class Slow(StepClock):
    """A clock that makes a thread wait for its answer once, if it is `whom`."""

    def __init__(self) -> None:
        super().__init__()
        self.whom = 0
        self.asked, self.go = threading.Event(), threading.Event()

    def now(self) -> float:
        if threading.get_ident() == self.whom:
            self.whom = 0
            self.asked.set()
            see(self.go)
        return super().now()


class FirstIsSlow(Strategy[Any]):
    """Has the first attempt come to what is inside first, and the clock be slow for it there."""

    def __init__(self, clock: Slow) -> None:
        self._clock = clock
        self.left = threading.Event()

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            if context.attempt:
                see(self._clock.asked)
                return await next(context)
            self._clock.whom = threading.get_ident()
            try:
                return await next(context)
            finally:
                self.left.set()

        return handle


@pytest.mark.parametrize("key", [None, lambda event: "key"], ids=["one", "keyed"])
def test_no_attempt_goes_on_before_its_execution_is_counted(key: Any) -> None:
    """However long another one, in another thread, that came to the budget first takes to count it."""
    clock = Slow()
    slow = FirstIsSlow(clock)
    budget = RetryBudget(ratio=1, min_per_second=0, key=key)
    retry = B(clock=clock).add_hedging(delay=0).add(slow).add_retry(delay=0, budget=budget)
    failures = [BoomError()]

    def fn() -> str:
        if failures:
            raise failures.pop()
        return "by its extra"

    try:
        assert retry.build().execute_sync(fn) == "by its extra"
    finally:
        clock.go.set()
    see(slow.left)


# ---- hedges that are left in their threads --------------------------------------------------------


def test_a_loser_that_runs_on_is_charged_also_when_it_has_ended() -> None:
    """It reached the callback."""
    budget, gate = only(1), Gate("late")

    def fn() -> object:
        if current_context().attempt:
            return gate()
        see(gate.entered)
        return "first"

    pipeline = B().add_hedging(delay=0.001, budget=budget).build()
    assert pipeline.execute_sync(fn) == "first"
    assert left(budget) == 0
    gate.opened.set()
    see(gate.left)
    assert left(budget) == 0


def test_a_loser_that_runs_on_under_a_time_limit_is_charged() -> None:
    """There the callback runs in a thread beyond the loser's own."""
    budget, gate = only(1), Gate("late")

    def fn() -> object:
        if current_context().attempt:
            return gate()
        see(gate.entered)
        return "first"

    pipeline = B().add_hedging(delay=0.001, budget=budget).add_timeout(60).build()
    assert pipeline.execute_sync(fn) == "first"
    assert left(budget) == 0
    gate.opened.set()
    see(gate.left)
    assert left(budget) == 0


def test_a_loser_in_a_queue_is_given_back_at_once() -> None:
    """It never reached the callback, and never will."""
    budget = only(1)
    inside, queued = threading.Event(), threading.Event()

    class Queue:
        """Grants one, and tells when somebody queues."""

        bucket = TokenBucket(1, 0.0001).start()

        def try_acquire(self, now: float) -> float:
            wait = self.bucket.try_acquire(now)
            if wait:
                queued.set()
            return wait

    def fn() -> str:
        inside.set()
        see(queued)
        return "first"

    pipeline = (
        B()
        .add_hedging(delay=0, budget=budget, on_hedging=lambda _: see(inside))
        .add_rate_limiter(Queue(), queue_limit=1)
        .build()
    )
    assert pipeline.execute_sync(fn) == "first"
    assert left(budget) == 1
