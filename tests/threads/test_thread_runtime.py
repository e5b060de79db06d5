"""The runtime of plain threads, without strategies: waits, time limits, worker threads."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal as signals
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import pytest

from resilience_pipeline import (
    MisuseError,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline._cancellation import (
    NEVER,
    CancellationFlag,
    Cancelled,
    Orphans,
    running_flag,
)
from resilience_pipeline._errors import DeadlineReached
from resilience_pipeline.runtime import _threads
from resilience_pipeline.runtime._here import run, run_here
from resilience_pipeline.runtime._threads import Signal, ThreadRuntime
from resilience_pipeline.testing import VirtualClock
from support.beside import LIMIT, PATIENCE, SHORT, Beside, Gate, HandClock, let_go, see, until
from support.calls import BoomError

B = ResiliencePipelineBuilder
RUNTIME = ThreadRuntime(None)
#: TO-09: limits that mean "practically never".
HUGE: list[Any] = [math.inf, 1e308, 10**30, 1e12, 1e10, timedelta.max, "999999h"]


def virtual() -> tuple[ThreadRuntime, VirtualClock]:
    clock = VirtualClock(autojump=True)
    return ThreadRuntime(clock), clock


async def called(fn: Callable[[], Any]) -> Any:
    return fn()


def within(runtime: ThreadRuntime, seconds: float, fn: Callable[[], Any], late: Any = None) -> Any:
    return run_here(runtime.within(seconds, called, fn, late=late), runtime.clock)


class _Nothing:
    """A job for a worker that is to look again how long it may be idle."""

    def run(self) -> None:
        pass


class Pool:
    """The workers of one test, and which threads they are."""

    def __init__(self, workers: Any) -> None:
        self.workers = workers

    @property
    def count(self) -> int:
        count: int = self.workers._count
        return count

    def has_waiting(self, count: int) -> bool:
        return len(self.workers._waiting) == count

    def is_idle(self, count: int) -> bool:
        return len(self.workers._idle) == count

    def send_home(self) -> None:
        """Let those end that have nothing to do; they may be idle for no time any more."""
        with self.workers._lock:
            idle, self.workers._idle = self.workers._idle, []
            busy = self.count - len(idle)
        for worker in idle:
            worker.job = _Nothing()
            worker.ready.release()
        until(lambda: self.count <= busy)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Workers of the test's own, which stay to its end, however long that takes, and not longer."""
    monkeypatch.setattr(_threads, "_IDLE", PATIENCE)
    workers = _threads._Workers()
    monkeypatch.setattr(_threads, "_workers", workers)
    pool = Pool(workers)
    yield pool
    monkeypatch.setattr(_threads, "_IDLE", 0.0)
    pool.send_home()


# ---- running without a loop -------------------------------------------------------------------


def test_what_waits_for_nothing_is_run_in_one_step() -> None:
    """A coroutine of which every wait blocks runs to its end."""

    async def inner() -> int:
        await RUNTIME.sleep(0)
        return 3

    assert run(inner()) == 3


def test_what_waits_for_an_event_loop_is_a_misuse_and_is_closed() -> None:
    """Something that suspends can't be gone on with: `MisuseError`, and its `finally` runs."""
    closed: list[bool] = []

    class Turn:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def suspending() -> None:
        try:
            await Turn()
        finally:
            closed.append(True)

    with pytest.raises(MisuseError, match="event loop"):
        run(suspending())
    assert closed == [True]


def test_an_awaitable_that_is_no_coroutine_is_run() -> None:
    """Also what only has `__await__`."""

    class Given:
        def __await__(self) -> Iterator[Any]:
            return iter(())

    given: Any = Given()
    assert run(given) is None


# ---- sleeping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -math.inf])
def test_sleeping_for_no_time_returns_at_once(seconds: float) -> None:
    """Zero and less is no wait."""
    run(RUNTIME.sleep(seconds))


def test_sleeping_takes_the_clocks_time() -> None:
    """On a clock of the builder's."""
    runtime, clock = virtual()
    run_here(runtime.sleep(90), clock)
    assert clock.now() == 90


@pytest.mark.realtime
def test_sleeping_takes_real_time_without_a_clock() -> None:
    """Never shorter than asked for."""
    before = RUNTIME.now()
    run(RUNTIME.sleep(SHORT))
    assert RUNTIME.now() - before >= SHORT


@pytest.mark.parametrize("seconds", [math.inf, 1e308, 1e12, float(10**30), 86400.0 * 365 * 300])
def test_enormous_sleeps_are_waits_that_can_be_ended(seconds: float) -> None:
    """TO-09: what threads can't express is waited without a timer, and ends when given up on."""
    flag = CancellationFlag()
    asleep = threading.Event()

    def sleep() -> None:
        running_flag.set(flag)
        flag.watch(asleep.set)  # told with the sleeper's own, when the flag is set
        run(RUNTIME.sleep(seconds))

    sleeper = Beside(sleep)
    until(lambda: len(flag._callbacks) == 2)
    assert sleeper.is_running
    flag.set()
    with pytest.raises(Cancelled):
        sleeper.result()


@pytest.mark.parametrize("limit", HUGE, ids=str)
def test_enormous_limits_never_fire(limit: Any) -> None:
    """TO-09: a limit that means "practically never" overflows nothing and does not fire."""
    assert B().add_timeout(limit).build().execute_sync(lambda: 1) == 1


@pytest.mark.parametrize("limit", HUGE, ids=str)
def test_enormous_limits_never_fire_on_a_clock(limit: Any) -> None:
    """The same where a clock of one's own keeps the time."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(limit).build()
    assert pipeline.execute_sync(lambda: run_here(clock.sleep(5), clock)) is None


@pytest.mark.parametrize("wait", HUGE, ids=str)
def test_enormous_queue_limits_overflow_nothing(wait: Any) -> None:
    """`max_wait` of a limiter's queue."""
    gate = Gate(1)
    pipeline = B().add_concurrency_limiter(1, queue_limit=1, max_wait=wait).build()
    first = Beside(pipeline.execute_sync, gate)
    see(gate.entered)
    second = Beside(pipeline.execute_sync, gate)
    gate.opened.set()
    assert (first.result(), second.result()) == (1, 1)


def test_a_retry_with_an_enormous_delay_is_still_waiting() -> None:
    """TO-09: `add_retry(delay=1e12)` waits; told to stop it ends at once."""
    waiting = threading.Event()
    flag = CancellationFlag()
    pipeline = B().add_retry(delay=1e12, on_retry=lambda _: waiting.set()).build()

    def call() -> NoReturn:
        running_flag.set(flag)
        pipeline.execute_sync(fail)
        raise AssertionError

    def fail() -> NoReturn:
        raise BoomError

    caller = Beside(call)
    see(waiting)
    until(lambda: flag._callbacks)
    assert caller.is_running
    flag.set()
    with pytest.raises(Cancelled):
        caller.result()


# ---- waiting and waking -----------------------------------------------------------------------


def test_a_waiter_is_woken_from_another_thread() -> None:
    """`wake` says that it can be reached, `wait` that it was woken."""
    waiter = RUNTIME.waiter()
    waiting = Beside(run, waiter.wait())
    assert waiter.is_alive()
    assert waiter.wake()
    assert waiting.result() is True


def test_a_waiter_is_woken_before_it_waits() -> None:
    """A wake-up that comes first is not lost."""
    waiter = RUNTIME.waiter()
    waiter.wake()
    waiter.wake()
    assert run(waiter.wait(PATIENCE)) is True


@pytest.mark.parametrize("timeout", [0, SHORT])
def test_a_waiter_that_nobody_wakes_says_so(timeout: float) -> None:
    """`wait(timeout)` is false when the time ran out."""
    assert run(RUNTIME.waiter().wait(timeout)) is False


def test_a_waiter_waits_in_the_clocks_time() -> None:
    """Its timeout goes by the clock of the builder."""
    runtime, clock = virtual()
    assert run_here(runtime.waiter().wait(40), clock) is False
    assert clock.now() == 40


def test_a_waiter_is_woken_from_an_event_loop() -> None:
    """CL-07: a permit released by a task wakes a thread that waits for it."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    entered = threading.Event()
    queued = Gate("thread")
    queued.opened.set()
    result: list[Beside[Any]] = []

    async def hold() -> None:
        entered.set()
        result.append(Beside(pipeline.execute_sync, queued))
        bound: Any = pipeline
        until(lambda: _queue_of(bound))

    asyncio.run(pipeline.execute(hold))
    see(entered)
    assert result[0].result() == "thread"


def _queue_of(pipeline: Any) -> Any:
    """How many wait at a limiter that is a pipeline's only strategy."""
    return len(pipeline._head.__self__._queue)


def _is_queued(pipeline: Any, count: int) -> bool:
    return bool(_queue_of(pipeline) == count)


def test_a_task_is_woken_from_a_thread() -> None:
    """CL-07: a permit released by a thread wakes a task that waits for it, through its loop's door."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    gate = Gate()

    async def touch() -> str:
        return "task"

    async def main() -> str:
        holder = Beside(pipeline.execute_sync, gate)
        see(gate.entered)
        queued = asyncio.ensure_future(pipeline.execute(touch))
        await asyncio.sleep(0)
        assert _queue_of(pipeline) == 1
        gate.opened.set()
        result = await queued
        holder.result()
        return result

    assert asyncio.run(main()) == "task"


def test_threads_and_tasks_are_served_in_the_order_in_which_they_came() -> None:
    """First come first served, between threads and between threads and tasks."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=5).build()
    order: list[int] = []
    gate = Gate()

    async def note(number: int) -> None:
        order.append(number)

    async def main() -> None:
        holder = Beside(pipeline.execute_sync, gate)
        see(gate.entered)
        queued: list[Beside[None] | asyncio.Future[None]] = []
        for number in range(4):
            if number % 2:
                queued.append(asyncio.ensure_future(pipeline.execute(note, number)))
            else:
                queued.append(Beside(pipeline.execute_sync, order.append, number))
            await asyncio.sleep(0)
            until(partial(_is_queued, pipeline, number + 1))
        gate.opened.set()
        for each in queued:
            if isinstance(each, asyncio.Future):
                await each
        for each in queued:
            if isinstance(each, Beside):
                each.result()
        holder.result()

    asyncio.run(main())
    assert order == [0, 1, 2, 3]


# ---- interrupting -----------------------------------------------------------------------------


@contextmanager
def interrupted(when: Callable[[], object]) -> Iterator[None]:
    """Have Ctrl-C pressed in the block as soon as something is the case, and expect its end by that."""
    main, over = threading.get_ident(), threading.Event()
    before = {
        signals.SIGUSR1: signals.signal(signals.SIGUSR1, lambda *_: None),
        # In a job that a shell has put into the background it is ignored.
        signals.SIGINT: signals.signal(signals.SIGINT, signals.default_int_handler),
    }

    def interrupt() -> None:
        until(when)
        signals.pthread_kill(main, signals.SIGINT)
        # It may have come just before the system's own wait began, which it does not end then.
        while not over.wait(0.002):
            signals.pthread_kill(main, signals.SIGUSR1)

    beside = Beside(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        beside.result()
        for number, handler in before.items():
            signals.signal(number, handler)


WAITS: dict[str, Callable[[], Any]] = {
    "sleep": lambda: run(RUNTIME.sleep(PATIENCE)),
    "endless sleep": lambda: run(RUNTIME.sleep(math.inf)),
    "waiter": lambda: run(RUNTIME.waiter().wait()),
    "waiter with a limit": lambda: run(RUNTIME.waiter().wait(PATIENCE)),
    "retry delay": lambda: B().add_retry(delay=PATIENCE).build().settle_sync(_raise),
    "rate limiter's queue": lambda: _queued_at_a_rate_limiter(),
}


def _raise() -> NoReturn:
    raise BoomError


def _queued_at_a_rate_limiter() -> None:
    from resilience_pipeline import TokenBucket

    pipeline = B().add_rate_limiter(TokenBucket(1, 0.001), queue_limit=1).build()
    for _ in range(2):
        pipeline.execute_sync(lambda: 1)


interruptible = pytest.mark.skipif(
    not hasattr(signals, "pthread_kill"), reason="this system sends no signals to threads"
)


@interruptible
@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_in_the_main_thread_is_interruptible(kind: str) -> None:
    """Waits block the calling thread, interruptible by `KeyboardInterrupt`."""
    flag = CancellationFlag()
    token = running_flag.set(flag)
    try:
        with interrupted(lambda: flag._callbacks):  # which every wait watches
            WAITS[kind]()
    finally:
        running_flag.reset(token)
    assert not flag._callbacks, "nothing watches the flag any more"


def test_an_interrupt_before_the_wait_itself_leaves_nothing_that_watches() -> None:
    """It may come when the flag is watched already."""

    class Interrupting(CancellationFlag):
        __slots__ = ()

        def watch(self, callback: Callable[[], object]) -> NoReturn:
            super().watch(callback)
            raise KeyboardInterrupt

    flag = Interrupting()
    token = running_flag.set(flag)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(RUNTIME.sleep(PATIENCE))
    finally:
        running_flag.reset(token)
    assert not flag._callbacks


@interruptible
@pytest.mark.parametrize("kind", ["timeout", "hedging"])
def test_waiting_for_a_worker_is_interruptible(kind: str) -> None:
    """The caller leaves at once; the attempt is told, and nobody waits for it."""
    told, inside = threading.Event(), threading.Event()
    hand = HandClock()

    def attempt() -> None:
        inside.set()
        if current_context().cancelled.wait(PATIENCE):
            told.set()

    builder = B(clock=hand)
    pipeline = (
        builder.add_timeout(60) if kind == "timeout" else builder.add_hedging(delay=60)
    ).build()
    with interrupted(lambda: inside.is_set() and hand.is_waited_for):
        pipeline.execute_sync(attempt)
    see(told)


def test_an_interrupt_while_a_worker_is_started_gives_up_on_its_job(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is there already when the interrupt comes: what runs in it is told."""
    told, inside = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        see(inside)
        raise KeyboardInterrupt

    def attempt() -> None:
        inside.set()
        if running_flag.get().wait(PATIENCE):
            told.set()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            within(RUNTIME, PATIENCE, attempt)
    see(told)
    until(lambda: pool.is_idle(1))
    assert pool.count == 1


def test_an_interrupt_while_a_hedged_attempt_is_started_comes_out_as_itself(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the attempt, which is on its way already, is told."""
    told, inside = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_and_be_interrupted(thread: threading.Thread) -> None:
        start(thread)
        see(inside)
        raise KeyboardInterrupt

    def attempt() -> None:
        inside.set()
        if current_context().cancelled.wait(PATIENCE):
            told.set()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_and_be_interrupted)
        came_out: type[BaseException] | None = None
        try:
            B().add_hedging(delay=60).build().execute_sync(attempt)
        except BaseException as error:
            came_out = type(error)
    assert came_out is KeyboardInterrupt
    see(told)


@interruptible
def test_an_interrupted_wait_in_a_queue_gives_its_place_back() -> None:
    """A waiter that leaves by an interrupt gives its place back, and the permit goes to the next."""
    pipeline = B().add_concurrency_limiter(1, queue_limit=1).build()
    gate = Gate()
    holder = Beside(pipeline.execute_sync, gate)
    see(gate.entered)

    with interrupted(lambda: _queue_of(pipeline)):
        pipeline.execute_sync(lambda: 1)
    assert not _queue_of(pipeline)
    let_go(gate)
    holder.result()
    assert pipeline.execute_sync(lambda: 2) == 2


@interruptible
def test_a_signal_handler_that_returns_does_not_end_a_wait() -> None:
    """A signal that raises nothing is no end of a wait: it goes on to where it was going."""
    seen: list[int] = []
    before = signals.signal(signals.SIGUSR1, lambda *_: seen.append(1))
    waiter = RUNTIME.waiter()
    main = threading.get_ident()

    def disturb() -> None:
        signals.pthread_kill(main, signals.SIGUSR1)
        until(lambda: seen)
        waiter.wake()

    try:
        disturber = Beside(disturb)
        assert run(waiter.wait(PATIENCE)) is True
        disturber.result()
    finally:
        signals.signal(signals.SIGUSR1, before)
    assert seen == [1]


# ---- time limits ------------------------------------------------------------------------------


def test_within_gives_what_comes_in_time() -> None:
    """A value within its limit."""
    runtime, _ = virtual()
    assert within(runtime, 5, lambda: 3) == 3


def test_within_raises_the_error_itself() -> None:
    """An error within its limit comes out as it is."""
    error = BoomError()
    runtime, _ = virtual()

    def fail() -> NoReturn:
        raise error

    with pytest.raises(BoomError) as caught:
        within(runtime, 5, fail)
    assert caught.value is error


def test_within_runs_in_another_thread_and_an_endless_one_here() -> None:
    """What can't expire needs no thread."""
    runtime, _ = virtual()
    assert within(runtime, 5, threading.get_ident) != threading.get_ident()
    assert within(runtime, math.inf, threading.get_ident) == threading.get_ident()


def test_within_leaves_what_takes_too_long() -> None:
    """At the limit the caller goes on; the work is told by its flag."""
    runtime, clock = virtual()
    flags: list[CancellationFlag] = []
    told = threading.Event()

    def slow() -> None:
        flags.append(running_flag.get())
        flags[0].watch(told.set)
        run_here(clock.sleep(10), clock)

    with pytest.raises(DeadlineReached):
        within(runtime, 5, slow)
    assert clock.now() == 5
    see(told)
    assert running_flag.get() is NEVER


def test_a_result_too_late_goes_to_late() -> None:
    """What is brought afterwards is handed to `late`, once."""
    hand = HandClock()
    gate = Gate("late", clock=hand)
    seen: list[Any] = []
    done = threading.Event()

    async def late(value: Any) -> None:
        seen.append(value)
        done.set()

    with pytest.raises(DeadlineReached):
        within(ThreadRuntime(hand), LIMIT, gate, late)
    assert not seen
    let_go(gate)
    see(done)
    assert seen == ["late"]


def test_a_result_that_came_in_the_moment_of_giving_up_goes_to_late() -> None:
    """It has ended, but its caller was given up on itself: nobody receives what it brought."""
    flag = CancellationFlag()
    seen: list[Any] = []
    ended = threading.Event()

    async def late(value: Any) -> None:
        seen.append(value)

    def fn() -> str:
        running_flag.get().wait(PATIENCE)
        return "value"

    class Slow(Signal):
        """Lets its thread go on only when the job has ended, though it was given up on before."""

        __slots__ = ()

        def _wait(self, seconds: float | None) -> None:
            super()._wait(seconds)
            see(ended)

        def set(self) -> None:
            super().set()
            ended.set()

    class Clock(HandClock):
        def _thread_signal(self) -> Signal:
            return Slow(None)

    def call() -> None:
        running_flag.set(flag)
        within(ThreadRuntime(Clock()), PATIENCE, fn, late)

    caller = Beside(call)
    until(lambda: len(flag._callbacks) == 2)  # the job's, and that of who waits for it
    flag.set()
    with pytest.raises(Cancelled):
        caller.result()
    assert seen == ["value"]


@pytest.mark.parametrize("trouble", [BoomError, KeyboardInterrupt, SystemExit])
def test_trouble_with_a_late_result_reaches_nobody(
    trouble: type[BaseException], pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of closing something discarded are swallowed; the worker goes on working."""
    printed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    hand = HandClock()
    gate = Gate("late", clock=hand)

    async def late(_: Any) -> None:
        raise trouble

    with pytest.raises(DeadlineReached):
        within(ThreadRuntime(hand), LIMIT, gate, late)
    let_go(gate)
    until(lambda: pool.is_idle(1))
    assert within(RUNTIME, PATIENCE, lambda: 1) == 1
    assert pool.count == 1
    assert not printed


# ---- workers ----------------------------------------------------------------------------------


def test_workers_are_daemons_and_are_named(pool: Pool) -> None:
    """A worker that never comes back does not keep the process alive."""
    thread = within(RUNTIME, PATIENCE, threading.current_thread)
    assert thread.daemon
    assert thread.name == "resilience_pipeline"


def test_a_worker_is_used_again(pool: Pool) -> None:
    """One after the other needs one thread."""
    threads = set()
    for _ in range(5):
        threads.add(within(RUNTIME, PATIENCE, threading.current_thread))
        until(lambda: pool.is_idle(1))
    assert len(threads) == 1


def test_the_pool_grows_with_need(pool: Pool) -> None:
    """At once needs as many threads."""
    barrier = threading.Barrier(4)
    callers = [Beside(within, RUNTIME, PATIENCE, partial(barrier.wait, PATIENCE)) for _ in range(4)]
    for caller in callers:
        caller.result()
    assert pool.count == 4


def test_an_idle_worker_ends(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that nobody needs is not kept for ever."""
    monkeypatch.setattr(_threads, "_IDLE", 0.0)
    thread = within(RUNTIME, PATIENCE, threading.current_thread)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert pool.count == 0
    assert within(RUNTIME, PATIENCE, lambda: 1) == 1


def test_the_pool_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more threads than the bound, however many calls; all of them come to their end."""
    monkeypatch.setattr(_threads, "_WORKERS", 2)
    gate = Gate()
    inside = [Beside(within, RUNTIME, PATIENCE, gate) for _ in range(2)]
    until(lambda: gate.calls == 2)
    more = [Beside(within, RUNTIME, PATIENCE, gate) for _ in range(3)]
    until(lambda: len(pool.workers._waiting) == 3)
    assert pool.count == 2
    assert gate.calls == 2
    gate.opened.set()
    for caller in inside + more:
        caller.result()
    assert gate.calls == 5
    assert pool.count == 2


def test_jobs_that_wait_for_a_worker_are_run_in_order(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First come first served at the pool too."""
    monkeypatch.setattr(_threads, "_WORKERS", 1)
    gate = Gate()
    order: list[int] = []
    callers = [Beside(within, RUNTIME, PATIENCE, gate)]
    see(gate.entered)
    for number in range(3):
        callers.append(Beside(within, RUNTIME, PATIENCE, partial(order.append, number)))
        until(partial(pool.has_waiting, number + 1))
    gate.opened.set()
    for caller in callers:
        caller.result()
    assert order == [0, 1, 2]


def test_a_job_given_up_on_before_it_starts_never_runs(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that passes while all workers are taken: the call is refused, and nothing runs later."""
    monkeypatch.setattr(_threads, "_WORKERS", 1)
    gate = Gate()
    holder = Beside(within, RUNTIME, PATIENCE, gate)
    see(gate.entered)
    calls: list[int] = []
    pipeline = B().add_timeout(SHORT).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(calls.append, 1)
    let_go(gate)
    holder.result()
    until(lambda: pool.is_idle(1))
    assert not calls
    assert not pool.workers._waiting


def test_a_job_that_never_started_keeps_no_permit(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What never ran has nothing to keep a permit for: the limiter outside has it back at once."""
    monkeypatch.setattr(_threads, "_WORKERS", 1)
    gate = Gate()
    holder = Beside(within, RUNTIME, PATIENCE, gate)
    see(gate.entered)
    pipeline = B().add_concurrency_limiter(1).add_timeout(SHORT).build()
    for _ in range(2):
        with pytest.raises(TimeoutRejectedError):
            pipeline.execute_sync(lambda: 1)
    let_go(gate)
    holder.result()


@pytest.mark.parametrize("bound", [1, 2])
def test_pipelines_that_nest_deeper_than_the_bound_never_deadlock(
    bound: int, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that needs another worker gets one, whatever the bound."""
    monkeypatch.setattr(_threads, "_WORKERS", bound)
    pipeline = B().add_timeout(PATIENCE).build()

    def nest(depth: int) -> int:
        return depth if depth == 8 else pipeline.execute_sync(nest, depth + 1)

    assert pipeline.execute_sync(nest, 1) == 8


def test_many_calls_that_nest_at_once_never_deadlock(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many calls at once as there are workers, each of which needs one more inside."""
    monkeypatch.setattr(_threads, "_WORKERS", 2)
    pipeline = B().add_timeout(PATIENCE).build()
    barrier = threading.Barrier(2)

    def outer(number: int) -> int:
        barrier.wait(PATIENCE)
        return pipeline.execute_sync(lambda: number)

    callers = [Beside(pipeline.execute_sync, outer, number) for number in range(2)]
    assert [caller.result() for caller in callers] == [0, 1]


def test_workers_beyond_the_bound_end_again(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nesting took beyond the bound is given back when it has ended."""
    monkeypatch.setattr(_threads, "_WORKERS", 1)
    monkeypatch.setattr(_threads, "_IDLE", 0.0)
    pipeline = B().add_timeout(PATIENCE).build()
    assert pipeline.execute_sync(pipeline.execute_sync, pipeline.execute_sync, lambda: 1) == 1
    until(lambda: pool.count == 0)


def test_a_worker_keeps_nothing_of_its_last_job(pool: Pool) -> None:
    """An idle thread must not hold results, errors or arguments alive."""

    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)

    def give(given: Thing) -> Thing:
        return given

    result = within(RUNTIME, PATIENCE, partial(give, thing))
    assert result is thing
    until(lambda: pool.is_idle(1))
    del thing, result
    gc.collect()
    assert gone() is None


def test_a_thread_that_cant_be_started_is_the_callers_error(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives no more threads: the call fails, and the pool counts on rightly."""

    def refuse(_: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            within(RUNTIME, PATIENCE, lambda: 1)
    assert pool.count == 0
    assert within(RUNTIME, PATIENCE, lambda: 1) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own() -> None:
    """After a fork none of the parent's threads is there; calls with time limits work in the child."""
    pipeline = B().add_timeout(PATIENCE).add_hedging(delay=PATIENCE).build()
    assert pipeline.execute_sync(lambda: 1) == 1
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if pipeline.execute_sync(lambda: 2) == 2 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


# ---- children ---------------------------------------------------------------------------------


def test_a_spawned_child_runs_beside_and_tells_of_its_end() -> None:
    """`spawn` runs a coroutine in another thread, with the context variables of the spawner."""
    colour: ContextVar[str] = ContextVar("colour")
    colour.set("red")
    seen: list[tuple[str, bool]] = []
    ended = threading.Event()
    here = threading.get_ident()

    async def child() -> None:
        seen.append((colour.get(), threading.get_ident() != here))
        colour.set("blue")

    RUNTIME.spawn(child, ended.set)
    see(ended)
    assert seen == [("red", True)]
    assert colour.get() == "red"


@pytest.mark.parametrize("way", ["cancel", "cancel_soon"])
def test_a_cancelled_child_is_told(way: str) -> None:
    """A thread can't be stopped: its flag is set, and the library's waits in it end at once."""
    ended, began = threading.Event(), threading.Event()
    came_out: list[BaseException] = []

    async def child() -> None:
        began.set()
        try:
            await RUNTIME.sleep(math.inf)
        except BaseException as error:
            came_out.append(error)
            raise

    handle = RUNTIME.spawn(child, ended.set)
    see(began)
    getattr(handle, way)()
    see(ended)
    assert isinstance(came_out[0], Cancelled)
    assert RUNTIME.is_cancellation(came_out[0])
    assert not RUNTIME.is_cancellation(BoomError())


def test_a_child_cancelled_before_it_began_has_ended(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ended` is called also for one that never begins."""
    monkeypatch.setattr(_threads, "_WORKERS", 1)
    gate = Gate()
    holder = Beside(within, RUNTIME, PATIENCE, gate)
    see(gate.entered)
    ended = threading.Event()
    ran: list[int] = []

    async def child() -> None:
        ran.append(1)

    RUNTIME.spawn(child, ended.set).cancel()
    see(ended)
    let_go(gate)
    holder.result()
    until(lambda: pool.is_idle(1))
    assert not ran


def test_shielded_work_may_wait_in_an_abandoned_call() -> None:
    """What closes something in a call that was given up on may use the library's waits."""
    runtime, clock = virtual()
    flag = CancellationFlag()
    flag.set()

    async def closing() -> str:
        await runtime.sleep(1)
        return "closed"

    def abandoned() -> str:
        running_flag.set(flag)
        result = run_here(runtime.shielded(closing, 5), clock)
        assert running_flag.get() is flag
        return result

    assert Beside(abandoned).result() == "closed"
    assert clock.now() == 1


def test_a_sleep_of_zero_in_an_abandoned_call_is_its_end() -> None:
    """A checkpoint between any two attempts, also at delay 0."""
    flag = CancellationFlag()
    flag.set()

    def abandoned() -> None:
        running_flag.set(flag)
        run(RUNTIME.sleep(0))

    with pytest.raises(Cancelled):
        Beside(abandoned).result()


def test_a_wait_in_a_call_that_was_given_up_on_before_ends_at_once() -> None:
    """The flag was set before the wait began."""
    flag = CancellationFlag()
    flag.set()

    def abandoned() -> None:
        running_flag.set(flag)
        Signal(None).wait(math.inf)

    with pytest.raises(Cancelled):
        Beside(abandoned).result()


# ---- flags and orphans ------------------------------------------------------------------------


def test_a_flag_is_like_an_event() -> None:
    """`current_context().cancelled` is an event-like object: `is_set()` and `wait(seconds)`."""
    flag = CancellationFlag()
    assert not flag.is_set()
    assert flag.wait(0) is False
    assert repr(flag) == "<CancellationFlag not set>"
    waiting = Beside(flag.wait)
    flag.set()
    assert waiting.result() is True
    assert flag.is_set()
    assert flag.wait() is True
    assert repr(flag) == "<CancellationFlag set>"


def test_a_flag_calls_each_watcher_once() -> None:
    """Watchers are told when it is set, at once if it is, and not after they have left."""
    told: list[str] = []
    watchers = [partial(told.append, name) for name in ("first", "gone", "late")]
    flag = CancellationFlag()
    flag.watch(watchers[0])
    flag.watch(watchers[1])
    flag.unwatch(watchers[1])
    flag.set()
    flag.set()
    flag.watch(watchers[2])
    assert told == ["first", "late"]


class WhileItIsHashed:
    """A watcher in whose hashing code runs, as the garbage collector's may at any moment."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then
        self.calls = 0

    def __hash__(self) -> int:
        self._then()
        return 1

    def __call__(self) -> None:
        self.calls += 1


def test_a_finaliser_that_runs_in_the_middle_of_watching_may_use_the_same_flag() -> None:
    """What it closes may start a worker under the flag, on the very thread that has the lock."""
    flag = CancellationFlag()
    others: list[str] = []
    watcher = WhileItIsHashed(lambda: flag.watch(lambda: others.append("watched")))
    Beside(flag.watch, watcher).result()
    assert (watcher.calls, others) == (0, [])
    flag.set()
    assert (watcher.calls, others) == (1, ["watched"])


def test_a_flag_is_set_with_the_one_around_it() -> None:
    """Giving up on a call gives up on what it runs."""
    outer = CancellationFlag()
    inner = CancellationFlag(outer)
    innermost = CancellationFlag(inner)
    outer.set()
    assert innermost.is_set()
    assert CancellationFlag(outer).is_set()


def test_a_flag_is_not_set_by_those_inside() -> None:
    """Giving up on an attempt leaves the call alone."""
    outer = CancellationFlag()
    CancellationFlag(outer).set()
    assert not outer.is_set()


def test_attempts_that_have_ended_are_forgotten_by_the_flag_around() -> None:
    """A call of many attempts must not collect a watcher for each of them."""
    flag = CancellationFlag()
    pipeline = B().add_timeout(PATIENCE).build()

    def many() -> int:
        running_flag.set(flag)
        for _ in range(20):
            pipeline.execute_sync(lambda: 1)
        return len(flag._callbacks)

    assert Beside(many).result() <= 1


def test_what_is_held_for_orphans_is_released_with_the_last() -> None:
    """And at once where there is none."""
    released: list[str] = []
    orphans = Orphans()
    orphans.when_gone(partial(released.append, "none"))
    orphans.add()
    orphans.add()
    orphans.when_gone(partial(released.append, "both"))
    orphans.remove()
    assert released == ["none"]
    orphans.remove()
    assert released == ["none", "both"]


def test_waits_of_a_whole_thread_leave_no_trace_on_its_flag() -> None:
    """Each wait takes back what it watches."""
    flag = CancellationFlag()

    def waits() -> int:
        running_flag.set(flag)
        for _ in range(3):
            run(RUNTIME.sleep(1e-9))
        return len(flag._callbacks)

    assert Beside(waits).result() == 0


def test_no_reference_cycle_keeps_an_error_of_a_worker_alive() -> None:
    """An error that came out of a worker is gone when its caller lets it go."""
    pipeline = B().add_timeout(PATIENCE).build()
    gone: list[weakref.ref[BoomError]] = []

    def fail() -> NoReturn:
        error = BoomError()
        gone.append(weakref.ref(error))
        try:
            raise error
        finally:
            del error

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(BoomError):
            pipeline.execute_sync(fail)
        sys.exc_info()
        until(lambda: gone[0]() is None)
    finally:
        gc.enable()
