"""`ResiliencePipeline`: START HERE to see how a call runs.

`execute` makes (or takes) a context, sets it as the current one, and awaits the outermost handler.
Each handler is a strategy bound to the next one inwards; the innermost is `invoke`, which calls the
callback. Everything else in here is an edge: `settle` turns what comes out into an outcome,
`execute_stream` sends a stream's first chunk through the same handlers, `wrap` makes functions of
the same kind as the one given.
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
from functools import partial, update_wrapper
from time import monotonic
from types import CoroutineType
from typing import Any, ClassVar, Generic, Never, cast, overload

from attrs import evolve, frozen
from typing_extensions import ParamSpec, TypeVar, TypeVarTuple

from ._context import History, ResilienceContext, Rest, begun, enter, leave, reset
from ._durations import Duration
from ._errors import MisuseError
from ._line import Line, stream_options
from ._options import written
from ._outcome import Attempt, Failure, Outcome, Rejected, Success
from ._stream import ResilienceStream, StreamExecution, StreamStart
from .runtime import Clock, Runtime, RuntimeFinder
from .strategies import Handler, Strategy

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Exception)

DEFAULT_CLOSE_TIMEOUT = 5.0


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
    args = context._args
    awaitable: Any = fn(*args) if args else fn()  # which is faster by a fifth of a bare call
    if type(awaitable) is not CoroutineType and not inspect.isawaitable(awaitable):
        raise MisuseError(_not_awaitable(fn, awaitable))
    return awaitable  # pyright: ignore[reportUnknownVariableType]


def nested(pipeline: ResiliencePipeline[Any], inside: Handler) -> Handler:
    """Put a built pipeline's handlers around `inside`.

    They were bound once, to `invoke`, and stay so, because their state is shared. So `invoke` has
    to be told for each execution that there is more to come: the context carries the rest. A clock
    of the pipeline's own drives its strategies and nothing else; without one they go by the clock
    of the pipeline around them.
    """
    head = pipeline._head
    find_runtime = pipeline._find_runtime if pipeline._has_clock else None

    async def handle(context: ResilienceContext) -> Any:
        outer, find_outer = context._rest, context._find_runtime
        context._rest = (inside, find_outer, outer)
        if find_runtime is not None:
            context._find_runtime = find_runtime
        try:
            return await head(context)
        finally:
            context._rest, context._find_runtime = outer, find_outer

    return handle


async def _resume(context: ResilienceContext, rest: Rest) -> Any:
    """Go on inside of a nested pipeline, with the rest of what is around that for its own end."""
    own = context._find_runtime
    inside, context._find_runtime, context._rest = rest
    try:
        return await inside(context)
    finally:
        context._rest, context._find_runtime = rest, own


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


def _check_callable(fn: object, called: str) -> None:
    if callable(fn):
        return
    msg = f"{called}() takes a function, got {fn!r}"
    if inspect.isawaitable(fn) or inspect.isasyncgen(fn) or inspect.isgenerator(fn):
        msg += f": pass the function itself, {called}(fn{'' if called == 'wrap' else ', *args'})"
    if inspect.iscoroutine(fn):
        fn.close()
    raise MisuseError(msg)


def _check_context(context: object) -> None:
    if not isinstance(context, ResilienceContext):
        msg = f"context= takes a ResilienceContext, got {context!r}"
        raise MisuseError(msg)


# ---- the pipeline -----------------------------------------------------------------------------


@frozen
class Layer:
    """One entry of a builder: a strategy, or a nested pipeline with all of its own."""

    strategies: tuple[Strategy[Any], ...]
    pipeline: ResiliencePipeline[Any] | None = None

    def __str__(self) -> str:
        """Write the builder's call."""
        if self.pipeline is not None:
            return f".add_pipeline({self.pipeline!r})"
        (strategy,) = self.strategies
        kind, made = type(strategy), repr(strategy)
        if kind.__module__ != __package__:
            return f".add({made})"
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__)
        return f".add{snake}{made.removeprefix(kind.__name__)}"


def described(
    name: str | None, instance: str | None, close_timeout: object, layers: Sequence[Layer]
) -> str:
    """Write the calls that lead to a builder."""
    arguments = [] if name is None else [f"name={name!r}"]
    if instance is not None:
        arguments.append(f"instance={instance!r}")
    if close_timeout != DEFAULT_CLOSE_TIMEOUT:
        arguments.append(f"close_timeout={written(close_timeout)}")
    return f"ResiliencePipelineBuilder({', '.join(arguments)}){''.join(map(str, layers))}"


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
        "_has_clock",
        "_head",
        "_layers",
        "_now",
        "_runs_in_tasks",
        "instance",
        "name",
        "strategies",
    )

    empty: ClassVar[ResiliencePipeline[Never]]

    name: str | None
    instance: str | None
    strategies: tuple[Strategy[Any], ...]
    _head: Handler
    _layers: tuple[Layer, ...]
    _close_timeout: float
    _has_clock: bool
    _find_runtime: Callable[[], Runtime]
    _now: Callable[[], float]
    _runs_in_tasks: bool

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
        set_once("_runs_in_tasks", any(map(_runs_in_tasks, self.strategies)))
        set_once("_head", head)
        set_once("_layers", layers)
        set_once("_close_timeout", close_timeout)
        set_once("_has_clock", clock is not None)
        set_once("_find_runtime", RuntimeFinder(clock).find)
        set_once("_now", monotonic if clock is None else clock.now)

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: pipelines are immutable."""
        msg = f"a pipeline is immutable: can't set {name!r}"
        raise AttributeError(msg)

    def __delattr__(self, name: str) -> None:
        """Refuse: pipelines are immutable."""
        msg = f"a pipeline is immutable: can't delete {name!r}"
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
            idempotent: Whether `fn` may be called again after it was invoked once. If not, only
                attempts that never reached it are repeated.
            context: A context of your own; its `operation_key` and `idempotent` then hold, and its
                properties can be read afterwards.

        Raises:
            MisuseError: `fn` can't be called or returns nothing that can be awaited.
            ExecutionRejectedError: A strategy refused the call or gave up on it.
        """
        if not callable(fn):
            _check_callable(fn, "execute")
        if context is None:
            context = begun(operation_key, idempotent, self.name, self._find_runtime, fn, args)
        else:
            _check_context(context)
            context.begin(self.name, self._find_runtime, fn, args)
        token = enter(context)
        head = self._head  # called as a method it would cost an eighth of a bare call more
        try:
            return await head(context)  # type: ignore[no-any-return]
        finally:
            context._fn = None  # `context.end()`, as far as it concerns a call
            context._args = ()
            try:  # noqa: SIM105 - `leave(token)`; its frame costs a third of a bare call
                reset(token)
            except ValueError:
                pass

    async def settle(
        self,
        fn: Callable[[*Ts], Awaitable[T]],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> Outcome[T, E_co]:
        """Call `fn(*args)` through the strategies and return the outcome with its attempts.

        Never raises an `Exception`; cancellation and other `BaseException`s pass. The arguments are
        those of `execute`.

        Returns:
            `Success(value)`; `Rejected(error)` when one of this pipeline's own strategies refused
            or gave up; `Failure(error)` for everything else.
        """
        try:
            _check_callable(fn, "settle")
            started = self._now()
            if context is None:
                context = begun(operation_key, idempotent, self.name, self._find_runtime, fn, args)
            else:
                _check_context(context)
                context.begin(self.name, self._find_runtime, fn, args)
        except Exception as error:  # noqa: BLE001 - settle never raises one
            return Failure(error)
        history = context._history = History()
        outcome: Success[T] | Rejected[Any] | Failure | None = None
        token = enter(context)
        try:
            try:
                outcome = Success(await self._head(context))
            except Exception as error:  # noqa: BLE001 - settle never raises one
                outcome = context.outcome_of_error(error)
            finally:
                context.end()
                leave(token)
            if not history.count and not any(map(_makes_attempts, self.strategies)):
                history.add(Attempt(number=0, outcome=outcome, duration=self._now() - started))
            return evolve(outcome, attempts=tuple(history.latest), attempt_count=history.count)
        finally:
            # An error's traceback leads to this frame and those inside: none may lead to the error.
            history.latest.clear()
            outcome = None

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
        commit_when: Callable[[T], object] | None = None,
        max_held: int = 64,
        idle_timeout: Duration | None = None,
        total_timeout: Duration | None = None,
    ) -> ResilienceStream[T]:
        """Guard a stream up to its first chunk, then hand it to the caller.

        Returns at once: nothing runs until the first chunk is asked for. The arguments are those of
        `execute`.

        Args:
            factory: A function that returns an async iterable or generator, an async context
                manager whose value is one, or an awaitable of either.
            args: Arguments for `factory`.
            operation_key: As for `execute`.
            idempotent: As for `execute`.
            context: As for `execute`.
            commit_when: Function or coroutine function of a chunk that draws the line later than at
                the first chunk: at the first one for which it gives a true value. Chunks before it
                are held back, then delivered in order, and dropped when the attempt fails.
            max_held: Number of held chunks, at least 1, with which the stream is committed anyway.
            idle_timeout: Longest time in seconds (any duration form) that the consumer waits for
                a chunk after the first one; `None` or `math.inf` for no limit.
            total_timeout: Longest time in seconds from the first pull to the end, before and after
                the line; `None` or `math.inf` for no limit.

        Raises:
            MisuseError: `factory` can't be called.
            OptionsError: One or more options have bad values.
            TimeoutRejectedError: (while the stream is read) a limit passed. Past the line and for
                `total_timeout` that is final; between held chunks it fails the attempt.
        """
        _check_callable(factory, "execute_stream")
        if context is not None:
            _check_context(context)
        options = stream_options(commit_when, max_held, idle_timeout, total_timeout)
        close_timeout, head, name = self._close_timeout, self._head, self.name
        find_runtime, owned = self._find_runtime, self._runs_in_tasks

        def start() -> StreamStart:
            mine = ResilienceContext(operation_key, idempotent) if context is None else context
            mine.begin(name, find_runtime, factory, args)
            line = Line(options, mine)
            mine._stream = execution = StreamExecution(close_timeout, owned, line)
            return StreamStart(mine, execution, line, head)

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

        A coroutine function becomes a coroutine function, an async generator function a function
        that returns a `ResilienceStream`. Works on methods, and as a decorator with or without
        arguments.

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
        _check_callable(fn, "wrap")
        if _is(inspect.iscoroutinefunction, fn):

            @partial(_dress, fn)
            async def call(*args: Any, **kwargs: Any) -> Any:
                target = partial(fn, *args, **kwargs) if kwargs else fn
                return await self.execute(target, *(() if kwargs else args), **options)

            return call
        if _is(inspect.isasyncgenfunction, fn):

            @partial(_dress, fn)
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

    def __repr__(self) -> str:
        """Read like the builder call."""
        made = described(self.name, self.instance, self._close_timeout, self._layers)
        return f"{made}.build()"


def _makes_attempts(strategy: object) -> bool:
    return getattr(strategy, "makes_attempts", False)


def _runs_in_tasks(strategy: object) -> bool:
    return getattr(strategy, "runs_in_tasks", False)


def _is(test: Callable[[Any], bool], fn: Any) -> bool:
    """Ask about a function, the target of partials, or an object's own `__call__`."""
    while isinstance(fn, partial):
        fn = fn.func
    if test(fn):
        return True
    call: Any = getattr(fn.__class__, "__call__", None)  # noqa: B004 - asked what kind it is
    return not inspect.isroutine(fn) and test(call)


def _dress(fn: Any, wrapper: Any) -> Any:
    """Give `wrapper` the name, the docstring and the signature of `fn`, be it a function or not."""
    named: Any = fn
    while isinstance(named, partial):
        named = named.func
    is_function = inspect.isroutine(named)
    update_wrapper(wrapper, named, updated=("__dict__",) if is_function else ())
    if not is_function:
        wrapper.__name__ = wrapper.__qualname__ = named.__class__.__name__
    wrapper.__wrapped__ = fn
    return wrapper


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
    name=None,
    instance=None,
    layers=(),
    head=invoke,
    clock=None,
    close_timeout=DEFAULT_CLOSE_TIMEOUT,
)
