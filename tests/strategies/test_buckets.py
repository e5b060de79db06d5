"""The three rate limits: what they grant, what they promise about waiting, what they forget."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline.strategies._buckets import (
    FixedWindowState,
    SlidingWindowState,
    TokenBucketState,
)

State: TypeAlias = TokenBucketState | FixedWindowState | SlidingWindowState

MAKERS: dict[str, Callable[[], State]] = {
    "bucket 3 at 0.3/s": lambda: TokenBucketState(3, 0.3),
    "bucket 1 at 0.1/s": lambda: TokenBucketState(1, 0.1),
    "bucket 2.5 at 7/s": lambda: TokenBucketState(2.5, 7.0),
    "fixed 7 in 3 s": lambda: FixedWindowState(7, 3.0),
    "fixed 1 in 0.1 s": lambda: FixedWindowState(1, 0.1),
    "sliding 5 in 1 s by 7": lambda: SlidingWindowState(5, 1.0, 7),
    "sliding 30 in 1 s by 7": lambda: SlidingWindowState(30, 1.0, 7),
    "sliding 4 in 0.3 s by 1": lambda: SlidingWindowState(4, 0.3, 1),
}
any_limit = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())

# Times on a grid of 1/64 s: sums and differences are exact, so models can be compared exactly.
_TICK = 1 / 64
_GRID_STEPS = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3, 8, 21, 64, 200]), min_size=1, max_size=80)


def _drain(state: State, now: float) -> int:
    """Take all there is; the number of permits had."""
    taken = 0
    while state.try_acquire(now) == 0.0:
        taken += 1
    return taken


def _queue(state: State, now: float, permits: int) -> float:
    """Take `permits` as soon as each can be had; the time of the last."""
    for _ in range(permits):
        wait = state.try_acquire(now)
        if wait:
            now += wait
            assert state.try_acquire(now) == 0.0
    return now


# --- all three ---------------------------------------------------------------------------------


@any_limit
@pytest.mark.parametrize("start", [0.0, -3.7, 12345.678, 1e9, -1e9])
def test_the_call_after_the_wait_is_granted(make: Callable[[], State], start: float) -> None:
    """RL-01: a refusal's wait is above 0, just long enough, and true at every clock value."""
    state, draw, now = make(), random.Random(1), start
    refusals = 0
    for _ in range(500):
        if draw.random() < 0.5:
            _drain(state, now)
        wait = state.try_acquire(now)
        if wait:
            refusals += 1
            assert 0 < wait < math.inf
            if wait > 1e-3:
                assert copy.deepcopy(state).try_acquire(now + wait * 0.99) > 0
            now += wait
            assert state.try_acquire(now) == 0.0
        now += draw.choice([0.0, draw.random() * 0.2, draw.random() * 3])
    assert refusals > 20


def test_no_rounding_makes_a_wait_too_short() -> None:
    """RL-01: where the sums of clock and wait are rounded down, the wait makes up for it."""
    draw = random.Random(3)
    for _ in range(5000):
        state = TokenBucketState(1, draw.uniform(0.1, 10))
        reach = draw.choice([1.0, 5.0, 1e4, 1e9])
        now = draw.uniform(-reach, reach)
        state.try_acquire(now)
        now -= draw.choice([0.0, 2.0, 1e4, 1e9]) * draw.random()
        now += state.try_acquire(now)
        assert state.try_acquire(now) == 0.0
        assert state.try_acquire(now) > 0.0  # the permit was had, not just no wait named


@any_limit
def test_a_new_limit_is_whole_at_any_time(make: Callable[[], State]) -> None:
    """The first use sets the anchor: a new state gives all its permits at whatever time."""
    counts = {_drain(make(), now) for now in (-1e9, 0.0, 17.3, 1e9)}

    assert len(counts) == 1
    assert counts.pop() >= 1


@any_limit
@given(steps=st.lists(st.floats(0, 2), max_size=30), permits=st.integers(1, 100))
def test_queue_forecast_equals_the_queue(
    make: Callable[[], State], steps: list[float], permits: int
) -> None:
    """`wait_for` is the time a queue then takes, and asking changes nothing."""
    state, now = make(), 100.0
    for step in steps:
        now += step
        state.try_acquire(now)

    forecast = state.wait_for(now, permits)

    last = _queue(state, now, permits)
    assert last == pytest.approx(now + forecast, abs=1e-9)
    assert (last == now) == (forecast == 0.0)


@any_limit
@given(steps=st.lists(st.floats(0, 2), max_size=30))
def test_forecast_of_one_permit_is_the_wait_of_a_refusal(
    make: Callable[[], State], steps: list[float]
) -> None:
    """`wait_for(now, 1)` says beforehand what `try_acquire(now)` answers."""
    state, now = make(), 100.0
    for step in steps:
        now += step
        forecast = state.wait_for(now, 1)
        assert state.try_acquire(now) == forecast


@any_limit
@given(steps=st.lists(st.floats(0, 4), min_size=1, max_size=30), later=st.floats(0, 40))
def test_forgetting_an_idle_state_changes_no_answer(
    make: Callable[[], State], steps: list[float], later: float
) -> None:
    """An idle state answers like a new one, and every state is idle in the end."""
    state, now = make(), 100.0
    for step in steps:
        now += step
        state.try_acquire(now)
    assert make().is_idle(now)
    assert not state.is_idle(now)
    assert state.is_idle(now + 1000.0)

    now += later
    if state.is_idle(now):
        fresh = make()
        assert [_drain(state, now), state.try_acquire(now)] == [
            _drain(fresh, now),
            fresh.try_acquire(now),
        ]


@any_limit
@given(steps=st.lists(st.floats(0, 4), max_size=30), later=st.floats(0, 4))
def test_what_is_available_can_be_had(
    make: Callable[[], State], steps: list[float], later: float
) -> None:
    """As many permits as are said to be there, and not one more."""
    state, now = make(), 100.0
    for step in steps:
        now += step
        state.try_acquire(now)
    now += later
    assert state.available(now) == _drain(copy.deepcopy(state), now)


@any_limit
def test_questions_change_nothing(make: Callable[[], State]) -> None:
    """Neither forecasts nor idleness are noticed by later calls, whatever time they ask about."""
    asked, quiet = make(), make()
    for tick in range(200):
        now = tick * 0.1
        asked.wait_for(now + 1e6, 3)
        asked.is_idle(now + 1e6)
        asked.available(now + 1e6)
        asked.wait_for(now, 50)
        assert asked.try_acquire(now) == quiet.try_acquire(now)


@any_limit
@pytest.mark.parametrize("step_back", [1e-6, 0.5, 5.0, 3600.0, 1e9])
def test_a_clock_set_back_neither_floods_nor_locks_out(
    make: Callable[[], State], step_back: float
) -> None:
    """RL-07: no permit appears, and the wait grows by a second at most."""
    state, now = make(), 5000.0
    _drain(state, now)
    expected = state.try_acquire(now)

    now -= step_back
    wait = state.try_acquire(now)

    assert expected - 1e-6 <= wait <= expected + min(step_back, 1.0) + 1e-6
    assert wait > 0
    now += wait
    assert state.try_acquire(now) == 0.0
    assert not state.is_idle(now)


@any_limit
def test_readings_that_overtake_each_other_add_nothing(make: Callable[[], State]) -> None:
    """Threads that read the clock in one order and arrive in another get no more than in order."""
    ordered, crossed = make(), make()
    granted = [0, 0]
    for tick in range(2000):
        late, early = tick * 0.01 + 0.009, tick * 0.01
        for number, (state, times) in enumerate(
            ((ordered, (early, late)), (crossed, (late, early)))
        ):
            granted[number] += sum(state.try_acquire(now) == 0.0 for now in times)

    assert granted[1] <= granted[0] + 1


@any_limit
def test_a_standing_clock_gives_no_second_helping(make: Callable[[], State]) -> None:
    """However often it is asked at one moment, a limit gives what it holds."""
    state = make()
    _drain(state, 42.0)

    assert all(state.try_acquire(42.0) > 0 for _ in range(1000))


# --- token bucket ------------------------------------------------------------------------------


class _BucketModel:
    """The level of the bucket, in exact arithmetic."""

    def __init__(self, capacity: float, rate: float) -> None:
        self.capacity = Fraction(capacity)
        self.rate = Fraction(rate)
        self.level = self.capacity
        self.last: Fraction | None = None

    def try_acquire(self, now: float) -> float:
        time = Fraction(now)
        if self.last is not None:
            self.level = min(self.capacity, self.level + (time - self.last) * self.rate)
        self.last = time
        if self.level >= 1:
            self.level -= 1
            return 0.0
        return float((1 - self.level) / self.rate)


@given(
    steps=_GRID_STEPS,
    capacity=st.sampled_from([1, 1.5, 2, 3, 10]),
    rate=st.sampled_from([0.125, 1.0, 2.0, 16.0]),
    start=st.sampled_from([0.0, -64.0, 1e6]),
)
def test_bucket_equals_its_exact_level(
    steps: list[int], capacity: float, rate: float, start: float
) -> None:
    """Grants and waits are those of a bucket whose level is followed without rounding."""
    state, model, now = TokenBucketState(capacity, rate), _BucketModel(capacity, rate), start
    for step in steps:
        now += step * _TICK
        assert state.try_acquire(now) == model.try_acquire(now)


@given(
    steps=st.lists(st.floats(0, 1), min_size=1, max_size=150),
    capacity=st.integers(1, 10),
    rate=st.floats(0.1, 50),
)
def test_bucket_grants_no_more_than_capacity_and_refill(
    steps: list[float], capacity: int, rate: float
) -> None:
    """In any time t at most capacity + rate·t permits."""
    state, now = TokenBucketState(capacity, rate), 0.0
    grants: list[float] = []
    for step in steps:
        now += step
        if state.try_acquire(now) == 0.0:
            grants.append(now)

    for first in range(len(grants)):
        for last in range(first, len(grants)):
            elapsed = grants[last] - grants[first]
            assert last - first + 1 <= capacity + rate * elapsed + 1e-9


@pytest.mark.parametrize("start", [0.0, 1000.0])
def test_a_thousand_milliseconds_refill_one_permit(start: float) -> None:
    """RL-07: small steps neither round the refill away nor add to it."""
    state, now, passed = TokenBucketState(1, 1.0), start, 0
    assert state.try_acquire(now) == 0.0
    for step in range(1, 100_001):
        now += 0.001
        granted = state.try_acquire(now) == 0.0
        assert not (granted and step < 1000)
        passed += granted

    assert 99 <= passed <= 100


def test_bucket_refills_evenly_and_overflows() -> None:
    """Half a second at 10 per second is five permits; a day is no more than the capacity."""
    state = TokenBucketState(10, 10.0)
    assert _drain(state, 0.0) == 10
    assert _drain(state, 0.5) == 5
    assert state.try_acquire(0.5) == pytest.approx(0.1)
    assert _drain(state, 86_400.0) == 10


def test_bucket_counts_the_part_already_refilled() -> None:
    """A refusal late in the refill is told the rest of it, not the whole."""
    state = TokenBucketState(1, 0.1)
    state.try_acquire(0.0)

    assert state.try_acquire(7.0) == pytest.approx(3.0)
    assert state.wait_for(7.0, 3) == pytest.approx(23.0)


# --- fixed window ------------------------------------------------------------------------------


def test_fixed_window_starts_with_its_first_permit() -> None:
    """The window isn't aligned to the clock: it opens with a grant and ends its length later."""
    state = FixedWindowState(2, 10.0)
    assert _drain(state, 7.0) == 2
    assert state.try_acquire(9.0) == 8.0
    assert state.try_acquire(16.999) > 0
    assert _drain(state, 17.0) == 2


def test_fixed_window_gives_up_to_twice_around_an_edge() -> None:
    """What its documentation admits: the end of one window and the start of the next."""
    state = FixedWindowState(3, 10.0)
    state.try_acquire(0.0)

    assert _drain(state, 9.9) + _drain(state, 10.0) == 5


@given(steps=_GRID_STEPS, permits=st.integers(1, 5), window=st.sampled_from([0.25, 1.0, 3.0]))
def test_fixed_window_equals_its_rule(steps: list[int], permits: int, window: float) -> None:
    """Grants and waits are those of the rule, each window found anew among all grants."""
    state, now = FixedWindowState(permits, window), 0.0
    windows: list[list[float]] = []
    for step in steps:
        now += step * _TICK
        if not windows or now >= windows[-1][0] + window:
            windows.append([])
        expected = 0.0 if len(windows[-1]) < permits else windows[-1][0] + window - now
        assert state.try_acquire(now) == expected
        if expected == 0.0:
            windows[-1].append(now)


def test_an_infinite_window_is_never_renewed() -> None:
    """Permits that never come back have no end to wait for."""
    for state in (FixedWindowState(2, math.inf), SlidingWindowState(2, math.inf, 10)):
        assert _drain(state, 0.0) == 2
        assert state.try_acquire(1e9) == math.inf
        assert state.wait_for(1e9, 7) == math.inf


# --- sliding window ----------------------------------------------------------------------------


@given(
    steps=st.lists(st.floats(0, 1), min_size=1, max_size=200),
    permits=st.integers(1, 30),
    segments=st.integers(1, 12),
    window=st.sampled_from([0.1, 0.3, 1.0, 3.0]),
    start=st.sampled_from([0.0, -5.5, 12345.678, 1e9]),
    patient=st.booleans(),
)
def test_sliding_window_holds_in_any_stretch(
    *,
    steps: list[float],
    permits: int,
    segments: int,
    window: float,
    start: float,
    patient: bool,
) -> None:
    """No stretch of one window holds too many grants; a refusal has as many not long ago."""
    state, now = SlidingWindowState(permits, window, segments), start
    grants: list[float] = []
    for step in steps:
        now += step * window / permits
        wait = state.try_acquire(now)
        if wait:
            # Refused for a reason: as many permits were taken in the window and a segment.
            assert len(grants) >= permits
            assert now - grants[-permits] <= window * (1 + 1 / segments) + 1e-6
            if patient:
                now += wait
                assert state.try_acquire(now) == 0.0
        if not wait or patient:
            grants.append(now)
        assert len(state._segments.row) <= segments + 1

    for earlier, later in zip(grants, grants[permits:], strict=False):
        assert later - earlier >= window
        assert later >= earlier + window


@given(
    steps=_GRID_STEPS,
    permits=st.integers(1, 6),
    segments=st.integers(5, 10),
    window=st.sampled_from([0.25, 1.0, 3.0]),
)
def test_few_permits_come_back_on_time(
    steps: list[int], permits: int, segments: int, window: float
) -> None:
    """With no more permits than counters the limit equals a log of all grants."""
    state, now = SlidingWindowState(permits, window, segments), 0.0
    grants: list[float] = []
    for step in steps:
        now += step * _TICK
        full = len(grants) >= permits and now < grants[-permits] + window
        expected = grants[-permits] + window - now if full else 0.0
        assert state.try_acquire(now) == expected
        if not full:
            grants.append(now)


@given(
    steps=_GRID_STEPS,
    permits=st.integers(1, 40),
    segments=st.integers(1, 6),
    wanted=st.integers(1, 600),
)
def test_long_queues_are_foreseen_exactly(
    steps: list[int], permits: int, segments: int, wanted: int
) -> None:
    """Rounds that are skipped because they repeat do repeat."""
    state, now = SlidingWindowState(permits, 1.0, segments), 0.0
    for step in steps:
        now += step * _TICK / 4
        state.try_acquire(now)

    forecast = state.wait_for(now, wanted)

    assert _queue(state, now, wanted) == pytest.approx(now + forecast, abs=1e-9)


def test_a_queue_that_merges_segments_for_rounds_is_foreseen() -> None:
    """Segments that lie close merge one round after another, and each time permits come later."""
    state, now = SlidingWindowState(15, 1.0, 5), 0.0
    for step in [2, 2, 5, 3, 5, 3, 5, 1, 2, 6, 2, 2, 7, 8, 7, 8, 1, 8, 7, 5, 5, 6, 6, 4, 5, 2]:
        now += step * _TICK
        state.try_acquire(now)

    forecast = state.wait_for(now, 94)

    assert _queue(state, now, 94) == now + forecast


def test_sliding_window_bounds_its_memory() -> None:
    """A million permits a window need no more counters than eleven."""
    state = SlidingWindowState(1_000_000, 1.0, 10)
    for tick in range(20_000):
        state.try_acquire(tick * 0.0003)
        assert len(state._segments.row) <= 11
