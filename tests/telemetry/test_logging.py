"""The log: which events become records of the logger `resilience_pipeline`, and what these carry."""

from __future__ import annotations

import copy
import logging
import logging.config
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resilience_pipeline
from resilience_pipeline import (
    FixedWindow,
    ResilienceContext,
    ResiliencePipelineBuilder,
    TimeoutRejectedError,
)
from resilience_pipeline._switches import switches
from resilience_pipeline.strategies import Handler, Site, Strategy
from resilience_pipeline.telemetry import Severity, StrategyEvent, _listeners
from resilience_pipeline.testing import VirtualClock
from support.scripted import Hanging, Scripted

B = ResiliencePipelineBuilder
NAME = "resilience_pipeline"
LOGGER = logging.getLogger(NAME)
ROOT = Path(resilience_pipeline.__file__).parent.parent


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Give the logger its level, handlers and filters back."""
    level, handlers, filters = LOGGER.level, LOGGER.handlers[:], LOGGER.filters[:]
    yield
    LOGGER.setLevel(level)
    LOGGER.handlers[:] = handlers
    LOGGER.filters[:] = filters
    assert not switches.on


def names(records: list[logging.LogRecord]) -> list[Any]:
    return [vars(record)["event_name"] for record in records]


# ---- trouble ------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_trouble_is_logged_with_its_severity(caplog: pytest.LogCaptureFixture) -> None:
    """Retries, timeouts, refusals, transitions, hedges and fallbacks, at the events' severities."""
    clock = VirtualClock(autojump=True)
    pipeline = (
        B("p", clock=clock)
        .add_fallback(fallback_value=0)
        .add_rate_limiter(FixedWindow(1, 60))
        .add_circuit_breaker(failure_ratio=0.5, minimum_throughput=2, sampling_duration="1h")
        .add_hedging(delay=-1)
        .add_retry(max_retry_attempts=1, delay=1)
        .add_timeout(5)
        .build()
    )
    for _ in range(2):
        await pipeline.execute(Hanging())
    await clock.advance(60)
    await pipeline.execute(Scripted(OSError))
    assert [(record.levelno, vars(record)["event_name"]) for record in caplog.records] == [
        *[(40, "OnTimeout"), (30, "OnRetry"), (40, "OnTimeout"), (30, "OnHedging")],
        *[(40, "OnTimeout"), (30, "OnRetry"), (40, "OnTimeout"), (30, "OnFallback")],
        *[(40, "OnRateLimiterRejected"), (30, "OnFallback")],
        *[(30, "OnRetry"), (30, "OnHedging"), (30, "OnRetry")],
        *[(40, "OnCircuitOpened"), (30, "OnFallback")],
    ]
    assert {record.name for record in caplog.records} == {NAME}


@pytest.mark.anyio
async def test_records_carry_the_facts(caplog: pytest.LogCaptureFixture) -> None:
    """The fields of the contract, the event's own figures, and the error's type."""
    pipeline = B("p", instance="i").add_retry(delay=0, name="R").build()
    await pipeline.execute(Scripted(ConnectionError("no route"), 1), operation_key="op")
    (record,) = caplog.records
    facts = vars(record)
    assert facts["event_name"] == "OnRetry"
    assert (facts["pipeline_name"], facts["pipeline_instance"]) == ("p", "i")
    assert (facts["strategy_name"], facts["operation_key"]) == ("R", "op")
    assert (facts["attempt"], facts["delay"]) == (0, 0.0)
    assert facts["exception_type"] == "ConnectionError"
    assert record.getMessage().startswith(
        "OnRetry: pipeline 'p', instance 'i', strategy 'R', operation 'op': "
        "ConnectionError: no route (attempt=0, delay=0"
    )


@pytest.mark.anyio
async def test_what_there_is_not_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """TL-05: without names, the fields are there and `None`."""
    with pytest.raises(TimeoutRejectedError):
        await B(clock=VirtualClock(autojump=True)).add_timeout(3).build().execute(Hanging())
    (record,) = caplog.records
    facts = vars(record)
    assert (facts["pipeline_name"], facts["pipeline_instance"]) == (None, None)
    assert (facts["operation_key"], facts["duration"]) == (None, None)
    assert (facts["exception_type"], facts["timeout"]) == (None, 3)


@pytest.mark.anyio
async def test_the_usual_level_is_heeded(caplog: pytest.LogCaptureFixture) -> None:
    """What the logger, or `logging.disable`, does not let through is no record."""
    pipeline = B().add_retry(delay=0).build()
    caplog.set_level(logging.ERROR, logger=NAME)
    await pipeline.execute(Scripted(OSError, 1))
    caplog.set_level(logging.WARNING, logger=NAME)
    logging.disable()
    try:
        await pipeline.execute(Scripted(OSError, 1))
    finally:
        logging.disable(logging.NOTSET)
    assert caplog.records == []
    await pipeline.execute(Scripted(OSError, 1))
    assert len(caplog.records) == 1


# ---- what comes with every execution ------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
async def test_executions_are_not_logged_for_the_root_loggers_sake(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that logs at INFO doesn't mean each of its calls."""
    caplog.set_level(level)
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert names(caplog.records) == ["OnRetry"]
    assert not switches.on


@pytest.mark.anyio
@pytest.mark.parametrize("level", [logging.DEBUG, logging.NOTSET])
async def test_executions_are_logged_where_the_program_logs_everything(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By the root logger's level, set before or after the pipeline was built; and no longer than that."""
    pipeline = B().add_retry(delay=0).build()
    before = logging.getLogger().level
    caplog.set_level(level)
    await pipeline.execute(Scripted(OSError, 1))
    logging.getLogger().setLevel(before)
    assert not switches.on
    await pipeline.execute(Scripted(1))
    logged = [record for record in caplog.records if record.name == NAME]
    assert names(logged) == [
        "PipelineExecuting",
        "ExecutionAttempt",
        "OnRetry",
        "ExecutionAttempt",
        "PipelineExecuted",
    ]


@pytest.mark.anyio
async def test_its_own_level_goes_before_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=NAME)
    caplog.set_level(logging.DEBUG)
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert names([record for record in caplog.records if record.name == NAME]) == ["OnRetry"]
    assert not switches.on


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (
            logging.DEBUG,
            ["PipelineExecuting", "ExecutionAttempt", "OnRetry", "ExecutionAttempt", "PipelineExecuted"],
        ),
        (logging.INFO, ["ExecutionAttempt", "OnRetry", "ExecutionAttempt", "PipelineExecuted"]),
        (logging.WARNING, ["OnRetry"]),
    ],
)  # fmt: skip
async def test_executions_are_logged_where_this_logger_is_asked_to(
    level: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """By the level of `resilience_pipeline` itself, with what the call came to and how long it took."""
    pipeline = B("p").add_retry(delay=0).build()
    with caplog.at_level(level, logger=NAME):
        await pipeline.execute(Scripted(OSError, 1))
    assert names(caplog.records) == expected
    assert not switches.on
    caplog.clear()
    await pipeline.execute(Scripted(1))
    assert caplog.records == []


@pytest.mark.anyio
async def test_a_configuration_can_ask_for_executions(caplog: pytest.LogCaptureFixture) -> None:
    """`dictConfig` sets the level as anybody does."""
    logging.config.dictConfig(
        {
            "version": 1,
            "incremental": True,
            "loggers": {NAME: {"level": "INFO"}},
        }
    )
    await B().build().execute(Scripted(1))
    assert names(caplog.records) == ["PipelineExecuted"]
    assert vars(caplog.records[0])["duration"] >= 0


@pytest.mark.anyio
async def test_results_are_not_written(caplog: pytest.LogCaptureFixture) -> None:
    """TL-08: the error's message is shown; of a result, which may be secret or long, its type."""
    with caplog.at_level(logging.INFO, logger=NAME):
        await B().build().execute(Scripted("s3cret"))
        await B().build().settle(Scripted(OSError("x" * 5000)))
    assert "gave str" in caplog.messages[0]
    assert "s3cret" not in caplog.text
    assert "OSError: xxx" in caplog.messages[1]
    assert len(caplog.messages[1]) < 700


# ---- at another level ---------------------------------------------------------------------------


class Level(logging.Filter):
    """What Polly's severity provider does: gives the records of some events another level."""

    def __init__(self, **levels: int) -> None:
        super().__init__()
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        level = self._levels.get(vars(record).get("event_name", ""))
        if level is not None:
            record.levelno, record.levelname = level, logging.getLevelName(level)
        return True


class Kept(logging.Handler):
    """A handler that keeps what passes its level."""

    def __init__(self, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []
        LOGGER.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def told(self) -> list[tuple[str, Any]]:
        return [(record.levelname, vars(record)["event_name"]) for record in self.records]


@pytest.mark.anyio
async def test_a_filter_lowers_a_level() -> None:
    """TL-02: a handler that takes warnings alone drops the record; others have it with its new level."""
    LOGGER.addFilter(Level(OnRetry=logging.DEBUG))
    strict, lenient = Kept(logging.WARNING), Kept()
    pipeline = B().add_fallback(fallback_value=0).add_retry(max_retry_attempts=1, delay=0).build()
    assert await pipeline.execute(Scripted(OSError, OSError)) == 0
    assert strict.told == [("WARNING", "OnFallback")]
    assert lenient.told == [("DEBUG", "OnRetry"), ("WARNING", "OnFallback")]


@pytest.mark.anyio
async def test_a_filter_raises_a_level() -> None:
    """TL-02: a handler that takes what is critical alone takes the record."""
    LOGGER.addFilter(Level(OnTimeout=logging.CRITICAL))
    strict = Kept(logging.CRITICAL)
    pipeline = (
        B(clock=VirtualClock(autojump=True))
        .add_retry(max_retry_attempts=1, delay=0)
        .add_timeout(1)
        .build()
    )
    with pytest.raises(TimeoutRejectedError):
        await pipeline.execute(Hanging())
    assert strict.told == [("CRITICAL", "OnTimeout")] * 2


@pytest.mark.anyio
async def test_executions_at_another_level() -> None:
    """TL-02: PipelineExecuting and PipelineExecuted too, where the logger's level lets them come so far."""
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.addFilter(Level(PipelineExecuting=logging.WARNING, PipelineExecuted=logging.DEBUG))
    strict, lenient = Kept(logging.INFO), Kept()
    await B().add_retry(delay=0).build().execute(Scripted(1))
    assert strict.told == [("WARNING", "PipelineExecuting"), ("INFO", "ExecutionAttempt")]
    assert lenient.told == [*strict.told, ("DEBUG", "PipelineExecuted")]


@pytest.mark.anyio
async def test_the_loggers_level_comes_before_its_filters() -> None:
    """TL-02: as for everybody's records: what it doesn't let through is raised by nobody."""
    LOGGER.setLevel(logging.WARNING)
    LOGGER.addFilter(Level(PipelineExecuted=logging.CRITICAL, OnRetry=logging.DEBUG))
    lenient = Kept()
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert lenient.told == [("DEBUG", "OnRetry")]


@pytest.mark.anyio
async def test_a_filter_of_a_handler_changes_what_it_writes() -> None:
    """TL-02: by then its level has been looked at, which is that of the event."""
    handler, after = Kept(logging.WARNING), Kept(logging.WARNING)
    handler.addFilter(Level(OnRetry=logging.DEBUG))
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert handler.told == [("DEBUG", "OnRetry")]
    assert after.told == []  # it is one record, and has changed for whoever comes later


@pytest.mark.skipif(sys.version_info < (3, 12), reason="filters give no records before 3.12")
@pytest.mark.anyio
async def test_a_filter_may_give_a_changed_copy() -> None:
    """TL-02: of a handler's own, so that nobody else's record changes."""

    def quieter(record: logging.LogRecord) -> Any:
        copied = copy.copy(record)
        copied.levelno, copied.levelname = logging.DEBUG, "DEBUG"
        return copied

    handler, after = Kept(), Kept(logging.WARNING)
    handler.addFilter(quieter)
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert handler.told == [("DEBUG", "OnRetry")]
    assert after.told == [("WARNING", "OnRetry")]
    handler.removeFilter(quieter)
    LOGGER.addFilter(quieter)
    await B().add_retry(delay=0).build().execute(Scripted(OSError, 1))
    assert handler.told == [("DEBUG", "OnRetry")] * 2
    assert after.told == [("WARNING", "OnRetry")]


# ---- none of it touches the call ----------------------------------------------------------------


class ClashingEvent(StrategyEvent):
    name = "OnClash"
    severity: Severity = Severity.ERROR
    module: str
    args: int
    message: str
    count: int


class Clashing(Strategy[Any]):
    name = "Clashing"

    def bind(self, next: Handler, site: Site) -> Handler:  # noqa: A002
        def handle(context: ResilienceContext) -> Any:
            site.report(ClashingEvent(context=context, module="m", args=1, message="x", count=2))
            return next(context)

        return handle


@pytest.mark.anyio
async def test_fields_that_records_have_already_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An event's field called `module` or `args` is in the message, and not in the record."""
    await B().add(Clashing()).build().execute(Scripted(1))
    (record,) = caplog.records
    assert record.module == "_logging"
    assert vars(record)["count"] == 2
    assert "module='m', args=1, message='x', count=2" in record.getMessage()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.anyio
async def test_an_error_that_can_not_be_written_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What its text raises is complained of, and the retry goes on."""
    _listeners._complained_for_good.clear()
    for _ in range(2):
        assert await B().add_retry(delay=0).build().execute(Scripted(UnspeakableError(), 1)) == 1
    assert caplog.text.count("no words") >= 1
    assert len(caplog.records) == 1


@pytest.mark.anyio
async def test_a_filter_that_raises_harms_nobody() -> None:
    """Nor does what the program has put on the logger."""

    def refuse(record: logging.LogRecord) -> bool:
        raise RuntimeError

    LOGGER.addFilter(refuse)
    try:
        assert await B().add_retry(delay=0).build().execute(Scripted(OSError, 1)) == 1
    finally:
        LOGGER.removeFilter(refuse)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )


FAILING = """
from resilience_pipeline import ResiliencePipelineBuilder
def listener(event): raise ValueError
def fail(): raise OSError
pipeline = ResiliencePipelineBuilder(listeners={listeners}).add_retry(max_retry_attempts=1, delay=0).build()
pipeline.settle_sync(fail)
"""


@pytest.mark.parametrize("listeners", ["[listener]", "()"])
@pytest.mark.parametrize("before", ["", "import logging"])
def test_a_program_without_logging_prints_nothing(before: str, listeners: str) -> None:
    """Neither of retries nor of listeners that raise."""
    done = run(before + FAILING.format(listeners=listeners))
    assert (done.stdout, done.stderr) == ("", "")


def test_logging_is_not_imported_for_its_own_sake() -> None:
    """A program that doesn't use it doesn't pay for it."""
    run(FAILING.format(listeners="()") + "import sys; assert 'logging' not in sys.modules")


@pytest.mark.parametrize(
    "order", ["import logging, resilience_pipeline", "import resilience_pipeline, logging"]
)
def test_whichever_is_imported_first_is_heard(order: str) -> None:
    """Logging may be configured before or after the library is imported."""
    program = (
        order
        + "\nlogging.basicConfig(level='INFO', format='%(levelname)s %(event_name)s')"
        + FAILING.format(listeners="()")
        + "logging.getLogger('resilience_pipeline').setLevel('INFO')\n"
        + "pipeline.execute_sync(int)"
    )
    assert run(program).stderr.splitlines() == [
        "WARNING OnRetry",
        "INFO ExecutionAttempt",
        "INFO PipelineExecuted",
    ]
