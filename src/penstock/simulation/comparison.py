"""Schedules side by side under one cost model."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import MODELS

__all__ = ["Row", "compare", "row_of"]


@dataclass(frozen=True)
class Row:
    """One schedule: times in seconds, sizes in bytes; the bound is on its makespan."""

    name: str
    ranks: int
    stages: int
    microbatches: int
    makespan: float
    span: float
    period: float
    bubble: float
    bubble_by_span: float
    bubble_by_period: float
    peak_memory: float
    sent: float
    bound: float
    binding: str
    gap: float
    """How much longer than the bound, as a share of it: 0.02 is at most 2 % from the best possible."""


def compare(*schedules: Schedule, costs: Costs | None = None, sends: str = MODELS[0]) -> list[Row]:
    """One row for each schedule, in the order given."""
    return [row_of(simulate(schedule, costs, sends=sends)) for schedule in schedules]


def row_of(timeline: Timeline) -> Row:
    """What a timeline comes to."""
    schedule = timeline.schedule
    return Row(
        schedule.name,
        schedule.num_ranks,
        schedule.num_stages,
        schedule.microbatches,
        timeline.makespan,
        timeline.span,
        timeline.period,
        timeline.bubble("makespan"),
        timeline.bubble("span"),
        timeline.bubble("period"),
        max(timeline.peak_memory),
        sum(timeline.volume.values()),
        timeline.bound.seconds,
        timeline.bound.name,
        timeline.gap,
    )
