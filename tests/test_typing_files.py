"""The files in `typing/` are for type checkers' eyes; here only that they are sound as files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "typing").glob("*.py"))
MYPY = re.compile(r"# type: ignore\[[a-z-]+(, [a-z-]+)*\]")
PYRIGHT = re.compile(r"# pyright: ignore\[\w+(, \w+)*\]")

every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_there_are_files() -> None:
    """Building, calling and settling each have one."""
    assert [path.stem for path in FILES] == ["building", "calling", "settling"]


@every_file
def test_they_compile(path: Path) -> None:
    """A typing test that is no Python would prove nothing, and says so here without a type checker."""
    compile(path.read_text("utf-8"), str(path), "exec")


@every_file
def test_they_assert_types_and_errors(path: Path) -> None:
    """Each holds types that must be inferred as well as calls that must be refused."""
    text = path.read_text("utf-8")
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    names = [node.func.id for node in calls if isinstance(node.func, ast.Name)]
    assert names.count("assert_type") > 10
    assert len(MYPY.findall(text)) > 5


@every_file
def test_both_checkers_must_refuse_the_same(path: Path) -> None:
    """Where mypy is told to expect an error so is pyright, and each by the name of the rule."""
    for line in path.read_text("utf-8").splitlines():
        expected = ("type: ignore" in line, "pyright: ignore" in line)
        assert len(set(expected)) == 1, line
        assert (MYPY.search(line) is not None, PYRIGHT.search(line) is not None) == expected, line
