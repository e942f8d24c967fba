"""Memory: bytes that every action takes and frees, the peak of an order, and memory over time.

What each kind of action takes and frees, and when, is in the table of kinds (`penstock.ir.kinds`). From it
follow here, and nowhere else, the bytes of

    a stage at rest      parameters, gradients and optimizer state            `fixed_bytes`
    an event             F takes an activation, I, W and B free it, ...       `penstock.cost.effects`
    an order of actions  its peak, without a clock                            `penstock.cost.memory`
    a timeline           every line of a rank's memory over time              `memory_over_time`

At one instant frees come before takes, except that actions of one stream keep their order: a step frees nothing
before it has taken it. A forward-only schedule keeps no activation after F.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.effects import changed_bytes, effect_bytes
from penstock.cost.prices import message_bytes
from penstock.ir.encoding import Bools, Floats, Ints, SmallInts
from penstock.ir.kinds import Kind, MemoryEffect, MemoryLine, Moment
from penstock.ir.messages import Messages
from penstock.ir.placement import Placement
from penstock.ir.table import ActionTable

_FIXED = ("parameters", "gradients", "optimizer_state")
_ROUNDING = 1e-9


def exceeds(peak: float, limit: float) -> bool:
    """Whether a peak is above a memory limit by more than rounding."""
    return peak > limit * (1 + _ROUNDING)


def counting_activations(costs: Costs) -> Costs:
    """The same seconds; of memory, each activation of a stage and microbatch counts 1, all else nothing."""
    nothing: dict[str, Any] = dict.fromkeys((*_FIXED, "activation_freed_by_input", "checkpoint"), 0)
    return replace(costs, **nothing, activation=1, offloadable=None)


def fixed_bytes_of(costs: Costs, stages: Sequence[int], num_stages: int) -> float:
    """Bytes that these stages hold all the time: parameters, gradients and optimizer state."""
    by_name = [costs.per_stage(name, num_stages) for name in _FIXED]
    return sum(each[stage] for each in by_name for stage in stages)


def fixed_bytes(costs: Costs, placement: Placement) -> Floats:
    """Per rank: bytes that its stages hold all the time."""
    own = placement.stages_of_rank
    return np.array([fixed_bytes_of(costs, stages, placement.num_stages) for stages in own])


def activation_limits(costs: Costs, placement: Placement, memory_limit: float) -> Floats:
    """Per rank: bytes that a memory limit leaves for activations, with a tolerance for rounding."""
    # relative to what is left, not to the limit: a share of large parameters could be many activations
    return (memory_limit - fixed_bytes(costs, placement)) * (1 + _ROUNDING)


def stage_bytes(costs: Costs, num_stages: int, line: MemoryLine) -> Floats:
    """Per kind and stage: bytes that one action takes or frees of a line of memory kept per stage.

    That is of a microbatch that is neither recomputed nor offloaded.
    """
    found = np.zeros((len(Kind), num_stages))
    for kind in Kind:
        for effect in kind.spec.memory:
            if effect.line is line and effect.of is None:
                found[kind.number] += effect_bytes(costs, num_stages, effect.bytes)
    return found


class ActivationBytes(NamedTuple):
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
    fixed: float
    """Parameters, gradients and optimizer state, which are held all the time."""
    activations: Floats
    unsharded: Floats
    receive_buffers: Floats
    """Messages whose receive is posted and that are not consumed yet."""
    send_buffers: Floats
    """Messages that are sent and not waited for yet, in schedules that have such waits."""

    @property
    def peak(self) -> float:
        """The most it holds at once."""
        return float(self.total.max(initial=self.fixed))


class _Changes(NamedTuple):
    """Bytes taken or freed: when, in which slot, of which line."""

    time: Floats
    slot: Ints
    line: SmallInts
    change: Floats
    late: Bools
    """Whether it is a take by another stream than compute: at one instant it comes after all frees."""


_LINES = tuple(MemoryLine)
_STACKED = (
    MemoryLine.ACTIVATIONS,
    MemoryLine.UNSHARDED,
    MemoryLine.RECEIVE_BUFFERS,
    MemoryLine.SEND_BUFFERS,
)


def memory_over_time(
    table: ActionTable, messages: Messages, costs: Costs, start: Floats, end: Floats
) -> list[Memory]:
    """Per rank: its memory, given when each slot starts and ends."""
    # messages first: where F starts, its input stops being a receive buffer and becomes part of the activation
    every = _message_changes(table, messages, costs, start, end) + _stage_changes(table, costs, start, end)
    changes = _Changes(*map(np.concatenate, zip(*every)))
    order, bounds = _in_time(table, changes)
    lines = np.bincount(changes.line, minlength=len(_LINES)) > 0
    found = []
    for rank, (first, last) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        fixed = fixed_bytes_of(costs, table.placement.stages_of_rank[rank], table.placement.num_stages)
        own = order[first:last]
        change, line = changes.change[own], changes.line[own]
        stacked = [
            np.cumsum(np.where(line == number, change, 0.0)) if lines[number] else np.zeros(len(own))
            for number in map(_LINES.index, _STACKED)
        ]
        total = sum(stacked, start=np.full(len(own), fixed))
        found.append(Memory(changes.time[own], total, fixed, *stacked))
    return found


def _in_time(table: ActionTable, changes: _Changes) -> tuple[Ints, Ints]:
    """The order of changes by rank, time, `late` and slot, and where each rank begins in it.

    Those of one slot at one time keep their order.
    """
    order: Ints = np.argsort(changes.slot, kind="stable")
    slot, time, late = changes.slot[order], changes.time[order], changes.late[order]
    bounds: Ints = np.searchsorted(slot, table.slot_bounds)
    begins = np.zeros(len(slot), dtype=np.bool_)
    begins[bounds[bounds < len(slot)]] = True
    if ((time[1:] >= time[:-1]) | begins[1:]).all():  # lists are in the order of time, but for other streams
        begins[1:] |= time[1:] > time[:-1]
        return order[np.argsort(2 * np.cumsum(begins) + late, kind="stable")], bounds
    return order[np.lexsort((late, time, table.rank[slot]))], bounds


def _stage_changes(table: ActionTable, costs: Costs, start: Floats, end: Floats) -> list[_Changes]:
    """What actions take and free of the lines that are kept per stage."""
    found = []
    trains = table.has(Kind.I, Kind.W, Kind.B)
    for line in (MemoryLine.ACTIVATIONS, MemoryLine.UNSHARDED):
        for moment, times in ((Moment.START, start), (Moment.END, end)):
            parts, change = changed_bytes(table, costs, line, moment)
            slot = table.slot[parts]
            late = ~table.is_compute[parts] & (moment is Moment.START)
            found.append(_changes(times[slot], slot, line, change, late))
            if line is MemoryLine.ACTIVATIONS and not trains:  # nothing is kept for a backward that never comes
                found.append(_changes(end[slot], slot, line, -change, np.zeros_like(late)))
    return found


def _message_changes(
    table: ActionTable, messages: Messages, costs: Costs, start: Floats, end: Floats
) -> list[_Changes]:
    """Buffers of messages.

    Receive buffers are taken where the receive is posted, and freed where the message is consumed last; send
    buffers are held from the send to its wait.
    """
    sizes = message_bytes(messages, costs)
    if not sizes.any():
        return []
    waited = np.flatnonzero((messages.send >= 0) & (messages.send_wait >= 0))
    send, wait = (table.slot[parts[waited]] for parts in (messages.send, messages.send_wait))
    received = np.flatnonzero((messages.receive >= 0) & (messages.consumer >= 0))
    size = sizes[received]
    receive, consumer = (table.slot[parts[received]] for parts in (messages.receive, messages.last_consumer))
    at_start = np.array([kind.spec.frees_input_at is Moment.START for kind in Kind])
    freed_at_start = at_start[table.kind[messages.last_consumer[received]]]
    freed = np.where(freed_at_start, start[consumer], end[consumer])
    held = freed > start[receive]  # one that is used at the instant of its receive is never held
    receive, consumer, size, freed = receive[held], consumer[held], size[held], freed[held]
    return [
        _changes(start[receive], receive, MemoryLine.RECEIVE_BUFFERS, size, np.ones_like(held[held])),
        _changes(freed, consumer, MemoryLine.RECEIVE_BUFFERS, -size, np.zeros_like(held[held])),
        _changes(start[send], send, MemoryLine.SEND_BUFFERS, sizes[waited], np.ones(len(waited), np.bool_)),
        _changes(end[wait], wait, MemoryLine.SEND_BUFFERS, -sizes[waited], np.zeros(len(waited), np.bool_)),
    ]


def _changes(time: Floats, slot: Ints, line: MemoryLine, change: Floats, late: Bools) -> _Changes:
    return _Changes(time, slot, np.full(len(slot), _LINES.index(line), dtype=np.int8), change, late)


# --- live activations ------------------------------------------------------------------------------
#
# What a rank holds depends on its own order alone, so counts are found once, and the peak follows for any costs
# and any partition into stages, without a clock. Copies to the host end when a clock says so: schedules with
# OFFLOAD have to be simulated.


_COSTS = ("activation", "activation_freed_by_input", "checkpoint")
_HANDLED = frozenset(Kind) - {Kind.OFFLOAD, Kind.RELOAD}


@dataclass(frozen=True, eq=False)
class LiveActivations:
    """One rank: its stages, and how many activations it holds at every moment when it takes one more.

    A row has, for each stage, how often each of `costs` is held.
    """

    stages: tuple[int, ...]
    counts: Floats
    costs: tuple[str, ...] = _COSTS

    def peak(self, costs: Costs, num_stages: int) -> float:
        """The most bytes at once, fixed bytes included."""
        sizes = [costs.per_stage(name, num_stages)[s] for name in self.costs for s in self.stages]
        return fixed_bytes_of(costs, self.stages, num_stages) + self.most_held(sizes)

    def most_held(self, sizes: Sequence[float]) -> float:
        """The most bytes of activations at once, given each of `costs` of each stage."""
        return float((self.counts @ np.array(sizes)).max(initial=0))


class LayerBytes:
    """Memory of stages that are ranges of layers: the bytes of layers are summed once, for any partition."""

    def __init__(self, costs: Costs, num_layers: int) -> None:
        """`costs` has one entry per layer."""
        fixed = [fixed_bytes_of(costs, (layer,), num_layers) for layer in range(num_layers)]
        self._fixed = [0.0, *accumulate(fixed)]
        self._until = {name: [0.0, *accumulate(costs.per_stage(name, num_layers))] for name in _COSTS}

    def with_live(self, number: float) -> list[float]:
        """Of each layer: its fixed bytes, and this many live activations."""
        activation = self._until["activation"]
        return [b - a + number * (d - c) for (a, b), (c, d) in zip(pairwise(self._fixed), pairwise(activation))]

    def peak(self, live: LiveActivations, ranges: Sequence[tuple[int, int]]) -> float:
        """The most bytes that a rank holds at once if its stages have these ranges of layers."""
        fixed = sum(self._fixed[j] - self._fixed[i] for i, j in ranges)
        sums = (self._until[name] for name in live.costs)
        return fixed + live.most_held([until[j] - until[i] for until in sums for i, j in ranges])


def live_activations(table: ActionTable) -> list[LiveActivations]:
    """One for each rank of a compute schedule."""
    table.require_handled(_HANDLED, "cost.live_activations")
    names = _COSTS if table.has(Kind.RECOMPUTE) else _COSTS[:2]
    at_start = [any(effect.at is Moment.START for effect in _effects(kind)) for kind in Kind]
    takes = np.array(at_start)[table.kind]
    changes = _count_changes(table, names)
    found = []
    for rank, stages in enumerate(table.placement.stages_of_rank):
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        # an overlapped pair takes at its start and frees at its end, whichever part is named first
        parts = parts[np.lexsort((~takes[parts], table.slot[parts]))]
        stage = np.searchsorted(stages, table.stage[parts])
        change = np.zeros((len(parts), len(names) * len(stages)))
        for column, factors in enumerate(changes):
            change[np.arange(len(parts)), stage + column * len(stages)] = factors[parts]
        levels = np.cumsum(change, axis=0)[takes[parts]]
        found.append(LiveActivations(stages, np.unique(levels, axis=0), names))
    return found


def _count_changes(table: ActionTable, names: tuple[str, ...]) -> Floats:
    """Per cost and part: how often the part takes it, or, below 0, frees it."""
    change = np.zeros((len(names), len(table.code)))
    for kind in table.kinds:
        for effect in _effects(kind):
            parts: Ints = np.flatnonzero(table.of_kind(kind))
            if effect.of is not None:
                parts = table.at(Kind(effect.of))[table.stage[parts], table.microbatch[parts]]
            for name, factor in effect.bytes.items():
                change[names.index(name), parts] += factor
    return change


def _effects(kind: Kind) -> list[MemoryEffect]:
    """Its effects on activations, but for those on copies to the host."""
    own = (effect for effect in kind.spec.memory if effect.line is MemoryLine.ACTIVATIONS)
    return [effect for effect in own if effect.of is None or Kind(effect.of) in _HANDLED]
