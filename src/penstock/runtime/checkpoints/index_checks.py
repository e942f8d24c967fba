"""Checks of an index: every element of a tensor is stored once, and every byte belongs to one part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata

from penstock.runtime.checkpoints.atomic_directory import DATA_SUFFIX
from penstock.runtime.checkpoints.checksums import BLOCK, FileChecksums
from penstock.runtime.checkpoints.collective import some

__all__ = ["DamageError", "index_problems", "tiles"]


class DamageError(Exception):
    """Why the content of an index is not that of an index."""


def index_problems(stored: metadata.Metadata, files: Mapping[str, FileChecksums] | None) -> Iterator[str]:
    """What is wrong with an index, whose objects may have any values."""
    entries, places = stored.state_dict_metadata, stored.storage_data
    if other := [key for key, entry in entries.items() if not _is_tensor(entry)]:
        yield f"these entries are not tensors: {some(other)}"
    elif not all(_is_index(where) and _is_place(place) for where, place in places.items()):
        yield "it has places that are not parts of files"
    elif any(place.transform_descriptors for place in places.values()):
        yield "the data is compressed, but save_checkpoint() does not compress"
    else:
        yield from _entry_problems(entries, places)
        yield from _file_problems(places, files)


def _is_size(value: object) -> bool:
    return isinstance(value, torch.Size) and all(each >= 0 for each in value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, metadata.TensorStorageMetadata)
        and isinstance(entry.properties, metadata.TensorProperties)
        and isinstance(entry.properties.dtype, torch.dtype)
        and _is_size(entry.size)
        and type(entry.chunks) is list
        and all(
            isinstance(chunk, metadata.ChunkStorageMetadata)
            and _is_size(chunk.offsets)
            and _is_size(chunk.sizes)
            for chunk in entry.chunks
        )
    )


def _is_index(where: Any) -> bool:
    return isinstance(where, metadata.MetadataIndex) and isinstance(where.fqn, str) and _is_size(where.offset)


def _is_place(place: Any) -> bool:
    return isinstance(place.relative_path, str) and _is_count(place.offset) and _is_count(place.length)


def _entry_problems(entries: Mapping[str, Any], places: Mapping[Any, Any]) -> Iterator[str]:
    """Entries whose chunks do not have exactly one place each, or do not fill the tensor exactly."""
    if untiled := [key for key, entry in entries.items() if not tiles(entry.chunks, entry.size)]:
        yield f"parts of these entries are missing, overlapping or outside: {some(untiled)}"
    known = {(key, tuple(chunk.offsets)) for key, entry in entries.items() for chunk in entry.chunks}
    if differing := known.symmetric_difference((where.fqn, tuple(where.offset)) for where in places):
        names = sorted({key for key, _ in differing})
        yield f"parts of these entries have no place, or places no part: {some(names)}"
        return
    lengths = {(where.fqn, tuple(where.offset)): place.length for where, place in places.items()}
    short = [
        key
        for key, entry in entries.items()
        for chunk in entry.chunks
        if lengths[key, tuple(chunk.offsets)] < math.prod(chunk.sizes) * entry.properties.dtype.itemsize
    ]
    if short:
        yield f"the data of these entries is too short: {some(list(dict.fromkeys(short)))}"


def tiles(chunks: Sequence[metadata.ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Whether the chunks fill a tensor of this size without gap or overlap, as the cells of nested rows do."""
    boxes = [tuple(zip(chunk.offsets, chunk.sizes)) for chunk in chunks]
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    if any(start + length > end for box in boxes for (start, length), end in zip(box, size)):
        return False
    filled = [box for box in boxes if all(length for _, length in box)]
    return _fill(filled, size) if math.prod(size) else bool(chunks)


def _fill(boxes: Sequence[tuple[tuple[int, int], ...]], size: Sequence[int], dimension: int = 0) -> bool:
    if dimension == len(size):
        return len(boxes) == 1
    rows: dict[tuple[int, int], list[tuple[tuple[int, int], ...]]] = {}
    for box in boxes:
        rows.setdefault(box[dimension], []).append(box)
    end = 0
    for start, length in sorted(rows):
        if start != end:
            return False
        end += length
    return end == size[dimension] and all(_fill(row, size, dimension + 1) for row in rows.values())


def _file_problems(places: Mapping[Any, Any], files: Mapping[str, FileChecksums] | None) -> Iterator[str]:
    """Files with bytes that belong to no part or to several, with odd names, or without checksums."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for place in places.values():
        spans.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
    names = {*spans, *(files or ())}
    if odd := [name for name in names if Path(name).name != name or not name.endswith(DATA_SUFFIX)]:
        yield f"these are not names of data files in the directory: {some(sorted(odd))}"
    elif files is not None and (
        unknown := [name for name in names if name not in files or not _is_complete(files[name])]
    ):
        yield f"it has no valid checksums of {some(sorted(unknown))}"
    elif gaps := [name for name, parts in spans.items() if not _is_contiguous(parts, (files or {}).get(name))]:
        yield f"bytes of these files belong to no entry, or to several: {some(sorted(gaps))}"


def _is_contiguous(parts: Sequence[tuple[int, int]], known: FileChecksums | None) -> bool:
    ordered = sorted(parts)
    begin, end = (0, ordered[-1][1]) if known is None else (len(known.label.encode()), known.size)
    return all(one[1] == other[0] for one, other in pairwise([(0, begin), *ordered, (end, end)]))


def _is_complete(known: FileChecksums) -> bool:
    return (
        _is_count(known.size)
        and isinstance(known.label, str)
        and all(map(_is_count, known.blocks))
        and len(known.blocks) == -(-known.size // BLOCK)
    )
