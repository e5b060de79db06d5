"""One meaning for every duration a user may write: seconds as a float.

Knows nothing of options and their names: whoever asks puts the name in front of the message, and
decides what zero, a negative or `math.inf` means to it.

Invariants: what comes out is a plain `float` and never NaN; it is never negative unless the caller
allowed that; no value, however large, raises anything but `ValueError`.
"""

from __future__ import annotations

import math
import re
from sys import modules
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from datetime import timedelta

    Duration: TypeAlias = int | float | timedelta | str

__all__ = ["Duration", "seconds"]

_FORMS = (
    "seconds as an int or float (math.inf: for ever), a datetime.timedelta, "
    "or text such as '500ms', '10s', '1.5s', '2m', '1h', '1m30s'"
)

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
# The order of the groups is the grammar: each unit at most once, the larger before the smaller.
# Compiled (and kept, by `re`) when the first text is read: numbers need none of it.
_TEXT = rf"(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?(?:({_NUMBER})ms)?"

_SHOWN_LENGTH = 80


def seconds(value: object, *, allow_negative: bool = False) -> float:
    """Read a duration in any of the accepted forms.

    Args:
        value: Seconds as `int` or `float` (or a subclass; `bool` is refused), a `timedelta`, or
            text: decimal numbers with the units `h`, `m`, `s` and `ms`, larger units first, each
            at most once, no spaces. `math.inf` means for ever, and so does a number too large for
            a float.
        allow_negative: Whether a number or `timedelta` below zero is accepted. Text has no sign.

    Returns:
        The duration in seconds.

    Raises:
        ValueError: The value is no duration. The message shows the accepted forms and what was
            got, and reads on from the name of an option: "must be ...".
    """
    result = _read(value)
    if result is None or math.isnan(result) or (result < 0 and not allow_negative):
        kind = "a duration" if allow_negative else "a non-negative duration"
        message = f"must be {kind}: {_FORMS}; got {_shown(value)}"
        raise ValueError(message)
    return result + 0.0  # makes one zero of the two


def _read(value: object) -> float | None:
    """The value in seconds whatever its sign, NaN included; `None` for what is no duration."""
    if isinstance(value, str):
        return _read_text(value)
    # Only a program that uses `datetime`, a tenth of our own import, can have a timedelta.
    datetime: Any = modules.get("datetime")
    if datetime is not None and isinstance(value, datetime.timedelta):
        return cast("timedelta", value).total_seconds()
    # True is an int to Python, and hardly ever one second to whoever wrote it.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # only an int can be too large
        return math.inf if value > 0 else -math.inf


def _read_text(text: str) -> float | None:
    match = re.fullmatch(_TEXT, text, re.ASCII)
    if match is None or not text:
        return None
    hours, minutes, whole, thousandths = (float(number or 0) for number in match.groups())
    # Divided, not multiplied by 0.001, which no float is: "500ms" is exactly 0.5.
    return hours * 3600 + minutes * 60 + whole + thousandths / 1000


def _shown(value: object) -> str:
    """The value as a message can show it: short, and without failing on a broken `repr`."""
    try:
        shown = repr(value)
    except Exception:  # noqa: BLE001 - a foreign repr may raise anything; the refusal must come out
        return f"an object of type {type(value).__qualname__}"
    if len(shown) > _SHOWN_LENGTH:
        shown = f"{shown[:_SHOWN_LENGTH]}..."
    return shown


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Make the alias when it is asked for at run time."""
        if name != "Duration":
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg, name=name)
        from datetime import timedelta

        globals()[name] = int | float | timedelta | str
        return globals()[name]
