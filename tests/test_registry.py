"""`ResiliencePipelineRegistry`: names, what `configure` is given and may do, building once.

The rows of the reference that are not here have nothing to hold: nothing of a registry's is disposed of
(RG-07, RG-09, RG-11, RG-12), and there are no reload tokens, `reload` is called (RG-13).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import resilience_pipeline
from resilience_pipeline import (
    MisuseError,
    OptionsError,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    ResiliencePipelineRegistry,
    Retry,
    Timeout,
    TimeoutRejectedError,
)
from resilience_pipeline.testing import VirtualClock
from support.calls import hang, ok


def registry_of(*names: str, **options: Any) -> ResiliencePipelineRegistry:
    registry = ResiliencePipelineRegistry(**options)
    for name in names:
        registry.add(name, lambda builder: builder.add_timeout(1))
    return registry


# ---- names --------------------------------------------------------------------------------------


def test_nothing_is_built_before_it_is_asked_for() -> None:
    """`add` calls no `configure`; the first `get` does."""
    built: list[str | None] = []
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: built.append(builder.name))
    assert built == []
    registry.get("a")
    assert built == ["a"]


def test_get_gives_the_same_object() -> None:
    """RG-05: configured once, and the same pipeline for ever after."""
    built: list[str | None] = []
    registry = ResiliencePipelineRegistry()
    first = registry.get_or_add("a", lambda builder: built.append(builder.name))
    assert registry.get_or_add("a", lambda builder: built.append("not me")) is first
    assert registry.get("a") is first
    assert built == ["a"]
    assert isinstance(first, ResiliencePipeline)


def test_one_pipeline_per_instance() -> None:
    """RG-01: a hundred instances fetched twice are a hundred pipelines, each configured once."""
    built: list[str | None] = []
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: built.append(builder.instance))
    keys = [str(number) for number in range(100)]
    pipelines = [registry.get("a", key) for _ in range(2) for key in keys]
    assert built == keys
    assert len(set(pipelines)) == 100
    assert pipelines[:100] == pipelines[100:]


def test_a_second_add_is_refused() -> None:
    """RG-02, RG-14: whoever comes first wins, so that a program can go before a library."""
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: builder.add_timeout(1))
    with pytest.raises(MisuseError, match="there is a pipeline named 'a' already: use get_or_add"):
        registry.add("a", lambda builder: builder.add_timeout(2))
    assert registry.get("a").strategies == (Timeout(1),)


def test_replace_replaces() -> None:
    """`replace=True` replaces what was not built yet, and reloads what was."""
    registry = registry_of("a")
    registry.add("a", lambda builder: builder.add_timeout(2), replace=True)
    pipeline = registry.get("a")
    assert pipeline.strategies == (Timeout(2),)
    registry.add("a", lambda builder: builder.add_timeout(3), replace=True)
    assert registry.get("a") is pipeline
    assert pipeline.strategies == (Timeout(3),)


def test_replace_adds_what_is_not_there() -> None:
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: builder.add_timeout(2), replace=True)
    assert registry.get("a").strategies == (Timeout(2),)


def test_an_unknown_name_is_a_key_error_that_lists_the_known_ones() -> None:
    """RG-04."""
    registry = registry_of("mail", "llm")
    for ask in (registry.get, registry.reload, registry.remove):
        with pytest.raises(
            KeyError, match="no pipeline named 'lm'; the known ones are: 'llm', 'mail'"
        ):
            ask("lm")
    with pytest.raises(KeyError, match="the known ones are: none yet"):
        ResiliencePipelineRegistry().get("lm")


def test_names_can_be_asked_for_and_iterated_over() -> None:
    """`in` and iteration go by names, built or not; an empty registry is a registry all the same."""
    registry = registry_of("b", "a")
    registry.get("a")
    assert "a" in registry
    assert "b" in registry
    assert "c" not in registry
    assert list(registry) == ["b", "a"]
    assert ResiliencePipelineRegistry()
    assert repr(registry) == "<ResiliencePipelineRegistry 'b', 'a'>"
    assert repr(ResiliencePipelineRegistry()) == "<ResiliencePipelineRegistry empty>"


def test_names_may_change_while_they_are_iterated_over() -> None:
    """Iteration goes over the names there were."""
    registry = registry_of("a", "b")
    for name in registry:
        registry.remove(name)
    assert list(registry) == []


@pytest.mark.anyio
async def test_what_was_removed_works_on() -> None:
    """RG-16: a removed name is unknown, and its pipelines, nested ones too, still work."""
    registry = registry_of("a")
    pipeline = registry.get("a")
    other = ResiliencePipelineRegistry()
    other.add("outer", lambda builder: builder.add_pipeline(pipeline))
    outer = other.get("outer")
    registry.remove("a")
    other.remove("outer")
    assert "a" not in registry
    with pytest.raises(KeyError):
        registry.get("a")
    assert await pipeline.execute(ok) == 1
    assert await outer.execute(ok) == 1
    registry.add("a", lambda builder: builder.add_timeout(2))
    assert registry.get("a") is not pipeline


@pytest.mark.parametrize("name", [None, 1, b"a"])
def test_a_name_is_text(name: Any) -> None:
    registry = ResiliencePipelineRegistry()
    for add in (registry.add, registry.get_or_add):
        with pytest.raises(MisuseError, match="a name must be text, got"):
            add(name, lambda builder: None)


def test_an_instance_is_text() -> None:
    """The builder's own check says so, and nothing is left behind."""
    registry = registry_of("a")
    number: Any = 1
    with pytest.raises(OptionsError, match="instance must be text or None, got 1"):
        registry.get("a", number)
    assert registry.health() == {"a": []}


# ---- configure ----------------------------------------------------------------------------------


def test_the_builder_comes_named() -> None:
    """RG-03: `configure` sees the name and the instance, and the pipeline has them."""
    seen: list[tuple[str | None, str | None]] = []
    registry = ResiliencePipelineRegistry()
    registry.add("a", lambda builder: seen.append((builder.name, builder.instance)))
    pipeline = registry.get("a", "host-1")
    assert seen == [("a", "host-1")]
    assert (pipeline.name, pipeline.instance) == ("a", "host-1")
    assert repr(pipeline) == "ResiliencePipelineBuilder(name='a', instance='host-1').build()"
    assert (registry.get("a").name, registry.get("a").instance) == ("a", None)


def test_configure_may_name_the_pipeline() -> None:
    """A name that `configure` gives the builder wins; it stays known under the registry's."""

    def configure(builder: ResiliencePipelineBuilder) -> None:
        builder.name = "payments"
        builder.add_timeout(1)

    registry = ResiliencePipelineRegistry()
    registry.add("a", configure)
    assert registry.get("a", "x").name == "payments"
    assert registry.get("a", "x").instance == "x"
    assert list(registry) == ["a"]


def test_configure_may_return_the_builder_or_nothing() -> None:
    """Chained and statement style, as with a builder elsewhere."""

    def statements(builder: ResiliencePipelineBuilder) -> None:
        builder.add_retry(max_retry_attempts=1)
        builder.add_timeout(1)

    registry = ResiliencePipelineRegistry()
    registry.add("statements", statements)
    registry.add("chained", lambda b: b.add_retry(max_retry_attempts=1).add_timeout(1))
    expected = (Retry(max_retry_attempts=1), Timeout(1))
    assert registry.get("statements").strategies == expected
    assert registry.get("chained").strategies == expected


@pytest.mark.anyio
async def test_configure_may_return_a_builder_of_its_own() -> None:
    """It takes name, instance and clock from the registry where it says nothing else."""
    clock = VirtualClock(autojump=True)
    registry = ResiliencePipelineRegistry(clock=clock)
    mine = ResiliencePipelineBuilder().add_timeout(5)
    registry.add("a", lambda builder: mine)
    registry.add("b", lambda builder: ResiliencePipelineBuilder("c", instance="i").add_timeout(5))
    one, two, named = registry.get("a"), registry.get("a", "x"), registry.get("b", "x")
    assert (one.name, one.instance, two.name, two.instance) == ("a", None, "a", "x")
    assert (named.name, named.instance) == ("c", "i")
    with pytest.raises(TimeoutRejectedError):
        await one.execute(hang)
    assert clock.now() == 5
    assert mine.name is None


@pytest.mark.anyio
async def test_the_clock_drives_all_pipelines() -> None:
    clock = VirtualClock(autojump=True)
    registry = registry_of("a", "b", clock=clock)
    for name in registry:
        with pytest.raises(TimeoutRejectedError):
            await registry.get(name).execute(hang)
    assert clock.now() == 2


def test_listeners_hear_of_all_pipelines() -> None:
    """What a registry is given its builders are given, and those that `configure` returns instead."""
    heard: list[Any] = []
    registry = registry_of("a", "b", listeners=iter([heard.append]))
    mine: list[Any] = []
    registry.add("c", lambda _: ResiliencePipelineBuilder(listeners=[mine.append]))
    for name in registry:
        registry.get(name).execute_sync(lambda: 1)
    assert {event.pipeline_name for event in heard} == {"a", "b", "c"}
    assert {event.pipeline_name for event in mine} == {"c"}


@pytest.mark.parametrize("listeners", [print, "print", [1]])
def test_bad_listeners_are_refused_at_once(listeners: Any) -> None:
    with pytest.raises(OptionsError, match="listeners"):
        ResiliencePipelineRegistry(listeners=listeners)


@pytest.mark.parametrize("configure", [None, 1, "a", ResiliencePipelineBuilder])
def test_configure_must_be_a_function(configure: Any) -> None:
    registry = registry_of("a")
    for use in (registry.add, registry.get_or_add):
        with pytest.raises(MisuseError, match="configure must be a function of a builder, got"):
            use("b", configure)
    if configure is not None:
        with pytest.raises(MisuseError, match="configure must be a function of a builder, got"):
            registry.reload("a", configure)
    assert list(registry) == ["a"]


def test_what_configure_returns_must_be_a_builder() -> None:
    """A built pipeline is refused: it would be one and the same for all instances."""
    registry = ResiliencePipelineRegistry()
    built: Any = lambda builder: builder.add_timeout(1).build()  # noqa: E731
    registry.add("a", built)
    with pytest.raises(MisuseError, match="configure of 'a' must be a plain function that returns"):
        registry.get("a")


def test_an_async_configure_is_refused() -> None:
    """Its coroutine is closed, so that nothing is said to have never been awaited."""
    coroutines: list[Any] = []

    async def configure(builder: object) -> None: ...

    def remembered(builder: object) -> Any:
        coroutines.append(configure(builder))
        return coroutines[0]

    registry = ResiliencePipelineRegistry()
    registry.add("a", remembered)
    with pytest.raises(MisuseError, match="must be a plain function"):
        registry.get("a")
    assert inspect.getcoroutinestate(coroutines[0]) == inspect.CORO_CLOSED


def test_a_failing_configure_comes_out_and_is_tried_again() -> None:
    """What it raises is raised by `get`; the next one who asks tries anew."""
    errors: list[Exception] = [ZeroDivisionError()]

    def configure(builder: ResiliencePipelineBuilder) -> None:
        if errors:
            raise errors.pop()

    registry = ResiliencePipelineRegistry()
    registry.add("a", configure)
    with pytest.raises(ZeroDivisionError):
        registry.get("a")
    assert registry.health() == {"a": []}
    assert registry.get("a") is registry.get("a")


# ---- pipelines that are made of others ----------------------------------------------------------


@pytest.mark.anyio
async def test_configure_may_ask_for_another_pipeline() -> None:
    registry = registry_of("inner")
    registry.add("outer", lambda b: b.add_retry().add_pipeline(registry.get("inner")))
    outer = registry.get("outer")
    assert outer.strategies == (Retry(), Timeout(1))
    assert await outer.execute(ok) == 1


def test_configure_may_not_ask_for_its_own_pipeline() -> None:
    """It would wait for itself; another instance is another pipeline."""
    registry = ResiliencePipelineRegistry()

    def configure(builder: ResiliencePipelineBuilder) -> None:
        if builder.instance is not None:
            builder.add_pipeline(registry.get("a", builder.instance[1:] or None))
        else:
            builder.add_timeout(1)

    registry.add("a", configure)
    assert registry.get("a", "xyz").strategies == (Timeout(1),)
    registry.add("b", lambda builder: builder.add_pipeline(registry.get("b")))
    registry.add("c", lambda builder: builder.add_pipeline(registry.get("d", "x")))
    registry.add("d", lambda builder: builder.add_pipeline(registry.get("c")))
    with pytest.raises(
        MisuseError, match="building 'b' from within its own configure can never end"
    ):
        registry.get("b")
    with pytest.raises(MisuseError, match="building 'c' from within"):
        registry.get("c")
    with pytest.raises(MisuseError, match="building 'd', instance 'x', from within"):
        registry.get("d", "x")


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "2"])
def test_max_instances_is_a_count(bad: Any) -> None:
    with pytest.raises(OptionsError, match="max_instances must be a whole number of at least 1"):
        ResiliencePipelineRegistry(max_instances=bad)


def test_all_bad_options_are_reported_at_once() -> None:
    bad: Any = 0
    with pytest.raises(OptionsError) as caught:
        ResiliencePipelineRegistry(max_instances=bad, clock=bad)
    assert len(caught.value.problems) == 2


def test_the_builder_says_what_it_is_called() -> None:
    """Which `configure` may want to know, and may change until the first `build`."""
    builder = ResiliencePipelineBuilder("a", instance="b")
    assert (builder.name, builder.instance) == ("a", "b")
    builder.name = "c"
    assert builder.build().name == "c"
    with pytest.raises(MisuseError, match="nothing can be renamed after build"):
        builder.name = "d"
    number: Any = 1
    other = ResiliencePipelineBuilder("a")
    with pytest.raises(OptionsError, match="name must be text or None, got 1"):
        other.name = number
    assert other.name == "a"


def test_a_registry_is_imported_from_the_package() -> None:
    """When it is first asked for; other names that are not there are still told so."""
    assert resilience_pipeline.ResiliencePipelineRegistry is ResiliencePipelineRegistry
    assert ResiliencePipelineRegistry.__module__ == "resilience_pipeline"
    assert "ResiliencePipelineRegistry" in dir(resilience_pipeline)
    with pytest.raises(AttributeError, match="has no attribute 'ResiliencePipelineRegistri'"):
        resilience_pipeline.ResiliencePipelineRegistri  # type: ignore[attr-defined]  # noqa: B018
