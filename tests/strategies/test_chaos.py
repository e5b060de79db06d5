"""Chaos: which calls are hit, and what the four strategies do to them.

Rows `CH-nn` are those of the Polly dossier.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    ChaosBehavior,
    ChaosBehaviorEvent,
    ChaosEvent,
    ChaosFault,
    ChaosFaultEvent,
    ChaosLatency,
    ChaosLatencyEvent,
    ChaosOutcome,
    ChaosOutcomeEvent,
    Failure,
    MisuseError,
    OptionsError,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    handle_result,
)
from resilience_pipeline._switches import switches
from resilience_pipeline.telemetry import Severity, TelemetryEvent
from resilience_pipeline.testing import VirtualClock, capture_events, instant
from support.scripted import Closable, Hanging, Scripted, raised_by, spawn, tick, traceback_length

B = ResiliencePipelineBuilder

ALWAYS: dict[str, Any] = {"injection_rate": 1}


def drawing(*draws: float) -> Callable[[], float]:
    """Be a `random=` that gives these numbers, the last one again and again."""
    left = list(draws)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def hitting(**options: Any) -> ResiliencePipeline[Any]:
    """Give a pipeline whose every call is hit by a fault."""
    return B().add_chaos_fault(ConnectionError, **(ALWAYS | options)).build()


#: One of each kind, and what shows that it has hit: the callback's argument, the fake result, ...
def of_each_kind(hit: list[str], **options: Any) -> list[Any]:
    def note(event: Any) -> None:
        hit.append("hit")

    return [
        ChaosFault(ConnectionError, on_fault_injected=note, **options),
        ChaosLatency(1, on_latency_injected=note, **options),
        ChaosOutcome(lambda event: "fake", on_outcome_injected=note, **options),
        ChaosBehavior(note, **options),
    ]


KINDS = pytest.mark.parametrize("kind", range(4), ids=["fault", "latency", "outcome", "behavior"])


# ---- which calls are hit ------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("rate", "is_hit"), [(0.6, True), (0.3, False), (0.4, False), (0.5, False)]
)
@pytest.mark.anyio
async def test_a_call_is_hit_if_the_draw_is_below_the_rate(
    kind: int, rate: float, is_hit: bool
) -> None:
    """CH-01: strictly below."""
    hit: list[str] = []
    strategy = of_each_kind(hit, injection_rate=rate)[kind]
    builder = B(clock=VirtualClock(autojump=True), random=drawing(0.5))
    await builder.add(strategy).build().settle(Scripted("real"))
    assert hit == ["hit"] * is_hit


@KINDS
@pytest.mark.parametrize(("rate", "is_hit"), [(-1, False), (0, False), (1, True), (1.1, True)])
@pytest.mark.anyio
async def test_a_generated_rate_is_clamped(kind: int, rate: float, is_hit: bool) -> None:
    """CH-02: to never and always."""
    hit: list[str] = []
    strategy = of_each_kind(hit, injection_rate=lambda event: rate)[kind]
    builder = B(clock=VirtualClock(autojump=True), random=drawing(0.0 if rate <= 0 else 0.999))
    await builder.add(strategy).build().settle(Scripted("real"))
    assert hit == ["hit"] * is_hit


@KINDS
@pytest.mark.parametrize("enabled", [False, lambda event: False], ids=["off", "asked"])
@pytest.mark.anyio
async def test_what_is_disabled_hits_nothing(kind: int, enabled: Any) -> None:
    """CH-03: the rate is not asked for, and nothing is drawn."""
    hit: list[str] = []

    def never(event: ChaosEvent) -> float:
        raise AssertionError("asked for a rate")

    def no_draw() -> float:
        raise AssertionError("drawn")

    strategy = of_each_kind(hit, enabled=enabled, injection_rate=never)[kind]
    pipeline = B(random=no_draw).add(strategy).build()
    assert await pipeline.execute(Scripted("real")) == "real"
    assert hit == []


@pytest.mark.anyio
async def test_a_rate_of_nothing_leaves_nothing_of_the_strategy() -> None:
    """No number is drawn for it either."""

    def no_draw() -> float:
        raise AssertionError("drawn")

    pipeline = B(random=no_draw).add_chaos_fault(ConnectionError, injection_rate=0).build()
    assert await pipeline.execute(Scripted("real")) == "real"


@pytest.mark.anyio
async def test_the_switch_and_the_rate_may_be_functions_of_the_call() -> None:
    """Plain or async; each gets the execution's context."""

    async def enabled(event: ChaosEvent) -> bool:
        await checkpoint()
        return event.context.operation_key != "spared"

    async def share(event: ChaosEvent) -> float:
        await checkpoint()
        return 1.0 if event.context.operation_key == "hit" else 0.0

    pipeline = hitting(enabled=enabled, injection_rate=share)
    fn = Scripted("real")
    assert await pipeline.execute(fn, operation_key="spared") == "real"
    assert await pipeline.execute(fn, operation_key="other") == "real"
    assert isinstance(
        await raised_by(partial(pipeline.execute, fn, operation_key="hit")), ConnectionError
    )


@pytest.mark.anyio
async def test_the_share_of_the_calls_is_the_rate() -> None:
    """Of a hundred draws spread evenly a rate of 0.3 hits thirty."""
    pipeline = (
        B(random=drawing(*[n / 100 for n in range(100)], 1.0))
        .add_chaos_fault(ConnectionError, injection_rate=0.3)
        .build()
    )
    outcomes = [await pipeline.settle(Scripted("real")) for _ in range(100)]
    assert sum(not outcome.ok for outcome in outcomes) == 30


@pytest.mark.parametrize("answer", ["0.5", None, True, float("nan")])
@pytest.mark.anyio
async def test_a_rate_that_is_no_number_is_misuse(answer: Any) -> None:
    """Nothing retries that."""
    fn = Scripted("real")
    pipeline = (
        B()
        .add_retry(delay=0)
        .add_chaos_fault(ConnectionError, injection_rate=lambda event: answer)
        .build()
    )
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, MisuseError)
    assert "injection_rate" in str(error)
    assert fn.calls == 0


@pytest.mark.anyio
async def test_an_error_of_a_generator_comes_out() -> None:
    """And the callback is not run."""
    fn = Scripted("real")
    error = LookupError("no such switch")

    def broken(event: ChaosEvent) -> bool:
        raise error

    assert await raised_by(hitting(enabled=broken).execute, fn) is error
    assert fn.calls == 0


# ---- cancellation -------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("where", ["before", "enabled", "rate"])
@pytest.mark.anyio
async def test_who_is_cancelled_is_asked_nothing_more(kind: int, where: str) -> None:
    """CH-04: no later generator runs, there is no chaos, and the cancellation comes out."""
    hit: list[str] = []
    asked: list[str] = []
    fn = Scripted("real")
    with anyio.CancelScope() as scope:

        def ask(name: str, answer: Any) -> Any:
            asked.append(name)
            if name == where:
                scope.cancel()
            return answer

        strategy = of_each_kind(
            hit,
            enabled=lambda event: ask("enabled", True),
            injection_rate=lambda event: ask("rate", 1),
        )[kind]
        pipeline = B(clock=VirtualClock(autojump=True)).add(strategy).build()
        if where == "before":
            scope.cancel()
        await pipeline.execute(fn)
    assert scope.cancelled_caught
    assert asked == {"before": [], "enabled": ["enabled"], "rate": ["enabled", "rate"]}[where]
    assert hit == []
    assert fn.calls == 0


@KINDS
@pytest.mark.anyio
async def test_who_is_cancelled_before_a_hit_gets_no_chaos(kind: int) -> None:
    """CH-04, where nobody is asked."""
    hit: list[str] = []
    strategy = of_each_kind(hit, **ALWAYS)[kind]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await B().add(strategy).build().execute(Scripted("real"))
    assert scope.cancelled_caught
    assert hit == []


@KINDS
@pytest.mark.parametrize("streams", [False, True], ids=["call", "stream"])
@pytest.mark.anyio
async def test_at_whichever_turn_it_is_cancelled_all_is_given_back(
    kind: int, streams: bool
) -> None:
    """Every function of the user's suspends; whatever holds something is around chaos, and gets it back."""

    async def slowly(answer: Any) -> Any:
        await checkpoint()
        return answer

    options: dict[str, Any] = {
        "enabled": lambda event: slowly(True),
        "injection_rate": lambda event: slowly(1),
    }
    strategy = [
        ChaosFault(lambda e: slowly(OSError), on_fault_injected=slowly, **options),
        ChaosLatency(lambda e: slowly("1ms"), on_latency_injected=slowly, **options),
        ChaosOutcome(lambda e: slowly("fake"), on_outcome_injected=slowly, **options),
        ChaosBehavior(slowly, on_behavior_injected=slowly, **options),
    ][kind]
    inside = B().add_concurrency_limiter(1, hold_streams=True).add(strategy).build()

    async def scene() -> None:
        if streams:
            stream = inside.execute_stream(numbers, [])
            with suppress(OSError):
                assert await read_all(stream) in ([1, 2], ["fake"])
        else:
            outcome = await inside.settle(Scripted("real"))
            assert isinstance(outcome.error, OSError | None)

    with instant():
        for turns in range(40):
            async with anyio.create_task_group() as tasks:
                call = spawn(tasks, scene)
                await tick(turns)
                call.cancel()
            await scene()  # refused, if a permit were missing
        assert call.done
        assert not call.cancelled


async def read_all(stream: Any) -> list[Any]:
    async with stream:
        return [chunk async for chunk in stream]


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_fault_takes_the_place_of_the_call() -> None:
    """CH-05: the callback is not run, the exception comes out, the hook has run before."""
    events: list[ChaosFaultEvent] = []
    fault = ConnectionError("injected")
    fn = Scripted("real")
    pipeline = (
        B().add_chaos_fault(lambda event: fault, on_fault_injected=events.append, **ALWAYS).build()
    )
    context = ResilienceContext()
    assert await raised_by(partial(pipeline.execute, fn, context=context)) is fault
    assert fn.calls == 0
    assert [(event.context, event.fault) for event in events] == [(context, fault)]


@pytest.mark.anyio
async def test_no_fault_is_no_injection() -> None:
    """CH-05: of a generator that gives `None`; the callback runs, and there is no event."""
    events: list[ChaosFaultEvent] = []
    pipeline = (
        B().add_chaos_fault(lambda event: None, on_fault_injected=events.append, **ALWAYS).build()
    )
    assert await pipeline.execute(Scripted("real")) == "real"
    assert events == []


@pytest.mark.parametrize(
    "generator",
    [
        ConnectionError,
        "ConnectionError",
        lambda event: ConnectionError,
        lambda event: ConnectionError(),
        [(1, ConnectionError)],
        [(1, "ConnectionError")],
        [[1, "ConnectionError"]],
        [(1, lambda: ConnectionError())],
        [(1, lambda event: ConnectionError(event.context.operation_key))],
        [(0, ValueError), (0.5, ConnectionError)],
    ],
)
@pytest.mark.anyio
async def test_the_forms_of_a_fault(generator: Any) -> None:
    pipeline = B().add_chaos_fault(generator, **ALWAYS).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted("real")), ConnectionError)


@pytest.mark.anyio
async def test_each_fault_is_a_new_one() -> None:
    """Made of a type it carries no traceback of an earlier call."""
    pipeline = hitting()
    first = await raised_by(pipeline.execute, Scripted("real"))
    second = await raised_by(pipeline.execute, Scripted("real"))
    assert first is not second


@pytest.mark.anyio
async def test_a_generator_may_be_async() -> None:
    async def generator(event: ChaosEvent) -> Exception:
        await checkpoint()
        return ConnectionError()

    pipeline = B().add_chaos_fault(generator, **ALWAYS).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted("real")), ConnectionError)


@pytest.mark.parametrize("answer", ["ConnectionError", 3, KeyboardInterrupt, KeyboardInterrupt()])
@pytest.mark.anyio
async def test_what_is_no_exception_is_misuse(answer: Any) -> None:
    """Also what is none of `Exception`: chaos ends no program and cancels nobody."""
    pipeline = B().add_chaos_fault(lambda event: answer, **ALWAYS).build()
    error = await raised_by(pipeline.execute, Scripted("real"))
    assert isinstance(error, MisuseError)
    assert "fault_generator" in str(error)


@pytest.mark.anyio
async def test_a_fault_is_a_failure() -> None:
    """To `settle` and to predicates: it stands for the service's own, and is no refusal."""
    outcome = await hitting().settle(Scripted("real"))
    assert isinstance(outcome, Failure)
    assert not isinstance(outcome, Rejected)


@pytest.mark.anyio
async def test_what_is_around_deals_with_it() -> None:
    """A retry makes another attempt, which is drawn for anew."""
    fn = Scripted("real")
    pipeline = (
        B(random=drawing(0.0, 0.0, 0.9))
        .add_retry(delay=0)
        .add_chaos_fault(ConnectionError, injection_rate=0.5)
        .build()
    )
    outcome = await pipeline.settle(fn)
    assert outcome == Success("real")
    assert outcome.attempt_count == 3
    assert fn.calls == 1


@pytest.mark.anyio
async def test_what_was_never_called_may_be_repeated() -> None:
    """A fault comes before the callback, so that also a call that is not idempotent is retried."""
    pipeline = (
        B(random=drawing(0.0, 0.9))
        .add_retry(delay=0)
        .add_chaos_fault(ConnectionError, injection_rate=0.5)
        .build()
    )
    assert await pipeline.execute(Scripted("real"), idempotent=False) == "real"


@pytest.mark.anyio
async def test_an_error_of_the_hook_has_the_fault_as_its_context() -> None:
    fault, broken = ConnectionError(), LookupError()

    def hook(event: ChaosFaultEvent) -> None:
        raise broken

    pipeline = B().add_chaos_fault(lambda event: fault, on_fault_injected=hook, **ALWAYS).build()
    assert await raised_by(pipeline.execute, Scripted("real")) is broken
    assert broken.__context__ is fault


@pytest.mark.anyio
async def test_a_fault_leaves_no_circle_behind() -> None:
    """It goes when its receiver lets go of it, without the garbage collector."""

    class LostError(Exception):
        pass

    pipeline = B().add_chaos_fault(LostError, **ALWAYS).build()
    gc.collect()
    gc.disable()
    try:
        fault = weakref.ref(await raised_by(pipeline.execute, Scripted("real")))
        assert fault() is None
    finally:
        gc.enable()


# ---- latency ------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0.5, "500ms", lambda event: "500ms"])
@pytest.mark.anyio
async def test_latency_comes_before_the_call(latency: Any) -> None:
    """CH-07: the callback runs after it, and before that the hook."""
    clock = VirtualClock(autojump=True)
    log: list[Any] = []
    fn = Scripted("real", clock=clock)

    def hook(event: ChaosLatencyEvent) -> None:
        log.append((event.latency, clock.now(), fn.calls))

    pipeline = B(clock=clock).add_chaos_latency(latency, on_latency_injected=hook, **ALWAYS).build()
    assert await pipeline.execute(fn) == "real"
    assert fn.starts == [0.5]
    assert log == [(0.5, 0.5, 0)]


@pytest.mark.parametrize(
    "latency", [0, "0s", lambda event: 0, lambda event: -1000, lambda event: None]
)
@pytest.mark.anyio
async def test_no_latency_is_no_injection(latency: Any) -> None:
    """CH-07: of 0 or less there is neither wait nor event."""
    clock = VirtualClock(autojump=True)
    events: list[ChaosLatencyEvent] = []
    pipeline = (
        B(clock=clock)
        .add_chaos_latency(latency, on_latency_injected=events.append, **ALWAYS)
        .build()
    )
    assert await pipeline.execute(Scripted("real")) == "real"
    assert events == []
    assert clock.now() == 0


@pytest.mark.anyio
async def test_a_latency_that_is_no_duration_is_refused() -> None:
    pipeline = B().add_chaos_latency(lambda event: "soon", **ALWAYS).build()
    error = await raised_by(pipeline.execute, Scripted("real"))
    assert isinstance(error, OptionsError)
    assert "latency" in str(error)


@pytest.mark.anyio
async def test_a_time_limit_around_it_cuts_latency_short() -> None:
    """The callback is never called then."""
    fn = Scripted("real")
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_timeout(1)
        .add_chaos_latency("1h", **ALWAYS)
        .build()
    )
    assert isinstance(await raised_by(pipeline.execute, fn), TimeoutRejectedError)
    assert fn.calls == 0


@pytest.mark.anyio
async def test_latency_ends_with_the_callers_cancellation() -> None:
    clock = VirtualClock()
    fn = Scripted("real")
    pipeline = B(clock=clock).add_chaos_latency("1h", **ALWAYS).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await clock.advance(1)
        call.cancel()
    assert call.cancelled
    assert fn.calls == 0
    assert clock.pending == 0


@pytest.mark.anyio
async def test_infinite_latency_hangs_until_cancelled() -> None:
    """A connection that never answers."""
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_timeout("1h")
        .add_chaos_latency(float("inf"), **ALWAYS)
        .build()
    )
    assert isinstance(await raised_by(pipeline.execute, Hanging()), TimeoutRejectedError)


# ---- outcomes -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_an_outcome_takes_the_place_of_the_call() -> None:
    """CH-06: the callback is not run, and the hook has run before the result comes out."""
    events: list[ChaosOutcomeEvent] = []
    fn = Scripted("real")
    pipeline = (
        B()
        .add_chaos_outcome(lambda event: "fake", on_outcome_injected=events.append, **ALWAYS)
        .build()
    )
    context = ResilienceContext()
    assert await pipeline.execute(fn, context=context) == "fake"
    assert fn.calls == 0
    assert [(event.context, event.outcome) for event in events] == [(context, Success("fake"))]


@pytest.mark.anyio
async def test_no_outcome_is_no_injection() -> None:
    """CH-06: of a generator that gives `None`; the callback runs, and there is no event."""
    events: list[ChaosOutcomeEvent] = []
    pipeline = (
        B()
        .add_chaos_outcome(lambda event: None, on_outcome_injected=events.append, **ALWAYS)
        .build()
    )
    assert await pipeline.execute(Scripted("real")) == "real"
    assert events == []


@pytest.mark.parametrize(
    "generator",
    [lambda event: Success(None), [(1, None)], [(1, Success(None))], [(1, lambda: None)]],
)
@pytest.mark.anyio
async def test_a_result_of_none_is_injected(generator: Any) -> None:
    """CH-06: where it is said to be a result."""
    fn = Scripted("real")
    pipeline = B().add_chaos_outcome(generator, **ALWAYS).build()
    assert await pipeline.execute(fn) is None
    assert fn.calls == 0


@pytest.mark.parametrize(
    "generator",
    [
        lambda event: ConnectionError(),
        lambda event: ConnectionError,
        lambda event: Failure(ConnectionError()),
        lambda event: Rejected(ConnectionError()),
        [(1, ConnectionError)],
        [(1, Failure(ConnectionError()))],
        [(1, lambda: ConnectionError())],
        [(1, lambda event: Failure(ConnectionError()))],
    ],
)
@pytest.mark.anyio
async def test_an_outcome_may_be_an_error(generator: Any) -> None:
    """It is raised, and a failure: no strategy of ours has refused anything."""
    pipeline = B().add_chaos_outcome(generator, **ALWAYS).build()
    outcome = await pipeline.settle(Scripted("real"))
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, ConnectionError)


@pytest.mark.anyio
async def test_an_outcome_that_is_injected_again_grows_no_traceback() -> None:
    pipeline = B().add_chaos_outcome([(1, Failure(ConnectionError()))], **ALWAYS).build()
    lengths = {traceback_length(await raised_by(pipeline.execute, Scripted(1))) for _ in range(5)}
    assert len(lengths) == 1


@pytest.mark.anyio
async def test_an_error_can_be_a_result() -> None:
    error = ConnectionError()
    pipeline = B().add_chaos_outcome(lambda event: Success(error), **ALWAYS).build()
    assert await pipeline.execute(Scripted("real")) is error


@pytest.mark.anyio
async def test_a_name_among_outcomes_is_a_result() -> None:
    """Of plain data text is a value; faults are for `ChaosFault`."""
    pipeline = B().add_chaos_outcome([(1, "ConnectionError")], **ALWAYS).build()
    assert await pipeline.execute(Scripted("real")) == "ConnectionError"


@pytest.mark.anyio
async def test_an_injected_result_is_a_result_to_what_is_around() -> None:
    """A retry that handles it discards and closes it."""
    bad = Closable("close")
    pipeline = (
        B(random=drawing(0.0, 0.9))
        .add_retry(delay=0, should_handle=handle_result(lambda value: value is bad))
        .add_chaos_outcome(lambda event: bad, injection_rate=0.5)
        .build()
    )
    assert await pipeline.execute(Scripted("real")) == "real"
    assert bad.closed == 1


# ---- behavior -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_behavior_comes_before_the_call() -> None:
    """CH-08: it, the hook, the callback."""
    log: list[str] = []

    async def behavior(event: ChaosEvent) -> None:
        await checkpoint()
        log.append("behavior")

    def hook(event: ChaosBehaviorEvent) -> None:
        log.append("hook")

    async def fn() -> str:
        log.append("call")
        return "real"

    pipeline = B().add_chaos_behavior(behavior, on_behavior_injected=hook, **ALWAYS).build()
    assert await pipeline.execute(fn) == "real"
    assert log == ["behavior", "hook", "call"]


@pytest.mark.anyio
async def test_behavior_that_cancels_the_caller_is_the_end() -> None:
    """CH-08: neither the hook nor the callback runs."""
    log: list[str] = []
    fn = Scripted("real")
    with anyio.CancelScope() as scope:
        pipeline = (
            B()
            .add_chaos_behavior(
                lambda event: scope.cancel(),
                on_behavior_injected=lambda event: log.append("hook"),
                **ALWAYS,
            )
            .build()
        )
        await pipeline.execute(fn)
    assert scope.cancelled_caught
    assert log == []
    assert fn.calls == 0


@pytest.mark.anyio
async def test_behavior_that_raises_takes_the_place_of_the_call() -> None:
    fn = Scripted("real")
    broken = LookupError()

    def behavior(event: ChaosEvent) -> None:
        raise broken

    pipeline = B().add_chaos_behavior(behavior, **ALWAYS).build()
    assert await raised_by(pipeline.execute, fn) is broken
    assert fn.calls == 0


# ---- what listeners are told --------------------------------------------------------------------


@KINDS
@pytest.mark.anyio
async def test_every_hit_is_told(kind: int) -> None:
    """The name is Polly's, the severity information, and it is the object that the hook gets."""
    hooked: list[Any] = []
    hooks = ["fault", "latency", "outcome", "behavior"]
    options: dict[str, Any] = {f"on_{hooks[kind]}_injected": hooked.append, **ALWAYS}
    makers: list[Callable[..., Any]] = [
        partial(ChaosFault, ConnectionError),
        partial(ChaosLatency, 3),
        partial(ChaosOutcome, lambda event: "fake"),
        partial(ChaosBehavior, lambda event: None),
    ]
    strategy = makers[kind](**options)
    builder = B("p", instance="i", clock=VirtualClock(autojump=True)).add(strategy)
    context = ResilienceContext(operation_key="op")
    with capture_events() as events:
        await builder.build().settle(Scripted("real"), context=context)
    _, told, _ = events
    assert told.name == f"Chaos.On{hooks[kind].capitalize()}"
    assert told.severity is Severity.INFORMATION
    assert told.context is context
    assert (told.pipeline_name, told.instance, told.operation_key) == ("p", "i", "op")
    assert told.strategy_name == strategy.name
    assert hooked == [told]


@KINDS
@pytest.mark.anyio
async def test_no_hit_tells_nothing(kind: int) -> None:
    strategy = of_each_kind([], injection_rate=lambda event: 0)[kind]
    pipeline = B(clock=VirtualClock(autojump=True)).add(strategy).build()
    with capture_events() as events:
        await pipeline.settle(Scripted("real"))
    assert [event.name for event in events] == ["PipelineExecuting", "PipelineExecuted"]


@KINDS
@pytest.mark.anyio
async def test_where_nobody_listens_no_event_is_made(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = [
        ChaosFault(ConnectionError, **ALWAYS),
        ChaosLatency(3, **ALWAYS),
        ChaosOutcome(lambda event: "fake", **ALWAYS),
        ChaosBehavior(lambda event: None, **ALWAYS),
    ][kind]
    pipeline = B(clock=VirtualClock(autojump=True)).add(strategy).build()
    made: list[Any] = []

    def note(event: Any, **fields: Any) -> None:
        made.append(event)

    monkeypatch.setattr(TelemetryEvent, "__init__", note)
    monkeypatch.setattr(switches, "is_logged", lambda kind, severity: False)
    await pipeline.settle(Scripted("real"))
    assert made == []


@pytest.mark.anyio
async def test_latency_is_told_before_the_wait() -> None:
    """As in Polly; its hook runs after it."""
    clock = VirtualClock(autojump=True)
    log: list[tuple[str, float]] = []

    def listen(event: Any) -> None:
        if isinstance(event, ChaosLatencyEvent):
            assert event.latency == 3
            log.append(("listener", clock.now()))

    pipeline = (
        B(clock=clock, listeners=[listen])
        .add_chaos_latency(
            3, on_latency_injected=lambda event: log.append(("hook", clock.now())), **ALWAYS
        )
        .build()
    )
    await pipeline.execute(Scripted("real"))
    assert log == [("listener", 0), ("hook", 3)]


@pytest.mark.anyio
async def test_a_behavior_is_told_when_it_has_run() -> None:
    log: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, ChaosBehaviorEvent):
            log.append("listener")

    pipeline = (
        B(listeners=[listen])
        .add_chaos_behavior(lambda event: log.append("behavior"), **ALWAYS)
        .build()
    )
    await pipeline.execute(Scripted("real"))
    assert log == ["behavior", "listener"]


@pytest.mark.anyio
async def test_told_outcomes_are_those_that_come_out() -> None:
    """Of faults the exception, of outcomes the outcome."""
    fault = ConnectionError()
    failing = B().add_chaos_fault(lambda event: fault, **ALWAYS).build()
    faking = B().add_chaos_outcome(lambda event: "fake", **ALWAYS).build()
    with capture_events() as events:
        await failing.settle(Scripted("real"))
        await faking.settle(Scripted("real"))
    faults = [event.fault for event in events if isinstance(event, ChaosFaultEvent)]
    outcomes = [event.outcome for event in events if isinstance(event, ChaosOutcomeEvent)]
    assert faults == [fault]
    assert outcomes == [Success("fake")]


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "picked"),
    [(0, KeyError), (39 / 120, KeyError), (40 / 120, IndexError), (119.9 / 120, IndexError)],
)
@pytest.mark.anyio
async def test_weights_share_the_draws(draw: float, picked: type[Exception]) -> None:
    """CH-09: of 40 and 80 the first has the draws below 40 of 120."""
    pipeline = (
        B(random=drawing(0.0, draw))
        .add_chaos_fault([(40, KeyError), (80, IndexError)], injection_rate=0.5)
        .build()
    )
    assert type(await raised_by(pipeline.execute, Scripted("real"))) is picked


@pytest.mark.parametrize("draw", [-0.1, 1.0, 2.0])
@pytest.mark.anyio
async def test_a_draw_out_of_range_picks_nothing(draw: float) -> None:
    """CH-09: the callback runs."""
    entries = [(40, KeyError), (80, IndexError)]
    for builder in (
        B(random=drawing(0.0, draw)).add_chaos_fault(entries, injection_rate=0.5),
        B(random=drawing(0.0, draw)).add_chaos_outcome(entries, injection_rate=0.5),
    ):
        assert await builder.build().execute(Scripted("real")) == "real"


@pytest.mark.anyio
async def test_weighted_outcomes_are_drawn_too() -> None:
    pipeline = (
        B(random=drawing(0.0, 0.2, 0.0, 0.9))
        .add_chaos_outcome([(1, "rare"), (3, lambda event: "often")], injection_rate=0.5)
        .build()
    )
    assert [await pipeline.execute(Scripted("real")) for _ in range(2)] == ["rare", "often"]


# ---- streams ------------------------------------------------------------------------------------


async def numbers(opened: list[str]) -> AsyncIterator[int]:
    opened.append("opened")
    yield 1
    yield 2


async def read(pipeline: ResiliencePipeline[Any], opened: list[str]) -> list[Any]:
    async with pipeline.execute_stream(numbers, opened) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.anyio
async def test_a_fault_takes_the_place_of_the_first_chunk() -> None:
    opened: list[str] = []
    assert isinstance(await raised_by(read, hitting(), opened), ConnectionError)
    assert opened == []


@pytest.mark.anyio
async def test_latency_comes_before_the_first_chunk() -> None:
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_chaos_latency(3, **ALWAYS).build()
    assert await read(pipeline, []) == [1, 2]
    assert clock.now() == 3


@pytest.mark.anyio
async def test_behavior_comes_before_the_first_chunk() -> None:
    log: list[str] = []
    pipeline = B().add_chaos_behavior(lambda event: log.append("behavior"), **ALWAYS).build()
    assert await read(pipeline, log) == [1, 2]
    assert log == ["behavior", "opened"]


@pytest.mark.anyio
async def test_an_outcome_becomes_one_chunk() -> None:
    opened: list[str] = []
    pipeline = B().add_chaos_outcome(lambda event: [7, 8], **ALWAYS).build()
    assert await read(pipeline, opened) == [[7, 8]]
    assert opened == []


@pytest.mark.anyio
async def test_an_outcome_may_be_a_stream() -> None:
    """It is iterated and closed like any source."""
    closed: list[str] = []

    async def fake() -> AsyncIterator[int]:
        try:
            yield 7
            yield 8
        finally:
            closed.append("closed")

    pipeline = B().add_chaos_outcome(lambda event: fake(), **ALWAYS).build()
    async with pipeline.execute_stream(numbers, []) as stream:
        assert await anext(stream) == 7
    assert closed == ["closed"]


@pytest.mark.anyio
async def test_chaos_hits_attempts_of_a_race_one_by_one() -> None:
    """The first one hangs, and the hedge gets a stream, its own or another."""

    async def fake() -> AsyncIterator[int]:
        yield 7

    pipeline = (
        B(clock=VirtualClock(autojump=True), random=drawing(0.0, 0.9, 0.9, 0.0, 0.9, 0.0))
        .add_hedging(delay=1)
        .add_chaos_latency(float("inf"), injection_rate=0.5)
        .add_chaos_outcome(lambda event: fake(), injection_rate=0.5)
        .build()
    )
    assert await read(pipeline, []) == [
        1,
        2,
    ]  # the first attempt hit by latency, the hedge by nothing
    assert await read(pipeline, []) == [7]  # the hedge hit by an outcome


# ---- in threads ---------------------------------------------------------------------------------


def test_all_of_them_serve_synchronous_calls() -> None:
    log: list[str] = []
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_chaos_behavior(lambda event: log.append("behavior"), **ALWAYS)
        .add_chaos_latency(2, **ALWAYS)
        .add_chaos_outcome(lambda event: "fake", **ALWAYS)
        .add_chaos_fault(ConnectionError, **ALWAYS)
        .build()
    )
    assert pipeline.execute_sync(lambda: "real") == "fake"
    assert log == ["behavior"]
    assert clock.now() == 2
    stream = pipeline.execute_stream_sync(lambda: iter(("real",)))
    assert list(stream) == ["fake"]


def test_a_time_limit_leaves_a_latency_in_its_thread() -> None:
    """The thread that waits there ends at once, without calling anything."""
    calls: list[str] = []
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_timeout(1)
        .add_chaos_latency("1h", **ALWAYS)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(lambda: calls.append("called"))
    assert calls == []


def test_an_async_generator_in_a_synchronous_call_is_misuse() -> None:
    async def generator(event: ChaosEvent) -> Exception:
        return ConnectionError()

    pipeline = B().add_chaos_fault(generator, **ALWAYS).build()
    with pytest.raises(MisuseError, match="fault_generator"):
        pipeline.execute_sync(lambda: "real")
