"""Watching all pipelines, and getting them out of the way."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from .._switches import switches
from ..telemetry import TelemetryEvent


@contextmanager
def capture_events() -> Generator[list[TelemetryEvent]]:
    """Collect what happens in all pipelines, built before or after, in all threads, within a block.

    Yields:
        A list that fills with the events, in the order in which they happen.

    Example:
        >>> with capture_events() as events:
        ...     await pipeline.execute(fetch)
        >>> [event.name for event in events]
        ['PipelineExecuting', 'ExecutionAttempt', 'PipelineExecuted']
    """
    events: list[TelemetryEvent] = []
    remove = switches.add_listener(events.append)
    try:
        yield events
    finally:
        remove()


@contextmanager
def disabled() -> Generator[None]:
    """Have all pipelines pass calls and streams straight through, in all threads, within a block.

    No strategy has any part in executions that begin within the block, nor do options of
    `execute_stream`, and nothing is told of them. Those that are on their way go on as they began.
    Blocks may be nested, and may overlap in several threads: the last one to end ends it.
    """
    switches.disable(1)
    try:
        yield
    finally:
        switches.disable(-1)
