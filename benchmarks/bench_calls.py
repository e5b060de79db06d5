"""A call that succeeds, through pipelines: none, each strategy alone, and the stack of four."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder, TokenBucket

from . import baselines, peer_stacks, peers
from .measure import Loop, repeat, repeat_with
from .rows import BY_HAND, OURS, bare_calls, by_hand, call_row


async def work() -> None:
    """The bare call: returns at once, which makes the ratios to it the harshest possible."""


async def suspending() -> None:
    """A call that waits once, one trip round the event loop."""
    await asyncio.sleep(0)


BARE = repeat(work)


def _empty() -> Mapping[str, Loop]:
    return {OURS: repeat_with(ResiliencePipeline.empty.execute, work)}


def _retry() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_retry(max_retry_attempts=3, delay=1).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Retry(attempts=4, delay=1).run, work),
        **peers.loops(peers.retries(1), work),
    }


def _timeout() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_timeout(10).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Timeout(10).run, work),
        **peers.loops(peers.TIMEOUT, work),
    }


def _breaker() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_circuit_breaker().build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.CircuitBreaker(failures=10, seconds=5).run, work),
        **peers.loops(peers.breakers(10, 5), work),
    }


def _concurrency_limiter() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(100, 100).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.ConcurrencyLimiter(100).run, work),
        **peers.loops(peers.CONCURRENCY, work),
    }


def _rate_limiter() -> Mapping[str, Loop]:
    bucket = TokenBucket(1_000_000_000, 1_000_000_000)
    pipeline = ResiliencePipelineBuilder().add_rate_limiter(bucket).build()
    limiter = baselines.RateLimiter(1_000_000_000, 1_000_000_000)
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(limiter.run, work),
        **peers.loops(peers.RATE, work),
    }


def _fallback() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_fallback(fallback_value=None).build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Fallback(None).run, work),
        **peers.loops(peers.FALLBACK, work),
    }


def stack(*listeners: Callable[[object], None]) -> ResiliencePipeline[Exception]:
    """Make the stack of four that the contract's table is about."""
    return (
        ResiliencePipelineBuilder(name="stack", listeners=listeners)
        .add_concurrency_limiter(20_000)
        .add_retry(max_retry_attempts=3, delay=1)
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=10)
        .add_timeout(10)
        .build()
    )


def stack_by_hand() -> baselines.Stack:
    return baselines.Stack(
        permits=20_000, attempts=4, delay=1, failures=10, break_seconds=5, timeout=10
    )


def _stack() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack().execute, work),
        BY_HAND: repeat_with(stack_by_hand().run, work),
        **peers.loops(peer_stacks.STACK, work),
    }


def _settled_stack() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack().settle, work),
        BY_HAND: repeat_with(stack_by_hand().run, work),
    }


def _suspending_stack() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack().execute, suspending),
        BY_HAND: repeat_with(stack_by_hand().run, suspending),
        **peers.loops(peer_stacks.STACK, suspending),
    }


ROWS = (
    call_row("empty pipeline", bare=BARE, contenders=_empty, bounds=[bare_calls(8)]),
    call_row("retry alone", bare=BARE, contenders=_retry, bounds=[bare_calls(9)]),
    call_row("timeout alone", bare=BARE, contenders=_timeout, bounds=[by_hand(0.4)]),
    call_row("circuit breaker alone", bare=BARE, contenders=_breaker),
    call_row("concurrency limiter alone", bare=BARE, contenders=_concurrency_limiter),
    call_row("rate limiter alone", bare=BARE, contenders=_rate_limiter),
    call_row("fallback alone", bare=BARE, contenders=_fallback),
    call_row(
        "limiter + retry + breaker + timeout",
        bare=BARE,
        contenders=_stack,
        bounds=[by_hand(0.45), bare_calls(28)],
    ),
    call_row("the same, through settle", bare=BARE, contenders=_settled_stack),
    call_row(
        "the same, the call suspending once",
        bare=repeat(suspending),
        contenders=_suspending_stack,
        bounds=[by_hand(0.75)],
    ),
)
