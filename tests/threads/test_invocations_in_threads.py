"""Whether the callback was invoked is known at once, also of a thread that was left alone in it.

With `idempotent=False` that is what decides about a second call, and with a budget about what is given back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from resilience_pipeline import (
    Rejected,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    RetryBudget,
    Success,
    TimeoutRejectedError,
)
from resilience_pipeline._cancellation import CancellationFlag, Cancelled
from resilience_pipeline.strategies import Handler, Site, Strategy
from support.beside import Beside, Gate, HandClock, let_go, see
from support.calls import BoomError

B = ResiliencePipelineBuilder
#: Of the limit outside, which passes, and of the one inside, which doesn't.
SOON, LATE = 1, 50


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A callback that is left alone in a thread; it is let out at the end, whatever came of the test."""
    one = Gate("late")
    yield one
    let_go(one)


def limited(hand: HandClock, **of_retry: Any) -> B[Any]:
    """Retries around a limit."""
    return B(clock=hand).add_retry(max_retry_attempts=3, delay=0, **of_retry).add_timeout(SOON)


def left_alone(pipeline: ResiliencePipeline[Any], gate: Gate, hand: HandClock, timers: int) -> Any:
    """Run a call that is not idempotent, and have the limit around it pass once its callback runs."""
    call = Beside(lambda: pipeline.settle_sync(gate, idempotent=False))
    see(gate.entered)
    hand.expire(SOON, timers)
    return call.result()


def is_timed_out(outcome: Any) -> bool:
    return isinstance(outcome, Rejected) and isinstance(outcome.error, TimeoutRejectedError)


# ---- no second call ---------------------------------------------------------------------------


def test_a_limit_within_a_shorter_one_tells_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """The callback runs in a thread of the limit inside, which is left alone together with it."""
    outcome = left_alone(limited(hand).add_timeout(LATE).build(), gate, hand, 2)
    assert is_timed_out(outcome)
    assert gate.calls == 1


def test_limits_three_deep_tell_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """Each of them is around the thread of the next."""
    pipeline = limited(hand).add_timeout(LATE).add_timeout(LATE).build()
    assert is_timed_out(left_alone(pipeline, gate, hand, 3))
    assert gate.calls == 1


def test_a_hedging_within_a_limit_tells_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """The race is left alone before it has added up what its attempts did."""
    pipeline = limited(hand).add_hedging(delay=LATE).build()
    assert is_timed_out(left_alone(pipeline, gate, hand, 1))
    assert gate.calls == 1


def test_a_cache_within_a_limit_tells_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """The call in flight is left alone before it has told the one who started it."""
    pipeline = limited(hand).add_cache(key=lambda _: "key").build()
    assert is_timed_out(left_alone(pipeline, gate, hand, 1))
    assert gate.calls == 1


def test_a_nested_pipeline_tells_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """The limit inside is another pipeline's."""
    inner = B(clock=hand).add_timeout(LATE).build()
    assert is_timed_out(left_alone(limited(hand).add_pipeline(inner).build(), gate, hand, 2))
    assert gate.calls == 1


def test_hedging_around_limits_knows_of_the_invocation(hand: HandClock, gate: Gate) -> None:
    """An attempt that has come out is not followed by another one once the callback has run."""
    pipeline = B(clock=hand).add_hedging(delay=0).add_timeout(SOON).add_timeout(LATE).build()
    assert is_timed_out(left_alone(pipeline, gate, hand, 2))
    assert gate.calls == 1


def test_a_stream_within_two_limits_is_not_begun_again(hand: HandClock, gate: Gate) -> None:
    """The same for a factory that has not come to its first chunk."""
    stream = limited(hand).add_timeout(LATE).build().execute_stream_sync(gate, idempotent=False)
    first = Beside(next, stream)
    see(gate.entered)
    hand.expire(SOON, 2)
    with pytest.raises(TimeoutRejectedError):
        first.result()
    assert gate.calls == 1


# ---- but where there was none -----------------------------------------------------------------


def test_what_was_left_alone_in_a_queue_is_tried_again(hand: HandClock, gate: Gate) -> None:
    """It has not got to the callback, and never will: the second attempt alone calls it."""
    calls: list[int] = []
    lock = ResilienceLock()
    holder = Beside(B().add_lock(lock).build().execute_sync, gate)
    see(gate.entered)
    decided = threading.Event()
    limit = limited(hand, on_retry=lambda _: decided.set())
    pipeline = limit.add_timeout(LATE).add_lock(lock).build()
    call = Beside(lambda: pipeline.settle_sync(lambda: calls.append(1), idempotent=False))
    hand.expire(SOON, 2)
    see(decided)  # until then the first attempt may still get the lock, and call it
    gate.opened.set()
    outcome = call.result()
    assert isinstance(outcome, Success)
    assert len(outcome.attempts) == 2
    assert calls == [1]
    assert holder.result() == "late"


class Held(Strategy[Any]):
    """Holds up all attempts but the first, until it is let go, and notes what comes out of them."""

    def __init__(self) -> None:
        self.entered, self.go, self.left = (threading.Event() for _ in range(3))
        self.raised: BaseException | None = None

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            if not context.attempt:
                return await next(context)
            self.entered.set()
            see(self.go)
            try:
                return await next(context)
            except BaseException as error:
                self.raised = error
                raise
            finally:
                self.left.set()

        return handle


def test_a_loser_that_is_late_does_not_get_to_the_callback() -> None:
    """It ends there as all that was given up on does, and the inside takes it for no failure."""
    held, calls = Held(), list[int]()

    def fn() -> str:
        calls.append(1)
        see(held.entered)
        return "first"

    assert B().add_hedging(delay=0).add(held).build().execute_sync(fn) == "first"
    held.go.set()
    see(held.left)
    assert isinstance(held.raised, Cancelled)
    assert calls == [1]


# ---- what is given back -----------------------------------------------------------------------


def test_an_attempt_left_alone_in_the_callback_stays_charged(hand: HandClock, gate: Gate) -> None:
    """The budget's extra was a load, though the thread that runs it has told nobody yet."""
    budget = RetryBudget(ratio=0, min_per_second=0.1)  # one in the window
    pipeline = (
        B(clock=hand)
        .add_retry(max_retry_attempts=1, delay=0, budget=budget)
        .add_timeout(SOON)
        .add_timeout(LATE)
        .build()
    )
    failures = iter([BoomError()])

    def fn() -> Any:
        for failure in failures:
            raise failure
        return gate()

    call = Beside(pipeline.settle_sync, fn)
    see(gate.entered)
    hand.expire(SOON, 2)
    assert is_timed_out(call.result())
    window = budget._account.counted
    assert window is not None
    assert window._extras == 1


# ---- the flag ---------------------------------------------------------------------------------


def test_what_a_flag_lets_through_is_over_when_it_has_been_set() -> None:
    """Whoever gives up knows whether the callback was counted: it was by then, or never will be."""
    flag, order = CancellationFlag(), list[str]()
    inside, go = threading.Event(), threading.Event()

    def count() -> None:
        inside.set()
        see(go)
        order.append("counted")

    def give_up() -> None:
        flag.set()
        order.append("given up")

    counting = Beside(flag.unless_set, count)
    see(inside)
    giving_up = Beside(give_up)
    go.set()
    giving_up.result()
    assert counting.result()
    assert order == ["counted", "given up"]


def test_a_flag_that_is_set_lets_nothing_through() -> None:
    """Also where it was set by the one around it."""
    around = CancellationFlag()
    flag = CancellationFlag(around)
    around.set()
    assert not flag.unless_set(lambda: pytest.fail("counted"))
