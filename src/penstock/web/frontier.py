"""The Pareto chart: every family at these sizes by peak memory and time, with and without recomputation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from penstock.cost.memory import exceeds
from penstock.errors import PenstockError
from penstock.families import Family, families
from penstock.simulation.simulator import simulate
from penstock.web.request import DrawRequest, parse_request

_MAX_SECONDS = 8.0
_REPORT_SECONDS = 0.3

OnPoints = Callable[[dict[str, Any]], None]


def pareto(
    document: object, on_points: OnPoints | None = None, seconds: float = _MAX_SECONDS
) -> dict[str, Any]:
    """One point for each family, group and technique that can be built at the sizes of the first schedule.

    `on_points` is called now and then with the answer so far. After so many seconds the rest is left out; plain
    families come first.
    """
    request = parse_request(document)
    first = request.schedule(0)
    sources = _sources(first.num_ranks, first.microbatches)
    points: list[dict[str, Any]] = []
    began = reported = time.monotonic()
    for number, source in enumerate(sources):
        now = time.monotonic()
        if points and now - began > seconds:
            return _answer(points, number, sources)
        if on_points is not None and points and now - reported > _REPORT_SECONDS:
            on_points(_answer(points, number, sources))
            reported = now
        try:
            points.append(_point(request, source))
        except PenstockError:  # a family that does not exist at these sizes
            continue
    return _answer(points, len(sources), sources)


def _answer(points: list[dict[str, Any]], tried: int, sources: list[dict[str, Any]]) -> dict[str, Any]:
    for point in points:
        point["optimal"] = not any(_dominates(other, point) for other in points)
    return {
        "points": sorted(points, key=lambda point: (point["makespan"], point["peak_memory"])),
        "tried": tried,
        "of": len(sources),
        "left_out": [_name(source) for source in sources[tried:]],
    }


def _name(source: dict[str, Any]) -> str:
    extras = [f"{key} {source[key]}" for key in ("group", "recompute") if key in source]
    return ", ".join([source["family"], *extras])


def _dominates(other: dict[str, Any], point: dict[str, Any]) -> bool:
    here, there = ((each["makespan"], each["peak_memory"]) for each in (point, other))
    return all(b <= a * (1 + 1e-12) for a, b in zip(here, there)) and any(
        b < a * (1 - 1e-12) for a, b in zip(here, there)
    )


def _sources(ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """All families as they are, then with recomputation, then in other groups."""
    found = [
        source
        for family in families().values()
        if family.trains
        for source in _sources_of(family, ranks, microbatches)
    ]
    return sorted(found, key=lambda source: ("group" in source, "recompute" in source))


def _sources_of(family: Family, ranks: int, microbatches: int) -> Iterator[dict[str, Any]]:
    sizes = {"family": family.name, "ranks": ranks, "microbatches": microbatches}
    groups = family.typical_groups(ranks, microbatches) if family.smallest_group else []
    yield sizes
    for group in dict.fromkeys(groups[1:]):
        yield sizes | {"group": group}
    if not groups:
        yield sizes | {"recompute": "all"}


def _point(request: DrawRequest, source: dict[str, Any]) -> dict[str, Any]:
    one = replace(request, schedules=[source])
    schedule = one.schedule(0)
    timeline = simulate(schedule, one.costs_for(schedule), send_model=one.send_model)
    extras = ["recompute"] if "recompute" in source else []
    return {
        "schedule": source,
        "name": ", ".join([schedule.name, *extras]),
        "makespan": timeline.makespan,
        "peak_memory": max(timeline.peak_memory),
        "bubble": timeline.bubble_rate,
        "fits": request.memory_limit is None or not exceeds(max(timeline.peak_memory), request.memory_limit),
    }
