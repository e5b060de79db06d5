"""Cache of calls: single flight, what is stored and for how long, what each caller gets."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import pickle
import weakref
from collections.abc import AsyncIterator
from concurrent import futures
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    Cache,
    CacheControl,
    CacheKeyEvent,
    CacheStaleEvent,
    CacheStatistics,
    Failure,
    MisuseError,
    OptionsError,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import (
    Closable,
    Hanging,
    Scripted,
    raised_by,
    spawn,
    tick,
    traceback_length,
)

anyio_test = pytest.mark.anyio
B = ResiliencePipelineBuilder


class Gated:
    """A coroutine function that stays inside until its gate is opened.

    Attributes:
        calls: How many calls there were; `running`, how many are inside; `cancelled`, how many were.
    """

    def __init__(self, result: Any = "v") -> None:
        self.result = result
        self.calls = self.running = self.cancelled = 0
        self.gate = anyio.Event()

    async def __call__(self, *_: object) -> Any:
        self.calls += 1
        self.running += 1
        try:
            await self.gate.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def key_k(_: CacheKeyEvent) -> str:
    return "k"


# ---- single flight ----------------------------------------------------------------------------


@anyio_test
async def test_case_ca_01_the_one_who_began_is_cancelled_alone() -> None:
    """Case CA-01: the load belongs to no caller; the other gets its value, and it is stored."""
    load = Gated()
    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        one = spawn(tasks, pipeline.execute, load, "k")
        await tick()
        other = spawn(tasks, pipeline.execute, load, "k")
        await tick()
        assert load.calls == 1
        one.cancel()
        await tick()
        assert one.cancelled
        assert not other.done
        load.gate.set()
    assert other.value == "v"
    assert await pipeline.execute(load, "k") == "v"
    assert load.calls == 1


@anyio_test
async def test_one_who_joined_is_cancelled_alone() -> None:
    """Contract: one caller's cancel detaches that caller alone."""
    load = Gated()
    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, load) for _ in range(3)]
        await tick()
        calls[1].cancel()
        await tick()
        assert [call.done for call in calls] == [False, True, False]
        load.gate.set()
    assert [calls[0].value, calls[2].value] == ["v", "v"]


@anyio_test
async def test_with_the_last_caller_the_call_is_cancelled_and_awaited() -> None:
    """Contract: when the last one leaves, the call is cancelled; nothing outlives it."""
    load = Gated()
    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        one, other = (spawn(tasks, pipeline.execute, load) for _ in range(2))
        await tick()
        one.cancel()
        await tick()
        assert load.running == 1
        other.cancel()
        await tick()
        assert (load.running, load.cancelled) == (0, 1)
        assert other.cancelled
    load.gate.set()
    assert await pipeline.execute(load) == "v"
    assert load.calls == 2


@anyio_test
async def test_who_comes_while_it_is_being_cancelled_starts_anew() -> None:
    """Nobody joins a call that is being cancelled, whose cleanup takes its time."""
    cleanup, calls = anyio.Event(), 0

    async def load() -> int:
        nonlocal calls
        calls += 1
        number = calls
        if number == 1:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await cleanup.wait()
        return number

    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        one = spawn(tasks, pipeline.execute, load)
        await tick()
        one.cancel()
        await tick()
        assert not one.done  # it waits for the end of what it was the last to want
        assert await pipeline.execute(load) == 2
        cleanup.set()
    assert one.cancelled
    assert await pipeline.execute(load) == 2


@anyio_test
async def test_what_comes_after_the_last_has_left_is_closed_and_not_stored() -> None:
    """A call that brings a result although it was cancelled: nobody receives that, so it is closed."""
    thing = Closable()

    async def stubborn() -> Closable:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            if calls:
                raise
            calls.append(1)
            return thing
        raise AssertionError

    calls: list[int] = []
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, stubborn)
        await tick()
        call.cancel()
    assert thing.closed == 1
    assert control.statistics().size == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("forgotten", [True, False])
async def test_a_result_and_the_last_callers_cancellation_in_one_turn(*, forgotten: bool) -> None:
    """Nobody receives it: it is closed, unless it is stored."""
    thing = Closable()
    control = CacheControl()
    pipeline = B().add_cache(key=key_k, control=control).build()

    async def load() -> Closable:
        await tick(2)
        if forgotten:
            control.clear()
        task.cancel()
        return thing

    task = asyncio.ensure_future(pipeline.execute(load))
    await asyncio.wait([task])
    assert task.cancelled()
    await tick()
    assert (thing.closed, control.statistics().size) == ((1, 0) if forgotten else (0, 1))


@pytest.mark.asyncio
async def test_a_caller_that_is_let_go_of_leaves() -> None:
    """A coroutine that is closed where nothing can be awaited: with the last one the call is cancelled."""
    load = Gated()
    pipeline = B().add_cache().build()
    abandoned = pipeline.execute(load)
    abandoned.send(None)
    await tick()
    other = asyncio.ensure_future(pipeline.execute(load))
    await tick()
    abandoned.close()
    await tick()
    assert (load.running, load.cancelled) == (1, 0)
    other.cancel()
    await asyncio.wait([other])
    assert (load.running, load.cancelled) == (0, 1)
    last = pipeline.execute(load)
    last.send(None)
    await tick()
    last.close()
    await tick()
    assert (load.calls, load.running, load.cancelled) == (2, 0, 2)


@pytest.mark.asyncio
async def test_ten_that_fail_at_once_without_waiting() -> None:
    """Case CA-03, to the letter: on asyncio all join before the call has run."""
    calls = 0

    async def boom() -> None:
        nonlocal calls
        calls += 1
        raise ConnectionError("boom")

    pipeline = B().add_cache(key=key_k).build()
    outcomes = await asyncio.gather(*(pipeline.settle(boom) for _ in range(10)))
    assert calls == 1
    lengths = [traceback_length(outcome.error) for outcome in outcomes if outcome.error]
    assert len(lengths) == 10
    assert max(lengths) < 2 * min(lengths)


@anyio_test
@pytest.mark.parametrize("count", [2, 10])
async def test_equal_calls_at_once_are_one(count: int) -> None:
    """Catalogue CA-2: concurrent calls with one key make one call, all get its result."""
    load = Gated()
    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, load, "k") for _ in range(count)]
        await tick()
        load.gate.set()
    assert [call.value for call in calls] == ["v"] * count
    assert load.calls == 1


@anyio_test
async def test_case_ca_03_waiters_get_an_error_each() -> None:
    """Case CA-03: one call; everybody gets the error's class, and nobody another one's traceback."""
    load = Gated(ConnectionError("down"))
    pipeline = B().add_cache(key=key_k).build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, load) for _ in range(10)]
        await tick()
        load.gate.set()
    errors: list[Exception] = [call.value.error for call in calls]
    assert load.calls == 1
    assert all(type(error) is ConnectionError for error in errors)
    assert len({id(error) for error in errors}) == 10
    assert {error.args for error in errors} == {("down",)}
    lengths = [traceback_length(error) for error in errors]
    assert max(lengths) < 2 * min(lengths)


@anyio_test
async def test_a_single_caller_gets_the_error_itself() -> None:
    """No copy is made where nobody else wants it."""
    error = ConnectionError("down")
    pipeline = B().add_cache().build()
    assert await raised_by(pipeline.execute, Scripted(error)) is error


@anyio_test
async def test_what_raises_by_itself_a_cancellation_is_nobody_elses() -> None:
    """A call that ends in a cancellation without being cancelled: those who waited do it again."""
    calls = 0
    gate = anyio.Event()

    async def load() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            await gate.wait()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await anyio.sleep_forever()
        return calls

    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        one, other = (spawn(tasks, pipeline.execute, load) for _ in range(2))
        await tick()
        gate.set()
    assert (one.value, other.value) == (1, 1)  # the scope was its own


@pytest.mark.asyncio
async def test_a_cancellation_of_its_own_making_goes_to_the_one_who_began() -> None:
    """On asyncio code may raise CancelledError by itself: as without a cache, for one caller."""
    calls = 0
    gate = anyio.Event()

    async def load() -> int:
        nonlocal calls
        calls += 1
        number = calls
        await gate.wait()
        if number == 1:
            raise asyncio.CancelledError
        return number

    pipeline = B().add_cache().build()
    tasks = [asyncio.create_task(pipeline.execute(load)) for _ in range(3)]
    await tick()
    gate.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert results[1:] == [2, 2]


@anyio_test
async def test_an_interrupt_comes_out_once() -> None:
    """KeyboardInterrupt ends the call of the one who began; whoever waited does it again."""

    class Interrupt(BaseException):
        """Not an Exception."""

    calls = 0
    gate = anyio.Event()

    async def load() -> int:
        nonlocal calls
        calls += 1
        number = calls
        await gate.wait()
        if number == 1:
            raise Interrupt
        return number

    pipeline = B().add_cache().build()
    caught: list[BaseException] = []

    async def first() -> None:
        try:
            await pipeline.execute(load)
        except Interrupt as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await tick()
        other = spawn(tasks, pipeline.execute, load)
        await tick()
        gate.set()
    assert len(caught) == 1
    assert other.value == 2


@anyio_test
async def test_a_call_that_wants_itself_runs_it() -> None:
    """A recursion with one key would wait for itself for ever; it goes past the cache."""
    depths: list[int] = []

    async def load() -> int:
        depths.append(len(depths))
        return 7 if len(depths) == 3 else await pipeline.execute(load)

    pipeline = B().add_cache().build()
    with anyio.fail_after(5):
        assert await pipeline.execute(load) == 7
        assert await pipeline.execute(load) == 7
    assert len(depths) == 3


@anyio_test
async def test_two_calls_that_want_each_other_end() -> None:
    """A waits for B and B for A: whoever would close the circle goes past the cache."""
    pipeline = B().add_cache().build()
    runs: list[str] = []

    async def load(mine: str, other: str) -> str:
        runs.append(mine)
        if len(runs) > 4:
            return mine
        await tick(3)
        return mine + await pipeline.execute(load, other, mine)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            one = spawn(tasks, pipeline.execute, load, "a", "b")
            other = spawn(tasks, pipeline.execute, load, "b", "a")
    assert one.value.startswith("ab")
    assert other.value.startswith("ba")


@anyio_test
async def test_a_child_of_one_call_waits_for_another() -> None:
    """What is no circle is waited for, also from inside of a call in flight."""
    inner = Gated("inner")
    pipeline = B().add_cache().build()

    async def outer(number: int) -> Any:
        return number, await pipeline.execute(inner)

    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, outer, number) for number in range(3)]
        await tick()
        inner.gate.set()
    assert [call.value for call in calls] == [(0, "inner"), (1, "inner"), (2, "inner")]
    assert inner.calls == 1


# ---- keys -------------------------------------------------------------------------------------


@anyio_test
async def test_equal_arguments_are_served_and_others_call() -> None:
    """Catalogue CA-1: the second call is served; other arguments, and another order, call."""
    load = Scripted(1, 2, 3, 4)
    pipeline = B().add_cache().build()
    assert [await pipeline.execute(load, "a") for _ in range(2)] == [1, 1]
    assert await pipeline.execute(load, "a", "b") == 2
    assert await pipeline.execute(load, "b", "a") == 3
    assert [await pipeline.execute(load) for _ in range(2)] == [4, 4]


@anyio_test
async def test_values_of_different_type_are_kept_apart() -> None:
    """Contract: `1`, `True` and `1.0` are three keys."""
    load = Scripted("int", "bool", "float")
    pipeline = B().add_cache().build()
    for _ in range(2):
        assert await pipeline.execute(load, 1) == "int"
        assert await pipeline.execute(load, True) == "bool"
        assert await pipeline.execute(load, 1.0) == "float"


@anyio_test
async def test_the_operation_key_and_the_function_are_part_of_the_key() -> None:
    """Contract: default `(operation_key, fn, args)`."""
    load, other = Scripted(1, 2), Scripted("other")
    pipeline = B().add_cache().build()
    assert await pipeline.execute(load, operation_key="a") == 1
    assert await pipeline.execute(load, operation_key="b") == 2
    assert await pipeline.execute(load, operation_key="a") == 1
    assert await pipeline.execute(other, operation_key="a") == "other"


@anyio_test
async def test_keyword_arguments_through_a_partial_and_wrap() -> None:
    """A partial is known by what it holds: wrapped functions with keyword arguments hit."""
    calls: list[int] = []
    pipeline = B().add_cache().build()

    @pipeline.wrap
    async def load(a: int, *, b: int = 0) -> int:
        calls.append(a)
        return a + b

    assert [await load(1, b=2), await load(1, b=2), await load(1, b=3)] == [3, 3, 4]
    assert len(calls) == 2

    async def plain(a: int, b: int) -> int:
        calls.append(a)
        return a - b

    assert [await pipeline.execute(partial(plain, 5), 3) for _ in range(2)] == [2, 2]
    assert len(calls) == 3


@anyio_test
async def test_unhashable_arguments_are_misuse_that_names_key() -> None:
    """Contract: unhashable arguments raise `MisuseError` naming `key=`; nothing is called."""
    load = Scripted(1)
    pipeline = B(name="svc").add_cache().build()
    outcome = await pipeline.settle(load, ["a"])
    assert isinstance(outcome.error, MisuseError)
    assert "key=" in str(outcome.error)
    assert "'svc'" in str(outcome.error)
    assert load.calls == 0


@anyio_test
async def test_a_key_that_cant_be_hashed_is_misuse() -> None:
    """The same for what `key=` gives."""

    def key(event: CacheKeyEvent) -> Any:
        return list(event.args)

    pipeline = B().add_cache(key=key).build()
    assert isinstance(await raised_by(pipeline.execute, Scripted(1), "a"), MisuseError)


@anyio_test
async def test_a_key_function_is_asked_once_a_call() -> None:
    """Catalogue CA-4: it collapses and distinguishes, and gets context, fn and args."""
    events: list[CacheKeyEvent] = []

    def by_first(event: CacheKeyEvent) -> Any:
        events.append(event)
        return event.args[0]

    load = Scripted(1, 2)
    pipeline = B().add_cache(key=by_first).build()
    assert await pipeline.execute(load, "a", ["x"]) == 1
    assert await pipeline.execute(load, "a", ["y"], operation_key="op") == 1
    assert await pipeline.execute(load, "b", ["x"]) == 2
    assert [event.args for event in events] == [("a", ["x"]), ("a", ["y"]), ("b", ["x"])]
    assert all(event.fn is load for event in events)
    assert events[1].context.operation_key == "op"


@anyio_test
async def test_a_key_may_be_a_coroutine_function() -> None:
    """Hooks, predicates and generators may be plain or coroutine functions."""

    async def key(event: CacheKeyEvent) -> Any:
        await tick(2)
        return event.args

    load = Scripted(1, 2)
    pipeline = B().add_cache(key=key).build()
    assert [await pipeline.execute(load, "a") for _ in range(2)] == [1, 1]


@anyio_test
async def test_an_error_of_the_key_function_comes_out() -> None:
    """It is an ordinary failure to what is outside of the cache."""

    def key(_: CacheKeyEvent) -> str:
        raise LookupError("no key")

    load = Scripted(1)
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).add_cache(key=key).build()
    assert isinstance(await raised_by(pipeline.execute, load), LookupError)
    assert load.calls == 0


@anyio_test
async def test_two_caches_are_two() -> None:
    """Catalogue CA-5: two builds are two caches; a cache in a cache works layer by layer."""
    load = Scripted(1, 2, 3)
    builder = B().add_cache()
    one, other = builder.build(), builder.build()
    assert [await one.execute(load), await other.execute(load)] == [1, 2]
    layered = B().add_cache(ttl=1).add_cache().build()
    assert [await layered.execute(load) for _ in range(3)] == [3, 3, 3]


@anyio_test
async def test_idempotence_is_no_part_of_the_key() -> None:
    """Catalogue CA-7: what concerns one call alone is neither key nor a reason not to serve it."""
    load = Scripted(1, 2)
    pipeline = B().add_cache().build()
    assert await pipeline.execute(load, idempotent=False) == 1
    assert await pipeline.execute(load, context=ResilienceContext()) == 1


# ---- what is stored ---------------------------------------------------------------------------


@anyio_test
@pytest.mark.parametrize("value", [None, False, 0, "", [], ()])
async def test_falsy_results_are_results(value: Any) -> None:
    """Case CA-03: None is a stored result, and so is everything else that is falsy."""
    load = Scripted(value, "another")
    pipeline = B().add_cache().build()
    assert [await pipeline.execute(load) for _ in range(2)] == [value, value]


@anyio_test
async def test_errors_are_not_stored_by_default() -> None:
    """Catalogue CA-3: a failure is forgotten, the next call is made."""
    load = Scripted(ConnectionError("down"), "up")
    pipeline = B().add_cache().build()
    assert isinstance(await raised_by(pipeline.execute, load), ConnectionError)
    assert await pipeline.execute(load) == "up"


@anyio_test
async def test_case_ca_03_stored_errors_are_raised_as_fresh_copies() -> None:
    """Case CA-03: one call, a thousand errors, none with a grown traceback."""
    load = Scripted(ConnectionError("down"), "up")
    pipeline = B().add_cache(cache_errors=True, key=key_k).build()
    errors = [(await pipeline.settle(load)).error for _ in range(1000)]
    assert load.calls == 1
    assert all(isinstance(error, ConnectionError) for error in errors)
    assert len({id(error) for error in errors}) == 1000
    assert errors[-1] is not None
    assert errors[1] is not None
    assert traceback_length(errors[-1]) == traceback_length(errors[1])


@anyio_test
async def test_a_stored_error_keeps_no_frame_alive() -> None:
    """What the failed call had in its hands is let go of."""

    class Thing:
        """Can be weakly referenced."""

    alive: list[weakref.ref[Thing]] = []

    async def load() -> None:
        thing = Thing()
        alive.append(weakref.ref(thing))
        try:
            raise LookupError("cause")
        except LookupError as cause:
            raise ConnectionError("down") from cause

    pipeline = B().add_cache(cache_errors=True).build()
    assert isinstance(await raised_by(pipeline.execute, load), ConnectionError)
    gc.collect()
    assert alive[0]() is None
    error = await raised_by(pipeline.execute, load)
    assert isinstance(error.__cause__, LookupError)
    assert len(alive) == 1


@anyio_test
async def test_the_cancellation_of_a_future_is_never_stored() -> None:
    """Contract: never cancellations; this one is an `Exception`, for calls and streams."""
    pipeline = B().add_cache(cache_errors=True).build()
    load = Scripted(futures.CancelledError(), "right")
    assert isinstance(await raised_by(pipeline.execute, load), futures.CancelledError)
    assert await pipeline.execute(load) == "right"
    opened = 0

    async def source() -> AsyncIterator[int]:
        nonlocal opened
        opened += 1
        yield 1
        raise futures.CancelledError

    for _ in range(2):
        with pytest.raises(futures.CancelledError):
            async for _chunk in pipeline.execute_stream(source):
                pass
    assert opened == 2


@anyio_test
async def test_a_misuse_is_never_stored() -> None:
    """A mistake in the calling program is no answer."""
    load = Scripted(MisuseError("wrong"), "right")
    pipeline = B().add_cache(cache_errors=True).build()
    assert isinstance(await raised_by(pipeline.execute, load), MisuseError)
    assert await pipeline.execute(load) == "right"


@anyio_test
async def test_cancellations_are_never_stored() -> None:
    """Catalogue CA-3: neither as a value nor, with `cache_errors`, as an error."""
    hanging = Hanging()
    control = CacheControl()
    pipeline = B().add_cache(cache_errors=True, control=control).build()
    for _ in range(2):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.execute, hanging)
                await tick()
                scope.cancel()
    assert (hanging.calls, hanging.cancelled) == (2, 2)
    assert control.statistics().size == 0


@anyio_test
async def test_the_least_recently_used_goes_first() -> None:
    """Catalogue CA-6: of two, a third evicts the first; a hit refreshes; size 1 works."""
    load = Scripted(*range(10))
    control = CacheControl()
    pipeline = B().add_cache(max_size=2, control=control).build()
    for name in "aba":
        await pipeline.execute(load, name)
    await pipeline.execute(load, "c")  # b goes
    assert load.calls == 3
    await pipeline.execute(load, "a")
    assert load.calls == 3
    await pipeline.execute(load, "b")
    assert load.calls == 4
    assert control.statistics().evictions == 2
    small = B().add_cache(max_size=1).build()
    assert [await small.execute(load, name) for name in "aabba"] == [4, 4, 5, 5, 6]


@anyio_test
async def test_a_call_in_flight_is_not_evicted() -> None:
    """Contract: an entry in flight is never evicted, however many others come."""
    load, others = Gated(), Scripted(*range(10))
    pipeline = B().add_cache(max_size=1).build()
    async with anyio.create_task_group() as tasks:
        one = spawn(tasks, pipeline.execute, load)
        await tick()
        for number in range(5):
            await pipeline.execute(others, number)
        other = spawn(tasks, pipeline.execute, load)
        await tick()
        load.gate.set()
    assert (one.value, other.value, load.calls) == ("v", "v", 1)


@anyio_test
async def test_an_old_failure_removes_no_fresh_result() -> None:
    """Defect 1.10-1: a call that was forgotten and fails late leaves its successor alone."""
    old = Gated(ConnectionError("late"))
    control = CacheControl()
    script: list[Any] = [old, Scripted("fresh")]
    pipeline = B().add_cache(key=key_k, control=control).build()
    async with anyio.create_task_group() as tasks:
        one = spawn(tasks, pipeline.settle, script[0])
        await tick()
        control.invalidate("k")
        assert await pipeline.execute(script[1]) == "fresh"
        old.gate.set()
    assert isinstance(one.value, Failure)
    assert await pipeline.execute(old) == "fresh"


# ---- time -------------------------------------------------------------------------------------


@anyio_test
async def test_ttl_counts_from_completion_and_ends_at_its_end() -> None:
    """Contract: age from completion, dropped once age ≥ ttl."""
    clock = VirtualClock()
    load = Scripted(1, 2, clock=clock, takes=5)
    pipeline = B(clock=clock).add_cache(ttl=10).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, load)
        await tick()
        await clock.advance(5)
        await tick()
        assert call.value == 1
        await clock.advance(9.999)
        assert await pipeline.execute(load) == 1
        await clock.advance(0.001)
        again = spawn(tasks, pipeline.execute, load)
        await tick()
        assert load.calls == 2
        await clock.advance(5)
    assert again.value == 2


@anyio_test
async def test_with_a_ttl_of_zero_only_calls_at_once_are_joined() -> None:
    """Nothing is stored, but what is stale may still be served when the call fails."""
    load = Gated()
    control = CacheControl()
    pipeline = B().add_cache(ttl=0, control=control).build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, load) for _ in range(3)]
        await tick()
        load.gate.set()
    assert ([call.value for call in calls], load.calls) == (["v"] * 3, 1)
    assert control.statistics().size == 0
    await pipeline.execute(load)
    assert load.calls == 2
    kept = B().add_cache(ttl=0, stale_if_error=60).build()
    failing = Scripted("old", ConnectionError("down"))
    assert [await kept.execute(failing) for _ in range(2)] == ["old", "old"]
    assert failing.calls == 2


@anyio_test
async def test_a_stale_value_is_served_when_refreshing_fails() -> None:
    """Contract: up to `stale_if_error` past its ttl, and the context tells of it."""
    clock = VirtualClock()
    control = CacheControl()
    down = ConnectionError("down")
    load = Scripted("old", down, down, down)
    pipeline = B(clock=clock).add_cache(ttl=10, stale_if_error=5, control=control).build()
    assert await pipeline.execute(load) == "old"
    for seconds in (10, 5):
        await clock.advance(seconds)
        context = ResilienceContext()
        assert await pipeline.execute(load, context=context) == "old"
        assert isinstance(context.properties.get(Cache.STALE), ConnectionError)
    assert load.calls == 3
    assert control.statistics().stale_hits == 2
    await clock.advance(0.001)
    assert isinstance(await raised_by(pipeline.execute, load), ConnectionError)


@anyio_test
async def test_what_is_served_stale_is_told_of() -> None:
    """`OnStale`, once for each call that was served so."""
    clock, heard = VirtualClock(), list[Any]()
    down = ConnectionError("down")
    pipeline = (
        B(name="api", clock=clock, listeners=[heard.append])
        .add_cache(ttl=10, stale_if_error=5)
        .build()
    )
    load = Scripted("old", down)
    await pipeline.execute(load, operation_key="op")
    await clock.advance(12)
    assert await pipeline.execute(load, operation_key="op") == "old"
    (event,) = [each for each in heard if isinstance(each, CacheStaleEvent)]
    assert (event.name, event.age, type(event.error)) == ("OnStale", 12, ConnectionError)
    assert (event.pipeline_name, event.strategy_name, event.operation_key) == ("api", "Cache", "op")


@anyio_test
async def test_a_fresh_value_leaves_no_mark_of_staleness() -> None:
    """The mark says that refreshing failed, and nothing else."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_cache(ttl=10, stale_if_error=5).build()
    load = Scripted("old", "new")
    await pipeline.execute(load)
    await clock.advance(11)
    context = ResilienceContext()
    assert await pipeline.execute(load, context=context) == "new"
    assert Cache.STALE not in context.properties


@anyio_test
async def test_everybody_who_waited_gets_the_stale_value() -> None:
    """One refresh that fails serves all who waited for it."""
    clock = VirtualClock()
    control = CacheControl()
    pipeline = B(clock=clock).add_cache(ttl=1, stale_if_error=5, key=key_k, control=control).build()
    await pipeline.execute(Scripted("old"))
    await clock.advance(2)
    refresh = Gated(ConnectionError("down"))
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, refresh) for _ in range(3)]
        await tick()
        refresh.gate.set()
    assert [call.value for call in calls] == ["old"] * 3
    assert refresh.calls == 1
    assert control.statistics().stale_hits == 3


@anyio_test
async def test_a_value_past_its_ttl_is_not_served_for_a_misuse_or_a_cancel() -> None:
    """Only a failed refresh is answered with what is stale."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_cache(ttl=1, stale_if_error=5, key=key_k).build()
    await pipeline.execute(Scripted("old"))
    await clock.advance(2)
    assert isinstance(await raised_by(pipeline.execute, Scripted(MisuseError("x"))), MisuseError)
    cancelled = Scripted(futures.CancelledError())
    assert isinstance(await raised_by(pipeline.execute, cancelled), futures.CancelledError)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        await tick()
        call.cancel()
    assert call.cancelled


@anyio_test
async def test_a_stored_error_is_never_served_as_stale() -> None:
    """`stale_if_error` keeps values, and with `cache_errors` a failed refresh does not replace one."""
    clock = VirtualClock()
    load = Scripted(ConnectionError("one"), ConnectionError("two"), "up", ConnectionError("three"))
    pipeline = B(clock=clock).add_cache(ttl=1, stale_if_error=5, cache_errors=True).build()
    assert str(await raised_by(pipeline.execute, load)) == "one"
    await clock.advance(1)
    assert str(await raised_by(pipeline.execute, load)) == "two"
    await clock.advance(1)
    assert await pipeline.execute(load) == "up"
    await clock.advance(1)
    assert await pipeline.execute(load) == "up"
    assert await pipeline.execute(load) == "up"
    assert load.calls == 5


# ---- by hand ----------------------------------------------------------------------------------


@anyio_test
async def test_invalidate_forgets_one_key() -> None:
    """By default the key is `(operation_key, fn, args)`."""
    load = Scripted(*range(10))
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    await pipeline.execute(load, "a")
    await pipeline.execute(load, "b")
    control.invalidate((None, load, ("a",)))
    assert await pipeline.execute(load, "b") == 1
    assert await pipeline.execute(load, "a") == 2


@anyio_test
@pytest.mark.parametrize("how", ["invalidate", "clear"])
async def test_forgetting_a_call_in_flight(how: str) -> None:
    """Contract: its callers get it, it isn't stored; who comes later does not get what may be old."""
    control = CacheControl()
    pipeline = B().add_cache(key=key_k, control=control).build()
    old = Gated("old")
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, old) for _ in range(2)]
        await tick()
        control.invalidate("k") if how == "invalidate" else control.clear()
        assert control.statistics().in_flight == 1
        assert await pipeline.execute(Scripted("new")) == "new"
        old.gate.set()
    assert [call.value for call in calls] == ["old", "old"]
    assert await pipeline.execute(old) == "new"


@anyio_test
async def test_one_control_drives_caches_built_before_and_after() -> None:
    """Contract: like a breaker's control it acts on every cache built with it."""
    control = CacheControl()
    load = Scripted(*range(10))
    pipelines = [B().add_cache(control=control).build() for _ in range(2)]
    for pipeline in pipelines:
        await pipeline.execute(load)
    assert control.statistics() == CacheStatistics(misses=2, size=2)
    control.clear()
    assert control.statistics().size == 0
    assert [await pipeline.execute(load) for pipeline in pipelines] == [2, 3]


def test_a_control_keeps_no_pipeline_alive() -> None:
    """What is driven is known weakly."""
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    assert repr(control) == "<CacheControl of 1 caches>"
    del pipeline
    gc.collect()
    assert repr(control) == "<CacheControl of 0 caches>"
    with pytest.raises(MisuseError, match="hashed"):
        control.invalidate([])


@anyio_test
async def test_statistics() -> None:
    """Hits are served or have joined, misses have called."""
    load = Gated()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            spawn(tasks, pipeline.execute, load)
        await tick()
        assert control.statistics() == CacheStatistics(hits=2, misses=1, in_flight=1)
        load.gate.set()
    await pipeline.execute(load)
    assert control.statistics() == CacheStatistics(hits=3, misses=1, size=1)


# ---- contexts ---------------------------------------------------------------------------------

NOTE: PropertyKey[str] = PropertyKey("note")
_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@anyio_test
async def test_the_call_runs_in_the_first_callers_context() -> None:
    """Context variables, properties, operation key and attempt are those of the one who began."""
    seen: list[Any] = []

    async def load() -> None:
        context = current_context()
        context.properties.set(NOTE, "written inside")
        seen.append((_variable.get(), context.operation_key, context.attempt))

    pipeline = B().add_cache().build()
    context = ResilienceContext(operation_key="op", properties={NOTE: "given"})
    _variable.set("mine")
    await pipeline.execute(load, context=context)
    assert seen == [("mine", "op", 0)]
    assert context.properties.get(NOTE) == "written inside"


@anyio_test
async def test_who_joins_has_a_context_of_its_own() -> None:
    """What the call writes is merged into the context of the one who began, and of nobody else."""
    gate = anyio.Event()

    async def load() -> None:
        await gate.wait()
        current_context().properties.set(NOTE, "inside")

    pipeline = B().add_cache().build()
    contexts = [ResilienceContext(), ResilienceContext()]
    async with anyio.create_task_group() as tasks:
        for context in contexts:
            spawn(tasks, partial(pipeline.execute, load, context=context))
            await tick()
        gate.set()
    assert NOTE in contexts[0].properties
    assert NOTE not in contexts[1].properties


@anyio_test
async def test_the_history_has_what_was_done_for_the_caller() -> None:
    """Attempts inside are the first caller's; who is served has made none."""
    load = Scripted(ConnectionError("down"), "up")
    pipeline = B().add_cache().add_retry(delay=0).build()
    first = await pipeline.settle(load)
    assert [type(attempt.outcome) for attempt in first.attempts] == [Failure, Success]
    assert first.attempt_count == 2
    served = await pipeline.settle(load)
    assert (served.unwrap(), served.attempt_count) == ("up", 0)


@anyio_test
async def test_a_rejection_inside_is_everybodys_own() -> None:
    """An inner strategy's refusal is `Rejected` for all who waited, and when it was stored."""
    pipeline = B().add_cache(key=key_k, cache_errors=True).add_timeout(0.01).build()
    hanging = Hanging()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, hanging) for _ in range(3)]
    later = await pipeline.settle(hanging)
    assert hanging.calls == 1
    for outcome in (*(call.value for call in calls), later):
        assert isinstance(outcome, Rejected)
        assert isinstance(outcome.error, TimeoutRejectedError)
        assert outcome.error.timeout == 0.01


@anyio_test
async def test_a_refusal_of_somebody_elses_pipeline_stays_a_failure() -> None:
    """What came out of the callback is no refusal of this pipeline's, for nobody."""
    load = Gated(BrokenCircuitError("theirs"))
    pipeline = B().add_cache().build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, load) for _ in range(2)]
        await tick()
        load.gate.set()
    assert [type(call.value) for call in calls] == [Failure, Failure]


@anyio_test
async def test_a_retry_outside_does_not_repeat_what_was_invoked_for_another() -> None:
    """`idempotent=False`: a call that was joined was invoked too."""
    load = Gated(ConnectionError("down"))
    pipeline = B().add_retry(delay=0).add_cache().build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, partial(pipeline.settle, load, idempotent=False)) for _ in range(2)]
        await tick()
        load.gate.set()
    assert load.calls == 1
    assert all(isinstance(call.value, Failure) for call in calls)


# ---- order ------------------------------------------------------------------------------------


@anyio_test
async def test_a_retry_inside_a_cache_stores_what_it_got_in_the_end() -> None:
    """Catalogue CO-1, cache(retry(fn)): the retried success is stored."""
    load = Scripted(ConnectionError(), "up", "never")
    pipeline = B().add_cache(cache_errors=True).add_retry(delay=0).build()
    assert [await pipeline.execute(load) for _ in range(2)] == ["up", "up"]
    assert load.calls == 2


@anyio_test
async def test_a_retry_outside_a_cache_that_keeps_errors_is_defeated() -> None:
    """Catalogue CO-1, retry(cache(fn, cache_errors)): the same error again, one call."""
    load = Scripted(ConnectionError("down"), "up")
    pipeline = B().add_retry(max_retry_attempts=3, delay=0).add_cache(cache_errors=True).build()
    outcome = await pipeline.settle(load)
    assert isinstance(outcome, Failure)
    assert (load.calls, outcome.attempt_count) == (1, 4)


@anyio_test
async def test_a_retry_outside_a_cache_that_keeps_no_errors_works() -> None:
    """Without `cache_errors` each retry calls."""
    load = Scripted(ConnectionError("down"), "up")
    pipeline = B().add_retry(delay=0).add_cache().build()
    assert await pipeline.execute(load) == "up"
    assert load.calls == 2


@anyio_test
async def test_a_timeout_outside_gives_up_for_its_caller_alone() -> None:
    """Per caller outside, per call inside: one limit passes, the call goes on for the other."""
    clock = VirtualClock()
    load = Scripted("v", clock=clock, takes=10)
    cached = B(clock=clock).add_cache().build()
    limited = B(clock=clock).add_timeout(5).add_pipeline(cached).build()
    async with anyio.create_task_group() as tasks:
        short = spawn(tasks, limited.settle, load)
        long = spawn(tasks, cached.settle, load)
        await tick()
        await clock.advance(5)
        await tick()
        assert isinstance(short.value, Rejected)
        await clock.advance(5)
    assert isinstance(long.value, Success)
    assert load.calls == 1


@anyio_test
async def test_a_limiter_inside_admits_the_call_and_not_its_callers() -> None:
    """One permit serves all who want the same."""
    load = Gated()
    pipeline = B().add_cache().add_concurrency_limiter(1).build()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, load) for _ in range(5)]
        await tick()
        load.gate.set()
    assert all(isinstance(call.value, Success) for call in calls)


# ---- options ----------------------------------------------------------------------------------


def test_every_bad_option_is_named() -> None:
    """Contract: one error lists them all."""
    with pytest.raises(OptionsError) as caught:
        Cache(
            max_size=0,
            ttl="soon",
            key="k",  # type: ignore[arg-type]
            cache_errors=1,  # type: ignore[arg-type]
            stale_if_error=-1,
            max_chunks=0,
            control="c",  # type: ignore[arg-type]
        )
    for name in (
        "max_size",
        "ttl",
        "key",
        "cache_errors",
        "stale_if_error",
        "max_chunks",
        "control",
    ):
        assert any(problem.startswith(f"{name} ") for problem in caught.value.problems), name


@pytest.mark.parametrize(
    "options",
    [{"stale_if_error": "5"}, {"max_chunks": True}, {"max_size": 1.5}, {"ttl": -1}],
)
def test_bad_options(options: dict[str, Any]) -> None:
    """Each is refused by its name."""
    with pytest.raises(OptionsError, match=next(iter(options))):
        Cache(**options)


def test_options_read_back() -> None:
    """Durations read back in seconds."""
    cache = Cache(ttl="1m", stale_if_error="30s", max_size=math.inf, max_chunks=3)
    assert (cache.ttl, cache.stale_if_error, cache.max_size, cache.max_chunks) == (
        60,
        30,
        math.inf,
        3,
    )
    assert repr(cache) == "Cache(max_size=math.inf, ttl=60.0, stale_if_error=30.0, max_chunks=3)"
    assert cache.name == "Cache"


# ---- memory -----------------------------------------------------------------------------------


@anyio_test
async def test_nothing_of_a_finished_call_is_kept_but_its_value() -> None:
    """Contexts, flights and errors are gone without the garbage collector."""

    class Thing:
        """Can be weakly referenced."""

    refs: list[weakref.ref[Any]] = []

    async def load() -> str:
        thing = Thing()
        refs.append(weakref.ref(thing))
        current_context().properties.set(PropertyKey("thing"), thing)
        return "v"

    async def fail() -> None:
        thing = Thing()
        refs.append(weakref.ref(thing))
        await tick(2)
        raise ConnectionError

    pipeline = B().add_cache().build()
    gc.collect()
    gc.disable()
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                spawn(tasks, pipeline.execute, load)
                tasks.start_soon(_settled, pipeline, fail)
        await tick()
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


async def _settled(pipeline: Any, fn: Any) -> None:
    await pipeline.settle(fn)


def test_it_can_be_pickled_where_its_options_can() -> None:
    """An option object without functions travels."""
    assert pickle.loads(pickle.dumps(Cache(ttl=5))).ttl == 5
