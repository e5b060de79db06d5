"""Plain threads: the synchronous twin, without an event loop.

The coroutines of the strategies are the same. What they await blocks the calling thread and then is
there, so that a whole execution runs to its end in one step; `run` takes that step.

A thread can't be stopped. Where something may have to be given up on, a time limit or a race, it
runs in a worker thread, and giving up means to leave it there: its flag is set, the library's own
waits in it end at once, and what it brings later is closed. Workers are reused, daemonic, and at
most so many; whoever is a worker itself gets another one whatever the limit, or pipelines that
nest could all wait for each other.

Interleavings that were thought through:

1. A job ends in the moment in which it is given up on: one lock decides which of the two it was.
   Whoever gives up, interrupted, on what has ended closes what that has brought.
2. It is given up on before a worker takes it: it never runs.
3. A waiter is woken in the moment in which its call is given up on: giving up wins, and whoever
   waits passes on what it was handed, as it does when a task is cancelled.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from time import monotonic
from typing import Any, Generic, TypeVar

from .. import _instant
from .._cancellation import NEVER, CancellationFlag, Cancelled, running_flag
from .._context import current
from .._errors import DeadlineReached
from .._locks import Lock
from ._base import FOREVER, Child, Clock, Interruption, Runtime, Spawner, Waiter
from ._here import presence, run

T = TypeVar("T")
C = TypeVar("C")

#: Worker threads at once; who is a worker itself gets one beyond that.
_WORKERS = 512
#: Seconds after which a worker without a job ends.
_IDLE = 10.0


class ThreadRuntime(Runtime):
    """Runs pipelines in plain threads."""

    __slots__ = ()

    abandons = True

    def now(self) -> float:
        return monotonic() if self.clock is None else self.clock.now()

    async def sleep(self, seconds: float) -> None:
        if seconds > 0 and _instant.watching:
            seconds = _instant.left_of(seconds)
        if seconds > 0:
            signal(self.clock).wait(seconds)
        elif running_flag.get().is_set():
            raise Cancelled

    async def within(
        self,
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
        expired: Callable[[C, BaseException | None], Awaitable[T]] | None = None,
        late: Callable[[T], Awaitable[object]] | None = None,
    ) -> T:
        if seconds >= FOREVER:
            return await call(argument)
        done = signal(self.clock)
        job: _Job[T] = _Job(lambda: run(call(argument)), done.set, late, self.clock)
        try:
            job.start()
            done.wait(seconds)
        except BaseException:
            if not job.give_up():
                job.discard()
            raise
        if not job.give_up():
            return job.outcome()
        if expired is None:
            raise DeadlineReached
        return await expired(argument, None)

    async def shielded(self, fn: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:  # noqa: ARG002
        # Nobody can interrupt a thread, so there is nothing to hold back and no way to cut it short;
        # but what closes something in a call that was given up on may wait.
        token = running_flag.set(NEVER)
        try:
            return await fn()
        finally:
            running_flag.reset(token)

    def is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, Cancelled)

    def place(self) -> tuple[int, object]:
        return threading.get_ident(), None

    def waiter(self) -> Waiter:
        return _ThreadWaiter(self.clock)

    def interruption(self) -> Interruption:
        return _ThreadInterruption()

    def spawn(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> Child:
        job: _Job[None] = _Job(lambda: run(fn()), ended, None, self.clock)
        try:
            job.start()
        except BaseException:
            job.give_up()
            raise
        return _ThreadChild(job)

    async def first_steps(self) -> None:
        """Wait for nothing: what runs in threads has no steps."""

    def spawner(self) -> Spawner:
        clock = self.clock

        def spawn_from_anywhere(
            fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
        ) -> bool:
            try:
                _Job(lambda: run(fn()), ended, None, clock).start()
            except RuntimeError:  # the interpreter is going down
                return False
            return True

        return spawn_from_anywhere


# ---- waiting ----------------------------------------------------------------------------------


class Signal:
    """Something one thread waits for, once. A bare lock: an event of Python's costs five of these."""

    __slots__ = ("_clock", "_is_set", "_lock")

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_set = False

    def set(self) -> None:
        """Let the thread go on; from anywhere, and again without effect."""
        self._is_set = True
        self._release()

    def _release(self) -> None:
        # Two may release it at once, and it can be released once.
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait; whether it was set within so many seconds.

        Raises:
            Cancelled: Nobody waits for this thread any more.
        """
        flag = running_flag.get()
        try:
            if flag is not NEVER:
                flag.watch(self._release)  # an interrupt may come as soon as it does
            self._wait(seconds)
        finally:
            if flag is not NEVER:
                flag.unwatch(self._release)
        if flag.is_set():
            raise Cancelled
        return self._is_set

    def _wait(self, seconds: float | None) -> None:
        if seconds is None or seconds >= FOREVER:
            self._block()
        elif self._clock is None:
            self._lock.acquire(timeout=max(seconds, 0.0))
        else:
            timer = self._clock.call_at(self._clock.now() + max(seconds, 0.0), self._release)
            try:
                self._block()
            finally:
                timer.cancel()

    def _block(self) -> None:
        self._lock.acquire()


def signal(clock: Clock | None) -> Signal:
    """Make a signal for the calling thread; a clock that has to know who waits makes its own."""
    make: Callable[[], Signal] | None = getattr(clock, "_thread_signal", None)
    return Signal(clock) if make is None else make()


class _ThreadWaiter(Waiter):
    __slots__ = ("_signal",)

    def __init__(self, clock: Clock | None) -> None:
        self._signal: Signal = signal(clock)

    def wake(self) -> bool:
        self._signal.set()
        return True

    async def wait(self, timeout: float | None = None) -> bool:
        return self._signal.wait(timeout)

    def is_alive(self) -> bool:
        return True


class _ThreadInterruption(Interruption):
    """What a thread does can't be interrupted; whoever closes its stream waits for its next chunk."""

    __slots__ = ("_thread",)

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    async def guard(self, call: Callable[[C], Awaitable[T]], argument: C) -> T:
        return await call(argument)

    def interrupt(self) -> None:
        """Do nothing."""

    async def confirm(self, error: BaseException | None) -> bool:  # noqa: ARG002
        return False

    def is_mine(self) -> bool:
        return threading.get_ident() == self._thread


# ---- workers ----------------------------------------------------------------------------------


class _Job(Generic[T]):
    """Something that runs in a worker thread, and that may be given up on.

    Args:
        call: What to run, in a copy of the current context variables.
        ended: Called when it has ended, or will never begin.
        late: Called with its result if that comes after it was given up on.
        clock: Is told of the thread.
    """

    __slots__ = (
        "_call",
        "_ended",
        "_error",
        "_flag",
        "_given_up",
        "_is_done",
        "_is_running",
        "_late",
        "_lock",
        "_orphans",
        "_presence",
        "_value",
        "_variables",
    )

    def __init__(
        self,
        call: Callable[[], T],
        ended: Callable[[], object],
        late: Callable[[T], Awaitable[object]] | None,
        clock: Clock | None,
    ) -> None:
        self._call: Callable[[], T] | None = call
        self._ended = ended
        self._late = late
        self._presence = presence(clock)
        around = running_flag.get()
        self._flag = CancellationFlag(None if around is NEVER else around)
        context = current.get(None)
        self._orphans = None if context is None else context._sync
        self._variables = copy_context()
        self._variables.run(running_flag.set, self._flag)
        self._lock = Lock()
        self._is_running = self._is_done = self._given_up = False
        self._value: Any = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Have a worker run it as soon as there is one."""
        if self._presence is not None:
            self._presence.announce()
        _workers.submit(self)

    def run(self) -> None:
        """Run it; called by the worker."""
        with self._lock:
            if self._given_up:
                return
            self._is_running = True
        if self._presence is None:
            self._run()
            return
        self._presence.adopt()
        try:
            self._run()
        finally:
            self._presence.leave()

    def _run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value = self._variables.run(call)
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the outcome, or nobody
            self._error = error
        finally:
            del call
        self._flag.leave()
        with self._lock:
            self._is_done = True
            given_up = self._given_up
        if given_up:
            self._end_unobserved()
        self._ended()

    def _end_unobserved(self) -> None:
        """Close what came too late, and let go of what was held for it."""
        try:
            self.discard()
        finally:
            if self._orphans is not None:
                self._orphans.remove()

    def discard(self) -> None:
        """Close what it has brought, which nobody wants any more."""
        value, self._value, self._error = self._value, None, None
        if self._late is None or value is None:
            return
        self._variables.run(running_flag.set, NEVER)
        with suppress(BaseException):  # nobody is left to hear of it
            self._variables.run(run, self._late(value))

    def give_up(self) -> bool:
        """Leave it alone; false if it has ended."""
        with self._lock:
            if self._is_done or self._given_up:
                return self._given_up
            self._given_up = True
            runs_on = self._is_running
            if runs_on and self._orphans is not None:
                self._orphans.add()
        self._flag.set()
        if not runs_on:
            self._flag.leave()
            self._call = None
            self._ended()
            if self._presence is not None:
                self._presence.withdraw()
        return True

    def outcome(self) -> T:
        """Give the result, or raise the error."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            return self._value  # type: ignore[no-any-return]
        finally:
            del error


class _ThreadChild(Child):
    __slots__ = ("_job",)

    def __init__(self, job: _Job[None]) -> None:
        self._job = job

    def cancel(self) -> None:
        self._job.give_up()

    def cancel_soon(self) -> None:
        self._job.give_up()


class _Worker:
    __slots__ = ("job", "ready")

    def __init__(self, job: _Job[Any]) -> None:
        self.job: _Job[Any] | None = job
        self.ready = threading.Lock()
        self.ready.acquire()


class _Workers:
    """Threads that run jobs: started when there is none to spare, ended when they are not needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[_Worker] = []
        self._count = 0
        self._waiting: deque[_Job[Any]] = deque()
        self._here = threading.local()

    def submit(self, job: _Job[Any]) -> None:
        """Have a job run by an idle worker, a new one, or the next that has ended its own."""
        worker: _Worker | None = None
        with self._lock:
            if self._idle:
                worker = self._idle.pop()
                worker.job = job
            elif self._count < _WORKERS or getattr(self._here, "is_worker", False):
                self._count += 1
            else:
                self._waiting.append(job)
                return
        if worker is not None:
            worker.ready.release()
        else:
            self._start(_Worker(job))

    def _start(self, worker: _Worker) -> None:
        thread = threading.Thread(
            target=self._work, args=(worker,), name="resilience_pipeline", daemon=True
        )
        try:
            thread.start()
        except Exception:  # an interrupt comes when it runs already
            with self._lock:
                self._count -= 1
            raise

    def _work(self, worker: _Worker) -> None:
        self._here.is_worker = True
        while True:
            job, worker.job = worker.job, None
            assert job is not None
            job.run()
            del job
            if not self._next_job(worker):
                return

    def _next_job(self, worker: _Worker) -> bool:
        """Wait for another job for a while; whether there is one."""
        with self._lock:
            if self._waiting:
                worker.job = self._waiting.popleft()
                return True
            self._idle.append(worker)
        if worker.ready.acquire(timeout=_IDLE):
            return True
        with self._lock:
            if worker.job is None:
                self._idle.remove(worker)
                self._count -= 1
                return False
        # It was given one in the very moment.
        worker.ready.acquire()
        return True


_workers = _Workers()


def _forget_workers() -> None:
    global _workers  # noqa: PLW0603 - a forked process has none of its parent's threads
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
