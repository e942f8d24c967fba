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

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.ir.dataflow import Inputs, run_dataflow
from penstock.ir.encoding import (
    JOINED,
    KIND_MASK,
    KIND_SHIFT,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    PORT_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    Bools,
    Ints,
    code_of,
    codes_of,
)
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering.passes import Pass, arrange, require_absent
from penstock.validation import invalid_schedule_error, validate

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
        ranks, codes = [table.part_rank], [table.code]
        keys = [moment[table.slot] if table.has_pairs else moment]
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


# Move receives from where the value is sent to where it is used, so that no receive blocks unrelated work.
#
#     as add-communication leaves it    0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2F1
#     defer-receives                    0F0 0SEND_F0 0F1 2RECV_F0 0SEND_F1 2RECV_F1 2F0 2F1
#     ... past sends                    0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2F0 2RECV_F1 2F1
#
# Moving past compute alone keeps the order of a rank's messages, and with it every proof that there is no
# deadlock. Moving past sends goes further, but then two ranks may each have a send before the receive that the
# other waits for: that is safe only where every directed channel has a stream of its own.


_MESSAGES = {kind.number: kind for kind in Kind if kind.is_communication}
_MICROBATCH = MICROBATCH_MASK << MICROBATCH_SHIFT


@dataclass(frozen=True)
class DeferReceives(Pass):
    """Receive as late as possible: just before the first use, or before the next send where that comes first.

    With `past_sends`, receives pass sends too, except that a lower rank receives from a higher one before it
    sends to it, as torch does it. Either way a channel's receives stay in the order of its sends.
    """

    past_sends: bool = False
    name: ClassVar[str] = "defer-receives"

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule with its receives moved."""
        if not schedule.table.has_communication and len(schedule.messages.edge):
            raise ScheduleError(f"{self.name}: the schedule has no receives; run add-communication first")
        needed = _receives(schedule)
        return schedule.with_rows(
            [self._row(schedule, needed, rank, row) for rank, row in enumerate(schedule.table.rows)]
        )

    def _row(self, schedule: Schedule, needed: dict[int, list[int]], rank: int, row: Ints) -> list[int]:
        hosts = schedule.placement.stage_to_rank
        held = _Deferred()
        out: list[int] = []
        codes = row.tolist()
        for code, following in zip(codes, [*codes[1:], 0]):
            kind = code >> KIND_SHIFT & KIND_MASK
            if kind in _MESSAGES:
                stage = code >> STAGE_SHIFT & STAGE_MASK
                other = schedule.graph.peer(_MESSAGES[kind], stage, code >> PORT_SHIFT)
                peer = hosts[min(max(other, 0), len(hosts) - 1)]
                queue = peer if self.past_sends else 0
                if _MESSAGES[kind].is_receive:
                    held.hold(queue, code)
                    continue
                if rank < peer or not self.past_sends:
                    out += held.release_all(queue)
            elif not code & JOINED:
                pair = (code, following & ~JOINED) if following & JOINED else (code,)
                for part in pair:
                    for receive in needed.get(part & ~_MICROBATCH, ()):
                        out += held.release_through(receive | part & _MICROBATCH)
            out.append(code)
        if held:
            raise invalid_schedule_error(schedule, validate(schedule))
        return out


def _receives(schedule: Schedule) -> dict[int, list[int]]:
    """Per code of F, I and B, without its microbatch: the receives of what it needs."""
    graph, table = schedule.graph, schedule.table
    found: dict[int, list[int]] = {}
    for edge in np.flatnonzero(table.crosses_ranks).tolist():
        source, target = graph.edges[edge]
        _, first = graph.edges[table.carrier[edge]]
        activation = code_of(Kind.RECV_F, first, port=graph.port(Kind.RECV_F, first, source))
        gradient = code_of(Kind.RECV_B, source, port=graph.port(Kind.RECV_B, source, target))
        found.setdefault(code_of(Kind.F, target), []).append(activation)
        for kind in (Kind.I, Kind.B):
            found.setdefault(code_of(kind, source), []).append(gradient)
    return found


class _Deferred:
    """Receives that are not emitted yet, in queues that keep their order."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[int]] = {}
        self._queue_of: dict[int, deque[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue_of)

    def hold(self, queue: int, code: int) -> None:
        """Append one to a queue."""
        self._queue_of[code] = self._queues.setdefault(queue, deque())
        self._queue_of[code].append(code)

    def release_all(self, queue: int) -> list[int]:
        """Take all out of a queue."""
        waiting = self._queues.get(queue)
        return self.release_through(waiting[-1]) if waiting else []

    def release_through(self, code: int) -> list[int]:
        """Take this one out of its queue, and all before it; nothing if it is not deferred."""
        released: list[int] = []
        while code in self._queue_of:
            released.append(self._queue_of[code].popleft())
            del self._queue_of[released[-1]]
        return released
