"""How short an iteration can be at all: lower bounds that hold for every order of the same work.

p ranks; s0 the first stage of a rank; F, G, W the seconds of a stage's forward, of what passes the gradient on
(I, or B where the backward is whole) and of W (0 where it is whole); a hop takes no time on one rank.

    head     of a step: the longest chain of work that has to end before it can start
    tail     of a step: the longest chain of work that can only start once it has ended

    load          a rank starts after its least head, does all its work, and then a least tail follows
    one-machine   the same with the heads and tails of every step: the best preemptive order of one rank
                  (Jackson, Carlier); never less than `load`
    critical path one microbatch there and back
    residency     an activation of stage s lives for at least L = F + (all between) + G; a rank that may hold
                  K bytes lives through m·L·bytes of them in at least m·L·bytes / K
    warm-up       until its first gradient is back at s0, a rank can only work on the microbatches it has room
    and drain     for; and after its last forward of s0, until that one's gradient is back, only on those it
                  holds. It idles the rest of both. With fewer microbatches than room the two times can be one
                  and the same, and only the first counts

A rank's span, and its share of a period, is counted from its own first start to its own last end: heads and
tails are then chains that begin, and end, on the rank itself. In the long run a rank's iteration takes no
longer than a period, and after it comes the optimizer step.

Each says how it comes about; the greatest binds. Overlapped pairs that take less than their parts shorten work
and chains accordingly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.bounds.workload import Work
from penstock.cost.costs import Costs
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule

__all__ = ["OBJECTIVES", "Bound", "Work", "bounds", "bounds_of"]

OBJECTIVES = ("makespan", "span", "period")
"""What of an iteration is to be short (`penstock.simulation.timeline` says what they are)."""


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
    work = Work(
        schedule.placement,
        schedule.microbatches,
        costs,
        trains=table.has(Kind.B, Kind.I),
        split=table.has(Kind.I),
        paired=paired,
    )
    return bounds(work, memory_limit, objective)


def bounds(work: Work, memory_limit: float | None = None, objective: str = "makespan") -> list[Bound]:
    """All five, greatest first; the last two only with a limit of bytes per rank."""
    alone = objective != "makespan"
    found = [_one_machine(work, alone=alone), _load(work, alone=alone)]
    if not alone:
        found.append(_critical_path(work))
    if memory_limit is not None and work.trains:
        found += [_residency(work, memory_limit, alone=alone), _warm_up(work, memory_limit, alone=alone)]
    if objective == "period":
        found = [replace(bound, seconds=bound.seconds + work.costs.optimizer_step) for bound in found]
    return sorted(found, key=lambda bound: -bound.seconds)  # of equal ones, the simplest comes first


def _worst(work: Work, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank


def _head(work: Work, rank: int, *, alone: bool) -> float:
    return 0.0 if alone else work.heads["F"][work.placement.stages_of_rank[rank][0]]


def _load(work: Work, *, alone: bool) -> Bound:
    def of(rank: int) -> float:
        jobs = work.jobs(rank, alone=alone)
        return min(job[0] for job in jobs) + sum(job[1] for job in jobs) + min(job[2] for job in jobs)

    seconds, rank = _worst(work, of)
    waits = "has to" if alone else "has to wait for its first input and"
    return Bound(seconds, "load", f"rank {rank} {waits} do all its work")


def _one_machine(work: Work, *, alone: bool) -> Bound:
    seconds, rank = _worst(work, lambda rank: preemptive(work.jobs(rank, alone=alone)))
    return Bound(seconds, "one-machine", f"rank {rank} alone, in its best order, takes as long")


def preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Jackson's rule for one machine, always the job there with the longest tail: the latest end plus tail."""
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


def _critical_path(work: Work) -> Bound:
    seconds = work.forward[0] + work.costs.launch_overhead + work.tails["F"][0]
    return Bound(seconds, "critical path", "one microbatch, there and back")


def _residency(work: Work, limit: float, *, alone: bool) -> Bound:
    stages = work.placement.num_stages
    size = work.costs.per_stage("activation", stages)
    freed = work.costs.per_stage("activation_freed_by_input", stages)

    def of(rank: int) -> float:
        own = work.placement.stages_of_rank[rank]
        lives = ((work.round_trip(s) + work.passing[s], s) for s in own)
        byte_seconds = sum(life * size[s] + work.deferred[s] * (size[s] - freed[s]) for life, s in lives)
        room = work.room(rank, limit)
        return _head(work, rank, alone=alone) + (work.microbatches * byte_seconds / room if room else 0.0)

    seconds, rank = _worst(work, of)
    return Bound(seconds, "residency", f"rank {rank} may hold {limit:g} bytes, each activation lives a while")


def _warm_up(work: Work, limit: float, *, alone: bool) -> Bound:
    def of(rank: int) -> float:
        return _head(work, rank, alone=alone) + work.seconds_of(rank) + _idle(work, rank, limit)

    seconds, rank = _worst(work, of)
    because = f"rank {rank} has little to do while its first and its last gradient are on their way"
    return Bound(seconds, "warm-up and drain", because)


def _idle(work: Work, rank: int, limit: float) -> float:
    """What a rank must idle while the gradients of its first and its last microbatch are on their way."""
    stages = work.placement.num_stages
    first, *deeper = work.placement.stages_of_rank[rank]
    size = work.costs.per_stage("activation", stages)
    kept = [held - f for held, f in zip(size, work.costs.per_stage("activation_freed_by_input", stages))]
    if not size[first] or work.paired:
        return 0.0
    launch = work.costs.launch_overhead
    forward = work.forward[first] + launch
    between = sum(work.forward[s] + work.passing[s] + work.deferred[s] + 3 * launch for s in deeper)
    after = work.passing[first] + work.deferred[first] + 2 * launch
    room = work.room(rank, limit)
    begun = min(int(room / size[first] * (1 + _ROUNDING)), work.microbatches)
    idle = max(0.0, work.round_trip(first) - begun * (forward + between))
    if begun == work.microbatches:
        return idle
    # work that each byte held can stand for at most: a microbatch that is still on its way, or a W put off
    stands_for = (between + after) / size[first]
    for s in work.placement.stages_of_rank[rank]:
        w = work.deferred[s] + launch
        if work.split and w:
            stands_for = max(stands_for, w / kept[s] if kept[s] else math.inf)
    held = max(room - size[first], 0.0)
    return idle + max(0.0, work.round_trip(first) - forward - between - held * stands_for)
