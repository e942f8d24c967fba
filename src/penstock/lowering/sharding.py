"""Sharded data parallelism as actions: UNSHARD, RESHARD and REDUCE_GRAD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.arguments import plural
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


Lookahead: TypeAlias = Literal["full", "auto"] | tuple[int, ...]

NextUses: TypeAlias = npt.NDArray[np.int32]
"""Per stage and slot of a rank: twice the slot that next works on the stage, odd for a pair's second."""

_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class AddSharding(Pass):
    """Keep the next `max_active_stages` stages, and no others, unsharded.

    An overlapped pair counts as one: where it is the last to fit, both of its stages are unsharded. With
    `lookahead` a stage is unsharded only when it is among the next so many: "full" (`max_active_stages`),
    "auto" (2 on rank 0, and one more on each further rank, while the pipeline fills), or a number per rank.
    Stages that stop being held at one action are resharded in ascending order, or `oldest_first`, as by torch
    from 2.15 on.
    """

    max_active_stages: int = 3
    lookahead: Lookahead = "full"
    oldest_first: bool = False
    name: ClassVar[str] = "add-sharding"

    def __post_init__(self) -> None:
        if type(self.max_active_stages) is not int or self.max_active_stages < 1:
            raise ScheduleError(f"max_active_stages must be at least 1 (given {self.max_active_stages})")
        if isinstance(self.lookahead, str):
            if self.lookahead not in ("full", "auto"):
                raise ScheduleError(
                    f'lookahead must be "full", "auto" or a number per rank (given {self.lookahead!r})'
                )
        elif wrong := [each for each in self.lookahead if not self._is_lookahead(each)]:
            raise ScheduleError(
                f"a lookahead must be a whole number from 1 to max_active_stages={self.max_active_stages} "
                f"(given {wrong[0]!r})"
            )

    def _is_lookahead(self, number: object) -> bool:
        return type(number) is int and 1 <= number <= self.max_active_stages

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with RESHARD and UNSHARD before the steps where the set of unsharded stages changes."""
        require_absent(schedule, self.name, Kind.UNSHARD, Kind.RESHARD)
        lookahead = self.lookahead_of_ranks(schedule.num_ranks)

        def held(rank: int, next_use: NextUses) -> Bools:
            resident = _held(next_use, self.max_active_stages)
            if lookahead[rank] == self.max_active_stages:
                return resident
            return _held_from(_held(next_use, lookahead[rank]), resident)

        return with_sharding(schedule, held, oldest_first=self.oldest_first)

    def lookahead_of_ranks(self, ranks: int) -> tuple[int, ...]:
        """The lookahead of each rank as a number."""
        if self.lookahead == "full":
            return (self.max_active_stages,) * ranks
        if self.lookahead == "auto":
            return tuple(min(rank + 2, self.max_active_stages) for rank in range(ranks))
        if len(self.lookahead) != ranks:
            raise ScheduleError(
                f"lookahead has {len(self.lookahead)} numbers, but the schedule has {plural(ranks, 'rank')}"
            )
        return tuple(self.lookahead)


def _held_from(wanted: Bools, resident: Bools) -> Bools:
    """Per stage and slot: whether it was wanted since it is resident."""
    slots = np.arange(1, wanted.shape[1] + 1)
    since_wanted, since_gone = (
        np.maximum.accumulate(np.where(each, slots, 0), axis=1) for each in (wanted & resident, ~resident)
    )
    held: Bools = since_wanted > since_gone
    return held


def with_sharding(
    schedule: Schedule, held: Callable[[int, NextUses], Bools], *, oldest_first: bool = False
) -> Schedule:
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
        switches = _switches(next_use, held(rank, next_use), oldest_first=oldest_first)
        for kind, (slot, which) in zip((Kind.RESHARD, Kind.UNSHARD), switches):
            ranks.append(np.full(len(slot), rank))
            slots.append(table.slot_bounds[rank] + slot)
            codes.append(codes_of(kind, own[which]))
    before = np.searchsorted(table.slot, np.concatenate(slots))
    return insert(schedule, before, np.concatenate(ranks), np.concatenate(codes))


def _switches(
    next_use: NextUses, held: Bools, *, oldest_first: bool
) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Where a stage stops, and where it begins, to be unsharded: slots in ascending order, and the stages."""
    never = np.zeros((len(held), 1), dtype=np.bool_)
    around = np.hstack((never, held, never))
    which, slot = np.nonzero(around[:, 1:] != around[:, :-1])
    begins = around[which, slot + 1]
    by_stage, soonest = np.flatnonzero(~begins), np.flatnonzero(begins)
    # an entry that ends follows the entry of its stage that begins
    age = (next_use[which[soonest], slot[soonest]], slot[soonest]) if oldest_first else (which[by_stage],)
    by_stage = by_stage[np.lexsort((*age, slot[by_stage]))]
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
