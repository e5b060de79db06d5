"""What the strategies of a pipeline say about their state, see `SupportsHealth`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ._layers import Part
from ._pipeline import ResiliencePipeline


def _parts(pipeline: ResiliencePipeline[Any]) -> Iterator[tuple[str | None, Part]]:
    """The reporting strategies, outermost first, with the names of their pipelines."""
    for part in pipeline._parts:
        if isinstance(part.reporter, ResiliencePipeline):
            yield from _parts(part.reporter)
        else:
            yield pipeline.name, part


def health_of(pipeline: ResiliencePipeline[Any]) -> list[dict[str, Any]]:
    """Describe each strategy that keeps state, outermost first, as plain data."""
    return [_reported(name, part) for name, part in _parts(pipeline)]


def _reported(pipeline_name: str | None, part: Part) -> dict[str, Any]:
    report: dict[str, Any] = {
        "strategy": part.strategy_name,
        "type": type(part.strategy).__name__,
        "pipeline": pipeline_name,
    }
    assert not isinstance(part.reporter, ResiliencePipeline)
    try:
        report |= part.reporter.health()
    except Exception as error:  # noqa: BLE001 - one that can't tell must not hide the others
        report["error"] = f"{type(error).__name__}: {error}"
    return report


def is_idle(pipeline: ResiliencePipeline[Any]) -> bool:
    """Whether a pipeline built anew would give the same answers from now on."""
    return all("error" not in report and report.get("idle", True) for report in health_of(pipeline))
