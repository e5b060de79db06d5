"""Chaos out of a file: it is built, it hits, and it is switched on and off by loading the file again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resilience_pipeline import OptionsError, ResiliencePipelineRegistry
from resilience_pipeline.testing import VirtualClock, capture_events
from support.scripted import Scripted, raised_by

CHAOS = """
[[pipelines.faults.strategies]]
type = "chaos_fault"
fault_generator = [[3, "ConnectionError"], [1, "TimeoutError"]]
injection_rate = 1

[[pipelines.latency.strategies]]
type = "chaos_latency"
latency = "1m30s"
injection_rate = 1.0
name = "slowness"

[[pipelines.outcomes.strategies]]
type = "chaos_outcome"
outcome_generator = [[1, "fake"]]
injection_rate = 1

[[pipelines.behavior.strategies]]
type = "chaos_behavior"
behavior = "empty_the_cache"
injection_rate = 1
enabled = "is_monday"
"""


def load(path: Path, text: str, registry: ResiliencePipelineRegistry) -> None:
    path.write_text(text, "utf-8")
    registry.load_toml(path)


@pytest.mark.anyio
async def test_tables_of_chaos_build_and_inject(tmp_path: Path) -> None:
    """Each of the four does to a call what the file says, and tells of it."""
    clock = VirtualClock(autojump=True)
    registry = ResiliencePipelineRegistry(clock=clock)
    emptied: list[Any] = []
    registry.register("empty_the_cache", emptied.append)
    registry.register("is_monday", lambda event: event.context.operation_key == "monday")
    load(tmp_path / "chaos.toml", CHAOS, registry)

    fn = Scripted("real", "real", "real")
    with capture_events() as events:
        error = await raised_by(registry.get("faults").execute, fn)
        assert type(error) in {ConnectionError, TimeoutError}
        assert await registry.get("latency").execute(fn) == "real"
        assert clock.now() == 90
        assert await registry.get("outcomes").execute(fn) == "fake"
        behavior = registry.get("behavior")
        assert await behavior.execute(fn) == "real"
        assert emptied == []
        assert await behavior.execute(fn, operation_key="monday") == "real"
        assert len(emptied) == 1
    assert fn.calls == 3
    told = [(event.name, event.strategy_name) for event in events if "Chaos" in event.name]
    assert told == [
        ("Chaos.OnFault", "ChaosFault"),
        ("Chaos.OnLatency", "slowness"),
        ("Chaos.OnOutcome", "ChaosOutcome"),
        ("Chaos.OnBehavior", "ChaosBehavior"),
    ]
    kinds = [
        type(registry.get(name).strategies[0]).__name__
        for name in ("faults", "latency", "outcomes", "behavior")
    ]
    assert kinds == ["ChaosFault", "ChaosLatency", "ChaosOutcome", "ChaosBehavior"]


ONE = """
[[pipelines.shop.strategies]]
type = "chaos_fault"
fault_generator = "ConnectionError"
injection_rate = 1
enabled = {enabled}
"""


@pytest.mark.anyio
async def test_chaos_is_switched_by_loading_the_file_again(tmp_path: Path) -> None:
    """The pipeline that somebody has goes with the file."""
    registry = ResiliencePipelineRegistry()
    path = tmp_path / "chaos.toml"
    load(path, ONE.format(enabled="false"), registry)
    shop = registry.get("shop")
    assert await shop.execute(Scripted("real")) == "real"
    load(path, ONE.format(enabled="true"), registry)
    assert isinstance(await raised_by(shop.execute, Scripted("real")), ConnectionError)
    load(path, ONE.format(enabled="false"), registry)
    assert await shop.execute(Scripted("real")) == "real"


def test_mistakes_in_tables_of_chaos_are_all_told(tmp_path: Path) -> None:
    """With their paths, like those of any other strategy."""
    text = (
        CHAOS.replace("injection_rate = 1.0", "injection_rate = 1.5")
        .replace("TimeoutError", "TimeoutEror")
        .replace('"1m30s"', '"soon"')
    )
    with pytest.raises(OptionsError) as caught:
        load(tmp_path / "chaos.toml", text, ResiliencePipelineRegistry())
    paths = {problem.partition(":")[0] for problem in caught.value.problems}
    assert {
        "pipelines.faults.strategies[0].fault_generator",
        "pipelines.latency.strategies[0].injection_rate",
        "pipelines.latency.strategies[0].latency",
        "pipelines.behavior.strategies[0].behavior",
        "pipelines.behavior.strategies[0].enabled",
    } <= paths
