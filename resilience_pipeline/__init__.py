"""Resilience strategies for async Python, chained into one pipeline.

A map of the rooms:

- `ResiliencePipelineBuilder` (`_builder`) folds strategies into a `ResiliencePipeline`
  (`_pipeline`: start there).
- `strategies` holds one module per strategy; `_predicates` says what counts as a failure.
- `_stream` guards streams up to their first chunk.
- `runtime` is the seam to the event loops and clocks.
- `_context`, `_outcome` and `_errors` are what travels.
- `testing` has a virtual clock.
"""

from __future__ import annotations

from . import strategies
from ._builder import ResiliencePipelineBuilder
from ._context import Properties, PropertyKey, ResilienceContext, current_context
from ._durations import Duration
from ._errors import (
    BrokenCircuitError,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    IsolatedCircuitError,
    MisuseError,
    OptionsError,
    RateLimiterRejectedError,
    ResilienceError,
    ResumeError,
    TimeoutRejectedError,
)
from ._outcome import Attempt, Failure, Outcome, Rejected, Success
from ._pipeline import ResiliencePipeline
from ._predicates import OutcomeEvent, Predicate, handle, handle_inner, handle_result
from ._stream import ResilienceStream
from ._sync import SyncResilienceStream
from .strategies import (
    BreakDurationEvent,
    Cache,
    CacheControl,
    CacheKeyEvent,
    CacheStaleEvent,
    CacheStatistics,
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
    PercentileDelay,
    RateLimiter,
    RateLimiterRejectedEvent,
    Retry,
    RetryDelayEvent,
    RetryEvent,
    RetryResumeEvent,
    SlidingWindow,
    Strategy,
    SupportsRateLimit,
    Timeout,
    TimeoutEvent,
    TimeoutGeneratorEvent,
    TokenBucket,
)

__all__ = [
    "Attempt",
    "BreakDurationEvent",
    "BrokenCircuitError",
    "Cache",
    "CacheControl",
    "CacheKeyEvent",
    "CacheStaleEvent",
    "CacheStatistics",
    "CircuitBreaker",
    "CircuitBreakerControl",
    "CircuitClosedEvent",
    "CircuitHalfOpenedEvent",
    "CircuitMetrics",
    "CircuitOpenedEvent",
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
    "MisuseError",
    "OptionsError",
    "Outcome",
    "OutcomeEvent",
    "PercentileDelay",
    "Predicate",
    "Properties",
    "PropertyKey",
    "RateLimiter",
    "RateLimiterRejectedError",
    "RateLimiterRejectedEvent",
    "Rejected",
    "ResilienceContext",
    "ResilienceError",
    "ResiliencePipeline",
    "ResiliencePipelineBuilder",
    "ResilienceStream",
    "ResumeError",
    "Retry",
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
]

# Tracebacks, reprs and pickles show and keep the public path, whichever file a class lives in.
for _name in __all__:
    if _name != "Strategy" and getattr(globals()[_name], "__module__", "").startswith(
        f"{__name__}."
    ):
        globals()[_name].__module__ = __name__
