"""The editor: the verdict on an edited schedule, its timeline as far as it runs, and what could run next."""

from __future__ import annotations

from typing import Any

from penstock.arguments import printable
from penstock.cost.costs import Costs
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.records import check_record
from penstock.simulation.simulator import simulate
from penstock.validation import SendModel, validate
from penstock.view.html import page_data
from penstock.web.answers import row_of, steps_of, timeline_of
from penstock.web.ready_steps import ready_steps
from penstock.web.request import SOURCE, DrawRequest, parse_request
from penstock.web.unfinished import lay_out

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
        raise FormatError(SOURCE, [f"{rule} (given {printable(str(chosen))}, {printable(str(interval))})"])
    if schedule.level != "compute" or schedule.table.has_pairs:
        raise FormatError(SOURCE, ["stamp: a building block has F, B, I and W only"])
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
