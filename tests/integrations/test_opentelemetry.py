"""OpenTelemetry, by what the SDK's own exporters and readers hold in memory afterwards."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator
from contextvars import copy_context
from typing import Any

import anyio
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from resilience_pipeline import (
    CircuitBreakerControl,
    MisuseError,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    TimeoutRejectedError,
    handle_result,
)
from resilience_pipeline._switches import switches
from resilience_pipeline.integrations._otel_spans import Execution
from resilience_pipeline.integrations.opentelemetry import OpenTelemetryListener, instrument
from resilience_pipeline.telemetry import StrategyEvent
from resilience_pipeline.testing import VirtualClock, Wait, disabled, flaky
from support.otel import Telemetry, attributes

B = ResiliencePipelineBuilder


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    number: int = span.context.span_id
    return number


# ---- spans --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_execution_is_a_span_and_each_attempt_a_child(telemetry: Telemetry) -> None:
    """With names, numbers and outcomes as attributes, and the length that the clock says."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B("shop", instance="eu", clock=clock, listeners=[telemetry.listener()])
        .add_retry(delay=0)
        .build()
    )
    fetch = flaky(ConnectionError("no route"), "page")
    assert await pipeline.execute(fetch, operation_key="GET /") == "page"
    first, second, execution = telemetry.spans
    assert [span.name for span in telemetry.spans] == ["attempt", "attempt", "pipeline shop"]
    assert parent_of(execution) is None
    assert parent_of(first) == parent_of(second) == id_of(execution)
    assert attributes(execution) == {
        "resilience.pipeline.name": "shop",
        "resilience.pipeline.instance": "eu",
        "resilience.operation.key": "GET /",
        "resilience.outcome": "success",
    }
    assert execution.status.status_code is StatusCode.UNSET
    assert attributes(first) == {
        "resilience.pipeline.name": "shop",
        "resilience.pipeline.instance": "eu",
        "resilience.operation.key": "GET /",
        "resilience.strategy.name": "Retry",
        "resilience.attempt.number": 0,
        "resilience.attempt.handled": True,
        "resilience.event.severity": "Warning",
        "resilience.outcome": "failure",
        "exception.type": "ConnectionError",
    }
    assert first.status.status_code is StatusCode.ERROR
    (raised,) = first.events
    assert raised.name == "exception"
    assert attributes(raised)["exception.message"] == "no route"
    assert attributes(second)["resilience.attempt.number"] == 1
    assert second.status.status_code is StatusCode.UNSET
    assert not second.events


@pytest.mark.anyio
async def test_a_span_of_an_attempt_lasts_as_long_as_the_attempt(telemetry: Telemetry) -> None:
    """Its start is its end less its duration, and never before its parent's."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry().build()
    await pipeline.execute(flaky("page"))
    attempt, execution = telemetry.spans
    for span in (attempt, execution):
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
    assert attempt.start_time >= execution.start_time  # type: ignore[operator]
    assert attempt.end_time <= execution.end_time  # type: ignore[operator]


@pytest.mark.anyio
async def test_what_happens_is_an_event_of_the_execution(telemetry: Telemetry) -> None:
    """A retry, with its own numbers, and names as everywhere."""
    clock = VirtualClock(autojump=True)
    pipeline = B("p", clock=clock, listeners=[telemetry.listener()]).add_retry(delay=3).build()
    await pipeline.execute(flaky(KeyError("secret"), "page"))
    (retried,) = telemetry.span("pipeline p").events
    assert retried.name == "OnRetry"
    assert attributes(retried) == {
        "resilience.pipeline.name": "p",
        "resilience.strategy.name": "Retry",
        "resilience.event.name": "OnRetry",
        "resilience.event.severity": "Warning",
        "resilience.attempt.number": 0,
        "resilience.delay": 3.0,
        "exception.type": "KeyError",
    }


@pytest.mark.anyio
async def test_time_outs_and_transitions_are_events(telemetry: Telemetry) -> None:
    """Of the execution in which they happen; it ends as rejected, with the error recorded."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B("p", clock=clock, listeners=[telemetry.listener()])
        .add_circuit_breaker(minimum_throughput=2, failure_ratio=0.5)
        .add_timeout(2)
        .build()
    )
    for _ in range(2):
        with pytest.raises(TimeoutRejectedError):
            await pipeline.execute(flaky(Wait(1000), "late"))
    await clock.advance(10)
    await pipeline.execute(flaky("page"))
    timed_out, opened, closed = telemetry.spans
    assert [event.name for event in timed_out.events] == ["OnTimeout", "exception"]
    assert attributes(timed_out.events[0])["resilience.timeout"] == 2
    assert attributes(timed_out)["resilience.outcome"] == "rejected"
    kind = "resilience_pipeline.TimeoutRejectedError"
    assert attributes(timed_out)["exception.type"] == kind
    assert timed_out.status.status_code is StatusCode.ERROR
    assert [event.name for event in opened.events] == ["OnTimeout", "OnCircuitOpened", "exception"]
    assert attributes(opened.events[1])["resilience.break_duration"] == 5
    assert [event.name for event in closed.events] == ["OnCircuitHalfOpened", "OnCircuitClosed"]


@pytest.mark.anyio
async def test_the_span_is_current_inside_and_not_outside(telemetry: Telemetry) -> None:
    """Spans of the callback are its children; the caller's own is its parent, and current again after it."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry().add_timeout(60).build()
    before = otel_context.get_current()

    async def fetch() -> int:
        with telemetry.tracer.start_as_current_span("GET"):
            return 1

    with telemetry.tracer.start_as_current_span("request") as request:
        await pipeline.execute(fetch)
        assert trace.get_current_span() is request
    assert otel_context.get_current() is before
    execution = telemetry.span("pipeline p")
    assert parent_of(telemetry.span("GET")) == id_of(execution)
    assert parent_of(execution) == id_of(telemetry.span("request"))


@pytest.mark.anyio
async def test_a_nested_pipeline_is_a_child(telemetry: Telemetry) -> None:
    """And its attempts are children of that, though both go by one context and may share a name."""
    listener = telemetry.listener()
    inner = B("same", listeners=[listener]).add_retry(name="inner").build()
    outer = B("same", listeners=[listener]).add_retry(name="outer").add_pipeline(inner).build()
    await outer.execute(flaky(1))
    by_inner, inside, by_outer, around = telemetry.spans
    assert parent_of(by_inner) == id_of(inside)
    assert parent_of(inside) == parent_of(by_outer) == id_of(around)
    assert attributes(by_inner)["resilience.strategy.name"] == "inner"
    assert attributes(by_outer)["resilience.strategy.name"] == "outer"


@pytest.mark.anyio
async def test_hedged_attempts_are_children_of_their_execution(telemetry: Telemetry) -> None:
    """The losers too, which are cancelled: no error, and no success either."""
    clock = VirtualClock(autojump=True)
    pipeline = B("p", clock=clock, listeners=[telemetry.listener()]).add_hedging(delay=1).build()
    calls: list[int] = []

    async def fetch() -> int:
        calls.append(1)
        if len(calls) == 1:
            await clock.sleep(1000)
        return 7

    assert await pipeline.execute(fetch) == 7
    execution = telemetry.span("pipeline p")
    attempts = [span for span in telemetry.spans if span.name == "attempt"]
    assert {parent_of(each) for each in attempts} == {id_of(execution)}
    outcomes = {
        attributes(each)["resilience.attempt.number"]: attributes(each)["resilience.outcome"]
        for each in attempts
    }
    assert outcomes == {0: "cancelled", 1: "success"}
    assert all(each.status.status_code is StatusCode.UNSET for each in attempts)
    assert [event.name for event in execution.events] == ["OnHedging"]


@pytest.mark.anyio
async def test_a_handled_result_is_an_error_of_its_attempt(telemetry: Telemetry) -> None:
    """And neither it nor any argument is told."""
    pipeline = (
        B("p", listeners=[telemetry.listener()])
        .add_retry(delay=0, should_handle=handle_result(lambda page: page == "secret"))
        .build()
    )
    fetch = flaky("secret", "fine")
    await pipeline.execute(fetch)
    bad, good, execution = telemetry.spans
    assert bad.status.status_code is StatusCode.ERROR
    assert good.status.status_code is StatusCode.UNSET
    assert "secret" not in "".join(map(ReadableSpan.to_json, (bad, good, execution)))


@pytest.mark.anyio
async def test_a_stream_is_a_span_to_its_first_chunk(telemetry: Telemetry) -> None:
    """The consumer's context is its own again from then on, whoever owns the source."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry().add_hedging().build()
    before = otel_context.get_current()
    seen: list[trace.Span] = []

    async def chunks() -> AsyncIterator[int]:
        seen.append(trace.get_current_span())
        yield 1
        yield 2

    async with pipeline.execute_stream(chunks) as stream:
        async for chunk in stream:
            assert otel_context.get_current() is before
            assert telemetry.names()[-1] == "pipeline p", chunk
    execution = telemetry.span("pipeline p")
    assert seen[0].get_span_context().span_id == id_of(execution)
    assert attributes(execution)["resilience.outcome"] == "success"


@pytest.mark.anyio
async def test_attempts_of_a_resumed_stream_are_children_too(telemetry: Telemetry) -> None:
    """Though the span of the execution has ended by then, with the first chunk."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry(delay=0, resumable=True).build()
    fetch = flaky([1, ConnectionError], [1, 2])
    with telemetry.tracer.start_as_current_span("request") as request:
        assert [chunk async for chunk in pipeline.execute_stream(fetch)] == [1, 2]
        assert trace.get_current_span() is request
    assert telemetry.names() == ["attempt", "pipeline p", "attempt", "attempt", "request"]
    parents = {parent_of(span) for span in telemetry.spans if span.name == "attempt"}
    assert parents == {id_of(telemetry.span("pipeline p"))}


def test_a_stream_of_threads(telemetry: Telemetry) -> None:
    """The same without an event loop, and with time limits, which read in worker threads."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry().add_timeout(60).build()
    before = otel_context.get_current()
    with pipeline.execute_stream_sync(lambda: iter([1, 2])) as stream:
        assert list(stream) == [1, 2]
    assert otel_context.get_current() is before
    assert telemetry.names() == ["attempt", "pipeline p"]


def test_a_worker_thread_finds_the_span_current(telemetry: Telemetry) -> None:
    """A call with a time limit runs in another thread; its spans are children all the same."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_timeout(60).build()

    def fetch() -> int:
        assert threading.current_thread() is not threading.main_thread()
        with telemetry.tracer.start_as_current_span("GET"):
            return 1

    pipeline.execute_sync(fetch)
    assert parent_of(telemetry.span("GET")) == id_of(telemetry.span("pipeline p"))


@pytest.mark.asyncio
async def test_a_cancelled_call_ends_its_span(telemetry: Telemetry) -> None:
    """As cancelled, which is no error; the attempt that was running as well."""
    listener = telemetry.listener()
    pipeline = B("p", listeners=[listener]).add_retry().build()
    inside = asyncio.Event()

    async def hang() -> None:
        inside.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(pipeline.execute(hang))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert telemetry.names() == ["attempt", "pipeline p"]
    for span in telemetry.spans:
        assert attributes(span)["resilience.outcome"] == "cancelled"
        assert span.status.status_code is StatusCode.UNSET
    assert "0 calls" in repr(listener)


def test_a_call_that_is_closed_elsewhere_ends_its_span(
    telemetry: Telemetry, caplog: pytest.LogCaptureFixture
) -> None:
    """By the garbage collector, say: in no context that it knows, which is left as it is, without a word."""
    listener = telemetry.listener()
    pipeline = B("p", listeners=[listener]).add_retry().build()

    class Never:
        def __await__(self) -> Generator[None]:
            yield

    async def hang() -> None:
        await Never()

    call = pipeline.execute(hang)
    began_in = copy_context()
    began_in.run(call.send, None)
    inside = began_in.copy()
    with telemetry.tracer.start_as_current_span("other") as other, caplog.at_level(logging.DEBUG):
        call.close()
        assert trace.get_current_span() is other
    assert telemetry.names() == ["attempt", "pipeline p", "other"]
    assert "0 calls" in repr(listener)

    call = pipeline.execute(hang)
    inside.run(call.send, None)
    with caplog.at_level(logging.DEBUG):
        inside.copy().run(call.close)
    assert "0 calls" in repr(listener)
    assert all(hasattr(record, "event_name") for record in caplog.records)  # no complaint


@pytest.mark.anyio
async def test_a_hook_that_raises_ends_the_span(telemetry: Telemetry) -> None:
    """With its error."""
    listener = telemetry.listener()

    def on_retry(event: object) -> None:
        raise ZeroDivisionError

    pipeline = B("p", listeners=[listener]).add_retry(on_retry=on_retry).build()
    outcome = await pipeline.settle(flaky(ConnectionError))
    assert not outcome.ok
    assert attributes(telemetry.span("pipeline p"))["exception.type"] == "ZeroDivisionError"
    assert "0 calls" in repr(listener)


@pytest.mark.anyio
async def test_two_providers_have_a_trace_each(telemetry: Telemetry) -> None:
    """The same pipeline, nested ones included: nobody's spans are children of the other's."""
    other = Telemetry()
    listeners = [telemetry.listener(), other.listener()]
    inner = B("inner", listeners=listeners).add_retry().build()
    outer = B("outer", listeners=listeners).add_pipeline(inner).build()
    before = otel_context.get_current()
    await outer.execute(flaky(1))
    assert otel_context.get_current() is before
    for each in (telemetry, other):
        attempt, inside, around = each.spans
        assert (inside.name, around.name) == ("pipeline inner", "pipeline outer")
        assert parent_of(attempt) == id_of(inside)
        assert parent_of(inside) == id_of(around)
        assert parent_of(around) is None


@pytest.mark.anyio
async def test_spans_of_the_user_in_between_are_parents(telemetry: Telemetry) -> None:
    """A pipeline that a callback runs is a child of the callback's span, with two providers as well."""
    other = Telemetry()
    listeners = [telemetry.listener(), other.listener()]
    inner = B("inner", listeners=listeners).build()
    outer = B("outer", listeners=listeners).build()

    async def fetch() -> None:
        with telemetry.tracer.start_as_current_span("between"):
            await inner.execute(flaky(1))

    await outer.execute(fetch)
    between = telemetry.span("between")
    assert parent_of(telemetry.span("pipeline inner")) == id_of(between)
    assert parent_of(other.span("pipeline inner")) == id_of(between)


class Told(StrategyEvent):
    """An event of somebody's own strategy."""

    name = "OnTold"
    text: str
    count: int
    huge: int
    endless: float


def test_events_of_other_strategies_tell_their_numbers_alone(telemetry: Telemetry) -> None:
    """Text may be secret, and what is too large for the wire stays out; from any thread."""
    listener = telemetry.listener()
    pipeline = B("p", listeners=[listener]).build()
    context = ResilienceContext()

    def fetch() -> None:
        told = Told(
            context=context,
            pipeline_name="p",
            text="secret",
            count=3,
            huge=10**400,
            endless=float("inf"),
        )
        thread = threading.Thread(target=listener, args=(told,))
        thread.start()
        thread.join()

    pipeline.execute_sync(fetch, context=context)
    (event,) = telemetry.span("pipeline p").events
    assert attributes(event) == {
        "resilience.pipeline.name": "p",
        "resilience.event.name": "OnTold",
        "resilience.event.severity": "Information",
        "resilience.count": 3,
    }


def test_a_circuit_driven_by_hand_has_no_span(telemetry: Telemetry) -> None:
    """There is no execution, but there is a transition to be counted."""
    control = CircuitBreakerControl()
    builder = B("p", listeners=[telemetry.listener()]).add_circuit_breaker(control=control)
    pipeline = builder.build()
    control.isolate()
    assert pipeline.name == "p"
    assert telemetry.spans == ()
    (point,) = telemetry.points("resilience.strategy.events")
    assert attributes(point)["resilience.event.name"] == "OnCircuitOpened"


# ---- metrics ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_three_instruments(telemetry: Telemetry) -> None:
    """TL-03, TL-04: Polly's, with its tags; of an attempt, its number and whether it was handled; in seconds."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B("p", instance="i", clock=clock, listeners=[telemetry.listener()])
        .add_retry(delay=3)
        .build()
    )
    await pipeline.execute(flaky(ConnectionError, "page"), operation_key="op")
    place = {
        "resilience.pipeline.name": "p",
        "resilience.pipeline.instance": "i",
        "resilience.operation.key": "op",
    }
    counted = telemetry.points("resilience.strategy.events")
    assert {attributes(each)["resilience.event.name"]: each.value for each in counted} == {
        "PipelineExecuting": 1,
        "OnRetry": 1,
    }
    (executed,) = telemetry.points("resilience.pipeline.duration")
    assert (executed.count, executed.sum) == (1, 3)
    assert attributes(executed) == place | {
        "resilience.event.name": "PipelineExecuted",
        "resilience.event.severity": "Information",
        "resilience.outcome": "success",
    }
    assert executed.explicit_bounds[0] == 0.005
    first, second = sorted(
        telemetry.points("resilience.strategy.attempt.duration"),
        key=lambda point: attributes(point)["resilience.attempt.number"],
    )
    assert attributes(first) == place | {
        "resilience.strategy.name": "Retry",
        "resilience.event.name": "ExecutionAttempt",
        "resilience.event.severity": "Warning",
        "resilience.attempt.number": 0,
        "resilience.attempt.handled": True,
        "resilience.outcome": "failure",
        "exception.type": "ConnectionError",
    }
    assert attributes(second)["resilience.attempt.number"] == 1
    assert "exception.type" not in attributes(second)
    assert telemetry.unit("resilience.pipeline.duration") == "s"
    assert telemetry.unit("resilience.strategy.attempt.duration") == "s"


@pytest.mark.anyio
async def test_a_retry_without_end_makes_no_series_without_end(telemetry: Telemetry) -> None:
    """Attempts from the tenth retry on are one series; their spans have the number."""
    pipeline = B(listeners=[telemetry.listener()]).add_retry(delay=0, max_retry_attempts=50).build()
    await pipeline.settle(flaky(then=ConnectionError))
    numbers = [
        attributes(point)["resilience.attempt.number"]
        for point in telemetry.points("resilience.strategy.attempt.duration")
    ]
    assert set(numbers) == set(range(11))
    last = [span for span in telemetry.spans if span.name == "attempt"][-1]
    assert attributes(last)["resilience.attempt.number"] == 50
    assert telemetry.names()[-1] == "pipeline"


def states(telemetry: Telemetry) -> dict[str, int]:
    """How many circuits are in each state, all breakers together."""
    found: dict[str, int] = {}
    for point in telemetry.points("resilience.circuit_breaker.state"):
        state = attributes(point)["resilience.circuit_breaker.state"]
        found[state] = found.get(state, 0) + point.value
    return found


@pytest.mark.anyio
async def test_the_state_of_a_circuit_is_a_gauge(telemetry: Telemetry) -> None:
    """From its first transition on, where no registry is watched."""
    clock = VirtualClock(autojump=True)
    control = CircuitBreakerControl()
    pipeline = (
        B("p", clock=clock, listeners=[telemetry.listener()])
        .add_circuit_breaker(control=control, minimum_throughput=2, half_open_probes=2)
        .build()
    )
    assert states(telemetry) == {}
    fetch = flaky(ConnectionError, ConnectionError, "page", "page")
    await pipeline.settle(fetch)
    await pipeline.settle(fetch)
    assert states(telemetry) == {"closed": 0, "open": 1, "half_open": 0, "isolated": 0}
    point = telemetry.points("resilience.circuit_breaker.state")[0]
    assert attributes(point)["resilience.pipeline.name"] == "p"
    assert attributes(point)["resilience.strategy.name"] == "CircuitBreaker"
    await clock.advance(5)
    await pipeline.execute(fetch)
    assert states(telemetry)["half_open"] == 1
    await pipeline.execute(fetch)
    assert states(telemetry)["closed"] == 1
    control.isolate()
    assert states(telemetry)["isolated"] == 1


@pytest.mark.anyio
async def test_a_watched_registry_shows_breakers_and_limiters(telemetry: Telemetry) -> None:
    """As its health says, whenever metrics are collected: closed circuits, and permits in use."""
    listener = telemetry.listener()
    pipelines = ResiliencePipelineRegistry(listeners=[listener])
    pipelines.load(
        {
            "pipelines": {
                "shared": {"strategies": [{"type": "circuit_breaker"}]},
                "p": {
                    "strategies": [
                        {"type": "concurrency_limiter", "permit_limit": 3},
                        {
                            "type": "rate_limiter",
                            "limiter": {"type": "fixed_window", "permits": 5, "window": "1h"},
                        },
                        {"type": "pipeline", "pipeline": "shared"},
                    ]
                },
            }
        }
    )
    listener.watch(pipelines)
    listener.watch(pipelines)  # the same, so once
    assert states(telemetry) == {}

    def value(name: str) -> int:
        (point,) = telemetry.points(name)
        assert attributes(point)["resilience.pipeline.name"] == "p"
        return point.value  # type: ignore[no-any-return]

    async def fetch() -> None:
        assert value("resilience.concurrency_limiter.permits.used") == 1
        assert value("resilience.concurrency_limiter.permits.limit") == 3
        assert value("resilience.rate_limiter.permits.available") == 4

    await pipelines.get("p").execute(fetch)
    pipelines.get("shared")
    assert value("resilience.concurrency_limiter.permits.used") == 0
    # It is in the health of both.
    assert states(telemetry) == {"closed": 1, "open": 0, "half_open": 0, "isolated": 0}


@pytest.mark.anyio
async def test_state_per_key_is_added_up(telemetry: Telemetry) -> None:
    """Keys are no labels: there may be any number of them."""
    pipelines = ResiliencePipelineRegistry()
    pipelines.add(
        "p",
        lambda builder: builder.add_circuit_breaker(
            key=lambda context: context.operation_key, consecutive_failures=1
        ).add_concurrency_limiter(2, key=lambda context: context.operation_key),
    )
    uninstrument = instrument(**telemetry.options, pipelines=pipelines)
    pipeline = pipelines.get("p")
    await pipeline.settle(flaky(ConnectionError), operation_key="a")
    await pipeline.settle(flaky("page"), operation_key="b")
    assert states(telemetry) == {"closed": 1, "open": 1, "half_open": 0, "isolated": 0}
    (limit,) = telemetry.points("resilience.concurrency_limiter.permits.limit")
    assert limit.value == 4
    uninstrument()
    assert states(telemetry) == {}


def test_listeners_of_one_provider_share_its_gauges(telemetry: Telemetry) -> None:
    """A second one, or one that comes after the first has gone, is asked as well."""
    first, second = telemetry.listener(), telemetry.listener()
    for name, listener in (("one", first), ("two", second)):
        pipelines = ResiliencePipelineRegistry()
        pipelines.add(name, lambda builder: builder.add_circuit_breaker())
        pipelines.get(name)
        listener.watch(pipelines)
    assert states(telemetry)["closed"] == 2
    first.close()
    assert states(telemetry)["closed"] == 1
    del second, listener
    gc.collect()
    assert states(telemetry) == {}


# ---- for the whole process ----------------------------------------------------------------------


@pytest.mark.anyio
async def test_instrument_reaches_all_pipelines_until_it_is_taken_back(
    telemetry: Telemetry,
) -> None:
    """Built before or after."""
    before = B("before").build()
    uninstrument = instrument(**telemetry.options)
    await before.execute(flaky(1))
    await B("after").build().execute(flaky(1))
    uninstrument()
    uninstrument()  # does nothing
    assert not switches.on
    await before.execute(flaky(1))
    assert telemetry.names() == ["pipeline before", "pipeline after"]


@pytest.mark.anyio
async def test_instrument_twice_is_refused(telemetry: Telemetry) -> None:
    """For the same providers; for others it makes another trace."""
    other = Telemetry()
    uninstrument = instrument(**telemetry.options)
    with pytest.raises(MisuseError, match="already"):
        instrument(**telemetry.options)
    uninstrument_other = instrument(**other.options)
    await B("p").build().execute(flaky(1))
    uninstrument()
    uninstrument_other()
    instrument(**telemetry.options)()  # free again
    assert telemetry.names() == other.names() == ["pipeline p"]
    assert parent_of(other.span("pipeline p")) is None


@pytest.mark.asyncio
async def test_calls_on_their_way_get_the_end_of_their_spans(telemetry: Telemetry) -> None:
    """Taking it back leaves no span open and nothing current; new calls are not heard any more."""
    pipeline = B("p").add_retry().build()
    inside, goes_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        inside.set()
        await goes_on.wait()

    async def call() -> None:
        before = otel_context.get_current()
        await pipeline.execute(wait)
        assert otel_context.get_current() is before

    uninstrument = instrument(**telemetry.options)
    task = asyncio.create_task(call())
    await inside.wait()
    uninstrument()
    await pipeline.execute(flaky(1))
    assert telemetry.names() == []
    assert switches.on  # the end is still to come
    goes_on.set()
    await task
    assert telemetry.names() == ["pipeline p"]
    assert not switches.on


@pytest.mark.anyio
async def test_it_works_without_an_sdk() -> None:
    """The API alone does nothing, quietly; so does one half of it."""
    uninstrument = instrument(
        tracer_provider=NoOpTracerProvider(), meter_provider=NoOpMeterProvider()
    )
    try:
        assert await B().add_retry(delay=0).build().execute(flaky(KeyError, 1)) == 1
    finally:
        uninstrument()


def test_the_global_providers_are_the_default() -> None:
    """As everybody's who instruments a library; a second listener is no trouble."""
    with instrument_globally():
        assert B("p").build().execute_sync(lambda: 1) == 1
    with instrument_globally():
        pass


class instrument_globally:  # noqa: N801 - reads as a function
    def __enter__(self) -> None:
        self.uninstrument = instrument()

    def __exit__(self, *_: object) -> None:
        self.uninstrument()


# ---- what is kept -------------------------------------------------------------------------------


class Result:
    """Something that can be referenced weakly."""


@pytest.mark.anyio
async def test_nothing_of_a_finished_execution_is_kept(telemetry: Telemetry) -> None:
    """Neither its result, nor its error, nor its context, nor an argument."""
    listener = telemetry.listener()
    pipeline = B("p", listeners=[listener]).add_retry(delay=0, max_retry_attempts=1).build()
    kept: list[weakref.ref[Any]] = []

    class OddError(Exception):
        pass

    async def fetch(argument: Result) -> Result:
        result, error = Result(), OddError()
        kept.extend([weakref.ref(argument), weakref.ref(result), weakref.ref(error)])
        if len(kept) < 6:
            raise error
        return result

    async def call() -> None:
        await pipeline.execute(fetch, Result())
        await pipeline.settle(fetch, Result())

    await call()
    gc.collect()
    assert len(kept) == 9
    assert [each() for each in kept] == [None] * 9
    assert not listener._open


def make_failing(telemetry: Telemetry, fails: str) -> OpenTelemetryListener:
    """A listener whose provider has a bug."""
    listener = telemetry.listener()

    def fail(*args: object, **kwargs: object) -> Any:
        raise ZeroDivisionError

    if fails == "start_span":
        listener._tracer.start_span = fail  # type: ignore[method-assign]
    else:
        setattr(listener._meters, fails, fail)
    return listener


@pytest.mark.anyio
@pytest.mark.parametrize("fails", ["start_span", "count"])
async def test_an_error_inside_leaves_nothing_behind(telemetry: Telemetry, fails: str) -> None:
    """A span that was begun ends, and the call is none the worse for it."""
    listener = make_failing(telemetry, fails)
    before = otel_context.get_current()
    pipeline = B("p", listeners=[listener]).add_retry(delay=0).build()
    assert await pipeline.execute(flaky(KeyError, 1)) == 1
    assert otel_context.get_current() is before
    assert not listener._open
    assert telemetry.names()[-1:] == ([] if fails == "start_span" else ["pipeline p"])


# ---- at once ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_calls_at_once_have_spans_of_their_own(telemetry: Telemetry) -> None:
    """Fifty in one loop: each attempt is a child of its own execution."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry(delay=0).build()

    async def call(number: int) -> None:
        fetch = flaky(*[ConnectionError] * (number % 3), then=number)
        assert await pipeline.execute(fetch, operation_key=str(number)) == number

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(call, number)
    check_families(telemetry, 50)


def test_calls_in_threads_at_once(telemetry: Telemetry) -> None:
    """The same from eight threads."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry(delay=0).build()
    barrier = threading.Barrier(8)

    def calls(thread: int) -> None:
        barrier.wait()
        for number in range(25):
            key = str(thread * 25 + number)
            pipeline.execute_sync(flaky(ConnectionError, 1), operation_key=key)

    threads = [threading.Thread(target=calls, args=(each,)) for each in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_families(telemetry, 200)


def check_families(telemetry: Telemetry, count: int) -> None:
    executions = {id_of(each): each for each in telemetry.spans if each.name == "pipeline p"}
    assert len(executions) == count
    for each in telemetry.spans:
        if each.name == "attempt":
            parent = executions[parent_of(each)]  # type: ignore[index]
            key = "resilience.operation.key"
            assert attributes(each)[key] == attributes(parent)[key]


@pytest.mark.anyio
async def test_disabled_pipelines_tell_nothing(telemetry: Telemetry) -> None:
    """As for every listener."""
    pipeline: ResiliencePipeline[Any] = B("p", listeners=[telemetry.listener()]).build()
    with disabled():
        await pipeline.execute(flaky(1))
    assert telemetry.spans == ()


def test_a_listener_is_what_builders_take() -> None:
    """By its type, too."""
    listener: Callable[[Any], object] = OpenTelemetryListener()
    assert "0 calls" in repr(listener)
    assert "closed" not in repr(listener)


@pytest.mark.asyncio
async def test_tasks_that_beget_tasks_keep_no_chain_of_executions(telemetry: Telemetry) -> None:
    """Each has a copy of the context of the one before, which has ended, and of none before that."""
    pipeline = B("p", listeners=[telemetry.listener()]).build()
    before = otel_context.get_current()
    done = asyncio.Event()
    kept: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def generation(number: int) -> None:
        async def beget() -> None:
            if number:
                tasks.append(asyncio.create_task(generation(number - 1)))

        await pipeline.execute(beget)
        if not number:
            tasks.clear()
            gc.collect()
            kept.append(sum(isinstance(each, Execution) for each in gc.get_objects()))
            done.set()

    await generation(30)
    await done.wait()
    assert kept[0] <= 2
    assert otel_context.get_current() is before
    # Each is a child of the one that it was begotten in.
    ids = [id_of(span) for span in telemetry.spans]
    assert [parent_of(span) for span in telemetry.spans] == [None, *ids[:-1]]


# ---- one in the middle of another ---------------------------------------------------------------


class Never:
    """Waits, and nothing comes."""

    def __await__(self) -> Generator[None]:
        yield


def abandon(pipeline: ResiliencePipeline[Any]) -> weakref.ref[Any]:
    """Begin a call in a context of its own and leave it to the garbage collector, in a circle."""

    async def hang() -> None:
        await Never()

    class Circle:
        call: Any
        circle: Any

    circle = Circle()
    circle.circle, circle.call = circle, pipeline.execute(hang)
    copy_context().run(circle.call.send, None)
    return weakref.ref(circle)


def test_a_call_that_is_closed_in_the_middle_of_another_event(telemetry: Telemetry) -> None:
    """The garbage collector may run while a lock is held, here and in the SDK: nothing waits for itself."""
    listener = telemetry.listener()
    pipeline = B("abandoned", listeners=[listener]).add_retry().build()
    count = listener._meters.count
    circle = abandon(pipeline)
    collected: list[str] = []

    def collect_and_count(event: Any, further: Any) -> None:
        if not collected and event.pipeline_name == "p":
            with listener._lock:
                gc.collect()
            assert circle() is None
            collected.append(event.name)
        count(event, further)

    listener._meters.count = collect_and_count  # type: ignore[method-assign]
    B("p", listeners=[listener]).build().execute_sync(lambda: 1)
    assert collected == ["PipelineExecuting"]
    assert sorted(telemetry.names()) == ["attempt", "pipeline abandoned", "pipeline p"]
    assert not listener._open


def test_an_exporter_may_call_through_a_pipeline() -> None:
    """Its calls are counted and have no spans, which it would have to export in turn."""
    exported: list[str] = []
    sending = B("sending").add_retry(delay=0).build()

    class Exporter(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            sending.execute_sync(flaky(ConnectionError, 1))
            exported.extend(span.name for span in spans)
            return super().export(spans)

    telemetry = Telemetry()
    tracer_provider = TracerProvider()
    tracer_provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    uninstrument = instrument(
        tracer_provider=tracer_provider, meter_provider=telemetry.meter_provider
    )
    try:
        B("p").add_retry().build().execute_sync(lambda: 1)
    finally:
        uninstrument()
    assert exported == ["attempt", "pipeline p"]
    counted = {
        attributes(point)["resilience.pipeline.name"]: point.count
        for point in telemetry.points("resilience.pipeline.duration")
    }
    assert counted == {"p": 1, "sending": 2}


@pytest.mark.anyio
async def test_where_instrumentation_is_suppressed_there_are_no_spans(telemetry: Telemetry) -> None:
    """As exporters ask for, in their own threads."""
    pipeline = B("p", listeners=[telemetry.listener()]).add_retry(delay=0).build()
    key = otel_context._SUPPRESS_INSTRUMENTATION_KEY
    token = otel_context.attach(otel_context.set_value(key, True))
    try:
        await pipeline.execute(flaky(ConnectionError, 1))
    finally:
        otel_context.detach(token)
    assert telemetry.spans == ()
    await pipeline.execute(flaky(1))
    assert telemetry.names() == ["attempt", "pipeline p"]
