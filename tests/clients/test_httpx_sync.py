"""The synchronous httpx under a pipeline, in plain threads, against real sockets."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeAlias

import httpx
import pytest

from resilience_pipeline import (
    Failure,
    MisuseError,
    Rejected,
    ResiliencePipeline,
    ResumeError,
    RetryResumeEvent,
    Success,
    TimeoutRejectedError,
    handle_result,
)
from resilience_pipeline._demo import DieAfter, Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import (
    ALL,
    NO_CERTIFICATES,
    ONE_AND_SILENCE,
    PATIENT,
    address_that_refuses,
    status_of,
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
Event: TypeAlias = tuple[int, str]

NUMBERED: list[Event] = list(enumerate(ALL, 1))
#: Longer than a piece of the network's, so that it arrives in several.
LARGE = [f"{number:06}," * 1000 for number in range(20)]


def client_of(url: str, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=url, trust_env=False, verify=NO_CERTIFICATES, **options)


@pytest.fixture
def sync_client(server: ThreadedFlakyServer) -> Iterator[httpx.Client]:
    with client_of(server.url) as client:
        yield client


@pytest.fixture(params=["manager", "generator"])
def source(request: pytest.FixtureRequest, sync_client: httpx.Client) -> Callable[[], Lines]:
    """A factory of streams of lines, written in either way; `token` finds the tokens among them."""

    @contextmanager
    def manager() -> Generator[Iterable[str]]:
        with sync_client.stream("GET", "/stream") as response:
            response.raise_for_status()
            yield response.iter_lines()

    def generator() -> Generator[str]:
        with manager() as lines:
            for line in lines:
                if token(line):
                    yield line

    return generator if request.param == "generator" else manager


@pytest.fixture(params=["unlimited", "limited"])
def pipeline(request: pytest.FixtureRequest) -> ResiliencePipeline[Any]:
    """A retry alone, in the caller's thread; and with a timeout, in worker threads."""
    return guarded(limited=request.param == "limited")


def guarded(*, limited: bool, **options: Any) -> ResiliencePipeline[Any]:
    builder: Any = B().add_retry(**{"max_retry_attempts": 4, "delay": 0, **options})
    built: ResiliencePipeline[Any] = (builder.add_timeout(60) if limited else builder).build()
    return built


def fetch(client: httpx.Client) -> httpx.Response:
    return client.get("/data").raise_for_status()


# ---- calls ------------------------------------------------------------------------------------


def test_calls_are_repeated_and_leave_a_history(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: a status and a reset connection are failures as they are in an event loop."""
    server.script(Status(503), Refuse(), Tokens())
    outcome = pipeline.settle_sync(fetch, sync_client)
    assert isinstance(outcome, Success)
    assert outcome.value.json() == {"number": 2, "text": "".join(ALL)}
    first, second, third = outcome.attempts
    assert status_of(first.outcome and first.outcome.error) == 503
    assert isinstance(second.outcome and second.outcome.error, httpx.ReadError)
    assert third.outcome == Success(outcome.value)


def test_a_client_error_is_not_repeated(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Predicates: a 404 is an answer."""
    server.default = Status(404)
    outcome = pipeline.settle_sync(fetch, sync_client)
    assert isinstance(outcome, Failure)
    assert status_of(outcome.error) == 404
    assert outcome.attempt_count == len(server.requests) == 1


def test_a_refused_connection_is_repeated_and_then_replaced(
    pipeline: ResiliencePipeline[Any],
) -> None:
    """Threads: five attempts, and the fallback's value."""
    replaced: list[Exception | None] = []
    whole = (
        B()
        .add_fallback(
            fallback_value="instead", on_fallback=lambda event: replaced.append(event.outcome.error)
        )
        .add_pipeline(pipeline)
        .build()
    )
    with address_that_refuses() as url, client_of(url) as client:
        assert whole.execute_sync(lambda: fetch(client).text) == "instead"
    assert [type(error) for error in replaced] == [httpx.ConnectError]


@pytest.mark.parametrize("limited", [False, True])
def test_retry_after_is_waited_for(
    server: ThreadedFlakyServer, sync_client: httpx.Client, limited: bool
) -> None:
    """Retry, `Retry-After`: in full, on the pipeline's clock."""
    server.script(Status(429, retry_after=30), Tokens())
    clock = VirtualClock(autojump=True)
    builder: Any = B(clock=clock).add_retry(delay=1)
    pipeline = (builder.add_timeout(10) if limited else builder).build()
    assert pipeline.execute_sync(fetch, sync_client).status_code == 200
    assert clock.now() == 30


def test_responses_that_a_predicate_drops_are_closed(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Retry: a response has `aclose()` too, which is for the other client; `close()` is called here."""
    server.default = ONE_AND_SILENCE
    responses: list[httpx.Response] = []

    def send() -> httpx.Response:
        request = sync_client.build_request("GET", "/stream")
        responses.append(sync_client.send(request, stream=True))
        return responses[-1]

    once_more = handle_result(lambda _: len(responses) < 2)
    whole = B().add_retry(delay=0, should_handle=once_more).add_pipeline(pipeline).build()
    response = whole.execute_sync(send)
    assert server.wait_closed_by_client(0)
    assert [each.is_closed for each in responses] == [True, False]
    assert response is responses[1]
    response.close()


def test_a_response_that_comes_too_late_is_closed(
    server: ThreadedFlakyServer, sync_client: httpx.Client
) -> None:
    """Threads: the late result of a call that timed out is closed."""
    server.script(ONE_AND_SILENCE)
    clock = VirtualClock(autojump=True)
    responses: list[httpx.Response] = []

    def send() -> httpx.Response:
        request = sync_client.build_request("GET", "/stream")
        responses.append(sync_client.send(request, stream=True))
        takes(clock, 60)
        return responses[-1]

    assert isinstance(B(clock=clock).add_timeout(10).build().settle_sync(send), Rejected)
    assert server.wait_closed_by_client(0)


@pytest.mark.realtime
def test_the_clients_own_time_out_is_a_failure_like_any(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any]
) -> None:
    """Threads: what ends a stall in a thread for good is the client's `timeout=`."""
    server.script(Stall(), Stall(after="headers"), Tokens())
    patient = B().add_retry(**PATIENT).add_pipeline(pipeline).build()
    with client_of(server.url, timeout=httpx.Timeout(30, read=0.15)) as client:
        assert patient.execute_sync(fetch, client).status_code == 200
    for number in (0, 1):
        assert server.wait_closed_by_client(number)


@pytest.mark.realtime
def test_a_call_that_hangs_is_left_behind_and_repeated() -> None:
    """Threads: a call that timed out runs on, unobserved, until its socket lets it go."""
    inside = Inside()
    with client_of("", timeout=None) as client, ThreadedFlakyServer(Stall(), Tokens()) as server:

        def call() -> httpx.Response:
            with inside:
                return client.get(f"{server.url}/data")

        errors: list[Exception | None] = []
        pipeline = (
            B()
            .add_retry(**PATIENT, on_retry=lambda event: errors.append(event.outcome.error))
            .add_timeout(0.15)
            .build()
        )
        assert pipeline.execute_sync(call).status_code == 200
        assert {type(error) for error in errors} == {TimeoutRejectedError}
        assert inside.count >= 1
        assert server.requests[0].ending is None
    inside.wait_empty()


# ---- streams ----------------------------------------------------------------------------------


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


def test_a_response_alone_is_no_stream_and_is_closed(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Calling: `client.stream` gives what can't be iterated; the connection isn't kept for it."""
    server.default = ONE_AND_SILENCE
    stream: Any = pipeline.execute_stream_sync
    with pytest.raises(MisuseError, match="not iterable"):
        next(stream(sync_client.stream, "GET", "/stream"))
    assert server.wait_closed_by_client(0)
    assert len(server.requests) == 1


def test_a_connection_dropped_in_the_middle_reaches_the_loop_and_nothing_is_repeated(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: after the first chunk errors pass as they are."""
    server.script(DieAfter(3, interval=0.01))
    got: list[str] = []
    with pipeline.execute_stream_sync(source) as stream:
        with pytest.raises(httpx.RemoteProtocolError):
            read_into(got, stream)
        assert stream.committed
    assert got == ALL[:3]
    assert len(server.requests) == 1


def test_leaving_the_loop_closes_the_connection(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: `with` closes the source on the way out, before it ends."""
    server.default = ONE_AND_SILENCE
    leave_at_the_first_token(pipeline.execute_stream_sync(source))
    assert server.wait_closed_by_client(0)


def test_close_closes_the_connection(
    server: ThreadedFlakyServer, pipeline: ResiliencePipeline[Any], source: Callable[[], Lines]
) -> None:
    """Streams: `close()` at once."""
    server.default = ONE_AND_SILENCE
    stream = pipeline.execute_stream_sync(source)
    next(stream)
    stream.close()
    assert server.wait_closed_by_client(0)


def test_no_way_out_of_a_stream_keeps_the_only_connection_of_the_clients_pool(
    server: ThreadedFlakyServer,
) -> None:
    """Streams: each attempt, failed, left or read, leaves it to the next one."""
    server.script(
        *(Status(503), Refuse(), DieAfter(0), ONE_AND_SILENCE),
        *(DieAfter(1, interval=0.01), Status(404), Tokens()),
    )
    pipeline = guarded(limited=True)
    only = httpx.Limits(max_connections=1)
    with client_of(server.url, limits=only, timeout=httpx.Timeout(None, pool=30)) as narrow:

        def lines() -> Generator[str]:
            with narrow.stream("GET", "/stream") as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if token(line):
                        yield line

        leave_at_the_first_token(pipeline.execute_stream_sync(lines))
        with pytest.raises(httpx.RemoteProtocolError):
            tokens_in(pipeline.execute_stream_sync(lines))
        with pytest.raises(httpx.HTTPStatusError):
            tokens_in(pipeline.execute_stream_sync(lines))
        assert tokens_in(pipeline.execute_stream_sync(lines)) == ALL
    assert len(server.requests) == 7


def test_a_wrapped_generator_function_gives_a_stream(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Calling, `wrap`: a generator function through `execute_stream_sync`."""
    server.script(Status(503))

    @pipeline.wrap
    def tokens(path: str) -> Generator[str]:
        with sync_client.stream("GET", path) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                yield from token(line)

    with tokens("/stream") as stream:
        assert list(stream) == ALL
    assert statuses(server) == [503, 200]


def test_long_streams_hold_a_place_of_a_limiter_if_they_are_told_to(
    server: ThreadedFlakyServer, source: Callable[[], Lines]
) -> None:
    """Concurrency limiter, `hold_streams`: the permit comes back with the connection."""
    server.default = ONE_AND_SILENCE
    pipeline = B().add_concurrency_limiter(1, hold_streams=True).add_timeout(60).build()
    with pipeline.execute_stream_sync(source) as stream:
        next(stream)
        assert isinstance(pipeline.settle_sync(str), Rejected)
    assert isinstance(pipeline.settle_sync(str), Success)


# ---- going on ---------------------------------------------------------------------------------


class Download:
    """A download that goes on at the byte where it broke, as a user of the library would write it."""

    def __init__(self, client: httpx.Client) -> None:
        self.body = bytearray()
        self.events: list[RetryResumeEvent] = []
        self._tag: str | None = None
        self._client = client

    @contextmanager
    def open(self, start: int = 0) -> Generator[Iterable[bytes]]:
        headers = {"Range": f"bytes={start}-", "If-Range": f"{self._tag}"} if start else {}
        with self._client.stream("GET", "/blob", headers=headers) as response:
            response.raise_for_status()
            self._tag = response.headers["etag"]
            if start:
                assert response.headers["content-range"].startswith(f"bytes {start}-")
            yield response.iter_bytes()

    def resume(self, event: RetryResumeEvent) -> Callable[[], Any]:
        self.events.append(event)
        return partial(self.open, len(self.body))

    def run(self, pipeline: Any) -> bytes:
        with pipeline.execute_stream_sync(self.open) as stream:
            for chunk in stream:
                self.body += chunk
        return bytes(self.body)


@pytest.mark.parametrize("limited", [False, True])
def test_a_download_goes_on_where_it_broke(
    server: ThreadedFlakyServer, sync_client: httpx.Client, limited: bool
) -> None:
    """Retry, `resumable`: a function resumes at the source, by an HTTP range; the bytes are exact."""
    server.script(DieAfter(3), DieAfter(1), DieAfter(2))
    download = Download(sync_client)
    assert (
        download.run(guarded(limited=limited, resumable=download.resume)) == "".join(ALL).encode()
    )
    starts = [len("".join(ALL[:count])) for count in (3, 4, 6)]
    asked = [record.request.headers.get("range") for record in server.requests]
    assert asked == [None, *(f"bytes={start}-" for start in starts)]
    assert statuses(server) == [200, 206, 206, 206]
    delivered = [event.delivered for event in download.events]
    assert delivered == sorted(delivered)


def test_a_large_download_is_exact() -> None:
    """Retry, `resumable`: whatever pieces the network makes of it, and wherever it breaks."""
    with (
        ThreadedFlakyServer(DieAfter(7), DieAfter(0), DieAfter(3), tokens=LARGE) as large,
        client_of(large.url) as client,
    ):
        download = Download(client)
        pipeline = guarded(limited=True, resumable=download.resume)
        assert download.run(pipeline) == "".join(LARGE).encode()
        assert len(large.requests) == 4


class Feed:
    """Server-sent events that go on after the last one that arrived."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._last = 0

    def open(self) -> Generator[Event]:
        headers = {"Last-Event-ID": str(self._last)} if self._last else {}
        with self._client.stream("GET", "/events", headers=headers) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("id: "):
                    number = int(line.removeprefix("id: "))
                elif token(line):
                    self._last = number
                    yield number, line.removeprefix("data: ")


@pytest.mark.parametrize("limited", [False, True])
def test_events_go_on_after_the_last_one_that_arrived(
    server: ThreadedFlakyServer, sync_client: httpx.Client, limited: bool
) -> None:
    """Retry, `resumable`: by `Last-Event-ID`; no event comes twice and none is missing."""
    server.script(DieAfter(2), Status(503), DieAfter(0), DieAfter(3))
    feed = Feed(sync_client)
    pipeline = guarded(limited=limited, resumable=lambda _: feed.open)
    with pipeline.execute_stream_sync(feed.open) as stream:
        assert list(stream) == NUMBERED
    asked = [record.request.headers.get("last-event-id") for record in server.requests]
    assert asked == [None, "2", "2", "2", "5"]


def test_leaving_a_stream_that_was_resumed_closes_the_connection(
    server: ThreadedFlakyServer, sync_client: httpx.Client, pipeline: ResiliencePipeline[Any]
) -> None:
    """Streams: the source that stands in is closed like the first one."""
    server.script(DieAfter(2), Tokens(ALL, interval=float("inf")))
    feed = Feed(sync_client)
    resuming = B().add_retry(delay=0, resumable=lambda _: feed.open).add_pipeline(pipeline).build()
    with resuming.execute_stream_sync(feed.open) as stream:
        assert [next(stream), next(stream), next(stream)] == NUMBERED[:3]
    assert server.wait_closed_by_client(1)


def test_what_was_delivered_is_skipped(
    server: ThreadedFlakyServer, source: Callable[[], Lines]
) -> None:
    """RT-14: `resumable=True` reads again from the beginning and the consumer sees each line once."""
    server.script(DieAfter(3), DieAfter(5), DieAfter(1), Tokens())
    assert tokens_in(guarded(limited=True, resumable=True).execute_stream_sync(source)) == ALL
    assert len(server.requests) == 4


def test_an_answer_that_differs_is_not_spliced(
    server: ThreadedFlakyServer, source: Callable[[], Lines]
) -> None:
    """RT-16, which is decided otherwise here: a second answer is another answer."""
    server.script(DieAfter(3), Tokens([*ALL[:2], "other", "words"]))
    got: list[str] = []
    with pytest.raises(ResumeError) as caught:
        read_into(got, guarded(limited=False, resumable=True).execute_stream_sync(source))
    assert got == ALL[:3]
    assert isinstance(caught.value.__cause__, httpx.RemoteProtocolError)
