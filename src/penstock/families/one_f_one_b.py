"""1F1B: after a warm-up, forwards and backwards alternate, so activation memory does not grow with m.

    penstock show 1f1b -p 3 -m 5

    time    0              5              10             15             20
    rank 0  F0 F1 F2 ·  ·  ·  ·  B0─── F3 B1─── F4 B2─── ·  B3─── ·  B4───
    rank 1  ·  F0 F1 ·  ·  B0─── F2 B1─── F3 B2─── F4 B3─── ·  B4─── ·  ·
    rank 2  ·  ·  F0 B0─── F1 B1─── F2 B2─── F3 B3─── F4 B4─── ·  ·  ·  ·

Legend: p ranks, r this rank, m microbatches; F, B the forward and backward time of a stage, c of a hop.

    warm-up   min(m, p - r)  forwards              1F1B
              min(m, 2(p - 1 - r) + 1)             eager 1F1B
    makespan  (m + p - 1)(F + B), c = 0            both
              + c(2m(p - 1)/p + 2(p - 2)), p | m   1F1B pays latency in every round; eager hides it
    memory    p - r live activations               1F1B
              2(p - r) - 1                         eager 1F1B
"""

from __future__ import annotations

from penstock.families.depth_order import depth_order, depths
from penstock.families.registry import register_over_graphs
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register_over_graphs("1f1b", "one forward, one backward in turn; at most p live activations")
def one_f_one_b(graph: StageGraph, placement: Placement, microbatches: int) -> Schedule:
    """Warm up with p - r forwards on rank r."""
    return depth_order(graph, placement, microbatches, depths(graph, placement), "1f1b")


@register_over_graphs(
    "eager-1f1b", "1F1B with a longer warm-up that hides latency; at most 2p - 1 live activations"
)
def eager_1f1b(graph: StageGraph, placement: Placement, microbatches: int) -> Schedule:
    """Warm up with twice as many forwards, so that a hop can take as long as a step without a wait."""
    warmup = [2 * depth - 1 for depth in depths(graph, placement)]
    return depth_order(graph, placement, microbatches, warmup, "eager-1f1b")
