"""What a competent hand writes instead of the library: the yardstick of `× by hand`.

Each does the same job with `asyncio.timeout`, `asyncio.Semaphore`, `try`/`except` and counters, and
nothing besides: no names, no hooks, no history. Correct all the same: a cancellation is never
retried nor counted, permits come back, the last error comes out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


class CircuitOpenError(Exception):
    """The call was not made."""


class LimitReachedError(Exception):
    """The call was not made."""


class Retry:
    """A `for` loop."""

    def __init__(self, attempts: int, delay: float) -> None:
        self._attempts = attempts
        self._delay = delay

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        for attempt in range(1, self._attempts + 1):
            try:
                return await fn()
            except Exception:
                if attempt == self._attempts:
                    raise
            await asyncio.sleep(self._delay)
        raise AssertionError


class Timeout:
    """`asyncio.timeout`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        async with asyncio.timeout(self._seconds):
            return await fn()


class CircuitBreaker:
    """Opens after so many failures in a row, lets one call try again after a while."""

    def __init__(self, failures: int, seconds: float) -> None:
        self._limit = failures
        self._seconds = seconds
        self._failures = 0
        self._open_until = 0.0

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        if self._failures >= self._limit:
            now = monotonic()
            if now < self._open_until:
                msg = f"call again in {self._open_until - now:g} s"
                raise CircuitOpenError(msg)
            self._open_until = now + self._seconds  # this call tries, others are kept out
        try:
            result = await fn()
        except Exception:
            self._failures += 1
            if self._failures >= self._limit:
                self._open_until = monotonic() + self._seconds
            raise
        self._failures = 0
        return result


class ConcurrencyLimiter:
    """`asyncio.Semaphore`."""

    def __init__(self, permits: int) -> None:
        self._semaphore = asyncio.Semaphore(permits)

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        async with self._semaphore:
            return await fn()


class RateLimiter:
    """A token bucket."""

    def __init__(self, capacity: int, per_second: float) -> None:
        self._capacity = capacity
        self._per_second = per_second
        self._tokens = float(capacity)
        self._updated = monotonic()

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        now = monotonic()
        refilled = self._tokens + (now - self._updated) * self._per_second
        self._tokens = min(float(self._capacity), refilled)
        self._updated = now
        if self._tokens < 1:
            msg = "no permit"
            raise LimitReachedError(msg)
        self._tokens -= 1
        return await fn()


class Fallback:
    """A constant in place of an error."""

    def __init__(self, instead: object) -> None:
        self._instead = instead

    async def run(self, fn: Callable[[], Awaitable[object]]) -> object:
        try:
            return await fn()
        except Exception:  # noqa: BLE001 - as broad as the strategy's default
            return self._instead


class Cache:
    """An ordered dictionary, the least recently used first; calls at once are not joined."""

    def __init__(self, size: int, seconds: float) -> None:
        self._size = size
        self._seconds = seconds
        self._entries: OrderedDict[object, tuple[object, float]] = OrderedDict()

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        entry: Any = self._entries.get(fn)
        if entry is not None and monotonic() - entry[1] < self._seconds:
            self._entries.move_to_end(fn)
            return entry[0]  # type: ignore[no-any-return]
        value = await fn()
        self._entries[fn] = value, monotonic()
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value


class Hedging:
    """A second task when the first is slow or fails; the first success wins, the loser is awaited."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        tasks = [asyncio.ensure_future(fn())]
        try:
            await asyncio.wait(tasks, timeout=self._delay)
            if not _won(tasks[0]):
                tasks.append(asyncio.ensure_future(fn()))
                while not any(map(_won, tasks)):
                    running = [task for task in tasks if not task.done()]
                    if not running:
                        break
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            return next(filter(_won, tasks), tasks[0]).result()
        finally:
            losers = [task for task in tasks if not task.done()]
            for task in losers:
                task.cancel()
            if losers:
                await asyncio.wait(losers)


def _won(task: asyncio.Future[T]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


class Stack:
    """All of it in one function: limiter, retry, circuit breaker, time limit, from the outside in."""

    def __init__(
        self,
        *,
        permits: int,
        attempts: int,
        delay: float,
        failures: int,
        break_seconds: float,
        timeout: float,
    ) -> None:
        self._semaphore = asyncio.Semaphore(permits)
        self._attempts = attempts
        self._delay = delay
        self._limit = failures
        self._break_seconds = break_seconds
        self._timeout = timeout
        self._failures = 0
        self._open_until = 0.0

    async def run(self, fn: Callable[[], Awaitable[T]]) -> T:
        async with self._semaphore:
            for attempt in range(1, self._attempts + 1):
                try:
                    return await self._attempt(fn)
                except Exception:
                    if attempt == self._attempts:
                        raise
                await asyncio.sleep(self._delay)
            raise AssertionError

    async def _attempt(self, fn: Callable[[], Awaitable[T]]) -> T:
        if self._failures >= self._limit:
            now = monotonic()
            if now < self._open_until:
                msg = f"call again in {self._open_until - now:g} s"
                raise CircuitOpenError(msg)
            self._open_until = now + self._break_seconds
        try:
            async with asyncio.timeout(self._timeout):
                result = await fn()
        except Exception:
            self._failures += 1
            if self._failures >= self._limit:
                self._open_until = monotonic() + self._break_seconds
            raise
        self._failures = 0
        return result


async def guarded_stream(
    connect: Callable[[], AsyncGenerator[T, None]], attempts: int, delay: float
) -> AsyncGenerator[T, None]:
    """A stream that is tried again until its first chunk, and passed through from then on."""
    for attempt in range(1, attempts + 1):
        async with aclosing(connect()) as source:
            try:
                first = await anext(source)
            except StopAsyncIteration:
                return
            except Exception:
                if attempt == attempts:
                    raise
            else:
                yield first
                async for chunk in source:
                    yield chunk
                return
        await asyncio.sleep(delay)


async def owned_stream(
    connect: Callable[[], AsyncGenerator[T, None]],
) -> AsyncGenerator[T, None]:
    """A stream whose source lives in a task of its own, chunks handed across one at a time."""
    chunks: asyncio.Queue[tuple[T] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def own() -> None:
        end: BaseException | None = None
        try:
            async with aclosing(connect()) as source:
                async for chunk in source:
                    await chunks.put((chunk,))
        except Exception as error:  # noqa: BLE001 - raised where it is read
            end = error
        await chunks.put(end)

    owner = asyncio.create_task(own())
    try:
        while isinstance(item := await chunks.get(), tuple):
            yield item[0]
        if item is not None:
            raise item
    finally:
        owner.cancel()
        await asyncio.wait([owner])
