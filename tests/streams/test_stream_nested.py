"""Streams made by `wrap`, streams as sources of streams, and pipelines within pipelines."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import CircuitBreakerControl, ResilienceStream, current_context
from support.streaming import HANG, B, Managed, Running, Sources, collect, drain, tick

pytestmark = pytest.mark.anyio


# ---- wrap -------------------------------------------------------------------------------------


async def count(stop: int, *, step: int = 1) -> AsyncIterator[int]:
    """Count."""
    for number in range(0, stop, step):
        yield number


async def test_a_wrapped_generator_function_gives_a_stream() -> None:
    """Calling, wrap: async generator function → function returning an async iterator with `aclose`."""
    wrapped = B().build().wrap(count)
    stream = wrapped(3)
    assert isinstance(stream, ResilienceStream)
    assert await drain(stream) == [0, 1, 2]
    assert await drain(wrapped(6, step=2)) == [0, 2, 4]


async def test_a_wrapped_generator_function_is_guarded() -> None:
    """Case CW-03: decorating a generator function protects its first chunk."""
    sources = Sources([OSError()], [1, 2])
    pipeline = B().add_retry(delay=0).build()

    @pipeline.wrap
    async def stream(argument: str) -> AsyncIterator[int]:
        async for chunk in sources(argument):
            yield chunk

    assert await drain(stream("x")) == [1, 2]
    assert sources.arguments == [("x",), ("x",)]


async def test_wrapping_runs_nothing_before_the_first_pull() -> None:
    """Streams: nothing runs until the first pull; each call is a stream of its own."""
    calls: list[int] = []

    @B().build().wrap
    async def stream() -> AsyncIterator[int]:
        calls.append(1)
        yield 1

    first, second = stream(), stream()
    assert calls == []
    assert (await drain(first), await drain(second)) == ([1], [1])


async def test_wrap_keeps_name_docstring_and_works_on_methods() -> None:
    """Calling, wrap: works on methods, keeps name and docstring."""
    pipeline = B().add_retry(delay=0).build()

    class Client:
        factor = 10

        @pipeline.wrap(operation_key="tokens")
        async def tokens(self, count: int) -> AsyncIterator[tuple[int, str | None]]:
            """Give tokens."""
            for number in range(count):
                yield number * self.factor, current_context().operation_key

    assert Client.tokens.__name__ == "tokens"
    assert inspect.getdoc(Client.tokens) == "Give tokens."
    assert await drain(Client().tokens(2)) == [(0, "tokens"), (10, "tokens")]


async def test_a_wrapped_stream_that_is_not_idempotent_connects_once() -> None:
    """Calling: `@pipeline.wrap(idempotent=False)`."""
    calls = 0

    @B().add_retry(delay=0).build().wrap(idempotent=False)
    async def stream() -> AsyncIterator[int]:
        nonlocal calls
        calls += 1
        raise OSError("once")
        yield 1

    with pytest.raises(OSError, match="once"):
        await drain(stream())
    assert calls == 1


async def test_a_partial_and_an_object_with_a_generator_are_wrapped_alike() -> None:
    """Small print: `wrap` looks at what is called, not at what it is wrapped in."""

    class Speaker:
        async def __call__(self, stop: int) -> AsyncIterator[int]:
            async for number in count(stop):
                yield number

    pipeline = B().build()
    assert await drain(pipeline.wrap(partial(count, step=2))(4)) == [0, 2]
    assert await drain(pipeline.wrap(Speaker())(2)) == [0, 1]


# ---- a stream as a source ---------------------------------------------------------------------


async def test_a_stream_is_a_source() -> None:
    """Source systems: iterating another pipeline's stream composes."""
    sources = Sources([OSError()], [1, 2])
    inner = B(name="inner").add_retry(delay=0).build()
    outer = B(name="outer").add_timeout("1h").build()
    stream = outer.execute_stream(lambda: inner.execute_stream(sources))
    assert await drain(stream) == [1, 2]
    assert (sources.calls, sources.closed) == (2, 2)


async def test_a_stream_left_early_closes_the_stream_it_reads() -> None:
    """Streams: closing reaches the source's own `aclose`, through any number of streams."""
    sources = Sources([1, 2, 3])
    pipeline = B().add_retry(delay=0).add_timeout("1h").build()
    innermost = pipeline.execute_stream(sources)
    middle = pipeline.execute_stream(lambda: innermost)
    async with pipeline.execute_stream(lambda: middle) as stream:
        assert await anext(stream) == 1
    assert sources.closed == 1
    for each in (innermost, middle, stream):
        assert await anext(each, "end") == "end"


@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_a_cancelled_stream_closes_the_stream_it_reads(before: list[Any]) -> None:
    """Streams: cancelling the consumer closes all of them."""
    sources = Sources([*before, HANG])
    pipeline = B().add_retry(delay=0).add_timeout("1h").build()
    inner = pipeline.execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(lambda: inner))
        tasks.start_soon(running)
        await tick()
        running.cancel()
        await tick()
        assert running.cancelled
        assert (sources.calls, sources.closed) == (1, 1)
        assert running.cancelling == 0


@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_closing_the_outer_stream_from_another_task_closes_the_inner(
    before: list[Any],
) -> None:
    """Streams: `aclose()` from another task ends the reader's loop cleanly, however deep the source is."""
    sources = Sources([*before, HANG])
    pipeline = B().add_retry(delay=0).add_timeout("1h").build()
    inner = pipeline.execute_stream(sources)
    outer = pipeline.execute_stream(lambda: inner)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, outer)
        tasks.start_soon(running)
        await tick()
        await outer.aclose()
        assert sources.closed == 1
        await tick()
        assert (running.value, running.error, running.cancelling) == (before, None, 0)


@pytest.mark.parametrize("before", [[], [1]], ids=["first", "later"])
async def test_closing_the_inner_stream_from_another_task_ends_the_outer(
    before: list[Any],
) -> None:
    """Streams: the inner loop ends cleanly, which is an end to whoever reads it."""
    sources = Sources([*before, HANG])
    pipeline = B().add_retry(delay=0).add_timeout("1h").build()
    inner = pipeline.execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(lambda: inner))
        tasks.start_soon(running)
        await tick()
        await inner.aclose()
        await tick()
        assert (running.value, running.error, running.cancelling) == (before, None, 0)
    assert sources.closed == 1


async def test_an_error_of_the_inner_stream_is_the_outer_streams_failure() -> None:
    """Streams: before its first chunk it is an attempt that failed, and a new one is made."""
    sources = Sources([OSError()], [OSError()], [1])
    inner = B().add_retry(max_retry_attempts=1, delay=0).build()
    outer = B().add_retry(delay=0).build()
    assert await drain(outer.execute_stream(lambda: inner.execute_stream(sources))) == [1]
    assert sources.calls == 3


async def test_a_generator_that_reads_another_stream_composes() -> None:
    """Source systems: a generator around a pipeline's stream, itself guarded."""
    sources = Sources([1, 2, 3])
    inner = B().add_timeout("1h").build()

    async def doubled() -> AsyncIterator[int]:
        async with inner.execute_stream(sources) as stream:
            async for chunk in stream:
                yield chunk * 2

    async with B().add_timeout("1h").build().execute_stream(doubled) as stream:
        assert await anext(stream) == 2
    assert sources.closed == 1


# ---- pipelines within pipelines ---------------------------------------------------------------


async def test_a_nested_pipeline_guards_the_same_stream() -> None:
    """Building: `add_pipeline` nests a built pipeline; its state stays shared."""
    control = CircuitBreakerControl()
    shared = B(name="shared").add_circuit_breaker(control=control).build()
    pipeline = B(name="outer").add_retry(delay=0).add_pipeline(shared).add_timeout("1h").build()
    sources = Sources([OSError()], [1, 2])
    assert await drain(pipeline.execute_stream(sources)) == [1, 2]
    assert (control.metrics.throughput, control.metrics.failures) == (2, 1)
    assert (sources.closed, sources.peak) == (2, 1)


async def test_an_empty_pipeline_streams_as_it_is() -> None:
    """Building: `ResiliencePipeline.empty` runs the call as it is."""
    error = OSError("late")
    manager = Managed(Sources([1, error])())
    got: list[int] = []
    with pytest.raises(OSError, match="late") as caught:
        await collect(B().build().execute_stream(lambda: manager), got)
    assert (got, manager.told, caught.value) == ([1], [error], error)


async def test_one_pipeline_reads_many_streams_at_once() -> None:
    """Threads, streams: a pipeline serves any number of streams at once, each with chunks of its own."""
    pipeline = B().add_retry().add_circuit_breaker().add_timeout("1h").build()
    running = [Running(drain, pipeline.execute_stream(count, number)) for number in range(20)]
    async with anyio.create_task_group() as tasks:
        for each in running:
            tasks.start_soon(each)
    assert [each.value for each in running] == [list(range(number)) for number in range(20)]
