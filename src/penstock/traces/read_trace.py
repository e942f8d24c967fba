"""`penstock.read_trace`: traces of all ranks of a run, read as timelines of its training steps."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np

from penstock.arguments import index_problem, plural, some
from penstock.cost.costs import Costs
from penstock.errors import ScheduleError, TraceError
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import PASS_KINDS
from penstock.ir.schedule import Schedule
from penstock.ir.table import Ints
from penstock.simulation.measured import measured_timeline
from penstock.traces.event_stream import EventStream
from penstock.traces.kineto import KinetoRank
from penstock.traces.measured_run import MeasuredRun, median_step
from penstock.traces.penstock_trace import PenstockTrace, is_penstock_trace
from penstock.traces.recorded import RankTrace
from penstock.traces.replicas import pipelines
from penstock.traces.step_clocks import Rows, align_steps, sent_messages
from penstock.traces.steps import matched_steps, renumbered
from penstock.traces.trace_files import OnRead, TraceSource, name_of, open_chunks
from penstock.validation import validate

__all__ = ["read_trace"]


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
        raise TraceError([problem], argument="replica")
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
        raise TraceError([index_problem("step", step, len(steps), "complete step")], argument="step")
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
        problem = f"graph must have the {plural(stages, 'stage')} of the traces (given {graph.num_stages})"
        raise TraceError([problem], argument="graph")
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
