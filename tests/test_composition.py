"""Every ordered pair of strategies composes, and the order says what happens: first added is outermost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    ConcurrencyLimiterRejectedError,
    Failure,
    Fallback,
    Hedging,
    RateLimiter,
    RateLimiterRejectedError,
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Retry,
    Strategy,
    Success,
    Timeout,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Hanging, Scripted, raised_by, spawn, tick
from support.worlds import PAIRS

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


def build(clock: VirtualClock, *strategies: Strategy[Any]) -> ResiliencePipeline[Any]:
    """A pipeline of these, outermost first."""
    builder: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(clock=clock)
    for strategy in strategies:
        builder.add(strategy)
    return builder.build()


def breaker(control: CircuitBreakerControl, **options: Any) -> CircuitBreaker:
    """Opens at the second failure, for 5 s."""
    return CircuitBreaker(
        failure_ratio=1, minimum_throughput=2, break_duration=5, control=control, **options
    )


def bucket(permits: int) -> RateLimiter:
    """So many calls, and then hardly any more."""
    return RateLimiter(TokenBucket(permits, 1, per="1h"))


class Taking:
    """A callback that takes its time, and notes when it began."""

    def __init__(self, clock: VirtualClock, *seconds: float) -> None:
        self._clock = clock
        self._seconds = list(seconds)
        self.starts: list[float] = []

    async def __call__(self, *_: object) -> str:
        self.starts.append(self._clock.now())
        await self._clock.sleep(
            self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]
        )
        return "value"


# ---- what holds for all pairs ----------------------------------------------------------------------


def made(name: str) -> Strategy[Any]:
    """One of each kind, that handles `ConnectionError` where it handles anything."""
    kinds: dict[str, Callable[[], Strategy[Any]]] = {
        "Retry": lambda: Retry(should_handle=ConnectionError),
        "CircuitBreaker": lambda: CircuitBreaker(should_handle=ConnectionError),
        "Timeout": lambda: Timeout(10),
        "Fallback": lambda: Fallback(fallback_value="substitute", should_handle=ConnectionError),
        "Hedging": lambda: Hedging(should_handle=ConnectionError),
        "ConcurrencyLimiter": lambda: ConcurrencyLimiter(5),
        "RateLimiter": lambda: RateLimiter(TokenBucket(50, 1)),
    }
    return kinds[name]()


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> tuple[Strategy[Any], Strategy[Any]]:
    """An outer and an inner strategy."""
    outer, inner = request.param
    return made(outer), made(inner)


async def test_a_value_passes_every_pair(
    clock: VirtualClock, pair: tuple[Strategy[Any], Strategy[Any]]
) -> None:
    """By identity, in every way of calling, whatever it looks like."""
    pipeline = build(clock, *pair)
    for value in (object(), None, 0, ""):
        assert await pipeline.execute(Scripted(value)) is value
        outcome = await pipeline.settle(Scripted(value))
        assert outcome == Success(value)


async def test_a_stream_passes_every_pair(
    clock: VirtualClock, pair: tuple[Strategy[Any], Strategy[Any]]
) -> None:
    """Chunk by chunk, and falsy ones too."""

    async def source() -> AsyncIterator[object]:
        for chunk in (None, 0, "", "last"):
            yield chunk

    async with build(clock, *pair).execute_stream(source) as stream:
        assert [chunk async for chunk in stream] == [None, 0, "", "last"]


async def test_an_error_nobody_handles_passes_every_pair(
    clock: VirtualClock, pair: tuple[Strategy[Any], Strategy[Any]]
) -> None:
    """As it is, from one single call; `settle` shows it as a failure."""
    pipeline = build(clock, *pair)
    error = KeyError("nobody's")
    fn = Scripted(error)
    assert await raised_by(pipeline.execute, fn) is error
    assert await pipeline.settle(fn) == Failure(error)
    assert fn.calls == 2
    assert clock.now() == 0


async def test_every_pair_reads_in_the_order_it_was_built(
    clock: VirtualClock, pair: tuple[Strategy[Any], Strategy[Any]]
) -> None:
    """`strategies` and `repr` begin with the outermost."""
    pipeline = build(clock, *pair)
    assert pipeline.strategies == pair
    written = repr(pipeline)
    assert written.startswith("ResiliencePipelineBuilder().add_")
    assert written.endswith(".build()")
    calls = [f"add_{_snake(type(strategy).__name__)}(" for strategy in pair]
    assert written.index(calls[0]) <= written.rindex(calls[1])


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


# ---- retry and the others --------------------------------------------------------------------------


async def test_retries_in_retries_multiply(clock: VirtualClock) -> None:
    """Case RT-19: without a budget (1 + 1) × (1 + 2) attempts are what was asked for; each waits its own delay."""
    pipeline = build(
        clock, Retry(max_retry_attempts=1, delay=10), Retry(max_retry_attempts=2, delay=1)
    )
    fn = Scripted(ConnectionError, clock=clock)
    await raised_by(pipeline.execute, fn)
    assert fn.starts == [0, 1, 2, 12, 13, 14]


async def test_a_breaker_in_a_retry_counts_every_attempt(clock: VirtualClock) -> None:
    """Case RT-17: it opens between two attempts; the retry waits for the end of the break and does not hammer."""
    control = CircuitBreakerControl()
    pipeline = build(clock, Retry(max_retry_attempts=3, delay=1), breaker(control))
    fn = Scripted(ConnectionError, ConnectionError, "value", clock=clock)
    assert await pipeline.execute(fn) == "value"
    assert fn.starts == [0, 1, 6]


async def test_a_breaker_around_a_retry_counts_the_call(clock: VirtualClock) -> None:
    """However many attempts it took: one outcome, the last."""
    control = CircuitBreakerControl()
    pipeline = build(clock, breaker(control), Retry(max_retry_attempts=3, delay=1))
    fn = Scripted(ConnectionError)
    await raised_by(pipeline.execute, fn)
    assert fn.calls == 4
    assert (control.metrics.throughput, control.metrics.failures) == (1, 1)
    assert control.state == "closed"


async def test_a_timeout_in_a_retry_limits_each_attempt(clock: VirtualClock) -> None:
    """CO-1, retry(timeout(fn)): each has a limit of its own, the wait between them counts for none, and an expiry is tried again."""
    pipeline = build(clock, Retry(delay=1), Timeout(5))
    fn = Taking(clock, 100, 100, 4)
    assert await pipeline.execute(fn) == "value"
    assert fn.starts == [0, 6, 12]
    assert clock.now() == 16


async def test_a_timeout_around_a_retry_limits_the_whole(clock: VirtualClock) -> None:
    """Attempts and waits together; in the middle of a wait it ends the call, and no further attempt comes."""
    pipeline = build(clock, Timeout(5), Retry(delay=2, max_retry_attempts=10))
    fn = Scripted(ConnectionError, clock=clock)
    assert isinstance(await raised_by(pipeline.execute, fn), TimeoutRejectedError)
    assert clock.now() == 5
    await clock.sleep(100)
    assert fn.starts == [0, 2, 4]


async def test_a_fallback_in_a_retry_leaves_it_nothing_to_do(clock: VirtualClock) -> None:
    """The first failure is replaced already, and the retry sees a success."""
    pipeline = build(clock, Retry(), Fallback(fallback_value="substitute"))
    fn = Scripted(ConnectionError)
    assert await pipeline.execute(fn) == "substitute"
    assert fn.calls == 1


async def test_a_fallback_around_a_retry_waits_for_its_last_attempt(clock: VirtualClock) -> None:
    """Once, after all of them."""
    told: list[float] = []
    pipeline = build(
        clock,
        Fallback(fallback_value="substitute", on_fallback=lambda _: told.append(clock.now())),
        Retry(delay=1),
    )
    fn = Scripted(ConnectionError, clock=clock)
    assert await pipeline.execute(fn) == "substitute"
    assert fn.starts == [0, 1, 2, 3]
    assert told == [3]


async def test_a_permit_in_a_retry_is_free_during_the_wait(clock: VirtualClock) -> None:
    """Each attempt takes its own, and another call gets in between."""
    pipeline = build(clock, Retry(delay=10), ConcurrencyLimiter(1))
    fn = Scripted(ConnectionError, "value", clock=clock)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await clock.sleep(5)
        assert await pipeline.execute(Scripted("other")) == "other"
    assert call.value == "value"


async def test_a_permit_around_a_retry_is_held_during_the_wait(clock: VirtualClock) -> None:
    """One for all attempts; another call is refused meanwhile, and that is nothing the retry would hear of."""
    pipeline = build(clock, ConcurrencyLimiter(1), Retry(delay=10))
    fn = Scripted(ConnectionError, "value", clock=clock)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await clock.sleep(5)
        other = Scripted("other")
        refused = await raised_by(pipeline.execute, other)
        assert isinstance(refused, ConcurrencyLimiterRejectedError)
        assert (other.calls, clock.now()) == (0, 5)
    assert call.value == "value"
    assert await pipeline.execute(Scripted("other")) == "other"


async def test_a_refusal_of_a_limiter_in_a_retry_is_tried_again(clock: VirtualClock) -> None:
    """Until the permit is free."""
    pipeline = build(clock, Retry(delay=2), ConcurrencyLimiter(1))
    fn = Scripted("value", clock=clock)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, Taking(clock, 3))
        await tick()
        assert await pipeline.execute(fn) == "value"
    assert fn.starts == [4]


async def test_a_rate_in_a_retry_is_charged_for_every_attempt(clock: VirtualClock) -> None:
    """And the time that the limiter asks for is waited."""
    pipeline = build(clock, Retry(delay=0), RateLimiter(TokenBucket(2, 1, per=7)))
    fn = Scripted(ConnectionError, ConnectionError, "value", clock=clock)
    assert await pipeline.execute(fn) == "value"
    assert fn.starts == [0, 0, 7]


async def test_a_rate_around_a_retry_is_charged_for_the_call(clock: VirtualClock) -> None:
    """One permit, however many attempts; its own refusal is not tried again."""
    pipeline = build(clock, bucket(1), Retry(delay=0))
    fn = Scripted(ConnectionError)
    await raised_by(pipeline.execute, fn)
    assert fn.calls == 4
    assert isinstance(await raised_by(pipeline.execute, fn), RateLimiterRejectedError)
    assert fn.calls == 4
    assert clock.now() == 0


# ---- breaker and the others ------------------------------------------------------------------------


async def test_breakers_in_breakers_count_apart(clock: VirtualClock) -> None:
    """Both open at the second failure; the inner one's refusals would say nothing to the outer one."""
    outer, inner = CircuitBreakerControl(), CircuitBreakerControl()
    pipeline = build(clock, breaker(outer, name="outer"), breaker(inner, name="inner"))
    await pipeline.settle(Scripted(ConnectionError))
    inner.isolate()
    for _ in range(5):
        refused = await raised_by(pipeline.execute, Scripted("value"))
        assert isinstance(refused, BrokenCircuitError)
        assert refused.strategy_name == "inner"
    assert (outer.state, outer.metrics.throughput) == ("closed", 1)
    inner.close()
    await pipeline.settle(Scripted(ConnectionError))
    assert (outer.state, inner.state) == ("open", "closed")
    error = await raised_by(pipeline.execute, Scripted("value"))
    assert isinstance(error, BrokenCircuitError)
    assert error.strategy_name == "outer"


async def test_a_timeout_in_a_breaker_has_it_open(clock: VirtualClock) -> None:
    """Case CB-13: a call that hangs is a failure."""
    control = CircuitBreakerControl()
    pipeline = build(clock, breaker(control), Timeout(1))
    for _ in range(2):
        assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert control.state == "open"


async def test_a_timeout_around_a_breaker_is_no_evidence(clock: VirtualClock) -> None:
    """Case CB-13: its expiry reaches the breaker as a cancellation, which counts as nothing."""
    control = CircuitBreakerControl()
    pipeline = build(clock, Timeout(1), breaker(control))
    for _ in range(5):
        assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)
    assert (control.state, control.metrics.throughput) == ("closed", 0)


async def test_a_fallback_in_a_breaker_keeps_it_closed(clock: VirtualClock) -> None:
    """Replaced failures are successes to what is outside."""
    control = CircuitBreakerControl()
    pipeline = build(clock, breaker(control), Fallback(fallback_value="substitute"))
    for _ in range(5):
        assert await pipeline.execute(Scripted(ConnectionError)) == "substitute"
    assert (control.state, control.metrics.throughput, control.metrics.failures) == ("closed", 5, 0)


async def test_a_fallback_around_a_breaker_answers_for_it(clock: VirtualClock) -> None:
    """Failures while it is closed, and its refusals afterwards; then nothing is called."""
    control = CircuitBreakerControl()
    pipeline = build(clock, Fallback(fallback_value="substitute"), breaker(control))
    fn = Scripted(ConnectionError)
    for _ in range(5):
        assert await pipeline.execute(fn) == "substitute"
    assert (control.state, fn.calls) == ("open", 2)


async def test_a_limiter_in_a_breaker_says_nothing_about_the_service(clock: VirtualClock) -> None:
    """Refusals for want of a permit count as nothing; an open circuit does not even ask for one."""
    control = CircuitBreakerControl()
    pipeline = build(clock, breaker(control), ConcurrencyLimiter(1))
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, Taking(clock, 3))
        await tick()
        for _ in range(5):
            error = await raised_by(pipeline.execute, Scripted("value"))
            assert isinstance(error, ConcurrencyLimiterRejectedError)
        assert (control.state, control.metrics.throughput) == ("closed", 0)
        control.isolate()
        assert isinstance(await raised_by(pipeline.execute, Scripted("value")), BrokenCircuitError)


async def test_a_limiter_around_a_breaker_is_asked_first(clock: VirtualClock) -> None:
    """An open circuit's refusals give the permit back, and are heard of only by whoever gets one."""
    control = CircuitBreakerControl()
    pipeline = build(clock, ConcurrencyLimiter(1), breaker(control))
    control.isolate()
    for _ in range(5):
        assert isinstance(await raised_by(pipeline.execute, Scripted("value")), BrokenCircuitError)
    control.close()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, Taking(clock, 3))
        await tick()
        control.isolate()
        error = await raised_by(pipeline.execute, Scripted("value"))
        assert isinstance(error, ConcurrencyLimiterRejectedError)


async def test_a_rate_in_a_breaker_is_not_charged_while_it_is_open(clock: VirtualClock) -> None:
    """Refusals of the circuit take no permit, refusals of the limiter count as nothing."""
    control = CircuitBreakerControl()
    pipeline = build(clock, breaker(control), bucket(3))
    for _ in range(2):
        await pipeline.settle(Scripted(ConnectionError))
    for _ in range(5):
        assert isinstance(await raised_by(pipeline.execute, Scripted("value")), BrokenCircuitError)
    await clock.sleep(5)
    assert await pipeline.execute(Scripted("value")) == "value"  # the third permit
    for _ in range(5):
        error = await raised_by(pipeline.execute, Scripted("value"))
        assert isinstance(error, RateLimiterRejectedError)
    assert (control.state, control.metrics.failures) == ("closed", 0)


async def test_a_rate_around_a_breaker_is_charged_for_its_refusals(clock: VirtualClock) -> None:
    """Permits are spent on calls that the open circuit refuses."""
    control = CircuitBreakerControl()
    pipeline = build(clock, bucket(3), breaker(control))
    control.isolate()
    errors = [type(await raised_by(pipeline.execute, Scripted("value"))).__name__ for _ in range(4)]
    assert errors == ["IsolatedCircuitError"] * 3 + ["RateLimiterRejectedError"]


# ---- timeout and the others ------------------------------------------------------------------------


@pytest.mark.parametrize(("outer", "inner", "named"), [(3, 5, "outer"), (5, 3, "inner")])
async def test_of_two_timeouts_the_shorter_ends_the_call(
    clock: VirtualClock, outer: float, inner: float, named: str
) -> None:
    """And is the one named."""
    pipeline = build(clock, Timeout(outer, name="outer"), Timeout(inner, name="inner"))
    error = await raised_by(pipeline.execute, Hanging())
    assert isinstance(error, TimeoutRejectedError)
    assert (error.strategy_name, error.timeout, clock.now()) == (named, 3, 3)


async def test_a_fallback_in_a_timeout_is_limited_with_the_rest(clock: VirtualClock) -> None:
    """Call and action share the limit."""
    pipeline = build(clock, Timeout(5), Fallback(Taking(clock, 3)))
    assert await pipeline.execute(Scripted(ConnectionError, clock=clock, takes=1)) == "value"
    error = await raised_by(pipeline.execute, Scripted(ConnectionError, clock=clock, takes=3))
    assert isinstance(error, TimeoutRejectedError)
    assert clock.now() == 4 + 5


async def test_a_fallback_around_a_timeout_has_all_the_time(clock: VirtualClock) -> None:
    """The expiry is replaced, and the action takes as long as it takes."""
    pipeline = build(clock, Fallback(Taking(clock, 100)), Timeout(5))
    hanging: Any = Hanging()
    assert await pipeline.execute(hanging) == "value"
    assert clock.now() == 105


async def test_the_queue_of_a_limiter_in_a_timeout_counts(clock: VirtualClock) -> None:
    """A call may time out while it waits for its permit; its place is free then and its callback never runs."""
    pipeline = build(clock, Timeout(5), ConcurrencyLimiter(1, 1))
    held = build(clock, ConcurrencyLimiter(1, 1))
    shared = ResiliencePipelineBuilder(clock=clock).add_timeout(5).add_pipeline(held).build()
    fn = Scripted("value")
    async with anyio.create_task_group() as tasks:
        spawn(tasks, held.execute, Taking(clock, 12))
        await tick()
        for _ in range(2):  # one after another, in the queue's one place
            assert isinstance(await raised_by(shared.execute, fn), TimeoutRejectedError)
        assert (fn.calls, clock.now()) == (0, 10)
        assert await shared.execute(fn) == "value"
        assert clock.now() == 12
    assert await pipeline.execute(fn) == "value"


async def test_the_queue_of_a_limiter_around_a_timeout_does_not_count(clock: VirtualClock) -> None:
    """The limit begins with the permit; an expiry gives the permit back."""
    pipeline = build(clock, ConcurrencyLimiter(1, 1), Timeout(5))
    async with anyio.create_task_group() as tasks:
        first = spawn(tasks, pipeline.execute, Hanging())
        await tick()
        assert await pipeline.execute(Taking(clock, 4)) == "value"
        assert clock.now() == 5 + 4
    assert isinstance(first.error, TimeoutRejectedError)


async def test_the_pace_of_a_limiter_in_a_timeout_counts(clock: VirtualClock) -> None:
    """Waiting for the rate is part of the time; who gave up takes no permit later."""
    limiter = RateLimiter(TokenBucket(1, 1, per=10), queue_limit=5)
    pipeline = build(clock, Timeout(5), limiter)
    await pipeline.execute(Scripted("value"))
    fn = Scripted("value", clock=clock)
    assert isinstance(await raised_by(pipeline.execute, fn), TimeoutRejectedError)
    await clock.sleep(5)
    assert await pipeline.execute(fn) == "value"
    assert fn.starts == [10]


async def test_the_pace_of_a_limiter_around_a_timeout_does_not_count(clock: VirtualClock) -> None:
    """The limit begins when the call may start."""
    limiter = RateLimiter(TokenBucket(1, 1, per=10), queue_limit=5)
    pipeline = build(clock, limiter, Timeout(5))
    await pipeline.execute(Scripted("value"))
    fn = Taking(clock, 4)
    assert await pipeline.execute(fn) == "value"
    assert (fn.starts, clock.now()) == ([10], 14)


# ---- fallback and the others -----------------------------------------------------------------------


async def test_of_two_fallbacks_the_inner_one_answers(clock: VirtualClock) -> None:
    """FB-5: the outer one is asked when the inner one's own action fails, and only then."""
    asked: list[str] = []

    def inner(_: object) -> str:
        asked.append("inner")
        if len(asked) > 1:
            raise ConnectionError("the substitute's")
        return "inner"

    def outer(event: Any) -> str:
        asked.append(f"outer, because of {event.outcome.error}")
        return "outer"

    pipeline = build(clock, Fallback(outer), Fallback(inner))
    assert await pipeline.execute(Scripted(ConnectionError("the call's"))) == "inner"
    assert await pipeline.execute(Scripted(ConnectionError("the call's"))) == "outer"
    assert asked == ["inner", "inner", "outer, because of the substitute's"]


@pytest.mark.parametrize("kind", ["ConcurrencyLimiter", "RateLimiter"])
async def test_a_fallback_around_a_limiter_answers_for_its_refusals(
    clock: VirtualClock, kind: str
) -> None:
    """The substitute comes at once, without a permit."""
    limiter = ConcurrencyLimiter(1) if kind == "ConcurrencyLimiter" else bucket(1)
    pipeline = build(clock, Fallback(fallback_value="substitute"), limiter)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, Taking(clock, 3))
        await tick()
        assert await pipeline.execute(Scripted("value")) == "substitute"
        assert clock.now() == 0


async def test_a_limiter_around_a_fallback_limits_the_substitute_too(clock: VirtualClock) -> None:
    """The permit is held while the action runs, and a refusal comes out as it is."""
    pipeline = build(clock, ConcurrencyLimiter(1), Fallback(Taking(clock, 3)))
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Scripted(ConnectionError))
        await tick()
        outcome = await pipeline.settle(Scripted("value"))
        assert isinstance(outcome, Rejected)
        assert clock.now() == 0
    assert call.value == "value"
    assert await pipeline.execute(Scripted("free")) == "free"


async def test_a_rate_around_a_fallback_comes_out_when_it_refuses(clock: VirtualClock) -> None:
    """The fallback never hears of it; a replaced call has cost its permit."""
    pipeline = build(clock, bucket(1), Fallback(fallback_value="substitute"))
    assert await pipeline.execute(Scripted(ConnectionError)) == "substitute"
    assert isinstance(
        await raised_by(pipeline.execute, Scripted("value")), RateLimiterRejectedError
    )


# ---- limiters and limiters -------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [(2, 3), (3, 2)])
async def test_of_two_concurrency_limits_the_smaller_holds(
    clock: VirtualClock, limits: tuple[int, int]
) -> None:
    """MC-3: whichever is outside."""
    pipeline = build(clock, *(ConcurrencyLimiter(limit, 10) for limit in limits))
    inside: list[int] = []
    now_inside = 0

    async def enter() -> None:
        nonlocal now_inside
        now_inside += 1
        inside.append(now_inside)
        await clock.sleep(1)
        now_inside -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(pipeline.execute, enter)
    assert max(inside) == 2
    assert (len(inside), clock.now()) == (8, 4)


@pytest.mark.parametrize("intervals", [(1, 3), (3, 1)])
async def test_of_two_rates_the_slower_holds(
    clock: VirtualClock, intervals: tuple[float, float]
) -> None:
    """RL-4: whichever is outside."""
    pipeline = build(
        clock, *(RateLimiter(TokenBucket(1, 1, per=each), queue_limit=10) for each in intervals)
    )
    fn = Scripted("value", clock=clock)
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(pipeline.execute, fn)
    assert fn.starts == [0, 3, 6, 9]


async def test_a_permit_around_a_rate_is_held_while_it_paces(clock: VirtualClock) -> None:
    """Who waits for the rate is inside already."""
    pipeline = build(
        clock, ConcurrencyLimiter(1), RateLimiter(TokenBucket(1, 1, per=10), queue_limit=10)
    )
    await pipeline.execute(Scripted("value"))
    fn = Scripted("value", clock=clock)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, fn)
        await tick()
        error = await raised_by(pipeline.execute, Scripted("value"))
        assert isinstance(error, ConcurrencyLimiterRejectedError)
    assert fn.starts == [10]


async def test_a_rate_around_a_permit_is_charged_for_its_refusals(clock: VirtualClock) -> None:
    """Who comes in for want of a permit has used the rate; who is paced holds none."""
    pipeline = build(clock, bucket(2), ConcurrencyLimiter(1))
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, Taking(clock, 3))
        await tick()
        errors = [type(await raised_by(pipeline.execute, Scripted("value"))) for _ in range(2)]
    assert errors == [ConcurrencyLimiterRejectedError, RateLimiterRejectedError]


# ---- three at a time ---------------------------------------------------------------------------------


async def test_a_fallback_comes_after_all_attempts_have_timed_out(clock: VirtualClock) -> None:
    """CO-1, fallback(retry(timeout(fn))): the last resort, once."""
    pipeline = build(
        clock,
        Fallback(fallback_value="substitute"),
        Retry(max_retry_attempts=2, delay=1),
        Timeout(5),
    )
    hanging: Any = Hanging()
    assert await pipeline.execute(hanging) == "substitute"
    assert (hanging.calls, hanging.cancelled) == (3, 3)
    assert clock.now() == 5 + 1 + 5 + 1 + 5


async def many(pipeline: ResiliencePipeline[Any], fn: Callable[[], Awaitable[Any]]) -> list[bool]:
    """Six calls at once; which of them had a value."""
    good: list[bool] = []

    async def call() -> None:
        good.append((await pipeline.settle(fn)).ok)

    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(call)
    return good


def pacing() -> RateLimiter:
    """A call every 50 ms, whoever comes earlier waits."""
    return RateLimiter(TokenBucket(1, 20), queue_limit=100)


async def test_pacing_outside_a_timeout_costs_nobody_the_call(clock: VirtualClock) -> None:
    """retry(rate_limiter(timeout(fn))): six calls, six starts, all good."""
    pipeline = build(clock, Retry(max_retry_attempts=1, delay=0), pacing(), Timeout(0.12))
    fn = Scripted("value")
    assert await many(pipeline, fn) == [True] * 6
    assert fn.calls == 6


async def test_pacing_inside_a_timeout_costs_calls_but_no_permits(clock: VirtualClock) -> None:
    """retry(timeout(rate_limiter(fn))): who gave up in the queue has left it, starts nothing later, and delays nobody."""
    pipeline = build(clock, Retry(max_retry_attempts=1, delay=0), Timeout(0.12), pacing())
    starts = Taking(clock, 0)
    good = await many(pipeline, starts)
    ended_at = clock.now()
    assert good.count(True) == len(starts.starts)
    assert starts.starts == pytest.approx([0.05 * number for number in range(len(starts.starts))])
    await clock.sleep(10)
    assert len(starts.starts) == good.count(True)
    assert ended_at <= 0.24 + 1e-9


async def test_attempts_of_a_stream_do_not_overlap(clock: VirtualClock) -> None:
    """CO-1, retry(timeout(source)): the source that was too slow has been closed before the next is opened."""
    log: list[str] = []
    delays = iter((100, 100, 1))

    async def source() -> AsyncIterator[str]:
        log.append("opened")
        try:
            await clock.sleep(next(delays))
            yield "chunk"
        finally:
            log.append("closed")

    pipeline = build(clock, Retry(delay=1), Timeout(5))
    async with pipeline.execute_stream(source) as stream:
        assert [chunk async for chunk in stream] == ["chunk"]
    assert log == ["opened", "closed"] * 3
    assert clock.now() == 5 + 1 + 5 + 1 + 1


async def test_the_llm_stack_works_as_it_reads(clock: VirtualClock) -> None:
    """Two attempts that hang open the circuit, the third is refused and waits for the end of the break, the last is good."""
    control = CircuitBreakerControl()
    pipeline = build(
        clock,
        Fallback(fallback_value="substitute"),
        ConcurrencyLimiter(10),
        Retry(max_retry_attempts=3, delay="500ms", backoff_type="exponential"),
        breaker(control),
        Timeout("10s"),
    )
    fn = Taking(clock, 100, 100, 4)
    assert await pipeline.execute(fn) == "value"
    # Refused at 21.5 with 4 s of the break to go: longer than the delay of 2 s.
    assert fn.starts == [0, 10.5, 25.5]
    assert control.state == "closed"
