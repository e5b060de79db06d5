"""What every strategy builds on: `Strategy`, `Handler` and `Site`.

A strategy is an immutable description. `bind(next, site)` turns it, once per `build()`, into a
handler: a function of the context that returns an awaitable of the result, and that may call the
next handler inwards never, once or many times. State belongs to the bound handler. Errors travel as
exceptions.

Strategies import no asyncio, trio, threading, time or random: they wait, race and read the clock
through `context.runtime`, and draw random numbers from their site.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from attrs import has
from typing_extensions import TypeVar as DefaultTypeVar

from .._context import ResilienceContext, refuse, refuse_awaitable
from .._errors import ExecutionRejectedError, MisuseError
from .._options import shown
from .._outcome import Failure, Rejected, Success
from .._predicates import OutcomeEvent, Predicate, settled
from .._switches import switches
from ..telemetry import AttemptCompleted, CloseErrorEvent, Listener, Severity, TelemetryEvent
from ..telemetry._listeners import deliver

E_co = DefaultTypeVar("E_co", bound=Exception, covariant=True, default=Exception)
X = TypeVar("X", bound=ExecutionRejectedError)
V = TypeVar("V")

#: One layer of a pipeline, bound to the layers inside it. `Any` is the result: one pipeline serves
#: callables of every type.
Handler: TypeAlias = Callable[[ResilienceContext], Awaitable[Any]]


class Strategy(ABC, Generic[E_co]):
    """One layer of a pipeline; derive from it to write a strategy of your own.

    Generic in the rejections that it can raise: `Strategy[Never]` where there are none.

    Attributes:
        name: Name for events and errors.
    """

    __slots__ = ()

    name: str

    #: Whether the strategy makes attempts of its own and notes them in the history.
    makes_attempts: ClassVar[bool] = False

    #: Whether it runs its inside in other tasks than the caller's, which the source of a stream
    #: must then outlive.
    runs_in_tasks: ClassVar[bool] = False

    def __repr__(self) -> str:
        """Show the options that differ from their defaults, as in a call."""
        options = shown(self) if has(type(self)) else "…"
        return f"{type(self).__name__}({options})"

    @abstractmethod
    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002 - the field's word for it
        """Make the handler of one pipeline, with fresh state.

        Args:
            next: The handler of what is inside.
            site: Where in which pipeline the strategy sits.

        Returns:
            A function of the context that returns an awaitable of the result. It lets everything
            that is not an `Exception` pass.
        """


@runtime_checkable
class SupportsHealth(Protocol):
    """What a strategy that keeps state adds to be seen in a registry's `health()`.

    The builder looks for it on what `bind` returns: on the object whose method the handler is, or
    on the handler itself where it is an object that can be called. A strategy without it is taken
    for one that may be forgotten at any time.
    """

    def health(self) -> Mapping[str, Any]:
        """Show the state as plain data: text, numbers, `None`, lists and mappings of them.

        Called from any thread, and never waits. `math.inf` and NaN, which JSON has no word for,
        are left to others.

        Returns:
            Whatever is worth knowing, and under `"idle"` whether fresh state would give the same
            answers from now on. Only a pipeline whose strategies are all idle is let go by a
            registry; without the key a strategy counts as idle.
        """
        ...


class Site:  # no class of attrs', which would take a ms of an import
    """Where a strategy sits, and what it needs from there.

    Attributes:
        pipeline_name: Name of the pipeline the strategy was added to, or `None`.
        instance: The pipeline's instance name, or `None`.
        strategy_name: Name of the strategy.
        position: Its place in its pipeline, 0 for the outermost.
        now: Reads the pipeline's clock: monotonic seconds, comparable across event loops and
            threads.
        random: A function giving a random float in [0, 1).
        close_timeout: Seconds that closing something discarded may take.
        origin: Pipeline and strategy, as messages of errors name them.
        listeners: Who listens to the pipeline, beside those who listen to all.
    """

    __slots__ = (
        "__weakref__",
        "close_timeout",
        "instance",
        "listeners",
        "now",
        "origin",
        "pipeline_name",
        "position",
        "random",
        "strategy_name",
    )

    def __init__(
        self,
        *,
        pipeline_name: str | None,
        instance: str | None,
        strategy_name: str,
        position: int,
        now: Callable[[], float],
        random: Callable[[], float],
        close_timeout: float,
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        self.pipeline_name = pipeline_name
        self.instance = instance
        self.strategy_name = strategy_name
        self.position = position
        self.now = now
        self.random = random
        self.close_timeout = close_timeout
        self.origin = origin(pipeline_name, strategy_name)
        self.listeners = listeners

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<Site of {self.origin}>"

    @property
    def is_watched(self) -> bool:
        """Whether somebody may want to know of every attempt; cheap, and more often true than `wants`."""
        return switches.on or bool(self.listeners)

    def wants(self, kind: type[TelemetryEvent]) -> bool:
        """Whether anybody, the log included, is to be told of such events; if not, make none.

        Args:
            kind: The event's class.
        """
        if self.listeners or switches.listeners:
            return True
        return switches.is_logged(kind, kind.severity)

    def report(self, event: TelemetryEvent) -> None:
        """Tell all listeners of an event, and fill in where it happened; call it under no lock.

        Args:
            event: The event, which nobody else has seen yet. Give it to the hook afterwards, if
                there is one.
        """
        event._place(self.pipeline_name, self.instance, self.strategy_name)
        deliver(event, self.listeners)

    def reject(self, kind: type[X], context: ResilienceContext, reason: str, **fields: Any) -> X:
        """Make this execution's own rejection, to be raised by the caller.

        Args:
            kind: The error class.
            context: The execution's context.
            reason: What happened, with the number that was exceeded.
            fields: Further fields of the error, `retry_after` for example.
        """
        return rejection(kind, context, self.pipeline_name, self.strategy_name, reason, **fields)

    def discarder(self, context: ResilienceContext) -> Callable[[Any], Coroutine[Any, Any, None]]:
        """Give what closes a result that comes when the execution has ended already."""
        stream = context._stream
        if stream is not None:
            return stream.discard
        return partial(self.discard, context.fork())

    async def discard(self, context: ResilienceContext, result: Any) -> None:
        """Close a result that nobody will receive; errors of closing are told to listeners alone."""
        if context._stream is not None:
            await context._stream.discard(result)
        elif _closer(result) is not None:
            error = await close_shielded(context, result, self.close_timeout)
            if error is not None and self.wants(CloseErrorEvent):
                self.report(CloseErrorEvent(context=context, outcome=Failure(error)))
            del error


def rejection(
    kind: type[X],
    context: ResilienceContext,
    pipeline_name: str | None,
    strategy_name: str,
    reason: str,
    **fields: Any,
) -> X:
    """Make an execution's own rejection; see `Site.reject`."""
    error = kind(
        f"{origin(pipeline_name, strategy_name)}: {reason}",
        pipeline_name=pipeline_name,
        strategy_name=strategy_name,
        operation_key=context.operation_key,
        **fields,
    )
    error._execution = context.execution
    return error


def gate_of(handler: Handler) -> Callable[[str | None], Exception | None] | None:
    """Find what tells at once, if anything does, that a handler would refuse a call now.

    `refuse_at_once(operation_key)` of a bound strategy gives the error of a call that comes now, if
    that would be refused whatever it is, without changing anything or asking anybody.
    """
    gate: Callable[[str | None], Exception | None] | None
    gate = getattr(getattr(handler, "__self__", None), "refuse_at_once", None)
    return gate


#: The handler of what is inside, and what is called with the context when that has failed.
Shortcut: TypeAlias = tuple[Handler, Callable[[ResilienceContext, Exception], Awaitable[Any]]]


def shortcut_of(handler: Handler) -> Shortcut | None:
    """Find how to go without a handler until a call fails, if it has nothing to do before that.

    `_shortcut` of a bound strategy says so. Whoever goes this way must be the first to handle the
    execution, with no history and nobody listening, and saves the strategy's frame.
    """
    shortcut: Shortcut | None = getattr(getattr(handler, "__self__", None), "_shortcut", None)
    return shortcut


def origin(pipeline_name: str | None, strategy_name: str) -> str:
    """Say where an error comes from, as the head of its message."""
    pipeline = "" if pipeline_name is None else f"pipeline {pipeline_name!r}, "
    return f"{pipeline}strategy {strategy_name!r}"


async def close_shielded(
    context: ResilienceContext, subject: object, timeout: float
) -> Exception | None:
    """Close something discarded, kept from the caller's cancellation for at most `timeout`.

    Returns:
        What closing raised: the outcome that made us discard it is the news.
    """
    try:
        if context._sync is not None:
            close_here(subject)
        else:
            await context.runtime.shielded(partial(close, subject), timeout)
    except Exception as error:  # noqa: BLE001 - returned
        return error
    return None


async def close(subject: object) -> None:
    """Close anything: by `aclose()`, else by `close()`, awaiting what that returns if need be."""
    closer = _closer(subject)
    if closer is not None:
        closing = closer()
        if inspect.isawaitable(closing):
            await closing


def close_here(subject: object) -> None:
    """Close anything by `close()`, in a synchronous call."""
    closer = _closer(subject, "close")
    if closer is not None:
        closing = closer()
        if inspect.isawaitable(closing):
            refuse(closing, f"close() of {subject!r}")


def _closer(subject: object, *names: str) -> Callable[[], object] | None:
    if isinstance(subject, type):
        return None
    for name in names or ("aclose", "close"):
        closer: Any = getattr(subject, name, None)
        if callable(closer):
            return cast("Callable[[], object]", closer)
    return None


async def call_user(fn: Callable[[Any], V | Awaitable[V]], event: object, name: str) -> V:
    """Call a hook, generator or action of the user's, plain or async, with its event.

    Raises:
        MisuseError: It is async and the call is not; `name` says which it was.
    """
    answer = fn(event)
    if inspect.isawaitable(answer):
        refuse_awaitable(answer, name)
        return await cast("Awaitable[V]", answer)
    return answer


async def run_hook(
    hook: Callable[[Any], object] | None,
    event: object,
    name: str,
    failure: BaseException | None = None,
) -> None:
    """Call a hook, if there is one; what it raises gets the attempt's failure as its context."""
    if hook is None:
        return
    try:
        await call_user(hook, event, name)
    except BaseException as error:
        chain(error, failure)
        raise


async def announce(
    site: Site,
    event: TelemetryEvent,
    hook: Callable[[Any], object] | None,
    name: str,
    failure: BaseException | None = None,
) -> None:
    """Tell of an event: the listeners, then the hook; see `run_hook`."""
    site.report(event)
    await run_hook(hook, event, name, failure)


def tell_of_attempt(
    site: Site,
    context: ResilienceContext,
    outcome: Success[Any] | Rejected[Any] | Failure | None,
    *,
    number: int,
    duration: float,
    severity: Severity = Severity.INFO,
) -> None:
    """Tell listeners of an attempt that has ended; one that is worse than `INFO` was handled."""
    if site.wants(AttemptCompleted):
        event = AttemptCompleted(
            severity=severity,
            context=context,
            outcome=outcome,
            attempt=number,
            duration=duration,
            handled=severity > Severity.INFO,
        )
        site.report(event)


def chain(error: BaseException, failure: BaseException | None) -> None:
    """Keep `failure` as the end of the context chain of `error`, unless it is there already."""
    if failure is None:
        return
    seen = {id(error)}
    last = error
    while last.__context__ is not None and id(last.__context__) not in seen:
        last = last.__context__
        seen.add(id(last))
    if id(failure) not in seen and last.__context__ is None and not _leads_to(failure, seen):
        last.__context__ = failure


def _leads_to(error: BaseException, targets: set[int]) -> bool:
    """Whether a context chain meets one of `targets`: linking it there would close a circle."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        if id(current) in targets:
            return True
        seen.add(id(current))
        current = current.__context__
    return False


async def handles_error(
    predicate: Predicate, context: ResilienceContext, error: Exception, attempt: int
) -> bool:
    """Ask a predicate about an error, behind the gate: a misuse is never handled."""
    if isinstance(error, MisuseError):
        return False
    answer = predicate.matches_error(error)
    if answer is not None:
        return answer
    outcome = context.outcome_of_error(error)
    return await _ask(predicate, OutcomeEvent(context=context, outcome=outcome, attempt=attempt))


async def handles_result(
    predicate: Predicate, context: ResilienceContext, result: Any, attempt: int
) -> bool:
    """Ask a predicate about a result; one that sees no results is not asked."""
    if not predicate.sees_results:
        return False
    outcome = context.outcome_of_result(result)
    return await _ask(predicate, OutcomeEvent(context=context, outcome=outcome, attempt=attempt))


async def _ask(predicate: Predicate, event: OutcomeEvent) -> bool:
    try:
        return await settled(predicate.matches(event))
    except BaseException as error:
        chain(error, event.outcome.error)
        raise


def outcome_of(
    context: ResilienceContext, error: Exception | None, result: Any
) -> Success[Any] | Rejected[Any] | Failure:
    """Show what came out of an attempt to user code."""
    if error is None:
        return context.outcome_of_result(result)
    return context.outcome_of_error(error)


def refuse_one_shot_arguments(context: ResilienceContext, error: Exception | None) -> None:
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
