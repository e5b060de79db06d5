"""`flaky`: what a script plays, to whoever calls it and however."""

from __future__ import annotations

import asyncio
import math
import pickle
import threading
import traceback
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    MisuseError,
    OptionsError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock, Wait, flaky, instant
from support.scripted import raised_by, spawn, tick

B = ResiliencePipelineBuilder
EMPTY = ResiliencePipeline.empty


async def read(source: Any) -> list[Any]:
    return [chunk async for chunk in source]


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_each_call_plays_the_next_item() -> None:
    """An exception is raised, by type or as it is, and a value returned; then comes `then`."""
    error = ValueError("as it is")
    fetch = flaky(ConnectionError, error, "page", None, then="other page")
    assert isinstance(await raised_by(fetch), ConnectionError)
    assert await raised_by(fetch) is error
    assert await fetch() == "page"
    assert await fetch() is None
    assert [await fetch() for _ in range(3)] == ["other page"] * 3


@pytest.mark.anyio
async def test_it_plays_in_a_pipeline() -> None:
    fetch = flaky(ConnectionError, TimeoutError, "page")
    outcome = await B().add_retry(delay=0).build().settle(fetch, "url")
    assert outcome.unwrap() == "page"
    assert outcome.attempt_count == 3


@pytest.mark.anyio
async def test_calls_are_recorded() -> None:
    """With their arguments, and the attempt they were made in."""
    fetch = flaky(ConnectionError, "page", then="page")
    pipeline = B().add_retry(delay=0).build()
    await pipeline.execute(partial(fetch, "url", timeout=3))
    await fetch()
    assert [call.args for call in fetch.calls] == [("url",), ("url",), ()]
    assert [call.kwargs for call in fetch.calls] == [{"timeout": 3}, {"timeout": 3}, {}]
    assert [call.attempt for call in fetch.calls] == [0, 1, None]


@pytest.mark.anyio
async def test_then_may_be_an_error() -> None:
    fetch = flaky("page", then=ConnectionError)
    assert await fetch() == "page"
    for _ in range(2):
        assert isinstance(await raised_by(fetch), ConnectionError)


@pytest.mark.anyio
async def test_a_script_that_is_over_is_misuse() -> None:
    """A retry does not go on for that."""
    fetch = flaky(ConnectionError)
    error = await raised_by(B().add_retry(delay=0).build().execute, fetch)
    assert isinstance(error, MisuseError)
    assert "call 2 of flaky(ConnectionError)" in str(error)
    assert "then=" in str(error)
    assert len(fetch.calls) == 2


@pytest.mark.anyio
async def test_what_is_raised_again_and_again_grows_no_traceback() -> None:
    fetch = flaky(then=ConnectionError("as it is"))
    lengths = set()
    for _ in range(5):
        lengths.add(len(traceback.extract_tb((await raised_by(fetch)).__traceback__)))
    assert len(lengths) == 1


@pytest.mark.asyncio
async def test_a_call_may_be_made_a_task() -> None:
    """What comes of a call is a coroutine to event loops."""
    fetch = flaky("page", ConnectionError, then=3)
    assert await asyncio.create_task(fetch()) == "page"
    assert isinstance(await raised_by(asyncio.create_task, fetch()), ConnectionError)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(fetch())
    assert call.result() == 3


@pytest.mark.anyio
async def test_a_call_may_be_started_in_a_task_group() -> None:
    fetch = flaky(then="page")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fetch, "url")
    assert len(fetch.calls) == 1


@pytest.mark.anyio
async def test_the_item_is_taken_by_the_call() -> None:
    """Not when that is awaited."""
    fetch = flaky("first", "second")
    first, second = fetch(), fetch()
    assert await second == "second"
    assert await first == "first"


# ---- waits --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_wait_goes_by_the_pipelines_clock() -> None:
    clock = VirtualClock(autojump=True)
    fetch = flaky(Wait("1h"), then="page")
    assert await B(clock=clock).build().execute(fetch) is None
    assert clock.now() == 3600


@pytest.mark.anyio
async def test_a_wait_may_be_followed_by_something() -> None:
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).build()
    fetch = flaky(Wait(1, "page"), Wait(2, then=ConnectionError), Wait(3, Wait(4, "late")))
    assert await pipeline.execute(fetch) == "page"
    assert isinstance(await raised_by(pipeline.execute, fetch), ConnectionError)
    assert await pipeline.execute(fetch) == "late"
    assert clock.now() == 10


@pytest.mark.anyio
async def test_a_time_limit_cuts_a_wait_short() -> None:
    pipeline = B(clock=VirtualClock(autojump=True)).add_timeout(10).build()
    assert isinstance(await raised_by(pipeline.execute, flaky(Wait(20))), TimeoutRejectedError)
    assert isinstance(
        await raised_by(pipeline.execute, flaky(Wait(math.inf))), TimeoutRejectedError
    )


@pytest.mark.anyio
async def test_a_wait_is_no_wait_of_a_strategy() -> None:
    """`instant` neither shortens nor lists it: it is the service's time."""
    clock = VirtualClock(autojump=True)
    with instant() as waits:
        await B(clock=clock).build().execute(flaky(Wait(20)))
    assert waits == []
    assert clock.now() == 20


@pytest.mark.anyio
async def test_a_wait_of_nothing_is_a_checkpoint() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await flaky(Wait(0, "page"))()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_a_wait_outside_of_a_pipeline_takes_its_time() -> None:
    assert await flaky(Wait("1ms", "page"))() == "page"


@pytest.mark.anyio
async def test_a_wait_leaves_nothing_behind_when_it_is_cancelled() -> None:
    clock = VirtualClock()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, B(clock=clock).build().execute, flaky(Wait(20)))
        await tick()
        assert clock.pending == 1
        call.cancel()
    assert call.cancelled
    assert clock.pending == 0


@pytest.mark.parametrize("seconds", [-1, "soon", None, math.nan])
def test_a_wait_takes_a_duration(seconds: Any) -> None:
    with pytest.raises(OptionsError, match="seconds must be a duration"):
        Wait(seconds)


def test_waits_are_values() -> None:
    assert Wait("1m") == Wait(60) == Wait(timedelta(minutes=1))
    assert repr(Wait(60)) == "Wait(60.0)"
    assert repr(Wait("1s", ConnectionError)) == "Wait(1.0, ConnectionError)"
    assert pickle.loads(pickle.dumps(Wait(1, "page"))) == Wait(1, "page")


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_list_is_streamed() -> None:
    tokens = flaky(ConnectionError, ["a", "b"])
    pipeline = B().add_retry(delay=0).build()
    assert await read(pipeline.execute_stream(tokens, "why?")) == ["a", "b"]
    assert [call.args for call in tokens.calls] == [("why?",), ("why?",)]


@pytest.mark.anyio
async def test_an_error_in_a_list_is_raised_where_it_stands() -> None:
    stream = EMPTY.execute_stream(flaky(["a", "b", ConnectionError, "c"]))
    assert [await anext(stream), await anext(stream)] == ["a", "b"]
    assert isinstance(await raised_by(partial(anext, stream)), ConnectionError)


@pytest.mark.anyio
async def test_a_wait_in_a_list_is_waited_where_it_stands() -> None:
    """It is no chunk; what comes `then` is one."""
    clock = VirtualClock(autojump=True)
    tokens = flaky(["a", Wait(5), "b", Wait(3, "c")])
    times = []
    async for chunk in B(clock=clock).build().execute_stream(tokens):
        times.append((chunk, clock.now()))
    assert times == [("a", 0), ("b", 5), ("c", 8)]


@pytest.mark.anyio
async def test_a_stream_may_be_slow_to_begin() -> None:
    tokens = flaky(Wait(20, ["late"]), ["in time"])
    pipeline = B(clock=VirtualClock(autojump=True)).add_retry(delay=0).add_timeout(10).build()
    assert await read(pipeline.execute_stream(tokens)) == ["in time"]


@pytest.mark.anyio
async def test_chunks_may_be_anything_but_errors_and_waits() -> None:
    """Lists within the list are chunks."""
    chunks = [None, "", [1, ConnectionError], 0]
    assert await read(EMPTY.execute_stream(flaky(chunks))) == chunks
    assert await read(EMPTY.execute_stream(flaky([]))) == []


@pytest.mark.anyio
async def test_a_source_of_ones_own_is_handed_on() -> None:
    closed: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed.append("closed")

    async with EMPTY.execute_stream(flaky(source())) as stream:
        assert await anext(stream) == 1
    assert closed == ["closed"]


@pytest.mark.anyio
async def test_a_value_is_no_stream() -> None:
    error = await raised_by(read, EMPTY.execute_stream(flaky("page")))
    assert isinstance(error, MisuseError)
    assert "list of its chunks" in str(error)


@pytest.mark.anyio
async def test_it_stands_in_for_a_function_the_callback_calls() -> None:
    """For an async generator function, and for a coroutine function that gives a stream."""
    service = flaky(["a", Wait(5), "b"], ["a", Wait(5), "b"])

    async def directly() -> AsyncIterator[str]:
        async for chunk in service("why?"):
            yield chunk

    async def awaited() -> AsyncIterator[str]:
        answer = await service("why?")
        async for chunk in answer:
            yield chunk

    pipeline = B(clock=VirtualClock(autojump=True)).build()
    assert await read(pipeline.execute_stream(directly)) == ["a", "b"]
    assert await read(pipeline.execute_stream(awaited)) == ["a", "b"]


@pytest.mark.anyio
async def test_a_list_that_is_awaited_is_a_list() -> None:
    assert await EMPTY.execute(flaky(["a", "b"])) == ["a", "b"]


@pytest.mark.anyio
async def test_a_resumable_stream_goes_on() -> None:
    tokens = flaky(["a", "b", ConnectionError], ["a", "b", "c"])
    pipeline = B().add_retry(delay=0, resumable=True).build()
    assert await read(pipeline.execute_stream(tokens)) == ["a", "b", "c"]


@pytest.mark.anyio
async def test_a_race_of_streams_closes_the_loser() -> None:
    tokens = flaky([Wait(math.inf)], ["hedged"])
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    async with pipeline.execute_stream(tokens) as stream:
        assert await read(stream) == ["hedged"]
    assert clock.pending == 0


# ---- in threads ---------------------------------------------------------------------------------


def test_in_a_synchronous_call_it_plays_at_once() -> None:
    clock = VirtualClock(autojump=True)
    fetch = flaky(ConnectionError, Wait(20), Wait(3, "page"))
    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(10).build()
    assert pipeline.execute_sync(fetch, "url") == "page"
    assert [(call.args, call.attempt) for call in fetch.calls] == [
        (("url",), 0),
        (("url",), 1),
        (("url",), 2),
    ]


def test_in_a_synchronous_stream_too() -> None:
    clock = VirtualClock(autojump=True)
    tokens = flaky(ConnectionError, ["a", Wait(5), "b"], ["c", ConnectionError])
    pipeline = B(clock=clock).add_retry(delay=0).build()
    assert list(pipeline.execute_stream_sync(tokens)) == ["a", "b"]
    assert clock.now() == 5
    stream = pipeline.execute_stream_sync(tokens)
    assert next(stream) == "c"
    with pytest.raises(ConnectionError):
        next(stream)


def test_outside_of_any_loop_it_plays_at_once() -> None:
    fetch = flaky("page", ["a", "b"], ["a", ConnectionError], Wait("1ms"), KeyError)
    assert fetch() == "page"
    assert fetch() == ["a", "b"]
    assert next(iter(fetch())) == "a"
    assert fetch() is None
    with pytest.raises(KeyError):
        fetch()


@pytest.mark.anyio
async def test_in_a_thread_beside_a_loop_it_plays_at_once() -> None:
    """The execution around is async, but nothing can be awaited there."""
    fetch = flaky("page")

    async def callback() -> Any:
        await checkpoint()
        return await anyio.to_thread.run_sync(fetch)

    assert await EMPTY.execute(callback) == "page"


@pytest.mark.anyio
async def test_a_synchronous_call_in_a_loop_plays_at_once() -> None:
    assert EMPTY.execute_sync(flaky("page")) == "page"


def test_each_of_many_threads_gets_an_item_of_its_own() -> None:
    items = list(range(400))
    fetch = flaky(*items)
    got: list[int] = []

    def work() -> None:
        for _ in range(50):
            got.append(fetch())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == items
    assert len(fetch.calls) == 400


def test_it_reads_like_the_call() -> None:
    assert repr(flaky()) == "flaky()"
    assert (
        repr(flaky(ConnectionError, [1], Wait(1), then="page"))
        == "flaky(ConnectionError, [1], Wait(1.0), then='page')"
    )
