"""What `Pipeline` is made from, checked before anything is connected: schedule, stages, ranks, functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from penstock.arguments import listed
from penstock.errors import BuildError, PipelineError
from penstock.families import build
from penstock.formats import read
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.runtime.data_parallel.wrappers import split_metadata
from penstock.runtime.execution.program import CustomFunction
from penstock.validation import refusal, validate

__all__ = [
    "chosen_schedule",
    "device_of",
    "functions_by_kind",
    "lowered",
    "modules_of_rank",
    "refuse_own_ranks",
    "with_loss",
]

_WAYS_OF_SENDING = "edge-streams"  # what our channels promise: none waits behind another


def chosen_schedule(
    schedule: Schedule | str | PathLike[str],
    stages: Sequence[nn.Module] | Mapping[int, nn.Module],
    ranks: int,
    microbatches: int | None,
) -> Schedule:
    """The schedule that was given, read or named; refused if it does not fit the ranks."""
    if isinstance(stages, nn.Module):
        raise PipelineError(
            "`stages` is one module: give a list with a module for each stage of this rank, as [module], or "
            "what split() makes of it"
        )
    if not isinstance(schedule, Schedule | str | PathLike):
        raise PipelineError(
            "a schedule is a family's name, a .csv or .json file or a Schedule "
            f"(given {type(schedule).__name__})"
        )
    if isinstance(schedule, str) and Path(schedule).suffix not in (".csv", ".json"):
        if microbatches is None:
            raise PipelineError(
                f'"{schedule}" is a family of schedules: say for how many microbatches= to build it'
            )
        schedule = _built(schedule, stages, ranks, microbatches)
    elif not isinstance(schedule, Schedule):
        schedule = read(schedule)
    if schedule.num_ranks != ranks:
        raise PipelineError(
            f"the schedule {schedule.name} is for {schedule.num_ranks} ranks, but the process group has {ranks}"
        )
    if microbatches is not None and schedule.microbatches != microbatches:
        raise PipelineError(
            f"the schedule {schedule.name} is for {schedule.microbatches} microbatches, but microbatches="
            f"{microbatches} is asked for"
        )
    return schedule


def _built(
    name: str, stages: Sequence[nn.Module] | Mapping[int, nn.Module], ranks: int, microbatches: int
) -> Schedule:
    """A family, with as many stages per rank as were given."""
    whole_model = isinstance(stages, Mapping) and sorted(stages) == list(range(len(stages)))
    count, rest = divmod(len(stages), ranks) if whole_model and len(stages) >= ranks else (len(stages), 0)
    if rest:
        raise PipelineError(
            f"{len(stages)} stages cannot be shared evenly by {ranks} ranks; "
            f"give {count * ranks} or {(count + 1) * ranks}, or a Schedule with a placement of its own"
        )
    plain = build(name, ranks=ranks, microbatches=microbatches)
    if plain.num_stages == count * ranks:
        return plain
    try:
        return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=count)
    except BuildError as error:
        raise PipelineError(
            f"{name} on {ranks} ranks has {plain.num_stages} stages, and {len(stages)} modules are given, "
            f"{count} for each rank: cut the model into {plain.num_stages}, or take another family ({error})"
        ) from error


def lowered(schedule: Schedule) -> Schedule:
    """With communication, and proved to run on our channels."""
    if schedule.level == "compute":
        schedule = lower(schedule)
    if faults := validate(schedule, _WAYS_OF_SENDING):
        raise refusal(schedule, faults)
    return schedule


def modules_of_rank(
    stages: Sequence[nn.Module] | Mapping[int, nn.Module], schedule: Schedule, rank: int
) -> dict[int, nn.Module]:
    """The modules of this rank by stage."""
    own = schedule.placement.stages_of_rank[rank]
    if isinstance(stages, Mapping):
        count = schedule.num_stages
        if strangers := sorted(stage for stage in stages if stage not in range(count)):
            raise PipelineError(
                f"the schedule {schedule.name} has {count} stages, 0 to {count - 1}: stage "
                f"{listed(strangers)} would never run, and its layers would be left out"
            )
        wanted = own if set(stages) <= set(own) else range(count)  # of all or of the rank's own, none may lack
        if missing := [stage for stage in wanted if stage not in stages]:
            raise PipelineError(
                f"stage {listed(missing)} of {count} is missing among the stages that are given "
                f"({listed(sorted(stages))}): give all of them, or those of rank {rank} alone, {listed(own)}"
            )
        return _in_their_places({stage: stages[stage] for stage in own}, schedule)
    if len(stages) != len(own):
        raise PipelineError(
            f"{len(stages)} stage modules are given, but rank {rank} has {len(own)} stages of schedule "
            f"{schedule.name}: stage {listed(own)}; a mapping from stage to module may name all stages"
        )
    return _in_their_places(dict(zip(own, stages)), schedule)


def _in_their_places(modules: dict[int, nn.Module], schedule: Schedule) -> dict[int, nn.Module]:
    """The modules, if what split() made of a model for this very number of stages is where it belongs."""
    for stage, module in modules.items():
        number, parts = split_metadata(module, "cut") or (stage, ())
        if number != stage and len(parts) == schedule.num_stages:
            raise PipelineError(
                f"stage {number} of the model is given as stage {stage}: with {schedule.name} this rank has "
                f"stages {listed(modules)}; give all that split() made, or [stages[i] for i in "
                "schedule.placement.stages_of_rank[rank]]"
            )
    return modules


def with_loss(modules: Mapping[int, nn.Module], loss: object, last: int) -> dict[int, nn.Module]:
    """The modules of this rank with a loss that has parameters: it is trained with the last stage."""
    found = dict(modules)
    if last in found and isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        found[last] = nn.ModuleDict({"stage": found[last], "loss": loss})
    return found


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Where the first parameter is; a CPU if there is none."""
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_meta:
                raise PipelineError(
                    "the modules of this rank are on the meta device: give them memory and first numbers with "
                    "penstock.runtime.materialize(stage), for each stage of this rank"
                )
            return parameter.device
    return torch.device("cpu")


def functions_by_kind(functions: Mapping[Kind | str, CustomFunction] | None) -> dict[Kind, CustomFunction]:
    """The user's functions; sends and receives have none, because both ends must agree."""
    found: dict[Kind, CustomFunction] = {}
    for given, function in (functions or {}).items():
        kind = given if isinstance(given, Kind) else next((k for k in Kind if k.value == given), None)
        allowed = [k.value for k in Kind if not k.is_communication]
        if kind is None or kind.is_communication:
            raise PipelineError(f"no function can take the place of {given!r}; only of {', '.join(allowed)}")
        found[kind] = function
    return found


def refuse_own_ranks(members: Sequence[int], groups: Iterable[dist.ProcessGroup]) -> None:
    """The ranks of a pipeline hold different stages, so they cannot be each other's replicas."""
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if len(shared := [rank for rank in ranks if rank in members]) > 1:
            raise PipelineError(
                f"stages are replicated over world ranks {listed(ranks)}, but {listed(shared)} are ranks of "
                'this very pipeline: give the other dimension of the mesh, such as replicas=mesh["dp"] beside '
                'group=mesh["pp"]'
            )
