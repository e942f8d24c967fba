"""Timelines as a trace in the Chrome trace-event format, which Perfetto and chrome://tracing open.

    rank 0                 one process per rank
      compute              one event per step; its arguments explain the idle gap before it
      to rank 1            one event per sent message, from begin to arrival
      from rank 1          one event per received message, the same
      collective           UNSHARD, RESHARD, REDUCE_GRAD
      offload, reload      the two directions of the host link
      memory (bytes)       counters, or memory (activations)
    arrows                 from the producer of a value through its message to the consumer

Times are microseconds with nanosecond resolution; the unit of relative costs is drawn as one second. Process
and thread ids are unique in a file, because Perfetto finds the name of a thread by its id alone. Concurrent
events of one thread go to further threads of the same name, because events of one thread may not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, nextafter
from typing import Any, TypeAlias

import numpy as np

from penstock.arguments import listed
from penstock.cost.prices import all_to_all_seconds, exposed_all_to_all
from penstock.ir.action import Action, Step
from penstock.ir.kinds import Kind, Role
from penstock.simulation.gaps import Gap, gaps
from penstock.simulation.timeline import Event, Message, Timeline
from penstock.view.kinds import TRACKS, style_of

Entry: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Span:
    """An interval on a thread of a rank, in nanoseconds."""

    rank: int
    thread: str
    start: int
    end: int
    name: str
    category: str
    args: Entry
    lane: int = 0
    """The index among the threads of this name."""


def trace(timelines: Sequence[Timeline]) -> str:
    """The timelines as the text of one JSON file; process names distinguish several timelines."""
    ids, flows = count(1), count(1)
    metadata: list[Entry] = []
    entries: list[Entry] = []
    for timeline in timelines:
        prefix = f"{timeline.schedule.name}: " if len(timelines) > 1 else ""
        one = _TimelineTrace(timeline, ids, flows)
        metadata += one.metadata(prefix)
        entries += one.entries()
    entries.sort(key=lambda entry: entry["ts"])  # stable: at equal times, an event precedes its arrows
    lines = ",\n".join(
        json.dumps(entry, allow_nan=False, separators=(",", ":")) for entry in metadata + entries
    )
    about = [
        {
            "schedule": timeline.schedule.name,
            f"makespan_{timeline.costs.units.time_name}": timeline.makespan,
            "bubble_rate": timeline.bubble_rate,
            f"peak_memory_{timeline.costs.units.memory_name}": list(timeline.peak_memory),
        }
        for timeline in timelines
    ]
    head = f'"displayTimeUnit":"ms",\n"otherData":{json.dumps({"timelines": about}, allow_nan=False)}'
    return f'{{{head},\n"traceEvents":[\n{lines}\n]}}\n'


class _TimelineTrace:
    def __init__(self, timeline: Timeline, ids: Iterator[int], flows: Iterator[int]) -> None:
        self.timeline, self.flows = timeline, flows
        self.steps = [_step(event) for event in timeline.events]
        self.sent = [_message(timeline, m, leaving=True) for m in timeline.messages]
        self.received = [_message(timeline, m, leaving=False) for m in timeline.messages]
        self.shown = [span for span in self.steps if span is not None] + self.sent + self.received
        _assign_lanes(self.shown)
        threads = sorted({(span.rank, _thread_order(span.thread), span.lane) for span in self.shown})
        self.process = []
        self.thread: dict[tuple[int, str, int], int] = {}
        for rank in range(timeline.schedule.num_ranks):
            self.process.append(next(ids))
            for _, (_, _, name), lane in (thread for thread in threads if thread[0] == rank):
                self.thread[rank, name, lane] = next(ids)

    def metadata(self, prefix: str) -> Iterator[Entry]:
        """Names and sort order of processes and threads."""
        for rank, process in enumerate(self.process):
            own = self.timeline.schedule.placement.stages_of_rank[rank]
            labels = f"stage{'s' * (len(own) != 1)} {listed(own)}"
            yield _metadata("process_name", process, process, name=f"{prefix}rank {rank}")
            yield _metadata("process_labels", process, process, labels=labels)
            yield _metadata("process_sort_index", process, process, sort_index=process)
        for (rank, name, lane), thread in self.thread.items():
            shown = f"{name} ({lane + 1})" if lane else name
            yield _metadata("thread_name", self.process[rank], thread, name=shown)
            yield _metadata("thread_sort_index", self.process[rank], thread, sort_index=thread)

    def entries(self) -> Iterator[Entry]:
        """Events, the arrows between them, and counters."""
        for gap in gaps(self.timeline):
            span = self.steps[gap.next_step.slot] if gap.next_step is not None else None
            if span is not None and _ns(gap.end) > _ns(gap.start):
                span.args |= _gap_arguments(gap)
        self._add_all_to_all()
        for span in self.shown:
            times = {**self._at(span, span.start), "dur": _us(span.end - span.start)}
            yield {"ph": "X", "name": span.name, "cat": span.category, **times, "args": span.args}
        sent = dict(zip(map(id, self.timeline.messages), self.sent))
        for message, slot in self.timeline.uses:
            yield from self._arrow(message, sent[id(message)], slot)
        for rank, process in enumerate(self.process):
            yield from _counters(self.timeline, rank, process)

    def _add_all_to_all(self) -> None:
        """Tell the all-to-all of steps that have one, and how much of it no compute hides."""
        table, costs = self.timeline.schedule.table, self.timeline.costs
        sent, exposed = all_to_all_seconds(table, costs), exposed_all_to_all(table, costs)
        for slot in np.flatnonzero(sent).tolist():
            if (span := self.steps[slot]) is not None:
                span.args["all_to_all_us"] = _us(_ns(sent[slot]))
                span.args["exposed_all_to_all_us"] = _us(_ns(exposed[slot]))

    def _at(self, span: _Span, time: int) -> Entry:
        thread = self.thread[span.rank, span.thread, span.lane]
        return {"pid": self.process[span.rank], "tid": thread, "ts": _us(time)}

    def _arrow(self, message: Message, sent: _Span, use: int) -> Iterator[Entry]:
        """An arrow binds to the events that enclose its points; an event of zero duration encloses nothing."""
        producer, consumer = self.steps[message.producer], self.steps[use]
        assert producer is not None
        assert consumer is not None
        if producer.end == producer.start or consumer.end == consumer.start:
            return
        arrow = {"name": message.kind, "cat": "communication", "id": next(self.flows)}
        yield {"ph": "s", **arrow, **self._at(producer, producer.end - 1)}
        if sent.end > sent.start:
            yield {"ph": "t", **arrow, **self._at(sent, sent.start)}
        yield {"ph": "f", "bp": "e", **arrow, **self._at(consumer, consumer.start)}


def _step(event: Event) -> _Span | None:
    """The span of a compute step or a collective; None for sends and receives, which are message spans."""
    track = style_of(event.step.kind).track
    if track == "message":
        return None
    times = (_ns(event.start), _ns(event.end))
    return _Span(event.rank, track, *times, str(event.step), track, _arguments(event.step))


def _message(timeline: Timeline, message: Message, *, leaving: bool) -> _Span:
    here, peer = (message.source, message.target) if leaving else (message.target, message.source)
    makes, uses = timeline.schedule.graph.edges[message.edge][:: 1 if message.kind == "activation" else -1]
    stage, other = (makes, uses) if leaving else (uses, makes)
    role = Role.SEND if leaving else Role.RECEIVE
    kind = next(kind for kind in Kind if kind.spec.role is role and kind.spec.value == message.kind)
    args = {
        "kind": kind.value,
        "stage": stage,
        "microbatch": message.microbatch,
        "bytes": int(message.size),
        "producer": str(timeline.event(message.producer).step),
        "consumer": str(timeline.event(message.consumer).step),
    }
    thread = f"{'to' if leaving else 'from'} rank {peer}"
    times = (_ns(message.begin), _ns(message.arrival))
    text = str(Action(kind, stage, message.microbatch, other))
    return _Span(here, thread, *times, text, "communication", args)


def _arguments(step: Step) -> Entry:
    """Kind, stage and microbatch; lists of two for an overlapped pair."""
    pair = len(step.parts) > 1
    stages, microbatches = [part.stage for part in step.parts], [part.microbatch for part in step.parts]
    args: Entry = {"kind": step.kind.value, "stage": stages if pair else stages[0]}
    if microbatches[0] is not None:
        args["microbatch"] = microbatches if pair else microbatches[0]
    return args


def _gap_arguments(gap: Gap) -> Entry:
    args: Entry = {"waited_us": _us(_ns(gap.end) - _ns(gap.start)), "reason": gap.reason}
    if gap.message is not None and gap.cause is not None:
        m = gap.message
        what = f"{m.kind} of stage {m.stage}, microbatch {m.microbatch}"
        args["waits_for"] = f"{what} ({gap.cause.step}, rank {m.source})"
    return args


def _counters(timeline: Timeline, rank: int, process: int) -> Iterator[Entry]:
    memory, name = timeline.memory[rank], f"memory ({timeline.costs.units.memory_name})"
    times = [_ns(time) for time in memory.times.tolist()]
    lines = {"activations": memory.activations, "unsharded": memory.unsharded}
    buffers = {"receive buffers": memory.receive_buffers, "send buffers": memory.send_buffers}
    lines |= {name: line for name, line in buffers.items() if line.any()}
    changes = dict(zip(times, zip(*(line.tolist() for line in lines.values()))))
    before = None
    for time, held in {0: (0.0,) * len(lines), **changes}.items():
        activations, unsharded, *messages = held
        values = {"activations": activations, "unsharded": unsharded, "fixed": memory.fixed}
        values |= dict(zip([*lines][2:], messages))
        if values != before:
            yield {"ph": "C", "name": name, "pid": process, "tid": process, "ts": _us(time), "args": values}
        before = values


def _assign_lanes(spans: Sequence[_Span]) -> None:
    free: dict[tuple[int, str], list[int]] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        ends = free.setdefault((span.rank, span.thread), [])
        span.lane = next((n for n, end in enumerate(ends) if end <= span.start), len(ends))
        ends[span.lane : span.lane + 1] = [span.end]


def _thread_order(thread: str) -> tuple[int, int, str]:
    """Sort key of threads: compute, then peers by rank, then collectives and the host link."""
    if thread in TRACKS:
        return TRACKS.index(thread), 0, thread
    return TRACKS.index("message"), int(thread.rsplit(" ", 1)[1]), thread


def _metadata(what: str, process: int, thread: int, **args: object) -> Entry:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _us(nanoseconds: int) -> float:
    """An integer if exact; else rounded up where Perfetto, which truncates, would lose a nanosecond."""
    if nanoseconds % 1000 == 0:
        return nanoseconds // 1000
    us = nanoseconds / 1000
    return us if int(us * 1000) >= nanoseconds else nextafter(us, inf)
