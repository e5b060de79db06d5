"""Retry: what it refuses to repeat: callbacks that are not idempotent, arguments that are used up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    ConcurrencyLimiterRejectedError,
    MisuseError,
    OutcomeEvent,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    RetryEvent,
    Success,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import (
    Closable,
    Hanging,
    Scripted,
    raised_by,
    spawn,
    tick,
)

B = ResiliencePipelineBuilder


def always(event: OutcomeEvent) -> bool:
    """Handle every outcome, results included."""
    return True


# ---- idempotent=False ---------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [ConnectionError, TimeoutError])
async def test_what_is_not_idempotent_is_not_repeated_once_invoked(kind: type[Exception]) -> None:
    """Whatever came out: a callback that ran is not run again."""
    fn = Scripted(kind("down"))
    events: list[RetryEvent] = []
    pipeline = B().add_retry(delay=0, on_retry=events.append).build()
    error = await raised_by(partial(pipeline.execute, fn, idempotent=False))
    assert isinstance(error, kind)
    assert fn.calls == 1
    assert events == []


@pytest.mark.anyio
async def test_a_handled_result_is_not_repeated_either() -> None:
    """`idempotent=False` with a result predicate: the first result comes out, and is not closed."""
    result = Closable()
    pipeline = B().add_retry(delay=0, should_handle=always).build()
    assert await pipeline.execute(Scripted(result), idempotent=False) is result
    assert result.closed == 0


@pytest.mark.anyio
async def test_a_call_refused_by_a_limiter_is_repeated() -> None:
    """A full limiter said no before the callback: the retry may try again."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_retry(delay=5).add_concurrency_limiter(1).build()
    first, second = Hanging(), Scripted("done")
    async with anyio.create_task_group() as tasks:
        holder = spawn(tasks, pipeline.execute, first)
        await tick()
        call = spawn(tasks, partial(pipeline.settle, second, idempotent=False))
        await clock.advance(1)
        assert second.calls == 0
        holder.cancel()
        await clock.advance(4)
        assert call.value == Success("done")
    assert second.calls == 1
    refused = call.value.attempts[0].outcome
    assert isinstance(refused, Rejected)
    assert isinstance(refused.error, ConcurrencyLimiterRejectedError)


@pytest.mark.anyio
async def test_a_call_that_timed_out_in_a_queue_is_repeated() -> None:
    """The limit passed while the call waited for its turn: the callback had not been invoked."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_retry(delay=0)
        .add_timeout(5)
        .add_concurrency_limiter(1, queue_limit=10)
        .build()
    )
    outside = B(clock=clock).add_pipeline(pipeline).build()
    second = Scripted("done")
    async with anyio.create_task_group() as tasks:
        holder = spawn(tasks, partial(pipeline.execute, Hanging(), idempotent=False))
        await tick()
        await clock.advance(1)
        call = spawn(tasks, partial(outside.settle, second, idempotent=False))
        await clock.advance(1)
        assert second.calls == 0
        await clock.advance(3)  # the holder's limit passes; the place goes to the waiting call
        assert isinstance(holder.error, TimeoutRejectedError)
        assert call.value == Success("done")
    assert second.calls == 1


@pytest.mark.anyio
async def test_a_queue_that_is_never_left_times_out_each_attempt() -> None:
    """Every attempt may be repeated as long as none reaches the callback, nested pipelines included."""
    clock = VirtualClock()
    limiter = B(clock=clock).add_concurrency_limiter(1, queue_limit=10).build()
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=0)
        .add_timeout(5)
        .add_pipeline(limiter)
        .build()
    )
    charge = Scripted("charged")
    async with anyio.create_task_group() as tasks:
        holder = spawn(tasks, limiter.execute, Hanging())
        await tick()
        call = spawn(tasks, partial(pipeline.settle, charge, idempotent=False))
        await clock.advance(15)
        assert isinstance(call.value, Rejected)
        assert call.value.attempt_count == 3
        holder.cancel()
    assert charge.calls == 0


@pytest.mark.anyio
async def test_a_callback_that_ran_inside_a_nested_pipeline_is_not_repeated() -> None:
    """Small print: "inside" includes nested pipelines."""
    inner = B().add_timeout(60).build()
    fn = Scripted(ConnectionError)
    pipeline = B().add_retry(delay=0).add_pipeline(inner).build()
    await pipeline.settle(fn, idempotent=False)
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_limit_used_up_before_the_start_is_repeated() -> None:
    """A time limit that has expired already did not start the callback."""
    limits = iter([0, -1, 5])
    fn = Scripted("done")
    pipeline = (
        B().add_retry(delay=0).add_timeout(5, timeout_generator=lambda event: next(limits)).build()
    )
    assert await pipeline.execute(fn, idempotent=False) == "done"
    assert fn.calls == 1


@pytest.mark.anyio
async def test_after_refusals_an_invoked_attempt_is_the_last() -> None:
    """Refused, refused, invoked and failed: that failure comes out."""
    limits = iter([0, 0, 5, 5])
    fn = Scripted(ConnectionError)
    pipeline = (
        B()
        .add_retry(max_retry_attempts=10, delay=0)
        .add_timeout(5, timeout_generator=lambda event: next(limits))
        .build()
    )
    outcome = await pipeline.settle(fn, idempotent=False)
    assert isinstance(outcome.error, ConnectionError)
    assert fn.calls == 1
    assert outcome.attempt_count == 3


@pytest.mark.anyio
async def test_the_contexts_own_idempotent_holds() -> None:
    """A context passed as `context=` decides, not the parameter."""
    fn = Scripted(ConnectionError)
    pipeline = B().add_retry(delay=0).build()
    await pipeline.settle(fn, context=ResilienceContext(idempotent=False))
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_wrapped_function_can_be_marked_not_idempotent() -> None:
    """`@pipeline.wrap(idempotent=False)` holds for each call."""
    calls = 0

    @B().add_retry(delay=0).build().wrap(idempotent=False)
    async def fn() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError

    assert isinstance(await raised_by(fn), ConnectionError)
    assert calls == 1


# ---- one-shot arguments -------------------------------------------------------------------------


def _generator() -> Iterator[int]:
    yield 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


async def _nothing() -> None:
    """Be a coroutine."""


def _coroutine() -> Coroutine[Any, Any, None]:
    return _nothing()


_ONE_SHOT = [_generator, _async_generator, _coroutine]


def _close(argument: Any) -> None:
    if hasattr(argument, "close"):
        argument.close()


@pytest.mark.anyio
@pytest.mark.parametrize("make", _ONE_SHOT)
async def test_a_one_shot_argument_is_refused_before_the_second_attempt(
    make: Callable[[], Any],
) -> None:
    """A generator, async generator or coroutine among `args`: `MisuseError` from the failure."""
    failure = ConnectionError("down")
    fn = Scripted(failure)
    events: list[RetryEvent] = []
    argument = make()
    pipeline = B().add_retry(delay=0, on_retry=events.append).build()
    error = await raised_by(pipeline.execute, fn, "fine", argument)
    assert type(error) is MisuseError
    assert error.__cause__ is failure
    assert repr(argument) in str(error)
    assert fn.calls == 1
    assert events == []  # looked at before `on_retry`
    _close(argument)


@pytest.mark.anyio
@pytest.mark.parametrize("make", _ONE_SHOT)
@pytest.mark.parametrize("shape", ["positional", "keyword", "nested"])
async def test_a_one_shot_argument_of_a_partial_is_refused(
    make: Callable[[], Any], shape: str
) -> None:
    """The arguments of `partial` objects, positional or by keyword, nested or not, count too."""
    calls = 0

    async def fn(*args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError

    argument = make()
    target: Callable[..., Any] = {
        "positional": partial(fn, argument),
        "keyword": partial(fn, body=argument),
        "nested": partial(partial(fn, body=argument), 1),
    }[shape]
    error = await raised_by(B().add_retry(delay=0).build().execute, target)
    assert type(error) is MisuseError
    assert isinstance(error.__cause__, ConnectionError)
    assert calls == 1
    _close(argument)


@pytest.mark.anyio
@pytest.mark.parametrize("make", _ONE_SHOT)
@pytest.mark.parametrize("by_keyword", [False, True])
async def test_a_one_shot_argument_of_a_wrapped_function_is_refused(
    make: Callable[[], Any], by_keyword: bool
) -> None:
    """`wrap` hands the arguments on, and they are looked at alike."""
    calls = 0

    @B().add_retry(delay=0).build().wrap
    async def fn(body: Any) -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError

    argument = make()
    error = await (raised_by(partial(fn, body=argument)) if by_keyword else raised_by(fn, argument))
    assert type(error) is MisuseError
    assert calls == 1
    _close(argument)


@pytest.mark.anyio
async def test_a_one_shot_argument_does_not_matter_to_a_first_success() -> None:
    """Only a second attempt would run on an exhausted argument."""
    argument = _generator()
    assert await B().add_retry(delay=0).build().execute(Scripted("ok"), argument) == "ok"


@pytest.mark.anyio
async def test_a_one_shot_argument_does_not_matter_where_nothing_is_retried() -> None:
    """Unhandled, last and not repeatable outcomes come out as they are."""
    for options, idempotent, script in (
        ({"should_handle": ValueError}, True, Scripted(ConnectionError)),
        ({}, False, Scripted(ConnectionError)),
        ({"max_elapsed": 0, "delay": 1}, True, Scripted(ConnectionError)),
    ):
        pipeline = B().add_retry(**options).build()
        outcome = await pipeline.settle(script, _generator(), idempotent=idempotent)
        assert isinstance(outcome.error, ConnectionError)


@pytest.mark.anyio
async def test_a_one_shot_argument_survives_attempts_that_never_started() -> None:
    """Small print: only if the callback was invoked; refusals leave the argument fresh."""
    limits = iter([0, 0, 5])
    pipeline = (
        B().add_retry(delay=0).add_timeout(5, timeout_generator=lambda event: next(limits)).build()
    )

    async def fn(numbers: Iterator[int]) -> list[int]:
        return list(numbers)

    assert await pipeline.execute(fn, _generator()) == [1]


@pytest.mark.anyio
async def test_a_one_shot_argument_after_a_handled_result() -> None:
    """The result that is not handed out is closed."""
    result = Closable()
    pipeline = B().add_retry(delay=0, should_handle=always).build()
    error = await raised_by(pipeline.execute, Scripted(result), _generator())
    assert type(error) is MisuseError
    assert result.closed == 1


@pytest.mark.anyio
async def test_what_can_be_read_again_is_no_one_shot_argument() -> None:
    """Lists, functions that make a generator, and generator functions are passed on each time."""
    arguments = ([1], range(3), _generator, _async_generator, _nothing, iter([1]))
    fn = Scripted(ConnectionError, "ok")
    assert await B().add_retry(delay=0).build().execute(fn, *arguments) == "ok"
    assert fn.arguments == [arguments, arguments]
