"""Rules on messages: each is sent once and received once, in time, in the order of its channel.

A channel is an ordered pair of ranks: what rank a sends to rank b arrives there in the order it is sent,
activations and gradients alike. The rules apply when the schedule has any SEND or RECV at all; without
them, values are taken to cross ranks by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.table import ActionTable, Bools, Ints
from penstock.validation.violation import Violation, part_at, violation_at

__all__ = ["Messages", "channel_order", "delivered_in_time", "sent_and_received"]


@dataclass(frozen=True)
class Messages:
    """One entry for every value that has to cross ranks; parts of the schedule, -1 where missing."""

    table: ActionTable
    send: Ints
    receive: Ints
    producer: Ints
    consumer: Ints
    source: Ints
    """The rank it leaves."""
    target: Ints
    """The rank it reaches."""

    @classmethod
    def of(cls, table: ActionTable) -> Messages:
        """What the edges between stages on different ranks call for."""
        apart = table.apart
        feeds, fed = (stages[apart] for stages in table.edges)
        activation, gradient = table.between_stages
        ends = [
            (table.at(Kind.SEND_F)[feeds], table.at(Kind.SEND_B)[fed]),
            (table.at(Kind.RECV_F)[fed], table.at(Kind.RECV_B)[feeds]),
            (activation.producer[apart], gradient.producer[apart]),
            (activation.consumer[apart], gradient.consumer[apart]),
        ]
        ranks = [(table.hosts[feeds], table.hosts[fed]), (table.hosts[fed], table.hosts[feeds])]
        m = table.microbatches
        return cls(
            table,
            *(np.concatenate([side.ravel() for side in sides]) for sides in ends),
            *(np.repeat(np.concatenate(sides), m) for sides in ranks),
        )

    @cached_property
    def paired(self) -> Bools:
        """Which of them are both sent and received."""
        return (self.send >= 0) & (self.receive >= 0)

    @cached_property
    def used(self) -> Bools:
        """Which of them are sent, received and used."""
        return self.paired & (self.consumer >= 0)

    @cached_property
    def in_order(self) -> bool:
        """Whether every channel receives in the order it sends."""
        return not self.overtaken[0].size

    @cached_property
    def overtaken(self) -> tuple[Ints, Ints]:
        """Messages received too early, and for each one that was sent before it and is received after it."""
        there = np.flatnonzero(self.paired)
        channel = self.source[there] * self.table.placement.num_ranks + self.target[there]
        order = there[np.lexsort((self.send[there], channel))]
        received = self.receive[order]
        channel = self.source[order] * self.table.placement.num_ranks + self.target[order]
        late = np.flatnonzero((channel[1:] == channel[:-1]) & (received[1:] < received[:-1]))
        return order[late + 1], order[late]


def sent_and_received(messages: Messages) -> Iterator[Violation]:
    """Every value that crosses ranks has one send and one receive, and no other message exists."""
    table = messages.table
    if not table.has_communication:
        return
    for i in np.flatnonzero((messages.send < 0) | (messages.receive < 0)).tolist():
        send, receive, consumer = (int(x[i]) for x in (messages.send, messages.receive, messages.consumer))
        source, target = messages.source[i], messages.target[i]
        if send >= 0:
            yield violation_at(
                table,
                send,
                "unmatched-send",
                f"rank {target} never receives it",
                "add the receive, or drop it",
            )
        elif receive >= 0:
            yield violation_at(
                table,
                receive,
                "unmatched-receive",
                f"rank {source} never sends it",
                "add the send, or drop it",
            )
        elif consumer >= 0:
            message = f"what it needs is made on rank {source}, but never sent to rank {target}"
            yield violation_at(table, consumer, "missing-message", message, "add the SEND and the RECV")
    called_for = np.zeros(len(table.code), dtype=np.bool_)
    for parts in (messages.send, messages.receive):
        called_for[parts[parts >= 0]] = True
    others = np.flatnonzero(table.is_communication & table.sound & ~called_for)
    if others.size:
        others = others[~np.isin(table.code[others], table.code[called_for])]  # those are duplicates
    for part in others.tolist():
        message = "nothing crosses ranks here: the neighbouring stage is on this rank, or there is none"
        yield violation_at(table, part, "needless-message", message, "drop it")


def delivered_in_time(messages: Messages) -> Iterator[Violation]:
    """A value is sent after it is made, and received before it is used."""
    table = messages.table
    send, receive, producer, consumer = messages.send, messages.receive, messages.producer, messages.consumer
    slot = table.slot_or_none
    early = (send >= 0) & ((producer < 0) | (slot[send] <= slot[producer]))
    for i in np.flatnonzero(early).tolist():
        if producer[i] < 0:
            message, suggestion = "what it sends is never computed", "add the computation, or drop the message"
        else:
            _, step, action = part_at(table, int(producer[i]))
            message = f"it comes before {action} at step {step}, which makes what it sends"
            suggestion = f"move it behind {action}"
        yield violation_at(table, int(send[i]), "send-before-compute", message, suggestion)
    late = (receive >= 0) & (consumer >= 0) & (slot[receive] >= slot[consumer])
    for i in np.flatnonzero(late).tolist():
        _, step, action = part_at(table, int(receive[i]))
        message = f"it comes before {action} at step {step}, which receives what it needs"
        yield violation_at(table, int(consumer[i]), "used-before-received", message, f"move it behind {action}")


def channel_order(messages: Messages) -> Iterator[Violation]:
    """On each channel, messages are received in the order they are sent."""
    table = messages.table
    for early, overtaken in zip(*(x.tolist() for x in messages.overtaken)):
        _, _, sent = part_at(table, int(messages.send[overtaken]))
        rank, step, action = part_at(table, int(messages.receive[overtaken]))
        source = messages.source[early]
        yield violation_at(
            table,
            int(messages.receive[early]),
            "channel-order",
            f"rank {source} sends {sent} first, but rank {rank} receives it later ({action}, step {step})",
            "receive from one rank in the order it sends",
        )
