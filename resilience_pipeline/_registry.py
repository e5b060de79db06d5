"""Named pipelines: built when first asked for, once, and reloaded while they serve.

One lock guards the table; it is held for a few instructions and never while `configure` runs. Who
builds, or reloads, says so in the table, and whoever needs the result waits for it.

Interleavings that were thought through:

1. Two threads ask for one instance: the first builds, the second waits and looks again. If the
   build failed, the second one tries for itself.
2. A reload while an instance is being built by the old `configure`: the entry's version has moved
   on when the build is done, so the pipeline is dropped and built once more.
3. An instance appears while a reload builds the others: the reload looks again before it puts
   anything in place, and builds that one too.
4. A removal while an instance is being built or reloaded: who asked before gets what they asked for;
   the registry has forgotten it.
5. Waits in a circle, from within `configure`: see `_works`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Never, TypeAlias

from ._builder import ResiliencePipelineBuilder, is_clock
from ._durations import Duration
from ._errors import MisuseError, OptionsError
from ._health import health_of, is_idle
from ._instances import Instance, Instances, circular
from ._locks import Lock
from ._outcome import Failure
from ._pipeline import ResiliencePipeline
from ._works import WaitingRoom, Work
from .runtime import Clock
from .telemetry import Listener, ReloadEvent, ReloadFailedEvent

if TYPE_CHECKING:
    from os import PathLike

Configure: TypeAlias = Callable[
    [ResiliencePipelineBuilder[Never]], ResiliencePipelineBuilder[Any] | None
]


class _Entry:
    """One name.

    Attributes:
        configure: What fills the builder.
        version: Counts the reloads.
        instances: What has been built.
        builds: The builds that are going on, by instance.
        reload: The reload that is going on.
    """

    __slots__ = ("builds", "configure", "instances", "reload", "version")

    def __init__(self, configure: Configure) -> None:
        self.configure = configure
        self.version = 0
        self.instances = Instances()
        self.builds: dict[str | None, Work] = {}
        self.reload: Work | None = None


class _Build(Work):
    """The build of one instance, by what its entry says now."""

    __slots__ = ("configure", "entry", "instance", "name", "version")

    def __init__(self, entry: _Entry, name: str, instance: str | None) -> None:
        super().__init__(_described("building", name, instance))
        self.entry = entry
        self.name = name
        self.instance = instance
        self.configure = entry.configure
        self.version = entry.version


class ResiliencePipelineRegistry:
    """Pipelines by name, built when first asked for and shared from then on.

    Iterating over it gives the names, `name in registry` says whether there is one. All methods may
    be called from any thread and, as none of them waits for anything but a `configure` that runs,
    from within an event loop.

    Args:
        max_instances: Instances of one name to keep, at least 1, the default one not counted;
            `None` for no bound. Beyond it the least recently used are let go that are idle: that
            have counted, opened and lent nothing that a new one would not know.
        clock: A clock for all pipelines, see `ResiliencePipelineBuilder`.
        listeners: Listeners for all pipelines, see `ResiliencePipelineBuilder`.

    Raises:
        OptionsError: One or more options have bad values.

    Example:
        >>> registry = ResiliencePipelineRegistry()
        >>> registry.add("llm", lambda builder: builder.add_retry().add_timeout("10s"))
        >>> llm = registry.get("llm")
    """

    def __init__(
        self,
        *,
        max_instances: int | None = None,
        clock: Clock | None = None,
        listeners: Iterable[Listener] = (),
    ) -> None:
        _check_options(max_instances, clock)
        self._max_instances = max_instances
        # A list that is changed later, or can be read only once, is the same for all builders.
        once = isinstance(listeners, Iterable) and not isinstance(listeners, str)
        self._options: dict[str, Any] = {
            "clock": clock,
            "listeners": tuple(listeners) if once else listeners,
        }
        ResiliencePipelineBuilder(**self._options)  # so that bad ones are refused here
        self._lock = Lock()
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, object] = {}
        self._waiting = WaitingRoom(self._lock)

    # ---- names

    def add(self, name: str, configure: Configure, *, replace: bool = False) -> None:
        """Say how the pipelines of a name are built; nothing is built yet.

        Args:
            name: The name, which the pipelines take too unless `configure` gives them another.
            configure: A plain function that gets a builder with name, instance, clock and listeners
                and adds strategies to it. It may set `builder.name`, and it may return a builder of
                its own, which takes from the given one whatever it leaves open.
            replace: Whether `name` may be there already. Its pipelines are then built anew at once,
                as by `reload`.

        Raises:
            MisuseError: There is such a name, or `configure` is no function.
        """
        _check_name(name)
        _check_configure(configure)
        with self._lock:
            taken = name in self._entries
            if not taken:
                self._entries[name] = _Entry(configure)
        if not taken:
            return
        if not replace:
            msg = (
                f"there is a pipeline named {name!r} already: use get_or_add(), reload(), or "
                f"add(..., replace=True)"
            )
            raise MisuseError(msg)
        self._reload({name: configure}, add=True)

    def get(self, name: str, instance: str | None = None) -> ResiliencePipeline:
        """Give the pipeline of a name, built now if it is asked for the first time.

        It is built exactly once, however many threads ask at once; they wait for the first. Later
        on it is the same object, which stays valid through every `reload`. When `configure` fails
        its error comes out here, and the next one who asks tries again.

        Args:
            name: The name.
            instance: Keeps state apart: per host, tenant or model, say.

        Raises:
            KeyError: There is no such name; the known ones are listed.
            MisuseError: `configure` asked for the very pipeline it was to configure, or gave
                neither `None` nor a builder.
        """
        return self._get(name, instance, None)

    def _get(
        self, name: str, instance: str | None, configure: Configure | None
    ) -> ResiliencePipeline:
        while True:
            build: _Build | None = None
            with self._lock:
                entry = self._entry(name, configure)
                pipeline: ResiliencePipeline | None = entry.instances.find(instance)
                other = None if pipeline is not None else entry.builds.get(instance)
                if other is not None:
                    self._waiting.join(other)
                elif pipeline is None:
                    build = entry.builds[instance] = _Build(entry, name, instance)
            if other is not None:
                self._waiting.wait(other)
            elif build is not None:
                pipeline = self._build_first(build)
            if pipeline is not None:
                if self._max_instances is not None and entry.instances.grown:
                    self._let_go(entry, self._max_instances)
                return pipeline

    def get_or_add(
        self, name: str, configure: Configure, instance: str | None = None
    ) -> ResiliencePipeline:
        """Give the pipeline of a name; where there is no such name, add it first.

        Args:
            name: The name.
            configure: As for `add`; not looked at if there is such a name.
            instance: As for `get`.
        """
        _check_name(name)
        _check_configure(configure)
        return self._get(name, instance, configure)

    def remove(self, name: str) -> None:
        """Forget a name; whoever has its pipelines can go on using them.

        Raises:
            KeyError: There is no such name; the known ones are listed.
        """
        with self._lock:
            self._entry(name)
            del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(tuple(self._entries))

    def __repr__(self) -> str:
        return f"<ResiliencePipelineRegistry {', '.join(map(repr, self)) or 'empty'}>"

    # ---- reloading

    def reload(self, name: str, configure: Configure | None = None) -> None:
        """Build the pipelines of a name anew, all instances of it, and put them in place.

        The objects that `get` gave stay valid: their next calls, streams and attempts by way of
        `add_pipeline` go through the new strategies, whose state is fresh; calls in flight end on
        the old ones. All instances or none: if `configure` fails for one, its error comes out, and
        the old ones serve on. Listeners are told of both, for each instance. A name that has not been used yet stays unbuilt.

        Args:
            name: The name.
            configure: As for `add`; by default the one there is is called again.

        Raises:
            KeyError: There is no such name; the known ones are listed.
            MisuseError: It is called from within the `configure` of the same name, or the name
                would come to nest itself.
        """
        if configure is not None:
            _check_configure(configure)
        self._reload({name: configure})

    def _reload(self, changes: Mapping[str, Configure | None], *, add: bool = False) -> None:
        """Build the pipelines of some names anew, and put all of them in place or none.

        With `add` a name that has gone meanwhile is added again.
        """
        with ExitStack() as claims:
            # In one order, so that two reloads of several names never wait for each other.
            entries = {
                name: claims.enter_context(self._claim(name, changes[name] if add else None))
                for name in sorted(changes)
            }
            wanted = {
                name: entry.configure if (new := changes[name]) is None else new
                for name, entry in entries.items()
            }
            built: dict[str, dict[Instance, ResiliencePipeline]] = {name: {} for name in entries}
            told: list[Instance] = []
            try:
                while missing := self._put_in_place(entries, wanted, built):
                    for name, instance in missing:
                        told.append(instance)
                        _tell_of_reload(instance)
                        built[name][instance] = self._build(name, instance.key, wanted[name])
            except Exception as error:
                for instance in told:
                    _tell_of_failure(instance, error)
                raise

    def _put_in_place(
        self,
        entries: Mapping[str, _Entry],
        wanted: Mapping[str, Configure],
        built: Mapping[str, dict[Instance, ResiliencePipeline]],
    ) -> list[tuple[str, Instance]]:
        """Put what was built in place; or give what is missing yet, and change nothing."""
        with self._lock:
            missing = [
                (name, instance)
                for name, entry in entries.items()
                for instance in entry.instances.all()
                if instance not in built[name]
            ]
            if not missing:
                _refuse_circles(built.values())
                for name, entry in entries.items():
                    entry.configure = wanted[name]
                    entry.version += 1
                    entry.instances.reload(built[name])
        return missing

    @contextmanager
    def _claim(self, name: str, missing: Configure | None) -> Generator[_Entry, None, None]:
        """Be the only one who reloads a name, which is added if it is `missing`."""
        mine = Work(_described("reloading", name))
        while True:
            with self._lock:
                entry = self._entry(name, missing)
                other = entry.reload
                if other is None:
                    entry.reload = mine
                    break
                self._waiting.join(other)
            self._waiting.wait(other)
        try:
            yield entry
        finally:
            with self._lock:
                entry.reload = None
            mine.done.set()

    # ---- configuration

    def register(self, name: str, value: object) -> None:
        """Give a function, predicate, limiter or strategy class a name for configuration files.

        Args:
            name: What stands in the file. A later one replaces an earlier one, for the files that
                are loaded from then on.
            value: What it stands for.

        Raises:
            MisuseError: `name` is no text.
        """
        _check_name(name)
        with self._lock:
            self._names[name] = value

    def load(self, configuration: Mapping[str, Any]) -> None:
        """Add, or change, the pipelines that a mapping describes; see the guide on configuration.

        `{"pipelines": {NAME: {"strategies": [{"type": "retry", ...}, ...]}}}`: `type` is a method
        of the builder without its `add_`, or the name or import path of a strategy class, and the
        rest are its options. Where an option takes a function, an exception type or any other
        object, a text stands for what was registered under it, for `"package.module:attribute"`,
        or for an exception of Python's or this library's.

        Names that are there already are reloaded unless they come to the same; what the mapping
        does not name stays as it is.

        Args:
            configuration: The mapping.

        Raises:
            OptionsError: There are mistakes. All of them are listed, each with its path, and
                nothing is changed.
        """
        self._load(configuration, "the configuration")

    def load_toml(self, path: str | PathLike[str]) -> None:
        """Do what `load` does with the contents of a TOML file.

        Args:
            path: The file.

        Raises:
            OptionsError: There are mistakes, in the TOML or in what it says. All of them are
                listed, each with its path, and nothing is changed.
            OSError: The file can't be read.
        """
        from pathlib import Path

        self._load_contents(Path(path).read_bytes(), str(path))

    def _load_contents(self, contents: bytes, source: str) -> None:
        from ._configuration import parsed

        self._load(parsed(contents, source), source)

    def _load(self, configuration: Mapping[str, Any], source: str) -> None:
        from ._configuration import read

        with self._lock:
            names, known = dict(self._names), set(self._entries)
        plans = read(configuration, source=source, names=names, known=known, find=self.get)
        with self._lock:
            added = {name: _Entry(plan) for name, plan in plans.items() if name not in self}
            changed = {
                name: plan
                for name, plan in plans.items()
                if name not in added and self._entries[name].configure != plan
            }
            self._entries |= added
        try:
            if changed:
                self._reload(changed)
        except BaseException:
            with self._lock:
                for name, entry in added.items():
                    if self._entries.get(name) is entry:
                        del self._entries[name]
            raise

    def watch_toml(
        self, path: str | PathLike[str], *, interval: Duration = "1s"
    ) -> AbstractContextManager[None]:
        """Load a TOML file, and load it again whenever it has changed, for the time of a `with` block.

        A thread of its own looks at the file. A change is loaded once the file has stayed the same
        from one look to the next, so that no half-written one is. When it is wrong, or can't be
        read, the pipelines stay as they are and an error is logged, by the logger
        `resilience_pipeline`; so is each change that was loaded, as information.

        Args:
            path: The file.
            interval: Seconds (any duration form) between two looks, above zero.

        Raises:
            OptionsError: (on entering the block) as for `load_toml`; or `interval` is bad.
            OSError: (on entering the block) the file can't be read.
        """
        from ._watching import watching

        return watching(self._load_contents, path, interval)

    # ---- looking

    def health(self) -> dict[str, list[dict[str, Any]]]:
        """Show the state of everything that has been built as plain data, ready for `json.dumps`.

        Returns:
            For each name the instances that have been built, each a mapping of `"instance"`,
            `"pipeline"` (its name) and `"strategies"`: the strategies that keep state, outermost
            first, nested pipelines included. Each has `"strategy"` (its name), `"type"`,
            `"pipeline"` and what it says about itself: `"state"`, `"throughput"`, `"failures"`,
            `"failure_rate"`, `"opened_at"`, `"blocked_until"` and `"retry_after"` for a circuit
            breaker, `"permits"`, `"free"` and `"queued"` for a concurrency limiter, `"available"`,
            `"retry_after"` and `"queued"` for a rate limiter, `"held"` (under how many keys) and
            `"queued"` for a lock; and `"idle"`, whether it may be forgotten.
        """
        with self._lock:
            found = [(name, list(entry.instances)) for name, entry in list(self._entries.items())]
        return {
            name: [
                {"instance": key, "pipeline": pipeline.name, "strategies": health_of(pipeline)}
                for key, pipeline in instances
            ]
            for name, instances in found
        }

    # ---- building

    def _entry(self, name: str, missing: Configure | None = None) -> _Entry:
        """Find the entry of a name, or make one if it can be said what it would be."""
        entry = self._entries.get(name)
        if entry is not None:
            return entry
        if missing is not None:
            entry = self._entries[name] = _Entry(missing)
            return entry
        known = ", ".join(map(repr, sorted(self._entries))) or "none yet"
        msg = f"there is no pipeline named {name!r}; the known ones are: {known}"
        raise KeyError(msg)

    def _build_first(self, build: _Build) -> ResiliencePipeline | None:
        """Build an instance for all who ask; `None` if it was reloaded meanwhile."""
        entry, instance = build.entry, build.instance
        try:
            pipeline = self._build(build.name, instance, build.configure)
            with self._lock:
                if entry.version == build.version:
                    return entry.instances.put(instance, pipeline)
        finally:
            with self._lock:
                del entry.builds[instance]
            build.done.set()
        return None

    def _build(self, name: str, instance: str | None, configure: Configure) -> ResiliencePipeline:
        given = ResiliencePipelineBuilder(name, instance=instance, **self._options)
        answer: object = configure(given)
        if answer is None or answer is given:
            return given.build()
        if isinstance(answer, ResiliencePipelineBuilder):
            return _completed(answer, given).build()
        if hasattr(answer, "close"):
            answer.close()  # a coroutine
        msg = (
            f"configure of {name!r} must be a plain function that returns None or a builder, not "
            f"{answer!r}"
        )
        raise MisuseError(msg)

    def _let_go(self, entry: _Entry, limit: int) -> None:
        """Let idle instances go while there are too many, and forget those that nobody has."""
        with self._lock:
            candidates = entry.instances.over(limit)
        more = bool(candidates)
        while more and candidates:
            key, handle = candidates.pop(0)
            if is_idle(handle):
                with self._lock:
                    more = entry.instances.let_go(key, handle, limit)
            del handle  # with it goes one that nobody else has
        del candidates
        with self._lock:
            if more:
                entry.instances.put_off()
            returned = entry.instances.returned()
        for key, pipeline in returned:
            idle = is_idle(pipeline)
            with self._lock:
                entry.instances.settle(key, pipeline, forget=idle)


def _tell_of_reload(instance: Instance) -> None:
    outlet = instance.current._outlet
    if outlet.wants(ReloadEvent):
        outlet.report(ReloadEvent())


def _tell_of_failure(instance: Instance, error: Exception) -> None:
    outlet = instance.current._outlet
    if outlet.wants(ReloadFailedEvent):
        outlet.report(ReloadFailedEvent(outcome=Failure(error)))


def _described(doing: str, name: str, instance: str | None = None) -> str:
    return f"{doing} {name!r}" + ("" if instance is None else f", instance {instance!r},")


def _completed(
    answer: ResiliencePipelineBuilder[Any], given: ResiliencePipelineBuilder[Any]
) -> ResiliencePipelineBuilder[Any]:
    """Give a copy of a builder that has from the registry what it leaves open."""
    completed = copy(answer)
    completed._name = given._name if answer._name is None else answer._name
    completed._instance = given._instance if answer._instance is None else answer._instance
    completed._clock = given._clock if answer._clock is None else answer._clock
    completed._listeners = (*answer._listeners, *given._listeners)
    return completed


def _refuse_circles(built: Iterable[Mapping[Instance, ResiliencePipeline]]) -> None:
    instance = circular({key: pipeline for each in built for key, pipeline in each.items()})
    if instance is not None:
        msg = f"{instance.current.name!r} would nest itself by way of add_pipeline()"
        raise MisuseError(msg)


def _check_options(max_instances: Any, clock: object) -> None:
    problems: list[str] = []
    whole = isinstance(max_instances, int) and not isinstance(max_instances, bool)
    if max_instances is not None and not (whole and max_instances >= 1):
        problems.append(
            f"max_instances must be a whole number of at least 1, or None, got {max_instances!r}"
        )
    if clock is not None and not is_clock(clock):
        problems.append(f"clock must be a clock as the builder takes it, or None, got {clock!r}")
    if problems:
        headline = "bad options for ResiliencePipelineRegistry: "
        raise OptionsError(headline + "; ".join(problems), tuple(problems))


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        msg = f"a name must be text, got {name!r}"
        raise MisuseError(msg)


def _check_configure(configure: object) -> None:
    if isinstance(configure, type) or not callable(configure):
        msg = f"configure must be a function of a builder, got {configure!r}"
        raise MisuseError(msg)
