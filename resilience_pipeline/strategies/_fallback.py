"""Fallback: give something else in place of what failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Never

from attrs import field, frozen

from .._context import ResilienceContext
from .._options import UNSET, checked, function, text_or_none, to_name
from .._outcome import Failure, Rejected, Success
from .._predicates import DEFAULT, Predicate, to_predicate
from ..telemetry import Severity, TelemetryEvent
from ._base import (
    Handler,
    Shortcut,
    Site,
    Strategy,
    announce,
    call_user,
    chain,
    handles_error,
    handles_result,
    outcome_of,
)


class FallbackEvent(TelemetryEvent):
    """What a fallback's `fallback_action` and `on_fallback` are given.

    Attributes:
        context: The execution's context.
        outcome: What is being replaced.
    """

    name = "OnFallback"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    duration: None = None


@checked
@frozen(repr=False)
class Fallback(Strategy[Never]):
    """Replace a handled outcome.

    Exactly one of `fallback_action` and `fallback_value` is given. In a stream a value becomes one
    chunk; an async iterable or a context manager around one is iterated and closed, and guarded up
    to its first chunk like any source.

    Args:
        fallback_action: Function of a `FallbackEvent` giving the substitute, or an awaitable of it.
            What it raises becomes the outcome, with the original failure as its `__context__`.
        fallback_value: A constant substitute; may be `None`.
        should_handle: Which outcomes are replaced. The default handles every exception but HTTP
            client errors other than 408 and 429.
        on_fallback: Hook called with the same event before the action.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values, or not exactly one substitute is given.
    """

    fallback_action: Callable[[FallbackEvent], Any] | None = field(
        default=None, metadata=function("a function of the fallback event")
    )
    fallback_value: Any = field(default=UNSET, kw_only=True)
    should_handle: Predicate = field(default=DEFAULT, kw_only=True, converter=to_predicate)
    on_fallback: Callable[[FallbackEvent], object | Awaitable[object]] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def _problems(self) -> Iterator[str]:
        if (self.fallback_action is None) == (self.fallback_value is UNSET):
            given = "neither" if self.fallback_action is None else "both"
            yield f"exactly one of fallback_action and fallback_value must be given, got {given}"

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundFallback(self, next, site).handle


class _BoundFallback:
    __slots__ = ("_next", "_options", "_sees_results", "_site")

    def __init__(self, options: Fallback, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._sees_results = options.should_handle.sees_results
        self._next = next
        self._site = site

    @property
    def _shortcut(self) -> Shortcut | None:
        """How to go without it until a call fails, where it is asked about no result."""
        return None if self._sees_results else (self._next, self.rescue)

    async def handle(self, context: ResilienceContext) -> Any:
        try:
            result = await self._next(context)
        except Exception as caught:  # noqa: BLE001 - judged, then raised again
            error = caught
        else:
            if self._sees_results and await self._is_handled(context, None, result):
                return await self._replace(context, None, result)
            return result
        try:
            return await self.rescue(context, error)
        finally:
            del error

    async def rescue(self, context: ResilienceContext, error: Exception) -> Any:
        """See to a failure: give what takes its place, or raise it."""
        try:
            if await self._is_handled(context, error, None):
                return await self._replace(context, error, None)
            raise error
        finally:
            del error

    async def _is_handled(
        self, context: ResilienceContext, error: Exception | None, result: Any
    ) -> bool:
        predicate, attempt = self._options.should_handle, context.attempt
        if error is not None:
            return await handles_error(predicate, context, error, attempt)
        try:
            return await handles_result(predicate, context, result, attempt)
        except BaseException:
            await self._site.discard(context, result)
            raise

    async def _replace(
        self, context: ResilienceContext, error: Exception | None, result: Any
    ) -> Any:
        substitute: Any = UNSET
        try:
            try:
                substitute = await self._substitute(context, error, result)
            finally:
                # What is replaced stays open until the action has looked at it, and no longer.
                if error is None and substitute is not result:
                    await self._site.discard(context, result)
            if context._stream is None or substitute is result:
                return substitute
            return await context._stream.adopt(context, substitute)
        except BaseException as raised:
            chain(raised, error)
            raise

    async def _substitute(
        self, context: ResilienceContext, error: Exception | None, result: Any
    ) -> Any:
        options, site = self._options, self._site
        is_told = options.on_fallback is not None or site.wants(FallbackEvent)
        if options.fallback_action is None and not is_told:
            return options.fallback_value
        event = FallbackEvent(context=context, outcome=outcome_of(context, error, result))
        await announce(site, event, options.on_fallback, "on_fallback", error)
        if options.fallback_action is None:
            return options.fallback_value
        return await call_user(options.fallback_action, event, "fallback_action")
