"""Put in SEND and RECV, in an order that no way of sending can block.

All ranks walk their lists together, sweep by sweep: in a sweep each rank, in ascending order, takes its
next step if the inputs are there. Whoever makes a value that another rank needs sends it at once, and at
that same moment the receive is written down at the end of what the receiver has done so far:

    rank 0   0F0 | 0SEND_F0 |          0F1 0SEND_F1
    rank 1       | 1RECV_F0 | 1F0 ...      1RECV_F1

So there is one order of events in which every send stands beside its receive. It runs through all lists
from left to right, hence no wait can close a cycle, even when sends hold up their rank until they are
received; and on each pair of ranks messages are received in the order they are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.ir.action import Kind
from penstock.ir.dataflow import Inputs, replay
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints, codes_of
from penstock.lowering.passes import Pass, arrange, refuse_if_present
from penstock.validation import refusal, validate

__all__ = ["AddCommunication"]

_COMMUNICATION = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


@dataclass(frozen=True)
class AddCommunication(Pass):
    """One SEND and one RECV for every value that crosses ranks, in an order no wait can block."""

    name: ClassVar[str] = "add-communication"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with communication."""
        refuse_if_present(schedule, self.name, *_COMMUNICATION)
        table = schedule.table
        moment = _moments(schedule)
        # sort keys: at each moment the step itself (0), then the messages of its first and second part
        ranks, keys, codes = [table.part_rank], [moment[table.slot] * 4], [table.code]
        feeds, fed = (stages[table.apart] for stages in table.edges)
        activations, gradients = table.forward[feeds], table.input_gradient[fed]
        for send, recv, made, source, target in (
            (Kind.SEND_F, Kind.RECV_F, activations, feeds, fed),
            (Kind.SEND_B, Kind.RECV_B, gradients, fed, feeds),
        ):
            edge, k = np.nonzero(made >= 0)
            key = moment[table.slot[made[edge, k]]] * 4 + (1 if send is Kind.SEND_F else 2)
            for kind, stages in ((send, source), (recv, target)):
                ranks.append(table.hosts[stages[edge]])
                keys.append(key)
                codes.append(codes_of(kind, stages[edge], k))
        rows = arrange(schedule.num_ranks, *map(np.concatenate, (ranks, keys, codes)))
        return schedule.with_rows(rows)


def _moments(schedule: Schedule) -> Ints:
    """Per slot: sweep * ranks + rank, the one order of events of this module's picture.

    A rank takes one step a sweep, `ranks` moments apart. A value made in a sweep is there in the same sweep
    for higher ranks and in the next for lower ones: at the receiver's next turn.
    """
    table, p = schedule.table, schedule.num_ranks
    producer, consumer = table.crossings
    turn = (table.rank[consumer] - table.rank[producer] - 1) % p + 1
    inputs = Inputs.of(schedule.num_steps, producer, consumer, turn - p)
    done = replay(table, inputs, [p] * schedule.num_steps, [rank - p for rank in range(p)])
    if done.stuck:
        raise refusal(schedule, validate(schedule))
    return np.array(done.ends, dtype=np.int64)
