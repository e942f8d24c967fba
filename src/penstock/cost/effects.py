"""Effects: the bytes that each action of a schedule takes and frees, from the table of kinds.

A microbatch that a stage recomputes, or offloads, is held in part between F and its backward:

    F               takes `checkpoint` instead of `activation` where there is a RECOMPUTE, which takes the rest
    OFFLOAD         frees `offloadable` at its end, of a recomputed microbatch at most the checkpoint
    RELOAD          takes it again at its start
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np

from penstock.cost.costs import Costs
from penstock.ir.encoding import Floats, Ints
from penstock.ir.kinds import Kind, MemoryLine, Moment
from penstock.ir.table import ActionTable


def effect_bytes(costs: Costs, num_stages: int, factors: Mapping[str, int]) -> Floats:
    """Per stage: bytes taken (above 0) or freed, the sum of these fields of `Costs`, each times its factor."""
    found = np.zeros(num_stages)
    for name, factor in factors.items():
        if factor:
            found += factor * np.array(costs.resolved(name, num_stages))
    return found


def held_bytes(costs: Costs, num_stages: int, policies: Collection[Kind] = ()) -> Floats:
    """Per stage: bytes that a microbatch holds between its F and its backward.

    `policies` are RECOMPUTE and OFFLOAD if the microbatch has such actions; copies are taken to have ended.
    """
    factors: Counter[str] = Counter()
    for kind in (Kind.F, *policies):
        for effect in kind.spec.memory:
            changed = Kind(effect.of or kind.value)
            is_before = changed is Kind.F or (changed is Kind.OFFLOAD and changed in policies)
            if effect.line is MemoryLine.ACTIVATIONS and is_before:
                factors.update(effect.bytes)
    return effect_bytes(costs, num_stages, factors)


def changed_bytes(table: ActionTable, costs: Costs, line: MemoryLine, moment: Moment) -> tuple[Ints, Floats]:
    """The parts that change a line at this moment, and by how many bytes."""
    stages = table.placement.num_stages
    own, of_others = np.zeros((len(Kind), stages)), []
    changing = set()
    for kind in table.kinds:
        for effect in (each for each in kind.spec.memory if each.line is line and each.at is moment):
            if effect.of is None:
                changing.add(kind)
                own[kind.number] += effect_bytes(costs, stages, effect.bytes)
            else:
                of_others.append((kind, effect))
    parts = np.flatnonzero(table.of_kind(*changing))
    change = own.ravel()[table.kind[parts] * np.int64(stages) + table.stage[parts]]
    if not of_others:
        return parts, change
    whole, is_changed = np.zeros(len(table.code)), np.zeros(len(table.code), dtype=np.bool_)
    whole[parts], is_changed[parts] = change, True
    for kind, effect in of_others:
        makers = np.flatnonzero(table.of_kind(kind))
        changed = table.at(Kind(str(effect.of)))[table.stage[makers], table.microbatch[makers]]
        makers, changed = makers[changed >= 0], changed[changed >= 0]
        whole[changed] += effect_bytes(costs, stages, effect.bytes)[table.stage[makers]]
        is_changed[changed] = True
    parts = np.flatnonzero(is_changed)
    return parts, whole[parts]
