"""The states of a circuit breaker: closed, open, half-open, isolated.

Pure: no lock, no hook, no clock; `now` is an argument and the user of this class holds a lock around
each call.

Rules:
1. Every admission is a ticket. A closed circuit gives out its *epoch*, a number that changes with
   each close; a half-open one gives out a `Probe`. A result is judged by its ticket: one of another
   epoch changes nothing.
   Where slow calls count, a closed circuit gives out a `RunningCall`, which has the epoch in it.
2. Verdict and release are two things. `record_*` decide; `release` gives a probe's place back
   without a decision.
3. Opening and closing happen in one step each; what has to be announced is returned, never called.
4. By itself the circuit takes no step before the last one was announced, so that announcements come
   in the order of the steps, from however many threads. The user of this class reads `unannounced`
   after a step and hands it to `announced`.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import repeat, starmap
from typing import Any, Final, Literal, TypeAlias

from attrs import frozen

from ._rolling_window import RollingWindow
from ._slow_calls import RunningCall, SlowCalls

CircuitState: TypeAlias = Literal["closed", "open", "half_open", "isolated"]

CLOSED: Final = "closed"
OPEN: Final = "open"
HALF_OPEN: Final = "half_open"
ISOLATED: Final = "isolated"


class Probe:
    """The ticket of a trial call; it is slow past `slow_at`.

    From `lapses_at` on the next call takes its place, and it decides nothing any more. As long as
    none comes it does: or good calls that take longer than a break would never close the circuit.
    """

    __slots__ = ("lapses_at", "slow_at")

    def __init__(self, lapses_at: float, slow_at: float = math.inf) -> None:
        self.lapses_at = lapses_at
        self.slow_at = slow_at


Ticket: TypeAlias = int | Probe | RunningCall


@frozen
class Refusal:
    """Why a call may not pass.

    Attributes:
        state: The circuit's state.
        retry_after: Seconds until it makes sense to call again; `None` while isolated.
        cause: The exception handled last.
    """

    state: CircuitState
    retry_after: float | None
    cause: Exception | None


@frozen
class Opening:
    """The circuit has opened.

    Attributes:
        number: Number of this step, to say later which one was announced or a computed break
            belongs to.
        failure_rate: Failures / throughput of the window, from 0 to 1.
        failure_count: Failures in the window.
        half_open_attempts: How often the circuit has been half-open since it was closed last.
    """

    number: int
    failure_rate: float
    failure_count: int
    half_open_attempts: int


class BreakerState:
    """One circuit.

    Args:
        failure_ratio: Share of failures that opens it, 0 to 1.
        minimum_throughput: Calls in the window before the share counts.
        sampling_duration: Length of the window in seconds.
        break_duration: Length of a break in seconds, until `set_break` says otherwise.
        takes_notes: Whether good results may be noted in `good` before they are counted.
        half_open_probes: Trial calls of a half-open period, all of which must be good.
        consecutive_failures: Failures in a row that open it, whatever their share; `None`: any.
        slow: What watches for slow calls; `None` where they don't count.
    """

    __slots__ = (
        "_break_duration",
        "_configured_break",
        "_failure_ratio",
        "_good_probes",
        "_half_open_attempts",
        "_half_open_probes",
        "_longest_run",
        "_minimum_throughput",
        "_probes",
        "_run",
        "_slow",
        "_steps",
        "blocked_until",
        "epoch",
        "good",
        "last_handled",
        "opened_at",
        "state",
        "unannounced",
        "window",
    )

    def __init__(
        self,
        *,
        failure_ratio: float,
        minimum_throughput: int,
        sampling_duration: float,
        break_duration: float,
        takes_notes: bool = False,
        half_open_probes: int = 1,
        consecutive_failures: int | None = None,
        slow: SlowCalls | None = None,
    ) -> None:
        self._failure_ratio = failure_ratio
        self._minimum_throughput = minimum_throughput
        self._configured_break = break_duration
        self._break_duration = break_duration
        self._half_open_attempts = 0
        self._half_open_probes = half_open_probes
        #: Trial calls that have a place, in the order of their admission; and how many were good.
        self._probes: dict[Probe, None] = {}
        self._good_probes = 0
        self._longest_run = math.inf if consecutive_failures is None else consecutive_failures
        self._run = 0
        self._slow = slow
        self._steps = 0
        #: Number of the last step while nobody has been told of it, else 0.
        self.unannounced = 0
        self.window = RollingWindow(sampling_duration)
        self.state: CircuitState = CLOSED
        self.epoch = 0
        #: Times of good results of this epoch that are not counted yet. May be added to without a
        #: lock; what is noted for an epoch that is over is lost with it.
        self.good: deque[float] | None = deque() if takes_notes else None
        self.last_handled: Exception | None = None
        self.opened_at: float | None = None
        self.blocked_until: float | None = None

    def admit(self, now: float) -> Ticket | Refusal:
        """Let a call pass, with a ticket, or refuse it."""
        if self.state == CLOSED:
            return self.epoch if self._slow is None else self._slow.begin(self.epoch, now)
        if self.state == ISOLATED:
            return Refusal(ISOLATED, None, self.last_handled)
        if self.state == OPEN:
            blocked_until = self.blocked_until or 0.0
            # Whoever still computes the length of this break is waited for, but not for ever.
            if now < blocked_until or (
                self.unannounced and now < blocked_until + self._configured_break
            ):
                return Refusal(OPEN, until(blocked_until, now), self.last_handled)
            self._step_to(HALF_OPEN)
            self._half_open_attempts += 1
            self._good_probes = 0
        elif self._probes and (self.unannounced or not self._has_place(now)):
            first = next(iter(self._probes))
            return Refusal(HALF_OPEN, until(first.lapses_at, now), self.last_handled)
        # One of the first after the break, or after a probe that gave its place back or lost it.
        slow_at = math.inf if self._slow is None else now + self._slow.duration
        probe = Probe(now + self._break_duration, slow_at)
        self._probes[probe] = None
        return probe

    def _has_place(self, now: float) -> bool:
        """Whether there is a place for another probe, perhaps that of one that has lapsed."""
        if self._good_probes + len(self._probes) < self._half_open_probes:
            return True
        first = next(iter(self._probes))
        if now < first.lapses_at:
            return False
        del self._probes[first]
        return True

    def record_success(self, ticket: Ticket, now: float) -> bool:
        """Count a success; whether the circuit has closed by it."""
        if isinstance(ticket, Probe):
            # One that was slow keeps its place, and `pass_slow` finds it.
            if not self._is_current(ticket) or now > ticket.slow_at:
                return False
            del self._probes[ticket]
            self._good_probes += 1
            if self._good_probes < self._half_open_probes:
                return False
            self._close()
            return True
        if self._counts(ticket):
            self._run = 0
            self.window.record_success(now)
        return False

    def count_good(self) -> None:
        """Count the good results noted so far; before anything is decided."""
        good = self.good
        if good and self.state != HALF_OPEN:
            # As many as there are now, for other threads go on noting; a loop would cost each call
            # a fifth of a bare one.
            self._run = 0
            self.window.record_successes([*starmap(good.popleft, repeat((), len(good)))])

    def record_failure(self, ticket: Ticket, now: float, error: Exception | None) -> Opening | None:
        """Count a failure (`error`, or a handled result); how the circuit has opened by it, if so."""
        if isinstance(ticket, Probe):
            if not self._is_current(ticket):
                return None
            self.last_handled = error
            return self._open(now)
        if not self._counts(ticket):
            return None
        self.window.record_failure(now)
        self._run += 1
        if self.state != CLOSED:
            # Late: what tripped the circuit may give way to a newer exception, but not to a mere
            # result.
            if error is not None:
                self.last_handled = error
            return None
        self.last_handled = error
        if self.unannounced:
            return None
        throughput, failures = self.window.counts(now)
        enough = throughput >= self._minimum_throughput
        if not (enough and failures / throughput >= self._failure_ratio) and (
            self._run < self._longest_run
        ):
            return None
        return self._open(now)

    def pass_slow(
        self, now: float, ended: Ticket | None = None, error: Exception | None = None
    ) -> Opening | None:
        """Count calls that have taken too long; how the circuit has opened by that, if so.

        Args:
            now: The time in seconds.
            ended: A call that has just ended, after its outcome was recorded.
            error: What it came to, if that was handled.
        """
        slow = self._slow
        if slow is None:
            return None
        if self.state == HALF_OPEN:
            too_slow = any(now > probe.slow_at for probe in list(self._probes))
        else:
            fresh = slow.pass_over(now)
            if isinstance(ended, RunningCall) and ended.epoch == self.epoch:
                fresh = slow.end(ended, now) or fresh
            # By itself a slow share opens nothing: it takes another slow call.
            too_slow = self.state == CLOSED and fresh and slow.too_many(now)
        if not too_slow or self.unannounced:
            return None
        self.last_handled = error
        return self._open(now)

    def health(self, now: float) -> dict[str, Any]:
        """Show everything as plain data; idle means that a new circuit would give the same answers."""
        throughput, failures = self.window.counts(now)
        return {
            "state": self.state,
            "throughput": throughput,
            "failures": failures,
            "failure_rate": failures / throughput if throughput else 0.0,
            "opened_at": self.opened_at,
            "blocked_until": _finite(self.blocked_until),
            "retry_after": _finite(self._retry_after(now)),
            "idle": self.is_idle(now),
        }

    def _retry_after(self, now: float) -> float | None:
        """Seconds until a call may pass: 0 where one may now, `None` while isolated."""
        if self.state == ISOLATED:
            return None
        if self.state == OPEN and self.blocked_until is not None:
            return until(self.blocked_until, now)
        if self.state == HALF_OPEN:
            lapses = [probe.lapses_at for probe in list(self._probes) if now < probe.lapses_at]
            if lapses and self._good_probes + len(lapses) >= self._half_open_probes:
                return until(lapses[0], now)
        return 0.0

    def release(self, ticket: Ticket) -> None:
        """Give a probe's place back without a verdict: the next call is the probe."""
        if isinstance(ticket, Probe):
            self._probes.pop(ticket, None)
        elif isinstance(ticket, RunningCall) and self._slow is not None:
            self._slow.forget(ticket)

    def interrupt(self, ticket: Ticket, now: float) -> None:
        """Do the same for a call that was cancelled; one that was slow before is evidence by then."""
        if isinstance(ticket, RunningCall) and self._slow is not None and self.state != HALF_OPEN:
            self._slow.interrupt(ticket, now)
        else:
            self.release(ticket)

    def is_idle(self, now: float) -> bool:
        """Whether a fresh circuit would do the same from now on."""
        return (
            self.state == CLOSED
            and not self.unannounced
            and not self._run_matters
            and self.window.counts(now) == (0, 0)
            and (self._slow is None or self._slow.is_idle(now))
        )

    @property
    def _run_matters(self) -> bool:
        return self._run > 0 and self._longest_run < math.inf

    def set_break(self, opening: Opening, duration: float) -> None:
        """Set the length of the break that began with `opening`, if it still lasts."""
        if self.state == OPEN and opening.number == self._steps and self.opened_at is not None:
            self._break_duration = duration
            self.blocked_until = self.opened_at + duration

    def isolate(self) -> bool:
        """Hold the circuit open until it is closed by hand; whether that changes anything."""
        if self.state == ISOLATED:
            return False
        self._step_to(ISOLATED)
        self._probes.clear()
        return True

    def close(self) -> bool:
        """Close by hand and empty the window; whether the circuit was not closed before."""
        was_closed = self.state == CLOSED
        self._close()
        if was_closed:
            self.unannounced = 0
        return not was_closed

    def announced(self, step: int) -> None:
        """Say that everybody who has to know of a step has been told."""
        if step == self.unannounced:
            self.unannounced = 0

    def _step_to(self, state: CircuitState) -> None:
        self.state = state
        self._steps += 1
        self.unannounced = self._steps

    def _is_current(self, probe: Probe) -> bool:
        return self.state == HALF_OPEN and probe in self._probes

    def _counts(self, ticket: int | RunningCall) -> bool:
        epoch = ticket if isinstance(ticket, int) else ticket.epoch
        # Results that come in while half-open decide nothing, and only a close starts afresh.
        return epoch == self.epoch and self.state != HALF_OPEN

    def _open(self, now: float) -> Opening:
        throughput, failures = self.window.counts(now)
        self._step_to(OPEN)
        self._probes.clear()
        self._break_duration = self._configured_break
        self.opened_at = now
        self.blocked_until = now + self._configured_break
        rate = failures / throughput if throughput else 0.0
        return Opening(self._steps, rate, failures, self._half_open_attempts)

    def _close(self) -> None:
        self._step_to(CLOSED)
        self.epoch += 1
        if self.good is not None:
            self.good = deque()
        self._probes.clear()
        self._run = 0
        if self._slow is not None:
            self._slow.reset()
        self._half_open_attempts = 0
        self.last_handled = None
        self.opened_at = None
        self.blocked_until = None
        self.window.reset()


def until(when: float, now: float) -> float:
    """Seconds after which a clock that shows `now` has, by its own sums, reached `when`."""
    left = max(when - now, 0.0)
    while now + left < when:  # the difference was rounded down
        left = math.nextafter(left, math.inf)
    return left


def _finite(seconds: float | None) -> float | None:
    """Give a time as plain data, which knows no infinity."""
    return None if seconds == math.inf else seconds
