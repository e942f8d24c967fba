"""The tensor names of the whole model, independent of how it is split and wrapped.

A rank has its own tensors, and knows the names of all ranks: which names are one tied weight, and which stage
is the first with a name and therefore stores it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from penstock.runtime.checkpoints.collective import Collective, RankError, some
from penstock.runtime.data_parallel.wrappers import prefixes
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.torch_internals.modules import transient_buffers

Place: TypeAlias = tuple[int, str]
"""A stage, and a name in it."""


class Matched(NamedTuple):
    """The tensors of this rank, found among stored names."""

    found: list[tuple[str, str, Tensor]]
    """The name, the stored name, and the tensor."""
    used: set[str]
    """The stored names that this rank uses."""
    missing: list[str]


@dataclass(frozen=True)
class ModelNames:
    """The tensors of this rank: every parameter and persistent buffer; and all names of the whole model."""

    tensors: Mapping[Place, Tensor]
    first_stage: Mapping[str, int]
    """The first stage that has each name."""
    ties: Mapping[str, tuple[str, ...]]
    """For each name of a tied weight: all its names, the first stage's name first."""

    def is_first(self, place: Place) -> bool:
        """Return whether a weight has this name in the first stage that has it."""
        stage, name = place
        return self.first_stage[name] == stage and self.ties.get(name, (name,))[0] == name

    def match(self, stored: Collection[str]) -> Matched:
        """Find each tensor under its own name, or else under another name of the tied weight."""
        matched = Matched([], set(), [])
        for (_, name), tensor in self.tensors.items():
            names = [each for each in (name, *self.ties.get(name, ())) if each in stored]
            if names:
                matched.found.append((name, names[0], tensor))
                matched.used.update(names)
            else:
                matched.missing.append(name)
        return matched


def unused_problems(problem: str, stored: Iterable[str], used: Iterable[set[str]]) -> list[str]:
    """Return the problem with the stored names that no rank uses, if there are any."""
    every = set().union(*used)
    unused = [name for name in stored if name not in every]
    return [f"{problem}: {some(unused)}"] if unused else []


def names_of_model(model: Pipeline | nn.Module, ranks: Collective) -> ModelNames:
    """Find the tensors of this rank and the names of all ranks; problems on any rank are raised on all."""
    tensors: dict[Place, Tensor] = {}

    def find() -> tuple[dict[Place, Any], list[list[Place]]]:
        tensors.update(_tensors_of(model, ranks.members))
        same: dict[int, list[Place]] = {}
        for place, tensor in tensors.items():
            same.setdefault(id(tensor), []).append(place)
        ties = [places for places in same.values() if len(places) > 1]
        if isinstance(model, Pipeline):
            ties += [list(tie.items()) for tie in model.ties]  # including places on other ranks
        return {place: (tuple(tensor.shape), tensor.dtype) for place, tensor in tensors.items()}, ties

    gathered = ranks.run(find)
    problems: list[str] = []
    properties: dict[Place, Any] = {}
    for rank, (places, _) in enumerate(gathered):
        for place, own in places.items():
            if properties.setdefault(place, own) != own:
                problems.append(
                    f"{place[1]!r} is {describe(*own)} on rank {rank} and {describe(*properties[place])} on "
                    "another rank: shards of one tensor must be DTensors, which know the full shape"
                )
    order = {place: index for index, place in enumerate(sorted(properties, key=lambda place: place[0]))}
    groups = [
        sorted((place for place in group if place in properties), key=order.__getitem__)
        for group in _joined(tie for _, ties in gathered for tie in ties)
    ]
    stages: dict[str, list[int]] = {}
    for stage, name in order:
        stages.setdefault(name, []).append(stage)
    problems += _ambiguous_names(stages, groups)
    ranks.raise_problems(problems)
    ties: dict[str, tuple[str, ...]] = {}
    for group in groups:
        names = tuple(dict.fromkeys(name for _, name in group))
        if len(names) > 1:
            ties |= dict.fromkeys(names, names)
    return ModelNames(tensors, {name: found[0] for name, found in stages.items()}, ties)


def _tensors_of(model: Pipeline | nn.Module, members: Sequence[int]) -> dict[Place, Tensor]:
    """Find and check the tensors of this rank; `members` are the world ranks that take part."""
    if not isinstance(model, Pipeline | nn.Module):
        raise RankError(f"the model must be a Pipeline or an nn.Module, not a {type(model).__name__}")
    modules = {0: model} if isinstance(model, nn.Module) else model.modules
    tensors: dict[Place, Tensor] = {}
    problems: list[str] = []
    for stage in sorted(modules):
        _reshard(modules[stage])
        tensors |= {(stage, name): tensor for name, tensor in _named_tensors(modules[stage], problems)}
    for place, tensor in tensors.items():
        problems += _tensor_problems(place, tensor, members)
    if problems:
        raise RankError(*problems)
    return tensors


def _ambiguous_names(stages: Mapping[str, Sequence[int]], ties: Sequence[Sequence[Place]]) -> Iterator[str]:
    """Names that several stages have for different parameters."""
    tie_of = {place: number for number, tie in enumerate(ties) for place in tie}
    ambiguous = [
        f"{name!r} in stages {some(found)}"
        for name, found in stages.items()
        if len(found) > 1 and len({tie_of.get((stage, name), (stage, name)) for stage in found}) > 1
    ]
    if ambiguous:
        yield (
            f"different parameters have the same name: {some(ambiguous)}. A checkpoint has one tensor for each "
            "name of the whole model: split() keeps these names, and stages that you write must have them, too "
            "(put the layers into a container that names them, such as nn.ModuleDict)"
        )


def describe(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Return dtype and shape as text."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _named_tensors(module: nn.Module, problems: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer; a tensor with two names twice."""
    without_wrappers = prefixes(module)
    for path, part in module.named_modules(remove_duplicate=False):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            problems.append(
                f"the module {path or type(part).__name__!r} has extra state (get_extra_state), which is not "
                "stored: keep it in buffers, or pass it as `extra`"
            )
        transient = transient_buffers(part)
        own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(part.named_buffers(recurse=False, remove_duplicate=False))
        own |= {name: buffer for name, buffer in buffers.items() if name not in transient}
        for name, tensor in own.items():
            yield without_wrappers[path] + name, tensor


def _tensor_problems(place: Place, tensor: Tensor, members: Sequence[int]) -> Iterator[str]:
    stage, name = place
    if tensor.is_meta:
        yield (
            f"{name!r} of stage {stage} is on the meta device: allocate it first with "
            "module.to_empty(device=...)"
        )
    if is_dtensor(tensor):
        mesh = tensor.device_mesh.mesh.flatten().tolist()
        if outside := [rank for rank in mesh if rank not in members]:
            yield (
                f"{name!r} of stage {stage} is sharded over world ranks {some(mesh)}, but rank {some(outside)} "
                "does not take part: pass a group= that has them all"
            )


def _reshard(module: nn.Module) -> None:
    """Free gathered parameters, which a forward may have left."""
    loaded = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:  # otherwise nothing is sharded, and the import is slow
        for part in module.modules():
            if isinstance(part, loaded.FSDPModule):
                part.reshard()


def _joined(ties: Iterable[Sequence[Place]]) -> list[set[Place]]:
    """Join ties that have a place in common."""
    joined: list[set[Place]] = []
    for tie in dict.fromkeys(map(frozenset, ties)):
        touching = [group for group in joined if group & tie]
        joined = [group for group in joined if not group & tie]
        joined.append(set(tie).union(*touching))
    return joined
