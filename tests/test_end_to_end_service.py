"""From one end to the other: a service on a real server, loaded from a file, reloaded under load, scraped and traced.

Time is the real one, as between real sockets; nothing waits for time to pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from support.live import NO_CERTIFICATES
from support.service import Backend, Service, serving

pytestmark = [pytest.mark.realtime, pytest.mark.asyncio]

CLIENTS = 50
RELOADS = 10


def configuration(version: int, *, chaos: bool = False) -> str:
    return f"""
[pipelines.backend]
name = "backend-{version}"

[[pipelines.backend.strategies]]
type = "concurrency_limiter"
permit_limit = {CLIENTS}
queue_limit = {CLIENTS}

[[pipelines.backend.strategies]]
type = "retry"
max_retry_attempts = 2
delay = 0
should_handle = ["ConnectionError", "TimeoutRejectedError"]

[[pipelines.backend.strategies]]
type = "circuit_breaker"
minimum_throughput = 100000

[[pipelines.backend.strategies]]
type = "timeout"
timeout = "30s"

[[pipelines.backend.strategies]]
type = "chaos_fault"
fault_generator = "ConnectionRefusedError"
injection_rate = 1
enabled = {str(chaos).lower()}
"""


class Site:
    """The service, its file, what it calls and what it exports, and fifty clients."""

    def __init__(
        self,
        url: str,
        file: Path,
        backend: Backend,
        exporter: InMemorySpanExporter,
        clients: list[httpx.AsyncClient],
    ) -> None:
        self.url = url
        self.file = file
        self.backend = backend
        self.exporter = exporter
        self.clients = clients
        self._numbers = iter(range(1_000_000))

    def path(self) -> str:
        """A path that nobody has asked for."""
        return f"/ask/{next(self._numbers)}"

    async def ask(self, client: httpx.AsyncClient | None = None) -> httpx.Response:
        return await (client or self.clients[0]).get(self.url + self.path())

    async def ask_at_once(self) -> list[httpx.Response]:
        """One call of each client, all at the same time."""
        return await asyncio.gather(*map(self.ask, self.clients))

    async def reload(self, text: str) -> httpx.Response:
        self.file.write_text(text, "utf-8")
        return await self.clients[0].post(f"{self.url}/reload")

    async def metric(self, name: str, **labels: str) -> float:
        """What a scrape says, all series with these labels added up."""
        page = (await self.clients[0].get(f"{self.url}/metrics")).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipelines.toml"
    path.write_text(configuration(1), "utf-8")
    return path


@pytest.fixture
def url(backend: Backend, exporter: InMemorySpanExporter, file: Path) -> Iterator[str]:
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(Service(file, backend, tracer_provider)) as served:
        yield served
    tracer_provider.shutdown()


@pytest_asyncio.fixture
async def site(
    url: str, backend: Backend, exporter: InMemorySpanExporter, file: Path
) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(verify=NO_CERTIFICATES, timeout=40))
            for _ in range(CLIENTS)
        ]
        yield Site(url, file, backend, exporter, clients)


def statuses(answers: list[httpx.Response]) -> set[int]:
    return {answer.status_code for answer in answers}


async def test_calls_are_scraped_and_traced(site: Site) -> None:
    """Each call fails once and is tried again; metrics and spans tell so, and agree."""
    assert statuses(await site.ask_at_once()) == {200}

    place = {"pipeline_name": "backend-1"}
    pipelines, attempts = (
        "resilience_pipeline_duration_seconds_count",
        ("resilience_strategy_attempt_duration_seconds_count"),
    )
    assert await site.metric(pipelines, **place, outcome="success") == CLIENTS
    for number, outcome in (("0", "failure"), ("1", "success")):
        labels = {"attempt_number": number, "outcome": outcome}
        assert await site.metric(attempts, **place, **labels) == CLIENTS
    events = "resilience_strategy_events_total"
    assert await site.metric(events, **place, event_name="OnRetry") == CLIENTS
    state = "resilience_circuit_breaker_state"
    assert await site.metric(state, **place, state="closed") == 1
    assert await site.metric(state, **place, state="open") == 0

    spans = site.spans()
    requests = {span.context.span_id: span for span in spans if span.name == "request"}
    executions = {span.context.span_id: span for span in spans if span.name == "pipeline backend-1"}
    assert len(requests) == len(executions) == CLIENTS
    assert {span.parent.span_id for span in executions.values() if span.parent} == {*requests}
    tried = [span for span in spans if span.name == "attempt"]
    assert len(tried) == 2 * CLIENTS
    assert {span.parent.span_id for span in tried if span.parent} == {*executions}
    for execution in executions.values():
        assert [event.name for event in execution.events] == ["OnRetry"]


async def test_calls_in_flight_end_on_what_they_began_with(site: Site) -> None:
    """Fifty are inside when the file is loaded again, fifty more come, and all of them get their answers."""
    site.backend.hold()
    used = "resilience_concurrency_limiter_permits_used"
    old = asyncio.create_task(site.ask_at_once())
    await asyncio.to_thread(site.backend.wait_for, CLIENTS)
    assert await site.metric(used, pipeline_name="backend-1") == CLIENTS

    assert (await site.reload(configuration(2))).status_code == 200
    new = asyncio.create_task(site.ask_at_once())
    await asyncio.to_thread(site.backend.wait_for, 2 * CLIENTS)
    assert await site.metric(used, pipeline_name="backend-2") == CLIENTS
    site.backend.release()
    assert statuses(await old) == statuses(await new) == {200}

    assert await site.metric(used) == 0
    for version in (1, 2):
        name = f"backend-{version}"
        counted = "resilience_pipeline_duration_seconds_count"
        assert await site.metric(counted, pipeline_name=name, outcome="success") == CLIENTS
        spans = [span for span in site.spans() if span.name == f"pipeline {name}"]
        assert len(spans) == CLIENTS


async def test_no_call_fails_while_the_file_is_loaded_again_and_again(site: Site) -> None:
    """Fifty clients ask all the time, and ten reloads go through meanwhile."""
    reloaded = asyncio.Event()
    answers: list[httpx.Response] = []
    answered = asyncio.Condition()

    async def keep_asking(client: httpx.AsyncClient) -> None:
        while not reloaded.is_set():
            answer = await site.ask(client)
            async with answered:
                answers.append(answer)
                answered.notify_all()

    async def reload() -> None:
        try:
            for version in range(2, RELOADS + 2):
                assert (await site.reload(configuration(version))).status_code == 200
                # One more than can have been on their way: the new pipeline has given an answer.
                enough = len(answers) + CLIENTS + 1
                async with answered:
                    await answered.wait_for(lambda enough=enough: len(answers) >= enough)  # type: ignore[misc]
        finally:
            reloaded.set()

    await asyncio.gather(reload(), *map(keep_asking, site.clients))
    assert len(answers) >= RELOADS * CLIENTS
    assert statuses(answers) == {200}
    counted = "resilience_pipeline_duration_seconds_count"
    assert (
        await site.metric(counted) == await site.metric(counted, outcome="success") == len(answers)
    )
    served = {span.name for span in site.spans() if span.name.startswith("pipeline")}
    assert {f"pipeline backend-{version}" for version in range(2, RELOADS + 2)} <= served


async def test_chaos_is_switched_on_and_off(site: Site) -> None:
    """By loading the file again: every call is hit while it is on, and none before and after."""
    hits = "resilience_strategy_events_total"
    assert (await site.ask()).status_code == 200
    assert await site.metric(hits, event_name="Chaos.OnFault") == 0

    await site.reload(configuration(2, chaos=True))
    answers = await site.ask_at_once()
    assert statuses(answers) == {502}
    assert {answer.json() for answer in answers} == {"ConnectionRefusedError"}
    # Three attempts each.
    assert await site.metric(hits, event_name="Chaos.OnFault") == 3 * CLIENTS
    execution = next(span for span in site.spans() if span.name == "pipeline backend-2")
    assert [event.name for event in execution.events].count("Chaos.OnFault") == 3

    await site.reload(configuration(3))
    assert statuses(await site.ask_at_once()) == {200}
    assert await site.metric(hits, event_name="Chaos.OnFault") == 3 * CLIENTS


async def test_a_file_with_mistakes_changes_nothing(site: Site) -> None:
    """All of them are told, and the service serves on as before."""
    bad = configuration(2).replace("permit_limit", "permit_limits").replace("30s", "soon")
    answer = await site.reload(bad)
    assert answer.status_code == 400
    problems: Any = answer.json()
    assert any("permit_limits" in problem for problem in problems)
    assert any("timeout" in problem for problem in problems)
    assert statuses(await site.ask_at_once()) == {200}
    health = (await site.clients[0].get(f"{site.url}/health")).json()
    (built,) = health["backend"]
    assert built["pipeline"] == "backend-1"
