"""What the command lines share."""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable


def pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        msg = f"{text!r} is no regular expression: {error}"
        raise argparse.ArgumentTypeError(msg) from error


def load_anyio() -> None:
    """Load anyio's own asyncio backend, as every program does that uses httpx or one like it.

    Where it is loaded, tasks also look for anyio's cancellation, which costs something. Some peers
    load it; this way no row depends on which of them ran before.
    """
    import anyio.lowlevel

    asyncio.run(anyio.lowlevel.checkpoint())


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Find what makes the event loops of that name; `None` makes asyncio's own."""
    if name == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop
