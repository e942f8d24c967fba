"""GIS and GIS-H: interleaved 1F1B in groups, with a short warm-up; the input gradient is sent before W runs.

    penstock show gis -p 2 -m 4 -v 2

    time    0                   5                   10                  15                  20
    rank 0  0F0 0F1 2F0 2F1 ·   2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 ·   2I3 2W3 0I2 0W2
    rank 1  ·   1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3

    time    24  25
    rank 0  0I3 0W3
    rank 1  1W3 ·

Legend: p ranks, r this rank, v stages per rank, m microbatches, g the group; F, B, W the time of a stage's
forward, input gradient and weight gradient. Memory counts activations of a stage; those of the whole model for
one microbatch are M = p·v. Idle is the makespan minus the compute time of a rank.

    group     p by default (GIS), from ceil(p/2) to m; ceil(p/2) (GIS-H)
    warm-up   (v - 1)g + p - 1 - r forwards; then F I W in turn, and W is never deferred
    memory    (v - 1)g + p - r, g | m           on rank r, so at most
              p·v               = M             GIS
              p(v + 1)/2        = (v + 1)M/2v   GIS-H, p even
    idle      (p - 1)(F + B)                    GIS, p | m
              (p - 1)(F + B) + (v - 1)(p - g)(F + B - W)    ceil(p/2) <= g <= p, g | m, F + B >= W

Two entries of the table in the paper need care. The idle time of GIS-H is (v - 1)p/2 (F + B - W) more than that
of GIS for even p; for odd p the formula in g holds at F = B = W, and at other costs it can be an upper bound:
p = 3, v = 2, g = 2, F = 2, B = 3, W = 1 idles 13, not 14. The memory (v + 1)M/v of interleaved 1F1B is rounded:
it is (v + 1)p - 1 activations, one less.
"""

from __future__ import annotations

from penstock.families.interleaved import Groups, half_the_ranks
from penstock.families.registry import register
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule


@register(
    "gis",
    "interleaved 1F1B in groups with split backward: less memory than interleaved 1F1B",
    aliases=("grouped-interleaved",),
    smallest_group=half_the_ranks,
)
def gis(ranks: int, microbatches: int, stages_per_rank: int, *, group: int | None = None) -> Schedule:
    """Groups of p microbatches, unless given: the memory of 1F1B, less than its bubble divided by v."""
    groups = Groups.of(ranks, microbatches, group, half_the_ranks(ranks))
    placement = Placement.loop(ranks, stages_per_rank)
    return groups.split(placement, microbatches, groups.name("gis"), weight_delay=lambda _: 0)


@register("gis-h", "GIS in groups of half the ranks: about half the memory of 1F1B")
def gis_h(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Groups of ceil(p/2) microbatches: a stage waits for its input, and holds half as many activations."""
    half = half_the_ranks(ranks)
    groups = Groups.of(ranks, microbatches, half, half)
    placement = Placement.loop(ranks, stages_per_rank)
    return groups.split(placement, microbatches, "gis-h", weight_delay=lambda _: 0)
