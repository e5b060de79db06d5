"""A pipeline of two strategies, a journey through all they can do, and ways to cut it short.

Everything of the user's suspends here: the callback, every hook, predicate and generator, the fallback's action, the
limiter's store, the closing of results and the cleanup of sources. So every await of a strategy is
a place at which the journey can be cut short, by number.

Afterwards the world looks through its books: what was entered was left, what was opened was closed, and each strategy
is asked, from outside, whether it still has all it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import cache, partial
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from attrs import astuple, frozen

import resilience_pipeline
from resilience_pipeline import (
    CircuitBreaker,
    CircuitBreakerControl,
    ConcurrencyLimiter,
    ExecutionRejectedError,
    Fallback,
    Hedging,
    HedgingActionEvent,
    Lock,
    OutcomeEvent,
    PropertyKey,
    RateLimiter,
    ResilienceContext,
    ResilienceLock,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Retry,
    Strategy,
    Timeout,
    TokenBucket,
    current_context,
)
from resilience_pipeline.strategies import Handler, Site
from resilience_pipeline.testing import VirtualClock

from .driving import Driven, frames
from .scripted import tick

Mode = Literal["execute", "settle", "execute_stream"]
#: How the journey is cut short: by `task.cancel()`, by the cancel scope around it, or by what a piece of user code raises.
Means = Literal["task", "scope", "KeyboardInterrupt", "SystemExit"]
#: When: while it waits; when what it waits for has come and it has not run yet; or while it waits, and once more at its
#: next wait, in somebody's cleanup.
Moment = Literal["waiting", "woken", "twice"]

STRATEGIES = (
    "Retry",
    "CircuitBreaker",
    "Timeout",
    "Fallback",
    "Hedging",
    "ConcurrencyLimiter",
    "RateLimiter",
)
PAIRS = tuple((outer, inner) for outer in STRATEGIES for inner in STRATEGIES)
#: The lock, with those that repeat, end or hold what is inside: with others it has nothing to do.
WITH_LOCK = (
    ("Lock", "Lock"),
    *(
        ("Lock", other)
        for other in ("Retry", "Timeout", "Fallback", "Hedging", "ConcurrencyLimiter")
    ),
    *((other, "Lock") for other in ("Retry", "Timeout", "Hedging", "ConcurrencyLimiter")),
)

_PACKAGE = Path(resilience_pipeline.__file__).parent
_RAISED = {kind.__name__: kind for kind in (KeyboardInterrupt, SystemExit)}
_CALLS = 6
_BETWEEN_CALLS = 6.0  # longer than a break
_HANG = 100.0  # longer than any time limit

_journey: ContextVar[World | None] = ContextVar("journey", default=None)


@cache
def _in_library(path: str) -> str | None:
    """Name a file of the library below its package; `None` for all others, its test clock included."""
    file = Path(path)
    if not file.is_relative_to(_PACKAGE) or file.is_relative_to(_PACKAGE / "testing"):
        return None
    return file.relative_to(_PACKAGE).as_posix()


@frozen
class Place:
    """Where the journey waits in the library's code.

    Attributes:
        lines: File and line of each of the library's functions that wait, outermost first.
        stage: The user code that was entered last.
        states: State of each breaker.
        again: Whether the callback was entered before.
        waits: Whether it waits for something to happen, and not just for its next turn.
    """

    lines: tuple[tuple[str, int], ...]
    stage: str
    states: tuple[str, ...]
    again: bool
    waits: bool

    def __str__(self) -> str:
        where = " > ".join(f"{file}:{line}" for file, line in self.lines)
        return f"{where} (in or after {self.stage}, {', '.join(self.states) or 'no breaker'})"


class Thing:
    """A result that has to be closed, which takes a moment."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.begun = self.closed = 0

    async def aclose(self) -> None:
        self.begun += 1
        await checkpoint()
        await checkpoint()
        self.closed += 1


class Tapped(Strategy[Any]):
    """A strategy that can also be reached from outside its pipeline, with something else inside."""

    name = "tapped"

    def __init__(self, strategy: Strategy[Any], clock: VirtualClock | None) -> None:
        self._strategy = strategy
        self._clock = clock
        self._inside: PropertyKey[Handler] = PropertyKey(f"inside of {id(self)}")
        self._pipeline: ResiliencePipeline[Any]

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        def inside(context: ResilienceContext) -> Awaitable[Any]:
            return context.properties.get(self._inside, next)(context)

        handler = self._strategy.bind(inside, site)
        tap: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(clock=self._clock)
        self._pipeline = tap.add(_Tap(handler, self._inside)).build()
        return handler

    async def settle(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Send a call through this strategy alone."""
        return await self._pipeline.settle(fn, *args)


class _Tap(Strategy[Any]):
    name = "tap"

    def __init__(self, handler: Handler, inside: PropertyKey[Handler]) -> None:
        self._handler = handler
        self._inside = inside

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        def handle(context: ResilienceContext) -> Awaitable[Any]:
            context.properties.set(self._inside, next)
            return self._handler(context)

        return handle


class Visit:
    """What a callback or a source stays within; its cleanup takes a moment.

    Attributes:
        left: Whether it was left; `cleaned`, whether its cleanup has come to its end.
        may_be_cut: Whether the cleanup is the first that a cancellation finds.

    Args:
        owned: Whether it may be in an owner task, to which a cancellation comes while the consumer waits for its closing.
    """

    def __init__(self, *, owned: bool) -> None:
        self._first = (Exception, GeneratorExit) if owned else Exception
        self.left = self.cleaned = self.may_be_cut = False

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.left = True
        self.may_be_cut = error is None or isinstance(error, self._first)
        await checkpoint()
        self.cleaned = True


class _Watched(Strategy[Any]):
    """A strategy that runs what is inside in tasks of its own, each of which is looked at as well.

    Args:
        strategy: The strategy.
        run: Runs what is inside, in one of those tasks.
    """

    runs_in_tasks = True

    def __init__(
        self,
        strategy: Strategy[Any],
        run: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
    ) -> None:
        self.name = strategy.name
        self._strategy = strategy
        self._run = run

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        return self._strategy.bind(lambda context: self._run(partial(next, context)), site)


class _Store:
    """A rate limit that is kept somewhere else: asking takes a moment."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bucket = TokenBucket(1, 1).start()
        self.slow = False

    async def try_acquire(self, now: float) -> float:
        await self._world.stage("try_acquire")
        return 30.0 if self.slow else self._bucket.try_acquire(now)


class World:
    """One journey: six calls, one after another, through one pair of strategies.

    The callback's script makes the strategies do what they are for: a bad result, an error, a wait that is longer than any
    limit. Other calls crowd the limiters, so that the journey's own wait for a permit or are refused.

    Args:
        pair: Names of the strategies, outermost first.
        mode: Name of the pipeline's method that is called. For `settle` the inner strategy is in a pipeline of its own,
            nested in the outer one's.
        clock: Drives everything; any number of worlds may share one. `None` for the event loop's own time.
    """

    def __init__(self, pair: tuple[str, str], mode: Mode, clock: VirtualClock | None) -> None:
        self.places: list[Place] = []
        self.stages: list[str] = []
        self.cut_at: Place | str | None = None
        self.races = "Hedging" in pair
        self._judged_in_attempts = pair[0] == "Hedging"
        self._clock = clock
        self._now: Callable[[], float] = anyio.current_time if clock is None else clock.now
        self._sleep: Callable[[float], Awaitable[None]] = (
            anyio.sleep if clock is None else clock.sleep
        )
        self._mode = mode
        # ---- what the journey is about
        self._context = ResilienceContext()
        # With hedging, which takes more of it in one call, there is another race, with a loser of each kind.
        more = ("hang", "bad", "good") if self.races else ()
        self._script = iter(("bad", "error", "hang", "poison", "good", "error", *more))
        self._call = 0
        self._substitutes = 0
        self._crowds: list[Callable[[], Awaitable[None]]] = []
        self._tasks: TaskGroup
        # ---- how it is cut short
        self._means: Means = "scope"
        self._moment: Moment = "waiting"
        self._target = -1
        self._passed = 0
        self._calling = False
        self._cancel: Callable[[], object]
        # Whoever cancels is no part of the call, and does not look like it.
        self._outside = copy_context()
        self._cuts = 0
        self._raised: BaseException | None = None
        self._cut_on_resume: object = None
        self._driven: Driven[None]
        self._driven_task = 0
        self._watched_tasks: set[int] = set()
        # ---- the books
        self._stage = "the start"
        self._late: list[str] = []
        self._visits: list[Visit] = []
        self._things: list[Thing] = []
        self._delivered: list[object] = []
        self._evidence: object = None
        self._checks: list[Callable[[], Awaitable[None]]] = []
        self._controls: list[CircuitBreakerControl] = []

        outer, inner = (self._strategy(name, position) for position, name in enumerate(pair))
        builder: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(clock=clock).add(outer)
        if mode == "settle":
            nested: ResiliencePipelineBuilder[Any] = ResiliencePipelineBuilder(clock=clock)
            builder.add_pipeline(nested.add(inner).build())
        else:
            builder.add(inner)
        self._pipeline: ResiliencePipeline[Any] = builder.build()
        for control in self._controls:  # leaves coroutine hooks to the first call
            control.isolate()
            control.close()

    # ---- the strategies, with everything they take ------------------------------------------

    def _strategy(self, name: str, position: int) -> Strategy[Any]:
        match name:
            case "Retry":
                return Retry(
                    max_retry_attempts=3,
                    delay=1,
                    should_handle=self._is_bad,
                    delay_generator=self._hook("delay_generator"),
                    on_retry=self._hook("on_retry"),
                )
            case "CircuitBreaker":
                return self._breaker(watched=position == 0)
            case "Timeout":
                return Timeout(
                    10, timeout_generator=self._limit, on_timeout=self._hook("on_timeout")
                )
            case "Fallback":
                return Fallback(
                    self._substitute,
                    should_handle=self._is_bad,
                    on_fallback=self._hook("on_fallback"),
                )
            case "Hedging":
                # At no instant at which anything else falls due.
                return self._hedging(delay=7.375 if position == 0 else 4.625)
            case "ConcurrencyLimiter":
                return self._concurrency_limiter(hold_streams=position == 0)
            case "Lock":
                return self._lock()
            case _:
                return self._rate_limiter(foreign=position == 0)

    def _hedging(self, *, delay: float) -> Strategy[Any]:
        async def delay_generator(event: object) -> float | None:
            await self.stage("delay_generator")
            # All at once; one at a time; after the delay.
            return {3: 0.0, 4: -1.0}.get(self._call)

        hedging = Hedging(
            max_hedged_attempts=3,
            delay=delay,
            should_handle=self._is_bad,
            delay_generator=delay_generator,
            action_generator=self._action,
            on_hedging=self._hook("on_hedging"),
        )
        return _Watched(hedging, self._run_attempt)

    def _breaker(self, *, watched: bool) -> Strategy[Any]:
        control = CircuitBreakerControl()
        tapped = Tapped(
            CircuitBreaker(
                failure_ratio=0.1,
                minimum_throughput=2,
                sampling_duration=1e6,
                break_duration=7,
                break_duration_generator=self._hook("break_duration_generator", 5),
                should_handle=self._is_bad,
                on_opened=self._hook("on_opened"),
                on_closed=self._hook("on_closed"),
                on_half_opened=self._hook("on_half_opened"),
                control=control,
                ignore=self._hook("ignore", False),
                slow_call_duration=1e6 if watched else None,
                slow_call_ratio=1 if watched else None,
            ),
            self._clock,
        )
        self._controls.append(control)
        self._checks.append(lambda: self._check_breaker(tapped, control))
        return tapped

    def _concurrency_limiter(self, *, hold_streams: bool) -> Strategy[Any]:
        tapped = Tapped(
            ConcurrencyLimiter(
                1,
                1,
                max_wait=50,
                hold_streams=hold_streams,
                on_rejected=self._hook("on_rejected"),
            ),
            self._clock,
        )

        async def crowd() -> None:
            # At no instant at which something of the journey's own falls due: trio would draw lots.
            for seconds in {1: (3.25,), 2: (3.25, 1.25), 4: (60.25,)}.get(self._call, ()):
                await self._meanwhile(tapped, self._sleep, seconds)

        self._crowds.append(crowd)
        self._checks.append(lambda: self._check_concurrency_limiter(tapped))
        return tapped

    def _lock(self) -> Strategy[Any]:
        lock = ResilienceLock()
        tapped = Tapped(Lock(lock, key=self._hook("key", "key"), max_wait=50), self._clock)

        async def crowd() -> None:
            for seconds in {1: (3.25,), 2: (3.25, 1.25), 4: (60.25,)}.get(self._call, ()):
                await self._meanwhile(tapped, self._sleep, seconds)

        self._crowds.append(crowd)
        self._checks.append(lambda: self._check_lock(tapped, lock))
        return tapped

    def _rate_limiter(self, *, foreign: bool) -> Strategy[Any]:
        store = _Store(self)
        tapped = Tapped(
            RateLimiter(
                store if foreign else TokenBucket(1, 1),
                queue_limit=2,
                max_wait=50,
                on_rejected=self._hook("on_rejected"),
            ),
            self._clock,
        )

        async def crowd() -> None:
            for _ in range({1: 1, 2: 2, 4: 3}.get(self._call, 0)):
                await self._meanwhile(tapped, checkpoint)
            store.slow = self._call == _CALLS - 1

        async def check() -> None:
            store.slow = False
            await self._check_rate_limiter(tapped)

        self._crowds.append(crowd)
        self._checks.append(check)
        return tapped

    # ---- user code ---------------------------------------------------------------------------

    async def stage(self, name: str) -> None:
        """Be user code that takes a moment."""
        if _journey.get() is self:
            self._stage = name
            if self.cut_at is not None and self._is_driven():
                self._late.append(name)
            self.stages.append(name)
            if self._means in _RAISED and len(self.stages) - 1 == self._target:
                self.cut_at = name
                self._note_evidence()
                self._raised = _RAISED[self._means]("as wished")
                raise self._raised
        await self._pause()

    async def _pause(self) -> None:
        watched = self._is_driven() or anyio.get_current_task().id in self._watched_tasks
        if _journey.get() is self and not watched:
            # In an owner task: the journey itself waits for it all the while.
            self._pass(self._driven.coroutine, waits=False)
        await checkpoint()

    async def _run_attempt(self, inside: Callable[[], Awaitable[Any]]) -> Any:
        """Run an attempt in its own task, for which the journey itself waits all the while."""

        async def attempt() -> Any:
            return await inside()

        task = anyio.get_current_task().id
        self._watched_tasks.add(task)
        try:
            return await self._watch(attempt())
        finally:
            self._watched_tasks.discard(task)

    def _is_driven(self) -> bool:
        return anyio.get_current_task().id == self._driven_task

    def _hook(self, name: str, answer: Any = None) -> Callable[[object], Awaitable[Any]]:
        async def hook(event: object) -> Any:
            await self.stage(name)
            return answer

        return hook

    async def _limit(self, event: object) -> float | None:
        await self.stage("timeout_generator")
        return {3: 0, _CALLS - 1: None}.get(self._call, 10)

    async def _action(self, event: HedgingActionEvent) -> Callable[[], Any]:
        await self.stage("action_generator")
        return event.callback

    async def _is_bad(self, event: OutcomeEvent) -> bool:
        await self.stage("should_handle")
        error = event.outcome.error
        if error is not None:
            return isinstance(error, ConnectionError | ExecutionRejectedError)
        value = event.outcome.unwrap()
        kind = value.kind if isinstance(value, Thing) else value
        if kind == "poison":
            raise LookupError("the predicate can't tell")
        return bool(kind == "bad")

    async def _substitute(self, event: object) -> object:
        await self.stage("fallback_action")
        self._substitutes += 1
        if self._mode == "execute_stream" and self._substitutes % 2:
            return self._source("good")
        return "substitute"

    async def _callback(self) -> object:
        what = next(self._script, "good")
        async with self._visit():
            await self._act(what)
        if what not in {"bad", "poison"}:
            return what
        self._things.append(Thing(what))
        return self._things[-1]

    async def _factory(self) -> AsyncIterator[object]:
        await self.stage("the factory")
        return self._source(next(self._script, "good"))

    async def _source(self, what: str) -> AsyncIterator[object]:
        async with self._visit():
            await self._act(what)
            yield what
            await self._pause()
            yield "more"

    def _visit(self) -> Visit:
        self._visits.append(Visit(owned=self.races))
        return self._visits[-1]

    async def _act(self, what: str) -> None:
        await self.stage(f"the callback, {what}")
        if what == "error":
            raise ConnectionError("as scripted")
        if what == "hang":
            await self._sleep(_HANG)

    # ---- the journey -------------------------------------------------------------------------

    def places_to_cut(self, moment: Moment) -> list[int]:
        """After an undisturbed journey: the number of the first of each kind of place."""
        return [
            number
            for number, place in enumerate(self.places)
            if place not in self.places[:number] and (place.waits or moment != "woken")
        ]

    def stages_to_raise_in(self) -> list[int]:
        """After an undisturbed journey: the number of the first of each kind of user code."""
        return [self.stages.index(name) for name in dict.fromkeys(self.stages)]

    async def run(
        self, target: int = -1, means: Means = "scope", moment: Moment = "waiting"
    ) -> None:
        """Go on the journey, cut it short at the place or stage of this number, look at what is left."""
        self._target, self._means, self._moment = target, means, moment
        async with anyio.create_task_group() as self._tasks:
            ended = await self._run_driven()
            await self._look_at_what_goes_on()
        # From here on the others have ended as well.
        self._check_books(ended)
        for check in self._checks:
            await check()

    async def _run_driven(self) -> str:
        task = asyncio.current_task() if self._on_asyncio() else None
        self._driven_task = anyio.get_current_task().id
        token = _journey.set(self)
        self._driven = self._watch(self._travel())
        ended = "cut"
        with anyio.CancelScope() as scope:
            self._cancel = scope.cancel
            if self._means == "task":
                assert task is not None
                self._cancel = task.cancel
            try:
                await self._driven
                ended = "arrived"
            except asyncio.CancelledError:
                if self._means != "task":
                    raise
                # The library has taken back what it asked for, and nothing of the caller's.
                assert task is not None
                assert task.cancelling() == self._cuts
                for _ in range(self._cuts):
                    task.uncancel()
            except BaseException as error:
                if error is not self._raised:
                    raise
            finally:
                _journey.reset(token)
        return ended

    async def _look_at_what_goes_on(self) -> None:
        """Go on in the task that was cancelled: nothing of the call may be left in it."""
        if self._on_asyncio():
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
        await tick(3)  # a stray cancellation would come out here
        with suppress(LookupError):
            raise AssertionError(f"{current_context()} is still current")
        # The context serves the next execution.
        assert await ResiliencePipeline.empty.execute(_ok, context=self._context) == "ok"

    @staticmethod
    def _on_asyncio() -> bool:
        with suppress(RuntimeError):
            return asyncio.current_task() is not None
        return False

    async def _travel(self) -> None:
        for self._call in range(_CALLS):
            for crowd in self._crowds:
                await crowd()
            self._calling = True
            with suppress(Exception):
                await self._make_call()
            self._calling = False
            await self._sleep(_BETWEEN_CALLS)

    async def _make_call(self) -> None:
        match self._mode:
            case "execute":
                value = await self._pipeline.execute(self._callback, context=self._context)
                self._delivered.append(value)
            case "settle":
                outcome = await self._pipeline.settle(self._callback, context=self._context)
                self._delivered.append(outcome.value_or(None))
            case "execute_stream":
                stream = self._pipeline.execute_stream(self._factory, context=self._context)
                async with stream:
                    async for chunk in stream:
                        self._delivered.append(chunk)
                        if self._call % 2:
                            break

    async def _meanwhile(self, tapped: Tapped, fn: Callable[..., Any], *args: Any) -> None:
        """Have somebody else's call go through one of the strategies."""

        async def other() -> None:
            _journey.set(None)
            await tapped.settle(fn, *args)

        self._tasks.start_soon(other)
        await tick(5)

    # ---- being cut short ---------------------------------------------------------------------

    def _watch(self, coroutine: Coroutine[Any, Any, Any]) -> Driven[Any]:
        """Look at the journey, or at an attempt that runs beside it, whenever it waits."""
        return Driven(
            coroutine,
            partial(self._suspended, coroutine),
            partial(self._resumed, coroutine),
        )

    def _suspended(self, coroutine: Coroutine[Any, Any, Any], request: Any) -> None:
        if self._moment == "twice" and self._cuts == 1:
            if self._is_driven():
                self._cut()
        # Either loop's request for nothing but another turn is no object that could be waited for.
        elif self._pass(coroutine, waits=not (request is None or isinstance(request, type))) and (
            self._moment == "woken"
        ):
            if isinstance(request, asyncio.Future):
                # Before the task's own callback: the result is there, the task has not seen it.
                request.add_done_callback(lambda _: self._cut())
            else:
                self._cut_on_resume = coroutine

    def _resumed(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._cut_on_resume is coroutine:
            self._cut_on_resume = None
            self._cut()

    def _pass(self, coroutine: Coroutine[Any, Any, Any], *, waits: bool) -> bool:
        """Count a wait in the pipeline; whether it is the one at which the journey is cut short."""
        if not self._calling or self.cut_at is not None:
            return False
        self._passed += 1
        meant = self._passed - 1 == self._target and self._means not in _RAISED
        if meant or self._target < 0:
            self.places.append(self._place(coroutine, waits))
        if meant and self._moment != "woken":
            self._cut()
        return meant

    def _place(self, coroutine: Coroutine[Any, Any, Any], waits: bool) -> Place:
        waiting = [*frames(coroutine)]
        if coroutine is not self._driven.coroutine:
            # An attempt's: below what the journey waits in, and what runs it in its task.
            running = [frame for frame, _ in walk_stack(None)]
            waiting = [*frames(self._driven.coroutine), *reversed(running), *waiting]
        lines = tuple(
            (file, frame.f_lineno)
            for frame in waiting
            if (file := _in_library(frame.f_code.co_filename)) is not None
        )
        states = tuple(control.state for control in self._controls)
        return Place(lines, self._stage, states, len(self._visits) > 1, waits)

    def _cut(self) -> None:
        self.cut_at = self.places[-1]
        self._cuts += 1
        self._note_evidence()
        self._outside.run(self._cancel)

    def _note_evidence(self) -> None:
        self._evidence = self._counted()
        for visit in self._visits:
            visit.may_be_cut = visit.left

    def _counted(self) -> object:
        return [(control.state, astuple(control.metrics)) for control in self._controls]

    # ---- looking at what is left -------------------------------------------------------------

    def _check_books(self, ended: str) -> None:
        at_once = self.cut_at is not None and (self._moment != "woken" or self._means != "scope")
        assert ended == ("cut" if at_once else ended), "the cancellation did not come out"
        if at_once:
            # Those who race, and the one who looks on, hear of it a turn later: what they do until then stands.
            if not (self.races and self._means in _RAISED):
                assert self._late == [], "user code was called after the cancellation"
            if not self._judged_in_attempts:
                assert self._counted() == self._evidence, "a cancellation was taken for evidence"
        assert all(visit.left for visit in self._visits), "a callback or source was not left"
        cancelled_once = self._means != "scope" and self._moment != "twice"
        if self._on_asyncio() and (self.cut_at is None or cancelled_once):
            # Elsewhere, and in a cancelled scope, a cleanup that awaits is cancelled again.
            kept = (visit.cleaned or visit.may_be_cut for visit in self._visits)
            assert all(kept), "a cleanup was cut short"
        for thing in self._things:
            expected = 0 if thing in self._delivered else 1
            assert (thing.begun, thing.closed) == (expected, expected), "closed not exactly once"

    async def _check_concurrency_limiter(self, tapped: Tapped) -> None:
        """Its one permit and its one place in the queue are there."""
        entered: list[str] = []
        go = anyio.Event()

        async def enter(name: str) -> None:
            entered.append(name)
            await go.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tapped.settle, enter, "first")
            await tick(3)
            assert entered == ["first"], "the permit is lost"
            tasks.start_soon(tapped.settle, enter, "second")
            await tick(3)
            assert entered == ["first"], "there is a permit too many"
            third = await tapped.settle(enter, "third")
            assert "1 wait" in str(third.error), "the queue has another size"
            go.set()
        assert entered == ["first", "second"], "the place in the queue is lost"

    async def _check_lock(self, tapped: Tapped, lock: ResilienceLock) -> None:
        """It is free, keeps others out, and is free again."""
        assert repr(lock) == "<ResilienceLock free>", "the lock is lost"
        entered: list[str] = []
        go = anyio.Event()

        async def enter(name: str) -> None:
            entered.append(name)
            await go.wait()

        async with anyio.create_task_group() as tasks:
            for name in ("first", "second"):
                tasks.start_soon(tapped.settle, enter, name)
                await tick(5)
            assert entered == ["first"], "there are two inside"
            go.set()
        assert entered == ["first", "second"], "the place in the queue is lost"
        assert repr(lock) == "<ResilienceLock free>", "the lock is not given back"

    async def _check_rate_limiter(self, tapped: Tapped) -> None:
        """Its bucket fills up, and its queue has two places and nobody in it."""
        await self._sleep(10)
        start = self._now()
        starts: list[float] = []

        async def note() -> None:
            starts.append(self._now() - start)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(tapped.settle, note)
                await tick(5)
            refused = await tapped.settle(note)
            assert not refused.ok, "there is a place too many in the queue"
        assert starts == [0, 1, 2], "a permit or a place in the queue is lost"

    async def _check_breaker(self, tapped: Tapped, control: CircuitBreakerControl) -> None:
        """It lets the next call pass, as a trial if need be, and goes on counting."""
        if control.state == "open":
            await self._sleep(_BETWEEN_CALLS + 1)
        assert (await tapped.settle(_ok)).ok, "the trial's place is lost"
        control.close()
        states: list[str] = []
        for _ in range(2):
            states.append(control.state)
            await tapped.settle(_fail)
        assert [*states, control.state] == ["closed", "closed", "open"], "it has stopped counting"


async def _ok() -> str:
    return "ok"


async def _fail() -> None:
    raise ConnectionError
