"""OpenTelemetry: spans and metrics of what happens in pipelines.

Needs the extra `opentelemetry`, which brings the API. The SDK, exporters and their settings are the
program's own business.

Interleavings that were thought through:

1. Two listeners, for two providers, hear of one call. Both get their events in the same order, so the
   one that has made its span current first ends it first, while the other's is still on top. A
   span that has ended stays current until all those on top of it have ended too (`_otel_spans.Execution.leave`).
   Neither may become the other's parent, see `_otel_spans.Execution.parent_for`.
2. A call ends in another context than it began in, because the garbage collector closes it, say. Then
   the span ends, and nothing is made current in a context that is not the call's.
3. The listener is closed while calls run. It hears of their ends, and of nothing else.
4. An event comes from a context that knows nothing of the call, such as a thread of the user's own
   strategy: the call is found by the event's context.
5. An event comes while this very thread is at work in here, or in the SDK: see `_facts.InTurn`.
   Those of a pipeline that an enricher calls are not enriched: see `_otel_enrichers.Enrichers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock, RLock
from time import time_ns
from typing import Final

from .. import (
    AttemptCompleted,
    MisuseError,
    PipelineExecuted,
    PipelineExecuting,
    ResilienceContext,
    ResiliencePipelineRegistry,
)
from ..telemetry import TelemetryEvent, add_listener
from . import _facts

try:
    from opentelemetry import context as otel
    from opentelemetry import metrics, trace
except ModuleNotFoundError as _error:
    _msg = (
        "resilience_pipeline.integrations.opentelemetry needs the API of OpenTelemetry: "
        "pip install 'resilience-pipeline[opentelemetry]'"
    )
    raise ImportError(_msg, name=_error.name) from _error

from . import _otel_attributes as _attributes
from . import _otel_enrichers as _enrichers
from . import _otel_metrics as _metrics
from . import _otel_spans as _spans
from ._otel_enrichers import Enricher

__all__ = ["OpenTelemetryListener", "instrument"]

_SCOPE: Final = "resilience_pipeline"
#: What exporters set for their own calls, and all instrumentations look at.
_SUPPRESSED: Final[str] = getattr(otel, "_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation")


# ---- the public half ----------------------------------------------------------------------------


def instrument(
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    pipelines: ResiliencePipelineRegistry | None = None,
    enrichers: Sequence[Enricher] = (),
) -> Callable[[], None]:
    """Tell OpenTelemetry of all pipelines of the process, built before or after.

    Args:
        tracer_provider: Where spans go; the global provider by default.
        meter_provider: Where metrics go; the global provider by default.
        pipelines: A registry whose breakers and limiters are shown as gauges, see
            `OpenTelemetryListener.watch`.
        enrichers: Functions of an event that give further attributes, see `OpenTelemetryListener`.

    Returns:
        A function that ends it. Calls that are on their way get the end of their spans; to call it
        again does nothing.

    Raises:
        MisuseError: The process is instrumented for these providers already.
        OptionsError: `enrichers` is no sequence of plain functions.

    Example:
        >>> uninstrument = instrument()
    """
    providers = (tracer_provider, meter_provider)
    with _lock:
        if any(each[0] is tracer_provider and each[1] is meter_provider for each in _instrumented):
            msg = (
                "instrument() has been called for these providers already; call what it returned "
                "before you call it again"
            )
            raise MisuseError(msg)
        _instrumented.append(providers)
    try:
        listener = OpenTelemetryListener(
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            enrichers=enrichers,
        )
        if pipelines is not None:
            listener.watch(pipelines)
        listener._when_closed = add_listener(listener)
    except BaseException:
        _forget(providers)
        raise

    def uninstrument() -> None:
        _forget(providers)
        listener.close()

    return uninstrument


class OpenTelemetryListener:
    """A listener that makes spans and metrics of events; give it to a builder or a registry.

    Each execution is a span that is current for what is inside, each attempt of a retry or of hedging
    a child of it, and everything else that happens an event of it. Give a pipeline to one listener for
    each provider, in one place: a listener that hears of a call twice counts it twice.

    May be called from any thread and event loop.

    Args:
        tracer_provider: Where spans go; the global provider by default.
        meter_provider: Where metrics go; the global provider by default.
        enrichers: Functions of an event that give further attributes for it, as a mapping, or `None`:
            for its measurement, and for its span or event of a span; the execution's span gets those
            of `PipelineExecuted`. They are called in order, once for each event, where it happens, so
            they have to be quick and must not be async. What a later one gives goes before what an
            earlier one gives, and before the library's own. What one raises is logged once, and it
            gives nothing then.

    Raises:
        OptionsError: `enrichers` is no sequence of plain functions.

    Example:
        >>> listener = OpenTelemetryListener()
        >>> registry = ResiliencePipelineRegistry(listeners=[listener])
        >>> listener.watch(registry)
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        enrichers: Sequence[Enricher] = (),
    ) -> None:
        self._enrichers = _enrichers.as_enrichers(enrichers)
        version = _facts.library_version()
        self._tracer = trace.get_tracer(_SCOPE, version, tracer_provider)
        provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
        meter = provider.get_meter(_SCOPE, version)
        self._meters = _metrics.Meters(meter)
        self._circuits = _facts.Circuits()
        self._watched: list[ResiliencePipelineRegistry] = []
        self._lock = RLock()  # see `_facts.InTurn`
        self._tell_in_turn = _facts.InTurn(self._tell)
        self._open: dict[ResilienceContext, list[_spans.Execution]] = {}
        self._closed = False
        self._when_closed: Callable[[], None] | None = None
        self._gauges = _metrics.gauges_of(provider)
        self._gauges.observe_for(self, meter)

    def watch(self, pipelines: ResiliencePipelineRegistry) -> None:
        """Show the breakers and limiters of a registry as gauges, whenever metrics are collected.

        Without a registry only breakers are known, each from its first transition on. With one, what
        its `health()` says is what is shown, and transitions elsewhere are not.

        Args:
            pipelines: The registry, which need not have this listener.
        """
        with self._lock:
            if all(each is not pipelines for each in self._watched):
                self._watched = [*self._watched, pipelines]

    def close(self) -> None:
        """Tell nothing more, but for the ends of spans of calls that are on their way."""
        self._gauges.forget(self)
        with self._lock:
            self._closed = True
            self._watched = []
        self._finish_closing()

    def __call__(self, event: TelemetryEvent) -> None:
        """Be told of an event."""
        self._tell_in_turn((event, self._enrichers.further(event)))

    def _tell(self, told: tuple[TelemetryEvent, _enrichers.Further | None], late: bool) -> None:
        event, further = told
        if self._closed:
            if isinstance(event, PipelineExecuted):
                self._leave(event, further)
                self._finish_closing()
            return
        if isinstance(event, PipelineExecuting) and not late and not otel.get_value(_SUPPRESSED):
            # An exporter's own calls have no spans, which would have to be exported in turn.
            self._enter(event)
        try:
            self._meters.count(event, further)
            self._circuits.note(event)
            if isinstance(event, AttemptCompleted):
                self._tell_of_attempt(event, further)
            elif not isinstance(event, PipelineExecuting | PipelineExecuted):
                self._tell_of_event(event, further)
        finally:
            if isinstance(event, PipelineExecuted):
                self._leave(event, further)

    def __repr__(self) -> str:
        """Show how many calls are inside."""
        closed = ", closed" if self._closed else ""
        return f"<OpenTelemetryListener, {len(self._open)} calls inside{closed}>"

    # ---- spans

    def _enter(self, event: PipelineExecuting) -> None:
        name = event.pipeline_name
        around = _spans.top_of_all.get()
        span = self._tracer.start_span(
            "pipeline" if name is None else f"pipeline {name}",
            context=None if around is None else around.parent_for(self),
            attributes=_attributes.named(event),
        )
        execution = _spans.Execution(self, event, span)
        with self._lock:
            if self._closed:  # meanwhile: its end might not be told any more
                return
            # Noted before it is made current: whatever happens, its end will find it.
            self._open.setdefault(event.context, []).append(execution)
        execution.enter()

    def _leave(self, event: PipelineExecuted, further: _enrichers.Further | None) -> None:
        execution = self._taken(event)
        if execution is None:
            return
        try:
            span = execution.span
            if span.is_recording():
                _spans.describe_end(span, event, further)
        finally:
            execution.leave()

    def _taken(self, event: PipelineExecuted) -> _spans.Execution | None:
        """Find the execution that ends and keep it no longer; the innermost of several of one context."""
        context = event.context
        with self._lock:
            executions = self._open.get(context, [])
            for number in reversed(range(len(executions))):
                if executions[number].is_of(event):
                    execution = executions.pop(number)
                    if not executions:
                        del self._open[context]
                    return execution
        return None

    def _finish_closing(self) -> None:
        """Be told of no more ends when there are none to come."""
        with self._lock:
            is_done = not self._open
        if is_done and self._when_closed is not None:
            self._when_closed()

    def _around(self, event: TelemetryEvent) -> _spans.Execution | None:
        """Find the execution that an event belongs to.

        It may have ended: a stream that goes on after its first chunk does so in the context of its
        first pull, and a thread that lost a race in that of its attempt.
        """
        execution = _spans.top_of_all.get()
        while execution is not None:
            if execution.listener is self and execution.is_of(event):
                return execution
            execution = execution.around
        if event.context is None:
            return None
        with self._lock:
            executions = self._open.get(event.context, [])
            return next((each for each in reversed(executions) if each.is_of(event)), None)

    def _tell_of_attempt(self, event: AttemptCompleted, further: _enrichers.Further | None) -> None:
        execution = self._around(event)
        if execution is None:
            return
        now = time_ns()
        ran = round((_facts.seconds_of(event) or 0.0) * 1e9)
        span = self._tracer.start_span(
            "attempt",
            context=trace.set_span_in_context(execution.span),
            # Not before its parent, by whatever clock the pipeline goes.
            start_time=max(execution.began, now - ran),
            attributes={
                **_attributes.named(event),
                "resilience.attempt.number": event.attempt,
                "resilience.attempt.handled": event.handled,
                "resilience.event.severity": _facts.severity_of(event),
            },
        )
        try:
            if span.is_recording():
                _spans.describe_end(span, event, further, now)
                if event.handled and _facts.error_of(event) is None:
                    span.set_status(trace.StatusCode.ERROR, "the result is handled as a failure")
        finally:
            span.end(end_time=now)

    def _tell_of_event(self, event: TelemetryEvent, further: _enrichers.Further | None) -> None:
        execution = self._around(event)
        if execution is not None and execution.span.is_recording():
            attributes: dict[str, _enrichers.Attribute] = {
                **_attributes.labels_of(event),
                **_attributes.figures_of(event),
                **({} if further is None else further.attributes()),
            }
            execution.span.add_event(event.name, attributes)

    # ---- gauges

    def _states(self) -> Mapping[_facts.Place, _facts.State]:
        watched = self._watched
        return _facts.states_in(*watched) if watched else self._circuits.states()


# ---- providers ----------------------------------------------------------------------------------

_lock = Lock()
_instrumented: list[tuple[trace.TracerProvider | None, metrics.MeterProvider | None]] = []


def _forget(
    providers: tuple[trace.TracerProvider | None, metrics.MeterProvider | None],
) -> None:
    with _lock:
        _instrumented[:] = [each for each in _instrumented if each is not providers]


for _name in __all__:
    globals()[_name].__module__ = __name__
