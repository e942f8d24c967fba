"""Attribution: the critical path, and the reason for every gap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.simulation.timeline import Event, Message, Timeline

__all__ = ["Gap", "critical_path", "gaps"]


_ROUNDING = 1e-12


@dataclass(frozen=True)
class Gap:
    """A time in which a rank computes nothing, the reason, and which step would have to end earlier."""

    rank: int
    start: float
    end: float
    reason: str
    """Why it is idle.

    `warm-up`, `activation`, `gradient`, `link`, `blocked receive`, `blocked send`, `unshard`, `reload` or
    `drain`.
    """
    before: Event | None
    """The step after the gap."""
    message: Message | None
    """The message that step waits for, if any."""
    blame: Event | None
    """The step whose end the gap waits for."""

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start

    def __str__(self) -> str:
        where = f"rank {self.rank}, {self.start:g} to {self.end:g}"
        if self.blame is None:
            return f"{where}: {self.reason}"
        waits = f"{where}: {self.reason}: {self.before.step if self.before else 'it'} waits for"
        if self.message is None:
            return f"{waits} {self.blame.step}"
        m = self.message
        what = f"{m.kind} of stage {m.stage}, microbatch {m.microbatch}"
        return f"{waits} the {what} ({self.blame.step}, rank {m.source})"


def gaps(timeline: Timeline) -> tuple[Gap, ...]:
    """Every gap of every rank, in order of time on each rank."""
    found: list[Gap] = []
    negligible = timeline.makespan * _ROUNDING
    bounds = timeline.schedule.table.slot_bounds.tolist()
    for rank, (first, last) in enumerate(pairwise(bounds)):
        slots = first + np.flatnonzero(timeline.is_compute[first:last])
        before = np.concatenate(([0.0], timeline.end[slots]))
        found += [
            _gap(timeline, rank, float(before[i]), int(slots[i]), warm_up=not i)
            for i in np.flatnonzero(timeline.start[slots] - before[:-1] > negligible).tolist()
        ]
        if timeline.makespan - before[-1] > negligible:
            found.append(Gap(rank, float(before[-1]), timeline.makespan, "drain", None, None, None))
    return tuple(found)


def _gap(timeline: Timeline, rank: int, now: float, slot: int, *, warm_up: bool) -> Gap:
    event = timeline.event(slot)
    late = max(timeline.inputs(slot), key=lambda message: message.arrival, default=None)
    blocking = None
    if late is None or late.arrival < event.start:
        blocking = _blocking_message(timeline, slot)
    if blocking is not None:
        sends = blocking.source == rank
        blame = timeline.event(blocking.received if sends else blocking.producer)
        return Gap(rank, now, event.start, f"blocked {'send' if sends else 'receive'}", event, blocking, blame)
    if late is None or late.arrival < event.start:
        if (copy := _awaited_copy(timeline, slot)) is not None:
            return Gap(rank, now, event.start, "reload", event, None, timeline.event(copy))
        # only the collective stream is left
        return Gap(rank, now, event.start, "unshard", event, None, None)
    blame = timeline.event(late.producer)
    reason = "link" if late.arrival - max(blame.end, now) > blame.end - now else late.kind
    return Gap(rank, now, event.start, "warm-up" if warm_up else reason, event, late, blame)


def _awaited_copy(timeline: Timeline, slot: int) -> int | None:
    """The slot of the RELOAD at whose end this slot started, if any."""
    copies, waiting = timeline.schedule.table.host_copy_waits
    own = copies[waiting == slot]
    return next((int(copy) for copy in own if timeline.end[copy] == timeline.start[slot]), None)


def _blocking_message(timeline: Timeline, slot: int) -> Message | None:
    """The message of a receive, or send, directly before this slot that blocked the rank until it started."""
    table, i = timeline.schedule.table, slot - 1
    followed = timeline.begin is not None
    while followed and i >= 0 and table.rank[i] == table.rank[slot] and not timeline.is_compute[i]:
        if timeline.end[i] == timeline.start[slot] and timeline.end[i] > timeline.start[i]:
            return timeline.message_of_slot.get(i)
        i -= 1
    return None


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
        message = timeline.message_of_slot.get(slot)
        sender = slot if message is None else _sender(timeline, message)
        if sender != slot:
            return sender
    if start == 0:
        return None
    before = slot - 1
    if before >= 0 and table.rank[before] == table.rank[slot] and timeline.end[before] == start:
        return before
    for message in timeline.inputs(slot):
        if message.arrival == start:
            return _sender(timeline, message)
    first = int(table.slot_bounds[table.rank[slot]])
    return next((i for i in reversed(range(first, slot)) if timeline.end[i] == start), None)


def _sender(timeline: Timeline, message: Message) -> int:
    """The slot that a message waited for to begin: its send, its receive, or the send of one ahead of it."""
    seen: set[int] = set()
    while True:
        seen.add(id(message))
        if timeline.end[message.sent] == message.begin or timeline.start[message.sent] == message.begin:
            return message.sent
        if timeline.start[message.received] == message.begin:
            return message.received
        ahead = [
            other
            for other in timeline.messages
            if id(other) not in seen
            and {other.source, other.target} & {message.source, message.target}
            and other.begin < message.begin <= other.arrival
        ]
        if not ahead:
            return message.sent
        message = max(ahead, key=lambda other: other.begin)
