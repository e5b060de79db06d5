"""What tables of a configuration come to: objects that can be made again.

A pipeline is built from its tables once for each instance, and again with each reload. What was made
of a table and counts something, a retry budget or a limiter of the user's, must not be shared by
those: so what is kept of a table is how to make its object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from attrs import field, frozen


@frozen(eq=False)
class Recipe:
    """An object that was made of a table.

    Attributes:
        kind: What makes it.
        options: What that is given; among it there may be what is made of other tables.
        made: The object that was made when the table was read, by which the table was found good.
    """

    kind: Callable[..., Any]
    options: Mapping[str, object] = field(repr=False)
    made: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "made", self.kind(**_each(self.options, as_made)))

    def make(self) -> Any:
        """Make another one, which shares nothing that was made of a table."""
        return self.kind(**_each(self.options, made_again))


def as_made(value: object) -> object:
    """Give what a value came to when it was read."""
    return value.made if isinstance(value, Recipe) else _within(value, as_made)


def made_again(value: object) -> object:
    """Give what a value comes to for one more pipeline."""
    return value.make() if isinstance(value, Recipe) else _within(value, made_again)


def _each(options: Mapping[str, object], give: Callable[[object], object]) -> dict[str, object]:
    return {name: give(value) for name, value in options.items()}


def _within(value: object, give: Callable[[object], object]) -> object:
    if not _has_recipe(value):
        return value
    array = cast("list[object] | tuple[object, ...]", value)
    return type(array)(give(each) for each in array)


def _has_recipe(value: object) -> bool:
    """Whether anything of an array was made of a table; others are passed on as they are."""
    if type(value) not in {list, tuple}:
        return isinstance(value, Recipe)
    return any(map(_has_recipe, cast("list[object]", value)))
