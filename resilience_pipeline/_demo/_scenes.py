"""The scenes of the demonstration, and the table at its end.

A scene has a pipeline of its own and chances of its own, so it plays alone as it plays among the
others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .. import CircuitBreaker, Fallback, ResiliencePipeline, Retry, Timeout
from ._screen import Screen
from ._server import FlakyServer
from ._stage import Call, Stage
from ._steps import DEFAULT_TOKENS, DieAfter, Refuse, Stall, Status, Step, Tokens

_PACE = 0.04  # seconds between two tokens
_LIVE = Tokens(interval=_PACE)


@dataclass(frozen=True, slots=True)
class Scene:
    """One scene.

    Attributes:
        name: What `--scenario` takes.
        summary: What happens, in a few words.
        shows: What the pipeline makes of it.
        play: Makes it happen.
    """

    name: str
    summary: str
    shows: str
    play: Callable[[Stage], Awaitable[None]]


async def _steady(stage: Stage) -> None:
    await stage.ask()


async def _refuse(stage: Stage) -> None:
    refusals = stage.random.randint(1, 2)
    stage.server.script(*[Refuse()] * refusals)
    await stage.ask()


async def _stall(stage: Stage) -> None:
    stage.server.script(Stall(after=stage.random.choice(("request", "headers", "preamble"))))
    await stage.ask()


async def _busy(stage: Stage) -> None:
    stage.server.script(Status(503, retry_after=1))
    await stage.ask()


async def _dies(stage: Stage) -> None:
    tokens = stage.random.randint(2, len(DEFAULT_TOKENS) - 2)
    stage.server.script(DieAfter(tokens, interval=_PACE))
    await stage.ask()
    await stage.ask()


async def _leave(stage: Stage) -> None:
    number = len(stage.server.requests)
    await stage.ask(leave_after=stage.random.randint(2, 4))
    record = await stage.server.wait_ended(number)
    seen = "the client close the connection" if record.closed_by_client else record.ending
    stage.screen.line("server", f"saw {seen} after {record.tokens_sent} tokens", "good")


async def _hedge(stage: Stage) -> None:
    number = len(stage.server.requests)
    stage.server.script(Stall(after=stage.random.choice(("request", "headers", "preamble"))))
    await stage.ask(stage.hedged())
    record = await stage.server.wait_ended(number)
    seen = "the client close the slow connection" if record.closed_by_client else record.ending
    stage.screen.line("server", f"saw {seen}", "good")


async def _resume(stage: Stage) -> None:
    tokens = stage.random.randint(2, len(DEFAULT_TOKENS) - 2)
    stage.server.script(DieAfter(tokens, interval=_PACE))
    await stage.ask(stage.resuming())


async def _fallback(stage: Stage) -> None:
    stage.server.script(*_failures(stage, 3))
    await stage.ask()


async def _circuit(stage: Stage) -> None:
    stage.server.script(*_failures(stage, 4))
    await stage.ask()
    await stage.ask()
    await stage.ask()
    pause = max(0.0, stage.break_left - 0.7)
    stage.screen.line("pause", f"{pause:.2f} s; the server recovers", "wait")
    await asyncio.sleep(pause)
    await stage.ask()
    await stage.ask()


def _failures(stage: Stage, count: int) -> list[Step]:
    """Draw failures that come quickly."""
    return stage.random.choices((Refuse(), Status(500), Status(502), Status(503)), k=count)


SCENES = (
    Scene(
        "steady",
        "the server answers at once",
        "the pipeline adds nothing to see",
        _steady,
    ),
    Scene(
        "refuse",
        "the server resets the connection, then answers",
        "retries, after waits that grow and have jitter",
        _refuse,
    ),
    Scene(
        "stall",
        "the server goes silent before the first token",
        "the per-attempt time-out, then a retry",
        _stall,
    ),
    Scene(
        "busy",
        "the server answers 503 with Retry-After",
        "a wait as long as the server asked for",
        _busy,
    ),
    Scene(
        "dies",
        "the server dies in the middle of an answer, and recovers",
        "the error in the caller's loop: nothing is repeated",
        _dies,
    ),
    Scene(
        "leave",
        "the caller leaves the loop early",
        "the connection is closed at once; the server sees it",
        _leave,
    ),
    Scene(
        "hedge",
        "the server is slow to begin",
        "a second attempt beside it; the loser is closed",
        _hedge,
    ),
    Scene(
        "resume",
        "the server dies in the middle of an answer",
        "a retry that goes on where it broke off",
        _resume,
    ),
    Scene(
        "fallback",
        "the server fails each time",
        "the last failure replaced by a stand-in",
        _fallback,
    ),
    Scene(
        "circuit",
        "the server is down for a while, then recovers",
        "the circuit opens, refuses, lets a trial pass, closes",
        _circuit,
    ),
)


async def play(scenes: Sequence[Scene], *, seed: int, screen: Screen) -> None:
    """Play scenes, one after another, and end with the table.

    Args:
        scenes: Which ones.
        seed: What all chances depend on.
        screen: Where to show it.
    """
    calls: list[Call] = []
    async with FlakyServer(default=_LIVE) as server:
        for scene in scenes:
            stage = Stage(scene.name, server=server, screen=screen, seed=seed, calls=calls)
            if not calls:
                _introduce(screen, stage.pipeline, server.url, seed)
            screen.scene(scene.name, scene.summary)
            await scene.play(stage)
    _conclude(screen, calls)


def _introduce(
    screen: Screen, pipeline: ResiliencePipeline[Exception], url: str, seed: int
) -> None:
    screen.title("resilience_pipeline", "tokens from a server that fails on cue")
    screen.note("The pipeline, outermost first, and what it runs against:")
    described = [_described(strategy) for strategy in pipeline.strategies]
    screen.facts([*described, ("server", [url]), ("seed", [str(seed)])])


def _described(strategy: object) -> tuple[str, list[str]]:
    """Name a strategy and say what its options mean."""
    match strategy:
        case Fallback():
            return "fallback", ["a stand-in when all else has failed"]
        case Retry():
            attempts = f"up to {strategy.max_retry_attempts:g} more attempts"
            waits = f"{strategy.backoff_type} waits ({strategy.delay:g} s), jitter"
            asked = f"a wait that is asked for: up to {strategy.max_retry_after:g} s"
            return "retry", [f"{attempts}, {waits};", asked]
        case CircuitBreaker():
            share = f"{strategy.failure_ratio:.0%} of at least {strategy.minimum_throughput}"
            return "circuit breaker", [
                f"opens for {strategy.break_duration:g} s when {share} attempts fail"
            ]
        case Timeout():
            return "timeout", [f"{strategy.timeout:g} s until the first token of an attempt"]
        case _:
            return type(strategy).__name__, [repr(strategy)]


def _conclude(screen: Screen, calls: Sequence[Call]) -> None:
    outcomes = Counter(call.outcome for call in calls)
    waits = [call.first_token for call in calls if call.first_token is not None]
    total = (
        len(calls),
        "in all",
        sum(call.attempts for call in calls),
        sum(call.requests for call in calls),
        "",
        sum(call.tokens for call in calls),
        "",
        "",
    )
    screen.table(_COLUMNS, [_row(call) for call in calls], total)
    screen.note("outcomes: " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    screen.note(
        f"time to first token: from {_ms(min(waits))} to {_ms(max(waits))}, "
        f"median {_ms(median(waits))}"
    )


_COLUMNS = (
    ("call", ">4"),
    ("scene", "<8"),
    ("attempts", ">8"),
    ("requests", ">8"),
    ("outcome", "<10"),
    ("tokens", ">6"),
    ("first token", ">11"),
    ("circuit", "<9"),
)


def _row(call: Call) -> tuple[object, ...]:
    return (
        call.number,
        call.scene,
        call.attempts,
        call.requests,
        call.outcome,
        call.tokens,
        "none" if call.first_token is None else _ms(call.first_token),
        call.circuit,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
