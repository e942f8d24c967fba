"""A schedule as a table of integers, and the dependency rule over it.

What must come before what is derived here, and nowhere else, from the kinds (`penstock.ir.kinds`) and the stage
graph (`penstock.ir.graph`):

    F(s, k)          needs  F(u, k) of every stage u that feeds s                    "activation"
    I(s, k), B(s, k) need   I or B(t, k) of every stage t that s feeds               "gradient"
                     and    F(s, k)                                                  "forward"
    W(s, k)          needs  I(s, k)                                                  "input gradient"
    RECOMPUTE(s, k)  needs  F(s, k), and RELOAD(s, k) if there is one
    OFFLOAD(s, k)    needs  F(s, k); RELOAD(s, k) needs it
    I(s, k), B(s, k) need   RECOMPUTE(s, k) and RELOAD(s, k) if there are any
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir.action import Step
from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    PORT_SHIFT,
    Bools,
    Ints,
    SmallInts,
    decode,
    microbatches_in,
    stages_in,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Dependency, Kind, StageRelation, require_handled
from penstock.ir.placement import Placement

# A *part* is an action, or one half of an overlapped pair: `code`, `kind`, `stage`, `microbatch`, `slot`. A
# *slot* is a step of a rank: `rank`. Slots are numbered through all ranks: rank 0's steps, then rank 1's, and
# so on, so on one rank "earlier" is "smaller".


class Need(NamedTuple):
    """Pairs of parts: `consumer[i]` needs what `producer[i]` makes. -1 is a part that is missing."""

    what: str
    producer: Ints
    consumer: Ints


@dataclass(frozen=True, eq=False)
class ActionTable:
    """The parts and slots of a schedule, its actions by stage and microbatch, and their dependencies."""

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
    def of(
        cls, rows: Sequence[Ints], placement: Placement, graph: StageGraph, microbatches: int
    ) -> ActionTable:
        """From the integer form of every rank's list."""
        code = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        return cls.of_code(code, np.cumsum([0, *map(len, rows)]), placement, graph, microbatches)

    @classmethod
    def of_code(
        cls, code: Ints, part_bounds: Ints, placement: Placement, graph: StageGraph, microbatches: int
    ) -> ActionTable:
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

    def same_steps(self, other: ActionTable) -> bool:
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
    def is_point(self) -> Bools:
        """Per part: whether it takes no time of its own: a message, or a wait."""
        return self.of_kind(*(kind for kind in Kind if kind.is_point))

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

    # --- per stage and microbatch ------------------------------------------------------------------

    @cached_property
    def cell(self) -> Ints:
        """Per part: stage * microbatches + microbatch, meaningful where `well_placed`."""
        return self.stage * self.microbatches + self.microbatch

    def edges_of(self, kind: Kind, parts: Ints) -> Ints:
        """Per well-placed message of this kind: the number of its edge, -1 if there is no such edge."""
        edges, stage = self.graph.edges_by_port(kind), self.stage[parts]
        port = self.code[parts] >> PORT_SHIFT
        if not port.any():
            first: Ints = edges[:, 0][stage]
            return first
        exists = port < edges.shape[1]
        return np.where(exists, edges[stage, np.where(exists, port, 0)], -1)

    @cached_property
    def _found(self) -> dict[Kind, Ints]:
        """What `at` and `message_at` have found."""
        return {}

    def at(self, kind: Kind) -> Ints:
        """Per stage and microbatch: the first well-placed part of this kind, -1 where there is none."""
        if kind not in self._found:
            parts = self.well_placed_parts(kind)[::-1]
            self._found[kind] = self._first(parts, self.cell[parts], self.placement.num_stages)
        return self._found[kind]

    def message_at(self, kind: Kind) -> Ints:
        """Per edge and microbatch: the first well-placed SEND or RECV of this kind, -1 where there is none."""
        if kind not in self._found:
            parts = self.well_placed_parts(kind)[::-1]
            edge = self.edges_of(kind, parts)
            if (edge < 0).any():
                parts, edge = parts[edge >= 0], edge[edge >= 0]
            cell = edge * self.microbatches + self.microbatch[parts]
            self._found[kind] = self._first(parts, cell, len(self.graph.edges))
        return self._found[kind]

    def _first(self, parts: Ints, cell: Ints, num_rows: int) -> Ints:
        """Per row and microbatch: the first of these parts, which are in descending order, -1 without one."""
        first = np.full(num_rows * self.microbatches, -1, dtype=np.int64)
        first[cell] = parts  # the last write wins, and the first part is written last
        return first.reshape(num_rows, self.microbatches)

    @cached_property
    def forward(self) -> Ints:
        """Per stage and microbatch: the part that computes its activation."""
        return self._first_of(("F",))

    @cached_property
    def input_gradient(self) -> Ints:
        """Per stage and microbatch: the part, I or B, that computes its input gradient."""
        return self._first_of(("I", "B"))

    def _first_of(self, kinds: tuple[str, ...]) -> Ints:
        """Per stage and microbatch: the part of the first of these kinds that is there."""
        found = self.at(Kind(kinds[0]))
        for other in kinds[1:]:
            if self.has(Kind(other)):
                found = np.where(found >= 0, found, self.at(Kind(other)))
        return found

    # --- the dependency rule -----------------------------------------------------------------------

    @cached_property
    def crosses_ranks(self) -> Bools:
        """Per edge: whether its two stages are on different ranks, so that values have to be sent."""
        source, target = self.graph.ends
        apart: Bools = self.rank_of_stage[source] != self.rank_of_stage[target]
        return apart

    @cached_property
    def carrier(self) -> Ints:
        """Per edge: the edge whose message brings its activation; see `StageGraph.carriers`."""
        return self.graph.carriers(self.rank_of_stage)

    @cached_property
    def _consumers(self) -> dict[Dependency, tuple[str, ...]]:
        """Every dependency with the kinds that have it."""
        found: dict[Dependency, tuple[str, ...]] = {}
        for kind in Kind:
            for need in kind.spec.needs:
                found[need] = (*found.get(need, ()), kind.value)
        return found

    @cached_property
    def between_stages(self) -> tuple[Need, ...]:
        """Activations and gradients, one row per edge and one entry per microbatch."""
        source, target = self.graph.ends
        found = []
        for need, kinds in self._consumers.items():
            if need.stages is not StageRelation.SAME:
                to_fed = need.stages is StageRelation.INPUTS
                makes, uses = (source, target) if to_fed else (target, source)
                found.append(Need(need.what, self._parts(need.kinds)[makes], self._parts(kinds)[uses]))
        return tuple(found)

    @cached_property
    def within_stage(self) -> tuple[Need, ...]:
        """What an action needs of its own stage, one row per stage and one entry per microbatch."""
        return tuple(
            Need(need.what, self._parts(need.kinds), self._parts(kinds))
            for need, kinds in self._consumers.items()
            if need.stages is StageRelation.SAME
            and self.has(*map(Kind, need.kinds))
            and self.has(*map(Kind, kinds))
        )

    @cached_property
    def host_copy_waits(self) -> tuple[Ints, Ints]:
        """The slots of OFFLOAD and RELOAD, and for each one of the slots on its rank that waits for its end."""
        found: list[tuple[Ints, Ints]] = []
        for _, producer, consumer in self.within_stage:
            both = (producer >= 0) & (consumer >= 0)
            made, used = producer[both], consumer[both]
            copies = self.of_kind(*(kind for kind in Kind if kind.is_host_copy))[made]
            found.append((self.slot[made[copies]], self.slot[used[copies]]))
        nothing = np.empty(0, dtype=np.int64)
        made, used = (np.concatenate([nothing, *column]) for column in zip(*found)) if found else (nothing,) * 2
        return made, used

    def _parts(self, kinds: tuple[str, ...]) -> Ints:
        if kinds == ("F",):
            return self.forward
        return self.input_gradient if kinds == ("I", "B") else self._first_of(kinds)

    @cached_property
    def crossings(self) -> tuple[Ints, Ints]:
        """The slots of producers and consumers on different ranks, both present."""
        edges = np.flatnonzero(self.crosses_ranks)
        producer, consumer = (
            np.concatenate([getattr(need, side)[edges] for need in self.between_stages], axis=None)
            for side in ("producer", "consumer")
        )
        both = (producer >= 0) & (consumer >= 0)
        if not both.all():
            producer, consumer = producer[both], consumer[both]
        return self.slots_of(producer), self.slots_of(consumer)


def step_of_slot(table: ActionTable, slot: int) -> Step:
    """The step with this number through all ranks, without making objects of the others."""
    first, last = np.searchsorted(table.slot, [slot, slot + 1]).tolist()
    return next(decode(table.code[first:last].tolist(), table.graph))
