"""`ResiliencePipeline`: START HERE to see how a call runs.

`execute` makes (or takes) a context, sets it as the current one, and awaits the outermost handler.
Each handler is a strategy bound to the next one inwards; the innermost is `invoke`, which calls the
callback. Everything else in here is an edge: `settle` turns what comes out into an outcome,
`execute_stream` sends a stream's first chunk through the same handlers, `wrap` makes functions of
the same kind as the one given.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cache, partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Never, overload

from typing_extensions import ParamSpec, TypeVar, TypeVarTuple

from ._cancellation import Orphans
from ._context import (
    BlankContext,
    History,
    ResilienceContext,
    begun,
    check_context,
    enter,
    leave,
    reset,
)
from ._invoke import check_callable, invoke, nested, straight
from ._layers import (
    DEFAULT_CLOSE_TIMEOUT,
    Layer,
    Part,
    described,
    makes_attempts,
    runs_in_tasks,
)
from ._outcome import Attempt, Failure, Outcome, Rejected, settled_error, settled_success
from ._switches import switches
from ._wrapping import Wrapper, wrapped
from .runtime import Clock
from .runtime._finder import Finder, RuntimeFinder, ThreadFinder, finder, thread_finder
from .runtime._here import run_here
from .strategies import Handler, Strategy
from .strategies._base import gate_of, shortcut_of
from .telemetry import Listener
from .telemetry._outlet import Outlet

if TYPE_CHECKING:
    from ._durations import Duration
    from ._stream import ResilienceStream
    from ._sync import SyncResilienceStream

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")
E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Exception)


@cache
def _streams() -> tuple[
    Callable[..., ResilienceStream[Any]], Callable[..., SyncResilienceStream[Any]]
]:
    """Import what makes streams with the first of them: it is a quarter of the package's import."""
    from ._streaming import stream_of, sync_stream_of

    return stream_of, sync_stream_of


class ResiliencePipeline(Generic[E_co]):
    """An immutable onion of strategies; built by `ResiliencePipelineBuilder`.

    One pipeline serves any number of calls at once, on any event loop and in any thread.

    Attributes:
        name: Its name, or `None`.
        instance: Tells pipelines of one name apart, or `None`.
        strategies: The strategies' options, outermost first, nested pipelines flattened.
        empty: A pipeline without strategies: runs the call as it is.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_close_timeout",
        "_finder",
        "_gate",
        "_has_clock",
        "_head",
        "_inside",
        "_layers",
        "_makes_attempts",
        "_now",
        "_outlet",
        "_parts",
        "_quick",
        "_rescue",
        "_runs_in_tasks",
        "_thread_finder",
        "_watched",
        "instance",
        "name",
        "strategies",
    )

    empty: ClassVar[ResiliencePipeline[Never]]

    #: Whether its strategies may be others at the next call, as those of a registry's are.
    _reloads: ClassVar[bool] = False

    name: str | None
    instance: str | None
    strategies: tuple[Strategy[Any], ...]
    #: What calls go through; the strategies alone; and those with all who listen told.
    _head: Handler
    _inside: Handler
    _watched: Handler
    _outlet: Outlet
    _layers: tuple[Layer, ...]
    _clock: Clock | None
    _close_timeout: float
    _has_clock: bool
    _finder: Finder
    _thread_finder: Finder
    # Of an outermost circuit breaker: gives the refusal of a call that comes during its break.
    _gate: Callable[[str | None], Exception | None] | None
    _makes_attempts: bool
    _now: Callable[[], float]
    _parts: tuple[Part, ...]
    # What `execute` calls in place of the head, and what then sees to a failure, if anything does.
    _quick: Handler
    _rescue: Callable[[ResilienceContext, Exception], Awaitable[Any]] | None
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
        parts: tuple[Part, ...] = (),
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        """Not for users: `ResiliencePipelineBuilder.build` makes pipelines."""
        set_once = super().__setattr__
        set_once("name", name)
        set_once("instance", instance)
        set_once("_layers", layers)
        set_once("strategies", tuple(s for layer in layers for s in layer.strategies))
        set_once("_runs_in_tasks", any(map(runs_in_tasks, self.strategies)))
        set_once("_makes_attempts", any(map(makes_attempts, self.strategies)))
        now = monotonic if clock is None else clock.now
        outlet = Outlet(name, instance, listeners, now)
        watched = outlet.watched(head)
        set_once("_outlet", outlet)
        set_once("_head", watched if listeners else head)
        set_once("_inside", head)
        set_once("_watched", watched)
        set_once("_gate", None if listeners else gate_of(head))
        quick, rescue = (None if listeners else shortcut_of(head)) or (self._head, None)
        set_once("_quick", quick)
        set_once("_rescue", rescue)
        set_once("_parts", parts)
        set_once("_close_timeout", close_timeout)
        set_once("_clock", clock)
        set_once("_has_clock", clock is not None)
        set_once("_finder", finder if clock is None else RuntimeFinder(clock))
        set_once("_thread_finder", thread_finder if clock is None else ThreadFinder(clock))
        set_once("_now", now)

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
            check_callable(fn, "execute")
        if context is None:
            context = BlankContext()  # `begun`, whose frame costs as much as a bare call
            context.operation_key = operation_key
            context.idempotent = idempotent
            context.attempt = 0
            context.pipeline_name = self.name
            context._finder = self._finder
            context._fn = fn
            context._args = args
            context._stream = None
            context._sync = None
            context._invocations = 0
            context._history = None
            context._rest = None
        else:
            check_context(context)
            context.begin(self.name, self._finder, fn, args)
        token = enter(context)
        head = self._quick  # called as a method it would cost an eighth of a bare call more
        if switches.on:
            head = self._switched_head()
        try:
            try:
                return await head(context)  # type: ignore[no-any-return]
            except Exception as caught:
                if self._rescue is None or head is not self._quick:
                    raise
                error = caught
            try:
                return await self._rescue(context, error)  # type: ignore[no-any-return]
            finally:
                del error
        finally:
            context._fn = None  # `context.end()`, as far as it concerns a call
            context._args = ()
            try:  # noqa: SIM105 - `leave(token)`; its frame costs a third of a bare call
                reset(token)
            except ValueError:
                pass

    def _switched_head(self) -> Handler:
        """Give what calls go through while something is switched on for all pipelines."""
        return straight if switches.disabled else self._watched

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
            if not callable(fn):
                check_callable(fn, "settle")
            now = self._now
            started = now()
            if self._gate is not None and context is None and not switches.on:
                refusal = self._gate(operation_key)
                if refusal is not None:
                    if self._makes_attempts:  # none was made
                        return _rejected(refusal, (), 0)
                    return _rejected(refusal, now() - started, 1)
            context = self._begun(context, operation_key, idempotent, fn, args)
        except Exception as error:  # noqa: BLE001 - settle never raises one
            return Failure(error)
        return await self._settle(context, started)

    def _begun(
        self,
        context: ResilienceContext | None,
        operation_key: str | None,
        idempotent: bool,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        sync: bool = False,
    ) -> ResilienceContext:
        """Give the caller's context, or a new one, bound to an execution that starts now."""
        own_finder = self._thread_finder if sync else self._finder
        if context is None:
            context = begun(operation_key, idempotent, self.name, own_finder, fn, args)
        else:
            check_context(context)
            context.begin(self.name, own_finder, fn, args)
        if sync:
            context._sync, context._around = Orphans(), None
        return context

    async def _settle(self, context: ResilienceContext, started: float) -> Outcome[Any, E_co]:
        head = self._switched_head() if switches.on else self._head
        makes_attempts = self._makes_attempts and head is not straight
        history = context._history = History() if makes_attempts else None
        result: Any = None
        error: Exception | None = None
        tries: tuple[Attempt, ...] | float = ()
        token = enter(context)
        try:
            try:
                result = await head(context)
            except Exception as caught:  # noqa: BLE001 - settle never raises one
                error = caught
            finally:
                context.end()
                leave(token)
            if history is None:
                tries, count = self._now() - started, 1
            else:
                tries, count = history.tries(result, error), history.count
            if error is None:
                return settled_success(result, tries, count)
            if context.is_own(error):
                return _rejected(error, tries, count)
            return settled_error(Failure, error, tries, count)
        finally:
            # An error's traceback leads to this frame and those inside: none may lead to the error.
            if history is not None:
                history.clear()
            error, tries = None, ()

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
        check_callable(factory, "execute_stream")
        begun = partial(self._begun, context, operation_key, idempotent, factory, args)
        asked = commit_when, max_held, idle_timeout, total_timeout
        stream_of, _ = _streams()
        return stream_of(self, begun, context, asked)

    # ---- in threads

    def execute_sync(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> T:
        """Call `fn(*args)` through the strategies, in this thread and without an event loop.

        With a timeout or hedging in the pipeline attempts run in worker threads, with the caller's
        context variables. A thread can't be stopped: an attempt that timed out, or lost, runs on
        unobserved, keeps its permit until it ends, and what it returns then is closed. It can look
        at `current_context().cancelled`. The arguments are those of `execute`.

        Raises:
            MisuseError: `fn` can't be called or returns an awaitable, or a hook does.
            ExecutionRejectedError: A strategy refused the call or gave up on it.
        """
        if not callable(fn):
            check_callable(fn, "execute_sync")
        context = self._begun(context, operation_key, idempotent, fn, args, sync=True)
        head = self._switched_head() if switches.on else self._head
        token = enter(context)
        try:
            return run_here(head(context), self._clock)  # type: ignore[no-any-return]
        finally:
            context.end()
            leave(token)

    def settle_sync(
        self,
        fn: Callable[[*Ts], T],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
    ) -> Outcome[T, E_co]:
        """Call `fn(*args)` as `execute_sync` does, and return the outcome with its attempts.

        Never raises an `Exception`; what is none, `KeyboardInterrupt` for instance, passes.
        """
        try:
            check_callable(fn, "settle_sync")
            started = self._now()
            context = self._begun(context, operation_key, idempotent, fn, args, sync=True)
        except Exception as error:  # noqa: BLE001 - settle never raises one
            return Failure(error)
        return run_here(self._settle(context, started), self._clock)

    def execute_stream_sync(
        self,
        factory: Callable[[*Ts], Iterable[T] | AbstractContextManager[Iterable[T], Any]],
        *args: *Ts,
        operation_key: str | None = None,
        idempotent: bool = True,
        context: ResilienceContext | None = None,
        commit_when: Callable[[T], object] | None = None,
        max_held: int = 64,
        idle_timeout: Duration | None = None,
        total_timeout: Duration | None = None,
    ) -> SyncResilienceStream[T]:
        """Guard a stream of synchronous code up to its first chunk, then hand it to the caller.

        Args:
            factory: A function that returns an iterable, a generator, or a context manager whose
                value is one.
            args: Arguments for `factory`.
            operation_key: As for `execute`.
            idempotent: As for `execute`.
            context: As for `execute`.
            commit_when: As for `execute_stream`, and so the others.
            max_held: See there.
            idle_timeout: See there. Where it is given, each chunk is read in a worker thread.
            total_timeout: See there; and the same.

        Raises:
            MisuseError: `factory` can't be called.
            OptionsError: One or more options have bad values.
        """
        check_callable(factory, "execute_stream_sync")
        begun = partial(self._begun, context, operation_key, idempotent, factory, args, sync=True)
        asked = commit_when, max_held, idle_timeout, total_timeout
        _, sync_stream_of = _streams()
        return sync_stream_of(self, begun, context, asked)

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
        self,
        fn: Callable[P, Generator[T, Any, Any]] | Callable[P, Iterator[T]],
        *,
        operation_key: str | None = None,
        idempotent: bool = True,
    ) -> Callable[P, SyncResilienceStream[T]]: ...
    @overload
    def wrap(
        self,
        fn: Callable[P, T],
        *,
        operation_key: str | None = None,
        idempotent: bool = True,
    ) -> Callable[P, T]: ...
    @overload
    def wrap(
        self, fn: None = None, *, operation_key: str | None = None, idempotent: bool = True
    ) -> Wrapper: ...
    def wrap(
        self, fn: Any = None, *, operation_key: str | None = None, idempotent: bool = True
    ) -> Any:
        """Make a function of the same signature and kind as `fn` that runs through the pipeline.

        A coroutine function becomes a coroutine function, an async generator function a function
        that returns a `ResilienceStream`; a plain function stays one, through `execute_sync`, and a
        generator function gives a `SyncResilienceStream`. Works on methods, and as a decorator with
        or without arguments.

        Args:
            fn: The function.
            operation_key: As for `execute`.
            idempotent: As for `execute`.

        Raises:
            MisuseError: `fn` can't be called.
        """
        if fn is None:
            return Wrapper(self, operation_key, idempotent)
        return wrapped(self, fn, operation_key=operation_key, idempotent=idempotent)

    # ---- reading

    def _nested(self, inside: Handler) -> Handler:
        """Make a layer of another pipeline of this one, around what comes further in there."""
        return nested(self, inside)

    def __repr__(self) -> str:
        """Read like the builder call."""
        made = described(self.name, self.instance, self._close_timeout, self._layers)
        return f"{made}.build()"


#: What is this pipeline's own rejection is one that its builder has collected.
_rejected: Callable[..., Rejected[Any]] = partial(settled_error, Rejected)


ResiliencePipeline.empty = ResiliencePipeline(
    name=None,
    instance=None,
    layers=(),
    head=invoke,
    clock=None,
    close_timeout=DEFAULT_CLOSE_TIMEOUT,
)
