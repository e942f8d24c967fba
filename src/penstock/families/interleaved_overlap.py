"""Interleaved 1F1B whose steady state is overlapped pairs, to hide the all-to-all of expert parallelism.

    penstock show interleaved-overlap -p 2 -m 4 -v 2

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 2F0 2F1 0F2 ·   ·   0F3+2B0──── 2F2+2B1──── 2F3+0B0──── 0B1──── ·   2B2──── 2B3──── 0B2─
    rank 1  ·   1F0 1F1 3F0 3F1+3B0──── 1F2+3B1──── 1F3+1B0──── 3F2+1B1──── 3F3+3B2──── 3B3──── 1B2──── 1B3─

    time    24  25
    rank 0  ─── 0B3────
    rank 1  ─── ·   ·

A rank warms up with one more forward than interleaved 1F1B, so that its next forward and its next backward
never need each other: each pair is the forward of one stage and the backward of another, or of an earlier
microbatch, and the all-to-all of one runs while the other computes.

Legend: p ranks, r this rank, v stages per rank, m microbatches, M = m·v forwards on each rank, g the group (as
in `penstock.families.interleaved`); f, b the compute of a stage's forward and full backward, a, d their
all-to-all.

    warm-up   min((v - 1)g + 2(p - 1 - r) + 1, M)
    makespan  (m·v + p - 1)(f + b) + p·v(a + d)      p | m, F = I = W, a and d at most as long as F
    memory    warm-up + 1 live activations
"""

from __future__ import annotations

from penstock.families.interleaved import Groups, all_ranks
from penstock.families.rank_order import overlapped_pairs
from penstock.families.registry import register
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register(
    "interleaved-overlap",
    "interleaved 1F1B in overlapped pairs, which hide the all-to-all of experts",
    smallest_group=all_ranks,
)
def interleaved_overlap(
    ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None
) -> Schedule:
    """Warm up with one more forward, so that the next forward and backward are a pair of different work."""
    groups = Groups.of(ranks, microbatches, group, all_ranks(ranks))
    placement = Placement.loop(ranks, stages_per_rank)
    return groups.one_f_one_b(placement, microbatches, "interleaved-overlap", overlapped_pairs, more=1)
