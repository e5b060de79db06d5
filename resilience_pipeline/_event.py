"""What hooks, predicates and generators are given: events.

Made by hand and not by attrs, whose class each of them would be: to build one takes a third of a
millisecond, and there are so many that it would be a quarter of the time of an import.
"""

from __future__ import annotations

from inspect import Parameter, Signature
from typing import Any, ClassVar, Never

from attrs.exceptions import FrozenInstanceError
from typing_extensions import dataclass_transform


@dataclass_transform(kw_only_default=True, eq_default=False, frozen_default=True)
class Event:
    """An immutable set of fields, those that its class annotates; equal to itself alone."""

    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        """Make the signature that the constructor has."""
        cls.__signature__ = Signature(
            [
                Parameter(
                    name,
                    Parameter.KEYWORD_ONLY,
                    default=vars(cls).get(name, Parameter.empty),
                    annotation=annotation,
                )
                for name, annotation in cls.__annotations__.items()
            ],
            return_annotation=None,
        )

    def __init__(self, **fields: Any) -> None:
        """Take the fields.

        Raises:
            TypeError: One is missing or unknown.
        """
        expected = self.__annotations__
        if fields.keys() != expected.keys():
            self.__signature__.bind(**fields)  # raises, unless those missing have defaults
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> Never:
        """Refuse: events are immutable."""
        raise FrozenInstanceError

    def __delattr__(self, name: str) -> Never:
        """Refuse: events are immutable."""
        raise FrozenInstanceError

    def __repr__(self) -> str:
        """Show the fields, as in a call."""
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__annotations__)
        return f"{type(self).__name__}({fields})"
