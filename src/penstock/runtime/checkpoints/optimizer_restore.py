"""Loading the state of an optimizer from a checkpoint, however its parameters are grouped and placed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoints.collective import some
from penstock.runtime.checkpoints.names import JobNames, Place, RankNames
from penstock.runtime.checkpoints.optimizer_states import entry_name, places_of, unknown_parameters
from penstock.runtime.checkpoints.plain_values import from_json
from penstock.runtime.dtensors import is_dtensor

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import StoredCheckpoint

__all__ = ["OptimizerRestore"]


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
