"""Instances: state apart, and letting go without ever changing an answer (`max_instances`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    FixedWindow,
    LockRejectedError,
    RateLimiterRejectedError,
    ResilienceContext,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Strategy,
    Timeout,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline.strategies import Handler, Site, SupportsHealth
from resilience_pipeline.testing import VirtualClock
from support.beside import LIMIT, Gate, let_go
from support.beside import HandClock as TimePasses
from support.calls import B, BoomError, boom, hang, ok, running


class Kept:
    """A registry of one name that notes which instances were built."""

    def __init__(
        self, configure: Callable[[ResiliencePipelineBuilder], Any], limit: int = 2, **options: Any
    ) -> None:
        self.built: list[str | None] = []
        self.registry = ResiliencePipelineRegistry(max_instances=limit, **options)

        def noted(builder: ResiliencePipelineBuilder) -> None:
            self.built.append(builder.instance)
            configure(builder)

        self.registry.add("a", noted)

    def get(self, instance: str | None = None) -> Any:
        return self.registry.get("a", instance)

    @property
    def kept(self) -> list[str | None]:
        return [each["instance"] for each in self.registry.health()["a"]]


def breaker(builder: ResiliencePipelineBuilder) -> None:
    builder.add_circuit_breaker(failure_ratio=0.5, minimum_throughput=2, sampling_duration=10)


def limiter(builder: ResiliencePipelineBuilder) -> None:
    builder.add_concurrency_limiter(1)


# ---- state apart --------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_instances_have_state_of_their_own() -> None:
    """An open circuit of one host says nothing about another."""
    registry = ResiliencePipelineRegistry()
    registry.add("a", breaker)
    for _ in range(2):
        with pytest.raises(BoomError):
            await registry.get("a", "bad").execute(boom)
    with pytest.raises(BrokenCircuitError):
        await registry.get("a", "bad").execute(ok)
    assert await registry.get("a", "good").execute(ok) == 1
    assert await registry.get("a").execute(ok) == 1


def test_without_a_bound_all_are_kept() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("a", breaker)
    pipelines = {str(number): registry.get("a", str(number)) for number in range(2000)}
    assert all(registry.get("a", key) is pipeline for key, pipeline in pipelines.items())


# ---- letting go ---------------------------------------------------------------------------------


def test_the_least_recently_used_goes() -> None:
    """Asked for again it is built again; those that were used since are still there."""
    kept = Kept(breaker)
    for key in ("1", "2", "1", "3"):
        kept.get(key)
    assert kept.kept == ["1", "3"]
    kept.get("2")
    assert kept.built == ["1", "2", "3", "2"]
    assert kept.kept == ["3", "2"]


def test_the_default_instance_stays() -> None:
    """It does not count either."""
    kept = Kept(breaker, 1)
    for key in (None, "1", "2"):
        kept.get(key)
    assert kept.kept == [None, "2"]


def test_names_have_bounds_of_their_own() -> None:
    kept = Kept(breaker, 1)
    kept.registry.add("b", breaker)
    one = kept.get("1")
    kept.registry.get("b", "1")
    assert kept.get("1") is one


def test_what_was_let_go_is_freed_at_once() -> None:
    """Without waiting for the garbage collector to find circles."""
    kept = Kept(breaker, 1)
    gone = weakref.ref(kept.get("1"))
    inside = weakref.ref(gone()._cell.current)  # type: ignore[union-attr]
    gc.disable()
    try:
        kept.get("2")
        assert gone() is inside() is None
    finally:
        gc.enable()


@pytest.mark.anyio
async def test_errors_that_a_breaker_keeps_do_not_keep_its_instance() -> None:
    """The traceback of what it handled last leads through the call; it must not lead to the handle."""

    def guarded(builder: ResiliencePipelineBuilder) -> None:
        builder.add_circuit_breaker(failure_ratio=1, minimum_throughput=100, sampling_duration=10)

    clock = VirtualClock()
    kept = Kept(guarded, 1, clock=clock)
    with suppress(BoomError):
        await kept.get("1").execute(boom)
    await kept.get("1").settle(boom)
    with suppress(BoomError):
        kept.get("2").execute_sync(boom_here)
    kept.get("2").settle_sync(boom_here)
    await clock.advance(10)
    gc.disable()
    try:
        kept.get("3")
        assert kept.kept == ["3"]
    finally:
        gc.enable()


def boom_here() -> int:
    raise BoomError


def test_a_million_hosts_leave_nothing() -> None:
    """What is remembered is bounded, however many instances there were."""
    kept = Kept(lambda builder: builder.add_timeout(1), 5)
    for number in range(3000):
        kept.get(str(number))
    instances = kept.registry._entries["a"].instances
    assert len(kept.kept) == 5
    assert len(instances._lent) == len(instances._returned) == len(instances._home) == 0


@pytest.mark.anyio
async def test_an_open_circuit_stays() -> None:
    """Forgetting it would let calls through; the next one goes in its place."""
    kept = Kept(breaker)
    for _ in range(2):
        with pytest.raises(BoomError):
            await kept.get("bad").execute(boom)
    for key in ("2", "3", "4"):
        kept.get(key)
    with pytest.raises(BrokenCircuitError):
        await kept.get("bad").execute(ok)
    assert kept.kept == ["4", "bad"]


@pytest.mark.anyio
async def test_counts_stay_as_long_as_they_count() -> None:
    """A window that is not empty is not forgotten, until it is."""
    clock = VirtualClock()
    kept = Kept(breaker, 1, clock=clock)
    with pytest.raises(BoomError):
        await kept.get("1").execute(boom)
    kept.get("2")
    assert kept.kept == ["1", "2"]
    await clock.advance(10)
    kept.get("3")
    assert kept.kept == ["3"]


@pytest.mark.anyio
async def test_an_isolated_circuit_stays() -> None:
    control = CircuitBreakerControl()
    kept = Kept(lambda builder: builder.add_circuit_breaker(control=control), 1)
    kept.get("1")
    control.isolate()
    kept.get("2")
    assert kept.kept == ["1", "2"]
    control.close()


@pytest.mark.anyio
async def test_used_up_permits_stay() -> None:
    """A bucket that is not full, a window that has begun: a new one would grant more."""
    clock = VirtualClock()
    for limit in (TokenBucket(1, 1), FixedWindow(1, 1)):
        kept = Kept(lambda builder, limit=limit: builder.add_rate_limiter(limit), 1, clock=clock)  # type: ignore[misc]
        await kept.get("1").execute(ok)
        kept.get("2")
        with pytest.raises(RateLimiterRejectedError):
            await kept.get("1").execute(ok)
        await clock.advance(1)
        kept.get("3")
        assert kept.kept == ["3"]


@pytest.mark.anyio
async def test_a_running_call_keeps_its_instance() -> None:
    """A permit that is held by a call is seen by whoever asks for the instance."""
    kept = Kept(limiter, 1)
    async with running(kept.get("1").execute, hang):
        kept.get("2")
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await kept.get("1").execute(ok)
    kept.get("3")
    assert kept.kept == ["3"]


@pytest.mark.anyio
async def test_many_in_use_are_not_all_asked_each_time() -> None:
    """Each new instance costs a constant number of questions, and the bound holds again by and by."""
    asked = 0

    class Asked(Counting):
        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            return _Asked(next, False)

    class _Asked(_Counted):
        def health(self) -> dict[str, Any]:
            nonlocal asked
            asked += 1
            return {"idle": idle}

    idle = False
    kept = Kept(lambda builder: builder.add(Asked()), 100)
    for number in range(1000):
        kept.get(str(number))
    assert asked < 1000 * 20
    assert len(kept.kept) == 1000
    idle = True
    for number in range(1000, 1080):
        kept.get(str(number))
    assert len(kept.kept) <= 107


# ---- what somebody still has --------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_handle_that_somebody_has_works_on() -> None:
    kept = Kept(breaker, 1)
    mine = kept.get("1")
    kept.get("2")
    assert await mine.execute(ok) == 1
    kept.registry.reload("a", lambda builder: builder.add_timeout(7))
    assert mine.strategies == (Timeout(7),)


@pytest.mark.anyio
async def test_state_is_never_split() -> None:
    """Asked for again while somebody has a handle: another handle, the same state, no second build."""
    kept = Kept(limiter, 1)
    mine = kept.get("1")
    kept.get("2")
    again = kept.get("1")
    assert again is not mine
    async with running(mine.execute, hang):
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await again.execute(ok)
    assert kept.built == ["1", "2"]
    kept.registry.reload("a", lambda builder: builder.add_timeout(7))
    assert mine.strategies == again.strategies == (Timeout(7),)


@pytest.mark.anyio
async def test_what_happens_after_letting_go_is_not_forgotten() -> None:
    """A circuit that opens by way of a handle the registry had let go is open for the next who asks."""
    kept = Kept(breaker, 1)
    mine = kept.get("1")
    kept.get("2")
    for _ in range(2):
        with pytest.raises(BoomError):
            await mine.execute(boom)
    del mine
    with pytest.raises(BrokenCircuitError):
        await kept.get("1").execute(ok)
    kept.get("3")
    assert kept.kept == ["1", "3"]


@pytest.mark.anyio
async def test_what_nobody_has_any_more_is_judged_with_the_next() -> None:
    """An idle one is forgotten, one with an open circuit is kept again, whoever is asked for."""
    kept = Kept(breaker, 1)
    bad, good = kept.get("bad"), kept.get("good")
    kept.get("2")
    for _ in range(2):
        with pytest.raises(BoomError):
            await bad.execute(boom)
    del bad, good
    assert sorted(filter(None, kept.kept)) == ["2", "bad", "good"]
    kept.get("3")
    assert kept.kept == ["bad", "3"]


async def two() -> AsyncIterator[int]:
    yield 1
    yield 2


@pytest.mark.anyio
async def test_a_stream_keeps_its_instance() -> None:
    """Made from a handle that nobody else has: what it comes to is counted where the next call looks."""
    kept = Kept(breaker, 1)
    streams = [kept.get("1").execute_stream(failing) for _ in range(2)]
    kept.get("2")
    for stream in streams:
        with pytest.raises(BoomError):
            await anext(stream)
    with pytest.raises(BrokenCircuitError):
        await kept.get("1").execute(ok)


async def failing() -> AsyncIterator[int]:
    raise BoomError
    yield


def test_what_nests_an_instance_keeps_it() -> None:
    """A pipeline that nests a handle goes on sharing its state."""
    kept = Kept(limiter, 1)
    outer = B().add_pipeline(kept.get("1")).build()
    kept.get("2")
    kept.get("1")
    assert kept.built == ["1", "2"]
    assert len(outer.strategies) == 1


def test_a_failing_build_lets_nothing_go() -> None:
    def configure(builder: ResiliencePipelineBuilder) -> None:
        if builder.instance == "bad":
            raise ZeroDivisionError

    kept = Kept(configure, 1)
    kept.get("1")
    with pytest.raises(ZeroDivisionError):
        kept.get("bad")
    assert kept.kept == ["1"]


# ---- strategies of one's own --------------------------------------------------------------------


class Counting(Strategy[Any]):
    """A strategy that counts its calls, and says so."""

    name = "Counting"

    def __init__(self, *, fails: bool = False) -> None:
        self._fails = fails

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        return _Counted(next, self._fails)


class _Counted:
    def __init__(self, next: Handler, fails: bool) -> None:  # noqa: A002
        self._next = next
        self._fails = fails
        self.count = 0

    async def __call__(self, context: ResilienceContext) -> Any:
        self.count += 1
        return await self._next(context)

    def health(self) -> dict[str, Any]:
        if self._fails:
            raise RuntimeError("no idea")
        return {"count": self.count, "idle": not self.count}


@pytest.mark.anyio
async def test_a_strategy_of_ones_own_says_whether_it_is_idle() -> None:
    """By `health()` of what `bind` returns, see `SupportsHealth`."""
    assert isinstance(_Counted(ok, False), SupportsHealth)  # type: ignore[arg-type]
    kept = Kept(lambda builder: builder.add(Counting()), 1)
    await kept.get("1").execute(ok)
    kept.get("2")
    kept.get("3")
    assert kept.kept == ["1", "3"]


def test_a_strategy_that_can_not_tell_stays() -> None:
    """Nobody knows what would be forgotten."""
    kept = Kept(lambda builder: builder.add(Counting(fails=True)), 1)
    kept.get("1")
    kept.get("2")
    assert kept.kept == ["1", "2"]


def test_a_lock_that_a_thread_still_holds_stays() -> None:
    """The call has ended with its time; what it does goes on, and nobody else may be inside."""
    hand = TimePasses()
    gate = Gate(clock=hand)

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_timeout(LIMIT).add_lock(max_wait=0)

    kept = Kept(configure, 1, clock=hand)
    try:
        assert isinstance(kept.get("1").settle_sync(gate).error, TimeoutRejectedError)
        kept.get("2")
        kept.get("3")
        refused = kept.get("1").settle_sync(lambda: None)
    finally:
        let_go(gate)
    assert isinstance(refused.error, LockRejectedError)


# ---- against a registry that forgets nothing ----------------------------------------------------


class HandClock:
    """Time that passes when a test says so; nothing here waits."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> Any:
        raise NotImplementedError

    def call_at(self, when: float, callback: Any) -> Any:
        raise NotImplementedError


def guarded(builder: ResiliencePipelineBuilder) -> None:
    builder.add_rate_limiter(TokenBucket(4, 0.5))
    builder.add_circuit_breaker(
        failure_ratio=0.5, minimum_throughput=2, sampling_duration=6, break_duration=4
    )


STEPS = ("call", "fail", "fail", "hold", "drop", "held call", "held fail", "wait", "reload")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_letting_go_changes_no_answer(limit: int) -> None:
    """Whatever is called, held, dropped and reloaded: the same outcomes as where all are kept."""
    for seed in range(50):
        play(limit, Random(seed))


def play(limit: int, chance: Random) -> None:
    """Do the same to a registry that lets go and to one that keeps all, and compare the outcomes."""
    clock = HandClock()
    held: dict[str, list[Any]] = {}
    registries = [
        ResiliencePipelineRegistry(max_instances=most, clock=clock) for most in (limit, None)
    ]
    for registry in registries:
        registry.add("x", guarded)

    def get(key: str) -> list[Any]:
        return [registry.get("x", key) for registry in registries]

    def both(pipelines: list[Any], fn: Callable[[], int]) -> None:
        one, other = [pipeline.settle_sync(fn) for pipeline in pipelines]
        assert type(one) is type(other)
        assert type(one.error) is type(other.error)
        assert getattr(one.error, "retry_after", None) == getattr(other.error, "retry_after", None)

    for _ in range(80):
        step, key = chance.choice(STEPS), chance.choice("abcd")
        if step == "wait":
            clock.time += chance.choice([0.5, 2.0, 4.0, 9.0])
        elif step == "reload" and chance.random() < 0.2:
            for registry in registries:
                registry.reload("x")
        elif step == "hold":
            held[key] = get(key)
        elif step == "drop":
            held.pop(key, None)
        elif step in {"call", "fail"}:
            both(get(key), int if step == "call" else boom_here)
        elif step in {"held call", "held fail"} and key in held:
            both(held[key], int if step == "held call" else boom_here)
