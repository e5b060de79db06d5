"""Resilience strategies for async Python, chained into one pipeline.

A map of the rooms:

- `ResiliencePipelineBuilder` (`_builder`) folds strategies into a `ResiliencePipeline`
  (`_pipeline`: start there).
- `strategies` holds one module per strategy; `_predicates` says what counts as a failure.
- `_stream` guards streams up to their first chunk.
- `runtime` is the seam to the event loops and clocks.
- `_context`, `_outcome` and `_errors` are what travels.
- `_registry` keeps named pipelines, built once, reloaded while they serve; `_configuration` reads them from
  a file.
- `telemetry` tells listeners and the log what happens.
- `testing` has a virtual clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _lazy, strategies, telemetry
from ._builder import ResiliencePipelineBuilder
from ._context import Properties, PropertyKey, ResilienceContext, current_context
from ._errors import (
    BrokenCircuitError,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    IsolatedCircuitError,
    LockRejectedError,
    MisuseError,
    OptionsError,
    RateLimiterRejectedError,
    RecordingNotFoundError,
    ResilienceError,
    ResumeError,
    TimeoutRejectedError,
)
from ._outcome import Attempt, Failure, Outcome, Rejected, Success
from ._pipeline import ResiliencePipeline
from ._predicates import OutcomeEvent, Predicate, handle, handle_inner, handle_result
from .strategies import Strategy
from .telemetry import (
    AttemptCompleted,
    CloseErrorEvent,
    PipelineExecuted,
    PipelineExecuting,
    ReloadEvent,
    ReloadFailedEvent,
)

if TYPE_CHECKING:
    from ._durations import Duration
    from ._registry import ResiliencePipelineRegistry
    from ._stream import ResilienceStream
    from ._sync import SyncResilienceStream
    from .strategies import (
        BreakDurationEvent,
        Cache,
        CacheControl,
        CacheKeyEvent,
        CacheStaleEvent,
        CacheStatistics,
        ChaosBehavior,
        ChaosBehaviorEvent,
        ChaosEvent,
        ChaosFault,
        ChaosFaultEvent,
        ChaosLatency,
        ChaosLatencyEvent,
        ChaosOutcome,
        ChaosOutcomeEvent,
        CircuitBreaker,
        CircuitBreakerControl,
        CircuitClosedEvent,
        CircuitHalfOpenedEvent,
        CircuitMetrics,
        CircuitOpenedEvent,
        ConcurrencyLimiter,
        ConcurrencyLimiterRejectedEvent,
        Fallback,
        FallbackEvent,
        FixedWindow,
        Hedging,
        HedgingActionEvent,
        HedgingDelayEvent,
        HedgingEvent,
        KeysExceededEvent,
        Lock,
        LockRejectedEvent,
        PercentileDelay,
        RateLimiter,
        RateLimiterRejectedEvent,
        RecordReplay,
        RecordReplayKeyEvent,
        ResilienceLock,
        Retry,
        RetryBudget,
        RetryBudgetExhaustedEvent,
        RetryDelayEvent,
        RetryEvent,
        RetryResumeEvent,
        SlidingWindow,
        SupportsRateLimit,
        Timeout,
        TimeoutEvent,
        TimeoutGeneratorEvent,
        TokenBucket,
    )

__all__ = [
    "Attempt",
    "AttemptCompleted",
    "BreakDurationEvent",
    "BrokenCircuitError",
    "Cache",
    "CacheControl",
    "CacheKeyEvent",
    "CacheStaleEvent",
    "CacheStatistics",
    "ChaosBehavior",
    "ChaosBehaviorEvent",
    "ChaosEvent",
    "ChaosFault",
    "ChaosFaultEvent",
    "ChaosLatency",
    "ChaosLatencyEvent",
    "ChaosOutcome",
    "ChaosOutcomeEvent",
    "CircuitBreaker",
    "CircuitBreakerControl",
    "CircuitClosedEvent",
    "CircuitHalfOpenedEvent",
    "CircuitMetrics",
    "CircuitOpenedEvent",
    "CloseErrorEvent",
    "ConcurrencyLimiter",
    "ConcurrencyLimiterRejectedError",
    "ConcurrencyLimiterRejectedEvent",
    "Duration",
    "ExecutionRejectedError",
    "Failure",
    "Fallback",
    "FallbackEvent",
    "FixedWindow",
    "Hedging",
    "HedgingActionEvent",
    "HedgingDelayEvent",
    "HedgingEvent",
    "IsolatedCircuitError",
    "KeysExceededEvent",
    "Lock",
    "LockRejectedError",
    "LockRejectedEvent",
    "MisuseError",
    "OptionsError",
    "Outcome",
    "OutcomeEvent",
    "PercentileDelay",
    "PipelineExecuted",
    "PipelineExecuting",
    "Predicate",
    "Properties",
    "PropertyKey",
    "RateLimiter",
    "RateLimiterRejectedError",
    "RateLimiterRejectedEvent",
    "RecordReplay",
    "RecordReplayKeyEvent",
    "RecordingNotFoundError",
    "Rejected",
    "ReloadEvent",
    "ReloadFailedEvent",
    "ResilienceContext",
    "ResilienceError",
    "ResilienceLock",
    "ResiliencePipeline",
    "ResiliencePipelineBuilder",
    "ResiliencePipelineRegistry",
    "ResilienceStream",
    "ResumeError",
    "Retry",
    "RetryBudget",
    "RetryBudgetExhaustedEvent",
    "RetryDelayEvent",
    "RetryEvent",
    "RetryResumeEvent",
    "SlidingWindow",
    "Strategy",
    "Success",
    "SupportsRateLimit",
    "SyncResilienceStream",
    "Timeout",
    "TimeoutEvent",
    "TimeoutGeneratorEvent",
    "TimeoutRejectedError",
    "TokenBucket",
    "current_context",
    "handle",
    "handle_inner",
    "handle_result",
    "strategies",
    "telemetry",
]

# Tracebacks, reprs and pickles show and keep the public path, whichever file a class lives in.
for _name in __all__:
    if _name != "Strategy" and getattr(globals().get(_name), "__module__", "").startswith(
        f"{__name__}."
    ):
        globals()[_name].__module__ = __name__


if not TYPE_CHECKING:  # to which every name would be one that is there
    __getattr__, __dir__ = _lazy.lazily(
        __name__,
        {
            **{_name: ".strategies" for _name in strategies.__all__ if _name in __all__},
            "Duration": "._durations",
            "ResiliencePipelineRegistry": "._registry",
            "ResilienceStream": "._stream",
            "SyncResilienceStream": "._sync",
        },
        shown_as=__name__,
    )
