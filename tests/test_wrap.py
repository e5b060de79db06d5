"""`wrap` is one shape for all: each kind of function and method stays what it is, and wraps nest as pipelines do.

Each promise is held for four kinds of functions. Coroutine functions and async generator functions run on asyncio and
on trio, plain functions and generator functions in plain threads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ResilienceLock,
    ResiliencePipeline,
    ResilienceStream,
    SyncResilienceStream,
    TimeoutRejectedError,
    TokenBucket,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, Watching, tick

ASYNC = ["coroutine function", "async generator function"]
PLAIN = ["plain function", "generator function"]


class Service:
    """A method of each kind, which fails so many times and then gives what it was given."""

    def __init__(
        self,
        failures: int = 0,
        log: list[str] | None = None,
        error: type[Exception] | Exception = BoomError,
    ) -> None:
        self.calls = 0
        self._failures = failures
        self._error = error
        self._log = log

    def _begin(self) -> None:
        self.calls += 1
        if self._log is not None:
            self._log.append("call")
        if self.calls <= self._failures:
            raise self._error

    async def coroutine_function(self, a: int, *, b: int = 0) -> list[int]:
        self._begin()
        await checkpoint()
        return [a, b]

    async def async_generator_function(self, a: int, *, b: int = 0) -> AsyncIterator[int]:
        self._begin()
        yield a
        yield b

    def plain_function(self, a: int, *, b: int = 0) -> list[int]:
        self._begin()
        return [a, b]

    def generator_function(self, a: int, *, b: int = 0) -> Iterator[int]:
        self._begin()
        yield a
        yield b

    def of_kind(self, kind: str) -> Any:
        return getattr(self, kind.replace(" ", "_"))


async def result_of(made: Any) -> Any:
    """What a call of a function of an async kind comes to."""
    if inspect.iscoroutine(made):
        return await made
    assert isinstance(made, ResilienceStream)
    return [chunk async for chunk in made]


def plain_result_of(made: Any) -> Any:
    """What a call of a function of a plain kind comes to."""
    if isinstance(made, list):
        return made
    assert isinstance(made, SyncResilienceStream)
    return list(made)


def retrying(times: int = 2) -> ResiliencePipeline[Any]:
    return B().add_retry(max_retry_attempts=times, delay=0).build()


# ---- one pipeline, every kind -------------------------------------------------------------------

#: Each of the builder's strategies, in the recommended order.
FULL = (
    B(name="full")
    .add_fallback(fallback_value="replaced", should_handle=KeyError)
    .add_concurrency_limiter(100)
    .add_rate_limiter(TokenBucket(1_000_000, 1))
    .add_retry(max_retry_attempts=2, delay=0)
    .add_circuit_breaker(minimum_throughput=1_000_000)
    .build()
)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
async def test_one_pipeline_protects_functions_of_async_kinds(kind: str) -> None:
    """Arguments by position and by name; the failure is repeated."""
    service = Service(failures=1)
    assert await result_of(FULL.wrap(service.of_kind(kind))(1, b=2)) == [1, 2]
    assert service.calls == 2


@pytest.mark.parametrize("kind", PLAIN)
def test_the_same_pipeline_protects_functions_of_plain_kinds(kind: str) -> None:
    service = Service(failures=1)
    assert plain_result_of(FULL.wrap(service.of_kind(kind))(1, b=2)) == [1, 2]
    assert service.calls == 2


def test_a_coroutine_function_stays_one() -> None:
    assert inspect.iscoroutinefunction(FULL.wrap(Service().coroutine_function))


@pytest.mark.anyio
async def test_a_stream_has_what_an_async_generator_is_used_by() -> None:
    """An async iterator with `aclose`, which leaves the source."""
    left = False

    async def source() -> AsyncIterator[int]:
        nonlocal left
        try:
            yield 1
        finally:
            left = True

    stream = FULL.wrap(source)()
    assert stream.__aiter__() is stream
    assert await anext(stream) == 1
    await stream.aclose()
    assert left


@pytest.mark.parametrize("kind", PLAIN)
def test_a_function_of_a_plain_kind_needs_no_loop(kind: str) -> None:
    """It is called, not awaited."""
    wrapped = FULL.wrap(Service().of_kind(kind))
    assert not inspect.iscoroutinefunction(wrapped)
    assert not inspect.isawaitable(wrapped(1))


@pytest.mark.parametrize("kind", ASYNC + PLAIN)
def test_name_and_signature_stay(kind: str) -> None:
    fn = Service().of_kind(kind)
    for wrapped in (FULL.wrap(fn), retrying().wrap(FULL.wrap(fn))):
        assert wrapped.__name__ == kind.replace(" ", "_")
        assert inspect.signature(wrapped) == inspect.signature(fn)


class Methods(Service):
    """Each method wrapped where it is defined, by one pipeline for all of them."""

    coroutine_function = FULL.wrap(Service.coroutine_function)
    async_generator_function = FULL.wrap(Service.async_generator_function)
    plain_function = FULL.wrap(Service.plain_function)
    generator_function = FULL.wrap(Service.generator_function)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
async def test_methods_of_async_kinds_belong_to_their_object(kind: str) -> None:
    first, second = Methods(failures=1), Methods()
    assert await result_of(first.of_kind(kind)(1, b=2)) == [1, 2]
    assert await result_of(second.of_kind(kind)(3)) == [3, 0]
    assert (first.calls, second.calls) == (2, 1)


@pytest.mark.parametrize("kind", PLAIN)
def test_methods_of_plain_kinds_belong_to_their_object(kind: str) -> None:
    first, second = Methods(failures=1), Methods()
    assert plain_result_of(first.of_kind(kind)(1, b=2)) == [1, 2]
    assert plain_result_of(second.of_kind(kind)(3)) == [3, 0]
    assert (first.calls, second.calls) == (2, 1)


@pytest.mark.anyio
async def test_all_that_a_pipeline_wraps_has_one_state() -> None:
    """A circuit that is opened by calls of one kind is open for all of them, in loops and in threads."""
    control = CircuitBreakerControl()
    pipeline = (
        B().add_circuit_breaker(failure_ratio=1, minimum_throughput=2, control=control).build()
    )
    failing, service = Service(failures=2), Service()

    def read(call: Callable[[int], Any]) -> None:
        plain_result_of(call(1))

    with pytest.raises(BoomError):
        await pipeline.wrap(failing.coroutine_function)(1)
    with pytest.raises(BoomError):
        pipeline.wrap(failing.plain_function)(1)
    assert control.state == "open"
    for kind in ASYNC:
        with pytest.raises(BrokenCircuitError):
            await result_of(pipeline.wrap(service.of_kind(kind))(1))
    for kind in PLAIN:
        with pytest.raises(BrokenCircuitError):
            await anyio.to_thread.run_sync(read, pipeline.wrap(service.of_kind(kind)))
    assert service.calls == 0


# ---- wraps of wraps -----------------------------------------------------------------------------


def watching(log: list[str], *names: str) -> ResiliencePipeline[Any]:
    builder: Any = B(name="".join(names))
    for name in names:
        builder.add(Watching(name, log))
    return builder.build()  # type: ignore[no-any-return]


Nesting = Callable[[ResiliencePipeline[Any], ResiliencePipeline[Any], Any], Any]


def by_wraps(outer: ResiliencePipeline[Any], inner: ResiliencePipeline[Any], fn: Any) -> Any:
    return outer.wrap(inner.wrap(fn))


def by_pipelines(outer: ResiliencePipeline[Any], inner: ResiliencePipeline[Any], fn: Any) -> Any:
    return B().add_pipeline(outer).add_pipeline(inner).build().wrap(fn)


def by_partial(outer: ResiliencePipeline[Any], inner: ResiliencePipeline[Any], fn: Any) -> Any:
    return outer.wrap(partial(inner.wrap(fn)))


def by_attribute(outer: ResiliencePipeline[Any], inner: ResiliencePipeline[Any], fn: Any) -> Any:
    """As a package is hardened from outside: a bound method's place is taken by its wrap, twice."""
    service, name = fn.__self__, fn.__name__
    for pipeline in (inner, outer):
        setattr(service, name, pipeline.wrap(getattr(service, name)))
    return getattr(service, name)


def by_methods(outer: ResiliencePipeline[Any], inner: ResiliencePipeline[Any], fn: Any) -> Any:
    """Two decorators on a method."""
    wrapped = outer.wrap(inner.wrap(fn.__func__))
    service = type("Decorated", (Service,), {fn.__name__: wrapped})()
    service.__dict__ = fn.__self__.__dict__
    return getattr(service, fn.__name__)


NESTINGS = pytest.mark.parametrize(
    "nested",
    [by_pipelines, by_wraps, by_partial, by_attribute, by_methods],
    ids=lambda fn: fn.__name__,
)
ORDER = [">1", ">2", ">3", "call", "<3", "<2", "<1"]


@NESTINGS
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
async def test_nested_wraps_run_in_the_order_of_nested_pipelines(
    kind: str, nested: Nesting
) -> None:
    """The outer wrap's strategies first, and last on the way out."""
    log: list[str] = []
    call = nested(watching(log, "1", "2"), watching(log, "3"), Service(log=log).of_kind(kind))
    assert await result_of(call(1, b=2)) == [1, 2]
    assert log == ORDER


@NESTINGS
@pytest.mark.parametrize("kind", PLAIN)
def test_nested_wraps_run_in_that_order_in_threads(kind: str, nested: Nesting) -> None:
    log: list[str] = []
    call = nested(watching(log, "1", "2"), watching(log, "3"), Service(log=log).of_kind(kind))
    assert plain_result_of(call(1, b=2)) == [1, 2]
    assert log == ORDER


@NESTINGS
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
async def test_retries_of_nested_wraps_multiply(kind: str, nested: Nesting) -> None:
    """Three times three calls; that holds for a stream up to its first chunk."""
    service = Service(failures=8)
    assert await result_of(nested(retrying(), retrying(), service.of_kind(kind))(1, b=2)) == [1, 2]
    assert service.calls == 9


@NESTINGS
@pytest.mark.parametrize("kind", PLAIN)
def test_retries_of_nested_wraps_multiply_in_threads(kind: str, nested: Nesting) -> None:
    service = Service(failures=8)
    call = nested(retrying(), retrying(), service.of_kind(kind))
    assert plain_result_of(call(1, b=2)) == [1, 2]
    assert service.calls == 9


@NESTINGS
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
async def test_the_error_of_nested_wraps_is_the_functions_own(kind: str, nested: Nesting) -> None:
    """By identity, through both."""
    error = BoomError("mine")
    service = Service(failures=9, error=error)
    with pytest.raises(BoomError) as caught:
        await result_of(nested(retrying(), FULL, service.of_kind(kind))(1))
    assert caught.value is error


@NESTINGS
@pytest.mark.parametrize("kind", PLAIN)
def test_the_error_of_nested_wraps_is_the_functions_own_in_threads(
    kind: str, nested: Nesting
) -> None:
    error = BoomError("mine")
    service = Service(failures=9, error=error)
    with pytest.raises(BoomError) as caught:
        plain_result_of(nested(retrying(), FULL, service.of_kind(kind))(1))
    assert caught.value is error


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["retry outside", "timeout outside"])
@pytest.mark.parametrize("nested", [by_pipelines, by_wraps], ids=lambda fn: fn.__name__)
async def test_the_order_of_wraps_decides_what_a_time_limit_bounds(
    order: str, nested: Nesting
) -> None:
    """Retry outside: each attempt. Timeout outside: attempts and waits together."""
    clock = VirtualClock(autojump=True)
    retry = B(clock=clock).add_retry(max_retry_attempts=2, delay=0).build()
    limit = B(clock=clock).add_timeout(10).build()
    calls = 0

    async def slow() -> None:
        nonlocal calls
        calls += 1
        await clock.sleep(60)

    call = nested(retry, limit, slow) if order == "retry outside" else nested(limit, retry, slow)
    with pytest.raises(TimeoutRejectedError):
        await call()
    assert (calls, clock.now()) == ((3, 30) if order == "retry outside" else (1, 10))


@pytest.mark.anyio
@pytest.mark.parametrize("order", ["retry outside", "lock outside"])
@pytest.mark.parametrize("nested", [by_pipelines, by_wraps], ids=lambda fn: fn.__name__)
async def test_the_order_of_wraps_decides_whether_a_lock_is_held_across_the_back_off(
    order: str, nested: Nesting
) -> None:
    """Retry outside: others get in while it waits. Lock outside: they wait for it."""
    clock, lock = VirtualClock(), ResilienceLock()
    retry = B(clock=clock).add_retry(delay=10).build()
    locked = B(clock=clock).add_lock(lock).build()
    flaky = Service(failures=1).coroutine_function
    call = (
        nested(retry, locked, flaky) if order == "retry outside" else nested(locked, retry, flaky)
    )
    got_in: list[float] = []

    @locked.wrap
    async def other() -> None:
        got_in.append(clock.now())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, 1)
        await tick()
        tasks.start_soon(other)
        await tick()
        await clock.advance(10)
    assert got_in == [0 if order == "retry outside" else 10]


@pytest.mark.anyio
async def test_wrapped_methods_with_one_lock_call_each_other() -> None:
    """A method of any kind that is called inside of another one passes."""
    locked = B().add_lock().build()

    class Account:
        balance = 0

        @locked.wrap
        def read(self) -> int:
            return self.balance

        @locked.wrap
        async def deposit(self, amount: int) -> None:
            balance = self.read()
            await checkpoint()
            self.balance = balance + amount

        @locked.wrap
        async def deposit_each(self, *amounts: int) -> AsyncIterator[int]:
            for amount in amounts:
                await self.deposit(amount)
                yield self.read()

        @locked.wrap
        async def deposit_all(self, *amounts: int) -> None:
            async with self.deposit_each(*amounts) as balances:
                assert [balance async for balance in balances] == [amounts[0], sum(amounts)]

    account = Account()
    await account.deposit_all(1, 2)
    assert account.balance == 3


@pytest.mark.anyio
async def test_a_nested_wrap_of_a_stream_closes_its_source() -> None:
    """Leaving the outermost stream leaves the innermost source, before the `async with` ends."""
    left = False

    async def source() -> AsyncIterator[int]:
        nonlocal left
        try:
            yield 1
            yield 2
        finally:
            left = True

    call = retrying().wrap(FULL.wrap(retrying().wrap(source)))
    async with call() as stream:
        assert await anext(stream) == 1
    assert left


CACHE_ORDERS = pytest.mark.parametrize(
    ("order", "came_out", "calls"),
    [
        ("cache outside", True, 2),
        ("retry outside", False, 1),
        ("retry outside, no errors kept", True, 2),
    ],
)


def cached_and_retried(order: str, nested: Nesting, fn: Any) -> Any:
    """A cache that keeps errors, unless it says otherwise, inside or outside of a retry."""
    cache: ResiliencePipeline[Any]
    cache = B().add_cache(cache_errors=not order.endswith("no errors kept")).build()
    outer, inner = (cache, retrying()) if order == "cache outside" else (retrying(), cache)
    return nested(outer, inner, fn)


@CACHE_ORDERS
@pytest.mark.anyio
@pytest.mark.parametrize("kind", ASYNC)
@pytest.mark.parametrize("nested", [by_pipelines, by_wraps], ids=lambda fn: fn.__name__)
async def test_the_order_of_wraps_decides_whether_a_cache_defeats_a_retry(
    kind: str, nested: Nesting, order: str, came_out: bool, calls: int
) -> None:
    """Retry inside: what is kept came out in the end. Retry outside: it gets the kept error again and again."""
    service = Service(failures=1)
    call = cached_and_retried(order, nested, service.of_kind(kind))
    for _ in range(2):
        if came_out:
            assert await result_of(call(1, b=2)) == [1, 2]
        else:
            with pytest.raises(BoomError):
                await result_of(call(1, b=2))
    assert service.calls == calls


@CACHE_ORDERS
@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("nested", [by_pipelines, by_wraps], ids=lambda fn: fn.__name__)
def test_the_order_of_wraps_decides_that_in_threads(
    kind: str, nested: Nesting, order: str, came_out: bool, calls: int
) -> None:
    service = Service(failures=1)
    call = cached_and_retried(order, nested, service.of_kind(kind))
    for _ in range(2):
        if came_out:
            assert plain_result_of(call(1, b=2)) == [1, 2]
        else:
            with pytest.raises(BoomError):
                plain_result_of(call(1, b=2))
    assert service.calls == calls


@pytest.mark.anyio
async def test_the_innermost_wrap_has_the_context_that_the_function_sees() -> None:
    """Each wrap is an execution of its own, and counts its own attempts."""
    seen: list[tuple[str | None, int]] = []
    inner = B(name="inner").add_retry(max_retry_attempts=1, delay=0).build()
    outer = B(name="outer").add_retry(max_retry_attempts=1, delay=0).build()

    @outer.wrap
    @inner.wrap
    async def fails() -> None:
        seen.append((current_context().pipeline_name, current_context().attempt))
        raise BoomError

    with pytest.raises(BoomError):
        await fails()
    assert seen == [("inner", 0), ("inner", 1)] * 2


def decorated(fn: Callable[..., Any]) -> Callable[..., Awaitable[list[Any]]]:
    """Somebody else's decorator, which makes a coroutine function of what gives a stream."""

    @functools.wraps(fn)
    async def collect(*args: Any, **kwargs: Any) -> list[Any]:
        return [chunk async for chunk in fn(*args, **kwargs)]

    return collect


def listed(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The same for plain code."""

    @functools.wraps(fn)
    def collect(*args: Any, **kwargs: Any) -> list[Any]:
        return list(fn(*args, **kwargs))

    return collect


@pytest.mark.anyio
async def test_a_decorator_in_between_decides_the_kind() -> None:
    """What is wrapped is what the decorator gives, although it passes for the function inside."""
    service = Service(failures=2)
    call: Any = retrying(1).wrap(decorated(retrying(1).wrap(service.async_generator_function)))
    assert inspect.iscoroutinefunction(call)
    assert await call(1, b=2) == [1, 2]


def test_a_decorator_in_between_decides_the_kind_in_threads() -> None:
    service = Service(failures=2)
    call: Any = retrying(1).wrap(listed(retrying(1).wrap(service.generator_function)))
    assert call(1, b=2) == [1, 2]


def test_nested_wraps_serve_many_threads_at_once() -> None:
    """Each call has its own attempts; the pipelines' states are one."""
    control = CircuitBreakerControl()
    inner = B().add_circuit_breaker(minimum_throughput=1_000, control=control).build()
    outer = retrying(1)

    def call(number: int) -> list[int]:
        service = Service(failures=1)
        result: list[int] = outer.wrap(inner.wrap(service.plain_function))(number)
        assert service.calls == 2
        return result

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(200))) == [[number, 0] for number in range(200)]
    assert (control.metrics.throughput, control.metrics.failures) == (400, 200)
