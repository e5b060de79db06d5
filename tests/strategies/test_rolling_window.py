"""The rolling counts behind a circuit breaker's decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline.strategies._rolling_window import RollingWindow


@dataclass
class _Model:
    """The rule word for word: every slice with every event, searched through at each question."""

    duration: float
    slices: int
    kept: list[tuple[float, list[bool]]] = field(default_factory=list)

    def record(self, now: float, *, failed: bool) -> None:
        if not self.kept or now >= self.kept[-1][0] + self.duration / self.slices:
            self.kept.append((now, []))
        self.kept[-1][1].append(failed)

    def counts(self, now: float) -> tuple[int, int]:
        events = [
            event for start, events in self.kept if now - start < self.duration for event in events
        ]
        return len(events), sum(events)


def _kept_slices(window: RollingWindow) -> int:
    return len(window._past) + 1


def test_an_empty_window_counts_nothing() -> None:
    """Nothing has happened before anything happens, at whatever time one asks."""
    window = RollingWindow(10.0)

    assert window.counts(-5.0) == (0, 0)
    assert window.counts(1e9) == (0, 0)


@pytest.mark.parametrize("ask_before_events", [False, True], ids=["quiet", "asked"])
def test_slices_leave_the_window_one_by_one(*, ask_before_events: bool) -> None:
    """CB-19: every 2 s one call (two failures, then successes) and a success, ten slices of 1 s."""
    window = RollingWindow(10.0)
    now = 0.0
    seen = []
    for step in range(5):
        if ask_before_events:
            window.counts(now)
        if step < 2:
            window.record_failure(now)
        else:
            window.record_success(now)
        window.record_success(now)
        now += 2.0
        seen.append(window.counts(now))

    assert seen == [(2, 1), (4, 2), (6, 2), (8, 2), (8, 1)]
    assert window.counts(now + 2.0) == (6, 0)


def test_events_are_dropped_after_one_window() -> None:
    """CB-20: ten successes a second apart; at 10 s nine are left, at 11 s eight."""
    window = RollingWindow(10.0)
    for now in range(10):
        window.record_success(float(now))

    assert window.counts(10.0) == (9, 0)
    assert window.counts(11.0) == (8, 0)


@pytest.mark.parametrize("later", [0.0, 0.001])
def test_window_is_empty_after_its_length(later: float) -> None:
    """CB-21: exactly one window after the last event, and a millisecond more, nothing counts."""
    window = RollingWindow(10.0)
    window.record_success(0.0)
    window.record_success(0.0)

    assert window.counts(10.0 + later) == (0, 0)


def test_failures_are_counted_among_the_throughput() -> None:
    """CB-22: one failure and four successes are a throughput of five."""
    window = RollingWindow(10.0)
    window.record_failure(0.0)
    for _ in range(4):
        window.record_success(0.0)

    assert window.counts(0.0) == (5, 1)


def test_a_slice_starts_with_an_event_and_not_with_a_question() -> None:
    """Reading the metrics doesn't move the slices: 0.9 s after a question an event still lasts."""
    window = RollingWindow(10.0)
    window.counts(0.0)
    window.record_success(0.9)

    assert window.counts(10.5) == (1, 0)
    assert window.counts(10.9) == (0, 0)


def test_events_of_one_slice_leave_together() -> None:
    """An event late in a slice is dropped with the slice's first."""
    window = RollingWindow(10.0)
    window.record_failure(0.0)
    window.record_failure(0.9)

    assert window.counts(9.9) == (2, 2)
    assert window.counts(10.0) == (0, 0)


def test_reset_forgets_everything() -> None:
    """After a reset the window is as new, also for what comes next at the same moment."""
    window = RollingWindow(10.0)
    for now in range(5):
        window.record_failure(float(now))
    window.reset()

    assert window.counts(4.0) == (0, 0)
    window.record_success(4.0)
    assert window.counts(4.0) == (1, 0)
    assert window.counts(14.0) == (0, 0)


def test_an_infinite_window_never_forgets() -> None:
    """A window for ever keeps all counts in a single slice."""
    window = RollingWindow(math.inf)
    for now in (0.0, 1e3, 1e9):
        window.record_failure(now)

    assert window.counts(1e12) == (3, 3)
    assert _kept_slices(window) == 1


def test_a_single_slice_forgets_all_at_once() -> None:
    """With one slice the counts start over after each window."""
    window = RollingWindow(10.0, slices=1)
    window.record_failure(0.0)
    window.record_failure(9.0)
    window.record_failure(10.0)

    assert window.counts(10.0) == (1, 1)


@pytest.mark.parametrize("asked", [False, True], ids=["event first", "question first"])
@pytest.mark.parametrize("failed", [False, True], ids=["success", "failure"])
def test_a_clock_set_back_keeps_the_counts_and_their_age(*, asked: bool, failed: bool) -> None:
    """After a step back nothing is lost or doubled, and everything still leaves in time."""
    window = RollingWindow(10.0)
    window.record_failure(1000.0)
    window.record_failure(1005.0)
    if asked:
        assert window.counts(5.0) == (2, 2)
    if failed:
        window.record_failure(5.0)
    else:
        window.record_success(5.0)

    assert window.counts(9.9) == (3, 2 + failed)
    assert window.counts(10.0) == (
        2,
        1 + failed,
    )  # the first was 5 s old when the clock was set back
    assert window.counts(15.0) == (0, 0)


def test_memory_is_bounded_where_slices_are_shorter_than_the_clocks_step() -> None:
    """Late on a large clock many events of one moment share a slice."""
    window = RollingWindow(1e-9)
    for _ in range(1000):
        window.record_success(1e9)

    assert _kept_slices(window) == 1
    assert window.counts(1e9) == (1000, 0)
    assert window.counts(math.nextafter(1e9, math.inf)) == (0, 0)


_EVENTS = st.lists(
    st.tuples(
        # Steps that hit edges exactly, and steps that hit nothing.
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5, 5.0, 20.0]) | st.floats(0, 12),
        st.sampled_from(["success", "failure", "question"]),
    ),
    max_size=80,
)


@given(
    events=_EVENTS,
    slices=st.integers(1, 12),
    duration=st.sampled_from([1.0, 5.0, 10.0, 0.3]),
    start=st.sampled_from([0.0, -100.0, 12345.678, 1e9]),
)
def test_counts_equal_those_of_the_rule(
    events: list[tuple[float, str]], slices: int, duration: float, start: float
) -> None:
    """Running totals agree with counting every event anew, and the number of slices is bounded."""
    window = RollingWindow(duration, slices)
    model = _Model(duration, slices)
    now = start
    for step, kind in events:
        now += step
        if kind == "success":
            window.record_success(now)
            model.record(now, failed=False)
        elif kind == "failure":
            window.record_failure(now)
            model.record(now, failed=True)
        if kind == "question" or step > 1:
            assert window.counts(now) == model.counts(now)
        assert _kept_slices(window) <= slices + 1
    assert window.counts(now) == model.counts(now)


@given(
    readings=st.lists(st.tuples(st.floats(-1e6, 1e6), st.booleans()), max_size=60),
    slices=st.integers(1, 12),
)
def test_a_wild_clock_never_multiplies_counts(
    readings: list[tuple[float, bool]], slices: int
) -> None:
    """Whatever the clock does, a record adds one at most, and nothing goes while time runs back."""
    window = RollingWindow(10.0, slices)
    previous = -math.inf
    throughput = 0
    for now, failed in readings:
        before = window.counts(now)
        assert before[0] <= throughput
        if now < previous:
            assert before[0] == throughput
        if failed:
            window.record_failure(now)
        else:
            window.record_success(now)
        after = window.counts(now)
        assert after == (before[0] + 1, before[1] + failed)
        assert 0 <= after[1] <= after[0]
        assert _kept_slices(window) <= slices + 1
        previous, throughput = now, after[0]
