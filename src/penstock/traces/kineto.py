"""Traces of torch.profiler (Kineto): the actions of one rank from the ranges of its trace events.

    PP:2F0                    torch's multi-stage runtime and Penstock's runtime: every action
    Forward 0, Backward 0     torch's GPipe: the microbatch; the stage is the rank's only one
    (none)                    torch's 1F1B: see `unlabelled`
    gloo:recv                 ends when the wait for the message ends, inside of the range that needed it
    wait 2RECV_F0             Penstock's runtime waits outside of its actions

On a GPU the range of the host is only the launch. The same range on the device's compute stream
(`gpu_user_annotation`) has the times; streams with NCCL kernels are not compute streams.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from penstock.arguments import printable
from penstock.errors import ActionError, TraceError
from penstock.ir.action import Action, Kind, Step, parse_action
from penstock.traces.recorded import RankTrace, Recorded
from penstock.traces.replicas import pipeline_group
from penstock.traces.unlabelled import Operators

__all__ = ["KinetoRank"]

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
