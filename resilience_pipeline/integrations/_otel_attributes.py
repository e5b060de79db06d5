"""How events read as attributes of OpenTelemetry: of spans, of their events and of metrics."""

from __future__ import annotations

from ..telemetry import TelemetryEvent
from . import _facts


def named(event: TelemetryEvent) -> dict[str, str | int | float | bool]:
    """Say where something happened."""
    names = (
        ("resilience.pipeline.name", event.pipeline_name),
        ("resilience.pipeline.instance", event.instance),
        ("resilience.strategy.name", event.strategy_name),
        ("resilience.operation.key", event.operation_key),
    )
    return {label: str(name) for label, name in names if name is not None}


def labels_of(event: TelemetryEvent) -> dict[str, str | int | float | bool]:
    """Say where something happened and what, as Polly does in its tags."""
    labels = named(event)
    labels["resilience.event.name"] = event.name
    labels["resilience.event.severity"] = _facts.severity_of(event)
    error = _facts.error_of(event)
    if error is not None:
        labels["exception.type"] = _facts.type_of(error)
    return labels


_APART = frozenset(TelemetryEvent._fields)
#: Whole numbers have 64 bits on their way; what is infinite, or no number, says nothing.
TOO_LARGE = 2**63


def figures_of(event: TelemetryEvent) -> dict[str, int | float | bool]:
    """Give an event's own numbers; what else it has may be secret."""
    return {
        f"resilience.{'attempt.number' if name == 'attempt' else name}": value
        for name, value in vars(event).items()
        if name not in _APART and isinstance(value, int | float) and abs(value) < TOO_LARGE
    }


def of_place(place: _facts.Place) -> dict[str, str]:
    """Say which strategy it is that has state."""
    names = (
        ("resilience.pipeline.name", place.pipeline),
        ("resilience.pipeline.instance", place.instance),
        ("resilience.strategy.name", place.strategy),
    )
    return {label: name for label, name in names if name is not None}
