"""What makes two calls equal for a cache: `_cache_key`."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from functools import partial
from typing import Any

import attrs
import pytest

from resilience_pipeline import MisuseError
from resilience_pipeline.strategies._cache_key import default_key, frozen_key


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


@pytest.mark.parametrize("args", [(), (1,), ("a", None), (1.0,), ((1, 2),), (Point(1), "x")])
@pytest.mark.parametrize("operation_key", [None, "op"])
@pytest.mark.parametrize("fn", [_fn, SERVICE.load, partial(_fn, 1), len, Service])
def test_a_calls_key_is_that_of_its_parts(
    operation_key: str | None, fn: Any, args: tuple[Any, ...]
) -> None:
    """What `invalidate` is given is `(operation_key, fn, args)`, made a key in one way or the other."""
    key = default_key(operation_key, fn, args, "test")
    assert key == frozen((operation_key, fn, args))
    assert key != frozen((operation_key, fn, (*args, None)))
    assert key != frozen((operation_key, fn, args, None))


def test_triples_of_different_types_are_kept_apart() -> None:
    """Also where a key of one's own looks like that of a call."""
    keys = [
        frozen((one, other, (third,)))
        for one in (1, True)
        for other in (0, False)
        for third in (1, True)
    ]
    assert len(set(keys)) == 8
