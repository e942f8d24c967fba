"""Why it takes as long as it does: the critical path, and the reason for every gap."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from penstock.ir.action import Kind
from penstock.simulation.timeline import Event, Message, Timeline

__all__ = ["Gap", "critical_path", "gaps"]


_ROUNDING = 1e-12


@dataclass(frozen=True)
class Gap:
    """A stretch in which a rank computes nothing, why, and who would have to be faster."""

    rank: int
    start: float
    end: float
    reason: str
    """`warm-up`, `activation`, `gradient`, `link`, `blocked receive`, `blocked send`, `unshard` or `drain`."""
    before: Event | None
    """The step that comes after the gap."""
    message: Message | None
    """What that step waits for, if it is a message."""
    blame: Event | None
    """The step whose end the gap waits for."""

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start

    def __str__(self) -> str:
        where = f"rank {self.rank}, {self.start:g} to {self.end:g}"
        if self.message is None or self.blame is None:
            return f"{where}: {self.reason}"
        m = self.message
        what = f"{m.kind} of stage {m.stage}, microbatch {m.microbatch}"
        waits = f"{self.before.step if self.before else 'it'} waits for the {what}"
        return f"{where}: {self.reason}: {waits} ({self.blame.step}, rank {m.source})"


def gaps(timeline: Timeline) -> tuple[Gap, ...]:
    """Every gap of every rank, in order of time on each rank."""
    found: list[Gap] = []
    nothing = timeline.makespan * _ROUNDING
    bounds = timeline.schedule.table.slot_bounds.tolist()
    for rank, (first, last) in enumerate(pairwise(bounds)):
        now, begun = 0.0, False
        for slot in range(first, last):
            if not timeline.is_compute[slot]:
                continue
            start = float(timeline.start[slot])
            if start - now > nothing:
                found.append(_gap(timeline, rank, now, slot, warm_up=not begun))
            now, begun = float(timeline.end[slot]), True
        if timeline.makespan - now > nothing:
            found.append(Gap(rank, now, timeline.makespan, "drain", None, None, None))
    return tuple(found)


def _gap(timeline: Timeline, rank: int, now: float, slot: int, *, warm_up: bool) -> Gap:
    event = timeline.event(slot)
    late = max(timeline.inputs.get(slot, ()), key=lambda message: message.arrival, default=None)
    held_up = None
    if late is None or late.arrival < event.start:
        held_up = _held_up_by(timeline, slot)
    if held_up is not None:
        sends = held_up.source == rank
        blame = timeline.event(held_up.received if sends else held_up.producer)
        return Gap(rank, now, event.start, f"blocked {'send' if sends else 'receive'}", event, held_up, blame)
    if late is None or late.arrival < event.start:
        # what is left to wait for is the collective stream
        return Gap(rank, now, event.start, "unshard", event, None, None)
    blame = timeline.event(late.producer)
    reason = "link" if late.arrival - max(blame.end, now) > blame.end - now else late.kind
    return Gap(rank, now, event.start, "warm-up" if warm_up else reason, event, late, blame)


def _held_up_by(timeline: Timeline, slot: int) -> Message | None:
    """The message of a receive, or send, right before this slot that held up the rank until it started."""
    moved, table = timeline.run.moved, timeline.schedule.table
    i = slot - 1
    while moved is not None and i >= 0 and table.rank[i] == table.rank[slot] and not timeline.is_compute[i]:
        if timeline.end[i] == timeline.start[slot] and timeline.end[i] > timeline.start[i]:
            event = timeline.event(i)
            return _message_of(timeline, event)
        i -= 1
    return None


def _message_of(timeline: Timeline, event: Event) -> Message | None:
    part = event.step.parts[0]
    if not part.kind.is_communication:
        return None
    value = "activation" if part.kind in (Kind.SEND_F, Kind.RECV_F) else "gradient"
    step = {Kind.RECV_F: -1, Kind.RECV_B: +1}.get(part.kind, 0)
    assert part.microbatch is not None
    return timeline.message_of.get((value, part.stage + step, part.microbatch))


def critical_path(timeline: Timeline) -> tuple[Event, ...]:
    """The steps that decide the makespan, first to last: each starts when what it waited for was there."""
    if not timeline.schedule.num_steps:
        return ()
    slot: int | None = int(timeline.end.argmax())
    path: list[int] = []
    while slot is not None and slot not in path[-2:]:
        path.append(slot)
        slot = _cause(timeline, slot)
    return tuple(timeline.event(slot) for slot in reversed(path))


def _cause(timeline: Timeline, slot: int) -> int | None:
    """The slot that let this one end, if a message held it up, or else start; None at the beginning."""
    start, table = float(timeline.start[slot]), timeline.schedule.table
    if not timeline.is_compute[slot] and timeline.end[slot] > start:
        message = _message_of(timeline, timeline.event(slot))
        sender = slot if message is None else _sender(timeline, message)
        if sender != slot:
            return sender
    if start == 0:
        return None
    before = slot - 1
    if before >= 0 and table.rank[before] == table.rank[slot] and timeline.end[before] == start:
        return before
    for message in timeline.inputs.get(slot, ()):
        if message.arrival == start:
            return _sender(timeline, message)
    first = int(table.slot_bounds[table.rank[slot]])
    return next((i for i in reversed(range(first, slot)) if timeline.end[i] == start), None)


def _sender(timeline: Timeline, message: Message) -> int:
    """The slot that let a message begin: its own send, its receive, or the send of one ahead of it."""
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
