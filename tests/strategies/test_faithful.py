"""What JSON holds faithfully: all of it comes back equal and of the same types, and nothing else passes."""

from __future__ import annotations

import enum
import json
import math
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline.strategies._faithful import unfaithful

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.tuples(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters()) | st.integers() | st.booleans(), inner)
        | st.sets(st.integers())
    ),
    max_leaves=10,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if type(one) is list:
        return len(one) == len(other) and all(map(same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if type(one) is float:
        return repr(one) == repr(other)  # -0.0 is not 0.0
    return bool(one == other)


@given(anything)
def test_what_passes_comes_back_and_what_does_not_come_back_does_not_pass(value: Any) -> None:
    """The one promise, over all that JSON and Python disagree about."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        came_back = same(json.loads(text.encode().decode()), value)
    except (TypeError, ValueError):
        came_back = False
    assert (unfaithful(value) is None) == came_back


class Colour(enum.IntEnum):
    RED = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ((1,), "it is of type tuple"),
        (b"1", "it is of type bytes"),
        ({1, 2}, "it is of type set"),
        (Text("a"), "it is of type test_faithful.Text"),
        (OrderedDict(a=1), "it is of type collections.OrderedDict"),
        (Point(1), "it is of type test_faithful.Point"),
        (Colour.RED, "it is of type test_faithful.Colour"),
        (math.nan, "it is nan"),
        (-math.inf, "it is -inf"),
        ({"a": [1, {"b": datetime.now(UTC)}]}, "it['a'][1]['b'] is of type datetime.datetime"),
        ({1: "a"}, "it has a key that is no text, 1"),
        (["\ud83d\ude00"], "it[0] is no Unicode text, it contains lone surrogates"),
        ({"\ud800": 1}, "a key of it is no Unicode text, it contains lone surrogates"),
    ],
)
def test_it_says_what_is_wrong_and_where(value: Any, problem: str) -> None:
    """The message leads to the place."""
    found = unfaithful(value)
    assert found is not None
    assert found.replace("strategies.", "").replace("tests.", "") == problem


def test_a_number_of_more_digits_than_python_writes_is_refused() -> None:
    """Python limits how many digits it reads and writes, and so what can come back."""
    assert unfaithful([10**5000]) == "it[0] is a number of too many digits"
    assert unfaithful(10**4000) is None


def test_what_contains_itself_is_refused() -> None:
    """And so is what is nested beyond measure."""
    circle: list[Any] = []
    circle.append(circle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (circle, deep):
        assert unfaithful(value) == "it is nested too deeply, or contains itself"
    while deep:  # or taking it apart would recurse as deeply
        deep = deep.pop()
