"""Where the demonstration is shown: 80 columns, colours in a terminal, plain text elsewhere.

A line is written as it happens, piece by piece where the pieces come one by one. Knows nothing of
what it shows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

WIDTH = 80

Style = Literal["good", "bad", "wait", "state", "note", "token", "head"]

_CODES: Mapping[Style, str] = {
    "good": "32",
    "bad": "31",
    "wait": "33",
    "state": "35",
    "note": "2",
    "token": "1;36",
    "head": "1",
}
_INDENT = 24  # where the text of an event begins
_FACTS_INDENT = 19
_ASCII = str.maketrans({"─": "-", "…": "...", "“": '"', "”": '"'})


class OutputClosed(BaseException):
    """Whoever read the output has gone (`| head`). No `Exception`, so that no strategy handles it."""


class Screen:
    """Writes events, and a table at the end.

    Args:
        stream: Where to write.
        colour: Whether to use colours.
    """

    def __init__(self, stream: TextIO, *, colour: bool) -> None:
        self._stream = stream
        self._colour = colour
        self._encoding = stream.encoding or "ascii"
        self._ascii = not _can_encode("─…“”", self._encoding)
        self._zero = time.monotonic()
        self._column = 0

    @classmethod
    def on(cls, stream: TextIO) -> Screen:
        """Make a screen on a stream, with colours if that is a terminal and nobody minds."""
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(stream, colour=wanted and stream.isatty())

    def title(self, text: str, note: str) -> None:
        """Write what this is."""
        self._write(f"{self._styled(text, 'head')}{self._styled(f': {note}', 'note')}\n\n")

    def facts(self, rows: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Write names, and beside each the lines of what there is to say about it."""
        for name, lines in rows:
            text = ("\n" + " " * _FACTS_INDENT).join(lines)
            self._write(f"  {self._styled(name.ljust(_FACTS_INDENT - 2), 'state')}{text}\n")

    def scene(self, name: str, summary: str) -> None:
        """Begin a scene; times count from here."""
        self.end()
        rule = "─" * (WIDTH - len(f"── {name}: {summary} "))
        head = self._styled(name, "head")
        self._write(f"\n── {head}: {summary} {self._styled(rule, 'note')}\n")
        self._zero = time.monotonic()

    def line(self, label: str, text: str, style: Style | None = None) -> None:
        """Write an event: when it happened, what it is, and the text."""
        self.begin(label, style)
        self.add(text)
        self.end()

    def begin(self, label: str, style: Style | None = None) -> None:
        """Begin an event's line and leave it open."""
        self.end()
        clock = self._styled(f"{time.monotonic() - self._zero:7.2f} s", "note")
        self._column = _INDENT
        self._write(f"{clock}  {self._styled(f'{label:<13}', style)}")

    def add(self, text: str, style: Style | None = None) -> None:
        """Go on in the open line; what would not fit into it goes into the next one."""
        for word in re.findall(r"\s*\S+", text):
            if self._column + len(word) > WIDTH:
                word = word.lstrip()  # noqa: PLW2901 - the blank before it has become the line's end
                self._column = _INDENT
                self._write("\n" + " " * _INDENT)
            self._column += len(word)
            self._write(self._styled(word, style))

    def end(self) -> None:
        """End the open line, if there is one."""
        if self._column:
            self._column = 0
            self._write("\n")

    def table(
        self,
        columns: Sequence[tuple[str, str]],
        rows: Sequence[Sequence[object]],
        total: Sequence[object],
    ) -> None:
        """Write a table.

        Args:
            columns: Title and format of each, "<8" for example.
            rows: Cells, one for each column.
            total: The last row's cells.
        """

        def laid_out(cells: Sequence[object]) -> str:
            pairs = zip(cells, columns, strict=True)
            return " " + "  ".join(f"{cell:{layout}}" for cell, (_, layout) in pairs).rstrip()

        rule = self._styled("─" * WIDTH, "note")
        head = self._styled(laid_out([title for title, _ in columns]), "head")
        last = self._styled(laid_out(total), "head")
        self.note("\n".join(["", rule, head, rule, *map(laid_out, rows), rule, last]))

    def note(self, text: str) -> None:
        """Write a line of plain text."""
        self.end()
        self._write(f"{text}\n")

    def _styled(self, text: str, style: Style | None) -> str:
        if style is None or not self._colour:
            return text
        return f"\033[{_CODES[style]}m{text}\033[0m"

    def _write(self, text: str) -> None:
        if self._ascii:
            text = text.translate(_ASCII)
        text = text.encode(self._encoding, "replace").decode(self._encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError:
            raise OutputClosed from None


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True
