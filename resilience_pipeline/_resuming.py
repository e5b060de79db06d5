"""Streams that go on after a failure: one source after another, for one consumer.

Whether there is another source, and when, is for a `Resumption` to say: the retry's. Here is how
the next one takes the place of the last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Protocol

from ._carriers import Carrier, close_after, drive
from ._context import ResilienceContext, current
from ._digest import Digest
from ._errors import DeadlineReached, ResumeError

if TYPE_CHECKING:
    from ._priming import Primed, StreamExecution
    from .runtime import Interruption


class Resumption(Protocol):
    """What goes on with a stream whose source has failed.

    Attributes:
        context: The context in which it goes on.
        skips: Whether the next source begins at the beginning again.
        origin: The head of messages.
    """

    @property
    def context(self) -> ResilienceContext: ...
    @property
    def skips(self) -> bool: ...
    @property
    def origin(self) -> str: ...

    async def resume(self, error: Exception, delivered: int, last_chunk: Any) -> Any:
        """Run the inside again; raises `error` when that is not to be done."""


class ResumingCarrier(Carrier):
    """Runs a source, and when that fails, the next.

    Each next one is opened by the consumer's task, but in the context variables of the first pull,
    as if all were one source.
    """

    __slots__ = (
        "_closing",
        "_delivered",
        "_digest",
        "_ended",
        "_execution",
        "_failed",
        "_failure",
        "_held",
        "_inner",
        "_interruption",
        "_last_chunk",
        "_resumption",
        "_run",
    )

    def __init__(self, primed: Primed, execution: StreamExecution, resumption: Resumption) -> None:
        super().__init__()
        self._execution = execution
        self._resumption = resumption
        variables = copy_context()
        variables.run(current.set, resumption.context)
        self._run = variables.run
        self._closing = False
        #: Whether the source has failed by itself and been closed, and there is no next one yet;
        #: what it failed with, on its way to who gets to the next.
        self._failed = False
        self._failure: Exception | None = None
        self._interruption: Interruption | None = None
        self._inner = primed.carrier
        self.on_close_error = primed.carrier.on_close_error
        #: What has been read of the inner source and not been handed out.
        self._held: Iterator[Any] = iter(())
        self._ended = primed.ended
        self._delivered = 0
        self._last_chunk: Any = None
        self._digest = Digest()
        # They will have been handed out before anything more is read.
        for chunk in primed.held:
            self._note(chunk)

    def _note(self, chunk: Any) -> None:
        self._delivered += 1
        self._last_chunk = chunk
        if self._resumption.skips:
            self._digest.add(chunk)

    # ---- reading

    async def read(self) -> Any:
        while True:
            try:
                chunk = await self._read_inner()
                break
            except StopAsyncIteration:
                raise
            except Exception as error:  # noqa: BLE001 - the next source's occasion
                failure = error
            try:
                if self._failed:  # before it could be interrupted
                    raise StopAsyncIteration from None
                if self._closing:  # interrupted, and this is what it made of it
                    raise failure
                await self._recover(failure)
                if self._closing:  # interrupted, and the source gave a chunk all the same
                    raise StopAsyncIteration
            finally:
                del failure
        self._note(chunk)
        return chunk

    async def _read_inner(self) -> Any:
        for chunk in self._held:
            return chunk
        if self._ended:
            raise StopAsyncIteration
        return await self._inner.read()

    async def _recover(self, error: Exception) -> None:
        """Close the source that has failed, and get to the next."""
        try:
            swallowed = await close_after(self._inner, error)
        except Exception as translation:  # noqa: BLE001 - it takes the failure's place
            error, swallowed = translation, False
        try:
            if swallowed:
                raise StopAsyncIteration
            self._failed = True
            # Not as an argument: where it comes out again, frames that it passes would hold it.
            self._failure = error
            context = self._resumption.context
            self._interruption = context.runtime.interruption()
            await self._interruption.guard(self._in_first_context, None)
            self._failed = False
        except DeadlineReached:
            raise StopAsyncIteration from None
        finally:
            self._interruption = self._failure = None
            del error

    def _in_first_context(self, _: None) -> Awaitable[None]:
        return drive(self._run, self._get_to_next)

    async def _get_to_next(self) -> None:
        """Run the inside until a source has got to where the last one failed."""
        error, self._failure = self._failure, None
        assert error is not None
        try:
            while True:
                await self._start_next(error)
                try:
                    await self._skip_delivered(error)
                except Exception as failed:
                    with suppress(Exception):  # it has failed and is closed, or is given up
                        await self._inner.close(shielded=True)
                    if self._closing or isinstance(failed, ResumeError):
                        raise
                    error = failed  # short of it: another attempt
                else:
                    return
        finally:
            del error

    async def _start_next(self, error: Exception) -> None:
        execution = self._execution
        try:
            primed = await execution.adopted(
                self._resumption.context,
                await self._resumption.resume(error, self._delivered, self._last_chunk),
            )
        except GeneratorExit:
            execution.abandon()
            raise
        except BaseException:
            await execution.settle(None)
            raise
        finally:
            del error
        await execution.settle(primed)
        self._inner = primed.carrier
        self._held, self._ended = iter(primed.held), primed.ended

    async def _skip_delivered(self, error: Exception) -> None:
        """Read what the consumer has already, and check that it is the same."""
        if not self._resumption.skips:
            return
        digest = Digest()
        for position in range(self._delivered):
            if self._closing:
                return
            try:
                digest.add(await self._read_inner())
            except StopAsyncIteration:
                raise self._differs(position, error) from error
            except Exception as failed:
                if await close_after(self._inner, failed):  # swallowed, which makes it an end
                    raise self._differs(position, error) from error
                raise
        if digest.result() != self._digest.result():
            raise self._differs(None, error) from error

    def _differs(self, ended_after: int | None, error: Exception) -> ResumeError:
        how = "begins otherwise" if ended_after is None else f"ended after {ended_after}"
        return ResumeError(
            f"{self._resumption.origin}: {self._delivered} chunks had been delivered when the "
            f"stream failed with {error!r}; run again it {how}"
        )

    # ---- leaving

    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:
        self._closing = True
        try:
            swallowed = await self._inner.close(error, shielded=shielded)
        finally:
            self._closed()
        return swallowed and not self._failed  # or it answered what it had failed with itself

    def interrupt(self) -> bool | None:
        self._closing = True
        if self._interruption is not None:
            self._interruption.interrupt()
            return True
        done = self._inner.interrupt()
        self._failed = done is False
        return done

    def abandon(self) -> None:
        self._inner.hold(self._closed)
        self._inner.abandon()
