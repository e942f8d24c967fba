"""Costs: seconds of each action, seconds and bytes of each message, bytes of memory.

Every cost is one number, or a list with one per stage, rank, or edge of the stage graph (in a chain, entry e is
the link between stages e and e + 1, both ways). `Costs()` are unit costs: F, I and W take one unit, B two.

Times are seconds if F, I or W is given, and sizes are bytes if an activation or a part of the model's state is;
`time_unit` and `memory_unit` say otherwise. `Costs.units` knows, and everything that prints asks it.

In a file, JSON or TOML, the keys are the names below with the unit behind them:

    forward_seconds = 0.0185            latency_seconds = 0.0006
    backward_input_seconds = 0.0181     activation_bytes = [201216, 201216, 201216, 150912]
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from penstock.arguments import did_you_mean, listed, plural, printable
from penstock.cost.units import Units
from penstock.errors import CostsError, FormatError, Message
from penstock.formats.files import COSTS, kind_of_file, read_keys, require_extension, write_text
from penstock.ir.graph import StageGraph

Cost: TypeAlias = float | tuple[float, ...]
"""A number, or a tuple of numbers with one per stage, rank or edge."""


def as_tuple(value: Cost) -> tuple[float, ...]:
    """All numbers of the value."""
    return value if isinstance(value, tuple) else (value,)


def times(value: Cost | None, factor: float) -> Cost | None:
    """Every number of the value multiplied by a factor; None, which is not given, stays."""
    if value is None:
        return None
    return tuple(x * factor for x in value) if isinstance(value, tuple) else value * factor


_MAX_PLAUSIBLE = 1e18
"""The largest plausible number of seconds or bytes."""

_DEFAULTS = {
    "backward": ("backward_input", "backward_weight"),
    "recompute": ("forward",),
    "offloadable": ("activation",),
}
"""What is not given is the sum of these."""

_ACTIVATION_PARTS = ("activation_freed_by_input", "checkpoint", "offloadable")
_NO_FILE = "<costs>"
_UNITS = {"time_unit": ("seconds", "units"), "memory_unit": ("bytes", "activations")}
_UNIT_COSTS = {"time_unit": "units"}  # a file of unit costs: an empty one is taken for a mistake
_TIMED = frozenset(("forward", "backward_input", "backward_weight"))
_SIZED = frozenset(("activation", "parameters", "gradients", "optimizer_state", "unsharded_parameters"))
"""Times are seconds, and sizes are bytes, if any of these is given."""


def _cost(default: float | None, unit: str, per: str, *, grows: bool = False) -> Any:  # noqa: ANN401 -- a field
    """A cost; `grows` if it grows with the samples of a microbatch."""
    return field(default=default, metadata={"unit": unit, "per": per, "grows": grows})


def _text(default: str | None, **options: Any) -> Any:  # noqa: ANN401 -- a field
    return field(default=default, metadata={"unit": "", "per": "model", "grows": False}, **options)


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes. What is not given costs nothing, except that F, I and W take one second."""

    forward: Cost = _cost(1, "seconds", "stage", grows=True)
    backward_input: Cost = _cost(1, "seconds", "stage", grows=True)
    backward_weight: Cost = _cost(1, "seconds", "stage", grows=True)
    backward: Cost | None = _cost(None, "seconds", "stage", grows=True)
    """Full backward; the sum of both halves unless given."""
    forward_all_to_all: Cost = _cost(0, "seconds", "stage", grows=True)
    """All-to-all of F (dispatch and combine of experts), on a second stream: `penstock.cost.prices`."""
    backward_input_all_to_all: Cost = _cost(0, "seconds", "stage", grows=True)
    backward_weight_all_to_all: Cost = _cost(0, "seconds", "stage", grows=True)
    """B has the all-to-all of I and of W."""
    overlap: float | None = _cost(None, "seconds", "step")
    """An overlapped pair, whatever its stages; unless given, `overlap_factor` applies."""
    overlap_factor: float = _cost(1, "", "step")
    """Compute of an overlapped pair: from its longer part (0) to the sum of both (1)."""
    launch_overhead: float = _cost(0, "seconds", "step")
    """Added to every compute step."""
    latency: Cost = _cost(0, "seconds", "edge")
    bandwidth: Cost | None = _cost(None, "bytes_per_second", "edge")
    """Bytes per second of a channel; unless given, a message takes its latency only."""
    activation_message: Cost = _cost(0, "bytes", "edge", grows=True)
    gradient_message: Cost = _cost(0, "bytes", "edge", grows=True)
    unshard: Cost = _cost(0, "seconds", "stage")
    reshard: Cost = _cost(0, "seconds", "stage")
    reduce_grad: Cost = _cost(0, "seconds", "stage")
    optimizer_step: float = _cost(0, "seconds", "step")
    """Per rank, at the end of an iteration."""
    parameters: Cost = _cost(0, "bytes", "stage")
    gradients: Cost = _cost(0, "bytes", "stage")
    optimizer_state: Cost = _cost(0, "bytes", "stage")
    activation: Cost = _cost(1, "bytes", "stage", grows=True)
    """Held from the start of F to the end of B, or of W."""
    activation_freed_by_input: Cost = _cost(0, "bytes", "stage", grows=True)
    """The part of `activation` that I frees at its end."""
    unsharded_parameters: Cost = _cost(0, "bytes", "stage")
    """Held from UNSHARD to RESHARD, in addition to `parameters`."""
    recompute: Cost | None = _cost(None, "seconds", "stage", grows=True)
    """RECOMPUTE; as long as F unless given. It repeats the all-to-all of F."""
    checkpoint: Cost = _cost(0, "bytes", "stage", grows=True)
    """The part of `activation` that F keeps for RECOMPUTE, which needs it."""
    offloadable: Cost | None = _cost(None, "bytes", "stage", grows=True)
    """The part of `activation` that OFFLOAD moves to the host; all of it unless given."""
    host_latency: Cost = _cost(0, "seconds", "rank")
    host_bandwidth: Cost | None = _cost(None, "bytes_per_second", "rank")
    """Of the link to the host, in each direction; unless given, a copy takes its latency only."""
    time_unit: Any = _text(None)
    """`seconds` or `units`; unless given, it follows from F, I and W."""
    memory_unit: Any = _text(None)
    """`bytes` or `activations`; unless given, it follows from what is held."""
    source: Any = _text("", compare=False, repr=False)
    """The file that they are from, for messages."""

    def __post_init__(self) -> None:
        for entry in _numeric(self):
            if isinstance(value := getattr(self, entry.name), list):
                object.__setattr__(self, entry.name, tuple(value))
        if problems := self._wrong_values() or dict(self._wrong_sizes()):
            text = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
            raise CostsError(text, problems=problems)

    def _wrong_values(self) -> dict[str, str]:
        """Return the names of values of a wrong kind, each with the problem in a sentence about "it"."""
        found = {
            name: f"it must be {' or '.join(allowed)} (given {printable(repr(value))})"
            for name, allowed in _UNITS.items()
            if (value := getattr(self, name)) is not None and value not in allowed
        }
        for entry in _numeric(self):
            if problem := _problem_of(getattr(self, entry.name), entry):
                found[entry.name] = problem
        return found

    def _wrong_sizes(self) -> Iterator[tuple[str, str]]:
        """Yield the names of numbers out of their range, each with the problem."""
        if not 0 <= self.overlap_factor <= 1:
            yield "overlap_factor", f"it must be from 0 to 1 (given {self.overlap_factor})"
        for name in ("bandwidth", "host_bandwidth"):
            if (speed := getattr(self, name)) is not None and min(as_tuple(speed)) <= 0:
                yield name, "it must be more than 0"
        whole = np.array(self.activation)
        for name in _ACTIVATION_PARTS:
            part = np.array(getattr(self, name), dtype=np.float64)  # nan if not given
            is_comparable = 1 in (part.size, whole.size) or part.size == whole.size
            if is_comparable and (part > whole).any():
                yield name, "it cannot be more than activation"

    def __repr__(self) -> str:
        return f"Costs({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    def _given(self) -> dict[str, Any]:
        """What does not have its default."""
        return {f.name: v for f in fields(self) if f.repr and (v := getattr(self, f.name)) != f.default}

    @property
    def units(self) -> Units:
        """Whether times are seconds and sizes are bytes."""
        given = self._given()
        timed, sized = (not names.isdisjoint(given) for names in (_TIMED, _SIZED))
        return Units(
            timed if self.time_unit is None else self.time_unit == "seconds",
            sized if self.memory_unit is None else self.memory_unit == "bytes",
        )

    def check_lengths(self, graph: StageGraph, num_ranks: int) -> None:
        """Raise for lists that do not have one entry for each stage, edge or rank."""
        counts = {"stage": graph.num_stages, "edge": len(graph.edges), "rank": num_ranks}
        for entry in _numeric(self):
            if (per := entry.metadata["per"]) in counts:
                self._spread(entry.name, counts[per], per)

    def per_stage(self, name: str, num_stages: int) -> list[float]:
        """One entry for each stage."""
        return self._spread(name, num_stages, "stage")

    def per_edge(self, name: str, num_edges: int) -> list[float]:
        """One entry for each edge of the stage graph."""
        return self._spread(name, num_edges, "edge")

    def per_rank(self, name: str, num_ranks: int) -> list[float]:
        """One entry for each rank."""
        return self._spread(name, num_ranks, "rank")

    def _spread(self, name: str, count: int, what: str) -> list[float]:
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return [value] * count
        if len(value) != count:
            where = f"{self.source}: {_key_of(name)}" if self.source else name
            given = plural(len(value), "entry", "entries")
            raise CostsError(f"{where}: {given}, but the schedule has {plural(count, what)}")
        return list(value)

    def full_backward(self, num_stages: int) -> list[float]:
        """Seconds of B for each stage."""
        return self.resolved("backward", num_stages)

    def resolved(self, name: str, num_stages: int) -> list[float]:
        """One entry for each stage; what is not given follows from other costs.

        `offloadable_checkpoint` is what OFFLOAD moves of a microbatch that is recomputed.
        """
        if name == "offloadable_checkpoint":
            sizes = (self.resolved(part, num_stages) for part in ("offloadable", "checkpoint"))
            return list(map(min, *sizes))
        if getattr(self, name) is not None:
            return self.per_stage(name, num_stages)
        parts = [self.per_stage(each, num_stages) for each in _DEFAULTS[name]]
        return list(map(sum, zip(*parts)))

    def scaled(self, factor: float) -> Costs:
        """The same costs with all seconds multiplied by a factor."""
        timed = [f.name for f in fields(self) if f.metadata["unit"] == "seconds"]
        changed: dict[str, Any] = {name: times(getattr(self, name), factor) for name in timed}
        for name in ("bandwidth", "host_bandwidth"):
            changed[name] = times(getattr(self, name), 1 / factor)
        return replace(self, **changed, time_unit=self.units.time_name)

    def shared_by(self, stages: float) -> Costs:
        """The costs of each of so many equal stages that together are one stage of these costs."""
        return self._times([f.name for f in fields(self) if f.metadata["per"] == "stage"], 1 / stages)

    def with_larger_microbatches(self, factor: float) -> Costs:
        """The costs of microbatches with `factor` times as many samples."""
        return self._times([f.name for f in fields(self) if f.metadata["grows"]], factor)

    def _times(self, names: Iterable[str], factor: float) -> Costs:
        """The costs with some of them multiplied, in the same units."""
        changed: dict[str, Any] = {name: times(getattr(self, name), factor) for name in names}
        return replace(self, **changed, time_unit=self.units.time_name, memory_unit=self.units.memory_name)

    # --- files -------------------------------------------------------------------------------------

    @classmethod
    def read(cls, path: str | PathLike[str]) -> Costs:
        """From a `.json` or `.toml` file; one without any cost is refused."""
        document = read_keys(path)
        if document == {}:
            raise FormatError(str(path), [f"it has no costs; give keys such as {listed(list(_keys())[:3])}"])
        return cls.from_keys({} if document == _UNIT_COSTS else document, source=str(path))

    @classmethod
    def from_keys(cls, document: object, source: str = _NO_FILE) -> Costs:
        """From the keys and values of a file."""
        if not isinstance(document, dict):
            raise FormatError(source, [f"costs are an object with keys such as {', '.join(list(_keys())[:3])}"])
        unknown = [str(key) for key in document if key not in _keys()]
        if unknown and (kind := kind_of_file(document)) and kind != COSTS:
            raise FormatError(source, [Message("not costs: it is ", kind)])
        problems = [
            f"{printable(key)}: not a key of costs{did_you_mean(key, _keys()) or '; keys: ' + listed(_keys())}"
            for key in unknown
        ]
        given = {_keys()[key]: value for key, value in document.items() if key in _keys()}
        try:
            costs = cls(**given)
        except CostsError as error:
            problems += [f"{_key_of(name)}: {problem}" for name, problem in error.problems.items()]
        if problems:
            raise FormatError(source, problems)
        return replace(costs._named(given), source="" if source == _NO_FILE else source)

    def _named(self, names: Container[str]) -> Costs:
        """These costs; times or sizes that a file names are real, even with the numbers of unit costs."""
        pinned: dict[str, Any] = {}
        for (unit, (real, _)), group, known in zip(_UNITS.items(), (_TIMED, _SIZED), self.units):
            if getattr(self, unit) is None and not known and any(name in names for name in group):
                pinned[unit] = real
        return replace(self, **pinned) if pinned else self

    def to_keys(self) -> dict[str, Any]:
        """The keys of a file; what has its default is left out."""
        given = self._given()
        named = ((key, given[name]) for key, name in _keys().items() if name in given)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in named}

    def dumps(self, extension: str) -> str:
        """The text of a `.json` or `.toml` file."""
        keys = self.to_keys() or _UNIT_COSTS
        if extension == ".json":
            return json.dumps(keys, indent=2) + "\n"
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())

    def write(self, path: str | PathLike[str]) -> None:
        """To a `.json` or `.toml` file, atomically."""
        path = Path(path)
        write_text(self.dumps(require_extension(path, ".json", ".toml")), path)


def _problem_of(value: object, entry: Field[Any]) -> str | None:
    many = entry.metadata["per"] != "step"
    if value is None and entry.default is None:
        return None
    if isinstance(value, tuple) and not (many and value):
        return "the list is empty" if many else "it must be one number"
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, bool) or not isinstance(number, int | float):
            kind = f"a number{' or a list of them' if many else ''}"
            return f"it must be {kind} (given {printable(repr(number))})"
        if not 0 <= number <= _MAX_PLAUSIBLE:
            # a whole number can have more digits than Python is willing to print
            given = "more" if abs(number) >= _MAX_PLAUSIBLE else repr(number)
            return f"it must be from 0 to {_MAX_PLAUSIBLE:g} (given {given})"
    return None


def _numeric(costs: Costs) -> Iterator[Field[Any]]:
    return (entry for entry in fields(costs) if entry.metadata["per"] != "model")


@cache
def _keys() -> dict[str, str]:
    """The keys of a file, each with the name of the cost."""
    named = (f for f in fields(Costs) if f.name != "source")
    return {"_".join(filter(None, (f.name, f.metadata["unit"]))): f.name for f in named}


def _key_of(name: str) -> str:
    return next(key for key, each in _keys().items() if each == name)
