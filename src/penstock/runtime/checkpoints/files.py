"""The files of a checkpoint, written and read by torch.distributed.checkpoint, without trusting what they hold.

Its index is a pickle: only the few classes that an index is made of are let in, and no other is even imported.
Everything else is a tensor. What is no tensor is a JSON text, kept as a tensor of bytes.
"""

from __future__ import annotations

import json
import math
import pickle
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
from penstock.runtime.checkpoints.atomic_directory import MARK
from penstock.runtime.checkpoints.collective import FoundError, Together, some

__all__ = ["ABOUT", "Stored", "write"]

ABOUT = "penstock"
"""The entry with the JSON text."""

_CLASSES = {
    (each.__module__, each.__qualname__): each
    for each in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 -- what an index is made of
        filesystem._StorageInfo,  # noqa: SLF001
    )
} | {("torch", "Size"): torch.Size}


def write(directory: Path, entries: Mapping[str, Tensor], about: object, ranks: Together) -> None:
    """Write what all ranks have, each entry once; `about` is the first rank's to give."""
    given = dict(entries)
    if ranks.is_first:
        given[ABOUT] = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
    try:
        with _quiet():
            save(
                given,
                storage_writer=_Writer(directory),
                planner=DefaultSavePlanner(flatten_state_dict=False),
                process_group=ranks.group,
                no_dist=ranks.alone,
            )
    except CheckpointException as error:
        mine, _ = error.failures.get(ranks.rank, (None, None))
        if mine is not None and not isinstance(mine, Exception):  # Ctrl-C is no fault
            raise mine from None
        raise CheckpointError(ranks.doing, _failures(error)) from mine
    except RuntimeError as error:
        raise ranks.lost(error) from error


class Stored:
    """A checkpoint that can be read: its entries' shapes and types are known, their data is still on disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._index = _read_index(directory / MARK)
        self.entries = {
            key: entry
            for key, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, metadata.TensorStorageMetadata)
        }

    def about(self) -> Any:
        """What is no tensor."""
        entry = self.entries.get(ABOUT)
        if entry is None or entry.properties.dtype != torch.uint8 or len(entry.size) != 1:
            raise FoundError("it was not written by save_checkpoint(): it does not say how")
        if faults := self.missing_data([ABOUT]):
            raise FoundError(*faults)
        text = torch.empty(entry.size, dtype=torch.uint8)
        self.read({ABOUT: text})
        return json.loads(text.numpy().tobytes())

    def read(self, entries: dict[str, Tensor]) -> None:
        """Fill tensors in place, DTensors with the part that this rank has."""
        try:
            with _quiet():
                load(
                    entries,
                    storage_reader=_Reader(self.directory, self._index),
                    planner=DefaultLoadPlanner(flatten_state_dict=False),
                    no_dist=True,  # ranks read for themselves; they tell each other how it went
                )
        except CheckpointException as error:
            first, _ = next(iter(error.failures.values()))
            raise first from None

    def missing_data(self, keys: Collection[str]) -> list[str]:
        """What is not there of these entries' bytes."""
        wanted = set(keys)
        ends: dict[str, int] = {}
        for index, where in self._index.storage_data.items():
            if index.fqn in wanted:
                ends[where.relative_path] = max(ends.get(where.relative_path, 0), where.offset + where.length)
        faults = []
        for name, end in ends.items():
            file = self.directory / name
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                faults.append(f"its file {name} is missing; every rank must see the same file system")
            elif size < end:
                faults.append(f"its file {name} is cut off: it has {size} bytes of {end} or more")
        return faults


class _Writer(filesystem.FileSystemWriter):
    """Tells nothing of the place where it writes."""

    def storage_meta(self) -> metadata.StorageMeta:
        return metadata.StorageMeta(save_id=self.save_id)


class _Reader(filesystem.FileSystemReader):
    """Takes the index that was checked."""

    def __init__(self, directory: Path, index: metadata.Metadata) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        return self._index


class _Unpickler(pickle.Unpickler):
    """Knows what an index is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if known := _CLASSES.get((module, name)):
            return known
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise FoundError(
            f"its index refers to {module}.{name}, which has no place there. It is damaged, or made to run "
            "code when it is loaded; nothing was run"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise FoundError(f"its index has a tensor of layout {name!r}; only dense ones are stored")
    return torch.strided


def _read_index(file: Path) -> metadata.Metadata:
    try:
        with file.open("rb") as opened:
            index = _Unpickler(opened).load()
        faults = list(_index_faults(index))
    except (FoundError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 -- a damaged pickle fails in any way
        faults = [f"its index {file.name} is damaged ({type(error).__name__}: {error})"]
    if faults:
        raise FoundError(*faults)
    assert isinstance(index, metadata.Metadata)
    return index


def _index_faults(index: Any) -> Iterator[str]:
    """An index may be made of the right classes and still be wrong."""
    entries, places = index.state_dict_metadata, index.storage_data
    odd = [key for key, entry in entries.items() if not isinstance(entry, metadata.TensorStorageMetadata)]
    if odd:
        yield f"these entries are no tensors: {some(odd)}"
        return
    holes = [
        key
        for key, entry in entries.items()
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    ]
    if holes:
        yield f"parts of these entries are missing: {some(holes)}"
    strange = {
        where.relative_path
        for where in places.values()
        if Path(where.relative_path).name != where.relative_path
    }
    if strange:
        yield f"its data would be in other directories: {some(sorted(strange))}"
    if any(where.transform_descriptors for where in places.values()):
        yield "its data is compressed, which save_checkpoint() never does"


def _failures(error: CheckpointException) -> list[str]:
    failures = sorted(error.failures.items())
    return [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in failures]


@contextmanager
def _quiet() -> Iterator[None]:
    """One process is no reason for a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
