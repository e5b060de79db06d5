"""Spans of executions: which of them is current, and who is whose parent.

Of all listeners together, because each of them makes its span current on top of what the one before
has made so: see the interleavings of `opentelemetry`.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from time import time_ns

from opentelemetry import context as otel
from opentelemetry import trace

from .. import AttemptCompleted, PipelineExecuted, PipelineExecuting
from ..telemetry import TelemetryEvent
from . import _facts
from ._otel_enrichers import Further


class Execution:
    """A call that is inside of a pipeline: its span, and what was current before it.

    Attributes:
        listener: Whose it is.
        span: Its span.
        began: When that began, in nanoseconds.
        around: The execution that this one came on top of, of whatever listener; until it has ended.
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

    def __init__(self, listener: object, event: PipelineExecuting, span: trace.Span) -> None:
        self.listener = listener
        self.span = span
        self.began = time_ns()
        self.around = top_of_all.get()
        self.has_ended = False
        self._context = event.context
        self._names = event.pipeline_name, event.instance
        self._before = otel.get_current()
        self._tokens: tuple[Token[Execution | None], Token[otel.Context]] | None = None

    def is_of(self, event: TelemetryEvent) -> bool:
        """Whether an event tells of this execution, or of an attempt of it, which may have a context of its own."""
        if self._names != (event.pipeline_name, event.instance) or event.context is None:
            return False
        context = self._context
        return event.context is context or event.context.execution is context.execution

    def parent_for(self, listener: object) -> otel.Context | None:
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
        self._tokens = top_of_all.set(self), attached

    def leave(self) -> None:
        """End the span, and make current what was before it and what has ended below it."""
        self.has_ended = True
        try:
            self.span.end()
        finally:
            while (top := top_of_all.get()) is not None and top.has_ended and top._detach():
                pass
            # Tasks that outlive the call have copies of its context, and may begin others: none of
            # them is to keep all that were before it. `_before` still leads to their spans.
            self.around = None

    def _detach(self) -> bool:
        """Take back what `enter` did; whether that can be done here."""
        tokens = self._tokens
        if tokens is None:
            return False
        top, attached = tokens
        try:
            top_of_all.reset(top)
        except (ValueError, RuntimeError):
            return False  # a copy of the call's context, and not that itself; or done already
        self._tokens = None
        otel.detach(attached)
        return True


#: The execution that this code runs in, of whatever listener.
top_of_all: ContextVar[Execution | None] = ContextVar("resilience_pipeline.otel", default=None)


def describe_end(
    span: trace.Span,
    event: PipelineExecuted | AttemptCompleted,
    further: Further | None,
    at: int | None = None,
) -> None:
    """Say of a span how it has ended; a cancellation is no error, and no success either.

    Args:
        span: The span, which records.
        event: What tells of the end.
        further: What enrichers say of it, which goes before what the library says.
        at: When it was, in nanoseconds; now by default.
    """
    error = _facts.error_of(event)
    try:
        span.set_attribute("resilience.outcome", _facts.came_to(event))
        if error is not None:
            kind = _facts.type_of(error)
            span.set_attribute("exception.type", kind)
            span.set_status(trace.StatusCode.ERROR, kind)
            span.record_exception(error, timestamp=at)
        if further is not None:
            span.set_attributes(further.attributes())
    finally:
        del error  # its traceback leads to the frames of the call
