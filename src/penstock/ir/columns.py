"""The columns of a schedule: one entry per part, or per slot, in arrays of integers.

A *part* is an action, or one half of an overlapped pair: `code`, `kind`, `stage`, `microbatch`, `slot`. A
*slot* is a step of a rank: `rank`. Slots are numbered through all ranks: rank 0's steps, then rank 1's, and so
on, so on one rank "earlier" is "smaller".
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from penstock.ir.arrays import Bools, Ints, SmallInts, microbatches_in, stages_in
from penstock.ir.encoding import JOINED, KIND_MASK, KIND_SHIFT, PORT_SHIFT
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, require_handled
from penstock.ir.placement import Placement

__all__ = ["ActionColumns"]

Columns = TypeVar("Columns", bound="ActionColumns")
"""The class whose `of` is called."""


@dataclass(frozen=True, eq=False)
class ActionColumns:
    """The parts and slots of a schedule; read-only arrays."""

    placement: Placement
    graph: StageGraph
    microbatches: int
    code: Ints
    """Per part: its integer form."""
    slot: Ints
    """Per part: the slot it belongs to."""
    part_bounds: Ints
    """Per rank, and one more: where its parts begin in `code`."""
    slot_bounds: Ints
    """Per rank, and one more: where its slots begin in `rank`."""
    rank: Ints
    """Per slot: the rank it runs on."""

    @classmethod
    def of(  # noqa: PYI019 -- Self needs Python 3.11
        cls: type[Columns],
        rows: Sequence[Ints],
        placement: Placement,
        graph: StageGraph,
        microbatches: int,
    ) -> Columns:
        """From the integer form of every rank's list."""
        code = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return cls.of_code(code, np.cumsum([0, *map(len, rows)]), placement, graph, microbatches)

    @classmethod
    def of_code(  # noqa: PYI019 -- Self needs Python 3.11
        cls: type[Columns],
        code: Ints,
        part_bounds: Ints,
        placement: Placement,
        graph: StageGraph,
        microbatches: int,
    ) -> Columns:
        """From the integer form of all lists, one after the other, and where each begins."""
        slot: Ints = np.arange(len(code))
        slot_bounds = part_bounds
        if np.bitwise_or.reduce(code) & JOINED:
            slot = np.cumsum((code & JOINED) == 0) - 1
            slot_bounds = np.append(slot, slot[-1] + 1)[part_bounds]
        rank = np.repeat(np.arange(len(part_bounds) - 1), np.diff(slot_bounds))
        table = cls(placement, graph, microbatches, code, slot, part_bounds, slot_bounds, rank)
        for array in (code, slot, part_bounds, slot_bounds, rank):
            array.flags.writeable = False
        return table

    @property
    def rows(self) -> list[Ints]:
        """The integer form of every rank's list."""
        return np.split(self.code, self.part_bounds[1:-1])

    def same_steps(self, other: ActionColumns) -> bool:
        """Whether every rank has the same list."""
        return np.array_equal(self.code, other.code) and np.array_equal(self.part_bounds, other.part_bounds)

    # --- per part ----------------------------------------------------------------------------------

    @cached_property
    def kind(self) -> SmallInts:
        """Per part: the number of its kind."""
        low = self.code.astype(np.int8)  # has all bits of the kind, and is an eighth of the memory
        low >>= KIND_SHIFT
        low &= KIND_MASK
        return low

    @cached_property
    def stage(self) -> Ints:
        """Per part: its stage."""
        return stages_in(self.code)

    @property
    def port(self) -> Ints:
        """Per part: the port of a message, 0 for everything else."""
        return self.code >> PORT_SHIFT

    @cached_property
    def microbatch(self) -> Ints:
        """Per part: its microbatch, 0 where the kind has none."""
        return microbatches_in(self.code)

    @cached_property
    def part_rank(self) -> Ints:
        """Per part: the rank it runs on."""
        return self.rank[self.slot] if self.has_pairs else self.rank

    def slots_of(self, parts: Ints) -> Ints:
        """The slots of parts, also of part -1, which stands for a missing one and has slot -1."""
        return self._slot_or_none[parts] if self.has_pairs else parts

    @cached_property
    def _slot_or_none(self) -> Ints:
        return np.append(self.slot, -1)

    @cached_property
    def is_compute(self) -> Bools:
        """Per part: whether it occupies the compute stream: F, I, W, B or RECOMPUTE."""
        return self.of_kind(*(kind for kind in Kind if kind.is_compute))

    @cached_property
    def is_compute_slot(self) -> Bools:
        """Per slot: whether it occupies the compute stream; an overlapped pair does."""
        if not self.has_pairs:
            return self.is_compute
        found = np.zeros(len(self.rank), dtype=np.bool_)
        found[self.slot[self.is_compute]] = True
        return found

    @cached_property
    def kind_of_slot(self) -> SmallInts:
        """Per slot: the number of its kind; that of an overlapped pair is its own."""
        if not self.has_pairs:
            return self.kind
        is_second = self.code & JOINED != 0
        found: SmallInts = self.kind[~is_second]
        found[self.slot[is_second]] = Kind.OVERLAP_F_B.number
        return found

    @cached_property
    def is_communication(self) -> Bools:
        """Per part: whether it sends or receives."""
        return self.of_kind(*(kind for kind in Kind if kind.is_communication))

    @cached_property
    def rank_of_stage(self) -> Ints:
        """Per stage: its rank."""
        return np.array(self.placement.stage_to_rank, dtype=np.int64)

    @cached_property
    def in_range(self) -> Bools:
        """Per part: whether its stage and microbatch exist."""
        return (self.stage < self.placement.num_stages) & (self.microbatch < self.microbatches)

    @cached_property
    def well_placed(self) -> Bools:
        """Per part: whether its stage and microbatch exist, and it is on the rank of its stage."""
        stage = self.stage if self.in_range.all() else np.where(self.in_range, self.stage, 0)
        well_placed: Bools = self.in_range & (self.rank_of_stage[stage] == self.part_rank)
        return well_placed

    @cached_property
    def all_well_placed(self) -> bool:
        """Whether every part is `well_placed`."""
        return bool(self.well_placed.all())

    def of_kind(self, *kinds: Kind) -> Bools:
        """Per part: whether it is of one of these kinds."""
        chosen = np.zeros(len(self.code), dtype=np.bool_)
        for kind in kinds:
            if self._count[kind.number]:
                chosen |= self.kind == kind.number
        return chosen

    def has(self, *kinds: Kind) -> bool:
        """Whether any part is of one of these kinds."""
        return any(self._count[kind.number] for kind in kinds)

    @cached_property
    def _count(self) -> Ints:
        """Per number of a kind: its parts."""
        return np.bincount(self.kind, minlength=len(Kind))

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that there are."""
        return [kind for kind in Kind if self._count[kind.number]]

    def require_handled(self, kinds: Collection[Kind], component: str) -> None:
        """Raise `UnhandledKindError` if there are parts of other kinds than these."""
        require_handled(self.kinds, kinds, component)

    def count_by_stage(self, kind: Kind) -> Ints:
        """Per stage: how many parts of this kind there are."""
        return np.bincount(self.stage[self.of_kind(kind)], minlength=self.placement.num_stages)

    def well_placed_parts(self, kind: Kind) -> Ints:
        """The well-placed parts of this kind in ascending order."""
        found = self.of_kind(kind)
        return np.flatnonzero(found if self.all_well_placed else found & self.well_placed)

    def num_well_placed_parts(self, kind: Kind) -> int:
        """How many well-placed parts of this kind there are."""
        return int(self._count[kind.number]) if self.all_well_placed else len(self.well_placed_parts(kind))

    @cached_property
    def only_compute(self) -> bool:
        """Whether every step occupies the compute stream."""
        return all(kind.is_compute for kind in self.kinds)

    @cached_property
    def has_pairs(self) -> bool:
        """Whether there are overlapped pairs."""
        return len(self.rank) < len(self.code)

    @cached_property
    def has_communication(self) -> bool:
        """Whether anything is sent or received; if not, values cross ranks as soon as they exist."""
        return any(kind.is_communication for kind in self.kinds)
