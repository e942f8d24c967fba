"""What the tensors of a model are called: the whole model's names, wherever it is cut and whatever wraps it.

A rank knows its own stages (`RankNames`); what all ranks know together (`JobNames`) says which names are one
tied weight, and which stage is the first with a name: that one stores it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.runtime.checkpoints.collective import FoundError, Together, some
from penstock.runtime.data_parallel.wrappers import prefixes
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.pipeline import Pipeline

__all__ = ["JobNames", "Place", "RankNames", "names_of_job", "told_as"]

Place: TypeAlias = tuple[int, str]
"""A stage and a name in it."""


@dataclass(frozen=True)
class RankNames:
    """The tensors of this rank: every parameter and persistent buffer by stage and name."""

    tensors: Mapping[Place, Tensor]
    ties: Sequence[Sequence[Place]]
    """Places of one weight, also those on other ranks that are known."""

    @classmethod
    def of(cls, model: Pipeline | nn.Module, members: Sequence[int]) -> RankNames:
        """Find and check them; `members` are the ranks, as the world numbers them, that do this together."""
        if not isinstance(model, Pipeline | nn.Module):
            raise FoundError(f"the model is a Pipeline or an nn.Module, not a {type(model).__name__}")
        modules, tied = ({0: model}, ()) if isinstance(model, nn.Module) else (model.modules, model.ties)
        tensors: dict[Place, Tensor] = {}
        faults: list[str] = []
        for stage, module in sorted(modules.items(), key=itemgetter(0)):
            _reshard(module)
            for name, tensor in _named_tensors(module, faults):
                tensors[stage, name] = tensor
        faults += [fault for place, tensor in tensors.items() for fault in _faults_of(place, tensor, members)]
        if faults:
            raise FoundError(*faults)
        same: dict[int, list[Place]] = {}
        for place, tensor in tensors.items():
            same.setdefault(id(tensor), []).append(place)
        ties = [places for places in same.values() if len(places) > 1]
        return cls(tensors, [*ties, *(list(tie.items()) for tie in tied)])


@dataclass(frozen=True)
class JobNames:
    """All names of the model."""

    first_stage: Mapping[str, int]
    """The first stage with a name."""
    ties: Mapping[str, tuple[str, ...]]
    """For each name of a tied weight: all its names, the first holder's first."""

    def first(self, name: str) -> str:
        """The name under which a weight comes first in the model."""
        return self.ties.get(name, (name,))[0]

    def source(self, name: str, stored: Iterable[str]) -> str | None:
        """The name under which a weight can be read: its own, or that of a tied partner."""
        return next((each for each in (name, *self.ties.get(name, ())) if each in stored), None)


def names_of_job(model: Pipeline | nn.Module, ranks: Together) -> tuple[RankNames, JobNames]:
    """This rank's names and everybody's; what is wrong with them on any rank is raised on all."""
    mine: list[RankNames] = []

    def told() -> tuple[dict[Place, Any], Sequence[Sequence[Place]]]:
        mine.append(RankNames.of(model, ranks.members))
        known = mine[0].tensors.items()
        return {place: (tuple(tensor.shape), tensor.dtype) for place, tensor in known}, mine[0].ties

    answers = ranks.done(told)
    faults: list[str] = []
    about: dict[Place, Any] = {}
    for rank, (places, _) in enumerate(answers):
        for place, seen in places.items():
            if about.setdefault(place, seen) != seen:
                faults.append(
                    f"{place[1]!r} is {told_as(*seen)} on rank {rank} and {told_as(*about[place])} on another "
                    "rank: shards of one tensor must be DTensors, which know the whole"
                )
    order = {place: index for index, place in enumerate(sorted(about, key=lambda place: place[0]))}
    groups = [
        sorted((place for place in group if place in about), key=order.__getitem__)
        for group in _joined(tie for _, ties in answers for tie in ties)
    ]
    group_of = {place: number for number, group in enumerate(groups) for place in group}
    stages: dict[str, list[int]] = {}
    for stage, name in order:
        stages.setdefault(name, []).append(stage)
    twice = [
        f"{name!r} in stages {some(found)}"
        for name, found in stages.items()
        if len(found) > 1 and len({group_of.get((stage, name), (stage, name)) for stage in found}) > 1
    ]
    if twice:
        faults.append(
            f"different parameters have the same name: {some(twice)}. A checkpoint has one tensor for each "
            "name of the whole model: split() keeps these names, and stages that you write yourself must have "
            "them too (put the layers into a container that names them, such as nn.ModuleDict)"
        )
    ranks.refuse(faults)
    ties: dict[str, tuple[str, ...]] = {}
    for group in groups:
        names = tuple(dict.fromkeys(name for _, name in group))
        if len(names) > 1:
            ties |= dict.fromkeys(names, names)
    return mine[0], JobNames({name: found[0] for name, found in stages.items()}, ties)


def told_as(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Shape and type in words."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _named_tensors(module: nn.Module, faults: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and persistent buffer; one under two names comes twice."""
    without_wrappers = prefixes(module)
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            faults.append(
                f"the module {path or type(part).__name__!r} has extra state (get_extra_state), which is not "
                "stored: keep it in buffers, or put it into `extra`"
            )
        passing = part._non_persistent_buffers_set  # noqa: SLF001 -- it has no other name
        own = [
            *part.named_parameters(recurse=False, remove_duplicate=False),
            *((n, b) for n, b in part.named_buffers(recurse=False, remove_duplicate=False) if n not in passing),
        ]
        for name, tensor in own:
            yield without_wrappers[path] + name, tensor


def _faults_of(place: Place, tensor: Tensor, members: Sequence[int]) -> Iterator[str]:
    stage, name = place
    if tensor.is_meta:
        yield (
            f"{name!r} of stage {stage} is on the meta device: give it memory first, with "
            "module.to_empty(device=...)"
        )
    if is_dtensor(tensor):
        mesh = tensor.device_mesh.mesh.flatten().tolist()
        if outside := [rank for rank in mesh if rank not in members]:
            yield (
                f"{name!r} of stage {stage} is sharded over world ranks {some(mesh)}, but rank {some(outside)} "
                "takes no part: give a group= that has them all"
            )


def _reshard(module: nn.Module) -> None:
    """After a forward, parameters may still be gathered."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:  # else nothing can be sharded, and loading it takes long
        for part in module.modules():
            if isinstance(part, loaded.FSDPModule):
                part.reshard()


def _joined(ties: Iterable[Sequence[Place]]) -> list[set[Place]]:
    """Groups with a place in common are one."""
    joined: list[set[Place]] = []
    for tie in dict.fromkeys(map(frozenset, ties)):
        touching = [group for group in joined if group & tie]
        joined = [group for group in joined if not group & tie]
        joined.append(set(tie).union(*touching))
    return joined
