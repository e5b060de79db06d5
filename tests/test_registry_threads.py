"""The registry from many threads and event loops at once: built once, reloaded as a whole, never stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, Event
from typing import Any

import pytest
import trio

from resilience_pipeline import (
    MisuseError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Strategy,
    Timeout,
)
from resilience_pipeline.strategies import Handler, Site
from support.beside import until
from support.calls import ok

#: Seconds after which a test that is stuck fails; nothing waits for them to pass.
STUCK = 30.0


def at_once(jobs: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run jobs in threads of their own that start together; give what each gave or raised."""
    jobs = list(jobs)
    barrier = Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        barrier.wait(STUCK)
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs, timeout=STUCK))


def begun(registry: ResiliencePipelineRegistry, who: int) -> None:
    """Wait until a number of threads wait for what another one does."""
    until(lambda: len(registry._waiting._waiting) == who)


def held(entered: Event, go_on: Event) -> Callable[[ResiliencePipelineBuilder], None]:
    """Make a `configure` that says when it runs, and does so until it is let go on."""

    def configure(builder: ResiliencePipelineBuilder) -> None:
        entered.set()
        assert go_on.wait(STUCK)

    return configure


# ---- built once ---------------------------------------------------------------------------------


def test_threads_that_ask_at_once_get_one_pipeline() -> None:
    """All of them wait for the first, and `configure` runs once per instance."""
    built: list[tuple[str | None, str | None]] = []
    registry = ResiliencePipelineRegistry()
    for name in "ab":
        registry.add(name, lambda builder: built.append((builder.name, builder.instance)))
    asked = [(name, key) for name in "ab" for key in (None, "x")] * 8
    got = at_once([lambda name=name, key=key: registry.get(name, key) for name, key in asked])  # type: ignore[misc]
    assert sorted(built, key=str) == sorted(set(asked), key=str)
    assert len(set(map(id, got))) == 4


def test_others_wait_while_one_builds() -> None:
    """Held inside `configure`: the others have nothing yet, and get what it builds."""
    registry = ResiliencePipelineRegistry()
    entered, go_on, calls = Event(), Event(), 0

    def configure(builder: ResiliencePipelineBuilder) -> None:
        nonlocal calls
        calls += 1
        held(entered, go_on)(builder)

    registry.add("a", configure)
    with ThreadPoolExecutor(8) as threads:
        first = threads.submit(registry.get, "a")
        assert entered.wait(STUCK)
        others = [threads.submit(registry.get, "a") for _ in range(5)]
        begun(registry, 5)
        assert not any(other.done() for other in others)
        go_on.set()
        assert {other.result(STUCK) for other in others} == {first.result(STUCK)}
    assert calls == 1


def test_event_loops_get_one_pipeline() -> None:
    """Several loops of asyncio and trio, each in a thread, ask and call at once."""
    built: list[int] = []
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: built.append(1) or builder.add_retry().add_timeout(60))  # type: ignore[func-returns-value]

    async def use() -> ResiliencePipeline:
        pipeline = registry.get("a")
        assert await pipeline.execute(ok) == 1
        return pipeline

    got = at_once([lambda: asyncio.run(use()), lambda: trio.run(use)] * 4)
    assert len(set(map(id, got))) == 1
    assert built == [1]


def test_other_names_do_not_wait() -> None:
    """While one pipeline is being built the others are served and built."""
    registry = ResiliencePipelineRegistry()
    entered, go_on = Event(), Event()
    registry.add("slow", held(entered, go_on))
    registry.add("quick", lambda builder: builder.add_timeout(1))
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(registry.get, "slow")
        assert entered.wait(STUCK)
        assert registry.get("quick").strategies == (Timeout(1),)
        assert "slow" in registry
        assert registry.health()["slow"] == []
        go_on.set()
        slow.result(STUCK)


def test_a_failing_configure_fails_the_one_who_ran_it() -> None:
    """Those who waited try for themselves, one at a time: here the second attempt serves all the rest."""
    registry = ResiliencePipelineRegistry()
    entered, go_on, calls = Event(), Event(), 0

    def configure(builder: ResiliencePipelineBuilder) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            assert go_on.wait(STUCK)
            raise ZeroDivisionError

    registry.add("a", configure)
    with ThreadPoolExecutor(5) as threads:
        first = threads.submit(registry.get, "a")
        assert entered.wait(STUCK)
        others = [threads.submit(registry.get, "a") for _ in range(3)]
        begun(registry, 3)
        go_on.set()
        assert isinstance(first.exception(STUCK), ZeroDivisionError)
        assert {other.result(STUCK) for other in others} == {registry.get("a")}
    assert calls == 2


def test_an_interrupted_configure_leaves_nothing_behind() -> None:
    """What is no `Exception` comes out too, and the next one builds."""
    raised: list[BaseException] = [KeyboardInterrupt()]
    registry = ResiliencePipelineRegistry()

    def configure(builder: ResiliencePipelineBuilder) -> None:
        if raised:
            raise raised.pop()

    registry.add("a", configure)
    with pytest.raises(KeyboardInterrupt):
        registry.get("a")
    assert registry.get("a") is registry.get("a")


def test_threads_that_need_each_other_are_told() -> None:
    """Two threads whose `configure`s ask for each other's pipeline: one is refused, none is stuck."""
    registry = ResiliencePipelineRegistry()
    barrier = Barrier(2)

    def needs(other: str) -> Callable[[ResiliencePipelineBuilder], Any]:
        first = [True]

        def configure(builder: ResiliencePipelineBuilder) -> None:
            if first and first.pop():
                barrier.wait(STUCK)
            builder.add_pipeline(registry.get(other))

        return configure

    registry.add("a", needs("b"))
    registry.add("b", needs("a"))
    got = at_once([lambda: registry.get("a"), lambda: registry.get("b")])
    # Each needs the other, so neither can be had; what counts is that both are told.
    assert all(isinstance(each, MisuseError) for each in got), got


# ---- reloads ------------------------------------------------------------------------------------


class Both(Strategy[Any]):
    """Half of a pair; a call that passes two of different versions has seen two pipelines."""

    name = "both"

    def __init__(self, version: int, seen: list[tuple[int, int]]) -> None:
        self._version = version
        self._seen = seen

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: Any) -> Any:
            other = await next(context)
            if isinstance(other, int):
                self._seen.append((self._version, other))
                return other
            return self._version

        return handle


def test_no_call_sees_a_mixture() -> None:
    """Calls in three threads while the pipeline is reloaded over and over."""
    seen: list[tuple[int, int]] = []
    version, called, over = 0, Event(), Event()

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add(Both(version, seen)).add(Both(version, seen))

    registry = ResiliencePipelineRegistry()
    registry.add("a", configure)
    handle = registry.get("a")

    def call() -> None:
        while not over.is_set():
            handle.execute_sync(lambda: None)
            called.set()

    def reload() -> None:
        nonlocal version
        called.wait()
        for version in range(1, 200):  # noqa: B007
            registry.reload("a")
        over.set()

    assert at_once([call, call, call, reload]) == [None] * 4
    assert seen
    assert all(outer == inner for outer, inner in seen)
    assert handle.execute_sync(lambda: None) == 199


def test_a_build_that_was_overtaken_by_a_reload_is_done_anew() -> None:
    """Who asked while the old `configure` ran gets a pipeline of the new one."""
    registry = ResiliencePipelineRegistry()
    entered, go_on = Event(), Event()

    def old(builder: ResiliencePipelineBuilder) -> None:
        builder.add_timeout(1)
        entered.set()
        assert go_on.wait(STUCK)

    registry.add("a", old)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(registry.get, "a")
        assert entered.wait(STUCK)
        registry.reload("a", lambda builder: builder.add_timeout(2))
        go_on.set()
        assert asked.result(STUCK).strategies == (Timeout(2),)


def test_a_build_that_was_overtaken_by_a_removal_is_given_to_who_asked() -> None:
    registry = ResiliencePipelineRegistry()
    entered, go_on = Event(), Event()
    registry.add("a", held(entered, go_on))
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(registry.get, "a")
        assert entered.wait(STUCK)
        registry.remove("a")
        go_on.set()
        assert asked.result(STUCK).execute_sync(lambda: 1) == 1
    assert "a" not in registry


def test_an_instance_that_appears_during_a_reload_is_reloaded_too() -> None:
    """No instance is left on the old strategies, whenever it was asked for."""
    registry = ResiliencePipelineRegistry()
    entered, go_on = Event(), Event()

    def new(builder: ResiliencePipelineBuilder) -> None:
        builder.add_timeout(2)
        entered.set()
        assert go_on.wait(STUCK)

    registry.add("a", lambda builder: builder.add_timeout(1))
    first = registry.get("a", "first")
    with ThreadPoolExecutor(1) as threads:
        reloading = threads.submit(registry.reload, "a", new)
        assert entered.wait(STUCK)
        second = registry.get("a", "second")
        assert second.strategies == first.strategies == (Timeout(1),)
        go_on.set()
        reloading.result(STUCK)
    assert second.strategies == first.strategies == (Timeout(2),)


def test_reloads_come_one_after_another() -> None:
    """The one that began last wins, also where the first takes longer."""
    registry = ResiliencePipelineRegistry()
    entered, go_on = Event(), Event()

    def slow(builder: ResiliencePipelineBuilder) -> None:
        entered.set()
        assert go_on.wait(STUCK)
        builder.add_timeout(2)

    registry.add("a", lambda builder: builder.add_timeout(1))
    handle = registry.get("a")
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(registry.reload, "a", slow)
        assert entered.wait(STUCK)
        second: Future[None] = threads.submit(
            registry.reload, "a", lambda builder: builder.add_timeout(3)
        )
        begun(registry, 1)
        assert handle.strategies == (Timeout(1),)
        go_on.set()
        first.result(STUCK)
        second.result(STUCK)
    assert handle.strategies == (Timeout(3),)


def test_everything_at_once() -> None:
    """Gets, reloads, removals, additions and looks from eight threads: nobody is stuck, nothing is torn."""
    registry = ResiliencePipelineRegistry(max_instances=3)

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_concurrency_limiter(100).add_circuit_breaker().add_timeout(60)

    def get() -> None:
        for number in range(150):
            pipeline = registry.get_or_add("a", configure, str(number % 7))
            assert pipeline.execute_sync(lambda: 1) == 1
            assert pipeline.instance == str(number % 7)

    def change() -> None:
        for number in range(60):
            if number % 3 == 0:
                with suppress(KeyError):
                    registry.remove("a")
            registry.add("a", configure, replace=True)
            with suppress(KeyError):
                registry.reload("a")

    def look() -> None:
        for _ in range(100):
            for instances in registry.health().values():
                assert all(len(each["strategies"]) == 2 for each in instances)
            assert list(registry) in ([], ["a"])

    results = at_once([get] * 4 + [change] * 2 + [look] * 2)
    assert results == [None] * 8
    assert registry._waiting._waiting == {}
