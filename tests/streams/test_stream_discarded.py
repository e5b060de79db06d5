"""Sources that have given their first chunk and are not handed over: discarded, replaced, or lost by a strategy."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    ResilienceContext,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    handle_result,
)
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.testing import VirtualClock
from support.streaming import HANG, B, Running, Sources, collect, drain, drain_within, tick

pytestmark = pytest.mark.anyio

is_bad = handle_result(lambda chunk: chunk == "bad")


# ---- results ----------------------------------------------------------------------------------


async def test_a_first_chunk_that_is_handled_is_retried() -> None:
    """Streams, in small print: for `handle_result` a stream's result is its first chunk."""
    sources = Sources(["bad", "more"], ["good", "more"])
    pipeline = B().add_retry(delay=0, should_handle=is_bad).build()
    assert await drain(pipeline.execute_stream(sources)) == ["good", "more"]
    assert (sources.calls, sources.closed, sources.peak) == (2, 2, 1)


async def test_only_the_first_chunk_is_asked_about() -> None:
    """Streams: after the first chunk, nothing."""
    sources = Sources(["good", "bad"])
    pipeline = B().add_retry(delay=0, should_handle=is_bad).build()
    assert await drain(pipeline.execute_stream(sources)) == ["good", "bad"]
    assert sources.calls == 1


async def test_the_last_handled_first_chunk_is_handed_over_open() -> None:
    """Retry: the last outcome comes out as it is; the returned result is never closed."""
    sources = Sources(["bad", "more"])
    pipeline = B().add_retry(max_retry_attempts=1, delay=0, should_handle=is_bad).build()
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "bad"
    assert (sources.calls, sources.closed) == (2, 1)
    assert await drain(stream) == ["more"]


async def test_a_discarded_source_is_closed_before_the_wait() -> None:
    """Case ST-17: close first, then wait, then try again."""
    clock = VirtualClock()
    sources = Sources(["bad", "more"], ["good"])
    pipeline = B(clock=clock).add_retry(delay=10, should_handle=is_bad).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        assert (sources.opened, sources.closed) == (1, 1)
        await clock.advance(10)
    assert running.value == ["good"]


async def test_a_handled_first_chunk_stays_open_while_hooks_look_at_it() -> None:
    """Small print: a handled result stays open while predicates, hooks and actions look at it."""
    sources = Sources(["bad", "more"], ["good"])
    seen: list[tuple[Any, int]] = []

    def look(event: Any) -> None:
        seen.append((event.outcome.unwrap(), sources.closed))

    pipeline = B().add_retry(delay=0, should_handle=is_bad, on_retry=look).build()
    assert await drain(pipeline.execute_stream(sources)) == ["good"]
    assert seen == [("bad", 0)]


async def test_a_handled_first_chunk_is_replaced_by_a_fallback() -> None:
    """Fallback: a replaced handled result is closed, before the substitute is iterated."""
    primary, backup = Sources(["bad", "more"]), Sources(["x", "y"])
    closed_before: list[int] = []

    def action(event: Any) -> Any:
        assert event.outcome.unwrap() == "bad"
        assert primary.closed == 0
        return watched()

    async def watched() -> Any:
        closed_before.append(primary.closed)
        async for chunk in backup():
            yield chunk

    pipeline = B().add_fallback(action, should_handle=is_bad).build()
    assert await drain(pipeline.execute_stream(primary)) == ["x", "y"]
    assert closed_before == [1]


async def test_a_handled_first_chunk_counts_for_the_breaker() -> None:
    """Circuit breaker: a handled result is a failure; its stream is handed over all the same."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control, should_handle=is_bad).build()
    assert await drain(pipeline.execute_stream(Sources(["bad", "more"]))) == ["bad", "more"]
    assert control.metrics.failures == 1


async def test_an_empty_streams_result_is_none() -> None:
    """Streams: an empty stream has no first chunk; a predicate of results sees `None`."""
    seen: list[Any] = []

    def look(result: Any) -> bool:
        seen.append(result)
        return False

    pipeline = B().add_retry(delay=0, should_handle=handle_result(look)).build()
    assert await drain(pipeline.execute_stream(Sources([]))) == []
    assert seen == [None]


async def test_an_empty_stream_can_be_discarded() -> None:
    """Streams: a predicate may take an empty stream for a failure."""
    sources = Sources([], ["good"])
    pipeline = B().add_retry(delay=0, should_handle=handle_result(lambda r: r is None)).build()
    assert await drain(pipeline.execute_stream(sources)) == ["good"]
    assert (sources.calls, sources.closed) == (2, 2)


# ---- user code that raises after the first chunk ----------------------------------------------


def _fail(_: object) -> Any:
    raise LookupError("hook")


BUILDERS: dict[str, Any] = {
    "retry predicate": lambda: B().add_retry(delay=0, should_handle=_fail),
    "retry hook": lambda: B().add_retry(delay=0, should_handle=is_bad, on_retry=_fail),
    "retry generator": lambda: B().add_retry(should_handle=is_bad, delay_generator=_fail),
    "breaker predicate": lambda: B().add_circuit_breaker(should_handle=_fail),
    "fallback predicate": lambda: B().add_fallback(fallback_value=1, should_handle=_fail),
    "fallback hook": lambda: B().add_fallback(
        fallback_value=1, should_handle=is_bad, on_fallback=_fail
    ),
    "fallback action": lambda: B().add_fallback(_fail, should_handle=is_bad),
}


@pytest.mark.parametrize("name", BUILDERS)
async def test_an_error_of_user_code_closes_the_source_and_comes_out(name: str) -> None:
    """Design, rule 4: a value nobody will receive is closed: here the caller gets the hook's error."""
    sources = Sources(["bad", "more"])
    builder: ResiliencePipelineBuilder[Any] = BUILDERS[name]()
    with pytest.raises(LookupError, match="hook"):
        await drain(builder.build().execute_stream(sources))
    assert (sources.calls, sources.closed) == (1, 1)


async def test_a_hook_that_raises_after_a_good_probe_closes_its_source() -> None:
    """More small print: the transition stands, the hook's error surfaces, and the stream is lost: closed."""
    clock, control = VirtualClock(autojump=True), CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, control=control, on_closed=_fail
        )
        .build()
    )
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await drain(pipeline.execute_stream(Sources([ConnectionError()])))
    await clock.sleep(5)
    sources = Sources(["good", "more"])
    with pytest.raises(LookupError, match="hook"):
        await drain(pipeline.execute_stream(sources))
    assert sources.closed == 1
    assert control.state == "closed"


async def test_cancelled_while_a_predicate_looks_at_the_first_chunk() -> None:
    """Design, rule 4: the winner's value is closed when the caller has gone."""
    sources = Sources(["chunk", "more"])

    async def slow(_: object) -> bool:
        await anyio.sleep_forever()
        return False

    for builder in (
        B().add_retry(should_handle=slow),
        B().add_circuit_breaker(should_handle=slow),
        B().add_fallback(fallback_value=1, should_handle=slow),
    ):
        async with anyio.create_task_group() as tasks:
            running = Running(drain_within, builder.build().execute_stream(sources))
            tasks.start_soon(running)
            await tick()
            assert sources.open == 1
            running.cancel()
            await tick()
            assert running.cancelled
            assert sources.open == 0


async def test_closed_by_another_task_while_a_predicate_looks_at_the_first_chunk() -> None:
    """Streams: `aclose()` before the first chunk has been handed over ends the reader's loop cleanly."""
    sources = Sources(["chunk", "more"])

    async def slow(_: object) -> bool:
        await anyio.sleep_forever()
        return False

    stream = B().add_retry(should_handle=slow).build().execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        await tick()
        assert (running.value, running.error) == ([], None)
    assert sources.open == 0


async def test_a_limit_that_passes_while_a_predicate_looks_at_the_first_chunk() -> None:
    """Design, rule 4: late values are closed."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["chunk", "more"])

    async def slow(_: object) -> bool:
        await clock.sleep(10)
        return False

    pipeline = B(clock=clock).add_timeout(2).add_retry(should_handle=slow).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(sources))
    assert sources.closed == 1


# ---- strategies of one's own ------------------------------------------------------------------


class Own(Strategy[Any]):
    """Does with what is inside whatever `act` says."""

    def __init__(self, act: Any) -> None:
        self.name = "own"
        self._act = act

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            return await self._act(next, context)

        return handle


async def test_what_a_strategy_loses_is_closed() -> None:
    """Design, rule 4: a strategy that calls twice and returns the second: the first is closed."""
    sources = Sources(["first", "more"], ["second", "more"])

    async def twice(inside: Handler, context: ResilienceContext) -> Any:
        await inside(context)
        return await inside(context)

    pipeline = B().add(Own(twice)).build()
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "second"
    assert (sources.opened, sources.closed) == (2, 1)
    assert await drain(stream) == ["more"]
    assert sources.closed == 2


async def test_what_a_strategy_loses_to_an_error_is_closed() -> None:
    """Design, rule 4: a strategy that raises after the first chunk leaves nothing open."""
    sources = Sources(["first", "more"])

    async def fail(inside: Handler, context: ResilienceContext) -> Any:
        await inside(context)
        raise LookupError("own")

    with pytest.raises(LookupError, match="own"):
        await drain(B().add(Own(fail)).build().execute_stream(sources))
    assert sources.closed == 1


async def test_what_a_strategy_loses_to_a_cancellation_is_closed() -> None:
    """Design, rule 4: when the caller has gone, every one of them is closed."""
    sources = Sources(["chunk", "more"])

    async def hold(inside: Handler, context: ResilienceContext) -> Any:
        await inside(context)
        await inside(context)
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, B().add(Own(hold)).build().execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        assert sources.open == 2
        running.cancel()
        await tick()
        assert running.cancelled
        assert sources.open == 0


async def test_a_strategy_may_give_a_value_of_its_own() -> None:
    """Streams: a value in place of a stream becomes one chunk, an async iterable is iterated."""
    backup = Sources([1, 2])

    async def value(inside: Handler, context: ResilienceContext) -> Any:
        return "value"

    async def stream(inside: Handler, context: ResilienceContext) -> Any:
        return backup()

    assert await drain(B().add(Own(value)).build().execute_stream(Sources([]))) == ["value"]
    assert await drain(B().add(Own(stream)).build().execute_stream(Sources([]))) == [1, 2]
    assert backup.closed == 1


# ---- arguments --------------------------------------------------------------------------------


async def test_a_second_connect_with_a_used_up_argument_is_refused() -> None:
    """Retry, arguments: a second attempt with a generator among `args` is refused, from the failure."""

    async def source(body: Any) -> Any:
        list(body)
        raise OSError("first")
        yield

    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(TypeError, match="exhausted argument") as caught:
        await drain(pipeline.execute_stream(source, (part for part in "ab")))
    assert str(caught.value.__cause__) == "first"


async def test_chunks_that_were_delivered_stay_delivered() -> None:
    """Case ST-01: what a consumer has taken it keeps, once."""
    sources = Sources(["a", "b", OSError("late")], ["never"])
    got: list[str] = []
    pipeline = B().add_fallback(fallback_value="spare").add_retry(delay=0).build()
    with pytest.raises(OSError, match="late"):
        await collect(pipeline.execute_stream(sources), got)
    assert (got, sources.calls) == (["a", "b"], 1)


async def test_a_hanging_stream_does_not_keep_others_from_being_read() -> None:
    """Streams: streams of one pipeline are independent of each other."""
    pipeline = B().add_retry().add_circuit_breaker().add_timeout("1h").build()
    async with anyio.create_task_group() as tasks:
        hanging = Running(drain, pipeline.execute_stream(Sources([HANG])))
        tasks.start_soon(hanging)
        await tick()
        assert await drain(pipeline.execute_stream(Sources([1, 2]))) == [1, 2]
        hanging.cancel()
