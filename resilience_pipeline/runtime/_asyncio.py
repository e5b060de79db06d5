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
import threading
import weakref
from asyncio import CancelledError, current_task
from asyncio.events import _get_running_loop, get_running_loop
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from contextvars import copy_context
from sys import modules
from time import monotonic
from types import coroutine
from typing import Any, TypeVar

from .._errors import DeadlineReached
from ._asyncio_shield import Shield, is_shielded
from ._base import FOREVER, Child, Clock, Interruption, Runtime, Spawner, TimerHandle, Waiter

T = TypeVar("T")
C = TypeVar("C")

#: Lengths of time limits with a queue of their own, per loop; further ones get plain timers. Fixed
#: limits are few, generated ones may all be different.
_QUEUES_PER_LOOP = 64


class _Deadline:
    """A time limit on one task: who to cancel, and whether that has happened."""

    __slots__ = ("cancelling", "expired", "task", "when")

    def __init__(self, task: asyncio.Task[Any], when: float) -> None:
        self.task = task
        self.when = when
        self.cancelling = task.cancelling()
        self.expired = False

    def expire(self) -> None:
        self.expired = True
        self.task.cancel()


class _DeadlineQueue:
    """Running limits of one length on one loop, in the order of their expiry."""

    __slots__ = ("_owner", "armed", "running", "seconds")

    def __init__(self, owner: dict[float, _DeadlineQueue], seconds: float) -> None:
        self._owner = owner
        self.seconds = seconds
        # A dict for its order and its constant-time removal from the middle.
        self.running: dict[_Deadline, None] = {}
        self.armed = False

    def arm(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        self.armed = True
        loop.call_at(when, self._fire, loop)

    def _fire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expire what is due; the timer was set for a head that may have finished long ago."""
        now = loop.time()
        for deadline in list(self._due(now)):
            del self.running[deadline]
            deadline.expire()
        if self.running:
            self.arm(loop, next(iter(self.running)).when)
        else:
            self.armed = False
            # Idle for a whole length: forget it, so that generated lengths do not pile up.
            self._owner.pop(self.seconds, None)

    def _due(self, now: float) -> Iterator[_Deadline]:
        for deadline in self.running:
            if deadline.when > now:
                return
            yield deadline


_Queues = dict[float, _DeadlineQueue]
_queues_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Queues] = (
    weakref.WeakKeyDictionary()
)


class _LocalQueues(threading.local):
    """The queues of the loop that this thread ran last; a look-up by weak key costs ten of these."""

    loop: Callable[[], asyncio.AbstractEventLoop | None] = staticmethod(lambda: None)
    queues: _Queues


_local = _LocalQueues()


def _queues_of(loop: asyncio.AbstractEventLoop) -> _Queues:
    if _local.loop() is not loop:
        queues = _queues_of_loops.get(loop)
        if queues is None:
            queues = _queues_of_loops[loop] = {}
        _local.loop, _local.queues = weakref.ref(loop), queues
    return _local.queues


def in_task() -> bool:
    """Whether a task of asyncio runs this: not so in trio, even as a guest of asyncio's loop."""
    loop = _get_running_loop()
    return loop is not None and current_task(loop) is not None


class AsyncioRuntime(Runtime):
    """Runs pipelines in tasks of any asyncio event loop."""

    __slots__ = ()

    def now(self) -> float:
        return monotonic() if self.clock is None else self.clock.now()

    def sleep(self, seconds: float) -> Awaitable[None]:
        if self.clock is not None:
            return self.clock.sleep(seconds)
        if seconds <= 0:
            return _checkpoint()
        if seconds < FOREVER:
            return asyncio.sleep(seconds)
        return get_running_loop().create_future()

    async def within(
        self,
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
        late: Callable[[T], Awaitable[object]] | None = None,  # noqa: ARG002 - all are awaited
    ) -> T:
        # Asked for once: the running loop costs two bare calls, most of it to tell forks apart.
        loop = get_running_loop()
        task = current_task(loop)
        if task is None or seconds >= FOREVER:
            return await call(argument)
        if self.clock is not None:
            return await self._within_clock(self.clock, task, seconds, call, argument)
        deadline = _Deadline(task, loop.time() + seconds)
        queues = _queues_of(loop)
        queue = queues.get(seconds)
        if queue is None:
            if len(queues) >= _QUEUES_PER_LOOP:
                timer = loop.call_at(deadline.when, deadline.expire)
                del task  # see `_until`
                return await _until(deadline, timer, call, argument)
            queue = queues[seconds] = _DeadlineQueue(queues, seconds)
        if not queue.armed:
            queue.arm(loop, deadline.when)
        running = queue.running
        running[deadline] = None
        # `_until` once more, without its frame: this path is what every call with a limit pays.
        try:
            result = await call(argument)
        except CancelledError as error:
            ours = deadline.expired and _was_ours(deadline)
            del task, deadline.task
            if ours:
                await asyncio.sleep(0)
                raise DeadlineReached from error
            raise
        except BaseException:
            if deadline.expired:
                task.uncancel()
            del task, deadline.task
            raise
        finally:
            running.pop(deadline, None)
        if deadline.expired:
            task.uncancel()
        return result

    async def _within_clock(
        self,
        clock: Clock,
        task: asyncio.Task[Any],
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
    ) -> T:
        deadline = _Deadline(task, clock.now() + seconds)
        over = False

        def expire() -> None:
            # From another thread it may arrive late, when it would cancel what the caller does
            # next.
            if not over:
                deadline.expire()

        timer = _start_timer(clock, task.get_loop(), seconds, expire)
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
        if "anyio._backends._asyncio" in modules and not is_shielded():
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
