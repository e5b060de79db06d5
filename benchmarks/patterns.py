"""`--only PATTERN`."""

from __future__ import annotations

import argparse
import re


def pattern(text: str) -> re.Pattern[str]:
    """Read a regular expression from the command line."""
    try:
        return re.compile(text, re.IGNORECASE)
    except re.error as error:
        msg = f"{text!r} is no regular expression: {error}"
        raise argparse.ArgumentTypeError(msg) from error
