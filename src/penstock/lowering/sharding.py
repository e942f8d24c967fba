"""Sharded data parallelism as actions: UNSHARD, RESHARD and REDUCE_GRAD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.ir.encoding import Bools, Ints, codes_of
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import ActionTable
from penstock.lowering.passes import Pass, insert, require_absent

# Add UNSHARD and RESHARD, so that only the stages needed soon are unsharded.
#
# Before each step, the first few distinct stages that this rank uses from there on are unsharded.
# With `max_active_stages` = 2, for stages 0, 1, 2 on one rank:
#
#     0F0 1F0 2F0 2B0 1B0 0B0
#     0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD


NextUses: TypeAlias = npt.NDArray[np.int32]
"""Per stage and slot of a rank: twice the slot that next works on the stage, odd for a pair's second."""

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class AddSharding(Pass):
    """Keep the next `max_active_stages` stages, and no others, unsharded.

    An overlapped pair counts as one: where it is the last to fit, both of its stages are unsharded.
    """

    max_active_stages: int = 3
    name: ClassVar[str] = "add-sharding"

    def __post_init__(self) -> None:
        if self.max_active_stages < 1:
            raise ScheduleError(f"max_active_stages must be at least 1 (given {self.max_active_stages})")

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with RESHARD and UNSHARD before the steps where the set of unsharded stages changes."""
        require_absent(schedule, self.name, Kind.UNSHARD, Kind.RESHARD)
        return with_sharding(schedule, lambda _, next_use: _held(next_use, self.max_active_stages))


def with_sharding(schedule: Schedule, held: Callable[[int, NextUses], Bools]) -> Schedule:
    """The schedule with RESHARD and UNSHARD where the set of unsharded stages changes, soonest used first.

    `held` is called with each rank and, per stage and slot, its next use; it tells, per stage and slot, whether
    the stage is unsharded there.
    """
    table = schedule.table
    uses = table.is_compute | table.of_kind(Kind.REDUCE_GRAD)
    ranks, slots, codes = [], [], []
    for rank, stages in enumerate(table.placement.stages_of_rank):
        own = np.array(stages)
        next_use = _next_uses(table, uses, rank, own)
        switches = _switches(next_use, held(rank, next_use))
        for kind, (slot, which) in zip((Kind.RESHARD, Kind.UNSHARD), switches):
            ranks.append(np.full(len(slot), rank))
            slots.append(table.slot_bounds[rank] + slot)
            codes.append(codes_of(kind, own[which]))
    before = np.searchsorted(table.slot, np.concatenate(slots))
    return insert(schedule, before, np.concatenate(ranks), np.concatenate(codes))


def _switches(next_use: NextUses, held: Bools) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Where a stage stops, and where it begins, to be unsharded: slots in ascending order, and the stages."""
    never = np.zeros((len(held), 1), dtype=np.bool_)
    around = np.hstack((never, held, never))
    which, slot = np.nonzero(around[:, 1:] != around[:, :-1])
    begins = around[which, slot + 1]
    by_stage, soonest = np.flatnonzero(~begins), np.flatnonzero(begins)
    by_stage = by_stage[np.lexsort((which[by_stage], slot[by_stage]))]
    soonest = soonest[np.lexsort((next_use[which[soonest], slot[soonest]], slot[soonest]))]
    return (slot[by_stage], which[by_stage]), (slot[soonest], which[soonest])


def _next_uses(table: ActionTable, uses: Bools, rank: int, stages: Ints) -> NextUses:
    """When this rank next works on each stage; `uses` tells which parts work on their stage."""
    first, last = table.slot_bounds[rank : rank + 2]
    begin, end = table.part_bounds[rank : rank + 2]
    parts = begin + np.flatnonzero(uses[begin:end])
    slot = table.slot[parts] - first
    second = np.concatenate(([False], slot[1:] == slot[:-1]))[: len(slot)]
    next_use = np.full((len(stages), last - first), _NEVER, dtype=np.int32)
    which = np.searchsorted(stages, table.stage[parts])
    # written backwards, so that of two uses in one slot the first counts
    next_use[which[::-1], slot[::-1]] = (2 * slot + second)[::-1]
    return np.ascontiguousarray(np.minimum.accumulate(next_use[:, ::-1], axis=1)[:, ::-1])


def _held(next_use: NextUses, max_active_stages: int) -> Bools:
    """Per stage and slot: whether the stage is among the next `max_active_stages` to be used."""
    held: Bools = next_use != _NEVER
    if max_active_stages < len(next_use):
        held &= next_use <= _smallest(next_use, max_active_stages) | 1  # both parts of a pair
    return held


def _smallest(rows: NextUses, n: int) -> NextUses:
    """Per column: its n-th smallest entry. For few rows this is faster than `np.partition` along columns."""
    least: list[NextUses] = []
    for row in rows:
        rest = row
        for i, other in enumerate(least):
            least[i], rest = np.minimum(other, rest), np.maximum(other, rest)
        if len(least) < n:
            least.append(rest)
    return least[-1]


# Add one REDUCE_GRAD per stage, directly after its last backward.


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
