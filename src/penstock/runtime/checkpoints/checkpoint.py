"""Checkpoints that fit any layout: saved on some number of ranks, loaded on any other.

    save_checkpoint("step-100", pipeline, optimizer, extra={"step": 100})
    extra = load_checkpoint("step-100", pipeline, optimizer)

Everything is stored under the names of the whole model, with torch.distributed.checkpoint:

    model.<name>              parameters and persistent buffers
    optimizer.<name>.<key>    the tensors of a parameter's optimizer state
    penstock                  everything else, as JSON: version, ties, optimizer options, `extra`
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.runtime.checkpoints.atomic_directory import AtomicDirectory
from penstock.runtime.checkpoints.collective import Collective, RankError, some
from penstock.runtime.checkpoints.names import JobNames, RankNames, describe, names_of_job
from penstock.runtime.checkpoints.optimizer_states import (
    OptimizerRestore,
    collect_state,
    from_json,
    join_headers,
    to_json,
    type_conflicts,
)
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.process_groups import Group

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import StoredCheckpoint


FORMAT = 2
"""The version of the format, the first that is read."""

_MODEL = "model."


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    group: Group = None,
) -> None:
    """Write the directory `path`; all ranks of `group` call this, by default all ranks of the world.

    `extra` is any plain value: numbers, strings, lists, tuples and mappings; the first rank's value is stored.
    An existing checkpoint is replaced only when the new one is complete. If saving fails on any rank, all ranks
    raise a `CheckpointError`.
    """
    directory = AtomicDirectory(path)
    ranks = Collective(group, f"the checkpoint {directory.path} cannot be saved")
    mine, job = names_of_job(model, ranks)
    entries: dict[str, Tensor] = {}

    def collect() -> tuple[Any, Any]:
        for (stage, name), tensor in mine.tensors.items():
            if job.first_stage[name] == stage:
                entries[_MODEL + name] = tensor.detach()
        state = collect_state(optimizer, mine, job)
        entries.update(state.entries)
        return state.header, to_json(extra, "extra") if ranks.is_first else None

    collected = ranks.run(collect)
    ties = list(dict.fromkeys(job.ties.values()))
    optimizers = [header for header, _ in collected if header is not None]
    ranks.raise_problems(type_conflicts(optimizers))
    header = {"format": FORMAT, "ties": ties, "optimizer": join_headers(optimizers), "extra": collected[0][1]}
    _write_atomically(directory, entries, header, ranks)


def _write_atomically(
    directory: AtomicDirectory, entries: Mapping[str, Tensor], header: object, ranks: Collective
) -> None:
    """Write a new directory, check that it is complete, and replace the old one."""
    from penstock.runtime.checkpoints.files import StoredCheckpoint, write  # noqa: PLC0415 -- slow to load

    def check() -> None:
        StoredCheckpoint(directory.unfinished)

    ranks.run_on_first(directory.begin)
    try:
        write(directory.unfinished, entries, header, ranks)
        ranks.run_on_first(check)
    except BaseException:
        if ranks.is_first:
            directory.discard()
        raise
    ranks.run_on_first(directory.commit)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    group: Group = None,
    *,
    verify_checksums: bool = True,
) -> Any:
    """Read the directory `path` into the model and the optimizer, and return `extra`.

    All ranks of `group` call this, by default all ranks of the world. The layout may differ from the one that
    was saved. Everything is checked first: all ranks raise all problems at once as a `CheckpointError`, and
    then nothing is changed. With `verify_checksums=False`, the contents of the data files are not checked.
    """
    from penstock.runtime.checkpoints.files import StoredCheckpoint  # noqa: PLC0415 -- slow to load

    directory = AtomicDirectory(path)
    ranks = Collective(group, f"the checkpoint {directory.path} cannot be loaded")
    mine, job = names_of_job(model, ranks)

    def prepare() -> _CheckpointLoad:
        stored = StoredCheckpoint(directory.readable(), verify=verify_checksums)
        return _CheckpointLoad(stored, mine, job, optimizer, slice(ranks.rank, None, len(ranks.members)))

    return ranks.run_change(prepare).extra


class _Used(NamedTuple):
    """The names in the checkpoint that a rank uses."""

    model: set[str]
    optimizer: set[str] | None
    """None on a rank without an optimizer."""
    index_checksum: int
    """Of the index that it has read."""


class _CheckpointLoad:
    """What this rank reads from a checkpoint, checked against its model and optimizer."""

    def __init__(
        self,
        stored: StoredCheckpoint,
        mine: RankNames,
        job: JobNames,
        optimizer: Optimizer | None,
        share: slice,
    ) -> None:
        self._stored = stored
        self.problems: list[str] = []
        self._header = header = stored.header()
        if header["format"] != FORMAT:
            raise RankError(
                f"it has format {header['format']}, but this version of Penstock reads format {FORMAT}: "
                f"install a {'newer' if header['format'] > FORMAT else 'older'} version"
            )
        self.extra = from_json(header["extra"])
        self._wanted: list[tuple[str, Tensor]] = []
        self._used_names: set[str] = set()
        self._check_model(mine, job)
        self._optimizer = None if optimizer is None else OptimizerRestore(optimizer, stored, header, mine, job)
        if self._optimizer is not None:
            self.problems += self._optimizer.problems
            self._wanted += self._optimizer.wanted
        self.problems = self.problems or stored.damage(self._wanted, share)

    @property
    def used(self) -> _Used:
        """The names that this rank uses."""
        optimizer = None if self._optimizer is None else self._optimizer.used
        return _Used(self._used_names, optimizer, self._stored.checksum)

    def _check_model(self, mine: RankNames, job: JobNames) -> None:
        names = {key.removeprefix(_MODEL) for key in self._stored.entries if key.startswith(_MODEL)}
        missing, seen = [], set()
        for (_, name), tensor in mine.tensors.items():
            source = job.source(name, names)
            if source is None:
                missing.append(name)
                continue
            self._used_names |= names.intersection((name, *job.ties.get(name, ())))
            if (source, id(tensor)) not in seen:
                seen.add((source, id(tensor)))
                self._want(name, source, tensor)
        if missing:
            self.problems.append(f"the model has names that are missing in the checkpoint: {some(missing)}")
        tied = {name: tuple(tie) for tie in self._header["ties"] for name in tie}
        for tie in dict.fromkeys(job.ties.values()):
            untied = [name for name in tie if name in names and name not in tied.get(tie[0], (tie[0],))]
            if untied and tie[0] in names:
                self.problems.append(
                    f"{tie[0]!r} and {some(untied)} are one weight in the model, but not in the checkpoint"
                )

    def _want(self, name: str, source: str, tensor: Tensor) -> None:
        entry = self._stored.entries[_MODEL + source]
        stored, own = describe(entry.size, entry.properties.dtype), describe(tensor.shape, tensor.dtype)
        if own != stored:
            self.problems.append(f"{name!r} is {stored} in the checkpoint, but {own} in the model")
        self._wanted.append((_MODEL + source, tensor.detach()))

    def unused(self, used: Sequence[_Used]) -> list[str]:
        """What no rank reads; the optimizer state may be left out as a whole."""
        used_by_model = {name for each in used for name in each.model}
        names = [key.removeprefix(_MODEL) for key in self._stored.entries if key.startswith(_MODEL)]
        problems = []
        if len({each.index_checksum for each in used}) > 1:
            return ["the ranks read different checkpoints; every rank must see the same file system"]
        if left := [name for name in names if name not in used_by_model]:
            problems.append(f"the checkpoint has names that no rank's model has: {some(left)}")
        optimizers = [each.optimizer for each in used if each.optimizer is not None]
        if optimizers and self._header["optimizer"] is not None:
            groups: Sequence[Mapping[str, Any]] = self._header["optimizer"]["groups"]
            trained = [name for group in groups for name in group["names"]]
            if left := [name for name in trained if not any(name in each for each in optimizers)]:
                problems.append(
                    "the checkpoint has optimizer options for parameters that no rank's optimizer has: "
                    f"{some(left)}"
                )
        return problems

    def apply(self) -> None:
        """Read the tensors into the model and the optimizer."""
        self._stored.read(self._wanted)
        if self._optimizer is not None:
            self._optimizer.finish()
