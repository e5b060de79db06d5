"""What `import resilience_pipeline` brings in, told by modules and not by the clock."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import resilience_pipeline

ROOT = Path(resilience_pipeline.__file__).parent.parent
DEPENDENCIES = "import anyio, attrs, typing_extensions"


@cache
def modules_after(statements: str) -> frozenset[str]:
    """Names of the modules in a fresh interpreter after some imports."""
    code = f"{statements}\nimport sys\nprint('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return frozenset(run.stdout.split())


def added() -> set[str]:
    whole = modules_after(f"{DEPENDENCIES}\nimport resilience_pipeline")
    return set(whole - modules_after(DEPENDENCIES))


def test_no_event_loop_and_no_client_is_imported() -> None:
    """Neither asyncio nor trio nor any optional package is imported along with the library."""
    heavy = {"asyncio", "trio", "httpx", "openai", "sniffio", "pytest", "ssl", "socket", "logging"}
    assert added().isdisjoint(heavy)


def test_nothing_that_draws_on_randomness_or_processes_is_imported() -> None:
    """Modules with costly imports of their own stay out: they are imported when first needed."""
    heavy = {"random", "hashlib", "decimal", "concurrent.futures", "multiprocessing", "subprocess"}
    heavy |= {"email", "urllib", "http", "json", "pickle", "tempfile", "importlib.metadata"}
    assert added().isdisjoint(heavy)


def test_what_is_imported_of_the_package_itself() -> None:
    """Event loops' runtimes, the virtual clock and the demonstration wait until they are needed."""
    ours = {module for module in added() if module.startswith("resilience_pipeline")}
    assert "resilience_pipeline.strategies" in ours
    later = (
        "resilience_pipeline.runtime._asyncio",
        "resilience_pipeline.runtime._anyio",
        "resilience_pipeline.testing",
        "resilience_pipeline.strategies._chaos",
        "resilience_pipeline._registry",
        "resilience_pipeline._instances",
        "resilience_pipeline._configuration",
        "resilience_pipeline._demo",
        "resilience_pipeline.__main__",
        "resilience_pipeline.integrations",
    )
    assert [module for module in ours if module.startswith(later)] == []


def test_the_standard_library_adds_little() -> None:
    """Beyond attrs, anyio and typing-extensions, at most a dozen public modules are imported."""
    public = {module for module in added() if not module.startswith(("_", "resilience_pipeline"))}
    assert len(public) <= 12, sorted(public)


def test_either_loop_can_be_used_alone() -> None:
    """Running on asyncio does not import trio, nor the other way round our part of asyncio."""
    use = (
        "import {0}\n"
        "from resilience_pipeline import ResiliencePipelineBuilder\n"
        "async def ok(): return 1\n"
        "p = ResiliencePipelineBuilder().add_retry().add_timeout(1).build()\n"
    )
    on_asyncio = modules_after(use.format("asyncio") + "assert asyncio.run(p.execute(ok)) == 1")
    assert "trio" not in on_asyncio
    on_trio = modules_after(use.format("trio") + "assert trio.run(p.execute, ok) == 1")
    assert "resilience_pipeline.runtime._asyncio" not in on_trio
