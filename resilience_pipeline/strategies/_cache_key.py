"""What a cache keeps results under.

Python takes `1`, `True` and `1.0` for one key of a dictionary, and two objects that are no number
for different ones. A frozen key has the types beside the values, inside of tuples, frozensets,
partials and dataclasses too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from .._context import ResilienceContext
from .._errors import MisuseError
from .._event import Event


class CacheKeyEvent(Event):
    """What a cache's `key` is given.

    Attributes:
        context: The execution's context.
        fn: What is called; for a stream, its factory.
        args: With which arguments.
    """

    context: ResilienceContext
    fn: Callable[..., Any]
    args: tuple[Any, ...]


_NAN: Final = object()
#: Types whose values can always be hashed and hold nothing that would have to be looked into.
_PLAIN: Final[frozenset[type]] = frozenset(
    {str, bytes, int, bool, type(None), FunctionType, BuiltinFunctionType, MethodType}
)


def frozen_key(key: Any, origin: str, what: str) -> Hashable:
    """Make the key under which something is kept.

    Args:
        key: The key as its user knows it.
        origin: Says which strategy wants it, for the error.
        what: What gave the key, for the error.

    Raises:
        MisuseError: It can't be hashed.
    """
    try:
        frozen = _freeze(key)
        hash(frozen)
    except TypeError as error:
        msg = (
            f"{origin}: {what} can't be hashed ({error}); give a key= that makes one of it, "
            f"key=lambda event: … for instance"
        )
        raise MisuseError(msg) from error
    return frozen


def default_key(operation_key: object, fn: Any, args: tuple[Any, ...], origin: str) -> Hashable:
    """Make the key of a call: what `frozen_key` makes of `(operation_key, fn, args)`, sooner.

    Raises:
        MisuseError: The function, or an argument, can't be hashed.
    """
    fn_kind: Any = type(fn)  # pyright: ignore[reportUnknownVariableType]
    kinds: tuple[Any, ...] = (type(operation_key), fn_kind, *map(type, args))
    for kind in kinds:  # `issuperset` would make a set of them first
        if kind not in _PLAIN:
            return frozen_key((operation_key, fn, args), origin, "the function, or an argument,")
    return operation_key, fn, args, kinds


def _freeze(value: Any) -> Hashable:
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    items: Any = value
    if kind in _PLAIN:
        return kind, value
    if kind is tuple:
        kinds = tuple(map(type, items))
        if _PLAIN.issuperset(kinds):  # which most are: one hash for all of them
            return kind, value, kinds
        if len(items) == 3 and type(items[2]) is tuple:  # what the default key is made of
            kinds = (*kinds[:2], *map(type, items[2]))
            if _PLAIN.issuperset(kinds):
                return (*items, kinds)
        return kind, tuple(map(_freeze, items))
    if kind is float:
        return kind, (value if value == value else _NAN)  # noqa: PLR0124 - NaN is not
    if isinstance(value, tuple):
        return kind, tuple(map(_freeze, items))
    if isinstance(value, frozenset):
        return kind, frozenset(map(_freeze, items))
    if kind is partial:
        keywords = frozenset((name, _freeze(each)) for name, each in value.keywords.items())
        return kind, _freeze(value.func), _freeze(value.args), keywords
    return kind, value, _types_inside(kind, value)


def _types_inside(kind: Any, value: Any) -> Hashable:
    """Tell apart dataclasses (and attrs' classes) that are equal, by the types of their fields."""
    fields: Any = getattr(kind, "__dataclass_fields__", None)
    if fields is not None:
        if not kind.__dataclass_params__.eq:
            return None
        names = [name for name, field in fields.items() if field.compare]
    else:
        fields = getattr(kind, "__attrs_attrs__", None)
        if fields is None:
            return None
        names = [field.name for field in fields if field.eq]
    return tuple(_freeze(getattr(value, name, None)) for name in names)
