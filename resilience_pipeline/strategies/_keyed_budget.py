"""A retry budget for each host, tenant or model: `key=` of a `RetryBudget`.

An execution asks for its key once, when the budget meets it. What it has then is the key, not the
key's counts: they are looked up each time, so that counts that were let go meanwhile are never
spent from beside newer ones of the same key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

from .._context import ExecutionMark, ResilienceContext
from ._base import Site
from ._budget_window import BudgetWindow
from ._keyed import KeyTable, ask_key, tell_of_keys
from ._retry_budget import Charge, Purse, RetryBudget


class _Noted:
    """The key of one execution."""

    __slots__ = ("key",)

    def __init__(self, key: Hashable) -> None:
        self.key = key


class _Counts:
    """What was counted for one key."""

    __slots__ = ("inside", "used_at", "window")

    def __init__(self, window: BudgetWindow) -> None:
        self.window = window
        #: Whether it is being added: every other use is one step under the lock.
        self.inside = 0
        self.used_at = 0.0

    def is_idle(self, now: float) -> bool:
        return self.window.is_empty(now)


class KeyedPurse(Purse):
    """A budget that counts by key, in the hands of one strategy of one pipeline."""

    __slots__ = ("_key", "_new_window", "_site")

    _counted: KeyTable[_Counts]

    def __init__(self, budget: RetryBudget, site: Site) -> None:
        super().__init__(budget, site)
        self._key = cast("Callable[[ResilienceContext], Any]", budget.key)
        self._new_window = budget._new_window
        self._site = site

    @staticmethod
    def _start(budget: RetryBudget) -> Any:
        """Make what the account counts in."""
        return KeyTable[_Counts](budget.max_keys, budget.key_idle)

    def meet(self, context: ResilienceContext) -> None:
        """Count an execution as a first of its key, unless the budget has met it already."""
        mark = cast("ExecutionMark", context.execution)
        if mark.noted(self._account) is not None:
            return
        mine = _Noted(ask_key(self._key, context, self._site.origin))
        now = self._now()
        with self._account.lock:
            if mark.noted(self._account) is not None:
                return  # in another thread, another attempt of it was quicker
            now = self._agreed(now)
            window, keys = self._look_up(mine.key, now)
            window.first(now)
            mark.note(self._account, mine)  # now that it is counted: who finds it goes on at once
        if keys > self._counted.max_keys:
            tell_of_keys(self._site, context, mine.key, keys, self._counted.max_keys)

    def spend(self, context: ResilienceContext) -> Charge | None:
        """Charge a further attempt to the key of an execution that was met."""
        mark = cast("ExecutionMark", context.execution)
        key = cast("_Noted", mark.noted(self._account)).key
        now = self._now()
        with self._account.lock:
            now = self._agreed(now)
            window, keys = self._look_up(key, now)
            counted_in = window.spend(now)
        if keys > self._counted.max_keys:
            tell_of_keys(self._site, context, key, keys, self._counted.max_keys)
        return None if counted_in is None else (window, counted_in)

    def _look_up(self, key: Hashable, now: float) -> tuple[BudgetWindow, int]:
        """Give a key's window and, where it is new, how many keys there are; under the lock."""
        table, keys = self._counted, 0
        counts = table.get(key)
        if counts is None:
            counts = table[key] = _Counts(self._new_window())
            counts.inside = 1  # or it would be the first to go
            table.let_go(now)
            counts.inside = 0
            keys = len(table)
        table.move_to_end(key)
        counts.used_at = now
        return counts.window, keys
