"""What hooks, predicates and generators are given: events.

Made by hand and not by attrs, whose class each of them would be: to build one takes a third of a
millisecond, and there are so many that it would be a quarter of the time of an import.
"""

from __future__ import annotations

from inspect import Parameter, Signature, get_annotations
from typing import Any, ClassVar, Never

from attrs.exceptions import FrozenInstanceError
from typing_extensions import dataclass_transform


@dataclass_transform(kw_only_default=True, eq_default=False, frozen_default=True)
class Event:
    """An immutable set of fields, those that its class and its bases annotate; equal to itself alone."""

    __signature__: ClassVar[Signature]
    _required: ClassVar[frozenset[str]] = frozenset()
    _known: ClassVar[dict[str, Parameter]] = {}

    def __init_subclass__(cls) -> None:
        """Make the signature that the constructor has: the class's own fields, then its bases'."""
        own = {
            name: Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=vars(cls).get(name, Parameter.empty),
                annotation=annotation,
            )
            for name, annotation in get_annotations(cls).items()
            if "ClassVar" not in str(annotation)
        }
        for name, parameter in cls._known.items():
            default = vars(cls).get(name, parameter.default)
            own.setdefault(name, parameter.replace(default=default))
        cls._known = own
        cls._required = frozenset(
            name for name, parameter in own.items() if parameter.default is Parameter.empty
        )
        cls.__signature__ = Signature([*own.values()], return_annotation=None)

    def __init__(self, **fields: Any) -> None:
        """Take the fields; one that is left out has the default of its class.

        Raises:
            TypeError: One is missing or unknown.
        """
        given = fields.keys()
        if not self._required <= given <= self._known.keys():
            self.__signature__.bind(**fields)  # raises
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
            for name, parameter in self._known.items()
            if getattr(self, name) is not parameter.default
        )
        return f"{type(self).__name__}({fields})"
