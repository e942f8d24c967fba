"""Checkpoints that fit any layout: saved on some number of ranks, loaded on any other.

    save_checkpoint("step-100", pipeline, optimizer, extra={"step": 100})
    extra = load_checkpoint("step-100", pipeline, optimizer)

Everything is stored under the names of the whole model, with torch.distributed.checkpoint:

    model.<name>              parameters and persistent buffers
    optimizer.<name>.<key>    the tensors of a parameter's optimizer state
    penstock                  everything else, as JSON: version, ties, optimizer options, `extra`

The optimizer state is independent of parameter groups and ranks: for each parameter, the options of its group
(learning rate and so on), the tensors of its state as entries, and the rest of its state as plain values. For a
tied weight, the first stage's values are stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.runtime.checkpoints.atomic_directory import AtomicDirectory
from penstock.runtime.checkpoints.collective import Collective, RankError, some
from penstock.runtime.checkpoints.names import ModelNames, Place, describe, names_of_model, unused_problems
from penstock.runtime.dtensors import is_dtensor
from penstock.runtime.pipeline import Pipeline
from penstock.runtime.transport.process_groups import Group

if TYPE_CHECKING:  # slow to load
    from penstock.runtime.checkpoints.files import StoredCheckpoint


FORMAT = 2
"""The version of the format, the first that is read."""

_MODEL = "model."
_OPTIMIZER = "optimizer.{}.{}"
_NOT_OPTIONS = ("params", "param_names")
_TUPLE, _MAPPING = "!tuple", "!mapping"


# --- saving ----------------------------------------------------------------------------------------


def save_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
    group: Group = None,
) -> None:
    """Write the directory `path`; all ranks of `group` call this, by default all ranks of the world.

    `extra` is any plain value: numbers, strings, lists, tuples and mappings; the first rank's value is stored.
    An existing checkpoint is replaced only when the new one is complete. If saving fails on any rank, all ranks
    raise a `CheckpointError`.
    """
    from penstock.runtime.checkpoints.files import StoredCheckpoint, write  # noqa: PLC0415 -- slow to load

    directory = AtomicDirectory(path)
    ranks = Collective(group, f"the checkpoint {directory.path} cannot be saved")
    names = names_of_model(model, ranks)
    entries: dict[str, Tensor] = {}

    def collect() -> tuple[Any, Any]:
        for (stage, name), tensor in names.tensors.items():
            if names.first_stage[name] == stage:
                entries[_MODEL + name] = tensor.detach()
        header = None if optimizer is None else _collect_state(optimizer, names, entries)
        return header, _to_json(extra, "extra") if ranks.is_first else None

    collected = ranks.run(collect)
    optimizers = [header for header, _ in collected if header is not None]
    kinds = list(dict.fromkeys(header["kind"] for header in optimizers))
    if len(kinds) > 1:
        ranks.raise_problems([f"the ranks have different optimizers: {some(kinds)}"])
    header = {
        "format": FORMAT,
        "ties": list(dict.fromkeys(names.ties.values())),
        "optimizer": _join_headers(optimizers) if optimizers else None,
        "extra": collected[0][1],
    }
    ranks.run_on_first(directory.begin)
    try:
        write(directory.unfinished, entries, header, ranks)
        ranks.run_on_first(lambda: StoredCheckpoint(directory.unfinished))  # raises if it is incomplete
    except BaseException:
        if ranks.is_first:
            directory.discard()
        raise
    ranks.run_on_first(directory.commit)


def _collect_state(optimizer: Optimizer, model: ModelNames, entries: dict[str, Tensor]) -> dict[str, Any]:
    """Add the tensors that this rank stores to `entries`, and return the rest of the optimizer's state.

    `kind` is its class, `groups` has options and names, and `state` has by name the keys of the tensors, and
    other values.
    """
    places = _places_of(model)
    if problems := _unknown_parameters(optimizer, places):
        raise RankError(*problems)
    groups, states = [], {}
    for number, group in enumerate(optimizer.param_groups):
        names = []
        for parameter in group["params"]:
            _, name = place = places[id(parameter)]
            if not model.is_first(place):
                continue
            names.append(name)
            if state := optimizer.state.get(parameter):
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                values = {key: value for key, value in state.items() if key not in tensors}
                entries |= {_OPTIMIZER.format(name, key): value.detach() for key, value in tensors.items()}
                stored_values = _to_json(values, f"the optimizer's state of {name!r}")
                states[name] = {"tensors": list(tensors), "values": stored_values}
        options = {
            key: _to_json(
                value.item() if isinstance(value, Tensor) and value.numel() == 1 else value,
                f"the option {key!r} of the optimizer's group {number}",
            )
            for key, value in group.items()
            if key not in _NOT_OPTIONS
        }
        groups.append({"options": options, "names": names})
    return {"kind": type(optimizer).__name__, "groups": groups, "state": states}


def _join_headers(headers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


# --- loading ---------------------------------------------------------------------------------------


def load_checkpoint(
    path: str | os.PathLike[str],
    model: Pipeline | nn.Module,
    optimizer: Optimizer | None = None,
    group: Group = None,
    *,
    verify_checksums: bool = True,
) -> Any:
    """Read the directory `path` into the model and the optimizer, and return `extra`.

    All ranks of `group` call this, by default all ranks of the world. The layout may differ from the one that
    was saved. Everything is checked first: all ranks raise all problems at once as a `CheckpointError`, and
    then nothing is changed. With `verify_checksums=False`, the contents of the data files are not checked.
    """
    from penstock.runtime.checkpoints.files import StoredCheckpoint  # noqa: PLC0415 -- slow to load

    directory = AtomicDirectory(path)
    ranks = Collective(group, f"the checkpoint {directory.path} cannot be loaded")
    names = names_of_model(model, ranks)

    def prepare() -> _CheckpointLoad:
        stored = StoredCheckpoint(directory.readable(), verify=verify_checksums)
        return _CheckpointLoad(stored, names, optimizer, slice(ranks.rank, None, len(ranks.members)))

    return ranks.run_change(prepare).extra


class _Used(NamedTuple):
    """The names in the checkpoint that a rank uses."""

    model: set[str]
    optimizer: set[str] | None
    """None on a rank without an optimizer."""
    index_checksum: int
    """Of the index that it has read."""


class _CheckpointLoad:
    """What this rank reads from a checkpoint, checked against its model and optimizer."""

    def __init__(
        self, stored: StoredCheckpoint, model: ModelNames, optimizer: Optimizer | None, share: slice
    ) -> None:
        self._stored = stored
        self._header = header = stored.header()
        if header["format"] != FORMAT:
            raise RankError(
                f"it has format {header['format']}, but this version of Penstock reads format {FORMAT}: "
                f"install a {'newer' if header['format'] > FORMAT else 'older'} version"
            )
        self.extra = _from_json(header["extra"])
        self.problems: list[str] = []
        model_entries = [key for key in stored.entries if key.startswith(_MODEL)]
        self._names = dict.fromkeys(key.removeprefix(_MODEL) for key in model_entries)
        self._wanted: list[tuple[str, Tensor]] = []
        used = self._check_model(model)
        self._optimizer = None if optimizer is None else OptimizerRestore(optimizer, stored, header, model)
        if self._optimizer is not None:
            self.problems += self._optimizer.problems
            self._wanted += self._optimizer.wanted
        self.used = _Used(used, None if self._optimizer is None else self._optimizer.used, stored.checksum)
        self.problems = self.problems or stored.damage(self._wanted, share)

    def _check_model(self, model: ModelNames) -> set[str]:
        """Return the names in the checkpoint that this rank's model uses."""
        names = self._names
        matched = model.match(names)
        seen = set()
        for name, source, tensor in matched.found:
            if (source, id(tensor)) in seen:
                continue
            seen.add((source, id(tensor)))
            entry = self._stored.entries[_MODEL + source]
            stored, own = describe(entry.size, entry.properties.dtype), describe(tensor.shape, tensor.dtype)
            if own != stored:
                self.problems.append(f"{name!r} is {stored} in the checkpoint, but {own} in the model")
            self._wanted.append((_MODEL + source, tensor.detach()))
        if matched.missing:
            missing = some(matched.missing)
            self.problems.append(f"the model has names that are missing in the checkpoint: {missing}")
        tied = {name: tuple(tie) for tie in self._header["ties"] for name in tie}
        for tie in dict.fromkeys(model.ties.values()):
            untied = [name for name in tie if name in names and name not in tied.get(tie[0], (tie[0],))]
            if untied and tie[0] in names:
                self.problems.append(
                    f"{tie[0]!r} and {some(untied)} are one weight in the model, but not in the checkpoint"
                )
        return matched.used

    def unused(self, used: Sequence[_Used]) -> list[str]:
        """Return the problems with what no rank reads; the optimizer state may be left out as a whole."""
        if len({each.index_checksum for each in used}) > 1:
            return ["the ranks read different checkpoints; every rank must see the same file system"]
        problems = unused_problems(
            "the checkpoint has names that no rank's model has", self._names, [each.model for each in used]
        )
        optimizers = [each.optimizer for each in used if each.optimizer is not None]
        if optimizers and self._header["optimizer"] is not None:
            trained = [name for group in self._header["optimizer"]["groups"] for name in group["names"]]
            text = "the checkpoint has optimizer options for parameters that no rank's optimizer has"
            problems += unused_problems(text, trained, optimizers)
        return problems

    def apply(self) -> None:
        """Read the tensors into the model and the optimizer."""
        self._stored.read(self._wanted)
        if self._optimizer is not None:
            self._optimizer.finish()


class OptimizerRestore:
    """The state for one optimizer, checked on creation; `finish` loads it after `wanted` is read."""

    def __init__(
        self, optimizer: Optimizer, stored: StoredCheckpoint, header: Mapping[str, Any], model: ModelNames
    ) -> None:
        self.used: set[str] = set()
        """The names in the checkpoint that this optimizer uses."""
        self.wanted: list[tuple[str, Tensor]] = []
        """Entries, and the tensors to read them into."""
        self._optimizer, self._stored, self._header = optimizer, stored, header["optimizer"]
        self._ties = [{name: tie for tie in header["ties"] for name in tie}, model.ties]
        self._state: dict[int, dict[str, Any]] = {}
        self._parameters: list[Tensor] = []
        self._groups: list[dict[str, Any]] = []
        places = _places_of(model)
        self.problems = _unknown_parameters(optimizer, places)
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
        for number, group in enumerate(self._optimizer.param_groups):
            options: dict[str, Any] = {}
            positions = range(len(self._parameters), len(self._parameters) + len(group["params"]))
            self._parameters += group["params"]
            for position, parameter in zip(positions, group["params"]):
                _, name = places[id(parameter)]
                names = (name, *(each for ties in self._ties for each in ties.get(name, ())))
                source = next((each for each in names if each in self._options), None)
                if source is None:
                    missing.append(name)
                    continue
                self.used.add(source)
                options[source] = self._options[source]
                if source in self._header["state"]:
                    self._state[position] = self._parameter_state(parameter, source)
            self._groups.append({**self._group(group, number, options), "params": list(positions)})
        if missing:
            self.problems.append(
                "the checkpoint has no optimizer options for these parameters of the optimizer: "
                f"{some(missing)}; create the optimizer with the same parameters, or load without optimizer="
            )

    def finish(self) -> None:
        """Load the state into the optimizer; the tensors have been read."""
        self._optimizer.load_state_dict({"state": self._state, "param_groups": self._groups})
        for position, state in self._state.items():
            present = self._optimizer.state[self._parameters[position]]
            for key, value in state.items():
                # load_state_dict casts all state to the dtype of the parameter, also where it was more precise
                if isinstance(value, Tensor) and key in present and present[key].dtype != value.dtype:
                    present[key] = value

    def _parameter_state(self, parameter: Tensor, source: str) -> dict[str, Any]:
        """A parameter's state with tensors that are still to be read."""
        stored = self._header["state"][source]
        state: dict[str, Any] = _from_json(stored["values"])
        for key in stored["tensors"]:
            entry_name = _OPTIMIZER.format(source, key)
            entry = self._stored.entries.get(entry_name)
            if entry is None:
                self.problems.append(f"the entry {entry_name!r} is missing in the checkpoint")
                continue
            present = self._optimizer.state.get(parameter, {}).get(key)
            state[key] = _allocate(parameter.detach(), key, entry.size, entry.properties.dtype, present)
            self.wanted.append((entry_name, state[key]))
        return state

    def _group(self, group: dict[str, Any], number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """The group with the options that its parameters had."""
        if not options:
            return group
        (first, wanted), *others = options.items()
        for name, other in others:
            if other != wanted:
                keys = sorted(key for key in {*wanted, *other} if wanted.get(key) != other.get(key))
                differences = "; ".join(f"{key} {wanted.get(key)!r} and {other.get(key)!r}" for key in keys)
                self.problems.append(
                    f"group {number} of the optimizer has parameters that had different options: {first!r} and "
                    f"{name!r} ({differences}); use the same parameter groups"
                )
                break
        restored = dict(group)
        for key, value in _from_json(wanted).items():
            present = group.get(key)
            restored[key] = torch.full_like(present, value) if isinstance(present, Tensor) else value
        return restored


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


# --- both ------------------------------------------------------------------------------------------


def _places_of(model: ModelNames) -> dict[int, Place]:
    """By the identity of a parameter: the first place that has it."""
    return {id(tensor): place for place, tensor in reversed(list(model.tensors.items()))}


def _unknown_parameters(optimizer: Optimizer, places: Mapping[int, Place]) -> list[str]:
    """The problem of optimizer parameters that are not in the model."""
    unknown = [
        f"parameter {index} of group {number} (shape {list(parameter.shape)})"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if id(parameter) not in places
    ]
    problem = (
        f"the optimizer has parameters that no module of the model has: {some(unknown)}. If it was created "
        "before materialize() or before the Pipeline, create it after them, from pipeline.parameters(); "
        "parameters of other modules need another optimizer"
    )
    return [problem] if unknown else []


def _to_json(value: object, where: str) -> Any:
    """Return a plain value in a form of which JSON loses nothing; `where` names it in an error."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_to_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: _to_json(list(value), where)}
    if isinstance(value, dict):
        entries = {key: _to_json(each, f"{where}[{key!r}]") for key, each in value.items()}
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return entries
        return {_MAPPING: [[_to_json(key, f"a key of {where}"), each] for key, each in entries.items()]}
    raise RankError(
        f"{where} is a {type(value).__name__}, which cannot be stored: use numbers, strings, lists, tuples and "
        "mappings (for a tensor, tensor.tolist())"
    )


def _from_json(value: Any) -> Any:
    """Return the value that `_to_json` was called with."""
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_from_json(value[_TUPLE]))
    if _MAPPING in value:
        return {_from_json(key): _from_json(each) for key, each in value[_MAPPING]}
    return {key: _from_json(each) for key, each in value.items()}
