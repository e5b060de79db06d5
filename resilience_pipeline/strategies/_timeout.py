"""Timeout: cancel what takes too long.

The limit itself is the runtime's: it tells its own expiry from everybody else's cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Never

from attrs import field, frozen

from .._context import ResilienceContext, enter
from .._durations import Duration
from .._errors import DeadlineReached, TimeoutRejectedError
from .._event import Event
from .._options import (
    checked,
    function,
    generated_seconds,
    positive_duration,
    text_or_none,
    to_name,
    to_seconds,
)
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site, Strategy, announce, call_user


class TimeoutGeneratorEvent(Event):
    """What a timeout's `timeout_generator` is given.

    Attributes:
        context: The execution's context.
    """

    context: ResilienceContext


class TimeoutEvent(StrategyEvent):
    """What a timeout's `on_timeout` is given.

    Attributes:
        context: The execution's context.
        timeout: The limit that passed, in seconds; 0 if it was used up before the start.
    """

    name = "OnTimeout"
    severity: Severity = Severity.ERROR
    context: ResilienceContext
    timeout: float


@checked
@frozen(repr=False)
class Timeout(Strategy[TimeoutRejectedError]):
    """Limit how long the inside may take; for a stream, until its first chunk.

    When the limit passes, the inside is cancelled and awaited (in a thread, which can't be stopped, it
    is left alone). If it ends with that cancellation,
    `TimeoutRejectedError` is raised (also a builtin `TimeoutError`); a value or another error that
    comes out anyway is kept. The caller's own cancellation stays one, and wins if both happen.

    A circuit breaker *inside* a timeout sees its expiry as a cancellation, which is no evidence;
    put the timeout inside the breaker (add it later) to have slow calls counted as failures.

    Args:
        timeout: The limit in seconds (any duration form), above zero; `math.inf` for none.
        timeout_generator: Function of a `TimeoutGeneratorEvent` giving the limit of this call in
            any duration form, in place of `timeout`. `None` and `math.inf` mean no limit; zero or
            less has expired already: the inside is not started.
        on_timeout: Hook called with a `TimeoutEvent` after the inside has ended.
        name: Name for events and errors; tells which of two nested timeouts it was.

    Raises:
        OptionsError: One or more options have bad values.
    """

    timeout: float = field(converter=to_seconds, metadata=positive_duration())
    timeout_generator: (
        Callable[[TimeoutGeneratorEvent], Duration | Awaitable[Duration | None] | None] | None
    ) = field(default=None, kw_only=True, metadata=function())
    on_timeout: Callable[[TimeoutEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        bound = _BoundTimeout(self, next, site)
        if self.timeout_generator is not None:
            return bound.handle_generated
        if self.timeout == math.inf:
            return next
        return _fixed(self.timeout, next, bound)


def _fixed(limit: float, inside: Handler, bound: _BoundTimeout) -> Handler:
    """Make the handler of a fixed limit; its coroutine is the runtime's, which spares a bare call."""
    expired = partial(bound.refuse, limit)

    def handle(context: ResilienceContext) -> Awaitable[Any]:
        runtime = context._finder.asyncio
        if runtime is None:
            if context._sync is not None:
                return bound.handle_in_thread(limit, context)
            runtime = context.runtime
        return runtime.within(limit, inside, context, expired)

    return handle


class _BoundTimeout:
    __slots__ = ("_generator", "_next", "_on_timeout", "_site")

    def __init__(self, options: Timeout, next: Handler, site: Site) -> None:  # noqa: A002
        self._generator = options.timeout_generator
        self._on_timeout = options.on_timeout
        self._next = next
        self._site = site

    async def handle_generated(self, context: ResilienceContext) -> Any:
        limit = await self._generated_limit(context)
        if limit == math.inf:
            return await self._next(context)
        if limit <= 0:
            return await self.refuse(0.0, context, None)
        if context._sync is not None:
            return await self.handle_in_thread(limit, context)
        expired = partial(self.refuse, limit)
        return await context.runtime.within(limit, self._next, context, expired)

    async def handle_in_thread(self, limit: float, context: ResilienceContext) -> Any:
        """Run the inside where it may be left alone, and what it then does to its context with it."""
        own = context.fork(context.properties)
        own._history = context._history
        late = self._site.discarder(context)
        try:
            return await context.runtime.within(limit, self._enter, own, late=late)
        except DeadlineReached:
            pass
        return await self.refuse(limit, context, None)

    async def _enter(self, context: ResilienceContext) -> Any:
        enter(context)  # for the thread's job alone, so that nothing is to be taken back
        return await self._next(context)

    async def refuse(
        self, limit: float, context: ResilienceContext, cause: BaseException | None
    ) -> Never:
        """Raise the error of a call whose limit has passed, after the hook has run."""
        reason = f"the call took longer than {limit:g} s"
        error = self._site.reject(TimeoutRejectedError, context, reason, timeout=limit)
        try:
            if self._on_timeout is not None or self._site.wants(TimeoutEvent):
                event = TimeoutEvent(context=context, timeout=limit)
                await announce(self._site, event, self._on_timeout, "on_timeout", error)
            # What was cancelled shows where the time was spent.
            raise error from cause
        finally:
            del error, cause

    async def _generated_limit(self, context: ResilienceContext) -> float:
        assert self._generator is not None
        event = TimeoutGeneratorEvent(context=context)
        generated = await call_user(self._generator, event, "timeout_generator")
        limit = generated_seconds("timeout_generator", generated)
        return math.inf if limit is None else limit
