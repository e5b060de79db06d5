"""Retry: try again what failed, after a while.

The bound handler is stateless: attempt number, jitter and history live in the execution's
`RetryRun`, so any number of calls can go through one retry at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal, Never

from attrs import field, frozen

from .._context import History, ResilienceContext
from .._durations import Duration
from .._options import (
    boolean,
    checked,
    choice,
    count,
    function,
    instance,
    rule,
    text_or_none,
    to_name,
    to_seconds,
    to_seconds_or_none,
)
from .._predicates import DEFAULT, Predicate, is_plain, says_nothing, to_predicate
from .._switches import switches
from ._backoff import BackoffType
from ._base import (
    Handler,
    Shortcut,
    Site,
    Strategy,
    chain,
    origin,
)
from ._retry_budget import RetryBudget
from ._retry_run import RetryDelayEvent, RetryEvent, RetryResumeEvent, RetryRun


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
        bound = BoundRetry(self, next, site)
        handle = bound.handle if self.resumable is False else bound.handle_resumable
        return handle if bound._purse is None else bound._purse.counting(handle)


class BoundRetry:
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

    @property
    def _shortcut(self) -> Shortcut | None:
        """How to go without it until a call fails, where nobody is asked, told or charged before."""
        is_bare = self._plain and self._purse is None and self._options.resumable is False
        return (self._next, self.rescue) if is_bare else None

    async def handle_resumable(self, context: ResilienceContext) -> Any:
        """Do the same for a call; a stream goes on where it fails later."""
        stream = context._stream
        if stream is None:
            return await self.handle(context)
        run = RetryRun(self, context)
        result = await self.attempts(context, run)
        return stream.resumable(result, _Resumption(self, run, context))

    async def handle(self, context: ResilienceContext) -> Any:
        if not self._plain or switches.on:
            return await self.attempts(context, RetryRun(self, context))
        if context._history is not None:
            return await self.handle_noted(context, context._history)
        # A plain run that succeeds at once needs no notes, and making them would double its cost.
        invocations = context._invocations
        context.attempt = 0
        inside = self._next  # called as a method it would cost an eighth of a bare call more
        try:
            return await inside(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        try:
            return await self.rescue(context, error, invocations)
        finally:
            del error

    async def rescue(
        self, context: ResilienceContext, error: Exception, invocations: int = 0
    ) -> Any:
        """See to the failure of a plain run's first attempt, before which there were so many invocations."""
        attempt = 0
        inside = self._next
        try:
            told = switches.is_logged(RetryEvent, RetryEvent.severity)
            if self._unnoted and not told and _may_just_repeat(context):
                # Nor does one whose failures say nothing and are tried again at once: a third less.
                # Known types are looked up here: a frame for each failure would cost four per cent.
                checkpoint = context._finder.find().checkpoints()
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
            run = RetryRun(self, context, attempt).begun(error, invocations)
            return await self.attempts(context, run, error)
        except BaseException as raised:
            chain(raised, error)
            raise
        finally:
            del error

    async def handle_noted(self, context: ResilienceContext, history: History) -> Any:
        """Do the same where the tries are noted, of which the first is most often good."""
        began = self._site.now()
        invocations, noted = context._invocations, history.count
        context.attempt = 0
        inside = self._next
        try:
            result = await inside(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        else:
            if history.count == noted:  # or a retry further in has noted its own
                history.add_good(result, self._site.now() - began)
            return result
        try:
            run = RetryRun(self, context).begun(error, invocations, began, noted)
            return await self.attempts(context, run, error)
        finally:
            del error

    async def attempts(
        self, context: ResilienceContext, run: RetryRun, error: Exception | None = None
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
            error = run.first_raise = None
            if run.spending is not None:
                run.spending.close()


class _Resumption:
    """What a resumable retry does about a stream that has failed after its first chunk.

    The same run goes on, with its attempts and its delays, in a fork of the execution's context:
    that itself has ended with the stream's commit.
    """

    __slots__ = ("_retry", "_run", "context", "origin", "skips")

    def __init__(self, retry: BoundRetry, run: RetryRun, context: ResilienceContext) -> None:
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
