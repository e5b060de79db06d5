"""What the texts of a configuration stand for: registered names, import paths, names of errors.

Also which classes a table's `type` may name.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from inspect import isabstract, isclass
from typing import Any

from attrs import fields, has

from . import _errors, strategies
from ._builder import strategy_types
from ._event import Event
from ._options import REFERENCE, to_name, to_seconds, to_seconds_or_none, to_signed_seconds
from .strategies import Strategy

#: `package.module:attribute`, the attribute perhaps one of another.
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NAME = re.compile(r"[^\W\d]\w*([.:-]\w+)*:?")


class NotFoundError(Exception):
    """A text stands for nothing; the message says why, and reads on from the text's path."""


def is_path(text: str) -> bool:
    """Whether a text has the form of an import path."""
    return _PATH.fullmatch(text) is not None


def looks_like_name(text: str) -> bool:
    """Whether whoever wrote the text may have meant a name."""
    return _NAME.fullmatch(text) is not None


def find(text: str, names: Mapping[str, object]) -> Any:
    """Give what a text stands for.

    Args:
        text: A registered name, an import path, or the name of an exception of Python's or of this
            library's.
        names: What has been registered.

    Raises:
        NotFoundError: It stands for nothing.
    """
    if text in names:
        return names[text]
    if is_path(text):
        return _imported(text)
    for module in (builtins, _errors):
        kind = getattr(module, text, None)
        if _is_error(kind):
            return kind
    msg = f"nothing is registered as {text!r}" + similar(text, names)
    raise NotFoundError(msg)


def _is_error(kind: object) -> bool:
    return isclass(kind) and issubclass(kind, Exception)


def names_of_errors() -> list[str]:
    """Give the names of exceptions that stand for them."""
    return [
        name for each in (builtins, _errors) for name, kind in vars(each).items() if _is_error(kind)
    ]


def _imported(path: str) -> Any:
    module, _, attributes = path.partition(":")
    try:
        found: Any = import_module(module)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:  # noqa: BLE001 - a module may raise anything while it is imported
        msg = f"{path!r} can't be imported: {type(error).__name__}: {error}"
        raise NotFoundError(msg) from None
    return found


def similar(text: str, known: Iterable[str], *, others: str = "") -> str:
    """Suggest what may have been meant, as the end of a message."""
    from difflib import get_close_matches

    close = get_close_matches(text, list(known), n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; {others} {', '.join(map(repr, sorted(known)))}" if others else ""


def kinds_of_strategies() -> dict[str, Callable[..., Strategy[Any]]]:
    """Give the strategies that a table's `type` may name: what the builder has an `add_` for."""
    return strategy_types()


@cache
def kinds_of_values() -> dict[str, type[Any]]:
    """Give what else can be made of a table: the limits of rate limiters, for example."""
    found = (getattr(strategies, name) for name in strategies.__all__)
    return {
        re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind
        for kind in found
        if isclass(kind)
        and has(kind)
        and not isabstract(kind)
        and not issubclass(kind, Strategy | Event)
        and any("rule" in field.metadata for field in fields(kind))
    }


def named_kind(field: Any) -> str | None:
    """Give the `type` that goes without saying for an option, if its value is of one kind alone."""
    kind = field.metadata.get("kind")
    return next((name for name, each in kinds_of_values().items() if each is kind), None)


#: Converters of options that are data.
_OF_DATA = frozenset({to_name, to_seconds, to_seconds_or_none, to_signed_seconds})


def takes_references(field: Any) -> bool:
    """Whether an option of an options class is, or may be, something that is not data."""
    schema = field.metadata.get("schema")
    return field.converter not in _OF_DATA and (schema is None or schema == REFERENCE)
