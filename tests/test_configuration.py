"""`load` and `load_toml`: what a table stands for, every mistake at once, and nothing applied by halves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

from resilience_pipeline import (
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    Fallback,
    FixedWindow,
    Hedging,
    OptionsError,
    PercentileDelay,
    RateLimiter,
    RateLimiterRejectedError,
    Rejected,
    ResilienceContext,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Retry,
    RetryBudget,
    SlidingWindow,
    Strategy,
    Timeout,
    TimeoutRejectedError,
    TokenBucket,
    handle_result,
)
from resilience_pipeline._builder import _Adder
from resilience_pipeline._options import checked, count, function, text_or_none, to_name, to_seconds
from resilience_pipeline.strategies import Handler, Site
from resilience_pipeline.testing import VirtualClock
from support.calls import BoomError, Calls, ok


def hook(event: object) -> None: ...


def table(*steps: Any, name: str = "a", **options: Any) -> dict[str, Any]:
    return {"pipelines": {name: {"strategies": list(steps), **options}}}


def loaded(*steps: Any, registered: Mapping[str, object] = {}) -> tuple[Strategy[Any], ...]:
    """The strategies that some tables come to."""
    registry = ResiliencePipelineRegistry()
    for name, value in registered.items():
        registry.register(name, value)
    registry.load(table(*steps))
    return registry.get("a").strategies


def problems(
    configuration: Any, registry: ResiliencePipelineRegistry | None = None
) -> tuple[str, ...]:
    """The mistakes of a configuration; nothing may have come of it."""
    registry = registry or ResiliencePipelineRegistry()
    before = list(registry)
    with pytest.raises(OptionsError) as caught:
        registry.load(configuration)
    assert list(registry) == before
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


def problems_of(*steps: Any) -> list[str]:
    prefix = "pipelines.a.strategies"
    found = problems(table(*steps))
    assert all(problem.startswith(prefix) for problem in found)
    return [problem.removeprefix(prefix) for problem in found]


# ---- what a table stands for --------------------------------------------------------------------


def test_strategies_in_their_order() -> None:
    """The first of the array is the outermost; `type` is the builder's method without `add_`."""
    strategies = loaded(
        {"type": "fallback", "fallback_value": "sorry"},
        {"type": "concurrency_limiter", "permit_limit": 5, "queue_limit": math.inf},
        {
            "type": "rate_limiter",
            "limiter": {"type": "token_bucket", "capacity": 3, "refill_rate": 1},
        },
        {"type": "retry", "max_retry_attempts": 2, "delay": "500ms", "use_jitter": "full"},
        {"type": "hedging", "delay": -1},
        {"type": "circuit_breaker", "failure_ratio": 0.5, "minimum_throughput": 10},
        {"type": "timeout", "timeout": "1m30s", "name": "attempt"},
    )
    assert strategies == (
        Fallback(fallback_value="sorry"),
        ConcurrencyLimiter(5, math.inf),
        RateLimiter(TokenBucket(3, 1)),
        Retry(max_retry_attempts=2, delay=0.5, use_jitter="full"),
        Hedging(delay=-1),
        CircuitBreaker(failure_ratio=0.5, minimum_throughput=10),
        Timeout(90, name="attempt"),
    )


def test_every_method_of_the_builder_is_a_type() -> None:
    """Whatever there is an `add_` for can be configured."""
    registry = ResiliencePipelineRegistry()
    (problem,) = problems(table({"type": "nothing of the kind"}), registry)
    methods = {
        name.removeprefix("add_") for name in dir(ResiliencePipelineBuilder) if "add_" in name
    }
    assert {word.strip("',") for word in problem.partition("there are")[2].split()} == methods


@pytest.mark.parametrize(
    ("written", "made"),
    [
        (
            {"type": "token_bucket", "capacity": 3, "refill_rate": 2, "per": "1m"},
            TokenBucket(3, 2, "1m"),
        ),
        ({"type": "fixed_window", "permits": 3, "window": "10s"}, FixedWindow(3, 10)),
        ({"type": "sliding_window", "permits": 3, "window": 10}, SlidingWindow(3, 10)),
    ],
)
def test_limits_are_tables(written: dict[str, Any], made: object) -> None:
    assert loaded({"type": "rate_limiter", "limiter": written}) == (RateLimiter(made),)  # type: ignore[arg-type]


def test_other_values_are_tables_too() -> None:
    delay = {"type": "percentile_delay", "percentile": 0.95, "max": "5s"}
    assert loaded({"type": "hedging", "delay_generator": delay}) == (
        Hedging(delay_generator=PercentileDelay(0.95, max=5)),
    )


@pytest.mark.parametrize("kind", ["retry", "hedging"])
@pytest.mark.parametrize("typed", [{}, {"type": "retry_budget"}])
@pytest.mark.parametrize("written", [{}, {"ratio": 0.2, "window": "20s"}])
def test_a_budget_is_a_table_that_needs_no_type(
    kind: str, typed: dict[str, Any], written: dict[str, Any]
) -> None:
    (strategy,) = loaded({"type": kind, "budget": {**typed, **written}})
    assert isinstance(strategy, Retry | Hedging)
    assert repr(strategy.budget) == repr(RetryBudget(**written))


def test_mistakes_in_a_table_without_a_type_are_told() -> None:
    assert problems_of({"type": "retry", "budget": {"ratio": -1, "windw": 1}}) == [
        "[0].budget.windw: is no option of 'retry_budget'; did you mean 'window'?",
        "[0].budget.ratio: must be a finite number of at least 0, got -1",
    ]


def test_a_budget_that_pipelines_share_goes_by_its_registered_name() -> None:
    budget = RetryBudget()
    retry, hedging = loaded(
        {"type": "retry", "budget": "shared"},
        {"type": "hedging", "budget": "shared"},
        registered={"shared": budget},
    )
    assert isinstance(retry, Retry)
    assert isinstance(hedging, Hedging)
    assert retry.budget is hedging.budget is budget


class Tickets:
    """A limit of the user's, which counts from when it is made, or by another one."""

    def __init__(self, count: int = 1, others: Sequence[Tickets] = ()) -> None:
        self.count = count
        self.others = others

    def try_acquire(self, now: float) -> float:
        if self.others:
            return self.others[0].try_acquire(now)
        self.count -= 1
        return 0.0 if self.count >= 0 else 1.0


@pytest.mark.parametrize("nested", [False, True])
def test_what_tables_come_to_is_each_instances_own(nested: bool) -> None:
    """And that of each reload: instances keep their state apart, whatever keeps it."""
    limiter: dict[str, Any] = {"type": "tickets"}
    if nested:
        limiter["others"] = [{"type": "tickets"}]
    registry = ResiliencePipelineRegistry()
    registry.register("tickets", Tickets)
    registry.load(
        table({"type": "rate_limiter", "limiter": limiter}, {"type": "retry", "budget": {}})
    )
    one, two = registry.get("a", "one"), registry.get("a", "two")
    for _ in range(2):
        for pipeline in (one, two):
            assert pipeline.execute_sync(lambda: 1) == 1
            assert isinstance(pipeline.settle_sync(lambda: 1), Rejected)
        registry.reload("a")
    budgets = [pipeline.strategies[1].budget for pipeline in (one, two)]  # type: ignore[attr-defined]
    assert budgets[0] is not budgets[1]


def test_errors_go_by_name() -> None:
    """Python's and the library's, one or several, for `should_handle`."""
    assert loaded(
        {"type": "retry", "should_handle": "ConnectionError"},
        {"type": "retry", "should_handle": ["OSError", "TimeoutRejectedError"]},
    ) == (
        Retry(should_handle=ConnectionError),
        Retry(should_handle=(OSError, TimeoutRejectedError)),
    )


def test_things_go_by_registered_name() -> None:
    """Predicates, hooks, controls, limiters: whatever has been registered."""
    predicate = handle_result(lambda result: result is None)
    control, limiter = CircuitBreakerControl(), RateLimiter(TokenBucket(1, 1)).limiter
    registered = {"empty": predicate, "log": hook, "main switch": control, "shared": limiter}
    assert loaded(
        {"type": "retry", "should_handle": "empty", "on_retry": "log"},
        {"type": "circuit_breaker", "control": "main switch"},
        {"type": "rate_limiter", "limiter": "shared"},
        registered=registered,
    ) == (
        Retry(should_handle=predicate, on_retry=hook),
        CircuitBreaker(control=control),
        RateLimiter(limiter),
    )


def test_things_go_by_import_path() -> None:
    """`package.module:attribute`, the attribute perhaps one of another."""
    import json

    assert loaded(
        {"type": "retry", "should_handle": "json:JSONDecodeError", "on_retry": "inspect:isclass"},
        {"type": "retry", "on_retry": "json.decoder:JSONDecoder.decode"},
    ) == (
        Retry(should_handle=json.JSONDecodeError, on_retry=inspect.isclass),
        Retry(on_retry=json.JSONDecoder.decode),  # type: ignore[arg-type]
    )


def test_a_registered_name_comes_before_others() -> None:
    """So a program can say what an error's name means to it."""
    assert loaded(
        {"type": "retry", "should_handle": "OSError"}, registered={"OSError": KeyError}
    ) == (Retry(should_handle=KeyError),)


def test_text_that_an_option_takes_stays_text() -> None:
    """A registered name does not get in the way of what is said."""
    registered = {"linear": 1, "a": 2, "5s": 3, "log": hook}
    assert loaded(
        {"type": "retry", "backoff_type": "linear", "name": "a", "delay": "5s"},
        {"type": "fallback", "fallback_value": "log"},
        registered=registered,
    ) == (Retry(backoff_type="linear", name="a", delay=5), Fallback(fallback_value="log"))


def test_a_mapping_may_hold_the_things_themselves() -> None:
    """In Python there is no need for names."""
    assert loaded({"type": "retry", "should_handle": (OSError, KeyError), "on_retry": hook}) == (
        Retry(should_handle=(OSError, KeyError), on_retry=hook),
    )


def test_a_pipeline_has_options_too() -> None:
    registry = ResiliencePipelineRegistry()
    registry.load(table(name="a", close_timeout="500ms") | {})
    registry.load({"pipelines": {"b": {"name": "c", "strategies": []}}})
    assert repr(registry.get("a", "x")) == (
        "ResiliencePipelineBuilder(name='a', instance='x', close_timeout=0.5).build()"
    )
    assert registry.get("b").name == "c"


def test_pipelines_nest_by_name() -> None:
    """In any order; an instance of its own if the table says so."""
    registry = ResiliencePipelineRegistry()
    registry.add("db", lambda builder: builder.add_timeout(3))
    registry.load(
        {
            "pipelines": {
                "outer": {
                    "strategies": [
                        {"type": "pipeline", "pipeline": "inner"},
                        {"type": "pipeline", "pipeline": "db", "instance": "x"},
                    ]
                },
                "inner": {"strategies": [{"type": "timeout", "timeout": 5}]},
            }
        }
    )
    assert registry.get("outer").strategies == (Timeout(5), Timeout(3))
    assert [each["instance"] for each in registry.health()["db"]] == ["x"]


@pytest.mark.anyio
async def test_what_was_loaded_works() -> None:
    """From a file to a call that is retried and then refused."""
    registry = ResiliencePipelineRegistry(clock=VirtualClock(autojump=True))
    registry.load(
        table(
            {
                "type": "rate_limiter",
                "limiter": {"type": "fixed_window", "permits": 1, "window": "1h"},
            },
            {"type": "retry", "should_handle": ["ConnectionError"], "max_retry_attempts": 1},
        )
    )
    pipeline = registry.get("a")
    assert await pipeline.execute(Calls(BoomError(), 1)) == 1
    with pytest.raises(RateLimiterRejectedError):
        await pipeline.execute(ok)


# ---- strategies of one's own --------------------------------------------------------------------


@checked
@frozen(repr=False)
class Pause(Strategy[Any]):
    """Wait before each call.

    Args:
        pause: Seconds (any duration form).
        times: How often.
        on_pause: Hook.
        name: Name for events and errors.
    """

    pause: float = field(converter=to_seconds)
    times: int = field(default=1, kw_only=True, metadata=count(minimum=1))
    on_pause: Callable[[object], object] | None = field(
        default=None, kw_only=True, metadata=function()
    )
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        async def handle(context: ResilienceContext) -> Any:
            await context.runtime.sleep(self.pause * self.times)
            return await next(context)

        return handle


class Plain(Strategy[Any]):
    """A strategy that declares nothing."""

    name = "plain"

    def __init__(self, label: str, action: object = None) -> None:
        self.label = label
        self.action = action

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        return next


@pytest.mark.parametrize("kind", ["pause", f"{__name__}:Pause", "builder"])
def test_a_strategy_of_ones_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By registered name, import path, or an `add_` method: its options are checked like any other's."""
    registry = ResiliencePipelineRegistry()
    registry.register("hook", hook)
    if kind == "pause":
        registry.register("pause", Pause)
    elif kind == "builder":
        kind = "wait_a_bit"
        adder = _Adder(lambda: Pause)
        adder.__set_name__(ResiliencePipelineBuilder, "add_wait_a_bit")
        monkeypatch.setattr(ResiliencePipelineBuilder, "add_wait_a_bit", adder, raising=False)
    else:
        monkeypatch.setitem(__import__("sys").modules, __name__, _this_module())
    registry.load(table({"type": kind, "pause": "2s", "on_pause": "hook"}))
    assert registry.get("a").strategies == (Pause(2, on_pause=hook),)
    assert problems(table({"type": kind, "paus": "2s", "times": 0}), registry) == (
        f"pipelines.a.strategies[0].paus: is no option of {kind!r}; did you mean 'pause'?",
        "pipelines.a.strategies[0].pause: is missing",
        "pipelines.a.strategies[0].times: must be a whole number of at least 1, got 0",
    )


def _this_module() -> Any:
    from types import ModuleType

    module = ModuleType(__name__)
    vars(module).update(globals())
    return module


def test_a_strategy_that_declares_nothing() -> None:
    """Texts that are registered, or import paths, stand for things; others stay texts."""
    (strategy,) = loaded(
        {"type": "plain", "label": "some text", "action": "hook"},
        registered={"plain": Plain, "hook": hook},
    )
    assert isinstance(strategy, Plain)
    assert (strategy.label, strategy.action) == ("some text", hook)


def test_what_is_no_strategy_is_told() -> None:
    registry = ResiliencePipelineRegistry()
    registry.register("dict", dict)
    registry.register("one", 1)
    found = problems(table({"type": "dict"}, {"type": "one"}), registry)
    assert found == (
        "pipelines.a.strategies[0].type: 'dict' makes no strategy, but {}",
        "pipelines.a.strategies[1].type: 'one' is no class, but 1",
    )


def test_a_constructor_that_fails_is_told() -> None:
    registry = ResiliencePipelineRegistry()
    registry.register("broken", lambda: 1 / 0)
    assert problems(table({"type": "broken"}), registry) == (
        "pipelines.a.strategies[0]: can't be made: ZeroDivisionError: division by zero",
    )


# ---- mistakes -----------------------------------------------------------------------------------


def test_an_option_is_told_with_its_path() -> None:
    """The example of the contract."""
    good = {"type": "timeout", "timeout": 1}
    (problem,) = problems(
        table(good, good, {"type": "circuit_breaker", "failure_ratio": 1.5}, name="llm")
    )
    assert problem == (
        "pipelines.llm.strategies[2].failure_ratio: must be a number from 0 to 1, got 1.5"
    )


def test_all_mistakes_are_told_at_once() -> None:
    """Of all pipelines and strategies, in one error that reads like a list."""
    registry = ResiliencePipelineRegistry()
    with pytest.raises(OptionsError) as caught:
        registry.load(
            {
                "pipeline": {},
                "pipelines": {
                    "llm": {
                        "strategis": [],
                        "strategies": [
                            {"type": "retri"},
                            {"type": "retry", "delay": "5 s", "max_attempts": 3, "use_jitter": 1},
                        ],
                    },
                    "my db": {"strategies": [{"type": "timeout"}]},
                },
            }
        )
    duration = "a duration: seconds as a number of at least 0, a timedelta, or text such as "
    assert str(caught.value).splitlines() == [
        "7 mistakes in the configuration:",
        "  pipeline: is nothing that is known here; did you mean 'pipelines'?",
        "  pipelines.llm.strategis: is nothing that is known here; did you mean 'strategies'?",
        "  pipelines.llm.strategies[0].type: there is no 'retri'; did you mean 'retry'?",
        (
            "  pipelines.llm.strategies[1].max_attempts: is no option of 'retry'; "
            "did you mean 'max_retry_attempts'?"
        ),
        f"  pipelines.llm.strategies[1].delay: must be {duration}'500ms', '10s' or '1m30s', got '5 s'",
        "  pipelines.llm.strategies[1].use_jitter: must be one of True, False, 'full', got 1",
        '  pipelines."my db".strategies[0].timeout: is missing',
    ]
    assert list(registry) == []


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (3, "[0]: must be a table, got 3"),
        ({"type": 3}, "[0].type: must be text, got 3"),
        ({"type": "timeout", "timeout": 0}, "[0].timeout: must be longer than zero, got 0.0"),
        (
            {"type": "timeout", "timeout": 1, "on_timeout": "log"},
            ("[0].on_timeout: must be a function or a coroutine function, or None, got 'log'; "
            "nothing is registered as 'log'"),
        ),
        (
            {"type": "timeout", "timeout": 1, "on_timeout": "no_such_module:log"},
            ("[0].on_timeout: 'no_such_module:log' can't be imported: "
            "ModuleNotFoundError: No module named 'no_such_module'"),
        ),
        (
            {"type": "timeout", "timeout": 1, "on_timeout": "math:log3"},
            ("[0].on_timeout: 'math:log3' can't be imported: "
            "AttributeError: module 'math' has no attribute 'log3'"),
        ),
        (
            {"type": "timeout", "timeout": 1, "on_timeout": "math:pi"},
            ("[0].on_timeout: must be a function or a coroutine function, or None, got "
            "3.141592653589793"),
        ),
        ({"type": "no_such_module:Retry"}, ("[0].type: 'no_such_module:Retry' can't be imported: "
            "ModuleNotFoundError: No module named 'no_such_module'")),
        (
            {"type": "rate_limiter", "limiter": {"type": "token_buckt"}},
            "[0].limiter.type: there is no 'token_buckt'; did you mean 'token_bucket'?",
        ),
        (
            {"type": "rate_limiter", "limiter": {"type": "fixed_window", "permits": 1, "window": 0}},
            "[0].limiter.window: must be longer than zero, got 0.0",
        ),
        (
            {"type": "fallback"},
            "[0]: exactly one of fallback_action and fallback_value must be given, got neither",
        ),
        ({"type": "pipeline"}, "[0].pipeline: is missing"),
        ({"type": "pipeline", "pipeline": 1}, "[0].pipeline: must be text, got 1"),
        (
            {"type": "pipeline", "pipeline": "b", "delay": 1},
            "[0].delay: is nothing that is known here; there may be 'instance', 'pipeline', 'type'",
        ),
        ({"type": "pipeline", "pipeline": "a"}, "[0].pipeline: 'a' would nest itself by way of 'a'"),
    ],
)  # fmt: skip
def test_each_kind_of_mistake(step: Any, expected: str) -> None:
    assert expected in problems_of(step)


def test_a_misspelt_error_is_told() -> None:
    (problem,) = problems_of({"type": "retry", "should_handle": ["OSError", "ConectionError"]})
    assert problem.startswith("[0].should_handle: must be an exception type, a tuple of them")
    assert problem.endswith(
        "nothing is registered as 'ConectionError'; did you mean 'ConnectionError'?"
    )


def test_a_missing_type_lists_what_it_may_be() -> None:
    (problem,) = problems_of({"delay": 1})
    assert problem.startswith("[0].type: is missing; it may be 'cache', 'chaos_behavior', 'chaos_")


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ([], "must be a table, got []"),
        ({}, "pipelines: is missing"),
        ({"pipelines": 3}, "pipelines: must be a table, got 3"),
        ({"pipelines": {"a": 3}}, "pipelines.a: must be a table, got 3"),
        ({"pipelines": {"a": {}}}, "pipelines.a.strategies: is missing"),
        ({"pipelines": {1: {}}}, "pipelines: has a key that is no text, 1"),
        (
            {"pipelines": {"a": {"strategies": "retry"}}},
            "pipelines.a.strategies: must be an array of tables, got 'retry'",
        ),
        (table(name="a.b") | {"pipelines": {'a."b"': 3}}, 'pipelines."a.\\"b\\"": must be a table, got 3'),
        ({"pipelines": {"a": {"strategies": [], "name": 1}}}, "pipelines.a.name: must be text, got 1"),
    ],
)  # fmt: skip
def test_mistakes_around_the_strategies(configuration: Any, expected: str) -> None:
    assert expected in problems(configuration)


def test_a_bad_close_timeout_is_told() -> None:
    (problem,) = problems(table(close_timeout="soon"))
    assert problem.startswith("pipelines.a.close_timeout: must be a duration")
    assert problem.endswith("got 'soon'")


def test_circles_are_told() -> None:
    """Pipelines that would nest themselves by way of others."""

    def nest(name: str) -> dict[str, Any]:
        return {"strategies": [{"type": "pipeline", "pipeline": name}]}

    found = problems(
        {"pipelines": {"a": nest("b"), "b": nest("c"), "c": nest("a"), "d": nest("a")}}
    )
    assert found == (
        "pipelines.a.strategies[0].pipeline: 'a' would nest itself by way of 'b'",
        "pipelines.b.strategies[0].pipeline: 'b' would nest itself by way of 'c'",
        "pipelines.c.strategies[0].pipeline: 'c' would nest itself by way of 'a'",
    )


def test_an_unknown_nested_pipeline_is_told() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("database", lambda builder: None)
    step = {"type": "pipeline", "pipeline": "databse"}
    assert problems(table(step), registry) == (
        "pipelines.a.strategies[0].pipeline: there is no pipeline 'databse'; did you mean 'database'?",
    )


# ---- loading again ------------------------------------------------------------------------------


def timeout(seconds: float) -> dict[str, Any]:
    return {"type": "timeout", "timeout": seconds}


def test_loading_again_reloads() -> None:
    """What was given out goes through the new strategies."""
    registry = ResiliencePipelineRegistry()
    registry.load(table(timeout(1)))
    handle, other = registry.get("a"), registry.get("a", "x")
    registry.load(table(timeout(2)))
    assert handle.strategies == other.strategies == (Timeout(2),)
    assert registry.get("a") is handle


def test_what_has_not_changed_keeps_its_state() -> None:
    """Only what says something else is built anew, be it by one word or by what a name stands for."""
    registry = ResiliencePipelineRegistry()
    built: list[str] = []

    class Noting(Plain):
        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            built.append(site.pipeline_name or "")
            return next

    registry.register("noting", Noting)
    registry.register("value", 1)
    first = {"type": "noting", "label": "x", "action": "value"}
    configuration = {"pipelines": {name: {"strategies": [dict(first)]} for name in "abc"}}
    registry.load(configuration)
    for name in "abc":
        registry.get(name)
    registry.load(configuration)
    assert built == ["a", "b", "c"]
    configuration["pipelines"]["b"]["strategies"][0]["label"] = "y"
    registry.load(configuration)
    assert built == ["a", "b", "c", "b"]
    registry.register("value", True)
    registry.load(configuration)
    assert sorted(built[4:]) == ["a", "b", "c"]


def test_what_is_not_named_stays() -> None:
    """A pipeline that is gone from the file is left alone: `remove` removes."""
    registry = ResiliencePipelineRegistry()
    registry.load({"pipelines": {"a": {"strategies": []}, "b": {"strategies": [timeout(1)]}}})
    registry.load(table(timeout(2)))
    assert registry.get("b").strategies == (Timeout(1),)


def test_a_file_goes_before_the_program() -> None:
    """What a program has added by `add` is replaced, so that its defaults can be configured."""
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: builder.add_timeout(1))
    handle = registry.get("a")
    registry.load(table(timeout(2)))
    assert handle.strategies == (Timeout(2),)
    registry.reload("a", lambda builder: builder.add_timeout(3))
    registry.load(table(timeout(2)))
    assert handle.strategies == (Timeout(2),)


def test_nothing_is_applied_when_anything_is_wrong() -> None:
    """A mistake in one pipeline keeps the others, new and changed, from being applied."""
    registry = ResiliencePipelineRegistry()
    registry.load(table(timeout(1)))
    handle = registry.get("a")
    wrong = table(timeout(2))
    wrong["pipelines"] |= {"b": {"strategies": []}, "c": {"strategies": [timeout(0)]}}
    problems(wrong, registry)
    assert handle.strategies == (Timeout(1),)


def test_nothing_is_applied_when_building_fails() -> None:
    """Neither what is new nor what has changed, if a `bind` raises."""

    class Unbindable(Plain):
        def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
            raise ZeroDivisionError

    registry = ResiliencePipelineRegistry()
    registry.register("unbindable", Unbindable)
    both = {"pipelines": {"a": {"strategies": [timeout(1)]}, "b": {"strategies": [timeout(1)]}}}
    registry.load(both)
    handles = [registry.get("a"), registry.get("b")]
    both["pipelines"]["a"] = {"strategies": [timeout(2)]}
    both["pipelines"]["b"] = {"strategies": [{"type": "unbindable", "label": "x"}]}
    both["pipelines"]["c"] = {"strategies": []}
    with pytest.raises(ZeroDivisionError):
        registry.load(both)
    assert [handle.strategies for handle in handles] == [(Timeout(1),)] * 2
    assert list(registry) == ["a", "b"]


# ---- files --------------------------------------------------------------------------------------

LLM = """
[pipelines.llm]

[[pipelines.llm.strategies]]
type = "retry"
max_retry_attempts = inf
should_handle = ["ConnectionError", "TimeoutRejectedError"]

[[pipelines.llm.strategies]]
type = "rate_limiter"
limiter = { type = "token_bucket", capacity = 10, refill_rate = 5 }

[[pipelines.llm.strategies]]
type = "timeout"
timeout = "10s"
"""


@pytest.mark.parametrize("prefix", ["", "\ufeff"])
def test_a_file(tmp_path: Path, prefix: str) -> None:
    """Also one that begins with the mark that some editors put there."""
    path = tmp_path / "pipelines.toml"
    path.write_text(prefix + LLM, "utf-8")
    registry = ResiliencePipelineRegistry()
    registry.load_toml(path)
    registry.load_toml(str(path))
    assert registry.get("llm").strategies == (
        Retry(max_retry_attempts=math.inf, should_handle=(ConnectionError, TimeoutRejectedError)),
        RateLimiter(TokenBucket(10, 5)),
        Timeout(10),
    )


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"[pipelines.llm]\nname = 'x\n", r"line 3, the end"),
        (b"[pipelines.llm]\nname = x\n", r"at line 2, column 8"),
        (b"[pipelines.llm]\nstrategies = [\n", r"line 3, the end"),
        (b"[pipelines.llm]\n\nname = '\xff'\n", r"is no UTF-8 \(at line 3\)"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, contents: bytes, expected: str) -> None:
    """The error has the file and the line."""
    path = tmp_path / "pipelines.toml"
    path.write_bytes(contents)
    with pytest.raises(OptionsError, match=expected) as caught:
        ResiliencePipelineRegistry().load_toml(path)
    assert str(path) in str(caught.value)


def test_mistakes_in_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pipelines.toml"
    path.write_text(LLM.replace('"10s"', '"10 s"'), "utf-8")
    with pytest.raises(
        OptionsError, match=r"a mistake in .*pipelines\.toml:\n  pipelines\.llm\.strateg"
    ):
        ResiliencePipelineRegistry().load_toml(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ResiliencePipelineRegistry().load_toml(tmp_path / "none.toml")


def test_a_name_is_registered_as_text() -> None:
    bad: Any = hook
    with pytest.raises(TypeError, match="a name must be text"):
        ResiliencePipelineRegistry().register(bad, hook)
