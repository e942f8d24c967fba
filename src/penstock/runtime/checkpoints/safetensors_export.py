"""Export of a model's weights to safetensors files in the layout of the Hub, for other programs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from penstock.runtime.checkpoints.atomic_directory import fsync_directory
from penstock.runtime.checkpoints.collective import Collective, Group, RankError, some
from penstock.runtime.checkpoints.names import JobNames, RankNames, names_of_job
from penstock.runtime.checkpoints.safetensors_package import INDEX_FILE, SINGLE_FILE, load_safetensors
from penstock.runtime.dtensors import whole
from penstock.runtime.pipeline import Pipeline

__all__ = ["export_safetensors"]

_UNFINISHED = ".unfinished"


def export_safetensors(
    directory: str | os.PathLike[str], model: Pipeline | nn.Module, group: Group = None
) -> None:
    """Write the model's weights; all ranks of `group` call this, by default all ranks of the world.

    A tied weight is written once, under its first name. The files appear when all of them are complete, the
    index last. Other files in the directory stay; existing weights are not overwritten.
    """
    load_safetensors()
    target = Path(directory)
    ranks = Collective(group, f"the weights cannot be exported to {target}")
    mine, job = names_of_job(model, ranks)
    ranks.run_on_first(lambda: _begin(target))
    stages = ranks.run(lambda: {stage for stage, _ in mine.tensors})
    own = {stage for stage in stages[ranks.rank] if not any(stage in before for before in stages[: ranks.rank])}
    try:
        weights: list[dict[str, Tensor]] = []
        ranks.run(lambda: weights.append(_gather_weights(mine, job, own)))
        sizes = ranks.run(lambda: {name: tensor.nbytes for name, tensor in weights[0].items()})
        writers = [rank for rank, names in enumerate(sizes) if names] or [0]
        files = {rank: _file_name(number, len(writers)) for number, rank in enumerate(writers)}
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


def _gather_weights(mine: RankNames, job: JobNames, own: Collection[int]) -> dict[str, Tensor]:
    """The weights of the stages in `own`, which this rank writes; gathering a DTensor is a collective."""
    weights: dict[str, Tensor] = {}
    for (stage, name), tensor in mine.tensors.items():
        if job.first(name) != name or job.first_stage[name] != stage:
            continue
        gathered = whole(tensor)
        if stage in own:
            contiguous = gathered.cpu().contiguous()
            shares_storage = contiguous.untyped_storage().nbytes() != contiguous.nbytes
            weights[name] = contiguous.clone() if shares_storage else contiguous  # a file has no shared storage
    return weights


def _file_name(number: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05}-of-{count:05}.safetensors"


def _write(directory: Path, file: str | None, weights: Mapping[str, Tensor]) -> None:
    if file is None:
        return
    path = directory / _UNFINISHED / file
    load_safetensors().save_file(dict(weights), path, metadata={"format": "pt"})
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
        with (unfinished / INDEX_FILE).open("w", encoding="utf-8") as written:
            json.dump(index, written, indent=2)
            written.flush()
            os.fsync(written.fileno())
        names.append(INDEX_FILE)
    for name in names:
        (unfinished / name).rename(directory / name)
    fsync_directory(directory)
