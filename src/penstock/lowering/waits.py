"""Waits as actions: the end of a send, whose buffer is then free, and the end of a reduction.

    0SEND_F0 ... 0B0 0WAIT_SEND_F0     the gradient that 0B0 uses proves that the activation was received
    0SEND_B1 ............ 0WAIT_SEND_B1    at the end of the list, where nothing proves it
    0REDUCE_GRAD 0WAIT_REDUCE_GRAD     or, deferred, before the rank's next REDUCE_GRAD

These are the places that torch gives them from 2.15 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.encoding import KIND_SHIFT, Ints, codes_of
from penstock.ir.kinds import SEND_WAITS, Kind
from penstock.ir.schedule import Schedule
from penstock.lowering.passes import Pass, insert, require_absent


@dataclass(frozen=True)
class AddSendWaits(Pass):
    """One wait for each send: of an activation after the stage's backward, of others at the end of the list."""

    name: ClassVar[str] = "add-send-waits"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with its waits; they can block no rank that the schedule does not block without them."""
        require_absent(schedule, self.name, *SEND_WAITS)
        table, messages = schedule.table, schedule.messages
        if not table.has_communication and len(messages.edge):
            raise ScheduleError(f"{self.name}: the schedule has no sends; run add-communication first")
        sent = np.flatnonzero(messages.send >= 0)
        send, rank = messages.send[sent], messages.source[sent]
        backward = table.input_gradient[messages.stage[sent], messages.microbatch[sent]]
        proved = ~messages.is_gradient[sent] & (table.slots_of(backward) > table.slot[send])
        before = np.where(proved, _after(schedule, table.slots_of(backward)), table.part_bounds[rank + 1])
        order = np.lexsort((send, ~proved, before))
        code = table.code[send] + np.where(messages.is_gradient[sent], _TO_WAIT_B, _TO_WAIT_F)
        return insert(schedule, before[order], rank[order], code[order])


_TO_WAIT_F, _TO_WAIT_B = (
    kind.number - kind.waits_for.number << KIND_SHIFT for kind in SEND_WAITS if kind.waits_for is not None
)


@dataclass(frozen=True)
class AddReduceWaits(Pass):
    """One wait for each REDUCE_GRAD: directly after it, or `deferred` to the rank's next reduction, or its end.

    Deferred, a reduction overlaps with the work up to the next one, and at most one of a rank is pending.
    """

    deferred: bool = False
    name: ClassVar[str] = "add-reduce-waits"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with its waits for reductions."""
        require_absent(schedule, self.name, Kind.WAIT_REDUCE_GRAD)
        table = schedule.table
        parts = np.flatnonzero(table.of_kind(Kind.REDUCE_GRAD))
        rank, before = table.part_rank[parts], parts + 1
        if self.deferred:
            is_last = np.append(rank[1:] != rank[:-1], values=True)[: len(parts)]
            before = np.where(is_last, table.part_bounds[rank + 1], np.append(parts, 0)[1:])
        return insert(schedule, before, rank, codes_of(Kind.WAIT_REDUCE_GRAD, table.stage[parts]))


def _after(schedule: Schedule, slot: Ints) -> Ints:
    """The part that follows each of these slots."""
    following: Ints = np.searchsorted(schedule.table.slot, slot, side="right")
    return following
