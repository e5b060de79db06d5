"""OpenTelemetry: spans and metrics of what happens in pipelines.

Needs the extra `opentelemetry`, which brings the API. The SDK, exporters and their settings are the
program's own business.

Interleavings that were thought through:

1. Two listeners, for two providers, hear of one call. Both get their events in the same order, so the
   one that has made its span current first ends it first, while the other's is still on top. A
   span that has ended stays current until all those on top of it have ended too (`_Execution.leave`).
   Neither may become the other's parent, see `_Execution.parent_for`.
2. A call ends in another context than it began in, because the garbage collector closes it, say. Then
   the span ends, and nothing is made current in a context that is not the call's.
3. The listener is closed while calls run. It hears of their ends, and of nothing else.
4. An event comes from a context that knows nothing of the call, such as a thread of the user's own
   strategy: the call is found by the event's context.
5. An event comes while this very thread is at work in here, or in the SDK: see `_facts.InTurn`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from threading import Lock, RLock
from time import time_ns
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

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
) -> Callable[[], None]:
    """Tell OpenTelemetry of all pipelines of the process, built before or after.

    Args:
        tracer_provider: Where spans go; the global provider by default.
        meter_provider: Where metrics go; the global provider by default.
        pipelines: A registry whose breakers and limiters are shown as gauges, see
            `OpenTelemetryListener.watch`.

    Returns:
        A function that ends it. Calls that are on their way get the end of their spans; to call it
        again does nothing.

    Raises:
        MisuseError: The process is instrumented for these providers already.

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
            tracer_provider=tracer_provider, meter_provider=meter_provider
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
    ) -> None:
        version = _facts.library_version()
        self._tracer = trace.get_tracer(_SCOPE, version, tracer_provider)
        provider = metrics.get_meter_provider() if meter_provider is None else meter_provider
        meter = provider.get_meter(_SCOPE, version)
        self._meters = _Meters(meter)
        self._circuits = _facts.Circuits()
        self._watched: list[ResiliencePipelineRegistry] = []
        self._lock = RLock()  # see `_facts.InTurn`
        self._tell_in_turn = _facts.InTurn(self._tell)
        self._open: dict[ResilienceContext, list[_Execution]] = {}
        self._closed = False
        self._when_closed: Callable[[], None] | None = None
        self._gauges = _gauges_of(provider)
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
        self._tell_in_turn(event)

    def _tell(self, event: TelemetryEvent, late: bool) -> None:
        if self._closed:
            if isinstance(event, PipelineExecuted):
                self._leave(event)
                self._finish_closing()
            return
        if isinstance(event, PipelineExecuting) and not late and not otel.get_value(_SUPPRESSED):
            # An exporter's own calls have no spans, which would have to be exported in turn.
            self._enter(event)
        try:
            self._meters.count(event)
            self._circuits.note(event)
            if isinstance(event, AttemptCompleted):
                self._tell_of_attempt(event)
            elif not isinstance(event, PipelineExecuting | PipelineExecuted):
                self._tell_of_event(event)
        finally:
            if isinstance(event, PipelineExecuted):
                self._leave(event)

    def __repr__(self) -> str:
        """Show how many calls are inside."""
        closed = ", closed" if self._closed else ""
        return f"<OpenTelemetryListener, {len(self._open)} calls inside{closed}>"

    # ---- spans

    def _enter(self, event: PipelineExecuting) -> None:
        name = event.pipeline_name
        around = _top.get()
        span = self._tracer.start_span(
            "pipeline" if name is None else f"pipeline {name}",
            context=None if around is None else around.parent_for(self),
            attributes=_named(event),
        )
        execution = _Execution(self, event, span)
        with self._lock:
            if self._closed:  # meanwhile: its end might not be told any more
                return
            # Noted before it is made current: whatever happens, its end will find it.
            self._open.setdefault(event.context, []).append(execution)
        execution.enter()

    def _leave(self, event: PipelineExecuted) -> None:
        execution = self._taken(event)
        if execution is None:
            return
        try:
            span = execution.span
            if span.is_recording():
                _describe_end(span, event)
        finally:
            execution.leave()

    def _taken(self, event: PipelineExecuted) -> _Execution | None:
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

    def _around(self, event: TelemetryEvent) -> _Execution | None:
        """Find the execution that an event belongs to.

        It may have ended: a stream that goes on after its first chunk does so in the context of its
        first pull, and a thread that lost a race in that of its attempt.
        """
        execution = _top.get()
        while execution is not None:
            if execution.listener is self and execution.is_of(event):
                return execution
            execution = execution.around
        if event.context is None:
            return None
        with self._lock:
            executions = self._open.get(event.context, [])
            return next((each for each in reversed(executions) if each.is_of(event)), None)

    def _tell_of_attempt(self, event: AttemptCompleted) -> None:
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
                **_named(event),
                "resilience.attempt.number": event.attempt,
                "resilience.attempt.handled": event.handled,
                "resilience.event.severity": _facts.severity_of(event),
            },
        )
        try:
            if span.is_recording():
                _describe_end(span, event, now)
                if event.handled and _facts.error_of(event) is None:
                    span.set_status(trace.StatusCode.ERROR, "the result is handled as a failure")
        finally:
            span.end(end_time=now)

    def _tell_of_event(self, event: TelemetryEvent) -> None:
        execution = self._around(event)
        if execution is not None and execution.span.is_recording():
            execution.span.add_event(event.name, {**_labels(event), **_figures(event)})

    # ---- gauges

    def _states(self) -> Mapping[_facts.Place, _facts.State]:
        watched = self._watched
        return _facts.states_in(*watched) if watched else self._circuits.states()


# ---- spans --------------------------------------------------------------------------------------


class _Execution:
    """A call that is inside of a pipeline: its span, and what was current before it.

    Attributes:
        listener: Whose it is.
        span: Its span.
        began: When that began, in nanoseconds.
        around: The execution that this one came on top of, of whatever listener.
        has_ended: Whether its span has.
    """

    __slots__ = (
        "_before",
        "_context",
        "_names",
        "_tokens",
        "around",
        "began",
        "has_ended",
        "listener",
        "span",
    )

    def __init__(
        self, listener: OpenTelemetryListener, event: PipelineExecuting, span: trace.Span
    ) -> None:
        self.listener = listener
        self.span = span
        self.began = time_ns()
        self.around = _top.get()
        self.has_ended = False
        self._context = event.context
        self._names = event.pipeline_name, event.instance
        self._before = otel.get_current()
        self._tokens: tuple[Token[_Execution | None], Token[otel.Context]] | None = None

    def is_of(self, event: TelemetryEvent) -> bool:
        """Whether an event tells of this execution, or of an attempt of it, which may have a context of its own."""
        if self._names != (event.pipeline_name, event.instance) or event.context is None:
            return False
        context = self._context
        return event.context is context or event.context.execution is context.execution

    def parent_for(self, listener: OpenTelemetryListener) -> otel.Context | None:
        """Give the parent of a span that comes on top of this one; `None` for what is current.

        Between two executions there is nothing, or spans of the user's. Those of the user's are
        parents as anywhere else. Where there is nothing, spans of other listeners are left out.
        """
        if trace.get_current_span() is not self.span:
            return None
        execution = self
        while execution.listener is not listener:
            around = execution.around
            if around is None or trace.get_current_span(execution._before) is not around.span:
                return execution._before
            execution = around
        return trace.set_span_in_context(execution.span)

    def enter(self) -> None:
        """Make the span current."""
        attached = otel.attach(trace.set_span_in_context(self.span))
        self._tokens = _top.set(self), attached

    def leave(self) -> None:
        """End the span, and make current what was before it and what has ended below it."""
        self.has_ended = True
        try:
            self.span.end()
        finally:
            top = _top.get()
            while top is not None and top.has_ended and top._detach():
                top = top.around

    def _detach(self) -> bool:
        """Take back what `enter` did; whether that can be done here."""
        tokens = self._tokens
        if tokens is None:
            return False
        top, attached = tokens
        try:
            _top.reset(top)
        except (ValueError, RuntimeError):
            return False  # a copy of the call's context, and not that itself; or done already
        self._tokens = None
        otel.detach(attached)
        return True


#: The execution that this code runs in, of whatever listener.
_top: ContextVar[_Execution | None] = ContextVar("resilience_pipeline.otel", default=None)


def _describe_end(
    span: trace.Span, event: PipelineExecuted | AttemptCompleted, at: int | None = None
) -> None:
    """Say of a span how it has ended; a cancellation is no error, and no success either."""
    span.set_attribute("resilience.outcome", _facts.came_to(event))
    error = _facts.error_of(event)
    if error is None:
        return
    try:
        kind = _facts.type_of(error)
        span.set_attribute("exception.type", kind)
        span.set_status(trace.StatusCode.ERROR, kind)
        span.record_exception(error, timestamp=at)
    finally:
        del error  # its traceback leads to the frames of the call


# ---- attributes ---------------------------------------------------------------------------------


def _named(event: TelemetryEvent) -> dict[str, str | int | float | bool]:
    """Say where something happened."""
    names = (
        ("resilience.pipeline.name", event.pipeline_name),
        ("resilience.pipeline.instance", event.instance),
        ("resilience.strategy.name", event.strategy_name),
        ("resilience.operation.key", event.operation_key),
    )
    return {label: str(name) for label, name in names if name is not None}


def _labels(event: TelemetryEvent) -> dict[str, str | int | float | bool]:
    """Say where something happened and what, as Polly does in its tags."""
    labels = _named(event)
    labels["resilience.event.name"] = event.name
    labels["resilience.event.severity"] = _facts.severity_of(event)
    error = _facts.error_of(event)
    if error is not None:
        labels["exception.type"] = _facts.type_of(error)
    return labels


_APART = frozenset(TelemetryEvent._fields)
#: Whole numbers have 64 bits on their way; what is infinite, or no number, says nothing.
_TOO_LARGE = 2**63


def _figures(event: TelemetryEvent) -> dict[str, int | float | bool]:
    """Give an event's own numbers; what else it has may be secret."""
    return {
        f"resilience.{'attempt.number' if name == 'attempt' else name}": value
        for name, value in vars(event).items()
        if name not in _APART and isinstance(value, int | float) and abs(value) < _TOO_LARGE
    }


# ---- metrics ------------------------------------------------------------------------------------


class _Meters:
    """The three instruments of Polly's, in seconds, as units of OpenTelemetry are."""

    def __init__(self, meter: metrics.Meter) -> None:
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

    def count(self, event: TelemetryEvent) -> None:
        labels = _labels(event)
        if not isinstance(event, PipelineExecuted | AttemptCompleted):
            self._events.add(1, labels)
            return
        seconds = _facts.seconds_of(event)
        if seconds is None:
            return
        labels["resilience.outcome"] = _facts.came_to(event)
        if isinstance(event, AttemptCompleted):
            labels["resilience.attempt.number"] = _facts.attempt_of(event)
            labels["resilience.attempt.handled"] = event.handled
            self._attempts.record(seconds, labels)
        else:
            self._pipelines.record(seconds, labels)


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


class _Gauges:
    """The gauges of one provider, for all its listeners: an instrument asks the first callback it was given alone."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: WeakSet[OpenTelemetryListener] = WeakSet()

    def observe_for(self, listener: OpenTelemetryListener, meter: metrics.Meter) -> None:
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

    def forget(self, listener: OpenTelemetryListener) -> None:
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
                labels = _place(place) | {"resilience.circuit_breaker.state": name}
                yield metrics.Observation(state.circuits.get(name, 0), labels)

    def _observing(
        self, figure: str
    ) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        def observe(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            for place, state in self._states().items():
                if figure in state.figures:
                    yield metrics.Observation(state.figures[figure], _place(place))

        return observe


def _place(place: _facts.Place) -> dict[str, str]:
    names = (
        ("resilience.pipeline.name", place.pipeline),
        ("resilience.pipeline.instance", place.instance),
        ("resilience.strategy.name", place.strategy),
    )
    return {label: name for label, name in names if name is not None}


# ---- providers ----------------------------------------------------------------------------------

_lock = Lock()
_instrumented: list[tuple[trace.TracerProvider | None, metrics.MeterProvider | None]] = []
#: The global provider is a stand-in until it has been set, and the same gauges serve both.
_of_global_provider = _Gauges()
_of_providers: WeakKeyDictionary[metrics.MeterProvider, _Gauges] = WeakKeyDictionary()


def _gauges_of(provider: metrics.MeterProvider) -> _Gauges:
    with _lock:
        known = _of_providers.get(provider)
        if known is None:
            is_global = provider is metrics.get_meter_provider()
            known = _of_providers[provider] = _of_global_provider if is_global else _Gauges()
        return known


def _forget(
    providers: tuple[trace.TracerProvider | None, metrics.MeterProvider | None],
) -> None:
    with _lock:
        _instrumented[:] = [each for each in _instrumented if each is not providers]


for _name in __all__:
    globals()[_name].__module__ = __name__
