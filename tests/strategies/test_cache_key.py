"""What makes two calls equal for a cache: `_cache_key`."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from functools import partial
from typing import Any

import attrs
import pytest

from resilience_pipeline import MisuseError
from resilience_pipeline.strategies._cache_key import frozen_key


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    note: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(eq=False)
class Handle:
    x: Any


@attrs.frozen
class Place:
    x: Any


@dataclasses.dataclass(frozen=True)
class Holder:
    items: list[int]


class Service:
    def load(self) -> None:
        """Be a method."""


Pair = namedtuple("Pair", ["a", "b"])  # noqa: PYI024 - what is asked about


def frozen(key: Any) -> Any:
    return frozen_key(key, "test", "the key")


def _fn(*_: object, **__: object) -> None:
    """Be a function."""


NAN = float("nan")
SERVICE = Service()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", 1),
        ("a", b"a"),
        ((1,), (True,)),
        (((1, 2),), ((1.0, 2),)),
        (frozenset({1}), frozenset({True})),
        (frozenset({1, 2.0}), frozenset({1.0, 2})),
        (Point(1), Point(True)),
        (Place(1), Place(1.0)),
        (Pair(1, 2), (1, 2)),
        (Point(1), Place(1)),
        (Handle(1), Handle(1)),
        (partial(_fn, 1), partial(_fn, True)),
        (partial(_fn, x=1), partial(_fn, x=2)),
        (partial(_fn, 1), partial(_fn, x=1)),
        (Service().load, Service().load),
        (None, 0),
        ((), None),
    ],
)
def test_these_are_kept_apart(one: Any, other: Any) -> None:
    """Contract: values of different type are kept apart, inside of what holds them too."""
    assert frozen(one) != frozen(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, "a", None), (1, "a", None)),
        (frozenset({1, 2}), frozenset({2, 1})),
        (Point(1, "one"), Point(1, "another")),
        (Place("x"), Place("x")),
        (partial(_fn, 1, x=2, y=3), partial(_fn, 1, y=3, x=2)),
        (partial(partial(_fn, 1), 2), partial(_fn, 1, 2)),
        (SERVICE.load, SERVICE.load),
        (NAN, float("nan")),
        ((NAN,), (float("nan"),)),
    ],
)
def test_these_are_one(one: Any, other: Any) -> None:
    """Equal values of one type are one key, two objects that are no number as well."""
    assert frozen(one) == frozen(other)
    assert hash(frozen(one)) == hash(frozen(other))


@pytest.mark.parametrize("key", [[1], {"a": 1}, ({1},), Holder([1]), partial(_fn, [1])])
def test_what_cant_be_hashed_is_refused(key: Any) -> None:
    """Contract: a MisuseError that names `key=`."""
    with pytest.raises(MisuseError, match="key="):
        frozen(key)
