"""Streams that go on after a failure past their first chunk: `add_retry(resumable=…)`."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import ref

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    Failure,
    MisuseError,
    OptionsError,
    PropertyKey,
    Rejected,
    ResilienceContext,
    ResilienceStream,
    ResumeError,
    Retry,
    RetryEvent,
    RetryResumeEvent,
    TimeoutRejectedError,
    current_context,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import Watching
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

pytestmark = pytest.mark.anyio


def cut(number: int = 0) -> OSError:
    """A failure in mid-stream, new each time."""
    return OSError(f"cut {number}")


def resuming(resumable: Any = True, **options: Any) -> Any:
    return B().add_retry(resumable=resumable, **{"delay": 0, **options}).build()


class Rest:
    """A function for `resumable=` that goes on with `factory`, and keeps its events."""

    def __init__(self, factory: Any) -> None:
        self.factory = factory
        self.events: list[RetryResumeEvent] = []

    def __call__(self, event: RetryResumeEvent) -> Any:
        self.events.append(event)
        return self.factory


async def read_until_error(stream: ResilienceStream[Any]) -> tuple[list[Any], Exception | None]:
    got: list[Any] = []
    try:
        async with stream:
            await collect(stream, got)
    except Exception as error:
        return got, error
    return got, None


# ---- by position ------------------------------------------------------------------------------


async def test_off_by_default_the_error_reaches_the_loop() -> None:
    """RT-13: not resumable, the consumer keeps what it has and gets the error; one attempt."""
    sources = Sources(["a", "b", cut()], ["a", "b", "c"])
    got, error = await read_until_error(B().add_retry(delay=0).build().execute_stream(sources))
    assert (got, sources.calls) == (["a", "b"], 1)
    assert isinstance(error, OSError)
    assert Retry().resumable is False


@pytest.mark.parametrize(
    ("scripts", "whole", "calls"),
    [
        ([["a", "b", cut()], ["a", "b", "c", "d"]], ["a", "b", "c", "d"], 2),
        ([[1, 2, cut()], [1, 2, 3, 4, cut()], [1, 2, 3, 4, 5]], [1, 2, 3, 4, 5], 3),
        ([[1, 2, cut()], [cut()], [1, 2, 3]], [1, 2, 3], 3),
        ([[cut()], [1, cut()], [1, 2]], [1, 2], 3),
        ([[1, cut()], [1, cut()], [1, cut()], [1, 2]], [1, 2], 4),
        ([[None, 0, "", cut()], [None, 0, "", False]], [None, 0, "", False], 2),
    ],
)
async def test_each_chunk_arrives_once(
    scripts: list[list[Any]], whole: list[Any], calls: int
) -> None:
    """RT-14: it is run again and what was delivered is skipped; one hook a further attempt."""
    sources, events = Sources(*scripts), list[RetryEvent]()
    pipeline = resuming(on_retry=events.append)
    stream = pipeline.execute_stream(sources)
    assert await drain_within(stream) == whole
    assert (sources.calls, sources.closed, sources.peak) == (calls, calls, 1)
    assert [event.attempt for event in events] == list(range(calls - 1))
    assert stream.committed


@pytest.mark.parametrize(("rerun", "position"), [(["a"], 1), ([], 0)])
async def test_a_re_run_that_ends_short_raises_from_the_failure(
    rerun: list[Any], position: int
) -> None:
    """RT-15: after the prefix; it is no attempt that could be made again."""
    failure = cut()
    sources = Sources(["a", "b", failure], rerun, ["a", "b", "c"])
    got, error = await read_until_error(resuming().execute_stream(sources))
    assert got == ["a", "b"]
    assert isinstance(error, ResumeError)
    assert error.__cause__ is failure
    assert f"ended after {position}" in str(error)
    assert (sources.calls, sources.open) == (2, 0)


@pytest.mark.parametrize(
    "rerun", [["x", "b", "c"], ["a", "x", "c"], ["ab", "", "c"], ["b", "a", "c"], ["a", b"b", "c"]]
)
async def test_a_re_run_that_differs_raises_from_the_failure(rerun: list[Any]) -> None:
    """RT-16, which is decided otherwise here: a second answer that differs is not spliced in."""
    failure = cut()
    sources = Sources(["a", "b", failure], rerun)
    got, error = await read_until_error(resuming().execute_stream(sources))
    assert got == ["a", "b"]
    assert isinstance(error, ResumeError)
    assert error.__cause__ is failure
    assert (sources.calls, sources.open) == (2, 0)


async def test_what_comes_after_the_delivered_may_differ() -> None:
    """Retry, `resumable`: checked against a digest of what was delivered, no more."""
    first, second = Sources(["a", "b", cut()], ["a", "b", "B"]), Sources(["a", cut()], ["a", "C"])
    assert await drain(resuming().execute_stream(first)) == ["a", "b", "B"]
    assert await drain(resuming().execute_stream(second)) == ["a", "C"]


async def test_what_a_resumed_run_added_is_checked_too() -> None:
    """Retry, `resumable`: delivered is delivered, whichever run it came from."""
    sources = Sources(["a", cut(1)], ["a", "b", cut(2)], ["a", "x", "c"])
    got, error = await read_until_error(resuming().execute_stream(sources))
    assert got == ["a", "b"]
    assert isinstance(error, ResumeError)
    assert str(error.__cause__) == "cut 2"


async def test_a_re_run_that_fails_short_is_another_attempt() -> None:
    """Retry, `resumable`: one that *fails* short of what was delivered is another attempt."""
    events: list[RetryEvent] = []
    sources = Sources(["a", "b", cut(1)], ["a", cut(2)], ["x", cut(3)], ["a", "b", "c"])
    pipeline = resuming(on_retry=events.append)
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b", "c"]
    assert [str(event.outcome.error) for event in events] == ["cut 1", "cut 2", "cut 3"]
    assert sources.peak == 1


async def test_the_failure_a_difference_comes_from_is_the_latest() -> None:
    """Retry, `resumable`: raised from the failure that made it run again."""
    sources = Sources(["a", "b", cut(1)], ["a", cut(2)], ["x", "y"])
    _, error = await read_until_error(resuming().execute_stream(sources))
    assert isinstance(error, ResumeError)
    assert str(error.__cause__) == "cut 2"


async def test_a_re_run_that_ends_exactly_there_ends_the_stream() -> None:
    """Retry, `resumable`: ending with the last delivered chunk is not short of it."""
    sources = Sources(["a", "b", cut()], ["a", "b"])
    assert await drain(resuming().execute_stream(sources)) == ["a", "b"]
    assert sources.open == 0


async def test_it_gives_up_after_the_attempts() -> None:
    """RT-17: each attempt fails after the same chunk; the last failure comes out as it is."""
    sources = Sources(["a", cut(1)], ["a", cut(2)], ["a", cut(3)], ["a", "b"])
    got, error = await read_until_error(resuming(max_retry_attempts=2).execute_stream(sources))
    assert (got, str(error), sources.calls) == (["a"], "cut 3", 3)
    assert isinstance(error, OSError)
    assert (sources.open, sources.peak) == (0, 1)


async def test_a_stream_that_never_fails_is_left_alone() -> None:
    """Retry, `resumable`: it is about a stream that fails after its first chunk."""
    sources = Sources(["a", "b"], [])
    assert await drain(resuming().execute_stream(sources)) == ["a", "b"]
    assert await drain(resuming().execute_stream(sources)) == []
    assert sources.calls == 2


async def test_the_consumers_own_error_resumes_nothing() -> None:
    """Streams: an exception in the consumer's loop body is not a failure of the source."""
    sources = Sources(["a", "b"])

    async def read() -> None:
        async with resuming().execute_stream(sources) as stream:
            async for _ in stream:
                raise cut()

    with pytest.raises(OSError, match="cut"):
        await read()
    assert (sources.calls, sources.open) == (1, 0)


async def test_after_its_error_a_stream_stays_at_its_end() -> None:
    """Small print: after an error a stream gives `StopAsyncIteration` for ever."""
    sources = Sources(["a", cut()], ["x"], ["a", "b"])
    stream = resuming().execute_stream(sources)
    assert await anext(stream) == "a"
    with pytest.raises(ResumeError):
        await anext(stream)
    assert await anext(stream, None) is None
    await stream.aclose()
    assert sources.calls == 2


# ---- chunks that count as equal, and those that do not ----------------------------------------


@dataclass
class Point:
    x: int
    tags: set[int] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)


class Pair(NamedTuple):
    left: int
    right: list[int]


class Colour(Enum):
    RED = 1
    BLUE = 2


class Model:
    """What models of validation libraries do: their fields apart from a set of those that were given."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.given = set(fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": self.fields, "given": self.given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Unpicklable:
    def __init__(self, text: str) -> None:
        self.lock = threading.Lock()
        self.text = text

    def __repr__(self) -> str:
        return f"Unpicklable({self.text!r})"


def joined(*parts: str) -> str:
    """A text that no constant of the compiler's is the same object as."""
    return "".join(parts)


def twice() -> list[Any]:
    shared = [joined("a", "b")]
    return [shared, shared]


#: 0 and 8 meet in one place of a small table, so that who came first is seen by who walks it.
EQUAL: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "str": (lambda: "aé\ud800", lambda: joined("a", "é\ud800")),
    "bytes": (lambda: b"ab", lambda: bytes([97, 98])),
    "bytearray": (lambda: bytearray(b"ab"), lambda: bytearray([97, 98])),
    "memoryview": (lambda: memoryview(b"ab"), lambda: memoryview(bytearray(b"ab"))),
    "-1": (lambda: -1, lambda: int("-1")),
    "-2": (lambda: -2, lambda: int("-2")),
    "big": (lambda: 10**40, lambda: int("1" + "0" * 40)),
    "True": (lambda: True, lambda: bool([1])),
    "1.0": (lambda: 1.0, lambda: float("1")),
    "nan": (lambda: float("nan"), lambda: float("nan")),
    "complex": (lambda: 1j, lambda: complex("1j")),
    "None": (lambda: None, lambda: None),
    "decimal": (lambda: Decimal("1.5"), lambda: Decimal("1.5")),
    "enum": (lambda: Colour.RED, lambda: Colour(1)),
    "dict in another order": (lambda: {"a": 1, "b": [2]}, lambda: {"b": [2], "a": 1}),
    "dict within": (lambda: [{"a": 1, "b": {}}], lambda: [{"b": {}, "a": 1}]),
    "set": (lambda: {0, 8}, lambda: {8, 0}),
    "frozenset within": (lambda: (frozenset([0, 8]),), lambda: (frozenset([8, 0]),)),
    "shared or not": (twice, lambda: [["ab"], [joined("a", "b")]]),
    "named tuple": (lambda: Pair(1, [2]), lambda: Pair(1, [2])),
    "dataclass": (lambda: Point(1), lambda: Point(1)),
    "dataclass, set within": (lambda: Point(1, {0, 8}), lambda: Point(1, {8, 0})),
    "dataclass, dict within": (
        lambda: Point(1, names={"a": 1, "b": 2}),
        lambda: Point(1, names={"b": 2, "a": 1}),
    ),
    "model": (lambda: Model(a=1, b=[2]), lambda: Model(b=[2], a=1)),
    "namespace": (lambda: SimpleNamespace(a=1), lambda: SimpleNamespace(a=1)),
    "unpicklable": (lambda: Unpicklable("a"), lambda: Unpicklable("a")),
    "unpicklable within": (lambda: [Unpicklable("a")], lambda: [Unpicklable("a")]),
    "function": (lambda: joined, lambda: joined),
}


@pytest.mark.parametrize("kind", EQUAL)
async def test_equal_chunks_count_as_equal(kind: str) -> None:
    """Retry, `resumable`: a re-run that gives equal chunks, not the same objects, does not differ."""
    first, again = EQUAL[kind]
    sources = Sources([first(), cut()], [again(), "more"])
    assert (await drain(resuming().execute_stream(sources)))[1:] == ["more"]


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (-1, -2),  # which have one hash
        (0, None),
        (1, "1"),
        ("", b""),
        ("a", "b"),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1, "b": 1}),
        ({0, 8}, {0, 16}),
        ([1, [2]], [1, 2]),
        ([1, 2], [2, 1]),
        (["a", "bc"], ["ab", "c"]),
        (Point(1), Point(2)),
        (Point(1, {1}), Point(1, {2})),
        (Model(a=1), Model(a=2)),
        (Colour.RED, Colour.BLUE),
        (Decimal(1), Decimal(2)),
        (Unpicklable("a"), Unpicklable("b")),
        (joined, twice),
        (Pair(1, []), Pair(2, [])),
    ],
    ids=repr,
)
async def test_other_chunks_count_as_other(first: Any, again: Any) -> None:
    """Retry, `resumable`: checked against a digest: equal hashes are not enough."""
    sources = Sources([first, cut()], [again, "more"])
    _, error = await read_until_error(resuming().execute_stream(sources))
    assert isinstance(error, ResumeError)


async def test_chunk_borders_count() -> None:
    """Retry, `resumable`: skipped by position, so that the same bytes cut otherwise are other chunks."""
    sources = Sources([b"ab", b"c", cut()], [b"a", b"bc", b"d"])
    _, error = await read_until_error(resuming().execute_stream(sources))
    assert isinstance(error, ResumeError)


async def test_a_chunk_that_the_consumer_changes_counts_as_it_was() -> None:
    """Retry, `resumable`: a digest of what was delivered, not of what became of it."""
    chunks = [["a"], ["b"]]
    sources = Sources([chunks[0], chunks[1], cut()], [["a"], ["b"], ["c"]])
    got: list[Any] = []
    async with resuming().execute_stream(sources) as stream:
        async for chunk in stream:
            got.append(list(chunk))
            chunk.clear()
    assert got == [["a"], ["b"], ["c"]]


async def test_chunks_are_not_kept() -> None:
    """Retry, `resumable`: a digest is of constant size, whatever went by."""

    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

        def __repr__(self) -> str:
            return "Big()"

    async def source() -> AsyncIterator[Big]:
        for _ in range(50):
            yield Big()

    peak = 0
    async with resuming().execute_stream(source) as stream:
        async for chunk in stream:
            del chunk
            peak = max(peak, Big.alive)
    assert peak <= 3


async def test_resume_errors_pickle_and_copy_whole() -> None:
    """Errors: all pickle and copy whole."""
    error = ResumeError("pipeline 'p', strategy 's': differs")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert (type(other), other.args) == (ResumeError, error.args)


async def test_a_resume_error_names_pipeline_strategy_and_number() -> None:
    """Errors: messages name the pipeline, the strategy and the number."""
    pipeline = B("letters").add_retry(resumable=True, delay=0, name="again").build()
    _, error = await read_until_error(pipeline.execute_stream(Sources(["a", "b", cut()], [])))
    assert isinstance(error, ResumeError)
    for part in ("'letters'", "'again'", "2"):
        assert part in str(error)


async def test_a_resume_error_is_not_handled_by_default() -> None:
    """Streams, small print: `ResumeError` is not handled by default, by no strategy."""
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise ResumeError("differs")

    pipeline = B().add_fallback(fallback_value=1).add_hedging(delay=-1).add_retry(delay=0).build()
    with pytest.raises(ResumeError):
        await pipeline.execute(call)
    assert calls == 1


async def test_an_outer_resumable_retry_lets_a_resume_error_out() -> None:
    """Streams, small print: not handled by default: nor is it what to resume from."""
    sources = Sources(["a", cut()], ["x"], ["a", "b"])
    retry: dict[str, Any] = {"resumable": True, "delay": 0}
    pipeline = B().add_retry(**retry).add_retry(**retry).build()
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert (got, sources.calls) == (["a"], 2)
    assert isinstance(error, ResumeError)


# ---- by a function ----------------------------------------------------------------------------


async def test_a_function_says_what_goes_on() -> None:
    """Retry, `resumable`: its factory goes on where the last one failed; nothing is skipped."""
    failure = cut()
    first, rest = Sources(["a", "b", failure]), Sources(["b", "c"])
    resume = Rest(rest)
    assert await drain(resuming(resume).execute_stream(first)) == ["a", "b", "b", "c"]
    (event,) = resume.events
    assert (event.delivered, event.last_chunk) == (2, "b")
    assert isinstance(event.outcome, Failure)
    assert event.outcome.error is failure
    assert isinstance(event.context, ResilienceContext)
    assert (first.calls, rest.calls, first.open, rest.open) == (1, 1, 0, 0)


async def test_the_function_may_be_a_coroutine_function() -> None:
    """Hooks, predicates and generators may be plain functions or coroutine functions."""
    rest = Sources(["b"])

    async def resume(event: RetryResumeEvent) -> Any:
        await tick(2)
        return rest

    assert await drain(resuming(resume).execute_stream(Sources(["a", cut()]))) == ["a", "b"]


async def test_its_factory_is_called_without_arguments() -> None:
    """Streams, small print: its factory is called without arguments."""
    first, rest = Sources(["a", cut()]), Sources(["b", cut()], ["c"])
    stream = resuming(Rest(rest)).execute_stream(first, 1, 2)
    assert await drain(stream) == ["a", "b", "c"]
    assert first.arguments == [(1, 2)]
    assert rest.arguments == [(), ()]


async def test_it_is_called_only_when_something_was_delivered() -> None:
    """Streams, small print: called only when something was delivered; else the first factory is."""
    resume = Rest(Sources(["b"]))
    first = Sources([cut()], [cut()], ["a", cut()])
    assert await drain(resuming(resume).execute_stream(first, "x")) == ["a", "b"]
    assert first.arguments == [("x",)] * 3
    assert [event.delivered for event in resume.events] == [1]


async def test_it_is_called_again_for_each_further_attempt() -> None:
    """Retry, `resumable`: also when what it gave fails before a chunk; all counted over the stream."""
    rests = [Sources([cut(2)]), Sources(["b", "c", cut(3)]), Sources(["d"])]
    left, events = list(rests), list[RetryResumeEvent]()

    def resume(event: RetryResumeEvent) -> Any:
        events.append(event)
        return left.pop(0)

    assert await drain(resuming(resume).execute_stream(Sources(["a", cut(1)]))) == list("abcd")
    seen = [(each.delivered, each.last_chunk, str(each.outcome.error)) for each in events]
    assert seen == [(1, "a", "cut 1"), (1, "a", "cut 2"), (3, "c", "cut 3")]
    assert [each.calls for each in rests] == [1, 1, 1]


async def test_it_is_called_after_the_wait_and_not_when_there_is_no_attempt_left() -> None:
    """Retry, `resumable`: what it is asked for is the next attempt."""
    log: list[str] = []
    clock = VirtualClock(autojump=True)

    def resume(event: RetryResumeEvent) -> Any:
        log.append(f"resume at {clock.now() - begun:g}")
        return Sources([cut()])

    pipeline = (
        B(clock=clock)
        .add_retry(
            resumable=resume, max_retry_attempts=2, delay=3, on_retry=lambda _: log.append("retry")
        )
        .build()
    )
    begun = clock.now()
    got, error = await read_until_error(pipeline.execute_stream(Sources(["a", cut()])))
    assert (got, str(error)) == (["a"], "cut 0")
    assert log == ["retry", "resume at 3", "retry", "resume at 6"]


@pytest.mark.parametrize("given", [None, 1, "ab", ["b"]], ids=repr)
async def test_what_is_no_function_is_a_misuse(given: Any) -> None:
    """Retry, `resumable`: a function of the event returning a new factory."""
    sources = Sources(["a", cut()])
    got, error = await read_until_error(resuming(Rest(given)).execute_stream(sources))
    assert got == ["a"]
    assert isinstance(error, MisuseError)
    assert repr(given) in str(error)
    assert str(error.__context__) == "cut 0"
    assert (sources.calls, sources.open) == (1, 0)


async def test_a_factory_that_makes_no_stream_is_a_misuse() -> None:
    """Calling: no strategy retries a `MisuseError`."""
    resume = Rest(lambda: 1)
    got, error = await read_until_error(resuming(resume).execute_stream(Sources(["a", cut()])))
    assert (got, len(resume.events)) == (["a"], 1)
    assert isinstance(error, MisuseError)


async def test_its_own_exception_surfaces() -> None:
    """Small print: an ordinary failure with the attempt's failure as its `__context__`."""
    failure = cut()

    def resume(_: RetryResumeEvent) -> Any:
        raise KeyError("mine")

    sources = Sources(["a", failure])
    got, error = await read_until_error(resuming(resume).execute_stream(sources))
    assert got == ["a"]
    assert isinstance(error, KeyError)
    assert error.__context__ is failure
    assert (sources.calls, sources.open) == (1, 0)


async def test_its_factory_may_be_any_factory() -> None:
    """Streams: an async iterable, a generator, or a context manager, or a coroutine function of one."""
    manager = Managed(Sources(["b", cut()])())
    closable = Closable("c", cut())

    async def connect() -> Any:
        await tick(1)
        return Sources(["d"])()

    left: list[Any] = [lambda: manager, lambda: closable, connect]
    pipeline = resuming(lambda _: left.pop(0))
    assert await drain(pipeline.execute_stream(Sources(["a", cut()]))) == list("abcd")
    assert (manager.left, closable.closed) == (1, 1)


async def test_a_function_may_resume_with_nothing_more() -> None:
    """Streams: a source that ends without a chunk is a successful, empty stream."""
    pipeline = resuming(Rest(Sources([])))
    assert await drain(pipeline.execute_stream(Sources(["a", cut()]))) == ["a"]


# ---- one budget, one back-off, over the whole stream ------------------------------------------


async def retries_of(*scripts: list[Any], **options: Any) -> tuple[list[RetryEvent], Any]:
    """The `on_retry` events of a stream whose sources play these scripts, and what it came to."""
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_retry(**{"resumable": True, "delay": 1, "on_retry": events.append, **options})
        .build()
    )
    return events, await read_until_error(pipeline.execute_stream(Sources(*scripts)))


async def test_progress_resets_neither_attempts_nor_delays() -> None:
    """Retry, `resumable`: one attempt budget and one back-off sequence for the whole stream."""
    events, (got, error) = await retries_of(
        [cut()],
        [1, cut()],
        [1, 2, cut()],
        [cut()],
        [1, 2, 3, cut()],
        [1, 2, 3, 4],
        max_retry_attempts=4,
        backoff_type="exponential",
    )
    assert got == [1, 2, 3]
    assert isinstance(error, OSError)
    assert [(event.attempt, event.delay) for event in events] == [(0, 1), (1, 2), (2, 4), (3, 8)]


async def test_progress_resets_no_delays_of_a_function() -> None:
    """Retry, `resumable`: one budget and one sequence, in the other form too."""
    rest = Sources([2, cut()], [cut()], [3, cut()], [4])
    events, (got, error) = await retries_of(
        [1, cut()], resumable=Rest(rest), backoff_type="linear", max_retry_attempts=3
    )
    assert got == [1, 2, 3]
    assert isinstance(error, OSError)
    assert [event.delay for event in events] == [1, 2, 3]


async def test_decorrelated_jitter_goes_on() -> None:
    """Retry, jitter: `prev` from 0 per execution, of which a resumed stream is one."""

    async def delays(*scripts: list[Any]) -> list[float]:
        events: list[RetryEvent] = []
        pipeline = (
            B(clock=VirtualClock(autojump=True), random=lambda: 0.5)
            .add_retry(
                resumable=True,
                delay=1,
                use_jitter=True,
                backoff_type="exponential",
                on_retry=events.append,
            )
            .build()
        )
        await drain(pipeline.execute_stream(Sources(*scripts)))
        return [event.delay for event in events]

    late = await delays([1, cut()], [1, 2, cut()], [1, 2, 3, cut()], [1, 2, 3, 4])
    assert late == await delays([cut()], [cut()], [cut()], [1])
    assert len(set(late)) == 3


async def test_on_retry_is_told_of_failures_in_mid_stream() -> None:
    """Retry, `on_retry`: context, outcome, attempt, delay, and the duration of the attempt."""
    clock = VirtualClock()
    go = anyio.Event()
    failure = cut()
    events: list[RetryEvent] = []
    pipeline = B(clock=clock).add_retry(resumable=True, delay=1, on_retry=events.append).build()
    sources = Sources(["a", go, failure], ["a", "b"])
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        await clock.advance(5)
        go.set()
        await tick()
        (event,) = events
        assert event.outcome == Failure(failure)
        assert (event.attempt, event.delay, event.duration) == (0, 1, 5)
        assert event.context.attempt == 0
        await clock.advance(0.9)
        assert not running.done
        await clock.advance(0.1)
        await tick()
        assert running.value == ["a", "b"]


async def test_on_retry_that_raises_ends_the_stream_with_its_error() -> None:
    """Hooks: an exception raised by a hook surfaces, the failure as its `__context__`."""
    failure = cut()

    def on_retry(_: RetryEvent) -> None:
        raise KeyError("hook")

    sources = Sources(["a", failure])
    got, error = await read_until_error(resuming(on_retry=on_retry).execute_stream(sources))
    assert got == ["a"]
    assert isinstance(error, KeyError)
    assert error.__context__ is failure
    assert (sources.calls, sources.open) == (1, 0)


async def test_should_handle_is_asked_about_failures_in_mid_stream() -> None:
    """Retry, `resumable`: not handled, the failure reaches the loop as it is."""
    failure = cut()
    sources = Sources(["a", KeyError("handled")], ["a", "b", failure], ["a", "b", "c"])
    pipeline = resuming(should_handle=handle(KeyError))
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert got == ["a", "b"]
    assert error is failure
    assert (sources.calls, sources.open) == (2, 0)


async def test_a_predicate_is_also_asked_about_the_last_attempt() -> None:
    """Retry, predicate: also asked about the last attempt; one that returns an awaitable is awaited."""
    asked: list[tuple[int, str]] = []

    async def should_handle(event: Any) -> bool:
        await tick(1)
        if not event.outcome.ok:
            asked.append((event.attempt, str(event.outcome.error)))
        return not event.outcome.ok

    sources = Sources(["a", cut(1)], ["a", cut(2)])
    pipeline = resuming(should_handle=should_handle, max_retry_attempts=1)
    assert str((await read_until_error(pipeline.execute_stream(sources)))[1]) == "cut 2"
    assert asked == [(0, "cut 1"), (1, "cut 2")]


async def test_a_first_chunk_of_a_resumed_run_can_be_handled_as_a_result() -> None:
    """Streams, small print: for `handle_result` a stream's result is its first chunk."""
    pipeline = resuming(
        Rest(Sources(["bad"], ["b"])), should_handle=handle(OSError) | handle_result("bad".__eq__)
    )
    assert await drain(pipeline.execute_stream(Sources(["a", cut()]))) == ["a", "b"]


async def test_a_misuse_in_mid_stream_is_not_resumed_from() -> None:
    """Calling: no strategy retries a `MisuseError`."""
    sources = Sources(["a", MisuseError("mine")], ["a", "b"])
    _, error = await read_until_error(resuming().execute_stream(sources))
    assert (str(error), sources.calls) == ("mine", 1)


async def test_a_client_error_in_mid_stream_is_not_resumed_from() -> None:
    """What counts as failure: a 4xx other than 408 and 429 is not handled by default."""

    class StatusError(Exception):
        status = 404

    sources = Sources(["a", StatusError()], ["a", "b"])
    _, error = await read_until_error(resuming().execute_stream(sources))
    assert (type(error), sources.calls) == (StatusError, 1)


@pytest.mark.parametrize(("limit", "calls"), [(4, 3), (3.9, 2), (1, 1)])
async def test_no_attempt_starts_later_than_max_elapsed(limit: float, calls: int) -> None:
    """Retry, `max_elapsed`: after the first attempt began, whatever was delivered since."""
    clock = VirtualClock(autojump=True)
    sources = Sources([1, cut()], [1, 2, cut()], [1, 2, 3])
    pipeline = B(clock=clock).add_retry(resumable=True, delay=2, max_elapsed=limit).build()
    _, error = await read_until_error(pipeline.execute_stream(sources))
    assert sources.calls == calls
    assert (error is None) is (calls == 3)


class DemandingError(Exception):
    status_code = 503

    def __init__(self, seconds: int) -> None:
        super().__init__(seconds)
        self.response = SimpleNamespace(
            status_code=self.status_code, headers={"Retry-After": f"{seconds}"}
        )


async def test_a_demand_in_mid_stream_is_waited_for() -> None:
    """Retry, Retry-After: when it is longer than the computed delay it is waited instead."""
    events, (got, _) = await retries_of([1, DemandingError(7)], [1, 2])
    assert got == [1, 2]
    assert [event.delay for event in events] == [7]


async def test_a_demand_that_asks_too_much_comes_out() -> None:
    """Retry, Retry-After: a demand beyond `max_retry_after` is not waited for."""
    events, (got, error) = await retries_of([1, DemandingError(61)], [1, 2])
    assert (got, events) == ([1], [])
    assert getattr(error, "retry_after", None) == 61


async def test_a_delay_generator_is_asked_in_mid_stream() -> None:
    """Retry, `delay_generator`: context, outcome, attempt; wins over a demand."""
    asked: list[tuple[int, str]] = []

    def generator(event: Any) -> str | None:
        asked.append((event.attempt, str(event.outcome.error)))
        return None if event.attempt else "3s"

    events, (got, _) = await retries_of(
        [1, DemandingError(7)], [1, 2, cut(1)], [1, 2, 3], delay_generator=generator
    )
    assert got == [1, 2, 3]
    assert [event.delay for event in events] == [3, 1]
    assert asked == [(0, "7"), (1, "cut 1")]


# ---- leaving: cancelled, closed, dropped ------------------------------------------------------


class Phases:
    """A stream that can be stopped in each phase of being resumed.

    Where it hangs, two sources have been opened at most, and one chunk has been delivered.
    """

    NAMES = ("hook", "wait", "function", "connect", "first chunk", "skip", "after")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.clock = VirtualClock()
        self.sources = Sources(["a", "b", cut()], self._rerun())
        self.pipeline: Any = (
            B(clock=self.clock)
            .add_retry(
                delay=5 if phase == "wait" else 0,
                on_retry=self._on_retry,
                resumable=self._function if phase == "function" else True,
            )
            .build()
        )

    def _rerun(self) -> list[Any]:
        hanging: dict[str, list[Any]] = {"first chunk": [HANG], "skip": ["a", HANG]}
        return hanging.get(self.phase, ["a", "b", HANG])

    async def _on_retry(self, _: RetryEvent) -> None:
        assert self.sources.open == 0  # closed before anybody is told, and before the wait
        if self.phase == "hook":
            await anyio.sleep_forever()

    async def _function(self, _: RetryResumeEvent) -> Any:
        await anyio.sleep_forever()

    async def connect(self) -> Any:
        if self.phase == "connect" and self.sources.calls:
            await anyio.sleep_forever()
        return self.sources()

    @property
    def runs(self) -> int:
        return 2 if self.phase in {"first chunk", "skip", "after"} else 1

    def stream(self) -> ResilienceStream[Any]:
        stream: ResilienceStream[Any] = self.pipeline.execute_stream(self.connect)
        return stream


@pytest.mark.parametrize("how", ["scope", "task"])
@pytest.mark.parametrize("phase", Phases.NAMES)
async def test_cancelled_in_each_phase(phase: str, how: str, mode: str) -> None:
    """Retry, cancellation: during call or wait it comes out at once; the sources are closed."""
    if mode == "trio" and how == "task":
        how = "scope"  # tasks have no `cancel()` there
    phases, got = Phases(phase), list[Any]()
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, phases.stream(), got)
        tasks.start_soon(running)
        await tick(60)
        assert (got, running.done) == (["a", "b"], False)
        running.cancel(how)
        await tick()
        assert (running.done, running.cancelled) == (True, True)
    assert (phases.sources.calls, phases.sources.open) == (phases.runs, 0)
    assert running.cancelling == (1 if how == "task" else 0)


@pytest.mark.parametrize("phase", Phases.NAMES)
async def test_closed_by_another_task_in_each_phase(phase: str) -> None:
    """Streams: `aclose()` from another task while a chunk is awaited ends the reader's loop cleanly."""
    phases = Phases(phase)
    stream = phases.stream()

    async def read() -> list[Any]:
        chunks = await drain(stream)
        await tick(3)
        return chunks

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick(60)
        await stream.aclose()
        assert phases.sources.open == 0
        await tick()
        assert (running.value, running.error, running.cancelled) == (["a", "b"], None, False)
        assert running.cancelling == 0
    assert phases.sources.calls == phases.runs


async def test_cancelled_while_waiting_keeps_the_failure_as_context(mode: str) -> None:
    """Retry, cancellation: the last failure is kept as its `__context__`."""
    failure = cut()
    seen: list[BaseException | None] = []
    pipeline = B(clock=VirtualClock()).add_retry(resumable=True, delay=1).build()

    async def read() -> None:
        try:
            await drain(pipeline.execute_stream(Sources(["a", failure])))
        except BaseException as error:
            link = error.__context__
            while link is not None:
                seen.append(link)
                link = link.__context__
            raise

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert failure in seen


@pytest.mark.parametrize("slow", [0, 1])
async def test_closed_by_another_task_while_a_failed_source_is_being_closed(slow: int) -> None:
    """Streams: a source that has failed is closed to its end, and nothing is made after that."""
    release, begun = anyio.Event(), anyio.Event()
    made: list[Closable] = []

    async def closing() -> None:
        begun.set()
        await release.wait()

    def connect() -> Closable:
        is_slow = len(made) == slow
        script = ["a", "b", cut()] if not made else ["a", cut()]
        made.append(Closable(*script, closing=closing if is_slow else None))
        return made[-1]

    stream = B(close_timeout=1e6).add_retry(resumable=True, delay=0).build().execute_stream(connect)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await begun.wait()
        await tick()
        closer = Running(stream.aclose)
        tasks.start_soon(closer)
        await tick()
        release.set()
        await tick()
        assert (running.done, running.value, running.error) == (True, ["a", "b"], None)
        assert (closer.done, closer.error) == (True, None)
    assert [each.closed for each in made] == [1] * (slow + 1)


async def test_left_early_in_a_resumed_run() -> None:
    """Streams, leaving: `async with` closes the source on the way out, the one that is read."""
    sources = Sources(["a", cut()], ["a", "b", "c"])
    async with resuming().execute_stream(sources) as stream:
        async for chunk in stream:
            if chunk == "b":
                break
    assert (sources.calls, sources.closed) == (2, 2)


async def test_broken_off_without_a_block_in_a_resumed_run() -> None:
    """Streams, leaving: plain `async for … break` closes it as soon as Python lets the stream go."""
    sources = Sources(["a", cut()], ["a", "b", "c"])
    async for chunk in resuming().execute_stream(sources):
        if chunk == "b":
            break
    sources.scripts = ()  # which hold the error, and that by its frames the stream
    gc.collect()
    await tick()
    assert (sources.calls, sources.open) == (2, 0)


async def test_dropped_with_its_reader_while_it_waits() -> None:
    """Streams, leaving: a reader that is thrown away during the wait leaves nothing open."""
    sources = Sources(["a", cut()], ["a", "b"])
    stream = (
        B(clock=VirtualClock()).add_retry(resumable=True, delay=1).build().execute_stream(sources)
    )
    assert await anext(stream) == "a"
    async with anyio.create_task_group() as tasks:
        running = Running(stream.__anext__)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    del stream, running
    gc.collect()
    await tick()
    assert (sources.calls, sources.open) == (1, 0)


async def test_closing_a_resumed_stream_is_idempotent() -> None:
    """Streams, leaving: closing is idempotent and reaches the source's own `aclose`, once."""
    closables = [Closable("a", cut()), Closable("a", "b", "c")]
    left = iter(closables)
    stream = resuming().execute_stream(lambda: next(left))
    assert [await anext(stream), await anext(stream)] == ["a", "b"]
    await stream.aclose()
    await stream.aclose()
    assert [each.closings for each in closables] == [1, 1]


async def test_a_resumed_source_that_fails_to_close_surfaces() -> None:
    """Small print: an error raised by the source's cleanup on the consumer's own close surfaces."""

    async def closing() -> None:
        raise ValueError("cleanup")

    closables = [Closable("a", cut()), Closable("a", "b", closing=closing)]
    left = iter(closables)
    stream = resuming().execute_stream(lambda: next(left))
    assert [await anext(stream), await anext(stream)] == ["a", "b"]
    with pytest.raises(ValueError, match="cleanup"):
        await stream.aclose()


async def test_what_closing_a_failed_source_raises_stops_nothing() -> None:
    """Streams: errors of closing something discarded are swallowed."""

    async def closing() -> None:
        raise ValueError("cleanup")

    closables = [
        Closable("a", "b", cut(), closing=closing),
        Closable("a", cut(), closing=closing),
        Closable("a", "b", "c"),
    ]
    left = iter(closables)
    assert await drain(resuming().execute_stream(lambda: next(left))) == ["a", "b", "c"]
    assert [each.closings for each in closables] == [1, 1, 1]


async def test_failed_sources_are_closed_out_of_reach_of_the_caller() -> None:
    """Streams: what the library closes itself is closed shielded from the caller's cancellation."""
    release, begun = anyio.Event(), anyio.Event()

    async def closing() -> None:
        begun.set()
        await release.wait()

    closable = Closable("a", cut(), closing=closing)
    stream = (
        B(close_timeout=1e6)
        .add_retry(resumable=True, delay=0)
        .build()
        .execute_stream(lambda: closable)
    )
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, stream, [])
        tasks.start_soon(running)
        await begun.wait()
        running.cancel()
        await tick()
        assert not running.done
        release.set()
        await tick()
        assert running.cancelled
    assert closable.closed == 1


# ---- what a source's context manager makes of it ----------------------------------------------


async def test_a_manager_that_swallows_the_failure_ends_the_stream() -> None:
    """Streams: past the line an error that its own manager suppresses is an end, also when resumable."""
    made: list[Managed] = []

    def connect() -> Managed:
        made.append(Managed(Sources(["a", cut()])(), swallows=True))
        return made[-1]

    assert await drain(resuming().execute_stream(connect)) == ["a"]
    assert [each.left for each in made] == [1]


async def test_a_manager_is_told_the_failure_before_the_next_one_is_entered() -> None:
    """Streams, small print: a source's context manager gets the error in `__aexit__`."""
    failure = cut()
    managers = [Managed(Sources(["a", failure])()), Managed(Sources(["a", "b"])())]
    left = iter(managers)

    def connect() -> Managed:
        manager = next(left)
        assert all(each.left == each.entered for each in managers)
        return manager

    assert await drain(resuming().execute_stream(connect)) == ["a", "b"]
    assert [each.told for each in managers] == [[failure], [None]]


class ServiceError(Exception):
    """What a client makes of its transport's errors."""


@asynccontextmanager
async def translating(chunks: Any) -> AsyncIterator[Any]:
    try:
        yield chunks
    except OSError as error:
        raise ServiceError("translated") from error


async def test_a_translated_failure_is_what_is_handled() -> None:
    """Streams: what a manager raises from the failure takes its place, in each run alike."""
    asked: list[str] = []

    def should_handle(event: Any) -> bool:
        if not event.outcome.ok:
            asked.append(type(event.outcome.error).__name__)
        return not event.outcome.ok

    scripts = Sources(["a", "b", cut()], ["a", cut()], ["a", "b", "c"])
    pipeline = resuming(should_handle=should_handle)
    assert await drain(pipeline.execute_stream(lambda: translating(scripts()))) == list("abc")
    assert asked == ["ServiceError", "ServiceError"]
    assert scripts.open == 0


async def test_a_translated_failure_comes_out_when_the_attempts_are_used_up() -> None:
    """Retry, last attempt: its outcome comes out as it is."""
    scripts = Sources(["a", "b", cut()], ["a", cut()])
    pipeline = resuming(max_retry_attempts=1)
    got, error = await read_until_error(pipeline.execute_stream(lambda: translating(scripts())))
    assert got == ["a", "b"]
    assert isinstance(error, ServiceError)
    assert scripts.open == 0


async def test_a_manager_that_swallows_does_not_swallow_a_resume_error() -> None:
    """Retry, `resumable`: a re-run that differs raises `ResumeError`, whatever its manager thinks of it."""
    managers = [
        Managed(Sources(["a", cut()])()),
        Managed(Sources(["x", "b"])(), swallows=True),
    ]
    left = iter(managers)
    got, error = await read_until_error(resuming().execute_stream(lambda: next(left)))
    assert got == ["a"]
    assert isinstance(error, ResumeError)
    assert [each.left for each in managers] == [1, 1]


async def test_a_re_run_whose_manager_swallows_its_failure_short_of_the_prefix() -> None:
    """Retry, `resumable`: so it has ended there: short of what was delivered."""
    managers = [
        Managed(Sources(["a", "b", cut()])()),
        Managed(Sources(["a", cut()])(), swallows=True),
    ]
    left = iter(managers)
    got, error = await read_until_error(resuming().execute_stream(lambda: next(left)))
    assert got == ["a", "b"]
    assert isinstance(error, ResumeError)


# ---- sources that hold scopes open ------------------------------------------------------------


@pytest.mark.parametrize("holding", ["task group", "cancel scope", "fail_after"])
@pytest.mark.parametrize("leaving", ["read to the end", "left early", "fails for good"])
async def test_sources_that_hold_scopes_open(holding: str, leaving: str) -> None:
    """Streams: works under every strategy: opened, read and closed in one task, all of the runs."""
    attempts: list[int] = []

    @asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        if holding == "task group":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anyio.sleep_forever)
                yield
                tasks.cancel_scope.cancel()
        elif holding == "cancel scope":
            with anyio.CancelScope():
                yield
        else:
            with anyio.fail_after(1e6):
                yield

    async def source() -> AsyncIterator[int]:
        attempts.append(0)
        number = len(attempts)
        async with hold():
            for chunk in range(5):
                await tick(1)
                if number < 4 and chunk > number:
                    raise cut()
                yield chunk

    pipeline = (
        B()
        .add_timeout(1e6)
        .add_retry(
            resumable=True,
            delay=0,
            max_retry_attempts=2 if leaving == "fails for good" else 3,
        )
        .add_timeout(1e6)
        .build()
    )
    got: list[int] = []
    error: BaseException | None = None
    with anyio.CancelScope() as around:
        try:
            async with pipeline.execute_stream(source) as stream:
                async for chunk in stream:
                    got.append(chunk)
                    if leaving == "left early" and chunk == 3:
                        break
        except (OSError, ExceptionGroup) as caught:
            error = caught
    assert not around.cancelled_caught
    assert (error is not None) is (leaving == "fails for good")
    assert got == list(range(5 if leaving == "read to the end" else 4))


# ---- strategies inside run again, those outside do not ----------------------------------------


async def test_a_timeout_inside_bounds_the_first_chunk_of_each_run() -> None:
    """Streams: time to first chunk, of the re-run as well, which is then another attempt."""
    clock, events = VirtualClock(), list[RetryEvent]()
    sources = Sources(["a", cut()], [HANG], ["a", "b"])
    pipeline = (
        B(clock=clock)
        .add_retry(resumable=True, delay=0, on_retry=events.append)
        .add_timeout(3)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        assert sources.calls == 2
        await clock.advance(3)
        await tick()
        assert running.value == ["a", "b"]
    assert [type(event.outcome) for event in events] == [Failure, Rejected]
    assert isinstance(events[1].outcome.error, TimeoutRejectedError)
    assert (sources.open, sources.peak) == (0, 1)


async def test_a_timeout_inside_does_not_bound_the_skipping() -> None:
    """Streams, timeout: off after the first chunk of a run; what is skipped takes its time."""
    clock, go = VirtualClock(), anyio.Event()
    pipeline = B(clock=clock).add_retry(resumable=True, delay=0).add_timeout(3).build()
    sources = Sources(["a", "b", cut()], ["a", go, "b", "c"])
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        await clock.advance(100)
        assert not running.done
        go.set()
        await tick()
        assert running.value == ["a", "b", "c"]


async def test_a_timeout_outside_is_over() -> None:
    """Streams, timeout: off after commit, and being resumed is after it."""
    clock = VirtualClock(autojump=True)
    sources = Sources(["a", cut()], ["a", "b"])
    pipeline = B(clock=clock).add_timeout(3).add_retry(resumable=True, delay=10).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]


async def test_a_breaker_inside_is_asked_for_each_run() -> None:
    """Retry, `resumable`: an open circuit refuses the re-run as it would any attempt."""
    control, sources = CircuitBreakerControl(), Sources(["a", cut()], ["a", "b"])
    pipeline = B().add_retry(resumable=True, delay=0).add_circuit_breaker(control=control).build()
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "a"
    await _isolate(control)
    with pytest.raises(BrokenCircuitError):
        await anext(stream)
    assert (sources.calls, sources.open) == (1, 0)


async def _isolate(control: CircuitBreakerControl) -> None:
    control.isolate()


async def test_a_breaker_inside_counts_runs_and_no_errors_in_mid_stream() -> None:
    """Streams, circuit breaker: mid-stream errors are not counted; each run's first chunk is."""
    control = CircuitBreakerControl()
    pipeline = B().add_retry(resumable=True, delay=0).add_circuit_breaker(control=control).build()
    sources = Sources([1, cut()], [1, 2, cut()], [cut()], [1, 2, 3])
    assert await drain(pipeline.execute_stream(sources)) == [1, 2, 3]
    assert (control.metrics.throughput, control.metrics.failures) == (4, 1)


async def test_a_breaker_outside_counts_the_stream_once() -> None:
    """Retry, `resumable`: what is outside the retry has seen its stream committed."""
    control = CircuitBreakerControl()
    pipeline = B().add_circuit_breaker(control=control).add_retry(resumable=True, delay=0).build()
    sources = Sources([1, cut()], [cut()], [1, cut()], [cut()], [1, 2])
    await read_until_error(pipeline.execute_stream(sources))
    assert (control.metrics.throughput, control.metrics.failures) == (1, 0)


@pytest.mark.parametrize("hold_streams", [False, True])
@pytest.mark.parametrize("place", ["inside", "outside"])
async def test_a_limiters_permit(place: str, hold_streams: bool) -> None:
    """Streams, limiters: inside, each run takes a permit and gives it back; outside, one is held."""
    builder: Any = B()
    retry = partial(builder.add_retry, resumable=True, delay=0, max_retry_attempts=2)
    if place == "outside":
        builder.add_concurrency_limiter(1, hold_streams=hold_streams)
        retry()
    else:
        retry()
        builder.add_concurrency_limiter(1, hold_streams=hold_streams)
    pipeline = builder.build()
    sources = Sources(["a", cut()], ["a", "b", cut()], ["a", "b", "c", "d"])
    async with pipeline.execute_stream(sources) as stream:
        assert [await anext(stream) for _ in "abc"] == ["a", "b", "c"]
        _, error = await read_until_error(pipeline.execute_stream(Sources(["z"])))
        assert isinstance(error, ConcurrencyLimiterRejectedError) is hold_streams
    assert await drain(pipeline.execute_stream(Sources(["z"]))) == ["z"]
    assert sources.calls == 3


async def test_a_held_permit_is_back_before_the_wait() -> None:
    """Streams: the failed source is closed first, and with it goes its permit."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_retry(resumable=True, delay=5, max_retry_attempts=1)
        .add_concurrency_limiter(1, hold_streams=True)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, pipeline.execute_stream(Sources(["a", cut()], ["a", "b"])))
        tasks.start_soon(running)
        await tick()
        assert await drain(pipeline.execute_stream(Sources(["z"]))) == ["z"]
        await clock.advance(5)
        await tick()
        assert running.value == ["a", "b"]


async def test_a_permit_held_outside_comes_back_when_resuming_fails() -> None:
    """Streams, small print: the permit comes back at the end of the stream as well as at its close."""
    pipeline = (
        B()
        .add_concurrency_limiter(1, hold_streams=True)
        .add_retry(resumable=True, delay=0, max_retry_attempts=1)
        .build()
    )
    for scripts in ([["a", cut()], ["a", cut()]], [["a", cut()], ["x"]], [["a", cut()], ["a"]]):
        await read_until_error(pipeline.execute_stream(Sources(*scripts)))
        assert await drain(pipeline.execute_stream(Sources(["z"]))) == ["z"]


async def test_hedging_inside_races_for_the_re_run() -> None:
    """Streams, hedging: a second source if the first is slow to yield, in a re-run too."""
    clock = VirtualClock()
    sources = Sources(["a", cut()], [HANG], ["a", "b"])
    pipeline = B(clock=clock).add_retry(resumable=True, delay=0).add_hedging(delay=2).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick(60)
        assert sources.calls == 2
        await clock.advance(2)
        await tick(60)
        assert running.value == ["a", "b"]
    assert (sources.calls, sources.open) == (3, 0)


async def test_hedging_outside_is_over() -> None:
    """Retry, `resumable`: the winner goes on by itself."""
    sources = Sources(["a", cut()], ["a", "b", cut()], ["a", "b", "c"])
    pipeline = B().add_hedging(delay=1e6).add_retry(resumable=True, delay=0).build()
    assert await drain_within(pipeline.execute_stream(sources)) == ["a", "b", "c"]
    assert (sources.calls, sources.open) == (3, 0)


async def test_a_fallback_outside_never_replaces_a_stream_that_can_not_go_on() -> None:
    """Streams, fallback: after the first chunk it never replaces."""
    sources = Sources(["a", cut()])
    pipeline = (
        B()
        .add_fallback(fallback_value="spare")
        .add_retry(resumable=True, delay=0, max_retry_attempts=1)
        .build()
    )
    got, error = await read_until_error(pipeline.execute_stream(sources))
    assert (got, str(error)) == (["a"], "cut 0")


async def test_a_fallback_inside_serves_a_function_form() -> None:
    """Retry, `resumable`: strategies inside the retry run again around what goes on."""
    pipeline = (
        B()
        .add_retry(resumable=Rest(Sources([cut()])), delay=0)
        .add_fallback(fallback_value="spare")
        .build()
    )
    assert await drain(pipeline.execute_stream(Sources(["a", cut()]))) == ["a", "spare"]


# ---- the line and the bounds ------------------------------------------------------------------


async def test_commit_when_moves_the_line_of_resumed_runs() -> None:
    """Streams, small print: `commit_when` moves the line for resumed runs alike."""
    clock = VirtualClock()
    sources = Sources(
        ["ready", "a", cut(1)], ["ready", HANG], ["ready", cut(2)], ["ready", "a", "b"]
    )
    events: list[RetryEvent] = []
    pipeline = (
        B(clock=clock)
        .add_retry(resumable=True, delay=0, on_retry=events.append)
        .add_timeout(3)
        .build()
    )
    stream = pipeline.execute_stream(sources, commit_when=lambda chunk: chunk != "ready")
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, stream)
        tasks.start_soon(running)
        await tick()
        assert sources.calls == 2
        await clock.advance(3)
        await tick()
        assert running.value == ["ready", "a", "b"]
    assert [type(event.outcome.error) for event in events] == [
        OSError,
        TimeoutRejectedError,
        OSError,
    ]


async def test_what_was_held_back_counts_as_delivered() -> None:
    """Retry, `resumable`: the consumer has got the held chunks too before anything is resumed."""
    resume = Rest(Sources(["c"]))
    stream = resuming(resume).execute_stream(
        Sources(["ready", "a", "b", cut()]), commit_when=lambda chunk: chunk == "a"
    )
    assert await drain(stream) == ["ready", "a", "b", "c"]
    assert [(event.delivered, event.last_chunk) for event in resume.events] == [(3, "b")]


async def test_a_failure_before_the_line_drops_what_was_held() -> None:
    """Streams: held chunks are dropped when the attempt fails; nothing was delivered yet."""
    resume = Rest(Sources(["never"]))
    sources = Sources(["ready", cut()], ["steady", "a"])
    stream = resuming(resume).execute_stream(sources, commit_when=lambda chunk: chunk == "a")
    assert await drain(stream) == ["steady", "a"]
    assert resume.events == []


async def test_max_held_holds_for_resumed_runs() -> None:
    """Streams: with the `max_held`-th held chunk it commits, and so does a resumed run."""
    sources = Sources([1, 2, 3, cut()], [1, 2, 3, 4])
    stream = resuming().execute_stream(sources, commit_when=lambda _: False, max_held=2)
    assert await drain(stream) == [1, 2, 3, 4]


@pytest.mark.parametrize("phase", ["wait", "first chunk", "skip", "after"])
@pytest.mark.parametrize("bound", ["idle_timeout", "total_timeout"])
async def test_the_bounds_hold_while_resuming_and_are_never_retried(bound: str, phase: str) -> None:
    """Streams, CO-1: past commit they raise `TimeoutRejectedError` into the loop, never retry."""
    phases = Phases(phase)
    limits: dict[str, Any] = {bound: 3}
    stream = phases.pipeline.execute_stream(phases.connect, **limits)
    async with anyio.create_task_group() as tasks:
        running = Running(read_until_error, stream)
        tasks.start_soon(running)
        await tick(60)
        await phases.clock.advance(2.9)
        assert not running.done
        await phases.clock.advance(0.1)
        await tick()
        got, error = running.value
        assert got == ["a", "b"]
        assert isinstance(error, TimeoutRejectedError)
        assert (error.strategy_name, error.timeout) == (bound, 3)
        assert running.cancelling == 0
    assert (phases.sources.calls, phases.sources.open) == (phases.runs, 0)


async def test_a_total_timeout_counts_over_all_runs() -> None:
    """Streams: `total_timeout` bounds the whole stream."""
    clock = VirtualClock(autojump=True)
    sources = Sources([1, cut()], [1, 2, cut()], [1, 2, 3, cut()], [1, 2, 3, 4])
    pipeline = B(clock=clock).add_retry(resumable=True, delay=2).build()
    got, error = await read_until_error(pipeline.execute_stream(sources, total_timeout=5))
    assert got == [1, 2, 3]
    assert isinstance(error, TimeoutRejectedError)
    assert sources.calls == 3


# ---- arguments, contexts, nesting -------------------------------------------------------------


@pytest.mark.parametrize("resumable", [True, Rest(Sources(["b"]))], ids=["position", "function"])
async def test_a_stream_that_is_not_idempotent_is_never_resumed(resumable: Any) -> None:
    """Calling: `idempotent=False` repeats only attempts whose callback was never invoked."""
    sources = Sources(["a", cut()], ["a", "b"])
    got, error = await read_until_error(
        resuming(resumable).execute_stream(sources, idempotent=False)
    )
    assert (got, str(error), sources.calls) == (["a"], "cut 0", 1)


async def test_one_shot_arguments_are_refused_for_a_re_run() -> None:
    """Retry, arguments: a second attempt with a generator among them is a `MisuseError`."""
    failure = cut()
    sources = Sources(["a", failure], ["a", "b"])
    numbers = (number for number in range(3))
    events: list[RetryEvent] = []
    got, error = await read_until_error(
        resuming(on_retry=events.append).execute_stream(sources, numbers)
    )
    assert got == ["a"]
    assert isinstance(error, MisuseError)
    assert error.__cause__ is failure
    assert (sources.calls, sources.open, events) == (1, 0, [])


async def test_one_shot_arguments_do_not_matter_where_they_are_not_used_again() -> None:
    """Streams, small print: the factory of a function is called without arguments."""
    rest = Sources(["b", cut()], ["c"])
    numbers = (number for number in range(3))
    pipeline = resuming(Rest(rest))
    assert await drain(pipeline.execute_stream(Sources(["a", cut()]), numbers)) == list("abc")
    got = await drain(pipeline.execute_stream(partial(Sources(["a", cut()]), numbers)))
    assert got[0] == "a"


async def test_one_shot_arguments_matter_before_the_first_chunk() -> None:
    """Retry, arguments: nothing was delivered, so that the factory itself would run again."""
    numbers = (number for number in range(3))
    stream = resuming(Rest(Sources(["b"]))).execute_stream(Sources([cut()]), numbers)
    with pytest.raises(MisuseError):
        await drain(stream)


KEY = PropertyKey[list[int]]("seen")
VARIABLE: ContextVar[str] = ContextVar("variable", default="unset")


async def test_re_runs_see_their_attempt_and_the_callers_context() -> None:
    """Context: `context.attempt` is this attempt's number; the context's properties are the caller's."""
    script = Sources([1, cut()], [1, 2, cut()], [1, 2, 3])

    async def source() -> AsyncIterator[int]:
        context = current_context()
        context.properties.set(KEY, [*context.properties.get(KEY, []), context.attempt])
        async for chunk in script():
            assert current_context() is context
            yield chunk

    context = ResilienceContext("letters")
    keys: list[str | None] = []
    pipeline = resuming(on_retry=lambda event: keys.append(event.context.operation_key))
    assert await drain(pipeline.execute_stream(source, context=context)) == [1, 2, 3]
    assert context.properties[KEY] == [0, 1, 2]
    assert keys == ["letters", "letters"]


async def test_re_runs_see_the_variables_of_the_first_pull() -> None:
    """Streams, small print: the context variables of the first pull hold inside the source to its end."""
    seen: list[str] = []
    script = Sources(["a", cut()], ["a", "b"])

    async def source() -> AsyncIterator[str]:
        seen.append(VARIABLE.get())
        async for chunk in script():
            yield chunk
            seen.append(VARIABLE.get())

    async def hook(_: object) -> None:
        seen.append(VARIABLE.get())

    token = VARIABLE.set("first")
    try:
        stream = resuming(on_retry=hook).execute_stream(source)
        assert await anext(stream) == "a"
        VARIABLE.set("later")
        assert await drain(stream) == ["b"]
        assert VARIABLE.get() == "later"
    finally:
        VARIABLE.reset(token)
    assert set(seen) == {"first"}
    with pytest.raises(LookupError):
        current_context()


async def test_the_callers_context_is_free_once_the_stream_is_committed() -> None:
    """Context: one context serves one execution at a time; re-runs need it no more."""
    context = ResilienceContext()
    pipeline = resuming()
    first = pipeline.execute_stream(Sources(["a", cut()], ["a", "b"]), context=context)
    assert await anext(first) == "a"
    second = pipeline.execute_stream(Sources(["x", cut()], ["x", "y"]), context=context)
    assert await anext(second) == "x"
    assert (await drain(first), await drain(second)) == (["b"], ["y"])


@pytest.mark.parametrize("which", ["outer", "inner"])
async def test_through_nested_pipelines(which: str) -> None:
    """Building: a nested pipeline's retry resumes as its own would."""
    sources = Sources(["a", cut()], ["a", "b", cut()], ["a", "b", "c"])
    inner, outer = B("inner"), B("outer")
    retry: dict[str, Any] = {"resumable": True, "delay": 0}
    if which == "outer":
        pipeline = outer.add_retry(**retry).add_pipeline(inner.add_timeout(1e6).build()).build()
    else:
        nested = inner.add_retry(**retry).build()
        pipeline = outer.add_timeout(1e6).add_pipeline(nested).build()
    assert await drain_within(pipeline.execute_stream(sources)) == ["a", "b", "c"]
    assert (sources.calls, sources.open) == (3, 0)


async def test_two_resumable_retries_the_inner_one_goes_first() -> None:
    """Retry, `resumable`: when the inner attempts are used up, the outer one runs it all again."""
    sources = Sources(
        ["a", cut(1)], ["a", cut(2)], ["a", "b", cut(3)], ["a", cut(4)], ["a", "b", "c"]
    )
    inner: list[RetryEvent] = []
    outer: list[RetryEvent] = []
    pipeline = (
        B()
        .add_retry(resumable=True, delay=0, on_retry=outer.append, max_retry_attempts=2)
        .add_retry(resumable=True, delay=0, on_retry=inner.append, max_retry_attempts=1)
        .build()
    )
    assert await drain_within(pipeline.execute_stream(sources)) == ["a", "b", "c"]
    assert [str(event.outcome.error) for event in inner] == ["cut 1", "cut 3"]
    assert [str(event.outcome.error) for event in outer] == ["cut 2", "cut 4"]
    assert (sources.calls, sources.open, sources.peak) == (5, 0, 1)


async def test_a_stream_within_a_stream() -> None:
    """Streams: a source that reads a stream of another resumable pipeline closes it, whatever happens."""
    sources = Sources(["a", cut()], ["a", "b", cut()], ["a", "b", cut()], ["a", "b", "c"])
    inner, outer = resuming(max_retry_attempts=1), resuming(max_retry_attempts=1)

    async def source() -> AsyncIterator[str]:
        async with inner.execute_stream(sources) as stream:
            async for chunk in stream:
                yield chunk

    assert await drain_within(outer.execute_stream(source)) == ["a", "b", "c"]
    assert (sources.calls, sources.open) == (4, 0)


async def test_one_pipeline_resumes_many_streams_at_once() -> None:
    """Retry: attempts, delays and digests live in the execution, not in the pipeline."""
    pipeline = resuming(max_retry_attempts=2)
    running: list[Running] = []
    async with anyio.create_task_group() as tasks:
        for number in range(5):
            scripts = [[number, cut()], [number, "b", cut()], [number, "b", "c"]]
            running.append(Running(drain_within, pipeline.execute_stream(Sources(*scripts))))
            tasks.start_soon(running[-1])
    assert [each.value for each in running] == [[number, "b", "c"] for number in range(5)]


async def test_calls_know_nothing_of_it() -> None:
    """Retry, `resumable`: streams only; on a call it is without effect."""
    calls: list[int] = []

    async def call(number: int) -> int:
        calls.append(number)
        if len(calls) < 3:
            raise cut()
        return number

    resume = Rest(Sources([]))
    for resumable in (True, resume):
        calls.clear()
        assert await resuming(resumable).execute(call, 7) == 7
        assert calls == [7, 7, 7]
    outcome = await resuming(resume, max_retry_attempts=1).settle(call, 7)
    assert (outcome.ok, outcome.attempt_count) == (True, 1)
    assert resume.events == []


async def test_wrapped_generator_functions_are_resumed() -> None:
    """Calling, `wrap`: an async generator function becomes one that gives a guarded stream."""
    script = Sources(["a", cut()], ["a", "b"])

    @resuming().wrap  # type: ignore[untyped-decorator]
    async def letters(prefix: str) -> AsyncIterator[str]:
        async for chunk in script():
            yield prefix + chunk

    assert await drain(letters("-")) == ["-a", "-b"]


@pytest.mark.parametrize("given", [None, 1, "yes", 0.0, []], ids=repr)
async def test_other_options_are_refused(given: Any) -> None:
    """Options: a bad value raises an `OptionsError` that names the field with what it may be."""
    with pytest.raises(OptionsError, match="resumable"):
        Retry(resumable=given)


async def test_options_read_back() -> None:
    """Small print: options read back under their names."""
    resume = Rest(None)
    assert Retry(resumable=True).resumable is True
    assert Retry(resumable=resume).resumable is resume


# ---- what ends a run without being a failure --------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
async def test_a_base_exception_is_not_resumed_from(error: type[BaseException]) -> None:
    """RT-18: what is no `Exception` passes through every strategy; the source is closed."""
    sources = Sources(["a", error("out")], ["a", "b"])
    caught: list[BaseException] = []
    stream = resuming().execute_stream(sources)
    assert await anext(stream) == "a"
    try:
        await anext(stream)
    except BaseException as raised:
        caught.append(raised)
    assert [type(each) for each in caught] == [error]
    assert (sources.calls, sources.open) == (1, 0)


async def test_a_failure_leaves_no_circle_behind() -> None:
    """Design, rule 13: no name stays bound to an exception, in a stream that could not go on either."""
    failures: list[str] = []

    class CutError(OSError):
        def __del__(self) -> None:
            failures.append(str(self))

    class Script(Sources):
        async def play(self, item: object) -> bool:
            if isinstance(item, int):
                raise CutError(f"cut {item}")
            return await super().play(item)

    gc.collect()
    gc.disable()
    try:
        got, error = await read_until_error(
            resuming(max_retry_attempts=2).execute_stream(Script(["a", 1], ["a", "b", 2], ["a", 3]))
        )
        assert got == ["a", "b"]
        del error
        await tick(5)
        assert sorted(failures) == ["cut 1", "cut 2", "cut 3"]
    finally:
        gc.enable()


async def leave_after_b(stream: ResilienceStream[Any]) -> None:
    async for chunk in stream:
        if chunk == "b":
            break


@pytest.mark.parametrize("way", [drain, leave_after_b, read_until_error])
@pytest.mark.parametrize("last", [["a", "b", "c"], ["a", "x"], [OSError]], ids=str)
async def test_nothing_is_kept_of_a_resumed_stream_that_is_over(way: Any, last: list[Any]) -> None:
    """Performance, memory: nothing is kept, and no circle is left to the collector."""

    async def source() -> AsyncIterator[Any]:
        for item in scripts.next_script():
            if item is OSError:
                raise OSError
            yield item

    gc.collect()
    gc.disable()
    try:
        scripts = Sources(["a", OSError], ["a", "b", OSError], last)
        stream = resuming().execute_stream(source)
        gone = ref(stream)
        with suppress(ResumeError, OSError):
            await way(stream)
        del stream
        await tick(5)
        assert gone() is None
    finally:
        gc.enable()


# ---- odds and ends ----------------------------------------------------------------------------


async def test_a_re_run_goes_through_what_is_inside_alone() -> None:
    """Building: of pipelines nested in one another too, and from inside the retry to the callback."""
    log: list[str] = []
    nested: Any = B().add(Watching("above", log)).add_retry(resumable=True, delay=0)
    nested = nested.add(Watching("below", log)).build()
    outer: Any = B().add(Watching("outer", log)).add_pipeline(nested).add(Watching("inner", log))
    stream = outer.build().execute_stream(Sources(["a", cut()], ["a", "b"]))
    assert await anext(stream) == "a"
    first, once_more = log.copy(), [">below", ">inner", "<inner", "<below"]
    assert first == [">outer", ">above", *once_more, "<above", "<outer"]
    assert await drain(stream) == ["b"]
    assert log == [*first, *once_more]


@pytest.mark.parametrize("place", ["inside", "outside"])
async def test_hedging_with_a_function(place: str) -> None:
    """Retry, `resumable`: a function's factory is what hedged attempts of a re-run call."""
    first, rest = Sources(["a", cut()]), Sources(["b"])
    builder: Any = B()
    retry = partial(builder.add_retry, resumable=Rest(rest), delay=0)
    if place == "inside":
        retry().add_hedging(delay=1e6)
    else:
        builder.add_hedging(delay=1e6)
        retry()
    assert await drain_within(builder.build().execute_stream(first, "x")) == ["a", "b"]
    assert (first.arguments, rest.arguments) == ([("x",)], [()])


async def test_a_pull_that_was_cancelled_while_resuming_ends_the_stream() -> None:
    """Source systems, trap 3: the next pull finds the end; nothing is run again behind its back."""
    sources = Sources(["a", cut()], ["a", "b"])
    pipeline = B(clock=VirtualClock()).add_retry(resumable=True, delay=1).build()
    stream = pipeline.execute_stream(sources)
    assert await anext(stream) == "a"
    async with anyio.create_task_group() as tasks:
        running = Running(stream.__anext__)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert await drain(stream) == []
    assert sources.calls == 1


async def test_a_second_pull_while_resuming_is_a_misuse() -> None:
    """Streams: a pull while another task's is pending raises `MisuseError` and leaves that alone."""
    clock = VirtualClock()
    stream = (
        B(clock=clock)
        .add_retry(resumable=True, delay=1)
        .build()
        .execute_stream(Sources(["a", cut()], ["a", "b"]))
    )
    assert await anext(stream) == "a"
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        with pytest.raises(MisuseError):
            await anext(stream)
        await clock.advance(1)
        await tick()
        assert running.value == ["b"]


async def test_the_same_error_again_and_again_comes_out_as_it_is() -> None:
    """Retry, last attempt: its outcome comes out as it is, also where every run raises one object."""
    failure = cut()
    sources = Sources(["a", failure], ["a", failure], [failure])
    _, error = await read_until_error(resuming(max_retry_attempts=3).execute_stream(sources))
    assert error is failure
    assert (error.__context__, error.__cause__) == (None, None)


class Deaf:
    """A source that gives some chunks, and once its reader is cancelled answers that with something else."""

    def __init__(self, *chunks: str, answer: str | Exception) -> None:
        self._chunks = iter(chunks)
        self._answer = answer
        self.closed = 0

    def __aiter__(self) -> Deaf:
        return self

    async def __anext__(self) -> str:
        for chunk in self._chunks:
            return chunk
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    async def aclose(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(
    "deaf",
    [
        lambda: Deaf(answer="a"),
        lambda: Deaf("a", answer="b"),
        lambda: Deaf("a", answer="x"),
        lambda: Deaf("a", answer=cut(1)),
        lambda: Deaf("a", "b", answer="c"),
    ],
    ids=["first chunk", "skipped chunk", "other chunk", "error while skipping", "next chunk"],
)
async def test_closing_is_not_undone_by_a_source_that_does_not_listen(
    deaf: Callable[[], Deaf],
) -> None:
    """Streams: `aclose()` from another task ends the loop, whatever the source answers to it."""
    last = deaf()
    left: list[Any] = [Closable("a", "b", cut()), last]
    stream = resuming().execute_stream(lambda: left.pop(0))
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        closer = Running(stream.aclose)
        tasks.start_soon(closer)
        await tick()
        assert closer.done
        assert (running.value, running.error, running.cancelling) == (["a", "b"], None, 0)
    assert last.closed == 1


@pytest.mark.parametrize("place", ["hook", "function", "source"])
async def test_closed_from_within(place: str) -> None:
    """Streams: by any task, the reader's own included; it ends there and no cancellation is left over."""
    sources = Sources(["a", cut()], ["a", "b"])

    async def close(_: object = None) -> None:
        await stream.aclose()

    async def source() -> AsyncIterator[Any]:
        if place == "source" and sources.calls:
            await close()
        async with aclosing(sources()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def read() -> list[Any]:
        chunks = await drain(stream)
        await tick(3)
        return chunks

    stream = resuming(
        close if place == "function" else True, on_retry=close if place == "hook" else None
    ).execute_stream(source)
    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick(60)
        assert running.done
    assert (running.value, running.error, running.cancelled) == (["a"], None, False)
    assert running.cancelling == 0
    assert sources.open == 0
