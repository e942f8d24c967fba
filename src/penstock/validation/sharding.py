"""Rules on UNSHARD, RESHARD and REDUCE_GRAD; each applies when the schedule has such actions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.arrays import stable_order
from penstock.ir.kinds import Kind
from penstock.ir.table import ActionTable
from penstock.validation.violation import Violation, part_at, violation_at

__all__ = ["reduced_once", "unsharded_when_used"]


def unsharded_when_used(table: ActionTable) -> Iterator[Violation]:
    """A stage computes only between UNSHARD and RESHARD, and every UNSHARD and RESHARD is needed."""
    if not table.has(Kind.UNSHARD, Kind.RESHARD):
        return
    relevant = np.flatnonzero(
        table.well_placed & (table.is_compute | table.of_kind(Kind.UNSHARD, Kind.RESHARD))
    )
    if not relevant.size:
        return
    stage = table.stage[relevant]
    by_stage = stable_order(stage, table.placement.num_stages)
    order, stage = relevant[by_stage], stage[by_stage]
    unshard, reshard = (table.kind[order] == k.number for k in (Kind.UNSHARD, Kind.RESHARD))
    switch = unshard | reshard
    here = np.arange(len(order))
    opens = np.concatenate(([True], stage[1:] != stage[:-1]))
    closes = np.append(opens[1:], True)
    # the last switch before each entry, if it is of the same stage
    latest = np.concatenate(([-1], np.maximum.accumulate(np.where(switch, here, -1))[:-1]))
    first = np.maximum.accumulate(np.where(opens, here, 0))
    unsharded = (latest >= first) & unshard[latest]
    freed_next = np.append(reshard[1:], True) | closes
    for faulty, code, message, suggestion in (
        (~switch & ~unsharded, "compute-while-sharded", "the stage is not unsharded here", "UNSHARD it before"),
        (unshard & unsharded, "double-unshard", "the stage is already unsharded", "remove one UNSHARD"),
        (unshard & freed_next, "unused-unshard", "nothing uses the stage before it is resharded", "remove it"),
        (reshard & ~unsharded, "reshard-without-unshard", "the stage is not unsharded here", "remove it"),
        (closes & ~switch & unsharded, "left-unsharded", "the stage is never resharded", "add RESHARD"),
    ):
        for part in order[faulty].tolist():
            yield violation_at(table, part, code, message, suggestion)


def reduced_once(table: ActionTable) -> Iterator[Violation]:
    """Every stage's gradients are reduced once, after its last backward."""
    if not table.has(Kind.REDUCE_GRAD):
        return
    last = np.full(table.placement.num_stages, -1, dtype=np.int64)
    backwards = np.flatnonzero(table.of_kind(Kind.B, Kind.W) & table.well_placed)
    last[table.stage[backwards]] = backwards
    reduced = table.at(Kind.REDUCE_GRAD)[:, 0]
    for stage, (end, reduce) in enumerate(zip(last.tolist(), reduced.tolist())):
        if reduce < 0 <= end:
            message = f"stage {stage} has backwards but no REDUCE_GRAD, while other stages have one"
            rank = table.placement.stage_to_rank[stage]
            yield Violation("missing-reduce-grad", message, "add it after the stage's last backward", rank)
        elif end < 0 <= reduce:
            message = "the stage has no backward, so it has no gradients to reduce"
            yield violation_at(table, reduce, "needless-reduce-grad", message, "remove it")
        elif reduce >= 0 and table.slot[reduce] < table.slot[end]:
            _, step, action = part_at(table, end)
            message = f"the stage's last backward, {action} at step {step}, comes after it"
            yield violation_at(table, reduce, "reduce-before-last-backward", message, f"move it after {action}")
