"""What a flaky server can be told to do with a request, and what it remembers of one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ._wire import Request

DEFAULT_TOKENS = ("Resilience", " is", " not", " the", " absence", " of", " failure", ".")


@dataclass(frozen=True, slots=True)
class Refuse:
    """Read the request, then reset the connection without a byte of an answer."""


@dataclass(frozen=True, slots=True)
class Status:
    """Answer with this status and an error in OpenAI's JSON form.

    Attributes:
        status: The HTTP status.
        retry_after: Goes out as `Retry-After`: seconds, or text as it is (an HTTP date, say).
        message: The error's message; `None` gives one that names the status.
        headers: More headers.
    """

    status: int
    retry_after: float | str | None = None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Stall:
    """Go silent, then answer as usual; leaving or stopping the server ends the silence.

    Attributes:
        seconds: How long; for ever by default.
        after: What has been sent by then. `"request"`: nothing. `"headers"`: status and headers.
            `"preamble"`: also an empty first event, as providers send it (for chat the chunk that
            holds the role alone); where there is none the same as `"headers"`.
    """

    seconds: float = math.inf
    after: Literal["request", "headers", "preamble"] = "request"


@dataclass(frozen=True, slots=True)
class DieAfter:
    """Send so many tokens, then drop the connection in the middle of the answer.

    Where the answer is no stream it dies between head and body.

    Attributes:
        tokens: Tokens sent before; 0 dies right after the headers and the preamble. What has an
            end of its own (`/events`, `/blob`) dies there at the latest.
        interval: Seconds between tokens.
        reset: Drop it by a TCP reset. What the client has not read by then may be lost to it,
            so that `tokens` is exact only without.
    """

    tokens: int
    interval: float = 0.0
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """Answer as one should.

    Attributes:
        tokens: What to send; `None` sends the server's own.
        interval: Seconds between tokens (for what is not streamed: before the body). At 0 all
            are sent in one go, and no client is quick enough to leave in between.
    """

    tokens: Sequence[str] | None = None
    interval: float = 0.0


Step = Refuse | Status | Stall | DieAfter | Tokens

Ending = Literal["completed", "dropped", "closed_by_client", "server_stopped"]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known of one request.

    Attributes:
        number: 0 for the first request since the start.
        request: As it was read: `method`, `path`, `headers`, `body`.
        step: The step it was given; `None` for a request to no endpoint.
        at: `time.monotonic()` at its arrival.
        status: The status sent, once ended; `None` when it came to none.
        bytes_sent: Of the whole answer, head and framing included; 0 until it has ended.
        tokens_sent: Tokens that went out so far; a preamble is none.
        ending: `None` while it runs. `"dropped"`: by the script.
    """

    number: int
    request: Request
    step: Step | None
    at: float = field(default_factory=time.monotonic)
    status: int | None = None
    bytes_sent: int = 0
    tokens_sent: int = 0
    ending: Ending | None = None

    @property
    def path(self) -> str:
        """The path asked for."""
        return self.request.path

    @property
    def closed_by_client(self) -> bool:
        """Whether the client left before the answer was whole."""
        return self.ending == "closed_by_client"
