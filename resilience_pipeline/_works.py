"""What one thread does for all, and the others wait for.

A wait can only end if whoever works does not wait, by way of however many others, for the one who
begins to wait. Such circles come up when what is worked on asks for itself, or two ask for each
other; they are found before the wait begins, and refused.
"""

from __future__ import annotations

from threading import Event, get_ident

from ._errors import MisuseError
from ._locks import Lock


class Work:
    """Something that the thread which makes this object does for all.

    Attributes:
        what: What it does, for messages.
        thread: Who does it.
        done: Set when it is done, well or not.
    """

    __slots__ = ("done", "thread", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.thread = get_ident()
        self.done = Event()


class WaitingRoom:
    """Who waits for what.

    Args:
        lock: The lock that guards the works and this room.
    """

    __slots__ = ("_lock", "_waiting")

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: dict[int, Work] = {}

    def join(self, work: Work) -> None:
        """Note, under the lock, that this thread is about to wait for some work.

        Raises:
            MisuseError: The work could never end.
        """
        me = get_ident()
        seen: Work | None = work
        while seen is not None and not seen.done.is_set():
            if seen.thread == me:
                msg = f"{work.what} from within its own configure can never end"
                raise MisuseError(msg)
            seen = self._waiting.get(seen.thread)
        self._waiting[me] = work

    def wait(self, work: Work) -> None:
        """Wait until the work that was noted is done."""
        try:
            work.done.wait()
        finally:
            with self._lock:
                del self._waiting[get_ident()]
