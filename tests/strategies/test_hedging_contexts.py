"""Hedging: contexts of attempts and what merges back; histories; other strategies inside and outside; nested pipelines."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    Attempt,
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    Failure,
    HedgingActionEvent,
    HedgingDelayEvent,
    HedgingEvent,
    MisuseError,
    OutcomeEvent,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    TokenBucket,
    current_context,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.racers import Racers
from support.scripted import Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder
KEY: PropertyKey[Any] = PropertyKey("key")
OTHER: PropertyKey[Any] = PropertyKey("other")

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


class Writers:
    """A callback whose n-th attempt notes its number, writes a property, and takes its time."""

    def __init__(self, clock: VirtualClock, *seconds: float, fails: frozenset[int] = frozenset()):
        self._clock = clock
        self._seconds = seconds
        self._fails = fails
        self.contexts: list[ResilienceContext] = []

    async def __call__(self) -> int:
        context = current_context()
        self.contexts.append(context)
        number = context.attempt
        context.properties.set(KEY, number)
        await self._clock.sleep(self._seconds[number])
        if number in self._fails:
            raise ConnectionError(number)
        return number


# ---- contexts -----------------------------------------------------------------------------------


async def test_each_attempt_has_a_context_of_its_own(clock: VirtualClock) -> None:
    """HG-17, case HG-09: the first attempt's too; all of the caller's is copied."""
    context = ResilienceContext("op", properties={OTHER: "the caller's"})
    fn = Writers(clock, 10, 10, 10)
    pipeline = B(name="p", clock=clock).add_hedging(max_hedged_attempts=2, delay=0).build()
    assert await pipeline.execute(fn, context=context) == 0
    assert len({id(each) for each in [context, *fn.contexts]}) == 4
    assert sorted(each.attempt for each in fn.contexts) == [0, 1, 2]
    for each in fn.contexts:
        assert (each.operation_key, each.pipeline_name, each.idempotent) == ("op", "p", True)
        assert each.properties.get(OTHER) == "the caller's"
        assert each.properties is not context.properties


@pytest.mark.parametrize("winner", [0, 1, 2])
async def test_only_the_winners_properties_merge_back(clock: VirtualClock, winner: int) -> None:
    """HG-18, case HG-09: into the bag the caller has always had."""
    context = ResilienceContext(properties={OTHER: "the caller's"})
    bag = context.properties
    seconds = [100.0, 100.0, 100.0]
    seconds[winner] = 10
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=1).build()
    assert await pipeline.execute(Writers(clock, *seconds), context=context) == winner
    assert context.properties is bag
    assert (bag.get(KEY), bag.get(OTHER)) == (winner, "the caller's")


async def test_all_handled_the_first_attempts_properties_merge_back(clock: VirtualClock) -> None:
    """Small print: its outcome, its properties."""
    context = ResilienceContext()
    fn = Writers(clock, 1, 5, 3, fails=frozenset({0, 1, 2}))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=0).build()
    assert (await raised_by(partial(pipeline.execute, fn, context=context))).args == (0,)
    assert context.properties.get(KEY) == 0


async def test_an_unhandled_error_merges_its_attempts_properties(clock: VirtualClock) -> None:
    """It is a winner like any other."""
    context = ResilienceContext()
    fn = Writers(clock, 100, 1, fails=frozenset({1}))
    pipeline = B(clock=clock).add_hedging(should_handle=KeyError).build()
    assert (await raised_by(partial(pipeline.execute, fn, context=context))).args == (1,)
    assert context.properties.get(KEY) == 1


async def test_nothing_merges_back_from_a_call_that_was_cancelled(clock: VirtualClock) -> None:
    """There is no winner."""
    context = ResilienceContext()
    fn = Writers(clock, math.inf, math.inf)
    pipeline = B(clock=clock).add_hedging(delay=0).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, partial(pipeline.execute, fn, context=context))
        await tick()
        call.cancel()
    assert KEY not in context.properties


async def test_what_a_hook_writes_for_the_caller_is_not_taken_back(clock: VirtualClock) -> None:
    """A winner's stale copy of what it never wrote does not overwrite what the caller's context got meanwhile."""
    context = ResilienceContext(properties={KEY: "before", OTHER: "before"})

    def on_hedging(event: HedgingEvent) -> None:
        event.context.properties.set(KEY, "by the hook")

    async def fn() -> None:
        current_context().properties.set(OTHER, "by the attempt")
        await clock.sleep(10)

    pipeline = B(clock=clock).add_hedging(on_hedging=on_hedging).build()
    await pipeline.execute(fn, context=context)
    assert context.properties.get(KEY) == "by the hook"
    assert context.properties.get(OTHER) == "by the attempt"


async def test_a_stored_none_merges_back(clock: VirtualClock) -> None:
    """`None` is a value like any other."""
    context = ResilienceContext()

    async def fn() -> None:
        current_context().properties.set(KEY, None)

    await B(clock=clock).add_hedging().build().execute(fn, context=context)
    assert context.properties.get(KEY) is None


async def test_what_the_hook_writes_for_the_attempt_is_seen_by_it_alone(
    clock: VirtualClock,
) -> None:
    """HG-19: the hedge sees it; while it runs, neither the caller's context nor another attempt does."""
    context = ResilienceContext()
    seen: list[tuple[int, Any, Any]] = []

    def on_hedging(event: HedgingEvent) -> None:
        event.attempt_context.properties.set(KEY, event.attempt)

    async def fn() -> int:
        own = current_context()
        await clock.sleep(5)
        seen.append(
            (own.attempt, own.properties.get(KEY, "none"), context.properties.get(KEY, "none"))
        )
        return own.attempt

    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=2, delay=0, on_hedging=on_hedging).build()
    )
    assert await pipeline.execute(fn, context=context) == 0
    assert set(seen) <= {(0, "none", "none"), (1, 0, "none"), (2, 1, "none")}
    assert (0, "none", "none") in seen
    assert KEY not in context.properties


async def test_what_the_action_generator_writes_is_seen_by_the_action() -> None:
    """Its event's context is the attempt's own."""

    async def action() -> object:
        return current_context().properties.get(KEY)

    def generate(event: HedgingActionEvent) -> Callable[[], Awaitable[object]]:
        event.context.properties.set(KEY, "for the action")
        assert KEY not in event.primary_context.properties
        return action

    pipeline = B().add_hedging(delay=-1, action_generator=generate).build()
    assert await pipeline.execute(Scripted(ConnectionError())) == "for the action"


async def test_the_current_context_is_the_attempts_inside_and_the_callers_in_hooks(
    clock: VirtualClock,
) -> None:
    """`current_context()` follows the task; after the call there is none."""
    context = ResilienceContext()
    in_hooks: list[ResilienceContext] = []

    def hook(event: object) -> None:
        in_hooks.append(current_context())

    def delay(event: HedgingDelayEvent) -> int:
        hook(event)
        return 2

    fn = Writers(clock, math.inf, 1)
    pipeline = B(clock=clock).add_hedging(delay_generator=delay, on_hedging=hook).build()
    await pipeline.execute(fn, context=context)
    assert in_hooks == [context, context]
    assert context not in fn.contexts
    with pytest.raises(LookupError):
        current_context()


_var: ContextVar[str] = ContextVar("var")


async def test_the_callers_context_variables_are_seen_everywhere(clock: VirtualClock) -> None:
    """Case HG-09: in every attempt, hook and generator; what an attempt sets stays with it."""
    seen: list[str] = []

    def look(event: object) -> Any:
        seen.append(_var.get())

    async def fn() -> None:
        seen.append(_var.get())
        _var.set("inner")
        await clock.sleep(10)

    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=2,
            should_handle=lambda event: bool(look(event)),
            delay_generator=look,
            on_hedging=look,
            action_generator=lambda event: (look(event), event.callback)[1],
        )
        .build()
    )
    _var.set("outer")
    await pipeline.execute(fn)
    assert set(seen) == {"outer"}
    assert len(seen) == 3 + 2 * 3 + 1
    assert _var.get() == "outer"


# ---- history ------------------------------------------------------------------------------------


async def test_each_attempt_has_a_record(clock: VirtualClock) -> None:
    """HG-30: numbers from 0, durations, the time between launches, and which were hedges; the cancelled have no outcome."""
    error = ConnectionError("second")
    fn = Racers(clock, (math.inf, None), (1, error), (2, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=5).build()
    outcome = await pipeline.settle(fn)
    assert outcome == Success("third")
    assert outcome.attempts == (
        Attempt(number=0, outcome=None, duration=8.0, delay=0.0, hedged=False),
        Attempt(number=1, outcome=Failure(error), duration=1.0, delay=5.0, hedged=True),
        Attempt(number=2, outcome=Success("third"), duration=2.0, delay=1.0, hedged=True),
    )
    assert outcome.attempt_count == 3


async def test_a_single_attempt_has_a_single_record(clock: VirtualClock) -> None:
    """No hedge, no more records."""
    outcome = await B(clock=clock).add_hedging().build().settle(Racers(clock, (1, "first")))
    assert outcome.attempts == (
        Attempt(number=0, outcome=Success("first"), duration=1.0, delay=0.0, hedged=False),
    )


async def test_all_handled_every_record_has_its_outcome(clock: VirtualClock) -> None:
    """HG-30: 0, 1, 2, each with a positive duration."""
    errors = [ConnectionError(str(number)) for number in range(3)]
    fn = Racers(clock, *((3 - number, error) for number, error in enumerate(errors)))
    outcome = await B(clock=clock).add_hedging(max_hedged_attempts=2, delay=0).build().settle(fn)
    assert outcome == Failure(errors[0])
    assert [record.number for record in outcome.attempts] == [0, 1, 2]
    assert [record.outcome for record in outcome.attempts] == [Failure(e) for e in errors]
    assert [record.duration for record in outcome.attempts] == [3, 2, 1]


async def test_a_failed_action_generator_has_a_record() -> None:
    """What it raised became that attempt's outcome."""
    error = KeyError("the generator's")

    def generate(event: HedgingActionEvent) -> None:
        raise error

    pipeline = (
        B().add_hedging(delay=-1, action_generator=generate, should_handle=ConnectionError).build()
    )
    outcome = await pipeline.settle(Scripted(ConnectionError()))
    assert outcome == Failure(error)
    assert [record.outcome for record in outcome.attempts][1:] == [Failure(error)]


async def test_the_records_of_a_retry_inside_stand_for_the_attempts(clock: VirtualClock) -> None:
    """The innermost of them where they nest: the inner tries of all attempts, in order of the attempts."""
    fn = Scripted(*[ConnectionError()] * 3, "value")
    pipeline = B(clock=clock).add_hedging(delay=-1).add_retry(max_retry_attempts=1, delay=3).build()
    outcome = await pipeline.settle(fn)
    assert outcome == Success("value")
    assert [record.number for record in outcome.attempts] == [0, 1, 0, 1]
    assert [record.delay for record in outcome.attempts] == [0, 3, 0, 3]
    assert outcome.attempt_count == 4


async def test_the_records_of_hedging_inside_stand_for_the_tries(clock: VirtualClock) -> None:
    """The same the other way round; a retry outside goes on counting."""
    fn = Scripted(*[ConnectionError()] * 3, "value")
    pipeline = B(clock=clock).add_retry(max_retry_attempts=1, delay=3).add_hedging(delay=-1).build()
    outcome = await pipeline.settle(fn)
    assert outcome == Success("value")
    assert [(record.number, record.hedged) for record in outcome.attempts] == [
        (0, False),
        (1, True),
        (0, False),
        (1, True),
    ]
    assert outcome.attempt_count == 4


async def test_the_latest_64_records_are_kept_and_all_are_counted(clock: VirtualClock) -> None:
    """However many attempts with however many tries there were."""
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=10, delay=-1)
        .add_retry(max_retry_attempts=8, delay=0)
        .build()
    )
    outcome = await pipeline.settle(Scripted(ConnectionError()))
    assert (len(outcome.attempts), outcome.attempt_count) == (64, 99)


async def test_attempts_are_no_part_of_what_makes_outcomes_equal(clock: VirtualClock) -> None:
    """Hedged or not, a value is a value."""
    pipeline = B(clock=clock).add_hedging().build()
    one = await pipeline.settle(Racers(clock, (1, "value")))
    other = await pipeline.settle(Racers(clock, (math.inf, None), (1, "value")))
    assert one == other
    assert len(one.attempts) != len(other.attempts)


# ---- other strategies ---------------------------------------------------------------------------


async def test_a_refusal_inside_is_rejected_as_settle_shows_it(clock: VirtualClock) -> None:
    """A rejection of this pipeline's own strategies, to the predicate and to the caller."""
    seen: list[object] = []

    def should_handle(event: OutcomeEvent) -> bool:
        seen.append(type(event.outcome))
        return True

    pipeline = (
        B(clock=clock).add_hedging(delay=-1, should_handle=should_handle).add_timeout(3).build()
    )
    outcome = await pipeline.settle(Racers(clock, (math.inf, None)))
    assert isinstance(outcome, Rejected)
    assert isinstance(outcome.error, TimeoutRejectedError)
    assert seen == [Rejected, Rejected]


async def test_a_timeout_inside_limits_each_attempt_by_itself(clock: VirtualClock) -> None:
    """Each in its own task: one's expiry is its own."""
    fn = Racers(clock, (math.inf, None), (4, "second"))
    pipeline = B(clock=clock).add_hedging(delay=2).add_timeout(5).build()
    assert await pipeline.execute(fn) == "second"
    assert (fn.cut, clock.now()) == ([0], 6)


async def test_a_loser_is_no_evidence_for_a_breaker_inside(clock: VirtualClock) -> None:
    """A cancellation is never a failure, and never a success."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_hedging(delay=2)
        .add_circuit_breaker(failure_ratio=0.1, minimum_throughput=2, control=control)
        .build()
    )
    for _ in range(5):
        assert await pipeline.execute(Racers(clock, (math.inf, None), (1, "hedge"))) == "hedge"
    assert (control.state, control.metrics.throughput) == ("closed", 5)


async def test_an_open_circuit_inside_is_hedged_at_once(clock: VirtualClock) -> None:
    """A refusal is a handled outcome; all refused, the first refusal comes out."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=2)
        .add_circuit_breaker(control=control)
        .build()
    )
    control.isolate()
    outcome = await pipeline.settle(Scripted("never"))
    assert isinstance(outcome.error, BrokenCircuitError)
    assert (len(outcome.attempts), clock.now()) == (3, 0)


async def test_losers_give_their_permits_back(clock: VirtualClock) -> None:
    """A limiter inside: a loser's permit and its place in the queue."""
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=2, delay=1)
        .add_concurrency_limiter(2, queue_limit=1)
        .build()
    )
    for _ in range(5):
        fn = Racers(clock, (math.inf, None), (5, "second"), (1, "third"))
        assert await pipeline.execute(fn) == "second"
        assert fn.running == 0


async def test_retry_outside_repeats_the_whole_race(clock: VirtualClock) -> None:
    """When all attempts came out handled, the first outcome is what the retry judges."""
    fn = Scripted(*[ConnectionError()] * 5, "value")
    pipeline = (
        B(clock=clock).add_retry(delay=1).add_hedging(max_hedged_attempts=1, delay=-1).build()
    )
    assert await pipeline.execute(fn) == "value"
    assert (fn.calls, clock.now()) == (6, 2)


async def test_retry_inside_repeats_within_one_attempt(clock: VirtualClock) -> None:
    """Each attempt retries by itself, and they run beside each other."""
    starts: list[float] = []

    async def fn() -> str:
        starts.append(clock.now())
        await clock.sleep(1)
        if len(starts) < 4:
            raise ConnectionError
        return "value"

    pipeline = B(clock=clock).add_hedging(delay=2.5).add_retry(delay=1).build()
    assert await pipeline.execute(fn) == "value"
    assert (starts, clock.now()) == ([0, 2, 2.5, 4, 4.5], 5)


async def test_hedging_inside_hedging(clock: VirtualClock) -> None:
    """Each outer attempt is a race of its own; everybody else is gone when the outcome is there."""
    fn = Racers(clock, *[(math.inf, None)] * 3, (1, "the inner hedge of the outer hedge"))
    context = ResilienceContext()
    pipeline = B(clock=clock).add_hedging(delay=5).add_hedging(delay=3).build()
    assert await pipeline.execute(fn, context=context) == "the inner hedge of the outer hedge"
    assert fn.starts == [0, 3, 5, 8]
    assert (fn.running, sorted(fn.cut)) == (0, [0, 1, 2])


async def test_properties_merge_back_through_nested_races(clock: VirtualClock) -> None:
    """From the inner winner to the outer attempt, and on to the caller."""
    context = ResilienceContext()

    async def fn() -> str:
        context = current_context()
        if KEY not in context.properties:
            context.properties.set(KEY, "won")
        await clock.sleep(1)
        return "value"

    pipeline = B(clock=clock).add_hedging(delay=0).add_hedging(delay=0).build()
    await pipeline.execute(fn, context=context)
    assert context.properties.get(KEY) == "won"


# ---- nested pipelines ---------------------------------------------------------------------------


@pytest.mark.parametrize("hedging_in", ["the outer", "the nested"])
async def test_across_nested_pipelines(clock: VirtualClock, hedging_in: str) -> None:
    """Each attempt passes all that is inside, whichever pipeline that is in, and none gets mixed up."""
    log: list[int] = []

    async def fn() -> str:
        log.append(current_context().attempt)
        await clock.sleep(10 if len(log) == 1 else 1)
        return "value"

    if hedging_in == "the outer":
        nested = B(clock=clock).add_timeout(5).add_concurrency_limiter(5).build()
        pipeline = B(clock=clock).add_hedging().add_pipeline(nested).add_timeout(4).build()
    else:
        nested = B(clock=clock).add_timeout(50).add_hedging().build()
        pipeline = B(clock=clock).add_timeout(40).add_pipeline(nested).add_timeout(30).build()
    for _ in range(2):
        log.clear()
        assert await pipeline.execute(fn) == "value"
        assert log == [0, 1]
    with pytest.raises(LookupError):
        current_context()


async def test_a_nested_pipelines_clock_drives_its_attempts_alone(clock: VirtualClock) -> None:
    """Hedging outside by one clock, a nested pipeline of its own clock in each attempt."""
    inner = VirtualClock()
    nested = B(clock=inner).add_timeout(1).build()
    pipeline = B(clock=clock).add_hedging().add_pipeline(nested).build()
    fn = Racers(clock, (math.inf, None), (3, "hedge"))
    assert await pipeline.execute(fn) == "hedge"
    assert (clock.now(), inner.now(), inner.pending) == (5, 0, 0)


async def test_a_call_of_another_pipeline_in_an_attempt(clock: VirtualClock) -> None:
    """What the callback runs through a pipeline of its own has that one's contexts, and ends with its attempt."""
    other = B(name="other", clock=clock).add_hedging(max_hedged_attempts=2, delay=1).build()
    fn = Racers(clock, *[(math.inf, None)] * 5, (1, "found"))

    async def call() -> object:
        found = await other.execute(fn)
        assert current_context().pipeline_name == "this"
        return found

    pipeline = B(name="this", clock=clock).add_hedging(delay=10).build()
    assert await pipeline.execute(call) == "found"
    assert (fn.calls, fn.running) == (6, 0)


# ---- not idempotent -----------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [-1, 0, 1])
async def test_a_callback_that_was_invoked_is_not_hedged(clock: VirtualClock, delay: float) -> None:
    """`idempotent=False`: neither beside a slow attempt nor after a failed one."""
    events: list[object] = []
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=3, delay=delay, on_hedging=events.append)
        .build()
    )
    slow = Racers(clock, (100, "first"))
    assert await pipeline.execute(slow, idempotent=False) == "first"
    failed = Racers(clock, (1, ConnectionError("first")))
    error = await raised_by(partial(pipeline.execute, failed, idempotent=False))
    assert isinstance(error, ConnectionError)
    assert (slow.calls, failed.calls, events) == (1, 1, [])


async def test_an_attempt_that_was_refused_is_hedged(clock: VirtualClock) -> None:
    """`idempotent=False`: refused by what is inside, the callback was never invoked."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=2, delay=-1, on_hedging=lambda event: control.close())
        .add_circuit_breaker(control=control)
        .build()
    )
    control.isolate()
    fn = Scripted(ConnectionError("second"), "never")
    error = await raised_by(partial(pipeline.execute, fn, idempotent=False))
    assert isinstance(error, BrokenCircuitError)  # all handled: the first attempt's
    assert fn.calls == 1


async def test_no_hedge_starts_while_an_attempt_waits_in_a_queue() -> None:
    """`idempotent=False`: two that both wait could both start; when the one has ended unstarted, the next may."""
    clock = VirtualClock()
    limited = B(clock=clock).add_concurrency_limiter(1, queue_limit=5, max_wait=10).build()
    events: list[float] = []
    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=3,
            delay=2,
            on_hedging=lambda event: events.append(clock.now()),
            should_handle=ConcurrencyLimiterRejectedError,
        )
        .add_pipeline(limited)
        .build()
    )
    fn = Scripted("value", clock=clock)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, limited.execute, partial(clock.sleep, 15))
        await tick()
        call = spawn(tasks, partial(pipeline.execute, fn, idempotent=False))
        await tick()
        for _ in range(20):
            await clock.advance(1)
            await tick()
    assert call.value == "value"
    assert events == [10]
    assert fn.starts == [15]


@pytest.mark.parametrize("delay", [0, 2])
async def test_of_many_that_wait_in_a_queue_one_gets_to_the_callback(delay: float) -> None:
    """`idempotent=False`, a context of the caller's own, any mode: invoked once at most."""
    clock = VirtualClock(autojump=True)
    limited = B(clock=clock).add_rate_limiter(TokenBucket(1, 1, 30), queue_limit=9).build()
    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=5, delay=delay).add_pipeline(limited).build()
    )
    await limited.execute(Scripted("the permit"))
    fn = Scripted("value", clock=clock)
    context = ResilienceContext(idempotent=False)
    assert await pipeline.execute(fn, context=context) == "value"
    assert fn.starts == [30]


async def test_a_retry_outside_does_not_repeat_what_an_attempt_has_started(
    clock: VirtualClock,
) -> None:
    """`idempotent=False`: that an attempt's callback was invoked is known outside the race."""
    fn = Racers(clock, (1, ConnectionError()))
    pipeline = B(clock=clock).add_retry(delay=1).add_hedging(delay=2).build()
    error = await raised_by(partial(pipeline.execute, fn, idempotent=False))
    assert isinstance(error, ConnectionError)
    assert fn.calls == 1


async def test_a_retry_outside_repeats_a_race_in_which_nothing_was_started(
    clock: VirtualClock,
) -> None:
    """`idempotent=False`: all attempts refused, the retry may try again."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_retry(delay=1, on_retry=lambda event: control.close())
        .add_hedging(delay=-1)
        .add_circuit_breaker(control=control)
        .build()
    )
    control.isolate()
    fn = Scripted("value")
    assert await pipeline.execute(fn, idempotent=False) == "value"
    assert fn.calls == 1


# ---- one-shot arguments -------------------------------------------------------------------------


def _numbers() -> Iterator[int]:
    yield 1
    yield 2


async def _async_numbers() -> AsyncIterator[int]:
    yield 1


def _one_shot(kind: str) -> Any:
    return {"generator": _numbers, "async generator": _async_numbers, "coroutine": tick}[kind]()


def _close(argument: Any) -> None:
    if hasattr(argument, "close"):
        argument.close()


ONE_SHOT = pytest.mark.parametrize("kind", ["generator", "async generator", "coroutine"])


@ONE_SHOT
@pytest.mark.parametrize("given", ["an argument", "a partial's", "a partial's by keyword"])
async def test_a_second_attempt_on_a_one_shot_argument_is_refused(
    clock: VirtualClock, kind: str, given: str
) -> None:
    """Small print: a `MisuseError` before the second launch and its hook, the first attempt cancelled and awaited."""
    events: list[object] = []
    left: list[float] = []
    argument = _one_shot(kind)

    async def fn(numbers: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(3)
            left.append(clock.now())

    pipeline = B(clock=clock).add_hedging(delay=2, on_hedging=events.append).build()
    calls: dict[str, tuple[Any, ...]] = {
        "an argument": (fn, argument),
        "a partial's": (partial(fn, argument),),
        "a partial's by keyword": (partial(fn, numbers=argument),),
    }
    with pytest.raises(MisuseError, match="exhausted"):
        await pipeline.execute(*calls[given])
    assert (events, left) == ([], [5])
    _close(argument)


async def test_the_refusal_comes_from_the_failure() -> None:
    """As a retry's: the attempt's error is its cause."""
    failure = ConnectionError()
    pipeline = B().add_hedging(delay=-1).build()
    error = await raised_by(pipeline.execute, Scripted(failure), _numbers())
    assert isinstance(error, MisuseError)
    assert error.__cause__ is failure


@pytest.mark.parametrize("delay", [-1, 0, 2])
async def test_a_one_shot_argument_that_one_attempt_uses_is_none_of_our_business(
    clock: VirtualClock, delay: float
) -> None:
    """Without a second launch nothing is refused."""

    async def add(numbers: Iterator[int]) -> int:
        return sum(numbers)

    pipeline = B(clock=clock).add_hedging(delay=delay).build()
    assert await pipeline.execute(add, _numbers()) == 3


async def test_a_one_shot_argument_that_was_never_used_may_be_used_again() -> None:
    """Looked at only if the callback was invoked: a refused attempt has used up nothing."""
    control = CircuitBreakerControl()

    async def add(numbers: Iterator[int]) -> int:
        return sum(numbers)

    pipeline = (
        B()
        .add_hedging(delay=-1, on_hedging=lambda event: control.close())
        .add_circuit_breaker(control=control)
        .build()
    )
    control.isolate()
    assert await pipeline.execute(add, _numbers()) == 3


async def test_one_shot_arguments_with_idempotent_false_are_not_refused(
    clock: VirtualClock,
) -> None:
    """As the message says: then nothing is launched after an attempt that has used it."""

    async def add(numbers: Iterator[int]) -> int:
        await clock.sleep(100)
        return sum(numbers)

    pipeline = B(clock=clock).add_hedging(delay=2).build()
    assert await pipeline.execute(add, _numbers(), idempotent=False) == 3


async def test_an_action_of_ones_own_has_no_arguments_to_exhaust(clock: VirtualClock) -> None:
    """What stands in for the callback takes none."""
    fn = Racers(clock, (math.inf, None))
    pipeline = B(clock=clock).add_hedging(action_generator=lambda _: Scripted("action")).build()
    assert await pipeline.execute(fn, _numbers()) == "action"


async def test_wrapped_functions_are_hedged_with_their_arguments(clock: VirtualClock) -> None:
    """`wrap`: every attempt gets what the function was called with; one-shot arguments are refused alike."""
    seen: list[tuple[int, str]] = []

    @B(clock=clock).add_hedging(delay=2).build().wrap
    async def fn(first: Any, *, second: str) -> str:
        seen.append((current_context().attempt, second))
        await clock.sleep(100 if len(seen) == 1 else 1)
        return "value"

    assert await fn(1, second="two") == "value"
    assert seen == [(0, "two"), (1, "two")]
    seen.clear()
    with pytest.raises(MisuseError, match="exhausted"):
        await fn(_numbers(), second="two")


async def test_a_handled_result_is_hedged_inside_a_breaker(clock: VirtualClock) -> None:
    """What is outside sees one outcome, the winner's."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(minimum_throughput=2, control=control)
        .add_hedging(delay=-1, should_handle=handle_result(lambda result: result == "bad"))
        .build()
    )
    assert await pipeline.execute(Scripted("bad", "good")) == "good"
    assert (control.metrics.throughput, control.metrics.failures) == (1, 0)


async def test_what_the_hook_writes_for_a_hedge_that_wins_is_merged(clock: VirtualClock) -> None:
    """HG-19: it is the attempt's: seen by it, and merged with what that wrote itself if it wins."""

    def note(event: HedgingEvent) -> None:
        event.attempt_context.properties.set(KEY, "from the hook")
        assert KEY not in event.context.properties

    async def fn() -> object:
        context = current_context()
        if not context.attempt:
            await clock.sleep(math.inf)
        return context.properties.get(KEY)

    context = ResilienceContext()
    pipeline = B(clock=clock).add_hedging(delay=1, on_hedging=note).build()
    assert await pipeline.execute(fn, context=context) == "from the hook"
    assert context.properties.get(KEY) == "from the hook"


async def test_tries_of_a_retry_inside_tell_whether_they_belong_to_a_hedge(
    clock: VirtualClock,
) -> None:
    """Outcome: the innermost strategy's tries are listed, those within a hedge as hedged."""

    async def fn() -> object:
        if not current_context().attempt:
            raise ConnectionError
        return "second try"

    pipeline = B(clock=clock).add_hedging(delay=-1).add_retry(max_retry_attempts=1, delay=1).build()
    outcome = await pipeline.settle(fn)
    assert [each.hedged for each in outcome.attempts] == [False, False]

    refused = (
        B(clock=clock)
        .add_hedging(delay=-1, should_handle=handle_result(lambda value: value == "second try"))
        .add_retry(max_retry_attempts=1, delay=1)
        .build()
    )
    outcome = await refused.settle(fn)
    assert [each.hedged for each in outcome.attempts] == [False, False, True, True]
