"""`reload`: the handle stays valid, a call runs wholly on the old pipeline or wholly on the new one."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    Attempt,
    BrokenCircuitError,
    CircuitBreaker,
    ConcurrencyLimiterRejectedError,
    Failure,
    MisuseError,
    Rejected,
    ReloadEvent,
    ReloadFailedEvent,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Retry,
    Success,
    Timeout,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline._reloadable import PipelineHandle
from resilience_pipeline.telemetry import Severity, TelemetryEvent
from resilience_pipeline.testing import VirtualClock, capture_events
from support.calls import B, BoomError, Calls, Watching, boom, hang, ok, running, tick, tick_until

Configure = Callable[[ResiliencePipelineBuilder], Any]


def watching(log: list[str], *names: str) -> Configure:
    def configure(builder: ResiliencePipelineBuilder) -> None:
        for name in names:
            builder.add(Watching(name, log))

    return configure


def registered(configure: Configure, **options: Any) -> ResiliencePipelineRegistry:
    registry = ResiliencePipelineRegistry(**options)
    registry.add("a", configure)
    return registry


# ---- the handle ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_same_handle_uses_the_new_strategies() -> None:
    """RG-06: what `get` gave before a reload goes through the new strategies afterwards."""
    log: list[str] = []
    registry = registered(watching(log, "old"))
    handle = registry.get("a")
    await handle.execute(ok)
    registry.reload("a", watching(log, "new"))
    await handle.execute(ok)
    assert log == [">old", "<old", ">new", "<new"]
    assert registry.get("a") is handle


def test_the_handle_shows_what_serves_now() -> None:
    """TS-02: `strategies`, `name`, `instance` and `repr` are those of the current pipeline, as if it were the only one."""
    registry = registered(lambda builder: builder.add_timeout(1))
    handle = registry.get("a", "x")

    def renamed(builder: ResiliencePipelineBuilder) -> None:
        builder.name = "b"
        builder.add_retry()

    registry.reload("a", renamed)
    assert handle.strategies == (Retry(),)
    assert (handle.name, handle.instance) == ("b", "x")
    assert repr(handle) == "ResiliencePipelineBuilder(name='b', instance='x').add_retry().build()"


def test_reload_without_configure_calls_the_same_again() -> None:
    """As for a `configure` that reads settings when it is called."""
    limits = [1.0]
    registry = registered(lambda builder: builder.add_timeout(limits[0]))
    handle = registry.get("a")
    limits[0] = 2.0
    assert handle.strategies == (Timeout(1),)
    registry.reload("a")
    assert handle.strategies == (Timeout(2),)


def test_reload_stays_lazy() -> None:
    """A name nobody has asked for is not built by a reload; its next `get` uses the new one."""
    built: list[str] = []
    registry = registered(lambda builder: built.append("old"))
    registry.reload("a", lambda builder: built.append("new"))
    assert built == []
    registry.get("a")
    assert built == ["new"]


def test_reload_reaches_every_instance() -> None:
    registry = registered(lambda builder: builder.add_timeout(1))
    handles = [registry.get("a", instance) for instance in (None, "x", "y")]
    registry.reload("a", lambda builder: builder.add_timeout(2))
    assert [handle.strategies for handle in handles] == [(Timeout(2),)] * 3
    assert [handle.instance for handle in handles] == [None, "x", "y"]
    assert registry.get("a", "new").strategies == (Timeout(2),)


@pytest.mark.parametrize("instances", [[None], [None, "x"], ["x", "y", "z"]])
def test_a_failing_configure_leaves_all_of_the_old_in_place(instances: list[str | None]) -> None:
    """RG-08: its error comes out, no instance is changed, and `configure` is the old one."""
    registry = registered(lambda builder: builder.add_timeout(1))
    handles = [registry.get("a", instance) for instance in instances]

    def fails(builder: ResiliencePipelineBuilder) -> None:
        builder.add_timeout(2)
        if builder.instance == instances[-1]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        registry.reload("a", fails)
    assert [handle.strategies for handle in handles] == [(Timeout(1),)] * len(handles)
    assert registry.get("a", "new").strategies == (Timeout(1),)
    registry.reload("a", lambda builder: builder.add_timeout(3))
    assert handles[0].strategies == (Timeout(3),)


def told(events: list[TelemetryEvent]) -> list[tuple[str, str | None, str | None]]:
    return [(each.name, each.pipeline_name, each.instance) for each in events]


def test_listeners_are_told_of_each_instance() -> None:
    """Polly's table: `OnReload`, information, no outcome; those of the registry and of all pipelines."""
    events: list[TelemetryEvent] = []
    registry = registered(lambda builder: builder.add_timeout(1), listeners=[events.append])
    registry.reload("a")  # nothing is there that could be rebuilt
    assert events == []
    for instance in (None, "x"):
        registry.get("a", instance)
    with capture_events() as of_all:
        registry.reload("a")
    assert sorted(told(events), key=str) == [("OnReload", "a", "x"), ("OnReload", "a", None)]
    assert of_all == events
    for event in events:
        assert isinstance(event, ReloadEvent)
        assert event.severity == Severity.INFORMATION
        assert (event.context, event.outcome, event.duration) == (None, None, None)
        assert (event.strategy_name, event.operation_key) == (None, None)


def test_listeners_are_told_of_a_reload_that_fails() -> None:
    """RG-08: on-reload, then reload-failed, an error, with the exception; for all instances or none."""
    events: list[TelemetryEvent] = []
    registry = registered(lambda builder: builder.add_timeout(1), listeners=[events.append])
    for instance in ("x", "y"):
        registry.get("a", instance)
    error = ZeroDivisionError()

    def fails(builder: ResiliencePipelineBuilder) -> None:
        if len(events) == 2:
            raise error

    with pytest.raises(ZeroDivisionError):
        registry.reload("a", fails)
    assert [each.name for each in events] == ["OnReload"] * 2 + ["ReloadFailed"] * 2
    assert [each.instance for each in events] == ["y", "x", "y", "x"]
    for event in events[2:]:
        assert isinstance(event, ReloadFailedEvent)
        assert event.severity == Severity.ERROR
        assert event.outcome == Failure(error)
        assert event.context is None


def test_a_reload_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    registry = registered(lambda builder: builder.add_timeout(1))
    registry.get("a", "x")
    with caplog.at_level("INFO"), pytest.raises(ZeroDivisionError):
        registry.reload("a", lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert [record.getMessage() for record in caplog.records] == [
        "OnReload: pipeline 'a', instance 'x'",
        "ReloadFailed: pipeline 'a', instance 'x': ZeroDivisionError: division by zero",
    ]


def test_a_listener_that_reloads_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It would wait for the very reload that it is told of; that is logged, and the reload goes on."""

    def listen(_: TelemetryEvent) -> None:
        registry.reload("a")

    registry = registered(lambda builder: builder.add_timeout(1), listeners=[listen])
    handle = registry.get("a")
    registry.reload("a", lambda builder: builder.add_timeout(2))
    assert handle.strategies == (Timeout(2),)
    (record,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert "can never end" in record.getMessage()


@pytest.mark.anyio
async def test_ten_reloads_are_eleven_pipelines() -> None:
    """RG-15: each is configured once per reload, and keeps the name and instance."""
    log: list[str] = []
    built: list[Watching] = []

    def configure(builder: ResiliencePipelineBuilder) -> None:
        built.append(Watching(str(len(built)), log))
        builder.add(built[-1])

    registry = registered(configure)
    handle = registry.get("a", "x")
    for _ in range(10):
        registry.reload("a")
    assert [len(each.sites) for each in built] == [1] * 11
    assert {(each.sites[0].pipeline_name, each.sites[0].instance) for each in built} == {("a", "x")}
    await handle.execute(ok)
    assert log == [">10", "<10"]


# ---- calls in flight ----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_calls_in_flight_end_on_the_old_one() -> None:
    """RG-10: fifty calls that were inside when the pipeline was reloaded all succeed, on the old one."""
    log: list[str] = []
    registry = registered(watching(log, "old"))
    handle = registry.get("a")
    go_on = anyio.Event()
    results: list[int] = []
    inside = 0

    async def wait() -> int:
        nonlocal inside
        inside += 1
        await go_on.wait()
        return 1

    async def call() -> None:
        results.append(await handle.execute(wait))

    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(call)
        await tick_until(lambda: inside == 50)
        registry.reload("a", watching(log, "new"))
        assert log == [">old"] * 50
        assert await handle.execute(ok) == 1
        go_on.set()
    assert results == [1] * 50
    assert log == [">old"] * 50 + [">new", "<new"] + ["<old"] * 50


@pytest.mark.anyio
async def test_a_retry_in_flight_goes_on_with_its_own_attempts() -> None:
    """An execution stays on the pipeline it began on, its later attempts included."""
    log: list[str] = []

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.add_retry(max_retry_attempts=2, delay=0).add(Watching("old", log))

    registry = registered(configure)
    handle = registry.get("a")

    async def fails_once() -> int:
        if current_context().attempt == 0:
            registry.reload("a", watching(log, "new"))
            raise BoomError
        return 1

    assert await handle.execute(fails_once) == 1
    assert log == [">old", "<old", ">old", "<old"]


@pytest.mark.anyio
async def test_state_is_fresh_after_a_reload() -> None:
    """A circuit that was open is closed: it is another breaker."""
    options: dict[str, Any] = {"failure_ratio": 0.5, "minimum_throughput": 2}
    registry = registered(lambda builder: builder.add_circuit_breaker(**options))
    handle = registry.get("a")
    for _ in range(2):
        with pytest.raises(BoomError):
            await handle.execute(boom)
    with pytest.raises(BrokenCircuitError):
        await handle.execute(ok)
    registry.reload("a")
    assert await handle.execute(ok) == 1


@pytest.mark.anyio
async def test_old_permits_are_given_back_to_the_old_limiter() -> None:
    """Calls of before and after a reload don't take each other's permits."""
    registry = registered(lambda builder: builder.add_concurrency_limiter(1))
    handle = registry.get("a")
    async with running(handle.execute, hang) as old:
        registry.reload("a")
        async with running(handle.execute, hang):
            old.cancel()
            await tick()
            with pytest.raises(ConcurrencyLimiterRejectedError):
                await handle.execute(ok)
    assert await handle.execute(ok) == 1


# ---- every way to call --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_settle_follows_with_rejections_of_its_own() -> None:
    """What `settle` counts as the pipeline's own is what serves the call."""
    clock = VirtualClock(autojump=True)
    registry = registered(lambda builder: None, clock=clock)
    handle = registry.get("a")
    assert await handle.settle(ok) == Success(1)
    registry.reload("a", lambda builder: builder.add_timeout(1))
    outcome = await handle.settle(hang)
    assert isinstance(outcome, Rejected)
    assert isinstance(outcome.error, TimeoutRejectedError)
    assert outcome.error.pipeline_name == "a"


@pytest.mark.anyio
async def test_wrapped_functions_follow() -> None:
    log: list[str] = []
    registry = registered(watching(log, "old"))
    handle = registry.get("a")

    @handle.wrap
    async def fetch(x: int) -> int:
        return x

    @handle.wrap(idempotent=False)
    def fetch_here(x: int) -> int:
        return x

    assert inspect.iscoroutinefunction(fetch)
    registry.reload("a", watching(log, "new"))
    assert await fetch(3) == 3
    assert fetch_here(4) == 4
    assert log == [">new", "<new"] * 2


def test_synchronous_calls_follow() -> None:
    log: list[str] = []
    registry = registered(watching(log, "old"))
    handle = registry.get("a")

    def chunks() -> Iterator[int]:
        yield from (1, 2)

    registry.reload("a", watching(log, "new"))
    assert handle.execute_sync(lambda: 1) == 1
    assert handle.settle_sync(lambda: 1) == Success(1)
    with handle.execute_stream_sync(chunks) as stream:
        assert list(stream) == [1, 2]
    assert log == [">new", "<new"] * 3


async def two() -> AsyncIterator[int]:
    yield 1
    yield 2


@pytest.mark.anyio
async def test_streams_follow_at_the_next_stream() -> None:
    """A stream that was begun, or just made, stays on the pipeline it was made with."""
    log: list[str] = []
    registry = registered(watching(log, "old"))
    handle = registry.get("a")
    made = handle.execute_stream(two)
    async with handle.execute_stream(two) as begun:
        assert await anext(begun) == 1
        registry.reload("a", watching(log, "new"))
        assert [chunk async for chunk in begun] == [2]
    assert [chunk async for chunk in made] == [1, 2]
    assert log == [">old", "<old"] * 2
    assert [chunk async for chunk in handle.execute_stream(two)] == [1, 2]
    assert log[4:] == [">new", "<new"]


@pytest.mark.anyio
async def test_a_handle_is_as_strict_as_a_pipeline() -> None:
    """Immutable, the same signatures, the same kinds of functions, the same refusals."""
    handle = registered(lambda builder: builder.add_timeout(1)).get("a")
    for name in ("name", "strategies", "anything"):
        with pytest.raises(AttributeError, match="a pipeline is immutable"):
            setattr(handle, name, None)
    with pytest.raises(AttributeError):
        handle.unheard_of  # type: ignore[attr-defined]  # noqa: B018
    not_callable: Any = 1
    with pytest.raises(MisuseError, match=r"execute\(\) takes a function"):
        await handle.execute(not_callable)
    for name, method in vars(ResiliencePipeline).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        mine = getattr(PipelineHandle, name)
        assert inspect.signature(mine) == inspect.signature(method)
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(method)
        assert mine.__doc__ == method.__doc__
        # Whatever runs a call reads the cell, once. `wrap` does so by those.
        assert (mine is method) == (name == "wrap")


def test_a_handle_without_a_cell_does_not_loop() -> None:
    """Tools that make objects without their constructor get an `AttributeError`."""
    empty: Any = PipelineHandle.__new__(PipelineHandle)
    with pytest.raises(AttributeError):
        empty.name  # noqa: B018


# ---- nested -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_nested_handle_follows() -> None:
    """What nests a registry's pipeline goes through the new strategies, and keeps its own state."""
    log: list[str] = []
    registry = registered(watching(log, "old"))
    outer = (
        B("outer").add_circuit_breaker().add_pipeline(registry.get("a")).add(Watching("in", log))
    )
    outermost = B().add_pipeline(outer.build()).build()
    await outermost.execute(ok)
    registry.reload("a", watching(log, "new", "newer"))
    await outermost.execute(ok)
    assert log == [
        *(">old", ">in", "<in", "<old"),
        *(">new", ">newer", ">in", "<in", "<newer", "<new"),
    ]
    assert [each.name for each in outermost.strategies] == ["CircuitBreaker", "new", "newer", "in"]
    assert "Watching" in repr(outermost)
    assert isinstance(outermost.strategies[0], CircuitBreaker)


@pytest.mark.anyio
async def test_each_attempt_passes_the_nested_pipeline_of_its_time() -> None:
    """A retry around a nested handle: an attempt that begins after the reload is on the new one."""
    log: list[str] = []
    registry = registered(watching(log, "old"))
    outer = B().add_retry(max_retry_attempts=1, delay=0).add_pipeline(registry.get("a")).build()

    async def fails_once() -> int:
        if current_context().attempt == 0:
            registry.reload("a", watching(log, "new"))
            raise BoomError
        return 1

    assert await outer.execute(fails_once) == 1
    assert log == [">old", "<old", ">new", "<new"]


@pytest.mark.anyio
async def test_attempts_are_those_of_the_strategies_of_now() -> None:
    """`settle` of what nests a handle notes one attempt of its own unless there is a retry now."""
    registry = registered(lambda builder: builder.add_retry(max_retry_attempts=1, delay=0))
    outer = B().add_pipeline(registry.get("a")).build()
    outcome = await outer.settle(Calls(BoomError(), 1))
    assert outcome.attempt_count == 2
    registry.reload("a", lambda builder: builder.add_timeout(1))
    outcome = await outer.settle(Calls(1))
    assert outcome.attempt_count == 1
    assert isinstance(outcome.attempts[0], Attempt)


@pytest.mark.anyio
async def test_a_stream_is_owned_once_a_nested_pipeline_runs_it_in_tasks() -> None:
    """A reload that brings hedging: a source holds its scope in a task that lives as long as it does."""
    registry = registered(lambda builder: builder.add_timeout(1))
    outer = B().add_pipeline(registry.get("a")).build()
    registry.reload("a", lambda builder: builder.add_hedging(delay=1))

    async def scoped() -> AsyncIterator[int]:
        with anyio.fail_after(5):
            async with anyio.create_task_group():
                yield 1
                yield 2

    async with outer.execute_stream(scoped) as stream:
        assert [chunk async for chunk in stream] == [1, 2]


def test_a_pipeline_can_not_come_to_nest_itself() -> None:
    """Found when it would be put in place; the old one stays."""
    registry = registered(lambda builder: builder.add_timeout(1))
    handle = registry.get("a")
    registry.add("b", lambda builder: builder.add_pipeline(registry.get("a")))
    other = registry.get("b")
    outside = B().add_pipeline(other).build()
    for nested in (handle, other, outside):
        with pytest.raises(MisuseError, match=r"'a' would nest itself by way of add_pipeline\(\)"):
            registry.reload("a", lambda builder, nested=nested: builder.add_pipeline(nested))  # type: ignore[misc]
    assert handle.strategies == other.strategies == outside.strategies == (Timeout(1),)


def test_reload_from_within_its_own_configure_is_refused() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: None)
    handle = registry.get("a")
    with pytest.raises(MisuseError, match="reloading 'a' from within its own configure"):
        registry.reload("a", lambda builder: registry.reload("a"))
    registry.reload("a", lambda builder: builder.add_timeout(1))
    assert handle.strategies == (Timeout(1),)


def test_configure_of_a_reload_may_reload_another() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: builder.add_timeout(1))
    registry.add("b", lambda builder: builder.add_timeout(1))
    one, other = registry.get("a"), registry.get("b")

    def configure(builder: ResiliencePipelineBuilder) -> None:
        registry.reload("b", lambda builder: builder.add_timeout(3))
        builder.add_timeout(2)

    registry.reload("a", configure)
    assert (one.strategies, other.strategies) == ((Timeout(2),), (Timeout(3),))
