"""Which parameters of a rank are replicated, over which process groups, and reduced in which buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from penstock.arguments import listed, some
from penstock.errors import PipelineError
from penstock.runtime.data_parallel.checksums import ReplicatedParameter
from penstock.runtime.data_parallel.ddp import DdpWrappers
from penstock.runtime.data_parallel.fsdp import FsdpShards
from penstock.runtime.data_parallel.gradient_buckets import GradientBucket, make_buckets

__all__ = ["Groups", "ReplicaLayout", "data_parallel_groups", "find_layout", "unsharded"]

Groups = tuple[dist.ProcessGroup, ...]


class ReplicaLayout(NamedTuple):
    """The replicated parameters of a rank."""

    parameters: dict[nn.Parameter, bool]
    """The parameters that FSDP does not shard, and whether each is trained."""
    replicated: list[ReplicatedParameter]
    """The parameters that other ranks hold as well."""
    buckets: dict[int, list[tuple[GradientBucket, dist.ProcessGroup]]]
    """By stage: the buckets that its REDUCE_GRAD reduces, and over which group."""


def unsharded(modules: Iterable[nn.Module], shards: Mapping[int, FsdpShards]) -> dict[nn.Parameter, bool]:
    """The parameters that FSDP does not shard, and whether each is trained."""
    sharded = {parameter for each in shards.values() for parameter in each.parameters}
    everything = (parameter for module in modules for parameter in module.parameters())
    return {parameter: parameter.requires_grad for parameter in everything if parameter not in sharded}


def find_layout(
    modules: Mapping[int, nn.Module],
    shards: Mapping[int, FsdpShards],
    ddp: DdpWrappers,
    replicas: dist.ProcessGroup | None,
    reduction_order: list[int],
) -> ReplicaLayout:
    """Find what is reduced with whom; a tied weight is reduced with the last of its stages."""
    parameters = unsharded(modules.values(), shards)
    replicated = [each for stage_shards in shards.values() for each in stage_shards.replicated()]
    homes: dict[nn.Parameter, tuple[int, dist.ProcessGroup]] = {}
    problems = []
    for stage in sorted(modules, key=reduction_order.index if reduction_order else None):
        wrapped = ddp.process_groups(stage)
        unreplicated = []
        for name, parameter in modules[stage].named_parameters():
            group = wrapped.get(parameter, replicas)
            if parameter not in parameters:  # it is sharded
                continue
            if group is not None:
                replicated.append(ReplicatedParameter(f"{name} of stage {stage}", parameter, group))
                homes[parameter] = stage, group
            elif parameter.requires_grad:
                unreplicated.append(name)
        if unreplicated and (stage in shards or wrapped):
            problems.append(f"  stage {stage}: {some(unreplicated)}")
    if problems:
        raise PipelineError(
            "these parameters would be trained on the data of one rank alone, while others in their stage are "
            "replicated or sharded; wrap the whole stage module, or pass replicas=:\n" + "\n".join(problems)
        )
    return ReplicaLayout(parameters, replicated, _buckets_by_stage(homes))


def _buckets_by_stage(
    homes: Mapping[nn.Parameter, tuple[int, dist.ProcessGroup]],
) -> dict[int, list[tuple[GradientBucket, dist.ProcessGroup]]]:
    by_home: dict[tuple[int, dist.ProcessGroup], list[nn.Parameter]] = {}
    for parameter, home in homes.items():
        if parameter.requires_grad:
            by_home.setdefault(home, []).append(parameter)
    found: dict[int, list[tuple[GradientBucket, dist.ProcessGroup]]] = {}
    for (stage, group), parameters in by_home.items():
        found.setdefault(stage, []).extend((bucket, group) for bucket in make_buckets(parameters))
    return found


def data_parallel_groups(
    layout: ReplicaLayout, shards: Mapping[int, FsdpShards], replicas: dist.ProcessGroup | None
) -> Groups:
    """The process groups over which the data is distributed; all stages of the rank must agree."""
    found: dict[tuple[int, ...], Groups] = {}
    for groups in (
        *(groups for each in shards.values() for groups in each.data_groups()),
        *((group,) for buckets in layout.buckets.values() for _, group in buckets),
    ):
        found.setdefault(_ranks_of(groups), groups)
    if replicas is not None:
        members = set(dist.get_process_group_ranks(replicas))
        if missing := sorted({rank for ranks in found for rank in ranks} - members):
            raise PipelineError(
                f"replicas= has world ranks {listed(sorted(members))}, but stages are also sharded or "
                f"replicated with rank {listed(missing)}: replicas= names all ranks that train the same "
                "stages; to replicate shards, pass a 2D mesh to fully_shard"
            )
        return (replicas,)
    if len(found) > 1:
        different = "; ".join(f"world ranks {listed(ranks)}" for ranks in found)
        raise PipelineError(
            f"the stages of this rank are replicated over different ranks ({different}): pass replicas= to "
            "name the ranks that the data is distributed over"
        )
    return next(iter(found.values()), ())


def _ranks_of(groups: Groups) -> tuple[int, ...]:
    """All ranks that this rank reaches through these nested groups."""
    return tuple(sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)}))
