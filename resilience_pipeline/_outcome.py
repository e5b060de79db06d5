"""What an execution came to, as a value: `Success`, `Rejected` or `Failure`.

Outcomes are made only at the edges: by `settle`, for predicates and hooks, and for the history of
attempts. Inside the pipeline results and errors travel as ordinary Python returns and exceptions.

Where nothing repeats, a call's history is one try, of which all but the duration is in the outcome.
So an outcome keeps that number alone, and writes the record when somebody reads `attempts`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, Never, NoReturn, TypeAlias, Union, cast

from attrs import Factory, field, frozen
from typing_extensions import TypeVar

T = TypeVar("T")
R = TypeVar("R")
D = TypeVar("D")
U = TypeVar("U", bound="Rejected[Any] | Failure")
T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", bound=Exception, covariant=True, default=Exception)

__all__ = ["Attempt", "Failure", "Outcome", "Rejected", "Success"]


@frozen(kw_only=True)
class Attempt:
    """One try made by a retry or a hedging strategy.

    Attributes:
        number: Number of the try from 0, as `ResilienceContext.attempt` gave it.
        outcome: What it came to; `None` for a try that was cancelled because another one won.
        duration: How long it ran, in seconds.
        delay: Seconds waited before it; 0 before the first.
        hedged: Whether it was a hedge: started by hedging in addition to the first.
    """

    number: int
    outcome: Success[Any] | Rejected[Any] | Failure | None
    duration: float
    delay: float = 0.0
    hedged: bool = False


#: The tries of a settled call, or of a single one just the seconds it took.
_Tries: TypeAlias = "tuple[Attempt, ...] | float"


@frozen
class Success(Generic[T_co]):
    """The call gave a value.

    Attributes:
        value: What the call returned.
        attempt_count: After `settle`, the number of all tries.

    Args:
        attempts: See the property; of a single try just the seconds it took.
    """

    value: T_co
    _attempts: _Tries = field(default=(), eq=False, repr=False, kw_only=True, alias="attempts")
    attempt_count: int = field(default=0, eq=False, repr=False, kw_only=True)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """After `settle`, the latest 64 tries; not part of equality."""
        tries = self._attempts
        return tries if isinstance(tries, tuple) else _single(self, Success(self.value), tries)

    @property
    def ok(self) -> Literal[True]:
        """Say that there is a value."""
        return True

    @property
    def error(self) -> None:
        """There is none."""
        return None

    def unwrap(self) -> T_co:
        """Return the value."""
        return self.value

    def value_or(self, default: object) -> T_co:  # noqa: ARG002 - the same call on every arm
        """Return the value; `default` is for the other arms."""
        return self.value

    def map(self, fn: Callable[[T_co], R]) -> Success[R]:
        """Return a success with `fn(value)`; an exception raised by `fn` comes out as it is."""
        return Success(fn(self.value), attempts=self.attempts, attempt_count=self.attempt_count)

    def match(
        self,
        *,
        success: Callable[[T_co], R],
        failure: Callable[[Never], object],  # noqa: ARG002 - the same call on every arm
        rejected: Callable[[Never], object] | None = None,  # noqa: ARG002
    ) -> R:
        """Call the function of this arm: `success(value)`."""
        return success(self.value)


@frozen
class _Unsuccessful(Generic[E_co]):
    """What `Rejected` and `Failure` have in common: an error with the traceback it came with.

    They have all that attrs makes from here; to make it twice more would take a millisecond of each
    import.
    """

    error: E_co
    _attempts: _Tries = field(default=(), eq=False, repr=False, kw_only=True, alias="attempts")
    attempt_count: int = field(default=0, eq=False, repr=False, kw_only=True)
    # Kept apart because every raise of `error` lets its own traceback grow.
    _traceback: TracebackType | None = field(
        init=False,
        eq=False,
        repr=False,
        default=Factory(lambda self: getattr(self.error, "__traceback__", None), takes_self=True),
    )

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the fields; tracebacks do not travel."""
        return _rebuild_unsuccessful, (type(self), self.error, self._attempts, self.attempt_count)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """After `settle`, the latest 64 tries; not part of equality."""
        tries = self._attempts
        if isinstance(tries, tuple):
            return tries
        came_to: Any = type(self)(self.error)
        return _single(self, came_to, tries)

    @property
    def ok(self) -> Literal[False]:
        """Say that there is no value."""
        return False

    def unwrap(self) -> NoReturn:
        """Raise the original error, with the traceback it came with."""
        raise self.error.with_traceback(self._traceback)

    def value_or(self, default: D) -> D:
        """Return `default`."""
        return default


def _rebuild_unsuccessful(
    cls: type[_Unsuccessful[Any]],
    error: Exception,
    attempts: _Tries,
    attempt_count: int,
) -> _Unsuccessful[Any]:
    return cls(error, attempts=attempts, attempt_count=attempt_count)


class Rejected(_Unsuccessful[E_co]):
    """One of this pipeline's own strategies refused the call or gave up on it.

    Attributes:
        error: The rejection, one of the types the pipeline's builder has collected.
        attempt_count: After `settle`, the number of all tries.

    Args:
        attempts: See the property; of a single try just the seconds it took.
    """

    __slots__ = ()

    def map(self, fn: Callable[[Never], object]) -> Rejected[E_co]:  # noqa: ARG002
        """Return this outcome as it is."""
        return self

    def match(
        self,
        *,
        success: Callable[[Never], object],  # noqa: ARG002 - the same call on every arm
        failure: Callable[[E_co], R],
        rejected: Callable[[E_co], R] | None = None,
    ) -> R:
        """Call the function of this arm: `rejected(error)`, or `failure(error)` without one."""
        return failure(self.error) if rejected is None else rejected(self.error)


class Failure(_Unsuccessful[Exception]):
    """Everything else that went wrong, errors of the callback itself included.

    Attributes:
        error: The exception.
        attempt_count: After `settle`, the number of all tries.

    Args:
        attempts: See the property; of a single try just the seconds it took.
    """

    __slots__ = ()

    def map(self, fn: Callable[[Never], object]) -> Failure:  # noqa: ARG002
        """Return this outcome as it is."""
        return self

    def match(
        self,
        *,
        success: Callable[[Never], object],  # noqa: ARG002 - the same call on every arm
        failure: Callable[[Exception], R],
        rejected: Callable[[Never], object] | None = None,  # noqa: ARG002
    ) -> R:
        """Call the function of this arm: `failure(error)`."""
        return failure(self.error)


def _single(outcome: object, came_to: _Settled, duration: float) -> tuple[Attempt, ...]:
    """Write the history of a call that was tried once, and keep it."""
    attempts = (Attempt(number=0, outcome=came_to, duration=duration),)
    object.__setattr__(outcome, "_attempts", attempts)
    return attempts


_Settled: TypeAlias = "Success[Any] | Rejected[Any] | Failure"

# The slots of outcomes, to be filled one by one: the generated constructors cost twice as much.
_new = object.__new__
_set_value = vars(Success)["value"].__set__
_set_tries_of_success = vars(Success)["_attempts"].__set__
_set_count_of_success = vars(Success)["attempt_count"].__set__
_set_error, _set_tries, _set_count, _set_traceback = (
    vars(_Unsuccessful)[name].__set__
    for name in ("error", "_attempts", "attempt_count", "_traceback")
)


def settled_success(value: T, tries: _Tries, count: int) -> Success[T]:
    """Make a success with its history, or with the duration of its one try."""
    outcome = cast("Success[T]", _new(Success))
    _set_value(outcome, value)
    _set_tries_of_success(outcome, tries)
    _set_count_of_success(outcome, count)
    return outcome


def settled_error(cls: type[U], error: Exception, tries: _Tries, count: int) -> U:
    """Make a `Rejected` or a `Failure` with its history, or with the duration of its one try."""
    outcome = _new(cls)
    _set_error(outcome, error)
    _set_tries(outcome, tries)
    _set_count(outcome, count)
    _set_traceback(outcome, error.__traceback__)
    return outcome


Outcome: TypeAlias = Union[Success[T], Rejected[E_co], Failure]  # noqa: UP007 - subscriptable
