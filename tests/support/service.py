"""A small ASGI service as one is written with this library, and a server for it in a thread.

Its calls of something else go through a pipeline of a registry that is loaded from a file. It is scraped by
Prometheus, traced by OpenTelemetry, and reloads the file when it is told to.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry, generate_latest

from resilience_pipeline import ExecutionRejectedError, OptionsError, ResiliencePipelineRegistry
from resilience_pipeline.integrations.opentelemetry import OpenTelemetryListener
from resilience_pipeline.integrations.prometheus import PrometheusListener

Answer = tuple[int, Any]


class Service:
    """The service.

    Args:
        configuration: The file of its pipelines, of which it uses `backend`.
        ask: What it calls, with the path of the request.
        tracer_provider: Where its spans go.
    """

    def __init__(
        self,
        configuration: Path,
        ask: Callable[[str], Awaitable[Any]],
        tracer_provider: TracerProvider,
    ) -> None:
        self._configuration = configuration
        self._ask = ask
        self._tracer = tracer_provider.get_tracer("service")
        self._scraped = CollectorRegistry()
        self._tracing = OpenTelemetryListener(tracer_provider=tracer_provider)
        self._metering = PrometheusListener(self._scraped)
        self._pipelines = ResiliencePipelineRegistry(listeners=[self._tracing, self._metering])
        self._metering.watch(self._pipelines)
        self._pipelines.load_toml(configuration)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, or the life of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        path: str = scope["path"]
        if path == "/metrics":
            status, body = 200, generate_latest(self._scraped)
        else:
            status, answer = await self._answer(scope["method"], path)
            body = json.dumps(answer).encode()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._tracing.close()
        self._metering.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, method: str, path: str) -> Answer:
        if path == "/health":
            return 200, self._pipelines.health()
        if (method, path) == ("POST", "/reload"):
            return self._reload()
        with self._tracer.start_as_current_span("request", attributes={"url.path": path}):
            return await self._call(path)

    async def _call(self, path: str) -> Answer:
        try:
            return 200, await self._pipelines.get("backend").execute(self._ask, path)
        except ExecutionRejectedError as error:
            return 503, str(error)
        except ConnectionError as error:
            return 502, type(error).__name__

    def _reload(self) -> Answer:
        try:
            self._pipelines.load_toml(self._configuration)
        except OptionsError as error:
            return 400, list(error.problems)
        return 200, "reloaded"


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Run a server for it on a port of loopback, in a thread with an event loop of its own; gives its URL."""
    # Bound here, so that whoever calls before the server is there waits in the queue.
    with socket.create_server(("127.0.0.1", 0), backlog=256) as bound:
        server = uvicorn.Server(
            uvicorn.Config(
                service, loop="asyncio", http="h11", ws="none", lifespan="on", log_config=None
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


class Backend:
    """What the service calls: the first attempt of every call fails, and the second one answers with what it was.

    While it is held nobody gets an answer; `wait_for` tells when so many wait for one.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._waiting = 0
        self._changed = threading.Condition()
        self._released: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, path: str) -> str:
        if path not in self._seen:
            self._seen.add(path)
            raise ConnectionError
        if self._released is not None:
            self._loop = asyncio.get_running_loop()
            with self._changed:
                self._waiting += 1
                self._changed.notify_all()
            await self._released.wait()
        return path

    def hold(self) -> None:
        """Let nobody have an answer; call it while nobody asks."""
        self._released = asyncio.Event()
        self._waiting = 0

    def wait_for(self, count: int) -> None:
        """Wait, in a thread, until so many wait for an answer."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting >= count, timeout=30)

    def release(self) -> None:
        """Let all of them have their answers, and all to come."""
        assert self._released is not None
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._released.set)
