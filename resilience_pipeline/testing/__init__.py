"""What tests of code that uses pipelines need: time that only moves when it is told to, or not at all."""

from ._clock import VirtualClock
from ._instant import instant

__all__ = ["VirtualClock", "instant"]

for _name in __all__:
    globals()[_name].__module__ = __name__
