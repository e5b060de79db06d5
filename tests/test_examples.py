"""The case studies in examples/: each runs as it stands, prints its figures, and they are what the guide says.

The figures come from a process of their own, as a reader would run it: the packages under study may set up what they
like there, and one of them instruments threading.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from resilience_pipeline._demo import FlakyServer, Status
from support.live import NO_CERTIFICATES

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Runs an example, changed a little, and prints, below what it prints itself, what its `main` returns.
DRIVER = """
import asyncio, importlib, json, sys
sys.path[:0] = sys.argv[3:]
example = importlib.import_module(sys.argv[1])
vars(example).update(json.loads(sys.argv[2]))
figures = asyncio.run(example.main())
print(json.dumps(figures, default=vars))
"""


@cache
def figures_of(name: str, **changes: str) -> dict[str, Any]:
    """Run an example once; a warning is an error.

    Args:
        name: Of its module.
        changes: To globals of it.
    """
    places = [str(EXAMPLES), str(EXAMPLES.parent)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVER, name, json.dumps(changes), *places],
        capture_output=True,
        check=False,
        encoding="utf-8",
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    *printed, last = done.stdout.splitlines()
    assert printed, "it prints its figures"
    figures: dict[str, Any] = json.loads(last)
    return figures


def figures_of_strands() -> dict[str, Any]:
    """With so long a limit that a machine which stumbles loses no answer but those that stall."""
    return figures_of("strands_model", LIMIT="5s")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_an_example_is_a_script_that_can_be_read_in_one_go(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert f"`python examples/{path.name}`" in text
    assert text.endswith('if __name__ == "__main__":\n    asyncio.run(main())\n')


# ---- httpx --------------------------------------------------------------------------------------

#: How many of its first hundred answers the server spoils.
SPOILED = 36


def test_a_hardened_httpx_client_answers_every_call() -> None:
    """The callers' code is the same for both; what is spoiled reaches those of the bare client."""
    figures = figures_of("httpx_client")["a server that spoils answers"]
    bare, hardened = figures["bare"], figures["hardened"]
    assert bare["requests"] <= bare["asked"] == 100  # some connection may come to nothing in time
    assert bare["answered"] <= 100 - SPOILED
    assert hardened["answered"] == hardened["asked"] == 100
    assert hardened["failures"] == {}


def test_a_hardened_httpx_client_asks_again_for_each_fault() -> None:
    """Each costs one more request; on a machine that stumbles some time limit may pass besides."""
    hardened = figures_of("httpx_client")["a server that spoils answers"]["hardened"]
    assert hardened["requests"] >= 100 + SPOILED


def test_a_hardened_httpx_client_meets_a_limit_without_losing_a_call() -> None:
    hardened = figures_of("httpx_client")["a server that has a limit"]["hardened"]
    assert hardened["answered"] == hardened["asked"] == 100


def test_a_hardened_httpx_client_keeps_its_pace() -> None:
    """At most 4 + 80 t requests in t seconds, retries among them."""
    for figures in figures_of("httpx_client").values():
        assert figures["hardened"]["requests"] <= 4 + 80 * figures["hardened"]["seconds"]


async def once() -> AsyncIterator[bytes]:
    """A body that can be read only once."""
    yield b"{}"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "body", "sent"),
    [
        pytest.param("GET", "/data", b"{}", 2, id="get"),
        pytest.param("POST", "/v1/chat/completions", b"{}", 1, id="post"),
        pytest.param("GET", "/data", once(), 1, id="one-shot-body"),
    ],
)
async def test_a_hardened_httpx_client_repeats_what_may_happen_twice(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any, sent: int
) -> None:
    """Of the others a 503 comes out as that answer."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("httpx_client")
    async with (
        FlakyServer(Status(503)) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, verify=NO_CERTIFICATES) as client,
    ):
        example.harden(client, example.pipeline_for_http(attempt="30s"))
        size = {"Content-Length": "2"}
        response = await client.request(method, path, content=body, headers=size)
        assert len(server.requests) == sent
    assert response.status_code == (503 if sent == 1 else 200)


# ---- tinydb -------------------------------------------------------------------------------------


def test_a_hardened_database_loses_nothing() -> None:
    """Deposits of tasks, transfers in opposite directions, and threads among the tasks."""
    figures = figures_of("tinydb_bank")
    assert figures["hardened"] == figures["right"]


def test_a_bare_database_loses_deposits() -> None:
    """All tasks read before any of them writes, so one deposit is left."""
    assert figures_of("tinydb_bank")["bare"]["after deposits"] == 1


# ---- strands ------------------------------------------------------------------------------------


def test_a_hardened_model_fails_after_its_first_token_only() -> None:
    """Of six faults of the server one comes in mid-answer, and that one is the agent's to deal with."""
    figures = figures_of_strands()
    assert figures["bare"]["answered"] < figures["hardened"]["answered"] == 11
    assert figures["hardened"]["failures"] == {"APIConnectionError": 1}


def test_no_answer_of_a_model_has_a_token_twice() -> None:
    assert set(figures_of_strands()["answers"]) == {"Resilience is not the absence of failure."}


def test_the_attempts_of_a_model_are_told() -> None:
    """Each shows up, those that began an answer and, by what went wrong, those that didn't."""
    told = Counter(line.split()[2] for line in figures_of_strands()["attempts"])
    assert told == {
        "begun": 12,
        "InternalServerError": 1,
        "APIConnectionError": 2,
        "TimeoutRejectedError": 2,
    }


def test_a_hardened_model_keeps_its_pace() -> None:
    """At most 1 + 20 t starts in t seconds, retries among them."""
    hardened = figures_of_strands()["hardened"]
    assert hardened["requests"] == 12 + 5
    assert hardened["requests"] <= 1 + 20 * hardened["seconds"]
