"""`health()`: the state of everything that was built, as plain data."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from resilience_pipeline import (
    CircuitBreakerControl,
    PropertyKey,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    SlidingWindow,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, boom, hang, ok, running

KEY = PropertyKey[Any]("key")


def fails() -> None:
    raise BoomError


def nothing() -> None: ...


def one(registry: ResiliencePipelineRegistry, name: str = "a") -> Any:
    """What the only strategy with state of the default instance says."""
    ((instance,),) = [registry.health()[name]]
    (report,) = instance["strategies"]
    json.dumps(registry.health(), allow_nan=False)
    return report


def registry_of(configure: Any, **options: Any) -> ResiliencePipelineRegistry:
    registry = ResiliencePipelineRegistry(**options)
    registry.add("a", configure)
    registry.get("a")
    return registry


def test_names_that_were_not_built_are_empty() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: builder.add_circuit_breaker())
    assert registry.health() == {"a": []}


def test_everything_that_keeps_state_is_listed() -> None:
    """By name and instance, outermost first, with the pipeline each belongs to, ready for JSON."""

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_rate_limiter(TokenBucket(5, 1), name="rate")
        builder.add_retry().add_pipeline(B("inner").add_concurrency_limiter(2).build())
        builder.add_circuit_breaker().add_timeout(1)

    registry = registry_of(configure)
    registry.get("a", "x")
    health = registry.health()
    assert json.loads(json.dumps(health, allow_nan=False)) == health
    assert [each["instance"] for each in health["a"]] == [None, "x"]
    assert [
        (each["strategy"], each["type"], each["pipeline"]) for each in health["a"][1]["strategies"]
    ] == [
        ("rate", "RateLimiter", "a"),
        ("ConcurrencyLimiter", "ConcurrencyLimiter", "inner"),
        ("CircuitBreaker", "CircuitBreaker", "a"),
    ]


@pytest.mark.anyio
async def test_a_circuit_breaker_says_how_it_stands() -> None:
    clock = VirtualClock()
    control = CircuitBreakerControl()

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_circuit_breaker(
            failure_ratio=0.5, minimum_throughput=3, break_duration=5, control=control
        )

    registry = registry_of(configure, clock=clock)
    handle = registry.get("a")
    fresh = {
        "strategy": "CircuitBreaker",
        "type": "CircuitBreaker",
        "pipeline": "a",
        "state": "closed",
        "throughput": 0,
        "failures": 0,
        "failure_rate": 0.0,
        "opened_at": None,
        "blocked_until": None,
        "retry_after": 0.0,
        "idle": True,
    }
    assert one(registry) == fresh
    await handle.execute(ok)
    counted = fresh | {"throughput": 1, "idle": False}
    assert one(registry) == counted
    for _ in range(2):
        with pytest.raises(BoomError):
            await handle.execute(boom)
    opened_at = clock.now()
    await clock.advance(2)
    report = one(registry)
    assert report["state"] == "open"
    assert (report["throughput"], report["failures"]) == (3, 2)
    assert report["failure_rate"] == pytest.approx(2 / 3)
    assert (report["opened_at"], report["blocked_until"]) == (opened_at, opened_at + 5)
    assert report["retry_after"] == 3
    await clock.advance(3)
    assert one(registry)["retry_after"] == 0
    async with running(handle.execute, hang):
        report = one(registry)
        assert (report["state"], report["retry_after"]) == ("half_open", 5)
    control.isolate()
    report = one(registry)
    assert (report["state"], report["retry_after"], report["idle"]) == ("isolated", None, False)
    control.close()
    assert one(registry) == fresh


@pytest.mark.anyio
async def test_a_break_without_end_is_plain_data() -> None:
    """JSON has no infinity."""
    registry = registry_of(
        lambda builder: builder.add_circuit_breaker(
            failure_ratio=0.5,
            minimum_throughput=2,
            break_duration="1s",
            break_duration_generator=lambda _: float("inf"),
        )
    )
    for _ in range(2):
        with pytest.raises(BoomError):
            await registry.get("a").execute(boom)
    report = one(registry)
    assert (report["state"], report["blocked_until"], report["retry_after"]) == ("open", None, None)


@pytest.mark.anyio
async def test_a_concurrency_limiter_says_what_is_free() -> None:
    registry = registry_of(lambda builder: builder.add_concurrency_limiter(2, 1))
    handle = registry.get("a")
    names = ("permits", "free", "queued", "idle")
    assert [one(registry)[name] for name in names] == [2, 2, 0, True]
    async with running(handle.execute, hang):
        assert [one(registry)[name] for name in names] == [2, 1, 0, False]
        async with running(handle.execute, hang), running(handle.execute, hang):
            assert [one(registry)[name] for name in names] == [2, 0, 1, False]
    assert [one(registry)[name] for name in names] == [2, 2, 0, True]


@pytest.mark.anyio
async def test_a_rate_limiter_says_what_is_left() -> None:
    clock = VirtualClock()
    registry = registry_of(
        lambda builder: builder.add_rate_limiter(TokenBucket(2, 0.5), queue_limit=1), clock=clock
    )
    handle = registry.get("a")
    names = ("available", "retry_after", "queued", "idle")
    assert [one(registry)[name] for name in names] == [2, 0, 0, True]
    await handle.execute(ok)
    assert [one(registry)[name] for name in names] == [1, 0, 0, False]
    await handle.execute(ok)
    assert [one(registry)[name] for name in names] == [0, 2, 0, False]
    async with running(handle.execute, ok):
        assert [one(registry)[name] for name in names] == [0, 2, 1, False]
    await clock.advance(4)
    assert [one(registry)[name] for name in names] == [2, 0, 0, True]


@pytest.mark.anyio
async def test_a_window_says_what_is_left() -> None:
    clock = VirtualClock()
    registry = registry_of(
        lambda builder: builder.add_rate_limiter(SlidingWindow(3, 10)), clock=clock
    )
    handle = registry.get("a")
    await handle.execute(ok)
    await clock.advance(4)
    await handle.execute(ok)
    assert one(registry)["available"] == 1
    await handle.execute(ok)
    assert (one(registry)["available"], one(registry)["retry_after"]) == (0, 6)
    await clock.advance(6)
    assert one(registry)["available"] == 1


@pytest.mark.anyio
async def test_a_lock_says_who_has_it() -> None:
    """A lock of its own that is held keeps the instance; one that is shared outlives it anyway."""
    for shared in (None, ResilienceLock()):
        registry = registry_of(lambda builder, lock=shared: builder.add_lock(lock))
        handle = registry.get("a")
        assert (one(registry)["held"], one(registry)["queued"], one(registry)["idle"]) == (
            0,
            0,
            True,
        )
        async with running(handle.execute, hang), running(handle.execute, ok):
            report = one(registry)
            assert (report["held"], report["queued"]) == (1, 1)
            assert report["idle"] is (shared is not None)
        assert one(registry)["idle"]


@pytest.mark.anyio
async def test_a_cache_says_what_it_has() -> None:
    """A call in flight keeps the instance, what is stored doesn't."""
    registry = registry_of(lambda builder: builder.add_cache())
    handle = registry.get("a")
    for _ in range(2):
        await handle.execute(ok)
    report = one(registry)
    assert (report["size"], report["hits"], report["misses"]) == (1, 1, 1)
    assert (report["in_flight"], report["idle"]) == (0, True)
    async with running(handle.execute, hang):
        assert (one(registry)["in_flight"], one(registry)["idle"]) == (1, False)
    assert one(registry)["idle"]


@pytest.mark.anyio
async def test_what_records_afresh_is_not_let_go(tmp_path: Path) -> None:
    """Another one would remove what this one has recorded."""
    for mode, idle in (("record", False), ("incremental", True)):
        registry = registry_of(
            lambda builder, mode=mode: builder.add_record_replay(tmp_path / mode, mode=mode)
        )
        handle = registry.get("a")
        assert one(registry) == {
            "strategy": "RecordReplay",
            "type": "RecordReplay",
            "pipeline": "a",
            "mode": mode,
            "recording": 0,
            "idle": True,
        }
        async with running(handle.execute, hang):
            assert (one(registry)["recording"], one(registry)["idle"]) == (1, False)
        assert one(registry)["idle"] is idle


@pytest.mark.parametrize("keys", [("1", 1), (1, "1"), ("1", 1, Fraction(1, 3), "Fraction(1, 3)")])
def test_keys_that_are_written_alike_hide_nothing(keys: tuple[Any, ...]) -> None:
    """Neither each other's state, nor that one of them is not idle."""

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_circuit_breaker(
            consecutive_failures=1, key=lambda context: context.properties[KEY]
        )

    registry = registry_of(configure)
    for key in keys:
        context = ResilienceContext(properties={KEY: key})
        registry.get("a").settle_sync(fails if key == keys[0] else nothing, context=context)
    report = one(registry)
    states = [each["state"] for each in report["keys"].values()]
    assert states == ["open", *["closed"] * (len(keys) - 1)]
    assert not report["idle"]


class Foreign:
    def try_acquire(self, now: float) -> float:
        return 0.0


def test_a_limit_of_ones_own_is_not_asked() -> None:
    """Asking it would take a permit."""
    registry = registry_of(lambda builder: builder.add_rate_limiter(Foreign()))
    report = one(registry)
    assert (report["available"], report["retry_after"], report["idle"]) == (None, None, True)


def test_one_that_can_not_tell_does_not_hide_the_others() -> None:
    """What it raises stands in its place."""

    class Broken:
        name = "broken"

        def bind(self, next: Any, site: Any) -> Any:  # noqa: A002
            return BrokenHandler()

    class BrokenHandler:
        def __call__(self, context: Any) -> Any: ...

        def health(self) -> Any:
            raise RuntimeError("no idea")

    broken: Any = Broken()
    registry = registry_of(lambda builder: builder.add(broken).add_concurrency_limiter(1))
    reports = registry.health()["a"][0]["strategies"]
    assert reports[0] == {
        "strategy": "broken",
        "type": "Broken",
        "pipeline": "a",
        "error": "RuntimeError: no idea",
    }
    assert reports[1]["free"] == 1


def test_after_a_reload_it_is_the_new_state() -> None:
    registry = registry_of(lambda builder: builder.add_concurrency_limiter(1))
    registry.reload("a", lambda builder: builder.add_concurrency_limiter(7))
    assert one(registry)["permits"] == 7
