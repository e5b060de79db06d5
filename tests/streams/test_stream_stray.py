"""Exceptions that mean an end, raised where nothing can end, and others that are no `Exception`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from resilience_pipeline import CircuitBreakerControl
from support.streaming import B, Closable, Managed, Sources, collect, drain, tick

pytestmark = pytest.mark.anyio

STRAYS: list[type[BaseException]] = [StopAsyncIteration, GeneratorExit]


async def agen(*script: Any) -> AsyncIterator[Any]:
    await tick(1)
    for item in script:
        if isinstance(item, BaseException):
            raise item
        yield item


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_a_stray_end_in_a_generator_is_an_error(
    stray: type[BaseException], before: list[int]
) -> None:
    """Streams, in small print: a stray one comes out as `RuntimeError` with it as cause, no end."""
    script: list[Any] = [*before, stray("stray")]
    got: list[int] = []
    with pytest.raises(RuntimeError) as caught:
        await collect(B().build().execute_stream(agen, *script), got)
    assert isinstance(caught.value.__cause__, stray)
    assert got == before


async def _raise(error: BaseException) -> Any:
    await tick(1)
    raise error


class BadConnect(Managed):
    """A context manager that can't be entered."""

    async def __aenter__(self) -> Any:
        return await _raise(self._value)


class BadIterable:
    """An async iterable that gives no iterator."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __aiter__(self) -> Any:
        raise self._error


def _raise_now(error: BaseException) -> Any:
    raise error


CONNECTS: dict[str, Callable[[BaseException], Any]] = {
    "factory": _raise_now,
    "coroutine function": _raise,
    "manager": BadConnect,
    "iterable": BadIterable,
}


@pytest.mark.parametrize("stray", STRAYS)
@pytest.mark.parametrize("where", CONNECTS)
async def test_a_stray_end_while_connecting_is_an_error(
    where: str, stray: type[BaseException]
) -> None:
    """Streams: a `StopAsyncIteration` or `GeneratorExit` where it does not belong is an error, no end."""
    with pytest.raises(RuntimeError) as caught:
        await drain(B().build().execute_stream(CONNECTS[where], stray("stray")))
    assert isinstance(caught.value.__cause__, stray)


@pytest.mark.parametrize("stray", STRAYS)
async def test_a_stray_end_is_retried_like_any_error(stray: type[BaseException]) -> None:
    """Streams: an error, so that retry and breaker treat it as one."""
    control = CircuitBreakerControl()
    made = iter([agen(stray("stray")), agen(1, 2)])
    pipeline = B().add_retry(delay=0).add_circuit_breaker(control=control).build()
    assert await drain(pipeline.execute_stream(lambda: next(made))) == [1, 2]
    assert control.metrics.failures == 1


async def test_a_stray_generator_exit_of_an_iterator_is_an_error() -> None:
    """Streams: also where no generator of Python's own turns it into something else."""
    with pytest.raises(RuntimeError) as caught:
        await drain(B().build().execute_stream(lambda: Closable(1, GeneratorExit())))
    assert isinstance(caught.value.__cause__, GeneratorExit)


class Plain:
    """An iterator whose `__anext__` is a plain function, and fails at once."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __aiter__(self) -> Plain:
        return self

    def __anext__(self) -> Any:
        raise self._error


@pytest.mark.parametrize("stray", [GeneratorExit, StopIteration])
async def test_a_stray_end_of_a_plain_anext_is_an_error(stray: type[BaseException]) -> None:
    """Streams: neither passes for an end, nor a `StopIteration` for a chunk."""
    with pytest.raises(RuntimeError) as caught:
        await drain(B().build().execute_stream(Plain, stray()))
    assert isinstance(caught.value.__cause__, stray)


async def test_the_end_of_a_plain_anext_is_an_end() -> None:
    """Streams: `StopAsyncIteration` from `__anext__` is where it belongs."""
    assert await drain(B().build().execute_stream(Plain, StopAsyncIteration())) == []


@pytest.mark.parametrize("stray", STRAYS)
async def test_a_stray_end_while_closing_is_an_error(stray: type[BaseException]) -> None:
    """Streams: a `StopAsyncIteration` or `GeneratorExit` where it does not belong is an error."""

    async def closing() -> None:
        await _raise(stray())

    stream = B().build().execute_stream(lambda: Closable(1, 2, closing=closing))
    await anext(stream)
    with pytest.raises(RuntimeError) as caught:
        await stream.aclose()
    assert isinstance(caught.value.__cause__, stray)


@pytest.mark.parametrize("stray", STRAYS)
async def test_a_stray_end_of_a_managers_exit_is_an_error(stray: type[BaseException]) -> None:
    """Streams: so it is at the stream's natural end."""
    manager = Managed(Sources([1])(), raises=stray())
    got: list[int] = []
    with pytest.raises(RuntimeError) as caught:
        await collect(B().build().execute_stream(lambda: manager), got)
    assert isinstance(caught.value.__cause__, stray)
    assert got == [1]


# ---- what is no Exception ---------------------------------------------------------------------


class Shutdown(BaseException):
    """A `BaseException` of the user's own."""


@pytest.mark.parametrize("kind", [Shutdown, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_a_base_exception_passes_through_everything(
    kind: type[BaseException], before: list[int]
) -> None:
    """Design, rule 1: what is no `Exception` passes every strategy untouched; the source is closed."""
    error = kind("stop")
    closable = Closable(*before, error)
    calls = 0

    def connect() -> Closable:
        nonlocal calls
        calls += 1
        return closable

    control = CircuitBreakerControl()
    pipeline = (
        B()
        .add_fallback(fallback_value=9)
        .add_retry(delay=0)
        .add_circuit_breaker(control=control)
        .add_timeout("1h")
        .build()
    )
    got: list[int] = []
    with pytest.raises(kind) as caught:
        await collect(pipeline.execute_stream(connect), got)
    assert caught.value is error
    assert (got, calls, closable.closed) == (before, 1, 1)
    assert control.metrics.failures == 0


@pytest.mark.parametrize("mode", ["asyncio", "asyncio+owner"], indirect=True)
@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_a_cancellation_that_is_nobodys_passes(before: list[int]) -> None:
    """Case TO-11: a source that waits for something somebody cancelled: no failure of ours to handle."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    closed: list[bool] = []

    async def source() -> AsyncIterator[Any]:
        try:
            for chunk in before:
                yield chunk
            yield await future
        finally:
            closed.append(True)

    pipeline = B().add_fallback(fallback_value=9).add_retry(delay=0).add_timeout("1h").build()
    got: list[int] = []
    with pytest.raises(asyncio.CancelledError):
        await collect(pipeline.execute_stream(source), got)
    assert (got, closed) == (before, [True])
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_scope_of_the_sources_own_is_its_own_business() -> None:
    """Case TO-11: a scope that the source opened and cancelled ends within it."""

    async def source() -> AsyncIterator[int]:
        with anyio.move_on_after(0):
            await anyio.sleep_forever()
        yield 1
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep_forever()
        yield 2

    pipeline = B().add_retry(delay=0).add_timeout("1h").build()
    assert await drain(pipeline.execute_stream(source)) == [1, 2]
