"""One source, several streams: what a strategy that shares sources needs of the streams' side.

`Tap` is a primed source, taken out of the onion it came through, to be read for many.
`ReaderCarrier` is what each of the many streams has in place of a source. What is between them, the
chunks and the readers' cursors, is the strategy's business.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from ._carriers import Carrier, Held, ReadUp, close_after


class SharedReader(Protocol):
    """One reader of a source that others read as well."""

    async def read(self) -> Any:
        """Give the next chunk; `StopAsyncIteration` at the end."""

    async def leave(self, *, shielded: bool) -> None:
        """Read no more. The last one to leave waits until the source has been closed.

        Args:
            shielded: Whether it may not be kept from that by the caller's cancellation.
        """

    def interrupt(self) -> None:
        """End a read of another task's."""

    def abandon(self) -> None:
        """Read no more, where nothing can be awaited; from any thread."""


class ReaderCarrier(Carrier):
    """Runs no source, but reads one that others read as well; any task may read and close it."""

    __slots__ = ("_reader",)

    def __init__(self, reader: SharedReader) -> None:
        super().__init__()
        self._reader = reader

    async def start(self, read_up: ReadUp) -> Held:
        """Read up to the line; a reader that does not get there leaves."""
        try:
            return await read_up(self._reader.read)
        except GeneratorExit:
            self.abandon()
            raise
        except BaseException as error:
            await close_after(self, error)
            raise

    async def read(self) -> Any:
        return await self._reader.read()

    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:  # noqa: ARG002
        try:
            await self._reader.leave(shielded=shielded)
        finally:
            self._closed()
        return False

    def interrupt(self) -> bool | None:
        self._reader.interrupt()
        return True

    def abandon(self) -> None:
        self._reader.abandon()
        self._closed()


class Tap:
    """A primed source that is read for many.

    Attributes:
        held: What has been read of it already.
    """

    __slots__ = ("_carrier", "_ended", "held")

    def __init__(self, carrier: Carrier, held: deque[Any], ended: bool) -> None:
        self._carrier = carrier
        self._ended = ended
        self.held = held

    async def read(self) -> Any:
        """Read the next chunk; at the end, and when it has failed, the source is closed first."""
        if self.held:
            return self.held.popleft()
        try:
            if self._ended:
                raise StopAsyncIteration
            return await self._carrier.read()
        except StopAsyncIteration:
            await self._carrier.close()
            raise
        except GeneratorExit:
            self._carrier.abandon()
            raise
        except BaseException as error:
            if await close_after(self._carrier, error) and isinstance(error, Exception):
                raise StopAsyncIteration from None
            raise

    async def close(self, *, shielded: bool) -> None:
        """Close the source; `shielded` from the caller's cancellation."""
        await self._carrier.close(shielded=shielded)

    def abandon(self) -> None:
        """Have the source closed some time soon; from any thread."""
        self._carrier.abandon()
