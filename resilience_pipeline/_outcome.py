"""What an execution came to, as a value: `Success`, `Rejected` or `Failure`.

Outcomes are made only at the edges: by `settle`, for predicates and hooks, and for the history of
attempts. Inside the pipeline results and errors travel as ordinary Python returns and exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Literal, Never, NoReturn, TypeAlias, Union

from attrs import Factory, field, frozen
from typing_extensions import TypeVar

T = TypeVar("T")
R = TypeVar("R")
D = TypeVar("D")
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


@frozen
class Success(Generic[T_co]):
    """The call gave a value.

    Attributes:
        value: What the call returned.
        attempts: After `settle`, the latest 64 tries; not part of equality.
        attempt_count: After `settle`, the number of all tries.
    """

    value: T_co
    attempts: tuple[Attempt, ...] = field(default=(), eq=False, repr=False, kw_only=True)
    attempt_count: int = field(default=0, eq=False, repr=False, kw_only=True)

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
    """What `Rejected` and `Failure` have in common: an error with the traceback it came with."""

    error: E_co
    attempts: tuple[Attempt, ...] = field(default=(), eq=False, repr=False, kw_only=True)
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
        return _rebuild_unsuccessful, (type(self), self.error, self.attempts, self.attempt_count)

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
    attempts: tuple[Attempt, ...],
    attempt_count: int,
) -> _Unsuccessful[Any]:
    return cls(error, attempts=attempts, attempt_count=attempt_count)


@frozen
class Rejected(_Unsuccessful[E_co]):
    """One of this pipeline's own strategies refused the call or gave up on it.

    Attributes:
        error: The rejection, one of the types the pipeline's builder has collected.
        attempts: After `settle`, the latest 64 tries; not part of equality.
        attempt_count: After `settle`, the number of all tries.
    """

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


@frozen
class Failure(_Unsuccessful[Exception]):
    """Everything else that went wrong, errors of the callback itself included.

    Attributes:
        error: The exception.
        attempts: After `settle`, the latest 64 tries; not part of equality.
        attempt_count: After `settle`, the number of all tries.
    """

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


def with_attempts(
    outcome: Success[T] | Rejected[E_co] | Failure, attempts: tuple[Attempt, ...], count: int
) -> Success[T] | Rejected[E_co] | Failure:
    """Make the same outcome with a history; `attrs.evolve` costs fifteen bare calls more."""
    if isinstance(outcome, Success):
        return Success(outcome.value, attempts=attempts, attempt_count=count)
    if isinstance(outcome, Rejected):
        return Rejected(outcome.error, attempts=attempts, attempt_count=count)
    return Failure(outcome.error, attempts=attempts, attempt_count=count)


Outcome: TypeAlias = Union[Success[T], Rejected[E_co], Failure]  # noqa: UP007 - subscriptable
