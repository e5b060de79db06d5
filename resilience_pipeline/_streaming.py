"""How a pipeline makes a stream of a factory.

Imported with the first stream: what streams need is a quarter of what an import of everything takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from ._context import ResilienceContext, check_context
from ._invoke import invoke
from ._line import NO_OPTIONS, Line, StreamOptions, stream_options
from ._priming import StreamExecution, StreamStart
from ._stream import ResilienceStream
from ._switches import switches
from ._sync import SyncResilienceStream

if TYPE_CHECKING:
    from ._pipeline import ResiliencePipeline


#: What the caller asked for: `commit_when`, `max_held`, `idle_timeout` and `total_timeout`.
Asked: TypeAlias = tuple[Any, Any, Any, Any]


def stream_of(
    pipeline: ResiliencePipeline[Any],
    begun: Callable[[], ResilienceContext],
    context: object,
    asked: Asked,
) -> ResilienceStream[Any]:
    """Make a stream, which runs nothing until its first pull.

    Args:
        pipeline: What guards it.
        begun: Gives the context of its execution, bound to the factory, when that begins.
        context: The one that the caller gave, to be looked at before that, or `None`.
        asked: Its line and its bounds.

    Raises:
        MisuseError: `context` is none.
        OptionsError: One or more of what was asked for are bad.
    """
    options = stream_options(*asked)
    if context is not None:
        check_context(context)

    def start() -> StreamStart:
        return _start(pipeline, begun(), options)

    return ResilienceStream(start)


def sync_stream_of(
    pipeline: ResiliencePipeline[Any],
    begun: Callable[[], ResilienceContext],
    context: object,
    asked: Asked,
) -> SyncResilienceStream[Any]:
    """Make a stream of synchronous code; see `stream_of`."""
    return SyncResilienceStream(stream_of(pipeline, begun, context, asked), pipeline._clock)


def _start(
    pipeline: ResiliencePipeline[Any], context: ResilienceContext, options: StreamOptions
) -> StreamStart:
    """Begin a stream, at its first pull."""
    head, owned, outlet = pipeline._inside, pipeline._runs_in_tasks, pipeline._outlet
    watched = bool(outlet.listeners)
    if switches.on:
        watched = True
        if switches.disabled:
            head, owned, options, watched = invoke, False, NO_OPTIONS, False
    line = Line(options, context, outlet)
    execution = StreamExecution(pipeline._close_timeout, owned, line)
    context._stream = execution
    return StreamStart(context, execution, line, head, outlet.watched if watched else None)
