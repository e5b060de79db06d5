"""Calls through what pipelines may have besides: a listener, a cache, a key."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder

from . import baselines
from .bench_calls import BARE, stack, stack_by_hand, work
from .bench_failures import FailingThrice
from .measure import Loop, repeat_with
from .rows import BY_HAND, OURS, call_row

#: The same pipeline, to which nobody listens.
UNHEARD = "nobody listens"


def _hear(event: object) -> None:
    """A listener that does nothing with what it hears."""


def _with_listener() -> Mapping[str, Loop]:
    silent = ResiliencePipelineBuilder().build()
    heard = ResiliencePipelineBuilder(listeners=[_hear]).build()
    return {OURS: repeat_with(heard.execute, work), UNHEARD: repeat_with(silent.execute, work)}


def _stack_with_listener() -> Mapping[str, Loop]:
    return {
        OURS: repeat_with(stack(_hear).execute, work),
        UNHEARD: repeat_with(stack().execute, work),
        BY_HAND: repeat_with(stack_by_hand().run, work),
    }


def _failing_with_listener() -> Mapping[str, Loop]:
    def retry(*listeners: Callable[[object], None]) -> ResiliencePipeline[Exception]:
        builder = ResiliencePipelineBuilder(listeners=listeners)
        return builder.add_retry(max_retry_attempts=3, delay=0).build()

    return {
        OURS: repeat_with(retry(_hear).execute, FailingThrice()),
        UNHEARD: repeat_with(retry().execute, FailingThrice()),
    }


def _cache_hit() -> Mapping[str, Loop]:
    pipeline = ResiliencePipelineBuilder().add_cache(ttl="1h").build()
    return {
        OURS: repeat_with(pipeline.execute, work),
        BY_HAND: repeat_with(baselines.Cache(1024, 3600).run, work),
    }


def _keyed(keys: int) -> Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]:
    """A limiter for each of so many keys, which take turns."""
    turns = itertools.cycle([f"host{number}" for number in range(keys)])
    return (
        ResiliencePipelineBuilder()
        .add_concurrency_limiter(100, key=lambda _: next(turns), max_keys=1_000_000)
        .build()
        .execute
    )


def _ten_keys() -> Mapping[str, Loop]:
    limiter = ResiliencePipelineBuilder().add_concurrency_limiter(100).build()
    return {
        OURS: repeat_with(_keyed(10), work),
        "without key": repeat_with(limiter.execute, work),
        "10,000 keys": repeat_with(_keyed(10_000), work),
    }


ROWS = (
    call_row("empty pipeline with one listener", bare=BARE, contenders=_with_listener),
    call_row(
        "limiter + retry + breaker + timeout with one listener",
        bare=BARE,
        contenders=_stack_with_listener,
    ),
    call_row(
        "three failures, then success, with one listener",
        bare=BARE,
        contenders=_failing_with_listener,
    ),
    call_row("cache alone, a hit", bare=BARE, contenders=_cache_hit),
    call_row("concurrency limiter, one of ten keys", bare=BARE, contenders=_ten_keys),
)
