"""What counts as a failure, and what a failure says about when to come back.

`should_handle` options take many forms; `as_predicate` brings each into a `Predicate`. One gate
holds for all: only an `Exception` that is no `MisuseError` is ever shown to a predicate. The
default predicate reads HTTP statuses and `Retry-After` headers off the exceptions of the usual
clients without importing any of them.
"""

from __future__ import annotations

import inspect
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias, Union, cast

from ._context import ResilienceContext, refuse_awaitable
from ._errors import (
    ExecutionRejectedError,
    MisusedOptionError,
    MisuseError,
    OptionsError,
    ResumeError,
    TimeoutRejectedError,
)
from ._event import Event
from ._options import bad, written
from ._outcome import Failure, Rejected, Success

__all__ = ["OutcomeEvent", "Predicate", "ShouldHandle", "handle", "handle_inner", "handle_result"]


class OutcomeEvent(Event):
    """What a `should_handle` function is asked about.

    Attributes:
        context: The execution's context.
        outcome: What the attempt came to; a stream's result is its first chunk.
        attempt: Number of the attempt from 0.
    """

    context: ResilienceContext
    outcome: Success[Any] | Rejected[Any] | Failure
    attempt: int


_Asked: TypeAlias = "bool | Awaitable[bool]"


class Predicate:
    """A rule that says which outcomes a strategy handles; join rules with `|`.

    Made by `handle`, `handle_inner` and `handle_result`.
    """

    # No class of attrs', and so none of the rules: to build those would be a tenth of an import.
    __slots__ = ()

    #: Whether results have to be shown to this predicate at all.
    sees_results = False

    def matches(self, event: OutcomeEvent) -> _Asked:
        """Say whether the outcome is handled, or give an awaitable that will."""
        raise NotImplementedError

    def matches_error(self, error: Exception) -> bool | None:  # noqa: ARG002 - for overriding
        """Say so from the exception alone; `None` if that takes the whole event."""
        return None

    def _content(self) -> tuple[object, ...]:
        """What makes two rules of one class equal."""
        names: tuple[str, ...] = self.__slots__
        return tuple(getattr(self, name) for name in names)

    def __eq__(self, other: object) -> bool:
        """Whether the other one is the same rule."""
        if type(other) is not type(self):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        """Hash what makes rules equal."""
        return hash((type(self), *self._content()))

    def __or__(self, other: Predicate) -> Predicate:
        """Handle what either of both handles; the left one is asked first."""
        if not isinstance(other, Predicate):
            return NotImplemented
        return _AnyOf((*_members(self), *_members(other)))


def _members(predicate: Predicate) -> tuple[Predicate, ...]:
    return predicate.members if isinstance(predicate, _AnyOf) else (predicate,)


class _AnyOf(Predicate):
    __slots__ = ("members",)

    def __init__(self, members: tuple[Predicate, ...]) -> None:
        self.members = members

    @property
    def sees_results(self) -> bool:  # type: ignore[override]
        return any(member.sees_results for member in self.members)

    async def matches(self, event: OutcomeEvent) -> bool:
        for member in self.members:
            if await settled(member.matches(event)):
                return True
        return False

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.members))


class _Errors(Predicate):
    """Handles exceptions of given types, perhaps narrowed by `where`."""

    __slots__ = ("inner", "types", "where")

    def __init__(
        self,
        types: tuple[type[Exception], ...],
        where: Callable[[Any], _Asked] | None = None,
        *,
        inner: bool = False,
    ) -> None:
        self.types = types
        self.where = where
        self.inner = inner

    def matches_error(self, error: Exception) -> bool | None:
        if self.inner or self.where is not None:
            return None
        return isinstance(error, self.types)

    async def matches(self, event: OutcomeEvent) -> bool:
        error = event.outcome.error
        if error is None:
            return False
        for candidate in _with_inner(error) if self.inner else (error,):
            if not isinstance(candidate, self.types):
                continue
            if self.where is None or await settled(_plain("where", self.where(candidate))):
                return True
        return False

    def __repr__(self) -> str:
        arguments = [written(each) for each in self.types]
        if self.where is not None:
            arguments.append(f"where={written(self.where)}")
        return f"handle{'_inner' if self.inner else ''}({', '.join(arguments)})"


class _Results(Predicate):
    """Handles results that `test` says yes to."""

    __slots__ = ("test",)

    sees_results = True

    def __init__(self, test: Callable[[Any], _Asked]) -> None:
        self.test = test

    def matches(self, event: OutcomeEvent) -> _Asked:
        if not isinstance(event.outcome, Success):
            return False
        return _plain("handle_result", self.test(event.outcome.value))

    def __repr__(self) -> str:
        return f"handle_result({written(self.test)})"


class _Function(Predicate):
    """Handles what a function of the whole event says yes to."""

    __slots__ = ("test",)

    sees_results = True

    def __init__(self, test: Callable[[OutcomeEvent], _Asked]) -> None:
        self.test = test

    def matches(self, event: OutcomeEvent) -> _Asked:
        return _plain("should_handle", self.test(event))

    def __repr__(self) -> str:
        return written(self.test)


class _Default(Predicate):
    """Handles every exception but an HTTP client error that a repetition cannot mend."""

    __slots__ = ()

    def matches_error(self, error: Exception) -> bool:
        return not is_permanent(error)

    def matches(self, event: OutcomeEvent) -> bool:
        error = event.outcome.error
        return error is not None and self.matches_error(error)

    def __repr__(self) -> str:
        return "default"


DEFAULT = _Default()

ShouldHandle: TypeAlias = Union[  # noqa: UP007 - evaluated at run time
    type[Exception],
    tuple[type[Exception], ...],
    Predicate,
    Callable[[OutcomeEvent], "bool | Awaitable[bool]"],
]


def _plain(name: str, answer: _Asked) -> _Asked:
    """Pass on what a function of the user's answered, which may be awaited in an event loop only."""
    if inspect.isawaitable(answer):
        refuse_awaitable(answer, name)
    return answer


async def settled(answer: Any) -> bool:
    """Turn what a user's function answered into a bool, awaiting it first if it is awaitable."""
    if inspect.isawaitable(answer):
        answer = await answer
    return bool(answer)


# ---- making predicates ------------------------------------------------------------------------


def handle(
    *types: type[Exception], where: Callable[[Any], bool | Awaitable[bool]] | None = None
) -> Predicate:
    """Handle exceptions of these types.

    Args:
        types: Exception types, at least one.
        where: A function of the exception that narrows the choice further.

    Raises:
        OptionsError: No type is given, or something that is no exception type.
    """
    return _Errors(_exception_types("handle", types), _callable("handle", "where", where))


def handle_inner(
    *types: type[Exception], where: Callable[[Any], bool | Awaitable[bool]] | None = None
) -> Predicate:
    """Handle exceptions that are of these types or were caused by one that is.

    Looks through `__cause__`, `__context__` (unless suppressed by `raise … from None`) and the
    members of exception groups, at any depth.

    Args:
        types: Exception types, at least one.
        where: A function of the exception that was found; narrows the choice further.

    Raises:
        OptionsError: No type is given, or something that is no exception type.
    """
    types = _exception_types("handle_inner", types)
    return _Errors(types, _callable("handle_inner", "where", where), inner=True)


def handle_result(test: Callable[[Any], bool | Awaitable[bool]]) -> Predicate:
    """Handle results that `test` says yes to; exceptions are never shown to it.

    Args:
        test: A function of the result (of a stream: of its first chunk).

    Raises:
        OptionsError: `test` is no function.
    """
    if not callable(test):
        _refuse(f"handle_result() takes a function of the result, got {test!r}", test)
    return _Results(test)


def to_predicate(value: ShouldHandle) -> Predicate:
    """Convert the `should_handle` option; refuses what is no form of a predicate."""
    predicate = as_predicate(value)
    return bad(value, _FORMS) if predicate is None else predicate


def to_predicate_or_none(value: ShouldHandle | None) -> Predicate | None:
    """Convert an option that is a predicate or `None`."""
    return None if value is None else to_predicate(value)


_FORMS = (
    "an exception type, a tuple of them, handle(...) or handle_result(...) joined with |, "
    "or a function of the outcome event"
)


def as_predicate(value: Any) -> Predicate | None:
    """Bring any form of `should_handle` into a predicate; `None` if it is none of them."""
    if isinstance(value, Predicate):
        return value
    if isinstance(value, type):
        return _Errors((value,)) if issubclass(value, Exception) else None
    if isinstance(value, tuple):
        return _errors_of(cast(Any, value))
    return _Function(cast("Callable[[OutcomeEvent], bool]", value)) if callable(value) else None


def _errors_of(types: tuple[Any, ...]) -> Predicate | None:
    return _Errors(types) if types and all(map(_is_exception_type, types)) else None


def _is_exception_type(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _exception_types(caller: str, types: tuple[Any, ...]) -> tuple[type[Exception], ...]:
    if not types:
        _refuse(f"{caller}() takes at least one exception type", types)
    for each in types:
        if not _is_exception_type(each):
            _refuse(f"{caller}() takes subclasses of Exception, got {each!r}", each)
    return types


def _callable(caller: str, option: str, value: Any) -> Any:
    if value is not None and not callable(value):
        _refuse(f"{caller}({option}=…) must be a function, got {value!r}", value)
    return value


def _refuse(message: str, value: object) -> NoReturn:
    if inspect.iscoroutine(value):
        value.close()
        raise MisusedOptionError(message, (message,))
    raise OptionsError(message, (message,))


def _with_inner(error: BaseException) -> Iterator[BaseException]:
    """Walk an exception, its causes and the members of groups, each one once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        candidate = waiting.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        yield candidate
        if isinstance(candidate, BaseExceptionGroup):
            waiting.extend(reversed(members_of(cast(Any, candidate))))
        cause = candidate.__cause__
        if cause is None and not candidate.__suppress_context__:
            cause = candidate.__context__
        if cause is not None:
            waiting.append(cause)


def members_of(group: BaseExceptionGroup[Any]) -> tuple[BaseException, ...]:
    """Give the members of an exception group, themselves perhaps groups."""
    return group.exceptions


# ---- reading errors ---------------------------------------------------------------------------

_RETRYABLE_CLIENT_ERRORS = frozenset({408, 429})

# What gRPC's codes mean for a repetition: these say that the call itself was at fault (or was
# cancelled), the others that the service was.
_PERMANENT_GRPC_CODES = frozenset(
    {
        "ALREADY_EXISTS",
        "CANCELLED",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
)


#: What errors of HTTP and gRPC clients are read by.
_CLUES = frozenset({"code", "headers", "response", "status", "status_code"})

#: Types of errors, and whether it takes attributes of an instance's own to make one say something.
_plain_types: dict[type[BaseException], bool] = {}
_PLAIN_TYPES_LIMIT = 1024
_PLAIN_ACCESS = (BaseException.__getattribute__, object.__getattribute__)


def _look_at(kind: type[BaseException]) -> bool:
    plain = (
        kind.__getattribute__ in _PLAIN_ACCESS
        and not hasattr(kind, "__getattr__")
        and not any(hasattr(kind, clue) for clue in _CLUES)
        and not issubclass(kind, ExecutionRejectedError | MisuseError | ResumeError)
        and not is_future_cancellation(kind)
    )
    if len(_plain_types) >= _PLAIN_TYPES_LIMIT:
        _plain_types.clear()
    _plain_types[kind] = plain
    return plain


#: Of a type that has been looked at, whether it has nothing to read.
is_plain = _plain_types.get


def says_nothing(error: BaseException) -> bool:
    """Whether there is nothing to be read off an error but that it happened.

    So it is with most, and to find ten attributes missing costs as much as six bare calls. What the
    type has is therefore looked at once; attributes of the error's own count always.
    """
    plain = is_plain(type(error))
    if plain is None:
        plain = _look_at(type(error))
    own = error.__dict__
    return plain and (not own or own.keys().isdisjoint(_CLUES))


def is_permanent(error: Exception) -> bool:
    """Whether a repetition cannot help: a 4xx other than 408 and 429, say, or a cancelled future."""
    if says_nothing(error):
        return False
    if isinstance(error, MisuseError | ResumeError) or is_future_cancellation(type(error)):
        return True
    status = http_status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _RETRYABLE_CLIENT_ERRORS
    return _grpc_code(error) in _PERMANENT_GRPC_CODES


def is_refusal(error: Exception) -> bool:
    """Whether one of this library's strategies said no before the service was asked."""
    return isinstance(error, ExecutionRejectedError) and not isinstance(error, TimeoutRejectedError)


def is_future_cancellation(kind: type[BaseException]) -> bool:
    """Whether it is how the cancellation of another's future shows."""
    # Only a program that uses concurrent.futures can have its CancelledError.
    futures = sys.modules.get("concurrent.futures")
    return futures is not None and issubclass(kind, futures.CancelledError)


def _peek(subject: object, name: str) -> Any:
    """Read an attribute of somebody else's object; one that raises counts as missing."""
    try:
        return getattr(subject, name, None)
    except Exception:  # noqa: BLE001 - a property of a foreign class may raise anything
        return None


def http_status(error: Exception) -> int | None:
    """Read the HTTP status off an exception, whichever client raised it."""
    for name in ("status", "status_code", "code"):
        if (status := _as_status(_peek(error, name))) is not None:
            return status
    response = _peek(error, "response")
    if response is None:
        return None
    if isinstance(response, Mapping):
        return _as_status(_botocore_metadata(response, "HTTPStatusCode"))
    for name in ("status", "status_code"):
        if (status := _as_status(_peek(response, name))) is not None:
            return status
    return None


def _as_status(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 100 <= value <= 599
    return int(value) if good else None


def _botocore_metadata(response: Any, key: str) -> Any:
    metadata: Any = response.get("ResponseMetadata")
    return cast(Any, metadata).get(key) if isinstance(metadata, Mapping) else None


def _grpc_code(error: Exception) -> str | None:
    """Name of a gRPC status code: gRPC's errors have a method `code()` that gives an enum."""
    code = _peek(error, "code")
    if not callable(code):
        return None
    try:
        return str(_peek(code(), "name"))
    except Exception:  # noqa: BLE001 - some other library's `code`
        return None


# ---- Retry-After ------------------------------------------------------------------------------


def demanded_wait(subject: object) -> float | None:
    """Seconds that the other side asks to wait, or `None`.

    Read from a rejection's `retry_after`, else from a `Retry-After` header (RFC 9110, 10.2.3) of an
    HTTP error or of a response that is handled as a result.
    """
    if isinstance(subject, ExecutionRejectedError):
        return subject.retry_after
    if isinstance(subject, BaseException) and says_nothing(subject):
        return None
    header = _retry_after_header(subject)
    return None if header is None else parse_retry_after(header, wall_time=time.time())


def _retry_after_header(subject: object) -> str | None:
    response = _peek(subject, "response")
    places = [_peek(subject, "headers")]
    if isinstance(response, Mapping):
        places.append(_botocore_metadata(response, "HTTPHeaders"))
    elif response is not None:
        places.append(_peek(response, "headers"))
    for headers in places:
        if (value := _header(headers, "retry-after")) is not None:
            return value
    return None


def _header(headers: Any, name: str) -> str | None:
    """Look a header up in any kind of mapping, whatever the case of its names."""
    items = _peek(headers, "items")
    if not callable(items):
        return None
    try:
        pairs: Any = items()
        for key, value in pairs:
            if isinstance(key, str) and isinstance(value, str) and key.lower() == name:
                return value
    except Exception:  # noqa: BLE001 - a foreign mapping may raise anything
        return None
    return None


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday)"
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
_TIME = r"(?P<hour>\d{2}):(?P<minute>\d{2}):(?P<second>\d{2})"
# The three forms of an HTTP date: RFC 9110, 5.6.7. `re` compiles them when they are first needed.
_DATE_FORMS = (
    rf"{_DAY}, (?P<day>\d{{2}}) {_MONTH} (?P<year>\d{{4}}) {_TIME} GMT",
    rf"{_LONG_DAY}, (?P<day>\d{{2}})-{_MONTH}-(?P<year>\d{{2}}) {_TIME} GMT",
    rf"{_DAY} {_MONTH} (?P<day>[ \d]\d) {_TIME} (?P<year>\d{{4}})",
)


def parse_retry_after(header: str, *, wall_time: float) -> float | None:
    """Read a `Retry-After` header: seconds to wait, 0 for a date in the past.

    Args:
        header: The header's value.
        wall_time: The time now, in seconds since the epoch, UTC.

    Returns:
        Seconds, never negative; `None` if the value is neither a number of seconds nor an HTTP
        date by the letter of RFC 9110.
    """
    value = header.strip(" \t")
    if re.fullmatch(r"[0-9]+", value):
        # More than a float can hold is infinity: for ever. int() refuses to read thousands of
        # digits.
        return float(value)
    for form in _DATE_FORMS:
        if (match := re.fullmatch(form, value, re.ASCII)) is not None:
            moment = _moment(match, wall_time)
            return None if moment is None else max(0.0, moment - wall_time)
    return None


def _moment(match: re.Match[str], wall_time: float) -> float | None:
    """Seconds since the epoch of a matched date; `None` if the calendar has no such day."""
    part = match.groupdict()
    year, month, day = int(part["year"]), _MONTHS.index(part["month"]) + 1, int(part["day"])
    hour, minute, second = int(part["hour"]), int(part["minute"]), int(part["second"])
    if len(part["year"]) == 2:
        # Two digits that seem to lie more than 50 years ahead mean the past (RFC 9110, 5.6.7).
        this_year = time.gmtime(wall_time).tm_year
        year += this_year - this_year % 100
        if year > this_year + 50:
            year -= 100
        elif year <= this_year - 50:
            year += 100
    if second > 60:
        return None
    from datetime import UTC, datetime  # for those who are sent dates; see `_durations`

    try:
        moment = datetime(year, month, day, hour, minute, tzinfo=UTC)
    except ValueError:
        return None
    # Added, because the grammar knows leap seconds and `datetime` does not.
    return moment.timestamp() + second
