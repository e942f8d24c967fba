"""Checks the arguments of `Pipeline` before anything is connected: stages, losses, replicas, functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from numbers import Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from penstock.arguments import listed, plural, printable
from penstock.errors import PipelineError
from penstock.ir.action import Kind
from penstock.ir.graph import StageGraph
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.fsdp import fsdp_shards_by_stage
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.data_parallel.tied_names import TiedNames, find_tied_weights
from penstock.runtime.data_parallel.tied_weights import TiedWeights
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.execution.custom_function import CustomFunction
from penstock.runtime.execution.stage_checks import LossFunction
from penstock.runtime.transport.process_groups import Group

__all__ = [
    "RankModel",
    "check_options",
    "check_replicas_outside",
    "functions_by_kind",
    "losses_by_sink",
    "rank_model",
]


class RankModel(NamedTuple):
    """What one rank trains."""

    modules: dict[int, nn.Module]
    """The modules of its stages."""
    trained: dict[int, nn.Module]
    """The same with the parameters of the loss, if it has any."""
    device: torch.device
    """The device of its messages."""
    ties: TiedWeights
    replication: ReplicaGroup


def check_options(timeout: object, tokens: object, *, average: bool) -> None:
    """Check the options that do not depend on others."""
    if timeout is not None and not _is_timeout(timeout):
        given = printable(repr(timeout))
        raise PipelineError(f"timeout= must be a finite number of seconds above 0 (given {given})")
    if tokens is not None and not average:
        raise PipelineError("average=False sums the losses, but tokens= weights them for a mean: give one")


def _is_timeout(value: object) -> bool:
    """Whether a value is a number of seconds that `timedelta` can hold."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return 0 < float(value) < timedelta.max.total_seconds()


def rank_model(
    stages: Sequence[nn.Module] | Mapping[int, nn.Module],
    schedule: Schedule,
    rank: int,
    losses: Mapping[int, LossFunction],
    tied: Sequence[TiedNames],
    replicas: Group,
    device: torch.device | str | None,
) -> RankModel:
    """The modules of this rank, with their device, shards, ties and replicas."""
    modules = _modules_of_rank(stages, schedule, rank)
    tied = find_tied_weights(tied, stages, schedule.num_stages)
    device = torch.device(device) if device is not None else _device_of(modules.values())
    trained = _with_losses(modules, losses)
    shards = fsdp_shards_by_stage(trained)
    ties = TiedWeights(tied, modules, shards, schedule, rank)
    return RankModel(modules, trained, device, ties, ReplicaGroup(trained, shards, replicas, schedule, rank))


def _stages_are(stages: Sequence[int]) -> str:
    return f"stage {stages[0]} is" if len(stages) == 1 else f"stages {listed(stages)} are"


def _modules_of_rank(
    stages: Sequence[nn.Module] | Mapping[int, nn.Module], schedule: Schedule, rank: int
) -> dict[int, nn.Module]:
    """The modules of this rank by stage."""
    own = schedule.placement.stages_of_rank[rank]
    if isinstance(stages, Mapping):
        count = schedule.num_stages
        if unknown := sorted(stage for stage in stages if stage not in range(count)):
            raise PipelineError(
                f"the schedule {schedule.name} has {plural(count, 'stage')}, 0 to {count - 1}: "
                f"{_stages_are(unknown)} not among them, and would never run"
            )
        expected = own if set(stages) <= set(own) else range(count)  # the rank's own stages, or all stages
        if missing := [stage for stage in expected if stage not in stages]:
            raise PipelineError(
                f"{_stages_are(missing)} missing in `stages`, which has {listed(sorted(stages)) or 'none'} of "
                f"{count}: give all of them, or only those of rank {rank} (stage {listed(own)})"
            )
        return _with_checked_numbers({stage: stages[stage] for stage in own}, schedule)
    if len(stages) != len(own):
        raise PipelineError(
            f"{plural(len(stages), 'stage module is', 'stage modules are')} given, but rank {rank} has "
            f"{plural(len(own), 'stage')} of schedule {schedule.name}: stage {listed(own)}; "
            "a mapping from stage to module may contain all stages"
        )
    return _with_checked_numbers(dict(zip(own, stages)), schedule)


def _with_checked_numbers(modules: dict[int, nn.Module], schedule: Schedule) -> dict[int, nn.Module]:
    """The modules; raises if split() made one of them, for as many stages, as another stage."""
    for stage, module in modules.items():
        number, parts = split_metadata(module, "split_stage") or (stage, ())
        if number != stage and len(parts) == schedule.num_stages:
            raise PipelineError(
                f"stage {number} of the model is given as stage {stage}: with {schedule.name} this rank has "
                f"stages {listed(modules)}; give the whole result of split(), or [stages[i] for i in "
                "schedule.placement.stages_of_rank[rank]]"
            )
    return modules


def losses_by_sink(loss: object, graph: StageGraph) -> dict[int, LossFunction]:
    """The loss of each stage that feeds no other: one for all of them, or a mapping from stage to loss."""
    if loss is None:
        return {}
    if not isinstance(loss, Mapping):
        loss = _checked_loss(loss)
        if len(graph.sinks) > 1 and _has_parameters(loss):
            raise PipelineError(
                f"stage {listed(graph.sinks)} would share the parameters of the loss: give each stage its own "
                "module, as loss={stage: module, ...}"
            )
        return dict.fromkeys(graph.sinks, loss)
    if sorted(loss, key=repr) != sorted(graph.sinks, key=repr):
        raise PipelineError(
            f"loss= has a loss for stage {listed(loss) or 'none'}, but it needs one for each stage that feeds "
            f"no other: stage {listed(graph.sinks)}"
        )
    return {sink: _checked_loss(loss[sink]) for sink in graph.sinks}


def _checked_loss(loss: object) -> LossFunction:
    if not callable(loss):
        raise PipelineError(f"loss= must be a function or a module (given {type(loss).__name__})")
    return loss


def _has_parameters(loss: object) -> bool:
    return isinstance(loss, nn.Module) and any(True for _ in loss.parameters())


def _with_losses(modules: Mapping[int, nn.Module], losses: Mapping[int, object]) -> dict[int, nn.Module]:
    """The modules of this rank; a loss with parameters is trained together with its stage."""
    trained = dict(modules)
    for sink, loss in losses.items():
        if sink in trained and isinstance(loss, nn.Module) and _has_parameters(loss):
            trained[sink] = nn.ModuleDict({"stage": trained[sink], "loss": loss})
    return trained


def _device_of(modules: Iterable[nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU if there is none."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_meta:
                raise PipelineError(
                    "the modules of this rank are on the meta device: allocate and initialize them with "
                    "penstock.runtime.materialize(stage), for each stage of this rank"
                )
            return parameter.device
    return torch.device("cpu")


def functions_by_kind(functions: Mapping[Kind | str, CustomFunction] | None) -> dict[Kind, CustomFunction]:
    """The user functions by kind; sends and receives can have none, because both ends must match."""
    found: dict[Kind, CustomFunction] = {}
    for key, function in (functions or {}).items():
        kind = key if isinstance(key, Kind) else next((k for k in Kind if k.value == key), None)
        allowed = [k.value for k in Kind if not k.is_communication]
        if kind is None or kind.is_communication:
            raise PipelineError(f"a function cannot replace {key!r}, only {', '.join(allowed)}")
        found[kind] = function
    return found


def check_replicas_outside(members: Sequence[int], groups: Iterable[dist.ProcessGroup]) -> None:
    """Raise if two ranks of this pipeline are replicas: they have different stages."""
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if len(shared := [rank for rank in ranks if rank in members]) > 1:
            raise PipelineError(
                f"stages are replicated over world ranks {listed(ranks)}, but {listed(shared)} are ranks of "
                'this pipeline: give the other dimension of the mesh, such as replicas=mesh["dp"] with '
                'group=mesh["pp"]'
            )
