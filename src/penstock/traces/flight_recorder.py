"""A dump of torch's flight recorder: the sends and receives of one rank, from JSON or from a pickle.

torch writes a dump per rank when NCCL times out (`TORCH_NCCL_DUMP_ON_TIMEOUT`) or on request. It has the last
operations of the rank (`TORCH_FR_BUFFER_SIZE`), each with a name such as `nccl:send 0->1` (ranks of its process
group), a state (scheduled, started, completed) and the sizes of its tensors. Fields that are not needed are not
looked at.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.arguments import printable
from penstock.errors import FormatError

__all__ = ["FlightRecord", "Operation", "is_flight_record", "load_flight_record"]

_NAME = re.compile(r"\w+:(?:(send) (\d{1,8})->(\d{1,8})|(recv) (\d{1,8})<-(\d{1,8})|[\w ]+)", re.ASCII)
_STATES = ("scheduled", "started", "completed")
_DEEPEST = 16  # dimensions of a tensor
_MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Operation:
    """One send or receive; ranks are world ranks."""

    is_send: bool
    peer: int
    state: str
    """`scheduled`, `started` or `completed`."""
    tensors: tuple[str, ...]
    """Such as `Float [2, 8]`."""
    number: int
    """The place among all operations of the process since its start."""

    def __str__(self) -> str:
        return f"send to rank {self.peer}" if self.is_send else f"receive from rank {self.peer}"


@dataclass(frozen=True)
class FlightRecord:
    """The operations of one rank, in the order in which they were issued."""

    world_rank: int
    operations: tuple[Operation, ...]
    collective: str
    """The name of the first collective that is not completed; empty if there is none."""
    groups: tuple[tuple[int, ...], ...] = ()
    """The process groups of its sends and receives."""
    source: str = ""


def is_flight_record(document: object) -> bool:
    """Whether this is a dump rather than some other file."""
    return isinstance(document, Mapping) and "version" in document and "pg_config" in document


def load_flight_record(document: Mapping[str, Any], world_rank: int, source: str) -> FlightRecord:
    """The record in a parsed dump; `source` names it in error messages."""
    reader = _Reader(world_rank)
    version = document.get("version")
    if not isinstance(version, str) or not version.startswith("2."):
        reader.problems.append(f"version {_shown(version)} is unknown; versions 2.x are read")
    reader.read_groups(document.get("pg_config"))
    entries = document.get("entries", [])
    if not isinstance(entries, list):
        reader.problems.append("entries: expected a list of operations")
        entries = []
    for index, entry in enumerate(entries):
        if len(reader.problems) < _MAX_PROBLEMS:
            reader.read_entry(entry, f"entries[{index}]")
    if reader.problems:
        raise FormatError(source, reader.problems)
    groups = tuple(sorted(reader.used_groups))
    return FlightRecord(world_rank, tuple(reader.operations), reader.collective, groups, source)


class _Reader:
    """Reads the entries of one dump; `problems` has a sentence for each error."""

    def __init__(self, world_rank: int) -> None:
        self.problems: list[str] = []
        self.operations: list[Operation] = []
        self.collective = ""
        self.used_groups: set[tuple[int, ...]] = set()
        self._world_rank = world_rank
        self._groups: dict[str, list[int]] = {}
        self._launches: list[tuple[str, object]] = []
        """The process group and the number of the launch of each operation."""

    def read_groups(self, config: object) -> None:
        """Read the world ranks of each process group."""
        if not isinstance(config, dict):
            self.problems.append("pg_config: expected an object with the process groups")
            return
        for name, group in config.items():
            ranks = group.get("ranks") if isinstance(group, dict) else None
            try:
                found = json.loads(ranks) if isinstance(ranks, str) else ranks
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, list) and all(type(rank) is int and rank >= 0 for rank in found):
                self._groups[str(name)] = sorted(found)
            else:
                self.problems.append(f"pg_config: group {_shown(name)} has no list of ranks")

    def read_entry(self, entry: object, where: str) -> None:
        """Read one entry, which is a send, a receive, or something else that may be pending."""
        if not isinstance(entry, dict):
            self.problems.append(f"{where}: expected an object")
            return
        name, state, number = (entry.get(key) for key in ("profiling_name", "state", "record_id"))
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            self.problems.append(f"{where}: {_shown(name)} is not an operation such as nccl:send 0->1")
        if state not in _STATES:
            self.problems.append(f"{where}: state {_shown(state)} is not one of {', '.join(_STATES)}")
        if type(number) is not int or number < 0:
            self.problems.append(f"{where}: record_id {_shown(number)} is not a number")
        if match is None or self.problems:
            return
        group = entry.get("process_group")
        launch = str(group[0]) if isinstance(group, list | tuple) and group else "", entry.get("p2p_seq_id")
        if match[1] or match[4]:
            self._read_message(entry, match, launch, where)
        elif "coalesced" in match[0]:
            self._complete(launch, str(state))
        elif state != "completed" and not self.collective:
            self.collective = match[0].partition(":")[2]

    def _read_message(
        self, entry: dict[str, Any], match: re.Match[str], launch: tuple[str, object], where: str
    ) -> None:
        is_send = match[1] is not None
        own, peer = map(int, match.group(2, 3) if is_send else match.group(5, 6))
        ranks = self._groups.get(launch[0], [])
        if max(own, peer) >= len(ranks):
            self.problems.append(f"{where}: process group {_shown(launch[0])} has no ranks {own} and {peer}")
            return
        if ranks[own] != self._world_rank:
            self.problems.append(
                f"{where}: {match[0]} is of world rank {ranks[own]}, but the file name says {self._world_rank}"
            )
            return
        kind = "input" if is_send else "output"
        tensors = _tensors(entry.get(f"{kind}_sizes"), entry.get(f"{kind}_dtypes"))
        if tensors is None:
            self.problems.append(f"{where}: {kind}_sizes and {kind}_dtypes are not lists of sizes and types")
            return
        self.operations.append(Operation(is_send, ranks[peer], entry["state"], tensors, entry["record_id"]))
        self._launches.append(launch)
        self.used_groups.add(tuple(ranks))

    def _complete(self, launch: tuple[str, object], state: str) -> None:
        """Give the operations of a coalesced launch its state: they have none of their own."""
        index = len(self.operations)
        while index and self._launches[index - 1] == launch:
            index -= 1
            self.operations[index] = replace(self.operations[index], state=state)


def _tensors(sizes: object, types: object) -> tuple[str, ...] | None:
    """The tensors of an operation as texts; None if these are not their sizes and types."""
    if not isinstance(sizes, list) or not isinstance(types, list) or len(sizes) != len(types):
        return None
    for size, dtype in zip(sizes, types, strict=True):
        fits = isinstance(size, list) and len(size) <= _DEEPEST and all(type(each) is int for each in size)
        if not fits or not isinstance(dtype, str):
            return None
    return tuple(f"{printable(dtype)} {size}" for size, dtype in zip(sizes, types, strict=True))


def _shown(value: object) -> str:
    """A value in a message; the text of a container may be of any length."""
    return (
        printable(repr(value)) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    )
