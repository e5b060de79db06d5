"""What a pipeline itself tells: that a call has entered it, and what it has left with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from .._context import ResilienceContext
from .._outcome import Failure, Rejected, Success
from .._switches import switches
from ._events import CloseErrorEvent, PipelineExecuted, PipelineExecuting, TelemetryEvent
from ._listeners import Listener, deliver


class Outlet:
    """Where a pipeline's own events go.

    Attributes:
        pipeline_name: The pipeline's name, or `None`.
        instance: Its instance name, or `None`.
        listeners: Who listens to it, beside those who listen to all.
        now: Reads its clock.
    """

    __slots__ = ("instance", "listeners", "now", "pipeline_name")

    def __init__(
        self,
        pipeline_name: str | None,
        instance: str | None,
        listeners: tuple[Listener, ...],
        now: Callable[[], float],
    ) -> None:
        self.pipeline_name = pipeline_name
        self.instance = instance
        self.listeners = listeners
        self.now = now

    def wants(self, kind: type[TelemetryEvent]) -> bool:
        """Whether anybody is to be told of such events."""
        if self.listeners or switches.listeners:
            return True
        return switches.is_logged(kind, kind.severity)

    def report(self, event: TelemetryEvent, strategy_name: str | None = None) -> None:
        """Tell all listeners of an event; `strategy_name` is for what does a strategy's work."""
        event._place(self.pipeline_name, self.instance, strategy_name)
        deliver(event, self.listeners)

    def watched(
        self, inside: Callable[[ResilienceContext], Awaitable[Any]]
    ) -> Callable[[ResilienceContext], Awaitable[Any]]:
        """Have listeners told of what goes through a handler, and of what comes out."""

        async def handle(context: ResilienceContext) -> Any:
            if self.wants(PipelineExecuting):
                self._tell_of_begin(context)
            began = self.now()
            try:
                result = await inside(context)
            except Exception as error:
                self._tell_of_error(context, began, error)
                raise
            except BaseException:
                self._tell_of_outcome(context, began, None)
                raise
            if self.wants(PipelineExecuted):
                self._tell_of_outcome(context, began, context.outcome_of_result(result))
            return result

        return handle

    def _tell_of_begin(self, context: ResilienceContext) -> None:
        try:
            self.report(PipelineExecuting(context=context))
        except BaseException:
            # An interrupt. Those who have been told of the begin wait for the end: a span, say, is open.
            self._tell_of_outcome(context, self.now(), None)
            raise

    def _tell_of_error(self, context: ResilienceContext, began: float, error: Exception) -> None:
        self._tell_of_outcome(context, began, context.outcome_of_error(error))

    def _tell_of_outcome(
        self,
        context: ResilienceContext,
        began: float,
        outcome: Success[Any] | Rejected[Any] | Failure | None,
    ) -> None:
        if self.wants(PipelineExecuted):
            duration = self.now() - began
            self.report(PipelineExecuted(context=context, outcome=outcome, duration=duration))

    def tell_of_close_error(self, context: ResilienceContext, error: Exception) -> None:
        """Tell that closing something failed which nobody will get."""
        if self.wants(CloseErrorEvent):
            self.report(CloseErrorEvent(context=context, outcome=Failure(error)))
