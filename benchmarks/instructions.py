"""`python -m benchmarks.instructions`: how many instructions a call takes.

Times on a machine that has other things to do differ by a tenth from one run to the next; the
number of instructions that the interpreter carries out differs by a thousandth, so a change of a
per cent shows. Instructions are no time, though: a miss of the cache or a call of the system costs
more than its instructions say. This finds out whether a change did something, `python -m
benchmarks` what it is worth.

The loops of the table's rows run under `valgrind --tool=cachegrind`, which counts every
instruction of the process. A contender is run twice with a different number of calls, each time in
a process of its own that is forked from the same one: what differs between the two counts is the
calls. Hashing is not randomised and the garbage collector is off.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from . import bench_calls, bench_failures, bench_streams, bench_threads, peers, report
from .options import load_anyio, pattern
from .rows import BY_HAND, OURS, Row

ROWS: tuple[Row, ...] = tuple(
    row
    for row in (*bench_calls.ROWS, *bench_failures.ROWS, *bench_streams.ROWS, *bench_threads.ROWS)
    if row.contenders is not None
)

#: What a row's bare call is called among its contenders.
BARE = "bare call"

#: Calls before the counted ones: the interpreter has specialised its code by then.
WARM_UP = 200

#: Calls in the first run, and those that the second run makes more.
FIRST, MORE = 100, 500

#: Instructions of a call, by row and contender.
Counts: TypeAlias = Mapping[str, Mapping[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status."""
    options = _parser().parse_args(arguments)
    rows = [row for row in ROWS if options.only is None or options.only.search(row.what)]
    if options.forks is not None:
        options.forks.write_text(json.dumps(_run_all(rows, everyone=options.all)), "utf-8")
        return 0
    valgrind = shutil.which("valgrind")
    if valgrind is None or not rows:
        print(*(row.what for row in ROWS) if valgrind else ["valgrind is not installed"], sep="\n")
        return 2
    counts = _count(valgrind, options.only, everyone=options.all)
    before: Counts = (
        json.loads(options.compare.read_text("utf-8"))["rows"] if options.compare else {}
    )
    print(report.machine(), end="\n\n")
    print(*_table(counts, before), sep="\n")
    if options.json is not None:
        written = {"machine": report.machine(), "rows": counts}
        options.json.write_text(json.dumps(written, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return 0


def _count(valgrind: str, only: re.Pattern[str] | None, *, everyone: bool) -> Counts:
    """Run this module again under valgrind, and read what it counted."""
    with TemporaryDirectory() as directory:
        forks = Path(directory, "forks")
        command = [
            *(valgrind, "--quiet", "--tool=cachegrind", "--cache-sim=no"),
            f"--cachegrind-out-file={directory}/%p",
            *(sys.executable, "-m", __spec__.name, "--forks", str(forks)),
            *(["--only", only.pattern] if only is not None else []),
            *(["--all"] if everyone else []),
        ]
        # Valgrind warns of caches it doesn't know, though it simulates none.
        run = subprocess.run(
            command, check=False, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "0"}
        )
        if run.returncode:
            raise SystemExit(run.stderr.decode(errors="replace"))
        pids: Mapping[str, Mapping[str, tuple[int, int]]] = json.loads(forks.read_text("utf-8"))
        return {
            what: {
                name: (_total(directory, second) - _total(directory, first)) / MORE
                for name, (first, second) in contenders.items()
            }
            for what, contenders in pids.items()
        }


def _total(directory: str, pid: int) -> int:
    """Read the instructions of a process."""
    found = re.search(
        r"^summary: (\d+)", Path(directory, str(pid)).read_text("utf-8"), re.MULTILINE
    )
    assert found is not None
    return int(found[1])


def _run_all(rows: Sequence[Row], *, everyone: bool) -> dict[str, dict[str, tuple[int, int]]]:
    """Run each contender of each row in two processes, and give their ids."""
    logging.disable()
    peers.left_out = not everyone
    load_anyio()
    shown = {row.what: asyncio.run(_names(row, everyone=everyone)) for row in rows}
    gc.collect()
    gc.freeze()
    return {
        row.what: {
            name: (_forked(row, name, FIRST), _forked(row, name, FIRST + MORE))
            for name in shown[row.what]
        }
        for row in rows
    }


async def _names(row: Row, *, everyone: bool) -> list[str]:
    """Name a row's contenders; imports what they need, so that no fork has to."""
    assert row.contenders is not None
    names = row.contenders()
    return [BARE, *(name for name in names if everyone or name in {OURS, BY_HAND})]


def _forked(row: Row, name: str, calls: int) -> int:
    """Run a contender in a process of its own; its id, once it has ended."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            gc.disable()
            asyncio.run(_calls(row, name, calls))
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        msg = f"{name} failed in {row.what!r}"
        raise RuntimeError(msg)
    return pid


async def _calls(row: Row, name: str, calls: int) -> None:
    assert row.contenders is not None
    assert row.bare is not None
    loop = row.bare if name == BARE else row.contenders()[name]
    await loop(WARM_UP)
    await loop(calls)


def _table(counts: Counts, before: Counts) -> list[str]:
    """Write the table, in Markdown, in columns for who reads it in a terminal."""
    head = ("what", "instructions", "change", BARE, BY_HAND, "× bare call", "× by hand")
    lines = [head]
    for what, row in counts.items():
        for name, count in row.items():
            if name in {BARE, BY_HAND}:
                continue
            old = before.get(what, {}).get(name)
            by_hand = row.get(BY_HAND)
            cells = (
                what if name == OURS else f"    {name}",
                f"{count:,.0f}",
                f"{(count / old - 1) * 100:+.1f} %" if old else "",
                f"{row[BARE]:,.0f}" if name == OURS else "",
                f"{by_hand:,.0f}" if by_hand and name == OURS else "",
                f"{count / row[BARE]:.2f}",
                f"{count / by_hand:.2f}" if by_hand else "",
            )
            lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = [_line(cells, widths) for cells in lines]
    return [written[0], f"|---|{'---:|' * (len(head) - 1)}", *written[1:]]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    texts = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
    return f"| {' | '.join(texts)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.instructions",
        description="How many instructions a call takes, counted by valgrind.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="show the change since that file was written"
    )
    parser.add_argument(
        "--only", type=pattern, metavar="PATTERN", help="rows that match a regular expression"
    )
    parser.add_argument("--all", action="store_true", help="count the other contenders as well")
    parser.add_argument("--forks", type=Path, help=argparse.SUPPRESS)  # set by itself
    return parser


if __name__ == "__main__":
    sys.exit(main())
