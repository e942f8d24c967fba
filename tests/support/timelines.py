"""Timelines of families, to draw."""

from __future__ import annotations

import penstock
from penstock import Costs, Timeline

__all__ = ["COSTS", "timeline"]

COSTS = Costs(forward=10, backward_input=11, backward_weight=9, latency=1)


def timeline(
    family: str, ranks: int = 4, microbatches: int = 8, costs: Costs = COSTS, *, lowered: bool = True
) -> Timeline:
    """A family, lowered, at costs that tell the kinds apart."""
    built = penstock.build(family, ranks=ranks, microbatches=microbatches)
    return penstock.simulate(penstock.lower(built) if lowered else built, costs)
