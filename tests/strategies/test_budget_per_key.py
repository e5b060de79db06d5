"""`RetryBudget(key=...)`: a budget for each key, and what is let go of them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilience_pipeline import (
    KeysExceededEvent,
    MisuseError,
    OptionsError,
    PropertyKey,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    RetryBudget,
    RetryBudgetExhaustedEvent,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.scripted import Scripted, spawn, tick

B = ResiliencePipelineBuilder

ANYIO = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


def by_operation(context: ResilienceContext) -> str | None:
    return context.operation_key


def only(extras: int, **options: Any) -> RetryBudget:
    """A budget of so many extras in a thousand seconds for each key, whatever the firsts."""
    made: dict[str, Any] = {"key": by_operation, **options}
    return RetryBudget(ratio=0, min_per_second=extras / 1000, window=1000, **made)


def keys_of(budget: RetryBudget) -> list[Any]:
    """The keys that are kept."""
    counted = budget._account.counted
    return [] if counted is None else [key for key, _ in counted.items()]


async def failed(pipeline: ResiliencePipeline[Any], fn: Any, **options: Any) -> None:
    """Make a call that fails however often it is tried."""
    assert isinstance((await pipeline.settle(fn, **options)).error, ConnectionError)


async def extras(clock: VirtualClock, budget: RetryBudget, key: str | None) -> int:
    """How many a call is granted that would like a thousand; afterwards there are none."""
    fn = Scripted(ConnectionError)
    pipeline = B(clock=clock).add_retry(max_retry_attempts=1000, delay=0, budget=budget).build()
    await failed(pipeline, fn, operation_key=key)
    return fn.calls - 1


# ---- apart, and shared -----------------------------------------------------------------------------


@ANYIO
async def test_each_key_has_a_budget_of_its_own(clock: VirtualClock) -> None:
    """What one has spent the others still have; `None` is a key like any other."""
    budget = only(3)
    for key in ("a", "b", None):
        assert await extras(clock, budget, key) == 3
        assert await extras(clock, budget, key) == 0


@ANYIO
async def test_firsts_count_for_their_key_alone(clock: VirtualClock) -> None:
    """Thirty calls of one and ten of the other: three extras, and one."""
    budget = RetryBudget(ratio=0.1, min_per_second=0, key=by_operation)
    pipeline = B(clock=clock).add_retry(budget=budget).build()
    for key, calls in (("a", 29), ("b", 9)):
        for _ in range(calls):
            await pipeline.execute(Scripted("value"), operation_key=key)
    assert await extras(clock, budget, "a") == 3
    assert await extras(clock, budget, "b") == 1
    assert await extras(clock, budget, "c") == 0


@ANYIO
async def test_retries_and_hedges_of_all_pipelines_share_a_key_s_budget(
    clock: VirtualClock,
) -> None:
    """Whoever is given the object; a key of one is the same key to the others."""
    budget = only(5)
    fn = Scripted(ConnectionError)
    retry = B(clock=clock).add_retry(max_retry_attempts=2, delay=0, budget=budget).build()
    hedging = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=-1, budget=budget).build()
    for pipeline in (retry, hedging):
        await failed(pipeline, fn, operation_key="a")
    assert fn.calls == 6
    assert await extras(clock, budget, "a") == 1
    assert await extras(clock, budget, "b") == 5


@ANYIO
async def test_the_key_is_asked_for_once_and_holds_for_the_execution(clock: VirtualClock) -> None:
    """What the function writes into the context does not have it spend what others were counted for."""
    tenant = PropertyKey[str]("tenant")
    asked: list[str] = []

    def key(context: ResilienceContext) -> str:
        asked.append(context.properties[tenant])
        return asked[-1]

    budget = only(2, key=key)
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget).build()

    async def fn() -> None:
        current_context().properties.set(tenant, "other")
        raise ConnectionError

    await failed(pipeline, fn, context=ResilienceContext(properties={tenant: "a"}))
    assert asked == ["a"]
    assert keys_of(budget) == ["a"]


@ANYIO
async def test_a_refusal_is_told_as_ever(clock: VirtualClock) -> None:
    """`OnBudgetExhausted`, for the key that has none left."""
    heard: list[Any] = []
    pipeline = B(clock=clock, listeners=[heard.append]).add_retry(delay=0, budget=only(1)).build()
    for key in "ab":
        await pipeline.settle(Scripted(ConnectionError), operation_key=key)
    refused = [each for each in heard if isinstance(each, RetryBudgetExhaustedEvent)]
    assert [each.operation_key for each in refused] == ["a", "b"]


@ANYIO
async def test_what_was_never_made_is_given_back_to_its_key(clock: VirtualClock) -> None:
    """Cancelled in the wait; and the strategy remembers nothing of it."""
    budget = only(1)
    pipeline = B(clock=VirtualClock()).add_retry(delay=60, budget=budget).build()
    async with anyio.create_task_group() as tasks:
        scope = spawn(tasks, pipeline.execute, Scripted(ConnectionError))
        await tick()
        scope.cancel()
    assert await extras(clock, budget, None) == 1


@ANYIO
async def test_a_stream_counts_for_its_key(clock: VirtualClock) -> None:
    """One that goes on after its first chunk spends of the same budget."""
    budget = only(1)
    pipeline = B(clock=clock).add_retry(delay=0, budget=budget, resumable=True).build()
    runs = 0

    async def source() -> AsyncIterator[int]:
        nonlocal runs
        runs += 1
        yield 1
        raise ConnectionError

    async def read() -> None:
        async with pipeline.execute_stream(source, operation_key="a") as stream:
            async for _ in stream:
                pass

    with pytest.raises(ConnectionError):
        await read()
    assert runs == 2
    assert await extras(clock, budget, "b") == 1


@ANYIO
async def test_a_pipeline_that_has_itself_inside(clock: VirtualClock) -> None:
    """It comes to the same strategies twice in one context, and leaves them one by one."""
    budget = only(2)
    inner = B(clock=clock).add_retry(max_retry_attempts=1, delay=0, budget=budget).build()
    twice = B(clock=clock).add_pipeline(inner).add_pipeline(inner).build()
    fn = Scripted(ConnectionError)
    await failed(twice, fn, operation_key="a")
    assert fn.calls == 3


# ---- letting go ----------------------------------------------------------------------------------


@ANYIO
async def test_the_least_recently_used_idle_key_goes(clock: VirtualClock) -> None:
    """Idle means that nothing is in its window."""
    budget = RetryBudget(window=10, key=by_operation, max_keys=2)
    pipeline = B(clock=clock).add_retry(budget=budget).build()
    for key in "ab":
        await pipeline.execute(Scripted(1), operation_key=key)
    await clock.sleep(10)
    await pipeline.execute(Scripted(1), operation_key="a")
    await pipeline.execute(Scripted(1), operation_key="c")
    assert keys_of(budget) == ["a", "c"]


@ANYIO
async def test_what_is_not_idle_stays_beyond_max_keys_and_is_told_of(clock: VirtualClock) -> None:
    """Forgetting what is in a window would change an answer."""
    heard: list[Any] = []
    budget = RetryBudget(window=10, key=by_operation, max_keys=2)
    pipeline = B(clock=clock, listeners=[heard.append]).add_retry(budget=budget).build()
    for key in "abcc":
        await pipeline.execute(Scripted(1), operation_key=key)
    assert keys_of(budget) == ["a", "b", "c"]
    (event,) = [each for each in heard if isinstance(each, KeysExceededEvent)]
    assert (event.key, event.keys, event.max_keys) == ("c", 3, 2)
    assert event.strategy_name == "Retry"


@ANYIO
async def test_a_key_that_nobody_used_for_long_goes_when_another_one_comes(
    clock: VirtualClock,
) -> None:
    """After `key_idle`, though there is room for it."""
    budget = RetryBudget(window=10, key=by_operation, key_idle="1m")
    pipeline = B(clock=clock).add_retry(budget=budget).build()
    await pipeline.execute(Scripted(1), operation_key="a")
    await clock.sleep(59)
    await pipeline.execute(Scripted(1), operation_key="b")
    assert keys_of(budget) == ["a", "b"]
    await clock.sleep(1)
    await pipeline.execute(Scripted(1), operation_key="c")
    assert keys_of(budget) == ["b", "c"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdefgh"), st.booleans(), st.sampled_from([0.0, 0.3, 1, 2.5, 7])
        ),
        max_size=80,
    )
)
def test_forgetting_never_changes_an_answer(steps: list[tuple[str, bool, float]]) -> None:
    """Eight keys, of which two are kept, against a budget without `key` for each of them."""

    async def run() -> None:
        clock = VirtualClock(autojump=True)

        def budget(**options: Any) -> RetryBudget:
            return RetryBudget(ratio=0.5, min_per_second=0.2, window=5, **options)

        small = budget(key=by_operation, max_keys=2, key_idle=3)
        apart = {key: budget() for key in "abcdefgh"}
        for key, fails, pause in steps:
            made: list[int] = []
            for each in (small, apart[key]):
                fn = Scripted(ConnectionError if fails else 1)
                pipeline = B(clock=clock).add_retry(delay=0, budget=each).build()
                await pipeline.settle(fn, operation_key=key)
                made.append(fn.calls)
            assert made[0] == made[1]
            if pause:
                await clock.sleep(pause)

    anyio.run(run)


# ---- what can go wrong ---------------------------------------------------------------------------


@ANYIO
@pytest.mark.parametrize("key", [["a"], {}, set()])
async def test_a_key_that_cannot_be_hashed_is_a_misuse(key: Any) -> None:
    """The message names the option."""
    pipeline = B().add_retry(budget=RetryBudget(key=lambda _: key)).build()
    with pytest.raises(MisuseError, match="key="):
        await pipeline.execute(Scripted(1))


@ANYIO
async def test_a_coroutine_function_is_no_key() -> None:
    """It is asked for each call, which must not wait for it."""

    async def key(_: ResilienceContext) -> str:
        return "a"

    pipeline = B().add_hedging(budget=RetryBudget(key=key)).build()
    with pytest.raises(MisuseError, match="key="):
        await pipeline.execute(Scripted(1))


@ANYIO
async def test_what_a_key_function_raises_comes_out() -> None:
    """Nothing was called, and nothing is counted."""
    budget = only(1, key=lambda context: context.properties[PropertyKey[str]("missing")])
    fn = Scripted(1)
    with pytest.raises(LookupError):
        await B().add_retry(budget=budget).build().execute(fn)
    assert fn.calls == 0
    assert keys_of(budget) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [({"key": "host"}, "key"), ({"max_keys": 0}, "max_keys"), ({"key_idle": 0}, "key_idle")],
)
def test_bad_options_are_refused(options: dict[str, Any], told: str) -> None:
    """By name."""
    with pytest.raises(OptionsError, match=told):
        RetryBudget(**options)


# ---- threads -------------------------------------------------------------------------------------


def test_sixteen_threads_make_exactly_what_each_key_is_granted() -> None:
    """Keys come all the time, most of which are let go; those that have spent are not."""
    budget = RetryBudget(
        ratio=0, min_per_second=20 / 100_000, window=100_000, key=by_operation, max_keys=3
    )
    pipeline = B().add_retry(max_retry_attempts=2, delay=0, budget=budget).build()
    lock, calls = threading.Lock(), dict[str, int]()
    start = threading.Barrier(16)

    def body() -> None:
        start.wait(20)
        for number in range(40):
            key = f"k{number % 8}"

            def fails(key: str = key) -> None:
                with lock:
                    calls[key] = calls.get(key, 0) + 1
                raise ConnectionError

            pipeline.settle_sync(fails, operation_key=key)

    threads = [threading.Thread(target=body) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == {f"k{number}": 16 * 5 + 20 for number in range(8)}


def test_a_window_is_not_let_go_between_being_found_and_being_counted_in() -> None:
    """A window of next to no time: keys go as fast as they come, in sixteen threads."""
    budget = RetryBudget(ratio=1, min_per_second=0, window=1e-6, key=by_operation, max_keys=1)
    pipeline = B().add_retry(max_retry_attempts=1, delay=0, budget=budget).build()
    start, outcomes = threading.Barrier(16), list[bool]()

    def body() -> None:
        start.wait(20)
        for number in range(200):
            outcomes.append(pipeline.settle_sync(lambda: 1, operation_key=f"k{number % 5}").ok)

    threads = [threading.Thread(target=body) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 3200
