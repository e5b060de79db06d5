"""The flaky server, on a loop and a thread of its own, so that clients on every loop can talk to it; and httpx."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from resilience_pipeline._demo import ThreadedFlakyServer
from support.live import NO_CERTIFICATES, Opened


@pytest.fixture
def server() -> Iterator[ThreadedFlakyServer]:
    with ThreadedFlakyServer() as server:
        yield server


@pytest.fixture
async def client(server: ThreadedFlakyServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=server.url, trust_env=False, verify=NO_CERTIFICATES
    ) as client:
        yield client


@pytest.fixture
def events(client: httpx.AsyncClient) -> Callable[[], AsyncGenerator[str]]:
    """A factory whose first chunk is the first token, not the preamble."""

    async def generator() -> AsyncGenerator[str]:
        async with client.stream("GET", "/stream") as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    yield line

    return generator


@pytest.fixture(params=["generator", "manager"])
def source(
    request: pytest.FixtureRequest, client: httpx.AsyncClient, events: Callable[[], Opened]
) -> Callable[[], Opened]:
    """A factory of streams of lines, written in either way; `token` finds the tokens among them."""

    @asynccontextmanager
    async def manager() -> AsyncGenerator[AsyncIterator[str]]:
        async with client.stream("GET", "/stream") as response:
            response.raise_for_status()
            yield response.aiter_lines()

    return events if request.param == "generator" else manager
