"""Never run: what type checkers make of outcomes: the rejection union, exhaustive matches, narrowing."""

from __future__ import annotations

from typing import Literal, Never, NoReturn, assert_never, assert_type

from resilience_pipeline import (
    Attempt,
    BrokenCircuitError,
    Failure,
    Outcome,
    Rejected,
    ResiliencePipeline,
    ResiliencePipelineBuilder,
    Success,
    TimeoutRejectedError,
)

Refusal = BrokenCircuitError | TimeoutRejectedError

pipeline = ResiliencePipelineBuilder().add_retry().add_circuit_breaker().add_timeout("10s").build()


async def fetch(url: str, retries: int = 3) -> bytes:
    raise NotImplementedError


# ---- what settle gives --------------------------------------------------------------------------


async def settle() -> None:
    outcome = await pipeline.settle(fetch, "url")
    assert_type(outcome, Success[bytes] | Rejected[Refusal] | Failure)
    alias: Outcome[bytes, Refusal] = outcome
    wider: Outcome[object, Exception] = outcome
    default: Outcome[bytes] = outcome
    del alias, wider, default

    assert_type(outcome.attempts, tuple[Attempt, ...])
    assert_type(outcome.attempt_count, int)
    assert_type(outcome.unwrap(), bytes)
    assert_type(outcome.value_or(None), bytes | None)
    assert_type(outcome.map(len), Success[int] | Rejected[Refusal] | Failure)

    narrower: Outcome[bytes, TimeoutRejectedError] = outcome  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    other: Outcome[str, Refusal] = outcome  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    del narrower, other
    outcome.value  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    await pipeline.settle(fetch, 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await pipeline.settle(fetch)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def nothing_can_refuse() -> None:
    outcome = await ResiliencePipeline.empty.settle(fetch, "url")
    assert_type(outcome, Success[bytes] | Rejected[Never] | Failure)


# ---- exhaustive matches -------------------------------------------------------------------------


async def matched_by_position() -> int:
    outcome = await pipeline.settle(fetch, "url")
    match outcome:
        case Success(value):
            assert_type(value, bytes)
            return 1
        case Rejected(error):
            assert_type(error, Refusal)
            match error:
                case BrokenCircuitError():
                    return 2
                case TimeoutRejectedError():
                    assert_type(error.timeout, float)
                    return 3
                case _:
                    assert_never(error)
        case Failure(error):
            assert_type(error, Exception)
            return 4
        case _:
            assert_never(outcome)


async def matched_by_name() -> str:
    outcome = await pipeline.settle(fetch, "url")
    match outcome:
        case Success(value=value):
            return value.decode()
        case Rejected(error=error):
            return f"{error.pipeline_name} {error.strategy_name} {error.retry_after}"
        case Failure(error=error):
            return str(error)


async def without_an_arm() -> None:
    outcome = await pipeline.settle(fetch, "url")
    match outcome:
        case Success():
            pass
        case Failure():
            pass
        case _:
            assert_never(outcome)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def without_a_rejection() -> None:
    outcome = await pipeline.settle(fetch, "url")
    if isinstance(outcome, Rejected):
        match outcome.error:
            case TimeoutRejectedError():
                pass
            case rest:
                assert_type(rest, BrokenCircuitError)
                assert_never(rest)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def by_instance() -> bytes:
    outcome = await pipeline.settle(fetch, "url")
    if isinstance(outcome, Success):
        return outcome.value
    if isinstance(outcome, Rejected):
        assert_type(outcome.error, Refusal)
        return b""
    assert_type(outcome, Failure)
    return b"" if outcome.error.args else b"-"


async def by_error() -> bytes:
    outcome = await pipeline.settle(fetch, "url")
    if outcome.error is None:
        return outcome.value
    raise outcome.error


# ---- the method `match` -------------------------------------------------------------------------


def of_value(value: bytes) -> int:
    return len(value)


def of_refusal(error: Refusal) -> int:
    return int(error.retry_after or 0)


def of_time_out(error: TimeoutRejectedError) -> int:
    return int(error.timeout)


def of_text(value: str) -> int:
    return len(value)


def of_error(error: Exception) -> int:
    return len(error.args)


async def method() -> None:
    outcome = await pipeline.settle(fetch, "url")
    assert_type(outcome.match(success=of_value, rejected=of_refusal, failure=of_error), int)
    assert_type(outcome.match(success=of_value, failure=of_error), int)
    assert_type(
        outcome.match(
            success=lambda value: value[0],
            rejected=lambda error: int(error.retry_after or 0),
            failure=lambda error: len(error.args),
        ),
        int,
    )
    outcome.match(success=of_text, failure=of_error)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    outcome.match(success=of_value, rejected=of_time_out, failure=of_error)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    outcome.match(success=of_value, rejected=of_refusal)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


# ---- by hand ------------------------------------------------------------------------------------


def by_hand() -> None:
    assert_type(Success([1]), Success[list[int]])
    assert_type(Success(1).ok, Literal[True])
    assert_type(Failure(ValueError()).ok, Literal[False])
    assert_type(Rejected(TimeoutRejectedError()), Rejected[TimeoutRejectedError])
    assert_type(Rejected(TimeoutRejectedError()).error, TimeoutRejectedError)
    assert_type(Success(1).map(str), Success[str])
    assert_type(Success(1).value_or("x"), int)
    assert_type(Failure(ValueError()).value_or("x"), str)

    covariant: Success[object] = Success(1)
    del covariant
    Failure(KeyboardInterrupt())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Success(1).value = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def unwrap_never_returns(failure: Failure) -> NoReturn:
    failure.unwrap()
