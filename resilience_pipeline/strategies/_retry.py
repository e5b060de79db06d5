"""Retry: try again what failed, after a while.

The bound handler is stateless: attempt number, jitter and history live in the execution, so any number of calls can go
through one retry at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Literal, NamedTuple, Never

from attrs import field, frozen

from .._context import ResilienceContext
from .._durations import Duration
from .._errors import ExecutionRejectedError, MisuseError
from .._options import (
    boolean,
    checked,
    choice,
    count,
    function,
    generated_seconds,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from .._outcome import Attempt, Failure, Rejected, Success
from .._predicates import DEFAULT, Predicate, demanded_wait, to_predicate
from ._backoff import Backoff, BackoffType
from ._base import (
    Handler,
    Site,
    Strategy,
    call_user,
    chain,
    cut_traceback,
    handles_error,
    handles_result,
    outcome_of,
    run_hook,
)


@frozen(kw_only=True)
class RetryDelayEvent:
    """What a retry's `delay_generator` is given.

    Attributes:
        context: The execution's context.
        outcome: What the attempt that failed came to.
        attempt: Number of that attempt, from 0.
    """

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    attempt: int


@frozen(kw_only=True)
class RetryEvent:
    """What a retry's `on_retry` is given.

    Attributes:
        context: The execution's context.
        outcome: What the attempt that failed came to.
        attempt: Number of that attempt, from 0.
        delay: Seconds that will be waited before the next one.
        duration: Seconds that the attempt ran.
    """

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    attempt: int
    delay: float
    duration: float


@checked
@frozen(repr=False)
class Retry(Strategy[Never]):
    """Run the inside again while its outcome is handled.

    The last outcome comes out as it is. Before each further attempt there is a wait, and a checkpoint where that is 0.

    Args:
        max_retry_attempts: Attempts beside the first one, at least 1; `math.inf` retries until it succeeds
            or is cancelled.
        delay: Base delay in seconds (any duration form), at least 0.
        backoff_type: How the delay grows with the number `a` of the failed attempt, from 0: `"constant"` waits
            `delay`, `"linear"` `(a + 1) * delay`, `"exponential"` `2**a * delay`.
        use_jitter: `True` spreads constant and linear delays by a quarter either way and draws exponential ones
            with decorrelated jitter (version 2, as Polly does). `"full"` draws between 0 and the
            computed, capped delay: what to use where many clients reach the cap.
        max_delay: Longest computed delay, jitter included; `None` for no limit.
        should_handle: Which outcomes are tried again. The default handles every exception but HTTP client errors
            other than 408 and 429.
        delay_generator: Function of a `RetryDelayEvent` giving the wait in any duration form; `None` or a negative
            one means the computed delay. Not capped by `max_delay`, and wins over a `Retry-After`.
        on_retry: Hook called with a `RetryEvent` before each wait.
        respect_retry_after: Whether a rejection's `retry_after` or an HTTP `Retry-After` header is waited in full
            when it is longer than the computed delay, whatever `max_delay` says.
        max_retry_after: A longer demand is not waited for: the outcome comes out at once, and so does the demand,
            as the error's `retry_after`.
        max_elapsed: No retry starts later than this after the first attempt began; `None` for no limit.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    makes_attempts = True

    max_retry_attempts: float = field(
        default=3, kw_only=True, metadata=count(minimum=1, infinite=True)
    )
    delay: float = field(default=2.0, kw_only=True, converter=to_seconds)
    backoff_type: BackoffType = field(
        default="constant", kw_only=True, metadata=choice("constant", "linear", "exponential")
    )
    use_jitter: bool | Literal["full"] = field(
        default=False, kw_only=True, metadata=choice(True, False, "full")
    )
    max_delay: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    should_handle: Predicate = field(default=DEFAULT, kw_only=True, converter=to_predicate)
    delay_generator: (
        Callable[[RetryDelayEvent], Duration | Awaitable[Duration | None] | None] | None
    ) = field(default=None, kw_only=True, metadata=function())
    on_retry: Callable[[RetryEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    respect_retry_after: bool = field(default=True, kw_only=True, metadata=boolean())
    max_retry_after: float = field(default=60.0, kw_only=True, converter=to_seconds)
    max_elapsed: float | None = field(default=None, kw_only=True, converter=to_seconds_or_none)
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundRetry(self, next, site).handle


class _BoundRetry:
    __slots__ = ("_next", "_options", "_predicate", "_sees_results", "_site", "_timed")

    def __init__(self, options: Retry, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._predicate = options.should_handle
        self._sees_results = self._predicate.sees_results
        # Reading the clock costs as much as a call, so it is read only for those who ask.
        self._timed = options.on_retry is not None or options.max_elapsed is not None

    async def handle(self, context: ResilienceContext) -> Any:
        run: _Run | None = None
        error: Exception | None = None
        stale: object = None
        history = context._history
        timed = self._timed or history is not None
        quick = not self._sees_results and history is None
        try:
            while True:
                context.attempt = 0 if run is None else run.attempt
                before = _Before(
                    context._invocations,
                    self._site.now() if timed else 0.0,
                    0 if history is None else history.count,
                )
                result = None
                try:
                    result = await self._next(context)
                except Exception as caught:  # noqa: BLE001 - judged, then raised again
                    if caught is error:
                        cut_traceback(caught, stale)
                    error = caught
                except BaseException as cancelled:
                    chain(cancelled, error)
                    raise
                else:
                    if quick:
                        return result
                    error = None
                if run is None:
                    run = _Run(self._options, self._site, context, before)
                if not await run.goes_on(error, result, before):
                    break
                stale = None if error is None else error.__traceback__
                await run.wait(error)
            if error is None:
                return result
            raise error
        finally:
            # A frame that kept the error would close a circle through its traceback.
            error = stale = None


class _Run:
    """One execution's way through a retry, from the first outcome on."""

    __slots__ = ("_backoff", "_context", "_delay", "_options", "_site", "_started", "attempt")

    def __init__(
        self, options: Retry, site: Site, context: ResilienceContext, first: _Before
    ) -> None:
        self._options = options
        self._site = site
        self._context = context
        self._started = first.time
        self._backoff: Backoff | None = None
        self._delay = 0.0
        self.attempt = 0

    async def goes_on(self, error: Exception | None, result: Any, before: _Before) -> bool:
        """Decide whether there is another attempt, and prepare it."""
        try:
            delay = await self._decide(error, result, before)
        except BaseException as raised:
            if error is None:
                await self._site.discard(self._context, result)
            chain(raised, error)
            raise
        if delay is None:
            return False
        if error is None:
            await self._site.discard(self._context, result)
        self._delay = delay
        self.attempt += 1
        return True

    async def wait(self, error: Exception | None) -> None:
        """Wait before the next attempt; a checkpoint also where there is nothing to wait."""
        try:
            await self._context.runtime.sleep(self._delay)
        except BaseException as cancelled:
            chain(cancelled, error)
            raise

    async def _decide(self, error: Exception | None, result: Any, before: _Before) -> float | None:
        """Give the seconds to wait before the next attempt; `None` if there is none."""
        options, context = self._options, self._context
        now = self._site.now() if before.time or context._history is not None else 0.0
        self._record(error, result, before, now)
        if error is None:
            handled = await handles_result(options.should_handle, context, result, self.attempt)
        else:
            handled = await handles_error(options.should_handle, context, error, self.attempt)
        invoked = context._invocations != before.invocations
        if not handled or self.attempt >= options.max_retry_attempts:
            return None
        if invoked and not context.idempotent:
            return None
        delay = await self._next_delay(error, result)
        if delay is None or self._too_late(delay):
            return None
        if invoked:
            _refuse_one_shot_arguments(context, error)
        if options.on_retry is not None:
            event = RetryEvent(
                context=context,
                outcome=outcome_of(context, error, result),
                attempt=self.attempt,
                delay=delay,
                duration=now - before.time,
            )
            await run_hook(options.on_retry, event, error)
        return delay

    def _record(self, error: Exception | None, result: Any, before: _Before, now: float) -> None:
        """Note the try in the history, unless a retry further in has noted its own."""
        history = self._context._history
        if history is None or history.count != before.recorded:
            return
        history.add(
            Attempt(
                number=self.attempt,
                outcome=outcome_of(self._context, error, result),
                duration=now - before.time,
                delay=self._delay,
            )
        )

    async def _next_delay(self, error: Exception | None, result: Any) -> float | None:
        """Seconds to wait; `None` if the other side demands more than is granted."""
        options = self._options
        if options.delay == 0:
            computed = 0.0
        else:
            if self._backoff is None:
                self._backoff = Backoff(
                    options.delay,
                    options.backoff_type,
                    options.use_jitter,
                    options.max_delay,
                    self._site.random,
                )
            computed = self._backoff.delay_for(self.attempt)
        if options.delay_generator is not None:
            generated = await self._generated_delay(options.delay_generator, error, result)
            if generated is not None and generated >= 0:
                return generated
        if not options.respect_retry_after:
            return computed
        demanded = demanded_wait(result if error is None else error)
        if demanded is None or demanded <= computed:
            return computed
        if demanded <= options.max_retry_after:
            return demanded
        _make_readable(error, demanded)
        return None

    async def _generated_delay(
        self, generator: Callable[[RetryDelayEvent], Any], error: Exception | None, result: Any
    ) -> float | None:
        event = RetryDelayEvent(
            context=self._context,
            outcome=outcome_of(self._context, error, result),
            attempt=self.attempt,
        )
        return generated_seconds("delay_generator", await call_user(generator, event))

    def _too_late(self, delay: float) -> bool:
        limit = self._options.max_elapsed
        if limit is None:
            return False
        return self._site.now() + delay - self._started > limit


class _Before(NamedTuple):
    """Readings from before an attempt, to compare with those after it."""

    invocations: int
    time: float
    recorded: int


def _make_readable(error: Exception | None, demanded: float) -> None:
    """Show a demand that was not waited for as the error's `retry_after`."""
    if error is None or isinstance(error, ExecutionRejectedError):
        return
    # An HTTP client's error may have slots, or a property of this name.
    with suppress(AttributeError, TypeError):
        setattr(error, "retry_after", demanded)  # noqa: B010 - not an attribute of every exception


def _refuse_one_shot_arguments(context: ResilienceContext, error: Exception | None) -> None:
    """Refuse to run the callback again on an argument that the first run has used up."""
    fn: Any = context._fn
    arguments: list[object] = list(context._args)
    while isinstance(fn, partial):
        arguments += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    for argument in arguments:
        if isinstance(argument, _ONE_SHOT):
            msg = (
                f"a second attempt would run on an exhausted argument, {argument!r}: pass a list or "
                f"a function that makes it, or use idempotent=False"
            )
            raise MisuseError(msg) from error


_ONE_SHOT = (GeneratorType, AsyncGeneratorType, CoroutineType)
