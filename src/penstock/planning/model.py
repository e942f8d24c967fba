"""A model to plan: a chain of layers with their costs, the links, the devices and the batch.

The costs of a microbatch are those of a sample times its samples, except those that do not depend on the batch:
parameters, gradients, optimizer state, collectives, and the launch overhead of each step. The checkpoint of a
stage, for which it is recomputed as a whole, is the input of its first layer: the message into it, or more if
the layer says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from penstock.arguments import printable
from penstock.cost.costs import Cost, Costs, as_tuple
from penstock.cost.prices import action_seconds
from penstock.cost.units import Units
from penstock.errors import PlanError
from penstock.ir.kinds import Kind
from penstock.planning.layout import PipelineLayout, layout_of_counts

MAX_LAYERS = 1000
"""Few enough for dynamic programming over all partitions."""

KINDS = ("layer", "embedding", "mtp", "head")

UNITS = {f.name: "_".join(filter(None, (f.name, f.metadata["unit"]))) for f in fields(Costs)}
STAGE_COSTS = [f.name for f in fields(Costs) if f.metadata["per"] == "stage"]
MESSAGES = ["activation_message", "gradient_message"]
_SAMPLE_COSTS = {f.name for f in fields(Costs) if f.metadata["grows"]}
_OPTIONAL = [f.name for f in fields(Costs) if f.metadata["per"] == "stage" and f.default is None]
STEP_COSTS = ["launch_overhead", "optimizer_step", "overlap_factor"]
LINK_COSTS = ["latency", "bandwidth"]
HOST_COSTS = ["host_latency", "host_bandwidth"]


@dataclass(frozen=True)
class Layer:
    """One layer; every entry of `costs` is one number, for one sample."""

    name: str
    costs: Costs
    kind: str = "layer"


@dataclass(frozen=True)
class Model:
    """Layers in their order; `common` has the costs that are the same for all: links and overheads of a step.

    `ranks`, `memory` (bytes per rank) and `samples` (per step of this pipeline) can be given to `plan` instead.
    """

    layers: tuple[Layer, ...]
    common: Costs = field(default_factory=Costs)
    ranks: int | None = None
    memory: float | None = None
    samples: int | None = None
    name: str = "model"
    are_stages: bool = False
    """Whether the layers are the stages of a profile, for which there is no layout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        uneven = [name for name in (*LINK_COSTS, *HOST_COSTS) if isinstance(getattr(self.common, name), tuple)]
        errors = [f"{name}: must be one number for all links" for name in uneven]
        errors += errors_in_layers(self.layers)
        if errors:
            raise PlanError("; ".join(errors))

    @cached_property
    def units(self) -> Units:
        """What its costs are in: seconds and bytes, or units and activations."""
        return self.costs([len(self.layers)], 1).units

    def costs(self, counts: Sequence[int], samples: float) -> Costs:
        """The costs of stages with these numbers of layers, for microbatches of `samples` samples."""
        parts: list[tuple[Layer, ...]] = []
        first = 0
        for count in counts:
            parts.append(self.layers[first : first + count])
            first += count
        found: dict[str, Any] = {}
        for name in STAGE_COSTS:
            factor = samples if name in _SAMPLE_COSTS else 1
            if name not in _OPTIONAL or any(getattr(layer.costs, name) is not None for layer in self.layers):
                found[name] = tuple(factor * sum(_of(layer, name) for layer in part) for part in parts)
        for name in MESSAGES:
            found[name] = tuple(samples * _of(part[-1], name) for part in parts[:-1]) or 0.0
        found["checkpoint"] = self._checkpoints(parts, found["activation"], samples)
        return replace(self.common, **found)

    def _checkpoints(
        self, parts: Sequence[tuple[Layer, ...]], activation: Sequence[float], samples: float
    ) -> tuple[float, ...]:
        """Per stage: what RECOMPUTE of the whole stage needs, the input of its first layer."""
        inputs = [0.0, *(_of(part[-1], "activation_message") for part in parts[:-1])]
        kept = (samples * max(_of(part[0], "checkpoint"), each) for part, each in zip(parts, inputs))
        return tuple(map(min, kept, activation))

    def loads(self) -> list[float]:
        """Per layer: seconds of forward and backward of one sample, all-to-all included."""
        seconds = (action_seconds(layer.costs, 1) for layer in self.layers)
        return [float(each[Kind.F.number, 0] + each[Kind.B.number, 0]) for each in seconds]

    def layout(self, counts: Sequence[int]) -> PipelineLayout | None:
        """The layout of these stages for `penstock.runtime.split`; None if the layers are stages."""
        if self.are_stages:
            return None
        kinds = [layer.kind for layer in self.layers]
        parts = [kinds[end - count : end] for count, end in zip(counts, accumulate(counts))]
        return layout_of_counts(*([part.count(kind) for part in parts] for kind in ("layer", "mtp")))

    @classmethod
    def of_stages(cls, costs: Costs, name: str = "profile") -> Model:
        """A model with each stage of these costs as a layer; every link is as slow as the slowest."""
        lists = {entry: len(v) for entry in STAGE_COSTS if isinstance(v := getattr(costs, entry), tuple)}
        if not lists or len(set(lists.values())) > 1:
            given = ", ".join(f"{UNITS[entry]} {n}" for entry, n in lists.items()) or "none is a list"
            raise PlanError(
                f"costs of stages need lists of the same length, with one entry per stage ({given})"
            )
        if costs.overlap is not None:
            raise PlanError("overlap_seconds does not apply to other partitions; give overlap_factor instead")
        stages = next(iter(lists.values()))
        layers = []
        for stage in range(stages):
            own: dict[str, Any] = {
                entry: costs.per_stage(entry, stages)[stage]
                for entry in STAGE_COSTS
                if getattr(costs, entry) is not None
            }
            for message in MESSAGES:
                sizes = costs.per_edge(message, stages - 1)
                own[message] = sizes[stage] if stage < len(sizes) else 0.0
            layers.append(Layer(f"stage {stage}", Costs(**own)))
        common = Costs(
            latency=max(as_tuple(costs.latency)),
            bandwidth=_slowest(costs.bandwidth),
            host_latency=max(as_tuple(costs.host_latency)),
            host_bandwidth=_slowest(costs.host_bandwidth),
            **{entry: getattr(costs, entry) for entry in STEP_COSTS},
            time_unit=costs.units.time_name,
            memory_unit=costs.units.memory_name,
        )
        return cls(tuple(layers), common, name=name, are_stages=True)


def _slowest(speed: Cost | None) -> float | None:
    return None if speed is None else min(as_tuple(speed))


def _of(layer: Layer, name: str) -> float:
    if name in _OPTIONAL:
        return layer.costs.resolved(name, 1)[0]
    value: float = getattr(layer.costs, name)
    return value


def errors_in_layers(layers: Sequence[Layer]) -> Iterator[str]:
    """The errors in a chain of layers."""
    if not 1 <= len(layers) <= MAX_LAYERS:
        yield f"layers: must be 1 to {MAX_LAYERS} (given {len(layers)})"
    for place, layer in enumerate(layers):
        for name in (*STAGE_COSTS, *MESSAGES):
            if isinstance(getattr(layer.costs, name), tuple):
                yield f"layer {layer.name}: {name} must be one number"
        if layer.kind not in KINDS:
            kinds = ", ".join(KINDS)
            yield f"layer {layer.name}: kind must be one of {kinds} (given {printable(str(layer.kind))})"
        elif (layer.kind == "embedding" and place) or (layer.kind == "head" and place != len(layers) - 1):
            where = "the first layer" if layer.kind == "embedding" else "the last layer"
            yield f"layer {layer.name}: only {where} can be the {layer.kind} (it is layer {place})"
    for before, after in pairwise(layers):
        if before.kind == "mtp" and after.kind == "layer":
            yield f"layer {after.name}: multi-token prediction layers (mtp) come after all others but the head"
