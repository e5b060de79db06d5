"""Hedging and the learnt delay: their options, what they may be, and what a bad one is told."""

from __future__ import annotations

import asyncio
import inspect
import math
from datetime import timedelta
from typing import Any

import attrs
import pytest

from resilience_pipeline import (
    Hedging,
    HedgingActionEvent,
    HedgingDelayEvent,
    HedgingEvent,
    MisuseError,
    OptionsError,
    PercentileDelay,
    ResilienceContext,
    ResiliencePipelineBuilder,
    handle_result,
)

B = ResiliencePipelineBuilder


async def _nothing() -> None:
    """Be a coroutine."""


# ---- the defaults -------------------------------------------------------------------------------


def test_the_defaults() -> None:
    """Those of the first row, which are Polly's."""
    hedging = Hedging()
    assert hedging.max_hedged_attempts == 1
    assert hedging.delay == 2.0
    assert hedging.delay_generator is None
    assert hedging.action_generator is None
    assert hedging.on_hedging is None
    assert hedging.name == "Hedging"


@pytest.mark.parametrize("make", [Hedging, B().add_hedging], ids=["Hedging", "add_hedging"])
def test_the_signature_shows_the_options(make: Any) -> None:
    """Editors and `help()` see the names, in the order of the contract, on the class and on the builder."""
    parameters = list(inspect.signature(make).parameters.values())
    assert [parameter.name for parameter in parameters] == [
        "max_hedged_attempts",
        "delay",
        "delay_generator",
        "should_handle",
        "action_generator",
        "on_hedging",
        "budget",
        "name",
    ]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    defaults = {parameter.name: parameter.default for parameter in parameters}
    assert (defaults["max_hedged_attempts"], defaults["delay"]) == (1, 2.0)
    assert "max_hedged_attempts: " in str(make.__doc__)


def test_the_signature_of_the_learnt_delay() -> None:
    """Small print: `PercentileDelay(percentile, *, min=0.0, max=math.inf, window=1000, initial=2.0)`."""
    parameters = inspect.signature(PercentileDelay).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("percentile", inspect.Parameter.empty),
        ("min", 0.0),
        ("max", math.inf),
        ("window", 1000),
        ("initial", 2.0),
    ]
    assert parameters["percentile"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(p.kind is p.KEYWORD_ONLY for p in list(parameters.values())[1:])


# ---- bad options --------------------------------------------------------------------------------


def test_one_error_names_all_bad_options() -> None:
    """HG-31: -1 attempts, no predicate and no function where one belongs are reported together."""
    options: dict[str, Any] = {
        "max_hedged_attempts": -1,
        "delay": "soon",
        "delay_generator": "soon",
        "should_handle": None,
        "action_generator": 3,
        "on_hedging": "hook",
        "name": 3,
    }
    with pytest.raises(OptionsError) as caught:
        Hedging(**options)
    assert len(caught.value.problems) == len(options)
    for option, problem in zip(options, caught.value.problems, strict=True):
        assert problem.startswith(option)
    assert "bad options for Hedging" in str(caught.value)


_BAD: list[tuple[str, Any]] = [
    *(
        ("max_hedged_attempts", v)
        for v in [0, -1, 11, 1000, 1.0, True, "3", None, math.nan, math.inf]
    ),
    *(
        ("delay", v)
        for v in [None, math.nan, True, False, "", "soon", "10", "-1s", "10 s", "1S", b"1s", [1]]
    ),
    *(("delay_generator", v) for v in [3, 1.5, "1s", timedelta(seconds=1), True]),
    *(
        ("should_handle", v)
        for v in [None, 3, (), [ConnectionError], BaseException, asyncio.CancelledError, int]
    ),
    *(("action_generator", v) for v in [3, "action", True, (_nothing,)]),
    *(("on_hedging", v) for v in [3, "hook", True]),
    *(("name", v) for v in [3, b"x", ["x"]]),
]


@pytest.mark.parametrize(("option", "value"), _BAD, ids=lambda value: repr(value)[:40])
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """HG-31: an `OptionsError`, which is a `ValueError`, names the option and shows the value."""
    options: dict[str, Any] = {option: value}
    for make in (Hedging, B().add_hedging):
        with pytest.raises(OptionsError) as caught:
            make(**options)
        assert isinstance(caught.value, ValueError)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{option} must be ")
        assert repr(value) in problem


def test_a_bad_number_of_attempts_is_told_the_bounds() -> None:
    """HG-31: from 1 to 10."""
    with pytest.raises(OptionsError, match="a whole number from 1 to 10, got 11"):
        Hedging(max_hedged_attempts=11)


def test_a_bad_delay_is_told_the_accepted_forms() -> None:
    """Durations, and a negative number besides."""
    bad: Any = "soon"
    with pytest.raises(OptionsError, match=r"500ms.*10s.*1m30s.*negative number"):
        Hedging(delay=bad)


def test_a_bad_delay_generator_is_told_what_it_may_be() -> None:
    """A function or a `PercentileDelay`."""
    bad: Any = 0.95
    with pytest.raises(OptionsError, match=r"function.*PercentileDelay.*None, got 0.95"):
        Hedging(delay_generator=bad)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("max_hedged_attempt", "max_hedged_attempts"),
        ("max_attempts", "max_hedged_attempts"),
        ("dely", "delay"),
        ("on_hedge", "on_hedging"),
        ("action", "action_generator"),
        ("shouldhandle", "should_handle"),
    ],
)
def test_a_misspelt_option_is_a_type_error_that_suggests(misspelt: str, meant: str) -> None:
    """Small print: on the class and on the builder alike."""
    options: dict[str, Any] = {misspelt: 1}
    for make in (Hedging, B().add_hedging):
        with pytest.raises(TypeError, match=f"{misspelt!r}.*{meant!r}"):
            make(**options)


def test_options_are_keyword_only() -> None:
    """No option of hedging stands before a `*`."""
    make: Any = Hedging
    with pytest.raises(TypeError):
        make(3)


def test_options_are_immutable() -> None:
    """What was checked stays as it was, in the learnt delay too."""
    for made, option in ((Hedging(), "delay"), (PercentileDelay(0.5), "min")):
        with pytest.raises(AttributeError):
            setattr(made, option, 1)


@pytest.mark.parametrize("option", ["delay_generator", "action_generator", "on_hedging"])
@pytest.mark.filterwarnings("error")
def test_a_coroutine_where_its_function_belongs_is_a_misuse(option: str) -> None:
    """Small print: `on_hedging=hook()` is a `MisuseError`, and the coroutine is closed."""
    coroutine = _nothing()
    options: dict[str, Any] = {option: coroutine}
    with pytest.raises(MisuseError, match=option):
        Hedging(**options)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


# ---- good options -------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", range(1, 11))
def test_one_to_ten_attempts(attempts: int) -> None:
    """HG-31: both bounds included."""
    assert Hedging(max_hedged_attempts=attempts).max_hedged_attempts == attempts


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (3, 3.0),
        (0.5, 0.5),
        (timedelta(minutes=2), 120.0),
        ("500ms", 0.5),
        ("1m30s", 90.0),
        (math.inf, math.inf),
        (-1, -1.0),
        (-0.5, -0.5),
        (timedelta(seconds=-1), -1.0),
    ],
)
def test_a_delay_reads_back_in_seconds(given: Any, seconds: float) -> None:
    """Every duration form, and below zero besides."""
    delay = Hedging(delay=given).delay
    assert isinstance(delay, float)
    assert delay == seconds


def test_the_builder_takes_and_documents_the_same_options() -> None:
    """`add_hedging(**options)` is `add(Hedging(**options))`."""
    builder = B()
    assert builder.add_hedging(max_hedged_attempts=2, delay="1s", name="race") is builder
    (hedging,) = builder.build().strategies
    assert isinstance(hedging, Hedging)
    assert (hedging.max_hedged_attempts, hedging.delay, hedging.name) == (2, 1.0, "race")


def test_repr_reads_like_a_call() -> None:
    """Only what differs from the defaults is shown."""
    assert repr(Hedging()) == "Hedging()"
    assert repr(Hedging(delay="500ms", max_hedged_attempts=2)) == (
        "Hedging(max_hedged_attempts=2, delay=0.5)"
    )
    assert repr(Hedging(delay=-1, on_hedging=print, name="race")) == (
        "Hedging(delay=-1.0, on_hedging=print, name='race')"
    )


def test_repr_of_a_pipeline_reads_like_the_builders_calls() -> None:
    """With the snake-case name of the method."""
    pipeline = B(name="llm").add_hedging(delay=0).build()
    assert repr(pipeline).startswith("ResiliencePipelineBuilder(name='llm').add_hedging(delay=0.0)")


def test_a_learnt_delays_repr_makes_it_again() -> None:
    """What it shows is a call with what differs from the defaults."""
    for made in (PercentileDelay(0.95), PercentileDelay(0.5, min="10ms", max=3, window=20)):
        assert eval(repr(made), {"PercentileDelay": PercentileDelay, "math": math}) == made
    assert repr(PercentileDelay(0.95)) == "PercentileDelay(0.95)"
    assert repr(Hedging(delay_generator=PercentileDelay(0.9, min=1))) == (
        "Hedging(delay_generator=PercentileDelay(0.9, min=1.0))"
    )


@pytest.mark.parametrize(
    "event",
    [
        HedgingDelayEvent(context=ResilienceContext(), attempt=1),
        HedgingEvent(context=ResilienceContext(), attempt_context=ResilienceContext(), attempt=0),
        HedgingActionEvent(
            context=ResilienceContext(),
            primary_context=ResilienceContext(),
            attempt=1,
            callback=_nothing,
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_are_frozen_and_carry_a_context(event: Any) -> None:
    """Each is one argument with a `context`."""
    assert isinstance(event.context, ResilienceContext)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        event.attempt = 7


def test_every_form_of_predicate_is_taken() -> None:
    """`should_handle` as everywhere."""
    forms: list[Any] = [
        ConnectionError,
        (ConnectionError, TimeoutError),
        handle_result(bool),
        lambda event: True,
    ]
    for form in forms:
        Hedging(should_handle=form)


# ---- the learnt delay ---------------------------------------------------------------------------

_BAD_LEARNT: list[tuple[str, Any]] = [
    *(("percentile", v) for v in [0, 1, 95, -0.5, 1.5, math.nan, math.inf, True, "0.95", None]),
    *(
        (option, v)
        for option in ("min", "max", "initial")
        for v in [-1, math.nan, True, "soon", "", None, timedelta(seconds=-1), [1]]
    ),
    *(("window", v) for v in [19, 0, -1, 20.0, True, math.inf, "100", None]),
]


@pytest.mark.parametrize(("option", "value"), _BAD_LEARNT, ids=lambda value: repr(value)[:40])
def test_a_bad_option_of_the_learnt_delay_is_refused_by_name(option: str, value: Any) -> None:
    """Checked when it is made, like a strategy's."""
    options: dict[str, Any] = {"percentile": 0.95, option: value}
    with pytest.raises(OptionsError) as caught:
        PercentileDelay(**options)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{option} must be ")
    assert repr(value) in problem


def test_one_error_names_all_bad_options_of_the_learnt_delay() -> None:
    """All five at once."""
    options: dict[str, Any] = {
        "percentile": 95,
        "min": "soon",
        "max": -1,
        "window": 5,
        "initial": None,
    }
    with pytest.raises(OptionsError) as caught:
        PercentileDelay(**options)
    assert [problem.split()[0] for problem in caught.value.problems] == list(options)


def test_the_bounds_of_the_learnt_delay_must_not_cross() -> None:
    """`min` above `max` contradicts itself; equal ones fix the delay."""
    with pytest.raises(OptionsError, match="min must not be longer than max"):
        PercentileDelay(0.95, min=3, max="2s")
    assert PercentileDelay(0.95, min=3, max=3).max == 3


def test_durations_of_the_learnt_delay_read_back_in_seconds() -> None:
    """Any duration form, under its name."""
    made = PercentileDelay(0.99, min="10ms", max=timedelta(seconds=5), initial=1, window=20)
    assert (made.percentile, made.min, made.max, made.initial, made.window) == (
        0.99,
        0.01,
        5.0,
        1.0,
        20,
    )


def test_learnt_delays_are_values() -> None:
    """Equal when their options are: what they learn is a pipeline's."""
    assert PercentileDelay(0.95) == PercentileDelay(percentile=0.95)
    assert PercentileDelay(0.95) != PercentileDelay(0.9)
    assert len({PercentileDelay(0.95), PercentileDelay(0.95)}) == 1


def test_a_misspelt_option_of_the_learnt_delay_is_suggested() -> None:
    """The same `TypeError` as a strategy's."""
    options: dict[str, Any] = {"windw": 100}
    with pytest.raises(TypeError, match=r"'windw'.*'window'"):
        PercentileDelay(0.95, **options)
