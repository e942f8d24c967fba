"""What a trace says about each rank: its actions in order, from files of torch.profiler or of Penstock."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from penstock.arguments import index_problem, printable
from penstock.errors import ActionError, Message, Parameter, TraceError
from penstock.ir.action import Action, Step, parse_action
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.view.kinds import TRACKS

Event = dict[str, Any]
Interval = tuple[int, int]
"""Start and end in nanoseconds."""


class Recorded(NamedTuple):
    """One action with its times in nanoseconds, on the clock of its rank."""

    action: Step
    start: int
    end: int
    exact: bool = True
    """Whether its own work begins at `start`; if not, it may have waited for a message first."""


@dataclass
class RankTrace:
    """The actions of one rank in the order of its list."""

    source: str
    """The name of the file."""
    rank: int | None
    """The rank in the job, if the file says so."""
    host: str
    """The machine: ranks of one machine have one clock. Empty if unknown."""
    pipeline: tuple[int, ...] = ()
    """The ranks of its pipeline, if the file names its process groups."""
    recorded: list[Recorded] = field(default_factory=list)
    single_stage: bool = False
    """Whether its actions name no stage: then each rank has one, in the order of the ranks."""
    numbered_through: bool = False
    """Whether microbatches are numbered through all steps, because nothing tells where a step begins."""
    timeline: str = ""
    """The name of the timeline, in a file with several."""

    @property
    def stages(self) -> frozenset[int]:
        """All stages of its actions."""
        return frozenset(part.stage for each in self.recorded for part in each.action.parts)


def pipelines(traces: Sequence[RankTrace]) -> list[list[RankTrace]]:
    """Return the traces of each pipeline: data-parallel replicas and tensor-parallel ranks have equal stages.

    The pipeline of a file is the process group for pipeline parallelism that it names. Without one, the files
    with the same stages are one of each pipeline, in the order of ranks, whether the ranks of a pipeline are
    neighbours or far apart. All traces are one pipeline if they cannot be several.
    """
    ranks = [trace.rank for trace in traces]
    if None in ranks or len(set(ranks)) < len(ranks):
        return [list(traces)]
    if all(trace.rank in trace.pipeline for trace in traces):
        groups = dict.fromkeys(trace.pipeline for trace in traces)
        return [[trace for trace in traces if trace.pipeline == group] for group in groups]
    alike: dict[frozenset[int], list[RankTrace]] = {}
    for trace in traces:
        alike.setdefault(trace.stages, []).append(trace)
    counts = {len(each) for each in alike.values()}
    shared = sum(map(len, alike)) > len(frozenset().union(*alike))
    if len(counts) > 1 or shared or any(trace.single_stage for trace in traces):
        return [list(traces)]
    return [sorted(each, key=lambda trace: trace.rank or 0) for each in zip(*alike.values())]


class _EventReader:
    """Collects what is needed of the events of one file, and all problems."""

    _MAX_PROBLEMS = 1000
    _LATEST = 3e15
    """Microseconds, about a hundred years: sums of three such times are 64-bit nanoseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._problems: list[str | Message] = []

    def _times(self, event: Event, number: int) -> Interval | None:
        """Start and end; microseconds have three decimals."""
        ts, dur = event.get("ts"), event.get("dur")
        for key, value in (("ts", ts), ("dur", dur)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                self._problem(number, f"{key} is not a number of microseconds", event.get("name"))
                return None
        assert isinstance(ts, int | float)
        assert isinstance(dur, int | float)
        if not (0 <= ts <= self._LATEST and 0 <= dur <= self._LATEST):
            problem = f"ts and dur must be from 0 to {self._LATEST:g} microseconds"
            self._problem(number, problem, event.get("name"))
            return None
        start = round(ts * 1000)
        return start, start + round(dur * 1000)

    def _problem(self, number: int, problem: str, name: object = None) -> None:
        shown = f" ({printable(str(name))})" if name is not None else ""
        self._problems.append(f"{self.name}: event {number}{shown}: {problem}")
        if len(self._problems) >= self._MAX_PROBLEMS:
            self._raise()

    def _raise(self, *problems: str) -> None:
        """Raise these problems and all that were collected, if there are any."""
        self._problems += [f"{self.name}: {problem}" for problem in problems]
        if self._problems:
            raise TraceError(self._problems)


# Traces that Penstock writes (`penstock trace`, `view.perfetto`): all ranks in one file, on one clock.
#
# A process is a rank, and an event of an action has its text. Sends and receives are drawn as messages, so the
# order that is read has no SEND and RECV.


_PROCESS = re.compile(r"(?:(?P<timeline>.*): )?rank (?P<rank>[0-9]{1,7})", re.DOTALL)
_DRAWN = [track for track in TRACKS if track != "message"]
_HOST = "one clock"


def is_penstock_trace(header: dict[str, Any]) -> bool:
    """Whether a file with these entries is one of Penstock's."""
    other = header.get("otherData")
    return isinstance(other, dict) and isinstance(other.get("timelines"), list)


class PenstockTrace(_EventReader):
    """Collects the events of one file; `traces` returns its ranks."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._ranks: dict[Any, RankTrace] = {}

    def add(self, event: object, number: int) -> None:
        """Take what is needed of an event."""
        if not isinstance(event, dict):
            self._problem(number, "it is not an object")
        elif event.get("ph") == "M" and event.get("name") == "process_name":
            self._add_process(event, number)
        elif event.get("ph") == "X" and event.get("cat") in _DRAWN:
            self._add_action(event, number)

    def _add_process(self, event: Event, number: int) -> None:
        args = event.get("args")
        match = _PROCESS.fullmatch(str(args.get("name")) if isinstance(args, dict) else "")
        if match is None or not isinstance(event.get("pid"), int):
            self._problem(number, "a process is named rank 0, rank 1, ...")
            return
        source = f"{self.name} (rank {match['rank']})"
        trace = RankTrace(source, int(match["rank"]), _HOST, timeline=match["timeline"] or "")
        self._ranks[event["pid"]] = trace

    def _add_action(self, event: Event, number: int) -> None:
        name = str(event.get("name"))
        trace = self._ranks.get(event.get("pid"))
        if trace is None:
            self._problem(number, "its process has no name before it", name)
        elif (times := self._times(event, number)) is not None:
            try:
                trace.recorded.append(Recorded(parse_action(name), *times))
            except ActionError as error:
                self._problem(number, str(error), name)

    def traces(self, timeline: int | None) -> list[RankTrace]:
        """Return the ranks of one timeline; with several in the file, `timeline` is the number of one."""
        self._raise()
        names = list(dict.fromkeys(trace.timeline for trace in self._ranks.values()))
        if not names:
            self._raise("no process is named rank 0, rank 1, ...")
        if len(names) > 1 and timeline is None:
            shown = ", ".join(f"{number} ({printable(name)})" for number, name in enumerate(names))
            must = f" must be the number of one of the {len(names)} timelines in {self.name}: {shown}"
            raise TraceError([Message(Parameter("step"), must)])
        if timeline is not None and not 0 <= timeline < len(names):
            raise TraceError([index_problem("step", timeline, len(names), "timeline")])
        found = [trace for trace in self._ranks.values() if trace.timeline == names[timeline or 0]]
        for trace in found:
            trace.recorded.sort(key=lambda each: (each.start, each.end))
        return sorted(found, key=lambda trace: trace.rank or 0)


# Actions from operators alone: torch's 1F1B has no ranges, but what runs tells forwards from backwards.
#
#     operators   recv_  mm  gelu  mm  send  recv_  evaluate_function: ...  send  recv_  mm ...
#     runs               F                          B                             F
#
# Operators of one kind between messages are a run. Backward operators have the sequence numbers of the forward
# operators that made their graph, so each backward names its forward; other operators (the optimizer,
# splitting a batch) belong to no backward and are left out.


_FORWARD, _BACKWARD, _MESSAGE = range(3)
_EVALUATION = "autograd::engine::evaluate_function"
_SEND = "c10d::send"
_MESSAGES = (_SEND, "c10d::recv_")
_SPLIT = "aten::tensor_split"
"""With it a schedule splits the batch into microbatches, directly before the first of them."""


class _Run(NamedTuple):
    """Consecutive operators of one kind."""

    kind: int
    start: int
    """When the message or run before it ended."""
    end: int
    numbers: Ints
    """The sequence numbers of its operators."""
    starts: Ints


class _Operators:
    """The operators of one thread: kind, start, end and sequence number of each, in one array of integers."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._splits: list[int] = []

    def add(self, name: str, start: int, end: int, event: Event) -> None:
        kind = _MESSAGE if name in _MESSAGES else _BACKWARD if name.startswith(_EVALUATION) else _FORWARD
        if name == _SPLIT:
            self._splits.append(end)
        args = event.get("args")
        number = args.get("Sequence number") if isinstance(args, dict) else None
        known = number if type(number) is int and abs(number) < 1 << 62 else -1
        self._numbers.extend((kind, start, end, known))

    def add_wait(self, end: int) -> None:
        self._numbers.extend((_MESSAGE, end, end, -1))

    @property
    def messages(self) -> tuple[int, int]:
        """How many operators are about messages, and how many there are."""
        kinds = self._numbers[::4]
        return kinds.count(_MESSAGE), len(kinds)

    def actions(self) -> list[Recorded]:
        """Return F and B in order; microbatches are numbered through all steps, in the order of forwards."""
        runs = self._runs()
        owner = {
            int(number): index
            for index, run in enumerate(runs)
            if run.kind == _FORWARD
            for number in run.numbers[run.numbers >= 0]
        }
        # by forward: the backward, and the operator it is known by
        backward_of: dict[int, tuple[int, int]] = {}
        for index, run in enumerate(runs):
            known = [number for number in run.numbers.tolist() if number in owner]
            if run.kind == _BACKWARD and known:
                backward_of[owner[min(known)]] = index, min(known)
        found, latest = [], -1
        for microbatch, (index, (at, operator)) in enumerate(sorted(backward_of.items())):
            after_message = index > 0 and runs[index - 1].kind == _MESSAGE
            own, back = runs[index], runs[at]
            first = own.start if after_message or latest > index else self._first_start(own, operator)
            found.append(Recorded(Action(Kind.F, 0, microbatch), first, own.end))
            found.append(Recorded(Action(Kind.B, 0, microbatch), back.start, back.end))
            latest = max(latest, at)
        return sorted(found, key=lambda each: each.start)

    def _first_start(self, run: _Run, number: int) -> int:
        """Where the first forward of a step begins, which nothing separates from the code before the step.

        Operators that make no graph have the number of the next that does, so the last of them is its own. It
        begins when the batch was split, if it was.
        """
        operator = int(run.starts[run.numbers == number][-1])
        return max((end for end in self._splits if run.start <= end <= operator), default=operator)

    def _runs(self) -> list[_Run]:
        """The runs in order, of operators that are not inside of others."""
        columns: Ints = np.array(self._numbers, dtype=np.int64).reshape(-1, 4).T
        kind, start, end, _ = columns
        columns = columns[:, np.lexsort((-end, kind != _MESSAGE, start))]  # a wait ends before its use begins
        kind, start, end, _ = columns
        before = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, end))[:-1]
        kind, start, end, number = columns[:, (start >= before) | (kind == _MESSAGE)]
        runs: list[_Run] = []
        for own in np.split(np.arange(len(kind)), np.flatnonzero(np.diff(kind)) + 1):
            if len(own):
                begin = runs[-1].end if runs else int(start[0])
                runs.append(_Run(int(kind[own[0]]), begin, int(end[own].max()), number[own], start[own]))
        return runs


# Traces of torch.profiler (Kineto): the actions of one rank from the ranges of its trace events.
#
#     PP:2F0                    torch's multi-stage runtime and Penstock's runtime: every action
#     Forward 0, Backward 0     torch's GPipe: the microbatch; the stage is the rank's only one
#     (none)                    torch's 1F1B: actions from operators
#     gloo:recv                 ends when the wait for the message ends, inside of the range that needed it
#     wait 2RECV_F0             Penstock's runtime waits outside of its actions
#
# On a GPU the range of the host is only the launch. The same range on the device's compute stream
# (`gpu_user_annotation`) has the times; streams with NCCL kernels are not compute streams.


_SINGLE = re.compile(r"(Forward|Backward) (0|[1-9][0-9]{0,7})", re.ASCII)
_SINGLE_KINDS = {"Forward": Kind.F, "Backward": Kind.B}
_WAITS = re.compile(r"(wait|release) [0-9]+(SEND|RECV)_[FB][0-9]", re.ASCII)
_PIPELINE = re.compile(r"(.*[^a-z])?(pp|pipe|pipeline([_ -]?(model[_ -]?)?parallel)?)", re.IGNORECASE)
"""Names of process groups for pipeline parallelism; torch's DeviceMesh calls it `mesh_pp`."""

Stream = tuple[Any, Any]


@dataclass
class _Ranges:
    host: list[tuple[str, int, int]] = field(default_factory=list)
    device: dict[Stream, dict[str, list[Interval]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )


class KinetoRank(_EventReader):
    """Collects the events of one file; `trace` is what they say."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._labelled, self._single = _Ranges(), _Ranges()
        self._received: list[int] = []
        self._sent: list[int] = []
        self._operators: dict[Stream, _Operators] = defaultdict(_Operators)
        self._nccl_streams: set[Stream] = set()
        self._kernels = self._nccl = self._separate_waits = False

    def add(self, event: object, number: int) -> None:
        """Take what is needed of an event."""
        if not isinstance(event, dict):
            self._problem(number, "it is not an object")
            return
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str):
            return
        stream = event.get("pid"), event.get("tid")
        if category == "kernel":
            self._kernels = True
            if name.startswith("nccl"):
                self._nccl_streams.add(stream)
        elif category in ("user_annotation", "gpu_user_annotation"):
            self._add_range(event, name, number, stream, on_device=category != "user_annotation")
        elif category == "cpu_op" and (name == _SEND or not (self._labelled.host or self._single.host)):
            self._add_operator(event, name, number, stream)

    def _add_operator(self, event: Event, name: str, number: int, stream: Stream) -> None:
        if (times := self._times(event, number)) is not None:
            self._operators[stream].add(name, *times, event)
            if name == _SEND:
                self._sent.append(times[0])

    def _add_range(self, event: Event, name: str, number: int, stream: Stream, *, on_device: bool) -> None:
        ranges = self._labelled if name.startswith("PP:") else self._single if _SINGLE.fullmatch(name) else None
        if ranges is None:
            self._nccl = self._nccl or name.startswith("nccl:")
            self._separate_waits = self._separate_waits or _WAITS.match(name) is not None
            if name != "gloo:recv" or on_device:
                return
        if (times := self._times(event, number)) is None:
            return
        if ranges is None:
            self._received.append(times[1])
            self._operators[stream].add_wait(times[1])
        elif on_device:
            ranges.device[stream][name].append(times)
        else:
            ranges.host.append((name, *times))

    def trace(self, header: dict[str, Any]) -> RankTrace:
        """Return the actions of this rank; `header` has the other entries of the file."""
        self._raise()
        base = header.get("baseTimeNanoseconds", 0)
        if type(base) is not int or not 0 <= base <= self._LATEST * 1000:
            self._raise(f"baseTimeNanoseconds must be a number of nanoseconds (given {printable(repr(base))})")
        ranges = self._labelled if self._labelled.host else self._single
        recorded = self._from_ranges(ranges) if ranges.host else self._from_operators()
        rank, group = _rank_and_pipeline(header.get("distributedInfo"))
        return RankTrace(
            self.name,
            rank,
            str(header.get("host_name") or ""),
            group,
            [each._replace(start=each.start + base, end=each.end + base) for each in recorded],
            single_stage=ranges is self._single,
            numbered_through=not ranges.host,
        )

    def _from_operators(self) -> list[Recorded]:
        if self._kernels:
            self._raise(
                "kernels of a device, but no range for each action (torch's 1F1B records none): record with "
                "penstock.runtime.label_actions(stage), see docs/read-trace.md"
            )
        thread = max(self._operators.values(), key=lambda each: each.messages, default=_Operators())
        if not (found := thread.actions()):
            self._raise(
                "no range PP:... or Forward ..., and no backward after a message: record a training step of "
                "torch.distributed.pipelining or of Penstock"
            )
        return found

    def _from_ranges(self, ranges: _Ranges) -> list[Recorded]:
        if self._nccl and not self._kernels:
            self._raise(
                "it has NCCL calls but no kernels, so its ranges are only launches: record with "
                "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
        ranges.host.sort(key=lambda each: each[1])
        actions = self._actions(ranges)
        if self._kernels:
            return self._on_device(ranges, actions)
        self._received.sort()
        self._sent.sort()
        return [self._on_host(actions[name], start, end) for name, start, end in ranges.host]

    def _actions(self, ranges: _Ranges) -> dict[str, Step]:
        actions: dict[str, Step] = {}
        problems = []
        for name in dict.fromkeys(name for name, _, _ in ranges.host):
            if match := _SINGLE.fullmatch(name):
                actions[name] = Action(_SINGLE_KINDS[match[1]], 0, int(match[2]))
                continue
            try:
                actions[name] = parse_action(name.removeprefix("PP:"))
            except ActionError as error:
                problems.append(f"range {printable(name)!r}: {error}")
        self._raise(*problems)
        return actions

    def _on_host(self, action: Step, start: int, end: int) -> Recorded:
        """The range without the wait before its work and the send after it.

        An overlapped pair has waits in its middle too: the first counts.
        """
        if not action.kind.is_compute:
            return Recorded(action, start, end)
        first, after = bisect_left(self._received, start), bisect_left(self._received, end)
        exact = self._separate_waits or first < after
        if first < after:
            start = self._received[first if len(action.parts) > 1 else after - 1]
        sent = bisect_left(self._sent, start)
        if sent < len(self._sent) and self._sent[sent] < end:
            end = self._sent[sent]
        return Recorded(action, start, end, exact)

    def _on_device(self, ranges: _Ranges, actions: dict[str, Step]) -> list[Recorded]:
        """Compute has the times of the compute stream; all else is at the end of the compute before it."""
        streams = [of for key, of in ranges.device.items() if key not in self._nccl_streams]
        if not streams:
            self._raise("no range of an action on a compute stream of the device")
        stream = max(streams, key=lambda of: sum(end - start for times in of.values() for start, end in times))
        compute = {name for name, action in actions.items() if action.kind.is_compute}
        left = {name: iter(times) for name, times in stream.items() if name in compute}
        begins = (stream[name][0][0] for name, _, _ in ranges.host if name in left)
        now = next(begins, ranges.host[0][1])
        found: list[Recorded] = []
        for name, _, _ in ranges.host:
            start, now = next(left.get(name, iter(())), (now, now))
            found.append(Recorded(actions[name], start, now))
        return found


def _rank_and_pipeline(info: object) -> tuple[int | None, tuple[int, ...]]:
    """The rank in the job, and the ranks of its pipeline, as torch.profiler writes them; none if unknown."""
    if not isinstance(info, dict):
        return None, ()
    rank, groups = info.get("rank"), info.get("pg_config")
    known = rank if type(rank) is int and rank >= 0 else None
    for group in groups if isinstance(groups, list) else []:
        if isinstance(group, dict) and _PIPELINE.fullmatch(str(group.get("pg_desc"))):
            ranks = group.get("ranks")  # an empty list stands for all ranks, which are then one pipeline
            if isinstance(ranks, list) and all(type(each) is int and each >= 0 for each in ranks):
                return known, tuple(ranks)
    return known, ()
