"""Listeners: who is told what, in which order, and that a call is none the worse for whatever they do."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from math import isnan
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    AttemptCompleted,
    CircuitBreakerControl,
    FixedWindow,
    MisuseError,
    OptionsError,
    PipelineExecuted,
    PipelineExecuting,
    ResilienceContext,
    ResiliencePipelineBuilder,
)
from resilience_pipeline._event import Event
from resilience_pipeline._switches import switches
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.telemetry import Severity, StrategyEvent, TelemetryEvent, add_listener
from resilience_pipeline.testing import VirtualClock, capture_events
from support.calls import BoomError, boom, hang, ok, running, tick
from support.scripted import Scripted

B = ResiliencePipelineBuilder


@pytest.fixture(autouse=True)
def _nobody_left() -> Iterator[None]:
    """Find a listener that a test has left behind."""
    yield
    assert switches.listeners == ()
    assert not switches.on


def names(events: list[TelemetryEvent]) -> list[str]:
    return [event.name for event in events]


# ---- who is told --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_builders_listeners_hear_its_pipelines_alone() -> None:
    """TL-07: every event of these pipelines; nothing of others."""
    mine: list[TelemetryEvent] = []
    pipeline = B("mine", listeners=[mine.append]).add_retry(delay=0).build()
    await B("other").add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert mine == []
    await pipeline.execute(Scripted(OSError, 1))
    assert names(mine) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]


@pytest.mark.anyio
async def test_a_builders_listeners_do_not_hear_nested_pipelines() -> None:
    """A nested pipeline has its own listeners, as it has its own name."""
    inner_events: list[TelemetryEvent] = []
    outer_events: list[TelemetryEvent] = []
    inner = B("inner", listeners=[inner_events.append]).add_retry(delay=0).build()
    await B("outer", listeners=[outer_events.append]).add_pipeline(inner).build().execute(ok)
    assert names(inner_events) == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    assert names(outer_events) == ["PipelineExecuting", "PipelineExecuted"]


@pytest.mark.anyio
async def test_a_listener_for_all_hears_all_until_it_is_removed() -> None:
    """Of pipelines built before and after; removing it again does nothing."""
    before = B("before").build()
    events: list[TelemetryEvent] = []
    remove = add_listener(events.append)
    await before.execute(ok)
    await B("after").build().execute(ok)
    remove()
    remove()
    await before.execute(ok)
    assert [event.pipeline_name for event in events] == ["before", "before", "after", "after"]


@pytest.mark.anyio
async def test_the_same_listener_may_be_added_twice() -> None:
    """It is called twice then, and each removal takes one of them back."""
    events: list[TelemetryEvent] = []
    removals = [add_listener(events.append) for _ in range(2)]
    await B().build().execute(ok)
    assert len(events) == 4
    removals[0]()
    removals[0]()
    await B().build().execute(ok)
    assert len(events) == 6
    removals[1]()


@pytest.mark.anyio
async def test_a_pipelines_own_listeners_are_told_first() -> None:
    """TL-09, otherwise than in Polly: they replace nobody. In the order in which they were given, then the others."""
    order: list[str] = []
    removals = [add_listener(lambda _, n=n: order.append(n)) for n in ("third", "fourth")]  # type: ignore[misc]
    pipeline = B(
        listeners=(lambda _: order.append("first"), lambda _: order.append("second"))
    ).build()
    await pipeline.execute(ok)
    for remove in removals:
        remove()
    assert order == ["first", "second", "third", "fourth"] * 2


@pytest.mark.anyio
async def test_who_begins_to_listen_during_a_call_hears_the_rest() -> None:
    """Retry looks again with each attempt; what is not known by then is not a number."""
    events: list[TelemetryEvent] = []
    removals: list[Callable[[], None]] = []

    async def begin() -> None:
        if not removals:
            removals.append(add_listener(events.append))
        raise BoomError

    with pytest.raises(BoomError):
        await B().add_retry(max_retry_attempts=1, delay=0).build().execute(begin)
    removals[0]()
    assert names(events) == ["OnRetry", "ExecutionAttempt"]
    retried, second = events
    assert retried.duration is not None
    assert isnan(retried.duration)
    assert second.duration is not None
    assert second.duration >= 0


class Silent(StrategyEvent):
    name = "OnSilence"
    severity: Severity = Severity.NONE


class Telling(Strategy[Any]):
    """Reports an event of its own with every call."""

    name = "Telling"

    def __init__(self, kind: type[StrategyEvent]) -> None:
        self._kind = kind

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        def handle(context: ResilienceContext) -> Awaitable[Any]:
            if site.wants(self._kind):
                site.report(self._kind(context=context))
            return next(context)

        return handle


class Heard(StrategyEvent):
    name = "OnHeard"
    severity: Severity = Severity.ERROR


@pytest.mark.anyio
async def test_an_event_of_severity_none_is_dropped() -> None:
    """TL-01: nobody is told."""
    with capture_events() as events:
        await B("p").add(Telling(Silent)).add(Telling(Heard)).build().execute(ok)
    assert names(events) == ["PipelineExecuting", "OnHeard", "PipelineExecuted"]
    heard = events[1]
    assert (heard.pipeline_name, heard.strategy_name, heard.severity) == ("p", "Telling", 40)


# ---- nobody listens -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_without_listeners_no_event_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """TL-01: nothing is built, on any path of any strategy, where no hook and no log asks for it."""
    made: list[str] = []
    make = Event.__init__

    def count(self: Any, **fields: Any) -> None:
        made.append(type(self).__name__)
        make(self, **fields)

    monkeypatch.setattr(Event, "__init__", count)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    clock = VirtualClock(autojump=True)
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_fallback(fallback_value=0)
        .add_rate_limiter(FixedWindow(6, "1h"))
        .add_circuit_breaker(
            failure_ratio=0.5, minimum_throughput=2, break_duration=1, control=control
        )
        .add_hedging(delay=-1)
        .add_concurrency_limiter(1)
        .add_retry(max_retry_attempts=1, delay=1)
        .add_timeout(5)
        .build()
    )
    for fn in (ok, boom, boom, hang, boom, ok, ok, ok):
        await pipeline.execute(fn)
        await clock.advance(1)
    control.isolate()
    control.close()
    assert made == []
    with capture_events():
        await pipeline.execute(ok)
    assert made


# ---- listeners that misbehave -------------------------------------------------------------------


class Raising:
    """A listener that raises; without room for a weak reference, and not hashable."""

    __slots__ = ("calls",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls = 0

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self, event: TelemetryEvent) -> None:
        self.calls += 1
        raise ValueError("a bug of the listener's")


@pytest.mark.anyio
@pytest.mark.parametrize("weakly", [False, True])
async def test_a_listener_that_raises_is_logged_once(
    weakly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The call and the other listeners are none the worse; it is called again, and not logged again."""
    raising = Raising()
    bad: Any = (lambda event: raising(event)) if weakly else raising
    events: list[TelemetryEvent] = []
    pipeline = B(listeners=[bad, events.append]).add_retry(delay=0).build()
    for _ in range(2):
        assert await pipeline.execute(ok) == 1
    assert len(events) == raising.calls == 6
    complaints = [record for record in caplog.records if "told of" in record.getMessage()]
    assert len(complaints) == 1
    (complaint,) = complaints
    assert (complaint.name, complaint.levelno) == ("resilience_pipeline", logging.ERROR)
    assert "a bug of the listener's" in complaint.getMessage()
    assert complaint.exc_info is not None


@pytest.mark.anyio
async def test_each_listener_is_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once per listener, not once for all."""

    def one(event: TelemetryEvent) -> None:
        raise ValueError

    def other(event: TelemetryEvent) -> None:
        raise ValueError

    await B(listeners=[one, other]).build().execute(ok)
    assert len(caplog.records) == 2


@pytest.mark.anyio
async def test_a_listener_that_raises_spoils_no_transition() -> None:
    """A circuit opens, and a loser is cancelled, whatever listeners do."""
    raising = Raising()
    control = CircuitBreakerControl()
    pipeline = (
        B(listeners=[raising])
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=2, control=control)
        .add_hedging(delay=-1)
        .build()
    )
    for _ in range(2):
        await pipeline.settle(boom)
    assert control.state == "open"


@pytest.mark.anyio
async def test_an_interrupt_in_a_listener_comes_out() -> None:
    """What is no `Exception` is not the listener's to keep, and nobody's to swallow."""

    def interrupt(event: TelemetryEvent) -> None:
        if isinstance(event, AttemptCompleted):
            raise KeyboardInterrupt

    pipeline = B(listeners=[interrupt]).add_concurrency_limiter(1).add_retry().build()
    with pytest.raises(KeyboardInterrupt):
        await pipeline.execute(ok)
    with pytest.raises(KeyboardInterrupt):  # the permit has come back
        await pipeline.execute(ok)


@pytest.mark.anyio
async def test_an_interrupt_at_the_begin_is_told_as_an_end() -> None:
    """To each PipelineExecuting that was told there is a PipelineExecuted, whatever comes in between."""
    told: list[tuple[str, Any, float | None]] = []
    fetch = Scripted(1)

    def interrupt(event: TelemetryEvent) -> None:
        if isinstance(event, PipelineExecuting):
            raise KeyboardInterrupt

    def listen(event: TelemetryEvent) -> None:
        told.append((event.name, event.outcome, event.duration))

    pipeline = B(clock=VirtualClock(), listeners=[listen, interrupt]).build()
    with pytest.raises(KeyboardInterrupt):
        await pipeline.execute(fetch)
    assert told == [("PipelineExecuting", None, None), ("PipelineExecuted", None, 0.0)]
    assert fetch.calls == 0


async def _async_listener(event: TelemetryEvent) -> None:
    raise AssertionError


class _AsyncListener:
    async def __call__(self, event: TelemetryEvent) -> None:
        raise AssertionError


@pytest.mark.parametrize("listener", [_async_listener, _AsyncListener(), 5, None])
def test_what_can_not_listen_is_refused(listener: Any) -> None:
    """Nobody waits for a listener: a coroutine function is refused, with the remedy."""
    with pytest.raises(MisuseError, match=r"add_listener\(\) takes a .*function of one event, got"):
        add_listener(listener)
    with pytest.raises(OptionsError, match=r"each of listeners must be a .*function of one event"):
        B(listeners=[listener])


def test_all_bad_listeners_are_named_with_other_bad_options() -> None:
    """One error for the builder's options."""
    name: Any = 5
    listeners: Any = [1, print, "two"]
    with pytest.raises(OptionsError) as caught:
        B(name, listeners=listeners)
    assert len(caught.value.problems) == 3
    for bad in (5, print):
        with pytest.raises(OptionsError, match="listeners must be a list of functions"):
            B(listeners=bad)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_what_returns_an_awaitable_is_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A plain function that gives a coroutine: that is closed, and said once."""
    pipeline = B(listeners=[lambda event: _async_listener(event)]).build()
    await pipeline.execute(ok)
    assert len(caplog.records) == 1
    assert "which nobody awaits" in caplog.text


# ---- cancellation -------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("strategy", ["retry", "hedging"])
async def test_a_cancelled_call_has_no_outcome(strategy: str) -> None:
    """Cancellation is no error: attempts and the call end with outcome `None`, and are told all the same."""
    builder = B()
    pipeline = (
        builder.add_retry() if strategy == "retry" else builder.add_hedging(delay=60)
    ).build()
    with capture_events() as events:
        async with running(pipeline.execute, hang) as scope:
            scope.cancel()
            await tick()
    assert names(events) == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    _, attempt, executed = events
    assert isinstance(attempt, AttemptCompleted)
    assert (attempt.outcome, attempt.handled, attempt.severity) == (None, False, Severity.INFO)
    assert isinstance(executed, PipelineExecuted)
    assert (executed.outcome, executed.severity) == (None, Severity.INFO)


@pytest.mark.anyio
async def test_a_wait_that_is_cancelled_is_no_attempt() -> None:
    """Cancelled between two attempts: the one that failed is told, and no other."""
    pipeline = B(clock=VirtualClock()).add_retry(delay=5).build()
    with capture_events() as events:
        async with running(pipeline.execute, boom) as scope:
            scope.cancel()
            await tick()
    assert names(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "PipelineExecuted",
    ]
    assert events[-1].outcome is None


@pytest.mark.anyio
async def test_a_cancelled_stream_is_told() -> None:
    """The same before a stream's first chunk."""

    async def never() -> Any:
        await anyio.sleep_forever()
        yield 1

    stream = B().add_retry().build().execute_stream(never)
    with capture_events() as events:
        async with running(anext, stream) as scope:
            scope.cancel()
            await tick()
    assert names(events) == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
    assert [event.outcome for event in events] == [None, None, None]


# ---- threads ------------------------------------------------------------------------------------


def test_listeners_are_called_under_no_lock() -> None:
    """Another thread gets at the breaker and at the listeners while one of them is being called."""
    control = CircuitBreakerControl()
    reached: list[str] = []

    def from_elsewhere(event: TelemetryEvent) -> None:
        def reach() -> None:
            reached.append(control.state)
            add_listener(print)()

        thread = threading.Thread(target=reach)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    pipeline = B(listeners=[from_elsewhere]).add_circuit_breaker(control=control).build()
    control.isolate()
    control.close()
    assert pipeline.execute_sync(lambda: 1) == 1
    assert reached == ["isolated", "closed", "closed", "closed"]


def test_listeners_come_and_go_while_calls_run() -> None:
    """From other threads, at any time; whoever listens throughout misses nothing."""
    rounds, threads = 300, 3
    kept: list[TelemetryEvent] = []
    remove = add_listener(kept.append)
    pipeline = B().add_retry(delay=0).build()
    errors: list[BaseException] = []

    def work(do: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                for _ in range(rounds):
                    do()
            except BaseException as error:
                errors.append(error)

        return run

    def come_and_go() -> None:
        seen: list[TelemetryEvent] = []
        gone = add_listener(seen.append)
        gone()

    workers = [
        *(
            threading.Thread(target=work(lambda: pipeline.execute_sync(int)))
            for _ in range(threads)
        ),
        threading.Thread(target=work(come_and_go)),
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    remove()
    assert errors == []
    assert len(kept) == rounds * threads * 3


def test_transitions_from_many_threads_are_told_in_order() -> None:
    """Opened, half-opened, then opened or closed: as the circuit itself has gone."""
    clock = VirtualClock()
    steps: list[str] = []

    def note(event: TelemetryEvent) -> None:
        if event.name.startswith("OnCircuit"):
            steps.append(event.name.removeprefix("OnCircuit"))

    pipeline = (
        B(clock=clock, listeners=[note])
        .add_circuit_breaker(
            failure_ratio=0.1,
            minimum_throughput=2,
            break_duration=0.001,
            # A break that is over as it begins: every call is a trial, or refused by one.
            break_duration_generator=lambda event: 0,
        )
        .build()
    )

    def fail() -> None:
        raise OSError

    def work(number: int) -> None:
        for turn in range(200):
            pipeline.settle_sync(fail if (turn + number) % 3 else int)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    follows = {
        "Closed": {"Opened"},
        "Opened": {"HalfOpened"},
        "HalfOpened": {"Opened", "Closed"},
    }
    at = "Closed"
    assert len(steps) > 10
    for step in steps:
        assert step in follows[at]
        at = step


# ---- what is kept -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_telling_keeps_nothing_alive() -> None:
    """No circle through an event, its error and the frames it passed: all goes without the collector."""
    errors: list[weakref.ref[BaseException]] = []

    class WeakError(Exception):
        pass

    def make() -> WeakError:
        error = WeakError()
        errors.append(weakref.ref(error))
        return error

    async def fail() -> None:
        raise make()  # no local name, which would close a circle of its own

    pipeline = (
        B(listeners=[lambda event: None])
        .add_hedging(delay=-1, max_hedged_attempts=1)
        .add_retry(max_retry_attempts=1, delay=0)
        .build()
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with suppress(WeakError):
                await pipeline.execute(fail)
        assert [error() for error in errors] == [None] * 8
    finally:
        gc.enable()
