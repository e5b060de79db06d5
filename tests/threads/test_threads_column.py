"""The third column of the tests: how many there are, which can't be, and that it runs what it says."""

from __future__ import annotations

import importlib.util
import inspect
import threading
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from resilience_pipeline import (
    MisuseError,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline.runtime._threads import ThreadRuntime
from resilience_pipeline.testing import VirtualClock
from support.calls import Calls, ok
from support.in_threads import run_in_thread
from support.inside import Room
from support.scripted import Hanging, Scripted, tick
from support.threadable import runs_in_threads
from support.threads_column import MODULES, NOT_THERE

B = ResiliencePipelineBuilder
TESTS = Path(__file__).parents[1]


@cache
def _module(name: str) -> ModuleType:
    (path,) = TESTS.rglob(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"column.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _tests_in_threads(name: str) -> list[str]:
    """The test functions of a module that have the third column."""
    module = _module(name)
    marks = getattr(module, "pytestmark", [])
    around = [mark.mark for mark in (marks if isinstance(marks, list) else [marks])]
    return [
        test
        for test, function in vars(module).items()
        if test.startswith("test_")
        and inspect.iscoroutinefunction(function)
        and any(m.name == "anyio" for m in [*getattr(function, "pytestmark", []), *around])
        and not any(test in names for names in NOT_THERE.values())
        and runs_in_threads(function, [*getattr(function, "pytestmark", []), *around])
    ]


@pytest.mark.parametrize(("module", "least"), MODULES.items(), ids=MODULES)
def test_a_modules_tests_run_in_threads(module: str, least: int) -> None:
    """So many of its test functions at least, each with all its parameters."""
    assert len(_tests_in_threads(module)) >= least > 0


def test_what_is_kept_out_of_the_column_is_there() -> None:
    """Each test that is named as not holding in threads exists, and could run there."""
    for names in NOT_THERE.values():
        for name in names:
            (test,) = [vars(_module(each))[name] for each in MODULES if name in vars(_module(each))]
            assert runs_in_threads(test, getattr(test, "pytestmark", []))


# ---- which can --------------------------------------------------------------------------------


async def _plain() -> None:
    assert await B().build().execute(Scripted(1)) == 1


async def _with_a_task_group() -> None:
    async with anyio.create_task_group():
        pass


async def _with_an_import() -> None:
    import asyncio

    await asyncio.sleep(0)


async def _with_a_helper() -> None:
    await _with_a_task_group()


async def _with_a_class() -> None:
    Room()


async def _with_equals() -> None:
    with pytest.raises(anyio.get_cancelled_exc_class()):
        await anyio.sleep_forever()
    await tick()


class _Both:
    async def sequential(self) -> int:
        return 1

    async def at_once(self) -> None:
        await _with_a_task_group()


async def _with_a_method() -> None:
    assert await _Both().sequential() == 1


async def _with_another_method() -> None:
    await _Both().at_once()


@pytest.mark.parametrize(
    ("test", "can"),
    [
        (_plain, True),
        (_with_equals, True),
        (_with_a_method, True),
        (_with_a_task_group, False),
        (_with_an_import, False),
        (_with_a_helper, False),
        (_with_another_method, False),
        (_with_a_class, False),
    ],
)
def test_a_test_can_that_reaches_no_event_loop(test: object, can: bool) -> None:
    """By itself, by its helpers, or by the methods it uses of a class."""
    assert runs_in_threads(test) is can


def test_parameters_count_as_what_a_test_reaches() -> None:
    """What it is parametrised with may need a loop too."""
    mark = pytest.mark.parametrize("call", [ok, _with_a_task_group]).mark
    assert not runs_in_threads(_plain, [mark])


def test_what_waits_in_real_time_is_left_to_the_loops() -> None:
    assert not runs_in_threads(_plain, [pytest.mark.realtime.mark])


# ---- how they run -----------------------------------------------------------------------------


def run(test: Callable[[], Awaitable[object]]) -> None:
    run_in_thread(test)


def test_a_call_of_the_column_is_a_synchronous_one() -> None:
    """In the test's own thread, on the runtime of threads."""
    seen: list[Any] = []

    async def fn() -> None:
        seen.extend([type(current_context().runtime), threading.current_thread()])

    async def test() -> None:
        await B().build().execute(fn)

    run(test)
    assert seen == [ThreadRuntime, threading.current_thread()]


def test_outside_of_the_column_nothing_is_dressed() -> None:
    """Afterwards coroutine functions are a mistake in threads again, and methods are what they were."""
    before = vars(type(B().build()))["execute"]

    async def test() -> None:
        await B().build().execute(ok)

    run(test)
    assert vars(type(B().build()))["execute"] is before
    with pytest.raises(MisuseError):
        _ = B().build().execute_sync(ok)


def test_time_is_virtual_in_the_test_its_callbacks_and_its_hooks() -> None:
    """An `autojump` clock moves while all threads wait, and stands still while one is at work."""
    clock = VirtualClock(autojump=True)
    times: list[float] = []

    async def hook(event: object) -> None:
        await clock.sleep(3)
        times.append(clock.now())

    async def test() -> None:
        await clock.sleep(1)
        fn = Scripted(ConnectionError, "value", clock=clock, takes=10)
        pipeline = B(clock=clock).add_retry(delay=5, on_retry=hook).build()
        assert await pipeline.execute(fn) == "value"
        times.append(clock.now())

    run(test)
    assert times == [14, 29]


def test_what_is_left_alone_has_ended_when_the_call_returns() -> None:
    """As a cancelled task has, if it waits for nothing more."""
    hang = Hanging()
    clock = VirtualClock(autojump=True)

    async def test() -> None:
        with pytest.raises(TimeoutRejectedError):
            await B(clock=clock).add_timeout(5).build().execute(hang)
        assert (hang.cancelled, clock.now()) == (1, 5)

    run(test)


def test_what_fails_in_the_column_fails() -> None:
    """An assertion of the test's comes out as it is."""
    calls = Calls(1)

    async def test() -> None:
        assert await B().build().execute(calls) == 2

    with pytest.raises(AssertionError):
        run(test)
    assert calls.count == 1
