"""requests and urllib3 under a pipeline, in plain threads, against real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import pytest
import requests
import urllib3

from resilience_pipeline import (
    CircuitBreakerControl,
    Failure,
    Rejected,
    ResiliencePipeline,
    RetryEvent,
    Success,
    TimeoutRejectedError,
    current_context,
    handle,
    handle_result,
)
from resilience_pipeline._demo import DieAfter, Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.beside import LIMIT, Beside, HandClock, until
from support.live import (
    ALL,
    ONE_AND_SILENCE,
    PATIENT,
    address_that_refuses,
    token,
)
from support.live_sync import (
    B,
    Inside,
    leave_at_the_first_token,
    read_into,
    statuses,
    takes,
    tokens_in,
)

Lines: TypeAlias = Iterable[str] | AbstractContextManager[Iterable[str]]


@pytest.fixture
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture
def pool() -> Iterator[urllib3.PoolManager]:
    with urllib3.PoolManager(retries=False) as pool:
        yield pool


@pytest.fixture
def get(session: requests.Session, server: ThreadedFlakyServer) -> Callable[[], requests.Response]:
    """A call as a user writes it: the request and the look at its status."""

    def get() -> requests.Response:
        response = session.get(f"{server.url}/data")
        response.raise_for_status()
        return response

    return get


@pytest.fixture
def open_stream(
    session: requests.Session, server: ThreadedFlakyServer
) -> Callable[[], requests.Response]:
    return partial(session.get, f"{server.url}/stream", stream=True)


@pytest.fixture(params=["manager", "generator"])
def source(
    request: pytest.FixtureRequest, open_stream: Callable[[], requests.Response]
) -> Callable[[], Lines]:
    """A factory of streams of lines, written in either way; `token` finds the tokens among them."""

    @contextmanager
    def manager() -> Generator[Iterable[str]]:
        with open_stream() as response:
            response.raise_for_status()
            yield response.iter_lines(chunk_size=1, decode_unicode=True)

    def generator() -> Generator[str]:
        with manager() as lines:
            for line in lines:
                if token(line):
                    yield line

    return generator if request.param == "generator" else manager


@pytest.fixture(params=["unlimited", "limited"])
def pipeline(request: pytest.FixtureRequest) -> ResiliencePipeline[Any]:
    """A retry alone, in the caller's thread; and with a timeout, in worker threads."""
    builder: Any = B().add_retry(max_retry_attempts=4, delay=0)
    built: ResiliencePipeline[Any] = (
        builder.add_timeout(60) if request.param == "limited" else builder
    ).build()
    return built


def status_of(error: object) -> int:
    assert isinstance(error, requests.HTTPError)
    assert error.response is not None
    return error.response.status_code


# ---- requests: calls --------------------------------------------------------------------------


def test_calls_are_repeated_and_leave_a_history(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], get: Any
) -> None:
    """Threads: a status and a reset connection are failures as they are in an event loop."""
    server.script(Status(503), Refuse(), Tokens())
    outcome = pipeline.settle_sync(get)
    assert isinstance(outcome, Success)
    assert outcome.value.json() == {"number": 2, "text": "".join(ALL)}
    first, second, third = outcome.attempts
    assert status_of(first.outcome and first.outcome.error) == 503
    assert isinstance(second.outcome and second.outcome.error, requests.ConnectionError)
    assert third.outcome == Success(outcome.value)


def test_a_refused_connection_is_repeated_and_comes_out_by_itself(
    session: requests.Session, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: nobody listens there, five times."""
    with address_that_refuses() as url:
        outcome = pipeline.settle_sync(session.get, url)
    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, requests.ConnectionError)
    assert outcome.attempt_count == 5


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_client_error_is_not_repeated(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], get: Any, status: int
) -> None:
    """Predicates: a 4xx other than 408 and 429, read off `HTTPError`."""
    server.default = Status(status)
    outcome = pipeline.settle_sync(get)
    assert isinstance(outcome, Failure)
    assert status_of(outcome.error) == status
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 504])
def test_what_may_go_better_next_time_is_repeated(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], get: Any, status: int
) -> None:
    """Predicates: 408, 429 and 5xx, read off `HTTPError`."""
    server.script(Status(status))
    assert pipeline.execute_sync(get).ok
    assert statuses(server) == [status, 200]


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("limited", [False, True])
def test_retry_after_is_waited_for(
    server: ThreadedFlakyServer, get: Any, status: int, limited: bool
) -> None:
    """Retry, `Retry-After`: read off `HTTPError`, waited in full on the pipeline's clock."""
    server.script(Status(status, retry_after=30), Tokens())
    clock = VirtualClock(autojump=True)
    builder: Any = B(clock=clock).add_retry(delay=1)
    pipeline = (builder.add_timeout(10) if limited else builder).build()
    assert pipeline.execute_sync(get).ok
    assert clock.now() == 30


@pytest.mark.realtime
def test_the_clients_own_time_out_is_a_failure_like_any(
    server: ThreadedFlakyServer, session: requests.Session, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: what ends a stall in a thread for good is the client's `timeout=`."""
    server.script(Stall(), Stall(after="headers"), Tokens())
    events: list[RetryEvent] = []
    patient = B().add_retry(**PATIENT, on_retry=events.append).add_pipeline(pipeline).build()
    assert patient.execute_sync(partial(session.get, f"{server.url}/data", timeout=0.15)).ok
    for number in (0, 1):
        assert server.wait_closed_by_client(number)


@pytest.mark.realtime
def test_a_call_that_hangs_is_left_behind_and_repeated() -> None:
    """Threads: a call that timed out runs on, unobserved, until its socket lets it go."""
    with ThreadedFlakyServer(Stall(), Tokens()) as server, requests.Session() as session:
        session.trust_env = False
        inside = Inside()

        def call() -> requests.Response:
            with inside:
                return session.get(f"{server.url}/data")

        errors: list[Exception | None] = []
        pipeline = (
            B()
            .add_retry(**PATIENT, on_retry=lambda event: errors.append(event.outcome.error))
            .add_timeout(0.15)
            .build()
        )
        assert pipeline.execute_sync(call).ok
        assert {type(error) for error in errors} == {TimeoutRejectedError}
        assert inside.count >= 1
        assert server.requests[0].ending is None
    inside.wait_empty()


def test_a_response_that_comes_too_late_is_closed(
    server: ThreadedFlakyServer, open_stream: Any
) -> None:
    """Threads: the late result of a call that timed out is closed."""
    server.script(ONE_AND_SILENCE)
    clock = VirtualClock(autojump=True)
    responses: list[requests.Response] = []  # so that none is closed for want of an owner

    def slow() -> requests.Response:
        responses.append(open_stream())
        takes(clock, 60)
        return responses[0]

    outcome = B(clock=clock).add_timeout(10).build().settle_sync(slow)
    assert isinstance(outcome, Rejected)
    assert server.wait_closed_by_client(0)


def test_a_loser_that_answers_late_is_closed(server: ThreadedFlakyServer, open_stream: Any) -> None:
    """Threads: the call returns without the loser of a race, whose late result is closed."""
    server.default = ONE_AND_SILENCE
    clock = VirtualClock(autojump=True)
    responses: list[requests.Response] = []  # so that none is closed for want of an owner

    def replica() -> requests.Response:
        response: requests.Response = open_stream()
        responses.append(response)
        if current_context().attempt == 0:
            takes(clock, 60)
        return response

    with B(clock=clock).add_hedging(delay=1).build().execute_sync(replica) as response:
        assert server.wait_closed_by_client(0)
        assert server.requests[1].ending is None
        assert next(response.iter_lines(chunk_size=1)) == b": ready"


def test_code_that_looks_can_stop_by_itself(server: ThreadedFlakyServer, open_stream: Any) -> None:
    """Threads: `current_context().cancelled` tells a call that nobody waits for it any more."""
    server.default = Tokens([str(number) for number in range(100)], interval=0.001)
    clock = VirtualClock(autojump=True)
    read: list[bytes] = []
    stopped = threading.Event()

    def download() -> bytes:
        with open_stream() as response:
            for data in response.iter_content(64):
                read.append(data)
                takes(clock, 7)
                if current_context().cancelled.is_set():
                    break
        stopped.set()
        return b"".join(read)

    outcome = B(clock=clock).add_timeout(10).build().settle_sync(download)
    assert isinstance(outcome, Rejected)
    assert stopped.wait(30)
    assert len(read) == 2


@pytest.mark.parametrize("limited", [False, True])
def test_responses_that_a_predicate_drops_are_closed(
    server: ThreadedFlakyServer, open_stream: Any, limited: bool
) -> None:
    """Retry: a handled result is closed before the next attempt, the one that is returned is not."""
    server.default = ONE_AND_SILENCE
    responses: list[requests.Response] = []

    def call() -> requests.Response:
        if responses:
            server.wait_closed_by_client(len(responses) - 1)
        responses.append(open_stream())
        return responses[-1]

    builder: Any = B().add_retry(
        delay=0,
        should_handle=handle(requests.ConnectionError)
        | handle_result(lambda _: len(responses) < 3),
    )
    pipeline = (builder.add_timeout(60) if limited else builder).build()
    with pipeline.execute_sync(call) as response:
        assert response is responses[2]
        assert server.requests[2].ending is None
        assert next(response.iter_lines(chunk_size=1)) == b": ready"


def test_a_bad_response_is_falsy_and_a_value_all_the_same(
    server: ThreadedFlakyServer, session: requests.Session, pipeline: ResiliencePipeline[Any]
) -> None:
    """Calling: without `raise_for_status()` a 503 is a result, though `bool(response)` is false."""
    server.default = Status(503)
    response = pipeline.execute_sync(session.get, f"{server.url}/data")
    assert response.status_code == 503
    assert len(server.requests) == 1


def test_retry_after_is_read_off_a_response_that_is_handled(
    server: ThreadedFlakyServer, session: requests.Session
) -> None:
    """Retry, `Retry-After`: of a response as well as of an exception."""
    server.script(Status(503, retry_after=20), Tokens())
    clock = VirtualClock(autojump=True)
    bad = handle_result(lambda response: response.status_code >= 500)
    pipeline = B(clock=clock).add_retry(delay=1, should_handle=bad).build()
    assert pipeline.execute_sync(session.get, f"{server.url}/data").ok
    assert clock.now() == 20


def test_a_wrapped_function_stays_a_plain_function(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], session: requests.Session
) -> None:
    """Calling, `wrap`: a plain function through `execute_sync`."""
    server.script(Status(500))

    @pipeline.wrap
    def text(path: str, *, upper: bool = False) -> str:
        response = session.get(server.url + path)
        response.raise_for_status()
        said: str = response.json()["text"]
        return said.upper() if upper else said

    assert text("/data", upper=True) == "".join(ALL).upper()
    assert statuses(server) == [500, 200]


def test_one_circuit_for_calls_and_streams(
    server: ThreadedFlakyServer, get: Any, source: Callable[[], Lines]
) -> None:
    """Circuit breaker: failures of both kinds open it, and the first success closes it."""
    server.script(Status(500), Refuse(), Tokens(["back"]))
    clock, control = VirtualClock(autojump=True), CircuitBreakerControl()
    pipeline = (
        B(clock=clock)
        .add_circuit_breaker(
            failure_ratio=1, minimum_throughput=2, break_duration=30, control=control
        )
        .add_timeout(10)
        .build()
    )
    with pytest.raises(requests.HTTPError):
        tokens_in(pipeline.execute_stream_sync(source))
    assert isinstance(pipeline.settle_sync(get), Failure)
    assert isinstance(pipeline.settle_sync(get), Rejected)
    assert len(server.requests) == 2
    B(clock=clock).build().execute_sync(lambda: takes(clock, 30))
    assert tokens_in(pipeline.execute_stream_sync(source)) == ["back"]
    assert control.state == "closed"


# ---- requests: streams ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [Status(503), Refuse(), DieAfter(0)])
def test_a_stream_that_fails_before_its_first_token_is_repeated(
    server: ThreadedFlakyServer,
    pipeline: ResiliencePipeline[Any],
    source: Callable[[], Lines],
    step: Any,
) -> None:
    """Streams: what is before the line is repeated, here an empty preamble too."""
    server.script(step, step, Tokens())
    stream = pipeline.execute_stream_sync(source, commit_when=lambda line: bool(token(line)))
    assert tokens_in(stream) == ALL
    assert len(server.requests) == 3


def test_nothing_runs_before_the_first_chunk_is_asked_for(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: neither the call nor entering `with` connects."""
    with pipeline.execute_stream_sync(source) as stream:
        assert server.requests == ()
        assert not stream.committed


@pytest.mark.parametrize("tokens", [1, 3, len(ALL)])
def test_a_connection_dropped_in_the_middle_reaches_the_loop_and_nothing_is_repeated(
    server: ThreadedFlakyServer,
    pipeline: ResiliencePipeline[Any],
    source: Callable[[], Lines],
    tokens: int,
) -> None:
    """Streams: after the first chunk errors pass as they are."""
    server.script(DieAfter(tokens, interval=0.01))
    got: list[str] = []
    with pipeline.execute_stream_sync(source) as stream:
        with pytest.raises(requests.exceptions.ChunkedEncodingError):
            read_into(got, stream)
        assert stream.committed
    assert got == ALL[:tokens]
    assert len(server.requests) == 1


def test_leaving_the_loop_closes_the_connection(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: `with` closes the source on the way out, before it ends."""
    server.default = ONE_AND_SILENCE
    leave_at_the_first_token(pipeline.execute_stream_sync(source))
    assert server.wait_closed_by_client(0)
    assert len(server.requests) == 1


def test_close_closes_the_connection(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: `close()` at once, and again without effect; the stream is over."""
    server.default = ONE_AND_SILENCE
    stream = pipeline.execute_stream_sync(source)
    next(stream)
    stream.close()
    assert server.wait_closed_by_client(0)
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_in_the_loops_body_closes_the_connection(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: an exception of the consumer's is no failure of the source, and closes it."""
    server.default = ONE_AND_SILENCE

    def consume() -> None:
        with pipeline.execute_stream_sync(source) as stream:
            for _ in stream:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert server.wait_closed_by_client(0)
    assert len(server.requests) == 1


def test_a_plain_loop_that_is_left_closes_the_connection_soon(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: `for … break` closes it as soon as Python lets the stream go."""
    server.default = ONE_AND_SILENCE

    def consume() -> None:
        for line in pipeline.execute_stream_sync(source):
            if token(line):
                break

    consume()
    assert server.wait_closed_by_client(0)


def test_a_response_is_a_source_by_itself(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], open_stream: Any
) -> None:
    """Streams: a context manager that can be iterated is entered and left, and iterated."""
    server.script(Refuse(), Tokens(["a", "b"]))
    with pipeline.execute_stream_sync(open_stream) as stream:
        assert b"".join(stream) == b": ready\n\ndata: a\n\ndata: b\n\n"


def test_a_response_that_is_left_early_is_closed(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], session: requests.Session
) -> None:
    """Streams: also where the response itself is the source, in pieces of `iter_content`."""
    # As long as the pieces that a response cuts itself into when it is iterated.
    server.default = Tokens(["x" * 1000, "y"], interval=float("inf"))
    call = partial(session.get, f"{server.url}/stream", stream=True)
    with pipeline.execute_stream_sync(call) as stream:
        assert next(stream).startswith(b": ready")
        assert server.requests[0].ending is None
    assert server.wait_closed_by_client(0)


@pytest.mark.realtime
def test_a_stream_that_stalls_is_left_behind_and_repeated() -> None:
    """Threads: a source that is past its time to the first chunk is closed once it lets go."""
    inside = Inside()
    with (
        ThreadedFlakyServer(Stall(after="headers"), Tokens()) as server,
        requests.Session() as session,
    ):
        session.trust_env = False

        @contextmanager
        def lines() -> Generator[Iterable[str]]:
            with inside, session.get(f"{server.url}/stream", stream=True) as response:
                yield response.iter_lines(chunk_size=1, decode_unicode=True)

        pipeline = B().add_retry(**PATIENT).add_timeout(0.15).build()
        with pipeline.execute_stream_sync(lines) as stream:
            assert tokens_in(stream) == ALL
        assert inside.count >= 1
        assert server.requests[0].ending is None
    inside.wait_empty()


def test_the_longest_gap_between_two_chunks_can_be_bounded() -> None:
    """Threads: `idle_timeout` raises into the loop and leaves the read behind."""
    hand = HandClock()
    with ThreadedFlakyServer(default=ONE_AND_SILENCE) as server, requests.Session() as session:
        session.trust_env = False
        inside = Inside()

        def lines() -> Generator[str]:
            with inside, session.get(f"{server.url}/stream", stream=True) as response:
                for line in response.iter_lines(chunk_size=1, decode_unicode=True):
                    yield line
                    left.append(line)

        got: list[str] = []
        left: list[str] = []  # those after which the next one is being read
        stream = (
            B(clock=hand)
            .build()
            .execute_stream_sync(
                lines, commit_when=lambda line: bool(token(line)), idle_timeout=LIMIT
            )
        )

        def expire_in_the_silence() -> None:
            until(lambda: left[-2:] == ["data: one", ""])  # the last of its event
            hand.expire()

        expiring = Beside(expire_in_the_silence)
        with stream, pytest.raises(TimeoutRejectedError):
            read_into(got, stream)
        expiring.result()
        assert got == ["one"]
        assert inside.count == len(server.requests) == 1
    inside.wait_empty()


# ---- urllib3 ----------------------------------------------------------------------------------


def test_urllib3_calls_are_repeated(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: what urllib3 raises for a reset connection is handled by default."""
    server.script(Refuse(), Tokens())
    outcome = pipeline.settle_sync(pool.request, "GET", f"{server.url}/data")
    assert isinstance(outcome, Success)
    assert outcome.value.json()["text"] == "".join(ALL)
    first = outcome.attempts[0].outcome
    assert first is not None
    assert isinstance(first.error, urllib3.exceptions.ProtocolError)


def test_urllib3_refused_connections_are_repeated(
    pool: urllib3.PoolManager, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: nobody listens there, five times."""
    with address_that_refuses() as url:
        outcome = pipeline.settle_sync(pool.request, "GET", url)
    assert isinstance(outcome.error, urllib3.exceptions.NewConnectionError)
    assert outcome.attempt_count == 5


def test_urllib3_statuses_are_results_with_a_retry_after(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager
) -> None:
    """Retry, `Retry-After`: urllib3 raises nothing for a 503, so it is handled as a result."""
    server.script(Status(503, retry_after=20), Tokens())
    clock = VirtualClock(autojump=True)
    bad = handle_result(lambda response: response.status >= 500)
    pipeline = B(clock=clock).add_retry(delay=1, should_handle=bad).add_timeout(10).build()
    assert pipeline.execute_sync(pool.request, "GET", f"{server.url}/data").status == 200
    assert clock.now() == 20


def test_urllib3_responses_that_a_predicate_drops_are_closed(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager, pipeline: ResiliencePipeline[Any]
) -> None:
    """Retry: a handled result is closed, the one that is returned is not."""
    server.default = ONE_AND_SILENCE
    responses: list[urllib3.BaseHTTPResponse] = []

    def call() -> urllib3.BaseHTTPResponse:
        responses.append(pool.request("GET", f"{server.url}/stream", preload_content=False))
        return responses[-1]

    once_more = handle_result(lambda _: len(responses) < 2)
    retry = B().add_retry(delay=0, should_handle=once_more).add_pipeline(pipeline).build()
    response = retry.execute_sync(call)
    assert server.wait_closed_by_client(0)
    assert response is responses[1]
    assert server.requests[1].ending is None
    response.close()
    assert server.wait_closed_by_client(1)


@pytest.mark.realtime
def test_urllib3_time_outs_are_repeated(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager
) -> None:
    """Threads: the client's own limit on a stall is a failure like any."""
    server.script(Stall(), Tokens())
    errors: list[Exception | None] = []
    pipeline = (
        B()
        .add_retry(**PATIENT, on_retry=lambda event: errors.append(event.outcome.error))
        .add_timeout(60)
        .build()
    )
    request = partial(pool.request, "GET", f"{server.url}/data", timeout=0.15)
    assert pipeline.execute_sync(request).status == 200
    assert {type(error) for error in errors} == {urllib3.exceptions.ReadTimeoutError}


def test_a_urllib3_response_is_a_source_by_itself(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager, pipeline: ResiliencePipeline[Any]
) -> None:
    """Streams: it is a context manager that gives lines; the first attempt fails."""
    server.script(Refuse(), Tokens(["a", "b"]))
    request: Any = partial(pool.request, "GET", f"{server.url}/stream", preload_content=False)
    with pipeline.execute_stream_sync(request) as stream:
        assert b"".join(stream) == b": ready\n\ndata: a\n\ndata: b\n\n"
    assert len(server.requests) == 2


def test_a_urllib3_response_that_is_left_early_is_closed(
    server: ThreadedFlakyServer, pool: urllib3.PoolManager, pipeline: ResiliencePipeline[Any]
) -> None:
    """Streams: `stream()` of a response, in a generator as one would write it."""
    server.default = ONE_AND_SILENCE

    def chunks() -> Generator[bytes]:
        response = pool.request("GET", f"{server.url}/stream", preload_content=False)
        try:
            yield from response.stream(16)
        finally:
            response.close()

    with pipeline.execute_stream_sync(chunks) as stream:
        assert next(stream).startswith(b": ready")
    assert server.wait_closed_by_client(0)
