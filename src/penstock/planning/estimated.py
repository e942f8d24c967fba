"""Stages of an estimated model: its layers as a `Model`, partitions as Megatron makes them, costs of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from penstock.cost.costs import Costs
from penstock.cost.estimate.estimate import Estimate
from penstock.cost.estimate.roofline import link_of
from penstock.errors import PlanError
from penstock.ir.placement import Placement
from penstock.planning.model import Layer, Model
from penstock.planning.partition import LayerCounts, even_partition

__all__ = ["estimated_model", "even_blocks", "stage_costs"]

_KINDS = {"embedding": "embedding", "output": "head"}


def estimated_model(found: Estimate, ranks: int) -> Model:
    """The layers as a model to plan, of which one sample is one microbatch."""
    link = link_of("pipeline", found.device, found.setting, ranks)
    common = Costs(latency=link.latency, bandwidth=link.bandwidth)
    kinds = found.config.kinds
    layers = tuple(
        Layer(f"{kind} {number}", found.by_kind[kind].costs, _KINDS.get(kind, "layer"))
        for number, kind in enumerate(kinds)
    )
    return Model(layers, common, ranks, found.device.memory_bytes, name=found.config.name)


def even_blocks(found: Estimate, stages: int) -> LayerCounts:
    """Blocks evenly over the stages, the embedding with the first and the output layer with the last."""
    blocks = found.config.layers
    if stages > blocks:
        raise PlanError(
            f"{stages} stages need a block each, but {found.config.name} has {blocks}: use at most {blocks}"
        )
    counts = list(even_partition(blocks, stages))
    counts[0] += 1
    counts[-1] += 1 + found.config.mtp_layers
    return tuple(counts)


def stage_costs(found: Estimate, placement: Placement, counts: Sequence[int]) -> Costs:
    """Costs of stages with these numbers of layers, with the optimizer step of the rank where it is longest."""
    costs = estimated_model(found, placement.num_ranks).costs(counts, 1)
    ends = list(pairwise([0, *accumulate(counts)]))
    steps = []
    for own in placement.stages_of_rank:
        layers = [layer.weights for stage in own for layer in found.layers[slice(*ends[stage])]]
        steps.append(found.update_seconds(sum(x.updated for x in layers), sum(x.gathered for x in layers)))
    return replace(costs, optimizer_step=max(steps))
