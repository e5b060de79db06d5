"""A stream's onion: from the first pull to a source that has been read up to the line.

What comes out is *primed*, and belongs to somebody at every moment: to the execution that has
opened it until it is discarded, replaced, or kept by the one who commits it, see `_stream`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ._carriers import Carrier, OwnedSource, OwnSource
from ._context import ResilienceContext
from ._line import Line
from ._resuming import ResumingCarrier, Resumption
from ._source import Source, SyncSource, is_source, is_sync_source
from .strategies._base import Handler

if TYPE_CHECKING:
    from ._recording import Recorder
    from ._sharing import ReaderCarrier, SharedReader, Tap


class Primed:
    """A source that has been read up to the line, on its way out through the onion.

    Attributes:
        carrier: Who runs the source.
        held: The chunks that have been read, oldest first.
        ended: Whether the source has ended with them.
    """

    __slots__ = ("carrier", "ended", "held")

    def __init__(self, carrier: Carrier, held: deque[Any], ended: bool) -> None:
        self.carrier = carrier
        self.held = held
        self.ended = ended


class StreamExecution:
    """What the onion of a stream does where that of a call invokes its callback."""

    __slots__ = ("_close_timeout", "_line", "_open", "_owned")

    def __init__(self, close_timeout: float, owned: bool, line: Line) -> None:
        self._close_timeout = close_timeout
        self._line = line
        #: Whether sources live in tasks of their own, because a strategy runs them in others that
        #: end before they do.
        self._owned = owned
        #: Primed sources that nobody has closed or committed yet.
        self._open: set[Primed] = set()

    def own(self) -> None:
        """Have sources that are opened from now on live in tasks of their own."""
        self._owned = True

    async def prime(self, context: ResilienceContext, make: Callable[[], Any]) -> Primed:
        """Open a source and read it up to the line; what fails is closed before this raises."""
        runtime = context.runtime
        carrier: OwnSource | OwnedSource
        if context._sync is not None:
            carrier = OwnSource(runtime, SyncSource(make), self._close_timeout)
        elif self._owned or runtime.owns_sources:
            carrier = OwnedSource(runtime, Source(make), self._close_timeout)
        else:
            carrier = OwnSource(runtime, Source(make), self._close_timeout)
        return await self._primed(carrier)

    async def _primed(self, carrier: OwnSource | OwnedSource | ReaderCarrier) -> Primed:
        carrier.on_close_error = self._line.tell_of_close_error
        try:
            primed = Primed(carrier, *await carrier.start(self._line.read_up_to))
        except Exception as error:
            self._line.check_total(error)
            raise
        self._open.add(primed)
        return primed

    def branch(self, context: ResilienceContext) -> StreamExecution:
        """Make the execution of a source that several streams will share, and that outlives this one.

        It has the same line and no time limits, which are each reader's own; a source gets a task
        of its own wherever there are tasks.
        """
        return StreamExecution(self._close_timeout, True, self._line.untimed(context))

    async def tapped(self, context: ResilienceContext, head: Handler) -> Tap:
        """Run a branch's onion, and take what comes out of it for several readers."""
        try:
            primed = await self.adopted(context, await head(context))
        except GeneratorExit:
            self.abandon()
            raise
        except BaseException:
            await self.settle(None)
            raise
        await self.settle(primed)
        from ._sharing import Tap  # the few who share sources pay for it

        return Tap(primed.carrier, primed.held, primed.ended)

    async def share(self, reader: SharedReader) -> Primed:
        """Prime a reader of a source that others read as well."""
        from ._sharing import ReaderCarrier

        return await self._primed(ReaderCarrier(reader))

    async def adopt(self, context: ResilienceContext, value: Any) -> Primed:
        """Prime what a fallback gave: a source is run like any other, a value becomes one chunk."""
        if context._sync is not None:
            source = value if is_sync_source(value) else iter((value,))
            return await self.prime(context, lambda: source)
        if is_source(value):
            return await self.prime(context, lambda: value)
        return await self.prime(context, partial(_one_chunk, value))

    async def adopted(self, context: ResilienceContext, result: Any) -> Primed:
        """Give a primed source for what came out of the onion, which a strategy may have replaced."""
        return result if isinstance(result, Primed) else await self.adopt(context, result)

    def first_chunk(self, result: Any) -> Any:
        """What predicates and hooks see as the result: the first chunk, `None` without one."""
        if not isinstance(result, Primed):
            return result
        return result.held[0] if result.held else None

    def hold(self, result: Any, release: Callable[[], object]) -> bool:
        """Have something released when the source of a result has been closed; false without one."""
        if not isinstance(result, Primed):
            return False
        result.carrier.hold(release)
        return True

    def resumable(self, result: Any, resumption: Resumption) -> Any:
        """Have a source that fails later on replaced by the next one."""
        if not isinstance(result, Primed) or result not in self._open:
            return result
        carrier = ResumingCarrier(result, self, resumption)
        primed = Primed(carrier, result.held, result.ended)
        self._open.discard(result)
        self._open.add(primed)
        return primed

    def recorded(self, result: Primed, recorder: Recorder) -> Primed:
        """Have the chunks of a source, and its end, told to a recorder."""
        from ._recording import RecordingCarrier  # by few streams

        carrier = RecordingCarrier(result, recorder)
        # Unless it is empty it goes on to where its end is read, which has to be seen.
        primed = Primed(carrier, result.held, result.ended and not result.held)
        self._open.discard(result)
        self._open.add(primed)
        return primed

    async def discard(self, result: Any) -> None:
        """Close a primed source that nobody will receive."""
        if isinstance(result, Primed) and result in self._open:
            self._open.discard(result)
            try:
                await result.carrier.close(shielded=True)
            except Exception as error:  # noqa: BLE001 - what made us discard it is the news
                self._line.tell_of_close_error(error)

    async def settle(self, kept: Primed | None) -> None:
        """Close what was primed and not discarded, by a strategy that lost it."""
        for other in [each for each in list(self._open) if each is not kept]:
            try:
                await self.discard(other)
            except BaseException:  # the caller has gone: nothing is kept
                await self.settle(None)
                raise
        self._open.clear()

    def abandon(self) -> None:
        """Close what is primed when nothing can be awaited any more."""
        while self._open:
            self._open.pop().carrier.abandon()


async def _one_chunk(value: Any) -> AsyncIterator[Any]:
    yield value


class StreamStart:
    """What the first pull needs: the context, its execution and the onion's outermost handler.

    Args:
        context: The execution's context.
        execution: What it does where a call invokes its callback.
        line: Where it is committed.
        head: The outermost handler.
        watched: Has listeners told of what goes through a handler, if there are any.
    """

    __slots__ = ("_head", "_watched", "context", "execution", "line")

    def __init__(
        self,
        context: ResilienceContext,
        execution: StreamExecution,
        line: Line,
        head: Handler,
        watched: Callable[[Handler], Handler] | None = None,
    ) -> None:
        self.context = context
        self.execution = execution
        self.line = line
        self._head = head
        self._watched = watched

    def prime(self, context: ResilienceContext) -> Awaitable[Primed]:
        """Run the onion within the limits there are, and have it watched."""
        if self._watched is not None:
            return self._watched(self._prime_in_time)(context)
        return self._prime_in_time(context)

    def _prime_in_time(self, context: ResilienceContext) -> Awaitable[Primed]:
        if self.line.is_timed:
            return self.line.start(self._prime, context)
        return self._prime(context)

    async def _prime(self, context: ResilienceContext) -> Primed:
        # What a strategy put in place of a source is made one.
        return await self.execution.adopted(context, await self._head(context))
