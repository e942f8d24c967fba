"""Live activations: how many a rank holds at every moment of its order, and the peak for any costs.

What a rank holds depends on its own order alone, so counts are found once, and the peak follows for any costs
and any partition into stages, without a clock. Copies to the host end when a clock says so: schedules with
OFFLOAD have to be simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.memory import fixed_bytes_of
from penstock.ir.kinds import Kind, MemoryEffect, MemoryLine, Moment
from penstock.ir.table import ActionTable, Bools, Floats, Ints

__all__ = ["LayerBytes", "LiveActivations", "live_activations"]

_COSTS = ("activation", "activation_freed_by_input", "checkpoint")
_HANDLED = frozenset(Kind) - {Kind.OFFLOAD, Kind.RELOAD}


@dataclass(frozen=True, eq=False)
class LiveActivations:
    """One rank: its stages, and how many activations it holds at every moment when it takes one more.

    A row has, for each stage, how often each of `costs` is held.
    """

    stages: tuple[int, ...]
    counts: Floats
    costs: tuple[str, ...] = _COSTS

    def peak(self, costs: Costs, num_stages: int) -> float:
        """The most bytes at once, fixed bytes included."""
        sizes = [costs.per_stage(name, num_stages)[s] for name in self.costs for s in self.stages]
        return fixed_bytes_of(costs, self.stages, num_stages) + self.most_held(sizes)

    def most_held(self, sizes: Sequence[float]) -> float:
        """The most bytes of activations at once, given each of `costs` of each stage."""
        return float((self.counts @ np.array(sizes)).max(initial=0))


class LayerBytes:
    """Memory of stages that are ranges of layers: the bytes of layers are summed once, for any partition."""

    def __init__(self, costs: Costs, num_layers: int) -> None:
        """`costs` has one entry per layer."""
        fixed = [fixed_bytes_of(costs, (layer,), num_layers) for layer in range(num_layers)]
        self._fixed = [0.0, *accumulate(fixed)]
        self._until = {name: [0.0, *accumulate(costs.per_stage(name, num_layers))] for name in _COSTS}

    def with_live(self, number: float) -> list[float]:
        """Of each layer: its fixed bytes, and this many live activations."""
        activation = self._until["activation"]
        return [b - a + number * (d - c) for (a, b), (c, d) in zip(pairwise(self._fixed), pairwise(activation))]

    def peak(self, live: LiveActivations, ranges: Sequence[tuple[int, int]]) -> float:
        """The most bytes that a rank holds at once if its stages have these ranges of layers."""
        fixed = sum(self._fixed[j] - self._fixed[i] for i, j in ranges)
        sums = (self._until[name] for name in live.costs)
        return fixed + live.most_held([until[j] - until[i] for until in sums for i, j in ranges])


def live_activations(table: ActionTable) -> list[LiveActivations]:
    """One for each rank of a compute schedule."""
    table.require_handled(_HANDLED, "cost.live_activations")
    names = _COSTS if table.has(Kind.RECOMPUTE) else _COSTS[:2]
    takes = _takes_at_start()[table.kind]
    changes = _changes(table, names)
    found = []
    for rank, stages in enumerate(table.placement.stages_of_rank):
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        # an overlapped pair takes at its start and frees at its end, whichever part is named first
        parts = parts[np.lexsort((~takes[parts], table.slot[parts]))]
        stage = np.searchsorted(stages, table.stage[parts])
        change = np.zeros((len(parts), len(names) * len(stages)))
        for column, factors in enumerate(changes):
            change[np.arange(len(parts)), stage + column * len(stages)] = factors[parts]
        levels = np.cumsum(change, axis=0)[takes[parts]]
        found.append(LiveActivations(stages, np.unique(levels, axis=0), names))
    return found


def _changes(table: ActionTable, names: tuple[str, ...]) -> Floats:
    """Per cost and part: how often the part takes it, or, below 0, frees it."""
    change = np.zeros((len(names), len(table.code)))
    for kind in table.kinds:
        for effect in _effects(kind):
            parts: Ints = np.flatnonzero(table.of_kind(kind))
            if effect.of is not None:
                parts = table.at(Kind(effect.of))[table.stage[parts], table.microbatch[parts]]
            for name, factor in effect.bytes.items():
                change[names.index(name), parts] += factor
    return change


def _effects(kind: Kind) -> list[MemoryEffect]:
    """Its effects on activations, but for those on copies to the host."""
    own = (effect for effect in kind.spec.memory if effect.line is MemoryLine.ACTIVATIONS)
    return [effect for effect in own if effect.of is None or Kind(effect.of) in _HANDLED]


def _takes_at_start() -> Bools:
    """Per kind: whether it changes the activations held at its start."""
    return np.array([any(effect.at is Moment.START for effect in _effects(kind)) for kind in Kind])
