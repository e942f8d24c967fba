"""GPipe and Looped BFS: all forwards, then all backwards.

    penstock show gpipe -p 3 -m 4

    time    0              5              10             15
    rank 0  F0 F1 F2 F3 ·  ·  ·  ·  ·  ·  B0─── B1─── B2─── B3───
    rank 1  ·  F0 F1 F2 F3 ·  ·  ·  B0─── B1─── B2─── B3─── ·  ·
    rank 2  ·  ·  F0 F1 F2 F3 B0─── B1─── B2─── B3─── ·  ·  ·  ·

Legend: p ranks, m microbatches, v stages per rank; F, B the forward and backward time of one stage.

    makespan  (m + p - 1)(F + B)                     GPipe
              m·v(F + B) + (p - 1)(F + B)            Looped BFS, m >= p
    memory    m live activations on every rank       GPipe
              m·v                                    Looped BFS
"""

from __future__ import annotations

import numpy as np

from penstock.families.depth_order import depth_order
from penstock.families.registry import register, register_over_graphs
from penstock.ir.encoding import codes_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register_over_graphs("gpipe", "all forwards, then all backwards; activation memory grows with m")
def gpipe(graph: StageGraph, placement: Placement, microbatches: int) -> Schedule:
    """Run all forwards, then all backwards."""
    return depth_order(graph, placement, microbatches, [microbatches] * graph.num_stages, "gpipe")


@register(
    "looped-bfs",
    "breadth-first: all microbatches through one local stage, then the next; few unshards with FSDP",
)
def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Run all forwards of each local stage in turn, then all backwards in reverse order."""
    placement = Placement.loop(ranks, stages_per_rank)
    ks, orders = np.arange(microbatches), []
    for stages in placement.stages_of_rank:
        own = np.array(stages, dtype=np.int64)[:, None]
        passes = codes_of(Kind.F, own, ks), codes_of(Kind.B, own[::-1], ks[::-1])
        orders.append(np.concatenate(passes, axis=None))
    return Schedule.from_codes(orders, placement, microbatches, "looped-bfs")
