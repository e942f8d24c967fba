"""Groups of microbatches in interleaved orders: a group passes all stages of a rank before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.families.rank_order import defer_weights, keep_microbatches
from penstock.ir.action import Kind
from penstock.ir.placement import Placement
from penstock.ir.table import Ints, codes_of

__all__ = ["Groups", "all_ranks", "half_the_ranks"]


def all_ranks(ranks: int) -> int:
    """The smallest group of interleaved 1F1B: with fewer microbatches, its warm-up can deadlock."""
    return ranks


def half_the_ranks(ranks: int) -> int:
    """The smallest group of interleaved zero bubble."""
    return -(-ranks // 2)


class Groups(NamedTuple):
    """Microbatches in groups, each of which passes all stages of a rank before the next."""

    microbatches: int
    """Microbatches to build for: m, or the next larger number that the order can be built for."""
    size: int
    is_default: bool

    @classmethod
    def of(cls, ranks: int, microbatches: int, group: int | None, smallest: int) -> Groups:
        """Groups of the size of torch, which are equal, or of the given size, with a rest in the last one."""
        built = microbatches
        while built % max(1, built // ranks):
            built += 1
        default = cls(built, built // max(1, built // ranks), is_default=True)
        if group is None or (built == microbatches and group == default.size):
            return default
        while 0 < microbatches % group < smallest:
            microbatches += 1
        return cls(microbatches, group, is_default=False)

    def codes(self, kind: Kind, stages: tuple[int, ...]) -> Ints:
        """The actions of one kind: group after group, in each stage after stage."""
        microbatch = np.arange(self.microbatches)
        whole = self.microbatches - self.microbatches % self.size
        own = np.array(stages, dtype=np.int64)[:, None]
        groups = codes_of(kind, own, microbatch[:whole].reshape(-1, 1, self.size))
        return np.concatenate((groups.ravel(), codes_of(kind, own, microbatch[whole:]).ravel()))

    def one_f_one_b_orders(
        self,
        placement: Placement,
        microbatches: int,
        steady: Callable[[Ints, Ints], Ints],
        *,
        more: int = 0,
    ) -> list[Ints]:
        """Per rank: a warm-up of (v - 1)g + 2(p - 1 - r) + `more` forwards, `steady`, the other backwards."""
        ranks, orders = placement.num_ranks, []
        for rank, stages in enumerate(placement.stages_of_rank):
            forwards, backwards = self.codes(Kind.F, stages), self.codes(Kind.B, stages[::-1])
            warmup = min((len(stages) - 1) * self.size + 2 * (ranks - 1 - rank) + more, len(forwards))
            both = steady(forwards[warmup:], backwards)
            order = np.concatenate((forwards[:warmup], both, backwards[len(forwards) - warmup :]))
            orders.append(keep_microbatches(order, microbatches))
        return orders

    def split_orders(
        self, placement: Placement, microbatches: int, weight_delay: Callable[[int], int]
    ) -> list[Ints]:
        """Per rank: a warm-up of (v - 1)g + p - 1 - r forwards, then F I W in turn, each W deferred."""
        ranks, orders = placement.num_ranks, []
        for rank, stages in enumerate(placement.stages_of_rank):
            forwards = self.codes(Kind.F, stages)
            inputs, weights = (self.codes(kind, stages[::-1]) for kind in (Kind.I, Kind.W))
            warmup = min((len(stages) - 1) * self.size + ranks - 1 - rank, len(forwards))
            rest = defer_weights(forwards[warmup:], inputs, weights, delay=weight_delay(rank))
            orders.append(keep_microbatches(np.concatenate((forwards[:warmup], rest)), microbatches))
        return orders

    def name(self, family: str) -> str:
        """The name of the schedule: that of the family, with the group unless it is the default."""
        return family if self.is_default else f"{family} group={self.size}"
