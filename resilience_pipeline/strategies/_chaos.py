"""Chaos: do to a small share of the calls what a bad day would do to all of them.

Four strategies that differ in what they do to a call that is hit, and agree on which those are: the
switch is asked first, then the rate, then a number is drawn. A call that is not hit goes straight to
what is inside; a switch that is off for good, or a rate of 0, leaves nothing of the strategy.

Before each question to the user and before a hit there is a checkpoint: who has been cancelled
meanwhile is asked nothing more and gets no chaos.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, Never, TypeVar

from attrs import field, frozen

from .._context import ResilienceContext
from .._options import (
    UNSET,
    checked,
    function,
    generated_seconds,
    text_or_none,
    to_name,
)
from .._outcome import Failure, Rejected, Success
from ..telemetry import StrategyEvent, TelemetryEvent
from ._base import Handler, Site, Strategy, announce, call_user, run_hook
from ._chaos_generators import (
    ChaosEvent,
    Enabled,
    FaultGenerator,
    LatencyGenerator,
    OutcomeGenerator,
    Rate,
    Weighted,
    makes,
    rate,
    required_function,
    switch,
    to_fault,
    to_fault_generator,
    to_latency,
    to_outcome,
    to_outcome_generator,
    to_rate,
)


class ChaosFaultEvent(StrategyEvent):
    """What `on_fault_injected` is given.

    Attributes:
        context: The execution's context.
        fault: The exception that is going to be raised.
    """

    name = "Chaos.OnFault"
    context: ResilienceContext
    fault: Exception


class ChaosLatencyEvent(StrategyEvent):
    """What `on_latency_injected` is given.

    Attributes:
        context: The execution's context.
        latency: The wait, in seconds.
    """

    name = "Chaos.OnLatency"
    context: ResilienceContext
    latency: float


class ChaosOutcomeEvent(TelemetryEvent):
    """What `on_outcome_injected` is given.

    Attributes:
        context: The execution's context.
        outcome: What comes out in place of the call.
    """

    name = "Chaos.OnOutcome"
    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    duration: None = None


class ChaosBehaviorEvent(StrategyEvent):
    """What `on_behavior_injected` is given.

    Attributes:
        context: The execution's context.
    """

    name = "Chaos.OnBehavior"
    context: ResilienceContext


# ---- which calls are hit ----------------------------------------------------------------------

S = TypeVar("S", bound="ChaosFault | ChaosLatency | ChaosOutcome | ChaosBehavior")


class _Bound(ABC, Generic[S]):
    """Decides which calls are hit; what happens to them is up to `inject`."""

    __slots__ = ("_enabled", "_next", "_options", "_random", "_rate", "_site")

    def __init__(self, options: S, next: Handler, site: Site) -> None:  # noqa: A002
        self._options = options
        self._next = next
        self._site = site
        self._random = site.random
        self._rate = options.injection_rate
        self._enabled = options.enabled

    @abstractmethod
    async def inject(self, context: ResilienceContext) -> Any:
        """Do to a call what this strategy does, and what is left to be done of the call itself."""

    def handler(self) -> Handler:
        """Give the handler that asks no more than it has to."""
        if self._enabled is False or self._rate == 0:
            return self._next
        if callable(self._enabled) or callable(self._rate):
            return self._ask_and_handle
        return self._handle

    def _handle(self, context: ResilienceContext) -> Awaitable[Any]:
        # No coroutine of its own: a call that is not hit pays for the draw alone.
        share: Any = self._rate
        if self._random() < share:
            return self._hit(context)
        return self._next(context)

    async def _ask_and_handle(self, context: ResilienceContext) -> Any:
        if await self._is_hit(context):
            return await self._hit(context)
        return await self._next(context)

    async def _is_hit(self, context: ResilienceContext) -> bool:
        event = ChaosEvent(context=context)
        enabled, share = self._enabled, self._rate
        if callable(enabled):
            await context.runtime.sleep(0)
            enabled = await call_user(enabled, event, "enabled")
        if not enabled:
            return False
        if callable(share):
            await context.runtime.sleep(0)
            share = to_rate(await call_user(share, event, "injection_rate"))
        return self._random() < share

    async def _hit(self, context: ResilienceContext) -> Any:
        await context.runtime.sleep(0)
        return await self.inject(context)

    async def _generated(self, generator: Any, context: ResilienceContext, option: str) -> Any:
        """Ask a function, or take what a draw picks of several things; `UNSET` if that is nothing."""
        if isinstance(generator, Weighted):
            picked = generator.pick(self._random())
            if not callable(picked):
                return picked
            generator = partial(makes, picked)
        elif isinstance(generator, type):
            return generator()
        return await call_user(generator, ChaosEvent(context=context), option)


# ---- faults -----------------------------------------------------------------------------------


@checked
@frozen(repr=False)
class ChaosFault(Strategy[Never]):
    """Raise an exception in place of a share of the calls.

    What is inside is not called then. The exception is a failure like any other: what is around this
    strategy retries, counts or replaces it. Of a stream it takes the place of the first chunk.

    Args:
        fault_generator: An exception type; or a function of a `ChaosEvent` giving an exception, or
            `None` for none this time; or a list of `(weight, what)`, of which one is drawn, where
            `what` is an exception type or a function, of the event or without arguments. In plain
            data a built-in exception type is given by its name: `[[3, "TimeoutError"], [1, "OSError"]]`.
        injection_rate: Share of the calls that are hit, from 0 to 1; or a function of a `ChaosEvent`
            giving it, clamped to that. A call is hit if `random() < injection_rate`, with the
            builder's `random=`.
        enabled: Whether there is any chaos; or a function of a `ChaosEvent` that says so for a call,
            asked before the rate is.
        on_fault_injected: Hook called with a `ChaosFaultEvent` before the exception is raised.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    fault_generator: FaultGenerator = field(converter=to_fault_generator)
    injection_rate: Rate = field(default=0.001, kw_only=True, metadata=rate())
    enabled: Enabled = field(default=True, kw_only=True, metadata=switch())
    on_fault_injected: Callable[[ChaosFaultEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundFault(self, next, site).handler()


class _BoundFault(_Bound[ChaosFault]):
    __slots__ = ()

    async def inject(self, context: ResilienceContext) -> Any:
        options = self._options
        made = await self._generated(options.fault_generator, context, "fault_generator")
        fault = None if made is UNSET else to_fault("fault_generator", made)
        if fault is None:
            return await self._next(context)
        hook, event = options.on_fault_injected, None
        try:
            if hook is not None or self._site.wants(ChaosFaultEvent):
                event = ChaosFaultEvent(context=context, fault=fault)
                await announce(self._site, event, hook, "on_fault_injected", fault)
            raise fault
        finally:
            # Its traceback leads to this frame.
            del made, fault, event


# ---- latency ----------------------------------------------------------------------------------


@checked
@frozen(repr=False)
class ChaosLatency(Strategy[Never]):
    """Wait before a share of the calls.

    The wait is cancelled with its call, by a time limit around this strategy for instance.

    Args:
        latency: The wait in seconds (any duration form); or a function of a `ChaosEvent` giving it
            in any duration form. 0, and of a function also `None` and less than 0, is no wait, and
            then there is neither event nor hook; `math.inf` waits until the call is cancelled.
        injection_rate: Share of the calls that are hit, from 0 to 1; or a function of a `ChaosEvent`
            giving it, clamped to that. A call is hit if `random() < injection_rate`, with the
            builder's `random=`.
        enabled: Whether there is any chaos; or a function of a `ChaosEvent` that says so for a call,
            asked before the rate is.
        on_latency_injected: Hook called with a `ChaosLatencyEvent` after the wait.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    latency: float | LatencyGenerator = field(converter=to_latency)
    injection_rate: Rate = field(default=0.001, kw_only=True, metadata=rate())
    enabled: Enabled = field(default=True, kw_only=True, metadata=switch())
    on_latency_injected: Callable[[ChaosLatencyEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundLatency(self, next, site).handler()


class _BoundLatency(_Bound[ChaosLatency]):
    __slots__ = ()

    async def inject(self, context: ResilienceContext) -> Any:
        options = self._options
        latency: Any = options.latency
        if callable(latency):
            made = await self._generated(latency, context, "latency")
            latency = generated_seconds("latency", made)
        if latency is not None and latency > 0:
            hook, event = options.on_latency_injected, None
            if hook is not None or self._site.wants(ChaosLatencyEvent):
                event = ChaosLatencyEvent(context=context, latency=latency)
                self._site.report(event)
            await context.runtime.sleep(latency)
            await run_hook(hook, event, "on_latency_injected")
        return await self._next(context)


# ---- outcomes ---------------------------------------------------------------------------------


@checked
@frozen(repr=False)
class ChaosOutcome(Strategy[Never]):
    """Give a result, or any other outcome, in place of a share of the calls.

    What is inside is not called then. In a stream a value becomes one chunk; an async iterable or a
    context manager around one is iterated and closed.

    Args:
        outcome_generator: Function of a `ChaosEvent` giving a result, an exception (type), which is
            raised, or an outcome such as `Success(None)`; `None` stands for none this time. Or a
            list of `(weight, what)`, of which one is drawn, where `what` is any of these, `None`
            being a result here, or a function, of the event or without arguments, that gives it.
        injection_rate: Share of the calls that are hit, from 0 to 1; or a function of a `ChaosEvent`
            giving it, clamped to that. A call is hit if `random() < injection_rate`, with the
            builder's `random=`.
        enabled: Whether there is any chaos; or a function of a `ChaosEvent` that says so for a call,
            asked before the rate is.
        on_outcome_injected: Hook called with a `ChaosOutcomeEvent` before the outcome comes out.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    outcome_generator: OutcomeGenerator = field(converter=to_outcome_generator)
    injection_rate: Rate = field(default=0.001, kw_only=True, metadata=rate())
    enabled: Enabled = field(default=True, kw_only=True, metadata=switch())
    on_outcome_injected: Callable[[ChaosOutcomeEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundOutcome(self, next, site).handler()


class _BoundOutcome(_Bound[ChaosOutcome]):
    __slots__ = ()

    async def inject(self, context: ResilienceContext) -> Any:
        options = self._options
        generator = options.outcome_generator
        made = await self._generated(generator, context, "outcome_generator")
        if made is UNSET or (made is None and not isinstance(generator, Weighted)):
            return await self._next(context)
        outcome = to_outcome(made)
        hook, event = options.on_outcome_injected, None
        try:
            if hook is not None or self._site.wants(ChaosOutcomeEvent):
                event = ChaosOutcomeEvent(context=context, outcome=outcome)
                await announce(self._site, event, hook, "on_outcome_injected", outcome.error)
            value = outcome.unwrap()
        finally:
            # An error's traceback leads to this frame.
            del made, outcome, event
        return value if context._stream is None else await context._stream.adopt(context, value)


# ---- behavior ---------------------------------------------------------------------------------


@checked
@frozen(repr=False)
class ChaosBehavior(Strategy[Never]):
    """Run something before a share of the calls: empty a cache, drop a connection.

    What it raises comes out in place of the call.

    Args:
        behavior: Function of a `ChaosEvent`.
        injection_rate: Share of the calls that are hit, from 0 to 1; or a function of a `ChaosEvent`
            giving it, clamped to that. A call is hit if `random() < injection_rate`, with the
            builder's `random=`.
        enabled: Whether there is any chaos; or a function of a `ChaosEvent` that says so for a call,
            asked before the rate is.
        on_behavior_injected: Hook called with a `ChaosBehaviorEvent` after it, before the call.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    behavior: Callable[[ChaosEvent], object] = field(metadata=required_function())
    injection_rate: Rate = field(default=0.001, kw_only=True, metadata=rate())
    enabled: Enabled = field(default=True, kw_only=True, metadata=switch())
    on_behavior_injected: Callable[[ChaosBehaviorEvent], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline."""
        return _BoundBehavior(self, next, site).handler()


class _BoundBehavior(_Bound[ChaosBehavior]):
    __slots__ = ()

    async def inject(self, context: ResilienceContext) -> Any:
        options = self._options
        await call_user(options.behavior, ChaosEvent(context=context), "behavior")
        await context.runtime.sleep(0)
        hook = options.on_behavior_injected
        if hook is not None or self._site.wants(ChaosBehaviorEvent):
            await announce(
                self._site, ChaosBehaviorEvent(context=context), hook, "on_behavior_injected"
            )
        return await self._next(context)


for _name in [name for name in globals() if name.startswith("Chaos")]:
    globals()[_name].__module__ = __name__.partition(".")[0]  # as the package does for the others
