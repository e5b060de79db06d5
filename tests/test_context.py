"""`ResilienceContext`, `PropertyKey`, `current_context`, and context variables."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import weakref
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    MisuseError,
    Properties,
    PropertyKey,
    ResilienceContext,
    ResiliencePipeline,
    current_context,
)
from support.calls import B, BoomError, Calls, boom, hang, ok, running, tick

EMPTY = ResiliencePipeline.empty
COUNT = PropertyKey[int]("count")
NAME = PropertyKey[str | None]("name")


# ---- what a context says ------------------------------------------------------------------------


def test_defaults() -> None:
    """`ResilienceContext(operation_key=None, idempotent=True, properties=None)`."""
    context = ResilienceContext()
    assert (context.operation_key, context.idempotent) == (None, True)
    assert (context.attempt, context.pipeline_name) == (0, None)
    assert len(context.properties) == 0


def test_arguments_are_positional_too() -> None:
    """All three arguments may be given by position."""
    context = ResilienceContext("op", False, {COUNT: 3})
    assert (context.operation_key, context.idempotent) == ("op", False)
    assert context.properties[COUNT] == 3


def test_repr_shows_the_public_half() -> None:
    """A context shows what it says, and nothing of its insides."""
    assert repr(ResilienceContext("op")) == (
        "ResilienceContext(operation_key='op', idempotent=True, attempt=0, pipeline_name=None)"
    )


@pytest.mark.anyio
async def test_attempt_and_pipeline_name_inside_of_the_callback() -> None:
    """`context.attempt` is this attempt's number, from 0; `pipeline_name` the executing pipeline's."""
    seen = []

    async def call() -> None:
        context = current_context()
        seen.append((context.attempt, context.pipeline_name))
        raise BoomError

    await B(name="p").add_retry(max_retry_attempts=2, delay=0).build().settle(call)
    assert seen == [(0, "p"), (1, "p"), (2, "p")]


@pytest.mark.anyio
async def test_the_attempt_of_nested_retries_is_the_inner_ones() -> None:
    """With nested retries `context.attempt` is the number that the innermost of them gave."""
    seen = []

    async def call() -> None:
        seen.append(current_context().attempt)
        raise BoomError

    builder = B().add_retry(max_retry_attempts=1, delay=0).add_retry(max_retry_attempts=2, delay=0)
    await builder.build().settle(call)
    assert seen == [0, 1, 2, 0, 1, 2]


# ---- current_context ----------------------------------------------------------------------------


def test_outside_there_is_no_context() -> None:
    """Outside of an execution `current_context()` is a `LookupError` that says so."""
    with pytest.raises(LookupError, match="outside of a pipeline's execution") as caught:
        current_context()
    assert caught.value.__suppress_context__


@pytest.mark.anyio
async def test_before_and_after_a_call_there_is_no_context() -> None:
    """The context is current during the execution and not a moment longer, however it ends."""
    for call in (ok, boom):
        await EMPTY.settle(call)
        with pytest.raises(LookupError):
            current_context()
    async with running(EMPTY.execute, hang) as scope:
        scope.cancel()
    with pytest.raises(LookupError):
        current_context()


@pytest.mark.anyio
async def test_nested_executions_each_see_their_own() -> None:
    """Inside of an inner execution its context is current, before and after it the outer one's."""
    seen: list[str | None] = []

    async def inner() -> None:
        seen.append(current_context().operation_key)

    async def outer() -> None:
        seen.append(current_context().operation_key)
        await EMPTY.execute(inner, operation_key="inner")
        seen.append(current_context().operation_key)

    await EMPTY.execute(outer, operation_key="outer")
    assert seen == ["outer", "inner", "outer"]


@pytest.mark.anyio
async def test_executions_at_once_each_see_their_own() -> None:
    """Concurrent executions don't see each other's context, whatever the interleaving."""
    pipeline = B().add_retry(delay=0).add_timeout(60).add_concurrency_limiter(10).build()

    async def read(key: str) -> None:
        for _ in range(5):
            assert current_context().operation_key == key
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        for number in range(10):
            key = str(number)
            tasks.start_soon(partial(pipeline.execute, read, key, operation_key=key))


@pytest.mark.anyio
async def test_tasks_started_by_the_callback_see_its_context() -> None:
    """A task started inside of an execution inherits its context, as it does any context variable."""
    seen = []

    async def child() -> None:
        seen.append(current_context().operation_key)

    async def call() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)

    await EMPTY.execute(call, operation_key="op")
    assert seen == ["op"]


@pytest.mark.anyio
async def test_hooks_see_the_context_that_their_event_carries() -> None:
    """Inside of hooks, predicates and generators the execution's context is current, too."""
    seen: list[str] = []

    def check(place: str, event: Any) -> Any:
        assert current_context() is event.context
        assert event.context.operation_key == "op"
        seen.append(place)
        return True if place == "should_handle" else None

    pipeline = (
        B()
        .add_fallback(partial(check, "action"), on_fallback=partial(check, "on_fallback"))
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, on_opened=partial(check, "on_opened")
        )
        .add_retry(
            max_retry_attempts=1,
            delay=0,
            should_handle=partial(check, "should_handle"),
            on_retry=partial(check, "on_retry"),
            delay_generator=partial(check, "delay_generator"),
        )
        .add_timeout(60, timeout_generator=partial(check, "timeout_generator"))
        .build()
    )
    for _ in range(2):
        await pipeline.execute(boom, operation_key="op")
    assert set(seen) == {
        "action",
        "on_fallback",
        "on_opened",
        "should_handle",
        "on_retry",
        "delay_generator",
        "timeout_generator",
    }


# ---- context variables --------------------------------------------------------------------------

VARIABLE: ContextVar[str] = ContextVar("VARIABLE")


@pytest.mark.anyio
async def test_context_variables_of_the_caller_are_visible_inside() -> None:
    """Context variables set by the caller are visible in `fn` and in hooks."""
    seen: list[str] = []

    def hook(event: object) -> None:
        seen.append(VARIABLE.get())

    async def async_hook(event: object) -> None:
        seen.append(VARIABLE.get())

    async def call() -> None:
        seen.append(VARIABLE.get())
        raise BoomError

    token = VARIABLE.set("caller's")
    try:
        pipeline = (
            B()
            .add_fallback(fallback_value=1, on_fallback=async_hook)
            .add_retry(max_retry_attempts=1, delay=0, on_retry=hook)
            .add_concurrency_limiter(1)
            .add_timeout(60)
            .build()
        )
        await pipeline.execute(call)
    finally:
        VARIABLE.reset(token)
    assert seen == ["caller's"] * 4


@pytest.mark.anyio
async def test_context_variables_set_inside_are_visible_to_the_caller() -> None:
    """The callback runs in the caller's own context, as in a plain `await fn()`."""

    async def call() -> None:
        VARIABLE.set("callback's")

    token = VARIABLE.set("caller's")
    try:
        await B().add_retry().add_timeout(60).build().execute(call)
        assert VARIABLE.get() == "callback's"
    finally:
        VARIABLE.reset(token)


# ---- a context of the caller's own --------------------------------------------------------------


@pytest.mark.anyio
async def test_a_given_context_serves_the_execution() -> None:
    """A context passed as `context=` is the current one, with the pipeline's name and the attempts."""
    mine = ResilienceContext("op")
    seen = []

    async def call() -> None:
        seen.append((current_context(), current_context().attempt))
        raise BoomError

    pipeline = B(name="p").add_retry(max_retry_attempts=1, delay=0).build()
    await pipeline.settle(call, context=mine)
    assert seen == [(mine, 0), (mine, 1)]
    assert mine.pipeline_name == "p"


@pytest.mark.anyio
async def test_its_properties_can_be_read_afterwards() -> None:
    """What hooks and callbacks have set is there for the caller to read, also after a failure."""
    mine = ResilienceContext(properties={NAME: "given"})

    async def call() -> None:
        properties = current_context().properties
        assert properties[NAME] == "given"
        properties.set(COUNT, properties.get(COUNT, 0) + 1)
        raise BoomError

    await B().add_retry(max_retry_attempts=2, delay=0).build().settle(call, context=mine)
    assert mine.properties[COUNT] == 3
    assert mine.properties[NAME] == "given"


@pytest.mark.anyio
async def test_a_context_can_be_used_again() -> None:
    """CX-01: after its execution a context serves another one; attempts start again, properties stay."""
    mine = ResilienceContext("op")
    seen: list[tuple[int, str | None]] = []

    async def call() -> None:
        seen.append((current_context().attempt, current_context().pipeline_name))
        mine.properties.set(COUNT, mine.properties.get(COUNT, 0) + 1)
        raise BoomError

    for name in ("first", "second"):
        pipeline = B(name=name).add_retry(max_retry_attempts=1, delay=0).build()
        await pipeline.settle(call, context=mine)
    await EMPTY.settle(call, context=mine)
    assert seen == [(0, "first"), (1, "first"), (0, "second"), (1, "second"), (0, None)]
    assert mine.properties[COUNT] == 5


@pytest.mark.anyio
async def test_a_context_can_be_used_again_after_a_cancellation() -> None:
    """A cancelled execution lets go of its context."""
    mine = ResilienceContext()
    async with running(partial(B().add_timeout(60).build().execute, hang, context=mine)) as scope:
        scope.cancel()
        await tick()
        assert await EMPTY.execute(ok, context=mine) == 1


@pytest.mark.anyio
async def test_one_context_serves_one_execution_at_a_time() -> None:
    """A context that still serves an execution is refused, and that execution is not disturbed."""
    mine = ResilienceContext()

    async def again() -> None:
        with pytest.raises(MisuseError, match="still serves another execution"):
            await EMPTY.execute(ok, context=mine)
        with pytest.raises(MisuseError, match="still serves another execution"):
            async for _ in EMPTY.execute_stream(hang, context=mine):
                pass
        assert current_context() is mine

    async with running(partial(EMPTY.execute, hang, context=mine)):
        with pytest.raises(MisuseError, match="still serves another execution"):
            await EMPTY.execute(ok, context=mine)
    await EMPTY.execute(again, context=mine)
    assert await EMPTY.execute(ok, context=mine) == 1


@pytest.mark.anyio
async def test_a_context_kept_by_the_caller_keeps_nothing_alive() -> None:
    """After its execution a context holds neither the callback nor its arguments nor the error."""
    mine = ResilienceContext()

    class Argument:
        pass

    async def call(argument: Argument) -> None:
        raise BoomError

    async def run() -> list[weakref.ref[Any]]:
        argument = Argument()
        outcome = await B().add_timeout(60).build().settle(call, argument, context=mine)
        return [weakref.ref(argument), weakref.ref(outcome.error)]

    references = await run()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.asyncio
async def test_a_context_serves_loops_one_after_another() -> None:
    """Nothing of a loop stays in a context."""
    mine = ResilienceContext()
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).build()
    await pipeline.execute(Calls(BoomError(), 1), context=mine)
    await asyncio.to_thread(
        partial(anyio.run, partial(pipeline.execute, Calls(BoomError(), 1), context=mine))
    )


# ---- properties ---------------------------------------------------------------------------------


def test_get_set_and_default() -> None:
    """Typed get, set and default."""
    properties = ResilienceContext().properties
    assert properties.get(COUNT, 7) == 7
    assert properties.get(COUNT, None) is None
    assert COUNT not in properties
    properties.set(COUNT, 3)
    assert properties.get(COUNT) == properties.get(COUNT, 7) == properties[COUNT] == 3
    assert COUNT in properties
    properties[COUNT] = 4
    assert properties[COUNT] == 4


def test_a_missing_key_is_a_lookup_error() -> None:
    """A missing key without a default is a `LookupError` that names it."""
    properties = ResilienceContext().properties
    for read in (properties.get, properties.__getitem__):
        with pytest.raises(LookupError, match="'count'"):
            read(COUNT)


def test_a_stored_none_is_found() -> None:
    """CX-02: a property stored as `None` is found and the default not used."""
    properties = ResilienceContext(properties={NAME: None}).properties
    assert NAME in properties
    assert properties.get(NAME) is None
    assert properties.get(NAME, "default") is None


def test_keys_are_told_apart_by_name() -> None:
    """Keys of equal names are one key, whatever object; others are not."""
    properties = ResilienceContext(properties={PropertyKey[int]("a"): 1}).properties
    assert properties[PropertyKey[int]("a")] == 1
    assert PropertyKey[int]("b") not in properties
    same: list[PropertyKey[Any]] = [PropertyKey[int]("a"), PropertyKey[str]("a")]
    assert same[0] == same[1]
    assert len(set(same)) == 1


def test_properties_are_copied_from_the_mapping() -> None:
    """`properties=` takes a mapping of keys to values, and a context never changes it."""
    given: dict[PropertyKey[Any], Any] = {COUNT: 1}
    context = ResilienceContext(properties=given)
    context.properties.set(COUNT, 2)
    given[NAME] = "late"
    assert given[COUNT] == 1
    assert NAME not in context.properties


def test_contexts_share_no_properties() -> None:
    """Each context has properties of its own."""
    one, other = ResilienceContext(), ResilienceContext()
    one.properties.set(COUNT, 1)
    assert COUNT not in other.properties
    assert one.properties is one.properties


def test_properties_can_be_listed() -> None:
    """Keys are iterated in the order in which they were set first; a repr shows names and values."""
    properties = Properties({COUNT: 1})
    properties.set(NAME, "x")
    properties.set(COUNT, 2)
    assert list(properties) == [COUNT, NAME]
    assert len(properties) == 2
    assert repr(properties) == "Properties({'count': 2, 'name': 'x'})"


@pytest.mark.parametrize("key", ["count", 3, None])
def test_what_is_no_key_is_misuse(key: Any) -> None:
    """Values are stored under a `PropertyKey`, and nothing else is taken for one."""
    with pytest.raises(MisuseError, match="PropertyKey"):
        ResilienceContext(properties={key: 1})
    with pytest.raises(MisuseError, match="PropertyKey"):
        ResilienceContext().properties.set(key, 1)
    assert key not in ResilienceContext().properties


def test_the_properties_of_a_context_cannot_be_replaced() -> None:
    """`context.properties` is filled, never set."""
    with pytest.raises(AttributeError):
        ResilienceContext().properties = Properties()  # type: ignore[misc]


def test_property_keys_are_values() -> None:
    """A key shows its name, can't be changed, and survives being copied and pickled."""
    assert repr(COUNT) == "PropertyKey('count')"
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        COUNT.name = "other"  # type: ignore[misc]
    for again in (copy.copy(COUNT), copy.deepcopy(COUNT), pickle.loads(pickle.dumps(COUNT))):
        assert again == COUNT
