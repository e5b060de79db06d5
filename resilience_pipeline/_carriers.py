"""Who runs a source: carriers, each with one task in one context that opens, reads and closes it.

A source may hold cancel scopes and task groups open across its yields, so it can't be read in one
task and closed in another, and its scopes have to nest within those around it. Where time limits
are no scopes (asyncio, threads) the consumer's own task runs it, see `OwnSource`. Where they are
(trio), or where the attempt that opens it runs in a task that ends before the source does
(hedging), it is a task of our own that lives as long as the source, see `OwnedSource`.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from types import GeneratorType, coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ._predicates import members_of
from ._source import Source, stray_error
from .strategies._base import chain

if TYPE_CHECKING:
    from .runtime import Child, Runtime, Waiter

#: What is read up to the line: the chunks, and whether the source has ended before it got there.
Held: TypeAlias = tuple[deque[Any], bool]
#: Reads a source up to the line, given what reads a chunk.
ReadUp: TypeAlias = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Held]]

#: Gives the chunks of an async generator, see `_pump`.
Pump: TypeAlias = "GeneratorType[Any, Any, Any]"


class Carrier(ABC):
    """Runs one source, from opening to close, in the task where it has to be."""

    __slots__ = ("_is_closed", "_releases", "on_close_error")

    def __init__(self) -> None:
        self._is_closed = False
        #: Whom to tell of an error of closing that comes out nowhere.
        self.on_close_error: Callable[[Exception], object] = _tell_nobody
        self._releases: list[Callable[[], object]] = []

    @abstractmethod
    def read(self) -> Awaitable[Any]:
        """Read the next chunk; `StopAsyncIteration` at the end. The source is not closed by it."""

    @abstractmethod
    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:
        """Close the source.

        Args:
            error: What it failed with, if it has failed.
            shielded: Whether this is our doing, not the consumer's: then it is out of reach of the
                caller's cancellation and takes `close_timeout` at the most.

        Returns:
            Whether the source's context manager swallowed `error`.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Close the source some time soon; called from finalisers."""

    def interrupt(self) -> bool | None:
        """Close for another task while a chunk is being waited for.

        Returns:
            Whether the source was interrupted, false if it is being closed already; `None` if it
            has to be done by interrupting its reader.
        """
        return None

    def is_cancelled(self) -> bool:
        """Whether somebody wants the calling task cancelled, and has not taken that back."""
        return True

    def pump(self) -> tuple[Pump | None, Callable[..., Any]]:
        """Give a pump of the source's chunks, if a reader may take its steps by itself, and in what.

        See `_pump`; each step is entered through the function that comes with it. None where a
        reader has to go by `read`.
        """
        return None, operator.call

    def hold(self, release: Callable[[], object]) -> None:
        """Have something released when the source has been closed, whoever closes it."""
        if self._is_closed:
            release()
        else:
            self._releases.append(release)

    def _closed(self) -> None:
        self._is_closed = True
        while self._releases:
            self._releases.pop()()


async def close_after(carrier: Carrier, error: BaseException) -> bool:
    """Close a source that has failed; see `Carrier.close`.

    What closing raises is attached to the failure. It comes out in the failure's place if it is a
    translation of that or no `Exception`, and also if the failure was a cancellation by a scope
    of the source's own, of which its context manager made that error.
    """
    try:
        return await carrier.close(error, shielded=True)
    except BaseException as raised:
        if is_translation(raised, error) or not isinstance(raised, Exception):
            raise
        if not isinstance(error, Exception) and not carrier.is_cancelled():
            raise
        if attach(error, raised):
            carrier.on_close_error(raised)
        return False


# ---- in the consumer's own task ---------------------------------------------------------------


class OwnSource(Carrier):
    """A source run by the consumer's own task, in a context of its own.

    The context is copied when the source is opened, and each step is entered and left within one
    step of the task: nothing is set across a yield.
    """

    __slots__ = ("_close_timeout", "_run", "_runtime", "_source", "_spawn")

    def __init__(self, runtime: Runtime, source: Source, close_timeout: float) -> None:
        super().__init__()
        self._runtime = runtime
        self._close_timeout = close_timeout
        self._spawn = runtime.spawner()
        self._run = copy_context().run
        self._source = source

    async def start(self, read_up: ReadUp) -> Held:
        """Open the source and read it up to the line; a source that fails is closed first."""
        try:
            await drive(self._run, self._source.open)
            return await read_up(self.read)
        except GeneratorExit:  # nothing may be awaited any more
            self.abandon()
            raise
        except BaseException as error:
            await close_after(self, error)
            raise

    def read(self) -> Awaitable[Any]:
        return drive(self._run, self._source.anext)

    def is_cancelled(self) -> bool:
        return self._runtime.is_cancelled()

    def pump(self) -> tuple[Pump | None, Callable[..., Any]]:
        # Others than generators may run code when they are asked for a step, in which context ever.
        make_step = self._source.generator_anext()
        if make_step is None:
            return None, self._run
        return cast("Pump", _pump(make_step)), self._run

    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:
        if self._source.leave_to_reader(self._closed):
            return False
        closing: Callable[[], Any] = partial(self._source.close, error)
        if shielded:
            closing = partial(self._runtime.shielded, closing, self._close_timeout)
        try:
            return await drive(self._run, closing)  # type: ignore[no-any-return]
        finally:
            self._closed()

    def abandon(self) -> None:
        if not self._spawn(partial(_close_quietly, self), self._closed):
            self._closed()  # as far as it ever will be: its event loop is gone


async def _close_quietly(carrier: Carrier) -> None:
    try:
        await carrier.close()
    except Exception as error:  # noqa: BLE001 - nobody else is left to hear of it
        carrier.on_close_error(error)


def _tell_nobody(error: Exception) -> None:
    """Do nothing: what a carrier tells whom it was not told about."""


# ---- in an owner task -------------------------------------------------------------------------


class OwnedSource(Carrier):
    """A source run by a task of its own, chunks handed across when they are asked for.

    The owner reads only when asked, so no chunk is ever waiting. It closes the source itself, in
    every case, before the last answer is given. A reader that is cancelled takes the owner with it
    and waits for its end. The owner's task is what shields a closing: the caller's cancellation
    ends at the reader.
    """

    __slots__ = (
        "_ahead",
        "_asked",
        "_cancelled",
        "_child",
        "_close_error",
        "_close_timeout",
        "_closing",
        "_end",
        "_ended",
        "_failed",
        "_joiners",
        "_leaving",
        "_over",
        "_owner",
        "_reader",
        "_reply",
        "_runtime",
        "_source",
        "_started",
        "_swallowed",
        "_told",
    )

    def __init__(self, runtime: Runtime, source: Source, close_timeout: float) -> None:
        super().__init__()
        self._source = source
        self._runtime = runtime
        self._close_timeout = close_timeout
        self._child: Child
        #: What the owner, the reader and those who wait for the end are waiting with.
        self._owner: Waiter | None = None
        self._reader: Waiter | None = None
        self._joiners: list[Waiter] = []
        self._asked = False
        self._started = False
        #: Somebody wants it closed; the owner is closing it; the owner has ended.
        self._closing = False
        self._leaving = False
        self._over = False
        #: The source has come to its end by itself: it is closed, but not all is delivered yet.
        self._ended = False
        self._failed = False
        self._cancelled = False
        self._reply: tuple[Any] | None = None
        #: A chunk that the source gave unasked, when one of its own scopes was cancelled.
        self._ahead: tuple[Any] | None = None
        self._end: BaseException | None = None
        self._close_error: BaseException | None = None
        self._swallowed = False
        #: What whoever closes it has to tell the source's context manager.
        self._told: BaseException | None = None

    # ---- the owner's side

    async def _own(self) -> None:
        try:
            await self._serve()
        except StopAsyncIteration:
            self._ended = True
            await self._close_source(None)
        except GeneratorExit:  # the loop is gone, nothing can be awaited
            raise
        except BaseException as error:  # noqa: BLE001 - it goes to the reader, cancellation ends here
            self._end = error
            self._failed = True
            _wake(self._reader)  # which sees to it that closing does not take too long
            await self._close_source(error)
        else:
            await self._close_source(self._told)
        finally:
            self._told = None

    async def _serve(self) -> None:
        """Open the source and read it as it is asked for, until its end or the wish to close."""
        await drive(_here, self._source.open)
        while await self._is_asked():
            reply, self._ahead = self._ahead, None
            self._reply = reply or (await drive(_here, self._source.anext),)
            self._asked = False
            _wake(self._reader)

    async def _is_asked(self) -> bool:
        while not self._asked and not self._closing:
            self._owner = self._runtime.waiter()
            try:
                await self._owner.wait()
            except BaseException as error:
                athrow = self._source.athrow
                foreign = self._runtime.is_cancellation(error) and not self._cancelled
                if not foreign or athrow is None or self._ahead is not None:
                    raise
                # By a scope that the source holds open over its yield: there it belongs.
                self._ahead = (await drive(_here, partial(athrow, error)),)
        return not self._closing

    async def _close_source(self, error: BaseException | None) -> None:
        self._leaving = True
        closing = partial(self._drive_closing, error)
        try:
            if self._child.needs_shield():
                self._swallowed = await self._runtime.shielded(closing, self._close_timeout)
            else:
                self._swallowed = await closing()
        except GeneratorExit:
            raise
        except BaseException as raised:  # noqa: BLE001 - it goes to whoever closes
            if self._cancelled and self._runtime.is_cancellation(raised):
                pass  # by us: it is known
            elif error is None or (self._closing and not isinstance(error, Exception)):
                self._close_error = self._runtime.carried(raised)
            elif is_translation(raised, error) or self._is_made_of_scope(raised, error):
                self._end = raised
            elif isinstance(raised, Exception) and attach(error, raised):
                self.on_close_error(raised)

    def _is_made_of_scope(self, raised: BaseException, error: BaseException) -> bool:
        """Whether a context manager made an error of the cancellation by a scope of its own."""
        foreign = not self._cancelled and self._runtime.is_cancellation(error)
        return foreign and isinstance(raised, Exception)

    async def _drive_closing(self, error: BaseException | None) -> bool:
        swallowed: bool = await drive(_here, partial(self._source.close, error))
        return swallowed

    def _on_end(self) -> None:
        self._over = True
        for waiter in (self._reader, *self._joiners):
            _wake(waiter)
        if not self._ended or self._closing:
            self._closed()

    # ---- the consumer's side

    async def start(self, read_up: ReadUp) -> Held:
        """Open the source and read it up to the line; a source that fails is closed first."""
        self._child = self._runtime.spawn(self._own, self._on_end)
        try:
            held = await read_up(self.read)
        except GeneratorExit:  # nothing may be awaited any more
            self.abandon()
            raise
        except BaseException as error:
            if not self._over and not self._closing:  # not the source failed, but who read it
                await close_after(self, error)
            elif isinstance(self._close_error, Exception):  # and nobody will close it any more
                self.on_close_error(self._close_error)
                self._close_error = None
            raise
        self._started = True
        return held

    async def read(self) -> Any:
        if not self._over:
            await self._ask()
        if self._reply is not None:
            (chunk,), self._reply = self._reply, None
            return chunk
        raise self._take_end()

    async def _ask(self) -> None:
        """Ask for a chunk and wait until there is one, or none will come any more."""
        self._reader = self._runtime.waiter()
        self._asked = True
        _wake(self._owner)
        try:
            await self._reader.wait()
        except GeneratorExit:
            self.abandon()
            raise
        except BaseException:
            if not self._failed:
                self._closing = True  # also if the source does not listen and gives a chunk
                self._cancel()
            try:
                await self._see_to_end()
            finally:
                self._end = None  # nobody will ask
            raise
        finally:
            self._reader = None
        if self._failed:
            await self._see_to_end()

    def _take_end(self) -> BaseException:
        end, self._end = self._end, None
        if end is None or (self._swallowed and self._started):
            return StopAsyncIteration()
        if not self._closing:
            return self._runtime.carried(end)
        # The source was interrupted: what its cleanup raised concerns whoever closes it.
        if self._close_error is None and isinstance(end, Exception):
            self._close_error = end
        return StopAsyncIteration()

    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:
        if not self._over:
            self._told = error
            self._closing = True
            _wake(self._owner)
            try:
                await (self._see_to_end() if shielded else self._join())
            except GeneratorExit:
                raise
            except BaseException:
                if not shielded:
                    self._cancel()
                    await self._see_to_end()
                raise
        if self._over:
            self._closed()
        if self._close_error is not None:
            raise self._take_close_error()
        return self._swallowed

    def _take_close_error(self) -> BaseException:
        error, self._close_error = self._close_error, None
        assert error is not None
        return error

    async def _join(self) -> None:
        while not self._over:
            waiter = self._runtime.waiter()
            self._joiners.append(waiter)
            await waiter.wait()

    async def _see_to_end(self) -> None:
        """Wait for the owner's end out of reach of cancellations, but not for longer than it may take."""
        if self._over:
            return
        try:
            await self._runtime.shielded(self._join, self._close_timeout)
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._over:
                self._cancel()
                with suppress(TimeoutError):  # it does not listen: nothing more can be done
                    await self._runtime.shielded(self._join, self._close_timeout)
            if not isinstance(error, TimeoutError):
                raise
            self.on_close_error(error)

    def interrupt(self) -> bool | None:
        if self._leaving:
            return False
        self._closing = True
        self._cancel()
        return True

    def _cancel(self) -> None:
        self._cancelled = True
        self._child.cancel()

    def abandon(self) -> None:
        self._closing = True
        if self._over or not _wake(self._owner):
            self._closed()  # as far as it ever will be: its event loop is gone
        if self._reader is not None:
            self._child.cancel_soon()


def _wake(waiter: Waiter | None) -> bool:
    """Wake somebody, if anybody waits; false if that can't be reached any more."""
    return waiter is None or waiter.wake()


#: Takes a step in the context one is in: an owner task has one of its own already. It leaves no
#: frame in tracebacks, which would hold the error that is thrown into a step.
_here: Callable[..., Any] = operator.call


# ---- both -------------------------------------------------------------------------------------


@coroutine
def drive(run: Callable[..., Any], call: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """Await `call()`, the call and each step entered through `run`, a context's.

    An end that nobody asked for comes out as an error: a `GeneratorExit` that was not thrown in.

    Args:
        run: Calls a function in a context.
        call: Makes what is to be awaited.
    """
    steps: Any = None
    resume: Callable[[], Any] | None = None
    try:
        while True:
            try:
                if resume is None:
                    steps, request = run(_begin, call)
                else:
                    request = resume()
            except StopIteration as stop:
                return stop.value
            except GeneratorExit as stray:
                raise stray_error(stray) from stray
            resume = yield from _asking(run, steps, request)
    finally:
        resume = None  # or an error, its traceback and this frame would hold one another


def _pump(make_step: Callable[[], Any]) -> Generator[Any, Any, Any]:
    """Give the chunks of an async generator, and in between what it waits for.

    It gives a chunk when `gi_yieldfrom` is None, and takes steps without an exception for each: the
    `StopIteration` that has a chunk for its value never gets out of the interpreter, which halves
    what a chunk costs.
    """
    while True:
        yield (yield from make_step())


@coroutine
def pumped(run: Callable[..., Any], pump: Pump, request: Any) -> Generator[Any, Any, Any]:
    """Await what a pump waits for, each step entered through `run`; returns the chunk.

    Args:
        run: Calls a function in a context.
        pump: Has begun a step.
        request: What it waits for.
    """
    resume: Callable[[], Any] | None = None
    try:
        while pump.gi_yieldfrom is not None:
            resume = yield from _asking(run, pump, request)
            try:
                request = resume()
            except GeneratorExit as stray:
                raise stray_error(stray) from stray
        return request
    finally:
        resume = None  # see `drive`


def _asking(
    run: Callable[..., Any], steps: Any, request: Any
) -> Generator[Any, Any, Callable[[], Any]]:
    """Wait for what some steps wait for; returns what takes the next one with the answer."""
    value: Any = None
    try:
        try:
            value = yield request
        except GeneratorExit:
            run(steps.close)
            raise
        except BaseException as error:  # noqa: BLE001 - passed on
            return partial(run, steps.throw, error)
        return partial(run, steps.send, value)
    finally:
        value = None  # trio sends errors as values


def _begin(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Take the first step of `call()`; give what takes the others, and what it waits for."""
    try:
        inside = call()
    except StopIteration as stray:  # or it would pass for the result
        raise stray_error(stray) from stray
    steps = inside if hasattr(inside, "send") else inside.__await__()
    return steps, steps.send(None)


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


def attach(error: BaseException, closing: BaseException) -> bool:
    """Tell, on the error that counts, that closing failed as well; whether there was news in it."""
    if _repeats(closing, error):
        return False
    error.add_note(f"closing the stream failed as well: {closing!r}")
    # It was raised while the other was being handled; now it is the other way round.
    seen: set[int] = set()
    link = closing
    while link.__context__ is not None and link.__context__ is not error and id(link) not in seen:
        seen.add(id(link))
        link = link.__context__
    if link.__context__ is error:
        link.__context__ = None
    chain(error, closing)
    return True


def _repeats(closing: BaseException, error: BaseException) -> bool:
    """Whether a task group around the source only wrapped up what it was told."""
    if isinstance(closing, BaseExceptionGroup):
        return all(_repeats(each, error) for each in members_of(cast(Any, closing)))
    return closing is error or isinstance(closing, GeneratorExit)
