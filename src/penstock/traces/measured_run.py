"""A measured run: its steps as timelines on one clock, the schedule they follow, and the costs they give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.cost.costs import Costs
from penstock.errors import ScheduleError
from penstock.ir.kinds import PASS_KINDS
from penstock.ir.schedule import Schedule
from penstock.recognition import Recognition, recognize
from penstock.simulation.calibration import calibrate
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.clocks import ClockAlignment

if TYPE_CHECKING:
    from penstock.search import OnProgress, SearchResult


def median_step(timelines: Sequence[Timeline]) -> int:
    """The number of the timeline of median makespan."""
    ordered = sorted(range(len(timelines)), key=lambda index: timelines[index].makespan)
    return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """The complete steps of a run that was traced; `step` is the one that is shown."""

    timelines: tuple[Timeline, ...]
    """All complete steps, in order."""
    step: int
    """The number of the chosen one: the one of median makespan unless given."""
    clocks: ClockAlignment
    sources: tuple[str, ...]
    """The file of each rank."""
    replica: int = 0
    """The number of this pipeline among those of the job."""
    replicas: tuple[float, ...] = ()
    """The median makespan of each pipeline, if the files had several."""

    @property
    def timeline(self) -> Timeline:
        """The chosen step; its costs are those of all steps."""
        return replace(self.timelines[self.step], costs=self.costs)

    @property
    def median_step(self) -> int:
        """The number of the step of median makespan."""
        return median_step(self.timelines)

    @property
    def schedule(self) -> Schedule:
        """The order that the ranks executed in the chosen step."""
        return self.timelines[self.step].schedule

    @cached_property
    def recognition(self) -> Recognition:
        """The family of the schedule, or the nearest family and the first difference."""
        return recognize(self.schedule)

    @property
    def alike(self) -> Sequence[Timeline]:
        """All steps with the schedule of the chosen one."""
        return [each for each in self.timelines if each.schedule == self.schedule]

    @cached_property
    def costs(self) -> Costs:
        """The mean costs of these steps."""
        return calibrate(self.alike, Costs())

    @cached_property
    def predicted(self) -> Timeline:
        """The same schedule, simulated at these costs."""
        try:
            return simulate(self.schedule, self.costs, with_period=True)
        except ScheduleError:  # messages or sharding that our rules refuse; compute is valid
            compute = self.schedule.only(PASS_KINDS)
            return simulate(compute, self.costs, with_period=True)

    @cached_property
    def live(self) -> int:
        """The most activations that a rank holds at once, each of one stage and microbatch."""
        return round(max(float(memory.activations.max(initial=0.0)) for memory in self.predicted.memory))

    def search(self, seconds: float = 10.0, on_progress: OnProgress | None = None) -> SearchResult:
        """The best order at these costs on this placement with as many live activations."""
        from penstock.search import search  # noqa: PLC0415 -- compiled code takes a second to load

        schedule = self.schedule
        return search(
            ranks=schedule.num_ranks,
            microbatches=schedule.microbatches,
            costs=self.costs,
            stages_per_rank=[len(own) for own in schedule.placement.stages_of_rank],
            placement=schedule.placement,
            live_limit=self.live,
            seconds=seconds,
            on_progress=on_progress,
            graph=None if schedule.graph.is_chain else schedule.graph,
        )
