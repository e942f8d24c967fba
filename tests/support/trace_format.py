"""A checker of the trace-event format, as Perfetto reads it.

Times are truncated to nanoseconds, threads are identified by their number alone, and arrows are bound to the
event that is open where they start, pass and end.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any

__all__ = ["Entry", "check", "check_arrows", "of"]

Entry = dict[str, Any]

REQUIRED = {
    "M": {"name", "pid", "tid", "ts", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "tid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "t": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
}
METADATA = {
    "process_name": ("name", str),
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def of(phase: str, found: list[Entry]) -> list[Entry]:
    return [entry for entry in found if entry["ph"] == phase]


def ns(microseconds: float) -> int:
    return int(microseconds * 1000)


def check(found: list[Entry]) -> None:
    for entry in found:
        assert set(entry) == REQUIRED[entry["ph"]] | {"ph"}
        assert all(type(entry[key]) is int and entry[key] > 0 for key in ("pid", "tid"))
        assert all(math.isfinite(entry[key]) and entry[key] >= 0 for key in ("ts", "dur") if key in entry)
        assert type(entry["name"]) is str
    times = [entry["ts"] for entry in found]
    assert times == sorted(times)
    check_names(found)
    check_slices(of("X", found))
    check_counters(of("C", found))
    check_arrows(found)


def check_names(found: list[Entry]) -> None:
    process_of: dict[int, int] = {}
    for entry in found:
        assert process_of.setdefault(entry["tid"], entry["pid"]) == entry["pid"], "a thread of two processes"
    given = Counter((entry["name"], entry["pid"], entry["tid"]) for entry in of("M", found))
    assert set(given.values()) <= {1}
    for entry in of("M", found):
        key, kind = METADATA[entry["name"]]
        assert set(entry["args"]) == {key}
        assert type(entry["args"][key]) is kind
    for entry in found:
        assert given["process_name", entry["pid"], entry["pid"]] == 1
        if entry["ph"] in "Xstf":
            assert given["thread_name", entry["pid"], entry["tid"]] == 1


def check_slices(slices: list[Entry]) -> None:
    by_thread = defaultdict(list)
    for entry in slices:
        assert entry["cat"] in ("compute", "communication", "collective", "offload", "reload")
        by_thread[entry["tid"]].append((ns(entry["ts"]), ns(entry["ts"]) + ns(entry["dur"])))
    for spans in by_thread.values():
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, "events of one thread overlap"


def check_counters(counters: list[Entry]) -> None:
    seen = {(entry["pid"], entry["ts"]) for entry in counters}
    assert len(seen) == len(counters), "two values at one time"
    for entry in counters:
        assert set(entry["args"]) - {"receive buffers"} == {"activations", "unsharded", "fixed"}
        assert all(math.isfinite(value) and value >= 0 for value in entry["args"].values())


def check_arrows(found: list[Entry]) -> None:
    """Read from top to bottom: each point of an arrow needs an event that is open on its thread."""
    until: dict[int, int] = {}
    phases = defaultdict(list)
    for entry in found:
        if entry["ph"] == "X":
            until[entry["tid"]] = ns(entry["ts"]) + ns(entry["dur"])
        if entry["ph"] in "stf":
            assert ns(entry["ts"]) < until[entry["tid"]], "an arrow hangs in the air"
            phases[entry["id"], entry["name"], entry["cat"]].append(entry["ph"])
        assert entry.get("bp", "e") == "e"
    assert {"".join(way) for way in phases.values()} <= {"sf", "stf"}
    assert len({number for number, *_ in phases}) == len(phases)
