"""Prometheus: metrics of what happens in pipelines, to be scraped.

Needs the extra `prometheus`. The instruments are those of `resilience_pipeline.integrations.opentelemetry`,
with names and labels as Prometheus writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isnan
from threading import RLock
from typing import Any

from .. import (
    AttemptCompleted,
    MisuseError,
    OptionsError,
    PipelineExecuted,
    ResiliencePipelineRegistry,
)
from ..telemetry import TelemetryEvent, add_listener
from . import _facts

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, Metric
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as _error:
    _msg = (
        "resilience_pipeline.integrations.prometheus needs the client of Prometheus: "
        "pip install 'resilience-pipeline[prometheus]'"
    )
    raise ImportError(_msg, name=_error.name) from _error

__all__ = ["PrometheusListener", "instrument"]


def instrument(
    registry: CollectorRegistry | None = None,
    *,
    pipelines: ResiliencePipelineRegistry | None = None,
    buckets: Sequence[float] = _facts.BUCKETS,
    instances: bool = True,
) -> Callable[[], None]:
    """Have metrics of all pipelines of the process, built before or after, in a registry of Prometheus.

    Args:
        registry: The client's registry; `None` for its default one.
        pipelines: A registry of pipelines whose breakers and limiters are shown as gauges, see
            `PrometheusListener.watch`.
        buckets: Upper bounds of the histograms' buckets in seconds, rising.
        instances: Whether each instance of a pipeline has series of its own. Say `False` where there
            may be many, one per tenant say: they are added up then.

    Returns:
        A function that ends it and takes the metrics out of the registry; to call it again does
        nothing.

    Raises:
        MisuseError: The registry has these metrics already, or is none of the client's.
        OptionsError: `buckets` are no rising numbers.

    Example:
        >>> uninstrument = instrument()
    """
    listener = PrometheusListener(registry, buckets=buckets, instances=instances)
    try:
        if pipelines is not None:
            listener.watch(pipelines)
        remove = add_listener(listener)
    except BaseException:
        listener.close()
        raise

    def uninstrument() -> None:
        remove()
        listener.close()

    return uninstrument


class PrometheusListener:
    """A listener that keeps metrics of events; give it to a builder or a registry.

    It is in the client's registry from the start and until it is closed. A registry has room for one.

    May be called from any thread and event loop.

    Args:
        registry: The client's registry; `None` for its default one.
        buckets: Upper bounds of the histograms' buckets in seconds, rising.
        instances: Whether each instance of a pipeline has series of its own. Say `False` where there
            may be many, one per tenant say: they are added up then.

    Raises:
        MisuseError: The registry has these metrics already, or is none of the client's.
        OptionsError: `buckets` are no rising numbers.

    Example:
        >>> listener = PrometheusListener()
        >>> registry = ResiliencePipelineRegistry(listeners=[listener])
        >>> listener.watch(registry)
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        buckets: Sequence[float] = _facts.BUCKETS,
        instances: bool = True,
    ) -> None:
        registry = REGISTRY if registry is None else registry
        if not isinstance(registry, CollectorRegistry):
            msg = (
                f"registry must be a CollectorRegistry of Prometheus's client, got {registry!r}; a "
                f"registry of pipelines is for pipelines= or watch()"
            )
            raise MisuseError(msg)
        buckets = _checked_buckets(buckets)
        # In no registry but by way of the collector, so that they come and go together.
        self._events = Counter(
            "resilience_strategy_events",
            "What happened in pipelines and their strategies.",
            _EVENT_LABELS,
            registry=None,
        )
        self._attempts = Histogram(
            "resilience_strategy_attempt_duration_seconds",
            "How long the attempts of retries and hedging took.",
            (*_EVENT_LABELS, "outcome", "attempt_number", "attempt_handled"),
            registry=None,
            buckets=buckets,
        )
        self._pipelines = Histogram(
            "resilience_pipeline_duration_seconds",
            "How long executions of pipelines took; of streams, until their first chunk.",
            (*_EVENT_LABELS, "outcome"),
            registry=None,
            buckets=buckets,
        )
        self._circuits = _facts.Circuits()
        self._watched: list[ResiliencePipelineRegistry] = []
        self._lock = RLock()  # see `_facts.InTurn`
        self._tell_in_turn = _facts.InTurn(self._tell)
        self._instances = instances
        self._closed = False
        self._registry = registry
        self._collector = _Collector(self)
        try:
            registry.register(self._collector)
        except ValueError as error:
            msg = (
                "the registry has metrics of resilience_pipeline already: use the listener there "
                "is, end it first, or give another CollectorRegistry"
            )
            raise MisuseError(msg) from error

    def watch(self, pipelines: ResiliencePipelineRegistry) -> None:
        """Show the breakers and limiters of a registry of pipelines as gauges, whenever there is a scrape.

        Without a registry only breakers are known, each from its first transition on. With one, what
        its `health()` says is what is shown, and transitions elsewhere are not.

        Args:
            pipelines: The registry, which need not have this listener.
        """
        with self._lock:
            if all(each is not pipelines for each in self._watched):
                self._watched = [*self._watched, pipelines]

    def close(self) -> None:
        """Count nothing more, and take the metrics out of the client's registry."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._watched = []
        self._registry.unregister(self._collector)

    def __call__(self, event: TelemetryEvent) -> None:
        """Be told of an event."""
        self._tell_in_turn(event)

    def _tell(self, event: TelemetryEvent, late: bool) -> None:  # noqa: ARG002 - as good as any
        if self._closed:
            return
        self._circuits.note(event)
        labels = _labels(event, self._instances)
        if not isinstance(event, PipelineExecuted | AttemptCompleted):
            self._events.labels(*labels).inc()
            return
        seconds = _facts.seconds_of(event)
        if seconds is None:
            return
        outcome = _facts.came_to(event)
        if isinstance(event, AttemptCompleted):
            attempt = str(_facts.attempt_of(event)), "true" if event.handled else "false"
            self._attempts.labels(*labels, outcome, *attempt).observe(seconds)
        else:
            self._pipelines.labels(*labels, outcome).observe(seconds)

    def __repr__(self) -> str:
        """Say whether it is closed."""
        return f"<PrometheusListener{', closed' if self._closed else ''}>"

    def _states(self) -> Mapping[_facts.Place, _facts.State]:
        watched = self._watched
        states = self._circuits.states() if not watched else _facts.states_in(*watched)
        return states if self._instances else _facts.without_instances(states)


_PLACE_LABELS = ("pipeline_name", "pipeline_instance", "strategy_name")
_EVENT_LABELS = (
    "event_name",
    "event_severity",
    *_PLACE_LABELS,
    "operation_key",
    "exception_type",
)


def _labels(event: TelemetryEvent, instances: bool) -> tuple[str, ...]:
    """Give the values of `_EVENT_LABELS`; to Prometheus an empty one is one that is not there."""
    error = _facts.error_of(event)
    instance = event.instance if instances else None
    names = event.pipeline_name, instance, event.strategy_name, event.operation_key
    return (
        event.name,
        _facts.severity_of(event),
        *("" if name is None else str(name) for name in names),
        "" if error is None else _facts.type_of(error),
    )


#: Name and description of each gauge, by what it is called in the figures of a strategy.
_GAUGES = (
    ("limit", "resilience_concurrency_limiter_permits_limit", "Calls that may be inside."),
    ("used", "resilience_concurrency_limiter_permits_used", "Calls that are inside."),
    ("queued", "resilience_limiter_queued", "Calls that wait for a limiter's permit."),
    ("available", "resilience_rate_limiter_permits_available", "Permits to be had now."),
)


class _Collector(Collector):
    """What the client's registry asks at a scrape."""

    def __init__(self, listener: PrometheusListener) -> None:
        self._listener = listener

    def describe(self) -> Iterable[Metric]:
        """Give all names there may be, so that they are taken."""
        return [*self._counted(describe=True), *_gauges({})]

    def collect(self) -> Iterator[Metric]:
        yield from self._counted(describe=False)
        # One look at the health for all gauges: they fit together.
        yield from _gauges(self._listener._states())

    def _counted(self, *, describe: bool) -> Iterator[Metric]:
        listener = self._listener
        for metric in (listener._events, listener._attempts, listener._pipelines):
            yield from metric.describe() if describe else metric.collect()


def _gauges(states: Mapping[_facts.Place, _facts.State]) -> list[Metric]:
    circuits = GaugeMetricFamily(
        "resilience_circuit_breaker_state",
        "How many circuits are in a state: 1 or 0, but for state per key.",
        labels=(*_PLACE_LABELS, "state"),
    )
    families = {
        figure: GaugeMetricFamily(name, description, labels=_PLACE_LABELS)
        for figure, name, description in _GAUGES
    }
    for place, state in states.items():
        labels = ["" if name is None else name for name in place]
        for name in _facts.STATES if state.circuits else ():
            circuits.add_metric([*labels, name], state.circuits.get(name, 0))
        for figure, value in state.figures.items():
            families[figure].add_metric(labels, value)
    return [circuits, *families.values()]


def _checked_buckets(buckets: Sequence[Any]) -> tuple[float, ...]:
    """Refuse what the client would refuse with less to say, or not at all."""
    is_list = isinstance(buckets, Sequence) and not isinstance(buckets, str)
    bounds: tuple[Any, ...] = tuple(buckets) if is_list else ()
    are_numbers = all(
        isinstance(bound, int | float) and not isinstance(bound, bool) and not isnan(bound)
        for bound in bounds
    )
    if bounds and are_numbers and all(one < other for one, other in pairwise(bounds)):
        return bounds
    problem = f"buckets must be rising numbers of seconds, got {buckets!r}"
    msg = f"bad options for PrometheusListener: {problem}"
    raise OptionsError(msg, (problem,))


for _name in __all__:
    globals()[_name].__module__ = __name__
