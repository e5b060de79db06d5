"""Streams: guarded up to the first chunk, then handed to the consumer.

`execute_stream` is the same onion around "call the factory, read the first chunk", see `_priming`.
What comes out is committed in one place, `ResilienceStream._open`, and from then on chunks pass.

Which task runs a source is the business of its carrier, see `_carriers`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ._carriers import Carrier, Pump, attach, close_after, pumped
from ._context import current, leave
from ._errors import DeadlineReached, MisuseError
from ._line import Line
from ._priming import Primed, StreamExecution, StreamStart
from ._source import stray_error

if TYPE_CHECKING:
    from .runtime import Interruption, Runtime, Waiter

T_co = TypeVar("T_co", covariant=True)


async def _given(chunk: Any = None, *, error: BaseException | None = None) -> Any:
    """Await what is known already."""
    try:
        if isinstance(error, GeneratorExit):
            raise stray_error(error) from error
        if error is not None:
            raise error
        return chunk
    finally:
        del error


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
        "_ended",
        "_execution",
        "_held",
        "_interrupted",
        "_interruption",
        "_iterated",
        "_keeps",
        "_leaving",
        "_line",
        "_over",
        "_pulled",
        "_pulling",
        "_pump",
        "_quick",
        "_reader",
        "_run",
        "_runtime",
        "_start",
        "_trouble",
    )

    #: What must not go before the stream does; set by a registry's pipelines alone.
    _keeps: object

    def __init__(self, start: Callable[[], StreamStart]) -> None:
        self._start = start
        self._carrier: Carrier | None = None
        self._runtime: Runtime | None = None
        self._execution: StreamExecution | None = None
        #: Of whoever is waiting for a chunk; and of whoever did last.
        self._interruption: Interruption | None = None
        self._reader: Interruption | None = None
        #: What gives the source's chunks, if that is all there is to do; and its next step, if that
        #: is to be done now.
        self._pump: Pump | None = None
        self._quick: Callable[[], Any] | None = None
        self._run: Callable[..., Any] = operator.call
        self._closers: list[Waiter] = []
        self._trouble: BaseException | None = None
        #: Where its time is bounded, what does it.
        self._line: Line | None = None
        #: Chunks that were read to get to the line, and whether the source has ended with them.
        self._held: deque[Any] | None = None
        self._ended = False
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
        step = self._quick
        if step is None:
            return await self._pull()  # type: ignore[no-any-return]
        # What most chunks of most streams find: the source is an async generator, run by this very
        # task, and nothing stands between. If it has a chunk without waiting for it, then that is
        # all there is to do, at a tenth of the cost of the whole way.
        self._quick, self._pulling = None, True
        try:
            given = self._run(step)
        except BaseException as error:  # noqa: BLE001 - raised again inside
            outcome = _given(error=error)
        else:
            pump = self._pump
            assert pump is not None
            if pump.gi_yieldfrom is not None:
                outcome = pumped(self._run, pump, given)
            elif self._closing:
                outcome = _given(given)
            else:
                self._quick, self._pulling = step, False
                return given  # type: ignore[no-any-return]
        return await self._pull(outcome)  # type: ignore[no-any-return]

    async def _pull(self, chunk: Awaitable[Any] | None = None) -> Any:
        """Give a chunk, which is on its way already or is to be read."""
        if chunk is None:
            if self._pulling:
                msg = (
                    "another task is waiting for this stream's next chunk: a stream has one "
                    "consumer"
                )
                raise MisuseError(msg)
            self._pulled = True
            if self._over or self._closing:
                raise StopAsyncIteration
            self._pulling = True
        try:
            given = await (self._read(chunk) if self._committed else self._open())
        finally:
            self._pulling = False
            if self._closers:
                self._wake_closers()
        if not self._held and self._pump is not None:
            self._quick = self._pump.__next__
        return given

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
        if self._closing or not primed.held:
            await self._finish(for_closer=self._closing)
        return primed.held.popleft()

    async def _prime(self, begun: StreamStart) -> Primed:
        context, execution = begun.context, begun.execution
        self._runtime = context.runtime
        self._execution = execution
        self._interruption = context.runtime.interruption()
        if begun.line.is_timed:
            self._line = begun.line
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
        self._held, self._ended = primed.held, primed.ended
        if self._line is None and not self._ended:
            self._pump, self._run = primed.carrier.pump()
        self._committed = True

    # ---- all others

    async def _read(self, reading: Awaitable[Any] | None) -> Any:
        if self._held:
            return self._held.popleft()
        if self._ended:
            await self._finish(for_closer=False)
        carrier = self._carrier
        assert carrier is not None
        interruption = self._reader
        if interruption is None or not interruption.is_mine():
            interruption = self._reader = self._runtime_now().interruption()
        self._interruption = interruption
        if self._closing:  # by the source itself, in the step that has been taken
            self._close_under_reader()
        try:
            if reading is None:
                line = self._line
                reading = carrier.read() if line is None else line.read(carrier.read)
            chunk = await reading
        except StopAsyncIteration:
            if self._interrupted:
                await interruption.confirm(None)
            await self._finish(for_closer=self._interrupted)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by _fail
            if self._interrupted and await interruption.confirm(error):
                await self._finish(for_closer=True)
            await self._fail(carrier, error)
        finally:
            self._interruption = None
        if self._closing:
            await interruption.confirm(None)
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
                swallowed = await close_after(carrier, error)
            except BaseException as raised:
                if self._interrupted:
                    self._leave_to_closer(raised)
                raise
            if self._line is not None and self._line.has_expired:
                swallowed = False  # which is our news, and not the source's
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
            # In threads the reader may have gone since, and has seen nobody to wake.
            if self._pulling or self._leaving:
                await waiter.wait()
            if self._trouble is not None:
                raise self._take_trouble()

    def _take_trouble(self) -> BaseException:
        error, self._trouble = self._trouble, None
        assert error is not None
        return error

    async def _close(self) -> None:
        self._over = self._closing = self._leaving = True
        self._quick = None
        try:
            if self._carrier is not None:
                await self._carrier.close()
        finally:
            self._leaving = False
            self._wake_closers()

    def _close_under_reader(self) -> None:
        """Have the reading task close the source."""
        self._closing = True
        # Over means that the reader is closing the source already: that is not to be interrupted.
        if not self._over and not self._interrupted:
            done = None if self._carrier is None else self._carrier.interrupt()
            if done is not None:
                self._interrupted = done
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

# Shown and found there, whoever was the first to import it.
ResilienceStream.__module__ = "resilience_pipeline"
