"""Never run: what type checkers make of `execute`, `execute_stream`, `wrap`, and contexts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, assert_type

from resilience_pipeline import (
    Outcome,
    PropertyKey,
    ResilienceContext,
    ResiliencePipelineBuilder,
    ResilienceStream,
    SyncResilienceStream,
    TimeoutRejectedError,
    current_context,
)

pipeline = ResiliencePipelineBuilder().add_retry().add_timeout(10).build()


async def fetch(url: str, retries: int = 3, *, verify: bool = True) -> bytes:
    raise NotImplementedError


async def nothing() -> None: ...


def plain(url: str) -> int:
    raise NotImplementedError


def chunks(count: int) -> Iterator[str]:
    raise NotImplementedError


def gives_awaitable(url: str) -> Awaitable[int]:
    raise NotImplementedError


class Client:
    async def __call__(self, number: int) -> list[int]:
        raise NotImplementedError

    async def get(self, number: int) -> dict[str, int]:
        raise NotImplementedError


# ---- execute ------------------------------------------------------------------------------------


async def execute() -> None:
    assert_type(await pipeline.execute(fetch, "url"), bytes)
    assert_type(await pipeline.execute(fetch, "url", 5), bytes)
    assert_type(await pipeline.execute(partial(fetch, "url", verify=False)), bytes)
    assert_type(await pipeline.execute(lambda: fetch("url", verify=False)), bytes)
    assert_type(await pipeline.execute(gives_awaitable, "url"), int)
    assert_type(await pipeline.execute(Client(), 3), list[int])
    assert_type(await pipeline.execute(Client().get, 3), dict[str, int])
    assert_type(await pipeline.execute(lambda: pipeline.execute(fetch, "url")), bytes)
    assert_type(
        await pipeline.execute(
            fetch, "url", operation_key="fetch", idempotent=False, context=ResilienceContext()
        ),
        bytes,
    )
    await pipeline.execute(nothing)

    await pipeline.execute(fetch, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(fetch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(fetch, "url", 1, 2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(fetch, "url", verify=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await pipeline.execute(plain, "url")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(nothing())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(nothing, operation_key=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(nothing, context={})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.execute(nothing, timeout=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    pipeline.execute(nothing)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


# ---- execute_stream -----------------------------------------------------------------------------


async def generate(count: int) -> AsyncIterator[str]:
    yield "chunk"


async def generate_fully(count: int) -> AsyncGenerator[float, None]:
    yield 1.0


async def connect(count: int) -> AsyncIterator[bytes]:
    raise NotImplementedError


@asynccontextmanager
async def managed(count: int) -> AsyncGenerator[AsyncIterator[int], None]:
    yield numbers()


async def numbers() -> AsyncIterator[int]:
    yield 1


async def connect_managed() -> AbstractAsyncContextManager[AsyncIterator[complex]]:
    raise NotImplementedError


async def execute_stream() -> None:
    assert_type(pipeline.execute_stream(generate, 3), ResilienceStream[str])
    assert_type(pipeline.execute_stream(generate_fully, 3), ResilienceStream[float])
    assert_type(pipeline.execute_stream(connect, 3), ResilienceStream[bytes])
    assert_type(pipeline.execute_stream(managed, 3), ResilienceStream[int])
    assert_type(pipeline.execute_stream(connect_managed), ResilienceStream[complex])
    assert_type(pipeline.execute_stream(lambda: generate(3)), ResilienceStream[str])
    assert_type(
        pipeline.execute_stream(
            generate,
            3,
            commit_when=lambda chunk: chunk.strip(),
            max_held=8,
            idle_timeout="5s",
            total_timeout=60,
        ),
        ResilienceStream[str],
    )

    async with pipeline.execute_stream(generate, 3, operation_key="g") as stream:
        assert_type(stream, ResilienceStream[str])
        assert_type(stream.committed, bool)
        async for chunk in stream:
            assert_type(chunk, str)
        assert_type(await anext(stream), str)
        await stream.aclose()

    pipeline.execute_stream(generate, "3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pipeline.execute_stream(plain, "url")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pipeline.execute_stream(nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# ---- wrap ---------------------------------------------------------------------------------------


@pipeline.wrap
async def bare(a: int, /, b: str = "b", *args: bytes, c: float, **kwargs: bool) -> list[int]:
    raise NotImplementedError


@pipeline.wrap(operation_key="op", idempotent=False)
async def with_options(a: int, *, c: float = 1.0) -> list[int]:
    raise NotImplementedError


@pipeline.wrap
async def streaming(a: int, *, c: float) -> AsyncIterator[str]:
    yield "chunk"


@pipeline.wrap(idempotent=False)
async def streaming_with_options(a: int) -> AsyncGenerator[str, None]:
    yield "chunk"


class Service:
    @pipeline.wrap
    async def fetch(self, number: int) -> str:
        raise NotImplementedError

    @pipeline.wrap(idempotent=False)
    async def save(self, number: int, *, force: bool = False) -> None: ...

    @pipeline.wrap
    async def stream(self, number: int) -> AsyncIterator[bytes]:
        yield b"chunk"

    @classmethod
    @pipeline.wrap
    async def of_class(cls, number: int) -> str:
        raise NotImplementedError

    @staticmethod
    @pipeline.wrap
    async def static(number: int) -> str:
        raise NotImplementedError


async def wrap() -> None:
    assert_type(await bare(1, "x", b"y", c=1.0, d=True), list[int])
    coroutine: Coroutine[Any, Any, list[int]] = bare(1, c=1.0)
    await coroutine
    assert_type(await with_options(1), list[int])
    assert_type(streaming(1, c=1.0), ResilienceStream[str])
    assert_type(streaming_with_options(1), ResilienceStream[str])
    assert_type(await pipeline.wrap(fetch)("url", verify=False), bytes)
    assert_type(await pipeline.wrap(partial(fetch, "url"))(), bytes)
    assert_type(await pipeline.wrap(Client().get)(3), dict[str, int])

    assert_type(await pipeline.wrap(pipeline.wrap(fetch))("url", verify=False), bytes)
    assert_type(pipeline.wrap(streaming)(1, c=1.0), ResilienceStream[str])

    service = Service()
    assert_type(await service.fetch(1), str)
    await service.save(1, force=True)
    assert_type(service.stream(1), ResilienceStream[bytes])
    assert_type(await Service.of_class(1), str)
    assert_type(await service.static(1), str)

    await bare("1", c=1.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await bare(a=1, c=1.0)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]
    await bare(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await with_options(1, d=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    await service.fetch("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await Service.of_class("1")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    streaming("1", c=1.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(pipeline.wrap(plain)("url"), int)
    assert_type(pipeline.execute_sync(plain, "url"), int)
    assert_type(pipeline.settle_sync(plain, "url"), Outcome[int, TimeoutRejectedError])
    assert_type(pipeline.wrap(chunks)(1), SyncResilienceStream[str])
    assert_type(pipeline.wrap(pipeline.wrap(plain))("url"), int)
    assert_type(pipeline.wrap(pipeline.wrap(chunks))(1), SyncResilienceStream[str])
    assert_type(await pipeline.wrap(service.fetch)(1), str)
    assert_type(pipeline.execute_stream_sync(chunks, 1), SyncResilienceStream[str])
    pipeline.execute_sync(plain, 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def keeps_signature(fn: Callable[[int], Coroutine[Any, Any, str]]) -> None: ...


keeps_signature(pipeline.wrap(Service().fetch))


# ---- contexts -----------------------------------------------------------------------------------

COUNT = PropertyKey[int]("count")
NAMES = PropertyKey[list[str] | None]("names")


def contexts() -> None:
    context = ResilienceContext("op", idempotent=False, properties={COUNT: 1, NAMES: None})
    assert_type(context.operation_key, str | None)
    assert_type(context.attempt, int)
    assert_type(context.pipeline_name, str | None)
    assert_type(current_context(), ResilienceContext)

    properties = context.properties
    assert_type(properties.get(COUNT), int)
    assert_type(properties[COUNT], int)
    assert_type(properties.get(COUNT, None), int | None)
    assert_type(properties.get(NAMES), list[str] | None)
    properties.set(COUNT, 3)
    properties[NAMES] = ["a"]
    assert_type(COUNT in properties, bool)

    properties["count"]  # type: ignore[index]  # pyright: ignore[reportArgumentType]
    properties.set("count", 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    properties.set(COUNT, "3")  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    context.properties = properties  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
