"""Names of a package that are imported when they are first asked for.

To import all strategies takes longer than all the rest, and hardly a program uses them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from sys import modules
from typing import Any


def lazily(
    package: str, homes: Mapping[str, str], shown_as: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make the `__getattr__` and the `__dir__` of a package.

    Args:
        package: Its full name.
        homes: The module, relative to the package, in which each name is at home.
        shown_as: The public package that tracebacks, reprs and pickles show for what lives there.
    """
    namespace = vars(modules[package])

    def get(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg, name=name, obj=modules[package])
        thing = getattr(import_module(home, package), name)
        if getattr(thing, "__module__", "").startswith(f"{package}."):
            thing.__module__ = shown_as
        namespace[name] = thing
        return thing

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return get, names
