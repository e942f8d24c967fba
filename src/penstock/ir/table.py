"""A schedule as a table of integers, and the dependency rule over it.

The columns are those of `penstock.ir.columns`. What must come before what is derived here, and nowhere else,
from the kinds (`penstock.ir.kinds`) and the stage graph (`penstock.ir.graph`):

    F(s, k)          needs  F(u, k) of every stage u that feeds s                    "activation"
    I(s, k), B(s, k) need   I or B(t, k) of every stage t that s feeds               "gradient"
                     and    F(s, k)                                                  "forward"
    W(s, k)          needs  I(s, k)                                                  "input gradient"
    RECOMPUTE(s, k)  needs  F(s, k), and RELOAD(s, k) if there is one
    OFFLOAD(s, k)    needs  F(s, k); RELOAD(s, k) needs it
    I(s, k), B(s, k) need   RECOMPUTE(s, k) and RELOAD(s, k) if there are any
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.ir.arrays import Bools, Floats, Ints, codes_of, kinds_in
from penstock.ir.columns import ActionColumns
from penstock.ir.encoding import PORT_SHIFT
from penstock.ir.kinds import Dependency, Kind, StageRelation

__all__ = ["ActionTable", "Bools", "Floats", "Ints", "Need", "codes_of", "kinds_in"]


class Need(NamedTuple):
    """Pairs of parts: `consumer[i]` needs what `producer[i]` makes. -1 is a part that is missing."""

    what: str
    producer: Ints
    consumer: Ints


class ActionTable(ActionColumns):
    """The columns of a schedule with its actions by stage and microbatch, and their dependencies."""

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
