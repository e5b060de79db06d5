"""Case ST-15 against real sockets: a provider sends its empty preamble at once, and then nothing for ever.

The silence lasts until the client leaves, so that no result depends on how fast anything is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import openai
import pytest

from resilience_pipeline import ResiliencePipelineBuilder, TimeoutRejectedError
from resilience_pipeline._demo import Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import ALL, NO_CERTIFICATES, PATIENT, Waits, closed_by_client, in_thread, statuses
from support.scripted import tick

pytestmark = pytest.mark.anyio

B = ResiliencePipelineBuilder

SILENT = Stall(after="preamble")


class Talk:
    """A client's stream of chunks as it comes, preamble and all.

    Attributes:
        connect: The factory.
        begun: Set when a chunk without text has been looked at.
    """

    def __init__(self, connect: Callable[[], Any], text: Callable[[Any], str]) -> None:
        self.connect = connect
        self.text = text
        self.begun = anyio.Event()

    def has_text(self, chunk: Any) -> bool:
        text = self.text(chunk)
        if not text:
            self.begun.set()
        return bool(text)

    def texts(self, chunks: list[Any]) -> list[str]:
        return [text for chunk in chunks if (text := self.text(chunk))]


def _text_of_line(line: str) -> str:
    return line.removeprefix("data: ") if line.startswith("data: ") else ""


def _text_of_chunk(chunk: Any) -> str:
    return chunk.choices[0].delta.content or ""


@pytest.fixture(params=["httpx", "openai"])
async def talk(
    request: pytest.FixtureRequest, server: ThreadedFlakyServer, client: httpx.AsyncClient
) -> AsyncIterator[Talk]:
    """Either client; both show the preamble as a chunk of its own."""
    if request.param == "httpx":

        @asynccontextmanager
        async def lines() -> AsyncIterator[AsyncIterator[str]]:
            async with client.stream("GET", "/stream") as response:
                response.raise_for_status()
                yield response.aiter_lines()

        yield Talk(lines, _text_of_line)
        return
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False, verify=NO_CERTIFICATES),
    ) as chat:

        async def create() -> Any:
            return await chat.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hello"}], stream=True
            )

        yield Talk(create, _text_of_chunk)


async def clean_answer(talk: Talk) -> list[Any]:
    """What a consumer sees of an answer without faults."""
    return [chunk async for chunk in B().build().execute_stream(talk.connect)]


def comparable(chunks: list[Any]) -> list[Any]:
    """Chunks without what differs from answer to answer."""
    return [
        chunk if isinstance(chunk, str) else chunk.choices[0].model_dump_json() for chunk in chunks
    ]


@pytest.mark.realtime
async def test_with_a_moved_line_the_consumer_gets_one_clean_answer(
    server: ThreadedFlakyServer, talk: Talk
) -> None:
    """Case ST-15: nothing of the failed attempt is ever seen: one preamble, every token once."""
    server.script(SILENT, Tokens())
    waits = Waits()
    pipeline = B().add_retry(**PATIENT, on_retry=waits).add_timeout(0.25).build()
    async with pipeline.execute_stream(talk.connect, commit_when=talk.has_text) as stream:
        got = [chunk async for chunk in stream]
    assert talk.texts(got) == ALL
    assert comparable(got) == comparable(await clean_answer(talk))
    assert {type(error) for error in waits.errors} == {TimeoutRejectedError}
    assert await closed_by_client(server, 0)


async def test_the_silence_is_left_when_the_attempts_time_is_up_and_not_sooner(
    server: ThreadedFlakyServer, talk: Talk
) -> None:
    """Case ST-11, ST-15: the limit reaches to the moved line, acts when it expires, and the connection goes."""
    server.script(SILENT, Tokens())
    clock, waits, got = VirtualClock(), Waits(), list[Any]()
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=waits).add_timeout(10).build()

    async def consume() -> None:
        stream = pipeline.execute_stream(talk.connect, commit_when=talk.has_text)
        got.extend([chunk async for chunk in stream])

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await talk.begun.wait()
        await clock.advance(9.9)
        assert (server.requests[0].ending, waits.events) == (None, [])
        await clock.advance(0.2)
    assert talk.texts(got) == ALL
    assert comparable(got) == comparable(await clean_answer(talk))
    assert [type(error) for error in waits.errors] == [TimeoutRejectedError]
    assert await closed_by_client(server, 0)


async def test_a_gap_between_held_chunks_is_repeated_too(
    server: ThreadedFlakyServer, talk: Talk
) -> None:
    """Streams: before the line `idle_timeout` fails the attempt, which a retry repeats."""
    server.script(SILENT, Status(503), Tokens())
    clock, waits, got = VirtualClock(), Waits(), list[Any]()
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=waits).build()

    async def consume() -> None:
        stream = pipeline.execute_stream(talk.connect, commit_when=talk.has_text, idle_timeout=10)
        got.extend([chunk async for chunk in stream])

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await talk.begun.wait()
        await tick()
        await clock.advance(10.1)
    assert talk.texts(got) == ALL
    assert len(waits.events) == 2
    assert await closed_by_client(server, 0)
    assert await statuses(server) == [200, 503, 200]


async def test_without_a_moved_line_the_silence_hits_the_consumer_until_a_limit_ends_it(
    server: ThreadedFlakyServer, talk: Talk
) -> None:
    """Case ST-15, ST-13: the preamble has committed: no strategy helps; `idle_timeout` ends it, once."""
    server.default = SILENT
    clock, waits, got = VirtualClock(), Waits(), list[Any]()
    begun, failures = anyio.Event(), list[TimeoutRejectedError]()
    pipeline = (
        B(name="llm", clock=clock)
        .add_fallback(fallback_value="spare")
        .add_retry(delay=0, on_retry=waits)
        .add_timeout(10)
        .build()
    )

    async def consume() -> None:
        try:
            async with pipeline.execute_stream(talk.connect, idle_timeout=60) as stream:
                async for chunk in stream:
                    got.append(chunk)
                    begun.set()
        except TimeoutRejectedError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await begun.wait()
        await tick()
        await clock.advance(50)
        assert (server.requests[0].ending, failures) == (None, [])
        await clock.advance(60)
    (error,) = failures
    assert (error.pipeline_name, error.strategy_name, error.timeout) == ("llm", "idle_timeout", 60)
    assert talk.texts(got) == []
    assert waits.events == []
    assert await closed_by_client(server, 0)
    assert len(server.requests) == 1


async def test_the_total_limit_is_final_before_the_moved_line(
    server: ThreadedFlakyServer, talk: Talk
) -> None:
    """Streams, in small print: `total_timeout` is final also before commit, never retried."""
    server.default = SILENT
    clock, waits, got = VirtualClock(), Waits(), list[Any]()
    failures: list[TimeoutRejectedError] = []
    pipeline = B(clock=clock).add_retry(delay=0, on_retry=waits).build()

    async def consume() -> None:
        stream = pipeline.execute_stream(talk.connect, commit_when=talk.has_text, total_timeout=60)
        try:
            async for chunk in stream:
                got.append(chunk)
        except TimeoutRejectedError as error:
            failures.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await talk.begun.wait()
        await clock.advance(59.9)
        assert (server.requests[0].ending, failures) == (None, [])
        await clock.advance(0.2)
    assert [error.strategy_name for error in failures] == ["total_timeout"]
    assert (got, waits.events, len(server.requests)) == ([], [], 1)
    assert await in_thread(lambda: server.wait_closed_by_client(0).closed_by_client)
