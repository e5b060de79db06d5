"""httpx under a pipeline, against real sockets: what issue 2 lists as item 7, and what lies beside it.

Streams are given to the pipeline in the two ways that people write: as an async generator around `client.stream`, and as an
async context manager that gives the response's own iterator.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from email.utils import formatdate
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    FallbackEvent,
    MisuseError,
    ResiliencePipelineBuilder,
    Retry,
    RetryEvent,
    TimeoutRejectedError,
)
from resilience_pipeline._demo import DieAfter, Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import (
    ALL,
    NO_CERTIFICATES,
    ONE_AND_SILENCE,
    PATIENT,
    Opened,
    Waits,
    address_that_refuses,
    advance_into,
    closed_by_client,
    in_thread,
    read,
    read_into,
    status_of,
    statuses,
    token,
)

pytestmark = pytest.mark.anyio

B = ResiliencePipelineBuilder


# ---- streams: until the first chunk -----------------------------------------------------------


async def test_503_twice_then_tokens(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.script(Status(503), Status(503), Tokens())
    waits = Waits()
    pipeline = B().add_retry(max_retry_attempts=2, delay=0, on_retry=waits).add_timeout(30).build()
    async with pipeline.execute_stream(source) as stream:
        assert await read(stream) == ALL
    assert [status_of(error) for error in waits.errors] == [503, 503]
    assert await statuses(server) == [503, 503, 200]


async def test_the_last_failure_comes_out_as_it_is(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.default = Status(503)
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).build()
    with pytest.raises(httpx.HTTPStatusError) as caught:
        await read(pipeline.execute_stream(source))
    assert caught.value.response.status_code == 503
    assert len(server.requests) == 3


@pytest.mark.parametrize("form", ["seconds", "date"])
async def test_429_is_repeated_no_sooner_than_its_retry_after_says(
    server: ThreadedFlakyServer,
    source: Callable[[], Opened],
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_800_000_000.5
    monkeypatch.setattr("resilience_pipeline._predicates.time", SimpleNamespace(time=lambda: now))
    demand: float | str = 30 if form == "seconds" else formatdate(now + 30.5, usegmt=True)
    server.script(Status(429, retry_after=demand), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = B(clock=clock).add_retry(delay=1, max_delay=2, on_retry=waits).build()
    got: list[str] = []

    async def consume() -> None:
        got.extend(await read(pipeline.execute_stream(source)))

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await advance_into(clock, waits, 28.9)
        assert len(server.requests) == 1
        await clock.advance(2.1)
    assert got == ALL
    (event,) = waits.events
    assert event.delay == (30 if form == "seconds" else 30.5)
    assert await statuses(server) == [429, 200]


@pytest.mark.realtime
async def test_503_with_retry_after_is_waited_for_on_the_real_clock(
    server: ThreadedFlakyServer, events: Callable[[], Opened]
) -> None:
    server.script(Status(503, retry_after=1), Tokens())
    pipeline = B().add_retry(delay=0).build()
    assert await read(pipeline.execute_stream(events)) == ALL
    first, second = server.requests
    assert second.at - first.at >= 0.99


async def test_a_retry_after_that_asks_too_much_ends_it_at_once(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.script(Status(429, retry_after=61))
    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(httpx.HTTPStatusError) as caught:
        await read(pipeline.execute_stream(source))
    assert caught.value.retry_after == 61  # type: ignore[attr-defined]
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_client_error_is_not_repeated(
    server: ThreadedFlakyServer, source: Callable[[], Opened], status: int
) -> None:
    server.default = Status(status)
    pipeline = B().add_retry(delay=0).add_circuit_breaker().add_timeout(30).build()
    with pytest.raises(httpx.HTTPStatusError) as caught:
        await read(pipeline.execute_stream(source))
    assert caught.value.response.status_code == status
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 504])
async def test_what_may_go_better_next_time_is_repeated(
    server: ThreadedFlakyServer, events: Callable[[], Opened], status: int
) -> None:
    server.script(Status(status))
    assert await read(B().add_retry(delay=0).build().execute_stream(events)) == ALL
    assert await statuses(server) == [status, 200]


@pytest.mark.parametrize("after", ["request", "headers", "preamble"])
@pytest.mark.realtime
async def test_a_stall_before_the_first_token_times_out_and_is_repeated(
    server: ThreadedFlakyServer, events: Callable[[], Opened], after: Any
) -> None:
    server.script(Stall(after=after), Tokens())
    waits = Waits()
    pipeline = B().add_retry(**PATIENT, on_retry=waits).add_timeout(0.15).build()
    assert await read(pipeline.execute_stream(events)) == ALL
    assert {type(error) for error in waits.errors} == {TimeoutRejectedError}
    assert await closed_by_client(server, 0)


@pytest.mark.parametrize("after", ["request", "headers", "preamble"])
async def test_a_stall_is_left_when_its_time_is_up_and_not_sooner(
    server: ThreadedFlakyServer, events: Callable[[], Opened], after: Any
) -> None:
    server.script(Stall(after=after), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=waits).add_timeout(10).build()
    got: list[str] = []

    async def consume() -> None:
        got.extend(await read(pipeline.execute_stream(events)))

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
    server: ThreadedFlakyServer, events: Callable[[], Opened], client: httpx.AsyncClient
) -> None:
    client.timeout = httpx.Timeout(30, read=0.15)
    server.script(Stall(), Tokens())
    waits = Waits()

    async def take_more_time(event: RetryEvent) -> None:
        """The first request was in vain, even if it arrives after that; no later one is to be."""
        waits(event)
        await in_thread(lambda: server.wait_requests(1))
        client.timeout = 30

    pipeline = B().add_retry(delay=0, on_retry=take_more_time).build()
    assert await read(pipeline.execute_stream(events)) == ALL
    assert [type(error) for error in waits.errors] == [httpx.ReadTimeout]


@pytest.mark.parametrize("step", [Refuse(), DieAfter(0)])
async def test_a_connection_that_breaks_before_the_first_token_is_repeated(
    server: ThreadedFlakyServer, events: Callable[[], Opened], step: Refuse | DieAfter
) -> None:
    server.script(step, step, Tokens())
    waits = Waits()
    pipeline = B().add_retry(delay=0, on_retry=waits).add_timeout(30).build()
    assert await read(pipeline.execute_stream(events)) == ALL
    kind = httpx.ReadError if isinstance(step, Refuse) else httpx.RemoteProtocolError
    assert [type(error) for error in waits.errors] == [kind, kind]


async def test_a_refused_connection_is_repeated_and_then_replaced(
    source: Callable[[], Opened],
) -> None:
    replaced: list[FallbackEvent] = []
    waits = Waits()
    pipeline = (
        B()
        .add_fallback(fallback_value="data: instead", on_fallback=replaced.append)
        .add_retry(max_retry_attempts=2, delay=0, on_retry=waits)
        .add_timeout(30)
        .build()
    )
    with address_that_refuses() as url:
        async with httpx.AsyncClient(
            base_url=url, trust_env=False, verify=NO_CERTIFICATES
        ) as client:

            async def lines() -> AsyncGenerator[str]:
                async with client.stream("GET", "/stream") as response:
                    async for line in response.aiter_lines():
                        yield line

            assert await read(pipeline.execute_stream(lines)) == ["instead"]
    assert [type(error) for error in waits.errors] == [httpx.ConnectError] * 2
    assert isinstance(replaced[0].outcome.error, httpx.ConnectError)


async def test_another_stream_stands_in_for_one_that_does_not_come(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.script(Status(503), Status(503), Tokens(["from", "elsewhere"]))
    pipeline = (
        B()
        .add_fallback(lambda _: source())
        .add_retry(max_retry_attempts=1, delay=0)
        .add_timeout(30)
        .build()
    )
    async with pipeline.execute_stream(source) as stream:
        assert await read(stream) == ["from", "elsewhere"]
    assert (await in_thread(lambda: server.wait_ended(2))).ending == "completed"


async def test_a_response_is_no_stream_and_is_closed(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    """`client.stream` itself is no factory: its response has several iterators, and none of its own."""
    server.default = ONE_AND_SILENCE
    pipeline: Any = B().add_retry(delay=0).add_timeout(30).build()
    with pytest.raises(MisuseError, match="no async iterable"):
        await read(pipeline.execute_stream(client.stream, "GET", "/stream"))
    assert await closed_by_client(server, 0)
    assert len(server.requests) == 1


# ---- streams: from the first chunk on ---------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, len(ALL)])
async def test_a_connection_dropped_in_the_middle_reaches_the_loop_and_nothing_is_repeated(
    server: ThreadedFlakyServer, source: Callable[[], Opened], tokens: int
) -> None:
    server.script(DieAfter(tokens, interval=0.01))
    control = CircuitBreakerControl()
    waits = Waits()
    pipeline = (
        B()
        .add_fallback(fallback_value="data: instead")
        .add_retry(delay=0, on_retry=waits)
        .add_circuit_breaker(control=control)
        .add_timeout(30)
        .build()
    )
    got: list[str] = []
    async with pipeline.execute_stream(source) as stream:
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(got, stream)
        assert stream.committed
    assert got == ALL[:tokens]
    assert waits.events == []
    assert control.metrics.failures == 0
    assert len(server.requests) == 1


@pytest.mark.parametrize("limited", [False, True])
async def test_leaving_the_loop_closes_the_connection(
    server: ThreadedFlakyServer, source: Callable[[], Opened], limited: bool
) -> None:
    server.default = ONE_AND_SILENCE
    builder = B().add_retry(delay=0)
    pipeline = (builder.add_timeout(30) if limited else builder).build()
    async with pipeline.execute_stream(source) as stream:
        async for line in stream:
            if token(line):
                break
    assert await closed_by_client(server, 0)
    assert len(server.requests) == 1


@pytest.mark.parametrize("limited", [False, True])
async def test_a_plain_loop_that_is_left_closes_the_connection_soon(
    server: ThreadedFlakyServer, source: Callable[[], Opened], limited: bool
) -> None:
    server.default = ONE_AND_SILENCE
    builder = B().add_retry(delay=0)
    pipeline = (builder.add_timeout(30) if limited else builder).build()

    async def consume() -> None:
        async for line in pipeline.execute_stream(source):
            if token(line):
                break

    await consume()
    assert await closed_by_client(server, 0)


async def test_aclose_closes_the_connection(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.default = ONE_AND_SILENCE
    stream = B().add_timeout(30).build().execute_stream(source)
    await anext(stream)
    await stream.aclose()
    assert await closed_by_client(server, 0)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_aclose_from_another_task_ends_the_loop_and_closes_the_connection(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.default = ONE_AND_SILENCE
    stream = B().add_retry(delay=0).add_timeout(30).build().execute_stream(source)
    got: list[str] = []
    begun, ended = anyio.Event(), anyio.Event()

    async def consume() -> None:
        async for line in stream:
            got.extend(token(line))
            if got:
                begun.set()
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await begun.wait()
        await stream.aclose()
        await ended.wait()
    assert got == ["one"]
    assert await closed_by_client(server, 0)


async def test_no_way_out_of_a_stream_keeps_a_connection_of_the_clients_pool(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    """Each one leaves the only connection there may be to the next one."""
    server.script(
        *(Status(503), Refuse(), Stall(), Stall(after="preamble"), DieAfter(0), ONE_AND_SILENCE),
        *(DieAfter(1), Status(404), ONE_AND_SILENCE, Tokens()),
    )
    clock, waits = VirtualClock(), Waits()
    retry = Retry(max_retry_attempts=5, delay=0, on_retry=waits)
    pipeline = B(clock=clock).add(retry).add_timeout(10).build()
    only = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(
        base_url=server.url, trust_env=False, verify=NO_CERTIFICATES, limits=only
    ) as narrow:

        async def lines() -> AsyncGenerator[str]:
            async with narrow.stream("GET", "/stream") as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        yield line

        async def time_out_twice() -> None:
            for requests in (3, 4):
                await in_thread(partial(server.wait_requests, requests))
                await clock.advance(10)

        async with anyio.create_task_group() as group:
            group.start_soon(time_out_twice)
            async with pipeline.execute_stream(lines) as stream:
                assert await anext(stream) == "data: one"
        with pytest.raises(httpx.RemoteProtocolError):
            await read(pipeline.execute_stream(lines))
        with pytest.raises(httpx.HTTPStatusError):
            await read(pipeline.execute_stream(lines))
        with anyio.CancelScope() as scope:
            async for _ in pipeline.execute_stream(lines):
                scope.cancel()
        assert await read(pipeline.execute_stream(lines)) == ALL
    assert [type(error) for error in waits.errors] == [
        httpx.HTTPStatusError,
        httpx.ReadError,
        TimeoutRejectedError,
        TimeoutRejectedError,
        httpx.RemoteProtocolError,
    ]


async def test_an_error_in_the_loops_body_closes_the_connection(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.default = ONE_AND_SILENCE
    pipeline = B().add_fallback(fallback_value="data: instead").add_timeout(30).build()

    async def consume() -> None:
        async with pipeline.execute_stream(source) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()
    assert await closed_by_client(server, 0)


@pytest.mark.parametrize("where", ["before the first token", "in the middle"])
async def test_cancelling_the_consumer_closes_the_connection(
    server: ThreadedFlakyServer, source: Callable[[], Opened], where: str
) -> None:
    server.default = Stall(after="request") if where[0] == "b" else ONE_AND_SILENCE
    waits = Waits()
    pipeline = (
        B()
        .add_fallback(fallback_value="data: instead")
        .add_retry(delay=0, on_retry=waits)
        .add_circuit_breaker()
        .add_timeout(30)
        .build()
    )
    scope = anyio.CancelScope()
    got: list[str] = []
    begun = anyio.Event()

    async def consume() -> None:
        with scope:
            async with pipeline.execute_stream(source) as stream:
                async for line in stream:
                    got.extend(token(line))
                    if got:
                        begun.set()

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await in_thread(lambda: server.wait_requests(1))
        if where == "in the middle":
            await begun.wait()
        scope.cancel()
    assert scope.cancelled_caught
    assert await closed_by_client(server, 0)
    assert got == ([] if where[0] == "b" else ["one"])
    assert waits.events == []
    assert len(server.requests) == 1


async def test_bytes_pass_as_they_are(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Refuse(), Tokens(["a", "b"]))

    @asynccontextmanager
    async def body() -> AsyncGenerator[AsyncIterator[bytes]]:
        async with client.stream("GET", "/stream") as response:
            yield response.aiter_bytes()

    pipeline = B().add_retry(delay=0).add_timeout(30).build()
    chunks = [chunk async for chunk in pipeline.execute_stream(body)]
    assert b"".join(chunks) == b": ready\n\ndata: a\n\ndata: b\n\n"


async def test_long_streams_hold_no_place_of_a_limiter(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.default = ONE_AND_SILENCE
    pipeline = B().add_concurrency_limiter(1).add_timeout(30).build()
    async with (
        pipeline.execute_stream(source) as first,
        pipeline.execute_stream(source) as second,
    ):
        assert await anext(first)
        assert await anext(second)
    for number in (0, 1):
        assert await closed_by_client(server, number)
