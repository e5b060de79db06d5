"""What is called to close a source, and where the errors of closing go."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest

from support.streaming import (
    B,
    Closable,
    Managed,
    Sources,
    collect,
    drain,
    drain_within,
    leaves,
    tick,
)

pytestmark = pytest.mark.anyio


# ---- shapes -----------------------------------------------------------------------------------


class Shape:
    """A source with `__aiter__` and `__anext__`; what closes it is added by the classes below."""

    def __init__(self) -> None:
        self.closed = 0

    def __aiter__(self) -> Shape:
        return self

    async def __anext__(self) -> int:
        return 1

    async def _close_later(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.closed += 1

    def _close_now(self) -> None:
        self.closed += 1


class WithAclose(Shape):
    async def aclose(self) -> None:
        await self._close_later()


class WithAsyncClose(Shape):
    async def close(self) -> None:
        await self._close_later()


class WithPlainClose(Shape):
    def close(self) -> None:
        self._close_now()


class WithPlainCloseOfAnAwaitable(Shape):
    def close(self) -> Awaitable[None]:
        return self._close_later()


class WithBoth(Shape):
    async def aclose(self) -> None:
        await self._close_later()

    def close(self) -> None:
        raise AssertionError("aclose comes first")


class WithAcloseThatIsNoFunction(Shape):
    aclose = None

    def close(self) -> None:
        self._close_now()


SHAPES = [
    WithAclose,
    WithAsyncClose,
    WithPlainClose,
    WithPlainCloseOfAnAwaitable,
    WithBoth,
    WithAcloseThatIsNoFunction,
]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_source_is_closed_the_way_it_closes(shape: type[Shape]) -> None:
    """Case ST-09: `aclose` if callable, else `close`; what it returns is awaited if it can be."""
    source = shape()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with B().build().execute_stream(lambda: source) as stream:
            await anext(stream)
    assert source.closed == 1


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_discarded_source_is_closed_the_way_it_closes(shape: type[Shape]) -> None:
    """Case ST-09: the same rule for what is discarded."""
    sources = [shape(), shape()]
    made = iter(sources)
    pipeline = B().add_retry(max_retry_attempts=1, delay=0, should_handle=_always).build()
    async with pipeline.execute_stream(lambda: next(made)) as stream:
        await anext(stream)
        assert [source.closed for source in sources] == [1, 0]
    assert [source.closed for source in sources] == [1, 1]


def _always(event: Any) -> bool:
    return True


async def test_a_source_without_any_way_of_closing_is_left_alone() -> None:
    """Case ST-09: nothing at all is fine."""
    async with B().build().execute_stream(Shape) as stream:
        assert await anext(stream) == 1


@pytest.mark.parametrize(
    "script", [["a", "b"], ["a"], ["a", OSError()]], ids=["left early", "read", "failed"]
)
async def test_the_iterable_and_its_iterator_are_both_closed(script: list[Any]) -> None:
    """Streams: of an async iterable and the iterator it gave, both are closed where both can be."""
    log: list[str] = []

    class Iterable:
        def __aiter__(self) -> AsyncIterator[Any]:
            return Iterator(*script)

        def close(self) -> None:
            log.append("iterable")

    class Iterator(Closable):
        async def aclose(self) -> None:
            log.append("iterator")

    async with B().build().execute_stream(Iterable) as stream:
        await anext(stream)
        with suppress(OSError):
            await anext(stream, None)
    assert log == ["iterator", "iterable"]


async def test_the_iterable_is_closed_although_its_iterator_can_not_be() -> None:
    """Streams: both are closed where both can be, also when the first raises."""
    closed: list[str] = []

    class Iterable:
        def __aiter__(self) -> Closable:
            return Closable(1, 2, closing=_fail)

        async def aclose(self) -> None:
            closed.append("iterable")

    stream = B().build().execute_stream(Iterable)
    await anext(stream)
    with pytest.raises(OSError, match="closing"):
        await stream.aclose()
    assert closed == ["iterable"]


async def test_a_managers_value_is_closed_before_the_manager_is_left() -> None:
    """Streams: a context manager is exited on close, after what was read inside it."""
    log: list[str] = []

    async def note(what: str) -> None:
        log.append(what)

    inner = Closable(1, 2, closing=lambda: note("source"))
    manager = Managed(inner, leaving=lambda: note("manager"))
    async with B().build().execute_stream(lambda: manager) as stream:
        await anext(stream)
    assert log == ["source", "manager"]


# ---- errors of closing ------------------------------------------------------------------------


async def _fail() -> None:
    raise OSError("closing")


async def bad_generator(*script: Any) -> AsyncIterator[Any]:
    try:
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        await _fail()


BAD: dict[str, Callable[..., Any]] = {
    "own aclose": lambda *script: Closable(*script, closing=_fail),
    "manager": lambda *script: Managed(Sources(list(script))(), raises=OSError("closing")),
}
WITH_GENERATOR = {**BAD, "generator": bad_generator}


@pytest.mark.parametrize("kind", WITH_GENERATOR)
async def test_an_error_of_the_consumers_own_close_surfaces(kind: str) -> None:
    """Small print: an error raised by the source's cleanup on the consumer's own close surfaces, once."""
    stream = B().build().execute_stream(WITH_GENERATOR[kind], 1, 2)
    await anext(stream)
    with pytest.raises(OSError, match="closing"):
        await stream.aclose()
    await stream.aclose()


@pytest.mark.parametrize("kind", WITH_GENERATOR)
async def test_an_error_of_leaving_the_block_surfaces(kind: str) -> None:
    """Small print: so it does where `async with` is what closes."""

    async def read() -> None:
        async with B().build().execute_stream(WITH_GENERATOR[kind], 1, 2) as stream:
            await anext(stream)

    with pytest.raises(OSError, match="closing"):
        await read()


@pytest.mark.parametrize("kind", WITH_GENERATOR)
async def test_the_blocks_own_error_comes_first(kind: str) -> None:
    """Case ST-03: the first error wins, the closing's is attached to it, not in its place."""
    mine = KeyError("mine")

    async def read() -> None:
        async with B().build().execute_stream(WITH_GENERATOR[kind], 1, 2) as stream:
            await anext(stream)
            raise mine

    with pytest.raises(KeyError) as caught:
        await read()
    assert caught.value is mine
    assert ["closing" in note for note in mine.__notes__] == [True]
    assert "closing" in str(mine.__context__)


async def test_attaching_closes_no_circle_of_contexts() -> None:
    """Case ST-03: what walks a chain of contexts comes to its end."""

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            try:
                raise LookupError("on the way")
            finally:
                await _fail()

    async def read() -> None:
        async with B().build().execute_stream(source) as stream:
            async for _ in stream:
                raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        await read()
    chain: list[BaseException] = []
    link: BaseException | None = caught.value
    while link is not None and len(chain) < 20:
        assert all(link is not each for each in chain)
        chain.append(link)
        link = link.__context__
    assert len(chain) < 20


@pytest.mark.parametrize("kind", BAD)
async def test_the_sources_own_error_comes_first(kind: str) -> None:
    """Case ST-03: a source that fails and then fails to close: its error, with a note."""
    error = ValueError("source")
    got: list[int] = []
    with pytest.raises(ValueError, match="source") as caught:
        await collect(B().build().execute_stream(BAD[kind], 1, error), got)
    assert caught.value is error
    assert got == [1]
    assert ["closing" in note for note in error.__notes__] == [True]


@pytest.mark.parametrize("kind", BAD)
async def test_errors_of_closing_a_failed_source_do_not_end_the_retry(kind: str) -> None:
    """Case ST-17: a source whose closing raises: the retry goes on."""
    made = iter([BAD[kind](ValueError("first")), Sources(["ok"])()])
    pipeline = B().add_retry(delay=0, should_handle=ValueError).build()
    assert await drain(pipeline.execute_stream(lambda: next(made))) == ["ok"]


@pytest.mark.parametrize("kind", BAD)
async def test_errors_of_closing_a_failed_source_do_not_replace_its_error(kind: str) -> None:
    """Streams: errors of closing something discarded are swallowed."""
    error = ValueError("source")
    with pytest.raises(ValueError, match="source") as caught:
        await drain(B().add_retry(delay=0).build().execute_stream(BAD[kind], error))
    assert caught.value is error


@pytest.mark.parametrize("kind", WITH_GENERATOR)
async def test_errors_of_closing_a_discarded_source_are_swallowed(kind: str) -> None:
    """Streams: errors of closing something discarded are swallowed."""
    made = iter([WITH_GENERATOR[kind]("bad", "more"), Sources(["ok"])()])
    pipeline = B().add_retry(delay=0, should_handle=_is_bad).build()
    assert await drain(pipeline.execute_stream(lambda: next(made))) == ["ok"]


def _is_bad(event: Any) -> bool:
    return bool(event.outcome.ok and event.outcome.unwrap() == "bad")


@pytest.mark.parametrize("kind", BAD)
async def test_an_error_of_closing_at_the_end_reaches_the_loop(kind: str) -> None:
    """Streams: after commit, the end passes as it is, and so does an error in place of it."""
    got: list[int] = []
    with pytest.raises(OSError, match="closing"):
        await collect(B().build().execute_stream(BAD[kind], 1), got)
    assert got == [1]


async def test_an_error_with_a_length_of_nought_is_an_error() -> None:
    """Case FB-03: absence is told by a sentinel, never by truth: a falsy exception counts."""

    class EmptyError(Exception):
        def __len__(self) -> int:
            return 0

    error = EmptyError()
    manager = Managed(Sources([1, error])())
    with pytest.raises(EmptyError):
        await drain(B().build().execute_stream(lambda: manager))
    assert manager.told == [error]


# ---- groups -----------------------------------------------------------------------------------


async def test_a_group_of_nothing_but_generator_exit_is_a_quiet_close() -> None:
    """Streams, in small print: closed quietly; it is what a task group makes of being left early."""

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        except GeneratorExit as leaving:
            raise BaseExceptionGroup(
                "outer", [leaving, BaseExceptionGroup("inner", [GeneratorExit()])]
            ) from None

    async with B().build().execute_stream(source) as stream:
        await anext(stream)


async def test_a_group_with_an_error_in_it_surfaces() -> None:
    """Streams, in small print: only a group holding only `GeneratorExit` is quiet."""

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
        except GeneratorExit as leaving:
            raise BaseExceptionGroup("both", [leaving, OSError("real")]) from None

    stream = B().build().execute_stream(source)
    await anext(stream)
    with pytest.raises(BaseExceptionGroup) as caught:
        await stream.aclose()
    assert [str(leaf) for leaf in leaves(caught.value)] == ["", "real"]


async def test_a_child_that_fails_while_the_source_is_closed_surfaces() -> None:
    """Small print: an error raised by the source's cleanup on the consumer's own close surfaces."""

    async def child() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("child")

    async def source() -> AsyncIterator[int]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child)
            await tick(3)
            yield 1

    stream = B().build().execute_stream(source)
    await anext(stream)
    with pytest.raises(BaseExceptionGroup) as caught:
        await stream.aclose()
    assert "child" in [str(leaf) for leaf in leaves(caught.value)]


async def test_a_task_group_around_the_source_adds_no_note_to_its_error() -> None:
    """Streams: a manager that only wraps up what it was told has not failed to close."""
    error = OSError("source")

    class Grouping(Managed):
        async def __aexit__(self, kind: object, told: BaseException | None, tb: object) -> bool:
            assert isinstance(told, Exception)
            raise ExceptionGroup("unhandled errors", [told]) from None

    with pytest.raises(OSError, match="source") as caught:
        await drain_within(B().build().execute_stream(lambda: Grouping(Sources([1, error])())))
    assert caught.value is error
    assert not hasattr(error, "__notes__")
