"""`python -m resilience_pipeline schema` and `check FILE`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilience_pipeline import ResiliencePipelineRegistry
from resilience_pipeline.__main__ import main
from resilience_pipeline._schema import schema

ROOT = Path(__file__).parents[1]

FILE = """
[pipelines.llm]
close_timeout = "2s"

[[pipelines.llm.strategies]]
type = "retry"
delay = "500ms"

[[pipelines.llm.strategies]]
type = "pipeline"
pipeline = "db"

[pipelines.db]
strategies = [{ type = "timeout", timeout = 3 }]

[pipelines.none]
strategies = []
"""


def hook(event: object) -> None: ...


registry = ResiliencePipelineRegistry()
registry.register("hook", hook)
registry.add("elsewhere", lambda builder: None)
names = {"hook": hook}
neither = 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipelines.toml"
    path.write_text(FILE, "utf-8")
    return path


@pytest.fixture
def names_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(sys.modules, "program", sys.modules.get(__name__) or _module())
    return "program"


def _module() -> object:
    from types import SimpleNamespace

    return SimpleNamespace(**globals())


def test_check_says_what_a_file_builds(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Strategies by their options that differ, and what each is for."""
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr() == (
        f"""\
{file}: 3 pipelines, strategies outermost first

llm
  close_timeout = 2.0
  1. Retry(delay=0.5)
     Run the inside again while its outcome is handled.
  2. pipeline 'db'

db
  1. Timeout(3.0)
     Limit how long the inside may take; for a stream, until its first chunk.

none
  nothing: calls pass as they are
""",
        "",
    )


def test_check_lists_the_mistakes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the error output, with status 1."""
    file.write_text(FILE.replace("timeout = 3", "timeout = 0").replace("delay", "dely"), "utf-8")
    assert main(["check", str(file)]) == 1
    assert capsys.readouterr() == (
        "",
        f"""\
2 mistakes in {file}:
  pipelines.llm.strategies[0].dely: is no option of 'retry'; did you mean 'delay'?
  pipelines.db.strategies[0].timeout: must be longer than zero, got 0.0
""",
    )


def test_check_tells_what_is_no_toml(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[pipelines.llm\n", "utf-8")
    assert main(["check", str(file)]) == 1
    assert "line 1" in capsys.readouterr().err


def test_check_of_a_file_that_can_not_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2: nothing has been said about any configuration."""
    path = tmp_path / "none.toml"
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr() == ("", f"{path} can't be read: No such file or directory\n")


@pytest.mark.parametrize("where", ["registry", "names"])
def test_check_with_the_names_of_a_program(
    file: Path, names_module: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A registry also knows the pipelines that the program adds."""
    file.write_text(FILE.replace('delay = "500ms"', 'on_retry = "hook"'), "utf-8")
    assert main(["check", str(file)]) == 1
    assert main(["check", str(file), "--names", f"{names_module}:{where}"]) == 0
    assert "1. Retry(on_retry=hook)" in capsys.readouterr().out
    file.write_text(FILE.replace('"db"', '"elsewhere"'), "utf-8")
    known = where == "registry"
    assert main(["check", str(file), "--names", f"{names_module}:{where}"]) == (0 if known else 1)


def test_names_that_can_not_be_had(
    file: Path, names_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(file), "--names", "no_such_module:registry"]) == 2
    assert main(["schema", "--names", f"{names_module}:neither"]) == 2
    assert capsys.readouterr() == (
        "",
        (
            "--names: 'no_such_module:registry' can't be imported: "
            "ModuleNotFoundError: No module named 'no_such_module'\n"
            "--names: 'program:neither' is neither a registry nor a mapping, but 3\n"
        ),
    )


def test_schema_prints_the_schema(names_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert main(["schema", "--names", f"{names_module}:names"]) == 0
    assert json.loads(capsys.readouterr().out) == schema(["hook"])


@pytest.mark.parametrize("arguments", [["check"], ["check", "a", "b"], ["schema", "a"]])
def test_a_wrong_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m resilience_pipeline" in capsys.readouterr().err


def test_help_tells_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of the demonstration does, and each command has one of its own."""
    for arguments, expected in (
        (["--help"], "check FILE"),
        (["check", "--help"], "Exit status: 0"),
        (["schema", "--help"], "JSON Schema"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert not caught.value.code
        assert expected in capsys.readouterr().out


def test_commands_run_as_their_users_run_them(file: Path) -> None:
    """In a process of their own; a reader that has gone away is no traceback."""
    command = [sys.executable, "-m", "resilience_pipeline"]
    checked = subprocess.run(
        [*command, "check", str(file)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert checked.stdout.startswith(f"{file}: 3 pipelines")
    reader, writer = os.pipe()
    os.close(reader)  # before there is a writer: what it writes may fit into a pipe
    left = subprocess.run(
        [*command, "schema"], stdout=writer, stderr=subprocess.PIPE, check=False, cwd=ROOT
    )
    os.close(writer)
    assert (left.returncode, left.stderr) == (1, b"")
