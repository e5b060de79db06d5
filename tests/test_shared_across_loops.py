"""One pipeline, many event loops: in threads at once, one after another, and loops that are gone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
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
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    SlidingWindow,
    Success,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import StepClock, boom, ok
from support.scripted import tick

Main = Callable[[], Awaitable[Any]]
Run = Callable[[Main], Any]


def on_asyncio(main: Main) -> Any:
    async def run() -> Any:
        return await main()

    return asyncio.run(run())


def on_trio(main: Main) -> Any:
    return trio.run(main)


#: What the threads of one test run: two loops of asyncio and one of trio.
RUNS: list[Run] = [on_asyncio, on_trio, on_asyncio]


def in_threads(*mains: Main) -> list[Any]:
    """Run each main in a thread and loop of its own, all at once; the first error comes out."""
    results: list[Any] = [None] * len(mains)
    errors: list[BaseException] = []
    start = threading.Barrier(len(mains))

    def body(number: int, run: Run, main: Main) -> None:
        try:
            start.wait(30)
            results[number] = run(main)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=body, args=(number, run, main), daemon=True)
        for number, (run, main) in enumerate(zip(itertools.cycle(RUNS), mains, strict=False))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a loop hangs"
    return results


@pytest.fixture
def _restless() -> Iterator[None]:
    """Have threads take turns after a few instructions: what can come between two steps does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


restless = pytest.mark.usefixtures("_restless")


class Count:
    """Counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.peak = self.done = 0

    def enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.peak = max(self.peak, self.inside)

    def leave(self) -> None:
        with self._lock:
            self.inside -= 1
            self.done += 1

    async def call(self) -> None:
        self.enter()
        await tick(3)
        self.leave()


# --- at once -----------------------------------------------------------------------------------


@restless
def test_one_permit_for_three_loops() -> None:
    """Case CL-07: each loop calls two hundred times in a row; all get in, never two at once."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, queue_limit=10).build()
    count = Count()

    async def worker() -> None:
        for _ in range(200):
            await pipeline.execute(count.call)

    in_threads(worker, worker, worker)
    assert (count.done, count.peak) == (600, 1)


@restless
@pytest.mark.parametrize("limit", [1, 3])
def test_many_tasks_of_three_loops_share_one_queue(limit: int) -> None:
    """Threads: the limit is never exceeded, everybody gets through, waiters are woken across loops."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(limit, 10_000).build()
    count = Count()

    async def worker() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(pipeline.execute, count.call)

    in_threads(worker, worker, worker)
    assert (count.done, count.peak, count.inside) == (300, limit, 0)


@restless
def test_cancelled_waiters_of_three_loops_lose_no_permit() -> None:
    """Contract: a permit handed to a waiter that is being cancelled goes to the next, in any loop."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(2, 10_000).build()
    count = Count()

    async def call() -> None:
        count.enter()
        try:
            await tick(3)
        finally:
            count.leave()

    async def one(number: int) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.execute, call)
                if number % 2:
                    await tick(number % 7)
                    scope.cancel()

    async def worker() -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(100):
                tasks.start_soon(one, number)

    in_threads(worker, worker, worker)
    assert (count.peak, count.inside) == (2, 0)

    async def afterwards() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        holders = [asyncio.create_task(pipeline.execute(event.wait)) for event in (first, second)]
        third = asyncio.create_task(pipeline.execute(ok))
        await tick()
        assert not third.done()
        first.set()
        second.set()
        assert await third == 1
        await asyncio.gather(*holders)

    asyncio.run(afterwards())


@pytest.mark.parametrize("waiting", [on_asyncio, on_trio])
@pytest.mark.parametrize("holding", [on_asyncio, on_trio])
def test_a_waiter_is_woken_by_a_release_in_another_loop(holding: Run, waiting: Run) -> None:
    """Case CL-07: through the waiter's own loop, though nothing else happens there."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, 1).build()
    inside, queued = threading.Event(), threading.Event()

    async def hold() -> None:
        inside.set()
        while not queued.is_set():  # noqa: ASYNC110 - set in another thread
            await anyio.sleep(0.001)

    async def wait() -> Any:
        async with anyio.create_task_group() as tasks:
            results: list[int] = []

            async def call() -> None:
                results.append(await pipeline.execute(ok))

            tasks.start_soon(call)
            await tick()
            assert results == []
            queued.set()
        return results

    thread = threading.Thread(target=holding, args=(lambda: pipeline.execute(hold),), daemon=True)
    thread.start()
    assert inside.wait(30)
    assert waiting(wait) == [1]
    thread.join(30)


@restless
def test_a_bucket_gives_exactly_its_permits_to_three_loops() -> None:
    """Case RL-03: check and take are one step for all threads: not one too many, not one too few."""
    pipeline = ResiliencePipelineBuilder().add_rate_limiter(TokenBucket(100, 1, per="24h")).build()

    async def worker() -> int:
        passed = 0
        for _ in range(200):
            passed += (await pipeline.settle(ok)).ok
        return passed

    assert sum(in_threads(worker, worker, worker)) == 100


@restless
@pytest.mark.parametrize(
    "limiter", [TokenBucket(2, 1000), SlidingWindow(2, "2ms"), FixedWindow(2, "2ms")], ids=repr
)
def test_waiters_of_three_loops_take_turns_at_a_rate(limiter: Any) -> None:
    """Threads: each becomes the head of one queue, woken across loops, and all get through."""
    clock_start = threading.Event()
    pipeline = ResiliencePipelineBuilder().add_rate_limiter(limiter, queue_limit=1000).build()
    started: list[float] = []

    async def call() -> None:
        started.append(0.0)

    async def worker() -> None:
        clock_start.set()
        async with anyio.create_task_group() as tasks:
            for _ in range(30):
                tasks.start_soon(pipeline.execute, call)

    in_threads(worker, worker, worker)
    assert len(started) == 90


@restless
def test_a_breakers_counts_are_exact() -> None:
    """Threads, case LT-03: no update is lost between three loops."""
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=10**9, sampling_duration="24h", control=control
        )
        .build()
    )

    async def worker() -> None:
        for number in range(1000):
            await pipeline.settle(boom if number % 4 == 0 else ok)

    in_threads(worker, worker, worker)
    assert (control.metrics.throughput, control.metrics.failures) == (3000, 750)


@restless
def test_exactly_one_of_three_loops_calls_becomes_the_probe() -> None:
    """Case LT-03: all see the end of the break at once; one reaches the service, each time."""
    clock = StepClock()
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=5, control=control
        )
        .build()
    )
    rounds, calls = 30, 10
    barrier = threading.Barrier(3)
    reached: list[int] = []
    refused: list[int] = []

    async def one(number: int) -> None:
        async def probe() -> None:
            reached.append(number)
            while len(refused) < 3 * calls * number - number + 3 * calls - 1:
                await anyio.lowlevel.checkpoint()
            raise ConnectionError

        outcome = await pipeline.settle(probe)
        if isinstance(outcome, Rejected):
            assert outcome.error.retry_after is not None
            assert outcome.error.retry_after >= 0
            refused.append(number)

    async def worker() -> None:
        for number in range(rounds):
            if barrier.wait(30) == 0:
                clock.time += 5
            barrier.wait(30)
            async with anyio.create_task_group() as tasks:
                for _ in range(calls):
                    tasks.start_soon(one, number)

    async def open_it() -> None:
        for _ in range(2):
            await pipeline.settle(boom)

    asyncio.run(open_it())
    in_threads(worker, worker, worker)
    assert reached == list(range(rounds))
    assert len(refused) == rounds * (3 * calls - 1)
    assert control.state == "open"


@restless
def test_transitions_caused_by_three_loops_are_told_in_their_order() -> None:
    """Case CB-11: what the hooks are told forms a chain: each begins where the one before ended."""
    follows: dict[Any, set[Any]] = {
        CircuitOpenedEvent: {CircuitHalfOpenedEvent},
        CircuitHalfOpenedEvent: {CircuitOpenedEvent, CircuitClosedEvent},
        CircuitClosedEvent: {CircuitOpenedEvent},
    }
    events: list[Any] = []
    pipeline = (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(
            failure_ratio=0.1,
            minimum_throughput=2,
            break_duration="1h",
            break_duration_generator=lambda event: 0.000_001,
            on_opened=events.append,
            on_closed=events.append,
            on_half_opened=events.append,
        )
        .build()
    )

    async def worker() -> None:
        for number in range(2000):
            await pipeline.settle(ok if number % 5 == 0 else boom)

    in_threads(worker, worker, worker)
    kinds = [type(event) for event in events]
    assert len(kinds) > 100
    assert kinds[0] is CircuitOpenedEvent
    for earlier, later in itertools.pairwise(kinds):
        assert later in follows[earlier]


@restless
def test_a_control_may_be_used_from_any_thread() -> None:
    """Threads: isolated and closed by hand while three loops call; afterwards all is well."""
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=2, control=control)
        .build()
    )
    over = threading.Event()

    def drive() -> None:
        while not over.is_set():
            control.isolate()
            assert control.state in {"isolated", "closed"}
            control.close()
            assert control.metrics.throughput >= 0

    async def worker() -> None:
        for _ in range(300):
            outcome = await pipeline.settle(ok)
            assert outcome == Success(1) or isinstance(outcome.error, IsolatedCircuitError)

    driver = threading.Thread(target=drive, daemon=True)
    driver.start()
    try:
        in_threads(worker, worker, worker)
    finally:
        over.set()
        driver.join(30)
    control.close()
    assert asyncio.run(_execute(pipeline)) == 1


@restless
def test_a_whole_pipeline_serves_three_loops_at_once() -> None:
    """Threads: limiter, retry, breaker, timeout and rate limit together, in every loop."""
    control = CircuitBreakerControl()
    count = Count()
    pipeline = (
        ResiliencePipelineBuilder(name="all")
        .add_concurrency_limiter(4, 1000)
        .add_retry(max_retry_attempts=3, delay=0)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=10_000, control=control)
        .add_timeout(30)
        .add_rate_limiter(TokenBucket(10_000, 10_000))
        .build()
    )

    async def call(number: int) -> int:
        await count.call()
        if number % 3 == 0 and count.done % 2:
            raise ConnectionError
        return number

    async def worker() -> list[Any]:
        outcomes: list[Any] = []

        async def one(number: int) -> None:
            outcomes.append(await pipeline.settle(call, number))

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(one, number)
        return outcomes

    for outcomes in in_threads(worker, worker, worker):
        assert len(outcomes) == 50
    assert (count.inside, count.peak) == (0, 4)
    assert control.metrics.throughput == count.done


# --- one after another -------------------------------------------------------------------------


async def _execute(pipeline: ResiliencePipeline[Any]) -> int:
    return await pipeline.execute(ok)


def test_loops_one_after_another_share_the_state() -> None:
    """No event loop at build time: made outside of any, used in four, the breaker remembers."""
    clock = StepClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_concurrency_limiter(1, 5)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration=5)
        .build()
    )
    for run in (on_asyncio, on_trio):
        assert isinstance(run(lambda: pipeline.settle(boom)).error, ConnectionError)
    for run in (on_asyncio, on_trio):
        assert isinstance(run(lambda: pipeline.settle(ok)).error, BrokenCircuitError)
    clock.time += 5
    for run in (on_trio, on_asyncio):
        assert run(lambda: pipeline.execute(ok)) == 1


def test_loops_one_after_another_queue_in_each() -> None:
    """Nothing loop-bound outlives the call: the queues work in every loop anew."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_concurrency_limiter(1, 50)
        .add_rate_limiter(TokenBucket(1, 1), queue_limit=50)
        .build()
    )

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(pipeline.execute, ok)

    for run in (on_asyncio, on_trio, on_asyncio, on_trio):
        run(main)
    assert clock.now() == 39


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_a_loop_that_ends_properly_leaves_no_waiter_behind(run: Run) -> None:
    """`asyncio.run` and trio cancel what is left: places and permits are back."""
    pipeline = (
        ResiliencePipelineBuilder()
        .add_concurrency_limiter(1, 1)
        .add_rate_limiter(TokenBucket(2, 1, per="24h"), queue_limit=1)
        .build()
    )

    async def leave_early() -> None:
        if run is on_asyncio:
            tasks = [asyncio.create_task(pipeline.execute(anyio.sleep_forever)) for _ in range(2)]
            await tick()
            assert not any(task.done() for task in tasks)
            return
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(pipeline.execute, trio.sleep_forever)
                await tick()
                scope.cancel()

    run(leave_early)
    assert run(lambda: pipeline.execute(ok)) == 1


def test_a_coroutine_hook_of_a_step_by_hand_runs_in_whatever_loop_calls_next() -> None:
    """Small print: isolated outside of any loop; the next call awaits the hook where it runs."""
    control = CircuitBreakerControl()
    told: list[bool] = []

    async def hook(event: CircuitOpenedEvent) -> None:
        await anyio.lowlevel.checkpoint()
        told.append(event.manual)

    pipeline = (
        ResiliencePipelineBuilder().add_circuit_breaker(on_opened=hook, control=control).build()
    )
    control.isolate()
    assert isinstance(on_trio(lambda: pipeline.settle(ok)).error, IsolatedCircuitError)
    assert told == [True]


# --- loops that are gone -----------------------------------------------------------------------


class Gone:
    """An asyncio loop that is closed with its tasks in the middle of what they were doing."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # Python tells of each task that is dropped unfinished; here that is the point.
        self.loop.set_exception_handler(lambda loop, context: None)
        self.tasks: list[asyncio.Task[Any]] = []

    def start(self, main: Main) -> None:
        """Start a task, and let all of them run until they wait."""

        async def run() -> Any:
            return await main()

        self.tasks.append(self.loop.create_task(run()))
        self.turn()

    def turn(self) -> None:
        self.loop.run_until_complete(tick())

    def close(self) -> None:
        self.loop.close()

    def collect(self) -> None:
        """Let go of the tasks, as their owner will at some time."""
        self.tasks.clear()
        gc.collect()


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gone]:
    loop = Gone()
    yield loop
    loop.close()
    # What Python says about coroutines that are dropped unfinished is one test's subject, not all of theirs.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    loop.collect()


def limiter(queue_limit: float, **options: Any) -> ResiliencePipeline[Any]:
    return ResiliencePipelineBuilder().add_concurrency_limiter(1, queue_limit, **options).build()


class Holder:
    """A call in a thread and loop of its own that holds a permit until it is told to let go."""

    def __init__(self, pipeline: ResiliencePipeline[Any], run: Run) -> None:
        self._inside, self._release = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=run, args=(lambda: pipeline.execute(self._hold),), daemon=True
        )
        self._thread.start()
        assert self._inside.wait(30)

    async def _hold(self) -> None:
        self._inside.set()
        while not self._release.is_set():  # noqa: ASYNC110 - set in another thread
            await anyio.sleep(0.001)

    def let_go(self) -> None:
        self._release.set()
        self._thread.join(30)
        assert not self._thread.is_alive()


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_a_waiter_of_a_closed_loop_is_skipped(gone: Gone, run: Run) -> None:
    """Rule 14: it was queued first, its loop is gone; the permit goes past it."""
    pipeline = limiter(10)
    holder = Holder(pipeline, run)
    for _ in range(3):
        gone.start(lambda: pipeline.execute(ok))
    gone.close()

    async def main() -> Any:
        async with anyio.create_task_group() as tasks:
            results: list[Any] = []

            async def call() -> None:
                results.append(await pipeline.execute(ok))

            tasks.start_soon(call)
            await tick()
            holder.let_go()
        return results

    assert run(main) == [1]
    assert run(lambda: pipeline.execute(ok)) == 1


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_waiters_of_a_closed_loop_take_no_places_in_a_full_queue(gone: Gone, run: Run) -> None:
    """Rule 14: who can never come takes nobody's place."""
    pipeline = limiter(2)
    holder = Holder(pipeline, run)
    for _ in range(2):
        gone.start(lambda: pipeline.execute(ok))
    assert isinstance(run(lambda: pipeline.settle(ok)), Rejected)
    gone.close()

    async def main() -> Any:
        results: list[Any] = []

        async def call() -> None:
            results.append(await pipeline.settle(ok))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call)
            await tick()
            assert [type(result) for result in results] == [Rejected]
            holder.let_go()
        return results

    assert run(main)[1:] == [Success(1)] * 2


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_a_permit_handed_to_a_loop_that_was_then_closed_is_not_lost(gone: Gone, run: Run) -> None:
    """Rule 3, rule 14: woken, but closed before it could run: the next call takes the permit back."""
    pipeline = limiter(1)
    holder = Holder(pipeline, run)
    gone.start(lambda: pipeline.execute(ok))
    holder.let_go()
    gone.close()
    for _ in range(3):
        assert run(lambda: pipeline.execute(ok)) == 1


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_what_is_left_of_a_dead_waiter_gives_nothing_back_twice(
    gone: Gone, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 2: its permit was taken back already when the coroutine is collected."""
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    pipeline = limiter(1)
    holder = Holder(pipeline, run)
    gone.start(lambda: pipeline.execute(ok))
    holder.let_go()
    gone.close()
    assert run(lambda: pipeline.execute(ok)) == 1
    gone.collect()
    holders = [Holder(pipeline, run)]
    other = Gone()
    other.start(lambda: pipeline.execute(ok))
    assert not other.tasks[0].done()
    assert isinstance(run(lambda: pipeline.settle(ok)), Rejected)
    other.close()
    other.collect()
    holders[0].let_go()


def test_a_call_abandoned_with_its_loop_gives_its_permit_back_when_it_is_collected() -> None:
    """Rule 2: given back exactly once, on every way out, the finaliser's too, and quietly."""
    pipeline = limiter(0)
    gone = Gone()
    gone.start(lambda: pipeline.execute(anyio.sleep_forever))
    gone.close()
    assert isinstance(on_asyncio(lambda: pipeline.settle(ok)), Rejected)
    gone.collect()
    assert on_asyncio(lambda: pipeline.settle(ok)) == Success(1)


@pytest.mark.parametrize("max_wait", [None, 3])
@pytest.mark.parametrize("run", [on_asyncio, on_trio])
def test_the_queue_of_a_rate_limiter_goes_on_without_a_closed_loop(
    gone: Gone, run: Run, max_wait: float | None
) -> None:
    """Rule 14: a dead head holds nobody up, and the dead don't make the known wait longer."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_rate_limiter(TokenBucket(1, 1), queue_limit=3, max_wait=max_wait)
        .build()
    )
    gone.loop.run_until_complete(pipeline.execute(ok))

    async def queue_up() -> None:
        for _ in range(3):
            gone.tasks.append(gone.loop.create_task(_execute(pipeline)))
        # Not a turn more: an idle loop would let the clock jump.
        await asyncio.sleep(0)

    gone.loop.run_until_complete(queue_up())
    gone.close()
    started = clock.now()

    async def main() -> list[Any]:
        results: list[Any] = []

        async def call() -> None:
            results.append(await pipeline.settle(ok))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(call)
        return results

    assert run(main) == [Success(1)] * 3
    assert clock.now() <= started + 3


def test_a_probe_of_a_closed_loop_loses_its_place(gone: Gone) -> None:
    """Case CB-15: it hangs for ever; after one more break another call may try."""
    clock = StepClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration=5)
        .build()
    )
    for _ in range(2):
        on_asyncio(lambda: pipeline.settle(boom))
    clock.time += 5
    gone.start(lambda: pipeline.execute(anyio.sleep_forever))
    gone.close()
    assert isinstance(on_asyncio(lambda: pipeline.settle(ok)), Rejected)
    clock.time += 5
    assert on_asyncio(lambda: pipeline.settle(ok)) == Success(1)
