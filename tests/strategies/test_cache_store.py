"""What a cache has stored, against a model that looks at everything: `_cache_store`."""

from __future__ import annotations

import math
from typing import Any

from attrs import define
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline.strategies._cache_store import CacheStore

_KEYS = st.integers(0, 5)
_OPERATIONS = st.one_of(
    st.tuples(st.just("put"), _KEYS, st.booleans()),
    st.tuples(st.just("get"), _KEYS),
    st.tuples(st.just("get_stale"), _KEYS),
    st.tuples(st.just("drop"), _KEYS),
    st.tuples(st.just("remove"), _KEYS),
    st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])),
    st.tuples(st.just("clear")),
)


@define
class Item:
    key: int
    value: int
    put_at: float
    may_be_stale: bool


class Model:
    """The same, by looking through a list, the least recently used first."""

    def __init__(self, max_size: int, ttl: float, grace: float | None) -> None:
        self.max_size, self.ttl, self.grace = max_size, ttl, grace
        self.items: list[Item] = []

    def find(self, key: int) -> Item | None:
        return next((item for item in self.items if item.key == key), None)

    def is_fresh(self, item: Item, now: float) -> bool:
        return now - item.put_at < self.ttl

    def may_serve(self, item: Item, now: float) -> bool:
        if self.grace is None or not item.may_be_stale:
            return False
        return now - item.put_at <= self.ttl + self.grace

    def use(self, item: Item) -> int:
        self.items.remove(item)
        self.items.append(item)
        return item.value

    def put(self, key: int, value: int, now: float, may_be_stale: bool) -> None:
        self.drop(key)
        self.items.append(Item(key, value, now, may_be_stale))

    def drop(self, key: int) -> None:
        self.items = [item for item in self.items if item.key != key]


@given(
    max_size=st.integers(1, 4),
    ttl=st.sampled_from([0.0, 1.0, 3.0, math.inf]),
    grace=st.sampled_from([None, 0.0, 2.0]),
    operations=st.lists(_OPERATIONS, max_size=60),
)
def test_like_a_model_that_looks_at_everything(  # noqa: PLR0912 - one for each operation
    max_size: int, ttl: float, grace: float | None, operations: list[tuple[Any, ...]]
) -> None:
    """Fresh, stale and least recently used mean the same for both, after any operations."""
    store: CacheStore[int] = CacheStore(max_size, ttl, grace)
    model = Model(max_size, ttl, grace)
    now = 0.0
    for number, (name, *arguments) in enumerate(operations):
        match name, arguments:
            case "put", [key, may_be_stale]:
                store.put(key, number, now, may_be_stale=may_be_stale)
                model.put(key, number, now, may_be_stale)
                # What is too old goes before what is still good, as far as nothing older is kept.
                _expire(model, now)
                del model.items[: max(0, len(model.items) - max_size)]
            case "get", [key]:
                entry, item = store.get(key, now), model.find(key)
                if item is not None and model.is_fresh(item, now):
                    assert entry is not None
                    assert entry.value == model.use(item)
                else:
                    assert entry is None
                    if item is not None and not model.may_serve(item, now):
                        model.drop(key)
            case "get_stale", [key]:
                entry, item = store.get_stale(key, now), model.find(key)
                if item is not None and model.may_serve(item, now):
                    assert entry is not None
                    assert entry.value == model.use(item)
                else:
                    assert entry is None
            case "drop", [key]:
                assert store.drop(key) == (model.find(key) is not None)
                model.drop(key)
            case "remove", [key]:
                entry = store.get(key, now)
                if entry is not None:
                    assert store.remove(key, entry)
                    assert not store.remove(key, entry)
                model.drop(key) if entry is not None else _look_up(model, key, now)
            case "pass", [seconds]:
                now += seconds
            case _:
                store.clear()
                model.items.clear()
        assert len(store) == len(model.items)


def _look_up(model: Model, key: int, now: float) -> None:
    item = model.find(key)
    if item is not None and not model.is_fresh(item, now) and not model.may_serve(item, now):
        model.drop(key)


def _expire(model: Model, now: float) -> None:
    for item in sorted(model.items, key=lambda each: (each.put_at, each.value)):
        if model.is_fresh(item, now) or model.may_serve(item, now):
            return
        model.items.remove(item)


def test_an_entry_is_dropped_at_its_ttl() -> None:
    """Contract: dropped once age ≥ ttl."""
    store: CacheStore[str] = CacheStore(2, 10.0, None)
    store.put("k", "v", 5.0)
    assert store.get("k", 14.999) is not None
    assert store.get("k", 15.0) is None
    assert len(store) == 0


def test_grace_includes_its_end() -> None:
    """Contract: served up to so long past its ttl."""
    store: CacheStore[str] = CacheStore(2, 10.0, 3.0)
    store.put("k", "v", 0.0)
    assert store.get("k", 11.0) is None
    assert store.get_stale("k", 13.0) is not None
    assert store.get_stale("k", 13.001) is None


def test_a_clock_that_steps_back_makes_nothing_old() -> None:
    """A reading before the entry was put is no age."""
    store: CacheStore[str] = CacheStore(2, 10.0, None)
    store.put("k", "v", 100.0)
    assert store.get("k", 0.0) is not None


def test_who_removes_an_entry_leaves_its_successor_alone() -> None:
    """Every removal checks identity."""
    store: CacheStore[str] = CacheStore(2, math.inf, None)
    store.put("k", "old", 0.0)
    old = store.get("k", 0.0)
    assert old is not None
    store.put("k", "new", 0.0)
    assert not store.remove("k", old)
    new = store.get("k", 0.0)
    assert new is not None
    assert new.value == "new"


def test_what_is_too_old_goes_when_something_is_put() -> None:
    """Nothing is kept for ever because nobody asks for it."""
    store: CacheStore[int] = CacheStore(1000, 1.0, None)
    for number in range(100):
        store.put(number, number, float(number))
    assert len(store) == 1
    assert store.evictions == 0
