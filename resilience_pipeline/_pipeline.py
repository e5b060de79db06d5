"""`ResiliencePipeline`: START HERE to see how a call runs.

`execute` makes (or takes) a context, sets it as the current one, and awaits the outermost handler. Each handler is a
strategy bound to the next one inwards; the innermost is `invoke`, which calls the callback. Everything else in
here is an edge: `settle` turns what comes out into an outcome, `execute_stream` sends a stream's first chunk
through the same handlers, `wrap` makes functions of the same kind as the one given.
"""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from functools import partial, wraps
from types import CoroutineType
from typing import Any, ClassVar, Generic, Never, cast, overload

from attrs import evolve, frozen
from typing_extensions import ParamSpec, TypeVar, TypeVarTuple

from ._context import History, ResilienceContext, current
from ._errors import MisuseError
from ._outcome import Attempt, Failure, Outcome, Rejected, Success
from ._stream import ResilienceStream, StreamExecution, StreamStart
from .runtime import Clock, Runtime, RuntimeFinder
from .strategies import Handler, Strategy

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Exception)


# ---- the innermost handlers -------------------------------------------------------------------


def invoke(context: ResilienceContext) -> Awaitable[Any]:
    """Call the callback: the end of every chain of handlers.

    No coroutine of its own: what the callback returns is handed to the layer around as it is.
    """
    rest = context._rest
    if rest is not None:
        return _resume(context, rest)
    context._invocations += 1
    fn: Any = context._fn
    if context._stream is not None:
        return context._stream.prime(context, partial(fn, *context._args))
    awaitable: Any = fn(*context._args)
    if type(awaitable) is not CoroutineType and not inspect.isawaitable(awaitable):
        raise MisuseError(_not_awaitable(fn, awaitable))
    return awaitable  # pyright: ignore[reportUnknownVariableType]


def nested(head: Handler, inside: Handler) -> Handler:
    """Put a built pipeline's handlers around `inside`.

    They were bound once, to `invoke`, and stay so, because their state is shared. So `invoke` has to be told for each execution
    that there is more to come: the context carries the rest.
    """

    async def handle(context: ResilienceContext) -> Any:
        outer = context._rest
        context._rest = (inside, outer)
        try:
            return await head(context)
        finally:
            context._rest = outer

    return handle


async def _resume(context: ResilienceContext, rest: tuple[Handler, Any]) -> Any:
    """Go on inside of a nested pipeline, with the rest of what is around that for its own end."""
    inside, context._rest = rest
    try:
        return await inside(context)
    finally:
        context._rest = rest


def _not_awaitable(fn: object, result: object) -> str:
    got = f"{_name_of(fn)} returned {result!r}, which can't be awaited"
    if inspect.isasyncgen(result):
        return f"{got}: run async generator functions with execute_stream()"
    if inspect.isgenerator(result):
        result.close()
        return f"{got}: make it a coroutine function, or an async generator for execute_stream()"
    if hasattr(result, "__aiter__"):
        return f"{got}: run what gives an async iterable with execute_stream()"
    return f"{got}: make it a coroutine function (async def)"


def _name_of(fn: object) -> str:
    name = getattr(fn, "__qualname__", None)
    return f"{name}()" if name else repr(fn)


def _check_callable(fn: object, instead: str) -> None:
    if callable(fn):
        return
    msg = f"{instead} takes a function and its arguments, got {fn!r}"
    if inspect.iscoroutine(fn):
        fn.close()
        msg += f": pass the function itself, {instead.removesuffix('()')}(fn, *args)"
    raise MisuseError(msg)


# ---- the pipeline -----------------------------------------------------------------------------


@frozen
class Layer:
    """One entry of a builder: a strategy, or a nested pipeline with all of its own."""

    call: str
    strategies: tuple[Strategy[Any], ...]
    pipeline: ResiliencePipeline[Any] | None = None

    @classmethod
    def of_strategy(cls, strategy: Strategy[Any]) -> Layer:
        described = repr(strategy)
        own = type(strategy).__module__.startswith(__package__ or "resilience_pipeline")
        name, arguments, _ = described.partition("(")
        if not own or not arguments:
            return cls(f".add({described})", (strategy,))
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
        return cls(f".add{snake}({described[len(name) + 1 :]}", (strategy,))

    @classmethod
    def of_pipeline(cls, pipeline: ResiliencePipeline[Any]) -> Layer:
        return cls(f".add_pipeline({pipeline!r})", pipeline.strategies, pipeline)


class ResiliencePipeline(Generic[E_co]):
    """An immutable onion of strategies; built by `ResiliencePipelineBuilder`.

    One pipeline serves any number of calls at once, on any event loop.

    Attributes:
        name: Its name, or `None`.
        instance: Tells pipelines of one name apart, or `None`.
        strategies: The strategies' options, outermost first, nested pipelines flattened.
        empty: A pipeline without strategies: runs the call as it is.
    """

    __slots__ = (
        "__weakref__",
        "_close_timeout",
        "_find_runtime",
        "_layers",
        "head",
        "instance",
        "name",
        "strategies",
    )

    empty: ClassVar[ResiliencePipeline[Never]]

    name: str | None
    instance: str | None
    strategies: tuple[Strategy[Any], ...]
    head: Handler
    _layers: tuple[Layer, ...]
    _close_timeout: float
    _find_runtime: Callable[[], Runtime]

    def __init__(
        self,
        *,
        name: str | None,
        instance: str | None,
        layers: tuple[Layer, ...],
        head: Handler,
        clock: Clock | None,
        close_timeout: float,
    ) -> None:
        """Not for users: `ResiliencePipelineBuilder.build` makes pipelines."""
        set_once = super().__setattr__
        set_once("name", name)
        set_once("instance", instance)
        set_once("strategies", tuple(s for layer in layers for s in layer.strategies))
        set_once("head", head)
        set_once("_layers", layers)
        set_once("_close_timeout", close_timeout)
        set_once("_find_runtime", RuntimeFinder(clock).find)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: pipelines are immutable."""
        msg = f"a pipeline is immutable: can't set {name!r}"
        raise AttributeError(msg)

    async def execute(
        self,
        fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> T:
        """Call `fn(*args)` through the strategies and return what it returns.

        Args:
            fn: A coroutine function, or anything that returns an awaitable.
            args: Arguments for `fn`; for keyword arguments use `functools.partial` or a lambda.
            operation_key: A low-cardinality label of the call for telemetry.
            idempotent: Whether `fn` may be called again after it was invoked once. If not, only attempts
                that never reached it are repeated.
            context: A context of your own; its `operation_key` and `idempotent` then hold, and its properties
                can be read afterwards.

        Raises:
            MisuseError: `fn` can't be called or returns nothing that can be awaited.
            ExecutionRejectedError: A strategy refused the call or gave up on it.
        """
        if context is None:
            context = ResilienceContext(operation_key, idempotent)
        if not callable(fn):
            _check_callable(fn, "execute()")
        context.begin(self.name, self._find_runtime(), fn, args)
        token = current.set(context)
        try:
            return await self.head(context)  # type: ignore[no-any-return]
        finally:
            current.reset(token)
            context.end()

    async def settle(
        self,
        fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> Outcome[T, E_co]:
        """Call `fn(*args)` through the strategies and return the outcome, with the history of attempts.

        Never raises an `Exception`; cancellation and other `BaseException`s pass. The arguments are those of `execute`.

        Returns:
            `Success(value)`; `Rejected(error)` when one of this pipeline's own strategies refused or gave up; `Failure(error)`
            for everything else.
        """
        if context is None:
            context = ResilienceContext(operation_key, idempotent)
        try:
            _check_callable(fn, "settle()")
            runtime = self._find_runtime()
            context.begin(self.name, runtime, fn, args)
        except Exception as error:  # noqa: BLE001 - settle never raises one
            return Failure(error)
        history = context._history = History()
        started = runtime.now()
        token = current.set(context)
        outcome: Success[T] | Rejected[Any] | Failure
        try:
            outcome = Success(await self.head(context))
        except Exception as error:  # noqa: BLE001 - settle never raises one
            outcome = context.outcome_of_error(error)
        finally:
            current.reset(token)
            context.end()
        if not history.count and not any(map(_makes_attempts, self.strategies)):
            history.add(Attempt(number=0, outcome=outcome, duration=runtime.now() - started))
        return evolve(outcome, attempts=tuple(history.latest), attempt_count=history.count)

    def execute_stream(
        self,
        factory: Callable[
            [*Ts],
            AsyncIterable[T]
            | AbstractAsyncContextManager[AsyncIterable[T], Any]
            | Awaitable[AsyncIterable[T] | AbstractAsyncContextManager[AsyncIterable[T], Any]],
        ],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> ResilienceStream[T]:
        """Guard a stream up to its first chunk, then hand it to the caller.

        Returns at once: nothing runs until the first chunk is asked for. The arguments are those of `execute`.

        Args:
            factory: A function that returns an async iterable or generator, an async context manager whose value is
                one, or an awaitable of either.
            args: Arguments for `factory`.
            operation_key: As for `execute`.
            idempotent: As for `execute`.
            context: As for `execute`.

        Raises:
            MisuseError: `factory` can't be called.
        """
        _check_callable(factory, "execute_stream()")
        close_timeout, head, name = self._close_timeout, self.head, self.name
        find_runtime = self._find_runtime

        def start() -> StreamStart:
            begun = ResilienceContext(operation_key, idempotent) if context is None else context
            begun.begin(name, find_runtime(), factory, args)
            begun._stream = execution = StreamExecution(close_timeout)
            return StreamStart(begun, execution, head)

        return ResilienceStream(start)

    # ---- wrapping

    @overload
    def wrap(
        self,
        fn: Callable[P, Coroutine[Any, Any, T]],
        *,
        operation_key: str | None = None,
        idempotent: bool = True,
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def wrap(
        self,
        fn: Callable[P, AsyncGenerator[T, Any]] | Callable[P, AsyncIterator[T]],
        *,
        operation_key: str | None = None,
        idempotent: bool = True,
    ) -> Callable[P, ResilienceStream[T]]: ...
    @overload
    def wrap(
        self, fn: None = None, *, operation_key: str | None = None, idempotent: bool = True
    ) -> _Wrapper: ...
    def wrap(
        self, fn: Any = None, *, operation_key: str | None = None, idempotent: bool = True
    ) -> Any:
        """Make a function of the same signature and kind as `fn` that runs through the pipeline.

        A coroutine function becomes a coroutine function, an async generator function a function that returns
        a `ResilienceStream`. Works on methods, and as a decorator with or without arguments.

        Args:
            fn: The function.
            operation_key: As for `execute`.
            idempotent: As for `execute`.

        Raises:
            MisuseError: `fn` is neither a coroutine function nor an async generator function.
        """
        if fn is None:
            return _Wrapper(self, operation_key, idempotent)
        options: dict[str, Any] = {"operation_key": operation_key, "idempotent": idempotent}
        if isinstance(fn, staticmethod | classmethod):
            method = cast(Any, fn)
            return type(method)(self.wrap(method.__func__, **options))
        if _is(inspect.iscoroutinefunction, fn):

            @wraps(fn)
            async def call(*args: Any, **kwargs: Any) -> Any:
                target = partial(fn, *args, **kwargs) if kwargs else fn
                return await self.execute(target, *(() if kwargs else args), **options)

            return call
        if _is(inspect.isasyncgenfunction, fn):

            @wraps(fn)
            def stream(*args: Any, **kwargs: Any) -> ResilienceStream[Any]:
                target = partial(fn, *args, **kwargs) if kwargs else fn
                return self.execute_stream(target, *(() if kwargs else args), **options)

            return stream
        msg = (
            f"wrap() takes a coroutine function or an async generator function, got {fn!r}; "
            "wrap what returns an awaitable as: async def call(...): return await fn(...)"
        )
        raise MisuseError(msg)

    # ---- reading

    @staticmethod
    def described(name: str | None, instance: str | None, layers: Sequence[Layer]) -> str:
        """Write the builder's calls."""
        arguments = [] if name is None else [f"name={name!r}"]
        if instance is not None:
            arguments.append(f"instance={instance!r}")
        calls = "".join(layer.call for layer in layers)
        return f"ResiliencePipelineBuilder({', '.join(arguments)}){calls}"

    def __repr__(self) -> str:
        """Read like the builder call."""
        return f"{self.described(self.name, self.instance, self._layers)}.build()"


def _makes_attempts(strategy: object) -> bool:
    return getattr(strategy, "makes_attempts", False)


def _is(test: Callable[[Any], bool], fn: Any) -> bool:
    """Ask about a function, the target of partials, or an object's own `__call__`."""
    while isinstance(fn, partial):
        fn = fn.func
    if test(fn):
        return True
    call: Any = getattr(fn.__class__, "__call__", None)  # noqa: B004 - asked what kind it is
    return not inspect.isroutine(fn) and test(call)


class _Wrapper:
    """`@pipeline.wrap(...)`: a decorator that remembers its options."""

    __slots__ = ("_options", "_pipeline")

    def __init__(
        self,
        pipeline: ResiliencePipeline[Any],
        operation_key: str | None,
        idempotent: bool,
    ) -> None:
        self._pipeline = pipeline
        self._options: dict[str, Any] = {"operation_key": operation_key, "idempotent": idempotent}

    @overload
    def __call__(
        self, fn: Callable[P, Coroutine[Any, Any, T]]
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, fn: Callable[P, AsyncGenerator[T, Any]] | Callable[P, AsyncIterator[T]]
    ) -> Callable[P, ResilienceStream[T]]: ...
    def __call__(self, fn: Any) -> Any:
        wrap: Any = self._pipeline.wrap
        return wrap(fn, **self._options)


ResiliencePipeline.empty = ResiliencePipeline(
    name=None, instance=None, layers=(), head=invoke, clock=None, close_timeout=5.0
)
