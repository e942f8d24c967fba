"""Seconds of operations and collectives on a device: a roofline with the shares of the peaks it attains.

An operation takes the longer of its FLOPs and its bytes, plus the seconds of its kernels. A collective takes
its bytes over the link of its group, plus the latency of its calls. Collectives of tensor parallelism delay the
layer; keys and values that go round the context parallel ranks are hidden behind attention as far as that
lasts; dispatch and combine of experts are on a stream of their own (`penstock.cost.prices`).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.operations import Collective, LayerOperations, Operation, Passes
from penstock.cost.estimate.parallel_config import ParallelConfig


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a group: attainable bytes per second of each rank, and seconds of a call."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer in each pass, on the compute stream and on the stream of the all-to-all."""

    compute: Passes
    all_to_all: Passes
    recomputed: float
    """Of the input gradient: seconds of forwards that are repeated."""


def operation_seconds(operation: Operation, device: Device, precision: str) -> Passes:
    """Of each pass."""
    shares = device.attainable
    if operation.resource == "attention":  # in bf16 also if matrix products are in fp8
        rate = device.peak("bf16" if precision == "fp8" else precision) * shares.attention
    else:
        rate = device.peak(precision) * shares.matmul
    bandwidth = device.memory_bandwidth * shares.memory
    return Passes(
        *(
            (max(flops / rate, moved / bandwidth) + operation.kernels * shares.kernel_seconds) * factor
            if flops or moved
            else 0.0
            for flops, moved, factor in zip(operation.flops, operation.moved, shares.passes)
        )
    )


def link_of(
    group: str, device: Device, parallel: ParallelConfig, stages: int = 1, network_share: float = 1.0
) -> Link:
    """The link of a group's ranks. Ranks are numbered tensor, context, data, pipeline parallel, from inside."""
    t, c, node = parallel.tensor_parallel, parallel.context_parallel, device.node_devices
    share = device.attainable.links
    others = {"tensor": t - 1, "context": c - 1, "expert": parallel.expert_parallel - 1, "pipeline": 1}
    peers = max(1, others.get(group, parallel.replicas - 1))
    rate = min(device.node_link, peers * device.node_peer_link)
    inside = Link(rate * share, device.node_latency_seconds)
    outside = Link(device.network_link * share, device.network_latency_seconds)
    reach = {
        "tensor": t,
        "context": t * c,
        "expert": parallel.expert_parallel,
        "data": parallel.ranks_per_stage,
        "pipeline": parallel.ranks_per_stage * stages,
    }
    if reach[group] <= node:
        return inside
    if group == "expert":  # what goes to other nodes takes longer than what stays
        leaving = network_share * (parallel.expert_parallel - node) / (parallel.expert_parallel - 1)
        return Link(min(inside.bandwidth, outside.bandwidth / leaving), outside.latency)
    if group == "data":  # the ranks of the group in a node share the adapters of all of them
        local = max(1, min(node // t, parallel.replicas))
        return Link(min(inside.bandwidth, outside.bandwidth * local), outside.latency)
    return outside


def collective_seconds(collective: Collective, device: Device, parallel: ParallelConfig) -> Passes:
    """Of each pass."""
    link = link_of(collective.group, device, parallel, network_share=collective.network_share)
    pairs = zip(collective.bytes, collective.messages)
    return Passes(*(size / link.bandwidth + calls * link.latency if size else 0.0 for size, calls in pairs))


def layer_seconds(layer: LayerOperations, device: Device, parallel: ParallelConfig) -> LayerSeconds:
    """Of a layer, with what is recomputed as part of the input gradient."""
    seconds = {each.name: operation_seconds(each, device, parallel.precision) for each in layer.operations}
    compute, all_to_all, again = Passes(), Passes(), 0.0
    for each in seconds.values():
        compute = compute.plus(each)
    for operation in layer.repeated:
        again += seconds[operation.name].forward
    for collective in layer.collectives:
        taken = collective_seconds(collective, device, parallel)
        if layer.recompute == "full":  # the repeated forward communicates too
            taken = taken._replace(input_gradient=taken.input_gradient + taken.forward)
        if collective.group == "expert":
            all_to_all = all_to_all.plus(taken)
        elif collective.group == "context":
            behind = _attention_seconds(layer, seconds)
            compute = compute.plus(Passes(*(max(0.0, a - b) for a, b in zip(taken, behind))))
        else:
            compute = compute.plus(taken)
    return LayerSeconds(compute.plus(Passes(0, again, 0)), all_to_all, again)


def _attention_seconds(layer: LayerOperations, seconds: dict[str, Passes]) -> Passes:
    total = Passes()
    for operation in layer.operations:
        if operation.resource == "attention":
            total = total.plus(seconds[operation.name])
    return total
