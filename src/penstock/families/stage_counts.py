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

from collections.abc import Sequence

from penstock.arguments import printable, whole_number
from penstock.families.rank_order import keep_stages
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["StagesPerRank", "leave_out_stages", "most_stages", "problems_of_counts"]

StagesPerRank = int | Sequence[int]
"""One number for all ranks, or a list of one for each."""


def most_stages(stages_per_rank: StagesPerRank | None) -> int | None:
    """The largest number of stages of a rank; None if none is given."""
    if not isinstance(stages_per_rank, Sequence):
        return stages_per_rank
    return max((number for each in stages_per_rank if (number := whole_number(each))), default=None)


def problems_of_counts(ranks: int, stages_per_rank: StagesPerRank | None) -> list[str]:
    """List what is wrong with a list of stages per rank."""
    if not isinstance(stages_per_rank, Sequence):
        return []
    given = printable(repr(stages_per_rank))
    if any((whole_number(count) or 0) < 1 for count in stages_per_rank):
        return [f"every number in stages_per_rank must be a whole number of at least 1 (given {given})"]
    if len(stages_per_rank) != ranks:
        count = len(stages_per_rank)
        return [f"stages_per_rank has {count} numbers for {ranks!r} ranks (given {given}): give one for each"]
    return []


def leave_out_stages(schedule: Schedule, stages_per_rank: StagesPerRank) -> Schedule:
    """The schedule without the stages that its ranks do not have."""
    if not isinstance(stages_per_rank, Sequence):
        return schedule
    whole = schedule.placement
    kept = whole.kept_stages(stages_per_rank)
    if len(kept) == whole.num_stages:
        return schedule
    placement = Placement(tuple(whole.stage_to_rank[stage] for stage in kept))
    rows = [keep_stages(row, kept) for row in schedule.table.rows]
    return Schedule.from_codes(rows, placement, schedule.microbatches, schedule.name)
