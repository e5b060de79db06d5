"""What tests of code that uses pipelines need: time that only moves when it is told to."""

from ._clock import VirtualClock

__all__ = ["VirtualClock"]

VirtualClock.__module__ = "resilience_pipeline.testing"
