"""Draws runs side by side: the load of the service, and the share of calls that were answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .. import svg
from .figures import Run

_COLOURS = (svg.BLUE, svg.ORANGE, svg.GREEN, svg.PINK)


def picture(title: str, runs: Mapping[str, Run], troubles: Sequence[tuple[float, float]]) -> str:
    """Draw one picture.

    Args:
        title: What is to be seen.
        runs: The runs by their names.
        troubles: When each instance is down; where more of them are it is darker.
    """
    colours = dict(zip(runs, _COLOURS, strict=False))
    load = {name: _curve(run.load) for name, run in runs.items()}
    answered = {
        name: _curve(100 * run.share_answered(at) for at in range(len(run.load)))
        for name, run in runs.items()
    }
    length = len(next(iter(load.values())))
    axis = svg.Axis("seconds", lambda at: at / length, range(0, length + 1, 30))
    left = svg.Chart("calls a second at the service", svg.FIRST, svg.roof(load), axis)
    right = svg.Chart("per cent of calls answered", svg.SECOND, 100, axis)
    drawn: list[str] = []
    for chart, curves in ((left, load), (right, answered)):
        drawn += [chart.band(*trouble, 0.2 / len(troubles)) for trouble in troubles]
        drawn += chart.frame()
        for name, points in curves.items():
            drawn += chart.curve(points, colours[name], dots=False)
    return svg.document(title, drawn, colours)


def _curve(values: Iterable[float]) -> svg.Curve:
    """Put what happened in a second in its middle."""
    return {second + 0.5: value for second, value in enumerate(values)}
