"""The tables of a published result, in Markdown, from the figures of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from . import report
from .rows import BY_HAND, OURS

#: The rows of a result file.
Rows: TypeAlias = Mapping[str, Mapping[str, Any]]

#: What a call costs by row, contender and number in flight.
Growing: TypeAlias = Mapping[str, Mapping[str, Mapping[str, float]]]

#: Peers that do nearly all of it have a column; the others are named in the last one.
_ALL_IN_ONE = ("nopanic", "hyx", "pyresilience")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    alignments = ["---", *("---:" for _ in head[1:])]
    written = [f"| {' | '.join(cells)} |" for cells in (head, *lines)]
    return "\n".join([written[0], f"|{'|'.join(alignments)}|", *written[1:]])


def of_one_run(rows: Rows) -> str:
    """Write all rows of one run, with the bounds of the contract."""
    return table(
        ("what", "costs", "bare calls", "× by hand", "at most", ""),
        (
            (
                what,
                row["cost"],
                report.number(row["bare"].get(OURS)),
                report.number(row["ratios"].get(OURS)),
                ", ".join(
                    f"{check['bound']['limit']:,g} {check['bound']['unit']}"
                    for check in row["checks"]
                ),
                _verdict(row["checks"]),
            )
            for what, row in rows.items()
        ),
    )


def _verdict(checks: Sequence[Mapping[str, Any]]) -> str:
    if not checks:
        return ""
    past = any(check["figure"] > check["bound"]["limit"] for check in checks)
    return "**over**" if past else "within"


def side_by_side(runs: Mapping[str, Rows]) -> str:
    """Write bare calls and, in brackets, multiples of by hand: one column a run."""
    whats = {what: None for rows in runs.values() for what in rows}
    return table(
        ("bare calls (× by hand)", *runs),
        (
            (what, *(_pair(rows.get(what)) for rows in runs.values()))
            for what in whats
            if any(rows[what]["bare"] for rows in runs.values() if what in rows)
        ),
    )


def _pair(row: Mapping[str, Any] | None) -> str:
    if row is None or OURS not in row["bare"]:
        return ""
    by_hand = row["ratios"].get(OURS)
    bracket = f" ({report.number(by_hand)})" if by_hand else ""
    return report.number(row["bare"][OURS]) + bracket


def with_peers(rows: Rows) -> str:
    """Write what each peer costs for the same job: bare calls, or bytes, or milliseconds."""
    return table(
        ("bare calls, or as said", OURS, BY_HAND, *_ALL_IN_ONE, "others"),
        (
            (what, *(_cost(costs, name) for name in (OURS, BY_HAND, *_ALL_IN_ONE)), _others(costs))
            for what, row in rows.items()
            if len(costs := _Costs(row)) > 2
        ),
    )


class _Costs(dict[str, float]):
    """What the contenders of a row cost, and in what; in bare calls where there are any."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        super().__init__(row["bare"] or row["ns"] or row["sizes"])
        self.pop("source", None)  # a stream's own share is no contender
        self.unit = "" if row["bare"] else "ns" if row["ns"] else "B"


def _cost(costs: _Costs, name: str) -> str:
    if name not in costs:
        return ""
    if not costs.unit:
        return report.number(costs[name])
    return report.quantity(costs[name], costs.unit)


def _others(costs: _Costs) -> str:
    others = sorted(costs.keys() - {OURS, BY_HAND, *_ALL_IN_ONE}, key=costs.__getitem__)
    return ", ".join(f"{name} {_cost(costs, name)}" for name in others)


def of_instructions(counts: Mapping[str, Mapping[str, float]]) -> str:
    """Write instructions of a call."""
    return table(
        ("what", "instructions", "bare call", BY_HAND, "× bare call", "× by hand"),
        (
            (
                what,
                f"{row[OURS]:,.0f}",
                f"{row['bare call']:,.0f}",
                f"{row[BY_HAND]:,.0f}" if BY_HAND in row else "",
                report.number(row[OURS] / row["bare call"]),
                report.number(row[OURS] / row[BY_HAND]) if BY_HAND in row else "",
            )
            for what, row in counts.items()
        ),
    )


def of_growth(head: str, growing: Growing) -> str:
    """Write what a call costs by the number in flight, in thousands of what was measured."""
    sizes = [*next(iter(next(iter(growing.values())).values()))]
    return table(
        (head, *(f"{int(size):,}" for size in sizes)),
        (
            (
                what.removeprefix("10,000 calls ") + ("" if name == OURS else f": {name}"),
                *(f"{curve[size] / 1_000:.1f}" for size in sizes),
            )
            for what, curves in growing.items()
            for name, curve in curves.items()
        ),
    )
