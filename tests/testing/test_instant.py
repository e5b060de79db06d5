"""`instant`: waits that take no time. What fails here would hang, and is ended by the limit of each test."""

from __future__ import annotations

import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    FixedWindow,
    ResiliencePipelineBuilder,
    RetryEvent,
    SlidingWindow,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline._cancellation import Cancelled
from resilience_pipeline.runtime._here import run
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.testing import VirtualClock, instant
from support.scripted import Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder


def failing(times: int) -> Scripted:
    return Scripted(*[ConnectionError] * times, "page")


# ---- what takes no time -------------------------------------------------------------------------


@pytest.mark.anyio
async def test_retry_delays_take_no_time_and_are_listed() -> None:
    """In seconds and in order."""
    pipeline = B().add_retry(delay="1h", backoff_type="exponential").build()
    with instant() as waits:
        assert await pipeline.execute(failing(3)) == "page"
    assert waits == [3600, 7200, 14400]


@pytest.mark.anyio
async def test_pipelines_built_before_and_within_are_reached() -> None:
    before = B().add_retry(delay="1h").build()
    with instant() as waits:
        within = B().add_retry(delay="2h").build()
        await before.execute(failing(1))
        await within.execute(failing(1))
    assert waits == [3600, 7200]


@pytest.mark.parametrize("autojump", [True, False])
@pytest.mark.anyio
async def test_pipelines_with_a_clock_are_reached(autojump: bool) -> None:
    """Also with one that nobody moves; it stands still."""
    clock = VirtualClock(autojump=autojump)
    with instant() as waits:
        await B(clock=clock).add_retry(delay="1h").build().execute(failing(2))
    assert waits == [3600, 3600]
    assert clock.now() == 0


@pytest.mark.anyio
async def test_what_a_server_asks_for_is_listed() -> None:
    """The wait as it would have been, however it came about."""

    def generator(event: Any) -> float | None:
        return 7.5 if event.attempt == 1 else None

    pipeline = B().add_retry(delay=600, max_delay=500, delay_generator=generator).build()
    with instant() as waits:
        await pipeline.execute(failing(2))
    assert waits == [500, 7.5]


@pytest.mark.anyio
async def test_events_and_history_show_the_delay_all_the_same() -> None:
    events: list[RetryEvent] = []
    pipeline = B().add_retry(delay="1h", on_retry=events.append).build()
    with instant():
        outcome = await pipeline.settle(failing(1))
    assert [event.delay for event in events] == [3600]
    assert [attempt.delay for attempt in outcome.attempts] == [0, 3600]


@pytest.mark.anyio
async def test_a_wait_of_nothing_is_not_listed() -> None:
    with instant() as waits:
        await B().add_retry(delay=0).build().execute(failing(3))
    assert waits == []


@pytest.mark.anyio
async def test_very_long_waits_end_too() -> None:
    """A back-off that has grown beyond all bounds, but not to infinity."""
    pipeline = B().add_retry(max_retry_attempts=60, delay=1, backoff_type="exponential").build()
    with instant() as waits:
        assert await pipeline.execute(failing(60)) == "page"
    assert waits[-1] == 2.0**59


@pytest.mark.anyio
async def test_latency_of_chaos_takes_no_time() -> None:
    with instant() as waits:
        pipeline = B().add_chaos_latency("1h", injection_rate=1).build()
        assert await pipeline.execute(Scripted("page")) == "page"
    assert waits == [3600]


@pytest.mark.anyio
async def test_a_strategy_of_ones_own_is_reached() -> None:
    """As far as it waits through its context's runtime."""

    class Slow(Strategy[Any]):
        name = "slow"

        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            async def handle(context: Any) -> Any:
                await context.runtime.sleep(3600)
                return await next(context)

            return handle

    with instant() as waits:
        assert await B().add(Slow()).build().execute(Scripted("page")) == "page"
    assert waits == [3600]


@pytest.mark.anyio
async def test_streams_are_reached() -> None:
    attempts = 0

    async def source() -> AsyncIterator[int]:
        nonlocal attempts
        attempts += 1
        yield 1
        if attempts < 3:
            raise ConnectionError
        yield 2

    pipeline = B().add_retry(delay="1h", resumable=True).build()
    with instant() as waits:
        async with pipeline.execute_stream(source) as stream:
            assert [chunk async for chunk in stream] == [1, 2]
    assert waits == [3600, 3600]


# ---- queues -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limiter",
    [TokenBucket(1, 1, per="1h"), FixedWindow(1, "1h"), SlidingWindow(1, "1h", segments=1)],
)
@pytest.mark.anyio
async def test_a_rate_limiters_queue_takes_no_time(limiter: Any) -> None:
    """Whoever waits is let in after its wait, although no time has passed for the limit."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_rate_limiter(limiter, queue_limit=math.inf).build()
    fn = Scripted("page")
    with instant() as waits:
        for _ in range(3):
            assert await pipeline.execute(fn) == "page"
    assert waits == [3600, 3600]


@pytest.mark.anyio
async def test_callers_in_a_queue_keep_their_order() -> None:
    pipeline = B().add_rate_limiter(TokenBucket(1, 1, per="1h"), queue_limit=10).build()
    order: list[int] = []

    async def call(number: int) -> None:
        async def fn() -> None:
            order.append(number)

        await pipeline.execute(fn)

    with instant() as waits:
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(call, number)
                await tick()
    assert order == [0, 1, 2, 3]
    assert len(waits) == 3


@pytest.mark.anyio
async def test_a_limit_of_ones_own_is_asked_once_more_at_most() -> None:
    """One that answers the same for ever is not asked for ever."""

    class Full:
        asked = 0

        def try_acquire(self, now: float) -> float:
            self.asked += 1
            return 3600.0

    limiter = Full()
    pipeline = B().add_rate_limiter(limiter, queue_limit=1).build()
    with instant() as waits:
        assert await pipeline.execute(Scripted("page")) == "page"
    assert waits == [3600]
    assert limiter.asked == 2


@pytest.mark.anyio
async def test_max_wait_refuses_as_ever() -> None:
    """A wait known to be too long is none."""
    pipeline = (
        B().add_rate_limiter(TokenBucket(1, 1, per="1h"), queue_limit=1, max_wait="1m").build()
    )
    with instant() as waits:
        assert await pipeline.execute(Scripted("page")) == "page"
        error = await raised_by(pipeline.execute, Scripted("page"))
    assert type(error).__name__ == "RateLimiterRejectedError"
    assert waits == []


@pytest.mark.anyio
async def test_a_concurrency_limiters_queue_moves_when_somebody_leaves() -> None:
    """That is no matter of time, so nothing is listed, and the limit holds."""
    pipeline = B().add_concurrency_limiter(1, 1, max_wait="1h").build()
    leave = anyio.Event()
    inside = Scripted("page")

    async def stay() -> None:
        await leave.wait()

    with instant() as waits:
        async with anyio.create_task_group() as tasks:
            spawn(tasks, pipeline.execute, stay)
            await tick()
            waiting = spawn(tasks, pipeline.execute, inside)
            await tick()
            assert inside.calls == 0
            leave.set()
            await tick()
            assert waiting.value == "page"
    assert waits == []


# ---- what goes by the clock as ever -------------------------------------------------------------


@pytest.mark.anyio
async def test_time_limits_are_neither_cut_short_nor_listed() -> None:
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(10).build()

    async def slow() -> str:
        await clock.sleep(9)
        return "page"

    with instant() as waits:
        assert await pipeline.execute(slow) == "page"
        error = await raised_by(pipeline.execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert clock.now() == 19
    assert waits == []


@pytest.mark.anyio
async def test_a_hedging_delay_is_neither_cut_short_nor_listed() -> None:
    """It bounds how long the first attempt may take before a second one joins it."""
    clock = VirtualClock(autojump=True)
    fn = Scripted("page", clock=clock, takes=5)
    with instant() as waits:
        await B(clock=clock).add_hedging(delay=4).build().execute(fn)
        assert fn.starts == [0, 4]
    assert waits == []


@pytest.mark.anyio
async def test_a_wait_that_has_begun_before_is_not_cut_short() -> None:
    clock = VirtualClock()
    fn = failing(2)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, B(clock=clock).add_retry(delay=60).build().execute, fn)
        await tick()
        with instant() as waits:
            await tick()
            assert fn.calls == 1
            await clock.advance(60)
            assert fn.calls == 3
    assert waits == [60]


@pytest.mark.anyio
async def test_afterwards_waits_take_their_time_again() -> None:
    """Also those of calls that began within."""
    clock = VirtualClock()
    go_on = anyio.Event()
    calls = 0

    async def fn() -> str:
        nonlocal calls
        calls += 1
        if calls == 2:
            await go_on.wait()
        if calls < 3:
            raise ConnectionError
        return "page"

    async with anyio.create_task_group() as tasks:
        with instant() as waits:
            call = spawn(tasks, B(clock=clock).add_retry(delay=60).build().execute, fn)
            await tick()
            assert calls == 2
        go_on.set()
        await tick()
        assert calls == 2
        await clock.advance(60)
        assert call.value == "page"
    assert waits == [60]


# ---- checkpoints and cancellation ---------------------------------------------------------------


@pytest.mark.anyio
async def test_a_wait_is_still_a_checkpoint() -> None:
    """A retry without end lets others run."""
    pipeline = B().add_retry(max_retry_attempts=math.inf, delay="1h").build()
    fn = Scripted(ConnectionError)
    with instant() as waits:
        async with anyio.create_task_group() as tasks:
            call = spawn(tasks, pipeline.execute, fn)
            await tick(10)
            assert fn.calls > 1
            call.cancel()
    assert call.cancelled
    assert len(waits) == fn.calls


@pytest.mark.anyio
async def test_a_wait_is_where_a_cancellation_arrives() -> None:
    pipeline = B().add_retry(delay="1h", on_retry=lambda event: scope.cancel()).build()
    fn = Scripted(ConnectionError)
    with instant(), anyio.CancelScope() as scope:
        await pipeline.execute(fn)
    assert scope.cancelled_caught
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_wait_for_ever_remains_one() -> None:
    """It is listed, and ends with its cancellation alone."""
    pipeline = B().add_retry(delay=math.inf).build()
    fn = Scripted(ConnectionError)
    with instant() as waits:
        async with anyio.create_task_group() as tasks:
            call = spawn(tasks, pipeline.execute, fn)
            await tick()
            assert fn.calls == 1
            call.cancel()
    assert call.cancelled
    assert waits == [math.inf]


# ---- several of them ----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_each_of_several_has_a_list() -> None:
    """The inner one hears of what happens within it, the outer one of everything."""
    pipeline = B().add_retry(delay="1h").build()
    with instant() as outer:
        await pipeline.execute(failing(1))
        with instant() as inner:
            await pipeline.execute(failing(2))
        await pipeline.execute(failing(1))
    assert inner == [3600] * 2
    assert outer == [3600] * 4


@pytest.mark.anyio
async def test_they_may_end_in_any_order() -> None:
    pipeline = B().add_retry(delay="1h").build()
    first, second = instant(), instant()
    listed_first, listed_second = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    await pipeline.execute(failing(1))
    second.__exit__(None, None, None)
    assert (listed_first, listed_second) == ([], [3600])


@pytest.mark.anyio
async def test_one_may_be_entered_again() -> None:
    pipeline = B().add_retry(delay="1h").build()
    manager = instant()
    for _ in range(2):
        with manager as waits:
            await pipeline.execute(failing(1))
        assert waits == [3600]


def test_an_error_ends_it_and_comes_out() -> None:
    clock = VirtualClock()
    with pytest.raises(LookupError), instant():
        raise LookupError
    fn = Scripted(ConnectionError, "page")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            call = spawn(tasks, B(clock=clock).add_retry(delay=60).build().execute, fn)
            await tick()
            assert fn.calls == 1
            call.cancel()

    anyio.run(main)


# ---- threads ------------------------------------------------------------------------------------


def raising(times: int) -> Any:
    left = [ConnectionError] * times

    def fn() -> str:
        if left:
            raise left.pop()
        return "page"

    return fn


def test_synchronous_calls_are_reached() -> None:
    pipeline = B().add_retry(delay="1h").add_timeout("1h").build()
    with instant() as waits:
        assert pipeline.execute_sync(raising(2)) == "page"
    assert waits == [3600, 3600]


def test_all_threads_are_reached() -> None:
    """Whichever of them has entered it."""
    pipeline = B().add_retry(delay="1h").build()
    results: list[str] = []

    def work() -> None:
        results.append(pipeline.execute_sync(raising(3)))

    with instant() as waits:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == ["page"] * 8
    assert waits == [3600] * 24


def test_a_loop_in_another_thread_is_reached() -> None:
    pipeline = B().add_retry(delay="1h").build()
    results: list[str] = []

    async def main() -> None:
        await checkpoint()
        results.append(await pipeline.execute(failing(2)))

    with instant() as waits:
        thread = threading.Thread(target=anyio.run, args=(main,))
        thread.start()
        thread.join()
    assert results == ["page"]
    assert waits == [3600, 3600]


def test_a_call_that_was_given_up_on_ends_at_its_wait() -> None:
    """As it does where waits take their time."""
    clock = VirtualClock()
    ended = threading.Event()
    calls: list[str] = []

    def fn() -> str:
        calls.append("called")
        run(clock.advance(1))  # past the time limit
        raise ConnectionError

    class Watch(Strategy[Any]):
        name = "watch"

        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            async def handle(context: Any) -> Any:
                try:
                    return await next(context)
                except Cancelled:
                    ended.set()
                    raise

            return handle

    pipeline = B(clock=clock).add_timeout(1).add(Watch()).add_retry(delay="1h").build()
    with instant():
        with pytest.raises(TimeoutRejectedError):
            pipeline.execute_sync(fn)
        assert ended.wait(30)
    assert calls == ["called"]
