"""Ready steps: of the work that is not in a schedule yet, what each rank could run after its last step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from penstock.cost.costs import Costs
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.web.unfinished import lay_out

__all__ = ["ready_steps"]

_MOST_STEPS = 4000


def ready_steps(schedule: Schedule, costs: Costs, *, split: bool | None = None) -> list[dict[str, Any]]:
    """The next step of each stage and kind whose inputs are in the schedule, with its earliest start.

    Backwards are I and W, or B, as in the schedule or as `split` says; both are offered if it has neither yet.
    """
    if schedule.num_steps > _MOST_STEPS:
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
    latency = costs.per_edge("latency", len(schedule.graph.edges))
    found = []
    for kind, stage, k, inputs in _next_steps(schedule, ends, backwards):
        rank = schedule.placement.stage_to_rank[stage]
        arrivals = [
            ends[need] + (latency[_edge(schedule, need[1], stage)] if _crosses(schedule, need[1], stage) else 0)
            for need in inputs
        ]
        found.append({"rank": rank, "text": f"{stage}{kind}{k}", "start": max([free[rank], *arrivals])})
    return found


def _backwards(schedule: Schedule) -> tuple[str, ...]:
    """The kinds that begin a backward in this schedule."""
    used = [kind.value for kind in (Kind.B, Kind.I) if schedule.table.has(kind)]
    return tuple(used) or ("B", "I")


def _next_steps(
    schedule: Schedule, ends: dict[tuple[str, int, int], float], backwards: tuple[str, ...]
) -> Iterator[tuple[str, int, int, list[tuple[str, int, int]]]]:
    """Of each stage and kind, the first microbatch that is missing, if what it needs is there."""
    graph = schedule.graph
    for stage in range(schedule.num_stages):
        needs = {"F": [("F", other) for other in graph.inputs(stage)]}
        for kind in backwards:
            needs[kind] = [("F", stage), *(("I", other) for other in graph.outputs(stage))]
        if "I" in backwards:
            needs["W"] = [("I", stage)]
        for kind, inputs in needs.items():
            done = {"B": "I"}.get(kind, kind)
            for k in range(schedule.microbatches):
                if (done, stage, k) in ends:
                    continue
                wanted = [(name, other, k) for name, other in inputs]
                if all(need in ends for need in wanted):
                    yield kind, stage, k, wanted
                break


def _crosses(schedule: Schedule, stage: int, other: int) -> bool:
    placed = schedule.placement.stage_to_rank
    return placed[stage] != placed[other]


def _edge(schedule: Schedule, stage: int, other: int) -> int:
    number = schedule.graph.number
    return number[stage, other] if (stage, other) in number else number[other, stage]
