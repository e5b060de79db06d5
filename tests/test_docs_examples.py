"""Every ```python block of README.md and docs/ runs.

The blocks of a page run in order in one module of their own and on one event loop, so they may
build on each other; `await`, `async for` and `async with` work at the top level. Not run: a block
fenced as ```python no-run, and one whose line before is `<!-- skip: reason -->`.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.exists() and "_build" not in page.parts
]

FENCE = re.compile(r"\s*(?P<fence>`{3,}|~{3,})\s*(?P<info>[^`]*)$")
SKIP = re.compile(r"\s*<!--\s*skip:\s*\S.*-->\s*$")


@dataclass(frozen=True)
class Block:
    """A block to run; `line` is the number of the first line inside its fence."""

    line: int
    source: str


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page that are to be run."""
    found: list[Block] = []
    fence = ""  # of the block that is open
    wanted = False
    start = 0
    before = ""  # the last line outside blocks that isn't blank
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        match = FENCE.match(line)
        if not fence and match:
            fence, info = match["fence"], match["info"].split()
            wanted = info == ["python"] and not SKIP.match(before)
            start = number + 1
        elif fence and match and match["fence"].startswith(fence) and not match["info"]:
            if wanted:
                source = textwrap.dedent("\n".join(lines[start - 1 : number - 1]))
                found.append(Block(start, source))
            fence = before = ""
        elif not fence and line.strip():
            before = line
    assert not fence, f"the block opened in line {start - 1} is never closed"
    return found


async def run(page: Path, blocks: list[Block], namespace: dict[str, object]) -> None:
    """Run blocks one after another; a traceback shows the line of the page."""
    for block in blocks:
        code = compile(
            "\n" * (block.line - 1) + block.source,
            str(page),
            "exec",
            flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
            dont_inherit=True,
        )
        result = eval(code, namespace)
        if inspect.isawaitable(result):
            await result


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    # A real module, because classes look theirs up.
    module = types.ModuleType("example_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    asyncio.run(run(page, blocks, vars(module)))


def test_blocks_are_found_by_their_fence() -> None:
    page = """
```python
first = 1
```
```python no-run
no
```
<!-- skip: needs an account -->

```python
no
```
```pycon
>>> no
```
````markdown
```python
no
```
````
- item

  ~~~python
  if first:
      second = 2
  ~~~
"""
    assert blocks_of(page) == [Block(3, "first = 1"), Block(24, "if first:\n    second = 2")]


def test_an_unclosed_block_is_refused() -> None:
    with pytest.raises(AssertionError, match="opened in line 1"):
        blocks_of("```python\n")


@pytest.mark.asyncio
async def test_blocks_share_a_page_and_may_await() -> None:
    namespace: dict[str, object] = {}
    blocks = blocks_of("```python\nimport asyncio\nx = 1\n```\n```python\nx += await f(1)\n```\n")

    async def f(x: int) -> int:
        return x

    namespace["f"] = f
    await run(Path("page.md"), blocks, namespace)
    assert namespace["x"] == 2


@pytest.mark.asyncio
async def test_a_failing_block_points_at_its_line() -> None:
    blocks = blocks_of("text\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        await run(Path("page.md"), blocks, {})
    assert caught.traceback[-1].lineno == 4  # 0-based: the fifth line
