"""Schedules side by side under one cost model.

Without costs, all schedules do the same work per microbatch: the unit costs are per rank, and its v
stages share them, so F of a stage takes 1/v units and its activation is 1/v. Given costs are per stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, overload

from penstock.cost.costs import Costs
from penstock.display import Displayed
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel


@dataclass(frozen=True)
class Comparison:
    """One schedule's row, in the units that it names; the bound is on its makespan."""

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
    bound_name: str
    gap: float
    """(makespan - bound) / bound: 0.02 is at most 2 % above the best possible."""
    time_unit: str = "seconds"
    """`seconds` or `units`."""
    memory_unit: str = "bytes"
    """`bytes` or `activations`."""
    work: float = 0.0
    """Compute of all ranks."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparisons(Displayed, Sequence[Comparison]):
    """The rows of several schedules, in the order given, with their timelines."""

    timelines: tuple[Timeline, ...]

    @cached_property
    def rows(self) -> tuple[Comparison, ...]:
        """One per timeline."""
        return tuple(map(comparison_of, self.timelines))

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | Sequence[Comparison]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.timelines)

    def __repr__(self) -> str:
        return repr(self.rows)

    def to_rows(self) -> list[dict[str, Any]]:
        """One dict per schedule."""
        return [asdict(row) for row in self.rows]


def compare(
    *schedules: Schedule, costs: Costs | None = None, send_model: SendModel | str = SendModel.BUFFERED
) -> Comparisons:
    """One row for each schedule, in the order given; without costs, all do the same work for a microbatch."""
    priced = ((each, rank_costs(each) if costs is None else costs) for each in schedules)
    return Comparisons(
        tuple(simulate(each, own, send_model=send_model, with_period=True) for each, own in priced)
    )


def rank_costs(schedule: Schedule) -> Costs:
    """Unit costs of a rank, shared by its stages."""
    stages = schedule.num_stages / schedule.num_ranks
    return Costs() if stages == 1 else Costs().shared_by(stages)


def comparison_of(timeline: Timeline) -> Comparison:
    """The row of a timeline with a period."""
    schedule = timeline.schedule
    bubble_by_period = timeline.bubble("period")
    assert timeline.period is not None, "the bubble by period needs it too"
    return Comparison(
        schedule.name,
        schedule.num_ranks,
        schedule.num_stages,
        schedule.microbatches,
        timeline.makespan,
        timeline.span,
        timeline.period,
        timeline.bubble("makespan"),
        timeline.bubble("span"),
        bubble_by_period,
        max(timeline.peak_memory),
        sum(timeline.volume.values()),
        timeline.bound.seconds,
        timeline.bound.name,
        timeline.gap,
        timeline.costs.units.time_name,
        timeline.costs.units.memory_name,
        sum(timeline.busy),
    )
