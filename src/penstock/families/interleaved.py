"""Interleaved schedules: several stages per rank in a loop, so that warm-up and cool-down take shorter steps.

    penstock show interleaved-1f1b -p 2 -m 4 -v 2

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 2F0 2F1 0F2 ·   2B0──── 0F3 2B1──── 2F2 0B0──── 2F3 0B1──── ·   2B2──── ·   2B3──── 0B2─
    rank 1  ·   1F0 1F1 3F0 3B0──── 3F1 3B1──── 1F2 1B0──── 1F3 1B1──── 3F2 3B2──── 3F3 3B3──── 1B2──── 1B3─

    time    24  25
    rank 0  ─── 0B3────
    rank 1  ─── ·   ·

Microbatches run in rounds of g: a round passes the first local stage, then the second, and so on.

Legend: p ranks, r this rank, v stages per rank, m microbatches, M = m·v forwards on each rank, c a hop;
F, B, W the forward, input-gradient and weight-gradient time of all stages of a rank together.

    round     g = m / max(1, m div p); if that is not an integer, the order is built for the next larger m
              with an integer g, and the microbatches beyond m are dropped
    warm-up   min((v - 1)g + 2(p - 1 - r), M)        interleaved 1F1B
              min((v - 1)g +  (p - 1 - r), M)        interleaved zero bubble
    makespan  m(F + B + W) + (p - 1)(F + B + W)/v + (2pv - 2)c     interleaved 1F1B, p | m
              one third of that bubble at F = B = W                interleaved zero bubble
    memory    warm-up + 1 live activations           interleaved 1F1B
              p·v where p divides m, else more       interleaved zero bubble
"""

from __future__ import annotations

from penstock.families.rank_order import alternate, codes_of, defer_weights, keep_microbatches
from penstock.families.registry import register
from penstock.ir.action import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["forward_only", "interleaved_1f1b", "interleaved_zero_bubble"]


@register("interleaved-1f1b", "1F1B over several stages per rank: 1/v of the bubble, more messages")
def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Warm up, alternate forwards and backwards, then run the remaining backwards."""
    placement = Placement.loop(ranks, stages_per_rank)
    built, per_round = _rounds(ranks, microbatches)
    orders = []
    for rank, stages in enumerate(placement.stages_of_rank):
        forwards = _in_rounds(Kind.F, stages, built, per_round)
        backwards = _in_rounds(Kind.B, stages[::-1], built, per_round)
        warmup = min((stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank), len(forwards))
        steady = len(forwards) - warmup
        order = forwards[:warmup] + alternate(forwards[warmup:], backwards) + backwards[steady:]
        orders.append(keep_microbatches(order, microbatches))
    return Schedule.from_codes(orders, placement, microbatches, "interleaved-1f1b")


@register(
    "interleaved-zero-bubble",
    "interleaved 1F1B with split backward: weight gradients fill the bubble",
)
def interleaved_zero_bubble(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Warm up with about half as many forwards, then alternate F and I; rank r defers each W by r backwards."""
    placement = Placement.loop(ranks, stages_per_rank)
    built, per_round = _rounds(ranks, microbatches)
    orders = []
    for rank, stages in enumerate(placement.stages_of_rank):
        forwards = _in_rounds(Kind.F, stages, built, per_round)
        inputs = _in_rounds(Kind.I, stages[::-1], built, per_round)
        weights = _in_rounds(Kind.W, stages[::-1], built, per_round)
        warmup = min((stages_per_rank - 1) * per_round + ranks - 1 - rank, len(forwards))
        order = forwards[:warmup] + defer_weights(forwards[warmup:], inputs, weights, delay=rank)
        orders.append(keep_microbatches(order, microbatches))
    return Schedule.from_codes(orders, placement, microbatches, "interleaved-zero-bubble")


@register("forward-only", "inference: the forwards of interleaved 1F1B", default_stages_per_rank=1)
def forward_only(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Run round after round through all local stages; no activation is kept."""
    placement = Placement.loop(ranks, stages_per_rank)
    built, per_round = _rounds(ranks, microbatches)
    orders = [
        keep_microbatches(_in_rounds(Kind.F, stages, built, per_round), microbatches)
        for stages in placement.stages_of_rank
    ]
    return Schedule.from_codes(orders, placement, microbatches, "forward-only")


def _rounds(ranks: int, microbatches: int) -> tuple[int, int]:
    """Return the number of microbatches to build for, and the size of a round."""
    while microbatches % max(1, microbatches // ranks):
        microbatches += 1
    return microbatches, microbatches // max(1, microbatches // ranks)


def _in_rounds(kind: Kind, stages: tuple[int, ...], microbatches: int, per_round: int) -> list[int]:
    return [
        code
        for start in range(0, microbatches, per_round)
        for stage in stages
        for code in codes_of(kind, stage, range(start, start + per_round))
    ]
