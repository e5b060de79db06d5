"""Equal calls at the same time: one flies, the others wait for what it brings.

The one that leads runs in its own task and context, and is no different from a call that is alone.
It says what it has brought for the others, or that there is nothing for them: it was cancelled, say.
Then they look again, and the first of them leads. They may be in any event loop or thread.

Interleavings that were thought through:

1. A call boards in the moment in which the flight lands: one lock decides. Either it is woken, or it
   finds no flight and leads one.
2. Whoever waits is cancelled: it is taken off the list. Woken as well, it has been given nothing that
   it would have to pass on.
3. Whoever waits belongs to an event loop that has been closed: waking it fails, which concerns nobody.
4. The one that leads makes an equal call itself, directly, by a child, or by its consumer's task
   between two chunks of a stream: it would wait for its own end. `would_wait_for_itself` tells.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Generic, TypeVar

from .._locks import Lock

if TYPE_CHECKING:
    from ..runtime import Interruption, Runtime, Waiter

T = TypeVar("T")

#: The flights inside of which this code runs.
_inside: ContextVar[tuple[object, ...]] = ContextVar("resilience_pipeline.flights", default=())


class Flight(Generic[T]):
    """One call, and who waits for what it brings.

    Attributes:
        brought: What it has for the others, once it has landed; `None` for nothing.
    """

    __slots__ = ("_has_landed", "_leader", "_runtime", "_waiters", "brought")

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = type(runtime)
        # Asked only who made it: the task, or thread, that leads.
        self._leader: Interruption | None = runtime.interruption()
        self._waiters: dict[Waiter, None] = {}
        self._has_landed = False
        self.brought: T | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for it now."""
        return bool(self._waiters)

    def would_wait_for_itself(self, runtime: Runtime) -> bool:
        """Whether the calling code is a part of it, so that it can't wait for its end."""
        if self in _inside.get():
            return True
        # A task can be asked for in its own kind of loop alone.
        leader = self._leader if type(runtime) is self._runtime else None
        return leader is not None and leader.is_mine()


class SingleFlight(Generic[T]):
    """The flights of one strategy, by what makes calls equal."""

    __slots__ = ("_flights", "_lock")

    def __init__(self) -> None:
        self._lock = Lock()
        self._flights: dict[Hashable, Flight[T]] = {}

    def __len__(self) -> int:
        """Return the number of flights that have not landed."""
        return len(self._flights)

    def board(self, key: Hashable, runtime: Runtime) -> tuple[Flight[T], bool]:
        """Give the flight for `key`, and whether the caller leads it: then it has to `land` it."""
        mine: Flight[T] = Flight(runtime)
        with self._lock:
            flight = self._flights.setdefault(key, mine)
        return flight, flight is mine

    async def wait(self, flight: Flight[T], runtime: Runtime) -> T | None:
        """Wait until a flight has landed; give what it has brought."""
        waiter = runtime.waiter()
        with self._lock:
            if flight._has_landed:
                return flight.brought
            flight._waiters[waiter] = None
        try:
            await waiter.wait()
        finally:
            with self._lock:
                flight._waiters.pop(waiter, None)
        return flight.brought

    def land(self, key: Hashable, flight: Flight[T], brought: T | None) -> None:
        """End a flight and tell everybody who waits for it."""
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]
            flight.brought = brought
            flight._has_landed = True
            flight._leader = None  # or whoever is still inside of it would keep that task
            waiters = list(flight._waiters)
        for waiter in waiters:
            waiter.wake()


def enter(flight: object) -> Token[tuple[object, ...]]:
    """Be inside of a flight from here on, child tasks included."""
    return _inside.set((*_inside.get(), flight))


def leave(token: Token[tuple[object, ...]]) -> None:
    """Be inside of it no more."""
    try:  # noqa: SIM105 - as in `_context.leave`
        _inside.reset(token)
    except ValueError:
        # An abandoned coroutine is closed by the garbage collector, wherever that happens to run.
        pass
