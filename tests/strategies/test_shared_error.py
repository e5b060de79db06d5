"""Errors that several callers get: copies that are like the original in all but the traceback."""

from __future__ import annotations

import json
from typing import Any, Self

import httpx
import pytest

from resilience_pipeline import BrokenCircuitError, ConcurrencyLimiterRejectedError
from resilience_pipeline.strategies._shared_error import SharedError, copied
from support.portable import HostError, SlowHostError


class StatusError(Exception):
    """Makes its own message, and has fields."""

    def __init__(self, status: int, *, url: str) -> None:
        super().__init__(f"{status} from {url}")
        self.status = status
        self.url = url


class SlottedError(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code


class OwnOSError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "gone", path)
        self.path = path


class StubbornError(Exception):
    """Can't be made anew by anybody but itself."""

    def __new__(cls, secret: object = None) -> Self:
        if secret is not _secret:
            raise TypeError
        return super().__new__(cls, "stubborn")

    def __init__(self, secret: object = None) -> None:
        super().__init__("stubborn")

    def __copy__(self) -> Self:
        raise TypeError


_secret = object()


def _caught(call: Any) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError


ERRORS: list[BaseException] = [
    Exception(),
    ConnectionError("down"),
    ConnectionRefusedError(111, "refused"),
    FileNotFoundError(2, "no such file", "name"),
    KeyError("k"),
    StatusError(503, url="/x"),
    SlottedError(3),
    OwnOSError("/tmp/x"),
    _caught(lambda: b"\xff".decode("ascii")),
    _caught(lambda: json.loads("{")),
    _caught(lambda: object().nothing),  # type: ignore[attr-defined]
    _caught(lambda: __import__("no_such_module")),
    SystemExit(3),
    StopIteration(5),
    ExceptionGroup("group", [ValueError(1), KeyError("k")]),
    HostError("host", 80, retry_after=3.0),
    SlowHostError("host", timeout=5.0),
    ConcurrencyLimiterRejectedError("full", pipeline_name="p", retry_after=1.0),
    httpx.HTTPStatusError(
        "bad", request=httpx.Request("GET", "http://x"), response=httpx.Response(500)
    ),
    TimeoutError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_is_like_its_original(error: BaseException) -> None:
    """Class, arguments, message, attributes, notes, cause and context are the same."""
    error.__cause__ = ValueError("cause")
    error.__dict__.pop("__notes__", None)
    error.add_note("a note")
    copy = copied(error)
    assert copy is not error
    assert type(copy) is type(error)
    assert (copy.args, str(copy), repr(copy)) == (error.args, str(error), repr(error))
    assert vars(copy) == vars(error)
    for name in (
        "errno",
        "filename",
        "code",
        "value",
        "name",
        "obj",
        "start",
        "reason",
        "msg",
        "doc",
    ):
        assert getattr(copy, name, None) == getattr(error, name, None)
    assert copy.__cause__ is error.__cause__
    assert copy.__suppress_context__
    assert copy.__traceback__ is None
    copy.add_note("another one")
    assert error.__notes__ == ["a note"]


def test_what_cant_be_copied_is_given_itself() -> None:
    """Better one error for all than an error of another class."""
    error = StubbornError(_secret)
    assert copied(error) is error


def test_the_first_to_take_it_gets_the_error_itself() -> None:
    """A single caller sees no difference; each one begins with the same traceback."""

    def fail() -> None:
        raise ConnectionError("down")

    error = _caught(fail)
    traceback = error.__traceback__
    shared = SharedError(error, object())
    first, second = shared.take(None), shared.take(None)
    assert first is error
    assert second is not error
    assert first.__traceback__ is second.__traceback__ is traceback


def test_a_rejection_of_the_execution_becomes_each_takers_own() -> None:
    """And one of another execution's stays that."""
    mark, mine = object(), object()
    error = BrokenCircuitError("open")
    error._execution = mark
    taken = [SharedError(error, mark).take(mine)]
    stored = SharedError(error, mine).to_store()
    taken += [stored.take(mine), stored.take(mine)]
    assert all(getattr(each, "_execution", None) is mine for each in taken)
    other = BrokenCircuitError("theirs")
    other._execution = mark
    assert SharedError(other, object()).take(mine)._execution is mark  # type: ignore[attr-defined]


def test_what_is_stored_has_no_tracebacks() -> None:
    """Those of its causes neither; circles among them do no harm."""

    def fail() -> None:
        try:
            raise LookupError("cause")
        except LookupError as cause:
            raise ConnectionError("down") from cause

    error = _caught(fail)
    cause = error.__cause__
    assert cause is not None
    cause.__context__ = error
    stored = SharedError(error, None).to_store()
    taken = stored.take(None)
    assert taken.__traceback__ is None
    assert isinstance(taken.__cause__, LookupError)
    assert taken.__cause__.__traceback__ is None
    assert cause.__traceback__ is not None
    assert stored.take(None) is not taken
