"""Each await of a stream that is being resumed is a place where it may be given up.

As in `test_stream_every_await`: a scene in which every step waits for one turn of the loop is given up one turn later each
time. Wherever that was: all sources are closed, never were two open at once, the permit held outside is back, no task and
no cancellation request is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import ResilienceStream, ResumeError, RetryResumeEvent
from support.streaming import MODES, B, Running, Sources, drain, tick

pytestmark = pytest.mark.anyio

#: More turns than any scene takes.
LAST_TURN = 500


class Ledger:
    """How many sources are open, and how many there were at most."""

    def __init__(self) -> None:
        self.open = 0
        self.peak = 0
        self.opened = 0

    def opening(self) -> None:
        self.open += 1
        self.opened += 1
        self.peak = max(self.peak, self.open)

    async def closing(self) -> None:
        self.open -= 1
        await checkpoint()


async def generator(ledger: Ledger, script: list[Any]) -> AsyncIterator[Any]:
    ledger.opening()
    try:
        for item in script:
            await checkpoint()
            if item is OSError:
                raise OSError
            yield item
    finally:
        await ledger.closing()


class Iterator:
    def __init__(self, ledger: Ledger, script: list[Any]) -> None:
        self._ledger = ledger
        self._script = iter(script)

    def __aiter__(self) -> Iterator:
        self._ledger.opening()
        return self

    async def __anext__(self) -> Any:
        await checkpoint()
        for item in self._script:
            if item is OSError:
                raise OSError
            return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        await self._ledger.closing()


@asynccontextmanager
async def manager(ledger: Ledger, script: list[Any]) -> AsyncIterator[Any]:
    await checkpoint()
    ledger.opening()
    try:
        yield generator(Ledger(), script)
    finally:
        await ledger.closing()


async def grouped(ledger: Ledger, script: list[Any]) -> AsyncIterator[Any]:
    ledger.opening()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            for item in script:
                await checkpoint()
                if item is OSError:
                    raise OSError
                yield item
            tasks.cancel_scope.cancel()
    finally:
        ledger.open -= 1


KINDS: dict[str, Callable[[Ledger, list[Any]], Any]] = {
    "generator": generator,
    "iterator": Iterator,
    "manager": manager,
    "task group": grouped,
}
#: What the runs play in turn, and what of it arrives in the end.
SCENES: dict[str, tuple[list[list[Any]], str, str]] = {
    "by position": ([["a", "b", OSError], ["a", "b", "c"]], "abc", "ended"),
    "short": ([["a", "b", OSError], ["a", OSError], ["a", "b", "c"]], "abc", "ended"),
    "other": ([["a", "b", OSError], ["a", "x", "c"]], "ab", "differs"),
    "gives up": ([["a", OSError]], "a", "fails"),
    "by a function": ([["a", OSError], ["b", OSError], [OSError], ["c"]], "abc", "ended"),
}


class Scene:
    def __init__(self, kind: str, name: str) -> None:
        self.ledger = Ledger()
        self._scripts, self.whole, self.ending = SCENES[name]
        self._make = KINDS[kind]
        self.runs = 0
        self.pipeline: Any = (
            B()
            .add_timeout("1h")
            .add_concurrency_limiter(1, hold_streams=True)
            .add_retry(
                delay=0,
                resumable=self._resume if name == "by a function" else True,
                on_retry=self._wait_a_turn,
            )
            .add_concurrency_limiter(1, hold_streams=True)
            .add_timeout("1h")
            .build()
        )

    async def _wait_a_turn(self, _: object) -> None:
        await checkpoint()

    async def _resume(self, event: RetryResumeEvent) -> Any:
        await checkpoint()
        return self.connect

    async def connect(self) -> Any:
        await checkpoint()
        script = self._scripts[min(self.runs, len(self._scripts) - 1)]
        self.runs += 1
        return self._make(self.ledger, script)

    def stream(self) -> ResilienceStream[Any]:
        stream: ResilienceStream[Any] = self.pipeline.execute_stream(self.connect)
        return stream

    async def check(self) -> None:
        assert self.ledger.open == 0
        assert self.ledger.peak <= 1
        assert await drain(self.pipeline.execute_stream(Sources(["again"]))) == ["again"]


async def read(stream: ResilienceStream[Any], got: list[Any]) -> str:
    try:
        async with stream:
            async for chunk in stream:
                got.append(chunk)
                await checkpoint()
    except ResumeError:
        return "differs"
    except (OSError, ExceptionGroup):
        return "fails"
    await tick(2)
    return "ended"


CANCELS = [
    (mode, how) for mode in MODES for how in (["scope"] if mode == "trio" else ["scope", "task"])
]


@pytest.mark.parametrize(("mode", "how"), CANCELS, indirect=["mode"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCENES)
async def test_cancelled_at_any_await(kind: str, name: str, how: str) -> None:
    """Design, rules 2 and 4: whatever was held is released, whatever was opened is closed."""
    for turn in range(1, LAST_TURN):
        scene, got = Scene(kind, name), list[Any]()
        async with anyio.create_task_group() as tasks:
            running = Running(read, scene.stream(), got)
            tasks.start_soon(running)
            await tick(turn)
            if ended := running.done:
                assert (running.value, "".join(got)) == (scene.ending, scene.whole)
            else:
                running.cancel(how)
        assert running.done
        assert scene.whole.startswith("".join(got))
        assert running.cancelling == (0 if ended or how == "scope" else 1)
        await scene.check()
        if ended:
            return
    pytest.fail(f"not over after {LAST_TURN} turns")


# Where the consumer's own task runs what holds a scope, no other may close it while the consumer is in its loop.
PLACES = [
    (mode, kind) for mode in MODES for kind in KINDS if (mode, kind) != ("asyncio", "task group")
]


@pytest.mark.parametrize(("mode", "kind"), PLACES, indirect=["mode"])
@pytest.mark.parametrize("name", SCENES)
async def test_closed_by_another_task_at_any_await(kind: str, name: str) -> None:
    """Streams: wherever the reader is, its loop ends cleanly and the source is closed when `aclose` returns."""
    for turn in range(1, LAST_TURN):
        scene, got = Scene(kind, name), list[Any]()
        stream = scene.stream()
        async with anyio.create_task_group() as tasks:
            running = Running(read, stream, got)
            tasks.start_soon(running)
            await tick(turn)
            ended = running.done
            with suppress(ExceptionGroup):  # of a group that was ending with an error already
                await stream.aclose()
            assert scene.ledger.open == 0
        assert (running.error, running.cancelled, running.cancelling) == (None, False, 0)
        assert running.value in {"ended", scene.ending}
        assert scene.whole.startswith("".join(got))
        await scene.check()
        if ended:
            return
    pytest.fail(f"not over after {LAST_TURN} turns")


@pytest.mark.parametrize(("mode", "kind"), PLACES, indirect=["mode"])
@pytest.mark.parametrize("name", ["by position", "by a function"])
async def test_cancelled_and_closed_at_once_at_any_await(kind: str, name: str) -> None:
    """Design, rule 5: the caller's cancellation wins, and nothing of either is left."""
    for turn in range(1, LAST_TURN):
        scene = Scene(kind, name)
        stream = scene.stream()
        async with anyio.create_task_group() as tasks:
            running = Running(read, stream, [])
            tasks.start_soon(running)
            await tick(turn)
            if not (ended := running.done):
                running.cancel()
            await stream.aclose()
        assert running.error is None
        assert running.cancelling == 0
        await scene.check()
        if ended:
            return
    pytest.fail(f"not over after {LAST_TURN} turns")
