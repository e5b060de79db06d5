"""What counts as failure: the forms of `should_handle`, how they are joined, and the one gate."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreaker,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    Failure,
    Fallback,
    MisuseError,
    OptionsError,
    OutcomeEvent,
    Predicate,
    Rejected,
    ResilienceContext,
    Retry,
    Success,
    TimeoutRejectedError,
    handle,
    handle_inner,
    handle_result,
)
from support.calls import B, Calls, hang, ok, running

HANDLED = object()


async def handled(should_handle: Any, outcome: object) -> bool:
    """Whether a fallback replaces what the callback returns or, if it is an exception, raises."""
    pipeline = B().add_fallback(fallback_value=HANDLED, should_handle=should_handle).build()
    try:
        return await pipeline.execute(Calls(outcome)) is HANDLED
    except Exception as error:
        if error is outcome:
            return False
        raise


# ---- the forms ----------------------------------------------------------------------------------


class SpecialError(ConnectionError):
    pass


def is_bad(result: object) -> bool:
    return result == "bad"


async def is_bad_async(result: object) -> bool:
    await checkpoint()
    return is_bad(result)


def of_event(event: OutcomeEvent) -> bool:
    return isinstance(event.outcome.error, LookupError) or event.outcome == Success("bad")


async def of_event_async(event: OutcomeEvent) -> bool:
    await checkpoint()
    return of_event(event)


def of_event_returning_awaitable(event: OutcomeEvent) -> Any:
    return of_event_async(event)


CONNECTION, SPECIAL, LOOKUP = ConnectionError("c"), SpecialError("s"), LookupError("l")

FORMS: list[Any] = [
    pytest.param(ConnectionError, [CONNECTION, SPECIAL], [LOOKUP, "bad", None], id="type"),
    pytest.param(
        (ConnectionError, LookupError),
        [CONNECTION, SPECIAL, LOOKUP],
        [OSError(), "bad"],
        id="tuple",
    ),
    pytest.param(Exception, [CONNECTION, LOOKUP], ["bad", None, 0], id="Exception"),
    pytest.param(handle(ConnectionError), [CONNECTION, SPECIAL], [LOOKUP, "bad"], id="handle"),
    pytest.param(
        handle(SpecialError, LookupError), [SPECIAL, LOOKUP], [CONNECTION, "bad"], id="handle-two"
    ),
    pytest.param(
        handle(ConnectionError, where=lambda error: str(error) == "s"),
        [SPECIAL],
        [CONNECTION, LOOKUP],
        id="where",
    ),
    pytest.param(handle_result(is_bad), ["bad"], ["good", None, CONNECTION], id="handle_result"),
    pytest.param(
        handle_result(is_bad_async), ["bad"], ["good", None, CONNECTION], id="handle_result-async"
    ),
    pytest.param(
        handle_result(lambda _: True), ["bad", None, 0, False], [CONNECTION], id="every-result"
    ),
    pytest.param(
        handle(ConnectionError) | handle_result(is_bad),
        [CONNECTION, SPECIAL, "bad"],
        [LOOKUP, "good"],
        id="joined",
    ),
    pytest.param(
        handle_result(is_bad) | handle_result(lambda r: r == "worse") | handle(LookupError),
        ["bad", "worse", LOOKUP],
        ["good", CONNECTION],
        id="joined-three",
    ),
    pytest.param(of_event, [LOOKUP, "bad"], [CONNECTION, "good"], id="function"),
    pytest.param(of_event_async, [LOOKUP, "bad"], [CONNECTION, "good"], id="coroutine-function"),
    pytest.param(
        of_event_returning_awaitable, [LOOKUP, "bad"], [CONNECTION, "good"], id="gives-awaitable"
    ),
    pytest.param(partial(of_event), [LOOKUP, "bad"], [CONNECTION, "good"], id="partial"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("should_handle", "yes", "no"), FORMS)
async def test_forms_of_should_handle(should_handle: Any, yes: list[Any], no: list[Any]) -> None:
    """PR-01: each form handles what it says, and result tests never see exceptions nor vice versa."""
    for outcome in yes:
        assert await handled(should_handle, outcome)
    for outcome in no:
        assert not await handled(should_handle, outcome)


@pytest.mark.parametrize("strategy", [Retry, CircuitBreaker, partial(Fallback, fallback_value=1)])
@pytest.mark.parametrize(("should_handle", "yes", "no"), FORMS)
def test_every_strategy_with_a_predicate_takes_every_form(
    strategy: Callable[..., Any], should_handle: Any, yes: list[Any], no: list[Any]
) -> None:
    """The forms are the same wherever an option is called `should_handle`."""
    assert isinstance(strategy(should_handle=should_handle).should_handle, Predicate)


@pytest.mark.anyio
@pytest.mark.parametrize("run", ["retry", "breaker"])
@pytest.mark.parametrize(("should_handle", "yes", "no"), FORMS)
async def test_retry_and_breaker_handle_the_same(
    should_handle: Any, yes: list[Any], no: list[Any], run: str
) -> None:
    """What is handled is tried again, and counted as a failure; what is not is neither."""
    for outcome, is_handled in [(each, True) for each in yes] + [(each, False) for each in no]:
        call: Calls[object] = Calls(outcome)
        if run == "retry":
            pipeline = B().add_retry(max_retry_attempts=1, delay=0, should_handle=should_handle)
            await pipeline.build().settle(call)
            assert (call.count == 2) is is_handled
            continue
        circuit = (
            B()
            .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, should_handle=should_handle)
            .build()
        )
        for _ in range(2):
            await circuit.settle(call)
        assert isinstance(await circuit.settle(ok), Rejected) is is_handled


# ---- joining ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_joined_predicates_are_asked_from_the_left_until_one_says_yes() -> None:
    """`|` is OR: the left one is asked first, and nobody after the first yes."""
    asked = []

    def ask(name: str, answer: bool) -> Predicate:
        def test(result: object) -> bool:
            asked.append(name)
            return answer

        return handle_result(test)

    joined = ask("a", False) | (ask("b", True) | ask("c", True))
    assert await handled(joined, "result")
    assert asked == ["a", "b"]


def test_joining_makes_a_new_predicate() -> None:
    """Predicates are values: joining changes neither side."""
    left, right = handle(ValueError), handle(KeyError)
    joined = left | right
    assert repr(joined) == "handle(ValueError) | handle(KeyError)"
    assert (repr(left), repr(right)) == ("handle(ValueError)", "handle(KeyError)")
    assert joined == handle(ValueError) | handle(KeyError)


@pytest.mark.parametrize("other", [ValueError, is_bad, None, 3])
def test_joining_with_what_is_no_predicate_is_a_type_error(other: Any) -> None:
    """Only predicates are joined with `|`."""
    with pytest.raises(TypeError):
        handle(ValueError) | other
    with pytest.raises(TypeError):
        other | handle(ValueError)


# ---- handle_inner -------------------------------------------------------------------------------


def caused(error: Exception, cause: BaseException | None) -> Exception:
    error.__cause__ = cause  # also suppresses the context, as `raise … from …` does
    return error


def after(error: Exception, context: BaseException | None) -> Exception:
    error.__context__ = context
    return error


def from_none(error: Exception, context: BaseException) -> Exception:
    return caused(after(error, context), None)


def circular() -> Exception:
    first = ValueError()
    first.__context__ = after(KeyError(), after(TypeError(), first))
    return first


INNER: list[Any] = [
    pytest.param(OSError(), True, id="itself"),
    pytest.param(ConnectionError(), True, id="subclass"),
    pytest.param(caused(ValueError(), OSError()), True, id="cause"),
    pytest.param(caused(ValueError(), caused(KeyError(), OSError())), True, id="cause-of-cause"),
    pytest.param(after(ValueError(), OSError()), True, id="context"),
    pytest.param(after(ValueError(), caused(KeyError(), OSError())), True, id="context-then-cause"),
    pytest.param(caused(ValueError(), after(KeyError(), OSError())), True, id="cause-then-context"),
    pytest.param(caused(ValueError(), KeyboardInterrupt()), False, id="cause-is-no-exception"),
    pytest.param(caused(ValueError(), after(KeyError(), OSError())), True, id="context-of-a-cause"),
    pytest.param(from_none(ValueError(), OSError()), False, id="from-none"),
    pytest.param(after(ValueError(), from_none(KeyError(), OSError())), False, id="deep-from-none"),
    pytest.param(
        caused(after(ValueError(), OSError()), KeyError()), False, id="context-beside-a-cause"
    ),
    pytest.param(ExceptionGroup("g", [ValueError(), OSError()]), True, id="child"),
    pytest.param(ExceptionGroup("g", [caused(ValueError(), OSError())]), True, id="childs-cause"),
    pytest.param(
        ExceptionGroup("g", [ExceptionGroup("h", [KeyError(), OSError()])]), True, id="grandchild"
    ),
    pytest.param(caused(ValueError(), ExceptionGroup("g", [OSError()])), True, id="group-as-cause"),
    pytest.param(caused(ExceptionGroup("g", [ValueError()]), OSError()), True, id="groups-cause"),
    pytest.param(ExceptionGroup("g", [ValueError()]), False, id="unrelated-child"),
    pytest.param(caused(ValueError(), KeyError()), False, id="unrelated-cause"),
    pytest.param(ValueError(), False, id="unrelated"),
    pytest.param(circular(), False, id="circular"),
    pytest.param("OSError", False, id="result"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("outcome", "expected"), INNER)
async def test_handle_inner(outcome: Any, expected: bool) -> None:
    """PR-02, PR-03: itself, any depth of cause and context (but `from None`), any child of a group."""
    assert await handled(handle_inner(OSError), outcome) is expected


@pytest.mark.anyio
async def test_handle_does_not_look_inside() -> None:
    """`handle` looks at the exception alone."""
    for outcome in (caused(ValueError(), OSError()), ExceptionGroup("g", [OSError()])):
        assert not await handled(handle(OSError), outcome)


@pytest.mark.anyio
async def test_handle_inner_with_where() -> None:
    """`where=` is asked about each exception that was found, until one satisfies it."""
    wanted = handle_inner(OSError, where=lambda error: error.errno == 7)
    group = ExceptionGroup("g", [OSError(3, "three"), caused(ValueError(), OSError(7, "seven"))])
    assert await handled(wanted, group)
    assert not await handled(wanted, OSError(3, "three"))


@pytest.mark.anyio
async def test_a_very_long_chain_is_walked() -> None:
    """The depth of a chain is limited by nothing."""
    error: Exception = OSError()
    for _ in range(5_000):
        error = caused(ValueError(), error)
    assert await handled(handle_inner(OSError), error)


# ---- where= -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_where_is_asked_only_about_the_types() -> None:
    """A function given as `where=` never sees an exception of another type, nor a result."""
    seen: list[object] = []

    async def where(error: Exception) -> bool:
        seen.append(error)
        return True

    predicate = handle(ConnectionError, where=where)
    for outcome in (LOOKUP, "result"):
        assert not await handled(predicate, outcome)
    assert seen == []
    assert await handled(predicate, CONNECTION)
    assert seen == [CONNECTION]


@pytest.mark.anyio
async def test_answers_are_read_by_their_truth() -> None:
    """Whatever is true is a yes; what is not, `None` included, a no."""
    answers: list[Any] = [(1, True), ("x", True), (0, False), (None, False), ([], False)]

    def give(answer: Any, _: object) -> Any:
        return answer

    for answer, expected in answers:
        function = partial(give, answer)
        assert await handled(handle_result(function), "r") is expected
        assert await handled(handle(OSError, where=function), OSError()) is expected
        assert await handled(function, "r") is expected


# ---- the event ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_functions_get_the_outcome_event() -> None:
    """A function of the event sees the context, the outcome and the number of the attempt."""
    events: list[OutcomeEvent] = []

    def test(event: OutcomeEvent) -> bool:
        events.append(event)
        return True

    mine = ResilienceContext()
    pipeline = B().add_retry(max_retry_attempts=2, delay=0, should_handle=test).build()
    await pipeline.settle(Calls(CONNECTION, "text", 3), context=mine)
    assert [event.outcome for event in events] == [
        Failure(CONNECTION),
        Success("text"),
        Success(3),
    ]
    assert [event.attempt for event in events] == [0, 1, 2]
    assert all(event.context is mine for event in events)


@pytest.mark.anyio
async def test_functions_see_results_of_every_type() -> None:
    """PL-15: text, numbers, `None` and booleans are shown as they are."""
    seen: list[object] = []

    def test(event: OutcomeEvent) -> bool:
        assert isinstance(event.outcome, Success)
        seen.append(event.outcome.value)
        return False

    pipeline = B().add_fallback(fallback_value=1, should_handle=test).build()
    values = ["text", 7, None, True, False, 0.5, b""]
    for value in values:
        assert await pipeline.execute(Calls(value)) is value
    assert seen == values


# ---- the gate and the default -------------------------------------------------------------------

EVERYTHING: list[Any] = [
    pytest.param(Exception, id="Exception"),
    pytest.param((TypeError, MisuseError), id="tuple"),
    pytest.param(handle(MisuseError), id="handle"),
    pytest.param(handle_inner(Exception), id="handle_inner"),
    pytest.param(handle(Exception) | handle_result(lambda _: True), id="joined"),
    pytest.param(lambda _: True, id="function"),
]


@pytest.mark.anyio
@pytest.mark.parametrize("should_handle", EVERYTHING)
async def test_a_misuse_is_handled_by_no_predicate(should_handle: Any) -> None:
    """Whatever it says, no predicate handles a `MisuseError`, or is even asked."""
    assert not await handled(should_handle, MisuseError("wrong"))
    call: Calls[int] = Calls(MisuseError("wrong"))
    await B().add_retry(delay=0, should_handle=should_handle).build().settle(call)
    assert call.count == 1


@pytest.mark.anyio
async def test_cancellation_is_shown_to_no_predicate() -> None:
    """What is no `Exception` is never shown to a predicate, cancellation first of all."""
    asked: list[object] = []

    def test(event: object) -> bool:
        asked.append(event)
        return True

    pipeline = (
        B()
        .add_fallback(fallback_value=1, should_handle=test)
        .add_retry(delay=0, should_handle=test)
        .add_circuit_breaker(should_handle=test)
        .build()
    )
    async with running(pipeline.execute, hang) as scope:
        scope.cancel()
    assert asked == []


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Exception(), True),
        (ValueError(), True),
        (ConnectionError(), True),
        (TimeoutError(), True),
        (TypeError(), True),
        (StopAsyncIteration(), True),
        (ExceptionGroup("g", [ValueError()]), True),
        (OptionsError(), True),
        (BrokenCircuitError(), True),
        (TimeoutRejectedError(), True),
        (ConcurrencyLimiterRejectedError(), True),
        (concurrent.futures.TimeoutError(), True),
        (MisuseError(), False),
        (concurrent.futures.CancelledError(), False),
        ("result", False),
        (None, False),
        (False, False),
    ],
    ids=repr,
)
async def test_the_default_handles_exceptions_and_no_results(
    outcome: object, expected: bool
) -> None:
    """The default: every `Exception` but `MisuseError`, and a cancelled future; never a result."""
    pipeline = B().add_fallback(fallback_value=HANDLED).build()
    settled = await pipeline.settle(Calls(outcome))
    assert (settled == Success(HANDLED)) is expected


@pytest.mark.anyio
async def test_a_breakers_default_counts_refusals_inside_it_as_nothing() -> None:
    """Our own "no" says nothing about the service; with a predicate of one's own it counts."""
    for options, opens in (({}, False), ({"should_handle": ExecutionRejectedError}, True)):
        pipeline = (
            B()
            .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, **options)  # type: ignore[arg-type]
            .add_concurrency_limiter(1)
            .build()
        )
        limiter = pipeline.strategies[1]
        async with running(pipeline.execute, hang):
            for _ in range(2):
                await pipeline.settle(ok)
            outcome = await pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert (outcome.error.strategy_name != limiter.name) is opens


def test_asyncio_cancellation_is_no_exception() -> None:
    """`asyncio.CancelledError` can't be named as something to handle."""
    for make in (handle, handle_inner):
        with pytest.raises(OptionsError, match="CancelledError"):
            make(asyncio.CancelledError)  # type: ignore[arg-type]


# ---- bad predicates -----------------------------------------------------------------------------

BAD_TYPES: list[Any] = [
    pytest.param((), id="nothing"),
    pytest.param((3,), id="number"),
    pytest.param((ValueError, "KeyError"), id="text"),
    pytest.param((ValueError(),), id="instance"),
    pytest.param((int,), id="no-exception-type"),
    pytest.param((BaseException,), id="BaseException"),
    pytest.param((KeyboardInterrupt,), id="KeyboardInterrupt"),
    pytest.param(((ValueError, KeyError),), id="tuple"),
]


@pytest.mark.parametrize("make", [handle, handle_inner])
@pytest.mark.parametrize("types", BAD_TYPES)
def test_types_that_are_none_are_refused(make: Callable[..., Any], types: tuple[Any, ...]) -> None:
    """PR-04: no type, or something that is no exception type, is an `OptionsError` that says so."""
    with pytest.raises(OptionsError) as caught:
        make(*types)
    assert make.__name__ in str(caught.value)
    if types:
        assert repr(types[-1]) in str(caught.value)
    assert caught.value.problems == (str(caught.value),)


@pytest.mark.parametrize("wrong", [3, "text", object()])
def test_functions_that_are_none_are_refused(wrong: Any) -> None:
    """`where=` and `handle_result` take functions."""
    for make in (
        partial(handle, ValueError, where=wrong),
        partial(handle_inner, ValueError, where=wrong),
        partial(handle_result, wrong),
    ):
        with pytest.raises(OptionsError) as caught:
            make()
        assert repr(wrong) in str(caught.value)


def test_a_coroutine_in_place_of_its_function_is_misuse() -> None:
    """A coroutine object where a function belongs is both errors at once, and is closed."""

    async def test(_: object) -> bool:
        raise NotImplementedError

    for make in (
        lambda wrong: handle(ValueError, where=wrong),
        lambda wrong: handle_inner(ValueError, where=wrong),
        handle_result,
    ):
        coroutine: Any = test(None)
        with pytest.raises(MisuseError) as caught:
            make(coroutine)
        assert isinstance(caught.value, OptionsError)
        assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        3,
        "ValueError",
        (),
        (ValueError, 3),
        [ValueError],
        BaseException,
        KeyboardInterrupt,
        int,
        ValueError(),
        ValueError | KeyError,
        True,
    ],
    ids=repr,
)
@pytest.mark.parametrize("strategy", [Retry, CircuitBreaker, partial(Fallback, fallback_value=1)])
def test_what_is_no_predicate_is_refused(strategy: Callable[..., Any], wrong: Any) -> None:
    """A `should_handle` of no known form is refused with the forms there are."""
    with pytest.raises(OptionsError) as caught:
        strategy(should_handle=wrong)
    (problem,) = caught.value.problems
    assert problem.startswith("should_handle must be an exception type")
    assert repr(wrong) in problem
    for form in ("tuple", "handle(...)", "handle_result(...)", "function of the outcome event"):
        assert form in problem


# ---- as values ----------------------------------------------------------------------------------


def test_equal_predicates_are_equal() -> None:
    """Predicates of equal types and functions are equal, so strategies made with them are."""
    assert handle(ValueError, KeyError) == handle(ValueError, KeyError)
    assert handle(ValueError) != handle(KeyError)
    assert handle(ValueError) != handle_inner(ValueError)
    assert handle_result(is_bad) == handle_result(is_bad)
    assert Retry(should_handle=ValueError) == Retry(should_handle=handle(ValueError))
    assert Retry(should_handle=of_event) == Retry(should_handle=of_event)
    assert hash(handle(ValueError)) == hash(handle(ValueError))


@pytest.mark.parametrize(
    ("predicate", "text"),
    [
        (handle(ValueError, KeyError), "handle(ValueError, KeyError)"),
        (handle(ValueError, where=is_bad), "handle(ValueError, where=is_bad)"),
        (handle_inner(OSError), "handle_inner(OSError)"),
        (handle_result(is_bad), "handle_result(is_bad)"),
        (handle_result(callable), "handle_result(callable)"),
        (handle(ValueError) | handle_result(is_bad), "handle(ValueError) | handle_result(is_bad)"),
    ],
)
def test_predicates_read_like_their_making(predicate: Predicate, text: str) -> None:
    """The repr of a predicate is what one would write to make it."""
    assert repr(predicate) == text


@pytest.mark.anyio
async def test_a_predicate_may_be_shared() -> None:
    """One predicate serves many strategies and calls at once."""
    predicate = handle(ConnectionError) | handle_result(is_bad_async)
    pipeline = (
        B()
        .add_fallback(fallback_value=HANDLED, should_handle=predicate)
        .add_retry(max_retry_attempts=1, delay=0, should_handle=predicate)
        .build()
    )

    async def check(outcome: object, expected: object) -> None:
        assert await pipeline.execute(Calls(outcome)) is expected

    good = object()
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(check, CONNECTION, HANDLED)
            tasks.start_soon(check, "bad", HANDLED)
            tasks.start_soon(check, good, good)
