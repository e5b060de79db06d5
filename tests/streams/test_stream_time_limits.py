"""`idle_timeout` and `total_timeout`: what they bound, what they leave alone, and what comes out when they pass."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    ExecutionRejectedError,
    OptionsError,
    ResiliencePipelineBuilder,
    ResilienceStream,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock
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
    take_and_wait,
    tick,
)
from support.timed import Pause, TimedSources

pytestmark = pytest.mark.anyio

LIMITS = ["idle_timeout", "total_timeout"]
each_limit = pytest.mark.parametrize("limit", LIMITS)


def every(seconds: float, count: int) -> list[Any]:
    """A script of so many chunks, so far apart."""
    return [part for number in range(count) for part in (Pause(seconds), number)]


async def failure_of(
    stream: ResilienceStream[Any], into: list[Any] | None = None
) -> TimeoutRejectedError:
    with pytest.raises(TimeoutRejectedError) as caught:
        await collect(stream, [] if into is None else into)
    return caught.value


# ---- the gap between chunks -------------------------------------------------------------------


async def test_a_gap_that_is_too_long_ends_the_stream() -> None:
    """Case ST-13, TO-6: one chunk, then silence under `idle_timeout=5`: the consumer has the chunk, then the error."""
    clock, sources, got = VirtualClock(autojump=True), Sources(["a", HANG]), list[str]()
    stream = B(clock=clock).build().execute_stream(sources, idle_timeout=5)
    error = await failure_of(stream, got)
    assert (got, error.strategy_name, clock.now()) == (["a"], "idle_timeout", 5.0)
    assert sources.closed == 1


async def test_each_gap_has_the_whole_limit() -> None:
    """Streams: `idle_timeout` bounds the gap between chunks, not the stream."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, every(4, 20))
    stream = B(clock=clock).build().execute_stream(sources, idle_timeout=5)
    assert await drain(stream) == list(range(20))
    assert clock.now() == 80.0


async def test_a_late_gap_is_bounded_like_the_first() -> None:
    """Streams: every gap is bounded, however many there were before."""
    clock, got = VirtualClock(autojump=True), list[int]()
    sources = TimedSources(clock, [*every(4, 3), Pause(5.5), "late"])
    error = await failure_of(B(clock=clock).build().execute_stream(sources, idle_timeout=5), got)
    assert (got, clock.now(), error.timeout) == ([0, 1, 2], 17.0, 5.0)


async def test_the_first_chunk_is_not_bounded_by_it() -> None:
    """Streams: `idle_timeout` runs not for the first chunk."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(1000), "a", Pause(4), "b"])
    stream = B(clock=clock).build().execute_stream(sources, idle_timeout=5)
    assert await drain(stream) == ["a", "b"]


async def test_neither_is_the_first_chunk_of_a_repeated_attempt() -> None:
    """Streams: nor for the first chunk of any later attempt."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(100), OSError()], [Pause(100), "a"])
    pipeline = B(clock=clock).add_retry(delay=100).build()
    assert await drain(pipeline.execute_stream(sources, idle_timeout=5)) == ["a"]
    assert clock.now() == 300.0


async def test_the_consumers_own_time_never_counts() -> None:
    """TO-7: the consumer sleeps 120 between pulls under a limit of 50: no time-out."""
    clock, got = VirtualClock(autojump=True), list[int]()
    stream = B(clock=clock).build().execute_stream(Sources([1, 2, 3]), idle_timeout=50)
    async for chunk in stream:
        got.append(chunk)
        await clock.sleep(120)
    assert got == [1, 2, 3]


async def test_the_end_has_to_come_within_the_limit_too() -> None:
    """Streams: what is waited for may turn out to be the end."""
    clock = VirtualClock(autojump=True)
    fast, slow = [1, Pause(4)], [1, Pause(6)]
    pipeline = B(clock=clock).build()
    assert await drain(pipeline.execute_stream(TimedSources(clock, fast), idle_timeout=5)) == [1]
    await failure_of(pipeline.execute_stream(TimedSources(clock, slow), idle_timeout=5))


async def test_held_chunks_that_are_handed_out_are_not_waited_for() -> None:
    """Streams: `idle_timeout` runs only while a chunk is being waited for."""
    clock, got = VirtualClock(autojump=True), list[str]()
    stream = (
        B(clock=clock)
        .build()
        .execute_stream(Sources(["", "", "a", "b"]), commit_when=bool, idle_timeout=5)
    )
    async for chunk in stream:
        got.append(chunk)
        await clock.sleep(100)
    assert got == ["", "", "a", "b"]


# ---- between held chunks ----------------------------------------------------------------------


async def test_between_held_chunks_it_fails_the_attempt_which_is_repeated() -> None:
    """Streams: time-outs and retries reach to the line: a gap before it is a failed attempt."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["", HANG], ["", "a"])
    pipeline = B(clock=clock).add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=bool, idle_timeout=5)
    assert await drain(stream) == ["", "a"]
    assert (sources.calls, sources.closed, sources.peak, clock.now()) == (2, 2, 1, 5.0)


async def test_there_the_last_attempts_error_comes_out() -> None:
    """Streams: a gap before the line comes out when nothing is left to be tried."""
    clock, got = VirtualClock(autojump=True), list[str]()
    sources, control = Sources(["", HANG]), CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_retry(max_retry_attempts=2, delay=0)
        .add_circuit_breaker(control=control)
        .build()
    )
    stream = pipeline.execute_stream(sources, commit_when=bool, idle_timeout=5)
    error = await failure_of(stream, got)
    assert (got, error.strategy_name, stream.committed) == ([], "idle_timeout", False)
    assert (sources.closed, clock.now(), control.metrics.failures) == (3, 15.0, 3)


async def test_a_repeated_gap_says_nothing_about_errors_beyond_the_line() -> None:
    """Streams, in small print: what a manager suppresses beyond the line is an end, whatever an earlier attempt did."""
    clock = VirtualClock(autojump=True)
    manager = Managed(Sources(["", "a", OSError("suppressed")])(), swallows=True)
    attempts: list[Any] = [Sources(["", HANG])(), manager]
    pipeline = B(clock=clock).add_retry(delay=0).build()
    stream = pipeline.execute_stream(lambda: attempts.pop(0), commit_when=bool, idle_timeout=5)
    assert await drain(stream) == ["", "a"]
    assert manager.left == 1


# ---- the whole stream -------------------------------------------------------------------------


async def test_the_whole_stream_is_bounded() -> None:
    """Case ST-13: a hundred chunks, one a second, under `total_timeout=50`."""
    clock, got = VirtualClock(autojump=True), list[int]()
    sources = TimedSources(clock, every(1, 100))
    pipeline = B(clock=clock).add_timeout(2).build()
    error = await failure_of(pipeline.execute_stream(sources, total_timeout=50.5), got)
    assert (len(got), clock.now(), error.strategy_name) == (50, 50.5, "total_timeout")
    assert sources.closed == 1


async def test_it_counts_from_the_first_pull() -> None:
    """Streams: nothing runs until the first pull, time neither."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(4), "a"])
    async with B(clock=clock).build().execute_stream(sources, total_timeout=5) as stream:
        await clock.sleep(100)
        assert await drain(stream) == ["a"]


async def test_the_whole_stream_includes_the_consumers_time() -> None:
    """Streams: the whole stream is bounded, however it was spent; the source is closed first."""
    clock, got = VirtualClock(autojump=True), list[int]()
    sources = Sources([1, 2, 3])
    stream = B(clock=clock).build().execute_stream(sources, total_timeout=5)

    async def read_slowly() -> None:
        async for chunk in stream:
            got.append(chunk)
            await clock.sleep(3)

    with pytest.raises(TimeoutRejectedError):
        await read_slowly()
    assert (got, sources.closed) == ([1, 2], 1)


async def test_a_stream_that_ends_in_time_ends() -> None:
    """Streams: the limit is off when the stream is over."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, every(1, 3))
    stream = B(clock=clock).build().execute_stream(sources, total_timeout=5)
    assert await drain(stream) == [0, 1, 2]
    await clock.sleep(100)
    assert await drain_within(B().build().execute_stream(Sources([1]))) == [1]


AROUND: dict[str, Callable[[ResiliencePipelineBuilder[Any]], ResiliencePipelineBuilder[Any]]] = {
    "retry": lambda b: b.add_retry(max_retry_attempts=math.inf, delay=0),
    "retry that waits": lambda b: b.add_retry(max_retry_attempts=math.inf, delay=1),
    "fallback": lambda b: b.add_fallback(fallback_value="spare"),
    "breaker": lambda b: b.add_circuit_breaker(),
    "timeout": lambda b: b.add_timeout("1h"),
    "hedging": lambda b: b.add_hedging(delay=1),
    "limiter": lambda b: b.add_concurrency_limiter(1),
    "holding limiter": lambda b: b.add_concurrency_limiter(1, hold_streams=True),
    "all": lambda b: (
        b.add_fallback(fallback_value="spare")
        .add_retry(delay=0)
        .add_circuit_breaker()
        .add_concurrency_limiter(5)
        .add_hedging(delay=1)
        .add_timeout("1h")
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("script", [[HANG], ["", HANG]], ids=["first", "held"])
async def test_it_is_final_before_the_line_whatever_is_around(
    around: str, script: list[Any]
) -> None:
    """Streams, in small print: `total_timeout` is final also before commit, never retried or replaced."""
    clock, got = VirtualClock(autojump=True), list[Any]()
    sources = Sources(script)
    pipeline = AROUND[around](B(clock=clock)).build()
    stream = pipeline.execute_stream(sources, commit_when=bool, total_timeout=7)
    error = await failure_of(stream, got)
    assert (got, error.strategy_name, clock.now()) == ([], "total_timeout", 7.0)
    assert sources.open == 0
    assert sources.calls <= (2 if around in {"hedging", "all"} else 1)
    assert not stream.committed
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_it_is_no_verdict_for_the_breaker() -> None:
    """Streams, in small print: it is final, and no strategy inside counts it."""
    clock, control = VirtualClock(autojump=True), CircuitBreakerControl()
    pipeline = B(clock=clock).add_circuit_breaker(control=control).build()
    await failure_of(pipeline.execute_stream(Sources([HANG]), total_timeout=5))
    assert control.metrics.throughput == 0


async def test_it_spans_all_attempts_and_the_waits_between() -> None:
    """Streams: the whole stream, attempts that failed and back-off included."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(1), OSError()])
    pipeline = B(clock=clock).add_retry(max_retry_attempts=10, delay=2).build()
    await failure_of(pipeline.execute_stream(sources, total_timeout=8))
    assert (sources.calls, sources.closed, clock.now()) == (3, 3, 8.0)


async def test_it_spans_a_limiters_queue() -> None:
    """Streams: the whole stream, queueing for a permit included; the place is given back."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_concurrency_limiter(1, queue_limit=1, hold_streams=True).build()
    sources = Sources(["never"])
    async with pipeline.execute_stream(Sources([1, HANG])) as holder:
        await anext(holder)
        for _ in range(2):
            await failure_of(pipeline.execute_stream(sources, total_timeout=5))
    assert sources.calls == 0


async def test_a_source_that_fails_when_its_total_time_is_up_is_not_repeated() -> None:
    """Streams, in small print: never retried, also where a source makes an error of its own of the interruption."""
    clock, calls = VirtualClock(), list[int]()

    async def source() -> AsyncIterator[str]:
        calls.append(1)
        try:
            await anyio.sleep_forever()
            yield "never"
        finally:
            raise OSError("of its own")

    pipeline = B(clock=clock).add_retry(delay=0).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(source, total_timeout=5))
        tasks.start_soon(running)
        await tick()
        await clock.advance(5)
        await tick()
        ended, error = running.done, running.error
        running.cancel()
    assert (ended, len(calls)) == (True, 1)
    assert isinstance(error, TimeoutRejectedError)


async def test_a_source_that_goes_on_holding_when_its_total_time_is_up_is_ended() -> None:
    """Streams: the whole stream is bounded, also where a source swallows the interruption before the line."""
    clock = VirtualClock()

    async def source() -> AsyncIterator[str]:
        with suppress(BaseException):  # the fault this is about
            await anyio.sleep_forever()
        yield ""
        await anyio.sleep_forever()

    stream = B(clock=clock).build().execute_stream(source, commit_when=bool, total_timeout=5)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        await clock.advance(5)
        await tick()
        ended, error = running.done, running.error
        running.cancel()
    assert ended
    assert isinstance(error, TimeoutRejectedError)


# ---- both -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle", "total", "which", "when"),
    [
        (5, 20, "idle_timeout", 6.0),
        (5, 3, "total_timeout", 3.0),
        (5, 5.5, "total_timeout", 5.5),
        (math.inf, 4, "total_timeout", 4.0),
        (4, math.inf, "idle_timeout", 5.0),
        (4, None, "idle_timeout", 5.0),
    ],
)
async def test_of_both_the_one_that_passes_first_is_named(
    idle: Any, total: Any, which: str, when: float
) -> None:
    """Streams: each bounds its own; the error names the one that has passed, and its limit."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(1), "a", HANG])
    stream = B(clock=clock).build().execute_stream(sources, idle_timeout=idle, total_timeout=total)
    error = await failure_of(stream)
    assert (error.strategy_name, clock.now()) == (which, when)
    assert error.timeout == (idle if which == "idle_timeout" else total)


async def test_of_both_the_later_gap_may_meet_the_total() -> None:
    """Streams: gaps that are short enough each still add up."""
    clock, got = VirtualClock(autojump=True), list[int]()
    sources = TimedSources(clock, every(4, 10))
    stream = B(clock=clock).build().execute_stream(sources, idle_timeout=5, total_timeout=13)
    error = await failure_of(stream, got)
    assert (got, error.strategy_name, clock.now()) == ([0, 1, 2], "total_timeout", 13.0)


# ---- the error, and what has happened by then -------------------------------------------------


@each_limit
@pytest.mark.parametrize("script", [["a", HANG], ["", "a", HANG]])
async def test_the_error_says_who_and_how_long(limit: str, script: list[Any]) -> None:
    """Errors: pipeline, strategy, operation and limit can be read; it is a builtin `TimeoutError`."""
    clock = VirtualClock(autojump=True)
    pipeline = B(name="llm", clock=clock).add_timeout("1h").build()
    options: dict[str, Any] = {limit: "2500ms"}
    stream = pipeline.execute_stream(
        Sources(script), operation_key="chat", commit_when=bool, **options
    )
    error = await failure_of(stream)
    assert isinstance(error, TimeoutError)
    assert isinstance(error, ExecutionRejectedError)
    assert (error.pipeline_name, error.strategy_name) == ("llm", limit)
    assert (error.operation_key, error.timeout, error.retry_after) == ("chat", 2.5, None)
    assert all(part in str(error) for part in ("llm", limit, "2.5"))


@each_limit
async def test_without_names_there_are_none(limit: str) -> None:
    """Errors: an unnamed pipeline's error says so."""
    clock = VirtualClock(autojump=True)
    options: dict[str, Any] = {limit: 5}
    stream = B(clock=clock).build().execute_stream(Sources(["a", HANG]), **options)
    error = await failure_of(stream)
    assert (error.pipeline_name, error.operation_key) == (None, None)


@each_limit
async def test_beyond_the_line_it_is_never_repeated_replaced_or_counted(limit: str) -> None:
    """Streams: past commit they raise into the loop, never retry."""
    clock, got = VirtualClock(autojump=True), list[str]()
    sources, control = Sources(["a", HANG]), CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_fallback(fallback_value="spare")
        .add_retry(delay=0)
        .add_circuit_breaker(control=control)
        .add_timeout(2)
        .build()
    )
    options: dict[str, Any] = {limit: 5}
    stream = pipeline.execute_stream(sources, **options)
    error = await failure_of(stream, got)
    assert (got, error.strategy_name, clock.now()) == (["a"], limit, 5.0)
    assert (sources.calls, sources.closed, control.metrics.failures) == (1, 1, 0)


@each_limit
async def test_nor_is_a_resumable_stream_run_again(limit: str) -> None:
    """Streams: past commit they never retry, also where a retry is resumable."""
    clock, got = VirtualClock(autojump=True), list[str]()
    sources = Sources(["a", HANG], ["a", "b"])
    pipeline = B(clock=clock).add_retry(delay=0, resumable=True).build()
    options: dict[str, Any] = {limit: 5}
    error = await failure_of(pipeline.execute_stream(sources, **options), got)
    assert (got, error.strategy_name, sources.calls, sources.closed) == (["a"], limit, 1, 1)


@each_limit
async def test_the_source_is_closed_before_the_error_comes_out(limit: str) -> None:
    """Streams: a failed source is closed first, its context manager left, in order, and told of it."""
    clock = VirtualClock(autojump=True)
    closable = Closable("a", HANG)
    manager = Managed(closable)
    options: dict[str, Any] = {limit: 5}
    await failure_of(B(clock=clock).build().execute_stream(lambda: manager, **options))
    assert (closable.closed, manager.left) == (1, 1)
    assert manager.told != [None]


@each_limit
async def test_its_own_time_for_closing_is_waited_for(limit: str) -> None:
    """Streams: closing may await, for `close_timeout` at the most."""
    clock = VirtualClock(autojump=True)
    closable = Closable("a", HANG, closing=lambda: clock.sleep(2))
    options: dict[str, Any] = {limit: 5}
    await failure_of(B(clock=clock).build().execute_stream(lambda: closable, **options))
    assert (closable.closed, clock.now()) == (1, 7.0)


@each_limit
async def test_closing_that_hangs_ends_after_close_timeout(limit: str) -> None:
    """Streams: what the library closes itself takes `close_timeout` at the most."""
    clock = VirtualClock(autojump=True)
    closable = Closable("a", HANG, closing=anyio.sleep_forever)
    options: dict[str, Any] = {limit: 5}
    pipeline = B(clock=clock, close_timeout=3).build()
    await failure_of(pipeline.execute_stream(lambda: closable, **options))
    assert clock.now() == 8.0


@each_limit
async def test_a_manager_cant_swallow_it(limit: str) -> None:
    """Streams: the error comes out, whatever the source's manager makes of it."""
    clock = VirtualClock(autojump=True)
    manager = Managed(Sources(["a", HANG])(), swallows=True)
    options: dict[str, Any] = {limit: 5}
    await failure_of(B(clock=clock).build().execute_stream(lambda: manager, **options))
    assert manager.left == 1


@each_limit
async def test_after_it_the_stream_is_over(limit: str) -> None:
    """Small print: after an error a stream gives `StopAsyncIteration` for ever."""
    clock, closable = VirtualClock(autojump=True), Closable("a", HANG)
    options: dict[str, Any] = {limit: 5}
    stream = B(clock=clock).build().execute_stream(lambda: closable, **options)
    await failure_of(stream)
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    await stream.aclose()
    assert closable.closings == 1


@each_limit
async def test_an_error_within_the_limit_is_that_error(limit: str) -> None:
    """TO-8: a source's error inside the limit is that error, also a `TimeoutError` of its own."""
    error = TimeoutError("the socket's own")
    options: dict[str, Any] = {limit: "1h"}
    with pytest.raises(TimeoutError, match="the socket's own") as caught:
        await drain(B().build().execute_stream(Sources(["a", error]), **options))
    assert caught.value is error


@each_limit
async def test_leaving_early_awaits_the_cleanup(limit: str) -> None:
    """TO-9: break: the source's cleanup is awaited."""
    sources = Sources([1, 2])
    options: dict[str, Any] = {limit: "1h"}
    async with B().build().execute_stream(sources, **options) as stream:
        async for _ in stream:
            break
    assert sources.closed == 1


async def test_a_stalled_first_pull_makes_the_source_once() -> None:
    """TO-5: the first pull stalls: a time-out, the source made once."""
    clock, sources = VirtualClock(autojump=True), Sources([HANG])
    pipeline = B(clock=clock).add_retry(delay=0).build()
    await failure_of(pipeline.execute_stream(sources, total_timeout=2))
    assert (sources.calls, sources.closed) == (1, 1)


@each_limit
async def test_a_source_that_does_not_listen(limit: str, mode: str) -> None:
    """Timeout, expiry: a value that came out anyway is kept; with an owner task the source is given up instead."""
    clock, got = VirtualClock(autojump=True), list[str]()

    async def source() -> AsyncIterator[str]:
        yield "a"
        with suppress(BaseException):  # the fault this is about
            await anyio.sleep_forever()
        yield "anyway"
        await anyio.sleep_forever()

    options: dict[str, Any] = {limit: 5}
    error = await failure_of(B(clock=clock).build().execute_stream(source, **options), got)
    assert error.strategy_name == limit
    assert got == (["a", "anyway"] if mode == "asyncio" else ["a"])


@each_limit
@pytest.mark.parametrize("kind", ["scope", "group", "asyncio.timeout"])
async def test_a_source_that_holds_a_scope_open(limit: str, kind: str, mode: str) -> None:
    """Case ST-05: the right limit is named, and the source's own scopes end in order."""
    if kind == "asyncio.timeout" and mode == "trio":
        kind = "scope"
    clock, ended = VirtualClock(autojump=True), list[str]()

    async def source() -> AsyncIterator[str]:
        try:
            if kind == "scope":
                with anyio.fail_after(3600):
                    yield "a"
                    await anyio.sleep_forever()
            elif kind == "group":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anyio.sleep_forever)
                    yield "a"
                    await anyio.sleep_forever()
            else:
                async with asyncio.timeout(3600):
                    yield "a"
                    await anyio.sleep_forever()
        finally:
            ended.append(kind)

    options: dict[str, Any] = {limit: 5}
    error = await failure_of(B(clock=clock).build().execute_stream(source, **options))
    assert (error.strategy_name, ended, clock.now()) == (limit, [kind], 5.0)


# ---- the caller, and other tasks --------------------------------------------------------------


@each_limit
@pytest.mark.parametrize("script", [["a", HANG], [HANG]], ids=["later", "first"])
async def test_the_callers_cancel_wins(limit: str, script: list[Any]) -> None:
    """Design, rule 5: the caller's cancel stays a cancel and wins ties."""
    clock, sources = VirtualClock(), Sources(script)
    options: dict[str, Any] = {limit: 5}
    stream = B(clock=clock).add_retry(delay=0).build().execute_stream(sources, **options)
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, stream, [])
        tasks.start_soon(running)
        await tick()
        running.cancel()
        await clock.advance(5)
        await tick()
        assert (running.cancelled, running.error) == (True, None)
    assert (sources.calls, sources.closed) == (1, 1)


@each_limit
async def test_closed_by_another_task_meanwhile(limit: str) -> None:
    """Streams: `aclose()` from another task ends the reader's loop cleanly; no limit passes afterwards."""
    clock, sources, got = VirtualClock(), Sources(["a", HANG]), list[str]()
    options: dict[str, Any] = {limit: 5}
    stream = B(clock=clock).build().execute_stream(sources, **options)

    async def read_and_go_on() -> None:
        await collect(stream, got)
        await clock.sleep(100)

    async with anyio.create_task_group() as tasks:
        running = Running(read_and_go_on)
        tasks.start_soon(running)
        await tick()
        await clock.advance(4)
        await stream.aclose()
        assert sources.open == 0
        await clock.advance(200)
        await tick()
        assert (running.done, running.error, running.cancelled) == (True, None, False)
        assert running.cancelling == 0
    assert got == ["a"]


@each_limit
async def test_closed_by_another_task_while_the_limits_own_closing_runs(limit: str) -> None:
    """Streams: the source is closed once, the reader still gets the limit's error or its end, nobody hangs."""
    clock, release = VirtualClock(), anyio.Event()
    closable = Closable("a", HANG, closing=release.wait)
    options: dict[str, Any] = {limit: 5}
    stream = B(clock=clock, close_timeout=100).build().execute_stream(lambda: closable, **options)
    async with anyio.create_task_group() as tasks:
        running, closing = Running(drain, stream), Running(stream.aclose)
        tasks.start_soon(running)
        await tick()
        await clock.advance(5)
        await tick()
        tasks.start_soon(closing)
        await tick()
        assert (running.done, closing.done) == (False, False)
        release.set()
        await tick()
        assert isinstance(running.error, TimeoutRejectedError)
        assert (closing.done, closing.error, running.cancelling) == (True, None, 0)
    assert (closable.closings, closable.closed) == (1, 1)


@each_limit
async def test_no_cancellation_is_left_over(limit: str) -> None:
    """Design, rule 5: the cancellation it caused is taken back: the reader goes on unharmed."""
    clock = VirtualClock(autojump=True)
    options: dict[str, Any] = {limit: 5}

    async def read_and_go_on() -> str:
        await failure_of(B(clock=clock).build().execute_stream(Sources(["a", HANG]), **options))
        await tick(3)
        return "unharmed"

    async with anyio.create_task_group() as tasks:
        running = Running(read_and_go_on)
        tasks.start_soon(running)
    assert (running.value, running.cancelling) == ("unharmed", 0)


# ---- options ----------------------------------------------------------------------------------


@each_limit
@pytest.mark.parametrize("value", [5, 5.0, timedelta(seconds=5), "5s", "5000ms"])
async def test_any_form_of_a_duration_will_do(limit: str, value: Any) -> None:
    """Durations: a number, a timedelta or text."""
    clock = VirtualClock(autojump=True)
    options: dict[str, Any] = {limit: value}
    stream = B(clock=clock).build().execute_stream(Sources(["a", HANG]), **options)
    assert (await failure_of(stream)).timeout == 5.0
    assert clock.now() == 5.0


@each_limit
@pytest.mark.parametrize("value", [None, math.inf])
async def test_none_and_infinity_are_no_limit(limit: str, value: Any) -> None:
    """Durations: `math.inf` means for ever."""
    clock = VirtualClock(autojump=True)
    options: dict[str, Any] = {limit: value}
    sources = TimedSources(clock, ["a", Pause(1e9), "b"])
    assert await drain(B(clock=clock).build().execute_stream(sources, **options)) == ["a", "b"]


BAD_LIMITS = [0, -1, "0s", True, math.nan, -math.inf, "5", "soon", [], timedelta(0)]
BAD: dict[str, list[Any]] = {
    "idle_timeout": BAD_LIMITS,
    "total_timeout": BAD_LIMITS,
    "max_held": [0, -1, True, 1.5, 64.0, math.inf, None, "64"],
    "commit_when": [0, False, "text", True, []],
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in BAD for value in BAD[option]]
)
async def test_a_bad_value_is_refused_at_the_call(option: str, value: Any) -> None:
    """Head of the contract: a bad value raises `OptionsError`, a `ValueError`, that names it."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError, match=option) as caught:
        B().build().execute_stream(Sources([1]), **options)
    assert isinstance(caught.value, ValueError)
    assert len(caught.value.problems) == 1


async def test_all_bad_values_are_listed_at_once() -> None:
    """Head of the contract: the error lists every bad option; nothing has been called."""
    sources = Sources([1])
    bad: dict[str, Any] = {
        "commit_when": 1,
        "max_held": 0,
        "idle_timeout": "soon",
        "total_timeout": -1,
    }
    with pytest.raises(OptionsError) as caught:
        B().build().execute_stream(sources, **bad)
    assert len(caught.value.problems) == 4
    assert all(option in str(caught.value) for option in bad)
    assert sources.calls == 0
