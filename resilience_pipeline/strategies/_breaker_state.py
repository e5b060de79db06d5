"""The states of a circuit breaker: closed, open, half-open, isolated.

Pure: no lock, no hook, no clock; `now` is an argument and the user of this class holds a lock
    around each call.

Rules:
1. Every admission is a ticket. A closed circuit gives out its *epoch*, a number that changes with
   each close; a half-open one gives out a `Probe`. A result is judged by its ticket: one of another
   epoch changes nothing.
2. Verdict and release are two things. `record` decides; `release` gives a probe's place back
   without a decision.
3. Opening and closing happen in one step each; what has to be announced is returned, never called.
4. By itself the circuit takes no step before the last one was announced, so that announcements come
   in the order of the steps, from however many threads. The user of this class reads `unannounced`
   after a step and hands it to `announced`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

from attrs import frozen

from ._rolling_window import RollingWindow

CircuitState: TypeAlias = Literal["closed", "open", "half_open", "isolated"]

CLOSED: Final = "closed"
OPEN: Final = "open"
HALF_OPEN: Final = "half_open"
ISOLATED: Final = "isolated"


class Probe:
    """The ticket of a trial call; it loses its place at `lapses_at`."""

    __slots__ = ("lapses_at",)

    def __init__(self, lapses_at: float) -> None:
        self.lapses_at = lapses_at


Ticket: TypeAlias = int | Probe


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
    """

    __slots__ = (
        "_break_duration",
        "_configured_break",
        "_failure_ratio",
        "_half_open_attempts",
        "_minimum_throughput",
        "_probe",
        "_steps",
        "blocked_until",
        "epoch",
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
    ) -> None:
        self._failure_ratio = failure_ratio
        self._minimum_throughput = minimum_throughput
        self._configured_break = break_duration
        self._break_duration = break_duration
        self._half_open_attempts = 0
        self._probe: Probe | None = None
        self._steps = 0
        #: Number of the last step while nobody has been told of it, else 0.
        self.unannounced = 0
        self.window = RollingWindow(sampling_duration)
        self.state: CircuitState = CLOSED
        self.epoch = 0
        self.last_handled: Exception | None = None
        self.opened_at: float | None = None
        self.blocked_until: float | None = None

    def admit(self, now: float) -> Ticket | Refusal:
        """Let a call pass, with a ticket, or refuse it."""
        if self.state == CLOSED:
            return self.epoch
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
        elif self._probe is not None and (self.unannounced or now < self._probe.lapses_at):
            return Refusal(HALF_OPEN, until(self._probe.lapses_at, now), self.last_handled)
        # The first after the break, or after a probe that gave its place back or let it lapse.
        self._probe = Probe(now + self._break_duration)
        return self._probe

    def record_success(self, ticket: Ticket, now: float) -> bool:
        """Count a success; whether the circuit has closed by it."""
        if isinstance(ticket, Probe):
            if not self._is_current(ticket):
                return False
            self._close()
            return True
        if self._counts(ticket):
            self.window.record_success(now)
        return False

    def record_successes(self, noted: Iterable[tuple[Ticket, float]]) -> None:
        """Count successes of a closed circuit's calls, at least one, with their tickets and times."""
        if self.state == HALF_OPEN:
            return
        tickets: Sequence[Ticket]
        times: Sequence[float]
        tickets, times = zip(*noted, strict=True)
        if tickets.count(self.epoch) != len(tickets):
            times = [
                now for ticket, now in zip(tickets, times, strict=True) if ticket == self.epoch
            ]
        if times:
            self.window.record_successes(times)

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
        if throughput < self._minimum_throughput or failures / throughput < self._failure_ratio:
            return None
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
            "idle": self.state == CLOSED and not throughput and not self.unannounced,
        }

    def _retry_after(self, now: float) -> float | None:
        """Seconds until a call may pass: 0 where one may now, `None` while isolated."""
        if self.state == ISOLATED:
            return None
        if self.state == OPEN and self.blocked_until is not None:
            return until(self.blocked_until, now)
        if self.state == HALF_OPEN and self._probe is not None:
            return until(self._probe.lapses_at, now)
        return 0.0

    def release(self, ticket: Ticket) -> None:
        """Give a probe's place back without a verdict: the next call is the probe."""
        if self._probe is ticket:
            self._probe = None

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
        self._probe = None
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
        return self.state == HALF_OPEN and self._probe is probe

    def _counts(self, epoch: int) -> bool:
        # Results that come in while half-open decide nothing, and only a close starts afresh.
        return epoch == self.epoch and self.state != HALF_OPEN

    def _open(self, now: float) -> Opening:
        throughput, failures = self.window.counts(now)
        self._step_to(OPEN)
        self._probe = None
        self._break_duration = self._configured_break
        self.opened_at = now
        self.blocked_until = now + self._configured_break
        rate = failures / throughput if throughput else 0.0
        return Opening(self._steps, rate, failures, self._half_open_attempts)

    def _close(self) -> None:
        self._step_to(CLOSED)
        self.epoch += 1
        self._probe = None
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
