"""Effects: the bytes that each action of a schedule takes and frees, from the table of kinds.

A microbatch that a stage recomputes, or offloads, is held in part between F and its backward:

    F               takes `checkpoint` instead of `activation` where there is a RECOMPUTE, which takes the rest
    OFFLOAD         frees `offloadable` at its end, of a recomputed microbatch at most the checkpoint
    RELOAD          takes it again at its start
"""

from __future__ import annotations

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.kinds import Kind, MemoryEffect, MemoryLine, Moment
from penstock.ir.table import ActionTable, Floats, Ints

__all__ = ["changed_bytes", "effect_bytes"]


def effect_bytes(costs: Costs, num_stages: int, effect: MemoryEffect) -> Floats:
    """Per stage: bytes that an action with this effect takes (above 0) or frees."""
    found = np.zeros(num_stages)
    for name, factor in effect.bytes.items():
        found += factor * np.array(costs.resolved(name, num_stages))
    return found


def changed_bytes(table: ActionTable, costs: Costs, line: MemoryLine, moment: Moment) -> tuple[Ints, Floats]:
    """The parts that change a line at this moment, and by how many bytes."""
    change, is_changed = np.zeros(len(table.code)), np.zeros(len(table.code), dtype=np.bool_)
    for kind in table.kinds:
        for effect in kind.spec.memory:
            if effect.line is line and effect.at is moment:
                parts = np.flatnonzero(table.of_kind(kind))
                stage = table.stage[parts]
                if effect.of is not None:
                    parts = table.at(Kind(effect.of))[stage, table.microbatch[parts]]
                    stage, parts = stage[parts >= 0], parts[parts >= 0]
                change[parts] += effect_bytes(costs, table.placement.num_stages, effect)[stage]
                is_changed[parts] = True
    parts = np.flatnonzero(is_changed)
    return parts, change[parts]
