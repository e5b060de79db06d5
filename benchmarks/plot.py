"""Draws what grows with what: the cost of a call by the number in flight, as an SVG.

Two charts: microseconds of a call, and its instructions, in which nothing else that the machine does is
to be seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from . import svg
from .bench_in_flight import BARE
from .rows import BY_HAND, OURS
from .svg import Curve
from .tables import Growing

_COLOURS = {BARE: svg.GREY, BY_HAND: svg.ORANGE}
_OTHERS = (svg.BLUE, svg.GREEN, svg.PURPLE, svg.PINK, svg.OLIVE, svg.BROWN)

_IN_FLIGHT = svg.Axis(
    "calls in flight",
    lambda number: (math.log10(number) - 1) / 4,
    (10, 100, 1_000, 10_000, 100_000),
)


def growth(timed: Growing, counted: Growing) -> str:
    """Draw the picture: nanoseconds of a call and, where they were counted, its instructions."""
    curves = _curves(timed)
    left = svg.Chart("microseconds of a call", svg.FIRST, svg.roof(curves), _IN_FLIGHT)
    drawn = [*_drawn(left, curves)]
    if counted:
        others = _curves(counted)
        title = "thousand instructions of a call"
        drawn += _drawn(svg.Chart(title, svg.SECOND, svg.roof(others), _IN_FLIGHT), others)
    title = "What a call costs by the number of calls in flight"
    return svg.document(title, drawn, _colours([*curves]))


def _curves(growing: Growing) -> dict[str, Curve]:
    """Find what to draw: the bare call and hand-written code of the first row, ours of all."""
    curves: dict[str, Curve] = {}
    for what, contenders in growing.items():
        for contender, figures in contenders.items():
            if contender == OURS:
                name = what.removeprefix("10,000 calls ").replace("its queue", "a limiter's queue")
            elif what == next(iter(growing)):
                name = contender if contender == BARE else f"under asyncio.timeout, {contender}"
            else:
                continue
            curves[name] = {int(size): value / 1_000 for size, value in figures.items()}
    return curves


def _colours(names: Sequence[str]) -> dict[str, str]:
    others = iter(_OTHERS * 2)
    return {
        name: next((colour for known, colour in _COLOURS.items() if name.endswith(known)), None)
        or next(others)
        for name in names
    }


def _drawn(chart: svg.Chart, curves: Mapping[str, Curve]) -> Iterator[str]:
    yield from chart.frame()
    colours = _colours([*curves])
    for name, points in curves.items():
        yield from chart.curve(points, colours[name])
