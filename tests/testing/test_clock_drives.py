"""Virtual time drives every wait, limit and window of a pipeline: those that a reader of the contract would try."""

from __future__ import annotations

import math
import threading
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    FixedWindow,
    PercentileDelay,
    RateLimiterRejectedError,
    ResiliencePipelineBuilder,
    SlidingWindow,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline.runtime._here import run
from resilience_pipeline.testing import VirtualClock, Wait, flaky
from support.scripted import Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder


def jumping() -> VirtualClock:
    return VirtualClock(autojump=True)


# ---- by itself ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_retry_delays() -> None:
    clock = jumping()
    fn = Scripted(*[ConnectionError] * 3, "page", clock=clock)
    pipeline = B(clock=clock).add_retry(delay="1h", backoff_type="exponential").build()
    outcome = await pipeline.settle(fn)
    assert fn.starts == [0, 3600, 10800, 25200]
    assert [attempt.delay for attempt in outcome.attempts] == [0, 3600, 7200, 14400]


@pytest.mark.anyio
async def test_max_elapsed() -> None:
    clock = jumping()
    fn = Scripted(ConnectionError, clock=clock)
    pipeline = B(clock=clock).add_retry(max_retry_attempts=9, delay=40, max_elapsed=100).build()
    assert isinstance(await raised_by(pipeline.execute, fn), ConnectionError)
    assert fn.starts == [0, 40, 80]


@pytest.mark.anyio
async def test_time_limits() -> None:
    clock = jumping()
    pipeline = B(clock=clock).add_timeout("1h").build()
    assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert clock.now() == 3600


@pytest.mark.anyio
async def test_generated_time_limits() -> None:
    clock = jumping()
    pipeline = B(clock=clock).add_timeout(1, timeout_generator=lambda event: "1h").build()
    assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert clock.now() == 3600


@pytest.mark.anyio
async def test_hedging_delays() -> None:
    clock = jumping()
    fn = Scripted("page", clock=clock, takes=5000)
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=1000).build()
    assert await pipeline.execute(fn) == "page"
    assert fn.starts == [0, 1000, 2000]
    assert clock.now() == 5000


@pytest.mark.anyio
async def test_learnt_hedging_delays() -> None:
    """What is learnt is how long calls took by this clock."""
    clock = jumping()
    fn = Scripted("page", clock=clock, takes=100)
    delay = PercentileDelay(0.5, initial=1000)
    pipeline = B(clock=clock).add_hedging(delay_generator=delay).build()
    for _ in range(20):
        await pipeline.execute(fn)
    slow = Scripted("page", clock=clock, takes=500)
    await pipeline.execute(slow)
    assert slow.calls == 2
    assert slow.starts[1] - slow.starts[0] == pytest.approx(100, rel=0.1)


@pytest.mark.anyio
async def test_breaks_and_sampling_windows() -> None:
    clock = jumping()
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1,
            minimum_throughput=2,
            sampling_duration=60,
            break_duration="1h",
            control=control,
        )
        .build()
    )
    await pipeline.settle(Scripted(ConnectionError))
    await clock.sleep(60)  # the window has moved on
    states: list[str] = []
    for _ in range(2):
        await pipeline.settle(Scripted(ConnectionError))
        states.append(control.state)
    assert states == ["closed", "open"]
    refused = await raised_by(pipeline.execute, Scripted("page"))
    assert isinstance(refused, BrokenCircuitError)
    assert refused.retry_after == 3600
    await clock.sleep(3600)
    assert await pipeline.execute(Scripted("page")) == "page"
    states.append(control.state)
    assert states[2:] == ["closed"]


@pytest.mark.parametrize(
    "limiter",
    [TokenBucket(1, 1, per="1h"), FixedWindow(1, "1h"), SlidingWindow(1, "1h", segments=1)],
)
@pytest.mark.anyio
async def test_rate_limits_and_their_queues(limiter: Any) -> None:
    clock = jumping()
    queueing = B(clock=clock).add_rate_limiter(limiter, queue_limit=5).build()
    fn = Scripted("page", clock=clock)
    for _ in range(3):
        await queueing.execute(fn)
    assert fn.starts == [0, 3600, 7200]
    refusing = B(clock=clock).add_rate_limiter(limiter).build()
    await refusing.execute(fn)
    refused = await raised_by(refusing.execute, fn)
    assert isinstance(refused, RateLimiterRejectedError)
    assert refused.retry_after == 3600
    await clock.sleep(3600)
    await refusing.execute(fn)


@pytest.mark.anyio
async def test_bounds_of_streams() -> None:
    """The first chunk, the gap between chunks, and the whole."""
    clock = jumping()
    pipeline = B(clock=clock).add_timeout(100).build()
    late = pipeline.execute_stream(flaky([Wait(200), "late"]))
    assert isinstance(await raised_by(late.__anext__), TimeoutRejectedError)
    assert clock.now() == 100
    idle = pipeline.execute_stream(flaky(["first", Wait(200), "late"]), idle_timeout=50)
    assert await idle.__anext__() == "first"
    assert isinstance(await raised_by(idle.__anext__), TimeoutRejectedError)
    assert clock.now() == 150
    endless = pipeline.execute_stream(flaky([Wait(30, "chunk")] * 5), total_timeout=70)
    assert [await endless.__anext__() for _ in range(2)] == ["chunk"] * 2
    assert isinstance(await raised_by(endless.__anext__), TimeoutRejectedError)
    assert clock.now() == 220


@pytest.mark.anyio
async def test_time_in_the_queue_of_a_concurrency_limiter() -> None:
    clock = jumping()
    pipeline = B(clock=clock).add_concurrency_limiter(1, 1, max_wait="1h").build()
    leave = anyio.Event()

    async def stay() -> None:
        await leave.wait()

    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, stay)
        await tick()
        refused = await raised_by(pipeline.execute, Scripted("page"))
        assert isinstance(refused, ConcurrencyLimiterRejectedError)
        assert clock.now() == 3600
        leave.set()


@pytest.mark.anyio
async def test_latency_of_chaos() -> None:
    clock = jumping()
    pipeline = B(clock=clock).add_chaos_latency("1h", injection_rate=1).build()
    assert await pipeline.execute(Scripted("page")) == "page"
    assert clock.now() == 3600


# ---- by hand ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_all_of_them_at_once() -> None:
    """Each falls due in its time, in order, and tasks run in between."""
    clock = VirtualClock()
    log: list[tuple[str, float]] = []

    async def settle(name: str, builder: ResiliencePipelineBuilder[Any], fn: Any) -> None:
        await builder.build().settle(fn)
        log.append((name, clock.now()))

    limited = B(clock=clock).add_rate_limiter(TokenBucket(1, 1, per=7), queue_limit=1)
    async with anyio.create_task_group() as tasks:
        for name, builder, fn in (
            ("latency", B(clock=clock).add_chaos_latency(9, injection_rate=1), Scripted("page")),
            ("retry", B(clock=clock).add_retry(delay=3), Scripted(ConnectionError, "page")),
            ("timeout", B(clock=clock).add_timeout(5), Hanging()),
            ("hedging", B(clock=clock).add_hedging(delay=1), flaky(Wait(math.inf), then="page")),
        ):
            tasks.start_soon(settle, name, builder, fn)
        pipeline = limited.build()
        await pipeline.execute(Scripted("page"))
        queued = spawn(tasks, pipeline.execute, Scripted("page"))
        await clock.advance(4)
        assert log == [("hedging", 1), ("retry", 3)]
        await clock.advance(2.5)
        assert log[2:] == [("timeout", 5)]
        assert not queued.done
        await clock.advance(0.5)
        assert queued.done
        await clock.advance(100)
        assert log[3:] == [("latency", 9)]
    assert clock.now() == 107


def test_by_hand_with_threads() -> None:
    """A thread that waits on the clock is let go on when another one moves that."""
    clock = VirtualClock()
    fn = flaky(ConnectionError, then="page")
    pipeline = B(clock=clock).add_retry(delay=30).build()
    started = threading.Event()
    results: list[Any] = []

    def call() -> None:
        def first() -> Any:
            started.set()
            return fn()

        results.append(pipeline.execute_sync(first))

    thread = threading.Thread(target=call)
    thread.start()
    assert started.wait(30)

    def move(seconds: float) -> int:
        run(clock.advance(seconds))  # waits until the thread waits
        return len(fn.calls)

    mover = B(clock=clock).build()
    assert mover.execute_sync(move, 29) == 1
    assert mover.execute_sync(move, 1) == 2
    thread.join(30)
    assert results == ["page"]


def test_by_hand_from_a_loop_for_threads() -> None:
    """The loop that moves the clock wakes the thread, which goes on by itself."""
    clock = VirtualClock()
    fn = flaky(ConnectionError, then="page")
    pipeline = B(clock=clock).add_retry(delay=30).build()

    async def main() -> Any:
        async with anyio.create_task_group() as tasks:
            call = spawn(tasks, anyio.to_thread.run_sync, pipeline.execute_sync, fn)
            while not clock.pending:  # until the thread waits
                await anyio.lowlevel.checkpoint()
            await clock.advance(29)
            assert len(fn.calls) == 1
            await clock.advance(1)
        return call.value

    assert anyio.run(main) == "page"
    assert len(fn.calls) == 2


# ---- a synchronous call in a task --------------------------------------------------------------


@pytest.mark.anyio
async def test_a_synchronous_call_that_blocks_its_loop_is_driven() -> None:
    """Nothing of the loop moves before it returns, so nobody waits for that."""
    await anyio.wait_all_tasks_blocked()  # there is one
    clock = jumping()
    pipeline = B(clock=clock).add_retry(delay=5).add_timeout(10).build()
    assert pipeline.execute_sync(flaky(Wait("1h"), ConnectionError, "page")) == "page"
    assert clock.now() == 20


@pytest.mark.anyio
async def test_tasks_of_a_loop_that_is_blocked_do_not_hold_it_up() -> None:
    """They wake when the call has returned, at whatever time it is by then."""
    clock = jumping()
    pipeline = B(clock=clock).add_timeout(10).build()
    woken: list[float] = []

    async def sleeper() -> None:
        await clock.sleep(3)
        woken.append(clock.now())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sleeper)
        await tick(3)
        assert isinstance(pipeline.settle_sync(flaky(Wait("1h"))).error, TimeoutRejectedError)
        assert woken == []
    assert woken == [10]


@pytest.mark.anyio
async def test_a_synchronous_call_may_sleep_on_the_clock_in_a_task() -> None:
    await anyio.wait_all_tasks_blocked()
    clock = jumping()
    pipeline = B(clock=clock).build()
    pipeline.execute_sync(lambda: run(clock.sleep(7)))
    assert clock.now() == 7


@pytest.mark.anyio
async def test_the_task_that_goes_on_after_a_synchronous_call_is_at_work() -> None:
    """The clock does not jump because the call has ended: it jumps when the task waits."""
    clock = jumping()
    pipeline = B(clock=clock).add_retry(delay=5).build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 100)
        await tick(3)
        assert pipeline.execute_sync(flaky(ConnectionError, "page")) == "page"
        assert clock.now() == 5
    assert clock.now() == 100


@pytest.mark.anyio
async def test_a_loop_that_waits_for_nothing_any_more_holds_up_no_thread() -> None:
    """Its last sleeper was cancelled while a thread waited for the loop to be idle."""
    clock = jumping()
    pipeline = B(clock=clock).add_retry(delay=50).build()
    started, go_on = threading.Event(), threading.Event()
    fn = flaky(ConnectionError, "page")
    results: list[Any] = []

    def first() -> Any:
        started.set()
        go_on.wait()
        return fn()

    thread = threading.Thread(target=lambda: results.append(pipeline.execute_sync(first)))
    thread.start()
    started.wait()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(clock.sleep, 100)
        while not clock.pending:
            await tick(1)
        go_on.set()
        while clock.pending < 2 and clock.now() == 0:
            pass  # this loop is busy until the thread waits
        tasks.cancel_scope.cancel()
    await anyio.to_thread.run_sync(thread.join)
    assert results == ["page"]
    assert clock.now() == 50
