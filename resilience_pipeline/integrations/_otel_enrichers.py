"""What a program adds to the attributes of events: its enrichers, and what becomes of what they give.

They are called by the first who needs what they give, under no lock, where the event is told: in the
task or thread of the call. What they raise, or give that can't be an attribute, is logged once for each, as it
is for listeners, and the event goes on without what that one gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from .. import MisuseError, OptionsError
from ..telemetry import TelemetryEvent
from ..telemetry._listeners import complain, listener_problem
from ._otel_attributes import TOO_LARGE

#: What all exporters can send: OpenTelemetry's standard attributes.
Attribute: TypeAlias = (
    str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
)
Enricher: TypeAlias = Callable[[TelemetryEvent], Mapping[str, Attribute | None] | None]


class Further:
    """What enrichers add to the attributes of one event.

    Args:
        enrichers: The functions, in the order in which they are called.
        event: What they are called with.
    """

    __slots__ = ("_enrichers", "_event", "_given")

    def __init__(self, enrichers: tuple[Enricher, ...], event: TelemetryEvent) -> None:
        self._enrichers = enrichers
        self._event = event
        self._given: dict[str, Attribute] | None = None

    def attributes(self) -> Mapping[str, Attribute]:
        """Give the attributes; the first time, by calling the enrichers."""
        given = self._given
        if given is None:
            # Kept before it is filled: where an interrupt comes out of one of them, the end of the span asks again.
            given = self._given = {}
            for enricher in self._enrichers:
                try:
                    given.update(_attributes_in(enricher(self._event)))
                except Exception as error:  # noqa: BLE001 - an enricher never touches the call
                    complain(enricher, error)
        return given


def as_enrichers(enrichers: Sequence[Any]) -> tuple[Enricher, ...]:
    """Give the enrichers of an option, or refuse what is none."""
    if isinstance(enrichers, str) or not isinstance(enrichers, Sequence):
        if inspect.iscoroutine(enrichers):
            enrichers.close()
        problems = [f"enrichers must be a list of functions, got {enrichers!r}"]
        given: tuple[Any, ...] = ()
    else:
        given = tuple(enrichers)
        problems = [
            f"each of enrichers must be {problem}"
            for each in given
            if (problem := listener_problem(each, "nobody waits for enrichers")) is not None
        ]
    if problems:
        msg = "bad options for OpenTelemetryListener: " + "; ".join(problems)
        raise OptionsError(msg, tuple(problems))
    return given


# ---- what they give -----------------------------------------------------------------------------


def _attributes_in(answer: object) -> dict[str, Attribute]:
    """Copy an answer, all of it or nothing: one value that can't be sent would take others along."""
    if answer is None:
        return {}
    if not _is_mapping(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        msg = f"it returned {answer!r}; an enricher returns a mapping of attributes, or None"
        raise MisuseError(msg)
    return {
        _checked_name(name): _checked(name, value)
        for name, value in answer.items()
        if value is not None
    }


def _checked_name(name: object) -> str:
    if isinstance(name, str) and name:
        return name
    msg = f"it named an attribute {name!r}; names of attributes are text, and not empty"
    raise MisuseError(msg)


def _checked(name: object, value: object) -> Attribute:
    if _is_simple(value):
        return value
    if _is_list(value):
        several = tuple(value)  # which can be hashed, as it is to tell series of metrics apart
        if all(map(_is_simple, several)) and len(set(map(type, several))) <= 1:
            return several
    msg = (
        f"it gave the attribute {name!r} the value {value!r}; values of attributes are text, "
        "bools, floats, whole numbers of 64 bits, and lists of one of these"
    )
    raise MisuseError(msg)


def _is_simple(value: object) -> TypeGuard[str | bool | int | float]:
    if isinstance(value, int):
        return -TOO_LARGE <= value < TOO_LARGE
    return isinstance(value, str | float)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def _is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)
