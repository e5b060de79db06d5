"""What the case studies share: a server that has enough at some point, a stopwatch, and a table."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass

from resilience_pipeline._demo import FlakyServer, Status, Step


class BusyServer(FlakyServer):
    """A flaky server that answers 429 to what comes faster than `permits` in any `window`.

    Args:
        *steps: What happens to the requests that it admits; those it turns away use up no step.
        permits: How many it admits in any `window`; by default all.
        window: Seconds.
    """

    def __init__(self, *steps: Step, permits: float = math.inf, window: float = 0.1) -> None:
        super().__init__(*steps)
        self._permits = permits
        self._window = window
        self._admitted: deque[float] = deque()

    def _next_step(self) -> Step:
        now = time.monotonic()
        while self._admitted and now - self._admitted[0] >= self._window:
            self._admitted.popleft()
        if len(self._admitted) >= self._permits:
            return Status(429)
        self._admitted.append(now)
        return super()._next_step()


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of many calls.

    Attributes:
        asked: Calls made.
        answered: Calls that returned.
        failures: The others, by what they raised.
        p50, p95, p99: Milliseconds that so many of a hundred calls took at most, failed ones too.
        seconds: All calls together.
        requests: Requests that reached the server.
    """

    asked: int
    answered: int
    failures: Mapping[str, int]
    p50: float
    p95: float
    p99: float
    seconds: float
    requests: int


async def measure(
    server: FlakyServer, call: Callable[[int], Awaitable[object]], *, asked: int, workers: int
) -> Figures:
    """Make so many calls, by so many workers at once."""
    numbers = iter(range(asked))
    failures: Counter[str] = Counter()
    taken: list[float] = []

    async def work() -> None:
        for number in numbers:
            began = time.monotonic()
            try:
                await call(number)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                failures[name_of(error)] += 1
            taken.append(time.monotonic() - began)

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(workers):
            tasks.create_task(work())
    return Figures(
        asked=asked,
        answered=asked - failures.total(),
        failures=dict(failures.most_common()),
        p50=percentile(taken, 50),
        p95=percentile(taken, 95),
        p99=percentile(taken, 99),
        seconds=time.monotonic() - began,
        requests=len(server.requests),
    )


def name_of(error: Exception) -> str:
    """Name what went wrong: the HTTP status if there is one."""
    response = getattr(error, "response", None)
    return str(getattr(response, "status_code", None) or type(error).__name__)


def percentile(seconds: list[float], percent: float) -> float:
    """Give the time, in milliseconds, that `percent` of the calls did not exceed."""
    place = math.ceil(len(seconds) * percent / 100) - 1
    return sorted(seconds)[place] * 1000


def show(**runs: Figures) -> None:
    """Print runs side by side."""
    print(f"{'':10}" + "".join(f"{name:>12}" for name in runs))
    for row in ("asked", "answered", "requests"):
        print(f"{row:10}" + "".join(f"{asdict(run)[row]:12}" for run in runs.values()))
    for row in ("p50", "p95", "p99"):
        print(f"{row + ' ms':10}" + "".join(f"{asdict(run)[row]:12.0f}" for run in runs.values()))
    print(f"{'seconds':10}" + "".join(f"{run.seconds:12.1f}" for run in runs.values()))
    for name, run in runs.items():
        if run.failures:
            print(
                f"{name}:", ", ".join(f"{times} x {what}" for what, times in run.failures.items())
            )
