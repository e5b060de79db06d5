"""What tells one recorded call from another, where the user doesn't say: the function and its arguments.

A function is known by its module and qualified name, so that the same program finds its recordings
again. A lambda has no name that tells it from the next one: it is known by its code, and what it
captures counts as its arguments.
"""

from __future__ import annotations

import inspect
from functools import partial
from hashlib import sha256
from types import CodeType
from typing import Any, cast

from .._context import ResilienceContext
from ._faithful import unfaithful


class UnfitKeyError(Exception):
    """A call has no key that JSON can hold; says why."""


def default_key(context: ResilienceContext, fn: Any, args: tuple[Any, ...]) -> tuple[Any, str]:
    """Give the key of a call, and a few words for the name of its file.

    Raises:
        UnfitKeyError: An argument is nothing that JSON can hold faithfully.
    """
    keywords: dict[str, Any] = {}
    while isinstance(fn, partial):
        args = (*fn.args, *args)
        keywords = {**fn.keywords, **keywords}
        fn = fn.func
    key: dict[str, Any] = {"function": named(fn), "args": list(args)}
    if keywords:
        key["keywords"] = keywords
    if context.operation_key is not None:
        key["operation_key"] = context.operation_key
    if is_lambda(fn):
        try:
            key["lambda"] = _lambda_key(fn)
        except RecursionError:
            msg = f"{named(fn)} uses itself"
            raise UnfitKeyError(msg) from None
    for name in ("args", "keywords", "operation_key", "lambda"):
        problem = unfaithful(key.get(name), name)
        if problem is not None:
            raise UnfitKeyError(problem)
    words = [context.operation_key, named(fn).rpartition(":")[2].rpartition(".")[2]]
    return key, "-".join(filter(None, words))


def named(fn: Any) -> str:
    """Give the import path of a function, of a method's function, or of a callable's class."""
    named_one: Any = fn if hasattr(fn, "__qualname__") else fn.__class__
    return f"{named_one.__module__}:{named_one.__qualname__}"


def is_lambda(fn: Any) -> bool:
    return inspect.isfunction(fn) and fn.__name__ == "<lambda>"


def _lambda_key(fn: Any) -> dict[str, Any]:
    """Give the code of a lambda and the values that it uses beside its arguments."""
    code: CodeType = fn.__code__
    used = {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    used |= inspect.getclosurevars(fn).nonlocals
    used |= {f"default {number}": value for number, value in enumerate(fn.__defaults__ or ())}
    used |= fn.__kwdefaults__ or {}
    return {"code": _digest(code), "uses": {name: _shown(used[name]) for name in sorted(used)}}


def _shown(value: Any) -> Any:
    """Show a value by itself, if JSON can hold it, and a function, class or module by its name."""
    if inspect.ismodule(value):
        return f"module {value.__name__}"
    if isinstance(value, partial):
        parts: list[Any] = [value.func, *value.args, *value.keywords, *value.keywords.values()]
        return list(map(_shown, parts))
    if is_lambda(value):
        return _lambda_key(value)
    return f"function {named(value)}" if callable(value) else value


def _digest(code: CodeType) -> str:
    """Digest what a lambda's code does; the same for the same source under one version of Python."""
    digest = sha256(code.co_code)
    parts: list[object] = [*code.co_consts, *code.co_names, *code.co_varnames, *code.co_freevars]
    for part in parts:
        kind = _type_name(part)
        if isinstance(part, CodeType):
            shown = _digest(part)
        elif isinstance(part, frozenset):  # in an order that differs from run to run
            shown = repr(sorted(map(repr, cast("frozenset[object]", part))))
        else:
            shown = repr(part)
        digest.update(f"{kind} {shown}\n".encode(errors="backslashreplace"))
    return digest.hexdigest()[:16]


def _type_name(value: object) -> str:
    return type(value).__name__
