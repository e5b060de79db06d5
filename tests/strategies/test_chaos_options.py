"""Chaos: its options, what they may be, what a bad one is told, and weights by themselves."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from datetime import timedelta
from fractions import Fraction
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline import (
    ChaosBehavior,
    ChaosFault,
    ChaosLatency,
    ChaosOutcome,
    MisuseError,
    OptionsError,
    ResiliencePipelineBuilder,
)
from resilience_pipeline._options import UNSET
from resilience_pipeline.strategies._chaos_generators import Weighted

B = ResiliencePipelineBuilder

MAKERS: list[Any] = [
    lambda **options: ChaosFault(OSError, **options),
    lambda **options: ChaosLatency(1, **options),
    lambda **options: ChaosOutcome(lambda event: 1, **options),
    lambda **options: ChaosBehavior(lambda event: None, **options),
]
every_kind = pytest.mark.parametrize(
    "make", MAKERS, ids=["fault", "latency", "outcome", "behavior"]
)


@every_kind
def test_the_defaults(make: Any) -> None:
    """One call in a thousand, as in Polly."""
    strategy = make()
    assert strategy.injection_rate == 0.001
    assert strategy.enabled is True
    assert strategy.name == type(strategy).__name__


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (B().add_chaos_fault, ["fault_generator", "on_fault_injected"]),
        (B().add_chaos_latency, ["latency", "on_latency_injected"]),
        (B().add_chaos_outcome, ["outcome_generator", "on_outcome_injected"]),
        (B().add_chaos_behavior, ["behavior", "on_behavior_injected"]),
        (ChaosFault, ["fault_generator", "on_fault_injected"]),
    ],
)
def test_the_signature_shows_the_options(make: Any, names: list[str]) -> None:
    own, hook = names
    assert list(inspect.signature(make).parameters) == [
        own,
        "injection_rate",
        "enabled",
        hook,
        "name",
    ]


@every_kind
@pytest.mark.parametrize("rate", [-1, -0.001, 1.1, math.nan, math.inf, True, "0.5", None])
def test_a_rate_that_is_none_is_refused(make: Any, rate: Any) -> None:
    """CH-02: outside of [0, 1] a constant is a mistake."""
    with pytest.raises(OptionsError, match="injection_rate must be a number from 0 to 1"):
        make(injection_rate=rate)


@every_kind
@pytest.mark.parametrize("rate", [0, 0.0, 0.5, 1])
def test_a_rate_may_be_anything_from_0_to_1(make: Any, rate: float) -> None:
    assert make(injection_rate=rate).injection_rate == rate


@every_kind
@pytest.mark.parametrize("enabled", [0, 1, "yes", None])
def test_a_switch_is_on_or_off(make: Any, enabled: Any) -> None:
    with pytest.raises(OptionsError, match="enabled must be True, False"):
        make(enabled=enabled)


@pytest.mark.parametrize(
    "generator",
    [
        None,
        3,
        ConnectionError("an instance"),
        "NoSuchError",
        "len",
        "KeyboardInterrupt",
        KeyboardInterrupt,
        int,
        UnicodeDecodeError,
        [],
        [(0, OSError)],
        [(-1, OSError)],
        [(math.inf, OSError)],
        [(math.nan, OSError)],
        [("1", OSError)],
        [(True, OSError)],
        [OSError],
        [(1, OSError, 2)],
        [(1, ConnectionError("an instance"))],
        [(1, None)],
        [(1, "NoSuchError")],
        [(1, UnicodeDecodeError)],
        {OSError: 1},
    ],
)
def test_what_makes_no_fault_is_refused(generator: Any) -> None:
    with pytest.raises(OptionsError, match="fault_generator must be an exception type"):
        ChaosFault(generator)


@pytest.mark.parametrize(
    "generator",
    [None, 3, "fake", OSError, [], [(0, 1)], [(1,)], [(-1, 1)], [(1, KeyboardInterrupt)], {1: 2}],
)
def test_what_makes_no_outcome_is_refused(generator: Any) -> None:
    with pytest.raises(OptionsError, match="outcome_generator must be a function"):
        ChaosOutcome(generator)


@pytest.mark.parametrize("latency", [None, -1, "soon", True, math.nan])
def test_what_is_no_latency_is_refused(latency: Any) -> None:
    with pytest.raises(OptionsError, match="latency must be a duration"):
        ChaosLatency(latency)


@pytest.mark.parametrize("behavior", [None, 3])
def test_what_is_no_behavior_is_refused(behavior: Any) -> None:
    with pytest.raises(OptionsError, match="behavior must be a function"):
        ChaosBehavior(behavior)


async def _nothing() -> None:
    """Be a coroutine."""


@pytest.mark.parametrize("make", [ChaosFault, ChaosLatency, ChaosOutcome, ChaosBehavior])
def test_a_coroutine_in_place_of_its_function_is_misuse(make: Any) -> None:
    """And it is closed."""
    coroutine = _nothing()
    with pytest.raises(MisuseError):
        make(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(OptionsError) as caught:
        ChaosFault(3, injection_rate=2, enabled=None, on_fault_injected=4)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4


def test_a_misspelt_option_is_told_the_right_one() -> None:
    with pytest.raises(TypeError, match="did you mean 'injection_rate'"):
        ChaosFault(OSError, injektion_rate=1)  # type: ignore[call-arg]


def test_options_read_back() -> None:
    """Durations as seconds, names as what they name, lists as what can't be changed any more."""
    assert ChaosLatency(timedelta(seconds=3)).latency == 3.0
    assert ChaosFault("OSError").fault_generator is OSError
    assert ChaosFault([[3, "OSError"]]).fault_generator == ((3, OSError),)  # type: ignore[list-item]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ChaosLatency(3).latency = 4  # type: ignore[misc]


def test_they_read_like_the_call() -> None:
    builder = (
        B()
        .add_chaos_fault([(3, OSError), (1, "TimeoutError")], injection_rate=0.1)
        .add_chaos_latency("2s", enabled=False)
    )
    assert repr(builder) == (
        "ResiliencePipelineBuilder()"
        ".add_chaos_fault([(3, OSError), (1, TimeoutError)], injection_rate=0.1)"
        ".add_chaos_latency(2.0, enabled=False)"
    )


def test_options_survive_pickling_and_copying() -> None:
    strategy = ChaosFault([(3, OSError), (1, "TimeoutError")], injection_rate=0.1)
    assert pickle.loads(pickle.dumps(strategy)) == copy.deepcopy(strategy) == strategy
    assert repr(copy.copy(strategy)) == repr(strategy)


# ---- weights ------------------------------------------------------------------------------------

weights = st.lists(
    st.one_of(st.integers(0, 1000), st.floats(0, 1000)), min_size=1, max_size=6
).filter(lambda each: sum(each) > 0)


@given(weights, st.floats(0, 1, exclude_max=True))
def test_a_draw_picks_the_entry_it_falls_into(of: list[float], draw: float) -> None:
    """The first whose weights with those before exceed it, up to rounding; never one without weight."""
    picked = Weighted((weight, number) for number, weight in enumerate(of)).pick(draw)
    assert of[picked] > 0
    point = Fraction(draw) * sum(map(Fraction, of))
    before = sum(map(Fraction, of[:picked]), Fraction(0))
    slack = Fraction(sum(of)) / 10**12
    assert before - slack <= point <= before + Fraction(of[picked]) + slack


@given(weights, st.floats().filter(lambda draw: not 0 <= draw < 1))
def test_a_draw_outside_of_the_range_picks_nothing(of: list[float], draw: float) -> None:
    assert Weighted((weight, "entry") for weight in of).pick(draw) is UNSET
