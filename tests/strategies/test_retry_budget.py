"""Retry budgets at work: what retry and hedging charge, when they are refused, and what they give back."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    Hedging,
    HedgingEvent,
    KeysExceededEvent,
    MisuseError,
    OptionsError,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Retry,
    RetryBudget,
    RetryBudgetExhaustedEvent,
    RetryEvent,
    Success,
    TokenBucket,
    handle_result,
)
from resilience_pipeline.strategies import Site
from resilience_pipeline.testing import VirtualClock
from support.racers import Racers
from support.scripted import Closable, Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder

ANYIO = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


def tenth() -> RetryBudget:
    """One extra for ten executions, and no floor."""
    return RetryBudget(ratio=0.1, min_per_second=0, window="10s")


def only(extras: int) -> RetryBudget:
    """A budget of so many extras in a thousand seconds, whatever the firsts."""
    return RetryBudget(ratio=0, min_per_second=extras / 1000, window=1000)


async def left(budget: RetryBudget, clock: VirtualClock) -> int:
    """How many extras there are; afterwards there are none."""
    fn = Scripted(ConnectionError)
    pipeline = B(clock=clock).add_retry(max_retry_attempts=1000, delay=0, budget=budget).build()
    await raised_by(pipeline.execute, fn)
    return fn.calls - 1


# ---- options --------------------------------------------------------------------------------------


def test_the_defaults() -> None:
    """The contract's: a tenth, and one a second, over ten seconds."""
    budget = RetryBudget()
    assert (budget.ratio, budget.min_per_second, budget.window) == (0.1, 1, 10)
    assert repr(budget) == "RetryBudget()"


def test_options_read_back_in_seconds() -> None:
    """`window` is any duration."""
    assert RetryBudget(window="1m30s").window == 90
    assert RetryBudget(window=timedelta(minutes=2)).window == 120
    assert repr(RetryBudget(ratio=0.2, window="5s")) == "RetryBudget(ratio=0.2, window=5.0)"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("ratio", v) for v in [-0.1, math.nan, math.inf, True, "0.1", None]),
        *(("min_per_second", v) for v in [-1, math.nan, math.inf, False, "1", None]),
        *(("window", v) for v in [0, -1, math.inf, math.nan, True, "10", "soon", None]),
        *(("key", v) for v in ["host", 1]),
        *(("max_keys", v) for v in [0, 1.5, None]),
        *(("key_idle", v) for v in [0, -1, None]),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """An `OptionsError` names the option and shows the value."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError, match=rf"RetryBudget.*{option} must be") as caught:
        RetryBudget(**options)
    assert repr(value) in str(caught.value)


def test_all_bad_options_are_reported_at_once() -> None:
    """Three problems in one error."""
    bad: dict[str, Any] = {"ratio": -1, "min_per_second": "many", "window": 0}
    with pytest.raises(OptionsError) as caught:
        RetryBudget(**bad)
    assert [problem.split()[0] for problem in caught.value.problems] == list(bad)


def test_a_floor_of_nothing_and_a_ratio_above_one_are_allowed() -> None:
    """Small print: `min_per_second=0`; and two extras for each first make sense."""
    RetryBudget(min_per_second=0)
    RetryBudget(ratio=0, min_per_second=0)
    RetryBudget(ratio=2)


def test_options_are_keyword_only_and_spelt_right() -> None:
    """A misspelt one is a `TypeError` that suggests."""
    make: Any = RetryBudget
    with pytest.raises(TypeError):
        make(0.1)
    with pytest.raises(TypeError, match=r"'rate'.*'ratio'"):
        make(rate=0.1)


@pytest.mark.parametrize("make", [Retry, Hedging, B().add_retry, B().add_hedging])
@pytest.mark.parametrize("value", [0.1, "10%", {"ratio": 0.1}, RetryBudget])
def test_what_is_no_budget_is_refused(make: Callable[..., object], value: Any) -> None:
    """Retry and hedging say what they take and what they got."""
    with pytest.raises(OptionsError, match=r"budget must be a RetryBudget, or None, got"):
        make(budget=value)


def test_budgets_are_themselves() -> None:
    """Equal options make no equal budgets: the counts are each one's own."""
    budget = RetryBudget()
    assert budget == budget  # noqa: PLR0124
    assert budget != RetryBudget()
    assert Retry(budget=budget) == Retry(budget=budget)
    assert Retry(budget=budget) != Retry(budget=RetryBudget())
    assert repr(Retry(budget=budget)) == "Retry(budget=RetryBudget())"


# ---- retry ----------------------------------------------------------------------------------------


@ANYIO
async def test_a_tenth_of_a_hundred_calls_is_ten(clock: VirtualClock) -> None:
    """Ratio 0.1, no floor, 100 failing calls, default predicate, delay 0: ten are tried again."""
    fn = Scripted(ConnectionError)
    pipeline = B(clock=clock).add_retry(delay=0, budget=tenth()).build()
    for _ in range(100):
        await raised_by(pipeline.execute, fn)
    assert fn.calls == 110


@ANYIO
async def test_a_window_later_nothing_is_left_of_it(clock: VirtualClock) -> None:
    """100 good calls, 10 granted, the 11th refused; ten seconds later none."""
    budget = RetryBudget(ratio=0.1, min_per_second=0)
    good = B(clock=clock).add_retry(budget=budget).build()
    for _ in range(99):
        await good.execute(Scripted("value"))
    assert await left(budget, clock) == 10
    await clock.sleep(10)
    assert await left(budget, clock) == 0


@ANYIO
async def test_the_floor_grants_ten_in_ten_seconds(clock: VirtualClock) -> None:
    """Ratio 0, floor 1 a second: whoever comes first; ten seconds later ten again."""
    budget = RetryBudget(ratio=0, min_per_second=1)
    assert await left(budget, clock) == 10
    await clock.sleep(9.9)
    assert await left(budget, clock) == 0
    await clock.sleep(0.1)
    assert await left(budget, clock) == 10


@ANYIO
async def test_three_tenths_are_exact(clock: VirtualClock) -> None:
    """Ratio 0.3: after ten executions three, of which the asking is the tenth."""
    budget = RetryBudget(ratio=0.3, min_per_second=0)
    good = B(clock=clock).add_retry(budget=budget).build()
    for _ in range(9):
        await good.execute(Scripted("value"))
    assert await left(budget, clock) == 3


@ANYIO
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delay": 1},
        {"on_retry": lambda _: None},
        {"max_elapsed": 100},
        {"delay_generator": lambda _: 0},
        {"should_handle": lambda event: event.outcome.error is not None},
        {"should_handle": ConnectionError},
        {"max_retry_attempts": math.inf},
        {"resumable": True},
    ],
    ids=repr,
)
@pytest.mark.parametrize("method", ["execute", "settle"])
async def test_when_it_is_spent_the_outcome_comes_out_as_it_is(
    clock: VirtualClock, options: dict[str, Any], method: str
) -> None:
    """On every path through a retry: the last error itself, with no one asked or told of another attempt."""
    failure = ConnectionError("down")
    fn = Scripted(failure)
    all_options: dict[str, Any] = {
        "max_retry_attempts": 50,
        "delay": 0,
        "budget": only(2),
        "should_handle": ConnectionError,
        **options,
    }
    pipeline = B(clock=clock).add_retry(**all_options).build()
    outcome = await pipeline.settle(fn) if method == "settle" else None
    error = await raised_by(pipeline.execute, fn) if outcome is None else outcome.error
    assert error is failure
    assert fn.calls == 3
    assert outcome is None or outcome.attempt_count == 3


@ANYIO
async def test_a_refused_retry_waits_for_nothing_and_runs_no_hook(clock: VirtualClock) -> None:
    """Neither the wait nor `on_retry` of an attempt that is not made."""
    events: list[RetryEvent] = []
    pipeline = B(clock=clock).add_retry(delay=5, on_retry=events.append, budget=only(1)).build()
    await raised_by(pipeline.execute, Scripted(ConnectionError))
    assert clock.now() == 5
    assert [event.attempt for event in events] == [0]


@ANYIO
async def test_a_handled_result_comes_out_open(clock: VirtualClock) -> None:
    """Spent: the result that would have been discarded is the outcome, and is not closed."""
    result = Closable()
    pipeline = (
        B(clock=clock)
        .add_retry(should_handle=handle_result(lambda _: True), budget=only(0))
        .build()
    )
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0


@ANYIO
async def test_used_up_arguments_are_no_misuse_when_nothing_is_repeated(
    clock: VirtualClock,
) -> None:
    """Spent: no second attempt, so no `MisuseError` about its argument."""
    pipeline = B(clock=clock).add_retry(delay=0, budget=only(0)).build()
    error = await raised_by(pipeline.execute, Scripted(ConnectionError), (n for n in "ab"))
    assert isinstance(error, ConnectionError)


@ANYIO
async def test_a_budget_does_not_keep_a_retry_from_succeeding(clock: VirtualClock) -> None:
    """What is granted runs as ever, and its number and delays are as without a budget."""
    fn = Scripted(ConnectionError, ConnectionError, "value")
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=clock)
        .add_retry(delay=1, backoff_type="linear", on_retry=events.append, budget=only(2))
        .build()
    )
    assert await pipeline.settle(fn) == Success("value")
    assert [(event.attempt, event.delay) for event in events] == [(0, 1), (1, 2)]


@ANYIO
async def test_every_execution_counts_as_a_first_refused_or_not(clock: VirtualClock) -> None:
    """Ten that are refused by a limiter inside: one extra."""
    budget = tenth()
    refusing = B(clock=clock).add_retry(budget=budget, should_handle=TimeoutError)
    refusing.add_rate_limiter(NoPermits())
    pipeline = refusing.build()
    for _ in range(9):
        assert not (await pipeline.settle(Scripted("value"))).ok
    assert await left(budget, clock) == 1


class NoPermits:
    """A rate limit that never grants anything."""

    def try_acquire(self, now: float) -> float:
        return 1.0


@ANYIO
async def test_one_that_fails_for_good_counts_as_a_first(clock: VirtualClock) -> None:
    """A misuse, an error that isn't handled: executions all the same."""
    budget = tenth()
    pipeline = B(clock=clock).add_retry(budget=budget, should_handle=TimeoutError).build()
    for _ in range(5):
        await raised_by(pipeline.execute, Scripted(ConnectionError))
        await raised_by(pipeline.execute, Scripted(MisuseError("no")))
    assert await left(budget, clock) == 1


# ---- given back -----------------------------------------------------------------------------------


@ANYIO
async def test_it_is_charged_when_decided_and_given_back_when_cancelled_in_the_wait() -> None:
    """During the wait nobody else can have it; once that is cancelled, they can."""
    clock, budget = VirtualClock(), only(1)
    pipeline = B(clock=clock).add_retry(delay=60, budget=budget).build()
    fn = Scripted(ConnectionError)
    async with anyio.create_task_group() as tasks:
        waiting = spawn(tasks, pipeline.execute, fn)
        await tick()
        assert fn.calls == 1
        assert await left(budget, clock) == 0
        waiting.cancel()
        await tick()
    assert await left(budget, clock) == 1


@ANYIO
async def test_what_was_started_is_not_given_back() -> None:
    """A retry that is cancelled while its second attempt runs has had its extra."""
    clock, budget = VirtualClock(), only(1)
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget).build()
    fn = FailsThenHangs()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await tick()
        assert fn.calls == 2
        call.cancel()
        await tick()
    assert await left(budget, clock) == 0


class FailsThenHangs:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ConnectionError
        await anyio.sleep_forever()


@ANYIO
async def test_it_is_given_back_when_the_hook_raises(clock: VirtualClock) -> None:
    """`on_retry` runs after the charge; the attempt it keeps from being made costs nothing."""

    def hook(_: RetryEvent) -> None:
        raise RuntimeError("hook")

    budget = only(1)
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=hook, budget=budget).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted(ConnectionError)), RuntimeError)
    assert await left(budget, clock) == 1


@ANYIO
async def test_it_is_given_back_when_the_hook_takes_too_long(clock: VirtualClock) -> None:
    """`max_elapsed` has passed when `on_retry` is done: no attempt, no charge."""

    async def hook(_: RetryEvent) -> None:
        await clock.sleep(0.9)

    budget = only(1)
    pipeline = (
        B(clock=clock).add_retry(delay=0, on_retry=hook, max_elapsed=0.5, budget=budget).build()
    )
    fn = Scripted(ConnectionError)
    await raised_by(pipeline.execute, fn)
    assert fn.calls == 1
    assert await left(budget, clock) == 1


@ANYIO
async def test_it_is_given_back_when_an_argument_is_used_up(clock: VirtualClock) -> None:
    """The `MisuseError` takes the attempt's place."""
    budget = only(1)
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget).build()
    error = await raised_by(pipeline.execute, Scripted(ConnectionError), (n for n in "ab"))
    assert isinstance(error, MisuseError)
    assert await left(budget, clock) == 1


@ANYIO
async def test_an_attempt_too_late_is_not_charged(clock: VirtualClock) -> None:
    """`max_elapsed` before the wait."""
    budget = only(1)
    pipeline = B(clock=clock).add_retry(delay=2, max_elapsed=1, budget=budget).build()
    await raised_by(pipeline.execute, Scripted(ConnectionError))
    assert await left(budget, clock) == 1


@ANYIO
async def test_attempts_that_never_reach_the_callback_are_given_back(clock: VirtualClock) -> None:
    """A circuit opens inside: what it refuses was no load to anybody, so one extra lasts for all attempts."""
    budget = only(1)
    pipeline = (
        B(clock=clock)
        .add_retry(delay=0, max_retry_attempts=9, respect_retry_after=False, budget=budget)
        .add_circuit_breaker(minimum_throughput=2, failure_ratio=0.1, break_duration="1h")
        .build()
    )
    fn = Scripted(ConnectionError)
    await raised_by(pipeline.execute, fn)
    assert fn.calls == 2
    await clock.sleep(1000)
    outcome = await pipeline.settle(fn)
    assert isinstance(outcome.error, BrokenCircuitError)
    assert (fn.calls, outcome.attempt_count) == (2, 10)
    assert await left(budget, clock) == 1


@ANYIO
async def test_an_attempt_in_a_queue_is_charged_until_it_is_cancelled() -> None:
    """It may start at any moment; cancelled there, it never did."""
    clock, budget = VirtualClock(), only(1)
    pipeline = (
        B(clock=clock)
        .add_retry(delay=0, should_handle=ConnectionError, budget=budget)
        .add_concurrency_limiter(1, queue_limit=5)
        .build()
    )
    hanging = Hanging()
    async with anyio.create_task_group() as tasks:
        fails = Gated(partial(spawn, tasks, pipeline.execute, hanging))
        call = spawn(tasks, pipeline.execute, fails)
        await tick(80)
        assert (fails.calls, hanging.calls) == (1, 1)
        assert await left(budget, clock) == 0
        call.cancel()
        await tick()
        assert await left(budget, clock) == 1
        tasks.cancel_scope.cancel()


class Gated:
    """Has somebody queue for its permit, then fails."""

    def __init__(self, queue: Callable[[], object]) -> None:
        self._queue = queue
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        self._queue()
        await tick()
        raise ConnectionError


# ---- shared ---------------------------------------------------------------------------------------


@ANYIO
async def test_pipelines_share_what_they_have(clock: VirtualClock) -> None:
    """Nine calls of one and one of another: one extra, for whoever asks first."""
    budget = tenth()
    one = B(clock=clock).add_retry(delay=0, budget=budget).build()
    other = B(clock=clock).add_retry(delay=0, budget=budget).build()
    for _ in range(9):
        await one.execute(Scripted("value"))
    fn = Scripted(ConnectionError)
    await raised_by(other.execute, fn)
    await raised_by(one.execute, fn)
    assert fn.calls == 3


@ANYIO
async def test_builds_of_one_builder_share_it(clock: VirtualClock) -> None:
    """Small print: shared by design, unlike a limit."""
    builder = B(clock=clock).add_retry(delay=0, budget=only(1))
    fn = Scripted(ConnectionError)
    await raised_by(builder.build().execute, fn)
    await raised_by(builder.build().execute, fn)
    assert fn.calls == 3


@ANYIO
async def test_two_budgets_are_two(clock: VirtualClock) -> None:
    """Nothing is shared by equal options."""
    fn = Scripted(ConnectionError)
    for _ in range(2):
        await raised_by(B(clock=clock).add_retry(delay=0, budget=only(1)).build().execute, fn)
    assert fn.calls == 4


@ANYIO
async def test_retries_around_retries_stay_within_it(clock: VirtualClock) -> None:
    """Case RT-19: 100 calls, of which nothing multiplies."""
    budget, fn = tenth(), Scripted(ConnectionError)
    inner = B(clock=clock).add_retry(max_retry_attempts=4, delay=0, budget=budget).build()
    outer = B(clock=clock).add_retry(max_retry_attempts=4, delay=0, budget=budget).build()
    for _ in range(100):
        await outer.settle(partial(inner.execute, fn))
    assert 110 <= fn.calls <= 125


def nestings(budget: RetryBudget) -> dict[str, Callable[[VirtualClock], ResiliencePipeline[Any]]]:
    retry = partial(Retry, delay=0, budget=budget)
    hedging = partial(Hedging, delay=-1, budget=budget)

    def with_nested(clock: VirtualClock) -> ResiliencePipeline[Any]:
        inner = B(clock=clock).add(hedging()).build()
        return B(clock=clock).add(retry()).add_pipeline(inner).build()

    return {
        "retry, retry": lambda clock: B(clock=clock).add(retry()).add(retry()).build(),
        "retry, hedging": lambda clock: B(clock=clock).add(retry()).add(hedging()).build(),
        "hedging, retry": lambda clock: B(clock=clock).add(hedging()).add(retry()).build(),
        "hedging, hedging": lambda clock: B(clock=clock).add(hedging()).add(hedging()).build(),
        "retry, nested hedging": with_nested,
        "hedging in a retry without": lambda clock: (
            B(clock=clock).add_retry(delay=0, max_retry_attempts=1).add(hedging()).build()
        ),
    }


@ANYIO
@pytest.mark.parametrize("nesting", nestings(tenth()))
async def test_an_execution_is_one_first_however_strategies_nest(
    clock: VirtualClock, nesting: str
) -> None:
    """One marker for all contexts of an execution: nested strategies and repeated entries add no first."""
    budget = tenth()
    pipeline = nestings(budget)[nesting](clock)
    for _ in range(8):
        await pipeline.execute(Scripted("value"))
    assert await left(budget, clock) == 0  # nine firsts, this one included
    assert await left(budget, clock) == 1


@ANYIO
@pytest.mark.parametrize("nesting", nestings(tenth()))
async def test_each_extra_is_charged_once(clock: VirtualClock, nesting: str) -> None:
    """What is called beyond the first is what the budget had, whichever strategy it was."""
    budget, fn = only(3), Scripted(ConnectionError)
    extra = (
        1 if nesting.endswith("without") else 0
    )  # the retry's own attempt, which no budget limits
    most = 1 + extra + 3
    pipeline = nestings(budget)[nesting](clock)
    for _ in range(5):
        await raised_by(pipeline.execute, fn)
    assert fn.calls == most + 4 * (1 + extra)


@ANYIO
async def test_a_context_that_serves_again_is_another_execution(clock: VirtualClock) -> None:
    """The marker is the execution's and not the context's."""
    budget, context = tenth(), ResilienceContext()
    pipeline = B(clock=clock).add_retry(budget=budget).build()
    for _ in range(9):
        await pipeline.execute(Scripted("value"), context=context)
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_call_inside_a_call_is_an_execution_of_its_own(clock: VirtualClock) -> None:
    """What a callback executes is not nested, as far as counting goes."""
    budget = tenth()
    pipeline = B(clock=clock).add_retry(budget=budget).build()
    for _ in range(5):
        await pipeline.execute(partial(pipeline.execute, Scripted("value")))
    assert await left(budget, clock) == 1


# ---- hedging --------------------------------------------------------------------------------------


@ANYIO
async def test_a_hedge_is_charged(clock: VirtualClock) -> None:
    """One of two slow calls is hedged."""
    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=0.1, budget=budget).build()
    fn = Racers(clock, (0.2, "first"), (0.2, "hedge"), (0.2, "first"))
    assert await pipeline.execute(fn) == "first"
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 3


@ANYIO
@pytest.mark.parametrize("delay", [-1, 0, 0.1])
async def test_a_spent_budget_stops_launches_and_nothing_else(
    clock: VirtualClock, delay: float
) -> None:
    """The attempt that runs goes on and wins, in every mode; no hook hears of what isn't launched."""
    events: list[HedgingEvent] = []
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=5, delay=delay, on_hedging=events.append, budget=only(0))
        .build()
    )
    fn = Racers(clock, (50, "first"))
    assert await pipeline.execute(fn) == "first"
    assert (fn.calls, events, clock.now()) == (1, [], 50)


@ANYIO
@pytest.mark.parametrize("delay", [-1, 0, 0.1])
async def test_when_all_that_was_launched_is_handled_the_first_comes_out(
    clock: VirtualClock, delay: float
) -> None:
    """With a budget of one there are two attempts, of which the first one's error comes out."""
    first = ConnectionError("first")
    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=5, delay=delay, budget=only(1)).build()
    )
    fn = Racers(clock, (0.5, first), (0.6, ConnectionError("second")))
    assert await raised_by(pipeline.execute, fn) is first
    assert fn.calls == 2


@ANYIO
async def test_it_is_asked_again_when_an_attempt_has_come_out(clock: VirtualClock) -> None:
    """Refused at one second; at two, when the first fails, there is enough again."""
    budget = RetryBudget(ratio=0, min_per_second=1, window="1.5s")
    assert await left(budget, clock) == 1
    pipeline = B(clock=clock).add_hedging(delay=1, budget=budget).build()
    fn = Racers(clock, (2, ConnectionError()), (1, "hedge"))
    assert await pipeline.execute(fn) == "hedge"
    assert fn.starts == [0, 2]


@ANYIO
async def test_one_refusal_is_one_launch_less(clock: VirtualClock) -> None:
    """An outcome that was refused a hedge is owed none later."""
    budget = RetryBudget(ratio=0, min_per_second=1, window="1.5s")
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=-1, budget=budget).build()
    fn = Racers(
        clock, (1, ConnectionError()), (0.5, ConnectionError()), (math.inf, None), (1, "late")
    )
    assert isinstance(await raised_by(pipeline.execute, fn), ConnectionError)
    assert fn.starts == [0, 1]


@ANYIO
async def test_a_hedge_that_the_action_generator_declines_is_given_back(
    clock: VirtualClock,
) -> None:
    """At once, while the call goes on."""
    budget, asked = only(1), list[int]()

    def decline(event: Any) -> None:
        asked.append(event.attempt)

    async def ask_meanwhile() -> int:
        await clock.sleep(5)
        return await left(budget, clock)

    pipeline = B(clock=clock).add_hedging(delay=1, action_generator=decline, budget=budget).build()
    assert await pipeline.execute(ask_meanwhile) == 1
    assert asked == [1]


@ANYIO
async def test_a_hedge_whose_action_can_not_be_made_is_given_back(clock: VirtualClock) -> None:
    """What the generator raises is the attempt's outcome; nothing was started."""

    def fail(_: Any) -> None:
        raise ValueError

    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=-1, action_generator=fail, budget=budget).build()
    await raised_by(pipeline.execute, Scripted(ConnectionError))
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_hedge_that_the_hook_prevents_is_given_back(clock: VirtualClock) -> None:
    """`on_hedging` raises: the call ends, the hedge was never launched."""

    def hook(_: HedgingEvent) -> None:
        raise RuntimeError("hook")

    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=-1, on_hedging=hook, budget=budget).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted(ConnectionError)), RuntimeError)
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_hedge_that_is_overtaken_while_it_is_prepared_is_given_back(
    clock: VirtualClock,
) -> None:
    """The first attempt wins while `on_hedging` runs."""

    async def hook(_: HedgingEvent) -> None:
        await clock.sleep(0.5)

    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=0.1, on_hedging=hook, budget=budget).build()
    fn = Racers(clock, (0.2, "first"))
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 1
    assert await left(budget, clock) == 1


@ANYIO
async def test_used_up_arguments_give_a_hedge_back(clock: VirtualClock) -> None:
    """The `MisuseError` takes its place."""
    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=-1, budget=budget).build()
    error = await raised_by(pipeline.execute, Scripted(ConnectionError), (n for n in "ab"))
    assert isinstance(error, MisuseError)
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_hedge_refused_further_in_is_given_back_while_the_call_goes_on(
    clock: VirtualClock,
) -> None:
    """A limiter inside has one permit, which the first attempt holds."""
    budget, seen = only(1), list[int]()

    async def ask_meanwhile() -> None:
        await clock.sleep(5)
        seen.append(await left(budget, clock))

    pipeline = B(clock=clock).add_hedging(delay=1, budget=budget).add_concurrency_limiter(1).build()
    await pipeline.execute(ask_meanwhile)
    assert seen == [1]


@ANYIO
async def test_a_hedge_that_loses_in_a_queue_is_given_back(clock: VirtualClock) -> None:
    """It was launched, and cancelled before it came to the callback."""
    budget = only(1)
    pipeline = (
        B(clock=clock)
        .add_hedging(delay=0.1, budget=budget)
        .add_rate_limiter(TokenBucket(1, 0.001), queue_limit=1)
        .build()
    )
    fn = Racers(clock, (0.5, "first"))
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 1
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_hedge_that_loses_while_it_runs_is_not_given_back(clock: VirtualClock) -> None:
    """It was load."""
    budget = only(1)
    pipeline = B(clock=clock).add_hedging(delay=0.1, budget=budget).build()
    fn = Racers(clock, (0.2, "first"), (0.5, "hedge"))
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 2
    assert await left(budget, clock) == 0


@ANYIO
async def test_hedges_of_what_is_not_idempotent_are_charged_one_by_one(clock: VirtualClock) -> None:
    """Each ends unstarted before the next begins, so one extra serves them all."""
    budget = only(1)
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=4, delay=0.1, budget=budget)
        .add_rate_limiter(NoPermits())
        .build()
    )
    outcome = await pipeline.settle(Scripted("value"), idempotent=False)
    assert outcome.attempt_count == 5
    assert await left(budget, clock) == 1


@ANYIO
async def test_racers_do_not_overspend() -> None:
    """Twenty calls become due at one instant, with ten hedges left."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_hedging(delay=0.1, budget=only(10)).build()
    fn = Hanging()
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            spawn(tasks, pipeline.execute, fn)
        await clock.advance(0.1)
        assert fn.calls == 30
        tasks.cancel_scope.cancel()


@ANYIO
async def test_a_hedge_before_the_winner_is_charged_with_it(clock: VirtualClock) -> None:
    """Two hedges of a race that the third attempt wins: two extras."""
    budget = only(3)
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=5, delay=0.1, budget=budget).build()
    fn = Racers(clock, (9, "first"), (9, "second"), (0.05, "third"))
    assert await pipeline.execute(fn) == "third"
    assert await left(budget, clock) == 1


# ---- keys -----------------------------------------------------------------------------------------


def by_operation(context: ResilienceContext) -> Any:
    return context.operation_key


@ANYIO
@pytest.mark.parametrize("add", ["add_retry", "add_hedging"])
async def test_each_key_has_counts_of_its_own(clock: VirtualClock, add: str) -> None:
    """Of one key all is spent, of another one nothing."""
    budget = RetryBudget(ratio=0, min_per_second=0.2, window=10, key=by_operation)
    options: dict[str, Any] = {"budget": budget, "delay": 0}
    options |= {"max_retry_attempts": 9} if add == "add_retry" else {"max_hedged_attempts": 9}
    pipeline = getattr(B(clock=clock), add)(**options).build()
    for key, calls in (("a", 3), ("a", 1), ("b", 3), ("b", 1)):
        fn = Scripted(ConnectionError)
        await raised_by(partial(pipeline.execute, fn, operation_key=key))
        assert fn.calls == calls


@ANYIO
async def test_the_firsts_of_a_key_are_its_own(clock: VirtualClock) -> None:
    """Ten calls of `a` buy an extra for `a` alone."""
    budget = RetryBudget(ratio=0.1, min_per_second=0, key=by_operation)
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget).build()
    for _ in range(10):
        await pipeline.execute(Scripted("value"), operation_key="a")
    for key, calls in (("b", 1), ("a", 2)):
        fn = Scripted(ConnectionError)
        await raised_by(partial(pipeline.execute, fn, operation_key=key))
        assert fn.calls == calls


@ANYIO
async def test_a_key_is_asked_for_once_in_an_execution(clock: VirtualClock) -> None:
    """Where hedging and retry share the budget too, and however many attempts there are."""
    asked: list[ResilienceContext] = []

    def key(context: ResilienceContext) -> str:
        asked.append(context)
        return "a"

    budget = RetryBudget(ratio=9, key=key)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=0, budget=budget)
        .add_hedging(delay=0, budget=budget)
        .add_retry(max_retry_attempts=2, delay=0, budget=budget)
        .build()
    )
    await raised_by(pipeline.execute, Scripted(ConnectionError))
    assert len(asked) == 1


@ANYIO
async def test_an_attempt_that_is_not_made_is_given_back_to_its_key(clock: VirtualClock) -> None:
    """`on_retry` raises: what was charged is there for the next one."""

    def refuse(_: RetryEvent) -> None:
        raise ZeroDivisionError

    budget = RetryBudget(ratio=0, min_per_second=0.1, window=10, key=by_operation)
    hooked = B(clock=clock).add_retry(delay=0, budget=budget, on_retry=refuse).build()
    await raised_by(partial(hooked.execute, Scripted(ConnectionError), operation_key="a"))
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget).build()
    fn = Scripted(ConnectionError)
    await raised_by(partial(pipeline.execute, fn, operation_key="a"))
    assert fn.calls == 2


def keys_of(budget: RetryBudget) -> list[Any]:
    return list(budget._account.counted)


@ANYIO
async def test_keys_with_an_empty_window_go_when_another_one_comes(clock: VirtualClock) -> None:
    """`max_keys` and `key_idle`: the least recently used one first, none that has counts."""
    heard: list[Any] = []
    budget = RetryBudget(window=10, key=by_operation, max_keys=2, key_idle=60)
    pipeline = (
        B(name="api", clock=clock, listeners=[heard.append])
        .add_retry(delay=0, budget=budget)
        .build()
    )

    async def call(key: str) -> None:
        await pipeline.execute(Scripted("value"), operation_key=key)

    for key in "abc":
        await call(key)
    assert keys_of(budget) == ["a", "b", "c"]
    (event,) = [each for each in heard if isinstance(each, KeysExceededEvent)]
    assert (event.key, event.keys, event.max_keys, event.strategy_name) == ("c", 3, 2, "Retry")
    await clock.sleep(10)
    await call("b")
    assert keys_of(budget) == ["a", "c", "b"]  # looked at when a key is added
    await call("d")
    assert keys_of(budget) == ["b", "d"]
    await clock.sleep(60)
    await call("e")
    assert keys_of(budget) == ["e"]


@ANYIO
async def test_counts_that_were_let_go_are_not_spent_from(clock: VirtualClock) -> None:
    """A call that outlives its key's counts spends from those that the key has now."""
    budget = RetryBudget(ratio=0, min_per_second=0.1, window=10, key=by_operation, max_keys=1)
    pipeline = B(clock=clock).add_retry(max_retry_attempts=1, delay=0, budget=budget).build()
    calls = 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await clock.sleep(20)
            await pipeline.execute(Scripted("value"), operation_key="other")
            assert keys_of(budget) == ["other"]
            await clock.sleep(20)
            await raised_by(partial(pipeline.execute, Scripted(OSError), operation_key="a"))
        raise ConnectionError

    await raised_by(partial(pipeline.execute, slow, operation_key="a"))
    assert calls == 1


@ANYIO
async def test_a_budgets_key_that_is_none_is_a_misuse(clock: VirtualClock) -> None:
    """It is plain and gives what can be hashed; nothing is called."""

    async def later(_: ResilienceContext) -> str:
        return "a"

    for key in (later, lambda _: ["a"]):
        pipeline = B(clock=clock).add_retry(budget=RetryBudget(key=key)).build()
        fn = Scripted("value")
        error = await raised_by(pipeline.execute, fn)
        assert isinstance(error, MisuseError)
        assert "key=" in str(error)
        assert not fn.calls


def test_threads_share_the_counts_of_a_key() -> None:
    """Of a hundred calls in ten threads all of one key, as many extras as there are."""
    budget = RetryBudget(ratio=0, min_per_second=7 / 1000, window=1000, key=by_operation)
    pipeline = B().add_retry(max_retry_attempts=1, delay=0, budget=budget).build()
    made: list[int] = []

    def fail() -> None:
        made.append(1)
        raise ConnectionError

    def work() -> None:
        for _ in range(10):
            pipeline.settle_sync(fail, operation_key="a")

    threads = [Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 107


# ---- clocks ---------------------------------------------------------------------------------------


def site_with(now: Callable[[], float]) -> Site:
    return Site(
        pipeline_name=None,
        instance=None,
        strategy_name="Retry",
        position=0,
        now=now,
        random=lambda: 0.5,
        close_timeout=5.0,
    )


def test_a_reading_that_comes_late_counts_as_the_latest() -> None:
    """Two threads read one clock and get to the budget in another order: time does not run backwards."""
    budget, times = RetryBudget(ratio=0, min_per_second=0.2), [0.0, 0.9, 0.1, 10.5, 10.9]
    purse = budget._purse(site_with(lambda: times.pop(0)))
    purse.meet(ResilienceContext())
    spending = purse.spending()
    granted = [spending.spend(ResilienceContext()) for _ in range(4)]
    assert granted == [True, True, False, True]


@ANYIO
async def test_what_pipelines_on_two_clocks_share_is_one_budget(clock: VirtualClock) -> None:
    """Firsts on one clock, extras on another that reads something else: a tenth of their sum."""
    budget = tenth()
    other = VirtualClock(autojump=True)
    await other.sleep(1_000_000)
    ahead = B(clock=other).add_retry(budget=budget).build()
    behind = B(clock=clock).add_retry(budget=budget).build()
    await ahead.execute(Scripted("value"))
    for _ in range(18):
        await behind.execute(Scripted("value"))
    assert await left(budget, other) == 2
    for _ in range(10):
        await behind.execute(Scripted("value"))
    assert await left(budget, clock) == 1


@ANYIO
async def test_a_clock_that_is_behind_drives_the_window_too(clock: VirtualClock) -> None:
    """Once met, it goes along with the others: its seconds are as good as theirs."""
    budget = only(1)
    other = VirtualClock(autojump=True)
    await other.sleep(1_000_000)
    assert await left(budget, other) == 1
    behind = B(clock=clock).add_retry(max_retry_attempts=1, delay=0, budget=budget).build()
    fn = Scripted(ConnectionError)
    await raised_by(behind.execute, fn)
    await clock.sleep(1000)
    await raised_by(behind.execute, fn)
    assert fn.calls == 3


# ---- told ----------------------------------------------------------------------------------------


@ANYIO
@pytest.mark.parametrize("hooked", [False, True])
async def test_a_retry_that_is_refused_is_told_of(clock: VirtualClock, hooked: bool) -> None:
    """`OnBudgetExhausted`, with what the last attempt came to; the outcome comes out as it is."""
    heard: list[Any] = []
    options: dict[str, Any] = {"on_retry": lambda _: None} if hooked else {}
    pipeline = (
        B(clock=clock, listeners=[heard.append])
        .add_retry(delay=0, budget=only(1), **options)
        .build()
    )
    error = await raised_by(pipeline.execute, Scripted(ConnectionError))
    (event,) = [each for each in heard if isinstance(each, RetryBudgetExhaustedEvent)]
    assert (event.name, event.attempt) == ("OnBudgetExhausted", 1)
    assert event.outcome is not None
    assert event.outcome.error is error


@ANYIO
async def test_a_hedge_that_is_refused_is_told_of(clock: VirtualClock) -> None:
    """The number is that of the last attempt there was."""
    heard: list[Any] = []
    pipeline = (
        B(clock=clock, listeners=[heard.append])
        .add_hedging(max_hedged_attempts=3, delay=1, budget=only(1))
        .build()
    )
    await pipeline.execute(Racers(clock, (5.5, 1)))
    (event,) = [each for each in heard if isinstance(each, RetryBudgetExhaustedEvent)]
    assert (event.attempt, event.outcome) == (1, None)
