"""What the integrations that measure have in common: how an event, or a registry's health, reads in numbers and labels.

Labels are of low cardinality whatever a program does: names, types and counts that have a bound.
Neither results nor arguments, keys of state or texts of errors are among them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from math import isfinite
from threading import RLock, local
from typing import Any, Generic, NamedTuple, TypeVar

from .. import (
    AttemptCompleted,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    Rejected,
    ResiliencePipelineRegistry,
    Success,
)
from ..telemetry import Severity, TelemetryEvent

#: Upper bounds of the buckets of durations, in seconds: OpenTelemetry's for HTTP requests, and
#: further ones because a pipeline also waits.
BUCKETS = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
STATES = ("closed", "open", "half_open", "isolated")

#: Polly's words.
_SEVERITIES = {each: each.name.capitalize() for each in Severity} | {Severity.INFO: "Information"}
_HIGHEST_ATTEMPT = 10
_MOST_CIRCUITS = 1000


# ---- events -------------------------------------------------------------------------------------


def severity_of(event: TelemetryEvent) -> str:
    """Name a severity as Polly does; one of nobody's knowing by its number."""
    severity = event.severity
    return _SEVERITIES.get(severity) or str(int(severity))


def error_of(event: TelemetryEvent) -> Exception | None:
    """Give the error in an event's outcome, if there is one."""
    outcome = event.outcome
    return None if outcome is None else outcome.error


def type_of(error: BaseException) -> str:
    """Name the type of an error in full; Python's own without their module."""
    kind = type(error)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def came_to(event: TelemetryEvent) -> str:
    """Say what an execution or an attempt came to, in one word of four."""
    outcome = event.outcome
    if outcome is None:
        return "cancelled"
    if isinstance(outcome, Success):
        return "success"
    return "rejected" if isinstance(outcome, Rejected) else "failure"


def seconds_of(event: TelemetryEvent) -> float | None:
    """Give an event's duration if it can be measured: a clock of the user's own may give anything."""
    duration = event.duration
    if duration is None or not isfinite(duration):
        return None
    return max(0.0, duration)


def attempt_of(event: AttemptCompleted) -> int:
    """Number an attempt from 0 to 10, which stands for all further ones: a retry may go on for ever."""
    return min(event.attempt, _HIGHEST_ATTEMPT)


T = TypeVar("T")


class InTurn(Generic[T]):
    """Tells of one event after another in each thread.

    What comes in between is told afterwards: the garbage collector may close a call anywhere, and an
    exporter may call through a pipeline. Either would wait for ever for locks that this very thread
    holds, ours or the other library's.

    Args:
        tell: What is called with an event, or with what stands for it, and whether it comes late.
    """

    __slots__ = ("_tell", "_threads")

    def __init__(self, tell: Callable[[T, bool], None]) -> None:
        self._tell = tell
        self._threads = local()

    def __call__(self, event: T, late: bool = False) -> None:
        """Tell of an event, now or in a moment."""
        threads = self._threads
        before: deque[T] | None = getattr(threads, "waiting", None)
        if before is not None:
            before.append(event)
            return
        waiting: deque[T] = deque()
        threads.waiting = waiting
        try:
            self._tell(event, late)
        finally:
            threads.waiting = None  # first, so that nothing joins a queue that nobody looks at
            self._catch_up(waiting)

    def _catch_up(self, waiting: deque[T]) -> None:
        if waiting:
            try:
                self(waiting.popleft(), late=True)
            finally:
                self._catch_up(waiting)


# ---- state --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Which strategy it is that has state."""

    pipeline: str | None
    instance: str | None
    strategy: str


class State(NamedTuple):
    """What is known of a strategy's state.

    Attributes:
        circuits: How many circuits are in each of the states; one in all, but for `key=`.
        figures: Its other figures, by their names in a registry's health.
    """

    circuits: Mapping[str, int]
    figures: Mapping[str, int]


class Circuits:
    """The states of circuits, as far as their transitions have been told; of so many, the latest."""

    def __init__(self) -> None:
        # The garbage collector may close a call while it is held, and a transition come of that.
        self._lock = RLock()
        self._states: OrderedDict[Place, str] = OrderedDict()

    def note(self, event: TelemetryEvent) -> None:
        """Take note of a transition, if that is what the event tells."""
        state = _state_after(event)
        if state is None:
            return
        place = Place(event.pipeline_name, event.instance, event.strategy_name or "")
        with self._lock:
            self._states[place] = state
            self._states.move_to_end(place)
            if len(self._states) > _MOST_CIRCUITS:
                self._states.popitem(last=False)

    def states(self) -> dict[Place, State]:
        """Give all that are known."""
        with self._lock:
            states = dict(self._states)
        return {place: State({state: 1}, {}) for place, state in states.items()}


def _state_after(event: TelemetryEvent) -> str | None:
    if isinstance(event, CircuitOpenedEvent):
        return "isolated" if event.manual else "open"
    if isinstance(event, CircuitHalfOpenedEvent):
        return "half_open"
    return "closed" if isinstance(event, CircuitClosedEvent) else None


def states_in(*registries: ResiliencePipelineRegistry) -> dict[Place, State]:
    """Read the health of all pipelines of registries.

    Strategies of one pipeline that share a name are added up. A pipeline that is nested in several
    others is in the health of each: it is the same one, and counted once.
    """
    found: dict[Place, State] = {}
    for registry in registries:
        for built in chain.from_iterable(registry.health().values()):
            for place, state in _states_of(built["instance"], built["strategies"]).items():
                known = found.get(place)
                found[place] = state if known is None else _larger(known, state)
    return found


def without_instances(states: Mapping[Place, State]) -> dict[Place, State]:
    """Add up the instances of each pipeline."""
    circuits: dict[Place, Counter[str]] = {}
    figures: dict[Place, Counter[str]] = {}
    for place, state in states.items():
        all_of_them = place._replace(instance=None)
        circuits.setdefault(all_of_them, Counter()).update(state.circuits)
        figures.setdefault(all_of_them, Counter()).update(state.figures)
    return {place: State(counted, figures[place]) for place, counted in circuits.items()}


def _states_of(instance: str | None, reports: Iterable[Mapping[str, Any]]) -> dict[Place, State]:
    circuits: dict[Place, Counter[str]] = {}
    figures: dict[Place, Counter[str]] = {}
    for report in reports:
        read = _READERS.get(report["type"])
        if read is None:
            continue
        place = Place(report["pipeline"], instance, report["strategy"])
        counted = circuits.setdefault(place, Counter())
        added = figures.setdefault(place, Counter())
        for each in report["keys"].values() if "keys" in report else (report,):
            if "state" in each:
                counted[each["state"]] += 1
            added.update(read(each))
    return {place: State(counted, figures[place]) for place, counted in circuits.items()}


def _read_permits(report: Mapping[str, Any]) -> dict[str, Any]:
    permits = report["permits"]
    used = max(0, permits - report["free"])
    return {"limit": permits, "used": used, "queued": report["queued"]}


def _read_rate(report: Mapping[str, Any]) -> dict[str, Any]:
    known = {"queued": report["queued"]}
    if report["available"] is not None:  # as it is for a limit of the user's own
        known["available"] = report["available"]
    return known


#: By the type of a strategy. What those of the user's own say means what they mean by it.
_READERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "CircuitBreaker": lambda _: {},
    "ConcurrencyLimiter": _read_permits,
    "RateLimiter": _read_rate,
}


def _larger(one: State, other: State) -> State:
    return State(
        Counter(one.circuits) | Counter(other.circuits),
        {
            name: max(one.figures.get(name, 0), other.figures.get(name, 0))
            for name in {*one.figures, *other.figures}
        },
    )


# ---- the library --------------------------------------------------------------------------------


def library_version() -> str | None:
    """Give the version that is installed; `None` for a checkout that is only on the path."""
    try:
        return version("resilience-pipeline")
    except PackageNotFoundError:
        return None
