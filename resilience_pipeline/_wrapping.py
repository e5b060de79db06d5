"""`wrap`: functions of the same signature and kind as the one given, through a pipeline."""

from __future__ import annotations

import inspect
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
)
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from typing_extensions import ParamSpec

from ._invoke import check_callable

if TYPE_CHECKING:
    from ._pipeline import ResiliencePipeline
    from ._stream import ResilienceStream
    from ._sync import SyncResilienceStream

T = TypeVar("T")
P = ParamSpec("P")

#: Functions made here that give streams, and the method that runs a stream of theirs. It can't be
#: seen by looking at them: they are plain functions, unlike the generator functions inside.
_streaming: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def wrapped(
    pipeline: ResiliencePipeline[Any], fn: Any, *, operation_key: str | None, idempotent: bool
) -> Any:
    """Make what `ResiliencePipeline.wrap` gives."""
    options: dict[str, Any] = {"operation_key": operation_key, "idempotent": idempotent}
    if isinstance(fn, staticmethod | classmethod):
        method = cast(Any, fn)
        return type(method)(wrapped(pipeline, method.__func__, **options))
    check_callable(fn, "wrap")
    if _is(inspect.iscoroutinefunction, fn):
        # Not simply a function that returns a coroutine: its kind stays.

        @partial(_dress, fn)
        async def call(*args: Any, **kwargs: Any) -> Any:
            target = partial(fn, *args, **kwargs) if kwargs else fn
            return await pipeline.execute(target, *(() if kwargs else args), **options)

        return call
    method_name = _runner_of(fn)
    run: Any = getattr(pipeline, method_name)

    @partial(_dress, fn)
    def call_or_stream(*args: Any, **kwargs: Any) -> Any:
        target = partial(fn, *args, **kwargs) if kwargs else fn
        return run(target, *(() if kwargs else args), **options)

    if method_name != "execute_sync":
        _streaming[call_or_stream] = method_name
    return call_or_stream


def _runner_of(fn: Any) -> str:
    """Name the method that runs a function of this kind."""
    if _is(partial(_streams_by, "execute_stream", inspect.isasyncgenfunction), fn):
        return "execute_stream"
    if _is(partial(_streams_by, "execute_stream_sync", inspect.isgeneratorfunction), fn):
        return "execute_stream_sync"
    return "execute_sync"


def _streams_by(method_name: str, of_kind: Callable[[Any], bool], fn: Any) -> bool:
    function = fn.__func__ if inspect.ismethod(fn) else fn
    made_here = inspect.isfunction(function) and _streaming.get(function) == method_name
    return made_here or of_kind(fn)


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


class Wrapper:
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
    @overload
    def __call__(
        self, fn: Callable[P, Generator[T, Any, Any]] | Callable[P, Iterator[T]]
    ) -> Callable[P, SyncResilienceStream[T]]: ...
    @overload
    def __call__(self, fn: Callable[P, T]) -> Callable[P, T]: ...
    def __call__(self, fn: Any) -> Any:
        wrap: Any = self._pipeline.wrap
        return wrap(fn, **self._options)
