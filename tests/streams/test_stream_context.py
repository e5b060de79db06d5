"""The context a source runs in: from its opening to its close, and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Generator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from resilience_pipeline import PropertyKey, ResilienceContext, current_context
from support.streaming import HANG, B, Closable, Running, Sources, drain, drain_within, tick

pytestmark = pytest.mark.anyio

var: ContextVar[str] = ContextVar("var", default="unset")

STRATEGIES: dict[str, Any] = {
    "none": lambda: B(name="p").build(),
    "retry": lambda: B(name="p").add_retry(delay=0).build(),
    "timeout": lambda: B(name="p").add_timeout("1h").build(),
    "all": lambda: (
        B(name="p")
        .add_fallback(fallback_value=9)
        .add_retry(delay=0)
        .add_circuit_breaker()
        .add_concurrency_limiter(1)
        .add_timeout("1h")
        .build()
    ),
}
each_pipeline = pytest.mark.parametrize("strategies", STRATEGIES)


# ---- the current context ----------------------------------------------------------------------


@each_pipeline
async def test_the_current_context_holds_inside_the_source_to_its_end(strategies: str) -> None:
    """Streams, in small print: `current_context()` holds inside the source to its end, its cleanup included."""
    seen: list[ResilienceContext] = []

    async def source() -> AsyncIterator[int]:
        seen.append(current_context())
        try:
            for number in range(3):
                yield number
                await tick(1)
                seen.append(current_context())
        finally:
            seen.append(current_context())

    stream = STRATEGIES[strategies]().execute_stream(source, operation_key="op")
    assert await drain_within(stream) == [0, 1, 2]
    assert len(seen) == 5
    assert all(context is seen[0] for context in seen)
    assert (seen[0].pipeline_name, seen[0].operation_key) == ("p", "op")


@each_pipeline
async def test_nothing_of_it_is_seen_in_the_consumers_loop(strategies: str) -> None:
    """Case ST-07: in the consumer's loop there is no current context, at no time."""

    def nothing() -> None:
        with pytest.raises(LookupError):
            current_context()

    async with STRATEGIES[strategies]().execute_stream(Sources([1, 2])) as stream:
        nothing()
        async for _ in stream:
            nothing()
        nothing()
    nothing()


async def test_the_factory_and_the_managers_see_the_current_context() -> None:
    """Context: `current_context()` inside `fn` gives the attempt's context."""
    seen: list[str | None] = []

    @asynccontextmanager
    async def connect() -> AsyncIterator[AsyncIterator[int]]:
        seen.append(current_context().pipeline_name)
        yield Sources([1])()
        seen.append(current_context().pipeline_name)

    def factory() -> Any:
        seen.append(current_context().pipeline_name)
        return connect()

    assert await drain(B(name="p").build().execute_stream(factory)) == [1]
    assert seen == ["p", "p", "p"]


async def test_a_plain_anext_is_called_in_the_sources_context() -> None:
    """Streams, in small print: inside the source means all of it, calls that only return an awaitable included."""
    seen: list[str] = []

    class Result:
        def __await__(self) -> Generator[Any, Any, str | None]:
            seen.append(var.get())
            yield from anyio.lowlevel.checkpoint().__await__()
            return current_context().pipeline_name

    class Source:
        def __aiter__(self) -> Source:
            return self

        def __anext__(self) -> Awaitable[str | None]:
            seen.append(var.get())
            current_context()
            return Result()

        def aclose(self) -> None:
            seen.append(var.get())

    var.set("first pull")
    async with B(name="p").build().execute_stream(Source) as stream:
        assert await anext(stream) == "p"
        var.set("later")
        assert await anext(stream) == "p"
    assert seen == ["first pull"] * 5


async def test_each_attempt_sees_its_number() -> None:
    """Context: `context.attempt` is this attempt's number."""
    attempts: list[int] = []

    async def source() -> AsyncIterator[int]:
        attempts.append(current_context().attempt)
        if len(attempts) < 3:
            raise OSError
        yield 1

    assert await drain(B().add_retry(delay=0).build().execute_stream(source)) == [1]
    assert attempts == [0, 1, 2]


async def test_a_context_of_the_callers_own_serves_the_stream() -> None:
    """Context: a context passed as `context=` keeps its properties for the caller to read."""
    key: PropertyKey[int] = PropertyKey("key")
    context = ResilienceContext("mine", properties={key: 1})

    async def source() -> AsyncIterator[str | None]:
        current_context().properties.set(key, current_context().properties.get(key) + 1)
        yield current_context().operation_key

    stream = B().build().execute_stream(source, operation_key="ignored", context=context)
    assert await drain(stream) == ["mine"]
    assert context.properties.get(key) == 2


# ---- context variables ------------------------------------------------------------------------


@each_pipeline
async def test_variables_of_the_first_pull_hold_inside_the_source(strategies: str) -> None:
    """Streams, in small print: the context variables of the first pull hold inside the source to its end."""
    seen: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(3):
                seen.append(var.get())
                yield number
        finally:
            seen.append(var.get())

    var.set("made")
    stream = STRATEGIES[strategies]().execute_stream(source)
    var.set("first pull")
    async with stream:
        async for number in stream:
            var.set(f"consumer {number}")
    assert seen == ["first pull"] * 4


@each_pipeline
@pytest.mark.parametrize("chunks", [1, 2, 3], ids=["left early", "read", "past the end"])
async def test_a_variable_set_in_the_source_can_be_reset_at_its_end(
    strategies: str, chunks: int
) -> None:
    """Case ST-07: opened, read and closed in one context, a token can be reset in the end."""
    ended: list[str] = []

    async def source() -> AsyncIterator[int]:
        token = var.set("in")
        try:
            yield 1
            assert var.get() == "in"
            yield 2
        finally:
            var.reset(token)
            ended.append(var.get())

    async with STRATEGIES[strategies]().execute_stream(source) as stream:
        for _ in range(chunks):
            await anext(stream, None)
            assert var.get() == "unset"
    assert ended == ["unset"]


async def test_a_variable_set_in_a_source_that_fails_can_be_reset() -> None:
    """Case ST-07: so it can in a source that is closed because it failed, was discarded or cancelled."""
    resets = 0

    class Traced(Closable):
        async def __anext__(self) -> Any:
            if not hasattr(self, "token"):
                self.token = var.set("in")
            return await super().__anext__()

        async def aclose(self) -> None:
            nonlocal resets
            var.reset(self.token)
            resets += 1

    def is_bad(event: Any) -> bool:
        return not event.outcome.ok or event.outcome.unwrap() == "bad"

    made = iter([Traced(OSError()), Traced("bad"), Traced("ok", HANG)])
    pipeline = B().add_retry(delay=0, should_handle=is_bad).add_timeout("1h").build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(lambda: next(made)))
        tasks.start_soon(running)
        await tick()
        running.cancel()
        await tick()
        assert running.cancelled
    assert resets == 3
    assert var.get() == "unset"


async def test_attempts_do_not_see_each_others_variables() -> None:
    """Streams: each source has a context of its own."""
    seen: list[str] = []

    async def source() -> AsyncIterator[int]:
        seen.append(var.get())
        var.set("left behind")
        if len(seen) < 3:
            raise OSError
        yield 1

    assert await drain(B().add_retry(delay=0).build().execute_stream(source)) == [1]
    assert seen == ["unset"] * 3


async def test_variables_set_by_the_caller_are_visible_in_hooks() -> None:
    """Context: context variables set by the caller are visible in `fn` and in hooks."""
    seen: list[str] = []
    var.set("caller")
    pipeline = B().add_retry(delay=0, on_retry=lambda _: seen.append(var.get())).build()
    assert await drain(pipeline.execute_stream(Sources([OSError()], [1]))) == [1]
    assert seen == ["caller"]


async def test_a_task_the_source_starts_inherits_its_context() -> None:
    """Streams, in small print: inside the source, whatever task it is."""
    seen: list[str | None] = []

    async def child() -> None:
        seen.append(current_context().pipeline_name)

    async def source() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        yield 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
        yield 2

    assert await drain(B(name="p").build().execute_stream(source)) == [1, 2]
    assert seen == ["p", "p"]


async def test_a_stream_within_a_call_has_a_context_of_its_own() -> None:
    """Context: the innermost execution is the current one, and the outer one is again afterwards."""

    async def source() -> AsyncIterator[str | None]:
        yield current_context().pipeline_name
        yield current_context().pipeline_name

    async def call() -> list[Any]:
        got: list[Any] = []
        async for name in B(name="inner").build().execute_stream(source):
            got += [name, current_context().pipeline_name]
        return got

    assert await B(name="outer").build().execute(call) == ["inner", "outer"] * 2
