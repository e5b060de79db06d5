"""`watch_toml`: a changed file is loaded, a wrong or half-written one is not, and both are said."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as threads
from typing import Any

import pytest

from resilience_pipeline import OptionsError, ResiliencePipelineRegistry, Strategy, Timeout
from resilience_pipeline._watching import Watch
from resilience_pipeline.strategies import Handler, Site

STUCK = 30.0


def timeout(seconds: float, *, name: str = "a") -> str:
    return f'[[pipelines.{name}.strategies]]\ntype = "timeout"\ntimeout = {seconds}\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pipelines.toml"
    path.write_text(timeout(1), "utf-8")
    return path


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the watch itself says; reloads are told as events besides."""

    def is_said(record: logging.LogRecord) -> bool:
        return not hasattr(record, "event_name")

    caplog.handler.addFilter(is_said)
    with caplog.at_level(logging.INFO, "resilience_pipeline"):
        yield caplog
    caplog.handler.removeFilter(is_said)


class Watched:
    """A registry whose file is looked at when a test says so."""

    def __init__(self, path: Path) -> None:
        self.registry = ResiliencePipelineRegistry()
        self.watch = Watch(self.registry._load_contents, path)
        self.watch.start()

    @property
    def timeout(self) -> Any:
        (strategy,) = self.registry.get("a").strategies
        assert isinstance(strategy, Timeout)
        return strategy.timeout

    def look(self, times: int = 1) -> Any:
        for _ in range(times):
            self.watch.look()
        return self.timeout


def test_a_change_is_loaded(path: Path, said: pytest.LogCaptureFixture) -> None:
    watched = Watched(path)
    assert watched.timeout == 1
    path.write_text(timeout(2), "utf-8")
    assert watched.look(2) == 2
    assert said.messages == [f"{path} was loaded"]
    assert said.records[0].name == "resilience_pipeline"
    assert said.records[0].levelno == logging.INFO


def test_nothing_is_loaded_without_a_change(path: Path, said: pytest.LogCaptureFixture) -> None:
    """Also when the file was written anew with the same contents."""
    watched = Watched(path)
    pipeline = watched.registry.get("a")._cell.current  # type: ignore[attr-defined]
    path.write_text(timeout(1), "utf-8")
    watched.look(3)
    assert watched.registry.get("a")._cell.current is pipeline  # type: ignore[attr-defined]
    assert said.messages == []


def test_a_change_is_seen_whatever_the_times_say(path: Path) -> None:
    """A file that was changed within one tick of the file system's clock, or dated back."""
    watched = Watched(path)
    times = path.stat()
    path.write_text(timeout(2), "utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert watched.look(2) == 2


def test_what_is_still_being_written_waits(path: Path) -> None:
    """The first half of a file may be a valid one: it is loaded when it has stayed the same."""
    watched = Watched(path)
    for contents in (timeout(2), timeout(3), timeout(4)):
        path.write_text(contents, "utf-8")
        assert watched.look() == 1
    assert watched.look() == 4


def test_a_wrong_file_is_said_and_not_loaded(path: Path, said: pytest.LogCaptureFixture) -> None:
    """Once, not at every look; the old one serves until it is mended."""
    watched = Watched(path)
    path.write_text(timeout(0) + timeout(2, name="b"), "utf-8")
    assert watched.look(5) == 1
    assert list(watched.registry) == ["a"]
    (message,) = said.messages
    assert message.startswith(
        f"{path} was not loaded, the pipelines stay as they are: a mistake in"
    )
    assert "pipelines.a.strategies[0].timeout: must be longer than zero, got 0.0" in message
    assert said.records[0].levelno == logging.ERROR
    path.write_text("[pipelines", "utf-8")
    assert watched.look(2) == 1
    assert "line 1" in said.messages[1]
    path.write_text(timeout(3), "utf-8")
    assert watched.look(2) == 3
    assert said.messages[2:] == [f"{path} was loaded"]


def test_a_file_that_goes_and_comes(path: Path, said: pytest.LogCaptureFixture) -> None:
    """Said once; loaded when it is there again, if it says something else."""
    watched = Watched(path)
    path.unlink()
    assert watched.look(3) == 1
    assert [message.partition(":")[0] for message in said.messages] == [
        f"{path} can't be read, the pipelines stay as they are"
    ]
    path.write_text(timeout(1), "utf-8")
    assert watched.look(2) == 1
    path.unlink()
    assert watched.look() == 1
    path.write_text(timeout(2), "utf-8")
    assert watched.look(2) == 2
    assert len(said.messages) == 3


def test_a_file_that_is_replaced(path: Path, tmp_path: Path) -> None:
    """As editors and configuration maps do it: another file, or link, in its place."""
    watched = Watched(path)
    other = tmp_path / "other.toml"
    other.write_text(timeout(2), "utf-8")
    other.replace(path)
    assert watched.look(2) == 2
    other.write_text(timeout(3), "utf-8")
    path.unlink()
    path.symlink_to(other)
    assert watched.look(2) == 3


def test_whatever_goes_wrong_the_watch_goes_on(path: Path, said: pytest.LogCaptureFixture) -> None:
    """An error that is no mistake in the file is said with its traceback."""

    class Unbindable(Strategy[Any]):
        name = "unbindable"

        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            raise ZeroDivisionError

    watched = Watched(path)
    watched.registry.get("a")
    watched.registry.register("unbindable", Unbindable)
    path.write_text('[[pipelines.a.strategies]]\ntype = "unbindable"', "utf-8")
    assert watched.look(2) == 1
    assert said.messages == [f"{path} was not loaded, the pipelines stay as they are"]
    assert said.records[0].exc_info
    path.write_text(timeout(2), "utf-8")
    assert watched.look(2) == 2


# ---- the block ----------------------------------------------------------------------------------


class Told(Strategy[Any]):
    """Says when it is built into a pipeline."""

    name = "told"
    events: dict[str, Event] = {}  # noqa: RUF012

    def __init__(self, label: str) -> None:
        self.label = label

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        self.events[self.label].set()
        return next


def told(label: str) -> str:
    Told.events[label] = Event()
    return f'[[pipelines.a.strategies]]\ntype = "told"\nlabel = "{label}"\n'


def test_a_block_watches_in_a_thread(path: Path) -> None:
    """Loaded on entering; a change is loaded by and by; afterwards nobody looks any more."""
    registry = ResiliencePipelineRegistry()
    registry.register("told", Told)
    path.write_text(told("first"), "utf-8")
    with registry.watch_toml(path, interval="5ms"):
        registry.get("a")
        assert Told.events["first"].is_set()
        new = path.with_suffix(".new")
        new.write_text(told("second"), "utf-8")
        new.replace(path)  # in one step, or it is a file without pipelines for a moment
        assert Told.events["second"].wait(STUCK)
    assert not [thread for thread in threads() if thread.name.startswith("watch of")]
    assert registry.get("a").strategies[0].label == "second"  # type: ignore[attr-defined]


def test_a_block_ends_at_once(path: Path) -> None:
    """However long the interval is."""
    registry = ResiliencePipelineRegistry()
    for interval in ("1000h", float("inf")):
        with registry.watch_toml(path, interval=interval):
            (thread,) = [thread for thread in threads() if thread.name == f"watch of {path}"]
            assert thread.daemon
        assert not thread.is_alive()


def test_the_first_load_must_be_right(path: Path, tmp_path: Path) -> None:
    """What is wrong comes out of the `with`, and nothing watches."""
    registry = ResiliencePipelineRegistry()
    path.write_text(timeout(0), "utf-8")
    with pytest.raises(OptionsError, match="longer than zero"), registry.watch_toml(path):
        pytest.fail("entered")
    none = tmp_path / "none.toml"
    with pytest.raises(FileNotFoundError), registry.watch_toml(none):
        pytest.fail("entered")
    assert not [thread for thread in threads() if thread.name.startswith("watch of")]


@pytest.mark.parametrize("interval", [0, -1, "often", None])
def test_a_bad_interval_is_told(path: Path, interval: Any) -> None:
    registry = ResiliencePipelineRegistry()
    with (
        pytest.raises(OptionsError, match="interval must be a duration longer than zero, got"),
        registry.watch_toml(path, interval=interval),
    ):
        pytest.fail("entered")
