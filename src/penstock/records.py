"""Results as JSON records: what `--json` prints, and what the playground answers."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.recognition import Recognition, recognize
from penstock.search import SearchResult
from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.comparison import comparison_of
from penstock.simulation.gaps import REASONS, Gaps, critical_path, gaps
from penstock.simulation.timeline import Timeline
from penstock.traces.measured_run import MeasuredRun
from penstock.validation import Violations

QUANTILES = (5, 50, 95)
"""Percentiles of the makespan under jitter."""
_MAX_RECOGNIZED = 100_000
"""Actions; families with a search of their own take seconds to build beyond it."""


def simulation_record(
    timeline: Timeline, idle: Gaps, quantiles: dict[str, float] | None, *, streamed: bool = False
) -> dict[str, Any]:
    """A simulated timeline with a period: times, memory, causes of idle time.

    With `streamed`, the gaps, of which there can be very many, are an iterator.
    """
    return asdict(comparison_of(timeline)) | {
        "busy": timeline.busy,
        "idle": timeline.idle,
        "exposed_all_to_all": timeline.exposed_all_to_all,
        "peak_memory_by_rank": timeline.peak_memory,
        "collectives": collectives_of(timeline),
        "critical_path": [str(event.step) for event in critical_path(timeline)],
        "gaps": idle.records() if streamed else list(idle.records()),
        "jitter": quantiles,
    }


def collectives_of(timeline: Timeline) -> dict[str, int]:
    """How many there are of each kind; empty without any."""
    table = timeline.schedule.table
    counts = {kind.value: int(table.of_kind(kind).sum()) for kind in Kind if kind.is_collective}
    return {name: count for name, count in counts.items() if count}


def order_of(schedule: Schedule) -> Recognition | str:
    """Which family's order this is, or why it was not compared."""
    if len(schedule.table.code) > _MAX_RECOGNIZED:
        return f"not compared with families: more than {_MAX_RECOGNIZED:,} actions"
    return recognize(schedule)


def check_record(schedule: Schedule, violations: Violations) -> dict[str, Any]:
    """The verdict of the validator."""
    order = None if violations else order_of(schedule)
    return {
        "valid": not violations,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "level": schedule.level,
        "order": asdict(order) if isinstance(order, Recognition) else None,
        "violations": violations.to_rows(),
    }


def run_record(run: MeasuredRun, found: SearchResult | None) -> dict[str, Any]:
    """A run that was traced: its order, times, causes of idle time, costs, and what a search found."""
    timeline, order = run.timeline, order_of(run.schedule)
    idle = gaps(timeline)
    clocks = run.clocks
    return {
        "files": list(run.sources),
        "ranks": run.schedule.num_ranks,
        "stages": run.schedule.num_stages,
        "microbatches": run.schedule.microbatches,
        "order": asdict(order) if isinstance(order, Recognition) else None,
        "steps": [each.makespan for each in run.timelines],
        "step": run.step,
        "replica": run.replica,
        "replicas": list(run.replicas),
        "period": timeline.period,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_rate,
        "busy": list(timeline.busy),
        "idle_by_reason": idle_by_reason(idle),
        "clocks": {
            "offsets": list(clocks.offsets),
            "uncertainty": [each if math.isfinite(each) else None for each in clocks.uncertainty],
            "residual": clocks.residual,
            "drift": list(clocks.drift),
            "shared_clock": clocks.shared_clock,
        },
        "costs": run.costs.to_keys(),
        "predicted": [
            {"kind": row.kind, "predicted": row.predicted, "measured": row.measured, "error": row.error}
            for row in errors_by_kind(run.predicted, run.alike)
        ],
        "search": None if found is None else search_record(found) | _saving(run, found),
    }


def _saving(run: MeasuredRun, found: SearchResult) -> dict[str, Any]:
    """What the order found saves of the prediction for the one that ran, with as many live activations."""
    return {"saved": 1 - found.value / run.predicted.makespan, "live_limit": run.live}


def idle_by_reason(idle: Gaps) -> dict[str, float]:
    """Seconds of all ranks together, longest first."""
    seconds = dict(zip(REASONS, idle.seconds_by_rank.sum(axis=0).tolist()))
    return dict(sorted(((name, each) for name, each in seconds.items() if each), key=lambda item: -item[1]))


def search_record(result: SearchResult) -> dict[str, Any]:
    """The best schedule of a search, with its certificate."""
    return {
        "objective": result.objective,
        "value": result.value,
        "bound": result.bound.seconds,
        "binding": result.bound.name,
        "because": result.bound.because,
        "gap": result.gap if math.isfinite(result.gap) else None,
        "proved": result.proved,
        "found_by": result.found_by,
        "peak_memory": max(result.timeline.peak_memory),
        "placement": result.schedule.placement.style,
        "quantile": result.quantile,
        "time_unit": result.timeline.costs.units.time_name,
        "memory_unit": result.timeline.costs.units.memory_name,
        "families": dict(result.families),
        "too_large": dict(result.too_large),
        "skipped": list(result.skipped),
        "runs": result.runs,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "missing": list(result.missing),
        "schedule": [result.schedule.texts(rank) for rank in range(result.schedule.num_ranks)],
    }
