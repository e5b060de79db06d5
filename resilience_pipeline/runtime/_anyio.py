"""trio, through anyio's primitives where anyio has them.

Must only be imported while trio runs; `current_runtime` sees to it. Time limits are cancel scopes
here, and scopes have to nest: so a stream's source lives in an owner task of its own
(`owns_sources`), a system task that needs no nursery of the user's and is reached through the run's
token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar, cast

import anyio
import anyio.lowlevel
import trio

from .. import _instant
from .._errors import DeadlineReached
from ._base import FOREVER, Child, Clock, Interruption, Runtime, Spawner, TimerHandle, Waiter

T = TypeVar("T")
C = TypeVar("C")


class AnyioRuntime(Runtime):
    """Runs pipelines in trio's tasks."""

    __slots__ = ()

    owns_sources = True

    def now(self) -> float:
        # Not trio's own clock: it has a random offset, and other loops share our state.
        return monotonic() if self.clock is None else self.clock.now()

    async def sleep(self, seconds: float) -> None:
        if seconds > 0 and _instant.watching:
            seconds = _instant.left_of(seconds)
        if self.clock is not None:
            await self.clock.sleep(seconds)
        elif seconds < FOREVER:
            await anyio.sleep(seconds)
        else:
            await anyio.sleep_forever()

    async def within(
        self,
        seconds: float,
        call: Callable[[C], Awaitable[T]],
        argument: C,
        expired: Callable[[C, BaseException | None], Awaitable[T]] | None = None,
        late: Callable[[T], Awaitable[object]] | None = None,  # noqa: ARG002 - all are awaited
    ) -> T:
        if seconds >= FOREVER:
            return await call(argument)
        with anyio.CancelScope() as scope:
            timer = _limit(scope, self.clock, seconds)
            try:
                return await call(argument)
            finally:
                # Also keeps a limit from hitting the caller's code once the inside has ended.
                timer.cancel()
        if expired is not None:
            return await expired(argument, None)
        raise DeadlineReached

    async def shielded(self, fn: Callable[[], Coroutine[Any, Any, T]], timeout: float) -> T:
        with anyio.CancelScope(shield=True) as scope:
            timer = _limit(scope, self.clock, timeout)
            try:
                result = await fn()
            finally:
                timer.cancel()
            # What was held back comes out here, past the shield.
            scope.shield = False
            await anyio.lowlevel.checkpoint_if_cancelled()
            return result
        msg = f"cancelled after {timeout:g} s"
        raise TimeoutError(msg)

    def is_cancellation(self, error: BaseException) -> bool:
        return _holds_cancelled(error)

    def carried(self, error: BaseException) -> BaseException:
        # A cancellation belongs to the scopes of its task, and there are none of those elsewhere.
        if not _holds_cancelled(error):
            return error
        ended = RuntimeError("the task that ran the stream's source was cancelled")
        ended.__cause__ = error
        return ended

    def place(self) -> tuple[int, object]:
        return get_ident(), trio.lowlevel.current_trio_token()

    def waiter(self) -> Waiter:
        return _TrioWaiter(self.clock)

    def interruption(self) -> Interruption:
        return _TrioInterruption()

    def spawn(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> Child:
        child = _TrioChild(trio.lowlevel.current_trio_token())
        trio.lowlevel.spawn_system_task(child.run, fn, ended, context=copy_context())
        return child

    async def first_steps(self) -> None:
        # Those that are ready run in any order, so that the first turn may come before theirs.
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()

    def spawner(self) -> Spawner:
        token = trio.lowlevel.current_trio_token()

        def spawn_from_anywhere(
            fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
        ) -> bool:
            async def run() -> None:
                try:
                    await fn()
                finally:
                    ended()

            return _call_in_run(token, lambda: trio.lowlevel.spawn_system_task(run))

        return spawn_from_anywhere


class _Limit:
    """The time limit of a scope, by trio's own clock or by the user's."""

    __slots__ = ("_scope", "_timer")

    def __init__(self, scope: anyio.CancelScope, timer: TimerHandle | None) -> None:
        self._scope = scope
        self._timer = timer

    def cancel(self) -> None:
        if self._timer is None:
            self._scope.deadline = float("inf")
        else:
            self._timer.cancel()


def _limit(scope: anyio.CancelScope, clock: Clock | None, seconds: float) -> _Limit:
    if seconds >= FOREVER:
        return _Limit(scope, None)
    if clock is None:
        scope.deadline = anyio.current_time() + seconds
        return _Limit(scope, None)
    expire = _in_run(trio.lowlevel.current_trio_token(), scope.cancel)
    return _Limit(scope, clock.call_at(clock.now() + seconds, expire))


def _is_here(token: trio.lowlevel.TrioToken) -> bool:
    return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is token


def _in_run(token: trio.lowlevel.TrioToken, callback: Callable[[], object]) -> Callable[[], object]:
    """Make a callback of one trio run callable from any thread."""

    def call() -> None:
        _call_in_run(token, callback)

    return call


def _call_in_run(token: trio.lowlevel.TrioToken, callback: Callable[[], object]) -> bool:
    """Call in the token's run, now or soon; False if the run has finished."""
    if _is_here(token):
        callback()
        return True
    try:
        token.run_sync_soon(callback)
    except trio.RunFinishedError:
        return False
    return True


class _TrioWaiter(Waiter):
    __slots__ = ("_clock", "_event", "_token", "_woken")

    def __init__(self, clock: Clock | None) -> None:
        self._clock = clock
        self._event = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        self._woken = False

    def _wake(self) -> None:
        self._woken = True
        self._event.set()

    def wake(self) -> bool:
        return _call_in_run(self._token, self._wake)

    async def wait(self, timeout: float | None = None) -> bool:
        if timeout is None or timeout >= FOREVER:
            await self._event.wait()
        elif self._clock is None:
            with anyio.move_on_after(max(timeout, 0)):
                await self._event.wait()
        else:
            give_up = _in_run(self._token, self._event.set)
            timer = self._clock.call_at(self._clock.now() + max(timeout, 0), give_up)
            try:
                await self._event.wait()
            finally:
                timer.cancel()
        # A wake-up may meet a cancellation: then whoever waits must not go on as if it had not.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return self._woken

    def is_alive(self) -> bool:
        try:
            self._token.run_sync_soon(_nothing, idempotent=True)
        except trio.RunFinishedError:
            return False
        return True


def _nothing() -> None:
    """Be called."""


def _holds_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_holds_cancelled, cast(Any, error).exceptions))
    return isinstance(error, trio.Cancelled)


class _TrioInterruption(Interruption):
    __slots__ = ("_scope", "_task", "_token")

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._task = trio.lowlevel.current_task()
        self._scope = trio.CancelScope()

    async def guard(self, call: Callable[[C], Awaitable[T]], argument: C) -> T:
        with self._scope:
            return await call(argument)
        raise DeadlineReached

    def interrupt(self) -> None:
        _call_in_run(self._token, self._scope.cancel)

    async def confirm(self, error: BaseException | None) -> bool:  # noqa: ARG002
        # After `guard` chunks come from owner tasks, and a reader is simply told the end.
        return False

    def is_mine(self) -> bool:
        return trio.lowlevel.current_task() is self._task


class _TrioChild(Child):
    __slots__ = ("_scope", "_token")

    def __init__(self, token: trio.lowlevel.TrioToken) -> None:
        self._token = token
        self._scope = trio.CancelScope()

    async def run(
        self, fn: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], None]
    ) -> None:
        # System tasks are cancelled when the main task has ended; that ends `fn` too.
        try:
            with self._scope:
                await fn()
        finally:
            ended()

    def needs_shield(self) -> bool:
        # What is private of trio here is only asked, and without an answer there is no shield.
        innermost = getattr(trio.lowlevel.current_task(), "_cancel_status", None)
        own = getattr(self._scope, "_cancel_status", None)
        return self._scope.cancel_called and own is not None and innermost is own

    def cancel(self) -> None:
        self._scope.cancel()

    def cancel_soon(self) -> None:
        _call_in_run(self._token, self._scope.cancel)
