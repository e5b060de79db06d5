"""Synchronous calls: the pipeline in plain threads, beside what people put together for that today.

The loops here are asynchronous because the method's are; nothing in them waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic, sleep

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder

from . import measure, peer_stacks, peers
from .baselines import CircuitOpenError
from .measure import Loop, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row, call_row

_PERMITS = 100


def work() -> None:
    """The bare call: returns at once."""


def _repeat(fn: Callable[[], object]) -> Loop:
    async def loop(count: int) -> None:
        for _ in range(count):
            fn()

    return loop


def _repeat_with(fn: Callable[[Callable[[], object]], object]) -> Loop:
    async def loop(count: int) -> None:
        for _ in range(count):
            fn(work)

    return loop


BARE = _repeat(work)


def _ours() -> Loop:
    pipeline = (
        ResiliencePipelineBuilder(name="stack")
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=10)
        .add_concurrency_limiter(_PERMITS)
        .build()
    )
    return _repeat_with(pipeline.execute_sync)


class _ByHand:
    """A loop, a count of failures under a lock, and a semaphore."""

    def __init__(self) -> None:
        self._permits = threading.BoundedSemaphore(_PERMITS)
        self._lock = threading.Lock()
        self._failures = 0
        self._open_until = 0.0

    def __call__(self, fn: Callable[[], object]) -> object:
        for attempt in range(4):
            try:
                return self._attempt(fn)
            except Exception:
                if attempt == 3:
                    raise
            sleep(1)
        raise AssertionError

    def _attempt(self, fn: Callable[[], object]) -> object:
        with self._lock:
            if self._failures >= 10:
                now = monotonic()
                if now < self._open_until:
                    msg = f"call again in {self._open_until - now:g} s"
                    raise CircuitOpenError(msg)
                self._open_until = now + 5  # this call tries, others are kept out
        try:
            with self._permits:
                result = fn()
        except Exception:
            with self._lock:
                self._failures += 1
                if self._failures >= 10:
                    self._open_until = monotonic() + 5
            raise
        with self._lock:
            self._failures = 0
        return result


def _contenders() -> Mapping[str, Loop]:
    return {
        OURS: _ours(),
        BY_HAND: _repeat_with(_ByHand()),
        **{
            name: _repeat(call)
            for name, call in peers.decorated(peer_stacks.SYNC_STACK, work).items()
        },
    }


async def _stack(settings: Settings) -> Result:
    loops = _contenders()
    timings = await measure.compare(BARE, loops, settings)
    cost = f"{timings.ns(OURS):,.0f} ns"
    checks: tuple[Checked, ...] = ()
    if peer_stacks.SYNC_MIX in loops:
        share = timings.ratio(OURS, peer_stacks.SYNC_MIX)
        cost += f", {share:.2f} × peers"
        checks = (Checked(Bound(0.3, "× the peers' mix"), share),)
    return Result(
        cost=cost,
        ns={name: timings.ns(name) for name in loops},
        bare={name: timings.in_bare_calls(name) for name in loops},
        ratios={name: timings.ratio(name, BY_HAND) for name in loops},
        checks=checks,
    )


def _empty() -> Mapping[str, Loop]:
    return {OURS: _repeat_with(ResiliencePipeline.empty.execute_sync)}


def _timeout() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_timeout(10).build()
    return {OURS: _repeat_with(pipeline.execute_sync)}


ROWS = (
    call_row("synchronous: empty pipeline", bare=BARE, contenders=_empty),
    Row("synchronous: retry + breaker + limiter", _stack, BARE, _contenders),
    call_row("synchronous: timeout alone", bare=BARE, contenders=_timeout),
)
