"""`estimate`: seconds, bytes and costs of every layer of a model, from its config, parallel config and device.

Seconds are a roofline with the shares of the peaks that a device attains. An operation takes the longer of its
FLOPs and its bytes, plus the seconds of its kernels. A collective takes its bytes over the link of its group,
plus the latency of its calls. Collectives of tensor parallelism delay the layer; keys and values that go round
the context parallel ranks are hidden behind attention as far as that lasts; dispatch and combine of experts are
on a stream of their own (`penstock.cost.prices`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.cost.costs import Costs
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.layers import layer_operations, model_flops
from penstock.cost.estimate.model_config import ModelConfig
from penstock.cost.estimate.operations import Collective, LayerOperations, Operation, Passes
from penstock.cost.estimate.parallel_config import ParallelConfig

_UPDATE_BYTES = 30
"""AdamW moves for each weight: gradient, master weight and two moments in, the last three and a copy out."""


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
    """Return the seconds of a layer, with what is recomputed as part of the input gradient."""
    seconds = {each: operation_seconds(each, device, parallel.precision) for each in layer.operations}
    attention = Passes.sum(taken for each, taken in seconds.items() if each.resource == "attention")
    again = sum(seconds[each].forward for each in layer.repeated)
    compute, all_to_all = [*seconds.values(), Passes(0, again, 0)], list[Passes]()
    for collective in layer.collectives:
        taken = collective_seconds(collective, device, parallel)
        if layer.recompute == "full":  # the repeated forward communicates too
            taken = taken._replace(input_gradient=taken.input_gradient + taken.forward)
        if collective.group == "context":
            taken = Passes(*(max(0.0, a - b) for a, b in zip(taken, attention)))
        (all_to_all if collective.group == "expert" else compute).append(taken)
    return LayerSeconds(Passes.sum(compute), Passes.sum(all_to_all), again)


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of weights, gradients and optimizer state on one rank, and those moved to keep replicas alike."""

    parameters: float
    gradients: float
    optimizer_state: float
    unsharded: float
    """Held besides from UNSHARD to RESHARD."""
    reduced: float
    """That a rank sends to sum the gradients of a step."""
    gathered: float
    """That a rank receives of weights: once a step, or with ZeRO 3 at each UNSHARD."""
    updated: float
    """Number of weights that this rank updates."""


@dataclass(frozen=True)
class LayerEstimate:
    """One layer: its operations, its seconds, and its costs for one microbatch."""

    operations: LayerOperations
    seconds: LayerSeconds
    weights: WeightBytes
    data_link: Link
    """Between ranks that hold the same weights."""
    is_sharded: bool
    """Whether weights are gathered before use (ZeRO 3)."""
    whole_backward: float = 1.0
    """Seconds of a whole backward over those of its two gradients run apart."""

    @cached_property
    def costs(self) -> Costs:
        """Of one microbatch."""
        compute, exchanged = self.seconds.compute, self.seconds.all_to_all
        weights, layer, bandwidth = self.weights, self.operations, self.data_link.bandwidth
        both = compute.input_gradient + compute.weight_gradient
        return Costs(
            forward=compute.forward,
            backward_input=compute.input_gradient,
            backward_weight=compute.weight_gradient,
            backward=None if self.whole_backward == 1 else self.whole_backward * both,
            forward_all_to_all=exchanged.forward,
            backward_input_all_to_all=exchanged.input_gradient,
            backward_weight_all_to_all=exchanged.weight_gradient,
            activation_message=layer.message,
            gradient_message=layer.message,
            unshard=weights.gathered / bandwidth if self.is_sharded else 0.0,
            reduce_grad=weights.reduced / bandwidth,
            parameters=weights.parameters,
            gradients=weights.gradients,
            optimizer_state=weights.optimizer_state,
            unsharded_parameters=weights.unsharded,
            activation=layer.activation,
            activation_freed_by_input=layer.freed_by_input,
        )


@dataclass(frozen=True)
class Estimate:
    """The estimate of a model."""

    config: ModelConfig
    parallel: ParallelConfig
    device: Device
    by_kind: dict[str, LayerEstimate]

    @cached_property
    def layers(self) -> list[LayerEstimate]:
        """Every layer in order, embedding and output layer included."""
        return [self.by_kind[kind] for kind in self.config.kinds]

    @property
    def model_flops(self) -> float:
        """FLOPs of one microbatch on all ranks of a replica, as MFU counts them."""
        tokens = self.parallel.microbatch_size * self.parallel.sequence
        return model_flops(self.config, self.parallel.sequence) * tokens

    def update_seconds(self, weights: float) -> float:
        """Of the optimizer's update of this many weights."""
        return _UPDATE_BYTES * weights / (self.device.memory_bandwidth * self.device.attainable.memory)

    def gather_seconds(self, layers: Sequence[LayerEstimate]) -> float:
        """With ZeRO 1 and 2: what the gather of new weights delays a step whose first stage has these layers.

        Weights are gathered layer by layer while earlier layers compute the first microbatch.
        """
        if self.parallel.zero not in {1, 2} or self.parallel.replicas == 1:
            return 0.0
        bandwidth = link_of("data", self.device, self.parallel).bandwidth
        delay = sum(layer.weights.gathered for layer in layers) / bandwidth
        hidden = sum(layer.seconds.compute.forward for layer in layers[:-1])
        return max(delay - hidden, layers[0].weights.gathered / bandwidth)

    def mfu(self, seconds: float, microbatches: int, ranks: int) -> float:
        """Model FLOPs utilization of a step of one pipeline with this many ranks."""
        devices = ranks * self.parallel.tensor_parallel * self.parallel.context_parallel
        precision = "bf16" if self.parallel.precision == "fp8" else self.parallel.precision
        return self.model_flops * microbatches / (seconds * devices * self.device.peak(precision))


class Estimator:
    """Estimates of a model on a device; what does not depend on replicas is computed once."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        self.config, self.device = config, device
        self._timed: dict[ParallelConfig, dict[str, tuple[LayerOperations, LayerSeconds]]] = {}

    def __call__(self, parallel: ParallelConfig) -> Estimate:
        """The estimate for one parallel config."""
        parallel.check(self.config)
        alike = replace(parallel, data_parallel=1, zero=0)
        if alike not in self._timed:
            layers = layer_operations(self.config, parallel)
            self._timed[alike] = {
                kind: (each, layer_seconds(each, self.device, parallel)) for kind, each in layers.items()
            }
        by_kind = {kind: _layer(*each, parallel, self.device) for kind, each in self._timed[alike].items()}
        return Estimate(self.config, parallel, self.device, by_kind)


def estimate(config: ModelConfig, parallel: ParallelConfig, device: Device) -> Estimate:
    """Estimate the costs of a model's layers on a device."""
    return Estimator(config, device)(parallel)


def _layer(
    layer: LayerOperations, seconds: LayerSeconds, parallel: ParallelConfig, device: Device
) -> LayerEstimate:
    link = link_of("data", device, parallel)
    is_sharded = parallel.zero == 3 and parallel.replicas > 1
    weights, factor = weight_bytes(layer, parallel), device.attainable.whole_backward
    return LayerEstimate(layer, seconds, weights, link, is_sharded, factor)


def weight_bytes(layer: LayerOperations, parallel: ParallelConfig) -> WeightBytes:
    """Of one layer: experts have their own number of replicas."""
    each, state = parallel.value_bytes, 8 if parallel.precision == "fp32" else 12
    sums = [0.0] * 7
    for expert, replicas in ((False, float(parallel.replicas)), (True, parallel.expert_replicas)):
        count, zero = layer.weights(expert=expert), parallel.zero
        sent = (replicas - 1) / replicas
        row = (
            each * count / (replicas if zero == 3 else 1),
            parallel.gradient_bytes * count / (replicas if zero >= 2 else 1),
            state * count / (replicas if zero >= 1 else 1),
            each * count * sent if zero == 3 else 0.0,
            parallel.gradient_bytes * count * sent * (1 if zero else 2),
            each * count * sent,
            count / (replicas if zero else 1),
        )
        sums = [a + b for a, b in zip(sums, row)]
    return WeightBytes(*sums)
