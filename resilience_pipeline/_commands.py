"""`python -m resilience_pipeline schema` and `check FILE`."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ._configuration import Nested, Plan, parsed, read
from ._errors import OptionsError
from ._references import NotFoundError, find
from ._registry import ResiliencePipelineRegistry
from ._schema import schema


def run(arguments: Sequence[str]) -> int:
    """Run a command.

    Args:
        arguments: The command line, from the command's name on.

    Returns:
        The exit status: 0 if all is well, 1 if the file has mistakes, 2 if it can't be read.
    """
    given = _parser().parse_args(arguments)
    names: Mapping[str, object] = {}
    known: set[str] = set()
    try:
        if given.names is not None:
            names, known = _names_at(given.names)
        if given.command == "schema":
            print(json.dumps(schema(names), indent=2, allow_nan=False))
            return 0
        return _check(given.file, names, known)
    except NotFoundError as error:
        print(f"--names: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m resilience_pipeline")
    commands = parser.add_subparsers(dest="command", required=True)
    made_of_options = commands.add_parser(
        "schema",
        help="print the JSON Schema of configuration files",
        description="Print the JSON Schema of configuration files, for editors and validators.",
    )
    check = commands.add_parser(
        "check",
        help="say what a configuration file builds, or what is wrong with it",
        description="Say what a configuration file builds, or list its mistakes. Builds nothing, "
        "but imports what the file names.",
        epilog="Exit status: 0 if all is well, 1 if the file has mistakes, 2 if it can't be read.",
    )
    check.add_argument("file", metavar="FILE", help="a TOML file")
    for command in (made_of_options, check):
        command.add_argument(
            "--names",
            metavar="MODULE:OBJECT",
            help="where the registered names are: a registry, or a mapping of names",
        )
    return parser


def _check(file: str, names: Mapping[str, object], known: set[str]) -> int:
    try:
        contents = Path(file).read_bytes()
        plans = read(parsed(contents, file), source=file, names=names, known=known, find=_never)
    except OptionsError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{file} can't be read: {error.strerror or error}", file=sys.stderr)
        return 2
    count = "1 pipeline" if len(plans) == 1 else f"{len(plans)} pipelines"
    print(f"{file}: {count}, strategies outermost first")
    for name, plan in plans.items():
        print(f"\n{name}")
        for line in _explained(plan):
            print(f"  {line}")
    return 0


def _names_at(path: str) -> tuple[Mapping[str, object], set[str]]:
    found: Any = find(path, {})
    if isinstance(found, ResiliencePipelineRegistry):
        return found._names, set(found)
    if isinstance(found, Mapping):
        return found, set()  # pyright: ignore[reportUnknownVariableType]
    msg = f"{path!r} is neither a registry nor a mapping, but {found!r}"
    raise NotFoundError(msg)


def _never(name: str, instance: str | None) -> NoReturn:
    raise NotImplementedError  # nothing is built


def _explained(plan: Plan) -> list[str]:
    lines = [f"{option} = {value!r}" for option, value in plan.options.items()]
    for number, step in enumerate(plan.steps, 1):
        lines.append(f"{number}. {step if isinstance(step, Nested) else step.made}")
        told = "" if isinstance(step, Nested) else inspect.getdoc(step.made) or ""
        if told:
            lines.append("   " + told.partition("\n\n")[0].replace("\n", " "))
    return lines or ["nothing: calls pass as they are"]
