"""One source read by many: what it gave is kept, and every reader has a cursor of its own.

A chunk is read only when a reader wants one that is not there, by one task that opens, reads and
closes the source and belongs to no reader. In threads, which have no such task, the reader that
wants it reads it in its own thread, and the others wait for that.

Interleavings that were thought through, beside those of `_shared_work`:

1. Two readers want the same chunk: each says how far it wants to have read, and only that decides
   whether anything is read, so there is one read.
2. A reader is cancelled, or left alone by a time limit in a thread, while its chunk is being read:
   nobody interrupts that, and the chunk is there for the others.
3. The last reader leaves while a chunk is being read: the read is cancelled, once, then the source
   is closed. It leaves while nothing is read: the task is told to close. A cancellation that comes
   too late for the read finds the closing, which is out of its reach then.
4. In threads, the last reader leaves while another thread, whose reader has left as well, reads:
   that thread closes the source when it comes back. Who closes is decided under the lock.
5. A reader is dropped and closed by a finaliser, in any thread: it leaves without waiting.
6. More chunks come than may be kept: what nobody will read again goes. A slow reader keeps what it
   has not read, and holds nobody up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, MutableSequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from .._context import ResilienceContext
from ._shared_error import SharedError
from ._shared_work import InFlight, SharedWork, waits_no_more_for

if TYPE_CHECKING:
    from .._sharing import Tap
    from ..runtime import Runtime, Waiter
    from ._base import Handler


class SourceLostError(RuntimeError):
    """The task, or the event loop, that read a shared source has ended."""


class Recording:
    """A stream that has come to its end.

    Attributes:
        chunks: What it gave.
        error: What it failed with, if it has.
    """

    __slots__ = ("chunks", "error")

    def __init__(self, chunks: tuple[Any, ...], error: SharedError | None) -> None:
        self.chunks = chunks
        self.error = error


class RecordingReader:
    """Gives what has been recorded."""

    __slots__ = ("_is_over", "_mark", "_position", "_recording")

    def __init__(self, recording: Recording, context: ResilienceContext) -> None:
        self._recording = recording
        self._mark = context.execution
        self._position = 0
        self._is_over = False

    async def read(self) -> Any:
        if self._is_over:
            raise StopAsyncIteration
        position, chunks = self._position, self._recording.chunks
        if position < len(chunks):
            self._position = position + 1
            return chunks[position]
        if self._recording.error is not None:
            raise self._recording.error.take(self._mark)
        raise StopAsyncIteration

    async def leave(self, *, shielded: bool) -> None:  # noqa: ARG002
        self._is_over = True

    def interrupt(self) -> None:
        self._is_over = True

    def abandon(self) -> None:
        """Do nothing: it holds nothing."""


class SharedStream(SharedWork):
    """A source that is being read, and its readers.

    Args:
        table: Where it is found.
        key: Under which key.
        context: That of the reader who started it.
        head: What opens the source, and guards it up to its line.
        max_chunks: Chunks that may be kept; with more it is not shared any more.
        close_timeout: Seconds that closing the source may take, where nobody waits longer.

    Attributes:
        error: What it has failed with, if it has come to its end.
        stale: What readers, none of which has had a chunk, are to be given in place of that error.
    """

    __slots__ = (
        "_base",
        "_chunks",
        "_close_error",
        "_close_timeout",
        "_closer_is_known",
        "_head",
        "_is_cancelled",
        "_is_closing",
        "_is_private",
        "_is_pulling",
        "_max_chunks",
        "_puller",
        "_readers",
        "_tap",
        "_wanted",
        "error",
        "stale",
    )

    def __init__(  # noqa: PLR0917 - one place makes them
        self,
        table: InFlight[Any],
        key: Hashable,
        context: ResilienceContext,
        head: Handler,
        max_chunks: float,
        close_timeout: float,
    ) -> None:
        super().__init__(table, key, context)
        assert context._stream is not None
        self.context._stream = context._stream.branch(self.context)
        self._head = head
        self._max_chunks = max_chunks
        self._close_timeout = close_timeout
        self._readers: set[StreamReader] = set()
        #: The chunks that are kept, the first of which has the number `_base`.
        self._chunks: MutableSequence[Any] = []
        self._base = 0
        #: How many chunks somebody wants to have been read.
        self._wanted = 0
        self._tap: Tap | None = None
        #: What the task waits with when nobody wants anything.
        self._puller: Waiter | None = None
        self._is_pulling = self._is_private = False
        self._is_closing = self._is_cancelled = self._closer_is_known = False
        self._close_error: BaseException | None = None
        self.error: SharedError | None = None
        self.stale: Any = None

    def attach(self, context: ResilienceContext) -> StreamReader:
        """Add a reader; under the lock."""
        reader = StreamReader(self, context, began=not self._readers)
        self._readers.add(reader)
        return reader

    def is_within_reach(self, place: tuple[int, object]) -> bool:
        """Whether somebody in that place can wait for it: in threads, who reads it is not fixed."""
        return self._is_sync or super().is_within_reach(place)

    def recording(self, error: SharedError | None = None) -> Recording:
        """Give what is to be kept of it, now that it is over."""
        return Recording(tuple(self._chunks), error)

    @property
    def is_empty(self) -> bool:
        """Whether it has given nothing."""
        return not self._base and not self._chunks

    # ---- its task

    def start(self, runtime: Runtime) -> None:
        """Start the task that reads it, where there are tasks."""
        if not self._is_sync:
            self._spawn(runtime, self._own)

    async def _own(self) -> None:
        self.enter()
        runtime = self.context.runtime
        try:
            while await self._is_asked(runtime):
                await self._step(runtime)
        except GeneratorExit:  # the loop is gone
            if self._tap is not None:
                self._tap.abandon()
            self.lose(None)
            raise
        except BaseException as error:  # noqa: BLE001 - cancelled while nobody wanted anything
            await self._close(runtime, error)
        else:
            await self._close(runtime, None)

    async def _is_asked(self, runtime: Runtime) -> bool:
        """Wait until a chunk is wanted; false if none will be."""
        while True:
            waiter = runtime.waiter()
            with self._table.lock:
                if self.is_over or self._is_closing:
                    return False
                if self._is_wanted:
                    self._is_pulling = True
                    return True
                self._puller = waiter
            try:
                await waiter.wait()
            finally:
                self._puller = None

    @property
    def _is_wanted(self) -> bool:
        return self._wanted > self._base + len(self._chunks)

    async def _step(self, runtime: Runtime) -> None:
        """Read the next chunk, for the first of which the source has to be opened."""
        chunks: list[Any] = []
        failure: BaseException | None = None
        try:
            try:
                if self._tap is None:
                    assert self.context._stream is not None
                    self._tap = await self.context._stream.tapped(self.context, self._head)
            except StopAsyncIteration as stray:  # or it would pass for the end
                msg = "StopAsyncIteration was raised where it does not belong"
                raise RuntimeError(msg) from stray
            chunks.append(await self._tap.read())
            chunks.extend(self._tap.held)
            self._tap.held.clear()
        except StopAsyncIteration:
            self._finish(runtime, None)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - it goes to the readers
            failure = error
        else:
            self._add(chunks)
        try:
            if failure is not None:
                self._finish(runtime, failure)
        finally:
            del failure  # or it, its traceback and this frame would hold one another

    def _add(self, chunks: list[Any]) -> None:
        with self._table.lock:
            self._is_pulling = False
            self._chunks.extend(chunks)
            if not self._is_private and len(self._chunks) > self._max_chunks:
                self._is_private = True
                self._table.remove(self)
                self._chunks = deque(self._chunks)  # from whose beginning it is cheap to take
            self.trim()
        self.wake_all()

    def trim(self) -> None:
        """Let go of what nobody will read; under the lock."""
        if not self._is_private:
            return
        # In steps between which a finaliser may remove a reader: of the list, and what goes later.
        readers = list(self._readers)
        gone: list[Any] = []
        first = min((reader.position for reader in readers), default=self._wanted)
        while self._base < first and self._chunks:
            self._base += 1
            gone.append(self._chunks[0])
            del self._chunks[0]

    def _finish(self, runtime: Runtime, error: BaseException | None) -> None:
        """Be over: the source has ended or failed, and is closed."""
        with self._table.lock:
            self._is_pulling = False
            self._tap = None
            if not self.is_over:
                if isinstance(error, Exception):
                    self._take_failure(runtime, error)
                elif error is not None:
                    self._note_loss(error, runtime)
                self._end()
        self.wake_all()
        self.context.end()

    def _take_failure(self, runtime: Runtime, error: Exception) -> None:
        if self._is_closing:  # it was interrupted, and this is what it made of that
            self._close_error = runtime.carried(error)
        else:
            self.error = SharedError(error, self.context.execution)

    async def _close(self, runtime: Runtime, error: BaseException | None) -> None:
        """Close the source before its end, and be over."""
        tap, self._tap = self._tap, None
        try:
            if tap is not None:
                await tap.close(shielded=error is not None or self._is_cancelled)
        except GeneratorExit:
            raise
        except BaseException as raised:  # noqa: BLE001 - it goes to whoever has left last
            if not runtime.is_cancellation(raised):
                self._close_error = raised
        finally:
            self.lose(error, runtime)
            self.context.end()
            del error

    # ---- what readers ask of it

    def get(self, position: int) -> tuple[Any] | None:
        """Give the chunk of this number, if it has been read; under the lock."""
        index = position - self._base
        return (self._chunks[index],) if index < len(self._chunks) else None

    async def advance(self, reader: StreamReader) -> None:
        """See to it that a reader's next chunk is read, and wait for something to change."""
        runtime = reader.runtime
        with self._table.lock:
            self._wanted = max(self._wanted, reader.position + 1)
            puller, is_mine = self._puller, False
            if self._is_sync and not self._is_pulling and not self.is_over:
                is_mine = self._is_pulling = True
                self._starter = reader.context
        if is_mine:
            try:
                await self.do_here(partial(self._step, runtime), reader.abandon)
            finally:
                if self._is_to_be_closed_here():
                    self._is_cancelled = True
                    await self._close(runtime, None)
            return
        if puller is not None and not puller.wake():
            self.lose(None)
        await self.wait_for_change(runtime, lambda: reader.is_served)

    def is_deserted(self) -> bool:
        """Whether nobody reads any more what is not over: then it is to be closed; under the lock."""
        if self._readers:
            self.trim()
            return False
        if self.is_over:
            # An error's traceback leads to frames that lead here.
            self.error = self._interrupt = self.stale = None
            self._chunks = []
            return False
        self._is_closing = True
        self._table.remove(self)
        return True

    def forget_starter(self, context: ResilienceContext) -> None:
        """Note that a reader leaves; under the lock."""
        if self._starter is context:
            self._starter = None

    def detach(self, reader: StreamReader) -> bool:
        """Remove a reader; whether it was the last one of what has to be closed."""
        with self._table.lock:
            if reader not in self._readers:
                return False
            self._readers.remove(reader)
            self.forget_starter(reader.context)
            return self.is_deserted()

    def _is_to_be_closed_here(self) -> bool:
        """Whether it is for the calling thread to close it."""
        with self._table.lock:
            if not self._is_closing or self._is_pulling or self.is_over or self._closer_is_known:
                return False
            self._closer_is_known = True
            return True

    async def stop(self, runtime: Runtime, *, shielded: bool) -> None:
        """Have the source closed, and wait for that."""
        if self._is_sync:
            if self._is_to_be_closed_here():
                await self._close(runtime, None)
        else:
            self.stop_soon(soon=self.is_elsewhere(runtime))
            if self.is_around:  # it is the source that closes its last reader
                return
            await self._see_to_end(runtime, shielded=shielded)
        error, self._close_error = self._close_error, None
        try:
            if error is not None:
                raise error
        finally:
            del error

    async def _see_to_end(self, runtime: Runtime, *, shielded: bool) -> None:
        # What opens it ends as any call does, by itself.
        limit = math.inf if self._tap is None else self._close_timeout
        try:
            if shielded:
                await runtime.shielded(partial(self.wait, runtime), limit)
            else:
                await self.wait(runtime)
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self.is_over:
                self._cancel(soon=self.is_elsewhere(runtime))
                with suppress(TimeoutError):  # it does not listen: nothing more can be done
                    await runtime.shielded(partial(self.wait, runtime), limit)
            if not isinstance(error, TimeoutError):
                raise

    def stop_soon(self, *, soon: bool) -> None:
        """Tell its task to close the source."""
        with self._table.lock:
            puller, is_pulling = self._puller, self._is_pulling
        if is_pulling:
            self._cancel(soon=soon)
        elif puller is not None and not puller.wake():
            self.lose(None)

    def _cancel(self, *, soon: bool) -> None:
        self._is_cancelled = True
        self.call_off(soon=soon)

    def abandon(self) -> None:
        """Have the source closed some time soon; from any thread."""
        if not self._is_sync:
            self.stop_soon(soon=True)
            return
        if self._is_pulling:  # whose thread closes it
            self.call_off(soon=True)
        elif self._is_to_be_closed_here():
            tap, self._tap = self._tap, None
            if tap is not None:
                tap.abandon()
            self.lose(None)


class StreamReader:
    """One reader of a shared source; see `SharedReader`.

    Attributes:
        context: That of its execution.
        runtime: Where it reads.
        position: How many chunks it has been given.
        stale: What it is to be given in place of the error that it got.
        began: Whether it is the reader who started it.
    """

    __slots__ = (
        "_is_interrupted",
        "_shared",
        "began",
        "context",
        "mark",
        "position",
        "runtime",
        "stale",
    )

    def __init__(self, shared: SharedStream, context: ResilienceContext, *, began: bool) -> None:
        self._shared = shared
        self.began = began
        self.context = context
        self.mark = context.execution
        self.runtime = context.runtime
        self.position = 0
        self.stale: Any = None
        self._is_interrupted = False

    @property
    def is_served(self) -> bool:
        """Whether it need not wait any longer; under the lock."""
        shared = self._shared
        return shared.is_over or self._is_interrupted or shared.get(self.position) is not None

    async def read(self) -> Any:
        """Give the next chunk; see `SharedReader`."""
        shared = self._shared
        while True:
            with shared.lock:
                if self._is_interrupted:
                    raise StopAsyncIteration
                found = shared.get(self.position)
                if found is not None:
                    self.position += 1
                    shared.trim()
                    return found[0]
                if shared.is_over:
                    break
            await shared.advance(self)
        return self._raise_end()

    def _raise_end(self) -> NoReturn:
        shared = self._shared
        if shared.error is not None:
            self.stale = shared.stale
            raise shared.error.take(self.mark)
        if not shared.is_lost:
            raise StopAsyncIteration
        is_starter = shared.is_started_by(self.context)
        error = shared.take_interrupt(is_starter=is_starter)
        try:
            if error is not None:
                raise error
        finally:
            del error
        msg = "the task that read the shared stream's source has ended, or its event loop has"
        raise SourceLostError(msg)

    async def leave(self, *, shielded: bool) -> None:
        """Read no more; see `SharedReader`."""
        waits_no_more_for(self._shared)
        self._is_interrupted = True
        if self._shared.detach(self):
            await self._shared.stop(self.runtime, shielded=shielded)

    def interrupt(self) -> None:
        """End a read of another task's; see `SharedReader`."""
        self._is_interrupted = True
        self._shared.wake_all()

    def abandon(self) -> None:
        """Read no more, without waiting for anything; see `SharedReader`."""
        self._is_interrupted = True
        if self._shared.detach(self):
            self._shared.abandon()
