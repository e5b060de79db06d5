"""Callbacks that tests of the core run through pipelines, strategies that watch, and a way to wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, NoReturn, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from resilience_pipeline import ResilienceContext, ResiliencePipelineBuilder
from resilience_pipeline.strategies import Handler, Site, Strategy

T = TypeVar("T")

B = ResiliencePipelineBuilder


class BoomError(ConnectionError):
    """What `boom` raises; a class of Python's own making, so that it can be weakly referenced."""


async def ok() -> int:
    return 1


async def boom() -> NoReturn:
    raise BoomError("boom")


async def hang() -> NoReturn:
    await anyio.sleep_forever()
    raise AssertionError


async def echo(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


class Calls(Generic[T]):
    """A coroutine function that counts its calls and gives `results` in turn, the last one for ever.

    An exception among the results is raised.
    """

    def __init__(self, *results: T | BaseException) -> None:
        self.count = 0
        self._results = results

    async def __call__(self, *_: object) -> T:
        result = self._results[min(self.count, len(self._results) - 1)]
        self.count += 1
        if isinstance(result, BaseException):
            raise result
        return result


class Watching(Strategy[Any]):
    """A strategy of one's own that notes when it is passed inwards and outwards."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.sites: list[Site] = []
        self._log = log

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        self.sites.append(site)

        async def handle(context: ResilienceContext) -> Any:
            self._log.append(f">{self.name}")
            try:
                return await next(context)
            finally:
                self._log.append(f"<{self.name}")

        return handle


async def tick(turns: int = 20) -> None:
    """Let other tasks run until each that can has come to where it waits."""
    for _ in range(turns):
        await checkpoint()


async def tick_until(condition: Callable[[], object], turns: int = 500) -> None:
    """Let other tasks run until something holds; fail if it never does."""
    for _ in range(turns):
        if condition():
            return
        await checkpoint()
    raise AssertionError(f"still not: {condition}")


@asynccontextmanager
async def running(fn: Callable[..., Any], *args: Any) -> AsyncIterator[anyio.CancelScope]:
    """Run `fn(*args)` in a task beside the block, from its first wait on.

    What the block gets cancels the task alone; at the end of the block it is cancelled anyway.
    """
    scope = anyio.CancelScope()

    async def run() -> None:
        with scope:
            await fn(*args)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await tick()
        yield scope
        scope.cancel()
