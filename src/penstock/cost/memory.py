"""Memory: bytes that every action takes and frees, the peak of an order, and memory over time.

What each kind of action takes and frees, and when, is in the table of kinds (`penstock.ir.kinds`). From it
follow here, and nowhere else, the bytes of

    a stage at rest      parameters, gradients and optimizer state            `fixed_bytes`
    an event             F takes an activation, I, W and B free it, ...       `penstock.cost.effects`
    an order of actions  its peak, without a clock                            `penstock.cost.live_activations`
    a timeline           every line of a rank's memory over time              `memory_over_time`

At one instant frees come before takes, except that actions of one stream keep their order: a step frees nothing
before it has taken it. A forward-only schedule keeps no activation after F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.effects import changed_bytes, effect_bytes
from penstock.cost.prices import message_bytes
from penstock.ir.kinds import Kind, MemoryLine, Moment
from penstock.ir.messages import Messages
from penstock.ir.placement import Placement
from penstock.ir.table import ActionTable, Bools, Floats, Ints

__all__ = [
    "ActivationBytes",
    "Memory",
    "activation_bytes",
    "fixed_bytes",
    "fixed_bytes_of",
    "memory_over_time",
    "stage_bytes",
]

_FIXED = ("parameters", "gradients", "optimizer_state")


def fixed_bytes_of(costs: Costs, stages: Sequence[int], num_stages: int) -> float:
    """Bytes that these stages hold all the time: parameters, gradients and optimizer state."""
    return sum(costs.per_stage(name, num_stages)[stage] for name in _FIXED for stage in stages)


def fixed_bytes(costs: Costs, placement: Placement) -> Floats:
    """Per rank: bytes that its stages hold all the time."""
    own = placement.stages_of_rank
    return np.array([fixed_bytes_of(costs, stages, placement.num_stages) for stages in own])


def stage_bytes(costs: Costs, num_stages: int, line: MemoryLine) -> Floats:
    """Per kind and stage: bytes that one action takes or frees of a line of memory kept per stage.

    That is of a microbatch that is neither recomputed nor offloaded.
    """
    found = np.zeros((len(Kind), num_stages))
    for kind in Kind:
        for effect in kind.spec.memory:
            if effect.line is line and effect.of is None:
                found[kind.number] += effect_bytes(costs, num_stages, effect)
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
        for moment, times in ((Moment.START, start), (Moment.END, end)):
            parts, change = changed_bytes(table, costs, line, moment)
            slot = table.slot[parts]
            late = ~table.is_compute[parts] & (moment is Moment.START)
            found.append(_changes(table, times[slot], slot, line, change, late))
            if line is MemoryLine.ACTIVATIONS and not trains:  # nothing is kept for a backward that never comes
                found.append(_changes(table, end[slot], slot, line, -change, np.zeros_like(late)))
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
        _changes(table, start[receive], receive, MemoryLine.RECEIVE_BUFFERS, size, np.ones_like(receive)),
        _changes(table, freed, consumer, MemoryLine.RECEIVE_BUFFERS, -size, np.zeros_like(receive)),
    ]


def _changes(
    table: ActionTable, time: Floats, slot: Ints, line: MemoryLine, change: Floats, late: Ints | Bools
) -> _Changes:
    rank = table.rank[slot]
    number = np.full(len(slot), _LINES.index(line))
    return _Changes(time, rank, slot, number, change, late.astype(np.int64))


def _joined(changes: Sequence[_Changes]) -> _Changes:
    if not changes:
        nothing, none = np.empty(0), np.empty(0, dtype=np.int64)
        return _Changes(nothing, none, none, none, nothing, none)
    names = ("time", "rank", "slot", "line", "change", "late")
    return _Changes(*(np.concatenate([getattr(each, name) for each in changes]) for name in names))
