"""Waits that take no time: the switch between `testing.instant` and whatever waits.

While somebody watches, each wait is noted and its time is over at once; it stays a checkpoint. Only
what would wait anyway looks here. A wait for ever has no end that could be reached, and remains one.
"""

from __future__ import annotations

import math

from ._locks import Lock

_lock = Lock()

#: The lists of those who watch: empty where time passes. Replaced and never changed, so that it is
#: read without the lock.
watching: tuple[list[float], ...] = ()


def watch() -> list[float]:
    """Have waits take no time and noted in the list that is given, until that is given back."""
    global watching  # noqa: PLW0603 - the switch is one for the whole program, like time
    waits: list[float] = []
    with _lock:
        watching = (*watching, waits)
    return waits


def unwatch(waits: list[float]) -> None:
    """Take that back."""
    global watching  # noqa: PLW0603
    with _lock:
        watching = tuple(each for each in watching if each is not waits)


def left_of(seconds: float) -> float:
    """Note a wait, where somebody watches, and give what is left of it."""
    watched = watching
    for waits in watched:
        waits.append(seconds)
    return 0.0 if watched and seconds < math.inf else seconds
