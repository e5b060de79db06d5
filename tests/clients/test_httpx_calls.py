"""httpx under a pipeline, against real sockets: plain calls, and a circuit breaker around both kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    Failure,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    handle,
    handle_result,
)
from resilience_pipeline._demo import Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import (
    ALL,
    PATIENT,
    Opened,
    Waits,
    advance_into,
    closed_by_client,
    fetch,
    in_thread,
    read,
    status_of,
    statuses,
)

pytestmark = pytest.mark.anyio

B = ResiliencePipelineBuilder


# ---- plain calls ------------------------------------------------------------------------------


async def test_plain_calls_are_repeated_and_leave_a_history(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Status(503), Refuse(), Tokens())
    pipeline = B().add_retry(delay=0).add_timeout(30).build()
    outcome = await pipeline.settle(fetch, client)
    assert isinstance(outcome, Success)
    assert outcome.value.json() == {"number": 2, "text": "".join(ALL)}
    first, second, third = outcome.attempts
    assert status_of(first.outcome and first.outcome.error) == 503
    assert isinstance(second.outcome and second.outcome.error, httpx.ReadError)
    assert third.outcome == Success(outcome.value)


async def test_a_plain_404_is_a_failure_after_one_attempt(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.default = Status(404)
    outcome = await B().add_retry(delay=0).add_timeout(30).build().settle(fetch, client)
    assert isinstance(outcome, Failure)
    assert status_of(outcome.error) == 404
    assert outcome.attempt_count == len(server.requests) == 1


async def test_a_plain_429_waits_as_long_as_it_was_asked_to(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Status(429, retry_after=30), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = B(clock=clock).add_retry(delay=1, on_retry=waits).build()
    async with anyio.create_task_group() as group:
        group.start_soon(pipeline.execute, fetch, client)
        await advance_into(clock, waits, 29.9)
        assert len(server.requests) == 1
        await clock.advance(0.1)
    assert await statuses(server) == [429, 200]


@pytest.mark.realtime
async def test_a_plain_call_that_hangs_times_out_and_is_repeated(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Stall(), Stall(after="headers"), Tokens())
    pipeline = B().add_retry(**PATIENT).add_timeout(0.15).build()
    assert (await pipeline.execute(fetch, client)).status_code == 200
    for number in (0, 1):
        assert await closed_by_client(server, number)


async def test_responses_that_are_handled_are_waited_for_and_closed(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    """Without `raise_for_status`: `Retry-After` is read off the response, and what is dropped is closed."""
    server.script(Status(503, retry_after=30), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = (
        B(clock=clock)
        .add_retry(
            delay=1,
            should_handle=handle(httpx.TransportError)
            | handle_result(lambda response: response.status_code >= 500),
            on_retry=waits,
        )
        .build()
    )
    responses: list[httpx.Response] = []

    async def send() -> httpx.Response:
        responses.append(await client.send(client.build_request("GET", "/data"), stream=True))
        return responses[-1]

    got: list[httpx.Response] = []

    async def call() -> None:
        got.append(await pipeline.execute(send))

    async with anyio.create_task_group() as group:
        group.start_soon(call)
        await advance_into(clock, waits, 29.9)
        assert [response.is_closed for response in responses] == [True]
        await clock.advance(0.1)
    assert waits.events[0].delay == 30
    assert got == responses[1:]
    assert not got[0].is_closed
    await got[0].aclose()


# ---- the circuit breaker ----------------------------------------------------------------------


async def test_the_circuit_opens_on_real_failures_and_recovers(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.script(Status(500), Refuse(), Tokens(["back"]))
    clock, control = VirtualClock(), CircuitBreakerControl()
    pipeline = (
        B(name="llm", clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=30, control=control
        )
        .add_timeout(10)
        .build()
    )
    with pytest.raises(httpx.HTTPStatusError):
        await read(pipeline.execute_stream(source))
    with pytest.raises(httpx.ReadError) as second:
        await read(pipeline.execute_stream(source))
    for _ in range(3):
        with pytest.raises(BrokenCircuitError) as refused:
            await read(pipeline.execute_stream(source))
        assert refused.value.retry_after == 30
        assert refused.value.__cause__ is second.value
    assert (control.state, len(server.requests)) == ("open", 2)
    await clock.advance(30)
    assert await read(pipeline.execute_stream(source)) == ["back"]
    assert (control.state, len(server.requests)) == ("closed", 3)


async def test_stalls_open_the_circuit(
    server: ThreadedFlakyServer, events: Callable[[], Opened]
) -> None:
    server.default = Stall(after="preamble")
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=5, delay=0, max_retry_after=1)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration=30)
        .add_timeout(10)
        .build()
    )
    refusals: list[BrokenCircuitError] = []

    async def consume() -> None:
        with pytest.raises(BrokenCircuitError) as caught:
            await read(pipeline.execute_stream(events))
        refusals.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        for requests in (1, 2):
            await in_thread(partial(server.wait_requests, requests))
            await clock.advance(10)
    assert isinstance(refusals[0].__cause__, TimeoutRejectedError)
    assert len(server.requests) == 2


async def test_a_retry_waits_for_the_break_to_end(
    server: ThreadedFlakyServer, source: Callable[[], Opened]
) -> None:
    server.script(Status(500), Status(500), Tokens(["back"]))
    clock, waits = VirtualClock(), Waits()
    pipeline = (
        B(clock=clock)
        .add_retry(delay=0, on_retry=waits)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, break_duration=30)
        .build()
    )
    got: list[str] = []

    async def consume() -> None:
        got.extend(await read(pipeline.execute_stream(source)))

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await in_thread(lambda: server.wait_ended(1))
        while len(waits.events) < 3:
            await checkpoint()
        await clock.advance(30)
    assert got == ["back"]
    assert [event.delay for event in waits.events] == [0, 0, 30]


async def test_client_errors_leave_the_circuit_closed(
    server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> None:
    server.default = Status(404)
    control = CircuitBreakerControl()
    pipeline = (
        B().add_circuit_breaker(failure_ratio=0.1, minimum_throughput=2, control=control).build()
    )
    for _ in range(5):
        with pytest.raises(httpx.HTTPStatusError):
            await pipeline.execute(fetch, client)
    assert (control.state, control.metrics.throughput, control.metrics.failures) == ("closed", 5, 0)
