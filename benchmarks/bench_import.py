"""What importing the package costs over importing what it is made of."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from statistics import median
from tempfile import TemporaryDirectory

from .measure import Settings
from .rows import Bound, Checked, Result, Row

_PROBE = """
import json, sys, time
import anyio, attrs, typing_extensions
before = set(sys.modules)
started = time.perf_counter()
import resilience_pipeline
taken = time.perf_counter() - started
added = sorted(set(sys.modules) - before)
print(json.dumps({"ms": taken * 1e3, "added": added}))
"""

_UNWANTED = frozenset(
    {"aiohttp", "httpx", "openai", "opentelemetry", "pytest", "redis", "requests", "trio"}
)


async def _probe(bytecode: str) -> tuple[float, set[str]]:
    """Import the package in a fresh interpreter: milliseconds, and what came along."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROBE, stdout=asyncio.subprocess.PIPE, env=environment
    )
    printed, _ = await process.communicate()
    if process.returncode:
        msg = f"the probe of the import failed with exit status {process.returncode}"
        raise RuntimeError(msg)
    found = json.loads(printed)
    return found["ms"], {name.partition(".")[0] for name in found["added"]}


async def _import(settings: Settings) -> Result:
    with TemporaryDirectory() as bytecode:
        await _probe(bytecode)  # compiles
        probes = [await _probe(bytecode) for _ in range(1 if settings.quick else settings.rounds)]
    ms = median(taken for taken, _ in probes)
    unwanted = sorted(_UNWANTED & probes[-1][1])
    return Result(
        cost=f"{ms:.1f} ms" + (f", and imports {', '.join(unwanted)}" if unwanted else ""),
        checks=(
            Checked(Bound(15, "ms"), ms),
            Checked(Bound(0, "third parties imported"), len(unwanted)),
        ),
    )


ROWS = (Row("import resilience_pipeline", _import),)
