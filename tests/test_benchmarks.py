"""What the benchmarks compare does the same job, and what they publish is whole.

That every row runs is shown by `python -m benchmarks --smoke`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks import baselines, peer_stacks, peers, plot, publish, tables
from benchmarks.rows import BY_HAND, OURS


class Failing:
    """Counts its calls, and fails for the first so many of them."""

    def __init__(self, failures: int) -> None:
        self.calls = 0
        self._failures = failures

    async def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self._failures:
            raise ConnectionError


def by_hand_retry(fn: Callable[[], Awaitable[object]]) -> Any:
    return lambda: baselines.Retry(attempts=4, delay=0).run(fn)


def by_hand_breaker(fn: Callable[[], Awaitable[object]]) -> Any:
    breaker = baselines.CircuitBreaker(failures=2, seconds=3600)
    return lambda: breaker.run(fn)


def contender(found: peers.Peers, name: str, fn: Failing) -> Callable[[], Awaitable[object]]:
    """Decorate a function, or skip where the peer isn't installed."""

    async def call_it() -> None:  # some peers take functions and nothing else
        await fn()

    decorated = peers.decorated({name: found[name]}, call_it)
    if not decorated:
        pytest.skip(f"{name} is not installed")
    call: Callable[[], Awaitable[object]] = decorated[name]
    return call


RETRIES: peers.Peers = {BY_HAND: by_hand_retry, **peers.retries(0)}
BREAKERS: peers.Peers = {BY_HAND: by_hand_breaker, **peers.breakers(2, 3600)}


@pytest.mark.parametrize("name", RETRIES)
def test_every_retry_makes_four_attempts(name: str) -> None:
    succeeding, failing = Failing(3), Failing(100)

    async def main() -> None:
        await contender(RETRIES, name, succeeding)()
        with pytest.raises(Exception):  # noqa: B017, PT011 - hyx raises one of its own
            await contender(RETRIES, name, failing)()

    asyncio.run(main())
    assert (succeeding.calls, failing.calls) == (4, 4)


@pytest.mark.filterwarnings("ignore:datetime.*utcnow:DeprecationWarning")  # two peers call it
@pytest.mark.parametrize("name", BREAKERS)
def test_every_breaker_is_open_after_two_failures(name: str) -> None:
    fn = Failing(100)

    async def main() -> None:
        call = contender(BREAKERS, name, fn)
        for _ in range(5):
            with pytest.raises(Exception):  # noqa: B017, PT011 - each has a class of its own
                await call()

    asyncio.run(main())
    assert fn.calls == 2


@pytest.mark.parametrize("name", peer_stacks.STACK)
def test_every_stack_lets_a_call_through(name: str) -> None:
    fn = Failing(0)

    async def main() -> None:
        await contender(peer_stacks.STACK, name, fn)()

    asyncio.run(main())
    assert fn.calls == 1


GROWING: tables.Growing = {
    "10,000 calls in flight under one timeout": {
        name: {"10": 5_000.0, "100000": 6_000.0} for name in ("bare", OURS, BY_HAND)
    },
    "10,000 calls waiting in its queue": {OURS: {"10": 7_000.0, "100000": 7_000.0}},
}


def test_the_picture_is_svg_with_a_line_for_each_way_to_be_in_flight() -> None:
    root = ET.fromstring(plot.growth(GROWING, GROWING))
    lines = root.findall("{http://www.w3.org/2000/svg}polyline")
    texts = [text.text for text in root.findall("{http://www.w3.org/2000/svg}text")]
    assert len(lines) == 8
    assert "waiting in a limiter's queue" in texts


def test_publishing_replaces_what_stands_between_the_marks() -> None:
    page = "before\n<!-- begin rows -->\n\nold\n\n<!-- end rows -->\nafter\n<!-- begin x --><!-- end x -->"
    once = publish.filled(page, {"rows": "| new |"})
    assert once == page.replace("old", "| new |")
    assert publish.filled(once, {"rows": "| new |"}) == once
