"""The files of a checkpoint: written by torch.distributed.checkpoint, with a checked index and checksums.

    __0_0.distcp ...    data files: a line that identifies the file, then a zip archive of torch for each tensor
    .metadata           the index: what is stored where, and the checksums of all data files

Every entry is a tensor; all other data is one JSON text, stored as a tensor of bytes. The index is a pickle of
torch, JSON with the same content and the checksums, and a footer:

    pickle | JSON | length of the JSON (8 bytes) | CRC-32 of everything before it (4 bytes) | PENSTOCK

The pickle is for torch's own tools and is never read here. The JSON is read without trusting it. CRC-32 is the
fastest checksum of the standard library (docs/checkpoints.md).
"""

from __future__ import annotations

import json
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.atomic_directory import DATA_SUFFIX, INDEX_FILE
from penstock.runtime.checkpoints.collective import Collective, RankError, some
from penstock.runtime.torch_internals.distributed import file_part, stored_part

BLOCK = 8 << 20
"""Bytes of a data file with one checksum; a part of the format."""
HEADER = "penstock"
"""The entry with the JSON text."""
Wanted: TypeAlias = Sequence[tuple[str, Tensor]]
"""Entries, and the tensors to read them into."""

_PIECE = 1 << 20  # bytes read at once
_THREADS = min(8, os.cpu_count() or 1)
_MAGIC = b"PENSTOCK"
_FOOTER = struct.Struct("<QI8s")
_SLACK = 1 << 20  # bytes that an index may have more than the data


class FileChecksums(NamedTuple):
    """What the index knows about a data file."""

    size: int
    label: str
    """Its first line."""
    blocks: list[int]


class StoredPart(NamedTuple):
    """A part of a tensor in a data file."""

    key: str
    file: str
    start: int
    length: int
    dtype: torch.dtype
    sizes: torch.Size


class Index(NamedTuple):
    """The content of an index."""

    entries: dict[str, metadata.TensorStorageMetadata]
    parts: dict[metadata.MetadataIndex, StoredPart]
    files: dict[str, FileChecksums]
    checksum: int
    """Of the index itself."""


# --- writing ---------------------------------------------------------------------------------------


def write(directory: Path, entries: Mapping[str, Tensor], header: object, ranks: Collective) -> None:
    """Write the entries of all ranks, each once; the first rank writes the header."""
    tensors = dict(entries)
    if ranks.is_first:
        tensors[HEADER] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    writer = _Writer(directory)
    try:
        with _quiet(), ranks.transport():
            save(
                tensors,
                storage_writer=writer,
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.is_single,
            )
    except CheckpointException as error:
        own, _ = error.failures.get(ranks.rank, (None, None))
        if own is not None and not isinstance(own, Exception):  # such as KeyboardInterrupt
            raise own from None
        failures = sorted(error.failures.items())
        problems = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures]
        raise CheckpointError(ranks.failure, problems) from own
    gathered = ranks.run(lambda: {name: stream.checksums for name, stream in writer.streams.items()})
    files = {name: known for each in gathered for name, known in each.items()}
    ranks.run_on_first(lambda: _append_index(directory / INDEX_FILE, writer.index, files))


def _append_index(file: Path, stored: metadata.Metadata, files: Mapping[str, FileChecksums]) -> None:
    """Complete the file that torch has written."""
    entries: dict[str, Any] = {}
    for key, entry in stored.state_dict_metadata.items():
        assert isinstance(entry, metadata.TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            place = (stored.storage_data or {})[metadata.MetadataIndex(key, chunk.offsets)]
            box = [list(chunk.offsets), list(chunk.sizes)]
            chunks.append([*box, place.relative_path, place.offset, place.length])
        entries[key] = [str(entry.properties.dtype).removeprefix("torch."), list(entry.size), chunks]
    text = json.dumps({"files": files, "entries": entries}, separators=(",", ":")).encode()
    with file.open("r+b") as opened:
        checksum = zlib.crc32(text, zlib.crc32(opened.read()))
        length = struct.pack("<Q", len(text))
        opened.write(text + _FOOTER.pack(len(text), zlib.crc32(length, checksum), _MAGIC))
        opened.flush()
        os.fsync(opened.fileno())


class _Writer(filesystem.FileSystemWriter):
    """Computes checksums, and stores no path of the machine that writes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _ChecksumFileSystem(self)
        self.streams: dict[str, _ChecksumStream] = {}
        self.index = metadata.Metadata({})
        """What was written; complete on the first rank."""

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta(save_id=self.save_id)

    def finish(self, metadata: metadata.Metadata, results: Any) -> None:
        super().finish(metadata, results)
        self.index = metadata


class _ChecksumFileSystem(filesystem.FileSystem):
    """Opens data files with a label and checksums."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            if path.suffix == DATA_SUFFIX:
                label = f"penstock {self._writer.save_id} {path.name}\n"
                self._writer.streams[path.name] = stream = _ChecksumStream(file, label)
                try:
                    yield stream
                except RuntimeError as error:
                    raise stream.error or error from None
            else:
                yield file


class _ChecksumStream:
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
        return FileChecksums(self._size, self._label, self._blocks)


# --- reading ---------------------------------------------------------------------------------------


class StoredCheckpoint:
    """A checkpoint on disk, of which only the index is read; its files exist and match the index."""

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.directory, self._verify = directory, verify
        self._index = index = _read_index(directory / INDEX_FILE)
        self.entries, self.checksum = index.entries, index.checksum
        places = {where: stored_part(each.file, each.start, each.length) for where, each in index.parts.items()}
        self._metadata = metadata.Metadata(dict(index.entries), storage_data=places)
        if problems := list(_file_problems(directory, index.files)):
            raise RankError(*problems)

    def header(self) -> dict[str, Any]:
        """Return all data that is not a tensor."""
        entry = self.entries.get(HEADER)
        if entry is None or entry.properties.dtype != torch.uint8 or len(entry.size) != 1:
            raise RankError(f"it was not written by save_checkpoint(): its index {INDEX_FILE} has no header")
        text = torch.empty(entry.size, dtype=torch.uint8)
        if problems := self.damage([(HEADER, text)]):
            raise RankError(*problems)
        self.read([(HEADER, text)])
        header = json.loads(text.numpy().tobytes())
        if not isinstance(header, dict) or type(header.get("format")) is not int:
            raise RankError(f"its header (the entry {HEADER!r}) is damaged: it has no format")
        return header

    def read(self, wanted: Wanted) -> None:
        """Fill tensors in place, DTensors with the shard of this rank."""
        try:
            with _quiet():
                for entries in _batches(wanted):
                    load(
                        entries,
                        storage_reader=_Reader(self.directory, self._metadata),
                        planner=DefaultLoadPlanner(flatten_state_dict=False),
                        no_dist=True,  # each rank reads alone; `Collective` gathers the errors
                    )
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None
        if list(_file_problems(self.directory, self._index.files)):
            raise RankError("it was replaced while it was read: load it again")

    def damage(self, wanted: Wanted, share: slice = slice(0)) -> list[str]:
        """Return the damaged parts of the files that `wanted` is read from, and of a share of all blocks."""
        if not self._verify:
            return []
        plans = (create_default_local_load_plan(entries, self._metadata) for entries in _batches(wanted))
        parts = [self._index.parts[item.storage_index] for plan in plans for item in plan.items]
        files = self._index.files
        blocks = [(name, number) for name, known in files.items() for number in range(len(known.blocks))][share]
        for part in parts:
            last = max(part.start, part.start + part.length - 1)
            blocks += [(part.file, number) for number in range(part.start // BLOCK, last // BLOCK + 1)]
        damaged = list(_damaged_blocks(self.directory, files, blocks))
        return damaged or list(_archive_problems(self.directory, parts))


class _Reader(filesystem.FileSystemReader):
    """Uses the checked index."""

    def __init__(self, directory: Path, index: metadata.Metadata) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._index


def _batches(wanted: Wanted) -> Iterator[dict[str, Any]]:
    """Several tensors may read the same entry: one of them in each batch."""
    remaining = wanted
    while remaining:
        now: dict[str, Tensor] = {}
        later = []
        for key, tensor in remaining:
            if now.setdefault(key, tensor) is not tensor:
                later.append((key, tensor))
        yield now
        remaining = later


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# --- checks of the index ---------------------------------------------------------------------------


def _damaged(*problems: str) -> RankError:
    return RankError(*(f"its index {INDEX_FILE} is damaged: {problem}" for problem in problems))


def _read_index(file: Path) -> Index:
    limit = _SLACK + sum(each.stat().st_size for each in file.parent.glob(f"*{DATA_SUFFIX}") if each.is_file())
    if file.stat().st_size > limit:
        raise RankError(
            f"its index {file.name} is damaged, or data files are missing: it has {file.stat().st_size} bytes, "
            "more than all data files together"
        )
    content = file.read_bytes()
    if not content.endswith(_MAGIC):
        raise RankError(
            f"its index {INDEX_FILE} is damaged, or another program wrote the checkpoint: it does not end "
            "as save_checkpoint() ends it"
        )
    try:
        index = _parse(content)
        problems = [*_entry_problems(index), *_place_problems(index)]
    except RankError:
        raise
    except Exception as error:  # noqa: BLE001 -- damaged content can raise anything
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise _damaged(*problems)
    return index


def _parse(content: bytes) -> Index:
    """Read the JSON behind torch's pickle."""
    length, checksum, _ = _FOOTER.unpack(content[-_FOOTER.size :])
    end = len(content) - _FOOTER.size
    if zlib.crc32(content[: end + 8]) != checksum:
        raise _damaged("its checksum is wrong")
    found = json.loads(content[end - length : end])
    entries: dict[str, metadata.TensorStorageMetadata] = {}
    parts: dict[metadata.MetadataIndex, StoredPart] = {}
    for key, (dtype_name, size, chunks) in found["entries"].items():
        dtype = getattr(torch, dtype_name)
        entry = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), _counts(size), [])
        for number, (offsets, sizes, file, start, stored_bytes) in enumerate(chunks):
            where = metadata.MetadataIndex(key, offsets, number)
            if where in parts:
                raise _damaged(f"two parts of {key!r} are at {offsets}")
            _counts([start, stored_bytes])
            parts[where] = StoredPart(key, file, start, stored_bytes, dtype, _counts(sizes))
            entry.chunks.append(metadata.ChunkStorageMetadata(_counts(offsets), _counts(sizes)))
        entries[key] = entry
    files = {name: FileChecksums(*known) for name, known in found["files"].items()}
    return Index(entries, parts, files, checksum)


def _counts(values: Sequence[int]) -> torch.Size:
    """Return numbers of an index that must not be negative."""
    if not all(type(value) is int and value >= 0 for value in values):
        raise _damaged(f"{values} are not counts")
    return torch.Size(values)


def _entry_problems(index: Index) -> Iterator[str]:
    """Entries whose parts do not fill the tensor exactly, or are too short."""
    if untiled := [key for key, entry in index.entries.items() if not tiles(entry.chunks, entry.size)]:
        yield f"parts of these entries are missing, overlapping or outside: {some(untiled)}"
    parts = index.parts.values()
    short = [each.key for each in parts if each.length < math.prod(each.sizes) * each.dtype.itemsize]
    if short:
        yield f"the data of these entries is too short: {some(list(dict.fromkeys(short)))}"


def tiles(chunks: Sequence[metadata.ChunkStorageMetadata], size: Sequence[int]) -> bool:
    """Return whether the chunks fill a tensor of this size exactly, as the cells of nested rows do."""
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


def _place_problems(index: Index) -> Iterator[str]:
    """Files with bytes that belong to no part or to several, with odd names, or without checksums."""
    files = index.files
    spans: dict[str, list[tuple[int, int]]] = {}
    for part in index.parts.values():
        spans.setdefault(part.file, []).append((part.start, part.start + part.length))
    names = sorted({*spans, *files})
    if odd := [name for name in names if Path(name).name != name or not name.endswith(DATA_SUFFIX)]:
        yield f"these are not names of data files in the directory: {some(odd)}"
    elif unknown := [name for name in names if name not in files or not _is_complete(files[name])]:
        yield f"it has no valid checksums of {some(unknown)}"
    elif gaps := [name for name in sorted(spans) if not _is_contiguous(spans[name], files[name])]:
        yield f"bytes of these files belong to no entry, or to several: {some(gaps)}"


def _is_contiguous(spans: Sequence[tuple[int, int]], known: FileChecksums) -> bool:
    begin, end = len(known.label.encode()), known.size
    return all(one[1] == other[0] for one, other in pairwise([(0, begin), *sorted(spans), (end, end)]))


def _is_complete(known: FileChecksums) -> bool:
    counts = _counts([known.size, *known.blocks])
    return isinstance(known.label, str) and len(counts) == 1 + -(-known.size // BLOCK)


# --- checks of the data files ----------------------------------------------------------------------


def _file_problems(directory: Path, files: Mapping[str, FileChecksums]) -> Iterator[str]:
    """Files that are missing, have another size, or belong to another save."""
    for name, known in files.items():
        file, label = directory / name, known.label.encode()
        if not file.is_file():
            yield f"its file {name} is missing; every rank must see the same file system"
        elif (size := file.stat().st_size) != known.size:
            what = "truncated" if size < known.size else "damaged"
            yield f"its file {name} is {what}: it has {size} bytes instead of {known.size}"
        else:
            with file.open("rb") as opened:
                found = opened.read(len(label))
            if found != label:
                yield (
                    f"its file {name} is damaged, or belongs to another checkpoint or rank: its first line is "
                    "not the one in the index"
                )


def _damaged_blocks(
    directory: Path, files: Mapping[str, FileChecksums], blocks: Iterable[tuple[str, int]]
) -> Iterator[str]:
    """Blocks, by file and number, that do not have their checksum; several threads read."""
    ordered = sorted(set(blocks))
    damaged: dict[str, list[int]] = {}
    with ThreadPoolExecutor(_THREADS) as threads:
        found = threads.map(lambda block: _checksum(directory, *block), ordered)
        for (file, number), checksum in zip(ordered, found):
            if checksum != files[file].blocks[number]:
                damaged.setdefault(file, []).append(number)
    for name, (first, *others) in damaged.items():
        end = min((first + 1) * BLOCK, files[name].size)
        more = f" (and {len(others)} more of {len(files[name].blocks)} blocks)" if others else ""
        span = f"bytes {first * BLOCK} to {end - 1}{more}"
        yield f"its file {name} is damaged: {span} do not have the checksum in the index"


def _checksum(directory: Path, name: str, number: int) -> int:
    checksum, buffer, left = 0, memoryview(bytearray(_PIECE)), BLOCK
    try:
        with (directory / name).open("rb", buffering=0) as file:
            file.seek(number * BLOCK)
            while left and (count := file.readinto(buffer[: min(left, _PIECE)])):
                checksum = zlib.crc32(buffer[:count], checksum)
                left -= count
    except OSError as error:
        raise RankError(f"its file {name} cannot be read: {error}") from error
    return checksum


def _archive_problems(directory: Path, parts: Iterable[StoredPart]) -> Iterator[str]:
    """Zip archives that do not have the tensor that the index says."""
    for each in parts:
        why = ""
        with (directory / each.file).open("rb") as file:
            archive = file_part(file, each.start, each.length)
            try:
                found = torch.load(archive, map_location="meta", weights_only=True)
                if not isinstance(found, Tensor) or (found.dtype, found.shape) != (each.dtype, each.sizes):
                    why = "its dtype or shape is not the one in the index"
            except Exception as error:  # noqa: BLE001 -- a damaged archive can raise anything
                why = f"{type(error).__name__}: {error}"
        if why:
            yield f"its file {each.file} is damaged: {each.key!r} cannot be read ({why})"
