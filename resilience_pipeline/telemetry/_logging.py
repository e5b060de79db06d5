"""The log: events as records of the logger `resilience_pipeline`.

Imported only where the program uses `logging` itself. What is amiss is logged wherever the logger
is enabled for it. What comes with every execution is logged where somebody has set the level of this
very logger low enough, or has the whole program log at `DEBUG`: one that logs at `INFO` for its own
sake doesn't mean each of its calls. Asking the logger for each call would cost more than a bare call
does, so it is asked when a level is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import isnan
from typing import Any

from .._context import ResilienceContext
from .._outcome import Success
from .._switches import switches
from ._events import TelemetryEvent

_NAME = "resilience_pipeline"
#: What records have anyway, and nothing may be added under.
_TAKEN = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime"})
#: Shown by other means than their value.
_APART = frozenset(TelemetryEvent._fields)
_LONGEST = 500


class _Answers(dict[int, bool]):
    """What a logger has found out about levels, which `logging` empties whenever any level is set.

    That is the only word of it: the level that counts may be the root logger's.
    """

    __slots__ = ("_then",)

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then

    def clear(self) -> None:
        super().clear()
        self._then()


class Log:
    """The logger, and whether it has to be asked."""

    __slots__ = ("_logger", "_null", "_root")

    def __init__(self) -> None:
        self._root = logging.getLogger()
        self._logger = logger = logging.getLogger(_NAME)
        # A library prints nothing in programs that have not configured logging.
        self._null = next(
            (each for each in logger.handlers if isinstance(each, logging.NullHandler)), None
        )
        if self._null is None:
            self._null = logging.NullHandler()
            logger.addHandler(self._null)
        logger._cache = _Answers(self._look_at_level)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        self._look_at_level()

    def _look_at_level(self) -> None:
        logger = self._logger
        own = 0 < logger.level < logging.WARNING
        switches.log(own or logger.getEffectiveLevel() <= logging.DEBUG)

    def wants(self, kind: type[TelemetryEvent], severity: int) -> bool:
        """Whether an event would get anywhere."""
        logger = self._logger
        if not self._root.handlers:
            handlers = logger.handlers
            if len(handlers) == 1 and handlers[0] is self._null:
                return False
        if kind._is_routine and not switches.logs:
            return False
        return logger.isEnabledFor(severity)

    def write(self, event: TelemetryEvent) -> None:
        """Log an event."""
        self._logger.log(int(event.severity), "%s", _told(event), extra=_extra(event))

    def __repr__(self) -> str:
        return f"the log of {_NAME}"

    def complain(self, message: str, error: Exception) -> None:
        """Log something that is wrong with the program."""
        self._logger.error(message, exc_info=error)


LOG = Log()


def _extra(event: TelemetryEvent) -> dict[str, Any]:
    error = None if event.outcome is None else event.outcome.error
    extra: dict[str, Any] = {
        name: value
        for name, value in vars(event).items()
        if name not in _TAKEN and name not in _APART and _is_plain(value)
    }
    extra |= {
        "pipeline_name": event.pipeline_name,
        "pipeline_instance": event.instance,
        "strategy_name": event.strategy_name,
        "operation_key": event.operation_key,
        "event_name": event.name,
        "duration": event.duration if _is_known(event.duration) else None,
        "exception_type": None if error is None else _path(error),
    }
    return extra


def _told(event: TelemetryEvent) -> str:
    """Write an event as one line: what happened, where, what it came to, and its figures."""
    where = [
        f"{what} {name!r}"
        for what, name in (
            ("pipeline", event.pipeline_name),
            ("instance", event.instance),
            ("strategy", event.strategy_name),
            ("operation", event.operation_key),
        )
        if name is not None
    ]
    figures = [
        f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value!r}"
        for name, value in vars(event).items()
        if (name not in _APART or name == "duration") and _is_plain(value) and _is_known(value)
    ]
    told = [event.name, *([", ".join(where)] if where else []), *_came_to(event)]
    return ": ".join(told) + (f" ({', '.join(figures)})" if figures else "")


def _came_to(event: TelemetryEvent) -> list[str]:
    outcome = event.outcome
    if outcome is None:
        return []
    if isinstance(outcome, Success):
        # Its kind and not itself: results may be secret, and long.
        return [f"gave {_path(outcome.value)}"]
    error = outcome.error
    text = f"{_path(error)}: {error}" if str(error) else _path(error)
    return [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"]


def _path(thing: object) -> str:
    kind = type(thing)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(value: object) -> bool:
    return not isinstance(value, ResilienceContext) and isinstance(value, str | int | float)


def _is_known(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and isnan(value))
