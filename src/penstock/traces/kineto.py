"""Traces of torch.profiler (Kineto): the actions of one rank from ranges, or from operators alone."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from penstock.arguments import printable
from penstock.errors import ActionError, TraceError
from penstock.ir.action import Action, Step, parse_action
from penstock.ir.encoding import Ints
from penstock.ir.kinds import Kind
from penstock.traces.recorded import RankTrace, Recorded, pipeline_group

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
_MESSAGES = ("c10d::send", "c10d::recv_")
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


class Operators:
    """The operators of one thread: kind, start, end and sequence number of each, as columns."""

    def __init__(self) -> None:
        self._columns = [array("q") for _ in range(4)]
        self._splits: list[int] = []

    def add(self, name: str, start: int, end: int, event: dict[str, Any]) -> None:
        """Add an operator of the host."""
        kind = _FORWARD
        if name in _MESSAGES:
            kind = _MESSAGE
        elif name.startswith(_EVALUATION):
            kind = _BACKWARD
        elif name == _SPLIT:
            self._splits.append(end)
        args = event.get("args")
        number = args.get("Sequence number") if isinstance(args, dict) else None
        known = isinstance(number, int) and abs(number) < 1 << 62
        self._append(kind, start, end, number if known and isinstance(number, int) else -1)

    def add_wait(self, end: int) -> None:
        """Add the end of a wait for a message."""
        self._append(_MESSAGE, end, end, -1)

    def _append(self, *values: int) -> None:
        for column, value in zip(self._columns, values):
            column.append(value)

    @property
    def messages(self) -> tuple[int, int]:
        """How many operators are about messages, and how many there are."""
        return self._columns[0].count(_MESSAGE), len(self._columns[0])

    def actions(self, name: str) -> list[Recorded]:
        """F and B in order; microbatches are numbered through all steps, in the order of the forwards."""
        forwards, backwards = self._pairs()
        if not backwards:
            problem = (
                f"{name}: no range PP:... or Forward ..., and no backward after a message: record a "
                "training step of torch.distributed.pipelining or of Penstock"
            )
            raise TraceError([problem])
        found = [
            Recorded(Action(kind, 0, number), start, end)
            for kind, runs in ((Kind.F, forwards), (Kind.B, backwards))
            for number, (start, end) in enumerate(runs)
        ]
        return sorted(found, key=lambda each: each.start)

    def _pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Start and end of each backward and of the forward that made its graph, in order of the forwards."""
        runs = self._runs()
        owner = {
            int(number): index
            for index, run in enumerate(runs)
            if run.kind == _FORWARD
            for number in run.numbers[run.numbers >= 0]
        }
        backward_of: dict[int, int] = {}
        made: dict[int, int] = {}
        for index, run in enumerate(runs):
            known = [int(number) for number in run.numbers if int(number) in owner]
            if run.kind == _BACKWARD and known:
                backward_of[owner[min(known)]] = index
                made[owner[min(known)]] = min(known)
        forwards, latest = [], -1
        for index in sorted(backward_of):
            after_message = index > 0 and runs[index - 1].kind == _MESSAGE
            own = runs[index]
            first = own.start if after_message or latest > index else self._first_start(own, made[index])
            forwards.append((first, own.end))
            latest = max(latest, backward_of[index])
        return forwards, [(runs[at].start, runs[at].end) for _, at in sorted(backward_of.items())]

    def _first_start(self, run: _Run, made: int) -> int:
        """Where the first forward of a step begins, which nothing separates from the code before the step.

        Operators that make no graph have the number of the next that does, so the last of them is its own. It
        begins when the batch was split, if it was.
        """
        operator = int(run.starts[run.numbers == made][-1])
        return max((end for end in self._splits if run.start <= end <= operator), default=operator)

    def _runs(self) -> list[_Run]:
        """The runs in order, of operators that are not inside of others."""
        kind, start, end, number = (np.array(column, dtype=np.int64) for column in self._columns)
        order = np.lexsort((-end, kind != _MESSAGE, start))  # a wait ends before what it waited for begins
        kind, start, end, number = (column[order] for column in (kind, start, end, number))
        before = (
            np.concatenate(([np.iinfo(np.int64).min], np.maximum.accumulate(end)[:-1])) if len(end) else end
        )
        outer = (start >= before) | (kind == _MESSAGE)
        kind, start, end, number = (column[outer] for column in (kind, start, end, number))
        cuts = np.flatnonzero(np.diff(kind)) + 1
        runs: list[_Run] = []
        for first, last in zip(np.concatenate(([0], cuts)), np.concatenate((cuts, [len(kind)]))):
            if first == last:
                continue
            own = slice(int(first), int(last))
            begin = runs[-1].end if runs else int(start[first])
            runs.append(_Run(int(kind[first]), begin, int(end[own].max()), number[own], start[own]))
        return runs


# Traces of torch.profiler (Kineto): the actions of one rank from the ranges of its trace events.
#
#     PP:2F0                    torch's multi-stage runtime and Penstock's runtime: every action
#     Forward 0, Backward 0     torch's GPipe: the microbatch; the stage is the rank's only one
#     (none)                    torch's 1F1B: see `unlabelled`
#     gloo:recv                 ends when the wait for the message ends, inside of the range that needed it
#     wait 2RECV_F0             Penstock's runtime waits outside of its actions
#
# On a GPU the range of the host is only the launch. The same range on the device's compute stream
# (`gpu_user_annotation`) has the times; streams with NCCL kernels are not compute streams.


_MAX_PROBLEMS = 1000
_LATEST = 3e15
"""Microseconds, about a hundred years: sums of three such times are 64-bit nanoseconds."""
_SINGLE = re.compile(r"(Forward|Backward) (0|[1-9][0-9]{0,7})", re.ASCII)
_SINGLE_KINDS = {"Forward": Kind.F, "Backward": Kind.B}
_SEND = "c10d::send"
_WAITS = re.compile(r"(wait|release) [0-9]+(SEND|RECV)_[FB][0-9]", re.ASCII)

Stream = tuple[Any, Any]
Interval = tuple[int, int]


@dataclass
class _Ranges:
    """Ranges by their name, as (start, end) in nanoseconds."""

    host: list[tuple[str, int, int]] = field(default_factory=list)
    device: dict[Stream, dict[str, list[Interval]]] = field(default_factory=dict)
    received: list[int] = field(default_factory=list)
    """When waits for messages ended."""


class KinetoRank:
    """Collects the events of one file; `trace` is what they say."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[str] = []
        self._labelled, self._single = _Ranges(), _Ranges()
        self._received: list[int] = []
        self._sent: list[int] = []
        self._operators: dict[Stream, Operators] = defaultdict(Operators)
        self._nccl_streams: set[Stream] = set()
        self._kernels = self._nccl = self._separate_waits = False

    # --- events ----------------------------------------------------------------------------------------

    def add(self, event: object, number: int) -> None:
        """Take what is needed of an event."""
        if not isinstance(event, dict):
            self._problem(number, "it is not an object")
            return
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str):
            return
        if category == "kernel":
            self._kernels = True
            if name.startswith("nccl"):
                self._nccl_streams.add((event.get("pid"), event.get("tid")))
        elif category in ("user_annotation", "gpu_user_annotation"):
            self._add_range(event, name, number, on_device=category != "user_annotation")
        elif category == "cpu_op":
            self._add_operator(event, name, number)

    def _add_operator(self, event: dict[str, Any], name: str, number: int) -> None:
        labelled = self._labelled.host or self._single.host
        if labelled and name != _SEND:
            return
        if (times := self._times(event, number)) is not None:
            self._operators[event.get("pid"), event.get("tid")].add(name, *times, event)
            if name == _SEND:
                self._sent.append(times[0])

    def _add_range(self, event: dict[str, Any], name: str, number: int, *, on_device: bool) -> None:
        if name.startswith("PP:"):
            ranges = self._labelled
        elif _SINGLE.fullmatch(name):
            ranges = self._single
        else:
            self._nccl = self._nccl or name.startswith("nccl:")
            self._separate_waits = self._separate_waits or _WAITS.match(name) is not None
            if name == "gloo:recv" and not on_device and (times := self._times(event, number)) is not None:
                self._received.append(times[1])
                self._operators[event.get("pid"), event.get("tid")].add_wait(times[1])
            return
        if (times := self._times(event, number)) is None:
            return
        if on_device:
            stream = ranges.device.setdefault((event.get("pid"), event.get("tid")), defaultdict(list))
            stream[name].append(times)
        else:
            ranges.host.append((name, *times))

    def _times(self, event: dict[str, Any], number: int) -> Interval | None:
        """Start and end in nanoseconds; microseconds have three decimals."""
        ts, dur = event.get("ts"), event.get("dur")
        for key, value in (("ts", ts), ("dur", dur)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
                self._problem(number, f"{key} is not a number of microseconds", event.get("name"))
                return None
        assert isinstance(ts, int | float)
        assert isinstance(dur, int | float)
        if not (0 <= ts <= _LATEST and 0 <= dur <= _LATEST):
            problem = f"ts and dur must be from 0 to {_LATEST:g} microseconds"
            self._problem(number, problem, event.get("name"))
            return None
        start = round(ts * 1000)
        return start, start + round(dur * 1000)

    def _problem(self, number: int, problem: str, name: object = None) -> None:
        shown = f" ({printable(str(name))})" if name is not None else ""
        self.problems.append(f"{self.name}: event {number}{shown}: {problem}")
        if len(self.problems) >= _MAX_PROBLEMS:
            raise TraceError(self.problems)

    # --- result ----------------------------------------------------------------------------------------

    def trace(self, header: dict[str, Any]) -> RankTrace:
        """The actions of this rank; `header` has the other entries of the file."""
        if self.problems:
            raise TraceError(self.problems)
        group = pipeline_group(header.get("distributedInfo"))
        found = RankTrace(self.name, _rank(header), str(header.get("host_name") or ""), group)
        base = header.get("baseTimeNanoseconds", 0)
        if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base <= _LATEST * 1000:
            problem = f"baseTimeNanoseconds must be a number of nanoseconds (given {printable(repr(base))})"
            raise TraceError([f"{self.name}: {problem}"])
        ranges = self._labelled if self._labelled.host else self._single
        if not ranges.host:
            self._require_times_of_host()
            thread = max(self._operators.values(), key=lambda each: each.messages, default=Operators())
            found.recorded = thread.actions(self.name)
            found.single_stage = found.numbered_through = True
        else:
            found.recorded = self._actions(ranges)
            found.single_stage = ranges is self._single
        found.recorded = [
            each._replace(start=each.start + base, end=each.end + base) for each in found.recorded
        ]
        return found

    def _require_times_of_host(self) -> None:
        if self._kernels:
            problem = (
                f"{self.name}: kernels of a device, but no range for each action (torch's 1F1B records "
                "none): record with penstock.runtime.label_actions(stage), see docs/read-trace.md"
            )
            raise TraceError([problem])

    def _actions(self, ranges: _Ranges) -> list[Recorded]:
        if self._nccl and not self._kernels:
            problem = (
                f"{self.name}: it has NCCL calls but no kernels, so its ranges are only launches: record "
                "with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
            raise TraceError([problem])
        ranges.host.sort(key=lambda each: each[1])
        steps = self._steps(ranges)
        if self._kernels:
            return self._on_device(ranges, steps)
        self._received.sort()
        self._sent.sort()
        return [self._on_host(steps[name], start, end) for name, start, end in ranges.host]

    def _steps(self, ranges: _Ranges) -> dict[str, Step]:
        """The action of each name."""
        steps: dict[str, Step] = {}
        for name in dict.fromkeys(name for name, _, _ in ranges.host):
            if match := _SINGLE.fullmatch(name):
                steps[name] = Action(_SINGLE_KINDS[match[1]], 0, int(match[2]))
                continue
            try:
                steps[name] = parse_action(name.removeprefix("PP:"))
            except ActionError as error:
                self.problems.append(f"{self.name}: range {printable(name)!r}: {error}")
        if self.problems:
            raise TraceError(self.problems)
        return steps

    def _on_host(self, step: Step, start: int, end: int) -> Recorded:
        """The range without the wait before its work and the send after it.

        An overlapped pair has waits in its middle too: the first counts.
        """
        if not step.kind.is_compute:
            return Recorded(step, start, end)
        first, after = bisect_left(self._received, start), bisect_left(self._received, end)
        exact = self._separate_waits or first < after
        if first < after:
            start = self._received[first if len(step.parts) > 1 else after - 1]
        sent = bisect_left(self._sent, start)
        if sent < len(self._sent) and self._sent[sent] < end:
            end = self._sent[sent]
        return Recorded(step, start, end, exact)

    def _on_device(self, ranges: _Ranges, steps: dict[str, Step]) -> list[Recorded]:
        """Compute has the times of the compute stream; all else is at the end of the compute before it."""
        streams = {key: of for key, of in ranges.device.items() if key not in self._nccl_streams}
        if not streams:
            raise TraceError([f"{self.name}: no range of an action on a compute stream of the device"])
        stream = max(streams.values(), key=_total)
        seen: dict[str, int] = defaultdict(int)
        found: list[Recorded] = []
        for name, start, _ in ranges.host:
            now = found[-1].end if found else start
            times = (now, now)
            if steps[name].kind.is_compute and seen[name] < len(stream.get(name, ())):
                times = stream[name][seen[name]]
                seen[name] += 1
            found.append(Recorded(steps[name], *times))
        if found:  # what is before the first compute
            first = next((each.start for each in found if each.step.kind.is_compute), found[0].start)
            found = [
                each if each.start >= first or each.step.kind.is_compute else Recorded(each.step, first, first)
                for each in found
            ]
        return found


def _total(stream: dict[str, list[Interval]]) -> int:
    return sum(end - start for times in stream.values() for start, end in times)


def _rank(header: dict[str, Any]) -> int | None:
    """The rank in the job, as torch.profiler writes it."""
    info = header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 else None
