"""The strategies, and what it takes to write one.

Each option class is a strategy: `builder.add(Retry(...))` and `builder.add_retry(...)` are the
same. A strategy of one's own derives from `Strategy` and implements `bind(next, site)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy
from ._base import Handler, Site, Strategy, SupportsHealth

if TYPE_CHECKING:
    from ._breaker_control import CircuitBreakerControl, CircuitMetrics
    from ._breaker_hooks import CircuitClosedEvent, CircuitHalfOpenedEvent, CircuitOpenedEvent
    from ._cache import Cache, CacheControl, CacheStaleEvent, CacheStatistics
    from ._cache_key import CacheKeyEvent
    from ._chaos import (
        ChaosBehavior,
        ChaosBehaviorEvent,
        ChaosFault,
        ChaosFaultEvent,
        ChaosLatency,
        ChaosLatencyEvent,
        ChaosOutcome,
        ChaosOutcomeEvent,
    )
    from ._chaos_generators import ChaosEvent
    from ._circuit_breaker import BreakDurationEvent, CircuitBreaker
    from ._concurrency_limiter import ConcurrencyLimiter, ConcurrencyLimiterRejectedEvent
    from ._fallback import Fallback, FallbackEvent
    from ._hedging import Hedging, HedgingActionEvent, HedgingDelayEvent, HedgingEvent
    from ._keyed import KeysExceededEvent
    from ._lock import Lock, LockRejectedEvent, ResilienceLock
    from ._percentile_delay import PercentileDelay
    from ._rate_limiter import (
        FixedWindow,
        RateLimiter,
        RateLimiterRejectedEvent,
        SlidingWindow,
        SupportsRateLimit,
        TokenBucket,
    )
    from ._record_replay import RecordReplay, RecordReplayKeyEvent
    from ._retry import Retry
    from ._retry_budget import RetryBudget, RetryBudgetExhaustedEvent
    from ._retry_run import RetryDelayEvent, RetryEvent, RetryResumeEvent
    from ._timeout import Timeout, TimeoutEvent, TimeoutGeneratorEvent

__all__ = [
    "BreakDurationEvent",
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
    "ConcurrencyLimiter",
    "ConcurrencyLimiterRejectedEvent",
    "Fallback",
    "FallbackEvent",
    "FixedWindow",
    "Handler",
    "Hedging",
    "HedgingActionEvent",
    "HedgingDelayEvent",
    "HedgingEvent",
    "KeysExceededEvent",
    "Lock",
    "LockRejectedEvent",
    "PercentileDelay",
    "RateLimiter",
    "RateLimiterRejectedEvent",
    "RecordReplay",
    "RecordReplayKeyEvent",
    "ResilienceLock",
    "Retry",
    "RetryBudget",
    "RetryBudgetExhaustedEvent",
    "RetryDelayEvent",
    "RetryEvent",
    "RetryResumeEvent",
    "Site",
    "SlidingWindow",
    "Strategy",
    "SupportsHealth",
    "SupportsRateLimit",
    "Timeout",
    "TimeoutEvent",
    "TimeoutGeneratorEvent",
    "TokenBucket",
]

if not TYPE_CHECKING:  # to which every name would be one that is there
    # What lives here is shown as part of the package itself, but for what authors of strategies need.
    __getattr__, __dir__ = _lazy.lazily(
        __name__,
        {
            "BreakDurationEvent": "._circuit_breaker",
            "Cache": "._cache",
            "CacheControl": "._cache",
            "CacheKeyEvent": "._cache_key",
            "CacheStaleEvent": "._cache",
            "CacheStatistics": "._cache",
            "ChaosBehavior": "._chaos",
            "ChaosBehaviorEvent": "._chaos",
            "ChaosEvent": "._chaos_generators",
            "ChaosFault": "._chaos",
            "ChaosFaultEvent": "._chaos",
            "ChaosLatency": "._chaos",
            "ChaosLatencyEvent": "._chaos",
            "ChaosOutcome": "._chaos",
            "ChaosOutcomeEvent": "._chaos",
            "CircuitBreaker": "._circuit_breaker",
            "CircuitBreakerControl": "._breaker_control",
            "CircuitClosedEvent": "._breaker_hooks",
            "CircuitHalfOpenedEvent": "._breaker_hooks",
            "CircuitMetrics": "._breaker_control",
            "CircuitOpenedEvent": "._breaker_hooks",
            "ConcurrencyLimiter": "._concurrency_limiter",
            "ConcurrencyLimiterRejectedEvent": "._concurrency_limiter",
            "Fallback": "._fallback",
            "FallbackEvent": "._fallback",
            "FixedWindow": "._rate_limiter",
            "Hedging": "._hedging",
            "HedgingActionEvent": "._hedging",
            "HedgingDelayEvent": "._hedging",
            "HedgingEvent": "._hedging",
            "KeysExceededEvent": "._keyed",
            "Lock": "._lock",
            "LockRejectedEvent": "._lock",
            "PercentileDelay": "._percentile_delay",
            "RateLimiter": "._rate_limiter",
            "RateLimiterRejectedEvent": "._rate_limiter",
            "RecordReplay": "._record_replay",
            "RecordReplayKeyEvent": "._record_replay",
            "ResilienceLock": "._lock",
            "Retry": "._retry",
            "RetryBudget": "._retry_budget",
            "RetryBudgetExhaustedEvent": "._retry_budget",
            "RetryDelayEvent": "._retry_run",
            "RetryEvent": "._retry_run",
            "RetryResumeEvent": "._retry_run",
            "SlidingWindow": "._rate_limiter",
            "SupportsRateLimit": "._rate_limiter",
            "Timeout": "._timeout",
            "TimeoutEvent": "._timeout",
            "TimeoutGeneratorEvent": "._timeout",
            "TokenBucket": "._rate_limiter",
        },
        shown_as=__name__.rpartition(".")[0],
    )

for _name in ("Site", "Strategy", "SupportsHealth"):
    globals()[_name].__module__ = __name__
