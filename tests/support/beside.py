"""What tests in plain threads share: code that stays until it is let go, and threads beside the test's.

Nothing here waits for time to pass: everything waits for an event, and `PATIENCE` is how long until a
test that has gone wrong says so.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Seconds after which something is not going to happen any more.
PATIENCE = 30.0
#: A real time limit, against code that waits until the test lets it go.
SHORT = 0.01
#: A limit on a clock that is moved by hand.
LIMIT = 5


def see(event: threading.Event) -> None:
    """Wait for an event that is sure to come."""
    assert event.wait(PATIENCE), "it has not happened"


def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread is about to do, and tells nobody of."""
    turn = threading.Event()
    for _ in range(30_000):
        if condition():
            return
        turn.wait(0.001)
    raise AssertionError("it does not come about")


class _Timer:
    def __init__(self, when: float, callback: Callable[[], object]) -> None:
        self.when = when
        self.callback = callback
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True


class HandClock:
    """A clock that only `expire` moves, whatever threads are doing meanwhile."""

    def __init__(self) -> None:
        self._now = 0.0
        self._timers: list[_Timer] = []
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing sleeps {seconds} s here but by its runtime")

    def call_at(self, when: float, callback: Callable[[], object]) -> _Timer:
        timer = _Timer(when, callback)
        with self._changed:
            self._timers.append(timer)
            self._changed.notify_all()
        return timer

    def expire(self, seconds: float = LIMIT, timers: int = 1) -> None:
        """Move on by so much, as soon as so many wait for something, one of them for no longer."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_ready(seconds, timers), PATIENCE)
            self._now += seconds
            due = [each for each in self._timers if not each.is_over and each.when <= self._now]
            self._timers = [each for each in self._timers if each not in due]
        for timer in due:
            timer.callback()

    @property
    def is_waited_for(self) -> bool:
        with self._changed:
            return self._is_ready(math.inf, 1)

    def _is_ready(self, seconds: float, timers: int) -> bool:
        waiting = [each.when for each in self._timers if not each.is_over]
        return len(waiting) >= timers and min(waiting) <= self._now + seconds


class Gate:
    """A plain function whose calls stay inside until the gate is opened.

    Args:
        result: What its calls give.
        error: What they raise in place of that.
        clock: A clock that each call moves by `LIMIT` when it has come in, so that the limit around
            it passes with the call inside.

    Attributes:
        calls: How many calls there were.
        entered: Set when one has come in.
        opened: Lets all calls go on.
        left: Set when one has gone out.
        error: Raised in place of giving `result`.
    """

    def __init__(
        self,
        result: Any = None,
        *,
        error: BaseException | None = None,
        clock: HandClock | None = None,
    ) -> None:
        self._clock = clock
        self.calls = 0
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.left = threading.Event()
        self.result = result
        self.error = error
        self._lock = threading.Lock()

    def __call__(self, *_: object) -> Any:
        with self._lock:
            self.calls += 1
        self.entered.set()
        if self._clock is not None:
            self._clock.expire()
        try:
            see(self.opened)
            if self.error is not None:
                raise self.error
            return self.result
        finally:
            self.left.set()


class Closable:
    """A value that can be closed, and tells."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.closings = 0

    def close(self) -> None:
        self.closings += 1
        self.closed.set()


class Beside(Generic[T]):
    """Runs `fn(*args)` in a thread of its own, from now on."""

    def __init__(self, fn: Callable[..., T], *args: Any) -> None:
        self._fn, self._args = fn, args
        self._value: Any = None
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._value = self._fn(*self._args)
        except BaseException as error:
            self._error = error

    @property
    def is_running(self) -> bool:
        return self.thread.is_alive()

    def result(self) -> T:
        """Wait for its end, and give what it gave or raise what it raised."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "it has not ended"
        if self._error is not None:
            raise self._error
        value: T = self._value
        return value


def let_go(*gates: Gate) -> None:
    """Open gates and wait until those who were inside have gone out."""
    for gate in gates:
        gate.opened.set()
        if gate.calls:
            see(gate.left)
