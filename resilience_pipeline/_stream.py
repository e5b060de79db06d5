"""Streams: guarded up to the first chunk, then handed to the consumer.

`execute_stream` is the same onion around "call the factory, read the first chunk". What comes out
is *primed*; it is committed in one place, `ResilienceStream._open`, and from then on chunks pass.

Which task runs a source is the business of its carrier, see `_carriers`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ._carriers import Carrier, OwnedSource, OwnSource, attach, close_after, drive
from ._context import ResilienceContext, current, leave
from ._errors import DeadlineReached, MisuseError
from ._line import Line
from ._resuming import ResumingCarrier, Resumption
from ._source import Source, SyncSource, is_source, is_sync_source, stray_error
from .strategies._base import Handler

if TYPE_CHECKING:
    from ._recording import Recorder
    from ._sharing import ReaderCarrier, SharedReader, Tap
    from .runtime import Interruption, Runtime, Waiter

T_co = TypeVar("T_co", covariant=True)


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
        "_ended",
        "_execution",
        "_held",
        "_interrupted",
        "_interruption",
        "_iterated",
        "_keeps",
        "_leaving",
        "_line",
        "_make_step",
        "_over",
        "_pulled",
        "_pulling",
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
        #: What takes the source's next step, if that is all there is to do; and to be done now.
        self._make_step: Callable[[], Any] | None = None
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
        make_step = self._quick
        if make_step is None:
            return await self._pull()  # type: ignore[no-any-return]
        # What most chunks of most streams find: the source is an async generator, run by this very
        # task, and nothing stands between. If it has a chunk without waiting for it, then that is
        # all there is to do, at a fifth of the cost of the whole way.
        self._quick, self._pulling = None, True
        step = make_step()
        try:
            request = self._run(step.send, None)
        except StopIteration as stop:
            chunk: T_co = stop.value
            if not self._closing:
                self._quick, self._pulling = make_step, False
                return chunk
            outcome = _given(chunk)
        except BaseException as error:  # noqa: BLE001 - raised again inside
            outcome = _given(error=error)
        else:
            outcome = drive(self._run, begun=(step, request))
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
        if not self._held:
            self._quick = self._make_step
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
            self._make_step, self._run = primed.carrier.steps()
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
