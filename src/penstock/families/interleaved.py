"""Interleaved schedules: several stages per rank in a loop, so that warm-up and cool-down take shorter steps.

    penstock show interleaved-1f1b -p 2 -m 4 -v 2

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 2F0 2F1 0F2 ·   2B0──── 0F3 2B1──── 2F2 0B0──── 2F3 0B1──── ·   2B2──── ·   2B3──── 0B2─
    rank 1  ·   1F0 1F1 3F0 3B0──── 3F1 3B1──── 1F2 1B0──── 1F3 1B1──── 3F2 3B2──── 3F3 3B3──── 1B2──── 1B3─

    time    24  25
    rank 0  ─── 0B3────
    rank 1  ─── ·   ·

Microbatches run in groups of g: a group passes the first local stage, then the second, and so on. The smallest
group is depth-first, with the least memory; `group=m` is breadth-first, and hides the most latency:

    penstock show interleaved-1f1b -p 2 -m 4 -v 2 --group 4

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 0F2 0F3 2F0 2F1 2F2 ·   2B0──── 2F3 2B1──── ·   2B2──── ·   2B3──── 0B0──── 0B1──── 0B2─
    rank 1  ·   1F0 1F1 1F2 1F3 3F0 3B0──── 3F1 3B1──── 3F2 3B2──── 3F3 3B3──── 1B0──── 1B1──── 1B2──── 1B3─

    time    24  25
    rank 0  ─── 0B3────
    rank 1  ─── ·   ·

Legend: p ranks, r this rank, v stages per rank, m microbatches, M = m·v forwards on each rank, c a hop;
F, B, W the forward, input-gradient and weight-gradient time of all stages of a rank together.

    group     by default g = m / max(1, m div p); if that is not an integer, the order is built for the next
              larger m with an integer g, and the microbatches beyond m are dropped
              given, from p (interleaved 1F1B) or ceil(p/2) (interleaved zero bubble) to m; the last group is
              m mod g, and if that is smaller than the smallest group, the order is built for the next larger m
    warm-up   min((v - 1)g + 2(p - 1 - r), M)        interleaved 1F1B
              min((v - 1)g +  (p - 1 - r), M)        interleaved zero bubble
    makespan  m(F + B + W) + (p - 1)(F + B + W)/v + (2pv - 2)c     interleaved 1F1B, p | m
              one third of that bubble at F = B = W                interleaved zero bubble
    memory    warm-up + 1 live activations           interleaved 1F1B
              (v - 1)g + p where g divides m         interleaved zero bubble
    idle      (p - 1) + (p - g)(v - 1) + max(0, 2p - 3g - 1)     interleaved zero bubble, F = B = W, g | m
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from penstock.families.rank_order import alternate, defer_weights, keep_microbatches
from penstock.families.registry import register
from penstock.ir.encoding import Ints, codes_of
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

# Groups of microbatches in interleaved orders: a group passes all stages of a rank before the next begins.


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

    def one_f_one_b(
        self,
        placement: Placement,
        microbatches: int,
        family: str,
        steady: Callable[[Ints, Ints], Ints],
        *,
        more: int = 0,
    ) -> Schedule:
        """Per rank: a warm-up of (v - 1)g + 2(p - 1 - r) + `more` forwards, `steady`, the other backwards."""
        ranks, orders = placement.num_ranks, []
        for rank, stages in enumerate(placement.stages_of_rank):
            forwards, backwards = self.codes(Kind.F, stages), self.codes(Kind.B, stages[::-1])
            warmup = min((len(stages) - 1) * self.size + 2 * (ranks - 1 - rank) + more, len(forwards))
            both = steady(forwards[warmup:], backwards)
            order = np.concatenate((forwards[:warmup], both, backwards[len(forwards) - warmup :]))
            orders.append(keep_microbatches(order, microbatches))
        return Schedule.from_codes(orders, placement, microbatches, self.name(family))

    def split(
        self, placement: Placement, microbatches: int, name: str, weight_delay: Callable[[int], int]
    ) -> Schedule:
        """Per rank: a warm-up of (v - 1)g + p - 1 - r forwards, then F I W in turn, each W deferred."""
        ranks, orders = placement.num_ranks, []
        for rank, stages in enumerate(placement.stages_of_rank):
            forwards = self.codes(Kind.F, stages)
            inputs, weights = (self.codes(kind, stages[::-1]) for kind in (Kind.I, Kind.W))
            warmup = min((len(stages) - 1) * self.size + ranks - 1 - rank, len(forwards))
            rest = defer_weights(forwards[warmup:], inputs, weights, delay=weight_delay(rank))
            orders.append(keep_microbatches(np.concatenate((forwards[:warmup], rest)), microbatches))
        return Schedule.from_codes(orders, placement, microbatches, name)

    def name(self, family: str) -> str:
        """The name of the schedule: that of the family, with the group unless it is the default."""
        return family if self.is_default else f"{family} group={self.size}"


@register(
    "interleaved-1f1b",
    "1F1B over several stages per rank: 1/v of the bubble, more messages",
    smallest_group=all_ranks,
)
def interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None
) -> Schedule:
    """Warm up, alternate forwards and backwards, then run the remaining backwards."""
    groups = Groups.of(ranks, microbatches, group, all_ranks(ranks))
    placement = Placement.loop(ranks, stages_per_rank)
    return groups.one_f_one_b(placement, microbatches, "interleaved-1f1b", alternate)


@register(
    "interleaved-zero-bubble",
    "interleaved 1F1B with split backward: weight gradients fill the bubble",
    smallest_group=half_the_ranks,
)
def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None
) -> Schedule:
    """Warm up with about half as many forwards, then alternate F and I; rank r defers each W by r backwards."""
    groups = Groups.of(ranks, microbatches, group, half_the_ranks(ranks))
    placement, name = Placement.loop(ranks, stages_per_rank), groups.name("interleaved-zero-bubble")
    return groups.split(placement, microbatches, name, weight_delay=lambda rank: rank)


@register(
    "forward-only",
    "inference: the forwards of interleaved 1F1B",
    default_stages_per_rank=1,
    smallest_group=lambda _: 1,
    trains=False,
)
def forward_only(ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None) -> Schedule:
    """Run group after group through all local stages; no activation is kept."""
    placement = Placement.loop(ranks, stages_per_rank)
    groups = Groups.of(ranks, microbatches, group, 1)
    orders = [
        keep_microbatches(groups.codes(Kind.F, stages), microbatches) for stages in placement.stages_of_rank
    ]
    return Schedule.from_codes(orders, placement, microbatches, groups.name("forward-only"))
