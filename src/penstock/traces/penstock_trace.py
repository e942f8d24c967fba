"""Traces that Penstock writes (`penstock trace`, `view.perfetto`): all ranks in one file, on one clock.

A process is a rank, and an event of a step has the step's text. Sends and receives are drawn as messages, so
the order that is read has no SEND and RECV.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from penstock.arguments import index_problem, printable
from penstock.errors import ActionError, TraceError
from penstock.ir.action import parse_action
from penstock.traces.recorded import RankTrace, Recorded

__all__ = ["PenstockTrace", "is_penstock_trace"]

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
            problem = f"step must be the number of one of the {len(names)} timelines in {self.name}: {shown}"
            raise TraceError([problem], argument="step")
        if timeline is not None and not 0 <= timeline < len(names):
            raise TraceError([index_problem("step", timeline, len(names), "timeline")], argument="step")
        chosen = names[timeline or 0]
        found = [trace for trace in self._ranks.values() if trace.timeline == chosen]
        for trace in found:
            trace.recorded.sort(key=lambda each: (each.start, each.end))
        return sorted(found, key=lambda trace: trace.rank or 0)


def _is_time(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and 0 <= value < 1e15  # type: ignore[arg-type,operator]
