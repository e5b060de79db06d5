"""Streams that race: the first source to yield wins, and of the others nothing is left (cases ST-19, HG-03)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    MisuseError,
    PercentileDelay,
    PropertyKey,
    ResilienceContext,
    ResilienceStream,
    TimeoutRejectedError,
    current_context,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.inside import free_permits
from support.racing import After, Each, Timed, nothing_reported, stubborn
from support.streaming import (
    HANG,
    B,
    Closable,
    Managed,
    Running,
    Sources,
    collect,
    drain,
    drain_within,
    tick,
)

pytestmark = pytest.mark.anyio

is_bad = handle_result(lambda chunk: chunk == "bad")


# ---- who wins ---------------------------------------------------------------------------------


async def test_with_delay_zero_a_source_that_speaks_without_waiting_is_the_only_one() -> None:
    """Hedging, in small print: a first attempt that completes without suspending starts no hedge."""
    sources = Sources(["a", "b"])
    pipeline = B().add_hedging(max_hedged_attempts=3, delay=0).build()
    for _ in range(10):
        async with pipeline.execute_stream(sources) as stream:
            assert [chunk async for chunk in stream] == ["a", "b"]
    assert (sources.calls, sources.closed) == (10, 10)


async def test_the_first_to_yield_wins() -> None:
    """Case ST-19: the loser is cancelled, closed and awaited before the first chunk is handed out."""
    clock = VirtualClock()
    sources = Timed(clock, [HANG], ["second:1", "second:2", "second:3"])
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=1, delay=1).build()
    stream = pipeline.execute_stream(sources)
    closed_when_handed_out: list[int] = []

    async def first() -> str:
        chunk: str = await anext(stream)
        closed_when_handed_out.append(sources.closed)
        return chunk

    async with anyio.create_task_group() as tasks:
        running = Running(first)
        tasks.start_soon(running)
        await clock.advance(0.5)
        assert sources.opened == 1
        await clock.advance(1)
        assert running.value == "second:1"
    assert closed_when_handed_out == [1]
    assert sources.opened_at == [0, 1]
    assert [chunk async for chunk in stream] == ["second:2", "second:3"]
    assert (sources.calls, sources.closed) == (2, 2)


async def test_slow_first_and_fast_second_give_the_seconds_chunks_alone() -> None:
    """B-8: only the second's chunks, also where the first one would speak later; the first is cancelled."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(5), "first"], [After(1), "a", After(9), "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.closed_at == [2, 11]


async def test_a_first_source_that_speaks_first_wins_in_spite_of_the_hedge() -> None:
    """Streams, hedging: the first to yield wins, whichever was opened first."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(2), "a", "b"], [After(5), "hedge"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert (sources.opened, sources.closed) == (2, 2)


async def test_a_source_that_speaks_in_time_is_not_hedged() -> None:
    """Streams, hedging: a second source if the first is slow to yield; after the first chunk, nothing."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(0.5), "a", After(60), "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.calls == 1


@pytest.mark.parametrize("hedges", [1, 2, 10])
async def test_all_losers_are_closed(hedges: int) -> None:
    """HG-01, case ST-19: however many there are."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, *[[HANG]] * hedges, ["won", "more"])
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=hedges, delay=1).build()
    async with pipeline.execute_stream(sources) as stream:
        assert await anext(stream) == "won"
        assert (sources.opened, sources.open) == (hedges + 1, 1)
        assert await anext(stream) == "more"
    assert sources.opened_at == list(range(hedges + 1))
    assert sources.open == 0


@pytest.mark.parametrize("delay", [1, 0])
async def test_the_lowest_number_wins_where_several_speak_at_once(delay: float) -> None:
    """Winner: simultaneous: lowest number first; a loser that has its first chunk already is closed."""
    clock = VirtualClock()
    both = anyio.Event()
    sources = Sources([both, "first", "more"], [both, "second", "more"])
    pipeline = B(clock=clock).add_hedging(delay=delay).build()
    stream = pipeline.execute_stream(sources)
    open_when_handed_out: list[int] = []

    async def read() -> list[Any]:
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            open_when_handed_out.append(sources.open)
        return chunks

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await clock.advance(1)
        assert sources.open == 2
        both.set()
        await tick()
        assert running.done
    # trio runs those who are ready in any order, so that there the second may really be first.
    assert running.value in (["first", "more"], ["second", "more"])
    if _on_asyncio():
        assert running.value == ["first", "more"]
    assert open_when_handed_out == [1, 1]
    assert sources.closed == 2


def _on_asyncio() -> bool:
    with suppress(RuntimeError):
        return asyncio.get_running_loop() is not None
    return False


async def test_a_handled_first_chunk_starts_the_next_source_at_once() -> None:
    """Streams, in small print: for `handle_result` a stream's result is its first chunk."""
    clock = VirtualClock()
    sources = Sources(["bad", "more"], ["good", "more"])
    pipeline = B(clock=clock).add_hedging(delay="1h", should_handle=is_bad).build()
    async with pipeline.execute_stream(sources) as stream:
        assert await anext(stream) == "good"
        assert (sources.opened, sources.closed) == (2, 1)
        assert await anext(stream) == "more"
    assert (sources.calls, sources.closed) == (2, 2)
    assert clock.now() == 0


async def test_if_all_first_chunks_are_handled_the_first_source_is_handed_over_open() -> None:
    """HG-05: all handled: the first attempt's outcome; here a source that is open still, to its end."""
    sources = Sources(["bad", "of the first"], ["bad", "of the second"], ["bad", "of the third"])
    pipeline = B().add_hedging(max_hedged_attempts=2, delay="1h", should_handle=is_bad).build()
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "bad"
    assert (sources.opened, sources.closed) == (3, 2)
    assert await drain(stream) == ["of the first"]
    assert sources.closed == 3


@pytest.mark.parametrize("value", [None, 0, "", False])
async def test_a_falsy_first_chunk_wins(value: object) -> None:
    """Streams: a `None` or falsy chunk is a chunk."""
    sources = Sources([HANG], [value, "more"])
    pipeline = B().add_hedging(delay=0).build()
    assert await drain(pipeline.execute_stream(sources)) == [value, "more"]
    assert sources.closed == 2


async def test_an_empty_stream_wins() -> None:
    """Streams: a source that ends without a chunk is a successful, empty stream."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG], [])
    stream = B(clock=clock).add_hedging(delay=1).build().execute_stream(sources)
    assert await drain(stream) == []
    assert stream.committed
    assert (sources.opened, sources.closed) == (2, 2)


# ---- failures ---------------------------------------------------------------------------------


async def test_a_failed_source_is_closed_and_the_next_starts_at_once() -> None:
    """HG-09, case ST-17: a failure before the first chunk doesn't wait for the delay."""
    clock = VirtualClock()
    sources = Timed(clock, [ConnectionError("first")], ["a", "b"])
    pipeline = B(clock=clock).add_hedging(delay="1h").build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert (sources.peak, sources.closed, clock.now()) == (1, 2, 0)


async def test_one_at_a_time_they_never_overlap() -> None:
    """HG-11: below zero the next starts only after a handled outcome, however long that takes."""
    clock = VirtualClock(autojump=True)
    sources = Timed(
        clock, [After(100), ConnectionError("1")], [After(100), ConnectionError("2")], ["a"]
    )
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=-1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a"]
    assert sources.peak == 1
    assert (sources.opened_at, sources.closed) == ([0, 100, 200], 3)


async def test_a_failure_does_not_end_the_race() -> None:
    """Case HG-05: the failed one goes, the other goes on and wins."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(1.5), ConnectionError("first")], [After(2), "a", "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.closed_at == [1.5, 3]


@pytest.mark.parametrize("last", ["first", "second"])
async def test_if_all_fail_the_first_sources_error_comes_out(last: str) -> None:
    """HG-05, HG-06: whichever finished last, as it is, and never a group."""
    clock = VirtualClock(autojump=True)
    errors = [ConnectionError("first"), ConnectionError("second")]
    takes = (9, 1) if last == "first" else (2, 5)
    sources = Timed(clock, *([After(t), e] for t, e in zip(takes, errors, strict=True)))
    stream = B(clock=clock).add_hedging(delay=1).build().execute_stream(sources)
    with nothing_reported():
        with pytest.raises(ConnectionError) as caught:
            await drain(stream)
        assert caught.value is errors[0]
        assert not stream.committed
        assert (sources.calls, sources.closed) == (2, 2)
        assert await anext(stream, "over") == "over"


@pytest.mark.parametrize("number", [0, 1])
async def test_an_error_that_is_not_handled_wins(number: int) -> None:
    """HG-07, HG-08: it surfaces at once, the other source is closed."""
    clock = VirtualClock(autojump=True)
    scripts: list[list[Any]] = [[HANG], [HANG]]
    scripts[number] = [After(3), ValueError("mine")]
    sources = Timed(clock, *scripts)
    pipeline = B(clock=clock).add_hedging(delay=1, should_handle=ConnectionError).build()
    with pytest.raises(ValueError, match="mine"):
        await drain(pipeline.execute_stream(sources))
    assert clock.now() == 3 + number
    assert (sources.opened, sources.closed) == (2, 2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("number", [0, 1])
async def test_a_base_exception_ends_the_race_as_itself(
    kind: type[BaseException], number: int
) -> None:
    """Hedging, in small print: a `BaseException` of one attempt ends the call as itself; the others are closed."""
    scripts: list[list[Any]] = [[HANG], [HANG]]
    go = anyio.Event()
    scripts[number] = [go, kind("mine")]
    sources = Sources(*scripts)
    pipeline = B().add_fallback(fallback_value=1).add_retry(delay=0).add_hedging(delay=0).build()
    caught: list[BaseException] = []

    async def read() -> None:
        try:
            await drain(pipeline.execute_stream(sources))
        except BaseException as error:
            caught.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await tick()
        assert sources.open == 2
        go.set()
    assert [type(error) for error in caught] == [kind]
    assert (sources.calls, sources.closed) == (2, 2)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_a_base_exception_of_the_winner_reaches_the_loop(kind: type[BaseException]) -> None:
    """Streams: after commit errors pass as they are, from the owner task to the reader as well."""
    sources = Sources([HANG], ["a", kind("mine")])
    got: list[Any] = []
    with pytest.raises(kind, match="mine"):
        await collect(B().add_hedging(delay=0).build().execute_stream(sources), got)
    assert (got, sources.closed) == (["a"], 2)


async def test_a_group_of_the_sources_own_comes_out_by_identity() -> None:
    """Hedging, in small print: a group the callback itself raised comes out by identity."""
    group = ExceptionGroup("mine", [ConnectionError("1"), ConnectionError("2")])
    sources = Sources([group], [ConnectionError("other")])
    with pytest.raises(ExceptionGroup) as caught:
        await drain(B().add_hedging(delay="1h").build().execute_stream(sources))
    assert caught.value is group


# ---- past the line ----------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, "1h"])
async def test_after_the_first_chunk_nothing_is_repeated(delay: Any) -> None:
    """Case ST-01: the error reaches the consumer's loop as it is; there may be the hedge, never a retry."""
    late = OSError("late")
    sources = Sources([1, 2, late])
    pipeline = (
        B().add_fallback(fallback_value=9).add_retry(delay=0).add_hedging(delay=delay).build()
    )
    got: list[int] = []
    with pytest.raises(OSError, match="late") as caught:
        await collect(pipeline.execute_stream(sources), got)
    assert caught.value is late
    assert got == [1, 2]
    assert sources.calls <= 2
    assert sources.closed == sources.opened


async def test_a_gap_after_the_first_chunk_is_not_hedged() -> None:
    """Streams, hedging: after the first chunk: –."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG], ["a", After(1000), "b"])
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=5, delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.calls == 2


async def test_committed_tells_when_a_source_has_won() -> None:
    """Streams: `stream.committed` tells which side of the line one is on."""
    clock = VirtualClock()
    stream = (
        B(clock=clock).add_hedging(delay=1).build().execute_stream(Timed(clock, [HANG], ["a", "b"]))
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(anext, stream))
        await clock.advance(0.5)
        assert not stream.committed
        await clock.advance(1)
        assert stream.committed
    await stream.aclose()


# ---- the losers' end --------------------------------------------------------------------------


async def test_the_chunk_is_handed_out_when_the_losers_cleanup_has_ended() -> None:
    """Case ST-19: the loser is awaited before the first chunk is handed out."""
    clock = VirtualClock()
    log: list[str] = []
    winner = Sources(["a", "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()

    async def read() -> None:
        async for chunk in pipeline.execute_stream(Each(stubborn(clock, 3, log), winner)):
            log.append(chunk)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await clock.advance(3.5)
        assert (winner.opened, log) == (1, [])
        await clock.advance(0.5)
        assert log == ["closed", "a", "b"]


async def test_a_caller_cancelled_while_losers_end_takes_the_winner_with_it() -> None:
    """Design, rule 4: the winner's value is closed when the caller has gone; all are awaited."""
    clock = VirtualClock()
    log: list[str] = []
    winner = Sources(["a", "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    async with anyio.create_task_group() as tasks:
        running = Running(
            drain_within, pipeline.execute_stream(Each(stubborn(clock, 3, log), winner))
        )
        tasks.start_soon(running)
        await clock.advance(2)
        assert winner.open == 1
        running.cancel()
        await tick()
        assert not running.done
        await clock.advance(2)
        assert running.cancelled
        assert log == ["closed"]
        assert winner.closed == 1


@pytest.mark.parametrize("how", ["hangs", "raises"])
async def test_what_goes_wrong_in_closing_a_loser_that_spoke_reaches_nobody(how: str) -> None:
    """Losers: errors of closing something discarded are swallowed, and it takes `close_timeout` at the most."""
    clock = VirtualClock(autojump=True)

    async def closing() -> None:
        if how == "raises":
            raise OSError("closing")
        await anyio.sleep_forever()

    both = anyio.Event()
    closables = [Closable(both, 1, 2, closing=closing), Closable(both, 1, 2, closing=closing)]
    pipeline = B(clock=clock, close_timeout=7).add_hedging(delay=1).build()
    stream = pipeline.execute_stream(Each(*(partial(_same, each) for each in closables)))
    with nothing_reported():
        async with anyio.create_task_group() as tasks:
            running = Running(anext, stream)
            tasks.start_soon(running)
            await clock.sleep(2)
            both.set()
            await clock.sleep(8)
            assert running.value == 1
            assert sum(each.closings for each in closables) == 1
        await _close_whatever_comes(stream, clock)
        assert [each.closings for each in closables] == [1, 1]


def _same(value: Any) -> Any:
    return value


async def _close_whatever_comes(stream: ResilienceStream[Any], clock: VirtualClock) -> None:
    async with anyio.create_task_group() as tasks:
        running = Running(stream.aclose)
        tasks.start_soon(running)
        await clock.sleep(1)
        running.cancel()


async def test_a_loser_that_fails_when_it_is_cancelled_reaches_nobody() -> None:
    """Case HG-07: no noise from the losers: nothing in the loop's handler, no group, no note."""

    async def fails_on_cancel() -> AsyncIterator[str]:
        try:
            await anyio.sleep_forever()
            yield ""
        finally:
            raise OSError("in cleanup")

    pipeline = B().add_hedging(max_hedged_attempts=2, delay=0).build()
    factory = Each(fails_on_cancel, fails_on_cancel, Sources(["a", "b"]))
    with nothing_reported():
        assert await drain(pipeline.execute_stream(factory)) == ["a", "b"]


async def test_a_loser_that_speaks_when_it_is_cancelled_is_closed() -> None:
    """Design, rule 4: what comes late is closed; it is never handed out in the winner's place."""
    closed: list[str] = []

    async def answers_the_cancel() -> AsyncIterator[str]:
        try:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                yield "late"
                yield "later"
        finally:
            closed.append("loser")

    pipeline = B().add_hedging(delay=0).build()
    factory = Each(answers_the_cancel, Sources(["a", "b"]))
    async with pipeline.execute_stream(factory) as stream:
        assert await anext(stream) == "a"
        assert closed == ["loser"]
        assert await drain(stream) == ["b"]


async def test_a_losers_manager_is_left_with_its_cancellation() -> None:
    """Streams: a source's context manager gets the error in `__aexit__`; the winner's is left at its end."""
    managers = [Managed(Sources([HANG])()), Managed(Sources(["a", "b"])())]
    pipeline = B().add_hedging(delay=0).build()
    async with pipeline.execute_stream(Each(*(partial(_same, m) for m in managers))) as stream:
        assert await anext(stream) == "a"
        assert [manager.left for manager in managers] == [1, 0]
        (told,) = managers[0].told
        assert isinstance(told, anyio.get_cancelled_exc_class())
    assert managers[1].told == [None]


async def test_a_loser_that_is_still_connecting_is_cancelled() -> None:
    """Streams: the factory may be a coroutine function: its connecting is part of the race."""
    cancelled: list[bool] = []

    async def connects_for_ever() -> AsyncIterator[str]:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            cancelled.append(True)
            raise
        raise AssertionError

    pipeline = B().add_hedging(delay=0).build()
    stream = pipeline.execute_stream(Each(connects_for_ever, Sources(["a", "b"])))
    assert await anext(stream) == "a"
    assert cancelled == [True]
    assert await drain(stream) == ["b"]


# ---- properties and contexts ------------------------------------------------------------------


SEEN = PropertyKey[int]("seen")
LOST = PropertyKey[int]("lost")
LATE = PropertyKey[int]("late")
var: ContextVar[str] = ContextVar("var", default="unset")


async def test_what_the_winner_writes_before_its_first_chunk_is_merged() -> None:
    """Hedging, in small print: for streams what is written before commit; nothing of the losers'."""
    clock = VirtualClock(autojump=True)

    async def source() -> AsyncIterator[int]:
        mine = current_context()
        mine.properties.set(SEEN, mine.attempt)
        if mine.attempt == 0:
            mine.properties.set(LOST, 0)
            await anyio.sleep_forever()
        yield mine.attempt
        mine.properties.set(LATE, mine.attempt)
        yield -1

    context = ResilienceContext(properties={SEEN: 99})
    bag = context.properties
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(source, context=context)) == [1, -1]
    assert context.properties is bag
    assert bag.get(SEEN) == 1
    assert LOST not in bag
    assert LATE not in bag


async def test_each_raced_source_has_a_context_and_variables_of_its_own_to_its_end() -> None:
    """Case HG-09: `current_context()` and the variables of the first pull hold inside each source to its end."""
    clock = VirtualClock(autojump=True)
    log: list[tuple[str, int, str]] = []
    contexts: list[ResilienceContext] = []

    async def source() -> AsyncIterator[int]:
        mine = current_context()
        contexts.append(mine)
        log.append(("opened", mine.attempt, var.get()))
        token = var.set(f"inner {mine.attempt}")
        try:
            if mine.attempt == 0:
                await anyio.sleep_forever()
            yield 1
            assert current_context() is mine
            log.append(("read", mine.attempt, var.get()))
            yield 2
        finally:
            assert current_context() is mine
            log.append(("closed", mine.attempt, var.get()))
            var.reset(token)

    outer = ResilienceContext()
    outside = var.set("outer")
    try:
        pipeline = B(clock=clock).add_hedging(delay=1).build()
        async with pipeline.execute_stream(source, context=outer) as stream:
            async for _ in stream:
                assert var.get() == "outer"
                with pytest.raises(LookupError):
                    current_context()
    finally:
        var.reset(outside)
    assert log == [
        ("opened", 0, "outer"),
        ("opened", 1, "outer"),
        ("closed", 0, "inner 0"),
        ("read", 1, "inner 1"),
        ("closed", 1, "inner 1"),
    ]
    assert len({id(each) for each in (outer, *contexts)}) == 3


# ---- among other strategies -------------------------------------------------------------------


async def test_a_fallbacks_value_replaces_a_lost_race() -> None:
    """Streams, fallback: a value becomes one chunk."""
    sources = Sources([ConnectionError("early")])
    pipeline = B().add_fallback(fallback_value="spare").add_hedging(delay=0).build()
    assert await drain(pipeline.execute_stream(sources)) == ["spare"]
    assert (sources.calls, sources.closed) == (2, 2)


async def test_a_fallbacks_stream_replaces_a_lost_race() -> None:
    """Streams, fallback: an async iterable is iterated and closed, all raced sources being closed before."""
    sources, backup = Sources([ConnectionError("early")]), Sources(["x", "y"])
    closed: list[int] = []

    async def watched() -> AsyncIterator[Any]:
        closed.append(sources.closed)
        async for chunk in backup():
            yield chunk

    pipeline = B().add_fallback(lambda _: watched()).add_hedging(delay="1h").build()
    assert await drain(pipeline.execute_stream(sources)) == ["x", "y"]
    assert (closed, backup.closed) == ([2], 1)


async def test_a_fallback_inside_wins_the_race() -> None:
    """Streams, fallback: a fallback's stream is primed like any other, in the attempt's own task."""
    sources, backup = Sources([HANG], [ConnectionError("early")]), Sources(["x", "y"])
    pipeline = B().add_hedging(delay=0).add_fallback(lambda _: backup()).build()
    assert await drain(pipeline.execute_stream(sources)) == ["x", "y"]
    assert (sources.closed, backup.closed) == (2, 1)


async def test_a_retry_outside_runs_the_race_again() -> None:
    """Streams, retry: all sources of a lost race are closed before the pause."""
    clock = VirtualClock()
    sources = Timed(clock, *[[ConnectionError(str(n))] for n in range(3)], ["a", "b"])
    pipeline = B(clock=clock).add_retry(delay=10).add_hedging(delay=-1).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await clock.advance(5)
        assert (sources.opened, sources.closed) == (2, 2)
        await clock.advance(5)
        assert running.value == ["a", "b"]
    assert (sources.calls, sources.peak) == (4, 1)


async def test_a_retry_inside_repeats_each_attempt() -> None:
    """Streams, retry: inside, each of those who race has retries of its own."""
    clock = VirtualClock(autojump=True)
    failing = [[ConnectionError(str(number))] for number in range(3)]
    sources = Timed(clock, *failing, [HANG], ["a"])
    pipeline = (
        B(clock=clock).add_hedging(delay=15).add_retry(max_retry_attempts=2, delay=10).build()
    )
    assert await drain(pipeline.execute_stream(sources)) == ["a"]
    # The first attempt's tries at 0, 10 and 20; the hedge's at 15 and 25.
    assert sources.opened_at == [0, 10, 15, 20, 25]
    assert (sources.peak, sources.closed) == (2, 5)


async def test_a_timeout_outside_ends_the_race() -> None:
    """Streams, timeout: time to first chunk, of whichever; all sources are closed."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG])
    pipeline = B(clock=clock).add_timeout(10).add_hedging(max_hedged_attempts=3, delay=1).build()
    with pytest.raises(TimeoutRejectedError) as caught:
        await drain(pipeline.execute_stream(sources))
    assert (caught.value.timeout, clock.now()) == (10, 10)
    assert (sources.opened, sources.closed) == (4, 4)


async def test_a_timeout_outside_is_off_once_a_source_has_won() -> None:
    """Streams, timeout: after the first chunk: off."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG], [After(3), "a", After(100), "b"])
    pipeline = B(clock=clock).add_timeout(10).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert clock.pending == 0


async def test_a_timeout_inside_limits_each_attempt() -> None:
    """Streams, timeout: inside, it ends one attempt, whose place the next one takes at once."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG], [After(2), "a", After(100), "b"])
    pipeline = B(clock=clock).add_hedging(delay="1h").add_timeout(3).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.opened_at == [0, 3]
    assert sources.closed == 2


async def test_if_all_time_out_the_first_ones_rejection_comes_out() -> None:
    """HG-05 with a time limit inside: a plain error, no group."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG])
    pipeline = B(clock=clock).add_hedging(delay=1).add_timeout(3).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(sources))
    assert clock.now() == 4
    assert (sources.opened, sources.closed) == (2, 2)


async def test_a_limiter_inside_has_all_permits_back_at_the_first_chunk() -> None:
    """Streams, limiters: hold a permit until the first chunk, the losers' until they are closed."""
    gate = B().add_concurrency_limiter(3).build()
    sources = Sources([HANG], [HANG], ["a", "b"])
    pipeline = B().add_hedging(max_hedged_attempts=2, delay=0).add_pipeline(gate).build()
    async with pipeline.execute_stream(sources) as stream:
        assert await anext(stream) == "a"
        assert await free_permits(gate) == 3
        assert await anext(stream) == "b"
    assert await free_permits(gate) == 3


async def test_a_limiter_inside_that_refuses_the_hedge_leaves_the_first_in_the_race() -> None:
    """Streams, limiters: a refusal is an attempt's outcome, and handled."""
    clock = VirtualClock(autojump=True)
    gate = B(clock=clock).add_concurrency_limiter(1).build()
    sources = Timed(clock, [After(5), "a", "b"])
    pipeline = B(clock=clock).add_hedging(delay=1).add_pipeline(gate).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.calls == 1
    assert await free_permits(gate) == 1


async def test_a_limiter_outside_has_its_permit_back_at_the_first_chunk() -> None:
    """Streams, limiters: one permit for the whole race."""
    gate = B().add_concurrency_limiter(1).build()
    sources = Sources([HANG], ["a", "b"])
    pipeline = B().add_pipeline(gate).add_hedging(delay=0).build()
    async with pipeline.execute_stream(sources) as stream:
        assert await anext(stream) == "a"
        assert await free_permits(gate) == 1


async def test_a_breaker_inside_counts_no_cancelled_loser() -> None:
    """Design: a cancellation is never a failure; the winner counts, once."""
    control = CircuitBreakerControl()
    sources = Sources([HANG], ["a", OSError("late")])
    pipeline = B().add_hedging(delay=0).add_circuit_breaker(control=control).build()
    with pytest.raises(OSError, match="late"):
        await drain(pipeline.execute_stream(sources))
    assert (control.metrics.throughput, control.metrics.failures) == (1, 0)


async def test_hedging_in_a_nested_pipeline_owns_its_sources_too() -> None:
    """Case ST-05: `add_pipeline` hides no hedging from what has to outlive it."""

    async def source() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            yield 1
            yield 2
            tasks.cancel_scope.cancel()

    inner = B().add_hedging(delay="1h").build()
    pipeline = B().add_retry(delay=0).add_pipeline(inner).build()
    assert await drain(pipeline.execute_stream(source)) == [1, 2]


async def test_a_race_within_a_race() -> None:
    """Case ST-19, nested: in the end one source is open, and at its end none."""
    sources = Sources([HANG], [HANG], [HANG], ["a", "b"])
    pipeline = B().add_hedging(delay=0).add_hedging(delay=0).build()
    async with pipeline.execute_stream(sources) as stream:
        assert await anext(stream) == "a"
        assert (sources.opened, sources.open) == (4, 1)
        assert await drain(stream) == ["b"]
    assert sources.open == 0


async def test_a_wrapped_generator_function_races() -> None:
    """Calling: `wrap` of an async generator function gives a guarded stream, arguments and all."""
    calls: list[int] = []

    async def numbers(start: int, *, step: int) -> AsyncGenerator[int, None]:
        calls.append(start)
        if len(calls) == 1:
            await anyio.sleep_forever()
        yield start
        yield start + step

    wrapped = B().add_hedging(delay=0).build().wrap(numbers)
    assert await drain(wrapped(5, step=2)) == [5, 7]
    assert calls == [5, 5]


async def test_latencies_are_times_to_the_first_chunk() -> None:
    """`PercentileDelay` hedges what is slower to its first chunk than the pipeline's own recent percentile."""
    clock = VirtualClock(autojump=True)
    delay = PercentileDelay(0.95, initial=1000)
    pipeline = B(clock=clock).add_hedging(delay_generator=delay).build()
    for _ in range(20):
        sources = Timed(clock, [After(3), "a", After(500)])
        assert await drain(pipeline.execute_stream(sources)) == ["a"]
    start = clock.now()
    raced = Timed(clock, [HANG], ["b"])
    assert await drain(pipeline.execute_stream(raced)) == ["b"]
    assert clock.now() - start == pytest.approx(3)


# ---- what may be repeated ---------------------------------------------------------------------


async def test_what_is_not_idempotent_is_not_raced() -> None:
    """`idempotent=False`: hedging repeats only attempts whose callback was never invoked."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [After(50), "a"], ["hedge"])
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=1).build()
    assert await drain(pipeline.execute_stream(sources, idempotent=False)) == ["a"]
    assert sources.calls == 1
    failing = Timed(clock, [ConnectionError("early")])
    with pytest.raises(ConnectionError):
        await drain(pipeline.execute_stream(failing, idempotent=False))
    assert failing.calls == 1


async def test_what_is_not_idempotent_is_hedged_after_a_refusal() -> None:
    """B-11: refused by a limiter inside: never started, so that it is tried again."""
    gate = B().add_concurrency_limiter(1).build()
    release = anyio.Event()

    async def make_room(_: object) -> None:
        release.set()
        await tick()

    pipeline = B().add_hedging(delay="1h", on_hedging=make_room).add_pipeline(gate).build()
    sources = Sources(["a"])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gate.execute, release.wait)
        await tick()
        stream = pipeline.execute_stream(sources, idempotent=False)
        assert await drain(stream) == ["a"]
    assert sources.calls == 1


async def test_what_is_not_idempotent_is_not_hedged_while_it_waits_in_a_queue() -> None:
    """`idempotent=False`: never while one still waits in a queue, so that two can never both start."""
    clock = VirtualClock()
    gate = B(clock=clock).add_concurrency_limiter(2, queue_limit=5).build()
    release = anyio.Event()
    hedges: list[object] = []
    pipeline = (
        B(clock=clock).add_hedging(delay=1, on_hedging=hedges.append).add_pipeline(gate).build()
    )
    sources = Sources(["a"])
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(gate.execute, release.wait)
        await tick()
        running = Running(drain, pipeline.execute_stream(sources, idempotent=False))
        tasks.start_soon(running)
        await clock.advance(100)
        assert (sources.calls, hedges) == (0, [])
        release.set()
        await tick()
        assert running.value == ["a"]
    assert (sources.calls, hedges) == (1, [])


async def test_an_open_one_shot_argument_is_refused() -> None:
    """Hedging, in small print: `MisuseError` before the second launch, the first attempt cancelled and awaited."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG])
    pipeline = B(clock=clock).add_fallback(fallback_value=1).add_hedging(delay=1).build()
    with pytest.raises(MisuseError):
        await drain(pipeline.execute_stream(sources, iter_once()))
    assert (sources.calls, sources.closed) == (1, 1)


def iter_once() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("delay", [0, 1])
async def test_what_returns_no_stream_is_a_misuse_and_is_not_hedged(delay: float) -> None:
    """Calling: no strategy retries, hedges, replaces or counts a `MisuseError`."""
    calls: list[int] = []

    def factory() -> Any:
        calls.append(1)
        return 42

    pipeline = B().add_fallback(fallback_value=1).add_hedging(delay=delay).build()
    with pytest.raises(MisuseError):
        await drain(pipeline.execute_stream(factory))
    assert len(calls) <= (2 if delay == 0 else 1)


# ---- hooks and generators ---------------------------------------------------------------------


async def test_an_action_generator_gives_factories() -> None:
    """`action_generator`: for streams it gives a factory, of any of the forms that a factory may have."""
    backup = Sources(["x", "y"])

    async def connecting() -> AsyncIterator[str]:
        return backup()

    @asynccontextmanager
    async def managed() -> AsyncIterator[AsyncIterator[str]]:
        yield backup()

    for action in (backup, connecting, managed, lambda: Closable("x", "y")):
        primary = Sources([HANG])
        pipeline = B().add_hedging(delay=0, action_generator=partial(_given, action)).build()
        assert await drain(pipeline.execute_stream(primary)) == ["x", "y"]
        assert (primary.calls, primary.closed) == (1, 1)
    assert backup.closed == 3


def _given(action: Any, event: object) -> Any:
    return action


async def test_an_action_generator_may_use_the_streams_factory() -> None:
    """Hedging, in small print: `event.callback` is called without arguments, a factory for streams."""
    sources = Sources([HANG], ["a", "b"])
    seen: list[tuple[int, int]] = []

    def generator(event: Any) -> Any:
        seen.append((event.attempt, event.context.attempt))
        assert event.primary_context.attempt == 0
        assert event.context is not event.primary_context

        async def shouting() -> AsyncIterator[str]:
            async for chunk in event.callback():
                yield chunk.upper()

        return shouting

    pipeline = B().add_hedging(delay=0, action_generator=generator).build()
    assert await drain(pipeline.execute_stream(sources, "x", 1)) == ["A", "B"]
    assert sources.arguments == [("x", 1), ("x", 1)]
    assert seen == [(1, 1)]


async def test_an_action_generator_may_give_no_hedge() -> None:
    """HG-21: `None`: no hedge now; when nothing is under way the first outcome is accepted."""
    pipeline = B().add_hedging(delay=0, action_generator=partial(_given, None)).build()
    go = anyio.Event()
    sources = Sources([go, "a"])
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        go.set()
    assert running.value == ["a"]
    with pytest.raises(ConnectionError, match="early"):
        await drain(pipeline.execute_stream(Sources([ConnectionError("early")])))


async def test_an_action_generator_that_raises_has_failed_for_its_attempt() -> None:
    """HG-22: the exception becomes that attempt's outcome: the first is still in the race."""
    go = anyio.Event()
    sources = Sources([go, "a"])

    def generator(event: object) -> Any:
        go.set()
        raise ConnectionError("generator")

    pipeline = B().add_hedging(delay=0, action_generator=generator).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a"]
    assert (sources.calls, sources.closed) == (1, 1)


@pytest.mark.parametrize("what", ["on_hedging", "delay_generator", "should_handle"])
async def test_user_code_that_raises_ends_the_race(what: str) -> None:
    """HG-20: a raising hook, predicate or `delay_generator` ends the call, all sources closed."""
    sources = Sources([HANG], ["a", "b"])

    def fail(event: object) -> Any:
        raise LookupError(what)

    options: dict[str, Any] = {"delay": 0, what: fail}
    pipeline = B().add_hedging(**options).build()
    with pytest.raises(LookupError, match=what):
        await drain(pipeline.execute_stream(sources))
    assert sources.opened == sources.closed


async def test_hooks_are_told_before_each_launch() -> None:
    """HG-03, in small print: hedges are numbered from 0, and the hook runs before the source is opened."""
    clock = VirtualClock(autojump=True)
    sources = Timed(clock, [HANG], [HANG], ["a"])
    context = ResilienceContext()
    seen: list[tuple[int, int, int]] = []

    async def on_hedging(event: Any) -> None:
        assert event.context is context
        seen.append((event.attempt, event.attempt_context.attempt, sources.calls))

    pipeline = (
        B(clock=clock).add_hedging(max_hedged_attempts=2, delay=1, on_hedging=on_hedging).build()
    )
    assert await drain(pipeline.execute_stream(sources, context=context)) == ["a"]
    assert seen == [(0, 1, 1), (1, 2, 2)]
