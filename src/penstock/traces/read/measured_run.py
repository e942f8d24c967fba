"""`penstock.read_trace`: the traces of all ranks of a run, read as timelines of its training steps."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from penstock.arguments import index_problem, plural, some
from penstock.cost.costs import Costs
from penstock.errors import Message, Parameter, ScheduleError, TraceError
from penstock.ir.action import Action
from penstock.ir.encoding import Ints
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.recognition import Recognition, recognize
from penstock.simulation.calibration import calibrate, measured_timeline
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.traces.read.clocks import ClockAlignment, Rows, align_steps, sent_messages
from penstock.traces.read.files import EventStream, OnRead, TraceSource, name_of, open_chunks
from penstock.traces.read.rank_trace import (
    KinetoRank,
    PenstockTrace,
    RankTrace,
    Recorded,
    is_penstock_trace,
    pipelines,
)
from penstock.validation import validate

if TYPE_CHECKING:
    from penstock.search import OnProgress, SearchResult


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """The complete steps of a run that was traced; `step` is the one that is shown."""

    timelines: tuple[Timeline, ...]
    """All complete steps, in order."""
    step: int
    """The number of the chosen one: the one of median makespan unless given."""
    clocks: ClockAlignment
    sources: tuple[str, ...]
    """The file of each rank."""
    replica: int = 0
    """The number of this pipeline among those of the job."""
    replicas: tuple[float, ...] = ()
    """The median makespan of each pipeline, if the files had several."""

    @property
    def timeline(self) -> Timeline:
        """The chosen step; its costs are the mean of all steps."""
        return replace(self.timelines[self.step], costs=self.costs)

    @property
    def median_step(self) -> int:
        """The number of the step of median makespan."""
        ordered = sorted(range(len(self.timelines)), key=lambda number: self.timelines[number].makespan)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def schedule(self) -> Schedule:
        """The order that the ranks executed in the chosen step."""
        return self.timelines[self.step].schedule

    @cached_property
    def recognition(self) -> Recognition:
        """The family of the schedule, or the nearest family and the first difference."""
        return recognize(self.schedule)

    @property
    def alike(self) -> Sequence[Timeline]:
        """All steps with the schedule of the chosen one."""
        return [each for each in self.timelines if each.schedule == self.schedule]

    @cached_property
    def costs(self) -> Costs:
        """The mean costs of these steps."""
        return calibrate(self.alike, Costs())

    @cached_property
    def predicted(self) -> Timeline:
        """The same schedule, simulated at these costs."""
        try:
            return simulate(self.schedule, self.costs, with_period=True)
        except ScheduleError:  # messages or sharding that our rules refuse; compute is valid
            return simulate(self.schedule.only(PASS_KINDS), self.costs, with_period=True)

    @cached_property
    def live(self) -> int:
        """The most activations that a rank holds at once, each of one stage and microbatch."""
        return round(max(float(memory.activations.max(initial=0.0)) for memory in self.predicted.memory))

    def search(self, seconds: float = 10.0, on_progress: OnProgress | None = None) -> SearchResult:
        """Return the best order at these costs, on this placement, with as many live activations."""
        from penstock.search import search  # noqa: PLC0415 -- compiled code takes a second to load

        schedule = self.schedule
        return search(
            ranks=schedule.num_ranks,
            microbatches=schedule.microbatches,
            costs=self.costs,
            stages_per_rank=[len(own) for own in schedule.placement.stages_of_rank],
            placement=schedule.placement,
            live_limit=self.live,
            seconds=seconds,
            on_progress=on_progress,
            graph=None if schedule.graph.is_chain else schedule.graph,
        )


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
    single = isinstance(sources, str | os.PathLike) or hasattr(sources, "read")
    many = [cast("TraceSource", sources)] if single else list(cast("Iterable[TraceSource]", sources))
    if not many:
        raise TraceError(["no trace is given: give one file for each rank"])
    if len(many) == 1:
        traces, step = _read_file(many[0], step, on_read)
    else:
        traces = _read_files(many, on_read)
    found = [_renumbered(each) for each in pipelines(_in_order(traces))]
    if replica is not None and not 0 <= replica < len(found):
        raise TraceError([index_problem("replica", replica, len(found), "pipeline")])
    runs = [_assemble(each, step, graph) for each in found]
    if len(runs) == 1:
        return runs[0]
    seconds = tuple(run.timelines[run.median_step].makespan for run in runs)
    chosen = seconds.index(max(seconds)) if replica is None else replica
    return replace(runs[chosen], replica=chosen, replicas=seconds)


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
        reader: KinetoRank | PenstockTrace | None = None
        for event in stream:
            if reader is None:
                reader = PenstockTrace(name) if is_penstock_trace(stream.header) else KinetoRank(name)
            reader.add(event, stream.number)
    if reader is None:
        raise TraceError([f"{name}: no trace events; a trace has a list traceEvents"])
    if isinstance(reader, PenstockTrace):
        return reader.traces(step), None
    return [reader.trace(stream.header)], step


def _in_order(traces: list[RankTrace]) -> list[RankTrace]:
    """By rank, if all files name different ones, else by the numbers in their names, else as given."""
    named = [trace.rank for trace in traces]
    if None not in named and len(set(named)) == len(named):
        return sorted(traces, key=lambda trace: trace.rank or 0)
    numbers = [[int(digits) for digits in re.findall(r"[0-9]{1,9}", trace.source)] for trace in traces]
    if all(numbers) and len(set(map(tuple, numbers))) == len(numbers):
        return [trace for _, trace in sorted(zip(numbers, traces), key=lambda pair: pair[0])]
    return traces


def _assemble(traces: list[RankTrace], step: int | None, graph: StageGraph | None) -> MeasuredRun:
    _require_one_pipeline(traces)
    steps = _matched_steps(traces)
    if step is not None and not 0 <= step < len(steps):
        raise TraceError([index_problem("step", step, len(steps), "complete step")])
    schedules = [_schedule(rows, graph) for rows in steps]
    times = [np.array([each[1:3] for row in rows for each in row], dtype=np.int64) for rows in steps]
    clocks, times = align_steps(schedules, times, steps, [trace.host for trace in traces])
    starts, seconds = [], []
    for schedule, aligned, rows in zip(schedules, times, steps):
        _move_starts(schedule, aligned, rows)
        starts.append(_origin(schedule, aligned))
        seconds.append(np.maximum(aligned - starts[-1], 0) / 1e9)
    period = (starts[-1] - starts[0]) / 1e9 / (len(starts) - 1) if len(starts) > 1 else None
    timelines = tuple(measured_timeline(*each, Costs(), period) for each in zip(schedules, seconds))
    run = MeasuredRun(timelines, step or 0, clocks, tuple(trace.source for trace in traces))
    return run if step is not None else replace(run, step=run.median_step)


def _require_one_pipeline(traces: Sequence[RankTrace]) -> None:
    """Each stage must be in one file, and none may be missing."""
    owner: dict[int, str] = {}
    problems = []
    for trace in traces:
        problems += [
            f"{trace.source}: stage {stage} is also in {owner[stage]}: "
            "give all files of each pipeline, each once"
            for stage in sorted(trace.stages & owner.keys())
        ]
        owner |= dict.fromkeys(trace.stages, trace.source)
    last = min(max(owner, default=-1), len(owner) + 8)  # one huge number must not make a long list
    missing = [stage for stage in range(last + 1) if stage not in owner]
    if missing and not problems:
        problems.append(f"no file has stage {some(missing)}: give one file for each rank of the pipeline")
    if problems:
        raise TraceError(problems)


def _schedule(rows: Rows, graph: StageGraph | None) -> Schedule:
    stages = len({part.stage for row in rows for each in row for part in each.action.parts})
    if graph is not None and graph.num_stages != stages:
        must = f" must have the {plural(stages, 'stage')} of the traces (given {graph.num_stages})"
        raise TraceError([Message(Parameter("graph"), must)])
    try:
        schedule = Schedule([[each.action for each in row] for row in rows], name="measured", graph=graph)
        compute = schedule.only(PASS_KINDS)
    except ScheduleError as error:
        raise TraceError([f"the traces are not of one run: {error}"]) from None
    if violations := validate(compute):
        shown = [f"the recorded order is no valid schedule: {str(each).splitlines()[0]}" for each in violations]
        raise TraceError(shown)
    return schedule


def _origin(schedule: Schedule, times: Ints) -> int:
    """When the list of the rank that computes first begins; others prepare their step earlier, and wait."""
    table = schedule.table
    parts = np.flatnonzero(table.is_compute)
    first = parts[np.argmin(times[table.slot[parts], 0])]
    return int(times[table.slot_bounds[table.part_rank[first]], 0])


def _move_starts(schedule: Schedule, times: Ints, rows: Rows) -> None:
    """An action whose start may include a wait starts when its last message was sent, at the earliest."""
    exact = np.array([each.exact for row in rows for each in row])
    _, sent, consumer = sent_messages(schedule, times)
    earliest = times[:, 0].copy()
    np.maximum.at(earliest, consumer, sent)
    times[:, 0] = np.where(exact, times[:, 0], np.minimum(earliest, times[:, 1]))
    for first, last in pairwise(schedule.table.slot_bounds.tolist()):  # none starts before the one before it
        times[first:last, 0] = np.maximum.accumulate(times[first:last, 0])
    times[:, 1] = np.maximum(times[:, 1], times[:, 0])


# Training steps in a trace: where each begins on each rank, which are complete, and which belong together.
#
# A step begins on a rank with the same action every time, and with what prepares it (UNSHARD, RECV). A step
# that the recording cut at its beginning or end is left out.


_PREPARES = (Kind.UNSHARD, Kind.RECV_F, Kind.RECV_B)

RankStep = list[Recorded]


def _renumbered(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces with stages and microbatches of each step, where they name none."""
    through = [trace for trace in traces if trace.numbered_through]
    if through and len(through) < len(traces):
        named = next(trace.source for trace in traces if not trace.numbered_through)
        raise TraceError([f"{through[0].source}: no range for each action, unlike {named}: not of one run"])
    microbatches = _microbatches(through[0]) if through else 0
    return [
        replace(trace, recorded=_numbered(trace.recorded, rank, microbatches)) if trace.single_stage else trace
        for rank, trace in enumerate(traces)
    ]


def _microbatches(first: RankTrace) -> int:
    """Return how many there are in most steps: the first rank has no live activation only between two steps."""
    live = list(accumulate(1 if each.action.kind is Kind.F else -1 for each in first.recorded))
    ends = [index for index, count in enumerate(live) if count == 0]
    lengths = Counter((end - before) // 2 for before, end in zip([-1, *ends], ends))
    return max(lengths, key=lambda length: (lengths[length], length))


def _numbered(recorded: RankStep, stage: int, microbatches: int) -> RankStep:
    """Number microbatches from 0 in each step, if their number is given; leave out a step that was cut."""
    cut = sum(each.action.kind is Kind.F for each in recorded) % microbatches if microbatches else 0
    found = []
    for each in recorded:
        (part,) = each.action.parts
        number = (part.microbatch or 0) - cut
        if number >= 0:
            action = Action(part.kind, stage, number % microbatches if microbatches else number)
            found.append(each._replace(action=action))
    return found


def _matched_steps(traces: Sequence[RankTrace]) -> list[Rows]:
    """The complete steps, each as one list of actions per rank."""
    by_rank = [_complete_steps(trace.recorded) for trace in traces]
    if problems := [
        f"{trace.source}: no complete step: every F needs its backward in the same step. Start and stop the "
        "profiler between two training steps"
        for trace, steps in zip(traces, by_rank)
        if not steps
    ]:
        raise TraceError(problems)
    shifts = [_shift(by_rank[0], steps) for steps in by_rank]
    matched = [
        [steps[index + shift] for steps, shift in zip(by_rank, shifts)]
        for index in range(len(by_rank[0]))
        if all(0 <= index + shift < len(steps) for steps, shift in zip(by_rank, shifts))
    ]
    if not matched:
        raise TraceError([f"{traces[0].source}: no complete step in {plural(len(traces), 'file')}"])
    return matched


def _shift(first: list[RankStep], steps: list[RankStep]) -> int:
    """By how many steps the list of a rank is ahead of the first rank's: their middles are then nearest."""
    ours, theirs = ([(step[0].start + step[-1].end) // 2 for step in each] for each in (first, steps))
    if len(ours) == len(theirs):
        return 0

    def distance(shift: int) -> tuple[float, int]:
        apart = [abs(a - theirs[i + shift]) for i, a in enumerate(ours) if 0 <= i + shift < len(theirs)]
        return sum(apart) / len(apart), abs(shift)

    return min(range(-len(ours) + 1, len(theirs)), key=distance)


def _complete_steps(recorded: RankStep) -> list[RankStep]:
    """The steps of a rank, by the first action that yields most complete steps."""
    compute = [each.action.parts[0] for each in recorded if each.action.kind.is_compute]
    if not compute:
        return []
    anchors = (Action(Kind.F, min(part.stage for part in compute), 0), compute[0])
    return max(
        ([step for step in _split(recorded, anchor) if _is_complete(step)] for anchor in anchors), key=len
    )


def _split(recorded: RankStep, anchor: Action) -> list[RankStep]:
    """The lists that begin with this action, each with what prepares it."""
    starts = []
    for index, each in enumerate(recorded):
        if anchor in each.action.parts:
            first = index
            while first > 0 and recorded[first - 1].action.kind in _PREPARES:
                first -= 1
            starts.append(first)
    return [recorded[a:b] for a, b in pairwise([*starts, len(recorded)])]


def _is_complete(step: RankStep) -> bool:
    """Whether each F has its backward and each backward its F, once."""
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    parts = [part for each in step for part in each.action.parts if part.kind in kinds]
    made, full, split, weights = ({part.work_unit for part in parts if part.kind is kind} for kind in kinds)
    is_once = len(parts) == len(made) + len(full) + len(split) + len(weights)
    return is_once and bool(made) and made == full | split and weights <= split and not full & split
