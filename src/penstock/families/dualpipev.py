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

from penstock.families.rank_order import RankOrder, keep_microbatches
from penstock.families.registry import register
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["dualpipev"]


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


def _order(p: int, r: int, n: int) -> list[int]:
    order = RankOrder()
    _warm_up(order, p, r)
    _steady_state(order, p, r, n)
    _cool_down(order, p, r)
    return order.codes


def _warm_up(order: RankOrder, p: int, r: int) -> None:
    a, b = r, 2 * p - 1 - r
    # Step 1: nFa
    for _ in range(2 * (p - r - 1)):
        order.F(a)
    # Step 2: nFaFb
    for _ in range(r + 1):
        order.F(a)
        order.F(b)
    # Step 3: nIbWbFb
    for _ in range(p - r - 1):
        order.I(b)
        order.W(b)
        order.F(b)


def _steady_state(order: RankOrder, p: int, r: int, n: int) -> None:
    a, b = r, 2 * p - 1 - r
    # Step 4: n(Fa&Bb)(Fb&Ba); on the last rank the first F and B are not overlapped
    for i in range(n - 2 * p + r + 1):
        if i == 0 and r == p - 1:
            order.F(a)
            order.B(b)
        else:
            order.F_and_B(a, b)
        order.F_and_B(b, a)
    # Step 5: nBb(Fb&Ba)
    for _ in range(p - r - 1):
        order.B(b)
        order.F_and_B(b, a)


def _cool_down(order: RankOrder, p: int, r: int) -> None:
    a, b = r, 2 * p - 1 - r
    deferred: deque[int] = deque()  # stages, by their deferred weight gradients

    def backward(stage: int, *, split: bool) -> None:
        if split:
            order.I(stage)
            deferred.append(stage)
        else:
            order.B(stage)

    # Step 6: nBbBa, and from the middle on with deferred weight gradients: nIbIa
    for i in range(r + 1):
        backward(b, split=2 * i >= r + 1)
        backward(a, split=2 * i >= r)
    # Step 7: nWIa
    for _ in range(p - r - 1):
        order.W(deferred.popleft())
        backward(a, split=True)
    # Step 8: nW
    while deferred:
        order.W(deferred.popleft())
