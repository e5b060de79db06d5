"""Hedging: what becomes of the attempts that don't win. They are cancelled, awaited, closed, and not heard of again."""

from __future__ import annotations

import asyncio
import gc
import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from resilience_pipeline import (
    HedgingEvent,
    OutcomeEvent,
    ResilienceContext,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    current_context,
    handle,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.racers import Racers
from support.scripted import Background, Closable, Scripted, raised_by, spawn, tick
from support.streaming import Running

B = ResiliencePipelineBuilder

ANYIO = pytest.mark.anyio


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


class Tidy:
    """A coroutine function that never returns, and takes its time to clean up."""

    def __init__(self, clock: VirtualClock, seconds: float = 2) -> None:
        self._clock = clock
        self._seconds = seconds
        self.running = 0
        self.cleaned = 0

    async def __call__(self) -> None:
        self.running += 1
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await self._clock.sleep(self._seconds)
            self.cleaned += 1
            self.running -= 1


class Stubborn:
    """A coroutine function that takes no notice of being cancelled, and returns something after all."""

    def __init__(self, clock: VirtualClock, seconds: float, result: object) -> None:
        self._clock = clock
        self._seconds = seconds
        self._result = result
        self.cancelled = 0

    async def __call__(self) -> object:
        end = self._clock.now() + self._seconds
        try:
            await anyio.sleep_forever()
        except BaseException:
            self.cancelled += 1
        with anyio.CancelScope(shield=True):
            await self._clock.sleep(end - self._clock.now())
        return self._result


def in_turn(*fns: Callable[[], Any]) -> Callable[[], Any]:
    """A callback whose n-th call is the n-th function's."""
    calls = iter(fns)
    return lambda: next(calls)()


# ---- cancelled and awaited ----------------------------------------------------------------------


@ANYIO
async def test_when_the_first_wins_running_hedges_are_cancelled(clock: VirtualClock) -> None:
    """HG-13: once each, and nothing runs when the result is there."""
    fn = Racers(clock, (10, "first"), (math.inf, None), (math.inf, None))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2).build()
    assert await pipeline.execute(fn) == "first"
    assert (fn.running, sorted(fn.cut)) == (0, [1, 2])


@ANYIO
async def test_when_a_hedge_wins_the_first_is_cancelled(clock: VirtualClock) -> None:
    """HG-13, the other way round."""
    fn = Racers(clock, (math.inf, None), (1, "hedge"))
    assert await B(clock=clock).add_hedging().build().execute(fn) == "hedge"
    assert (fn.running, fn.cut) == (0, [0])


@ANYIO
async def test_losers_are_awaited_before_the_outcome_comes_out(clock: VirtualClock) -> None:
    """HG-14, case HG-01: their cleanup has ended, all of them at the same time."""
    tidy = Tidy(clock, 3)
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=2).build()
    assert await pipeline.execute(in_turn(tidy, tidy, Scripted("third"))) == "third"
    assert (tidy.running, tidy.cleaned) == (0, 2)
    assert clock.now() == 4 + 3


@ANYIO
async def test_a_loser_that_is_cancelled_before_it_began_never_begins() -> None:
    """A launch and the end of the race in one turn."""
    first = anyio.Event()

    def on_hedging(event: HedgingEvent) -> None:
        if event.attempt == 1:
            raise LookupError

    started: list[int] = []

    async def fn() -> None:
        started.append(current_context().attempt)
        await first.wait()

    pipeline = (
        B()
        .add_hedging(
            max_hedged_attempts=2,
            delay_generator=lambda e: 0 if e.attempt == 1 else -1,
            on_hedging=on_hedging,
        )
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert started == [0, 1]


@pytest.mark.asyncio
async def test_a_loser_is_cancelled_once(clock: VirtualClock) -> None:
    """asyncio: a cleanup that awaits is not cancelled again, and the caller's task is asked nothing."""
    cleaned: list[int] = []
    fn = Scripted("hedge")

    async def first() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await clock.sleep(5)
            task = asyncio.current_task()
            assert task is not None
            cleaned.append(task.cancelling())

    pipeline = B(clock=clock).add_hedging().build()
    assert await pipeline.execute(in_turn(first, fn)) == "hedge"
    assert cleaned == [1]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@ANYIO
async def test_no_task_is_left(clock: VirtualClock) -> None:
    """Case HG-01: as many as before."""
    fn = Racers(clock, (math.inf, None), (math.inf, None), (1, "third"))
    await clock.sleep(1)  # trio: the clock has a task of its own from now on
    before = _tasks_alive()
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=0).build()
    assert await pipeline.execute(fn) == "third"
    await tick(3)
    assert _tasks_alive() == before


def _tasks_alive() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        import trio

        return trio.lowlevel.current_statistics().tasks_living


@ANYIO
async def test_a_loser_that_ignores_its_cancellation_is_waited_for(clock: VirtualClock) -> None:
    """HG-14: it ends when it likes; what it brings is closed and not looked at."""
    late = Closable()
    judged: list[int] = []

    def should_handle(event: OutcomeEvent) -> bool:
        judged.append(event.attempt)
        return False

    stubborn = Stubborn(clock, 30, late)
    pipeline = B(clock=clock).add_hedging(delay=2, should_handle=should_handle).build()
    assert await pipeline.execute(in_turn(stubborn, Scripted("hedge"))) == "hedge"
    assert (clock.now(), stubborn.cancelled) == (30, 1)
    assert late.closed == 1
    assert judged == [1]


@ANYIO
async def test_the_winner_is_out_of_reach_of_the_losers_cancellation(clock: VirtualClock) -> None:
    """HG-29, HG-15, case HG-03: what an attempt has started elsewhere goes on after it has won; a loser's is its own."""
    async with anyio.create_task_group() as tasks:
        pumps: list[Background] = []

        async def fn() -> Background:
            number = current_context().attempt
            pump = spawn(tasks, clock.sleep, 100)
            pumps.append(pump)
            if number == 0:
                try:
                    await anyio.sleep_forever()
                finally:
                    pump.cancel()
            return pump

        won = await B(clock=clock).add_hedging().build().execute(fn)
        await tick()
        assert pumps[0].cancelled
        assert won is pumps[1]
        assert not won.done
        tasks.cancel_scope.cancel()


# ---- closed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["aclose", "close"])
@ANYIO
async def test_a_losers_result_is_closed_and_the_winners_is_not(
    clock: VirtualClock, method: str
) -> None:
    """HG-16, case HG-01: a result that was handled, and one that came too late."""
    handled, late, won = Closable(method), Closable(method), Closable(method)
    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=2,
            delay=5,
            should_handle=handle_result(lambda result: result is handled),
        )
        .build()
    )
    fn = in_turn(Scripted(handled), Stubborn(clock, 10, late), Scripted(won))
    assert await pipeline.execute(fn) is won
    assert (handled.closed, late.closed, won.closed) == (1, 1, 0)


@ANYIO
async def test_when_all_are_handled_the_first_result_stays_open() -> None:
    """HG-16: it is the one that comes out; the others are closed."""
    results = [Closable(), Closable(), Closable()]
    pipeline = (
        B()
        .add_hedging(max_hedged_attempts=2, delay=-1, should_handle=handle_result(lambda _: True))
        .build()
    )
    assert await pipeline.execute(Scripted(*results)) is results[0]
    assert [result.closed for result in results] == [0, 1, 1]


@ANYIO
async def test_a_handled_result_is_open_while_it_is_looked_at() -> None:
    """Small print: it is closed after predicates, hooks and actions have seen it."""
    first = Closable()
    seen: list[int] = []

    def look(event: object) -> Any:
        seen.append(first.closed)

    async def second() -> str:
        look(None)
        return "second"

    pipeline = (
        B()
        .add_hedging(
            delay=-1,
            should_handle=handle_result(lambda result: result is first),
            action_generator=lambda event: (look(event), second)[1],
            on_hedging=look,
        )
        .build()
    )
    assert await pipeline.execute(Scripted(first)) == "second"
    assert seen == [0, 0, 0]
    assert first.closed == 1


@ANYIO
async def test_a_result_that_all_attempts_share_is_not_closed(clock: VirtualClock) -> None:
    """The returned one never: also where a loser brought the same object."""
    shared = Closable()
    pipeline = B(clock=clock).add_hedging(delay=2).build()
    assert await pipeline.execute(in_turn(Stubborn(clock, 9, shared), Scripted(shared))) is shared
    assert shared.closed == 0


@ANYIO
async def test_errors_of_closing_are_swallowed(clock: VirtualClock) -> None:
    """A loser's close that fails takes no good result away."""

    class Broken:
        closed = 0

        async def aclose(self) -> None:
            self.closed += 1
            raise OSError("can't be closed")

    broken = Broken()
    pipeline = B(clock=clock).add_hedging(delay=2).build()
    assert await pipeline.execute(in_turn(Stubborn(clock, 9, broken), Scripted("hedge"))) == "hedge"
    assert broken.closed == 1


@pytest.mark.parametrize("ended_by", ["an unhandled error", "the predicate", "the hook"])
@ANYIO
async def test_results_are_closed_when_the_call_raises(clock: VirtualClock, ended_by: str) -> None:
    """Rule 4: nobody will receive them."""
    handled = Closable()

    def should_handle(event: OutcomeEvent) -> bool:
        if event.attempt == 0:
            return True
        if ended_by == "the predicate":
            raise KeyError
        return False

    def on_hedging(event: HedgingEvent) -> None:
        if ended_by == "the hook":
            raise KeyError

    pipeline = (
        B(clock=clock)
        .add_hedging(delay=-1, should_handle=should_handle, on_hedging=on_hedging)
        .build()
    )
    fn = in_turn(Scripted(handled), Scripted(KeyError()))
    assert isinstance(await raised_by(pipeline.execute, fn), KeyError)
    assert handled.closed == 1


# ---- no noise -----------------------------------------------------------------------------------


async def _fail_when_cancelled() -> None:
    try:
        await anyio.sleep_forever()
    finally:
        raise OSError("a loser's")


@pytest.mark.asyncio
@pytest.mark.filterwarnings("error")
async def test_nothing_is_printed_of_the_losers(clock: VirtualClock) -> None:
    """Case HG-07: their errors are retrieved, and reach nobody."""
    noise: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noise.append(context))
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=1).build()
    fn = in_turn(_fail_when_cancelled, _fail_when_cancelled, Scripted(1))
    assert await pipeline.execute(fn) == 1
    fn = in_turn(Scripted(ConnectionError()), _fail_when_cancelled, Scripted(KeyError()))
    with pytest.raises(KeyError):
        await (
            B(clock=clock)
            .add_hedging(max_hedged_attempts=2, delay=1, should_handle=ConnectionError)
            .build()
            .execute(fn)
        )
    del fn
    gc.collect()
    await tick()
    assert noise == []


@ANYIO
async def test_a_losers_error_reaches_nobody(clock: VirtualClock) -> None:
    """Case HG-07: the caller sees one plain outcome, on both loops; no group."""
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=1).build()
    fn = in_turn(_fail_when_cancelled, _fail_when_cancelled, Scripted(1))
    assert await pipeline.execute(fn) == 1


@pytest.mark.parametrize("delay", [-1, 0, 1])
@ANYIO
async def test_the_error_that_comes_out_is_plain(clock: VirtualClock, delay: float) -> None:
    """Case HG-07: with its own traceback, its own context and no group around it."""

    async def fn() -> None:
        await checkpoint()
        raise ConnectionError(current_context().attempt)

    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=2, delay=delay).build()
    error = await raised_by(pipeline.execute, fn)
    assert type(error) is ConnectionError
    assert error.args == (0,)
    assert (error.__cause__, error.__context__) == (None, None)
    assert "fn" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


@ANYIO
async def test_a_group_of_the_callbacks_own_comes_out_by_identity(clock: VirtualClock) -> None:
    """Small print, case HG-07: a group only if the callback raised one."""
    group = ExceptionGroup("the callback's", [ConnectionError(), ValueError()])
    fn = Racers(clock, (math.inf, None), (1, group))
    pipeline = B(clock=clock).add_hedging(should_handle=handle(ConnectionError)).build()
    assert await raised_by(pipeline.execute, fn) is group
    assert len(group.exceptions) == 2


@ANYIO
async def test_a_task_group_in_an_attempt_is_the_attempts_own(clock: VirtualClock) -> None:
    """Scopes nest within the attempt's task, be it the winner's or a loser's."""

    async def fn() -> int:
        number = current_context().attempt
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clock.sleep, 1)
            await clock.sleep(100 if number == 0 else 1)
        return number

    assert await B(clock=clock).add_hedging().build().execute(fn) == 1
    await tick()


# ---- the caller's cancellation ------------------------------------------------------------------


def _ways() -> list[Any]:
    return [
        pytest.param("scope", "asyncio", id="asyncio, by its scope"),
        pytest.param("task", "asyncio", id="asyncio, by its task"),
        pytest.param("scope", "trio", id="trio, by its scope"),
    ]


@pytest.mark.parametrize(("how", "anyio_backend"), _ways())
@ANYIO
async def test_the_callers_cancellation_reaches_every_attempt(how: str) -> None:
    """HG-24, case HG-11: all are cancelled, all awaited, then the cancellation comes out, plain."""
    clock = VirtualClock()
    tidy = Tidy(clock, 3)
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=3, delay=0).build()
    call = Running(pipeline.execute, tidy)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_alone, call)
        await tick()
        assert tidy.running == 4
        call.cancel(how)
        await tick(5)
        assert not call.done
        await clock.advance(3)
        await tick(5)
    assert call.cancelled
    assert call.error is None
    assert (tidy.running, tidy.cleaned) == (0, 4)


async def _alone(call: Running) -> None:
    """Run a call whose task may be cancelled, in the middle of a group."""
    try:
        await call()
    except asyncio.CancelledError:
        assert call.task is not None
        while call.task.cancelling():
            call.task.uncancel()


@pytest.mark.parametrize(("how", "anyio_backend"), _ways())
@pytest.mark.parametrize("where", ["predicate", "hook", "delay generator", "action generator"])
@ANYIO
async def test_cancelled_in_the_users_code_all_are_gone(where: str, how: str) -> None:
    """HG-24: the other attempts are not forgotten while the caller is somewhere else."""
    clock = VirtualClock()
    held: list[str] = []

    async def hold(at: str) -> None:
        if at == where:
            held.append(at)
            await anyio.sleep_forever()

    async def should_handle(event: OutcomeEvent) -> bool:
        await hold("predicate")
        return True

    async def delay(event: object) -> float:
        await hold("delay generator")
        return 2

    async def generate(event: Any) -> Any:
        await hold("action generator")
        return event.callback

    first, handled = Tidy(clock, 3), Closable()
    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=2,
            should_handle=should_handle,
            delay_generator=delay if where == "delay generator" else None,
            action_generator=generate,
            on_hedging=lambda _: hold("hook" if where == "hook" else ""),
        )
        .build()
    )
    call = Running(pipeline.execute, in_turn(first, Scripted(handled), first))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_alone, call)
        await tick()
        await clock.advance(2)
        await tick()
        assert held
        call.cancel(how)
        await tick(5)
        await clock.advance(3)
        await tick(5)
    assert call.cancelled
    assert first.running == 0
    assert first.cleaned == 1
    assert handled.closed == (where == "predicate")


@pytest.mark.parametrize(("how", "anyio_backend"), _ways())
@ANYIO
async def test_cancelled_while_losers_are_awaited_the_winners_result_is_closed(how: str) -> None:
    """Rule 4: the winner's when the caller has gone; the losers' cleanup is not cut short."""
    clock = VirtualClock()
    tidy, won = Tidy(clock, 10), Closable()
    context = ResilienceContext()
    pipeline = B(clock=clock).add_hedging(delay=2).build()

    async def execute() -> object:
        return await pipeline.execute(in_turn(tidy, Scripted(won)), context=context)

    call = Running(execute)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_alone, call)
        await tick()
        await clock.advance(3)
        await tick()
        assert not call.done
        call.cancel(how)
        await tick(5)
        assert (call.done, won.closed) == (False, 0)
        await clock.advance(9)
        await tick(5)
        assert call.cancelled
    assert (tidy.cleaned, won.closed) == (1, 1)


@pytest.mark.parametrize(("how", "anyio_backend"), _ways())
@ANYIO
async def test_cancelled_again_and_again_the_losers_are_still_awaited(how: str) -> None:
    """No work outlives the call, however impatient the caller is."""
    clock = VirtualClock()
    tidy = Tidy(clock, 10)
    pipeline = B(clock=clock).add_hedging(max_hedged_attempts=1, delay=0).build()
    call = Running(pipeline.execute, tidy)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_alone, call)
        await tick()
        for _ in range(3):
            call.cancel(how)
            await tick(5)
        assert not call.done
        await clock.advance(10)
        await tick(5)
    assert call.cancelled
    assert tidy.cleaned == 2


@ANYIO
async def test_cancelled_in_the_turn_of_the_win_the_result_is_closed() -> None:
    """A result and the caller's cancellation in the same turn: the cancellation wins, nobody receives the result."""
    won, go = Closable(), anyio.Event()
    returned: list[Closable] = []

    async def fn() -> Closable:
        await go.wait()
        returned.append(won)
        return won

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, B(clock=VirtualClock()).add_hedging().build().execute, fn)
        await tick()
        go.set()
        call.cancel()
        await tick()
        assert call.cancelled
    assert won.closed == len(returned)


@ANYIO
async def test_a_timeout_around_hedging_reaches_every_attempt(clock: VirtualClock) -> None:
    """A limit outside is a caller like any other."""
    fn = Racers(clock, (math.inf, None))
    pipeline = B(clock=clock).add_timeout(10).add_hedging(max_hedged_attempts=2, delay=3).build()
    error = await raised_by(pipeline.execute, fn)
    assert isinstance(error, TimeoutRejectedError)
    assert (sorted(fn.cut), fn.running, clock.now()) == ([0, 1, 2], 0, 10)


# ---- what is no Exception -----------------------------------------------------------------------


class Fatal(BaseException):
    """Neither an `Exception` nor a cancellation."""


@pytest.mark.parametrize("mode", ["execute", "settle"])
@pytest.mark.parametrize("kind", [Fatal, KeyboardInterrupt, SystemExit, GeneratorExit])
@pytest.mark.parametrize("number", [0, 1])
@ANYIO
async def test_a_base_exception_of_an_attempt_ends_the_call_as_itself(
    clock: VirtualClock, number: int, kind: type[BaseException], mode: str
) -> None:
    """Small print: no predicate sees it; the other attempts are cancelled and awaited; the loop goes on."""
    judged: list[object] = []
    fatal = kind("as it is")
    plans: list[tuple[float, Any]] = [(math.inf, None), (math.inf, None)]
    plans[number] = (3, fatal)
    fn = Racers(clock, *plans)
    pipeline = B(clock=clock).add_hedging(delay=2, should_handle=judged.append).build()  # type: ignore[arg-type]
    with pytest.raises(kind) as caught:
        await getattr(pipeline, mode)(fn)
    assert caught.value is fatal
    assert judged == []
    assert (fn.calls, fn.running, fn.cut) == (2, 0, [1 - number])


@pytest.mark.asyncio
async def test_a_cancellation_of_somebody_else_ends_the_call() -> None:
    """asyncio: what an attempt waits for is cancelled by its owner: that is no failure to be hedged."""
    other = asyncio.create_task(asyncio.sleep(3600))
    calls: list[int] = []

    async def fn() -> None:
        calls.append(1)
        await other

    call = asyncio.create_task(B(clock=VirtualClock()).add_hedging().build().execute(fn))
    await tick()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert calls == [1]


# ---- nothing is kept ----------------------------------------------------------------------------


class Thing:
    """Can be weakly referenced."""


@pytest.mark.parametrize("how", ["a value", "an error", "all handled", "a handled result"])
@ANYIO
async def test_a_finished_call_leaves_nothing_for_the_collector(
    clock: VirtualClock, how: str
) -> None:
    """No circle of references: what attempts made goes as soon as the caller lets go, without the collector."""
    references: list[weakref.ref[Thing]] = []

    class BoomError(ConnectionError):
        def __init__(self, thing: Thing) -> None:
            self.thing = thing

    async def fn() -> Thing | None:
        number = current_context().attempt
        thing = Thing()
        references.append(weakref.ref(thing))
        await clock.sleep(5 - number)
        if how == "an error" and number == 2:
            raise KeyError(thing)
        if how == "all handled" or (how != "a handled result" and number == 1):
            raise BoomError(thing)
        return thing

    pipeline = (
        B(clock=clock)
        .add_hedging(
            max_hedged_attempts=2,
            delay=1,
            should_handle=handle(ConnectionError)
            | handle_result(lambda _: how == "a handled result"),
        )
        .build()
    )

    async def call() -> None:
        try:
            await pipeline.execute(fn)
        except Exception:
            return

    gc.collect()
    gc.disable()
    try:
        await call()
        await tick(3)
        assert len(references) == 3
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


@ANYIO
async def test_a_context_that_is_kept_keeps_nothing_of_its_attempt(clock: VirtualClock) -> None:
    """Neither the callback nor its arguments; and it serves an execution of its own."""
    kept: list[ResilienceContext] = []

    async def fn(thing: Thing) -> None:
        kept.append(current_context())
        await clock.sleep(5)

    pipeline = B(clock=clock).add_hedging().build()
    thing = Thing()
    reference = weakref.ref(thing)
    await pipeline.execute(fn, thing)
    del thing
    await tick(3)
    assert len(kept) == 2
    assert reference() is None
    for context in kept:
        assert await pipeline.execute(Scripted("again"), context=context) == "again"


@pytest.mark.asyncio
async def test_a_call_that_is_dropped_cancels_its_attempts() -> None:
    """asyncio: a coroutine closed where nothing can be awaited: the attempts end by themselves."""
    ended: list[int] = []

    async def fn() -> None:
        number = current_context().attempt
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(number)

    call = B().add_hedging(max_hedged_attempts=2, delay=0).build().execute(fn)
    step: Any = call
    step.send(None)
    await tick(3)
    step.close()
    await tick()
    assert ended == [0]
