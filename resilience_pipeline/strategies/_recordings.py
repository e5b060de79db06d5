"""Recordings in a directory: one readable JSON file for each call.

Knows files and keys, and nothing of calls. A file is written beside its place and then moved there,
so it is there whole or not at all, whatever happens to the process; nothing is done against a power
cut. It is named for people by a few words, and for look-up by a digest of the key.

Everything here blocks the calling thread for as long as its files take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from itertools import count
from os import PathLike, getpid
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast

from .._errors import MisusedOptionError
from .._locks import Lock
from ._faithful import unfaithful

#: What a recording is of: a call with its value or its error, or a stream.
Kind: TypeAlias = Literal["call", "stream"]
Recording: TypeAlias = dict[str, Any]

_DIGITS: Final = 32
_SLUG: Final = 48
#: The names of files that are ours to remove: recordings, and what a crash has left of one.
_OURS = re.compile(rf"([a-z0-9_-]*\.)?[0-9a-f]{{{_DIGITS}}}\.json(\.[0-9]+-[0-9]+\.tmp)?")

_numbers = count()


class RecordingKey:
    """What one call is recorded under.

    Attributes:
        value: The key, a JSON value.
        text: The same as text, equal for equal keys alone: dicts in the order of their keys.
        kind: What is recorded under it: a call and a stream never share a file.
        file_name: Name of the file.
    """

    __slots__ = ("file_name", "kind", "text", "value")

    def __init__(self, value: Any, kind: Kind, words: str | None = None) -> None:
        self.value = value
        self.kind: Kind = kind
        self.text = _canonical(value)
        digest = sha256(f"{kind}:{self.text}".encode()).hexdigest()[:_DIGITS]
        slug = _slug(self.text if words is None else words)
        self.file_name = f"{slug}.{digest}.json" if slug else f"{digest}.json"


class Recordings:
    """The recordings in one directory.

    Args:
        directory: Path of the directory; made when the first recording is kept.

    Attributes:
        is_fresh: Whether `start_afresh` has removed what was there.
    """

    __slots__ = ("_directory", "_lock", "is_fresh")

    def __init__(self, directory: str | PathLike[str]) -> None:
        self._directory = Path(directory)
        # Held while files are removed, and then never again: whoever comes meanwhile has to wait.
        self._lock = Lock()
        self.is_fresh = False

    def start_afresh(self) -> None:
        """Remove the recordings that are there, once; files that are not ours stay.

        Raises:
            OSError: It could not be done; it is tried again the next time.
        """
        if self.is_fresh:
            return
        with self._lock:
            if self.is_fresh:
                return
            with suppress(FileNotFoundError, NotADirectoryError):  # then there are none
                for path in list(self._directory.iterdir()):
                    if _OURS.fullmatch(path.name):
                        path.unlink(missing_ok=True)
            self.is_fresh = True

    def path_of(self, key: RecordingKey) -> Path:
        """Give the path of the file of a key."""
        return self._directory / key.file_name

    def find(self, key: RecordingKey) -> Recording | None:
        """Read what was recorded under a key; `None` if nothing was.

        A file that holds another key than its name says is no recording of this one.

        Raises:
            OptionsError: There is a file, and it can't be read or is no recording.
        """
        path = self.path_of(key)
        try:
            text = path.read_text("utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeError) as error:
            raise broken(path, f"it can't be read: {error}") from error
        recording = _parsed(path, text)
        try:
            is_other = _canonical(recording["key"]) != key.text
        except (ValueError, RecursionError) as error:  # a number beyond all floats, say
            raise broken(path, f"its key can't be read: {error}") from error
        if is_other:
            return None
        problem = _problem(recording, key.kind)
        if problem is not None:
            raise broken(path, problem)
        return recording

    def keep(self, key: RecordingKey, text: str) -> None:
        """Write the text of a recording, whole or not at all, in place of what was there.

        Raises:
            OSError: It could not be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self.path_of(key)
        beside = path.with_name(f"{path.name}.{getpid()}-{next(_numbers)}.tmp")
        try:
            with beside.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text + "\n")
            beside.replace(path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def text_of(recording: Recording) -> str:
    """Write a recording as JSON, for people to read."""
    return json.dumps(recording, ensure_ascii=False, allow_nan=False, indent=2)


def problem_of(value: Any, where: str = "value") -> str | None:
    """Say why a value can't be recorded as it is, or give `None`."""
    problem = unfaithful(value, where)
    if problem is None:
        try:
            text_of({"key": value})
        except RecursionError:  # which comes earlier when it is written
            problem = f"{where} is nested too deeply"
    return problem


def recording_of(text: str) -> Recording:
    """Read what `text_of` has written."""
    recording: Recording = json.loads(text)
    return recording


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-")[:_SLUG].strip("-")


def _parsed(path: Path, text: str) -> Recording:
    try:
        recording: Any = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise broken(path, f"it is no JSON: {error}") from error
    if not isinstance(recording, dict) or "key" not in recording:
        raise broken(path, 'it is no object with a "key"')
    return cast("Recording", recording)


def _refuse_constant(name: str) -> NoReturn:
    msg = f"{name} is no JSON"
    raise ValueError(msg)


def _problem(recording: Mapping[str, Any], kind: Kind) -> str | None:
    """Say why something is no recording of its kind."""
    has_error = isinstance(recording.get("error"), dict)
    if "error" in recording and not has_error:
        return '"error" is no object'
    if kind == "stream":
        return None if isinstance(recording.get("chunks"), list) else 'it has no list of "chunks"'
    if has_error == ("value" in recording):
        return 'it has to have either a "value" or an "error"'
    return None


def broken(path: Path, problem: str) -> MisusedOptionError:
    """Make the error for a file that is no recording."""
    return MisusedOptionError(
        f"the recording {path} is broken: {problem}; remove the file to record it again",
        (problem,),
    )
