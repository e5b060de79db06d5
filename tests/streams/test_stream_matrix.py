"""Sources that hold scopes open across their yields, under every strategy, left in every way (case ST-05)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import ResiliencePipeline, ResilienceStream
from support.streaming import (
    HANG,
    MODES,
    B,
    Running,
    Sources,
    drain,
    leaves,
    take_and_wait,
    tick,
)

pytestmark = pytest.mark.anyio

CHUNKS = ["a", "b", "c"]


class Kind:
    """A kind of source: wraps the plain one, so that something is open while that yields."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.in_background = 0

    async def background(self) -> None:
        self.in_background += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.in_background -= 1

    async def plain(self) -> AsyncIterator[str]:
        async with aclosing(self.sources()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def anyio_task_group(self) -> AsyncIterator[str]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.background)
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk
            tasks.cancel_scope.cancel()

    async def anyio_fail_after(self) -> AsyncIterator[str]:
        with anyio.fail_after(3600):
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def anyio_both(self) -> AsyncIterator[str]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.background)
            with anyio.move_on_after(3600):
                async with aclosing(self.sources()) as chunks:
                    async for chunk in chunks:
                        yield chunk
            tasks.cancel_scope.cancel()

    async def asyncio_timeout(self) -> AsyncIterator[str]:
        async with asyncio.timeout(3600):
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def asyncio_task_group(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.background())
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk
            task.cancel()

    async def trio_nursery(self) -> AsyncIterator[str]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.background)
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk
            nursery.cancel_scope.cancel()

    async def trio_fail_after(self) -> AsyncIterator[str]:
        with trio.fail_after(3600):
            async with aclosing(self.sources()) as chunks:
                async for chunk in chunks:
                    yield chunk

    @asynccontextmanager
    async def manager(self) -> AsyncIterator[AsyncIterator[str]]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.background)
            yield self.sources()
            tasks.cancel_scope.cancel()

    @asynccontextmanager
    async def manager_with_scope(self) -> AsyncIterator[AsyncIterator[str]]:
        with anyio.fail_after(3600):
            yield self.sources()

    def holder(self) -> Holder:
        return Holder(self)


class Holder:
    """No generator, but it holds a task group open from its first chunk until it is closed."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._chunks = kind.sources()
        self._tasks: Any = None

    def __aiter__(self) -> Holder:
        return self

    async def __anext__(self) -> str:
        if self._tasks is None:
            self._tasks = await anyio.create_task_group().__aenter__()
            self._tasks.start_soon(self._kind.background)
        return await anext(self._chunks)

    async def aclose(self) -> None:
        await self._chunks.aclose()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()
            await self._tasks.__aexit__(None, None, None)


ON_EVERY_LOOP = [
    "plain",
    "anyio_task_group",
    "anyio_fail_after",
    "anyio_both",
    "manager",
    "manager_with_scope",
    "holder",
]
KINDS = {
    "asyncio": [*ON_EVERY_LOOP, "asyncio_timeout", "asyncio_task_group"],
    "trio": [*ON_EVERY_LOOP, "trio_nursery", "trio_fail_after"],
}
CANCELS = {"asyncio": ["scope", "task"], "trio": ["scope"]}


PLACES = [(mode, kind) for mode in MODES for kind in KINDS[mode.partition("+")[0]]]
each_kind = pytest.mark.parametrize(("mode", "kind"), PLACES, indirect=["mode"])
each_kind_and_cancel = pytest.mark.parametrize(
    ("mode", "kind", "how"),
    [(mode, kind, how) for mode, kind in PLACES for how in CANCELS[mode.partition("+")[0]]],
    indirect=["mode"],
)


PIPELINES: dict[str, Callable[[], ResiliencePipeline[Any]]] = {
    "nothing": lambda: B().build(),
    "retry": lambda: B().add_retry(max_retry_attempts=2, delay=0).build(),
    "timeout": lambda: B().add_timeout("1h").build(),
    "breaker": lambda: B().add_circuit_breaker().build(),
    "limiter": lambda: B().add_concurrency_limiter(1).build(),
    "fallback": lambda: B().add_fallback(fallback_value="spare").build(),
    "hedging": lambda: B().add_hedging(delay="1h").build(),
    "hedging raced": lambda: B().add_hedging(delay=0).build(),
    "all": lambda: (
        B()
        .add_fallback(fallback_value="spare")
        .add_timeout("2h")
        .add_retry(max_retry_attempts=2, delay=0)
        .add_hedging(delay="1h")
        .add_circuit_breaker()
        .add_concurrency_limiter(1)
        .add_timeout("1h")
        .build()
    ),
}
#: How many sources are opened when each of them fails before its first chunk.
ATTEMPTS = {"retry": 3, "hedging": 2, "hedging raced": 2, "all": 6}
WITH_FALLBACK = {"fallback", "all"}
#: Here a second source is opened beside the first one, which never gives anything.
RACED = {"hedging raced"}


class Scene:
    """One cell of the matrix, and what has to hold in each."""

    def __init__(self, kind: str, strategies: str, script: list[Any]) -> None:
        self.raced = strategies in RACED
        # Where no source gives a first chunk nobody wins: both play the script.
        wins = self.raced and isinstance(script[0], str)
        self.sources = Sources([HANG], script) if wins else Sources(script)
        #: How many are open at once; the second may come too late for one that fails at once.
        self.peaks = {1}
        if self.raced:
            self.peaks = {1, 2} if isinstance(script[0], Exception) else {2}
        self.kind = Kind(self.sources)
        self.strategies = strategies
        self.pipeline = PIPELINES[strategies]()
        self.factory = getattr(self.kind, kind)

    def stream(self) -> ResilienceStream[str]:
        return self.pipeline.execute_stream(self.factory)

    async def check(self, attempts: int = 1) -> None:
        """Every source is closed, by the task that opened it, and nothing of it runs on."""
        opened = max(attempts, 2) if self.raced else attempts
        assert (self.sources.opened, self.sources.closed) == (opened, opened)
        assert self.sources.peak in self.peaks
        if attempts == 1:
            assert len(self.sources.tasks) == opened
        assert self.kind.in_background == 0
        # The pipeline is as good as new: its only permit is back, its circuit closed.
        self.sources.scripts = (["again"],)
        assert await drain(self.stream()) == ["again"]


async def under_every_strategy(
    kind: str, script: list[Any], check: Callable[[Scene], Awaitable[int]]
) -> None:
    """Play a scene under each of the pipelines; it tells how many attempts there should have been."""
    for strategies in PIPELINES:
        fresh = [anyio.Event() if item is HANG else item for item in script]
        scene = Scene(kind, strategies, fresh)
        try:
            attempts = await check(scene)
            assert cancelling() == 0
            await scene.check(attempts)
        except BaseException as error:
            error.add_note(f"under {strategies}")
            raise


def cancelling() -> int:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return 0
    return 0 if task is None else task.cancelling()


@each_kind
async def test_read_to_its_end(kind: str) -> None:
    """Case ST-05: all chunks come, and the end closes the source."""

    async def check(scene: Scene) -> int:
        async with scene.stream() as stream:
            assert [chunk async for chunk in stream] == CHUNKS
            assert scene.sources.open == 0
        return 1

    await under_every_strategy(kind, CHUNKS, check)


@each_kind
async def test_left_by_break(kind: str) -> None:
    """Case ST-05: `async with` closes a source that was left early, before the block ends."""

    async def check(scene: Scene) -> int:
        async with scene.stream() as stream:
            async for chunk in stream:
                assert chunk == "a"
                assert scene.sources.open == 1
                break
        return 1

    await under_every_strategy(kind, CHUNKS, check)


@each_kind
async def test_left_by_aclose(kind: str) -> None:
    """Case ST-05: `aclose` closes it without `async with`."""

    async def check(scene: Scene) -> int:
        stream = scene.stream()
        assert [await anext(stream), await anext(stream)] == ["a", "b"]
        await stream.aclose()
        return 1

    await under_every_strategy(kind, CHUNKS, check)


@each_kind
async def test_an_error_in_the_loop(kind: str) -> None:
    """Case ST-03: the consumer's own error comes out, and the source is closed."""

    async def check(scene: Scene) -> int:
        async def read() -> None:
            async with scene.stream() as stream:
                async for _ in stream:
                    raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await read()
        return 1

    await under_every_strategy(kind, CHUNKS, check)


@each_kind
async def test_an_error_before_the_first_chunk(kind: str) -> None:
    """Case ST-17: each failed source is closed before the next is opened."""

    async def check(scene: Scene) -> int:
        if scene.strategies in WITH_FALLBACK:
            assert await drain(scene.stream()) == ["spare"]
        else:
            with pytest.raises((ConnectionError, ExceptionGroup)) as caught:
                await drain(scene.stream())
            assert [str(leaf) for leaf in leaves(caught.value)] == ["early"]
        return ATTEMPTS.get(scene.strategies, 1)

    await under_every_strategy(kind, [ConnectionError("early")], check)


@each_kind
async def test_an_error_after_the_first_chunk(kind: str) -> None:
    """Case ST-01: the error reaches the loop as the source raised it, and nothing is repeated."""

    async def check(scene: Scene) -> int:
        got: list[str] = []
        with pytest.raises((ConnectionError, ExceptionGroup)) as caught:
            await take_and_wait(scene.stream(), got)
        assert [str(leaf) for leaf in leaves(caught.value)] == ["late"]
        assert got == ["a"]
        return 1

    await under_every_strategy(kind, ["a", ConnectionError("late")], check)


@each_kind_and_cancel
@pytest.mark.parametrize("script", [[HANG], ["a", HANG]], ids=["first", "later"])
async def test_cancelled_while_a_chunk_is_awaited(kind: str, how: str, script: list[Any]) -> None:
    """Case ST-03: the cancellation comes out, the source is closed, nothing is tried again."""

    async def check(scene: Scene) -> int:
        got: list[str] = []
        async with anyio.create_task_group() as tasks:
            running = Running(take_and_wait, scene.stream(), got)
            tasks.start_soon(running)
            await tick()
            # Who waits for a first chunk has all who race for it, who has one has their winner.
            assert scene.sources.open == (2 if scene.raced and not got else 1)
            running.cancel(how)
            await tick()
            assert running.cancelled
            assert scene.sources.open == 0
        assert got == script[:-1]
        return 1

    await under_every_strategy(kind, script, check)


@each_kind_and_cancel
async def test_cancelled_in_the_loops_body(kind: str, how: str) -> None:
    """Case ST-03: leaving the block closes the source although the task is being cancelled."""

    async def check(scene: Scene) -> int:
        async def read() -> None:
            async with scene.stream() as stream:
                async for _ in stream:
                    await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            running = Running(read)
            tasks.start_soon(running)
            await tick()
            running.cancel(how)
            await tick()
            assert running.cancelled
            assert scene.sources.open == 0
        return 1

    await under_every_strategy(kind, CHUNKS, check)


@each_kind
@pytest.mark.parametrize("script", [[HANG], ["a", HANG]], ids=["first", "later"])
async def test_closed_by_another_task(kind: str, script: list[Any]) -> None:
    """The reader's loop ends cleanly, in its own task, with nothing of the interruption left."""

    async def check(scene: Scene) -> int:
        stream = scene.stream()

        async def read() -> list[str]:
            chunks = await drain(stream)
            await tick(2)
            return chunks

        async with anyio.create_task_group() as tasks:
            running = Running(read)
            tasks.start_soon(running)
            await tick()
            await stream.aclose()
            assert scene.sources.open == 0
            await tick()
            assert running.done
            assert running.error is None
            assert running.value == script[:-1]
            assert running.cancelling == 0
        return 1

    await under_every_strategy(kind, script, check)
