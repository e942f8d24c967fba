"""Schedules of candidates, each built once, with what their ranks hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.cost.costs import Costs
from penstock.cost.memory import LiveActivations, live_activations
from penstock.cost.prices import edge_prices
from penstock.errors import BuildError
from penstock.families import build
from penstock.ir.schedule import Schedule
from penstock.simulation.simulator import Simulator
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel


@dataclass(frozen=True, eq=False)
class BuiltSchedule:
    """A schedule with what its ranks hold."""

    schedule: Schedule
    live: list[LiveActivations]

    def simulated(self, costs: Costs) -> Timeline:
        """With messages that take their time but do not queue: families are valid, and this is fast."""
        total = edge_prices(costs, self.schedule.graph, "activation").total
        unqueued = replace(costs, bandwidth=None, latency=tuple(total.tolist()) or 0.0)
        simulator = Simulator(self.schedule, unqueued, SendModel.BUFFERED)
        return Timeline(self.schedule, unqueued, *simulator.times(simulator.finished_run()))


class BuiltSchedules:
    """Builds each schedule once."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, int, int, int], BuiltSchedule | None] = {}

    def get(self, family: str, ranks: int, microbatches: int, stages_per_rank: int) -> BuiltSchedule | None:
        """The schedule of a family; None if it has none for these numbers."""
        key = (family, ranks, microbatches, stages_per_rank)
        if key not in self._built:
            try:
                schedule = build(
                    family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
                )
                self._built[key] = BuiltSchedule(schedule, live_activations(schedule.table))
            except BuildError:
                self._built[key] = None
        return self._built[key]
