"""The instruments that OpenTelemetry gets: three that events are counted by, and gauges of state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from opentelemetry import metrics

from .. import AttemptCompleted, PipelineExecuted
from ..telemetry import TelemetryEvent
from . import _facts
from ._otel_attributes import labels_of, of_place
from ._otel_enrichers import Attribute, Further


class Meters:
    """The three instruments of Polly's, in seconds, as units of OpenTelemetry are."""

    def __init__(self, meter: metrics.Meter) -> None:
        self._leads_nowhere = isinstance(meter, metrics.NoOpMeter)
        self._events = meter.create_counter(
            "resilience.strategy.events",
            unit="{event}",
            description="What happened in pipelines and their strategies.",
        )
        self._attempts = meter.create_histogram(
            "resilience.strategy.attempt.duration",
            unit="s",
            description="How long the attempts of retries and hedging took.",
            explicit_bucket_boundaries_advisory=_facts.BUCKETS,
        )
        self._pipelines = meter.create_histogram(
            "resilience.pipeline.duration",
            unit="s",
            description="How long executions of pipelines took; of streams, until their first chunk.",
            explicit_bucket_boundaries_advisory=_facts.BUCKETS,
        )

    def count(self, event: TelemetryEvent, further: Further | None) -> None:
        """Measure an event; `further` is what enrichers say of it."""
        if self._leads_nowhere:
            return
        labels: dict[str, Attribute] = {**labels_of(event)}
        if not isinstance(event, PipelineExecuted | AttemptCompleted):
            self._events.add(1, _with(labels, further))
            return
        seconds = _facts.seconds_of(event)
        if seconds is None:
            return
        labels["resilience.outcome"] = _facts.came_to(event)
        if isinstance(event, AttemptCompleted):
            labels["resilience.attempt.number"] = _facts.attempt_of(event)
            labels["resilience.attempt.handled"] = event.handled
            self._attempts.record(seconds, _with(labels, further))
        else:
            self._pipelines.record(seconds, _with(labels, further))


def _with(labels: dict[str, Attribute], further: Further | None) -> dict[str, Attribute]:
    if further is not None:
        labels.update(further.attributes())
    return labels


#: Name, unit and description of each gauge, by what it is called in the figures of a strategy.
_GAUGES = (
    (
        "limit",
        "resilience.concurrency_limiter.permits.limit",
        "{permit}",
        "Calls that may be inside.",
    ),
    ("used", "resilience.concurrency_limiter.permits.used", "{permit}", "Calls that are inside."),
    ("queued", "resilience.limiter.queued", "{call}", "Calls that wait for a limiter's permit."),
    (
        "available",
        "resilience.rate_limiter.permits.available",
        "{permit}",
        "Permits to be had now.",
    ),
)


class HasStates(Protocol):
    """What gauges ask: a listener."""

    def _states(self) -> Mapping[_facts.Place, _facts.State]:
        """Give the states of the strategies that it knows of."""
        ...


class Gauges:
    """The gauges of one provider, for all its listeners: an instrument asks the first callback it was given alone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: WeakSet[HasStates] = WeakSet()

    def observe_for(self, listener: HasStates, meter: metrics.Meter) -> None:
        """Have a listener's states observed from now on."""
        with self._lock:
            self._listeners.add(listener)
        meter.create_observable_gauge(
            "resilience.circuit_breaker.state",
            [self._observe_circuits],
            unit="{circuit}",
            description="How many circuits are in a state: 1 or 0, but for state per key.",
        )
        for figure, name, unit, description in _GAUGES:
            meter.create_observable_gauge(
                name, [self._observing(figure)], unit=unit, description=description
            )

    def forget(self, listener: HasStates) -> None:
        with self._lock:
            self._listeners.discard(listener)

    def _states(self) -> dict[_facts.Place, _facts.State]:
        with self._lock:
            listeners = list(self._listeners)
        return {
            place: state for listener in listeners for place, state in listener._states().items()
        }

    def _observe_circuits(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        for place, state in self._states().items():
            if not state.circuits:
                continue
            for name in _facts.STATES:
                labels = of_place(place) | {"resilience.circuit_breaker.state": name}
                yield metrics.Observation(state.circuits.get(name, 0), labels)

    def _observing(
        self, figure: str
    ) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        def observe(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            for place, state in self._states().items():
                if figure in state.figures:
                    yield metrics.Observation(state.figures[figure], of_place(place))

        return observe


_lock = Lock()
#: The global provider is a stand-in until it has been set, and the same gauges serve both.
_of_global_provider = Gauges()
_of_providers: WeakKeyDictionary[metrics.MeterProvider, Gauges] = WeakKeyDictionary()


def gauges_of(provider: metrics.MeterProvider) -> Gauges:
    """Give the gauges of a provider, the same ones to all who ask."""
    with _lock:
        known = _of_providers.get(provider)
        if known is None:
            is_global = provider is metrics.get_meter_provider()
            known = _of_providers[provider] = _of_global_provider if is_global else Gauges()
        return known
