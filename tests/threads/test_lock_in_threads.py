"""The lock in threads: one for all loops and threads, held by what runs on, passed on exactly once."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import anyio.lowlevel
import pytest
import trio

from resilience_pipeline import (
    LockRejectedError,
    Rejected,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
)
from support.beside import LIMIT, PATIENCE, Beside, Gate, HandClock, let_go, see, until

B = ResiliencePipelineBuilder
FREE = "<ResilienceLock free>"


def ok() -> int:
    return 1


@pytest.fixture
def hand() -> HandClock:
    return HandClock()


@pytest.fixture
def gate(hand: HandClock) -> Iterator[Gate]:
    """What is inside when its limit passes; it is opened at the end, whatever came of the test."""
    one = Gate(clock=hand)
    yield one
    let_go(one)


@pytest.fixture
def _restless() -> Iterator[None]:
    """Have threads take turns after a few instructions: what can come between two steps does."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


class Bank:
    """Balances that are read, held for a moment, and written: two at a time would lose one."""

    def __init__(self) -> None:
        self.balances: dict[int, int] = dict.fromkeys(range(3), 0)

    def deposit(self, account: int) -> None:
        found = self.balances[account]
        for _ in range(3):
            threading.Event().wait(0)  # let another thread in
        self.balances[account] = found + 1

    async def deposit_in_turns(self, account: int) -> None:
        found = self.balances[account]
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        self.balances[account] = found + 1


def _run_all(*bodies: Callable[[], object]) -> None:
    for each in [Beside(body) for body in bodies]:
        each.result()


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize("keyed", [False, True])
def test_deposits_from_threads_and_loops_are_all_counted(keyed: bool) -> None:
    """LK-1, across threads, asyncio and trio at once: not one deposit is lost, by account or by one lock."""
    bank, lock = Bank(), ResilienceLock()
    key = (lambda context: context.operation_key) if keyed else None
    one, other = (B().add_lock(lock, key=key).build() for _ in range(2))
    accounts = [number % 3 for number in range(60)]

    def in_a_thread() -> None:
        for account in accounts:
            one.execute_sync(bank.deposit, account, operation_key=str(account))

    async def call(account: int) -> None:
        await other.execute(bank.deposit_in_turns, account, operation_key=str(account))

    async def in_asyncio() -> None:
        await asyncio.gather(*map(call, accounts))

    async def in_trio() -> None:
        async with trio.open_nursery() as nursery:
            for account in accounts:
                nursery.start_soon(call, account)

    _run_all(in_a_thread, in_a_thread, lambda: asyncio.run(in_asyncio()), lambda: trio.run(in_trio))
    assert bank.balances == dict.fromkeys(range(3), 4 * 20)
    assert repr(lock) == FREE


@pytest.mark.usefixtures("_restless")
def test_cancelled_waiters_in_loops_and_threads_lose_no_lock() -> None:
    """Hand-off races across threads: whoever is cancelled or out of time passes it on, once."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()
    hasty = B().add_lock(lock, max_wait=0.0005).build()
    inside = peak = 0

    def enter() -> None:
        nonlocal inside, peak
        inside += 1
        peak = max(peak, inside)

    def leave() -> None:
        nonlocal inside
        inside -= 1

    def call() -> None:
        enter()
        threading.Event().wait(0)
        leave()

    async def turn() -> None:
        enter()
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            leave()

    def in_a_thread() -> None:
        for _ in range(200):
            hasty.settle_sync(call)

    async def in_asyncio() -> None:
        async def one(number: int) -> None:
            task = asyncio.create_task(pipeline.execute(turn))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            if number % 2:
                task.cancel()
            await asyncio.wait([task])

        await asyncio.gather(*map(one, range(200)))

    _run_all(in_a_thread, in_a_thread, *[lambda: asyncio.run(in_asyncio())] * 2)
    assert (inside, peak) == (0, 1)
    assert repr(lock) == FREE


# ---- who is inside ----------------------------------------------------------------------------


def test_a_call_inside_passes_in_the_same_thread() -> None:
    """Reentrant by call chain: recursion through `execute_sync`."""
    pipeline = B().add_lock().build()

    def count_down(n: int) -> int:
        return 0 if n == 0 else 1 + pipeline.execute_sync(count_down, n - 1)

    assert pipeline.execute_sync(count_down, 5) == 5


def test_a_worker_thread_of_the_owner_is_inside(hand: HandClock) -> None:
    """Context variables are carried over: a call in a timed attempt is a call of the owner's."""
    lock = ResilienceLock()
    inner = B().add_lock(lock).build()
    pipeline = B(clock=hand).add_lock(lock).add_timeout(LIMIT).build()
    assert pipeline.execute_sync(inner.execute_sync, ok) == 1
    assert repr(lock) == FREE


def test_a_thread_of_ones_own_is_not_inside() -> None:
    """A plain thread inherits no context variables before 3.14: it queues like anyone."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()
    started: list[Beside[int]] = []

    def outer() -> None:
        started.append(Beside(pipeline.execute_sync, ok))
        until(lambda: "1 waiting" in repr(lock))

    if getattr(sys.flags, "thread_inherit_context", False):
        pytest.skip("threads inherit context variables here")
    pipeline.execute_sync(outer)
    assert started[0].result() == 1


@pytest.mark.asyncio
async def test_a_thread_that_an_owning_task_runs_is_inside() -> None:
    """`asyncio.to_thread` carries the variables: its synchronous calls pass."""
    pipeline = B().add_lock().build()

    async def outer() -> int:
        return await asyncio.to_thread(pipeline.execute_sync, ok)

    assert await pipeline.execute(outer) == 1


# ---- calls that run on ------------------------------------------------------------------------


def test_a_call_that_timed_out_inside_keeps_the_lock_until_it_ends(
    hand: HandClock, gate: Gate
) -> None:
    """lock(timeout(fn)): it runs on in its thread, and it is still inside."""
    lock = ResilienceLock()
    pipeline = B(clock=hand).add_lock(lock).add_timeout(LIMIT).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    assert repr(lock) == "<ResilienceLock held>"
    waiting = Beside(pipeline.execute_sync, ok)
    until(lambda: "1 waiting" in repr(lock))
    let_go(gate)
    assert waiting.result() == 1
    until(lambda: repr(lock) == FREE)


def test_a_call_that_timed_out_outside_keeps_the_lock_until_it_ends(
    hand: HandClock, gate: Gate
) -> None:
    """timeout(lock(fn)): the same."""
    lock = ResilienceLock()
    pipeline = B(clock=hand).add_timeout(LIMIT).add_lock(lock).build()
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(gate)
    assert repr(lock) == "<ResilienceLock held>"
    let_go(gate)
    until(lambda: repr(lock) == FREE)


def test_what_runs_on_is_inside_still(hand: HandClock) -> None:
    """A call that the abandoned attempt makes passes; strangers wait meanwhile."""
    lock = ResilienceLock()
    other = B().add_lock(lock).build()
    look = B().add_lock(lock, max_wait=0).build()
    pipeline = B(clock=hand).add_lock(lock).add_timeout(LIMIT).build()
    seen: list[Any] = []
    gate = Gate()

    def fn() -> None:
        hand.expire()
        gate()
        seen.append(other.settle_sync(ok))

    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(fn)
    assert isinstance(look.settle_sync(ok), Rejected)
    gate.opened.set()
    until(lambda: repr(lock) == FREE)
    assert not seen  # nobody waits for it, so it starts nothing; but it did not wait for itself
    assert look.execute_sync(ok) == 1


def test_a_call_that_is_given_up_on_while_it_waits_leaves_the_queue(hand: HandClock) -> None:
    """timeout(lock(fn)) in a thread: the waiter goes, and nothing is started later."""
    lock = ResilienceLock()
    locked = B(clock=hand).add_lock(lock).build()
    pipeline = B(clock=hand).add_timeout(LIMIT).add_pipeline(locked).build()
    held = Gate()
    holder = Beside(locked.execute_sync, held)
    see(held.entered)
    calls: list[int] = []

    def expire_when_queued() -> None:
        until(lambda: "1 waiting" in repr(lock))
        hand.expire()

    Beside(expire_when_queued)
    with pytest.raises(TimeoutRejectedError):
        pipeline.execute_sync(calls.append, 1)
    let_go(held)
    holder.result()
    assert locked.execute_sync(ok) == 1
    assert not calls


def test_max_wait_in_a_thread() -> None:
    """Contract: `LockRejectedError` past `max_wait`, in real time too."""
    lock = ResilienceLock()
    holding, pipeline = B().add_lock(lock).build(), B().add_lock(lock, max_wait=0.01).build()
    held = Gate()
    holder = Beside(holding.execute_sync, held)
    see(held.entered)
    with pytest.raises(LockRejectedError, match=r"max_wait=0\.01 s"):
        pipeline.execute_sync(ok)
    let_go(held)
    holder.result()
    assert pipeline.execute_sync(ok) == 1


def test_a_thread_and_a_task_hand_it_to_each_other() -> None:
    """A waiter in a loop is woken by a release in a thread, and the other way round."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()
    held = Gate()
    holder = Beside(pipeline.execute_sync, held)
    see(held.entered)
    inside = threading.Event()

    async def stay() -> None:
        inside.set()
        while "1 waiting" not in repr(lock):  # noqa: ASYNC110 - said by another thread
            await asyncio.sleep(0.001)

    task = Beside(lambda: asyncio.run(_called(pipeline.execute, stay)))
    until(lambda: "1 waiting" in repr(lock))
    let_go(held)
    holder.result()
    assert inside.wait(PATIENCE)
    assert pipeline.execute_sync(ok) == 1
    task.result()


async def _called(call: Any, *args: Any) -> Any:
    return await call(*args)


# ---- streams ----------------------------------------------------------------------------------


def test_a_stream_in_a_thread_holds_it_to_its_close() -> None:
    """Streams hold it from first pull to close; its source is inside, its consumer is not."""
    lock = ResilienceLock()
    pipeline = B().add_lock(lock).build()
    look = B().add_lock(lock, max_wait=0).build()

    def source() -> Iterator[int]:
        try:
            yield pipeline.execute_sync(ok)
            yield 2
        finally:
            pipeline.execute_sync(ok)

    with pipeline.execute_stream_sync(source) as stream:
        assert repr(lock) == FREE
        assert next(stream) == 1
        assert isinstance(look.settle_sync(ok), Rejected)
    assert repr(lock) == FREE
    assert list(pipeline.execute_stream_sync(source)) == [1, 2]
    assert repr(lock) == FREE


def test_a_stream_whose_first_try_runs_on_keeps_it_until_that_has_ended(
    hand: HandClock, gate: Gate
) -> None:
    """Held until every child still inside has ended: here an attempt that timed out, past the close."""
    lock = ResilienceLock()
    pipeline = B(clock=hand).add_lock(lock).add_retry(delay=0).add_timeout(LIMIT).build()
    calls = 0

    def factory() -> Iterator[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            gate()
        return iter((1, 2))

    with pipeline.execute_stream_sync(factory) as stream:
        assert list(stream) == [1, 2]
    assert repr(lock) == "<ResilienceLock held>"
    let_go(gate)
    until(lambda: repr(lock) == FREE)


def test_a_context_given_is_asked_for_its_key() -> None:
    """`key=` is a function of the context, in threads too; a coroutine function is a misuse there."""
    keys: list[Any] = []

    def key(context: ResilienceContext) -> str:
        keys.append(context.operation_key)
        return "k"

    assert B().add_lock(key=key).build().execute_sync(ok, operation_key="op") == 1
    assert keys == ["op"]

    async def asynchronous(_: ResilienceContext) -> str:
        return "k"

    with pytest.raises(TypeError, match="key gave"):
        B().add_lock(key=asynchronous).build().execute_sync(ok)
