"""What the tests with real synchronous clients share."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from resilience_pipeline import ResiliencePipelineBuilder, SyncResilienceStream
from resilience_pipeline._cancellation import NEVER, running_flag
from resilience_pipeline._demo import ThreadedFlakyServer
from resilience_pipeline.runtime._here import run_here
from resilience_pipeline.testing import VirtualClock
from support.live import token

B = ResiliencePipelineBuilder

#: So patient that only a test that hangs meets it.
PATIENCE = 30.0


class Inside:
    """Counts who is inside of its `with`, and lets those be waited for whom nobody else waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    @property
    def count(self) -> int:
        with self._changed:
            return self._count

    def wait_empty(self) -> None:
        """Wait until everybody has left."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._count, PATIENCE)


def takes(clock: VirtualClock, seconds: float) -> None:
    """Take so much of virtual time, in a synchronous call, and listen to nobody."""
    token = running_flag.set(NEVER)
    try:
        run_here(clock.sleep(seconds), clock)
    finally:
        running_flag.reset(token)


def statuses(server: ThreadedFlakyServer) -> list[int | None]:
    """Give the status of each answer so far, once the last one has ended."""
    server.wait_ended(len(server.requests) - 1)
    return [record.status for record in server.requests]


def tokens_in(lines: Iterable[str]) -> list[str]:
    got: list[str] = []
    read_into(got, lines)
    return got


def read_into(got: list[str], lines: Iterable[str]) -> None:
    for line in lines:
        got += token(line)


def leave_at_the_first_token(stream: SyncResilienceStream[str]) -> None:
    with stream:
        for line in stream:
            if token(line):
                break
