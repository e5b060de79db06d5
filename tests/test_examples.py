"""The case studies in examples/: each runs as it stands, prints its figures, and they are what the guide says.

The figures come from a process of their own, as a reader would run it: the packages under study may set up what they
like there, and one of them instruments threading.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from resilience_pipeline._demo import FlakyServer, Status
from support.live import NO_CERTIFICATES

EXAMPLES = Path(__file__).parent.parent / "examples"
#: Runs an example and prints, below what it prints itself, what its `main` returns.
DRIVER = """
import asyncio, importlib, json, sys
sys.path[:0] = sys.argv[2:]
figures = asyncio.run(importlib.import_module(sys.argv[1]).main())
print(json.dumps(figures, default=vars))
"""


@cache
def figures_of(name: str) -> dict[str, Any]:
    """Run an example once; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DRIVER, name, str(EXAMPLES), str(EXAMPLES.parent)],
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


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[!_]*.py")), ids=lambda path: path.stem)
def test_an_example_is_a_script_that_can_be_read_in_one_go(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 150
    assert f"`python examples/{path.name}`" in text
    assert text.endswith('if __name__ == "__main__":\n    asyncio.run(main())\n')


# ---- httpx --------------------------------------------------------------------------------------

#: How many of the first 120 requests the server's script spoils.
HTTP_FAULTS = 43


def test_a_hardened_httpx_client_answers_every_call() -> None:
    """The callers' code is the same for both; every fault of the server reaches the bare client's callers."""
    figures = figures_of("httpx_client")
    bare, hardened = figures["bare"], figures["hardened"]
    assert bare["answered"] <= bare["asked"] - HTTP_FAULTS
    assert hardened["answered"] == hardened["asked"] == 120
    assert hardened["failures"] == {}


def test_a_hardened_httpx_client_repeats_what_failed_and_no_more() -> None:
    """Every fault costs one more request; on a machine that stumbles some time limit may pass besides."""
    bare, hardened = (figures_of("httpx_client")[name] for name in ("bare", "hardened"))
    assert bare["requests"] == 120
    assert 120 + HTTP_FAULTS <= hardened["requests"] <= 2 * 120


def test_a_hardened_httpx_client_keeps_its_pace() -> None:
    """At most 4 + 80 t requests in t seconds, retries among them."""
    hardened = figures_of("httpx_client")["hardened"]
    assert hardened["requests"] <= 4 + 80 * hardened["seconds"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "sent"), [("POST", "/v1/chat/completions", 1), ("GET", "/data", 2)]
)
async def test_a_hardened_httpx_client_repeats_what_may_happen_twice(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, sent: int
) -> None:
    """A POST whose answer is a 503 comes out as that answer; a GET is asked again."""
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("httpx_client")
    async with (
        FlakyServer(Status(503)) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False, verify=NO_CERTIFICATES) as client,
    ):
        example.harden(client, example.pipeline_for_http())
        response = await client.request(method, path, content=b"{}")
        assert len(server.requests) == sent
    assert response.status_code == (503 if sent == 1 else 200)


# ---- strands ------------------------------------------------------------------------------------


def test_a_hardened_model_fails_after_its_first_token_only() -> None:
    """Of six faults of the server one comes in mid-answer, and that one is the agent's to deal with."""
    figures = figures_of("strands_model")
    assert figures["bare"]["answered"] < figures["hardened"]["answered"] == 11
    assert figures["hardened"]["failures"] == {"APIConnectionError": 1}


def test_no_answer_of_a_model_has_a_token_twice() -> None:
    assert set(figures_of("strands_model")["answers"]) == {
        "Resilience is not the absence of failure."
    }


def test_the_attempts_of_a_model_are_told() -> None:
    """Each shows up, those that began an answer and, by what went wrong, those that didn't."""
    told = [line.split()[2] for line in figures_of("strands_model")["attempts"]]
    assert told.count("begun") == 12
    assert told.count("InternalServerError") == 1
    assert told.count("APIConnectionError") == 2
    assert told.count("TimeoutRejectedError") >= 2


def test_a_hardened_model_keeps_its_pace() -> None:
    """At most 1 + 20 t starts in t seconds, retries among them."""
    hardened = figures_of("strands_model")["hardened"]
    assert hardened["requests"] == len(figures_of("strands_model")["attempts"])
    assert hardened["requests"] <= 1 + 20 * hardened["seconds"]
