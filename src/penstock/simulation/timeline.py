"""A schedule with times: what happened when, what it cost, how much memory it held. Plain data.

Three lengths are called "the time of a step", and each has its bubble:

    makespan  from time 0 to the last end on any rank
    span      the longest time from a rank's own first start to its own last end
    period    what one more iteration takes when iterations follow each other

A timeline is simulated (`penstock.simulate`) or measured (`penstock.runtime`, `Pipeline.profile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.bounds import OBJECTIVES, Bound, bounds_of
from penstock.cost.costs import Costs
from penstock.cost.memory import Memory, memory_over_time
from penstock.cost.prices import exposed_all_to_all, message_bytes, message_seconds
from penstock.display import Displayed
from penstock.errors import CostsError
from penstock.ir.action import Step
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import SEND_WAITS
from penstock.ir.messages import VALUES
from penstock.ir.schedule import Schedule
from penstock.ir.table import step_of_slot


@dataclass(frozen=True)
class Message:
    """A value that crosses ranks: computed in slot `producer`, used in slot `consumer`."""

    kind: str
    """`activation` or `gradient`."""
    stage: int
    """The stage that computed it."""
    microbatch: int
    edge: int
    """The edge of the stage graph it travels on."""
    source: int
    target: int
    producer: int
    consumer: int
    sent: int
    """The slot of its SEND, or of its producer in a schedule without SEND."""
    received: int
    """The slot of its RECV, or of its consumer in a schedule without RECV."""
    begin: float
    arrival: float
    size: float
    """Bytes."""


@dataclass(frozen=True)
class Event:
    """One step of a rank: `slot` is its number through all ranks, `index` its place in the rank's list."""

    slot: int
    rank: int
    index: int
    step: Step
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Timeline(Displayed):
    """Start and end of every slot of a schedule, simulated or measured, and what follows from them."""

    schedule: Schedule
    costs: Costs
    start: Floats
    """Per slot."""
    end: Floats
    """Per slot."""
    begin: Floats | None = None
    """Per message (`penstock.ir.messages`): when its transfer began; None where messages cost latency only."""
    arrival: Floats | None = None
    """Per message: when it arrived."""
    period: float | None = None
    """What one more iteration takes, optimizer step included.

    Simulated: `simulate(..., with_period=True)`. Measured: from consecutive steps. None where neither is known.
    """

    def __repr__(self) -> str:
        units = self.costs.units
        return (
            f"<Timeline {self.schedule.name}: makespan {units.time(self.makespan)}, {self.bubble():.1%} idle, "
            f"peak memory {units.memory(max(self.peak_memory, default=0.0))}>"
        )

    # --- times -------------------------------------------------------------------------------------

    @property
    def is_compute(self) -> Bools:
        """Per slot: whether it occupies the compute stream."""
        return self.schedule.table.is_compute_slot

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end of anything."""
        return float(self.end.max(initial=0))

    @cached_property
    def span(self) -> float:
        """The longest time from a rank's first start of compute to its last end."""
        chosen, ranks = self.is_compute, self.schedule.num_ranks
        rank, first, last = self.schedule.table.rank[chosen], np.full(ranks, np.inf), np.zeros(ranks)
        np.minimum.at(first, rank, self.start[chosen])
        np.maximum.at(last, rank, self.end[chosen])
        return float((last - first).max(initial=0.0))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank: seconds of compute."""
        seconds = np.where(self.is_compute, self.end - self.start, 0)
        return tuple(np.bincount(self.schedule.table.rank, seconds, self.schedule.num_ranks).tolist())

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Per rank: seconds of the makespan without compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def exposed_all_to_all(self) -> tuple[float, ...]:
        """Per rank: seconds, by the costs, in which only the all-to-all stream works; they count as busy."""
        seconds = exposed_all_to_all(self.schedule.table, self.costs)
        return tuple(np.bincount(self.schedule.table.rank, seconds, self.schedule.num_ranks).tolist())

    def length(self, by: str = "makespan") -> float:
        """The `makespan`, `span` or `period`."""
        if by not in OBJECTIVES:
            raise CostsError(f"the length of a timeline is its makespan, span or period (given {by!r})")
        seconds: float | None = getattr(self, by)
        if seconds is None:
            raise CostsError(
                "the period of this timeline is unknown: simulate(..., with_period=True), or profile two or "
                "more consecutive steps"
            )
        return seconds

    def bubble(self, by: str = "makespan") -> float:
        """The share of `makespan`, `span` or `period` in which a rank does not compute, on average."""
        whole = self.length(by)
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
        return self.bound.gap(self.makespan)

    # --- steps -------------------------------------------------------------------------------------

    def event(self, slot: int) -> Event:
        """One slot with its step."""
        table = self.schedule.table
        rank = int(table.rank[slot])
        index = slot - int(table.slot_bounds[rank])
        step = step_of_slot(self.schedule.table, slot)
        return Event(slot, rank, index, step, float(self.start[slot]), float(self.end[slot]))

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every slot, rank by rank in the order of the lists."""
        bounds = self.schedule.table.slot_bounds.tolist()
        times = list(zip(self.start.tolist(), self.end.tolist()))
        return tuple(
            Event(first + index, rank, index, step, *times[first + index])
            for rank, (first, steps) in enumerate(zip(bounds, self.schedule.ranks))
            for index, step in enumerate(steps)
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows of the schedule, one per step, with start and end in seconds."""
        rows = zip(self.schedule.to_rows(), self.start.tolist(), self.end.tolist())
        return [{**row, "start": start, "end": end} for row, start, end in rows]

    # --- messages ----------------------------------------------------------------------------------

    @cached_property
    def message_columns(self) -> dict[str, Any]:
        """The fields of all messages as arrays; `kind` is whether it is a gradient."""
        messages, slot = self.schedule.messages, self.schedule.table.slots_of
        number = np.flatnonzero(messages.consumed)
        producer, consumer = slot(messages.producer[number]), slot(messages.consumer[number])
        send, receive = slot(messages.send[number]), slot(messages.receive[number])
        sent, received = np.where(send >= 0, send, producer), np.where(receive >= 0, receive, consumer)
        begin, arrival = self._transfers()
        return {
            "kind": messages.is_gradient[number],
            **{
                name: getattr(messages, name)[number]
                for name in ("stage", "microbatch", "edge", "source", "target")
            },
            "producer": producer,
            "consumer": consumer,
            "sent": sent,
            "received": received,
            "begin": begin[number],
            "arrival": arrival[number],
            "size": message_bytes(messages, self.costs)[number],
        }

    def _messages_at(self, numbers: Ints | slice) -> tuple[Message, ...]:
        rows = zip(*(column[numbers].tolist() for column in self.message_columns.values()))
        return tuple(Message(VALUES[is_gradient], *rest) for is_gradient, *rest in rows)

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every value that crosses ranks and is used."""
        return self._messages_at(slice(None))

    @cached_property
    def further_uses(self) -> tuple[Ints, Ints]:
        """Uses of messages after the first one, by other stages of the same rank: number and slot of each."""
        messages, slot = self.schedule.messages, self.schedule.table.slot
        number, part = messages.further_uses
        consumed = messages.consumed[number]
        index: Ints = np.cumsum(messages.consumed) - 1
        return index[number[consumed]], slot[part[consumed]]

    @property
    def uses(self) -> tuple[tuple[Message, int], ...]:
        """Every message with every slot that uses it."""
        first = ((message, message.consumer) for message in self.messages)
        number, slot = (column.tolist() for column in self.further_uses)
        return (*first, *zip((self.messages[each] for each in number), slot))

    def _transfers(self) -> tuple[Floats, Floats]:
        """Per message: begin and arrival; by its send's end and the latency where it was not followed."""
        messages, slot = self.schedule.messages, self.schedule.table.slots_of
        sent = np.where(messages.send >= 0, messages.send, messages.producer)
        ready = np.append(self.end, np.nan)[slot(sent)]
        _, latency = message_seconds(messages, self.costs)
        if self.begin is None or self.arrival is None:
            return ready, ready + latency
        unknown = np.isnan(self.begin)
        return np.where(unknown, ready, self.begin), np.where(unknown, ready + latency, self.arrival)

    def inputs_of(self, slot: int) -> Ints:
        """The numbers, in `message_columns`, of the messages that a slot waits for."""
        order, consumers = self._by_consumer
        first, last = np.searchsorted(consumers, [slot, slot + 1]).tolist()
        return order[first:last]

    @cached_property
    def _by_consumer(self) -> tuple[Ints, Ints]:
        """Return message indices sorted by consumer, and the consumers."""
        consumer = self.message_columns["consumer"]
        order = np.argsort(consumer, kind="stable")
        return order, consumer[order]

    def message(self, number: int) -> Message:
        """One message, by its number in `message_columns`."""
        (found,) = self._messages_at(slice(number, number + 1))
        return found

    @cached_property
    def message_of_slot(self) -> Ints:
        """Per slot of a SEND or RECV, of what stands for it, or of a wait for a SEND: its message; else -1."""
        found = np.full(self.schedule.num_steps, -1, dtype=np.int64)
        columns = self.message_columns
        for end in ("sent", "received"):
            found[columns[end]] = np.arange(len(columns[end]))
        if self.schedule.table.has(*SEND_WAITS):
            table, messages = self.schedule.table, self.schedule.messages
            waits = np.flatnonzero(messages.send_wait >= 0)
            found[table.slot[messages.send_wait[waits]]] = found[table.slot[messages.send[waits]]]
        return found

    @cached_property
    def latest_inputs(self) -> Ints:
        """Per slot: the number of the message that arrives last of those it waits for; -1 without any."""
        arrival, consumer = self.message_columns["arrival"], self.message_columns["consumer"]
        latest = np.full(self.schedule.num_steps, -np.inf)
        np.maximum.at(latest, consumer, arrival)
        last = np.flatnonzero(arrival == latest[consumer])[::-1]
        found = np.full(self.schedule.num_steps, -1, dtype=np.int64)
        found[consumer[last]] = last  # of several, the first is written last
        return found

    @cached_property
    def volume(self) -> dict[tuple[int, int], float]:
        """Bytes from rank to rank."""
        columns, ranks = self.message_columns, self.schedule.num_ranks
        channel, index = np.unique(columns["source"] * ranks + columns["target"], return_inverse=True)
        total = np.bincount(index, columns["size"], len(channel))
        return {divmod(pair, ranks): size for pair, size in zip(channel.tolist(), total.tolist())}

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Per rank: what it holds over time."""
        schedule = self.schedule
        return tuple(memory_over_time(schedule.table, schedule.messages, self.costs, self.start, self.end))

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per rank: the most bytes it holds at once."""
        return tuple(memory.peak for memory in self.memory)
