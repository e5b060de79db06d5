"""Hedging: start another attempt beside a slow one, and take what comes out first.

The rules are here, the attempts' tasks in `_race`. The caller's task runs no attempt: it decides
when to start one, looks at those that came in, and sees to it that none is left.

Cancellations that were thought through:

1. The caller is cancelled while it waits, in a predicate or in a hook: all attempts are cancelled
   and awaited, out of reach of further cancellations, then the first one comes out.
2. It is cancelled while the losers are awaited: the winner's result is closed as well.
3. A winner and the caller's cancellation come in the same turn: the runtime's waiter lets the
   cancellation win.
4. A loser that ignores its cancellation is waited for; what it brings is closed and never looked
   at, unless it is an interrupt, which comes out in place of the winner.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Never

from attrs import field, frozen

from .._context import History, ResilienceContext
from .._durations import Duration
from .._errors import MisuseError
from .._event import Event
from .._options import (
    checked,
    count,
    function,
    generated_seconds,
    instance,
    rule,
    text_or_none,
    to_name,
    to_signed_seconds,
)
from .._outcome import Attempt, Failure, Rejected, Success
from .._predicates import DEFAULT, Predicate, to_predicate
from ..telemetry import Severity, StrategyEvent
from ._base import (
    Handler,
    Site,
    Strategy,
    announce,
    call_user,
    chain,
    handles_error,
    handles_result,
    outcome_of,
    refuse_one_shot_arguments,
    tell_of_attempt,
)
from ._percentile_delay import LatencyWindow, PercentileDelay
from ._race import Entrant, Race
from ._retry_budget import Purse, RetryBudget, RetryBudgetExhaustedEvent, Spending


class HedgingDelayEvent(Event):
    """What a hedging strategy's `delay_generator` is given.

    Attributes:
        context: The caller's context.
        attempt: Number of attempts launched so far: 1 when the first hedge is to be decided about.
    """

    context: ResilienceContext
    attempt: int


class HedgingActionEvent(Event):
    """What a hedging strategy's `action_generator` is given.

    Attributes:
        context: The context that the attempt will have, a copy of the caller's.
        primary_context: The caller's context.
        attempt: Number of the attempt: 1 for the first hedge.
        callback: What the first attempt called, to be called without arguments; for a stream, its
            factory.
    """

    context: ResilienceContext
    primary_context: ResilienceContext
    attempt: int
    callback: Callable[[], Any]


class HedgingEvent(StrategyEvent):
    """What a hedging strategy's `on_hedging` is given.

    Attributes:
        context: The caller's context.
        attempt_context: The context that the attempt will have.
        attempt: Number of the hedge, from 0.
    """

    name = "OnHedging"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    attempt_context: ResilienceContext
    attempt: int


def _is_delay_generator(value: object) -> str | None:
    good = value is None or callable(value) or isinstance(value, PercentileDelay)
    return None if good else "a function or a coroutine function, a PercentileDelay, or None"


@checked
@frozen(repr=False)
class Hedging(Strategy[Never]):
    """Start further attempts beside a slow or failed one; the first outcome that is not handled wins.

    Every attempt, the first included, runs in a task of its own with a copy of the caller's context;
    the winner's properties are merged back. Losers are cancelled and awaited before the outcome
    comes out (in threads, which can't be stopped, they are left alone), and their results closed. If every outcome is handled, the first attempt's comes out.
    Use it where calls may run twice and stop when they are cancelled.

    Args:
        max_hedged_attempts: Attempts beside the first one, from 1 to 10.
        delay: Seconds (any duration form) after a launch until the next, which also starts at once
            when an attempt came out handled. Zero launches all at once; below zero, such as -1, one
            at a time, the next only after a handled outcome.
        delay_generator: Function of a `HedgingDelayEvent` giving the delay in any duration form, by
            the same rules; `None` means `delay`. Or a `PercentileDelay`, which learns from recent
            latencies.
        should_handle: Which outcomes do not win. The default handles every exception but HTTP
            client errors other than 408 and 429.
        action_generator: Function of a `HedgingActionEvent` giving what the hedge runs in place of
            the callback: an async function without arguments, a factory for streams; `None` for no
            hedge now, then it is not asked again until an attempt has come out. What it raises
            becomes the attempt's outcome. Default: the callback once more.
        on_hedging: Hook called with a `HedgingEvent` before each launch. What it raises ends the
            call.
        budget: A `RetryBudget` that may refuse a launch, and does nothing else: what runs goes on.
            One budget may serve many retries and hedgings.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    makes_attempts = True
    runs_in_tasks = True

    max_hedged_attempts: int = field(default=1, kw_only=True, metadata=count(minimum=1, maximum=10))
    delay: float = field(default=2.0, kw_only=True, converter=to_signed_seconds)
    delay_generator: (
        Callable[[HedgingDelayEvent], Duration | Awaitable[Duration | None] | None]
        | PercentileDelay
        | None
    ) = field(default=None, kw_only=True, metadata=rule(_is_delay_generator))
    should_handle: Predicate = field(default=DEFAULT, kw_only=True, converter=to_predicate)
    action_generator: Callable[[HedgingActionEvent], Any] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    on_hedging: Callable[[HedgingEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    budget: RetryBudget | None = field(
        default=None, kw_only=True, metadata=instance(RetryBudget, "a RetryBudget")
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline, which has seen no latency yet."""
        bound = _BoundHedging(self, next, site)
        return bound.handle if bound._purse is None else bound._purse.counting(bound.handle)


class _BoundHedging:
    __slots__ = ("_latencies", "_next", "_options", "_purse", "_site")

    def __init__(self, options: Hedging, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._latencies: LatencyWindow | None = None
        if isinstance(options.delay_generator, PercentileDelay):
            self._latencies = options.delay_generator.start()
        self._purse: Purse | None = None
        if options.budget is not None:
            self._purse = options.budget._purse(site)

    async def handle(self, context: ResilienceContext) -> Any:
        run = _Run(self._options, self._site, self._latencies, context, self._next)
        if self._purse is not None:
            run.spending = self._purse.spending()
        try:
            winner = await run.decide()
            await run.close_all_but(winner)
            run.accept(winner)
            if winner.error is None:
                return winner.result
            raise winner.error
        except GeneratorExit:  # nothing may be awaited any more
            run.abandon()
            raise
        except BaseException:
            await run.close_all_but(None)
            raise
        finally:
            run.end()
            # A frame that kept an error would close a circle through its traceback.
            winner = None  # type: ignore[assignment]


class _Run:
    """One execution's race: when to launch, whom to take."""

    __slots__ = (
        "_context",
        "_copied",
        "_declined",
        "_delay",
        "_due",
        "_latencies",
        "_options",
        "_race",
        "_site",
        "_written",
        "spending",
    )

    def __init__(
        self,
        options: Hedging,
        site: Site,
        latencies: LatencyWindow | None,
        context: ResilienceContext,
        next: Handler,  # noqa: A002
    ) -> None:
        self._options = options
        self._site = site
        self._latencies = latencies
        self._context = context
        self._race = Race(context.runtime, next, site)
        #: Handled outcomes for each of which the next attempt is to be launched at once.
        self._due = 0
        #: Whether the action generator gave nothing or the budget refused, and no attempt has come
        #: out since.
        self._declined = False
        #: The delay until the next launch, once it is known.
        self._delay: float | None = None
        #: What the properties of each attempt launched were when its context was made, and of the
        #: one that is being prepared.
        self._written: list[dict[Any, Any]] = []
        self._copied: dict[Any, Any] = {}
        #: What is spent of the budget, if there is one.
        self.spending: Spending | None = None

    # ---- deciding

    async def decide(self) -> Entrant:
        """Launch attempts until one of them wins, or all have come out handled."""
        self._launch(self._attempt_context())
        while True:
            winner = await self._judge()
            if winner is not None:
                return winner
            if not self._may_hedge():
                if not self._race.is_running:
                    return self._race.entrants[0]
                await self._race.wait()
            elif self._due or await self._is_time():
                # Making it may have taken its time, in which somebody may have won.
                context = await self._prepare()
                winner = await self._judge()
                if winner is not None:
                    return winner
                if context is not None:
                    self._launch(context)

    async def _judge(self) -> Entrant | None:
        """Look at those that have come in, by number; give the winner."""
        predicate = self._options.should_handle
        while (entrant := self._race.unjudged()) is not None:
            entrant.judged = True
            context, number = entrant.context, entrant.number
            if self.spending is not None:
                self.spending.ended(context)
            if not isinstance(entrant.error, Exception | None):
                return entrant  # an interrupt: nothing else counts any more
            if context._history is not None:
                entrant.outcome = outcome_of(context, entrant.error, entrant.result)
            if entrant.error is None:
                handled = await handles_result(predicate, context, entrant.result, number)
            else:
                handled = await handles_error(predicate, context, entrant.error, number)
            entrant.handled = handled
            if self._site.is_watched:
                self._tell_of(entrant, outcome_of(context, entrant.error, entrant.result))
            if not handled:
                return entrant
            self._due += 1
            self._declined = False
        return None

    def _may_hedge(self) -> bool:
        entrants = self._race.entrants
        if len(entrants) > self._options.max_hedged_attempts or self._declined:
            return False
        if self._context.idempotent:
            return True
        # Two that wait in a queue, say, could both get to the callback.
        return not self._race.is_running and not any(map(_was_invoked, entrants))

    async def _is_time(self) -> bool:
        """Wait for the time of the next launch; whether it has come before an attempt came in."""
        if self._delay is None:
            self._delay = await self._next_delay()
        race, delay = self._race, self._delay
        if race.unjudged() is not None:
            return False
        if delay < 0:
            await race.wait()
            return False
        if delay == 0:
            return not await self._completes_at_once()
        remaining = race.entrants[-1].began + delay - self._context.runtime.now()
        return remaining <= 0 or not await race.wait(remaining)

    async def _completes_at_once(self) -> bool:
        """Whether an attempt comes in without ever waiting: then it needs no hedge."""
        # A stream's attempt has its source's owner take a step, and then another one of its own.
        for _ in range(1 if self._context._stream is None else 3):
            await self._context.runtime.first_steps()
            if self._race.unjudged() is not None:
                return True
        return False

    async def _next_delay(self) -> float:
        if self._latencies is not None:
            return self._latencies.delay()
        generator: Any = self._options.delay_generator
        if generator is None:
            return self._options.delay
        event = HedgingDelayEvent(context=self._context, attempt=len(self._race.entrants))
        generated = generated_seconds(
            "delay_generator", await call_user(generator, event, "delay_generator")
        )
        return self._options.delay if generated is None else generated

    # ---- launching

    async def _prepare(self) -> ResilienceContext | None:
        """Make the context of the next attempt, and tell of it; `None` if there is none to launch."""
        self._due = max(0, self._due - 1)
        context = self._attempt_context()
        if self.spending is not None and not self.spending.spend(context):
            self._declined = True
            if self._site.wants(RetryBudgetExhaustedEvent):
                last = len(self._race.entrants) - 1
                self._site.report(
                    RetryBudgetExhaustedEvent(context=self._context, outcome=None, attempt=last)
                )
            return None
        if self._options.action_generator is None:
            self._refuse_one_shot_arguments()
        elif not await self._set_action(context, self._options.action_generator):
            if self.spending is not None:
                self.spending.ended(context)
            return None
        on_hedging = self._options.on_hedging
        if on_hedging is not None or self._site.wants(HedgingEvent):
            event = HedgingEvent(
                context=self._context, attempt_context=context, attempt=context.attempt - 1
            )
            await announce(self._site, event, on_hedging, "on_hedging", self._failure())
        return context

    def _attempt_context(self) -> ResilienceContext:
        context = self._context.fork()
        context.attempt = len(self._race.entrants)
        context._invocations = 0
        self._copied = dict(context.written)
        if self._context._history is not None:
            context._history = History()
        return context

    async def _set_action(
        self, context: ResilienceContext, generator: Callable[[HedgingActionEvent], Any]
    ) -> bool:
        """Have the attempt run what the generator gives; false if that is nothing, or an error."""
        fn, args = self._context._fn, self._context._args
        assert fn is not None
        event = HedgingActionEvent(
            context=context,
            primary_context=self._context,
            attempt=context.attempt,
            callback=partial(fn, *args) if args else fn,
        )
        try:
            action = await call_user(generator, event, "action_generator")
            if action is not None and not callable(action):
                msg = (
                    f"action_generator must give an async function without arguments, or None, "
                    f"got {action!r}: give the function itself, not what it returns"
                )
                raise MisuseError(msg)
        except Exception as error:  # noqa: BLE001 - it is the attempt's outcome
            chain(error, self._failure())
            self._enter()
            self._race.fail(context, error)
            return False
        if action is None:
            self._declined = True
            return False
        context._fn, context._args = action, ()
        return True

    def _launch(self, context: ResilienceContext) -> None:
        self._enter()
        self._race.launch(context)

    def _enter(self) -> None:
        self._written.append(self._copied)
        self._delay = None

    def _failure(self) -> BaseException | None:
        """Give the error of the latest attempt that came out handled, to which a hedge answers."""
        return next((each.error for each in reversed(self._race.entrants) if each.handled), None)

    def _refuse_one_shot_arguments(self) -> None:
        """Refuse a second attempt on an argument that the first one uses up, or may yet."""
        entrants = self._race.entrants
        if self._race.is_running or any(map(_was_invoked, entrants)):
            error = entrants[-1].error
            refuse_one_shot_arguments(
                self._context, error if isinstance(error, Exception) else None
            )

    # ---- the end

    async def close_all_but(self, kept: Entrant | None) -> None:
        """Cancel and await the losers, and close what they have brought."""
        try:
            await self._race.call_off()
            for entrant in self._race.entrants:
                if entrant is not kept and entrant.result is not None:
                    result, entrant.result = entrant.result, None
                    # Attempts may all give one and the same thing.
                    if kept is None or result is not kept.result:
                        await self._site.discard(entrant.context, result)
        except GeneratorExit:
            raise
        except BaseException:  # the caller has gone: nothing is kept
            await self.close_all_but(None)
            raise
        self._race.raise_interrupt()

    def accept(self, winner: Entrant) -> None:
        """Take over what the winner has written, and learn how long the first attempt took."""
        before = self._written[winner.number]
        for key, value in winner.context.written.items():
            if key not in before or before[key] is not value:
                self._context.properties.set(key, value)
        first = self._race.entrants[0]
        if self._latencies is not None and not first.handled:
            # Without the cleanup of one that was beaten.
            self._latencies.note(min(first.ended, winner.ended) - first.began)

    def abandon(self) -> None:
        """Let go of everybody where nothing can be awaited any more."""
        self._race.abandon()

    def end(self) -> None:
        """Add up what the attempts did, and let go of what they came to."""
        context = self._context
        try:
            if self._site.is_watched:
                self._tell_of_cancelled()
        finally:
            self._add_up(context)

    def _add_up(self, context: ResilienceContext) -> None:
        if self.spending is not None:
            self.spending.close()
        around = context._sync
        for entrant in self._race.entrants:
            self._record(entrant)
            if around is None:
                context._invocations += entrant.context._invocations
                entrant.context.end()
            else:  # where they have been counted at once, and losers may be on their way still
                around.when_gone(entrant.context.end)
            entrant.result = entrant.error = entrant.outcome = None

    def _tell_of_cancelled(self) -> None:
        """Tell listeners of the losers; of all attempts, when the caller has gone."""
        for entrant in self._race.entrants:
            if entrant.was_told:
                continue
            # Not of one whose predicate has raised, of which nobody knows how to take it.
            if not entrant.judged or not isinstance(entrant.error, Exception | None):
                self._tell_of(entrant, None)

    def _tell_of(
        self, entrant: Entrant, outcome: Success[Any] | Rejected[Any] | Failure | None
    ) -> None:
        """Tell listeners of an attempt that has ended."""
        entrant.was_told = True
        tell_of_attempt(
            self._site,
            entrant.context,
            outcome,
            number=entrant.number,
            duration=entrant.ended - entrant.began,
            severity=Severity.WARNING if entrant.handled else Severity.INFO,
        )

    def _record(self, entrant: Entrant) -> None:
        """Note an attempt in the history, or the tries that a strategy inside has noted of it."""
        history, inner = self._context._history, entrant.context._history
        if history is None or inner is None:
            return
        hedged = entrant.number > 0
        if inner.count:
            history.extend(inner, hedged=hedged)
            return
        attempt = Attempt(
            number=entrant.number,
            outcome=entrant.outcome,
            duration=entrant.ended - entrant.began,
            delay=entrant.delay,
            hedged=hedged,
        )
        history.add(attempt)


def _was_invoked(entrant: Entrant) -> bool:
    return entrant.context._invocations > 0
