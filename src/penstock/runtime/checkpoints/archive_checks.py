"""Checks of the zip archive that torch writes for each tensor: it has the tensor that the index says."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

__all__ = ["StoredTensor", "archive_problems"]


class StoredTensor(NamedTuple):
    """A tensor in a data file."""

    key: str
    file: str
    offset: int
    length: int
    dtype: torch.dtype
    sizes: torch.Size


def archive_problems(directory: Path, tensors: Iterable[StoredTensor], *, crc: bool) -> Iterator[str]:
    """What is wrong with the archives of these tensors; with `crc`, their own checksums are verified too."""
    for each in tensors:
        with (directory / each.file).open("rb") as file:
            view = _Part(file, each.offset, each.length)
            try:
                why = (_damage(view) if crc else None) or _difference(view, each)
            except Exception as error:  # noqa: BLE001 -- a damaged archive can raise anything
                why = f"{type(error).__name__}: {error}"
        if why:
            yield f"its file {each.file} is damaged: {each.key!r} cannot be read ({why})"


def _damage(view: _Part) -> str | None:
    with zipfile.ZipFile(view) as archive:
        if any(each.compress_type != zipfile.ZIP_STORED for each in archive.infolist()):
            return "its archive is compressed"
        bad = archive.testzip()
    return bad and f"{bad} does not have its checksum"


def _difference(view: _Part, stored: StoredTensor) -> str | None:
    view.seek(0)
    found = torch.load(io.BufferedReader(view), map_location="meta", weights_only=True)
    if not isinstance(found, torch.Tensor) or (found.dtype, found.shape) != (stored.dtype, stored.sizes):
        return "its dtype or shape is not the one in the index"
    return None


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + position < 0:
            raise ValueError("a position is before the beginning")
        self._position = start + position
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._length - self._position)
        self._file.seek(self._offset + self._position)
        data = self._file.read(min(left, len(buffer)))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
