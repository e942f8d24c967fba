"""DualPipeV: a V of two stages per rank in which forwards and backwards overlap, hiding communication.

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

from penstock.families.registry import register
from penstock.families.rows import Row, keep_microbatches
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

__all__ = ["dualpipev"]


@register(
    "dualpipev",
    "V placement with overlapped forward and backward pairs, for communication-heavy stages",
    stages_per_rank=2,
)
def dualpipev(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Built for at least 2p microbatches, which fill the V both ways; those beyond m are left out."""
    built = max(2 * ranks, microbatches)
    rows = [keep_microbatches(_row(ranks, rank, built), microbatches) for rank in range(ranks)]
    return Schedule.from_codes(rows, Placement.v(ranks, stages_per_rank), microbatches, "dualpipev")


def _row(p: int, r: int, n: int) -> list[int]:  # noqa: C901 -- eight steps, one loop each
    a, b = r, 2 * p - 1 - r
    row = Row()
    put_off: deque[int] = deque()

    def backward(stage: int, *, split: bool) -> None:
        if split:
            row.I(stage)
            put_off.append(stage)
        else:
            row.B(stage)

    # Step 1: nFa
    for _ in range(2 * (p - r - 1)):
        row.F(a)
    # Step 2: nFaFb
    for _ in range(r + 1):
        row.F(a)
        row.F(b)
    # Step 3: nIbWbFb
    for _ in range(p - r - 1):
        row.I(b)
        row.W(b)
        row.F(b)
    # Step 4 (main): n(Fa&Bb)(Fb&Ba); where the V turns, the first backward has nothing to hide behind
    for i in range(n - 2 * p + r + 1):
        if i == 0 and r == p - 1:
            row.F(a)
            row.B(b)
        else:
            row.F_and_B(a, b)
        row.F_and_B(b, a)
    # Step 5: nBb(Fb&Ba)
    for _ in range(p - r - 1):
        row.B(b)
        row.F_and_B(b, a)
    # Step 6: nBbBa, from the middle on with weights put off: nIbIa
    for i in range(r + 1):
        backward(b, split=2 * i >= r + 1)
        backward(a, split=2 * i >= r)
    # Step 7: nWIa
    for _ in range(p - r - 1):
        row.W(put_off.popleft())
        backward(a, split=True)
    # Step 8: nW
    while put_off:
        row.W(put_off.popleft())
    return row.codes
