"""Each await is a place where the consumer may be cancelled, or the stream closed by another task.

A scene in which every step waits for one turn of the loop is played again and again, each time given up one turn later,
until it comes to its end by itself. Wherever that was: all sources are closed, the pipeline's only permit is back, no
task and no cancellation request is left.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import CircuitBreakerControl, ResilienceStream
from support.streaming import MODES, B, Running, Sources, drain, tick

pytestmark = pytest.mark.anyio

#: More turns than any scene takes.
LAST_TURN = 400


class Ledger:
    """How many sources have been opened, and how many closings begun."""

    def __init__(self) -> None:
        self.opened = 0
        self.closings = 0
        self.attempts = 0


class Iterator:
    def __init__(self, ledger: Ledger, script: list[Any]) -> None:
        self._ledger = ledger
        self._script = iter(script)

    def __aiter__(self) -> Iterator:
        self._ledger.opened += 1
        return self

    async def __anext__(self) -> Any:
        await checkpoint()
        for item in self._script:
            if item is OSError:
                raise OSError
            return item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._ledger.closings += 1
        await checkpoint()


class Manager:
    def __init__(self, ledger: Ledger, script: list[Any]) -> None:
        self._ledger = ledger
        self._script = script

    async def __aenter__(self) -> Iterator:
        await checkpoint()
        self._ledger.opened += 1
        return Iterator(self._ledger, self._script)

    async def __aexit__(self, *_: object) -> None:
        self._ledger.closings += 1
        await checkpoint()


async def generator(ledger: Ledger, script: list[Any]) -> AsyncIterator[Any]:
    ledger.opened += 1
    try:
        for item in script:
            await checkpoint()
            if item is OSError:
                raise OSError
            yield item
    finally:
        ledger.closings += 1
        await checkpoint()


async def grouped(ledger: Ledger, script: list[Any]) -> AsyncIterator[Any]:
    ledger.opened += 1
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
        ledger.closings += 1


KINDS: dict[str, Callable[[Ledger, list[Any]], Any]] = {
    "iterator": Iterator,
    "manager": Manager,
    "generator": generator,
    "task group": grouped,
}
#: What the attempts play, in turn. A first chunk "bad" is handled as a result.
SCENES: dict[str, list[list[Any]]] = {
    "good": [["a", "b"]],
    "empty": [[]],
    "fails, then good": [[OSError], ["a", "b"]],
    "discarded, then good": [["bad", "more"], ["a", "b"]],
    "fails late": [["a", OSError]],
    "replaced": [[OSError], [OSError]],
}


async def is_handled(event: Any) -> bool:
    await checkpoint()
    return not event.outcome.ok or event.outcome.unwrap() == "bad"


async def wait_a_turn(_: object) -> None:
    await checkpoint()


class Scene:
    def __init__(self, kind: str, name: str) -> None:
        self.ledger = Ledger()
        self.control = CircuitBreakerControl()
        self._make = KINDS[kind]
        self._scripts = SCENES[name]
        self.pipeline = (
            B()
            .add_fallback(self._substitute, should_handle=is_handled, on_fallback=wait_a_turn)
            .add_timeout("1h")
            .add_retry(
                max_retry_attempts=1, delay=0, should_handle=is_handled, on_retry=wait_a_turn
            )
            .add_circuit_breaker(should_handle=is_handled, control=self.control)
            .add_concurrency_limiter(1)
            .add_timeout("1h")
            .build()
        )

    async def _substitute(self, _: object) -> Any:
        await checkpoint()
        return self._make(self.ledger, ["spare"])

    async def _connect(self) -> Any:
        await checkpoint()
        script = self._scripts[min(self.ledger.attempts, len(self._scripts) - 1)]
        self.ledger.attempts += 1
        return self._make(self.ledger, script)

    def stream(self) -> ResilienceStream[Any]:
        return self.pipeline.execute_stream(self._connect)

    async def check(self) -> None:
        expected = self.ledger.opened
        assert self.ledger.closings == expected
        assert self.control.state == "closed"
        assert await drain(self.pipeline.execute_stream(Sources(["again"]))) == ["again"]


async def read(stream: ResilienceStream[Any], got: list[Any]) -> str:
    async with stream:
        try:
            async for chunk in stream:
                got.append(chunk)
                await checkpoint()
        except (OSError, ExceptionGroup):
            return "failed late"
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
        scene = Scene(kind, name)
        async with anyio.create_task_group() as tasks:
            running = Running(read, scene.stream(), [])
            tasks.start_soon(running)
            await tick(turn)
            if ended := running.done:
                assert running.value in {"ended", "failed late"}
            else:
                running.cancel(how)
        assert running.done
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
        scene = Scene(kind, name)
        stream = scene.stream()
        async with anyio.create_task_group() as tasks:
            running = Running(read, stream, [])
            tasks.start_soon(running)
            await tick(turn)
            ended = running.done
            with suppress(ExceptionGroup):  # of a group that was ending with an error already
                await stream.aclose()
            assert scene.ledger.closings == scene.ledger.opened
        assert (running.error, running.cancelled, running.cancelling) == (None, False, 0)
        assert running.value in {"ended", "failed late"}
        await scene.check()
        if ended:
            return
    pytest.fail(f"not over after {LAST_TURN} turns")


@pytest.mark.parametrize(("mode", "kind"), PLACES, indirect=["mode"])
async def test_cancelled_and_closed_at_once_at_any_await(kind: str) -> None:
    """Design, rule 5: the caller's cancellation wins, and nothing of either is left."""
    for turn in range(1, LAST_TURN):
        scene = Scene(kind, "fails, then good")
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
