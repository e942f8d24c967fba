"""Add one REDUCE_GRAD per stage, directly after its last backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import codes_of
from penstock.lowering.passes import Pass, arrange, require_absent

__all__ = ["AddGradReduction"]


@dataclass(frozen=True)
class AddGradReduction(Pass):
    """One REDUCE_GRAD per stage, as early as its weight gradients are complete; none without backwards."""

    name: ClassVar[str] = "add-reduce-grad"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with one REDUCE_GRAD for each stage that has backwards."""
        require_absent(schedule, self.name, Kind.REDUCE_GRAD)
        table = schedule.table
        backwards = table.of_kind(Kind.B, Kind.W)
        last = np.full(schedule.num_stages, -1, dtype=np.int64)
        last[table.stage[backwards]] = table.slot[backwards]  # slots ascend: the last write is the last
        stages = np.flatnonzero(last >= 0)
        rows = arrange(
            schedule.num_ranks,
            np.concatenate((table.part_rank, table.hosts[stages])),
            np.concatenate((table.slot, last[stages])),
            np.concatenate((table.code, codes_of(Kind.REDUCE_GRAD, stages))),
        )
        return schedule.with_rows(rows)
