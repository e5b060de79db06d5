"""Retry: what it leaves behind: discarded results, cancellation, streams, user code that raises."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    Failure,
    MisuseError,
    OutcomeEvent,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    RetryEvent,
    Success,
    TimeoutRejectedError,
    handle,
    handle_inner,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import (
    Background,
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


# ---- results that are discarded -----------------------------------------------------------------


@pytest.mark.anyio
async def test_discarded_results_are_closed_and_the_returned_one_is_not() -> None:
    """RT-28: of six handled results the first five are closed, the one that comes out is open."""
    results = [Closable() for _ in range(6)]
    pipeline = B().add_retry(max_retry_attempts=5, delay=0, should_handle=always).build()
    assert await pipeline.execute(Scripted(*results)) is results[5]
    assert [result.closed for result in results] == [1, 1, 1, 1, 1, 0]


@pytest.mark.anyio
async def test_an_unhandled_result_is_returned_open() -> None:
    """RT-29: a result that nobody handles stays as it is."""
    result = Closable()
    pipeline = B().add_retry(delay=0, should_handle=handle_result(lambda value: False)).build()
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0


class _AwaitableClose:
    """Closed by a plain `close()` that returns an awaitable."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> Awaitable[None]:
        return self._close()

    async def _close(self) -> None:
        await checkpoint()
        self.closed += 1


class _BothCloses:
    """`aclose` is what counts; `close` would be the wrong one."""

    def __init__(self) -> None:
        self.closed = 0

    async def aclose(self) -> None:
        self.closed += 1

    def close(self) -> None:
        raise AssertionError("the synchronous twin was called")


class _NamesThatAreNoMethods:
    """Has `aclose` and `close` that can't be called: there is nothing to close."""

    aclose = None
    close = "see the manual"
    closed = 1


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        Closable,
        partial(Closable, "close"),
        _AwaitableClose,
        _BothCloses,
        _NamesThatAreNoMethods,
    ],
    ids=["aclose", "close", "awaitable close", "aclose first", "no methods"],
)
async def test_a_discarded_result_is_closed_by_the_method_it_has(make: Callable[[], Any]) -> None:
    """`aclose`, else `close`, what that returns awaited; case ST-09's rule for results."""
    result = make()
    pipeline = (
        B().add_retry(delay=0, should_handle=handle_result(lambda value: value is result)).build()
    )
    assert await pipeline.execute(Scripted(result, "good")) == "good"
    assert result.closed == 1


class _RaisesOnClose:
    async def aclose(self) -> None:
        raise OSError("already gone")


class _RaisesOnPlainClose:
    def close(self) -> None:
        raise OSError("already gone")


@pytest.mark.anyio
@pytest.mark.parametrize("make", [_RaisesOnClose, _RaisesOnPlainClose])
async def test_errors_of_closing_a_discarded_result_are_swallowed(make: Callable[[], Any]) -> None:
    """The retry goes on as if the closing had worked."""
    result = make()
    pipeline = (
        B().add_retry(delay=0, should_handle=handle_result(lambda value: value is result)).build()
    )
    assert await pipeline.execute(Scripted(result, "good")) == "good"


@pytest.mark.anyio
async def test_a_result_is_closed_before_the_wait_and_after_the_hook() -> None:
    """It stays open while predicate and hook look at it, and holds nothing during the wait."""
    clock = VirtualClock()
    result = Closable()
    seen: list[tuple[str, int]] = []

    def is_bad(value: object) -> bool:
        seen.append(("predicate", result.closed))
        return value is result

    def note(event: RetryEvent) -> None:
        seen.append(("hook", result.closed))

    pipeline = (
        B(clock=clock)
        .add_retry(delay=1, should_handle=handle_result(is_bad), on_retry=note)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Scripted(result, "good"))
        await clock.advance(0)
        assert seen == [("predicate", 0), ("hook", 0)]
        assert result.closed == 1
        await clock.advance(1)
        assert call.value == "good"


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["should_handle", "delay_generator", "on_retry"])
async def test_a_result_is_closed_when_user_code_raises_about_it(place: str) -> None:
    """Nobody will receive it, so it is closed; the user's error comes out."""
    result = Closable()

    def fail(event: object) -> Any:
        raise KeyError(place)

    options: dict[str, Any] = {"delay": 0, "should_handle": always, place: fail}
    error = await raised_by(B().add_retry(**options).build().execute, Scripted(result))
    assert type(error) is KeyError
    assert result.closed == 1


@pytest.mark.anyio
async def test_a_result_that_is_a_class_is_not_closed() -> None:
    """A class with a `close` of its instances is a value like any other."""

    class Resource:
        def close(self) -> None:
            raise AssertionError("called on the class")

    pipeline = B().add_retry(delay=0, should_handle=handle_result(lambda v: v is Resource)).build()
    assert await pipeline.execute(Scripted(Resource, 1)) == 1


# ---- cancellation -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_task_cancelled_before_its_first_turn_never_calls() -> None:
    """RT-30 on asyncio: the callback does not run and the outcome is the cancellation."""
    fn = Scripted(1)
    task = asyncio.create_task(B().add_retry(delay=0).build().execute(fn))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fn.calls == 0


#: A retry that is outermost, has its tries noted, or is inside of something.
WAYS = pytest.mark.parametrize(
    ("around", "how"),
    [
        pytest.param(lambda builder: builder, "execute", id="outermost"),
        pytest.param(lambda builder: builder, "settle", id="noted"),
        pytest.param(lambda builder: builder.add_concurrency_limiter(1), "execute", id="inside"),
    ],
)


@pytest.mark.anyio
@WAYS
async def test_in_a_cancelled_scope_nothing_is_repeated(
    around: Callable[[B[Any]], B[Any]], how: str
) -> None:
    """RT-30: the first checkpoint of the callback ends the call, and no second attempt is made."""
    calls = 0

    async def fn() -> None:
        nonlocal calls
        calls += 1
        await checkpoint()
        raise ConnectionError

    with anyio.CancelScope() as scope:
        scope.cancel()
        await getattr(around(B()).add_retry(delay=0).build(), how)(fn)
    assert scope.cancelled_caught
    assert calls == 1


@pytest.mark.anyio
async def test_an_unhandled_result_outlives_a_cancellation_during_its_call() -> None:
    """RT-31: what the callback returned is returned, though the caller has been cancelled meanwhile."""
    value = None
    with anyio.CancelScope() as scope:

        async def fn() -> int:
            scope.cancel()
            return 7

        value = await B().add_retry(delay=0).build().execute(fn)
    assert value == 7


@pytest.mark.anyio
@pytest.mark.parametrize("delay", [0, 5])
async def test_a_handled_result_during_a_cancelled_call_ends_in_the_cancellation(
    delay: int,
) -> None:
    """RT-32: `on_retry` is told, no second call is made, the cancellation comes out."""
    events: list[RetryEvent] = []
    calls = 0
    with anyio.CancelScope() as scope:

        async def fn() -> int:
            nonlocal calls
            calls += 1
            scope.cancel()
            return calls

        pipeline = B().add_retry(delay=delay, should_handle=always, on_retry=events.append).build()
        await pipeline.execute(fn)
    assert scope.cancelled_caught
    assert calls == 1
    assert len(events) == 1


@pytest.mark.anyio
async def test_a_hook_that_cancels_the_caller_ends_the_call() -> None:
    """RT-33: no second call, also at delay 0; the last failure is the cancellation's context."""
    fn = Scripted(ConnectionError("down"))
    caught: list[BaseException] = []
    with anyio.CancelScope() as scope:
        pipeline = B().add_retry(delay=0, on_retry=lambda event: scope.cancel()).build()
        try:
            await pipeline.execute(fn)
        except BaseException as error:
            caught.append(error)
            raise
    assert scope.cancelled_caught
    assert fn.calls == 1
    assert isinstance(caught[0].__context__, ConnectionError)


@pytest.mark.anyio
@WAYS
async def test_a_cancellation_during_the_wait_comes_out_at_once(
    around: Callable[[B[Any]], B[Any]], how: str
) -> None:
    """RT-34, seed RT-10: no second call; the failure waited about is the cancellation's context."""
    clock = VirtualClock()
    fn = Scripted(ConnectionError("down"))
    pipeline = around(B(clock=clock)).add_retry(delay=3600).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, getattr(pipeline, how), fn)
        await clock.advance(1)
        call.cancel()
        await tick()
        assert call.cancelled
    assert fn.calls == 1
    assert call.error is not None
    assert isinstance(call.error.__context__, ConnectionError)
    assert clock.pending == 0


@pytest.mark.anyio
async def test_a_cancellation_during_an_attempt_keeps_the_last_failure() -> None:
    """A cancelled second attempt carries the failure of the first as its context."""
    hang = Hanging()
    calls = 0

    async def fn() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ConnectionError("first")
        return await hang()

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, B().add_retry(delay=0).build().execute, fn)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert calls == 2
    assert call.error is not None
    assert isinstance(call.error.__context__, ConnectionError)
    assert str(call.error.__context__) == "first"


@pytest.mark.anyio
async def test_a_wait_for_ever_can_be_cancelled() -> None:
    """`delay=math.inf` waits until cancelled, with and without a clock of one's own."""
    for clock in (None, VirtualClock()):
        async with anyio.create_task_group() as tasks:
            pipeline = B(clock=clock).add_retry(delay=math.inf).build()
            call = spawn(tasks, pipeline.execute, Scripted(ConnectionError))
            await tick()
            assert not call.done
            call.cancel()
            await tick()
            assert call.cancelled


@pytest.mark.asyncio
async def test_a_plain_task_cancel_during_the_wait_keeps_the_failure() -> None:
    """RT-34 with asyncio's own cancellation: it comes out once, with the failure as its context."""
    fn = Scripted(ConnectionError("down"))
    task = asyncio.create_task(B().add_retry(delay=3600).build().execute(fn))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert fn.calls == 1
    assert isinstance(caught.value.__context__, ConnectionError)


@pytest.mark.asyncio
async def test_a_cancel_that_the_callback_turned_into_a_failure_was_delivered_already() -> None:
    """On asyncio a cancellation is delivered once: a callback that swallows it has had it."""
    calls = 0

    async def fn() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise ConnectionError from None
        return calls

    task = asyncio.create_task(B().add_retry(delay=0).build().execute(fn))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 2


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_what_is_no_exception_passes_untouched(kind: type[BaseException]) -> None:
    """No predicate is asked about a `BaseException` that is no `Exception`."""
    asked: list[OutcomeEvent] = []

    def note(event: OutcomeEvent) -> bool:
        asked.append(event)
        return True

    fn = Scripted(kind("stop"))
    with pytest.raises(kind):
        await B().add_retry(delay=0, should_handle=note).build().execute(fn)
    assert fn.calls == 1
    assert asked == []


# ---- streams ------------------------------------------------------------------------------------


class _Sources:
    """A stream's factory: each call plays the next script, an exception in it is raised."""

    def __init__(self, *scripts: tuple[Any, ...]) -> None:
        self._scripts = iter(scripts)
        self.made = 0
        self.closed = 0

    async def __call__(self) -> AsyncIterator[Any]:
        self.made += 1
        return self._source(next(self._scripts))

    async def _source(self, script: tuple[Any, ...]) -> AsyncIterator[Any]:
        try:
            for item in script:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


@pytest.mark.anyio
async def test_a_stream_that_fails_before_its_first_chunk_is_run_again() -> None:
    """Seed RT-12: two failures, then `a b`: the consumer sees `a b`, each failed source closed."""
    sources = _Sources((OSError(),), (OSError(),), ("a", "b"))
    async with B().add_retry(delay=0).build().execute_stream(sources) as stream:
        assert [chunk async for chunk in stream] == ["a", "b"]
    assert sources.made == sources.closed == 3


@pytest.mark.anyio
async def test_a_failed_source_is_closed_before_the_wait() -> None:
    """Case ST-17: nothing is left open while the next attempt is waited for."""
    clock = VirtualClock()
    sources = _Sources((OSError(),), ("a",))

    async def consume() -> list[Any]:
        async with B(clock=clock).add_retry(delay=9).build().execute_stream(sources) as stream:
            return [chunk async for chunk in stream]

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, consume)
        await clock.advance(1)
        assert sources.made == sources.closed == 1
        await clock.advance(8)
        assert call.value == ["a"]


@pytest.mark.anyio
async def test_after_the_first_chunk_a_failure_reaches_the_consumer() -> None:
    """Seed RT-13: the consumer keeps `a b` and gets the error; the source is made once."""
    error = OSError("mid-stream")
    sources = _Sources(("a", "b", error), ("never",))
    got: list[str] = []

    async def consume() -> None:
        async with B().add_retry(delay=0).build().execute_stream(sources) as stream:
            async for chunk in stream:
                got.append(chunk)

    assert await raised_by(consume) is error
    assert got == ["a", "b"]
    assert sources.made == sources.closed == 1


@pytest.mark.anyio
async def test_a_stream_closed_before_its_first_pull_asks_for_no_source() -> None:
    """Seed RT-20: nothing has run, so there is nothing to close."""
    sources = _Sources(("a",))
    stream = B().add_retry(delay=0).build().execute_stream(sources)
    await stream.aclose()
    assert sources.made == 0


@pytest.mark.anyio
async def test_an_empty_stream_is_a_success() -> None:
    """A source that ends without a chunk is not retried."""
    sources = _Sources((), ("never",))
    async with B().add_retry(delay=0).build().execute_stream(sources) as stream:
        assert [chunk async for chunk in stream] == []
    assert sources.made == 1


@pytest.mark.anyio
async def test_a_handled_first_chunk_is_retried_and_its_source_closed() -> None:
    """A stream's result is its first chunk: a handled one is dropped with its source."""
    sources = _Sources(("busy", 1), ("ready", 2))
    busy = handle_result(lambda chunk: chunk == "busy")
    pipeline = B().add_retry(delay=0, should_handle=busy).build()
    async with pipeline.execute_stream(sources) as stream:
        assert [chunk async for chunk in stream] == ["ready", 2]
    assert sources.made == sources.closed == 2


# ---- hooks and predicates -----------------------------------------------------------------------


@pytest.mark.anyio
async def test_hooks_may_be_coroutine_functions_or_return_awaitables() -> None:
    """A plain function that returns an awaitable counts as a coroutine function."""
    done: list[str] = []

    async def hook(event: RetryEvent) -> None:
        await checkpoint()
        done.append("coroutine function")

    async def note() -> None:
        await checkpoint()
        done.append("awaitable")

    def plain(event: RetryEvent) -> Awaitable[None]:
        return note()

    for each in (hook, plain):
        pipeline = B().add_retry(max_retry_attempts=1, delay=0, on_retry=each).build()
        await pipeline.settle(Scripted(ConnectionError))
    assert done == ["coroutine function", "awaitable"]


@pytest.mark.anyio
async def test_an_awaitable_verdict_is_awaited() -> None:
    """A coroutine is truthy; what it comes to is what counts."""

    async def never(event: OutcomeEvent) -> bool:
        await checkpoint()
        return False

    fn = Scripted(ConnectionError)
    await B().add_retry(delay=0, should_handle=never).build().settle(fn)
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_predicate_sees_context_number_and_outcome() -> None:
    """The outcome event of a `should_handle` function."""
    events: list[OutcomeEvent] = []

    def note(event: OutcomeEvent) -> bool:
        events.append(event)
        return event.attempt == 0

    context = ResilienceContext("key")
    error = ConnectionError("down")
    pipeline = B().add_retry(delay=0, should_handle=note).build()
    await pipeline.execute(Scripted(error, "ok"), context=context)
    assert [event.attempt for event in events] == [0, 1]
    assert [event.outcome for event in events] == [Failure(error), Success("ok")]
    assert all(event.context is context for event in events)


@pytest.mark.anyio
async def test_an_inner_refusal_is_shown_as_rejected() -> None:
    """Inside hooks and predicates a refusal of this pipeline is `Rejected`, another's is a failure."""
    seen: list[type] = []

    def note(event: RetryEvent) -> None:
        seen.append(type(event.outcome))

    foreign = TimeoutRejectedError("elsewhere")
    limits = iter([0, 5, 5])
    pipeline = (
        B()
        .add_retry(max_retry_attempts=2, delay=0, on_retry=note)
        .add_timeout(5, timeout_generator=lambda event: next(limits))
        .build()
    )
    await pipeline.execute(Scripted(foreign, "ok"))
    assert seen == [Rejected, Failure]


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["should_handle", "delay_generator", "on_retry"])
@pytest.mark.parametrize("as_coroutine", [False, True])
async def test_what_user_code_raises_comes_out_with_the_failure_as_context(
    place: str, as_coroutine: bool
) -> None:
    """Case LT-05, CW-05: it surfaces to the caller and stands in `settle`'s outcome."""

    def fail(event: object) -> Any:
        raise KeyError(place)

    async def fail_later(event: object) -> Any:
        await checkpoint()
        raise KeyError(place)

    options: dict[str, Any] = {"delay": 0, place: fail_later if as_coroutine else fail}
    pipeline = B().add_retry(**options).build()
    failure = ConnectionError("down")
    fn = Scripted(failure)
    error = await raised_by(pipeline.execute, fn)
    assert type(error) is KeyError
    assert error.__context__ is failure
    assert fn.calls == 1
    outcome = await pipeline.settle(Scripted(ConnectionError))
    assert isinstance(outcome, Failure)
    assert type(outcome.error) is KeyError
    assert isinstance(outcome.error.__context__, ConnectionError)


@pytest.mark.anyio
async def test_an_error_of_a_hook_keeps_the_context_it_has() -> None:
    """The failure goes to the end of the hook error's own chain."""

    def fail(event: RetryEvent) -> None:
        try:
            raise LookupError("inner")
        except LookupError:
            raise KeyError("outer")  # noqa: B904 - the implicit context is the point

    failure = ConnectionError("down")
    error = await raised_by(
        B().add_retry(delay=0, on_retry=fail).build().execute, Scripted(failure)
    )
    assert type(error) is KeyError
    assert isinstance(error.__context__, LookupError)
    assert error.__context__.__context__ is failure


@pytest.mark.anyio
async def test_a_hook_that_raises_the_failure_itself_makes_no_circle() -> None:
    """Re-raising what the event carries leaves that exception without itself as context."""

    def reraise(event: RetryEvent) -> None:
        event.outcome.unwrap()

    failure = ConnectionError("down")
    error = await raised_by(
        B().add_retry(delay=0, on_retry=reraise).build().execute, Scripted(failure)
    )
    assert error is failure
    assert error.__context__ is None


@pytest.mark.anyio
async def test_an_error_of_a_hook_is_an_ordinary_failure_further_out() -> None:
    """Small print: to what is outside its strategy it is a failure like any other."""

    def fail(event: RetryEvent) -> None:
        raise KeyError

    fn = Scripted(ConnectionError)
    pipeline = (
        B()
        .add_retry(max_retry_attempts=2, delay=0, should_handle=KeyError)
        .add_retry(delay=0, on_retry=fail)
        .build()
    )
    assert type(await raised_by(pipeline.execute, fn)) is KeyError
    assert fn.calls == 3


@pytest.mark.anyio
async def test_a_retry_serves_on_after_a_hook_has_raised() -> None:
    """Nothing of the failed call is left in the pipeline."""
    broken = True

    def hook(event: RetryEvent) -> None:
        if broken:
            raise KeyError

    pipeline = B().add_retry(delay=0, on_retry=hook).build()
    await raised_by(pipeline.execute, Scripted(ConnectionError))
    broken = False
    assert await pipeline.execute(Scripted(ConnectionError, ConnectionError, 1)) == 1


@pytest.mark.anyio
async def test_a_misuse_is_shown_to_no_predicate() -> None:
    """A callback that returns no awaitable is a mistake in the program: not retried."""
    asked: list[OutcomeEvent] = []
    calls = 0

    def not_async() -> int:
        nonlocal calls
        calls += 1
        return 3

    def note(event: OutcomeEvent) -> bool:
        asked.append(event)
        return True

    pipeline: Any = B().add_retry(delay=0, should_handle=note).build()
    assert isinstance(await raised_by(pipeline.execute, not_async), MisuseError)
    assert calls == 1
    assert asked == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("should_handle", "calls"),
    [
        (ConnectionError, 2),
        ((ValueError, ConnectionError), 2),
        ((ValueError, KeyError), 1),
        (handle(ValueError) | handle(ConnectionError), 2),
        (handle(ConnectionError, where=lambda error: "down" in str(error)), 2),
        (handle(ConnectionError, where=lambda error: "up" in str(error)), 1),
        (handle_inner(OSError), 2),
        (handle_result(lambda value: True), 1),
        (lambda event: isinstance(event.outcome.error, OSError), 2),
    ],
    ids=["type", "tuple", "other types", "or", "where", "not where", "inner", "result", "function"],
)
async def test_forms_of_should_handle(should_handle: Any, calls: int) -> None:
    """Each form that the contract names is taken, and means what it says."""
    fn = Scripted(ConnectionError("down"))
    pipeline = B().add_retry(max_retry_attempts=1, delay=0, should_handle=should_handle).build()
    await pipeline.settle(fn)
    assert fn.calls == calls


@pytest.mark.anyio
async def test_between_two_attempts_other_tasks_run() -> None:
    """Rule 10: a checkpoint between any two attempts, also at delay 0."""
    turns = 0
    seen: list[int] = []

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await checkpoint()

    async def fn() -> None:
        seen.append(turns)
        raise ConnectionError

    async with anyio.create_task_group() as tasks:
        background = Background(other)
        tasks.start_soon(background.run)
        await tick()
        await B().add_retry(max_retry_attempts=5, delay=0).build().settle(fn)
        background.cancel()
    # A round of the scheduler runs it once, before or after us: every second attempt sees a change.
    assert len(set(seen)) >= 3
