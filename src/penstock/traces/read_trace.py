"""`penstock.read_trace`: traces of all ranks of a run, read as timelines of its training steps."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any, cast

import numpy as np

from penstock.arguments import index_problem, plural, printable, some
from penstock.cost.costs import Costs
from penstock.errors import ActionError, Message, Parameter, ScheduleError, TraceError
from penstock.ir.action import Action, parse_action
from penstock.ir.encoding import Ints
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.simulation.calibration import measured_timeline
from penstock.traces.clocks import Rows, align_steps, sent_messages
from penstock.traces.kineto import KinetoRank
from penstock.traces.measured_run import MeasuredRun, median_step
from penstock.traces.recorded import RankTrace, Recorded, pipelines
from penstock.traces.trace_files import EventStream, OnRead, TraceSource, name_of, open_chunks
from penstock.validation import validate

# Training steps in a trace: where each begins on each rank, which are complete, and which belong together.
#
# A step begins on a rank with the same action every time, and with what prepares it (UNSHARD, RECV). A step
# that the recording cut at its beginning or end is left out.


_PREPARES = (Kind.UNSHARD, Kind.RECV_F, Kind.RECV_B)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)

RankStep = list[Recorded]


def renumbered(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The traces with stages and microbatches of each step, where they name none.

    In 1F1B the first rank has no live activation only between two steps, so it tells the number of
    microbatches of a step.
    """
    found = [_on_its_stage(trace, rank) if trace.single_stage else trace for rank, trace in enumerate(traces)]
    through = [trace for trace in found if trace.numbered_through]
    if not through:
        return found
    if len(through) < len(found):
        named = next(trace.source for trace in found if not trace.numbered_through)
        raise TraceError([f"{through[0].source}: no range for each action, unlike {named}: not of one run"])
    microbatches = _microbatches(through[0])
    return [_numbered_by_step(trace, microbatches) for trace in through]


def _on_its_stage(trace: RankTrace, stage: int) -> RankTrace:
    steps = [(each, each.step.parts[0]) for each in trace.recorded]
    moved = [each._replace(step=Action(part.kind, stage, part.microbatch)) for each, part in steps]
    return replace(trace, recorded=moved)


def _microbatches(first: RankTrace) -> int:
    """How many there are in most steps."""
    live = list(accumulate(1 if each.step.kind is Kind.F else -1 for each in first.recorded))
    ends = [index for index, count in enumerate(live) if count == 0]
    lengths = Counter((end - before) // 2 for before, end in zip([-1, *ends], ends))
    return max(lengths, key=lambda length: (lengths[length], length))


def _numbered_by_step(trace: RankTrace, microbatches: int) -> RankTrace:
    """Microbatches from 0 in each step; a step that is cut at the beginning is left out."""
    cut = sum(each.step.kind is Kind.F for each in trace.recorded) % microbatches
    found = []
    for each in trace.recorded:
        part = each.step.parts[0]
        assert part.microbatch is not None
        if part.microbatch >= cut:
            number = (part.microbatch - cut) % microbatches
            found.append(each._replace(step=Action(part.kind, part.stage, number)))
    return replace(trace, recorded=found)


def matched_steps(traces: Sequence[RankTrace]) -> list[list[RankStep]]:
    """The complete steps, each as one list of actions per rank."""
    by_rank = [_complete_steps(trace) for trace in traces]
    if problems := [
        f"{trace.source}: no complete step: every F needs its backward in the same step. Start and stop the "
        "profiler between two training steps"
        for trace, steps in zip(traces, by_rank)
        if not steps
    ]:
        raise TraceError(problems)
    shifts = [_shift(by_rank[0], steps) for steps in by_rank]
    count = len(by_rank[0])
    matched = [
        [steps[index + shift] for steps, shift in zip(by_rank, shifts)]
        for index in range(count)
        if all(0 <= index + shift < len(steps) for steps, shift in zip(by_rank, shifts))
    ]
    if not matched:
        raise TraceError([f"{traces[0].source}: no complete step in {plural(len(traces), 'file')}"])
    return matched


def _shift(first: list[RankStep], steps: list[RankStep]) -> int:
    """By which number of steps this rank's list is ahead of the first rank's: middles are nearest then."""
    ours, theirs = ([(step[0].start + step[-1].end) // 2 for step in each] for each in (first, steps))
    if len(ours) == len(theirs):
        return 0
    candidates = range(-len(ours) + 1, len(theirs))

    def distance(shift: int) -> float:
        pairs = [(a, theirs[i + shift]) for i, a in enumerate(ours) if 0 <= i + shift < len(theirs)]
        return sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else float("inf")

    return min(candidates, key=lambda shift: (distance(shift), abs(shift)))


def _complete_steps(trace: RankTrace) -> list[RankStep]:
    """The steps of a rank, by the action they begin with that gives most complete steps."""
    compute = [each.step.parts[0] for each in trace.recorded if each.step.kind.is_compute]
    if not compute:
        return []
    stage = min(part.stage for part in compute)
    anchors = (Action(Kind.F, stage, 0), compute[0])
    splits = ([step for step in _split(trace.recorded, anchor) if _is_complete(step)] for anchor in anchors)
    return max(splits, key=len)


def _split(recorded: Sequence[Recorded], anchor: Action) -> list[RankStep]:
    """The lists that begin with this action, each with what prepares it."""
    starts = [index for index, each in enumerate(recorded) if anchor in each.step.parts]
    for number, index in enumerate(starts):
        first = index
        while first > 0 and recorded[first - 1].step.kind in _PREPARES:
            first -= 1
        starts[number] = first
    return [list(recorded[a:b]) for a, b in zip(starts, [*starts[1:], len(recorded)])]


def _is_complete(step: RankStep) -> bool:
    """Whether each F has its backward and each backward its F, once."""
    parts = Counter((part.kind, part.stage, part.microbatch) for each in step for part in each.step.parts)
    compute = {key: count for key, count in parts.items() if key[0] in (Kind.F, *_BACKWARDS)}
    if any(count > 1 for count in compute.values()):
        return False
    made = {key[1:] for key in compute if key[0] is Kind.F}
    full = {key[1:] for key in compute if key[0] is Kind.B}
    split = {key[1:] for key in compute if key[0] is Kind.I}
    weights = {key[1:] for key in compute if key[0] is Kind.W}
    return bool(made) and made == full | split and weights <= split and not full & split


# Traces that Penstock writes (`penstock trace`, `view.perfetto`): all ranks in one file, on one clock.
#
# A process is a rank, and an event of a step has the step's text. Sends and receives are drawn as messages, so
# the order that is read has no SEND and RECV.


_PROCESS = re.compile(r"(?:(?P<timeline>.*): )?rank (?P<rank>[0-9]{1,7})", re.DOTALL)
_TRACKS = ("compute", "collective", "offload", "reload")
_HOST = "one clock"


def is_penstock_trace(header: dict[str, Any]) -> bool:
    """Whether a file with these entries is one of Penstock's."""
    other = header.get("otherData")
    return isinstance(other, dict) and isinstance(other.get("timelines"), list)


class PenstockTrace:
    """Collects the events of one file; `traces` are those of its ranks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []
        self._ranks: dict[Any, RankTrace] = {}

    def add(self, event: object, number: int) -> None:
        """Take what is needed of an event."""
        if not isinstance(event, dict):
            self.problems.append(f"{self.name}: event {number}: it is not an object")
        elif event.get("ph") == "M" and event.get("name") == "process_name":
            self._add_process(event, number)
        elif event.get("ph") == "X" and event.get("cat") in _TRACKS:
            self._add_step(event, number)

    def _add_process(self, event: dict[str, Any], number: int) -> None:
        args = event.get("args")
        match = _PROCESS.fullmatch(str(args.get("name")) if isinstance(args, dict) else "")
        if match is None or not isinstance(event.get("pid"), int):
            self.problems.append(f"{self.name}: event {number}: a process is named rank 0, rank 1, ...")
            return
        source = f"{self.name} (rank {match['rank']})"
        self._ranks[event["pid"]] = RankTrace(
            source, int(match["rank"]), _HOST, timeline=match["timeline"] or ""
        )

    def _add_step(self, event: dict[str, Any], number: int) -> None:
        name = event.get("name")
        ts: Any = event.get("ts")
        dur: Any = event.get("dur")
        place = f"{self.name}: event {number} ({printable(str(name))})"
        trace = self._ranks.get(event.get("pid"))
        if trace is None:
            self.problems.append(f"{place}: its process has no name before it")
            return
        if not (_is_time(ts) and _is_time(dur)):
            self.problems.append(f"{place}: ts and dur must be numbers of microseconds, from 0")
            return
        try:
            step = parse_action(str(name))
        except ActionError as error:
            self.problems.append(f"{place}: {error}")
            return
        start = round(float(ts) * 1000)
        trace.recorded.append(Recorded(step, start, start + round(float(dur) * 1000)))

    def traces(self, timeline: int | None) -> list[RankTrace]:
        """The ranks of one timeline; with several in the file, `timeline` is the number of one."""
        if self.problems:
            raise TraceError(self.problems)
        names = list(dict.fromkeys(trace.timeline for trace in self._ranks.values()))
        if not names:
            raise TraceError([f"{self.name}: no process is named rank 0, rank 1, ..."])
        if len(names) > 1 and timeline is None:
            shown = ", ".join(f"{number} ({printable(name)})" for number, name in enumerate(names))
            must = f" must be the number of one of the {len(names)} timelines in {self.name}: {shown}"
            raise TraceError([Message(Parameter("step"), must)])
        if timeline is not None and not 0 <= timeline < len(names):
            raise TraceError([index_problem("step", timeline, len(names), "timeline")])
        chosen = names[timeline or 0]
        found = [trace for trace in self._ranks.values() if trace.timeline == chosen]
        for trace in found:
            trace.recorded.sort(key=lambda each: (each.start, each.end))
        return sorted(found, key=lambda trace: trace.rank or 0)


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and 0 <= value < 1e15  # type: ignore[arg-type,operator]


def read_trace(
    sources: TraceSource | Iterable[TraceSource],
    *,
    step: int | None = None,
    replica: int | None = None,
    graph: StageGraph | None = None,
    on_read: OnRead | None = None,
) -> MeasuredRun:
    """Read the traces of a run: one file per rank from torch.profiler, or one file that Penstock wrote.

    A source is a path or an open file, of text or of bytes, plain or compressed with gzip. The steps may run on
    torch.distributed.pipelining or on Penstock's runtime. `step` is the number of a complete step from 0; by
    default the one of median makespan is chosen. `replica` is the number of a pipeline from 0, in the order of
    ranks, if the files are of several data-parallel replicas; by default the slowest is chosen. `graph` is the
    stage graph, a chain unless given. `on_read` is called with the number of bytes read since its last call.
    Raises `TraceError` with all problems.
    """
    many = _as_list(sources)
    if not many:
        raise TraceError(["no trace is given: give one file for each rank"])
    if len(many) == 1:
        traces, step = _read_file(many[0], step, on_read)
    else:
        traces = _read_files(many, on_read)
    found = [renumbered(each) for each in pipelines(_in_order(traces))]
    return _chosen_replica(found, replica, step, graph)


def _chosen_replica(
    found: Sequence[list[RankTrace]], replica: int | None, step: int | None, graph: StageGraph | None
) -> MeasuredRun:
    """The run of one pipeline; of several the slowest unless one is asked for."""
    count = len(found)
    if replica is not None and not 0 <= replica < count:
        problem = index_problem("replica", replica, count, "pipeline")
        raise TraceError([problem])
    if count == 1:
        return _assemble(found[0], step, graph)
    runs = [_assemble(each, step, graph) for each in found]
    seconds = tuple(run.timelines[run.median_step].makespan for run in runs)
    chosen = seconds.index(max(seconds)) if replica is None else replica
    return replace(runs[chosen], replica=chosen, replicas=seconds)


def _as_list(sources: TraceSource | Iterable[TraceSource]) -> list[TraceSource]:
    if isinstance(sources, str | os.PathLike) or hasattr(sources, "read"):
        return [cast("TraceSource", sources)]
    return list(sources)


def _read_files(sources: Sequence[TraceSource], on_read: OnRead | None) -> list[RankTrace]:
    """The ranks of all files, or all problems of all files."""
    traces: list[RankTrace] = []
    problems: list[str] = []
    for source in sources:
        try:
            traces += _read_file(source, None, on_read)[0]
        except TraceError as error:  # noqa: PERF203 -- all problems at once
            problems += error.problems
    if problems:
        raise TraceError(problems)
    return traces


def _read_file(
    source: TraceSource, step: int | None, on_read: OnRead | None
) -> tuple[list[RankTrace], int | None]:
    """The ranks in a file, and the step to choose; in a file of Penstock's that is a timeline, chosen here."""
    name = name_of(source)
    with open_chunks(source, on_read) as chunks:
        stream = EventStream(chunks, name)
        rank: KinetoRank | PenstockTrace | None = None
        for event in stream:
            if rank is None:
                rank = PenstockTrace(name) if is_penstock_trace(stream.header) else KinetoRank(name)
            rank.add(event, stream.number)
    if rank is None:
        raise TraceError([f"{name}: no trace events; a trace has a list traceEvents"])
    if isinstance(rank, PenstockTrace):
        return rank.traces(step), None
    return [rank.trace(stream.header)], step


def _in_order(traces: list[RankTrace]) -> list[RankTrace]:
    """By rank, if all files name different ones, else by the numbers in their names, else as given."""
    named = [trace.rank for trace in traces]
    if None not in named and len(set(named)) == len(named):
        return sorted(traces, key=lambda trace: trace.rank or 0)
    numbers = [[int(digits) for digits in re.findall(r"[0-9]{1,9}", trace.source)] for trace in traces]
    if all(numbers) and len({tuple(each) for each in numbers}) == len(numbers):
        return [trace for _, trace in sorted(zip(numbers, traces), key=lambda pair: pair[0])]
    return traces


def _assemble(traces: list[RankTrace], step: int | None, graph: StageGraph | None) -> MeasuredRun:
    _require_one_pipeline(traces)
    steps = matched_steps(traces)
    if step is not None and not 0 <= step < len(steps):
        raise TraceError([index_problem("step", step, len(steps), "complete step")])
    schedules = [_schedule(rows, graph) for rows in steps]
    times = [_nanoseconds(rows) for rows in steps]
    clocks, times = align_steps(schedules, times, steps, [trace.host for trace in traces])
    starts, seconds = [], []
    for schedule, aligned, rows in zip(schedules, times, steps):
        _move_starts(schedule, aligned, rows)
        starts.append(_origin(schedule, aligned))
        seconds.append(np.maximum(aligned - starts[-1], 0) / 1e9)
    period = (starts[-1] - starts[0]) / 1e9 / (len(starts) - 1) if len(starts) > 1 else None
    timelines = tuple(measured_timeline(*each, Costs(), period) for each in zip(schedules, seconds))
    chosen = median_step(timelines) if step is None else step
    return MeasuredRun(timelines, chosen, clocks, tuple(trace.source for trace in traces))


def _require_one_pipeline(traces: Sequence[RankTrace]) -> None:
    """Each stage must be in one file, and none may be missing."""
    owner: dict[int, str] = {}
    problems = []
    for trace in traces:
        stages = {part.stage for each in trace.recorded for part in each.step.parts}
        problems += [
            f"{trace.source}: stage {stage} is also in {owner[stage]}: "
            "give all files of each pipeline, each once"
            for stage in sorted(stages & owner.keys())
        ]
        owner |= dict.fromkeys(stages, trace.source)
    last = min(max(owner, default=-1), len(owner) + 8)  # one huge number must not make a long list
    missing = [stage for stage in range(last + 1) if stage not in owner]
    if missing and not problems:
        problems.append(f"no file has stage {some(missing)}: give one file for each rank of the pipeline")
    if problems:
        raise TraceError(problems)


def _schedule(rows: Rows, graph: StageGraph | None) -> Schedule:
    stages = len({part.stage for row in rows for each in row for part in each.step.parts})
    if graph is not None and graph.num_stages != stages:
        must = f" must have the {plural(stages, 'stage')} of the traces (given {graph.num_stages})"
        raise TraceError([Message(Parameter("graph"), must)])
    try:
        schedule = Schedule([[each.step for each in row] for row in rows], name="measured", graph=graph)
        compute = schedule.only(PASS_KINDS)
    except ScheduleError as error:
        raise TraceError([f"the traces are not of one run: {error}"]) from None
    if violations := validate(compute):
        shown = [f"the recorded order is no valid schedule: {str(each).splitlines()[0]}" for each in violations]
        raise TraceError(shown)
    return schedule


def _nanoseconds(rows: Rows) -> Ints:
    return np.array([(each.start, each.end) for row in rows for each in row], dtype=np.int64).reshape(-1, 2)


def _origin(schedule: Schedule, times: Ints) -> int:
    """When the list of the rank that computes first begins; others prepare their step earlier, and wait."""
    table = schedule.table
    parts = np.flatnonzero(table.is_compute)
    first = parts[np.argmin(times[table.slot[parts], 0])]
    return int(times[table.slot_bounds[table.part_rank[first]], 0])


def _move_starts(schedule: Schedule, times: Ints, rows: Rows) -> None:
    """A step whose recorded start may include a wait starts when its last message was sent, at the earliest."""
    exact = np.array([each.exact for row in rows for each in row])
    _, sent, consumer = sent_messages(schedule, times)
    earliest = times[:, 0].copy()
    np.maximum.at(earliest, consumer, sent)
    times[:, 0] = np.where(exact, times[:, 0], np.minimum(earliest, times[:, 1]))
    for first, last in pairwise(schedule.table.slot_bounds.tolist()):  # no step starts before the one before it
        times[first:last, 0] = np.maximum.accumulate(times[first:last, 0])
    times[:, 1] = np.maximum(times[:, 1], times[:, 0])
