"""A row of the table: what is measured, and what the contract says it may be at most."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from attrs import field, frozen

from . import measure
from .measure import Loop, Settings

Contenders: TypeAlias = Callable[[], Mapping[str, Loop]]

#: The contenders that every comparison has names for.
OURS = "ours"
BY_HAND = "by hand"


@frozen
class Bound:
    """One promise of the contract's table.

    Attributes:
        limit: What the figure may be at most.
        unit: What it is counted in, as the table writes it.
    """

    limit: float
    unit: str


def bare_calls(limit: float) -> Bound:
    return Bound(limit, "bare calls")


def by_hand(limit: float) -> Bound:
    return Bound(limit, "× by hand")


@frozen
class Checked:
    """A bound, and the figure that it is about."""

    bound: Bound
    figure: float

    def within(self, slack: float = 1.0) -> bool:
        return self.figure <= self.bound.limit * slack


@frozen(kw_only=True)
class Result:
    """What a row came to.

    Attributes:
        cost: The row's figure in plain words: `"412 ns"`.
        ns: Nanoseconds by contender, where there are any.
        bare: Contenders in bare calls.
        ratios: Contenders as multiples of the hand-written equivalent.
        sizes: Bytes by contender.
        growth: Nanoseconds of a call by contender and number of calls in flight.
        checks: The contract's bounds.
    """

    cost: str
    ns: Mapping[str, float] = field(factory=dict)
    bare: Mapping[str, float] = field(factory=dict)
    ratios: Mapping[str, float] = field(factory=dict)
    sizes: Mapping[str, float] = field(factory=dict)
    growth: Mapping[str, Mapping[str, float]] = field(factory=dict)
    checks: tuple[Checked, ...] = ()


@frozen
class Row:
    """One row.

    Attributes:
        what: As the contract calls it.
        run: Measures it, inside a running event loop.
        bare: The loop of the bare call, where the row is about calls one after another.
        contenders: Makes the loops that are compared, by name, inside a running event loop.
    """

    what: str
    run: Callable[[Settings], Awaitable[Result]]
    bare: Loop | None = None
    contenders: Contenders | None = None


def call_row(
    what: str,
    *,
    bare: Loop,
    contenders: Contenders,
    bounds: Sequence[Bound] = (),
) -> Row:
    """Make the row of something that is called: `OURS` beside `BY_HAND` and anything else.

    Args:
        what: As the contract calls it.
        bare: What all of them do, and nothing around it.
        contenders: Makes the loops by name; called inside the event loop.
        bounds: In bare calls or as multiples of the hand-written equivalent.
    """

    async def run(settings: Settings) -> Result:
        loops = contenders()
        timings = await measure.compare(bare, loops, settings)
        in_bare_calls = {name: timings.in_bare_calls(name) for name in loops}
        ratios = {name: timings.ratio(name, BY_HAND) for name in loops if BY_HAND in loops}
        figures = {"bare calls": in_bare_calls[OURS], "× by hand": ratios.get(OURS, 0.0)}
        return Result(
            cost=f"{timings.ns(OURS):,.0f} ns",
            ns={name: timings.ns(name) for name in loops},
            bare=in_bare_calls,
            ratios=ratios,
            checks=tuple(Checked(bound, figures[bound.unit]) for bound in bounds),
        )

    return Row(what, run, bare, contenders)
