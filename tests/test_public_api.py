"""The public names: a snapshot of every signature, their documentation, and where they live.

After a change that is meant, write the snapshot anew: python tests/test_public_api.py
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_overloads

import attrs
import pytest

import resilience_pipeline
from resilience_pipeline._event import Event

SNAPSHOT = Path(__file__).with_name("api_snapshot.txt")
PACKAGE = "resilience_pipeline"
MODULES = [
    importlib.import_module(name)
    for name in (
        PACKAGE,
        f"{PACKAGE}.strategies",
        f"{PACKAGE}.telemetry",
        f"{PACKAGE}.runtime",
        f"{PACKAGE}.testing",
        f"{PACKAGE}.integrations.opentelemetry",
        f"{PACKAGE}.integrations.prometheus",
    )
]
#: Special methods that are promised.
SPECIAL = {
    "__aenter__",
    "__aexit__",
    "__aiter__",
    "__anext__",
    "__call__",
    "__contains__",
    "__getitem__",
    "__iter__",
    "__len__",
    "__or__",
    "__setitem__",
}


def public_names() -> Iterator[tuple[ModuleType, str, Any]]:
    for module in MODULES:
        for name in module.__all__:
            yield module, name, getattr(module, name)


def own_classes(cls: type[Any]) -> list[type[Any]]:
    """The class and those of its bases that are the package's."""
    return [each for each in cls.__mro__ if each.__module__.startswith(PACKAGE)]


def members(cls: type[Any]) -> dict[str, Any]:
    """Public methods, properties and attributes, inherited ones included."""
    found: dict[str, Any] = {}
    for each in reversed(own_classes(cls)):
        for name, value in vars(each).items():
            if name in SPECIAL or not name.startswith("_"):
                found[name] = value
    return dict(sorted(found.items()))


def has_constructor(cls: type[Any]) -> bool:
    is_protocol = getattr(cls, "_is_protocol", False)
    return not is_protocol and any("__init__" in vars(each) for each in own_classes(cls))


def signature(thing: Any) -> str:
    return str(inspect.signature(thing))


def is_told(thing: Any, name: str) -> bool:
    """Whether a docstring has an entry of that name; an inherited field's may be in the base's."""
    told = own_classes(thing) if inspect.isclass(thing) else [thing]
    return any(re.search(rf"^ +{name}: ", each.__doc__ or "", re.MULTILINE) for each in told)


def field_names(cls: type[Any]) -> list[str]:
    """The fields of a class of attrs' and of an event."""
    if issubclass(cls, Event):
        return list(inspect.signature(cls).parameters)
    return [field.name for field in attrs.fields(cls)] if attrs.has(cls) else []


def describe_class(path: str, cls: type[Any]) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    yield f"class {path}({', '.join(bases)})"
    if has_constructor(cls):
        yield f"{path}{signature(cls)}"
    fields = field_names(cls)
    for name in fields:
        if not name.startswith("_"):
            yield f"{path}.{name}: field"
    for name, member in members(cls).items():
        if name not in fields:
            yield from describe_member(f"{path}.{name}", member, getattr(cls, name))


def describe_member(path: str, member: Any, looked_up: Any) -> Iterator[str]:
    if isinstance(member, staticmethod | classmethod):
        yield f"{path}{signature(member.__func__)} [{type(member).__name__}]"
    elif inspect.isfunction(looked_up):
        kind = "async " if inspect.iscoroutinefunction(looked_up) else ""
        overloads = get_overloads(looked_up)
        for overload in overloads:
            yield f"{kind}{path}{signature(overload)} [overload]"
        if not overloads:
            yield f"{kind}{path}{signature(looked_up)}"
    elif isinstance(member, property):
        returns = inspect.signature(member.fget).return_annotation  # type: ignore[arg-type]
        yield f"{path}: {returns} [property]"
    elif inspect.ismemberdescriptor(member):
        yield f"{path}: attribute"
    else:
        yield f"{path}: class attribute"


def describe() -> Iterator[str]:
    """One public signature a line."""
    described: dict[int, str] = {}
    for module, name, thing in public_names():
        path = f"{module.__name__}.{name}"
        if id(thing) in described:
            yield f"{path} = {described[id(thing)]}"
            continue
        if inspect.isclass(thing) or inspect.isfunction(thing):
            described[id(thing)] = path
        if inspect.isclass(thing):
            yield from describe_class(path, thing)
        elif inspect.isfunction(thing):
            yield f"{path}{signature(thing)}"
        elif inspect.ismodule(thing):
            yield f"{path}: module"
        else:
            yield f"{path}: alias"


def names(*kinds: Any) -> pytest.MarkDecorator:
    """All public things of some kinds, as parameters."""
    chosen = [
        pytest.param(module, name, thing, id=f"{module.__name__.removeprefix(PACKAGE)}.{name}")
        for module, name, thing in public_names()
        if any(is_kind(thing) for is_kind in kinds)
    ]
    return pytest.mark.parametrize(("module", "name", "thing"), chosen)


def test_the_public_api_is_what_the_snapshot_says() -> None:
    """No signature changes unseen."""
    now, before = list(describe()), SNAPSHOT.read_text("utf-8").splitlines()
    changes = "\n".join(difflib.unified_diff(before, now, "snapshot", "now", lineterm="", n=0))
    assert not changes, f"{changes}\n\n{__doc__}"


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_names_are_listed_in_order(module: Any) -> None:
    """`__all__` is sorted, without doubles, and everything in it exists."""
    assert module.__all__ == sorted(set(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name)


@pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)
def test_nothing_is_public_but_what_is_listed(module: Any) -> None:
    """What a module shows without an underscore is in `__all__`, or public elsewhere, or a module, or not ours."""
    public = {id(thing) for _, _, thing in public_names()}
    stray = [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_")
        and name not in module.__all__
        and id(thing) not in public
        and not inspect.ismodule(thing)
        and getattr(thing, "__module__", "").startswith(PACKAGE)
    ]
    assert stray == []


def test_strategies_are_importable_from_the_package_too() -> None:
    """What `strategies` has is there too, but for what only authors of strategies need."""
    only_there = set(resilience_pipeline.strategies.__all__) - set(resilience_pipeline.__all__)
    assert only_there == {"Handler", "Site", "SupportsHealth"}


@pytest.mark.parametrize(
    "name",
    [
        "ResiliencePipelineBuilder",
        "ResiliencePipeline",
        "ResiliencePipelineRegistry",
        "ResilienceStream",
        "ResilienceContext",
        "PropertyKey",
        "current_context",
        "Success",
        "Rejected",
        "Failure",
        "Outcome",
        "handle",
        "handle_inner",
        "handle_result",
        "Retry",
        "RetryBudget",
        "CircuitBreaker",
        "CircuitBreakerControl",
        "Timeout",
        "Fallback",
        "ConcurrencyLimiter",
        "RateLimiter",
        "TokenBucket",
        "FixedWindow",
        "SlidingWindow",
        "SupportsRateLimit",
        "ChaosFault",
        "ChaosLatency",
        "ChaosOutcome",
        "ChaosBehavior",
        "ResilienceError",
        "ExecutionRejectedError",
        "BrokenCircuitError",
        "IsolatedCircuitError",
        "TimeoutRejectedError",
        "RateLimiterRejectedError",
        "ConcurrencyLimiterRejectedError",
        "MisuseError",
        "OptionsError",
        "AttemptCompleted",
        "PipelineExecuting",
        "PipelineExecuted",
        "strategies",
        "telemetry",
    ],
)
def test_names_of_the_contract(name: str) -> None:
    """Every name of the contract that is implemented can be imported from the package."""
    assert name in resilience_pipeline.__all__


def test_a_star_import_gives_the_public_names() -> None:
    """`from resilience_pipeline import *` gives what is listed, and nothing else."""
    namespace: dict[str, Any] = {}
    exec("from resilience_pipeline import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(resilience_pipeline.__all__)


@names(inspect.isclass, inspect.isfunction)
def test_public_things_live_where_they_are_imported_from(
    module: ModuleType, name: str, thing: Any
) -> None:
    """Tracebacks, reprs and pickles show the public path, whichever file a thing lives in."""
    home = importlib.import_module(thing.__module__)
    assert home in MODULES
    assert thing.__name__ == thing.__qualname__ == name
    assert getattr(home, name) is thing
    assert pickle.loads(pickle.dumps(thing)) is thing


@names(inspect.isclass, inspect.isfunction, inspect.ismodule)
def test_public_things_are_documented(module: ModuleType, name: str, thing: Any) -> None:
    """Every public name has a docstring of its own that starts with a sentence."""
    documentation = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert documentation
    first = documentation.strip().partition("\n\n")[0]
    assert first.rstrip().endswith((".", ":"))


@names(inspect.isclass)
def test_public_methods_and_properties_are_documented(
    module: ModuleType, name: str, thing: Any
) -> None:
    """So has every public method and property of a public class."""
    undocumented = [
        member
        for member, value in members(thing).items()
        if not member.startswith("__")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(thing, member))
    ]
    assert undocumented == []


@names(lambda thing: inspect.isclass(thing) and (attrs.has(thing) or has_constructor(thing)))
def test_parameters_and_fields_are_documented(module: ModuleType, name: str, thing: Any) -> None:
    """Each option of a constructor and each field is told in the docstring, by its name."""
    made_by_the_library = name in {
        "ResiliencePipeline",
        "ResilienceStream",
        "SyncResilienceStream",
        "Properties",
        "Flaky",
    }
    told = [] if made_by_the_library or issubclass(thing, Exception) else [thing]
    parameters = {name for each in told for name in inspect.signature(each).parameters}
    fields = set(field_names(thing))
    for each in sorted(parameters | {field for field in fields if not field.startswith("_")}):
        assert is_told(thing, each), each


@names(lambda thing: inspect.isclass(thing) and thing.__name__.endswith("Event"))
def test_events_are_frozen_and_carry_the_context(module: ModuleType, name: str, thing: Any) -> None:
    """What hooks, predicates and generators get is frozen, and has `context` among its fields."""
    fields = field_names(thing)
    assert "context" in fields
    event = thing(**dict.fromkeys(fields))
    for field in fields:
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            setattr(event, field, 1)


@names(inspect.isfunction)
def test_parameters_of_functions_are_documented(module: ModuleType, name: str, thing: Any) -> None:
    """So is each parameter of a public function."""
    for each in inspect.signature(thing).parameters:
        assert is_told(thing, each), each


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in describe()), "utf-8")
