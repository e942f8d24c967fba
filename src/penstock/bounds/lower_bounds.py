"""Lower bounds: how short an iteration can be, for every order of the same work.

F, I, W are the seconds of a stage's forward, input gradient (I, or B where
the backward is not split) and weight gradient (0 where it is not split); a message between stages of one rank
takes no time. Heads and tails are defined in `penstock.bounds.workload`.

    load          a rank starts after its least head, does all its work, and then a least tail follows
    one-machine   the same with the heads and tails of every action: the best preemptive order of one rank
                  (Jackson, Carlier); never less than `load`
    critical path one microbatch forward and backward through all stages
    residency     each activation is held until its backward, in limited memory
    warm-up       a rank idles while its first and its last gradients are computed elsewhere, because it has
    and drain     memory for few activations (both in `penstock.bounds.memory_bounds`)

A rank's span, and its share of a period, is counted from its own first start to its own last end: heads and
tails are then chains that begin, and end, on the rank itself. F and I of other ranks are in between, if they
depend on its F and its I depends on them: its span is no less than what those take on one of these ranks. In
the steady state a rank's iteration takes no longer than a period, and is followed by the optimizer step.

RECOMPUTE is work of its rank between F and the backward of its stage; where every microbatch of a stage has
one, it is in the chains too. What is recomputed or offloaded counts in limited memory with the least that it
holds. Where an order may choose that, so does every microbatch, and no RECOMPUTE is required work.

Each bound says how it is derived; the greatest binds. Where a rank may run overlapped pairs, the work of each
of its machines (`penstock.bounds.workload`) counts by itself, and chains have the least that a pair takes.
Before its first backward and after its last forward it has no pairs, so there its all-to-all counts too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from penstock.bounds.bound import Bound, worst
from penstock.bounds.memory_bounds import residency, warm_up_and_drain
from penstock.bounds.workload import Workload
from penstock.cost.costs import Costs
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule

__all__ = ["OBJECTIVES", "bounds", "bounds_of", "preemptive"]

OBJECTIVES = ("makespan", "span", "period")
"""What to minimize (defined in `penstock.simulation.timeline`)."""
_BUSIEST = 8
"""Ranks with the most work that are considered in the span of every other rank."""


def bounds_of(
    schedule: Schedule, costs: Costs, memory_limit: float | None = None, objective: str = "makespan"
) -> list[Bound]:
    """The bounds on every order of the work of this schedule, greatest first."""
    table = schedule.table
    work = Workload(
        schedule.placement,
        schedule.microbatches,
        costs,
        trains=table.has(Kind.B, Kind.I),
        split=table.has(Kind.I),
        paired=table.has_pairs,
        graph=schedule.graph,
        recomputed=_counts(schedule, Kind.RECOMPUTE),
        offloaded=_counts(schedule, Kind.OFFLOAD),
    )
    return bounds(work, memory_limit, objective)


def _counts(schedule: Schedule, kind: Kind) -> tuple[int, ...]:
    """Per stage: how many microbatches have an action of this kind; empty if there are none."""
    return tuple(schedule.table.count_by_stage(kind).tolist()) if schedule.table.has(kind) else ()


def bounds(work: Workload, memory_limit: float | None = None, objective: str = "makespan") -> list[Bound]:
    """All five, greatest first; the last two only with a memory limit per rank."""
    own_span = objective != "makespan"
    found = [_one_machine(work, own_span=own_span), _load(work, own_span=own_span)]
    if not own_span:
        found.append(_critical_path(work))
    if memory_limit is not None and work.trains:
        found += [bound(work, memory_limit, own_span=own_span) for bound in (residency, warm_up_and_drain)]
    if objective == "period":
        found = [replace(bound, seconds=bound.seconds + work.costs.optimizer_step) for bound in found]
    return sorted(found, key=lambda bound: -bound.seconds)  # of equal ones, the simplest comes first


def _load(work: Workload, *, own_span: bool) -> Bound:
    def of(rank: int) -> float:
        return max(
            min(job[0] for job in jobs) + sum(job[1] for job in jobs) + min(job[2] for job in jobs)
            for jobs in work.machines(rank, work.window(rank if own_span else None))
        )

    seconds, rank = worst(work, of)
    waits = "does all its work" if own_span else "waits for its first input and does all its work"
    return Bound(seconds, "load", f"rank {rank} {waits}")


def _one_machine(work: Workload, *, own_span: bool) -> Bound:
    if own_span:
        return _one_machine_in_spans(work)
    seconds, rank = worst(work, lambda rank: max(map(preemptive, work.machines(rank))))
    return Bound(seconds, "one-machine", f"the work of rank {rank} alone, in its best order, takes as long")


def _one_machine_in_spans(work: Workload) -> Bound:
    """Between the first start and the last end of a rank is its own work, and F and I of others."""
    ranks = range(work.placement.num_ranks)
    deepest = [own[-1] for own in work.placement.stages_of_rank]
    busiest = sorted(ranks, key=lambda rank: (work.seconds_of(rank), deepest[rank]), reverse=True)[:_BUSIEST]
    found = Bound(0.0, "one-machine", "there is no work")
    for spanned in ranks:
        window = work.window(spanned)
        for rank in dict.fromkeys((spanned, *(() if work.paired else busiest))):
            seconds = max(map(preemptive, work.machines(rank, window)))
            if seconds > found.seconds * (1 + 1e-12):
                within = "alone" if rank == spanned else f"from the first to the last step of rank {spanned}"
                because = f"the work of rank {rank} {within}, in its best order, takes as long"
                found = Bound(seconds, "one-machine", because)
    return found


def preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Jackson's rule for one machine: always the available job with the longest tail; latest end plus tail."""
    waiting = sorted(jobs)
    available: list[list[float]] = []  # minus tail, seconds left
    now = latest = 0.0
    i = 0
    while i < len(waiting) or available:
        if not available:
            now = max(now, waiting[i][0])
        while i < len(waiting) and waiting[i][0] <= now:
            heapq.heappush(available, [-waiting[i][2], waiting[i][1]])
            i += 1
        job = available[0]
        until = waiting[i][0] if i < len(waiting) else float("inf")
        worked = min(job[1], until - now)
        now += worked
        job[1] -= worked
        if job[1] <= 0:
            heapq.heappop(available)
            latest = max(latest, now - job[0])
    return latest


def _critical_path(work: Workload) -> Bound:
    launch, tails = work.costs.launch_overhead, work.tails["F"]
    seconds = max(head + f + launch + tail for head, f, tail in zip(work.heads["F"], work.forward, tails))
    return Bound(seconds, "critical path", "one microbatch, forward and backward through all stages")
