"""Whom a circuit breaker tells of its transitions, and in which order.

Hooks are called in the order of the steps, also where calls of several threads cause them: the
state takes no step by itself before the hook of the last one was called. No thread waits for
another one's hook.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .._context import ResilienceContext, refuse_awaitable
from .._locks import Lock
from .._outcome import Failure, Rejected, Success
from ..telemetry import Severity, StrategyEvent, TelemetryEvent
from ._base import Site, run_hook
from ._breaker_state import BreakerState

if TYPE_CHECKING:
    from ._circuit_breaker import CircuitBreaker


class CircuitOpenedEvent(TelemetryEvent):
    """What `on_opened` is given.

    Attributes:
        context: The context of the execution that opened the circuit; `None` if done by hand.
        outcome: What opened it; `None` if done by hand, or by calls that run for too long.
        break_duration: Seconds until a trial call may pass; `math.inf` if done by hand.
        manual: Whether it was done by hand.
    """

    name = "OnCircuitOpened"
    severity: Severity = Severity.ERROR
    context: ResilienceContext | None
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: None = None
    break_duration: float
    manual: bool


class CircuitClosedEvent(TelemetryEvent):
    """What `on_closed` is given.

    Attributes:
        context: The context of the execution that closed the circuit; `None` if done by hand.
        outcome: What closed it; `None` if done by hand.
        manual: Whether it was done by hand.
    """

    name = "OnCircuitClosed"
    context: ResilienceContext | None
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: None = None
    manual: bool


class CircuitHalfOpenedEvent(StrategyEvent):
    """What `on_half_opened` is given.

    Attributes:
        context: The context of the trial call.
    """

    name = "OnCircuitHalfOpened"
    severity: Severity = Severity.WARNING
    context: ResilienceContext


class Announcer:
    """Tells of the steps of one circuit, each of which has been taken by then.

    Args:
        options: Those of the breaker, with its hooks.
        site: Where it sits.
        lock: Guards the state.
        state: Is told of each hook that was called.

    Attributes:
        pending: Coroutine hooks of transitions by hand, waiting for a call that can await them.
    """

    __slots__ = ("_lock", "_options", "_site", "_state", "pending")

    def __init__(
        self, options: CircuitBreaker, site: Site, lock: Lock, state: BreakerState
    ) -> None:
        self._options = options
        self._site = site
        self._lock = lock
        self._state = state
        self.pending: deque[Callable[[], Awaitable[object]]] = deque()

    async def announce(self, step: int, name: str, kind: type[Any], **facts: Any) -> None:
        """Tell of a step; once the hook was called the next step may follow, and it is awaited."""
        hook = getattr(self._options, name)
        await run_hook(partial(self._called, step, hook, kind), facts, name)

    def _called(self, step: int, hook: Any, kind: type[TelemetryEvent], facts: Any) -> object:
        try:
            if hook is None and not self._site.wants(kind):
                return None
            event = kind(**facts)
            self._site.report(event)
            return None if hook is None else hook(event)
        finally:
            self.announced(step)

    def announced(self, step: int) -> None:
        with self._lock:
            self._state.announced(step)

    def tell(self, step: int, name: str, kind: type[TelemetryEvent], **facts: Any) -> None:
        """Tell of a step by hand: run a plain hook now; leave a coroutine hook to the next call."""
        hook: Any = getattr(self._options, name)
        facts |= {"context": None, "outcome": None, "manual": True}
        if hook is not None and inspect.iscoroutinefunction(hook):

            def leave(event: TelemetryEvent) -> None:  # which listeners have got already
                self.pending.append(partial(hook, event))

            self._called(step, leave, kind, facts)
            return
        answer = self._called(step, hook, kind, facts)
        if inspect.isawaitable(answer):
            self.pending.append(lambda: answer)

    async def run_pending(self) -> None:
        while self.pending:
            try:
                hook = self.pending.popleft()
            except IndexError:  # another thread was quicker
                return
            answer = hook()
            refuse_awaitable(answer, "a hook of a transition by hand")
            await answer
