"""Rules on messages: each is sent once and received once, before its use, in the order of its channel.

A channel is an ordered pair of ranks: what rank a sends to rank b arrives there in the order it is sent,
activations and gradients alike. The rules apply when the schedule has any SEND or RECV at all; without
them, values are taken to cross ranks as soon as they exist.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.messages import Messages
from penstock.validation.violation import Violation, part_at, violation_at

__all__ = ["channel_order", "delivered_in_time", "sent_and_received"]


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
                "add the receive, or remove this",
            )
        elif receive >= 0:
            yield violation_at(
                table,
                receive,
                "unmatched-receive",
                f"rank {source} never sends it",
                "add the send, or remove this",
            )
        elif consumer >= 0:
            message = f"its input is computed on rank {source}, but never sent to rank {target}"
            yield violation_at(table, consumer, "missing-message", message, "add the SEND and the RECV")
    yield from _needless(messages)


def _needless(messages: Messages) -> Iterator[Violation]:
    table = messages.table
    expected = np.zeros(len(table.code), dtype=np.bool_)
    for parts in (messages.send, messages.receive):
        expected[parts[parts >= 0]] = True
    others = np.flatnonzero(table.is_communication & table.well_placed & ~expected)
    if others.size:
        others = others[~np.isin(table.code[others], table.code[expected])]  # those are duplicates
    for part in others.tolist():
        message = _why_needless(messages, part)
        yield violation_at(table, part, "needless-message", message, "remove it")


def _why_needless(messages: Messages, part: int) -> str:
    table = messages.table
    edge = int(table.edges_of(part_at(table, part)[2].kind, np.array([part]))[0])
    if edge >= 0 and table.crosses_ranks[edge]:
        source, target = table.graph.edges[table.carrier[edge]]
        return f"no message is needed: stage {target}, on the same rank, gets the value of stage {source}"
    return "no message is needed: the stage at the other end is on this rank, or does not exist"


def delivered_in_time(messages: Messages) -> Iterator[Violation]:
    """A value is sent after it is computed, and received before it is used."""
    table = messages.table
    send, receive, producer, consumer = messages.send, messages.receive, messages.producer, messages.consumer
    slot = table.slots_of
    early = (send >= 0) & ((producer < 0) | (slot(send) <= slot(producer)))
    for i in np.flatnonzero(early).tolist():
        if producer[i] < 0:
            message, suggestion = (
                "the value it sends is never computed",
                "add the computation, or remove the message",
            )
        else:
            _, step, action = part_at(table, int(producer[i]))
            message = f"it comes before {action} at step {step}, which computes the value it sends"
            suggestion = f"move it after {action}"
        yield violation_at(table, int(send[i]), "send-before-compute", message, suggestion)
    late = (receive >= 0) & (consumer >= 0) & (slot(receive) >= slot(consumer))
    for i in np.flatnonzero(late).tolist():
        _, step, action = part_at(table, int(receive[i]))
        message = f"it comes before {action} at step {step}, which receives its input"
        yield violation_at(table, int(consumer[i]), "used-before-received", message, f"move it after {action}")


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
