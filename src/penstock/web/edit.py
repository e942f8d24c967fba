"""The editor: the verdict on an edited schedule, its timeline as far as it runs, and what could run next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.arguments import printable
from penstock.cost.costs import Costs
from penstock.cost.prices import edge_prices, step_seconds
from penstock.errors import FormatError
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import Bools
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind, StageRelation
from penstock.ir.messages import VALUES
from penstock.ir.schedule import Schedule
from penstock.service import check_record
from penstock.simulation.simulator import message_waits, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel, validate
from penstock.view.html import page_data
from penstock.web.answers import REQUEST, DrawRequest, parse_request, row_of, steps_of, timeline_of

# Times of a schedule that cannot run to its end: what could run, and the rest as if its waits were met.
#
# The editor draws every schedule, also one with a deadlock or with missing steps. A step that waits for
# something that never comes is `blocked`; to place it and what follows, it starts as soon as its rank reaches
# it.


@dataclass(frozen=True, eq=False)
class Unfinished:
    """A timeline of an invalid schedule, and what cannot really run."""

    timeline: Timeline
    blocked: tuple[int, ...]
    """The slots that wait for ever, in the order in which ranks get stuck."""
    reached: Bools
    """Per slot: whether it really runs."""


def lay_out(schedule: Schedule, costs: Costs) -> Unfinished:
    """Run the schedule; whenever all ranks are stuck, drop the waits of the steps they are stuck at."""
    table = schedule.table
    durations = step_seconds(table, costs).tolist()
    producer, consumer, lag = message_waits(schedule, costs)
    starts = [0.0] * schedule.num_ranks
    blocked: list[int] = []
    reached: Bools | None = None
    while True:
        inputs = Inputs.of(schedule.num_steps, producer, consumer, lag)
        run = run_dataflow(table, inputs, durations, starts)
        reached = run.ends >= 0 if reached is None else reached
        if not run.stuck:
            break
        stuck = np.array(sorted(run.stuck.values()), dtype=np.int64)
        blocked += stuck.tolist()
        kept = ~(np.isin(consumer, stuck) & (run.ends[producer] < 0))
        producer, consumer, lag = producer[kept], consumer[kept], lag[kept]
    begun = run.ends - np.array(durations, dtype=np.float64)
    return Unfinished(Timeline(schedule, costs, begun, run.ends), tuple(blocked), reached)


# Ready steps: of the work that is not in a schedule yet, what each rank could run after its last step.

_MAX_READY = 4000


def ready_steps(schedule: Schedule, costs: Costs, *, split: bool | None = None) -> list[dict[str, Any]]:
    """The next step of each stage and kind whose inputs are in the schedule, with its earliest start.

    Backwards are I and W, or B, as in the schedule or as `split` says; both are offered if it has neither yet.
    """
    if schedule.num_steps > _MAX_READY:
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


_SHOWN_VIOLATIONS = 8


def edit(document: object) -> dict[str, Any]:
    """The verdict on one schedule, and what to draw of it, valid or not."""
    request = parse_request(document, {"split": (bool,)})
    schedule = request.schedule(0)
    costs = request.costs_for(schedule)
    costs.check_lengths(schedule.graph, schedule.num_ranks)
    violations = validate(schedule, max(request.send_model, SendModel.RENDEZVOUS))
    verdict = check_record(schedule, violations)
    count = len(verdict["violations"])
    verdict |= {"violations": verdict["violations"][:_SHOWN_VIOLATIONS], "count": count}
    return {
        "verdict": verdict,
        "text": [str(violation) for violation in violations[:_SHOWN_VIOLATIONS]],
        "stage_to_rank": schedule.placement.stage_to_rank,
        "microbatches": schedule.microbatches,
        "steps": steps_of(schedule),
        "ready": ready_steps(schedule, costs, split=request.extra["split"]),
        "costs": costs.to_keys(),
        **_drawing(request, schedule, costs, valid=not violations),
    }


def _drawing(request: DrawRequest, schedule: Schedule, costs: Costs, *, valid: bool) -> dict[str, Any]:
    if valid:
        timeline = simulate(schedule, costs, send_model=request.send_model, with_period=True)
        return {"data": page_data([timeline]), "row": row_of(timeline, request.memory_limit), "blocked": []}
    found = lay_out(schedule, costs)
    data = page_data([found.timeline], explained=False)
    return {
        "data": data,
        "row": None,
        "blocked": list(found.blocked),
        "unreached": [int(slot) for slot, there in enumerate(found.reached.tolist()) if not there],
    }


def stamp(document: object) -> dict[str, Any]:
    """Repeat the steps of one microbatch for all microbatches, `interval` seconds apart.

    The steps of that microbatch, at their times, are the building block; each rank does what is stamped in
    order of time.
    """
    request = parse_request(document, {"microbatch": (int,), "interval": (int, float)})
    timeline = timeline_of(request, 0)
    chosen, interval = request.extra["microbatch"] or 0, request.extra["interval"] or 0
    schedule = timeline.schedule
    if not 0 <= chosen < schedule.microbatches or not 0 < interval <= 1e18:
        rule = f"microbatch: from 0 to {schedule.microbatches - 1}; interval: above 0 and at most 1e18"
        raise FormatError(REQUEST, [f"{rule} (given {printable(str(chosen))}, {printable(str(interval))})"])
    if schedule.level != "compute" or schedule.table.has_pairs:
        raise FormatError(REQUEST, ["stamp: a building block has F, B, I and W only"])
    rows: list[list[str]] = []
    for rank, steps in enumerate(schedule.ranks):
        first = int(schedule.table.slot_bounds[rank])
        block = [
            (float(timeline.start[first + i]), part)
            for i, step in enumerate(steps)
            for part in step.parts
            if part.microbatch == chosen
        ]
        stamped = [
            (start + copy * interval, copy, f"{part.stage}{part.kind.value}{copy}")
            for copy in range(schedule.microbatches)
            for start, part in block
        ]
        rows.append([text for _, _, text in sorted(stamped, key=lambda each: each[:2])])
    return {
        "steps": rows,
        "stage_to_rank": schedule.placement.stage_to_rank,
        "microbatches": schedule.microbatches,
    }
