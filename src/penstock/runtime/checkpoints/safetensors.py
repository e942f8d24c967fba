"""Weights as safetensors files in the layout of the Hub: export and import.

model.safetensors                        one file, or
model-00001-of-00004.safetensors ...     one for each rank that has its own stages, and
model.safetensors.index.json             the file of each name
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.arguments import install_command
from penstock.errors import MissingExtraError
from penstock.formats.files import write_text
from penstock.runtime.checkpoints.atomic_directory import fsync_directory
from penstock.runtime.checkpoints.collective import Collective, RankError, some
from penstock.runtime.checkpoints.names import ModelNames, describe, names_of_model, unused_problems
from penstock.runtime.dtensors import is_dtensor, whole
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.torch_internals.distributed import local_slices
from penstock.runtime.transport.process_groups import Group

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_UNFINISHED = ".unfinished"
_LARGEST_INDEX = 100_000_000
"""Bytes; the limit of safetensors for the header of a file."""


def _load_package() -> Any:
    """Import the optional package, or raise an error that names it."""
    try:
        import safetensors.torch  # noqa: PLC0415 -- an extra
    except ImportError:
        raise MissingExtraError(
            "safetensors files need the package safetensors, which is not installed: "
            + install_command("torch")
        ) from None
    return safetensors


def export_safetensors(
    directory: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Write the model's weights; all ranks of `group` call this, by default all ranks of the world.

    A tied weight is written once, under its first name. The files appear when all of them are complete, the
    index last. Other files in the directory stay; existing weights are not overwritten.
    """
    _load_package()
    target = Path(directory)
    ranks = Collective(group, f"the weights cannot be exported to {target}")
    model_names = names_of_model(model, ranks)
    ranks.run_on_first(lambda: _begin(target))
    stages = ranks.run(lambda: {stage for stage, _ in model_names.tensors})
    own = {stage for stage in stages[ranks.rank] if not any(stage in before for before in stages[: ranks.rank])}
    try:
        weights: list[dict[str, Tensor]] = []
        ranks.run(lambda: weights.append(_gather_weights(model_names, own)))
        sizes = ranks.run(lambda: {name: tensor.nbytes for name, tensor in weights[0].items()})
        writers = [rank for rank, names in enumerate(sizes) if names] or [0]
        names = [f"model-{number:05}-of-{len(writers):05}.safetensors" for number in range(1, len(writers) + 1)]
        files = dict(zip(writers, names if len(writers) > 1 else [SINGLE_FILE]))
        ranks.run(lambda: _write(target, files.get(ranks.rank), weights[0]))
        ranks.run_on_first(lambda: _commit(target, {files[rank]: sizes[rank] for rank in writers}))
    finally:
        if ranks.is_first:
            shutil.rmtree(target / _UNFINISHED, ignore_errors=True)


def _begin(directory: Path) -> None:
    for name in (SINGLE_FILE, INDEX_FILE):
        if (directory / name).exists():
            raise RankError(
                f"the directory already has weights ({name}): remove them, or use another directory"
            )
    unfinished = directory / _UNFINISHED
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _gather_weights(model: ModelNames, own: Collection[int]) -> dict[str, Tensor]:
    """Return the weights of the stages that this rank writes; gathering a DTensor is a collective."""
    weights: dict[str, Tensor] = {}
    for (stage, name), tensor in model.tensors.items():
        if not model.is_first((stage, name)):
            continue
        gathered = whole(tensor)
        if stage in own:
            contiguous = gathered.cpu().contiguous()
            shares_storage = contiguous.untyped_storage().nbytes() != contiguous.nbytes
            weights[name] = contiguous.clone() if shares_storage else contiguous  # a file has no shared storage
    return weights


def _write(directory: Path, file: str | None, weights: Mapping[str, Tensor]) -> None:
    if file is None:
        return
    path = directory / _UNFINISHED / file
    _load_package().torch.save_file(dict(weights), path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _commit(directory: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """Move the files into place, the index last: without it, files that a crash left are not an export."""
    unfinished = directory / _UNFINISHED
    if missing := [name for name in sizes if not (unfinished / name).is_file()]:
        raise RankError(f"rank 0 does not see {some(missing)}: all ranks must write to the same file system")
    names = list(sizes)
    if len(sizes) > 1:
        total = sum(size for file_sizes in sizes.values() for size in file_sizes.values())
        file_of = {name: file for file, file_sizes in sizes.items() for name in file_sizes}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        write_text(json.dumps(index, indent=2), unfinished / INDEX_FILE)
        names.append(INDEX_FILE)
    for name in names:
        (unfinished / name).rename(directory / name)
    fsync_directory(directory)


def import_safetensors(
    directory_or_file: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Read weights into the model; each rank reads its own, for a sharded parameter its own shard.

    A missing name is read under another name of its tied weight. Floating-point values are cast to the model's
    dtype. Everything is checked first: all ranks raise all problems at once, and then nothing is changed.
    """
    _load_package()
    source = Path(directory_or_file)
    ranks = Collective(group, f"the weights of {source} cannot be imported")
    names = names_of_model(model, ranks)
    ranks.run_change(lambda: _WeightImport(source, names))


class _WeightImport:
    """What this rank reads, checked against its model."""

    def __init__(self, source: Path, model: ModelNames) -> None:
        self.problems: list[str] = []
        self._opened: dict[Path, Any] = {}
        self._file_of = self._files_by_name(source)
        self._wanted: list[tuple[str, Tensor]] = []
        found, self.used, missing = model.match(self._file_of)
        for name, stored_name, tensor in found:
            self._want(name, stored_name, tensor.detach())
        if missing:
            self.problems.append(f"the model has names that are missing in the files: {some(missing)}")

    def unused(self, used: Sequence[set[str]]) -> list[str]:
        """Return the problem of names that no rank reads."""
        return unused_problems("the files have names that no rank's model has", self._file_of, used)

    def apply(self) -> None:
        """Read the weights into the model."""
        for name, tensor in self._wanted:
            file = self._file(self._file_of[name])
            if not is_dtensor(tensor):
                tensor.copy_(file.get_tensor(name))
            elif (shard := tensor.to_local()).numel():
                slices = local_slices(tensor)
                shard.copy_(file.get_slice(name)[slices] if slices else file.get_tensor(name))

    def _want(self, name: str, stored_name: str, tensor: Tensor) -> None:
        file = self._file_of[stored_name]
        try:
            stored = self._file(file).get_slice(stored_name)
            shape = list(stored.get_shape())
            dtype = (stored[:0] if shape else self._file(file).get_tensor(stored_name)).dtype
        except _load_package().SafetensorError as error:
            self.problems.append(f"{stored_name!r} cannot be read from {file.name}: {error}")
            return
        is_cast = dtype.is_floating_point and tensor.is_floating_point()
        if shape != list(tensor.shape) or not (is_cast or dtype == tensor.dtype):
            found, own = f"{stored.get_dtype()} {shape}", describe(tensor.shape, tensor.dtype)
            self.problems.append(f"{name!r} is {found} in {file.name}, but {own} in the model")
        self._wanted.append((stored_name, tensor))

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            try:
                self._opened[path] = _load_package().safe_open(path, framework="pt")
            except (_load_package().SafetensorError, OSError) as error:
                raise RankError(f"{path.name} cannot be read: {error}") from error
        return self._opened[path]

    def _files_by_name(self, source: Path) -> dict[str, Path]:
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
    names = sorted(set(files.values()))
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if name not in outside and not (directory / name).is_file()]
    wrong = {"in other directories": outside, "that are missing": missing}
    if problems := [f"{INDEX_FILE} names files {why}: {some(found)}" for why, found in wrong.items() if found]:
        raise RankError(*problems)
    return {name: directory / file for name, file in files.items()}
