"""Streams: guarded up to the first chunk, then handed to the consumer.

`execute_stream` is the same onion around "call the factory, read the first chunk". What comes out
is *primed*; it is committed in one place, `ResilienceStream._open`, and from then on chunks pass.

Which task runs a source is the business of its carrier, see `_carriers`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ._carriers import ENDED, Carrier, OwnedSource, OwnSource, attach, is_translation
from ._context import ResilienceContext, current, leave
from ._errors import DeadlineReached, MisuseError
from ._source import is_source
from .strategies._base import Handler

if TYPE_CHECKING:
    from .runtime import Interruption, Runtime, Waiter

T_co = TypeVar("T_co", covariant=True)


class Primed:
    """A source whose first chunk has been read, on its way out through the onion."""

    __slots__ = ("carrier", "first")

    def __init__(self, carrier: Carrier, first: Any) -> None:
        self.carrier = carrier
        self.first = first


class StreamExecution:
    """What the onion of a stream does where that of a call invokes its callback."""

    __slots__ = ("_close_timeout", "_open")

    def __init__(self, close_timeout: float) -> None:
        self._close_timeout = close_timeout
        #: Primed sources that nobody has closed or committed yet.
        self._open: set[Primed] = set()

    async def prime(self, context: ResilienceContext, make: Callable[[], Any]) -> Primed:
        """Open a source and read its first chunk; what fails is closed before this raises."""
        runtime = context.runtime
        kind = OwnedSource if runtime.owns_sources else OwnSource
        carrier = kind(runtime, make, self._close_timeout)
        primed = Primed(carrier, await carrier.start())
        self._open.add(primed)
        return primed

    async def adopt(self, context: ResilienceContext, value: Any) -> Primed:
        """Prime what a fallback gave: a source is run like any other, a value becomes one chunk."""
        if is_source(value):
            return await self.prime(context, lambda: value)
        return await self.prime(context, partial(_one_chunk, value))

    def first_chunk(self, result: Any) -> Any:
        """What predicates and hooks see as the result: the first chunk, `None` without one."""
        if not isinstance(result, Primed):
            return result
        return None if result.first is ENDED else result.first

    async def discard(self, result: Any) -> None:
        """Close a primed source that nobody will receive."""
        if isinstance(result, Primed) and result in self._open:
            self._open.discard(result)
            with suppress(Exception):  # what made us discard it is the news
                await result.carrier.close(shielded=True)

    async def settle(self, kept: Primed | None) -> None:
        """Close what was primed and not discarded, by a strategy that lost it."""
        for other in [each for each in self._open if each is not kept]:
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


class ResilienceStream(AsyncIterator[T_co], Generic[T_co]):
    """A stream guarded by a pipeline up to its first chunk; made by `execute_stream`.

    Nothing runs until the first chunk is asked for. It has one consumer and is read once. Used with
    `async with` its source is closed on the way out; a plain `async for` that is left early closes
    it as soon as Python lets the stream go.

    Example:
        >>> async with pipeline.execute_stream(connect) as stream:
        ...     async for chunk in stream:
        ...         print(chunk)
    """

    __slots__ = (
        "__weakref__",
        "_carrier",
        "_closers",
        "_closing",
        "_committed",
        "_execution",
        "_interrupted",
        "_interruption",
        "_iterated",
        "_leaving",
        "_over",
        "_pulled",
        "_pulling",
        "_runtime",
        "_start",
        "_trouble",
    )

    def __init__(self, start: Callable[[], StreamStart]) -> None:
        self._start = start
        self._carrier: Carrier | None = None
        self._runtime: Runtime | None = None
        self._execution: StreamExecution | None = None
        self._interruption: Interruption | None = None
        self._closers: list[Waiter] = []
        self._trouble: BaseException | None = None
        self._committed = False
        #: Nothing more comes; it is to be closed; it is being closed, not by a reader.
        self._over = False
        self._closing = False
        self._leaving = False
        self._interrupted = False
        self._pulling = False
        self._pulled = False
        self._iterated = False

    @property
    def committed(self) -> bool:
        """Whether the stream has been handed to its consumer, after which nothing is repeated."""
        return self._committed

    def __aiter__(self) -> ResilienceStream[T_co]:
        """Iterate over the chunks, once.

        Raises:
            MisuseError: The stream was iterated over before.
        """
        # Asking for the iterator of one's iterator is no second iteration: nothing has been pulled.
        if self._iterated and self._pulled:
            msg = "this stream was iterated over before: a stream is read once, make another one"
            raise MisuseError(msg)
        self._iterated = True
        return self

    async def __anext__(self) -> T_co:
        """Give the next chunk; the first one is what the pipeline guards.

        Raises:
            MisuseError: Another task is waiting for a chunk already.
        """
        if self._pulling:
            msg = "another task is waiting for this stream's next chunk: a stream has one consumer"
            raise MisuseError(msg)
        self._pulled = True
        if self._over or self._closing:
            raise StopAsyncIteration
        self._pulling = True
        try:
            chunk: T_co = await (self._read() if self._committed else self._open())
        finally:
            self._pulling = False
            if self._closers:
                self._wake_closers()
        return chunk

    # ---- the first chunk

    async def _open(self) -> Any:
        try:
            primed = await self._prime(self._start())
        except DeadlineReached:
            # Closed by another task while the first chunk was awaited.
            self._over = True
            raise StopAsyncIteration from None
        except BaseException as error:
            self._over = True
            if self._closing and isinstance(error, Exception):
                # So it was, and what its source made of that is no concern of its consumer's.
                raise StopAsyncIteration from None
            raise
        self._commit(primed)
        if primed.first is ENDED or self._closing:
            await self._finish(for_closer=primed.first is not ENDED)
        return primed.first

    async def _prime(self, begun: StreamStart) -> Primed:
        context, execution = begun.context, begun.execution
        self._runtime = context.runtime
        self._execution = execution
        self._interruption = context.runtime.interruption()
        primed: Primed | None = None
        token, around = current.set(context), _inside.get()
        _inside.set((*around, execution))
        try:
            primed = made = await self._interruption.guard(begun.prime, context)
        except GeneratorExit:
            execution.abandon()
            raise
        finally:
            # Past the guard an interruption would hit something else.
            self._interruption = None
            _inside.set(around)
            context.end()
            leave(token)
            await execution.settle(primed)
        return made

    def _commit(self, primed: Primed) -> None:
        """Hand the stream to its consumer: the one place, and there is no way back."""
        self._carrier = primed.carrier
        self._committed = True

    # ---- all others

    async def _read(self) -> Any:
        carrier = self._carrier
        assert carrier is not None
        interruption = self._interruption
        if interruption is None or not interruption.is_mine():
            interruption = self._interruption = self._runtime_now().interruption()
        try:
            chunk = await carrier.read()
        except StopAsyncIteration:
            if self._interrupted:
                interruption.confirm(None)
            await self._finish(for_closer=self._interrupted)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by _fail
            if self._interrupted and interruption.confirm(error):
                await self._finish(for_closer=True)
            await self._fail(carrier, error)
        if self._closing:
            interruption.confirm(None)
            await self._finish(for_closer=True)
        return chunk

    def _runtime_now(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    async def _finish(self, *, for_closer: bool) -> NoReturn:
        """Close the source after its end, or for another task that wants it closed; ends the loop."""
        self._over = True
        assert self._carrier is not None
        try:
            await self._carrier.close()
        except BaseException as error:
            if for_closer:
                self._leave_to_closer(error)
            raise
        raise StopAsyncIteration

    def _leave_to_closer(self, error: BaseException) -> None:
        """End the loop instead: the error is of another task's making, which closes the stream."""
        if isinstance(error, Exception):
            self._trouble = error
            raise StopAsyncIteration from None

    async def _fail(self, carrier: Carrier, error: BaseException) -> NoReturn:
        """Close the source after its failure and let that out, unless its manager swallows it."""
        self._over = True
        try:
            try:
                swallowed = await carrier.close(error, shielded=True)
            except BaseException as raised:
                if is_translation(raised, error) or not isinstance(raised, Exception):
                    if self._interrupted:
                        self._leave_to_closer(raised)
                    raise
                attach(error, raised)
                swallowed = False
            if swallowed and isinstance(error, Exception):
                raise StopAsyncIteration
            if self._interrupted:
                self._leave_to_closer(error)
            raise error
        finally:
            del error  # or it, its traceback and this frame would hold one another

    # ---- leaving

    async def aclose(self) -> None:
        """Close the stream and its source, at any time and from any task; idempotent.

        A reader that waits for a chunk meanwhile finds the stream ended. An error raised by the
        source's own cleanup comes out of the first call. Returns when the source is closed, whoever
        closes it, unless it is called from within the source.
        """
        if self._pulling:
            self._close_under_reader()
        elif not self._over:
            await self._close()
            return
        if (self._pulling or self._leaving) and self._execution not in _inside.get():
            waiter = self._runtime_now().waiter()
            self._closers.append(waiter)
            await waiter.wait()
            if self._trouble is not None:
                raise self._take_trouble()

    def _take_trouble(self) -> BaseException:
        error, self._trouble = self._trouble, None
        assert error is not None
        return error

    async def _close(self) -> None:
        self._over = self._closing = self._leaving = True
        try:
            if self._carrier is not None:
                await self._carrier.close()
        finally:
            self._leaving = False
            self._wake_closers()

    def _close_under_reader(self) -> None:
        """Have the reading task close the source."""
        first = not self._closing
        self._closing = True
        # Over means that the reader is closing the source already: that is not to be interrupted.
        if first and not self._over:
            if isinstance(self._carrier, OwnedSource):
                self._interrupted = self._carrier.interrupt()
            elif self._interruption is not None:
                self._interrupted = True
                self._interruption.interrupt()

    def _wake_closers(self) -> None:
        closers, self._closers = self._closers, []
        for waiter in closers:
            waiter.wake()

    async def __aenter__(self) -> ResilienceStream[T_co]:
        """Enter a block at whose end the source is closed; runs nothing yet."""
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the source; the block's own error comes first, the closing's is attached to it."""
        try:
            await self.aclose()
        except Exception as raised:
            if exc is None:
                raise
            attach(exc, raised)

    def __del__(self) -> None:
        """Have the source closed by the event loop when the stream was dropped unread."""
        carrier = getattr(self, "_carrier", None)
        if carrier is not None and not self._over:
            carrier.abandon()

    def __repr__(self) -> str:
        """Show which side of the line the stream is on."""
        state = "over" if self._over else "committed" if self._committed else "not committed"
        return f"<ResilienceStream {state}>"


#: The executions whose sources, hooks or predicates run the code that asks.
_inside: ContextVar[tuple[StreamExecution, ...]] = ContextVar(
    "resilience_pipeline.inside", default=()
)


class StreamStart:
    """What the first pull needs: the context, its execution and the onion's outermost handler."""

    __slots__ = ("context", "execution", "head")

    def __init__(
        self, context: ResilienceContext, execution: StreamExecution, head: Handler
    ) -> None:
        self.context = context
        self.execution = execution
        self.head = head

    async def prime(self, context: ResilienceContext) -> Primed:
        """Run the onion; what a strategy put in place of a source is made one."""
        result = await self.head(context)
        return result if isinstance(result, Primed) else await self.execution.adopt(context, result)
