"""`commit_when` draws the line later than at the first chunk: what is held back until then, and what reaches there."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import ref

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    MisuseError,
    ResiliencePipelineBuilder,
    ResilienceStream,
    TimeoutRejectedError,
    handle_result,
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


async def has_text(chunk: object) -> bool:
    await checkpoint()
    return bool(chunk)


class HasText:
    """A predicate that is an object."""

    def __call__(self, chunk: object) -> bool:
        return bool(chunk)


PREDICATES: dict[str, Callable[[Any], object]] = {
    "function": bool,
    "coroutine function": has_text,
    "function of an awaitable": lambda chunk: has_text(chunk),
    "object": HasText(),
}
each_predicate = pytest.mark.parametrize("kind", PREDICATES)


class Noted(Sources):
    """Sources that note each chunk when it is asked for."""

    def __init__(self, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self.given: list[Any] = []

    async def play(self, item: object) -> bool:
        is_chunk = await super().play(item)
        if is_chunk:
            self.given.append(item)
        return is_chunk


def never(_: object) -> bool:
    return False


# ---- the line ---------------------------------------------------------------------------------


@each_predicate
async def test_held_chunks_are_delivered_in_order(kind: str) -> None:
    """Streams: chunks before the line are held back and delivered in order on commit."""
    script = [0, "", None, "a", "", "b"]
    stream = B().build().execute_stream(Sources(script), commit_when=PREDICATES[kind])
    assert await drain(stream) == script


@each_predicate
async def test_held_chunks_are_dropped_when_the_attempt_fails(kind: str) -> None:
    """Streams: chunks held back are dropped when the attempt fails: one beginning, not two."""
    sources = Sources(["", "", OSError()], [0, OSError()], ["", "a", "b"])
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=PREDICATES[kind])
    assert await drain(stream) == ["", "a", "b"]
    assert (sources.calls, sources.closed, sources.peak) == (3, 3, 1)


async def test_the_line_is_at_the_first_chunk_for_which_it_is_true() -> None:
    """Streams: nothing is handed out before that chunk has come, and nothing is read beyond it."""
    ready = anyio.Event()
    sources = Noted(["", "", ready, "a", "b"])
    got: list[str] = []
    stream = B().build().execute_stream(sources, commit_when=bool)
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        assert (sources.given, running.done) == (["", ""], False)
        ready.set()
        await tick()
        got.append(running.value)
        assert sources.given == ["", "", "a"]
        got += [await anext(stream), await anext(stream)]
        assert sources.given == ["", "", "a"]
        assert await anext(stream) == "b"
    assert got == ["", "", "a"]
    await stream.aclose()


@pytest.mark.parametrize("answer", [True, 1, "yes", [0]])
async def test_any_true_value_commits(answer: object) -> None:
    """Streams: the first chunk for which it is true: true as Python sees it."""
    sources = Sources(["a", OSError("late")])
    got: list[str] = []
    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(OSError, match="late"):
        await collect(pipeline.execute_stream(sources, commit_when=lambda _: answer), got)
    assert (got, sources.calls) == (["a"], 1)


@pytest.mark.parametrize("answer", [False, 0, "", None, ()])
async def test_any_false_value_holds(answer: object) -> None:
    """Streams: what is not true holds the chunk back."""
    sources = Sources(["a", OSError("early")], ["b"])
    pipeline = B().add_retry(delay=0).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=lambda _: answer)) == ["b"]
    assert sources.calls == 2


@pytest.mark.parametrize("kind", ["function", "coroutine function"])
async def test_it_is_asked_about_each_chunk_once_up_to_the_line(kind: str) -> None:
    """Streams: the predicate gets the chunk, once, and none of those beyond the line."""
    asked: list[Any] = []

    def look(chunk: Any) -> bool:
        asked.append(chunk)
        return bool(chunk)

    async def look_slowly(chunk: Any) -> bool:
        await tick(3)
        return look(chunk)

    predicate: Any = look if kind == "function" else look_slowly
    sources = Sources(["", None, "a", "b", ""])
    await drain(B().build().execute_stream(sources, commit_when=predicate))
    assert asked == ["", None, "a"]


async def test_none_can_be_the_chunk_that_commits() -> None:
    """Streams: a `None` or falsy chunk is a chunk."""
    sources = Sources(["a", None, OSError("late")])
    got: list[Any] = []
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=lambda chunk: chunk is None)
    with pytest.raises(OSError, match="late"):
        await collect(stream, got)
    assert (got, sources.calls) == (["a", None], 1)


async def test_without_it_the_first_chunk_commits_whatever_max_held_is() -> None:
    """Case ST-15: without a predicate the first chunk of any kind is the line."""
    sources = Noted(["", OSError("late")])
    got: list[str] = []
    stream = B().add_retry(delay=0).build().execute_stream(sources, max_held=5)
    with pytest.raises(OSError, match="late"):
        await collect(stream, got)
    assert (got, sources.calls) == ([""], 1)


async def test_committed_tells_which_side_of_the_line_one_is_on() -> None:
    """Streams: `stream.committed`: not while chunks are held back, and from the first handed out on."""
    ready = anyio.Event()
    stream = B().build().execute_stream(Sources(["", ready, "a", "b"]), commit_when=bool)
    assert not stream.committed
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        assert not stream.committed
        ready.set()
        await tick()
        assert stream.committed
    assert await drain(stream) == ["a", "b"]
    assert stream.committed


# ---- max_held ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "held"),
    [({}, 64), ({"max_held": 1}, 1), ({"max_held": 2}, 2), ({"max_held": 7}, 7)],
)
async def test_the_stream_commits_with_the_max_held_th_held_chunk(
    options: dict[str, Any], held: int
) -> None:
    """Streams, in small print: it commits with the `max_held`-th held chunk, by default the 64th."""
    script = list(range(held))
    sources = Noted([*script, OSError("late")])
    got: list[int] = []
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=never, **options)
    assert await anext(stream) == 0
    assert sources.given == script
    got.append(0)
    with pytest.raises(OSError, match="late"):
        await collect(stream, got)
    assert (got, sources.calls) == (script, 1)


@pytest.mark.parametrize(("options", "held"), [({}, 64), ({"max_held": 2}, 2)])
async def test_with_one_chunk_less_it_has_not_committed(options: dict[str, Any], held: int) -> None:
    """Streams: up to `max_held` chunks are held back: a failure before the last of them is repeated."""
    sources = Sources([*range(held - 1), OSError("early")], ["again"])
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=never, **options)
    assert await drain(stream) == ["again"]
    assert sources.calls == 2


async def test_each_attempt_may_hold_max_held() -> None:
    """Streams: what a failed attempt held counts no more."""
    sources = Sources([1, 2, OSError()], [3, 4, OSError()], [5, 6, 7])
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=never, max_held=3)
    assert await drain(stream) == [5, 6, 7]
    assert sources.calls == 3


async def test_a_preamble_longer_than_max_held_goes_on_to_its_end() -> None:
    """Streams: beyond `max_held` nothing is lost: chunks pass as they are."""
    stream = B().build().execute_stream(Sources(list(range(200))), commit_when=never)
    assert await drain(stream) == list(range(200))


# ---- the end before the line ------------------------------------------------------------------


@pytest.mark.parametrize("script", [[], [""], ["", None, 0]])
async def test_a_source_that_ends_before_the_line_is_a_success(script: list[Any]) -> None:
    """Streams, in small print: a source that ends before the line is a success with what was held."""
    sources, control = Sources(script), CircuitBreakerControl()
    pipeline = (
        B()
        .add_fallback(fallback_value="spare")
        .add_retry(delay=0)
        .add_circuit_breaker(control=control)
        .build()
    )
    stream = pipeline.execute_stream(sources, commit_when=bool)
    assert await drain(stream) == script
    assert (sources.calls, sources.closed) == (1, 1)
    assert (control.metrics.throughput, control.metrics.failures) == (1, 0)
    assert stream.committed


async def test_such_an_end_is_the_end() -> None:
    """Small print: after its end a stream gives `StopAsyncIteration` for ever."""
    stream = B().build().execute_stream(Sources([""]), commit_when=bool)
    assert await drain(stream) == [""]
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_source_that_has_ended_is_not_read_again() -> None:
    """A source that ends before the line is asked for no chunk after its end, and closed once."""
    closable = Closable("", "")
    asked = 0

    class Once:
        def __aiter__(self) -> Once:
            return self

        async def __anext__(self) -> Any:
            nonlocal asked
            asked += 1
            return await anext(closable)

        async def aclose(self) -> None:
            await closable.aclose()

    assert await drain(B().build().execute_stream(Once, commit_when=bool)) == ["", ""]
    assert (asked, closable.closings) == (3, 1)


# ---- strategies reach to that line ------------------------------------------------------------


async def test_a_preamble_and_a_stall_are_timed_out_and_repeated() -> None:
    """Case ST-15: an empty first chunk, then silence: nothing of the failed attempt is ever seen."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["", HANG], ["", "text", "more"])
    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(1).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=bool)) == ["", "text", "more"]
    assert (sources.calls, sources.closed, sources.peak) == (2, 2, 1)
    assert clock.now() == 1.0


async def test_one_limit_covers_all_that_is_held_anew_in_each_attempt() -> None:
    """Case ST-11 at the moved line: one deadline over connect and every chunk up to the line."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, ["", Pause(0.8), "", Pause(0.8), "", Pause(0.8), "text"])
    pipeline = B(clock=clock).add_retry(max_retry_attempts=2, delay=0).add_timeout(2).build()
    with pytest.raises(TimeoutRejectedError, match="2 s"):
        await drain(pipeline.execute_stream(sources, commit_when=bool))
    assert (sources.opened, sources.closed, sources.peak) == (3, 3, 1)
    assert clock.now() == 6.0


async def test_beyond_the_line_the_limit_is_off() -> None:
    """Case ST-13: strategies' limits end at the line."""
    clock = VirtualClock(autojump=True)
    script = ["", Pause(1.5), "a", Pause(1000), "b", Pause(1000), ""]
    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(2).build()
    stream = pipeline.execute_stream(TimedSources(clock, script), commit_when=bool)
    assert await drain(stream) == ["", "a", "b", ""]
    assert clock.now() == 2001.5


async def test_beyond_the_line_nothing_is_repeated_or_replaced() -> None:
    """RT-13 at the moved line: the consumer keeps what it has and gets the source's own error."""
    error = OSError("late")
    sources = Sources(["", "a", "", error])
    pipeline = B().add_fallback(fallback_value="spare").add_retry(delay=0).add_timeout(9).build()
    got: list[str] = []
    with pytest.raises(OSError, match="late") as caught:
        await collect(pipeline.execute_stream(sources, commit_when=bool), got)
    assert caught.value is error
    assert (got, sources.calls, sources.closed) == (["", "a", ""], 1, 1)


async def test_a_failed_source_is_closed_before_the_wait() -> None:
    """Case ST-17: close first, then wait, then try again; also with chunks held."""
    clock = VirtualClock()
    sources = Sources(["", OSError()], ["a"])
    pipeline = B(clock=clock).add_retry(delay=10).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources, commit_when=bool))
        tasks.start_soon(running)
        await tick()
        assert (sources.opened, sources.closed) == (1, 1)
        await clock.advance(10)
    assert running.value == ["a"]


@pytest.mark.parametrize(
    ("script", "failures"), [(["", OSError()], 1), (["", "a", OSError()], 0)], ids=["held", "late"]
)
async def test_the_breaker_counts_failures_up_to_the_line(script: list[Any], failures: int) -> None:
    """Streams, circuit breaker: a failure between held chunks counts, one beyond the line does not."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).build()
    with pytest.raises(OSError):  # noqa: PT011 - it has no message
        await drain(pipeline.execute_stream(Sources(script), commit_when=bool))
    assert (control.metrics.throughput, control.metrics.failures) == (1, failures)


async def test_hedging_races_to_that_line() -> None:
    """Case ST-19, ST-15: a source that has only given its preamble has not won."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["", HANG], ["", "", "second", "more"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    stream = pipeline.execute_stream(sources, commit_when=bool)
    async with stream:
        assert await anext(stream) == ""
        assert (sources.opened, sources.closed) == (2, 1)
        assert await drain(stream) == ["", "second", "more"]
    assert sources.open == 0
    assert clock.now() == 1.0


async def test_a_hedged_source_that_fails_between_held_chunks_has_failed() -> None:
    """Streams, hedging: a handled failure before the line starts the next source at once."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["", OSError()], ["", "second"])
    pipeline = B(clock=clock).add_hedging(delay=1).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=bool)) == ["", "second"]
    assert (sources.calls, sources.open, clock.now()) == (2, 0, 0.0)


async def test_a_limiter_holds_its_permit_up_to_that_line() -> None:
    """Streams, limiters: a permit is held until the line, and free while the stream goes on."""
    ready = anyio.Event()
    pipeline = B().add_concurrency_limiter(1).build()
    stream = pipeline.execute_stream(Sources(["", ready, "a", HANG]), commit_when=bool)
    async with anyio.create_task_group() as tasks:
        running = Running(anext, stream)
        tasks.start_soon(running)
        await tick()
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await anext(pipeline.execute_stream(Sources([1])))
        ready.set()
        await tick()
        assert running.value == ""
        assert await drain(pipeline.execute_stream(Sources([2]))) == [2]
    await stream.aclose()


async def test_predicates_and_hooks_of_strategies_see_the_first_chunk() -> None:
    """Streams, in small print: for `handle_result` a stream's result is its first chunk, held or not."""
    seen: list[Any] = []

    def is_bad(chunk: Any) -> bool:
        seen.append(chunk)
        return bool(chunk == "bad")

    sources = Sources(["bad", "", 1], ["good", "bad", 2])
    pipeline = B().add_retry(delay=0, should_handle=handle_result(is_bad)).build()
    stream = pipeline.execute_stream(sources, commit_when=lambda chunk: isinstance(chunk, int))
    assert await drain(stream) == ["good", "bad", 2]
    assert seen == ["bad", "good"]
    assert (sources.calls, sources.closed, sources.peak) == (2, 2, 1)


# ---- fallback ---------------------------------------------------------------------------------


async def test_a_failure_between_held_chunks_is_replaced() -> None:
    """Streams, fallback: what was held is dropped, the substitute begins at its own beginning."""
    sources = Sources(["", "", OSError()])
    pipeline = B().add_fallback(fallback_value="spare").build()
    assert await drain(pipeline.execute_stream(sources, commit_when=bool)) == ["spare"]
    assert sources.closed == 1


@pytest.mark.parametrize("value", [None, "", 0])
async def test_a_fallback_value_that_never_reaches_the_line_is_its_end(value: Any) -> None:
    """Streams, fallback: a value becomes one chunk, and a source that ends before the line is a success."""
    pipeline = B().add_fallback(fallback_value=value).build()
    stream = pipeline.execute_stream(Sources([OSError()]), commit_when=bool)
    assert await drain(stream) == [value]
    assert stream.committed


async def test_a_fallback_stream_has_the_same_line() -> None:
    """Streams, in small print: `commit_when` moves the line for fallback streams alike."""
    ready = anyio.Event()
    backup = Noted(["", ready, "x", "y"])
    pipeline = B().add_fallback(lambda _: backup()).build()
    stream = pipeline.execute_stream(Sources(["", OSError()]), commit_when=bool)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        assert backup.given == [""]
        assert not stream.committed
        ready.set()
    assert running.value == ["", "x", "y"]
    assert backup.closed == 1


async def test_a_fallback_stream_that_fails_before_that_line_is_the_outcome() -> None:
    """Streams: failing before its line it is the outcome, and what is outside the fallback sees it."""
    backup = Sources(["", OSError("backup")], ["", "x"])
    pipeline = B().add_retry(delay=0).add_fallback(lambda _: backup()).build()
    stream = pipeline.execute_stream(Sources([OSError("primary")]), commit_when=bool)
    assert await drain(stream) == ["", "x"]
    assert (backup.calls, backup.closed, backup.peak) == (2, 2, 1)


# ---- resumed runs -----------------------------------------------------------------------------


async def test_a_resumed_run_that_fails_before_the_line_is_another_attempt() -> None:
    """Streams, in small print: `commit_when` moves the line for resumed runs alike."""
    sources = Sources(["", "a", OSError()], ["", OSError()], ["", "a", "b"])
    pipeline = B().add_retry(delay=0, resumable=True).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=bool)) == ["", "a", "b"]
    assert (sources.calls, sources.closed, sources.peak) == (3, 3, 1)


async def test_what_a_resuming_factory_gave_before_its_line_is_dropped_when_it_fails() -> None:
    """Streams, in small print: the source that goes on has the line too: nothing of a failed one is seen."""
    later = Sources(["", OSError()], ["", "b", "c"])
    delivered: list[int] = []

    def go_on(event: Any) -> Any:
        delivered.append(event.delivered)
        return later

    pipeline = B().add_retry(delay=0, resumable=go_on).build()
    stream = pipeline.execute_stream(Sources(["", "a", OSError()]), commit_when=bool)
    assert await drain(stream) == ["", "a", "", "b", "c"]
    assert (later.calls, later.closed, later.peak) == (2, 2, 1)
    assert set(delivered) == {2}


# ---- predicates that fail ---------------------------------------------------------------------


def _raising(error: BaseException, awaited: bool) -> Callable[[Any], object]:
    async def fail_slowly(_: object) -> bool:
        await checkpoint()
        raise error

    def fail(_: object) -> bool:
        raise error

    return fail_slowly if awaited else fail


each_form = pytest.mark.parametrize("awaited", [False, True], ids=["function", "coroutine"])


@each_form
async def test_an_error_of_the_predicate_fails_the_attempt(awaited: bool) -> None:
    """Small print: an error raised by a predicate is an ordinary failure to the strategies around."""
    error, sources = LookupError("predicate"), Sources(["", "a"])
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=_raising(error, awaited))
    with pytest.raises(LookupError, match="predicate") as caught:
        await drain(stream)
    assert caught.value is error
    assert (sources.calls, sources.closed, sources.peak) == (3, 3, 1)
    assert not stream.committed


async def test_an_error_of_the_predicate_can_be_made_good() -> None:
    """Small print: it is an ordinary failure: the next attempt may go well."""
    asked: list[str] = []

    def fail_once(chunk: str) -> bool:
        asked.append(chunk)
        if len(asked) == 2:
            raise LookupError
        return bool(chunk)

    sources = Sources(["", "", "first"], ["", "second"])
    pipeline = B().add_retry(delay=0).build()
    assert await drain(pipeline.execute_stream(sources, commit_when=fail_once)) == ["", "second"]


async def test_the_manager_is_told_of_the_predicates_error() -> None:
    """Streams, in small print: a source's context manager gets the error in `__aexit__`."""
    error, manager = LookupError("predicate"), Managed(Sources(["a"])())
    stream = B().build().execute_stream(lambda: manager, commit_when=_raising(error, False))
    with pytest.raises(LookupError, match="predicate"):
        await drain(stream)
    assert (manager.told, manager.left) == ([error], 1)


@each_form
async def test_misuse_in_the_predicate_is_not_repeated(awaited: bool) -> None:
    """Calling: no strategy retries, replaces or counts a `MisuseError`."""
    sources, control = Sources(["a"]), CircuitBreakerControl()
    pipeline = (
        B()
        .add_fallback(fallback_value=1)
        .add_retry(delay=0)
        .add_circuit_breaker(control=control)
        .build()
    )
    stream = pipeline.execute_stream(sources, commit_when=_raising(MisuseError("mine"), awaited))
    with pytest.raises(MisuseError, match="mine"):
        await drain(stream)
    assert (sources.calls, sources.closed) == (1, 1)
    assert control.metrics.throughput == 0


@each_form
async def test_a_stray_stop_of_the_predicate_is_no_end(awaited: bool) -> None:
    """Streams: a `StopAsyncIteration` raised where it does not belong is an error, not an end."""
    stray, sources = StopAsyncIteration("stray"), Sources(["", "a"])
    stream = B().build().execute_stream(sources, commit_when=_raising(stray, awaited))
    with pytest.raises(RuntimeError) as caught:
        await drain(stream)
    # A coroutine function can't let it out: Python has made an error of it already.
    assert stray in (caught.value.__cause__, getattr(caught.value.__cause__, "__cause__", None))
    assert (sources.calls, sources.closed) == (1, 1)


async def test_cancelled_while_the_predicate_waits() -> None:
    """Cancellation is never a failure: nothing is repeated, and the source is closed."""
    sources = Sources(["", "a"], ["never"])

    async def wait(_: object) -> bool:
        await anyio.sleep_forever()
        return True

    pipeline = B().add_fallback(fallback_value=1).add_retry(delay=0).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, pipeline.execute_stream(sources, commit_when=wait))
        tasks.start_soon(running)
        await tick()
        assert sources.open == 1
        running.cancel()
        await tick()
        assert running.cancelled
    assert (sources.calls, sources.closed) == (1, 1)


async def test_closed_by_another_task_while_the_predicate_waits() -> None:
    """Streams: `aclose()` from another task ends the reader's loop cleanly, at every stage."""
    sources = Sources(["", "a"])

    async def wait(_: object) -> bool:
        await anyio.sleep_forever()
        return True

    stream = B().add_retry(delay=0).build().execute_stream(sources, commit_when=wait)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        await stream.aclose()
        assert sources.open == 0
        await tick()
        assert (running.value, running.error, running.cancelling) == ([], None, 0)
    assert sources.calls == 1


async def test_a_strategys_limit_cuts_a_predicate_that_waits() -> None:
    """Streams: time-outs reach to the line, the predicate's own time included."""
    clock = VirtualClock(autojump=True)
    sources = Sources([""], ["a"])

    async def wait_for_the_first(chunk: str) -> bool:
        if not chunk:
            await anyio.sleep_forever()
        return True

    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(2).build()
    stream = pipeline.execute_stream(sources, commit_when=wait_for_the_first)
    assert await drain(stream) == ["a"]
    assert (sources.closed, clock.now()) == (2, 2.0)


# ---- leaving while held chunks are undelivered ------------------------------------------------


async def leave_the_loop(stream: ResilienceStream[Any]) -> None:
    async with stream:
        async for _ in stream:
            break


async def close_it(stream: ResilienceStream[Any]) -> None:
    await anext(stream)
    await stream.aclose()


async def close_it_twice(stream: ResilienceStream[Any]) -> None:
    await close_it(stream)
    await stream.aclose()


async def close_it_from_another_task(stream: ResilienceStream[Any]) -> None:
    await anext(stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream.aclose)


async def raise_in_the_body(stream: ResilienceStream[Any]) -> None:
    async def read() -> None:
        async with stream:
            async for _ in stream:
                raise KeyError

    with pytest.raises(KeyError):
        await read()


async def be_cancelled_in_the_body(stream: ResilienceStream[Any]) -> None:
    async def read() -> None:
        async with stream:
            async for _ in stream:
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled


WAYS: dict[str, Callable[[ResilienceStream[Any]], Awaitable[None]]] = {
    way.__name__: way
    for way in (
        leave_the_loop,
        close_it,
        close_it_twice,
        close_it_from_another_task,
        raise_in_the_body,
        be_cancelled_in_the_body,
    )
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", [["a", "b"], []], ids=["line reached", "ended before the line"])
async def test_left_with_held_chunks_undelivered_the_source_is_closed(
    way: str, then: list[Any]
) -> None:
    """Streams: leaving closes the source in every case; what was held goes with it."""
    manager = Managed(sources := Closable("", "", "", *then))
    stream = B().add_timeout("1h").build().execute_stream(lambda: manager, commit_when=bool)
    await WAYS[way](stream)
    assert manager.left == 1
    assert sources.closed == 1
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_dropped_with_held_chunks_undelivered_the_source_is_closed() -> None:
    """Streams: plain `async for … break` closes it as soon as Python lets the stream go."""
    sources = Sources(["", "", "a", "b"])

    async def read() -> None:
        async for _ in B().build().execute_stream(sources, commit_when=bool):
            break

    await read()
    gc.collect()
    await tick()
    assert (sources.opened, sources.closed) == (1, 1)


@pytest.mark.parametrize("how", ["cancel", "close"])
async def test_left_while_chunks_are_being_held(how: str) -> None:
    """Streams: cancelling the consumer closes the source, as does `aclose`; nothing held is delivered."""
    sources, got = Sources(["", "", HANG]), list[Any]()
    stream = B().add_retry(delay=0).build().execute_stream(sources, commit_when=bool)
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, stream, got)
        tasks.start_soon(running)
        await tick()
        if how == "cancel":
            running.cancel()
        else:
            await stream.aclose()
        await tick()
        assert running.cancelled is (how == "cancel")
        assert running.error is None
    assert (got, sources.calls, sources.closed) == ([], 1, 1)
    assert not stream.committed


# ---- errors beyond the line -------------------------------------------------------------------


async def test_held_chunks_come_before_an_error_beyond_the_line() -> None:
    """Streams: after commit chunks and errors pass as they are, in order: the held ones first."""
    sources = Sources(["", None, "a", OSError("late")])
    stream = B().add_retry(delay=0).build().execute_stream(sources, commit_when=bool)
    assert [await anext(stream) for _ in range(3)] == ["", None, "a"]
    assert sources.open == 1
    with pytest.raises(OSError, match="late"):
        await anext(stream)
    assert sources.closed == 1


async def test_a_pull_while_another_is_pending_between_held_chunks_is_misuse() -> None:
    """Streams: a second pull raises `MisuseError` and leaves the pending one alone."""
    ready = anyio.Event()
    stream = B().build().execute_stream(Sources(["", ready, "a"]), commit_when=bool)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        with pytest.raises(MisuseError):
            await anext(stream)
        ready.set()
    assert running.value == ["", "a"]


# ---- one task, nothing kept -------------------------------------------------------------------


@pytest.mark.parametrize(
    "builder",
    [B, lambda: B().add_timeout("1h").add_retry(delay=0), lambda: B().add_hedging(delay="1h")],
    ids=["none", "timeout", "hedging"],
)
async def test_a_scope_held_open_across_held_chunks_works(
    builder: Callable[[], ResiliencePipelineBuilder[Any]],
) -> None:
    """Case ST-05: a source that holds a task group open is opened, read and closed in one task."""

    async def source() -> AsyncIterator[str]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            with anyio.fail_after(3600):
                for chunk in ("", "", "a", "b"):
                    await checkpoint()
                    yield chunk
            tasks.cancel_scope.cancel()

    stream = builder().build().execute_stream(source, commit_when=has_text)
    assert await drain_within(stream) == ["", "", "a", "b"]


class Chunk:
    """A chunk that can be watched."""

    def __init__(self, text: str) -> None:
        self.text = text


class Watched:
    """Makes chunks anew for each source and tells which of them are alive; `!` is a failure."""

    def __init__(self, *scripts: list[str]) -> None:
        self._scripts = list(scripts)
        self._chunks: list[ref[Chunk]] = []

    async def __call__(self) -> AsyncIterator[Chunk]:
        return self._stream(self._scripts.pop(0))

    async def _stream(self, script: list[str]) -> AsyncIterator[Chunk]:
        for item in script:
            await checkpoint()
            if item == "!":
                raise OSError
            yield self._make(item)

    def _make(self, text: str) -> Chunk:
        chunk = Chunk(text)
        self._chunks.append(ref(chunk))
        return chunk

    def alive(self) -> list[str]:
        return [chunk.text for each in self._chunks if (chunk := each()) is not None]


async def test_nothing_is_kept_of_held_chunks_once_delivered() -> None:
    """Performance, memory: a committed stream keeps none of the chunks that it has handed out."""
    sources = Watched(["-", "-", "a", "b"])
    stream = B().build().execute_stream(sources, commit_when=lambda chunk: chunk.text != "-")
    gc.collect()
    gc.disable()
    try:
        await anext(stream)
        assert sources.alive() == ["-", "a"]
        await anext(stream)
        assert sources.alive() == ["a"]
        await anext(stream)
        assert sources.alive() == []
        await stream.aclose()
    finally:
        gc.enable()


async def test_nothing_is_kept_of_what_a_failed_attempt_held() -> None:
    """Performance, memory: dropped chunks are gone when the next attempt has come to its line."""
    sources = Watched(["old", "old", "!"], ["-", "a"])
    pipeline = B().add_retry(delay=0).build()
    stream = pipeline.execute_stream(sources, commit_when=lambda chunk: chunk.text == "a")
    gc.collect()
    gc.disable()
    try:
        await anext(stream)
        await tick()
        assert sources.alive() == ["a"]
        await stream.aclose()
    finally:
        gc.enable()


async def test_nothing_is_kept_of_what_was_undelivered_when_a_closed_stream_is_dropped() -> None:
    """Performance, memory: what nobody has read goes with the stream, without the collector."""
    sources = Watched(["-", "-", "a", "b"])
    gc.collect()
    gc.disable()
    try:
        stream = B().build().execute_stream(sources, commit_when=lambda chunk: chunk.text == "a")
        await anext(stream)
        await stream.aclose()
        del stream
        await tick()
        assert sources.alive() == []
    finally:
        gc.enable()
