"""`Success`, `Rejected` and `Failure` as values."""

from __future__ import annotations

import copy
import pickle
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import pytest

from resilience_pipeline import (
    Attempt,
    BrokenCircuitError,
    Failure,
    Outcome,
    Rejected,
    Success,
)

ERROR = LookupError("missing")
REFUSAL = BrokenCircuitError("open", pipeline_name="p", strategy_name="s", retry_after=3.0)
OUTCOMES: list[Any] = [Success([1]), Rejected(REFUSAL), Failure(ERROR)]
outcomes = pytest.mark.parametrize("outcome", OUTCOMES, ids=["success", "rejected", "failure"])
unsuccessful = pytest.mark.parametrize("outcome", OUTCOMES[1:], ids=["rejected", "failure"])


def raised(error: Exception) -> Exception:
    """The error, with the traceback of having been raised in here."""
    try:
        raise error
    except Exception as caught:
        return caught


def test_ok_and_the_two_halves() -> None:
    """`.ok` tells a value from an error; each arm shows its half, and `error` is on all three."""
    assert Success(1).ok is True
    assert Rejected(REFUSAL).ok is Failure(ERROR).ok is False
    assert Success(1).value == 1
    assert Success(1).error is None
    assert Rejected(REFUSAL).error is REFUSAL
    assert Failure(ERROR).error is ERROR


def test_unwrap_returns_the_value() -> None:
    """OC-01: `.unwrap()` of a success returns the value, also where that is `None` or an exception."""
    value = [1]
    assert Success(value).unwrap() is value
    assert Success(None).unwrap() is None
    assert Success(ERROR).unwrap() is ERROR


@unsuccessful
def test_unwrap_raises_the_error(outcome: Rejected[Any] | Failure) -> None:
    """OC-02: `.unwrap()` of the others raises the original error."""
    with pytest.raises(type(outcome.error)) as caught:
        outcome.unwrap()
    assert caught.value is outcome.error


@pytest.mark.parametrize("arm", [Failure, Rejected])
def test_unwrap_keeps_the_original_traceback_and_does_not_let_it_grow(
    arm: Callable[[Exception], Rejected[Any] | Failure],
) -> None:
    """Raised however often, the error shows where it came from, once."""
    outcome = arm(raised(LookupError()))
    lengths = []
    for _ in range(3):
        with pytest.raises(LookupError) as caught:
            outcome.unwrap()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "raised"
        lengths.append(len(frames))
    assert len(set(lengths)) == 1


def test_unwrap_of_an_error_that_was_never_raised() -> None:
    """An error without a traceback is raised with that of `unwrap` alone."""
    outcome = Failure(LookupError())
    for _ in range(2):
        with pytest.raises(LookupError) as caught:
            outcome.unwrap()
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == [
            "unwrap"
        ]


def test_unwrap_adds_no_context() -> None:
    """Outside of an `except` block the error comes out with the chain it had."""
    error = raised(LookupError())
    with pytest.raises(LookupError):
        Failure(error).unwrap()
    assert error.__context__ is error.__cause__ is None


def test_value_or() -> None:
    """`.value_or(default)` is the value of a success, of which `None` is one, else the default."""
    assert Success(1).value_or(2) == 1
    assert Success(None).value_or(2) is None
    assert Rejected(REFUSAL).value_or(2) == Failure(ERROR).value_or(2) == 2


def test_map_applies_to_values_only() -> None:
    """`.map(fn)` gives a success of what `fn` makes of the value; the others pass as they are."""

    def never(value: object) -> NoReturn:
        pytest.fail("called")

    assert Success(2).map(str) == Success("2")
    for outcome in (Rejected(REFUSAL), Failure(ERROR)):
        assert outcome.map(never) is outcome


def test_map_keeps_the_history() -> None:
    """The attempts stay with the outcome."""
    record = Attempt(number=0, outcome=Success(1), duration=1.0)
    mapped = Success(1, attempts=(record,), attempt_count=1).map(str)
    assert mapped.attempts == (record,)
    assert mapped.attempt_count == 1


def test_what_a_mapping_function_raises_comes_out() -> None:
    """`.map` does not make failures of the errors of `fn`."""
    with pytest.raises(ZeroDivisionError):
        Success(0).map(lambda value: 1 // value)


def test_match_calls_the_function_of_the_arm() -> None:
    """`.match(success=…, rejected=…, failure=…)` calls one function, with the value or the error."""

    def call(outcome: Outcome[Any, Any]) -> tuple[str, Any]:
        return outcome.match(
            success=lambda value: ("success", value),
            rejected=lambda error: ("rejected", error),
            failure=lambda error: ("failure", error),
        )

    assert call(Success(1)) == ("success", 1)
    assert call(Rejected(REFUSAL)) == ("rejected", REFUSAL)
    assert call(Failure(ERROR)) == ("failure", ERROR)


def test_match_without_rejected() -> None:
    """`rejected` may be left out: then `failure` gets those too."""

    def call(outcome: Outcome[Any, Any]) -> Any:
        return outcome.match(success=lambda _: None, failure=lambda error: error)

    assert call(Rejected(REFUSAL)) is REFUSAL
    assert call(Failure(ERROR)) is ERROR
    assert call(Success(1)) is None


def test_match_takes_its_functions_by_name() -> None:
    """The functions cannot be mixed up."""
    with pytest.raises(TypeError):
        Success(1).match(str, str)  # type: ignore[call-arg]


@outcomes
def test_pattern_matching(outcome: Outcome[Any, Any]) -> None:
    """`__match_args__`: the value or the error by position."""
    match outcome:
        case Success([1] as value):
            assert value is outcome.value
        case Rejected(BrokenCircuitError(retry_after=3.0) as error):
            assert error is REFUSAL
        case Failure(LookupError() as error):
            assert error is ERROR
        case _:
            pytest.fail(f"not matched: {outcome}")
    assert type(outcome).__match_args__ == (("value",) if outcome.ok else ("error",))


def test_equality() -> None:
    """Outcomes are equal when arm and content are; exceptions are equal only to themselves."""
    assert Success([1]) == Success([1])
    assert Success(1) != Success(2)
    assert Failure(ERROR) == Failure(ERROR)
    assert Failure(ERROR) != Failure(LookupError("missing"))
    rejected, success, one = OUTCOMES[1], OUTCOMES[0], 1
    assert rejected != Failure(rejected.error)
    assert success != Failure(ERROR)
    assert success != one


def test_history_and_traceback_are_no_part_of_equality() -> None:
    """How it came about does not tell outcomes apart."""
    record = Attempt(number=0, outcome=None, duration=1.0)
    assert Success(1, attempts=(record,), attempt_count=1) == Success(1)
    error = LookupError()
    before = Failure(error)
    assert Failure(raised(error)) == before


def test_outcomes_are_hashable_if_their_content_is() -> None:
    """Equal outcomes have one hash."""
    assert len({Success(1), Success(1), Failure(ERROR), Failure(ERROR)}) == 2
    with pytest.raises(TypeError):
        hash(Success([1]))


@outcomes
def test_outcomes_are_frozen_and_slotted(outcome: Any) -> None:
    """No attribute can be set or added."""
    for name in ("value", "error", "attempts", "attempt_count", "ok", "brand_new"):
        with pytest.raises(AttributeError):
            setattr(outcome, name, None)
    assert not hasattr(outcome, "__dict__")


@outcomes
def test_repr_shows_the_content(outcome: Any) -> None:
    """A repr reads like the constructor, without history."""
    content = repr(outcome.value if outcome.ok else outcome.error)
    name = "value" if outcome.ok else "error"
    assert repr(outcome) == f"{type(outcome).__name__}({name}={content})"


def test_by_hand_there_is_no_history() -> None:
    """An outcome made by hand has no attempts."""
    for outcome in OUTCOMES:
        assert outcome.attempts == ()
        assert outcome.attempt_count == 0


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_success_survives_pickling(protocol: int) -> None:
    """Case LT-01: `Success([1])` comes back as itself, history included."""
    record = Attempt(number=3, outcome=Success(1), duration=1.0, delay=2.0, hedged=True)
    success = Success([1], attempts=(record,), attempt_count=100)
    again = pickle.loads(pickle.dumps(success, protocol))
    assert again == success
    assert again.attempts == (record,)
    assert again.attempt_count == 100


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@unsuccessful
def test_the_others_survive_pickling(outcome: Rejected[Any] | Failure, protocol: int) -> None:
    """Case LT-01: so do outcomes with errors, also errors that have been raised."""
    record = Attempt(number=0, outcome=outcome, duration=1.0)
    raised(outcome.error)
    full = attrs.evolve(outcome, attempts=(record,), attempt_count=5)
    again = pickle.loads(pickle.dumps(full, protocol))
    assert type(again) is type(outcome)
    assert type(again.error) is type(outcome.error)
    assert str(again.error) == str(outcome.error)
    assert again.attempt_count == 5
    assert type(again.attempts[0].outcome) is type(outcome)
    with pytest.raises(type(outcome.error)):
        again.unwrap()


@outcomes
def test_copies_are_equal(outcome: Any) -> None:
    """Shallow copies are equal, deep ones of values too."""
    assert copy.copy(outcome) == outcome
    deep = copy.deepcopy(outcome)
    assert type(deep) is type(outcome)
    assert repr(deep) == repr(outcome)


def test_attempt_records_have_defaults() -> None:
    """A record's `delay` is 0 before the first try, and `hedged` false."""
    record = Attempt(number=0, outcome=None, duration=1.0)
    assert (record.delay, record.hedged) == (0, False)
