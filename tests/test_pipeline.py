"""Calling: what `execute` takes and gives, what it refuses, and what `wrap` makes of functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import traceback
import types
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from functools import partial, singledispatch
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    CircuitBreakerControl,
    MisuseError,
    ResilienceContext,
    ResiliencePipeline,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import (
    B,
    BoomError,
    Calls,
    Watching,
    boom,
    echo,
    hang,
    ok,
    running,
    tick,
)

EMPTY = ResiliencePipeline.empty
TWICE_AGAIN = B().add_retry(max_retry_attempts=2, delay=0).build()

#: A pipeline of every strategy there is, in which a call that is good passes all of them.
FULL = (
    B(name="full")
    .add_fallback(fallback_value="replaced")
    .add_concurrency_limiter(100)
    .add_retry(max_retry_attempts=2, delay=0)
    .add_circuit_breaker(minimum_throughput=1_000_000)
    .add_timeout(3600)
    .build()
)


# ---- what is called -----------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("pipeline", [EMPTY, FULL], ids=["empty", "full"])
async def test_execute_calls_with_the_arguments_and_returns_the_result(
    pipeline: ResiliencePipeline[Any],
) -> None:
    """`execute(fn, *args)` calls `fn(*args)` and returns what that gives."""
    assert await pipeline.execute(echo) == ((), {})
    assert await pipeline.execute(echo, 1, "b", None) == ((1, "b", None), {})


@pytest.mark.anyio
async def test_keyword_arguments_by_partial_or_lambda() -> None:
    """Keyword arguments for `fn`: `functools.partial` or a lambda."""
    assert await FULL.execute(partial(echo, key=1), 2) == ((2,), {"key": 1})
    assert await FULL.execute(lambda: echo(2, key=1)) == ((2,), {"key": 1})


@pytest.mark.anyio
async def test_the_result_is_the_very_object() -> None:
    """Nothing is copied or wrapped on the way out, and falsy results are results."""
    for value in (object(), None, 0, "", [], False, StopIteration):
        assert await FULL.execute(Calls(value)) is value


async def fails() -> int:
    raise ConnectionError


class Client:
    """An object whose calls fail, and that counts them."""

    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    async def __call__(self, *_: object) -> int:
        self._count()
        return await fails()

    async def method(self) -> int:
        return await self()


def _singledispatch(count: Callable[[], None]) -> Callable[[], Any]:
    return partial(singledispatch(Client(count).__call__), 1)


def _plain(count: Callable[[], None]) -> Callable[[], Any]:
    client = Client(count)

    def call() -> Awaitable[int]:
        return client()

    return call


def _decorated(count: Callable[[], None]) -> Callable[[], Any]:
    @functools.wraps(fails)
    def call() -> Awaitable[int]:
        count()
        return fails()

    return call


def _generator_based(count: Callable[[], None]) -> Callable[[], Any]:
    @types.coroutine
    def call() -> Generator[Any, Any, int]:
        count()
        return (yield from fails().__await__())

    return call


class _Awaitable:
    def __init__(self, count: Callable[[], None]) -> None:
        self._count = count

    def __await__(self) -> Generator[Any, Any, int]:
        self._count()
        return (yield from fails().__await__())


def _fails_when_called(count: Callable[[], None]) -> Callable[[], Any]:
    def call() -> Awaitable[int]:
        count()
        raise ConnectionError

    return call


def _mock(count: Callable[[], None]) -> Callable[[], Any]:
    def effect() -> None:
        count()
        raise ConnectionError

    return AsyncMock(side_effect=effect)


@pytest.mark.anyio
@pytest.mark.parametrize("run", ["execute", "settle", "wrap"])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Client, id="object"),
        pytest.param(lambda count: partial(Client(count)), id="partial-of-object"),
        pytest.param(lambda count: partial(Client(count).method), id="partial-of-method"),
        pytest.param(lambda count: Client(count).method, id="method"),
        pytest.param(lambda count: lambda: Client(count)(), id="lambda"),
        pytest.param(_singledispatch, id="singledispatch"),
        pytest.param(_plain, id="plain-function"),
        pytest.param(_decorated, id="decorated"),
        pytest.param(_generator_based, id="generator-based"),
        pytest.param(lambda count: lambda: _Awaitable(count), id="awaitable"),
        pytest.param(_fails_when_called, id="fails-when-called"),
        pytest.param(_mock, id="AsyncMock"),
    ],
)
async def test_whatever_gives_an_awaitable_is_called_and_awaited(
    make: Callable[[Callable[[], None]], Callable[[], Any]], run: str
) -> None:
    """Case CW-01: whether a call is async is seen from what comes back, so each is tried three times."""
    calls = []
    fn = make(lambda: calls.append(1))
    if run == "settle":
        assert isinstance((await TWICE_AGAIN.settle(fn)).error, ConnectionError)
    else:
        call = TWICE_AGAIN.wrap(_through(fn)) if run == "wrap" else partial(TWICE_AGAIN.execute, fn)
        with pytest.raises(ConnectionError):
            await call()
    assert len(calls) == 3


def _through(fn: Callable[[], Any]) -> Callable[[], Any]:
    async def call() -> Any:
        return await fn()

    return call


@pytest.mark.asyncio
async def test_futures_and_tasks_are_awaited() -> None:
    """What comes back may be a future or a task."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(3)
    assert await FULL.execute(lambda: future) == 3
    assert await FULL.execute(lambda: asyncio.ensure_future(ok())) == 1


@pytest.mark.anyio
async def test_an_exception_comes_out_as_it_is() -> None:
    """PL-10: what the callback raises surfaces unwrapped, as the very object."""
    error = BoomError("mine")
    for pipeline in (EMPTY, TWICE_AGAIN, B().add_timeout(60).add_circuit_breaker().build()):
        with pytest.raises(BoomError) as caught:
            await pipeline.execute(Calls(error))
        assert caught.value is error
        assert error.__cause__ is None
        assert error.__context__ is None


@pytest.mark.anyio
async def test_a_strategys_own_exception_comes_out_as_it_is() -> None:
    """PL-10: so does what a hook raises."""
    error = KeyError("hook")

    def hook(event: object) -> None:
        raise error

    pipeline = B().add_timeout(60).add_retry(delay=0, on_retry=hook).add_concurrency_limiter(1)
    with pytest.raises(KeyError) as caught:
        await pipeline.build().execute(boom)
    assert caught.value is error


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pipeline",
    [EMPTY, TWICE_AGAIN, B().add_timeout(60).add_concurrency_limiter(1).build()],
    ids=["empty", "retry", "timeout+limiter"],
)
async def test_the_traceback_leads_to_the_callback(pipeline: ResiliencePipeline[Any]) -> None:
    """PL-12: the surfaced exception keeps the callback's frame, once, as its innermost."""
    with pytest.raises(BoomError) as caught:
        await pipeline.execute(boom)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "boom"
    assert frames.count("boom") == frames.count("execute") == 1


@pytest.mark.anyio
async def test_a_stored_exception_does_not_collect_tracebacks() -> None:
    """Raised again by one execution after another, an exception shows the way of the last one."""
    error = BoomError("stored")
    lengths = []
    for _ in range(4):
        with pytest.raises(BoomError):
            await EMPTY.execute(Calls(error.with_traceback(None)))
        lengths.append(len(traceback.extract_tb(error.__traceback__)))
    assert len(set(lengths)) == 1


@pytest.mark.anyio
async def test_many_calls_at_once_stay_apart() -> None:
    """One pipeline serves any number of calls at once; each has its own attempts, arguments, result."""
    results: dict[int, list[int]] = {}

    async def call(number: int) -> int:
        await checkpoint()
        results.setdefault(number, []).append(current_context().attempt)
        await checkpoint()
        if current_context().attempt < number % 3:
            raise BoomError
        return number

    async def run(number: int) -> None:
        assert await FULL.execute(call, number) == number

    async with anyio.create_task_group() as tasks:
        for number in range(30):
            tasks.start_soon(run, number)
    assert results == {number: list(range(number % 3 + 1)) for number in range(30)}


@pytest.mark.anyio
async def test_a_caller_cancelled_before_the_start_runs_nothing() -> None:
    """PL-08: a call whose task is cancelled before its first turn runs no strategy and no callback."""
    log: list[str] = []
    call = Calls(1)
    pipeline = B().add(Watching("1", log)).build()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await checkpoint()
        await pipeline.execute(call)
    assert scope.cancelled_caught
    assert log == []
    assert call.count == 0


@pytest.mark.asyncio
async def test_a_task_cancelled_before_its_first_turn_runs_nothing() -> None:
    """PL-08: the same with a task of asyncio's."""
    call = Calls(1)
    task = asyncio.create_task(FULL.execute(call))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.count == 0


@pytest.mark.anyio
async def test_a_strategy_that_cancels_the_caller_ends_the_call() -> None:
    """PL-09: a hook cancels the caller: what is inside is not tried again."""
    call: Calls[int] = Calls(BoomError())
    with anyio.CancelScope() as scope:
        await (
            B()
            .add_retry(max_retry_attempts=5, delay=0, on_retry=lambda _: scope.cancel())
            .build()
            .execute(call)
        )
    assert scope.cancelled_caught
    assert call.count == 1


def test_a_call_outside_of_an_event_loop_says_so() -> None:
    """What has to wait needs a running loop; without one it is a `RuntimeError` that says so."""
    execution = B().add_timeout(60).build().execute(ok)
    with pytest.raises(RuntimeError, match="within an event loop"):
        execution.send(None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pipeline",
    [
        EMPTY,
        TWICE_AGAIN,
        B().add_timeout(60).add_concurrency_limiter(1).add_fallback(fallback_value=1).build(),
        B().add_pipeline(B().add_retry(max_retry_attempts=1, delay=0).build()).build(),
    ],
    ids=["empty", "retry", "timeout+limiter+fallback", "nested"],
)
@pytest.mark.parametrize("run", ["execute", "settle"])
async def test_nothing_is_kept_of_a_finished_call(
    pipeline: ResiliencePipeline[Any], run: str
) -> None:
    """No name stays bound to an exception: errors go without the help of the garbage collector."""
    kept: list[weakref.ref[Any]] = []

    class KeptError(LookupError):
        pass

    async def call() -> None:
        error = KeptError()
        kept.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.disable()
    try:
        with contextlib.suppress(KeptError):
            await getattr(pipeline, run)(call)
        assert kept
        assert [reference() for reference in kept] == [None] * len(kept)
    finally:
        gc.enable()


# ---- options of a call --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_operation_key_and_idempotent_reach_the_context() -> None:
    """`operation_key=` and `idempotent=` are what the callback's context says."""

    async def read() -> tuple[str | None, bool]:
        context = current_context()
        return context.operation_key, context.idempotent

    assert await FULL.execute(read) == (None, True)
    assert await FULL.execute(read, operation_key="op", idempotent=False) == ("op", False)
    assert (await FULL.settle(read, operation_key="op")).unwrap() == ("op", True)


@pytest.mark.anyio
async def test_a_context_given_holds_its_own_options() -> None:
    """With `context=` its own `operation_key` and `idempotent` hold."""
    context = ResilienceContext("mine", idempotent=False)

    async def read() -> ResilienceContext:
        return current_context()

    assert await FULL.execute(read, operation_key="other", idempotent=True, context=context) is (
        context
    )
    assert (context.operation_key, context.idempotent) == ("mine", False)


@pytest.mark.anyio
async def test_what_is_no_context_is_misuse() -> None:
    """`context=` takes a `ResilienceContext` and nothing else, and says so."""
    wrong: Any = {"operation_key": "op"}
    with pytest.raises(MisuseError, match=r"ResilienceContext, got \{'operation_key'"):
        await EMPTY.execute(ok, context=wrong)
    with pytest.raises(MisuseError, match="ResilienceContext"):
        EMPTY.execute_stream(chunks, context=wrong)
    assert isinstance((await EMPTY.settle(ok, context=wrong)).error, MisuseError)


@pytest.mark.anyio
async def test_what_is_not_idempotent_is_called_once() -> None:
    """`idempotent=False`: an attempt whose callback was invoked is not repeated."""
    call: Calls[int] = Calls(BoomError(), 1)
    with pytest.raises(BoomError):
        await TWICE_AGAIN.execute(call, idempotent=False)
    assert call.count == 1


@pytest.mark.anyio
async def test_what_is_not_idempotent_is_tried_again_when_it_never_started() -> None:
    """`idempotent=False`: an attempt refused by a limiter inside the retry is repeated."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock).add_retry(max_retry_attempts=1, delay=1).add_concurrency_limiter(1).build()
    )
    call = Calls(1)
    async with (
        running(pipeline.execute, hang) as holding,
        running(partial(pipeline.execute, call, idempotent=False)),
    ):
        assert call.count == 0
        holding.cancel()
        await tick()
        await clock.advance(1)
        assert call.count == 1


# ---- misuse -------------------------------------------------------------------------------------


def returns_three() -> Any:
    return 3


def counts() -> Iterator[int]:
    yield 1


async def chunks() -> AsyncIterator[int]:
    yield 1


class Chunks:
    def __call__(self) -> Any:
        return self

    def __aiter__(self) -> AsyncIterator[int]:
        return chunks()


MISUSES: list[Any] = [
    pytest.param(returns_three, r"returns_three\(\) returned 3.*async def", id="plain"),
    pytest.param(lambda: None, r"<lambda>\(\) returned None.*async def", id="lambda"),
    pytest.param(partial(returns_three), r"partial.*returned 3.*async def", id="partial"),
    pytest.param(counts, r"counts\(\) returned <generator.*async generator", id="generator"),
    pytest.param(chunks, r"chunks\(\) returned <async_generator.*execute_stream\(\)", id="stream"),
    pytest.param(Chunks(), r"returned <.*Chunks.*execute_stream\(\)", id="async-iterable"),
    pytest.param(ok, None, id="coroutine-object"),
    pytest.param(3, r"execute\(\) takes a function, got 3", id="number"),
    pytest.param(None, r"execute\(\) takes a function, got None", id="none"),
    pytest.param("ok", r"execute\(\) takes a function, got 'ok'", id="text"),
]


def _misuse(fn: Any, pattern: str | None) -> tuple[Any, str]:
    if pattern is None:
        return fn(), r"coroutine object ok.*pass the function itself, execute\(fn, \*args\)"
    return fn, pattern


@pytest.mark.anyio
@pytest.mark.parametrize(("fn", "pattern"), MISUSES)
async def test_what_gives_no_awaitable_is_misuse(fn: Any, pattern: str | None) -> None:
    """Case CW-03: a `MisuseError`, also a `TypeError`, says what came back and what to call instead."""
    fn, pattern = _misuse(fn, pattern)
    with pytest.raises(MisuseError, match=pattern) as caught:
        await EMPTY.execute(fn)
    assert isinstance(caught.value, TypeError)


@pytest.mark.anyio
async def test_the_object_that_was_returned_instead_is_named() -> None:
    """The message names the function by where it was defined."""

    def local() -> Any:
        return 7

    with pytest.raises(MisuseError, match=r"<locals>\.local\(\) returned 7"):
        await EMPTY.execute(local)


@pytest.mark.anyio
@pytest.mark.parametrize(("fn", "pattern"), MISUSES)
async def test_misuse_is_never_retried_replaced_or_counted(fn: Any, pattern: str | None) -> None:
    """Whatever the predicate, a `MisuseError` passes every strategy and leaves no trace."""
    fn, pattern = _misuse(fn, pattern)
    asked: list[Any] = []
    control = CircuitBreakerControl()

    def everything(event: Any) -> bool:
        asked.append(event)
        return True

    pipeline = (
        B()
        .add_fallback(fallback_value=1, should_handle=everything)
        .add_retry(max_retry_attempts=5, delay=0, should_handle=everything)
        .add_circuit_breaker(should_handle=everything, control=control)
        .build()
    )
    with pytest.raises(MisuseError, match=pattern):
        await pipeline.execute(fn)
    assert asked == []
    assert control.metrics.throughput == 0


@pytest.mark.anyio
async def test_a_function_that_gives_no_awaitable_is_called_once() -> None:
    """The call that showed the mistake was the only one."""
    calls: list[Any] = []
    note: Any = calls.append
    with pytest.raises(MisuseError):
        await FULL.execute(note, 1)
    assert calls == [1]


@pytest.mark.anyio
@pytest.mark.parametrize("run", ["execute", "settle", "execute_stream", "wrap"])
async def test_a_coroutine_in_place_of_its_function_is_closed(run: str) -> None:
    """The coroutine is closed, so that nothing is said to have never been awaited."""
    coroutine: Any = ok()

    async def call() -> None:
        result = getattr(EMPTY, run)(coroutine)
        if run == "settle":
            (await result).unwrap()
        await result

    with pytest.raises(MisuseError, match=rf"pass the function itself, {run}\(fn"):
        await call()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.anyio
async def test_generators_that_were_made_by_mistake_are_closed() -> None:
    """What a generator function gave is closed and not left to the garbage collector."""
    made: Any = counts()
    with pytest.raises(MisuseError):
        await EMPTY.execute(lambda: made)
    assert inspect.getgeneratorstate(made) == inspect.GEN_CLOSED


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("factory", "pattern"),
    [
        pytest.param(lambda: [1, 2], r"gave \[1, 2\].*no async iterable.*execute\(\)", id="list"),
        pytest.param(lambda: None, r"gave None.*no async iterable", id="none"),
        pytest.param(counts, r"gave <generator.*async generator function", id="generator"),
        pytest.param(ok, r"gave 1.*no async iterable.*execute\(\)", id="coroutine-function"),
    ],
)
async def test_a_factory_that_gives_no_async_iterable_is_misuse(factory: Any, pattern: str) -> None:
    """Case CW-03: so it is for a stream: never retried, replaced or counted."""
    control = CircuitBreakerControl()
    asked: list[object] = []

    def everything(event: object) -> bool:
        asked.append(event)
        return True

    pipeline = (
        B()
        .add_fallback(fallback_value=1, should_handle=everything)
        .add_retry(max_retry_attempts=5, delay=0, should_handle=everything)
        .add_circuit_breaker(should_handle=everything, control=control)
        .build()
    )
    with pytest.raises(MisuseError, match=pattern):
        await anext(pipeline.execute_stream(factory))
    assert asked == []
    assert control.metrics.throughput == 0


def test_a_stream_of_what_cannot_be_called_is_refused_at_the_call() -> None:
    """`execute_stream` runs nothing yet, but refuses at once what could never run."""
    for wrong in (3, None, [1, 2]):
        with pytest.raises(MisuseError, match="takes a function"):
            EMPTY.execute_stream(wrong)  # type: ignore[arg-type]


# ---- wrap ---------------------------------------------------------------------------------------


class Service:
    """Methods of all kinds, each of which fails once."""

    def __init__(self) -> None:
        self.calls = 0

    @TWICE_AGAIN.wrap
    async def fetch(self, a: int, *, b: int = 0) -> tuple[Service, int, int]:
        """Fetch something."""
        self.calls += 1
        if self.calls == 1:
            raise BoomError
        return self, a, b

    @TWICE_AGAIN.wrap(operation_key="stream")
    async def stream(self, n: int) -> AsyncIterator[Any]:
        """Stream something."""
        self.calls += 1
        if self.calls == 1:
            raise BoomError
        for number in range(n):
            yield number, current_context().operation_key

    @classmethod
    @TWICE_AGAIN.wrap
    async def of_class(cls, a: int) -> tuple[type[Service], int, int]:
        return cls, a, current_context().attempt

    @staticmethod
    @TWICE_AGAIN.wrap
    async def static(a: int) -> int:
        return a


@pytest.mark.anyio
async def test_wrap_works_on_methods() -> None:
    """A wrapped method is a method, and is protected."""
    service = Service()
    assert await service.fetch(1, b=2) == (service, 1, 2)
    assert service.calls == 2
    assert await Service.of_class(3) == (Service, 3, 0)
    assert await service.static(4) == await Service.static(4) == 4


@pytest.mark.anyio
async def test_wrap_takes_what_makes_methods() -> None:
    """`@pipeline.wrap` may also stand outside of `@classmethod` and `@staticmethod`."""

    class Other:
        @staticmethod
        async def plain(a: int) -> int:
            return a

        @classmethod
        async def made(cls, a: int) -> tuple[type[Other], int]:
            return cls, a

        wrapped_plain: Any = TWICE_AGAIN.wrap(plain)
        wrapped_made: Any = TWICE_AGAIN.wrap(made)

    assert await Other.wrapped_plain(3) == 3
    assert await Other().wrapped_made(3) == (Other, 3)


@pytest.mark.anyio
async def test_wrap_makes_streams_of_async_generator_functions() -> None:
    """Case CW-03: an async generator function becomes a protected one that gives an async iterator."""
    service = Service()
    stream = service.stream(2)
    assert hasattr(stream, "aclose")
    assert stream.__aiter__() is stream
    assert service.calls == 0
    assert [chunk async for chunk in service.stream(2)] == [(0, "stream"), (1, "stream")]
    assert service.calls == 2


@pytest.mark.parametrize("form", ["bare", "with-options", "called"])
def test_wrap_keeps_name_docstring_signature_and_kind(form: str) -> None:
    """However it is applied, the function stays one of the same name, signature and kind."""

    async def fetch(a: int, /, b: str = "x", *, c: float) -> bytes:
        """Fetch."""
        raise NotImplementedError

    wrapped: Any = {
        "bare": lambda: EMPTY.wrap(fetch),
        "with-options": lambda: EMPTY.wrap(idempotent=False)(fetch),
        "called": lambda: EMPTY.wrap()(fetch),
    }[form]()
    assert inspect.iscoroutinefunction(wrapped)
    assert inspect.signature(wrapped) == inspect.signature(fetch)
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(wrapped, attribute) == getattr(fetch, attribute)
    assert wrapped.__wrapped__ is fetch


async def add(a: int, b: int = 2, *, c: int = 3) -> int:
    return a + b + c


def signature_of(fn: Any) -> object:
    """Give the signature, or why there is none: the first releases of 3.11 can't tell a mock's."""
    try:
        return inspect.signature(fn)
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        pytest.param(partial(add, 1), "add", id="partial"),
        pytest.param(partial(partial(add, 1), c=1), "add", id="partial-of-partial"),
        pytest.param(Calls(1), "Calls", id="object"),
        pytest.param(partial(Calls(1)), "Calls", id="partial-of-object"),
        pytest.param(Calls(1).__call__, "__call__", id="bound-method"),
        pytest.param(AsyncMock(), "AsyncMock", id="AsyncMock"),
    ],
)
@pytest.mark.anyio
async def test_wrap_of_what_calls_a_coroutine_function(fn: Any, name: str) -> None:
    """A partial of one and an object with an async `__call__` are coroutine functions to `wrap`."""
    wrapped = EMPTY.wrap(fn)
    assert inspect.iscoroutinefunction(wrapped)
    assert wrapped.__name__ == name
    assert signature_of(wrapped) == signature_of(fn)
    coroutine = wrapped()
    assert inspect.iscoroutine(coroutine)
    await coroutine


def test_wrap_keeps_attributes_of_functions_alone() -> None:
    """What was set on a function is on the wrapped one; the state of a callable object stays its own."""

    async def marked() -> None: ...

    marked.tag = "x"  # type: ignore[attr-defined]
    assert EMPTY.wrap(marked).tag == "x"  # type: ignore[attr-defined]
    assert not hasattr(EMPTY.wrap(Calls(1)), "count")


@pytest.mark.anyio
async def test_wrap_of_a_partial_keeps_its_arguments() -> None:
    """A wrapped partial adds its arguments as before."""
    wrapped = FULL.wrap(partial(echo, 1, a=2))
    assert await wrapped(3, b=4) == ((1, 3), {"a": 2, "b": 4})


@pytest.mark.anyio
async def test_wrapped_functions_take_any_argument_names() -> None:
    """Parameters named like options of `execute` are the function's own."""

    async def fetch(*, operation_key: int, idempotent: str, context: bytes, fn: None) -> Any:
        return operation_key, idempotent, context, fn, current_context().operation_key

    wrapped = FULL.wrap(fetch, operation_key="op")
    assert await wrapped(operation_key=1, idempotent="x", context=b"y", fn=None) == (
        (1, "x", b"y", None, "op")
    )


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["decorator", "call"])
async def test_options_of_wrap_hold_for_each_call(form: str) -> None:
    """`operation_key=` and `idempotent=` of `wrap` are those of every call."""
    seen = []

    async def fetch() -> None:
        seen.append((current_context().operation_key, current_context().idempotent))
        raise BoomError

    wrapped = (
        TWICE_AGAIN.wrap(operation_key="op", idempotent=False)(fetch)
        if form == "decorator"
        else TWICE_AGAIN.wrap(fetch, operation_key="op", idempotent=False)
    )
    for _ in range(2):
        with pytest.raises(BoomError):
            await wrapped()
    assert seen == [("op", False)] * 2


@pytest.mark.anyio
async def test_each_call_of_a_wrapped_function_is_an_execution() -> None:
    """Calls of one wrapped function may run at once, each with a context of its own."""
    contexts = []

    @FULL.wrap
    async def fetch() -> None:
        contexts.append(current_context())
        await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fetch)
        tasks.start_soon(fetch)
    assert len(set(map(id, contexts))) == 2


@pytest.mark.parametrize("fn", [3, "ok", object()], ids=["number", "text", "object"])
def test_wrapping_what_cannot_be_called_is_misuse(fn: Any) -> None:
    """What is no function is refused when it is wrapped."""
    with pytest.raises(MisuseError, match=r"wrap\(\) takes a function, got"):
        EMPTY.wrap(fn)
