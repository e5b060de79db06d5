"""`python -m resilience_pipeline` shows what it says, adds up, and leaves a terminal and a pipe in peace.

It runs as its users run it, in a process of its own: once whole and once for each scene, all at the same time. Only
do an attempt and a break have more time there, so that on a busy machine nothing is too late but what is meant to be.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from resilience_pipeline._demo import DieAfter, FlakyServer, Refuse, Stall, Status, Tokens
from resilience_pipeline._demo._client import BrokenAnswerError, HTTPStatusError, stream_chat
from resilience_pipeline._demo._screen import WIDTH, OutputClosed, Screen
from resilience_pipeline._predicates import DEFAULT, demanded_wait

ROOT = Path(__file__).parents[1]  # a checkout that is not installed is tested too
COMMAND = (sys.executable, "-m", "resilience_pipeline")
PATIENT = """
import runpy
from resilience_pipeline._demo import _stage
_stage.PER_ATTEMPT = _stage.BREAK = "5s"
runpy.run_module("resilience_pipeline", run_name="__main__")
"""
PATIENT_COMMAND = (sys.executable, "-c", PATIENT)
SCENES = (
    "steady",
    "refuse",
    "stall",
    "busy",
    "dies",
    "leave",
    "hedge",
    "resume",
    "fallback",
    "circuit",
)
SEED = "3"

ESCAPE = re.compile(r"\033\[[0-9;]*m")
EVENT = re.compile(r"^ *(?P<at>\d+\.\d\d) s  (?P<label>.{13})(?P<text>.*)$")
ROW = re.compile(
    r"^ +(?P<call>\d+)  (?P<scene>\w+) +(?P<attempts>\d+) +(?P<requests>\d+)"
    r"  (?P<outcome>[a-z -]+?) +(?P<tokens>\d+) +(?P<first>\d+) ms  (?P<circuit>\w+)$"
)
TOTAL = re.compile(r"^ +(\d+)  in all +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def environment(**changes: str) -> dict[str, str]:
    """The process's own, without what decides on colours."""
    kept = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "TERM"}}
    return {**kept, "PYTHONUTF8": "1", "TERM": "xterm", **changes}


def start(
    *arguments: str, command: Sequence[str] = COMMAND, **changes: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
        env=environment(**changes),
    )


@dataclass
class Run:
    """What came out of a process."""

    status: int
    output: str
    errors: str
    rows: list[dict[str, str]] = field(init=False)
    events: list[tuple[float, str, str]] = field(init=False)

    def __post_init__(self) -> None:
        lines = self.output.splitlines()
        self.rows = [found.groupdict() for found in map(ROW.match, lines) if found]
        self.events = [
            (float(found["at"]), found["label"].strip(), found["text"])
            for found in map(EVENT.match, lines)
            if found
        ]

    def texts(self, label: str) -> list[str]:
        """The texts of the events of one kind; an attempt's number is dropped."""
        return [text for _, each, text in self.events if each.split(" ")[0] == label]

    def column(self, name: str) -> list[int]:
        return [int(row[name]) for row in self.rows]

    def repeatable(self) -> list[tuple[str, ...]]:
        """What doesn't depend on how fast the machine is, nor on which calls came before.

        Whether the trial of an open circuit is a call's first attempt or its second does.
        """
        names = ("scene", "outcome", "tokens", "circuit")
        counts = ("attempts", "requests")
        return [
            tuple(row[name] for name in (names if row["scene"] == "circuit" else names + counts))
            for row in self.rows
        ]


def finish(process: subprocess.Popen[str]) -> Run:
    output, errors = process.communicate(timeout=50)
    return Run(process.returncode, output, errors)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """The run of all scenes under "all", and the run of each one alone; with the same seed."""
    whole = {"all": start("--seed", SEED, command=PATIENT_COMMAND)}
    alone = {
        name: start("--seed", SEED, "--scenario", name, command=PATIENT_COMMAND) for name in SCENES
    }
    return {name: finish(process) for name, process in (alone | whole).items()}


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["all", *SCENES])
def test_ends_well_and_writes_plain_lines_of_80_columns_into_a_pipe(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    assert (run.status, run.errors) == (0, "")
    assert "\033" not in run.output
    assert "\r" not in run.output
    assert max(map(len, run.output.splitlines())) == WIDTH


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["all", *SCENES])
def test_the_table_agrees_with_what_was_shown(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.column("call") == list(range(1, len(run.rows) + 1))
    assert len(run.rows) == len(run.texts("call"))
    attempts = run.texts("attempt")
    refused = [text for text in attempts if text.startswith("refused by the circuit")]
    assert sum(run.column("attempts")) == len(attempts)
    assert sum(run.column("requests")) == len(attempts) - len(refused)
    again = [*run.texts("wait"), *run.texts("hedge")]
    assert len(again) == len(attempts) - len(run.rows)
    shown = re.findall(r"\w+|[.;]", " ".join(run.texts("tokens")))
    assert sum(run.column("tokens")) == len(shown)
    total = TOTAL.search(run.output)
    assert total is not None
    sums = [sum(run.column(name)) for name in ("attempts", "requests", "tokens")]
    assert [int(each) for each in total.groups()] == [len(run.rows), *sums]


@pytest.mark.realtime
@pytest.mark.parametrize("name", ["all", *SCENES])
def test_outcomes_and_first_tokens_are_summed_up(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    counted = Counter(row["outcome"] for row in run.rows)
    summed_up = ", ".join(f"{count} {outcome}" for outcome, count in counted.items())
    assert f"\noutcomes: {summed_up}\n" in run.output
    first = run.column("first")
    assert f"\ntime to first token: from {min(first)} ms to {max(first)} ms, " in run.output


@pytest.mark.realtime
@pytest.mark.parametrize("name", SCENES)
def test_a_seed_repeats_attempts_outcomes_and_waits(runs: dict[str, Run], name: str) -> None:
    """A scene comes to the same alone and among the others."""
    whole, alone = runs["all"], runs[name]
    assert alone.repeatable() == [row for row in whole.repeatable() if row[0] == name]
    head = whole.output.index(f"── {name}: ")
    among = Run(0, whole.output[head : whole.output.index("\n\n", head)], "")
    if name == "circuit":  # there a wait is what is left of the break, if anything is
        return
    assert alone.texts("wait") == among.texts("wait")
    assert [label for _, label, _ in alone.events if label[:4] != "call"] == [
        label for _, label, _ in among.events if label[:4] != "call"
    ]


@pytest.mark.realtime
def test_all_scenes_together_end_in_time(runs: dict[str, Run]) -> None:
    whole = runs["all"]
    assert list(dict.fromkeys(row["scene"] for row in whole.rows)) == list(SCENES)
    ends = [max(time for time, _, _ in runs[name].events) for name in SCENES]
    assert sum(ends) < 45  # about twenty, on a machine that does nothing else


@pytest.mark.realtime
def test_each_scene_shows_what_it_is_about(runs: dict[str, Run]) -> None:
    assert {row["outcome"] for row in runs["steady"].rows} == {"answered"}
    assert "asking … Connection reset by peer" in runs["refuse"].texts("attempt")
    assert runs["stall"].texts("timeout") == ["no token within 5 s"]
    assert "asking … 503 Service Unavailable, Retry-After: 1" in runs["busy"].texts("attempt")
    assert runs["busy"].texts("wait") == ["1.00 s, as the server asked"]
    broken, again = runs["dies"].rows
    assert (broken["outcome"], broken["attempts"], broken["requests"]) == ("broken off", "1", "1")
    assert again["outcome"] == "answered"
    assert len(runs["dies"].texts("error")) == 1
    (seen,) = runs["leave"].texts("server")
    assert seen.startswith("saw the client close the connection after ")
    (row,) = runs["hedge"].rows
    assert (row["attempts"], row["requests"], row["outcome"]) == ("2", "2", "answered")
    assert runs["hedge"].texts("server") == ["saw the client close the slow connection"]
    (row,) = runs["resume"].rows
    assert (row["attempts"], row["requests"], row["outcome"]) == ("2", "2", "answered")
    (error,) = runs["resume"].texts("error")
    assert error.startswith("after ")
    words = " ".join(runs["resume"].texts("tokens"))
    assert words == "Resilience is not the absence of failure."
    (row,) = runs["fallback"].rows
    assert (row["attempts"], row["outcome"]) == ("3", "stand-in")
    assert [text.split()[0].strip(":") for text in runs["circuit"].texts("circuit")] == [
        "open",
        "half-open",
        "closed",
    ]
    assert "open" in {row["circuit"] for row in runs["circuit"].rows}
    assert runs["circuit"].rows[-1]["circuit"] == "closed"


def test_help_says_what_it_shows_and_lists_the_scenes() -> None:
    run = finish(start("--help", COLUMNS="80"))
    assert (run.status, run.errors) == (0, "")
    assert "circuit breaker" in run.output
    for option in ("--scenario", "--seed", *(f"\n  {name} " for name in SCENES)):
        assert option in run.output
    assert max(map(len, run.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--scenario", "nope"], f"unknown scenario 'nope'; the scenes are {', '.join(SCENES)}"),
        (["--seed", "x"], "--seed: invalid int value: 'x'"),
        (["circuit"], "unrecognized arguments: circuit"),
    ],
)
def test_a_bad_command_line_is_refused_with_a_message(arguments: list[str], message: str) -> None:
    run = finish(start(*arguments))
    assert (run.status, run.output) == (2, "")
    assert message in run.errors


@pytest.mark.realtime
@pytest.mark.skipif(os.name == "nt", reason="a signal can't be sent to one process there")
def test_ctrl_c_ends_it_without_a_traceback() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--scenario", "stall"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        cwd=ROOT,
        env=environment(),
        # Started in a shell's background, this process may ignore the signal, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    for line in process.stdout:
        if " call 1 " in line:
            break
    process.send_signal(signal.SIGINT)
    run = finish(process)
    assert (run.status, run.errors) == (130, "interrupted\n")


@pytest.mark.realtime
def test_a_reader_that_goes_away_ends_it_quietly() -> None:
    process = start()  # all scenes, which nobody is too slow for to go away in the middle
    assert process.stdout is not None
    assert process.stdout.readline().startswith("resilience_pipeline: ")
    process.stdout.close()
    assert process.wait(timeout=20) == 1
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def run_in_terminal(*arguments: str, **changes: str) -> str:
    """Run it with a pseudo-terminal for its output, and give that."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    ours, theirs = pty.openpty()
    command = [*PATIENT_COMMAND, *arguments]
    process = subprocess.Popen(command, stdout=theirs, cwd=ROOT, env=environment(**changes))
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while piece := os.read(ours, 4096):
            output += piece
    os.close(ours)
    assert process.wait(timeout=20) == 0
    return output.decode().replace("\r\n", "\n")


@pytest.mark.realtime
def test_a_terminal_gets_colours_around_the_same_text(runs: dict[str, Run]) -> None:
    shown = run_in_terminal("--scenario", "steady", "--seed", SEED)
    assert "\033[1;36mResilience\033[0m\033[1;36m is\033[0m" in shown
    assert "\033[32manswered     \033[0m" in shown
    plain = ESCAPE.sub("", shown)
    assert "\033" not in plain
    assert without_times(plain) == without_times(runs["steady"].output)


@pytest.mark.realtime
@pytest.mark.parametrize("variable", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_gets_plain_text_where_colours_are_not_wanted(variable: dict[str, str]) -> None:
    assert "\033" not in run_in_terminal("--scenario", "steady", **variable)


def without_times(output: str) -> list[str]:
    text = re.sub(r" *[0-9.]+ m?s\b", " …", output)
    return re.sub(r"http://\S+", "http://", text).splitlines()


# ---- its parts --------------------------------------------------------------------------------


def shown_on(encoding: str, text: str) -> str:
    written = io.BytesIO()
    screen = Screen(io.TextIOWrapper(written, encoding=encoding, newline="\n"), colour=False)
    screen.note(text)
    return written.getvalue().decode(encoding)


def test_what_an_encoding_lacks_is_written_otherwise() -> None:
    assert shown_on("utf-8", "── “…” ü") == "── “…” ü\n"
    assert shown_on("ascii", "── “…” ü") == '-- "..." ?\n'


def test_a_long_text_goes_on_below_its_beginning() -> None:
    stream = io.StringIO()
    screen = Screen(stream, colour=False)
    screen.line("label", " ".join(["word"] * 30))
    first, *rest = stream.getvalue().splitlines()
    indent = first.index("word")
    assert all(line.startswith(" " * indent + "word") for line in rest)
    assert max(map(len, [first, *rest])) <= WIDTH
    assert " ".join(stream.getvalue().split()).count("word") == 30


def test_an_output_that_is_closed_is_no_failure_a_pipeline_would_handle() -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(OutputClosed):
        Screen(Closed(), colour=False).note("x")
    assert not issubclass(OutputClosed, Exception)


async def ask(server: FlakyServer) -> tuple[list[str], list[str]]:
    """Give the statuses that were reported, and the tokens."""
    statuses: list[str] = []
    async with stream_chat(server.url, "?", on_response=statuses.append) as tokens:
        return statuses, [token async for token in tokens]


@pytest.mark.asyncio
async def test_the_client_reads_tokens_and_closes_its_connection() -> None:
    async with FlakyServer(Tokens(["a", "ü\n", " c"])) as server:
        assert await ask(server) == (["200 OK"], ["a", "ü\n", " c"])
        assert (await server.wait_ended(0)).ending == "completed"
        server.script(Stall(after="preamble"))
        async with stream_chat(server.url, "?", on_response=len):
            await server.wait_requests(2)
        await server.wait_closed_by_client(1)


@pytest.mark.asyncio
async def test_the_clients_errors_tell_the_pipeline_what_it_wants_to_know() -> None:
    async with FlakyServer(Status(503, retry_after=7), Status(404)) as server:
        with pytest.raises(HTTPStatusError, match="503 Service Unavailable") as caught:
            await ask(server)
        assert demanded_wait(caught.value) == 7.0
        assert DEFAULT.matches_error(caught.value)
        with pytest.raises(HTTPStatusError, match="404 Not Found") as caught:
            await ask(server)
        assert demanded_wait(caught.value) is None
        assert not DEFAULT.matches_error(caught.value)


@pytest.mark.asyncio
async def test_the_client_raises_what_a_broken_connection_is() -> None:
    async with FlakyServer(Refuse(), DieAfter(2)) as server:
        with pytest.raises(ConnectionResetError):
            await ask(server)
        with pytest.raises(BrokenAnswerError, match="in mid-answer"):
            await ask(server)
    with pytest.raises(ConnectionRefusedError):
        await ask(server)
