"""`python -m benchmarks.simulation`: prints the figures and writes the pictures of the page about outages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .. import tables
from . import figures, scenarios
from .figures import Run
from .pictures import picture
from .scenarios import DOWN, UP, Make, Setting

_PAGES = Path(__file__).parent.parent.parent / "docs/explanation"


def main() -> None:
    """Run everything."""
    hanging = _simulate("The service hangs", scenarios.THROUGH_AN_OUTAGE, scenarios.HANGING)
    _simulate("It refuses", scenarios.THROUGH_AN_OUTAGE, scenarios.REFUSING)
    _simulate("It hangs, and clients wait", scenarios.THROUGH_AN_OUTAGE, scenarios.PATIENT)
    half = _simulate("Half of it comes back", scenarios.RECOVERING, scenarios.HALF_WELL)
    _draw("outage", "What an outage of a minute does", hanging, scenarios.HANGING)
    _draw("recovery", "A service comes back by halves", half, scenarios.HALF_WELL)


def _simulate(title: str, pipelines: Mapping[str, Make], setting: Setting) -> dict[str, Run]:
    runs = {name: scenarios.run(make, setting) for name, make in pipelines.items()}
    lines = ((name, *_cells(figures.of(run, DOWN, UP))) for name, run in runs.items())
    head = (title, "load in the outage", "peak after it", "95 % answered after", "calls failed")
    print(tables.table(head, lines), end="\n\n", flush=True)
    return runs


def _cells(run: figures.Figures) -> tuple[str, ...]:
    return (
        f"{run.load:,.0f}/s (× {run.factor:.2f})",
        f"{run.peak:,}/s",
        "never" if run.recovery is None else f"{run.recovery} s",
        f"{run.failed:,}",
    )


def _draw(name: str, title: str, runs: Mapping[str, Run], setting: Setting) -> None:
    troubles = [(outage.start, outage.end) for outage in setting.outages]
    path = _PAGES / f"{name}.svg"
    path.write_text(picture(title, runs, troubles), "utf-8")
    print("wrote", path.relative_to(_PAGES.parent.parent))


if __name__ == "__main__":
    main()
