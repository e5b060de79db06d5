"""Who may import whom: the layers of the package, held by reading its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

import resilience_pipeline

PACKAGE = "resilience_pipeline"
ROOT = Path(resilience_pipeline.__file__).parent

#: The rooms by level, the lowest first. A module may import what is on a lower level, or in its own room. A level
#: is a list of groups that don't see each other; rooms of one group may.
LEVELS: list[list[set[str]]] = [
    [{"_errors"}, {"_lazy"}],
    [{"_durations", "_locks", "_digest", "_cancellation", "_event", "_instant", "_switches"}],
    [{"_options"}],
    [{"_context", "_outcome"}],
    [{"telemetry", "_predicates"}],
    [{"strategies"}, {"runtime"}],
    [
        {
            "_stream",
            "_priming",
            "_carriers",
            "_line",
            "_resuming",
            "_recording",
            "_sharing",
            "_source",
        }
    ],
    [{"_invoke", "_sync"}],
    [{"_wrapping"}, {"_layers"}, {"_streaming"}],
    [{"_pipeline"}],
    [{"_reloadable", "_health"}],
    [{"_builder"}, {"_instances"}, {"_works"}],
    [{"_references"}, {"_recipes"}],
    [{"_configuration"}, {"_schema"}],
    [{"_watching"}],
    [{"_registry"}],
    [{"testing"}],
    [{"_pytest"}],
    [{""}],  # the package itself: its __init__
    [{"integrations"}],
    [{"_demo"}, {"_commands"}],
    [{"__main__"}],
]
PLACES = MappingProxyType(
    {
        room: (level, number)
        for level, groups in enumerate(LEVELS)
        for number, group in enumerate(groups)
        for room in group
    }
)

MODULES = {
    ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}
FORBIDDEN_TO_STRATEGIES = {"asyncio", "trio", "anyio", "threading", "time", "random"}
PURE = [
    "strategies._backoff",
    "strategies._rolling_window",
    "strategies._breaker_state",
    "strategies._buckets",
    "strategies._budget_window",
    "strategies._percentile_delay",
    "strategies._cache_store",
    "strategies._cache_key",
    "strategies._shared_error",
    "_digest",
    "_durations",
    "_outcome",
]

every_module = pytest.mark.parametrize("module", MODULES)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything in a module that runs, imports inside of functions included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for otherwise in child.orelse:
                yield otherwise
                yield from _statements(otherwise)
            continue
        yield child
        yield from _statements(child)


def imports(module: str, source: str, *, is_package: bool) -> Iterator[str]:
    """The full names of what a module imports at run time."""
    for node in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parents = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                # `from package import module`, or a name out of `package`.
                yield full if full in MODULES else base


@cache
def imported_by(module: str) -> list[str]:
    path = MODULES[module]
    return list(imports(module, path.read_text("utf-8"), is_package=path.name == "__init__.py"))


def room_of(module: str) -> str:
    return module.removeprefix(PACKAGE).strip(".").partition(".")[0]


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(f"{PACKAGE}.")


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if imported not in PLACES or importer not in PLACES:
        return False
    (mine, my_group), (other, other_group) = PLACES[importer], PLACES[imported]
    return mine > other or (mine, my_group) == (other, other_group)


# ---- the rules ----------------------------------------------------------------------------------


@every_module
def test_every_module_has_its_place(module: str) -> None:
    """A new room has to be put on a level before it can be imported."""
    assert room_of(module) in PLACES


@every_module
def test_imports_point_downwards(module: str) -> None:
    """A module imports its own room and lower levels, and strategies and runtime don't see each other."""
    room = room_of(module)
    upwards = [
        imported
        for imported in imported_by(module)
        if is_ours(imported) and not may_import(room, room_of(imported))
    ]
    assert upwards == []


@pytest.mark.parametrize("module", [each for each in MODULES if room_of(each) == "strategies"])
def test_strategies_know_no_loop_no_clock_and_no_chance(module: str) -> None:
    """Strategies import no asyncio, trio, anyio, threading, time or random."""
    roots = {imported.partition(".")[0] for imported in imported_by(module)}
    assert roots.isdisjoint(FORBIDDEN_TO_STRATEGIES)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_contain_no_async(name: str) -> None:
    """Pure parts neither define nor await anything asynchronous, and read no clock."""
    module = f"{PACKAGE}.{name}"
    tree = ast.parse(MODULES[module].read_text("utf-8"))
    kinds = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert [node.lineno for node in ast.walk(tree) if isinstance(node, kinds)] == []
    roots = {imported.partition(".")[0] for imported in imported_by(module)}
    assert roots.isdisjoint(FORBIDDEN_TO_STRATEGIES)


@every_module
def test_nobody_imports_integrations(module: str) -> None:
    """An integration is imported by its users alone, and imports the public package alone."""
    theirs = [each for each in imported_by(module) if is_ours(each)]
    if room_of(module) == "integrations":
        public = {"", "integrations", "strategies", "telemetry"}
        assert all(room_of(each) in public for each in theirs)
    else:
        assert all(room_of(each) != "integrations" for each in theirs)


@every_module
def test_only_declared_dependencies_are_imported(module: str) -> None:
    """The core needs attrs, anyio and typing-extensions; trio only where trio itself is running."""
    foreign = {
        root
        for imported in imported_by(module)
        if (root := imported.partition(".")[0]) in {"attrs", "attr", "anyio", "typing_extensions"}
        or root in {"trio", "httpx", "openai", "sniffio", "pytest", "exceptiongroup"}
    }
    allowed = {"attrs", "anyio", "typing_extensions"}
    if room_of(module) in {"runtime", "testing"}:
        allowed |= {"trio"}
    if room_of(module) == "_pytest":  # what pytest itself imports
        allowed |= {"pytest"}
    if room_of(module) == "integrations":
        return
    assert foreign <= allowed


@every_module
def test_modules_that_are_no_rooms_are_private(module: str) -> None:
    """A path without an underscore is API: only packages have one, and modules of integrations."""
    path = MODULES[module]
    name = module.rpartition(".")[2]
    if path.name == "__init__.py" or room_of(module) in {"integrations", "__main__"}:
        return
    assert name.startswith("_")


# ---- the reader itself --------------------------------------------------------------------------

SOURCE = """
from __future__ import annotations
import time
import asyncio.events as events
from . import strategies
from ._errors import MisuseError
from .strategies._base import Strategy
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from ._pipeline import ResiliencePipeline
else:
    import random
def function():
    from .runtime import _asyncio
"""


def test_the_reader_finds_what_is_imported() -> None:
    """Relative and absolute imports, in functions too, but none for annotations only."""
    assert list(imports(f"{PACKAGE}._builder", SOURCE, is_package=False)) == [
        "__future__",
        "time",
        "asyncio.events",
        f"{PACKAGE}.strategies",
        f"{PACKAGE}._errors",
        f"{PACKAGE}.strategies._base",
        "typing",
        "random",
        f"{PACKAGE}.runtime._asyncio",
    ]


def test_the_reader_resolves_packages() -> None:
    """In a package's `__init__` one dot is the package itself."""
    source = "from ._base import Site\nfrom .. import _errors\nfrom ..runtime import Clock"
    assert list(imports(f"{PACKAGE}.strategies", source, is_package=True)) == [
        f"{PACKAGE}.strategies._base",
        f"{PACKAGE}._errors",
        f"{PACKAGE}.runtime",
    ]


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("_pipeline", "strategies", True),
        ("_pipeline", "runtime", True),
        ("strategies", "runtime", False),
        ("runtime", "strategies", False),
        ("strategies", "_pipeline", False),
        ("_outcome", "_context", True),
        ("_options", "_context", False),
        ("_builder", "testing", False),
        ("testing", "_locks", True),
        ("_builder", "unheard_of", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    """The levels say what is said about them."""
    assert may_import(importer, imported) is allowed
