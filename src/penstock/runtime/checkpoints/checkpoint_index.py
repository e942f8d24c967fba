"""The index of a checkpoint directory, read without trusting it: what is stored where, and the checksums.

The file is a pickle of torch, JSON with the same content and the checksums of all data files, and a footer:

    pickle | JSON | length of the JSON (8 bytes) | CRC-32 of everything before it (4 bytes) | PENSTOCK

The pickle is for torch's own tools. Only that of format 1, which has nothing else, is read here.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem, metadata

from penstock.runtime.checkpoints.atomic_directory import DATA_SUFFIX
from penstock.runtime.checkpoints.checksums import FileChecksums
from penstock.runtime.checkpoints.collective import RankError
from penstock.runtime.checkpoints.index_checks import DamageError, index_problems
from penstock.runtime.checkpoints.pickled_index import unpickle_index

__all__ = ["Index", "append_index", "read_index"]

_MAGIC = b"PENSTOCK"
_FOOTER = struct.Struct("<QI8s")
_SLACK = 1 << 20  # bytes that an index may have more than the data


class Index(NamedTuple):
    """The content of an index."""

    metadata: metadata.Metadata
    files: Mapping[str, FileChecksums] | None
    """By name; None for format 1, which has no checksums."""
    checksum: int
    """Of the index itself."""


def append_index(file: Path, stored: metadata.Metadata, files: Mapping[str, FileChecksums]) -> None:
    """Complete the file that torch has written."""
    content = {
        "files": {name: list(known) for name, known in files.items()},
        "entries": {key: _to_json(key, entry, stored.storage_data) for key, entry in _entries(stored)},
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    with file.open("r+b") as opened:
        checksum = zlib.crc32(text, zlib.crc32(opened.read()))
        length = struct.pack("<Q", len(text))
        opened.write(text + _FOOTER.pack(len(text), zlib.crc32(length, checksum), _MAGIC))
        opened.flush()
        os.fsync(opened.fileno())


def _entries(stored: metadata.Metadata) -> list[tuple[str, metadata.TensorStorageMetadata]]:
    entries = stored.state_dict_metadata.items()
    return [(key, entry) for key, entry in entries if isinstance(entry, metadata.TensorStorageMetadata)]


def _to_json(key: str, entry: metadata.TensorStorageMetadata, places: Mapping[Any, Any]) -> Any:
    chunks = []
    for chunk in entry.chunks:
        place = places[metadata.MetadataIndex(key, chunk.offsets)]
        box = [list(chunk.offsets), list(chunk.sizes)]
        chunks.append([*box, place.relative_path, place.offset, place.length])
    return [str(entry.properties.dtype).removeprefix("torch."), list(entry.size), chunks]


def read_index(file: Path) -> Index:
    """Read and check the index."""
    limit = _SLACK + sum(each.stat().st_size for each in file.parent.glob(f"*{DATA_SUFFIX}") if each.is_file())
    if file.stat().st_size > limit:
        raise RankError(
            f"its index {file.name} is damaged, or data files are missing: it has {file.stat().st_size} bytes, "
            "more than all data files together"
        )
    try:
        index = _parse(file.read_bytes())
        problems = list(index_problems(index.metadata, index.files))
    except (RankError, OSError):
        raise
    except DamageError as error:
        problems = [str(error)]
    except Exception as error:  # noqa: BLE001 -- damaged content can raise anything
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise RankError(*(f"its index {file.name} is damaged: {problem}" for problem in problems))
    return index


def _parse(content: bytes) -> Index:
    """The index from the JSON, or from the pickle if there is nothing else."""
    if not content.endswith(_MAGIC):
        return Index(unpickle_index(content), None, zlib.crc32(content))
    length, checksum, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    end = len(content) - _FOOTER.size
    if zlib.crc32(content[: end + 8]) != checksum:
        raise DamageError("its checksum is wrong")
    found = json.loads(content[end - length : end])
    files = {name: FileChecksums(*known) for name, known in found["files"].items()}
    stored = metadata.Metadata({}, storage_data={})
    for key, (dtype, size, chunks) in found["entries"].items():
        entry = metadata.TensorStorageMetadata(
            metadata.TensorProperties(getattr(torch, dtype)), torch.Size(size), []
        )
        for number, (offsets, sizes, name, start, stored_bytes) in enumerate(chunks):
            where = metadata.MetadataIndex(key, offsets, number)
            if where in stored.storage_data:
                raise DamageError(f"two parts of {key!r} are at {offsets}")
            entry.chunks.append(metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            stored.storage_data[where] = filesystem._StorageInfo(name, start, stored_bytes)  # noqa: SLF001
        stored.state_dict_metadata[key] = entry
    return Index(stored, files, checksum)
