"""Pipelines whose strategies may be others at the next call: what a registry hands out.

A handle is a pipeline by type and holds nothing but a cell, in which the pipeline that serves now
is found. To reload is to put another pipeline into the cell: one reference. Each call reads it
once and runs on what it read to its end, so no call ever sees a part of the old pipeline and a part
of the new one, and no lock is needed.

What can't be answered by one pipeline, because another nests a handle, is asked for anew whenever
it is needed: the handlers, the list of strategies, and who has to own a stream's source.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from typing_extensions import TypeVar

from ._context import ResilienceContext
from ._layers import makes_attempts
from ._pipeline import ResiliencePipeline
from .strategies import Handler, Strategy

E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Exception)


class Cell(Protocol):
    """Where a handle looks for the pipeline that serves now."""

    current: ResiliencePipeline[Any]


class PipelineHandle(ResiliencePipeline[E_co]):
    """A pipeline that passes everything on to the one its cell holds at that moment."""

    __slots__ = ("_cell",)

    _reloads: ClassVar[bool] = True

    _cell: Cell

    def __init__(self, cell: Cell) -> None:
        object.__setattr__(self, "_cell", cell)

    def __getattr__(self, name: str) -> Any:
        """Read off the current pipeline what a pipeline keeps; a handle keeps nothing of it."""
        if name == "_cell":  # of a handle that was made without its constructor
            raise AttributeError(name)
        return getattr(self._cell.current, name)

    # For type checkers these are the base class's. Arguments are passed on as they come, in one piece,
    # which spares every call a bare one.
    if not TYPE_CHECKING:

        async def execute(self, /, *args: Any, **options: Any) -> Any:
            try:
                return await self._cell.current.execute(*args, **options)
            finally:
                # An error's traceback leads here, and a breaker of this very pipeline may keep it.
                del self

        async def settle(self, /, *args: Any, **options: Any) -> Any:
            try:
                return await self._cell.current.settle(*args, **options)
            finally:
                del self  # see `execute`

        def execute_stream(self, /, *args: Any, **options: Any) -> Any:
            stream = self._cell.current.execute_stream(*args, **options)
            stream._keeps = self._cell
            return stream

        def execute_sync(self, /, *args: Any, **options: Any) -> Any:
            try:
                return self._cell.current.execute_sync(*args, **options)
            finally:
                del self  # see `execute`

        def settle_sync(self, /, *args: Any, **options: Any) -> Any:
            try:
                return self._cell.current.settle_sync(*args, **options)
            finally:
                del self  # see `execute`

        def execute_stream_sync(self, /, *args: Any, **options: Any) -> Any:
            stream = self._cell.current.execute_stream_sync(*args, **options)
            stream._stream._keeps = self._cell
            return stream

    def _nested(self, inside: Handler) -> Handler:
        first = self._cell.current
        known = first, first._nested(inside)

        def handle(context: ResilienceContext) -> Awaitable[Any]:
            nonlocal known
            pipeline, handler = known
            if self._cell.current is not pipeline:
                pipeline = self._cell.current
                handler = pipeline._nested(inside)
                known = pipeline, handler
            if context._stream is not None and pipeline._runs_in_tasks:
                # The pipeline around was built when nobody could know.
                context._stream.own()
            return handler(context)

        return handle

    def __repr__(self) -> str:
        return repr(self._cell.current)


for _name in (
    "execute",
    "settle",
    "execute_stream",
    "execute_sync",
    "settle_sync",
    "execute_stream_sync",
):
    update_wrapper(getattr(PipelineHandle, _name), getattr(ResiliencePipeline, _name))


class FollowingPipeline(ResiliencePipeline[E_co]):
    """A pipeline that nests a handle, or another one that does."""

    __slots__ = ()

    _reloads: ClassVar[bool] = True

    @property
    def strategies(self) -> tuple[Strategy[Any], ...]:
        return tuple(
            strategy
            for layer in self._layers
            for strategy in (layer if layer.pipeline is None else layer.pipeline).strategies
        )

    @strategies.setter
    def strategies(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, strategies: tuple[Strategy[Any], ...]
    ) -> None:
        """Keep none: they are read off the layers."""

    @property
    def _makes_attempts(self) -> bool:
        return any(map(makes_attempts, self.strategies))

    @_makes_attempts.setter
    def _makes_attempts(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, makes: bool
    ) -> None:
        """Don't keep it either."""
