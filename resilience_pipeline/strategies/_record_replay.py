"""Record and replay: keep what calls gave in files, and give it again without calling.

Here is who calls and who waits; what is recorded, and what is made of that, is the business of a
`Recorder`. It reads and writes files in the calling thread, between two awaits: no cancellation comes
in between a result and its recording, and no clock moves meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias, cast

from attrs import field, frozen

from .._context import ResilienceContext
from .._errors import ExecutionRejectedError
from .._event import Event
from .._options import boolean, checked, choice, function, rule, text_or_none, to_name
from .._outcome import Rejected
from .._predicates import is_future_cancellation
from ._base import Handler, Site, Strategy
from ._single_flight import Flight, SingleFlight, enter, leave

if TYPE_CHECKING:
    from .._priming import StreamExecution
    from ._recorder import Recorder
    from ._recordings import RecordingKey

Mode: TypeAlias = Literal["replay", "record", "incremental"]


class RecordReplayKeyEvent(Event):
    """What the `key` of record and replay is given.

    Attributes:
        context: The execution's context.
        fn: The function that is called, or the factory of a stream.
        args: Its arguments.
    """

    context: ResilienceContext
    fn: Callable[..., Any]
    args: tuple[Any, ...]


def _directory() -> dict[str, Any]:
    """Say that the option is the path of a directory."""
    expected = "the path of a directory, as text or a path object"

    def check(value: Any) -> str | None:
        if not isinstance(value, str | os.PathLike):
            return expected
        path: object = os.fspath(cast("str | PathLike[str]", value))
        good = isinstance(path, str) and path.strip() and "\0" not in path
        return None if good else expected

    return rule(check)


@checked
@frozen(repr=False)
class RecordReplay(Strategy[Never]):
    """Record what calls and streams gave, in readable files, and replay it without calling.

    What is recorded is what comes out of the inside: a value, the chunks of a stream that was read to
    its end, and errors if you say so. Files are read and written in the calling thread.

    Args:
        directory: Path of the directory with the recordings, one JSON file for each call. Made when
            the first one is written.
        mode: `"replay"`: what was recorded, and a `RecordingNotFoundError` for what was not; nothing
            is called or written. `"record"`: always call, and record; the first call removes the
            recordings that are there. `"incremental"`: replay what is there, record what is not.
        key: A function of a `RecordReplayKeyEvent`, plain or a coroutine function, that gives the
            JSON value that tells one call from another. By default the operation key, the function's
            name and its arguments, which then have to be JSON values.
        record_errors: Whether errors are recorded too: any `Exception` but a `MisuseError` and what
            is a cancellation.
        encode: A plain function that makes a JSON value of a result, or of a chunk of a stream. By
            default they are recorded as they are, and have to be such values.
        decode: A plain function that makes the result, or the chunk, of that value again.
        name: Name for events and errors.

    Raises:
        OptionsError: One or more options have bad values.
    """

    directory: str | PathLike[str] = field(metadata=_directory())
    mode: Mode = field(
        default="replay", kw_only=True, metadata=choice("replay", "record", "incremental")
    )
    key: Callable[[RecordReplayKeyEvent], Any] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    record_errors: bool = field(default=False, kw_only=True, metadata=boolean())
    encode: Callable[[Any], Any] | None = field(
        default=None, kw_only=True, metadata=function("a plain function")
    )
    decode: Callable[[Any], Any] | None = field(
        default=None, kw_only=True, metadata=function("a plain function")
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        """Make the handler of one pipeline; touches no file."""
        return _BoundRecordReplay(self, next, site).handle


class _Failed:
    """A failure that is not recorded, for those who waited for the call.

    Attributes:
        error: A copy, which leads to no frame and is never raised itself.
        is_own: Whether a strategy of this pipeline raised it.
    """

    __slots__ = ("error", "is_own")

    def __init__(self, error: Exception, is_own: bool) -> None:
        self.error = error
        self.is_own = is_own


#: What a flight brings: the text of a recording, or a failure.
_Brought: TypeAlias = "str | _Failed"


class _BoundRecordReplay:
    __slots__ = ("_copied", "_flights", "_mode", "_next", "_recorder", "_site")

    def __init__(self, options: RecordReplay, next: Handler, site: Site) -> None:  # noqa: A002
        from ._recorded_errors import copied
        from ._recorder import Recorder

        self._mode = options.mode
        self._next = next
        self._site = site
        self._copied = copied
        self._recorder = Recorder(options, site)
        self._flights: SingleFlight[_Brought] = SingleFlight()

    def health(self) -> dict[str, Any]:
        recording = len(self._flights)
        # Another one would start afresh, and remove what this one has recorded.
        idle = not recording and not (self._mode == "record" and self._recorder.has_started)
        return {"mode": self._mode, "recording": recording, "idle": idle}

    async def handle(self, context: ResilienceContext) -> Any:
        recorder = self._recorder
        key = await recorder.key_of(context, RecordReplayKeyEvent)
        if self._mode == "record":
            recorder.start_afresh()
            return await self._record(context, key)
        recording = recorder.find(key)
        if recording is not None:
            return await recorder.replay(context, key, recording)
        if self._mode == "replay":
            raise recorder.not_found(key)
        return await self._record(context, key)

    async def _record(self, context: ResilienceContext, key: RecordingKey) -> Any:
        """Make the call, or wait for an equal one."""
        runtime = context.runtime
        while True:
            flight, leads = self._flights.board(key.file_name, runtime)
            if leads:
                return await self._lead(context, key, flight)
            if flight.would_wait_for_itself(runtime):
                return await self._call(context, key, None)
            brought = await self._flights.wait(flight, runtime)
            if isinstance(brought, str):
                # Read again for each of those who waited: what they get is their own.
                return await self._recorder.replay_text(context, key, brought)
            if brought is not None:
                raise self._failure(context, brought)

    async def _lead(
        self, context: ResilienceContext, key: RecordingKey, flight: Flight[_Brought]
    ) -> Any:
        """Make the call for all who wait for it."""
        ride = _Ride(self._flights, key, flight)
        token = enter(flight)
        try:
            if self._mode == "incremental":
                # It may have been recorded since, by a flight that has landed.
                recording = self._recorder.find(key)
                if recording is not None:
                    return await self._recorder.replay(context, key, recording)
            return await self._call(context, key, ride)
        except Exception as error:
            if (
                ride.brought is None
                and flight.is_awaited
                and not is_future_cancellation(type(error))
            ):
                ride.brought = self._failed(context, error)
            raise
        finally:
            leave(token)
            if not ride.goes_on:
                ride.end()

    async def _call(self, context: ResilienceContext, key: RecordingKey, ride: _Ride | None) -> Any:
        """Run the inside and record what it gives."""
        try:
            result = await self._next(context)
        except Exception as error:
            _bring(ride, self._recorder.record_error(key, [], error))
            raise
        try:
            if context._stream is not None:
                return await self._record_stream(context._stream, context, key, result, ride)
            _bring(ride, self._recorder.record_value(key, result))
        except Exception:
            await self._site.discard(context, result)
            raise
        return result

    async def _record_stream(
        self,
        stream: StreamExecution,
        context: ResilienceContext,
        key: RecordingKey,
        result: Any,
        ride: _Ride | None,
    ) -> Any:
        """Have the chunks of a source noted while they are read; the flight ends with its close."""
        primed = await stream.adopted(context, result)
        try:
            recorded = stream.recorded(primed, _Notes(self._recorder, key, ride))
        except Exception:
            await self._site.discard(context, primed)
            raise
        if ride is not None:
            ride.goes_on = stream.hold(recorded, ride.end)
        return recorded

    def _failed(self, context: ResilienceContext, error: Exception) -> _Failed | None:
        twin = self._copied(error)
        is_own = isinstance(context.outcome_of_error(error), Rejected)
        return None if twin is None else _Failed(twin, is_own)

    def _failure(self, context: ResilienceContext, failed: _Failed) -> Exception:
        """Make a failure anew for one of those who waited."""
        error = self._copied(failed.error) or failed.error
        if failed.is_own and isinstance(error, ExecutionRejectedError):
            error._execution = context.execution
        return error


class _Ride:
    """A flight that this call leads, until it ends.

    Attributes:
        brought: What there is for the others so far.
        goes_on: Whether a stream ends it, when it is closed.
    """

    __slots__ = ("_flight", "_flights", "_key", "brought", "goes_on")

    def __init__(
        self, flights: SingleFlight[_Brought], key: RecordingKey, flight: Flight[_Brought]
    ) -> None:
        self._flights = flights
        self._key = key.file_name
        self._flight = flight
        self.brought: _Brought | None = None
        self.goes_on = False

    def end(self) -> None:
        self._flights.land(self._key, self._flight, self.brought)


def _bring(ride: _Ride | None, text: str | None) -> None:
    """Have something for those who wait."""
    if ride is not None and text is not None:
        ride.brought = text


class _Notes:
    """Notes the chunks of one source, and has them recorded when it has ended."""

    __slots__ = ("_chunks", "_key", "_recorder", "_ride")

    def __init__(self, recorder: Recorder, key: RecordingKey, ride: _Ride | None) -> None:
        self._recorder = recorder
        self._key = key
        self._ride = ride
        self._chunks: list[Any] = []

    def add(self, chunk: Any) -> None:
        """Note a chunk; raises if it can't be recorded."""
        self._chunks.append(self._recorder.encoded(chunk))

    def end(self, error: Exception | None) -> None:
        """Record the stream, which has ended or failed.

        Of a failure that isn't recorded nobody else would get the chunks before it: those who wait
        call themselves.
        """
        recorder, key, chunks = self._recorder, self._key, self._chunks
        if error is None:
            text: str | None = recorder.record_chunks(key, chunks)
        else:
            text = recorder.record_error(key, chunks, error)
        _bring(self._ride, text)
