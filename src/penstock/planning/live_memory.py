"""What a schedule holds at once, counted in activations: bytes follow for any costs without simulating.

What a rank holds depends on its own order of work alone: F takes an activation, I lets a part of it go, W or B
the rest. So times do not matter, and the counts are found once for many partitions of the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats

__all__ = ["Holding", "fixed_bytes", "holdings"]


@dataclass(frozen=True, eq=False)
class Holding:
    """One rank: its stages, and what it holds of each at every moment when it takes one more.

    A row has, for each of the stages, the activations whose I (or B) is to come, and then those that only wait
    for W.
    """

    stages: tuple[int, ...]
    rows: Floats

    def peak(self, costs: Costs, num_stages: int) -> float:
        """The most bytes at once."""
        whole = costs.per_stage("activation", num_stages)
        freed = costs.per_stage("activation_freed_by_input", num_stages)
        sizes = [whole[s] for s in self.stages] + [whole[s] - freed[s] for s in self.stages]
        held = float((self.rows @ np.array(sizes)).max(initial=0))
        return fixed_bytes(costs, self.stages, num_stages) + held


def fixed_bytes(costs: Costs, stages: tuple[int, ...], num_stages: int) -> float:
    """What is there all the time: parameters, gradients and optimizer state."""
    names = ("parameters", "gradients", "optimizer_state")
    return sum(costs.per_stage(name, num_stages)[stage] for name in names for stage in stages)


def holdings(schedule: Schedule) -> list[Holding]:
    """One for each rank of a compute schedule."""
    table = schedule.table
    found = []
    for rank, stages in enumerate(schedule.placement.stages_of_rank):
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        takes = table.kind[parts] == Kind.F.number
        # a pair takes at its start and lets go at its end, whichever part is named first
        parts = parts[np.lexsort((~takes, table.slot[parts]))]
        kind, stage = table.kind[parts], np.searchsorted(stages, table.stage[parts])
        change = np.zeros((len(parts), 2 * len(stages)))
        at = np.arange(len(parts))
        for name, waiting, deferred in (("F", 1, 0), ("B", -1, 0), ("I", -1, 1), ("W", 0, -1)):
            of_kind = kind == Kind(name).number
            change[at[of_kind], stage[of_kind]] += waiting
            change[at[of_kind], stage[of_kind] + len(stages)] += deferred
        levels = np.cumsum(change, axis=0)[kind == Kind.F.number]
        found.append(Holding(stages, np.unique(levels, axis=0)))
    return found
