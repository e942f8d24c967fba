"""Memory: bytes that every action takes and frees, the peak of an order, and memory over time.

What each kind of action takes and frees, and when, is in the table of kinds (`penstock.ir.kinds`). From it
follow here, and nowhere else, the bytes of

    a stage at rest      parameters, gradients and optimizer state            `fixed_bytes`
    an event             F takes an activation, I, W and B free it, ...       `activation_bytes`
    an order of actions  its peak, without a clock                            `LiveActivations`
    a timeline           every line of a rank's memory over time              `memory_over_time`

At one instant frees come before takes, except that actions of one stream keep their order: a step frees nothing
before it has taken it. A forward-only schedule keeps no activation after F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import message_bytes
from penstock.ir.kinds import Kind, MemoryLine, Moment
from penstock.ir.messages import Messages
from penstock.ir.placement import Placement
from penstock.ir.table import ActionTable, Floats, Ints

__all__ = [
    "ActivationBytes",
    "LayerBytes",
    "LiveActivations",
    "Memory",
    "activation_bytes",
    "fixed_bytes",
    "fixed_bytes_of",
    "live_activations",
    "memory_over_time",
    "stage_bytes",
]

_FIXED = ("parameters", "gradients", "optimizer_state")
_ACTIVATION_COSTS = ("activation", "activation_freed_by_input")


def fixed_bytes_of(costs: Costs, stages: Sequence[int], num_stages: int) -> float:
    """Bytes that these stages hold all the time: parameters, gradients and optimizer state."""
    return sum(costs.per_stage(name, num_stages)[stage] for name in _FIXED for stage in stages)


def fixed_bytes(costs: Costs, placement: Placement) -> Floats:
    """Per rank: bytes that its stages hold all the time."""
    own = placement.stages_of_rank
    return np.array([fixed_bytes_of(costs, stages, placement.num_stages) for stages in own])


def stage_bytes(costs: Costs, num_stages: int, line: MemoryLine) -> Floats:
    """Per kind and stage: bytes that one action takes (above 0) or frees of a line of memory kept per stage."""
    found = np.zeros((len(Kind), num_stages))
    for kind in Kind:
        for effect in kind.spec.memory:
            if effect.line is line:
                for name, factor in effect.bytes.items():
                    found[kind.number] += factor * np.array(costs.per_stage(name, num_stages))
    return found


@dataclass(frozen=True, eq=False)
class ActivationBytes:
    """Per stage: bytes of one microbatch's activation, and what remains of it after the input gradient."""

    full: Floats
    after_input_gradient: Floats


def activation_bytes(costs: Costs, num_stages: int) -> ActivationBytes:
    """What F takes, and what is left after I."""
    of_kind = stage_bytes(costs, num_stages, MemoryLine.ACTIVATIONS)
    full = of_kind[Kind.F.number]
    return ActivationBytes(full, full + of_kind[Kind.I.number])


# --- the peak of an order, without a clock ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LiveActivations:
    """One rank: its stages, and how many activations it holds at every moment when it takes one more.

    What a rank holds depends on its own order alone, so the counts are found once, and the peak follows for any
    costs. A row has, for each stage, how often each cost in `_ACTIVATION_COSTS` is held.
    """

    stages: tuple[int, ...]
    counts: Floats

    def peak(self, costs: Costs, num_stages: int) -> float:
        """The most bytes at once, fixed bytes included."""
        sizes = [costs.per_stage(name, num_stages)[s] for name in _ACTIVATION_COSTS for s in self.stages]
        return fixed_bytes_of(costs, self.stages, num_stages) + self.most_held(sizes)

    def most_held(self, sizes: Sequence[float]) -> float:
        """The most bytes of activations at once, given each cost in `_ACTIVATION_COSTS` of each stage."""
        return float((self.counts @ np.array(sizes)).max(initial=0))


class LayerBytes:
    """Memory of stages that are ranges of layers: the bytes of layers are summed once, for any partition."""

    def __init__(self, costs: Costs, num_layers: int) -> None:
        """`costs` has one entry per layer."""
        fixed = [fixed_bytes_of(costs, (layer,), num_layers) for layer in range(num_layers)]
        activations = [costs.per_stage(name, num_layers) for name in _ACTIVATION_COSTS]
        self._until = [[0.0, *accumulate(values)] for values in (fixed, *activations)]

    def peak(self, live: LiveActivations, ranges: Sequence[tuple[int, int]]) -> float:
        """The most bytes that a rank holds at once if its stages have these ranges of layers."""
        fixed, *activations = ([until[j] - until[i] for i, j in ranges] for until in self._until)
        return sum(fixed) + live.most_held([size for sizes in activations for size in sizes])


def live_activations(table: ActionTable) -> list[LiveActivations]:
    """One for each rank of a compute schedule."""
    takes_at_start = _effects_at(Moment.START)
    found = []
    for rank, stages in enumerate(table.placement.stages_of_rank):
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        # an overlapped pair takes at its start and frees at its end, whichever part is named first
        parts = parts[np.lexsort((~takes_at_start[table.kind[parts]], table.slot[parts]))]
        kind, stage = table.kind[parts], np.searchsorted(stages, table.stage[parts])
        change = np.zeros((len(parts), len(_ACTIVATION_COSTS) * len(stages)))
        for each in Kind:
            for effect in (e for e in each.spec.memory if e.line is MemoryLine.ACTIVATIONS):
                at = np.flatnonzero(kind == each.number)
                for name, factor in effect.bytes.items():
                    change[at, stage[at] + _ACTIVATION_COSTS.index(name) * len(stages)] += factor
        levels = np.cumsum(change, axis=0)[takes_at_start[kind]]
        found.append(LiveActivations(stages, np.unique(levels, axis=0)))
    return found


def _effects_at(moment: Moment) -> Ints:
    """Per kind: whether it changes the activations held at this moment."""
    return np.array(
        [any(e.line is MemoryLine.ACTIVATIONS and e.at is moment for e in kind.spec.memory) for kind in Kind]
    )


# --- memory over time -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Memory:
    """What a rank holds over time: `total[i]` bytes from `times[i]` on, and how much of it is what."""

    times: Floats
    total: Floats
    activations: Floats
    unsharded: Floats
    receive_buffers: Floats
    """Messages whose receive is posted and that are not consumed yet."""
    fixed: float
    """Parameters, gradients and optimizer state, which are held all the time."""

    @property
    def peak(self) -> float:
        """The most it holds at once."""
        return float(self.total.max(initial=self.fixed))


@dataclass(frozen=True, eq=False)
class _Changes:
    """Bytes taken or freed: when, on which rank, in which slot, of which line."""

    time: Floats
    rank: Ints
    slot: Ints
    line: Ints
    change: Floats
    late: Ints
    """1 for a take by another stream than compute: at one instant it comes after all frees."""


_LINES = tuple(MemoryLine)


def memory_over_time(
    table: ActionTable, messages: Messages, costs: Costs, start: Floats, end: Floats
) -> list[Memory]:
    """Per rank: its memory, given when each slot starts and ends."""
    # messages first: where F starts, its input stops being a receive buffer and becomes part of the activation
    changes = _joined(
        _message_changes(table, messages, costs, start, end) + _stage_changes(table, costs, start, end)
    )
    order = np.lexsort((changes.slot, changes.late, changes.time, changes.rank))
    bounds = np.searchsorted(changes.rank[order], np.arange(table.placement.num_ranks + 1))
    found = []
    for rank, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        fixed = fixed_bytes_of(costs, table.placement.stages_of_rank[rank], table.placement.num_stages)
        own = order[first:last]
        change, line = changes.change[own], changes.line[own]
        activations, unsharded, received = (
            np.cumsum(np.where(line == _LINES.index(each), change, 0.0))
            for each in (MemoryLine.ACTIVATIONS, MemoryLine.UNSHARDED, MemoryLine.RECEIVE_BUFFERS)
        )
        total = fixed + activations + unsharded + received
        found.append(Memory(changes.time[own], total, activations, unsharded, received, fixed))
    return found


def _stage_changes(table: ActionTable, costs: Costs, start: Floats, end: Floats) -> list[_Changes]:
    """What actions take and free of the lines that are kept per stage."""
    found = []
    trains = table.has(Kind.I, Kind.W, Kind.B)
    for line in (MemoryLine.ACTIVATIONS, MemoryLine.UNSHARDED):
        of_kind = stage_bytes(costs, table.placement.num_stages, line)
        moments = {kind: e.at for kind in table.kinds for e in kind.spec.memory if e.line is line}
        for kind, moment in moments.items():
            parts = np.flatnonzero(table.of_kind(kind))
            slot, change = table.slot[parts], of_kind[kind.number, table.stage[parts]]
            time = (start if moment is Moment.START else end)[slot]
            late = int(not kind.is_compute and moment is Moment.START)
            found.append(_changes(table, time, slot, line, change, late))
            if line is MemoryLine.ACTIVATIONS and not trains:  # nothing is kept for a backward that never comes
                found.append(_changes(table, end[slot], slot, line, -change, 0))
    return found


def _message_changes(
    table: ActionTable, messages: Messages, costs: Costs, start: Floats, end: Floats
) -> list[_Changes]:
    """Receive buffers: taken where the receive is posted, freed where the message is consumed last."""
    received = np.flatnonzero((messages.receive >= 0) & (messages.consumer >= 0))
    size = message_bytes(messages, costs)[received]
    if not size.any():
        return []
    receive, consumer = (table.slot[parts[received]] for parts in (messages.receive, messages.last_consumer))
    at_start = np.array([kind.spec.frees_input_at is Moment.START for kind in Kind])
    freed_at_start = at_start[table.kind[messages.last_consumer[received]]]
    freed = np.where(freed_at_start, start[consumer], end[consumer])
    held = freed > start[receive]  # one that is used at the instant of its receive is never held
    receive, consumer, size, freed = receive[held], consumer[held], size[held], freed[held]
    return [
        _changes(table, start[receive], receive, MemoryLine.RECEIVE_BUFFERS, size, 1),
        _changes(table, freed, consumer, MemoryLine.RECEIVE_BUFFERS, -size, 0),
    ]


def _changes(
    table: ActionTable, time: Floats, slot: Ints, line: MemoryLine, change: Floats, late: int
) -> _Changes:
    rank = table.rank[slot]
    number = np.full(len(slot), _LINES.index(line))
    return _Changes(time, rank, slot, number, change, np.full(len(slot), late))


def _joined(changes: Sequence[_Changes]) -> _Changes:
    if not changes:
        nothing, none = np.empty(0), np.empty(0, dtype=np.int64)
        return _Changes(nothing, none, none, none, nothing, none)
    names = ("time", "rank", "slot", "line", "change", "late")
    return _Changes(*(np.concatenate([getattr(each, name) for each in changes]) for name in names))
