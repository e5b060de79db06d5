"""Errors in recordings: they come back as their class, with what they had, or are not described at all."""

from __future__ import annotations

import json
import pickle
import subprocess
from typing import Any, Self

import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    ConcurrencyLimiterRejectedError,
    ResumeError,
    TimeoutRejectedError,
)
from resilience_pipeline.strategies._recorded_errors import (
    UnknownErrorError,
    copied,
    describe,
    restore,
)


class PlainError(Exception):
    pass


class OwnError(Exception):
    """Its constructor takes what its `args` do not have."""

    def __init__(self, code: int, *, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class HoldingError(Exception):
    """It has something that JSON can't hold."""

    def __init__(self, message: str, response: object) -> None:
        super().__init__(message)
        self.response = response
        self.status = 503


class BrokenError(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(5, "broken", path)


class SilentError(Exception):
    def __str__(self) -> str:
        return self.missing  # type: ignore[attr-defined,no-any-return]


class LoudError(Exception):
    def __new__(cls, *args: object) -> Self:
        if not args:
            raise RuntimeError("made without arguments")
        return super().__new__(cls, *args)

    def __init__(self, *_: object) -> None:
        super().__init__()


class Outer:
    class InnerError(Exception):
        pass


def round_trip(error: Exception) -> Any:
    described = describe(error)
    assert described is not None
    return restore(json.loads(json.dumps(described)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError(),
        ValueError("a", 1, None),
        KeyError("key"),
        PlainError("plain"),
        Outer.InnerError("inner"),
        OwnError(3, detail="no"),
        ConnectionResetError(104, "reset"),
        FileNotFoundError(2, "missing", "file.txt"),
        BrokenError("a.txt"),
        TimeoutError(),
        StopIteration(3),
        json.JSONDecodeError("bad", "doc", 1),
        subprocess.CalledProcessError(1, ["ls"]),
        ConcurrencyLimiterRejectedError("no", pipeline_name="p", strategy_name="s"),
        BrokenCircuitError("open", retry_after=2.5),
        TimeoutRejectedError("late", timeout=5.0, operation_key="op"),
        ResumeError("not the same"),
    ],
    ids=repr,
)
def test_an_error_comes_back_as_its_class_with_all_it_had(error: Exception) -> None:
    """Contract: errors come back as their class; arguments, attributes and text are the same."""
    twin = round_trip(error)
    assert type(twin) is type(error)
    assert (twin.args, str(twin), vars(twin)) == (error.args, str(error), vars(error))
    assert twin.__traceback__ is None


def test_what_is_built_into_python_has_its_state_again() -> None:
    """`errno`, `filename` and `value` are kept elsewhere than in attributes."""
    missing = round_trip(FileNotFoundError(2, "missing", "a.txt", None, "b.txt"))
    assert (missing.errno, missing.filename, missing.filename2) == (2, "a.txt", "b.txt")
    assert round_trip(BrokenError("c.txt")).filename == "c.txt"
    assert round_trip(StopIteration(3)).value == 3


def test_notes_come_back() -> None:
    """They are attributes like others."""
    error = ValueError("a")
    error.add_note("seen at noon")
    assert round_trip(error).__notes__ == ["seen at noon"]


def test_attributes_that_json_cannot_hold_are_left_out_and_named() -> None:
    """What is left is recorded all the same; the file says what is missing."""
    described = describe(HoldingError("no", object()))
    assert described is not None
    assert described["left_out"] == ["response"]
    twin: Any = restore(described)
    assert (type(twin), twin.args, twin.status) == (HoldingError, ("no",), 503)
    assert not hasattr(twin, "response")


@pytest.mark.parametrize(
    "error",
    [
        ValueError(object()),
        ValueError((1, 2)),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError()]),
        LoudError("a"),
    ],
    ids=repr,
)
def test_what_could_not_be_made_again_is_not_described(error: Exception) -> None:
    """It is found out when it is recorded, not when it is replayed."""
    assert describe(error) is None


def test_an_error_without_a_text_is_described_without() -> None:
    """A raising `__str__` is no obstacle."""
    assert type(round_trip(SilentError(1))) is SilentError


def test_a_class_of_a_function_is_found_while_it_lives() -> None:
    """It can be imported from nowhere; among those there are it is known by its name."""

    class LocalError(Exception):
        pass

    assert type(round_trip(LocalError("a"))) is LocalError
    described = describe(LocalError("a"))
    assert described is not None
    described["type"] += "Gone"
    with pytest.raises(UnknownErrorError, match="LocalErrorGone can't be found"):
        restore(described)


@pytest.mark.parametrize(
    "path",
    ["builtins:int", "builtins:KeyboardInterrupt", "nowhere:Error", "builtins:", "", "json:dumps"],
)
def test_only_exceptions_are_made(path: str) -> None:
    """A file can't have anything else made, nor what is no `Exception`."""
    with pytest.raises(UnknownErrorError):
        restore({"type": path, "args": [], "attributes": {}})


@pytest.mark.parametrize(
    "described", [{}, {"type": 1, "args": [], "attributes": {}}, {"type": "a:b", "args": 1}, []]
)
def test_what_is_no_description_is_said_to_be_none(described: Any) -> None:
    """Whoever edits a recording is told."""
    with pytest.raises(UnknownErrorError):
        restore(described)


def test_nothing_of_the_users_runs_but_new() -> None:
    """An `__init__` may open connections, and its signature is not known."""
    twin = round_trip(OwnError(3, detail="no"))
    assert (twin.code, twin.detail) == (3, "no")


def test_a_copy_is_the_same_and_leads_nowhere() -> None:
    """For those who waited for a call that failed: another object each, without a traceback."""
    response = object()
    with pytest.raises(HoldingError) as caught:
        raise HoldingError("no", response) from KeyError("cause")
    twin: Any = copied(caught.value)
    assert (type(twin), twin.args, twin.response) == (HoldingError, ("no",), response)
    assert twin.__traceback__ is None
    assert twin.__cause__ is caught.value.__cause__
    assert copied(LoudError("a")) is None


def test_a_copy_of_a_rejection_is_nobodys_own() -> None:
    """The tie to its execution stays behind, and it pickles."""
    error = TimeoutRejectedError("late", timeout=5.0)
    error._execution = object()
    twin: Any = copied(error)
    assert (twin.timeout, twin._execution) == (5.0, None)
    assert pickle.loads(pickle.dumps(round_trip(error))).timeout == 5.0
