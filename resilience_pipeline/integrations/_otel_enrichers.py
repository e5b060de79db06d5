"""What a program adds to the attributes of events: its enrichers, and what becomes of what they give.

They are called by the first who needs what they give, under no lock, where the event is told: in the
task or thread of the call. What they raise, or give that can't be an attribute, is logged once for each, as it
is for listeners, and the event goes on without what that one gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from threading import local
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


class Enrichers:
    """The enrichers of a listener, which are called one event at a time in each thread.

    What happens in the middle of one is told without further attributes. An enricher that calls through a
    pipeline, of which this listener hears in turn, would come to no end otherwise.

    Args:
        functions: The enrichers, in the order in which they are called.
    """

    __slots__ = ("_functions", "_threads")

    def __init__(self, functions: tuple[Enricher, ...]) -> None:
        self._functions = functions
        self._threads = local()

    def further(self, event: TelemetryEvent) -> Further | None:
        """Give what is to be asked for the further attributes of an event that happens now."""
        if not self._functions or getattr(self._threads, "is_inside", False):
            return None
        return Further(self, event)

    def ask(self, event: TelemetryEvent, given: dict[str, Attribute]) -> None:
        """Call all of them and add what they give."""
        self._threads.is_inside = True
        try:
            for enricher in self._functions:
                try:
                    given.update(_attributes_in(enricher(event)))
                except Exception as error:  # noqa: BLE001 - an enricher never touches the call
                    complain(enricher, error)
        finally:
            self._threads.is_inside = False


class Further:
    """What enrichers add to the attributes of one event.

    Args:
        enrichers: Those who are asked.
        event: The event.
    """

    __slots__ = ("_enrichers", "_event", "_given")

    def __init__(self, enrichers: Enrichers, event: TelemetryEvent) -> None:
        self._enrichers = enrichers
        self._event = event
        self._given: dict[str, Attribute] | None = None

    def attributes(self) -> Mapping[str, Attribute]:
        """Give the attributes; the first time, by asking for them."""
        given = self._given
        if given is None:
            # Kept before it is filled: where an interrupt comes out of one of them, the end of the span asks again.
            given = self._given = {}
            self._enrichers.ask(self._event, given)
        return given


def as_enrichers(enrichers: Sequence[Any]) -> Enrichers:
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
    return Enrichers(given)


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
