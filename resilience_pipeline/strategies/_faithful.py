"""What JSON can hold faithfully: what comes back equal, and of the same type.

Pure. Those are `None`, `bool`, `int`, finite `float`, text that is Unicode, and lists and dicts of them
with text for keys; no subclasses, which would come back as their bases. What is contained twice comes
back twice.
"""

from __future__ import annotations

import math
from typing import Any


def unfaithful(value: Any, where: str = "it") -> str | None:
    """Say what of a value JSON can't hold faithfully, and where; `None` if there is nothing."""
    try:
        return _unfaithful(value, where)
    except RecursionError:
        return f"{where} is nested too deeply, or contains itself"


def _unfaithful(value: Any, where: str) -> str | None:
    kind = _type_of(value)
    if value is None or kind is bool:
        return None
    if kind is int:
        return _int_problem(value, where)
    if kind is float:
        return None if math.isfinite(value) else f"{where} is {value!r}"
    if kind is str:
        return _text_problem(value, where)
    if kind is list:
        for number, item in enumerate(value):
            problem = _unfaithful(item, f"{where}[{number}]")
            if problem is not None:
                return problem
        return None
    if kind is dict:
        return _dict_problem(value, where)
    return f"{where} is of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")


def _type_of(value: object) -> type[object]:
    return type(value)


def _dict_problem(value: dict[Any, Any], where: str) -> str | None:
    for key, item in value.items():
        if type(key) is not str:
            return f"{where} has a key that is no text, {key!r}"
        problem = _text_problem(key, f"a key of {where}")
        problem = problem or _unfaithful(item, f"{where}[{key!r}]")
        if problem is not None:
            return problem
    return None


def _text_problem(value: str, where: str) -> str | None:
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{where} is no Unicode text, it contains lone surrogates"
    return None


def _int_problem(value: int, where: str) -> str | None:
    try:
        str(value)
    except ValueError:  # Python limits how many digits it reads and writes
        return f"{where} is a number of too many digits"
    return None
