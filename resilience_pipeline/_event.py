"""What hooks, predicates and generators are given: events.

Made by hand and not by attrs, whose class each of them would be: to build one takes a third of a
millisecond, and there are so many that it would be a quarter of the time of an import.
"""

from __future__ import annotations

from inspect import Parameter, Signature, get_annotations, signature
from typing import Any, ClassVar, Never

from attrs.exceptions import FrozenInstanceError
from typing_extensions import dataclass_transform


class _LazySignature:
    """The signature of an event's constructor, made when somebody asks: imports are quicker by it."""

    def __get__(self, event: object, kind: type[Event]) -> Signature:
        annotations: dict[str, Any] = {}
        for each in reversed(kind.__mro__):
            annotations |= get_annotations(each)
        parameters = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name])
            for name, default in kind._fields.items()
        ]
        return Signature(parameters, return_annotation=None)


@dataclass_transform(kw_only_default=True, eq_default=False, frozen_default=True)
class Event:
    """An immutable set of fields, those that its class and its bases annotate; equal to itself alone."""

    __signature__: ClassVar[_LazySignature] = _LazySignature()
    #: The fields with their defaults, `Parameter.empty` where there is none: the class's own, then
    #: its bases'.
    _fields: ClassVar[dict[str, Any]] = {}
    _required: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        """Find the fields."""
        mine = vars(cls)
        fields = {
            name: mine.get(name, Parameter.empty)
            for name, annotation in get_annotations(cls).items()
            if "ClassVar" not in str(annotation)
        }
        for name, default in cls._fields.items():
            fields.setdefault(name, mine.get(name, default))
        cls._fields = fields
        cls._required = frozenset(
            name for name, default in fields.items() if default is Parameter.empty
        )

    def __init__(self, **fields: Any) -> None:
        """Take the fields; one that is left out has the default of its class.

        Raises:
            TypeError: One is missing or unknown.
        """
        given = fields.keys()
        if not self._required <= given <= self._fields.keys():
            signature(type(self)).bind(**fields)  # raises
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> Never:
        """Refuse: events are immutable."""
        raise FrozenInstanceError

    def __delattr__(self, name: str) -> Never:
        """Refuse: events are immutable."""
        raise FrozenInstanceError

    def __repr__(self) -> str:
        """Show the fields that differ from their defaults, as in a call."""
        fields = ", ".join(
            f"{name}={getattr(self, name)!r}"
            for name, default in self._fields.items()
            if getattr(self, name) is not default
        )
        return f"{type(self).__name__}({fields})"
