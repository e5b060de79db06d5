"""What chaos is made of: weighted choices, and the answers of functions that generate it.

Pure parts: no waiting, no drawing. A draw is an argument, so that the builder's `random=` decides.

A choice of total weight `w` and a draw `u` from [0, 1): the first entry whose weights, added up to
and with its own, exceed `u·w`. A draw outside of [0, 1) picks nothing.
"""

from __future__ import annotations

import builtins
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeAlias, cast

from .._context import ResilienceContext
from .._durations import Duration
from .._errors import MisuseError
from .._event import Event
from .._options import UNSET, bad, is_number, rule, to_seconds, written
from .._outcome import Failure, Rejected, Success


class ChaosEvent(Event):
    """What the functions that decide about chaos, and make it, are given.

    Attributes:
        context: The execution's context.
    """

    context: ResilienceContext


#: What a function of faults gives: `None` where there shall be none.
Fault: TypeAlias = Exception | type[Exception] | None
#: What a fault is made of: a type, or a function without arguments or of the event.
FaultSource: TypeAlias = (
    type[Exception]
    | Callable[[], Fault | Awaitable[Fault]]
    | Callable[[ChaosEvent], Fault | Awaitable[Fault]]
)
FaultGenerator: TypeAlias = (
    type[Exception]
    | Callable[[ChaosEvent], Fault | Awaitable[Fault]]
    | Sequence[tuple[float, FaultSource | str]]
    | str
)
AnyOutcome: TypeAlias = Success[Any] | Rejected[Any] | Failure
OutcomeGenerator: TypeAlias = Callable[[ChaosEvent], Any] | Sequence[tuple[float, Any]]
LatencyGenerator: TypeAlias = Callable[[ChaosEvent], Duration | Awaitable[Duration | None] | None]
Rate: TypeAlias = float | Callable[[ChaosEvent], float | Awaitable[float]]
Enabled: TypeAlias = bool | Callable[[ChaosEvent], bool | Awaitable[bool]]

FAULTS: Final = (
    "an exception type that can be made without arguments, the name of a built-in one, a function "
    "of the event, or a list of (weight, one of these) with weights of at least 0 that are not all 0"
)
OUTCOMES: Final = (
    "a function of the event, or a list of (weight, value, exception type, outcome or function) "
    "with weights of at least 0 that are not all 0"
)


# ---- rules ------------------------------------------------------------------------------------


def rate() -> dict[str, Any]:
    """Say that the option is a number from 0 to 1, or a function."""

    def check(value: Any) -> str | None:
        good = callable(value) or (is_number(value) and 0 <= value <= 1)
        return None if good else "a number from 0 to 1, or a function of the event giving one"

    return rule(check)


def switch() -> dict[str, Any]:
    """Say that the option is `True` or `False`, or a function."""

    def check(value: Any) -> str | None:
        good = callable(value) or isinstance(value, bool)
        return None if good else "True, False, or a function of the event giving one of them"

    return rule(check)


def required_function() -> dict[str, Any]:
    """Say that the option is a function, and not `None`."""
    return rule(lambda value: None if callable(value) else "a function of the event")


class Weighted(tuple[tuple[float, Any], ...]):
    """Entries of (weight, what), to be drawn from."""

    __slots__ = ()

    def pick(self, draw: float) -> Any:
        """Give what a draw from [0, 1) picks; `UNSET` for one outside of that."""
        if not 0 <= draw < 1:
            return UNSET
        point = draw * math.fsum(weight for weight, _ in self)
        reached, last = 0.0, UNSET
        for weight, what in self:
            if weight > 0:
                reached, last = reached + weight, what
                if point < reached:
                    return what
        return last  # rounding may leave the point at the very end

    def __repr__(self) -> str:
        """Read like the list it was made of."""
        return f"[{', '.join(f'({weight!r}, {written(what)})' for weight, what in self)}]"


# ---- converters -------------------------------------------------------------------------------


def to_fault_generator(value: FaultGenerator) -> FaultGenerator:
    """Take an exception type, a function, or weighted ones; names of built-in types are looked up."""
    generator = _to_fault(value)
    if generator is UNSET:
        generator = _to_weighted(value, _to_fault, FAULTS)
    return cast("FaultGenerator", generator)


def to_outcome_generator(value: OutcomeGenerator) -> OutcomeGenerator:
    """Take a function or weighted outcomes."""
    if not _is_function(value):
        value = _to_weighted(value, _to_outcome, OUTCOMES)
    return value


def to_latency(value: Duration | LatencyGenerator) -> float | LatencyGenerator:
    """Take a duration or a function."""
    return value if callable(value) else to_seconds(value)


def _to_weighted(value: Any, convert: Callable[[Any], Any], expected: str) -> Any:
    entries: list[tuple[float, Any]] = []
    for entry in value if _is_list(value) else ():
        weight, what = entry if _is_list(entry) and len(entry) == 2 else (math.nan, None)
        converted = convert(what)
        if converted is UNSET or not is_number(weight) or not 0 <= weight < math.inf:
            return bad(value, expected)
        entries.append((weight, converted))
    if not any(weight > 0 for weight, _ in entries):
        return bad(value, expected)
    return Weighted(entries)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _to_fault(value: Any) -> Any:
    """Give what makes a fault, or `UNSET` if this is nothing that does."""
    kind: Any = getattr(builtins, value, None) if isinstance(value, str) else value
    makes_faults = _needs_nothing(kind) if _is_fault_type(kind) else _is_function(value)
    return kind if makes_faults else UNSET


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _to_outcome(value: Any) -> Any:
    return _to_fault(value) if _is_fault_type(value, BaseException) else value


def _needs_nothing(kind: type[Exception]) -> bool:
    """Whether exceptions of this type can be made without arguments; only making one tells."""
    try:
        kind()
    except Exception:  # noqa: BLE001 - whatever it is that it misses
        return False
    return True


# ---- answers ----------------------------------------------------------------------------------


def makes(source: Any, event: object) -> Any:
    """Call what an entry of weights has: a type, or a function without arguments or of the event."""
    return source() if isinstance(source, type) or takes_nothing(source) else source(event)


def takes_nothing(fn: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # one that doesn't say is of C, a factory most likely
        return True
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def to_fault(option: str, answer: Any) -> Exception | None:
    """Read what a function of faults gave.

    Raises:
        MisuseError: It is neither an exception nor `None`.
    """
    made = answer() if _is_fault_type(answer) else answer
    if made is None or isinstance(made, Exception):
        return made
    msg = f"{option} must give an exception or None, it gave {made!r}"
    raise MisuseError(msg)


def to_outcome(answer: Any) -> AnyOutcome:
    """Read what stands for an outcome: one as it is, an exception for a failure, else a result."""
    if isinstance(answer, Success | Rejected | Failure):
        return answer  # pyright: ignore[reportUnknownVariableType]
    made = answer() if _is_fault_type(answer) else answer
    return Failure(made) if isinstance(made, Exception) else Success(made)


def _is_fault_type(value: object, base: type[BaseException] = Exception) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def to_rate(answer: Any) -> float:
    """Read what a function of rates gave, clamped to [0, 1].

    Raises:
        MisuseError: It is no number.
    """
    if not is_number(answer):
        msg = f"injection_rate must give a number from 0 to 1, it gave {answer!r}"
        raise MisuseError(msg)
    return min(max(float(answer), 0.0), 1.0)
