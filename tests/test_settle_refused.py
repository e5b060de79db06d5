"""`settle` at a circuit that is not closed: refused at once, it says what a refusal inside says."""

from __future__ import annotations

from typing import Any

import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    IsolatedCircuitError,
    Outcome,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    Success,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, boom, ok


async def opened(clock: VirtualClock, *, retry_inside: bool = False) -> ResiliencePipeline[Any]:
    """A pipeline whose outermost breaker has opened for 5 s."""
    builder = B(name="svc", clock=clock).add_circuit_breaker(
        failure_ratio=1, minimum_throughput=2, break_duration=5, name="outer"
    )
    if retry_inside:
        builder = builder.add_retry(max_retry_attempts=1, delay=0)
    pipeline = builder.build()
    for _ in range(2):
        await pipeline.settle(boom)
    return pipeline


def told(outcome: Outcome[Any, Any]) -> dict[str, Any]:
    """All that a refusal tells."""
    assert isinstance(outcome, Rejected)
    error = outcome.error
    return {
        "type": type(error),
        "message": str(error),
        "cause": error.__cause__,
        "suppresses": error.__suppress_context__,
        "fields": {name: value for name, value in vars(error).items() if name != "_execution"},
        "attempts": [
            (each.number, each.duration, each.delay, each.hedged)
            for each in outcome.attempts
            if each.outcome == outcome
        ],
        "attempt_count": outcome.attempt_count,
    }


@pytest.mark.anyio
@pytest.mark.parametrize("retry_inside", [False, True])
async def test_refused_at_once_or_by_the_way_it_is_the_same_refusal(retry_inside: bool) -> None:
    """A context of the caller's own takes the way through the strategies; both tell the same."""
    clock = VirtualClock()
    pipeline = await opened(clock, retry_inside=retry_inside)
    await clock.advance(1.5)
    at_once = await pipeline.settle(ok, operation_key="op")
    by_the_way = await pipeline.settle(ok, context=ResilienceContext("op"))
    assert told(at_once) == told(by_the_way)
    assert isinstance(at_once, Rejected)
    assert type(at_once.error) is BrokenCircuitError
    assert at_once.error.retry_after == 3.5
    assert isinstance(at_once.error.__cause__, BoomError)
    assert at_once.attempt_count == len(at_once.attempts) == (0 if retry_inside else 1)


@pytest.mark.anyio
async def test_each_refusal_is_an_error_of_its_own() -> None:
    """Raised any number of times, none lets the others' tracebacks grow."""
    pipeline = await opened(VirtualClock())
    one, other = await pipeline.settle(ok), await pipeline.settle(ok)
    assert one.error is not other.error
    with pytest.raises(BrokenCircuitError):
        one.unwrap()
    assert other.error is not None
    assert other.error.__traceback__ is None


@pytest.mark.anyio
async def test_the_first_call_after_the_break_is_let_in() -> None:
    """Only the break itself is refused at once: at its end, which is inclusive, there is a trial."""
    clock = VirtualClock()
    pipeline = await opened(clock)
    await clock.advance(5)
    assert await pipeline.settle(ok) == Success(1)


@pytest.mark.anyio
async def test_an_isolated_circuit_refuses_too() -> None:
    """By hand there is no end to wait for."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).build()
    control.isolate()
    outcome = await pipeline.settle(ok)
    assert isinstance(outcome, Rejected)
    assert type(outcome.error) is IsolatedCircuitError
    assert outcome.error.retry_after is None


@pytest.mark.anyio
async def test_what_is_around_the_circuit_is_asked_first() -> None:
    """Further in, a circuit's refusal is for the strategies around it to see."""
    clock = VirtualClock()
    circuit = await opened(clock)
    pipeline = B().add_fallback(fallback_value="instead").add_pipeline(circuit).build()
    outcome: Outcome[Any, Any] = await pipeline.settle(ok)
    assert outcome == Success("instead")


@pytest.mark.anyio
async def test_a_bad_callback_is_a_misuse_also_while_the_circuit_is_open() -> None:
    """Mistakes are told first."""
    pipeline = await opened(VirtualClock())
    nothing: Any = "no function"
    outcome = await pipeline.settle(nothing)
    assert not isinstance(outcome, Rejected)


@pytest.mark.anyio
async def test_the_record_of_a_single_try_is_written_when_it_is_read() -> None:
    """It is the same each time, and holds an outcome of its own."""
    outcome = await ResiliencePipeline.empty.settle(ok)
    (attempt,) = outcome.attempts
    assert outcome.attempts is outcome.attempts
    assert attempt.outcome == Success(1)
    assert attempt.outcome is not outcome
    assert (attempt.number, attempt.delay, attempt.hedged) == (0, 0.0, False)
    assert attempt.duration >= 0
