"""Delay formulas, jitter and cap."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Literal, TypeAlias, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline.strategies._backoff import Backoff, BackoffType

Jitter: TypeAlias = bool | Literal["full"]

TYPES: list[BackoffType] = ["constant", "linear", "exponential"]
JITTERS: list[Jitter] = [False, True, "full"]
DAY = 86_400.0


def _draws(*values: float) -> Callable[[], float]:
    """A source of randomness that gives these values and then fails."""
    return iter(values).__next__


def _no_draw() -> float:
    pytest.fail("a draw was made")


def _delays(
    attempts: Iterable[int],
    delay: float,
    backoff_type: BackoffType,
    *,
    jitter: Jitter = False,
    max_delay: float | None = None,
    draw: Callable[[], float] = _no_draw,
) -> list[float]:
    backoff = Backoff(delay, backoff_type, jitter, max_delay, draw)
    return [backoff.delay_for(attempt) for attempt in attempts]


@pytest.mark.parametrize(
    ("backoff_type", "expected"),
    [
        pytest.param("constant", [1.0, 1.0, 1.0], id="RT-01"),
        pytest.param("linear", [1.0, 2.0, 3.0], id="RT-02"),
        pytest.param("exponential", [1.0, 2.0, 4.0], id="RT-03"),
    ],
)
def test_delays_grow_by_their_formula(backoff_type: BackoffType, expected: list[float]) -> None:
    """Without jitter a delay is d, (a+1)·d or 2^a·d, and nothing is drawn."""
    assert _delays(range(3), 1.0, backoff_type) == expected


@pytest.mark.parametrize("backoff_type", TYPES)
@pytest.mark.parametrize("jitter", JITTERS)
def test_no_base_delay_is_no_delay(backoff_type: BackoffType, jitter: Jitter) -> None:
    """RT-04: base 0 waits 0 whatever the type, and draws nothing."""
    assert _delays([0, 1, 2, 10**6], 0.0, backoff_type, jitter=jitter) == [0.0] * 4


@pytest.mark.parametrize(("draw", "expected"), [(0.0, 0.75), (0.4, 0.95), (0.6, 1.05), (1.0, 1.25)])
def test_constant_delay_is_spread_by_a_quarter(draw: float, expected: float) -> None:
    """RT-05: constant 1 s with jitter."""
    assert _delays([0], 1.0, "constant", jitter=True, draw=_draws(draw)) == [
        pytest.approx(expected)
    ]


@pytest.mark.parametrize(
    ("draw", "expected"), [(0.0, 2.25), (0.4, 2.85), (0.5, 3.0), (0.6, 3.15), (1.0, 3.75)]
)
def test_linear_delay_is_spread_by_a_quarter(draw: float, expected: float) -> None:
    """RT-06: linear 1 s with jitter, attempt 2."""
    assert _delays([2], 1.0, "linear", jitter=True, draw=_draws(draw)) == [pytest.approx(expected)]


@given(
    delay=st.floats(1e-9, 1e9),
    attempt=st.integers(0, 10_000),
    draw=st.floats(0, 1, exclude_max=True),
    backoff_type=st.sampled_from(["constant", "linear"]),
)
def test_spread_stays_within_a_quarter(
    delay: float, attempt: int, draw: float, backoff_type: BackoffType
) -> None:
    """RT-07: no draw moves a constant or linear delay by more than a quarter."""
    [plain] = _delays([attempt], delay, backoff_type)
    [spread] = _delays([attempt], delay, backoff_type, jitter=True, draw=_draws(draw))

    assert 0.75 * plain * (1 - 1e-12) <= spread <= 1.25 * plain * (1 + 1e-12)


@given(
    delay=st.floats(0, 1e9),
    attempt=st.integers(0, 900),
    draw=st.floats(0, 1, exclude_max=True),
    max_delay=st.none() | st.floats(0, 1e9),
)
def test_decorrelated_delay_has_a_bound(
    delay: float, attempt: int, draw: float, max_delay: float | None
) -> None:
    """RT-08: from fresh state a decorrelated delay lies in [0, 4·d·2^a) and under the cap."""
    [result] = _delays(
        [attempt], delay, "exponential", jitter=True, max_delay=max_delay, draw=_draws(draw)
    )

    assert 0 <= result <= 4 * delay * 2.0**attempt
    assert result <= (math.inf if max_delay is None else max_delay)


REFERENCE_SERIES: list[tuple[list[float], list[float]]] = [
    ([0.5] * 6, [0.8974049, 1.0930035, 2.0357480, 4.0459794, 8.0836316, 16.1636628]),
    ([0.25] * 6, [0.6469237, 1.0135700, 1.7204383, 3.4045099, 6.7983700, 13.5923780]),
    ([0.0] * 6, [0.0, 1.3771823, 1.4600673, 2.8658499, 5.7178069, 11.4302724]),
    (
        [0.1, 0.9, 0.3, 0.7, 0.5, 0.2],
        [0.4285109, 2.2158896, 0.8568731, 5.7731584, 6.8813355, 10.0944559],
    ),
]


@pytest.mark.parametrize(
    ("draws", "expected"), REFERENCE_SERIES, ids=["halves", "quarters", "zeros", "mixed"]
)
def test_decorrelated_delays_follow_the_reference(
    draws: list[float], expected: list[float]
) -> None:
    """RT-09: the same draws give the series of the reference."""
    series = _delays(range(6), 1.0, "exponential", jitter=True, draw=_draws(*draws))

    assert series == pytest.approx(expected, abs=1e-6)


def test_each_execution_starts_its_own_series() -> None:
    """What one execution has waited says nothing to the next."""
    first, second = (
        _delays(range(6), 1.0, "exponential", jitter=True, draw=_draws(*[0.5] * 6))
        for _ in range(2)
    )

    assert first == second


def test_random_sources_give_different_series() -> None:
    """RT-10: two independent sources spread two clients."""
    series = [
        _delays(range(100), 1.0, "exponential", jitter=True, draw=random.Random(seed).random)
        for seed in (1, 2)
    ]

    assert series[0] != series[1]


@pytest.mark.parametrize("backoff_type", TYPES)
@pytest.mark.parametrize("jitter", [False, True])
def test_cap_is_exact(backoff_type: BackoffType, *, jitter: bool) -> None:
    """RT-11: a delay beyond the maximum is the maximum exactly."""
    assert _delays([2], 10.0, backoff_type, jitter=jitter, max_delay=1.0, draw=lambda: 0.5) == [1.0]


@pytest.mark.parametrize(
    ("backoff_type", "expected"), [("constant", 1.0), ("linear", 3.0), ("exponential", 4.0)]
)
def test_cap_beyond_the_delay_changes_nothing(backoff_type: BackoffType, expected: float) -> None:
    """RT-12: a maximum larger than the computed delay isn't used."""
    assert _delays([2], 1.0, backoff_type, max_delay=60.0) == [expected]


@pytest.mark.parametrize("kind", TYPES)
def test_jitter_never_exceeds_the_cap(kind: BackoffType) -> None:
    """The cap holds for the wait itself: a delay at the cap isn't spread beyond it."""
    jitters: list[Jitter] = [True, "full"]
    for jitter in jitters:
        draw = random.Random(7).random
        delays = _delays(range(1000), 10.0, kind, jitter=jitter, max_delay=10.0, draw=draw)
        assert all(0 <= delay <= 10.0 for delay in delays)


def test_capped_delays_leave_the_series_alone() -> None:
    """The cap shortens waits, not the curve that later waits come from."""
    draws = [0.1, 0.9, 0.3, 0.7, 0.5, 0.2]
    free = _delays(range(6), 1.0, "exponential", jitter=True, draw=_draws(*draws))
    capped = _delays(range(6), 1.0, "exponential", jitter=True, max_delay=1.5, draw=_draws(*draws))

    assert capped == [min(delay, 1.5) for delay in free]


@pytest.mark.parametrize(
    ("max_delay", "expected"),
    [
        pytest.param(None, math.inf, id="RT-13"),
        pytest.param(2 * DAY, 2 * DAY, id="RT-14"),
    ],
)
def test_overflow_waits_as_long_as_allowed(max_delay: float | None, expected: float) -> None:
    """A delay no float can hold is the maximum, or for ever where there is none."""
    attempts = [1000, 1023, 1024, 1025, 5_000, 10**6]
    assert _delays(attempts[1:], DAY, "exponential", max_delay=max_delay) == [expected] * 5
    [at_1000] = _delays([1000], DAY, "exponential", max_delay=max_delay)
    # Polly's longest duration is short of this; a float still holds it, and it outlasts the sun.
    assert at_1000 == min(expected, math.ldexp(DAY, 1000))


@pytest.mark.parametrize("attempt", [100, 1000, 1023, 1024, 1025, 10**6, 10**400])
@pytest.mark.parametrize("max_delay", [None, 30.0])
def test_decorrelated_delay_survives_large_attempts(attempt: int, max_delay: float | None) -> None:
    """RT-15: however late the attempt, delays stay above 0 and under the cap, also twice over."""
    delays = _delays(
        [attempt, attempt],
        2.0,
        "exponential",
        jitter=True,
        max_delay=max_delay,
        draw=_draws(0.3, 0.8),
    )

    assert all(0 < delay <= (max_delay or math.inf) for delay in delays)


def test_decorrelated_delays_stay_above_zero_for_thousands_of_attempts() -> None:
    """RT-16: 2049 failures in a row, each waited for, none longer than the cap."""
    draw = random.Random(2163).random
    delays = _delays(range(2049), 2.0, "exponential", jitter=True, max_delay=30.0, draw=draw)

    assert all(0 < delay <= 30.0 for delay in delays)


def test_decorrelated_delay_survives_a_draw_that_rounds_up() -> None:
    """Attempt 1023 and the highest draw add up to 1024, a power no float holds."""
    draw = _draws(math.nextafter(1.0, 0.0))
    assert _delays([1023], 1.0, "exponential", jitter=True, draw=draw) == [math.inf]


def test_decorrelated_delay_of_for_ever_is_for_ever() -> None:
    """An infinite base isn't shortened by the lowest draw, whose step is 0."""
    assert _delays([0], math.inf, "exponential", jitter=True, draw=_draws(0.0)) == [math.inf]


def test_unknown_type_is_refused() -> None:
    """RT-17: an unknown back-off type is an error that lists the known ones."""
    with pytest.raises(ValueError, match=r"'constant', 'linear', 'exponential'.*'quadratic'"):
        Backoff(1.0, cast("BackoffType", "quadratic"), False, None, _no_draw)


@pytest.mark.parametrize(
    ("max_delay", "expected"), [(None, [0.25, 0.5, 1.0, 2.0]), (3.0, [0.25, 0.5, 0.75, 0.75])]
)
def test_full_jitter_draws_below_the_capped_delay(
    max_delay: float | None, expected: list[float]
) -> None:
    """Full jitter spreads clients at the cap too: u times the smaller of delay and cap."""
    delays = _delays(
        range(4), 1.0, "exponential", jitter="full", max_delay=max_delay, draw=lambda: 0.25
    )

    assert delays == expected


@pytest.mark.parametrize("jitter", [True, "full"])
@pytest.mark.parametrize("backoff_type", TYPES)
def test_one_draw_a_delay(jitter: Jitter, backoff_type: BackoffType) -> None:
    """Each delay uses one draw, overflow or not, so that a seed reproduces the whole series."""
    draws = iter([0.5] * 5)
    _delays([0, 1, 1024, 10**6], 1.0, backoff_type, jitter=jitter, draw=draws.__next__)

    assert list(draws) == [0.5]


@given(
    delay=st.floats(0, math.inf),
    backoff_type=st.sampled_from(TYPES),
    jitter=st.sampled_from(JITTERS),
    max_delay=st.none() | st.floats(0, math.inf),
    attempts=st.lists(
        st.integers(0, 10) | st.integers(1000, 1100) | st.integers(0, 10**6) | st.just(10**400),
        max_size=6,
    ),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=6, max_size=6),
)
def test_delays_are_sound_at_any_numbers(
    *,
    delay: float,
    backoff_type: BackoffType,
    jitter: Jitter,
    max_delay: float | None,
    attempts: list[int],
    draws: list[float],
) -> None:
    """Never NaN, never negative, never above the cap, never an error; also out of order."""
    cap = math.inf if max_delay is None else max_delay
    results = _delays(
        attempts, delay, backoff_type, jitter=jitter, max_delay=max_delay, draw=_draws(*draws)
    )
    for result in results:
        assert 0 <= result <= cap
