"""Streams: guarded up to the first chunk, then handed to the consumer.

`execute_stream` is the same onion around "call the factory, read the first chunk". What comes out is *primed*; it is
committed in one place, `ResilienceStream._open`, and from then on chunks pass.

Who runs a source? It may hold cancel scopes and task groups open across its yields, so one task, in one context, opens, reads and
closes it. Where time limits are no scopes (asyncio) that is the consumer's own task, see `_OwnSource`. Where they are
(trio) it is an owner task that lives as long as the source, see `_OwnedSource`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import TracebackType, coroutine
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ._context import ResilienceContext, current
from ._errors import DeadlineReached, MisuseError
from ._source import Source, stray_error
from .strategies._base import Handler

if TYPE_CHECKING:
    from .runtime import Child, Interruption, Runtime, Waiter

T_co = TypeVar("T_co", covariant=True)

_ENDED: Any = object()


class Primed:
    """A source whose first chunk has been read, on its way out through the onion."""

    __slots__ = ("carrier", "first")

    def __init__(self, carrier: Carrier, first: Any) -> None:
        self.carrier = carrier
        self.first = first


class Carrier:
    """Runs one source, from opening to close, in the task where it has to be."""

    __slots__ = ()

    async def start(self) -> Any:
        """Open the source and read its first chunk; a source that fails is closed first."""
        raise NotImplementedError

    def read(self) -> Awaitable[Any]:
        """Read the next chunk; `StopAsyncIteration` at the end. The source is not closed by it."""
        raise NotImplementedError

    async def close(self, error: BaseException | None = None, *, failed: bool = False) -> bool:
        """Close the source; whether it swallowed `error`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close the source some time soon; called from finalisers."""
        raise NotImplementedError


# ---- in the consumer's own task ---------------------------------------------------------------


class _OwnSource(Carrier):
    """A source run by the consumer's own task, in a context of its own.

    The context is copied when the source is opened, and each step is entered and left within one step
    of the task: nothing is set across a yield.
    """

    __slots__ = ("_run", "_source", "_spawn")

    def __init__(self, runtime: Runtime, make: Callable[[], Any], close_timeout: float) -> None:
        self._spawn = runtime.spawner()
        self._run = copy_context().run
        self._source = Source(make, partial(_shielded, runtime, close_timeout))

    async def start(self) -> Any:
        try:
            await drive(self._run, self._source.open())
            return await self.read()
        except StopAsyncIteration:
            return _ENDED
        except GeneratorExit:  # nothing may be awaited any more
            self.abandon()
            raise
        except BaseException as error:
            await self._close_failed(error)
            raise

    async def _close_failed(self, error: BaseException) -> None:
        """Close before anything else is tried; what closing raises does not hide the failure."""
        try:
            await self.close(error, failed=True)
        except BaseException as raised:
            if is_translation(raised, error) or not isinstance(raised, Exception):
                raise
            attach(error, raised)

    def read(self) -> Awaitable[Any]:
        return drive(self._run, self._source.anext())

    async def close(self, error: BaseException | None = None, *, failed: bool = False) -> bool:
        closing = self._source.close(error, failed=failed)
        return await drive(self._run, closing)  # type: ignore[no-any-return]

    def abandon(self) -> None:
        self._spawn(partial(_close_quietly, self))


async def _close_quietly(carrier: Carrier) -> None:
    with suppress(Exception):  # nobody is left to hear of it
        await carrier.close()


async def _shielded(runtime: Runtime, timeout: float, closing: Callable[[], Any]) -> None:
    await runtime.shielded(closing, timeout)


# ---- in an owner task -------------------------------------------------------------------------


class _OwnedSource(Carrier):
    """A source run by a task of its own, chunks handed across when they are asked for.

    The owner reads only when asked, so no chunk is ever waiting. It closes the source itself, in every case, before the
    last answer is given. A reader that is cancelled takes the owner with it and waits for its end.
    """

    __slots__ = (
        "_asked",
        "_child",
        "_close_error",
        "_close_timeout",
        "_closing",
        "_end",
        "_joiners",
        "_over",
        "_owner",
        "_reader",
        "_reply",
        "_runtime",
        "_source",
        "_swallowed",
    )

    def __init__(self, runtime: Runtime, make: Callable[[], Any], close_timeout: float) -> None:
        shield = partial(_shielded, runtime, close_timeout) if runtime.owns_sources else _plainly
        self._source = Source(make, shield)
        self._runtime = runtime
        self._close_timeout = close_timeout
        self._child: Child
        #: What the owner, the reader and those who wait for the end are waiting with.
        self._owner: Waiter | None = None
        self._reader: Waiter | None = None
        self._joiners: list[Waiter] = []
        self._asked = False
        self._closing = False
        self._over = False
        self._reply: tuple[Any] | None = None
        self._end: BaseException | None = None
        self._close_error: BaseException | None = None
        self._swallowed = False

    # ---- the owner's side

    async def _own(self) -> None:
        try:
            await self._serve()
        except StopAsyncIteration:
            await self._close_source(None)
        except BaseException as error:  # noqa: BLE001 - it goes to the reader, cancellation ends here
            self._end = error
            await self._close_source(error)
        else:
            await self._close_source(None)

    async def _serve(self) -> None:
        """Open the source and read it as it is asked for, until its end or the wish to close."""
        await drive(_here, self._source.open())
        while await self._is_asked():
            self._reply = (await drive(_here, self._source.anext()),)
            self._asked = False
            _wake(self._reader)

    async def _is_asked(self) -> bool:
        while not self._asked and not self._closing:
            self._owner = self._runtime.waiter()
            await self._owner.wait()
        return not self._closing

    async def _close_source(self, error: BaseException | None) -> None:
        try:
            self._swallowed = await self._source.close(error, failed=error is not None)
        except BaseException as raised:  # noqa: BLE001 - it goes to whoever closes
            if error is None:
                self._close_error = raised
            elif is_translation(raised, error):
                self._end = raised
            elif isinstance(raised, Exception):
                attach(error, raised)

    def _on_end(self) -> None:
        self._over = True
        for waiter in (self._reader, *self._joiners):
            _wake(waiter)

    # ---- the consumer's side

    async def start(self) -> Any:
        self._child = self._runtime.spawn(self._own, self._on_end)
        try:
            return await self.read()
        except StopAsyncIteration:
            return _ENDED

    async def read(self) -> Any:
        if not self._over:
            self._reader = self._runtime.waiter()
            self._asked = True
            _wake(self._owner)
            try:
                await self._reader.wait()
            except GeneratorExit:
                self.abandon()
                raise
            except BaseException:
                await self._stop()
                raise
            finally:
                self._reader = None
        if self._reply is not None:
            (chunk,), self._reply = self._reply, None
            return chunk
        raise self._take_end()

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None
        if end is None or self._closing or self._swallowed:
            return StopAsyncIteration()
        if isinstance(end, Exception):
            return end
        ended = RuntimeError("the task that ran the stream's source was cancelled")
        ended.__cause__ = end
        return ended

    async def close(self, error: BaseException | None = None, *, failed: bool = False) -> bool:  # noqa: ARG002
        if not self._over:
            self._closing = True
            _wake(self._owner)
            if self._reader is not None:
                self._child.cancel()
            try:
                await self._join()
            except GeneratorExit:
                raise
            except BaseException:
                await self._stop()
                raise
        trouble, self._close_error = self._close_error, None
        if trouble is not None:
            raise trouble
        return self._swallowed

    async def _join(self) -> None:
        while not self._over:
            waiter = self._runtime.waiter()
            self._joiners.append(waiter)
            await waiter.wait()

    async def _stop(self) -> None:
        """Cancel the owner and wait for its end, out of reach of further cancellations for a while."""
        self._child.cancel()
        try:
            await self._runtime.shielded(self._join, self._close_timeout)
        except TimeoutError:
            self._child.cancel()
            await self._join()

    def abandon(self) -> None:
        self._closing = True
        _wake(self._owner)
        if self._reader is not None:
            self._child.cancel_soon()


def _wake(waiter: Waiter | None) -> None:
    if waiter is not None:
        waiter.wake()


def _here(step: Callable[..., Any], *args: Any) -> Any:
    """Take a step in the context one is in: an owner task has one of its own already."""
    return step(*args)


async def _plainly(closing: Callable[[], Awaitable[None]]) -> None:
    await closing()


# ---- both -------------------------------------------------------------------------------------


@coroutine
def drive(run: Callable[..., Any], inside: Any) -> Generator[Any, Any, Any]:
    """Await `inside` with each of its steps entered through `run`, a context's.

    An end that nobody asked for comes out as an error: a `GeneratorExit` that was not thrown in.
    """
    steps = inside if hasattr(inside, "send") else inside.__await__()
    resume = partial(run, steps.send, None)
    while True:
        try:
            request = resume()
        except StopIteration as stop:
            return stop.value
        except GeneratorExit as stray:
            raise stray_error(stray) from stray
        try:
            value = yield request
        except GeneratorExit:
            run(steps.close)
            raise
        except BaseException as error:  # noqa: BLE001 - passed on
            resume = partial(run, steps.throw, error)
        else:
            resume = partial(run, steps.send, value)


def is_translation(raised: BaseException, error: BaseException) -> bool:
    """Whether a context manager raised an error of its own *from* the one it was told."""
    seen: set[int] = set()
    cause = raised.__cause__
    while cause is not None and id(cause) not in seen:
        if cause is error:
            return True
        seen.add(id(cause))
        cause = cause.__cause__
    return raised is error


def attach(error: BaseException, closing: BaseException) -> None:
    """Tell, on the error that counts, that closing failed as well."""
    error.add_note(f"closing the stream failed as well: {closing!r}")
    if closing.__context__ is error:
        closing.__context__ = None
    if error.__context__ is None:
        error.__context__ = closing


# ---- the execution ----------------------------------------------------------------------------


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
        kind = _OwnedSource if runtime.owns_sources else _OwnSource
        carrier = kind(runtime, make, self._close_timeout)
        primed = Primed(carrier, await carrier.start())
        self._open.add(primed)
        return primed

    async def adopt(self, context: ResilienceContext, value: Any) -> Primed:
        """Prime what a fallback gave: a source is run like any other, a value becomes one chunk."""
        if hasattr(value, "__aiter__") or hasattr(value, "__aenter__"):
            return await self.prime(context, lambda: value)
        return await self.prime(context, partial(_one_chunk, value))

    def first_chunk(self, result: Any) -> Any:
        """What predicates and hooks see as the result: the first chunk, `None` without one."""
        if not isinstance(result, Primed):
            return result
        return None if result.first is _ENDED else result.first

    async def discard(self, result: Any) -> None:
        """Close a primed source that nobody will receive."""
        if isinstance(result, Primed) and result in self._open:
            self._open.discard(result)
            await _close_quietly(result.carrier)

    async def settle(self, committed: Primed | None) -> None:
        """Close what was primed and neither committed nor discarded, by a strategy that lost it."""
        if committed is not None:
            self._open.discard(committed)
        while self._open:
            await self.discard(next(iter(self._open)))


async def _one_chunk(value: Any) -> AsyncIterator[Any]:
    yield value


class ResilienceStream(AsyncIterator[T_co], Generic[T_co]):
    """A stream guarded by a pipeline up to its first chunk; made by `execute_stream`.

    Nothing runs until the first chunk is asked for. It has one consumer and is read once. Used with `async with` its source is
    closed on the way out; a plain `async for` that is left early closes it as soon as Python lets the stream go.

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
        "_interruption",
        "_iterations",
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
        self._interruption: Interruption | None = None
        self._closers: list[Waiter] = []
        self._trouble: BaseException | None = None
        self._committed = False
        self._over = False
        self._closing = False
        self._pulling = False
        self._pulled = False
        self._iterations = 0

    @property
    def committed(self) -> bool:
        """Whether the stream has been handed to its consumer: nothing is repeated any more."""
        return self._committed

    def __aiter__(self) -> ResilienceStream[T_co]:
        """Iterate over the chunks, once.

        Raises:
            MisuseError: The stream was iterated over before.
        """
        if self._iterations and self._pulled:
            msg = "this stream was iterated over before: a stream is read once, make another one"
            raise MisuseError(msg)
        if self._over and self._pulled:
            msg = "this stream has ended: a stream is read once, make another one"
            raise MisuseError(msg)
        self._iterations += 1
        return self

    async def __anext__(self) -> T_co:
        """Give the next chunk; the first one is what the pipeline guards.

        Raises:
            MisuseError: Another task is waiting for a chunk already.
        """
        if self._pulling:
            msg = "another task is waiting for this stream's next chunk: a stream has one consumer"
            raise MisuseError(msg)
        if self._over or self._closing:
            raise StopAsyncIteration
        self._pulling = self._pulled = True
        try:
            chunk: T_co = await (self._read() if self._committed else self._open())
        finally:
            self._pulling = False
            if self._closers:
                self._wake_closers()
        return chunk

    # ---- the first chunk

    async def _open(self) -> Any:
        begun = self._start()
        context = begun.context
        self._runtime = context.runtime
        self._interruption = context.runtime.interruption()
        primed: Any = None
        token = current.set(context)
        try:
            primed = await self._interruption.guard(begun.head, context)
            if not isinstance(primed, Primed):
                primed = await begun.execution.adopt(context, primed)
        except DeadlineReached:
            # Closed by another task while the first chunk was awaited.
            self._over = True
            raise StopAsyncIteration from None
        except BaseException:
            self._over = True
            raise
        finally:
            current.reset(token)
            context.end()
            await begun.execution.settle(primed)
        self._commit(primed)
        if primed.first is _ENDED or self._closing:
            await self._finish()
        return primed.first

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
            await self._finish()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again by _fail
            if self._closing and interruption.confirm(error):
                await self._finish()
            await self._fail(carrier, error)
        if self._closing:
            interruption.confirm(None)
            await self._finish()
        return chunk

    def _runtime_now(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    async def _finish(self) -> NoReturn:
        """Close the source after its end, or for another task that wants it closed; ends the loop."""
        self._over = True
        assert self._carrier is not None
        try:
            await self._carrier.close()
        except BaseException as error:
            if not self._closing:
                raise
            self._trouble = error
        raise StopAsyncIteration

    async def _fail(self, carrier: Carrier, error: BaseException) -> NoReturn:
        """Close the source after its failure and let that out, unless its manager swallows it."""
        self._over = True
        try:
            swallowed = await carrier.close(error, failed=True)
        except BaseException as raised:
            if is_translation(raised, error):
                raise
            attach(error, raised)
            swallowed = False
        if swallowed and isinstance(error, Exception):
            raise StopAsyncIteration
        raise error

    # ---- leaving

    async def aclose(self) -> None:
        """Close the stream and its source, at any time and from any task; idempotent.

        A reader that waits for a chunk meanwhile finds the stream ended. An error raised by the source's own
        cleanup comes out of the first call.
        """
        if self._pulling:
            await self._close_under_reader()
            return
        if self._over:
            return
        self._over = self._closing = True
        if self._carrier is not None:
            await self._carrier.close()

    async def _close_under_reader(self) -> None:
        """Have the reading task close the source, and wait for that."""
        runtime = self._runtime_now()
        first = not self._closing
        self._closing = True
        waiter = runtime.waiter()
        self._closers.append(waiter)
        if first and self._interruption is not None:
            if isinstance(self._carrier, _OwnedSource):
                self._carrier.abandon()
            else:
                self._interruption.interrupt()
        await waiter.wait()
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble

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


class StreamStart:
    """What the first pull needs: the context, its execution and the onion's outermost handler."""

    __slots__ = ("context", "execution", "head")

    def __init__(
        self, context: ResilienceContext, execution: StreamExecution, head: Handler
    ) -> None:
        self.context = context
        self.execution = execution
        self.head = head
