"""The queue before a limiter: first come, first served, and cancellable at any moment.

Pure bookkeeping: no lock, no clock, no event loop. Its user calls every method under a lock of its
own and wakes, outside of it, what it was told to.

Rules:
1. A permit is handed to the head of the queue while it is taken from its holder: it is never free
   in between, so nobody can overtake.
2. Whoever leaves the queue says so once. `leave` answers whether a permit had been handed over
   before: then the one who leaves owns it, and uses it or passes it on.
3. Who can't leave any more, because its event loop is gone, is dropped (`drop_dead`), and what it
   was granted is taken back (`take_back`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Wakeable(Protocol):
    """What waits in a queue; a runtime's `Waiter` is one."""

    def wake(self) -> bool:
        """Wake it; False if it can't be reached any more."""
        ...

    def is_alive(self) -> bool:
        """Whether it can still be reached."""
        ...


W = TypeVar("W", bound=Wakeable)


#: How many waiters a call may look at on average, when it looks for dead ones.
_LOOKS = 16


class WaiterQueue(Generic[W]):
    """Waiters in the order of their arrival; every operation takes constant time, on average.

    Attributes:
        waiting: Those who wait, in order: always the same object, to be looked at only.
    """

    __slots__ = ("_granted", "_unlooked", "waiting")

    def __init__(self) -> None:
        self._unlooked = 0
        # An OrderedDict rather than a dict: taking from the front of a dict over and over skips
        # ever more dead entries.
        self.waiting: OrderedDict[W, None] = OrderedDict()
        self._granted: OrderedDict[W, None] = OrderedDict()

    def __len__(self) -> int:
        """Return how many wait, those not counted that have been granted something."""
        return len(self.waiting)

    def __iter__(self) -> Iterator[W]:
        """Iterate over those who wait, in order."""
        return iter(self.waiting)

    @property
    def head(self) -> W | None:
        """The waiter whose turn is next."""
        return next(iter(self.waiting), None)

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits, and nobody was granted something that is not in use yet."""
        return not self.waiting and not self._granted

    def join(self, waiter: W) -> None:
        """Queue up behind everybody else."""
        self.waiting[waiter] = None

    def grant(self) -> W | None:
        """Take the head from the queue and mark it as granted; the caller wakes it."""
        if not self.waiting:
            return None
        waiter, _ = self.waiting.popitem(last=False)
        self._granted[waiter] = None
        return waiter

    def leave(self, waiter: W) -> bool:
        """Leave, for whatever reason; whether a permit had been granted before."""
        if waiter in self._granted:
            del self._granted[waiter]
            return True
        self.waiting.pop(waiter, None)
        return False

    def drop_dead(self) -> bool:
        """Forget waiters whose event loop is gone: nobody will ever take them out otherwise.

        A long queue is looked through when its head is dead, else only every so many calls: whoever
        is refused because it is full is refused at once.

        Returns:
            Whether there were any.
        """
        self._unlooked -= _LOOKS
        head = self.head
        if self._unlooked > 0 and (head is None or head.is_alive()):
            return False
        dead = [waiter for waiter in list(self.waiting) if not waiter.is_alive()]
        for waiter in dead:
            self.waiting.pop(waiter, None)
        self._unlooked = len(self.waiting)
        return bool(dead)

    def take_back(self) -> bool:
        """Take back a grant whose waiter was woken after its loop had gone; whether there was one.

        Looks at the oldest grant only: one that can still be used soon makes room for the next.
        """
        waiter = next(iter(self._granted), None)
        if waiter is None or waiter.is_alive():
            return False
        del self._granted[waiter]
        return True
