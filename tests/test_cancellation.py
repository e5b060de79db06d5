"""Cancelled at every await of every strategy: all is given back, nothing is left behind, the cancellation comes out."""

from __future__ import annotations

import ast
import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

import resilience_pipeline
from resilience_pipeline import (
    CircuitBreakerControl,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    TokenBucket,
    handle_result,
)
from resilience_pipeline.testing import VirtualClock
from support.jumping import JumpingLoop
from support.scripted import Hanging, Scripted, spawn, tick
from support.worlds import PAIRS, STRATEGIES, WITH_LOCK, Means, Mode, Moment, World


@pytest.fixture(scope="module", autouse=True)
def _quick_collector() -> Iterator[None]:
    """Keep the collector from looking at pytest and all modules again and again, for thousands of worlds."""
    gc.freeze()
    yield
    gc.unfreeze()


# Hedging runs what is inside in tasks of its own: that matters to what waits, counts or holds something there.
WITH_HEDGING = {"Hedging", "Retry", "CircuitBreaker", "Timeout", "ConcurrencyLimiter"}
OF_HEDGING = [pair for pair in PAIRS if "Hedging" in pair and WITH_HEDGING.issuperset(pair)]
OF_HEDGING += [pair for pair in WITH_LOCK if "Hedging" in pair]
OTHERS = [pair for pair in (*PAIRS, *WITH_LOCK) if "Hedging" not in pair]
EVERY_PAIR = pytest.mark.parametrize("pair", [*OTHERS, *OF_HEDGING], ids="-".join)
# Races take long; where it is about the moment, two will do.
NEARLY_EVERY_PAIR = pytest.mark.parametrize(
    "pair", [*OTHERS, ("Hedging", "Hedging"), ("Hedging", "ConcurrencyLimiter")], ids="-".join
)
#: Modules whose awaits are cut at in tests of their own: `strategies/test_record_replay_every_await`,
#: `strategies/test_cache_cancellation`, and `strategies/test_chaos` for chaos, which holds nothing.
ELSEWHERE = {
    "_bound_cache",
    "_chaos",
    "_flight",
    "_record_replay",
    "_recorder",
    "_shared_stream",
    "_shared_work",
    "_single_flight",
}
MODES: tuple[Mode, ...] = ("execute", "settle", "execute_stream")


# ---- everywhere: at each kind of place, in each pair of strategies --------------------------------


def on_asyncio() -> bool:
    return asyncio._get_running_loop() is not None


async def cut_everywhere(
    pair: tuple[str, str], mode: Mode, means: Means, moment: Moment, clock: VirtualClock | None
) -> None:
    """Make the journey once undisturbed, then once for each kind of place there was in it."""
    undisturbed = World(pair, mode, clock)
    await undisturbed.run()
    raising = means not in {"task", "scope"}
    numbers = undisturbed.stages_to_raise_in() if raising else undisturbed.places_to_cut(moment)
    assert numbers or moment == "woken"
    wrong: list[str] = []

    async def cut_at(number: int) -> None:
        world = World(pair, mode, clock)
        try:
            await world.run(number, means, moment)
            # Where trio draws lots, a race may be over sooner than the undisturbed one was.
            assert world.cut_at is not None or (world.races and not on_asyncio())
        except Exception as error:
            wrong.append(f"{error!r} when cut at {number}: {world.cut_at}")

    async with anyio.create_task_group() as worlds:
        for number in numbers:
            worlds.start_soon(cut_at, number)
    assert wrong == []
    assert clock is None or clock.pending == 0


@pytest.mark.parametrize("mode", MODES)
@EVERY_PAIR
@pytest.mark.asyncio
async def test_task_cancel_at_every_await(pair: tuple[str, str], mode: Mode) -> None:
    """`task.cancel()` while the call waits, wherever that is."""
    await cut_everywhere(pair, mode, "task", "waiting", VirtualClock(autojump=True))


@pytest.mark.parametrize("mode", ["execute", "execute_stream"])
@EVERY_PAIR
@pytest.mark.anyio
async def test_scope_cancel_at_every_await(pair: tuple[str, str], mode: Mode) -> None:
    """An enclosing scope is cancelled while the call waits, wherever that is."""
    await cut_everywhere(pair, mode, "scope", "waiting", VirtualClock(autojump=True))


@pytest.mark.parametrize("anyio_backend", ["trio"])
@NEARLY_EVERY_PAIR
@pytest.mark.anyio
async def test_scope_cancel_at_every_await_of_settle(pair: tuple[str, str]) -> None:
    """The same for `settle`, which may not show a cancellation as an outcome, on the loop that has scopes only."""
    await cut_everywhere(pair, "settle", "scope", "waiting", VirtualClock(autojump=True))


@pytest.mark.parametrize("mode", ["execute", "execute_stream"])
@NEARLY_EVERY_PAIR
@pytest.mark.asyncio
async def test_task_cancel_when_the_wait_is_over(pair: tuple[str, str], mode: Mode) -> None:
    """`task.cancel()` when the permit was granted or the delay has passed, and the call has not run on yet."""
    await cut_everywhere(pair, mode, "task", "woken", VirtualClock(autojump=True))


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("mode", ["execute", "execute_stream"])
@NEARLY_EVERY_PAIR
@pytest.mark.anyio
async def test_scope_cancel_when_the_wait_is_over(pair: tuple[str, str], mode: Mode) -> None:
    """An enclosing scope is cancelled when the wait is over, and the call has not run on yet."""
    await cut_everywhere(pair, mode, "scope", "woken", VirtualClock(autojump=True))


@pytest.mark.parametrize("mode", ["execute", "execute_stream"])
@NEARLY_EVERY_PAIR
@pytest.mark.asyncio
async def test_task_cancelled_again_while_it_cleans_up(pair: tuple[str, str], mode: Mode) -> None:
    """A second `task.cancel()` at the next wait after the first, in somebody's cleanup."""
    await cut_everywhere(pair, mode, "task", "twice", VirtualClock(autojump=True))


@NEARLY_EVERY_PAIR
@pytest.mark.anyio
async def test_an_interrupt_from_any_user_code_passes_untouched(
    pair: tuple[str, str], anyio_backend_name: str
) -> None:
    """`KeyboardInterrupt` and `SystemExit` come out as they are, from callbacks, hooks and sources, and all is released."""
    clock = VirtualClock(autojump=True)
    if anyio_backend_name == "asyncio":
        await cut_everywhere(pair, "settle", "SystemExit", "waiting", clock)
    await cut_everywhere(pair, "execute_stream", "KeyboardInterrupt", "waiting", clock)


@pytest.mark.anyio
async def test_the_journeys_wait_at_every_await_of_every_strategy(anyio_backend_name: str) -> None:
    """What the tests above cut short has every `await` of the strategies in it: none was forgotten, none was added."""
    clock = VirtualClock(autojump=True)
    worlds = [World(pair, mode, clock) for pair in (*PAIRS, *WITH_LOCK) for mode in MODES]
    async with anyio.create_task_group() as tasks:
        for world in worlds:
            tasks.start_soon(world.run)
    reached = {line for world in worlds for place in world.places for line in place.lines}
    # A shield on asyncio takes the steps of what it holds itself, so that isn't seen waiting.
    shielded = {"await closing", "await self._wait(lambda: not self.is_running, math.inf)"}
    unseen = shielded if anyio_backend_name == "asyncio" else set()
    # A caller that goes while losers are being closed; `test_hedging_losers` has it at will.
    by_chance = {"await self.close_all_but(None)"}
    # Streams that are resumed make journeys of their own: `test_stream_resumable_every_await`.
    resuming = [
        "await self.handle(context)",
        "await self.attempts(context, run)",
        "await self._retry.attempts(self.context, run)",
        "await run.goes_on(error, None)",
        "await run.pause(error)",
        "await context.runtime.sleep(self.delay)",
        "await call_user(resumable, event, 'resumable')",
    ]
    # Threads are not cancelled but left alone: `threads/`.
    in_threads = [
        "await self.handle_in_thread(limit, context)",
        "await self._run_in_thread(context, around)",
        "await self.refuse(limit, context, None)",
        "await context.runtime.within(limit, self._enter, own, late=late)",
        *["await self._next(context)"] * 3,
        "await self._runtime.shielded(partial(discard, result), math.inf)",
    ]
    # Calls that are found slow while they run; `test_circuit_breaker_rules` has them.
    running = ["await self._opened(context, opening, None)"]
    # State per key only finds whose state it is; `test_state_per_key` cancels it.
    per_key = ["await entry.handle(context)"]
    missed = [each for each in awaits_not_in(reached) if each not in by_chance]
    # A retry that nobody watches; `test_retry_edges` cancels it in an attempt and between two.
    unwatched = [
        "await inside(context)",
        "await checkpoint()",
        "await inside(context)",
        "await self.attempts(context, run, error)",
        "await self.rescue(context, error, invocations)",
        # The same under `settle`, which has its tries noted.
        "await self.handle_noted(context, context._history)",
        "await inside(context)",
        "await self.attempts(context, run, error)",
    ]
    assert sorted(missed) == sorted(
        [*unseen, *resuming, *in_threads, *unwatched, *running, *per_key]
    )


def awaits_not_in(reached: set[tuple[str, int]]) -> list[str]:
    """The awaits of the strategies' modules of which no line was reached."""
    package = Path(resilience_pipeline.__file__).parent
    missed: list[str] = []
    for path in sorted((package / "strategies").glob("*.py")):
        if path.stem in ELSEWHERE:
            continue
        name, source = path.relative_to(package).as_posix(), path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Await):
                last = node.end_lineno or node.lineno
                if not any((name, line) in reached for line in range(node.lineno, last + 1)):
                    missed.append(ast.unparse(node))
    return missed


class TestInTheLoopsOwnTime:
    """Without a clock of ours time limits are queues on the loop's timers, or scopes with deadlines of their own."""

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
        if request.param == "asyncio":
            return "asyncio", {"loop_factory": JumpingLoop}
        return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}

    # Breakers and rate limiters read a clock that does not jump.
    @pytest.mark.parametrize(
        "pair",
        [
            pair
            for pair in PAIRS
            if "Timeout" in pair and not {"CircuitBreaker", "RateLimiter"} & {*pair}
        ],
        ids="-".join,
    )
    @pytest.mark.parametrize("mode", ["execute", "execute_stream"])
    @pytest.mark.anyio
    async def test_cancelled_anywhere(
        self, pair: tuple[str, str], mode: Mode, anyio_backend_name: str
    ) -> None:
        """By the task or by the scope, waiting or woken."""
        if anyio_backend_name == "asyncio":
            await cut_everywhere(pair, mode, "task", "waiting", None)
            await cut_everywhere(pair, mode, "task", "woken", None)
            await cut_everywhere(pair, mode, "task", "twice", None)
        await cut_everywhere(pair, mode, "scope", "waiting", None)
        await cut_everywhere(pair, mode, "scope", "woken", None)


# ---- the caller's cancellation and our own -------------------------------------------------------


async def cancelled_and_taken_back(call: Awaitable[object]) -> asyncio.CancelledError:
    """Await a call that is going to be cancelled, and let the task go on."""
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    assert task.cancelling() == 1
    task.uncancel()
    await tick()  # a stray cancellation would come out here
    return caught.value


@pytest.mark.parametrize("first", ["the caller", "the limit"])
@pytest.mark.asyncio
async def test_task_cancel_in_the_turn_of_the_expiry_stays_a_cancel(first: str) -> None:
    """The caller wins the tie, whoever of both asked first."""
    clock = VirtualClock()
    told: list[object] = []
    pipeline = ResiliencePipelineBuilder(clock=clock).add_timeout(5, on_timeout=told.append).build()
    task = asyncio.create_task(cancelled_and_taken_back(pipeline.execute(Hanging())))
    if first == "the caller":
        clock.call_at(5, task.cancel)
    await tick()
    if first == "the limit":
        clock.call_at(5, task.cancel)
    await clock.advance(5)
    await task
    assert told == []


@pytest.mark.parametrize("cancelled_at", [4.5, 5.5], ids=["the caller first", "the limit first"])
def test_task_cancel_in_the_turn_of_an_expiry_in_a_queue_stays_a_cancel(
    cancelled_at: float,
) -> None:
    """The same without a clock: both fall due while something blocks the loop."""
    told: list[object] = []
    pipeline = ResiliencePipelineBuilder().add_timeout(5, on_timeout=told.append).build()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, JumpingLoop)
        task = asyncio.create_task(cancelled_and_taken_back(pipeline.execute(Hanging())))
        start = loop.time()
        loop.call_at(start + 1, loop.jump, 10)
        loop.call_at(start + cancelled_at, task.cancel)
        await task

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())
    assert told == []


@pytest.mark.parametrize("first", ["the caller", "the limit"])
@pytest.mark.anyio
async def test_scope_cancel_in_the_turn_of_the_expiry_stays_a_cancel(first: str) -> None:
    """The caller's scope wins the tie, on both loops, whoever of both asked first."""
    clock = VirtualClock()
    told: list[object] = []
    pipeline = ResiliencePipelineBuilder(clock=clock).add_timeout(5, on_timeout=told.append).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Hanging())
        if first == "the caller":
            clock.call_at(5, call.cancel)
        await tick()
        if first == "the limit":
            clock.call_at(5, call.cancel)
        await clock.advance(5)
    assert call.cancelled
    assert told == []


@pytest.mark.parametrize(
    ("outer", "inner", "before", "named"),
    [
        pytest.param(5, 3, 0, "inner", id="inner is shorter"),
        pytest.param(3, 5, 0, "outer", id="outer is shorter"),
        pytest.param(5, 5, 0, "outer", id="both at once"),
        pytest.param(5, 3, 2, "outer", id="both at once, started apart"),
    ],
)
@pytest.mark.anyio
async def test_of_two_nested_timeouts_the_right_one_is_named(
    outer: float, inner: float, before: float, named: str
) -> None:
    """The one whose limit passed; both at once, the outer one, for which the inner one has no time left."""
    clock = VirtualClock(autojump=True)
    told: list[str] = []
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_timeout(outer, name="outer", on_timeout=lambda _: told.append("outer"))
        .add_retry(max_retry_attempts=1, delay=before, should_handle=ConnectionError)
        .add_timeout(inner, name="inner", on_timeout=lambda _: told.append("inner"))
        .build()
    )
    hanging = Hanging()
    failures = [ConnectionError()] if before else []

    async def fail_then_hang() -> None:
        if failures:
            raise failures.pop()
        await hanging()

    with pytest.raises(TimeoutRejectedError) as caught:
        await pipeline.execute(fail_then_hang)
    assert caught.value.strategy_name == named
    assert caught.value.timeout == {"outer": outer, "inner": inner}[named]
    assert told == [named]
    assert hanging.cancelled == 1
    assert clock.now() == min(outer, before + inner)


def test_of_two_nested_timeouts_in_one_queue_the_outer_is_named() -> None:
    """The same without a clock, where limits of one length share a queue."""
    pipeline = (
        ResiliencePipelineBuilder()
        .add_timeout(5, name="outer")
        .add_timeout(5, name="inner")
        .build()
    )

    async def main() -> None:
        with pytest.raises(TimeoutRejectedError) as caught:
            await pipeline.execute(Hanging())
        assert caught.value.strategy_name == "outer"
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await tick()

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize("native", [False, True], ids=["clock", "own time"])
@pytest.mark.parametrize("ends_with", ["a value", "an error"])
def test_a_swallowed_expiry_keeps_what_came_out(ends_with: str, native: bool) -> None:
    """Case TO-05, asyncio: the value or the error is kept, our request to cancel is taken back, no hook runs."""
    clock = None if native else VirtualClock(autojump=True)
    told: list[object] = []
    pipeline = ResiliencePipelineBuilder(clock=clock).add_timeout(1, on_timeout=told.append).build()

    async def swallow() -> str:
        try:
            await anyio.sleep_forever()
        except BaseException:
            if ends_with == "a value":
                return "partial"
            raise KeyError("instead") from None
        return "unreachable"

    async def main() -> None:
        if ends_with == "a value":
            assert await pipeline.execute(swallow) == "partial"
        else:
            with pytest.raises(KeyError, match="instead"):
                await pipeline.execute(swallow)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await tick()

    with asyncio.Runner(loop_factory=JumpingLoop if native else None) as runner:
        runner.run(main())
    assert told == []


@pytest.mark.anyio
async def test_a_swallowed_cancellation_is_the_callers_affair() -> None:
    """Case TO-05: on either loop the next wait after a swallowed expiry is not disturbed."""
    clock = VirtualClock(autojump=True)
    pipeline = ResiliencePipelineBuilder(clock=clock).add_timeout(1).build()

    async def swallow() -> str:
        try:
            await anyio.sleep_forever()
        except BaseException:
            return "partial"
        return "unreachable"

    assert await pipeline.execute(swallow) == "partial"
    await clock.sleep(1)
    assert clock.now() == 2


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("cause", ["the caller", "the limit"])
@pytest.mark.asyncio
async def test_async_cleanup_runs_once_and_to_its_end(name: str, cause: str) -> None:
    """asyncio: cancelled once, whoever it was, a callback's `finally` may wait for something, under every strategy."""
    clock = VirtualClock(autojump=True)
    pipeline = ResiliencePipelineBuilder(clock=clock).add(strategy(name)).add_timeout(10).build()
    cleaned: list[float] = []

    async def callback() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await clock.sleep(3)
            cleaned.append(clock.now())

    task = asyncio.create_task(pipeline.execute(callback))
    if cause == "the caller":
        clock.call_at(5, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cleaned == [8]
    else:
        await asyncio.wait([task])
        assert cleaned[0] == 13
        assert len(cleaned) == (2 if name in {"Retry", "Hedging"} else 1)
        assert (task.exception() is None) == (name == "Fallback")
        assert task.cancelling() == 0


def strategy(name: str) -> resilience_pipeline.Strategy[Any]:
    """One of each kind, nearly as it comes."""
    options: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "Retry": ((), {"max_retry_attempts": 1}),
        "CircuitBreaker": ((), {}),
        "Timeout": ((100,), {}),
        "Fallback": ((), {"fallback_value": "substitute"}),
        "Hedging": ((), {"delay": 30}),
        "ConcurrencyLimiter": ((5,), {}),
        "RateLimiter": ((TokenBucket(5, 5),), {}),
    }
    args, kwargs = options[name]
    made: resilience_pipeline.Strategy[Any] = getattr(resilience_pipeline, name)(*args, **kwargs)
    return made


def all_seven(
    clock: VirtualClock | None = None, *, but: str | None = None
) -> ResiliencePipeline[Any]:
    """A pipeline of one of each, or of all but one."""
    builder: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(clock=clock)
    for name in STRATEGIES:
        if name != but:
            builder.add(strategy(name))
    return builder.build()


@pytest.mark.asyncio
async def test_the_callers_message_comes_out_with_the_cancellation() -> None:
    """`task.cancel(msg)` passes all seven strategies as it is."""
    task = asyncio.create_task(all_seven().execute(Hanging()))
    await tick()
    task.cancel("not needed any more")
    with pytest.raises(asyncio.CancelledError, match="not needed any more"):
        await task


@pytest.mark.parametrize("mode", ["execute", "settle"])
@pytest.mark.asyncio
async def test_a_cancellation_of_somebody_else_passes_untouched(mode: str) -> None:
    """Case TO-11: the callback waits for a task that its owner cancels; that is no failure, no expiry and no evidence."""
    control = CircuitBreakerControl()
    pipeline = (
        ResiliencePipelineBuilder()
        .add_fallback(fallback_value="substitute")
        .add_retry(delay=0)
        .add_circuit_breaker(failure_ratio=0.1, minimum_throughput=2, control=control)
        .add_timeout(60)
        .build()
    )
    other = asyncio.create_task(asyncio.sleep(3600))
    calls: list[int] = []

    async def wait_for_other() -> None:
        calls.append(1)
        await other

    call: Callable[..., Awaitable[object]] = getattr(pipeline, mode)
    task = asyncio.ensure_future(call(wait_for_other))
    await tick()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(calls) == 1
    assert (control.state, control.metrics.throughput) == ("closed", 0)


@pytest.mark.asyncio
async def test_a_task_group_around_the_call_ends_it_and_nothing_more() -> None:
    """asyncio: a sibling's error cancels the group's own body inside a pipeline; only that error comes out."""
    pipeline = all_seven()

    async def fail() -> None:
        raise KeyError("the sibling's")

    async def call_in_a_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await pipeline.execute(Hanging())

    with pytest.raises(ExceptionGroup) as caught:
        await call_in_a_group()
    assert [repr(error) for error in caught.value.exceptions] == ['KeyError("the sibling\'s")']
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await tick()


class TestScopesWithDeadlines:
    """anyio's scopes around a call, in the loop's own time: level-triggered on asyncio as on trio."""

    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request: pytest.FixtureRequest) -> tuple[str, dict[str, object]]:
        return in_own_time(request.param)

    @pytest.mark.parametrize("name", STRATEGIES)
    @pytest.mark.anyio
    async def test_move_on_after_ends_the_call(self, name: str, anyio_backend_name: str) -> None:
        """The scope takes its cancellation back and the code after it runs undisturbed."""
        pipeline = ResiliencePipelineBuilder().add(strategy(name)).build()
        hanging = Hanging()
        start = anyio.current_time()
        with anyio.move_on_after(3) as scope:
            await pipeline.execute(hanging)
        assert scope.cancelled_caught
        assert (hanging.calls, hanging.cancelled) == (1, 1)
        assert anyio.current_time() - start == pytest.approx(3)
        await tick()
        if anyio_backend_name == "asyncio":
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

    @pytest.mark.anyio
    async def test_a_cleanup_that_waits_is_cancelled_again(self) -> None:
        """As without a pipeline: in a cancelled scope every further wait ends at once, unless it is shielded."""
        log: list[str] = []

        async def callback() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(1)
                log.append("shielded")
                await anyio.sleep(1)
                log.append("not shielded")

        with anyio.move_on_after(3) as scope:
            # In a task of its own, where hedging has it, it is cancelled once.
            await all_seven(but="Hedging").execute(callback)
        assert scope.cancelled_caught
        assert log == ["shielded"]

    @pytest.mark.anyio
    async def test_a_scope_that_ends_with_the_limit_wins(self) -> None:
        """`fail_after` and a timeout of equal length: the outer one is what the caller hears of."""
        pipeline = ResiliencePipelineBuilder().add_timeout(3).build()
        with pytest.raises(TimeoutError) as caught, anyio.fail_after(3):
            await pipeline.execute(Hanging())
        assert not isinstance(caught.value, TimeoutRejectedError)

    @pytest.mark.anyio
    async def test_a_scope_inside_the_callback_is_the_callbacks_own(self) -> None:
        """A scope that the callback cancels ends within the callback, under all seven strategies."""

        async def callback() -> str:
            with anyio.move_on_after(1) as scope:
                await anyio.sleep_forever()
            return "moved on" if scope.cancelled_caught else "not cancelled"

        assert await all_seven().execute(callback) == "moved on"


def in_own_time(loop: str) -> tuple[str, dict[str, object]]:
    """Options of a backend whose own time jumps."""
    if loop == "asyncio":
        return "asyncio", {"loop_factory": JumpingLoop}
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


# ---- handed something, and cancelled in the same turn ----------------------------------------------


@pytest.mark.anyio
async def test_a_permit_granted_to_a_cancelled_call_goes_to_the_next() -> None:
    """A permit of a concurrency limiter that was handed to a waiter which is cancelled before it runs is passed on."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, queue_limit=5).build()
    go = anyio.Event()
    entered: list[str] = []

    async def enter(name: str) -> None:
        entered.append(name)

    async def first() -> None:
        await pipeline.execute(go.wait)
        second.cancel()  # in the turn in which the permit was handed over

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await tick()
        second = spawn(tasks, pipeline.execute, enter, "second")
        await tick()
        spawn(tasks, pipeline.execute, enter, "third")
        await tick()
        go.set()
    assert entered in (["third"], ["second", "third"])
    assert (entered == ["third"]) == second.cancelled
    assert (
        await pipeline.execute(
            Scripted("free"),
        )
        == "free"
    )


@pytest.mark.asyncio
async def test_a_permit_granted_to_a_cancelled_task_goes_to_the_next() -> None:
    """The same with `task.cancel()`: the cancelled call's callback never starts."""
    pipeline = ResiliencePipelineBuilder().add_concurrency_limiter(1, queue_limit=5).build()
    go = anyio.Event()
    entered: list[str] = []

    async def enter(name: str) -> None:
        entered.append(name)

    async def first() -> None:
        await pipeline.execute(go.wait)
        second.cancel()  # in the turn in which the permit was handed over

    one = asyncio.create_task(first())
    await tick()
    second = asyncio.create_task(pipeline.execute(enter, "second"))
    await tick()
    third = asyncio.create_task(pipeline.execute(enter, "third"))
    await tick()
    go.set()
    await asyncio.wait([one, second, third])
    assert second.cancelled()
    assert entered == ["third"]


@pytest.mark.parametrize("moment", ["as head", "behind another"])
@pytest.mark.anyio
async def test_a_place_in_a_rate_limiters_queue_is_passed_on(moment: str) -> None:
    """A waiter that is cancelled, as the head or further behind, delays nobody: the next one gets its turn."""
    clock = VirtualClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_rate_limiter(TokenBucket(1, 1), queue_limit=5)
        .build()
    )
    starts: list[tuple[str, float]] = []

    async def note(name: str) -> None:
        starts.append((name, clock.now()))

    async with anyio.create_task_group() as tasks:
        calls = {}
        for name in ("first", "second", "third", "fourth"):
            calls[name] = spawn(tasks, pipeline.execute, note, name)
            await tick()
        cancelled = "second" if moment == "as head" else "third"
        calls[cancelled].cancel()
        await tick()
        await clock.advance(2)
    left = [name for name in ("second", "third", "fourth") if name != cancelled]
    assert starts == [("first", 0), (left[0], 1), (left[1], 2)]


@pytest.mark.asyncio
async def test_the_turn_of_a_cancelled_head_passes_on_in_the_same_turn() -> None:
    """A rate limiter's next in line, woken as the new head and cancelled before it runs, wakes the one behind it."""
    clock = VirtualClock()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_rate_limiter(TokenBucket(1, 1), queue_limit=5)
        .build()
    )
    starts: list[tuple[str, float]] = []

    async def note(name: str) -> None:
        starts.append((name, clock.now()))
        if name == "head":
            tasks["woken"].cancel()

    tasks: dict[str, asyncio.Task[None]] = {}
    for name in ("first", "head", "woken", "last"):
        tasks[name] = asyncio.create_task(pipeline.execute(note, name))
        await tick()
    await clock.advance(2)
    assert starts == [("first", 0), ("head", 1), ("last", 2)]
    assert tasks["woken"].cancelled()
    await asyncio.wait(tasks.values())


@pytest.mark.parametrize("stage", ["on_half_opened", "callback", "should_handle"])
@pytest.mark.anyio
async def test_a_cancelled_trial_gives_its_place_back(stage: str) -> None:
    """Wherever a half-open circuit's trial is cancelled, the very next call is the trial, and closes."""
    clock = VirtualClock()
    control = CircuitBreakerControl()
    reached: list[str] = []
    held = {"at": ""}

    async def hold(name: str) -> None:
        if held["at"] == name:
            reached.append(name)
            await anyio.sleep_forever()

    async def should_handle(event: resilience_pipeline.OutcomeEvent) -> bool:
        await hold("should_handle")
        return event.outcome.error is not None

    async def callback() -> str:
        await hold("callback")
        return "good"

    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1,
            minimum_throughput=2,
            break_duration=5,
            should_handle=should_handle,
            on_half_opened=lambda _: hold("on_half_opened"),
            control=control,
        )
        .build()
    )
    for _ in range(2):
        await pipeline.settle(Scripted(ConnectionError))
    await clock.advance(5)
    held["at"] = stage
    async with anyio.create_task_group() as tasks:
        trial = spawn(tasks, pipeline.execute, callback)
        await tick()
        assert reached == [stage]
        trial.cancel()
        await tick()
        assert trial.cancelled
        assert control.state == "half_open"
        held["at"] = ""
        assert await pipeline.execute(callback) == "good"
    assert control.state == "closed"


# ---- cancelled between two attempts ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["execute", "settle"])
@pytest.mark.anyio
async def test_cancelled_in_the_wait_a_retry_ends_at_once(mode: str) -> None:
    """The cancellation comes out in the same turn, with the last failure as its context; nothing is called again."""
    clock = VirtualClock()
    failure = ConnectionError("the last")
    fn = Scripted(failure)
    pipeline = ResiliencePipelineBuilder(clock=clock).add_retry(delay=30).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, getattr(pipeline, mode), fn)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert call.error is not None
    assert call.error.__context__ is failure
    assert (fn.calls, clock.now(), clock.pending) == (1, 0, 0)


@pytest.mark.anyio
async def test_cancelled_in_on_retry_a_retry_neither_waits_nor_goes_on() -> None:
    """A hook that is cancelled ends the call, with the attempt's failure as the context."""
    failure = ConnectionError("the last")
    fn = Scripted(failure)
    hanging = Hanging()
    pipeline = ResiliencePipelineBuilder().add_retry(delay=0, on_retry=lambda _: hanging()).build()
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert call.error is not None
    assert call.error.__context__ is failure
    assert (fn.calls, hanging.cancelled) == (1, 1)


@pytest.mark.anyio
async def test_a_retry_without_delays_can_be_cancelled() -> None:
    """Rule 10: between two attempts there is a checkpoint, also where nothing is waited and nothing suspends."""
    fn = Scripted(ConnectionError)
    pipeline = (
        ResiliencePipelineBuilder()
        .add_retry(max_retry_attempts=float("inf"), delay=0, should_handle=ConnectionError)
        .build()
    )
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, fn)
        await tick(5)
        call.cancel()
        before = fn.calls
        await tick(5)
        assert call.cancelled
    assert 1 <= before <= fn.calls <= before + 1


class Call:
    """A call in a task of its own, cancelled the loop's own way: by `task.cancel()` on asyncio, on trio by its scope.

    A scope of anyio's has an asyncio loop spin while what it cancels is shielded, and a clock waits for the loop to be idle.
    """

    def __init__(self, tasks: anyio.abc.TaskGroup, fn: Callable[..., Any], *args: Any) -> None:
        self.done = self.cancelled = False
        self.value: Any = None
        self._scope = anyio.CancelScope()
        self._task: asyncio.Task[Any] | None = None
        tasks.start_soon(self._run, fn, *args)

    async def _run(self, fn: Callable[..., Any], *args: Any) -> None:
        if on_asyncio():
            self._task = asyncio.current_task()
        try:
            with self._scope:
                self.value = await fn(*args)
        except asyncio.CancelledError:
            assert self._task is not None
            assert self._task.cancelling() == 1
            self._task.uncancel()
            self.cancelled = True
        self.cancelled = self.cancelled or self._scope.cancelled_caught
        self.done = True

    def cancel(self) -> None:
        if self._task is None:
            self._scope.cancel()
        else:
            self._task.cancel()


class SlowToClose:
    """A result whose closing takes its time."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self.log: list[tuple[str, float]] = []

    async def aclose(self) -> None:
        self.log.append(("begun", self._clock.now()))
        try:
            await self._clock.sleep(self._seconds)
            self.log.append(("closed", self._clock.now()))
        except BaseException:
            self.log.append(("cut", self._clock.now()))
            raise


@pytest.mark.parametrize(
    ("takes", "close_timeout", "ended"),
    [
        pytest.param(3, 5, ("closed", 3), id="in time"),
        pytest.param(float("inf"), 5, ("cut", 5), id="never"),
        pytest.param(3, 2, ("cut", 2), id="longer than allowed"),
        pytest.param(3, 0, ("cut", 0), id="no time at all"),
    ],
)
@pytest.mark.parametrize("discarded_by", ["Retry", "Fallback"])
@pytest.mark.anyio
async def test_the_closing_of_what_is_discarded_is_not_cancelled(
    discarded_by: str, takes: float, close_timeout: float, ended: tuple[str, float]
) -> None:
    """A discarded result is closed to its end in spite of the cancellation, which comes out then, after `close_timeout` at most."""
    clock = VirtualClock()
    thing = SlowToClose(clock, takes)
    bad = handle_result(lambda result: result is thing)
    builder: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(
        clock=clock, close_timeout=close_timeout
    )
    if discarded_by == "Retry":
        builder.add_retry(delay=7, should_handle=bad)
    else:
        builder.add_fallback(fallback_value="substitute", should_handle=bad)
    pipeline = builder.build()
    fn = Scripted(thing)
    async with anyio.create_task_group() as tasks:
        call = Call(tasks, pipeline.execute, fn)
        await tick()
        call.cancel()
        await tick()
        assert call.done == (ended[1] == 0)
        await clock.advance(ended[1])
        await tick()
        assert call.done
    assert thing.log == [("begun", 0), ended]
    assert fn.calls == 1
    # What was held back comes out, unless nothing was waited for any more.
    assert call.cancelled or (discarded_by, call.value) == ("Fallback", "substitute")
    assert clock.now() == ended[1]


@pytest.mark.asyncio
async def test_a_closing_is_shielded_from_task_cancel_again_and_again() -> None:
    """asyncio: however often the task is cancelled meanwhile, the closing ends first; all requests are the caller's."""
    clock = VirtualClock()
    thing = SlowToClose(clock, 3)
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_retry(should_handle=handle_result(lambda result: result is thing))
        .build()
    )
    task = asyncio.create_task(pipeline.execute(Scripted(thing)))
    await tick()
    for _ in range(3):
        task.cancel()
        await clock.advance(1)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert thing.log == [("begun", 0), ("closed", 3)]
    assert task.cancelling() == 3


@pytest.mark.asyncio
async def test_a_virtual_clock_moves_while_a_scopes_cancellation_is_held_back() -> None:
    """On asyncio anyio asks a cancelled scope's task to end turn after turn; a clock takes the loop for idle all the same."""
    clock = VirtualClock(autojump=True)
    closed = asyncio.Event()

    class Thing:
        async def aclose(self) -> None:
            clock.call_at(3, closed.set)
            await closed.wait()

    thing = Thing()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_retry(should_handle=handle_result(lambda result: result is thing))
        .build()
    )
    asyncio.get_running_loop().call_later(2, closed.set)  # to fail, in place of hanging
    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, pipeline.execute, Scripted(thing))
        await tick()
        call.cancel()
    assert call.cancelled
    assert clock.now() == 3


# ---- work that outlives its call -------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.anyio
async def test_a_cancelled_call_waits_for_its_callback_to_end(name: str) -> None:
    """No work outlives the call: it is over when the callback's cleanup is, not when the cancellation was asked for."""
    clock = VirtualClock()
    pipeline = ResiliencePipelineBuilder(clock=clock).add(strategy(name)).build()
    ended: list[float] = []

    async def callback() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(2)
            ended.append(clock.now())

    async with anyio.create_task_group() as tasks:
        call = Call(tasks, pipeline.execute, callback)
        await tick()
        call.cancel()
        await clock.advance(1)
        assert not call.done
        await clock.advance(1)
        await tick()
        assert call.cancelled
    assert ended == [2]


@pytest.mark.anyio
async def test_a_cancelled_consumer_closes_the_source_before_it_is_told() -> None:
    """Case ST-03: under all seven strategies the source has been left when the consumer's cancellation comes out."""
    log: list[str] = []

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            await anyio.sleep_forever()
        finally:
            log.append("source left")

    async def consume() -> None:
        try:
            async with all_seven().execute_stream(source) as stream:
                async for _ in stream:
                    log.append("chunk")
        finally:
            log.append("consumer told")

    async with anyio.create_task_group() as tasks:
        call = spawn(tasks, consume)
        await tick()
        call.cancel()
        await tick()
        assert call.cancelled
    assert log == ["chunk", "source left", "consumer told"]
