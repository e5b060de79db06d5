"""Retry: try again what failed, after a while.

The bound handler is stateless: attempt number, jitter and history live in the execution, so any
number of calls can go through one retry at once.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Literal, Never

from attrs import field, frozen

from .._context import ResilienceContext
from .._durations import Duration
from .._errors import ExecutionRejectedError, MisuseError
from .._event import Event
from .._options import (
    boolean,
    checked,
    choice,
    count,
    function,
    generated_seconds,
    instance,
    rule,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from .._outcome import Attempt, Failure, Rejected, Success
from .._predicates import DEFAULT, Predicate, demanded_wait, is_plain, says_nothing, to_predicate
from .._switches import switches
from ..telemetry import Severity, TelemetryEvent
from ._backoff import Backoff, BackoffType
from ._base import (
    Handler,
    Site,
    Strategy,
    announce,
    call_user,
    chain,
    handles_error,
    handles_result,
    origin,
    outcome_of,
    refuse_one_shot_arguments,
    tell_of_attempt,
)
from ._retry_budget import RetryBudget, RetryBudgetExhaustedEvent, Spending


class RetryDelayEvent(Event):
    """What a retry's `delay_generator` is given.

    Attributes:
        context: The execution's context.
        outcome: What the attempt that failed came to.
        attempt: Number of that attempt, from 0.
    """

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    attempt: int


class RetryEvent(TelemetryEvent):
    """What a retry's `on_retry` is given.

    Attributes:
        context: The execution's context.
        outcome: What the attempt that failed came to.
        attempt: Number of that attempt, from 0.
        delay: Seconds that will be waited before the next one.
        duration: Seconds that the attempt ran; not a number if nobody listened when it began.
    """

    name = "OnRetry"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    attempt: int
    delay: float
    duration: float


class RetryResumeEvent(Event):
    """What a function given as a retry's `resumable` is given.

    Attributes:
        context: The execution's context.
        delivered: Number of chunks that the consumer has got, at least 1.
        last_chunk: The last of them.
        outcome: What the stream failed with.
    """

    context: ResilienceContext
    delivered: int
    last_chunk: Any
    outcome: Success[Any] | Rejected[Any] | Failure


def _is_resumable(value: object) -> str | None:
    good = isinstance(value, bool) or callable(value)
    return None if good else "True, False, or a function that gives a factory"


@checked
@frozen(repr=False)
class Retry(Strategy[Never]):
    """Run the inside again while its outcome is handled.

    The last outcome comes out as it is. Before each further attempt there is a wait, and a
    checkpoint where that is 0.

    Args:
        max_retry_attempts: Attempts beside the first one, at least 1; `math.inf` retries until it
            succeeds or is cancelled.
        delay: Base delay in seconds (any duration form), at least 0.
        backoff_type: How the delay grows with the number `a` of the failed attempt, from 0:
            `"constant"` waits `delay`, `"linear"` `(a + 1) * delay`, `"exponential"` `2**a *
            delay`.
        use_jitter: `True` spreads constant and linear delays by a quarter either way and draws
            exponential ones with decorrelated jitter (version 2, as Polly does). `"full"` draws
            between 0 and the computed, capped delay: what to use where many clients reach the cap.
        max_delay: Longest computed delay, jitter included; `None` for no limit.
        should_handle: Which outcomes are tried again. The default handles every exception but HTTP
            client errors other than 408 and 429.
        delay_generator: Function of a `RetryDelayEvent` giving the wait in any duration form;
            `None` or a negative one means the computed delay. Not capped by `max_delay`, and wins
            over a `Retry-After`.
        on_retry: Hook called with a `RetryEvent` before each wait.
        respect_retry_after: Whether a rejection's `retry_after` or an HTTP `Retry-After` header is
            waited in full when it is longer than the computed delay, whatever `max_delay` says.
        max_retry_after: A longer demand is not waited for: the outcome comes out at once, and so
            does the demand, as the error's `retry_after`.
        max_elapsed: No retry starts later than this after the first attempt began; `None` for no
            limit.
        budget: A `RetryBudget` that may refuse a further attempt: then the outcome comes out as it
            is. One budget may serve many retries and hedgings.
        resumable: For streams: what to do when one fails after its first chunk. `False` lets the
            error out. `True` runs it again and skips what was delivered, by position and checked
            against a digest of that; a run that differs or ends short of it raises `ResumeError`. A
            function of a `RetryResumeEvent` gives a factory without arguments that goes on where
            the last one failed. Attempts and delays are counted over the whole stream.
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
    budget: RetryBudget | None = field(
        default=None, kw_only=True, metadata=instance(RetryBudget, "a RetryBudget")
    )
    resumable: bool | Callable[[RetryResumeEvent], Any] = field(
        default=False, kw_only=True, metadata=rule(_is_resumable)
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        bound = _BoundRetry(self, next, site)
        handle = bound.handle if self.resumable is False else bound.handle_resumable
        return handle if bound._purse is None else bound._purse.counting(handle)


class _BoundRetry:
    __slots__ = ("_next", "_options", "_plain", "_purse", "_site", "_timed", "_unnoted")

    def __init__(self, options: Retry, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        # Reading the clock costs half a call, so it is read only for those who ask.
        self._timed = (
            options.on_retry is not None or options.max_elapsed is not None or bool(site.listeners)
        )
        self._purse = None if options.budget is None else options.budget._purse(site)
        # Nobody to be asked or told: what most calls of most pipelines find.
        self._plain = not (
            self._timed or options.delay_generator or options.should_handle.sees_results
        )
        # Attempts that a plain run may make beside the first without computing or asking anything.
        at_once = self._plain and options.delay == 0 and options.should_handle is DEFAULT
        at_once = at_once and self._purse is None
        self._unnoted = options.max_retry_attempts if at_once else 0

    async def handle_resumable(self, context: ResilienceContext) -> Any:
        """Do the same for a call; a stream goes on where it fails later."""
        stream = context._stream
        if stream is None:
            return await self.handle(context)
        run = _Run(self, context)
        result = await self.attempts(context, run)
        return stream.resumable(result, _Resumption(self, run, context))

    async def handle(self, context: ResilienceContext) -> Any:
        if not self._plain or switches.on or context._history is not None:
            return await self.attempts(context, _Run(self, context))
        # A plain run that succeeds at once needs no notes, and making them would double its cost.
        invocations = context._invocations
        context.attempt = 0
        inside = self._next  # called as a method it would cost an eighth of a bare call more
        try:
            return await inside(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        attempt = 0
        try:
            told = switches.is_logged(RetryEvent, RetryEvent.severity)
            if self._unnoted and not told and _may_just_repeat(context):
                # Nor does one whose failures say nothing and are tried again at once: a third less.
                # Known types are looked up here: a frame for each failure would cost four per cent.
                checkpoint = context._find_runtime().checkpoints()
                while (is_plain(type(error)) and not error.__dict__) or says_nothing(error):
                    if switches.on:  # somebody has begun to listen
                        break
                    await checkpoint()
                    attempt += 1
                    context.attempt = attempt
                    try:
                        return await inside(context)
                    except Exception as caught:  # noqa: BLE001 - judged, then raised again
                        error = caught
                    raised_in: Any = error.__traceback__
                    if raised_in.tb_next is not None and raised_in.tb_next.tb_next is not None:
                        _keep_last_raise(error)
                    del raised_in  # it leads to this frame
                    if attempt >= self._unnoted:
                        raise error
            run = _Run(self, context, attempt)
            run.invocations = invocations
            run.first_raise = error.__traceback__
            try:
                return await self.attempts(context, run, error)
            finally:
                run.first_raise = None
        except BaseException as raised:
            chain(raised, error)
            raise
        finally:
            del error

    async def attempts(
        self, context: ResilienceContext, run: _Run, error: Exception | None = None
    ) -> Any:
        """Make attempts, the first of which may have failed with `error` already."""
        result: Any = None
        inside = self._next
        is_due = error is None
        try:
            while True:
                if is_due:
                    run.begin_attempt()
                    try:
                        result = await inside(context)
                    except Exception as caught:  # noqa: BLE001 - judged, then raised again
                        _keep_last_raise(caught, run.first_raise)
                        error, result = caught, None
                    except BaseException:
                        run.tell_of_cancelled()
                        raise
                    else:
                        if run.is_plain:
                            return result
                        error = None
                goes_on = run.goes_on_at_once(error) if run.is_plain else None
                if goes_on is None:
                    goes_on = await run.goes_on(error, result)
                if not goes_on:
                    break
                # A checkpoint also where there is nothing to wait.
                await run.pause(error)
                is_due = True
            if error is None:
                return result
            raise error
        except BaseException as raised:
            # A cancellation, or what user code raised, keeps the last failure as its context.
            chain(raised, error)
            raise
        finally:
            # A frame that kept the error would close a circle through its traceback.
            error = None
            if run.spending is not None:
                run.spending.close()


class _Run:
    """One execution's way through a retry; where nobody watches, made after its first failure.

    Attributes:
        is_plain: Whether nobody has to be asked or told of the attempt, a history included.
        began: When the attempt began, for those who ask.
        delay: Seconds to wait before the next attempt.
        delivered: Of a stream that is being resumed, how many chunks the consumer has got;
            `last_chunk` is the last of them.
        first_raise: The traceback of an error that was caught before the run began.
        invocations: How often the callback had been invoked when the attempt began.
        spending: What is spent of the budget, if there is one.
    """

    __slots__ = (
        "_attempt",
        "_backoff",
        "_context",
        "_is_watched",
        "_may_be_plain",
        "_options",
        "_recorded",
        "_site",
        "_started",
        "_timed",
        "began",
        "delay",
        "delivered",
        "first_raise",
        "invocations",
        "is_plain",
        "last_chunk",
        "spending",
    )

    def __init__(self, retry: _BoundRetry, context: ResilienceContext, attempt: int = 0) -> None:
        self._options = retry._options
        self._site = retry._site
        self._context = context
        self._backoff: Backoff | None = None
        self._attempt = attempt
        self._may_be_plain = retry._plain and context._history is None
        self._is_watched = False
        self.is_plain = self._may_be_plain
        self.delay = 0.0
        self.invocations = 0
        self.delivered = 0
        self.first_raise: TracebackType | None = None
        self.last_chunk: Any = None
        # Readings of the clock and the history, for those who ask.
        self._timed = retry._timed or context._history is not None
        self._started = self.began = self._site.now() if self._timed else 0.0
        self._recorded = 0
        purse = retry._purse
        self.spending: Spending | None = None if purse is None else purse.spending()

    def begin_attempt(self) -> None:
        """Take the readings that those after the attempt are compared with."""
        context = self._context
        context.attempt = self._attempt
        self.invocations = context._invocations
        watched = switches.on or bool(self._site.listeners)
        if watched is not self._is_watched:
            self._watch(watched)
        if self._timed and (self._attempt or watched):
            self.began = self._site.now()
        if context._history is not None:
            self._recorded = context._history.count

    def _watch(self, watched: bool) -> None:
        """Take note of whether anybody wants to know of the next attempt."""
        self._is_watched = watched
        self.is_plain = self._may_be_plain and not watched
        self._timed = self._timed or watched

    def move_to(self, context: ResilienceContext) -> None:
        """Go on in another context of the same execution."""
        self._context = context

    def pause(self, error: Exception | None) -> Awaitable[None]:
        """Wait until the next attempt is due, and prepare it."""
        resumable = self._options.resumable
        if self.delivered and not isinstance(resumable, bool):
            return self._pause_and_find_factory(resumable, error)
        return self._context.runtime.sleep(self.delay)

    async def _pause_and_find_factory(
        self, resumable: Callable[[RetryResumeEvent], Any], error: Exception | None
    ) -> None:
        """Have the next attempt run what goes on where the last one failed."""
        context = self._context
        await context.runtime.sleep(self.delay)
        event = RetryResumeEvent(
            context=context,
            delivered=self.delivered,
            last_chunk=self.last_chunk,
            outcome=outcome_of(context, error, None),
        )
        factory = await call_user(resumable, event, "resumable")
        if not callable(factory):
            msg = (
                f"resumable must give a function without arguments that makes the rest of the "
                f"stream, got {factory!r}"
            )
            raise MisuseError(msg)
        context._fn, context._args = factory, ()

    def goes_on_at_once(self, error: Exception | None) -> bool | None:
        """Decide about a plain run's failure; `None` if a predicate has to be awaited for it.

        A coroutine for each question would double what a failure costs.
        """
        if error is None or isinstance(error, MisuseError):
            return False
        options = self._options
        mute = says_nothing(error)
        handled = (
            True
            if mute and options.should_handle is DEFAULT
            else options.should_handle.matches_error(error)
        )
        if handled is None:
            return None
        if not handled or not self._may_repeat():
            return False
        delay = self._computed_delay() if options.delay else 0.0
        if not mute:
            demanded = self._demanded(error, None, delay)
            if demanded is None:
                return False
            delay = demanded
        if self.spending is not None and not self._may_spend(self.spending, error, None):
            return False
        self._refuse_one_shot_arguments(error)
        # Who began to listen a moment ago, or the log; as `Site.wants`, for two thirds of the cost.
        if switches.on or switches.is_logged(RetryEvent, RetryEvent.severity):
            self._site.report(self._event(error, None, delay, math.nan))
        self.delay = delay
        self._attempt += 1
        return True

    async def goes_on(self, error: Exception | None, result: Any) -> bool:
        """Decide whether there is another attempt, and prepare it."""
        try:
            delay = await self._decide(error, result)
        except BaseException as raised:
            if error is None:
                await self._site.discard(self._context, result)
            chain(raised, error)
            raise
        if delay is None:
            return False
        if error is None:
            await self._site.discard(self._context, result)
        self.delay = delay
        self._attempt += 1
        return True

    async def _decide(self, error: Exception | None, result: Any) -> float | None:
        """Give the seconds to wait before the next attempt; `None` if there is none."""
        options, context = self._options, self._context
        duration = self._site.now() - self.began if self._timed else 0.0
        self._record(error, result, duration)
        if error is None:
            handled = await handles_result(options.should_handle, context, result, self._attempt)
        else:
            handled = await handles_error(options.should_handle, context, error, self._attempt)
        is_repeated = handled and self._may_repeat()
        if self._is_watched:
            bad = Severity.WARNING if is_repeated else Severity.ERROR
            tell_of_attempt(
                self._site,
                context,
                outcome_of(context, error, result),
                number=self._attempt,
                duration=duration,
                severity=bad if handled else Severity.INFO,
            )
        if not is_repeated:
            return None
        delay = await self._next_delay(error, result)
        if delay is None or self._too_late(delay):
            return None
        if self.spending is not None and not self._may_spend(self.spending, error, result):
            return None
        self._refuse_one_shot_arguments(error)
        if options.on_retry is not None or self._site.wants(RetryEvent):
            event = self._event(error, result, delay, duration if self._timed else math.nan)
            await announce(self._site, event, options.on_retry, "on_retry", error)
            # The hook may have taken its time.
            if self._too_late(delay):
                return None
        return delay

    def _event(self, error: Any, result: Any, delay: float, duration: float) -> RetryEvent:
        return RetryEvent(
            context=self._context,
            outcome=outcome_of(self._context, error, result),
            attempt=self._attempt,
            delay=delay,
            duration=duration,
        )

    def tell_of_cancelled(self) -> None:
        """Tell listeners of an attempt that was cancelled or interrupted."""
        if self._is_watched:
            ran = self._site.now() - self.began
            tell_of_attempt(self._site, self._context, None, number=self._attempt, duration=ran)

    def _record(self, error: Exception | None, result: Any, duration: float) -> None:
        """Note the try in the history, unless a retry further in has noted its own."""
        history = self._context._history
        if history is None or history.count != self._recorded:
            return
        history.add(
            Attempt(
                number=self._attempt,
                outcome=outcome_of(self._context, error, result),
                duration=duration,
                delay=self.delay,
            )
        )

    def _was_invoked(self) -> bool:
        """Whether the attempt got as far as the callback."""
        return self._context._invocations != self.invocations

    def _may_repeat(self) -> bool:
        """Whether there is an attempt left and the callback may be called again."""
        if self._attempt >= self._options.max_retry_attempts:
            return False
        return self._context.idempotent or not self._was_invoked()

    def _may_spend(self, spending: Spending, error: Exception | None, result: Any) -> bool:
        """Whether the budget has another attempt, which is charged at once."""
        context = self._context
        spending.ended(context)
        if spending.spend(context):
            return True
        if self._site.wants(RetryBudgetExhaustedEvent):
            outcome = outcome_of(context, error, result)
            self._site.report(
                RetryBudgetExhaustedEvent(context=context, outcome=outcome, attempt=self._attempt)
            )
        return False

    async def _next_delay(self, error: Exception | None, result: Any) -> float | None:
        """Seconds to wait; `None` if the other side demands more than is granted."""
        computed = self._computed_delay()
        if self._options.delay_generator is not None:
            generated = await self._generated_delay(self._options.delay_generator, error, result)
            if generated is not None and generated >= 0:
                return generated
        return self._demanded(error, result, computed)

    def _computed_delay(self) -> float:
        options = self._options
        if options.delay == 0:
            return 0.0
        if self._backoff is None:
            self._backoff = Backoff(
                options.delay,
                options.backoff_type,
                options.use_jitter,
                options.max_delay,
                self._site.random,
            )
        return self._backoff.delay_for(self._attempt)

    def _demanded(self, error: Exception | None, result: Any, computed: float) -> float | None:
        """Lengthen the computed delay to what the other side demands; `None` if that is too much."""
        options = self._options
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
            attempt=self._attempt,
        )
        return generated_seconds(
            "delay_generator", await call_user(generator, event, "delay_generator")
        )

    def _too_late(self, delay: float) -> bool:
        limit = self._options.max_elapsed
        if limit is None:
            return False
        return self._site.now() + delay - self._started > limit

    def _refuse_one_shot_arguments(self, error: Exception | None) -> None:
        """Refuse to run the callback again on an argument that the first run has used up."""
        context = self._context
        if self.delivered and not isinstance(self._options.resumable, bool):
            return  # something else will be run
        if (context._args or isinstance(context._fn, partial)) and self._was_invoked():
            refuse_one_shot_arguments(context, error)


class _Resumption:
    """What a resumable retry does about a stream that has failed after its first chunk.

    The same run goes on, with its attempts and its delays, in a fork of the execution's context:
    that itself has ended with the stream's commit.
    """

    __slots__ = ("_retry", "_run", "context", "origin", "skips")

    def __init__(self, retry: _BoundRetry, run: _Run, context: ResilienceContext) -> None:
        self._retry = retry
        self._run = run
        self.context = context.fork(context.properties)
        self.skips = retry._options.resumable is True
        self.origin = origin(retry._site.pipeline_name, retry._site.strategy_name)
        run.move_to(self.context)

    async def resume(self, error: Exception, delivered: int, last_chunk: Any) -> Any:
        """Wait and run the inside again; raises `error` when that is not to be done."""
        run = self._run
        run.delivered, run.last_chunk = delivered, last_chunk
        try:
            if not await run.goes_on(error, None):
                raise error
            await run.pause(error)
            return await self._retry.attempts(self.context, run)
        except BaseException as raised:
            chain(raised, error)
            raise
        finally:
            del error
            if run.spending is not None:  # cancelled in the wait
                run.spending.close()


def _may_just_repeat(context: ResilienceContext) -> bool:
    """Whether the callback may be run again whatever has been done, and with no used-up argument."""
    return context.idempotent and not context._args and not isinstance(context._fn, partial)


def _keep_last_raise(error: Exception, first: TracebackType | None = None) -> None:
    """Take from a traceback what was there already when the same error left an earlier attempt.

    A callback that raises stored exceptions again and again lets their tracebacks grow; what comes
    out in the end shall carry the last raise only. An earlier one begins where a frame is met again
    that catches errors: the one that has just caught this one, or that of the `first` attempt.
    """
    entry = error.__traceback__
    if entry is None:
        return
    frame, first_frame = entry.tb_frame, None if first is None else first.tb_frame
    while (further := entry.tb_next) is not None:
        if further.tb_frame is frame or further.tb_frame is first_frame:
            entry.tb_next = None
            return
        entry = further


def _make_readable(error: Exception | None, demanded: float) -> None:
    """Show a demand that was not waited for as the error's `retry_after`."""
    if error is None or isinstance(error, ExecutionRejectedError):
        return
    # An HTTP client's error may have slots, or a property of this name.
    with suppress(AttributeError, TypeError):
        setattr(error, "retry_after", demanded)  # noqa: B010 - not an attribute of every exception
