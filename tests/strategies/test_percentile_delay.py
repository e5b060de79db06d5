"""The delay that is learnt from recent latencies: the window by itself, and at work in a pipeline."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline import (
    Hedging,
    PercentileDelay,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
)
from resilience_pipeline.testing import VirtualClock
from support.racers import Racers
from support.scripted import Scripted

B = ResiliencePipelineBuilder

ANYIO = pytest.mark.anyio

LATENCIES = st.lists(st.one_of(st.integers(0, 20).map(float), st.floats(0, 1e6)), max_size=120)


def nearest_rank(share: Fraction, values: list[float]) -> float:
    """The smallest of the values such that at least that share of them is no greater."""
    return next(
        value
        for value in sorted(values)
        if Fraction(sum(other <= value for other in values), len(values)) >= share
    )


# ---- the window ---------------------------------------------------------------------------------


@given(
    latencies=LATENCIES,
    hundredths=st.integers(1, 99),
    window=st.integers(20, 60),
    bounds=st.tuples(st.floats(0, 50), st.floats(0, 50)).map(sorted),
    initial=st.floats(0, 100),
)
def test_it_is_the_nearest_rank_of_the_last_window(
    latencies: list[float], hundredths: int, window: int, bounds: list[float], initial: float
) -> None:
    """After each call: by nearest rank over the last `window`, from 20 on, within `min` and `max`; `initial` before."""
    low, high = bounds
    options = PercentileDelay(hundredths / 100, min=low, max=high, window=window, initial=initial)
    learnt = options.start()
    seen: list[float] = []
    for latency in [*latencies, None]:
        recent = seen[-window:]
        share = Fraction(hundredths, 100)
        expected = initial if len(recent) < 20 else nearest_rank(share, recent)
        assert learnt.delay() == min(max(expected, low), high)
        if latency is not None:
            learnt.note(latency)
            seen.append(latency)


@given(latencies=LATENCIES, percentile=st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_it_is_one_of_the_latencies(latencies: list[float], percentile: float) -> None:
    """Nearest rank interpolates nothing, however near to 0 or 1 the percentile is."""
    learnt = PercentileDelay(percentile, window=20).start()
    for latency in latencies:
        learnt.note(latency)
    assert learnt.delay() in ([2.0] if len(latencies) < 20 else latencies[-20:])


@pytest.mark.parametrize(
    ("percentile", "seen", "expected"),
    [
        (0.95, 20, 19),
        (0.95, 40, 38),
        (0.95, 41, 39),
        (0.95, 1000, 950),
        (0.5, 20, 10),
        (0.5, 21, 11),
        (0.55, 20, 11),
        (0.07, 100, 7),
        (0.29, 100, 29),
        (0.999, 1000, 999),
        (0.999, 100, 100),
        (0.001, 100, 1),
        (5e-324, 100, 1),
        (1 - 2**-53, 100, 100),
    ],
)
def test_the_rank_is_rounded_up(percentile: float, seen: int, expected: int) -> None:
    """Of 1, 2, 3, … the percentile is the rank itself, whatever a float's product with the number is."""
    learnt = PercentileDelay(percentile).start()
    for number in range(seen, 0, -1):
        learnt.note(number)
    assert learnt.delay() == expected


def test_until_twenty_have_been_seen_it_is_the_initial_delay() -> None:
    """Fewer say nothing about a percentile."""
    learnt = PercentileDelay(0.95, initial=7).start()
    for _ in range(19):
        learnt.note(1)
        assert learnt.delay() == 7
    learnt.note(1)
    assert learnt.delay() == 1


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, 2, 5),
        ({"min": 3}, 3, 5),
        ({"min": 6}, 6, 6),
        ({"max": 1}, 1, 1),
        ({"max": 4}, 2, 4),
        ({"min": 3, "max": 3}, 3, 3),
        ({"initial": math.inf}, math.inf, 5),
        ({"initial": math.inf, "max": 9}, 9, 5),
        ({"initial": 0}, 0, 5),
    ],
)
def test_it_is_kept_between_min_and_max(
    options: dict[str, Any], before: float, after: float
) -> None:
    """Both what was learnt and the initial delay."""
    learnt = PercentileDelay(0.95, **options).start()
    assert learnt.delay() == before
    for _ in range(20):
        learnt.note(5)
    assert learnt.delay() == after


def test_what_is_older_than_the_window_is_forgotten() -> None:
    """The window counts calls."""
    learnt = PercentileDelay(0.95, window=30).start()
    for latency in [100.0] * 30 + [1.0] * 29:
        learnt.note(latency)
    assert learnt.delay() == 1
    assert PercentileDelay(0.95, window=30).start().delay() == 2


# ---- in a pipeline ------------------------------------------------------------------------------


@pytest.fixture
def clock() -> VirtualClock:
    """Jumps ahead whenever everybody waits."""
    return VirtualClock(autojump=True)


def racing(clock: VirtualClock, learnt: PercentileDelay, **options: Any) -> ResiliencePipeline[Any]:
    return B(clock=clock).add(Hedging(delay_generator=learnt, **options)).build()


async def learn(pipeline: ResiliencePipeline[Any], clock: VirtualClock, *latencies: float) -> None:
    """Send calls that take so long, and win whatever is launched beside them."""
    for latency in latencies:
        fn = Racers(clock, (latency, "first"), (math.inf, None))
        assert await pipeline.execute(fn) == "first"


async def hedged_after(pipeline: ResiliencePipeline[Any], clock: VirtualClock) -> float:
    """How long a first attempt that hangs is waited for."""
    fn = Racers(clock, (math.inf, None), (0, "hedge"))
    assert await pipeline.execute(fn) == "hedge"
    return fn.starts[1] - fn.starts[0]


@ANYIO
async def test_it_hedges_what_is_slower_than_the_95th_percentile(clock: VirtualClock) -> None:
    """Of a hundred calls that take 0.01 to 1 s, the next is hedged after 0.95 s, and not before."""
    pipeline = racing(clock, PercentileDelay(0.95))
    await learn(pipeline, clock, *(number / 100 for number in range(100, 0, -1)))
    slow = Racers(clock, (0.94, "first"), (0, "hedge"))
    assert await pipeline.execute(slow) == "first"
    assert slow.calls == 1
    assert await hedged_after(pipeline, clock) == pytest.approx(0.95)


@ANYIO
async def test_about_one_call_in_twenty_is_hedged(clock: VirtualClock) -> None:
    """With 0.95, of calls that go on being what they were."""
    pipeline = racing(clock, PercentileDelay(0.95, window=100))
    latencies = [(37 * number % 100 + 1) / 100 for number in range(100)]
    await learn(pipeline, clock, *latencies)
    fns = [Racers(clock, (latency, "first"), (math.inf, None)) for latency in latencies]
    for fn in fns:
        await pipeline.execute(fn)
    assert 4 <= sum(fn.calls == 2 for fn in fns) <= 6


@ANYIO
async def test_until_twenty_calls_it_waits_the_initial_delay(clock: VirtualClock) -> None:
    """The pipeline's own `delay` has no say."""
    pipeline = racing(clock, PercentileDelay(0.5, initial=30), delay=1)
    await learn(pipeline, clock, *[3.0] * 19)
    fn = Racers(clock, (29, "first"), (0, "hedge"))
    assert await pipeline.execute(fn) == "first"
    assert fn.calls == 1
    assert await hedged_after(pipeline, clock) == 3


@ANYIO
async def test_one_that_was_beaten_counts_with_the_time_it_had_taken(clock: VirtualClock) -> None:
    """Hedging does not hide the slowness it answers: after calls of 1 s, twenty are beaten at 1 + 4 s."""
    pipeline = racing(clock, PercentileDelay(0.5, window=20, initial=1))
    for _ in range(20):
        fn = Racers(clock, (math.inf, None), (4, "hedge"))
        assert await pipeline.execute(fn) == "hedge"
    assert await hedged_after(pipeline, clock) == 5


@ANYIO
async def test_the_cleanup_of_one_that_was_beaten_does_not_count(clock: VirtualClock) -> None:
    """It counts until it was beaten, not until it was gone."""

    async def slow() -> Any:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await clock.sleep(60)

    pipeline = racing(
        clock,
        PercentileDelay(0.5, window=20, initial=1),
        action_generator=lambda _: Scripted("hedge"),
    )
    for _ in range(20):
        assert await pipeline.execute(slow) == "hedge"
    assert await hedged_after_by_action(pipeline, clock) == 1


async def hedged_after_by_action(pipeline: ResiliencePipeline[Any], clock: VirtualClock) -> float:
    start = clock.now()
    fn = Racers(clock, (math.inf, None))
    assert await pipeline.execute(fn) == "hedge"
    return clock.now() - start


@pytest.mark.parametrize("most", [1, 2])
@ANYIO
async def test_one_that_came_out_handled_does_not_count(clock: VirtualClock, most: int) -> None:
    """A failure's speed is no latency, whether a hedge then wins or all come out handled."""
    pipeline = racing(clock, PercentileDelay(0.5, initial=7), max_hedged_attempts=most)
    for _ in range(30):
        await pipeline.settle(Racers(clock, (0.5, ConnectionError()), (0.25, "hedge")))
        await pipeline.settle(Racers(clock, (0.5, ConnectionError())))
    assert await hedged_after(pipeline, clock) == 7


@ANYIO
async def test_an_unhandled_error_is_accepted_and_counts(clock: VirtualClock) -> None:
    """What counts is how long first attempts take until they are accepted."""
    pipeline = racing(clock, PercentileDelay(0.5), should_handle=ConnectionError)
    for _ in range(20):
        await pipeline.settle(Racers(clock, (0.5, KeyError())))
    assert await hedged_after(pipeline, clock) == 0.5


@ANYIO
async def test_a_cancelled_call_does_not_count(clock: VirtualClock) -> None:
    """The caller's patience is no latency."""
    pipeline = racing(clock, PercentileDelay(0.5, initial=7))
    for _ in range(30):
        with anyio.CancelScope() as scope:
            clock.call_at(clock.now() + 1, scope.cancel)
            await pipeline.execute(Racers(clock, (math.inf, None)))
    assert await hedged_after(pipeline, clock) == 7


@ANYIO
async def test_each_pipeline_learns_by_itself(clock: VirtualClock) -> None:
    """State is born in `build()`: one `PercentileDelay` in two pipelines learns twice."""
    learnt = PercentileDelay(0.95, initial=7)
    taught, other = racing(clock, learnt), racing(clock, learnt)
    await learn(taught, clock, *[3.0] * 20)
    assert await hedged_after(taught, clock) == 3
    assert await hedged_after(other, clock) == 7


@ANYIO
async def test_a_handled_outcome_needs_no_delay(clock: VirtualClock) -> None:
    """The same rules as for any delay: the next starts at once."""
    pipeline = racing(clock, PercentileDelay(0.95, initial=50))
    fn = Racers(clock, (1, ConnectionError()), (1, "hedge"))
    assert await pipeline.execute(fn) == "hedge"
    assert fn.starts == [0, 1]


@ANYIO
async def test_calls_that_take_no_time_launch_all_at_once(clock: VirtualClock) -> None:
    """A learnt delay of zero means what zero means: a first attempt that never waits starts no hedge."""
    pipeline = racing(clock, PercentileDelay(0.95))
    fn = Scripted("first")
    for _ in range(25):
        assert await pipeline.execute(fn) == "first"
    assert fn.calls == 25
    assert await hedged_after(pipeline, clock) == 0
