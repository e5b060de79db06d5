"""Fallback: what it replaces, with what, and what becomes of the original.

Rows `FB-nn` are those of the Polly dossier, `seed FB-n` those of the first seed's tests, `case FB-nn` those of the
collected cases.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError as FutureCancelledError
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    Failure,
    Fallback,
    FallbackEvent,
    MisuseError,
    OptionsError,
    OutcomeEvent,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    handle,
    handle_inner,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Closable, Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder

is_error = handle_result(lambda value: value == "error")


def never(event: FallbackEvent) -> Any:
    """Be an action or a hook that must not run."""
    raise AssertionError(f"called for {event.outcome}")


# ---- Polly --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_handled_result_is_replaced() -> None:
    """FB-01: the substitute is returned, the hook has run once."""
    events: list[FallbackEvent] = []
    pipeline = (
        B()
        .add_fallback(fallback_value="ok", should_handle=is_error, on_fallback=events.append)
        .build()
    )
    assert await pipeline.execute(Scripted("error")) == "ok"
    assert [event.outcome for event in events] == [Success("error")]


@pytest.mark.anyio
async def test_a_handled_exception_is_replaced() -> None:
    """FB-02: by a constant or by what the action gives."""
    fn = Scripted(ConnectionError)
    assert await B().add_fallback(fallback_value="ok").build().execute(fn) == "ok"
    assert await B().add_fallback(lambda event: "ok").build().execute(fn) == "ok"
    assert await B().add_fallback(fallback_action=lambda event: "ok").build().execute(fn) == "ok"


@pytest.mark.anyio
async def test_an_unhandled_exception_passes_untouched() -> None:
    """FB-03: the same object; neither hook nor action runs."""
    error = ValueError("fatal")
    pipeline = B().add_fallback(never, should_handle=ConnectionError, on_fallback=never).build()
    assert await raised_by(pipeline.execute, Scripted(error)) is error
    assert error.__context__ is None
    assert error.__cause__ is None


@pytest.mark.anyio
async def test_an_unhandled_result_passes_untouched() -> None:
    """FB-04: the same object, open; neither hook nor action runs."""
    result = Closable()
    pipeline = B().add_fallback(never, should_handle=is_error, on_fallback=never).build()
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0


@pytest.mark.anyio
@pytest.mark.parametrize("as_coroutine", [False, True])
async def test_what_the_action_raises_is_the_outcome(as_coroutine: bool) -> None:
    """FB-05, seed FB-1: its exception comes out, the original is its `__context__`; no second fallback."""
    calls = 0

    def fail(event: FallbackEvent) -> None:
        nonlocal calls
        calls += 1
        raise KeyError("substitute")

    async def fail_later(event: FallbackEvent) -> None:
        await checkpoint()
        fail(event)

    original = ConnectionError("original")
    pipeline = B().add_fallback(fail_later if as_coroutine else fail).build()
    error = await raised_by(pipeline.execute, Scripted(original))
    assert type(error) is KeyError
    assert error.__context__ is original
    assert calls == 1
    assert isinstance(await pipeline.settle(Scripted(ConnectionError)), Failure)


@pytest.mark.anyio
async def test_an_action_may_raise_from_the_original() -> None:
    """FB-05: an explicit cause is kept, and the original is still the context."""
    original = ConnectionError("original")

    def translate(event: FallbackEvent) -> None:
        raise LookupError("nothing cached") from event.outcome.error

    error = await raised_by(B().add_fallback(translate).build().execute, Scripted(original))
    assert type(error) is LookupError
    assert error.__cause__ is original
    assert error.__context__ is original


@pytest.mark.anyio
async def test_an_action_may_raise_the_original_itself() -> None:
    """FB-05: it comes out as it was, without itself in its chain."""
    original = ConnectionError("original")
    pipeline = B().add_fallback(lambda event: event.outcome.unwrap()).build()
    error = await raised_by(pipeline.execute, Scripted(original))
    assert error is original
    assert error.__context__ is None


@pytest.mark.anyio
async def test_the_substitutes_error_is_not_replaced_again() -> None:
    """FB-05: the fallback around it may, the same one does not."""

    def fail(event: FallbackEvent) -> None:
        raise KeyError("substitute")

    pipeline = B().add_fallback(fallback_value="outer").add_fallback(fail).build()
    assert await pipeline.execute(Scripted(ConnectionError)) == "outer"


@pytest.mark.anyio
async def test_predicate_and_action_get_the_original_and_the_context() -> None:
    """FB-06: both see one outcome and one context; the action only when the predicate says yes."""
    asked: list[OutcomeEvent] = []
    acted: list[FallbackEvent] = []
    error = ConnectionError("down")
    context = ResilienceContext("key")

    def should_handle(event: OutcomeEvent) -> bool:
        asked.append(event)
        return isinstance(event.outcome.error, ConnectionError)

    def action(event: FallbackEvent) -> str:
        acted.append(event)
        return "substitute"

    pipeline = B().add_fallback(action, should_handle=should_handle).build()
    assert await pipeline.execute(Scripted(error), context=context) == "substitute"
    assert await pipeline.execute(Scripted("fine"), context=context) == "fine"
    assert [event.outcome for event in asked] == [Failure(error), Success("fine")]
    assert [event.outcome for event in acted] == [Failure(error)]
    assert all(event.context is context for event in asked)
    assert all(event.context is context for event in acted)


@pytest.mark.parametrize(
    "options",
    [{}, {"fallback_action": None}, {"on_fallback": never}, {"should_handle": ValueError}],
    ids=str,
)
def test_without_a_substitute_it_is_refused(options: dict[str, Any]) -> None:
    """FB-07, case FB-03: neither an action nor a value is an error that names both."""
    for make in (Fallback, B().add_fallback):
        with pytest.raises(OptionsError) as caught:
            make(**options)
        assert "fallback_action" in str(caught.value)
        assert "fallback_value" in str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("item", "replaced"),
    [
        (ConnectionError, True),
        (ValueError, True),
        (TimeoutError, True),
        (BrokenCircuitError("elsewhere"), True),
        (MisuseError("wrong"), False),
        (FutureCancelledError, False),
        (asyncio.CancelledError, False),
        (KeyboardInterrupt, False),
        (SystemExit, False),
        (GeneratorExit, False),
        (None, False),
    ],
    ids=repr,
)
async def test_the_default_predicate(item: Any, replaced: bool) -> None:
    """FB-08: every `Exception` but misuse and cancelled futures is replaced, cancellation never."""
    pipeline = B().add_fallback(fallback_value="substitute").build()
    came_out: object
    try:
        came_out = await pipeline.execute(Scripted(item))
    except BaseException as error:
        came_out = error
    if replaced:
        assert came_out == "substitute"
    else:
        assert came_out is item or type(came_out) is item


# ---- seed ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_success_needs_no_fallback() -> None:
    """Seed FB-1: the primary's value, the substitute never asked for."""
    fn = Scripted("primary")
    pipeline = B().add_fallback(never, on_fallback=never).build()
    assert await pipeline.execute(fn, 1, 2) == "primary"
    assert fn.arguments == [(1, 2)]
    assert fn.calls == 1


@pytest.mark.anyio
async def test_chained_fallbacks_are_asked_once_each() -> None:
    """Seed FB-5: the inner one fails, the outer one replaces what came out of it."""
    order: list[str] = []

    def inner(event: FallbackEvent) -> None:
        order.append(f"inner for {event.outcome.error}")
        raise LookupError("inner")

    def outer(event: FallbackEvent) -> str:
        order.append(f"outer for {event.outcome.error}")
        return "outer"

    pipeline = B().add_fallback(outer).add_fallback(inner).build()
    assert await pipeline.execute(Scripted(ConnectionError("primary"))) == "outer"
    assert order == ["inner for primary", "outer for inner"]


# ---- the collected cases ------------------------------------------------------------------------


@pytest.mark.anyio
async def test_case_fb_01_a_cancel_is_not_answered() -> None:
    """Case FB-01: the cancelled call ends in the cancellation, predicate and hook unasked."""
    asked: list[object] = []

    def note(event: OutcomeEvent) -> bool:
        asked.append(event)
        return True

    pipeline = (
        B()
        .add_fallback(fallback_value="cached", should_handle=note, on_fallback=asked.append)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert asked == []


@pytest.mark.asyncio
async def test_case_fb_01_a_plain_task_cancel_is_not_answered() -> None:
    """Case FB-01 with asyncio's own cancellation."""
    pipeline = B().add_fallback(fallback_value=9).build()
    task = asyncio.create_task(pipeline.execute(Hanging()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert task.cancelled()


@pytest.mark.anyio
async def test_case_fb_01_an_interrupt_is_not_answered() -> None:
    """Case FB-01: `KeyboardInterrupt` comes out, through `execute` and through `settle`."""
    pipeline = B().add_fallback(fallback_value="cached").build()
    fn = Scripted(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        await pipeline.execute(fn)
    with pytest.raises(KeyboardInterrupt):
        await pipeline.settle(fn)


@pytest.mark.anyio
@pytest.mark.parametrize("value", [None, 0, "", [], False, math.nan, {}, b""], ids=repr)
async def test_case_fb_03_an_empty_result_is_a_result(value: Any) -> None:
    """Case FB-03, seed FB-3: absence is told by a sentinel, never by truth."""
    assert await B().add_fallback(fallback_value=9).build().execute(Scripted(value)) is value


@pytest.mark.anyio
@pytest.mark.parametrize("value", [None, 0, "", [], False], ids=repr)
async def test_case_fb_03_an_empty_substitute_is_a_substitute(value: Any) -> None:
    """Case FB-03: `fallback_value=None` replaces the error by `None`; an action may give it too."""
    for pipeline in (
        B().add_fallback(fallback_value=value).build(),
        B().add_fallback(lambda event: value).build(),
    ):
        assert await pipeline.execute(Scripted(ConnectionError)) is value
        assert await pipeline.settle(Scripted(ConnectionError)) == Success(value)


# ---- streams ------------------------------------------------------------------------------------


class _Source:
    """A factory of one stream; an exception in the script is raised, `None` instead of one hangs."""

    def __init__(self, *script: Any) -> None:
        self._script = script
        self.opened = 0
        self.closed = 0

    async def __call__(self) -> AsyncIterator[Any]:
        return self.iterate()

    async def iterate(self) -> AsyncIterator[Any]:
        self.opened += 1
        try:
            for item in self._script:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed += 1


async def drain(pipeline: Any, factory: Callable[[], Any]) -> list[Any]:
    """Read a guarded stream to its end."""
    async with pipeline.execute_stream(factory) as stream:
        return [chunk async for chunk in stream]


@pytest.mark.anyio
async def test_case_fb_05_a_stream_that_opens_and_then_fails_is_replaced() -> None:
    """Case FB-05: the first read is protected too; the failed source is closed before the substitute."""
    first = _Source(OSError("overloaded"))
    backup = _Source("b1", "b2")
    closed_before: list[int] = []

    def action(event: FallbackEvent) -> AsyncIterator[Any]:
        closed_before.append(first.closed)
        return backup.iterate()

    assert await drain(B().add_fallback(action).build(), first) == ["b1", "b2"]
    assert closed_before == [1]
    assert backup.opened == backup.closed == 1


@pytest.mark.anyio
async def test_a_failed_connect_is_replaced() -> None:
    """Whatever fails before the first chunk: the connect, too."""
    pipeline = B().add_fallback(lambda event: _Source("b").iterate()).build()
    assert await drain(pipeline, Scripted(ConnectionError)) == ["b"]


@pytest.mark.anyio
@pytest.mark.parametrize("value", ["cached", None, 0, ["a", "b"]], ids=repr)
async def test_in_a_stream_a_value_becomes_one_chunk(value: Any) -> None:
    """A constant or an action's value is the only chunk; a list is one chunk, too."""
    failing = partial(_Source, OSError("down"))
    assert await drain(B().add_fallback(fallback_value=value).build(), failing()) == [value]
    assert await drain(B().add_fallback(lambda event: value).build(), failing()) == [value]


@pytest.mark.anyio
async def test_in_a_stream_an_async_iterable_is_iterated_and_closed() -> None:
    """Given as a constant, by an action, by a coroutine function, or inside a context manager."""
    left: list[str] = []

    @asynccontextmanager
    async def managed() -> AsyncIterator[AsyncIterator[Any]]:
        try:
            yield _Source("b1", "b2").iterate()
        finally:
            left.append("left")

    async def action(event: FallbackEvent) -> AsyncIterator[Any]:
        await checkpoint()
        return _Source("b1", "b2").iterate()

    for pipeline in (
        B().add_fallback(fallback_value=_Source("b1", "b2").iterate()).build(),
        B().add_fallback(lambda event: _Source("b1", "b2").iterate()).build(),
        B().add_fallback(action).build(),
        B().add_fallback(lambda event: managed()).build(),
    ):
        assert await drain(pipeline, _Source(OSError("down"))) == ["b1", "b2"]
    assert left == ["left"]


@pytest.mark.anyio
async def test_a_stream_that_fails_after_its_first_chunk_is_not_replaced() -> None:
    """Seed FB-4: the consumer keeps the prefix and gets the primary's error."""
    error = OSError("mid-stream")
    source = _Source("a", "b", error)
    got: list[Any] = []

    async def consume() -> None:
        pipeline = B().add_fallback(never, on_fallback=never).build()
        async with pipeline.execute_stream(source) as stream:
            async for chunk in stream:
                got.append(chunk)

    assert await raised_by(consume) is error
    assert got == ["a", "b"]
    assert source.closed == 1


@pytest.mark.anyio
async def test_the_active_source_is_closed_when_the_consumer_leaves() -> None:
    """Seed FB-5: of chained sources the one that was being read is closed on the way out."""
    backup = _Source("b1", "b2")
    pipeline = B().add_fallback(lambda event: backup.iterate()).build()
    async with pipeline.execute_stream(_Source(OSError("down"))) as stream:
        async for chunk in stream:
            assert chunk == "b1"
            break
    assert backup.closed == 1


@pytest.mark.anyio
async def test_a_substitute_stream_that_fails_before_its_first_chunk_is_the_outcome() -> None:
    """It is primed like any other: what is outside the fallback sees its failure."""
    backup = _Source(LookupError("backup"))
    inner = B().add_fallback(lambda event: backup.iterate())
    original = OSError("down")
    error = await raised_by(drain, inner.build(), _Source(original))
    assert type(error) is LookupError
    assert error.__context__ is original
    assert backup.closed == 1
    outer = (
        B()
        .add_fallback(fallback_value="last resort")
        .add_fallback(lambda event: _Source(LookupError("backup")).iterate())
    )
    assert await drain(outer.build(), _Source(OSError("down"))) == ["last resort"]


@pytest.mark.anyio
async def test_an_empty_stream_is_not_replaced() -> None:
    """A source that ends without a chunk is a success."""
    assert await drain(B().add_fallback(never).build(), _Source()) == []


@pytest.mark.anyio
async def test_a_handled_first_chunk_is_replaced_and_its_source_closed() -> None:
    """A stream's result is its first chunk."""
    source = _Source("error", "more")
    pipeline = B().add_fallback(fallback_value="ok", should_handle=is_error).build()
    assert await drain(pipeline, source) == ["ok"]
    assert source.closed == 1


# ---- results that are replaced ------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["aclose", "close"])
async def test_a_replaced_result_is_closed_after_the_action(method: str) -> None:
    """It stays open while predicate, hook and action look at it, and no longer."""
    result = Closable(method)
    seen: list[tuple[str, int]] = []

    def note(place: str, answer: Any) -> Callable[[object], Any]:
        def call(event: object) -> Any:
            seen.append((place, result.closed))
            return answer

        return call

    pipeline = (
        B()
        .add_fallback(
            note("action", "substitute"),
            should_handle=note("predicate", True),
            on_fallback=note("hook", None),
        )
        .build()
    )
    assert await pipeline.execute(Scripted(result)) == "substitute"
    assert seen == [("predicate", 0), ("hook", 0), ("action", 0)]
    assert result.closed == 1


@pytest.mark.anyio
async def test_a_handled_result_that_the_action_returns_is_not_closed() -> None:
    """Small print: one that is returned after all stays open."""
    result = Closable()
    pipeline = (
        B()
        .add_fallback(lambda event: event.outcome.unwrap(), should_handle=lambda event: True)
        .build()
    )
    assert await pipeline.execute(Scripted(result)) is result
    assert result.closed == 0


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["should_handle", "on_fallback", "fallback_action"])
async def test_a_result_is_closed_when_user_code_raises_about_it(place: str) -> None:
    """Nobody will receive it; the user's error comes out."""
    result = Closable()

    def fail(event: object) -> Any:
        raise KeyError(place)

    options: dict[str, Any] = {
        "fallback_action": lambda event: "substitute",
        "should_handle": lambda event: True,
    } | {place: fail}
    error = await raised_by(B().add_fallback(**options).build().execute, Scripted(result))
    assert type(error) is KeyError
    assert result.closed == 1


class _RaisesOnClose:
    def close(self) -> None:
        raise OSError("already gone")


@pytest.mark.anyio
async def test_errors_of_closing_a_replaced_result_are_swallowed() -> None:
    """The substitute comes out as if the closing had worked."""
    pipeline = B().add_fallback(fallback_value=1, should_handle=lambda event: True).build()
    assert await pipeline.execute(Scripted(_RaisesOnClose())) == 1


# ---- hooks and actions --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_hook_runs_before_the_action_with_the_same_event() -> None:
    """Handled: event, then `on_fallback`, then the action."""
    order: list[tuple[str, FallbackEvent]] = []

    async def hook(event: FallbackEvent) -> None:
        await checkpoint()
        order.append(("hook", event))

    def action(event: FallbackEvent) -> int:
        order.append(("action", event))
        return 1

    await B().add_fallback(action, on_fallback=hook).build().execute(Scripted(ConnectionError))
    assert [place for place, _ in order] == ["hook", "action"]
    assert order[0][1] is order[1][1]


@pytest.mark.anyio
async def test_an_action_may_give_an_awaitable_in_any_way() -> None:
    """A coroutine function, a plain function that returns an awaitable, an object with async call."""

    async def action(event: FallbackEvent) -> str:
        await checkpoint()
        return "substitute"

    def plain(event: FallbackEvent) -> Awaitable[str]:
        return action(event)

    class Cache:
        async def __call__(self, event: FallbackEvent) -> str:
            return await action(event)

        async def look_up(self, event: FallbackEvent) -> str:
            return await action(event)

    for each in (action, plain, Cache(), Cache().look_up, partial(action)):
        pipeline = B().add_fallback(each).build()
        assert await pipeline.execute(Scripted(ConnectionError)) == "substitute"


@pytest.mark.anyio
async def test_a_callable_constant_is_a_constant() -> None:
    """`fallback_value` is given as it is, even if it could be called."""
    pipeline = B().add_fallback(fallback_value=never).build()
    assert await pipeline.execute(Scripted(ConnectionError)) is never


@pytest.mark.anyio
async def test_an_error_of_the_hook_surfaces_and_the_action_does_not_run() -> None:
    """It comes out with the original as its `__context__`, and in `settle`'s outcome."""

    def fail(event: FallbackEvent) -> None:
        raise KeyError("hook")

    original = ConnectionError("original")
    pipeline = B().add_fallback(never, on_fallback=fail).build()
    error = await raised_by(pipeline.execute, Scripted(original))
    assert type(error) is KeyError
    assert error.__context__ is original
    outcome = await pipeline.settle(Scripted(ConnectionError))
    assert isinstance(outcome, Failure)
    assert type(outcome.error) is KeyError


@pytest.mark.anyio
async def test_an_error_of_the_predicate_surfaces_with_the_original_as_context() -> None:
    """Neither hook nor action runs."""

    def fail(event: OutcomeEvent) -> bool:
        raise KeyError("predicate")

    original = ConnectionError("original")
    pipeline = B().add_fallback(never, should_handle=fail, on_fallback=never).build()
    error = await raised_by(pipeline.execute, Scripted(original))
    assert type(error) is KeyError
    assert error.__context__ is original


@pytest.mark.anyio
@pytest.mark.parametrize("place", ["on_fallback", "fallback_action"])
async def test_a_cancellation_in_user_code_comes_out_with_the_original(place: str) -> None:
    """The caller's order to stop is not answered; the original is its context."""

    async def hang(event: FallbackEvent) -> None:
        await anyio.sleep_forever()

    options: dict[str, Any] = {"fallback_action": never} | {place: hang}
    original = ConnectionError("original")
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, B().add_fallback(**options).build().execute, Scripted(original))
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert call.error is not None
    assert call.error.__context__ is original


@pytest.mark.anyio
async def test_an_awaitable_verdict_is_awaited() -> None:
    """A coroutine is truthy; what it comes to is what counts."""

    async def no(event: OutcomeEvent) -> bool:
        await checkpoint()
        return False

    pipeline = B().add_fallback(never, should_handle=no).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted(ConnectionError)), ConnectionError)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("should_handle", "replaced"),
    [
        (ConnectionError, True),
        ((ValueError, ConnectionError), True),
        ((ValueError, KeyError), False),
        (handle(ValueError) | handle(ConnectionError), True),
        (handle(ConnectionError, where=lambda error: "up" in str(error)), False),
        (handle_inner(OSError), True),
        (handle_result(lambda value: True), False),
        (handle_result(lambda value: True) | handle(OSError), True),
        (lambda event: isinstance(event.outcome.error, OSError), True),
    ],
    ids=["type", "tuple", "others", "or", "where", "inner", "result", "mixed", "function"],
)
async def test_forms_of_should_handle(should_handle: Any, replaced: bool) -> None:
    """Each form that the contract names is taken, and means what it says."""
    pipeline = B().add_fallback(fallback_value=1, should_handle=should_handle).build()
    outcome = await pipeline.settle(Scripted(ConnectionError("down")))
    assert outcome.ok is replaced


@pytest.mark.anyio
async def test_a_misuse_is_not_replaced() -> None:
    """Case CW-03: a mistake in the program is shown to no predicate."""
    asked: list[OutcomeEvent] = []

    def note(event: OutcomeEvent) -> bool:
        asked.append(event)
        return True

    def not_async() -> int:
        return 3

    pipeline: Any = B().add_fallback(fallback_value=9, should_handle=note).build()
    assert isinstance(await raised_by(pipeline.execute, not_async), MisuseError)
    assert asked == []


@pytest.mark.anyio
async def test_one_fallback_serves_calls_of_several_types() -> None:
    """The substitute may depend on what was called."""
    key = PropertyKey[str]("substitute")
    pipeline = B().add_fallback(lambda event: event.context.properties.get(key)).build()
    for substitute in ("a", "b"):
        context = ResilienceContext(properties={key: substitute})
        assert await pipeline.execute(Scripted(ConnectionError), context=context) == substitute


# ---- with other strategies ----------------------------------------------------------------------


@pytest.mark.anyio
async def test_around_a_retry_only_the_last_outcome_is_replaced() -> None:
    """The usual order: four attempts, then one substitute."""
    fn = Scripted(ConnectionError)
    events: list[FallbackEvent] = []
    pipeline = (
        B().add_fallback(fallback_value=1, on_fallback=events.append).add_retry(delay=0).build()
    )
    assert await pipeline.execute(fn) == 1
    assert fn.calls == 4
    assert len(events) == 1


@pytest.mark.anyio
async def test_inside_a_retry_each_attempt_is_replaced() -> None:
    """The other order: the retry sees a success and repeats nothing."""
    fn = Scripted(ConnectionError)
    assert await B().add_retry(delay=0).add_fallback(fallback_value=1).build().execute(fn) == 1
    assert fn.calls == 1


@pytest.mark.anyio
async def test_a_refusal_of_this_pipeline_is_shown_as_rejected() -> None:
    """The action can tell a time-out of ours from an error of the callback."""
    clock = VirtualClock(autojump=True)
    seen: list[type] = []

    def action(event: FallbackEvent) -> int:
        seen.append(type(event.outcome))
        return 1

    pipeline = B(clock=clock).add_fallback(action).add_timeout(5).build()
    assert await pipeline.execute(Hanging()) == 1
    assert await pipeline.execute(Scripted(TimeoutRejectedError("of another pipeline"))) == 1
    assert seen == [Rejected, Failure]


@pytest.mark.anyio
async def test_a_replaced_call_is_a_success_to_settle() -> None:
    """The outcome is the substitute; the attempts still tell what happened."""
    error = ConnectionError("down")
    pipeline = B().add_fallback(fallback_value=1).add_retry(max_retry_attempts=1, delay=0).build()
    outcome = await pipeline.settle(Scripted(error))
    assert outcome == Success(1)
    assert [attempt.outcome for attempt in outcome.attempts] == [Failure(error), Failure(error)]


# ---- options ------------------------------------------------------------------------------------


def test_defaults() -> None:
    """An action or a value, the default predicate, no hook, named after its class."""
    fallback = Fallback(fallback_value=1)
    assert fallback.fallback_value == 1
    assert fallback.fallback_action is None
    assert fallback.on_fallback is None
    assert fallback.name == "Fallback"
    assert Fallback(never).fallback_action is never


def test_both_substitutes_are_refused() -> None:
    """Exactly one of the two; a value of `None` counts as given."""
    for value in (1, None):
        with pytest.raises(OptionsError, match="both") as caught:
            Fallback(never, fallback_value=value)
        assert "fallback_action" in str(caught.value)
        assert "fallback_value" in str(caught.value)


_BAD: list[tuple[str, Any]] = [
    *(("fallback_action", value) for value in [3, "value", [1]]),
    *(
        ("should_handle", value)
        for value in [
            None,
            3,
            "ConnectionError",
            (),
            (ConnectionError, 3),
            [ConnectionError],
            BaseException,
            asyncio.CancelledError,
            (ConnectionError, KeyboardInterrupt),
            int,
        ]
    ),
    *(("on_fallback", value) for value in [3, "hook"]),
    *(("name", value) for value in [3, b"x"]),
]


@pytest.mark.parametrize(("option", "value"), _BAD, ids=lambda value: repr(value)[:40])
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """An `OptionsError` names the option and shows the value."""
    options: dict[str, Any] = {option: value}
    if option != "fallback_action":
        options["fallback_value"] = 1
    with pytest.raises(OptionsError) as caught:
        Fallback(**options)
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{option} ")
    assert repr(value) in str(caught.value)


def test_every_bad_option_at_once() -> None:
    """One error lists all four."""
    options: dict[str, Any] = {
        "fallback_action": 3,
        "should_handle": 3,
        "on_fallback": 3,
        "name": 3,
    }
    with pytest.raises(OptionsError) as caught:
        Fallback(**options)
    for option in options:
        assert option in str(caught.value)
    assert len(caught.value.problems) == 4


def test_a_missing_substitute_is_reported_with_the_bad_options() -> None:
    """*Every* bad field is listed: a missing substitute is one of them."""
    options: dict[str, Any] = {"should_handle": 3, "on_fallback": 3}
    with pytest.raises(OptionsError) as caught:
        Fallback(**options)
    for option in (*options, "fallback_action", "fallback_value"):
        assert option in str(caught.value)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("fallback_valu", "fallback_value"),
        ("fallbackaction", "fallback_action"),
        ("on_fall_back", "on_fallback"),
        ("should_handel", "should_handle"),
    ],
)
def test_a_misspelt_option_is_a_type_error_that_suggests(misspelt: str, meant: str) -> None:
    """Small print: on the class and on the builder alike."""
    options: dict[str, Any] = {misspelt: 1}
    for make in (Fallback, B().add_fallback):
        with pytest.raises(TypeError, match=f"{misspelt!r}.*{meant!r}"):
            make(**options)


def test_only_the_action_is_positional() -> None:
    """Everything else stands behind the `*`."""
    make: Any = Fallback
    with pytest.raises(TypeError):
        make(None, 1)


async def _nothing() -> None:
    """Be a coroutine."""


@pytest.mark.parametrize("option", ["fallback_action", "on_fallback", "should_handle"])
def test_a_coroutine_where_its_function_belongs_is_a_misuse(option: str) -> None:
    """Small print: `fallback_action=load()` is a `MisuseError`, and the coroutine is closed."""
    options: dict[str, Any] = {option: _nothing()}
    if option != "fallback_action":
        options["fallback_value"] = 1
    with pytest.raises(MisuseError, match=option):
        Fallback(**options)


def test_the_builder_takes_the_same_options() -> None:
    """`add_fallback(...)` is `add(Fallback(...))`, and returns the builder."""
    builder = B()
    assert builder.add_fallback(never, name="cached") is builder
    (fallback,) = builder.build().strategies
    assert isinstance(fallback, Fallback)
    assert (fallback.fallback_action, fallback.name) == (never, "cached")


def test_options_are_immutable() -> None:
    """What was checked stays as it was."""
    fallback: Any = Fallback(fallback_value=1)
    with pytest.raises(AttributeError):
        fallback.fallback_value = 2


def test_repr_reads_like_a_call() -> None:
    """Only what was given is shown."""
    assert "fallback_value='cached'" in repr(Fallback(fallback_value="cached"))
    assert "fallback_value=None" in repr(Fallback(fallback_value=None))
