"""One execution's way through a retry: whether there is another attempt, and after what wait.

What is decided about a failure is decided here, in two ways that give the same answers: at once,
where nobody has to be asked or told, and with everybody asked. Nothing in here runs an attempt.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .._context import ResilienceContext
from .._errors import ExecutionRejectedError, MisuseError
from .._event import Event
from .._options import generated_seconds
from .._outcome import Attempt, Failure, Rejected, Success
from .._predicates import DEFAULT, demanded_wait, says_nothing
from .._switches import switches
from ..telemetry import Severity, TelemetryEvent
from ._backoff import Backoff
from ._base import (
    announce,
    call_user,
    chain,
    handles_error,
    handles_result,
    outcome_of,
    refuse_one_shot_arguments,
    tell_of_attempt,
)
from ._retry_budget import RetryBudgetExhaustedEvent, Spending

if TYPE_CHECKING:
    from ._retry import BoundRetry


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


class RetryRun:
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

    def __init__(self, retry: BoundRetry, context: ResilienceContext, attempt: int = 0) -> None:
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

    def begun(self, error: Exception, invocations: int, began: float = 0.0, noted: int = 0) -> Self:
        """Take over the readings of a first attempt that was begun without it, and has failed.

        Those of the clock and the history are for a run whose tries are noted.
        """
        self._started = self.began = began
        self.invocations = invocations
        self._recorded = noted
        self.first_raise = error.__traceback__
        return self

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


def _make_readable(error: Exception | None, demanded: float) -> None:
    """Show a demand that was not waited for as the error's `retry_after`."""
    if error is None or isinstance(error, ExecutionRejectedError):
        return
    # An HTTP client's error may have slots, or a property of this name.
    with suppress(AttributeError, TypeError):
        setattr(error, "retry_after", demanded)  # noqa: B010 - not an attribute of every exception
