"""Add one REDUCE_GRAD per stage, directly after its last backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable, Ints, codes_of
from penstock.lowering.passes import Pass, insert, require_absent

__all__ = ["AddGradReduction", "last_backwards", "with_reductions"]


@dataclass(frozen=True)
class AddGradReduction(Pass):
    """One REDUCE_GRAD per stage, as early as its weight gradients are complete; none without backwards."""

    name: ClassVar[str] = "add-reduce-grad"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with one REDUCE_GRAD for each stage that has backwards."""
        require_absent(schedule, self.name, Kind.REDUCE_GRAD)
        return with_reductions(schedule, last_backwards(schedule.table))


def last_backwards(table: ActionTable) -> Ints:
    """Per stage: the slot of its last backward, -1 without backwards."""
    backwards = table.of_kind(Kind.B, Kind.W)
    last = np.full(table.placement.num_stages, -1, dtype=np.int64)
    last[table.stage[backwards]] = table.slot[backwards]  # slots ascend: the last write is the last
    return last


def with_reductions(schedule: Schedule, after: Ints) -> Schedule:
    """The schedule with the REDUCE_GRAD of each stage directly after this slot of its rank; none for -1."""
    table, stages = schedule.table, np.flatnonzero(after >= 0)
    next_part = np.searchsorted(table.slot, after[stages], side="right")
    return insert(schedule, next_part, table.rank_of_stage[stages], codes_of(Kind.REDUCE_GRAD, stages))
