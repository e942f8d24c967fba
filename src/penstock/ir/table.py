"""A schedule in columns of integers, and the dependency rule over them.

One entry per *part* (an action, or one half of an overlapped pair) in `code`, `kind`, `stage`,
`microbatch` and `slot`; one entry per *slot* (a step of a rank) in `rank`. Slots are numbered through
all ranks: rank 0's steps, then rank 1's, and so on, so on one rank "earlier" is "smaller".

What must come before what is written here and nowhere else:

    F(s, k)         needs  F(u, k) of every stage u that feeds s                    "activation"
    I(s, k), B(s, k) need  I or B(t, k) of every stage t that s feeds               "gradient"
                    and    F(s, k)                                                  "forward"
    W(s, k)         needs  I(s, k)                                                  "input gradient"

Which stage feeds which is `edges`. Today it is one chain, 0 -> 1 -> 2 -> ...; skip connections and a
second chain in the opposite direction would be other edges, and nothing else here would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.ir.action import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    STAGE_SHIFT,
    Kind,
    code_of,
)
from penstock.ir.placement import Placement

__all__ = ["ActionTable", "Bools", "Floats", "Ints", "Need", "codes_of", "kinds_in"]

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]

_KINDS = tuple(Kind)
_IS_COMPUTE = np.array([kind.is_compute for kind in Kind])
_IS_COMMUNICATION = np.array([kind.is_communication for kind in Kind])


def codes_of(kind: Kind, stage: Ints, microbatch: Ints | int = 0) -> Ints:
    """The integer form of many parts of one kind."""
    return stage << STAGE_SHIFT | microbatch << MICROBATCH_SHIFT | code_of(kind, 0)


def kinds_in(codes: Ints) -> Ints:
    """The number of the kind of each part."""
    return (codes >> KIND_SHIFT) & KIND_MASK


class Need(NamedTuple):
    """Pairs of parts: `consumer[i]` needs what `producer[i]` makes. -1 stands for a part that is missing."""

    what: str
    producer: Ints
    consumer: Ints


@dataclass(frozen=True, eq=False)
class ActionTable:
    """The parts and slots of a schedule; read-only arrays."""

    placement: Placement
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
    def of(cls, rows: Sequence[Ints], placement: Placement, microbatches: int) -> ActionTable:
        """From the integer form of every rank's list."""
        code = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        opens = (code & JOINED) == 0
        slot = np.cumsum(opens) - 1
        part_bounds = np.cumsum([0, *map(len, rows)])
        slot_bounds = np.concatenate(([0], np.cumsum(opens)))[part_bounds]
        rank = np.repeat(np.arange(len(rows)), np.diff(slot_bounds))
        table = cls(placement, microbatches, code, slot, part_bounds, slot_bounds, rank)
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
        return self.code >> STAGE_SHIFT

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
        """Per part: whether it is F, I, W or B."""
        return _IS_COMPUTE[self.kind]

    @cached_property
    def is_communication(self) -> Bools:
        """Per part: whether it sends or receives."""
        return _IS_COMMUNICATION[self.kind]

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
        wanted = np.zeros(len(_KINDS), dtype=np.bool_)
        wanted[[kind.number for kind in kinds]] = True
        chosen: Bools = wanted[self.kind]
        return chosen

    def has(self, *kinds: Kind) -> bool:
        """Whether any part is of one of these kinds."""
        return bool(self._present[[kind.number for kind in kinds]].any())

    @cached_property
    def _present(self) -> Bools:
        return np.bincount(self.kind, minlength=len(_KINDS)) > 0

    @cached_property
    def _sound_by_kind(self) -> list[Ints]:
        """Per kind: its sound parts in ascending order."""
        parts = np.flatnonzero(self.sound)
        kinds = self.kind[parts].astype(np.int8)  # sorts in linear time
        counts = np.bincount(kinds, minlength=len(_KINDS))
        return np.split(parts[np.argsort(kinds, kind="stable")], np.cumsum(counts)[:-1])

    @cached_property
    def only_compute(self) -> bool:
        """Whether there are only F, I, W, B and overlapped pairs."""
        return bool(_IS_COMPUTE[self._present.nonzero()[0]].all())

    @cached_property
    def has_communication(self) -> bool:
        """Whether anything is sent or received; if not, data is taken to cross ranks by itself."""
        return bool(_IS_COMMUNICATION[self._present.nonzero()[0]].any())

    # --- per stage and microbatch ------------------------------------------------------------------

    @cached_property
    def hosts(self) -> Ints:
        """Per stage: its rank."""
        return np.array(self.placement.stage_to_rank, dtype=np.int64)

    @cached_property
    def cell(self) -> Ints:
        """Per part: stage * microbatches + microbatch, meaningful where `sound`."""
        return self.stage * self.microbatches + self.microbatch

    def at(self, kind: Kind) -> Ints:
        """Per stage and microbatch: the first sound part of this kind, -1 where there is none."""
        parts = self._sound_by_kind[kind.number][::-1]
        first = np.full(self.placement.num_stages * self.microbatches, -1, dtype=np.int64)
        first[self.cell[parts]] = parts  # the last write wins, and the first part is written last
        return first.reshape(self.placement.num_stages, self.microbatches)

    @cached_property
    def forward(self) -> Ints:
        """Per stage and microbatch: the part that computes its activation."""
        return self.at(Kind.F)

    @cached_property
    def input_gradient(self) -> Ints:
        """Per stage and microbatch: the part, I or B, that computes its input gradient."""
        split = self.at(Kind.I)
        return np.where(split >= 0, split, self.at(Kind.B))

    # --- the dependency rule -----------------------------------------------------------------------

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """The stages that feed another, and the stages they feed."""
        stages = np.arange(self.placement.num_stages)
        return stages[:-1], stages[1:]

    @cached_property
    def apart(self) -> Bools:
        """Per edge: whether its two stages are on different ranks, so that values have to be sent."""
        feeds, fed = self.edges
        apart: Bools = self.hosts[feeds] != self.hosts[fed]
        return apart

    @cached_property
    def between_stages(self) -> tuple[Need, Need]:
        """Activations and gradients, one row per edge and one entry per microbatch."""
        feeds, fed = self.edges
        return (
            Need("activation", self.forward[feeds], self.forward[fed]),
            Need("gradient", self.input_gradient[fed], self.input_gradient[feeds]),
        )

    @cached_property
    def within_stage(self) -> tuple[Need, Need]:
        """What a backward needs of its own stage."""
        return (
            Need("forward", self.forward, self.input_gradient),
            Need("input gradient", self.at(Kind.I), self.at(Kind.W)),
        )

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
