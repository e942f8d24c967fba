"""The files of a checkpoint, by torch.distributed.checkpoint, with an index and checksums."""

from __future__ import annotations

import io
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
from penstock.runtime.torch_internals.distributed import stored_part

# Checksums of data files: CRC-32 of each block, computed while a file is written, verified before it is read.
#
# A data file begins with a line that identifies it, so that a file of another save or of another rank is
# noticed without reading the whole file. CRC-32 is the fastest checksum of the standard library
# (docs/checkpoints.md).


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


# Checks of an index: every element of a tensor is stored once, and every byte belongs to one part.


class DamageError(Exception):
    """Return why a content is no index."""


def index_problems(stored: metadata.Metadata, files: Mapping[str, FileChecksums]) -> Iterator[str]:
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


def _file_problems(places: Mapping[Any, Any], files: Mapping[str, FileChecksums]) -> Iterator[str]:
    """Files with bytes that belong to no part or to several, with odd names, or without checksums."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for place in places.values():
        spans.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length))
    names = {*spans, *files}
    if odd := [name for name in names if Path(name).name != name or not name.endswith(DATA_SUFFIX)]:
        yield f"these are not names of data files in the directory: {some(sorted(odd))}"
    elif unknown := [name for name in names if name not in files or not _is_complete(files[name])]:
        yield f"it has no valid checksums of {some(sorted(unknown))}"
    elif gaps := [name for name, parts in spans.items() if not _is_contiguous(parts, files[name])]:
        yield f"bytes of these files belong to no entry, or to several: {some(sorted(gaps))}"


def _is_contiguous(parts: Sequence[tuple[int, int]], known: FileChecksums) -> bool:
    ordered = sorted(parts)
    begin, end = len(known.label.encode()), known.size
    return all(one[1] == other[0] for one, other in pairwise([(0, begin), *ordered, (end, end)]))


def _is_complete(known: FileChecksums) -> bool:
    return (
        _is_count(known.size)
        and isinstance(known.label, str)
        and all(map(_is_count, known.blocks))
        and len(known.blocks) == -(-known.size // BLOCK)
    )


# The index of a checkpoint directory, read without trusting it: what is stored where, and the checksums.
#
# The file is a pickle of torch, JSON with the same content and the checksums of all data files, and a footer:
#
#     pickle | JSON | length of the JSON (8 bytes) | CRC-32 of everything before it (4 bytes) | PENSTOCK
#
# The pickle is for torch's own tools and is never read here.


_MAGIC = b"PENSTOCK"
_FOOTER = struct.Struct("<QI8s")
_SLACK = 1 << 20  # bytes that an index may have more than the data


class Index(NamedTuple):
    """The content of an index."""

    metadata: metadata.Metadata
    files: Mapping[str, FileChecksums]
    """By name."""
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
    """The index from the JSON behind torch's pickle."""
    if not content.endswith(_MAGIC):
        raise RankError(
            f"its index {INDEX_FILE} is damaged, or another program wrote the checkpoint: it does not end "
            "as save_checkpoint() ends it"
        )
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
            stored.storage_data[where] = stored_part(name, start, stored_bytes)
        stored.state_dict_metadata[key] = entry
    return Index(stored, files, checksum)


# Checks of the zip archive that torch writes for each tensor: it has the tensor that the index says.


class StoredTensor(NamedTuple):
    """A tensor in a data file."""

    key: str
    file: str
    offset: int
    length: int
    dtype: torch.dtype
    sizes: torch.Size


def archive_problems(directory: Path, tensors: Iterable[StoredTensor]) -> Iterator[str]:
    """What is wrong with the archives of these tensors."""
    for each in tensors:
        with (directory / each.file).open("rb") as file:
            view = _Part(file, each.offset, each.length)
            try:
                why = _difference(view, each)
            except Exception as error:  # noqa: BLE001 -- a damaged archive can raise anything
                why = f"{type(error).__name__}: {error}"
        if why:
            yield f"its file {each.file} is damaged: {each.key!r} cannot be read ({why})"


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


# The files of a checkpoint, written and read with torch.distributed.checkpoint, with checksums of all of them.
#
# Every entry is a tensor. All other data is one JSON text, stored as a tensor of bytes.


HEADER = "penstock"
"""The entry with the JSON text."""
Wanted: TypeAlias = Sequence[tuple[str, Tensor]]
"""Entries, and the tensors to read them into."""


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
        raise CheckpointError(ranks.failure, _failures(error)) from own
    gathered = ranks.run(lambda: writer.checksums)
    files = {name: known for each in gathered for name, known in each.items()}
    ranks.run_on_first(lambda: append_index(directory / INDEX_FILE, writer.index, files))


class StoredCheckpoint:
    """A checkpoint on disk, of which only the index is read; its files exist and match the index."""

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.directory, self._verify = directory, verify
        self._index = read_index(directory / INDEX_FILE)
        self.checksum = self._index.checksum
        stored = self._index.metadata
        self.entries = {
            key: entry
            for key, entry in stored.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        if problems := list(file_problems(directory, self._index.files)):
            raise RankError(*problems)

    def header(self) -> dict[str, Any]:
        """All data that is not a tensor."""
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
                        storage_reader=_Reader(self.directory, self._index.metadata),
                        planner=DefaultLoadPlanner(flatten_state_dict=False),
                        no_dist=True,  # each rank reads alone; `Collective` gathers the errors
                    )
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None
        if list(file_problems(self.directory, self._index.files)):
            raise RankError("it was replaced while it was read: load it again")

    def damage(self, wanted: Wanted, share: slice = slice(0)) -> list[str]:
        """The damaged parts of the files that `wanted` is read from, and of a share of all blocks."""
        if not self._verify:
            return []
        tensors = list(self._stored_tensors(wanted))
        files = self._index.files
        blocks = [Block(name, number) for name, known in files.items() for number in range(len(known.blocks))]
        mine = blocks[share]
        for each in tensors:
            last = max(each.offset, each.offset + each.length - 1)
            mine += [Block(each.file, number) for number in range(each.offset // BLOCK, last // BLOCK + 1)]
        damaged = list(damaged_blocks(self.directory, files, mine))
        return damaged or list(archive_problems(self.directory, tensors))

    def _stored_tensors(self, wanted: Wanted) -> Iterator[StoredTensor]:
        """What `read` reads."""
        stored = self._index.metadata
        for entries in _batches(wanted):
            for item in create_default_local_load_plan(entries, stored).items:
                where = item.storage_index
                place, entry = stored.storage_data[where], self.entries[where.fqn]
                yield StoredTensor(
                    where.fqn,
                    place.relative_path,
                    place.offset,
                    place.length,
                    entry.properties.dtype,
                    entry.chunks[where.index or 0].sizes,
                )


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


class _Writer(filesystem.FileSystemWriter):
    """Computes checksums, and stores no path of the machine that writes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _ChecksumFileSystem(self)
        self.streams: dict[str, ChecksumStream] = {}
        self.index = metadata.Metadata({})
        """What was written; complete on the first rank."""

    @property
    def checksums(self) -> dict[str, FileChecksums]:
        """Of the files of this rank."""
        return {name: stream.checksums for name, stream in self.streams.items()}

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
                self._writer.streams[path.name] = stream = ChecksumStream(file, label)
                try:
                    yield stream
                except RuntimeError as error:
                    raise stream.error or error from None
            else:
                yield file


class _Reader(filesystem.FileSystemReader):
    """Uses the checked index."""

    def __init__(self, directory: Path, index: metadata.Metadata) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._index


def _failures(error: CheckpointException) -> list[str]:
    failures = sorted(error.failures.items())
    return [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
