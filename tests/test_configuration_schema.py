"""The JSON Schema of configuration files: made of the option classes, it lets pass whatever `load` takes."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import jsonschema
import pytest
from attrs import field, fields, frozen, has

from resilience_pipeline import OptionsError, ResiliencePipelineBuilder, ResiliencePipelineRegistry
from resilience_pipeline._builder import _Adder, strategy_types
from resilience_pipeline._options import checked, choice, ratio, text_or_none, to_name
from resilience_pipeline._schema import schema
from resilience_pipeline.strategies import Handler, Site, Strategy


def hook(event: object) -> None: ...


def table(*steps: Any) -> dict[str, Any]:
    return {"pipelines": {"a": {"strategies": list(steps)}}}


def is_valid(configuration: Any, *names: str) -> bool:
    return bool(jsonschema.Draft202012Validator(schema(names)).is_valid(configuration))


def is_taken(configuration: Any) -> bool:
    registry = ResiliencePipelineRegistry()
    registry.register("hook", hook)
    try:
        registry.load(configuration)
    except OptionsError:
        return False
    return True


def test_it_is_a_schema_and_plain_json() -> None:
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    assert json.loads(json.dumps(made, allow_nan=False)) == made


@pytest.mark.parametrize("name", strategy_types())
def test_every_option_is_there_and_told(name: str) -> None:
    """With the text of the option class, and no option too many."""
    kind = strategy_types()[name]
    assert isinstance(kind, type)
    assert has(kind)
    strategy = schema()["$defs"][f"strategy.{name}"]
    options = {field.alias for field in fields(kind) if field.init}
    assert set(strategy["properties"]) == {"type", *options}
    for option in options:
        assert strategy["properties"][option]["description"]
    assert strategy["description"].endswith(".")


CONFIGURATIONS = """
[pipelines.all]
name = "everything"
close_timeout = "2s"

[[pipelines.all.strategies]]
type = "fallback"
fallback_value = { status = "degraded", parts = [1, 2] }

[[pipelines.all.strategies]]
type = "concurrency_limiter"
permit_limit = 10
queue_limit = inf
max_wait = "1s"
hold_streams = true

[[pipelines.all.strategies]]
type = "rate_limiter"
limiter = { type = "sliding_window", permits = 10, window = "1m" }
on_rejected = "hook"

[[pipelines.all.strategies]]
type = "retry"
max_retry_attempts = inf
delay = 0.5
backoff_type = "exponential"
use_jitter = "full"
should_handle = ["ConnectionError", "json:JSONDecodeError"]
on_retry = "hook"
respect_retry_after = false
resumable = true
name = "outer"

[[pipelines.all.strategies]]
type = "hedging"
delay = -1
delay_generator = { type = "percentile_delay", percentile = 0.9 }
should_handle = "OSError"

[[pipelines.all.strategies]]
type = "circuit_breaker"
failure_ratio = 0
sampling_duration = inf
break_duration = "1h1m1s1ms"

[[pipelines.all.strategies]]
type = "timeout"
timeout = 1
timeout_generator = "hook"

[[pipelines.all.strategies]]
type = "pipeline"
pipeline = "other"
instance = "x"

[pipelines.other]
strategies = []
"""


def test_a_real_file_passes() -> None:
    """One of everything."""
    configuration = tomllib.loads(CONFIGURATIONS)
    assert is_taken(configuration)
    jsonschema.validate(configuration, schema())


@pytest.mark.parametrize(
    "step",
    [
        3,
        {},
        {"type": 3},
        {"type": "retri"},
        {"type": "retry", "max_attempts": 3},
        {"type": "retry", "max_retry_attempts": 0},
        {"type": "retry", "max_retry_attempts": 1.5},
        {"type": "retry", "max_retry_attempts": "3"},
        {"type": "retry", "delay": "5 s"},
        {"type": "retry", "delay": ""},
        {"type": "retry", "delay": "1s1m"},
        {"type": "retry", "delay": -1},
        {"type": "retry", "backoff_type": "expo"},
        {"type": "retry", "use_jitter": "half"},
        {"type": "retry", "should_handle": []},
        {"type": "retry", "should_handle": 3},
        {"type": "retry", "on_retry": 3},
        {"type": "retry", "name": 3},
        {"type": "hedging", "max_hedged_attempts": 11},
        {"type": "timeout"},
        {"type": "circuit_breaker", "failure_ratio": 1.1},
        {"type": "circuit_breaker", "minimum_throughput": 1},
        {"type": "circuit_breaker", "consecutive_failures": 0},
        {"type": "circuit_breaker", "slow_call_duration": 1, "slow_call_ratio": 2},
        {"type": "rate_limiter"},
        {"type": "rate_limiter", "limiter": 3},
        {
            "type": "rate_limiter",
            "limiter": {"type": "token_bucket", "capacity": 0, "refill_rate": 1},
        },
        {"type": "rate_limiter", "limiter": {"type": "token_bucket", "capacity": 1}},
        {"type": "rate_limiter", "limiter": {"type": "fixed_window", "permit": 1, "window": 1}},
        {"type": "rate_limiter", "limiter": {"type": "fixed_windw"}},
        {"type": "hedging", "delay_generator": {"type": "percentile_delay", "percentile": 1}},
        {"type": "pipeline"},
        {"type": "pipeline", "pipeline": "other", "name": "x"},
    ],
    ids=str,
)
def test_mistakes_are_found_by_both(step: Any) -> None:
    """What can be seen without the program is seen by an editor already."""
    assert not is_taken(table(step))
    assert not is_valid(table(step))


@pytest.mark.parametrize(
    "configuration",
    [
        {},
        {"pipeline": {}},
        {"pipelines": {"a": {}}},
        {"pipelines": {"a": {"strategies": {}}}},
        {"pipelines": {"a": {"strategies": [], "close_timeout": "soon"}}},
        {"pipelines": {"a": {"strategies": [], "timeout": 1}}},
        {"pipelines": {}, "tool": 1},
    ],
    ids=str,
)
def test_mistakes_around_the_strategies_are_found_by_both(configuration: Any) -> None:
    assert not is_taken(configuration)
    assert not is_valid(configuration)


@pytest.mark.parametrize(
    "step",
    [
        {"type": "timeout", "timeout": 0},
        {"type": "fallback"},
        {"type": "retry", "on_retry": "nobody knows"},
        {"type": "no_such_module:Strategy", "anything": 1},
    ],
    ids=str,
)
def test_other_mistakes_are_found_by_load_alone(step: Any) -> None:
    """What takes the program, or more than a schema can say, is let pass there."""
    assert not is_taken(table(step))
    assert is_valid(table(step))


def test_registered_names_may_stand_as_types() -> None:
    """Once they are told to the schema; those with a colon are import paths."""
    assert not is_valid(table({"type": "mine", "x": 1}))
    assert is_valid(table({"type": "mine", "x": 1}), "mine")
    assert is_valid(table({"type": "rate_limiter", "limiter": {"type": "mine"}}), "mine")


def test_null_is_none_in_json() -> None:
    """An option whose default is `None` may be given as such where there is a word for it."""
    step = {"type": "retry", "max_delay": None}
    assert is_taken(table(step))
    assert is_valid(table(step))
    assert not is_valid(table({"type": "retry", "delay": None}))


@checked
@frozen(repr=False)
class Dice(Strategy[Any]):
    """Refuse by chance.

    Args:
        odds: Share of calls refused, from 0 to 1,
            however many there are.
        kind: What is thrown.
        name: Name for events and errors.
    """

    odds: float = field(metadata=ratio())
    kind: str = field(default="coin", kw_only=True, metadata=choice("coin", "die"))
    name: str = field(default=None, kw_only=True, converter=to_name, metadata=text_or_none())

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        return next


def test_a_new_strategy_is_in_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the builder can add, with what its class says, and nothing written for it here."""
    adder = _Adder(lambda: Dice)
    adder.__set_name__(ResiliencePipelineBuilder, "add_dice")
    monkeypatch.setattr(ResiliencePipelineBuilder, "add_dice", adder, raising=False)
    assert schema()["$defs"]["strategy.dice"] == {
        "description": "Refuse by chance.",
        "type": "object",
        "properties": {
            "type": {"const": "dice"},
            "odds": {
                "description": "Share of calls refused, from 0 to 1, however many there are.",
                "type": "number",
                "minimum": 0,
                "maximum": 1,
            },
            "kind": {"description": "What is thrown.", "enum": ["coin", "die"], "default": "coin"},
            "name": {
                "description": "Name for events and errors.",
                "anyOf": [{"type": "string"}, {"type": "null"}],
            },
        },
        "required": ["type", "odds"],
        "additionalProperties": False,
    }
    assert is_valid(table({"type": "dice", "odds": 0.5}))
    assert not is_valid(table({"type": "dice", "odds": 2}))
