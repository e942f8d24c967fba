"""Measured timelines, and the one estimator of costs from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.prices import edge_prices, host_copy_bytes, message_seconds, stream_seconds
from penstock.errors import CostsError
from penstock.ir.action import Action, WorkUnit
from penstock.ir.encoding import Floats
from penstock.ir.kinds import Kind
from penstock.ir.messages import VALUES
from penstock.ir.schedule import Schedule
from penstock.simulation.timeline import Timeline

# Calibration.
#
# Steps of several schedules may be combined: B from one, I and W from another. Means, not medians,
# because the makespan is a sum along a path: what now and then takes longer must count. A clock around a step
# does not tell its all-to-all from its compute: the all-to-all stays as in the known costs, the rest is
# compute. Nor does it tell the latency of a copy to the host from its transfer: the latency stays as it is
# known. F of a microbatch with I and W takes longer than F of one with B, because its layers prepare for a
# split backward. Costs have one F, so the difference is in I: it is a part of the price of a split.


_COMPUTE: dict[Kind, str | None] = {
    kind: kind.spec.cost for kind in Kind if kind.is_compute and kind is not Kind.OVERLAP_F_B
}

Samples = dict[tuple[Kind, int, bool], list[float]]
"""Seconds of each kind on each stage, and of F apart where the backward of its microbatch is split."""
Means = dict[tuple[Kind, int], float]
"""Seconds of each kind on each stage."""


def calibrate(timelines: Sequence[Timeline], links: Costs | None = None) -> Costs:
    """The mean seconds of each kind of compute on each stage, of messages and of everything else.

    What was never measured stays as in the first timeline's costs. Where those are not known yet, `links` are
    costs of messages and bytes alone; compute that was never measured is then derived from what was: the mean
    of the other stages, and I = W = B / 2.
    """
    if not timelines:
        raise CostsError("costs cannot be estimated from no timelines: give at least one")
    counts = {timeline.schedule.num_stages for timeline in timelines}
    if len(counts) > 1:
        raise CostsError(f"the timelines have different numbers of stages: {sorted(counts)}")
    num_stages, base = counts.pop(), links or timelines[0].costs
    means = _compute_of(_means(_samples(timelines)), base, num_stages)
    steps = sum(int(timeline.is_compute.sum()) for timeline in timelines)
    found: dict[str, Any] = _derived(means, num_stages) if links else _updated(means, base, num_stages)
    return replace(
        base,
        **found,
        **_host_link(timelines, base),
        latency=_latency(timelines, base) or base.latency,
        launch_overhead=sum(map(_overhead, timelines)) / steps if steps else 0.0,
    )


def measured_jitter(timelines: Sequence[Timeline]) -> float:
    """The standard deviation of compute steps as a share of their means, for `simulate_with_jitter`.

    Steps that vary wait for each other, so a schedule takes longer than one whose steps all take their means.
    """
    samples = _samples(timelines).values()
    shares = [np.array(each) / fmean(each) - 1 for each in samples if len(each) > 1 and fmean(each)]
    return float(np.sqrt(np.mean(np.concatenate(shares) ** 2))) if shares else 0.0


def _samples(timelines: Sequence[Timeline]) -> Samples:
    found: Samples = {}
    for timeline in timelines:
        table = timeline.schedule.table
        at = table.of_kind(Kind.I)
        split = set(map(WorkUnit, table.stage[at].tolist(), table.microbatch[at].tolist()))
        for action, seconds in _single_actions(timeline):
            of_split = action.kind is Kind.F and action.work_unit in split
            found.setdefault((action.kind, action.stage, of_split), []).append(seconds)
    return found


def _means(samples: Samples) -> Means:
    """Of each kind and stage; if F was measured with B and with I, the difference of the two F is in I."""
    means = {(kind, stage): fmean(each) for (kind, stage, of_split), each in samples.items() if not of_split}
    for (kind, stage, of_split), each in samples.items():
        if of_split:
            more = fmean(each) - means.setdefault((kind, stage), fmean(each))
            if (Kind.I, stage) in means:
                means[Kind.I, stage] = max(means[Kind.I, stage] + more, 0.0)
    return means


def _compute_of(means: Means, base: Costs, num_stages: int) -> Means:
    """What is left of measured steps without their all-to-all."""
    all_to_all = stream_seconds(base, num_stages).all_to_all
    for (kind, stage), seconds in means.items():
        if seconds < all_to_all[kind.number, stage]:
            names = " + ".join(kind.spec.all_to_all)
            raise CostsError(
                f"{kind} of stage {stage} took {seconds:g} s, less than its all-to-all in the known costs, "
                f"{all_to_all[kind.number, stage]:g} s: lower {names}"
            )
    return {key: seconds - float(all_to_all[key[0].number, key[1]]) for key, seconds in means.items()}


def _updated(means: Means, base: Costs, num_stages: int) -> dict[str, tuple[float, ...]]:
    """The costs of the kinds that were measured; a stage on which one was not stays as it was."""
    before = stream_seconds(base, num_stages).compute
    return {
        str(name): tuple(means.get((kind, s), float(before[kind.number, s])) for s in range(num_stages))
        for kind, name in _COMPUTE.items()
        if any(each is kind for each, _ in means)
    }


def _derived(means: Means, num_stages: int) -> dict[str, tuple[float, ...]]:
    """The costs of all kinds that follow from those that were measured."""
    known: dict[Kind, tuple[float, ...]] = {}
    for kind in _COMPUTE:
        own = [seconds for (each, _), seconds in means.items() if each is kind]
        if own:
            known[kind] = tuple(means.get((kind, s), fmean(own)) for s in range(num_stages))
    if Kind.B in known:
        halves = tuple(seconds / 2 for seconds in known[Kind.B])
        known = {Kind.I: halves, Kind.W: halves} | known
    return {str(_COMPUTE[kind]): seconds for kind, seconds in known.items()}


def _host_link(timelines: Sequence[Timeline], base: Costs) -> dict[str, Any]:
    """The bandwidth of each rank's link to the host; ranks without copies have the mean of the others."""
    ranks = max(timeline.schedule.num_ranks for timeline in timelines)
    moved, seconds = np.zeros(ranks), np.zeros(ranks)
    for timeline in timelines:
        table = timeline.schedule.table
        parts = np.flatnonzero(table.of_kind(Kind.OFFLOAD, Kind.RELOAD))
        rank, slot = table.part_rank[parts], table.slot[parts]
        latency = np.array(base.per_rank("host_latency", table.placement.num_ranks))[rank]
        taken = np.maximum((timeline.end - timeline.start)[slot] - latency, 0.0)
        np.add.at(moved, rank, host_copy_bytes(table, base)[parts])
        np.add.at(seconds, rank, taken)
    known = (moved > 0) & (seconds > 0)
    if not known.any():
        return {}
    speed = np.full(ranks, moved[known].sum() / seconds[known].sum())
    speed[known] = moved[known] / seconds[known]
    return {"host_bandwidth": tuple(speed.tolist())}


def _end_before(timeline: Timeline) -> Floats:
    """Per slot: when its rank ended the step before it; 0 for the first."""
    is_first = np.diff(timeline.schedule.table.rank, prepend=-1) > 0
    return np.where(is_first, 0.0, np.concatenate(([0.0], timeline.end))[:-1])


def _overhead(timeline: Timeline) -> float:
    """Seconds of all steps that are not compute, and of the time before steps that wait for no message.

    A copy to the host is neither: it has its own cost, and other steps may run meanwhile.
    """
    table = timeline.schedule.table
    copies = np.zeros(len(table.rank), dtype=np.bool_)
    copies[table.slot[table.of_kind(Kind.OFFLOAD, Kind.RELOAD)]] = True
    before = np.maximum(
        timeline.start - _end_before(timeline), 0.0
    )  # copies and collectives run beside compute
    before[np.diff(table.rank, prepend=-1) > 0] = 0.0
    if copies.any():
        before[copies] = before[table.host_copy_waits[1]] = 0.0
    before[timeline.message_columns["consumer"]] = 0.0
    return float((timeline.end - timeline.start)[~timeline.is_compute & ~copies].sum() + before.sum())


def _latency(timelines: Sequence[Timeline], base: Costs) -> tuple[float, ...]:
    """Per edge: seconds of messages whose receiver was already waiting, without the transfer."""
    graph = timelines[0].schedule.graph
    prices = [edge_prices(base, graph, value) for value in VALUES]
    samples: dict[int, list[float]] = {}
    for timeline in timelines:
        columns = timeline.message_columns
        edge, consumer, ready = columns["edge"], columns["consumer"], timeline.end[columns["sent"]]
        transfer = np.where(columns["kind"], prices[1].transfer[edge], prices[0].transfer[edge])
        taken = np.maximum(timeline.start[consumer] - ready - transfer, 0.0)
        waited = _end_before(timeline)[consumer] <= ready
        for number, seconds in zip(edge[waited].tolist(), taken[waited].tolist()):
            samples.setdefault(number, []).append(seconds)
    known = prices[0].latency.tolist()
    return tuple(fmean(samples[edge]) if edge in samples else known[edge] for edge in range(len(known)))


@dataclass(frozen=True)
class KindError:
    """How well the time of a kind was predicted: mean seconds, and the relative error."""

    kind: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Above 0 where the prediction was longer than the measurement."""
        return self.predicted / self.measured - 1 if self.measured else 0.0


def errors_by_kind(predicted: Timeline, measured: Sequence[Timeline]) -> list[KindError]:
    """For F, I, W and B where they exist, and for the whole step."""
    simulated = list(_single_actions(predicted))
    recorded = [each for timeline in measured for each in _single_actions(timeline)]
    overhead = predicted.costs.launch_overhead
    found = []
    for kind in _COMPUTE:
        expected = [seconds - overhead for action, seconds in simulated if action.kind is kind]
        actual = [seconds for action, seconds in recorded if action.kind is kind]
        if expected and actual:
            found.append(KindError(kind.value, fmean(expected), fmean(actual)))
    steps = fmean(timeline.makespan for timeline in measured)
    return [*found, KindError("step", predicted.makespan, steps)]


def _single_actions(timeline: Timeline) -> Iterator[tuple[Action, float]]:
    """Compute that ran by itself, not in an overlapped pair, and its seconds."""
    for event in timeline.events:
        parts = event.step.parts
        if len(parts) == 1 and parts[0].kind in _COMPUTE:
            yield parts[0], event.end - event.start


# A measured timeline: times of all steps, the messages between them, and the costs that follow from them.


def measured_timeline(
    schedule: Schedule, seconds: Floats, links: Costs, period: float | None = None
) -> Timeline:
    """The timeline with these times, a row of start and end for each slot.

    `links` are the costs of messages as far as they are known; the timeline's costs are derived from it.
    """
    start, end = seconds[:, 0].copy(), seconds[:, 1].copy()
    transfers = _transfers(schedule, seconds, links)
    timeline = Timeline(schedule, links, start, end, *transfers, period=period)
    return replace(timeline, costs=calibrate([timeline], links))


def _transfers(schedule: Schedule, times: Floats, links: Costs) -> tuple[Floats | None, Floats | None]:
    """Per message: when it left, and when it arrived.

    It leaves when its SEND begins, or its producer ends where there is none. If its rank was idle by then, it
    arrives when its consumer starts; else after the latency, but before its use.
    """
    messages, slot = schedule.messages, schedule.table.slot
    used = np.flatnonzero(messages.consumed)
    if not used.size:
        return None, None
    has_send = messages.send[used] >= 0
    sent = slot[np.where(has_send, messages.send[used], messages.producer[used])]
    consumer = slot[messages.consumer[used]]
    use = times[consumer, 0]
    _, latency = message_seconds(messages, links)
    begin, arrival = np.full((2, len(messages.send)), np.nan)
    begin[used] = np.where(has_send, times[sent, 0], times[sent, 1])
    arrived = np.minimum(np.maximum(begin[used] + latency[used], times[sent, 1]), use)
    waited = _idle_since(schedule, times)[consumer] <= times[sent, 1]
    arrival[used] = np.maximum(np.where(waited, use, arrived), begin[used])
    return begin, arrival


def _idle_since(schedule: Schedule, times: Floats) -> Floats:
    """Per slot: when the last compute of the rank before it ended; 0 before the first."""
    table = schedule.table
    ends = np.where(table.is_compute_slot, times[:, 1], 0.0)
    found = np.zeros(len(ends))
    for first, last in pairwise(table.slot_bounds.tolist()):
        found[first + 1 : last] = np.maximum.accumulate(ends[first:last])[:-1]
    return found
