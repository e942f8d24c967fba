"""What a pipeline runs: its arguments, checked before anything is connected, and one rank's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.arguments import listed, plural, printable
from penstock.errors import BuildError, PipelineError
from penstock.families import build
from penstock.formats import read
from penstock.ir.action import Step
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.runtime.data_parallel.replica_group import ReplicaGroup
from penstock.runtime.data_parallel.wrappers import split_graph, split_metadata
from penstock.runtime.stage.microbatch import LossFunction
from penstock.runtime.stage.stage import Stage
from penstock.validation import SendModel, invalid_schedule_error, validate


@dataclass(frozen=True)
class ActionCall:
    """The argument of a user function: the action that it replaces."""

    action: Step
    stages: Mapping[int, Stage]
    """The stages of this rank."""
    run: Callable[[], None]
    """What the runtime does without the function; for an overlapped pair, its parts one after the other."""
    parts: tuple[ActionCall, ...] = ()
    """For an overlapped pair: the forward and the backward, with the functions for their kinds."""


CustomFunction: TypeAlias = Callable[[ActionCall], None]

_PROVIDED = SendModel.EDGE_STREAMS  # of our channels: no message waits for one of another channel


@dataclass(frozen=True)
class VerifiedSchedule:
    """A valid schedule with communication."""

    schedule: Schedule
    safe_with_blocking_sends: bool
    """Whether it has no deadlock even if every send blocks until it is received (`rendezvous`).

    If so, the same holds for its forward-only part: leaving out whole messages removes waits and adds none.
    """


def verify_schedule(schedule: Schedule) -> VerifiedSchedule:
    """Lower the schedule if it has no communication, and raise if it is not valid.

    `lower` raises for an invalid schedule, and the communication that it adds has no deadlock under any send
    model. A schedule with communication is validated under the strictest send model; deadlocks that our
    channels cannot have are not errors.
    """
    if all(kind.is_compute or kind.is_host_copy for kind in schedule.table.kinds):
        return VerifiedSchedule(lower(schedule), safe_with_blocking_sends=True)
    violations = validate(schedule)
    errors = [each for each in violations if not each.send_models or _PROVIDED in each.send_models]
    if errors:
        raise invalid_schedule_error(schedule, errors)
    return VerifiedSchedule(schedule, safe_with_blocking_sends=not violations)


@dataclass(frozen=True)
class ExecutionConfig:
    """The schedule, this rank's place in it, its modules, and how they run."""

    verified: VerifiedSchedule
    rank: int
    members: Sequence[int]
    """The world ranks of the pipeline's ranks."""
    device: torch.device
    timeout: timedelta
    modules: Mapping[int, nn.Module]
    """The modules of this rank's stages."""
    trained: Mapping[int, nn.Module]
    """The same with the parameters of the loss, if it has any."""
    losses: Mapping[int, LossFunction]
    """The loss of each sink, the stages that feed no other; empty without a loss."""
    functions: Mapping[Kind, CustomFunction]
    replication: ReplicaGroup
    check_finite: bool
    gradient_accumulation_fusion: bool
    mesh: DeviceMesh | None = None
    """The mesh of the pipeline, if it was given as one: DTensors may be on other slices of its root mesh."""
    state_dir: Path | None = None
    """The folder of the state files; None if there are none."""

    @property
    def schedule(self) -> Schedule:
        """The lowered schedule."""
        return self.verified.schedule

    @property
    def evaluated(self) -> list[nn.Module]:
        """The modules of this rank's stages and losses."""
        return [each for each in (*self.modules.values(), *self.losses.values()) if isinstance(each, nn.Module)]

    @property
    def is_single_rank(self) -> bool:
        """Whether the pipeline has only this rank."""
        return len(self.members) == 1


# --- the arguments of `Pipeline` -----------------------------------------------------------------------

Stages: TypeAlias = Sequence[nn.Module] | Mapping[int, nn.Module]


def resolve_schedule(
    schedule: Schedule | str | PathLike[str], stages: Stages, ranks: int, microbatches: int | None
) -> Schedule:
    """Return the schedule itself, read from a file, or built; raise if it does not fit stages and ranks."""
    if isinstance(stages, nn.Module):
        raise PipelineError(
            "`stages` is one module: give a list with a module for each stage of this rank, as [module], or "
            "the result of split()"
        )
    if not isinstance(schedule, Schedule | str | PathLike):
        raise PipelineError(
            "a schedule is the name of a family, a .csv or .json file or a Schedule "
            f"(given {type(schedule).__name__})"
        )
    if isinstance(schedule, str) and Path(schedule).suffix not in (".csv", ".json"):
        if microbatches is None:
            raise PipelineError(f'"{schedule}" is the name of a family: give microbatches= as well')
        built = _built(schedule, stages, ranks, microbatches)
        graph = _graph_for(built, stages)
        schedule = built if graph is None else built.over(graph)
    elif not isinstance(schedule, Schedule):
        schedule = read(schedule)
    _check_fit(schedule, stages, ranks, microbatches)
    return schedule


def _check_fit(schedule: Schedule, stages: Stages, ranks: int, microbatches: int | None) -> None:
    if schedule.num_ranks != ranks:
        raise PipelineError(
            f"the schedule {schedule.name} is for {plural(schedule.num_ranks, 'rank')}, "
            f"but the process group has {ranks}"
        )
    if microbatches is not None and schedule.microbatches != microbatches:
        raise PipelineError(
            f"the schedule {schedule.name} is for {plural(schedule.microbatches, 'microbatch')}, but "
            f"microbatches={microbatches} is given"
        )
    graph = _graph_for(schedule, stages)
    if graph is not None and schedule.graph != graph:
        edges = ", ".join(f"{source} -> {target}" for source, target in graph.edges)
        raise PipelineError(
            f"the stages feed each other as {edges}, but the schedule {schedule.name} is over another graph: "
            "use schedule.over(stages[0].stage_graph), or build it with graph=stages[0].stage_graph"
        )


def _graph_for(schedule: Schedule, stages: Stages) -> StageGraph | None:
    """Return the stage graph that `split` found, if it is for as many stages as the schedule has."""
    graph = split_graph(stages.values() if isinstance(stages, Mapping) else stages)
    return graph if graph is not None and graph.num_stages == schedule.num_stages else None


def _built(name: str, stages: Stages, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of a family, with the number of stages per rank that `stages` has."""
    whole_model = isinstance(stages, Mapping) and sorted(stages) == list(range(len(stages)))
    count, rest = divmod(len(stages), ranks) if whole_model and len(stages) >= ranks else (len(stages), 0)
    if rest:
        raise PipelineError(
            f"{len(stages)} stages cannot be divided evenly over {plural(ranks, 'rank')}: "
            f"give {count * ranks} or {(count + 1) * ranks}, or a Schedule with its own placement"
        )
    default = build(name, ranks=ranks, microbatches=microbatches)
    if default.num_stages == count * ranks:
        return default
    try:
        return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=count)
    except BuildError as error:
        per_rank = default.num_stages // ranks
        modules = plural(len(stages), "module is", "modules are")
        given = f"{modules} given, {count} for each rank" if whole_model else f"{modules} given for this rank"
        advice = f"split the model into {default.num_stages}" if whole_model else f"give {per_rank}"
        raise PipelineError(
            f"{name} on {plural(ranks, 'rank')} has {plural(default.num_stages, 'stage')}, {per_rank} for each "
            f"rank, but {given}: {advice}, or use another family ({error})"
        ) from error


def check_options(timeout: object, tokens: object, *, average: bool) -> None:
    """Check the options that do not depend on others."""
    if timeout is not None:
        is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
        if not is_number or not 0 < float(timeout) < timedelta.max.total_seconds():  # type: ignore[arg-type]
            given = printable(repr(timeout))
            raise PipelineError(f"timeout= must be a finite number of seconds above 0 (given {given})")
    if tokens is not None and not average:
        raise PipelineError("average=False sums the losses, but tokens= weights them for a mean: give one")


def _stages_are(stages: Sequence[int]) -> str:
    return f"stage {stages[0]} is" if len(stages) == 1 else f"stages {listed(stages)} are"


def modules_of_rank(stages: Stages, schedule: Schedule, rank: int) -> dict[int, nn.Module]:
    """Return the modules of this rank by stage."""
    own, count = schedule.placement.stages_of_rank[rank], schedule.num_stages
    if not isinstance(stages, Mapping):
        if len(stages) != len(own):
            raise PipelineError(
                f"{plural(len(stages), 'stage module is', 'stage modules are')} given, but rank {rank} has "
                f"{plural(len(own), 'stage')} of schedule {schedule.name}: stage {listed(own)}; "
                "a mapping from stage to module may contain all stages"
            )
        stages = dict(zip(own, stages))
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
    for stage in own:
        number, parts = split_metadata(stages[stage], "split_stage") or (stage, ())
        if number != stage and len(parts) == count:
            raise PipelineError(
                f"stage {number} of the model is given as stage {stage}: with {schedule.name} this rank has "
                f"stages {listed(own)}; give the whole result of split(), or [stages[i] for i in "
                "schedule.placement.stages_of_rank[rank]]"
            )
    return {stage: stages[stage] for stage in own}


def losses_by_sink(loss: object, graph: StageGraph) -> dict[int, LossFunction]:
    """Return the loss of each stage that feeds no other, given one for all of them or a mapping."""
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


def with_losses(modules: Mapping[int, nn.Module], losses: Mapping[int, object]) -> dict[int, nn.Module]:
    """Return the modules of this rank; a loss with parameters is trained together with its stage."""
    trained = dict(modules)
    for sink, loss in losses.items():
        if sink in trained and isinstance(loss, nn.Module) and _has_parameters(loss):
            trained[sink] = nn.ModuleDict({"stage": trained[sink], "loss": loss})
    return trained


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of the first parameter; the CPU if there is none."""
    first = next((parameter for module in modules for parameter in module.parameters()), torch.empty(0))
    if first.is_meta:
        raise PipelineError(
            "the modules of this rank are on the meta device: allocate and initialize them with "
            "penstock.runtime.materialize(stage), for each stage of this rank"
        )
    return first.device


def functions_by_kind(functions: Mapping[Kind | str, CustomFunction] | None) -> dict[Kind, CustomFunction]:
    """Return the user functions by kind; sends and receives can have none, because both ends must match."""
    allowed = {kind.value: kind for kind in Kind if kind.spec.other_end is None}
    by_name = {key.value if isinstance(key, Kind) else key: each for key, each in (functions or {}).items()}
    for name in by_name:
        if name not in allowed:
            raise PipelineError(f"a function cannot replace {name!r}, only {', '.join(allowed)}")
    return {allowed[name]: function for name, function in by_name.items()}


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
