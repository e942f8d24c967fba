"""The files of a checkpoint, written and read with torch.distributed.checkpoint, with checksums of all of them.

Every entry is a tensor. All other data is one JSON text, stored as a tensor of bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

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
from penstock.runtime.checkpoints.archive_checks import StoredTensor, archive_problems
from penstock.runtime.checkpoints.atomic_directory import DATA_SUFFIX, INDEX_FILE
from penstock.runtime.checkpoints.checkpoint_index import append_index, read_index
from penstock.runtime.checkpoints.checksums import (
    BLOCK,
    Block,
    ChecksumStream,
    FileChecksums,
    damaged_blocks,
    file_problems,
)
from penstock.runtime.checkpoints.collective import Collective, RankError

__all__ = ["HEADER", "StoredCheckpoint", "Wanted", "write"]

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
    """A checkpoint on disk, of which only the index is read; its files exist and are those of the index."""

    def __init__(self, directory: Path, *, verify: bool = True) -> None:
        self.directory, self._verify = directory, verify
        self._index = read_index(directory / INDEX_FILE)
        self.checksum = self._index.checksum
        self.has_checksums = self._index.files is not None
        stored = self._index.metadata
        self.entries = {
            key: entry
            for key, entry in stored.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }
        files = self._index.files
        if files is None:  # format 1
            sizes: dict[str, int] = {}
            for place in stored.storage_data.values():
                sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
            files = {name: FileChecksums(size, "", []) for name, size in sizes.items()}
        self._files = files
        if problems := list(file_problems(directory, files)):
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
        if list(file_problems(self.directory, self._files)):
            raise RankError("it was replaced while it was read: load it again")

    def damage(self, wanted: Wanted, share: slice = slice(0)) -> list[str]:
        """The damaged parts of the files that `wanted` is read from, and of a share of all blocks."""
        if not self._verify:
            return []
        tensors = list(self._stored_tensors(wanted))
        files = self._index.files
        if files is None:
            return list(archive_problems(self.directory, tensors, crc=True))
        blocks = [Block(name, number) for name, known in files.items() for number in range(len(known.blocks))]
        mine = blocks[share]
        for each in tensors:
            last = max(each.offset, each.offset + each.length - 1)
            mine += [Block(each.file, number) for number in range(each.offset // BLOCK, last // BLOCK + 1)]
        damaged = list(damaged_blocks(self.directory, files, mine))
        return damaged or list(archive_problems(self.directory, tensors, crc=False))

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
