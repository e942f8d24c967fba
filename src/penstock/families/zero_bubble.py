"""ZB-H1 and ZB-H2: split backward with one stage per rank; weight gradients fill the bubble of 1F1B.

    penstock show zb-h1 -p 3 -m 6

    time    0              5              10             15
    rank 0  F0 F1 F2 ·  ·  I0 W0 F3 I1 W1 F4 I2 W2 F5 I3 W3 I4 W4 I5 W5
    rank 1  ·  F0 F1 ·  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5
    rank 2  ·  ·  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5

    penstock show zb-h2 -p 3 -m 6

    time    0              5              10             15
    rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 ·  ·
    rank 1  ·  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ·
    rank 2  ·  ·  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

Legend: p ranks, r this rank, m microbatches; F, B, W the time of forward, input gradient and weight gradient,
c of a hop between ranks; span is the longest time on any rank from its own first to its own last step.

    warm-up   p - 1 - r forwards; W is deferred by r backwards           ZB-H1
              2(p - 1 - r) forwards; W is deferred by 2r backwards       ZB-H2
    span      m(F + B + W) + (p - 1)(F + B - W) + 4(p - 1)c              ZB-H1, m >= 2p
              m(F + B + W) + (p - 1)(F + B - 2W) + 2(p - 1)c             ZB-H2, m >= 2p
    memory    p live activations                                         ZB-H1
              2p - 1                                                     ZB-H2
"""

from __future__ import annotations

from penstock.families.depth_order import depth_order, depths
from penstock.families.registry import register_over_graphs
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register_over_graphs("zb-h1", "split backward: a third of the bubble of 1F1B with the same memory")
def zb_h1(graph: StageGraph, placement: Placement, microbatches: int) -> Schedule:
    """Warm up as 1F1B; rank r defers each W by r backwards, so every rank has p live activations."""
    depth = depths(graph, placement)
    return depth_order(graph, placement, microbatches, depth, "zb-h1", weight_delay=max(depth))


@register_over_graphs("zb-h2", "split backward: almost no bubble with twice the memory of 1F1B")
def zb_h2(graph: StageGraph, placement: Placement, microbatches: int) -> Schedule:
    """Warm up with twice as many forwards as ZB-H1: 2p - 1 live activations on every rank."""
    warmup = [2 * depth - 1 for depth in depths(graph, placement)]
    return depth_order(graph, placement, microbatches, warmup, "zb-h2", weight_delay=max(warmup))
