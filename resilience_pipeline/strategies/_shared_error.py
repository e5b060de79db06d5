"""One error that several callers get, each of them one of its own.

An error that is raised grows: its traceback gets longer with every frame it leaves, and strategies
chain others to it. So the first to take it gets the error itself, everybody else a copy. Copies are
made without running the class's constructor, whose signature nobody knows.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from types import MemberDescriptorType, WrapperDescriptorType
from typing import Any, TypeVar

from .._locks import Lock

X = TypeVar("X", bound=BaseException)

_MISSING = object()


class SharedError:
    """An error, on its way to several callers.

    Args:
        error: The error, as it came out.
        mark: The execution in which it came out: a rejection that was made in it becomes the own
            rejection of each one who takes it.
    """

    __slots__ = ("_error", "_is_own", "_is_taken", "_lock", "_traceback")

    def __init__(self, error: BaseException, mark: object) -> None:
        self._error = error
        self._traceback = error.__traceback__
        self._is_own = getattr(error, "_execution", None) is mark
        self._is_taken = False
        self._lock = Lock()

    @property
    def error(self) -> BaseException:
        """The error itself, to be looked at."""
        return self._error

    def take(self, mark: object) -> BaseException:
        """Give an error to be raised by the execution `mark`."""
        error = self._error
        with self._lock:  # two may come at once, and must not take the same
            taken, self._is_taken = self._is_taken, True
        if taken:
            error = copied(error)
        if self._is_own:
            _mark(error, mark)
        try:
            return error.with_traceback(self._traceback)
        finally:
            del error

    def to_store(self) -> SharedError:
        """Give what can be kept: without the tracebacks, which would keep every frame alive."""
        stored = SharedError(_without_tracebacks(self._error, set()), None)
        stored._is_own = self._is_own
        stored._is_taken = True
        return stored


def copied(error: X) -> X:
    """Make an error that is like another one in all but its traceback.

    Its class, arguments, attributes, notes, cause and context are the same. Where that is not to be
    had, because the class is made by its own `__new__` for instance, the error itself is given.
    """
    for make in (_made_anew, copy.copy):
        with suppress(Exception):  # whatever code of the user's may raise
            other = make(error)
            if type(other) is type(error) and other is not error and other.args == error.args:
                other.__cause__ = error.__cause__
                other.__context__ = error.__context__
                other.__suppress_context__ = error.__suppress_context__
                return other
    return error


def _made_anew(error: X) -> X:
    kind = type(error)
    other = kind.__new__(kind, *error.args)
    for base in kind.__mro__:
        native = vars(base).get("__init__")
        if isinstance(native, WrapperDescriptorType):  # of Python's own; sets what only it can
            with suppress(Exception):
                native(other, *error.args)
            break
    other.args = error.args
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType):  # slots, and fields of Python's own
                with suppress(AttributeError, TypeError):
                    value = getattr(error, name)
                    if getattr(other, name, _MISSING) is not value:  # None may be set, or not
                        setattr(other, name, value)
    other.__dict__.update(error.__dict__)
    notes = other.__dict__.get("__notes__")
    if isinstance(notes, list):
        other.__dict__["__notes__"] = list(notes)  # pyright: ignore[reportUnknownArgumentType]
    return other


def _mark(error: Any, mark: object) -> None:
    error._execution = mark


def _without_tracebacks(error: X, seen: set[int]) -> X:
    """Copy an error and what led to it, without any traceback."""
    seen.add(id(error))
    other = copied(error)
    if other is error:
        return error.with_traceback(None)
    if hasattr(other, "_execution"):
        _mark(other, None)
    cause, context = other.__cause__, other.__context__
    suppressed = other.__suppress_context__
    other.__cause__ = (
        None if cause is None or id(cause) in seen else _without_tracebacks(cause, seen)
    )
    if context is cause:
        other.__context__ = other.__cause__
    else:
        other.__context__ = (
            None if context is None or id(context) in seen else _without_tracebacks(context, seen)
        )
    other.__suppress_context__ = suppressed
    return other.with_traceback(None)
