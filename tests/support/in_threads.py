"""Run a test of coroutines in a thread: its pipelines execute synchronously, and no event loop is there.

What it awaits is run by the thread itself, see `resilience_pipeline.runtime._threads`: the test, its callbacks and its
hooks wait for nothing but virtual clocks, which block the thread until the time has come. For the time of one test

- `execute`, `settle` and `execute_stream` go to their synchronous twins;
- callbacks, factories and hooks are dressed as plain functions that run what theirs give to its end;
- the test's thread counts as at work on every virtual clock it meets, as a task does between two waits;
- an attempt that is started in a thread of its own gets to its first wait before another one is, as a task does;
- whoever returns from a call lets those go first that the call has left alone in threads, so that a test finds them
  where it would find cancelled tasks: at their end, if they wait for nothing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from time import monotonic, sleep
from typing import Any, NoReturn, Self

import anyio
import anyio.lowlevel
import pytest

from resilience_pipeline import (
    ResiliencePipeline,
    SyncResilienceStream,
    _context,
    _invoke,
    _source,
    current_context,
)
from resilience_pipeline._cancellation import Cancelled
from resilience_pipeline.runtime import Child, Clock, _threads
from resilience_pipeline.runtime._here import Presence, presence, run
from resilience_pipeline.runtime._threads import ThreadRuntime
from resilience_pipeline.strategies import _base
from resilience_pipeline.testing import VirtualClock

_RECHECK = 0.0005  # seconds of real time until other threads are looked at again
_PATIENCE = 30.0


def run_in_thread(test: Callable[[], Awaitable[object]]) -> None:
    """Run a test function of coroutines in the calling thread."""
    stay, before = _Stay(), _busy_workers()
    with _dressed_up(stay):
        try:
            run(test())
        finally:
            stay.end()
    until = monotonic() + _PATIENCE
    while _busy_workers() > before:
        assert monotonic() < until, "the test has left threads behind that are at work"
        sleep(_RECHECK)


def _busy_workers() -> int:
    workers = _threads._workers
    return workers._count - len(workers._idle)


class _Stay:
    """The test's thread, at work on every clock it has met."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._at_work: list[Presence] = []

    def meet(self, clock: Clock | None) -> None:
        """Be at work on a clock from here to the end of the test."""
        at_work = presence(clock)
        if at_work is not None and at_work not in self._at_work and get_ident() == self._thread:
            at_work.enter()
            self._at_work.append(at_work)

    def let_others_go(self) -> None:
        """Wait until every other thread that is at work waits for something."""
        if get_ident() != self._thread:
            return
        for at_work in self._at_work:
            while at_work.count > 1:  # type: ignore[attr-defined]
                sleep(_RECHECK)

    def end(self) -> None:
        while self._at_work:
            self._at_work.pop().leave()


@contextmanager
def _dressed_up(stay: _Stay) -> Iterator[None]:
    """Have pipelines and clocks do what this module says, and give tests the equals of anyio's."""

    async def checkpoint() -> None:
        stay.let_others_go()

    equals: dict[object, object] = {
        anyio.sleep_forever: _sleep_forever,
        anyio.get_cancelled_exc_class: lambda: Cancelled,
        anyio.lowlevel.checkpoint: checkpoint,
        # What there is to be awaited, or to be read and closed as in a loop, is in a dress.
        _context.refuse_awaitable: lambda *_: None,
        _source.is_sync_source: _source.is_source,
        _base.close_here: lambda subject: run(_base.close(subject)),
    }
    with pytest.MonkeyPatch.context() as patch:
        _dress_pipelines(patch, stay)
        _dress_library(patch, stay)
        for module in list(sys.modules.values()):
            for original, equal in equals.items():
                name: str = original.__name__  # type: ignore[attr-defined]
                if vars(module).get(name) is original:
                    patch.setattr(module, name, equal)
        yield


def _dress_pipelines(patch: pytest.MonkeyPatch, stay: _Stay) -> None:
    """Have the methods for event loops go to their synchronous twins."""

    async def execute(pipeline: ResiliencePipeline[Any], *args: Any, **options: Any) -> Any:
        stay.meet(pipeline._clock)
        try:
            return pipeline.execute_sync(*args, **options)
        finally:
            stay.let_others_go()

    async def settle(pipeline: ResiliencePipeline[Any], *args: Any, **options: Any) -> Any:
        stay.meet(pipeline._clock)
        try:
            return pipeline.settle_sync(*args, **options)
        finally:
            stay.let_others_go()

    def execute_stream(pipeline: ResiliencePipeline[Any], *args: Any, **options: Any) -> Any:
        stay.meet(pipeline._clock)
        return _Stream(pipeline.execute_stream_sync(*args, **options), stay)

    for method in (execute, settle, execute_stream):
        patch.setattr(ResiliencePipeline, method.__name__, method)


def _dress_library(patch: pytest.MonkeyPatch, stay: _Stay) -> None:
    """Dress what callbacks and factories give, and keep to the order in which tasks would run."""
    host, call, spawn = VirtualClock._host, _invoke._call, ThreadRuntime.spawn
    make_source = _source.SyncSource.__init__

    def met_host(clock: VirtualClock, method: str) -> Any:
        stay.meet(clock)
        return host(clock, method)

    def plain_call(fn: Any, args: tuple[Any, ...]) -> Any:
        return call(_plain(fn), args)

    def spawn_first(runtime: ThreadRuntime, *args: Any) -> Child:
        child = spawn(runtime, *args)
        stay.let_others_go()
        return child

    def make_plain_source(source: _source.SyncSource, make: Any) -> None:
        make_source(source, lambda: _plainly(make()))

    patch.setattr(VirtualClock, "_host", met_host)
    patch.setattr(_invoke, "_call", plain_call)
    patch.setattr(ThreadRuntime, "spawn", spawn_first)
    patch.setattr(_source.SyncSource, "__init__", make_plain_source)


async def _sleep_forever() -> NoReturn:
    """Wait until nobody waits for the running attempt any more."""
    await current_context().runtime.waiter().wait()
    raise AssertionError("woken from for ever")


# ---- dresses ----------------------------------------------------------------------------------


def _plain(fn: Any) -> Any:
    """Make a plain function of one that gives something to be awaited.

    One that does not, which is a mistake in a loop, gives something to be awaited: the mistake in a thread.
    """

    @wraps(fn, updated=())
    def call(*args: Any) -> Any:
        made = fn(*args)
        return run(made) if inspect.isawaitable(made) else _Mistake(made)

    return call


class _Mistake(Awaitable[Any]):
    def __init__(self, made: object) -> None:
        self._made = made

    def __await__(self) -> NoReturn:
        raise AssertionError("nobody awaits in a thread")

    def __repr__(self) -> str:
        return repr(self._made)


def _plainly(made: Any) -> Any:
    if hasattr(type(made), "__aenter__"):
        return _Manager(made)
    if hasattr(type(made), "__aiter__"):
        return _Source(made)
    return _plainly(run(made)) if inspect.isawaitable(made) else made


class _Source:
    """An async iterable as an iterable."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._chunks: Any = None

    def __iter__(self) -> _Source:
        self._chunks = self._source.__aiter__()
        return self

    def __next__(self) -> Any:
        try:
            return run(self._chunks.__anext__())
        except StopAsyncIteration:
            pass
        raise StopIteration

    def close(self) -> None:
        for each in dict.fromkeys((self._chunks, self._source)):
            if hasattr(each, "aclose"):
                run(each.aclose())


class _Manager(_Source):
    """An async context manager as a plain one."""

    def __enter__(self) -> Any:
        return _plainly(run(self._source.__aenter__()))

    def __exit__(self, *error: object) -> Any:
        return run(self._source.__aexit__(*error))


class _Stream:
    """A stream of synchronous code as an async one."""

    def __init__(self, stream: SyncResilienceStream[Any], stay: _Stay) -> None:
        self._stream = stream
        self._stay = stay

    @property
    def committed(self) -> bool:
        return self._stream.committed

    def __aiter__(self) -> _Stream:
        iter(self._stream)
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._stream)
        except StopIteration:
            pass
        finally:
            self._stay.let_others_go()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:  # noqa: PYI036 - handed on
        self._stream.__exit__(*error)

    def __repr__(self) -> str:
        return repr(self._stream)
