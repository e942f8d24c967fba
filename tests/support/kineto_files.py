"""Traces in the format of torch.profiler, made of simulated timelines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.simulation.timeline import Timeline

__all__ = ["kineto_events", "write_kineto_files"]

START = 4_000_000_000_000.0
"""Microseconds; what profilers count from is long ago."""


def _range(name: str, start: float, end: float, category: str = "user_annotation") -> dict[str, Any]:
    times = {"ts": START + start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 7, **times}


def kineto_events(timeline: Timeline, rank: int, ahead: float = 0.0) -> list[dict[str, Any]]:
    """The ranges of a rank as torch's multi-stage runtime records them, with the waits inside."""
    found = []
    free = 0.0
    waits = {message.consumer for message in timeline.messages}
    for event in (each for each in timeline.events if each.rank == rank):
        start, end = event.start + ahead, event.end + ahead
        begin = max(min(free + ahead, start), ahead) if event.slot in waits else start
        found.append(_range(f"PP:{event.step}", begin, end))
        if event.slot in waits:
            found.append(_range("gloo:recv", begin, start))
        found.append(_range("aten::mm", start, end, "cpu_op"))
        free = event.end
    return found


def write_kineto_files(
    directory: Path,
    timeline: Timeline,
    *,
    steps: int = 1,
    ahead: Sequence[float] = (),
    hosts: Sequence[str] = (),
    compressed: bool = False,
    drift: Sequence[float] = (),
    job: Callable[[int], dict[str, Any]] = lambda rank: {"rank": rank},
) -> list[Path]:
    """One file per rank with so many steps; clocks are ahead by some seconds, and drift by seconds per second.

    `job` gives the rank in the job, and what else the file says about it.
    """
    paths = []
    for rank in range(timeline.schedule.num_ranks):
        offset = ahead[rank] if ahead else 0.0
        events = [
            event
            for step in range(steps)
            for event in kineto_events(timeline, rank, offset + step * (timeline.makespan * 1.25))
        ]
        for event in events if drift else ():
            event["ts"] = START + (event["ts"] - START) * (1 + drift[rank])
            event["dur"] *= 1 + drift[rank]
        info = job(rank)
        content = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "gloo", "world_size": timeline.schedule.num_ranks, **info},
            "host_name": hosts[rank] if hosts else "node0",
            "traceEvents": [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}, *events],
            "traceName": f"rank{rank}.json",
        }
        path = directory / f"rank{info['rank']}.json{'.gz' * compressed}"
        text = json.dumps(content, indent=1).encode()
        path.write_bytes(gzip.compress(text) if compressed else text)
        paths.append(path)
    return paths
