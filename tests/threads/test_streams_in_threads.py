"""Streams of synchronous code: guarded up to the first chunk, then handed to a thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn, Self, cast

import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    MisuseError,
    OptionsError,
    PropertyKey,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResumeError,
    SyncResilienceStream,
    TimeoutRejectedError,
    TokenBucket,
    current_context,
)
from resilience_pipeline.runtime._here import run_here
from resilience_pipeline.runtime._threads import ThreadRuntime
from resilience_pipeline.testing import VirtualClock
from support.beside import LIMIT, PATIENCE, Beside, Gate, HandClock, let_go, see, until
from support.calls import BoomError

B = ResiliencePipelineBuilder
EMPTY: ResiliencePipeline[Any] = ResiliencePipeline.empty
COLOUR: PropertyKey[str] = PropertyKey("colour")


class Source:
    """A generator function that notes what happens to it.

    Attributes:
        log: "open", "close" and the chunks, in the order in which they happened.
        closed: Set by each close.
    """

    def __init__(self, *runs: Iterable[Any]) -> None:
        self.log: list[Any] = []
        self.closed = threading.Event()
        self.count = 0
        self._runs = runs

    def __call__(self, *_: object) -> Iterator[Any]:
        run = self._runs[min(self.count, len(self._runs) - 1)]
        self.count += 1
        self.log.append("open")
        try:
            for chunk in run:
                if isinstance(chunk, BaseException):
                    raise chunk
                if callable(chunk):
                    chunk()
                    continue
                self.log.append(chunk)
                yield chunk
        finally:
            self.log.append("close")
            self.closed.set()


def stream(
    pipeline: ResiliencePipeline[Any], factory: Any, **options: Any
) -> SyncResilienceStream[Any]:
    return pipeline.execute_stream_sync(factory, **options)


def retrying(attempts: int = 3, **options: Any) -> ResiliencePipeline[Any]:
    return B().add_retry(max_retry_attempts=attempts, delay=0, **options).build()


# ---- what is a source -------------------------------------------------------------------------


class IterableAndManager:
    """Iterable and a context manager in one, as responses of clients are."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __enter__(self) -> Self:
        self.log.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("exit")

    def __iter__(self) -> Iterator[int]:
        yield 1
        yield 2

    def close(self) -> None:
        self.log.append("close")


@contextmanager
def managed() -> Iterator[list[int]]:
    yield [1, 2]


@pytest.mark.parametrize(
    "factory",
    [
        lambda: [1, 2],
        lambda: (1, 2),
        lambda: iter([1, 2]),
        lambda: (x for x in (1, 2)),
        lambda: range(1, 3),
        lambda: {1: "a", 2: "b"},
        lambda: map(int, "12"),
        Source([1, 2]),
        managed,
        IterableAndManager,
    ],
    ids=[
        "list",
        "tuple",
        "iterator",
        "generator",
        "range",
        "dict",
        "map",
        "generator function",
        "manager",
        "both",
    ],
)
def test_every_iterable_and_its_manager_is_a_source(factory: Callable[[], Any]) -> None:
    """The factory gives an iterable, a generator, or a context manager whose value is one."""
    with stream(B().add_retry().add_timeout(60).build(), factory) as chunks:
        assert list(chunks) == [1, 2]


def test_arguments_reach_the_factory() -> None:
    """`execute_stream_sync(factory, *args)`."""
    assert list(EMPTY.execute_stream_sync(range, 2, 4)) == [2, 3]


def test_text_is_a_source_of_its_characters() -> None:
    """It is an iterable like any other."""
    assert list(EMPTY.execute_stream_sync(lambda: "ab")) == ["a", "b"]


def test_what_is_both_is_entered_iterated_and_left_once() -> None:
    """An object that is iterable and a context manager is entered and left, and iterated."""
    both = IterableAndManager()
    assert list(stream(EMPTY, lambda: both)) == [1, 2]
    assert both.log == ["enter", "exit"]


def test_a_manager_is_told_of_an_error_of_its_source() -> None:
    """A source's context manager gets the error in `__exit__`."""
    told: list[Any] = []

    class Manager:
        def __enter__(self) -> Iterator[int]:
            return Source([1, BoomError()])()

        def __exit__(self, *details: object) -> None:
            told.append(details[0])

    with pytest.raises(BoomError):
        list(stream(EMPTY, Manager))
    assert told == [BoomError]


def test_a_manager_may_end_the_stream_by_swallowing_its_error() -> None:
    """After the line what the source's own manager swallows is an end."""

    class Manager:
        def __enter__(self) -> Iterator[int]:
            return Source([1, BoomError()])()

        def __exit__(self, *_: object) -> bool:
            return True

    assert list(stream(EMPTY, Manager)) == [1]


def test_what_a_manager_swallows_before_the_line_is_a_failed_attempt() -> None:
    """What it suppresses before commit is still a failed attempt."""
    count = 0

    class Manager:
        def __enter__(self) -> Iterator[int]:
            nonlocal count
            count += 1
            return Source([BoomError()] if count == 1 else [7])()

        def __exit__(self, *_: object) -> bool:
            return True

    assert list(stream(retrying(), Manager)) == [7]


@pytest.mark.parametrize("given", [None, 1, object()], ids=["None", "number", "object"])
def test_what_is_not_iterable_is_refused(given: object) -> None:
    """`MisuseError` that says what was returned and what to call instead."""
    calls = 0

    def factory() -> Any:
        nonlocal calls
        calls += 1
        return given

    with pytest.raises(MisuseError, match=r"execute_sync\(\)"):
        next(stream(retrying(), factory))
    assert calls == 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


async def _coroutine_function() -> list[int]:
    return [1]


class AsyncIterableOnly:
    def __aiter__(self) -> Any:
        return self


@asynccontextmanager
async def _async_manager() -> AsyncIterator[list[int]]:
    yield [1]


@pytest.mark.parametrize(
    "factory", [_async_generator, _coroutine_function, AsyncIterableOnly, _async_manager]
)
def test_async_sources_are_refused(factory: Callable[[], Any]) -> None:
    """Async iterables, managers and coroutines: the message says to use `execute_stream()`."""
    with pytest.raises(MisuseError, match=r"execute_stream\(\)"):
        next(stream(retrying(), factory))


@pytest.mark.parametrize("not_callable", [[1], iter([1]), None])
def test_a_factory_that_cant_be_called_is_refused_at_once(not_callable: Any) -> None:
    """`execute_stream_sync` of something not callable raises at the call."""
    with pytest.raises(MisuseError, match=r"execute_stream_sync\(\) takes a function"):
        EMPTY.execute_stream_sync(not_callable)


def test_bad_options_are_refused_at_once() -> None:
    """Every bad one is reported."""
    with pytest.raises(OptionsError) as caught:
        stream(EMPTY, list, max_held=0, idle_timeout=-1, total_timeout="soon")
    for name in ("max_held", "idle_timeout", "total_timeout"):
        assert name in str(caught.value)


# ---- reading ----------------------------------------------------------------------------------


def test_nothing_runs_until_the_first_chunk_is_asked_for() -> None:
    """Neither making the stream, nor `with`, nor `iter` runs anything."""
    source = Source([1])
    chunks = stream(EMPTY, source)
    iter(chunks)
    with chunks:
        assert source.count == 0
        assert next(chunks) == 1
    assert source.count == 1


def test_chunks_are_read_one_at_a_time_in_the_readers_thread() -> None:
    """Nothing is read ahead; without time limits the source stays in the caller's thread."""
    threads: list[int] = []

    def note() -> None:
        threads.append(threading.get_ident())

    source = Source([note, 1, note, 2, note])
    chunks = stream(retrying(), source)
    assert next(chunks) == 1
    assert source.log == ["open", 1]
    assert list(chunks) == [2]
    assert set(threads) == {threading.get_ident()}


@pytest.mark.parametrize("chunk", [None, 0, "", False])
def test_a_falsy_chunk_is_a_chunk(chunk: object) -> None:
    """A `None` or falsy chunk is a chunk."""
    assert list(stream(EMPTY, lambda: [chunk, 1])) == [chunk, 1]


def test_a_source_without_a_chunk_is_an_empty_stream() -> None:
    """It is a success, not retried, and committed."""
    source = Source([])
    chunks = stream(retrying(), source)
    assert list(chunks) == []
    assert source.count == 1
    assert chunks.committed


def test_committed_tells_which_side_of_the_line_one_is_on() -> None:
    """`stream.committed`."""
    chunks = stream(EMPTY, lambda: [1, 2])
    assert not chunks.committed
    assert repr(chunks) == "<SyncResilienceStream not committed>"
    next(chunks)
    assert chunks.committed
    assert repr(chunks) == "<SyncResilienceStream committed>"
    assert list(chunks) == [2]
    assert repr(chunks) == "<SyncResilienceStream over>"


def test_after_its_end_a_stream_gives_stop_iteration_for_ever() -> None:
    """After its end."""
    chunks = stream(EMPTY, lambda: [1])
    next(chunks)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(chunks)


def test_after_an_error_a_stream_gives_stop_iteration_for_ever() -> None:
    """After an error."""
    chunks = stream(EMPTY, Source([1, BoomError()]))
    next(chunks)
    with pytest.raises(BoomError):
        next(chunks)
    assert next(chunks, "over") == "over"


@pytest.mark.parametrize("how", ["end", "break", "close"])
def test_a_second_iteration_is_misuse(how: str) -> None:
    """One stream, one consumer, once."""
    chunks = stream(EMPTY, lambda: [1, 2])
    if how == "end":
        list(chunks)
    else:
        for _ in chunks:
            break
    if how == "close":
        chunks.close()
    with pytest.raises(MisuseError, match="read once"):
        iter(chunks)


def test_a_for_after_a_next_goes_on_where_it_is() -> None:
    """`for` after a `next` goes on."""
    chunks = stream(EMPTY, lambda: [1, 2, 3])
    assert next(chunks) == 1
    assert list(chunks) == [2, 3]


def test_context_variables_of_the_first_pull_hold_inside_the_source() -> None:
    """And what it sets does not leak into its reader."""
    colour: ContextVar[str] = ContextVar("colour", default="none")
    seen: list[str] = []

    def source() -> Iterator[int]:
        seen.append(colour.get())
        colour.set("source")
        yield 1
        seen.append(colour.get())
        yield 2

    colour.set("first")
    chunks = stream(EMPTY, source)
    next(chunks)
    assert colour.get() == "first"
    colour.set("later")
    list(chunks)
    assert seen == ["first", "source"]


def test_the_current_context_holds_inside_the_source_to_its_end() -> None:
    """And is gone outside of it."""
    seen: list[str | None] = []

    def source() -> Iterator[int]:
        seen.append(current_context().operation_key)
        yield 1
        seen.append(current_context().operation_key)

    for _ in stream(EMPTY, source, operation_key="key"):
        with pytest.raises(LookupError):
            current_context()
    assert seen == ["key", "key"]


def test_a_context_of_ones_own_serves_a_stream() -> None:
    """`context=`: its properties can be read afterwards."""
    context = ResilienceContext()

    def source() -> Iterator[int]:
        current_context().properties[COLOUR] = "red"
        yield 1

    assert list(stream(retrying(), source, context=context)) == [1]
    assert context.properties[COLOUR] == "red"


# ---- leaving ----------------------------------------------------------------------------------


def test_with_closes_the_source_on_the_way_out() -> None:
    """Leaving `with` early closes the source before the block ends."""
    source = Source([1, 2])
    with stream(EMPTY, source) as chunks:
        for _ in chunks:
            break
        assert source.log == ["open", 1]
    assert source.log == ["open", 1, "close"]


def test_an_error_in_the_body_closes_the_source_and_comes_out() -> None:
    """An exception in the consumer's loop body is not a failure of the source."""
    source = Source([1, 2])
    with pytest.raises(KeyError), stream(retrying(), source) as chunks:  # noqa: PT012
        for _ in chunks:
            raise KeyError
    assert source.log == ["open", 1, "close"]
    assert source.count == 1


def test_the_bodys_error_comes_first_and_the_closings_is_attached() -> None:
    """Closing fails as well."""

    def source() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise BoomError

    with pytest.raises(KeyError) as caught, stream(EMPTY, source) as chunks:  # noqa: PT012
        next(chunks)
        raise KeyError
    assert any("closing the stream failed as well" in note for note in caught.value.__notes__)


def test_an_error_of_closing_comes_out_once() -> None:
    """An error raised by the source's cleanup on the consumer's own close surfaces, once."""

    def source() -> Iterator[int]:
        try:
            yield 1
        finally:
            raise BoomError

    chunks = stream(EMPTY, source)
    next(chunks)
    with pytest.raises(BoomError):
        chunks.close()
    chunks.close()


def test_closing_before_the_first_chunk_runs_nothing() -> None:
    """Closing is allowed before the first chunk, and ends the stream."""
    source = Source([1])
    chunks = stream(EMPTY, source)
    chunks.close()
    chunks.close()
    assert list(chunks) == []
    assert source.count == 0


def test_closing_after_the_end_does_nothing() -> None:
    """Closing is idempotent."""
    source = Source([1])
    chunks = stream(EMPTY, source)
    list(chunks)
    chunks.close()
    assert source.log == ["open", 1, "close"]


@pytest.mark.parametrize("in_iterator", [False, True], ids=["iterable", "iterator"])
def test_closing_reaches_a_close_of_the_sources_own(in_iterator: bool) -> None:
    """Of an iterable and the iterator it gave, both are closed where both can be."""
    log: list[str] = []

    class Chunks:
        def __iter__(self) -> Chunks:
            return self

        def __next__(self) -> int:
            return 1

        def close(self) -> None:
            log.append("iterator")

    class Response:
        def __iter__(self) -> Chunks:
            return Chunks()

        def close(self) -> None:
            log.append("iterable")

    with stream(EMPTY, Chunks if in_iterator else Response) as chunks:
        next(chunks)
    assert log == (["iterator"] if in_iterator else ["iterator", "iterable"])


def test_a_close_that_is_async_is_refused() -> None:
    """An awaitable `close()` can't be awaited here: `MisuseError` names it."""

    class Chunks:
        def __iter__(self) -> Chunks:
            return self

        def __next__(self) -> int:
            return 1

        async def close(self) -> None:
            raise AssertionError

    chunks = stream(EMPTY, Chunks)
    next(chunks)
    with pytest.raises(MisuseError, match="close"):
        chunks.close()


def test_closing_from_another_thread_ends_the_readers_loop() -> None:
    """The reader's chunk is waited for and dropped, and its loop ends cleanly."""
    gate = Gate()
    source = Source([1, gate, 2, 3])
    chunks = stream(EMPTY, source)
    reader: Beside[list[Any]] = Beside(list, chunks)
    see(gate.entered)
    closer = Beside(chunks.close)
    until(lambda: cast(Any, chunks)._stream._closers)
    assert closer.is_running
    let_go(gate)
    assert reader.result() == [1]
    closer.result()
    assert source.log == ["open", 1, 2, "close"]


def test_closing_from_another_thread_before_the_first_chunk_ends_the_readers_loop() -> None:
    """While the first chunk is awaited."""
    gate = Gate()
    source = Source([gate, 1, 2])
    chunks = stream(retrying(), source)
    reader: Beside[list[Any]] = Beside(list, chunks)
    see(gate.entered)
    closer = Beside(chunks.close)
    until(lambda: cast(Any, chunks)._stream._closers)
    let_go(gate)
    assert reader.result() == []
    closer.result()
    assert source.log == ["open", 1, "close"]


def test_closing_from_another_thread_between_two_chunks_closes_at_once() -> None:
    """While nobody reads."""
    source = Source([1, 2])
    chunks = stream(EMPTY, source)
    next(chunks)
    Beside(chunks.close).result()
    assert source.log == ["open", 1, "close"]
    assert next(chunks, "over") == "over"


def test_closing_in_the_moment_in_which_the_reader_gets_its_chunk_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader goes between the closer's look and its wait: nobody is left to wake the closer."""
    gate = Gate()
    chunks = stream(EMPTY, Source([gate, 1, 2]))
    reader: Beside[list[Any]] = Beside(list, chunks)
    see(gate.entered)
    make = ThreadRuntime.waiter

    def waiter_when_the_reader_has_gone(runtime: ThreadRuntime) -> Any:
        let_go(gate)
        reader.result()
        return make(runtime)

    monkeypatch.setattr(ThreadRuntime, "waiter", waiter_when_the_reader_has_gone)
    Beside(chunks.close).result()


def test_an_error_of_closing_for_another_thread_is_the_closers() -> None:
    """The reader's loop ends cleanly; what the cleanup raised comes out of `close()`."""
    gate = Gate()

    def source() -> Iterator[int]:
        try:
            gate()
            yield 1
            yield 2
        finally:
            raise BoomError

    chunks = stream(EMPTY, source)
    reader: Beside[list[Any]] = Beside(list, chunks)
    see(gate.entered)
    closer = Beside(chunks.close)
    until(lambda: cast(Any, chunks)._stream._closers)
    let_go(gate)
    assert reader.result() == []
    with pytest.raises(BoomError):
        closer.result()


def test_a_pull_while_another_is_pending_is_misuse() -> None:
    """It raises `MisuseError` and leaves the pending one alone."""
    gate = Gate()
    chunks = stream(EMPTY, Source([gate, 1]))
    reader: Beside[Any] = Beside(next, chunks)
    see(gate.entered)
    with pytest.raises(MisuseError, match="one consumer"):
        next(chunks)
    let_go(gate)
    assert reader.result() == 1


def test_a_source_may_close_its_own_stream() -> None:
    """`close()` called from within the source ends the stream after its step."""
    chunks: SyncResilienceStream[Any]

    def source() -> Iterator[int]:
        yield 1
        chunks.close()
        yield 2

    chunks = stream(EMPTY, source)
    assert Beside(list, chunks).result() == [1]


@pytest.mark.parametrize("managed_source", [False, True], ids=["generator", "manager"])
def test_a_dropped_stream_closes_its_source(managed_source: bool) -> None:
    """A stream that was left without closing closes its source when Python lets it go."""
    source = Source([1, 2])

    @contextmanager
    def manager() -> Iterator[Iterator[Any]]:
        generator = source()
        try:
            yield generator
        finally:
            cast(Any, generator).close()

    chunks = stream(retrying(), manager if managed_source else source)
    next(chunks)
    del chunks
    gc.collect()
    see(source.closed)
    assert source.log == ["open", 1, "close"]


def test_a_dropped_stream_gives_its_permit_back() -> None:
    """What a stream holds goes with its source."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1, hold_streams=True).build()
    chunks = stream(pipeline, Source([1, 2]))
    next(chunks)
    del chunks
    gc.collect()
    assert pipeline.execute_sync(lambda: 1) == 1


def test_a_stream_that_was_never_read_is_dropped_silently() -> None:
    """Nothing ran, so nothing is closed."""
    source = Source([1])
    chunks = stream(EMPTY, source)
    del chunks
    gc.collect()
    assert source.count == 0


# ---- strays -----------------------------------------------------------------------------------


class Raising:
    """An iterable that raises where it is told to."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self._where, self._error = where, error

    def __enter__(self) -> Self:
        self._raise("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self._raise("exit")

    def __iter__(self) -> Raising:
        self._raise("iter")
        return self

    def __next__(self) -> int:
        self._raise("next")
        return 1

    def _raise(self, where: str) -> None:
        if where == self._where:
            raise self._error


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit])
@pytest.mark.parametrize("where", ["factory", "enter", "iter"])
def test_a_stray_end_where_a_source_is_opened_is_an_error(
    where: str, error: type[BaseException]
) -> None:
    """A stray `StopIteration` or `GeneratorExit` comes out as `RuntimeError` with it as cause."""

    def factory() -> Raising:
        if where == "factory":
            raise error
        return Raising(where, error)

    with pytest.raises(RuntimeError) as caught:
        list(stream(EMPTY, factory))
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("error", [StopAsyncIteration, GeneratorExit])
@pytest.mark.parametrize("limited", [False, True])
def test_a_stray_end_where_a_chunk_is_read_is_an_error(
    error: type[BaseException], limited: bool
) -> None:
    """Only `StopIteration` is an end there."""
    options: Any = {"idle_timeout": 60} if limited else {}
    with pytest.raises(RuntimeError) as caught:
        list(stream(EMPTY, lambda: Raising("next", error), **options))
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("error", [StopAsyncIteration, GeneratorExit])
def test_a_stray_end_after_the_first_chunk_is_an_error(error: type[BaseException]) -> None:
    """Past the line too; a generator that raises one."""
    chunks = stream(EMPTY, Source([1, error()]))
    assert next(chunks) == 1
    with pytest.raises(RuntimeError) as caught:
        next(chunks)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_a_stray_end_where_a_source_is_closed_is_an_error(error: type[BaseException]) -> None:
    """In the exit of a context manager."""
    chunks = stream(EMPTY, lambda: Raising("exit", error))
    next(chunks)
    with pytest.raises(RuntimeError) as caught:
        chunks.close()
    assert isinstance(caught.value.__cause__, error)


def test_a_stray_end_in_commit_when_is_an_error() -> None:
    """Or it would pass for the source's end."""

    def commit_when(_: int) -> NoReturn:
        raise StopIteration

    with pytest.raises(RuntimeError):
        list(stream(EMPTY, lambda: [1], commit_when=commit_when))


def test_a_stray_end_is_retried_like_any_error() -> None:
    """It is an error, not an end."""
    source = Source([StopAsyncIteration()], [1])
    assert list(stream(retrying(), source)) == [1]


# ---- the first chunk --------------------------------------------------------------------------


def test_a_retry_repeats_up_to_the_first_chunk_and_closes_first() -> None:
    """The failed source is closed first, then retried."""
    source = Source([BoomError()], [BoomError()], [1, 2])
    assert list(stream(retrying(), source)) == [1, 2]
    assert source.log == ["open", "close", "open", "close", "open", 1, 2, "close"]


def test_a_failed_connect_is_retried() -> None:
    """What the factory raises."""
    calls = 0

    def connect() -> list[int]:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise BoomError
        return [calls]

    assert list(stream(retrying(), connect)) == [3]


def test_after_the_first_chunk_the_error_reaches_the_loop() -> None:
    """Retry, then nothing: it is not repeated."""
    source = Source([1, BoomError()])
    chunks = stream(retrying(), source)
    assert next(chunks) == 1
    with pytest.raises(BoomError):
        next(chunks)
    assert source.count == 1
    assert source.log[-1] == "close"


def test_a_handled_first_chunk_is_retried() -> None:
    """For `handle_result` a stream's result is its first chunk."""
    source = Source(["bad", 1], ["good", 2])
    pipeline = retrying(should_handle=lambda event: event.outcome.value == "bad")
    assert list(stream(pipeline, source)) == ["good", 2]
    assert source.log[:3] == ["open", "bad", "close"]


def test_a_timeout_limits_the_time_to_the_first_chunk() -> None:
    """`TimeoutRejectedError`, and the source is closed, when it has come back."""
    hand = HandClock()
    gate = Gate(clock=hand)
    source = Source([gate, 1, 2])
    with pytest.raises(TimeoutRejectedError):
        next(stream(B(clock=hand).add_timeout(LIMIT).build(), source))
    let_go(gate)
    see(source.closed)
    assert source.log == ["open", 1, "close"]


def test_a_timeout_is_off_after_the_first_chunk() -> None:
    """Later chunks may take as long as they like."""
    clock = VirtualClock(autojump=True)

    def source() -> Iterator[int]:
        for chunk in range(3):
            yield chunk
            run_here(clock.sleep(100), clock)

    assert list(stream(B(clock=clock).add_timeout(5).build(), source)) == [0, 1, 2]
    assert clock.now() == 300


def test_a_breaker_counts_failed_connects_and_nothing_later() -> None:
    """Mid-stream errors are not counted."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(minimum_throughput=3, control=control).build()
    with pytest.raises(BoomError):
        list(stream(pipeline, Source([1, BoomError()])))
    assert (control.metrics.throughput, control.metrics.failures) == (1, 0)
    for _ in range(2):
        with pytest.raises(BoomError):
            list(stream(pipeline, Source([BoomError()])))
    with pytest.raises(BrokenCircuitError):
        next(stream(pipeline, Source([1])))


@pytest.mark.parametrize("value", [None, "text", [1, 2], {"a": 1}, (1,)])
def test_a_fallbacks_value_becomes_one_chunk(value: object) -> None:
    """A list is one chunk."""
    pipeline = B().add_fallback(fallback_value=value).build()
    chunks = stream(pipeline, Source([BoomError()]))
    assert list(chunks) == [value]
    assert chunks.committed


def test_a_fallbacks_generator_is_iterated_and_closed() -> None:
    """An iterator is iterated, and closed."""
    other = Source([1, 2, 3])
    pipeline = B().add_fallback(lambda _: other()).build()
    with stream(pipeline, Source([BoomError()])) as chunks:
        assert next(chunks) == 1
        assert next(chunks) == 2
    assert other.log == ["open", 1, 2, "close"]


def test_a_fallbacks_context_manager_is_entered_and_left() -> None:
    """The action may return a context manager."""
    both = IterableAndManager()
    pipeline = B().add_fallback(lambda _: both).build()
    assert list(stream(pipeline, Source([BoomError()]))) == [1, 2]
    assert both.log == ["enter", "exit"]


def test_a_fallback_never_replaces_after_the_first_chunk() -> None:
    """Its time is over then."""
    pipeline = B().add_fallback(fallback_value="other").build()
    with pytest.raises(BoomError):
        list(stream(pipeline, Source([1, BoomError()])))


def test_hedging_takes_the_first_source_to_yield() -> None:
    """A second source if the first is slow to yield; the loser is closed when it comes back."""
    gate = Gate()
    first = Source([gate, "slow"])
    second = Source([lambda: see(gate.entered), "fast", 2])
    count = iter([first, second])
    lock = threading.Lock()

    def factory() -> Iterator[Any]:
        with lock:
            source = next(count)
        return source()

    chunks = stream(B().add_hedging(delay=0.001).build(), factory)
    assert next(chunks) == "fast"
    let_go(gate)
    see(first.closed)
    assert list(chunks) == [2]
    assert first.log == ["open", "slow", "close"]


def test_a_limiter_holds_a_permit_until_the_first_chunk() -> None:
    """A long stream holds no slot."""
    pipeline = B().add_concurrency_limiter(1).build()

    def source() -> Iterator[bool]:
        yield isinstance(pipeline.settle_sync(lambda: 1).error, ConcurrencyLimiterRejectedError)
        yield isinstance(pipeline.settle_sync(lambda: 1).error, ConcurrencyLimiterRejectedError)

    assert list(stream(pipeline, source)) == [True, False]


@pytest.mark.parametrize("how", ["end", "close", "error"])
def test_hold_streams_keeps_the_permit_until_the_stream_is_closed(how: str) -> None:
    """At its end as well as at its close."""
    pipeline = B().add_concurrency_limiter(1, hold_streams=True).build()
    chunks = stream(pipeline, Source([1, 2, BoomError()] if how == "error" else [1, 2]))
    assert [next(chunks), next(chunks)] == [1, 2]
    with pytest.raises(ConcurrencyLimiterRejectedError):
        pipeline.execute_sync(lambda: 1)
    if how == "close":
        chunks.close()
    elif how == "end":
        assert next(chunks, None) is None
    else:
        with pytest.raises(BoomError):
            next(chunks)
    assert pipeline.execute_sync(lambda: 1) == 1


def test_hold_streams_keeps_the_permit_of_a_source_that_timed_out_until_it_ends() -> None:
    """What runs on in a thread keeps its permit until it ends."""
    hand = HandClock()
    gate = Gate(clock=hand)
    pipeline = (
        B(clock=hand)
        .add_concurrency_limiter(1, queue_limit=1, hold_streams=True)
        .add_timeout(LIMIT)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        next(stream(pipeline, Source([gate, 1])))
    queued = Beside(pipeline.execute_sync, lambda: 1)
    until(lambda: len(cast(Any, pipeline)._head.__self__._queue))
    let_go(gate)
    assert queued.result() == 1


def test_hold_streams_keeps_the_permit_of_a_read_that_was_given_up_on_until_it_ends() -> None:
    """Past the line too: as long as its source runs on in a thread, a stream has not ended."""
    hand = HandClock()
    gate = Gate(clock=hand)
    pipeline = B(clock=hand).add_concurrency_limiter(1, hold_streams=True).build()
    source = Source([1, gate, 2])
    chunks = stream(pipeline, source, idle_timeout=LIMIT)
    next(chunks)
    with pytest.raises(TimeoutRejectedError):
        next(chunks)
    outcome = pipeline.settle_sync(lambda: 1)
    let_go(gate)
    see(source.closed)
    assert isinstance(outcome.error, ConcurrencyLimiterRejectedError)


def test_a_rate_limiter_takes_its_permit_at_the_start() -> None:
    """It has nothing to hold."""
    pipeline = B().add_rate_limiter(TokenBucket(1, 0.001)).build()
    assert list(stream(pipeline, lambda: [1, 2])) == [1, 2]
    assert not pipeline.settle_sync(lambda: 1).ok


@pytest.mark.parametrize("threaded", [False, True])
def test_a_source_in_the_primed_state_survives_the_timeouts_thread(threaded: bool) -> None:
    """Opened in a worker under a timeout, read on by the caller, closed by it."""
    source = Source([1, 2, 3])
    builder: Any = B().add_retry()
    pipeline = (builder.add_hedging(delay=60).add_timeout(60) if threaded else builder).build()
    with stream(pipeline, source) as chunks:
        assert list(chunks) == [1, 2, 3]
    assert source.log == ["open", 1, 2, 3, "close"]


# ---- the line, and after it -------------------------------------------------------------------


def test_commit_when_draws_the_line_later() -> None:
    """Held chunks are delivered in order, and dropped when the attempt fails."""
    source = Source(["empty", BoomError()], ["empty", "text", "more"])
    chunks = stream(retrying(), source, commit_when=lambda chunk: chunk == "text")
    assert list(chunks) == ["empty", "text", "more"]
    assert source.count == 2


def test_max_held_draws_the_line_anyway() -> None:
    """The stream commits with the `max_held`-th held chunk."""
    source = Source([1, 2, BoomError()])
    chunks = stream(retrying(), source, commit_when=lambda _: False, max_held=2)
    assert [next(chunks), next(chunks)] == [1, 2]
    with pytest.raises(BoomError):
        next(chunks)
    assert source.count == 1


def test_a_source_that_ends_before_the_line_is_a_success() -> None:
    """With what was held."""
    assert list(stream(EMPTY, lambda: [1, 2], commit_when=lambda _: False)) == [1, 2]


def test_an_async_commit_when_is_refused_by_its_name() -> None:
    """Async functions in a synchronous call raise `MisuseError`."""

    async def commit_when(_: object) -> bool:
        return True

    source = Source([1])
    with pytest.raises(MisuseError, match="commit_when"):
        list(stream(retrying(), source, commit_when=commit_when))
    assert source.log == ["open", 1, "close"]


def test_idle_timeout_bounds_the_gap_between_chunks() -> None:
    """Past commit `TimeoutRejectedError` comes into the loop, and is never retried."""
    hand = HandClock()
    gate = Gate(clock=hand)
    source = Source([1, gate, 2])
    pipeline = B(clock=hand).add_retry(delay=0).build()
    chunks = stream(pipeline, source, idle_timeout=LIMIT)
    assert next(chunks) == 1
    with pytest.raises(TimeoutRejectedError) as caught:
        next(chunks)
    assert caught.value.strategy_name == "idle_timeout"
    assert caught.value.timeout == LIMIT
    assert next(chunks, "over") == "over"
    let_go(gate)
    see(source.closed)
    assert source.log == ["open", 1, 2, "close"], "it is closed by whoever was left reading it"
    assert source.count == 1


def test_idle_timeout_does_not_count_the_first_chunk_nor_the_consumers_time() -> None:
    """It runs only while a chunk is being waited for, and not for the first."""
    clock = VirtualClock(autojump=True)

    def source() -> Iterator[int]:
        run_here(clock.sleep(50), clock)
        for chunk in range(3):
            yield chunk
            run_here(clock.sleep(4), clock)

    got: list[int] = []
    for chunk in stream(B(clock=clock).build(), source, idle_timeout=5):
        got.append(chunk)
        clock_moves(clock, 30)
    assert got == [0, 1, 2]


def clock_moves(clock: VirtualClock, seconds: float) -> None:
    """Take so long in the consumer's own code."""

    async def sleep() -> None:
        await clock.sleep(seconds)

    run_here(sleep(), clock)


def test_total_timeout_bounds_the_whole_stream() -> None:
    """The consumer's time counts too."""
    clock = VirtualClock(autojump=True)

    def source() -> Iterator[int]:
        for chunk in range(9):
            yield chunk
            run_here(clock.sleep(4), clock)

    got: list[int] = []
    chunks = stream(B(clock=clock).build(), source, total_timeout=10)
    with pytest.raises(TimeoutRejectedError) as caught:  # noqa: PT012 - where it stopped is looked at
        for chunk in chunks:
            got.append(chunk)
    assert (caught.value.strategy_name, caught.value.timeout) == ("total_timeout", 10)
    assert got == [0, 1, 2], "those of 0, 4 and 8 s"


@pytest.mark.parametrize("limit", ["idle_timeout", "total_timeout"])
def test_a_source_that_is_given_up_on_is_told(limit: str) -> None:
    """`current_context().cancelled` in a source that a time limit past the line has left alone."""
    hand = HandClock()
    told = threading.Event()
    done = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        hand.expire()
        if current_context().cancelled.wait(PATIENCE):
            told.set()
        done.set()
        yield 2

    chunks = stream(B(clock=hand).build(), source, **{limit: LIMIT})
    assert next(chunks) == 1
    with pytest.raises(TimeoutRejectedError):
        next(chunks)
    see(done)
    assert told.is_set()


def test_total_timeout_is_final_before_the_line_too() -> None:
    """Never retried, and no fallback replaces it."""
    hand = HandClock()
    gate = Gate(clock=hand)
    source = Source([gate, 1])
    pipeline = B(clock=hand).add_fallback(fallback_value=9).add_retry(delay=0).build()
    with pytest.raises(TimeoutRejectedError):
        next(stream(pipeline, source, total_timeout=LIMIT))
    let_go(gate)
    see(source.closed)
    assert source.count == 1


def test_a_limited_stream_is_read_in_workers_one_chunk_at_a_time() -> None:
    """Where it is given, each chunk is read in a worker thread; all of them arrive, in order."""
    threads: set[int] = set()

    def note() -> None:
        threads.add(threading.get_ident())

    source = Source([note, 1, note, 2, note])
    with stream(EMPTY, source, idle_timeout=PATIENCE, total_timeout=PATIENCE) as chunks:
        assert list(chunks) == [1, 2]
    assert threading.get_ident() not in threads
    assert source.log == ["open", 1, 2, "close"]


def test_an_error_of_a_limited_stream_is_the_sources_own() -> None:
    """And it comes out as it is."""
    error = BoomError()
    with pytest.raises(BoomError) as caught:
        list(stream(EMPTY, Source([1, error]), idle_timeout=PATIENCE))
    assert caught.value is error


def test_a_stream_resumes_by_position() -> None:
    """`resumable=True`: run again, and what was delivered is skipped."""
    source = Source([1, 2, BoomError()], [1, 2, 3, 4])
    assert list(stream(retrying(resumable=True), source)) == [1, 2, 3, 4]
    assert source.log.index("close") < source.log.index("open", 1), "closed first"


def test_a_stream_that_differs_when_run_again_is_a_resume_error() -> None:
    """A second answer is another answer."""
    source = Source([1, 2, BoomError()], [1, 9, 3])
    chunks = stream(retrying(resumable=True), source)
    with pytest.raises(ResumeError):
        list(chunks)
    assert source.log[-1] == "close"


def test_a_stream_resumes_at_its_source() -> None:
    """`resumable=` a function of the event that gives a new factory: nothing is skipped."""
    seen: list[tuple[int, Any]] = []

    def resume(event: Any) -> Callable[[], Iterable[int]]:
        seen.append((event.delivered, event.last_chunk))
        return partial(range, event.last_chunk + 1, 5)

    pipeline = retrying(resumable=resume)
    assert list(stream(pipeline, Source([1, 2, BoomError()]))) == [1, 2, 3, 4]
    assert seen == [(2, 2)]


def test_an_async_resume_function_is_refused() -> None:
    """Async hooks and generators in a synchronous call raise `MisuseError` naming the hook."""

    async def resume(_: object) -> Any:
        raise AssertionError

    with pytest.raises(MisuseError, match="resumable"):
        list(stream(retrying(resumable=resume), Source([1, BoomError()])))


def test_what_closes_a_source_that_was_given_up_on_may_wait() -> None:
    """Its cleanup may use the library's own waits, though everything else in it is over."""
    hand = HandClock()
    gate = Gate(clock=hand)
    cleaned: list[int] = []
    done = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield 1
            gate()
            yield 2
        finally:
            cleaned.append(B().add_retry().build().execute_sync(lambda: 5))
            done.set()

    chunks = stream(B(clock=hand).build(), source, idle_timeout=LIMIT)
    next(chunks)
    with pytest.raises(TimeoutRejectedError):
        next(chunks)
    let_go(gate)
    see(done)
    assert cleaned == [5]


def test_a_resumed_stream_is_closed_when_left() -> None:
    """The source that runs, whichever it is."""
    source = Source([1, BoomError()], [1, 2, 3])
    with stream(retrying(resumable=True), source) as chunks:
        assert [next(chunks), next(chunks)] == [1, 2]
    assert source.log[-2:] == [2, "close"]


# ---- interrupts -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("position", [0, 1])
def test_an_interrupt_in_the_source_passes_and_closes_it(
    error: type[BaseException], position: int
) -> None:
    """What is no `Exception` passes every strategy, before and after the line."""
    source = Source([*range(position), error()])
    pipeline = B().add_fallback(fallback_value=1).add_retry(delay=0, resumable=True).build()
    with pytest.raises(error):
        list(stream(pipeline, source))
    assert source.count == 1
    assert source.log[-1] == "close"


def test_two_streams_of_one_pipeline_are_read_at_once() -> None:
    """Each has its own source."""
    pipeline = B().add_retry().add_timeout(PATIENCE).build()
    barrier = threading.Barrier(2)

    def source(start: int) -> Iterator[int]:
        for chunk in range(start, start + 3):
            barrier.wait(PATIENCE)
            yield chunk

    readers: list[Beside[list[int]]] = [
        Beside(list, pipeline.execute_stream_sync(source, start)) for start in (0, 10)
    ]
    assert [reader.result() for reader in readers] == [[0, 1, 2], [10, 11, 12]]
