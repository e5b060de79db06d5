"""asyncio: the fast path, made of the loop's own timers and task cancellation.

Must only be imported once asyncio is; `current_runtime` sees to it. Nothing here belongs to one
loop for longer than a call: the one thing kept per loop, its deadline queues, is forgotten with the
loop.

How a time limit works. `asyncio.timeout` pushes a timer on the loop's heap for each call and
cancels it again. Limits of one length, however, expire in the order in which they were set, so a
plain queue per length is sorted by itself, and one armed timer for its head is enough: constant
work per call, whatever is in flight. Expiry cancels the task once and is told apart from the
caller's own cancellation by counting requests, as `asyncio.timeout` does: ours is taken back with
`uncancel`, and only if then no more requests are left than at entry was it ours alone.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from asyncio import CancelledError, current_task
from asyncio.events import _get_running_loop, get_running_loop
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from sys import modules, version_info
from threading import get_ident
from time import monotonic
from types import coroutine
from typing import Any, TypeVar

from .. import _instant
from .._errors import DeadlineReached
from ._asyncio_scopes import is_in_scope
from ._asyncio_shield import Shield, is_shielded
from ._base import FOREVER, Child, Clock, Interruption, Runtime, Spawner, TimerHandle, Waiter
from ._finder import RuntimeFinder

T = TypeVar("T")
C = TypeVar("C")

#: Lengths of time limits with a queue of their own, per loop; further ones get plain timers. Fixed
#: limits are few, generated ones may all be different.
_QUEUES_PER_LOOP = 64

#: Seconds within which limits expire together.
_TOGETHER = 1e-6


class _Deadline:
    """A time limit on one task: who to cancel, and whether that has happened."""

    __slots__ = ("cancelling", "expired", "task")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.cancelling = task.cancelling()
        self.expired = False

    def expire(self) -> None:
        self.expired = True
        self.task.cancel()


class _DeadlineQueue:
    """Running limits of one length on one loop, in the order of their expiry.

    An entry is taken out by its call when that has ended, or by the expiry: whoever finds it gone
    knows of the other.
    """

    __slots__ = ("_owner", "armed", "latest", "running", "seconds")

    def __init__(self, owner: dict[float, _DeadlineQueue], seconds: float) -> None:
        self._owner = owner
        self.seconds = seconds
        # The tasks to cancel, by time. A dict for its order and its constant-time removal from the
        # middle; times for keys, because an object for each entry would cost three bare calls.
        self.running: dict[float, asyncio.Task[Any]] = {}
        self.latest = 0.0
        self.armed = False

    def next_free(self) -> float:
        """Give the next time there is after the latest entry: a loop's clock may stand still."""
        return math.nextafter(self.latest, math.inf)

    def arm(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        self.armed = True
        loop.call_at(when, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire what is due; the timer was set for a head that may have finished long ago."""
        for when in list(self._due(loop.time() + _TOGETHER)):
            self.running.pop(when).cancel()
        if self.running:
            self.arm(loop, next(iter(self.running)))
        else:
            self.armed = False
            # Idle for a whole length: forget it, so that generated lengths do not pile up.
            self._owner.pop(self.seconds, None)

    def _due(self, now: float) -> Iterator[float]:
        for when in self.running:
            if when > now:
                return
            yield when


_Queues = dict[float, _DeadlineQueue]
_queues_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = (
    weakref.WeakKeyDictionary()
)


def _queues_of(loop: asyncio.AbstractEventLoop) -> _Queues:
    queues = _queues_of_loops.get(loop)
    if queues is None:
        queues = _queues_of_loops.setdefault(loop, {})
    return queues


def _clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Give the loop's `time()`: as a rule a function in C, which costs a third of the method."""
    if type(loop).time is asyncio.BaseEventLoop.time:
        return monotonic
    known = weakref.ref(loop)

    def now() -> float:
        running = known()
        assert running is not None
        return running.time()

    return now


def _no_loop() -> None:
    """Stand for the weak reference to a loop that has not been seen yet."""


# What `current_task` does; a function in Python before 3.12, which doubles the cost of asking.
_task_of: Callable[[asyncio.AbstractEventLoop], asyncio.Task[Any] | None]
#: Tasks in the middle of a step, at most one for each loop; private there, and gone with 3.14.
_stepping: Mapping[Any, asyncio.Task[Any]] = vars(asyncio.tasks).get("_current_tasks", {})
_task_of = current_task if version_info >= (3, 12) else _stepping.get


def in_task() -> bool:
    """Whether a task of asyncio runs this: not so in trio, even as a guest of asyncio's loop."""
    loop = _get_running_loop()
    return loop is not None and current_task(loop) is not None


class AsyncioRuntime(Runtime):
    """Runs pipelines in tasks of any asyncio event loop."""

    __slots__ = ("_latest", "_search")

    def __init__(
        self, clock: Clock | None = None, search: Callable[[], Runtime] | None = None
    ) -> None:
        super().__init__(clock)
        # Finds the runtime of what runs the caller, where that is no task of asyncio's.
        self._search = search or RuntimeFinder(clock).search
        # The loop that was used last, its queues, its clock, and whether it tells in which thread
        # it runs: to look them up costs three bare calls. One value, so that threads with loops of
        # their own can't see halves of it.
        self._latest: tuple[Callable[[], Any], _Queues, Callable[[], float], bool]
        self._latest = (_no_loop, {}, monotonic, False)

    def now(self) -> float:
        return monotonic() if self.clock is None else self.clock.now()

    def sleep(self, seconds: float) -> Awaitable[None]:
        if seconds > 0 and _instant.watching:
            seconds = _instant.left_of(seconds)
        if self.clock is not None:
            return self.clock.sleep(seconds)
        if seconds <= 0:
            return _checkpoint()
        if seconds < FOREVER:
            return asyncio.sleep(seconds)
        return get_running_loop().create_future()

    def checkpoints(self) -> Callable[[], Awaitable[None]]:
        return _checkpoint if self.clock is None else super().checkpoints()

    async def within(
        self,
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
        expired: Callable[[C, BaseException | None], Awaitable[T]] | None = None,
        late: Callable[[T], Awaitable[object]] | None = None,  # noqa: ARG002 - all are awaited
    ) -> T:
        known, queues, now, tells_thread = self._latest
        loop = known()
        # To ask for the running loop costs two bare calls before 3.12, most of it a system call
        # that tells forks apart. The one that was used last is it, if it runs in this thread and
        # no other one, nested in it by force, is in the middle of a step.
        if (
            loop is None
            or not tells_thread
            or len(_stepping) != 1
            or loop._thread_id != get_ident()
            or (task := _task_of(loop)) is None
        ):
            loop, task, queues, now = self._running_task()
            if task is None:
                return await self._search().within(seconds, call, argument, expired)
        queue = queues.get(seconds) or self._add_queue(queues, seconds)
        if queue is None:
            limited = self._within_timer(loop, task, seconds, call, argument)
            del task  # see `_until`
            return await _otherwise(limited, argument, expired)
        when = now() + seconds
        if when <= queue.latest:
            when = queue.next_free()
        queue.latest = when
        if not queue.armed:
            queue.arm(loop, when)
        running = queue.running
        running[when] = task
        cancelling = task.cancelling()
        # `_until` once more, without its frame: this path is what every call with a limit pays.
        try:
            result = await call(argument)
        except CancelledError as error:
            ours = running.pop(when, None) is None and task.uncancel() <= cancelling
            del task
            if not ours:
                raise
            cause = error
        except BaseException:
            if running.pop(when, None) is None:
                task.uncancel()
            del task
            raise
        else:
            if running.pop(when, None) is None:
                task.uncancel()
            return result
        try:
            await _checkpoint()  # see `_until`
            return await _conclude(argument, cause, expired)
        finally:
            del cause

    def _running_task(
        self,
    ) -> tuple[Any, asyncio.Task[Any] | None, _Queues, Callable[[], float]]:
        """Find the loop that runs, its task, its queues and its clock, and remember the loop."""
        loop = _get_running_loop()
        known, queues, now, _ = self._latest
        if loop is not None and loop is not known():
            queues = _queues_of(loop) if self.clock is None else {}
            now = _clock_of(loop)
            self._latest = (weakref.ref(loop), queues, now, hasattr(loop, "_thread_id"))
        return loop, None if loop is None else _task_of(loop), queues, now

    def _add_queue(self, queues: _Queues, seconds: float) -> _DeadlineQueue | None:
        """Make a queue; `None` where a limit needs a timer of its own, or none at all."""
        if self.clock is not None or len(queues) >= _QUEUES_PER_LOOP:
            return None
        if not 2 * _TOGETHER < seconds < FOREVER:
            return None
        queue = queues[seconds] = _DeadlineQueue(queues, seconds)
        return queue

    async def _within_timer(
        self,
        loop: asyncio.AbstractEventLoop,
        task: asyncio.Task[Any],
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
    ) -> T:
        if seconds >= FOREVER:
            return await call(argument)
        deadline = _Deadline(task)
        del task  # see `_until`
        over = False

        def expire() -> None:
            # From another thread it may arrive late, when it would cancel what the caller does
            # next.
            if not over:
                deadline.expire()

        timer = _start_timer(self.clock, loop, seconds, expire)
        try:
            return await _until(deadline, timer, call, argument)
        finally:
            over = True

    async def shielded(self, fn: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        loop, task = get_running_loop(), current_task()
        assert task is not None
        shield = Shield(loop, task)
        # A timer for what never comes would have a clock that jumps jump there.
        timer = (
            _start_timer(self.clock, loop, timeout, shield.expire) if timeout < FOREVER else None
        )
        try:
            result = await shield.run(fn)
        except GeneratorExit:
            raise
        except BaseException as error:
            shield.raise_held()
            if isinstance(error, CancelledError):
                msg = f"cancelled, after {timeout:g} s at the latest"
                raise TimeoutError(msg) from error
            raise
        finally:
            if timer is not None:
                timer.cancel()
        shield.raise_held()
        return result

    def is_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, CancelledError)

    def is_cancelled(self) -> bool:
        task = current_task()
        return task is None or task.cancelling() > 0

    def place(self) -> tuple[int, object]:
        return get_ident(), get_running_loop()

    def waiter(self) -> Waiter:
        return _AsyncioWaiter(get_running_loop(), self.clock)

    def interruption(self) -> Interruption:
        return _AsyncioInterruption()

    def spawn(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> Child:
        loop = get_running_loop()
        task = loop.create_task(fn(), context=copy_context())
        _keep(task)
        task.add_done_callback(lambda _: ended())
        return _AsyncioChild(loop, task)

    def first_steps(self) -> Awaitable[None]:
        # Tasks run in the order in which they became ready.
        return _checkpoint()

    def spawner(self) -> Spawner:
        loop = get_running_loop()

        def spawn_from_anywhere(
            fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
        ) -> bool:
            def start() -> None:
                task = loop.create_task(fn())
                _keep(task)
                task.add_done_callback(lambda _: ended())

            try:
                loop.call_soon_threadsafe(start)
            except RuntimeError:  # the loop has been closed
                return False
            return True

        return spawn_from_anywhere


@coroutine
def _checkpoint() -> Generator[None, None, None]:
    """Go once round the event loop: `asyncio.sleep(0)` without its frame around this."""
    yield


async def _otherwise(
    limited: Awaitable[T],
    argument: C,
    expired: Callable[[C, BaseException | None], Awaitable[T]] | None,
) -> T:
    """Run what may reach its deadline, and in that case `expired`, if there is one."""
    try:
        return await limited
    except DeadlineReached as reached:
        cause = reached.__cause__
    try:
        return await _conclude(argument, cause, expired)
    finally:
        del cause


async def _conclude(
    argument: C,
    cause: BaseException | None,
    expired: Callable[[C, BaseException | None], Awaitable[T]] | None,
) -> T:
    """End a call whose limit has passed."""
    try:
        if expired is None:
            raise DeadlineReached from cause
        return await expired(argument, cause)
    finally:
        del cause


async def _until(
    deadline: _Deadline, timer: TimerHandle, call: Callable[[C], Awaitable[T]], argument: C
) -> T:
    """Run the inside of a time limit that has a timer of its own."""
    try:
        result = await call(argument)
    except CancelledError as error:
        ours = deadline.expired and _was_ours(deadline)
        del (
            deadline.task
        )  # or the task, its error, the traceback and this frame would hold one another
        if ours:
            # A task that is being cancelled is not cancelled again by anyio before its next turn; a
            # scope that was cancelled together with our expiry is the caller's, and wins.
            await asyncio.sleep(0)
            raise DeadlineReached from error
        raise
    except BaseException:
        if deadline.expired:
            deadline.task.uncancel()
        del deadline.task
        raise
    finally:
        timer.cancel()
    if deadline.expired:
        deadline.task.uncancel()
    return result


def _was_ours(deadline: _Deadline) -> bool:
    """Take our request back; it was ours alone if no more are left than there were at entry."""
    return deadline.task.uncancel() <= deadline.cancelling


def _start_timer(
    clock: Clock | None,
    loop: asyncio.AbstractEventLoop,
    seconds: float,
    callback: Callable[[], object],
) -> TimerHandle:
    """Call `callback` in `loop` once `seconds` have passed on `clock`, or on the loop's own."""
    seconds = min(max(seconds, 0.0), FOREVER)
    if clock is None:
        return loop.call_later(seconds, callback)
    return clock.call_at(clock.now() + seconds, _in_loop(loop, callback))


def _in_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[], object]
) -> Callable[[], object]:
    """Make a callback of `loop` callable from any thread, and from a task that moves the clock."""

    def call() -> None:
        if _get_running_loop() is not loop:
            with suppress(RuntimeError):  # closed, and nobody waits there any more
                loop.call_soon_threadsafe(callback)
        elif current_task(loop) is None:
            callback()
        else:  # not in the middle of a step of what might be the very task it cancels
            loop.call_soon(callback)

    return call


class _AsyncioWaiter(Waiter):
    __slots__ = ("_clock", "_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock | None) -> None:
        self._loop = loop
        self._clock = clock
        self._future: asyncio.Future[bool] = loop.create_future()

    def _settle(self, woken: bool) -> None:
        if not self._future.done():
            self._future.set_result(woken)

    def wake(self) -> bool:
        if _get_running_loop() is self._loop:
            self._settle(True)
            return True
        try:
            self._loop.call_soon_threadsafe(self._settle, True)
        except RuntimeError:  # the loop has been closed
            return False
        return True

    async def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or timeout >= FOREVER:
            woken = await self._future
        else:
            timer = _start_timer(self._clock, self._loop, timeout, lambda: self._settle(False))
            try:
                woken = await self._future
            finally:
                timer.cancel()
        if is_in_scope() and not is_shielded():
            # A cancel scope that was cancelled together with the wake-up has not reached the task
            # yet; whoever waits must not go on as if it had not been.
            await modules["anyio.lowlevel"].checkpoint_if_cancelled()
        return woken

    def is_alive(self) -> bool:
        return not self._loop.is_closed()


# Loops keep weak references only, and an abandoned stream's owner has nobody else.
_children: set[asyncio.Task[Any]] = set()


def _keep(task: asyncio.Task[Any]) -> None:
    """Hold on to a task of our own until it ends, and have nothing printed about its error."""
    _children.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _children.discard(task)
    if not task.cancelled():
        task.exception()


class _AsyncioInterruption(Interruption):
    __slots__ = ("_cancelling", "_fired", "_task")

    def __init__(self) -> None:
        task = current_task()
        assert task is not None
        self._task = task
        # Counted from entry: a cancellation that comes before the interruption, in the same turn,
        # is the caller's.
        self._cancelling = task.cancelling()
        self._fired = False

    async def guard(self, call: Callable[[C], Awaitable[T]], argument: C) -> T:
        try:
            result = await call(argument)
        except CancelledError as error:
            if await self.confirm(error):
                raise DeadlineReached from error
            raise
        except BaseException:
            await self.confirm(None)
            raise
        await self.confirm(None)
        return result

    def interrupt(self) -> None:
        self._fired = True
        self._task.cancel()

    async def confirm(self, error: BaseException | None) -> bool:
        if not self._fired:
            return False
        self._fired = False
        task: Any = self._task
        alone: bool = task.uncancel() <= self._cancelling
        if isinstance(error, CancelledError):
            return alone
        if alone and task._must_cancel:
            # The task has interrupted itself, and not waited since. What is due at its next wait,
            # and not taken back with the request before 3.13, has to come out of this one.
            with suppress(CancelledError):
                await _checkpoint()
        return False

    def is_mine(self) -> bool:
        return current_task() is self._task


class _AsyncioChild(Child):
    __slots__ = ("_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
        self._loop = loop
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()

    def cancel_soon(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)
