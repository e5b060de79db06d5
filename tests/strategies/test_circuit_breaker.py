"""Circuit breaker: what opens it, who may try, what counts, who is told, and driving it by hand."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import pickle
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BreakDurationEvent,
    BrokenCircuitError,
    CircuitBreaker,
    CircuitBreakerControl,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    Failure,
    FixedWindow,
    IsolatedCircuitError,
    MisuseError,
    OptionsError,
    Outcome,
    PropertyKey,
    RateLimiterRejectedError,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import Room, boom, ok
from support.scripted import Background, Closable, Hanging, raised_by, spawn, tick, traceback_length


class Circuit:
    """A breaker that two failures out of two open for 5 s, on a clock of its own, hooks noted."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        self.control = CircuitBreakerControl()
        self.events: list[Any] = []
        defaults: dict[str, Any] = {
            "failure_ratio": 1,
            "minimum_throughput": 2,
            "break_duration": 5,
            "on_opened": self.events.append,
            "on_closed": self.events.append,
            "on_half_opened": self.events.append,
            "control": self.control,
        }
        self.pipeline: ResiliencePipeline[BrokenCircuitError] = (
            ResiliencePipelineBuilder(name="svc", clock=self.clock)
            .add_circuit_breaker(**(defaults | options))
            .build()
        )

    @property
    def state(self) -> str:
        return self.control.state

    @property
    def counts(self) -> tuple[int, int]:
        metrics = self.control.metrics
        return metrics.throughput, metrics.failures

    @property
    def steps(self) -> list[str]:
        """The events noted so far, in one word each."""
        names = {
            CircuitOpenedEvent: "opened",
            CircuitClosedEvent: "closed",
            CircuitHalfOpenedEvent: "half-opened",
        }
        return [names[type(event)] for event in self.events]

    async def settle(
        self, fn: Callable[[], Awaitable[Any]] = ok, **options: Any
    ) -> Outcome[Any, BrokenCircuitError]:
        return await self.pipeline.settle(fn, **options)

    async def open(self) -> None:
        for _ in range(2):
            await self.settle(boom)
        assert self.state == "open"

    async def refusal(self) -> BrokenCircuitError:
        """The error of a call that is refused."""
        outcome = await self.settle()
        assert isinstance(outcome, Rejected)
        error = outcome.error
        assert isinstance(error, BrokenCircuitError)
        return error

    async def open_until_probe(self) -> None:
        await self.open()
        await self.clock.advance(5)


async def bad_value() -> int:
    raise ValueError("nobody handles this")


async def answer_500() -> int:
    return 500


async def answer_200() -> int:
    return 200


# --- closed: what counts and what trips --------------------------------------------------------


@pytest.mark.anyio
async def test_opens_exactly_once_at_ratio_and_throughput() -> None:
    """CB-01: ten handled results at ratio 0.5 and throughput 10 open the circuit, with one event."""
    circuit = Circuit(
        failure_ratio=0.5, minimum_throughput=10, should_handle=handle_result(lambda r: r == 500)
    )
    for number in range(10):
        assert circuit.state == "closed", number
        assert await circuit.pipeline.execute(answer_500) == 500
    assert circuit.steps == ["opened"]
    assert circuit.state == "open"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("successes", "failures", "state"),
    [(9, 1, "open"), (8, 2, "open"), (10, 1, "closed"), (8, 1, "closed")],
)
async def test_both_limits_are_inclusive(successes: int, failures: int, state: str) -> None:
    """CB-06: throughput 10 of 10 and rate 0.1 of 0.1 trip; one less of either does not."""
    circuit = Circuit(failure_ratio=0.1, minimum_throughput=10)
    for fn in [ok] * successes + [boom] * failures:
        await circuit.settle(fn)
    assert circuit.state == state


@pytest.mark.anyio
async def test_a_success_never_trips() -> None:
    """CB-06: the success that completes the throughput leaves the circuit closed at any rate."""
    circuit = Circuit(failure_ratio=0.1, minimum_throughput=3)
    for fn in (boom, boom, ok):
        await circuit.settle(fn)
    assert (circuit.state, circuit.counts) == ("closed", (3, 2))


@pytest.mark.anyio
async def test_ratio_zero_trips_with_the_first_failure_at_the_throughput() -> None:
    """CB-41: a ratio of 0 is allowed: any handled outcome trips once the throughput is there."""
    circuit = Circuit(failure_ratio=0)
    for fn in (ok, ok, ok):
        await circuit.settle(fn)
    assert circuit.state == "closed"
    await circuit.settle(boom)
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_handled_outcomes_pass_through_unchanged() -> None:
    """CB-25: the breaker alters no outcome that it did not refuse, the tripping one included."""
    circuit = Circuit(should_handle=handle(ConnectionError) | handle_result(lambda r: r == 500))
    error = ConnectionError("mine")

    async def fail() -> int:
        raise error

    assert await circuit.pipeline.execute(answer_500) == 500
    assert await raised_by(circuit.pipeline.execute, fail) is error
    assert (circuit.state, circuit.counts) == ("open", (2, 2))


@pytest.mark.anyio
async def test_an_unhandled_exception_counts_as_a_success() -> None:
    """CB-24: it comes out, and is counted like a good call."""
    circuit = Circuit(should_handle=ConnectionError)
    outcome = await circuit.settle(bad_value)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, ValueError)
    assert circuit.counts == (1, 0)


@pytest.mark.anyio
async def test_one_breaker_serves_calls_of_every_type() -> None:
    """CB-36: results of different types count together; after the break both kinds pass."""
    circuit = Circuit(
        minimum_throughput=10, should_handle=handle_result(lambda r: r in {-1, "bad"})
    )

    async def give(value: object) -> object:
        return value

    for _ in range(5):
        await circuit.pipeline.execute(give, -1)
        await circuit.pipeline.execute(give, "bad")
    for value in (1, "good"):
        with pytest.raises(BrokenCircuitError):
            await circuit.pipeline.execute(give, value)
    await circuit.clock.advance(5)
    assert [await circuit.pipeline.execute(give, value) for value in (1, "good")] == [1, "good"]


@pytest.mark.anyio
async def test_simultaneous_failures_are_all_counted_and_open_once() -> None:
    """CB-37: bookkeeping is serialised, whatever ends at the same moment."""
    circuit = Circuit(minimum_throughput=50)
    room = Room()
    async with anyio.create_task_group() as tasks:
        for number in range(50):
            spawn(tasks, circuit.pipeline.settle, room, number)
        await tick()
        for number in range(50):
            room.let_out(number, ConnectionError())
    assert (circuit.steps, circuit.counts) == (["opened"], (50, 50))


@pytest.mark.anyio
async def test_what_is_older_than_the_window_neither_counts_nor_trips() -> None:
    """CB-21: outcomes are forgotten once exactly `sampling_duration` has passed."""
    circuit = Circuit(sampling_duration=10)
    await circuit.settle(boom)
    await circuit.clock.advance(10)
    assert circuit.counts == (0, 0)
    await circuit.settle(boom)
    assert circuit.state == "closed"
    await circuit.clock.advance(9)
    await circuit.settle(boom)
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_the_window_rolls_in_ten_slices() -> None:
    """CB-19: every 2 s of a 10 s window a failure (twice; then a success) and a success."""
    circuit = Circuit(sampling_duration=10, minimum_throughput=100)
    seen = []
    for step in range(5):
        await circuit.settle(boom if step < 2 else ok)
        await circuit.settle(ok)
        seen.append(circuit.counts)
        await circuit.clock.advance(2)
    assert seen == [(2, 1), (4, 2), (6, 2), (8, 2), (10, 2)]
    assert circuit.counts == (8, 1)
    await circuit.clock.advance(2)
    assert circuit.counts == (6, 0)


@pytest.mark.anyio
async def test_the_rate_is_failures_over_throughput() -> None:
    """CB-22: one failure among five is a rate of 0.2; no call at all is a rate of 0."""
    circuit = Circuit(minimum_throughput=100)
    assert circuit.control.metrics.rate == 0
    for fn in (boom, ok, ok, ok, ok):
        await circuit.settle(fn)
    assert circuit.control.metrics.rate == 0.2


# --- what counts as nothing --------------------------------------------------------------------


@pytest.mark.anyio
async def test_callers_who_give_up_are_no_evidence() -> None:
    """Case CB-01: fifty cancelled calls leave no trace in the window."""
    circuit = Circuit(failure_ratio=0.1)
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, circuit.pipeline.execute, Hanging()) for _ in range(50)]
        await tick()
        for call in calls:
            call.cancel()
    assert all(call.cancelled for call in calls)
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))
    assert await circuit.pipeline.execute(ok) == 1


class Stop(BaseException):
    """What is no `Exception` passes through everything."""


@pytest.mark.anyio
@pytest.mark.parametrize("half_open", [False, True])
async def test_a_base_exception_passes_and_decides_nothing(half_open: bool) -> None:
    """Only an `Exception` is judged: anything else comes out untouched and releases."""
    asked: list[Any] = []

    def predicate(event: Any) -> bool:
        asked.append(event)
        return True

    circuit = Circuit(should_handle=predicate)

    async def stop() -> int:
        raise Stop

    if half_open:
        await circuit.open_until_probe()
        asked.clear()
    counts = circuit.counts
    with pytest.raises(Stop):
        await circuit.pipeline.execute(stop)
    assert (asked, circuit.counts) == ([], counts)
    assert circuit.state == ("half_open" if half_open else "closed")


@pytest.mark.anyio
@pytest.mark.parametrize("half_open", [False, True])
async def test_misuse_counts_as_nothing(half_open: bool) -> None:
    """Unhandled exceptions: a `MisuseError` is neither success nor failure, and decides no probe."""
    circuit = Circuit(should_handle=Exception)
    if half_open:
        await circuit.open_until_probe()
    counts = circuit.counts
    no_coroutine: Any = lambda: 1  # noqa: E731 - what a user might hand in
    for _ in range(3):
        assert isinstance(await raised_by(circuit.pipeline.execute, no_coroutine), MisuseError)
    assert circuit.counts == counts
    assert circuit.state == ("half_open" if half_open else "closed")
    assert await circuit.pipeline.execute(ok) == 1


def inner_limiter(clock: VirtualClock) -> ResiliencePipeline[RateLimiterRejectedError]:
    return ResiliencePipelineBuilder(clock=clock).add_rate_limiter(FixedWindow(1, "1h")).build()


def with_refusing_inside(
    kind: str, **options: Any
) -> tuple[ResiliencePipeline[Any], CircuitBreakerControl, CircuitBreakerControl]:
    """A breaker around something that refuses every call from the second on."""
    control, inner_control = CircuitBreakerControl(), CircuitBreakerControl()
    clock = VirtualClock()
    builder: Any = ResiliencePipelineBuilder(clock=clock).add_circuit_breaker(
        failure_ratio=0.1, minimum_throughput=2, control=control, **options
    )
    if kind == "rate limiter":
        builder.add_rate_limiter(FixedWindow(1, "1h"))
    elif kind == "circuit breaker":
        builder.add_circuit_breaker(control=inner_control)
    elif kind == "nested pipeline":
        builder.add_pipeline(inner_limiter(clock))
    return builder.build(), control, inner_control


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["rate limiter", "circuit breaker", "nested pipeline"])
async def test_by_default_refusals_of_what_is_inside_count_as_nothing(kind: str) -> None:
    """Default: our own no says nothing about the service."""
    pipeline, control, inner_control = with_refusing_inside(kind)
    await pipeline.execute(ok)
    inner_control.isolate()
    for _ in range(20):
        assert isinstance(await pipeline.settle(ok), Rejected)
    assert (control.state, control.metrics.throughput) == ("closed", 1)


@pytest.mark.anyio
async def test_by_default_a_full_concurrency_limiter_inside_counts_as_nothing() -> None:
    """Default: the same for a concurrency limiter."""
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(minimum_throughput=2, control=control)
        .add_concurrency_limiter(1)
        .build()
    )
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, room)
        await tick()
        for _ in range(20):
            assert isinstance(await pipeline.settle(ok), Rejected)
        assert (control.state, control.metrics.throughput) == ("closed", 0)
        room.let_all_out()


@pytest.mark.anyio
async def test_by_default_a_refusal_from_another_pipeline_in_the_callback_counts_as_nothing() -> (
    None
):
    """Default: also when the callback runs a pipeline of its own."""
    circuit = Circuit()
    limited = inner_limiter(circuit.clock)
    await limited.execute(ok)
    for _ in range(5):
        outcome = await circuit.settle(partial(limited.execute, ok))
        assert isinstance(outcome, Failure)
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))


@pytest.mark.anyio
async def test_a_predicate_of_ones_own_may_count_refusals() -> None:
    """Only the default looks away: what the user's predicate handles is a failure."""
    pipeline, control, _ = with_refusing_inside("rate limiter", should_handle=Exception)
    for _ in range(3):
        await pipeline.settle(ok)
    assert control.state == "open"


@pytest.mark.anyio
async def test_a_refused_probe_gives_its_place_back() -> None:
    """Default: a probe that a limiter inside refused has tried nothing; the next call is the probe."""
    clock = VirtualClock()
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=5, control=control
        )
        .add_rate_limiter(FixedWindow(2, "6s"))
        .build()
    )
    for _ in range(2):
        await pipeline.settle(boom)
    await clock.advance(5)
    for _ in range(2):
        outcome = await pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert isinstance(outcome.error, RateLimiterRejectedError)
        assert control.state == "half_open"
    await clock.advance(1)
    assert await pipeline.execute(ok) == 1
    assert control.state == "closed"


@pytest.mark.anyio
async def test_a_timeout_inside_is_a_failure_and_one_outside_is_nothing() -> None:
    """Case CB-13: from outside a limit arrives as a cancellation; from inside as an exception."""
    outside, inside = CircuitBreakerControl(), CircuitBreakerControl()
    clock = VirtualClock(autojump=True)
    options: dict[str, Any] = {"failure_ratio": 1, "minimum_throughput": 2}
    pipelines: list[ResiliencePipeline[Any]] = [
        ResiliencePipelineBuilder(clock=clock)
        .add_timeout(1)
        .add_circuit_breaker(control=outside, **options)
        .build(),
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(control=inside, **options)
        .add_timeout(1)
        .build(),
    ]
    for pipeline in pipelines:
        for _ in range(2):
            outcome = await pipeline.settle(Hanging())
            assert isinstance(outcome, Rejected)
            assert isinstance(outcome.error, TimeoutRejectedError)
    assert (outside.state, outside.metrics.throughput) == ("closed", 0)
    assert inside.state == "open"


# --- open --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_retry_after_is_what_is_left_of_the_break() -> None:
    """CB-02, CB-15: at once, after half of it, after a millisecond."""
    circuit = Circuit(break_duration=1)
    await circuit.open()
    assert (await circuit.refusal()).retry_after == 1
    await circuit.clock.advance(0.001)
    assert (await circuit.refusal()).retry_after == pytest.approx(0.999)
    await circuit.clock.advance(0.499)
    assert (await circuit.refusal()).retry_after == pytest.approx(0.5)


@pytest.mark.anyio
async def test_the_call_after_exactly_retry_after_is_the_probe() -> None:
    """Open: what is told is long enough, also where the break's end is no round number."""
    circuit = Circuit(break_duration=0.1)
    await circuit.clock.advance(0.7)
    await circuit.open()
    for _ in range(3):
        await circuit.clock.advance(0.01)
        wait = (await circuit.refusal()).retry_after
        assert wait is not None
        await circuit.clock.advance(wait)
        await circuit.settle(boom)
    assert circuit.steps == ["opened", *["half-opened", "opened"] * 3]


@pytest.mark.anyio
async def test_an_open_circuit_calls_nothing() -> None:
    """Open: the callback is not invoked."""
    circuit = Circuit()
    await circuit.open()
    calls = Hanging()
    assert isinstance(await circuit.settle(calls), Rejected)
    assert calls.calls == 0


@pytest.mark.anyio
async def test_a_refusal_names_pipeline_strategy_operation_and_wait() -> None:
    """Errors: the message and the fields say who refused, and what was exceeded."""
    circuit = Circuit(name="orders")
    await circuit.open()
    outcome = await circuit.settle(operation_key="get")
    assert isinstance(outcome, Rejected)
    error = outcome.error
    assert error.pipeline_name == "svc"
    assert error.strategy_name == "orders"
    assert error.operation_key == "get"
    for part in ("svc", "orders", "open", "5 s"):
        assert part in str(error)


@pytest.mark.anyio
async def test_the_default_name_is_the_class() -> None:
    """Every strategy takes `name=`; by default it is that of its class."""
    circuit = Circuit()
    await circuit.open()
    assert (await circuit.refusal()).strategy_name == "CircuitBreaker"


@pytest.mark.anyio
async def test_the_cause_is_the_exception_handled_last() -> None:
    """CB-13: opened by an exception, each refusal names it; closing drops it."""
    circuit = Circuit()
    errors = [ConnectionError("first"), ConnectionError("second")]

    async def fail() -> int:
        raise errors[circuit.counts[0]]

    for _ in range(2):
        await circuit.settle(fail)
    assert (await circuit.refusal()).__cause__ is errors[1]
    circuit.control.close()
    circuit.control.isolate()
    assert (await circuit.refusal()).__cause__ is None


class TraceableError(ConnectionError):
    """An error that can be looked for."""


@pytest.mark.anyio
async def test_one_exception_at_most_is_kept_and_none_after_a_close() -> None:
    """Open: what was handled last is kept for the refusals; a close lets it go."""
    circuit = Circuit(on_opened=None)
    alive: list[weakref.ref[TraceableError]] = []

    async def fail() -> int:
        error = TraceableError()
        alive.append(weakref.ref(error))
        raise error

    for _ in range(2):
        await circuit.settle(fail)
    gc.collect()
    assert [ref() is not None for ref in alive] == [False, True]
    circuit.control.close()
    gc.collect()
    assert alive[1]() is None


@pytest.mark.anyio
async def test_no_cause_when_a_result_tripped() -> None:
    """CB-13: opened by a result, there is no exception to name, though some were handled before."""
    circuit = Circuit(should_handle=handle(ConnectionError) | handle_result(lambda r: r == 500))
    await circuit.settle(boom)
    await circuit.settle(answer_500)
    assert circuit.state == "open"
    assert (await circuit.refusal()).__cause__ is None


@pytest.mark.anyio
async def test_each_refusal_is_a_new_error_and_no_traceback_grows() -> None:
    """CB-14: a hundred refusals in a row are a hundred errors of one length, the cause's too."""
    circuit = Circuit()
    await circuit.open()
    refusals = [await circuit.refusal() for _ in range(100)]
    assert len({id(error) for error in refusals}) == 100
    assert len({traceback_length(error) for error in refusals}) == 1
    causes = [error.__cause__ for error in refusals]
    assert all(cause is causes[0] for cause in causes)
    before = traceback_length(causes[0]) if causes[0] else 0
    await circuit.refusal()
    assert causes[0] is not None
    assert traceback_length(causes[0]) == before
    assert {error.retry_after for error in refusals} == {5}
    assert {error.pipeline_name for error in refusals} == {"svc"}


@pytest.mark.anyio
async def test_a_refusal_survives_pickle_and_copy() -> None:
    """Errors: the fields travel."""
    circuit = Circuit()
    await circuit.open()
    error = await circuit.refusal()
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is BrokenCircuitError
        assert (str(twin), twin.retry_after, twin.strategy_name) == (
            str(error),
            error.retry_after,
            error.strategy_name,
        )


@pytest.mark.anyio
async def test_late_outcomes_neither_extend_the_break_nor_open_again() -> None:
    """CB-11: a late failure leaves the state and becomes the cause; a late success is counted."""
    circuit = Circuit()
    room = Room()
    late = OSError("late")
    async with anyio.create_task_group() as tasks:
        failing = spawn(tasks, circuit.pipeline.settle, room, "failing")
        good = spawn(tasks, circuit.pipeline.settle, room, "good")
        await tick()
        await circuit.open()
        await circuit.clock.advance(3)
        room.let_out("failing", late)
        room.let_out("good")
        await tick()
        assert isinstance(failing.value, Failure)
        assert good.value == Success("good")
    assert circuit.steps == ["opened"]
    assert (circuit.state, circuit.counts) == ("open", (4, 3))
    refusal = await circuit.refusal()
    assert (refusal.retry_after, refusal.__cause__) == (2, late)


@pytest.mark.anyio
async def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case CB-09: breaks are measured on a monotonic clock."""
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration="1h", control=control
        )
        .build()
    )
    for _ in range(2):
        await pipeline.settle(boom)
    real = time.time
    for step in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda step=step: real() + step)
        with pytest.raises(BrokenCircuitError) as caught:
            await pipeline.execute(ok)
        assert caught.value.retry_after is not None
        assert 0 < caught.value.retry_after <= 3600


@pytest.mark.anyio
async def test_an_endless_break_lasts_until_it_is_closed_by_hand() -> None:
    """CB-18: a break beyond the end of time is no error."""
    circuit = Circuit(break_duration=math.inf)
    await circuit.open()
    await circuit.clock.advance(1e12)
    assert (await circuit.refusal()).retry_after == math.inf
    circuit.control.close()
    assert await circuit.pipeline.execute(ok) == 1


# --- half-open ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_circuit_says_open_until_a_call_comes_after_the_break() -> None:
    """Half-open: lazily, by the first call at the end of the break, that moment included."""
    circuit = Circuit()
    await circuit.open()
    await circuit.clock.advance(4.999)
    await circuit.refusal()
    await circuit.clock.advance(0.001)
    assert circuit.state == "open"
    states: list[str] = []

    async def look() -> int:
        states.append(circuit.state)
        return 1

    await circuit.pipeline.execute(look)
    assert (states, circuit.state) == (["half_open"], "closed")


@pytest.mark.anyio
async def test_a_good_probe_closes() -> None:
    """CB-04, CB-08: calls flow again, and the window starts empty."""
    circuit = Circuit()
    await circuit.open_until_probe()
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.steps == ["opened", "half-opened", "closed"]
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))
    await circuit.settle(boom)
    assert (circuit.state, circuit.counts) == ("closed", (1, 1))


@pytest.mark.anyio
async def test_a_bad_probe_opens_for_a_fresh_break() -> None:
    """CB-03: opened twice, half-opened once, never closed; the next refusal tells a whole break."""
    circuit = Circuit()
    await circuit.open_until_probe()
    counts = circuit.counts
    await circuit.clock.advance(2)
    assert isinstance(await circuit.settle(boom), Failure)
    assert circuit.steps == ["opened", "half-opened", "opened"]
    assert (await circuit.refusal()).retry_after == 5
    assert circuit.counts == counts


@pytest.mark.anyio
async def test_only_one_of_fifty_is_let_in() -> None:
    """Case CB-03, CB-09: the others are refused at once, with a wait that is not negative."""
    circuit = Circuit()
    await circuit.open_until_probe()
    room = Room()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, circuit.pipeline.settle, room, number) for number in range(50)]
        await tick()
        assert len(room.entered) == 1
        refused = [call.value for call in calls if call.done]
        assert len(refused) == 49
        assert all(isinstance(outcome, Rejected) for outcome in refused)
        assert {outcome.error.retry_after for outcome in refused} == {5}
        assert circuit.state == "half_open"
        room.let_all_out()
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_refusal_while_half_open_tells_when_the_probes_place_lapses() -> None:
    """Small print: `retry_after` counts down to the lapse, and is never negative."""
    circuit = Circuit()
    await circuit.open_until_probe()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, circuit.pipeline.execute, Hanging())
        await tick()
        await circuit.clock.advance(1.5)
        error = await circuit.refusal()
        assert error.retry_after == 3.5
        assert "half-open" in str(error)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_probe_that_ends_unhandled_closes() -> None:
    """CB-10, case CB-05: an exception that nobody handles counts as a success, a probe's too."""
    circuit = Circuit(should_handle=ConnectionError)
    await circuit.open_until_probe()
    assert isinstance(await raised_by(circuit.pipeline.execute, bad_value), ValueError)
    assert circuit.state == "closed"
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_probe_with_a_handled_result_opens() -> None:
    """CB-10: results are judged like exceptions."""
    circuit = Circuit(should_handle=handle(ConnectionError) | handle_result(lambda r: r == 500))
    await circuit.open_until_probe()
    assert await circuit.pipeline.execute(answer_500) == 500
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_old_calls_do_not_decide_the_probes_case() -> None:
    """Case CB-07: what was admitted before the break and ends in half-open decides nothing."""
    circuit = Circuit()
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in ("old 1", "old 2", "old 3", "old 4"):
            spawn(tasks, circuit.pipeline.settle, room, name)
        await tick()
        await circuit.open_until_probe()
        spawn(tasks, circuit.pipeline.settle, room, "probe")
        await tick()
        assert circuit.state == "half_open"
        room.let_out("old 1")
        await tick()
        assert circuit.state == "half_open"
        room.let_out("old 2", ConnectionError())
        await tick()
        assert (circuit.state, circuit.counts) == ("half_open", (2, 2))
        room.let_out("probe")
        await tick()
        assert circuit.state == "closed"
        # And of another epoch: not counted in the new window either.
        room.let_out("old 3")
        room.let_out("old 4", ConnectionError())
        await tick()
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))


@pytest.mark.anyio
@pytest.mark.parametrize("again", ["ok", "boom"])
async def test_a_cancelled_probe_gives_its_place_back(again: str) -> None:
    """Decided: a cancelled probe neither closes nor sticks; the very next call is the probe."""
    circuit = Circuit()
    await circuit.open_until_probe()
    async with anyio.create_task_group() as tasks:
        probe = spawn(tasks, circuit.pipeline.execute, Hanging())
        await tick()
        await circuit.refusal()
        probe.cancel()
        await tick()
        assert probe.cancelled
        assert circuit.state == "half_open"
    await circuit.settle(ok if again == "ok" else boom)
    assert circuit.state == ("closed" if again == "ok" else "open")
    assert circuit.steps.count("half-opened") == 1


@pytest.mark.anyio
async def test_a_hung_probe_loses_its_place_after_one_more_break() -> None:
    """Case CB-15: then a second probe may go, and what the first one gives decides nothing."""
    circuit = Circuit()
    await circuit.open_until_probe()
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in ("late good", "late bad", "third"):
            spawn(tasks, circuit.pipeline.settle, room, name)
            await tick()
            await circuit.clock.advance(5)
        assert room.entered == ["late good", "late bad", "third"]
        spawn(tasks, circuit.pipeline.settle, room, "current")
        await tick()
        room.let_out("late good")
        room.let_out("late bad", ConnectionError())
        await tick()
        assert circuit.state == "half_open"
        await circuit.refusal()
        room.let_out("current")
        await tick()
        assert circuit.state == "closed"
        room.let_out("third", ConnectionError())
        await tick()
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))


@pytest.mark.anyio
async def test_a_lapsed_probe_that_is_cancelled_leaves_the_current_one_its_place() -> None:
    """Decided: a place is given back by the one who has it."""
    circuit = Circuit()
    await circuit.open_until_probe()
    room = Room()
    async with anyio.create_task_group() as tasks:
        lapsed = spawn(tasks, circuit.pipeline.settle, room, 1)
        await tick()
        await circuit.clock.advance(5)
        spawn(tasks, circuit.pipeline.settle, room, 2)
        await tick()
        lapsed.cancel()
        await tick()
        await circuit.refusal()
        room.let_all_out()
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_place_lapses_after_the_generated_break() -> None:
    """Small print: one current break, the generator's value included."""
    circuit = Circuit(break_duration_generator=lambda event: 20)
    await circuit.open()
    await circuit.clock.advance(20)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, circuit.pipeline.execute, Hanging())
        await tick()
        await circuit.clock.advance(19)
        assert (await circuit.refusal()).retry_after == 1
        await circuit.clock.advance(1)
        assert await circuit.pipeline.execute(ok) == 1
        tasks.cancel_scope.cancel()


@pytest.mark.asyncio
async def test_a_probe_cancelled_by_its_task_gives_its_place_back() -> None:
    """Decided: the same by `task.cancel()`, and the request is not swallowed."""
    circuit = Circuit()
    await circuit.open_until_probe()
    task = asyncio.create_task(circuit.pipeline.execute(Hanging()))
    await tick()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.state == "closed"


# --- how long a break lasts --------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("value", [2, 2.0, "2s", "2000ms", timedelta(seconds=2)])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_generator_replaces_the_fixed_duration(value: Any, kind: str) -> None:
    """CB-05: for opening, `retry_after` and re-opening; in any duration form, plain or async."""

    async def generate(event: BreakDurationEvent) -> Any:
        await anyio.lowlevel.checkpoint()
        return value

    generator = (lambda event: value) if kind == "plain" else generate
    circuit = Circuit(break_duration_generator=generator)
    await circuit.open()
    assert circuit.events[0].break_duration == 2
    assert (await circuit.refusal()).retry_after == 2
    await circuit.clock.advance(2)
    await circuit.settle(boom)
    assert circuit.steps == ["opened", "half-opened", "opened"]
    assert (await circuit.refusal()).retry_after == 2


@pytest.mark.anyio
async def test_a_generator_that_gives_none_means_the_fixed_duration() -> None:
    """`break_duration_generator`: `None` leaves `break_duration` in force."""
    circuit = Circuit(break_duration_generator=lambda event: None)
    await circuit.open()
    assert (await circuit.refusal()).retry_after == 5


@pytest.mark.anyio
@pytest.mark.parametrize("value", [0, -3.0])
async def test_a_generated_break_of_nothing_is_over_at_once(value: float) -> None:
    """`retry_after` is never negative: no break means the next call is the probe."""
    circuit = Circuit(break_duration_generator=lambda event: value)
    await circuit.open()
    assert circuit.events[0].break_duration == 0
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_the_generator_is_told_how_bad_it_is() -> None:
    """CB-16, CB-17: rate, count and half-open attempts since the last close; and the context."""
    events: list[BreakDurationEvent] = []
    circuit = Circuit(
        failure_ratio=0.5, minimum_throughput=4, break_duration_generator=events.append
    )
    for fn in (ok, ok, boom):
        await circuit.settle(fn)
    await circuit.settle(boom, operation_key="key")
    for _ in range(3):
        await circuit.clock.advance(5)
        await circuit.settle(boom)
    await circuit.clock.advance(5)
    await circuit.settle(ok)
    for _ in range(4):
        await circuit.settle(boom)
    assert [event.half_open_attempts for event in events] == [0, 1, 2, 3, 0]
    assert (events[0].failure_rate, events[0].failure_count) == (0.5, 2)
    assert (events[-1].failure_rate, events[-1].failure_count) == (1.0, 4)
    assert events[0].context.operation_key == "key"


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_generator_that_raises_leaves_the_circuit_open_for_the_fixed_break(
    kind: str,
) -> None:
    """Hooks: the error surfaces with the failure as its context; the transition stands."""

    def generate(event: BreakDurationEvent) -> float:
        raise KeyError("generator")

    async def generate_async(event: BreakDurationEvent) -> float:
        await anyio.lowlevel.checkpoint()
        raise KeyError("generator")

    generator: Any = generate if kind == "plain" else generate_async
    circuit = Circuit(break_duration_generator=generator)
    await circuit.settle(boom)
    error = await raised_by(circuit.pipeline.execute, boom)
    assert isinstance(error, KeyError)
    assert isinstance(error.__context__, ConnectionError)
    assert circuit.state == "open"
    assert (await circuit.refusal()).retry_after == 5
    await circuit.clock.advance(5)
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_generator_that_gives_no_duration_is_named() -> None:
    """Bad input: what was given, by whom, and what it may be."""
    circuit = Circuit(break_duration_generator=lambda event: "soon")
    await circuit.settle(boom)
    error = await raised_by(circuit.pipeline.execute, boom)
    assert isinstance(error, OptionsError)
    assert "break_duration_generator" in str(error)
    assert "'soon'" in str(error)
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_a_cancelled_generator_leaves_the_circuit_open_for_the_fixed_break() -> None:
    """Cancel at every await: the circuit is open already, and stays usable."""

    async def generate(event: BreakDurationEvent) -> float:
        await anyio.sleep_forever()
        return 1.0

    circuit = Circuit(break_duration_generator=generate)
    await circuit.settle(boom)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, circuit.pipeline.execute, boom)
        await tick()
        assert circuit.state == "open"
        call.cancel()
    assert call.cancelled
    await circuit.clock.advance(5)
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_slow_generator_decides_about_its_own_break() -> None:
    """Hooks in transition order: no trial call starts before the length of the break is known."""
    answered = anyio.Event()

    async def generate(event: BreakDurationEvent) -> float:
        await answered.wait()
        return 8.0

    circuit = Circuit(break_duration_generator=generate)
    await circuit.settle(boom)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, circuit.pipeline.settle, boom)
        await tick()
        await circuit.clock.advance(6)
        assert (await circuit.refusal()).retry_after == 0
        answered.set()
        await tick()
        assert (await circuit.refusal()).retry_after == 2
        await circuit.clock.advance(2)
        await circuit.settle(ok)
    assert circuit.steps == ["opened", "half-opened", "closed"]


@pytest.mark.anyio
async def test_a_generator_that_hangs_does_not_keep_the_circuit_open_for_ever() -> None:
    """Like a hung probe it is waited for no longer than one more break."""

    async def generate(event: BreakDurationEvent) -> float:
        await anyio.sleep_forever()
        return 1.0

    circuit = Circuit(break_duration_generator=generate)
    await circuit.settle(boom)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, circuit.pipeline.settle, boom)
        await tick()
        await circuit.clock.advance(10)
        assert await circuit.pipeline.execute(ok) == 1
        assert circuit.state == "closed"
        tasks.cancel_scope.cancel()


# --- hooks -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_hooks_get_events_with_what_happened() -> None:
    """Options: context, outcome, break and whether it was done by hand."""
    circuit = Circuit()
    for _ in range(2):
        await circuit.settle(boom, operation_key="tripping")
    await circuit.clock.advance(5)
    await circuit.settle(ok, operation_key="probing")
    opened, half_opened, closed = circuit.events
    assert isinstance(opened, CircuitOpenedEvent)
    assert opened.context is not None
    assert opened.context.operation_key == "tripping"
    assert isinstance(opened.outcome, Failure)
    assert isinstance(opened.outcome.error, ConnectionError)
    assert (opened.break_duration, opened.manual) == (5, False)
    assert isinstance(half_opened, CircuitHalfOpenedEvent)
    assert half_opened.context.operation_key == "probing"
    assert isinstance(closed, CircuitClosedEvent)
    assert (closed.outcome, closed.manual) == (Success(1), False)
    assert closed.context is half_opened.context


@pytest.mark.anyio
async def test_events_are_frozen() -> None:
    """Hooks receive one frozen object."""
    circuit = Circuit()
    await circuit.open()
    with pytest.raises(AttributeError):
        circuit.events[0].manual = True


@pytest.mark.anyio
async def test_on_opened_sees_properties_of_outer_layers() -> None:
    """CB-42: what was attached to this execution outside of the breaker can be read inside."""
    key = PropertyKey[str]("tenant")
    seen: list[str] = []
    circuit = Circuit(on_opened=lambda event: seen.append(event.context.properties.get(key)))
    await circuit.settle(boom, context=ResilienceContext(properties={key: "first"}))
    await circuit.settle(boom, context=ResilienceContext(properties={key: "second"}))
    assert seen == ["second"]


@pytest.mark.anyio
async def test_a_refusal_of_an_inner_strategy_is_shown_as_rejected() -> None:
    """Small print: inside hooks and predicates an inner refusal is what `settle` would show."""
    outcomes: list[Any] = []
    control = CircuitBreakerControl()
    clock = VirtualClock()

    def predicate(event: Any) -> bool:
        outcomes.append(event.outcome)
        return True

    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1,
            minimum_throughput=2,
            should_handle=predicate,
            on_opened=lambda event: outcomes.append(event.outcome),
            control=control,
        )
        .add_rate_limiter(FixedWindow(1, 1))
        .build()
    )
    await pipeline.execute(ok)
    await pipeline.settle(ok)
    assert control.state == "open"
    assert [type(outcome) for outcome in outcomes] == [Success, Rejected, Rejected]


@pytest.mark.anyio
async def test_hooks_are_awaited_by_the_call_that_caused_them_and_hold_up_no_other() -> None:
    """Hooks: the tripping call waits for `on_opened`; meanwhile others are refused at once."""
    release = anyio.Event()

    async def on_opened(event: CircuitOpenedEvent) -> None:
        await release.wait()

    circuit = Circuit(on_opened=on_opened)
    await circuit.settle(boom)
    async with anyio.create_task_group() as tasks:
        tripping = spawn(tasks, circuit.pipeline.settle, boom)
        await tick()
        assert not tripping.done
        assert circuit.state == "open"
        await circuit.refusal()
        await circuit.clock.advance(5)
        assert await circuit.pipeline.execute(ok) == 1
        assert not tripping.done
        release.set()
        await tick()
        assert isinstance(tripping.value, Failure)


@pytest.mark.anyio
async def test_on_half_opened_runs_before_the_probe() -> None:
    """Hooks: the trial call starts after its hook has finished."""
    log: list[str] = []

    async def on_half_opened(event: CircuitHalfOpenedEvent) -> None:
        log.append("hook begins")
        await anyio.lowlevel.checkpoint()
        log.append("hook ends")

    async def probe() -> int:
        log.append("call")
        return 1

    circuit = Circuit(on_half_opened=on_half_opened)
    await circuit.open_until_probe()
    await circuit.pipeline.execute(probe)
    assert log == ["hook begins", "hook ends", "call"]


@pytest.mark.anyio
async def test_hooks_run_in_transition_order() -> None:
    """CB-38: two whole cycles, each transition told once, in order."""
    circuit = Circuit()
    for _ in range(2):
        await circuit.open_until_probe()
        await circuit.settle(boom)
        await circuit.clock.advance(5)
        await circuit.settle(ok)
    cycle = ["opened", "half-opened", "opened", "half-opened", "closed"]
    assert circuit.steps == cycle * 2


@pytest.mark.anyio
async def test_a_hook_may_use_the_control_and_the_pipeline() -> None:
    """Case CB-11, CB-39: it finds the new state, may change it, and nothing deadlocks."""
    log: list[Any] = []

    async def on_opened(event: CircuitOpenedEvent) -> None:
        log.append(circuit.state)
        circuit.control.close()
        log.append(await circuit.pipeline.settle(ok))

    circuit: Circuit = Circuit(
        on_opened=on_opened, on_closed=lambda event: log.append(event.manual)
    )
    with anyio.fail_after(10):
        for _ in range(2):
            await circuit.settle(boom)
    assert log == ["open", True, Success(1)]
    assert (circuit.state, circuit.counts) == ("closed", (1, 0))


@pytest.mark.anyio
async def test_a_hook_may_cause_the_next_transitions_itself() -> None:
    """CB-39: a hook that makes the trial call, and the failures after that, within its own run."""

    async def on_opened(event: CircuitOpenedEvent) -> None:
        circuit.events.append(event)
        if len(circuit.events) == 1:
            await circuit.settle(ok)

    async def on_closed(event: CircuitClosedEvent) -> None:
        circuit.events.append(event)
        for _ in range(2):
            await circuit.settle(boom)

    circuit = Circuit(
        on_opened=on_opened, on_closed=on_closed, break_duration_generator=lambda event: 0
    )
    with anyio.fail_after(10):
        for _ in range(2):
            await circuit.settle(boom)
    assert circuit.steps == ["opened", "half-opened", "closed", "opened"]


@pytest.mark.anyio
async def test_a_hook_may_isolate() -> None:
    """Case CB-11: what a hook does by hand stands."""
    circuit: Circuit = Circuit(
        on_opened=lambda event: None if event.manual else circuit.control.isolate()
    )
    for _ in range(2):
        await circuit.settle(boom)
    assert circuit.state == "isolated"
    circuit.control.close()
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["plain", "async"])
@pytest.mark.parametrize("hook", ["on_opened", "on_half_opened", "on_closed"])
async def test_a_hook_that_raises_surfaces_and_leaves_a_finished_transition(
    hook: str, kind: str
) -> None:
    """Case LT-05: the error comes out of the call that caused it; the breaker stays consistent."""

    def plain(event: Any) -> None:
        raise KeyError(hook)

    async def asynchronous(event: Any) -> None:
        await anyio.lowlevel.checkpoint()
        raise KeyError(hook)

    options: dict[str, Any] = {hook: plain if kind == "plain" else asynchronous}
    circuit = Circuit(**options)
    await circuit.settle(boom)
    outcome = await circuit.settle(boom)
    assert circuit.state == "open"
    if hook != "on_opened":
        await circuit.clock.advance(5)
        outcome = await circuit.settle(ok)
        assert circuit.state == ("half_open" if hook == "on_half_opened" else "closed")
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, KeyError)
    if hook == "on_opened":
        assert isinstance(outcome.error.__context__, ConnectionError)
        await circuit.clock.advance(5)
    # The place of a probe whose hook raised goes to the next call, which has no such hook any more.
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_probe_whose_half_open_hook_raises_calls_nothing() -> None:
    """Decided: it gives its place back before the callback was invoked."""
    calls = Hanging()

    def fail(event: object) -> None:
        raise KeyError

    circuit = Circuit(on_half_opened=fail)
    await circuit.open_until_probe()
    assert isinstance(await raised_by(circuit.pipeline.execute, calls), KeyError)
    assert calls.calls == 0


@pytest.mark.anyio
@pytest.mark.parametrize("hook", ["on_opened", "on_half_opened", "on_closed"])
async def test_a_call_cancelled_in_its_hook_leaves_a_finished_transition(hook: str) -> None:
    """Cancel at every await: the transition stands, a probe's place goes back."""

    async def hang(event: object) -> None:
        if not released:
            await anyio.sleep_forever()

    released: list[bool] = []
    options: dict[str, Any] = {hook: hang}
    circuit = Circuit(**options)
    await circuit.settle(boom)
    async with anyio.create_task_group() as tasks:
        call: Background
        if hook == "on_opened":
            call = spawn(tasks, circuit.pipeline.execute, boom)
        else:
            await circuit.settle(boom)
            await circuit.clock.advance(5)
            call = spawn(tasks, circuit.pipeline.execute, ok)
        await tick()
        assert not call.done
        call.cancel()
    assert call.cancelled
    states = {"on_opened": "open", "on_half_opened": "half_open", "on_closed": "closed"}
    assert circuit.state == states[hook]
    released.append(True)
    await circuit.clock.advance(5)
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_result_that_a_raising_hook_takes_the_place_of_is_closed() -> None:
    """A value nobody will receive is closed."""

    def fail(event: object) -> None:
        raise KeyError

    circuit = Circuit(on_closed=fail)
    await circuit.open_until_probe()
    result = Closable()

    async def give() -> Closable:
        return result

    assert isinstance(await raised_by(circuit.pipeline.execute, give), KeyError)
    assert result.closed == 1


# --- predicates --------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("half_open", [False, True])
@pytest.mark.parametrize("fn", [ok, boom])
async def test_a_predicate_that_raises_decides_nothing(
    half_open: bool, fn: Callable[[], Awaitable[int]]
) -> None:
    """Decided: not counted, a probe's place goes back, the error surfaces."""
    broken: list[bool] = []

    def predicate(event: Any) -> bool:
        if broken:
            raise KeyError
        return event.outcome.error is not None

    circuit = Circuit(should_handle=predicate)
    if half_open:
        await circuit.open_until_probe()
    counts = circuit.counts
    broken.append(True)
    error = await raised_by(circuit.pipeline.execute, fn)
    assert isinstance(error, KeyError)
    assert isinstance(error.__context__, ConnectionError) == (fn is boom)
    assert circuit.counts == counts
    assert circuit.state == ("half_open" if half_open else "closed")
    broken.clear()
    await circuit.settle(ok)
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_an_async_predicate_is_awaited() -> None:
    """Hooks, predicates, generators: coroutine functions are as good."""

    async def predicate(event: Any) -> bool:
        await anyio.lowlevel.checkpoint()
        return isinstance(event.outcome, Success) and event.outcome.value == 500

    circuit = Circuit(should_handle=predicate)
    for fn in (answer_200, answer_500, boom):
        await circuit.settle(fn)
    assert circuit.counts == (3, 1)


@pytest.mark.anyio
async def test_cancelled_in_an_async_predicate_the_probe_gives_its_place_back() -> None:
    """Cancel at every await: a verdict that was never given is none."""
    slow: list[bool] = []

    async def predicate(event: Any) -> bool:
        if slow:
            await anyio.sleep_forever()
        return event.outcome.error is not None

    circuit = Circuit(should_handle=predicate)
    await circuit.open_until_probe()
    slow.append(True)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, circuit.pipeline.execute, ok)
        await tick()
        call.cancel()
    slow.clear()
    assert call.cancelled
    assert circuit.state == "half_open"
    await circuit.settle(ok)
    assert circuit.state == "closed"


# --- by hand -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_isolated_calls_are_refused_without_a_time_until_closed() -> None:
    """CB-26: then calls flow, and the window has been reset."""
    circuit = Circuit()
    await circuit.settle(boom)
    circuit.control.isolate()
    await circuit.clock.advance(1e6)
    for _ in range(3):
        error = await circuit.refusal()
        assert type(error) is IsolatedCircuitError
        assert error.retry_after is None
        assert "isolated" in str(error)
    circuit.control.close()
    assert circuit.counts == (0, 0)
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_isolating_tells_on_opened() -> None:
    """CB-27: manual, with an endless break and no context of any execution."""
    circuit = Circuit()
    circuit.control.isolate()
    [event] = circuit.events
    assert isinstance(event, CircuitOpenedEvent)
    assert (event.manual, event.break_duration) == (True, math.inf)
    assert (event.context, event.outcome) == (None, None)


@pytest.mark.anyio
async def test_isolating_again_is_silent() -> None:
    """Decided: only a change is told."""
    circuit = Circuit()
    for _ in range(3):
        circuit.control.isolate()
    assert circuit.steps == ["opened"]


@pytest.mark.anyio
async def test_closing_by_hand_tells_on_closed_if_it_was_not_closed() -> None:
    """CB-28: manual; a close of a closed circuit only resets its window."""
    circuit = Circuit()
    await circuit.settle(boom)
    circuit.control.close()
    assert (circuit.events, circuit.counts) == ([], (0, 0))
    await circuit.open()
    circuit.control.close()
    event = circuit.events[-1]
    assert isinstance(event, CircuitClosedEvent)
    assert (event.manual, event.context, event.outcome) == (True, None, None)
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_control_isolated_before_building_holds_all_its_breakers() -> None:
    """CB-29, CB-31: both start isolated, and both recover on close."""
    control = CircuitBreakerControl()
    control.isolate()
    circuits = [Circuit(control=control) for _ in range(2)]
    for circuit in circuits:
        assert isinstance(await circuit.refusal(), IsolatedCircuitError)
    assert control.state == "isolated"
    control.close()
    for circuit in circuits:
        assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_control_isolated_and_closed_before_building_changes_nothing() -> None:
    """CB-30: what is built afterwards starts closed."""
    control = CircuitBreakerControl()
    control.isolate()
    control.close()
    circuit = Circuit(control=control)
    assert await circuit.pipeline.execute(ok) == 1
    assert circuit.events == []


@pytest.mark.anyio
async def test_a_control_that_drives_nothing_says_closed_and_can_be_closed() -> None:
    """CB-33, CB-34: no error, nothing counted."""
    control = CircuitBreakerControl()
    control.close()
    assert control.state == "closed"
    metrics = control.metrics
    assert (metrics.throughput, metrics.failures, metrics.rate) == (0, 0, 0)
    assert (metrics.opened_at, metrics.blocked_until) == (None, None)


@pytest.mark.anyio
async def test_one_control_drives_many_breakers_before_and_after() -> None:
    """`control`: two breakers of one pipeline and one of another, all at once."""
    control = CircuitBreakerControl()
    pipelines: list[ResiliencePipeline[Any]] = [
        ResiliencePipelineBuilder()
        .add_circuit_breaker(control=control)
        .add_circuit_breaker(control=control)
        .build()
    ]
    control.isolate()
    pipelines.append(ResiliencePipelineBuilder().add_circuit_breaker(control=control).build())
    for pipeline in pipelines:
        with pytest.raises(IsolatedCircuitError):
            await pipeline.execute(ok)
    control.close()
    for pipeline in pipelines:
        assert await pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_building_twice_gives_two_circuits_of_one_control() -> None:
    """Building again gives fresh state; the control, shared by design, drives both."""
    clock = VirtualClock()
    control = CircuitBreakerControl()
    builder = ResiliencePipelineBuilder(clock=clock).add_circuit_breaker(
        failure_ratio=1, minimum_throughput=2, control=control
    )
    one, two = builder.build(), builder.build()
    for _ in range(2):
        await one.settle(boom)
    assert isinstance(await one.settle(ok), Rejected)
    assert await two.execute(ok) == 1
    assert control.state == "open"
    control.isolate()
    assert isinstance((await two.settle(ok)).error, IsolatedCircuitError)


@pytest.mark.anyio
async def test_the_control_says_the_worst_state() -> None:
    """Small print: isolated before open before half-open before closed."""
    control = CircuitBreakerControl()
    clock = VirtualClock()
    builder = ResiliencePipelineBuilder(clock=clock).add_circuit_breaker(
        failure_ratio=1, minimum_throughput=2, break_duration=5, control=control
    )
    one, two, _three = builder.build(), builder.build(), builder.build()
    states: list[str] = [control.state]
    for _ in range(2):
        await one.settle(boom)
    states.append(control.state)
    await clock.advance(5)
    async with anyio.create_task_group() as tasks:
        spawn(tasks, one.execute, Hanging())
        await tick()
        states.append(control.state)
        for _ in range(2):
            await two.settle(boom)
        states.append(control.state)
        control.isolate()
        states.append(control.state)
        control.close()
        states.append(control.state)
        tasks.cancel_scope.cancel()
    assert states == ["closed", "open", "half_open", "open", "isolated", "closed"]


@pytest.mark.anyio
async def test_metrics_are_summed_and_times_are_the_latest() -> None:
    """Small print: throughput and failures of all, `opened_at` and `blocked_until` of the latest."""
    control = CircuitBreakerControl()
    clock = VirtualClock(start=100)
    builder = ResiliencePipelineBuilder(clock=clock).add_circuit_breaker(
        failure_ratio=1, minimum_throughput=2, break_duration=5, control=control
    )
    one, two = builder.build(), builder.build()
    for _ in range(2):
        await one.settle(boom)
    await two.settle(ok)
    metrics = control.metrics
    assert (metrics.throughput, metrics.failures) == (3, 2)
    assert metrics.rate == pytest.approx(2 / 3)
    assert (metrics.opened_at, metrics.blocked_until) == (100, 105)
    control.close()
    await clock.advance(1)
    for pipeline in (one, two):
        await clock.advance(1)
        for _ in range(2):
            await pipeline.settle(boom)
    assert (control.metrics.opened_at, control.metrics.blocked_until) == (103, 108)


@pytest.mark.anyio
async def test_metrics_know_no_break_once_closed() -> None:
    """`opened_at` and `blocked_until` are `None` where there is no break."""
    circuit = Circuit()
    assert circuit.control.metrics.opened_at is None
    await circuit.open()
    assert circuit.control.metrics.opened_at == 0
    await circuit.clock.advance(5)
    await circuit.settle(ok)
    assert circuit.control.metrics.opened_at is None
    assert circuit.control.metrics.blocked_until is None


@pytest.mark.anyio
async def test_metrics_are_a_frozen_snapshot() -> None:
    """What was read does not change behind the reader's back."""
    circuit = Circuit(minimum_throughput=10)
    before = circuit.control.metrics
    await circuit.settle(ok)
    assert before.throughput == 0
    with pytest.raises(AttributeError):
        before.throughput = 5  # type: ignore[misc]


@pytest.mark.anyio
async def test_a_dropped_pipeline_is_forgotten_by_its_control() -> None:
    """CB-32, weak: a control may outlive the pipelines it drove; they are no longer counted."""
    circuit = Circuit()
    await circuit.open()
    control = circuit.control
    pipeline = weakref.ref(circuit.pipeline)
    del circuit
    gc.collect()
    assert pipeline() is None
    assert (control.state, control.metrics.throughput) == ("closed", 0)
    control.isolate()


@pytest.mark.anyio
async def test_calls_inside_when_isolated_run_to_their_end() -> None:
    """CB-12: they give their results; a good one does not end the isolation."""
    circuit = Circuit()
    room = Room()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, circuit.pipeline.execute, room, "inside")
        await tick()
        circuit.control.isolate()
        room.let_out("inside")
        await tick()
        assert call.value == "inside"
    assert (circuit.state, circuit.counts) == ("isolated", (1, 0))


@pytest.mark.anyio
async def test_a_probe_inside_when_closed_by_hand_is_of_another_epoch() -> None:
    """Late results: what was admitted before the close counts for nothing after it."""
    circuit = Circuit()
    await circuit.open_until_probe()
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, circuit.pipeline.settle, room)
        await tick()
        circuit.control.close()
        room.let_out(error=ConnectionError())
        await tick()
    assert (circuit.state, circuit.counts) == ("closed", (0, 0))


@pytest.mark.anyio
async def test_isolating_ends_a_break_too() -> None:
    """`isolate`: an open circuit becomes isolated, and closing by hand closes it for good."""
    circuit = Circuit()
    await circuit.open()
    circuit.control.isolate()
    assert isinstance(await circuit.refusal(), IsolatedCircuitError)
    circuit.control.close()
    assert await circuit.pipeline.execute(ok) == 1


class AsyncCallable:
    """A hook that is an object with an async `__call__`."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    async def __call__(self, event: Any) -> None:
        self.log.append(event)


@pytest.mark.anyio
@pytest.mark.parametrize("form", ["function", "partial", "object", "lambda"])
async def test_coroutine_hooks_of_a_step_by_hand_run_in_the_next_call(form: str) -> None:
    """Small print: plain hooks at once, coroutine hooks in the next call, whatever comes of that."""
    log: list[Any] = []

    async def hook(event: Any) -> None:
        await anyio.lowlevel.checkpoint()
        log.append(event)

    async def hook_with_log(into: list[Any], event: Any) -> None:
        into.append(event)

    hooks: dict[str, Any] = {
        "function": hook,
        "partial": partial(hook_with_log, log),
        "object": AsyncCallable(log),
        "lambda": lambda event: hook(event),
    }
    circuit = Circuit(on_opened=hooks[form], on_closed=hooks[form])
    circuit.control.isolate()
    circuit.control.close()
    circuit.control.isolate()
    assert log == []
    with pytest.raises(IsolatedCircuitError):
        await circuit.pipeline.execute(ok)
    assert [type(event) for event in log] == [
        CircuitOpenedEvent,
        CircuitClosedEvent,
        CircuitOpenedEvent,
    ]
    assert all(event.manual for event in log)
    await circuit.settle(ok)
    assert len(log) == 3


@pytest.mark.anyio
async def test_a_plain_hook_of_a_step_by_hand_that_raises_surfaces_there() -> None:
    """Hooks: the error comes out of `isolate()`, after every circuit has been isolated."""
    control = CircuitBreakerControl()

    def fail(event: object) -> None:
        raise KeyError

    circuits = [Circuit(control=control, on_opened=fail, on_closed=fail) for _ in range(3)]
    with pytest.raises(KeyError):
        control.isolate()
    for circuit in circuits:
        assert isinstance(await circuit.refusal(), IsolatedCircuitError)
    with pytest.raises(KeyError):
        control.close()
    for circuit in circuits:
        assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_coroutine_hook_of_a_step_by_hand_that_raises_surfaces_in_the_next_call() -> None:
    """Hooks: it surfaces to the call that awaits it, once."""

    async def fail(event: object) -> None:
        raise KeyError

    circuit = Circuit(on_closed=fail)
    circuit.control.isolate()
    circuit.control.close()
    assert isinstance(await raised_by(circuit.pipeline.execute, ok), KeyError)
    assert await circuit.pipeline.execute(ok) == 1


@pytest.mark.anyio
async def test_a_control_shows_its_state() -> None:
    """`repr` says the state and how many it drives."""
    circuit = Circuit()
    assert "closed" in repr(circuit.control)
    assert "1" in repr(circuit.control)
    circuit.control.isolate()
    assert "isolated" in repr(circuit.control)


# --- streams -----------------------------------------------------------------------------------


def source(*items: Any) -> Callable[[], AsyncIterator[Any]]:
    """Make a factory whose stream yields items; an exception among them is raised."""

    async def stream() -> AsyncIterator[Any]:
        for item in items:
            if isinstance(item, Exception):
                raise item
            yield item

    return stream


async def read(circuit: Circuit, factory: Callable[[], Any]) -> list[Any]:
    chunks: list[Any] = []
    async with circuit.pipeline.execute_stream(factory) as stream:
        async for chunk in stream:
            chunks.append(chunk)
    return chunks


@pytest.mark.anyio
async def test_streams_that_fail_before_their_first_chunk_open_the_circuit() -> None:
    """B-9: then a pull is refused and the factory is not called."""
    circuit = Circuit()

    async def connect() -> AsyncIterator[int]:
        raise ConnectionError

    for factory in (source(ConnectionError()), connect):
        with pytest.raises(ConnectionError):
            await read(circuit, factory)
    assert circuit.state == "open"
    calls = Hanging()
    with pytest.raises(BrokenCircuitError):
        await anext(circuit.pipeline.execute_stream(calls))  # type: ignore[arg-type]
    assert calls.calls == 0


@pytest.mark.anyio
async def test_what_fails_after_the_first_chunk_is_not_counted() -> None:
    """B-4: a stream that began is a success, whatever becomes of it."""
    circuit = Circuit()
    for _ in range(5):
        with pytest.raises(ConnectionError):
            await read(circuit, source(1, ConnectionError()))
    assert (circuit.state, circuit.counts) == ("closed", (5, 0))


@pytest.mark.anyio
async def test_an_empty_stream_is_a_success() -> None:
    """Streams: a source that ends without a chunk is no failure."""
    circuit = Circuit()
    assert await read(circuit, source()) == []
    assert circuit.counts == (1, 0)


@pytest.mark.anyio
async def test_the_first_chunk_is_a_streams_result() -> None:
    """Streams: `handle_result` is shown the first chunk, which passes all the same."""
    circuit = Circuit(should_handle=handle_result(lambda chunk: chunk == "error"))
    for _ in range(2):
        assert await read(circuit, source("error", "more")) == ["error", "more"]
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_a_stream_is_a_probe_until_its_first_chunk() -> None:
    """Half-open: the first chunk closes the circuit, while the stream goes on."""
    circuit = Circuit()
    await circuit.open_until_probe()
    async with circuit.pipeline.execute_stream(source(1, 2)) as stream:
        assert await anext(stream) == 1
        assert circuit.state == "closed"
        assert await anext(stream) == 2


@pytest.mark.anyio
async def test_a_stream_cancelled_before_its_first_chunk_gives_the_probes_place_back() -> None:
    """Half-open: the next call is the probe."""
    circuit = Circuit()
    await circuit.open_until_probe()

    async def silent() -> AsyncIterator[int]:
        await anyio.sleep_forever()
        yield 1

    async with anyio.create_task_group() as tasks:
        pull = spawn(tasks, circuit.pipeline.execute_stream(silent).__anext__)
        await tick()
        await circuit.refusal()
        pull.cancel()
    assert await circuit.pipeline.execute(ok) == 1


# --- options -----------------------------------------------------------------------------------


def test_defaults() -> None:
    """Options read back under their names, durations in seconds."""
    options = CircuitBreaker()
    assert (options.failure_ratio, options.minimum_throughput) == (0.1, 100)
    assert (options.sampling_duration, options.break_duration) == (30.0, 5.0)
    assert options.break_duration_generator is None
    assert (options.on_opened, options.on_closed, options.on_half_opened) == (None, None, None)
    assert options.control is None
    assert options.name == "CircuitBreaker"


@pytest.mark.parametrize(
    "options",
    [
        {"failure_ratio": 0},
        {"failure_ratio": 1},
        {"failure_ratio": 0.001, "minimum_throughput": 2},
        {"sampling_duration": "500ms", "break_duration": "500ms"},
        {"sampling_duration": timedelta(minutes=1), "break_duration": timedelta(seconds=1)},
        {"sampling_duration": math.inf, "break_duration": math.inf},
        {"should_handle": (OSError, ValueError)},
        {"should_handle": handle(OSError)},
        {"should_handle": lambda event: True},
        {"name": "orders"},
        {"control": None},
    ],
    ids=str,
)
def test_good_options_are_accepted(options: dict[str, Any]) -> None:
    """CB-41: the edges of the ranges, and every form."""
    CircuitBreaker(**options)


BAD_OPTIONS = [
    ("failure_ratio", -0.01),
    ("failure_ratio", 1.01),
    ("failure_ratio", math.nan),
    ("failure_ratio", True),
    ("failure_ratio", "0.5"),
    ("failure_ratio", None),
    ("minimum_throughput", 1),
    ("minimum_throughput", 0),
    ("minimum_throughput", -5),
    ("minimum_throughput", 2.0),
    ("minimum_throughput", True),
    ("minimum_throughput", math.inf),
    ("minimum_throughput", None),
    ("sampling_duration", 0),
    ("sampling_duration", -1),
    ("sampling_duration", math.nan),
    ("sampling_duration", "soon"),
    ("sampling_duration", True),
    ("sampling_duration", None),
    ("break_duration", 0),
    ("break_duration", "0s"),
    ("break_duration", -1),
    ("break_duration", timedelta(seconds=-1)),
    ("break_duration", math.nan),
    ("break_duration", False),
    ("break_duration", None),
    ("break_duration_generator", 5),
    ("should_handle", None),
    ("should_handle", 5),
    ("should_handle", KeyboardInterrupt),
    ("should_handle", ()),
    ("should_handle", (ValueError, 5)),
    ("on_opened", "print"),
    ("on_closed", 1),
    ("on_half_opened", object()),
    ("control", CircuitBreakerControl),
    ("control", "control"),
    ("name", 5),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """Bad input: an `OptionsError`, also a `ValueError`, that names the option."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError) as caught:
        CircuitBreaker(**options)
    assert isinstance(caught.value, ValueError)
    [problem] = caught.value.problems
    assert problem.startswith(f"{option} must be ")


def test_all_bad_options_are_reported_at_once() -> None:
    """CB-41: one error that lists every bad field."""
    bad: dict[str, Any] = {
        "break_duration": 0,
        "sampling_duration": 0,
        "minimum_throughput": 0,
        "should_handle": None,
        "failure_ratio": 2,
    }
    with pytest.raises(OptionsError) as caught:
        ResiliencePipelineBuilder().add_circuit_breaker(**bad)
    assert len(caught.value.problems) == 5
    assert all(option in str(caught.value) for option in bad)


def test_a_misspelt_option_is_corrected() -> None:
    """Options: the right name is suggested."""
    options: dict[str, Any] = {"failure_ration": 0.5}
    with pytest.raises(TypeError, match="'failure_ratio'"):
        CircuitBreaker(**options)


def test_a_coroutine_in_place_of_a_hook_is_misuse_and_is_closed() -> None:
    """Small print: an object where its function belongs; a coroutine is closed."""

    async def hook() -> None: ...

    coroutine: Any = hook()
    with pytest.raises(MisuseError, match="on_opened"):
        CircuitBreaker(on_opened=coroutine)
    with pytest.raises(RuntimeError, match="already"):
        coroutine.send(None)


def test_options_are_immutable_and_keyword_only() -> None:
    """Options are values."""
    options = CircuitBreaker()
    with pytest.raises(AttributeError):
        options.failure_ratio = 0.5  # type: ignore[misc]
    with pytest.raises(TypeError):
        CircuitBreaker(0.5)  # type: ignore[call-arg]
