"""The strategies, and what it takes to write one.

Each option class is a strategy: `builder.add(Retry(...))` and `builder.add_retry(...)` are the
same. A strategy of one's own derives from `Strategy` and implements `bind(next, site)`.
"""

from __future__ import annotations

from ._base import Handler, Site, Strategy
from ._cache import Cache, CacheControl, CacheStaleEvent, CacheStatistics
from ._cache_key import CacheKeyEvent
from ._circuit_breaker import (
    BreakDurationEvent,
    CircuitBreaker,
    CircuitBreakerControl,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitMetrics,
    CircuitOpenedEvent,
)
from ._concurrency_limiter import ConcurrencyLimiter, ConcurrencyLimiterRejectedEvent
from ._fallback import Fallback, FallbackEvent
from ._hedging import Hedging, HedgingActionEvent, HedgingDelayEvent, HedgingEvent
from ._percentile_delay import PercentileDelay
from ._rate_limiter import (
    FixedWindow,
    RateLimiter,
    RateLimiterRejectedEvent,
    SlidingWindow,
    SupportsRateLimit,
    TokenBucket,
)
from ._retry import Retry, RetryDelayEvent, RetryEvent, RetryResumeEvent
from ._timeout import Timeout, TimeoutEvent, TimeoutGeneratorEvent

__all__ = [
    "BreakDurationEvent",
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
    "ConcurrencyLimiterRejectedEvent",
    "Fallback",
    "FallbackEvent",
    "FixedWindow",
    "Handler",
    "Hedging",
    "HedgingActionEvent",
    "HedgingDelayEvent",
    "HedgingEvent",
    "PercentileDelay",
    "RateLimiter",
    "RateLimiterRejectedEvent",
    "Retry",
    "RetryDelayEvent",
    "RetryEvent",
    "RetryResumeEvent",
    "Site",
    "SlidingWindow",
    "Strategy",
    "SupportsRateLimit",
    "Timeout",
    "TimeoutEvent",
    "TimeoutGeneratorEvent",
    "TokenBucket",
]

for _name in ("Site", "Strategy"):  # the rest is shown as part of the package itself
    globals()[_name].__module__ = __name__
