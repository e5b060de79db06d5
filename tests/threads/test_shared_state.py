"""One pipeline for threads and event loops at once: what they share is exact, whoever comes in between.

Threads take turns after a few instructions here, and begin together.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
import trio

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    FixedWindow,
    IsolatedCircuitError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    SlidingWindow,
    Success,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import StepClock
from support.scripted import tick

B = ResiliencePipelineBuilder
Body: TypeAlias = Callable[[], object]
#: Does one call, from within a loop: by `execute` or `settle` of a coroutine function.
Call: TypeAlias = Callable[[], Awaitable[object]]

THREADS = 16
PATIENCE = 30.0


@pytest.fixture(autouse=True)
def _restless() -> Iterator[None]:
    """Have threads take turns after a few instructions: what can come between two steps does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


class Crowd:
    """Threads that begin together; what one of them raises comes out of `join`."""

    def __init__(self, *bodies: Body, together: bool = True) -> None:
        self._errors: list[BaseException] = []
        self._start = threading.Barrier(len(bodies)) if together else None
        self.results: list[Any] = [None] * len(bodies)
        self._threads = [
            threading.Thread(target=self._run, args=(number, body), daemon=True)
            for number, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, body: Body) -> None:
        try:
            if self._start is not None:
                self._start.wait(PATIENCE)
            self.results[number] = body()
        except BaseException as error:
            self._errors.append(error)

    def join(self) -> list[Any]:
        for thread in self._threads:
            thread.join(PATIENCE)
        if self._errors:
            raise self._errors[0]
        assert not any(thread.is_alive() for thread in self._threads), "a thread hangs"
        return self.results


def at_once(*bodies: Body) -> list[Any]:
    return Crowd(*bodies).join()


def in_asyncio(call: Call, times: int, tasks: int = 1) -> Body:
    """Make calls in some tasks of a loop of asyncio's own; gives what each call gave."""

    async def worker() -> list[object]:
        return [await call() for _ in range(times)]

    async def main() -> list[object]:
        groups = await asyncio.gather(*(worker() for _ in range(tasks)))
        return [each for group in groups for each in group]

    return lambda: asyncio.run(main())


def in_trio(call: Call, times: int, tasks: int = 1) -> Body:
    """Do the same in a run of trio's."""
    given: list[object] = []

    async def worker() -> None:
        for _ in range(times):
            given.append(await call())

    async def main() -> list[object]:
        async with trio.open_nursery() as nursery:
            for _ in range(tasks):
                nursery.start_soon(worker)
        return given

    return lambda: trio.run(main)


def in_thread(call: Body, times: int) -> Body:
    return lambda: [call() for _ in range(times)]


def everywhere(sync: Body, call: Call, times: int) -> list[Body]:
    """Sixteen threads, four loops of asyncio in as many, and one of trio, of three tasks each."""
    return [
        *[in_thread(sync, times)] * THREADS,
        *(in_asyncio(call, times, tasks=3) for _ in range(4)),
        in_trio(call, times, tasks=3),
    ]


#: How many callers `everywhere` makes.
CALLERS = THREADS + 5 * 3


class Count:
    """Who is inside, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.peak = self.done = 0

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            self.done += 1

    def touch(self) -> None:
        with self:
            time.sleep(0)  # lets others run

    async def touch_in_loop(self) -> None:
        with self:
            await tick(2)


class Doors:
    """Plain calls that stay inside until all are let out."""

    def __init__(self, expected: int = 1) -> None:
        self.all_in = threading.Barrier(expected + 1)
        self.open = threading.Event()

    def __call__(self) -> int:
        self.all_in.wait(PATIENCE)
        assert self.open.wait(PATIENCE)
        return 1


def bound(pipeline: ResiliencePipeline[Any]) -> Any:
    """The only strategy of a pipeline, with its state."""
    return pipeline._head.__self__  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until other threads have brought something about."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"still not: {condition}"
        time.sleep(0.0005)


def yes() -> int:
    return 1


async def yes_in_loop() -> int:
    return 1


# ---- breaker ------------------------------------------------------------------------------------


def counted_breaker(
    control: CircuitBreakerControl, clock: StepClock, **options: Any
) -> ResiliencePipeline[Any]:
    """Make a breaker that counts for ever, and opens only if the options say so."""
    defaults: dict[str, Any] = {
        "failure_ratio": 1,
        "minimum_throughput": 10**9,
        "sampling_duration": 1e6,
    }
    return B(clock=clock).add_circuit_breaker(control=control, **(defaults | options)).build()


def test_no_count_of_a_breaker_is_lost() -> None:
    """Shared state: throughput and failures are those counted by hand, over threads and loops."""
    control = CircuitBreakerControl()
    pipeline = counted_breaker(control, StepClock())
    times = 200
    number = iter(range(10**9))

    def work() -> int:
        if next(number) % 3 == 0:
            raise ConnectionError
        return 1

    async def work_in_loop() -> int:
        await tick(1)
        return work()

    outcomes = at_once(
        *everywhere(
            lambda: pipeline.settle_sync(work), lambda: pipeline.settle(work_in_loop), times
        )
    )
    oks = [outcome.ok for each in outcomes for outcome in each]
    assert len(oks) == CALLERS * times
    metrics = control.metrics
    assert (metrics.throughput, metrics.failures) == (len(oks), oks.count(False))


def test_a_window_that_rolls_on_meanwhile_loses_nothing_of_what_it_still_holds() -> None:
    """Case LT-03: slices are rotated under those who count."""
    clock = StepClock()
    control = CircuitBreakerControl()
    pipeline = counted_breaker(control, clock, sampling_duration=1000)
    lock = threading.Lock()

    def work() -> int:
        with lock:
            clock.time += 0.5  # all together they stay within the window
        return 1

    at_once(*[in_thread(lambda: pipeline.execute_sync(work), 100) for _ in range(THREADS)])
    assert control.metrics.throughput == THREADS * 100


def test_exactly_one_of_32_threads_is_the_probe_again_and_again() -> None:
    """Case LT-03: whoever sees the break end takes the one place in the same step."""
    clock = StepClock()
    control = CircuitBreakerControl()
    pipeline = counted_breaker(control, clock, minimum_throughput=2, break_duration=1)
    rounds, crowd = 100, 32
    start = threading.Barrier(crowd + 1)
    refused = threading.Semaphore(0)
    done = threading.Barrier(crowd + 1)
    reached: list[int] = []

    def probe(number: int) -> int:
        reached.append(number)
        for _ in range(crowd - 1):
            assert refused.acquire(timeout=PATIENCE)
        return number

    def body() -> None:
        for number in range(rounds):
            start.wait(PATIENCE)
            try:
                pipeline.execute_sync(probe, number)
            except BrokenCircuitError:
                refused.release()
            done.wait(PATIENCE)

    def fail() -> None:
        raise ConnectionError

    threads = Crowd(*[body] * crowd, together=False)
    states: list[str] = []
    for _ in range(rounds):
        for _ in range(2):
            pipeline.settle_sync(fail)
        states.append(control.state)
        clock.time += 1
        start.wait(PATIENCE)
        done.wait(PATIENCE)
        states.append(control.state)
    threads.join()
    assert states == ["open", "closed"] * rounds
    assert reached == list(range(rounds))


def test_a_probe_in_a_thread_is_the_only_one_for_the_loops_too() -> None:
    """Half-open, the place is one for all worlds."""
    clock = StepClock()
    pipeline = counted_breaker(CircuitBreakerControl(), clock, minimum_throughput=2)

    def fail() -> None:
        raise ConnectionError

    for _ in range(2):
        pipeline.settle_sync(fail)
    clock.time += 5
    doors = Doors()
    probe = Crowd(lambda: pipeline.execute_sync(doors))
    doors.all_in.wait(PATIENCE)
    outcomes = at_once(
        in_asyncio(lambda: pipeline.settle(yes_in_loop), 1),
        in_trio(lambda: pipeline.settle(yes_in_loop), 1),
        in_thread(lambda: pipeline.settle_sync(yes), 1),
    )
    assert [type(each[0].error) for each in outcomes] == [BrokenCircuitError] * 3
    doors.open.set()
    assert probe.join() == [1]


#: Which hooks may follow which.
FOLLOWS: dict[type, set[type]] = {
    CircuitOpenedEvent: {CircuitHalfOpenedEvent},
    CircuitHalfOpenedEvent: {CircuitOpenedEvent, CircuitClosedEvent},
    CircuitClosedEvent: {CircuitOpenedEvent},
}


def test_hooks_of_transitions_form_a_chain() -> None:
    """Hooks in transition order: each begins where the one before ended, whichever thread or loop caused it."""
    events: list[Any] = []
    pipeline = (
        B()
        .add_circuit_breaker(
            failure_ratio=0.1,
            minimum_throughput=2,
            break_duration="1h",
            break_duration_generator=lambda event: 0.0,
            on_opened=events.append,
            on_half_opened=events.append,
            on_closed=events.append,
        )
        .build()
    )
    number = iter(range(10**9))

    def work() -> int:
        if next(number) % 5:
            raise ConnectionError
        return 1

    async def work_in_loop() -> int:
        return work()

    at_once(
        *everywhere(lambda: pipeline.settle_sync(work), lambda: pipeline.settle(work_in_loop), 50)
    )
    kinds = [type(event) for event in events]
    assert kinds[0] is CircuitOpenedEvent
    assert len(kinds) > 20
    for earlier, later in pairwise(kinds):
        assert later in FOLLOWS[earlier]


def test_a_control_isolates_for_all_worlds_at_once() -> None:
    """After `isolate()` has returned nobody gets in, in whatever thread or loop."""
    control = CircuitBreakerControl()
    pipeline = counted_breaker(control, StepClock())
    is_isolated = threading.Event()
    late: list[bool] = []

    def work() -> None:
        late.append(is_isolated.is_set())

    async def work_in_loop() -> None:
        work()

    def sync() -> bool:
        isolated = is_isolated.is_set()
        error = pipeline.settle_sync(work).error
        return not isolated or isinstance(error, IsolatedCircuitError)

    async def call() -> bool:
        isolated = is_isolated.is_set()
        error = (await pipeline.settle(work_in_loop)).error
        return not isolated or isinstance(error, IsolatedCircuitError)

    def isolate() -> bool:
        wait_for(lambda: len(late) > 50)
        control.isolate()
        is_isolated.set()
        return True

    results = at_once(isolate, *everywhere(sync, call, 60))
    assert all(all(each) for each in results[1:])


# ---- concurrency limiter ------------------------------------------------------------------------


def test_case_cl_07_one_permit_for_asyncio_trio_and_a_thread() -> None:
    """Case CL-07: each calls two hundred times in a row; all get in, never two at once."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=10).build()
    count = Count()
    at_once(
        in_asyncio(lambda: pipeline.execute(count.touch_in_loop), 200),
        in_trio(lambda: pipeline.execute(count.touch_in_loop), 200),
        in_thread(lambda: pipeline.execute_sync(count.touch), 200),
    )
    assert (count.done, count.peak) == (600, 1)


@pytest.mark.parametrize("limit", [1, 5])
def test_the_limit_holds_for_threads_and_loops_together(limit: int) -> None:
    """No overshoot, everybody gets in, and all permits are back at the end."""
    pipeline = B().add_concurrency_limiter(limit, queue_limit=10_000).build()
    count = Count()
    times = 20
    at_once(
        *everywhere(
            lambda: pipeline.execute_sync(count.touch),
            lambda: pipeline.execute(count.touch_in_loop),
            times,
        )
    )
    assert count.done == CALLERS * times
    assert count.peak <= limit
    assert (bound(pipeline).free, len(bound(pipeline)._queue)) == (limit, 0)


def test_without_a_queue_every_refusal_finds_the_permits_taken() -> None:
    """What was let in and what was refused add up, and all permits are back."""
    pipeline = B().add_concurrency_limiter(3).build()
    count = Count()
    outcomes = at_once(
        *everywhere(
            lambda: pipeline.settle_sync(count.touch),
            lambda: pipeline.settle(count.touch_in_loop),
            30,
        )
    )
    assert sum(isinstance(each, Success) for group in outcomes for each in group) == count.done
    assert count.peak <= 3
    assert bound(pipeline).free == 3


def test_waiters_who_run_out_of_time_lose_no_permit() -> None:
    """A permit that is handed over in the moment in which the wait ends is used or passed on."""
    pipeline = B().add_concurrency_limiter(2, queue_limit=10_000, max_wait=1e-5).build()
    count = Count()
    outcomes = at_once(
        *everywhere(
            lambda: pipeline.settle_sync(count.touch),
            lambda: pipeline.settle(count.touch_in_loop),
            20,
        )
    )
    assert sum(each.ok for group in outcomes for each in group) == count.done
    assert count.peak <= 2
    assert (bound(pipeline).free, len(bound(pipeline)._queue)) == (2, 0)


def test_threads_and_tasks_of_any_loop_are_served_in_the_order_of_their_arrival() -> None:
    """First come first served, between two threads, two loops of asyncio and one of trio."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=100).build()
    queue = bound(pipeline)._queue
    served: list[int] = []
    doors = Doors()
    holder = Crowd(lambda: pipeline.execute_sync(doors))
    doors.all_in.wait(PATIENCE)

    async def arrive_in_loop(number: int) -> None:
        async def work() -> None:
            served.append(number)

        await pipeline.execute(work)

    worlds: list[Callable[[int], object]] = [
        lambda number: pipeline.execute_sync(served.append, number),
        lambda number: asyncio.run(arrive_in_loop(number)),
        lambda number: trio.run(arrive_in_loop, number),
        lambda number: asyncio.run(arrive_in_loop(number)),
        lambda number: pipeline.execute_sync(served.append, number),
    ]
    crowds: list[Crowd] = []
    for number in range(3 * len(worlds)):
        world = worlds[number % len(worlds)]
        crowds.append(Crowd(lambda world=world, number=number: world(number)))  # type: ignore[misc]
        wait_for(lambda number=number: len(queue) == number + 1)  # type: ignore[misc]
    doors.open.set()
    for crowd in [holder, *crowds]:
        crowd.join()
    assert served == list(range(3 * len(worlds)))


@pytest.mark.parametrize("waiting", ["asyncio", "trio", "a thread"])
@pytest.mark.parametrize("holding", ["asyncio", "trio", "a thread"])
def test_a_waiter_is_woken_by_a_release_in_another_world(holding: str, waiting: str) -> None:
    """A wake-up goes through the waiter's own door, from whichever world."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    is_held = threading.Event()
    queue = bound(pipeline)._queue

    def hold() -> None:
        is_held.set()
        wait_for(lambda: len(queue) == 1)

    async def hold_in_loop() -> None:
        hold()

    def bodies(plain: Callable[[], Any], in_loop: Callable[[], Awaitable[Any]]) -> dict[str, Body]:
        return {
            "asyncio": in_asyncio(lambda: pipeline.execute(in_loop), 1),
            "trio": in_trio(lambda: pipeline.execute(in_loop), 1),
            "a thread": in_thread(lambda: pipeline.execute_sync(plain), 1),
        }

    holder = Crowd(bodies(hold, hold_in_loop)[holding])
    assert is_held.wait(PATIENCE)
    waiter = Crowd(bodies(yes, yes_in_loop)[waiting])
    holder.join()
    assert waiter.join() == [[1]]


def test_permits_of_attempts_that_ran_on_are_back_when_they_have_ended() -> None:
    """A call that timed out keeps its permit; sixteen of them give all sixteen back, once each."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_concurrency_limiter(THREADS).add_timeout(5).build()
    doors = Doors(THREADS)

    def body() -> bool:
        return pipeline.settle_sync(doors).ok

    crowd = Crowd(*[body] * THREADS)
    doors.all_in.wait(PATIENCE)
    wait_for(lambda: clock.pending == THREADS)
    asyncio.run(clock.advance(5))
    assert crowd.join() == [False] * THREADS
    assert bound(pipeline).free == 0
    doors.open.set()
    wait_for(lambda: bound(pipeline).free == THREADS)


# ---- rate limiter -------------------------------------------------------------------------------

LIMITS: dict[str, Any] = {
    "bucket": TokenBucket(10, 10, per="1s"),
    "fixed window": FixedWindow(10, "1s"),
    "sliding window": SlidingWindow(10, "1s"),
}
every_limit = pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)


@every_limit
def test_case_rl_03_a_limit_grants_exactly_what_it_promises_at_one_instant(limit: Any) -> None:
    """Case RL-03: ten of some thousand simultaneous calls, from threads and loops, pass."""
    pipeline = B(clock=StepClock()).add_rate_limiter(limit).build()
    outcomes = at_once(
        *everywhere(lambda: pipeline.settle_sync(yes), lambda: pipeline.settle(yes_in_loop), 50)
    )
    assert sum(outcome.ok for each in outcomes for outcome in each) == 10


@every_limit
def test_case_rl_03_over_time_a_limit_grants_no_more_than_it_promises(limit: Any) -> None:
    """Case RL-03: 16 threads, a hundred calls each: what passes is what the elapsed time allows."""
    clock = StepClock()
    pipeline = B(clock=clock).add_rate_limiter(limit).build()
    lock = threading.Lock()
    granted: list[float] = []

    def call() -> None:
        with lock:
            clock.time += 1 / 512
        pipeline.settle_sync(lambda: granted.append(clock.time))

    at_once(*[in_thread(call, 100) for _ in range(THREADS)])
    elapsed = clock.time
    assert elapsed == THREADS * 100 / 512
    windows = 10 * (int(elapsed) + 1)
    assert len(granted) <= (10 + 10 * elapsed if isinstance(limit, TokenBucket) else windows)
    # All the time somebody asks, so that nothing that was promised is lost either.
    assert len(granted) >= 10 * int(elapsed)


def test_threads_in_a_rate_limiters_queue_are_served_in_order_and_at_its_pace() -> None:
    """Waiters wait on the virtual clock, first come first served, one permit a second."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_rate_limiter(TokenBucket(1, 1), queue_limit=100).build()
    queue = bound(pipeline)._queue
    served: list[tuple[int, float]] = []
    crowds: list[Crowd] = []

    def serve(number: int) -> None:
        served.append((number, clock.now()))

    def all_arrive() -> None:
        pipeline.execute_sync(serve, 0)
        for number in range(1, 9):
            crowds.append(Crowd(lambda number=number: pipeline.execute_sync(serve, number)))  # type: ignore[misc]
            wait_for(lambda number=number: len(queue) == number)  # type: ignore[misc]

    # Within a call on its clock, which stands still until that has ended.
    B(clock=clock).build().execute_sync(all_arrive)
    for crowd in crowds:
        crowd.join()
    assert served == [(number, float(number)) for number in range(9)]


# ---- all together -------------------------------------------------------------------------------


def test_a_whole_pipeline_serves_all_worlds_at_once() -> None:
    """Retry, breaker and limiter under threads, asyncio and trio: every call ends, every count is exact."""
    control = CircuitBreakerControl()
    count = Count()
    lock = threading.Lock()
    tries = 0
    pipeline = (
        B()
        .add_retry(max_retry_attempts=3, delay=0)
        .add_concurrency_limiter(4, queue_limit=10_000)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=10**9, sampling_duration=1e6, control=control
        )
        .build()
    )

    def work() -> int:
        nonlocal tries
        with count, lock:
            tries += 1
            if tries % 3 == 0:
                raise ConnectionError
        return 1

    async def work_in_loop() -> int:
        return work()

    outcomes = at_once(
        *everywhere(lambda: pipeline.settle_sync(work), lambda: pipeline.settle(work_in_loop), 20)
    )
    settled = [each for group in outcomes for each in group]
    assert len(settled) == CALLERS * 20
    assert sum(each.attempt_count for each in settled) == tries
    assert control.metrics.throughput == tries
    assert control.metrics.failures == tries // 3
    assert count.peak <= 4
