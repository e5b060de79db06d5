"""anyio's cancel scopes on asyncio: a wake-up that meets a cancellation does not hide it."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio._backends import _asyncio as backend

from resilience_pipeline.runtime._asyncio import AsyncioRuntime


async def woken_and_cancelled(scope: anyio.CancelScope) -> None:
    """Wait in a scope that is cancelled in the same turn in which the waiter is woken."""
    waiter = AsyncioRuntime().waiter()

    def both() -> None:
        waiter.wake()
        scope.cancel()

    asyncio.get_running_loop().call_soon(both)
    await waiter.wait()


@pytest.mark.asyncio
async def test_a_cancellation_together_with_the_wake_up_comes_out() -> None:
    """Whoever was woken must not go on as if it had not been cancelled."""
    with anyio.CancelScope() as scope:
        await woken_and_cancelled(scope)
        pytest.fail("it went on")
    assert scope.cancelled_caught


@pytest.mark.asyncio
async def test_it_comes_out_of_a_scope_further_out() -> None:
    """The scope that is cancelled need not be the innermost."""
    with anyio.CancelScope() as scope:
        with anyio.CancelScope():
            await woken_and_cancelled(scope)
        pytest.fail("it went on")
    assert scope.cancelled_caught


@pytest.mark.asyncio
async def test_it_comes_out_also_where_scopes_are_kept_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another version of anyio may keep them otherwise: then it is asked each time."""
    asked: list[int] = []

    async def ask() -> None:
        asked.append(1)

    monkeypatch.setattr(anyio.lowlevel, "checkpoint_if_cancelled", ask)
    monkeypatch.delattr(backend, "_task_states")
    waiter = AsyncioRuntime().waiter()
    waiter.wake()
    await waiter.wait()
    assert asked == [1]


@pytest.mark.asyncio
async def test_a_task_that_has_left_its_scopes_asks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To ask costs as much as dozens of calls."""

    def ask() -> Any:
        pytest.fail("asked")

    monkeypatch.setattr(anyio.lowlevel, "checkpoint_if_cancelled", ask)
    with anyio.CancelScope():
        await asyncio.sleep(0)
    waiter = AsyncioRuntime().waiter()
    waiter.wake()
    assert await waiter.wait()
