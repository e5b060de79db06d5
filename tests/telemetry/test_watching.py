"""`capture_events()` and `disabled()`: all pipelines, all threads, until they exit."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    FixedWindow,
    MisuseError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    current_context,
)
from resilience_pipeline._switches import switches
from resilience_pipeline.testing import VirtualClock, capture_events, disabled
from support.calls import BoomError, boom, ok, running, tick

B = ResiliencePipelineBuilder


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert not switches.on


def failing() -> ResiliencePipeline[Any]:
    """A pipeline in which everything would act on a failure, and which lets nobody pass."""
    pipeline = (
        B("p", clock=VirtualClock())
        .add_fallback(fallback_value="instead")
        .add_rate_limiter(FixedWindow(1, "1h"))
        .add_circuit_breaker()
        .add_hedging(delay=0)
        .add_retry(delay=1)
        .add_timeout(1)
        .build()
    )
    pipeline.execute_sync(int)
    return pipeline


# ---- disabled -----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_calls_pass_straight_through() -> None:
    """No strategy has any part in them."""
    pipeline = failing()
    with disabled():
        assert await pipeline.execute(ok) == 1
        with pytest.raises(BoomError):
            await pipeline.execute(boom)
        assert pipeline.execute_sync(lambda x: x, 5) == 5
    assert await pipeline.execute(ok) == "instead"  # type: ignore[comparison-overlap]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pipeline",
    [B().add_retry(delay=0).build(), B().add_fallback(fallback_value=0).build()],
    ids=["retry", "fallback"],
)
async def test_failures_pass_straight_through_a_strategy_that_is_alone(pipeline: Any) -> None:
    """It has no part in a call before that fails, and none afterwards."""
    calls = 0

    async def fail() -> None:
        nonlocal calls
        calls += 1
        raise BoomError

    with disabled():
        with pytest.raises(BoomError):
            await pipeline.execute(fail)
        assert isinstance((await pipeline.settle(fail)).error, BoomError)
    assert calls == 2


@pytest.mark.anyio
async def test_a_call_on_its_way_is_repeated_all_the_same() -> None:
    """It had begun before, with a retry that has nothing to do until it fails."""
    calls = 0

    async def fail_once() -> int:
        nonlocal calls
        calls += 1
        await anyio.lowlevel.checkpoint()
        if calls == 1:
            block.__enter__()
            raise BoomError
        return calls

    block = disabled()
    try:
        assert await B().add_retry(delay=0).build().execute(fail_once) == 2
    finally:
        block.__exit__(None, None, None)


@pytest.mark.anyio
async def test_settling_gives_a_single_attempt() -> None:
    """As where no strategy makes attempts."""
    pipeline = failing()
    with disabled():
        for outcome in (await pipeline.settle(ok), pipeline.settle_sync(lambda: 1)):
            assert outcome == Success(1)
            assert outcome.attempt_count == len(outcome.attempts) == 1
        assert isinstance((await pipeline.settle(boom)).error, BoomError)


@pytest.mark.anyio
async def test_streams_pass_straight_through() -> None:
    """Their options included."""

    async def chunks() -> AsyncIterator[int]:
        yield 1
        yield 2

    pipeline = failing()
    with disabled():
        stream = pipeline.execute_stream(chunks, idle_timeout=1, commit_when=lambda chunk: False)
        assert [chunk async for chunk in stream] == [1, 2]
        with pipeline.execute_stream_sync(lambda: [1, 2], total_timeout=1) as synchronous:
            assert list(synchronous) == [1, 2]


@pytest.mark.anyio
async def test_wrapped_functions_pass_straight_through() -> None:
    """Wrapped before or within the block."""
    pipeline = failing()
    before = pipeline.wrap(boom)
    with disabled():
        with pytest.raises(BoomError):
            await before()
        assert await pipeline.wrap(ok)() == 1
        assert pipeline.wrap(len)([1]) == 1


@pytest.mark.anyio
async def test_pipelines_that_are_built_within_are_disabled() -> None:
    """So are nested ones, and those with listeners, who hear nothing."""
    events: list[Any] = []
    with disabled(), capture_events() as captured:
        inner = B(listeners=[events.append]).add_fallback(fallback_value=0).build()
        for pipeline in (inner, B().add_pipeline(inner).build()):
            with pytest.raises(BoomError):
                await pipeline.execute(boom)
    assert events == captured == []


@pytest.mark.anyio
async def test_a_call_on_its_way_meets_nested_pipelines_disabled() -> None:
    """What begins within the block is disabled; what has begun before goes on."""
    clock = VirtualClock()
    outer = (
        B(clock=clock)
        .add_retry(max_retry_attempts=1, delay=5)
        .add_pipeline(B().add_retry(max_retry_attempts=1, delay=5).build())
        .build()
    )
    calls = 0

    async def count() -> None:
        nonlocal calls
        calls += 1
        raise BoomError

    async with running(outer.settle, count):
        assert calls == 1
        with disabled():
            await clock.advance(5)  # the inner retry, which has begun, goes on
            assert calls == 2
            await clock.advance(5)  # the outer one too, but finds its inside disabled
            assert calls == 3
            await clock.advance(5)
            await tick()
            assert calls == 3


@pytest.mark.anyio
async def test_the_context_is_there_all_the_same() -> None:
    """`current_context()`, `operation_key` and misuse are no strategy's business."""

    async def look() -> tuple[str | None, str | None]:
        return current_context().pipeline_name, current_context().operation_key

    pipeline = failing()
    not_async: Any = int
    with disabled():
        assert await pipeline.execute(look, operation_key="op") == ("p", "op")
        with pytest.raises(MisuseError):
            await pipeline.execute(not_async)


def test_blocks_may_be_nested_and_reach_all_threads() -> None:
    """The last one to end ends it, whoever began."""
    pipeline = failing()

    def in_a_thread() -> list[object]:
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(pipeline.execute_sync(int)))
        thread.start()
        thread.join()
        return got

    first, second = disabled(), disabled()
    with first:
        second.__enter__()
        assert in_a_thread() == [0]
    assert in_a_thread() == [0]
    second.__exit__(None, None, None)
    assert in_a_thread() == ["instead"]


# ---- capture_events -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_captures_may_be_nested() -> None:
    """Each list has what happens in its own block."""
    with capture_events() as outer:
        await B("a").build().execute(ok)
        with capture_events() as inner:
            await B("b").build().execute(ok)
    await B("c").build().execute(ok)
    assert [event.pipeline_name for event in outer] == ["a", "a", "b", "b"]
    assert [event.pipeline_name for event in inner] == ["b", "b"]


@pytest.mark.anyio
async def test_a_block_that_raises_ends_the_capture() -> None:
    """And the list is still there to be looked at."""
    with pytest.raises(BoomError), capture_events() as events:
        await B().build().execute(boom)
    assert len(events) == 2


def test_what_happens_in_other_threads_is_captured() -> None:
    """On an event loop in another thread, and in synchronous calls."""
    pipeline = B("p").add_timeout(10).build()
    with capture_events() as events:
        thread = threading.Thread(target=lambda: anyio.run(pipeline.execute, ok))
        thread.start()
        thread.join()
        pipeline.execute_sync(int)
    assert [event.name for event in events] == ["PipelineExecuting", "PipelineExecuted"] * 2
