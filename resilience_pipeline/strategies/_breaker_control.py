"""Circuit breakers as seen and driven from outside: what one control does to all of its own.

A control holds no state of a circuit's but one: whether breakers that are built later begin
isolated. Every breaker is acted on, whatever the hooks of those before it raise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from attrs import frozen

from .._locks import Lock
from ._breaker_state import CLOSED, HALF_OPEN, ISOLATED, OPEN, CircuitState

if TYPE_CHECKING:
    from ._circuit_breaker import BoundCircuitBreaker


@frozen(kw_only=True)
class CircuitMetrics:
    """What the circuit breakers of one control have counted.

    Attributes:
        throughput: Calls in the window, of all breakers together.
        failures: Handled ones among them.
        rate: Failures / throughput, 0 where there were no calls.
        opened_at: When the latest break began, by the pipeline's clock in seconds, or `None`.
        blocked_until: When the latest break ends, or `None`.
    """

    throughput: int
    failures: int
    rate: float
    opened_at: float | None
    blocked_until: float | None


_WORST_FIRST: tuple[CircuitState, ...] = (ISOLATED, OPEN, HALF_OPEN, CLOSED)


class CircuitBreakerControl:
    """Reads and drives circuit breakers by hand; one control may drive many.

    Give it to `add_circuit_breaker(control=...)`, before or after using it: what is isolated stays
    so for breakers that are built later. All methods may be called from any thread.
    """

    __slots__ = ("_breakers", "_isolated", "_lock")

    def __init__(self) -> None:
        self._lock = Lock()
        # Weak: a control may outlive the pipelines it drove.
        self._breakers: WeakSet[BoundCircuitBreaker] = WeakSet()
        self._isolated = False

    @property
    def state(self) -> CircuitState:
        """The worst state of the breakers it drives; `"closed"` if there are none."""
        states = {breaker.state for breaker in self._driven()}
        for state in _WORST_FIRST:
            if state in states:
                return state
        return CLOSED

    @property
    def metrics(self) -> CircuitMetrics:
        """What the breakers have counted in their windows, added up."""
        all_metrics = [breaker.metrics() for breaker in self._driven()]
        throughput = sum(metrics.throughput for metrics in all_metrics)
        failures = sum(metrics.failures for metrics in all_metrics)
        return CircuitMetrics(
            throughput=throughput,
            failures=failures,
            rate=failures / throughput if throughput else 0.0,
            opened_at=_latest(metrics.opened_at for metrics in all_metrics),
            blocked_until=_latest(metrics.blocked_until for metrics in all_metrics),
        )

    @property
    def keys(self) -> dict[Hashable, CircuitState]:
        """The state of each key's circuit, the worst where several have one; of breakers with `key=`."""
        states: dict[Hashable, CircuitState] = {}
        for breaker in self._driven():
            if breaker.is_keyed:
                both = states.get(breaker.key, CLOSED), breaker.state
                states[breaker.key] = next(state for state in _WORST_FIRST if state in both)
        return states

    def isolate(self) -> None:
        """Hold every circuit open until `close`; calls raise `IsolatedCircuitError`.

        Plain hooks run at once, coroutine hooks in the next call. What a hook raises comes out
        after all circuits have been isolated.
        """
        with self._lock:
            self._isolated = True
        _on_each(self._driven(), lambda breaker: breaker.isolate())

    def close(self) -> None:
        """Close every circuit and empty its window; hooks run as for `isolate`."""
        with self._lock:
            self._isolated = False
        _on_each(self._driven(), lambda breaker: breaker.close())

    def __repr__(self) -> str:
        """Show the state and how many breakers there are."""
        return f"<CircuitBreakerControl {self.state}, {len(self._driven())} breakers>"

    def _driven(self) -> list[BoundCircuitBreaker]:
        with self._lock:
            return list(self._breakers)

    def _prepare(self, breaker: BoundCircuitBreaker) -> None:
        """Isolate the circuit of a new key before its first call; nobody has opened it, or is told."""
        if self._isolated:
            breaker.isolate_quietly()

    def _attach(self, breaker: BoundCircuitBreaker) -> None:
        with self._lock:
            self._breakers.add(breaker)
            isolated = self._isolated
        if not isolated:
            if breaker.state == ISOLATED:  # prepared, and the others closed since
                breaker.close()
            return
        breaker.isolate()
        with self._lock:
            closed_meanwhile = not self._isolated
        if closed_meanwhile:
            breaker.close()


def _latest(times: Any) -> float | None:
    return max((time for time in times if time is not None), default=None)


def _on_each(
    breakers: list[BoundCircuitBreaker], act: Callable[[BoundCircuitBreaker], None]
) -> None:
    """Act on every breaker; the first error comes out when all are done."""
    first: Exception | None = None
    for breaker in breakers:
        try:
            act(breaker)
        except Exception as error:  # noqa: BLE001 - raised below
            first = first or error
    try:
        if first is not None:
            raise first
    finally:
        del first
