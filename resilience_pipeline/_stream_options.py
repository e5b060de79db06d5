"""What the caller of `execute_stream` may ask for: where the line is, and what bounds the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from attrs import field, frozen

from ._options import checked, count, function, positive_duration, to_seconds_or_none


@checked
@frozen(kw_only=True)
class StreamOptions:
    """The options of `execute_stream` that say where its line is, and what bounds the stream."""

    commit_when: Callable[[object], object] | None = field(default=None, metadata=function())
    max_held: int = field(default=64, metadata=count(minimum=1))
    idle_timeout: float | None = field(
        default=None, converter=to_seconds_or_none, metadata=positive_duration()
    )
    total_timeout: float | None = field(
        default=None, converter=to_seconds_or_none, metadata=positive_duration()
    )

    options_of: ClassVar[str] = "execute_stream()"
