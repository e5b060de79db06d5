"""The line up to which a stream is guarded, and the bounds on what comes after it.

`StreamOptions` is what the caller of `execute_stream` asked for. `Line` is that for one execution:
it reads a source up to the line, keeps an eye on the time, and knows nothing of carriers.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

from attrs import field, frozen

from ._context import ResilienceContext, refuse_awaitable
from ._errors import DeadlineReached, TimeoutRejectedError
from ._options import checked, count, function, positive_duration, to_seconds_or_none
from ._source import stray_error
from .strategies._base import rejection
from .telemetry._outlet import Outlet

if TYPE_CHECKING:
    from .runtime import Runtime

T = TypeVar("T")


class TotalReached(BaseException):
    """Ends the onion when the total limit has passed: no strategy repeats or replaces that."""


@checked
@frozen(kw_only=True)
class StreamOptions:
    """The options of `execute_stream` that say where its line is, and what bounds the stream."""

    commit_when: Callable[[Any], object] | None = field(default=None, metadata=function())
    max_held: int = field(default=64, metadata=count(minimum=1))
    idle_timeout: float | None = field(
        default=None, converter=to_seconds_or_none, metadata=positive_duration()
    )
    total_timeout: float | None = field(
        default=None, converter=to_seconds_or_none, metadata=positive_duration()
    )

    options_of: ClassVar[str] = "execute_stream()"


NO_OPTIONS: Final = StreamOptions()


def stream_options(
    commit_when: Any, max_held: Any, idle_timeout: Any, total_timeout: Any
) -> StreamOptions:
    """Check the options; most streams have none.

    Raises:
        OptionsError: One or more of them have bad values.
    """
    options = commit_when, idle_timeout, total_timeout
    if max_held == 64 and type(max_held) is int and all(each is None for each in options):
        return NO_OPTIONS
    return StreamOptions(
        commit_when=commit_when,
        max_held=max_held,
        idle_timeout=idle_timeout,
        total_timeout=total_timeout,
    )


class Line:
    """One execution's way to its line, and its time limits.

    Attributes:
        is_timed: Whether anything bounds the stream's time.
        has_expired: Whether a limit has passed beyond the line, which is the end of the stream.
    """

    __slots__ = (
        "_context",
        "_deadline",
        "_options",
        "_outlet",
        "_runtime",
        "has_expired",
        "is_timed",
    )

    def __init__(self, options: StreamOptions, context: ResilienceContext, outlet: Outlet) -> None:
        self._options = options
        self._context = context
        self._outlet = outlet
        self._runtime: Runtime = context.runtime
        self._deadline = math.inf
        self.has_expired = False
        limits = _limit(options.idle_timeout), _limit(options.total_timeout)
        self.is_timed = min(limits) < math.inf

    def tell_of_close_error(self, error: Exception) -> None:
        """Tell that closing a source failed which nobody will get."""
        self._outlet.tell_of_close_error(self._context, error)

    def untimed(self, context: ResilienceContext) -> Line:
        """Make the same line without time limits, for another context."""
        options = StreamOptions(
            commit_when=self._options.commit_when, max_held=self._options.max_held
        )
        return Line(options, context, self._outlet)

    async def start(
        self, prime: Callable[[ResilienceContext], Awaitable[T]], context: ResilienceContext
    ) -> T:
        """Run the onion; the total limit counts from here, and ends it for good."""
        total = _limit(self._options.total_timeout)
        if total == math.inf:
            return await prime(context)
        self._deadline = self._runtime.now() + total
        try:
            late = None if context._stream is None else context._stream.discard
            return await self._runtime.within(total, prime, context, late=late)
        except (DeadlineReached, TotalReached) as reached:
            cause = reached.__cause__
        raise self._total_error() from cause

    def check_total(self, error: Exception | None = None) -> None:
        """End it all if the total limit has passed, and the inside has made something else of that."""
        if self._deadline < math.inf and self._runtime.now() >= self._deadline:
            raise TotalReached from error

    async def read_up_to(self, read: Callable[[], Awaitable[Any]]) -> tuple[deque[Any], bool]:
        """Read a source up to the line.

        Returns:
            The chunks, the last of which is the first past the line, and whether the source has
            ended before it got there.
        """
        held: deque[Any] = deque()
        try:
            held.append(await read())
            while not await self._is_reached(held):
                self.check_total()
                held.append(await self._read_in_time(read))
        except StopAsyncIteration:
            return held, True
        self.has_expired = False
        return held, False

    async def _is_reached(self, held: deque[Any]) -> bool:
        commit_when = self._options.commit_when
        if commit_when is None or len(held) >= self._options.max_held:
            return True
        try:
            answer = commit_when(held[-1])
            if inspect.isawaitable(answer):
                refuse_awaitable(answer, "commit_when")
                answer = await answer
        except StopAsyncIteration as stray:  # or it would pass for the source's end
            raise stray_error(stray) from stray
        return bool(answer)

    async def read(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Read a chunk beyond the line, within what is left of the time."""
        left = self._deadline
        if left < math.inf:
            left -= self._runtime.now()
        idle = _limit(self._options.idle_timeout)
        if idle < left:
            return await self._read_in_time(read)
        try:
            if left > 0:
                return await self._runtime.within(left, lambda _: read(), None)
            cause = None
        except DeadlineReached as reached:
            cause = reached.__cause__
        self.has_expired = True
        raise self._total_error() from cause

    async def _read_in_time(self, read: Callable[[], Awaitable[Any]]) -> Any:
        """Read a chunk that may keep its reader waiting for `idle_timeout`."""
        idle = _limit(self._options.idle_timeout)
        try:
            return await self._runtime.within(idle, lambda _: read(), None)
        except DeadlineReached as reached:
            cause = reached.__cause__
        self.has_expired = True
        raise self._idle_error() from cause

    def _idle_error(self) -> TimeoutRejectedError:
        idle = _limit(self._options.idle_timeout)
        return self._timed_out("idle_timeout", idle, f"no chunk came within {idle:g} s")

    def _total_error(self) -> TimeoutRejectedError:
        total = _limit(self._options.total_timeout)
        return self._timed_out("total_timeout", total, f"the stream took longer than {total:g} s")

    def _timed_out(self, name: str, limit: float, reason: str) -> TimeoutRejectedError:
        context = self._context
        from .strategies._timeout import TimeoutEvent  # most streams have no such limit

        if self._outlet.wants(TimeoutEvent):
            self._outlet.report(TimeoutEvent(context=context, timeout=limit), name)
        return rejection(
            TimeoutRejectedError, context, context.pipeline_name, name, reason, timeout=limit
        )


def _limit(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
