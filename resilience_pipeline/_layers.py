"""What a pipeline is made of, and how that is written as the calls that built it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._options import written
from .strategies import Strategy, SupportsHealth

if TYPE_CHECKING:
    from ._pipeline import ResiliencePipeline

#: Seconds that a stream's source may take to close.
DEFAULT_CLOSE_TIMEOUT = 5.0


class Layer:  # no class of attrs', nor is the next one: an import pays a third of a ms for each
    """One entry of a builder: a strategy, or a nested pipeline with all of its own."""

    __slots__ = ("pipeline", "strategies")

    def __init__(
        self,
        strategies: tuple[Strategy[Any], ...],
        pipeline: ResiliencePipeline[Any] | None = None,
    ) -> None:
        self.strategies = strategies
        self.pipeline = pipeline

    def __str__(self) -> str:
        """Write the builder's call."""
        if self.pipeline is not None:
            return f".add_pipeline({self.pipeline!r})"
        (strategy,) = self.strategies
        kind, made = type(strategy), repr(strategy)
        if kind.__module__ != __package__:
            return f".add({made})"
        snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in kind.__name__)
        return f".add{snake}{made.removeprefix(kind.__name__)}"


class Part:
    """What can report on its state: a bound strategy, or a nested pipeline as a whole."""

    __slots__ = ("reporter", "strategy", "strategy_name")

    def __init__(
        self,
        strategy_name: str,
        strategy: Strategy[Any] | None,
        reporter: SupportsHealth | ResiliencePipeline[Any],
    ) -> None:
        self.strategy_name = strategy_name
        self.strategy = strategy
        self.reporter = reporter


def described(
    name: str | None, instance: str | None, close_timeout: object, layers: Sequence[Layer]
) -> str:
    """Write the calls that lead to a builder."""
    arguments = [] if name is None else [f"name={name!r}"]
    if instance is not None:
        arguments.append(f"instance={instance!r}")
    if close_timeout != DEFAULT_CLOSE_TIMEOUT:
        arguments.append(f"close_timeout={written(close_timeout)}")
    return f"ResiliencePipelineBuilder({', '.join(arguments)}){''.join(map(str, layers))}"


def makes_attempts(strategy: object) -> bool:
    """Whether a strategy of the library's, or of a user's, notes its tries in the history."""
    return getattr(strategy, "makes_attempts", False)


def runs_in_tasks(strategy: object) -> bool:
    """Whether a strategy runs the inside in tasks that end before a stream's source does."""
    return getattr(strategy, "runs_in_tasks", False)
