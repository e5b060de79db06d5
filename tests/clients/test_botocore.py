"""Errors in the form in which boto3 raises them, through botocore's own stubber: no network, no credentials."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

import botocore.exceptions
import botocore.session
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from botocore.response import StreamingBody
from botocore.stub import Stubber

from resilience_pipeline import (
    CircuitBreakerControl,
    Failure,
    Rejected,
    ResiliencePipeline,
    Success,
    handle,
)
from resilience_pipeline.testing import VirtualClock
from support.live_sync import B

WHERE = {"Bucket": "bucket", "Key": "key"}


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client whose own retries are off; it signs nothing, so that it looks for no credentials."""
    config = Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1})
    client = botocore.session.get_session().create_client(
        "s3", region_name="eu-central-1", config=config
    )
    yield client
    client.close()


@pytest.fixture
def stub(s3: Any) -> Iterator[Stubber]:
    with Stubber(s3) as stub:
        yield stub


@pytest.fixture
def get(s3: Any) -> Callable[[], Any]:
    return lambda: s3.get_object(**WHERE)


@pytest.fixture(params=["unlimited", "limited"])
def pipeline(request: pytest.FixtureRequest) -> ResiliencePipeline[Any]:
    """A retry alone, in the caller's thread; and with a timeout, in worker threads."""
    builder: Any = B().add_retry(delay=0)
    built: ResiliencePipeline[Any] = (
        builder.add_timeout(60) if request.param == "limited" else builder
    ).build()
    return built


def fail(stub: Stubber, status: int, code: str = "", **headers: str) -> None:
    """The next call raises a `ClientError` with this status, and perhaps this code of the service's."""
    stub.add_client_error(
        "get_object",
        service_error_code=code,
        http_status_code=status,
        expected_params=WHERE,
        response_meta={"HTTPHeaders": headers},
    )


def succeed(stub: Stubber, body: bytes = b"") -> None:
    stream = StreamingBody(io.BytesIO(body), len(body))
    stub.add_response("get_object", {"Body": stream, "ETag": "tag"}, WHERE)


def status_of(error: object) -> int:
    assert isinstance(error, botocore.exceptions.ClientError)
    status: int = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return status


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_go_better_next_time_is_repeated(
    stub: Stubber, get: Any, pipeline: ResiliencePipeline[Any], status: int
) -> None:
    """Predicates: the status is read off `error.response["ResponseMetadata"]`."""
    fail(stub, status)
    fail(stub, status)
    succeed(stub)
    outcome = pipeline.settle_sync(get)
    assert isinstance(outcome, Success)
    assert outcome.value["ETag"] == "tag"
    assert outcome.attempt_count == 3
    stub.assert_no_pending_responses()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "InvalidRequest"),
        (403, "AccessDenied"),
        (404, "NoSuchKey"),
        (412, "PreconditionFailed"),
    ],
)
def test_a_client_error_is_not_repeated(
    stub: Stubber, get: Any, pipeline: ResiliencePipeline[Any], status: int, code: str
) -> None:
    """Predicates: a 4xx other than 408 and 429 comes out after one attempt."""
    fail(stub, status, code)
    outcome = pipeline.settle_sync(get)
    assert isinstance(outcome, Failure)
    assert status_of(outcome.error) == status
    assert outcome.attempt_count == 1


def test_the_modelled_exception_of_a_service_is_read_alike(
    s3: Any, stub: Stubber, get: Any, pipeline: ResiliencePipeline[Any]
) -> None:
    """Predicates: `client.exceptions.NoSuchKey` is a `ClientError`."""
    fail(stub, 404, "NoSuchKey")
    with pytest.raises(s3.exceptions.NoSuchKey):
        pipeline.execute_sync(get)


def test_the_last_error_comes_out_by_itself(
    stub: Stubber, get: Any, pipeline: ResiliencePipeline[Any]
) -> None:
    """Retry: attempts are used up, and the service's own error is what is raised."""
    for code in ("InternalError", "InternalError", "InternalError", "SlowDown"):
        fail(stub, 503, code)
    with pytest.raises(botocore.exceptions.ClientError, match="SlowDown"):
        pipeline.execute_sync(get)


@pytest.mark.parametrize("name", ["retry-after", "Retry-After"])
def test_retry_after_is_waited_for(stub: Stubber, get: Any, name: str) -> None:
    """Retry, `Retry-After`: read off the metadata's headers, whatever the case of their names."""
    fail(stub, 503, "SlowDown", **{name: "20"})
    succeed(stub)
    clock = VirtualClock(autojump=True)
    pipeline = B(clock=clock).add_retry(delay=1).add_timeout(10).build()
    assert pipeline.execute_sync(get)["ETag"] == "tag"
    assert clock.now() == 20


def test_throttling_that_only_a_code_tells_is_handled_by_a_predicate(
    stub: Stubber, get: Any
) -> None:
    """Predicates: some services throttle with a 400; a function of the error says so."""
    throttled = handle(
        botocore.exceptions.ClientError,
        where=lambda error: error.response["Error"]["Code"] == "ThrottlingException",
    )
    pipeline = B().add_retry(delay=0, should_handle=throttled).build()
    fail(stub, 400, "ThrottlingException")
    fail(stub, 400, "ValidationException")
    with pytest.raises(botocore.exceptions.ClientError, match="ValidationException"):
        pipeline.execute_sync(get)
    stub.assert_no_pending_responses()


def test_client_errors_leave_the_circuit_closed_and_server_errors_open_it(
    stub: Stubber, get: Any
) -> None:
    """Circuit breaker: a missing key says nothing against the service."""
    control = CircuitBreakerControl()
    pipeline = (
        B()
        .add_circuit_breaker(failure_ratio=1, minimum_throughput=2, control=control)
        .add_timeout(60)
        .build()
    )
    for _ in range(3):
        fail(stub, 404, "NoSuchKey")
        assert isinstance(pipeline.settle_sync(get), Failure)
    assert control.metrics.failures == 0
    control.close()
    for _ in range(2):
        fail(stub, 503)
        assert isinstance(pipeline.settle_sync(get), Failure)
    assert isinstance(pipeline.settle_sync(get), Rejected)


@pytest.mark.parametrize(
    "error",
    [
        botocore.exceptions.EndpointConnectionError(endpoint_url="https://example"),
        botocore.exceptions.ConnectTimeoutError(endpoint_url="https://example"),
        botocore.exceptions.ReadTimeoutError(endpoint_url="https://example"),
        botocore.exceptions.ConnectionClosedError(endpoint_url="https://example"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_without_a_status_are_repeated(
    s3: Any, get: Any, pipeline: ResiliencePipeline[Any], error: Exception
) -> None:
    """Predicates: no answer at all is handled by default; raised where botocore would send."""
    calls: list[Any] = []

    def send(request: Any, **_: Any) -> None:
        calls.append(request)
        raise error

    s3.meta.events.register("before-send.s3.GetObject", send)
    try:
        outcome = pipeline.settle_sync(get)
    finally:
        s3.meta.events.unregister("before-send.s3.GetObject", send)
    assert outcome.error is error
    assert outcome.attempt_count == len(calls) == 4


@pytest.fixture
def chunks(get: Any) -> Callable[[], Generator[bytes]]:
    """A factory as a user writes it: what a body's own `with` gives is the connection beneath it."""

    def chunks() -> Generator[bytes]:
        with closing(get()["Body"]) as body:
            yield from body.iter_chunks(1024)

    return chunks


def test_opening_a_body_is_repeated_and_leaving_it_closes_it(
    stub: Stubber, chunks: Any, pipeline: ResiliencePipeline[Any]
) -> None:
    """Streams: what is before the first chunk is repeated, `with` closes the source."""
    raw = io.BytesIO(b"x" * 3000)
    fail(stub, 503)
    stub.add_response("get_object", {"Body": StreamingBody(raw, 3000)}, WHERE)
    with pipeline.execute_stream_sync(chunks) as stream:
        assert next(stream) == b"x" * 1024
        assert not raw.closed
    assert raw.closed


def test_a_body_that_is_too_short_reaches_the_loop(
    stub: Stubber, chunks: Any, pipeline: ResiliencePipeline[Any]
) -> None:
    """Streams: botocore's own check of the length fails past the line, and nothing is repeated."""
    stub.add_response("get_object", {"Body": StreamingBody(io.BytesIO(b"abc"), 5)}, WHERE)
    got: list[bytes] = []
    with (
        pipeline.execute_stream_sync(chunks) as stream,
        pytest.raises(botocore.exceptions.IncompleteReadError),
    ):
        read_into(got, stream)
    assert got == [b"abc"]


def read_into(got: list[bytes], chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        got.append(chunk)
