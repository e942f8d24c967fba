"""The state of an optimizer by the names of parameters, so that it fits however they are grouped and placed.

A checkpoint has, for each parameter, the options of its group (learning rate and so on), the tensors of its
state as entries, and the rest of its state as plain values; of a tied weight, the first holder's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoints.collective import FoundError, some
from penstock.runtime.checkpoints.names import JobNames, Place, RankNames
from penstock.runtime.checkpoints.plain_values import from_json, to_json
from penstock.runtime.dtensors import is_dtensor

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import Stored

__all__ = ["Restoring", "State", "disagreement", "joined", "state_of"]

_NO_OPTIONS = ("params", "param_names")


@dataclass
class State:
    """What a rank stores of its optimizer: the entries' tensors, and what is told about them."""

    entries: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] | None = None
    """`kind`: its class; `groups`: options and names; `state`: by name, keys of tensors, and other values."""


def entry(name: str, key: str) -> str:
    """The entry of a checkpoint for one tensor of a parameter's state."""
    return f"optimizer.{name}.{key}"


def state_of(optimizer: Optimizer | None, mine: RankNames, job: JobNames) -> State:
    """What this rank is the first to hold."""
    found = State()
    if optimizer is None:
        return found
    places = _places(mine)
    if strangers := _strangers(optimizer, places):
        raise FoundError(*strangers)
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
                found.entries |= {entry(name, key): value.detach() for key, value in tensors.items()}
                told = to_json(values, f"the optimizer's state of {name!r}")
                states[name] = {"tensors": list(tensors), "values": told}
        groups.append({"options": _options(group, number), "names": names})
    found.about = {"kind": type(optimizer).__name__, "groups": groups, "state": states}
    return found


def disagreement(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """What cannot be joined in the descriptions of all ranks."""
    kinds = list(dict.fromkeys(part["kind"] for part in given))
    return [f"the ranks have different optimizers: {some(kinds)}"] if len(kinds) > 1 else []


def joined(given: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """One description from those of all ranks, or None if none has an optimizer."""
    if not given:
        return None
    groups: list[dict[str, Any]] = []
    known: set[str] = set()
    for group in (group for part in given for group in part["groups"]):
        names = [name for name in group["names"] if name not in known]  # replicas say the same
        known.update(names)
        alike = next((each for each in groups if each["options"] == group["options"]), None)
        if alike is not None:
            alike["names"] += names
        elif names:
            groups.append({"options": group["options"], "names": names})
    states = {name: state for part in reversed(given) for name, state in part["state"].items()}
    return {"kind": given[0]["kind"], "groups": groups, "state": states}


class Restoring:
    """An optimizer that gets what a checkpoint has: checked when made; once `wanted` is read, `finish` it."""

    def __init__(
        self, optimizer: Optimizer, stored: Stored, about: Mapping[str, Any], mine: RankNames, job: JobNames
    ) -> None:
        self.faults: list[str] = []
        self.taken: set[str] = set()
        """The names in the checkpoint that this rank has use for."""
        self.wanted: list[tuple[str, Tensor]] = []
        """Entries, and the tensors to read them into."""
        self._optimizer, self._stored, self._told = optimizer, stored, about["optimizer"]
        self._ties = [{name: tie for tie in about["ties"] for name in tie}, job.ties]
        self._state: dict[int, dict[str, Any]] = {}
        self._groups: list[dict[str, Any]] = []
        places = _places(mine)
        self.faults += _strangers(optimizer, places)
        if self._told is None:
            self.faults.append("it has no optimizer state: load it without optimizer=")
            return
        self._options = {name: group["options"] for group in self._told["groups"] for name in group["names"]}
        if self._told["kind"] != type(optimizer).__name__:
            self.faults.append(
                f"its optimizer is {self._told['kind']}, but this one is {type(optimizer).__name__}: make "
                "the same, or load without optimizer="
            )
            self.taken.update(self._options)
        elif not self.faults:
            self._plan(places)

    def _plan(self, places: Mapping[int, Place]) -> None:
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
                self.taken.add(source)
                options[source] = self._options[source]
                if source in self._told["state"]:
                    self._state[position] = self._wish(parameter, source)
            self._groups.append(self._group(group, number, options))
        if missing:
            self.faults.append(
                f"it has no optimizer options for parameters that this optimizer has: {some(missing)}; give "
                "the optimizer the same parameters, or load without optimizer="
            )

    def finish(self) -> None:
        """Hand everything over; the tensors have been read."""
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
                # load_state_dict gives all state the parameter's type, also where it was more precise
                if isinstance(value, Tensor) and key in present and present[key].dtype != value.dtype:
                    present[key] = value

    def _source(self, name: str) -> str | None:
        names = (name, *(each for ties in self._ties for each in ties.get(name, ())))
        return next((each for each in names if each in self._options), None)

    def _wish(self, parameter: Tensor, source: str) -> dict[str, Any]:
        """A parameter's state with tensors that are still to be filled."""
        told = self._told["state"][source]
        state: dict[str, Any] = from_json(told["values"])
        for key in told["tensors"]:
            known = self._stored.entries.get(entry(source, key))
            if known is None:
                self.faults.append(f"the entry {entry(source, key)!r} is missing in it")
                continue
            present = self._optimizer.state.get(parameter, {}).get(key)
            state[key] = _room(parameter.detach(), key, known.size, known.properties.dtype, present)
            self.wanted.append((entry(source, key), state[key]))
        return state

    def _group(self, group: dict[str, Any], number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The group with the options that its parameters had."""
        first = next(iter(options), None)
        if first is None:
            return group
        for name, other in options.items():
            if other != options[first]:
                differing = sorted(
                    key for key in {*other, *options[first]} if other.get(key) != options[first].get(key)
                )
                told = "; ".join(
                    f"{key} {options[first].get(key)!r} and {other.get(key)!r}" for key in differing
                )
                self.faults.append(
                    f"group {number} of the optimizer has parameters that had different options: {first!r} and "
                    f"{name!r} ({told}); group parameters as they were grouped"
                )
                break
        restored = dict(group)
        for key, value in from_json(options[first]).items():
            present = group.get(key)
            restored[key] = torch.full_like(present, value) if isinstance(present, Tensor) else value
        return restored


def _room(parameter: Tensor, key: str, size: torch.Size, dtype: torch.dtype, present: object) -> Tensor:
    """A tensor for a part of a parameter's state, placed as it will be used."""
    if isinstance(present, Tensor) and present.shape == size and present.dtype == dtype:
        return present.detach()
    if not size and (key == "step" or parameter.shape):
        return torch.empty(size, dtype=dtype)  # a count of steps is on the CPU; load_state_dict moves all else
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    room = torch.empty(size, dtype=dtype, device=parameter.device)
    if is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 -- loaded, since there is one

        mesh = parameter.device_mesh
        return DTensor.from_local(room, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return room


def _places(mine: RankNames) -> dict[int, Place]:
    """By the identity of a parameter: the first place where it is."""
    places: dict[int, Place] = {}
    for place, tensor in mine.tensors.items():
        places.setdefault(id(tensor), place)
    return places


def _strangers(optimizer: Optimizer, places: Mapping[int, Place]) -> list[str]:
    strange = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in places
    ]
    if not strange:
        return []
    fault = f"the optimizer has parameters that no module of the model has: {some(strange)}"
    cure = "If it was made before materialize() or before the Pipeline, make it after them, from "
    cure += "pipeline.parameters(); parameters of something else need an optimizer of their own"
    return [f"{fault}. {cure}"]


def _options(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What a group says besides its parameters; a tensor of one number as the number."""
    return {
        key: to_json(
            value.item() if isinstance(value, Tensor) and value.numel() == 1 else value,
            f"the option {key!r} of the optimizer's group {number}",
        )
        for key, value in group.items()
        if key not in _NO_OPTIONS
    }
