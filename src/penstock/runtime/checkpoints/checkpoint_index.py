"""The index of a checkpoint directory, read without trusting it.

The index is a pickle. Only the few classes that a valid index contains are allowed; no other is even imported.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from penstock.runtime.checkpoints.collective import RankError, some

__all__ = ["read_index"]

_CLASSES = {
    (each.__module__, each.__qualname__): each
    for each in (
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001 -- a part of every index
        filesystem._StorageInfo,  # noqa: SLF001
    )
} | {("torch", "Size"): torch.Size}


class _Unpickler(pickle.Unpickler):
    """Allows only the classes of a valid index."""

    def find_class(self, module: str, name: str) -> Any:
        if known := _CLASSES.get((module, name)):
            return known
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise RankError(
            f"its index refers to {module}.{name}, which is not allowed there. The index is damaged, or made "
            "to run code when it is loaded; nothing was run"
        )


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise RankError(f"its index has a tensor of layout {name!r}; only dense tensors are stored")
    return torch.strided


def read_index(file: Path) -> metadata.Metadata:
    """Read and check the index."""
    try:
        with file.open("rb") as opened:
            index = _Unpickler(opened).load()
        problems = list(_problems(index))
    except (RankError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 -- a damaged pickle can raise anything
        problems = [f"its index {file.name} is damaged ({type(error).__name__}: {error})"]
    if problems:
        raise RankError(*problems)
    assert isinstance(index, metadata.Metadata)
    return index


def _problems(index: Any) -> Iterator[str]:
    """What is wrong with an index of the right classes."""
    entries, locations = index.state_dict_metadata, index.storage_data
    other = [key for key, entry in entries.items() if not isinstance(entry, metadata.TensorStorageMetadata)]
    if other:
        yield f"these entries are not tensors: {some(other)}"
        return
    incomplete = [
        key
        for key, entry in entries.items()
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    ]
    if incomplete:
        yield f"parts of these entries are missing: {some(incomplete)}"
    outside = {
        where.relative_path
        for where in locations.values()
        if Path(where.relative_path).name != where.relative_path
    }
    if outside:
        yield f"its data would be in other directories: {some(sorted(outside))}"
    if any(where.transform_descriptors for where in locations.values()):
        yield "its data is compressed, but save_checkpoint() does not compress"
