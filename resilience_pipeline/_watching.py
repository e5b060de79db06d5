"""Loading a file again whenever it has changed.

What decides is the content, read at every look: times of files are too coarse, and are kept by some
tools that replace files. A content is loaded when two looks in a row have found it, because whoever
writes a file may be in the middle of it, and the first half of a configuration may well be a valid
one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from threading import Event, Thread

from ._durations import Duration
from ._errors import OptionsError
from ._options import Bad, to_seconds

#: Loads the contents of a file, given its name too, or raises and changes nothing.
Load = Callable[[bytes, str], None]

_logger = logging.getLogger("resilience_pipeline")


class Watch:
    """Looks at a file.

    Args:
        load: What loads it, or raises and changes nothing.
        path: The file.
    """

    def __init__(self, load: Load, path: str | PathLike[str]) -> None:
        self._load = load
        self._path = Path(path).absolute()  # wherever the program may go
        self._reads = True
        #: What was found last, and what was loaded, or refused, last.
        self._seen = self._handled = b""

    def start(self) -> None:
        """Load the file for the first time; what is wrong with it comes out."""
        contents = self._path.read_bytes()
        self._load(contents, str(self._path))
        self._seen = self._handled = contents

    def look(self) -> None:
        """Load the file if it is not what was loaded last, and no longer changing."""
        try:
            contents = self._path.read_bytes()
        except OSError as error:
            if self._reads:  # said once, not at every look
                msg = "%s can't be read, the pipelines stay as they are: %s"
                _logger.error(msg, self._path, error)  # noqa: TRY400 - the message is the news
            self._reads = False
            return
        self._reads = True
        settled = contents == self._seen
        self._seen = contents
        if settled and contents != self._handled:
            self._handled = contents
            self._reload(contents)

    def _reload(self, contents: bytes) -> None:
        try:
            self._load(contents, str(self._path))
        except OptionsError as error:
            msg = "%s was not loaded, the pipelines stay as they are: %s"
            _logger.error(msg, self._path, error)  # noqa: TRY400 - the message is the news
        except Exception:
            _logger.exception("%s was not loaded, the pipelines stay as they are", self._path)
        else:
            _logger.info("%s was loaded", self._path)


@contextmanager
def watching(
    load: Load, path: str | PathLike[str], interval: Duration
) -> Generator[None, None, None]:
    """Load a file, and load it again whenever it has changed, for the time of the block."""
    seconds: object = to_seconds(interval)
    if isinstance(seconds, Bad) or seconds == 0:
        msg = f"interval must be a duration longer than zero, got {interval!r}"
        raise OptionsError(msg, (msg,))
    watch = Watch(load, path)
    watch.start()
    over = Event()

    def run() -> None:
        while not over.wait(min(float(seconds), _LONGEST_WAIT)):  # type: ignore[arg-type]
            watch.look()

    thread = Thread(target=run, name=f"watch of {path}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


#: Seconds; what a wait of threads takes at most on every platform.
_LONGEST_WAIT = 1_000_000.0
