"""Declaring options and reporting every bad one at once.

A strategy declares its options as attrs fields whose *converters* bring a value into its stored
form and whose *rules* (in the field's metadata) say what it may be. Neither raises: a converter
that can't make sense of a value hands on a marker, and `checked` collects all complaints of a
constructor into one `OptionsError`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import attrs

from ._durations import seconds
from ._errors import MisusedOptionError, OptionsError

if TYPE_CHECKING:
    from ._durations import Duration

C = TypeVar("C", bound=type)
Rule = Callable[[Any], "str | None"]


class Unset:
    """Type of `UNSET`, the default of options for which `None` is a value."""

    def __repr__(self) -> str:
        """Read like a constant."""
        return "UNSET"

    def __reduce__(self) -> str:
        """Stay one object through copies and pickles."""
        return "UNSET"


UNSET: Final = Unset()


class Bad:
    """A value that a converter could not make sense of, on its way to the collector."""

    def __init__(self, value: object, expected: str) -> None:
        self.value = value
        self.expected = expected


DURATION_FORMS = (
    "a duration: seconds as a number of at least 0, a timedelta, or text such as '500ms', '10s' or "
    "'1m30s'"
)


# ---- converters -------------------------------------------------------------------------------


def to_seconds(value: Duration) -> float:
    """Convert a duration; refuses what is none."""
    try:
        return seconds(value)
    except ValueError:
        return cast(float, bad(value, DURATION_FORMS))


def to_seconds_or_none(value: Duration | None) -> float | None:
    """Convert a duration or `None`."""
    return None if value is None else to_seconds(value)


def to_signed_seconds(value: Duration) -> float:
    """Convert a duration that may be negative."""
    try:
        return seconds(value, allow_negative=True)
    except ValueError:
        return cast(float, bad(value, f"{DURATION_FORMS}; or a negative number"))


def to_name(value: str | None) -> str:
    """Take a strategy's name; `None` becomes the name of its class, see `checked`."""
    return cast(str, value)


def bad(value: object, expected: str) -> Any:
    """Mark a value that is not what was `expected`, for `checked` to report."""
    return Bad(value, expected)


def generated_seconds(option: str, value: Any) -> float | None:
    """Read what a generator of durations gave: seconds, perhaps negative, or `None`.

    Raises:
        OptionsError: It is no duration; the message names the generator's option.
    """
    if value is None:
        return None
    with suppress(ValueError):
        return seconds(value, allow_negative=True)
    msg = f"{option} must give None or {DURATION_FORMS}; it gave {value!r}"
    raise OptionsError(msg)


# ---- rules ------------------------------------------------------------------------------------


def rule(check: Rule, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """Make field metadata of a rule: a function giving what the value may be if it is bad.

    Args:
        check: The function.
        schema: The same as far as JSON Schema can say it, for the schema of configuration files;
            without it anything is let pass there. `REFERENCE` for what is not data.
    """
    return {"rule": check, "schema": schema}


#: A schema of values that are not data: functions, classes and other objects, given by name.
REFERENCE: dict[str, Any] = {"$ref": "#/$defs/reference"}

_INFINITE = {"type": "number", "exclusiveMinimum": 1e308}


def count(*, minimum: int, maximum: float = math.inf, infinite: bool = False) -> dict[str, Any]:
    """Say that the option is a whole number within bounds (or, if so said, infinite)."""
    expected = f"a whole number of at least {minimum}" + (" or math.inf" if infinite else "")
    if maximum < math.inf:
        expected = f"a whole number from {minimum} to {maximum}"

    def check(value: Any) -> str | None:
        if infinite and isinstance(value, float) and value == math.inf:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        return None if whole and minimum <= value <= maximum else expected

    schema: dict[str, Any] = {"type": "integer", "minimum": minimum}
    if maximum < math.inf:
        schema["maximum"] = maximum
    return rule(check, {"anyOf": [schema, _INFINITE]} if infinite else schema)


def or_none(metadata: dict[str, Any]) -> dict[str, Any]:
    """Say that the option may also be `None`."""
    check: Rule = metadata["rule"]

    def check_or_none(value: Any) -> str | None:
        expected = None if value is None else check(value)
        return expected and f"{expected}, or None"

    return rule(check_or_none, metadata["schema"])


def positive_duration() -> dict[str, Any]:
    """Say that the option is a duration longer than zero."""
    return rule(lambda value: None if value is None or value > 0 else "longer than zero")


def ratio() -> dict[str, Any]:
    """Say that the option is a number from 0 to 1."""

    def check(value: Any) -> str | None:
        return None if is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"

    return rule(check, {"type": "number", "minimum": 0, "maximum": 1})


def positive_number() -> dict[str, Any]:
    """Say that the option is a finite number above zero."""

    def check(value: Any) -> str | None:
        good = is_number(value) and 0 < value < math.inf
        return None if good else "a finite number above zero"

    return rule(check, {"type": "number", "exclusiveMinimum": 0})


def is_number(value: Any) -> bool:
    """Whether `value` is an int or float that is a number (a bool and NaN are not)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # noqa: PLR0124


def choice(*allowed: object) -> dict[str, Any]:
    """Say that the option is one of `allowed`."""
    expected = "one of " + ", ".join(repr(each) for each in allowed)

    def check(value: Any) -> str | None:
        # `1 == True`: the type has to agree too.
        same = any(type(value) is type(each) and value == each for each in allowed)
        return None if same else expected

    return rule(check, {"enum": list(allowed)})


def boolean() -> dict[str, Any]:
    """Say that the option is `True` or `False`."""
    return choice(True, False)


def function(expected: str = "a function or a coroutine function") -> dict[str, Any]:
    """Say that the option is something that can be called, or `None`."""

    def check(value: Any) -> str | None:
        if value is None or callable(value):
            return None
        return f"{expected}, or None"

    return rule(check, REFERENCE)


def text_or_none() -> dict[str, Any]:
    """Say that the option is text, or `None`."""
    good = "text, or None"
    return rule(lambda v: None if v is None or isinstance(v, str) else good, {"type": "string"})


def instance(kind: type, description: str) -> dict[str, Any]:
    """Say that the option is an instance of `kind`, or `None`."""
    expected = f"{description}, or None"
    check: Rule = lambda value: None if value is None or isinstance(value, kind) else expected  # noqa: E731
    return rule(check, REFERENCE) | {"kind": kind}


# ---- the collector ----------------------------------------------------------------------------


def checked(cls: C) -> C:
    """Make the constructor of an attrs class report all bad options at once.

    The class may define `_problems(self)`, a generator of sentences about options that contradict
    each other; it is asked also when some of them are bad.

    Raises (from the constructor):
        TypeError: An option is unknown; the most similar one is suggested.
        OptionsError: One or more options have bad values.
    """
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    names = [field.alias for field in attrs.fields(cls) if field.init]

    @wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807
        for name in options:
            if name not in names:
                raise TypeError(_unknown_option(type(self).__name__, name, names))
        original(self, *args, **options)
        if getattr(self, "name", "") is None:
            object.__setattr__(self, "name", type(self).__name__)
        _raise_problems(self)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def _unknown_option(owner: str, name: str, names: list[str]) -> str:
    import difflib  # for this alone, and it takes its time

    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {similar[0]!r}?" if similar else f"; it takes {', '.join(names)}"
    return f"{owner}() got an unknown option {name!r}{hint}"


def _raise_problems(options: Any) -> None:
    bad = list(_bad_fields(options))
    problems = [f"{name} must be {expected}, got {value!r}" for name, value, expected in bad]
    problems += getattr(options, "_problems", tuple)()
    if not problems:
        return
    coroutines = [value for _, value, _ in bad if inspect.iscoroutine(value)]
    for coroutine in coroutines:
        coroutine.close()
    kind = MisusedOptionError if coroutines else OptionsError
    headline = f"bad options for {getattr(options, 'options_of', type(options).__name__)}: "
    raise kind(headline + "; ".join(problems), tuple(problems))


def _fields(options: Any) -> tuple[attrs.Attribute[Any], ...]:
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(options.__class__)
    return fields


def refusal(field: Any, value: object) -> str | None:
    """Say what the field of an options class may be if `value` is not what it takes."""
    check: Rule | None = field.metadata.get("rule")
    try:
        converted: object = value if field.converter is None else field.converter(value)
        if isinstance(converted, Bad):
            return converted.expected
        return None if check is None else check(converted)
    except Exception as error:  # noqa: BLE001 - a class of the user's, not made for such values
        return str(error)


def _bad_fields(options: Any) -> Iterator[tuple[str, object, str]]:
    for field in _fields(options):
        value = getattr(options, field.name)
        check: Rule | None = field.metadata.get("rule")
        if isinstance(value, Bad):
            yield field.name, value.value, value.expected
        elif check is not None and (expected := check(value)) is not None:
            yield field.name, value, expected


def shown(options: Any) -> str:
    """Write the options that differ from their defaults, as in a call."""
    parts: list[str] = []
    by_name = False
    for field in _fields(options):
        by_name = by_name or field.kw_only
        value = getattr(options, field.name)
        if not field.repr or (field.name == "name" and value == type(options).__name__):
            continue
        if _is_default(value, _converted_default(field)):
            by_name = True  # what comes after an argument that is left out
        else:
            parts.append(written(value) if not by_name else f"{field.name}={written(value)}")
    return ", ".join(parts)


def written(value: object) -> str:
    """Write a value as it stands in a program: functions and classes by their names."""
    if isinstance(value, float) and value == math.inf:
        return "math.inf"
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__name__
    return repr(value)


def _converted_default(field: Any) -> object:
    return field.default if field.converter is None else field.converter(field.default)


def _is_default(value: object, default: object) -> bool:
    return value is default or (_same_type(value, default) and value == default)


def _same_type(one: Any, other: Any) -> bool:
    return type(one) is type(other)
