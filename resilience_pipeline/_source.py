"""One source of a stream: opening what a factory gives, reading it, closing it in order.

A `Source` knows the protocols of sources and nothing of tasks: its methods have to be run by one
task, in one context, from opening to close. Who that is, is decided by its carrier, see
`_carriers`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable
from types import AsyncGeneratorType
from typing import Any, cast

from ._errors import MisuseError
from ._predicates import members_of
from .strategies._base import close


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

    def generator_anext(self) -> Callable[[], Any] | None:
        """The iterator's `__anext__` if it is an async generator of Python's own."""
        return self.anext if type(self._iterator) is AsyncGeneratorType else None

    @property
    def athrow(self) -> Callable[[BaseException], Awaitable[Any]] | None:
        """The iterator's own `athrow`, if it is a generator."""
        return getattr(self._iterator, "athrow", None)

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
                    await _close_one(subject)
                except BaseException as raised:  # noqa: BLE001 - raised when all is closed
                    trouble = raised if trouble is None else trouble
            if self._manager is None:
                swallowed = False
            else:
                # Entered and left by hand, because reads come in between.
                told = trouble if error is None else error
                kind, tb = (None, None) if told is None else (type(told), told.__traceback__)
                swallowed = bool(await self._manager.__aexit__(kind, told, tb))
            if trouble is not None and not (swallowed and error is None):
                raise trouble
            return swallowed  # noqa: TRY300
        except StopAsyncIteration as stray:
            raise stray_error(stray) from stray
        finally:
            trouble = told = None

    def _closable(self) -> list[Any]:
        """The iterator and the iterable it came from; a context manager's exit closes for itself."""
        subjects = [self._iterator, self._iterable]
        if self._iterator is self._iterable:
            subjects.pop()
        return [each for each in subjects if each is not None and each is not self._manager]


async def _close_one(subject: Any) -> None:
    try:
        await close(subject)
    except BaseExceptionGroup as group:
        # What a task group makes of the GeneratorExit that closes the generator around it.
        if not _is_quiet(group):
            raise


def is_source(subject: object) -> bool:
    """Whether something is streamed from, in place of being a chunk."""
    return _is_manager(subject) or _is_iterable(subject)


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
