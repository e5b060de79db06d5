"""Circuit breaker: stop calling what fails, and find out when it works again.

The states themselves are in `_breaker_state`; here is who may pass and what counts. Each step
decides under the lock and tells afterwards, see `_breaker_hooks`: a hook finds a finished
transition, may raise, or may use the breaker itself.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Iterator
from typing import Any

from attrs import field, frozen

from .._context import ResilienceContext
from .._durations import Duration
from .._errors import BrokenCircuitError, IsolatedCircuitError, MisuseError
from .._event import Event
from .._locks import Lock
from .._options import (
    checked,
    count,
    function,
    generated_seconds,
    instance,
    or_none,
    positive_duration,
    ratio,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from .._outcome import Failure, Rejected, Success
from .._predicates import (
    DEFAULT,
    Predicate,
    is_refusal,
    to_predicate,
    to_predicate_or_none,
)
from ._base import (
    Handler,
    Site,
    Strategy,
    call_user,
    chain,
    handles_error,
    handles_result,
    outcome_of,
)
from ._breaker_control import CircuitBreakerControl, CircuitMetrics
from ._breaker_hooks import (
    Announcer,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
)
from ._breaker_state import (
    CLOSED,
    OPEN,
    BreakerState,
    CircuitState,
    Opening,
    Probe,
    Refusal,
    Ticket,
    until,
)
from ._keyed import keyed
from ._slow_calls import SlowCalls


class BreakDurationEvent(Event):
    """What a circuit breaker's `break_duration_generator` is given.

    Attributes:
        context: The context of the execution that opened the circuit.
        failure_rate: Failures / throughput in the window, from 0 to 1.
        failure_count: Failures in the window.
        half_open_attempts: How often the circuit was half-open since it was closed last.
    """

    context: ResilienceContext
    failure_rate: float
    failure_count: int
    half_open_attempts: int


@checked
@frozen(repr=False)
class CircuitBreaker(Strategy[BrokenCircuitError]):
    """Refuse calls for a while once too many of them have failed.

    Closed, it counts outcomes in a rolling window of ten slices. A handled outcome opens it when
    the window then holds at least `minimum_throughput` calls of which at least `failure_ratio`
    failed. Open, calls raise `BrokenCircuitError`. The first call after the break is a trial: if it
    is good the circuit closes, if it is handled another break begins. A trial that is cancelled
    decides nothing and gives its place back; one that hangs loses its place after one more break.

    Outcomes that are not handled count as good, as in Polly; with the default `should_handle`,
    refusals of limiters and other breakers inside count as nothing, and so does what `ignore` says.
    A timeout *outside* the breaker reaches it as a cancellation, which is no evidence: put a
    timeout inside to have calls that hang counted, or use `slow_call_duration`.

    Args:
        failure_ratio: Share of failures that opens the circuit, 0 to 1.
        minimum_throughput: Calls in the window before the share counts, at least 2.
        sampling_duration: Length of the window in seconds (any duration form), above zero.
        break_duration: Length of a break in seconds (any duration form), above zero.
        break_duration_generator: Function of a `BreakDurationEvent` giving the length of this break
            in any duration form, in place of `break_duration`; `None` means that one.
        should_handle: Which outcomes are failures. The default handles every exception but HTTP
            client errors other than 408 and 429.
        on_opened: Hook called with a `CircuitOpenedEvent` after the circuit has opened.
        on_closed: Hook called with a `CircuitClosedEvent` after it has closed.
        on_half_opened: Hook called with a `CircuitHalfOpenedEvent` before the trial call.
        control: Reads the breaker's state and drives it by hand.
        ignore: Which outcomes count as nothing, neither good nor failed; the same forms as
            `should_handle`, asked first. A trial call that ends in one decides nothing.
        half_open_probes: Trial calls of a half-open period, at least 1: all have to be good for the
            circuit to close, one failure begins another break.
        consecutive_failures: Failures in a row, at least 1, that open the circuit whatever their
            share and however long ago the first of them was; `None` for no such rule.
        slow_call_duration: Seconds (any duration form) past which a call is slow, whatever comes of
            it. It counts as soon as it has passed them, noticed by the next call that begins or
            ends; a trial call that is slow has failed. Given together with `slow_call_ratio`.
        slow_call_ratio: Share of slow calls, 0 to 1, with which a slow call opens the circuit once
            the window holds `minimum_throughput` calls: the one way in which a success can.
        key: Function of the context that gives a key (a host, a model): each has a circuit of its
            own, all of which `control` acts on. `None`: all calls share one.
        max_keys: Keys that are kept, at least 1; keys with calls inside, or with a circuit that is
            not closed or has counted something, may be more.
        key_idle: Seconds (any duration form) after which a key that nobody used is let go.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    failure_ratio: float = field(default=0.1, kw_only=True, metadata=ratio())
    minimum_throughput: int = field(default=100, kw_only=True, metadata=count(minimum=2))
    sampling_duration: float = field(
        default=30.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    break_duration: float = field(
        default=5.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    break_duration_generator: (
        Callable[[BreakDurationEvent], Duration | Awaitable[Duration | None] | None] | None
    ) = field(default=None, kw_only=True, metadata=function())
    should_handle: Predicate = field(default=DEFAULT, kw_only=True, converter=to_predicate)
    on_opened: Callable[[CircuitOpenedEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    on_closed: Callable[[CircuitClosedEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    on_half_opened: Callable[[CircuitHalfOpenedEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    control: CircuitBreakerControl | None = field(
        default=None,
        kw_only=True,
        metadata=instance(CircuitBreakerControl, "a CircuitBreakerControl"),
    )
    ignore: Predicate | None = field(default=None, kw_only=True, converter=to_predicate_or_none)
    half_open_probes: int = field(default=1, kw_only=True, metadata=count(minimum=1))
    consecutive_failures: int | None = field(
        default=None, kw_only=True, metadata=or_none(count(minimum=1))
    )
    slow_call_duration: float | None = field(
        default=None,
        kw_only=True,
        converter=to_seconds_or_none,
        metadata=positive_duration(),
    )
    slow_call_ratio: float | None = field(default=None, kw_only=True, metadata=or_none(ratio()))
    key: Callable[[ResilienceContext], Any] | None = field(
        default=None, kw_only=True, metadata=function("a function of the context")
    )
    max_keys: int = field(default=1024, kw_only=True, metadata=count(minimum=1))
    key_idle: float = field(
        default=600.0, kw_only=True, converter=to_seconds, metadata=positive_duration()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def _problems(self) -> Iterator[str]:
        if (self.slow_call_duration is None) != (self.slow_call_ratio is None):
            yield "slow_call_duration and slow_call_ratio must be given together"

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, with a circuit of its own."""
        control = self.control
        if self.key is None:
            breaker, handler = self._make(next, site)
            if control is not None:
                control._attach(breaker)
            return handler

        def make(key: Hashable) -> tuple[BoundCircuitBreaker, Handler]:
            breaker, handler = self._make(next, site)
            breaker.key = key
            if control is not None:
                control._prepare(breaker)
            return breaker, handler

        kept = None if control is None else control._attach
        return keyed(self, site, make, kept=kept).handle  # type: ignore[no-any-return]

    def _make(self, inside: Handler, site: Site) -> tuple[BoundCircuitBreaker, Handler]:
        breaker = BoundCircuitBreaker(self, inside, site)
        watched = self.slow_call_duration is not None
        return breaker, breaker.handle_watched if watched else breaker.handle


def _may_note(options: CircuitBreaker) -> bool:
    """Whether good results need no look at them, nor at how long they took."""
    ignores_results = options.ignore is not None and options.ignore.sees_results
    return not (options.should_handle.sees_results or ignores_results or options.slow_call_duration)


def _slow_calls(options: CircuitBreaker) -> SlowCalls | None:
    duration, share = options.slow_call_duration, options.slow_call_ratio
    if duration is None or share is None:
        return None
    return SlowCalls(
        duration=duration,
        ratio=share,
        minimum_throughput=options.minimum_throughput,
        sampling_duration=options.sampling_duration,
    )


_new_error = BrokenCircuitError.__new__

#: Good results that may be noted before they are counted.
_MOST_NOTED = 64


class BoundCircuitBreaker:
    __slots__ = (
        "__weakref__",
        "_announcer",
        "_default",
        "_ignore",
        "_lock",
        "_next",
        "_now",
        "_options",
        "_pending",
        "_site",
        "_state",
        "key",
    )

    def __init__(self, options: CircuitBreaker, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        #: Of which it is, where there is a circuit for each key.
        self.key: Hashable = None
        self._now = site.now
        self._lock = Lock()
        self._state = BreakerState(
            failure_ratio=options.failure_ratio,
            minimum_throughput=options.minimum_throughput,
            sampling_duration=options.sampling_duration,
            break_duration=options.break_duration,
            takes_notes=_may_note(options),
            half_open_probes=options.half_open_probes,
            consecutive_failures=options.consecutive_failures,
            slow=_slow_calls(options),
        )
        self._ignore = options.ignore
        self._default = options.should_handle is DEFAULT
        self._announcer = Announcer(options, site, self._lock, self._state)
        # Looked at by every call, and so not through the announcer.
        self._pending = self._announcer.pending

    async def handle(self, context: ResilienceContext) -> Any:
        if self._pending:
            await self._announcer.run_pending()
        state = self._state
        if state.state != CLOSED:
            self._refuse(context)  # here already, for most calls get no further
            return await self.handle_watched(context)
        # Closed, a call passes without the lock: what it reads is one epoch or the next, and its
        # result is judged by the one it read. It holds no place, so a cancellation just passes.
        ticket, good = state.epoch, state.good
        inside = self._next  # called as a method it would cost an eighth of a bare call more
        try:
            result = await inside(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        else:
            if good is None:
                return await self._judged(context, ticket, None, result)
            # Noted in one step, without the lock, which would cost two bare calls; what is noted is
            # counted before anything is decided.
            now = self._now
            good.append(now())
            if len(good) >= _MOST_NOTED:
                with self._lock:
                    state.count_good()
            return result
        try:
            return await self._judged(context, ticket, error, None)
        finally:
            del error

    async def handle_watched(self, context: ResilienceContext) -> Any:
        """Do the same where slow calls count, or the circuit is not closed: by tickets of their own."""
        if self._pending:
            await self._announcer.run_pending()
        self._refuse(context)
        ticket = await self._enter(context)
        try:
            result = await self._next(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        except BaseException:
            with self._lock:
                self._state.interrupt(ticket, self._now())
            raise
        else:
            return await self._judged(context, ticket, None, result)
        try:
            return await self._judged(context, ticket, error, None)
        finally:
            del error

    async def _judged(
        self, context: ResilienceContext, ticket: Ticket, error: Exception | None, result: Any
    ) -> Any:
        """Count what came out, then return or raise it."""
        try:
            try:
                await self._conclude(context, ticket, error, result)
            except BaseException as raised:
                if error is None:
                    await self._site.discard(context, result)
                chain(raised, error)
                raise
            if error is None:
                return result
            raise error
        finally:
            error = None
            self._release(ticket)

    def _release(self, ticket: Ticket) -> None:
        """Give a trial call's place back, if it still has it."""
        if type(ticket) is not int:
            with self._lock:
                self._state.release(ticket)

    def refuse_at_once(self, operation_key: str | None) -> BrokenCircuitError | None:
        """Give the error of a call that comes during the break; without the lock and a coroutine.

        Refusing changes nothing, and what is read was true a moment ago at the latest.
        """
        state = self._state
        blocked_until = state.blocked_until
        if state.state != OPEN or blocked_until is None or self._pending:
            return None
        now = self._now()
        left = blocked_until - now
        if left <= 0:
            return None
        if now + left < blocked_until:  # `until`, whose frame costs more than a bare call
            left = until(blocked_until, now)
        return self._refusal(operation_key, OPEN, left, state.last_handled)

    def _refuse(self, context: ResilienceContext) -> None:
        """Raise if the break is still on."""
        refusal = self.refuse_at_once(context.operation_key)
        if refusal is not None:
            refusal._execution = context.execution
            raise refusal

    async def _enter(self, context: ResilienceContext) -> Ticket:
        """Be admitted, perhaps as the trial call, or raise."""
        with self._lock:
            self._state.count_good()
            now = self._now()
            opening = self._state.pass_slow(now)
            was_open = self._state.state == OPEN
            ticket = self._state.admit(now)
            step = self._state.unannounced
        if opening is not None:
            # Calls that still run have been found slow; that is told before this one is refused.
            await self._opened(context, opening, None)
        if isinstance(ticket, Refusal):
            refusal = self._refusal(
                context.operation_key, ticket.state, ticket.retry_after, ticket.cause
            )
            refusal._execution = context.execution
            raise refusal
        if not was_open or not isinstance(ticket, Probe):
            return ticket
        try:
            await self._announcer.announce(
                step, "on_half_opened", CircuitHalfOpenedEvent, context=context
            )
        except BaseException:
            with self._lock:
                self._state.release(ticket)
            raise
        return ticket

    def _refusal(
        self,
        operation_key: str | None,
        state: CircuitState,
        retry_after: float | None,
        cause: Exception | None,
    ) -> BrokenCircuitError:
        # Made anew for each call: one error raised many times would let its traceback grow.
        site = self._site
        kind: type[BrokenCircuitError] = BrokenCircuitError
        if retry_after is None:
            kind = IsolatedCircuitError
            message = f"{site.origin}: the circuit is isolated by hand"
        else:
            what = "open" if state == OPEN else "half-open, a trial call is running"
            message = (
                f"{site.origin}: the circuit is {what}; it makes sense to call again in "
                f"{retry_after:g} s"
            )
        # Without the constructor, whose frame and named arguments cost three bare calls.
        error: BrokenCircuitError = _new_error(kind, message)
        error.pipeline_name = site.pipeline_name
        error.strategy_name = site.strategy_name
        error.operation_key = operation_key
        error.retry_after = retry_after
        error.__cause__ = cause
        return error

    async def _conclude(
        self, context: ResilienceContext, ticket: Ticket, error: Exception | None, result: Any
    ) -> None:
        """Count an outcome, and tell whom it concerns if the circuit has changed by it."""
        attempt = context.attempt
        if await self._is_nothing(context, error, result):
            return
        if error is None:
            failed = await handles_result(self._options.should_handle, context, result, attempt)
        else:
            failed = await handles_error(self._options.should_handle, context, error, attempt)
        opening: Opening | None = None
        closed = False
        with self._lock:
            self._state.count_good()
            now = self._now()
            if failed:
                opening = self._state.record_failure(ticket, now, error)
            else:
                closed = self._state.record_success(ticket, now)
            slow = self._state.pass_slow(now, ticket, error if failed else None)
            opening = opening or slow
            step = self._state.unannounced
        if opening is not None:
            await self._opened(context, opening, outcome_of(context, error, result))
        elif closed:
            facts = {"context": context, "outcome": outcome_of(context, error, result)}
            await self._announcer.announce(
                step, "on_closed", CircuitClosedEvent, manual=False, **facts
            )

    async def _is_nothing(
        self, context: ResilienceContext, error: Exception | None, result: Any
    ) -> bool:
        """Whether an outcome says nothing about the service."""
        if error is not None and (
            isinstance(error, MisuseError) or (self._default and is_refusal(error))
        ):
            return True
        if self._ignore is None:
            return False
        if error is None:
            return await handles_result(self._ignore, context, result, context.attempt)
        return await handles_error(self._ignore, context, error, context.attempt)

    async def _opened(
        self,
        context: ResilienceContext,
        opening: Opening,
        outcome: Success[Any] | Rejected[Any] | Failure | None,
    ) -> None:
        """Compute the break, outside the lock (the circuit is open already), and call the hook."""
        try:
            duration = await self._compute_break(context, opening)
        except BaseException:
            self._announcer.announced(opening.number)
            raise
        facts: dict[str, Any] = {"context": context, "break_duration": duration, "manual": False}
        facts["outcome"] = outcome
        await self._announcer.announce(opening.number, "on_opened", CircuitOpenedEvent, **facts)

    async def _compute_break(self, context: ResilienceContext, opening: Opening) -> float:
        generator = self._options.break_duration_generator
        if generator is None:
            return self._options.break_duration
        event = BreakDurationEvent(
            context=context,
            failure_rate=opening.failure_rate,
            failure_count=opening.failure_count,
            half_open_attempts=opening.half_open_attempts,
        )
        answer = await call_user(generator, event, "break_duration_generator")
        generated = generated_seconds("break_duration_generator", answer)
        if generated is None:
            return self._options.break_duration
        duration = max(generated, 0.0)
        with self._lock:
            self._state.set_break(opening, duration)
        return duration

    def is_idle(self, now: float) -> bool:
        """Whether the circuit is closed and has nothing counted."""
        with self._lock:
            self._state.count_good()
            return self._state.is_idle(now) and not self._pending

    # ---- by hand ------------------------------------------------------------------------------

    @property
    def state(self) -> CircuitState:
        return self._state.state

    @property
    def is_keyed(self) -> bool:
        return self._options.key is not None

    def isolate_quietly(self) -> None:
        with self._lock:
            self._state.isolate()
            self._state.announced(self._state.unannounced)

    def metrics(self) -> CircuitMetrics:
        with self._lock:
            self._state.count_good()
            throughput, failures = self._state.window.counts(self._now())
            return CircuitMetrics(
                throughput=throughput,
                failures=failures,
                rate=failures / throughput if throughput else 0.0,
                opened_at=self._state.opened_at,
                blocked_until=self._state.blocked_until,
            )

    def health(self) -> dict[str, Any]:
        with self._lock:
            self._state.count_good()
            report = self._state.health(self._now())
            return report | {"idle": report["idle"] and not self._pending}

    def isolate(self) -> None:
        with self._lock:
            self._state.count_good()
            changed = self._state.isolate()
            step = self._state.unannounced
        if changed:
            self._announcer.tell(step, "on_opened", CircuitOpenedEvent, break_duration=math.inf)

    def close(self) -> None:
        with self._lock:
            self._state.count_good()
            changed = self._state.close()
            step = self._state.unannounced
        if changed:
            self._announcer.tell(step, "on_closed", CircuitClosedEvent)
