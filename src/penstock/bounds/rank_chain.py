"""The steps of one microbatch on a few ranks as a chain, with all other ranks as delays.

F of their stages come in ascending order, then I in descending order; W follows the I of its stage. Between two
steps of the chain other ranks take at least the seconds between the heads of the two. A token is a step of the
chain, or a W that takes time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.bounds.memory_bounds import drains
from penstock.bounds.workload import Window, Workload
from penstock.cost.memory import stage_bytes
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.table import Floats, Ints

__all__ = ["RankChain"]

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class RankChain:
    """What some ranks do for a microbatch, in a chain of stages and without overlapped pairs."""

    work: Workload
    limit: float
    """Bytes per rank."""
    ranks: tuple[int, ...]
    own_span: bool = False
    """Whether to count from the first start to the last end of the rank, which is then the only one."""

    @cached_property
    def stages(self) -> list[int]:
        """Of all these ranks."""
        return sorted(s for rank in self.ranks for s in self.work.placement.stages_of_rank[rank])

    @cached_property
    def deferred(self) -> list[int]:
        """Stages whose W takes time."""
        return [s for s in self.stages if self.work.weight_gradient[s] > 0]

    @cached_property
    def tokens(self) -> list[tuple[str, int]]:
        """Kind and stage: the chain, then W."""
        forward = [("F", s) for s in self.stages]
        return [*forward, *(("I", s) for s in reversed(self.stages)), *(("W", s) for s in self.deferred)]

    @cached_property
    def length(self) -> int:
        """Steps of the chain."""
        return 2 * len(self.stages)

    @cached_property
    def rank(self) -> Ints:
        """Per token: which of the ranks."""
        return np.array([self.ranks.index(self.work.placement.stage_to_rank[s]) for _, s in self.tokens])

    @cached_property
    def needed(self) -> list[int]:
        """Per token: the one that the same microbatch needs; -1 for the first."""
        return [*range(-1, self.length - 1), *(self.tokens.index(("I", s)) for s in self.deferred)]

    def of_rank(self, q: int, kinds: str = "FIW") -> list[int]:
        """The tokens of a rank."""
        return [token for token, (kind, _) in enumerate(self.tokens) if self.rank[token] == q and kind in kinds]

    # --- seconds -----------------------------------------------------------------------------------

    @cached_property
    def window(self) -> Window:
        """Heads and tails."""
        return self.work.window(self.ranks[0] if self.own_span else None)

    @cached_property
    def seconds(self) -> Floats:
        """Per token."""
        launch, work = self.work.costs.launch_overhead, self.work
        of = {"F": work.forward, "I": work.input_gradient, "W": work.weight_gradient}
        return np.array([of[kind][s] + (launch if kind != "W" else 0.0) for kind, s in self.tokens])

    @cached_property
    def spent(self) -> Floats:
        """Per token and rank: its seconds."""
        found = np.zeros((len(self.tokens), len(self.ranks)))
        found[np.arange(len(self.tokens)), self.rank] = self.seconds
        return found

    @cached_property
    def delays(self) -> Floats:
        """Per step of the chain: what other ranks take at least between it and the next one."""
        heads = np.array([self.window[0][kind][s] for kind, s in self.tokens[: self.length]])
        return np.append(np.diff(heads) - self.seconds[: self.length - 1], 0.0)

    @cached_property
    def tails(self) -> Floats:
        """Per token."""
        return np.array([self.window[1][kind][s] for kind, s in self.tokens])

    @cached_property
    def idle(self) -> list[list[tuple[int, float]]]:
        """Per rank: a token and the least seconds without work while not all have done it; -1 for always."""
        found = []
        for q, rank in enumerate(self.ranks):
            least = float(self.tails[self.of_rank(q)].min())
            each = zip(self.of_rank(q, "F"), drains(self.work, rank, self.limit, own_span=self.own_span))
            found.append([(-1, least), *((token, drain) for token, drain in each if drain > least)])
        return found

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def changes(self) -> Floats:
        """Per token and rank: bytes taken, or freed."""
        sizes = stage_bytes(self.work.costs, self.work.placement.num_stages, MemoryLine.ACTIVATIONS)
        found = np.zeros((len(self.tokens), len(self.ranks)))
        for token, (kind, s) in enumerate(self.tokens):
            # a W that takes no time is a part of I
            kinds = (Kind.I, Kind.W) if kind == "I" and s not in self.deferred else (Kind(kind),)
            found[token, self.rank[token]] = sum(float(sizes[each.number, s]) for each in kinds)
        return found

    @cached_property
    def taken(self) -> Floats:
        """Per token: bytes that have to be free before it starts; any number of them for I and W."""
        own = self.changes[np.arange(len(self.tokens)), self.rank]
        return np.where([kind == "F" for kind, _ in self.tokens], own, -np.inf)

    @cached_property
    def activation_limits(self) -> Floats:
        """Bytes for activations per rank."""
        return np.array([self.work.activation_limit(r, self.limit) * (1 + _ROUNDING) for r in self.ranks])

    @cached_property
    def in_flight(self) -> int:
        """The most microbatches between the first and the last step of the chain."""
        size, limit = self.changes[0, self.rank[0]], self.activation_limits[self.rank[0]]
        return int(min(self.work.microbatches, limit / size if size else math.inf))

    @cached_property
    def code(self) -> Ints | None:
        """Per token: a number; their products with counts tell apart those of equal sum. None if too many."""
        most = [self.in_flight + 1] * (self.length - 1) + [self.work.microbatches + 1] * len(self.deferred)
        if math.prod(most) >= 1 << 62:
            return None
        found, factor = np.zeros(len(self.tokens), dtype=np.int64), 1
        for token, size in enumerate(most, start=1):
            found[self.needed[token]] += factor
            found[token] -= factor
            factor *= size
        return found
