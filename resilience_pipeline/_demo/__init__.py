"""The flaky server that the demonstration and the client tests talk to; private."""

from ._server import FlakyServer, ThreadedFlakyServer
from ._steps import (
    DEFAULT_TOKENS,
    DieAfter,
    Refuse,
    RequestRecord,
    Stall,
    Status,
    Step,
    Tokens,
)

__all__ = [
    "DEFAULT_TOKENS",
    "DieAfter",
    "FlakyServer",
    "Refuse",
    "RequestRecord",
    "Stall",
    "Status",
    "Step",
    "ThreadedFlakyServer",
    "Tokens",
]
