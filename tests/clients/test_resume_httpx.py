"""Streams of httpx that go on after the connection broke, against real sockets.

A download goes on at the byte where it broke (`Range`), server-sent events after the last one that arrived
(`Last-Event-ID`), and what offers neither is read again from the beginning (by position). Each is written in the two ways
in which people write sources.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import anyio
import httpx
import pytest

from resilience_pipeline import (
    ResiliencePipelineBuilder,
    ResumeError,
    RetryEvent,
    RetryResumeEvent,
    TimeoutRejectedError,
)
from resilience_pipeline._demo import DieAfter, Refuse, Stall, Status, ThreadedFlakyServer, Tokens
from resilience_pipeline.testing import VirtualClock
from support.live import (
    ALL,
    NO_CERTIFICATES,
    Waits,
    advance_into,
    closed_by_client,
    in_thread,
    statuses,
    token,
)

pytestmark = pytest.mark.anyio

B = ResiliencePipelineBuilder

Bytes: TypeAlias = AbstractAsyncContextManager[AsyncIterator[bytes]] | AsyncGenerator[bytes]
Event: TypeAlias = tuple[int, str]
Events: TypeAlias = AbstractAsyncContextManager[AsyncIterator[Event]] | AsyncGenerator[Event]

#: Longer than a piece of the network's, so that it arrives in several.
LARGE = [f"{number:06}," * 1000 for number in range(40)]
NUMBERED: list[Event] = list(enumerate(ALL, 1))


def guarded(resumable: Any, **options: Any) -> Any:
    """A pipeline with no limit that a slow machine could meet."""
    return B().add_retry(resumable=resumable, **{"delay": 0, **options}).add_timeout(60).build()


def headers_of(server: ThreadedFlakyServer, name: str) -> list[str | None]:
    return [record.request.headers.get(name) for record in server.requests]


@pytest.fixture(params=["manager", "generator"])
def form(request: pytest.FixtureRequest) -> str:
    form: str = request.param
    return form


def in_form(form: str, manager: Callable[..., Any]) -> Callable[..., Any]:
    """The manager's function as it is, or as an async generator function that reads what it gives."""
    if form == "manager":
        return manager

    async def generator(*args: Any) -> AsyncGenerator[Any]:
        async with manager(*args) as chunks, aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    return generator


# ---- a download, by ranges --------------------------------------------------------------------


class Download:
    """A download that goes on at the byte where it broke, as a user of the library would write it."""

    def __init__(self, client: httpx.AsyncClient, form: str) -> None:
        self.body = bytearray()
        self.events: list[RetryResumeEvent] = []
        self.tag: str | None = None
        #: Whether it asks for a range only of what has not changed since.
        self.careful = True
        self.open = in_form(form, self._open)
        self._client = client

    @asynccontextmanager
    async def _open(self, start: int = 0) -> AsyncGenerator[AsyncIterator[bytes]]:
        headers = {"Range": f"bytes={start}-"} if start else {}
        if start and self.careful:
            headers["If-Range"] = f"{self.tag}"
        async with self._client.stream("GET", "/blob", headers=headers) as response:
            response.raise_for_status()
            self.tag = response.headers["etag"]
            if start:
                assert response.headers["content-range"].startswith(f"bytes {start}-")
            yield response.aiter_bytes()

    def resume(self, event: RetryResumeEvent) -> Callable[[], Bytes]:
        self.events.append(event)
        return partial(self.open, len(self.body))

    async def run(self, pipeline: Any) -> bytes:
        async with pipeline.execute_stream(self.open) as stream:
            async for chunk in stream:
                self.body += chunk
        return bytes(self.body)


@pytest.fixture
def download(client: httpx.AsyncClient, form: str) -> Download:
    return Download(client, form)


async def test_a_download_goes_on_where_it_broke(
    server: ThreadedFlakyServer, download: Download
) -> None:
    """Retry, `resumable`: a function resumes at the source, by an HTTP range; the bytes are exact."""
    server.script(DieAfter(3), DieAfter(1), DieAfter(2))
    pipeline = guarded(download.resume)
    assert await download.run(pipeline) == "".join(ALL).encode()
    starts = [len("".join(ALL[:count])) for count in (3, 4, 6)]
    assert headers_of(server, "range") == [None, *(f"bytes={start}-" for start in starts)]
    assert [event.delivered for event in download.events] == sorted(
        event.delivered for event in download.events
    )
    assert await statuses(server) == [200, 206, 206, 206]


async def test_a_large_download_is_exact(form: str) -> None:
    """Retry, `resumable`: whatever pieces the network makes of it, and wherever it breaks."""
    with ThreadedFlakyServer(
        DieAfter(17), DieAfter(0), DieAfter(5), DieAfter(11), tokens=LARGE
    ) as large:
        async with httpx.AsyncClient(
            base_url=large.url, trust_env=False, verify=NO_CERTIFICATES
        ) as client:
            download = Download(client, form)
            # One that dies before a byte is another attempt.
            pipeline = guarded(download.resume, max_retry_attempts=4)
            assert await download.run(pipeline) == "".join(LARGE).encode()
        assert len(large.requests) == 5


async def test_attempts_that_are_refused_lie_between(
    server: ThreadedFlakyServer, download: Download
) -> None:
    """Retry, `resumable`: the function is asked again for each further attempt."""
    server.script(Status(503), DieAfter(3), Refuse(), Status(500), Tokens())
    waits = Waits()
    pipeline = guarded(download.resume, max_retry_attempts=4, on_retry=waits)
    assert await download.run(pipeline) == "".join(ALL).encode()
    start = len("".join(ALL[:3]))
    assert headers_of(server, "range") == [None, None, *[f"bytes={start}-"] * 3]
    assert [type(error) for error in waits.errors] == [
        httpx.HTTPStatusError,
        httpx.RemoteProtocolError,
        httpx.ReadError,
        httpx.HTTPStatusError,
    ]


async def test_a_download_gives_up_in_the_end(
    server: ThreadedFlakyServer, download: Download
) -> None:
    """RT-17: one attempt budget for the whole stream; the last failure comes out as it is."""
    server.default = DieAfter(1)
    with pytest.raises(httpx.RemoteProtocolError):
        await download.run(guarded(download.resume, max_retry_attempts=2))
    assert bytes(download.body) == "".join(ALL[:3]).encode()
    assert len(server.requests) == 3


async def test_a_range_that_can_not_be_had_is_final(
    server: ThreadedFlakyServer, download: Download
) -> None:
    """What counts as failure: 416 is a client's error, which is not tried again."""
    server.script(DieAfter(3), Tokens(["short"]))
    download.careful = False
    with pytest.raises(httpx.HTTPStatusError) as caught:
        await download.run(guarded(download.resume))
    assert caught.value.response.status_code == 416
    assert len(server.requests) == 2


# ---- events, after the last one ---------------------------------------------------------------


class Feed:
    """Server-sent events that go on after the last one that arrived."""

    def __init__(self, client: httpx.AsyncClient, form: str) -> None:
        self.open = in_form(form, self._open)
        self._client = client

    @asynccontextmanager
    async def _open(self, last: int | None = None) -> AsyncGenerator[AsyncIterator[Event]]:
        headers = {} if last is None else {"Last-Event-ID": f"{last}"}
        async with self._client.stream("GET", "/events", headers=headers) as response:
            response.raise_for_status()
            yield self._parse(response.aiter_lines())

    async def _parse(self, lines: AsyncIterator[str]) -> AsyncGenerator[Event]:
        number = 0
        async for line in lines:
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            for text in token(line):
                yield number, text

    def resume(self, event: RetryResumeEvent) -> Callable[[], Events]:
        return partial(self.open, event.last_chunk[0])


@pytest.fixture
def feed(client: httpx.AsyncClient, form: str) -> Feed:
    return Feed(client, form)


async def read(stream: Any, got: list[Any]) -> list[Any]:
    async with stream:
        async for chunk in stream:
            got.append(chunk)
    return got


async def test_each_event_arrives_once(server: ThreadedFlakyServer, feed: Feed) -> None:
    """Retry, `resumable`: a function resumes at the source, by a last-event id."""
    server.script(DieAfter(2), DieAfter(0), DieAfter(3))
    pipeline = guarded(feed.resume)
    assert await read(pipeline.execute_stream(feed.open), []) == NUMBERED
    assert headers_of(server, "last-event-id") == [None, "2", "2", "5"]


async def test_a_connection_that_breaks_after_the_last_event(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Streams: what goes on may have nothing more to give: an empty stream is a success."""
    server.script(DieAfter(len(ALL)))
    assert await read(guarded(feed.resume).execute_stream(feed.open), []) == NUMBERED
    assert headers_of(server, "last-event-id") == [None, f"{len(ALL)}"]


async def test_a_stall_of_what_goes_on_is_another_attempt(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Streams, timeout: time to first chunk, of each run; the stalled connection is closed."""
    server.script(DieAfter(2), Stall(after="preamble"), Tokens())
    clock, waits = VirtualClock(), Waits()
    pipeline = (
        B(clock=clock)
        .add_retry(resumable=feed.resume, delay=0, on_retry=waits)
        .add_timeout(10)
        .build()
    )
    got: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, pipeline.execute_stream(feed.open), got)
        await in_thread(lambda: server.wait_requests(2))
        await clock.advance(10)
        assert await closed_by_client(server, 1)
    assert got == NUMBERED
    assert isinstance(waits.errors[1], TimeoutRejectedError)
    assert headers_of(server, "last-event-id") == [None, "2", "2"]


async def test_a_demand_of_what_goes_on_is_waited_for(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Retry, Retry-After: never sooner than the server asked, in mid-stream as before it."""
    server.script(DieAfter(2), Status(503, retry_after=30), Tokens())
    clock, events, demanded = VirtualClock(), list[RetryEvent](), Waits()

    def on_retry(event: RetryEvent) -> None:
        events.append(event)
        if len(events) == 2:
            demanded(event)

    pipeline = B(clock=clock).add_retry(resumable=feed.resume, delay=0, on_retry=on_retry).build()
    got: list[Any] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, pipeline.execute_stream(feed.open), got)
        await advance_into(clock, demanded, 29.9)
        assert len(server.requests) == 2
        await clock.advance(0.1)
    assert got == NUMBERED
    assert [event.delay for event in events] == [0, 30]


async def test_leaving_in_what_goes_on_closes_its_connection(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Streams, leaving: the server sees the client go, from the connection of the resumed run."""
    server.script(DieAfter(2), Tokens(ALL, interval=1e6))
    got: list[Event] = []
    async with guarded(feed.resume).execute_stream(feed.open) as stream:
        async for event in stream:
            got.append(event)
            if len(got) == 3:
                break
    assert got == NUMBERED[:3]
    assert await closed_by_client(server, 1)


async def test_cancelling_while_it_resumes_closes_its_connection(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Streams, leaving: cancelling the consumer closes the source that is being opened."""
    server.script(DieAfter(2), Stall(after="preamble"))
    got: list[Event] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, guarded(feed.resume).execute_stream(feed.open), got)
        await in_thread(lambda: server.wait_requests(2))
        tasks.cancel_scope.cancel()
    assert got == NUMBERED[:2]
    assert await closed_by_client(server, 1)


async def test_closing_from_another_task_while_it_resumes(
    server: ThreadedFlakyServer, feed: Feed
) -> None:
    """Streams: `aclose()` from another task ends the reader's loop cleanly."""
    server.script(DieAfter(2), Stall(after="preamble"))
    got: list[Event] = []
    stream = guarded(feed.resume).execute_stream(feed.open)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, stream, got)
        await in_thread(lambda: server.wait_requests(2))
        await stream.aclose()
    assert got == NUMBERED[:2]
    assert await closed_by_client(server, 1)


# ---- by position ------------------------------------------------------------------------------


@pytest.fixture
def tokens_of_stream(client: httpx.AsyncClient, form: str) -> Callable[[], Any]:
    @asynccontextmanager
    async def manager() -> AsyncGenerator[AsyncIterator[str]]:
        async with client.stream("GET", "/stream") as response:
            response.raise_for_status()
            yield response.aiter_lines()

    return in_form(form, manager)


LINES = [": ready", "", *(line for text in ALL for line in (f"data: {text}", ""))]


async def test_what_was_delivered_is_skipped(
    server: ThreadedFlakyServer, tokens_of_stream: Callable[[], Any]
) -> None:
    """RT-14: it is read again from its beginning and the consumer sees each line once."""
    server.script(DieAfter(3), DieAfter(5), DieAfter(1), Tokens())
    stream = guarded(True).execute_stream(tokens_of_stream)
    assert await read(stream, []) == LINES
    assert len(server.requests) == 4


async def test_an_answer_that_differs_is_not_spliced(
    server: ThreadedFlakyServer, tokens_of_stream: Callable[[], Any]
) -> None:
    """RT-16, which is decided otherwise here: a second answer is another answer."""
    server.script(DieAfter(3), Tokens([*ALL[:2], "other", "words"]))
    got: list[str] = []
    with pytest.raises(ResumeError) as caught:
        await read(guarded(True).execute_stream(tokens_of_stream), got)
    assert got == LINES[:8]
    assert isinstance(caught.value.__cause__, httpx.RemoteProtocolError)
    await in_thread(lambda: server.wait_ended(1))


async def test_an_answer_that_is_shorter_is_not_taken(
    server: ThreadedFlakyServer, tokens_of_stream: Callable[[], Any]
) -> None:
    """RT-15: it ends short of what was delivered."""
    server.script(DieAfter(3), Tokens(ALL[:2]))
    got: list[str] = []
    with pytest.raises(ResumeError):
        await read(guarded(True).execute_stream(tokens_of_stream), got)
    assert got == LINES[:8]


async def test_the_line_is_moved_past_the_preamble(
    server: ThreadedFlakyServer, tokens_of_stream: Callable[[], Any]
) -> None:
    """Streams: `commit_when` moves the line for resumed runs alike."""
    server.script(DieAfter(0), DieAfter(2), Tokens())
    waits = Waits()
    stream = guarded(True, on_retry=waits).execute_stream(
        tokens_of_stream, commit_when=lambda line: bool(token(line))
    )
    assert await read(stream, []) == LINES
    assert [event.attempt for event in waits.events] == [0, 1]
