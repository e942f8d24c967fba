"""Live activations of a schedule as counts: bytes follow for any costs without simulating.

The memory of a rank depends only on its own order of work: F allocates an activation, I releases a part of it,
W or B the rest. So the counts are computed once and used for many partitions of the same schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats

__all__ = ["LiveActivations", "fixed_bytes", "live_activations"]


@dataclass(frozen=True, eq=False)
class LiveActivations:
    """One rank: its stages, and how many activations of each are live whenever one is allocated.

    A row of `counts` has, for each of the stages, the activations before their I (or B), and then those that
    are kept for W only.
    """

    stages: tuple[int, ...]
    counts: Floats

    def peak(self, costs: Costs, num_stages: int) -> float:
        """Peak memory in bytes."""
        whole = costs.per_stage("activation", num_stages)
        freed = costs.per_stage("activation_freed_by_input", num_stages)
        sizes = [whole[s] for s in self.stages] + [whole[s] - freed[s] for s in self.stages]
        held = float((self.counts @ np.array(sizes)).max(initial=0))
        return fixed_bytes(costs, self.stages, num_stages) + held


def fixed_bytes(costs: Costs, stages: tuple[int, ...], num_stages: int) -> float:
    """Bytes of parameters, gradients and optimizer state."""
    names = ("parameters", "gradients", "optimizer_state")
    return sum(costs.per_stage(name, num_stages)[stage] for name in names for stage in stages)


def live_activations(schedule: Schedule) -> list[LiveActivations]:
    """The live activations of each rank of a compute schedule."""
    table = schedule.table
    found = []
    for rank, stages in enumerate(schedule.placement.stages_of_rank):
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        allocates = table.kind[parts] == Kind.F.number
        # an overlapped pair allocates at its start and releases at its end, whichever part comes first
        parts = parts[np.lexsort((~allocates, table.slot[parts]))]
        kind, stage = table.kind[parts], np.searchsorted(stages, table.stage[parts])
        change = np.zeros((len(parts), 2 * len(stages)))
        at = np.arange(len(parts))
        for name, before_input, before_weight in (("F", 1, 0), ("B", -1, 0), ("I", -1, 1), ("W", 0, -1)):
            of_kind = kind == Kind(name).number
            change[at[of_kind], stage[of_kind]] += before_input
            change[at[of_kind], stage[of_kind] + len(stages)] += before_weight
        levels = np.cumsum(change, axis=0)[kind == Kind.F.number]
        found.append(LiveActivations(stages, np.unique(levels, axis=0)))
    return found
