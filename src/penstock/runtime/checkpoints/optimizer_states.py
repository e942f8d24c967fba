"""The state of an optimizer by parameter names, independent of parameter groups and ranks.

A checkpoint stores, for each parameter, the options of its group (learning rate and so on), the tensors of its
state as entries, and the rest of its state as plain values; for a tied weight, those of the first stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoints.collective import RankError, some
from penstock.runtime.checkpoints.names import JobNames, Place, RankNames
from penstock.runtime.checkpoints.plain_values import to_json

__all__ = [
    "OptimizerState",
    "collect_state",
    "entry_name",
    "join_headers",
    "places_of",
    "type_conflicts",
    "unknown_parameters",
]

_NOT_OPTIONS = ("params", "param_names")


@dataclass
class OptimizerState:
    """What a rank stores of its optimizer."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    header: dict[str, Any] | None = None
    """`kind`: its class; `groups`: options and names; `state`: by name, keys of tensors, and other values."""


def entry_name(name: str, key: str) -> str:
    """The checkpoint entry for one tensor of a parameter's state."""
    return f"optimizer.{name}.{key}"


def collect_state(optimizer: Optimizer | None, mine: RankNames, job: JobNames) -> OptimizerState:
    """The state of the parameters that this rank stores."""
    collected = OptimizerState()
    if optimizer is None:
        return collected
    places = places_of(mine)
    if problems := unknown_parameters(optimizer, places):
        raise RankError(*problems)
    groups, states = [], {}
    for number, group in enumerate(optimizer.param_groups):
        names = []
        for parameter in group["params"]:
            stage, name = places[id(parameter)]
            if job.first(name) != name or job.first_stage[name] != stage:
                continue
            names.append(name)
            if state := optimizer.state.get(parameter):
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                values = {key: value for key, value in state.items() if key not in tensors}
                collected.entries |= {entry_name(name, key): value.detach() for key, value in tensors.items()}
                stored_values = to_json(values, f"the optimizer's state of {name!r}")
                states[name] = {"tensors": list(tensors), "values": stored_values}
        groups.append({"options": _options(group, number), "names": names})
    collected.header = {"kind": type(optimizer).__name__, "groups": groups, "state": states}
    return collected


def type_conflicts(headers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The problem of ranks whose optimizers have different types."""
    kinds = list(dict.fromkeys(header["kind"] for header in headers))
    return [f"the ranks have different optimizers: {some(kinds)}"] if len(kinds) > 1 else []


def join_headers(headers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One header from those of all ranks, or None if no rank has an optimizer."""
    if not headers:
        return None
    groups: list[dict[str, Any]] = []
    known: set[str] = set()
    for group in (group for header in headers for group in header["groups"]):
        names = [name for name in group["names"] if name not in known]  # replicas have the same names
        known.update(names)
        equal = next((each for each in groups if each["options"] == group["options"]), None)
        if equal is not None:
            equal["names"] += names
        elif names:
            groups.append({"options": group["options"], "names": names})
    states = {name: state for header in reversed(headers) for name, state in header["state"].items()}
    return {"kind": headers[0]["kind"], "groups": groups, "state": states}


def places_of(mine: RankNames) -> dict[int, Place]:
    """By the identity of a parameter: the first place that has it."""
    places: dict[int, Place] = {}
    for place, tensor in mine.tensors.items():
        places.setdefault(id(tensor), place)
    return places


def unknown_parameters(optimizer: Optimizer, places: Mapping[int, Place]) -> list[str]:
    """The problem of optimizer parameters that are not in the model."""
    unknown = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in places
    ]
    if not unknown:
        return []
    problem = f"the optimizer has parameters that no module of the model has: {some(unknown)}"
    remedy = "If it was created before materialize() or before the Pipeline, create it after them, from "
    remedy += "pipeline.parameters(); parameters of other modules need another optimizer"
    return [f"{problem}. {remedy}"]


def _options(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The options of a group; a tensor with one value becomes a number."""
    return {
        key: to_json(
            value.item() if isinstance(value, Tensor) and value.numel() == 1 else value,
            f"the option {key!r} of the optimizer's group {number}",
        )
        for key, value in group.items()
        if key not in _NOT_OPTIONS
    }
