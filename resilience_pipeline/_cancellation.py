"""How code that runs in a thread learns that nobody waits for it any more.

Python can't stop a thread. A call that timed out, or lost a race, is told so by its flag: the
library's own waits end at once, and code of the user's may look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar

from ._locks import Lock


class Cancelled(BaseException):
    """Ends an abandoned call at the library's next wait; nobody is left to whom it could come out."""


class CancellationFlag:
    """Whether the caller has given up on the running attempt: an event that is set once.

    In an event loop it is never set: there the attempt is cancelled.
    """

    __slots__ = ("__weakref__", "_callbacks", "_event", "_lock", "_parent")

    def __init__(self, parent: CancellationFlag | None = None) -> None:
        self._event = threading.Event()
        self._lock = Lock()
        self._callbacks: dict[Callable[[], object], None] = {}
        self._parent = parent
        if parent is not None:
            parent.watch(self.set)

    def is_set(self) -> bool:
        """Whether the caller has given up."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the caller gives up, for `timeout` seconds at most; whether it has."""
        return self._event.wait(timeout)

    def __repr__(self) -> str:
        """Show whether it is set."""
        return f"<CancellationFlag {'set' if self.is_set() else 'not set'}>"

    # ---- for the runtime

    def set(self) -> None:
        """Tell everybody that the caller has given up."""
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, {}
        for callback in callbacks:
            callback()

    def unless_set(self, action: Callable[[], object]) -> bool:
        """Do something short if it is not set; false if it is.

        Setting waits for what has been begun here: whoever has set it knows what was done in time,
        and that nothing more will be. So it is for the flags within it, which are set along.
        """
        with self._lock:
            if self._event.is_set():
                return False
            action()
        return True

    def watch(self, callback: Callable[[], object]) -> None:
        """Have a function called when the flag is set, or now if it is."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks[callback] = None
                return
        callback()

    def unwatch(self, callback: Callable[[], object]) -> None:
        """Take that back."""
        with self._lock:
            self._callbacks.pop(callback, None)

    def leave(self) -> None:
        """Be set with the one around no more: what this is for has ended."""
        if self._parent is not None:
            self._parent.unwatch(self.set)


NEVER = CancellationFlag()

#: The flag of the attempt that the running thread works for.
running_flag: ContextVar[CancellationFlag] = ContextVar(
    "resilience_pipeline.cancelled", default=NEVER
)


#: One for all of them: work is left behind so rarely that nobody waits for it, and a lock for each
#: call would cost it several bare ones.
_orphans_lock = Lock()


class Orphans:
    """Work of one execution that goes on in threads although its caller has given up on it.

    Args:
        around: Those of what this is a part of, where everything counts that counts here.
    """

    __slots__ = ("_around", "_count", "_releases")

    def __init__(self, around: Orphans | None = None) -> None:
        self._around = around
        self._count = 0
        self._releases: list[Callable[[], object]] | None = None

    def add(self) -> None:
        """Count one more."""
        with _orphans_lock:
            each: Orphans | None = self
            while each is not None:
                each._count += 1
                each = each._around

    def remove(self) -> None:
        """Count one less; with the last one goes what was held for them."""
        releases: list[Callable[[], object]] = []
        with _orphans_lock:
            each: Orphans | None = self
            while each is not None:
                each._count -= 1
                if not each._count and each._releases is not None:
                    releases += each._releases
                    each._releases = None
                each = each._around
        for release in releases:
            release()

    def when_gone(self, release: Callable[[], object]) -> None:
        """Have something released when the last one has ended: now, if there is none."""
        # Whoever could still add to none has been counted himself, or was waited for.
        if self._count:
            with _orphans_lock:
                if self._count:
                    if self._releases is None:
                        self._releases = []
                    self._releases.append(release)
                    return
        release()
