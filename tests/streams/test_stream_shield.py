"""What the library closes itself is closed out of reach of the caller's cancellation, for `close_timeout`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest

from resilience_pipeline import ResiliencePipelineBuilder, TimeoutRejectedError
from resilience_pipeline.runtime import current_runtime
from resilience_pipeline.testing import VirtualClock
from support.streaming import (
    MODES,
    B,
    Closable,
    Managed,
    Running,
    Sources,
    drain,
    drain_within,
    take_and_wait,
    tick,
)

pytestmark = pytest.mark.anyio

CANCELS = [
    (mode, how) for mode in MODES for how in (["scope"] if mode == "trio" else ["scope", "task"])
]
each_cancel = pytest.mark.parametrize(("mode", "how"), CANCELS, indirect=["mode"])

each_native_cancel = pytest.mark.parametrize(
    ("mode", "how"),
    [cancel for cancel in CANCELS if cancel[0] == "trio" or cancel[1] == "task"],
    indirect=["mode"],
)

Closing = Callable[[], Awaitable[object]]


async def suspended(closing: Closing, log: list[str]) -> AsyncIterator[str]:
    """A generator that is discarded after its first chunk."""
    try:
        yield "bad"
    finally:
        log.append("closing")
        await closing()
        log.append("closed")


class Discarded:
    """A source that the library has to close, and how far that has got."""

    def __init__(self, kind: str, closing: Closing) -> None:
        self.log: list[str] = []

        async def logged() -> None:
            self.log.append("closing")
            await closing()
            self.log.append("closed")

        self.source: Any
        if kind == "iterator":
            self.source = Closable(OSError("early"), closing=logged)
        elif kind == "manager":
            self.source = Managed(Sources([OSError("early")])(), leaving=logged)
        else:
            self.source = suspended(closing, self.log)
        self.calls = 0

    def connect(self) -> Any:
        self.calls += 1
        return self.source if self.calls == 1 else Sources(["ok"])()


def retrying(builder: ResiliencePipelineBuilder[Any]) -> Any:
    def is_bad(event: Any) -> bool:
        return not event.outcome.ok or event.outcome.unwrap() == "bad"

    return builder.add_retry(delay=0, should_handle=is_bad).build()


KINDS = ["iterator", "manager", "generator"]


@each_cancel
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancellation_waits_until_the_discarded_source_is_closed(
    kind: str, how: str
) -> None:
    """Streams: failed and discarded sources are closed shielded from the caller's cancellation."""
    release = anyio.Event()
    discarded = Discarded(kind, release.wait)
    stream = retrying(B()).execute_stream(discarded.connect)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, stream)
        tasks.start_soon(running)
        await tick()
        assert discarded.log == ["closing"]
        running.cancel(how)
        await tick()
        assert not running.done
        release.set()
        await tick()
        assert running.cancelled
        assert discarded.log == ["closing", "closed"]
    assert discarded.calls == 1


@each_cancel
@pytest.mark.parametrize("kind", ["iterator", "manager"])
async def test_so_does_one_after_the_first_chunk(kind: str, how: str) -> None:
    """Streams: a source that fails later is a failed source too."""
    release = anyio.Event()
    source: Any = (
        Closable(1, OSError("late"), closing=release.wait)
        if kind == "iterator"
        else Managed(Sources([1, OSError("late")])(), leaving=release.wait)
    )
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, B().build().execute_stream(lambda: source), [])
        tasks.start_soon(running)
        await tick()
        running.cancel(how)
        await tick()
        assert not running.done
        release.set()
        await tick()
        assert running.cancelled
    assert (source.closed if kind == "iterator" else source.left) == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_closing_what_is_discarded_takes_close_timeout_at_the_most(kind: str) -> None:
    """Streams: for at most the builder's `close_timeout`; then the retry goes on."""
    clock = VirtualClock(autojump=True)
    discarded = Discarded(kind, anyio.sleep_forever)
    pipeline = retrying(B(clock=clock, close_timeout=3))
    assert await drain(pipeline.execute_stream(discarded.connect)) == ["ok"]
    assert clock.now() == 3.0
    assert discarded.log == ["closing"]


@pytest.mark.parametrize("kind", KINDS)
async def test_close_timeout_is_five_seconds(kind: str) -> None:
    """Building: `close_timeout=5.0` is the default."""
    clock = VirtualClock(autojump=True)
    discarded = Discarded(kind, anyio.sleep_forever)
    assert await drain(retrying(B(clock=clock)).execute_stream(discarded.connect)) == ["ok"]
    assert clock.now() == 5.0


@each_native_cancel  # a cancelled scope of anyio keeps asyncio's loop busy: a virtual clock would stand
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancellation_waits_for_close_timeout_at_the_most(kind: str, how: str) -> None:
    """Streams: closing that hangs holds the caller's cancellation back no longer than that."""
    clock = VirtualClock()
    discarded = Discarded(kind, anyio.sleep_forever)
    stream = retrying(B(clock=clock)).execute_stream(discarded.connect)
    async with anyio.create_task_group() as tasks:
        running = Running(drain_within, stream)
        tasks.start_soon(running)
        await tick()
        running.cancel(how)
        await clock.advance(4.9)
        assert not running.done
        await clock.advance(0.2)
        await tick()
        assert running.cancelled
    assert (discarded.log, discarded.calls) == (["closing"], 1)


async def test_a_time_limit_that_passes_meanwhile_comes_out_afterwards() -> None:
    """Streams: a time-out's own cancellation does not cut the closing either."""
    clock = VirtualClock(autojump=True)

    async def fail_after_a_second() -> Any:
        await clock.sleep(1)
        raise OSError

    async def slowly() -> None:
        await clock.sleep(3)

    closable = Closable(closing=slowly)
    closable.__class__ = type(
        "Failing", (Closable,), {"__anext__": lambda _: fail_after_a_second()}
    )
    pipeline = B(clock=clock).add_timeout(2).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(lambda: closable))
    assert closable.closed == 1
    assert clock.now() == 4.0


# ---- the consumer's own close -----------------------------------------------------------------


@each_cancel
@pytest.mark.parametrize("kind", ["iterator", "manager", "generator"])
async def test_the_consumers_own_close_is_not_shielded(kind: str, how: str) -> None:
    """Streams, in small print: it is not shielded from the consumer's cancellation, which reaches the source."""
    seen: list[str] = []

    async def closing() -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            seen.append("cancelled")
            raise

    source: Any = {
        "iterator": lambda: Closable("bad", "more", closing=closing),
        "manager": lambda: Managed(Sources(["bad", "more"])(), leaving=closing),
        "generator": lambda: suspended(closing, []),
    }[kind]

    async def read() -> None:
        async with B().build().execute_stream(source) as stream:
            await anext(stream)

    async with anyio.create_task_group() as tasks:
        running = Running(read)
        tasks.start_soon(running)
        await tick()
        assert seen == []
        running.cancel(how)
        await tick()
        assert running.cancelled
        assert seen == ["cancelled"]


@each_cancel
async def test_the_close_at_the_end_is_not_shielded(how: str) -> None:
    """Streams, in small print: the end is the consumer's own close too."""
    manager = Managed(Sources([1])(), leaving=anyio.sleep_forever)
    async with anyio.create_task_group() as tasks:
        running = Running(take_and_wait, B().build().execute_stream(lambda: manager), [])
        tasks.start_soon(running)
        await tick()
        running.cancel(how)
        await tick()
        assert running.cancelled


async def test_nothing_of_ours_is_awaited_before_the_consumers_own_close() -> None:
    """Streams: on the consumer's own close nothing of ours is awaited before the source's close."""
    log: list[str] = []
    closable = Closable(1, 2, closing=lambda: _note(log, "closed"))
    stream = B().build().execute_stream(lambda: closable)
    await anext(stream)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await stream.aclose()
    assert log == ["closed"]


async def _note(log: list[str], what: str) -> None:
    log.append(what)


# ---- the mechanism ----------------------------------------------------------------------------


async def test_a_shield_gives_the_result_when_nothing_happens() -> None:
    async def work() -> str:
        await tick(3)
        return "done"

    assert await current_runtime().shielded(work, 5.0) == "done"


async def test_a_shield_runs_in_the_same_task() -> None:
    """Runtime: run `fn()` in this very task."""

    async def work() -> int:
        await tick(1)
        return anyio.get_current_task().id

    assert await current_runtime().shielded(work, 5.0) == anyio.get_current_task().id


async def test_an_error_inside_a_shield_comes_out() -> None:
    async def work() -> None:
        await tick(1)
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        await current_runtime().shielded(work, 5.0)


async def test_a_time_limit_of_the_closing_itself_works_inside_a_shield() -> None:
    """Runtime: the inside's own cancellations are its own."""

    async def work() -> str:
        with anyio.move_on_after(0):
            await anyio.sleep_forever()
        return "in time"

    assert await current_runtime().shielded(work, 5.0) == "in time"


async def test_a_task_group_of_the_closing_itself_works_inside_a_shield() -> None:
    """Runtime: so are those of a task group of which a child fails."""

    async def child() -> None:
        await tick(2)
        raise KeyError("child")

    async def work() -> str:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child)
                await anyio.sleep_forever()
        except ExceptionGroup:
            return "child failed"
        return "not reached"

    assert await current_runtime().shielded(work, 5.0) == "child failed"


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_asyncios_own_scopes_work_inside_a_shield() -> None:
    """Runtime: `asyncio.timeout` and `asyncio.TaskGroup` cancel the task they are in."""

    async def child() -> None:
        await tick(2)
        raise KeyError("child")

    async def work() -> list[str]:
        seen: list[str] = []
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timeout")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(child())
                await asyncio.Event().wait()
        except ExceptionGroup:
            seen.append("group")
        return seen

    assert await current_runtime().shielded(work, 5.0) == ["timeout", "group"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@each_native_cancel  # a cancelled scope of anyio reaches into what is started within it
async def test_a_cancellation_is_held_back_while_the_closing_uses_scopes_of_its_own(
    how: str,
) -> None:
    """Runtime: the caller's cancellation is told from the closing's own."""
    release = anyio.Event()

    async def work() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release.wait)
            with anyio.move_on_after(0):
                await anyio.sleep_forever()
        finished.append(True)

    finished: list[bool] = []
    async with anyio.create_task_group() as tasks:
        running = Running(lambda: current_runtime().shielded(work, 5.0))
        tasks.start_soon(running)
        await tick()
        running.cancel(how)
        await tick()
        assert not running.done
        release.set()
        await tick()
        assert running.cancelled
    assert finished == [True]


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_a_cancellation_asked_for_before_a_shield_comes_out_after_it() -> None:
    """Runtime: a cancellation that is due at the next wait is the caller's, and held back."""
    finished: list[bool] = []

    async def work() -> None:
        await tick(3)
        finished.append(True)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel("by the caller")
        await current_runtime().shielded(work, 5.0)

    with pytest.raises(asyncio.CancelledError, match="by the caller"):
        await asyncio.create_task(run())
    assert finished == [True]


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_a_cancellation_the_closing_asks_of_itself_is_delivered() -> None:
    """Runtime: `current_task().cancel()` within a shield hits what is within it."""
    seen: list[str] = []

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            seen.append("cancelled")
            task.uncancel()

    await current_runtime().shielded(work, 5.0)
    assert seen == ["cancelled"]


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_anyios_checkpoints_do_not_spin_inside_a_shield() -> None:
    """Runtime: anyio waits for the cancellation of a cancelled scope turn by turn; it gets it."""
    lock = anyio.Lock()
    seen: list[str] = []

    async def work() -> None:
        await release.wait()
        try:
            async with lock:
                seen.append("locked")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    release = anyio.Event()
    async with anyio.create_task_group() as tasks:
        running = Running(lambda: current_runtime().shielded(work, 3600.0))
        tasks.start_soon(running)
        await tick()
        running.cancel()
        await tick()
        assert not running.done
        release.set()
        await tick(500)
        assert running.cancelled
    assert len(seen) == 1


async def test_a_shield_that_expires_raises_a_time_out() -> None:
    """Runtime: after `timeout` seconds what runs is cancelled once."""
    clock = VirtualClock(autojump=True)
    seen: list[str] = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            seen.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        await current_runtime(clock).shielded(work, 5.0)
    assert (seen, clock.now()) == (["cancelled"], 5.0)


@pytest.mark.parametrize("mode", ["asyncio"], indirect=True)
async def test_shields_nest() -> None:
    """Runtime: a closing may hold something that is closed shielded in its turn."""
    release = anyio.Event()
    seen: list[str] = []

    async def inner() -> None:
        await release.wait()
        seen.append("inner")

    async def outer() -> None:
        await current_runtime().shielded(inner, 5.0)
        await tick(3)
        seen.append("outer")

    task = asyncio.create_task(current_runtime().shielded(outer, 5.0))
    await tick(3)
    task.cancel()
    await tick(3)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["inner", "outer"]
