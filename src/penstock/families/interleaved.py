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

from penstock.families.groups import Groups, all_ranks, half_the_ranks
from penstock.families.rank_order import alternate, keep_microbatches
from penstock.families.registry import register
from penstock.ir.action import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["forward_only", "interleaved_1f1b", "interleaved_zero_bubble"]


@register(
    "interleaved-1f1b",
    "1F1B over several stages per rank: 1/v of the bubble, more messages",
    smallest_group=all_ranks,
)
def interleaved_1f1b(
    ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None
) -> Schedule:
    """Warm up, alternate forwards and backwards, then run the remaining backwards."""
    placement = Placement.loop(ranks, stages_per_rank)
    groups = Groups.of(ranks, microbatches, group, all_ranks(ranks))
    orders = groups.one_f_one_b_orders(placement, microbatches, alternate)
    return Schedule.from_codes(orders, placement, microbatches, groups.name("interleaved-1f1b"))


@register(
    "interleaved-zero-bubble",
    "interleaved 1F1B with split backward: weight gradients fill the bubble",
    smallest_group=half_the_ranks,
)
def interleaved_zero_bubble(
    ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None
) -> Schedule:
    """Warm up with about half as many forwards, then alternate F and I; rank r defers each W by r backwards."""
    placement = Placement.loop(ranks, stages_per_rank)
    groups = Groups.of(ranks, microbatches, group, half_the_ranks(ranks))
    orders = groups.split_orders(placement, microbatches, weight_delay=lambda rank: rank)
    return Schedule.from_codes(orders, placement, microbatches, groups.name("interleaved-zero-bubble"))


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
