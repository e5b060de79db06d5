"""The instances of one name in a registry: which are kept, and which have been let go.

Knows no lock: the registry holds its own around each call, and calls nobody's code meanwhile.

An instance is a cell, in which the handles of the instance find their pipeline. It is in one of
four places:

1. *Kept*: the registry has a handle of it, the one it gives to whoever asks.
2. *Lent*: let go by the registry while somebody still has a handle, or runs a call. Found again as
   long as that is so, so that nobody gets other state for the same instance.
3. *Returned*: nobody has it any more, and it has not been looked at yet whether it may be forgotten:
   a circuit may have opened in a last call.
4. Forgotten.

A cell goes from 2 to 3 in its `__del__`, which may run anywhere, within the registry's own lock
too: it does no more than append to a deque.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

from ._pipeline import ResiliencePipeline
from ._reloadable import PipelineHandle

Pipeline = ResiliencePipeline[Any]


#: How many may be asked whether they are idle for each that comes, on average.
_QUESTIONS = 16


class Instance:
    """The cell of one instance.

    Attributes:
        key: The name of the instance, or `None`.
        current: The pipeline that serves it.
        home: Where a lent one goes when nobody has it any more; `None` for one that is kept.
    """

    __slots__ = ("__weakref__", "current", "home", "key")

    def __init__(self, key: str | None, current: Pipeline) -> None:
        self.key = key
        self.current = current
        self.home: deque[tuple[str | None, Pipeline]] | None = None

    def __del__(self) -> None:
        if self.home is not None:
            self.home.append((self.key, self.current))


class Instances:
    """All instances of one name."""

    def __init__(self) -> None:
        #: The least recently used first.
        self._kept: OrderedDict[str | None, PipelineHandle[Any]] = OrderedDict()
        self._lent: WeakValueDictionary[str | None, Instance] = WeakValueDictionary()
        self._home: deque[tuple[str | None, Pipeline]] = deque()
        self._returned: dict[str | None, Pipeline] = {}
        #: How many more have to come before it is asked again which may be let go.
        self._patience = 1

    def find(self, key: str | None) -> PipelineHandle[Any] | None:
        """Give the handle of an instance, if there is such an instance, and note the use."""
        handle = self._kept.get(key)
        if handle is not None:
            self._kept.move_to_end(key)
            return handle
        # Looked for in this order: a lent one that goes in between has been returned by then.
        instance = self._lent.pop(key, None)
        self._collect()
        if instance is not None:
            instance.home = None
            return self._keep(instance)
        pipeline = self._returned.pop(key, None)
        return None if pipeline is None else self.put(key, pipeline)

    def put(self, key: str | None, pipeline: Pipeline) -> PipelineHandle[Any]:
        """Keep a new instance."""
        return self._keep(Instance(key, pipeline))

    def _keep(self, instance: Instance) -> PipelineHandle[Any]:
        handle: PipelineHandle[Any] = PipelineHandle(instance)
        self._kept[instance.key] = handle
        self._patience -= 1
        return handle

    def all(self) -> list[Instance]:
        """Every instance that somebody has or may get, the least recently used last."""
        kept = [_instance_of(handle) for handle in reversed(self._kept.values())]
        return kept + list(self._lent.values())

    @property
    def grown(self) -> bool:
        """Whether so many have come that it is to be asked which may be let go."""
        return self._patience <= 0

    def over(self, limit: int) -> list[tuple[str | None, PipelineHandle[Any]]]:
        """Those that may be let go while more than `limit` are kept, in the order to try them.

        The default instance stays, and so does the one used last.
        """
        self._patience = 1
        if self._excess(limit) <= 0:
            return []
        return [each for each in self._kept.items() if each[0] is not None][:-1]

    def let_go(self, key: str | None, handle: PipelineHandle[Any], limit: int) -> bool:
        """Keep an instance no longer; whether more are kept than the limit all the same.

        Nothing happens to one that has been used since, or is another one by now.
        """
        excess = self._excess(limit)
        if excess > 0 and self._kept.get(key) is handle and key != next(reversed(self._kept)):
            del self._kept[key]
            instance = _instance_of(handle)
            instance.home = self._home
            self._lent[key] = instance
            excess -= 1
        return excess > 0

    def put_off(self) -> None:
        """Leave it at that for a while, because all that were asked are in use.

        To ask all of them for each that comes would take ever more time the more there are.
        """
        self._patience = max(1, len(self._kept) // _QUESTIONS)

    def _excess(self, limit: int) -> int:
        return len(self._kept) - (None in self._kept) - limit

    def returned(self) -> list[tuple[str | None, Pipeline]]:
        """Those that nobody has any more, to be judged and then settled."""
        self._collect()
        return list(self._returned.items())

    def settle(self, key: str | None, pipeline: Pipeline, *, forget: bool) -> None:
        """Forget one that was returned, or keep it as the first to be tried again."""
        if self._returned.get(key) is pipeline:
            del self._returned[key]
            if not forget:
                self.put(key, pipeline)
                self._kept.move_to_end(key, last=False)
                self._patience += 1  # it was there all the time

    def reload(self, pipelines: dict[Instance, Pipeline]) -> None:
        """Put other pipelines into the cells; what was returned is not needed any more."""
        for instance, pipeline in pipelines.items():
            instance.current = pipeline
        self._home.clear()
        self._returned.clear()

    def _collect(self) -> None:
        while self._home:
            key, pipeline = self._home.popleft()
            if key not in self._kept and key not in self._lent:
                self._returned[key] = pipeline

    def __iter__(self) -> Iterator[tuple[str | None, Pipeline]]:
        """Iterate over the instances and what serves them, the default one first."""
        self._collect()
        found = [(each.key, each.current) for each in reversed(self.all())]
        found += self._returned.items()
        return iter(sorted(found, key=lambda each: each[0] is not None))


def circular(pipelines: Mapping[Instance, Pipeline]) -> Instance | None:
    """Find an instance that would come to nest itself, if `pipelines` were in place."""
    for instance, pipeline in pipelines.items():
        if instance in _nested_in(pipeline, pipelines):
            return instance
    return None


def _nested_in(pipeline: Pipeline, to_come: Mapping[Instance, Pipeline]) -> set[Instance]:
    found: set[Instance] = set()
    left = [pipeline]
    while left:
        for layer in left.pop()._layers:
            inner = layer.pipeline
            if isinstance(inner, PipelineHandle):
                instance = _instance_of(inner)
                if instance not in found:
                    found.add(instance)
                    left.append(to_come.get(instance, instance.current))
            elif inner is not None:
                left.append(inner)
    return found


def _instance_of(handle: PipelineHandle[Any]) -> Instance:
    instance = handle._cell
    assert isinstance(instance, Instance)
    return instance
