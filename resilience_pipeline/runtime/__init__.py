"""Mechanism: what pipelines wait, race, cancel and read the clock through.

`Runtime` is the protocol that strategies use as `context.runtime`, `Clock` the protocol of a
builder's `clock=`, and `RuntimeFinder` finds the runtime of the event loop that is running.
"""

from __future__ import annotations

from ._base import Child, Clock, Interruption, Runtime, Spawner, TimerHandle, Waiter
from ._finder import RuntimeFinder, current_runtime

__all__ = [
    "Child",
    "Clock",
    "Interruption",
    "Runtime",
    "RuntimeFinder",
    "Spawner",
    "TimerHandle",
    "Waiter",
    "current_runtime",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
