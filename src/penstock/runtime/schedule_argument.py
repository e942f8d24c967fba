"""The `schedule=` argument of a `Pipeline`: a family, a file or a `Schedule` that fits stages and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from torch import nn

from penstock.arguments import plural
from penstock.errors import BuildError, PipelineError
from penstock.families import build
from penstock.formats import read
from penstock.ir.graph import StageGraph
from penstock.ir.schedule import Schedule
from penstock.runtime.data_parallel.wrappers import split_graph

__all__ = ["resolve_schedule"]


def resolve_schedule(
    schedule: Schedule | str | PathLike[str],
    stages: Sequence[nn.Module] | Mapping[int, nn.Module],
    ranks: int,
    microbatches: int | None,
) -> Schedule:
    """The schedule of a `schedule=` argument: itself, read from a file, or built; raises if it does not fit."""
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


def _check_fit(
    schedule: Schedule,
    stages: Sequence[nn.Module] | Mapping[int, nn.Module],
    ranks: int,
    microbatches: int | None,
) -> None:
    """Raise if the schedule is for other ranks, other microbatches or another stage graph."""
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


def _graph_for(schedule: Schedule, stages: Sequence[nn.Module] | Mapping[int, nn.Module]) -> StageGraph | None:
    """The stage graph that `split` found, if it is for as many stages as the schedule has."""
    graph = split_graph(stages.values() if isinstance(stages, Mapping) else stages)
    return graph if graph is not None and graph.num_stages == schedule.num_stages else None


def _built(
    name: str, stages: Sequence[nn.Module] | Mapping[int, nn.Module], ranks: int, microbatches: int
) -> Schedule:
    """The schedule of a family, with the number of stages per rank that `stages` has."""
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
