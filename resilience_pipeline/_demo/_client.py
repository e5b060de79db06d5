"""A small streaming HTTP client for the demonstration: asks a chat model and gives its tokens.

Standard library only. Knows nothing of pipelines: what a pipeline wants to know it reads off the
errors, `status` and `headers` as any HTTP client's errors have them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

PATH = "/v1/chat/completions"


class HTTPStatusError(Exception):
    """The server answered with an error.

    Attributes:
        status: The HTTP status.
        headers: The answer's headers.
    """

    def __init__(self, status: int, reason: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"{status} {reason}")
        self.status = status
        self.headers = headers


class BrokenAnswerError(ConnectionError):
    """The connection ended before the answer did."""


@contextlib.asynccontextmanager
async def stream_chat(
    url: str, prompt: str, *, on_response: Callable[[str], object]
) -> AsyncGenerator[AsyncGenerator[str]]:
    """Ask, and give the answer's tokens as they come; the connection is closed on the way out.

    Args:
        url: Scheme, host and port of the server.
        prompt: What to ask.
        on_response: Called with status and reason ("200 OK") once the answer has begun.

    Raises:
        HTTPStatusError: The server answered with an error.
        OSError: The connection could not be made, or it broke: `BrokenAnswerError` among others.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(_request(address.netloc, prompt))
        await writer.drain()
        status, reason, headers = await _read_head(reader)
        if status != 200:
            raise HTTPStatusError(status, reason, headers)
        on_response(f"{status} {reason}")
        yield _tokens(reader)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _request(host: str, prompt: str) -> bytes:
    asked = {
        "model": "flaky-1",
        "stream": True,
        "messages": [{"role": "user", "content": prompt}],
    }
    body = json.dumps(asked).encode()
    lines = [
        f"POST {PATH} HTTP/1.1",
        f"Host: {host}",
        "Accept: text/event-stream",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, str, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        msg = "the connection ended without an answer"
        raise BrokenAnswerError(msg) from error
    status_line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    _, status, reason = status_line.split(" ", 2)
    fields = (line.partition(":") for line in lines)
    return int(status), reason, {name: value.strip() for name, _, value in fields}


async def _tokens(reader: asyncio.StreamReader) -> AsyncGenerator[str]:
    """Read server-sent events out of a chunked body, and the token out of each."""
    waiting = b""
    while chunk := await _read_chunk(reader):
        *events, waiting = (waiting + chunk).split(b"\n\n")
        for event in events:
            token = _token(event)
            if token:
                yield token


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    """Read one chunk of the body; empty at its end."""
    try:
        size = int(await reader.readuntil(b"\r\n"), 16)
        chunk = await reader.readexactly(size + 2)
    except asyncio.IncompleteReadError as error:
        msg = "the connection ended in mid-answer"
        raise BrokenAnswerError(msg) from error
    return chunk[:-2]


def _token(event: bytes) -> str:
    """Find the token in an event; empty where there is none (the preamble, the end)."""
    field, _, data = event.partition(b": ")
    if field != b"data" or data == b"[DONE]":
        return ""
    answer: dict[str, Any] = json.loads(data)
    token: str = answer["choices"][0]["delta"].get("content", "")
    return token
