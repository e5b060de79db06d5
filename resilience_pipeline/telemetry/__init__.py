"""What happens in pipelines, told to whoever listens.

The events that hooks get are what listeners get, and a few more. Where nobody listens none is made.
"""

from __future__ import annotations

from ._events import (
    AttemptCompleted,
    CloseErrorEvent,
    PipelineExecuted,
    PipelineExecuting,
    ReloadEvent,
    ReloadFailedEvent,
    Severity,
    StrategyEvent,
    TelemetryEvent,
)
from ._listeners import Listener, add_listener
from ._listeners import connect_log as _connect_log

__all__ = [
    "AttemptCompleted",
    "CloseErrorEvent",
    "Listener",
    "PipelineExecuted",
    "PipelineExecuting",
    "ReloadEvent",
    "ReloadFailedEvent",
    "Severity",
    "StrategyEvent",
    "TelemetryEvent",
    "add_listener",
]

for _name in __all__:
    if _name != "Listener":
        globals()[_name].__module__ = __name__

_connect_log()
