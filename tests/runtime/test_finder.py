"""Which runtime a call gets: that of the task it runs in, whatever else is imported or running."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
import trio

from resilience_pipeline import ResiliencePipeline, ResiliencePipelineBuilder
from resilience_pipeline.runtime import RuntimeFinder, current_runtime
from resilience_pipeline.runtime._anyio import AnyioRuntime
from resilience_pipeline.runtime._asyncio import AsyncioRuntime
from resilience_pipeline.testing import VirtualClock
from support.scripted import tick


def on_asyncio(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run on asyncio."""
    return asyncio.run(main())


def on_trio(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run on trio."""
    return trio.run(main)


async def find(finder: RuntimeFinder) -> object:
    """Look for the runtime in a task."""
    return finder.find()


def test_loops_that_take_turns_each_get_their_own() -> None:
    """One pipeline, asyncio and trio one after another, in any order and again and again."""
    finder = RuntimeFinder()
    found = []
    for run in (on_asyncio, on_trio, on_trio, on_asyncio, on_trio, on_asyncio):
        found.append(run(lambda: find(finder)))
    kinds = [
        AsyncioRuntime,
        AnyioRuntime,
        AnyioRuntime,
        AsyncioRuntime,
        AnyioRuntime,
        AsyncioRuntime,
    ]
    assert [type(runtime) for runtime in found] == kinds
    assert len({id(runtime) for runtime in found}) == 2  # made once each


def test_loops_in_threads_each_get_their_own() -> None:
    """One pipeline, asyncio and trio at once."""
    pipeline = executing()
    barrier = threading.Barrier(4)
    found: list[tuple[str, str]] = []

    async def main(loop: str) -> None:
        barrier.wait(30)
        for _ in range(50):
            found.append((loop, await pipeline.execute(which)))

    def work(loop: str) -> None:
        anyio.run(main, loop, backend=loop)

    threads = [threading.Thread(target=work, args=(loop,)) for loop in ("asyncio", "trio") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert set(found) == {("asyncio", "asyncio"), ("trio", "trio")}


def executing(clock: VirtualClock | None = None) -> ResiliencePipeline[Any]:
    """A pipeline that waits and limits, so that a wrong runtime would not work."""
    return (
        ResiliencePipelineBuilder(clock=clock)
        .add_retry(delay=0)
        .add_concurrency_limiter(10, queue_limit=10)
        .add_timeout(60)
        .build()
    )


async def which() -> str:
    """Wait in the loop one is in, and name it."""
    await anyio.lowlevel.checkpoint()
    return library()


def library() -> str:
    """Name the loop one is in."""
    return "trio" if trio.lowlevel.in_trio_task() else "asyncio"


@pytest.mark.asyncio
async def test_trio_as_a_guest_of_asyncio_gets_trio() -> None:
    """Both run in one thread and take turns at every checkpoint; each call works in its own."""
    pipeline = executing()
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Any] = loop.create_future()
    found: list[tuple[str, str, type]] = []

    async def call_on(loop_name: str) -> None:
        for _ in range(20):
            used = await pipeline.execute(which)
            found.append((loop_name, used, type(current_runtime())))

    async def guest() -> None:
        await call_on("trio")

    trio.lowlevel.start_guest_run(
        guest,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=finished.set_result,
    )
    await call_on("asyncio")
    (await finished).unwrap()
    assert len(found) == 40
    assert set(found) == {("asyncio", "asyncio", AsyncioRuntime), ("trio", "trio", AnyioRuntime)}


@pytest.mark.asyncio
async def test_a_guests_time_limits_are_its_own() -> None:
    """A stream with an owner task, a time limit and a wait in a guest run, driven by a clock that asyncio shares."""
    clock = VirtualClock(autojump=True)
    pipeline = executing(clock)
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[Any] = loop.create_future()
    got: list[object] = []

    async def source() -> Any:
        await clock.sleep(30)
        yield library()

    async def read() -> None:
        async with pipeline.execute_stream(source) as stream:
            async for chunk in stream:
                got.append(chunk)

    trio.lowlevel.start_guest_run(
        read,
        run_sync_soon_threadsafe=loop.call_soon_threadsafe,
        done_callback=finished.set_result,
    )
    (await finished).unwrap()
    await read()
    assert got == ["trio", "asyncio"]
    assert clock.now() == 60


# ---- where no loop runs ------------------------------------------------------------------------------


def test_without_a_loop_there_is_a_clear_error() -> None:
    """It says what is missing."""
    with pytest.raises(RuntimeError, match="no task of asyncio or trio runs here"):
        current_runtime()
    with pytest.raises(RuntimeError, match="executed within an event loop"):
        executing().execute(which).send(None)


def test_after_a_loop_there_is_still_a_clear_error() -> None:
    """Having found one before doesn't mean that there is one now."""
    finder = RuntimeFinder()
    on_asyncio(lambda: find(finder))
    on_trio(lambda: find(finder))
    with pytest.raises(RuntimeError, match="no task of asyncio or trio runs here"):
        finder.find()


@pytest.mark.asyncio
async def test_in_a_bare_callback_of_asyncio_there_is_a_clear_error() -> None:
    """A loop runs, but no task that could wait."""
    answers: list[object] = []

    def look() -> None:
        try:
            answers.append(current_runtime())
        except RuntimeError as error:
            answers.append(str(error))

    asyncio.get_running_loop().call_soon(look)
    await tick(3)
    assert answers == [
        "no task of asyncio or trio runs here: pipelines are executed within an event loop"
    ]


def test_a_thread_beside_a_loop_has_none() -> None:
    """The loop of another thread is not this one's."""
    answers: list[str] = []

    def look() -> None:
        try:
            current_runtime()
        except RuntimeError as error:
            answers.append(str(error))

    async def main() -> None:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    on_asyncio(main)
    on_trio(main)
    assert len(answers) == 2
    assert "no task" in answers[0]


class SteppedByHand:
    """Takes the first step of a call with a time limit, wherever it is called, and notes what that says."""

    def __init__(self) -> None:
        self.pipeline = ResiliencePipelineBuilder().add_timeout(60).build()
        self.answers: list[str] = []

    def __call__(self) -> None:
        try:
            self.pipeline.execute(which).send(None)
        except RuntimeError as error:
            self.answers.append(str(error))


def test_a_time_limit_is_not_set_on_the_task_of_another_thread() -> None:
    """While that task is in the middle of a step, of the loop that was used last, this thread has none."""
    step = SteppedByHand()

    async def main() -> None:
        await step.pipeline.execute(which)
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    on_asyncio(main)
    assert len(step.answers) == 1
    assert "no task" in step.answers[0]


@pytest.mark.asyncio
async def test_a_time_limit_in_a_bare_callback_is_a_clear_error() -> None:
    """There is no task that it could cancel, though a loop runs that has just been used."""
    step = SteppedByHand()
    await step.pipeline.execute(which)
    asyncio.get_running_loop().call_soon(step)
    await tick(3)
    assert len(step.answers) == 1
    assert "no task" in step.answers[0]


def test_a_runtime_keeps_the_clock_it_was_found_with() -> None:
    """A builder's clock drives the runtimes of all loops."""
    clock = VirtualClock()
    finder = RuntimeFinder(clock)
    for run in (on_asyncio, on_trio):
        assert run(lambda: find(finder)).clock is clock


# ---- whichever is imported first ----------------------------------------------------------------------


RUN_ON_ASYNCIO = """
    import asyncio
    async def fn():
        await asyncio.sleep(0)
        return "asyncio"
    print(asyncio.run(pipeline.execute(fn)))
"""
RUN_ON_TRIO = """
    import trio
    async def fn():
        await trio.lowlevel.checkpoint()
        return "trio"
    print(trio.run(pipeline.execute, fn))
"""
BUILD = """
    from resilience_pipeline import ResiliencePipelineBuilder
    pipeline = (
        ResiliencePipelineBuilder()
        .add_retry(delay=0).add_concurrency_limiter(1, 1).add_timeout(60).build()
    )
"""


def run_script(*parts: str) -> list[str]:
    """Run a program in a fresh interpreter."""
    script = "".join(textwrap.dedent(part) for part in parts)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("parts", "printed"),
    [
        pytest.param(
            (BUILD, RUN_ON_ASYNCIO, RUN_ON_TRIO), "asyncio trio", id="ours, asyncio, trio"
        ),
        pytest.param(
            (BUILD, RUN_ON_TRIO, RUN_ON_ASYNCIO), "trio asyncio", id="ours, trio, asyncio"
        ),
        pytest.param(
            ("import trio\n", BUILD, RUN_ON_ASYNCIO, RUN_ON_TRIO),
            "asyncio trio",
            id="trio, ours, asyncio",
        ),
        pytest.param(
            ("import asyncio\n", BUILD, RUN_ON_TRIO, RUN_ON_ASYNCIO),
            "trio asyncio",
            id="asyncio, ours, trio",
        ),
        pytest.param(
            ("import trio, asyncio\n", BUILD, RUN_ON_ASYNCIO, RUN_ON_ASYNCIO),
            "asyncio asyncio",
            id="trio never runs",
        ),
        pytest.param(
            (BUILD, RUN_ON_ASYNCIO, RUN_ON_TRIO, RUN_ON_ASYNCIO, RUN_ON_TRIO),
            "asyncio trio asyncio trio",
            id="trio imported after asyncio has run",
        ),
    ],
)
def test_the_order_of_imports_does_not_matter(parts: tuple[str, ...], printed: str) -> None:
    """A pipeline works on whichever loop runs it, whatever was imported when."""
    assert run_script(*parts) == printed.split()


def test_trio_need_not_be_installed() -> None:
    """On asyncio nothing of ours asks for it."""
    hide = """
        import sys
        sys.modules["trio"] = None
    """
    assert run_script(hide, BUILD, RUN_ON_ASYNCIO) == ["asyncio"]


def test_one_loop_does_not_have_the_other_imported() -> None:
    """On asyncio trio stays out."""
    look = """
        import sys
        print("trio" in sys.modules)
    """
    assert run_script(BUILD, look, RUN_ON_ASYNCIO, look) == ["False", "asyncio", "False"]


def test_outside_of_a_task_a_time_limit_says_so_where_trio_was_never_imported() -> None:
    """A coroutine that is stepped by hand, in a callback of the loop that was used last."""
    step_by_hand = """
        limited = ResiliencePipelineBuilder().add_timeout(60).build()
        async def main():
            await limited.execute(fn)
            told = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(step, told)
            print(await told)
        def step(told):
            try:
                limited.execute(fn).send(None)
            except RuntimeError as error:
                told.set_result(str(error).partition(":")[0].replace(" ", "_"))
        asyncio.run(main())
    """
    printed = run_script(BUILD, RUN_ON_ASYNCIO, step_by_hand)
    assert printed == ["asyncio", "no_task_of_asyncio_or_trio_runs_here"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("where", ["callback", "task"])
def test_a_child_process_that_was_forked_within_a_loop_uses_its_own(where: str) -> None:
    """To the child the parent's loop seems to run still, in the very same thread."""
    fork = f"""
        import os, warnings
        warnings.simplefilter("ignore")  # of forks
        async def main():
            loop = asyncio.get_running_loop()
            await pipeline.execute(fn)
            forked = loop.create_future()
            if {where!r} == "task":
                fork(forked)
            else:
                loop.call_soon(fork, forked)
            print(await forked, flush=True)
        def fork(forked):
            pid = os.fork()
            if pid:
                forked.set_result(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            else:
                try:
                    os._exit(7 if asyncio.run(pipeline.execute(fn)) == "asyncio" else 8)
                finally:
                    os._exit(9)
        asyncio.run(main())
    """
    assert run_script(BUILD, RUN_ON_ASYNCIO, fork) == ["asyncio", "7"]
