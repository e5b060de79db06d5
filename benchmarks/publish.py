"""`python -m benchmarks.publish`: writes results, tables and the picture from stored figures.

With `--run` it measures first: everything on this Python, and without the peers the calls and
streams on uvloop and on every other Python that is named. One run replaces the figures of the
version that is installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import plot, tables

_ROOT = Path(__file__).parent.parent
_PAGE = _ROOT / "docs/explanation/performance.md"
_PICTURE = _PAGE.with_name("growth.svg")

_INSTRUCTIONS = "instructions"

#: What takes long and depends little on the event loop or the Python is measured once.
_ELSEWHERE = "^(?!10,000 calls .*(limiter|queue|window|stack)|memory per pipeline|import it)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and give its exit status."""
    options = _parser().parse_args(arguments)
    number = version("resilience-pipeline")
    directory = Path(__file__).with_name("results") / number
    if options.run:
        directory.mkdir(exist_ok=True)
        for command in _commands(directory, options.python, options.rounds):
            print("\n$", *command, flush=True)
            subprocess.run([*map(str, command)], check=True, cwd=_ROOT)
    runs = _runs(directory)
    if not runs:
        print(f"nothing in {directory}: --run measures", file=sys.stderr)
        return 2
    everything = next(iter(runs.values()))
    machine = _machine(everything)
    written = _tables(runs)
    results = directory.with_name(f"{number}.md")
    results.write_text(_results(number, machine, written), "utf-8")
    _PICTURE.write_text(
        plot.growth(_growing(everything["rows"]), runs.get(_INSTRUCTIONS, {}).get("growth", {})),
        "utf-8",
    )
    blocks = {**written, "machine": machine}
    _PAGE.write_text(filled(_PAGE.read_text("utf-8"), blocks), "utf-8")
    return 0


def _commands(
    directory: Path, pythons: Sequence[Path], rounds: int
) -> Iterator[Sequence[str | Path]]:
    """Say what to run, in this order."""
    here = "{}.{}".format(*sys.version_info)
    measure = ("-m", "benchmarks", "--rounds", str(rounds))
    fewer = ("--without-peers", "--only", _ELSEWHERE)
    yield (sys.executable, *measure, "--json", directory / f"{here}.json")
    uvloop = directory / f"{here}-uvloop.json"
    yield (sys.executable, *measure, *fewer, "--loop", "uvloop", "--json", uvloop)
    for python in pythons:
        print_version = "import sys; print('{}.{}'.format(*sys.version_info))"
        asked = subprocess.run([python, "-c", print_version], check=True, capture_output=True)
        name = asked.stdout.decode().strip()
        yield (python, *measure, *fewer, "--json", directory / f"{name}.json")
    counts = directory / f"{_INSTRUCTIONS}.json"
    yield (sys.executable, "-m", "benchmarks.instructions", "--growth", "--json", counts)


def _runs(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the stored figures, the run of everything first."""
    found = {
        path.stem.replace("-", ", "): json.loads(path.read_text("utf-8"))
        for path in sorted(directory.glob("*.json"))
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1].get("peers", ()))))


def _machine(run: Mapping[str, Any]) -> str:
    """Say what was measured."""
    peers = ", ".join(f"{name} {found}" for name, found in run["peers"].items())
    return f"{run['machine']}. Peers: {peers}."


def _tables(runs: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    """Write every table."""
    everything = next(iter(runs.values()))["rows"]
    timed = {name: run["rows"] for name, run in runs.items() if name != _INSTRUCTIONS}
    counted = runs.get(_INSTRUCTIONS)
    return {
        "rows": tables.of_one_run(everything),
        "versions": tables.side_by_side(timed),
        "peers": tables.with_peers(everything),
        "growth": tables.of_growth("µs of a call", _growing(everything)),
        **({} if counted is None else _counted_tables(counted)),
    }


def _counted_tables(counted: Mapping[str, Any]) -> dict[str, str]:
    head = "thousand instructions of a call"
    return {
        "instructions": tables.of_instructions(counted["rows"]),
        "counted_growth": tables.of_growth(head, counted["growth"]),
    }


def _growing(rows: tables.Rows) -> tables.Growing:
    return {what: row["growth"] for what, row in rows.items() if row["growth"]}


_SECTIONS = {
    "rows": "All rows",
    "versions": "Other Pythons and uvloop",
    "peers": "Peers",
    "growth": "Time by the number in flight",
    "instructions": "Instructions of a call",
    "counted_growth": "Instructions by the number in flight",
}


def _results(number: str, machine: str, written: Mapping[str, str]) -> str:
    """Write the results of a version."""
    head = f"""# {number}

{machine}

Written by `python -m benchmarks.publish`; the figures behind it are in `{number}/`.
The [README](../README.md) says how to read them."""
    sections = (
        f"## {title}\n\n{written[name]}" for name, title in _SECTIONS.items() if name in written
    )
    return "\n\n".join([head, *sections]) + "\n"


def filled(page: str, blocks: Mapping[str, str]) -> str:
    """Replace what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}\n\n{blocks[name]}\n\n{end}" if name in blocks else found[0]

    pattern = r"(<!-- begin (\w+) -->).*?(<!-- end \2 -->)"
    return re.sub(pattern, block, page, flags=re.DOTALL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish",
        description="Write results, tables and the picture from stored figures.",
    )
    parser.add_argument("--run", action="store_true", help="measure first, eight minutes")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="another Python to measure on, with the package and uvloop in it; may be repeated",
    )
    parser.add_argument(
        "--rounds", type=int, default=25, metavar="N", help="samples of each contender: 25"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
