"""`instant`: waits that take no time, for code whose pipelines can't be given a clock."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import final

from resilience_pipeline import _instant


@final
class _Instant(AbstractContextManager[list[float]]):
    """No generator-based manager: that would also be a decorator, and a wrong one for async tests."""

    def __init__(self) -> None:
        self._entered: list[list[float]] = []

    def __enter__(self) -> list[float]:
        waits = _instant.watch()
        self._entered.append(waits)
        return waits

    def __exit__(self, *error: object) -> None:
        _instant.unwatch(self._entered.pop())


def instant() -> AbstractContextManager[list[float]]:
    """Have the waits of all pipelines take no time, and list them.

    For pipelines that can't be given a `VirtualClock`: it reaches those built before and after, with
    a clock of their own or without, in all event loops and threads, until it is left.

    Example::

        with instant() as waits:
            await service.fetch()  # retries after 2 s, and after 4 s more
        assert waits == [2.0, 4.0]

    What takes no time are the waits of the strategies themselves: a retry's delay, a rate limiter's
    queue, injected latency. Each is noted when it begins, in seconds, and remains a checkpoint at
    which other tasks run and a cancellation arrives; one of 0 is not noted. A wait for ever
    (`math.inf`) is noted and remains one.

    Nothing else is changed. Time does not pass: windows, breaks and `max_elapsed` don't see the
    waits; a permit whose time a rate limiter has waited for counts as had. What bounds how long
    others take goes by the clock as ever and is not noted: time limits, a hedging delay, and the
    `max_wait` of a concurrency limiter, whose queue moves on when somebody leaves. Waits that have
    begun before are not cut short. Where time itself matters use a `VirtualClock`.

    Returns:
        A context manager whose value is the list. Where several are entered, each has a list.
    """
    return _Instant()
