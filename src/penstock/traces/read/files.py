"""Bytes of a trace: files or streams, plain or gzip, in chunks of text, and their trace events one by one."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias, cast

from penstock.arguments import plural, printable
from penstock.errors import TraceError

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
    with Path(source).open("rb") if isinstance(source, str | os.PathLike) else nullcontext(source) as file:
        yield _text(file, name_of(source), on_read or (lambda _: None))


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

    def read(self, size: int) -> bytes:
        data, self._first = self._first[:size], self._first[size:]
        data = data or self._file.read(size)
        self._report(len(data))
        return data


# Trace events one by one from JSON text of any length, in memory that does not grow with it.
#
#     {"distributedInfo": {...}, "traceEvents": [{...}, {...}, ...], "traceName": ...}     or     [{...}, ...]
#
# The buffer holds a chunk and the event that was cut at its end. What is not an event is kept in `header`.


_LONGEST = 1 << 24
"""Characters of one value; a longer one is not an event of a trace."""
_KEPT = 1 << 20
"""Characters of a value of the header that is kept."""
_BLANK = " \t\r\n"
_ENDS = tuple(f"{_BLANK},]}}")
"""What follows a number."""


class EventStream:
    """Iterate over the events; then `header` has the other entries of the file."""

    def __init__(self, chunks: Iterator[str], name: str) -> None:
        self._chunks, self._name = chunks, name
        self._buffer, self._at, self._before = "", 0, 0
        self._decode = json.JSONDecoder().raw_decode
        self.header: dict[str, Any] = {}
        self.number = -1
        """The number of the last event, from 0."""

    def __iter__(self) -> Iterator[Any]:
        opening = self._next_sign()
        if not opening:
            raise TraceError([f"{self._name}: the file is empty"])
        if opening not in "{[":
            self._fail("a trace begins with { or [")
        yield from self._array(may_be_open=True) if opening == "[" else self._object()
        if self._next_sign():
            self._fail("text after the end of the trace")

    # --- structure -----------------------------------------------------------------------------------

    def _object(self) -> Iterator[Any]:
        for _ in self._places("}"):
            key = self._value()
            if not isinstance(key, str):
                self._fail("a key in quotes is missing")
            if self._next_sign() != ":":
                self._fail("':' is missing")
            self._at += 1
            if key == "traceEvents" and self._next_sign() == "[":
                yield from self._array()
                continue
            begin = self._before + self._at
            value = self._value()
            if self._before + self._at - begin <= _KEPT:
                self.header[key] = value

    def _array(self, *, may_be_open: bool = False) -> Iterator[Any]:
        for _ in self._places("]", may_be_open=may_be_open):
            self.number += 1
            yield self._value()

    def _places(self, closing: str, *, may_be_open: bool = False) -> Iterator[None]:
        """Pass the opening sign, commas and the closing sign, and yield where each element begins.

        A file that is only an array may end without `]`, as a stopped tracer leaves it.
        """
        self._at += 1
        if self._next_sign() == closing:
            self._at += 1
            return
        while self._next_sign() or not may_be_open:
            yield
            sign = self._next_sign()
            if may_be_open and not sign:
                return
            if sign not in (",", closing):
                self._fail(f"',' or '{closing}' is missing")
            self._at += 1
            if sign == closing:
                return

    # --- text ----------------------------------------------------------------------------------------

    def _next_sign(self) -> str:
        """The next character that is not blank, without passing it; empty at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Append a chunk to what is left; false at the end of the file."""
        chunk = next(self._chunks, "")
        self._before += self._at
        self._buffer, self._at = self._buffer[self._at :] + chunk, 0
        return bool(chunk)

    def _value(self) -> Any:  # noqa: ANN401 -- any JSON value
        """The next value, whole."""
        sign = self._next_sign()
        while True:
            try:
                value, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                offset, problem = error.pos - self._at, error.msg.removesuffix(" starting at")
                short = len(self._buffer) - self._at < _LONGEST
                if short and self._may_be_cut(error.pos) and self._more():
                    continue
                self._fail(f"invalid JSON: {problem}", offset)
            except RecursionError:
                self._fail("invalid JSON: the nesting is too deep")
            except ValueError as error:
                self._fail(f"invalid JSON: {error}")
            if sign not in '{["' and self._buffer[end : end + 1] not in _ENDS and self._more():
                continue  # a number may go on in the next chunk
            self._at = end
            return value

    def _may_be_cut(self, position: int) -> bool:
        """Whether more text could correct this error: it is near the end, or in text that is not closed."""
        near = 64  # a literal or an escape
        return position > len(self._buffer) - near or self._buffer.startswith('"', position)

    def _fail(self, problem: str, offset: int = 0) -> NoReturn:
        place = f"character {self._before + self._at + offset}"
        if self.number >= 0:
            place += f", event {self.number}"
        after = self._buffer[self._at + offset :][:30]
        text = f" at {printable(after)!r}" if after else " at the end of the file"
        raise TraceError([f"{self._name}: {place}: {problem}{text}"])
