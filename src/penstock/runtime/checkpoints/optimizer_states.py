"""The state of an optimizer by parameter names, saved and loaded however parameters are grouped and placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoints.collective import RankError, some
from penstock.runtime.checkpoints.names import JobNames, Place, RankNames
from penstock.runtime.dtensors import is_dtensor

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import StoredCheckpoint


# Plain values to JSON and back without loss: tuples stay tuples, and keys of mappings keep their types.


_TUPLE, _MAPPING = "!tuple", "!mapping"


def to_json(value: object, where: str) -> Any:
    """The value in a form that json can write; `where` names it in an error."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [to_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: to_json(list(value), where)}
    if isinstance(value, dict):
        entries = {key: to_json(each, f"{where}[{key!r}]") for key, each in value.items()}
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return entries
        return {_MAPPING: [[to_json(key, f"a key of {where}"), each] for key, each in entries.items()]}
    raise RankError(
        f"{where} is a {type(value).__name__}, which cannot be stored: use numbers, strings, lists, tuples and "
        "mappings (for a tensor, tensor.tolist())"
    )


def from_json(value: Any) -> Any:
    """The value that `to_json` was called with."""
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_json(value[_TUPLE]))
    if _MAPPING in value:
        return {from_json(key): from_json(each) for key, each in value[_MAPPING]}
    return {key: from_json(each) for key, each in value.items()}


# The state of an optimizer by parameter names, independent of parameter groups and ranks.
#
# A checkpoint stores, for each parameter, the options of its group (learning rate and so on), the tensors of
# its state as entries, and the rest of its state as plain values; for a tied weight, the first stage's values.


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
    """Return one header from the headers of all ranks, or None if no rank has an optimizer."""
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


# Loading the state of an optimizer from a checkpoint, however its parameters are grouped and placed.


class OptimizerRestore:
    """The state for one optimizer, checked on creation; `finish` loads it after `wanted` is read."""

    def __init__(
        self,
        optimizer: Optimizer,
        stored: StoredCheckpoint,
        header: Mapping[str, Any],
        mine: RankNames,
        job: JobNames,
    ) -> None:
        self.used: set[str] = set()
        """The names in the checkpoint that this optimizer uses."""
        self.wanted: list[tuple[str, Tensor]] = []
        """Entries, and the tensors to read them into."""
        self._optimizer, self._stored, self._header = optimizer, stored, header["optimizer"]
        self._ties = [{name: tie for tie in header["ties"] for name in tie}, job.ties]
        self._state: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        places = places_of(mine)
        self.problems = unknown_parameters(optimizer, places)
        if self._header is None:
            self.problems.append("the checkpoint has no optimizer state: load it without optimizer=")
            return
        groups = self._header["groups"]
        self._options = {name: group["options"] for group in groups for name in group["names"]}
        if self._header["kind"] != type(optimizer).__name__:
            self.problems.append(
                f"the optimizer in the checkpoint is {self._header['kind']}, but this one is "
                f"{type(optimizer).__name__}: create the same, or load without optimizer="
            )
            self.used.update(self._options)
        elif not self.problems:
            self._plan(places)

    def _plan(self, places: Mapping[int, Place]) -> None:
        """Find the state and the options of each parameter."""
        missing: list[str] = []
        index = count()
        for number, group in enumerate(self._optimizer.param_groups):
            options: dict[str, Any] = {}
            for parameter, position in zip(group["params"], index):
                _, name = places[id(parameter)]
                source = self._source(name)
                if source is None:
                    missing.append(name)
                    continue
                self.used.add(source)
                options[source] = self._options[source]
                if source in self._header["state"]:
                    self._state[position] = self._parameter_state(parameter, source)
            self._groups.append(self._group(group, number, options))
        if missing:
            self.problems.append(
                "the checkpoint has no optimizer options for these parameters of the optimizer: "
                f"{some(missing)}; create the optimizer with the same parameters, or load without optimizer="
            )

    def finish(self) -> None:
        """Load the state into the optimizer; the tensors have been read."""
        index = count()
        groups = [
            {**group, "params": [position for _, position in zip(present["params"], index)]}
            for group, present in zip(self._groups, self._optimizer.param_groups)
        ]
        self._optimizer.load_state_dict({"state": self._state, "param_groups": groups})
        every = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for position, state in self._state.items():
            present = self._optimizer.state[every[position]]
            for key, value in state.items():
                # load_state_dict casts all state to the dtype of the parameter, also where it was more precise
                if isinstance(value, Tensor) and key in present and present[key].dtype != value.dtype:
                    present[key] = value

    def _source(self, name: str) -> str | None:
        names = (name, *(each for ties in self._ties for each in ties.get(name, ())))
        return next((each for each in names if each in self._options), None)

    def _parameter_state(self, parameter: Tensor, source: str) -> dict[str, Any]:
        """A parameter's state with tensors that are still to be read."""
        stored = self._header["state"][source]
        state: dict[str, Any] = from_json(stored["values"])
        for key in stored["tensors"]:
            entry = self._stored.entries.get(entry_name(source, key))
            if entry is None:
                self.problems.append(f"the entry {entry_name(source, key)!r} is missing in the checkpoint")
                continue
            present = self._optimizer.state.get(parameter, {}).get(key)
            state[key] = _allocate(parameter.detach(), key, entry.size, entry.properties.dtype, present)
            self.wanted.append((entry_name(source, key), state[key]))
        return state

    def _group(self, group: dict[str, Any], number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The group with the options that its parameters had."""
        first = next(iter(options), None)
        if first is None:
            return group
        other = next((name for name in options if options[name] != options[first]), None)
        if other is not None:
            self.problems.append(
                f"group {number} of the optimizer has parameters that had different options: {first!r} and "
                f"{other!r} ({_differences(options[first], options[other])}); use the same parameter groups"
            )
        restored = dict(group)
        for key, value in from_json(options[first]).items():
            present = group.get(key)
            restored[key] = torch.full_like(present, value) if isinstance(present, Tensor) else value
        return restored


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    different = sorted(key for key in {*first, *second} if first.get(key) != second.get(key))
    return "; ".join(f"{key} {first.get(key)!r} and {second.get(key)!r}" for key in different)


def _allocate(parameter: Tensor, key: str, size: torch.Size, dtype: torch.dtype, present: object) -> Tensor:
    """A tensor for a part of a parameter's state, placed where the optimizer uses it."""
    if isinstance(present, Tensor) and present.shape == size and present.dtype == dtype:
        return present.detach()
    if not size and (key == "step" or parameter.shape):
        return torch.empty(size, dtype=dtype)  # step counts are on the CPU; load_state_dict moves the rest
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    allocated = torch.empty(size, dtype=dtype, device=parameter.device)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 -- already loaded

        mesh = parameter.device_mesh
        return DTensor.from_local(allocated, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return allocated
