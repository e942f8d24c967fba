"""Add OFFLOAD and RELOAD, so that activations that live long wait on the host.

    offload               0F0 0F1 0F2 0B2 0B1 0B0
                      ->  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD1 0B2 0RELOAD0 0B1 0B0
    offload, ahead=0  ->  0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0

OFFLOAD is directly after F, and RELOAD is `ahead` compute steps before its first use, by RECOMPUTE or by the
backward, so that these steps hide the copy. What would be back before another step has run is not offloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from penstock.arguments import printable, whole_number
from penstock.errors import ScheduleError
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import codes_of
from penstock.lowering.passes import Pass, arrange
from penstock.lowering.policies import Policy, chosen, first_uses, steps_of

__all__ = ["Offload"]


@dataclass(frozen=True)
class Offload(Pass):
    """OFFLOAD and RELOAD for every microbatch of these stages, all unless given, that the policy is for.

    Microbatches that are offloaded already stay as they are.
    """

    stages: tuple[int, ...] | None = None
    policy: Policy = field(default_factory=Policy)
    ahead: int = 1
    """How many compute steps of its rank a RELOAD starts before its use."""
    name: ClassVar[str] = "offload"

    def __post_init__(self) -> None:
        if (ahead := whole_number(self.ahead)) is None or ahead < 0:
            given = printable(repr(self.ahead))
            raise ScheduleError(f"ahead must be a whole number of at least 0 (given {given})")

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with OFFLOAD after F and RELOAD ahead of its use."""
        table = schedule.table
        new = chosen(table, self.name, self.stages, self.policy) & (table.at(Kind.OFFLOAD) < 0)
        stage, microbatch = np.nonzero(new)
        steps, after = steps_of(table), table.slot[table.forward[new]]
        reload_step = steps[table.slot[first_uses(table)[new]]] - self.ahead
        pays = reload_step > steps[after] + 1
        stage, microbatch, after, reload_step = stage[pays], microbatch[pays], after[pays], reload_step[pays]
        before = np.unique(table.slot[table.is_compute])[reload_step]
        codes = (table.code, *(codes_of(kind, stage, microbatch) for kind in (Kind.OFFLOAD, Kind.RELOAD)))
        return arrange(
            schedule,
            np.concatenate((table.part_rank, table.rank[after], table.rank[before])),
            np.concatenate((table.slot * 3 + 1, after * 3 + 2, before * 3)),
            np.concatenate(codes),
        )
