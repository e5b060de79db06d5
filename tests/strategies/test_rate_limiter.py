"""Rate limiter: how many pass, who waits and for how long, and that `retry_after` is the truth."""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import pickle
import random
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from resilience_pipeline import (
    Failure,
    FixedWindow,
    MisuseError,
    OptionsError,
    RateLimiter,
    RateLimiterRejectedError,
    RateLimiterRejectedEvent,
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    SlidingWindow,
    Success,
    SupportsRateLimit,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import StepClock, boom, ok
from support.scripted import Background, Scripted, raised_by, spawn, tick


class Limited:
    """A pipeline of one rate limiter on a clock of its own, whose calls note when they start."""

    def __init__(self, limiter: Any, *, autojump: bool = False, **options: Any) -> None:
        self.clock = VirtualClock(autojump=autojump)
        self.starts: list[tuple[Any, float]] = []
        self.pipeline: ResiliencePipeline[RateLimiterRejectedError] = (
            ResiliencePipelineBuilder(name="svc", clock=self.clock)
            .add_rate_limiter(limiter, **options)
            .build()
        )

    async def start(self, name: Any = None) -> Any:
        self.starts.append((name, self.clock.now()))
        return name

    @property
    def names(self) -> list[Any]:
        return [name for name, _ in self.starts]

    @property
    def times(self) -> list[float]:
        return [time for _, time in self.starts]

    async def passes(self) -> bool:
        return isinstance(await self.pipeline.settle(self.start), Success)

    async def refusal(self) -> RateLimiterRejectedError:
        outcome = await self.pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert isinstance(outcome.error, RateLimiterRejectedError)
        return outcome.error

    async def arrive(self, tasks: TaskGroup, name: Any) -> Background:
        call = spawn(tasks, self.pipeline.settle, self.start, name)
        await tick(5)
        return call


LIMITS: dict[str, Callable[[], Any]] = {
    "bucket of 3, 3 per 10 s": lambda: TokenBucket(3, 3, per="10s"),
    "bucket of 1 at 0.1/s": lambda: TokenBucket(1, 0.1),
    "7 in fixed 3 s": lambda: FixedWindow(7, "3s"),
    "5 in sliding 1 s": lambda: SlidingWindow(5, "1s", segments=7),
    "30 in sliding 1 s": lambda: SlidingWindow(30, "1s", segments=7),
}
every_limit = pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS.keys())


# --- how many pass -----------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("limiter", "count"), [(TokenBucket(3, 1), 3), (FixedWindow(4, 1), 4), (SlidingWindow(5, 1), 5)]
)
async def test_as_many_as_allowed_pass_at_once_and_the_next_is_refused(
    limiter: Any, count: int
) -> None:
    """Small print: a bucket starts full, a window unused; then `RateLimiterRejectedError`."""
    limited = Limited(limiter)
    assert [await limited.passes() for _ in range(count + 1)] == [True] * count + [False]


@pytest.mark.anyio
async def test_a_bucket_refills_evenly_up_to_its_capacity() -> None:
    """`TokenBucket`: a permit each 0.5 s, never more than the capacity."""
    limited = Limited(TokenBucket(2, 2, per="1s"))
    assert [await limited.passes() for _ in range(3)] == [True, True, False]
    await limited.clock.advance(0.5)
    assert [await limited.passes() for _ in range(2)] == [True, False]
    await limited.clock.advance(1000)
    assert [await limited.passes() for _ in range(3)] == [True, True, False]


@pytest.mark.anyio
async def test_a_fixed_window_starts_with_its_first_permit() -> None:
    """`FixedWindow`: so many per window, up to twice that around an edge."""
    limited = Limited(FixedWindow(2, 10))
    await limited.clock.advance(7)
    assert await limited.passes()
    await limited.clock.advance(9)
    assert [await limited.passes() for _ in range(2)] == [True, False]
    await limited.clock.advance(1)
    assert [await limited.passes() for _ in range(3)] == [True, True, False]


@pytest.mark.anyio
@every_limit
async def test_more_than_allowed_never_pass_under_concurrency(make: Callable[[], Any]) -> None:
    """Case RL-03: of two hundred simultaneous calls exactly as many pass as one after another would."""
    alone, together = Limited(make()), Limited(make())
    expected = sum([await alone.passes() for _ in range(200)])
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, together.pipeline.settle, ok) for _ in range(200)]
    assert sum(call.value == Success(1) for call in calls) == expected


@pytest.mark.anyio
@pytest.mark.parametrize("queue_limit", [0, 3, math.inf])
async def test_a_sliding_window_holds_in_every_stretch(queue_limit: float) -> None:
    """`SlidingWindow`: at most `permits` in any stretch of `window`, queue or not."""
    limited = Limited(SlidingWindow(5, 1), autojump=True, queue_limit=queue_limit)
    rng = random.Random(7)
    async with anyio.create_task_group() as tasks:
        for number in range(200):
            spawn(tasks, limited.pipeline.settle, limited.start, number)
            await limited.clock.sleep(rng.choice([0, 0.01, 0.1, 0.3]))
    times = limited.times
    assert len(times) > 50
    assert all(late - early >= 1 for early, late in zip(times, times[5:], strict=False))


@pytest.mark.anyio
async def test_a_token_bucket_holds_in_every_stretch() -> None:
    """`TokenBucket`: at most capacity + rate·t in any time t."""
    limited = Limited(TokenBucket(3, 2), autojump=True, queue_limit=2)
    rng = random.Random(7)
    async with anyio.create_task_group() as tasks:
        for number in range(200):
            spawn(tasks, limited.pipeline.settle, limited.start, number)
            await limited.clock.sleep(rng.choice([0, 0.01, 0.1, 1.3]))
    for first, last in itertools.combinations(range(len(limited.times)), 2):
        passed = last - first + 1
        assert passed <= 3 + 2 * (limited.times[last] - limited.times[first]) + 1e-9


@pytest.mark.anyio
async def test_small_steps_lose_and_win_no_permit() -> None:
    """Case RL-07: a bucket asked every millisecond for 10 s lets 10 calls pass."""
    clock = StepClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock).add_rate_limiter(TokenBucket(1, 1, per="1s")).build()
    )
    await pipeline.execute(ok)
    passed = 0
    for _ in range(10_000):
        clock.time += 0.001
        passed += (await pipeline.settle(ok)).ok
    assert 9 <= passed <= 10


@pytest.mark.anyio
@every_limit
async def test_a_clock_set_back_neither_floods_nor_locks_out(make: Callable[[], Any]) -> None:
    """Case RL-07: time that runs backwards counts as no time."""
    clock = StepClock(100.0)
    pipeline = ResiliencePipelineBuilder(clock=clock).add_rate_limiter(make()).build()

    async def told() -> float:
        outcome = await pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert outcome.error.retry_after is not None
        return outcome.error.retry_after

    while (await pipeline.settle(ok)).ok:
        pass
    before = await told()
    clock.time -= 50
    after = await told()
    assert 0 < after <= before + 1
    clock.time += after
    assert await pipeline.execute(ok) == 1


# --- retry_after -------------------------------------------------------------------------------


@pytest.mark.anyio
@every_limit
@pytest.mark.parametrize("start", [0.0, 0.1, 12_345.678, 1e7])
async def test_after_exactly_retry_after_the_next_call_passes(
    make: Callable[[], Any], start: float
) -> None:
    """Case RL-01: true at every clock value, and a moment earlier there is no permit yet."""
    limited = Limited(make())
    await limited.clock.advance(start)
    rng = random.Random(3)
    for _ in range(60):
        await limited.clock.advance(rng.choice([0.0, 0.0, 0.001, 0.07, 1 / 3]))
        while isinstance(outcome := await limited.pipeline.settle(ok), Success):
            pass
        assert isinstance(outcome, Rejected)
        wait = outcome.error.retry_after
        assert wait is not None
        assert wait > 0
        if wait > 1e-6:  # else the clock itself can't tell a moment earlier from then
            await limited.clock.advance(wait * rng.choice([0, 0.5, 0.999]))
            wait = (await limited.refusal()).retry_after
            assert wait is not None
        await limited.clock.advance(wait)
        assert isinstance(await limited.pipeline.settle(ok), Success)


@pytest.mark.anyio
async def test_retry_after_counts_what_has_flowed_in_already() -> None:
    """Case RL-01: the time left, not a whole period."""
    limited = Limited(TokenBucket(1, 1, per="10s"))
    await limited.passes()
    await limited.clock.advance(7.5)
    assert (await limited.refusal()).retry_after == 2.5


@pytest.mark.anyio
async def test_retry_after_counts_those_who_wait_already() -> None:
    """`retry_after` is the true time: the permits before it belong to the queue."""
    limited = Limited(TokenBucket(1, 1), queue_limit=2)
    async with anyio.create_task_group() as tasks:
        for number in range(3):
            await limited.arrive(tasks, number)
        assert (await limited.refusal()).retry_after == 3
        await limited.clock.advance(0.25)
        wait = (await limited.refusal()).retry_after
        assert wait == 2.75
        await limited.clock.advance(wait)
        assert await limited.passes()
    assert limited.times == [0, 1, 2, 3]


# --- the queue ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_first_at_once_second_after_the_interval() -> None:
    """RL-1: not a millisecond before it."""
    limited = Limited(TokenBucket(1, 1), queue_limit=1)
    async with anyio.create_task_group() as tasks:
        await limited.arrive(tasks, 1)
        await limited.arrive(tasks, 2)
        await limited.clock.advance(0.999)
        assert limited.names == [1]
        await limited.clock.advance(0.001)
        assert limited.names == [1, 2]


@pytest.mark.anyio
async def test_a_burst_starts_at_the_intervals() -> None:
    """RL-2: four at once start at 0, 1, 2 and 3 s, in their order."""
    limited = Limited(TokenBucket(1, 1), autojump=True, queue_limit=math.inf)
    async with anyio.create_task_group() as tasks:
        for number in range(4):
            await limited.arrive(tasks, number)
    assert limited.starts == [(0, 0), (1, 1), (2, 2), (3, 3)]


@pytest.mark.anyio
async def test_a_failure_takes_its_permit_all_the_same() -> None:
    """RL-3: what a call comes to does not change when the next may start."""
    limited = Limited(TokenBucket(1, 1))
    assert isinstance(await limited.pipeline.settle(boom), Failure)
    assert not await limited.passes()
    await limited.clock.advance(1)
    assert await limited.passes()


@pytest.mark.anyio
async def test_nesting_means_the_larger_interval() -> None:
    """RL-4: of two limiters around one call both hold."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(1, clock=clock)
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_rate_limiter(TokenBucket(1, 1), queue_limit=10)
        .add_rate_limiter(TokenBucket(1, 1, per=3), queue_limit=10)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            spawn(tasks, pipeline.execute, fn)
    assert fn.starts == [0, 3, 6, 9]


@pytest.mark.anyio
async def test_up_to_queue_limit_wait_and_the_next_is_refused() -> None:
    """`queue_limit`: one passes, two wait, the fourth is refused."""
    limited = Limited(TokenBucket(1, 1), queue_limit=2)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, number) for number in range(4)]
        assert [call.done for call in calls] == [True, False, False, True]
        assert isinstance(calls[3].value, Rejected)
        await limited.clock.advance(2)
    assert limited.names == [0, 1, 2]


@pytest.mark.anyio
@every_limit
async def test_first_come_first_served(make: Callable[[], Any]) -> None:
    """Queue: nobody overtakes, newcomers in the middle of it included."""
    limited = Limited(make(), autojump=True, queue_limit=math.inf)
    async with anyio.create_task_group() as tasks:
        for number in range(60):
            await limited.arrive(tasks, number)
            if number % 10 == 9:
                await limited.clock.sleep(0.35)
    assert limited.names == list(range(60))
    assert limited.clock.pending == 0


@pytest.mark.anyio
async def test_newcomers_queue_while_anybody_waits() -> None:
    """Queue: a permit that falls due belongs to the head, also when a newcomer comes first that moment."""
    limited = Limited(FixedWindow(1, 1), queue_limit=10)
    async with anyio.create_task_group() as tasks:
        await limited.arrive(tasks, "first")
        newcomer: list[Background] = []
        # Registered before the waiter's own timer: at 1 s the newcomer is there before the head wakes.
        limited.clock.call_at(
            1, lambda: newcomer.append(spawn(tasks, limited.pipeline.settle, limited.start, "new"))
        )
        await limited.arrive(tasks, "waiter")
        await limited.clock.advance(1)
        assert limited.names == ["first", "waiter"]
        await limited.clock.advance(1)
    assert limited.names == ["first", "waiter", "new"]


@pytest.mark.anyio
async def test_the_queue_has_one_timer_however_long_it_is() -> None:
    """No background task: the head waits for its permit, the others for their turn."""
    limited = Limited(TokenBucket(1, 1), queue_limit=math.inf)
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            await limited.arrive(tasks, number)
        assert limited.clock.pending == 1
        tasks.cancel_scope.cancel()
    assert limited.clock.pending == 0


# --- leaving the queue -------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("position", [1, 2, 3])
@pytest.mark.parametrize("moment", [0, 0.5, 0.999])
async def test_a_cancelled_waiter_never_runs_and_takes_nothing(
    position: int, moment: float
) -> None:
    """RL-5, RL-7: wherever it stands, those behind it move up; nothing was taken for it."""
    limited = Limited(TokenBucket(1, 1), queue_limit=3)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, number) for number in range(4)]
        await limited.clock.advance(moment)
        calls[position].cancel()
        await tick()
        assert calls[position].cancelled
        await limited.arrive(tasks, "took the place")
        await limited.clock.advance(10)
    expected = [number for number in range(4) if number != position]
    assert limited.names == [*expected, "took the place"]
    assert limited.times == [0, 1, 2, 3]


@pytest.mark.anyio
@pytest.mark.parametrize("turns", range(8))
async def test_cancelled_around_its_grant_a_waiter_leaves_a_queue_that_goes_on(turns: int) -> None:
    """Contract: cancelled at any moment around the one in which its permit falls due."""
    limited = Limited(TokenBucket(1, 1), queue_limit=3)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, number) for number in range(3)]
        due = anyio.Event()
        limited.clock.call_at(1, due.set)

        async def cancel_later() -> None:
            await due.wait()
            await tick(turns)
            calls[1].cancel()

        tasks.start_soon(cancel_later)
        await tick()
        await limited.clock.advance(1)
        await limited.clock.advance(5)
        assert calls[2].value == Success(2)
    assert limited.names in ([0, 1, 2], [0, 2])
    assert all(late - early >= 1 for early, late in itertools.pairwise(limited.times))


@pytest.mark.asyncio
@pytest.mark.parametrize("head", [True, False])
async def test_a_waiter_cancelled_by_its_task_leaves_at_once(head: bool) -> None:
    """The same by `task.cancel()`: it comes out, and the next one moves up in the same turn."""
    limited = Limited(TokenBucket(1, 1), queue_limit=3)
    await limited.passes()
    tasks = [
        asyncio.create_task(limited.pipeline.execute(limited.start, number)) for number in range(3)
    ]
    await tick()
    tasks[0 if head else 1].cancel()
    await tick()
    await limited.clock.advance(2)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [
        head,
        not head,
        False,
    ]
    assert limited.times == [0, 1, 2]


@pytest.mark.asyncio
async def test_a_row_of_cancelled_heads_wakes_the_one_behind_them() -> None:
    """Whoever leaves, for whatever reason, wakes the next head in the same turn."""
    limited = Limited(TokenBucket(1, 1), queue_limit=100)
    await limited.passes()
    tasks = [
        asyncio.create_task(limited.pipeline.execute(limited.start, number)) for number in range(20)
    ]
    await tick()
    for task in tasks[:19]:
        task.cancel()
    await tick()
    await limited.clock.advance(1)
    assert await tasks[19] == 19
    assert limited.times == [0, 1]
    for task in tasks[:19]:
        assert task.cancelled()


@pytest.mark.anyio
async def test_a_timeout_outside_ends_the_wait_in_the_queue() -> None:
    """Composition: a limit around the limiter bounds the wait; the place is given back."""
    clock = VirtualClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_timeout(2)
        .add_rate_limiter(TokenBucket(1, 1, per=10), queue_limit=1)
        .build()
    )
    await pipeline.execute(ok)
    async with anyio.create_task_group() as tasks:
        waiting = spawn(tasks, pipeline.settle, ok)
        await tick()
        await clock.advance(2)
        assert isinstance(waiting.value, Rejected)
    await clock.advance(8)
    assert await pipeline.execute(ok) == 1


# --- max_wait ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_who_would_wait_longer_than_max_wait_is_refused_at_once() -> None:
    """Small print: a rate limiter that knows the wait is longer refuses at once, with the truth."""
    limited = Limited(TokenBucket(1, 1), queue_limit=10, max_wait=2)
    async with anyio.create_task_group() as tasks:
        calls = [await limited.arrive(tasks, number) for number in range(4)]
        assert [call.done for call in calls] == [True, False, False, True]
        assert isinstance(calls[3].value, Rejected)
        assert calls[3].value.error.retry_after == 3
        await limited.clock.advance(2)
    assert limited.starts == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.anyio
@every_limit
async def test_a_permit_exactly_at_max_wait_is_granted(make: Callable[[], Any]) -> None:
    """Small print: when grant and expiry fall together the call runs."""
    limited = Limited(make())
    while await limited.passes():
        pass
    wait = (await limited.refusal()).retry_after
    bounded = Limited(make(), queue_limit=5, max_wait=wait)
    while bounded.starts != limited.starts:
        assert await bounded.passes()
    async with anyio.create_task_group() as tasks:
        call = await bounded.arrive(tasks, "waits")
        assert wait is not None
        await bounded.clock.advance(wait)
        assert call.value == Success("waits")


@pytest.mark.anyio
async def test_max_wait_means_nothing_without_a_queue() -> None:
    """Small print: who has no place to wait in is refused."""
    limited = Limited(TokenBucket(1, 1), max_wait=100)
    await limited.passes()
    assert (await limited.refusal()).retry_after == 1


@pytest.mark.anyio
async def test_an_endless_max_wait_is_no_limit() -> None:
    """`math.inf` means for ever where that makes sense."""
    limited = Limited(TokenBucket(1, 1, per="1h"), autojump=True, queue_limit=5, max_wait=math.inf)
    for _ in range(3):
        assert await limited.passes()
    assert limited.times == [0, 3600, 7200]


@pytest.mark.anyio
async def test_max_wait_of_zero_refuses_whoever_would_wait() -> None:
    """`max_wait=0`: only a permit that is there."""
    limited = Limited(TokenBucket(1, 1), queue_limit=5, max_wait=0)
    assert [await limited.passes() for _ in range(2)] == [True, False]


# --- rejections and their hook -----------------------------------------------------------------


@pytest.mark.anyio
async def test_a_refusal_names_pipeline_strategy_operation_and_limit() -> None:
    """RL-02, errors: who refused, what was exceeded, and when to come back."""
    limited = Limited(FixedWindow(1, 123), name="quota")
    await limited.passes()
    outcome = await limited.pipeline.settle(ok, operation_key="get")
    assert isinstance(outcome, Rejected)
    error = outcome.error
    assert (error.pipeline_name, error.strategy_name) == ("svc", "quota")
    assert (error.operation_key, error.retry_after) == ("get", 123)
    for part in ("'svc'", "'quota'", "FixedWindow(1, 123", "123 s"):
        assert part in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is RateLimiterRejectedError
        assert (str(twin), twin.retry_after) == (str(error), 123)
    assert await limited.refusal() is not error


@pytest.mark.anyio
async def test_a_refused_call_starts_nothing() -> None:
    """The callback of a refused call is not invoked."""
    limited = Limited(TokenBucket(1, 1))
    assert [await limited.passes() for _ in range(5)].count(True) == 1
    assert len(limited.starts) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_on_rejected_is_told_before_the_error_comes_out(kind: str) -> None:
    """RL-02, RL-04: one event with the context and the wait."""
    events: list[RateLimiterRejectedEvent] = []

    async def note(event: RateLimiterRejectedEvent) -> None:
        await anyio.lowlevel.checkpoint()
        events.append(event)

    hook: Any = events.append if kind == "plain" else note
    limited = Limited(TokenBucket(1, 1), on_rejected=hook)
    await limited.passes()
    await limited.pipeline.settle(ok, operation_key="refused")
    [event] = events
    assert isinstance(event, RateLimiterRejectedEvent)
    assert (event.context.operation_key, event.retry_after) == ("refused", 1)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_on_rejected_that_raises_surfaces_and_gives_nothing_away(kind: str) -> None:
    """Case LT-05: the hook's error comes out, the refusal as its context; no permit is made or lost."""

    def plain(event: object) -> None:
        raise KeyError

    async def asynchronous(event: object) -> None:
        await anyio.lowlevel.checkpoint()
        raise KeyError

    limited = Limited(
        TokenBucket(1, 1), queue_limit=1, on_rejected=plain if kind == "plain" else asynchronous
    )
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            await limited.arrive(tasks, number)
        error = await raised_by(limited.pipeline.execute, ok)
        assert isinstance(error, KeyError)
        assert isinstance(error.__context__, RateLimiterRejectedError)
        await limited.clock.advance(2)
        assert await limited.passes()
    assert limited.times == [0, 1, 2]


@pytest.mark.anyio
async def test_a_hook_may_use_the_pipeline_itself() -> None:
    """Outside locks: a call made in `on_rejected` is a call like any other."""
    outcomes: list[Any] = []

    async def on_rejected(event: object) -> None:
        if not outcomes:
            outcomes.append("asking")
            outcomes.append(await limited.pipeline.settle(ok))

    limited: Limited = Limited(TokenBucket(1, 1), on_rejected=on_rejected)
    await limited.passes()
    await limited.refusal()
    assert isinstance(outcomes[1], Rejected)


@pytest.mark.anyio
async def test_a_retry_outside_waits_as_long_as_it_is_told() -> None:
    """Composition: `retry_after` is respected, and after exactly that wait the call passes."""
    clock = VirtualClock(autojump=True)
    fn = Scripted(1, clock=clock)
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_retry(max_retry_attempts=1, delay=0)
        .add_rate_limiter(TokenBucket(1, 0.3))
        .build()
    )
    for _ in range(20):
        await pipeline.execute(fn)
    assert fn.calls == 20


# --- limits of one's own -----------------------------------------------------------------------


class Answers:
    """Gives the answers it was told to give, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []

    def answer(self, now: float) -> float:
        self.asked.append(now)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return float(answer)


class PlainLimit(Answers):
    def try_acquire(self, now: float) -> float:
        return self.answer(now)


class AsyncLimit(Answers):
    async def try_acquire(self, now: float) -> float:
        await anyio.lowlevel.checkpoint()
        return self.answer(now)


each_kind = pytest.mark.parametrize("kind", [PlainLimit, AsyncLimit])


def test_a_limit_of_ones_own_needs_one_method() -> None:
    """`SupportsRateLimit`: `try_acquire(now)`, plain or async."""
    assert isinstance(PlainLimit(0), SupportsRateLimit)
    assert isinstance(AsyncLimit(0), SupportsRateLimit)


@pytest.mark.anyio
@each_kind
async def test_a_foreign_limit_grants_and_refuses(kind: type[PlainLimit | AsyncLimit]) -> None:
    """`SupportsRateLimit`: 0.0 when granted, else the seconds until worth asking again; RL-03."""
    limit = kind(0, 2.5, 0)
    limited = Limited(limit)
    await limited.clock.advance(7)
    assert await limited.passes()
    assert (await limited.refusal()).retry_after == 2.5
    assert await limited.passes()
    assert limit.asked == [7, 7, 7]


@pytest.mark.anyio
@each_kind
async def test_a_waiter_asks_a_foreign_limit_again_when_told_to(
    kind: type[PlainLimit | AsyncLimit],
) -> None:
    """Queue: asked, refused for 2 s, asked again, refused for 3 s, granted."""
    limit = kind(2, 2, 3, 0)
    limited = Limited(limit, autojump=True, queue_limit=1)
    assert await limited.passes()
    assert limited.times == [5]
    assert limit.asked == [0, 0, 2, 5]


@pytest.mark.anyio
@each_kind
async def test_the_queue_before_a_foreign_limit_is_in_order(
    kind: type[PlainLimit | AsyncLimit],
) -> None:
    """Queue: only its head asks, first come, first served."""
    limit = kind(0, *[1, 0] * 50)
    limited = Limited(limit, autojump=True, queue_limit=math.inf)
    async with anyio.create_task_group() as tasks:
        for number in range(10):
            await limited.arrive(tasks, number)
    assert limited.names == list(range(10))


@pytest.mark.anyio
@each_kind
async def test_max_wait_before_a_foreign_limit(kind: type[PlainLimit | AsyncLimit]) -> None:
    """`max_wait`: told a longer wait, a call is refused at once, with what it was told."""
    limited = Limited(kind(3), queue_limit=5, max_wait=2)
    assert (await limited.refusal()).retry_after == 3


@pytest.mark.anyio
@each_kind
async def test_max_wait_ends_the_wait_for_a_foreign_limit(
    kind: type[PlainLimit | AsyncLimit],
) -> None:
    """`max_wait`: who has waited long enough is refused when it would have to wait beyond it."""
    limited = Limited(kind(1.5), autojump=True, queue_limit=5, max_wait=4)
    assert (await limited.refusal()).retry_after == 1.5
    assert limited.clock.now() == 3


class Gated:
    """A limit whose answers are held back until the gate is opened."""

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def try_acquire(self, now: float) -> float:
        await self.gate.wait()
        return 0.0


@pytest.mark.anyio
async def test_timed_out_behind_a_slow_foreign_limit() -> None:
    """RL-03, `max_wait`: the wait of somebody who never got to ask is not known, and not 0."""
    limit = Gated()
    answers = iter([1.0, 1.0, 1.0])

    class SlowAfterwards:
        async def try_acquire(self, now: float) -> float:
            answer = next(answers, None)
            return answer if answer is not None else await limit.try_acquire(now)

    limited = Limited(SlowAfterwards(), queue_limit=5, max_wait=2)
    async with anyio.create_task_group() as tasks:
        head = await limited.arrive(tasks, "head")
        behind = await limited.arrive(tasks, "behind")
        await limited.clock.advance(3)
        assert isinstance(behind.value, Rejected)
        assert behind.value.error.retry_after is None
        limit.gate.set()
        await tick()
        assert head.value == Success("head")


@pytest.mark.anyio
@each_kind
@pytest.mark.parametrize("queued", [False, True])
async def test_a_foreign_limit_that_raises_surfaces_and_the_queue_goes_on(
    kind: type[PlainLimit | AsyncLimit], queued: bool
) -> None:
    """Robust: its error comes out of the call that asked; the next one asks for itself."""
    answers = [1, 1, KeyError(), 0] if queued else [KeyError(), 0]
    limited = Limited(kind(*answers), autojump=True, queue_limit=5)
    assert isinstance(await raised_by(limited.pipeline.execute, ok), KeyError)
    assert await limited.passes()


@pytest.mark.anyio
@each_kind
@pytest.mark.parametrize("answer", [None, True, False, "1", math.nan])
async def test_a_foreign_limit_that_gives_no_number_is_refused_with_a_message(
    kind: type[PlainLimit | AsyncLimit], answer: Any
) -> None:
    """Rule 9: what came back is looked at; `True` for granted would else mean a wait of a second."""
    limit = kind(0)
    limit.answer = lambda now: answer  # type: ignore[method-assign]
    error = await raised_by(Limited(limit, queue_limit=5).pipeline.execute, ok)
    assert isinstance(error, MisuseError)
    assert "try_acquire()" in str(error)
    assert repr(answer) in str(error)


@pytest.mark.anyio
async def test_cancelled_while_a_foreign_limit_thinks_the_queue_goes_on() -> None:
    """Cancel at every await: the next head asks."""
    gate = Gated()
    asked = 0

    class Limit:
        async def try_acquire(self, now: float) -> float:
            nonlocal asked
            asked += 1
            return 1.0 if asked == 1 else await gate.try_acquire(now)

    limited = Limited(Limit(), queue_limit=5)
    async with anyio.create_task_group() as tasks:
        head = await limited.arrive(tasks, "head")
        behind = await limited.arrive(tasks, "behind")
        head.cancel()
        await tick()
        assert head.cancelled
        assert asked == 3
        gate.gate.set()
        await tick()
        assert behind.value == Success("behind")


@pytest.mark.anyio
async def test_a_foreign_limit_is_asked_under_no_lock() -> None:
    """Small print: it may use the pipeline itself."""
    nested: list[Any] = []

    class Limit:
        async def try_acquire(self, now: float) -> float:
            if not nested:
                nested.append("asking")
                nested.append(await limited.pipeline.settle(ok))
            return 0.0

    limited: Limited = Limited(Limit(), queue_limit=5)
    assert await limited.passes()
    assert nested == ["asking", Success(1)]


# --- state -------------------------------------------------------------------------------------


@pytest.mark.anyio
@every_limit
async def test_built_in_limits_are_values_and_each_build_starts_afresh(
    make: Callable[[], Any],
) -> None:
    """Small print: their state is born in `build()`; one value may serve many builders."""
    clock = VirtualClock()
    value = make()
    builder = ResiliencePipelineBuilder(clock=clock).add_rate_limiter(value)
    pipelines = [
        builder.build(),
        builder.build(),
        ResiliencePipelineBuilder(clock=clock).add_rate_limiter(value).build(),
    ]
    passed = []
    for pipeline in pipelines:
        passed.append(sum([(await pipeline.settle(ok)).ok for _ in range(50)]))
    assert passed[0] == passed[1] == passed[2] < 50
    assert value == make()


@pytest.mark.anyio
async def test_an_object_of_ones_own_is_shared_by_all_who_use_it() -> None:
    """Small print: a limit is shared by passing an object that implements `SupportsRateLimit`."""
    limit = PlainLimit(0, 1)
    one, two = Limited(limit), Limited(limit)
    assert await one.passes()
    assert not await two.passes()


@pytest.mark.anyio
async def test_nesting_a_pipeline_shares_its_limit() -> None:
    """Small print: a limit is shared by nesting one pipeline in others."""
    clock = VirtualClock()
    shared = (
        ResiliencePipelineBuilder(name="quota", clock=clock)
        .add_rate_limiter(FixedWindow(1, 1))
        .build()
    )
    one = ResiliencePipelineBuilder(name="one", clock=clock).add_pipeline(shared).build()
    two = ResiliencePipelineBuilder(name="two", clock=clock).add_pipeline(shared).build()
    assert await one.execute(ok) == 1
    outcome = await two.settle(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.error.pipeline_name == "quota"


# --- streams -----------------------------------------------------------------------------------


async def chunks() -> AsyncIterator[int]:
    for number in range(5):
        yield number


@pytest.mark.anyio
async def test_a_stream_takes_one_permit_at_its_start() -> None:
    """RL-6: a stream that is never read takes none, and its chunks are not paced."""
    limited = Limited(TokenBucket(1, 1))
    unread = limited.pipeline.execute_stream(chunks)
    async with limited.pipeline.execute_stream(chunks) as stream:
        assert [chunk async for chunk in stream] == [0, 1, 2, 3, 4]
    with pytest.raises(RateLimiterRejectedError) as caught:
        await anext(limited.pipeline.execute_stream(chunks))
    assert caught.value.retry_after == 1
    await unread.aclose()


@pytest.mark.anyio
async def test_streams_wait_in_the_queue_like_calls() -> None:
    """Streams: the first pull waits for its turn."""
    limited = Limited(TokenBucket(1, 1), queue_limit=5)
    async with anyio.create_task_group() as tasks:
        await limited.arrive(tasks, "call")
        stream = limited.pipeline.execute_stream(chunks)
        pull = spawn(tasks, stream.__anext__)
        await tick()
        await limited.arrive(tasks, "last")
        await limited.clock.advance(1)
        assert pull.value == 0
        await limited.clock.advance(1)
        await stream.aclose()
    assert limited.starts == [("call", 0), ("last", 2)]


# --- options -----------------------------------------------------------------------------------


def test_defaults() -> None:
    """Options read back under their names."""
    limit = TokenBucket(5, 2)
    options = RateLimiter(limit)
    assert options.limiter is limit
    assert (options.queue_limit, options.max_wait, options.on_rejected) == (0, None, None)
    assert options.name == "RateLimiter"
    assert (limit.capacity, limit.refill_rate, limit.per) == (5, 2, 1.0)
    assert SlidingWindow(5, "1m").segments == 10


@pytest.mark.parametrize("value", [2, 2.0, "2s", timedelta(seconds=2)])
def test_durations_take_every_form(value: Any) -> None:
    """Durations: read back in seconds."""
    assert TokenBucket(1, 1, per=value).per == 2.0
    assert FixedWindow(1, value).window == 2.0
    assert SlidingWindow(1, value).window == 2.0
    assert RateLimiter(FixedWindow(1, 1), max_wait=value).max_wait == 2.0


def test_the_limits_read_like_their_calls() -> None:
    """`repr(pipeline)` reads like the builder call, the limit included."""
    assert repr(TokenBucket(3, 0.5)) == "TokenBucket(3, 0.5)"
    assert eval(repr(SlidingWindow(3, 1.0))) == SlidingWindow(3, 1.0)
    pipeline = ResiliencePipelineBuilder().add_rate_limiter(FixedWindow(3, "10s")).build()
    assert ".add_rate_limiter(FixedWindow(3, 10.0" in repr(pipeline)


BAD_LIMITS: list[tuple[type[Any], str, Any]] = [
    *[
        (TokenBucket, "capacity", value)
        for value in (0, 0.5, -1, True, "5", None, math.inf, math.nan)
    ],
    *[
        (TokenBucket, "refill_rate", value)
        for value in (0, -1, True, "5", None, math.inf, math.nan)
    ],
    *[
        (TokenBucket, "per", value)
        for value in (0, "0s", -1, True, "soon", None, math.inf, math.nan)
    ],
    *[
        (kind, "permits", value)
        for kind in (FixedWindow, SlidingWindow)
        for value in (0, -1, 1.5, 2.0, True, "5", None, math.inf, math.nan)
    ],
    *[
        (kind, "window", value)
        for kind in (FixedWindow, SlidingWindow)
        for value in (0, "0ms", -1, True, "soon", None, math.nan)
    ],
    *[(SlidingWindow, "segments", value) for value in (0, -1, 2.5, True, "5", None, math.inf)],
]


@pytest.mark.parametrize(("kind", "option", "value"), BAD_LIMITS, ids=str)
def test_a_bad_option_of_a_limit_is_refused_by_name(
    kind: type[Any], option: str, value: Any
) -> None:
    """Bad input: an `OptionsError`, also a `ValueError`, that names the option."""
    good: dict[str, Any] = (
        {"capacity": 1, "refill_rate": 1} if kind is TokenBucket else {"permits": 1, "window": 1}
    )
    with pytest.raises(OptionsError) as caught:
        kind(**(good | {option: value}))
    assert isinstance(caught.value, ValueError)
    [problem] = caught.value.problems
    assert problem.startswith(f"{option} must be ")
    assert kind.__name__ in str(caught.value)


BAD_OPTIONS = [
    ("limiter", 5),
    ("limiter", None),
    ("limiter", "10/s"),
    ("limiter", TokenBucket),
    ("limiter", PlainLimit),
    ("limiter", object()),
    ("queue_limit", -1),
    ("queue_limit", 1.5),
    ("queue_limit", True),
    ("queue_limit", math.nan),
    ("queue_limit", None),
    ("max_wait", -1),
    ("max_wait", "soon"),
    ("max_wait", math.nan),
    ("max_wait", False),
    ("on_rejected", 5),
    ("name", 5),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """RL-08, bad input: an `OptionsError` that names the option."""
    options: dict[str, Any] = {"limiter": TokenBucket(1, 1), option: value}
    with pytest.raises(OptionsError) as caught:
        RateLimiter(**options)
    [problem] = caught.value.problems
    assert problem.startswith(f"{option} must be ")


def test_all_bad_options_are_reported_at_once() -> None:
    """One error lists every bad field."""
    bad: dict[str, Any] = {"limiter": 5, "queue_limit": -1, "max_wait": "soon"}
    with pytest.raises(OptionsError) as caught:
        ResiliencePipelineBuilder().add_rate_limiter(**bad)
    assert len(caught.value.problems) == 3
    with pytest.raises(OptionsError) as caught:
        TokenBucket(0, 0, per=0)
    assert len(caught.value.problems) == 3


def test_the_limiter_is_positional_and_the_rest_is_not() -> None:
    """Signature: `(limiter, *, queue_limit=0, ...)`."""
    with pytest.raises(TypeError):
        RateLimiter(TokenBucket(1, 1), 5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        RateLimiter()  # type: ignore[call-arg]
    assert TokenBucket(1, 2, "3s") == TokenBucket(capacity=1, refill_rate=2, per=3)
    assert SlidingWindow(1, 2, 3) == SlidingWindow(permits=1, window=2, segments=3)
