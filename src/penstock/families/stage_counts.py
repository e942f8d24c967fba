"""Unequal numbers of stages per rank: the order for equally many, without the stages that a rank does not have.

    penstock show interleaved-1f1b -p 3 -m 3 -v 1,2,1

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 0F2 ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   ·   0B0──── 0B1──── 0B2────
    rank 1  ·   1F0 1F1 1F2 2F0 2F1 2F2 ·   2B0──── ·   2B1──── ·   2B2──── 1B0──── 1B1──── 1B2──── ·   ·
    rank 2  ·   ·   ·   ·   ·   3F0 3B0──── 3F1 3B1──── 3F2 3B2──── ·   ·   ·   ·   ·   ·   ·   ·   ·   ·

A microbatch passes the ranks v times, v the largest number, and skips the ranks that have no stage there: the
first ranks keep their first stages, the last ranks their last. Leaving out stages removes work and waits and
adds none, so the order is valid, and takes no more time or memory than with v stages on every rank.
"""

from __future__ import annotations

from penstock.families.rank_order import keep_stages
from penstock.ir.placement import StagesPerRank
from penstock.ir.schedule import Schedule

__all__ = ["leave_out_stages"]


def leave_out_stages(schedule: Schedule, stages_per_rank: StagesPerRank) -> Schedule:
    """The schedule without the stages that its ranks do not have."""
    whole = schedule.placement
    placement = whole.with_stages_per_rank(stages_per_rank)
    if placement == whole or isinstance(stages_per_rank, int):
        return schedule
    kept = whole.kept_stages(stages_per_rank)
    rows = [keep_stages(row, kept) for row in schedule.table.rows]
    return Schedule.from_codes(rows, placement, schedule.microbatches, schedule.name)
