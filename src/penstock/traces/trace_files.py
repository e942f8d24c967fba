"""Bytes of a trace: a path or an open file, plain or compressed with gzip, read in chunks of text.

What reads a trace never needs the whole file: it asks for the next chunk, and a function that is called after
each chunk can show how far it is.
"""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from penstock.arguments import plural
from penstock.errors import TraceError

__all__ = ["OnRead", "TraceSource", "name_of", "open_chunks", "size_of"]

TraceSource: TypeAlias = str | os.PathLike[str] | IO[bytes] | IO[str]
"""A path, or a file that is open for reading."""
OnRead: TypeAlias = Callable[[int], None]
"""Called with the number of bytes that were read since the last call."""

_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"


def name_of(source: TraceSource) -> str:
    """The name of a source in messages."""
    if isinstance(source, str | os.PathLike):
        return str(Path(source))
    return str(getattr(source, "name", None) or "<file>")


def size_of(source: TraceSource) -> int:
    """Bytes of a file on disk; 0 for an open file."""
    return Path(source).stat().st_size if isinstance(source, str | os.PathLike) else 0


@contextmanager
def open_chunks(source: TraceSource, on_read: OnRead | None = None) -> Iterator[Iterator[str]]:
    """The text of a source, chunk by chunk; a path is closed at the end, an open file is left open."""
    report = on_read or (lambda _: None)
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            yield _text(file, name_of(source), report)
    else:
        yield _text(source, name_of(source), report)


def _text(file: IO[bytes] | IO[str], name: str, report: OnRead) -> Iterator[str]:
    first = file.read(_CHUNK)
    if isinstance(first, str):
        yield first
        yield from iter(lambda: cast("str", file.read(_CHUNK)), "")
        return
    binary = _Counted(cast("IO[bytes]", file), first, report)
    data: Any = gzip.GzipFile(fileobj=cast("IO[bytes]", binary)) if first.startswith(_GZIP) else binary
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    while True:
        try:
            chunk: bytes = data.read(_CHUNK)
        except (EOFError, OSError, zlib.error) as error:
            raise TraceError(
                [f"{name}: damaged gzip data after {plural(done, 'byte')} of text: {error}"]
            ) from None
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise TraceError([f"{name}: not UTF-8 text near byte {done + error.start}"]) from None
        done += len(chunk)
        if text:
            yield text
        if not chunk:
            return


class _Counted:
    """A binary file whose first bytes were read already, and that reports what is read."""

    def __init__(self, file: IO[bytes], first: bytes, report: OnRead) -> None:
        self._file, self._first, self._report = file, first, report

    def read(self, size: int = -1) -> bytes:
        """At most this many bytes."""
        if self._first:
            size = len(self._first) if size < 0 else size
            data, self._first = self._first[:size], self._first[size:]
        else:
            data = self._file.read(size)
        self._report(len(data))
        return data
