"""Tests that the documentation names do exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<test>\w+)`")
REFERENCES = sorted(
    {
        (match["file"], match["test"])
        for page in (ROOT / "docs").rglob("*.md")
        for match in NAMED.finditer(page.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize(("file", "test"), REFERENCES, ids="::".join)
def test_a_test_that_is_named_exists(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
