"""What every test gets: both event loops, repeatable properties, and a look for tasks left behind.

A test of something that holds on every loop is marked ``@pytest.mark.anyio`` and runs once on
asyncio and once on trio, and in threads where it can. A test of asyncio alone is marked ``@pytest.mark.asyncio``.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from support.threads_column import BACKENDS, has_threads, pytest_generate_tests, pytest_pyfunc_call

__all__ = ["pytest_generate_tests", "pytest_pyfunc_call"]  # hooks of the third column

# Derandomised, so that a red run is red again; `--hypothesis-profile=explore` hunts for more.
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, max_examples=5_000)
settings.load_profile("repeatable")


def _keep_out_of_the_collectors_sight() -> None:
    """Leave everything alive out of full collections from now on.

    Going through twenty thousand collected tests, and reports of those that have run, took 0.3 s
    each time a test asks for a collection: a third of the whole suite's time.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    _keep_out_of_the_collectors_sight()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        _keep_out_of_the_collectors_sight()


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop an ``anyio`` test runs on, or ``threads`` (see `support.threads_column`)."""
    backend: str = request.param
    return backend


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> None:
    """Set up one of the guards below, for tests that run on an event loop.

    Being autouse it comes first and is torn down last: after the test's own fixtures.
    """
    node: pytest.Item = request.node
    if has_threads(node):
        return
    if node.get_closest_marker("anyio"):
        request.getfixturevalue("_anyio_task_guard")
    elif node.get_closest_marker("asyncio"):
        request.getfixturevalue("_asyncio_task_guard")


@pytest.fixture
async def _anyio_task_guard(anyio_backend_name: str) -> AsyncIterator[None]:
    if anyio_backend_name != "asyncio":  # trio leaves no task behind by its construction
        yield
        return
    before = asyncio.all_tasks()
    yield
    await _check_no_task_left(before)


@pytest_asyncio.fixture
async def _asyncio_task_guard() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    await _check_no_task_left(before)


async def _check_no_task_left(before: set[asyncio.Task[object]]) -> None:
    """Fail when a task is alive that was not there at the start, after some turns to end in."""
    left: set[asyncio.Task[object]] = set()
    for _ in range(20):  # dropped async generators are closed a turn or two apart, outermost first
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before - {asyncio.current_task()}
        # anyio's runner waits for its fixtures in tasks of its own, this moment included.
        left = {task for task in left if "TestRunner." not in repr(task.get_coro())}
        if not left:
            return
    pytest.fail("tasks left behind by the test:\n" + "\n".join(map(repr, left)), pytrace=False)
