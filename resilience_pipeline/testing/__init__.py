"""What tests of code that uses pipelines need: time of their own, and services that fail by a script."""

from ._clock import VirtualClock
from ._flaky import Flaky, FlakyCall, Wait, flaky
from ._instant import instant

__all__ = ["Flaky", "FlakyCall", "VirtualClock", "Wait", "flaky", "instant"]

for _name in __all__:
    globals()[_name].__module__ = __name__
