"""What tests of code that uses pipelines need.

Time that only moves when it is told to, a list of all that happens, and a way to be without
pipelines altogether.
"""

from ._clock import VirtualClock
from ._watching import capture_events, disabled

__all__ = ["VirtualClock", "capture_events", "disabled"]

for _name in __all__:
    globals()[_name].__module__ = __name__
