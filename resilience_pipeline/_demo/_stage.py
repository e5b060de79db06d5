"""One scene's stage: a pipeline whose hooks tell what happens, and calls made through it.

Everything shown comes from a hook of the pipeline, from the client, or from the server's records.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from .. import (
    BrokenCircuitError,
    CircuitBreakerControl,
    CircuitClosedEvent,
    CircuitHalfOpenedEvent,
    CircuitOpenedEvent,
    FallbackEvent,
    HedgingEvent,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    RetryEvent,
    TimeoutEvent,
    TimeoutRejectedError,
    current_context,
)
from ._client import HTTPStatusError, stream_chat
from ._screen import Screen, Style
from ._server import FlakyServer

PROMPT = "What is resilience?"
PER_ATTEMPT = "1s"  # until its first token
BREAK = "2.5s"
STAND_IN = ("The", " model", " is", " away", ";", " please", " ask", " again", " later", ".")

OutcomeName = Literal["answered", "stand-in", "broken off", "left", "failed"]

_STYLES: dict[OutcomeName, Style] = {
    "answered": "good",
    "stand-in": "wait",
    "broken off": "bad",
    "left": "good",
    "failed": "bad",
}


@dataclass(slots=True)
class Call:
    """What is known of one call.

    Attributes:
        number: From 1.
        scene: Name of the scene it belongs to.
        attempts: Tries of the retry, those that the circuit refused included.
        requests: Requests that the server counted meanwhile.
        outcome: What the caller got.
        tokens: Tokens that reached the caller.
        first_token: Seconds until the first of them; `None` without one.
        circuit: The breaker's state afterwards.
    """

    number: int
    scene: str
    attempts: int = 1
    requests: int = 0
    outcome: OutcomeName = "answered"
    tokens: int = 0
    first_token: float | None = None
    circuit: str = "closed"


class Stage:
    """Where a scene plays.

    Args:
        scene: The scene's name.
        server: The server to call.
        screen: Where to tell.
        seed: What the chances of this scene depend on.
        calls: Where to put the records of the calls; numbers go on from those already there.

    Attributes:
        server: As given.
        screen: As given.
        random: The chances of this scene's script.
        pipeline: This scene's pipeline.
    """

    def __init__(
        self, scene: str, *, server: FlakyServer, screen: Screen, seed: int, calls: list[Call]
    ) -> None:
        self.server = server
        self.screen = screen
        self.random = Random(f"script/{scene}/{seed}")
        self._scene = scene
        self._calls = calls
        self._jitter = Random(f"jitter/{scene}/{seed}").random
        self._control = CircuitBreakerControl()
        self._resumes = False
        self._in_tokens = False
        self.pipeline = self._build()

    def _build(self) -> ResiliencePipeline[TimeoutRejectedError | BrokenCircuitError]:
        return (
            ResiliencePipelineBuilder(name="llm", random=self._jitter)
            .add_fallback(_stand_in, on_fallback=self._on_fallback)
            .add_retry(
                max_retry_attempts=2,
                delay="250ms",
                backoff_type="exponential",
                use_jitter=True,
                max_retry_after="1.5s",
                on_retry=self._on_retry,
            )
            .add_circuit_breaker(
                failure_ratio=0.5,
                minimum_throughput=4,
                break_duration=BREAK,
                on_opened=self._on_opened,
                on_half_opened=self._on_half_opened,
                on_closed=self._on_closed,
                control=self._control,
            )
            .add_timeout(PER_ATTEMPT, on_timeout=self._on_timeout)
            .build()
        )

    def hedged(self) -> ResiliencePipeline[TimeoutRejectedError]:
        """Make a pipeline that asks a second time beside an attempt that is slow to begin."""
        return (
            ResiliencePipelineBuilder(name="hedged")
            .add_hedging(delay="300ms", on_hedging=self._on_hedging)
            .add_timeout("3s", on_timeout=self._on_timeout)
            .build()
        )

    def resuming(self) -> ResiliencePipeline[TimeoutRejectedError]:
        """Make a pipeline that goes on where an answer breaks off, by asking again."""
        self._resumes = True
        return (
            ResiliencePipelineBuilder(name="resuming", random=self._jitter)
            .add_retry(
                max_retry_attempts=2,
                delay="250ms",
                use_jitter=True,
                resumable=True,
                on_retry=self._on_retry,
            )
            .add_timeout(PER_ATTEMPT, on_timeout=self._on_timeout)
            .build()
        )

    @property
    def break_left(self) -> float:
        """Seconds until the open circuit lets a trial pass; 0 while it is not open."""
        until = self._control.metrics.blocked_until
        return 0.0 if until is None else max(0.0, until - time.monotonic())

    async def ask(
        self,
        pipeline: ResiliencePipeline[Any] | None = None,
        *,
        leave_after: int | None = None,
    ) -> None:
        """Make one call and read its answer.

        Args:
            pipeline: What to send it through, if not the scene's own.
            leave_after: Leave the loop after so many tokens.
        """
        call = Call(len(self._calls) + 1, self._scene)
        self._calls.append(call)
        self.screen.line(f"call {call.number}", f"“{PROMPT}”", "head")
        requests_before = len(self.server.requests)
        started = time.monotonic()
        stream = (pipeline or self.pipeline).execute_stream(self._connect)
        self._in_tokens = False
        try:
            async with stream:
                async for token in stream:
                    if call.first_token is None:
                        call.first_token = time.monotonic() - started
                    if not self._in_tokens:
                        self._in_tokens = True
                        self.screen.begin("tokens", "token")
                        token = token.lstrip()  # noqa: PLW2901 - where the last line ended
                    call.tokens += 1
                    self.screen.add(token, "token")
                    if call.tokens == leave_after:
                        call.outcome = "left"
                        break
        except Exception:  # noqa: BLE001 - `_connect` has told it already
            call.outcome = "broken off" if stream.committed else "failed"
        call.requests = len(self.server.requests) - requests_before
        call.circuit = self._control.state
        self._tell_outcome(call)

    def _tell_outcome(self, call: Call) -> None:
        text = f"{call.tokens} tokens"
        if call.first_token is not None:
            text += f", the first after {call.first_token * 1000:.0f} ms"
        self.screen.line(call.outcome, f"{text}; circuit {call.circuit}", _STYLES[call.outcome])

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncGenerator[AsyncIterator[str]]:
        """Make one attempt: what the pipeline is given to run."""
        self.screen.begin(f"attempt {current_context().attempt + 1}", "head")
        self.screen.add("asking …")
        chat = stream_chat(self.server.url, PROMPT, on_response=self._on_response)
        try:
            async with chat as tokens:
                yield tokens
        except Exception as error:
            if self._in_tokens:
                got = self._calls[-1].tokens
                where = f"after {got} tokens" if self._resumes else "in the loop"
                self.screen.line("error", f"{where}: {_reason(error)}", "bad")
            else:
                self.screen.add(f" {_reason(error)}", "bad")
            raise

    def _on_response(self, status: str) -> None:
        self.screen.add(f" {status}")

    # ---- the pipeline's hooks

    def _on_timeout(self, event: TimeoutEvent) -> None:
        self.screen.line("timeout", f"no token within {event.timeout:g} s", "bad")

    def _on_retry(self, event: RetryEvent) -> None:
        error = event.outcome.error
        self._calls[-1].attempts += 1
        self._in_tokens = False
        self._tell_refusal(event.attempt, error)
        demand = _demand(error)
        why = ""
        if isinstance(error, BrokenCircuitError):
            why = ", what is left of the break"
        elif demand is not None and event.delay == float(demand):
            why = ", as the server asked"
        self.screen.line("wait", f"{event.delay:.2f} s{why}", "wait")

    def _on_hedging(self, _: HedgingEvent) -> None:
        self._calls[-1].attempts += 1
        self.screen.line("hedge", "no token yet: another attempt beside the first", "wait")

    def _on_fallback(self, event: FallbackEvent) -> None:
        self._calls[-1].outcome = "stand-in"
        self._tell_refusal(event.context.attempt, event.outcome.error)
        self.screen.line("fallback", "a stand-in for the answer", "wait")

    def _tell_refusal(self, attempt: int, error: Exception | None) -> None:
        """Tell of an attempt that made no request, so that no client could tell of it."""
        if isinstance(error, BrokenCircuitError):
            self.screen.begin(f"attempt {attempt + 1}", "head")
            self.screen.add("refused by the circuit", "bad")
            self.screen.add(f", open for another {error.retry_after:.2f} s")

    def _on_opened(self, event: CircuitOpenedEvent) -> None:
        counted = self._control.metrics
        self.screen.line(
            "circuit",
            f"open for {event.break_duration:g} s: "
            f"{counted.failures} of {counted.throughput} attempts have failed",
            "state",
        )

    def _on_half_opened(self, _: CircuitHalfOpenedEvent) -> None:
        self.screen.line("circuit", "half-open: the next attempt is the trial", "state")

    def _on_closed(self, _: CircuitClosedEvent) -> None:
        self.screen.line("circuit", "closed: the trial was good", "state")


def _reason(error: Exception) -> str:
    demand = _demand(error)
    if demand is not None:
        return f"{error}, Retry-After: {demand}"
    # Python's own text for an error of the system starts with its number.
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _demand(error: Exception | None) -> str | None:
    return error.headers.get("Retry-After") if isinstance(error, HTTPStatusError) else None


async def _stand_in(_: Any) -> AsyncGenerator[str]:
    for token in STAND_IN:
        yield token
