"""`settle`: every `Exception` ends in the outcome, whose rejection it is, and the history of attempts."""

from __future__ import annotations

import asyncio
import copy
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    Attempt,
    BrokenCircuitError,
    CircuitBreakerControl,
    ExecutionRejectedError,
    Failure,
    MisuseError,
    OutcomeEvent,
    Rejected,
    ResilienceContext,
    ResiliencePipeline,
    Success,
    TimeoutRejectedError,
    TokenBucket,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, Calls, boom, hang, ok, running, tick

EMPTY = ResiliencePipeline.empty


def isolated(name: str | None = None) -> ResiliencePipeline[BrokenCircuitError]:
    control = CircuitBreakerControl()
    control.isolate()
    return B(name=name).add_circuit_breaker(control=control).build()


# ---- the three arms -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_value_is_success() -> None:
    """What the callback returns is `Success`, whatever the value."""
    values: list[Any] = [1, None, [], False, BoomError("a value"), Failure(BoomError())]

    async def give(value: Any) -> Any:
        return value

    for value in values:
        assert await EMPTY.settle(give, value) == Success(value)


@pytest.mark.anyio
async def test_an_error_of_the_callback_is_failure() -> None:
    """What the callback raises is `Failure`, with the very error."""
    error = BoomError("mine")
    call: Calls[int] = Calls(error)
    outcome = await B().add_timeout(60).build().settle(call)
    assert isinstance(outcome, Failure)
    assert outcome.error is error


@pytest.mark.anyio
async def test_a_refusal_is_rejected() -> None:
    """What one of the pipeline's own strategies refused or gave up on is `Rejected`."""
    clock = VirtualClock(autojump=True)
    spent = B(clock=clock).add_rate_limiter(TokenBucket(1, 1)).build()
    await spent.execute(ok)
    full = B().add_concurrency_limiter(1).build()
    slow = B(clock=clock).add_timeout(1).build()
    async with running(full.execute, hang):
        for pipeline, call in ((isolated(), ok), (spent, ok), (full, ok), (slow, hang)):
            outcome = await pipeline.settle(call)
            assert isinstance(outcome, Rejected)
            assert isinstance(outcome.error, ExecutionRejectedError)


# ---- never an Exception -------------------------------------------------------------------------


def raises(_: Any) -> Any:
    raise KeyError("from a function of the user's")


async def raises_async(_: Any) -> Any:
    await checkpoint()
    raise KeyError("from a coroutine function of the user's")


BREAKER: Any = {"failure_ratio": 1, "minimum_throughput": 2}


def _open(builder: Any, **options: Any) -> Any:
    return builder.add_circuit_breaker(**BREAKER, **options)


#: What makes a pipeline whose user function is called in each place, given that function.
PLACES: list[Any] = [
    pytest.param(lambda f: B().add_retry(delay=0, should_handle=f), id="retry.should_handle"),
    pytest.param(lambda f: B().add_retry(delay=0, on_retry=f), id="retry.on_retry"),
    pytest.param(lambda f: B().add_retry(delay_generator=f), id="retry.delay_generator"),
    pytest.param(lambda f: _open(B(), should_handle=f), id="breaker.should_handle"),
    pytest.param(lambda f: _open(B(), on_opened=f), id="breaker.on_opened"),
    pytest.param(lambda f: _open(B(), break_duration_generator=f), id="breaker.break_duration"),
    pytest.param(lambda f: B().add_timeout(1, timeout_generator=f), id="timeout.timeout_generator"),
    pytest.param(lambda f: B().add_fallback(f), id="fallback.fallback_action"),
    pytest.param(
        lambda f: B().add_fallback(fallback_value=1, on_fallback=f), id="fallback.on_fallback"
    ),
    pytest.param(
        lambda f: B().add_fallback(fallback_value=1, should_handle=f), id="fallback.should_handle"
    ),
]


@pytest.mark.anyio
@pytest.mark.parametrize("function", [raises, raises_async], ids=["plain", "coroutine"])
@pytest.mark.parametrize("place", PLACES)
async def test_what_functions_of_the_users_raise_is_failure(
    place: Callable[[Any], Any], function: Callable[[Any], Any]
) -> None:
    """Case CW-05: an error of a predicate, hook or generator is the outcome, and no other comes out."""
    pipeline = place(function).build()
    outcomes = [await pipeline.settle(boom) for _ in range(2)]
    assert isinstance(outcomes[-1], Failure)
    assert type(outcomes[-1].error) is KeyError


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("pipeline", "call"),
    [
        pytest.param(
            B(clock=VirtualClock(autojump=True)).add_timeout(1, on_timeout=raises),
            hang,
            id="timeout",
        ),
        pytest.param(
            B().add_retry(delay=0, should_handle=handle_result(raises)), ok, id="handle_result"
        ),
    ],
)
async def test_what_other_functions_of_the_users_raise_is_failure(
    pipeline: Any, call: Callable[[], Any]
) -> None:
    """Case CW-05: the same for functions that are called in other circumstances."""
    outcome = await pipeline.build().settle(call)
    assert isinstance(outcome, Failure)
    assert type(outcome.error) is KeyError


@pytest.mark.anyio
async def test_what_a_limiters_hook_raises_is_failure() -> None:
    """Case CW-05: the error of an `on_rejected` hook comes in place of the rejection."""
    for pipeline in (
        B().add_concurrency_limiter(1, on_rejected=raises).build(),
        B().add_rate_limiter(TokenBucket(1, 1e-9), on_rejected=raises).build(),
    ):
        outcome = await pipeline.execute(partial(pipeline.settle, ok))
        assert isinstance(outcome, Failure)
        assert type(outcome.error) is KeyError


@pytest.mark.anyio
@pytest.mark.parametrize("call", [lambda: 3, 3, None, "ok"], ids=["returns-3", "3", "None", "text"])
async def test_misuse_is_failure(call: Any) -> None:
    """Case CW-05: also what the library itself complains about is the outcome."""
    outcome = await B().add_retry(delay=0).build().settle(call)
    assert isinstance(outcome, Failure)
    assert type(outcome.error) is MisuseError


@pytest.mark.anyio
async def test_a_context_in_use_is_failure() -> None:
    """Case CW-05: so is the refusal of a context that serves another execution."""
    context = ResilienceContext()
    async with running(partial(EMPTY.execute, hang, context=context)):
        outcome = await EMPTY.settle(ok, context=context)
    assert isinstance(outcome.error, MisuseError)


@pytest.mark.anyio
async def test_a_broken_clock_is_failure() -> None:
    """Case CW-05: and what a clock of the user's own raises."""

    class Broken(VirtualClock):
        def now(self) -> float:
            raise OSError("no battery")

    outcome = await B(clock=Broken()).add_rate_limiter(TokenBucket(1, 1)).build().settle(ok)
    assert isinstance(outcome.error, OSError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_what_is_no_exception_passes(kind: type[BaseException], backend: str) -> None:
    """Other `BaseException`s pass through `settle` and every strategy, untouched and not counted."""
    control = CircuitBreakerControl()
    asked: list[object] = []

    def ask(event: object) -> bool:
        asked.append(event)
        return True

    error = kind("stop")
    call: Calls[int] = Calls(error)

    async def main() -> None:
        pipeline = (
            B()
            .add_fallback(fallback_value=1, should_handle=ask)
            .add_retry(delay=0, should_handle=ask)
            .add_circuit_breaker(should_handle=ask, control=control)
            .add_timeout(60)
            .build()
        )
        # Caught here, because the loops have ways of their own with what ends a program.
        with pytest.raises(kind) as caught:
            await pipeline.settle(call)
        assert caught.value is error

    anyio.run(main, backend=backend)
    assert call.count == 1
    assert asked == []
    assert control.metrics.throughput == 0


@pytest.mark.asyncio
async def test_cancellation_of_a_task_passes() -> None:
    """A task that is cancelled while it settles ends cancelled."""
    task = asyncio.create_task(B().add_retry(delay=0).add_timeout(60).build().settle(hang))
    await tick()
    task.cancel("why")
    with pytest.raises(asyncio.CancelledError, match="why"):
        await task
    assert task.cancelled()


@pytest.mark.anyio
async def test_cancellation_by_a_scope_passes() -> None:
    """A scope around it that is cancelled ends `settle`, and catches its own cancellation."""
    with anyio.CancelScope() as scope:
        async with running(tick):
            scope.cancel()
            await B().add_retry(delay=0).add_timeout(60).build().settle(hang)
    assert scope.cancelled_caught


# ---- whose rejection it is ----------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_rejection_of_a_pipeline_inside_the_callback_is_failure() -> None:
    """Case CW-07: a `BrokenCircuitError` that came out of `fn` from another pipeline is `Failure`."""
    db = isolated("db")
    api = B(name="api").add_circuit_breaker().add_timeout(60).build()
    outcome = await api.settle(db.execute, ok)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, BrokenCircuitError)
    assert outcome.error.pipeline_name == "db"


@pytest.mark.anyio
async def test_the_rejection_of_a_nested_pipeline_is_rejected() -> None:
    """Case CW-07: strategies of a pipeline nested with `add_pipeline` are this pipeline's own."""
    outcome = await B(name="api").add_pipeline(isolated("db")).build().settle(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.error.pipeline_name == "db"


@pytest.mark.anyio
async def test_names_do_not_tell_whose_rejection_it_is() -> None:
    """Case CW-07: neither the type nor the names matter: a twin's rejection is `Failure`."""
    outcome = await isolated("api").settle(ok)
    twin = B(name="api").add_circuit_breaker().build()
    inner = await twin.settle(isolated("api").execute, ok)
    assert isinstance(outcome, Rejected)
    assert isinstance(inner, Failure)
    assert (inner.error.pipeline_name, inner.error.strategy_name) == (  # type: ignore[attr-defined]
        outcome.error.pipeline_name,
        outcome.error.strategy_name,
    )


@pytest.mark.anyio
async def test_a_pipeline_used_inside_itself() -> None:
    """Case CW-07: the refusal of an execution inside the callback is its own, by the same pipeline."""
    pipeline = B().add_concurrency_limiter(1).build()
    outcome = await pipeline.settle(pipeline.execute, ok)
    assert isinstance(outcome, Failure)
    inner = await pipeline.settle(pipeline.settle, ok)
    assert isinstance(inner, Success)
    assert isinstance(inner.value, Rejected)


@pytest.mark.anyio
async def test_a_rejection_stored_from_an_earlier_execution_is_failure() -> None:
    """Case CW-07: a callback that raises what another execution of this pipeline was refused with."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).build()
    control.isolate()
    earlier = (await pipeline.settle(ok)).error
    assert earlier is not None
    control.close()
    for stored in (earlier, copy.copy(earlier), pickle.loads(pickle.dumps(earlier))):
        outcome = await pipeline.settle(Calls(stored))
        assert isinstance(outcome, Failure)
        assert outcome.error is stored


@pytest.mark.anyio
async def test_a_rejection_stored_in_a_context_that_is_used_again_is_failure() -> None:
    """Case CW-07: executions are told apart also when they are served by one context."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).build()
    context = ResilienceContext()
    control.isolate()
    earlier = (await pipeline.settle(ok, context=context)).error
    assert earlier is not None
    control.close()
    assert isinstance(await pipeline.settle(Calls(earlier), context=context), Failure)


@pytest.mark.anyio
async def test_an_error_raised_from_a_rejection_is_failure() -> None:
    """What a fallback makes of a rejection is the fallback's; the rejection is in its chain."""

    def translate(event: Any) -> Any:
        raise LookupError("no value") from event.outcome.error

    pipeline = B().add_fallback(translate).add_pipeline(isolated()).build()
    outcome = await pipeline.settle(ok)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error.__cause__, BrokenCircuitError)


@pytest.mark.anyio
async def test_a_rejection_that_a_fallback_raises_again_is_rejected() -> None:
    """A rejection of this very execution stays one, whoever raises it again."""

    def again(event: Any) -> Any:
        raise event.outcome.error

    outcome = await B().add_fallback(again).add_pipeline(isolated()).build().settle(ok)
    assert isinstance(outcome, Rejected)


@pytest.mark.anyio
async def test_the_last_refusal_of_a_retry_is_rejected() -> None:
    """What comes out of a retry that was refused to the end is the last refusal."""
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).add_pipeline(isolated()).build()
    outcome = await pipeline.settle(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.attempt_count == 3


@pytest.mark.anyio
async def test_an_inner_refusal_is_rejected_inside_hooks_and_predicates() -> None:
    """Inside hooks and predicates an inner refusal of this pipeline is shown as `settle` would."""
    seen: list[tuple[str, Any]] = []

    def predicate(event: OutcomeEvent) -> bool:
        seen.append(("should_handle", event.outcome))
        return True

    def hook(event: Any) -> None:
        seen.append(("hook", event.outcome))

    def generator(event: Any) -> None:
        seen.append(("generator", event.outcome))

    pipeline = (
        B()
        .add_fallback(fallback_value=1, on_fallback=hook)
        .add_retry(
            max_retry_attempts=1,
            delay=0,
            should_handle=predicate,
            on_retry=hook,
            delay_generator=generator,
        )
        .add_pipeline(isolated("db"))
        .build()
    )
    await pipeline.settle(ok)
    assert [place for place, _ in seen] == [
        "should_handle",
        "generator",
        "hook",
        "should_handle",
        "hook",
    ]
    assert all(isinstance(outcome, Rejected) for _, outcome in seen)


@pytest.mark.anyio
async def test_a_foreign_refusal_is_failure_inside_predicates() -> None:
    """A refusal that came out of the callback is a failure there too."""
    seen: list[Any] = []
    db = isolated("db")
    pipeline = B().add_retry(should_handle=lambda event: seen.append(event.outcome) or False)  # type: ignore[func-returns-value]
    await pipeline.build().settle(db.execute, ok)
    assert [type(outcome) for outcome in seen] == [Failure]


@pytest.mark.anyio
async def test_executions_at_once_do_not_take_each_others_rejections() -> None:
    """Each of many concurrent executions of one pipeline knows its own refusal."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).build()
    control.isolate()
    outcomes: list[Any] = []

    async def settle() -> None:
        outcomes.append(await pipeline.settle(ok))

    async with anyio.create_task_group() as tasks:
        for _ in range(10):
            tasks.start_soon(settle)
    assert all(isinstance(outcome, Rejected) for outcome in outcomes)
    assert len({id(outcome.error) for outcome in outcomes}) == 10


# ---- attempts -----------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pipeline", [EMPTY, B().add_timeout(60).add_circuit_breaker().build()], ids=["empty", "others"]
)
async def test_without_a_retry_there_is_one_record(pipeline: ResiliencePipeline[Any]) -> None:
    """Where neither retry nor hedging is, `attempts` has a single record, of the outcome itself."""
    good = await pipeline.settle(ok)
    assert good.attempt_count == 1
    (record,) = good.attempts
    assert record == Attempt(number=0, outcome=Success(1), duration=record.duration)
    bad = await pipeline.settle(boom)
    (record,) = bad.attempts
    assert record.outcome == bad
    assert (record.number, record.delay, record.hedged) == (0, 0, False)


@pytest.mark.anyio
async def test_a_refusal_without_a_retry_is_one_record() -> None:
    """So it is for a refusal."""
    outcome = await isolated().settle(ok)
    (record,) = outcome.attempts
    assert record.outcome == outcome
    assert isinstance(record.outcome, Rejected)


@pytest.mark.anyio
async def test_each_try_is_a_record_with_its_times() -> None:
    """Records are numbered from 0 and say outcome, duration, and the delay before the try."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_retry(delay=10, backoff_type="linear").build()
    number = 0

    async def call() -> int:
        nonlocal number
        number += 1
        await clock.sleep(number)
        if number < 3:
            raise BoomError(number)
        return number

    outcome = await pipeline.settle(call)
    assert outcome == Success(3)
    assert [record.number for record in outcome.attempts] == [0, 1, 2]
    assert [record.duration for record in outcome.attempts] == [1, 2, 3]
    assert [record.delay for record in outcome.attempts] == [0, 10, 20]
    assert [record.hedged for record in outcome.attempts] == [False] * 3
    assert [type(record.outcome) for record in outcome.attempts] == [Failure, Failure, Success]
    assert outcome.attempt_count == 3


@pytest.mark.anyio
async def test_records_show_refusals_as_rejected() -> None:
    """A try that was refused by a strategy inside the retry is `Rejected` in its record."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=0)
        .add_rate_limiter(TokenBucket(1, 1))
        .build()
    )
    await pipeline.execute(ok)
    outcome = await pipeline.settle(ok)
    assert outcome == Success(1)
    assert [type(record.outcome) for record in outcome.attempts] == [Rejected, Success]
    assert outcome.attempts[1].delay == 1


@pytest.mark.anyio
async def test_the_latest_64_are_kept_and_all_are_counted() -> None:
    """`attempts` keeps the latest 64; `attempt_count` is the true number."""
    pipeline = B().add_retry(max_retry_attempts=math.inf, delay=0).build()
    outcome = await pipeline.settle(Calls(*[BoomError(n) for n in range(99)], 1))
    assert outcome.attempt_count == 100
    assert [record.number for record in outcome.attempts] == list(range(36, 100))


@pytest.mark.anyio
async def test_of_nested_retries_the_inner_tries_are_recorded() -> None:
    """With nested retries: the inner tries of all outer attempts, in order, and counted the same."""
    pipeline = (
        B()
        .add_retry(max_retry_attempts=1, delay=0)
        .add_retry(max_retry_attempts=2, delay=0)
        .build()
    )
    outcome = await pipeline.settle(boom)
    assert [record.number for record in outcome.attempts] == [0, 1, 2, 0, 1, 2]
    assert outcome.attempt_count == 6


@pytest.mark.anyio
async def test_an_outer_try_that_never_reached_the_inner_retry_is_recorded() -> None:
    """Between two retries a limiter refuses: that try was the outer one's, and is noted as such."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=0)
        .add_rate_limiter(TokenBucket(1, 1))
        .add_retry(max_retry_attempts=1, delay=0)
        .build()
    )
    await pipeline.execute(ok)
    outcome = await pipeline.settle(Calls(BoomError(), 1))
    assert [type(record.outcome) for record in outcome.attempts] == [Rejected, Failure, Success]


@pytest.mark.anyio
async def test_a_call_refused_outside_of_the_retry_made_no_try() -> None:
    """A retry that was never reached made no attempt."""
    outcome = await B().add_pipeline(isolated()).add_retry(delay=0).build().settle(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.attempts == ()
    assert outcome.attempt_count == 0


@pytest.mark.anyio
async def test_a_replaced_outcome_keeps_the_history() -> None:
    """The tries of a retry are also told when a fallback replaced its outcome."""
    pipeline = B().add_fallback(fallback_value=9).add_retry(max_retry_attempts=1, delay=0).build()
    outcome = await pipeline.settle(boom)
    assert outcome == Success(9)
    assert [type(record.outcome) for record in outcome.attempts] == [Failure, Failure]


@pytest.mark.anyio
async def test_the_history_is_no_part_of_equality() -> None:
    """Outcomes of equal values are equal, however they came about."""
    retried = await B().add_retry(delay=0).build().settle(Calls(BoomError(), 1))
    assert retried == await EMPTY.settle(ok) == Success(1)
    assert hash(retried) == hash(Success(1))
    assert repr(retried) == "Success(value=1)"


@pytest.mark.anyio
async def test_records_are_frozen() -> None:
    """A record of the history cannot be changed."""
    (record,) = (await EMPTY.settle(ok)).attempts
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        record.number = 3  # type: ignore[misc]


@pytest.mark.anyio
async def test_histories_of_executions_at_once_stay_apart() -> None:
    """Each execution has the history of its own attempts."""
    pipeline = B().add_retry(max_retry_attempts=5, delay=0).build()
    counts: dict[int, int] = {}

    async def settle(number: int) -> None:
        outcome = await pipeline.settle(Calls(*[BoomError()] * number, 1))
        counts[number] = outcome.attempt_count

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(settle, number)
    assert counts == {number: number + 1 for number in range(5)}


@pytest.mark.anyio
async def test_unwrap_shows_the_way_of_the_error_once() -> None:
    """`unwrap()` of what `settle` gave raises the original error; its traceback does not grow."""
    outcome = await B().add_timeout(60).build().settle(boom)
    assert isinstance(outcome, Failure)
    depths = []
    for _ in range(3):
        with pytest.raises(BoomError) as caught:
            outcome.unwrap()
        assert caught.value is outcome.error
        depths.append(len(caught.traceback))
        assert caught.traceback[-1].name == "boom"
    assert len(set(depths)) == 1


@pytest.mark.anyio
async def test_a_time_out_unwraps_as_both_kinds_of_error() -> None:
    """What a timeout gave up on is a rejection and a builtin `TimeoutError`."""
    outcome = await B(clock=VirtualClock(autojump=True)).add_timeout(1).build().settle(hang)
    for kind in (TimeoutRejectedError, TimeoutError, ExecutionRejectedError):
        with pytest.raises(kind):
            outcome.unwrap()
