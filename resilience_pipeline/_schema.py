"""A JSON Schema of configuration files, made of the option classes.

What an option may be is said once, in its class; the schema is another way to read it. Where the
class says more than JSON Schema can, the schema lets pass what `load` will refuse, never the other
way round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from inspect import cleandoc
from typing import Any

import attrs

from ._options import REFERENCE, to_name, to_seconds, to_seconds_or_none, to_signed_seconds
from ._predicates import to_predicate
from ._references import kinds_of_strategies, kinds_of_values, named_kind

Schema = dict[str, Any]

_NUMBER = r"[0-9]+(\.[0-9]+)?"
_DURATION = rf"^(?=.)({_NUMBER}h)?({_NUMBER}m)?({_NUMBER}s)?({_NUMBER}ms)?$"
_OBJECT: Schema = {"$ref": "#/$defs/object"}

_BY_CONVERTER: Mapping[Any, Schema] = {
    to_seconds: {"$ref": "#/$defs/duration"},
    to_seconds_or_none: {"$ref": "#/$defs/duration"},
    to_signed_seconds: {"anyOf": [{"$ref": "#/$defs/duration"}, {"type": "number"}]},
    to_name: {"type": "string"},
    to_predicate: {"$ref": "#/$defs/predicate"},
}


def schema(names: Iterable[str] = ()) -> Schema:
    """Make the schema, draft 2020-12.

    Args:
        names: Registered names, which may stand as `type` too.
    """
    strategies, values = kinds_of_strategies(), kinds_of_values()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pipelines of resilience_pipeline",
        "type": "object",
        "properties": {
            "pipelines": {
                "description": "The pipelines by name.",
                "type": "object",
                "additionalProperties": {"$ref": "#/$defs/pipeline"},
            }
        },
        "required": ["pipelines"],
        "additionalProperties": False,
        "$defs": _general()
        | {
            "strategy": _one_of("strategy", (*strategies, "pipeline"), names),
            "object": _one_of("object", values, names),
            "strategy.pipeline": _NESTED,
        }
        | {f"strategy.{name}": _table(name, kind) for name, kind in strategies.items()}
        | {f"object.{name}": _table(name, kind, ()) for name, kind in values.items()},
    }


def _general() -> Schema:
    return {
        "pipeline": {
            "type": "object",
            "properties": {
                "name": {
                    "description": "Name for errors and events; by default that of the table.",
                    "type": "string",
                },
                "close_timeout": {
                    "description": "How long closing something discarded may take.",
                    "$ref": "#/$defs/duration",
                },
                "strategies": {
                    "description": "The strategies, outermost first.",
                    "type": "array",
                    "items": {"$ref": "#/$defs/strategy"},
                },
            },
            "required": ["strategies"],
            "additionalProperties": False,
        },
        "duration": {
            "description": "Seconds, or text such as 500ms, 10s or 1m30s.",
            "anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": _DURATION}],
        },
        "reference": {
            "description": "A registered name, or an import path, package.module:attribute; or a "
            "table with a type.",
            "anyOf": [{"type": "string"}, _OBJECT],
        },
        "predicate": {
            "description": "The name of an exception, of Python's or this library's, a registered "
            "name, or an import path; or several names of exceptions.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _OBJECT,
            ],
        },
    }


_NESTED: Schema = {
    "description": "Nest another pipeline.",
    "type": "object",
    "properties": {
        "type": {"const": "pipeline"},
        "pipeline": {"description": "Its name in the registry.", "type": "string"},
        "instance": {
            "description": "Its instance; by default the default one.",
            "type": "string",
        },
    },
    "required": ["type", "pipeline"],
    "additionalProperties": False,
}


def _one_of(room: str, kinds: Iterable[str], names: Iterable[str]) -> Schema:
    """Choose by `type`, so that what is wrong is told of the one that was meant."""
    return {
        "type": "object",
        "properties": {
            "type": {
                "anyOf": [{"enum": sorted({*kinds, *names})}, {"type": "string", "pattern": ":"}]
            }
        },
        "required": ["type"],
        "allOf": [
            {
                "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
                "then": {"$ref": f"#/$defs/{room}.{name}"},
            }
            for name in sorted(kinds)
        ],
    }


def _table(name: str, kind: Callable[..., Any], required: Iterable[str] = ("type",)) -> Schema:
    documentation = cleandoc(kind.__doc__ or "")
    table: Schema = {
        "description": documentation.partition("\n\n")[0].replace("\n", " "),
        "type": "object",
        "properties": {"type": {"const": name}},
        "required": [*required],
        "additionalProperties": False,
    }
    if not isinstance(kind, type) or not attrs.has(kind):
        return table | {"additionalProperties": True}
    told = _told(documentation)
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(kind)
    for field in fields:
        if not field.init:
            continue
        alias = str(field.alias)
        description = {"description": told[alias]} if alias in told else {}
        table["properties"][alias] = description | _option(field)
        if field.default is attrs.NOTHING:
            table["required"].append(alias)
    return table


def _option(field: Any) -> Schema:
    said: Schema | None = field.metadata.get("schema")
    made = _BY_CONVERTER.get(field.converter, said)
    kind = named_kind(field)
    if kind is not None:
        untyped = {"type": "object", "not": {"required": ["type"]}}
        return {"if": untyped, "then": {"$ref": f"#/$defs/object.{kind}"}, "else": REFERENCE}
    if made is None:  # anything; but what is a table with a type can be looked into
        made = {"if": {"type": "object", "required": ["type"]}, "then": _OBJECT}
        made = made if "rule" in field.metadata else {}
    elif field.default is None and made is not REFERENCE:
        made = {"anyOf": [made, {"type": "null"}]}  # in JSON; TOML has no word for it
    return made | ({"default": field.default} if _is_plain(field.default) else {})


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | str) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _told(documentation: str) -> dict[str, str]:
    """Give what the docstring of a class says about each option."""
    _, _, told = documentation.partition("\nArgs:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", told.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
