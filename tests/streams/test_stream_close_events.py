"""`OnCloseError`: closing a source that nobody will read has failed, which listeners alone get to know."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from resilience_pipeline import CloseErrorEvent, Failure, handle, handle_result
from resilience_pipeline.testing import VirtualClock, capture_events
from support.streaming import HANG, B, Closable, Running, drain, drain_within, tick

pytestmark = pytest.mark.anyio

is_bad = handle_result(lambda chunk: chunk == "bad")


async def stuck() -> None:
    raise RuntimeError("stuck")


def factory(*sources: Any) -> Callable[[], Any]:
    """A factory that gives these sources, one after another."""
    return iter(sources).__next__


def close_errors(events: list[Any]) -> list[CloseErrorEvent]:
    return [event for event in events if isinstance(event, CloseErrorEvent)]


def check_one(events: list[Any]) -> CloseErrorEvent:
    (event,) = close_errors(events)
    assert isinstance(event.outcome, Failure)
    assert isinstance(event.outcome.error, RuntimeError)
    assert str(event.outcome.error) == "stuck"
    assert event.pipeline_name == "p"
    return event


async def test_a_discarded_source_that_can_not_be_closed() -> None:
    """Its first chunk was handled: the next source is read as if nothing had been amiss."""
    sources = factory(Closable("bad", closing=stuck), Closable("good"))
    pipeline = B("p").add_retry(delay=0, should_handle=is_bad).build()
    with capture_events() as events:
        got = await drain(pipeline.execute_stream(sources, operation_key="op"))
    assert got == ["good"]
    assert check_one(events).operation_key == "op"


async def test_a_failed_source_that_can_not_be_closed() -> None:
    """It failed before its first chunk: the failure is handled, the closing's is told."""
    sources = factory(Closable(OSError("no"), closing=stuck), Closable("good"))
    pipeline = B("p").add_retry(delay=0).build()
    with capture_events() as events:
        assert await drain(pipeline.execute_stream(sources)) == ["good"]
    check_one(events)


async def test_a_loser_that_can_not_be_closed() -> None:
    """Of two sources, the one that was cancelled and gives trouble on its way out."""
    sources = factory(Closable(HANG, closing=stuck), Closable("good"))
    pipeline = B("p", clock=VirtualClock(autojump=True)).add_hedging(delay=1).build()
    with capture_events() as events:
        assert await drain(pipeline.execute_stream(sources)) == ["good"]
    check_one(events)


async def test_a_replaced_source_that_can_not_be_closed() -> None:
    """A fallback has given something else in its place."""
    pipeline = B("p").add_fallback(fallback_value="instead", should_handle=is_bad).build()
    with capture_events() as events:
        stream = pipeline.execute_stream(factory(Closable("bad", closing=stuck)))
        assert await drain(stream) == ["instead"]
    check_one(events)


async def test_past_the_line_the_failure_comes_out_and_the_closings_is_told() -> None:
    """The consumer gets the source's error, with a note; listeners get the closing's."""
    stream = B("p").build().execute_stream(factory(Closable("a", OSError("no"), closing=stuck)))
    with capture_events() as events, pytest.raises(OSError, match="no"):
        await drain(stream)
    check_one(events)


async def test_the_consumers_own_close_is_no_event() -> None:
    """What its cleanup raises comes out of the close, so somebody knows already."""
    stream = B("p").build().execute_stream(factory(Closable("a", "b", closing=stuck)))
    with capture_events() as events:
        assert await anext(stream) == "a"
        with pytest.raises(RuntimeError, match="stuck"):
            await stream.aclose()
    assert close_errors(events) == []


async def test_a_quiet_close_is_no_event() -> None:
    """Nothing is told of sources that close as they should."""
    sources = factory(Closable("bad"), Closable(OSError("no")), Closable("good"))
    pipeline = B("p").add_retry(delay=0, should_handle=is_bad | handle(OSError)).build()
    with capture_events() as events:
        assert await drain_within(pipeline.execute_stream(sources)) == ["good"]
    assert close_errors(events) == []


async def test_a_generators_own_failure_is_no_closing() -> None:
    """An async generator that fails has been closed by that."""

    async def fails() -> AsyncIterator[str]:
        try:
            raise OSError("no")
            yield "a"
        finally:
            await anyio.lowlevel.checkpoint()

    pipeline = B("p").add_retry(max_retry_attempts=1, delay=0).build()
    with capture_events() as events, pytest.raises(OSError, match="no"):
        await drain(pipeline.execute_stream(fails))
    assert close_errors(events) == []


async def test_a_close_that_takes_too_long() -> None:
    """Given up after `close_timeout`, which is told as the time-out that it is."""
    clock = VirtualClock(autojump=True)

    async def for_ever() -> None:
        await anyio.sleep_forever()

    sources = factory(Closable("bad", closing=for_ever), Closable("good"))
    pipeline = B("p", clock=clock, close_timeout=3).add_retry(delay=0, should_handle=is_bad).build()
    running = Running(drain, pipeline.execute_stream(sources))
    with capture_events() as events:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(running)
            await tick()
    assert running.value == ["good"]
    assert [type(event.outcome.error) for event in close_errors(events)] == [TimeoutError]
