"""The table, for people and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

from attrs import asdict

from . import peers
from .rows import BY_HAND, OURS, Checked, Result

_HEAD = ("what", "costs", "bare calls", "× by hand", "at most", "")


def machine(loop: str = "asyncio") -> str:
    """Say what was measured on what, in one line."""
    return (
        f"resilience_pipeline {version('resilience-pipeline')}, {platform.python_implementation()} "
        f"{platform.python_version()}, {platform.system()} {platform.machine()}, {loop}"
    )


def cells(what: str, result: Result) -> tuple[str, ...]:
    """Write a row."""
    return (
        what,
        result.cost,
        number(result.bare.get(OURS)),
        number(result.ratios.get(OURS)),
        ", ".join(f"{check.bound.limit:,g} {check.bound.unit}" for check in result.checks),
        verdict(result.checks),
    )


def contender_cells(result: Result) -> list[tuple[str, ...]]:
    """Write a row's other contenders, the hand-written equivalent first."""
    costs = result.ns or result.sizes
    unit = "ns" if result.ns else "B"
    others = sorted(costs.keys() - {OURS}, key=lambda name: (name != BY_HAND, costs[name]))
    return [
        (
            f"    {name}",
            quantity(costs[name], unit),
            number(result.bare.get(name)),
            number(result.ratios.get(name)),
            "",
            "",
        )
        for name in others
    ]


def verdict(checks: Sequence[Checked], slack: float = 1.0) -> str:
    """Say whether all bounds hold; nothing where there are none."""
    if not checks:
        return ""
    return "within" if all(check.within(slack) for check in checks) else "OVER"


def number(figure: float | None) -> str:
    """Write a ratio with three digits or so; nothing where there is none."""
    if figure is None:
        return ""
    return (
        f"{figure:,.2f}" if figure < 10 else f"{figure:,.1f}" if figure < 100 else f"{figure:,.0f}"
    )


def quantity(figure: float, unit: str) -> str:
    """Write bytes or nanoseconds, and what is many nanoseconds in milliseconds."""
    if unit == "ns" and figure >= 1e6:
        return f"{figure / 1e6:.1f} ms"
    return f"{figure:,.0f} {unit}"


def header() -> str:
    """Write the head of the table, in Markdown."""
    return f"{line(_HEAD)}\n|{'---|' * len(_HEAD)}"


_WIDTHS = (44, 14, 10, 9, 30, 6)


def line(row: Iterable[str]) -> str:
    """Write one line of the table: Markdown, in columns for who reads it in a terminal."""
    first, *others = zip(row, _WIDTHS, strict=True)
    texts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
    return f"| {' | '.join(texts)} |"


def _rounded(figures: Any) -> Any:
    """Leave out digits that mean nothing."""
    if isinstance(figures, float):
        return float(f"{figures:.4g}")
    if isinstance(figures, dict):
        return {name: _rounded(value) for name, value in figures.items()}
    if isinstance(figures, (list, tuple)):
        return [*map(_rounded, figures)]
    return figures


def as_json(results: dict[str, Result], loop: str = "asyncio") -> str:
    """Write everything that was measured."""
    rows: dict[str, Any] = {what: _rounded(asdict(result)) for what, result in results.items()}
    figures = {"machine": machine(loop), "peers": peers.versions(), "rows": rows}
    return json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
