"""Add SEND and RECV in an order that no send model can block.

All ranks advance through their lists together, sweep by sweep: in a sweep each rank, in ascending order, takes
its next step if its inputs exist. A rank that computes a value for another rank sends it immediately, and at
the same moment the receive is appended to what the receiver has done so far:

    rank 0   0F0 | 0SEND_F0 |          0F1 0SEND_F1
    rank 1       | 1RECV_F0 | 1F0 ...      1RECV_F1

So there is one order of events in which every send is next to its receive. It runs through all lists from left
to right, hence no wait can close a cycle, even when a send blocks its rank until it is received; and on each
pair of ranks messages are received in the order they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import code_of
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.ir.table import Bools, Ints, codes_of
from penstock.lowering.passes import Pass, arrange, require_absent
from penstock.validation import invalid_schedule_error, validate

__all__ = ["AddCommunication"]

_COMMUNICATION = tuple(kind for kind in Kind if kind.is_communication)


@dataclass(frozen=True)
class AddCommunication(Pass):
    """One SEND and one RECV for every value that crosses ranks, in an order that cannot deadlock.

    A value that several stages of a rank use crosses once.
    """

    name: ClassVar[str] = "add-communication"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with communication."""
        require_absent(schedule, self.name, *_COMMUNICATION)
        table = schedule.table
        # sort keys: at each moment the step itself (0), then its activations (1) and its gradients (2)
        moment = _moments(schedule) * 4
        ranks, keys, codes = (
            [table.part_rank],
            [moment[table.slot] if table.has_pairs else moment],
            [table.code],
        )
        messages = schedule.messages
        computed = messages.producer >= 0
        made: Bools | slice = slice(None) if computed.all() else computed
        producer, stage = messages.producer[made], messages.stage[made]
        other = _other_ends(schedule)[made]
        key = moment[table.slots_of(producer)] + 1 + messages.is_gradient[made]
        for ends, kinds, host in (
            ((stage, other), (Kind.SEND_F, Kind.SEND_B), messages.source[made]),
            ((other, stage), (Kind.RECV_F, Kind.RECV_B), messages.target[made]),
        ):
            ranks.append(host)
            keys.append(key)
            codes.append(_message_codes(schedule, kinds, *ends, made))
        return arrange(schedule, *map(np.concatenate, (ranks, keys, codes)))


def _other_ends(schedule: Schedule) -> Ints:
    """Per message: the stage that uses the value."""
    source, target = schedule.graph.ends
    messages = schedule.messages
    return np.where(messages.is_gradient, source[messages.edge], target[messages.edge])


def _message_codes(
    schedule: Schedule, kinds: tuple[Kind, Kind], stage: Ints, other: Ints, made: Bools | slice
) -> Ints:
    """The SEND or RECV, of an activation or a gradient, of each message; `stage` is the action's own."""
    messages = schedule.messages
    microbatch, is_gradient = messages.microbatch[made], messages.is_gradient[made]
    port: Ints | int = 0
    if not schedule.graph.is_chain:
        pairs = zip(stage.tolist(), other.tolist(), is_gradient.tolist())
        port = np.array([schedule.graph.port(kinds[g], s, t) for s, t, g in pairs], dtype=np.int64)
    activation, gradient = (code_of(kind, 0) for kind in kinds)
    return codes_of(kinds[0], stage, microbatch, port) + is_gradient * np.int64(gradient - activation)


def _moments(schedule: Schedule) -> Ints:
    """Per slot: sweep * ranks + rank, the order of events of this module's picture.

    A rank takes one step per sweep, `ranks` moments apart. A value computed in a sweep exists in the same sweep
    for higher ranks and in the next for lower ones: at the receiver's next turn.
    """
    table, p = schedule.table, schedule.num_ranks
    producer, consumer = table.crossings
    turn = (table.rank[consumer] - table.rank[producer] - 1) % p + 1
    inputs = Inputs.of(schedule.num_steps, producer, consumer, turn - p)
    done = run_dataflow(table, inputs, p, np.arange(-p, 0))
    if done.stuck:
        raise invalid_schedule_error(schedule, validate(schedule))
    return done.ends.astype(np.int64)
