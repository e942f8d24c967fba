"""Stages of an estimated model: its layers as a `Model`, partitions, costs of stages, fits to a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isclose
from statistics import fmean
from typing import Any

from penstock.arguments import plural
from penstock.cost.costs import Costs, as_tuple
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.estimate import Estimate, link_of
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import Passes
from penstock.errors import EstimateError, Parameter, PlanError
from penstock.ir.placement import Placement
from penstock.planning.layers import candidate_partitions
from penstock.planning.model import Layer, Model
from penstock.planning.partition import LayerCounts, even_partition

_PASSES = ("forward", "backward_input", "backward_weight")
_KINDS = {"embedding": "embedding", "output": "head", "mtp block": "mtp"}


def layer_kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer in a `Model`."""
    return [_KINDS.get(kind, "layer") for kind in config.kinds]


def estimated_model(found: Estimate, ranks: int) -> Model:
    """The layers as a model to plan, of which one sample is one microbatch."""
    link = link_of("pipeline", found.device, found.parallel, ranks)
    common = Costs(latency=link.latency, bandwidth=link.bandwidth)
    kinds = zip(found.config.kinds, layer_kinds(found.config))
    layers = tuple(
        Layer(f"{name} {number}", found.by_kind[name].costs, kind) for number, (name, kind) in enumerate(kinds)
    )
    return Model(layers, common, ranks, found.device.memory_bytes, name=found.config.name)


def even_blocks(found: Estimate, stages: int) -> LayerCounts:
    """Blocks evenly over the stages, the embedding with the first and the output layer with the last."""
    blocks = found.config.layers
    if stages > blocks:
        raise PlanError(
            f"{stages} stages need a block each, but {found.config.name} has {plural(blocks, 'block')}: use "
            "fewer ranks or stages per rank"
        )
    counts = list(even_partition(blocks, stages))
    counts[0] += 1
    counts[-1] += 1 + found.config.mtp_layers
    return tuple(counts)


def balanced_layers(found: Estimate, placement: Placement) -> LayerCounts:
    """Layers in stages so that the busiest rank has as little to do as possible."""
    even_blocks(found, placement.num_stages)
    return candidate_partitions(estimated_model(found, placement.num_ranks), placement)[0]


def stage_costs(found: Estimate, placement: Placement, counts: Sequence[int]) -> Costs:
    """Costs of stages with these numbers of layers.

    The optimizer step is that of the rank where it takes longest, with the gather of new weights.
    """
    costs = estimated_model(found, placement.num_ranks).costs(counts, 1)
    ends = list(pairwise([0, *accumulate(counts)]))
    steps = []
    for own in placement.stages_of_rank:
        layers = [layer for stage in own for layer in found.layers[slice(*ends[stage])]]
        update = found.update_seconds(sum(layer.weights.updated for layer in layers))
        steps.append(update + found.gather_seconds(found.layers[slice(*ends[own[0]])]))
    return replace(
        costs,
        optimizer_step=max(steps),
        host_bandwidth=found.device.host_link * found.device.attainable.links,
    )


def fitted_device(found: Estimate, measured: Costs, counts: Sequence[int]) -> Device:
    """The device with the factors on each pass with which the stages take as long as measured, in sum.

    A backward that runs as a whole is quicker than its two gradients apart: a profile with B, I and W fits
    both. With only one of them, the other is taken to last as long.
    """
    stages = len(counts)
    try:
        passes = [sum(measured.per_stage(name, stages)) for name in _PASSES]
        whole = sum(measured.full_backward(stages))
    except ValueError as error:
        raise EstimateError(
            f"the profile must have one entry for each of {plural(stages, 'stage')} (",
            *(Parameter("ranks"), " x ", Parameter("stages_per_rank"), f", as it was measured): {error}"),
            parameter="fit",
        ) from None
    own = Passes.sum(layer.seconds.compute for layer in found.layers)
    forward, *gradients = passes
    if _is_whole(measured, stages):
        factor = whole / (own.input_gradient + own.weight_gradient)
        factors, joined = Passes(forward / own.forward, factor, factor), 1.0
    else:
        factors = Passes(*(seconds / mine for seconds, mine in zip(passes, own)))
        joined = whole / sum(gradients) if sum(gradients) else 1.0
    before = found.device.attainable
    scaled = Passes(*(a * b for a, b in zip(before.passes, factors)))
    return replace(found.device, attainable=replace(before, passes=scaled, whole_backward=joined))


def _is_whole(measured: Costs, stages: int) -> bool:
    """Whether only whole backwards were measured: gradients are not given, or half of them by calibration."""
    if measured.backward is None:
        return False
    names, default = _PASSES[1:], Costs()
    if all(getattr(measured, name) == getattr(default, name) for name in names):
        return True
    whole = measured.per_stage("backward", stages)
    return all(
        isclose(2 * part, b) for name in names for part, b in zip(measured.per_stage(name, stages), whole)
    )


def with_measured_links(costs: Costs, measured: Costs) -> Costs:
    """Costs with what a profile has measured besides the passes: links, launch overhead, optimizer step.

    All links get the mean latency and the least bandwidth, so that they are right for any number of stages. A
    measured latency without a bandwidth includes the transfer.
    """
    names = ("launch_overhead", "optimizer_step")
    given: dict[str, Any] = {name: getattr(measured, name) for name in names if getattr(measured, name)}
    latency, bandwidth = measured.latency, measured.bandwidth
    if latency or bandwidth is not None:
        given["latency"] = fmean(as_tuple(latency))
        given["bandwidth"] = None if bandwidth is None else min(as_tuple(bandwidth))
    return replace(costs, **given)
