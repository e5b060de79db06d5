"""Record and replay of calls: what is kept in which file, what comes out again, and what is never lost."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    Failure,
    MisuseError,
    OptionsError,
    RecordingNotFoundError,
    RecordReplay,
    RecordReplayKeyEvent,
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline.strategies import _recordings
from resilience_pipeline.testing import VirtualClock
from support.inside import Room
from support.scripted import Closable, Hanging, Scripted, raised_by, spawn, tick

B = ResiliencePipelineBuilder

MODES = ["replay", "record", "incremental"]


class ServiceError(Exception):
    """A class of the user's, with an attribute."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def keyed(event: RecordReplayKeyEvent) -> Any:
    """A key that is the arguments alone, so that helpers of one class are not mistaken."""
    return list(event.args)


class Directory:
    """A directory for recordings, and pipelines on it."""

    def __init__(self, path: Path) -> None:
        self.path = path / "recordings"

    def pipeline(self, mode: Any = "incremental", **options: Any) -> ResiliencePipeline[Any]:
        return B(name="svc").add_record_replay(self.path, mode=mode, **options).build()

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.iterdir()) if self.path.exists() else []

    @property
    def contents(self) -> list[Any]:
        return [json.loads(file.read_text("utf-8")) for file in self.files]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


async def double(number: int) -> int:
    return 2 * number


async def never(*_: object) -> Any:
    raise AssertionError("called")


# --- replay ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_miss_names_key_and_directory_and_calls_and_writes_nothing(
    directory: Directory,
) -> None:
    """RR-1: `RecordingNotFoundError`, a `LookupError`; the function is not called, nothing written."""
    error: Any = await raised_by(directory.pipeline("replay", key=keyed).execute, never, 1, "a")
    assert isinstance(error, RecordingNotFoundError)
    assert isinstance(error, LookupError)
    assert (error.key, error.directory) == ([1, "a"], directory.path)
    assert "pipeline 'svc', strategy 'RecordReplay'" in str(error)
    assert "[1, 'a']" in str(error)
    assert str(directory.path) in str(error)
    assert not directory.path.exists()
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(twin), twin.key, twin.directory) == (type(error), error.key, error.directory)


@pytest.mark.anyio
async def test_a_miss_is_a_failure_and_no_rejection(directory: Directory) -> None:
    """It is no refusal by a strategy: `settle` shows a `Failure`."""
    outcome = await directory.pipeline("replay").settle(double, 1)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, RecordingNotFoundError)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["record", "incremental"])
async def test_recorded_by_one_pipeline_replayed_by_another(
    directory: Directory, mode: str
) -> None:
    """RR-2: one file a call; the next pipeline gives its value without a call."""
    recording = directory.pipeline(mode, key=keyed)
    assert [await recording.execute(double, n) for n in (1, 2)] == [2, 4]
    assert len(directory.files) == 2
    replaying = directory.pipeline("replay", key=keyed)
    assert [await replaying.execute(never, n) for n in (1, 2)] == [2, 4]


@pytest.mark.anyio
@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        0,
        -0.0,
        1.5,
        10**40,
        "",
        "Grüße 🚀\n",
        [],
        {},
        {"b": [1, {"a": None}], "a": "first"},
    ],
    ids=repr,
)
async def test_json_values_come_back_equal_and_of_their_types(
    directory: Directory, value: Any
) -> None:
    """What JSON holds faithfully is recorded as it is; falsy values and `None` are values."""
    assert await directory.pipeline(key=keyed).execute(Scripted(value)) is value
    replayed = await directory.pipeline("replay", key=keyed).execute(never)
    assert repr(replayed) == repr(value)


@pytest.mark.anyio
async def test_each_replay_gives_a_value_of_its_own(directory: Directory) -> None:
    """What one caller does to it is not seen by the next."""
    await directory.pipeline(key=keyed).execute(Scripted([1]))
    pipeline = directory.pipeline("replay", key=keyed)
    (await pipeline.execute(never)).append(2)
    assert await pipeline.execute(never) == [1]


# --- incremental and record --------------------------------------------------------------------


@pytest.mark.anyio
async def test_incremental_calls_once_for_each_key(directory: Directory) -> None:
    """RR-3: one call and one file for each key, over several pipelines."""
    calls = Scripted("value")
    for _ in range(3):
        pipeline = directory.pipeline(key=keyed)
        for number in (1, 2):
            assert await pipeline.execute(calls, number) == "value"
    assert calls.calls == 2
    assert len(directory.files) == 2


@pytest.mark.anyio
async def test_record_always_calls_and_keeps_the_latest(directory: Directory) -> None:
    """1.3: every call is made and written, in place of what was there."""
    pipeline, calls = directory.pipeline("record", key=keyed), Scripted(1, 2)
    assert [await pipeline.execute(calls) for _ in range(2)] == [1, 2]
    assert [each["value"] for each in directory.contents] == [2]


@pytest.mark.anyio
async def test_record_starts_a_fresh_directory_at_the_first_call(directory: Directory) -> None:
    """RR-4: old keys gone, new values only; building it, and calls after the first, remove nothing."""
    old = directory.pipeline(key=keyed)
    for number in (1, 2):
        await old.execute(Scripted("old"), number)
    pipeline = directory.pipeline("record", key=keyed)
    assert len(directory.files) == 2
    await pipeline.execute(Scripted("new"), 2)
    await pipeline.execute(Scripted("new"), 3)
    found = sorted((each["key"], each["value"]) for each in directory.contents)
    assert found == [([2], "new"), ([3], "new")]


@pytest.mark.anyio
async def test_record_removes_nothing_that_is_not_ours(directory: Directory) -> None:
    """Files and directories of other names stay; what a crash left of a recording goes."""
    await directory.pipeline(key=keyed).execute(Scripted("old"))
    (recording,) = directory.files
    left = recording.with_name(f"{recording.name}.123-4.tmp")
    left.write_text("half a reco")
    others = ["notes.md", "data.json", "a.0123.json", ".gitignore"]
    for name in others:
        (directory.path / name).write_text("mine")
    (directory.path / "sub").mkdir()
    await directory.pipeline("record", key=keyed).execute(Scripted("new"), 1)
    names = {file.name for file in directory.files}
    assert names >= {*others, "sub"}
    assert not {recording.name, left.name} & names
    assert len(names) == len(others) + 2


@pytest.mark.anyio
async def test_a_first_call_that_fails_has_started_afresh_all_the_same(
    directory: Directory,
) -> None:
    """What was recorded before belongs to another run."""
    await directory.pipeline(key=keyed).execute(Scripted("old"))
    await raised_by(directory.pipeline("record", key=keyed).execute, Scripted(OSError("no")))
    assert directory.files == []


# --- files -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_file_is_readable_named_for_its_call_and_holds_its_key(
    directory: Directory,
) -> None:
    """RR-6, as the contract has it: one readable JSON file a call, named for it and holding its key; no shards."""
    await directory.pipeline().execute(partial(double), 21, operation_key="Get Order")
    (file,) = directory.files
    assert file.name.startswith("get-order-double.")
    text = file.read_text("utf-8")
    assert json.loads(text) == {
        "key": {
            "function": f"{double.__module__}:double",
            "args": [21],
            "operation_key": "Get Order",
        },
        "value": 42,
    }
    assert text == json.dumps(json.loads(text), indent=2) + "\n"


@pytest.mark.anyio
async def test_text_is_written_as_people_write_it(directory: Directory) -> None:
    """Readable in every language, and in UTF-8 whatever the platform prefers."""
    await directory.pipeline(key=lambda _: "schlüssel").execute(Scripted("Grüße"))
    (file,) = directory.files
    assert "Grüße" in file.read_bytes().decode()


@pytest.mark.anyio
async def test_a_file_that_holds_another_key_is_a_miss(directory: Directory) -> None:
    """RR-7: a stored key that is not what the name says must not replay wrong data."""
    await directory.pipeline(key=keyed).execute(double, 1)
    (file,) = directory.files
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "key": [1.0]}))
    error = await raised_by(directory.pipeline("replay", key=keyed).execute, never, 1)
    assert isinstance(error, RecordingNotFoundError)
    assert await directory.pipeline(key=keyed).execute(Scripted("again"), 1) == "again"
    assert [(each["key"], each["value"]) for each in directory.contents] == [([1], "again")]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["replay", "incremental"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is no JSON"),
        ('{"key": [1], "val', "it is no JSON"),
        ('{"key": [1], "value": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[1]", 'it is no object with a "key"'),
        ('{"key": 1e999, "value": 1}', "its key can't be read"),
        ('{"value": 1}', 'it is no object with a "key"'),
        ('{"key": [1]}', 'it has to have either a "value" or an "error"'),
        ('{"key": [1], "value": 1, "error": {}}', 'it has to have either a "value" or an "error"'),
        ('{"key": [1], "error": "boom"}', '"error" is no object'),
        ('{"key": [1], "error": {"type": "a:b"}}', "no description of an error"),
        (
            '{"key": [1], "error": {"type": "no.such:Error", "args": [], "attributes": {}}}',
            "the exception class no.such:Error can't be found",
        ),
    ],
)
async def test_a_broken_file_is_an_error_that_names_it(
    directory: Directory, mode: str, text: str, problem: str
) -> None:
    """RR-7: not a miss, and not repeated, replaced or called around: whoever edits it is told."""
    await directory.pipeline(key=keyed).execute(double, 1)
    (file,) = directory.files
    file.write_text(text)
    pipeline = (
        B()
        .add_retry(delay=0)
        .add_fallback(fallback_value=0)
        .add_record_replay(directory.path, mode=mode, key=keyed)  # type: ignore[arg-type]
        .build()
    )
    error = await raised_by(pipeline.execute, never, 1)
    assert isinstance(error, OptionsError)
    assert str(file) in str(error)
    assert problem in str(error)
    assert file.read_text() == text


@pytest.mark.anyio
async def test_a_file_that_cannot_be_read_is_an_error(directory: Directory) -> None:
    """Only what is not there is a miss."""
    await directory.pipeline(key=keyed).execute(double, 1)
    (file,) = directory.files
    file.unlink()
    file.mkdir()
    error = await raised_by(directory.pipeline(key=keyed).execute, never, 1)
    assert isinstance(error, OptionsError)
    assert "it can't be read" in str(error)


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["record", "incremental"])
async def test_a_failed_write_warns_and_the_result_comes_out(
    directory: Directory, mode: str
) -> None:
    """1.10, 8: an I/O failure never takes a good result away, and leaves nothing half written."""
    directory.path.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match="nothing was recorded for the key"):
        assert await directory.pipeline(mode, key=keyed).execute(double, 21) == 42


@pytest.mark.anyio
async def test_a_write_that_breaks_off_leaves_what_was_there(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole or not at all: the old recording is in its place, and nothing lies beside it."""
    pipeline = directory.pipeline("record", key=keyed)
    await pipeline.execute(Scripted("old"))

    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="no space left"):
        assert await pipeline.execute(Scripted("new")) == "new"
    assert [each["value"] for each in directory.contents] == ["old"]


@pytest.mark.anyio
async def test_a_directory_that_cannot_be_cleared_warns(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.10, 8: at the call and not at an unobserved moment; it is tried again at the next."""
    await directory.pipeline(key=keyed).execute(Scripted("old"), 1)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "not yours")

    pipeline = directory.pipeline("record", key=keyed)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        with pytest.warns(RuntimeWarning, match="could not be removed"):
            assert await pipeline.execute(double, 2) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await pipeline.execute(double, 3)
    assert [each["key"] for each in directory.contents] == [[3]]


# --- keys --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_calls_differ_by_function_arguments_and_operation_key(directory: Directory) -> None:
    """The default key: the label, the function's name and its arguments, by value and type."""

    async def other(*args: Any, **kwargs: Any) -> str:
        return repr((args, kwargs))

    pipeline = directory.pipeline()
    calls: list[Callable[[], Any]] = [
        partial(pipeline.execute, other),
        partial(pipeline.execute, other, None),
        partial(pipeline.execute, other, 1),
        partial(pipeline.execute, other, True),
        partial(pipeline.execute, other, 1.0),
        partial(pipeline.execute, other, "1"),
        partial(pipeline.execute, other, [1]),
        partial(pipeline.execute, other, 1, 2),
        partial(pipeline.execute, other, 2, 1),
        partial(pipeline.execute, partial(other, number=1)),
        partial(pipeline.execute, other, 1, operation_key="op"),
        partial(pipeline.execute, double, 1),
    ]
    for call in calls:
        await call()
    assert len(directory.files) == len(calls)


@pytest.mark.anyio
async def test_equal_mappings_are_one_key_whatever_their_order(directory: Directory) -> None:
    """1.10, 9: `{a, b}` is `{b, a}`."""
    pipeline, calls = directory.pipeline(), Scripted(1)
    await pipeline.execute(calls, {"a": 1, "b": [{"c": 1, "d": 2}]})
    await pipeline.execute(calls, {"b": [{"d": 2, "c": 1}], "a": 1})
    assert calls.calls == 1


@pytest.mark.anyio
async def test_partials_are_the_calls_that_they_make(directory: Directory) -> None:
    """`partial(fn, 1)` and `fn, 1` are equal calls, nested or not."""
    pipeline, calls = directory.pipeline(), Scripted(1)
    await pipeline.execute(calls, 1, 2)
    await pipeline.execute(partial(calls, 1), 2)
    await pipeline.execute(partial(partial(calls, 1), 2))
    assert calls.calls == 1


@pytest.mark.anyio
async def test_a_lambda_is_known_by_its_code_and_what_it_captures(directory: Directory) -> None:
    """Keyword arguments are passed by lambdas, so those are told apart by what they pass."""
    pipeline, calls = directory.pipeline(), Scripted("value")

    def making(argument: Any) -> Callable[[], Any]:
        return lambda: calls(argument)

    for argument in (1, 2, 1, "a", [1]):
        await pipeline.execute(making(argument))
    assert calls.arguments == [(1,), (2,), ("a",), ([1],)]
    await pipeline.execute(lambda: calls(1, 2))
    await pipeline.execute(lambda: calls(1, 3))
    assert calls.calls == 6
    with pytest.raises(MisuseError, match="give key="):
        await pipeline.execute(making(object()))


@pytest.mark.anyio
@pytest.mark.parametrize("argument", [object(), (1,), {1: 2}, math.nan, b"a", "\ud800"], ids=repr)
async def test_arguments_that_json_cannot_hold_are_a_misuse_that_names_the_option(
    directory: Directory, argument: Any
) -> None:
    """A key that is not faithful would replay the wrong data; nothing is called."""
    error = await raised_by(directory.pipeline().execute, never, 1, argument)
    assert isinstance(error, MisuseError)
    assert "args[1]" in str(error)
    assert str(error).endswith("give key=")


@pytest.mark.anyio
async def test_key_gets_context_function_and_arguments(directory: Directory) -> None:
    """Contract: one event, with context, fn and args; plain or a coroutine function."""
    seen: list[RecordReplayKeyEvent] = []

    async def key(event: RecordReplayKeyEvent) -> Any:
        seen.append(event)
        return {"for": event.context.operation_key}

    pipeline = directory.pipeline(key=key)
    await pipeline.execute(double, 21, operation_key="op")
    assert (seen[0].fn, seen[0].args) == (double, (21,))
    assert directory.contents == [{"key": {"for": "op"}, "value": 42}]
    assert await pipeline.execute(never, operation_key="op") == 42


@pytest.mark.anyio
@pytest.mark.parametrize("key", [object(), (1,), math.inf, {1: 1}], ids=repr)
async def test_a_key_that_json_cannot_hold_is_refused(directory: Directory, key: Any) -> None:
    """Contract: `key` gives a JSON value."""
    error = await raised_by(directory.pipeline(key=lambda _: key).execute, never)
    assert isinstance(error, OptionsError)
    assert "what key= gave" in str(error)
    assert directory.files == []


@pytest.mark.anyio
async def test_an_error_of_the_key_function_comes_out(directory: Directory) -> None:
    """An exception of a function of the user's surfaces; nothing is called or kept."""

    def key(_: RecordReplayKeyEvent) -> Any:
        raise LookupError("no key")

    with pytest.raises(LookupError, match="no key"):
        await directory.pipeline(key=key).execute(never)
    assert directory.files == []


# --- values ------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["record", "incremental"])
async def test_a_value_that_json_cannot_hold_is_refused_and_made_known(
    directory: Directory, mode: str
) -> None:
    """Contract: `OptionsError` at the call, the value in its message; no file, and no second call."""
    calls = Scripted({"when": (1, 2)})
    pipeline = (
        B()
        .add_retry(delay=0)
        .add_record_replay(directory.path, mode=mode)  # type: ignore[arg-type]
        .build()
    )
    error = await raised_by(pipeline.execute, calls)
    assert isinstance(error, OptionsError)
    assert "value['when'] is of type tuple" in str(error)
    assert "{'when': (1, 2)}" in str(error)
    assert "give encode= and decode=" in str(error)
    assert (calls.calls, directory.files) == (1, [])


@pytest.mark.anyio
async def test_a_refused_value_is_closed(directory: Directory) -> None:
    """Rule 4: a value that nobody will receive is closed."""
    closable = Closable()
    await raised_by(directory.pipeline().execute, Scripted(closable))
    assert closable.closed == 1


@pytest.mark.anyio
async def test_encode_and_decode_take_over(directory: Directory) -> None:
    """Contract: `encode(value) -> JSON value`, `decode(JSON value) -> value`."""
    options: dict[str, Any] = {"encode": sorted, "decode": set}
    assert await directory.pipeline(**options).execute(Scripted({2, 1})) == {1, 2}
    assert [each["value"] for each in directory.contents] == [[1, 2]]
    assert await directory.pipeline("replay", **options).execute(Scripted(0)) == {1, 2}


@pytest.mark.anyio
async def test_what_encode_gives_is_held_to_the_same(directory: Directory) -> None:
    """And the message says whose doing it is; a coroutine function is refused."""
    error = await raised_by(directory.pipeline(encode=tuple).execute, Scripted([1]))
    assert isinstance(error, OptionsError)
    assert "it is what encode= gave" in str(error)
    assert str(error).endswith("the value is [1]")
    error = await raised_by(directory.pipeline(encode=Scripted(1)).execute, Scripted([1]))
    assert isinstance(error, OptionsError)
    assert "encode= must be a plain function" in str(error)


@pytest.mark.anyio
async def test_errors_of_encode_and_decode_come_out(directory: Directory) -> None:
    """An exception of a function of the user's surfaces."""

    def refuse(_: object) -> Any:
        raise LookupError("no such thing")

    with pytest.raises(LookupError):
        await directory.pipeline(encode=refuse).execute(double, 1)
    assert directory.files == []
    await directory.pipeline().execute(double, 1)
    with pytest.raises(LookupError):
        await directory.pipeline("replay", decode=refuse).execute(double, 1)


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["record", "incremental"])
async def test_errors_are_not_recorded_by_default(directory: Directory, mode: str) -> None:
    """RR-5: only by flag; the next call is made."""
    pipeline, calls = directory.pipeline(mode), Scripted(ServiceError(503), 1)
    assert isinstance(await raised_by(pipeline.execute, calls), ServiceError)
    assert directory.files == []
    assert await pipeline.execute(calls) == 1


@pytest.mark.anyio
async def test_recorded_errors_come_back_as_their_class(directory: Directory) -> None:
    """1.10, 8: class, arguments and attributes, a new object each time, without a call."""
    calls = Scripted(ServiceError(503))
    pipeline = directory.pipeline(record_errors=True)
    first: Any = await raised_by(pipeline.execute, calls)
    assert set(directory.contents[0]) == {"key", "error"}
    again = [await raised_by(directory.pipeline("replay").execute, calls) for _ in range(2)]
    for error in again:
        assert type(error) is ServiceError
        assert (error.args, error.status) == (first.args, 503)
    assert again[0] is not again[1]
    assert calls.calls == 1


@pytest.mark.anyio
async def test_an_error_that_is_there_is_replayed_whatever_the_flag(directory: Directory) -> None:
    """`record_errors` is about recording."""
    calls = Scripted(ServiceError(503), 1)
    await raised_by(directory.pipeline(record_errors=True).execute, calls)
    assert isinstance(await raised_by(directory.pipeline().execute, calls), ServiceError)


@pytest.mark.anyio
async def test_an_error_that_could_not_come_back_warns_and_comes_out(directory: Directory) -> None:
    """The error is the news; a recording that could not be replayed is not made."""
    with pytest.warns(RuntimeWarning, match="was not recorded"):
        error = await raised_by(
            directory.pipeline(record_errors=True).execute, Scripted(ValueError(object()))
        )
    assert isinstance(error, ValueError)
    assert directory.files == []


@pytest.mark.anyio
async def test_an_error_whose_repr_raises_comes_out_all_the_same(directory: Directory) -> None:
    """Whatever the user's classes do, the error is the news."""

    class SilentError(Exception):
        def __repr__(self) -> str:
            raise LookupError("no words")

    error = SilentError(object())
    with pytest.warns(RuntimeWarning, match="was not recorded"):
        raised = await raised_by(directory.pipeline(record_errors=True).execute, Scripted(error))
    assert raised is error


@pytest.mark.anyio
@pytest.mark.parametrize("error", [MisuseError("no"), CancelledError()], ids=repr)
async def test_misuse_and_cancelled_futures_are_never_recorded(
    directory: Directory, error: Exception
) -> None:
    """A mistake in the program says nothing about the service, and a cancellation neither."""
    pipeline = directory.pipeline(record_errors=True)
    assert await raised_by(pipeline.execute, Scripted(error)) is error
    assert directory.files == []


@pytest.mark.anyio
async def test_a_cancelled_call_is_never_recorded(directory: Directory) -> None:
    """Contract: cancellations are never recorded, with the flag or without."""
    pipeline = directory.pipeline(record_errors=True, key=keyed)
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert directory.files == []
    assert await pipeline.execute(Scripted(1)) == 1


@pytest.mark.anyio
async def test_what_is_no_exception_is_never_recorded(directory: Directory) -> None:
    """`KeyboardInterrupt` and its like pass."""

    class Stop(BaseException):
        pass

    async def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        await directory.pipeline(record_errors=True).execute(stop)
    assert directory.files == []


@pytest.mark.anyio
async def test_refusals_inside_are_errors_like_others(directory: Directory) -> None:
    """A rejection comes back whole; it is no refusal of the pipeline that replays it."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(name="svc", clock=clock)
        .add_record_replay(directory.path, mode="incremental", record_errors=True, key=keyed)
        .add_timeout(5)
        .build()
    )

    async def slow() -> None:
        await clock.sleep(10)

    first = await pipeline.settle(slow)
    assert isinstance(first, Rejected)
    again = await pipeline.settle(never)
    assert isinstance(again, Failure)
    assert isinstance(again.error, TimeoutRejectedError)
    assert (again.error.timeout, again.error.pipeline_name) == (5.0, "svc")


# --- equal calls at once -----------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["record", "incremental"])
async def test_equal_misses_at_once_make_one_call_and_one_file(
    directory: Directory, mode: str
) -> None:
    """RR-8, as the contract has it: concurrent equal misses record once; others go on beside them."""
    pipeline, room = directory.pipeline(mode, key=keyed), Room()
    async with anyio.create_task_group() as tasks:
        equal = [spawn(tasks, pipeline.execute, room, "a") for _ in range(5)]
        other = spawn(tasks, pipeline.execute, room, "b")
        await tick()
        assert sorted(room.names) == ["a", "b"]
        room.let_all_out()
        await tick()
        assert [each.value for each in equal] == ["a"] * 5
        assert other.value == "b"
    assert len(directory.files) == 2


@pytest.mark.anyio
async def test_those_who_waited_get_values_of_their_own(directory: Directory) -> None:
    """What one of them does to the result is not seen by the others."""
    value: list[int] = []
    opened = anyio.Event()

    async def fn() -> list[int]:
        await opened.wait()
        return value

    pipeline = directory.pipeline()
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.execute, fn) for _ in range(3)]
        await tick()
        opened.set()
    results = [call.value for call in calls]
    assert results == [[]] * 3
    assert len({id(result) for result in results}) == 3
    assert sum(result is value for result in results) == 1


@pytest.mark.anyio
async def test_a_failed_call_fails_for_all_who_waited(directory: Directory) -> None:
    """One call, whatever comes of it: each gets an error of its own, nothing is kept."""
    room = Room()
    pipeline = directory.pipeline(key=keyed)
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, room, "a") for _ in range(3)]
        await tick()
        room.let_out("a", ServiceError(503))
        await tick()
        errors: list[Any] = [call.value.error for call in calls]
    assert [(type(error), error.status) for error in errors] == [(ServiceError, 503)] * 3
    assert len({id(error) for error in errors}) == 3
    assert (len(room.entered), directory.files) == (1, [])


@pytest.mark.anyio
async def test_a_recorded_failure_is_given_to_all_who_waited(directory: Directory) -> None:
    """With `record_errors` they get what was recorded."""
    room = Room()
    pipeline = directory.pipeline(key=keyed, record_errors=True)
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, room, "a") for _ in range(3)]
        await tick()
        room.let_out("a", ServiceError(503))
        await tick()
        assert [type(call.value.error) for call in calls] == [ServiceError] * 3
    assert len(directory.files) == 1


@pytest.mark.anyio
async def test_a_refusal_inside_is_a_rejection_for_all_who_waited(directory: Directory) -> None:
    """`settle`: it was this pipeline's own strategy, for each of them."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_record_replay(directory.path, mode="incremental", key=keyed)
        .add_timeout(5)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        calls = [spawn(tasks, pipeline.settle, Hanging()) for _ in range(3)]
        await tick()
        await clock.advance(5)
        await tick()
        assert all(isinstance(call.value, Rejected) for call in calls)


@pytest.mark.anyio
async def test_when_the_one_who_calls_is_cancelled_the_next_takes_over(
    directory: Directory,
) -> None:
    """Its cancel is its own: somebody else makes the call, and the others wait for that."""
    pipeline, room = directory.pipeline(key=keyed), Room()
    async with anyio.create_task_group() as tasks:
        calls = []
        for _ in range(4):
            calls.append(spawn(tasks, pipeline.execute, room, "a"))
            await tick()
        calls[1].cancel()  # who waits leaves, and nothing else happens
        calls[0].cancel()
        await tick()
        assert (room.entered, room.inside) == (["a", "a"], 1)
        room.let_all_out()
        await tick()
        assert [call.value for call in calls[2:]] == ["a", "a"]
    assert len(directory.files) == 1


@pytest.mark.anyio
async def test_an_equal_call_inside_of_itself_does_not_wait_for_itself(
    directory: Directory,
) -> None:
    """A recursion with the same key, in the same task or a child, is simply made."""
    pipeline = directory.pipeline(key=lambda _: "k")
    depth = 0

    async def nested() -> int:
        nonlocal depth
        depth += 1
        if depth == 1:
            return 1 + await pipeline.execute(nested)
        if depth == 2:
            async with anyio.create_task_group() as children:
                child = spawn(children, pipeline.execute, nested)
            return 1 + int(child.value)
        return 0

    with anyio.fail_after(5):
        assert await pipeline.execute(nested) == 2
    assert [each["value"] for each in directory.contents] == [2]


@pytest.mark.anyio
async def test_the_one_who_calls_runs_in_its_own_task_and_context(directory: Directory) -> None:
    """It is no different from a call that is alone."""
    pipeline = directory.pipeline(key=keyed)

    async def fn() -> Any:
        context = current_context()
        return [context.operation_key, context.pipeline_name]

    assert await pipeline.execute(fn, operation_key="op") == ["op", "svc"]


@pytest.mark.asyncio
@pytest.mark.parametrize("turns", range(6))
async def test_who_waits_may_be_cancelled_at_any_moment(directory: Directory, turns: int) -> None:
    """Around the end of the call it waits for, too: nobody else is touched by that."""
    pipeline, room = directory.pipeline(key=keyed), Room()
    calls = []
    for _ in range(3):
        calls.append(asyncio.create_task(pipeline.execute(room, "a")))
        await tick()
    room.let_all_out()
    for _ in range(turns):
        await asyncio.sleep(0)
    calls[1].cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert outcomes[0] == outcomes[2] == "a"
    assert outcomes[1] == "a" or isinstance(outcomes[1], asyncio.CancelledError)
    assert room.entered == ["a"]


# --- order -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_around_a_retry_one_recording_for_all_attempts(directory: Directory) -> None:
    """Outside of the retry the answer is recorded, inside each attempt that has one."""
    outside = (
        B()
        .add_record_replay(directory.path, mode="incremental", record_errors=True)
        .add_retry(delay=0)
        .build()
    )
    flaky = Scripted(ServiceError(503), 1)
    assert await outside.execute(flaky) == 1
    assert await directory.pipeline("replay").execute(flaky) == 1
    assert (flaky.calls, len(directory.files)) == (2, 1)


@pytest.mark.anyio
async def test_inside_a_retry_a_recorded_error_defeats_it(directory: Directory) -> None:
    """CO-1, retry(cache with errors): the same recorded error for every attempt."""
    inside = (
        B()
        .add_retry(delay=0)
        .add_record_replay(directory.path, mode="incremental", record_errors=True)
        .build()
    )
    flaky = Scripted(ServiceError(503), 1)
    assert isinstance(await raised_by(inside.execute, flaky), ServiceError)
    assert flaky.calls == 1


@pytest.mark.anyio
async def test_a_replayed_call_passes_no_limiter(directory: Directory) -> None:
    """Nothing inside is asked: no permit is needed, no circuit."""
    await directory.pipeline(key=keyed).execute(double, 1)
    pipeline = (
        B()
        .add_record_replay(directory.path, mode="incremental", key=keyed)
        .add_concurrency_limiter(1)
        .build()
    )
    room = Room()
    async with anyio.create_task_group() as tasks:
        spawn(tasks, pipeline.execute, room, "a")
        await tick()
        assert isinstance(await pipeline.settle(never, 2), Rejected)
        assert await pipeline.execute(never, 1) == 2
        room.let_all_out()


# --- options -----------------------------------------------------------------------------------


def test_defaults(tmp_path: Path) -> None:
    """Contract: the signature and its defaults; options read back as they were given."""
    strategy = RecordReplay(tmp_path)
    assert strategy.directory == tmp_path
    assert (strategy.mode, strategy.key, strategy.record_errors) == ("replay", None, False)
    assert (strategy.encode, strategy.decode, strategy.name) == (None, None, "RecordReplay")
    assert repr(RecordReplay("recordings", mode="record")) == (
        "RecordReplay('recordings', mode='record')"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("directory", ""),
        ("directory", "  "),
        ("directory", None),
        ("directory", b"recordings"),
        ("directory", "a\0b"),
        ("mode", "rewind"),
        ("mode", None),
        ("key", "id"),
        ("record_errors", 1),
        ("encode", 1),
        ("decode", "json"),
        ("name", 1),
    ],
)
def test_a_bad_option_is_refused_by_name(option: str, value: Any) -> None:
    """VA-1: refused when the strategy is made; the message says what it may be."""
    options: dict[str, Any] = {"directory": "recordings", option: value}
    with pytest.raises(OptionsError, match=f"{option} must be"):
        RecordReplay(**options)


def test_all_bad_options_are_reported_at_once() -> None:
    """Contract: every bad field in one error."""
    bad: Any = {"mode": "x", "key": 1, "record_errors": 2, "encode": 3, "decode": 4}
    with pytest.raises(OptionsError) as caught:
        RecordReplay(1, **bad)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 6


@pytest.mark.parametrize("mode", MODES)
def test_making_and_building_it_touches_no_file(tmp_path: Path, mode: Any) -> None:
    """State is born in `build()`, and files with the first call."""
    (tmp_path / f"a.{'0' * 32}.json").write_text("old")
    B().add_record_replay(tmp_path, mode=mode).build()
    B().add_record_replay(tmp_path / "other", mode=mode).build()
    assert len(list(tmp_path.iterdir())) == 1


def test_json_and_digests_are_imported_with_the_first_pipeline_that_needs_them() -> None:
    """Import cost: who does not record does not pay."""
    code = (
        "import sys, resilience_pipeline as r\n"
        "builder = r.ResiliencePipelineBuilder().add_record_replay('recordings')\n"
        "assert not {'json', 'hashlib'} & set(sys.modules)\n"
        "builder.build()\n"
        "assert {'json', 'hashlib'} <= set(sys.modules)\n"
    )
    root = Path(_recordings.__file__).parents[2]
    assert (
        os.spawnve(
            os.P_WAIT, sys.executable, [sys.executable, "-c", code], {"PYTHONPATH": str(root)}
        )
        == 0
    )


def test_success_is_what_settle_gives(tmp_path: Path) -> None:
    """In a thread, without an event loop, too."""
    pipeline = B().add_record_replay(tmp_path, mode="incremental").build()
    calls: list[int] = []

    def fn(number: int) -> int:
        calls.append(number)
        return number

    assert [pipeline.settle_sync(fn, 1) for _ in range(2)] == [Success(1)] * 2
    assert calls == [1]
