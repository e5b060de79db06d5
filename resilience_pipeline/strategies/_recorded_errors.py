"""Exceptions in recordings: described as JSON, and made again as their class.

Pure: nothing here reads or writes files. A description holds the class by its import path, the
arguments, and those attributes that JSON can hold. Nothing of the user's runs when an error is made
again but `__new__`: the signature of an `__init__` is not known, nor what else it does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ._faithful import unfaithful

#: Set on classes that are made by a class statement, as opposed to those built into Python.
_HEAP_TYPE = 1 << 9


class UnknownErrorError(Exception):
    """A description names no exception class that can be found, or is no description."""


def describe(error: Exception) -> dict[str, Any] | None:
    """Describe an error; `None` if it could not be made again from that."""
    kind = type(error)
    args, state = _reduced(error)
    kept = {name: value for name, value in state.items() if unfaithful(value) is None}
    described = {
        "type": f"{kind.__module__}:{kind.__qualname__}",
        "message": _text(error),
        "args": list(args),
        "attributes": kept,
    }
    left_out = sorted(state.keys() - kept.keys())
    if left_out:
        described["left_out"] = left_out
    if unfaithful(described) is not None:
        return None
    try:
        twin = restore(described)
    except Exception:  # noqa: BLE001 - whatever its class makes of it: it can't be made again
        return None
    same = type(twin) is kind and twin.args == error.args and _text(twin) == described["message"]
    return described if same else None


def restore(described: Any) -> Exception:
    """Make an error again from its description.

    Raises:
        UnknownErrorError: There is no such class, or the description is none.
    """
    try:
        path: str = described["type"]
        args, attributes = tuple(described["args"]), dict(described["attributes"])
        module, _, name = path.partition(":")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"no description of an error: {described!r}"
        raise UnknownErrorError(msg) from error
    kind = _find(module, name)
    if kind is None:
        msg = f"the exception class {path} can't be found"
        raise UnknownErrorError(msg)
    try:
        return _make(kind, args, attributes)
    except Exception as error:
        msg = f"the exception class {path} can't be made again with {args!r}: {error!r}"
        raise UnknownErrorError(msg) from error


def copied(error: Exception) -> Exception | None:
    """Make the same error again, for somebody else to raise; `None` if that can't be done."""
    args, state = _reduced(error)
    try:
        twin = _make(type(error), args, state)
    except Exception:  # noqa: BLE001 - whatever its class makes of it
        return None
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    return twin


def _reduced(error: Exception) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give the arguments it would be pickled with, and its attributes."""
    args, state = error.args, dict(vars(error))
    if isinstance(error, OSError):
        reduced: Any = OSError.__reduce__(error)  # the file names are in here alone
        args = reduced[1]
    state.pop("_execution", None)  # ties a rejection to its execution, and stays behind
    return args, state


def _make(kind: type[Exception], args: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *args)
    # What is built into Python keeps some of its state elsewhere than in attributes.
    native: Any = next(each for each in kind.__mro__ if not each.__flags__ & _HEAP_TYPE)
    native.__init__(error, *args)
    vars(error).update(attributes)
    return error


def _find(module: str, name: str) -> type[Exception] | None:
    found: Any = sys.modules.get(module)
    if found is None:
        try:
            __import__(module)
        except Exception:  # noqa: BLE001 - whatever that module does
            return None
        found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    # One that was made within a function can be found nowhere else.
    for kind in _subclasses(Exception):
        if (kind.__module__, kind.__qualname__) == (module, name):
            return kind
    return None


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    """Give all classes below one, the latest first."""
    for each in reversed(type.__subclasses__(kind)):
        yield each
        yield from _subclasses(each)


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - of the user's making
        return ""
