"""Telling one sequence of chunks from another without keeping it.

Pure: a digest is of constant size, and equal for equal chunks, whatever they are made of.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any


class Digest:
    """A running digest of a sequence of chunks, of constant size."""

    __slots__ = ("_hash",)

    def __init__(self) -> None:
        from hashlib import blake2b  # here, as few streams are resumed, and it takes its time

        self._hash = blake2b(digest_size=16)

    def add(self, chunk: Any) -> None:
        try:
            fingerprint = _framed(chunk)
        except Exception:  # noqa: BLE001 - a chunk of any kind; its repr has to do then
            fingerprint = _framed(repr(chunk))
        self._hash.update(fingerprint)

    def result(self) -> bytes:
        return self._hash.digest()


#: What a pickle tells all of, as far as there is one.
_ATOMS = {bool, int, float, complex, NoneType, FunctionType, BuiltinFunctionType}


def _framed(chunk: Any) -> bytes:
    fingerprint = _fingerprint(chunk)
    return len(fingerprint).to_bytes(8, "big") + fingerprint


def _fingerprint(chunk: Any) -> bytes:
    """Bytes that are the same for equal chunks of one type, within this process.

    Containers and objects are walked through by ourselves, because a pickle also tells which of
    their parts are one and the same object, and in what order a set or a dictionary was filled.
    """
    kind: Any = chunk.__class__
    name = f"{kind.__module__}.{kind.__qualname__}".encode()
    if kind is str:
        content: bytes = chunk.encode("utf-8", "surrogatepass")
    elif kind in {bytes, bytearray, memoryview}:
        content = bytes(chunk)
    elif kind in {list, tuple}:
        content = b"".join(map(_framed, chunk))
    elif kind is dict:
        content = b"".join(sorted(_framed(item) for item in chunk.items()))
    elif kind in {set, frozenset}:
        content = b"".join(sorted(map(_framed, chunk)))
    elif kind in _ATOMS:
        content = _pickled(chunk)
    elif isinstance(chunk, type):
        content = f"{chunk.__module__}.{chunk.__qualname__}".encode()
    else:
        content = _fingerprint(_parts_of(chunk))
    return name + b"\0" + content


def _pickled(chunk: Any) -> bytes:
    import pickle  # here for the same reason

    return pickle.dumps(chunk, protocol=4)


def _parts_of(chunk: Any) -> Any:
    """What an object would be pickled as: how it is made, its state, and what it contains."""
    import copyreg

    reduce = copyreg.dispatch_table.get(chunk.__class__)
    parts: Any = chunk.__reduce_ex__(4) if reduce is None else reduce(chunk)
    if isinstance(parts, str):
        return parts
    make, arguments, state, items, pairs = (tuple(parts) + (None,) * 3)[:5]
    return make, arguments, state, list(items or ()), dict(pairs or ())
