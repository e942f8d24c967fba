"""A schedule with times: what happened when, what it cost, what it held, and why each rank idled.

Three lengths are called "the time of a step", and each has its bubble:

    makespan  from time 0 to the last end anywhere
    span      the longest time from a rank's own first start to its own last end
    period    what one more iteration takes when iterations follow each other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.bounds import Bound, bounds_of
from penstock.cost.costs import Costs
from penstock.errors import CostsError
from penstock.ir.action import Kind, Step
from penstock.ir.schedule import Schedule
from penstock.ir.table import Bools, Floats
from penstock.simulation.network import Run

__all__ = ["Event", "Memory", "Message", "Timeline"]

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Event:
    """One step of a rank: `slot` is its number through all ranks, `index` its place in the rank's list."""

    slot: int
    rank: int
    index: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True)
class Message:
    """A value on its way: made in slot `producer`, used in slot `consumer`."""

    kind: str
    """`activation` or `gradient`."""
    stage: int
    """The stage that made it."""
    microbatch: int
    source: int
    target: int
    producer: int
    consumer: int
    sent: int
    """The slot of its SEND, or of what makes it where nothing is sent."""
    received: int
    """The slot of its RECV, or of what uses it where nothing is received."""
    begin: float
    arrival: float
    size: float
    """Bytes."""


@dataclass(frozen=True)
class Memory:
    """What a rank holds over time: `total[i]` bytes from `times[i]` on, and how much of it is what."""

    times: Floats
    total: Floats
    activations: Floats
    unsharded: Floats
    fixed: float
    """Parameters, gradients and optimizer state, which are there all the time."""

    @property
    def peak(self) -> float:
        """The most it holds at once."""
        return float(self.total.max(initial=self.fixed))


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every slot of a schedule, simulated or measured, and what follows from them."""

    schedule: Schedule
    costs: Costs
    run: Run
    rerun: Callable[[Sequence[float]], Run]
    """One more iteration from these clocks of the ranks on."""

    # --- times -------------------------------------------------------------------------------------

    @property
    def start(self) -> Floats:
        """Per slot."""
        return self.run.start

    @property
    def end(self) -> Floats:
        """Per slot."""
        return self.run.end

    @cached_property
    def is_compute(self) -> Bools:
        """Per slot: whether it is F, I, W, B or a pair."""
        table = self.schedule.table
        found = np.zeros(self.schedule.num_steps, dtype=np.bool_)
        found[table.slot[table.is_compute]] = True
        return found

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end of anything."""
        return float(self.end.max(initial=0))

    @cached_property
    def span(self) -> float:
        """The longest time from a rank's first start of work to its last end."""
        return max((end - start for start, end in self._extents), default=0.0)

    @cached_property
    def _extents(self) -> list[tuple[float, float]]:
        extents = []
        for first, last in pairwise(self.schedule.table.slot_bounds.tolist()):
            own = np.arange(first, last)[self.is_compute[first:last]]
            extents.append(
                (float(self.start[own].min()), float(self.end[own].max())) if own.size else (0.0, 0.0)
            )
        return extents

    @cached_property
    def period(self) -> float:
        """What one more iteration takes in the long run, optimizer step included: the mean of 4 after 4."""
        ends = self._last_ends(self.run)
        laps = []
        for _ in range(8):
            laps.append(max(ends))
            ends = self._last_ends(self.rerun([end + self.costs.optimizer_step for end in ends]))
        return (max(ends) - laps[4]) / 4

    def _last_ends(self, run: Run) -> list[float]:
        bounds = self.schedule.table.slot_bounds.tolist()
        return [float(run.end[a:b].max(initial=0)) for a, b in pairwise(bounds)]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank: seconds of compute."""
        seconds = np.where(self.is_compute, self.end - self.start, 0)
        return tuple(np.bincount(self.schedule.table.rank, seconds, self.schedule.num_ranks).tolist())

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per rank: seconds of the makespan without compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    def bubble(self, by: str = "makespan") -> float:
        """The share of `makespan`, `span` or `period` in which the mean rank does not compute."""
        if by not in ("makespan", "span", "period"):
            raise CostsError(f"a bubble is by makespan, span or period (given {by!r})")
        whole: float = getattr(self, by)
        return 1 - sum(self.busy) / len(self.busy) / whole if whole else 0.0

    @property
    def bubble_rate(self) -> float:
        """The bubble by makespan."""
        return self.bubble()

    @cached_property
    def bound(self) -> Bound:
        """The greatest lower bound on the makespan of the same work in any order."""
        return bounds_of(self.schedule, self.costs)[0]

    @property
    def gap(self) -> float:
        """How much longer than the bound, as a share of it; 0 is a proof that nothing is faster."""
        gap = self.makespan / self.bound.seconds - 1 if self.bound.seconds else 0.0
        return 0.0 if abs(gap) < _ROUNDING else gap

    # --- steps and messages ------------------------------------------------------------------------

    def event(self, slot: int) -> Event:
        """One slot with its step."""
        table = self.schedule.table
        rank = int(table.rank[slot])
        index = slot - int(table.slot_bounds[rank])
        step = self.schedule.ranks[rank][index]
        return Event(slot, rank, index, step, float(self.start[slot]), float(self.end[slot]))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every slot, rank by rank in the order of the lists."""
        return tuple(map(self.event, range(self.schedule.num_steps)))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every value that crosses ranks and is used."""
        table, stages = self.schedule.table, self.schedule.num_stages
        latency = self.costs.per_edge("latency", stages)
        arrivals = self._arrivals()
        found = []
        for need, value in zip(table.between_stages, ("activation", "gradient")):
            size = self.costs.per_edge(f"{value}_message", stages)
            feeds, fed = table.edges
            sends = table.at(Kind.SEND_F)[feeds] if value == "activation" else table.at(Kind.SEND_B)[fed]
            receives = table.at(Kind.RECV_F)[fed] if value == "activation" else table.at(Kind.RECV_B)[feeds]
            for edge, k in np.argwhere((need.producer >= 0) & (need.consumer >= 0)).tolist():
                producer, consumer = (int(table.slot[side[edge, k]]) for side in need[1:])
                source, target = int(table.rank[producer]), int(table.rank[consumer])
                if source != target:
                    sent = int(table.slot[sends[edge, k]]) if sends[edge, k] >= 0 else producer
                    received = int(table.slot[receives[edge, k]]) if receives[edge, k] >= 0 else consumer
                    ready = float(self.end[sent])
                    begin, arrival = arrivals.get((value, edge, k), (ready, ready + latency[edge]))
                    stage = edge if value == "activation" else edge + 1
                    slots = (producer, consumer, sent, received)
                    found.append(Message(value, stage, k, source, target, *slots, begin, arrival, size[edge]))
        return tuple(found)

    def _arrivals(self) -> dict[tuple[str, int, int], tuple[float, float]]:
        """Begin and arrival of the messages that were followed, by value, edge and microbatch."""
        moved, table = self.run.moved, self.schedule.table
        if moved is None:
            return {}
        part_of = np.zeros(self.schedule.num_steps, dtype=np.int64)
        part_of[table.slot] = np.arange(len(table.slot))
        parts = part_of[moved.send]
        forward = table.kind[parts] == Kind.SEND_F.number
        edge = np.where(forward, table.stage[parts], table.stage[parts] - 1)
        keys = zip(
            np.where(forward, "activation", "gradient").tolist(),
            edge.tolist(),
            table.microbatch[parts].tolist(),
        )
        return dict(zip(keys, zip(moved.begin.tolist(), moved.arrival.tolist())))

    @cached_property
    def inputs(self) -> dict[int, list[Message]]:
        """The messages each slot waits for."""
        by_slot: dict[int, list[Message]] = {}
        for message in self.messages:
            by_slot.setdefault(message.consumer, []).append(message)
        return by_slot

    @cached_property
    def message_of(self) -> dict[tuple[str, int, int], Message]:
        """The messages by kind, stage that makes them, and microbatch."""
        return {(message.kind, message.stage, message.microbatch): message for message in self.messages}

    @cached_property
    def volume(self) -> dict[tuple[int, int], float]:
        """Bytes from rank to rank."""
        bytes_of: dict[tuple[int, int], float] = {}
        for message in self.messages:
            way = (message.source, message.target)
            bytes_of[way] = bytes_of.get(way, 0.0) + message.size
        return bytes_of

    @cached_property
    def communication(self) -> tuple[float, ...]:
        """Per rank: seconds in which messages to or from it are on their way, each counted for itself."""
        seconds = [0.0] * self.schedule.num_ranks
        for message in self.messages:
            for rank in (message.source, message.target):
                seconds[rank] += message.arrival - message.begin
        return tuple(seconds)

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Per rank: what it holds over time."""
        return tuple(self._memory_of(rank) for rank in range(self.schedule.num_ranks))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per rank: the most bytes it holds at once."""
        return tuple(memory.peak for memory in self.memory)

    def _memory_of(self, rank: int) -> Memory:
        table, stages = self.schedule.table, self.schedule.num_stages
        own = list(self.schedule.placement.stages_of_rank[rank])
        fixed = sum(
            self.costs.per_stage(name, stages)[stage]
            for name in ("parameters", "gradients", "optimizer_state")
            for stage in own
        )
        parts = np.arange(*table.part_bounds[rank : rank + 2])
        kind, stage, slot = table.kind[parts], table.stage[parts], table.slot[parts]
        acts, freed, whole = (
            np.array(self.costs.per_stage(name, stages), dtype=np.float64)[stage]
            for name in ("activation", "activation_freed_by_input", "unsharded_parameters")
        )
        at_end = ~np.isin(kind, [Kind.F.number, Kind.UNSHARD.number])
        times = np.where(at_end, self.end[slot], self.start[slot])
        activations = np.select(
            [kind == k.number for k in (Kind.F, Kind.I, Kind.W, Kind.B)],
            [acts, -freed, freed - acts, -acts],
            0.0,
        )
        unsharded = np.select([kind == k.number for k in (Kind.UNSHARD, Kind.RESHARD)], [whole, -whole], 0.0)
        if not table.has(Kind.I, Kind.W, Kind.B):  # nothing is kept for a backward that never comes
            times, slot = np.concatenate((times, self.end[slot])), np.concatenate((slot, slot))
            activations = np.concatenate((activations, -activations))
            unsharded = np.concatenate((unsharded, np.zeros_like(unsharded)))
        order = np.lexsort((slot, times))
        held, gathered = np.cumsum(activations[order]), np.cumsum(unsharded[order])
        return Memory(times[order], fixed + held + gathered, held, gathered, fixed)
