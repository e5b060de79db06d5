"""Prometheus, by what its client shows to whoever scrapes it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from resilience_pipeline import (
    CircuitBreakerControl,
    MisuseError,
    OptionsError,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
)
from resilience_pipeline._switches import switches
from resilience_pipeline.integrations.prometheus import PrometheusListener, instrument
from resilience_pipeline.testing import VirtualClock, flaky

B = ResiliencePipelineBuilder

EVENTS = "resilience_strategy_events_total"
ATTEMPTS = "resilience_strategy_attempt_duration_seconds"
PIPELINES = "resilience_pipeline_duration_seconds"
CIRCUITS = "resilience_circuit_breaker_state"


@pytest.fixture
def scraped() -> CollectorRegistry:
    """A registry of the test's own."""
    return CollectorRegistry()


def samples(registry: CollectorRegistry, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """What a scrape shows under a name: labels that are not empty, in order, and values."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name == name:
                labels = tuple((key, value) for key, value in sample.labels.items() if value)
                found[labels] = sample.value
    return found


def by(registry: CollectorRegistry, name: str, *labels: str) -> dict[Any, float]:
    """The same by some labels alone, added up."""
    found: dict[Any, float] = {}
    for given, value in samples(registry, name).items():
        key = tuple(dict(given).get(label, "") for label in labels)
        found[key] = found.get(key, 0) + value
    return found


@pytest.mark.anyio
async def test_the_three_instruments(scraped: CollectorRegistry) -> None:
    """Polly's, with its tags as labels, in seconds."""
    clock = VirtualClock(autojump=True)
    listener = PrometheusListener(scraped)
    pipeline = B("p", instance="i", clock=clock, listeners=[listener]).add_retry(delay=3).build()
    await pipeline.execute(flaky(ConnectionError, "page"), operation_key="op")
    place = {"pipeline_name": "p", "pipeline_instance": "i", "operation_key": "op"}

    def labels(**more: str) -> frozenset[tuple[str, str]]:
        return frozenset((place | more).items())

    assert {frozenset(key): value for key, value in samples(scraped, EVENTS).items()} == {
        labels(event_name="PipelineExecuting", event_severity="Debug"): 1,
        labels(
            event_name="OnRetry",
            event_severity="Warning",
            strategy_name="Retry",
            exception_type="ConnectionError",
        ): 1,
    }
    executed = labels(
        event_name="PipelineExecuted", event_severity="Information", outcome="success"
    )
    for suffix, value in (("_sum", 3), ("_count", 1)):
        (sample,) = samples(scraped, PIPELINES + suffix).items()
        assert (frozenset(sample[0]), sample[1]) == (executed, value)
    attempts = {
        frozenset(key): value for key, value in samples(scraped, f"{ATTEMPTS}_count").items()
    }
    assert attempts == {
        labels(
            event_name="ExecutionAttempt",
            event_severity="Warning",
            strategy_name="Retry",
            exception_type="ConnectionError",
            outcome="failure",
            attempt_number="0",
            attempt_handled="true",
        ): 1,
        labels(
            event_name="ExecutionAttempt",
            event_severity="Information",
            strategy_name="Retry",
            outcome="success",
            attempt_number="1",
            attempt_handled="false",
        ): 1,
    }


@pytest.mark.anyio
async def test_buckets_are_seconds(scraped: CollectorRegistry) -> None:
    """From five milliseconds to a minute, or what is asked for."""
    pipeline = B(listeners=[PrometheusListener(scraped, buckets=(0.5, 2))]).build()
    await pipeline.execute(flaky(1))
    assert list(by(scraped, f"{PIPELINES}_bucket", "le")) == [("0.5",), ("2.0",), ("+Inf",)]
    other = CollectorRegistry()
    pipeline = B(listeners=[PrometheusListener(other)]).build()
    await pipeline.execute(flaky(1))
    bounds = [bound for (bound,) in by(other, f"{PIPELINES}_bucket", "le")]
    assert bounds[0] == "0.005"
    assert bounds[-2:] == ["60.0", "+Inf"]


@pytest.mark.parametrize(
    "buckets", [(), (2, 1), (1, 1), ("a",), "12", (True, 2), (float("nan"),), 5]
)
def test_bad_buckets_are_refused(scraped: CollectorRegistry, buckets: Any) -> None:
    """And nothing is in the registry then."""
    with pytest.raises(OptionsError, match="buckets must be rising"):
        instrument(scraped, buckets=buckets)
    assert b"resilience" not in generate_latest(scraped)


@pytest.mark.anyio
async def test_a_retry_without_end_makes_no_series_without_end(scraped: CollectorRegistry) -> None:
    """Attempts from the tenth retry on are one series."""
    listener = PrometheusListener(scraped)
    pipeline = B(listeners=[listener]).add_retry(delay=0, max_retry_attempts=50).build()
    await pipeline.settle(flaky(then=ConnectionError))
    counts = by(scraped, f"{ATTEMPTS}_count", "attempt_number")
    assert counts == {(str(number),): 1 for number in range(10)} | {("10",): 41}


@pytest.mark.anyio
async def test_the_state_of_a_circuit_is_a_gauge(scraped: CollectorRegistry) -> None:
    """From its first transition on, where no registry is watched."""
    clock = VirtualClock(autojump=True)
    control = CircuitBreakerControl()
    pipeline = (
        B("p", clock=clock, listeners=[PrometheusListener(scraped)])
        .add_circuit_breaker(control=control, minimum_throughput=2, half_open_probes=2)
        .build()
    )

    def state() -> list[str]:
        states = by(scraped, CIRCUITS, "pipeline_name", "strategy_name", "state")
        assert set(states.values()) <= {0, 1}
        assert all(key[:2] == ("p", "CircuitBreaker") for key in states)
        return [key[2] for key, value in states.items() if value]

    assert state() == []
    fetch = flaky(ConnectionError, ConnectionError, "page", "page")
    await pipeline.settle(fetch)
    await pipeline.settle(fetch)
    assert state() == ["open"]
    await clock.advance(5)
    await pipeline.execute(fetch)
    assert state() == ["half_open"]
    await pipeline.execute(fetch)
    assert state() == ["closed"]
    control.isolate()
    assert state() == ["isolated"]


@pytest.mark.anyio
async def test_a_watched_registry_shows_breakers_and_limiters(scraped: CollectorRegistry) -> None:
    """As its health says at the scrape; what strategies of the user's own say is left alone."""
    listener = PrometheusListener(scraped)
    pipelines = ResiliencePipelineRegistry(listeners=[listener])
    pipelines.add(
        "p",
        lambda builder: (
            builder.add_concurrency_limiter(3)
            .add_rate_limiter(Unlimited(), name="theirs")
            .add_circuit_breaker()
        ),
    )
    listener.watch(pipelines)
    listener.watch(pipelines)

    def value(name: str) -> float:
        ((labels, found),) = samples(scraped, name).items()
        assert dict(labels) == {"pipeline_name": "p", "strategy_name": "ConcurrencyLimiter"}
        return found

    async def fetch() -> None:
        assert value("resilience_concurrency_limiter_permits_used") == 1
        assert value("resilience_concurrency_limiter_permits_limit") == 3

    await pipelines.get("p").execute(fetch)
    assert value("resilience_concurrency_limiter_permits_used") == 0
    assert samples(scraped, "resilience_rate_limiter_permits_available") == {}
    assert by(scraped, "resilience_limiter_queued", "strategy_name") == {
        ("ConcurrencyLimiter",): 0,
        ("theirs",): 0,
    }
    assert by(scraped, CIRCUITS, "state") == {
        ("closed",): 1,
        ("open",): 0,
        ("half_open",): 0,
        ("isolated",): 0,
    }


class Unlimited:
    """A limit of somebody's own."""

    def try_acquire(self, now: float) -> float:
        return 0.0


# ---- coming and going ---------------------------------------------------------------------------


@pytest.mark.anyio
async def test_instrument_reaches_all_pipelines_until_it_is_taken_back(
    scraped: CollectorRegistry,
) -> None:
    """Built before or after; then the registry is as it was."""
    before = B("before").build()
    uninstrument = instrument(scraped)
    await before.execute(flaky(1))
    await B("after").build().execute(flaky(1))
    assert by(scraped, f"{PIPELINES}_count", "pipeline_name") == {("before",): 1, ("after",): 1}
    uninstrument()
    uninstrument()  # does nothing
    assert not switches.on
    assert generate_latest(scraped) == b""


def test_a_registry_has_room_for_one(scraped: CollectorRegistry) -> None:
    """A second one would have to show the same names; it is refused, and leaves nothing behind."""
    uninstrument = instrument(scraped)
    with pytest.raises(MisuseError, match="already"):
        instrument(scraped)
    with pytest.raises(MisuseError, match="already"):
        PrometheusListener(scraped)
    other = instrument(CollectorRegistry())
    other()
    uninstrument()
    assert not switches.on
    instrument(scraped)()  # free again


def test_registries_are_not_mixed_up() -> None:
    """One of pipelines in the place of the client's is refused, with a word on where it belongs."""
    pipelines: Any = ResiliencePipelineRegistry()
    with pytest.raises(MisuseError, match="pipelines="):
        instrument(pipelines)


def test_the_clients_own_registry_is_the_default() -> None:
    uninstrument = instrument()
    try:
        B("p").build().execute_sync(lambda: 1)
        assert by(REGISTRY, f"{PIPELINES}_count", "pipeline_name") == {("p",): 1}
    finally:
        uninstrument()


@pytest.mark.anyio
async def test_a_closed_listener_counts_nothing(scraped: CollectorRegistry) -> None:
    """Pipelines that have it go on without it."""
    listener = PrometheusListener(scraped)
    pipeline = B(listeners=[listener]).build()
    listener.close()
    listener.close()
    assert await pipeline.execute(flaky(1)) == 1
    assert repr(listener) == "<PrometheusListener, closed>"
    assert generate_latest(scraped) == b""


@pytest.mark.anyio
async def test_nothing_of_a_finished_execution_is_kept(scraped: CollectorRegistry) -> None:
    """Neither its result nor its error."""
    pipeline = B(listeners=[PrometheusListener(scraped)]).add_retry(delay=0).build()
    kept: list[weakref.ref[Any]] = []

    class Result:
        pass

    class OddError(Exception):
        pass

    async def fetch() -> Result:
        result, error = Result(), OddError()
        kept.extend([weakref.ref(result), weakref.ref(error)])
        if len(kept) < 3:
            raise error
        return result

    await pipeline.execute(fetch)
    gc.collect()
    assert [each() for each in kept] == [None] * 4


def test_threads_at_once(scraped: CollectorRegistry) -> None:
    """No event is lost, while somebody scrapes."""
    pipelines = ResiliencePipelineRegistry()
    pipelines.add("p", lambda builder: builder.add_retry(delay=0).add_concurrency_limiter(8))
    uninstrument = instrument(scraped, pipelines=pipelines)
    pipeline = pipelines.get("p")
    barrier = threading.Barrier(9)

    def run(work: Callable[[], object]) -> threading.Thread:
        def wait_and_work() -> None:
            barrier.wait()
            for _ in range(50):
                work()

        thread = threading.Thread(target=wait_and_work)
        thread.start()
        return thread

    def call() -> None:
        pipeline.execute_sync(flaky(ConnectionError, 1))

    threads = [run(call) for _ in range(8)] + [run(lambda: generate_latest(scraped))]
    for thread in threads:
        thread.join()
    assert by(scraped, f"{PIPELINES}_count", "outcome") == {("success",): 400}
    assert by(scraped, f"{ATTEMPTS}_count", "outcome") == {("failure",): 400, ("success",): 400}
    assert by(scraped, "resilience_concurrency_limiter_permits_used", "pipeline_name") == {
        ("p",): 0
    }
    uninstrument()


@pytest.mark.anyio
async def test_instances_can_be_added_up(scraped: CollectorRegistry) -> None:
    """Where there are many, one per tenant say: in counts as in gauges."""
    pipelines = ResiliencePipelineRegistry()
    pipelines.add(
        "p",
        lambda builder: builder.add_concurrency_limiter(2).add_circuit_breaker(
            consecutive_failures=1
        ),
    )
    uninstrument = instrument(scraped, pipelines=pipelines, instances=False)
    for number in range(5):
        await pipelines.get("p", str(number)).settle(flaky(ConnectionError if number else 1))
    place = "pipeline_name", "pipeline_instance"
    assert by(scraped, f"{PIPELINES}_count", *place) == {("p", ""): 5}
    assert by(scraped, "resilience_concurrency_limiter_permits_limit", *place) == {("p", ""): 10}
    assert by(scraped, CIRCUITS, *place, "state") == {
        ("p", "", "closed"): 1,
        ("p", "", "open"): 4,
        ("p", "", "half_open"): 0,
        ("p", "", "isolated"): 0,
    }
    uninstrument()


def test_instances_without_a_registry_are_added_up_too(scraped: CollectorRegistry) -> None:
    """From their transitions."""
    listener = PrometheusListener(scraped, instances=False)
    controls = [CircuitBreakerControl() for _ in range(3)]
    pipelines = [
        B("p", instance=str(number), listeners=[listener])
        .add_circuit_breaker(control=control)
        .build()
        for number, control in enumerate(controls)
    ]
    for control in controls:
        control.isolate()
    assert by(scraped, CIRCUITS, "pipeline_instance", "state")["", "isolated"] == len(pipelines)
