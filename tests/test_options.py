"""Options: what each takes and refuses, all complaints at once, reading back, equality."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any

import attrs
import pytest

from resilience_pipeline import (
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    Fallback,
    FixedWindow,
    Hedging,
    MisuseError,
    OptionsError,
    PercentileDelay,
    RateLimiter,
    Retry,
    RetryBudget,
    SlidingWindow,
    Timeout,
    TokenBucket,
)

CONTROL = CircuitBreakerControl()
LIMIT = TokenBucket(1, 1)


class OwnLimit:
    def try_acquire(self, now: float) -> float:
        raise NotImplementedError


OWN_LIMIT = OwnLimit()


def hook(event: object) -> None: ...


async def async_hook(event: object) -> None: ...


class Callback:
    def __call__(self, event: object) -> None: ...


CALLBACK = Callback()

# Kinds of options: good values with what they read back as, and bad ones.
Kind = tuple[list[tuple[Any, Any]], list[Any]]

NO_DURATIONS = [
    True,
    False,
    math.nan,
    -1,
    -0.5,
    -math.inf,
    "",
    "5",
    "5 s",
    "5S",
    "s",
    "-5s",
    "1s1m",
]
NO_DURATIONS += ["soon", b"5s", [5], object(), Fraction(1, 2), timedelta(seconds=-1)]

DURATIONS: list[tuple[Any, Any]] = [
    (2, 2.0),
    (0.25, 0.25),
    ("500ms", 0.5),
    ("1m30s", 90.0),
    (timedelta(minutes=1), 60.0),
    (math.inf, math.inf),
]
DURATION: Kind = ([*DURATIONS, (0, 0.0)], [*NO_DURATIONS, None])
DURATION_OR_NONE: Kind = ([*DURATIONS, (0, 0.0), (None, None)], NO_DURATIONS)
SIGNED: Kind = (
    [*DURATIONS, (0, 0.0), (-1, -1.0), (-0.5, -0.5), (timedelta(seconds=-1), -1.0)],
    [
        *(each for each in NO_DURATIONS if not isinstance(each, int | float | timedelta)),
        True,
        math.nan,
        None,
    ],
)
ZERO_DURATIONS: list[Any] = [0, 0.0, "0s", timedelta()]
POSITIVE: Kind = (DURATIONS, [*NO_DURATIONS, None, *ZERO_DURATIONS])
FUNCTION: Kind = (
    [(None, None), (hook, hook), (async_hook, async_hook), (CALLBACK, CALLBACK)],
    [3, "hook", [hook], False, ()],
)
NAME: Kind = ([("x", "x")], [3, b"x", ["x"], True])
NO_COUNTS = [1.5, 3.0, True, False, "3", None, math.nan, -math.inf, [1]]


PERCENTILE = PercentileDelay(0.95)
BUDGET = RetryBudget()


def or_none(kind: Kind) -> Kind:
    good, bad = kind
    return [*good, (None, None)], [each for each in bad if each is not None]


def count(minimum: int, *, infinite: bool = False) -> Kind:
    good = [(minimum, minimum), (minimum + 41, minimum + 41)]
    bad = [minimum - 1, -5, *NO_COUNTS]
    if infinite:
        return [*good, (math.inf, math.inf)], bad
    return good, [*bad, math.inf]


PREDICATE: Kind = (
    [(Retry(should_handle=OSError).should_handle,) * 2],
    [None, 3, (), int, "OSError", BaseException, [OSError]],
)
PREDICATE_OR_NONE: Kind = ([*PREDICATE[0], (None, None)], PREDICATE[1][1:])
RATIO: Kind = (
    [(0, 0), (1, 1), (0.5, 0.5), (0.0, 0.0)],
    [-0.1, 1.1, math.nan, math.inf, True, "0.5", None],
)
AMOUNT: Kind = (
    [(0, 0), (0.1, 0.1), (1, 1), (2.5, 2.5)],
    [-0.1, -1, math.nan, math.inf, True, "0.5", None],
)
BUDGET_KIND: Kind = (
    [(None, None), (BUDGET, BUDGET)],
    [0.1, "10%", RetryBudget, {"ratio": 0.1}, True, object()],
)
BOOLEAN: Kind = ([(True, True), (False, False)], [0, 1, None, "yes"])

OPTIONS: dict[Callable[..., Any], dict[str, Kind]] = {
    Retry: {
        "max_retry_attempts": count(1, infinite=True),
        "delay": DURATION,
        "backoff_type": (
            [(each, each) for each in ("constant", "linear", "exponential")],
            ["expo", "Constant", None, 1, True],
        ),
        "use_jitter": (
            [(True, True), (False, False), ("full", "full")],
            [0, 1, None, "none", "Full"],
        ),
        "max_delay": DURATION_OR_NONE,
        "should_handle": PREDICATE,
        "delay_generator": FUNCTION,
        "on_retry": FUNCTION,
        "respect_retry_after": BOOLEAN,
        "max_retry_after": DURATION,
        "max_elapsed": DURATION_OR_NONE,
        "budget": BUDGET_KIND,
        "resumable": (
            [(True, True), (False, False), (hook, hook), (async_hook, async_hook)],
            [0, 1, None, "yes"],
        ),
        "name": NAME,
    },
    CircuitBreaker: {
        "failure_ratio": RATIO,
        "minimum_throughput": count(2),
        "sampling_duration": POSITIVE,
        "break_duration": POSITIVE,
        "break_duration_generator": FUNCTION,
        "should_handle": PREDICATE,
        "on_opened": FUNCTION,
        "on_closed": FUNCTION,
        "on_half_opened": FUNCTION,
        "control": (
            [(None, None), (CONTROL, CONTROL)],
            [CircuitBreakerControl, "control", 3, object()],
        ),
        "ignore": PREDICATE_OR_NONE,
        "half_open_probes": count(1),
        "consecutive_failures": or_none(count(1)),
        "slow_call_duration": or_none(POSITIVE),
        "slow_call_ratio": or_none(RATIO),
        "key": FUNCTION,
        "max_keys": count(1),
        "key_idle": POSITIVE,
        "name": NAME,
    },
    Timeout: {
        "timeout": POSITIVE,
        "timeout_generator": FUNCTION,
        "on_timeout": FUNCTION,
        "name": NAME,
    },
    Fallback: {
        "fallback_action": ([(hook, hook), (async_hook, async_hook)], [3, "action", [hook], False]),
        "fallback_value": ([(each, each) for each in (None, 0, False, "", hook)], []),
        "should_handle": PREDICATE,
        "on_fallback": FUNCTION,
        "name": NAME,
    },
    Hedging: {
        "max_hedged_attempts": ([(1, 1), (10, 10)], [0, 11, -1, *NO_COUNTS, math.inf]),
        "delay": SIGNED,
        "delay_generator": ([*FUNCTION[0], (PERCENTILE, PERCENTILE)], FUNCTION[1]),
        "should_handle": PREDICATE,
        "action_generator": FUNCTION,
        "on_hedging": FUNCTION,
        "budget": BUDGET_KIND,
        "name": NAME,
    },
    RetryBudget: {
        "ratio": AMOUNT,
        "min_per_second": AMOUNT,
        "window": (DURATIONS[:-1], [*NO_DURATIONS, None, 0.0, math.inf]),
        "key": FUNCTION,
        "max_keys": count(1),
        "key_idle": POSITIVE,
    },
    PercentileDelay: {
        "percentile": ([(0.5, 0.5), (0.99, 0.99)], [0, 1, -0.1, 95, math.nan, True, "0.9", None]),
        "min": ([*DURATIONS, (0, 0.0)], [*NO_DURATIONS, None]),
        "max": ([*DURATIONS, (0, 0.0)], [*NO_DURATIONS, None]),
        "window": count(20),
        "initial": ([*DURATIONS, (0, 0.0)], [*NO_DURATIONS, None]),
    },
    ConcurrencyLimiter: {
        "permit_limit": count(1),
        "queue_limit": count(0, infinite=True),
        "max_wait": DURATION_OR_NONE,
        "key": FUNCTION,
        "max_keys": count(1),
        "key_idle": POSITIVE,
        "hold_streams": BOOLEAN,
        "on_rejected": FUNCTION,
        "name": NAME,
    },
    RateLimiter: {
        "limiter": (
            [(each, each) for each in (LIMIT, FixedWindow(1, 1), SlidingWindow(1, 1), OWN_LIMIT)],
            [None, 3, hook, TokenBucket, OwnLimit, object()],
        ),
        "queue_limit": count(0, infinite=True),
        "max_wait": DURATION_OR_NONE,
        "key": FUNCTION,
        "max_keys": count(1),
        "key_idle": POSITIVE,
        "on_rejected": FUNCTION,
        "name": NAME,
    },
    TokenBucket: {
        "capacity": (
            [(1, 1), (2.5, 2.5), (10**6, 10**6)],
            [0, 0.5, -1, math.inf, math.nan, True, "1", None],
        ),
        "refill_rate": (
            [(1, 1), (1e-9, 1e-9)],
            [0, -1, math.inf, math.nan, True, "1", None],
        ),
        "per": (DURATIONS[:-1], [*NO_DURATIONS, None, math.inf]),
    },
    FixedWindow: {"permits": count(1), "window": POSITIVE},
    SlidingWindow: {"permits": count(1), "window": POSITIVE, "segments": count(1)},
}
#: What has to be given, and is not what is tested.
REQUIRED: dict[Callable[..., Any], dict[str, Any]] = {
    Timeout: {"timeout": 1},
    Fallback: {"fallback_action": hook},
    ConcurrencyLimiter: {"permit_limit": 1},
    RateLimiter: {"limiter": LIMIT},
    PercentileDelay: {"percentile": 0.9},
    TokenBucket: {"capacity": 1, "refill_rate": 1},
    FixedWindow: {"permits": 1, "window": 1},
    SlidingWindow: {"permits": 1, "window": 1},
}


#: Given together or not at all.
PAIR = {"slow_call_duration": 1, "slow_call_ratio": 0.5}


def make(strategy: Callable[..., Any], option: str, value: Any) -> Any:
    options = {**REQUIRED.get(strategy, {}), option: value}
    if option == "fallback_value":
        del options["fallback_action"]
    if option in PAIR and value is not None:
        options = PAIR | options
    return strategy(**options)


def cases(which: int) -> list[Any]:
    return [
        pytest.param(strategy, option, value, id=f"{strategy.__name__}.{option}-{number}")
        for strategy, options in OPTIONS.items()
        for option, kind in options.items()
        for number, value in enumerate(kind[which])
    ]


every_class = pytest.mark.parametrize("strategy", OPTIONS, ids=lambda each: each.__name__)


@every_class
def test_every_option_is_in_the_table(strategy: Any) -> None:
    """The tables of this file have each option there is, in the order of the signature."""
    assert list(OPTIONS[strategy]) == list(inspect.signature(strategy).parameters)


@pytest.mark.parametrize(("strategy", "option", "value"), cases(1))
def test_bad_values_are_refused(strategy: Any, option: str, value: object) -> None:
    """A bad value raises `OptionsError`, which names the option, what it may be, and what was given."""
    with pytest.raises(OptionsError) as caught:
        make(strategy, option, value)
    assert isinstance(caught.value, ValueError)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{option} must be ")
    is_zero = any(value is zero for zero in ZERO_DURATIONS)
    shown = 0.0 if is_zero and "longer than zero" in problem else value
    assert problem.endswith(f", got {shown!r}")
    assert str(caught.value) == f"bad options for {strategy.__name__}: {problem}"


@pytest.mark.parametrize(("strategy", "option", "value"), cases(0))
def test_good_values_read_back(strategy: Any, option: str, value: tuple[Any, Any]) -> None:
    """Options read back under their names, durations as seconds."""
    given, stored = value
    read = getattr(make(strategy, option, given), option)
    assert read == stored
    assert type(read) is type(stored)


@every_class
def test_all_bad_options_are_named_at_once(strategy: Any) -> None:
    """One `OptionsError` lists every bad field, in the order of the signature."""
    wrong: dict[str, Any] = {
        option: bad[-1] for option, (_, bad) in OPTIONS[strategy].items() if bad
    }
    with pytest.raises(OptionsError) as caught:
        strategy(**wrong)
    assert [problem.partition(" ")[0] for problem in caught.value.problems] == list(wrong)
    for problem in caught.value.problems:
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        (strategy, option)
        for strategy, options in OPTIONS.items()
        for option, kind in options.items()
        if kind in (DURATION, DURATION_OR_NONE, POSITIVE)
    ],
)
def test_a_bad_duration_shows_the_accepted_forms(strategy: Any, option: str) -> None:
    """The message of a bad duration shows the forms that are accepted."""
    with pytest.raises(OptionsError) as caught:
        make(strategy, option, "soon")
    for form in ("seconds as a number", "timedelta", "'500ms'", "'10s'", "'1m30s'"):
        assert form in str(caught.value)


@pytest.mark.parametrize(
    ("option", "allowed"),
    [
        ("backoff_type", ["'constant'", "'linear'", "'exponential'"]),
        ("use_jitter", ["True", "False", "'full'"]),
    ],
)
def test_a_bad_choice_shows_the_choices(option: str, allowed: list[str]) -> None:
    """The message of a bad choice lists what there is to choose from."""
    with pytest.raises(OptionsError) as caught:
        make(Retry, option, "other")
    for choice in allowed:
        assert choice in str(caught.value)


# ---- fallback: exactly one ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, "neither"),
        ({"fallback_action": None}, "neither"),
        ({"fallback_action": hook, "fallback_value": 1}, "both"),
        ({"fallback_action": hook, "fallback_value": None}, "both"),
    ],
)
def test_a_fallback_takes_exactly_one_substitute(options: Any, given: str) -> None:
    """`fallback_action` or `fallback_value`: exactly one of the two, `None` being a value."""
    with pytest.raises(OptionsError, match=f"exactly one .*fallback_value.*got {given}"):
        Fallback(**options)


# ---- names and defaults -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [each for each in OPTIONS if "name" in OPTIONS[each]],
    ids=lambda each: each.__name__,
)
def test_the_name_is_the_class_name_by_default(strategy: Any) -> None:
    """Every strategy takes `name=`; the default is its class name, a subclass's its own."""
    required = REQUIRED.get(strategy, {})
    assert strategy(**required).name == strategy.__name__
    assert strategy(**required, name=None).name == strategy.__name__

    class Mine(strategy):  # type: ignore[misc]
        pass

    assert Mine(**required).name == "Mine"


def test_defaults() -> None:
    """The defaults are those of the contract."""
    retry, breaker = Retry(), CircuitBreaker()
    assert attrs.asdict(retry, filter=lambda field, _: field.name != "should_handle") == {
        "max_retry_attempts": 3,
        "delay": 2.0,
        "backoff_type": "constant",
        "use_jitter": False,
        "max_delay": None,
        "delay_generator": None,
        "on_retry": None,
        "respect_retry_after": True,
        "max_retry_after": 60.0,
        "max_elapsed": None,
        "budget": None,
        "resumable": False,
        "name": "Retry",
    }
    assert attrs.asdict(breaker, filter=lambda field, _: field.name != "should_handle") == {
        "failure_ratio": 0.1,
        "minimum_throughput": 100,
        "sampling_duration": 30.0,
        "break_duration": 5.0,
        "break_duration_generator": None,
        "on_opened": None,
        "on_closed": None,
        "on_half_opened": None,
        "control": None,
        "ignore": None,
        "half_open_probes": 1,
        "consecutive_failures": None,
        "slow_call_duration": None,
        "slow_call_ratio": None,
        "key": None,
        "max_keys": 1024,
        "key_idle": 600.0,
        "name": "CircuitBreaker",
    }
    assert retry.should_handle is breaker.should_handle
    limiter, rate = ConcurrencyLimiter(1), RateLimiter(LIMIT)
    assert (limiter.queue_limit, limiter.max_wait, limiter.on_rejected) == (0, None, None)
    assert (rate.queue_limit, rate.max_wait, rate.on_rejected) == (0, None, None)
    assert limiter.hold_streams is False
    hedging, percentile = Hedging(), PercentileDelay(0.9)
    assert attrs.asdict(hedging, filter=lambda field, _: field.name != "should_handle") == {
        "max_hedged_attempts": 1,
        "delay": 2.0,
        "delay_generator": None,
        "action_generator": None,
        "on_hedging": None,
        "budget": None,
        "name": "Hedging",
    }
    assert hedging.should_handle is retry.should_handle
    budget = RetryBudget()
    assert (budget.ratio, budget.min_per_second, budget.window) == (0.1, 1.0, 10.0)
    assert attrs.astuple(percentile) == (0.9, 0.0, math.inf, 1000, 2.0)
    assert (TokenBucket(1, 1).per, SlidingWindow(1, 1).segments) == (1.0, 10)


# ---- signatures ---------------------------------------------------------------------------------

POSITIONAL = {
    Timeout: ["timeout"],
    Fallback: ["fallback_action"],
    ConcurrencyLimiter: ["permit_limit", "queue_limit"],
    RateLimiter: ["limiter"],
    PercentileDelay: ["percentile"],
    TokenBucket: ["capacity", "refill_rate", "per"],
    FixedWindow: ["permits", "window"],
    SlidingWindow: ["permits", "window", "segments"],
}


@every_class
def test_options_are_keyword_only_but_for_those_before_the_star(strategy: Any) -> None:
    """Only the options that the contract shows before a `*` may be given by position."""
    parameters = inspect.signature(strategy).parameters.values()
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL.get(strategy, [])
    assert all(each.kind is each.KEYWORD_ONLY for each in parameters if each.name not in positional)
    with pytest.raises(TypeError):
        strategy(*([1] * (len(positional) + 1)))


@pytest.mark.parametrize(
    "strategy", [each for each in REQUIRED if each is not Fallback], ids=lambda each: each.__name__
)
def test_a_missing_option_is_a_type_error_that_names_it(strategy: Any) -> None:
    """What is required and missing is named, as for any function of Python's."""
    for name in REQUIRED[strategy]:
        rest = {other: value for other, value in REQUIRED[strategy].items() if other != name}
        with pytest.raises(TypeError, match=name):
            strategy(**rest)


@every_class
def test_an_unknown_option_is_a_type_error(strategy: Any) -> None:
    """An option like no other is answered with those there are."""
    with pytest.raises(TypeError) as caught:
        strategy(**REQUIRED.get(strategy, {}), zzzzzz=1)
    assert "'zzzzzz'" in str(caught.value)
    for option in OPTIONS[strategy]:
        assert option in str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "misspelt", "right"),
    [
        (Retry, "dealy", "delay"),
        (Retry, "max_retry_attempt", "max_retry_attempts"),
        (Retry, "shouldHandle", "should_handle"),
        (Retry, "jitter", "use_jitter"),
        (CircuitBreaker, "failure_rate", "failure_ratio"),
        (CircuitBreaker, "on_open", "on_opened"),
        (CircuitBreaker, "break_time", "break_duration"),
        (Timeout, "timout", "timeout"),
        (Fallback, "fallback_values", "fallback_value"),
        (ConcurrencyLimiter, "permits", "permit_limit"),
        (RateLimiter, "limit", "limiter"),
        (TokenBucket, "rate", "refill_rate"),
        (SlidingWindow, "segment", "segments"),
    ],
)
def test_a_misspelt_option_is_a_type_error_that_suggests_the_right_one(
    strategy: Any, misspelt: str, right: str
) -> None:
    """A misspelt option is a `TypeError` that suggests the right one."""
    with pytest.raises(TypeError, match=rf"'{misspelt}'; did you mean '{right}'\?"):
        strategy(**{misspelt: 1})


# ---- an object where its function belongs -------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        (strategy, option)
        for strategy, options in OPTIONS.items()
        for option, kind in options.items()
        if kind in (FUNCTION, PREDICATE) or option == "fallback_action"
    ],
)
def test_a_coroutine_where_its_function_belongs_is_misuse(strategy: Any, option: str) -> None:
    """`on_retry=hook()` is a `MisuseError` as well as a bad option, and the coroutine is closed."""
    coroutine: Any = async_hook(None)
    with pytest.raises(MisuseError, match=option) as caught:
        make(strategy, option, coroutine)
    assert isinstance(caught.value, OptionsError)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_several_coroutines_are_all_closed() -> None:
    """However many there are, none is left to complain that it was never awaited."""
    coroutines: list[Any] = [async_hook(None) for _ in range(3)]
    with pytest.raises(MisuseError) as caught:
        CircuitBreaker(
            on_opened=coroutines[0], on_closed=coroutines[1], should_handle=coroutines[2]
        )
    assert len(caught.value.problems) == 3  # type: ignore[attr-defined]
    for coroutine in coroutines:
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


# ---- as values ----------------------------------------------------------------------------------

VALUES: list[Any] = [
    Retry(delay=1, should_handle=OSError, on_retry=hook),
    CircuitBreaker(failure_ratio=0.5, control=CONTROL),
    Timeout(5, name="each"),
    Fallback(fallback_value=None),
    ConcurrencyLimiter(3, 4),
    RateLimiter(TokenBucket(1, 2)),
    TokenBucket(1, 2),
    FixedWindow(1, 2),
    SlidingWindow(1, 2),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda each: type(each).__name__)
def test_options_are_values(value: Any) -> None:
    """Options of equal values are equal, with one hash; copies are too."""
    again = attrs.evolve(value)
    assert again == value
    assert hash(again) == hash(value)
    assert copy.copy(value) == value


@pytest.mark.parametrize(
    "value",
    [Retry(delay=1), Timeout(5), Fallback(fallback_value=None), Fallback(hook), *VALUES[4:]],
    ids=lambda each: type(each).__name__,
)
def test_options_survive_pickling(value: Any) -> None:
    """Options made of values and module functions can be sent to another process."""
    assert pickle.loads(pickle.dumps(value)) == value
    assert copy.deepcopy(value) == value


def test_evolved_options_are_checked() -> None:
    """`attrs.evolve` makes options by the same rules."""
    assert attrs.evolve(Retry(), delay="3s").delay == 3.0
    with pytest.raises(OptionsError, match="delay"):
        attrs.evolve(Retry(), delay=-3)


def test_a_duration_of_a_subclass_is_a_plain_float() -> None:
    """What is stored is a plain `float`, whatever numeric type was given."""

    class Seconds(float):
        pass

    class Whole(int):
        pass

    for value in (Seconds(2.0), Whole(2)):
        assert type(Timeout(value).timeout) is float


def test_partial_options() -> None:
    """Strategy classes are ordinary callables: they can be filled in step by step."""
    patient = partial(Retry, delay="10s")
    assert patient(max_retry_attempts=9) == Retry(delay=10, max_retry_attempts=9)
