"""Retry budgets and streams: one first a stream, extras before the line and after it."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest

from resilience_pipeline import ResumeError, RetryBudget
from resilience_pipeline.testing import VirtualClock
from support.calls import running
from support.racing import After, Timed
from support.scripted import Scripted, raised_by
from support.streaming import HANG, B, Sources, collect, drain, tick

pytestmark = pytest.mark.anyio


def only(extras: int) -> RetryBudget:
    """A budget of so many extras in a thousand seconds, whatever the firsts."""
    return RetryBudget(ratio=0, min_per_second=extras / 1000, window=1000)


async def left(budget: RetryBudget, clock: VirtualClock | None = None) -> int:
    """How many extras there are; afterwards there are none."""
    fn = Scripted(ConnectionError)
    await raised_by(
        B(clock=clock)
        .add_retry(max_retry_attempts=math.inf, delay=0, budget=budget)
        .build()
        .execute,
        fn,
    )
    return fn.calls - 1


async def read_until_error(stream: Any) -> tuple[list[Any], Exception | None]:
    got: list[Any] = []
    try:
        async with stream:
            await collect(stream, got)
    except Exception as error:
        return got, error
    return got, None


# ---- retry ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_stream_is_tried_again_while_there_is_budget(resumable: bool) -> None:
    """Before the first chunk: two extras, then the error as it is."""
    sources = Sources([ConnectionError()])
    pipeline = (
        B().add_retry(max_retry_attempts=9, delay=0, resumable=resumable, budget=only(2)).build()
    )
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert (got, sources.calls) == ([], 3)
    assert isinstance(error, ConnectionError)


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_stream_is_one_first(resumable: bool) -> None:
    """Nine streams, one of which is run three times in all, and the call that asks: one extra."""
    budget = RetryBudget(ratio=0.1, min_per_second=0)
    pipeline = B().add_retry(delay=0, resumable=resumable, budget=budget).build()
    for _ in range(9):
        assert await drain(pipeline.execute_stream(Sources([1, 2]))) == [1, 2]
    assert await left(budget) == 1


async def test_nothing_counts_before_it_is_read() -> None:
    """A stream that nobody reads is no execution."""
    budget = RetryBudget(ratio=0.1, min_per_second=0)
    pipeline = B().add_retry(delay=0, budget=budget).build()
    for _ in range(20):
        await pipeline.execute_stream(Sources([1])).aclose()
    assert await left(budget) == 0


async def test_resumed_runs_are_extras_of_the_same_first() -> None:
    """Each run after a failure past the first chunk is charged, and adds no first."""
    budget = RetryBudget(ratio=0.5, min_per_second=0)
    pipeline = B().add_retry(max_retry_attempts=9, delay=0, resumable=True, budget=budget).build()
    for _ in range(3):
        await drain(pipeline.execute_stream(Sources([1])))
    sources = Sources([1, OSError()], [1, 2, OSError()], [1, 2, 3, OSError()])
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert isinstance(error, OSError)
    assert (got, sources.calls) == ([1, 2, 3], 3)  # four firsts: two extras


async def test_when_it_is_spent_after_the_line_the_error_reaches_the_loop() -> None:
    """`resumable`, nothing left: what the source failed with, and no second run."""
    failure = OSError("cut")
    sources = Sources([1, 2, failure], [1, 2, 3])
    pipeline = B().add_retry(delay=0, resumable=True, budget=only(0)).build()
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert error is failure
    assert (got, sources.calls) == ([1, 2], 1)


async def test_a_resumption_cancelled_in_the_wait_is_given_back() -> None:
    """The consumer leaves while the retry waits for the next run."""
    clock, budget = VirtualClock(), only(1)
    sources = Sources([1, OSError()])
    pipeline = B(clock=clock).add_retry(delay=60, resumable=True, budget=budget).build()
    got: list[Any] = []
    async with running(collect, pipeline.execute_stream(sources), got) as reading:
        assert got == [1]
        assert await left(budget, clock) == 0
        reading.cancel()
        await tick()
    assert await left(budget, clock) == 1


async def test_a_resumption_whose_function_fails_is_given_back() -> None:
    """`resumable` raises after the wait: nothing was run."""

    def fail(_: object) -> None:
        raise RuntimeError("no rest")

    budget = only(1)
    pipeline = B().add_retry(delay=0, resumable=fail, budget=budget).build()
    got, error = await read_until_error(pipeline.execute_stream(Sources([1, OSError()])))
    assert isinstance(error, RuntimeError)
    assert got == [1]
    assert await left(budget) == 1


async def test_a_run_that_differs_is_charged() -> None:
    """It was made, whatever it gave."""
    budget = only(1)
    pipeline = B().add_retry(delay=0, resumable=True, budget=budget).build()
    _, error = await read_until_error(pipeline.execute_stream(Sources([1, OSError()], [2, 3])))
    assert isinstance(error, ResumeError)
    assert await left(budget) == 0


# ---- hedging --------------------------------------------------------------------------------------


async def test_a_second_source_is_charged() -> None:
    """One hedge, for the first of two slow streams."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(2), "slow"])
    pipeline = B(clock=clock).add_hedging(delay=1, budget=only(1)).build()
    for _ in range(2):
        async with pipeline.execute_stream(sources) as stream:
            assert [chunk async for chunk in stream] == ["slow"]
    assert sources.calls == 3


async def test_a_spent_budget_leaves_the_first_source_alone() -> None:
    """No launch, no error, and nothing is closed but at the end."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(20), 1, After(20), 2])
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=5, delay=1, budget=only(0)).build()
    async with pipeline.execute_stream(sources) as stream:
        assert [chunk async for chunk in stream] == [1, 2]
    assert (sources.calls, sources.closed) == (1, 1)


async def test_retry_and_hedging_share_one_budget() -> None:
    """A source more for each extra, whoever asks for it."""
    sources = Sources([ConnectionError()])
    budget = only(4)
    pipeline = B().add_retry(delay=0, budget=budget).add_hedging(delay=-1, budget=budget).build()
    for _ in range(3):
        _, error = await read_until_error(pipeline.execute_stream(sources))
        assert isinstance(error, ConnectionError)
    assert sources.calls == 3 + 4


async def test_a_reader_that_leaves_in_mid_race_keeps_its_hedge() -> None:
    """The second source was opened: it is not given back."""
    clock, budget = VirtualClock(), only(1)
    sources = Sources([HANG])
    pipeline = B(clock=clock).add_hedging(delay=1, budget=budget).build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collect, pipeline.execute_stream(sources), [])
        await tick()
        await clock.advance(1)
        assert sources.calls == 2
        tasks.cancel_scope.cancel()
    assert await left(budget, clock) == 0
