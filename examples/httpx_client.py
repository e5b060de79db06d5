"""An httpx client gains retries, a rate limit and a time limit per attempt; its callers don't change.

`python examples/httpx_client.py` asks a server on loopback that spoils three answers in ten, and one
that turns away what comes too fast: with the client as it is, and with the same client hardened.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx

from _support import BusyServer, Figures, measure, show
from resilience_pipeline import (
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    TokenBucket,
    handle,
    handle_result,
)
from resilience_pipeline._demo import Refuse, Stall, Status, Step, Tokens

ASKED = 100
WORKERS = 20

# ---- the application: it knows httpx, and nothing of pipelines -----------------------------------


async def fetch_item(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Ask for one item."""
    response = await client.get("/data", params={"item": number})
    response.raise_for_status()
    item: dict[str, Any] = response.json()
    return item


# ---- the hardening -------------------------------------------------------------------------------

SAFE = {"GET", "HEAD", "OPTIONS", "PUT", "DELETE"}
PASSING = {408, 429, 500, 502, 503, 504}


def pipeline_for_http(attempt: str = "250ms") -> ResiliencePipeline[Any]:
    """Make the pipeline: each attempt is paced, and its time limit begins when it may start."""
    passing = handle(httpx.TransportError, TimeoutRejectedError) | handle_result(
        lambda response: response.status_code in PASSING
    )
    return (
        ResiliencePipelineBuilder(name="http", random=random.Random(7).random)
        .add_retry(
            max_retry_attempts=7,
            delay="20ms",
            backoff_type="exponential",
            use_jitter="full",
            max_delay="500ms",
            should_handle=passing,
        )
        .add_rate_limiter(TokenBucket(4, 80, per="1s"), queue_limit=1_000)
        .add_timeout(attempt)
        .build()
    )


def harden(client: httpx.AsyncClient, pipeline: ResiliencePipeline[Any]) -> None:
    """Send every request of this client through the pipeline from now on.

    All of `get`, `post`, `request` and `stream` come down to `send`, which gives responses, so a
    status is a result here. What may not happen twice, or has a body that can be read only once, is
    repeated only if it was never sent.
    """
    again = pipeline.wrap(client.send)
    once = pipeline.wrap(client.send, idempotent=False)

    async def send(request: httpx.Request, **options: Any) -> httpx.Response:
        may_repeat = request.method in SAFE and isinstance(request.stream, httpx.ByteStream)
        return await (again if may_repeat else once)(request, **options)

    client.send = send  # type: ignore[method-assign]  # this is the hardening


# ---- the figures ---------------------------------------------------------------------------------


def faults() -> list[Step]:
    """Three answers in ten are spoiled, always the same ones."""
    dice = random.Random(42)
    kinds: list[Step] = [Status(503), Refuse(), Stall()]
    steps = dice.choices([*kinds, Tokens()], weights=[15, 10, 5, 70], k=ASKED)
    return list(steps)


async def run(server: BusyServer, *, hardened: bool) -> Figures:
    """Measure one of the two clients."""
    async with (
        server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=1) as client,
    ):
        if hardened:
            harden(client, pipeline_for_http())
        return await measure(
            server, lambda number: fetch_item(client, number), asked=ASKED, workers=WORKERS
        )


async def main() -> dict[str, dict[str, Figures]]:
    """Measure both on both servers, and print what came of it."""
    servers: dict[str, Callable[[], BusyServer]] = {
        "a server that spoils answers": lambda: BusyServer(*faults()),
        "a server that has a limit": lambda: BusyServer(permits=16, window=0.1),
    }
    rounds: dict[str, dict[str, Figures]] = {}
    for name, server in servers.items():
        rounds[name] = {
            "bare": await run(server(), hardened=False),
            "hardened": await run(server(), hardened=True),
        }
        print(name)
        show(**rounds[name])
    return rounds


if __name__ == "__main__":
    asyncio.run(main())
