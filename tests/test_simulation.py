"""What the page about outages says holds in a small simulation, and a simulation repeats itself."""

from __future__ import annotations

import logging
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache

import pytest
from attrs import evolve

from benchmarks.simulation import figures, scenarios
from benchmarks.simulation.figures import Figures, Run
from benchmarks.simulation.pictures import picture
from benchmarks.simulation.scenarios import DOWN, UP, Make, Setting

CLIENTS = 50


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """Writing down each retry would take ten times as long as the run."""
    logger = logging.getLogger("resilience_pipeline")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


@cache
def simulated(make: Make, setting: str) -> Run:
    """One run with few clients; each is made once."""
    of: Setting = getattr(scenarios, setting)
    return scenarios.run(make, evolve(of, clients=CLIENTS))


def in_short(make: Make, setting: str = "HANGING") -> Figures:
    return figures.of(simulated(make, setting), DOWN, UP)


def test_a_run_repeats_itself() -> None:
    """The same figures, second by second."""
    again = scenarios.run(scenarios.with_budget, evolve(scenarios.HANGING, clients=CLIENTS))
    assert again == simulated(scenarios.with_budget, "HANGING")


def test_load_in_the_outage() -> None:
    """Retries multiply it, a budget bounds that, a breaker takes the load away."""
    alone = in_short(scenarios.no_retries).load
    assert 0.95 < in_short(scenarios.no_retries).factor < 1.05
    assert 3.8 < in_short(scenarios.three_retries).load / alone <= 4.1
    assert 1.05 < in_short(scenarios.with_budget).load / alone <= 1.15
    assert in_short(scenarios.with_breaker).load / alone < 0.1


def test_clients_that_wait_limit_themselves() -> None:
    """While they wait they don't call, so three retries do less harm; more than twofold it is still."""
    assert 2 < in_short(scenarios.three_retries, "PATIENT").factor < 2.5


def test_only_retries_without_a_bound_keep_a_service_down_that_is_well_again() -> None:
    """Its queue is full of calls that were given up, and what it finishes comes too late."""
    assert in_short(scenarios.three_retries).recovery is None
    for make, soon in (
        (scenarios.no_retries, 12),
        (scenarios.with_budget, 25),
        (scenarios.with_breaker, 6),
    ):
        recovery = in_short(make).recovery
        assert recovery is not None
        assert recovery <= soon


def test_a_queue_shorter_than_the_timeout_ends_that() -> None:
    """What is refused early costs nothing, and what is worked on comes in time."""
    short = evolve(scenarios.HANGING, clients=CLIENTS, queue=0.8)
    assert figures.of(scenarios.run(scenarios.three_retries, short), DOWN, UP).recovery == 0


def test_a_service_that_refuses_is_there_again_at_once() -> None:
    """Nothing was queued, so there is nothing to work off, and a storm of retries is over in a second."""
    refused = in_short(scenarios.three_retries, "REFUSING")
    assert refused.recovery == 0
    assert 3.8 < refused.factor < 4.3


def test_one_lucky_trial_call_lets_everybody_in() -> None:
    """Where every second call fails ten of them are never all lucky; callers are refused by both."""

    def while_half_well(make: Make) -> tuple[int, float]:
        run = simulated(make, "HALF_WELL")
        seconds = range(UP, UP + 18)
        most = max(run.load[at] for at in seconds)
        return most, sum(run.share_answered(at) for at in seconds) / len(seconds)

    one, answered_one = while_half_well(scenarios.with_breaker)
    ten, answered_ten = while_half_well(scenarios.with_ten_probes)
    budget, answered_budget = while_half_well(scenarios.with_budget)
    assert one > CLIENTS / 2
    assert ten <= 10
    assert answered_ten < 0.1
    assert answered_one < answered_budget
    assert 0.4 < answered_budget < 0.7
    assert budget < 2 * CLIENTS


def test_nobody_is_lost() -> None:
    """Each call that was begun has an end; about one a second for each client."""
    run = simulated(scenarios.with_breaker, "HANGING")
    assert sum(run.answered) + sum(run.failed) == pytest.approx(150 * CLIENTS, rel=0.02)


def test_the_picture_has_a_line_for_each_run_in_both_charts() -> None:
    """And the outage behind each."""
    runs = {
        "a": simulated(scenarios.no_retries, "HANGING"),
        "b & c": simulated(scenarios.with_budget, "HANGING"),
    }
    root = ET.fromstring(picture("title", runs, [(DOWN, UP)]))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 4
    assert len([each for each in root.findall(f"{space}rect") if each.get("fill-opacity")]) == 2
    assert "b & c" in [text.text for text in root.findall(f"{space}text")]
