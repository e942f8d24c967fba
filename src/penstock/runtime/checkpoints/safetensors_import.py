"""Import of a model's weights from safetensors files in the layout of the Hub."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.runtime.checkpoints.collective import Collective, Group, RankError, some
from penstock.runtime.checkpoints.names import JobNames, RankNames, describe, names_of_job
from penstock.runtime.checkpoints.safetensors_package import INDEX_FILE, SINGLE_FILE, load_safetensors
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.pipeline import Pipeline

__all__ = ["import_safetensors"]

_LARGEST_INDEX = 100_000_000
"""Bytes; the limit of safetensors for the header of a file."""
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "U8": torch.uint8,
}
"""By the name in a file; files with others are rejected."""


def import_safetensors(
    directory_or_file: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Read weights into the model; each rank reads its own, for a sharded parameter its own shard.

    A missing name is read under another name of its tied weight. Floating-point values are cast to the model's
    dtype. Everything is checked first: all ranks raise all problems at once, and then nothing is changed.
    """
    load_safetensors()
    source = Path(directory_or_file)
    ranks = Collective(group, f"the weights of {source} cannot be imported")
    mine, job = names_of_job(model, ranks)
    with ExitStack() as open_files:
        ranks.run_change(lambda: _WeightImport(source, mine, job, open_files))


class _WeightImport:
    """What this rank reads, checked against its model."""

    def __init__(self, source: Path, mine: RankNames, job: JobNames, open_files: ExitStack) -> None:
        self.problems: list[str] = []
        self.used: set[str] = set()
        """The names in the files that this rank uses."""
        self._opened: dict[Path, Any] = {}
        self._open_files = open_files
        self._file_of = self._files_by_name(source)
        self._wanted: list[tuple[str, Tensor]] = []
        missing = []
        for (_, name), tensor in mine.tensors.items():
            stored_name = job.source(name, self._file_of)
            if stored_name is None:
                missing.append(name)
            else:
                self.used.update(each for each in (name, *job.ties.get(name, ())) if each in self._file_of)
                self._want(name, stored_name, tensor.detach())
        if missing:
            self.problems.append(f"the model has names that are missing in the files: {some(missing)}")

    def unused(self, used: Sequence[set[str]]) -> list[str]:
        """The names that no rank reads."""
        left = [name for name in self._file_of if not any(name in each for each in used)]
        return [f"the files have names that no rank's model has: {some(left)}"] if left else []

    def apply(self) -> None:
        """Read the weights into the model."""
        for name, tensor in self._wanted:
            file = self._file(self._file_of[name])
            if not is_dtensor(tensor):
                tensor.copy_(file.get_tensor(name))
            elif (shard := tensor.to_local()).numel():
                part = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
                slices = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes))
                shard.copy_(file.get_slice(name)[slices] if slices else file.get_tensor(name))

    def _want(self, name: str, stored_name: str, tensor: Tensor) -> None:
        file = self._file_of[stored_name]
        try:
            stored = self._file(file).get_slice(stored_name)
        except load_safetensors().SafetensorError as error:
            self.problems.append(f"{stored_name!r} cannot be read from {file.name}: {error}")
            return
        shape, dtype = list(stored.get_shape()), stored.get_dtype()
        known = _DTYPES.get(dtype)
        is_cast = known is not None and known.is_floating_point and tensor.is_floating_point()
        if shape != list(tensor.shape) or not (is_cast or known == tensor.dtype):
            own = describe(tensor.shape, tensor.dtype)
            self.problems.append(f"{name!r} is {dtype} {shape} in {file.name}, but {own} in the model")
        self._wanted.append((stored_name, tensor))

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                opened = load_safetensors().safe_open(path, framework="pt")
            except (load_safetensors().SafetensorError, OSError) as error:
                raise RankError(f"{path.name} cannot be read: {error}") from error
            self._opened[path] = self._open_files.enter_context(opened)
        return self._opened[path]

    def _files_by_name(self, source: Path) -> dict[str, Path]:
        """The file of each name."""
        if source.is_dir():
            if not (source / SINGLE_FILE).is_file() and (source / INDEX_FILE).is_file():
                return _read_index(source)
            source /= SINGLE_FILE
        if not source.is_file():
            no_index = f", nor {INDEX_FILE}" if source.name == SINGLE_FILE else ""
            raise RankError(f"{source} does not exist{no_index}")
        return dict.fromkeys(self._file(source).keys(), source)


def _read_index(directory: Path) -> dict[str, Path]:
    if (size := (directory / INDEX_FILE).stat().st_size) > _LARGEST_INDEX:
        raise RankError(f"{INDEX_FILE} is not a valid index: it has {size} bytes")
    try:
        index = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in index.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RankError(f"{INDEX_FILE} is not a valid index: {type(error).__name__}: {error}") from error
    outside = sorted({file for file in files.values() if Path(file).name != file})
    missing = sorted(
        {file for file in files.values() if file not in outside and not (directory / file).is_file()}
    )
    problems = [f"{INDEX_FILE} names files in other directories: {some(outside)}"] if outside else []
    if missing:
        problems.append(f"{INDEX_FILE} names files that are missing: {some(missing)}")
    if problems:
        raise RankError(*problems)
    return {name: directory / file for name, file in files.items()}
