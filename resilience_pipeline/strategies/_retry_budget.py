"""Retry budgets: how much retry and hedging may add to the load, all calls together.

The counting is done in `_budget_window`; here is what stands between it and the strategies: the lock,
the clock, which executions count, and what becomes of an attempt that was decided and never made.

Charges that were thought through:

1. Two executions decide at once, in two threads: an attempt is charged when it is decided, under the
   lock, so they can't both get the last one.
2. The execution is cancelled in the wait, a hook raises, the time is up after the hook: the callback
   was not invoked, and `close`, which runs in every case, gives back what was charged.
3. The attempt is refused further in, or cancelled in a queue there: it was no load to anybody, and is
   given back as well, when it has ended.
4. A hedge in a thread is left alone before it has come to the callback, or while it runs that: which
   of the two is known by then, and one that has not come to it never will.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, cast

from attrs import field, frozen

from .._context import ExecutionMark, ResilienceContext
from .._locks import Lock
from .._options import (
    checked,
    count,
    function,
    is_number,
    positive_duration,
    positive_number,
    rule,
    shown,
    to_seconds,
)
from .._outcome import Failure, Rejected, Success
from ..telemetry import Severity, TelemetryEvent
from ._base import Handler, Site
from ._budget_window import BudgetWindow, Slice


class RetryBudgetExhaustedEvent(TelemetryEvent):
    """What is told of a further attempt that a retry's or a hedging's `budget` refuses.

    Attributes:
        context: The execution's context.
        outcome: What the last attempt came to; `None` where a hedge is refused.
        attempt: Number of the last attempt, from 0.
    """

    name = "OnBudgetExhausted"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure | None
    attempt: int
    duration: None = None


class _Account:
    """What is known of a budget.

    Attributes:
        lock: Guards everything in here.
        latest: The latest time there was, on the budget's own scale.
        counted: What has been counted, a window or with `key=` the keys' windows; made for the first
            strategy, when the options are known to be good.
    """

    __slots__ = ("counted", "latest", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self.latest = -math.inf
        self.counted: Any = None


#: What an extra was counted in: to be taken back from there.
Charge: TypeAlias = "tuple[BudgetWindow, Slice]"


def _is_amount(value: Any) -> str | None:
    good = is_number(value) and 0 <= value < math.inf
    return None if good else "a finite number of at least 0"


@checked
@frozen(repr=False, eq=False)
class RetryBudget:
    """A limit on what retries and hedges add to the load, for `budget` of both.

    A further attempt is granted if and only if `extras + 1 <= ratio * firsts + min_per_second *
    window`. Firsts are executions, each counted once for the budget however it goes, when it gets to
    the first retry or hedging that has it; extras are further attempts, charged when they are
    decided and given back when they never get to the callback. Both are counted over the last
    `window`, in ten slices.

    The counts are the object's own: give one budget to all retries and hedgings that share a limit.
    It may be used from any thread and event loop. Where pipelines that share it have clocks of their
    own, the fastest of them drives it.

    Args:
        ratio: Further attempts for each execution, at least 0: 0.1 lets one in ten executions have
            one.
        min_per_second: Further attempts a second that are granted however few executions there
            are, at least 0.
        window: Seconds (any duration form) over which all that is counted, above 0 and finite.
        key: Plain function of the context that gives a key (a host, a tenant): each has counts of
            its own. It is called once for an execution. `None`: all share the counts.
        max_keys: Keys that are kept, at least 1; keys for which anything is in the window may be
            more.
        key_idle: Seconds (any duration form) after which a key that nobody used is let go.

    Raises:
        OptionsError: One or more options have bad values.
    """

    ratio: float = field(default=0.1, kw_only=True, metadata=rule(_is_amount))
    min_per_second: float = field(default=1.0, kw_only=True, metadata=rule(_is_amount))
    window: float = field(
        default=10.0, kw_only=True, converter=to_seconds, metadata=positive_number()
    )
    key: Callable[[ResilienceContext], Any] | None = field(
        default=None, kw_only=True, metadata=function("a function of the context")
    )
    max_keys: int = field(default=1024, kw_only=True, metadata=count(minimum=1))
    key_idle: float = field(
        default=600.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    _account: _Account = field(init=False, factory=_Account, repr=False)

    def _purse(self, site: Site) -> Purse:
        """Give what the strategy that sits at `site` spends from, by that one's clock."""
        if self.key is not None:
            from ._keyed_budget import KeyedPurse  # not before somebody wants keys

            return KeyedPurse(self, site)
        return Purse(self, site)

    def _new_window(self) -> BudgetWindow:
        return BudgetWindow(self.ratio, self.min_per_second, self.window)

    def __repr__(self) -> str:
        """Show the options that differ from their defaults, as in a call."""
        return f"RetryBudget({shown(self)})"


class Purse:
    """A budget in the hands of one strategy of one pipeline."""

    __slots__ = ("_account", "_counted", "_length", "_now", "_offset")

    def __init__(self, budget: RetryBudget, site: Site) -> None:
        self._account = account = budget._account
        with account.lock:
            if account.counted is None:
                account.counted = self._start(budget)
        self._counted = account.counted
        #: Of the window, in seconds.
        self._length = budget.window
        self._now = site.now
        #: What the clock has to be put forward by to agree with the others.
        self._offset = 0.0

    @staticmethod
    def _start(budget: RetryBudget) -> Any:
        """Make what the account counts in."""
        return budget._new_window()

    def counting(self, handle: Handler) -> Handler:
        """Have a strategy's handler count executions as firsts."""
        meet = self.meet

        def counted(context: ResilienceContext) -> Awaitable[Any]:
            meet(context)
            return handle(context)

        return counted

    def meet(self, context: ResilienceContext) -> None:
        """Count an execution as a first, unless the budget has met it already."""
        account, now = self._account, self._now()
        # In one step, or another attempt of it, in another thread, would go on before it is counted.
        with account.lock:
            if cast(ExecutionMark, context.execution).is_new_to(account):
                self._counted.first(self._agreed(now))

    def spending(self) -> Spending:
        """Begin to spend, for one execution."""
        return Spending(self)

    def spend(self, context: ResilienceContext) -> Charge | None:  # noqa: ARG002 - see `KeyedPurse`
        """Charge a further attempt of an execution; `None` if there is none left."""
        now = self._now()
        window: BudgetWindow = self._counted
        with self._account.lock:
            counted_in = window.spend(self._agreed(now))
        return None if counted_in is None else (window, counted_in)

    def give_back(self, charge: Charge) -> None:
        """Take a charge back."""
        window, counted_in = charge
        with self._account.lock:
            window.give_back(counted_in)

    def _agreed(self, now: float) -> float:
        """Give the budget's time, which never runs backwards; called under the lock.

        Threads that read one clock may come here in another order, which is a matter of
        microseconds. A clock that is behind by more than a window is another one, or was set back:
        from now on it goes along with the others.
        """
        account = self._account
        time = now + self._offset
        lag = account.latest - time
        if lag > 0:
            if lag > self._length:
                self._offset += lag
            return account.latest
        account.latest = time
        return time


class Spending:
    """What one execution spends in one strategy."""

    __slots__ = ("_charges", "_purse")

    def __init__(self, purse: Purse) -> None:
        self._purse = purse
        #: By the context of the attempt: where it is charged, and how often the callback had been
        #: invoked by then.
        self._charges: dict[ResilienceContext, tuple[Charge, int]] = {}

    def spend(self, context: ResilienceContext) -> bool:
        """Charge a further attempt, which `context` is for; whether it is granted."""
        charged_to = self._purse.spend(context)
        if charged_to is None:
            return False
        self._charges[context] = (charged_to, context._invocations)
        return True

    def ended(self, context: ResilienceContext) -> None:
        """Take note that an attempt is over: it is given back if the callback was not invoked."""
        charge = self._charges.pop(context, None)
        if charge is not None and context._invocations == charge[1]:
            self._purse.give_back(charge[0])

    def close(self) -> None:
        """Take note that every attempt is over, or will not be made."""
        while self._charges:
            self.ended(next(iter(self._charges)))
