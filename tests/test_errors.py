"""Errors: the tree, what they say, and that they travel whole."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest

import resilience_pipeline
from resilience_pipeline import (
    BrokenCircuitError,
    CircuitBreakerControl,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    FixedWindow,
    IsolatedCircuitError,
    MisuseError,
    OptionsError,
    RateLimiterRejectedError,
    Rejected,
    ResilienceError,
    ResiliencePipeline,
    Retry,
    TimeoutRejectedError,
    TokenBucket,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import B, boom, hang, ok, running
from support.portable import (
    HostError,
    MyBrokenCircuitError,
    MyMisuseError,
    MyOptionsError,
    SlowHostError,
    raise_it,
)

# ---- the tree -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ResilienceError, [Exception]),
        (ExecutionRejectedError, [ResilienceError]),
        (BrokenCircuitError, [ExecutionRejectedError]),
        (IsolatedCircuitError, [BrokenCircuitError]),
        (TimeoutRejectedError, [ExecutionRejectedError, TimeoutError]),
        (RateLimiterRejectedError, [ExecutionRejectedError]),
        (ConcurrencyLimiterRejectedError, [ExecutionRejectedError]),
        (MisuseError, [ResilienceError, TypeError]),
        (OptionsError, [ResilienceError, ValueError]),
    ],
)
def test_the_tree(error: type[Exception], bases: list[type[Exception]]) -> None:
    """Each error derives from those above it in the contract, and the builtin beside it."""
    assert list(error.__bases__) == bases
    assert error.__module__ == "resilience_pipeline"
    assert getattr(resilience_pipeline, error.__name__) is error


def test_a_misuse_is_no_bad_option_and_no_rejection() -> None:
    """The three branches of the tree are apart."""
    assert not issubclass(MisuseError, ExecutionRejectedError | OptionsError)
    assert not issubclass(OptionsError, ExecutionRejectedError | MisuseError)


def test_fields_have_defaults() -> None:
    """Made without fields, a rejection says `None` for each."""
    error = ExecutionRejectedError("no")
    assert error.pipeline_name is error.strategy_name is error.operation_key is None
    assert error.retry_after is None
    assert str(error) == "no"
    assert TimeoutRejectedError().timeout == 0
    assert OptionsError().problems == ()


# ---- what they say ------------------------------------------------------------------------------


async def refusal(pipeline: ResiliencePipeline[Any], call: Callable[[], Any] = ok) -> Any:
    outcome = await pipeline.settle(call, operation_key="op")
    assert isinstance(outcome, Rejected)
    return outcome.error


def open_circuit(name: str | None = "p", **options: Any) -> ResiliencePipeline[Any]:
    return (
        B(name=name, clock=VirtualClock(autojump=True))
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=7, name="fuse", **options
        )
        .build()
    )


@pytest.mark.anyio
async def test_broken_circuit() -> None:
    """An open circuit names pipeline, strategy and operation, and the rest of the break."""
    pipeline = open_circuit()
    for _ in range(2):
        await pipeline.settle(boom)
    error = await refusal(pipeline)
    assert type(error) is BrokenCircuitError
    assert (error.pipeline_name, error.strategy_name) == ("p", "fuse")
    assert (error.operation_key, error.retry_after) == ("op", 7.0)
    for part in ("pipeline 'p'", "strategy 'fuse'", "open", "7 s"):
        assert part in str(error)


@pytest.mark.anyio
async def test_isolated_circuit() -> None:
    """An isolated circuit has no time to come back at."""
    control = CircuitBreakerControl()
    control.isolate()
    error = await refusal(open_circuit(control=control))
    assert type(error) is IsolatedCircuitError
    assert error.retry_after is None
    for part in ("pipeline 'p'", "strategy 'fuse'", "isolated"):
        assert part in str(error)


@pytest.mark.anyio
async def test_time_out() -> None:
    """A time-out says its limit; of two nested ones it names the right one."""
    pipeline = (
        B("p", clock=VirtualClock(autojump=True))
        .add_timeout(60, name="whole")
        .add_timeout("1.5s", name="each")
        .build()
    )
    error = await refusal(pipeline, hang)
    assert type(error) is TimeoutRejectedError
    assert (error.strategy_name, error.timeout, error.retry_after) == ("each", 1.5, None)
    for part in ("pipeline 'p'", "strategy 'each'", "1.5 s"):
        assert part in str(error)


@pytest.mark.anyio
async def test_time_out_is_no_system_error() -> None:
    """A `TimeoutError` is an `OSError`; ours has no number of one, and shows its own message."""
    error = await refusal(B(clock=VirtualClock(autojump=True)).add_timeout(1).build(), hang)
    assert error.errno is None
    assert str(error).startswith("strategy 'Timeout': ")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ["2 calls are inside"]),
        ({"queue_limit": 1}, ["2 calls are inside", "1 wait"]),
        ({"queue_limit": 5, "max_wait": "3s"}, ["max_wait", "3 s"]),
    ],
    ids=["no-queue", "queue-full", "max_wait"],
)
async def test_concurrency_limiter(options: dict[str, Any], parts: list[str]) -> None:
    """A limiter says how many are inside and waiting, or how long was waited."""
    clock = VirtualClock(autojump=True)
    pipeline = B("p", clock=clock).add_concurrency_limiter(2, **options, name="door").build()
    async with running(pipeline.execute, hang), running(pipeline.execute, hang):
        if options.get("queue_limit") == 1:
            async with running(pipeline.execute, hang):
                error = await refusal(pipeline)
        else:
            error = await refusal(pipeline)
    assert type(error) is ConcurrencyLimiterRejectedError
    assert error.retry_after is None
    for part in ["pipeline 'p'", "strategy 'door'", *parts]:
        assert part in str(error)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("limit", "retry_after"), [(TokenBucket(1, 4), 0.25), (FixedWindow(1, "10s"), 10.0)]
)
async def test_rate_limiter(limit: Any, retry_after: float) -> None:
    """A rate limiter names the limit that is used up and the time until a permit can be had."""
    pipeline = B("p", clock=VirtualClock()).add_rate_limiter(limit, name="rate").build()
    await pipeline.execute(ok)
    error = await refusal(pipeline)
    assert type(error) is RateLimiterRejectedError
    assert error.retry_after == retry_after
    for part in ("pipeline 'p'", "strategy 'rate'", repr(limit), f"{retry_after:g} s"):
        assert part in str(error)


@pytest.mark.anyio
async def test_a_pipeline_without_a_name_is_not_named() -> None:
    """Where there is no name, the message starts with the strategy, by its class name."""
    pipeline = B().add_concurrency_limiter(1).build()
    outcome = await pipeline.execute(partial(pipeline.settle, ok))
    assert isinstance(outcome, Rejected)
    assert outcome.error.pipeline_name is None
    assert str(outcome.error) == "strategy 'ConcurrencyLimiter': 1 calls are inside"


@pytest.mark.anyio
async def test_each_refusal_is_a_new_error() -> None:
    """No two calls get one exception object, whose traceback would grow."""
    pipeline = open_circuit()
    for _ in range(2):
        await pipeline.settle(boom)
    errors = [await refusal(pipeline) for _ in range(3)]
    assert len(set(map(id, errors))) == 3


def test_options_error_lists_every_problem() -> None:
    """`problems` has a sentence for each bad option, and the message has all of them."""
    with pytest.raises(OptionsError) as caught:
        Retry(max_retry_attempts=0, delay=-1, max_delay="soon")
    named = [problem.partition(" must be ")[0] for problem in caught.value.problems]
    assert named == ["max_retry_attempts", "delay", "max_delay"]
    assert str(caught.value).startswith("bad options for Retry: ")
    for problem in caught.value.problems:
        assert problem in str(caught.value)


# ---- case LT-01: errors travel whole ------------------------------------------------------------


def _noted(error: Any) -> Any:
    error.add_note("seen in the worker")
    error.tag = ["of the user's"]
    return error


FIELDS: dict[str, Any] = {
    "pipeline_name": "p",
    "strategy_name": "s",
    "operation_key": "op",
    "retry_after": 1.5,
}


def _raised(error: BaseException) -> Any:
    try:
        try:
            raise LookupError("earlier")
        except LookupError as earlier:
            raise error from earlier
    except type(error) as caught:
        return caught


def one_of_each() -> Iterator[Any]:
    yield ResilienceError("plain")
    yield ResilienceError("two", 2)
    for kind in (
        ExecutionRejectedError,
        BrokenCircuitError,
        IsolatedCircuitError,
        RateLimiterRejectedError,
        ConcurrencyLimiterRejectedError,
        MyBrokenCircuitError,
    ):
        yield kind("no", **FIELDS)
        yield _noted(kind("no", **FIELDS))
        yield kind()
    yield TimeoutRejectedError("slow", timeout=2.5, **FIELDS)
    yield _noted(TimeoutRejectedError("slow", timeout=2.5, **FIELDS))
    yield MisuseError("wrong")
    yield OptionsError("bad", ("a must be b", "c must be d"))
    yield _noted(OptionsError("bad", ("a must be b",)))
    yield HostError("db", 5432, **FIELDS)
    yield SlowHostError("db", timeout=3.0)
    yield MyMisuseError("here", 7)
    yield MyOptionsError("delay")
    yield _raised(BrokenCircuitError("raised", **FIELDS))
    with pytest.raises(OptionsError) as bad:
        Retry(delay=-1)
    yield bad.value
    with pytest.raises(MisuseError) as misused:
        B().add(None)  # type: ignore[arg-type]
    yield misused.value


def _protocol(protocol: int) -> Callable[[Any], Any]:
    return lambda error: pickle.loads(pickle.dumps(error, protocol))


WAYS = {
    **{
        f"pickle-{protocol}": _protocol(protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def check_same(again: Any, error: Any) -> None:
    assert type(again) is type(error)
    assert again is not error
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)  # retry_after, timeout, notes, fields of the user's


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", list(one_of_each()), ids=lambda error: type(error).__name__)
def test_errors_survive(error: Any, way: str) -> None:
    """Case LT-01: each public error rebuilds itself from its fields, and so do a user's subclasses."""
    check_same(WAYS[way](error), error)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.anyio
async def test_a_refusal_that_really_happened_survives(way: str) -> None:
    """Case LT-01: an error from an execution keeps what it says; the mark of the execution stays."""
    pipeline = open_circuit()
    for _ in range(2):
        await pipeline.settle(boom)
    error = await refusal(pipeline)
    again = WAYS[way](error)
    assert type(again) is BrokenCircuitError
    assert str(again) == str(error)
    for name in (*FIELDS, "args"):
        assert getattr(again, name) == getattr(error, name)


def test_errors_survive_a_process_pool() -> None:
    """Case LT-01: raised in a worker process, each one arrives in the parent as what it was."""
    errors = list(one_of_each())
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        futures = [pool.submit(raise_it, error) for error in errors]
        for error, future in zip(errors, futures, strict=True):
            again = future.exception()
            assert again is not None
            check_same(again, error)


def test_a_copy_is_apart_from_its_original() -> None:
    """What is set on a copy is not set on the original."""
    error = BrokenCircuitError("no", **FIELDS)
    again = copy.copy(error)
    again.retry_after = 9.0
    again.add_note("mine")
    assert error.retry_after == 1.5
    assert not hasattr(error, "__notes__")
    deep: Any = copy.deepcopy(_noted(error))
    deep.tag.append("more")
    assert error.tag == ["of the user's"]  # type: ignore[attr-defined]
