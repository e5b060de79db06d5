"""Every error the library raises.

::

    ResilienceError
    ├─ ExecutionRejectedError      a strategy refused the call or gave up on it
    │  ├─ BrokenCircuitError       the circuit is open
    │  │  └─ IsolatedCircuitError  the circuit is held open by hand
    │  ├─ TimeoutRejectedError     the time limit passed (also a builtin TimeoutError)
    │  ├─ RateLimiterRejectedError
    │  ├─ LockRejectedError        the lock did not become free in time
    │  └─ ConcurrencyLimiterRejectedError
    ├─ RecordingNotFoundError      nothing was recorded for the call (also a builtin LookupError)
    ├─ ResumeError                 a resumed stream is not the one that was delivered before
    ├─ MisuseError                 a programming mistake (also a TypeError)
    └─ OptionsError                bad options (also a ValueError)

An error is rebuilt from its fields when it is pickled or copied, so subclasses survive too as long
as they keep their state in attributes. Two things never travel: the traceback, and the mark that
ties a rejection to the execution it was raised in.
"""

from __future__ import annotations

from os import PathLike
from typing import Any


class ResilienceError(Exception):
    """Base class of everything this library raises by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the fields."""
        return _rebuild, (type(self), self.args), dict(vars(self))


def _rebuild(cls: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an instance of `cls` without running an `__init__` whose signature is not known."""
    error = cls.__new__(cls, *args)
    error.args = args
    return error


class ExecutionRejectedError(ResilienceError):
    """A strategy refused the call, or gave up on it.

    Attributes:
        pipeline_name: Name of the pipeline the strategy belongs to, or `None`.
        strategy_name: Name of the strategy that refused.
        operation_key: The execution's `operation_key`, or `None`.
        retry_after: Seconds until it makes sense to call again, never negative; `None` where
            nobody can tell.
    """

    # Identity of the execution this was raised in: what tells this pipeline's own refusal from the
    # same class raised by another pipeline inside the callback.
    _execution: object = None

    def __init__(
        self,
        message: str = "",
        *,
        pipeline_name: str | None = None,
        strategy_name: str | None = None,
        operation_key: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Make the error; the strategies do this, user code rarely has to."""
        super().__init__(message)
        self.pipeline_name = pipeline_name
        self.strategy_name = strategy_name
        self.operation_key = operation_key
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild from the fields; the mark of the execution stays behind."""
        fields = {name: value for name, value in vars(self).items() if name != "_execution"}
        return _rebuild, (type(self), self.args), fields


class BrokenCircuitError(ExecutionRejectedError):
    """The circuit is open: the call was not made.

    `retry_after` is what is left of the break. `__cause__` is the exception the circuit breaker
    handled last, or `None` when a result opened the circuit.
    """


class IsolatedCircuitError(BrokenCircuitError):
    """The circuit is held open by `CircuitBreakerControl.isolate`; `retry_after` is `None`."""


class TimeoutRejectedError(ExecutionRejectedError, TimeoutError):
    """The time limit of a timeout strategy passed.

    Attributes:
        timeout: The limit that was exceeded, in seconds.
    """

    def __init__(self, message: str = "", *, timeout: float = 0.0, **fields: Any) -> None:
        """Make the error; `fields` are those of `ExecutionRejectedError`."""
        super().__init__(message, **fields)
        self.timeout = timeout


class RateLimiterRejectedError(ExecutionRejectedError):
    """No permit of the rate limiter is free; `retry_after` is the time until one could be had."""


class LockRejectedError(ExecutionRejectedError):
    """The lock did not become free within the strategy's `max_wait`."""


class ConcurrencyLimiterRejectedError(ExecutionRejectedError):
    """As many calls as allowed are running, and the queue is full or the wait took too long."""


class RecordingNotFoundError(ResilienceError, LookupError):
    """Nothing was recorded for the call that is to be replayed.

    Attributes:
        key: What the call would have been recorded under, a JSON value.
        directory: Where it was looked for, as the strategy was given it.
    """

    def __init__(
        self, message: str = "", *, key: Any = None, directory: str | PathLike[str] = ""
    ) -> None:
        """Make the error; the strategy does this, user code rarely has to."""
        super().__init__(message)
        self.key = key
        self.directory = directory


class ResumeError(ResilienceError):
    """A stream that was run again after a failure is not the stream that was delivered before.

    It ended before it got to where it had failed, or began with other chunks. `__cause__` is the
    failure. Not handled by default.
    """


class MisuseError(ResilienceError, TypeError):
    """The library was called in a way that cannot work; a mistake in the calling program.

    No strategy retries, replaces or counts it.
    """


class OptionsError(ResilienceError, ValueError):
    """One or more options have bad values.

    The message lists every bad option with what was given and what it may be.

    Attributes:
        problems: One sentence for each bad option.
    """

    def __init__(self, message: str = "", problems: tuple[str, ...] = ()) -> None:
        """Make the error from its headline and the list of problems."""
        super().__init__(message)
        self.problems = problems


class MisusedOptionError(OptionsError, MisuseError):
    """What an option was given, or its function gives, can't work: a mistake that no strategy repeats.

    An object that stands where its function belongs, for instance: `on_retry=hook()` in place of
    `on_retry=hook`.
    """


class DeadlineReached(Exception):  # noqa: N818 - a signal between runtime and strategy, not an error
    """A runtime's `within` ended its inside because the limit passed. Never leaves the library."""
