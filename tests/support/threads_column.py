"""The third column: tests of coroutines that run on asyncio, on trio, and in threads.

A test marked ``@pytest.mark.anyio`` in one of `MODULES` gets ``threads`` as a third value of its `anyio_backend` if it
can run there, see `support.threadable`; how it does is said in `support.in_threads`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.in_threads import run_in_thread
from support.threadable import runs_in_threads

THREADS = "threads"
BACKENDS = ["asyncio", "trio"]

#: Modules with a third column, and how many of their test functions have it at least.
MODULES: dict[str, int] = {
    "test_chaos": 38,
    "test_instant": 16,
    "test_clock_drives": 9,
    "test_cache": 28,
    "test_circuit_breaker": 75,
    "test_fallback": 40,
    "test_hedging": 48,
    "test_hedging_contexts": 41,
    "test_hedging_losers": 17,
    "test_percentile_delay": 9,
    "test_rate_limiter": 27,
    "test_retry": 42,
    "test_retry_budget": 20,
    "test_retry_edges": 23,
    "test_retry_repeats": 15,
    "test_timeout": 29,
    "test_concurrency_limiter": 3,
    "test_lock": 6,
    "test_record_replay": 20,
    "test_attempts": 18,
    "test_composition": 30,
    "test_failing_hooks": 4,
    "test_nesting": 17,
    "test_predicates": 13,
    "test_retry_after": 30,
    "test_settle": 31,
    "test_pipeline": 20,
    "test_context": 9,
    "test_errors": 8,
    "test_events": 25,
}

#: Tests that could run in threads but say something that does not hold there, by what holds instead.
NOT_THERE: dict[str, frozenset[str]] = {
    "which of several threads that wake at one instant comes first is open": frozenset(
        {
            "test_each_attempt_has_a_context_of_its_own",
            "test_of_nested_limits_the_right_one_is_named",
            "test_of_simultaneous_outcomes_the_lowest_that_is_not_handled_wins",
            "test_what_the_hook_writes_for_the_attempt_is_seen_by_it_alone",
        }
    ),
    "with delay 0 and no virtual clock an attempt may not have come to its end when the next one starts": frozenset(
        {
            "test_a_misuse_is_not_hedged",
            "test_with_delay_zero_a_first_attempt_that_never_waits_is_the_only_one",
            "test_with_delay_zero_a_complete_attempt_is_looked_at_first",
            "test_with_delay_zero_an_unhandled_error_without_a_wait_starts_no_hedge",
        }
    ),
    "a thread is known to the clock of its own call alone": frozenset(
        {
            "test_a_nested_pipelines_clock_drives_its_attempts_alone",
            "test_a_time_limit_of_a_nested_pipeline_goes_by_its_own_clock",
            "test_without_a_clock_of_ours_the_loops_own_time_serves",
        }
    ),
    "what a call brings that was given up on reaches nobody": frozenset(
        {
            "test_case_to_03_another_error_past_the_deadline_is_kept",
        }
    ),
    "a time limit gives its inside a copy of the context and of the context variables": frozenset(
        {
            "test_a_context_given_holds_its_own_options",
            "test_context_variables_set_inside_are_visible_to_the_caller",
        }
    ),
    "words and rules of execute() and execute_stream() themselves": frozenset(
        {
            "test_what_gives_no_awaitable_is_misuse",
            "test_misuse_is_never_retried_replaced_or_counted",
            "test_a_coroutine_in_place_of_its_function_is_closed",
            "test_generators_that_were_made_by_mistake_are_closed",
            "test_a_factory_that_gives_no_async_iterable_is_misuse",
            "test_wrap_makes_streams_of_async_generator_functions",
        }
    ),
}


def has_threads(item: pytest.Item) -> bool:
    """Whether a test runs in threads this time."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("anyio_backend") == THREADS


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test its third column."""
    test = metafunc.definition
    if "anyio_backend" not in metafunc.fixturenames or test.get_closest_marker("anyio") is None:
        return
    if metafunc.module.__name__.rpartition(".")[2] not in MODULES or any(
        test.name in names for names in NOT_THERE.values()
    ):
        return
    if any("anyio_backend" in mark.args[0] for mark in test.iter_markers("parametrize")):
        return  # it says for itself where it runs
    if runs_in_threads(metafunc.function, test.iter_markers()):
        column = pytest.mark.parametrize("anyio_backend", [*BACKENDS, THREADS], indirect=True)
        test.add_marker(column)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in a thread."""
    if not has_threads(pyfuncitem):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in names}
    run_in_thread(partial(pyfuncitem.obj, **arguments))
    return True
