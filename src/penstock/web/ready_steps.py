"""Ready steps: of the work that is not in a schedule yet, what each rank could run after its last step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import edge_prices
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind, StageRelation
from penstock.ir.messages import VALUES
from penstock.ir.schedule import Schedule
from penstock.web.unfinished import lay_out

_MAX_STEPS = 4000


def ready_steps(schedule: Schedule, costs: Costs, *, split: bool | None = None) -> list[dict[str, Any]]:
    """The next step of each stage and kind whose inputs are in the schedule, with its earliest start.

    Backwards are I and W, or B, as in the schedule or as `split` says; both are offered if it has neither yet.
    """
    if schedule.num_steps > _MAX_STEPS:
        return []
    backwards = _backwards(schedule) if split is None else ("I" if split else "B",)
    timeline = lay_out(schedule, costs).timeline
    ends = {
        (part.kind.value, part.stage, part.microbatch or 0): event.end
        for event in timeline.events
        for part in event.step.parts
    }
    whole = [(stage, k, end) for (kind, stage, k), end in ends.items() if kind == "B"]
    ends |= {(half, stage, k): end for stage, k, end in whole for half in "IW"}
    bounds = schedule.table.slot_bounds.tolist()
    free = [float(timeline.end[a:b].max(initial=0)) for a, b in pairwise(bounds)]
    seconds = _message_seconds(schedule, costs)
    found = []
    for kind, stage, k, inputs in _next_steps(schedule, ends, backwards):
        rank = schedule.placement.stage_to_rank[stage]
        arrivals = [ends[need] + seconds.get((need[1], stage), 0.0) for need in inputs]
        found.append({"rank": rank, "text": f"{stage}{kind}{k}", "start": max([free[rank], *arrivals])})
    return found


def _message_seconds(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], float]:
    """By the stages that make and use a value: seconds of the message, if they are on different ranks."""
    found = {}
    for value in VALUES:
        prices = edge_prices(costs, schedule.graph, value).total.tolist()
        for number in np.flatnonzero(schedule.table.crosses_ranks).tolist():
            source, target = schedule.graph.edges[number]
            found[(source, target) if value == "activation" else (target, source)] = prices[number]
    return found


def _backwards(schedule: Schedule) -> tuple[str, ...]:
    """The kinds that begin a backward in this schedule."""
    used = [kind.value for kind in (Kind.B, Kind.I) if schedule.table.has(kind)]
    return tuple(used) or ("B", "I")


def _next_steps(
    schedule: Schedule, ends: dict[tuple[str, int, int], float], backwards: tuple[str, ...]
) -> Iterator[tuple[str, int, int, list[tuple[str, int, int]]]]:
    """Of each stage and kind, the first microbatch that is missing, if what it needs is there."""
    kinds = ("F", *backwards, *(("W",) if "I" in backwards else ()))
    for stage in range(schedule.num_stages):
        for kind in kinds:
            done = {"B": "I"}.get(kind, kind)
            for k in range(schedule.microbatches):
                if (done, stage, k) in ends:
                    continue
                wanted = [(name, other, k) for name, other in _needs(schedule.graph, Kind(kind), stage)]
                if all(need in ends for need in wanted):
                    yield kind, stage, k, wanted
                break


def _needs(graph: StageGraph, kind: Kind, stage: int) -> list[tuple[str, int]]:
    """The passes that an action of this kind needs, and their stages; I stands for B too."""
    stages = {
        StageRelation.SAME: (stage,),
        StageRelation.INPUTS: graph.inputs(stage),
        StageRelation.OUTPUTS: graph.outputs(stage),
    }
    passes = [need for need in kind.spec.needs if Kind(need.kinds[0]) in PASS_KINDS]
    return [(need.kinds[0], other) for need in passes for other in stages[need.stages]]
