"""Further attributes of OpenTelemetry: what enrichers give, in which order, and what they can't harm.

Row `TL-06` of the Polly dossier. Polly's enrichers add to metrics alone; here spans and their events get the
same attributes.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from resilience_pipeline import (
    AttemptCompleted,
    CircuitBreakerControl,
    OptionsError,
    PipelineExecuted,
    PipelineExecuting,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
)
from resilience_pipeline.integrations.opentelemetry import OpenTelemetryListener, instrument
from resilience_pipeline.telemetry import TelemetryEvent
from resilience_pipeline.testing import VirtualClock, disabled, flaky
from support.otel import Telemetry, attributes

B = ResiliencePipelineBuilder
INSTRUMENTS = (
    "resilience.strategy.events",
    "resilience.strategy.attempt.duration",
    "resilience.pipeline.duration",
)


def everything(telemetry: Telemetry) -> list[dict[str, Any]]:
    """The attributes of all measurements, spans, and events of spans but those of exceptions."""
    points = [point for name in INSTRUMENTS for point in telemetry.points(name)]
    events = [
        event for span in telemetry.spans for event in span.events if event.name != "exception"
    ]
    return [attributes(each) for each in (*points, *telemetry.spans, *events)]


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "this is said once" in text]


class Spy:
    """An enricher that keeps what it was called with."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, event: TelemetryEvent) -> dict[str, str]:
        self.names.append(event.name)
        return {"spied": event.name}


# ---- what is added, and to what -----------------------------------------------------------------


@pytest.mark.anyio
async def test_a_hundred_attributes_are_added_everywhere(telemetry: Telemetry) -> None:
    """TL-06: to all three instruments, to spans of attempts and of the execution, to events of spans."""
    tags = {f"tag-{number:03}": number for number in range(100)}
    listener = telemetry.listener(enrichers=[lambda event: tags])
    pipeline = B("p", listeners=[listener]).add_retry(delay=0).build()
    await pipeline.execute(flaky(ConnectionError, "page"))
    found = everything(telemetry)
    # Measurements: entered, OnRetry, two attempts, executed. Spans: two attempts and the execution, with OnRetry.
    assert len(found) == 5 + 3 + 1
    for each in found:
        assert [name for name in each if name.startswith("tag-")] == list(tags)
        assert tags.items() <= each.items()
        assert each["resilience.pipeline.name"] == "p"


@pytest.mark.anyio
async def test_enrichers_are_called_in_order_and_a_later_one_wins(telemetry: Telemetry) -> None:
    """TL-06: over an earlier one; what only one gives stays."""
    called: list[str] = []

    def first(event: TelemetryEvent) -> dict[str, str]:
        called.append("first")
        return {"a": "first", "b": "first"}

    def second(event: TelemetryEvent) -> Mapping[str, str]:
        called.append("second")
        return MappingProxyType({"b": "second", "c": "second"})

    pipeline = B("p", listeners=[telemetry.listener(enrichers=(first, second))]).build()
    await pipeline.execute(flaky(1))
    for each in everything(telemetry):
        assert (each["a"], each["b"], each["c"]) == ("first", "second", "second")
    assert called == ["first", "second"] * 2  # for PipelineExecuting and PipelineExecuted


@pytest.mark.anyio
async def test_an_enricher_goes_before_the_librarys_own(telemetry: Telemetry) -> None:
    """TL-06: whichever attribute it is, of measurements as of spans; the name of the pipeline and the outcome here."""
    own = {
        "resilience.pipeline.name": "all",
        "resilience.outcome": "so-so",
        "exception.type": "any",
        "resilience.attempt.number": -1,
        "resilience.event.name": "it",
    }
    listener = telemetry.listener(enrichers=[lambda event: own])
    pipeline = B("p", listeners=[listener]).add_retry(delay=0, max_retry_attempts=1).build()
    await pipeline.settle(flaky(then=ConnectionError))
    found = everything(telemetry)
    assert len(found) == 5 + 3 + 1
    for each in found:
        assert own.items() <= each.items()
    execution = telemetry.span("pipeline p")
    assert execution.status.status_code is StatusCode.ERROR
    assert execution.status.description == "ConnectionError"  # no attribute


@pytest.mark.anyio
async def test_none_is_nothing(telemetry: Telemetry) -> None:
    """TL-06: for the whole as for one attribute, which then has the value that it had before."""
    nothing = {"resilience.pipeline.name": None, "tenant": None}
    enrichers = [lambda event: None, lambda event: {"kept": 1}, lambda event: nothing]
    pipeline = B("p", listeners=[telemetry.listener(enrichers=enrichers)]).build()
    await pipeline.execute(flaky(1))
    for each in everything(telemetry):
        assert (each["kept"], each["resilience.pipeline.name"]) == (1, "p")
        assert "tenant" not in each


@pytest.mark.anyio
async def test_an_enricher_gets_the_event(telemetry: Telemetry) -> None:
    """TL-06: the execution's span has what it gives for `PipelineExecuted`, an attempt's what it gives for that."""

    def enrich(event: TelemetryEvent) -> dict[str, str | int] | None:
        if isinstance(event, PipelineExecuted):
            return {"came.to": "nothing" if event.outcome is None else repr(event.outcome)}
        if isinstance(event, AttemptCompleted):
            return {"tried": event.attempt}
        return None

    pipeline = B("p", listeners=[telemetry.listener(enrichers=[enrich])]).add_retry().build()
    await pipeline.execute(flaky(7))
    attempt, execution = telemetry.spans
    assert attributes(attempt)["tried"] == 0
    assert attributes(execution)["came.to"] == "Success(value=7)"
    assert "tried" not in attributes(execution)
    (entered,) = telemetry.points("resilience.strategy.events")
    assert "came.to" not in attributes(entered)


@pytest.mark.anyio
async def test_all_kinds_of_attributes(telemetry: Telemetry) -> None:
    """TL-06: text, bools, numbers and lists of one of these; lists make series of metrics, too."""
    given: dict[str, Any] = {
        "text": "x",
        "yes": True,
        "whole": 2**63 - 1,
        "broken": 0.5,
        "texts": ["a", "b"],
        "numbers": (1, 2),
        "none": [],
    }
    expected = given | {"texts": ("a", "b"), "none": ()}
    pipeline = B("p", listeners=[telemetry.listener(enrichers=[lambda event: given])]).build()
    for _ in range(2):
        await pipeline.execute(flaky(1))
    (executed,) = telemetry.points("resilience.pipeline.duration")
    assert executed.count == 2
    for each in everything(telemetry):
        assert expected.items() <= each.items()


# ---- where from ---------------------------------------------------------------------------------


def test_enrichers_in_threads(telemetry: Telemetry) -> None:
    """TL-06: they are called in the thread of the call, and see its context variables."""
    tenant = ContextVar("tenant", default="nobody")
    threads: set[str] = set()

    def enrich(event: TelemetryEvent) -> dict[str, str]:
        threads.add(threading.current_thread().name)
        return {"tenant": tenant.get()}

    pipeline = B("p", listeners=[telemetry.listener(enrichers=[enrich])]).add_retry().build()

    def call(name: str) -> None:
        tenant.set(name)
        pipeline.execute_sync(lambda: 1)

    workers = [
        threading.Thread(target=call, args=(name,), name=name) for name in ("ann", "bob", "cleo")
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert threads == {"ann", "bob", "cleo"}
    for name in INSTRUMENTS:
        assert {attributes(each)["tenant"] for each in telemetry.points(name)} == threads
    assert sorted(attributes(span)["tenant"] for span in telemetry.spans) == [
        *["ann", "ann"],
        *["bob", "bob"],
        *["cleo", "cleo"],
    ]


@pytest.mark.anyio
async def test_enrichers_of_streams(telemetry: Telemetry) -> None:
    """TL-06: the span ends with the first chunk, and an attempt of a resumed stream comes after that."""
    spy = Spy()
    pipeline = (
        B("p", listeners=[telemetry.listener(enrichers=[spy])])
        .add_retry(delay=0, resumable=True)
        .build()
    )
    fetch = flaky([1, ConnectionError], [1, 2])
    assert [chunk async for chunk in pipeline.execute_stream(fetch)] == [1, 2]
    assert all("spied" in each for each in everything(telemetry))
    assert attributes(telemetry.span("pipeline p"))["spied"] == "PipelineExecuted"
    assert spy.names[:3] == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    assert spy.names[3:].count("ExecutionAttempt") == 2


def test_enrichers_of_streams_in_threads(telemetry: Telemetry) -> None:
    """TL-06: the same without an event loop, with time limits, which read in worker threads."""
    spy = Spy()
    pipeline = (
        B("p", listeners=[telemetry.listener(enrichers=[spy])]).add_retry().add_timeout(60).build()
    )

    def chunks() -> Iterator[int]:
        yield from (1, 2)

    with pipeline.execute_stream_sync(chunks) as stream:
        assert list(stream) == [1, 2]
    assert spy.names == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    assert all("spied" in each for each in everything(telemetry))


@pytest.mark.anyio
async def test_enrichers_of_hedged_attempts(telemetry: Telemetry) -> None:
    """TL-06: losers as well, whose outcome is `None`."""
    clock = VirtualClock(autojump=True)
    outcomes: list[bool] = []

    def enrich(event: TelemetryEvent) -> dict[str, bool] | None:
        if not isinstance(event, AttemptCompleted):
            return None
        outcomes.append(event.outcome is not None)
        return {"won": event.outcome is not None}

    listener = telemetry.listener(enrichers=[enrich])
    pipeline = B("p", clock=clock, listeners=[listener]).add_hedging(delay=1).build()
    calls: list[int] = []

    async def fetch() -> int:
        calls.append(1)
        if len(calls) == 1:
            await clock.sleep(1000)
        return 7

    assert await pipeline.execute(fetch) == 7
    assert sorted(outcomes) == [False, True]
    won = {
        attributes(span)["resilience.attempt.number"]: attributes(span)["won"]
        for span in telemetry.spans
        if span.name == "attempt"
    }
    assert won == {0: False, 1: True}


@pytest.mark.asyncio
async def test_a_cancelled_call_is_enriched(telemetry: Telemetry) -> None:
    """TL-06: its span ends as cancelled, and with the attributes."""
    pipeline = B("p", listeners=[telemetry.listener(enrichers=[Spy()])]).build()
    inside = asyncio.Event()

    async def hang() -> None:
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(pipeline.execute(hang))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert attributes(telemetry.span("pipeline p")) == {
        "resilience.pipeline.name": "p",
        "resilience.outcome": "cancelled",
        "spied": "PipelineExecuted",
    }


def test_a_transition_by_hand_is_enriched(telemetry: Telemetry) -> None:
    """TL-06: outside of any execution; its event has no context."""
    control = CircuitBreakerControl()
    listener = telemetry.listener(enrichers=[lambda event: {"inside": event.context is not None}])
    pipeline = B("p", listeners=[listener]).add_circuit_breaker(control=control).build()
    control.isolate()
    (point,) = telemetry.points("resilience.strategy.events")
    assert attributes(point)["inside"] is False
    assert pipeline.name == "p"


@pytest.mark.anyio
async def test_gauges_are_of_no_event(telemetry: Telemetry) -> None:
    """TL-06: they are read when metrics are collected, and nobody is called for them."""
    spy = Spy()
    listener = telemetry.listener(enrichers=[spy])
    registry = ResiliencePipelineRegistry()
    registry.add("p", lambda builder: builder.add_circuit_breaker())
    registry.get("p")
    listener.watch(registry)
    points = telemetry.points("resilience.circuit_breaker.state")
    assert points
    assert all("spied" not in attributes(point) for point in points)
    assert spy.names == []


# ---- how often ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_enricher_is_called_once_for_each_event(telemetry: Telemetry) -> None:
    """TL-06: though a measurement and a span get what it gives."""
    spy = Spy()
    pipeline = B("p", listeners=[telemetry.listener(enrichers=[spy])]).add_retry(delay=0).build()
    await pipeline.execute(flaky(ConnectionError, "page"))
    assert spy.names == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]


@pytest.mark.anyio
async def test_what_gets_nowhere_is_not_enriched(telemetry: Telemetry) -> None:
    """TL-06: with neither half of an SDK, of disabled pipelines, and after the listener's end."""
    spy = Spy()
    nowhere = OpenTelemetryListener(
        tracer_provider=NoOpTracerProvider(), meter_provider=NoOpMeterProvider(), enrichers=[spy]
    )
    listener = telemetry.listener(enrichers=[spy])
    for each in (nowhere, listener):
        pipeline = B("p", listeners=[each]).add_retry(delay=0).build()
        if each is listener:
            with disabled():
                await pipeline.execute(flaky(1))
            listener.close()
        await pipeline.execute(flaky(ConnectionError, 1))
    assert spy.names == []


@pytest.mark.anyio
async def test_one_half_of_an_sdk_is_enough(telemetry: Telemetry) -> None:
    """TL-06: spans without metrics, and metrics without spans; each event that gets anywhere, once."""
    of_spans, of_metrics = Spy(), Spy()
    spans = OpenTelemetryListener(
        tracer_provider=telemetry.tracer_provider,
        meter_provider=NoOpMeterProvider(),
        enrichers=[of_spans],
    )
    metrics = OpenTelemetryListener(
        tracer_provider=NoOpTracerProvider(),
        meter_provider=telemetry.meter_provider,
        enrichers=[of_metrics],
    )
    await B("p", listeners=[spans, metrics]).add_retry().build().execute(flaky(1))
    assert of_spans.names == ["ExecutionAttempt", "PipelineExecuted"]
    assert of_metrics.names == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    assert all("spied" in each for each in everything(telemetry))


@pytest.mark.anyio
async def test_a_call_on_its_way_when_the_listener_is_closed_is_enriched(
    telemetry: Telemetry,
) -> None:
    """TL-06: at the end of its span, the one thing that is still told."""
    spy = Spy()
    listener = telemetry.listener(enrichers=[spy])

    async def fetch() -> None:
        listener.close()

    await B("p", listeners=[listener]).add_retry().build().execute(fetch)
    assert spy.names == ["PipelineExecuting", "PipelineExecuted"]
    assert attributes(telemetry.span("pipeline p"))["spied"] == "PipelineExecuted"


@pytest.mark.anyio
async def test_instrument_takes_enrichers(telemetry: Telemetry) -> None:
    """TL-06: for all pipelines of the process."""
    uninstrument = instrument(**telemetry.options, enrichers=[lambda event: {"region": "eu"}])
    try:
        await B("p").add_retry(delay=0).build().execute(flaky(ConnectionError, 1))
    finally:
        uninstrument()
    assert {each["region"] for each in everything(telemetry)} == {"eu"}


# ---- none of it touches the call ----------------------------------------------------------------


@pytest.mark.anyio
async def test_an_enricher_that_raises_harms_nobody(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    """TL-06: nothing is lost but its own attributes, and it is logged once, however often it raises."""

    def fail(event: TelemetryEvent) -> dict[str, str]:
        raise KeyError("tenant")

    enrichers = [lambda event: {"before": 1}, fail, lambda event: {"after": 1}]
    pipeline = (
        B("p", listeners=[telemetry.listener(enrichers=enrichers)]).add_retry(delay=0).build()
    )
    for _ in range(2):
        assert await pipeline.execute(flaky(ConnectionError, "page")) == "page"
    found = everything(telemetry)
    assert len(found) == 5 + 2 * (3 + 1)
    for each in found:
        assert (each["before"], each["after"]) == (1, 1)
    (executed,) = telemetry.points("resilience.pipeline.duration")
    assert executed.count == 2
    (complaint,) = complaints(caplog)
    assert "KeyError('tenant')" in complaint
    assert "fail" in complaint


class Half(dict[str, Any]):
    """Breaks off while it is read."""

    def items(self) -> Any:
        yield "one", 1
        raise OSError("no more")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        pytest.param([("a", 1)], "a mapping of attributes, or None", id="a-list"),
        pytest.param("a=1", "a mapping of attributes, or None", id="text"),
        pytest.param({"good": 1, 2: "x"}, "names of attributes are text", id="a-number-as-name"),
        pytest.param({"good": 1, "": "x"}, "and not empty", id="an-empty-name"),
        pytest.param({"good": 1, "bad": object}, "the attribute 'bad' the value", id="a-type"),
        pytest.param({"good": 1, "bad": 2**63}, "whole numbers of 64 bits", id="a-large-number"),
        pytest.param({"good": 1, "bad": [1, "x"]}, "lists of one of these", id="mixed"),
        pytest.param({"good": 1, "bad": [[1]]}, "lists of one of these", id="lists-of-lists"),
        pytest.param({"good": 1, "bad": {"x": 1}}, "lists of one of these", id="a-mapping"),
        pytest.param({"good": 1, "bad": b"x"}, "lists of one of these", id="bytes"),
        pytest.param(Half(), "no more", id="one-that-breaks-off"),
    ],
)
async def test_what_can_not_be_an_attribute_is_as_if_it_had_raised(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture, answer: Any, told: str
) -> None:
    """TL-06: an exporter would lose all that it sends at once for its sake; so the whole answer is left out."""
    enrichers = [lambda event: answer, lambda event: {"after": 1}]
    pipeline = B("p", listeners=[telemetry.listener(enrichers=enrichers)]).add_retry().build()
    assert await pipeline.execute(flaky("page")) == "page"
    found = everything(telemetry)
    assert len(found) == 3 + 2
    for each in found:
        assert each["after"] == 1
        assert each.keys().isdisjoint({"good", "bad", "", "one"})
    (complaint,) = complaints(caplog)
    assert told in complaint


@pytest.mark.anyio
async def test_an_enricher_that_turns_out_to_be_async_is_complained_of(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    """TL-06: its coroutine is closed, so Python has nothing to warn of."""

    async def enrich() -> dict[str, int]:
        return {"a": 1}

    pipeline = B("p", listeners=[telemetry.listener(enrichers=[lambda event: enrich()])]).build()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert await pipeline.execute(flaky(1)) == 1
    assert warned == []
    (complaint,) = complaints(caplog)
    assert "a mapping of attributes, or None" in complaint


@pytest.mark.anyio
@pytest.mark.parametrize("at", [PipelineExecuting, PipelineExecuted])
async def test_an_interrupt_in_an_enricher_comes_out_and_ends_the_span(
    telemetry: Telemetry, at: type[TelemetryEvent]
) -> None:
    """TL-06: as it does from a listener; the enricher is not called a second time for the event."""
    called: list[str] = []

    def enrich(event: TelemetryEvent) -> None:
        called.append(event.name)
        if isinstance(event, at):
            raise KeyboardInterrupt

    before = otel_context.get_current()
    listener = telemetry.listener(enrichers=[lambda event: {"before": 1}, enrich])
    pipeline = B("p", listeners=[listener]).build()
    with pytest.raises(KeyboardInterrupt):
        await pipeline.execute(flaky(1))
    assert called.count("PipelineExecuted") == 1
    assert attributes(telemetry.span("pipeline p"))["before"] == 1
    assert "0 calls" in repr(listener)
    assert otel_context.get_current() is before


@pytest.mark.anyio
async def test_an_enricher_may_call_through_a_pipeline(telemetry: Telemetry) -> None:
    """TL-06: one that this listener hears of; that is measured as well, not enriched in turn, and so comes to an end."""
    inner_calls: list[int] = []

    def enrich(event: TelemetryEvent) -> dict[str, int]:
        inner_calls.append(inner.execute_sync(lambda: 1))
        return {"enriched": 1}

    listener = telemetry.listener(enrichers=[enrich])
    inner = B("inner", listeners=[listener]).build()
    await B("p", listeners=[listener]).build().execute(flaky(1))
    assert inner_calls == [1, 1]
    counts = {
        attributes(point)["resilience.pipeline.name"]: point.count
        for point in telemetry.points("resilience.pipeline.duration")
    }
    assert counts == {"p": 1, "inner": 2}
    for each in everything(telemetry):
        assert ("enriched" in each) is (each["resilience.pipeline.name"] == "p")


# ---- what is refused ----------------------------------------------------------------------------


async def coroutine_function(event: TelemetryEvent) -> dict[str, int]:
    return {}


class Async:
    async def __call__(self, event: TelemetryEvent) -> dict[str, int]:
        return {}


async def chunks() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("enrichers", "told"),
    [
        pytest.param(len, "enrichers must be a list of functions, got <built-in", id="a-function"),
        pytest.param(None, "enrichers must be a list of functions, got None", id="None"),
        pytest.param("abc", "enrichers must be a list of functions, got 'abc'", id="text"),
        pytest.param({len}, "enrichers must be a list of functions, got {", id="a-set"),
        pytest.param([{"a": 1}], "must be a function of one event, got {'a': 1}", id="a-mapping"),
        pytest.param([coroutine_function], "got the coroutine function", id="async"),
        pytest.param([partial(coroutine_function)], "got the coroutine function", id="partial"),
        pytest.param([Async()], "nobody waits for enrichers", id="an-async-object"),
    ],
)
def test_bad_enrichers_are_refused(telemetry: Telemetry, enrichers: Any, told: str) -> None:
    """TL-06: when they are given, to a listener as to `instrument`, which then hasn't happened."""
    with pytest.raises(OptionsError, match="bad options for OpenTelemetryListener: ") as raised:
        telemetry.listener(enrichers=enrichers)
    assert told in str(raised.value)
    assert len(raised.value.problems) == 1
    with pytest.raises(OptionsError):
        instrument(**telemetry.options, enrichers=enrichers)
    instrument(**telemetry.options)()


def test_all_bad_enrichers_are_reported_at_once(telemetry: Telemetry) -> None:
    """TL-06: and a coroutine among them, which stands where its function belongs, is closed."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(OptionsError) as raised:
            telemetry.listener(enrichers=[len, 3, coroutine_function(None)])  # type: ignore[arg-type]
        with pytest.raises(OptionsError):
            telemetry.listener(enrichers=coroutine_function(None))  # type: ignore[arg-type]
    assert [problem.partition(", got")[0] for problem in raised.value.problems] == [
        "each of enrichers must be a function of one event",
    ] * 2
    assert warned == []


@pytest.mark.anyio
async def test_a_list_that_changes_later_changes_nothing(telemetry: Telemetry) -> None:
    """TL-06: enrichers are what they were when they were given."""
    enrichers: list[Any] = [lambda event: {"a": 1}]
    pipeline = B("p", listeners=[telemetry.listener(enrichers=enrichers)]).build()
    enrichers[:] = [lambda event: {"b": 1}]
    await pipeline.execute(flaky(1))
    assert all("a" in each and "b" not in each for each in everything(telemetry))


@pytest.mark.anyio
async def test_what_an_enricher_gave_may_change_afterwards(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    """TL-06: one mapping that it fills anew for each event, say."""
    given: dict[str, Any] = {}

    def enrich(event: TelemetryEvent) -> dict[str, Any]:
        given.clear()
        given["name"], given["list"] = event.name, [event.name]
        return given

    pipeline = B("p", listeners=[telemetry.listener(enrichers=[enrich])]).add_retry().build()
    with caplog.at_level(logging.WARNING):
        await pipeline.execute(flaky(1))
    for name, expected in zip(
        INSTRUMENTS, ("PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"), strict=True
    ):
        (point,) = telemetry.points(name)
        assert (attributes(point)["name"], attributes(point)["list"]) == (expected, (expected,))
    assert complaints(caplog) == []
