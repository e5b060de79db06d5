"""Pairs of line charts as SVG, written by hand.

Colours and greys are in the middle of the scale, so that a picture reads on a light and on a dark page
alike. Nothing here knows what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from typing import TypeAlias

from attrs import frozen

#: A line: its points, from left to right.
Curve: TypeAlias = Mapping[float, float]

GREY = "#808891"
BLUE, GREEN, PURPLE, PINK, OLIVE, ORANGE, BROWN = (
    *(
        "#2f81f7",
        "#1f9d8a",
        "#a371f7",
        "#c94f8c",
        "#8a9a2b",
        "#d9822b",
        "#a8623f",
    ),
)

_WIDTH, _HEIGHT, _TOP = 330, 220, 40

#: Where the two charts begin.
FIRST = 56
SECOND = FIRST * 2 + _WIDTH + 14


@frozen
class Axis:
    """What charts have from left to right.

    Attributes:
        title: What it counts.
        place: Where a number is, from 0 to 1.
        marks: The numbers that are written.
    """

    title: str
    place: Callable[[float], float]
    marks: Iterable[int]


@frozen
class Chart:
    """One chart: what it counts, where it begins, and the end of its axis, whose other is zero."""

    title: str
    left: float
    top_value: float
    axis: Axis

    def x(self, value: float) -> float:
        return self.left + _WIDTH * self.axis.place(value)

    def y(self, value: float) -> float:
        return _TOP + _HEIGHT * (1 - value / self.top_value)

    def frame(self) -> Iterator[str]:
        """Draw axes, grid and their numbers."""
        yield text(self.left, _TOP - 16, self.title, "start", size=13)
        step = _step(self.top_value)
        for index in range(math.floor(self.top_value / step) + 1):
            y = self.y(index * step)
            yield (
                f'<line x1="{self.left}" x2="{self.left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{GREY}" stroke-opacity="0.3"/>'
            )
            yield text(self.left - 8, y + 4, f"{index * step:g}", "end")
        for mark in self.axis.marks:
            yield text(self.x(mark), _TOP + _HEIGHT + 20, f"{mark:,}", "middle")
        middle = self.left + _WIDTH / 2
        yield text(middle, _TOP + _HEIGHT + 40, self.axis.title, "middle")

    def band(self, begin: float, end: float, opacity: float) -> str:
        """Shade what lies between two numbers of the axis."""
        x = self.x(begin)
        return (
            f'<rect x="{x:.1f}" y="{_TOP}" width="{self.x(end) - x:.1f}" height="{_HEIGHT}" '
            f'fill="{GREY}" fill-opacity="{opacity:g}"/>'
        )

    def curve(self, points: Curve, colour: str, *, dots: bool = True) -> Iterator[str]:
        """Draw one line, and its points."""
        places = [(self.x(at), self.y(value)) for at, value in points.items()]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in places if dots else ():
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def document(title: str, drawn: Iterable[str], colours: Mapping[str, str]) -> str:
    """Write a picture of two charts, with the names of the lines in two columns under them."""
    width = SECOND + _WIDTH + 36
    height = _TOP + _HEIGHT + 64 + 20 * math.ceil(len(colours) / 2)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'font-family="system-ui, sans-serif">'
    )
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", *drawn, *_legend(colours), "</svg>\n"]
    )


def _legend(colours: Mapping[str, str]) -> Iterator[str]:
    for index, (name, colour) in enumerate(colours.items()):
        x = (FIRST, SECOND)[index % 2]
        y = _TOP + _HEIGHT + 70 + 20 * (index // 2)
        yield f'<rect x="{x}" y="{y - 5}" width="18" height="4" rx="2" fill="{colour}"/>'
        yield text(x + 26, y, name, "start")


def text(x: float, y: float, words: str, anchor: str, size: int = 12) -> str:
    """Write words; `anchor` is the end of them that is at `x`."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{GREY}">{escape(words)}</text>'
    )


def roof(curves: Mapping[str, Curve]) -> float:
    """Where an axis ends: a whole step above the highest point."""
    highest = max(value for curve in curves.values() for value in curve.values())
    step = _step(highest)
    return step * math.ceil(highest / step)


def _step(highest: float) -> float:
    """Find a round distance for four to eight lines."""
    magnitude = 10.0 ** math.floor(math.log10(highest / 4))
    return next(magnitude * n for n in (1, 2, 5, 10) if highest / (magnitude * n) <= 8)
