"""Building pipelines: the fold from the innermost layer out.

`add_*` methods take their options, defaults and documentation from the strategy classes; see
`_Adder`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, cast, overload

from typing_extensions import ParamSpec, TypeVar

from . import strategies
from ._errors import MisuseError, OptionsError
from ._invoke import invoke
from ._layers import DEFAULT_CLOSE_TIMEOUT, Layer, Part, described
from ._options import Bad, to_seconds
from ._pipeline import ResiliencePipeline
from .runtime import Clock
from .strategies import Handler, Site, Strategy, SupportsHealth
from .telemetry import Listener
from .telemetry._listeners import as_listeners, connect_log

if TYPE_CHECKING:
    from ._durations import Duration

P = ParamSpec("P")
E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Never)
R_co = TypeVar("R_co", bound=Exception, covariant=True)
R = TypeVar("R", bound=Exception)
F = TypeVar("F", bound=Exception)


class _Adder(Generic[P, R_co]):
    """`builder.add_x(**options)`, made of the strategy class `X` when it is first used.

    A descriptor, because it has two types to join: the constructor's parameters and the builder's
    rejections so far. At run time it gives a method like any other, with the constructor's
    signature and documentation.
    """

    def __init__(self, find: Callable[[], Callable[P, Strategy[R_co]]]) -> None:
        self._find = find
        self._method: Callable[..., Any] | None = None

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @property
    def make(self) -> Callable[P, Strategy[R_co]]:
        """What makes the strategy."""
        return self._find()

    @overload
    def __get__(
        self, builder: None, owner: type
    ) -> Callable[
        Concatenate[ResiliencePipelineBuilder[F], P], ResiliencePipelineBuilder[F | R_co]
    ]: ...
    @overload
    def __get__(
        self, builder: ResiliencePipelineBuilder[F], owner: type
    ) -> Callable[P, ResiliencePipelineBuilder[F | R_co]]: ...
    def __get__(self, builder: ResiliencePipelineBuilder[Any] | None, owner: type) -> Any:
        if self._method is None:
            self._method = self._make_method()
        return self._method if builder is None else MethodType(self._method, builder)

    def _make_method(self) -> Callable[..., Any]:
        make: Callable[..., Strategy[Any]] = self._find()

        def add(self: ResiliencePipelineBuilder[Any], *args: Any, **options: Any) -> Any:
            return self.add(make(*args, **options))

        signature = inspect.signature(make)
        receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        add.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[receiver, *signature.parameters.values()],
            return_annotation=ResiliencePipelineBuilder.__name__,
        )
        add.__name__ = self._name
        add.__qualname__ = f"{ResiliencePipelineBuilder.__qualname__}.{self._name}"
        add.__module__ = ResiliencePipelineBuilder.__module__
        add.__doc__ = make.__doc__
        return add


class ResiliencePipelineBuilder(Generic[E_co]):
    """Collects strategies, outermost first, and builds pipelines of them.

    Mutable and fluent: each `add_*` returns the builder. Generic in the rejections that its
    pipelines can raise, so that `settle` can be matched exhaustively.

    Args:
        name: Name of the pipelines, for errors and events.
        instance: Tells pipelines of one name apart.
        clock: A clock that drives every wait, limit and window; see `runtime.Clock`. Default: the
            event loop's.
        random: A function giving a random float in [0, 1), for jitter. Default: `random.random`.
        close_timeout: Seconds (any duration form) that closing something discarded may take.
        listeners: Functions that are called with every event of these pipelines; see
            `telemetry.add_listener`.

    Raises:
        OptionsError: One or more options have bad values.

    Example:
        >>> llm = (
        ...     ResiliencePipelineBuilder(name="llm")
        ...     .add_retry(max_retry_attempts=2, delay="500ms", backoff_type="exponential")
        ...     .add_timeout("10s")
        ...     .build()
        ... )
    """

    def __init__(
        self: ResiliencePipelineBuilder[Never],
        name: str | None = None,
        *,
        instance: str | None = None,
        clock: Clock | None = None,
        random: Callable[[], float] | None = None,
        close_timeout: Duration = DEFAULT_CLOSE_TIMEOUT,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self._name = name
        self._instance = instance
        self._clock = clock
        self._random = random
        self._close_timeout = to_seconds(close_timeout)
        self._listeners, problems = as_listeners(listeners)
        self._layers: list[Layer] = []
        self._frozen = False
        self._check(problems)

    def _check(self, problems: list[str]) -> None:
        problems[:0] = [
            f"{option} must be text or None, got {value!r}"
            for option, value in (("name", self._name), ("instance", self._instance))
            if not (value is None or isinstance(value, str))
        ]
        if self._clock is not None and not is_clock(self._clock):
            problems.append(
                "clock must have the methods now(), sleep(seconds) and call_at(when, callback), "
                f"got {self._clock!r}"
            )
        if self._random is not None and not callable(self._random):
            problems.append(f"random must be a function or None, got {self._random!r}")
        timeout: object = self._close_timeout
        if isinstance(timeout, Bad):
            problems.append(f"close_timeout must be {timeout.expected}, got {timeout.value!r}")
        if problems:
            headline = "bad options for ResiliencePipelineBuilder: "
            raise OptionsError(headline + "; ".join(problems), tuple(problems))

    @property
    def name(self) -> str | None:
        """Name of the pipelines; may be set until the first `build()`."""
        return self._name

    @name.setter
    def name(self, name: str | None) -> None:
        self._refuse_when_frozen("renamed")
        before, self._name = self._name, name
        try:
            self._check([])
        except OptionsError:
            self._name = before
            raise

    @property
    def instance(self) -> str | None:
        """What tells pipelines of one name apart."""
        return self._instance

    def add(self, strategy: Strategy[R]) -> ResiliencePipelineBuilder[E_co | R]:
        """Add a strategy inside of those added so far.

        Args:
            strategy: `Retry(...)`, `Timeout(...)`, or a strategy of your own.

        Raises:
            MisuseError: It is no strategy, or the builder has built a pipeline already.
        """
        if isinstance(strategy, type) or not callable(getattr(strategy, "bind", None)):
            msg = (
                f"add() takes a strategy such as Retry(...), or an object with bind(next, site), "
                f"got {strategy!r}"
            )
            if isinstance(strategy, ResiliencePipeline):
                msg += ": add_pipeline() takes pipelines"
            raise MisuseError(msg)
        self._add(Layer((strategy,)))
        return self

    def add_pipeline(self, pipeline: ResiliencePipeline[R]) -> ResiliencePipelineBuilder[E_co | R]:
        """Add all of a built pipeline's strategies; their state stays shared with its other users.

        The nested pipeline keeps its own name in errors and events.

        Raises:
            MisuseError: It is no pipeline, or the builder has built a pipeline already.
        """
        if not isinstance(pipeline, ResiliencePipeline):
            msg = f"add_pipeline() takes a pipeline that has been built, got {pipeline!r}"
            raise MisuseError(msg)
        self._add(Layer(pipeline.strategies, pipeline))
        return self

    def _add(self, layer: Layer) -> None:
        self._refuse_when_frozen("added")
        self._layers.append(layer)

    def _refuse_when_frozen(self, what: str) -> None:
        if self._frozen:
            msg = f"nothing can be {what} after build(): make another builder"
            raise MisuseError(msg)

    add_retry = _Adder(lambda: strategies.Retry)
    add_circuit_breaker = _Adder(lambda: strategies.CircuitBreaker)
    add_timeout = _Adder(lambda: strategies.Timeout)
    add_fallback = _Adder(lambda: strategies.Fallback)
    add_hedging = _Adder(lambda: strategies.Hedging)
    add_concurrency_limiter = _Adder(lambda: strategies.ConcurrencyLimiter)
    add_rate_limiter = _Adder(lambda: strategies.RateLimiter)
    add_lock = _Adder(lambda: strategies.Lock)
    add_record_replay = _Adder(lambda: strategies.RecordReplay)
    add_chaos_fault = _Adder(lambda: strategies.ChaosFault)
    add_chaos_latency = _Adder(lambda: strategies.ChaosLatency)
    add_chaos_outcome = _Adder(lambda: strategies.ChaosOutcome)
    add_chaos_behavior = _Adder(lambda: strategies.ChaosBehavior)
    add_cache = _Adder(lambda: strategies.Cache)

    def build(self) -> ResiliencePipeline[E_co]:
        """Build a pipeline with fresh state; the first strategy added is the outermost.

        Nothing can be added afterwards, but building again is fine.
        """
        self._frozen = True
        connect_log()
        handler: Handler = invoke
        parts: list[Part] = []
        kind: type[ResiliencePipeline[Any]] = ResiliencePipeline
        for position, layer in reversed(list(enumerate(self._layers))):
            if layer.pipeline is not None:
                handler = layer.pipeline._nested(handler)
                parts.append(Part("", None, layer.pipeline))
                kind = _following() if layer.pipeline._reloads else kind
                continue
            strategy = layer.strategies[0]
            handler = self._bind(strategy, position, handler)
            reporter = getattr(handler, "__self__", handler)
            if isinstance(reporter, SupportsHealth):
                parts.append(Part(_name_of(strategy), strategy, reporter))
        return kind(
            name=self._name,
            instance=self._instance,
            layers=tuple(self._layers),
            head=handler,
            clock=self._clock,
            close_timeout=self._close_timeout,
            parts=tuple(reversed(parts)),
            listeners=self._listeners,
        )

    def _bind(self, strategy: Strategy[Any], position: int, inside: Handler) -> Handler:
        site = Site(
            pipeline_name=self._name,
            instance=self._instance,
            strategy_name=_name_of(strategy),
            position=position,
            now=time.monotonic if self._clock is None else self._clock.now,
            random=self._random or _default_random(),
            close_timeout=self._close_timeout,
            listeners=self._listeners,
        )
        handler = cast(object, strategy.bind(inside, site))
        if not callable(handler):
            msg = f"bind() of {strategy!r} must return a function of the context, got {handler!r}"
            raise MisuseError(msg)
        return cast(Handler, handler)

    def __repr__(self) -> str:
        """Show the calls that lead here."""
        return described(self._name, self._instance, self._close_timeout, self._layers)


def strategy_types() -> dict[str, Callable[..., Strategy[Any]]]:
    """Give what the builder's methods make, by their names without `add_`."""
    return {
        name.removeprefix("add_"): adder.make
        for kind in reversed(ResiliencePipelineBuilder.__mro__)
        for name, adder in vars(kind).items()
        if isinstance(adder, _Adder)
    }


def _name_of(strategy: Strategy[Any]) -> str:
    return getattr(strategy, "name", None) or type(strategy).__name__


def _following() -> type[ResiliencePipeline[Any]]:
    from ._reloadable import FollowingPipeline

    return FollowingPipeline


def is_clock(clock: object) -> bool:
    return not isinstance(clock, type) and all(
        callable(getattr(clock, method, None)) for method in ("now", "sleep", "call_at")
    )


def _default_random() -> Callable[[], float]:
    from random import random

    return random
