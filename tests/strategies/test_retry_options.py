"""Retry: its options, what they may be, and what a bad one is told."""

from __future__ import annotations

import asyncio
import inspect
import math
from datetime import timedelta
from typing import Any

import pytest

from resilience_pipeline import (
    MisuseError,
    OptionsError,
    ResiliencePipelineBuilder,
    Retry,
    RetryBudget,
)

B = ResiliencePipelineBuilder


async def _nothing() -> None:
    """Be a coroutine."""


# ---- options ------------------------------------------------------------------------------------


def test_one_error_names_all_bad_options() -> None:
    """RT-42: -3 attempts, negative delays and no predicate are reported together."""
    options: dict[str, Any] = {
        "max_retry_attempts": -3,
        "delay": -1,
        "max_delay": -1,
        "should_handle": None,
    }
    with pytest.raises(OptionsError) as caught:
        Retry(**options)
    for name in options:
        assert name in str(caught.value)
    assert len(caught.value.problems) == 4


_BAD_DURATIONS: list[Any] = [
    -1,
    -0.001,
    math.nan,
    True,
    False,
    "",
    "soon",
    "10",
    "10 s",
    "1S",
    "1s1m",
    "-1s",
    b"1s",
    timedelta(seconds=-1),
    [1],
]

_BAD: list[tuple[str, Any]] = [
    *(("max_retry_attempts", v) for v in [0, -1, 1.5, 3.0, True, "3", None, math.nan, -math.inf]),
    *(("delay", v) for v in [*_BAD_DURATIONS, None]),
    *(("max_delay", v) for v in _BAD_DURATIONS),
    *(("max_retry_after", v) for v in [*_BAD_DURATIONS, None]),
    *(("max_elapsed", v) for v in _BAD_DURATIONS),
    *(("backoff_type", v) for v in ["quadratic", "Constant", "", None, 1]),
    *(("use_jitter", v) for v in ["Full", "", 1, 0, None, 0.5]),
    *(("respect_retry_after", v) for v in [1, 0, None, "yes"]),
    *(
        ("should_handle", v)
        for v in [
            None,
            3,
            "ConnectionError",
            (),
            (ConnectionError, 3),
            [ConnectionError],
            BaseException,
            asyncio.CancelledError,
            (ConnectionError, KeyboardInterrupt),
            int,
        ]
    ),
    *(("delay_generator", v) for v in [3, "1s"]),
    *(("on_retry", v) for v in [3, "hook", True]),
    *(("budget", v) for v in [0.1, "10%", True, {"ratio": 0.1}, RetryBudget]),
    *(("name", v) for v in [3, b"x", ["x"]]),
]


@pytest.mark.parametrize(("option", "value"), _BAD, ids=lambda value: repr(value)[:40])
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """An `OptionsError` names the option and shows the value."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError) as caught:
        Retry(**options)
    assert isinstance(caught.value, ValueError)
    assert option in str(caught.value)
    assert repr(value) in str(caught.value)
    assert len(caught.value.problems) == 1


def test_every_bad_option_at_once() -> None:
    """All the options of a retry, each one bad: thirteen problems in one message."""
    options: dict[str, Any] = {
        "max_retry_attempts": 0,
        "delay": "soon",
        "backoff_type": "quadratic",
        "use_jitter": "some",
        "max_delay": -1,
        "should_handle": 3,
        "delay_generator": 3,
        "on_retry": 3,
        "respect_retry_after": "yes",
        "max_retry_after": True,
        "max_elapsed": math.nan,
        "budget": 0.1,
        "name": 3,
    }
    with pytest.raises(OptionsError) as caught:
        Retry(**options)
    assert len(caught.value.problems) == len(options)
    for option, problem in zip(options, caught.value.problems, strict=True):
        assert problem.startswith(option)


@pytest.mark.parametrize("option", ["delay", "max_delay", "max_retry_after", "max_elapsed"])
def test_a_bad_duration_is_told_the_accepted_forms(option: str) -> None:
    """The message shows what may be written instead."""
    options: dict[str, Any] = {option: "soon"}
    with pytest.raises(OptionsError, match=r"500ms.*10s.*1m30s"):
        Retry(**options)


def test_a_bad_choice_is_told_the_choices() -> None:
    """The message of `backoff_type` and `use_jitter` lists what there is."""
    with pytest.raises(OptionsError, match=r"'constant', 'linear', 'exponential'"):
        Retry(backoff_type="quadratic")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"True, False, 'full'"):
        Retry(use_jitter="some")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("max_retry_attempt", "max_retry_attempts"),
        ("dely", "delay"),
        ("jitter", "use_jitter"),
        ("backoff", "backoff_type"),
        ("on_retries", "on_retry"),
        ("shouldhandle", "should_handle"),
    ],
)
def test_a_misspelt_option_is_a_type_error_that_suggests(misspelt: str, meant: str) -> None:
    """Small print: on the class and on the builder alike."""
    options: dict[str, Any] = {misspelt: 1}
    for make in (Retry, B().add_retry):
        with pytest.raises(TypeError, match=f"{misspelt!r}.*{meant!r}"):
            make(**options)


def test_options_are_keyword_only() -> None:
    """No option of a retry stands before a `*`."""
    make: Any = Retry
    with pytest.raises(TypeError):
        make(3)


def test_options_are_immutable() -> None:
    """What was checked stays as it was."""
    retry: Any = Retry()
    with pytest.raises(AttributeError):
        retry.delay = -1


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (3, 3.0),
        (0.5, 0.5),
        (timedelta(minutes=2), 120.0),
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("1m30s", 90.0),
        (math.inf, math.inf),
    ],
)
def test_durations_read_back_in_seconds(given: Any, seconds: float) -> None:
    """Every duration option takes every form and reads back as seconds under its name."""
    retry = Retry(delay=given, max_delay=given, max_retry_after=given, max_elapsed=given)
    assert retry.delay == seconds
    assert retry.max_delay == seconds
    assert retry.max_retry_after == seconds
    assert retry.max_elapsed == seconds


def test_the_smallest_and_the_greatest_number_of_attempts() -> None:
    """One is the least, `math.inf` the most."""
    assert Retry(max_retry_attempts=1).max_retry_attempts == 1
    assert Retry(max_retry_attempts=math.inf).max_retry_attempts == math.inf


@pytest.mark.parametrize("option", ["on_retry", "delay_generator", "should_handle"])
@pytest.mark.filterwarnings("error")
def test_a_coroutine_where_its_function_belongs_is_a_misuse(option: str) -> None:
    """Small print: `on_retry=hook()` is a `MisuseError`, and the coroutine is closed."""
    coroutine = _nothing()
    options: dict[str, Any] = {option: coroutine}
    with pytest.raises(MisuseError, match=option):
        Retry(**options)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_the_builder_takes_and_documents_the_same_options() -> None:
    """`add_retry(**options)` is `add(Retry(**options))`."""
    builder = B()
    assert builder.add_retry(max_retry_attempts=2, delay="1s", name="again") is builder
    (retry,) = builder.build().strategies
    assert isinstance(retry, Retry)
    assert (retry.max_retry_attempts, retry.delay, retry.name) == (2, 1.0, "again")
    with pytest.raises(OptionsError, match="max_retry_attempts"):
        B().add_retry(max_retry_attempts=0)


def test_repr_reads_like_a_call() -> None:
    """Only what differs from the defaults is shown."""
    assert repr(Retry(max_retry_attempts=2, delay="500ms")) == (
        "Retry(max_retry_attempts=2, delay=0.5)"
    )
