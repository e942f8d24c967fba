"""Weights as plain safetensors files, in the layout of the Hub: for other programs, and from them.

model.safetensors                        one file, or
model-00001-of-00004.safetensors ...     one for each rank that has stages of its own, and
model.safetensors.index.json             which file has which name
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.errors import MissingExtraError
from penstock.runtime.checkpoints.atomic_directory import synced
from penstock.runtime.checkpoints.collective import FoundError, Group, Together, some
from penstock.runtime.checkpoints.names import JobNames, RankNames, names_of_job
from penstock.runtime.dtensors import is_dtensor, whole
from penstock.runtime.pipeline import Pipeline

__all__ = ["export_safetensors", "import_safetensors"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_UNFINISHED = ".unfinished"


def export_safetensors(
    directory: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Write the model's weights; all ranks of `group` call it, all ranks of the world unless it is given.

    A tied weight is written once, under its first name. The files appear when all of them are complete, the
    index last. Other files in the directory stay; weights that are there already are not overwritten.
    """
    _safetensors()
    place = Path(directory)
    ranks = Together(group, f"the weights cannot be exported to {place}")
    mine, job = names_of_job(model, ranks)
    ranks.done_once(lambda: _begin(place))
    stages = ranks.done(lambda: {stage for stage, _ in mine.tensors})
    own = {stage for stage in stages[ranks.rank] if not any(stage in before for before in stages[: ranks.rank])}
    try:
        weights: list[dict[str, Tensor]] = []
        ranks.done(lambda: weights.append(_gathered(mine, job, own)))
        sizes = ranks.done(lambda: {name: tensor.nbytes for name, tensor in weights[0].items()})
        writers = [rank for rank, names in enumerate(sizes) if names] or [0]
        files = {rank: _file_name(number, len(writers)) for number, rank in enumerate(writers)}
        ranks.done(lambda: _write(place, files.get(ranks.rank), weights[0]))
        ranks.done_once(lambda: _commit(place, {files[rank]: sizes[rank] for rank in writers}))
    finally:
        if ranks.is_first:
            shutil.rmtree(place / _UNFINISHED, ignore_errors=True)


def import_safetensors(
    directory_or_file: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Read weights into the model; each rank reads its own, of a sharded parameter its own part.

    A name that is missing is read under a name it is tied to. Floating-point numbers take the model's type.
    Everything is checked first: what does not fit is raised on all ranks at once, and nothing is changed then.
    """
    _safetensors()
    place = Path(directory_or_file)
    ranks = Together(group, f"the weights of {place} cannot be imported")
    mine, job = names_of_job(model, ranks)
    with ExitStack() as opened:
        importing: list[_Importing] = []

        def checked() -> tuple[list[str], set[str]]:
            importing.append(_Importing(place, mine, job, opened))
            return importing[0].faults, importing[0].taken

        answers = ranks.tried(checked)
        known = [value for value in answers.values if value is not None]
        faults = [*answers.faults, *(fault for found, _ in known for fault in found)]
        if importing and len(known) == len(answers.values):
            taken = {name for _, names in known for name in names}
            if left := [name for name in importing[0].files if name not in taken]:
                faults.append(f"they have names that no rank's model has: {some(left)}")
        ranks.refuse(faults, answers.error)
        ranks.changed(importing[0].read)


# --- writing ---------------------------------------------------------------------------------------


def _begin(directory: Path) -> None:
    for name in (_WHOLE, _INDEX):
        if (directory / name).exists():
            raise FoundError(f"there are weights already ({name}): remove them, or choose another directory")
    unfinished = directory / _UNFINISHED
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _gathered(mine: RankNames, job: JobNames, own: Collection[int]) -> dict[str, Tensor]:
    """What this rank writes: the stages that it is the first to have. All ranks gather a DTensor together."""
    found: dict[str, Tensor] = {}
    for (stage, name), tensor in mine.tensors.items():
        if job.first(name) != name or job.first_stage[name] != stage:
            continue
        gathered = whole(tensor)
        if stage in own:
            alone = gathered.cpu().contiguous()
            shares = alone.untyped_storage().nbytes() != alone.nbytes  # with another, which no file can say
            found[name] = alone.clone() if shares else alone
    return found


def _file_name(number: int, count: int) -> str:
    return _WHOLE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write(directory: Path, file: str | None, weights: Mapping[str, Tensor]) -> None:
    if file is None:
        return
    path = directory / _UNFINISHED / file
    _safetensors().save_file(dict(weights), path, metadata={"format": "pt"})
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _commit(directory: Path, sizes: Mapping[str, Mapping[str, int]]) -> None:
    """The index comes last: without it, the files of a crash are no export."""
    unfinished = directory / _UNFINISHED
    if missing := [name for name in sizes if not (unfinished / name).is_file()]:
        raise FoundError(f"rank 0 does not see {some(missing)}: all ranks must write to the same file system")
    names = list(sizes)
    if len(sizes) > 1:
        total = sum(size for of_file in sizes.values() for size in of_file.values())
        where = {name: file for file, of_file in sizes.items() for name in of_file}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        with (unfinished / _INDEX).open("w", encoding="utf-8") as written:
            json.dump(index, written, indent=2)
            written.flush()
            os.fsync(written.fileno())
        names.append(_INDEX)
    for name in names:
        (unfinished / name).rename(directory / name)
    synced(directory)


# --- reading ---------------------------------------------------------------------------------------


class _Importing:
    """What this rank reads, checked against what it has."""

    def __init__(self, place: Path, mine: RankNames, job: JobNames, opened: ExitStack) -> None:
        self.faults: list[str] = []
        self.taken: set[str] = set()
        self._opened: dict[Path, Any] = {}
        self._until = opened
        self.files = self._files_of_names(place)
        self._wanted: list[tuple[str, Tensor]] = []
        missing = []
        for (_, name), tensor in mine.tensors.items():
            source = job.source(name, self.files)
            if source is None:
                missing.append(name)
            else:
                self.taken.update(each for each in (name, *job.ties.get(name, ())) if each in self.files)
                self._check(name, source, tensor.detach())
        if missing:
            self.faults.append(f"the model has names that are missing in them: {some(missing)}")

    def read(self) -> None:
        """Change the model."""
        for source, tensor in self._wanted:
            file = self._file(self.files[source])
            if not is_dtensor(tensor):
                tensor.copy_(file.get_tensor(source))
            elif (mine := tensor.to_local()).numel():
                part = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
                which = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes))
                mine.copy_(file.get_slice(source)[which] if which else file.get_tensor(source))

    def _check(self, name: str, source: str, tensor: Tensor) -> None:
        file = self.files[source]
        try:
            about = self._file(file).get_slice(source)
        except _safetensors().SafetensorError as error:
            self.faults.append(f"{source!r} cannot be read from {file.name}: {error}")
            return
        shape, kind = list(about.get_shape()), about.get_dtype()
        is_floating = kind.startswith(("F", "BF"))
        if shape != list(tensor.shape) or is_floating != tensor.is_floating_point():
            here = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            self.faults.append(f"{name!r} is {kind} {shape} in {file.name}, but {here} in the model")
        self._wanted.append((source, tensor))

    def _file(self, path: Path) -> Any:
        if path not in self._opened:
            self._opened[path] = self._until.enter_context(_safetensors().safe_open(path, framework="pt"))
        return self._opened[path]

    def _files_of_names(self, place: Path) -> dict[str, Path]:
        """Which file has which name."""
        if place.is_dir():
            if not (place / _WHOLE).is_file() and (place / _INDEX).is_file():
                return _indexed(place)
            place /= _WHOLE
        if not place.is_file():
            raise FoundError(f"{place} does not exist" + (f", nor {_INDEX}" if place.name == _WHOLE else ""))
        return dict.fromkeys(self._file(place).keys(), place)


def _indexed(directory: Path) -> dict[str, Path]:
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in index.items()}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FoundError(f"{_INDEX} is no index: {type(error).__name__}: {error}") from error
    strange = sorted({file for file in files.values() if Path(file).name != file})
    missing = sorted(
        {file for file in files.values() if file not in strange and not (directory / file).is_file()}
    )
    faults = [f"{_INDEX} names files of other directories: {some(strange)}"] if strange else []
    if missing:
        faults.append(f"{_INDEX} names files that are missing: {some(missing)}")
    if faults:
        raise FoundError(*faults)
    return {name: directory / file for name, file in files.items()}


class _Package:
    """What is used of the package."""

    def __init__(self) -> None:
        import safetensors  # noqa: PLC0415 -- an extra
        from safetensors import torch as files  # noqa: PLC0415

        self.safe_open: Any = safetensors.safe_open
        self.SafetensorError: type[Exception] = safetensors.SafetensorError
        self.save_file: Any = files.save_file


def _safetensors() -> _Package:
    try:
        return _Package()
    except ImportError:
        raise MissingExtraError(
            "safetensors files are written and read by the package safetensors, which is not installed: "
            "pip install 'penstock[torch]'"
        ) from None
