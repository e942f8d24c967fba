"""A schedule with times: what happened when, what it cost, how much memory it held. Plain data.

Three lengths are called "the time of a step", and each has its bubble:

    makespan  from time 0 to the last end on any rank
    span      the longest time from a rank's own first start to its own last end
    period    what one more iteration takes when iterations follow each other

A timeline is simulated (`penstock.simulate`) or measured (`penstock.runtime`, `Pipeline.profile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.bounds import OBJECTIVES, Bound, bounds_of
from penstock.cost.memory import Memory, memory_over_time
from penstock.cost.prices import exposed_all_to_all
from penstock.display import Displayed
from penstock.errors import CostsError
from penstock.ir.action import Step
from penstock.ir.table import Bools
from penstock.simulation.timed_messages import Message, TimedMessages

__all__ = ["Event", "Memory", "Message", "Timeline"]


@dataclass(frozen=True)
class Event:
    """One step of a rank: `slot` is its number through all ranks, `index` its place in the rank's list."""

    slot: int
    rank: int
    index: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline(Displayed, TimedMessages):
    """Start and end of every slot of a schedule, simulated or measured, and what follows from them."""

    period: float | None = None
    """What one more iteration takes, optimizer step included.

    Simulated: `simulate(..., with_period=True)`. Measured: from consecutive steps. None where neither is known.
    """

    def __repr__(self) -> str:
        units = self.costs.units
        return (
            f"<Timeline {self.schedule.name}: makespan {units.time(self.makespan)}, {self.bubble():.1%} idle, "
            f"peak memory {units.memory(max(self.peak_memory, default=0.0))}>"
        )

    # --- times -------------------------------------------------------------------------------------

    @property
    def is_compute(self) -> Bools:
        """Per slot: whether it occupies the compute stream."""
        return self.schedule.table.is_compute_slot

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end of anything."""
        return float(self.end.max(initial=0))

    @cached_property
    def span(self) -> float:
        """The longest time from a rank's first start of compute to its last end."""
        return max((end - start for start, end in self._extents), default=0.0)

    @cached_property
    def _extents(self) -> list[tuple[float, float]]:
        extents = []
        for first, last in pairwise(self.schedule.table.slot_bounds.tolist()):
            own = np.arange(first, last)[self.is_compute[first:last]]
            extents.append(
                (float(self.start[own].min()), float(self.end[own].max())) if own.size else (0.0, 0.0)
            )
        return extents

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank: seconds of compute."""
        seconds = np.where(self.is_compute, self.end - self.start, 0)
        return tuple(np.bincount(self.schedule.table.rank, seconds, self.schedule.num_ranks).tolist())

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per rank: seconds of the makespan without compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def exposed_all_to_all(self) -> tuple[float, ...]:
        """Per rank: seconds, by the costs, in which only the all-to-all stream works; they count as busy."""
        seconds = exposed_all_to_all(self.schedule.table, self.costs)
        return tuple(np.bincount(self.schedule.table.rank, seconds, self.schedule.num_ranks).tolist())

    def length(self, by: str = "makespan") -> float:
        """The `makespan`, `span` or `period`."""
        if by not in OBJECTIVES:
            raise CostsError(f"the length of a timeline is its makespan, span or period (given {by!r})")
        seconds: float | None = getattr(self, by)
        if seconds is None:
            raise CostsError(
                "the period of this timeline is unknown: simulate(..., with_period=True), or profile two or "
                "more consecutive steps"
            )
        return seconds

    def bubble(self, by: str = "makespan") -> float:
        """The share of `makespan`, `span` or `period` in which a rank does not compute, on average."""
        whole = self.length(by)
        return 1 - sum(self.busy) / len(self.busy) / whole if whole else 0.0

    @property
    def bubble_rate(self) -> float:
        """The bubble by makespan."""
        return self.bubble()

    @cached_property
    def bound(self) -> Bound:
        """The greatest lower bound on the makespan of the same work in any order."""
        return bounds_of(self.schedule, self.costs)[0]

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a share of it; 0 is a proof that nothing is faster."""
        return self.bound.gap(self.makespan)

    # --- steps -------------------------------------------------------------------------------------

    def event(self, slot: int) -> Event:
        """One slot with its step."""
        table = self.schedule.table
        rank = int(table.rank[slot])
        index = slot - int(table.slot_bounds[rank])
        step = self.schedule.step_of_slot(slot)
        return Event(slot, rank, index, step, float(self.start[slot]), float(self.end[slot]))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every slot, rank by rank in the order of the lists."""
        bounds = self.schedule.table.slot_bounds.tolist()
        times = list(zip(self.start.tolist(), self.end.tolist()))
        return tuple(
            Event(first + index, rank, index, step, *times[first + index])
            for rank, (first, steps) in enumerate(zip(bounds, self.schedule.ranks))
            for index, step in enumerate(steps)
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per step: those of the schedule, with start and end in seconds."""
        rows = zip(self.schedule.to_rows(), self.start.tolist(), self.end.tolist())
        return [{**row, "start": start, "end": end} for row, start, end in rows]

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Per rank: what it holds over time."""
        schedule = self.schedule
        return tuple(memory_over_time(schedule.table, schedule.messages, self.costs, self.start, self.end))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per rank: the most bytes it holds at once."""
        return tuple(memory.peak for memory in self.memory)
