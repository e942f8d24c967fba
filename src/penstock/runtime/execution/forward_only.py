"""The forward-only part of a schedule: what `eval` runs."""

from __future__ import annotations

import numpy as np

from penstock.errors import PipelineError
from penstock.ir.action import JOINED, STAGE_SHIFT, Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, kinds_in

__all__ = ["forward_only"]

_KEPT = (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD)
_LEFT_OUT = (Kind.B, Kind.I, Kind.W, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without backward actions, gradient messages and gradient reductions."""
    kept, handled = ([kind.number for kind in kinds] for kinds in (_KEPT, (*_KEPT, *_LEFT_OUT)))
    rows = []
    for row in schedule.table.rows:
        kinds = kinds_in(row)
        if len(unknown := np.setdiff1d(kinds, handled)):
            raise PipelineError(f"the runtime does not know whether eval runs {list(Kind)[unknown[0]]}")
        rows.append(_without_idle_unshards(row[np.isin(kinds, kept)] & ~np.int64(JOINED)))
    return schedule.with_rows(rows)


def _without_idle_unshards(row: Ints) -> Ints:
    """Remove every UNSHARD and its RESHARD if no action of the stage is between them."""
    by_stage = np.argsort(row >> STAGE_SHIFT, kind="stable")
    stage, kind = row[by_stage] >> STAGE_SHIFT, kinds_in(row[by_stage])
    idle = (kind[:-1] == Kind.UNSHARD.number) & (kind[1:] == Kind.RESHARD.number) & (stage[:-1] == stage[1:])
    first = np.flatnonzero(idle)
    return np.delete(row, by_stage[np.concatenate((first, first + 1))])
