"""The values that have to cross ranks: one message for each edge between ranks, direction and microbatch.

An activation that several stages of a rank use crosses once, on the edge to the first of them in the order of
the graph; their gradients are several values.

Messages are in one order for every schedule of the same placement, graph and microbatches, with or without SEND
and RECV: the activations of all edges that cross ranks, edge by edge, then the gradients. So times of messages
are plain arrays in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.ir.encoding import Bools, Ints, stable_order
from penstock.ir.kinds import SEND_WAITS, Kind
from penstock.ir.table import ActionTable

Scalar = TypeVar("Scalar", bound=np.generic)

VALUES = ("activation", "gradient")
"""What a message carries, in the order of the messages."""


@dataclass(frozen=True, eq=False)
class Messages:
    """One entry per message; parts of the schedule, -1 where missing."""

    table: ActionTable
    edge: Ints
    """The edge of the stage graph it belongs to."""
    microbatch: Ints
    is_gradient: Bools
    send: Ints
    receive: Ints
    producer: Ints
    consumer: Ints
    """The first use in the receiving rank's list."""
    last_consumer: Ints
    """The last use; another one than the first only for an activation that several stages use."""
    source: Ints
    """The rank it leaves."""
    target: Ints
    """The rank it reaches."""

    @classmethod
    def of(cls, table: ActionTable) -> Messages:
        """What the edges between stages on different ranks call for."""
        crossing = np.flatnonzero(table.crosses_ranks)
        forward = crossing[table.carrier[crossing] == crossing]
        m, activation, gradient = table.microbatches, *table.between_stages
        first, last = _uses(table, activation.consumer)
        ends = [
            (table.message_at(Kind.SEND_F), table.message_at(Kind.SEND_B)),
            (table.message_at(Kind.RECV_F), table.message_at(Kind.RECV_B)),
            (activation.producer, gradient.producer),
            (first, gradient.consumer),
            (last, gradient.consumer),
        ]
        send, receive, producer, consumer, last_consumer = (
            np.concatenate((of_activation[forward].ravel(), of_gradient[crossing].ravel()))
            for of_activation, of_gradient in ends
        )
        (makes, uses), edge = table.graph.ends, np.concatenate((forward, crossing))
        is_gradient = np.repeat([False, True], (len(forward), len(crossing)))
        numbers = np.arange(m)
        return cls(
            table,
            edge=_for_each(edge, m),
            microbatch=np.broadcast_to(numbers, (len(edge), m)).ravel(),
            is_gradient=_for_each(is_gradient, m),
            send=send,
            receive=receive,
            producer=producer,
            consumer=consumer,
            last_consumer=last_consumer,
            source=_for_each(table.rank_of_stage[np.where(is_gradient, uses[edge], makes[edge])], m),
            target=_for_each(table.rank_of_stage[np.where(is_gradient, makes[edge], uses[edge])], m),
        )

    @cached_property
    def stage(self) -> Ints:
        """The stage that makes the value."""
        source, target = self.table.graph.ends
        return np.where(self.is_gradient, target[self.edge], source[self.edge])

    @cached_property
    def send_wait(self) -> Ints:
        """The wait for the send, -1 without one."""
        if not self.table.has(*SEND_WAITS):
            return np.full(len(self.edge), -1, dtype=np.int64)
        activation, gradient = (self.table.message_at(kind)[self.edge, self.microbatch] for kind in SEND_WAITS)
        return np.where(self.is_gradient, gradient, activation)

    @cached_property
    def paired(self) -> Bools:
        """Which of them are both sent and received."""
        return (self.send >= 0) & (self.receive >= 0)

    @cached_property
    def used(self) -> Bools:
        """Which of them are sent, received and used."""
        return self.paired & (self.consumer >= 0)

    @cached_property
    def consumed(self) -> Bools:
        """Which of them are computed and used, whether or not there are SEND and RECV."""
        return (self.producer >= 0) & (self.consumer >= 0)

    @cached_property
    def further_uses(self) -> tuple[Ints, Ints]:
        """The uses of activations by other stages of the rank after the first: message and part."""
        table, m = self.table, self.table.microbatches
        activation = table.between_stages[0]
        carried = np.flatnonzero(np.bincount(table.carrier, minlength=len(table.carrier))[table.carrier] > 1)
        number = np.full(len(table.carrier), -1)
        edges = self.edge[~self.is_gradient][::m]
        number[edges] = np.arange(len(edges)) * m
        message = (number[table.carrier[carried]][:, None] + np.arange(m)).ravel()
        part = activation.consumer[carried].ravel()
        later = (part >= 0) & (part != self.consumer[message])
        return message[later], part[later]

    @cached_property
    def in_order(self) -> bool:
        """Whether every channel receives in the order it sends."""
        return not self.overtaken[0].size

    @cached_property
    def overtaken(self) -> tuple[Ints, Ints]:
        """Messages received too early, and for each one that was sent before it and is received after it."""
        ranks, (parts, message) = self.table.placement.num_ranks, self.in_lists
        sent = message[self.send[message] == parts]  # by source, and there in the order of its list
        order = sent[stable_order(self.target[sent], ranks)]
        received, source, target = self.receive[order], self.source[order], self.target[order]
        same = (source[1:] == source[:-1]) & (target[1:] == target[:-1])
        late = np.flatnonzero(same & (received[1:] < received[:-1]))
        late = late[np.argsort(source[late] * ranks + target[late], kind="stable")]
        return order[late + 1], order[late]

    @cached_property
    def in_lists(self) -> tuple[Ints, Ints]:
        """The SEND and RECV parts of all messages that have both, in ascending order, and their messages."""
        paired = np.flatnonzero(self.paired)
        message = np.full(len(self.table.code), -1, dtype=np.int64)
        message[self.send[paired]] = message[self.receive[paired]] = paired
        parts = np.flatnonzero(message >= 0)
        return parts, message[parts]


def _for_each(values: npt.NDArray[Scalar], microbatches: int) -> npt.NDArray[Scalar]:
    """Each value once for every microbatch; `np.repeat`, but faster."""
    return np.broadcast_to(values[:, None], (len(values), microbatches)).ravel()


def _uses(table: ActionTable, consumer: Ints) -> tuple[Ints, Ints]:
    """Per carrying edge and microbatch: the first and the last use of the activation, -1 if there is none."""
    if (table.carrier == np.arange(len(table.carrier))).all():
        return consumer, consumer
    none = len(table.code)
    first, last = np.full_like(consumer, none), np.full_like(consumer, -1)
    np.minimum.at(first, table.carrier, np.where(consumer >= 0, consumer, none))
    np.maximum.at(last, table.carrier, consumer)
    return np.where(first < none, first, -1), last
