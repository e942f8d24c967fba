"""The messages of a timeline: when each value crossed ranks, as columns, and one by one as `Message`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import message_bytes, message_seconds
from penstock.ir.messages import VALUES
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints

__all__ = ["Message", "TimedMessages"]


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


@dataclass(frozen=True, eq=False)
class TimedMessages:
    """Start and end of every slot of a schedule, and what follows from them for messages."""

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
            "stage": messages.stage[number],
            "microbatch": messages.microbatch[number],
            "edge": messages.edge[number],
            "source": messages.source[number],
            "target": messages.target[number],
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

    def inputs(self, slot: int) -> tuple[Message, ...]:
        """The messages that a slot waits for."""
        return self._messages_at(self.inputs_of(slot))

    def inputs_of(self, slot: int) -> Ints:
        """The numbers, in `message_columns`, of the messages that a slot waits for."""
        order, consumers = self._by_consumer
        first, last = np.searchsorted(consumers, [slot, slot + 1]).tolist()
        return order[first:last]

    @cached_property
    def _by_consumer(self) -> tuple[Ints, Ints]:
        """The numbers of all messages in the order of their consumers, and these."""
        consumer = self.message_columns["consumer"]
        order = np.argsort(consumer, kind="stable")
        return order, consumer[order]

    def message(self, number: int) -> Message:
        """One message, by its number in `message_columns`."""
        (found,) = self._messages_at(slice(number, number + 1))
        return found

    @cached_property
    def message_of_slot(self) -> Ints:
        """Per slot of a SEND or RECV, or of what stands for it: the number of its message; -1 without one."""
        found = np.full(self.schedule.num_steps, -1, dtype=np.int64)
        columns = self.message_columns
        for end in ("sent", "received"):
            found[columns[end]] = np.arange(len(columns[end]))
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
