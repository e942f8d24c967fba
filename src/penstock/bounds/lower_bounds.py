"""Lower bounds: how short an iteration can be, for every order of the same work.

p ranks; s0 the first stage of a rank; F, I, W the seconds of a stage's forward, input gradient (I, or B where
the backward is not split) and weight gradient (0 where it is not split); a message between stages of one rank
takes no time. Heads and tails are defined in `penstock.bounds.workload`.

    load          a rank starts after its least head, does all its work, and then a least tail follows
    one-machine   the same with the heads and tails of every action: the best preemptive order of one rank
                  (Jackson, Carlier); never less than `load`
    critical path one microbatch forward and backward through all stages
    residency     an activation of stage s is held for at least L = F + (all between) + I; a rank that may hold
                  K bytes needs at least m * L * bytes / K for m of them
    warm-up       until its first gradient is back at s0, a rank can only work on the microbatches it has memory
    and drain     for; and after its last forward of s0, until that one's gradient is back, only on those it
                  holds. It idles the rest of both. With fewer microbatches than memory allows the two times can
                  coincide, and only the first counts

A rank's span, and its share of a period, is counted from its own first start to its own last end: heads and
tails are then chains that begin, and end, on the rank itself. In the steady state a rank's iteration takes no
longer than a period, and is followed by the optimizer step.

Each bound says how it is derived; the greatest binds. Where a rank may run overlapped pairs, the work of each
of its machines (`penstock.bounds.workload`) counts by itself, and chains have the least that a pair takes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.bounds.workload import Workload
from penstock.cost.costs import Costs
from penstock.cost.memory import activation_bytes
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule

__all__ = ["OBJECTIVES", "Bound", "Workload", "bounds", "bounds_of"]

OBJECTIVES = ("makespan", "span", "period")
"""What to minimize (defined in `penstock.simulation.timeline`)."""


_ROUNDING = 1e-9


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can take less than `seconds`."""

    seconds: float
    name: str
    because: str


def bounds_of(
    schedule: Schedule, costs: Costs, memory_limit: float | None = None, objective: str = "makespan"
) -> list[Bound]:
    """The bounds on every order of the work of this schedule, greatest first."""
    table = schedule.table
    paired = bool((table.slot[1:] == table.slot[:-1]).any())
    work = Workload(
        schedule.placement,
        schedule.microbatches,
        costs,
        trains=table.has(Kind.B, Kind.I),
        split=table.has(Kind.I),
        paired=paired,
        graph=schedule.graph,
    )
    return bounds(work, memory_limit, objective)


def bounds(work: Workload, memory_limit: float | None = None, objective: str = "makespan") -> list[Bound]:
    """All five, greatest first; the last two only with a memory limit per rank."""
    alone = objective != "makespan"
    found = [_one_machine(work, alone=alone), _load(work, alone=alone)]
    if not alone:
        found.append(_critical_path(work))
    if memory_limit is not None and work.trains:
        found += [_residency(work, memory_limit, alone=alone), _warm_up(work, memory_limit, alone=alone)]
    if objective == "period":
        found = [replace(bound, seconds=bound.seconds + work.costs.optimizer_step) for bound in found]
    return sorted(found, key=lambda bound: -bound.seconds)  # of equal ones, the simplest comes first


def _worst(work: Workload, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank


def _head(work: Workload, rank: int, *, alone: bool) -> float:
    return 0.0 if alone else work.first_head(rank)


def _load(work: Workload, *, alone: bool) -> Bound:
    def of(rank: int) -> float:
        return max(
            min(job[0] for job in jobs) + sum(job[1] for job in jobs) + min(job[2] for job in jobs)
            for jobs in work.machines(rank, alone=alone)
        )

    seconds, rank = _worst(work, of)
    waits = "does all its work" if alone else "waits for its first input and does all its work"
    return Bound(seconds, "load", f"rank {rank} {waits}")


def _one_machine(work: Workload, *, alone: bool) -> Bound:
    seconds, rank = _worst(work, lambda rank: max(map(preemptive, work.machines(rank, alone=alone))))
    return Bound(seconds, "one-machine", f"the work of rank {rank} alone, in its best order, takes as long")


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


def _residency(work: Workload, limit: float, *, alone: bool) -> Bound:
    stages = work.placement.num_stages
    size = activation_bytes(work.costs, stages)

    def of(rank: int) -> float:
        own = work.placement.stages_of_rank[rank]
        lives = ((work.round_trip(s) + work.input_gradient[s], s) for s in own)
        byte_seconds = sum(
            life * size.full[s] + work.weight_gradient[s] * size.after_input_gradient[s] for life, s in lives
        )
        room = work.activation_room(rank, limit)
        return _head(work, rank, alone=alone) + (work.microbatches * byte_seconds / room if room else 0.0)

    seconds, rank = _worst(work, of)
    return Bound(
        seconds,
        "residency",
        f"rank {rank} may hold {limit:g} bytes, and each activation is held until its backward",
    )


def _warm_up(work: Workload, limit: float, *, alone: bool) -> Bound:
    def of(rank: int) -> float:
        return _head(work, rank, alone=alone) + work.seconds_of(rank) + _idle(work, rank, limit)

    seconds, rank = _worst(work, of)
    because = f"rank {rank} lacks work while its first and its last gradient are computed elsewhere"
    return Bound(seconds, "warm-up and drain", because)


def _idle(work: Workload, rank: int, limit: float) -> float:
    """Seconds a rank must idle while its first and its last gradient are computed elsewhere."""
    stages = work.placement.num_stages
    first, *deeper = work.placement.stages_of_rank[rank]
    sizes = activation_bytes(work.costs, stages)
    size: list[float] = sizes.full.tolist()
    kept: list[float] = sizes.after_input_gradient.tolist()
    if not size[first] or work.paired or not work.stage_graph.is_chain:
        return 0.0
    launch = work.costs.launch_overhead
    forward = work.forward[first] + launch
    between = sum(
        work.forward[s] + work.input_gradient[s] + work.weight_gradient[s] + 3 * launch for s in deeper
    )
    after = work.input_gradient[first] + work.weight_gradient[first] + 2 * launch
    room = work.activation_room(rank, limit)
    begun = min(int(room / size[first] * (1 + _ROUNDING)), work.microbatches)
    idle = max(0.0, work.round_trip(first) - begun * (forward + between))
    if begun == work.microbatches:
        return idle
    # the most work that each held byte can provide: a microbatch in flight, or a deferred W
    work_per_byte = (between + after) / size[first]
    for s in work.placement.stages_of_rank[rank]:
        w = work.weight_gradient[s] + launch
        if work.split and w:
            work_per_byte = max(work_per_byte, w / kept[s] if kept[s] else math.inf)
    held = max(room - size[first], 0.0)
    return idle + max(0.0, work.round_trip(first) - forward - between - held * work_per_byte)
