"""Checksums of data files: CRC-32 of each block, computed while a file is written, verified before it is read.

A data file begins with a line that identifies it, so that a file of another save or of another rank is noticed
without reading the whole file. CRC-32 is the fastest checksum of the standard library (docs/checkpoints.md).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from penstock.runtime.checkpoints.collective import RankError

__all__ = ["BLOCK", "Block", "ChecksumStream", "FileChecksums", "damaged_blocks", "file_problems"]

BLOCK = 8 << 20
"""Bytes with one checksum; a part of the format."""
_PIECE = 1 << 20  # bytes read at once
_THREADS = min(8, os.cpu_count() or 1)


class FileChecksums(NamedTuple):
    """What the index knows about a data file."""

    size: int
    label: str
    """Its first line."""
    blocks: list[int]


class Block(NamedTuple):
    """A part of a data file with one checksum."""

    file: str
    number: int


class ChecksumStream:
    """A file that is written from its beginning to its end, with the checksums of what is written."""

    def __init__(self, file: IO[bytes], label: str) -> None:
        self._file, self._label = file, label
        self.error: OSError | None = None
        """Why writing failed; torch reports a failure of its own."""
        self._size = 0
        self._blocks: list[int] = []
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close
        self.write(label.encode())

    def write(self, data: bytes | memoryview) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.error = error
            raise
        while view:
            used = self._size % BLOCK
            if not used:
                self._blocks.append(0)
            part = view[: BLOCK - used]
            self._blocks[-1] = zlib.crc32(part, self._blocks[-1])
            self._size += len(part)
            view = view[len(part) :]
        return memoryview(data).nbytes

    @property
    def checksums(self) -> FileChecksums:
        """Of everything that was written."""
        return FileChecksums(self._size, self._label, self._blocks)


def file_problems(directory: Path, files: Mapping[str, FileChecksums]) -> Iterator[str]:
    """Files that are missing, have another size, or belong to another save."""
    for name, known in files.items():
        file = directory / name
        if not file.is_file():
            yield missing_file(name)
        elif (size := file.stat().st_size) != known.size:
            yield wrong_size(name, size, known.size)
        else:
            with file.open("rb") as opened:
                label = opened.read(len(known.label.encode()))
            if label != known.label.encode():
                yield (
                    f"its file {name} is damaged, or belongs to another checkpoint or rank: its first line is "
                    "not the one in the index"
                )


def missing_file(name: str) -> str:
    """The problem of a file that this rank does not see."""
    return f"its file {name} is missing; every rank must see the same file system"


def wrong_size(name: str, size: int, expected: int) -> str:
    """The problem of a file that is too short or too long."""
    what = "truncated" if size < expected else "damaged"
    return f"its file {name} is {what}: it has {size} bytes instead of {expected}"


def damaged_blocks(
    directory: Path, files: Mapping[str, FileChecksums], blocks: Iterable[Block]
) -> Iterator[str]:
    """Blocks that do not have their checksum; several threads read."""
    ordered = sorted(set(blocks))
    damaged: dict[str, list[int]] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda block: _checksum(directory, block), ordered)
        for block, checksum in zip(ordered, found):
            if checksum != files[block.file].blocks[block.number]:
                damaged.setdefault(block.file, []).append(block.number)
    for name, (first, *others) in damaged.items():
        end = min((first + 1) * BLOCK, files[name].size)
        more = f" (and {len(others)} more of {len(files[name].blocks)} blocks)" if others else ""
        span = f"bytes {first * BLOCK} to {end - 1}{more}"
        yield f"its file {name} is damaged: {span} do not have the checksum in the index"


def _checksum(directory: Path, block: Block) -> int:
    checksum, buffer, left = 0, memoryview(bytearray(_PIECE)), BLOCK
    try:
        with (directory / block.file).open("rb", buffering=0) as file:
            file.seek(block.number * BLOCK)
            while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
                checksum = zlib.crc32(buffer[:count], checksum)
                left -= count
    except OSError as error:
        raise RankError(f"its file {block.file} cannot be read: {error}") from error
    return checksum
