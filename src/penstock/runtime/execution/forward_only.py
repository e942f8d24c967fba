"""The forward-only part of a schedule: what `eval` runs."""

from __future__ import annotations

import numpy as np

from penstock.ir.encoding import JOINED, STAGE_SHIFT
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, kinds_in

__all__ = ["forward_only"]

_KEPT = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
_OMITTED = (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without backward actions, gradient messages, gradient reductions and memory actions."""
    schedule.table.require_handled((*_KEPT, *_OMITTED, *MEMORY_KINDS), "runtime.execution.forward_only")
    rows = [row & ~np.int64(JOINED) for row in schedule.only(_KEPT).table.rows]
    return schedule.with_rows([_without_idle_unshards(row) for row in rows])


def _without_idle_unshards(row: Ints) -> Ints:
    """Remove every UNSHARD and its RESHARD if no action of the stage is between them."""
    by_stage = np.argsort(row >> STAGE_SHIFT, kind="stable")
    stage, kind = row[by_stage] >> STAGE_SHIFT, kinds_in(row[by_stage])
    idle = (kind[:-1] == Kind.UNSHARD.number) & (kind[1:] == Kind.RESHARD.number) & (stage[:-1] == stage[1:])
    first = np.flatnonzero(idle)
    return np.delete(row, by_stage[np.concatenate((first, first + 1))])
