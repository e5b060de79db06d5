"""`flaky`: callables and streams that play a script.

One object stands in for functions of every kind, because what a script plays is said by its items
and not by who calls it. In an event loop a call gives a `_Played`, which can be awaited, run as a
task, or iterated over; in a thread it plays at once. The item is taken when the call is made, under
a lock, so that calls made at once each get one of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Generator, Iterator, Mapping
from typing import Any, final

from attrs import field, frozen

from resilience_pipeline._context import ResilienceContext, current
from resilience_pipeline._errors import MisuseError
from resilience_pipeline._locks import Lock
from resilience_pipeline._options import UNSET, checked, to_seconds, written
from resilience_pipeline.runtime import Runtime, current_runtime
from resilience_pipeline.runtime._here import run
from resilience_pipeline.runtime._threads import ThreadRuntime
from resilience_pipeline.strategies._base import close

from ._loops import current_host


@final
@checked
@frozen
class Wait:
    """An item of a script that takes time.

    The time is that of the clock that drives the pipeline around the call, or real time. It is the
    service's own: `instant` does not shorten it.

    Args:
        seconds: How long, in any duration form; `math.inf` for ever, until the call is cancelled.
        then: The item that is played afterwards. Default: a call returns `None`, and a stream goes
            on with the next item of its list.

    Raises:
        OptionsError: `seconds` is no duration.
    """

    seconds: float = field(converter=to_seconds)
    then: Any = UNSET

    def __repr__(self) -> str:
        """Read like the call."""
        then = "" if self.then is UNSET else f", {written(self.then)}"
        return f"Wait({written(self.seconds)}{then})"


@final
@frozen
class FlakyCall:
    """A call of a `Flaky`.

    Attributes:
        args: Its arguments by position.
        kwargs: Its arguments by name.
        attempt: Number of the attempt it was made in, from 0; `None` outside of a pipeline.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    attempt: int | None


@final
class Flaky:
    """What `flaky` makes: call it with any arguments.

    Attributes:
        calls: A `FlakyCall` for each call so far, in order.
    """

    __slots__ = ("_lock", "_played", "_script", "_then", "calls")

    calls: list[FlakyCall]

    def __init__(self, script: tuple[Any, ...], then: Any) -> None:
        """Not for users: `flaky` makes these."""
        self._script = script
        self._then = then
        self._lock = Lock()
        self._played = 0
        self.calls = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Play the next item.

        Raises:
            MisuseError: The script is over and nothing was said to come `then`.
        """
        context = current.get(None)
        call = FlakyCall(args, kwargs, None if context is None else context.attempt)
        with self._lock:
            number = self._played
            self._played += 1
            self.calls.append(call)
        item = self._script[number] if number < len(self._script) else self._then
        if item is UNSET:
            msg = (
                f"call {number + 1} of {self!r} has no item to play: give it one more, or say with "
                f"then= what comes when the script is over"
            )
            raise MisuseError(msg)
        if context is not None and context._sync is not None:
            return _play_here(item, context.runtime, streams=context._stream is not None)
        if current_host() is None:
            return _play_here(item, ThreadRuntime(), streams=False)
        return _Played(item, context)

    def __repr__(self) -> str:
        """Read like the call that made it."""
        items = [written(each) for each in self._script]
        if self._then is not UNSET:
            items.append(f"then={written(self._then)}")
        return f"flaky({', '.join(items)})"


def flaky(*script: object, then: object = UNSET) -> Flaky:
    """Make a callable that plays a script: something else with each call.

    It stands in for a coroutine function, an async generator function, or their synchronous
    twins, with any arguments, in a pipeline or outside of one. To `wrap`, which looks at the kind
    of a function beforehand, it is a plain function.

    Example::

        fetch = flaky(ConnectionError, Wait("30s"), "page")
        tokens = flaky(["par", ConnectionError], ["whole ", "answer"])

    An item is

    - an exception, or the type of one: it is raised,
    - a `Wait`: the call takes that long,
    - a list: a stream of its items, of which exceptions are raised and each `Wait` is waited where it
      stands; awaited as a whole it is returned,
    - anything else: it is returned.

    Args:
        script: An item for each call.
        then: The item for all calls after those. Default: they raise `MisuseError`, which no
            strategy retries.

    Returns:
        The callable, which has its `calls`. It may be called from several threads and loops at once.
    """
    return Flaky(script, then)


# ---- in an event loop -------------------------------------------------------------------------


@final
class _Played(Coroutine[Any, Any, Any]):
    """What a call gives in an event loop: awaited it plays its item, iterated over it streams it."""

    __slots__ = ("_context", "_item", "_steps")

    def __init__(self, item: Any, context: ResilienceContext | None) -> None:
        self._item = item
        self._context = context
        self._steps: Coroutine[Any, Any, Any] | None = None

    def _coroutine(self) -> Coroutine[Any, Any, Any]:
        if self._steps is None:
            self._steps = _play(self._item, self._runtime())
        return self._steps

    def _runtime(self) -> Runtime:
        return current_runtime() if self._context is None else self._context.runtime

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine().__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine().send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine().throw(*error)

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()

    def __aiter__(self) -> AsyncIterator[Any]:
        return _stream(self._item, self._runtime())

    def __repr__(self) -> str:
        return f"<played by flaky(): {written(self._item)}>"


class _Chunks(list[Any]):
    """A list that was awaited as a whole, and that may be streamed after all."""

    __slots__ = ("_runtime",)

    def __init__(self, pieces: list[Any], runtime: Runtime) -> None:
        super().__init__(pieces)
        self._runtime = runtime

    def __aiter__(self) -> AsyncIterator[Any]:
        return _stream(self, self._runtime)


async def _play(item: Any, runtime: Runtime) -> Any:
    """Play what one call has to play."""
    played = await _settled(item, runtime)
    if type(played) is list:
        return _Chunks(played, runtime)  # pyright: ignore[reportUnknownArgumentType]
    return None if played is UNSET else played


async def _stream(item: Any, runtime: Runtime) -> AsyncIterator[Any]:
    """Play what one stream has to play, chunk by chunk."""
    played = await _play(item, runtime)
    if isinstance(played, _Chunks):
        for piece in played:
            chunk = await _settled(piece, runtime)
            if chunk is not UNSET:
                yield chunk
    elif hasattr(played, "__aiter__"):
        try:
            async for chunk in played:
                yield chunk
        finally:
            await close(played)
    else:
        msg = f"a stream was asked for where flaky() plays {played!r}: give a list of its chunks"
        raise MisuseError(msg)


async def _settled(item: Any, runtime: Runtime) -> Any:
    """Wait and raise as an item says; what is left of it, `UNSET` if that is nothing."""
    while isinstance(item, Wait):
        if item.seconds > 0:
            # Not `sleep`: that is how strategies wait, and it takes no time within `instant`.
            await runtime.waiter().wait(item.seconds)
        else:
            await runtime.sleep(0)
        item = item.then
    if isinstance(item, BaseException):
        raise item.with_traceback(None)  # which would grow with each raise
    if _is_error_type(item):
        raise item
    return item


def _is_error_type(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, BaseException)


# ---- in a thread ------------------------------------------------------------------------------


def _play_here(item: Any, runtime: Runtime, *, streams: bool) -> Any:
    played: Any = run(_play(item, runtime))
    if not isinstance(played, _Chunks):
        return played
    if streams or any(map(_happens, played)):
        return _stream_here(played, runtime)
    return list(played)


def _happens(piece: object) -> bool:
    """Whether something of a list has to be played rather than given."""
    return _is_error_type(piece) or isinstance(piece, BaseException | Wait)


def _stream_here(pieces: list[Any], runtime: Runtime) -> Iterator[Any]:
    for piece in pieces:
        chunk = run(_settled(piece, runtime))
        if chunk is not UNSET:
            yield chunk
