"""A model to be planned: a chain of layers with their costs, the links, the devices and the batch.

A microbatch of n samples costs n times what a sample does. What is there however many samples there are does
not grow: parameters, gradients, optimizer state, collectives, and the launch overhead of each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.arguments import printable
from penstock.cost.costs import Costs
from penstock.errors import PlanError
from penstock.planning.layout import PipelineLayout, layout_of_counts

__all__ = ["Layer", "Model"]

MOST_LAYERS = 1000
"""More than anybody has, and few enough for every way to cut them to be weighed."""

KINDS = ("layer", "embedding", "head")

UNITS = {f.name: "_".join(filter(None, (f.name, f.metadata["unit"]))) for f in fields(Costs)}
PER_STAGE = [f.name for f in fields(Costs) if f.metadata["per"] == "stage"]
MESSAGES = ["activation_message", "gradient_message"]
_OF_A_SAMPLE = {
    *("forward", "backward_input", "backward_weight", "backward"),
    *("activation", "activation_freed_by_input", *MESSAGES),
}
OF_A_STEP = ["launch_overhead", "optimizer_step", "overlap_factor"]
OF_A_LINK = ["latency", "bandwidth"]


@dataclass(frozen=True)
class Layer:
    """One link of the chain; every entry of `costs` is one number, of one sample."""

    name: str
    costs: Costs
    kind: str = "layer"


@dataclass(frozen=True)
class Model:
    """Layers in their order; `common` has what is the same for all: links and what each step adds.

    `ranks`, `memory` (bytes of a rank) and `samples` (of a step, for this pipeline) may be left for `plan` to
    be told.
    """

    layers: tuple[Layer, ...]
    common: Costs = field(default_factory=Costs)
    ranks: int | None = None
    memory: float | None = None
    samples: int | None = None
    name: str = "model"
    are_stages: bool = False
    """Whether the layers are the stages of a profile, so that no layout can be told."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        uneven = [name for name in OF_A_LINK if isinstance(getattr(self.common, name), tuple)]
        faults = [f"{name}: it must be one number for all links" for name in uneven]
        faults += faults_of_chain(self.layers)
        if faults:
            raise PlanError("; ".join(faults))

    def costs(self, counts: Sequence[int], samples: float) -> Costs:
        """The costs of stages that have so many layers each, for microbatches of so many samples."""
        parts: list[tuple[Layer, ...]] = []
        first = 0
        for count in counts:
            parts.append(self.layers[first : first + count])
            first += count
        found: dict[str, Any] = {}
        whole = any(layer.costs.backward is not None for layer in self.layers)
        for name in PER_STAGE:
            factor = samples if name in _OF_A_SAMPLE else 1
            if name != "backward" or whole:
                found[name] = tuple(factor * sum(_of(layer, name) for layer in part) for part in parts)
        for name in MESSAGES:
            found[name] = tuple(samples * _of(part[-1], name) for part in parts[:-1]) or 0.0
        return replace(self.common, **found)

    def loads(self) -> list[float]:
        """Per layer: seconds of one sample there and back."""
        return [_of(layer, "forward") + _of(layer, "backward") for layer in self.layers]

    def layout(self, counts: Sequence[int]) -> PipelineLayout | None:
        """These stages as a layout, which `penstock.runtime.split` takes; None if the layers are stages."""
        if self.are_stages:
            return None
        inner, first = [], 0
        for count in counts:
            inner.append(sum(layer.kind == "layer" for layer in self.layers[first : first + count]))
            first += count
        return layout_of_counts(inner)

    @classmethod
    def of_stages(cls, costs: Costs, name: str = "profile") -> Model:
        """Each stage of these costs as a layer; links are as slow as the slowest of them."""
        lists = {entry: len(v) for entry in PER_STAGE if isinstance(v := getattr(costs, entry), tuple)}
        if not lists or len(set(lists.values())) > 1:
            given = ", ".join(f"{UNITS[entry]} {n}" for entry, n in lists.items()) or "none is a list"
            raise PlanError(f"costs that stand for layers need lists of one length, one entry each ({given})")
        if costs.overlap is not None:
            raise PlanError("overlap_seconds is for one size of stages; say overlap_factor instead")
        stages = next(iter(lists.values()))
        layers = []
        for stage in range(stages):
            own: dict[str, Any] = {
                entry: costs.per_stage(entry, stages)[stage]
                for entry in PER_STAGE
                if getattr(costs, entry) is not None
            }
            for message in MESSAGES:
                sizes = costs.per_edge(message, stages - 1)
                own[message] = sizes[stage] if stage < len(sizes) else 0.0
            layers.append(Layer(f"stage {stage}", Costs(**own)))
        latency, bandwidth = (getattr(costs, entry) for entry in OF_A_LINK)
        common = Costs(
            latency=max(latency) if isinstance(latency, tuple) else latency,
            bandwidth=min(bandwidth) if isinstance(bandwidth, tuple) else bandwidth,
            **{entry: getattr(costs, entry) for entry in OF_A_STEP},
        )
        return cls(tuple(layers), common, name=name, are_stages=True)


def _of(layer: Layer, name: str) -> float:
    if name == "backward":
        return layer.costs.full_backward(1)[0]
    value: float = getattr(layer.costs, name)
    return value


def faults_of_chain(layers: Sequence[Layer]) -> Iterator[str]:
    """What is wrong with the layers as a whole, and with each kind."""
    if not 1 <= len(layers) <= MOST_LAYERS:
        yield f"layers: there must be 1 to {MOST_LAYERS} (given {len(layers)})"
    for place, layer in enumerate(layers):
        for name in (*PER_STAGE, *MESSAGES):
            if isinstance(getattr(layer.costs, name), tuple):
                yield f"layer {layer.name}: {name} must be one number"
        if layer.kind not in KINDS:
            kinds = ", ".join(KINDS)
            yield f"layer {layer.name}: its kind is one of {kinds} (given {printable(str(layer.kind))})"
        elif (layer.kind == "embedding" and place) or (layer.kind == "head" and place != len(layers) - 1):
            where = "the first layer" if layer.kind == "embedding" else "the last layer"
            yield f"layer {layer.name}: only {where} can be the {layer.kind} (it is number {place})"
