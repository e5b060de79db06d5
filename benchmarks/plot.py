"""Draws what grows with what: the cost of a call by the number in flight, as an SVG.

Two charts: microseconds of a call, and its instructions, in which nothing else that the machine does is
to be seen. Colours and greys are in the middle of the scale, so that the picture reads on a
light and on a dark page alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TypeAlias

from attrs import frozen

from .bench_in_flight import BARE
from .rows import BY_HAND, OURS
from .tables import Growing

#: What a call costs by the number in flight.
Curve: TypeAlias = Mapping[int, float]

_GREY = "#808891"
_COLOURS = {BARE: _GREY, BY_HAND: "#d9822b"}
_OTHERS = ("#2f81f7", "#1f9d8a", "#a371f7", "#c94f8c", "#8a9a2b")

_WIDTH, _HEIGHT, _LEFT, _TOP = 330, 220, 56, 40
_SECOND = _LEFT * 2 + _WIDTH + 14  # where the second chart begins


@frozen
class _Chart:
    """One chart: what it counts, where it begins, and the end of its axis, whose other is zero."""

    title: str
    left: float
    top_value: float

    def x(self, in_flight: int) -> float:
        """Place a number in flight; the axis is logarithmic, from 10 to 100,000."""
        return self.left + _WIDTH * (math.log10(in_flight) - 1) / 4

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / self.top_value)

    def frame(self) -> Iterator[str]:
        """Draw axes, grid and their numbers."""
        yield _text(self.left, _TOP - 16, self.title, "start", size=13)
        step = _step(self.top_value)
        for index in range(math.floor(self.top_value / step) + 1):
            y = self.y(index * step)
            yield (
                f'<line x1="{self.left}" x2="{self.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{_GREY}" stroke-opacity="0.3"/>'
            )
            yield _text(self.left - 8, y + 4, f"{index * step:g}", "end")
        for in_flight in (10, 100, 1_000, 10_000, 100_000):
            yield _text(self.x(in_flight), _TOP + _HEIGHT + 20, f"{in_flight:,}", "middle")
        middle = self.left + _WIDTH / 2
        yield _text(middle, _TOP + _HEIGHT + 40, "calls in flight", "middle")

    def curve(self, points: Curve, colour: str) -> Iterator[str]:
        """Draw one line and its points."""
        places = [(self.x(size), self.y(value)) for size, value in points.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def growth(timed: Growing, counted: Growing) -> str:
    """Draw the picture: nanoseconds of a call and, where they were counted, its instructions."""
    curves = _curves(timed)
    left = _Chart("microseconds of a call", _LEFT, _roof(curves))
    drawn = [*_drawn(left, curves)]
    if counted:
        others = _curves(counted)
        right = _Chart("thousand instructions of a call", _SECOND, _roof(others))
        drawn += _drawn(right, others)
    width, height = _SECOND + _WIDTH + 36, _TOP + _HEIGHT + 64 + 20 * math.ceil(len(curves) / 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif">'
    )
    title = "<title>What a call costs by the number of calls in flight</title>"
    return "\n".join([head, title, *drawn, *_legend([*curves]), "</svg>\n"])


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


def _drawn(chart: _Chart, curves: Mapping[str, Curve]) -> Iterator[str]:
    yield from chart.frame()
    colours = _colours([*curves])
    for name, points in curves.items():
        yield from chart.curve(points, colours[name])


def _legend(names: Sequence[str]) -> Iterator[str]:
    """Name the lines, in two columns under the charts."""
    for index, (name, colour) in enumerate(_colours(names).items()):
        x = (_LEFT, _SECOND)[index % 2]
        y = _TOP + _HEIGHT + 70 + 20 * (index // 2)
        yield f'<rect x="{x}" y="{y - 5}" width="18" height="4" rx="2" fill="{colour}"/>'
        yield _text(x + 26, y, name, "start")


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{_GREY}">{escape(text)}</text>'
    )


def _roof(curves: Mapping[str, Curve]) -> float:
    """Where an axis ends: a whole step above the highest point."""
    highest = max(value for curve in curves.values() for value in curve.values())
    step = _step(highest)
    return step * math.ceil(highest / step)


def _step(highest: float) -> float:
    """Find a round distance for four to eight lines."""
    magnitude = 10.0 ** math.floor(math.log10(highest / 4))
    return next(magnitude * n for n in (1, 2, 5, 10) if highest / (magnitude * n) <= 8)
