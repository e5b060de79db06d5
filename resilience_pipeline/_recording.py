"""Streams that are recorded: a source whose chunks and end are noted while its consumer reads them.

What is done with them is the business of a `Recorder`: the record and replay strategy's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ._carriers import Carrier

if TYPE_CHECKING:
    from ._priming import Primed


class Recorder(Protocol):
    """Is told what a source gives."""

    def add(self, chunk: Any) -> None:
        """Note a chunk; what this raises fails the stream."""

    def end(self, error: Exception | None) -> None:
        """The source has come to its end, or failed with `error`, and has been closed."""


class RecordingCarrier(Carrier):
    """Runs a source by its own carrier, and tells a recorder of what it gives.

    Its end counts once its consumer has read that far and the source has been closed without an
    error. A stream that is left before has no end, and neither has one that another task closes.
    """

    __slots__ = (
        "_failure",
        "_has_ended",
        "_inner",
        "_is_interrupted",
        "_recorder",
        "_source_ended",
    )

    def __init__(self, primed: Primed, recorder: Recorder) -> None:
        super().__init__()
        self._inner = primed.carrier
        self._recorder = recorder
        self._source_ended = primed.ended
        #: Whether its consumer knows of its end.
        self._has_ended = primed.ended and not primed.held
        self._failure: Exception | None = None
        self._is_interrupted = False
        for chunk in primed.held:
            recorder.add(chunk)

    async def read(self) -> Any:
        if self._source_ended:
            self._has_ended = True
            raise StopAsyncIteration
        try:
            chunk = await self._inner.read()
        except StopAsyncIteration:
            self._has_ended = not self._is_interrupted
            raise
        except Exception as error:
            if not self._is_interrupted:
                self._failure = error
            raise
        self._recorder.add(chunk)
        return chunk

    async def close(self, error: BaseException | None = None, *, shielded: bool = False) -> bool:
        failure, self._failure = self._failure, None
        try:
            swallowed = await self._inner.close(error, shielded=shielded)
            if failure is not None and failure is error:
                self._recorder.end(None if swallowed else failure)
            elif self._has_ended:
                self._has_ended = False
                self._recorder.end(None)
            return swallowed
        finally:
            self._closed()
            del failure, error  # or it, its traceback and this frame would hold one another

    def interrupt(self) -> bool | None:
        self._is_interrupted = True
        return self._inner.interrupt()

    def is_cancelled(self) -> bool:
        return self._inner.is_cancelled()

    def abandon(self) -> None:
        self._inner.hold(self._closed)
        self._inner.abandon()
