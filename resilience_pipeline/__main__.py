"""The command line: `python -m resilience_pipeline`.

Without a command the live demonstration; `schema` and `check` are in `_commands`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence

from ._demo._scenes import SCENES, Scene, play
from ._demo._screen import OutputClosed, Screen

_DESCRIPTION = """\
Starts a small HTTP server on loopback, inside this process, that fails on cue;
then streams the tokens of a chat model from it through a pipeline of fallback,
retry, circuit breaker and time-out. Shows each attempt, wait, time-out, change
of the circuit and token as it happens, and ends with a table of the calls.
Takes about ten seconds and needs no network.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demonstration, or a command.

    Args:
        arguments: The command line without the program's name; default: this process's.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given and given[0] in {"schema", "check"}:
        return _command(given)
    scenes, seed = _parse(given)
    screen = Screen.on(sys.stdout)
    try:
        asyncio.run(play(scenes, seed=seed, screen=screen))
    except KeyboardInterrupt:
        screen.end()
        print("interrupted", file=sys.stderr)
        return 130
    except OutputClosed:
        return _output_closed()
    return 0


def _command(given: Sequence[str]) -> int:
    from ._commands import run

    try:
        status = run(given)
        sys.stdout.flush()
    except BrokenPipeError:
        return _output_closed()
    return status


def _output_closed() -> int:
    # Python flushes once more at its exit; that must find a reader.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parse(arguments: Sequence[str]) -> tuple[Sequence[Scene], int]:
    scenes = {scene.name: scene for scene in SCENES}
    parser = argparse.ArgumentParser(
        prog="python -m resilience_pipeline",
        description=_DESCRIPTION,
        epilog="scenes:\n"
        + "\n".join(f"  {scene.name:<10}{scene.summary}:\n{'':12}{scene.shows}" for scene in SCENES)
        + "\n\ncommands, each with a --help of its own:\n"
        "  schema      print the JSON Schema of configuration files\n"
        "  check FILE  say what a configuration file builds, or what is wrong with it"
        "\n\nColours in a terminal, unless NO_COLOR is set; plain text elsewhere.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", metavar="NAME", help="play this scene alone (see below)")
    parser.add_argument(
        "--seed",
        metavar="N",
        type=int,
        help="a number that decides what is left to chance: what the server does, and the jitter",
    )
    given = parser.parse_args(arguments)
    if given.scenario is not None and given.scenario not in scenes:
        parser.error(f"unknown scenario {given.scenario!r}; the scenes are {', '.join(scenes)}")
    seed = random.randrange(10_000) if given.seed is None else given.seed
    return (SCENES if given.scenario is None else (scenes[given.scenario],)), seed


if __name__ == "__main__":
    sys.exit(main())
