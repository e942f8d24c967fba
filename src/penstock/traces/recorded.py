"""What a trace says about one rank, and which ranks of a job are replicas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ir.action import Step

# What a trace says about one rank: its actions in order, with times of the rank's own clock.


class Recorded(NamedTuple):
    """One action with its times in nanoseconds."""

    step: Step
    start: int
    end: int
    exact: bool = True
    """Whether `start` is that of its own work; if not, it may have waited for a message first."""


@dataclass
class RankTrace:
    """The actions of one rank in the order of its list."""

    source: str
    """The name of the file."""
    rank: int | None
    """The rank in the job, if the file says so."""
    host: str
    """The machine: ranks of one machine have one clock. Empty if unknown."""
    pipeline: tuple[int, ...] = ()
    """The ranks of its pipeline, if the file names its process groups."""
    recorded: list[Recorded] = field(default_factory=list)
    single_stage: bool = False
    """Whether its actions name no stage: then each rank has one, in the order of the ranks."""
    numbered_through: bool = False
    """Whether microbatches are numbered through all steps, because nothing tells where a step begins."""
    timeline: str = ""
    """The name of the timeline, in a file with several."""


# Pipelines among the traces of a job: data-parallel replicas, and tensor-parallel ranks, have the same stages.
#
# The pipeline of a file is the process group for pipeline parallelism that it names, as torch's DeviceMesh
# calls it (`mesh_pp`). Without one, the files with the same stages are one of each pipeline, in the order of
# ranks: so it is whether the ranks of a pipeline are neighbours or far apart.


_PIPELINE = re.compile(r"(.*[^a-z])?(pp|pipe|pipeline([_ -]?(model[_ -]?)?parallel)?)", re.IGNORECASE)


def pipeline_group(info: object) -> tuple[int, ...]:
    """The ranks of the group for pipeline parallelism in the `distributedInfo` of a trace; none if unknown."""
    groups = info.get("pg_config") if isinstance(info, dict) else None
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and _PIPELINE.fullmatch(str(group.get("pg_desc"))):
            ranks = group.get("ranks")  # an empty list stands for all ranks, which are then one pipeline
            if isinstance(ranks, list) and all(type(each) is int and each >= 0 for each in ranks):
                return tuple(ranks)
    return ()


def pipelines(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """The traces of each pipeline; all as one if they cannot be several."""
    ranks = [trace.rank for trace in traces]
    if None in ranks or len(set(ranks)) < len(ranks):
        return [list(traces)]
    if all(trace.rank in trace.pipeline for trace in traces):
        groups = {trace.pipeline: None for trace in traces}
        return [[trace for trace in traces if trace.pipeline == group] for group in groups]
    alike: dict[frozenset[int], list[RankTrace]] = {}
    for trace in traces:
        stages = frozenset(part.stage for each in trace.recorded for part in each.step.parts)
        alike.setdefault(stages, []).append(trace)
    counts = {len(each) for each in alike.values()}
    shared = sum(map(len, alike)) > len(frozenset().union(*alike))
    if len(counts) > 1 or shared or any(trace.single_stage for trace in traces):
        return [list(traces)]
    return [sorted(each, key=lambda trace: trace.rank or 0) for each in zip(*alike.values())]
