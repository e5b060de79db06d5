"""The fixtures for pytest, in a run of pytest of its own on a user's tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import resilience_pipeline

PACKAGE = Path(resilience_pipeline.__file__).parent
PLUGIN = "_resilience_pipeline_pytest"


def is_installed() -> bool:
    """Whether pytest finds the plugin by itself; not so in a checkout that is only on the path."""
    return any(each.value == PLUGIN for each in entry_points(group="pytest11"))


def run_pytest(directory: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with nothing of this project's settings."""
    (directory / "test_user.py").write_text(tests, "utf-8")
    (directory / "pytest.ini").write_text("[pytest]\n", "utf-8")
    plugin: tuple[str, ...] = ("-p", "no:asyncio")  # which would warn about settings of its own
    if not is_installed():
        plugin += ("-p", PLUGIN)
    environment = dict(os.environ)
    environment.pop("PYTEST_ADDOPTS", None)
    paths = [str(PACKAGE.parent), str(PACKAGE / "_pytest"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", *plugin, *options, "test_user.py"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def passed(run: subprocess.CompletedProcess[str], count: int) -> bool:
    assert run.returncode == 0, run.stdout + run.stderr
    return f"{count} passed" in run.stdout


VIRTUAL_CLOCK = """
import pytest
from resilience_pipeline import ResiliencePipelineBuilder
from resilience_pipeline.testing import VirtualClock, flaky


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.mark.anyio
async def test_in_a_loop(virtual_clock):
    assert isinstance(virtual_clock, VirtualClock)
    fetch = flaky(ConnectionError, "page")
    pipeline = ResiliencePipelineBuilder(clock=virtual_clock).add_retry(delay="1h").build()
    assert await pipeline.execute(fetch) == "page"
    assert virtual_clock.now() == 3600
    await virtual_clock.advance(1)
    assert virtual_clock.now() == 3601


def test_in_a_thread(virtual_clock):
    assert virtual_clock.now() == 0  # one of its own for each test
    fetch = flaky(ConnectionError, "page")
    pipeline = ResiliencePipelineBuilder(clock=virtual_clock).add_retry(delay="1h").build()
    assert pipeline.execute_sync(fetch) == "page"
    assert virtual_clock.now() == 3600
"""

INSTANT = """
import pytest
from resilience_pipeline import ResiliencePipelineBuilder
from resilience_pipeline import _instant
from resilience_pipeline.testing import flaky

pipeline = ResiliencePipelineBuilder().add_retry(delay="1h").build()


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.mark.anyio
async def test_in_a_loop(resilience_instant):
    assert await pipeline.execute(flaky(ConnectionError, "page")) == "page"
    assert resilience_instant == [3600]


def test_in_a_thread(resilience_instant):
    assert pipeline.execute_sync(flaky(ConnectionError, "page")) == "page"
    assert resilience_instant == [3600]


def test_afterwards():
    assert not _instant.watching
"""

EVENTS = """
import threading

import pytest
from resilience_pipeline import ResiliencePipelineBuilder
from resilience_pipeline import _switches
from resilience_pipeline.testing import flaky

pipeline = ResiliencePipelineBuilder("shop").add_retry(delay=0).build()
NAMES = ["PipelineExecuting", "ExecutionAttempt", "OnRetry", "ExecutionAttempt", "PipelineExecuted"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.mark.anyio
async def test_in_a_loop(resilience_events):
    assert resilience_events == []  # a list of its own for each test
    assert await pipeline.execute(flaky(ConnectionError, "page")) == "page"
    assert [event.name for event in resilience_events] == NAMES
    assert {event.pipeline_name for event in resilience_events} == {"shop"}


def test_in_a_thread(resilience_events):
    call = threading.Thread(target=pipeline.execute_sync, args=(flaky(ConnectionError, "page"),))
    call.start()
    call.join()
    assert [event.name for event in resilience_events] == NAMES


@pytest.mark.anyio
async def test_with_the_other_fixtures(resilience_events, resilience_instant, virtual_clock):
    slow = ResiliencePipelineBuilder(clock=virtual_clock).add_retry(delay="1h").build()
    assert await slow.execute(flaky(ConnectionError, "page")) == "page"
    assert resilience_events[2].delay == 3600


def test_afterwards():
    assert not _switches.switches.on
"""

WITHOUT = """
import sys

loaded = sorted(name for name in sys.modules if name.partition(".")[0] == "resilience_pipeline")


def test_nothing_is_imported():
    assert loaded == []
"""


def test_virtual_clock(tmp_path: Path) -> None:
    """A clock of each test's own, that jumps."""
    assert passed(run_pytest(tmp_path, VIRTUAL_CLOCK), 3)


def test_resilience_instant(tmp_path: Path) -> None:
    """For the time of the test, and no longer."""
    assert passed(run_pytest(tmp_path, INSTANT, "-p", "no:randomly"), 4)


def test_resilience_events(tmp_path: Path) -> None:
    """All events of the test, in all threads, and no longer."""
    assert passed(run_pytest(tmp_path, EVENTS, "-p", "no:randomly"), 6)


def test_the_library_is_not_imported_until_a_fixture_is_used(tmp_path: Path) -> None:
    """Whoever measures coverage, or has to import something before everything else, is not disturbed."""
    assert passed(run_pytest(tmp_path, WITHOUT), 1)


def test_fixtures_are_documented(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, "", "--fixtures")
    fixtures = {
        "virtual_clock": "autojump=True",
        "resilience_events": "events of all pipelines",
        "resilience_instant": "no time",
    }
    for name, words in fixtures.items():
        described = run.stdout.partition(f"{name} -- ")[2].splitlines()
        assert words in described[1]


@pytest.mark.skipif(not is_installed(), reason="nothing to be found where it is not installed")
def test_pytest_finds_it_by_itself(tmp_path: Path) -> None:
    """By the entry point, under the name by which it can be switched off."""
    (found,) = [each for each in entry_points(group="pytest11") if each.value == PLUGIN]
    assert found.name == "resilience_pipeline"
    run = run_pytest(tmp_path, VIRTUAL_CLOCK, "-p", "no:resilience_pipeline")
    assert "fixture 'virtual_clock' not found" in run.stdout
