"""Circuit breaker: runs of failures, slow calls, several trial calls, and what counts as nothing."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    CircuitOpenedEvent,
    OptionsError,
    Rejected,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
    handle,
    handle_result,
)
from resilience_pipeline.strategies._slow_calls import RunningCall, SlowCalls
from resilience_pipeline.testing import VirtualClock
from support.inside import Room, boom, ok
from support.scripted import raised_by

#: Seconds after which a thread that waits for another one is taken to hang.
PATIENCE = 20.0


class Circuit:
    """A breaker on a clock of its own that by itself opens for nothing; its steps are noted."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock()
        self.control = CircuitBreakerControl()
        self.steps: list[str] = []
        self.opened: list[CircuitOpenedEvent] = []
        defaults: dict[str, Any] = {
            "failure_ratio": 1,
            "minimum_throughput": 1000,
            "sampling_duration": 30,
            "break_duration": 5,
            "on_opened": self._note_opened,
            "on_closed": lambda _: self.steps.append("closed"),
            "on_half_opened": lambda _: self.steps.append("half-opened"),
            "control": self.control,
        }
        self.pipeline = (
            ResiliencePipelineBuilder(name="svc", clock=self.clock)
            .add_circuit_breaker(**(defaults | options))
            .build()
        )

    def _note_opened(self, event: CircuitOpenedEvent) -> None:
        self.steps.append("opened")
        self.opened.append(event)

    @property
    def state(self) -> str:
        return self.control.state

    async def take(self, seconds: float, end: Any = 1) -> Any:
        """Make a call that lasts so long, then raises or returns; the clock goes on meanwhile."""

        async def lasting() -> Any:
            await self.clock.advance(seconds)
            if isinstance(end, Exception):
                raise end
            return end

        return await self.pipeline.settle(lasting)

    async def fail(self, times: int = 1) -> None:
        for _ in range(times):
            await self.pipeline.settle(boom)

    async def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            await self.pipeline.settle(ok)


# ---- failures in a row --------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_nth_failure_in_a_row_opens() -> None:
    """`consecutive_failures=3`: two are not enough, the third is, whatever the share and throughput."""
    circuit = Circuit(consecutive_failures=3)
    await circuit.succeed(50)
    await circuit.fail(2)
    assert circuit.state == "closed"
    await circuit.fail()
    assert circuit.state == "open"
    assert circuit.steps == ["opened"]


@pytest.mark.anyio
async def test_a_success_ends_a_run() -> None:
    """Also one that was only noted so far."""
    circuit = Circuit(consecutive_failures=3)
    for _ in range(5):
        await circuit.fail(2)
        await circuit.succeed()
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_an_unhandled_error_ends_a_run_and_an_ignored_one_does_not() -> None:
    """What counts as good ends it; what counts as nothing is nothing."""
    circuit = Circuit(
        consecutive_failures=2, should_handle=handle(ConnectionError, OSError), ignore=KeyError
    )
    await circuit.fail()
    await circuit.take(0, ValueError())
    await circuit.fail()
    assert circuit.state == "closed"
    await circuit.take(0, KeyError())
    await circuit.fail()
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_a_run_survives_the_window_but_not_a_close() -> None:
    """Failures hours apart are in a row if nothing was in between."""
    circuit = Circuit(consecutive_failures=3)
    await circuit.fail(2)
    circuit.control.close()
    await circuit.fail(2)
    assert circuit.state == "closed"
    await circuit.clock.advance(3600)
    await circuit.fail()
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_the_ratio_still_opens_beside_it() -> None:
    """It is a second way to open, not another one."""
    circuit = Circuit(consecutive_failures=100, failure_ratio=0.5, minimum_throughput=4)
    await circuit.fail()
    await circuit.succeed(2)
    await circuit.fail()
    assert circuit.state == "open"


# ---- several trial calls ------------------------------------------------------------------------


async def half_open(**options: Any) -> Circuit:
    """A circuit whose break is over."""
    circuit = Circuit(consecutive_failures=1, **options)
    await circuit.fail()
    await circuit.clock.advance(5)
    return circuit


@pytest.mark.anyio
async def test_so_many_trial_calls_are_admitted_and_all_must_be_good() -> None:
    """`half_open_probes=3`: three are let in, others refused; the third good one closes."""
    circuit = await half_open(half_open_probes=3)
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in range(3):
            tasks.start_soon(circuit.pipeline.execute, room, name)
        await anyio.wait_all_tasks_blocked()
        assert sorted(room.names) == [0, 1, 2]
        refusal = await raised_by(circuit.pipeline.execute, ok)
        assert isinstance(refusal, BrokenCircuitError)
        assert refusal.retry_after == 5
        for name in (1, 0):
            room.let_out(name)
            await anyio.wait_all_tasks_blocked()
            assert circuit.state == "half_open"
        # Three in all: those that were good hold their places.
        assert isinstance(await raised_by(circuit.pipeline.execute, ok), BrokenCircuitError)
        room.let_out(2)
    assert circuit.state == "closed"
    assert circuit.steps == ["opened", "half-opened", "closed"]


@pytest.mark.anyio
async def test_one_bad_trial_call_begins_another_break() -> None:
    """What the others come to is then nobody's business."""
    circuit = await half_open(half_open_probes=3)
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in range(3):
            tasks.start_soon(circuit.pipeline.settle, room, name)
        await anyio.wait_all_tasks_blocked()
        room.let_out(0)
        await anyio.wait_all_tasks_blocked()
        room.let_out(1, ConnectionError())
        await anyio.wait_all_tasks_blocked()
        assert circuit.state == "open"
        room.let_out(2)
    assert circuit.state == "open"
    await circuit.clock.advance(5)
    await circuit.succeed(2)
    assert circuit.state == "half_open"  # counted afresh
    await circuit.succeed()
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_places_come_back_one_by_one() -> None:
    """A trial call that is cancelled gives its own place back and no other."""
    circuit = await half_open(half_open_probes=2)
    room = Room()
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def cancelled() -> None:
            with scope:
                await circuit.pipeline.execute(room, "cancelled")

        tasks.start_soon(cancelled)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(circuit.pipeline.execute, room, "other")
        await anyio.wait_all_tasks_blocked()
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert room.names == ["other"]
        tasks.start_soon(circuit.pipeline.execute, room, "next")
        await anyio.wait_all_tasks_blocked()
        assert isinstance(await raised_by(circuit.pipeline.execute, ok), BrokenCircuitError)
        room.let_out("other")
        room.let_out("next")
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_trial_calls_that_hang_lose_their_places_one_by_one() -> None:
    """One break after its admission a place is free again, and its late result decides nothing."""
    circuit = await half_open(half_open_probes=2)
    room = Room()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(circuit.pipeline.settle, room, "first")
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(2)
        tasks.start_soon(circuit.pipeline.settle, room, "second")
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(1)
        refusal = await raised_by(circuit.pipeline.execute, ok)
        assert isinstance(refusal, BrokenCircuitError)
        assert refusal.retry_after == 2
        await circuit.clock.advance(2)
        await circuit.succeed()  # in the place of the first
        assert circuit.state == "half_open"
        room.let_out("first", ConnectionError())
        await anyio.wait_all_tasks_blocked()
        assert circuit.state == "half_open"
        room.let_out("second")
    assert circuit.state == "closed"


# ---- what counts as nothing ---------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_is_ignored_counts_neither_way() -> None:
    """`ignore` is asked first: also about what `should_handle` would have handled."""
    circuit = Circuit(
        should_handle=handle(Exception), ignore=handle(KeyError), consecutive_failures=1
    )
    await circuit.take(0, KeyError())
    assert circuit.state == "closed"
    assert circuit.control.metrics.throughput == 0
    await circuit.fail()
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_results_can_be_ignored() -> None:
    """With `handle_result`, or a function of the event."""
    circuit = Circuit(ignore=handle_result(lambda value: value == "maintenance"))
    await circuit.take(0, "maintenance")
    await circuit.take(0, "fine")
    assert circuit.control.metrics.throughput == 1


@pytest.mark.anyio
async def test_a_trial_call_that_is_ignored_decides_nothing() -> None:
    """Its place goes to the next call."""
    circuit = await half_open(ignore=KeyError)
    await circuit.take(0, KeyError())
    assert circuit.state == "half_open"
    await circuit.succeed()
    assert circuit.state == "closed"


# ---- slow calls ---------------------------------------------------------------------------------


def slow(**options: Any) -> Circuit:
    """A circuit that opens when half of at least four calls took longer than a second."""
    return Circuit(
        **({"slow_call_duration": 1, "slow_call_ratio": 0.5, "minimum_throughput": 4} | options)
    )


@pytest.mark.anyio
async def test_slow_calls_open_the_circuit_also_when_they_succeed() -> None:
    """The share is reached by a slow call: the one way in which a success can open."""
    circuit = slow()
    await circuit.take(0.5)
    await circuit.take(1)  # as long as it may
    await circuit.take(1.5)
    assert circuit.state == "closed"
    outcome = await circuit.take(2)
    assert outcome.value == 1  # the result is given all the same
    assert circuit.state == "open"
    assert circuit.opened[0].outcome == outcome


@pytest.mark.anyio
async def test_a_fast_call_does_not_open_for_slow_ones() -> None:
    """Three slow ones and a fast one that completes the throughput: it takes another slow one."""
    circuit = slow()
    for _ in range(3):
        await circuit.take(2)
    await circuit.take(0)
    assert circuit.state == "closed"
    await circuit.take(2)
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_the_cause_of_a_refusal_after_slow_successes_is_none() -> None:
    """No exception tripped it."""
    circuit = slow()
    for _ in range(4):
        await circuit.take(2)
    refusal = await raised_by(circuit.pipeline.execute, ok)
    assert isinstance(refusal, BrokenCircuitError)
    assert refusal.__cause__ is None


@pytest.mark.anyio
async def test_a_slow_failure_counts_both_ways() -> None:
    """It is one failure and one slow call."""
    circuit = slow()
    error = ConnectionError()
    for _ in range(3):
        await circuit.take(0)
    await circuit.take(2, error)
    assert circuit.state == "closed"
    assert circuit.control.metrics.failures == 1
    await circuit.take(2, error)
    await circuit.take(2, error)
    assert circuit.state == "open"
    refusal = await raised_by(circuit.pipeline.execute, ok)
    assert refusal.__cause__ is error


@pytest.mark.anyio
async def test_calls_that_still_run_count_when_they_have_passed_the_limit() -> None:
    """A service in which everything hangs opens the circuit with the next call, which is refused."""
    circuit = slow()
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in range(4):
            tasks.start_soon(circuit.pipeline.settle, room, name)
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(1)
        await circuit.succeed()
        assert circuit.state == "closed"
        await circuit.clock.advance(0.1)
        outcome = await circuit.pipeline.settle(ok)
        assert isinstance(outcome, Rejected)
        assert outcome.error.retry_after == 5
        assert circuit.steps == ["opened"]
        assert circuit.opened[0].outcome is None
        for name in range(4):
            room.let_out(name)
    assert circuit.state == "open"


@pytest.mark.anyio
async def test_a_running_call_counts_once() -> None:
    """Counted when it passed, it is not counted again when it ends."""
    circuit = slow(minimum_throughput=3)
    room = Room()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(circuit.pipeline.settle, room, "slow")
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(2)
        await circuit.succeed()  # notices it: one slow of two
        room.let_out("slow")
    # Were it counted twice, this would be the third slow one of four.
    await circuit.take(0)
    await circuit.take(0)
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_cancelled_call_is_no_evidence_unless_it_had_passed() -> None:
    """Callers who give up early open nothing."""
    circuit = slow(minimum_throughput=2, slow_call_ratio=0.1)
    for _ in range(5):
        with anyio.CancelScope() as scope:

            async def give_up(scope: anyio.CancelScope = scope) -> None:
                scope.cancel()
                await anyio.sleep_forever()

            await circuit.pipeline.execute(give_up)
        await circuit.clock.advance(2)
        await circuit.succeed()
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_calls_that_a_timeout_outside_ends_count_if_they_were_slow() -> None:
    """Contract: slow calls count when they pass the limit; the next call that begins finds out."""
    clock, control = VirtualClock(autojump=True), CircuitBreakerControl()

    def build(timeout: float) -> Any:
        return (
            ResiliencePipelineBuilder(clock=clock)
            .add_timeout(timeout)
            .add_circuit_breaker(
                slow_call_duration=1, slow_call_ratio=0.5, minimum_throughput=2, control=control
            )
            .build()
        )

    async def hang() -> None:
        await clock.sleep(100)

    for timeout, refused in ((1, False), (2, True)):
        pipeline = build(timeout)
        for _ in range(2):
            assert isinstance((await pipeline.settle(hang)).error, TimeoutRejectedError)
        assert control.state == "closed"
        assert isinstance((await pipeline.settle(ok)), Rejected) is refused


@pytest.mark.anyio
async def test_a_slow_trial_call_that_is_cancelled_gives_its_place_back() -> None:
    """Contract: the next call is the trial; the circuit neither closes nor sticks."""
    circuit = slow(minimum_throughput=2, consecutive_failures=1)
    await circuit.fail()
    await circuit.clock.advance(5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(circuit.pipeline.settle, anyio.sleep_forever)
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(2)
        tasks.cancel_scope.cancel()
    assert circuit.state == "half_open"
    await circuit.succeed()
    assert circuit.state == "closed"


def test_what_was_slow_and_cancelled_leaves_nothing_behind() -> None:
    """It counts in the window, and when that is over the circuit may be forgotten."""
    calls = SlowCalls(duration=1, ratio=1, minimum_throughput=2, sampling_duration=30)
    for now, is_idle in ((0.5, True), (1.5, False)):
        call = calls.begin(0, 0.0)
        calls.interrupt(call, now)
        assert calls.is_idle(now) is is_idle
    assert calls.pass_over(2.0)
    assert not calls.pass_over(2.0)
    assert calls.is_idle(40.0)


@pytest.mark.anyio
async def test_slow_calls_of_an_epoch_that_is_over_count_no_more() -> None:
    """What began before a close is not held against what comes after it."""
    circuit = slow(minimum_throughput=2, slow_call_ratio=1)
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in range(2):
            tasks.start_soon(circuit.pipeline.settle, room, name)
        await anyio.wait_all_tasks_blocked()
        circuit.control.isolate()
        circuit.control.close()
        await circuit.clock.advance(2)
        for name in range(2):
            room.let_out(name)
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_slow_trial_call_has_failed() -> None:
    """Whether it has ended, or is found to run for too long by the next call."""
    circuit = slow(minimum_throughput=2)
    for _ in range(2):
        await circuit.take(2)
    await circuit.clock.advance(5)
    await circuit.take(2)
    assert circuit.state == "open"
    await circuit.clock.advance(5)
    room = Room()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(circuit.pipeline.settle, room, "hangs")
        await anyio.wait_all_tasks_blocked()
        assert circuit.state == "half_open"
        await circuit.clock.advance(1.5)
        await circuit.succeed()
        assert circuit.state == "open"
        room.let_out("hangs")
    assert circuit.state == "open"
    await circuit.clock.advance(5)
    await circuit.take(1)
    assert circuit.state == "closed"


@pytest.mark.anyio
async def test_a_hook_that_raises_about_running_calls_surfaces_to_the_call_that_noticed() -> None:
    """The transition stands."""

    def refuse(_: object) -> None:
        raise LookupError("hook")

    circuit = slow(minimum_throughput=2, on_opened=refuse)
    room = Room()
    async with anyio.create_task_group() as tasks:
        for name in range(2):
            tasks.start_soon(circuit.pipeline.settle, room, name)
        await anyio.wait_all_tasks_blocked()
        await circuit.clock.advance(2)
        assert isinstance(await raised_by(circuit.pipeline.execute, ok), LookupError)
        assert circuit.state == "open"
        for name in range(2):
            room.let_out(name)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"half_open_probes": 0}, "half_open_probes"),
        ({"half_open_probes": None}, "half_open_probes"),
        ({"consecutive_failures": 0}, "consecutive_failures"),
        ({"consecutive_failures": True}, "consecutive_failures"),
        ({"slow_call_duration": 1}, "slow_call_ratio"),
        ({"slow_call_ratio": 0.5}, "slow_call_duration"),
        ({"slow_call_duration": 0, "slow_call_ratio": 0.5}, "slow_call_duration"),
        ({"slow_call_duration": 1, "slow_call_ratio": 1.5}, "slow_call_ratio"),
        ({"ignore": "KeyError"}, "ignore"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], told: str) -> None:
    """Each is named, with what it may be."""
    with pytest.raises(OptionsError, match=told):
        ResiliencePipelineBuilder().add_circuit_breaker(**options)


# ---- threads ------------------------------------------------------------------------------------


class StepClock:
    """A clock that is set by hand; nothing here waits on it."""

    time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)

    def call_at(self, when: float, callback: object) -> Any:
        raise AssertionError(when, callback)


def test_of_sixteen_threads_five_are_trial_calls_again_and_again() -> None:
    """The five are inside together, eleven are refused meanwhile, and the last of five good ones closes."""
    clock, closed = StepClock(), list[object]()
    pipeline = (
        ResiliencePipelineBuilder(clock=clock)
        .add_circuit_breaker(
            consecutive_failures=1,
            half_open_probes=5,
            break_duration=1,
            ignore=KeyError,
            on_closed=closed.append,
        )
        .build()
    )
    rounds, crowd, places = 50, 16, 5
    refused = threading.Semaphore(0)
    start, done = threading.Barrier(crowd + 1), threading.Barrier(crowd + 1)
    inside = threading.Barrier(places)
    admitted: list[int] = []
    nothing: dict[str, int] = {}

    def trial(number: int) -> None:
        admitted.append(number)
        if inside.wait(PATIENCE) == 0:
            for _ in range(crowd - places):
                assert refused.acquire(timeout=PATIENCE)
        inside.wait(PATIENCE)

    def body() -> None:
        for number in range(rounds):
            start.wait(PATIENCE)
            if not pipeline.settle_sync(trial, number).ok:
                refused.release()
            done.wait(PATIENCE)

    def fail() -> None:
        raise ConnectionError

    threads = [threading.Thread(target=body, daemon=True) for _ in range(crowd)]
    for thread in threads:
        thread.start()
    for number in range(rounds):
        pipeline.settle_sync(fail)
        clock.time += 1
        # Half-open, and that has been told: before, others than the first are refused.
        pipeline.settle_sync(nothing.__getitem__, "what is ignored")
        start.wait(PATIENCE)
        done.wait(PATIENCE)
        assert len(closed) == number + 1
    for thread in threads:
        thread.join(PATIENCE)
    assert admitted == [number for number in range(rounds) for _ in range(places)]


def test_slow_calls_of_sixteen_threads_count_exactly_once_each() -> None:
    """Ended or passed over while running, no call is lost or counted twice."""
    slow = SlowCalls(duration=1, ratio=1, minimum_throughput=1, sampling_duration=1e9)
    lock, now = threading.Lock(), itertools.count()
    calls_each, crowd = 500, 16

    def body(seed: int) -> None:
        chance = random.Random(seed)
        running: list[RunningCall] = []
        for _ in range(calls_each):
            with lock:
                running.append(slow.begin(0, next(now) / 10))
            while running and chance.random() < 0.5:
                call = running.pop(chance.randrange(len(running)))
                with lock:
                    if chance.random() < 0.5:
                        slow.pass_over(next(now) / 10)
                    slow.end(call, next(now) / 10)
        for call in running:
            with lock:
                slow.end(call, next(now) / 10)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(crowd)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    throughput, _ = slow._window.counts(next(now) / 10)
    assert throughput == calls_each * crowd
    assert not slow._running


# ---- a model ------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["begin", "end", "look"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_slow_calls_are_those_of_a_model(steps: list[tuple[int, str, int]]) -> None:
    """Whatever the order in which calls begin, end and are looked at, each counts once, rightly."""
    limit = 3
    slow = SlowCalls(duration=limit, ratio=1, minimum_throughput=1, sampling_duration=1e9)
    began: dict[RunningCall, int] = {}
    ended: list[bool] = []
    now = 0
    for wait, step, which in steps:
        now += wait
        if step == "begin":
            began[slow.begin(0, now)] = now
        elif step == "end" and began:
            call = list(began)[which % len(began)]
            ended.append(now - began.pop(call) > limit)
            slow.end(call, now)
        else:
            slow.pass_over(now)
    slow.pass_over(now)
    passed = sum(now - start > limit for start in began.values())
    assert slow._window.counts(now) == (len(ended) + passed, sum(ended) + passed)
