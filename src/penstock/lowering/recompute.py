"""Add RECOMPUTE, so that F keeps only its checkpoint.

    recompute             0F0 0F1 0B0 0B1  ->  0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1
    recompute, every=2    0F0 0F1 0B0 0B1  ->  0F0 0F1 0RECOMPUTE0 0B0 0B1

RECOMPUTE is as late as possible, directly before the backward, so the activation is held for the shortest time;
while the gradient is on its way, it runs in the bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import codes_of
from penstock.lowering.passes import Pass, arrange
from penstock.lowering.policies import Policy, chosen

__all__ = ["Recompute"]


@dataclass(frozen=True)
class Recompute(Pass):
    """One RECOMPUTE for every microbatch of these stages, all unless given, that the policy is for.

    Microbatches that are recomputed already stay as they are, so passes with several policies can follow each
    other.
    """

    stages: tuple[int, ...] | None = None
    policy: Policy = field(default_factory=Policy)
    name: ClassVar[str] = "recompute"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with RECOMPUTE directly before the backward."""
        table = schedule.table
        new = chosen(table, self.name, self.stages, self.policy) & (table.at(Kind.RECOMPUTE) < 0)
        stage, microbatch = np.nonzero(new)
        before = table.slot[table.input_gradient[new]]
        return arrange(
            schedule,
            np.concatenate((table.part_rank, table.rank[before])),
            np.concatenate((table.slot * 2 + 1, before * 2)),
            np.concatenate((table.code, codes_of(Kind.RECOMPUTE, stage, microbatch))),
        )
