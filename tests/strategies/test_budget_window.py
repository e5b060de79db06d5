"""The window of a retry budget, by itself: the formula, the slices, and what is given back."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from resilience_pipeline.strategies._budget_window import BudgetWindow, as_written


def window_of(
    ratio: float = 0.1, min_per_second: float = 0, window: float = 10, *, firsts: int = 0
) -> BudgetWindow:
    """A window that has seen so many firsts at 0."""
    made = BudgetWindow(ratio, min_per_second, window)
    for _ in range(firsts):
        made.first(0)
    return made


def granted(window: BudgetWindow, now: float, at_most: int = 100_000) -> int:
    """How many extras are granted until one is refused."""
    return next((n for n in range(at_most) if window.spend(now) is None), at_most)


# ---- the vectors ----------------------------------------------------------------------------------


def test_a_tenth_of_a_hundred_firsts_is_ten() -> None:
    """Ratio 0.1, no floor, 100 firsts: 10 granted, the 11th refused; none a window later."""
    window = window_of(firsts=100)
    assert granted(window, 0) == 10
    assert granted(window, 9.99) == 0
    window.first(10)
    assert granted(window, 10) == 0


def test_the_floor_is_ten_in_ten_seconds() -> None:
    """Ratio 0, floor 1 a second: 10 at once, and the next 10 a window later."""
    window = window_of(0, 1)
    assert granted(window, 0) == 10
    assert granted(window, 9.99) == 0
    assert granted(window, 10) == 10


def test_the_floor_holds_in_any_ten_seconds() -> None:
    """One early and nine late in a slice: the nine are not forgotten with the one."""
    window = window_of(0, 1)
    assert window.spend(0) is not None
    assert granted(window, 0.9) == 9
    assert granted(window, 10) == 0
    assert granted(window, 10.9) == 10


def test_extras_come_back_slice_by_slice() -> None:
    """One a second for ten seconds: from then on one a second."""
    window = window_of(0, 1)
    assert [granted(window, now, at_most=1) for now in range(30)] == [1] * 30


@pytest.mark.parametrize("tenths", range(1, 30))
@pytest.mark.parametrize("firsts", [1, 3, 7, 10, 11, 29, 30, 99, 100, 110])
def test_ratios_are_exact(tenths: int, firsts: int) -> None:
    """0.3 means three tenths: no float makes one more or one less of it."""
    window = window_of(tenths / 10, firsts=firsts)
    assert granted(window, 0) == tenths * firsts // 10


@pytest.mark.parametrize("hundredths", [1, 7, 14, 28, 29, 56, 57, 58, 99])
def test_hundredths_are_exact(hundredths: int) -> None:
    """0.29 * 100 is 28.999999999999996 as floats are; it grants 29."""
    assert granted(window_of(hundredths / 100, firsts=100), 0) == hundredths


@pytest.mark.parametrize(
    ("ratio", "floor", "seconds", "firsts", "extras"),
    [
        (0.1, 0.7, 10, 0, 7),
        (0.1, 0.7, 10, 30, 10),
        (0.3, 0.1, 0.7, 3, 0),
        (0.3, 0.1, 1, 3, 1),
        (0, 0, 10, 1000, 0),
        (2, 0, 10, 3, 6),
        (1e-3, 0, 10, 1999, 1),
        (1e-3, 0, 10, 2000, 2),
    ],
)
def test_ratio_and_floor_are_added_before_they_are_compared(
    ratio: float, floor: float, seconds: float, firsts: int, extras: int
) -> None:
    """`extras + 1 <= ratio * firsts + min_per_second * window`: halves of both make a whole."""
    assert granted(window_of(ratio, floor, seconds, firsts=firsts), 0) == extras


def test_firsts_are_not_owed_for_longer_than_the_window() -> None:
    """A slice of firsts is dropped a window after it started."""
    window = window_of(firsts=50)
    for _ in range(50):
        window.first(0.5)
    assert granted(window, 9.99, at_most=1) == 1
    assert granted(window, 10) == 0


def test_a_huge_floor_grants_everything() -> None:
    """No amount overflows."""
    assert granted(window_of(0, 1e300), 0, at_most=50) == 50
    assert granted(window_of(1e-300, firsts=5), 0) == 0


@given(st.floats(0, allow_nan=False, allow_infinity=False))
def test_numbers_are_read_as_they_are_written(number: float) -> None:
    """A float is what its shortest digits say."""
    assert Fraction(*as_written(number)) == Fraction(Decimal(repr(number)))


@given(st.integers(0))
def test_whole_numbers_are_themselves(number: int) -> None:
    """However large they are."""
    assert as_written(number) == (number, 1)


# ---- giving back ----------------------------------------------------------------------------------


def test_what_is_given_back_can_be_had_again() -> None:
    """One of ten given back makes room for one."""
    window = window_of(firsts=100)
    charges = [window.spend(0) for _ in range(10)]
    assert charges[3] is not None
    window.give_back(charges[3])
    assert granted(window, 5) == 1


def test_it_is_given_back_to_the_slice_it_was_charged_to() -> None:
    """Given back late, it is not taken from what was charged since."""
    window = window_of(0, 0.2)
    old, new = window.spend(0), window.spend(5)
    assert old is not None
    assert new is not None
    assert window.spend(6) is None
    window.give_back(old)
    assert granted(window, 6) == 1
    assert granted(window, 14.9) == 0
    assert granted(window, 15) == 1


def test_what_has_left_the_window_is_not_given_back_twice() -> None:
    """After a window it has come back by itself."""
    window = window_of(0, 0.1)
    charge = window.spend(0)
    assert charge is not None
    assert granted(window, 10) == 1
    window.give_back(charge)
    assert granted(window, 10) == 0


def test_it_is_empty_when_nothing_is_counted() -> None:
    """Forgetting the window could then change no answer."""
    window = window_of(firsts=1)
    assert not window.is_empty(9.99)
    assert window.is_empty(10)
    assert window_of().is_empty(0)


# ---- against models -------------------------------------------------------------------------------


class BruteForce:
    """The same rules over plain lists: every event with the slice it falls into."""

    def __init__(self, ratio: Fraction, floor: Fraction, window: float) -> None:
        self._ratio, self._floor, self._window = ratio, floor, window
        self.firsts: list[tuple[float, float]] = []
        #: Slice, time, and whether it was given back.
        self.extras: list[list[Any]] = []

    def first(self, now: float) -> None:
        kept = [each for each in self.firsts if now - each[0] < self._window]
        self.firsts.append((self._slice(kept, now), now))

    def spend(self, now: float) -> list[Any] | None:
        firsts = sum(now - start < self._window for start, _ in self.firsts)
        counted = self._counted(now)
        extras = sum(not given_back for *_, given_back in counted)
        allowed = self._ratio * firsts + self._floor * Fraction(Decimal(repr(self._window)))
        if extras + 1 > allowed:
            return None
        charge = [self._slice(counted, now), now, False]
        self.extras.append(charge)
        return charge

    def _counted(self, now: float) -> list[list[Any]]:
        latest: dict[float, float] = {}
        for start, time, _ in self.extras:
            latest[start] = max(latest.get(start, time), time)
        return [each for each in self.extras if now - latest[each[0]] < self._window]

    def _slice(self, counted: list[Any], now: float) -> float:
        newest: float = max((start for start, *_ in counted), default=-1e9)
        return newest if now < newest + self._window / 10 else now


STEPS = st.one_of(
    st.just(0.0), st.sampled_from([0.25, 0.5, 1.0, 2.5, 9.0, 10.0, 11.0]), st.floats(0, 12)
)
ACTIONS = st.lists(st.tuples(STEPS, st.sampled_from(["first", "spend", "give back"])), max_size=120)
TENTHS = st.integers(0, 30)


@given(actions=ACTIONS, ratio=TENTHS, floor=TENTHS)
def test_it_counts_as_brute_force_does(
    actions: list[tuple[float, str]], ratio: int, floor: int
) -> None:
    """Firsts, extras and what is given back, in any order and at any times."""
    window = BudgetWindow(ratio / 10, floor / 10, 10.0)
    model = BruteForce(Fraction(ratio, 10), Fraction(floor, 10), 10.0)
    now, charges = 0.0, list[tuple[Any, list[Any]]]()
    for step, action in actions:
        now += step
        if action == "first":
            window.first(now)
            model.first(now)
        elif action == "spend":
            charge, expected = window.spend(now), model.spend(now)
            assert (charge is None) == (expected is None)
            if charge is not None and expected is not None:
                charges.append((charge, expected))
        elif charges:
            charge, expected = charges.pop(0)
            window.give_back(charge)
            expected[2] = True


@given(actions=ACTIONS, ratio=TENTHS, floor=TENTHS)
def test_slices_cost_a_tenth_of_the_window_at_most(
    actions: list[tuple[float, str]], ratio: int, floor: int
) -> None:
    """What is granted is within the formula of the last window exactly; what is refused exceeds it, or would
    with the extras of a slice more and the firsts of a slice less.
    """
    window = BudgetWindow(ratio / 10, floor / 10, 10.0)
    now, firsts, extras = 0.0, list[float](), list[float]()

    def within(seconds: float, times: list[float]) -> int:
        return sum(now - time < seconds for time in times)

    for step, action in actions:
        now += step
        if action == "first":
            window.first(now)
            firsts.append(now)
        elif window.spend(now) is not None:
            assert 10 * (within(10, extras) + 1) <= ratio * within(10, firsts) + floor * 10
            extras.append(now)
        else:
            assert 10 * (within(11.001, extras) + 1) > ratio * within(8.999, firsts) + floor * 10


class Bounds(RuleBasedStateMachine):
    """Whatever happens: the sums are those of the slices, and there are never many of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1e6
        self.window = BudgetWindow(0.5, 1, 10.0)
        self.charges: list[Any] = []

    @rule(step=STEPS)
    def wait(self, step: float) -> None:
        self.now += step

    @rule(times=st.integers(1, 20))
    def first(self, times: int) -> None:
        for _ in range(times):
            self.window.first(self.now)

    @rule()
    def spend(self) -> None:
        charge = self.window.spend(self.now)
        if charge is not None:
            self.charges.append(charge)

    @rule(number=st.integers(0, 1000))
    def give_back(self, number: int) -> None:
        if self.charges:
            self.window.give_back(self.charges.pop(number % len(self.charges)))

    @invariant()
    def sums_are_right(self) -> None:
        for slices, total in (
            (self.window._first_slices, self.window._firsts),
            (self.window._extra_slices, self.window._extras),
        ):
            assert sum(each.count for each in slices) == total
            assert all(each.count >= 0 for each in slices)
            assert len(slices) <= 13


TestBounds = Bounds.TestCase


@pytest.mark.parametrize("window", [1e-9, 1e-3, 10.0, 1e9])
@pytest.mark.parametrize("start", [0.0, 1e6, 1e15])
def test_memory_is_bounded_whatever_the_clock_reads(window: float, start: float) -> None:
    """Also where a slice is shorter than the clock's own step."""
    counted = BudgetWindow(1, 0, window)
    for number in range(2000):
        now = start + number * window / 100
        counted.first(now)
        counted.spend(now)
    assert len(counted._first_slices) <= 13
    assert len(counted._extra_slices) <= 13
