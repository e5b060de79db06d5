"""State per key: one bound strategy for each host, tenant or model, made when it is first needed.

Rules:
1. A key is let go only while forgetting it could not change an answer: nobody is inside, and its
   strategy says that it is idle. What is idle is looked at when a key is added, the least recently
   used first; keys in use may be more than `max_keys`.
2. Who comes in is counted under the lock before the key's strategy is asked anything, so a key
   can't be let go between being found and being used.
3. A strategy is made outside the lock, since making one may call user code. Where two threads make
   one for the same key the first is kept, and nobody has ever seen the other one.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from .._context import ResilienceContext, refuse_awaitable
from .._errors import MisuseError
from .._locks import Lock
from ..telemetry import Severity, StrategyEvent
from ._base import Handler, Site


class KeysExceededEvent(StrategyEvent):
    """What listeners are told when a key is added and more are in use than `max_keys`.

    Attributes:
        context: The context of the execution that brought the key.
        key: The key.
        keys: How many there are now.
        max_keys: How many there may be while any of them is idle.
    """

    name = "OnKeysExceeded"
    severity: Severity = Severity.WARNING
    context: ResilienceContext
    key: Hashable
    keys: int
    max_keys: int


class Bound(Protocol):
    """A bound strategy that can be one of many."""

    def is_idle(self, now: float) -> bool:
        """Whether a fresh one would give the same answers from now on."""
        ...

    def health(self) -> dict[str, Any]:
        """Show the state as plain data, `is_idle` included."""
        ...


B = TypeVar("B", bound=Bound)
E = TypeVar("E", bound="Entry")

#: How many keys that can't be let go an addition may look at, on average.
_LOOKS = 64


class Entry(Protocol):
    """What is kept of a key.

    Attributes:
        inside: How many are inside now.
        used_at: When it was left last.
    """

    inside: int
    used_at: float

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it could not change an answer; asked while nobody is inside."""
        ...


class KeyTable(OrderedDict[Hashable, E]):
    """What is kept by key, in the order in which the keys were left, but for those in use.

    Pure bookkeeping: no lock, no clock. Its user calls every method under a lock of its own.

    Args:
        max_keys: How many keys are kept, but for those that are in use.
        key_idle: Seconds after which an idle key that was not used is let go.
    """

    def __init__(self, max_keys: int, key_idle: float) -> None:
        super().__init__()
        self.max_keys = max_keys
        self._key_idle = key_idle
        #: Additions for which nobody is looked at, where many would be that can't be let go.
        self._skips = 0

    def let_go(self, now: float) -> None:
        """Forget keys that have not been used for long, then the least recently used ones."""
        if self._skips > 0:
            self._skips -= 1
            return
        surplus = len(self) - self.max_keys
        gone: list[Hashable] = []
        looked_at = 0
        # The collector may close a call in between, which then leaves: the next addition looks on.
        entries = iter(self.items())
        while True:
            try:
                key, entry = next(entries)
            except (StopIteration, RuntimeError):
                break
            young = not entry.inside and now - entry.used_at < self._key_idle
            if young and len(gone) >= surplus:
                break  # those after it were used later
            looked_at += 1
            if not entry.inside and entry.is_idle(now):
                gone.append(key)
        for key in gone:
            del self[key]
        self._skips = (looked_at - len(gone)) // _LOOKS


def ask_key(
    key_of: Callable[[ResilienceContext], Any], context: ResilienceContext, origin: str
) -> Hashable:
    """Ask a plain function for the key of a call.

    Raises:
        MisuseError: What it gives is no key.
    """
    key = key_of(context)
    if inspect.isawaitable(key):
        refuse_awaitable(key, "key")
        if inspect.iscoroutine(key):
            key.close()
        msg = f"{origin}: key= must be a plain function, it gave an awaitable"
        raise MisuseError(msg)
    try:
        hash(key)
    except TypeError:
        msg = (
            f"{origin}: key= must give something that can be hashed, a text for "
            f"example; it gave {key!r}"
        )
        raise MisuseError(msg) from None
    return key  # type: ignore[no-any-return]


class _Entry(Generic[B]):
    __slots__ = ("bound", "handle", "inside", "used_at")

    def __init__(self, bound: B, handle: Handler) -> None:
        self.bound = bound
        self.handle = handle
        self.inside = 0
        self.used_at = 0.0

    def is_idle(self, now: float) -> bool:
        return self.bound.is_idle(now)


class KeyedStrategies(Generic[B]):
    """The bound strategies of one layer of a pipeline, by key.

    Args:
        key: Gives a call's key from its context.
        max_keys: How many keys are kept, but for those that are in use.
        key_idle: Seconds after which an idle key that was not used is let go.
        make: Makes a bound strategy with its handler.
        site: Where the strategy sits.
        kept: Called with each strategy that was kept, after it was.
    """

    def __init__(
        self,
        *,
        key: Callable[[ResilienceContext], Any],
        max_keys: int,
        key_idle: float,
        make: Callable[[Any], tuple[B, Handler]],
        site: Site,
        kept: Callable[[B], None] | None = None,
    ) -> None:
        self._key = key
        self._make = make
        self._site = site
        self._kept = kept
        self._lock = Lock()
        self._entries: KeyTable[_Entry[B]] = KeyTable(max_keys, key_idle)

    def __len__(self) -> int:
        """Return the number of keys that are kept."""
        return len(self._entries)

    def __iter__(self) -> Iterator[tuple[Hashable, B]]:
        """Iterate over the keys that are kept now, with their strategies."""
        with self._lock:
            entries = list(self._entries.items())
        return ((key, entry.bound) for key, entry in entries)

    def health(self) -> dict[str, Any]:
        """Show the state of each key, those that are no text as they are written in a program."""
        reports: dict[str, dict[str, Any]] = {}
        for key, bound in self:
            name = key if isinstance(key, str) else repr(key)
            while name in reports:  # 1 and "1", for example
                name += " (another)"
            reports[name] = bound.health()
        return {"keys": reports, "idle": all(report["idle"] for report in reports.values())}

    async def handle(self, context: ResilienceContext) -> Any:
        """Run the inside under the strategy of the call's key."""
        key = ask_key(self._key, context, self._site.origin)
        entry, keys = self._enter(key)
        try:
            if keys > self._entries.max_keys:
                tell_of_keys(self._site, context, key, keys, self._entries.max_keys)
            return await entry.handle(context)
        finally:
            self._leave(key, entry)

    def _enter(self, key: Hashable) -> tuple[_Entry[B], int]:
        """Give a key's entry and, where it is new, how many keys there are now."""
        entry = self._find(key)
        if entry is not None:
            return entry, 0
        made = _Entry(*self._make(key))
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = made
                entry.inside += 1
                self._entries.let_go(self._site.now())
            else:
                entry.inside += 1
            keys = len(self._entries)
        if entry is not made:
            return entry, 0
        if self._kept is not None:
            try:
                self._kept(made.bound)
            except BaseException:
                self._leave(key, entry)
                raise
        return entry, keys

    def _find(self, key: Hashable) -> _Entry[B] | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.inside += 1
        return entry

    def _leave(self, key: Hashable, entry: _Entry[B]) -> None:
        with self._lock:
            entry.inside -= 1
            entry.used_at = self._site.now()
            self._entries.move_to_end(key)


def tell_of_keys(
    site: Site, context: ResilienceContext, key: Hashable, keys: int, max_keys: int
) -> None:
    """Tell listeners that more keys are in use than `max_keys`."""
    if site.wants(KeysExceededEvent):
        event = KeysExceededEvent(context=context, key=key, keys=keys, max_keys=max_keys)
        site.report(event)


def keyed(options: Any, site: Site, make: Callable[[Any], tuple[B, Handler]], **told: Any) -> Any:
    """Make the strategies of a layer whose options have a `key`."""
    return KeyedStrategies(
        key=options.key,
        max_keys=options.max_keys,
        key_idle=options.key_idle,
        make=make,
        site=site,
        **told,
    )
