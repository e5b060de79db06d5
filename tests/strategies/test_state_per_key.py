"""`key=`: state apart for each host, tenant or model, and what is let go of it."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    FixedWindow,
    IsolatedCircuitError,
    KeysExceededEvent,
    MisuseError,
    OptionsError,
    PropertyKey,
    RateLimiterRejectedError,
    ResilienceContext,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    SlidingWindow,
    TokenBucket,
)
from resilience_pipeline.strategies._keyed import KeyedStrategies, KeyTable
from resilience_pipeline.testing import VirtualClock
from support.inside import Room, boom, ok

B = ResiliencePipelineBuilder


def by_operation(context: ResilienceContext) -> str | None:
    return context.operation_key


def keys_of(pipeline: ResiliencePipeline[Any]) -> list[Any]:
    """The keys that the pipeline's one strategy has state for."""
    handler: Any = pipeline._head
    keyed: KeyedStrategies[Any] = handler.__self__
    return [key for key, _ in keyed]


# ---- apart ---------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_each_key_has_permits_of_its_own() -> None:
    """One in each, the second of either is refused."""
    pipeline = B().add_concurrency_limiter(1, key=by_operation).build()
    room = Room()
    async with anyio.create_task_group() as tasks:
        for host in ("a", "b"):

            async def call(host: str = host) -> None:
                await pipeline.execute(room, host, operation_key=host)

            tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert sorted(room.names) == ["a", "b"]
        for host in ("a", "b"):
            with pytest.raises(ConcurrencyLimiterRejectedError):
                await pipeline.execute(ok, operation_key=host)
            room.let_out(host)
    assert await pipeline.execute(ok, operation_key="a") == 1


@pytest.mark.anyio
@pytest.mark.parametrize("limit", [TokenBucket(1, 1), FixedWindow(1, 1), SlidingWindow(1, 1)])
async def test_each_key_has_a_limit_of_its_own(limit: Any) -> None:
    """Used up for one, it is not for the other."""
    pipeline = B(clock=VirtualClock()).add_rate_limiter(limit, key=by_operation).build()
    for host in ("a", "b", None):
        assert await pipeline.execute(ok, operation_key=host) == 1
        with pytest.raises(RateLimiterRejectedError):
            await pipeline.execute(ok, operation_key=host)


@pytest.mark.anyio
async def test_each_key_has_a_circuit_of_its_own() -> None:
    """One host is down, the other is not; the control shows the worst, and each."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=VirtualClock())
        .add_circuit_breaker(consecutive_failures=1, key=by_operation, control=control)
        .build()
    )
    await pipeline.settle(boom, operation_key="a")
    assert await pipeline.execute(ok, operation_key="b") == 1
    assert await pipeline.execute(ok) == 1
    with pytest.raises(BrokenCircuitError):
        await pipeline.execute(ok, operation_key="a")
    assert control.keys == {"a": "open", "b": "closed", None: "closed"}
    assert control.state == "open"


@pytest.mark.anyio
async def test_the_key_is_a_function_of_the_context() -> None:
    """Properties that the caller has set, say."""
    tenant = PropertyKey[str]("tenant")
    pipeline = (
        B(clock=VirtualClock())
        .add_rate_limiter(TokenBucket(1, 1), key=lambda context: context.properties[tenant])
        .build()
    )
    for name in ("x", "y"):
        context = ResilienceContext(properties={tenant: name})
        assert await pipeline.execute(ok, context=context) == 1
    assert keys_of(pipeline) == ["x", "y"]


@pytest.mark.anyio
async def test_a_stream_holds_the_permit_of_its_key() -> None:
    """And a key whose stream is open is not let go, though nobody is inside of it."""
    pipeline = (
        B(clock=VirtualClock())
        .add_concurrency_limiter(1, hold_streams=True, key=by_operation, max_keys=1)
        .build()
    )

    async def source() -> AsyncIterator[int]:
        yield 1
        yield 2

    async with pipeline.execute_stream(source, operation_key="a") as stream:
        assert await anext(stream) == 1
        assert await pipeline.execute(ok, operation_key="b") == 1
        with pytest.raises(ConcurrencyLimiterRejectedError):
            await pipeline.execute(ok, operation_key="a")
    assert await pipeline.execute(ok, operation_key="a") == 1


# ---- one control ---------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_one_control_acts_on_all_keys_those_to_come_included() -> None:
    """Isolated, a key's first call finds its circuit isolated; closed again, all are."""
    control = CircuitBreakerControl()
    opened: list[object] = []
    pipeline = (
        B().add_circuit_breaker(control=control, key=by_operation, on_opened=opened.append).build()
    )
    await pipeline.execute(ok, operation_key="a")
    control.isolate()
    assert len(opened) == 1
    for host in ("a", "b"):
        with pytest.raises(IsolatedCircuitError):
            await pipeline.execute(ok, operation_key=host)
    assert len(opened) == 1  # nobody has opened the circuit of "b"
    assert control.keys == {"a": "isolated", "b": "isolated"}
    control.close()
    for host in ("a", "b", "c"):
        assert await pipeline.execute(ok, operation_key=host) == 1
    assert set(control.keys.values()) == {"closed"}


@pytest.mark.anyio
async def test_a_circuit_without_key_is_not_among_the_keys() -> None:
    """It has none."""
    control = CircuitBreakerControl()
    B().add_circuit_breaker(control=control).build()
    assert control.keys == {}


# ---- letting go ----------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_least_recently_used_idle_key_goes() -> None:
    """Of those that are as good as new."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock).add_rate_limiter(TokenBucket(1, 1), key=by_operation, max_keys=3).build()
    )
    for host in ("a", "b", "c", "a"):
        await clock.advance(1)
        await pipeline.settle(ok, operation_key=host)
    await clock.advance(1)
    await pipeline.settle(ok, operation_key="d")
    assert keys_of(pipeline) == ["c", "a", "d"]


@pytest.mark.anyio
async def test_what_is_not_idle_stays_beyond_max_keys() -> None:
    """A limit that is used up, an open circuit, a permit: forgetting them would change an answer."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock).add_rate_limiter(TokenBucket(1, 1), key=by_operation, max_keys=2).build()
    )
    for number in range(10):
        await pipeline.settle(ok, operation_key=str(number))
    assert len(keys_of(pipeline)) == 10
    for number in range(10):
        with pytest.raises(RateLimiterRejectedError):
            await pipeline.execute(ok, operation_key=str(number))
    await clock.advance(1)
    await pipeline.settle(ok, operation_key="new")
    assert len(keys_of(pipeline)) == 2


@pytest.mark.anyio
async def test_an_open_circuit_and_one_with_counts_stay() -> None:
    """The circuit of a key that has failed once is not as good as new."""
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1,
            minimum_throughput=2,
            sampling_duration=30,
            break_duration=60,
            key=by_operation,
            max_keys=1,
        )
        .build()
    )
    for _ in range(2):
        await pipeline.settle(boom, operation_key="open")
    await pipeline.settle(boom, operation_key="counted")
    await pipeline.settle(ok, operation_key="x")
    assert set(keys_of(pipeline)) == {"open", "counted", "x"}
    await clock.advance(30)
    await pipeline.settle(ok, operation_key="y")
    assert set(keys_of(pipeline)) == {"open", "y"}


@pytest.mark.anyio
async def test_a_key_with_somebody_inside_stays() -> None:
    """A call that runs will be judged by the circuit that let it in."""
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=VirtualClock())
        .add_circuit_breaker(consecutive_failures=1, key=by_operation, max_keys=1, control=control)
        .build()
    )
    room = Room()
    async with anyio.create_task_group() as tasks:

        async def call() -> None:
            await pipeline.settle(room, "in", operation_key="a")

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await pipeline.settle(ok, operation_key="b")
        room.let_out("in", ConnectionError())
    assert control.keys["a"] == "open"


@pytest.mark.anyio
async def test_a_cancelled_call_is_no_longer_inside() -> None:
    """In the callback or in the queue: its key can be let go."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_concurrency_limiter(1, 1, key=by_operation, max_keys=1).build()
    async with anyio.create_task_group() as tasks:
        for _ in range(2):

            async def call() -> None:
                await pipeline.execute(anyio.sleep_forever, operation_key="a")

            tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        await pipeline.execute(ok, operation_key="b")
        assert sorted(keys_of(pipeline)) == ["a", "b"]
        tasks.cancel_scope.cancel()
    await pipeline.execute(ok, operation_key="c")
    assert keys_of(pipeline) == ["c"]


@pytest.mark.anyio
async def test_a_key_that_nobody_used_for_long_goes_when_another_one_comes() -> None:
    """`key_idle`, from the end of its last call."""
    clock = VirtualClock()
    pipeline = B(clock=clock).add_concurrency_limiter(1, key=by_operation, key_idle="10m").build()
    await pipeline.execute(ok, operation_key="a")
    await clock.advance(300)
    await pipeline.execute(ok, operation_key="b")
    await clock.advance(299)
    await pipeline.execute(ok, operation_key="c")
    assert keys_of(pipeline) == ["a", "b", "c"]
    await clock.advance(1)
    await pipeline.execute(ok, operation_key="d")
    assert keys_of(pipeline) == ["b", "c", "d"]


USER = PropertyKey[int]("user")


@pytest.mark.anyio
async def test_case_rl_05_keys_of_users_who_have_gone_are_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case RL-05: four thousand users, each refused once: no more than `max_keys`, by default 1024, are ever kept."""
    caplog.set_level(logging.CRITICAL, logger="resilience_pipeline")
    clock = VirtualClock()
    pipeline = (
        B(clock=clock)
        .add_rate_limiter(
            TokenBucket(1, 5),
            key=lambda context: context.properties.get(USER),
        )
        .build()
    )
    handler: Any = pipeline._head
    keyed: KeyedStrategies[Any] = handler.__self__
    for user in range(4_000):
        answers = [
            (await pipeline.settle(ok, context=ResilienceContext(properties={USER: user}))).ok
            for _ in range(2)
        ]
        assert answers == [True, False]
        assert len(keyed) <= 1024
        await clock.advance(0.1)


@pytest.mark.anyio
async def test_forgetting_never_changes_an_answer() -> None:
    """A seeded walk over twelve keys, of which three are kept, against one where all are."""
    clock = VirtualClock()
    limits: list[Callable[[], Any]] = [
        lambda: TokenBucket(3, 1),
        lambda: FixedWindow(2, 5),
        lambda: SlidingWindow(3, 4),
    ]
    for make in limits:
        small, large = (
            B(clock=clock)
            .add_rate_limiter(make(), key=by_operation, max_keys=most, key_idle=idle)
            .build()
            for most, idle in ((3, 2), (10_000, 1e9))
        )
        chance = random.Random(7)
        for _ in range(600):
            host = f"h{int(12 * chance.random() ** 2)}"
            given = [(await each.settle(ok, operation_key=host)).ok for each in (small, large)]
            assert given[0] == given[1]
            if chance.random() < 0.5:
                await clock.advance(chance.choice([0.25, 1, 3]))
        assert len(keys_of(small)) < len(keys_of(large))


@pytest.mark.anyio
async def test_more_keys_in_use_than_wanted_are_told_of() -> None:
    """`OnKeysExceeded`, with each key that is added while none can be let go."""
    clock = VirtualClock()
    heard: list[Any] = []
    pipeline = (
        B(name="api", clock=clock, listeners=[heard.append])
        .add_rate_limiter(TokenBucket(1, 1), key=by_operation, max_keys=2)
        .build()
    )
    for host in "abcc":
        await pipeline.settle(ok, operation_key=host)
    (event,) = [each for each in heard if isinstance(each, KeysExceededEvent)]
    assert (event.name, event.key, event.keys, event.max_keys) == ("OnKeysExceeded", "c", 3, 2)
    assert (event.pipeline_name, event.strategy_name) == ("api", "RateLimiter")
    assert event.operation_key == "c"


# ---- what can go wrong ---------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("key", [["a"], {}, set()])
async def test_a_key_that_cannot_be_hashed_is_a_misuse(key: Any) -> None:
    """The message names the option and what it gave."""
    pipeline = B().add_concurrency_limiter(1, key=lambda _: key).build()
    with pytest.raises(MisuseError, match="key="):
        await pipeline.execute(ok)


@pytest.mark.anyio
async def test_a_coroutine_function_is_no_key() -> None:
    """It is asked for each call, which must not wait for it."""

    async def key(_: ResilienceContext) -> str:
        return "a"

    pipeline = B().add_concurrency_limiter(1, key=key).build()
    with pytest.raises(MisuseError, match="key="):
        await pipeline.execute(ok)


@pytest.mark.anyio
async def test_what_a_key_function_raises_comes_out_and_nothing_is_held() -> None:
    """It is an ordinary failure to what is outside."""

    def key(context: ResilienceContext) -> str:
        if context.operation_key is None:
            raise LookupError("no key")
        return context.operation_key

    pipeline = B().add_retry(delay=0).add_concurrency_limiter(1, key=key).build()
    with pytest.raises(LookupError):
        await pipeline.execute(ok)
    assert await pipeline.execute(ok, operation_key="a") == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"key": "host"}, "key"),
        ({"max_keys": 0}, "max_keys"),
        ({"key_idle": 0}, "key_idle"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], told: str) -> None:
    """On each strategy that has them."""
    for add in (
        lambda: B().add_concurrency_limiter(1, **options),
        lambda: B().add_rate_limiter(TokenBucket(1, 1), **options),
        lambda: B().add_circuit_breaker(**options),
    ):
        with pytest.raises(OptionsError, match=told):
            add()


def test_a_limit_of_ones_own_has_no_keys() -> None:
    """Its state is not ours to make for each key."""

    class Mine:
        def try_acquire(self, now: float) -> float:
            return 0.0

    with pytest.raises(OptionsError, match="TokenBucket"):
        B().add_rate_limiter(Mine(), key=by_operation)


# ---- threads -------------------------------------------------------------------------------------


def test_sixteen_threads_make_one_state_for_each_key() -> None:
    """Of a thousand simultaneous calls for ten new keys exactly three pass for each."""
    pipeline = (
        B(clock=VirtualClock())
        .add_rate_limiter(FixedWindow(3, 1), key=by_operation, max_keys=2)
        .build()
    )
    gate = threading.Barrier(16)
    passed: list[str] = []

    def body() -> None:
        for round_ in range(10):
            gate.wait(20)
            for _ in range(6):
                key = f"k{round_}"
                if pipeline.settle_sync(lambda: 1, operation_key=key).ok:
                    passed.append(key)

    threads = [threading.Thread(target=body) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(passed) == sorted(f"k{round_}" for round_ in range(10) for _ in range(3))


def test_sixteen_threads_lose_no_permit_while_keys_come_and_go() -> None:
    """At most two inside per key at any time, and in the end all is free."""
    pipeline = (
        B(clock=VirtualClock()).add_concurrency_limiter(2, key=by_operation, max_keys=1).build()
    )
    lock, inside, worst = threading.Lock(), dict[str, int](), [0]

    def body(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            key = chance.choice("abc")

            def work(key: str = key) -> None:
                with lock:
                    inside[key] = inside.get(key, 0) + 1
                    worst[0] = max(worst[0], inside[key])
                with lock:
                    inside[key] -= 1

            pipeline.settle_sync(work, operation_key=key)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst[0] <= 2
    for key in "abc":
        assert pipeline.execute_sync(lambda: 1, operation_key=key) == 1


class _Kept:
    """What is kept of a key, and may have another key be left while it is looked at."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.inside = 0
        self.used_at = 0.0
        self.meanwhile = meanwhile

    def is_idle(self, now: float) -> bool:
        self.meanwhile()
        return True


def test_a_call_that_is_closed_while_keys_are_looked_at() -> None:
    """The garbage collector may run in the middle of it: the next addition looks at the rest."""
    table: KeyTable[_Kept] = KeyTable(max_keys=1, key_idle=600)
    table["a"] = _Kept(lambda: table.move_to_end("a"))
    table["b"] = table["c"] = table["d"] = _Kept(lambda: None)
    table.let_go(0.0)
    assert list(table) == ["b", "c", "d"]
    table.let_go(0.0)
    assert list(table) == ["d"]
