"""What is told to listeners: the base of all events, and those that are no hook's.

Names and severities are those of Polly's table of events; what Polly does not have follows their
form. A strategy's own events are beside the strategy, because its hooks get them as well.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from .._context import ResilienceContext
from .._event import Event
from .._outcome import Failure, Rejected, Success


class Severity(IntEnum):
    """How bad news an event is; the numbers are the levels of `logging`.

    An event of severity `NONE` is told to nobody but its hook.
    """

    NONE = 0
    DEBUG = 10
    INFO = 20
    INFORMATION = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


class TelemetryEvent(Event):
    """Something that happened in a pipeline; what listeners get.

    Attributes:
        name: What happened, `"OnRetry"` say; the same for all events of a class.
        severity: How bad news it is.
        context: The execution's context; `None` where it happened outside of any.
        outcome: What an attempt or an execution came to; `None` where there is nothing to tell, or
            where it was cancelled.
        duration: Seconds that it took; `None` where it took none.
        pipeline_name: Name of the pipeline, or `None`; of the nested one, where it happened there.
        instance: The pipeline's instance name, or `None`.
        strategy_name: Name of the strategy; `None` where it was the pipeline itself.
        operation_key: The call's label, or `None`.
    """

    name: ClassVar[str] = "Event"

    #: Whether it comes with every execution, also if nothing is amiss; see `_logging`.
    _is_routine: ClassVar[bool] = False

    severity: Severity = Severity.INFO
    context: ResilienceContext | None
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: float | None
    pipeline_name: str | None = None
    instance: str | None = None
    strategy_name: str | None = None
    operation_key: str | None = None

    def _place(
        self, pipeline_name: str | None, instance: str | None, strategy_name: str | None
    ) -> None:
        """Fill in where it happened, before anybody has seen it; what was given stays."""
        fields, context = self.__dict__, self.context
        fields.setdefault("pipeline_name", pipeline_name)
        fields.setdefault("instance", instance)
        fields.setdefault("strategy_name", strategy_name)
        if context is not None:
            fields.setdefault("operation_key", context.operation_key)


class StrategyEvent(TelemetryEvent):
    """Something that a strategy tells of; derive from it for the events of a strategy of one's own.

    Give the class a `name`, a `severity` and the fields it needs. Where it happened is filled in by
    `Site.report`.

    Attributes:
        context: The execution's context.
        outcome: What an attempt came to, where there is that to tell.
        duration: Seconds that it took, where it took any.
    """

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure | None = None
    duration: float | None = None


class PipelineExecuting(StrategyEvent):
    """A call has entered a pipeline.

    Attributes:
        context: The execution's context; that of `PipelineExecuted` will be the same.
    """

    name = "PipelineExecuting"
    _is_routine = True

    severity: Severity = Severity.DEBUG


class PipelineExecuted(TelemetryEvent):
    """A call has left a pipeline; a stream, that it is handed to its consumer.

    Attributes:
        context: The execution's context, the same as that of `PipelineExecuting`.
        outcome: What came out; of a stream, its first chunk. `None` if it was cancelled or
            interrupted.
        duration: Seconds since `PipelineExecuting`.
    """

    name = "PipelineExecuted"
    _is_routine = True

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: float


class AttemptCompleted(TelemetryEvent):
    """An attempt of a retry or of hedging has ended, good or bad.

    Its severity is `INFO`, `WARNING` if it was handled, and `ERROR` if it was handled and a retry
    has no attempt left.

    Attributes:
        context: The attempt's context: with hedging a copy of the caller's, of the same
            `execution`.
        outcome: What it came to; `None` if it was cancelled, as losers of hedging are.
        duration: Seconds that it ran.
        attempt: Its number, from 0.
        handled: Whether `should_handle` says that it failed.
    """

    name = "ExecutionAttempt"
    _is_routine = True

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: float
    attempt: int
    handled: bool


class ReloadEvent(TelemetryEvent):
    """A registry is about to build a pipeline that it has given out anew, and to put that in place.

    Attributes:
        context: `None`: it concerns no execution.
    """

    name = "OnReload"
    context: None = None
    outcome: None = None
    duration: None = None


class ReloadFailedEvent(TelemetryEvent):
    """A reload has failed, and the pipeline that was there serves on.

    Attributes:
        context: `None`: it concerns no execution.
        outcome: What `configure` raised, as a `Failure`; for the other instances of a name too.
    """

    name = "ReloadFailed"
    severity: Severity = Severity.ERROR
    context: None = None
    outcome: Failure
    duration: None = None


class CloseErrorEvent(TelemetryEvent):
    """Closing something that nobody will get has failed: a discarded result, a given-up source.

    The call is none the worse for it, so the error reaches nobody else.

    Attributes:
        context: The execution's context.
        outcome: The error, as a `Failure`.
    """

    name = "OnCloseError"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    outcome: Failure
    duration: None = None
