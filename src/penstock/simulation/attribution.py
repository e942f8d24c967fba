"""Attribution: the critical path, and the reason for every gap."""

from __future__ import annotations

import numpy as np

from penstock.ir.table import Ints
from penstock.simulation.gaps import Gap, gaps
from penstock.simulation.timeline import Event, Timeline

__all__ = ["Gap", "critical_path", "gaps"]


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """The steps that determine the makespan, first to last: each starts when what it waited for has ended."""
    if not timeline.schedule.num_steps:
        return ()
    slot: int | None = int(timeline.end.argmax())
    path: list[int] = []
    while slot is not None and slot not in path[-2:]:
        path.append(slot)
        slot = _cause(timeline, slot)
    return tuple(timeline.event(slot) for slot in reversed(path))


def _cause(timeline: Timeline, slot: int) -> int | None:
    """The slot that this one waited for to end, if a message blocked it, or else to start; None at time 0."""
    start, table = float(timeline.start[slot]), timeline.schedule.table
    if not timeline.is_compute[slot] and timeline.end[slot] > start:
        message = int(timeline.message_of_slot[slot])
        sender = slot if message < 0 else _sender(timeline, message)
        if sender != slot:
            return sender
    if start == 0:
        return None
    before = slot - 1
    if before >= 0 and table.rank[before] == table.rank[slot] and timeline.end[before] == start:
        return before
    for number in timeline.inputs_of(slot).tolist():
        if timeline.message_columns["arrival"][number] == start:
            return _sender(timeline, number)
    first = int(table.slot_bounds[table.rank[slot]])
    earlier = np.flatnonzero(timeline.end[first:slot] == start)
    return first + int(earlier[-1]) if earlier.size else None


def _sender(timeline: Timeline, message: int) -> int:
    """The slot that a message waited for to begin: its send, its receive, or the send of one ahead of it."""
    columns = timeline.message_columns
    sent, received, begin = columns["sent"], columns["received"], columns["begin"]
    seen: list[int] = []
    while True:
        seen.append(message)
        now = begin[message]
        if now in (timeline.end[sent[message]], timeline.start[sent[message]]):
            return int(sent[message])
        if timeline.start[received[message]] == now:
            return int(received[message])
        ahead = _ahead(timeline, message)
        ahead = ahead[~np.isin(ahead, seen)]
        if not ahead.size:
            return int(sent[message])
        message = int(ahead[begin[ahead].argmax()])


def _ahead(timeline: Timeline, message: int) -> Ints:
    """The messages from or to one of its ranks that were in transfer until it began."""
    columns = timeline.message_columns
    ends, now = (columns["source"][message], columns["target"][message]), columns["begin"][message]
    near = np.isin(columns["source"], ends) | np.isin(columns["target"], ends)
    return np.flatnonzero(near & (columns["begin"] < now) & (now <= columns["arrival"]))
