"""`add_pipeline`: order, shared state, names, clocks, and what is inside of what."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    Failure,
    Rejected,
    ResiliencePipeline,
    Success,
    TimeoutRejectedError,
    current_context,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, Calls, Watching, boom, hang, ok, running, tick_until

pytestmark = pytest.mark.anyio


def watching(log: list[str], *names: str) -> ResiliencePipeline[Any]:
    builder = B(name="".join(names))
    for name in names:
        builder.add(Watching(name, log))
    return builder.build()


async def note(log: list[str], what: str = "call") -> None:
    log.append(what)


# ---- order --------------------------------------------------------------------------------------


async def test_order_composes() -> None:
    """PL-03: a nested pipeline's strategies take their place in the order of the outer one."""
    log: list[str] = []
    outer = (
        B().add(Watching("1", log)).add_pipeline(watching(log, "2", "3")).add(Watching("4", log))
    )
    await outer.build().execute(note, log)
    assert log == [">1", ">2", ">3", ">4", "call", "<4", "<3", "<2", "<1"]


async def test_a_nested_pipeline_still_works_by_itself() -> None:
    """PL-03: nesting takes nothing from the nested pipeline, before, while and after it is nested."""
    log: list[str] = []
    inner = watching(log, "2")
    outer = B().add_pipeline(inner).add(Watching("3", log)).build()
    await inner.execute(note, log)
    await outer.execute(note, log)
    await inner.execute(note, log)
    assert log == [">2", "call", "<2", ">2", ">3", "call", "<3", "<2", ">2", "call", "<2"]


async def test_a_nested_pipeline_serves_both_at_the_same_time() -> None:
    """A call that is inside by way of the outer pipeline does not change where others end."""
    log: list[str] = []
    inner = watching(log, "in")
    outer = B().add_pipeline(inner).add(Watching("mine", log)).build()
    async with running(outer.execute, hang):
        assert log == [">in", ">mine"]
        log.clear()
        await inner.execute(note, log)
        assert log == [">in", "call", "<in"]


async def test_pipelines_nest_to_any_depth() -> None:
    """Each level's rest is run inside of the levels nested in front of it."""
    log: list[str] = []
    pipeline = watching(log, "a")
    for name in "bcdef":
        pipeline = B().add_pipeline(pipeline).add(Watching(name, log)).build()
    outermost = B().add(Watching("0", log)).add_pipeline(pipeline).add_pipeline(pipeline).build()
    await outermost.execute(note, log)
    inwards = [">0", *(f">{name}" for name in "abcdef" * 2)]
    outwards = [step.replace(">", "<") for step in reversed(inwards)]
    assert log == [*inwards, "call", *outwards]


async def test_an_empty_pipeline_nests() -> None:
    """An empty pipeline in any place changes nothing."""
    log: list[str] = []
    empty = ResiliencePipeline.empty
    outer = B().add_pipeline(empty).add(Watching("1", log)).add_pipeline(empty).add_pipeline(empty)
    await outer.build().execute(note, log)
    assert log == [">1", "call", "<1"]
    assert await B().add_pipeline(empty).build().execute(ok) == 1


async def test_a_pipeline_nested_twice_runs_twice_on_one_state() -> None:
    """The same pipeline nested twice is passed twice, and both places share its state."""
    limiter = B(name="db").add_concurrency_limiter(2).build()
    twice = B().add_pipeline(limiter).add_pipeline(limiter).build()
    assert await twice.execute(ok) == 1
    thrice = B().add_pipeline(twice).add_pipeline(limiter).build()
    with pytest.raises(ConcurrencyLimiterRejectedError):
        await thrice.execute(ok)
    assert await twice.execute(ok) == 1


async def test_a_retry_outside_repeats_the_nested_pipeline() -> None:
    """Each attempt of a retry outside passes the whole nested pipeline, and its own rest."""
    log: list[str] = []
    call = Calls(BoomError(), BoomError(), 1)
    outer = (
        B()
        .add_retry(max_retry_attempts=3, delay=0)
        .add_pipeline(watching(log, "in"))
        .add(Watching("rest", log))
        .build()
    )
    assert await outer.execute(call) == 1
    assert log == [">in", ">rest", "<rest", "<in"] * 3
    assert call.count == 3


async def test_a_retry_inside_repeats_what_is_inside_of_it() -> None:
    """A retry in the nested pipeline repeats its inside, the outer pipeline's rest included."""
    log: list[str] = []
    call = Calls(BoomError(), BoomError(), 1)
    retrying = B().add_retry(max_retry_attempts=3, delay=0).build()
    outer = B().add(Watching("out", log)).add_pipeline(retrying).add(Watching("rest", log)).build()
    assert await outer.execute(call) == 1
    assert log == [">out", *([">rest", "<rest"] * 3), "<out"]
    assert call.count == 3


async def test_retries_of_nested_pipelines_multiply() -> None:
    """A retry in each of three levels: every level repeats those inside of it."""
    retrying = B().add_retry(max_retry_attempts=1, delay=0).build()
    pipeline = retrying
    for _ in range(2):
        pipeline = B().add_pipeline(pipeline).add_retry(max_retry_attempts=1, delay=0).build()
    call: Calls[int] = Calls(BoomError())
    with pytest.raises(BoomError):
        await pipeline.execute(call)
    assert call.count == 2**3


async def test_not_idempotent_inside_includes_nested_pipelines() -> None:
    """`idempotent=False`: an attempt refused in a nested pipeline never started, so it is repeated."""
    db = B(name="db").add_concurrency_limiter(1).build()
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).add_pipeline(db).build()
    inside = partial(pipeline.settle, boom, idempotent=False)
    refused = await db.execute(inside)
    assert isinstance(refused, Rejected)
    assert refused.attempt_count == 3
    failed = await inside()
    assert isinstance(failed, Failure)
    assert failed.attempt_count == 1


# ---- state and names ----------------------------------------------------------------------------


async def test_state_stays_shared() -> None:
    """A circuit opened by way of one pipeline is open for everybody who nests its pipeline."""
    db = B(name="db").add_circuit_breaker(failure_ratio=1, minimum_throughput=2).build()
    one, other = (B(name=name).add_pipeline(db).build() for name in ("one", "other"))
    await one.settle(boom)
    await db.settle(boom)
    for pipeline in (one, other, db):
        assert isinstance(await pipeline.settle(ok), Rejected)


async def test_state_of_a_nested_pipeline_survives_building_again() -> None:
    """Building the outer pipeline again makes nothing afresh in a nested one."""
    db = B().add_circuit_breaker(failure_ratio=1, minimum_throughput=2).build()
    builder = B().add_pipeline(db)
    first, second = builder.build(), builder.build()
    for _ in range(2):
        await first.settle(boom)
    assert isinstance(await second.settle(ok), Rejected)


async def test_errors_carry_the_nested_pipelines_name() -> None:
    """A nested pipeline keeps its own name in errors; the outer one's own carry the outer one's."""
    control = CircuitBreakerControl()
    db = B(name="db").add_circuit_breaker(control=control, name="db circuit").build()
    api = B(name="api").add_concurrency_limiter(1).add_pipeline(db).build()
    control.isolate()
    with pytest.raises(BrokenCircuitError) as broken:
        await api.execute(ok)
    assert (broken.value.pipeline_name, broken.value.strategy_name) == ("db", "db circuit")
    assert "'db'" in str(broken.value)
    control.close()
    refused = await api.execute(partial(api.settle, ok))
    assert isinstance(refused, Rejected)
    assert refused.error.pipeline_name == "api"


async def test_strategies_of_a_nested_pipeline_are_this_pipelines_own() -> None:
    """What a nested pipeline's strategy refuses is `Rejected`, at any depth; see case CW-07."""
    control = CircuitBreakerControl()
    db = B(name="db").add_circuit_breaker(control=control).build()
    deep = B().add_pipeline(B().add_pipeline(B().add_pipeline(db).build()).build()).build()
    control.isolate()
    outcome = await deep.settle(ok)
    assert isinstance(outcome, Rejected)
    assert outcome.error.pipeline_name == "db"


async def test_the_context_names_the_pipeline_that_was_called() -> None:
    """`context.pipeline_name` is the executing pipeline's name, inside of nested ones too."""
    api = B(name="api").add_pipeline(B(name="db").add_timeout(60).build()).build()

    async def name() -> str | None:
        return current_context().pipeline_name

    assert await api.execute(name) == "api"


async def test_the_history_has_the_tries_of_a_nested_retry() -> None:
    """Attempts made by a nested pipeline's retry are this pipeline's attempts."""
    retrying = B().add_retry(max_retry_attempts=3, delay=0).build()
    outcome = await B().add_pipeline(retrying).build().settle(Calls(BoomError(), BoomError(), 1))
    assert outcome == Success(1)
    assert [attempt.number for attempt in outcome.attempts] == [0, 1, 2]


async def test_a_failure_leaves_the_way_through_intact() -> None:
    """An error, a time-out and a cancellation inside of a nested pipeline disturb no later call."""
    log: list[str] = []
    clock = VirtualClock(autojump=True)
    inner = B(clock=clock).add_timeout(1).build()
    pipeline = B(clock=clock).add_pipeline(inner).add(Watching("rest", log)).build()
    assert isinstance(await pipeline.settle(boom), Failure)
    assert isinstance(await pipeline.settle(hang), Rejected)
    async with running(pipeline.execute, hang) as scope:
        scope.cancel()
    log.clear()
    assert await pipeline.execute(ok) == 1
    assert log == [">rest", "<rest"]


async def test_streams_pass_nested_pipelines() -> None:
    """A stream's factory is called where a call's callback would be."""
    log: list[str] = []
    pipeline = B().add_pipeline(watching(log, "in")).add(Watching("rest", log)).build()

    async def chunks() -> Any:
        log.append("call")
        yield 1
        yield 2

    assert [chunk async for chunk in pipeline.execute_stream(chunks)] == [1, 2]
    assert log == [">in", ">rest", "call", "<rest", "<in"]


# ---- clocks -------------------------------------------------------------------------------------


async def test_a_nested_pipelines_own_clock_drives_it_alone() -> None:
    """A clock given to the nested pipeline drives its waits, and no others."""
    inner_clock, outer_clock = VirtualClock(), VirtualClock()
    inner = B(clock=inner_clock).add_retry(max_retry_attempts=1, delay=5).build()
    outer = (
        B(clock=outer_clock)
        .add_timeout(10)
        .add_pipeline(inner)
        .add_retry(max_retry_attempts=1, delay=7)
        .build()
    )
    call: Calls[int] = Calls(BoomError(), BoomError(), 1)
    async with running(outer.execute, call):
        assert call.count == 1
        await inner_clock.advance(20)
        assert call.count == 1
        await outer_clock.advance(7)
        assert call.count == 2
        await outer_clock.advance(2)
        assert call.count == 2
        await inner_clock.advance(5)
        assert call.count == 3


async def test_a_time_limit_of_a_nested_pipeline_goes_by_its_own_clock() -> None:
    """The limit passes when the nested pipeline's clock says so, on whatever clock the outer waits."""
    clock = VirtualClock(autojump=True)
    inner = B(name="in", clock=clock).add_timeout(3600).build()
    with pytest.raises(TimeoutRejectedError):
        await B().add_pipeline(inner).build().execute(hang)
    assert clock.now() == 3600


async def test_a_nested_pipeline_without_a_clock_goes_by_the_outer_one() -> None:
    """Without a clock of its own a nested pipeline waits on the clock of the one that is called."""
    clock = VirtualClock(autojump=True)
    inner = B().add_retry(max_retry_attempts=1, delay=3600).add_timeout(3600).build()
    with pytest.raises(TimeoutRejectedError):
        await B(clock=clock).add_pipeline(inner).build().execute(hang)
    assert clock.now() == 3 * 3600


async def test_a_queue_of_a_nested_pipeline_is_one_for_all() -> None:
    """Calls of two pipelines wait in one queue, first come first served."""
    order: list[str] = []
    shared = B().add_concurrency_limiter(1, 10).build()
    one, other = (B().add_pipeline(shared).build() for _ in range(2))
    async with (
        running(shared.execute, hang) as holding,
        running(one.execute, note, order, "one"),
        running(other.execute, note, order, "other"),
    ):
        assert order == []
        holding.cancel()
        await tick_until(lambda: len(order) == 2)
    assert order == ["one", "other"]
