"""Strategies guard a stream up to its first chunk, and have nothing to do with it afterwards."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ResiliencePipeline,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.streaming import HANG, B, Managed, Running, Sources, collect, drain, tick

pytestmark = pytest.mark.anyio


class StatusError(Exception):
    """What an HTTP client raises for a bad status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Pause:
    """In a timed script: seconds to wait."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class TimedSources(Sources):
    """Sources whose scripts may hold pauses by a virtual clock."""

    def __init__(self, clock: VirtualClock, *scripts: list[Any]) -> None:
        super().__init__(*scripts)
        self._clock = clock

    async def play(self, item: object) -> bool:
        if not isinstance(item, Pause):
            return await super().play(item)
        await self._clock.sleep(item.seconds)
        return False


# ---- retry ------------------------------------------------------------------------------------


async def test_a_failed_connect_is_retried() -> None:
    """B-1: two answers of 503, then chunks: the factory is called three times."""
    sources = Sources([StatusError(503)], [StatusError(503)], ["a", "b"])
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert sources.calls == 3


async def test_failures_before_the_first_chunk_are_retried() -> None:
    """RT-12: failure before the first item twice, then `a b`."""
    sources = Sources([OSError()], [OSError()], ["a", "b"])
    assert await drain(B().add_retry(delay=0).build().execute_stream(sources)) == ["a", "b"]
    assert sources.calls == 3


@pytest.mark.parametrize(("status", "calls"), [(404, 1), (401, 1), (408, 2), (429, 2), (500, 2)])
async def test_the_status_decides_about_a_retry(status: int, calls: int) -> None:
    """B-2: a 404 comes out at once, a 408 or 429 is retried."""
    sources = Sources([StatusError(status)])
    pipeline = B().add_retry(max_retry_attempts=1, delay=0).build()
    with pytest.raises(StatusError):
        await drain(pipeline.execute_stream(sources))
    assert sources.calls == calls


async def test_a_failed_source_is_closed_before_the_wait() -> None:
    """Case ST-17: close first, then wait, then try again: never two open at once."""
    clock = VirtualClock()
    sources = Sources([OSError("failed")])
    pipeline = B(clock=clock).add_retry(max_retry_attempts=3, delay=1).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        assert (sources.opened, sources.closed) == (1, 1)
        await clock.advance(3)
    assert isinstance(running.error, OSError)
    assert (sources.opened, sources.closed, sources.peak) == (4, 4, 1)


async def test_a_failed_stream_is_closed_before_the_next_is_opened() -> None:
    """B-3: stream 1 fails before its first chunk and is closed before stream 2 is opened."""
    sources = Sources([OSError()], ["ok"])
    assert await drain(B().add_retry(delay=0).build().execute_stream(sources)) == ["ok"]
    assert (sources.opened, sources.closed, sources.peak) == (2, 2, 1)


async def test_nothing_is_repeated_after_the_first_chunk() -> None:
    """RT-13: `a b` and an error: the consumer keeps `a b`, gets the error, n=1."""
    sources = Sources(["a", "b", OSError("broken")])
    got: list[str] = []
    with pytest.raises(OSError, match="broken"):
        await collect(B().add_retry(delay=0).build().execute_stream(sources), got)
    assert (got, sources.calls) == (["a", "b"], 1)


async def test_the_error_after_the_first_chunk_is_the_sources_own() -> None:
    """Case ST-01: the error reaches the consumer's loop as it is."""
    error = OSError("broken")
    pipeline = B().add_fallback(fallback_value=9).add_retry(delay=0).add_timeout("1h").build()
    with pytest.raises(OSError, match="broken") as caught:
        await drain(pipeline.execute_stream(Sources([1, 2, error])))
    assert caught.value is error
    assert not hasattr(error, "__notes__")


async def test_the_last_attempts_error_comes_out_as_it_is() -> None:
    """Retry, last attempt: never wrapped."""
    errors = [OSError(f"attempt {number}") for number in range(3)]
    pipeline = B().add_retry(max_retry_attempts=2, delay=0).build()
    with pytest.raises(OSError, match="attempt 2") as caught:
        await drain(pipeline.execute_stream(Sources(*([error] for error in errors))))
    assert caught.value is errors[2]


async def test_a_cancellation_mid_stream_is_not_retried() -> None:
    """RT-18: an abort mid-stream is not retried."""
    sources = Sources(["a", HANG])
    stream = B().add_retry(delay=0).build().execute_stream(sources)
    async with anyio.create_task_group() as tasks:
        running = Running(drain, stream)
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert running.cancelled
    assert (sources.calls, sources.closed) == (1, 1)


async def test_what_is_not_idempotent_connects_once() -> None:
    """B-11: `idempotent=False`: a failure after the factory was called, 1 call."""
    sources = Sources([OSError("once")])
    pipeline = B().add_retry(delay=0).build()
    with pytest.raises(OSError, match="once"):
        await drain(pipeline.execute_stream(sources, idempotent=False))
    assert sources.calls == 1


async def test_a_refusal_inside_is_retried_although_not_idempotent() -> None:
    """B-11: `idempotent=False`: a refusal by an inner limiter or open circuit is retried."""
    clock = VirtualClock(autojump=True)
    limiter = TokenBucket(1, 1)
    pipeline = B(clock=clock).add_retry(delay=0).add_rate_limiter(limiter).build()
    sources = Sources(["ok"])
    for _ in range(3):
        assert await drain(pipeline.execute_stream(sources, idempotent=False)) == ["ok"]
    assert sources.calls == 3
    assert clock.now() == 2.0


# ---- timeout ----------------------------------------------------------------------------------


async def test_the_limit_covers_connect_and_first_chunk_anew_in_each_attempt() -> None:
    """Case ST-11: three attempts of two seconds each; the source is closed each time."""
    clock = VirtualClock()
    sources = TimedSources(clock, [Pause(10), "late"])
    pipeline = B(clock=clock).add_retry(max_retry_attempts=2, delay=0).add_timeout(2).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        for seconds in (2, 4):
            await clock.advance(2)
            assert not running.done
            assert clock.now() == seconds
        await clock.advance(2)
        await tick()
        assert isinstance(running.error, TimeoutRejectedError)
    assert (sources.opened, sources.closed, sources.peak) == (3, 3, 1)


async def test_a_stalled_first_pull_times_out() -> None:
    """TO-5: the first pull stalls: a time-out, the source made once."""
    clock = VirtualClock(autojump=True)
    sources = Sources([HANG])
    pipeline = B(clock=clock).add_timeout(2).build()
    with pytest.raises(TimeoutRejectedError, match="2 s"):
        await drain(pipeline.execute_stream(sources))
    assert (sources.calls, sources.closed) == (1, 1)
    assert clock.now() == 2.0


async def test_a_factory_that_connects_slowly_times_out() -> None:
    """Streams: the limit is time to first chunk, connecting included."""
    clock = VirtualClock(autojump=True)

    async def connect() -> Any:
        await clock.sleep(10)

    pipeline = B(clock=clock).add_timeout(2).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(connect))
    assert clock.now() == 2.0


async def test_a_manager_that_is_entered_slowly_times_out() -> None:
    """Streams: a context manager is entered inside the protected part."""
    clock = VirtualClock(autojump=True)

    class Slow(Managed):
        async def __aenter__(self) -> Any:
            await clock.sleep(10)

    pipeline = B(clock=clock).add_timeout(2).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(lambda: Slow(None)))


async def test_a_time_out_outside_of_the_retry_spans_all_attempts() -> None:
    """Streams: the limit is time to the first chunk of whatever is inside."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(3), OSError()])
    pipeline = B(clock=clock).add_timeout(5).add_retry(delay=0).build()
    with pytest.raises(TimeoutRejectedError):
        await drain(pipeline.execute_stream(sources))
    assert (sources.calls, sources.closed) == (2, 2)
    assert clock.now() == 5.0


async def test_a_stall_after_the_first_chunk_is_not_a_strategys_business() -> None:
    """TO-6, B-5: `a`, then a stall: the strategy's limit is off, the gap may be any length."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, ["a", Pause(1000), "b"])
    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(2).build()
    assert await drain(pipeline.execute_stream(sources)) == ["a", "b"]
    assert clock.now() == 1000.0


async def test_a_long_stream_is_not_cut() -> None:
    """Case ST-13: a hundred chunks, one a second, under a limit of two."""
    clock = VirtualClock(autojump=True)
    script = [part for number in range(100) for part in (Pause(1), number)]
    pipeline = B(clock=clock).add_timeout(2).build()
    async with pipeline.execute_stream(TimedSources(clock, script)) as stream:
        assert len([chunk async for chunk in stream]) == 100
    assert clock.now() == 100.0


async def test_the_consumers_own_time_never_counts() -> None:
    """TO-7: the consumer sleeps 120 between pulls under a limit of 50: no time-out."""
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_timeout(50).build()
    got: list[int] = []
    async for chunk in pipeline.execute_stream(Sources([1, 2, 3])):
        got.append(chunk)
        await clock.sleep(120)
    assert got == [1, 2, 3]


async def test_an_error_within_the_limit_is_that_error() -> None:
    """TO-8: a source's error inside the limit is that error, not a time-out."""
    with pytest.raises(TimeoutError, match="the socket's own") as caught:
        await drain(
            B()
            .add_timeout("1h")
            .build()
            .execute_stream(Sources([TimeoutError("the socket's own")]))
        )
    assert not isinstance(caught.value, TimeoutRejectedError)


async def test_leaving_early_under_a_limit_awaits_the_cleanup() -> None:
    """TO-9: break: the source's cleanup is awaited."""
    sources = Sources([1, 2])
    async with B().add_timeout("1h").build().execute_stream(sources) as stream:
        async for _ in stream:
            break
    assert sources.closed == 1


async def test_a_first_chunk_before_the_limit_is_kept() -> None:
    """Case ST-11: the limit acts when it expires, not when the chunk comes."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, [Pause(1.5), "in time", Pause(5), "later"])
    assert await drain(B(clock=clock).add_timeout(2).build().execute_stream(sources)) == [
        "in time",
        "later",
    ]


# ---- circuit breaker --------------------------------------------------------------------------


def breaker(control: CircuitBreakerControl, clock: VirtualClock) -> ResiliencePipeline[Any]:
    return (
        B(clock=clock)
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, control=control)
        .add_timeout(2)
        .build()
    )


@pytest.mark.parametrize("script", [[OSError("refused")], [HANG]], ids=["error", "time-out"])
async def test_failures_before_the_first_chunk_open_the_circuit(script: list[Any]) -> None:
    """B-9: the circuit opens from connect failures and first-chunk time-outs; then no call is made."""
    control, sources = CircuitBreakerControl(), Sources(script)
    pipeline = breaker(control, VirtualClock(autojump=True))
    for _ in range(2):
        with pytest.raises((OSError, TimeoutRejectedError)):
            await drain(pipeline.execute_stream(sources))
    assert control.state == "open"
    with pytest.raises(BrokenCircuitError):
        await anext(pipeline.execute_stream(sources))
    assert sources.calls == 2


async def test_errors_after_the_first_chunk_are_not_counted() -> None:
    """B-4: `a` and an error: the breaker has counted a success."""
    control = CircuitBreakerControl()
    pipeline = breaker(control, VirtualClock(autojump=True))
    for _ in range(3):
        with pytest.raises(OSError, match="late"):
            await drain(pipeline.execute_stream(Sources(["a", OSError("late")])))
    assert control.state == "closed"
    assert (control.metrics.throughput, control.metrics.failures) == (3, 0)


async def test_a_cancelled_first_pull_is_not_counted() -> None:
    """Design, rule 1: a cancellation is no failure; its source is closed all the same."""
    control, sources = CircuitBreakerControl(), Sources([HANG])
    pipeline = B().add_circuit_breaker(control=control).build()
    async with anyio.create_task_group() as tasks:
        running = Running(drain, pipeline.execute_stream(sources))
        tasks.start_soon(running)
        await tick()
        running.cancel()
    assert control.metrics.throughput == 0
    assert sources.closed == 1


async def test_a_first_chunk_closes_a_half_open_circuit() -> None:
    """Streams: the breaker's verdict is given with the first chunk, while the stream goes on."""
    clock, control = VirtualClock(autojump=True), CircuitBreakerControl()
    pipeline = breaker(control, clock)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await drain(pipeline.execute_stream(Sources([ConnectionError()])))
    await clock.sleep(5)
    async with pipeline.execute_stream(Sources([1, 2])) as stream:
        assert await anext(stream) == 1
        assert control.state == "closed"


# ---- preambles --------------------------------------------------------------------------------


async def test_a_first_chunk_of_any_kind_commits() -> None:
    """Case ST-15: an empty preamble commits; what fails after it is not repeated."""
    sources = Sources([{}, OSError("stalled")])
    got: list[Any] = []
    with pytest.raises(OSError, match="stalled"):
        await collect(B().add_retry(delay=0).build().execute_stream(sources), got)
    assert (got, sources.calls) == ([{}], 1)


async def test_holding_preambles_back_in_the_factory_moves_the_line() -> None:
    """Case ST-15: the recipe: a factory that gives its first chunk with the first content."""
    clock = VirtualClock(autojump=True)
    sources = TimedSources(clock, ["", Pause(60), "never"], ["", "text", "more"])

    async def with_content() -> Any:
        held: list[str] = []
        stream = sources()
        try:
            async for chunk in stream:
                held.append(chunk)
                if chunk:
                    for each in held:
                        yield each
                    held.clear()
        finally:
            await stream.aclose()

    pipeline = B(clock=clock).add_retry(delay=0).add_timeout(1).build()
    assert await drain(pipeline.execute_stream(with_content)) == ["", "text", "more"]
    assert (sources.calls, sources.closed) == (2, 2)
