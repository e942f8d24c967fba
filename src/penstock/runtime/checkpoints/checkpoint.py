"""Checkpoints that fit any layout: saved on some number of ranks, loaded on any other.

    save_checkpoint("step-100", pipeline, optimizer, extra={"step": 100})
    extra = load_checkpoint("step-100", pipeline, optimizer)

Everything is stored under the names of the whole model, through torch.distributed.checkpoint:

    model.<name>              parameters and persistent buffers
    optimizer.<name>.<key>    the tensors of a parameter's state
    penstock                  all else, as JSON: version, ties, options of the optimizer, `extra`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.runtime.checkpoints.atomic_directory import Replacing
from penstock.runtime.checkpoints.collective import FoundError, Group, Together, some
from penstock.runtime.checkpoints.names import JobNames, RankNames, names_of_job, told_as
from penstock.runtime.checkpoints.optimizer_states import Restoring, disagreement, joined, state_of
from penstock.runtime.checkpoints.plain_values import from_json, to_json
from penstock.runtime.pipeline import Pipeline

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import Stored

__all__ = ["load_checkpoint", "save_checkpoint"]

FORMAT = 1
"""The version of what is written; a reader takes its own and older ones."""

_MODEL = "model."


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    group: Group = None,
) -> None:
    """Write the directory `path`; all ranks of `group` call it, all ranks of the world unless it is given.

    `extra` is any plain value: numbers, texts, lists, tuples and mappings; that of the first rank is stored. A
    checkpoint that is there already is replaced when the new one is complete, and not before. If saving fails
    on any rank, all ranks raise a `CheckpointError`.
    """
    from penstock.runtime.checkpoints.files import Stored, write  # noqa: PLC0415 -- slow to load

    directory = Replacing(path)
    ranks = Together(group, f"the checkpoint {directory.path} cannot be saved")
    mine, job = names_of_job(model, ranks)
    entries: dict[str, Tensor] = {}

    def told() -> tuple[Any, Any]:
        for (stage, name), tensor in mine.tensors.items():
            if job.first_stage[name] == stage:
                entries[_MODEL + name] = tensor.detach()
        state = state_of(optimizer, mine, job)
        entries.update(state.entries)
        return state.about, to_json(extra, "extra") if ranks.is_first else None

    parts = ranks.done(told)
    ties = list(dict.fromkeys(job.ties.values()))
    of_optimizers = [part for part, _ in parts if part is not None]
    ranks.refuse(disagreement(of_optimizers))
    about = {"format": FORMAT, "ties": ties, "optimizer": joined(of_optimizers), "extra": parts[0][1]}
    ranks.done_once(directory.begin)
    try:
        write(directory.unfinished, entries, about, ranks)
        ranks.done_once(lambda: _prove(Stored(directory.unfinished)))
    except BaseException:
        if ranks.is_first:
            directory.drop()
        raise
    ranks.done_once(directory.commit)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    group: Group = None,
) -> Any:
    """Read the directory `path` into the model and the optimizer, and give back `extra`.

    All ranks of `group` call it, all ranks of the world unless it is given. The layout may be another than
    the one that was saved. Everything is checked first: what does not fit is raised on all ranks at once as a
    `CheckpointError`, and nothing is changed then.
    """
    from penstock.runtime.checkpoints.files import Stored  # noqa: PLC0415 -- slow to load

    directory = Replacing(path)
    ranks = Together(group, f"the checkpoint {directory.path} cannot be loaded")
    mine, job = names_of_job(model, ranks)
    loading: list[_Loading] = []

    def checked() -> tuple[list[str], set[str], set[str], bool]:
        loading.append(_Loading(Stored(directory.readable()), mine, job, optimizer))
        each = loading[0]
        return each.faults, each.taken, each.taken_by_optimizer, optimizer is not None

    answers = ranks.tried(checked)
    known = [value for value in answers.values if value is not None]
    faults = [*answers.faults, *(fault for found, *_ in known for fault in found)]
    if loading and len(known) == len(answers.values):
        taken = {name for _, names, _, _ in known for name in names}
        by_optimizer = {name for _, _, names, _ in known for name in names}
        faults += loading[0].left_over(taken, by_optimizer if any(has for *_, has in known) else None)
    ranks.refuse(faults, answers.error)
    ranks.changed(loading[0].read)
    return loading[0].extra


class _Loading:
    """What this rank takes from a checkpoint, checked against what it has."""

    def __init__(self, stored: Stored, mine: RankNames, job: JobNames, optimizer: Optimizer | None) -> None:
        self.stored = stored
        self.faults: list[str] = []
        about = stored.about()
        if about["format"] > FORMAT:
            newer = (
                f"it has format {about['format']}, but this version of Penstock reads formats up to {FORMAT}"
            )
            raise FoundError(f"{newer}: install a newer one")
        self._about = about
        self.extra = from_json(about["extra"])
        self._wanted: list[tuple[str, Tensor]] = []
        self.taken: set[str] = set()
        self._check_model(mine, job)
        self._restoring = None if optimizer is None else Restoring(optimizer, stored, about, mine, job)
        self.taken_by_optimizer: set[str] = set()
        if self._restoring is not None:
            self.faults += self._restoring.faults
            self._wanted += self._restoring.wanted
            self.taken_by_optimizer = self._restoring.taken
        self.faults += stored.missing_data([key for key, _ in self._wanted])

    def _check_model(self, mine: RankNames, job: JobNames) -> None:
        names = {key.removeprefix(_MODEL) for key in self.stored.entries if key.startswith(_MODEL)}
        tied = {name: tuple(tie) for tie in self._about["ties"] for name in tie}
        missing, seen = [], set()
        for (_, name), tensor in mine.tensors.items():
            source = job.source(name, names)
            if source is None:
                missing.append(name)
                continue
            self.taken |= names.intersection((name, *job.ties.get(name, ())))
            if (source, id(tensor)) in seen:
                continue
            seen.add((source, id(tensor)))
            entry = self.stored.entries[_MODEL + source]
            is_here, is_there = told_as(tensor.shape, tensor.dtype), told_as(entry.size, entry.properties.dtype)
            if is_here != is_there:
                self.faults.append(f"{name!r} is {is_there} in it, but {is_here} in the model")
            self._wanted.append((_MODEL + source, tensor.detach()))
        if missing:
            self.faults.append(f"the model has names that are missing in it: {some(missing)}")
        for tie in dict.fromkeys(job.ties.values()):
            apart = [name for name in tie if name in names and name not in tied.get(tie[0], (tie[0],))]
            if apart and tie[0] in names:
                self.faults.append(f"{tie[0]!r} and {some(apart)} are one weight in the model, but not in it")

    def left_over(self, taken: set[str], taken_by_optimizer: set[str] | None) -> list[str]:
        """What nobody takes; the optimizer's part may be left out as a whole."""
        names = [key.removeprefix(_MODEL) for key in self.stored.entries if key.startswith(_MODEL)]
        faults = []
        if left := [name for name in names if name not in taken]:
            faults.append(f"it has names that no rank's model has: {some(left)}")
        if taken_by_optimizer is not None and self._about["optimizer"] is not None:
            groups: Sequence[Mapping[str, Any]] = self._about["optimizer"]["groups"]
            trained = [name for group in groups for name in group["names"]]
            if left := [name for name in trained if name not in taken_by_optimizer]:
                faults.append(
                    f"it has optimizer options for parameters that no rank's optimizer has: {some(left)}"
                )
        return faults

    def read(self) -> None:
        """Change the model and the optimizer."""
        left = self._wanted
        while left:  # several tensors may take the same entry
            now: dict[str, Tensor] = {}
            later = []
            for key, tensor in left:
                if now.setdefault(key, tensor) is not tensor:
                    later.append((key, tensor))
            self.stored.read(now)
            left = later
        if self._restoring is not None:
            self._restoring.finish()


def _prove(written: Stored) -> None:
    """What was written must be readable before the old one goes."""
    if faults := written.missing_data(written.entries):
        raise FoundError(*faults)
