"""Who is told: listeners, given to builders and registries or added for all pipelines, and the log.

Listeners are called in the task or thread where it happened, one after another, under no lock of
the library's. What one raises is logged once and concerns nobody else.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

from .._errors import MisuseError
from .._locks import Lock
from .._switches import switches
from ._events import Severity, TelemetryEvent

if TYPE_CHECKING:
    from ._logging import Log

#: What is called with each event; what it returns is ignored.
Listener: TypeAlias = Callable[[TelemetryEvent], object]


def add_listener(listener: Listener) -> Callable[[], None]:
    """Have a function called with every event of every pipeline, built before or after.

    It is called where the event happens, between two steps of the call, so it has to be quick and
    must not be async. May be called from any thread at any time.

    Args:
        listener: A function of one `TelemetryEvent`. What it raises is logged once, and never
            touches the call.

    Returns:
        A function that removes it again.

    Raises:
        MisuseError: It is no function, or a coroutine function.
    """
    problem = listener_problem(listener)
    if problem is not None:
        msg = f"add_listener() takes {problem}"
        raise MisuseError(msg)
    return switches.add_listener(listener)


def listener_problem(
    listener: object,
    remedy: str = "nobody waits for listeners; have it put events into a queue",
) -> str | None:
    """Say what a listener has to be and what this is in its place; `None` if it will do."""
    if not callable(listener):
        if inspect.iscoroutine(listener):
            listener.close()
        return f"a function of one event, got {listener!r}"
    call: object = getattr(type(listener), "__call__", None)  # noqa: B004 - asked what kind it is
    if inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call):
        return f"a plain function of one event, got the coroutine function {listener!r}: {remedy}"
    return None


def deliver(event: TelemetryEvent, listeners: tuple[Listener, ...]) -> None:
    """Tell everybody who listens to a pipeline, or to all, and the log."""
    if event.severity == Severity.NONE:
        return
    for listener in (*listeners, *switches.listeners):
        try:
            answer = listener(event)
            if answer is not None and inspect.isawaitable(answer):
                _complain_of_awaitable(listener, answer)
        except Exception as error:  # noqa: BLE001 - a listener never touches the call
            complain(listener, error)
    if switches.is_logged(type(event), event.severity):
        log = _log()
        try:
            log.write(event)
        except Exception as error:  # noqa: BLE001 - by a filter, or the text of an error
            complain(log, error)


# ---- the log ------------------------------------------------------------------------------------


def connect_log() -> None:
    """Have the log take events, if `logging` is there; it takes its time to import.

    A program that has not imported it yet has nothing configured either, so this is asked again
    wherever a pipeline is built, and where one runs on an event loop for the first time.
    """
    if "logging" in sys.modules:
        _log()


def _log() -> Log:
    from ._logging import LOG

    switches.is_logged = LOG.wants
    return LOG


# ---- listeners that raise -----------------------------------------------------------------------

#: Those that were complained of, by identity: they need not be hashable.
_complained: WeakValueDictionary[int, Any] = WeakValueDictionary()
_complained_for_good: dict[int, Any] = {}
_lock = Lock()


def complain(listener: object, error: Exception) -> None:
    """Log what somebody who is told of events has raised, the first time he does."""
    with _lock:
        if id(listener) in _complained or id(listener) in _complained_for_good:
            return
        try:
            _complained[id(listener)] = listener
        except TypeError:  # can't be referenced weakly, and nothing else may get its identity
            _complained_for_good[id(listener)] = listener
    with suppress(Exception):  # what can't even be logged can't be helped
        _log().complain(
            f"{listener!r}, told of an event, raised {error!r}; this is said once", error
        )


def _complain_of_awaitable(listener: Listener, answer: Any) -> None:
    if inspect.iscoroutine(answer):
        answer.close()
    complain(listener, MisuseError(f"it returned {answer!r}, which nobody awaits"))


def as_listeners(listeners: Iterable[Any]) -> tuple[tuple[Listener, ...], list[str]]:
    """Give the listeners of an option, and what is wrong with them."""
    if isinstance(listeners, str) or not isinstance(listeners, Iterable):
        return (), [f"listeners must be a list of functions, got {listeners!r}"]
    given = tuple(listeners)
    problems = [
        f"each of listeners must be {problem}"
        for problem in map(listener_problem, given)
        if problem is not None
    ]
    return given, problems
