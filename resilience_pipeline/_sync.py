"""Streams of synchronous code: the same streams, seen by a thread.

A `ResilienceStream` is driven step by step, and its sources are plain iterables, dressed as what it
reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Generic, TypeVar

from ._stream import ResilienceStream
from .runtime import Clock
from .runtime._here import run_here

T_co = TypeVar("T_co", covariant=True)


class SyncResilienceStream(Iterator[T_co], Generic[T_co]):
    """A stream guarded by a pipeline up to its first chunk; made by `execute_stream_sync`.

    Nothing runs until the first chunk is asked for. It has one consumer and is read once. Used with
    `with`, or closed with `close()`, its source is closed on the way out.

    Example:
        >>> with pipeline.execute_stream_sync(connect) as stream:
        ...     for chunk in stream:
        ...         print(chunk)
    """

    __slots__ = ("__weakref__", "_clock", "_stream")

    def __init__(self, stream: ResilienceStream[T_co], clock: Clock | None) -> None:
        self._stream = stream
        self._clock = clock

    @property
    def committed(self) -> bool:
        """Whether the stream has been handed to its consumer, after which nothing is repeated."""
        return self._stream.committed

    def __iter__(self) -> SyncResilienceStream[T_co]:
        """Iterate over the chunks, once.

        Raises:
            MisuseError: The stream was iterated over before.
        """
        self._stream.__aiter__()
        return self

    def __next__(self) -> T_co:
        """Give the next chunk; the first one is what the pipeline guards.

        Raises:
            MisuseError: Another thread is waiting for a chunk already.
        """
        try:
            return run_here(self._stream.__anext__(), self._clock)
        except StopAsyncIteration:
            pass
        raise StopIteration

    def close(self) -> None:
        """Close the stream and its source; idempotent.

        From another thread while a chunk is awaited it waits for that chunk, which is dropped: a
        thread can't be interrupted. An error raised by the source's own cleanup comes out of the
        first call.
        """
        run_here(self._stream.aclose(), self._clock)

    def __enter__(self) -> SyncResilienceStream[T_co]:
        """Enter a block at whose end the source is closed; runs nothing yet."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the source; the block's own error comes first, the closing's is attached to it."""
        run_here(self._stream.__aexit__(exc_type, exc, traceback), self._clock)

    def __repr__(self) -> str:
        """Show which side of the line the stream is on."""
        return repr(self._stream).replace("ResilienceStream", "SyncResilienceStream", 1)


# Shown and found there, whoever was the first to import it.
SyncResilienceStream.__module__ = "resilience_pipeline"
