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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, TypeVar

from . import (
    bench_calls,
    bench_failures,
    bench_in_flight,
    bench_options,
    bench_streams,
    bench_threads,
    peers,
    report,
)
from .measure import Loop
from .options import load_anyio, pattern
from .rows import BY_HAND, OURS, Row

T = TypeVar("T")

ROWS: tuple[Row, ...] = tuple(
    row
    for row in (
        *bench_calls.ROWS,
        *bench_failures.ROWS,
        *bench_options.ROWS,
        *bench_streams.ROWS,
        *bench_threads.ROWS,
    )
    if row.contenders is not None
)

#: What a row's bare call is called among its contenders.
BARE = "bare call"

#: Calls before the counted ones: the interpreter has specialised its code by then.
WARM_UP = 200

#: Calls in the first run, and those that the second run makes more.
FIRST, MORE = 100, 500

#: How many calls are in flight for `--growth`; more would take minutes.
SIZES = (10, 100, 1_000, 10_000)

#: Instructions of a call, by row and contender.
Counts: TypeAlias = Mapping[str, Mapping[str, float]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status."""
    options = _parser().parse_args(arguments)
    rows = [row for row in ROWS if options.only is None or options.only.search(row.what)]
    if options.forks is not None:
        runs = _run_all(rows, everyone=options.all, growth=options.growth)
        options.forks.write_text(json.dumps(runs), "utf-8")
        return 0
    valgrind = shutil.which("valgrind")
    if valgrind is None or not rows:
        print(*(row.what for row in ROWS) if valgrind else ["valgrind is not installed"], sep="\n")
        return 2
    counts = _count(valgrind, sys.argv[1:] if arguments is None else arguments)
    before: Counts = (
        json.loads(options.compare.read_text("utf-8"))["rows"] if options.compare else {}
    )
    print(report.machine(), end="\n\n")
    print(*_table(counts["rows"], before), sep="\n")
    if options.json is not None:
        written = {"machine": report.machine(), **counts}
        options.json.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


def _count(valgrind: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run this module again under valgrind, and read what it counted."""
    counts: dict[str, Any] = {"rows": {}}
    with TemporaryDirectory() as directory:
        forks = Path(directory, "forks")
        command = [
            *(valgrind, "--quiet", "--tool=cachegrind", "--cache-sim=no"),
            f"--cachegrind-out-file={directory}/%p",
            *(sys.executable, "-m", __spec__.name, *arguments, "--forks", str(forks)),
        ]
        # Valgrind warns of caches it doesn't know, though it simulates none.
        run = subprocess.run(
            command, check=False, capture_output=True, env=os.environ | {"PYTHONHASHSEED": "0"}
        )
        if run.returncode:
            raise SystemExit(run.stderr.decode(errors="replace"))
        runs: list[_Run] = json.loads(forks.read_text("utf-8"))
        for path, first, second, calls in runs:
            place = counts
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = round((_total(directory, second) - _total(directory, first)) / calls)
    return counts


def _total(directory: str, pid: int) -> int:
    """Read the instructions of a process."""
    counted = Path(directory, str(pid)).read_text("utf-8")
    found = re.search(r"^summary: (\d+)", counted, re.MULTILINE)
    assert found is not None
    return int(found[1])


#: Where the count goes, two processes, and how many calls the second makes more.
_Run: TypeAlias = tuple[Sequence[str], int, int, int]


def _run_all(rows: Sequence[Row], *, everyone: bool, growth: bool) -> list[_Run]:
    """Run each contender of each row in two processes."""
    logging.disable()
    peers.left_out = not everyone
    load_anyio()
    shown = {row.what: asyncio.run(_names(row, everyone=everyone)) for row in rows}
    gc.collect()
    gc.freeze()
    runs: list[_Run] = [
        (
            ("rows", row.what, name),
            _forked(partial(_loop_of, row, name), WARM_UP, FIRST),
            _forked(partial(_loop_of, row, name), WARM_UP, FIRST + MORE),
            MORE,
        )
        for row in rows
        for name in shown[row.what]
    ]
    return [*runs, *(run for row in bench_in_flight.ROWS if growth for run in _growing(row))]


def _growing(row: Row) -> Iterator[_Run]:
    """Run a row of calls in flight at each size; the first crowd is also the one that warms up."""
    assert isinstance(row.run, bench_in_flight.Growing)
    for name in asyncio.run(_awaited(partial(row.run.loops, 1))):
        if name == bench_in_flight.BARE and row != bench_in_flight.ROWS[0]:
            continue  # it is the same in all of them
        for size in SIZES:
            make = partial(_crowd_of, row.run, name, size)
            calls = bench_in_flight.made(size)
            yield (
                ("growth", row.what, name, str(size)),
                _forked(make, 0, 1),
                _forked(make, 0, 2),
                calls,
            )


def _loop_of(row: Row, name: str) -> Loop:
    assert row.contenders is not None
    assert row.bare is not None
    return row.bare if name == BARE else row.contenders()[name]


def _crowd_of(growing: bench_in_flight.Growing, name: str, size: int) -> Loop:
    return growing.loops(size)[name]


async def _awaited(make: Callable[[], T]) -> T:
    """Make something inside an event loop."""
    return make()


async def _names(row: Row, *, everyone: bool) -> list[str]:
    """Name a row's contenders; imports what they need, so that no fork has to."""
    assert row.contenders is not None
    names = row.contenders()
    return [BARE, *(name for name in names if everyone or name in {OURS, BY_HAND})]


def _forked(make: Callable[[], Loop], *counts: int) -> int:
    """Run a loop for each count in a process of its own; the process' id, once it has ended."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            gc.disable()
            asyncio.run(_calls(make, counts))
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(pid, 0)[1]:
        msg = f"the process of {make} failed"
        raise RuntimeError(msg)
    return pid


async def _calls(make: Callable[[], Loop], counts: Sequence[int]) -> None:
    loop = make()
    for count in counts:
        await loop(count)


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
    parser.add_argument(
        "--growth", action="store_true", help="count by the number in flight, too; a minute more"
    )
    parser.add_argument("--forks", type=Path, help=argparse.SUPPRESS)  # set by itself
    return parser


if __name__ == "__main__":
    sys.exit(main())
