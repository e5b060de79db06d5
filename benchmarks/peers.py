"""The same jobs done with what others have published, each used as its own documentation shows.

A peer is a decorator: it is applied once, and the decorated function is what is timed. All are set up
for the same job as the pipeline beside them: as many attempts, the same fixed delay without jitter,
the same limits. `peer_stacks.py` puts the parts together.

What a peer does in the corners differs, so a figure compares what a call costs and nothing else; the
README names the differences that matter. A peer that isn't installed is left out of the table.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeAlias

from .measure import Loop, repeat

#: What is called, and what a peer makes of it. Its type is of no use here: some peers lose it, and
#: where they aren't installed nobody knows it.
Call: TypeAlias = Callable[[], Awaitable[object]]
Peer: TypeAlias = Callable[[Any], Any]
Peers: TypeAlias = Mapping[str, Peer]

#: Whether to leave all of them out, installed or not.
left_out = False

_DISTRIBUTIONS = (
    *("aiobreaker", "aiolimiter", "anyio", "backoff", "circuitbreaker", "hyx", "nopanic"),
    *("purgatory", "pybreaker", "pyrate-limiter", "pyresilience", "stamina", "tenacity"),
)

_MANY = 1_000_000_000
_counter = itertools.count()


def decorated(peers: Peers, fn: object) -> dict[str, Any]:
    """Decorate a function by every peer that is installed."""
    made: dict[str, Any] = {}
    for name, peer in () if left_out else peers.items():
        with suppress(ModuleNotFoundError):
            made[name] = peer(fn)
    return made


def versions() -> dict[str, str]:
    """Find the versions of the peers that are compared."""
    found = {}
    for name in () if left_out else _DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


async def _nothing() -> None:
    pass


def installed(peers: Peers) -> Peers:
    """Find the peers that are installed."""
    return {name: peers[name] for name in decorated(peers, _nothing)}


def loops(peers: Peers, fn: Call) -> dict[str, Loop]:
    """Make the loops of a function decorated by every peer that is installed."""
    return {name: repeat(call) for name, call in decorated(peers, fn).items()}


# Four attempts -----------------------------------------------------------------------------------


def retries(delay: float) -> Peers:
    """Retry three times after a fixed delay."""

    def tenacity(fn: Call) -> Any:
        from tenacity import retry, stop_after_attempt, wait_fixed

        return retry(stop=stop_after_attempt(4), wait=wait_fixed(delay), reraise=True)(fn)

    def stamina(fn: Call) -> Any:
        import stamina

        return stamina.retry(
            on=Exception,
            attempts=4,
            timeout=None,
            wait_initial=delay,
            wait_max=delay,
            wait_jitter=0,
            wait_exp_base=1,
        )(fn)

    def backoff(fn: Call) -> Any:
        import backoff

        return backoff.on_exception(
            backoff.constant, Exception, max_tries=4, interval=delay, jitter=None
        )(fn)

    def hyx(fn: Call) -> Any:
        from hyx.retry import retry

        return retry(on=Exception, attempts=3, backoff=delay)(fn)

    def nopanic(fn: Call) -> Any:
        from nopanic import retry

        return retry(attempts=4, on=Exception, backoff=delay)(fn)

    def pyresilience(fn: Call) -> Any:
        from pyresilience import RetryConfig, resilient

        config = RetryConfig(max_attempts=4, delay=delay, backoff_factor=1, jitter=False)
        return resilient(retry=config)(fn)

    return {
        "tenacity": tenacity,
        "stamina": stamina,
        "backoff": backoff,
        "hyx": hyx,
        "nopanic": nopanic,
        "pyresilience": pyresilience,
    }


# Ten seconds -------------------------------------------------------------------------------------


def _wait_for(fn: Call) -> Any:
    async def call() -> None:
        await asyncio.wait_for(fn(), 10)

    return call


def _fail_after(fn: Call) -> Any:
    import anyio

    async def call() -> None:
        with anyio.fail_after(10):
            await fn()

    return call


def hyx_timeout(fn: Call) -> Any:
    """Give up after ten seconds."""
    from hyx.timeout import timeout

    return timeout(10)(fn)


def _nopanic_timeout(fn: Call) -> Any:
    from nopanic import timeout

    return timeout(10)(fn)


def _pyresilience_timeout(fn: Call) -> Any:
    from pyresilience import TimeoutConfig, resilient

    return resilient(timeout=TimeoutConfig(seconds=10))(fn)


TIMEOUT: Peers = {
    "asyncio.wait_for": _wait_for,
    "anyio.fail_after": _fail_after,
    "hyx": hyx_timeout,
    "nopanic": _nopanic_timeout,
    "pyresilience": _pyresilience_timeout,
}


# Opens after so many failures in a row -----------------------------------------------------------


def breakers(failures: int, seconds: float) -> Peers:
    """Break a circuit after so many failures, for so many seconds."""

    def circuitbreaker(fn: Call) -> Any:
        from circuitbreaker import circuit

        return circuit(
            failure_threshold=failures, recovery_timeout=seconds, name=f"circuit {next(_counter)}"
        )(fn)

    def aiobreaker(fn: Call) -> Any:
        from aiobreaker import CircuitBreaker

        pause = dt.timedelta(seconds=seconds)
        return CircuitBreaker(fail_max=failures, timeout_duration=pause)(fn)

    def purgatory(fn: Call) -> Any:
        from purgatory import AsyncCircuitBreakerFactory

        factory = AsyncCircuitBreakerFactory(default_threshold=failures, default_ttl=seconds)
        return factory("circuit")(fn)

    def hyx(fn: Call) -> Any:
        from hyx.circuitbreaker import consecutive_breaker

        return consecutive_breaker(
            failure_threshold=failures, recovery_time_secs=seconds, recovery_threshold=1
        )(fn)

    def nopanic(fn: Call) -> Any:
        from nopanic import circuit_breaker

        return circuit_breaker(failure_threshold=0.5, min_calls=failures, reset_timeout=seconds)(fn)

    def pyresilience(fn: Call) -> Any:
        from pyresilience import resilient

        return resilient(circuit_breaker=pyresilience_breaker(failures, seconds))(fn)

    return {
        "circuitbreaker": circuitbreaker,
        "aiobreaker": aiobreaker,
        "purgatory": purgatory,
        "hyx": hyx,
        "nopanic": nopanic,
        "pyresilience": pyresilience,
    }


def pyresilience_breaker(failures: int, seconds: float) -> Any:
    """Describe the circuit breaker to pyresilience."""
    from pyresilience import CircuitBreakerConfig

    return CircuitBreakerConfig(
        failure_threshold=failures, recovery_timeout=seconds, success_threshold=1
    )


# A hundred at once -------------------------------------------------------------------------------


def _capacity_limiter(fn: Call) -> Any:
    import anyio

    limiter = anyio.CapacityLimiter(100)

    async def call() -> None:
        async with limiter:
            await fn()

    return call


def _hyx_bulkhead(fn: Call) -> Any:
    from hyx.bulkhead import bulkhead

    return bulkhead(max_concurrency=100, max_capacity=200)(fn)


def _nopanic_bulkhead(fn: Call) -> Any:
    from nopanic import bulkhead

    return bulkhead(100)(fn)


def _pyresilience_bulkhead(fn: Call) -> Any:
    from pyresilience import BulkheadConfig, resilient

    return resilient(bulkhead=BulkheadConfig(max_concurrent=100, max_wait=10))(fn)


CONCURRENCY: Peers = {
    "anyio.CapacityLimiter": _capacity_limiter,
    "hyx": _hyx_bulkhead,
    "nopanic": _nopanic_bulkhead,
    "pyresilience": _pyresilience_bulkhead,
}


# More a second than anyone will call --------------------------------------------------------------


def _aiolimiter(fn: Call) -> Any:
    from aiolimiter import AsyncLimiter

    limiter = AsyncLimiter(_MANY, 1)

    async def call() -> None:
        async with limiter:
            await fn()

    return call


def _pyrate_limiter(fn: Call) -> Any:
    from pyrate_limiter import Duration, Limiter, Rate

    return Limiter(Rate(_MANY, Duration.SECOND)).as_decorator(name="calls", weight=1)(fn)


def _hyx_bucket(fn: Call) -> Any:
    from hyx.ratelimit import tokenbucket

    return tokenbucket(max_executions=_MANY, per_time_secs=1, bucket_size=_MANY)(fn)


def _nopanic_rate_limit(fn: Call) -> Any:
    from nopanic import rate_limit

    return rate_limit(_MANY, per=1, burst=_MANY)(fn)


def _pyresilience_rate_limiter(fn: Call) -> Any:
    from pyresilience import RateLimiterConfig, resilient

    return resilient(rate_limiter=RateLimiterConfig(max_calls=_MANY, period=1))(fn)


RATE: Peers = {
    "aiolimiter": _aiolimiter,
    "pyrate-limiter": _pyrate_limiter,
    "hyx": _hyx_bucket,
    "nopanic": _nopanic_rate_limit,
    "pyresilience": _pyresilience_rate_limiter,
}


# A constant in place of an error -----------------------------------------------------------------


def _hyx_fallback(fn: Call) -> Any:
    from hyx.fallback import fallback

    async def instead(*_: object) -> None:
        return None

    return fallback(instead, on=Exception)(fn)


def _nopanic_fallback(fn: Call) -> Any:
    from nopanic import fallback

    return fallback(None)(fn)


def _pyresilience_fallback(fn: Call) -> Any:
    from pyresilience import FallbackConfig, resilient

    return resilient(fallback=FallbackConfig(handler=0))(fn)


FALLBACK: Peers = {
    "hyx": _hyx_fallback,
    "nopanic": _nopanic_fallback,
    "pyresilience": _pyresilience_fallback,
}


# A second attempt beside the first ----------------------------------------------------------------


def hedges(delay: float) -> Peers:
    """Begin a second attempt after a delay."""

    def nopanic(fn: Call) -> Any:
        from nopanic import hedge

        return hedge(delay=delay)(fn)

    return {"nopanic": nopanic}
