"""`python -m benchmarks`: prints the table of what the library costs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from . import (
    bench_calls,
    bench_failures,
    bench_import,
    bench_in_flight,
    bench_memory,
    bench_options,
    bench_streams,
    bench_threads,
    peers,
    report,
)
from .measure import Settings
from .options import load_anyio, loop_factory, pattern
from .rows import Result, Row

ROWS: tuple[Row, ...] = (
    *bench_calls.ROWS,
    *bench_failures.ROWS,
    *bench_options.ROWS,
    *bench_streams.ROWS,
    *bench_in_flight.ROWS,
    *bench_threads.ROWS,
    *bench_memory.ROWS,
    *bench_import.ROWS,
)

#: How far past a bound `--check` lets a figure be: other processes on two cores cost that much.
SLACK = 1.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status."""
    options = _parser().parse_args(arguments)
    rows = [row for row in ROWS if options.only is None or options.only.search(row.what)]
    if not rows:
        print(f"no row matches {options.only.pattern!r}; rows:", file=sys.stderr)
        print(*(f"  {row.what}" for row in ROWS), sep="\n", file=sys.stderr)
        return 2
    peers.left_out = options.without_peers
    settings = Settings.smoke() if options.smoke else Settings.thorough(options.rounds)
    logging.disable()
    load_anyio()
    gc.freeze()  # what is imported is no matter for the collector between samples
    print(report.machine(options.loop), end="\n\n")
    print(report.header(), flush=True)
    results: dict[str, Result] = {}
    for row in rows:
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            results[row.what] = result = runner.run(_run(row, settings))
        print(report.line(report.cells(row.what, result)), flush=True)
        if options.all:
            for cells in report.contender_cells(result):
                print(report.line(cells))
    if options.json is not None:
        options.json.write_text(report.as_json(results, options.loop), encoding="utf-8")
    return _checked(results) if options.check else 0


async def _run(row: Row, settings: Settings) -> Result:
    return await row.run(settings)


def _checked(results: dict[str, Result]) -> int:
    """Say which rows are past a bound, slack included, and give the exit status."""
    past = [
        f"{what}: {check.figure:,.2f} is past {check.bound.limit:,g} {check.bound.unit}"
        for what, result in results.items()
        for check in result.checks
        if not check.within(SLACK)
    ]
    print(*past, sep="\n", end="\n" if past else "", file=sys.stderr)
    return 1 if past else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What the library costs, beside a bare call and what one would write by hand.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    parser.add_argument(
        "--only", type=pattern, metavar="PATTERN", help="rows that match a regular expression"
    )
    parser.add_argument(
        "--loop", choices=("asyncio", "uvloop"), default="asyncio", help="the event loop to run on"
    )
    parser.add_argument(
        "--rounds", type=int, default=25, metavar="N", help="samples of each contender: 25"
    )
    parser.add_argument(
        "--without-peers", action="store_true", help="measure no other library, installed or not"
    )
    parser.add_argument("--all", action="store_true", help="show the other contenders as well")
    parser.add_argument(
        "--check",
        action="store_true",
        help=f"exit with status 1 if a figure is more than {SLACK:g} times its bound",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run every row as briefly as can be: shows that they work, the figures mean nothing",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
