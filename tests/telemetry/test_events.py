"""What happens in pipelines, as events: which, in which order, and what they carry; of calls, streams and threads.

Rows `TL-nn` are those of the Polly dossier. Those of its severity provider (TL-02) and of its texts (TL-05, TL-08) are
in `test_logging`, those of listeners (TL-01, TL-07, TL-09) in `test_listeners`, and those of tags, meters and
enrichers (TL-03, TL-04's histograms, TL-06) in `integrations/test_opentelemetry` and `…_enrichers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from resilience_pipeline import (
    AttemptCompleted,
    CircuitBreakerControl,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    CloseErrorEvent,
    ConcurrencyLimiterRejectedError,
    ConcurrencyLimiterRejectedEvent,
    Failure,
    FallbackEvent,
    FixedWindow,
    HedgingEvent,
    MisuseError,
    PipelineExecuted,
    PipelineExecuting,
    RateLimiterRejectedEvent,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    RetryEvent,
    Success,
    TimeoutEvent,
    TimeoutRejectedError,
    current_context,
    handle_result,
)
from resilience_pipeline.telemetry import Severity, StrategyEvent, TelemetryEvent
from resilience_pipeline.testing import VirtualClock, capture_events
from support.scripted import Closable, Hanging, Scripted

B = ResiliencePipelineBuilder

is_bad = handle_result(lambda value: value == "bad")


def told(events: list[TelemetryEvent]) -> list[str]:
    """The events in words: name, and severity where it is not the class's own."""
    return [event.name for event in events]


def severities(events: list[TelemetryEvent]) -> list[int]:
    return [event.severity for event in events]


# ---- the pipeline itself ------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_call_is_told_at_both_ends() -> None:
    """PL-11: PipelineExecuting (debug), then PipelineExecuted (information) with outcome and duration."""
    clock = VirtualClock(autojump=True)
    pipeline = B("p", instance="i", clock=clock).add_timeout(100).build()
    context = ResilienceContext(operation_key="op")
    with capture_events() as events:
        await pipeline.execute(Scripted(7, clock=clock, takes=3), context=context)
    executing, executed = events
    assert type(executing) is PipelineExecuting
    assert type(executed) is PipelineExecuted
    assert severities(events) == [Severity.DEBUG, Severity.INFO]
    assert (executing.outcome, executing.duration) == (None, None)
    assert (executed.outcome, executed.duration) == (Success(7), 3)
    for event in events:
        assert event.context is context
        assert (event.pipeline_name, event.instance) == ("p", "i")
        assert (event.strategy_name, event.operation_key) == (None, "op")


@pytest.mark.anyio
async def test_a_failed_call_is_no_worse_news() -> None:
    """PipelineExecuted is information for success and failure alike."""
    error = ValueError("no")
    with capture_events() as events:
        await (
            B()
            .add_fallback(fallback_value=1, should_handle=KeyError)
            .build()
            .settle(Scripted(error))
        )
    assert told(events) == ["PipelineExecuting", "PipelineExecuted"]
    assert events[1].outcome == Failure(error)
    assert events[1].severity == Severity.INFO


@pytest.mark.anyio
async def test_a_rejection_is_told_as_one() -> None:
    """The outcome is what `settle` would show: `Rejected` for a refusal of the pipeline's own."""
    pipeline = B().add_rate_limiter(FixedWindow(1, "1h")).build()
    await pipeline.execute(Scripted(1))
    with capture_events() as events:
        await pipeline.settle(Scripted(1))
    assert told(events) == ["PipelineExecuting", "OnRateLimiterRejected", "PipelineExecuted"]
    assert isinstance(events[-1].outcome, Rejected)


@pytest.mark.anyio
async def test_the_empty_pipeline_tells_as_well() -> None:
    """So does one without strategies."""
    with capture_events() as events:
        assert await ResiliencePipeline.empty.execute(Scripted(1)) == 1
        assert (await ResiliencePipeline.empty.settle(Scripted(1))).ok
    assert told(events) == ["PipelineExecuting", "PipelineExecuted"] * 2


@pytest.mark.anyio
async def test_a_nested_pipeline_tells_by_its_own_name() -> None:
    """Each pipeline has its own two events around its part, and its strategies' events name it."""
    inner = B("inner", instance="1").add_retry(delay=0, name="again").build()
    outer = B("outer").add_pipeline(inner).add_retry(delay=0, should_handle=KeyError).build()
    with capture_events() as events:
        await outer.execute(Scripted(ConnectionError, 1))
    assert [(event.name, event.pipeline_name, event.strategy_name) for event in events] == [
        ("PipelineExecuting", "outer", None),
        ("PipelineExecuting", "inner", None),
        ("ExecutionAttempt", "outer", "Retry"),
        ("ExecutionAttempt", "inner", "again"),
        ("OnRetry", "inner", "again"),
        ("ExecutionAttempt", "outer", "Retry"),
        ("ExecutionAttempt", "inner", "again"),
        ("PipelineExecuted", "inner", None),
        ("PipelineExecuted", "outer", None),
    ]
    assert {event.instance for event in events if event.pipeline_name == "inner"} == {"1"}
    assert len({event.context.execution for event in events if event.context is not None}) == 1


@pytest.mark.anyio
async def test_a_call_that_never_begins_is_not_told() -> None:
    """A misuse that is found before the pipeline is entered is no execution."""
    not_callable: Any = 5
    with capture_events() as events, pytest.raises(MisuseError):
        await B().add_retry().build().execute(not_callable)
    assert events == []


@pytest.mark.anyio
async def test_what_a_listener_sets_is_seen_inside() -> None:
    """Listeners run in the task of the call: a context variable set at its begin is seen by the callback.

    So an integration can open a span there and close it at the end.
    """
    from contextvars import ContextVar, Token

    span: ContextVar[str] = ContextVar("span", default="outside")
    tokens: dict[object, Token[str]] = {}
    seen: list[str] = []

    def trace(event: TelemetryEvent) -> None:
        context: Any = event.context
        if isinstance(event, PipelineExecuting):
            tokens[context.execution] = span.set("inside")
        elif isinstance(event, PipelineExecuted):
            span.reset(tokens.pop(context.execution))

    async def look() -> None:
        seen.append(span.get())

    async def chunks() -> AsyncIterator[int]:
        yield 1
        await look()
        yield 2

    pipeline = B(listeners=[trace]).add_retry().add_timeout(1000).build()
    await pipeline.execute(look)
    await B(listeners=[trace]).add_hedging(delay=1000).build().execute(look)
    assert await read(pipeline.execute_stream(chunks)) == [1, 2]
    assert (seen, tokens, span.get()) == (["inside"] * 3, {}, "outside")


# ---- retry --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_retrys_attempts_are_told() -> None:
    """RT-37, RT-39: ExecutionAttempt for each: warning if handled, information if not; OnRetry in between."""
    clock = VirtualClock(autojump=True)
    pipeline = B("p", clock=clock).add_retry(delay=5, name="again").build()
    error = ConnectionError("no")
    with capture_events() as events:
        await pipeline.execute(Scripted(error, 1, clock=clock, takes=2))
    assert told(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]
    _, first, retried, second, executed = events
    assert isinstance(first, AttemptCompleted)
    assert isinstance(retried, RetryEvent)
    assert isinstance(second, AttemptCompleted)
    assert (first.attempt, first.handled, first.duration) == (0, True, 2)
    assert (first.severity, first.outcome) == (Severity.WARNING, Failure(error))
    assert (retried.attempt, retried.delay, retried.duration) == (0, 5, 2)
    assert (retried.severity, retried.outcome) == (Severity.WARNING, Failure(error))
    assert (second.attempt, second.handled, second.duration) == (1, False, 2)
    assert (second.severity, second.outcome) == (Severity.INFO, Success(1))
    assert executed.duration == 9
    for event in (first, retried, second):
        assert (event.pipeline_name, event.strategy_name) == ("p", "again")


@pytest.mark.anyio
async def test_a_handled_last_attempt_is_an_error() -> None:
    """RT-38: ExecutionAttempt is an error where it was handled and none is left; and no OnRetry follows it."""
    with capture_events() as events:
        await B().add_retry(max_retry_attempts=1, delay=0).build().settle(Scripted(OSError))
    assert told(events[1:-1]) == ["ExecutionAttempt", "OnRetry", "ExecutionAttempt"]
    assert severities(events[1:-1]) == [Severity.WARNING, Severity.WARNING, Severity.ERROR]
    last = events[-2]
    assert isinstance(last, AttemptCompleted)
    assert (last.attempt, last.handled) == (1, True)


@pytest.mark.anyio
async def test_an_attempt_that_may_not_be_repeated_is_the_last() -> None:
    """A handled one that was started and is not idempotent has none after it either."""
    with capture_events() as events:
        await B().add_retry(delay=0).build().settle(Scripted(OSError), idempotent=False)
    assert severities(events[1:-1]) == [Severity.ERROR]


@pytest.mark.anyio
async def test_an_unhandled_attempt_is_information() -> None:
    """RT-36: what `should_handle` does not want is told with `handled=False`, as attempt 0, which is the only one."""
    with capture_events() as events:
        await B().add_retry(should_handle=KeyError).build().settle(Scripted(OSError))
    (attempt,) = events[1:-1]
    assert isinstance(attempt, AttemptCompleted)
    assert (attempt.attempt, attempt.handled, attempt.severity) == (0, False, Severity.INFO)
    assert attempt.duration >= 0


@pytest.mark.anyio
async def test_handled_results_are_told() -> None:
    """A handled result is the attempt's outcome, and the retry's."""
    with capture_events() as events:
        await B().add_retry(delay=0, should_handle=is_bad).build().execute(Scripted("bad", "good"))
    outcomes = [event.outcome for event in events[1:-1]]
    assert outcomes == [Success("bad"), Success("bad"), Success("good")]


@pytest.mark.anyio
async def test_hook_and_listener_get_one_event() -> None:
    """The event that a hook is given is the one that listeners got a moment before."""
    order: list[Any] = []

    def hook(event: Any) -> None:
        order.append(("hook", event))

    def listen(event: TelemetryEvent) -> None:
        if not isinstance(event, PipelineExecuting | PipelineExecuted | AttemptCompleted):
            order.append(("listener", event))

    pipeline = (
        B("p", listeners=[listen])
        .add_fallback(fallback_value=0, on_fallback=hook, name="F")
        .add_retry(max_retry_attempts=1, delay=0, on_retry=hook, name="R")
        .build()
    )
    await pipeline.execute(Scripted(OSError))
    kinds = [(who, type(event), event.strategy_name) for who, event in order]
    assert kinds == [
        ("listener", RetryEvent, "R"),
        ("hook", RetryEvent, "R"),
        ("listener", FallbackEvent, "F"),
        ("hook", FallbackEvent, "F"),
    ]
    assert order[0][1] is order[1][1]
    assert order[2][1] is order[3][1]


@pytest.mark.anyio
async def test_a_hooks_event_knows_its_place_without_listeners() -> None:
    """Hooks find pipeline, strategy and operation on their event whether anybody listens or not."""
    seen: list[RetryEvent] = []
    pipeline = B("p", instance="i").add_retry(delay=0, on_retry=seen.append, name="R").build()
    await pipeline.execute(Scripted(OSError, 1), operation_key="op")
    (event,) = seen
    assert (event.pipeline_name, event.instance) == ("p", "i")
    assert (event.strategy_name, event.operation_key) == ("R", "op")
    assert (event.name, event.severity) == ("OnRetry", Severity.WARNING)


# ---- the other strategies -----------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_timeout_is_told() -> None:
    """OnTimeout (error): the limit; no outcome."""
    pipeline = B("p", clock=VirtualClock(autojump=True)).add_timeout(3, name="T").build()
    with capture_events() as events:
        outcome = await pipeline.settle(Hanging())
    assert told(events) == ["PipelineExecuting", "OnTimeout", "PipelineExecuted"]
    event = events[1]
    assert isinstance(event, TimeoutEvent)
    assert (event.timeout, event.severity, event.outcome) == (3, Severity.ERROR, None)
    assert (event.pipeline_name, event.strategy_name) == ("p", "T")
    assert events[2].outcome == outcome
    assert isinstance(outcome, Rejected)


@pytest.mark.anyio
async def test_a_limit_that_was_used_up_is_told() -> None:
    """A generated limit of 0 has expired before the start."""
    pipeline = B().add_timeout(3, timeout_generator=lambda event: 0).build()
    with capture_events() as events:
        await pipeline.settle(Scripted(1))
    event = events[1]
    assert isinstance(event, TimeoutEvent)
    assert event.timeout == 0


@pytest.mark.anyio
@pytest.mark.parametrize("by_action", [False, True])
async def test_a_fallback_is_told(by_action: bool) -> None:
    """OnFallback (warning): what is replaced; once, whether there is an action or a value."""
    builder = B("p")
    if by_action:
        builder.add_fallback(lambda event: 0)
    else:
        builder.add_fallback(fallback_value=0)
    error = OSError("no")
    with capture_events() as events:
        assert await builder.build().execute(Scripted(error)) == 0
    assert told(events) == ["PipelineExecuting", "OnFallback", "PipelineExecuted"]
    assert (events[1].outcome, events[1].severity) == (Failure(error), Severity.WARNING)
    assert (events[1].strategy_name, events[2].outcome) == ("Fallback", Success(0))


@pytest.mark.anyio
async def test_a_circuits_transitions_are_told_in_order() -> None:
    """OnCircuitOpened (error), OnCircuitHalfOpened (warning), OnCircuitClosed (information)."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B("p", clock=clock)
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=2, break_duration=5, name="C")
        .build()
    )
    events: list[TelemetryEvent]
    with capture_events() as events:
        for _ in range(2):
            await pipeline.settle(Scripted(OSError))
        await pipeline.settle(Scripted(1))  # refused: an open circuit's refusals are no events
        await clock.advance(5)
        await pipeline.settle(Scripted(KeyError))
        await clock.advance(5)
        await pipeline.settle(Scripted(1))
    steps = [event for event in events if event.name.startswith("OnCircuit")]
    assert [(event.name, int(event.severity)) for event in steps] == [
        ("OnCircuitOpened", Severity.ERROR),
        ("OnCircuitHalfOpened", Severity.WARNING),
        ("OnCircuitOpened", Severity.ERROR),
        ("OnCircuitHalfOpened", Severity.WARNING),
        ("OnCircuitClosed", Severity.INFO),
    ]
    opened, half, _, _, closed = steps
    assert isinstance(opened, CircuitOpenedEvent)
    assert isinstance(half, CircuitHalfOpenedEvent)
    assert isinstance(closed, CircuitClosedEvent)
    assert (opened.break_duration, opened.manual, closed.manual) == (5, False, False)
    assert isinstance(opened.outcome, Failure)
    assert (half.outcome, closed.outcome) == (None, Success(1))
    assert {(event.pipeline_name, event.strategy_name) for event in steps} == {("p", "C")}


@pytest.mark.anyio
async def test_transitions_by_hand_are_told_at_once() -> None:
    """Isolating and closing by hand tell with `manual=True`, of no execution; closing twice tells once."""
    control = CircuitBreakerControl()
    pipeline = B("p").add_circuit_breaker(control=control, name="C").build()
    with capture_events() as events:
        control.isolate()
        control.isolate()
        control.close()
        control.close()
    assert told(events) == ["OnCircuitOpened", "OnCircuitClosed"]
    for event in events:
        assert isinstance(event, CircuitOpenedEvent | CircuitClosedEvent)
        assert event.manual
        assert (event.context, event.outcome, event.operation_key) == (None, None, None)
        assert (event.pipeline_name, event.strategy_name) == ("p", "C")
    assert (await pipeline.settle(Scripted(1))).ok


@pytest.mark.anyio
async def test_of_a_transition_by_hand_with_a_coroutine_hook_listeners_know_at_once() -> None:
    """The hook waits for the next call, which can await it; listeners don't, and get the same event."""
    hooked: list[CircuitOpenedEvent] = []

    async def on_opened(event: CircuitOpenedEvent) -> None:
        hooked.append(event)

    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control, on_opened=on_opened).build()
    with capture_events() as events:
        control.isolate()
    assert told(events) == ["OnCircuitOpened"]
    await pipeline.settle(Scripted(1))
    assert hooked == events


@pytest.mark.anyio
async def test_a_refusal_of_the_concurrency_limiter_is_told() -> None:
    """OnRateLimiterRejected (error), as in Polly, where the limiters are one; told by their names."""
    pipeline = B("p").add_concurrency_limiter(1, name="L").build()

    async def again() -> Any:
        return await pipeline.execute(Scripted(1))

    with capture_events() as events:
        outcome = await pipeline.settle(again)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, ConcurrencyLimiterRejectedError)
    (event,) = [each for each in events if not each.name.startswith("Pipeline")]
    assert isinstance(event, ConcurrencyLimiterRejectedEvent)
    assert (event.name, event.severity) == ("OnRateLimiterRejected", Severity.ERROR)
    assert (event.outcome, event.strategy_name) == (None, "L")


@pytest.mark.anyio
async def test_a_refusal_of_the_rate_limiter_is_told() -> None:
    """OnRateLimiterRejected (error), with the time until a permit could be had."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_rate_limiter(FixedWindow(1, 10)).build()
    await pipeline.execute(Scripted(1))
    with capture_events() as events:
        await pipeline.settle(Scripted(1))
    event = events[1]
    assert isinstance(event, RateLimiterRejectedEvent)
    assert (event.retry_after, event.severity, event.outcome) == (10, Severity.ERROR, None)
    assert event.strategy_name == "RateLimiter"


# ---- hedging ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_hedging_tells_of_hedges_and_attempts() -> None:
    """OnHedging (warning) before each launch; ExecutionAttempt for each attempt, with its own context."""
    pipeline = (
        B("p", clock=VirtualClock(autojump=True))
        .add_hedging(max_hedged_attempts=2, delay=-1, name="H")
        .build()
    )
    error = OSError("no")
    with capture_events() as events:
        assert await pipeline.execute(Scripted(error, "good")) == "good"
    assert told(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnHedging",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]
    executing, first, hedged, second, _ = events
    assert isinstance(first, AttemptCompleted)
    assert isinstance(hedged, HedgingEvent)
    assert isinstance(second, AttemptCompleted)
    assert (first.attempt, first.handled, first.severity) == (0, True, Severity.WARNING)
    assert (second.attempt, second.handled, second.severity) == (1, False, Severity.INFO)
    assert (first.outcome, second.outcome) == (Failure(error), Success("good"))
    assert (hedged.attempt, hedged.severity, hedged.outcome) == (0, Severity.WARNING, None)
    assert hedged.context is executing.context
    assert second.context is hedged.attempt_context
    assert first.context is not second.context
    assert executing.context is not None
    assert {first.context.execution, second.context.execution} == {executing.context.execution}


@pytest.mark.anyio
async def test_a_handled_last_attempt_of_hedging_is_a_warning() -> None:
    """Only a retry knows which attempt is the last."""
    pipeline = B().add_hedging(max_hedged_attempts=1, delay=-1).build()
    with capture_events() as events:
        await pipeline.settle(Scripted(OSError))
    attempts = [event for event in events if isinstance(event, AttemptCompleted)]
    assert severities([*attempts]) == [Severity.WARNING, Severity.WARNING]


@pytest.mark.anyio
async def test_a_loser_of_hedging_has_no_outcome() -> None:
    """An attempt that was cancelled because another one won is told last, with outcome `None`."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_hedging(delay=2).build()
    hang = Hanging()
    calls = 0

    async def slow_then_quick() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            await hang()
        await clock.sleep(1)
        return "quick"

    with capture_events() as events:
        assert await pipeline.execute(slow_then_quick) == "quick"
    attempts = [event for event in events if isinstance(event, AttemptCompleted)]
    assert [(each.attempt, each.outcome, each.handled) for each in attempts] == [
        (1, Success("quick"), False),
        (0, None, False),
    ]
    assert [each.duration for each in attempts] == [1, 3]
    assert events[-1].name == "PipelineExecuted"


# ---- what nobody will get -----------------------------------------------------------------------


class Stubborn(Closable):
    """A result whose closing fails."""

    async def _aclose(self) -> None:
        await super()._aclose()
        raise RuntimeError("stuck")


@pytest.mark.anyio
async def test_an_error_of_closing_a_discarded_result_is_told() -> None:
    """OnCloseError (warning): the error as a failure; the call is none the worse for it."""
    bad = Stubborn()
    pipeline = (
        B("p")
        .add_retry(delay=0, should_handle=handle_result(lambda value: value is bad), name="R")
        .build()
    )
    with capture_events() as events:
        assert await pipeline.execute(Scripted(bad, 1)) == 1
    (event,) = [each for each in events if each.name == "OnCloseError"]
    assert isinstance(event, CloseErrorEvent)
    assert event.severity == Severity.WARNING
    assert isinstance(event.outcome, Failure)
    assert str(event.outcome.error) == "stuck"
    assert (event.pipeline_name, event.strategy_name) == ("p", "R")
    assert bad.closed == 1


# ---- streams ------------------------------------------------------------------------------------


def stream_of(*scripts: list[Any]) -> Callable[[], AsyncIterator[Any]]:
    """A factory of async generators that yield or raise what their script says."""
    remaining = iter(scripts)

    async def source() -> AsyncIterator[Any]:
        for item in next(remaining):
            if isinstance(item, BaseException):
                raise item
            yield item

    return source


async def read(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


@pytest.mark.anyio
async def test_a_stream_is_told_until_it_is_handed_over() -> None:
    """Nothing before the first pull; PipelineExecuted with the first chunk; nothing afterwards."""
    with capture_events() as events:
        stream: Any = B("p").add_retry().build().execute_stream(stream_of(["a", "b"]))
        assert events == []
        assert await anext(stream) == "a"
        assert told(events) == ["PipelineExecuting", "ExecutionAttempt", "PipelineExecuted"]
        assert await read(stream) == ["b"]
    assert [event.outcome for event in events] == [None, Success("a"), Success("a")]
    assert len(events) == 3


@pytest.mark.anyio
async def test_a_streams_retries_and_fallbacks_are_told() -> None:
    """Failures before the first chunk are told as those of a call are."""
    error = OSError("no")
    pipeline = (
        B().add_fallback(fallback_value="instead").add_retry(max_retry_attempts=1, delay=0).build()
    )
    with capture_events() as events:
        assert await read(pipeline.execute_stream(stream_of([error], [error]))) == ["instead"]
    assert told(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
        "OnFallback",
        "PipelineExecuted",
    ]
    assert events[-1].outcome == Success("instead")


@pytest.mark.anyio
async def test_a_stream_that_fails_is_told_with_its_error() -> None:
    """PipelineExecuted carries what the consumer gets."""
    error = OSError("no")
    with capture_events() as events, pytest.raises(OSError, match="no"):
        await read(B().add_retry(should_handle=KeyError).build().execute_stream(stream_of([error])))
    assert events[-1].outcome == Failure(error)


@pytest.mark.anyio
async def test_a_resumed_stream_goes_on_telling() -> None:
    """An attempt that fails past the line is told once more, now as the failure it has become."""
    pipeline = B().add_retry(delay=0, resumable=True).build()
    with capture_events() as events:
        got = await read(pipeline.execute_stream(stream_of(["a", OSError("no")], ["a", "b"])))
    assert got == ["a", "b"]
    assert told(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "PipelineExecuted",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
    ]
    attempts = [event for event in events if isinstance(event, AttemptCompleted)]
    assert [(each.attempt, each.handled) for each in attempts] == [
        (0, False),
        (0, True),
        (1, False),
    ]


@pytest.mark.anyio
async def test_the_limits_of_a_stream_are_told() -> None:
    """OnTimeout by the name of the option, whichever side of the line it is on."""
    clock = VirtualClock(autojump=True)
    hang = Hanging()

    async def stalls() -> AsyncIterator[str]:
        yield "a"
        await hang()

    async def never() -> AsyncIterator[str]:
        await hang()
        yield "a"

    pipeline = B("p", clock=clock).build()
    with capture_events() as events, pytest.raises(TimeoutRejectedError):
        await read(pipeline.execute_stream(stalls, idle_timeout=3))
    assert told(events) == ["PipelineExecuting", "PipelineExecuted", "OnTimeout"]
    assert events[-1].strategy_name == "idle_timeout"
    with capture_events() as events, pytest.raises(TimeoutRejectedError):
        await read(pipeline.execute_stream(never, total_timeout=4))
    assert told(events) == ["PipelineExecuting", "OnTimeout", "PipelineExecuted"]
    assert (events[1].strategy_name, events[2].duration) == ("total_timeout", 4)
    assert isinstance(events[2].outcome, Rejected)


@pytest.mark.anyio
async def test_a_hedged_streams_attempts_are_told() -> None:
    """Two sources, one of which fails before its first chunk."""
    pipeline = B().add_hedging(delay=-1).build()
    with capture_events() as events:
        assert await read(pipeline.execute_stream(stream_of([OSError("no")], ["a"]))) == ["a"]
    assert told(events) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnHedging",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]
    assert events[-1].outcome == Success("a")


# ---- events themselves --------------------------------------------------------------------------


def test_severities_are_the_levels_of_logging() -> None:
    """An `IntEnum` equal to them, with Polly's word for one of them as well."""
    import logging

    assert [int(each) for each in Severity] == [0, 10, 20, 30, 40, 50]
    assert int(Severity["WARNING"]) == logging.WARNING
    assert Severity["INFORMATION"] is Severity.INFO


def test_events_are_made_as_before() -> None:
    """What is new has a default, so tests of hooks can make events of the fields that concern them."""
    event = RetryEvent(
        context=ResilienceContext(), outcome=Success(1), attempt=0, delay=1.0, duration=2.0
    )
    assert (event.pipeline_name, event.strategy_name, event.severity) == (None, None, 30)
    assert "strategy_name" not in repr(event)
    assert "delay=1.0" in repr(event)


def test_a_field_that_is_missing_or_unknown_is_refused() -> None:
    """By the name of the class's field."""
    make: Any = TimeoutEvent
    with pytest.raises(TypeError, match="timeout"):
        make(context=None)
    with pytest.raises(TypeError, match="tiemout"):
        make(context=None, timeout=1, tiemout=1)


def test_an_event_of_ones_own_takes_a_name_and_its_fields() -> None:
    """A class of an author's own: two lines, and the place is filled in by `Site.report`."""

    class CooledEvent(StrategyEvent):
        name = "OnCooled"
        severity: Severity = Severity.ERROR
        left: float

    event = CooledEvent(context=ResilienceContext(), left=1.0)
    assert (event.name, event.severity, event.left) == ("OnCooled", Severity.ERROR, 1.0)
    assert (event.outcome, event.duration) == (None, None)


@pytest.mark.anyio
async def test_the_context_of_an_attempt_is_the_callbacks() -> None:
    """What the callback sees as `current_context()` is what the attempt's event carries."""
    contexts: list[ResilienceContext] = []

    async def look() -> None:
        contexts.append(current_context())

    with capture_events() as events:
        await B().add_hedging(delay=1000).build().execute(look)
        await B().add_retry().build().execute(look)
    attempts = [event for event in events if isinstance(event, AttemptCompleted)]
    assert [each.context for each in attempts] == contexts
