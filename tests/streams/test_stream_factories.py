"""Everything a factory may give, and what it may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import CircuitBreakerControl, MisuseError, ResiliencePipelineBuilder
from support.streaming import B, Closable, Managed, Sources, collect, drain, drain_within

pytestmark = pytest.mark.anyio


async def agen(*chunks: int) -> AsyncIterator[int]:
    for chunk in chunks or (1, 2):
        yield chunk


class Iterable:
    """Async iterable with an iterator of its own for each iteration."""

    def __aiter__(self) -> AsyncIterator[int]:
        return agen()


class Both:
    """Async iterable and async context manager in one."""

    def __init__(self, *, gives_itself: bool = True) -> None:
        self._gives_itself = gives_itself
        self.log: list[str] = []

    async def __aenter__(self) -> Both | None:
        self.log.append("enter")
        return self if self._gives_itself else None

    async def __aexit__(self, *_: object) -> None:
        self.log.append("exit")

    def __aiter__(self) -> AsyncIterator[int]:
        self.log.append("iter")
        return agen()


class Awaitable:
    """An awaitable that is no coroutine."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        yield from anyio.lowlevel.checkpoint().__await__()
        return self._value


class Plain:
    """An iterator whose `__anext__` is a plain function that returns an awaitable."""

    def __init__(self) -> None:
        self._left = [1, 2]

    def __aiter__(self) -> Plain:
        return self

    def __anext__(self) -> Awaitable:
        if not self._left:
            raise StopAsyncIteration
        return Awaitable(self._left.pop(0))


class Speaker:
    """An object with an async generator for `__call__`."""

    async def __call__(self) -> AsyncIterator[int]:
        yield 1
        yield 2

    async def method(self) -> AsyncIterator[int]:
        yield 1
        yield 2


@asynccontextmanager
async def connection() -> AsyncIterator[AsyncIterator[int]]:
    await anyio.lowlevel.checkpoint()
    yield agen()


async def awaited(value: Any) -> Any:
    await anyio.lowlevel.checkpoint()
    return value


FACTORIES: dict[str, Callable[[], Any]] = {
    "async generator function": agen,
    "partial of one": partial(agen, 1, 2),
    "lambda": lambda: agen(),
    "object": Speaker(),
    "bound method": Speaker().method,
    "coroutine function giving a generator": lambda: awaited(agen()),
    "coroutine function giving an iterable": lambda: awaited(Iterable()),
    "coroutine function giving a manager": lambda: awaited(connection()),
    "awaitable object": lambda: Awaitable(agen()),
    "iterator": lambda: Closable(1, 2),
    "iterator with a plain __anext__": Plain,
    "iterable": Iterable,
    "contextlib manager": connection,
    "contextlib.aclosing": lambda: aclosing(agen()),
    "manager of an iterable": lambda: Managed(Iterable()),
    "manager of an iterator": lambda: Managed(Closable(1, 2)),
    "iterable and manager": Both,
    "iterable and manager that gives nothing": lambda: Both(gives_itself=False),
}


@pytest.mark.parametrize("name", FACTORIES)
async def test_every_kind_of_factory_is_streamed_from(name: str) -> None:
    """Streams: iterables, generators, context managers around them, and awaitables of all of these."""
    for pipeline in (B().build(), B().add_retry().add_timeout("1h").build()):
        assert await drain_within(pipeline.execute_stream(FACTORIES[name])) == [1, 2]


@pytest.mark.parametrize("name", FACTORIES)
async def test_every_kind_of_factory_may_be_left_early(name: str) -> None:
    """Streams: leaving closes the source, whatever kind it is."""
    async with B().add_timeout("1h").build().execute_stream(FACTORIES[name]) as stream:
        assert await anext(stream) == 1
    assert await anext(stream, "end") == "end"


async def test_arguments_go_to_the_factory() -> None:
    """Calling: the factory is called with the arguments of `execute_stream`."""
    assert await drain(B().build().execute_stream(agen, 4, 5, 6)) == [4, 5, 6]


async def test_an_object_that_is_both_is_entered_iterated_and_left() -> None:
    """Streams, in small print: iterable and context manager in one is entered, iterated and left."""
    both = Both()
    assert await drain(B().build().execute_stream(lambda: both)) == [1, 2]
    assert both.log == ["enter", "iter", "exit"]


async def test_a_manager_is_entered_for_each_attempt() -> None:
    """Streams: a context manager is entered inside the protected part."""
    managers = [Managed(Sources([OSError("first")])()), Managed(agen())]
    pipeline = B().add_retry(delay=0).build()
    made = iter(managers)
    assert await drain(pipeline.execute_stream(lambda: next(made))) == [1, 2]
    assert [(each.entered, each.left) for each in managers] == [(1, 1), (1, 1)]


async def test_a_manager_that_can_not_be_entered_is_a_failed_attempt() -> None:
    """Streams: a context manager is entered inside the protected part."""

    class Broken(Managed):
        async def __aenter__(self) -> Any:
            raise OSError("no connection")

    broken = Broken(agen())
    made: Iterator[Managed] = iter([broken, Managed(agen())])
    assert await drain(B().add_retry(delay=0).build().execute_stream(lambda: next(made))) == [1, 2]
    assert broken.told == []


async def test_a_factory_that_raises_is_a_failed_attempt() -> None:
    """Streams: a failed connect is retried."""
    made: Iterator[Any] = iter([OSError("refused"), agen()])

    def connect() -> Any:
        result = next(made)
        if isinstance(result, Exception):
            raise result
        return result

    assert await drain(B().add_retry(delay=0).build().execute_stream(connect)) == [1, 2]


# ---- what it may not give ---------------------------------------------------------------------


def numbers() -> Iterator[int]:
    yield 1


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "None"),
    "list": (lambda: [1, 2], r"\[1, 2\]"),
    "text": (lambda: "text", "text"),
    "sync generator": (numbers, "async generator function"),
    "awaited list": (lambda: awaited([1, 2]), r"\[1, 2\]"),
    "awaited coroutine": (lambda: awaited(awaited(1)), "coroutine"),
    "class of sources": (lambda: Iterable, "Iterable"),
    "class of managers": (lambda: Both, "Both"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_is_no_source_is_misuse(name: str) -> None:
    """Case CW-03: `MisuseError` says what was returned and what to do instead."""
    factory, said = WRONG[name]
    with pytest.raises(MisuseError, match=said) as caught:
        await drain(B().build().execute_stream(factory))
    assert "execute()" in str(caught.value) or "async generator" in str(caught.value)


async def test_misuse_is_neither_retried_nor_replaced_nor_counted() -> None:
    """Calling: no strategy retries, replaces or counts a `MisuseError`."""
    control = CircuitBreakerControl()
    calls = 0

    def factory() -> Any:
        nonlocal calls
        calls += 1
        return [1]

    pipeline = (
        B()
        .add_fallback(fallback_value=9, should_handle=Exception)
        .add_retry(delay=0, should_handle=Exception)
        .add_circuit_breaker(control=control, should_handle=Exception)
        .build()
    )
    with pytest.raises(MisuseError):
        await drain(pipeline.execute_stream(factory))
    assert calls == 1
    assert control.metrics.throughput == 0


async def test_a_sync_generator_given_by_mistake_is_closed() -> None:
    closed: list[bool] = []

    def wrong() -> Iterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    started = wrong()
    next(started)
    with pytest.raises(MisuseError):
        await drain(B().build().execute_stream(lambda: started))  # type: ignore[arg-type,return-value]
    assert closed == [True]


async def test_a_manager_of_something_that_is_no_source_is_left() -> None:
    """Streams: a context manager whose value can't be iterated is exited again."""
    manager = Managed([1, 2])
    with pytest.raises(MisuseError, match=r"\[1, 2\]"):
        await drain(B().build().execute_stream(lambda: manager))
    assert manager.left == 1
    assert isinstance(manager.told[0], MisuseError)


# ---- chunks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategies", ["none", "all"])
async def test_a_source_without_chunks_is_a_successful_empty_stream(strategies: str) -> None:
    """Streams: a source that ends without a chunk is a success: nothing is retried or replaced."""
    control = CircuitBreakerControl()
    builder: ResiliencePipelineBuilder[Any] = B()
    if strategies == "all":
        builder = (
            builder.add_fallback(fallback_value="spare")
            .add_retry(delay=0)
            .add_circuit_breaker(control=control)
            .add_concurrency_limiter(1)
            .add_timeout("1h")
        )
    pipeline = builder.build()
    sources = Sources([])
    for _ in range(2):
        assert await drain(pipeline.execute_stream(sources)) == []
    assert (sources.calls, sources.closed) == (2, 2)
    assert control.metrics.failures == 0


async def test_falsy_chunks_are_chunks() -> None:
    """Streams: a `None` or falsy chunk is a chunk, the first one included."""
    falsy: list[Any] = [None, 0, "", b"", [], False]
    pipeline = B().add_fallback(fallback_value=9).add_retry(delay=0).add_timeout("1h").build()
    for first in range(len(falsy)):
        script = [*falsy[first:], *falsy[:first]]
        sources = Sources(script)
        assert await drain(pipeline.execute_stream(sources)) == script
        assert sources.calls == 1


async def test_a_first_chunk_that_is_none_commits() -> None:
    """Streams: a `None` chunk is a chunk: what comes after it is not retried."""
    sources = Sources([None, OSError("late")])
    got: list[Any] = []
    stream = B().add_retry(delay=0).build().execute_stream(sources)
    with pytest.raises(OSError, match="late"):
        await collect(stream, got)
    assert (got, sources.calls) == ([None], 1)


async def test_exceptions_and_streams_as_chunks_pass_as_they_are() -> None:
    """Streams: after commit, chunks pass as they are."""
    chunks: list[Any] = [ValueError("a value"), agen(), StopAsyncIteration()]

    async def factory() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    got = await drain(B().add_fallback(fallback_value=9).build().execute_stream(factory))
    assert all(a is b for a, b in zip(got, chunks, strict=True))
