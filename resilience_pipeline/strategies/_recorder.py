"""What record and replay does with one call: its key, its recording, and what comes of that again.

Knows no flights and waits for nothing but the user's `key=`. Loaded with the first pipeline that
records or replays: JSON and digests take their time to import.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .._context import ResilienceContext
from .._errors import MisusedOptionError, MisuseError, RecordingNotFoundError
from .._predicates import is_future_cancellation
from ._base import Site, call_user, origin
from ._recorded_errors import UnknownErrorError, describe, restore
from ._recording_keys import UnfitKeyError, default_key
from ._recordings import (
    Kind,
    Recording,
    RecordingKey,
    Recordings,
    broken,
    problem_of,
    recording_of,
    text_of,
)

if TYPE_CHECKING:
    from ._record_replay import RecordReplay, RecordReplayKeyEvent


class Recorder:
    """Records and replays for one strategy of one pipeline."""

    __slots__ = ("_options", "_recordings", "_where")

    def __init__(self, options: RecordReplay, site: Site) -> None:
        self._options = options
        self._recordings = Recordings(options.directory)
        self._where = origin(site.pipeline_name, site.strategy_name)

    # ---- keys

    async def key_of(
        self, context: ResilienceContext, make_event: Callable[..., RecordReplayKeyEvent]
    ) -> RecordingKey:
        """Find what a call is recorded under."""
        kind: Kind = "call" if context._stream is None else "stream"
        if self._options.key is None:
            return self._default_key_of(context, kind)
        event = make_event(context=context, fn=context._fn, args=context._args)
        value = await call_user(self._options.key, event, "key")
        problem = problem_of(value, "key")
        if problem is None:
            return RecordingKey(value, kind)
        what = f"JSON can't hold what key= gave, {_shown(value)}, because {problem}"
        raise self._misuse(what)

    def _default_key_of(self, context: ResilienceContext, kind: Kind) -> RecordingKey:
        try:
            value, words = default_key(context, context._fn, context._args)
        except UnfitKeyError as unfit:
            problem = str(unfit)
        else:
            return RecordingKey(value, kind, words)
        what = f"JSON can't hold what tells this call from another, because {problem}: give key="
        raise self._misuse(what)

    def find(self, key: RecordingKey) -> Recording | None:
        """Read what was recorded, if anything was."""
        return self._recordings.find(key)

    def not_found(self, key: RecordingKey) -> RecordingNotFoundError:
        directory = self._options.directory
        return RecordingNotFoundError(
            f"{self._where}: nothing was recorded in {os.fspath(directory)!r} for the key "
            f"{key.value!r}",
            key=key.value,
            directory=directory,
        )

    # ---- recording

    @property
    def has_started(self) -> bool:
        """Whether what was recorded before has been removed."""
        return self._recordings.is_fresh

    def start_afresh(self) -> None:
        """Remove what was recorded before, once."""
        try:
            self._recordings.start_afresh()
        except OSError as error:
            self._warn(f"the recordings that are there could not be removed: {error}")

    def record_value(self, key: RecordingKey, value: Any) -> str:
        """Record a value; give the text of the recording.

        Raises:
            OptionsError: JSON can't hold it.
        """
        return self._keep(key, {"key": key.value, "value": self.encoded(value)})

    def record_chunks(self, key: RecordingKey, chunks: list[Any]) -> str:
        """Record a stream that has ended, of encoded chunks."""
        return self._keep(key, {"key": key.value, "chunks": chunks})

    def record_error(self, key: RecordingKey, chunks: list[Any], error: Exception) -> str | None:
        """Record an error, of a stream with the chunks before it; `None` if it isn't recorded."""
        if not self._options.record_errors or isinstance(error, MisuseError):
            return None
        if is_future_cancellation(type(error)):
            return None
        described = describe(error)
        if described is None:
            self._warn(
                f"{_shown(error)} was not recorded: JSON can't hold what it would have to be made of again"
            )
            return None
        before = {"chunks": chunks} if key.kind == "stream" else {}
        return self._keep(key, {"key": key.value, **before, "error": described})

    def encoded(self, value: Any) -> Any:
        """Give the JSON value of a result or chunk.

        Raises:
            OptionsError: JSON can't hold it.
        """
        encode = self._options.encode
        encoded = value if encode is None else self._plainly(encode, value, "encode")
        problem = problem_of(encoded)
        if problem is None:
            return encoded
        remedy = "give encode= and decode=" if encode is None else "it is what encode= gave"
        what = (
            f"JSON can't hold the value faithfully, because {problem}: {remedy}; the value is "
            f"{_shown(value)}"
        )
        raise self._misuse(what)

    def _keep(self, key: RecordingKey, recording: Recording) -> str:
        """Write a recording; where that fails the result is no worse for it."""
        text = text_of(recording)
        try:
            self._recordings.keep(key, text)
        except OSError as error:
            self._warn(f"nothing was recorded for the key {key.value!r}: {error}")
        return text

    # ---- replaying

    async def replay_text(self, context: ResilienceContext, key: RecordingKey, text: str) -> Any:
        """Give what the text of a recording says."""
        return await self.replay(context, key, recording_of(text))

    async def replay(
        self, context: ResilienceContext, key: RecordingKey, recording: Recording
    ) -> Any:
        """Give what was recorded, or raise it."""
        described = recording.get("error")
        ending = None if described is None else partial(self._restored, key, described)
        if context._stream is not None:
            source = _Replay(recording["chunks"], self._decoded, ending)
            return await context._stream.adopt(context, source)
        if ending is not None:
            raise ending()
        return self._decoded(recording["value"])

    def _restored(self, key: RecordingKey, described: Any) -> Exception:
        try:
            return restore(described)
        except UnknownErrorError as unknown:
            return broken(self._recordings.path_of(key), str(unknown))

    def _decoded(self, value: Any) -> Any:
        decode = self._options.decode
        return value if decode is None else self._plainly(decode, value, "decode")

    # ---- both

    def _plainly(self, fn: Callable[[Any], Any], value: Any, name: str) -> Any:
        answer = fn(value)
        if not inspect.isawaitable(answer):
            return answer
        what = f"{name}= must be a plain function, it gave {answer!r}"
        if inspect.iscoroutine(answer):
            answer.close()
        raise self._misuse(what)

    def _misuse(self, what: str) -> MisusedOptionError:
        return MisusedOptionError(f"{self._where}: {what}", (what,))

    def _warn(self, what: str) -> None:
        warnings.warn(f"{self._where}: {what}", RuntimeWarning, stacklevel=2)


def _shown(value: object) -> str:
    """Show a value in a message, whatever its `repr` does."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - of the user's making
        return object.__repr__(value)


class _Replay(Iterator[Any], AsyncIterator[Any]):
    """A source that gives recorded chunks, for event loops and threads."""

    def __init__(
        self,
        chunks: list[Any],
        decode: Callable[[Any], Any],
        ending: Callable[[], Exception] | None,
    ) -> None:
        self._chunks = iter(chunks)
        self._decode = decode
        self._ending = ending

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        for chunk in self._chunks:
            return self._decode(chunk)
        ending, self._ending = self._ending, None
        if ending is not None:
            raise ending()
        raise StopIteration

    def __aiter__(self) -> _Replay:
        return self

    async def __anext__(self) -> Any:
        for chunk in self:
            return chunk
        raise StopAsyncIteration
