"""Answers about schedules under one cost model: the timelines to draw, and the row of each in the table."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from penstock.cost.memory import exceeds
from penstock.errors import PenstockError
from penstock.ir.schedule import Schedule
from penstock.records import QUANTILES
from penstock.simulation.comparison import comparison_of
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.view.html import page_data
from penstock.web.request import DrawRequest, expect, parse_costs, parse_request
from penstock.web.what_if import WhatIf


def timeline_of(request: DrawRequest, index: int) -> Timeline:
    """One simulated schedule of a request, with its period."""
    schedule = request.schedule(index)
    costs = request.costs_for(schedule)
    return simulate(schedule, costs, send_model=request.send_model, with_period=True)


def row_of(timeline: Timeline, memory_limit: float | None) -> dict[str, Any]:
    """The row of `compare`, the reason of its bound, and whether it fits."""
    peak = max(timeline.peak_memory)
    return asdict(comparison_of(timeline)) | {
        "because": timeline.bound.because,
        "peak_memory_by_rank": timeline.peak_memory,
        "fits": memory_limit is None or not exceeds(peak, memory_limit),
    }


def compare(document: object) -> dict[str, Any]:
    """Draw several schedules on one time axis; one that cannot be built has an error instead of a row."""
    request = parse_request(document, {"what_if": (dict,)})
    change = WhatIf.parse(request.extra["what_if"])
    timelines: list[Timeline] = []
    entries: list[dict[str, Any]] = []
    for index in range(len(request.schedules)):
        try:
            entry, timeline = _entry(request, index, change)
        except PenstockError as error:
            entries.append({"error": str(error)})
            continue
        entries.append({"panel": len(timelines), **entry})
        timelines.append(timeline)
    limit = request.memory_limit if change is None else change.memory(request.memory_limit)
    return {
        "schedules": entries,
        "data": page_data(timelines),
        "memory_limit": limit,
        "what_if": None if change is None else str(change),
    }


def units(document: object) -> dict[str, Any]:
    """The units of times and sizes at these costs, as in a row."""
    given = parse_costs(expect(document, {"costs": (dict,)}).get("costs") or {}).units
    return {"row": {"time_unit": given.time_name, "memory_unit": given.memory_name}}


def _entry(request: DrawRequest, index: int, change: WhatIf | None) -> tuple[dict[str, Any], Timeline]:
    timeline = timeline_of(request, index)
    before = None
    if change is not None:
        before = row_of(timeline, request.memory_limit)
        changed = change.schedule(request, index, timeline.schedule)
        units = timeline.costs.units
        costs = replace(
            change.costs(request.costs_for(changed), changed),
            time_unit=units.time_name,
            memory_unit=units.memory_name,
        )
        timeline = simulate(changed, costs, send_model=request.send_model, with_period=True)
    limit = request.memory_limit if change is None else change.memory(request.memory_limit)
    entry = {
        "row": row_of(timeline, limit),
        "before": before,
        "costs": timeline.costs.to_keys(),
        "level": timeline.schedule.level,
        "stage_to_rank": timeline.schedule.placement.stage_to_rank,
        "steps": steps_of(timeline.schedule),
    }
    return entry, timeline


_MAX_EDITED = 4000
"""Steps of a schedule that is sent as texts too, to be edited."""


def steps_of(schedule: Schedule) -> list[list[str]] | None:
    """The texts of all steps, unless there are too many to edit."""
    if schedule.num_steps > _MAX_EDITED:
        return None
    return [schedule.texts(rank) for rank in range(schedule.num_ranks)]


def robustness(document: object) -> dict[str, Any]:
    """Quantiles of the makespan of each schedule when every step varies by `jitter`."""
    request = parse_request(document)
    found: list[dict[str, float] | None] = []
    for index in range(len(request.schedules)):
        try:
            schedule = request.schedule(index)
            runs = simulate_with_jitter(
                schedule,
                request.costs_for(schedule),
                jitter=request.jitter or 0.0,
                send_model=request.send_model,
            )
        except PenstockError:
            found.append(None)  # `compare` says why
            continue
        found.append({f"p{q}": runs.quantile(q / 100) for q in QUANTILES})
    return {"quantiles": found}
