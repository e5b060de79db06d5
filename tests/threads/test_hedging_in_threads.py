"""Hedging in plain threads: attempts in worker threads, and losers that nobody waits for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NoReturn

import pytest

from resilience_pipeline import (
    Failure,
    MisuseError,
    PercentileDelay,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    current_context,
)
from resilience_pipeline.runtime._here import run_here
from resilience_pipeline.testing import VirtualClock
from support.beside import PATIENCE, Beside, Closable, Gate, HandClock, let_go, see, until
from support.calls import BoomError

B = ResiliencePipelineBuilder
COLOUR: PropertyKey[str] = PropertyKey("colour")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(autojump=True)


def ok() -> int:
    return 1


class Plays:
    """Plays one part for each attempt: a value, an error, or a function that is called.

    Attributes:
        calls: When each attempt began, by its number.
    """

    def __init__(self, clock: Any, *parts: Any) -> None:
        self.calls: dict[int, float] = {}
        self._clock = clock
        self._parts = parts

    def __call__(self) -> Any:
        number = current_context().attempt
        self.calls[number] = self._clock.now()
        part = self._parts[number]
        if callable(part):
            part = part()
        if isinstance(part, BaseException):
            raise part
        return part


class Takes:
    """Takes so long by the clock, then gives a value or raises an error."""

    def __init__(self, clock: VirtualClock, seconds: float, then: Any) -> None:
        self._clock, self._seconds, self._then = clock, seconds, then

    def __call__(self) -> Any:
        run_here(self._clock.sleep(self._seconds), self._clock)
        return self._then


def hedging(clock: Any, **options: Any) -> ResiliencePipeline[Any]:
    return B(clock=clock).add_hedging(**options).build()


# ---- where attempts run -----------------------------------------------------------------------


def test_every_attempt_runs_in_a_worker_thread_and_hooks_in_the_callers(
    clock: VirtualClock,
) -> None:
    """Attempts run in worker threads, the first included; hooks and predicates do not."""
    attempts: list[int] = []
    hooks: list[int] = []

    def fn() -> NoReturn:
        attempts.append(threading.get_ident())
        raise BoomError

    def should_handle(_: object) -> bool:
        hooks.append(threading.get_ident())
        return True

    pipeline = hedging(
        clock,
        delay=-1,
        should_handle=should_handle,
        on_hedging=lambda _: hooks.append(threading.get_ident()),
    )
    pipeline.settle_sync(fn)
    assert len(attempts) == 2
    assert threading.get_ident() not in attempts
    assert set(hooks) == {threading.get_ident()}


def test_context_variables_are_carried_over(clock: VirtualClock) -> None:
    """Each attempt has a copy of the caller's."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    colour.set("red")
    seen: list[str] = []

    def fn() -> NoReturn:
        seen.append(colour.get())
        colour.set("blue")
        raise BoomError

    hedging(clock, delay=-1).settle_sync(fn)
    assert seen == ["red", "red"]
    assert colour.get() == "red"


# ---- modes ------------------------------------------------------------------------------------


def test_a_fast_first_attempt_needs_no_hedge(clock: VirtualClock) -> None:
    """With `delay` > 0."""
    plays = Plays(clock, Takes(clock, 1, "first"))
    assert hedging(clock, delay=2).execute_sync(plays) == "first"
    assert plays.calls == {0: 0}


def test_a_hedge_starts_when_the_delay_has_passed_since_the_last_launch(
    clock: VirtualClock,
) -> None:
    """`delay` > 0: next attempt when it passes since the last launch."""
    plays = Plays(clock, Takes(clock, 90, 0), Takes(clock, 90, 1), Takes(clock, 90, 2), "third")
    assert hedging(clock, delay=2, max_hedged_attempts=3).execute_sync(plays) == "third"
    assert plays.calls == {0: 0, 1: 2, 2: 4, 3: 6}


def test_a_hedge_starts_at_once_when_an_attempt_came_out_handled(clock: VirtualClock) -> None:
    """`delay` > 0: or at once."""
    plays = Plays(clock, Takes(clock, 1, BoomError()), "second")
    assert hedging(clock, delay=50).execute_sync(plays) == "second"
    assert plays.calls == {0: 0, 1: 1}


def test_delay_zero_launches_all_at_once(clock: VirtualClock) -> None:
    """`delay` = 0."""
    plays = Plays(clock, Takes(clock, 9, 0), Takes(clock, 5, 1), Takes(clock, 7, 2))
    assert hedging(clock, delay=0, max_hedged_attempts=2).execute_sync(plays) == 1
    assert plays.calls == {0: 0, 1: 0, 2: 0}


def test_a_negative_delay_launches_one_at_a_time(clock: VirtualClock) -> None:
    """`delay` < 0: the next only after a handled outcome."""
    plays = Plays(clock, Takes(clock, 30, BoomError()), Takes(clock, 40, BoomError()), "third")
    assert hedging(clock, delay=-1, max_hedged_attempts=2).execute_sync(plays) == "third"
    assert plays.calls == {0: 0, 1: 30, 2: 70}


def test_a_delay_generator_may_switch_modes(clock: VirtualClock) -> None:
    """`delay_generator(event)`: context, attempt (number launched so far)."""
    seen: list[int] = []
    context = ResilienceContext()

    def delay(event: Any) -> float:
        assert event.context is context
        seen.append(event.attempt)
        return {1: 3.0, 2: 0.0, 3: -1.0}[event.attempt]

    plays = Plays(clock, *[Takes(clock, 60, number) for number in range(3)], "never")
    pipeline = hedging(clock, delay_generator=delay, max_hedged_attempts=3)
    assert pipeline.execute_sync(plays, context=context) == 0
    assert plays.calls == {0: 0, 1: 3, 2: 3}
    assert seen == [1, 2, 3]


def test_a_percentile_delay_learns_in_threads_too(clock: VirtualClock) -> None:
    """`PercentileDelay` hedges what is slower than the recent calls were."""
    pipeline = hedging(clock, delay_generator=PercentileDelay(0.95, initial=50))
    for _ in range(20):
        pipeline.execute_sync(Plays(clock, Takes(clock, 4, 0)))
    began = clock.now()
    plays = Plays(clock, Takes(clock, 40, "slow"), "hedge")
    assert pipeline.execute_sync(plays) == "hedge"
    assert plays.calls[1] - began == 4


def test_no_more_attempts_than_allowed(clock: VirtualClock) -> None:
    """`max_hedged_attempts` beside the first."""
    plays = Plays(clock, *[Takes(clock, 60, number) for number in range(3)])
    assert hedging(clock, delay=1, max_hedged_attempts=2).execute_sync(plays) == 0
    assert sorted(plays.calls) == [0, 1, 2]


# ---- winners ----------------------------------------------------------------------------------


def test_an_exception_that_is_not_handled_wins(clock: VirtualClock) -> None:
    """The first outcome not handled, value or exception."""
    error = KeyError("mine")
    plays = Plays(clock, Takes(clock, 50, "slow"), Takes(clock, 1, error))
    pipeline = hedging(clock, delay=1, should_handle=BoomError)
    with pytest.raises(KeyError) as caught:
        pipeline.execute_sync(plays)
    assert caught.value is error
    assert clock.now() == 2


def test_a_handled_result_does_not_win(clock: VirtualClock) -> None:
    """A predicate that looks at results."""
    plays = Plays(clock, "bad", "good")
    pipeline = hedging(clock, delay=-1, should_handle=lambda event: event.outcome.value == "bad")
    assert pipeline.execute_sync(plays) == "good"


def test_all_handled_gives_the_first_attempts_outcome(clock: VirtualClock) -> None:
    """Whatever finished last."""
    errors = [BoomError("first"), BoomError("second")]
    plays = Plays(clock, Takes(clock, 9, errors[0]), Takes(clock, 1, errors[1]))
    outcome = hedging(clock, delay=1).settle_sync(plays)
    assert isinstance(outcome, Failure)
    assert outcome.error is errors[0]
    assert clock.now() == 9


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("number", [0, 1])
def test_a_base_exception_of_an_attempt_ends_the_call_as_itself(
    clock: VirtualClock, error: type[BaseException], number: int
) -> None:
    """Not handled, no group: nothing else counts any more."""
    parts: list[Any] = [Takes(clock, 50, "slow"), Takes(clock, 50, "slow")]
    parts[number] = Takes(clock, 5, error())
    with pytest.raises(error):
        hedging(clock, delay=1).execute_sync(Plays(clock, *parts))
    assert clock.now() == 5 + number


def test_a_losers_late_error_reaches_nobody(
    clock: VirtualClock, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loser's exception reaches nobody."""
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    gate = Gate(error=BoomError("late"))
    pipeline = (
        B()
        .add_concurrency_limiter(1, queue_limit=1)
        .add_hedging(delay_generator=lambda _: 0)
        .build()
    )
    assert pipeline.execute_sync(Plays(clock, gate, "fast")) == "fast"
    let_go(gate)
    assert pipeline.execute_sync(ok) == 1  # when the permit is back it has ended
    gc.collect()
    assert not printed
    assert capfd.readouterr() == ("", "")


# ---- losers -----------------------------------------------------------------------------------


def race(gate: Gate, winner: Any = "fast") -> Plays:
    """A first attempt that stays inside, and a hedge that gives `winner` once it is in there."""

    def hedge() -> Any:
        see(gate.entered)
        return winner

    return Plays(HandClock(), gate, hedge, hedge)


def test_the_call_returns_without_waiting_for_losers() -> None:
    """A loser in a thread can't be cancelled: the call returns without it."""
    gate = Gate()
    assert B().add_hedging(delay=0).build().execute_sync(race(gate)) == "fast"
    assert not gate.left.is_set()
    let_go(gate)


def test_a_loser_is_told() -> None:
    """Its flag is set, so that cooperative code stops."""
    told = threading.Event()
    inside = threading.Event()

    def first() -> None:
        inside.set()
        if current_context().cancelled.wait(PATIENCE):
            told.set()

    def hedge() -> bool:
        see(inside)
        return current_context().cancelled.is_set()

    pipeline = B().add_hedging(delay=0).build()
    assert pipeline.execute_sync(Plays(HandClock(), first, hedge)) is False
    see(told)


def test_a_late_result_of_a_loser_is_closed_once() -> None:
    """Its late result is closed."""
    gate = Gate(Closable())
    winner = Closable()
    assert B().add_hedging(delay=0).build().execute_sync(race(gate, winner)) is winner
    let_go(gate)
    see(gate.result.closed)
    assert gate.result.closings == 1
    assert not winner.closings


def test_the_result_of_a_loser_that_came_in_is_closed_before_the_call_returns(
    clock: VirtualClock,
) -> None:
    """A handled result that is not returned is closed."""
    handled, winner = Closable(), Closable()
    pipeline = hedging(clock, delay=-1, should_handle=lambda e: e.outcome.value is handled)
    assert pipeline.execute_sync(Plays(clock, handled, winner)) is winner
    assert handled.closings == 1
    assert not winner.closings


def test_a_result_that_all_attempts_share_is_not_closed_under_the_winner(
    clock: VirtualClock,
) -> None:
    """Attempts may all give one and the same thing."""
    shared = Closable()
    seen: list[int] = []

    def should_handle(_: object) -> bool:
        seen.append(1)
        return len(seen) == 1

    pipeline = hedging(clock, delay=-1, should_handle=should_handle)
    assert pipeline.execute_sync(Plays(clock, shared, shared)) is shared
    assert not shared.closings


def test_a_loser_keeps_its_permit_until_it_ends() -> None:
    """With the limiter inside the hedging each attempt has a permit of its own."""
    gate = Gate()
    pipeline = B().add_hedging(delay=0).add_concurrency_limiter(2, queue_limit=2).build()
    assert pipeline.execute_sync(race(gate)) == "fast"
    bound: Any = pipeline
    limiter = bound._head.__self__._next.__self__
    until(lambda: limiter.free == 1)
    assert not gate.left.is_set()
    let_go(gate)
    until(lambda: limiter.free == 2)


def test_a_limiter_outside_keeps_the_permit_until_the_last_loser_ends() -> None:
    """Attempts of one call share its permit, which stays taken as long as one runs on."""
    gate = Gate()
    pipeline = B().add_concurrency_limiter(1).add_hedging(delay=0).build()
    assert pipeline.execute_sync(race(gate)) == "fast"
    assert isinstance(pipeline.settle_sync(ok), Rejected)
    let_go(gate)
    bound: Any = pipeline
    until(lambda: bound._head.__self__.free == 1)
    assert pipeline.execute_sync(ok) == 1


def test_a_retry_inside_a_loser_makes_no_further_attempt() -> None:
    """The library's own waits in what was given up on end at once, and it starts nothing."""
    gate = Gate(error=BoomError())
    pipeline = (
        B()
        .add_concurrency_limiter(1, queue_limit=1)
        .add_hedging(delay=0)
        .add_retry(delay=0, max_retry_attempts=5, should_handle=BoomError)
        .build()
    )

    def fn() -> str:
        with lock:
            number = next(numbers)
        if number == 0:
            gate()
        see(gate.entered)
        return "fast"

    lock, numbers = threading.Lock(), iter(range(100))
    assert pipeline.execute_sync(fn) == "fast"
    let_go(gate)
    assert pipeline.execute_sync(lambda: 1) == 1
    assert gate.calls == 1
    assert next(numbers) == 2, "two attempts, and no third"


def test_a_loser_that_waits_in_a_queue_leaves_it() -> None:
    """It gives its place back, and never runs."""
    limited = B().add_concurrency_limiter(1, queue_limit=5).build()
    bound: Any = limited
    queue = bound._head.__self__._queue
    gate = Gate()
    holder = Beside(limited.execute_sync, gate)
    see(gate.entered)
    calls: list[int] = []

    def on_hedging(_: object) -> NoReturn:
        until(lambda: len(queue) == 1)
        raise KeyError

    pipeline = B().add_hedging(delay=0, on_hedging=on_hedging).add_pipeline(limited).build()
    with pytest.raises(KeyError):
        pipeline.execute_sync(calls.append, 1)
    until(lambda: not len(queue))
    let_go(gate)
    holder.result()
    assert limited.execute_sync(ok) == 1
    assert not calls


# ---- contexts ---------------------------------------------------------------------------------


def test_each_attempt_has_a_context_of_its_own_and_the_winners_properties_merge(
    clock: VirtualClock,
) -> None:
    """What losers write is not seen."""
    context = ResilienceContext()

    def part(seconds: float, colour: str) -> Callable[[], str]:
        def play() -> str:
            current_context().properties[COLOUR] = colour
            run_here(clock.sleep(seconds), clock)
            return current_context().properties[COLOUR]

        return play

    plays = Plays(clock, part(50, "red"), part(1, "blue"))
    assert hedging(clock, delay=1).execute_sync(plays, context=context) == "blue"
    assert context.properties[COLOUR] == "blue"
    assert context.attempt == 0


def test_a_losers_late_write_is_not_seen() -> None:
    """A loser that runs on writes to its own context."""
    gate = Gate()
    context = ResilienceContext()
    written = threading.Event()

    def first() -> None:
        gate()
        current_context().properties[COLOUR] = "late"
        written.set()

    def hedge() -> str:
        see(gate.entered)
        return "fast"

    pipeline = B().add_hedging(delay=0).build()
    assert pipeline.execute_sync(Plays(HandClock(), first, hedge), context=context) == "fast"
    let_go(gate)
    see(written)
    assert COLOUR not in context.properties


def test_on_hedging_gets_both_contexts_and_the_number(clock: VirtualClock) -> None:
    """`on_hedging(event)`: context, attempt (0-based hedge number), before the launch."""
    context = ResilienceContext()
    seen: list[Any] = []

    def on_hedging(event: Any) -> None:
        seen.append((event.context is context, event.attempt, event.attempt_context.attempt))

    pipeline = hedging(clock, delay=-1, max_hedged_attempts=2, on_hedging=on_hedging)
    pipeline.settle_sync(Plays(clock, BoomError(), BoomError(), BoomError()), context=context)
    assert seen == [(True, 0, 1), (True, 1, 2)]


def test_a_raising_on_hedging_ends_the_call_and_gives_up_on_all() -> None:
    """Raising ends the call; the attempts on their way are told."""
    told, inside = threading.Event(), threading.Event()

    def fn() -> None:
        inside.set()
        current_context().cancelled.wait(PATIENCE)
        told.set()

    def on_hedging(_: object) -> NoReturn:
        see(inside)
        raise KeyError

    with pytest.raises(KeyError):
        B().add_hedging(delay=0, on_hedging=on_hedging).build().execute_sync(fn)
    see(told)


def test_an_action_generator_gives_plain_functions(clock: VirtualClock) -> None:
    """In a synchronous call an action is a plain function, called without arguments."""
    events: list[Any] = []

    def action(event: Any) -> Callable[[], str]:
        events.append(event)
        return lambda: f"action in attempt {current_context().attempt}"

    context = ResilienceContext()

    def fail(item: int) -> NoReturn:
        raise BoomError(item)

    pipeline = hedging(clock, delay=-1, action_generator=action)
    assert pipeline.execute_sync(fail, 5, context=context) == "action in attempt 1"
    (event,) = events
    assert event.primary_context is context
    assert (event.attempt, event.context.attempt) == (1, 1)


def test_an_actions_callback_is_called_without_arguments(clock: VirtualClock) -> None:
    """`event.callback` is what the first attempt called."""
    count: list[int] = []

    def fn(item: int) -> int:
        count.append(item)
        if len(count) == 1:
            raise BoomError
        return item

    pipeline = hedging(clock, delay=-1, action_generator=lambda event: event.callback)
    assert pipeline.execute_sync(fn, 5) == 5
    assert count == [5, 5]


def test_no_action_is_no_hedge_now(clock: VirtualClock) -> None:
    """`None`: not asked again until something completes."""
    asked: list[float] = []

    def action(_: object) -> None:
        asked.append(clock.now())

    plays = Plays(clock, Takes(clock, 50, "first"))
    assert hedging(clock, delay=1, action_generator=action).execute_sync(plays) == "first"
    assert asked == [1]


def test_what_an_action_generator_raises_is_the_attempts_outcome(clock: VirtualClock) -> None:
    """A raising `action_generator` becomes that attempt's outcome: here it is handled."""

    def action(_: object) -> NoReturn:
        raise BoomError("no action")

    plays = Plays(clock, Takes(clock, 5, "first"))
    assert hedging(clock, delay=1, action_generator=action).execute_sync(plays) == "first"


def test_an_async_action_is_refused(clock: VirtualClock) -> None:
    """Async callables in a synchronous call are `MisuseError`."""

    async def action() -> int:
        return 1

    pipeline = hedging(clock, delay=-1, action_generator=lambda _: action)
    with pytest.raises(MisuseError):
        pipeline.execute_sync(Plays(clock, BoomError()))


# ---- the rest ---------------------------------------------------------------------------------


def test_what_is_not_idempotent_is_hedged_only_after_an_attempt_that_never_started() -> None:
    """`idempotent=False`: no hedge while one is on its way, none after one was invoked."""
    clock = VirtualClock(autojump=True)
    plays = Plays(clock, Takes(clock, 50, BoomError()))
    outcome = hedging(clock, delay=1).settle_sync(plays, idempotent=False)
    assert isinstance(outcome, Failure)
    assert plays.calls == {0: 0}


def test_a_one_shot_argument_is_refused_before_the_second_launch() -> None:
    """Hedging raises `MisuseError`, the first attempt given up on."""
    gate = Gate()
    with pytest.raises(MisuseError, match="exhausted argument"):
        B().add_hedging(delay=0).build().execute_sync(gate, (x for x in [1]))
    let_go(gate)


def test_attempts_are_recorded_losers_without_an_outcome() -> None:
    """Cancelled losers are recorded with outcome `None`."""
    gate = Gate()
    outcome = B().add_hedging(delay=0).build().settle_sync(race(gate))
    let_go(gate)
    assert isinstance(outcome, Success)
    first, second = outcome.attempts
    assert (first.number, first.outcome, first.hedged) == (0, None, False)
    assert (second.number, second.hedged) == (1, True)
    assert isinstance(second.outcome, Success)


def test_hedging_in_a_timeout_is_given_up_on_with_all_its_attempts(clock: VirtualClock) -> None:
    """A time limit around: every attempt is told."""
    hand = HandClock()
    told = [threading.Event(), threading.Event()]
    inside = threading.Barrier(2)

    def fn() -> None:
        number = current_context().attempt
        if inside.wait(PATIENCE) == 0:
            hand.expire(5)
        if current_context().cancelled.wait(PATIENCE):
            told[number].set()

    pipeline = B(clock=hand).add_timeout(5).add_hedging(delay=0).build()
    assert isinstance(pipeline.settle_sync(fn), Rejected)
    for event in told:
        see(event)


def test_many_hedged_calls_at_once_come_out_right() -> None:
    """Calls at once share the workers, and none gets another's result."""
    pipeline = B().add_hedging(delay=0, max_hedged_attempts=2).build()

    def call(number: int) -> list[int]:
        return [pipeline.execute_sync(lambda: number) for _ in range(20)]

    callers = [Beside(call, number) for number in range(6)]
    for number, caller in enumerate(callers):
        assert caller.result() == [number] * 20
