"""Pipelines out of mappings and TOML files: every mistake found, and none applied.

Nothing here knows a strategy. What may stand as `type` is what the builder has an `add_` method for,
or a class of the user's; which options there are is what its constructor takes; and what they may
be is what the class itself says, see `_options`. A value is first offered to the option as it is.
Only what the option refuses is taken for the name of something, so a text is a duration where a
duration is asked for, and a function where a function is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import attrs

from ._builder import ResiliencePipelineBuilder
from ._errors import OptionsError
from ._options import Bad, refusal, to_seconds
from ._pipeline import ResiliencePipeline
from ._recipes import Recipe, as_made
from ._references import (
    NotFoundError,
    find,
    kinds_of_strategies,
    kinds_of_values,
    looks_like_name,
    named_kind,
    names_of_errors,
    similar,
    takes_references,
)

Table: TypeAlias = Mapping[str, Any]
Find: TypeAlias = Callable[[str, "str | None"], ResiliencePipeline]

#: What a pipeline's table may hold beside its strategies.
PIPELINE_OPTIONS = ("name", "close_timeout")


@attrs.frozen
class Nested:
    """A step that nests another pipeline of the registry."""

    pipeline: str
    instance: str | None

    def __str__(self) -> str:
        of = "" if self.instance is None else f", instance {self.instance!r}"
        return f"pipeline {self.pipeline!r}{of}"


Step: TypeAlias = "Recipe | Nested"


class Plan:  # noqa: PLW1641 - compared, never looked up
    """The `configure` of a pipeline that was configured; equal ones come to the same pipeline.

    Equal are those whose tables say the same with names that stand for the same: what is made of a
    table, a limiter of the user's for example, need not know when it equals another.

    Attributes:
        steps: How to make the strategies, and the nested pipelines, outermost first.
        options: What the table says about the pipeline as a whole.
    """

    def __init__(
        self, steps: tuple[Step, ...], options: dict[str, Any], find: Find, said: object
    ) -> None:
        self.steps = steps
        self.options = options
        self._find = find
        self._said = said

    def __call__(self, builder: ResiliencePipelineBuilder[Any]) -> None:
        if "name" in self.options:
            builder.name = self.options["name"]
        if "close_timeout" in self.options:
            builder._close_timeout = self.options["close_timeout"]
        for step in self.steps:
            if isinstance(step, Nested):
                builder.add_pipeline(self._find(step.pipeline, step.instance))
            else:
                builder.add(step.make())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._said == other._said


def parsed(contents: bytes, source: str) -> dict[str, Any]:
    """Read the contents of a TOML file.

    Args:
        contents: What is in it.
        source: Its name, for the message.

    Raises:
        OptionsError: It is no TOML; the message has the file and the line.
    """
    import tomllib  # for those who have such files alone

    try:
        return tomllib.loads(contents.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = contents[: error.start].count(b"\n") + 1
        problem = f"is no UTF-8 (at line {line})"
    except tomllib.TOMLDecodeError as error:
        line = contents.count(b"\n") + 1
        problem = str(error).replace("(at end of document)", f"(at line {line}, the end)")
    msg = f"{source}: {problem}"
    raise OptionsError(msg, (msg,))


def read(
    configuration: object,
    *,
    source: str,
    names: Mapping[str, object],
    known: Iterable[str],
    find: Find,
) -> dict[str, Plan]:
    """Make plans of a mapping.

    Args:
        configuration: The mapping.
        source: What it was read from, for the message.
        names: What texts stand for.
        known: Pipelines that are there already, which may be nested.
        find: Gives a pipeline when it is to be nested.

    Raises:
        OptionsError: There are mistakes; each is listed with its path.
    """
    reader = _Reader(names, find)
    plans = reader.read(configuration)
    reader.check_nested(plans, set(known))
    if reader.problems:
        count = "a mistake" if len(reader.problems) == 1 else f"{len(reader.problems)} mistakes"
        lines = "".join(f"\n  {problem}" for problem in reader.problems)
        msg = f"{count} in {source}:{lines}"
        raise OptionsError(msg, tuple(reader.problems))
    return plans


class _Reader:
    """Reads one configuration; notes mistakes and goes on."""

    def __init__(self, names: Mapping[str, object], find: Find) -> None:
        self.problems: list[str] = []
        self._names = names
        self._find = find
        #: What the names in the pipeline that is being read stand for, in their order, each with its
        #: identity: these are objects, not data.
        self._found: list[tuple[int, object]] = []
        #: Where pipelines are nested: the path, the outer pipeline and the inner one.
        self._nested: list[tuple[str, str, str]] = []

    def read(self, configuration: object) -> dict[str, Plan]:
        top = self._table("", configuration, ("pipelines",), required=("pipelines",))
        tables = self._table("pipelines", top.get("pipelines", {}), None)
        return {name: self._pipeline(name, table) for name, table in tables.items()}

    def check_nested(self, plans: Mapping[str, Plan], known: set[str]) -> None:
        """Note nested pipelines that there are not, and those that come to nest themselves."""
        inner: dict[str, list[str]] = {}
        for _, outer, nested in self._nested:
            inner.setdefault(outer, []).append(nested)
        for path, outer, nested in self._nested:
            if nested not in plans and nested not in known:
                hint = similar(nested, {*plans, *known}, others="the known ones are")
                self._note(path, f"there is no pipeline {nested!r}{hint}")
            elif outer in _reachable(nested, inner):
                self._note(path, f"{outer!r} would nest itself by way of {nested!r}")

    # ---- tables

    def _table(
        self,
        path: str,
        value: object,
        allowed: Iterable[str] | None,
        required: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Give those entries of a table that may be there; without `allowed` any may."""
        if not isinstance(value, Mapping):
            self._note(path, f"must be a table, got {value!r}")
            return {}
        table: Mapping[Any, Any] = cast(Any, value)
        for name in required:
            if name not in table:
                self._note(_join(path, name), "is missing")
        good: dict[str, Any] = {}
        for name, entry in table.items():
            if not isinstance(name, str):
                self._note(path, f"has a key that is no text, {name!r}")
            elif allowed is not None and name not in allowed:
                hint = similar(name, allowed, others="there may be")
                self._note(_join(path, name), f"is nothing that is known here{hint}")
            else:
                good[name] = entry
        return good

    def _pipeline(self, name: str, value: object) -> Plan:
        path = _join("pipelines", name)
        self._found = []
        table = self._table(path, value, ("strategies", *PIPELINE_OPTIONS), ("strategies",))
        steps = table.pop("strategies", [])
        if not isinstance(steps, list | tuple):
            self._note(_join(path, "strategies"), f"must be an array of tables, got {steps!r}")
            steps = []
        numbered = enumerate(cast("Iterable[object]", steps))
        made = [self._step(name, f"{path}.strategies[{number}]", step) for number, step in numbered]
        options = self._pipeline_options(path, table)
        said = (_canonical(value), self._found)
        return Plan(tuple(step for step in made if step is not None), options, self._find, said)

    def _pipeline_options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(options.get("name", ""), str):
            self._note(f"{path}.name", f"must be text, got {options['name']!r}")
        if "close_timeout" in options:
            seconds: object = to_seconds(options["close_timeout"])
            if isinstance(seconds, Bad):
                self._note(
                    f"{path}.close_timeout", f"must be {seconds.expected}, got {seconds.value!r}"
                )
            options["close_timeout"] = seconds
        return options

    def _step(self, outer: str, path: str, value: object) -> Step | None:
        table = self._table(path, value, None)
        if not isinstance(value, Mapping):
            return None
        if table.get("type") == "pipeline":
            return self._nested_pipeline(outer, path, table)
        kinds = kinds_of_strategies()
        make = self._kind(path, table, kinds, (*kinds, "pipeline"))
        if make is None:
            return None
        strategy = self._made(path, table, make)
        if strategy is not None and not callable(getattr(strategy.made, "bind", None)):
            self._note(
                f"{path}.type", f"{table['type']!r} makes no strategy, but {strategy.made!r}"
            )
        return strategy

    def _nested_pipeline(self, outer: str, path: str, table: dict[str, Any]) -> Nested | None:
        good = self._table(path, table, ("type", "pipeline", "instance"), ("pipeline",))
        bad = [name for name in ("pipeline", "instance") if not isinstance(good.get(name, ""), str)]
        for name in bad:
            self._note(f"{path}.{name}", f"must be text, got {good[name]!r}")
        if bad or "pipeline" not in good:
            return None
        self._nested.append((f"{path}.pipeline", outer, good["pipeline"]))
        return Nested(good["pipeline"], good.get("instance"))

    # ---- objects

    def _kind(
        self,
        path: str,
        table: Table,
        kinds: Mapping[str, Callable[..., Any]],
        all_names: Iterable[str],
    ) -> Callable[..., Any] | None:
        """Find what makes the object that a table describes."""
        path = f"{path}.type"
        name = table.get("type")
        if name is None:
            self._note(path, "is missing" + similar("", all_names, others="it may be"))
        elif not isinstance(name, str):
            self._note(path, f"must be text, got {name!r}")
        elif name in kinds:
            return kinds[name]
        else:
            try:
                found = self._look_up(name)
            except NotFoundError as error:
                known = similar(name, all_names, others="there are")
                shown = f"there is no {name!r}{known}" if ":" not in name else str(error)
                self._note(path, shown)
            else:
                if callable(found):
                    return cast("Callable[..., Any]", found)
                self._note(path, f"{name!r} is no class, but {found!r}")
        return None

    def _made(self, path: str, table: Table, make: Callable[..., Any]) -> Recipe | None:
        """Make an object of a table; `None`, with all its mistakes noted, if it can't be made."""
        before = len(self.problems)
        given = {name: value for name, value in table.items() if name != "type"}
        parameters, takes_any = _parameters(make)
        for name in () if takes_any else [each for each in given if each not in parameters]:
            hint = similar(name, parameters, others="there may be")
            self._note(_join(path, name), f"is no option of {table['type']!r}{hint}")
        fields = _fields(make)
        options = {
            name: self._value(_join(path, name), value, fields.get(name))
            for name, value in given.items()
            if name in parameters or takes_any
        }
        for name, parameter in parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in options:
                self._note(_join(path, name), "is missing")
                options[name] = None  # so that the others can be judged
        noted = tuple(problem.partition(": ")[0] for problem in self.problems[before:])
        try:
            made = Recipe(make, options)
        except OptionsError as error:
            for problem in error.problems or (str(error),):
                where, what = _located(path, problem, parameters)
                if not any(re.match(rf"{re.escape(where)}(?![\w-])", each) for each in noted):
                    self._note(where, what + self._hint(problem, options, fields))
        except Exception as error:  # noqa: BLE001 - of a class of the user's
            if len(self.problems) == before:
                self._note(path, f"can't be made: {type(error).__name__}: {error}")
        else:
            return made if len(self.problems) == before else None
        return None

    def _value(self, path: str, value: object, field: attrs.Attribute[Any] | None) -> object:
        """Give what a value stands for, where an option does not take it as it is."""
        if field is None:  # of a class that says nothing about its options
            return self._stood_for(path, value, must_be=False)
        if refusal(field, value) is None or not takes_references(field):
            return value
        kind = named_kind(field) if _is_untyped_table(value) else None
        if kind is not None:
            table = {"type": kind, **cast("Table", value)}
            return self._made(path, table, kinds_of_values()[kind])
        found = self._stood_for(path, value, must_be=True)
        if not isinstance(found, list):
            return found
        array = tuple(cast("list[object]", found))
        return array if refusal(field, as_made(array)) is None else list(array)

    def _stood_for(self, path: str, value: object, *, must_be: bool) -> object:
        """Give what a text, a table or an array of such stands for, if it stands for anything."""
        if isinstance(value, str):
            try:
                return self._look_up(value)
            except NotFoundError as error:
                if ":" in value and must_be:
                    self._note(path, str(error))
                return value
        if isinstance(value, Mapping) and "type" in value:
            table = self._table(path, cast("Table", value), None)
            kinds = kinds_of_values()
            make = self._kind(path, table, kinds, kinds)
            return None if make is None else self._made(path, table, make)
        if isinstance(value, list):
            found = [
                self._stood_for(f"{path}[{number}]", each, must_be=must_be)
                for number, each in enumerate(cast("list[object]", value))
            ]
            return [tuple(cast(Any, each)) if isinstance(each, list) else each for each in found]
        return value  # pyright: ignore[reportUnknownVariableType]

    def _look_up(self, text: str) -> Any:
        found = find(text, self._names)
        self._found.append((id(found), found))
        return found

    def _hint(
        self, problem: str, options: Table, fields: Mapping[str, attrs.Attribute[Any]]
    ) -> str:
        """Say of a name that was not found that it was taken for one."""
        name = problem.partition(" ")[0]
        field = fields.get(name)
        value = options.get(name)
        texts = [each for each in _flat(value) if isinstance(each, str) and looks_like_name(each)]
        if field is None or not texts or not takes_references(field):
            return ""
        hint = similar(texts[0], {*self._names, *names_of_errors()})
        return f"; nothing is registered as {texts[0]!r}{hint}"

    def _note(self, path: str, problem: str) -> None:
        self.problems.append(f"{path}: {problem}" if path else problem)


def _reachable(start: str, inner: Mapping[str, list[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += inner.get(name, [])
    return found


def _parameters(make: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Give the named parameters of a constructor, and whether it takes any others too."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # written in C, perhaps
        return {}, True
    named = {
        each.name: each
        for each in parameters
        if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}
    }
    return named, any(each.kind == each.VAR_KEYWORD for each in parameters)


def _fields(make: Callable[..., Any]) -> dict[str, attrs.Attribute[Any]]:
    """Give the declared options of a class, by the names its constructor has for them."""
    if not isinstance(make, type) or not attrs.has(make):
        return {}
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(make)
    return {str(field.alias): field for field in fields if field.init}


def _located(path: str, problem: str, options: Iterable[str]) -> tuple[str, str]:
    """Split a sentence about an option into the option's path and the rest."""
    name, _, rest = problem.partition(" ")
    return (_join(path, name), rest) if name in options else (path, problem)


def _is_untyped_table(value: object) -> bool:
    return isinstance(value, Mapping) and "type" not in value


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, list | tuple):
        for each in cast("Iterable[object]", value):
            yield from _flat(each)
    else:
        yield value


def _canonical(value: object) -> object:
    """Give what compares equal to that of another value which says the same, and no other."""
    if isinstance(value, Mapping):
        table = cast("Mapping[object, object]", value)
        return {key: _canonical(entry) for key, entry in table.items()}
    if isinstance(value, list | tuple):
        return [_canonical(entry) for entry in cast("Iterable[object]", value)]
    return type(value), value  # `1 == True`


def _join(path: str, name: str) -> str:
    """Write the path of an entry, quoted as in TOML where need be."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        name = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"{path}.{name}" if path else name
