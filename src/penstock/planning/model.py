"""A model to plan: a chain of layers with their costs, links, devices and batch, also from a file.

The costs of a microbatch are those of a sample times its samples, except those that do not depend on the
batch: parameters, gradients, optimizer state, collectives, and the launch overhead of each step. The
checkpoint of a stage, for which it is recomputed as a whole, is the input of its first layer: the message
into it, or more if the layer says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise
from os import PathLike
from typing import Any

from penstock.arguments import did_you_mean, printable, whole_number
from penstock.cost.costs import Cost, Costs, as_tuple
from penstock.cost.prices import action_seconds
from penstock.cost.units import Units
from penstock.errors import FormatError, PlanError
from penstock.formats.files import read_keys
from penstock.ir.kinds import Kind
from penstock.planning.layout import PipelineLayout, layout_of_kinds

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
        parts = [self.layers[end - count : end] for count, end in zip(counts, accumulate(counts))]
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
        return layout_of_kinds([layer.kind for layer in self.layers], counts)

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


# Model files: TOML or JSON; all errors are reported at once.
#
#     launch_overhead_seconds = 1e-4        optimizer_step_seconds = 0.01        overlap_factor = 1
#
#     [[layers]]                            [links]
#     name = "block"                        latency_seconds = 1e-5
#     count = 32                            bandwidth_bytes_per_second = 5e10
#     forward_seconds = 0.012
#     backward_input_seconds = 0.013        [devices]
#     backward_weight_seconds = 0.011       ranks = 8
#     parameters_bytes = 436e6              memory_bytes = 80e9
#     activation_bytes = 555e6              host_bandwidth_bytes_per_second = 25e9
#     activation_message_bytes = 33e6
#                                           [batch]
#                                           samples = 64
#
# The costs of a layer have the keys of `penstock.cost.costs` and are those of ONE sample. A message is the
# output of a layer; its gradient has the same size unless `gradient_message_bytes` is given. A layer whose
# backward was measured as a whole has `backward_seconds` only: I and W are then half of it each. `kind` is
# `embedding` for the first layer, `head` for the last one and `mtp` for multi-token prediction layers before
# it, if the model has them; it is used for layouts only.
#
# A file without layers is read as costs of stages, as a profile writes them: each stage is a layer, and a
# sample is one measured microbatch.


_TIMES = ["forward_seconds", "backward_input_seconds", "backward_weight_seconds"]
_TABLES = {
    "links": [UNITS[name] for name in LINK_COSTS],
    "devices": ["ranks", "memory_bytes", *(UNITS[name] for name in HOST_COSTS)],
    "batch": ["samples"],
}
_LAYER_KEYS = ["name", "kind", "count", *(UNITS[name] for name in (*STAGE_COSTS, *MESSAGES))]


def read_model(path: str | PathLike[str]) -> Model:
    """Read a model from a `.toml` or `.json` file."""
    return model_of_keys(read_keys(path), source=str(path))


def model_of_keys(document: object, source: str = "<model>") -> Model:
    """The model that a file with these keys describes."""
    if not isinstance(document, dict) or "layers" not in document:
        try:
            return Model.of_stages(Costs.from_keys(document, source), name=source)
        except FormatError as error:
            why = "it has no [[layers]], and is not valid as costs of stages"
            raise FormatError(source, [why, *error.problems]) from None
        except PlanError as error:
            raise FormatError(source, [f"it has no [[layers]], and {error}"]) from None
    errors: list[str] = []
    tables = {name: _table(document, name, keys, errors) for name, keys in _TABLES.items()}
    step = [UNITS[name] for name in STEP_COSTS]
    known = ["layers", "name", *_TABLES, *step]
    errors += [f"{_shown(k)}: unknown key; the keys are {', '.join(known)}" for k in document if k not in known]
    costs_of_links = [UNITS[name] for name in (*LINK_COSTS, *HOST_COSTS)]
    given = tables["links"] | tables["devices"] | document
    shared = {key: value for key, value in given.items() if key in (*costs_of_links, *step)}
    common = _costs(shared, "", errors) or Costs()
    layers = _layers(document["layers"], errors)
    ranks, samples = (
        _count(tables[table].get(key), f"{table}.{key}", errors)
        for table, key in (("devices", "ranks"), ("batch", "samples"))
    )
    memory = tables["devices"].get("memory_bytes")
    if memory is not None and not (_is_number(memory) and memory > 0):
        errors.append(f"devices.memory_bytes: must be a number above 0 (given {_shown(memory)})")
    errors += errors_in_layers(layers) if layers or not errors else ()
    if errors:
        raise FormatError(source, errors)
    name = printable(str(document.get("name", "model")))
    return Model(tuple(layers), common, ranks, memory, samples, name)


def _layers(tables: object, errors: list[str]) -> list[Layer]:
    if not isinstance(tables, list):
        errors.append("layers: must be a list of tables, [[layers]] in TOML")
        return []
    found: list[Layer] = []
    for number, table in enumerate(tables):
        place = f"layers[{number}]"
        if not isinstance(table, dict):
            errors.append(f"{place}: must be a table with keys such as name, count, forward_seconds")
            continue
        unknown = [key for key in table if key not in _LAYER_KEYS]
        errors += [
            f"{place}.{_shown(k)}: unknown key of a layer"
            f"{did_you_mean(str(k), _LAYER_KEYS, 0.7) or '; the keys are ' + ', '.join(_LAYER_KEYS)}"
            for k in unknown
        ]
        count = _count(table.get("count", 1), f"{place}.count", errors) or 1
        priced = {key: v for key, v in table.items() if key in _LAYER_KEYS[3:]}
        errors += [f"{place}.{key}: must be one number" for key, v in priced.items() if isinstance(v, list)]
        costs = _costs(_filled(priced, place, errors), f"{place}.", errors)
        if costs is not None and len(found) + count <= MAX_LAYERS:
            name = printable(str(table.get("name", place)))
            names = [name] if count == 1 else [f"{name} {i}" for i in range(count)]
            found += [Layer(each, costs, str(table.get("kind", "layer"))) for each in names]
        elif costs is not None:
            errors.append(f"{place}.count: at most {MAX_LAYERS} layers are supported (given {count} here)")
    return found


def _filled(priced: dict[str, Any], place: str, errors: list[str]) -> dict[str, Any]:
    """The costs of a layer with defaults; times are required, sizes are optional."""
    both = {"backward_input_seconds", "backward_weight_seconds"}
    whole: Any = priced.get("backward_seconds")
    if _is_number(whole) and not both & set(priced):
        priced = priced | dict.fromkeys(both, whole / 2)
    if missing := [key for key in _TIMES if key not in priced]:
        instead = " (or backward_seconds for both)" if both & set(missing) else ""
        errors.append(f"{place}: missing {', '.join(missing)}{instead}")
    back = priced.get("gradient_message_bytes", priced.get("activation_message_bytes", 0))
    return {"activation_bytes": 0, **priced, "gradient_message_bytes": back}


def _costs(keys: dict[str, Any], place: str, errors: list[str]) -> Costs | None:
    try:
        return Costs.from_keys({key: value for key, value in keys.items() if not isinstance(value, list)})
    except FormatError as error:
        errors += [f"{place}{each}" for each in error.problems]
    return None


def _table(document: dict[str, Any], name: str, keys: list[str], errors: list[str]) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        errors.append(f"{name}: must be a table with {', '.join(keys)}")
        return {}
    errors += [
        f"{name}.{_shown(k)}: unknown key; the keys are {', '.join(keys)}" for k in table if k not in keys
    ]
    errors += [f"{name}.{k}: must be one number" for k, v in table.items() if isinstance(v, list)]
    return {key: value for key, value in table.items() if key in keys and not isinstance(value, list)}


def _count(value: object, place: str, errors: list[str]) -> int | None:
    if value is None:
        return None
    number = whole_number(value)
    if number is None or number < 1:
        errors.append(f"{place}: must be an integer above 0 (given {_shown(value)})")
        return None
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    return printable(value if isinstance(value, str) else repr(value))
