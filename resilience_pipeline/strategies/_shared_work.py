"""Work that is done once and that several callers wait for.

In an event loop it is done by a task of its own, so that it belongs to none of them: who is
cancelled leaves alone, and with the last one it is cancelled. In threads, which can't be cancelled,
a caller's thread does it. Callers may be in other event loops, and in other threads, than that
which does it.

`SharedWork` is what a call in flight (`_flight`) and a stream that is being read (`_shared_stream`)
have in common, `InFlight` where it is found.

Interleavings that were thought through:

1. It ends in the moment in which a caller joins: both happen under the table's lock, so the caller
   finds it in the table and not over, and will be woken, or does not find it.
2. The last caller leaves in the moment in which somebody joins: who leaves last takes it out of the
   table under the lock, so nobody joins what is being cancelled.
3. Its event loop is closed, or ends by cancelling all tasks: it is lost, and callers elsewhere do it
   themselves, one for all. A loop that is closed tells nobody, so they look from time to time.
4. It wants, through its own callback, what it is itself (or two of them want each other): it would
   wait for itself for ever. Who is inside of what is known from the context variables, and who
   would close a circle is told to go by itself.
5. It is taken out of the table by hand: those who wait for it get it, others start anew.
6. A thread that does it is given up on by its caller, a time limit around: the caller has left, the
   thread goes on while anybody else waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .._cancellation import NEVER, CancellationFlag, Cancelled, running_flag
from .._context import History, ResilienceContext, enter, leave
from .._locks import Lock

if TYPE_CHECKING:
    from ..runtime import Child, Runtime, Waiter

W = TypeVar("W", bound="SharedWork")

#: Seconds after which a caller in another event loop looks whether the one it waits for still exists.
_LOOK_AGAIN = 1.0

#: What runs the code that asks, outermost first.
_inside: ContextVar[tuple[SharedWork, ...]] = ContextVar(
    "resilience_pipeline.in_flight", default=()
)
#: Guards who waits for whom, of all tables.
_waits = Lock()


class SharedWork:
    """Something that is done once, and for which several callers may wait.

    Attributes:
        key: Under which key it is in its table.
        context: What it is done with: a copy of the context of the caller who started it.
        is_over: Whether it has come to its end.
        is_lost: Whether it ended without a result or an error for everybody.
    """

    __slots__ = (
        "_awaits",
        "_before",
        "_child",
        "_flag",
        "_history",
        "_interrupt",
        "_is_cancellation",
        "_is_sync",
        "_place",
        "_pulse",
        "_starter",
        "_table",
        "_waiters",
        "context",
        "is_lost",
        "is_over",
        "key",
    )

    def __init__(self, table: InFlight[Any], key: Hashable, context: ResilienceContext) -> None:
        runtime = context.runtime
        self._table = table
        self.key = key
        self._starter: ResilienceContext | None = context
        self.context = context.fork()
        self.context._invocations = 0
        # Kept beside the context, which has ended when the one who started it asks.
        self._history = self.context._history = History() if context._history is not None else None
        self._before = dict(self.context.written)
        self._place = runtime.place()
        self._is_sync = context._sync is not None
        #: Tells whether the event loop still exists.
        self._pulse: Waiter | None = None if self._is_sync else runtime.waiter()
        #: Tells what runs in a thread that nobody waits for it any more.
        self._flag = CancellationFlag() if self._is_sync else NEVER
        self._child: Child | None = None
        self._waiters: dict[Waiter, None] = {}
        #: What it waits for itself; see `may_wait_for`.
        self._awaits: list[SharedWork] = []
        #: What it was lost for.
        self._interrupt: BaseException | None = None
        self._is_cancellation = False
        self.is_over = self.is_lost = False

    @property
    def lock(self) -> Lock:
        """The lock of its table."""
        return self._table.lock

    def is_started_by(self, context: ResilienceContext) -> bool:
        """Whether it is the caller with this context who started it, and has not left."""
        return context is self._starter

    # ---- who may wait

    def is_within_reach(self, place: tuple[int, object]) -> bool:
        """Whether somebody in that place can wait for it without keeping it from going on."""
        return self._is_here(place) or self._place[0] != place[0]

    def _is_here(self, place: tuple[int, object]) -> bool:
        return place[1] is not None and self._place == place

    def is_dead(self) -> bool:
        """Whether the event loop that was to do it has been closed."""
        return self._pulse is not None and not self._pulse.is_alive()

    @property
    def is_around(self) -> bool:
        """Whether it is this that runs the code that asks."""
        return self in _inside.get()

    async def wait(self, runtime: Runtime) -> None:
        """Wait until it is over."""
        while not self.is_over:
            await self.wait_for_change(runtime, lambda: self.is_over)

    async def wait_for_change(self, runtime: Runtime, is_met: Callable[[], bool]) -> None:
        """Wait until somebody tells of a change, unless what is waited for has come about.

        Args:
            runtime: The caller's.
            is_met: Whether it has; asked under the lock.
        """
        waiter = runtime.waiter()
        with self._table.lock:
            # Looked at together with joining, or a wake-up from elsewhere would be lost.
            if is_met():
                return
            self._waiters[waiter] = None
        try:
            # By a clock of the user's own this would be time that passes.
            if self._is_here(runtime.place()) or self._pulse is None or runtime.clock is not None:
                await waiter.wait()
            elif not await waiter.wait(_LOOK_AGAIN) and self.is_dead():
                self.lose(None)
        finally:
            with self._table.lock:
                self._waiters.pop(waiter, None)

    def wake_all(self) -> None:
        """Tell everybody of a change."""
        with self._table.lock:
            waiters = list(self._waiters)
        for waiter in waiters:
            waiter.wake()

    # ---- the one who does it

    def enter(self) -> None:
        """Have the running task be the one, for good."""
        enter(self.context)
        _inside.set(self._with_those_around())

    def _with_those_around(self) -> tuple[SharedWork, ...]:
        # Without what is over: a task that was started there may live on, and start others.
        return (*(work for work in _inside.get() if not work.is_over), self)

    async def do_here(self, step: Callable[[], Awaitable[None]], left: Callable[[], None]) -> None:
        """Do it, or a part, in the calling thread.

        Args:
            step: What to do.
            left: Called from another thread when the caller is given up on meanwhile.

        Raises:
            Cancelled: The caller has been given up on.
        """
        around = running_flag.get()
        flag, inside = running_flag.set(self._flag), _inside.set(self._with_those_around())
        context = enter(self.context)
        if around is not NEVER:
            around.watch(left)
        try:
            await step()
        finally:
            if around is not NEVER:
                around.unwatch(left)
            leave(context)
            _inside.reset(inside)
            running_flag.reset(flag)
        if around.is_set():
            raise Cancelled

    def call_off(self, *, soon: bool) -> None:
        """Cancel what is being done; `soon` if that has to work from anywhere."""
        if self._is_sync:
            self._flag.set()
        elif self._child is not None:
            if soon:
                with suppress(RuntimeError):  # its event loop has just been closed
                    self._child.cancel_soon()
            else:
                self._child.cancel()

    def _spawn(self, runtime: Runtime, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start the task that does it."""
        try:
            child = runtime.spawn(fn, partial(self.lose, None))
        except BaseException:
            self.lose(None)
            raise
        if not self.is_over:  # a task may come to its end at once
            self._child = child

    def is_elsewhere(self, runtime: Runtime) -> bool:
        """Whether it is not this event loop that does it."""
        return not self._is_here(runtime.place())

    def account_for(self, context: ResilienceContext, *, is_good: bool) -> None:
        """Have the one who started it know what was done for it, and if it was good, what was written."""
        mine = self.context
        if not self._is_sync:  # or they have been counted at once
            context._invocations += mine._invocations
        if context._history is not None and self._history is not None:
            context._history.extend(self._history)
        if is_good:
            for key, value in mine.written.items():
                if key not in self._before or self._before[key] is not value:
                    context.properties.set(key, value)

    # ---- the end

    def lose(self, error: BaseException | None, runtime: Runtime | None = None) -> None:
        """End it without anything for everybody.

        Args:
            error: The interrupt or cancellation that ended it; `None` if it is simply gone.
            runtime: Where that was raised.
        """
        with self._table.lock:
            if self.is_over:
                return
            self._note_loss(error, runtime)
            self._end()
        self.wake_all()

    def _note_loss(self, error: BaseException | None, runtime: Runtime | None) -> None:
        """Note what it is lost for, under the lock."""
        self.is_lost = True
        if error is not None and runtime is not None:
            self._is_cancellation = runtime.is_cancellation(error)
            self._interrupt = runtime.carried(error)

    def _end(self) -> bool:
        """Be over, under the lock; whether what it came to may be kept."""
        self.is_over = True
        self._child = None  # whose context variables lead here
        return self._table.note_end(self)

    def take_interrupt(self, *, is_starter: bool) -> BaseException | None:
        """Give what it was lost for, once: to the one who started it, as long as that is there.

        A cancellation is nobody else's.
        """
        with self._table.lock:
            is_theirs = self._starter is not None or self._is_cancellation
            if is_theirs and not is_starter:
                return None
            error, self._interrupt = self._interrupt, None
        try:
            return error
        finally:
            del error


def may_wait_for(work: SharedWork) -> bool:
    """Note that the running code waits for something, unless it would be for itself."""
    chain = _inside.get()
    if not chain:
        return True
    with _waits:
        seen: set[int] = set()
        todo = [work]
        while todo:
            each = todo.pop()
            if each.is_over or id(each) in seen:
                continue
            if each in chain:
                return False
            seen.add(id(each))
            todo += each._awaits
        chain[-1]._awaits.append(work)
    return True


def waits_no_more_for(work: SharedWork) -> None:
    """Take that back; from anywhere else than where it was noted it does nothing."""
    chain = _inside.get()
    if chain:
        with _waits, suppress(ValueError):
            chain[-1]._awaits.remove(work)


class InFlight(Generic[W]):
    """What is in flight, by key.

    Args:
        landed: Called under the lock with what has come to its end and is still what its key stands
            for: what is found there, and what is kept of it, change in one step.
        lock: Guards it; may guard more, of its user's.

    Attributes:
        lock: That lock. `find`, `add`, `remove` and `pop` are to be called under it.
        count: How many have not come to their end, also those that are not found any more.
    """

    __slots__ = ("_landed", "_works", "count", "lock")

    def __init__(self, landed: Callable[[W], object] | None = None, lock: Any = None) -> None:
        self.lock = Lock() if lock is None else lock
        self._landed = landed
        self._works: dict[Hashable, W] = {}
        self.count = 0

    def find(self, key: Hashable) -> W | None:
        """Give what a key stands for, unless its event loop is gone."""
        work = self._works.get(key)
        if work is None:
            return None
        if work.is_dead():
            work.lose(None)
            return None
        return work

    def add(self, work: W) -> None:
        """Have its key stand for something that begins now."""
        self._works[work.key] = work
        self.count += 1

    def remove(self, work: SharedWork) -> bool:
        """Have its key not stand for it any more; whether it did."""
        if self._works.get(work.key) is not work:
            return False
        del self._works[work.key]
        return True

    def pop(self, key: Hashable) -> bool:
        """Have a key stand for nothing any more; whether it did."""
        return self._works.pop(key, None) is not None

    def clear(self) -> None:
        """Have no key stand for anything any more."""
        self._works.clear()

    def note_end(self, work: Any) -> bool:
        """Note that something has come to its end, under the lock; whether it was told to be kept."""
        self.count -= 1
        # A key that can't be compared any more is its user's, and nothing to those who wait.
        with suppress(Exception):
            if self.remove(work) and self._landed is not None:
                self._landed(work)
                return True
        return False
