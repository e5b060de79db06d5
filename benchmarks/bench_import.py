"""What importing the package costs, and what building a pipeline does."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory

from . import peer_stacks, peers
from .bench_calls import BARE, stack, stack_by_hand, work
from .measure import Loop, Settings
from .rows import BY_HAND, OURS, Bound, Checked, Result, Row, call_row

_PROBE = """
import json, sys, time
import {before}
before = set(sys.modules)
started = time.process_time()
import {module}
taken = time.process_time() - started
added = sorted(set(sys.modules) - before)
print(json.dumps({{"ms": taken * 1e3, "added": added}}))
"""

_OURS = ("anyio, attrs, typing_extensions", "resilience_pipeline")

_UNWANTED = frozenset(
    {"aiohttp", "httpx", "openai", "opentelemetry", "pytest", "redis", "requests", "trio"}
)


_PEERS = {
    "tenacity": "tenacity",
    "stamina": "stamina",
    "backoff": "backoff",
    "circuitbreaker": "circuitbreaker",
    "hyx": "hyx.retry, hyx.circuitbreaker, hyx.timeout, hyx.bulkhead",
    "nopanic": "nopanic",
    "pyresilience": "pyresilience",
}


async def _probe(bytecode: str, before: str, module: str) -> tuple[float, set[str]]:
    """Import a module in a fresh interpreter: milliseconds, and what came along."""
    environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROBE.format(before=before, module=module)),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    printed, _ = await process.communicate()
    if process.returncode:
        msg = f"the probe of the import failed with exit status {process.returncode}"
        raise RuntimeError(msg)
    found = json.loads(printed)
    return found["ms"], {name.partition(".")[0] for name in found["added"]}


async def _import(settings: Settings) -> Result:
    with TemporaryDirectory() as bytecode:
        await _probe(bytecode, *_OURS)  # compiles
        rounds = 1 if settings.quick else settings.rounds
        probes = [await _probe(bytecode, *_OURS) for _ in range(rounds)]
    ms = median(taken for taken, _ in probes)
    unwanted = sorted(_UNWANTED & probes[-1][1])
    return Result(
        cost=f"{ms:.1f} ms" + (f", and imports {', '.join(unwanted)}" if unwanted else ""),
        checks=(
            Checked(Bound(15, "ms"), ms),
            Checked(Bound(0, "third parties imported"), len(unwanted)),
        ),
    )


async def _first_import(settings: Settings) -> Result:
    """Import the package or a peer, with all that it needs, where asyncio is there already."""
    modules = {
        OURS: "resilience_pipeline",
        **{
            name: module
            for name, module in _PEERS.items()
            if not peers.left_out and importlib.util.find_spec(module.partition(".")[0])
        },
    }
    taken: dict[str, list[float]] = {name: [] for name in modules}
    with TemporaryDirectory() as bytecode:
        for _ in range(1 if settings.quick else 8):
            for name, module in modules.items():
                taken[name].append((await _probe(bytecode, "asyncio", module))[0])
    # The first time compiles; the least of a few is what it takes without the machine's other work.
    ns = {name: min(samples) * 1e6 for name, samples in taken.items()}
    return Result(cost=f"{ns[OURS] / 1e6:.1f} ms", ns=ns)


def _building() -> Mapping[str, Loop]:
    return {
        OURS: _repeat(stack),
        BY_HAND: _repeat(stack_by_hand),
        **{
            name: _repeat(partial(peer, work))
            for name, peer in peers.installed(peer_stacks.STACK).items()
        },
    }


def _repeat(make: Callable[[], object]) -> Loop:
    async def loop(count: int) -> None:
        for _ in range(count):
            make()

    return loop


ROWS = (
    call_row("building the stack of four", bare=BARE, contenders=_building),
    Row("import resilience_pipeline", _import),
    Row("import it with all that it needs, asyncio there", _first_import),
)
