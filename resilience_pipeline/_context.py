"""What travels through the onion with one execution: `ResilienceContext`.

A context is made per execution (or handed in by the caller) and is the only per-call state that
strategies share. Its public half is for users; the half with underscores is for the pipeline and
the strategies of this package. It knows no strategy and no runtime.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeAlias, overload

from attrs import evolve, frozen
from typing_extensions import TypeVar

from ._cancellation import CancellationFlag, Orphans, running_flag
from ._errors import MisuseError
from ._options import UNSET
from ._outcome import Attempt, Failure, Rejected, Success, settled_error

if TYPE_CHECKING:
    from ._priming import StreamExecution
    from .runtime import Runtime
    from .runtime._finder import Finder

T = TypeVar("T")
D = TypeVar("D")

_HISTORY_LIMIT = 64


@frozen(repr=False)
class PropertyKey(Generic[T]):
    """A typed key of `ResilienceContext.properties`; keys with equal names are equal.

    Args:
        name: The key's name.
    """

    name: str

    def __repr__(self) -> str:
        """Show the name."""
        return f"PropertyKey({self.name!r})"


class Properties:
    """Values that callers, hooks and callbacks attach to one execution.

    A stored `None` is a value like any other.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[PropertyKey[Any], Any] | None = None) -> None:
        """Start with a copy of `values`."""
        self._values: dict[PropertyKey[Any], Any] = {}
        for key, value in (values or {}).items():
            self.set(key, value)

    @overload
    def get(self, key: PropertyKey[T]) -> T: ...
    @overload
    def get(self, key: PropertyKey[T], default: D) -> T | D: ...
    def get(self, key: PropertyKey[Any], default: Any = UNSET) -> Any:
        """Return the value of `key`, or `default`.

        Raises:
            LookupError: Nothing is stored under `key` and no `default` was given.
        """
        value = self._values.get(key, default)
        if value is UNSET:
            msg = f"the context has no property {getattr(key, 'name', key)!r}; give a default"
            raise LookupError(msg)
        return value

    def set(self, key: PropertyKey[T], value: T) -> None:
        """Store `value` under `key`, in place of what was there."""
        if not isinstance(key, PropertyKey):
            msg = f"a property is kept under a PropertyKey, not under {key!r}"
            raise MisuseError(msg)
        self._values[key] = value

    def __getitem__(self, key: PropertyKey[T]) -> T:
        """Return the value of `key`; a `LookupError` without one."""
        return self.get(key)

    def __setitem__(self, key: PropertyKey[T], value: T) -> None:
        """Store `value` under `key`."""
        self.set(key, value)

    def __contains__(self, key: object) -> bool:
        """Whether a value, `None` included, is stored under `key`."""
        return key in self._values

    def __iter__(self) -> Iterator[PropertyKey[Any]]:
        """Iterate over the keys, oldest first."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return the number of stored values."""
        return len(self._values)

    def __repr__(self) -> str:
        """Show names and values."""
        return f"Properties({ {key.name: value for key, value in self._values.items()} })"


class History:
    """The tries of one execution: the latest 64, and how many there were.

    The usual one, a try that was good at once, is written when somebody wants to read it.
    """

    __slots__ = ("_good", "_latest", "count")

    def __init__(self) -> None:
        self._good: tuple[Any, float] | None = None
        self._latest: deque[Attempt] | None = None
        self.count = 0

    def add(self, attempt: Attempt) -> None:
        self._written().append(attempt)
        self.count += 1

    def add_good(self, result: Any, duration: float) -> None:
        """Note a first try that gave a result."""
        if self.count:
            self.add(Attempt(number=0, outcome=Success(result), duration=duration))
        else:
            self._good, self.count = (result, duration), 1

    def extend(self, other: History, *, hedged: bool | None = None) -> None:
        """Take over what was noted elsewhere, as tries of a hedge or of none if that is said."""
        noted: Iterable[Attempt] = other._written()
        if hedged is not None:
            noted = (evolve(attempt, hedged=hedged) for attempt in noted)
        self._written().extend(noted)
        self.count += other.count

    def tries(self, result: Any, error: Exception | None) -> tuple[Attempt, ...] | float:
        """Give the tries; of a single one that gave what the call did, just the seconds it took."""
        good = self._good
        if good is not None and error is None and good[0] is result:
            return good[1]
        return tuple(self._written()) if self.count else ()

    def clear(self) -> None:
        """Forget what led to values and errors."""
        self._good = self._latest = None

    def _written(self) -> deque[Attempt]:
        if self._latest is None:
            self._latest = deque(maxlen=_HISTORY_LIMIT)
        if self._good is not None:
            (result, duration), self._good = self._good, None
            self._latest.append(Attempt(number=0, outcome=Success(result), duration=duration))
        return self._latest


#: What is left of the pipelines around a nested one: the handler inside of it, what finds the
#: runtime there, and the rest of that.
Rest: TypeAlias = "tuple[Callable[[ResilienceContext], Any], Finder, Rest | None]"


class ExecutionMark:
    """Identity of one execution, the same in all its contexts, and who has counted it."""

    def is_new_to(self, counter: object) -> bool:
        """Whether `counter` meets the execution for the first time: true once, whatever thread asks."""
        asked = object()
        return self.note(counter, asked) is asked

    def note(self, counter: object, value: object) -> object:
        """Keep a value of a counter's, unless it has one already; give the one that it has."""
        counters: dict[object, object] = vars(self).setdefault("counters", {})
        return counters.setdefault(counter, value)

    def noted(self, counter: object) -> object:
        """Give what was kept for a counter, or `None`."""
        counters: dict[object, object] = vars(self).get("counters", {})
        return counters.get(counter)


class ResilienceContext:
    """State of one execution, visible in callbacks, hooks and predicates.

    Attributes:
        operation_key: A low-cardinality label of the call for telemetry and cache keys, or `None`.
        idempotent: Whether the callback may be repeated once it was invoked.
        attempt: Number of the running attempt, from 0.
        pipeline_name: Name of the executing pipeline, or `None`.
        runtime: What strategies wait, race and read the clock through; set during an execution.

    Args:
        operation_key: See the attribute.
        idempotent: See the attribute.
        properties: Values to start with, by `PropertyKey`.
    """

    __slots__ = (
        "_args",
        "_around",
        "_finder",
        "_fn",
        "_history",
        "_invocations",
        "_mark",
        "_properties",
        "_rest",
        "_stream",
        "_sync",
        "attempt",
        "idempotent",
        "operation_key",
        "pipeline_name",
    )

    # Set by the pipeline for the time of an execution.
    _finder: Finder
    _fn: Callable[..., Any] | None
    _args: tuple[Any, ...]
    _stream: StreamExecution | None
    # Of a synchronous call, what goes on in its threads without it; None in an event loop.
    _sync: Orphans | None
    # In a synchronous call, what this is a fork of: there the callback's invocations count as well.
    _around: ResilienceContext | None
    # Not there until first needed: every attribute that is set costs a call a twelfth of a bare
    # one.
    _mark: object
    _properties: Properties

    def __init__(
        self,
        operation_key: str | None = None,
        idempotent: bool = True,
        properties: Mapping[PropertyKey[Any], Any] | None = None,
    ) -> None:
        self.operation_key = operation_key
        self.idempotent = idempotent
        self.attempt = 0
        self.pipeline_name: str | None = None
        self._fn = None
        self._stream = None
        self._sync = None
        # How often the callback was invoked: "never started" and "ran on an exhausted argument"
        # are both told by comparing two readings.
        self._invocations = 0
        self._history: History | None = None
        # What is left of the pipelines around a nested one, innermost first; see
        # `_pipeline.nested`.
        self._rest: Rest | None = None
        if properties is not None:
            self._properties = Properties(properties)

    @property
    def runtime(self) -> Runtime:
        """What strategies wait and cancel through; looked for when needed, as most calls wait for nothing."""
        return self._finder.find()

    @property
    def properties(self) -> Properties:
        """Values attached to this execution, by `PropertyKey`."""
        try:
            return self._properties
        except AttributeError:
            self._properties = Properties()
            return self._properties

    @property
    def cancelled(self) -> CancellationFlag:
        """Whether the caller has given up on the attempt that asks: `is_set()`, or `wait(seconds)`.

        A call in a thread can't be stopped when it times out or loses a race; it can look here, and
        stop by itself. In an event loop it is never set, because there attempts are cancelled.
        """
        return running_flag.get()

    @property
    def execution(self) -> object:
        """Identity of the execution; rejections carry it, see `outcome_of_error`."""
        mark = getattr(self, "_mark", None)  # to catch its absence costs several bare calls
        if mark is None:
            self._mark = mark = ExecutionMark()
        return mark

    def is_own(self, error: Exception) -> bool:
        """Whether `error` is a rejection by this execution's strategies."""
        mark = getattr(error, "_execution", None)
        return mark is not None and mark is getattr(self, "_mark", None)

    def outcome_of_error(self, error: Exception) -> Rejected[Any] | Failure:
        """Show `error` as `settle` would: `Rejected` if this execution's strategies raised it."""
        return settled_error(Rejected if self.is_own(error) else Failure, error, (), 0)

    def outcome_of_result(self, result: Any) -> Success[Any]:
        """Show `result` to user code; a stream's result is its first chunk."""
        return Success(result if self._stream is None else self._stream.first_chunk(result))

    def __repr__(self) -> str:
        """Show the public half."""
        return (
            f"ResilienceContext(operation_key={self.operation_key!r}, "
            f"idempotent={self.idempotent!r}, attempt={self.attempt!r}, "
            f"pipeline_name={self.pipeline_name!r})"
        )

    def begin(
        self,
        pipeline_name: str | None,
        finder: Finder,
        fn: Callable[..., Any],
        args: Any,
    ) -> Self:
        """Bind the context to an execution that starts now.

        Raises:
            MisuseError: The context still serves another execution.
        """
        if self._fn is not None:
            msg = "this ResilienceContext still serves another execution; make one per execution"
            raise MisuseError(msg)
        self.attempt = 0
        self.pipeline_name = pipeline_name
        self._finder = finder
        self._fn = fn
        self._args = args
        self._invocations = 0
        self._mark = ExecutionMark()
        self._rest = None
        self._sync = None
        return self

    def fork(self, properties: Properties | None = None) -> ResilienceContext:
        """Make another context of the same execution, for what runs beside this one or after it.

        Args:
            properties: What the fork's properties are; a copy of this context's if not given.
        """
        other = BlankContext()
        other.operation_key = self.operation_key
        other.idempotent = self.idempotent
        other.attempt = self.attempt
        other.pipeline_name = self.pipeline_name
        other._finder = self._finder
        other._fn = self._fn
        other._args = self._args
        other._stream = self._stream
        other._sync = self._sync
        other._around = None if self._sync is None else self
        other._invocations = self._invocations
        other._history = None
        other._rest = self._rest
        other._mark = self.execution  # its rejections are this execution's own
        other._properties = Properties(self.written) if properties is None else properties
        return other

    def _count_in_thread(self) -> None:
        """Count an invocation of the callback in a synchronous call, at once for all who will ask.

        In an event loop whatever runs in a fork is over before anybody asks, and adds up what it
        has done. A thread may be left alone with it, and with the forks around it.
        """
        # Of attempts in threads beside each other one may be lost in what is around them: nobody
        # looks there before they are over, and then at whether there were any.
        each: ResilienceContext | None = self
        while each is not None:
            each._invocations += 1
            each = each._around

    @property
    def written(self) -> dict[PropertyKey[Any], Any]:
        """The properties as a plain mapping, empty where none was ever written."""
        try:
            return self._properties._values
        except AttributeError:
            return {}

    def end(self) -> None:
        """Let go of the execution, so that a context kept by the caller keeps nothing alive."""
        self._fn = None
        self._args = ()
        self._stream = None
        self._sync = None
        self._history = None


class BlankContext(ResilienceContext):
    """A context whose attributes are still to be set.

    Calling a class that has no `__init__` takes a quarter of a bare call less than `__new__` alone.
    """

    __slots__ = ()
    if not TYPE_CHECKING:
        __init__ = object.__init__


def check_context(context: object) -> None:
    """Refuse what is given for a context and is none."""
    if not isinstance(context, ResilienceContext):
        msg = f"context= takes a ResilienceContext, got {context!r}"
        raise MisuseError(msg)


def begun(  # noqa: PLR0917 - names would cost a third of what this saves
    operation_key: str | None,
    idempotent: bool,
    pipeline_name: str | None,
    finder: Finder,
    fn: Callable[..., Any],
    args: Any,
) -> ResilienceContext:
    """Make a context that serves an execution from its start.

    `ResilienceContext(...).begin(...)` in one step, which saves every call a bare one and a half.
    """
    context = BlankContext()
    context.operation_key = operation_key
    context.idempotent = idempotent
    context.attempt = 0
    context.pipeline_name = pipeline_name
    context._finder = finder
    context._fn = fn
    context._args = args
    context._stream = None
    context._sync = None
    context._invocations = 0
    context._history = None
    context._rest = None
    return context


current: ContextVar[ResilienceContext] = ContextVar("resilience_pipeline.current_context")

# Bound once: with each look-up of a method a call would cost a quarter of a bare one more.
enter = current.set
reset = current.reset


def leave(token: Token[ResilienceContext]) -> None:
    """Take back what was set for an execution."""
    try:  # noqa: SIM105 - `suppress` costs each call two bare ones
        reset(token)
    except ValueError:
        # An abandoned coroutine is closed by the garbage collector, wherever that happens to run;
        # the context it was set in is gone.
        pass


def refuse_awaitable(answer: Any, what: str) -> None:
    """Refuse what has to be awaited, where a synchronous call runs.

    Raises:
        MisuseError: `what`, a hook say, gave an awaitable in a synchronous call.
    """
    context = current.get(None)
    if context is not None and context._sync is not None:
        refuse(answer, what)


def refuse(answer: Any, what: str) -> NoReturn:
    """Refuse what has to be awaited; see `refuse_awaitable`."""
    shown = repr(answer)
    if hasattr(answer, "close"):
        answer.close()
    msg = (
        f"{what} gave {shown} in a synchronous call, where nothing can be awaited: use a plain "
        f"function, or execute() in an event loop"
    )
    raise MisuseError(msg)


def current_context() -> ResilienceContext:
    """Return the context of the attempt that runs this code.

    Raises:
        LookupError: The code is not run by a pipeline.
    """
    try:
        return current.get()
    except LookupError:
        msg = "current_context() was called outside of a pipeline's execution"
        raise LookupError(msg) from None
