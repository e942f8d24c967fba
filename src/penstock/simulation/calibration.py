"""Costs from measured timelines: what the work took on average, so that other schedules can be predicted.

Steps of several schedules may be taken together: one with B and one with I and W tell both. Means, not medians,
because a step that now and then takes longer makes those that wait for it later too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.errors import CostsError
from penstock.ir.action import Kind
from penstock.simulation.timeline import Timeline

__all__ = ["KindError", "calibrated", "errors_by_kind"]

_NAMES = {
    Kind.F: "forward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
    Kind.B: "backward",
}


def calibrated(timelines: Sequence[Timeline]) -> Costs:
    """The mean time of each kind of work on each stage, and of messages; all else as in the first timeline.

    Work that was never measured by itself keeps what the first timeline's costs say.
    """
    if not timelines:
        raise CostsError("costs cannot be derived from no timelines: give one at least")
    stages = {timeline.schedule.num_stages for timeline in timelines}
    if len(stages) > 1:
        raise CostsError(f"the timelines are of models with different numbers of stages: {sorted(stages)}")
    taken: dict[tuple[Kind, int], list[float]] = {}
    besides, works = 0.0, 0
    for timeline in timelines:
        for kind, stage, seconds in _measured(timeline):
            taken.setdefault((kind, stage), []).append(seconds)
        besides += _besides_work(timeline)
        works += int(timeline.is_compute.sum())
    first, count = timelines[0].costs, stages.pop()
    found: dict[str, Any] = {}
    for kind, name in _NAMES.items():
        if any(key[0] is kind for key in taken):
            before = first.full_backward(count) if kind is Kind.B else first.per_stage(name, count)
            found[name] = tuple(
                fmean(taken[kind, stage]) if (kind, stage) in taken else before[stage] for stage in range(count)
            )
    felt = _felt_latency(timelines, first, count)
    return replace(
        first, **found, latency=felt or first.latency, launch_overhead=besides / works if works else 0.0
    )


def _besides_work(timeline: Timeline) -> float:
    """Seconds of all steps that are no work, and of the time before steps that wait for no message."""
    alone = ~timeline.is_compute
    rank = timeline.schedule.table.rank
    before = np.zeros(len(alone))
    before[1:] = np.where(rank[1:] == rank[:-1], timeline.start[1:] - timeline.end[:-1], 0.0)
    before[[message.consumer for message in timeline.messages]] = 0.0
    return float((timeline.end - timeline.start)[alone].sum() + before.sum())


def _felt_latency(timelines: Sequence[Timeline], costs: Costs, stages: int) -> tuple[float, ...]:
    """Per edge: what messages took whose receiver was waiting for them already, waking up included."""
    taken: dict[int, list[float]] = {}
    for timeline in timelines:
        for message in timeline.messages:
            ready = float(timeline.end[message.sent])
            before = message.consumer - 1  # of the same rank: there is a receive at least
            if float(timeline.end[before]) <= ready:
                edge = message.stage - (message.kind == "gradient")
                on_the_way = float(timeline.start[message.consumer]) - ready
                speed = (
                    0.0 if costs.bandwidth is None else message.size / costs.per_edge("bandwidth", stages)[edge]
                )
                taken.setdefault(edge, []).append(max(on_the_way - speed, 0.0))
    known = costs.per_edge("latency", stages)
    return tuple(fmean(taken[edge]) if edge in taken else known[edge] for edge in range(stages - 1))


@dataclass(frozen=True)
class KindError:
    """How well the time of a kind of work was predicted: mean seconds, and the error as a share."""

    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Above 0 where it was predicted to take longer than it did."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def errors_by_kind(predicted: Timeline, measured: Sequence[Timeline]) -> list[KindError]:
    """For F, I, W and B as far as they are there, and for the whole step."""
    expected = list(_measured(predicted))
    happened = [each for timeline in measured for each in _measured(timeline)]
    overhead = predicted.costs.launch_overhead
    found = []
    for kind in _NAMES:
        theirs = [seconds for each, _, seconds in happened if each is kind]
        ours = [seconds - overhead for each, _, seconds in expected if each is kind]
        if ours and theirs:
            found.append(KindError(kind.value, fmean(ours), fmean(theirs)))
    steps = fmean(timeline.makespan for timeline in measured)
    return [*found, KindError("step", predicted.makespan, steps)]


def _measured(timeline: Timeline) -> Iterator[tuple[Kind, int, float]]:
    """Kind, stage and seconds of the work that was done by itself, not in an overlapped pair."""
    for event in timeline.events:
        parts = event.step.parts
        if len(parts) == 1 and parts[0].kind in _NAMES:
            yield parts[0].kind, parts[0].stage, event.end - event.start
