"""A schedule as a table of integers, and the dependency rule over it.

One entry per *part* (an action, or one half of an overlapped pair) in `code`, `kind`, `stage`, `microbatch` and
`slot`; one entry per *slot* (a step of a rank) in `rank`. Slots are numbered through all ranks: rank 0's steps,
then rank 1's, and so on, so on one rank "earlier" is "smaller".

What must come before what is derived here, and nowhere else, from the kinds (`penstock.ir.kinds`) and the stage
graph (`penstock.ir.graph`):

    F(s, k)          needs  F(u, k) of every stage u that feeds s                    "activation"
    I(s, k), B(s, k) need   I or B(t, k) of every stage t that s feeds               "gradient"
                     and    F(s, k)                                                  "forward"
    W(s, k)          needs  I(s, k)                                                  "input gradient"
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    PORT_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    code_of,
)
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Dependency, Kind, StageRelation, require_handled
from penstock.ir.placement import Placement

__all__ = ["ActionTable", "Bools", "Floats", "Ints", "Need", "codes_of", "kinds_in"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


def codes_of(kind: Kind, stage: Ints, microbatch: Ints | int = 0, port: Ints | int = 0) -> Ints:
    """The integer form of many parts of one kind."""
    codes: Ints = stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | code_of(kind, 0)
    return codes | port << PORT_SHIFT


def kinds_in(codes: Ints) -> Ints:
    """The number of the kind of each part."""
    return (codes >> KIND_SHIFT) & KIND_MASK


def _kinds_that(flag: str) -> Bools:
    """Per kind: whether it has this property of `Kind`."""
    return np.array([getattr(kind, flag) for kind in Kind])


class Need(NamedTuple):
    """Pairs of parts: `consumer[i]` needs what `producer[i]` makes. -1 is a part that is missing."""

    what: str
    producer: Ints
    consumer: Ints


@dataclass(frozen=True, eq=False)
class ActionTable:
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
    def of(
        cls, rows: Sequence[Ints], placement: Placement, graph: StageGraph, microbatches: int
    ) -> ActionTable:
        """From the integer form of every rank's list."""
        code = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        opens = (code & JOINED) == 0
        slot = np.cumsum(opens) - 1
        part_bounds = np.cumsum([0, *map(len, rows)])
        slot_bounds = np.concatenate(([0], np.cumsum(opens)))[part_bounds]
        rank = np.repeat(np.arange(len(rows)), np.diff(slot_bounds))
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
    def kind(self) -> Ints:
        """Per part: the number of its kind."""
        return kinds_in(self.code)

    @cached_property
    def stage(self) -> Ints:
        """Per part: its stage."""
        return (self.code >> STAGE_SHIFT) & STAGE_MASK

    @cached_property
    def port(self) -> Ints:
        """Per part: the port of a message, 0 for everything else."""
        return self.code >> PORT_SHIFT

    @cached_property
    def microbatch(self) -> Ints:
        """Per part: its microbatch, 0 where the kind has none."""
        return (self.code >> MICROBATCH_SHIFT) & MICROBATCH_MASK

    @cached_property
    def part_rank(self) -> Ints:
        """Per part: the rank it runs on."""
        return self.rank[self.slot]

    @cached_property
    def slot_or_none(self) -> Ints:
        """The slot of a part, also for part -1, which stands for a missing one and has slot -1."""
        return np.append(self.slot, -1)

    @cached_property
    def is_compute(self) -> Bools:
        """Per part: whether it occupies the compute stream: F, I, W or B."""
        return _kinds_that("is_compute")[self.kind]

    @cached_property
    def is_communication(self) -> Bools:
        """Per part: whether it sends or receives."""
        return _kinds_that("is_communication")[self.kind]

    @cached_property
    def known(self) -> Bools:
        """Per part: whether its stage and microbatch exist."""
        return (self.stage < self.placement.num_stages) & (self.microbatch < self.microbatches)

    @cached_property
    def sound(self) -> Bools:
        """Per part: whether its stage and microbatch exist and its stage lives on this rank."""
        host = self.hosts[np.where(self.known, self.stage, 0)]
        sound: Bools = self.known & (host == self.part_rank)
        return sound

    def of_kind(self, *kinds: Kind) -> Bools:
        """Per part: whether it is of one of these kinds."""
        wanted = np.zeros(len(Kind), dtype=np.bool_)
        wanted[[kind.number for kind in kinds]] = True
        chosen: Bools = wanted[self.kind]
        return chosen

    def has(self, *kinds: Kind) -> bool:
        """Whether any part is of one of these kinds."""
        return bool(self._present[[kind.number for kind in kinds]].any())

    @cached_property
    def _present(self) -> Bools:
        return np.bincount(self.kind, minlength=len(Kind)) > 0

    @property
    def kinds(self) -> list[Kind]:
        """The kinds that there are."""
        return [kind for kind in Kind if self._present[kind.number]]

    def require_handled(self, kinds: Collection[Kind], room: str) -> None:
        """Raise `UnhandledKindError` if there are parts of other kinds than these."""
        require_handled(self.kinds, kinds, room)

    @cached_property
    def _sound_by_kind(self) -> list[Ints]:
        """Per kind: its sound parts in ascending order."""
        parts = np.flatnonzero(self.sound)
        kinds = self.kind[parts].astype(np.int8)  # sorts in linear time
        counts = np.bincount(kinds, minlength=len(Kind))
        return np.split(parts[np.argsort(kinds, kind="stable")], np.cumsum(counts)[:-1])

    @cached_property
    def only_compute(self) -> bool:
        """Whether there are only F, I, W, B and overlapped pairs."""
        return all(kind.is_compute for kind in self.kinds)

    @cached_property
    def has_communication(self) -> bool:
        """Whether anything is sent or received; if not, values cross ranks as soon as they exist."""
        return any(kind.is_communication for kind in self.kinds)

    # --- per stage and microbatch ------------------------------------------------------------------

    @cached_property
    def hosts(self) -> Ints:
        """Per stage: its rank."""
        return np.array(self.placement.stage_to_rank, dtype=np.int64)

    @cached_property
    def cell(self) -> Ints:
        """Per part: stage * microbatches + microbatch, meaningful where `sound`."""
        return self.stage * self.microbatches + self.microbatch

    @cached_property
    def edge(self) -> Ints:
        """Per part: for a message, the number of the edge it travels on, -1 if there is no such edge."""
        found = np.full(len(self.code), -1, dtype=np.int64)
        for kind in self.kinds:
            if kind.is_communication:
                parts = self._sound_by_kind[kind.number]
                edges, port = self.graph.edges_by_port(kind), self.port[parts]
                exists = port < edges.shape[1]
                found[parts[exists]] = edges[self.stage[parts[exists]], port[exists]]
        return found

    def at(self, kind: Kind) -> Ints:
        """Per stage and microbatch: the first sound part of this kind, -1 where there is none."""
        return self._first(kind, self.stage, self.placement.num_stages)

    def message_at(self, kind: Kind) -> Ints:
        """Per edge and microbatch: the first sound SEND or RECV of this kind, -1 where there is none."""
        return self._first(kind, self.edge, len(self.graph.edges))

    def _first(self, kind: Kind, row: Ints, num_rows: int) -> Ints:
        """Per row and microbatch: the first sound part of this kind, -1 where there is none."""
        parts = self._sound_by_kind[kind.number][::-1]
        if kind.is_communication:
            parts = parts[row[parts] >= 0]
        first = np.full(num_rows * self.microbatches, -1, dtype=np.int64)
        # the last write wins, and the first part is written last
        first[row[parts] * self.microbatches + self.microbatch[parts]] = parts
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
        apart: Bools = self.hosts[source] != self.hosts[target]
        return apart

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
        )

    def _parts(self, kinds: tuple[str, ...]) -> Ints:
        if kinds == ("F",):
            return self.forward
        return self.input_gradient if kinds == ("I", "B") else self._first_of(kinds)

    @cached_property
    def crossings(self) -> tuple[Ints, Ints]:
        """The slots of producers and consumers on different ranks, both present."""
        producer, consumer = (
            np.concatenate([getattr(need, side).ravel() for need in self.between_stages])
            for side in ("producer", "consumer")
        )
        there = (producer >= 0) & (consumer >= 0)
        producer, consumer = self.slot[producer[there]], self.slot[consumer[there]]
        apart = self.rank[producer] != self.rank[consumer]
        return producer[apart], consumer[apart]
