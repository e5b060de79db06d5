"""HTTP/1.1 as far as a small server needs it: read one request, write one answer.

Every answer says `Connection: close`, so a connection carries one exchange and its end is the end
of the connection. Knows nothing of scripts and endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate

_MAX_BODY = 1 << 20

Headers = Mapping[str, str]


class BadRequestError(Exception):
    """The request can't be answered as it stands.

    Attributes:
        status: The HTTP status that says why.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ClientGoneError(Exception):
    """The connection ended before a whole request had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, read to its end.

    Attributes:
        method: `GET`, `POST`, …, upper case.
        path: The target without its query.
        headers: Names in lower case; of a repeated header the last one.
        body: Empty where there was none.
    """

    method: str
    path: str
    headers: Headers
    body: bytes


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    """Read one request.

    Raises:
        ClientGoneError: The client left first.
        BadRequestError: What came is not a request this server can read.
    """
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        method, path, headers = _parse_head(head)
        size = _body_size(headers)
        if size and headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise ClientGoneError from error
    except asyncio.LimitOverrunError as error:
        raise BadRequestError(431, "the request's head is too large") from error
    return Request(method=method, path=path, headers=headers, body=body)


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    request_line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    parts = request_line.split(" ")
    if len(parts) != 3 or not parts[1]:
        raise BadRequestError(400, "the request line is malformed")
    method, target, version = parts
    if version != "HTTP/1.1":
        raise BadRequestError(505, "this server speaks HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequestError(400, "a header line is malformed")
        headers[name.lower()] = value.strip()
    return method, target.partition("?")[0], headers


def _body_size(headers: Headers) -> int:
    if "transfer-encoding" in headers:
        raise BadRequestError(411, "send the body with a Content-Length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdecimal()):
        raise BadRequestError(400, "Content-Length is not a number")
    if len(text) > 10 or int(text) > _MAX_BODY:
        raise BadRequestError(413, "the body is too large")
    return int(text)


class Answer:
    """Writes one answer to one connection, and counts what was written.

    Attributes:
        status: The status sent, or `None` while the head has not gone out.
        bytes_sent: Bytes handed to the connection so far, head and framing included.
        finished: The answer is whole: the last byte has been handed over.
        aborted: The connection was dropped by `abort`.
    """

    __slots__ = ("_chunked", "_writer", "aborted", "bytes_sent", "finished", "status")

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._chunked = False
        self.status: int | None = None
        self.bytes_sent = 0
        self.finished = False
        self.aborted = False

    async def head(self, status: int, headers: Headers, *, size: int | None) -> None:
        """Send the status line and the headers.

        Args:
            status: The HTTP status.
            headers: Beside `Date`, `Connection` and the one that says how long the body is.
            size: Length of the body in bytes; `None` sends it chunked.
        """
        self.status = status
        self._chunked = size is None
        length = {"Transfer-Encoding": "chunked"} if size is None else {"Content-Length": str(size)}
        own = {"Date": formatdate(usegmt=True), "Connection": "close"}
        lines = [f"HTTP/1.1 {status} {_reason(status)}"]
        lines += [f"{name}: {value}" for name, value in {**own, **length, **headers}.items()]
        await self._send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def body(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the body, as one chunk where the body is chunked.

        Args:
            data: The piece; may be empty.
            last: The answer ends with this piece. The end travels in the same write, so nobody
                can have all of the body while the answer still counts as unfinished.
        """
        if self._chunked:
            data = b"%x\r\n%s\r\n" % (len(data), data) if data else b""
            data += b"0\r\n\r\n" if last else b""
        self.finished = last
        await self._send(data)

    def abort(self, *, reset: bool) -> None:
        """Drop the connection where it stands.

        Args:
            reset: Send a TCP reset, which a client sees as "connection reset by peer"; otherwise
                the connection just ends, short of the end of the answer.
        """
        self.aborted = True
        if reset:
            endpoint: socket.socket | None = self._writer.get_extra_info("socket")
            if endpoint is not None:
                linger = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
                with contextlib.suppress(OSError):
                    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()

    async def _send(self, data: bytes) -> None:
        self._writer.write(data)
        self.bytes_sent += len(data)
        await self._writer.drain()


def _reason(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
