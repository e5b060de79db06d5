"""Hedging: when an attempt is launched and which one wins; the generator, the action generator and the hook.

Rows `HG-nn` are those of the Polly dossier, `case HG-nn` those of the collected cases. Losers, contexts, options and the
learnt delay have files of their own beside this one.

Rows that have nothing to stand on here: HG-15, HG-25 to HG-28 are about cancellation tokens, of which Python's loops have
none: who asks for a cancellation reaches a task or a scope, and what an attempt started on its own lives in its own tasks.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    Failure,
    HedgingActionEvent,
    HedgingDelayEvent,
    HedgingEvent,
    MisuseError,
    OptionsError,
    OutcomeEvent,
    ResilienceContext,
    ResiliencePipelineBuilder,
    current_context,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.racers import Racers
from support.scripted import Hanging, Scripted, contexts_of, raised_by, spawn, tick

B = ResiliencePipelineBuilder

pytestmark = pytest.mark.anyio

#: One at a time; all at once; one more after each two seconds.
MODES = {"one by one": -1, "all at once": 0, "after a delay": 2}
EACH_MODE = pytest.mark.parametrize("delay", MODES.values(), ids=MODES)


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


def bad(result: object) -> bool:
    return result == "bad"


# ---- when: a delay ------------------------------------------------------------------------------


async def test_a_fast_first_attempt_is_the_only_one(clock: VirtualClock) -> None:
    """Nothing is launched before the delay has passed."""
    fn = Racers(clock, (1.9, "first"))
    assert await B(clock=clock).add_hedging(max_hedged_attempts=3).build().execute(fn) == "first"
    assert (fn.calls, clock.now()) == (1, 1.9)


async def test_each_launch_comes_a_delay_after_the_last(clock: VirtualClock) -> None:
    """`delay` > 0: the next attempt starts when it has passed since the last launch, up to the most there may be."""
    fn = Racers(clock, (100, "first"), (math.inf, None), (math.inf, None), (math.inf, None))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=2).build()
    assert await pipeline.execute(fn) == "first"
    assert fn.starts == [0, 2, 4, 6]
    assert clock.now() == 100


async def test_the_default_is_one_hedge_after_two_seconds(clock: VirtualClock) -> None:
    """Polly's defaults."""
    fn = Racers(clock, (math.inf, None), (1, "hedge"))
    assert await B(clock=clock).add_hedging().build().execute(fn) == "hedge"
    assert (fn.starts, clock.now()) == ([0, 2], 3)


async def test_a_handled_outcome_launches_the_next_at_once(clock: VirtualClock) -> None:
    """`delay` > 0: a failure need not wait for the delay, which then counts from the new launch."""
    fn = Racers(clock, (0.5, ConnectionError()), (math.inf, None), (1, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2).build()
    assert await pipeline.execute(fn) == "third"
    assert fn.starts == [0, 0.5, 2.5]


async def test_each_of_two_handled_outcomes_launches_one(clock: VirtualClock) -> None:
    """Two that fail in the same instant make room for two."""
    fn = Racers(clock, (3, ConnectionError()), (1, ConnectionError()), (5, "third"), (1, "fourth"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=2).build()
    assert await pipeline.execute(fn) == "fourth"
    assert fn.starts == [0, 2, 3, 3]


async def test_a_handled_outcome_of_a_later_attempt_launches_the_next(clock: VirtualClock) -> None:
    """It need not be the first one that fails."""
    fn = Racers(clock, (math.inf, None), (0.25, ConnectionError()), (1, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2).build()
    assert await pipeline.execute(fn) == "third"
    assert fn.starts == [0, 2, 2.25]


async def test_an_infinite_delay_hedges_failures_only(clock: VirtualClock) -> None:
    """`math.inf` means for ever: time launches nothing."""
    fn = Racers(clock, (500, ConnectionError()), (1, "hedge"))
    pipeline = B(clock=clock).add_hedging(delay=math.inf).build()
    assert await pipeline.execute(fn) == "hedge"
    assert fn.starts == [0, 500]


async def test_delays_count_while_a_hook_takes_its_time(clock: VirtualClock) -> None:
    """A launch is when the attempt starts, not when it was decided."""
    fn = Racers(clock, (math.inf, None), (math.inf, None), (1, "third"))

    async def on_hedging(event: object) -> None:
        await clock.sleep(1.5)

    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2, on_hedging=on_hedging).build()
    )
    assert await pipeline.execute(fn) == "third"
    assert fn.starts == [0, 3.5, 7]


# ---- when: all at once --------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 3, 10])
async def test_with_delay_zero_all_run_before_any_completes(clock: VirtualClock, most: int) -> None:
    """HG-10."""
    fn = Racers(clock, *((1 + n, n) for n in range(most + 1)))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=most, delay=0).build()
    assert await pipeline.execute(fn) == 0
    assert fn.starts == [0] * (most + 1)
    assert fn.peak == most + 1


async def test_with_delay_zero_a_first_attempt_that_never_waits_is_the_only_one() -> None:
    """Small print: completing without suspending starts no hedge, and no hook runs."""
    events: list[HedgingEvent] = []
    fn = Scripted("first", "second")
    pipeline = B().add_hedging(max_hedged_attempts=10, delay=0, on_hedging=events.append).build()
    assert await pipeline.execute(fn) == "first"
    assert (fn.calls, events) == (1, [])


async def test_with_delay_zero_a_complete_attempt_is_looked_at_first() -> None:
    """A hedge that completes at once and wins launches no other."""
    calls: list[int] = []

    async def fn() -> str:
        calls.append(current_context().attempt)
        if len(calls) == 1:
            await anyio.sleep_forever()
        return "second"

    pipeline = B().add_hedging(max_hedged_attempts=10, delay=0).build()
    assert await pipeline.execute(fn) == "second"
    assert calls == [0, 1]


async def test_with_delay_zero_an_unhandled_error_without_a_wait_starts_no_hedge() -> None:
    """HG-08, in parallel mode."""
    fn = Scripted(KeyError("mine"), "second")
    pipeline = B().add_hedging(delay=0, should_handle=ConnectionError).build()
    assert isinstance(await raised_by(pipeline.execute, fn), KeyError)
    assert fn.calls == 1


# ---- when: one at a time ------------------------------------------------------------------------


async def test_with_a_negative_delay_attempts_never_overlap(clock: VirtualClock) -> None:
    """HG-11: the next starts when the last one has come out handled, however long that takes."""
    fn = Racers(clock, (50, ConnectionError()), (70, ConnectionError()), (1, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=5, delay=-1).build()
    assert await pipeline.execute(fn) == "third"
    assert fn.starts == [0, 50, 120]
    assert fn.peak == 1


@pytest.mark.parametrize("delay", [-1, -0.001, timedelta(seconds=-1)])
async def test_any_negative_delay_means_one_at_a_time(clock: VirtualClock, delay: Any) -> None:
    """`delay` < 0, such as -1."""
    fn = Racers(clock, (50, ConnectionError()), (1, "second"))
    assert await B(clock=clock).add_hedging(delay=delay).build().execute(fn) == "second"
    assert fn.peak == 1


async def test_with_a_negative_delay_a_slow_attempt_is_waited_for(clock: VirtualClock) -> None:
    """Time alone launches nothing."""
    fn = Racers(clock, (1000, "first"))
    assert await B(clock=clock).add_hedging(delay=-1).build().execute(fn) == "first"
    assert fn.calls == 1


# ---- the delay generator ------------------------------------------------------------------------


async def test_the_generators_delay_is_waited_instead(clock: VirtualClock) -> None:
    """HG-12: it is given the caller's context and the number launched so far."""
    events: list[HedgingDelayEvent] = []

    def delay(event: HedgingDelayEvent) -> float:
        events.append(event)
        return 10.0 * event.attempt

    fn = Racers(clock, (1000, "first"))
    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=3, delay=1, delay_generator=delay).build()
    )
    context = ResilienceContext()
    assert await pipeline.execute(fn, context=context) == "first"
    assert fn.starts == [0, 10, 30, 60]
    assert [event.attempt for event in events] == [1, 2, 3]
    assert all(event.context is context for event in events)


async def test_the_generator_may_switch_modes(clock: VirtualClock) -> None:
    """Each next launch goes by its own delay: above, at or below zero."""
    delays = {1: 3, 2: 0, 3: -1}
    fn = Racers(
        clock, (math.inf, None), (math.inf, None), (20, ConnectionError()), (1, "fourth"), (0, "no")
    )
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=4, delay_generator=lambda event: delays.get(event.attempt))
        .build()
    )
    assert await pipeline.execute(fn) == "fourth"
    assert fn.starts == [0, 3, 3, 23]


@pytest.mark.parametrize(
    ("generated", "second"),
    [
        (None, 2),
        (0.5, 0.5),
        (7, 7),
        ("500ms", 0.5),
        (timedelta(seconds=5), 5),
        (0, 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["function", "coroutine function"])
async def test_a_generator_gives_any_duration_form(
    clock: VirtualClock, kind: str, generated: Any, second: float
) -> None:
    """`None` means the static delay; it may be a plain function or a coroutine function."""

    async def later(event: HedgingDelayEvent) -> Any:
        await checkpoint()
        return generated

    generator: Any = later if kind == "coroutine function" else lambda _: generated
    fn = Racers(clock, (100, "first"))
    pipeline = B(clock=clock).add_hedging(delay=2, delay_generator=generator).build()
    assert await pipeline.execute(fn) == "first"
    assert fn.starts == [0, second]


async def test_the_generator_is_not_asked_when_nothing_more_can_be_launched(
    clock: VirtualClock,
) -> None:
    """Neither after the last hedge, nor where a handled outcome launches at once."""
    asked: list[int] = []

    def delay(event: HedgingDelayEvent) -> float:
        asked.append(event.attempt)
        return 5

    fn = Racers(clock, (1, ConnectionError()), (100, "second"))
    assert await B(clock=clock).add_hedging(delay_generator=delay).build().execute(fn) == "second"
    assert asked == [1]


async def test_a_generator_is_asked_once_a_launch(clock: VirtualClock) -> None:
    """A wait that is over without a launch does not make it be asked again."""
    asked: list[int] = []

    def delay(event: HedgingDelayEvent) -> float:
        asked.append(event.attempt)
        return 5

    fn = Racers(clock, (100, "first"), (1, ConnectionError()), (100, "third"), (100, "fourth"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay_generator=delay).build()
    assert await pipeline.execute(fn) == "first"
    assert fn.starts == [0, 5, 6, 11]
    assert asked == [1, 2, 3]


@pytest.mark.parametrize("generated", ["soon", True, math.nan, [1], "-1s"])
async def test_a_generator_that_gives_no_duration_ends_the_call(
    clock: VirtualClock, generated: Any
) -> None:
    """An `OptionsError` names it and shows the forms; the attempt is cancelled and gone."""
    fn = Racers(clock, (math.inf, None))
    pipeline = B(clock=clock).add_hedging(delay_generator=lambda _: generated).build()
    with pytest.raises(OptionsError, match=r"delay_generator.*500ms"):
        await pipeline.execute(fn)
    assert fn.running == 0


# ---- who wins -----------------------------------------------------------------------------------


async def test_hedging_goes_on_until_one_succeeds() -> None:
    """HG-01: one at a time, four hedges at most, the third succeeds: three hooks."""
    events: list[HedgingEvent] = []
    fn = Scripted(*[ConnectionError()] * 3, "success")
    pipeline = B().add_hedging(max_hedged_attempts=4, delay=-1, on_hedging=events.append).build()
    assert await pipeline.execute(fn) == "success"
    assert len(events) == 3


@EACH_MODE
async def test_a_success_after_handled_failures_wins(clock: VirtualClock, delay: float) -> None:
    """HG-09, case HG-05: a failure does not end the race."""
    fn = Racers(clock, (1.5, ConnectionError()), (1, ConnectionError()), (1.5, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=delay).build()
    assert await pipeline.execute(fn) == "third"


async def test_the_fastest_outcome_that_is_not_handled_wins(clock: VirtualClock) -> None:
    """HG-04: hedges of 10, 2 and 3 s beside a slow first attempt; the one of 2 s wins."""
    fn = Racers(clock, (100, "Apples"), (10, "Pears"), (2, "Oranges"), (3, "Plums"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=1).build()
    assert await pipeline.execute(fn) == "Oranges"
    assert clock.now() == 4


async def test_the_first_attempt_can_still_win_behind_its_hedges(clock: VirtualClock) -> None:
    """A hedge is launched beside it, not in its place."""
    fn = Racers(clock, (5, "first"), (10, "second"))
    assert await B(clock=clock).add_hedging().build().execute(fn) == "first"
    assert (clock.now(), fn.cut) == (5, [1])


@pytest.mark.parametrize("delay", [0, 1], ids=["all at once", "after a delay"])
async def test_of_simultaneous_outcomes_the_lowest_number_wins(delay: float) -> None:
    """Whichever came in first: numbers decide."""
    go = anyio.Event()

    async def fn() -> int:
        number = current_context().attempt
        await go.wait()
        return number

    clock = VirtualClock()
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=delay).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        for _ in range(3):
            await clock.advance(delay)
            await tick()
        go.set()
    assert call.value == 0


async def test_of_simultaneous_outcomes_the_lowest_that_is_not_handled_wins(
    clock: VirtualClock,
) -> None:
    """All are looked at in order: a handled one is passed over."""
    fn = Racers(clock, (5, ConnectionError()), (3, "second"), (1, "third"))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2).build()
    assert await pipeline.execute(fn) == "second"
    assert clock.now() == 5


async def test_an_unhandled_error_of_the_first_attempt_comes_out(clock: VirtualClock) -> None:
    """HG-08: no hedge is launched, no action generated."""
    error = KeyError("mine")
    actions: list[object] = []
    fn = Racers(clock, (1, error))
    pipeline = (
        B(clock=clock)
        .add_hedging(delay=5, should_handle=ConnectionError, action_generator=actions.append)
        .build()
    )
    assert await raised_by(pipeline.execute, fn) is error
    assert (fn.calls, actions) == (1, [])


async def test_an_unhandled_error_of_a_hedge_comes_out_at_once(clock: VirtualClock) -> None:
    """HG-07, case HG-05: an unhandled error is an accepted outcome; the others are cancelled."""
    error = ValueError("not handled")
    fn = Racers(clock, (100, "first"), (100, "second"), (100, "third"), (1, error))
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=3, delay=2, should_handle=ConnectionError)
        .build()
    )
    assert await raised_by(pipeline.execute, fn) is error
    assert (clock.now(), sorted(fn.cut)) == (7, [0, 1, 2])


@EACH_MODE
async def test_when_all_are_handled_the_first_outcome_comes_out(
    clock: VirtualClock, delay: float
) -> None:
    """HG-05: also where the first attempt is the slowest, in all three modes."""
    fn = Racers(clock, (50, "bad"), (1, ConnectionError("second")), (1, ConnectionError("third")))
    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=2, delay=delay, should_handle=handle(Exception) | handle_result(bad)
        )
        .build()
    )
    assert await pipeline.execute(fn) == "bad"
    assert (fn.calls, fn.cut) == (3, [])


@EACH_MODE
async def test_when_all_raise_the_first_exception_comes_out(
    clock: VirtualClock, delay: float
) -> None:
    """HG-06, case HG-05: by identity, whatever finished last."""
    errors = [ConnectionError("first"), ConnectionError("second"), ConnectionError("third")]
    fn = Racers(clock, (1, errors[0]), (2, errors[1]), (30, errors[2]))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=delay).build()
    assert await raised_by(pipeline.execute, fn) is errors[0]
    assert fn.calls == 3
    assert fn.cut == []


async def test_with_the_most_attempts_launched_no_more_are(clock: VirtualClock) -> None:
    """HG-23, HG-03: hooks number the hedges from 0, as many as there may be."""
    events: list[HedgingEvent] = []
    fn = Racers(clock, (0.5, ConnectionError()))
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=10, delay=1, on_hedging=events.append)
        .build()
    )
    assert isinstance(await raised_by(pipeline.execute, fn), ConnectionError)
    assert fn.calls == 11
    assert [event.attempt for event in events] == list(range(10))


async def test_nothing_of_the_result_decides_but_the_predicate(clock: VirtualClock) -> None:
    """Results are never handled by default: `None` and falsy ones win."""
    for value in (None, 0, "", False, ()):
        fn = Racers(clock, (1, value))
        assert await B(clock=clock).add_hedging().build().execute(fn) == value
        assert fn.calls == 1


async def test_a_handled_result_is_hedged() -> None:
    """`handle_result` works as everywhere."""
    pipeline = B().add_hedging(delay=-1, should_handle=handle_result(bad)).build()
    assert await pipeline.execute(Scripted("bad", "good")) == "good"


# ---- predicates ---------------------------------------------------------------------------------


async def test_the_predicate_sees_each_attempt_by_number() -> None:
    """HG-02, HG-30: 0, 1, 2, … to the predicate, the last attempt included; 1, 2, … to the action generator."""
    judged: list[OutcomeEvent] = []
    generated: list[HedgingActionEvent] = []
    errors = [ConnectionError(str(n)) for n in range(4)]

    def should_handle(event: OutcomeEvent) -> bool:
        judged.append(event)
        return True

    def action(event: HedgingActionEvent) -> Callable[[], Awaitable[Any]]:
        generated.append(event)
        return event.callback

    pipeline = (
        B()
        .add_hedging(
            max_hedged_attempts=3, delay=-1, should_handle=should_handle, action_generator=action
        )
        .build()
    )
    assert await raised_by(pipeline.execute, Scripted(*errors)) is errors[0]
    assert [event.attempt for event in judged] == [0, 1, 2, 3]
    assert [event.outcome for event in judged] == [Failure(error) for error in errors]
    assert [event.attempt for event in generated] == [1, 2, 3]


async def test_a_predicate_may_be_a_coroutine_function(clock: VirtualClock) -> None:
    """What it returns is awaited; attempts that come in meanwhile are looked at afterwards."""

    async def should_handle(event: OutcomeEvent) -> bool:
        await clock.sleep(3)
        return event.attempt == 0

    fn = Racers(clock, (1, ConnectionError()), (1, "second"))
    pipeline = B(clock=clock).add_hedging(delay=10, should_handle=should_handle).build()
    assert await pipeline.execute(fn) == "second"
    assert clock.now() == 8


async def test_a_raising_predicate_ends_the_call(clock: VirtualClock) -> None:
    """Small print: with the attempt's failure as its context, the other attempts gone."""
    failure = ConnectionError("the attempt's")

    def should_handle(event: OutcomeEvent) -> bool:
        raise LookupError("the predicate's")

    fn = Racers(clock, (math.inf, None), (1, failure))
    pipeline = B(clock=clock).add_hedging(should_handle=should_handle).build()
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, LookupError)
    assert contexts_of(error) == [failure]
    assert (fn.running, fn.cut) == (0, [0])


@pytest.mark.parametrize("delay", [-1, 0, 1])
async def test_a_misuse_is_not_hedged(delay: float) -> None:
    """A `MisuseError` is nobody's failure: it comes out, whatever the predicate."""
    calls: list[int] = []

    def no_awaitable() -> Any:
        calls.append(1)
        return 3

    pipeline = B().add_hedging(delay=delay, should_handle=lambda _: True).build()
    with pytest.raises(MisuseError, match="returned 3"):
        await pipeline.execute(no_awaitable)
    assert calls == [1]


# ---- the action generator -----------------------------------------------------------------------


async def test_by_default_a_hedge_runs_the_callback_once_more(clock: VirtualClock) -> None:
    """HG-32: with the same arguments, and the attempt's own context as the current one."""
    seen: list[tuple[tuple[object, ...], int]] = []

    async def fn(*args: object) -> str:
        seen.append((args, current_context().attempt))
        if len(seen) == 1:
            await anyio.sleep_forever()
        return "hedge"

    assert await B(clock=clock).add_hedging().build().execute(fn, 1, "two") == "hedge"
    assert seen == [((1, "two"), 0), ((1, "two"), 1)]


@pytest.mark.parametrize("kind", ["function", "coroutine function"])
async def test_the_generated_action_runs_in_the_callbacks_place(kind: str) -> None:
    """Its result is the attempt's; it is called without arguments, as is the event's callback."""
    events: list[HedgingActionEvent] = []
    fn = Scripted(ConnectionError(), "by the callback")

    def generate(event: HedgingActionEvent) -> Callable[[], Awaitable[str]]:
        events.append(event)

        async def action() -> str:
            assert current_context() is event.context
            return f"action, {await event.callback()}"

        return action

    async def generate_later(event: HedgingActionEvent) -> Callable[[], Awaitable[str]]:
        await checkpoint()
        return generate(event)

    generator = generate if kind == "function" else generate_later
    pipeline = B().add_hedging(delay=-1, action_generator=generator).build()
    context = ResilienceContext(operation_key="op")
    assert await pipeline.execute(fn, "argument", context=context) == "action, by the callback"
    assert fn.arguments == [("argument",), ("argument",)]
    (event,) = events
    assert event.attempt == 1
    assert event.primary_context is context
    assert event.context is not context
    assert (event.context.attempt, event.context.operation_key) == (1, "op")


async def test_the_action_goes_through_what_is_inside_the_hedging() -> None:
    """It takes the callback's place at the end of the chain."""
    action = Scripted(ConnectionError(), ConnectionError(), "action")
    pipeline = (
        B()
        .add_hedging(delay=-1, action_generator=lambda _: action)
        .add_retry(max_retry_attempts=2, delay=0)
        .build()
    )
    assert await pipeline.execute(Scripted(ConnectionError())) == "action"
    assert action.calls == 3


async def test_without_an_action_the_first_outcome_comes_out() -> None:
    """HG-21: nothing in flight and nothing to launch: no attempt, no hook, the first attempt's outcome."""
    events: list[object] = []
    error = ConnectionError("first")
    fn = Scripted(error, "second")
    pipeline = (
        B()
        .add_hedging(
            max_hedged_attempts=3,
            delay=-1,
            action_generator=lambda _: None,
            on_hedging=events.append,
        )
        .build()
    )
    assert await raised_by(pipeline.execute, fn) is error
    assert (fn.calls, events) == (1, [])


@pytest.mark.parametrize("delay", [0, 2])
async def test_without_an_action_what_is_in_flight_is_waited_for(
    clock: VirtualClock, delay: float
) -> None:
    """No hedge now: the first attempt may still win, and the generator is not asked again and again."""
    asked: list[int] = []

    def generate(event: HedgingActionEvent) -> None:
        asked.append(event.attempt)

    fn = Racers(clock, (50, "first"))
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=5, delay=delay, action_generator=generate)
        .build()
    )
    assert await pipeline.execute(fn) == "first"
    assert asked == [1]


async def test_the_generator_is_asked_again_when_an_attempt_has_come_out(
    clock: VirtualClock,
) -> None:
    """Not before something completes; then with the same number."""
    asked: list[tuple[int, float]] = []

    def generate(event: HedgingActionEvent) -> Callable[[], Awaitable[Any]] | None:
        asked.append((event.attempt, clock.now()))
        return None if len(asked) == 1 else event.callback

    fn = Racers(clock, (20, ConnectionError()), (1, "second"))
    pipeline = B(clock=clock).add_hedging(delay=2, action_generator=generate).build()
    assert await pipeline.execute(fn) == "second"
    assert asked == [(1, 2), (1, 20)]


async def test_what_the_generator_raises_is_the_attempts_outcome() -> None:
    """HG-22: handled like any other, it launches the next; the hook hears only of what is launched."""
    events: list[HedgingEvent] = []
    judged: list[tuple[int, object]] = []

    def generate(event: HedgingActionEvent) -> Callable[[], Awaitable[Any]]:
        if event.attempt == 1:
            raise ConnectionError("the generator's")
        return Scripted("third")

    def should_handle(event: OutcomeEvent) -> bool:
        judged.append((event.attempt, str(event.outcome.error)))
        return event.outcome.error is not None

    pipeline = (
        B()
        .add_hedging(
            max_hedged_attempts=2,
            delay=-1,
            should_handle=should_handle,
            action_generator=generate,
            on_hedging=events.append,
        )
        .build()
    )
    assert await pipeline.execute(Scripted(ConnectionError("first"))) == "third"
    assert judged == [(0, "first"), (1, "the generator's"), (2, "None")]
    assert [event.attempt for event in events] == [1]


async def test_an_unhandled_error_of_the_generator_comes_out(clock: VirtualClock) -> None:
    """HG-22: as the attempt's outcome it wins; the first attempt is cancelled and gone."""
    error = KeyError("the generator's")

    def generate(event: HedgingActionEvent) -> None:
        raise error

    fn = Racers(clock, (math.inf, None))
    pipeline = (
        B(clock=clock)
        .add_hedging(delay=2, action_generator=generate, should_handle=ConnectionError)
        .build()
    )
    assert await raised_by(pipeline.execute, fn) is error
    assert (fn.cut, clock.now()) == ([0], 2)


async def test_when_all_are_handled_the_generators_error_does_not_come_out() -> None:
    """The first attempt's outcome does."""
    first = ConnectionError("first")

    def generate(event: HedgingActionEvent) -> None:
        raise ConnectionError("the generator's")

    pipeline = B().add_hedging(delay=-1, action_generator=generate).build()
    assert await raised_by(pipeline.execute, Scripted(first)) is first


async def test_an_action_that_is_no_function_is_a_misuse() -> None:
    """Refused with a message that says what is to be given."""
    generate: Any = lambda _: "an action"  # noqa: E731
    pipeline = B().add_hedging(delay=-1, action_generator=generate).build()
    with pytest.raises(MisuseError, match=r"action_generator.*'an action'"):
        await pipeline.execute(Scripted(ConnectionError()))


# ---- the hook -----------------------------------------------------------------------------------


async def test_the_hook_is_called_before_each_launch(clock: VirtualClock) -> None:
    """HG-03: numbered from 0, with the caller's context and the attempt's."""
    log: list[object] = []
    context = ResilienceContext()

    async def on_hedging(event: HedgingEvent) -> None:
        await checkpoint()
        assert event.context is context
        assert event.attempt_context.attempt == event.attempt + 1
        log.append(event.attempt)

    async def fn() -> None:
        log.append(f"attempt {current_context().attempt}")
        await clock.sleep(10)

    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2, on_hedging=on_hedging).build()
    )
    await pipeline.execute(fn, context=context)
    assert log == ["attempt 0", 0, "attempt 1", 1, "attempt 2"]


@EACH_MODE
async def test_a_raising_hook_ends_the_call(clock: VirtualClock, delay: float) -> None:
    """HG-20: its error comes out; every attempt has been cancelled and awaited, and none was launched."""
    error = LookupError("the hook's")

    def on_hedging(event: HedgingEvent) -> None:
        if event.attempt == 1:
            raise error

    fn = Racers(clock, (1, ConnectionError()), (1 if delay < 0 else math.inf, ConnectionError()))
    pipeline = (
        B(clock=clock)
        .add_hedging(max_hedged_attempts=5, delay=delay, on_hedging=on_hedging)
        .build()
    )
    assert await raised_by(pipeline.execute, fn) is error
    assert (fn.calls, fn.running) == (2, 0)


async def test_the_error_of_a_hook_has_the_failure_it_answers_as_its_context() -> None:
    """Small print: an exception raised by a hook has the attempt's failure as its `__context__`."""
    failure = ConnectionError("the attempt's")

    def on_hedging(event: HedgingEvent) -> None:
        raise LookupError("the hook's")

    pipeline = B().add_hedging(delay=-1, on_hedging=on_hedging).build()
    error = await raised_by(pipeline.execute, Scripted(failure))
    assert isinstance(error, LookupError)
    assert contexts_of(error) == [failure]


async def test_the_error_of_an_action_generator_has_the_failure_as_its_context() -> None:
    """Small print: the same for generators, whose error is the attempt's outcome."""
    failure = ConnectionError("the attempt's")

    def generate(event: HedgingActionEvent) -> None:
        raise LookupError("the generator's")

    pipeline = (
        B().add_hedging(delay=-1, action_generator=generate, should_handle=ConnectionError).build()
    )
    error = await raised_by(pipeline.execute, Scripted(failure))
    assert isinstance(error, LookupError)
    assert contexts_of(error) == [failure]


async def test_a_raising_delay_generator_ends_the_call(clock: VirtualClock) -> None:
    """Small print: unlike an action generator's, its error is no attempt's outcome."""
    error = ConnectionError("the generator's")

    async def delay(event: HedgingDelayEvent) -> float:
        await tick()
        raise error

    fn = Racers(clock, (math.inf, None))
    pipeline = B(clock=clock).add_hedging(delay_generator=delay).build()
    assert await raised_by(pipeline.execute, fn) is error
    assert (fn.calls, fn.running) == (1, 0)


async def test_an_attempt_that_wins_while_the_hook_runs_makes_the_launch_needless(
    clock: VirtualClock,
) -> None:
    """The hook has been told, the attempt need not start."""

    async def on_hedging(event: HedgingEvent) -> None:
        await clock.sleep(5)

    fn = Racers(clock, (4, "first"))
    pipeline = B(clock=clock).add_hedging(delay=2, on_hedging=on_hedging).build()
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 1


async def test_one_pipeline_races_for_many_callers(clock: VirtualClock) -> None:
    """Executions share nothing: a hundred at once, each with a slow first attempt."""
    results: list[int] = []

    async def call(number: int) -> None:
        fn = Racers(clock, (math.inf, None), (1 + number % 3, number))
        results.append(await pipeline.execute(fn))

    pipeline = B(clock=clock).add_hedging().build()
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(call, number)
    assert sorted(results) == list(range(100))
    assert clock.now() == 5


async def test_without_a_clock_of_ours_the_loops_own_time_serves() -> None:
    """Nothing of a race needs more than the loop has."""
    first, second = Hanging(), Scripted("hedge")
    pipeline = B().add_hedging(delay=0, action_generator=lambda _: second).build()
    outcome = await pipeline.settle(first)
    assert repr(outcome.unwrap()) == "'hedge'"
    assert first.cancelled == 1
