"""The flaky server does on the wire what its script says, and notices who leaves.

Driven with raw sockets and with httpx, without a pipeline: the tests of clients under a pipeline
rest on this.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest
import pytest_asyncio

from resilience_pipeline._demo import (
    DEFAULT_TOKENS,
    DieAfter,
    FlakyServer,
    Refuse,
    Stall,
    Status,
    ThreadedFlakyServer,
    Tokens,
)

CHAT = "/v1/chat/completions"
#: Seconds without a word after which a server is silent.
SILENCE = 0.1
PATIENCE = 30.0


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FlakyServer]:
    async with FlakyServer() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: FlakyServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client


@pytest.fixture
def threaded() -> Iterator[ThreadedFlakyServer]:
    with ThreadedFlakyServer() as server:
        yield server


async def raw(server: FlakyServer, request: bytes) -> bytes:
    """Send bytes, and read what comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def read_into(
    received: list[bytes], client: httpx.AsyncClient, method: str, path: str, **options: Any
) -> None:
    """Read a response piece by piece, so that what came before an error is not lost."""
    async with client.stream(method, path, **options) as response:
        received.append(b"")
        async for data in response.aiter_raw():
            received[0] += data


async def leave_in_the_silence(
    server: FlakyServer,
    client: httpx.AsyncClient,
    method: str,
    path: str,
    is_all: Callable[[list[bytes]], object],
    **options: Any,
) -> list[bytes]:
    """Read until all is there that comes, look that it is all for a while, and leave; gives what came."""
    received: list[bytes] = []
    number = len(server.requests)
    reading = asyncio.create_task(read_into(received, client, method, path, **options))
    try:
        await server.wait_requests(number + 1)
        async with asyncio.timeout(PATIENCE):
            while not is_all(received):  # noqa: ASYNC110 - said by another task
                await asyncio.sleep(0.001)
        await asyncio.wait([reading], timeout=SILENCE)
        assert not reading.done()
    finally:
        reading.cancel()
        await asyncio.wait([reading])
    return received


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    return [
        block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")
    ]


def chat_tokens(text: str) -> list[str]:
    """The tokens of a chat stream that came to its end."""
    *chunks, done = events(text)
    assert done == "[DONE]"
    return [
        token
        for chunk in map(json.loads, chunks)
        if (token := chunk["choices"][0]["delta"].get("content"))
    ]


@pytest.mark.asyncio
async def test_stream_on_the_wire_is_chunked_and_closes(server: FlakyServer) -> None:
    server.script(Tokens(["ab", "c"]))
    answer = await raw(server, b"GET /stream?x=1 HTTP/1.1\r\nHost: here\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "HTTP/1.1 200 OK"
    assert headers["Connection"] == "close"
    assert headers["Transfer-Encoding"] == "chunked"
    assert headers["Content-Type"].startswith("text/event-stream")
    assert parsedate_to_datetime(headers["Date"]).tzinfo is not None
    assert body == (b"9\r\n: ready\n\n\r\na\r\ndata: ab\n\n\r\n9\r\ndata: c\n\n\r\n0\r\n\r\n")
    record = await server.wait_ended(0)
    assert (record.path, record.status, record.tokens_sent) == ("/stream", 200, 2)
    assert record.bytes_sent == len(answer)
    assert record.ending == "completed"


@pytest.mark.asyncio
async def test_a_token_with_a_line_break_is_one_event(server: FlakyServer) -> None:
    server.script(Tokens(["a\nb"]))
    answer = await raw(server, b"GET /stream HTTP/1.1\r\n\r\n")
    assert b"data: a\ndata: b\n\n" in answer


@pytest.mark.asyncio
async def test_data_is_json_with_a_length(client: httpx.AsyncClient) -> None:
    response = await client.get("/data")
    assert response.json() == {"number": 0, "text": "".join(DEFAULT_TOKENS)}
    assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.asyncio
async def test_chat_streams_in_the_form_of_openai(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"model": "m", "stream": True})
    assert chat_tokens(response.text) == list(DEFAULT_TOKENS)
    first, *_, last = map(json.loads, events(response.text)[:-1])
    assert first["object"] == "chat.completion.chunk"
    assert first["model"] == "m"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"


@pytest.mark.asyncio
async def test_chat_without_stream_is_one_completion(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"model": "m"})
    completion = response.json()
    assert completion["object"] == "chat.completion"
    assert completion["choices"][0]["message"]["content"] == "".join(DEFAULT_TOKENS)
    assert completion["usage"]["completion_tokens"] == len(DEFAULT_TOKENS)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(b"GET /nowhere HTTP/1.1\r\n\r\n", 404, id="path"),
        pytest.param(b"POST /data HTTP/1.1\r\n\r\n", 405, id="method"),
        pytest.param(b"POST %s HTTP/1.1\r\nContent-Length: 1\r\n\r\n{", 400, id="json"),
        pytest.param(b"POST %s HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400, id="no object"),
        pytest.param(b"nonsense\r\n\r\n", 400, id="request line"),
        pytest.param(b"GET /data HTTP/1.1\r\nno colon\r\n\r\n", 400, id="header"),
        pytest.param(b"GET /data HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, id="length"),
        pytest.param(b"GET /data HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n", 413, id="size"),
        pytest.param(b"GET /data HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n", 411, id="chunked"),
        pytest.param(b"GET /data HTTP/1.1\r\nX: " + b"x" * 200_000, 431, id="head"),
        pytest.param(b"GET /data HTTP/1.0\r\n\r\n", 505, id="version"),
    ],
)
@pytest.mark.asyncio
async def test_what_it_cannot_serve_uses_up_no_step(
    server: FlakyServer, request_bytes: bytes, status: int
) -> None:
    server.script(Refuse())
    answer = await raw(server, request_bytes.replace(b"%s", CHAT.encode()))
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    body = answer.partition(b"\r\n\r\n")[2]
    assert json.loads(body)["error"]["type"] == (
        "server_error" if status >= 500 else "invalid_request_error"
    )
    assert server.remaining == (Refuse(),)


@pytest.mark.asyncio
async def test_a_connection_without_a_request_is_no_request(server: FlakyServer) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    for sent in (b"", b"GET /da"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        writer.close()
        await writer.wait_closed()
    await raw(server, b"GET /data HTTP/1.1\r\n\r\n")
    assert [record.path for record in server.requests] == ["/data"]


@pytest.mark.asyncio
async def test_waits_for_the_body_after_100_continue(server: FlakyServer) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /data HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"body")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()
    await writer.wait_closed()
    assert server.requests[0].request.body == b"body"


@pytest.mark.asyncio
async def test_steps_are_played_one_a_request_then_the_default(client: httpx.AsyncClient) -> None:
    async with FlakyServer(Status(500), Status(502), default=Status(418)) as server:
        url = f"{server.url}/data"
        assert [(await client.get(url)).status_code for _ in range(4)] == [500, 502, 418, 418]
        server.default = Tokens()
        assert (await client.get(url)).status_code == 200
        server.script(Status(503))
        assert (await client.get(url)).status_code == 503
        assert [record.number for record in server.requests] == list(range(6))
        assert server.requests[0].step == Status(500)
        assert server.remaining == ()


@pytest.mark.asyncio
async def test_status_carries_headers_and_an_error(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(
        Status(429, retry_after=2, headers={"X-Request-Id": "7"}),
        Status(503, retry_after="Wed, 21 Oct 2026 07:28:00 GMT", message="down"),
        Status(599),
    )
    limited = await client.post(CHAT, json={"stream": True})
    assert limited.status_code == 429
    assert limited.headers["retry-after"] == "2"
    assert limited.headers["x-request-id"] == "7"
    assert limited.json()["error"]["type"] == "invalid_request_error"
    down = await client.get("/data")
    assert down.headers["retry-after"] == "Wed, 21 Oct 2026 07:28:00 GMT"
    assert down.json() == {
        "error": {"message": "down", "type": "server_error", "param": None, "code": None}
    }
    unknown = await client.get("/stream")
    assert (unknown.status_code, unknown.reason_phrase) == (599, "Unknown")
    assert "retry-after" not in unknown.headers


@pytest.mark.asyncio
async def test_refuse_resets_the_connection(server: FlakyServer, client: httpx.AsyncClient) -> None:
    server.script(Refuse(), Refuse())
    with pytest.raises(httpx.ReadError):
        await client.get("/data")
    with pytest.raises(ConnectionResetError):
        await raw(server, b"GET /stream HTTP/1.1\r\n\r\n")
    for number in (0, 1):
        record = await server.wait_ended(number)
        assert (record.ending, record.status, record.bytes_sent) == ("dropped", None, 0)


@pytest.mark.parametrize(
    ("stall", "path", "received"),
    [
        (Stall(), "/data", None),
        (Stall(), "/stream", None),
        (Stall(after="headers"), "/data", b""),
        (Stall(after="headers"), "/stream", b""),
        (Stall(after="preamble"), "/data", b""),
        (Stall(after="preamble"), "/stream", b": ready\n\n"),
    ],
)
@pytest.mark.asyncio
async def test_a_stall_goes_silent_where_it_says_until_the_client_leaves(
    server: FlakyServer, client: httpx.AsyncClient, stall: Stall, path: str, received: bytes | None
) -> None:
    server.script(stall)
    all_of_it = [] if received is None else [received]
    got = await leave_in_the_silence(server, client, "GET", path, all_of_it.__eq__)
    assert got == all_of_it
    record = await server.wait_closed_by_client(0)
    assert record.tokens_sent == 0
    assert record.status == (None if received is None else 200)


@pytest.mark.asyncio
async def test_a_chat_stalls_after_the_role_alone(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Stall(after="preamble"))
    got = await leave_in_the_silence(
        server, client, "POST", CHAT, lambda got: b"".join(got), json={"stream": True}
    )
    (chunk,) = events(got[0].decode())
    assert json.loads(chunk)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    await server.wait_closed_by_client(0)


@pytest.mark.asyncio
async def test_a_finite_stall_answers_in_the_end(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Stall(0.01), Stall(0.01, after="headers"), Stall(0.01, after="preamble"))
    for _ in range(3):
        response = await client.post(CHAT, json={"stream": True})
        assert chat_tokens(response.text) == list(DEFAULT_TOKENS)


@pytest.mark.parametrize("tokens", [0, 1, 3, len(DEFAULT_TOKENS), 2 * len(DEFAULT_TOKENS) + 1])
@pytest.mark.asyncio
async def test_dies_after_so_many_tokens(
    server: FlakyServer, client: httpx.AsyncClient, tokens: int
) -> None:
    server.script(DieAfter(tokens))
    got: list[bytes] = []
    with pytest.raises(httpx.RemoteProtocolError):
        await read_into(got, client, "GET", "/stream")
    assert len(events(got[0].decode())) == tokens
    record = await server.wait_ended(0)
    assert (record.ending, record.tokens_sent) == ("dropped", tokens)


@pytest.mark.asyncio
async def test_dies_by_reset(server: FlakyServer, client: httpx.AsyncClient) -> None:
    server.script(DieAfter(2, interval=0.01, reset=True))
    with pytest.raises(httpx.ReadError):
        await client.post(CHAT, json={"stream": True})
    assert (await server.wait_ended(0)).ending == "dropped"


@pytest.mark.asyncio
async def test_a_document_dies_between_head_and_body(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(DieAfter(0))
    with pytest.raises(httpx.RemoteProtocolError):
        await client.get("/data")
    assert (await server.wait_ended(0)).status == 200


@pytest.mark.asyncio
async def test_leaving_in_the_middle_is_seen(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    server.script(Tokens(interval=math.inf))
    async with client.stream("GET", "/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                break
    record = await server.wait_closed_by_client(0)
    assert record.tokens_sent == 1


@pytest.mark.asyncio
async def test_slow_tokens_come_apart(server: FlakyServer, client: httpx.AsyncClient) -> None:
    server.script(Tokens(["a", "b", "c"], interval=0.02))
    times = [asyncio.get_running_loop().time()]
    async with client.stream("GET", "/stream") as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                times.append(asyncio.get_running_loop().time())
    assert len(times) == 4
    # From the request on: how late the first one is read depends on the machine.
    assert times[3] - times[0] >= 0.03


@pytest.mark.asyncio
async def test_waiting_for_a_leaver_refuses_who_stayed(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    await client.get("/data")
    with pytest.raises(AssertionError, match="request 0 was not closed by the client"):
        await server.wait_closed_by_client(0)
    with pytest.raises(TimeoutError, match="requests so far"):
        await server.wait_requests(2, timeout=0.01)


# ---- what can be asked for from some place on -------------------------------------------------

BLOB = "".join(DEFAULT_TOKENS).encode()
SIZE = len(BLOB)


def numbered(text: str) -> list[tuple[int, str]]:
    """Number and data of each server-sent event that has both."""
    fields = (
        dict(line.split(": ", 1) for line in block.split("\n"))
        for block in text.split("\n\n")
        if block.startswith("id: ")
    )
    return [(int(each["id"]), each["data"]) for each in fields]


@pytest.mark.asyncio
async def test_events_on_the_wire_are_numbered_from_1(server: FlakyServer) -> None:
    server.script(Tokens(["ab", "c"]))
    answer = await raw(server, b"GET /events HTTP/1.1\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/event-stream" in head
    assert body == (
        b"9\r\n: ready\n\n\r\n10\r\nid: 1\ndata: ab\n\n\r\nf\r\nid: 2\ndata: c\n\n\r\n0\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("last", "first"),
    [("1", 2), ("7", 8), ("8", None), ("99", None), ("0", 1), ("", 1), ("x", 1), ("-1", 1)],
)
@pytest.mark.asyncio
async def test_events_go_on_after_the_last_one(
    client: httpx.AsyncClient, last: str, first: int | None
) -> None:
    response = await client.get("/events", headers={"Last-Event-ID": last})
    everything = list(enumerate(DEFAULT_TOKENS, 1))
    assert numbered(response.text) == ([] if first is None else everything[first - 1 :])


@pytest.mark.parametrize(
    ("last", "tokens", "numbers"),
    [
        (None, 3, [1, 2, 3]),
        ("3", 2, [4, 5]),
        ("6", 5, [7, 8]),
        (None, 0, []),
        (None, 9, range(1, 9)),
    ],
)
@pytest.mark.asyncio
async def test_events_die_after_so_many(
    server: FlakyServer,
    client: httpx.AsyncClient,
    last: str | None,
    tokens: int,
    numbers: Sequence[int],
) -> None:
    server.script(DieAfter(tokens))
    got: list[bytes] = []
    headers = {} if last is None else {"Last-Event-ID": last}
    with pytest.raises(httpx.RemoteProtocolError):
        await read_into(got, client, "GET", "/events", headers=headers)
    assert [number for number, _ in numbered(got[0].decode())] == list(numbers)
    record = await server.wait_ended(0)
    assert (record.ending, record.tokens_sent) == ("dropped", len(numbers))


@pytest.mark.asyncio
async def test_a_blob_has_a_length_and_a_tag(client: httpx.AsyncClient) -> None:
    first, second = await client.get("/blob"), await client.get("/blob")
    assert (first.status_code, first.content) == (200, BLOB)
    assert int(first.headers["content-length"]) == SIZE
    assert first.headers["accept-ranges"] == "bytes"
    assert first.headers["etag"] == second.headers["etag"]
    assert "content-range" not in first.headers


@pytest.mark.asyncio
async def test_another_blob_has_another_tag(server: FlakyServer, client: httpx.AsyncClient) -> None:
    server.script(Tokens(["one"]), Tokens(["two"]), Tokens(["o", "ne"]))
    tags = [(await client.get("/blob")).headers["etag"] for _ in range(3)]
    assert tags[0] == tags[2] != tags[1]
    assert all(tag.startswith('"') and tag.endswith('"') for tag in tags)


@pytest.mark.parametrize("start", [0, 1, 10, 12, SIZE - 1])
@pytest.mark.asyncio
async def test_a_blob_is_given_from_a_place_on(client: httpx.AsyncClient, start: int) -> None:
    response = await client.get("/blob", headers={"Range": f"bytes={start}-"})
    assert (response.status_code, response.content) == (206, BLOB[start:])
    assert response.headers["content-range"] == f"bytes {start}-{SIZE - 1}/{SIZE}"
    assert int(response.headers["content-length"]) == SIZE - start


@pytest.mark.parametrize("start", [SIZE, SIZE + 1, 10**17])
@pytest.mark.asyncio
async def test_a_blob_refuses_what_lies_beyond_its_end(
    server: FlakyServer, client: httpx.AsyncClient, start: int
) -> None:
    server.script(Tokens(), Status(500))
    response = await client.get("/blob", headers={"Range": f"bytes={start}-"})
    assert response.status_code == 416
    assert response.headers["content-range"] == f"bytes */{SIZE}"
    assert response.json()["error"]["message"] == f"there are {SIZE} bytes"
    assert server.remaining == (Status(500),)  # it was asked for a place in a document of this step


@pytest.mark.parametrize("asked", ["bytes=1-5", "bytes=-5", "bytes=1-,7-", "lines=1-", "bytes=x-"])
@pytest.mark.asyncio
async def test_a_blob_ignores_ranges_of_other_forms(client: httpx.AsyncClient, asked: str) -> None:
    response = await client.get("/blob", headers={"Range": asked})
    assert (response.status_code, response.content) == (200, BLOB)


@pytest.mark.asyncio
async def test_a_blob_that_has_changed_is_given_whole(
    server: FlakyServer, client: httpx.AsyncClient
) -> None:
    tag = (await client.get("/blob")).headers["etag"]
    headers = {"Range": "bytes=3-", "If-Range": tag}
    server.script(Tokens(), Tokens(["changed"]))
    same, changed = [await client.get("/blob", headers=headers) for _ in range(2)]
    assert (same.status_code, same.content) == (206, BLOB[3:])
    assert (changed.status_code, changed.content) == (200, b"changed")


@pytest.mark.parametrize("start", [0, 4, 12])
@pytest.mark.parametrize("tokens", [0, 2, 99])
@pytest.mark.asyncio
async def test_a_blob_dies_after_so_many_tokens(
    server: FlakyServer, client: httpx.AsyncClient, tokens: int, start: int
) -> None:
    server.script(DieAfter(tokens))
    ends = [len("".join(DEFAULT_TOKENS[:count])) for count in range(len(DEFAULT_TOKENS) + 1)]
    left = [end for end in ends if end > start]
    sent = BLOB[start : left[min(tokens, len(left)) - 1]] if tokens else b""
    got: list[bytes] = []
    if sent == BLOB[start:]:  # as much as was promised, whatever happens to the connection
        await read_into(got, client, "GET", "/blob", headers={"Range": f"bytes={start}-"})
    else:
        with pytest.raises(httpx.RemoteProtocolError):
            await read_into(got, client, "GET", "/blob", headers={"Range": f"bytes={start}-"})
    assert got == [sent]
    record = await server.wait_ended(0)
    assert (record.ending, record.status) == ("dropped", 206)


@pytest.mark.parametrize("path", ["/events", "/blob"])
@pytest.mark.asyncio
async def test_they_obey_the_other_steps_too(
    server: FlakyServer, client: httpx.AsyncClient, path: str
) -> None:
    server.script(Status(503, retry_after=1), Refuse(), Stall(after="headers"))
    assert (await client.get(path)).headers["retry-after"] == "1"
    with pytest.raises(httpx.ReadError):
        await client.get(path)
    assert await leave_in_the_silence(server, client, "GET", path, bool) == [b""]
    assert (await server.wait_closed_by_client(2)).status == 200
    assert (await client.post(path)).status_code == 405


@pytest.mark.asyncio
async def test_stopping_ends_every_stall_and_every_connection() -> None:
    async with FlakyServer(default=Stall()) as server:
        calls = [asyncio.create_task(raw(server, GET_DATA)) for _ in range(5)]
        await server.wait_requests(5)
        port = int(server.url.rsplit(":", 1)[1])
        _, idle = await asyncio.open_connection("127.0.0.1", port)  # has asked for nothing yet
    assert {record.ending for record in server.requests} == {"server_stopped"}
    assert await asyncio.gather(*calls) == [b""] * 5
    idle.close()
    await idle.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await raw(server, GET_DATA)


GET_DATA = b"GET /data HTTP/1.1\r\n\r\n"


@pytest.mark.anyio
async def test_threaded_serves_clients_on_any_loop(threaded: ThreadedFlakyServer) -> None:
    threaded.script(Status(503), Tokens(interval=math.inf))
    async with httpx.AsyncClient(base_url=threaded.url, trust_env=False) as client:
        assert (await client.get("/data")).status_code == 503
        async with client.stream("POST", CHAT, json={"stream": True}) as response:
            async for _ in response.aiter_lines():
                break
    assert threaded.wait_closed_by_client(1).tokens_sent < len(DEFAULT_TOKENS)
    assert [record.path for record in threaded.requests] == ["/data", CHAT]


def test_threaded_serves_plain_threads_and_stops_in_the_middle_of_a_stall() -> None:
    with ThreadedFlakyServer(Refuse(), tokens=["x"]) as server:
        with httpx.Client(base_url=server.url, trust_env=False) as client:
            with pytest.raises(httpx.ReadError):
                client.get("/data")
            assert client.get("/data").json() == {"number": 1, "text": "x"}
            server.default = Stall()
            assert server.default == Stall()
            assert server.remaining == ()
            with pytest.raises(httpx.ReadTimeout):
                client.get("/data", timeout=0.05)
        server.wait_requests(3)
        assert server.wait_ended(2).closed_by_client
        with pytest.raises(TimeoutError):
            server.wait_requests(4, timeout=0.01)


@pytest.mark.asyncio
async def test_the_openai_client_understands_it(server: FlakyServer) -> None:
    import openai

    client: Any
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as client:
        messages = [{"role": "user", "content": "hello"}]
        whole = await client.chat.completions.create(model="m", messages=messages)
        assert whole.choices[0].message.content == "".join(DEFAULT_TOKENS)
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        tokens = [chunk.choices[0].delta.content async for chunk in stream]
        assert "".join(token or "" for token in tokens) == "".join(DEFAULT_TOKENS)
        server.script(Status(429, retry_after=1))
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="m", messages=messages)
        assert caught.value.response.headers["retry-after"] == "1"
