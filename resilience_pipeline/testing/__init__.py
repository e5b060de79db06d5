"""What tests of code that uses pipelines need.

Time of their own, services that fail by a script, a list of all that happens, and ways to be
without waits, or without pipelines altogether.
"""

from ._clock import VirtualClock
from ._flaky import Flaky, FlakyCall, Wait, flaky
from ._instant import instant
from ._watching import capture_events, disabled

__all__ = [
    "Flaky",
    "FlakyCall",
    "VirtualClock",
    "Wait",
    "capture_events",
    "disabled",
    "flaky",
    "instant",
]

for _name in __all__:
    globals()[_name].__module__ = __name__
