"""The strategies, and what it takes to write one.

Each option class is a strategy: `builder.add(Retry(...))` and `builder.add_retry(...)` are the
same. A strategy of one's own derives from `Strategy` and implements `bind(next, site)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._base import Handler, Site, Strategy
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

if TYPE_CHECKING:
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

__all__ = [
    "BreakDurationEvent",
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


#: Strategies that most programs do without: each is imported when it is asked for.
_LATER: dict[str, str] = {name: "_chaos" for name in __all__ if name.startswith("Chaos")}


if not TYPE_CHECKING:  # who would take every name for one that is there

    def __getattr__(name: str) -> Any:
        """Import what has been left for later."""
        if name not in _LATER:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        from importlib import import_module

        globals()[name] = found = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
        return found


def __dir__() -> list[str]:
    """List those too."""
    return sorted({*globals(), *_LATER})
