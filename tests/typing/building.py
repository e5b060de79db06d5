"""Never run: what type checkers make of a builder, its `add_*` methods and strategies of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Never, assert_type

from resilience_pipeline import (
    BrokenCircuitError,
    Cache,
    CacheControl,
    CacheKeyEvent,
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    Fallback,
    FixedWindow,
    Lock,
    LockRejectedError,
    OutcomeEvent,
    PercentileDelay,
    RateLimiter,
    RateLimiterRejectedError,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Retry,
    RetryBudget,
    RetryEvent,
    SlidingWindow,
    Timeout,
    TimeoutRejectedError,
    TokenBucket,
    handle,
    handle_inner,
    handle_result,
)
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.testing import VirtualClock

# ---- the rejections so far ----------------------------------------------------------------------

empty = ResiliencePipelineBuilder()
assert_type(empty, ResiliencePipelineBuilder[Never])
assert_type(empty.build(), ResiliencePipeline[Never])
assert_type(ResiliencePipeline.empty, ResiliencePipeline[Never])

assert_type(empty.add_retry(), ResiliencePipelineBuilder[Never])
assert_type(empty.add_fallback(fallback_value=1), ResiliencePipelineBuilder[Never])
assert_type(empty.add_hedging(), ResiliencePipelineBuilder[Never])
budget = RetryBudget(ratio=0.2, min_per_second=1, window="10s")
RetryBudget(key=lambda context: context.operation_key, max_keys=100, key_idle="1h")
assert_type(empty.add_retry(budget=budget), ResiliencePipelineBuilder[Never])
assert_type(empty.add_hedging(budget=budget), ResiliencePipelineBuilder[Never])
assert_type(budget.window, float)
assert_type(Retry(budget=None).budget, RetryBudget | None)
assert_type(empty.add_cache(ttl="10m", stale_if_error=60), ResiliencePipelineBuilder[Never])
assert_type(empty.add_timeout("10s"), ResiliencePipelineBuilder[TimeoutRejectedError])
assert_type(empty.add_circuit_breaker(), ResiliencePipelineBuilder[BrokenCircuitError])
assert_type(
    empty.add_concurrency_limiter(5), ResiliencePipelineBuilder[ConcurrencyLimiterRejectedError]
)
assert_type(
    empty.add_rate_limiter(TokenBucket(1, 1)), ResiliencePipelineBuilder[RateLimiterRejectedError]
)
assert_type(empty.add_chaos_fault(ConnectionError), ResiliencePipelineBuilder[Never])
assert_type(empty.add_chaos_latency("1s"), ResiliencePipelineBuilder[Never])
assert_type(empty.add_chaos_outcome(lambda event: None), ResiliencePipelineBuilder[Never])
assert_type(empty.add_chaos_behavior(print), ResiliencePipelineBuilder[Never])

assert_type(empty.add_lock(), ResiliencePipelineBuilder[LockRejectedError])
assert_type(
    empty.add_lock(ResilienceLock(), key=lambda context: context.operation_key, max_wait="1s"),
    ResiliencePipelineBuilder[LockRejectedError],
)
assert_type(
    empty.add_record_replay("recordings", mode="incremental", key=lambda event: list(event.args)),
    ResiliencePipelineBuilder[Never],
)
empty.add_record_replay("recordings", mode="rewind")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_type(Lock(reentrant=False).lock, ResilienceLock | None)

llm = (
    ResiliencePipelineBuilder(name="llm", instance="eu", clock=VirtualClock(), close_timeout="2s")
    .add_retry(max_retry_attempts=2, delay="500ms", backoff_type="exponential", use_jitter=True)
    .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=10)
    .add_timeout("10s")
    .build()
)
assert_type(llm, ResiliencePipeline[BrokenCircuitError | TimeoutRejectedError])

everything = (
    ResiliencePipelineBuilder()
    .add_fallback(fallback_value=None)
    .add_concurrency_limiter(5, math.inf, max_wait=timedelta(seconds=1))
    .add_rate_limiter(SlidingWindow(1, "1m"), queue_limit=3)
    .add_retry()
    .add_circuit_breaker()
    .add_timeout(1)
)
assert_type(
    everything,
    ResiliencePipelineBuilder[
        ConcurrencyLimiterRejectedError
        | RateLimiterRejectedError
        | BrokenCircuitError
        | TimeoutRejectedError
    ],
)

# The same twice is once.
assert_type(
    empty.add_timeout(2, name="whole").add_retry().add_timeout(1, name="each"),
    ResiliencePipelineBuilder[TimeoutRejectedError],
)


# ---- add and add_pipeline -----------------------------------------------------------------------

assert_type(empty.add(Retry()), ResiliencePipelineBuilder[Never])
assert_type(empty.add(Timeout(1)), ResiliencePipelineBuilder[TimeoutRejectedError])
assert_type(
    empty.add(ConcurrencyLimiter(1)).add(CircuitBreaker()),
    ResiliencePipelineBuilder[ConcurrencyLimiterRejectedError | BrokenCircuitError],
)
assert_type(
    empty.add(RateLimiter(FixedWindow(1, 1))), ResiliencePipelineBuilder[RateLimiterRejectedError]
)
assert_type(
    ResiliencePipelineBuilder().add_concurrency_limiter(1).add_pipeline(llm).build(),
    ResiliencePipeline[ConcurrencyLimiterRejectedError | BrokenCircuitError | TimeoutRejectedError],
)
assert_type(empty.add_pipeline(ResiliencePipeline.empty), ResiliencePipelineBuilder[Never])


class Picky(Strategy[ExecutionRejectedError]):
    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            raise site.reject(ExecutionRejectedError, context, "no")

        return handle


class Harmless(Strategy[Never]):
    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        return next


assert_type(empty.add(Picky()), ResiliencePipelineBuilder[ExecutionRejectedError])
assert_type(empty.add(Harmless()).add_timeout(1), ResiliencePipelineBuilder[TimeoutRejectedError])

empty.add(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add(Retry)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add(llm)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_pipeline(empty)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- a pipeline that can raise less may stand for one that can raise more -----------------------

wider: ResiliencePipeline[ExecutionRejectedError] = llm
narrower: ResiliencePipeline[TimeoutRejectedError] = llm  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
any_pipeline: ResiliencePipeline = llm  # without a parameter it may raise any rejection


# ---- one signature, on the class and on the method ----------------------------------------------

retry = Retry(
    max_retry_attempts=math.inf,
    delay=timedelta(seconds=1),
    max_delay="1m",
    should_handle=handle(OSError) | handle_result(lambda result: result is None),
    delay_generator=lambda event: event.attempt * 2,
    on_retry=lambda event: event.delay,
)
assert_type(retry.delay, float)
assert_type(retry.max_delay, float | None)
assert_type(retry.max_retry_attempts, float)
assert_type(retry.name, str)
assert_type(Timeout("10s").timeout, float)
assert_type(CircuitBreaker(break_duration=timedelta(1)).break_duration, float)
assert_type(ConcurrencyLimiter(1, max_wait="1s").max_wait, float | None)
assert_type(TokenBucket(1, 1, per="1m").per, float)
assert_type(FixedWindow(1, "1m").window, float)

empty.add_retry(delay=1)
empty.add_retry(delay=1.5)
empty.add_retry(delay="1.5s")
empty.add_retry(delay=timedelta(seconds=1.5))
empty.add_retry(use_jitter="full")
empty.add_retry(resumable=True)
empty.add_hedging(max_hedged_attempts=2, delay="500ms")
empty.add_hedging(delay=-1)
empty.add_hedging(delay_generator=PercentileDelay(0.95, min="50ms", max=5, window=100, initial=1))
empty.add_concurrency_limiter(3, hold_streams=True)
empty.add_timeout(timeout=1)
empty.add_chaos_fault("OSError", injection_rate=0.5, enabled=False)
empty.add_chaos_fault([(1, OSError), (2.5, "OSError"), (1, lambda: OSError("x"))])
empty.add_chaos_latency(timedelta(seconds=1), injection_rate=lambda event: 1 / 2)
empty.add_chaos_outcome([(1, "x"), (1, None), (1, OSError)])
empty.add_concurrency_limiter(permit_limit=1, queue_limit=2)
empty.add_circuit_breaker(control=CircuitBreakerControl())
ResiliencePipelineBuilder.add_timeout(empty, 1)

Retry(dealy=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_retry(dealy=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_retry(3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_retry(max_retry_attempts="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(backoff_type="expo")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(use_jitter="none")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(delay=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(resumable="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_hedging(2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_hedging(delay=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(budget=0.1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_hedging(budget="10%")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
RetryBudget(0.1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
RetryBudget(window=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_timeout()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_timeout([1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_concurrency_limiter(1, 2, 3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_concurrency_limiter("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_rate_limiter(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_chaos_fault()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
empty.add_chaos_fault(OSError("x"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_chaos_fault(OSError, injection_rate="1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_chaos_latency(None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_circuit_breaker(control="c")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ResiliencePipelineBuilder(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ResiliencePipelineBuilder(clock=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ResiliencePipelineBuilder(random=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
ResiliencePipelineBuilder(nmae="x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
retry.delay = 3  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


# ---- predicates, hooks and generators -----------------------------------------------------------


def predicate(event: OutcomeEvent) -> bool:
    return event.outcome.ok


async def async_predicate(event: OutcomeEvent) -> bool:
    return not event.outcome.ok


async def hook(event: RetryEvent) -> None: ...


async def generator(event: object) -> str:
    return "10s"


def wrong_hook(event: int) -> None: ...


empty.add_retry(should_handle=OSError)
empty.add_retry(should_handle=(OSError, ValueError))
empty.add_retry(should_handle=predicate)
empty.add_retry(should_handle=async_predicate)
empty.add_retry(should_handle=lambda event: event.attempt > 3)
empty.add_retry(should_handle=handle(OSError, where=lambda error: error.errno == 3))
empty.add_retry(should_handle=handle(OSError, ValueError) | handle_inner(KeyError))
empty.add_retry(on_retry=hook, delay_generator=generator)
empty.add_retry(resumable=lambda event: lambda: event.last_chunk)
empty.add_hedging(
    delay_generator=lambda event: 0.1 * event.attempt,
    action_generator=lambda event: event.callback,
    on_hedging=lambda event: (event.context, event.attempt_context, event.attempt),
)
empty.add_timeout(1, timeout_generator=generator)
empty.add_circuit_breaker(break_duration_generator=generator)
empty.add_fallback(lambda event: event.outcome.error)
empty.add(Fallback(generator))
empty.add_chaos_latency(generator, enabled=lambda event: event.context.attempt == 0)
empty.add_chaos_behavior(generator)


def cache_key(event: CacheKeyEvent) -> tuple[object, ...]:
    return event.fn, event.args, event.context.operation_key


empty.add_cache(key=cache_key, control=CacheControl())
empty.add(Cache(key=lambda event: str(event.args)))

empty.add_retry(should_handle=BaseException)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(should_handle=int)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(should_handle="OSError")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(on_retry=wrong_hook)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
empty.add_retry(on_retry=lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]
empty.add_cache(control=CircuitBreakerControl())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handle(KeyboardInterrupt)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handle(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
handle_result(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- passing the types on -----------------------------------------------------------------------


def with_timeout(
    builder: ResiliencePipelineBuilder[Never],
) -> ResiliencePipelineBuilder[TimeoutRejectedError]:
    return builder.add_timeout(1)


add: Callable[..., object] = empty.add_retry
assert_type(with_timeout(empty).build(), ResiliencePipeline[TimeoutRejectedError])

# ---- the registry -------------------------------------------------------------------------------


def statements(builder: ResiliencePipelineBuilder) -> None:
    builder.add_retry().add_timeout(1)


def of_its_own(builder: ResiliencePipelineBuilder) -> ResiliencePipelineBuilder[Any]:
    return ResiliencePipelineBuilder("other").add_retry()


async def asynchronous(builder: ResiliencePipelineBuilder) -> None: ...


registry = ResiliencePipelineRegistry(max_instances=100, clock=VirtualClock())
registry.add("a", lambda builder: builder.add_retry().add_timeout(1))
registry.add("b", statements, replace=True)
registry.add("c", lambda builder: None)
registry.reload("a")
registry.reload("a", of_its_own)
registry.load({"pipelines": {}})
assert_type(registry.get("a"), ResiliencePipeline[Exception])
assert_type(registry.get_or_add("a", statements, "x"), ResiliencePipeline[Exception])
assert_type(list(registry), list[str])
empty.add_pipeline(registry.get("a"))

registry.get(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
registry.get("a", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
registry.add("a", asynchronous)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
registry.add("a", lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]
