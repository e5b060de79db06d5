"""What the tests with real clients and a real server share."""

from __future__ import annotations

import math
import socket
import ssl
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.to_thread
import httpx

from resilience_pipeline import RetryEvent
from resilience_pipeline._demo import DEFAULT_TOKENS, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.scripted import tick

T = TypeVar("T")

Opened: TypeAlias = "AsyncIterable[str] | AbstractAsyncContextManager[AsyncIterable[str]]"

ALL = list(DEFAULT_TOKENS)
#: On a slow machine a short real time limit may hit attempts that would have gone well.
PATIENT: Any = {"max_retry_attempts": 20, "delay": 0}
#: Loading those of the system takes longer than most tests.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
#: One token, and then nothing for ever: whoever has it can only leave.
ONE_AND_SILENCE = Tokens(["one", "two"], interval=math.inf)


class Waits:
    """A retry's `on_retry` that keeps the events; `begun` is set by each."""

    def __init__(self) -> None:
        self.events: list[RetryEvent] = []
        self.begun = anyio.Event()

    def __call__(self, event: RetryEvent) -> None:
        self.events.append(event)
        self.begun.set()

    @property
    def errors(self) -> list[Exception | None]:
        return [event.outcome.error for event in self.events]


async def advance_into(clock: VirtualClock, waits: Waits, seconds: float) -> None:
    """Wait for the retry's wait to begin, and let so much of virtual time pass."""
    await waits.begun.wait()
    await tick()
    await clock.advance(seconds)


async def in_thread(fn: Callable[[], T]) -> T:
    """Wait for the server in a thread, while the clients on this loop go on."""
    return await anyio.to_thread.run_sync(fn)


async def closed_by_client(server: ThreadedFlakyServer, number: int) -> bool:
    record = await in_thread(lambda: server.wait_closed_by_client(number))
    return record.closed_by_client


@contextmanager
def address_that_refuses() -> Iterator[str]:
    """Give the URL of a port that is taken, so that nobody listens there meanwhile."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


async def statuses(server: ThreadedFlakyServer) -> list[int | None]:
    """Give the status of each answer so far, once the last one has ended."""
    last = len(server.requests) - 1
    await in_thread(lambda: server.wait_ended(last))
    return [record.status for record in server.requests]


def token(line: str) -> list[str]:
    """The token in a line, if there is one."""
    return [line.removeprefix("data: ")] if line.startswith("data: ") else []


async def read_into(got: list[str], lines: AsyncIterable[str]) -> None:
    async for line in lines:
        got += token(line)


async def read(lines: AsyncIterable[str]) -> list[str]:
    got: list[str] = []
    await read_into(got, lines)
    return got


def status_of(error: object) -> int:
    assert isinstance(error, httpx.HTTPStatusError)
    return error.response.status_code


async def fetch(client: httpx.AsyncClient) -> httpx.Response:
    response = await client.get("/data")
    return response.raise_for_status()
