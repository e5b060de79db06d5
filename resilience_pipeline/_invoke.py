"""The innermost handlers: where a pipeline's chain ends, and where a nested one goes on."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from ._cancellation import NEVER, Cancelled, running_flag
from ._context import ResilienceContext, Rest
from ._errors import MisuseError
from ._switches import switches
from .strategies import Handler

if TYPE_CHECKING:
    from ._pipeline import ResiliencePipeline


def invoke(context: ResilienceContext) -> Awaitable[Any]:
    """Call the callback: the end of every chain of handlers.

    No coroutine of its own: what the callback returns is handed to the layer around as it is.
    """
    rest = context._rest
    if rest is not None:
        return _resume(context, rest)
    if context._sync is not None:
        return _invoke_in_thread(context)
    context._invocations += 1
    fn: Any = context._fn
    if context._stream is not None:
        return context._stream.prime(context, partial(fn, *context._args))
    args = context._args
    awaitable: Any = fn(*args) if args else fn()  # which is faster by a fifth of a bare call
    if type(awaitable) is not CoroutineType and not inspect.isawaitable(awaitable):
        raise MisuseError(_not_awaitable(fn, awaitable))
    return awaitable  # pyright: ignore[reportUnknownVariableType]


def straight(context: ResilienceContext) -> Awaitable[Any]:
    """Call the callback past all strategies there are; `invoke` is the way of those that have none."""
    return invoke(context)


#: What most results are, and nobody can await; to ask costs as much as many bare calls.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, tuple, list, dict, set})


def _invoke_in_thread(context: ResilienceContext) -> Awaitable[Any]:
    """Call the callback of a synchronous call, unless that has been given up on.

    Raises:
        Cancelled: It has been, and is not counted as an invocation.
    """
    flag = running_flag.get()
    if flag is NEVER and context._around is None:
        context._invocations += 1
    elif not flag.unless_set(context._count_in_thread):
        raise Cancelled
    fn: Any = context._fn
    if context._stream is not None:
        return context._stream.prime(context, partial(fn, *context._args))
    return _call(fn, context._args)


async def _call(fn: Any, args: tuple[Any, ...]) -> Any:
    result = fn(*args) if args else fn()
    if type(result) in _PLAIN:
        return result
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        msg = (
            f"{_name_of(fn)} returned {result!r} in a synchronous call, where nothing can be "
            f"awaited: use execute() in an event loop, or a plain function"
        )
        raise MisuseError(msg)
    return result


def nested(pipeline: ResiliencePipeline[Any], inside: Handler) -> Handler:
    """Put a built pipeline's handlers around `inside`.

    They were bound once, to `invoke`, and stay so, because their state is shared. So `invoke` has
    to be told for each execution that there is more to come: the context carries the rest. A clock
    of the pipeline's own drives its strategies and nothing else; without one they go by the clock
    of the pipeline around them.
    """
    plain_head = pipeline._head
    finder = pipeline._finder if pipeline._has_clock else None
    thread_finder = pipeline._thread_finder

    async def handle(context: ResilienceContext) -> Any:
        head = plain_head
        if switches.on:
            if switches.disabled:
                return await inside(context)
            head = pipeline._switched_head()
        outer, outer_finder = context._rest, context._finder
        context._rest = (inside, outer_finder, outer)
        if finder is not None:
            context._finder = finder if context._sync is None else thread_finder
        try:
            return await head(context)
        finally:
            context._rest, context._finder = outer, outer_finder

    return handle


async def _resume(context: ResilienceContext, rest: Rest) -> Any:
    """Go on inside of a nested pipeline, with the rest of what is around that for its own end."""
    own = context._finder
    inside, context._finder, context._rest = rest
    try:
        return await inside(context)
    finally:
        context._rest, context._finder = rest, own


def _not_awaitable(fn: object, result: object) -> str:
    got = f"{_name_of(fn)} returned {result!r}, which can't be awaited"
    if inspect.isasyncgen(result):
        return f"{got}: run async generator functions with execute_stream()"
    if inspect.isgenerator(result):
        result.close()
        return f"{got}: make it a coroutine function, or an async generator for execute_stream()"
    if hasattr(result, "__aiter__"):
        return f"{got}: run what gives an async iterable with execute_stream()"
    return f"{got}: make it a coroutine function (async def), or call it with execute_sync()"


def _name_of(fn: object) -> str:
    name = getattr(fn, "__qualname__", None)
    return f"{name}()" if name else repr(fn)


def check_callable(fn: object, called: str) -> None:
    if callable(fn):
        return
    msg = f"{called}() takes a function, got {fn!r}"
    if inspect.isawaitable(fn) or inspect.isasyncgen(fn) or inspect.isgenerator(fn):
        msg += f": pass the function itself, {called}(fn{'' if called == 'wrap' else ', *args'})"
    if inspect.iscoroutine(fn):
        fn.close()
    raise MisuseError(msg)
