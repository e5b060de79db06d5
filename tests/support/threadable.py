"""Which tests can run in a thread, without an event loop: found out from their code, before any of them runs.

A test can if nothing that it reaches is of anyio, asyncio or trio, a few things of anyio's apart that have their
equal in a thread (`support.in_threads`). What it reaches: the globals of its code, of the functions, classes and
instances among them as far as they are the tests' own, and the values it is parametrised with. Of a class those
methods count that anything reached may call.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import anyio
import anyio.lowlevel
import pytest

#: What a thread has an equal of.
HAVE_EQUALS = (anyio.sleep_forever, anyio.get_cancelled_exc_class, anyio.lowlevel.checkpoint)

_LOOPS = {"anyio", "asyncio", "sniffio", "trio", "uvloop"}
_TESTS = Path(__file__).parents[1]


def runs_in_threads(function: object, marks: Iterable[pytest.Mark] = ()) -> bool:
    """Whether a test function can run in a thread."""
    marks = list(marks)
    if any(mark.name == "realtime" for mark in marks):
        return False
    given = [mark.args for mark in marks if mark.name == "parametrize"]
    return not _Reach([function, given]).needs_a_loop


class _Reach:
    """Everything that some code can get at, followed through what is the tests' own."""

    def __init__(self, start: Iterable[object]) -> None:
        self.needs_a_loop = False
        self._seen: dict[int, object] = {}  # kept, so that no number is given twice
        self._attributes: set[str] = set()
        self._todo: list[object] = list(start)
        self._classes: list[type] = []
        while self._todo and not self.needs_a_loop:
            self._visit(self._todo.pop())
            if not self._todo:
                self._todo += [
                    each for each in self._methods_in_use() if id(each) not in self._seen
                ]

    def _visit(self, subject: object) -> None:
        if id(subject) in self._seen or subject is None:
            return
        self._seen[id(subject)] = subject
        if _has_equal(subject):
            return
        if isinstance(subject, ModuleType):
            self.needs_a_loop |= _root(subject.__name__) in _LOOPS
        elif _root(getattr(subject, "__module__", None)) in _LOOPS:
            self.needs_a_loop = True
        elif isinstance(subject, Mapping):
            self._todo += subject.values()
        elif isinstance(subject, list | tuple | set | frozenset):
            self._todo += subject
        elif isinstance(subject, partial):
            self._todo += [subject.func, subject.args, subject.keywords]
        else:
            self._visit_code(subject)

    def _visit_code(self, subject: Any) -> None:
        if isinstance(subject, FunctionType):
            while not _is_ours(subject) and hasattr(subject, "__wrapped__"):
                subject = subject.__wrapped__
            if _is_ours(subject):
                self._todo += self._used_by(subject.__code__, subject.__globals__)
                self._todo += [subject.__defaults__, subject.__kwdefaults__, _cells(subject)]
        elif inspect.ismethod(subject):
            self._todo += [subject.__func__, subject.__self__]
        else:
            kind = subject if isinstance(subject, type) else type(subject)
            self._classes += [each for each in kind.__mro__ if _is_ours(each)]

    def _used_by(self, code: CodeType, names: dict[str, Any]) -> Iterator[object]:
        """Give the globals of some code, those of its modules down to what it takes of them."""
        self._attributes.update(code.co_names)
        steps = list(dis.get_instructions(code))
        for number, step in enumerate(steps):
            if step.opname == "IMPORT_NAME" and _root(step.argval) in _LOOPS:
                self.needs_a_loop = True
            if step.opname not in {"LOAD_GLOBAL", "LOAD_NAME"}:
                continue
            found = names.get(step.argval)
            for then in steps[number + 1 :]:
                if not isinstance(found, ModuleType) or then.opname not in _TAKE:
                    break
                found = getattr(found, then.argval, None)
            yield found
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from self._used_by(constant, names)

    def _methods_in_use(self) -> Iterator[object]:
        for kind in self._classes:
            for name, member in vars(kind).items():
                if name in self._attributes or (name.startswith("__") and callable(member)):
                    if isinstance(member, property):
                        yield member.fget
                    else:
                        yield getattr(member, "__func__", member)


_TAKE = {"LOAD_ATTR", "LOAD_METHOD"}


def _has_equal(subject: object) -> bool:
    return any(subject is each for each in HAVE_EQUALS)


def _root(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _cells(function: FunctionType) -> list[object]:
    found: list[object] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            continue
    return found


def _is_ours(subject: Any) -> bool:
    """Whether a function or a class is of the tests."""
    if isinstance(subject, FunctionType):
        return Path(subject.__code__.co_filename).is_relative_to(_TESTS)
    module = inspect.getmodule(subject)
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(_TESTS)
