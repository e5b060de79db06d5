"""Caches in plain threads, and shared by threads and event loops: who runs it, who waits, who is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import (
    CacheControl,
    Failure,
    MisuseError,
    Rejected,
    ResiliencePipelineBuilder,
    Success,
    current_context,
)
from resilience_pipeline.strategies import _shared_work
from support.beside import LIMIT, Beside, Closable, Gate, HandClock, see, until
from support.scripted import tick

B = ResiliencePipelineBuilder


def key_k(_: object) -> str:
    return "k"


def joined(control: CacheControl, count: int) -> None:
    """Wait until so many have joined what is in flight."""
    until(lambda: control.statistics().hits == count)


# ---- calls in threads -------------------------------------------------------------------------


def test_a_call_runs_in_its_callers_thread() -> None:
    """Contract: without a time limit or hedging from end to end, and the second call is served."""
    pipeline = B().add_cache().build()
    threads: list[int] = []

    def load() -> None:
        threads.append(threading.get_ident())

    for _ in range(2):
        assert pipeline.execute_sync(load) is None
    assert threads == [threading.get_ident()]


def test_equal_calls_of_several_threads_are_one() -> None:
    """The first thread runs it, the others wait for it."""
    gate = Gate("v")
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    callers = [Beside(pipeline.execute_sync, gate) for _ in range(5)]
    joined(control, 4)
    gate.opened.set()
    assert [caller.result() for caller in callers] == ["v"] * 5
    assert gate.calls == 1


def test_each_thread_gets_an_error_of_its_own() -> None:
    """As in event loops."""
    gate = Gate(error=ConnectionError("down"))
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    callers = [Beside(pipeline.settle_sync, gate) for _ in range(3)]
    joined(control, 2)
    gate.opened.set()
    outcomes = [caller.result() for caller in callers]
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert len({id(outcome.error) for outcome in outcomes}) == 3
    assert gate.calls == 1


def test_an_interrupt_is_that_of_the_thread_that_runs_the_call() -> None:
    """The threads that have waited call again."""
    entered, opened = threading.Event(), threading.Event()
    control = CacheControl()
    pipeline = B().add_cache(key=key_k, control=control).build()

    def interrupted() -> str:
        entered.set()
        see(opened)
        raise KeyboardInterrupt

    first = Beside(pipeline.execute_sync, interrupted)
    see(entered)
    others = [Beside(pipeline.execute_sync, lambda: "again") for _ in range(3)]
    joined(control, 3)
    opened.set()
    with pytest.raises(KeyboardInterrupt):
        first.result()
    assert [other.result() for other in others] == ["again"] * 3


def test_a_thread_that_was_given_up_on_goes_on_for_the_others() -> None:
    """A timeout outside detaches its caller alone; nobody tells the call that it is unwanted."""
    clock = HandClock()
    entered, opened = threading.Event(), threading.Event()
    flags: list[bool] = []
    control = CacheControl()

    def load() -> str:
        entered.set()
        see(opened)
        flags.append(current_context().cancelled.is_set())
        return "v"

    cached = B(clock=clock).add_cache(control=control).build()
    limited = B(clock=clock).add_timeout(LIMIT).add_pipeline(cached).build()
    short = Beside(limited.settle_sync, load)
    see(entered)
    long = Beside(cached.execute_sync, load)
    joined(control, 1)
    clock.expire()
    assert isinstance(short.result(), Rejected)
    assert long.is_running
    opened.set()
    assert long.result() == "v"
    assert flags == [False]
    assert cached.execute_sync(load) == "v"
    assert len(flags) == 1


def test_with_the_last_who_is_given_up_on_the_call_is_told() -> None:
    """Then its flag is set, nothing is stored, and what it brings is closed."""
    clock = HandClock()
    entered = threading.Event()
    thing = Closable()
    ended = threading.Event()
    control = CacheControl()

    def load() -> Closable:
        entered.set()
        assert current_context().cancelled.wait(30)
        ended.set()
        return thing

    pipeline = B(clock=clock).add_timeout(LIMIT).add_cache(control=control).build()
    call = Beside(pipeline.settle_sync, load)
    see(entered)
    clock.expire()
    assert isinstance(call.result(), Rejected)
    see(ended)
    see(thing.closed)
    until(lambda: control.statistics().in_flight == 0)
    assert control.statistics().size == 0
    assert thing.closings == 1


def test_one_who_waits_is_given_up_on() -> None:
    """It leaves; the call and its caller don't notice."""
    clock = HandClock()
    gate = Gate("v")
    control = CacheControl()
    cached = B(clock=clock).add_cache(control=control).build()
    limited = B(clock=clock).add_timeout(LIMIT).add_pipeline(cached).build()
    one = Beside(cached.execute_sync, gate)
    see(gate.entered)
    other = Beside(limited.settle_sync, gate)
    joined(control, 1)
    clock.expire()
    assert isinstance(other.result(), Rejected)
    gate.opened.set()
    assert one.result() == "v"


def test_recursion_in_a_thread() -> None:
    """What would wait for itself goes past the cache, also through a worker thread."""
    for builder in (B().add_cache(), B().add_cache().add_timeout(60)):
        pipeline = builder.build()
        calls: list[int] = []

        def load(pipeline: Any = pipeline, calls: list[int] = calls) -> int:
            calls.append(1)
            return 7 if len(calls) == 2 else pipeline.execute_sync(load)

        assert Beside(pipeline.execute_sync, load).result() == 7


# ---- streams in threads -----------------------------------------------------------------------


def test_a_stream_is_replayed() -> None:
    """Its source is read once, and only as far as is asked."""
    produced: list[int] = []

    def source() -> Iterator[int]:
        for number in range(4):
            produced.append(number)
            yield number

    pipeline = B().add_cache().build()
    with pipeline.execute_stream_sync(source) as one, pipeline.execute_stream_sync(source) as two:
        assert [next(one), next(one)] == [0, 1]
        assert [next(two), next(two), next(two)] == [0, 1, 2]
        assert produced == [0, 1, 2]
        assert list(one) == [2, 3]
        assert list(two) == [3]
    assert list(pipeline.execute_stream_sync(source)) == [0, 1, 2, 3]
    assert produced == [0, 1, 2, 3]


def test_threads_that_read_one_stream() -> None:
    """All get everything in order; the source is never entered by two at once."""
    inside = threading.Lock()
    opened: list[int] = []

    def source() -> Iterator[int]:
        opened.append(1)
        for number in range(200):
            assert inside.acquire(blocking=False)
            inside.release()
            yield number

    pipeline = B().add_cache().build()
    readers = [Beside(lambda: list(pipeline.execute_stream_sync(source))) for _ in range(6)]
    assert [reader.result() for reader in readers] == [[*range(200)]] * 6
    assert len(opened) == 1


def test_the_last_thread_to_leave_closes() -> None:
    """An unfinished source is closed, once, and forgotten."""
    log: list[str] = []

    def source() -> Iterator[int]:
        log.append("open")
        try:
            yield from range(5)
        finally:
            log.append("close")

    pipeline = B().add_cache().build()
    one, two = (pipeline.execute_stream_sync(source) for _ in range(2))
    assert (next(one), next(two)) == (0, 0)
    one.close()
    assert log == ["open"]
    two.close()
    assert log == ["open", "close"]
    assert list(pipeline.execute_stream_sync(source)) == [*range(5)]


def test_a_reader_whose_time_is_up_leaves_its_read_to_the_others() -> None:
    """An idle limit gives up on a thread in the middle of a read; its chunk is there for the other."""
    clock = HandClock()
    reading, go_on = threading.Event(), threading.Event()
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield 1
            reading.set()
            see(go_on)
            yield 2
        finally:
            closed.set()

    pipeline = B(clock=clock).add_cache().build()
    short = pipeline.execute_stream_sync(source, idle_timeout=LIMIT)
    long = pipeline.execute_stream_sync(source)
    assert (next(short), next(long)) == (1, 1)
    impatient = Beside(lambda: list(short))
    see(reading)
    patient = Beside(lambda: list(long))
    clock.expire()
    with pytest.raises(TimeoutError):
        impatient.result()
    assert not closed.is_set()
    go_on.set()
    assert patient.result() == [2]
    assert closed.is_set()


def test_the_last_reader_whose_time_is_up_leaves_the_closing_to_its_read() -> None:
    """The thread that is in there closes the source when it comes back."""
    clock = HandClock()
    reading = threading.Event()
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            yield 1
            reading.set()
            assert current_context().cancelled.wait(30)
            yield 2
        finally:
            closed.set()

    control = CacheControl()
    pipeline = B(clock=clock).add_cache(control=control).build()
    stream = pipeline.execute_stream_sync(source, idle_timeout=LIMIT)
    assert next(stream) == 1
    reader = Beside(lambda: list(stream))
    see(reading)
    clock.expire()
    with pytest.raises(TimeoutError):
        reader.result()
    see(closed)
    until(lambda: control.statistics().in_flight == 0)


# ---- event loops and threads ------------------------------------------------------------------


def on_asyncio(main: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return await main()

    return asyncio.run(run())


def on_trio(main: Callable[[], Any]) -> Any:
    return trio.run(main)


LOOPS = [on_asyncio, on_trio]
each_loop = pytest.mark.parametrize("run", LOOPS)


async def happens(event: threading.Event) -> None:
    """Wait for what another thread says, while this event loop goes on."""
    while not event.is_set():  # noqa: ASYNC110 - it belongs to no event loop
        await anyio.sleep(0.001)


async def nothing_in_flight(control: CacheControl) -> None:
    while control.statistics().in_flight:  # noqa: ASYNC110 - nobody tells
        await anyio.sleep(0.001)


class Elsewhere:
    """A coroutine function that stays inside, in whatever event loop, until another thread lets it go.

    Attributes:
        entered: Set when it has come in.
        opened: Lets it go on.
    """

    def __init__(self, result: Any = "v") -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.result = result
        self.calls = 0

    async def __call__(self) -> Any:
        self.calls += 1
        self.entered.set()
        await happens(self.opened)
        return self.result


@each_loop
@pytest.mark.parametrize("other", LOOPS)
def test_a_call_in_one_loop_is_waited_for_in_another(
    run: Callable[..., Any], other: Callable[..., Any]
) -> None:
    """One call for both, also if its own loop's caller leaves."""
    load = Elsewhere()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    one = Beside(run, lambda: pipeline.execute(load))
    see(load.entered)
    two = Beside(other, lambda: pipeline.execute(load))
    three = Beside(run, lambda: pipeline.execute(load))
    joined(control, 2)
    load.opened.set()
    assert (one.result(), two.result(), three.result()) == ("v", "v", "v")
    assert load.calls == 1


@each_loop
def test_a_thread_waits_for_a_loop_and_a_loop_for_a_thread(run: Callable[..., Any]) -> None:
    """With a key of one's own both want the same."""
    load = Elsewhere("from the loop")
    control = CacheControl()
    pipeline = B().add_cache(key=key_k, control=control).build()
    one = Beside(run, lambda: pipeline.execute(load))
    see(load.entered)
    two = Beside(pipeline.execute_sync, lambda: "from the thread")
    joined(control, 1)
    load.opened.set()
    assert (one.result(), two.result()) == ("from the loop", "from the loop")
    control.clear()
    gate = Gate("from the thread")
    two = Beside(pipeline.execute_sync, gate)
    see(gate.entered)
    one = Beside(run, lambda: pipeline.execute(load))
    joined(control, 2)
    gate.opened.set()
    assert (one.result(), two.result()) == ("from the thread", "from the thread")


@each_loop
def test_the_one_who_began_leaves_and_another_loop_still_gets_it(run: Callable[..., Any]) -> None:
    """The call goes on in the first loop, as long as that lives."""
    load = Elsewhere()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    leave = threading.Event()

    async def first() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.execute, load)
                await happens(leave)
                scope.cancel()
        await nothing_in_flight(control)

    one = Beside(run, first)
    see(load.entered)
    two = Beside(on_asyncio, lambda: pipeline.execute(load))
    joined(control, 1)
    leave.set()
    load.opened.set()
    assert two.result() == "v"
    one.result()
    assert load.calls == 1


@each_loop
def test_a_loop_that_ends_leaves_the_call_to_those_who_wait(run: Callable[..., Any]) -> None:
    """`asyncio.run` ends by cancelling: who waits elsewhere makes the call, one for all."""
    load = Elsewhere()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    leave = threading.Event()

    async def first() -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pipeline.execute, load)
                await happens(leave)
                scope.cancel()

    one = Beside(run, first)
    see(load.entered)
    others = [Beside(on_asyncio, lambda: pipeline.execute(load)) for _ in range(2)]
    others.append(Beside(on_trio, lambda: pipeline.execute(load)))
    joined(control, 3)
    leave.set()
    one.result()
    until(lambda: load.calls == 2)
    load.opened.set()
    assert [other.result() for other in others] == ["v"] * 3
    assert load.calls == 2


def test_a_loop_that_is_closed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks never end; whoever waits elsewhere looks from time to time, and makes the call."""
    monkeypatch.setattr(_shared_work, "_LOOK_AGAIN", 0.01)
    control = CacheControl()
    pipeline = B().add_cache(key=key_k, control=control).build()
    entered, leave = threading.Event(), threading.Event()

    async def stuck() -> str:
        entered.set()
        await asyncio.get_running_loop().create_future()
        return "never"

    def deserted() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(pipeline.execute(stuck))
        while not leave.is_set():
            loop.run_until_complete(asyncio.sleep(0.001))
        loop.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    one = Beside(deserted)
    see(entered)

    async def ok() -> str:
        return "v"

    two = Beside(on_asyncio, lambda: pipeline.execute(ok))
    three = Beside(pipeline.execute_sync, lambda: "v")
    joined(control, 2)
    leave.set()
    one.result()
    assert (two.result(), three.result()) == ("v", "v")
    assert on_asyncio(lambda: pipeline.execute(stuck)) == "v"


def test_a_newcomer_finds_a_loop_that_is_closed() -> None:
    """Without looking from time to time: what is dead is not joined."""
    pipeline = B().add_cache(key=key_k).build()

    async def stuck() -> str:
        await asyncio.get_running_loop().create_future()
        return "never"

    async def ok() -> str:
        return "v"

    loop = asyncio.new_event_loop()
    task = loop.create_task(pipeline.execute(stuck))
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    assert on_asyncio(lambda: pipeline.execute(ok)) == "v"


def test_a_synchronous_call_in_a_loops_thread_does_not_wait_for_that_loop() -> None:
    """It would keep it from ever going on: it goes past the cache."""
    pipeline = B().add_cache(key=key_k).build()

    async def main() -> list[str]:
        gate = asyncio.Event()

        async def load() -> str:
            await gate.wait()
            return "from the loop"

        task = asyncio.create_task(pipeline.execute(load))
        await tick(3)
        blocking = pipeline.execute_sync(lambda: "at once")
        gate.set()
        return [blocking, await task]

    assert on_asyncio(main) == ["at once", "from the loop"]


def test_another_loop_of_the_same_thread_is_not_waited_for() -> None:
    """It stands still as long as this one runs."""
    pipeline = B().add_cache(key=key_k).build()

    async def stuck() -> str:
        await asyncio.Event().wait()
        return "never"

    async def ok() -> str:
        return "v"

    loop = asyncio.new_event_loop()
    task = loop.create_task(pipeline.execute(stuck))
    loop.run_until_complete(tick(3))
    assert on_asyncio(lambda: pipeline.execute(ok)) == "v"
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


# ---- streams across event loops ---------------------------------------------------------------


class SlowSource:
    """An async generator function whose second chunk comes when another thread says so."""

    def __init__(self) -> None:
        self.waiting, self.opened = threading.Event(), threading.Event()
        self.calls = self.closed = 0

    async def __call__(self) -> AsyncIterator[int]:
        self.calls += 1
        try:
            yield 1
            self.waiting.set()
            await happens(self.opened)
            yield 2
        finally:
            self.closed += 1


async def drained(stream: Any) -> list[Any]:
    async with stream:
        return [chunk async for chunk in stream]


@each_loop
@pytest.mark.parametrize("other", LOOPS)
def test_a_stream_is_read_from_two_loops(
    run: Callable[..., Any], other: Callable[..., Any]
) -> None:
    """The source stays in its own; chunks are handed across."""
    source = SlowSource()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    one = Beside(run, lambda: drained(pipeline.execute_stream(source)))
    see(source.waiting)
    two = Beside(other, lambda: drained(pipeline.execute_stream(source)))
    joined(control, 1)
    source.opened.set()
    assert (one.result(), two.result()) == ([1, 2], [1, 2])
    assert (source.calls, source.closed) == (1, 1)
    assert other(lambda: drained(pipeline.execute_stream(source))) == [1, 2]


@each_loop
def test_the_last_reader_is_in_another_loop(run: Callable[..., Any]) -> None:
    """The one who began has left; the other, in its own loop, wants no more: the source is closed."""
    source = SlowSource()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    leave, left = threading.Event(), threading.Event()

    async def first() -> None:
        async with pipeline.execute_stream(source) as stream:
            await anext(stream)
            await happens(leave)
        left.set()
        await nothing_in_flight(control)

    async def second() -> None:
        async with pipeline.execute_stream(source) as stream:
            assert await anext(stream) == 1
            leave.set()
            await happens(left)
            assert source.closed == 0
        assert source.closed == 1

    one = Beside(run, first)
    two = Beside(on_asyncio, second)
    two.result()
    one.result()


def test_a_reader_whose_sources_loop_has_ended() -> None:
    """Past a chunk it gets an error; who has had none reads a source of its own."""
    source = SlowSource()
    control = CacheControl()
    pipeline = B().add_cache(control=control).build()
    leave, both = threading.Event(), threading.Event()

    async def first() -> None:
        stream = pipeline.execute_stream(source)
        await anext(stream)
        task = asyncio.create_task(anext(stream))
        await happens(both)
        leave.set()
        task.cancel()

    async def second() -> list[int]:
        async with pipeline.execute_stream(source) as stream:
            got = [await anext(stream)]
            both.set()
            return got + [chunk async for chunk in stream]

    one = Beside(on_asyncio, first)
    see(source.waiting)
    two = Beside(on_trio, second)
    one.result()
    with pytest.raises(RuntimeError, match="source has ended"):
        two.result()
    source.opened.set()
    assert on_asyncio(lambda: drained(pipeline.execute_stream(source))) == [1, 2]


@contextmanager
def _restless() -> Iterator[None]:
    import sys

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def test_many_threads_and_loops_at_once() -> None:
    """Every call gets the value of its key, and at the end nothing is in flight."""
    control = CacheControl()
    pipeline = B().add_cache(key=lambda event: event.args[0], max_size=3, control=control).build()

    def load(key: int) -> int:
        return key * 10

    async def aload(key: int) -> int:
        await tick(key)
        return key * 10

    def in_thread(seed: int) -> None:
        for number in range(150):
            key = (number * seed) % 7
            assert pipeline.execute_sync(load, key) == key * 10

    async def in_loop(seed: int) -> None:
        async def one(key: int, *, leaves: bool) -> None:
            with anyio.move_on_after(0 if leaves else 30):
                assert await pipeline.execute(aload, key) == key * 10
                return
            assert leaves

        for number in range(40):
            async with anyio.create_task_group() as tasks:
                for more in range(4):
                    key = (number * seed + more) % 7
                    tasks.start_soon(lambda k=key, m=more: one(k, leaves=m == 3))  # type: ignore[misc]

    with _restless():
        work = [Beside(in_thread, seed) for seed in (1, 2, 3)]
        work += [Beside(on_asyncio, lambda: in_loop(3)), Beside(on_trio, lambda: in_loop(5))]
        for each in work:
            each.result()
    statistics = control.statistics()
    assert (statistics.in_flight, statistics.size) == (0, 3)


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_read_join_and_leave(seed: int) -> None:
    """No reader sees a gap or a chunk of another run, no source is read by two at once or left open."""
    runs: list[list[int]] = []  # chunks produced, and how often it was closed
    lock = threading.Lock()

    def source(key: int) -> Iterator[tuple[int, int, int]]:
        with lock:
            number = len(runs)
            runs.append([0, 0])
        try:
            for position in range(5):
                runs[number][0] += 1
                yield key, number, position
            if number % 5 == 0:
                raise ConnectionError(number)
        finally:
            runs[number][1] += 1

    control = CacheControl()
    pipeline = B().add_cache(max_size=1, control=control).build()

    def reader(seed: int) -> None:
        random = Random(seed)
        for _ in range(120):
            key, most = random.randrange(2), random.randrange(8)
            got: list[tuple[int, int, int]] = []
            stream = pipeline.execute_stream_sync(source, key)
            try:
                with stream:
                    for chunk in stream:
                        got.append(chunk)
                        if len(got) >= most:
                            break
                    else:
                        assert len(got) == 5
            except ConnectionError:
                assert len(got) == 5
            assert [chunk[2] for chunk in got] == [*range(len(got))]
            assert len({chunk[:2] for chunk in got}) <= 1
            if random.random() < 0.05:
                control.clear()

    with _restless():
        readers = [Beside(reader, seed * 10 + number) for number in range(5)]
        for each in readers:
            each.result()
    assert control.statistics().in_flight == 0
    assert all(closed == 1 for _, closed in runs)


def test_success_and_misuse_of_a_synchronous_stream() -> None:
    """Unhashable arguments are misuse there too, and plain results are kept."""
    pipeline = B().add_cache().build()
    with pytest.raises(MisuseError, match="key="):
        list(pipeline.execute_stream_sync(lambda _: iter(()), []))
    assert isinstance(pipeline.settle_sync(lambda: 1), Success)
