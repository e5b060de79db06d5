"""Building: the fluent interface, what `add_*` takes, freezing, fresh state, strategies of one's own."""

from __future__ import annotations

import inspect
import math
import pydoc
import random
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Never

import anyio
import attrs
import pytest

import resilience_pipeline
from resilience_pipeline import (
    BrokenCircuitError,
    ChaosBehavior,
    ChaosFault,
    ChaosLatency,
    ChaosOutcome,
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    ConcurrencyLimiterRejectedError,
    ExecutionRejectedError,
    Failure,
    Fallback,
    FixedWindow,
    Lock,
    MisuseError,
    OptionsError,
    RateLimiter,
    RateLimiterRejectedError,
    RecordReplay,
    Rejected,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Retry,
    SlidingWindow,
    Success,
    Timeout,
    TokenBucket,
    handle,
    handle_inner,
    handle_result,
)
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.testing import VirtualClock
from support.calls import B, BoomError, Calls, Watching, boom, ok

CONTROL = CircuitBreakerControl()
LOCK = ResilienceLock()


def log_retry(event: object) -> None: ...


def is_bad(result: object) -> bool:
    return result == "bad"


#: Method, class, and arguments for both.
ADDERS: list[Any] = [
    pytest.param("add_retry", Retry, (), {}, id="retry-defaults"),
    pytest.param(
        "add_retry",
        Retry,
        (),
        {"max_retry_attempts": 2, "delay": "500ms", "name": "again"},
        id="retry",
    ),
    pytest.param("add_circuit_breaker", CircuitBreaker, (), {}, id="breaker-defaults"),
    pytest.param(
        "add_circuit_breaker",
        CircuitBreaker,
        (),
        {"failure_ratio": 0.5, "control": CONTROL},
        id="breaker",
    ),
    pytest.param("add_timeout", Timeout, ("10s",), {}, id="timeout-positional"),
    pytest.param("add_timeout", Timeout, (), {"timeout": 10}, id="timeout-by-name"),
    pytest.param("add_fallback", Fallback, (ok,), {}, id="fallback-positional"),
    pytest.param("add_fallback", Fallback, (), {"fallback_value": 9}, id="fallback-value"),
    pytest.param(
        "add_concurrency_limiter", ConcurrencyLimiter, (5, 3), {}, id="limiter-positional"
    ),
    pytest.param(
        "add_concurrency_limiter",
        ConcurrencyLimiter,
        (),
        {"permit_limit": 5, "max_wait": 1},
        id="limiter-by-name",
    ),
    pytest.param("add_rate_limiter", RateLimiter, (TokenBucket(1, 2),), {}, id="rate-limiter"),
    pytest.param("add_lock", Lock, (LOCK,), {"max_wait": 1}, id="lock"),
    pytest.param(
        "add_record_replay", RecordReplay, ("recordings",), {"mode": "record"}, id="record"
    ),
    pytest.param("add_chaos_fault", ChaosFault, (OSError,), {"enabled": False}, id="chaos-fault"),
    pytest.param("add_chaos_latency", ChaosLatency, (), {"latency": "1s"}, id="chaos-latency"),
    pytest.param("add_chaos_outcome", ChaosOutcome, ([(1, 2)],), {}, id="chaos-outcome"),
    pytest.param("add_chaos_behavior", ChaosBehavior, (ok,), {}, id="chaos-behavior"),
]
METHODS = [
    ("add_retry", Retry),
    ("add_circuit_breaker", CircuitBreaker),
    ("add_timeout", Timeout),
    ("add_fallback", Fallback),
    ("add_concurrency_limiter", ConcurrencyLimiter),
    ("add_rate_limiter", RateLimiter),
    ("add_lock", Lock),
    ("add_record_replay", RecordReplay),
    ("add_chaos_fault", ChaosFault),
    ("add_chaos_latency", ChaosLatency),
    ("add_chaos_outcome", ChaosOutcome),
    ("add_chaos_behavior", ChaosBehavior),
]
adders = pytest.mark.parametrize(("method", "strategy"), METHODS)


# ---- the fluent interface -----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "strategy", "args", "options"), ADDERS)
def test_add_x_is_add_of_x(
    method: str, strategy: Callable[..., Any], args: Any, options: Any
) -> None:
    """`add_x(**options)` is `add(X(**options))`."""
    by_name = getattr(B(), method)(*args, **options).build()
    by_class = B().add(strategy(*args, **options)).build()
    assert by_name.strategies == by_class.strategies == (strategy(*args, **options),)
    assert type(by_name.strategies[0]) is strategy


@pytest.mark.parametrize(("method", "strategy", "args", "options"), ADDERS)
def test_each_add_returns_the_builder(
    method: str, strategy: Callable[..., Any], args: Any, options: Any
) -> None:
    """Each `add_*` returns the very builder it was called on."""
    builder = B()
    assert getattr(builder, method)(*args, **options) is builder
    assert builder.add(strategy(*args, **options)) is builder
    assert builder.add_pipeline(ResiliencePipeline.empty) is builder


def test_chained_and_statement_style_build_the_same() -> None:
    """Both chained and statement style work."""
    chained = B(name="llm").add_retry(delay=1).add_timeout("10s").build()
    builder = B(name="llm")
    builder.add_retry(delay=1)
    builder.add_timeout("10s")
    assert builder.build().strategies == chained.strategies == (Retry(delay=1), Timeout(10))


def test_the_method_of_a_class_can_be_called_with_the_builder() -> None:
    """`add_x` is a method like any other, also when looked up on the class."""
    builder = B()
    assert ResiliencePipelineBuilder.add_timeout(builder, 3) is builder
    assert builder.build().strategies == (Timeout(3),)


# ---- one signature, one place -------------------------------------------------------------------


@adders
def test_signature_of_the_method_is_the_signature_of_the_class(
    method: str, strategy: type[Any]
) -> None:
    """Options and defaults live once, on the class, and are seen on the method of a builder."""
    shown = inspect.signature(getattr(B(), method))
    assert list(shown.parameters.values()) == list(inspect.signature(strategy).parameters.values())
    assert shown.return_annotation == "ResiliencePipelineBuilder"
    unbound = inspect.signature(getattr(ResiliencePipelineBuilder, method))
    assert list(unbound.parameters) == ["self", *shown.parameters]


@adders
def test_help_shows_every_option_and_its_documentation(method: str, strategy: type[Any]) -> None:
    """`help(builder.add_x)` shows the options, their defaults and what they mean."""
    text = pydoc.render_doc(getattr(B(), method), renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    for name, parameter in inspect.signature(strategy).parameters.items():
        assert str(parameter) in text
        assert re.search(rf"^ +{name}: ", text, re.MULTILINE)


@adders
def test_the_method_looks_like_one_of_the_builder(method: str, strategy: type[Any]) -> None:
    """Name, qualified name, module and docstring are those of a method of the builder."""
    bound = getattr(B(), method)
    assert bound.__name__ == method
    assert bound.__qualname__ == f"ResiliencePipelineBuilder.{method}"
    assert bound.__module__ == "resilience_pipeline"
    assert bound.__doc__ == strategy.__doc__


@adders
def test_a_misspelt_option_is_a_type_error_that_suggests_the_right_one(
    method: str, strategy: type[Any]
) -> None:
    """A misspelt option is a `TypeError` naming it and the right one, on the class and the method."""
    name = list(inspect.signature(strategy).parameters)[-2]
    misspelt = name[:-1] + "z"
    for make in (strategy, getattr(B(), method)):
        with pytest.raises(TypeError, match=rf"{strategy.__name__}\(\).*'{misspelt}'.*'{name}'"):
            make(**{misspelt: None})


def test_bad_options_are_refused_when_added_and_all_named() -> None:
    """PL-06: adding raises an error that names the options' type and each bad field."""
    builder = B()
    with pytest.raises(OptionsError) as caught:
        builder.add_retry(max_retry_attempts=0, delay=-1, backoff_type="expo")  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    for part in ("Retry", "max_retry_attempts", "delay", "backoff_type"):
        assert part in str(caught.value)
    assert builder.build().strategies == ()


# ---- build --------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_first_added_is_outermost() -> None:
    """PL-01: three strategies are passed in the order 1, 2, 3, call, 3, 2, 1."""
    log: list[str] = []

    async def call() -> None:
        log.append("call")

    pipeline = B().add(Watching("1", log)).add(Watching("2", log)).add(Watching("3", log)).build()
    await pipeline.execute(call)
    assert log == [">1", ">2", ">3", "call", "<3", "<2", "<1"]


class Twice(Strategy[Never]):
    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            await next(context)
            return await next(context)

        return handle


@pytest.mark.anyio
async def test_a_strategy_may_call_what_is_inside_twice() -> None:
    """PL-02: a middle strategy calls next twice: what is inside runs twice, what is outside once."""
    log: list[str] = []

    async def call() -> None:
        log.append("call")

    await B().add(Watching("1", log)).add(Twice()).add(Watching("3", log)).build().execute(call)
    assert log == [">1", *([">3", "call", "<3"] * 2), "<1"]


@pytest.mark.parametrize(
    "add",
    [
        lambda builder: builder.add(Retry()),
        lambda builder: builder.add_timeout(1),
        lambda builder: builder.add_pipeline(ResiliencePipeline.empty),
    ],
    ids=["add", "add_timeout", "add_pipeline"],
)
def test_after_build_nothing_can_be_added(add: Callable[[Any], object]) -> None:
    """PL-04: adding after the first `build()` raises `MisuseError` and changes nothing."""
    builder = B().add_retry()
    first = builder.build()
    with pytest.raises(MisuseError, match="after build"):
        add(builder)
    assert first.strategies == builder.build().strategies == (Retry(),)


def test_building_again_gives_another_pipeline_of_the_same_strategies() -> None:
    """Building again gives a new pipeline of the very same option objects."""
    builder = B(name="twin").add_retry().add_timeout(1)
    first, second = builder.build(), builder.build()
    assert first is not second
    assert [id(each) for each in first.strategies] == [id(each) for each in second.strategies]


@pytest.mark.anyio
async def test_building_again_gives_a_circuit_of_its_own() -> None:
    """State is born in `build()`: a circuit opened in one pipeline is closed in the other."""
    builder = B().add_circuit_breaker(failure_ratio=1, minimum_throughput=2)
    first, second = builder.build(), builder.build()
    for _ in range(2):
        await first.settle(boom)
    assert isinstance(await first.settle(ok), Rejected)
    assert await second.execute(ok) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("limit", [TokenBucket(1, 1), FixedWindow(1, 60), SlidingWindow(1, 60)])
async def test_building_again_gives_limits_of_their_own(limit: Any) -> None:
    """Limits are values: two builds are two limits, and so are two strategies of one pipeline."""
    builder = B(clock=VirtualClock()).add_rate_limiter(limit).add_rate_limiter(limit)
    for pipeline in (builder.build(), builder.build()):
        assert await pipeline.execute(ok) == 1
        with pytest.raises(RateLimiterRejectedError):
            await pipeline.execute(ok)


@pytest.mark.anyio
async def test_building_again_gives_permits_of_their_own() -> None:
    """A permit taken in one pipeline is free in the other."""
    builder = B().add_concurrency_limiter(1)
    first, second = builder.build(), builder.build()

    async def inside() -> None:
        assert isinstance(await first.settle(ok), Rejected)
        assert await second.execute(ok) == 1

    await first.execute(inside)


def test_each_strategy_is_bound_once_per_build() -> None:
    """A strategy is bound when the pipeline is built, not when it is called."""
    strategy = Watching("w", [])
    builder = B().add(strategy)
    assert len(strategy.sites) == 0
    pipeline = builder.build()
    for _ in range(3):
        anyio.run(pipeline.execute, ok)
    assert len(strategy.sites) == 1
    builder.build()
    assert len(strategy.sites) == 2


@pytest.mark.anyio
async def test_an_empty_builder_runs_the_call_as_it_is() -> None:
    """PL-05: an empty builder and `ResiliencePipeline.empty` do nothing."""
    for pipeline in (B().build(), ResiliencePipeline.empty):
        assert await pipeline.execute(ok) == 1
        assert await pipeline.settle(ok) == Success(1)
        with pytest.raises(BoomError):
            await pipeline.execute(boom)
        assert isinstance(await pipeline.settle(boom), Failure)
        assert pipeline.strategies == ()
        assert pipeline.name is None
        assert pipeline.instance is None


def test_a_pipeline_serves_loops_one_after_another() -> None:
    """Made outside of any loop, used from several, on asyncio and trio in turn, with one state."""
    control = CircuitBreakerControl()
    pipeline = (
        B()
        .add_retry(max_retry_attempts=1, delay=0)
        .add_concurrency_limiter(1, 1)
        .add_rate_limiter(TokenBucket(100, 1))
        .add_circuit_breaker(control=control)
        .add_timeout(60)
        .build()
    )
    for number, backend in enumerate(("asyncio", "trio", "asyncio", "trio")):
        assert anyio.run(pipeline.execute, ok, backend=backend) == 1
        assert control.metrics.throughput == number + 1


# ---- what a pipeline shows ----------------------------------------------------------------------


def test_name_and_instance() -> None:
    """A pipeline shows the name and the instance of its builder."""
    pipeline = B("llm", instance="eu").build()
    assert (pipeline.name, pipeline.instance) == ("llm", "eu")
    assert B(name="llm").build().name == "llm"


def test_seven_strategies_are_described_in_order() -> None:
    """Polly's TS-01: a pipeline shows the options of each strategy, whole and in order."""
    options: list[Strategy[Any]] = [
        Fallback(fallback_value=None),
        ConcurrencyLimiter(3),
        Retry(delay=1),
        CircuitBreaker(failure_ratio=0.5),
        Timeout(10),
        ChaosLatency(1),
        ChaosFault(OSError),
    ]
    builder: ResiliencePipelineBuilder[Any] = B()
    for each in options:
        builder.add(each)
    pipeline = builder.build()
    assert pipeline.strategies == tuple(options)
    assert all(shown is given for shown, given in zip(pipeline.strategies, options, strict=True))


def test_strategies_are_flattened_outermost_first() -> None:
    """TS-02: `strategies` is a tuple of the option objects, those of nested pipelines in their place."""
    deepest = B().add_retry(name="c").build()
    middle = B().add_timeout(1, name="b").add_pipeline(deepest).add_timeout(2, name="d").build()
    pipeline = B().add_retry(name="a").add_pipeline(middle).add_retry(name="e").build()
    assert isinstance(pipeline.strategies, tuple)
    assert [strategy.name for strategy in pipeline.strategies] == ["a", "b", "c", "d", "e"]
    assert pipeline.strategies[2] is deepest.strategies[0]


REPRS: list[Any] = [
    (B().build(), "ResiliencePipelineBuilder().build()"),
    (ResiliencePipeline.empty, "ResiliencePipelineBuilder().build()"),
    (
        B("llm", instance="eu", close_timeout="2s").build(),
        "ResiliencePipelineBuilder(name='llm', instance='eu', close_timeout=2.0).build()",
    ),
    (
        B(name="llm").add_retry(max_retry_attempts=2, delay="500ms").add_timeout("10s").build(),
        (
            "ResiliencePipelineBuilder(name='llm').add_retry(max_retry_attempts=2, delay=0.5)"
            ".add_timeout(10.0).build()"
        ),
    ),
    (B().add_retry().build(), "ResiliencePipelineBuilder().add_retry().build()"),
    (
        B().add_concurrency_limiter(5).add_concurrency_limiter(5, 2).build(),
        "ResiliencePipelineBuilder().add_concurrency_limiter(5).add_concurrency_limiter(5, 2).build()",
    ),
    (
        B().add_concurrency_limiter(5, math.inf, max_wait=1).build(),
        "ResiliencePipelineBuilder().add_concurrency_limiter(5, math.inf, max_wait=1.0).build()",
    ),
    (
        B().add_fallback(fallback_value=9).add_fallback(fallback_value=None).build(),
        (
            "ResiliencePipelineBuilder().add_fallback(fallback_value=9)"
            ".add_fallback(fallback_value=None).build()"
        ),
    ),
    (
        B().add_rate_limiter(TokenBucket(3, 4)).add_rate_limiter(TokenBucket(3, 4, "1m")).build(),
        (
            "ResiliencePipelineBuilder().add_rate_limiter(TokenBucket(3, 4))"
            ".add_rate_limiter(TokenBucket(3, 4, 60.0)).build()"
        ),
    ),
    (
        B().add_rate_limiter(FixedWindow(1, 2)).add_rate_limiter(SlidingWindow(1, 2, 3)).build(),
        (
            "ResiliencePipelineBuilder().add_rate_limiter(FixedWindow(1, 2.0))"
            ".add_rate_limiter(SlidingWindow(1, 2.0, 3)).build()"
        ),
    ),
    (
        B().add_circuit_breaker(failure_ratio=0.5, name="db").build(),
        "ResiliencePipelineBuilder().add_circuit_breaker(failure_ratio=0.5, name='db').build()",
    ),
    (
        B().add_retry(max_retry_attempts=math.inf, use_jitter="full", max_delay=5).build(),
        (
            "ResiliencePipelineBuilder()"
            ".add_retry(max_retry_attempts=math.inf, use_jitter='full', max_delay=5.0).build()"
        ),
    ),
    (
        B().add_retry(should_handle=(ValueError, OSError)).build(),
        "ResiliencePipelineBuilder().add_retry(should_handle=handle(ValueError, OSError)).build()",
    ),
    (
        B().add_retry(should_handle=handle_inner(OSError) | handle_result(is_bad)).build(),
        (
            "ResiliencePipelineBuilder()"
            ".add_retry(should_handle=handle_inner(OSError) | handle_result(is_bad)).build()"
        ),
    ),
    (
        B().add_retry(should_handle=handle(OSError, where=is_bad), on_retry=log_retry).build(),
        (
            "ResiliencePipelineBuilder()"
            ".add_retry(should_handle=handle(OSError, where=is_bad), on_retry=log_retry).build()"
        ),
    ),
    (
        B("a").add_pipeline(B("b").add_timeout(1).build()).add_retry().build(),
        (
            "ResiliencePipelineBuilder(name='a')"
            ".add_pipeline(ResiliencePipelineBuilder(name='b').add_timeout(1.0).build())"
            ".add_retry().build()"
        ),
    ),
]


@pytest.mark.parametrize(("pipeline", "text"), REPRS, ids=range(len(REPRS)))
def test_repr_reads_like_the_builder_call(pipeline: ResiliencePipeline[Any], text: str) -> None:
    """`repr(pipeline)` reads like the builder call, without what is left at its default."""
    assert repr(pipeline) == text


@pytest.mark.parametrize(("pipeline", "text"), REPRS, ids=range(len(REPRS)))
def test_repr_can_be_evaluated(pipeline: ResiliencePipeline[Any], text: str) -> None:
    """For built-in strategies the text builds a pipeline of equal strategies."""
    names = {**vars(resilience_pipeline), "math": math, "is_bad": is_bad, "log_retry": log_retry}
    again = eval(text, names)
    assert again.strategies == pipeline.strategies
    assert (again.name, again.instance, repr(again)) == (pipeline.name, pipeline.instance, text)


def test_repr_of_a_builder_is_the_chain_so_far() -> None:
    """A builder shows the calls that lead to it."""
    assert repr(B("a").add_timeout(1)) == "ResiliencePipelineBuilder(name='a').add_timeout(1.0)"


def test_repr_shows_strategies_of_ones_own_as_added() -> None:
    """A strategy of somebody else's is shown in `add(...)`, also one derived from ours."""

    class Mine(Retry):
        pass

    assert repr(B().add(Mine(delay=1)).add(Twice())) == (
        "ResiliencePipelineBuilder().add(Mine(delay=1.0)).add(Twice(…))"
    )


@pytest.mark.parametrize("name", ["name", "instance", "strategies", "_layers", "brand_new"])
def test_pipelines_are_immutable(name: str) -> None:
    """No attribute of a pipeline can be set, made or deleted."""
    pipeline = B("llm").add_retry().build()
    with pytest.raises(AttributeError, match=name):
        setattr(pipeline, name, None)
    with pytest.raises(AttributeError, match=name):
        delattr(pipeline, name)
    assert pipeline.name == "llm"
    assert pipeline.strategies == (Retry(),)


@adders
def test_options_are_immutable(method: str, strategy: type[Any]) -> None:
    """No option can be set once the strategy is made."""
    required = {"timeout": 1, "permit_limit": 1, "fallback_value": 1, "limiter": TokenBucket(1, 1)}
    required["directory"] = "recordings"
    required |= {"fault_generator": OSError, "latency": 1, "outcome_generator": ok, "behavior": ok}
    names = inspect.signature(strategy).parameters
    made = strategy(**{name: value for name, value in required.items() if name in names})
    for name in names:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(made, name, None)


# ---- strategies of one's own --------------------------------------------------------------------


def test_a_strategy_is_told_where_it_sits() -> None:
    """PL-07: each one gets the pipeline's name and instance, its own name, place, clock and chance."""
    clock = VirtualClock(start=7)
    inner, outer = Watching("in", []), Watching("out", [])

    def chance() -> float:
        return 0.5

    B("p", instance="i", clock=clock, random=chance, close_timeout="3s").add(outer).add(
        inner
    ).build()
    (site,) = inner.sites
    assert (site.pipeline_name, site.instance, site.strategy_name) == ("p", "i", "in")
    assert (site.position, outer.sites[0].position) == (1, 0)
    assert (site.now(), site.random, site.close_timeout) == (7.0, chance, 3.0)


def test_chance_is_random_by_default() -> None:
    """Without `random=` numbers come from the standard generator."""
    strategy = Watching("w", [])
    B().add(strategy).build()
    random.seed(4)
    drawn = strategy.sites[0].random()
    random.seed(4)
    assert drawn == random.random()


class Picky(Strategy[ExecutionRejectedError]):
    """Refuses every other call; has no name of its own."""

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        calls = 0

        async def handle(context: ResilienceContext) -> Any:
            nonlocal calls
            calls += 1
            if calls % 2 == 0:
                raise site.reject(ExecutionRejectedError, context, f"call {calls} is even")
            return await next(context)

        return handle


@pytest.mark.anyio
async def test_a_rejection_of_a_strategy_of_ones_own_is_rejected() -> None:
    """What a strategy of one's own refuses is this pipeline's own refusal, named after its class."""
    pipeline = B("p").add(Picky()).build()
    assert await pipeline.execute(ok) == 1
    outcome = await pipeline.settle(ok, operation_key="op")
    assert isinstance(outcome, Rejected)
    assert outcome.error.strategy_name == "Picky"
    assert outcome.error.operation_key == "op"
    assert str(outcome.error) == "pipeline 'p', strategy 'Picky': call 2 is even"


@pytest.mark.anyio
async def test_whatever_has_bind_is_a_strategy() -> None:
    """A strategy need not derive from `Strategy`: `bind(next, site)` makes it one."""

    class Duck:
        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            assert site.strategy_name == "Duck"
            return next

    duck: Any = Duck()
    pipeline = B().add(duck).build()
    assert pipeline.strategies == (duck,)
    assert await pipeline.execute(ok) == 1


def test_a_strategy_has_to_implement_bind() -> None:
    """`Strategy` is abstract in `bind` alone."""

    class Empty(Strategy[Never]):
        pass

    with pytest.raises(TypeError, match="bind"):
        Empty()  # type: ignore[abstract]


def test_bind_has_to_return_a_function() -> None:
    """A `bind` that returns nothing is a `MisuseError` when the pipeline is built, and named."""

    class Forgetful(Strategy[Never]):
        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            return None  # type: ignore[return-value]

    with pytest.raises(MisuseError, match=r"bind\(\) of Forgetful.*got None"):
        B().add(Forgetful()).build()


@pytest.mark.parametrize(
    "other", [None, 3, "retry", Retry, ok, B(), object()], ids=lambda each: type(each).__name__
)
def test_adding_what_is_no_strategy_is_misuse(other: Any) -> None:
    """Adding what is no strategy raises `MisuseError` with what was given."""
    with pytest.raises(MisuseError) as caught:
        B().add(other)
    assert repr(other) in str(caught.value)
    assert "bind(next, site)" in str(caught.value)


def test_adding_a_pipeline_as_a_strategy_is_misuse() -> None:
    """A pipeline given to `add` is answered with the method that takes it."""
    pipeline: Any = ResiliencePipeline.empty
    with pytest.raises(MisuseError, match=r"add_pipeline\(\)"):
        B().add(pipeline)


@pytest.mark.parametrize(
    "other", [None, B(), Retry(), ResiliencePipeline], ids=lambda each: type(each).__name__
)
def test_nesting_what_is_no_pipeline_is_misuse(other: Any) -> None:
    """`add_pipeline` takes what `build()` gave and nothing else."""
    with pytest.raises(MisuseError, match="has been built"):
        B().add_pipeline(other)


# ---- the builder's own options ------------------------------------------------------------------


class HalfAClock:
    def now(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", 3),
        ("name", b"llm"),
        ("instance", ("eu",)),
        ("clock", HalfAClock()),
        ("clock", VirtualClock),
        ("clock", 0.0),
        ("random", 0.5),
        ("random", "random"),
        ("close_timeout", -1),
        ("close_timeout", True),
        ("close_timeout", math.nan),
        ("close_timeout", "5 s"),
        ("close_timeout", None),
        ("close_timeout", timedelta(seconds=-1)),
    ],
)
def test_bad_options_of_the_builder_are_refused(option: str, value: object) -> None:
    """A bad value raises `OptionsError` naming the option and what was given."""
    options: dict[str, Any] = {option: value}
    with pytest.raises(OptionsError) as caught:
        B(**options)
    assert caught.value.problems[0].startswith(f"{option} must ")
    assert repr(value) in str(caught.value)
    assert "ResiliencePipelineBuilder" in str(caught.value)


def test_all_bad_options_of_the_builder_are_named() -> None:
    """One error lists every bad field."""
    wrong: Any = 3
    with pytest.raises(OptionsError) as caught:
        B(name=wrong, instance=wrong, clock=wrong, random=wrong, close_timeout=-3)
    named = [problem.partition(" ")[0] for problem in caught.value.problems]
    assert named == ["name", "instance", "clock", "random", "close_timeout"]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0.0), (2, 2.0), ("1m30s", 90.0), (timedelta(seconds=1), 1.0), (math.inf, math.inf)],
)
def test_close_timeout_is_any_duration(value: Any, seconds: float) -> None:
    """`close_timeout` takes every form of a duration."""
    strategy = Watching("w", [])
    B(close_timeout=value).add(strategy).build()
    assert strategy.sites[0].close_timeout == seconds


@pytest.mark.anyio
async def test_the_clock_drives_every_wait() -> None:
    """`clock=` drives waits, limits and windows of the pipelines built with it."""
    clock = VirtualClock(autojump=True)
    control = CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_retry(delay=60, max_retry_attempts=2)
        .add_circuit_breaker(
            failure_ratio=1,
            minimum_throughput=2,
            sampling_duration="24h",
            break_duration=1,
            control=control,
        )
        .add_timeout(3600)
        .build()
    )

    async def slow() -> None:
        await clock.sleep(math.inf)

    with pytest.raises(resilience_pipeline.TimeoutRejectedError):
        await pipeline.execute(slow)
    assert clock.now() == 3 * 3600 + 2 * 60
    # The second failure opened it, and so did the third as the trial after the break.
    assert control.metrics.opened_at == clock.now()


@pytest.mark.anyio
@pytest.mark.parametrize(("draw", "factor"), [(0.0, 0.75), (0.5, 1.0), (0.75, 1.125)])
async def test_random_makes_jitter_reproducible(draw: float, factor: float) -> None:
    """`random=` is where jitter comes from: constant × (0.75 + 0.5·u)."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B(clock=clock, random=lambda: draw)
        .add_retry(max_retry_attempts=1, delay=8, use_jitter=True)
        .build()
    )
    await pipeline.execute(Calls(BoomError(), 1))
    assert clock.now() == 8 * factor


# ---- types of rejections at run time ------------------------------------------------------------


@pytest.mark.anyio
async def test_every_rejection_comes_from_the_strategy_that_promises_it() -> None:
    """What the types say: breaker, limiters and timeout raise their own kind of rejection."""

    async def rejection(pipeline: ResiliencePipeline[Any], fn: Callable[[], Any]) -> Exception:
        outcome = await pipeline.settle(fn)
        assert isinstance(outcome, Rejected)
        error: Exception = outcome.error
        return error

    clock = VirtualClock(autojump=True)
    CONTROL.isolate()
    try:
        isolated = B().add_circuit_breaker(control=CONTROL).build()
        assert type(await rejection(isolated, ok)) is resilience_pipeline.IsolatedCircuitError
        assert isinstance(await rejection(isolated, ok), BrokenCircuitError)
    finally:
        CONTROL.close()
    slow = B(clock=clock).add_timeout(1).build()
    assert type(await rejection(slow, partial(clock.sleep, 9))) is (
        resilience_pipeline.TimeoutRejectedError
    )
    limited = B(clock=clock).add_rate_limiter(TokenBucket(1, 1)).build()
    await limited.execute(ok)
    assert type(await rejection(limited, ok)) is RateLimiterRejectedError
    full = B().add_concurrency_limiter(1).build()
    refused = await full.execute(partial(full.settle, ok))
    assert isinstance(refused, Rejected)
    assert type(refused.error) is ConcurrencyLimiterRejectedError
