"""The OpenAI client under a pipeline, its own retries off, against real sockets: item 7 of issue 2, case by case.

A stream is given to the pipeline as `client.chat.completions.create(stream=True)` gives it: an awaitable of an object that is async
iterable and an async context manager.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    Failure,
    Rejected,
    ResiliencePipelineBuilder,
    ResilienceStream,
    Success,
    TimeoutRejectedError,
)
from resilience_pipeline._demo import DieAfter, Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import (
    ALL,
    NO_CERTIFICATES,
    ONE_AND_SILENCE,
    PATIENT,
    Waits,
    address_that_refuses,
    advance_into,
    closed_by_client,
    in_thread,
    statuses,
)

pytestmark = pytest.mark.anyio

B = ResiliencePipelineBuilder
Factory: TypeAlias = Callable[[], Awaitable[openai.AsyncStream[ChatCompletionChunk]]]


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_CERTIFICATES),
    )


@pytest.fixture
async def client(server: ThreadedFlakyServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server.url) as client:
        yield client


async def ask(client: openai.AsyncOpenAI) -> ChatCompletion:
    return await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello"}]
    )


async def open_chat(client: openai.AsyncOpenAI) -> openai.AsyncStream[ChatCompletionChunk]:
    return await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hello"}], stream=True
    )


async def chat(client: openai.AsyncOpenAI) -> AsyncIterator[str]:
    """Give the tokens alone: the first chunk is the first token, not the preamble."""
    async with await open_chat(client) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


async def read_into(got: list[str], stream: ResilienceStream[ChatCompletionChunk]) -> None:
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            got.append(chunk.choices[0].delta.content)


async def read(stream: ResilienceStream[ChatCompletionChunk]) -> list[str]:
    got: list[str] = []
    await read_into(got, stream)
    return got


async def test_503_twice_then_tokens(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(Status(503), Status(503), Tokens())
    waits = Waits()
    pipeline = B().add_retry(max_retry_attempts=2, delay=0, on_retry=waits).add_timeout(30).build()
    async with pipeline.execute_stream(open_chat, client) as stream:
        assert await read(stream) == ALL
    assert [type(error) for error in waits.errors] == [openai.InternalServerError] * 2
    assert await statuses(server) == [503, 503, 200]


@pytest.mark.parametrize("kind", ["stream", "document"])
async def test_429_is_repeated_no_sooner_than_its_retry_after_says(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, kind: str
) -> None:
    server.script(Status(429, retry_after=30), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = B(clock=clock).add_retry(delay=1, max_delay=2, on_retry=waits).build()
    got: list[str | None] = []

    async def consume() -> None:
        if kind == "stream":
            got.extend(await read(pipeline.execute_stream(open_chat, client)))
        else:
            got.append((await pipeline.execute(ask, client)).choices[0].message.content)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await advance_into(clock, waits, 29.9)
        assert len(server.requests) == 1
        await clock.advance(0.1)
    (event,) = waits.events
    assert isinstance(event.outcome.error, openai.RateLimitError)
    assert event.delay == 30
    assert "".join(each or "" for each in got) == "".join(ALL)
    assert await statuses(server) == [429, 200]


async def test_a_retry_after_that_asks_too_much_ends_it_at_once(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(Status(429, retry_after=120))
    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(openai.RateLimitError) as caught:
        await read(pipeline.execute_stream(open_chat, client))
    assert caught.value.retry_after == 120  # type: ignore[attr-defined]
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (422, openai.UnprocessableEntityError),
    ],
)
async def test_a_client_error_is_not_repeated(
    server: ThreadedFlakyServer,
    client: openai.AsyncOpenAI,
    status: int,
    kind: type[openai.APIStatusError],
) -> None:
    server.default = Status(status)
    control = CircuitBreakerControl()
    pipeline = B().add_retry(delay=0).add_circuit_breaker(control=control).add_timeout(30).build()
    with pytest.raises(kind):
        await read(pipeline.execute_stream(open_chat, client))
    assert len(server.requests) == 1
    assert control.metrics.failures == 0


@pytest.mark.parametrize("after", ["request", "headers", "preamble"])
@pytest.mark.realtime
async def test_a_stall_before_the_first_token_times_out_and_is_repeated(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, after: Any
) -> None:
    server.script(Stall(after=after), Tokens())
    waits = Waits()
    pipeline = B().add_retry(**PATIENT, on_retry=waits).add_timeout(0.25).build()
    assert [token async for token in pipeline.execute_stream(chat, client)] == ALL
    assert {type(error) for error in waits.errors} == {TimeoutRejectedError}
    assert await closed_by_client(server, 0)


@pytest.mark.parametrize("after", ["request", "headers", "preamble"])
async def test_a_stall_is_left_when_its_time_is_up_and_not_sooner(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, after: Any
) -> None:
    server.script(Stall(after=after), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=waits).add_timeout(10).build()
    got: list[str] = []

    async def consume() -> None:
        async for token in pipeline.execute_stream(chat, client):
            got.append(token)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await in_thread(lambda: server.wait_requests(1))
        await clock.advance(9.9)
        assert server.requests[0].ending is None
        await clock.advance(0.2)
    assert got == ALL
    assert [type(error) for error in waits.errors] == [TimeoutRejectedError]
    assert await closed_by_client(server, 0)
    assert len(server.requests) == 2


@pytest.mark.realtime
async def test_the_clients_own_time_out_is_a_failure_like_any(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(Stall(), Tokens())
    waits = Waits()
    pipeline = B().add_retry(**PATIENT, on_retry=waits).build()
    hurried = client.with_options(timeout=0.25)
    assert (await pipeline.execute(ask, hurried)).choices[0].message.content == "".join(ALL)
    assert {type(error) for error in waits.errors} == {openai.APITimeoutError}


async def test_a_connection_that_breaks_before_an_answer_is_repeated(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(Refuse(), Refuse(), Tokens())
    waits = Waits()
    pipeline = B().add_retry(delay=0, on_retry=waits).add_timeout(30).build()
    assert await read(pipeline.execute_stream(open_chat, client)) == ALL
    assert [type(error) for error in waits.errors] == [openai.APIConnectionError] * 2


async def test_a_connection_that_breaks_after_the_preamble_is_repeated_where_tokens_are_the_chunks(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(DieAfter(0), Tokens())
    pipeline = B().add_retry(delay=0).add_timeout(30).build()
    assert [token async for token in pipeline.execute_stream(chat, client)] == ALL
    assert len(server.requests) == 2


async def test_a_refused_connection_is_repeated_and_then_comes_out() -> None:
    waits = Waits()
    pipeline = B().add_retry(max_retry_attempts=2, delay=0, on_retry=waits).add_timeout(30).build()
    with address_that_refuses() as url:
        async with client_of(url) as client:
            with pytest.raises(openai.APIConnectionError):
                await read(pipeline.execute_stream(open_chat, client))
            outcome = await pipeline.settle(ask, client)
    assert len(waits.events) == 4
    assert isinstance(outcome, Failure)
    assert outcome.attempt_count == 3


@pytest.mark.parametrize("tokens", [1, 3, len(ALL)])
async def test_a_connection_dropped_in_the_middle_reaches_the_loop_and_nothing_is_repeated(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, tokens: int
) -> None:
    server.script(DieAfter(tokens, interval=0.01))
    control, waits = CircuitBreakerControl(), Waits()
    pipeline = (
        B()
        .add_fallback(fallback_value=None)
        .add_retry(delay=0, on_retry=waits)
        .add_circuit_breaker(control=control)
        .add_timeout(30)
        .build()
    )
    got: list[str] = []
    async with pipeline.execute_stream(open_chat, client) as stream:
        # Older clients let the error of their transport through, newer ones wrap it.
        with pytest.raises(Exception, match=r"[Cc]onnection"):
            await read_into(got, stream)
        assert stream.committed
    assert got == ALL[:tokens]
    assert waits.events == []
    assert control.metrics.failures == 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("limited", [False, True])
async def test_leaving_the_loop_closes_the_connection(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, limited: bool
) -> None:
    server.default = ONE_AND_SILENCE
    builder = B().add_retry(delay=0)
    pipeline = (builder.add_timeout(30) if limited else builder).build()
    async with pipeline.execute_stream(open_chat, client) as stream:
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
    record = await in_thread(lambda: server.wait_closed_by_client(0))
    assert record.tokens_sent == 1
    assert len(server.requests) == 1


async def test_leaving_a_generator_around_it_closes_the_connection(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.default = ONE_AND_SILENCE
    pipeline = B().add_retry(delay=0).add_timeout(30).build()
    async with pipeline.execute_stream(chat, client) as tokens:
        async for _ in tokens:
            break
    assert await closed_by_client(server, 0)


@pytest.mark.parametrize("where", ["before the first chunk", "in the middle"])
async def test_cancelling_the_consumer_closes_the_connection(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI, where: str
) -> None:
    server.default = Stall(after="request") if where[0] == "b" else ONE_AND_SILENCE
    waits = Waits()
    pipeline = (
        B()
        .add_fallback(fallback_value=None)
        .add_retry(delay=0, on_retry=waits)
        .add_circuit_breaker()
        .add_timeout(30)
        .build()
    )
    scope = anyio.CancelScope()
    begun = anyio.Event()

    async def consume() -> None:
        with scope:
            async with pipeline.execute_stream(open_chat, client) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        begun.set()

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await in_thread(lambda: server.wait_requests(1))
        if where == "in the middle":
            await begun.wait()
        scope.cancel()
    assert scope.cancelled_caught
    assert await closed_by_client(server, 0)
    assert waits.events == []
    assert len(server.requests) == 1


async def test_the_circuit_opens_on_real_failures_and_recovers(
    server: ThreadedFlakyServer, client: openai.AsyncOpenAI
) -> None:
    server.script(Status(500), Refuse(), Tokens())
    clock, control = VirtualClock(), CircuitBreakerControl()
    pipeline = (
        B(name="llm", clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=30, control=control
        )
        .add_timeout(10)
        .build()
    )
    outcomes = [await pipeline.settle(ask, client) for _ in range(4)]
    assert [type(outcome) for outcome in outcomes] == [Failure, Failure, Rejected, Rejected]
    refused = outcomes[-1].error
    assert isinstance(refused, BrokenCircuitError)
    assert refused.__cause__ is outcomes[1].error
    assert (control.state, len(server.requests)) == ("open", 2)
    await clock.advance(30)
    assert isinstance(await pipeline.settle(ask, client), Success)
    assert (control.state, len(server.requests)) == ("closed", 3)
