"""How short a makespan can be at all: lower bounds that hold for every order of the same work.

p ranks; d a rank, s a stage on it; F, G, W the seconds of a stage's forward, of what passes the gradient
on (I, or B where the backward is whole) and of W (0 where it is whole); c the hop to the next stage, 0 on one
rank.

    head     of a step: the longest chain of work that has to end before it can start
    tail     of a step: the longest chain of work that can only start once it has ended

    load          a rank starts after its least head, does all its work, and then a least tail follows
    one-machine   the same with the heads and tails of every step: the best preemptive order of one rank
                  (Jackson, Carlier); never less than `load`
    critical path one microbatch there and back
    residency     an activation of stage s lives for at least L = F + (all between) + G; a rank that may hold
                  K bytes lives through m·L·bytes of them in at least m·L·bytes / K
    warm-up       with one stage and room for K activations, a rank can do K forwards until the first gradient
                  is back, and idles the rest of that time

Each says how it comes about; `best` is the greatest. Overlapped pairs that take less than their parts shorten
work and chains accordingly.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from penstock.action import Kind
from penstock.costs import Costs
from penstock.placement import Placement
from penstock.schedule import Schedule

__all__ = ["Bound", "Work", "bounds", "bounds_of"]


_ROUNDING = 1e-9


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can have a makespan below `seconds`."""

    seconds: float
    name: str
    because: str


def bounds_of(schedule: Schedule, costs: Costs, memory_limit: float | None = None) -> list[Bound]:
    """The bounds on every order of the work of this schedule, greatest first."""
    columns = schedule.columns
    paired = bool((columns.slot[1:] == columns.slot[:-1]).any())
    work = Work(
        schedule.placement,
        schedule.microbatches,
        costs,
        trains=columns.has(Kind.B, Kind.I),
        split=columns.has(Kind.I),
        paired=paired,
    )
    return bounds(work, memory_limit)


def bounds(work: Work, memory_limit: float | None = None) -> list[Bound]:
    """All five, greatest first; the last two only with a limit of bytes per rank."""
    found = [_load(work), _one_machine(work), _critical_path(work)]
    if memory_limit is not None and work.trains:
        found += [_residency(work, memory_limit), *_warm_up(work, memory_limit)]
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class Work:
    """What has to be done, whatever the order."""

    placement: Placement
    microbatches: int
    costs: Costs
    trains: bool = True
    split: bool = True
    """Whether a backward may be done as I and W."""
    paired: bool = False
    """Whether a forward and a backward may run as an overlapped pair."""

    @cached_property
    def forward(self) -> list[float]:
        """F per stage."""
        return self._least_in_pair(self.costs.per_stage("forward", self.placement.num_stages))

    @cached_property
    def passing(self) -> list[float]:
        """G per stage: I or B, whichever may be shorter."""
        stages = self.placement.num_stages
        whole = self.costs.full_backward(stages)
        if self.split:
            whole = [min(i, b) for i, b in zip(self.costs.per_stage("backward_input", stages), whole)]
        return self._least_in_pair(whole)

    @cached_property
    def deferred(self) -> list[float]:
        """W per stage: what must be done of a backward besides passing the gradient on."""
        stages = self.placement.num_stages
        whole = self.costs.full_backward(stages)
        if not self.split:
            return [0.0] * stages
        halves = (self.costs.per_stage(name, stages) for name in ("backward_input", "backward_weight"))
        least = [min(i + w, b) for i, w, b in zip(*halves, whole)]
        return [max(total - g, 0.0) for total, g in zip(least, self.passing)]

    def _least_in_pair(self, seconds: list[float]) -> list[float]:
        """A part of a pair takes as long as the pair, which a fixed cost can make shorter than the part."""
        if not self.paired or self.costs.overlap is None:
            return seconds
        return [min(each, self.costs.overlap) for each in seconds]

    @cached_property
    def hop(self) -> list[float]:
        """Seconds per edge: c."""
        hosts = self.placement.stage_to_rank
        latency = self.costs.per_edge("latency", len(hosts))
        return [c if a != b else 0.0 for c, (a, b) in zip(latency, pairwise(hosts))]

    def shrink(self, rank: int) -> float:
        """How much shorter than its parts, as a factor, the work of a rank can be by running in pairs."""
        if not self.paired:
            return 1.0
        stages = self.placement.num_stages
        forward, backward = self.costs.per_stage("forward", stages), self.costs.full_backward(stages)
        least = 1.0
        for f in (forward[s] for s in self.placement.stages_of_rank[rank]):
            for s in self.placement.stages_of_rank[rank]:
                for b in {backward[s], self.costs.per_stage("backward_input", stages)[s]}:
                    together = max(f, b) + self.costs.overlap_factor * min(f, b)
                    together = together if self.costs.overlap is None else self.costs.overlap
                    least = min(least, together / (f + b)) if f + b else least
        return least

    @cached_property
    def heads(self) -> dict[str, list[float]]:
        """Per kind and stage."""
        stages = self.placement.num_stages
        forward = [0.0]
        for s in range(stages - 1):
            forward.append(forward[s] + self.forward[s] + self.hop[s])
        back = [0.0] * stages
        back[-1] = forward[-1] + self.forward[-1]
        for s in reversed(range(stages - 1)):
            back[s] = back[s + 1] + self.passing[s + 1] + self.hop[s]
        return {"F": forward, "G": back, "W": [b + g for b, g in zip(back, self.passing)]}

    @cached_property
    def tails(self) -> dict[str, list[float]]:
        """Per kind and stage."""
        stages = self.placement.num_stages
        back = [0.0] * stages
        back[0] = self.deferred[0] if self.trains else 0.0
        for s in range(1, stages):
            back[s] = max(self.deferred[s], self.hop[s - 1] + self.passing[s - 1] + back[s - 1])
        forward = [0.0] * stages
        forward[-1] = self.passing[-1] + back[-1] if self.trains else 0.0
        for s in reversed(range(stages - 1)):
            forward[s] = self.hop[s] + self.forward[s + 1] + forward[s + 1]
        return {"F": forward, "G": back, "W": [0.0] * stages}

    def jobs(self, rank: int) -> list[tuple[float, float, float]]:
        """Head, seconds and tail of all microbatches of each kind and stage of a rank."""
        kinds = {"F": self.forward}
        if self.trains:
            kinds |= {"G": self.passing, "W": self.deferred}
        extra = self.costs.launch_overhead / 2 if self.paired else self.costs.launch_overhead
        return [
            (
                self.heads[kind][s],
                self.microbatches * (seconds[s] * self.shrink(rank) + (extra if kind != "W" else 0.0)),
                self.tails[kind][s],
            )
            for kind, seconds in kinds.items()
            for s in self.placement.stages_of_rank[rank]
        ]


def _load(work: Work) -> Bound:
    def of(rank: int) -> tuple[float, int]:
        jobs = work.jobs(rank)
        head, tail = min(job[0] for job in jobs), min(job[2] for job in jobs)
        return head + sum(job[1] for job in jobs) + tail, rank

    seconds, rank = max(map(of, range(work.placement.num_ranks)))
    return Bound(seconds, "load", f"rank {rank} has to wait for its first input and do all its work")


def _one_machine(work: Work) -> Bound:
    seconds, rank = max((preemptive(work.jobs(rank)), rank) for rank in range(work.placement.num_ranks))
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
    return Bound(work.forward[0] + work.tails["F"][0], "critical path", "one microbatch, there and back")


def _lifetimes(work: Work) -> list[float]:
    """Per stage: from the start of F to the end of what passes the gradient on."""
    return [work.heads["G"][s] + work.passing[s] - work.heads["F"][s] for s in range(work.placement.num_stages)]


def _residency(work: Work, limit: float) -> Bound:
    stages = work.placement.num_stages
    size = work.costs.per_stage("activation", stages)
    freed = work.costs.per_stage("activation_freed_by_input", stages)
    lives = _lifetimes(work)

    def of(rank: int) -> tuple[float, int]:
        own = work.placement.stages_of_rank[rank]
        byte_seconds = sum(lives[s] * size[s] + work.deferred[s] * (size[s] - freed[s]) for s in own)
        head = min(work.heads["F"][s] for s in own)
        return head + work.microbatches * byte_seconds / limit if limit else head, rank

    seconds, rank = max(map(of, range(work.placement.num_ranks)))
    return Bound(seconds, "residency", f"rank {rank} holds {limit:g} bytes, each activation lives a while")


def _warm_up(work: Work, limit: float) -> list[Bound]:
    size = work.costs.per_stage("activation", work.placement.num_stages)
    found = []
    for rank, own in enumerate(work.placement.stages_of_rank):
        if len(own) == 1 and size[own[0]]:
            s = own[0]
            room = min(int(limit / size[s] + _ROUNDING), work.microbatches)
            forward = work.costs.per_stage("forward", work.placement.num_stages)[s] + work.costs.launch_overhead
            idle = max(0.0, _lifetimes(work)[s] - work.passing[s] - room * forward)
            total = work.heads["F"][s] + sum(job[1] for job in work.jobs(rank)) + idle
            because = f"rank {rank} has room for {room} activations until a gradient is back"
            found.append(Bound(total, "warm-up", because))
    return sorted(found)[-1:]
