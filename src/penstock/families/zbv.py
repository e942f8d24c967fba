"""ZB-V: V placement of two stages per rank, split backward, the memory of 1F1B, no bubble at F = B = W.

    penstock show zbv -p 2 -m 4

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1  ·   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3

    time    24
    rank 0  ·
    rank 1  1W3

Legend: p ranks, r this rank, a = stage r, b = stage 2p - 1 - r, m microbatches.

    span      6m units at F = B = W = 1, c = 0 and m >= 2p - 1: no rank idles between its first and last step
    memory    2p live activations of half-rank stages: the same as 1F1B
"""

from __future__ import annotations

from penstock.families.rank_order import keep_microbatches, number_microbatches, of_stage
from penstock.families.registry import register
from penstock.ir.encoding import Ints
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register(
    "zbv",
    "V placement with split backward: no bubble at equal costs, the memory of 1F1B",
    stages_per_rank=2,
    aliases=("zb-v", "ZBVZeroBubble"),
)
def zbv(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Build for at least 2p - 1 microbatches, which fill the pipeline, and drop those beyond m."""
    built = max(2 * ranks - 1, microbatches)
    orders = [keep_microbatches(_order(ranks, rank, built), microbatches) for rank in range(ranks)]
    return Schedule.from_codes(orders, Placement.v(ranks, stages_per_rank), microbatches, "zbv")


def _order(p: int, r: int, n: int) -> Ints:
    (fa, ia, wa, _), (fb, ib, wb, _) = of_stage(r), of_stage(2 * p - 1 - r)
    entering = min(max(n - (2 * p - r - 1), 0), n - p)
    return number_microbatches(
        # Warm-up: microbatches go down the V and back up
        (2 * (p - r) - 1) * [fa]
        + r * [fb, fa]
        + (p - r) * [fb, ib, wb]
        # Steady state: one microbatch enters, one leaves
        + entering * [fa, ia, wa, fb, ib, wb]
        + (n - p - entering) * [ia, wa, fb, ib, wb]
        # Cool-down: input gradients first, because other ranks wait for them; then deferred weight gradients
        + r * [ia, ib]
        + (p - r) * [ia, wa]
        + r * [wb]
        + r * [wa]
    )
