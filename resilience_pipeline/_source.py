"""One source of a stream: opening what a factory gives, reading it, closing it in order.

A `Source` knows the protocols of sources and nothing of tasks: its methods have to be run by one
task, in one context, from opening to close. Who that is, is decided by its carrier, see
`_carriers`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterator
from contextlib import suppress
from types import AsyncGeneratorType
from typing import Any, cast

from ._cancellation import NEVER, CancellationFlag, running_flag
from ._errors import MisuseError
from ._locks import Lock
from ._predicates import members_of
from .strategies._base import close, close_here


class Source:
    """A source from opening to close.

    Args:
        make: Calls the factory; what it gives may be an async iterable, an async context manager
            around one, or an awaitable of either.
    """

    __slots__ = ("_closed", "_iterable", "_iterator", "_make", "_manager", "anext")

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._manager: Any = None
        self._iterable: Any = None
        self._iterator: Any = None
        self._closed = False
        #: The iterator's own `__anext__`; set by `open`.
        self.anext: Callable[[], Awaitable[Any]]

    async def open(self) -> None:
        """Call the factory and get to the iterator."""
        try:
            made = entered = self._make()
            if not _is_manager(made) and not _is_iterable(made) and inspect.isawaitable(made):
                made = entered = await made
            self._iterable = made
            if _is_manager(made):
                entered = await made.__aenter__()
                self._manager = made
                self._iterable = entered if _is_iterable(entered) else made
            if not _is_iterable(self._iterable):
                raise MisuseError(_not_iterable(entered))
            self._iterator = self._iterable.__aiter__()
            self.anext = self._iterator.__anext__
        except StopAsyncIteration as stray:
            raise stray_error(stray) from stray

    @property
    def athrow(self) -> Callable[[BaseException], Awaitable[Any]] | None:
        """The iterator's own `athrow`, if it is a generator."""
        return getattr(self._iterator, "athrow", None)

    def leave_to_reader(self, closed: Callable[[], object]) -> bool:  # noqa: ARG002
        """Have whoever is in the middle of a read close it, and call `closed`; false if nobody is."""
        return False

    def generator_anext(self) -> Callable[[], Any] | None:
        """The iterator's `__anext__` if it is an async generator of Python's own."""
        return self.anext if type(self._iterator) is AsyncGeneratorType else None

    async def close(self, error: BaseException | None = None) -> bool:
        """Close the iterator, the iterable and the context manager, as far as there are any.

        Args:
            error: What the context manager is told that ended its block.

        Returns:
            Whether the context manager swallowed `error`.
        """
        if self._closed:
            return False
        self._closed = True
        trouble: BaseException | None = None
        told: BaseException | None = None
        try:
            for subject in self._closable():
                try:
                    await self._close_one(subject)
                except BaseException as raised:  # noqa: BLE001 - raised when all is closed
                    trouble = raised if trouble is None else trouble
            if self._manager is None:
                swallowed = False
            else:
                # Entered and left by hand, because reads come in between.
                told = trouble if error is None else error
                kind, tb = (None, None) if told is None else (type(told), told.__traceback__)
                swallowed = bool(await self._leave(kind, told, tb))
            if trouble is not None and not (swallowed and error is None):
                raise trouble
            return swallowed  # noqa: TRY300
        except StopAsyncIteration as stray:
            raise stray_error(stray) from stray
        finally:
            trouble = told = None

    async def _leave(self, kind: Any, error: Any, tb: Any) -> Any:
        return await self._manager.__aexit__(kind, error, tb)

    async def _close_one(self, subject: object) -> None:
        try:
            await close(subject)
        except BaseExceptionGroup as group:
            # What a task group makes of the GeneratorExit that closes the generator around it.
            if not _is_quiet(group):
                raise

    def _closable(self) -> list[Any]:
        """The iterator and the iterable it came from; a context manager's exit closes for itself."""
        subjects = [self._iterator, self._iterable]
        if self._iterator is self._iterable:
            subjects.pop()
        return [each for each in subjects if each is not None and each is not self._manager]


class SyncSource(Source):
    """A source of synchronous code: a plain iterable, or a context manager around one.

    Where its time is limited its reader may be left alone in the middle of a read; then it is that
    which closes the source, once it has come back; what runs in there is told by its flag.
    """

    __slots__ = ("_flag", "_is_reading", "_left_to_reader", "_lock")

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self._lock = Lock()
        self._flag = NEVER
        self._is_reading = False
        #: What to call when it is closed, if that is for whoever is reading it.
        self._left_to_reader: Callable[[], object] | None = None

    async def open(self) -> None:
        """Call the factory and get to the iterator."""
        around = running_flag.get()
        self._flag = CancellationFlag(None if around is NEVER else around)
        running_flag.set(self._flag)  # in the source's own context: each read may be another job's
        try:
            made: Any = self._make()
            entered: Any = made
            self._iterable = made
            if _is_sync_manager(made):
                entered = made.__enter__()
                self._manager = made
                self._iterable = entered if _is_sync_iterable(entered) else made
            if not _is_sync_iterable(self._iterable):
                raise MisuseError(_not_iterable_sync(entered))
            self._iterator = iter(self._iterable)
        except (StopIteration, StopAsyncIteration) as stray:
            raise stray_error(stray) from stray
        self.anext = self._next

    async def _next(self) -> Any:
        with self._lock:
            self._is_reading = True
        try:
            return next(self._iterator)
        except StopIteration:
            pass
        except StopAsyncIteration as stray:  # or it would pass for the end
            raise stray_error(stray) from stray
        finally:
            with self._lock:
                self._is_reading = False
                closed = self._left_to_reader
            if closed is not None:
                running_flag.set(NEVER)  # what closes it may wait
                with suppress(Exception):  # nobody is left to hear of it
                    await self.close()
                closed()
        raise StopAsyncIteration

    def leave_to_reader(self, closed: Callable[[], object]) -> bool:
        with self._lock:
            if not self._is_reading:
                return False
            self._left_to_reader = closed
        self._flag.set()
        return True

    async def close(self, error: BaseException | None = None) -> bool:
        """Close it; what is around tells what runs in there no more."""
        self._flag.leave()
        return await super().close(error)

    async def _leave(self, kind: Any, error: Any, tb: Any) -> Any:
        return self._manager.__exit__(kind, error, tb)

    async def _close_one(self, subject: object) -> None:
        close_here(subject)


def is_source(subject: object) -> bool:
    """Whether something is streamed from, in place of being a chunk."""
    return _is_manager(subject) or _is_iterable(subject)


def is_sync_source(subject: object) -> bool:
    """Whether something is iterated over, in place of being a chunk: a list is a chunk."""
    return _is_sync_manager(subject) or isinstance(subject, Iterator)


def _is_sync_manager(subject: object) -> bool:
    return hasattr(type(subject), "__enter__") and hasattr(type(subject), "__exit__")


def _is_sync_iterable(subject: object) -> bool:
    return hasattr(type(subject), "__iter__")


def _is_manager(subject: object) -> bool:
    # Asked of the type, as the language does: a class that makes managers is none itself.
    return hasattr(type(subject), "__aenter__") and hasattr(type(subject), "__aexit__")


def _is_iterable(subject: object) -> bool:
    return isinstance(subject, AsyncIterable)


def _is_quiet(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_quiet, members_of(cast(Any, error))))
    return isinstance(error, GeneratorExit)


def stray_error(stray: BaseException) -> RuntimeError:
    """Make the error for an exception that means an end, raised where nothing can end."""
    return RuntimeError(
        f"the stream's source raised {type(stray).__name__} where it does not belong"
    )


def _not_iterable(made: object) -> str:
    got = f"the factory of a stream gave {made!r}, which is no async iterable"
    if inspect.isgenerator(made):
        made.close()
        return f"{got}: make it an async generator function"
    return f"{got}; for a single result use execute()"


def _not_iterable_sync(made: object) -> str:
    got = f"the factory of a stream gave {made!r}, which is not iterable"
    if inspect.iscoroutine(made):
        made.close()
    if inspect.isawaitable(made) or _is_iterable(made) or _is_manager(made):
        return f"{got} in a synchronous call: run it with execute_stream() in an event loop"
    return f"{got}; for a single result use execute_sync()"
