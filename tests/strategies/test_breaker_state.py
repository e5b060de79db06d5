"""The states of a circuit breaker by themselves: what may pass, what counts, what changes the state."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from resilience_pipeline.strategies._breaker_state import (
    BreakerState,
    Opening,
    Probe,
    Refusal,
    Ticket,
)
from resilience_pipeline.strategies._slow_calls import SlowCalls


def make(**options: Any) -> BreakerState:
    """A circuit that two failures open, for 5 s; its window forgets nothing."""
    defaults = {
        "failure_ratio": 1.0,
        "minimum_throughput": 2,
        "sampling_duration": math.inf,
        "break_duration": 5.0,
    }
    return BreakerState(**(defaults | options))


def announce(state: BreakerState) -> None:
    state.announced(state.unannounced)


def admitted(state: BreakerState, now: float) -> Ticket:
    ticket = state.admit(now)
    assert not isinstance(ticket, Refusal)
    return ticket


def refused(state: BreakerState, now: float) -> Refusal:
    refusal = state.admit(now)
    assert isinstance(refusal, Refusal)
    return refusal


def opened(now: float = 0.0, **options: Any) -> BreakerState:
    """A circuit that has just been opened, and announced."""
    state = make(**options)
    for number in range(2):
        state.record_failure(admitted(state, now), now, ConnectionError(str(number)))
    assert state.state == "open"
    announce(state)
    return state


def probing(now: float = 5.0, **options: Any) -> tuple[BreakerState, Probe]:
    """A half-open circuit and its probe."""
    state = opened(**options)
    probe = admitted(state, now)
    assert isinstance(probe, Probe)
    announce(state)
    return state, probe


# --- closed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "failures", "trips"),
    [
        pytest.param(9, 1, True, id="10 calls, rate 0.1"),
        pytest.param(8, 2, True, id="10 calls, rate 0.2"),
        pytest.param(9, 2, True, id="11 calls, rate 0.18"),
        pytest.param(8, 1, False, id="9 calls, rate 0.1"),
        pytest.param(10, 1, False, id="11 calls, rate 0.09"),
        pytest.param(99, 1, False, id="100 calls, rate 0.01"),
    ],
)
def test_a_failure_trips_at_ratio_and_throughput_inclusive(
    successes: int, failures: int, trips: bool
) -> None:
    """CB-06: both limits are inclusive, and the failure that is being judged is counted first."""
    state = make(failure_ratio=0.1, minimum_throughput=10)
    for _ in range(successes):
        state.window.record_success(0.0)
    for _ in range(failures - 1):
        state.window.record_failure(0.0)
    opening = state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert (opening is not None) == trips
    assert state.state == ("open" if trips else "closed")


def test_a_success_never_trips() -> None:
    """CB-06: a success that completes the throughput leaves a circuit closed whatever the rate."""
    state = make(failure_ratio=0.1, minimum_throughput=10)
    for _ in range(9):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert state.record_success(admitted(state, 0.0), 0.0) is False
    assert state.state == "closed"
    assert state.window.counts(0.0) == (10, 9)


def test_a_ratio_of_zero_trips_on_any_failure_at_the_throughput() -> None:
    """CB-41: ratio 0 is allowed; only a handled outcome can trip it."""
    state = make(failure_ratio=0.0, minimum_throughput=3)
    for _ in range(10):
        state.record_success(admitted(state, 0.0), 0.0)
    assert state.state == "closed"
    assert state.record_failure(admitted(state, 0.0), 0.0, ConnectionError()) is not None


def test_an_opening_says_how_it_came_to_be() -> None:
    """CB-17: rate and count are those of the window, the failure that tripped included."""
    state = make(failure_ratio=0.5, minimum_throughput=4)
    for _ in range(2):
        state.record_success(admitted(state, 0.0), 0.0)
    state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    opening = state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert opening is not None
    assert (opening.failure_rate, opening.failure_count) == (0.5, 2)
    assert opening.half_open_attempts == 0


def test_what_left_the_window_no_longer_counts() -> None:
    """Window: an outcome older than `sampling_duration` neither trips nor counts."""
    state = make(sampling_duration=10.0)
    state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert state.record_failure(admitted(state, 10.0), 10.0, ConnectionError()) is None
    assert state.window.counts(10.0) == (1, 1)
    assert state.record_failure(admitted(state, 11.0), 11.0, ConnectionError()) is not None


# --- open --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("now", "left"), [(0.0, 5.0), (0.001, 4.999), (2.5, 2.5), (4.5, 0.5)])
def test_a_refusal_says_what_is_left_of_the_break(now: float, left: float) -> None:
    """CB-02, CB-15: `retry_after` counts down to the end of the break."""
    refusal = refused(opened(), now)
    assert refusal.state == "open"
    assert refusal.retry_after == pytest.approx(left, abs=1e-12)


@given(
    opened_at=st.floats(0, 1e9, allow_subnormal=False),
    break_duration=st.floats(1e-6, 1e6),
    part=st.floats(0, 1),
)
def test_after_exactly_the_wait_that_was_told_a_call_is_admitted(
    opened_at: float, break_duration: float, part: float
) -> None:
    """`retry_after` is long enough at every clock value: no rounding leaves the next call outside."""
    state = opened(opened_at, break_duration=break_duration)
    now = opened_at + break_duration * part
    answer = state.admit(now)
    if isinstance(answer, Refusal):
        assert answer.retry_after is not None
        assert answer.retry_after > 0
        answer = state.admit(now + answer.retry_after)
    assert isinstance(answer, Probe)


def test_a_break_ends_at_its_last_moment() -> None:
    """Half-open: the end of the break is inclusive."""
    state = opened()
    refused(state, math.nextafter(5.0, 0.0))
    assert isinstance(state.admit(5.0), Probe)
    assert state.state == "half_open"


def test_time_alone_changes_no_state() -> None:
    """Half-open comes lazily, with a call: without one the circuit says open long after the break."""
    state = opened()
    state.window.counts(1e9)
    assert state.state == "open"


def test_late_outcomes_are_counted_and_change_nothing_else() -> None:
    """CB-07, CB-11: in the open state an outcome counts; the break is neither extended nor begun anew."""
    state = make()
    tickets = [admitted(state, 0.0) for _ in range(4)]
    state.record_failure(tickets[0], 0.0, ConnectionError())
    assert state.record_failure(tickets[1], 0.0, ConnectionError()) is not None
    assert state.record_failure(tickets[2], 3.0, ConnectionError()) is None
    assert state.record_success(tickets[3], 3.0) is False
    assert state.window.counts(3.0) == (4, 3)
    assert (state.state, state.opened_at, state.blocked_until) == ("open", 0.0, 5.0)


def test_a_late_exception_becomes_the_cause() -> None:
    """CB-11: the exception handled last is the one refusals name."""
    state = make()
    late = admitted(state, 0.0)
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    error = OSError("late")
    state.record_failure(late, 1.0, error)
    assert refused(state, 1.0).cause is error


def test_a_late_result_does_not_hide_the_exception_that_tripped() -> None:
    """`__cause__` is the exception handled last; a result that comes after it is none."""
    state = make()
    late = admitted(state, 0.0)
    error = ConnectionError()
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, error)
    state.record_failure(late, 1.0, None)
    assert refused(state, 1.0).cause is error


def test_a_result_that_trips_leaves_no_cause() -> None:
    """CB-13: opened by a result means no cause, also where exceptions were handled before."""
    state = make()
    state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert state.record_failure(admitted(state, 0.0), 0.0, None) is not None
    assert refused(state, 0.0).cause is None


# --- half-open ---------------------------------------------------------------------------------


def test_one_probe_at_a_time() -> None:
    """CB-09: while the probe runs everybody else is refused, with the time until its place lapses."""
    state, _ = probing()
    assert refused(state, 5.0) == Refusal("half_open", 5.0, state.last_handled)
    assert refused(state, 7.0).retry_after == 3.0


def test_a_good_probe_closes_and_empties_the_window() -> None:
    """CB-04, CB-08: closing resets the counts and forgets the break and the cause."""
    state, probe = probing()
    assert state.record_success(probe, 5.0) is True
    assert (state.state, state.window.counts(5.0)) == ("closed", (0, 0))
    assert (state.opened_at, state.blocked_until, state.last_handled) == (None, None, None)


def test_a_bad_probe_opens_for_a_fresh_break_and_is_not_counted() -> None:
    """CB-03, CB-07: the break starts now; half-open outcomes stay out of the window."""
    state, probe = probing()
    before = state.window.counts(6.0)
    error = OSError()
    opening = state.record_failure(probe, 6.0, error)
    assert opening is not None
    assert opening.half_open_attempts == 1
    assert (state.opened_at, state.blocked_until) == (6.0, 11.0)
    assert state.window.counts(6.0) == before
    assert refused(state, 6.0) == Refusal("open", 5.0, error)


def test_a_late_outcome_decides_nothing_while_half_open() -> None:
    """Late results, case CB-07: neither a good nor a bad old call speaks for the probe, or counts."""
    state = make()
    old = [admitted(state, 0.0) for _ in range(2)]
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    announce(state)
    probe = admitted(state, 5.0)
    cause = state.last_handled
    assert state.record_success(old[0], 5.0) is False
    assert state.record_failure(old[1], 5.0, OSError()) is None
    assert (state.state, state.last_handled) == ("half_open", cause)
    assert state.window.counts(5.0) == (2, 2)
    assert state.record_success(probe, 5.0) is True


def test_an_outcome_of_an_earlier_epoch_is_not_counted() -> None:
    """Late results: what was admitted before the circuit closed again is no news about now."""
    state = make()
    old = admitted(state, 0.0)
    state.close()
    assert state.record_failure(old, 1.0, ConnectionError()) is None
    assert state.record_success(old, 1.0) is False
    assert state.window.counts(1.0) == (0, 0)


def test_a_released_probe_gives_its_place_to_the_next_call() -> None:
    """A cancelled probe decides nothing: the circuit stays half-open and the next call is the probe."""
    state, probe = probing()
    state.release(probe)
    assert state.state == "half_open"
    assert isinstance(state.admit(5.0), Probe)


def test_releasing_an_old_probe_leaves_the_new_one_its_place() -> None:
    """Rule 2 of the design: a place is given back once, by the one who has it."""
    state, first = probing()
    state.release(first)
    second = admitted(state, 5.0)
    state.release(first)
    refused(state, 5.0)
    assert state.record_success(second, 5.0) is True


def test_a_probe_that_hangs_loses_its_place_after_another_break() -> None:
    """Case CB-15: the place lapses one break after the admission, that moment included."""
    state, _ = probing()
    refused(state, math.nextafter(10.0, 0.0))
    assert isinstance(state.admit(10.0), Probe)


@pytest.mark.parametrize("failed", [True, False])
def test_a_lapsed_probe_decides_nothing(failed: bool) -> None:
    """Case CB-15: the late result of a probe that lost its place changes nothing."""
    state, lapsed = probing()
    current = admitted(state, 10.0)
    if failed:
        assert state.record_failure(lapsed, 10.0, OSError()) is None
    else:
        assert state.record_success(lapsed, 10.0) is False
    assert state.state == "half_open"
    assert state.record_success(current, 10.0) is True


def test_looking_forgets_no_slow_probe() -> None:
    """`health` after its place has lapsed: the next call still finds that it was slow before."""
    slow = SlowCalls(duration=1.0, ratio=1.0, minimum_throughput=2, sampling_duration=30.0)
    state, _ = probing(slow=slow)
    assert state.health(11.0)["retry_after"] == 0
    assert state.pass_slow(11.0) is not None


def test_a_lapsed_probe_whose_place_nobody_took_decides() -> None:
    """Good calls that take longer than a break close the circuit all the same; looking changes nothing."""
    state, lapsed = probing()
    assert state.health(11.0)["retry_after"] == 0
    assert state.record_success(lapsed, 11.0) is True


def test_attempts_count_half_open_periods_since_the_last_close() -> None:
    """CB-16: the generator is told 0, 1, 2, 3, 4 and, after a close, 0, 1, 2."""
    state = make()
    now, seen = 0.0, []
    for cycles in (5, 3):
        opening = None
        while opening is None:
            opening = state.record_failure(admitted(state, now), now, ConnectionError())
        announce(state)
        seen.append(opening.half_open_attempts)
        for _ in range(cycles - 1):
            now += 5
            probe = admitted(state, now)
            announce(state)
            opening = state.record_failure(probe, now, ConnectionError())
            assert opening is not None
            seen.append(opening.half_open_attempts)
            announce(state)
        now += 5
        assert state.record_success(admitted(state, now), now) is True
        announce(state)
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_probe_whose_place_was_given_back_is_no_further_attempt() -> None:
    """CB-16: `half_open_attempts` counts periods, not probes."""
    state, probe = probing()
    state.release(probe)
    opening = state.record_failure(admitted(state, 5.0), 5.0, ConnectionError())
    assert opening is not None
    assert opening.half_open_attempts == 1


# --- the length of a break ---------------------------------------------------------------------


def reopened(state: BreakerState, now: float) -> Opening:
    probe = admitted(state, now)
    announce(state)
    opening = state.record_failure(probe, now, ConnectionError())
    assert opening is not None
    announce(state)
    return opening


def test_a_computed_break_replaces_the_configured_one() -> None:
    """CB-05: it counts from the opening, and a probe's place lapses after it as well."""
    state = opened()
    state.set_break(reopened(state, 5.0), 20.0)
    assert (state.opened_at, state.blocked_until) == (5.0, 25.0)
    admitted(state, 25.0)
    assert refused(state, 30.0).retry_after == 15.0


def test_the_break_after_a_computed_one_is_the_configured_one_again() -> None:
    """A generator's value belongs to one opening."""
    state = opened()
    state.set_break(reopened(state, 5.0), 20.0)
    reopened(state, 25.0)
    assert state.blocked_until == 30.0


@pytest.mark.parametrize("move", ["half-open", "closed", "isolated", "opened again"])
def test_a_break_computed_too_late_changes_nothing(move: str) -> None:
    """A slow generator's value is for its own opening only, while that lasts."""
    state = opened()
    opening = reopened(state, 5.0)
    if move == "half-open":
        admitted(state, 10.0)
    elif move == "closed":
        state.close()
    elif move == "isolated":
        state.isolate()
    else:
        reopened(state, 10.0)
    before = (state.state, state.blocked_until)
    state.set_break(opening, 1000.0)
    assert (state.state, state.blocked_until) == before


def test_an_endless_break_is_never_over() -> None:
    """CB-18: a break beyond the end of time is no error; only a close by hand ends it."""
    state = opened(break_duration=math.inf)
    assert refused(state, 1e300).retry_after == math.inf
    assert state.close() is True


# --- by hand -----------------------------------------------------------------------------------


def test_isolated_refuses_without_a_time() -> None:
    """CB-26: nobody knows when an isolated circuit will be closed."""
    state = make()
    assert state.isolate() is True
    assert refused(state, 1e9) == Refusal("isolated", None, None)


def test_isolating_again_changes_nothing() -> None:
    """Decided: a repeated isolate is silent."""
    state = make()
    state.isolate()
    assert state.isolate() is False


def test_outcomes_are_counted_while_isolated_and_change_nothing() -> None:
    """CB-07, CB-12: calls inside when the circuit was isolated count; it stays isolated."""
    state = make()
    tickets = [admitted(state, 0.0) for _ in range(3)]
    state.isolate()
    assert state.record_success(tickets[0], 0.0) is False
    assert state.record_failure(tickets[1], 0.0, OSError()) is None
    assert state.record_failure(tickets[2], 0.0, OSError()) is None
    assert (state.state, state.window.counts(0.0)) == ("isolated", (3, 2))


def test_a_probe_does_not_close_an_isolated_circuit() -> None:
    """CB-12: a success that comes late finds the circuit isolated, and leaves it so."""
    state, probe = probing()
    state.isolate()
    assert state.record_success(probe, 5.0) is False
    assert state.record_failure(probe, 5.0, OSError()) is None
    assert state.state == "isolated"


def test_closing_by_hand_says_whether_it_was_news() -> None:
    """CB-28: only a circuit that was not closed is announced as closed."""
    state = make()
    assert state.close() is False
    state.isolate()
    assert state.close() is True
    assert state.close() is False


def test_closing_by_hand_empties_the_window_of_a_closed_circuit_too() -> None:
    """CB-26: every close resets the counts."""
    state = make()
    state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    state.close()
    assert state.window.counts(0.0) == (0, 0)
    assert state.last_handled is None


# --- announcing --------------------------------------------------------------------------------


def test_no_trial_before_the_opening_was_announced() -> None:
    """Hooks come in transition order: the next step waits for the last one to be told."""
    state = make(break_duration=1.0)
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    assert refused(state, 1.0).retry_after == 0.0
    announce(state)
    assert isinstance(state.admit(1.0), Probe)


def test_an_announcement_that_never_comes_delays_the_trial_by_one_more_break_at_most() -> None:
    """A hook's trouble must not keep a circuit open for ever."""
    state = make(break_duration=1.0)
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    refused(state, 1.9)
    assert isinstance(state.admit(2.0), Probe)


def test_no_second_probe_before_the_first_was_announced() -> None:
    """However short the break: nobody decides a trial that nobody was told of."""
    state = opened(break_duration=1.0)
    probe = admitted(state, 1.0)
    assert refused(state, 3.0) == Refusal("half_open", 0.0, state.last_handled)
    announce(state)
    assert state.admit(3.0) is not probe


def test_no_opening_before_the_close_was_announced() -> None:
    """The failure is counted, and the next one after the announcement trips."""
    state, probe = probing()
    state.record_success(probe, 5.0)
    for _ in range(3):
        assert state.record_failure(admitted(state, 5.0), 5.0, ConnectionError()) is None
    announce(state)
    assert state.record_failure(admitted(state, 5.0), 5.0, ConnectionError()) is not None


def test_only_the_last_step_can_be_announced() -> None:
    """An announcement that was overtaken by a step by hand does not speak for that."""
    state = make()
    for _ in range(2):
        state.record_failure(admitted(state, 0.0), 0.0, ConnectionError())
    overtaken = state.unannounced
    state.isolate()
    state.announced(overtaken)
    assert state.unannounced != 0
    announce(state)
    assert state.unannounced == 0


# --- any order of events, against a simple model -----------------------------------------------


class CircuitMachine(RuleBasedStateMachine):
    """Any order of calls, outcomes, cancellations, steps by hand and time, against the contract.

    The model keeps no tickets and no places: it knows which call is the probe, and when it lapses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = make(failure_ratio=0.5, minimum_throughput=3)
        self.now = 0.0
        self.calls: list[tuple[Ticket, int]] = []  # with the model's epoch
        self.openings: list[Opening] = []
        self.model = "closed"
        self.epoch = 0
        self.successes = self.failures = 0
        self.probe: Ticket | None = None
        self.break_ends = self.lapses = 0.0
        self.length = 5.0
        self.trials = 0
        self.cause: Exception | None = None

    def close_model(self) -> None:
        self.model, self.probe, self.cause = "closed", None, None
        self.epoch += 1
        self.successes = self.failures = self.trials = 0

    def open_model(self, opening: Opening | None) -> None:
        assert opening is not None
        total = self.successes + self.failures
        assert opening.failure_count == self.failures
        assert opening.failure_rate == (self.failures / total if total else 0.0)
        assert opening.half_open_attempts == self.trials
        self.openings.append(opening)
        self.model, self.probe, self.length = "open", None, 5.0
        self.break_ends = self.now + 5.0

    def settle(self) -> None:
        announce(self.state)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5, 5.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def call(self) -> None:
        answer = self.state.admit(self.now)
        if self.model == "closed":
            assert not isinstance(answer, Refusal | Probe)
        elif self.model == "isolated":
            assert answer == Refusal("isolated", None, self.cause)
        elif self.model == "open" and self.now < self.break_ends:
            assert answer == Refusal("open", self.break_ends - self.now, self.cause)
        elif self.model == "half_open" and self.probe is not None and self.now < self.lapses:
            assert answer == Refusal("half_open", self.lapses - self.now, self.cause)
        else:
            assert isinstance(answer, Probe)
            self.trials += self.model == "open"
            self.model, self.probe = "half_open", answer
            self.lapses = self.now + self.length
        if not isinstance(answer, Refusal):
            self.calls.append((answer, self.epoch))
        self.settle()

    def take(self, data: st.DataObject) -> tuple[Ticket, bool, bool]:
        """End a call: its ticket, whether it is the probe, whether it counts."""
        ticket, epoch = self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))
        is_probe = ticket is self.probe and self.model == "half_open"
        plain = not isinstance(ticket, Probe)
        return ticket, is_probe, plain and epoch == self.epoch and self.model != "half_open"

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def succeed(self, data: st.DataObject) -> None:
        ticket, is_probe, counts = self.take(data)
        assert self.state.record_success(ticket, self.now) == is_probe
        self.state.release(ticket)
        self.successes += counts
        if is_probe:
            self.close_model()
        self.settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), error=st.sampled_from([None, OSError(), ConnectionError()]))
    def fail(self, data: st.DataObject, error: Exception | None) -> None:
        ticket, is_probe, counts = self.take(data)
        opening = self.state.record_failure(ticket, self.now, error)
        self.state.release(ticket)
        if is_probe:
            self.cause = error
            self.open_model(opening)
        elif counts:
            self.failures += 1
            if self.model == "closed" or error is not None:
                self.cause = error
            total = self.successes + self.failures
            if self.model == "closed" and total >= 3 and self.failures * 2 >= total:
                self.open_model(opening)
            else:
                assert opening is None
        else:
            assert opening is None
        self.settle()

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        ticket, is_probe, _ = self.take(data)
        self.state.release(ticket)
        if is_probe:
            self.probe = None

    @rule()
    def isolate(self) -> None:
        assert self.state.isolate() == (self.model != "isolated")
        self.model, self.probe = "isolated", None
        self.settle()

    @rule()
    def close(self) -> None:
        assert self.state.close() == (self.model != "closed")
        self.close_model()
        self.settle()

    @precondition(lambda self: self.openings)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1.0, 7.5, math.inf]))
    def compute_break(self, data: st.DataObject, seconds: float) -> None:
        opening = data.draw(st.sampled_from(self.openings))
        if self.model == "open" and opening is self.openings[-1]:
            assert self.state.opened_at is not None
            self.break_ends = self.state.opened_at + seconds
            self.length = seconds
        self.state.set_break(opening, seconds)

    @invariant()
    def agrees(self) -> None:
        assert self.state.state == self.model
        assert self.state.window.counts(self.now) == (
            self.successes + self.failures,
            self.failures,
        )
        assert self.state.last_handled is self.cause
        if self.model == "closed":
            assert (self.state.opened_at, self.state.blocked_until) == (None, None)
        if self.model == "open":
            assert self.state.blocked_until == self.break_ends


TestAnyOrderOfEvents = CircuitMachine.TestCase
