"""A model of strands-agents is paced, bounded and retried up to its first token; agents don't notice.

`python examples/strands_model.py` puts twelve questions to agents whose model is served on loopback
and fails on cue: once as the packages come, and once with the model's `stream` hardened.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, Callable
from functools import partial
from typing import Any

import openai
from strands import Agent
from strands.models import Model
from strands.models.openai import OpenAIModel
from strands.types.streaming import StreamEvent

from _support import Figures, measure, show
from resilience_pipeline import (
    AttemptCompleted,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TokenBucket,
)
from resilience_pipeline._demo import DieAfter, FlakyServer, Refuse, Stall, Status, Step, Tokens

# ---- the application: it knows agents, and nothing of pipelines ----------------------------------


async def ask(model: Model, number: int) -> str:
    """Put a question to a new agent."""
    agent = Agent(model=model, callback_handler=None)
    result = await agent.invoke_async(f"Question {number}: what is resilience?")
    return str(result).strip()


# ---- the hardening -------------------------------------------------------------------------------

LIMIT = "750ms"  # of an attempt, to its first token


def pipeline_for_models(listen: Callable[[Any], None]) -> ResiliencePipeline[Any]:
    """Make the pipeline: 20 starts a second, and three quarters of a second to the first token."""
    return (
        ResiliencePipelineBuilder(name="model", listeners=[listen])
        .add_retry(max_retry_attempts=4, delay="50ms", backoff_type="exponential")
        .add_rate_limiter(TokenBucket(1, 20), queue_limit=math.inf)
        .add_timeout(LIMIT)
        .build()
    )


def has_content(event: StreamEvent) -> bool:
    """Tell the first event that has something in it: `messageStart` comes with the headers."""
    return "messageStart" not in event


def told_of(event: AttemptCompleted) -> str:
    """Say of an attempt that its answer has begun, or what went wrong before that."""
    match event.outcome:
        case Success():
            what = "begun"
        case None:
            what = "cancelled"
        case failed:
            what = type(failed.error).__name__
    return f"attempt {event.attempt}: {what} after {1000 * event.duration:.0f} ms"


def harden(model: Model, pipeline: ResiliencePipeline[Any]) -> None:
    """Send every stream of this model through the pipeline from now on."""
    bare = model.stream

    def stream(*args: Any, **options: Any) -> AsyncIterable[StreamEvent]:
        source = partial(bare, *args, **options)
        return pipeline.execute_stream(source, operation_key="stream", commit_when=has_content)

    model.stream = stream  # type: ignore[method-assign]  # this is the hardening


# ---- the figures ---------------------------------------------------------------------------------

SCRIPT: tuple[Step, ...] = (
    Status(503),  # a refusal that any client repeats
    Tokens(),
    Refuse(),  # the connection is reset
    Tokens(),
    Stall(after="preamble"),  # the answer begins, and its first token never comes
    Tokens(),
    DieAfter(0),  # the connection breaks between the headers and the first token
    Tokens(),
    Stall(after="preamble"),
    DieAfter(3),  # it breaks in mid-answer: nobody can take three tokens back
)


async def run(answers: list[str], attempts: list[str] | None = None) -> Figures:
    """Measure one of the two models, the hardened one if there is a list for its attempts."""
    async with (
        FlakyServer(*SCRIPT) as server,
        openai.AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key="none",
            # One level limits and retries: the pipeline, where there is one.
            timeout=1.5 if attempts is None else 30,
            max_retries=openai.DEFAULT_MAX_RETRIES if attempts is None else 0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        ) as client,
    ):
        model = OpenAIModel(client=client, model_id="flaky-1")
        if attempts is not None:

            def listen(event: Any) -> None:
                if isinstance(event, AttemptCompleted):
                    attempts.append(told_of(event))

            harden(model, pipeline_for_models(listen))

        async def call(number: int) -> None:
            answers.append(await ask(model, number))

        return await measure(server, call, asked=12, workers=3)


async def main() -> dict[str, Any]:
    """Measure both and print what came of it."""
    answers: list[str] = []
    attempts: list[str] = []
    runs = {"bare": await run(answers), "hardened": await run(answers, attempts)}
    show(**runs)
    print("what the pipeline told of attempts:", *attempts, sep="\n  ")
    return {**runs, "answers": answers, "attempts": attempts}


if __name__ == "__main__":
    asyncio.run(main())
