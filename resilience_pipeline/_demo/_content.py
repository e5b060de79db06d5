"""What the flaky server's endpoints answer with when nothing goes wrong.

| endpoint | answer |
|---|---|
| `POST /v1/chat/completions` | OpenAI's: chunks as server-sent events if `stream` is true, else JSON |
| `GET /stream` | server-sent events: a comment, then one event a token |
| `GET /events` | the same, the events numbered from 1; goes on after `Last-Event-ID` |
| `GET /data` | a small JSON document |
| `GET /blob` | the tokens as bytes; honours `Range: bytes=N-`, and `If-Range` with its `ETag` |
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ._steps import Status
from ._wire import Headers, Request

_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
_JSON = {"Content-Type": "application/json"}
_BYTES = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
_READY = b": ready\n\n"
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An endpoint's answer, cut where a step may interfere.

    Attributes:
        status: The HTTP status.
        headers: Beside those of the framing.
        size: Length of the body; `None` sends it chunked.
        preamble: What is sent before the first token.
        pieces: The bytes of each token; empty where the answer is no stream, and all of it is
            `end`.
        end: What comes last.
    """

    status: int = 200
    headers: Headers
    size: int | None = None
    preamble: bytes = b""
    pieces: Sequence[bytes] = ()
    end: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What an endpoint answers one request with.

    Attributes:
        reply: Makes the answer out of all the tokens.
        has_end: Whether it is the same document for everybody, so that no more tokens can be sent
            than there are.
    """

    reply: Callable[[Sequence[str]], Reply | Status]
    has_end: bool = False


def content_of(request: Request, number: int) -> Content | Status:
    """Find what a request gets, or the error status that it gets instead.

    Args:
        request: The request.
        number: The number of the request, for ids.
    """
    endpoints = {
        "/v1/chat/completions": ("POST", _chat),
        "/stream": ("GET", _plain_stream),
        "/events": ("GET", _numbered_events),
        "/data": ("GET", _data),
        "/blob": ("GET", _blob),
    }
    if request.path not in endpoints:
        return Status(404, message=f"no such endpoint: {request.path}")
    method, endpoint = endpoints[request.path]
    if request.method != method:
        return Status(405, message=f"{request.path} takes {method}", headers={"Allow": method})
    return endpoint(request, number)


def _chat(request: Request, number: int) -> Content | Status:
    try:
        asked = json.loads(request.body)
    except ValueError:
        return Status(400, message="the body is not JSON")
    if not isinstance(asked, dict):
        return Status(400, message="the body is not a JSON object")
    options = cast("dict[str, Any]", asked)
    common = {
        "id": f"chatcmpl-{number}",
        "created": int(time.time()),
        "model": str(options.get("model", "flaky")),
    }
    return _chat_stream(common) if options.get("stream") is True else _chat_document(common)


def _chat_stream(common: dict[str, Any]) -> Content:
    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event(
            json.dumps({**common, "object": "chat.completion.chunk", "choices": [choice]})
        )

    def reply(tokens: Sequence[str]) -> Reply:
        return Reply(
            headers=_EVENTS,
            preamble=chunk({"role": "assistant", "content": ""}),
            pieces=[chunk({"content": token}) for token in tokens],
            end=chunk({}, "stop") + _event("[DONE]"),
        )

    return Content(reply=reply)


def _chat_document(common: dict[str, Any]) -> Content:
    def reply(tokens: Sequence[str]) -> Reply:
        message = {"role": "assistant", "content": "".join(tokens), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        count = len(tokens)
        usage = {"prompt_tokens": 0, "completion_tokens": count, "total_tokens": count}
        whole = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        return _document(whole)

    return Content(reply=reply)


def _plain_stream(_: Request, __: int) -> Content:
    def reply(tokens: Sequence[str]) -> Reply:
        return Reply(headers=_EVENTS, preamble=_READY, pieces=list(map(_event, tokens)))

    return Content(reply=reply)


def _numbered_events(request: Request, _: int) -> Content:
    last = request.headers.get("last-event-id", "")
    start = int(last) if _NUMBER.fullmatch(last) else 0  # an id of no event of ours: from the first

    def reply(tokens: Sequence[str]) -> Reply:
        numbered = list(enumerate(tokens, 1))[start:]
        pieces = [b"id: %d\n" % number + _event(token) for number, token in numbered]
        return Reply(headers=_EVENTS, preamble=_READY, pieces=pieces)

    return Content(reply=reply, has_end=True)


def _data(_: Request, number: int) -> Content:
    return Content(reply=lambda tokens: _document({"number": number, "text": "".join(tokens)}))


def _document(content: object) -> Reply:
    body = json.dumps(content).encode()
    return Reply(headers=_JSON, size=len(body), end=body)


def _blob(request: Request, _: int) -> Content:
    def reply(tokens: Sequence[str]) -> Reply | Status:
        pieces = [token.encode() for token in tokens]
        size = sum(map(len, pieces))
        headers = {**_BYTES, "ETag": _etag(b"".join(pieces))}
        start = _asked_start(request.headers, headers["ETag"])
        if start is None:
            return Reply(headers=headers, size=size, pieces=pieces)
        if start >= size:
            headers["Content-Range"] = f"bytes */{size}"
            return Status(416, message=f"there are {size} bytes", headers=headers)
        headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        rest = _without_start(pieces, start)
        return Reply(status=206, headers=headers, size=size - start, pieces=rest)

    return Content(reply=reply, has_end=True)


def _asked_start(headers: Headers, etag: str) -> int | None:
    """Where a request wants a document to begin; `None` if it gets all of it."""
    asked = _RANGE.fullmatch(headers.get("range", ""))
    if asked is None or headers.get("if-range", etag) != etag:
        return None  # a server may ignore ranges of other forms
    return int(asked[1])


def _without_start(pieces: Sequence[bytes], size: int) -> list[bytes]:
    rest: list[bytes] = []
    for piece in pieces:
        if left := piece[size:]:
            rest.append(left)
        size = max(0, size - len(piece))
    return rest


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _event(data: str) -> bytes:
    """One server-sent event; a line break in the data starts another `data:` line."""
    return "".join(f"data: {line}\n" for line in data.split("\n")).encode() + b"\n"
