"""Bytes of a trace: files or streams, plain or gzip, and their trace events one by one."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias, cast

from penstock.arguments import plural, printable
from penstock.errors import TraceError

# Bytes of a trace: a path or an open file, plain or compressed with gzip, read in chunks of text.
#
# What reads a trace never needs the whole file: it asks for the next chunk, and a function that is called after
# each chunk can show how far it is.


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
        if opening == "[":
            self._at += 1
            yield from self._array(may_be_open=True)
        elif opening == "{":
            self._at += 1
            yield from self._object()
        elif not opening:
            raise TraceError([f"{self._name}: the file is empty"])
        else:
            self._fail("a trace begins with { or [")
        if self._next_sign():
            self._fail("text after the end of the trace")

    # --- structure -----------------------------------------------------------------------------------

    def _object(self) -> Iterator[Any]:
        if self._next_sign() == "}":
            self._at += 1
            return
        while True:
            key = self._value()
            if not isinstance(key, str):
                self._fail("a key in quotes is missing")
            self._expect(":")
            if key == "traceEvents" and self._next_sign() == "[":
                self._at += 1
                yield from self._array()
            else:
                begin = self._before + self._at
                value = self._value()
                if self._before + self._at - begin <= _KEPT:
                    self.header[key] = value
            if self._separator("}"):
                return

    def _array(self, *, may_be_open: bool = False) -> Iterator[Any]:
        """The elements; a file that is only an array may end without `]`, as a stopped tracer leaves it."""
        if self._next_sign() == "]":
            self._at += 1
            return
        while self._next_sign() or not may_be_open:
            self.number += 1
            yield self._value()
            if may_be_open and not self._next_sign():
                return
            if self._separator("]"):
                return

    def _separator(self, closing: str) -> bool:
        """Pass a comma, or the closing sign: then true."""
        sign = self._next_sign()
        if sign not in (",", closing):
            self._fail(f"',' or '{closing}' is missing")
        self._at += 1
        return sign == closing

    def _expect(self, sign: str) -> None:
        if self._next_sign() != sign:
            self._fail(f"'{sign}' is missing")
        self._at += 1

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
