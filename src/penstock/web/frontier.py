"""The Pareto chart: every family at these sizes by peak memory and time, with and without recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.errors import PenstockError
from penstock.families import Family, families
from penstock.simulation.simulator import simulate
from penstock.web.request import Question, parse_question

__all__ = ["pareto"]

_LEFT_OUT = ("forward-only",)


def pareto(document: object) -> dict[str, Any]:
    """One point for each family, group and technique that can be built at the sizes of the first schedule."""
    question = parse_question(document)
    points = list(_points(question))
    for point in points:
        point["optimal"] = not any(_dominates(other, point) for other in points)
    return {"points": sorted(points, key=lambda point: (point["makespan"], point["peak_memory"]))}


def _dominates(other: dict[str, Any], point: dict[str, Any]) -> bool:
    here, there = ((each["makespan"], each["peak_memory"]) for each in (point, other))
    return all(b <= a * (1 + 1e-12) for a, b in zip(here, there)) and any(
        b < a * (1 - 1e-12) for a, b in zip(here, there)
    )


def _points(question: Question) -> Iterator[dict[str, Any]]:
    first = question.schedule(0)
    for family in families().values():
        if family.name in _LEFT_OUT:
            continue
        for source in _sources(family, first.num_ranks, first.microbatches):
            try:
                point = _point(question, source)
            except PenstockError:  # a family that does not exist at these sizes
                continue
            yield point


def _sources(family: Family, ranks: int, microbatches: int) -> Iterator[dict[str, Any]]:
    sizes = {"family": family.name, "ranks": ranks, "microbatches": microbatches}
    groups = family.typical_groups(ranks, microbatches) if family.smallest_group else []
    for group in dict.fromkeys([None, *groups[1:]]):
        yield sizes | ({} if group is None else {"group": group})
    if not groups:
        yield sizes | {"recompute": "all"}


def _point(question: Question, source: dict[str, Any]) -> dict[str, Any]:
    asked = Question(
        [source], question.costs, question.weights, question.same_model, question.send_model, question.lowered
    )
    schedule = asked.schedule(0)
    timeline = simulate(schedule, asked.costs_for(schedule), send_model=asked.send_model)
    extras = ["recompute"] if "recompute" in source else []
    return {
        "schedule": source,
        "name": ", ".join([schedule.name, *extras]),
        "makespan": timeline.makespan,
        "peak_memory": max(timeline.peak_memory),
        "bubble": timeline.bubble_rate,
        "fits": question.memory_limit is None
        or max(timeline.peak_memory) <= question.memory_limit * (1 + 1e-9),
    }
