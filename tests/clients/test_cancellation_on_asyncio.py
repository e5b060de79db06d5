"""`task.cancel()` and `asyncio.timeout` around a pipeline with a real connection: asyncio's own ways to give up.

The server runs in the same loop here, and the client is the demonstration's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder
from resilience_pipeline._demo import FlakyServer, Stall, Step, Tokens
from resilience_pipeline._demo._client import stream_chat
from support.live import ALL, ONE_AND_SILENCE

pytestmark = pytest.mark.asyncio

PLACES = [
    pytest.param(Stall(after="request"), id="before the answer"),
    pytest.param(Stall(after="preamble"), id="before the first token"),
    pytest.param(ONE_AND_SILENCE, id="in the middle"),
]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FlakyServer]:
    async with FlakyServer() as server:
        yield server


def pipeline() -> ResiliencePipeline[Exception]:
    return (
        ResiliencePipelineBuilder()
        .add_fallback(fallback_value="instead")
        .add_retry(delay=0)
        .add_circuit_breaker(minimum_throughput=2)
        .add_timeout(30)
        .build()
    )


async def read_into(
    got: list[str], server: FlakyServer, begun: asyncio.Event | None = None
) -> None:
    connect = partial(stream_chat, server.url, "?", on_response=len)
    async with pipeline().execute_stream(connect) as tokens:
        async for token in tokens:
            got.append(token)
            if begun is not None:
                begun.set()


@pytest.mark.parametrize("step", PLACES)
async def test_a_cancelled_task_closes_its_connection_and_ends_as_cancelled(
    server: FlakyServer, step: Step
) -> None:
    server.default = step
    got: list[str] = []
    begun = asyncio.Event()
    task = asyncio.create_task(read_into(got, server, begun))
    await server.wait_requests(1)
    if step is ONE_AND_SILENCE:
        await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await server.wait_closed_by_client(0)
    assert got == (["one"] if step is ONE_AND_SILENCE else [])
    assert len(server.requests) == 1


@pytest.mark.parametrize("step", PLACES)
async def test_a_time_out_of_the_callers_closes_the_connection_and_stays_a_time_out(
    server: FlakyServer, step: Step
) -> None:
    server.script(step, Tokens())
    got: list[str] = []
    begun = asyncio.Event()

    async def time_out(limit: asyncio.Timeout) -> None:
        await server.wait_requests(1)
        if step is ONE_AND_SILENCE:
            await begun.wait()
        limit.reschedule(asyncio.get_running_loop().time())

    async def consume() -> None:
        async with asyncio.TaskGroup() as group, asyncio.timeout(None) as limit:
            group.create_task(time_out(limit))
            await read_into(got, server, begun)

    with pytest.raises(ExceptionGroup) as caught:
        await consume()
    assert [type(error) for error in caught.value.exceptions] == [TimeoutError]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await server.wait_closed_by_client(0)
    got.clear()
    await read_into(got, server)
    assert got == ALL
