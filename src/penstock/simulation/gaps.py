"""Gaps: the times in which a rank computes nothing, each with its reason; and the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import numpy as np

from penstock.cost.units import Scale
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind
from penstock.ir.messages import VALUES
from penstock.simulation.timeline import Event, Message, Timeline

_ROUNDING = 1e-12
_CHUNK = 20_000  # gaps whose texts are made together
REASONS = (
    *("warm-up", *VALUES, "link", "blocked receive", "blocked send"),
    *("unshard", "reload", "drain", "overhead"),
)
"""Why a rank is idle; `overhead` in measured timelines only: nothing in the schedule explains it."""
_WARM_UP, _VALUE, _GRADIENT, _LINK, _RECEIVE, _SEND, _UNSHARD, _RELOAD, _DRAIN, _OVERHEAD = range(len(REASONS))
_COLLECTIVES = tuple(kind for kind in Kind if kind.is_collective)


@dataclass(frozen=True)
class Gap:
    """A time in which a rank computes nothing, the reason, and which step would have to end earlier."""

    rank: int
    start: float
    end: float
    reason: str
    """One of `REASONS`."""
    next_step: Event | None
    """The step after the gap; None at the end of a rank's list."""
    message: Message | None
    """The message that step waits for, if any."""
    cause: Event | None
    """The step whose end it waits for."""

    @property
    def length(self) -> float:
        """Seconds."""
        return self.end - self.start

    def __str__(self) -> str:
        return self._words(f"{self.start:g} to {self.end:g}")

    def text(self, scale: Scale) -> str:
        """The gap in words, with its times in this unit."""
        return self._words(f"{scale.number(self.start, 4)} to {scale.text(self.end, 4)}")

    def _words(self, when: str) -> str:
        message = self.message
        awaited = None if message is None else (message.kind, message.stage, message.microbatch, message.source)
        step, cause = ("" if each is None else str(each.step) for each in (self.next_step, self.cause))
        return _text(self.rank, when, self.reason, step, cause, awaited)


def _text(
    rank: int,
    when: str,
    reason: str,
    step: str,
    cause: str,
    message: tuple[str, int, int, int] | None,
) -> str:
    """A gap in words; `message` is its kind, stage, microbatch and sender."""
    where = f"rank {rank}, {when}: {reason}"
    if not cause:
        return where
    if message is None:
        return f"{where}: {step} waits for {cause}"
    kind, stage, microbatch, source = message
    what = f"{kind} of stage {stage}, microbatch {microbatch}"
    return f"{where}: {step} waits for the {what} ({cause}, rank {source})"


@dataclass(frozen=True, eq=False)
class Gaps(Sequence[Gap]):
    """Every gap of every rank, in order of time on each rank; a `Gap` is made of the one that is asked for."""

    timeline: Timeline
    rank: Ints
    start: Floats
    end: Floats
    reason: Ints
    """Its number in `REASONS`."""
    next_slot: Ints
    """The slot after the gap, -1 without one."""
    message: Ints
    """The number in `Timeline.message_columns` of what that slot waits for, -1 without one."""
    cause: Ints
    """The slot whose end it waits for, -1 without one."""

    @classmethod
    def none(cls, timeline: Timeline) -> Gaps:
        """No gaps, where they mean nothing: the ranks of this timeline did not finish."""
        slots, times = np.zeros(0, dtype=np.int64), np.zeros(0)
        return cls(timeline, slots, times, times, slots, slots, slots, slots)

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, index: int) -> Gap: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Gap]: ...
    def __getitem__(self, index: int | slice) -> Gap | Sequence[Gap]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        slot, message, cause = (int(column[index]) for column in (self.next_slot, self.message, self.cause))
        return Gap(
            int(self.rank[index]),
            float(self.start[index]),
            float(self.end[index]),
            REASONS[self.reason[index]],
            None if slot < 0 else self.timeline.event(slot),
            None if message < 0 else self.timeline.message(message),
            None if cause < 0 else self.timeline.event(cause),
        )

    @property
    def length(self) -> Floats:
        """Seconds."""
        seconds: Floats = self.end - self.start
        return seconds

    @property
    def seconds_by_rank(self) -> Floats:
        """Per rank and reason: the seconds of all gaps."""
        shape = self.timeline.schedule.num_ranks, len(REASONS)
        key = self.rank * len(REASONS) + self.reason
        seconds: Floats = np.bincount(key, self.length, shape[0] * shape[1]).astype(np.float64)
        return seconds.reshape(shape)

    def records(self) -> Iterator[dict[str, Any]]:
        """Rank, start, end, reason, and all of it in words, gap after gap, without making a `Gap` of each."""
        for first in range(0, len(self), _CHUNK):
            yield from self._records(slice(first, first + _CHUNK))

    def _records(self, chosen: slice) -> Iterator[dict[str, Any]]:
        schedule, columns = self.timeline.schedule, self.timeline.message_columns
        steps = [schedule.texts_of_slots(column[chosen]) for column in (self.next_slot, self.cause)]
        message = self.message[chosen]
        names = ("kind", "stage", "microbatch", "source")
        awaited = zip(*(np.append(columns[name], 0)[message].tolist() for name in names))
        rows = zip(*(column[chosen].tolist() for column in (self.rank, self.start, self.end, self.reason)))
        for (rank, start, end, reason), step, cause, has_message, (is_gradient, *rest) in zip(
            rows, *steps, (message >= 0).tolist(), awaited
        ):
            value = (VALUES[is_gradient], *rest) if has_message else None
            why = _text(rank, f"{start:g} to {end:g}", REASONS[reason], step, cause, value)
            yield {"rank": rank, "start": start, "end": end, "reason": REASONS[reason], "why": why}


def gaps(timeline: Timeline) -> Gaps:
    """Every gap of every rank, in order of time on each rank."""
    rank, now, slot, warm_up = _idle_before(timeline)
    start = timeline.start[slot]
    late = timeline.latest_inputs[slot]
    columns = timeline.message_columns
    arrival = np.append(columns["arrival"], -np.inf)[late]
    cause = np.append(columns["producer"], -1)[late]
    done = np.append(timeline.end, 0.0)[cause]
    in_transfer = arrival - np.maximum(done, now) > done - now
    value = _VALUE + np.append(columns["kind"], False)[late]
    reason: Ints = np.where(warm_up, _WARM_UP, np.where(in_transfer, _LINK, value))
    found = Gaps(timeline, rank, now, start, reason, slot, late, cause)
    for i in np.flatnonzero((late < 0) | (arrival < start)).tolist():
        other = _other_reason(timeline, int(slot[i]), float(now[i]))
        found.reason[i], found.message[i], found.cause[i] = other
    return _with_drains(found)


def _idle_before(timeline: Timeline) -> tuple[Ints, Floats, Ints, Bools]:
    """Per gap before a slot: its rank, its start, the slot, and whether it is the first of its rank."""
    slots = np.flatnonzero(timeline.is_compute)
    rank = timeline.schedule.table.rank[slots]
    first = np.concatenate(([True], rank[1:] != rank[:-1]))[: len(slots)]
    before = np.where(first, 0.0, np.concatenate(([0.0], timeline.end[slots]))[:-1])
    idle = np.flatnonzero(timeline.start[slots] - before > timeline.makespan * _ROUNDING)
    return rank[idle], before[idle], slots[idle], first[idle]


def _with_drains(found: Gaps) -> Gaps:
    """The gaps with those between the last step of a rank and the end of the run."""
    timeline = found.timeline
    last = [
        float(timeline.end[first:last][timeline.is_compute[first:last]][-1:].max(initial=0.0))
        for first, last in pairwise(timeline.schedule.table.slot_bounds.tolist())
    ]
    ends = np.array(last)
    ranks = np.flatnonzero(timeline.makespan - ends > timeline.makespan * _ROUNDING)
    none = np.full(len(ranks), -1, dtype=np.int64)
    order = np.argsort(np.concatenate((found.rank, ranks)), kind="stable")
    columns = (
        (found.rank, ranks),
        (found.start, ends[ranks]),
        (found.end, np.full(len(ranks), timeline.makespan)),
        (found.reason, np.full(len(ranks), _DRAIN)),
        *((column, none) for column in (found.next_slot, found.message, found.cause)),
    )
    return Gaps(timeline, *(np.concatenate(pair)[order] for pair in columns))


def _other_reason(timeline: Timeline, slot: int, now: float) -> tuple[int, int, int]:
    """Reason, message and cause of a gap that does not end with the arrival of an input."""
    blocking = _blocking_message(timeline, slot)
    if blocking >= 0:
        columns = timeline.message_columns
        sends = columns["source"][blocking] == timeline.schedule.table.rank[slot]
        cause = columns["received" if sends else "producer"][blocking]
        return _SEND if sends else _RECEIVE, blocking, int(cause)
    copies, waiting = timeline.schedule.table.host_copy_waits
    own = copies[waiting == slot]
    copy = next((int(copy) for copy in own if timeline.end[copy] == timeline.start[slot]), -1)
    if copy >= 0:
        return _RELOAD, -1, copy
    return _UNSHARD if _awaits_collective(timeline, slot, now) else _OVERHEAD, -1, -1


def _awaits_collective(timeline: Timeline, slot: int, now: float) -> bool:
    """Whether the collective stream of the rank is busy to the end of this gap, or for most of it."""
    table, start = timeline.schedule.table, float(timeline.start[slot])
    own = table.slot[table.of_kind(*_COLLECTIVES) & (table.part_rank == table.rank[slot])]
    shared = np.minimum(timeline.end[own], start) - np.maximum(timeline.start[own], now)
    ends_it = (timeline.end[own] == start) & (timeline.end[own] > timeline.start[own])
    return bool(ends_it.any()) or float(shared.clip(0).sum()) * 2 > start - now


def _blocking_message(timeline: Timeline, slot: int) -> int:
    """The message of a receive, or send, directly before this slot that blocked the rank until it started."""
    table, i = timeline.schedule.table, slot - 1
    followed = timeline.begin is not None
    while followed and i >= 0 and table.rank[i] == table.rank[slot] and not timeline.is_compute[i]:
        if timeline.end[i] == timeline.start[slot] and timeline.end[i] > timeline.start[i]:
            return int(timeline.message_of_slot[i])
        i -= 1
    return -1


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
