"""Virtual time on asyncio and trio.

Three parts, none of which knows more than it must:

- `TimerHandle` and `Timers`: what waits, and in which order. No idea of the present.
- `Timeline`: the present, when it moves, and who has to be idle before it jumps.
- `VirtualClock`: the face of it that users see. Everything it needs of a loop is in `_loops`.

Invariants:

- The present never goes back, and a callback never runs before its time.
- No lock is held while a callback runs; a callback runs at most once, never inside `call_at`.
- The clock holds no loop: parties are keyed weakly.

An interleaving thought through: loop A jumps and wakes a sleeper in loop B. The timer counts as
pending in B until its callback has run, and B counts as busy from then on until a look that began
later finds it idle. So A can't jump again before B's sleeper had its turn, nor B's party end.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from itertools import count
from threading import get_ident
from typing import TYPE_CHECKING, Final, final
from weakref import WeakKeyDictionary

from resilience_pipeline._locks import Lock

from ._loops import Host, current_host, is_running
from ._thread_signals import ThreadHost, ThreadsAtWork, ThreadSignal

if TYPE_CHECKING:
    from ._loops import Loop

# Three sleeps of 0.1 s end at 0.30000000000000004: `advance(0.3)` is meant to reach that.
_SLACK: Final = 1e-9
_LAST_INSTANT: Final = sys.float_info.max  # what is due at infinity never falls due


@final
class TimerHandle:
    """What `VirtualClock.call_at` returns: `cancel` is for everybody, the rest for the clock."""

    __slots__ = ("_context", "_party", "_timers", "callback", "queued", "when")

    def __init__(
        self, when: float, callback: Callable[[], object], timers: Timers, party: Party | None
    ) -> None:
        self.when = when
        self.callback: Callable[[], object] | None = callback  # None: called or cancelled
        self.queued = False
        self._context = copy_context()  # as the loops' own timers do
        self._timers = timers
        self._party = party

    def cancel(self) -> None:
        """See to it that the callback is not called; does nothing once it was, or a second time."""
        with self._timers.lock:
            if self.callback is None:
                return
            self.callback = None
            self._retire()
            if self.queued:
                self._timers.forget()

    def run(self) -> None:
        """Call the callback, unless it was called or cancelled before."""
        with self._timers.lock:
            callback, self.callback = self.callback, None
        if callback is None:
            return
        try:
            self._context.run(callback)
        finally:
            with self._timers.lock:
                self._retire()

    def _retire(self) -> None:
        if self._party is not None:
            self._party.pending -= 1

    def __repr__(self) -> str:
        state = "done" if self.callback is None else f"callback={self.callback!r}"
        return f"<TimerHandle when={self.when!r} {state}>"


class Timers:
    """Handles by time, then by registration. Hold `lock` to call anything but `len`.

    It is reentrant since garbage collection may close an abandoned sleeper, and so cancel its
    handle, in the middle of a guarded block of the same thread.
    """

    __slots__ = ("_gone", "_heap", "_order", "lock")

    def __init__(self) -> None:
        self.lock = Lock()
        self._heap: list[tuple[float, int, TimerHandle]] = []
        self._order = count()
        self._gone = 0  # cancelled, but still in the heap

    def __len__(self) -> int:
        return len(self._heap) - self._gone

    def push(self, timer: TimerHandle) -> None:
        """Take in a handle."""
        timer.queued = True
        heapq.heappush(self._heap, (timer.when, next(self._order), timer))

    def first(self) -> float:
        """When the next one falls due; infinity if there is none."""
        while self._heap and self._heap[0][2].callback is None:
            self._pop()
            self._gone -= 1
        return self._heap[0][0] if self._heap else math.inf

    def pop_until(self, when: float) -> list[TimerHandle]:
        """Take out what is due at `when` (finite) or before, in order."""
        due: list[TimerHandle] = []
        while self.first() <= when:
            due.append(self._pop())
        return due

    def forget(self) -> None:
        """Note that one more was cancelled, and sweep when more than half of the heap was."""
        self._gone += 1
        if self._gone * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._gone = 0

    def _pop(self) -> TimerHandle:
        timer = heapq.heappop(self._heap)[2]
        timer.queued = False
        return timer


class Party:
    """One loop that waits on an `autojump` clock, for as long as it has something pending there."""

    __slots__ = ("ended", "idle", "pending", "stirred", "thread")

    def __init__(self) -> None:
        self.pending = 0  # finite timers of this loop whose callback has not run
        self.idle = False  # it looked, and waits for other loops to be idle too
        self.stirred = False  # something fired since it began to look
        self.ended = False
        self.thread = get_ident()


class Timeline:
    """The present of one clock, and the loops that wait for it to move."""

    __slots__ = ("_parties", "advancing", "autojump", "lock", "now", "threads", "timers")

    def __init__(self, start: float, *, autojump: bool) -> None:
        self.now = start
        self.autojump = autojump
        self.timers = Timers()
        self.lock = self.timers.lock  # guards everything here
        self.advancing = 0
        self.threads = ThreadsAtWork(self)
        self._parties: WeakKeyDictionary[Loop, Party] = WeakKeyDictionary()

    def __repr__(self) -> str:
        mode = " autojump" if self.autojump else ""
        return f"<VirtualClock now={self.now!r} pending={len(self.timers)}{mode}>"

    def host(self) -> Host | None:
        """Find the loop this is called in, if one goes on before this returns to it."""
        host = current_host()
        return None if host is not None and host.loop in self.threads.suspended else host

    def add(self, when: float, callback: Callable[[], object]) -> TimerHandle:
        """Register a callback, or have it run in the loop's next turn when it is due already."""
        return self.add_in(self.host(), when, callback)

    def add_in(self, host: Host | None, when: float, callback: Callable[[], object]) -> TimerHandle:
        """Do the same where the loop is known."""
        if host is not None and when <= self.now:
            timer = TimerHandle(when, callback, self.timers, None)
            if host.run_soon(partial(self.run, timer)):
                return timer
        with self.lock:
            party = self._join(host) if self.autojump and host and when < math.inf else None
            timer = TimerHandle(when, callback, self.timers, party)
            self.timers.push(timer)
        return timer

    def run(self, timer: TimerHandle, loop: Loop | None = None) -> None:
        """Run one timer in the loop that moved the clock.

        Args:
            timer: The timer.
            loop: The loop, if it finds what this has woken there in its own queue.
        """
        try:
            timer.run()
        finally:
            with self.lock:
                # Whomever it has woken, in whichever loop: nobody is known to be idle any more.
                for other, party in self._parties.items():
                    party.idle = False
                    # To begin to look once more would cost each instant as many turns again.
                    party.stirred = party.stirred or other is not loop

    def step(self, target: float) -> list[TimerHandle] | None:
        """Move to the next instant that matters, `target` being the last; None: no more of them."""
        with self.lock:
            due = self._take_due(target + max(_SLACK, 4 * math.ulp(target)))
            if not due and self.now >= target:
                return None
            self.now = self.now if due else target
            return due

    def _take_due(self, limit: float) -> list[TimerHandle]:
        first = self.timers.first()
        if first > limit:
            return []
        self.now = max(self.now, first)
        return self.timers.pop_until(self.now)

    # Jumping: each loop that has something pending finds out for itself when it is idle.

    def _join(self, host: Host) -> Party | None:
        """Count one more pending timer for this loop; None: the loop takes nothing on any more."""
        party = self._parties.get(host.loop)
        if party is None:
            party = Party()
            if not host.watch(self, party):
                return None
            self._parties[host.loop] = party
        party.pending += 1
        return party

    def leave(self, loop: Loop, party: Party) -> None:
        """End a party: nobody waits for this loop any more. `jump_from_thread` has to follow."""
        with self.lock:
            party.ended = True
            if self._parties.get(loop) is party:
                del self._parties[loop]

    def jump(self, loop: Loop, mine: Party) -> list[TimerHandle]:
        """Called by an idle loop: end its party, or jump, or leave it `idle` until others are."""
        with self.lock:
            if mine.stirred:
                return []
            if not mine.pending:
                self.leave(loop, mine)
                return []
            busy = len(self._parties) > 1 and self._is_any_loop_busy()
            mine.idle = busy or self.advancing > 0 or self.threads.count > 0
            return [] if mine.idle else self._take_due(_LAST_INSTANT)

    def _is_any_loop_busy(self) -> bool:
        return any(
            # Two loops never run in one thread at once, so one of this thread is suspended.
            not party.idle
            and party.thread != get_ident()
            and is_running(other)
            and other not in self.threads.suspended
            for other, party in self._parties.items()
        )

    def jump_from_thread(self) -> None:
        """Called where a thread or a party ends, or begins to wait: go on if nobody is at work.

        Where loops take part too, the last of them to look finds that out; and so does the one in
        whose task a synchronous call ends, which is not idle yet.
        """
        host = self.host()
        while self.autojump:
            with self.lock:
                if self.threads.count > 0 or self.advancing or self._is_any_loop_busy():
                    return
                if host is not None and host.loop in self._parties:
                    return
                due = self._take_due(_LAST_INSTANT)
            if not due:
                return
            for timer in due:
                self.run(timer)


class VirtualClock:
    """A clock that stands still until it is told to move; for a builder's `clock=`.

    It is made inside or outside of an event loop and serves asyncio and trio: several loops one
    after another, or those of several threads at once.

    Example::

        clock = VirtualClock()
        pipeline = ResiliencePipelineBuilder(clock=clock).add_retry(delay="30s").build()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pipeline.execute, fetch)
            await clock.advance(30)  # the first retry has started, and nobody waited

    With `autojump=True` nobody has to call `advance`: whenever everybody waits, the clock jumps to
    the next instant at which something falls due::

        clock = VirtualClock(autojump=True)
        await clock.sleep(3600)  # returns at once
        assert clock.now() == 3600.0

    "Everybody waits" means that the loop has nothing left to run. What goes on outside of it, in a
    socket, a worker thread or a process, can't be known: time passes while a task waits for one.
    Where that matters use `advance`. A task that polls without waiting on the clock keeps it from
    moving. Where loops of several threads wait on one `autojump` clock it jumps when all are idle.

    Args:
        autojump: Move on by itself when everybody waits. Default: only `advance` moves the clock.
        start: The time to start at, in seconds. Default 0.
    """

    def __init__(self, *, autojump: bool = False, start: float = 0.0) -> None:
        self._timeline = Timeline(_number("start", start, finite=True), autojump=autojump)

    def __repr__(self) -> str:
        return repr(self._timeline)

    def _host(self, method: str) -> Host | ThreadHost:
        host = self._timeline.host()
        if host is not None:
            return host
        if not self._timeline.threads.is_here:
            msg = (
                f"VirtualClock.{method}() must be awaited in an asyncio or trio task, or within a "
                f"synchronous call"
            )
            raise RuntimeError(msg)
        return ThreadHost(self, self._timeline)

    # What threads wait with, see `runtime._threads`.

    @property
    def _threads_at_work(self) -> ThreadsAtWork:
        return self._timeline.threads

    def _thread_signal(self) -> ThreadSignal:
        return ThreadSignal(self, self._timeline)

    @property
    def pending(self) -> int:
        """How many sleepers and callbacks are waiting for their time."""
        return len(self._timeline.timers)

    def now(self) -> float:
        """Tell the time, in seconds."""
        return self._timeline.now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has moved on.

        Tasks that wake at one instant run in the order they fell asleep in; on trio in any order.

        Args:
            seconds: How long; 0 or less lets other tasks run once, `math.inf` waits for ever.

        Raises:
            TypeError: `seconds` is not a number.
            ValueError: `seconds` is NaN.
            RuntimeError: Awaited outside of an asyncio or trio task.
        """
        seconds = _number("seconds", seconds)
        host = self._host("sleep")
        if seconds <= 0:
            await host.checkpoint()
            return
        timeline = self._timeline
        loop = None if isinstance(host, ThreadHost) else host
        await host.wait_until(partial(timeline.add_in, loop, timeline.now + seconds))

    def call_at(self, when: float, callback: Callable[[], object]) -> TimerHandle:
        """Have a function called once at a given time.

        It runs in the event loop that moves the clock, which need not be the one this was called
        in. Callbacks of one instant run in the order of their registration. What one of them raises
        goes to the loop's exception handler on asyncio, to the log on trio, and stops no other.

        Example::

            handle = clock.call_at(clock.now() + 5, on_deadline)
            handle.cancel()  # it is not needed after all

        Args:
            when: The time by this clock, in seconds. If it is not ahead the callback runs in the
                loop's next turn, or, from outside of a loop, when the clock is moved next.
            callback: Called without arguments.

        Returns:
            A handle whose `cancel()` takes the callback back.

        Raises:
            TypeError: `when` is not a number or `callback` not callable.
            ValueError: `when` is NaN.
        """
        _check_callable("callback", callback)
        return self._timeline.add(_number("when", when), callback)

    async def advance(self, seconds: float) -> None:
        """Move the clock, running everything that falls due on the way, in order of time.

        Tasks run until all of them wait: first of all, then after each instant at which something
        fell due, then at the end. Timers they register on the way run too. Tasks of other threads'
        loops are woken but not waited for. Cancelled, it leaves the clock where it got to. Advances
        that overlap don't add up.

        Args:
            seconds: How far; 0 only lets tasks run, and what is due already happen.

        Raises:
            TypeError: `seconds` is not a number.
            ValueError: `seconds` is negative, infinite or NaN.
            RuntimeError: Awaited outside of an asyncio or trio task.
        """
        seconds = _number("seconds", seconds, finite=True)
        if seconds < 0:
            msg = f"seconds must not be negative, got {seconds!r}: a clock never goes back"
            raise ValueError(msg)
        timeline = self._timeline
        host = self._host("advance")
        target = timeline.now + seconds
        with timeline.lock:
            timeline.advancing += 1
        try:
            await host.wait_all_blocked()
            while (due := timeline.step(target)) is not None:
                host.run_due(timeline, due)
                await host.wait_all_blocked()
        finally:
            with timeline.lock:
                timeline.advancing -= 1


def _number(name: str, value: object, *, finite: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"{name} must be a number of seconds, got {value!r}"
        raise TypeError(msg)
    if math.isnan(value) or (finite and math.isinf(value)):
        msg = f"{name} must be a {'finite ' if finite else ''}number of seconds, got {value!r}"
        raise ValueError(msg)
    return float(value)


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        msg = f"{name} must be callable, got {value!r}"
        raise TypeError(msg)
