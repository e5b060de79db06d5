"""What the flaky server's endpoints answer with when nothing goes wrong.

| endpoint | answer |
|---|---|
| `POST /v1/chat/completions` | OpenAI's: chunks as server-sent events if `stream` is true, else JSON |
| `GET /stream` | server-sent events: a comment, then one event a token |
| `GET /data` | a small JSON document |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ._steps import Status
from ._wire import Headers, Request

_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store"}
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """An endpoint's answer, cut where a step may interfere.

    Attributes:
        headers: Beside those of the framing.
        preamble: What a stream sends before its first token; `None`: the answer is no stream, and
            all of it is `end`.
        token: The bytes of one token.
        end: What comes last, given all the tokens.
    """

    headers: Headers
    preamble: bytes | None = None
    token: Callable[[str], bytes] = str.encode
    end: Callable[[Sequence[str]], bytes]


def content_of(request: Request, number: int) -> Content | Status:
    """Find what a request gets, or the error status that it gets instead.

    Args:
        request: The request.
        number: The number of the request, for ids.
    """
    endpoints = {
        "/v1/chat/completions": ("POST", _chat),
        "/stream": ("GET", _plain_stream),
        "/data": ("GET", _data),
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

    return Content(
        headers=_EVENTS,
        preamble=chunk({"role": "assistant", "content": ""}),
        token=lambda token: chunk({"content": token}),
        end=lambda _: chunk({}, "stop") + _event("[DONE]"),
    )


def _chat_document(common: dict[str, Any]) -> Content:
    def document(tokens: Sequence[str]) -> bytes:
        message = {"role": "assistant", "content": "".join(tokens), "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        count = len(tokens)
        usage = {"prompt_tokens": 0, "completion_tokens": count, "total_tokens": count}
        whole = {**common, "object": "chat.completion", "choices": [choice], "usage": usage}
        return json.dumps(whole).encode()

    return Content(headers=_JSON, end=document)


def _plain_stream(_: Request, __: int) -> Content:
    return Content(headers=_EVENTS, preamble=b": ready\n\n", token=_event, end=lambda _: b"")


def _data(_: Request, number: int) -> Content:
    return Content(
        headers=_JSON,
        end=lambda tokens: json.dumps({"number": number, "text": "".join(tokens)}).encode(),
    )


def _event(data: str) -> bytes:
    """One server-sent event; a line break in the data starts another `data:` line."""
    return "".join(f"data: {line}\n" for line in data.split("\n")).encode() + b"\n"
