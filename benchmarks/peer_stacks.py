"""The stack, streams and synchronous calls done with what others have published.

The parts come from `peers.py`, which says how they are used. Where a peer offers one part of a job, the
parts are put together as its users do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import wraps
from typing import Any, TypeAlias

from .peers import Call, Peer, Peers, breakers, hyx_timeout, pyresilience_breaker, retries

# Limiter, four attempts, breaker, ten seconds -----------------------------------------------------


def _limited(fn: Call) -> Any:
    """Let so many in, as one does where a library has no limiter of its own."""
    permits = asyncio.Semaphore(20_000)

    @wraps(fn)
    async def call() -> None:
        async with permits:
            await fn()

    return call


def _timed(fn: Call) -> Any:
    async def call() -> None:
        async with asyncio.timeout(10):
            await fn()

    return call


def _mix(retry: str) -> Peer:
    """Put a retry together with circuitbreaker and asyncio's semaphore and time limit."""

    def stack(fn: Call) -> Any:
        broken = breakers(10, 5)["circuitbreaker"](_timed(fn))
        return _limited(retries(1)[retry](broken))

    return stack


def _hyx_stack(fn: Call) -> Any:
    from hyx.bulkhead import bulkhead

    broken = breakers(10, 5)["hyx"](hyx_timeout(fn))
    return bulkhead(max_concurrency=20_000, max_capacity=20_000)(retries(1)["hyx"](broken))


def _nopanic_stack(fn: Call) -> Any:
    from nopanic import bulkhead, circuit_breaker, compose, retry, timeout

    return compose(
        bulkhead(20_000),
        retry(attempts=4, on=Exception, backoff=1),
        circuit_breaker(failure_threshold=0.5, min_calls=10, reset_timeout=5),
        timeout(10),
    )(fn)


def _pyresilience_stack(fn: Call) -> Any:
    from pyresilience import BulkheadConfig, RetryConfig, TimeoutConfig, resilient

    return resilient(
        bulkhead=BulkheadConfig(max_concurrent=20_000),
        retry=RetryConfig(max_attempts=4, delay=1, backoff_factor=1, jitter=False),
        circuit_breaker=pyresilience_breaker(10, 5),
        timeout=TimeoutConfig(seconds=10),
    )(fn)


STACK: Peers = {
    "tenacity + circuitbreaker + asyncio": _mix("tenacity"),
    "stamina + circuitbreaker + asyncio": _mix("stamina"),
    "backoff + circuitbreaker + asyncio": _mix("backoff"),
    "hyx": _hyx_stack,
    "nopanic": _nopanic_stack,
    "pyresilience": _pyresilience_stack,
}


# Streams -----------------------------------------------------------------------------------------

Connect: TypeAlias = Callable[[int], AsyncGenerator[int, None]]


def _stamina_stream(connect: Connect) -> Any:
    return retries(1)["stamina"](connect)


def _nopanic_stream(connect: Connect) -> Any:
    from nopanic import circuit_breaker, compose, retry

    # Its time limit bounds every chunk and not the way to the first, so it would do another job.
    return compose(
        retry(attempts=4, on=Exception, backoff=1),
        circuit_breaker(failure_threshold=0.5, min_calls=10, reset_timeout=5),
    )(connect)


STREAM: Peers = {"stamina": _stamina_stream, "nopanic": _nopanic_stream}


# Synchronous: four attempts, breaker, limiter ------------------------------------------------------


def _sync_limited(fn: Callable[[], object]) -> Callable[[], object]:
    from threading import BoundedSemaphore

    permits = BoundedSemaphore(100)

    def call() -> object:
        with permits:
            return fn()

    return call


def _tenacity_and_pybreaker(fn: Callable[[], object]) -> Any:
    import pybreaker
    import tenacity

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_fixed(1), reraise=True
    )
    breaker = pybreaker.CircuitBreaker(fail_max=10, reset_timeout=5)
    limited = _sync_limited(fn)
    # Called, and not used as a decorator: that copies the retry for each call, and costs more.
    return lambda: retrying(breaker.call, limited)


def _backoff_and_circuitbreaker(fn: Callable[[], object]) -> Any:
    broken = breakers(10, 5)["circuitbreaker"](_sync_limited(fn))
    return retries(1)["backoff"](broken)


def _nopanic_sync(fn: Callable[[], object]) -> Any:
    from nopanic import bulkhead, circuit_breaker, compose, retry

    return compose(
        retry(attempts=4, on=Exception, backoff=1),
        circuit_breaker(failure_threshold=0.5, min_calls=10, reset_timeout=5),
        bulkhead(100),
    )(fn)


SYNC_MIX = "tenacity + pybreaker + BoundedSemaphore"

SYNC_STACK: Peers = {
    SYNC_MIX: _tenacity_and_pybreaker,
    "backoff + circuitbreaker + BoundedSemaphore": _backoff_and_circuitbreaker,
    "nopanic": _nopanic_sync,
}
