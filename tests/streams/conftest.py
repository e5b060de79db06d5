"""Every test of streams runs three times: on asyncio, on trio, and on asyncio with owner tasks.

On asyncio the consumer's task runs the source. Where two sources race it can't, so that the same has to hold with a task
that owns the source, as always on trio.
"""

from __future__ import annotations

import pytest

from resilience_pipeline.runtime._asyncio import AsyncioRuntime
from support.streaming import MODES


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The event loop, and who runs sources there."""
    name: str = request.param
    if name == "asyncio+owner":
        monkeypatch.setattr(AsyncioRuntime, "owns_sources", True)
    return name


@pytest.fixture
def anyio_backend(mode: str) -> str:
    return mode.partition("+")[0]
