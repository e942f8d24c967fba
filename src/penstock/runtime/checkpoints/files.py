"""The files of a checkpoint, written and read with torch.distributed.checkpoint.

Every entry is a tensor. All other data is one JSON text, stored as a tensor of bytes.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.atomic_directory import INDEX_FILE
from penstock.runtime.checkpoints.checkpoint_index import read_index
from penstock.runtime.checkpoints.collective import Collective, RankError

__all__ = ["HEADER", "StoredCheckpoint", "write"]

HEADER = "penstock"
"""The entry with the JSON text."""


def write(directory: Path, entries: Mapping[str, Tensor], header: object, ranks: Collective) -> None:
    """Write the entries of all ranks, each once; the first rank writes the header."""
    tensors = dict(entries)
    if ranks.is_first:
        tensors[HEADER] = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    try:
        with _quiet():
            save(
                tensors,
                storage_writer=_Writer(directory),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.is_single,
            )
    except CheckpointException as error:
        own, _ = error.failures.get(ranks.rank, (None, None))
        if own is not None and not isinstance(own, Exception):  # such as KeyboardInterrupt
            raise own from None
        raise CheckpointError(ranks.failure, _failures(error)) from own
    except RuntimeError as error:
        raise ranks.connection_lost(error) from error


class StoredCheckpoint:
    """A checkpoint on disk, of which only the index is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._index = read_index(directory / INDEX_FILE)
        self.entries = {
            key: entry
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }

    def header(self) -> Any:
        """All data that is not a tensor."""
        entry = self.entries.get(HEADER)
        if entry is None or entry.properties.dtype != torch.uint8 or len(entry.size) != 1:
            raise RankError("it was not written by save_checkpoint(): it has no header")
        if problems := self.missing_data([HEADER]):
            raise RankError(*problems)
        text = torch.empty(entry.size, dtype=torch.uint8)
        self.read({HEADER: text})
        return json.loads(text.numpy().tobytes())

    def read(self, entries: dict[str, Tensor]) -> None:
        """Fill tensors in place, DTensors with the shard of this rank."""
        try:
            with _quiet():
                load(
                    entries,
                    storage_reader=_Reader(self.directory, self._index),
                    planner=DefaultLoadPlanner(flatten_state_dict=False),
                    no_dist=True,  # each rank reads alone; `Collective` gathers the errors
                )
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None

    def missing_data(self, keys: Collection[str]) -> list[str]:
        """The files of these entries that are missing or too short."""
        wanted = set(keys)
        ends: dict[str, int] = {}
        for index, where in self._index.storage_data.items():
            if index.fqn in wanted:
                ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
        problems = []
        for name, end in ends.items():
            file = self.directory / name
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                problems.append(f"its file {name} is missing; every rank must see the same file system")
            elif size < end:
                problems.append(f"its file {name} is truncated: it has {size} bytes instead of {end} or more")
        return problems


class _Writer(filesystem.FileSystemWriter):
    """Stores no path of the machine that writes."""

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta(save_id=self.save_id)


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
