"""DualPipeV: V placement of two stages per rank; forwards overlap with backwards to hide communication.

    penstock show dualpipev -p 2 -m 4

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1──── ·   3F2+0B0──── 3B2──── ·   3F3+0B1──── 3B3──── 0I2 0W2
    rank 1  ·   1F0 2F0 1F1 2F1 1F2 2B0──── 2F2+1B0──── 1F3+2B1──── 2F3+1B1──── 2B2──── 1B2──── ·   2I3 1I3

    time    24  25
    rank 0  0I3 0W3
    rank 1  2W3 1W3

Legend: p ranks, r this rank, a = stage r, b = stage 2p - 1 - r, m microbatches; F&B the time of a pair.

    bubble    at most (p - 1)(F&B + B - 3W) per rank, B a full backward; exactly that at F = I = W
    memory    2p + 1 live activations of half-rank stages
"""

from __future__ import annotations

from collections import deque

from penstock.families.rank_order import keep_microbatches, number_microbatches, of_stage
from penstock.families.registry import register
from penstock.ir.encoding import JOINED, Ints
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

Steps = tuple[int, int, int, int]
"""F, I, W and B of a stage."""


@register(
    "dualpipev",
    "V placement with overlapped forward and backward pairs, for communication-heavy stages",
    stages_per_rank=2,
)
def dualpipev(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Build for at least 2p microbatches, which fill the pipeline, and drop those beyond m."""
    built = max(2 * ranks, microbatches)
    orders = [keep_microbatches(_order(ranks, rank, built), microbatches) for rank in range(ranks)]
    return Schedule.from_codes(orders, Placement.v(ranks, stages_per_rank), microbatches, "dualpipev")


def _order(p: int, r: int, n: int) -> Ints:
    a, b = of_stage(r), of_stage(2 * p - 1 - r)
    return number_microbatches(_warm_up(p, r, a, b) + _steady_state(p, r, n, a, b) + _cool_down(p, r, a, b))


def _warm_up(p: int, r: int, a: Steps, b: Steps) -> list[int]:
    (fa, *_), (fb, ib, wb, _) = a, b
    return (
        2 * (p - r - 1) * [fa]  # Step 1: nFa
        + (r + 1) * [fa, fb]  # Step 2: nFaFb
        + (p - r - 1) * [ib, wb, fb]  # Step 3: nIbWbFb
    )


def _steady_state(p: int, r: int, n: int, a: Steps, b: Steps) -> list[int]:
    (fa, *_, ba), (fb, *_, bb) = a, b
    with_bb, with_ba = bb | JOINED, ba | JOINED
    # Step 4: n(Fa&Bb)(Fb&Ba); on the last rank the first F and B are not overlapped
    pairs = (n - 2 * p + r + 1) * [fa, with_bb, fb, with_ba]
    if r == p - 1:
        pairs[1] = bb
    # Step 5: nBb(Fb&Ba)
    return pairs + (p - r - 1) * [bb, fb, with_ba]


def _cool_down(p: int, r: int, a: Steps, b: Steps) -> list[int]:
    (_, ia, wa, ba), (_, ib, wb, bb) = a, b
    order: list[int] = []
    deferred: deque[int] = deque()  # weight gradients

    def backward(full: int, split: int, weight: int, *, splits: bool) -> None:
        order.append(split if splits else full)
        if splits:
            deferred.append(weight)

    # Step 6: nBbBa, and from the middle on with deferred weight gradients: nIbIa
    for i in range(r + 1):
        backward(bb, ib, wb, splits=2 * i >= r + 1)
        backward(ba, ia, wa, splits=2 * i >= r)
    # Step 7: nWIa
    for _ in range(p - r - 1):
        order.append(deferred.popleft())
        backward(ba, ia, wa, splits=True)
    # Step 8: nW
    return [*order, *deferred]
