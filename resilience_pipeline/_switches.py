"""What is switched on and off for all pipelines of the process at once.

One object, and of it one flag, `on`, that every execution looks at: while nobody listens to all
pipelines, disables them or has executions logged, that look is all that telemetry costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._locks import Lock


class Switches:
    """The process-wide switches; every change is made under a lock, every look without one.

    Attributes:
        on: Whether any of the others is.
        disabled: Whether pipelines pass calls straight through.
        listeners: Who listens to all pipelines; a new tuple with each change.
        logs: Whether executions that come to no harm are logged as well.
        is_logged: Whether the log takes events of a kind and a severity; asked where something is
            amiss, which is dear enough by itself.
    """

    __slots__ = (
        "_disabling",
        "_listeners",
        "_lock",
        "disabled",
        "is_logged",
        "listeners",
        "logs",
        "on",
    )

    def __init__(self) -> None:
        self._lock = Lock()
        self._listeners: dict[object, Callable[[Any], object]] = {}
        self._disabling = 0
        self.on = False
        self.disabled = False
        self.listeners: tuple[Callable[[Any], object], ...] = ()
        self.logs = False
        self.is_logged: Callable[[type[Any], int], bool] = _by_nobody

    def add_listener(self, listener: Callable[[Any], object]) -> Callable[[], None]:
        """Have all events given to a listener; what is returned takes that back, once."""
        key = object()  # the same listener may be added twice

        def remove() -> None:
            with self._lock:
                self._listeners.pop(key, None)
                self._update()

        with self._lock:
            self._listeners[key] = listener
            self._update()
        return remove

    def disable(self, by: int) -> None:
        """Disable all pipelines once more (1), or once less (-1)."""
        with self._lock:
            self._disabling += by
            self._update()

    def log(self, wanted: bool) -> None:
        """Say whether executions that come to no harm are logged as well."""
        with self._lock:
            self.logs = wanted
            self._update()

    def _update(self) -> None:
        self.listeners = tuple(self._listeners.values())
        self.disabled = self._disabling > 0
        self.on = self.disabled or self.logs or bool(self.listeners)


def _by_nobody(kind: type[Any], severity: int) -> bool:  # noqa: ARG001
    return False


switches = Switches()
