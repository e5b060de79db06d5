"""The strategies, and what it takes to write one.

Each option class is a strategy: `builder.add(Retry(...))` and `builder.add_retry(...)` are the
same. A strategy of one's own derives from `Strategy` and implements `bind(next, site)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _lazy
from ._base import Handler, Site, Strategy

if TYPE_CHECKING:
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
    from ._retry_budget import RetryBudget, RetryBudgetExhaustedEvent
    from ._timeout import Timeout, TimeoutEvent, TimeoutGeneratorEvent

__all__ = [
    "BreakDurationEvent",
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
    "RetryBudget",
    "RetryBudgetExhaustedEvent",
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

# What lives here is shown as part of the package itself, but for what authors of strategies need.
__getattr__, __dir__ = _lazy.lazily(
    __name__,
    {
        "BreakDurationEvent": "._circuit_breaker",
        "CircuitBreaker": "._circuit_breaker",
        "CircuitBreakerControl": "._circuit_breaker",
        "CircuitClosedEvent": "._circuit_breaker",
        "CircuitHalfOpenedEvent": "._circuit_breaker",
        "CircuitMetrics": "._circuit_breaker",
        "CircuitOpenedEvent": "._circuit_breaker",
        "ConcurrencyLimiter": "._concurrency_limiter",
        "ConcurrencyLimiterRejectedEvent": "._concurrency_limiter",
        "Fallback": "._fallback",
        "FallbackEvent": "._fallback",
        "FixedWindow": "._rate_limiter",
        "Hedging": "._hedging",
        "HedgingActionEvent": "._hedging",
        "HedgingDelayEvent": "._hedging",
        "HedgingEvent": "._hedging",
        "PercentileDelay": "._percentile_delay",
        "RateLimiter": "._rate_limiter",
        "RateLimiterRejectedEvent": "._rate_limiter",
        "Retry": "._retry",
        "RetryBudget": "._retry_budget",
        "RetryBudgetExhaustedEvent": "._retry_budget",
        "RetryDelayEvent": "._retry",
        "RetryEvent": "._retry",
        "RetryResumeEvent": "._retry",
        "SlidingWindow": "._rate_limiter",
        "SupportsRateLimit": "._rate_limiter",
        "Timeout": "._timeout",
        "TimeoutEvent": "._timeout",
        "TimeoutGeneratorEvent": "._timeout",
        "TokenBucket": "._rate_limiter",
    },
    shown_as=__name__.rpartition(".")[0],
)

for _name in ("Site", "Strategy"):
    globals()[_name].__module__ = __name__
