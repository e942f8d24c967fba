"""Lower bounds: how short an iteration can be, for every order of the same work, and within a memory limit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np

from penstock.bounds.workload import Bound, Jobs, Window, Workload, worst
from penstock.cost.costs import Costs
from penstock.cost.effects import held_bytes
from penstock.cost.memory import activation_bytes, fixed_bytes_of, stage_bytes
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.schedule import Schedule

# Bounds from a memory limit per rank: residency, and warm-up and drain.
#
# Residency. An activation of stage s is held for at least L = F + (all between) + I, and what I keeps of it
# during W. A rank that may hold K bytes needs at least m * (byte-seconds of one microbatch) / K seconds.
#
# Warm-up and drain. A rank has the stages s1 < s2 < ... < sv. Cut them behind sj:
#
#   warm-up    until its first gradient is back at s1..sj, at the earliest after the head of I of sj, a rank can
#              only do F of s1..sj, whose activations it all holds until then, and all the work of deeper stages
#                for the same microbatches
#     drain      after its last F of s1..sj, and for at least the tail of that F, it can only do I and W of the
#                activations that it holds then, and all the work of deeper stages for the same microbatches
#
# What it can do is limited by the bytes it may hold, so it idles the rest of both times. They do not coincide
# if the activations of all microbatches on s1..sj do not fit. The greatest sum over all cuts counts, one for
# each time. For p ranks with two stages each in a V, room for k activations and F = I = W = 1, the rank with
# the two middle stages, cut behind both, takes at least
#
#     head of its first F + idle in the warm-up + work + idle in the drain and after it
#     (p - 1)             + (2p - k)            + 6m   + (3p - 2k)                      = 6m + 6p - 1 - 3k


_ROUNDING = 1e-9


def _least_held(work: Workload) -> Floats:
    """Per stage: the least bytes that a microbatch holds between its F and its backward."""
    costs, n = work.costs, work.placement.num_stages
    recomputed, offloaded = (
        (np.array(counts or (0,) * n) > 0) | may
        for counts, may in ((work.recomputed, work.may_recompute), (work.offloaded, work.may_offload))
    )
    without, with_recompute = (
        np.where(offloaded, held_bytes(costs, n, (*again, Kind.OFFLOAD)), held_bytes(costs, n, again))
        for again in ((), (Kind.RECOMPUTE,))
    )
    return np.where(recomputed, np.minimum(without, with_recompute), without)


def least_needed(work: Workload) -> list[float]:
    """Per rank: bytes that no order can do without.

    A backward needs the whole activation, and the earlier stages of its rank still hold the same microbatch.
    """
    costs, placement = work.costs, work.placement
    full, least = activation_bytes(costs, placement.num_stages).full, _least_held(work)
    found = []
    for own in placement.stages_of_rank:
        ahead = own if work.stage_graph.is_chain else ()
        held = max((full[s] + sum(least[t] for t in ahead if t < s) for s in own), default=0.0)
        found.append(fixed_bytes_of(costs, own, placement.num_stages) + float(held))
    return found


def residency(work: Workload, limit: float, *, own_span: bool) -> Bound:
    """Each activation is held until its backward."""
    size, least = activation_bytes(work.costs, work.placement.num_stages), _least_held(work)

    def of(rank: int) -> float:
        own = work.placement.stages_of_rank[rank]
        lives = ((work.round_trip(s) + work.input_gradient[s], s) for s in own)
        byte_seconds = sum(
            life * least[s] + work.weight_gradient[s] * size.after_input_gradient[s] for life, s in lives
        )
        bytes_left = work.activation_limit(rank, limit)
        head = 0.0 if own_span else work.first_head(rank)
        return head + (work.microbatches * float(byte_seconds) / bytes_left if bytes_left else 0.0)

    seconds, rank = worst(work, of)
    because = (
        f"rank {rank} may hold {work.costs.units.memory(limit)}, and each activation is held until its backward"
    )
    return Bound(seconds, "residency", because)


def warm_up_and_drain(work: Workload, limit: float, *, own_span: bool) -> Bound:
    """A rank idles while its first and its last gradients are computed elsewhere."""
    seconds, rank = worst(work, lambda rank: busy_and_idle(work, rank, limit, own_span=own_span))
    because = f"rank {rank} lacks work while its first and its last gradients are computed elsewhere"
    return Bound(seconds, "warm-up and drain", because)


def busy_and_idle(work: Workload, rank: int, limit: float, *, own_span: bool) -> float:
    """The seconds of all work of a rank, and of what it idles at least in its warm-up and its drain."""
    return _Rank(work, rank, limit, own_span).seconds


def drains(work: Workload, rank: int, limit: float, *, own_span: bool) -> list[float]:
    """Per stage of a rank: the seconds that it idles at least after its last F of that and earlier stages."""
    each = _Rank(work, rank, limit, own_span)
    return [each.drain(cut) for cut in each.cuts]


class _Item(NamedTuple):
    """Seconds of work that a rank can do for the bytes it holds."""

    size: float
    seconds: float


_NOTHING = _Item(0.0, 0.0)


@dataclass(frozen=True)
class _Rank:
    """One rank; seconds of work are those that `Workload.machines` counts."""

    work: Workload
    rank: int
    limit: float
    own_span: bool
    """Whether to count from the rank's own first start to its own last end."""

    @property
    def seconds(self) -> float:
        """All its work, and what it idles at least before, between and after."""
        return max(self._seconds_of(jobs) for jobs in self.work.machines(self.rank, self.window))

    @cached_property
    def window(self) -> Window:
        return self.work.window(self.rank if self.own_span else None)

    def _seconds_of(self, jobs: Jobs) -> float:
        before, after = [(0, min(job[0] for job in jobs))], [(0, min(job[2] for job in jobs))]
        if not self.work.paired and any(self.sizes):
            before += [(cut, self.warm_up(cut)) for cut in self.cuts]
            after += [(cut, self.drain(cut)) for cut in self.cuts]
        idle = max(
            first + last if self.is_apart(min(i, j)) else max(first, last)
            for i, first in before
            for j, last in after
        )
        return idle + sum(job[1] for job in jobs)

    @cached_property
    def own(self) -> tuple[int, ...]:
        return self.work.placement.stages_of_rank[self.rank]

    @cached_property
    def cuts(self) -> range:
        """How many stages are ahead of a cut; on another graph than a chain only all of them."""
        return range(1 if self.work.stage_graph.is_chain else len(self.own), len(self.own) + 1)

    @cached_property
    def forward(self) -> list[float]:
        """F, and the RECOMPUTE that may follow it."""
        launch = self.work.costs.launch_overhead
        return [self.work.forward[s] + self.work.recompute[s] + launch for s in self.own]

    @cached_property
    def backward(self) -> list[float]:
        """The backward, and the RECOMPUTE that may come before it."""
        launch, again = self.work.costs.launch_overhead, self.work.recompute
        return [
            self.work.input_gradient[s] + self.work.weight_gradient[s] + again[s] + launch for s in self.own
        ]

    def deeper(self, cut: int) -> float:
        """All work of the stages behind the cut for one microbatch."""
        again = sum(self.work.recompute[s] for s in self.own[cut:])
        return sum(self.forward[cut:]) + sum(self.backward[cut:]) - again

    @cached_property
    def sizes(self) -> list[float]:
        least = _least_held(self.work)
        return [float(least[s]) for s in self.own]

    @cached_property
    def weights(self) -> list[_Item]:
        """Deferred W."""
        if not self.work.split:
            return []
        kept = activation_bytes(self.work.costs, self.work.placement.num_stages).after_input_gradient
        items = [_Item(float(kept[s]), self.work.weight_gradient[s]) for s in self.own]
        return [item for item in items if item.seconds]

    @cached_property
    def activation_limit(self) -> float:
        """Bytes for activations, rounded down to a multiple of what all sizes are multiples of."""
        limit = self.work.activation_limit(self.rank, self.limit) * (1 + _ROUNDING)
        sizes = [size for size in (*self.sizes, *(item.size for item in self.weights)) if size]
        if not sizes:  # nothing is held, such as checkpoints of no bytes: any limit is as good
            return limit
        if all(size == round(size) for size in sizes):
            unit = float(math.gcd(*map(round, sizes)))
        else:
            unit = min(sizes)
            if any(abs(size / unit - round(size / unit)) > _ROUNDING for size in sizes):
                return limit
        return math.floor(limit / unit) * unit

    def is_apart(self, cut: int) -> bool:
        """Whether warm-up and drain cannot coincide, as F of all microbatches does not fit."""
        return not cut or self.work.microbatches * sum(self.sizes[:cut]) > self.activation_limit

    def warm_up(self, cut: int) -> float:
        """Seconds without work before the first I ahead of the cut starts."""
        heads = self.window[0]["I"]
        ahead = self._prefixes(self.forward[:cut])
        begun = [*ahead[:-1], _Item(ahead[-1].size, ahead[-1].seconds + self.deeper(cut))]
        return min(heads[s] for s in self.own[:cut]) - self._most_work(cut, begun, ahead, [])

    def drain(self, cut: int) -> float:
        """Seconds without work after the last F ahead of the cut ends."""
        tails = self.window[1]["F"]
        ahead = self._prefixes(self.backward[:cut])
        begun = [*ahead[:-1], _Item(ahead[-1].size, ahead[-1].seconds + self.deeper(cut))]
        return min(tails[s] for s in self.own[:cut]) - self._most_work(cut, begun, ahead, self.weights)

    def _prefixes(self, seconds: Sequence[float]) -> list[_Item]:
        """A microbatch on the first 1, 2, ... stages."""
        return list(map(_Item, accumulate(self.sizes[: len(seconds)]), accumulate(seconds)))

    def _most_work(self, cut: int, begun: list[_Item], ahead: list[_Item], weights: list[_Item]) -> float:
        """The most work within the activation limit."""
        if not self.work.stage_graph.is_chain:
            each = [_Item(*item) for item in zip(self.sizes, _differences(begun))]
            return _most(self.activation_limit, self.work.microbatches, [_NOTHING], [*each, *weights])
        # the microbatch of the first I, or of the last F, is held on all stages ahead of the cut
        whole, left = begun[-1], self.work.microbatches - 1
        limit = self.activation_limit - whole.size
        if not (deeper := self.sizes[cut:]):
            return whole.seconds + _most(limit, left, begun, weights)
        # either an activation of a deeper stage fits too when all others are held, or one of them is not of a
        # microbatch that does work on deeper stages then
        fits = _most(limit - min(deeper), left, begun, weights)
        others = [
            item.seconds + _most(limit - item.size, left - 1, begun, weights) for item in (*ahead, *weights)
        ]
        return whole.seconds + max(fits, *(others if left else ()), 0.0)


def _differences(items: list[_Item]) -> list[float]:
    return [last.seconds - first.seconds for first, last in pairwise([_NOTHING, *items])]


def _most(limit: float, microbatches: int, begun: list[_Item], weights: list[_Item]) -> float:
    """At least the most work within a limit: a microbatch has one of `begun`, and any of `weights`.

    By duality of the fractional knapsack: whatever the price of a byte, the limit is worth its price, and each
    microbatch what its best choice earns beyond the price of its bytes.
    """
    if limit < 0 or microbatches < 0:
        return -math.inf
    points = [_NOTHING, *begun, *weights]
    prices = {0.0}
    for one, two in combinations(points, 2):
        if one.size != two.size:
            prices.add(max((two.seconds - one.seconds) / (two.size - one.size), 0.0))

    def total(price: float) -> float:
        best = max(0.0, *(item.seconds - price * item.size for item in begun))
        deferred = sum(max(0.0, item.seconds - price * item.size) for item in weights)
        return limit * price + microbatches * (best + deferred)

    return min(map(total, prices))


# Lower bounds: how short an iteration can be, for every order of the same work.
#
# F, I, W are the seconds of a stage's forward, input gradient (I, or B where
# the backward is not split) and weight gradient (0 where it is not split); a message between stages of one rank
# takes no time. Heads and tails are defined in `penstock.bounds.workload`.
#
#     load          a rank starts after its least head, does all its work, and then a least tail follows
#     one-machine   the same with the heads and tails of every action: the best preemptive order of one rank
#                   (Jackson, Carlier); never less than `load`
#     critical path one microbatch forward and backward through all stages
#     residency     each activation is held until its backward, in limited memory
#     warm-up       a rank idles while its first and its last gradients are computed elsewhere, because it has
#     and drain     memory for few activations (both in `penstock.bounds.lower_bounds`)
#
# A rank's span, and its share of a period, is counted from its own first start to its own last end: heads and
# tails are then chains that begin, and end, on the rank itself. F and I of other ranks are in between, if they
# depend on its F and its I depends on them: its span is no less than what those take on one of these ranks. In
# the steady state a rank's iteration takes no longer than a period, and is followed by the optimizer step.
#
# RECOMPUTE is work of its rank between F and the backward of its stage; where every microbatch of a stage has
# one, it is in the chains too. What is recomputed or offloaded counts in limited memory with the least that it
# holds. Where an order may choose that, so does every microbatch, and no RECOMPUTE is required work.
#
# Each bound says how it is derived; the greatest binds. Where a rank may run overlapped pairs, the work of each
# of its machines (`penstock.bounds.workload`) counts by itself, and chains have the least that a pair takes.
# Before its first backward and after its last forward it has no pairs, so there its all-to-all counts too.


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
        step = work.costs.optimizer_step
        besides = f", and the optimizer step {work.costs.units.time(step)}" if step else ""
        found = [Bound(each.seconds + step, each.name, each.because + besides) for each in found]
    return sorted(found, key=lambda bound: -bound.seconds)  # of equal ones, the simplest comes first


def _load(work: Workload, *, own_span: bool) -> Bound:
    def of(rank: int) -> float:
        return max(
            min(job[0] for job in jobs) + sum(job[1] for job in jobs) + min(job[2] for job in jobs)
            for jobs in work.machines(rank, work.window(rank if own_span else None))
        )

    seconds, rank = worst(work, of)
    waits = "" if own_span else " after its first input"
    time = work.costs.units.time(seconds)
    return Bound(seconds, "load", f"rank {rank}'s own work{waits} already takes {time}")


def _one_machine(work: Workload, *, own_span: bool) -> Bound:
    if own_span:
        return _one_machine_in_spans(work)
    seconds, rank = worst(work, lambda rank: max(map(preemptive, work.machines(rank))))
    time = work.costs.units.time(seconds)
    return Bound(seconds, "one-machine", f"rank {rank}'s own work already takes {time}")


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
                within = "" if rank == spanned else f" between the first and the last step of rank {spanned}"
                because = f"rank {rank}'s own work{within} already takes {work.costs.units.time(seconds)}"
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
    time = work.costs.units.time(seconds)
    because = f"one microbatch, forward and backward through all stages, already takes {time}"
    return Bound(seconds, "critical path", because)


# Bounds from all orders of a few ranks.
#
# The steps of one microbatch on a few ranks as a chain, with all other ranks as delays.
#
# F of their stages come in ascending order, then I in descending order; W follows the I of its stage. Between
# two steps of the chain other ranks take at least the seconds between the heads of the two. A token is a step
# of the chain, or a W that takes time.


@dataclass(frozen=True, eq=False)
class RankChain:
    """What some ranks do for a microbatch, in a chain of stages and without overlapped pairs."""

    work: Workload
    limit: float
    """Bytes per rank."""
    ranks: tuple[int, ...]
    own_span: bool = False
    """Whether to count from the first start to the last end of the rank, which is then the only one."""

    @cached_property
    def stages(self) -> list[int]:
        """Of all these ranks."""
        return sorted(s for rank in self.ranks for s in self.work.placement.stages_of_rank[rank])

    @cached_property
    def deferred(self) -> list[int]:
        """Stages whose W takes time."""
        return [s for s in self.stages if self.work.weight_gradient[s] > 0]

    @cached_property
    def tokens(self) -> list[tuple[str, int]]:
        """Kind and stage: the chain, then W."""
        forward = [("F", s) for s in self.stages]
        return [*forward, *(("I", s) for s in reversed(self.stages)), *(("W", s) for s in self.deferred)]

    @cached_property
    def length(self) -> int:
        """Steps of the chain."""
        return 2 * len(self.stages)

    @cached_property
    def rank(self) -> Ints:
        """Per token: which of the ranks."""
        return np.array([self.ranks.index(self.work.placement.stage_to_rank[s]) for _, s in self.tokens])

    @cached_property
    def needed(self) -> list[int]:
        """Per token: the one that the same microbatch needs; -1 for the first."""
        return [*range(-1, self.length - 1), *(self.tokens.index(("I", s)) for s in self.deferred)]

    def of_rank(self, q: int, kinds: str = "FIW") -> list[int]:
        """The tokens of a rank."""
        return [token for token, (kind, _) in enumerate(self.tokens) if self.rank[token] == q and kind in kinds]

    # --- seconds -----------------------------------------------------------------------------------

    @cached_property
    def window(self) -> Window:
        """Heads and tails."""
        return self.work.window(self.ranks[0] if self.own_span else None)

    @cached_property
    def seconds(self) -> Floats:
        """Per token."""
        launch, work = self.work.costs.launch_overhead, self.work
        of = {"F": work.forward, "I": work.input_gradient, "W": work.weight_gradient}
        return np.array([of[kind][s] + (launch if kind != "W" else 0.0) for kind, s in self.tokens])

    @cached_property
    def spent(self) -> Floats:
        """Per token and rank: its seconds."""
        found = np.zeros((len(self.tokens), len(self.ranks)))
        found[np.arange(len(self.tokens)), self.rank] = self.seconds
        return found

    @cached_property
    def delays(self) -> Floats:
        """Per step of the chain: what other ranks take at least between it and the next one."""
        heads = np.array([self.window[0][kind][s] for kind, s in self.tokens[: self.length]])
        return np.append(np.diff(heads) - self.seconds[: self.length - 1], 0.0)

    @cached_property
    def tails(self) -> Floats:
        """Per token."""
        return np.array([self.window[1][kind][s] for kind, s in self.tokens])

    @cached_property
    def idle(self) -> list[list[tuple[int, float]]]:
        """Per rank: a token and the least seconds without work while not all have done it; -1 for always."""
        found = []
        for q, rank in enumerate(self.ranks):
            least = float(self.tails[self.of_rank(q)].min())
            each = zip(self.of_rank(q, "F"), drains(self.work, rank, self.limit, own_span=self.own_span))
            found.append([(-1, least), *((token, drain) for token, drain in each if drain > least)])
        return found

    # --- memory ------------------------------------------------------------------------------------

    @cached_property
    def changes(self) -> Floats:
        """Per token and rank: bytes taken, or freed."""
        sizes = stage_bytes(self.work.costs, self.work.placement.num_stages, MemoryLine.ACTIVATIONS)
        found = np.zeros((len(self.tokens), len(self.ranks)))
        for token, (kind, s) in enumerate(self.tokens):
            # a W that takes no time is a part of I
            kinds = (Kind.I, Kind.W) if kind == "I" and s not in self.deferred else (Kind(kind),)
            found[token, self.rank[token]] = sum(float(sizes[each.number, s]) for each in kinds)
        return found

    @cached_property
    def taken(self) -> Floats:
        """Per token: bytes that have to be free before it starts; any number of them for I and W."""
        own = self.changes[np.arange(len(self.tokens)), self.rank]
        return np.where([kind == "F" for kind, _ in self.tokens], own, -np.inf)

    @cached_property
    def activation_limits(self) -> Floats:
        """Bytes for activations per rank."""
        return np.array([self.work.activation_limit(r, self.limit) * (1 + _ROUNDING) for r in self.ranks])

    @cached_property
    def in_flight(self) -> int:
        """The most microbatches between the first and the last step of the chain."""
        size, limit = self.changes[0, self.rank[0]], self.activation_limits[self.rank[0]]
        return int(min(self.work.microbatches, limit / size if size else math.inf))

    @cached_property
    def code(self) -> Ints | None:
        """Per token: a number; their products with counts tell apart states of equal sum. None if too many."""
        most = [self.in_flight + 1] * (self.length - 1) + [self.work.microbatches + 1] * len(self.deferred)
        if math.prod(most) >= 1 << 62:
            return None
        found, factor = np.zeros(len(self.tokens), dtype=np.int64), 1
        for token, size in enumerate(most, start=1):
            found[self.needed[token]] += factor
            found[token] -= factor
            factor *= size
        return found


# The least time of any order of a few ranks, with all other ranks as delays: dynamic programming over orders.
#
# Orders are built step by step, sorted by the start of their steps. Microbatches are alike, so each kind of a
# stage runs them in ascending order. A state has
#
#   counts   how many microbatches have done each token: which steps can be next, and what a rank holds, follow
#     times    the last start, a lower limit of the end, when each rank is free, and when each microbatch in
#              flight can do its next step of the chain
#
# Four rules keep the states few, and leave in every layer (all states after the same number of steps) one from
# which an end is reached that is no later than the least:
#
#     dominance  of two states with the same counts, one with no later time is at least as good
#     merging    of too many states with the same counts, similar ones become one with the earliest of each time
#   gaps       no step starts so late that an I or W of its rank could be done before it: done there, it delays
#                nothing, frees memory, and the sum of all starts is less
#     best       a state that cannot end before the best order known is dropped
#
# So the lowest limit of a layer is a bound. Without merging, and with all ranks, it is the optimum.


_CLOCK, _END, _FREE = 0, 1, 2
"""Columns of times: the last start, the lower limit of the end, when the first rank is free."""


@dataclass(frozen=True, eq=False)
class _States:
    """A row per state."""

    counts: Ints
    times: Floats

    def only(self, which: Bools | Ints) -> _States:
        return _States(self.counts[which], self.times[which])


@dataclass(frozen=True, eq=False)
class RankOrders:
    """All orders of the steps of some ranks, each within its memory limit."""

    chain: RankChain
    width: int = 4
    """The most states with the same counts."""

    @property
    def slots(self) -> int:
        """The column of times of the first microbatch in flight."""
        return _FREE + len(self.chain.ranks)

    def least(self, best: float, is_over: Callable[[int], bool]) -> float:
        """A bound on the end, up to `best`, the end of a known order.

        `is_over` is asked with the number of states of each layer.
        """
        chain, bound = self.chain, 0.0
        if (code := chain.code) is None:
            return bound
        width = self.slots + chain.in_flight + 1
        states = _States(np.zeros((1, len(chain.tokens)), np.int64), np.zeros((1, width)))
        states.times[:, _FREE : self.slots] = chain.window[0]["F"][chain.stages[0]]
        for _ in range(chain.work.microbatches * len(chain.tokens)):
            if is_over(len(states.counts)):
                break
            states = self._after(states)
            states.times[:, _END] = self._ends(states)
            states = states.only(states.times[:, _END] < best * (1 - _ROUNDING))
            if not len(states.counts):
                return best
            states = _merged(states, states.counts @ code, self.width)
            bound = max(bound, float(states.times[:, _END].min()))
        return bound

    def _ends(self, states: _States) -> Floats:
        """A lower limit of the end: the work that each rank has left, and what it idles."""
        m = self.chain.work.microbatches
        left = (m - states.counts) @ self.chain.spent
        ends: Floats = states.times[:, _END]
        for q, idle in enumerate(self.chain.idle):
            end = states.times[:, _FREE + q] + left[:, q]
            for token, seconds in idle:
                after = seconds if token < 0 else np.where(states.counts[:, token] < m, seconds, 0.0)
                ends = np.maximum(ends, end + after)
        return ends

    def _after(self, states: _States) -> _States:
        """The states one step later."""
        starts, chain = self._starts(states), self.chain
        allowed = starts < np.inf
        for q in range(len(chain.ranks)):
            backward = [token for token in chain.of_rank(q, "IW") if chain.seconds[token] > 0]
            ends = (starts[:, backward] + chain.seconds[backward]).min(axis=1, initial=np.inf)
            allowed[:, chain.of_rank(q)] &= starts[:, chain.of_rank(q)] < ends[:, None]
        rows, tokens = np.nonzero(allowed)
        following = states.only(rows)
        self._run(following, tokens, starts[rows, tokens])
        return following

    def _starts(self, states: _States) -> Floats:
        """Per state and token: when its next microbatch can start; infinite where none is left or fits."""
        counts, times, chain = states.counts, states.times, self.chain
        before = counts[:, chain.needed]
        before[:, 0] = chain.work.microbatches
        held = (counts @ chain.changes)[:, chain.rank]
        allowed = (counts < before) & (held + chain.taken <= chain.activation_limits[chain.rank])
        starts = np.maximum(times[:, _FREE : self.slots][:, chain.rank], times[:, [_CLOCK]])
        last = counts[:, [chain.length - 1]]
        column = np.minimum(self.slots + counts[:, 1 : chain.length] - last, times.shape[1] - 1)
        ready = np.take_along_axis(times, column, axis=1)
        starts[:, 1 : chain.length] = np.maximum(starts[:, 1 : chain.length], ready)
        return np.where(allowed, starts, np.inf)

    def _run(self, states: _States, tokens: Ints, starts: Floats) -> None:
        """Change the states: each does a step of its next microbatch."""
        counts, times, chain = states.counts, states.times, self.chain
        row, end = np.arange(len(tokens)), starts + chain.seconds[tokens]
        times[:, _CLOCK], times[row, _FREE + chain.rank[tokens]] = starts, end
        times[:, _END] = np.maximum(times[:, _END], end + chain.tails[tokens])
        column = self.slots + counts[row, tokens] - counts[:, chain.length - 1]
        flies, lands = tokens < chain.length - 1, tokens == chain.length - 1
        times[row[flies], column[flies]] = (end + chain.delays[np.minimum(tokens, chain.length - 1)])[flies]
        times[lands, self.slots : -1] = times[lands, self.slots + 1 :]
        counts[row, tokens] += 1
        # nothing starts before the last start, or before a rank is free
        now = np.maximum(starts, times[:, _FREE : self.slots].min(axis=1))[:, None]
        flying = (counts[:, 0] - counts[:, chain.length - 1])[:, None]
        used = np.arange(times.shape[1] - self.slots) < flying
        times[:, self.slots :] = np.where(used, np.maximum(times[:, self.slots :], now), 0.0)


def _merged(states: _States, code: Ints, width: int) -> _States:
    """Without dominated states, and at most `width` with the same code."""
    order = np.lexsort((states.times[:, _FREE], states.times[:, _END], code))
    states, code = states.only(order), code[order]
    kept = ~_dominated(states.times, code, min(2 * width, len(code)))
    states, code = states.only(kept), code[kept]
    is_first = np.r_[True, code[1:] != code[:-1]]
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.r_[starts, len(code)])
    within, sizes = np.arange(len(code)) - np.repeat(starts, sizes), np.repeat(sizes, sizes)
    bucket = within * width // np.maximum(sizes, width)
    first = np.flatnonzero(is_first | np.r_[True, bucket[1:] != bucket[:-1]])
    return _States(states.counts[first], np.minimum.reduceat(states.times, first, axis=0))


def _dominated(times: Floats, code: Ints, most: int) -> Bools:
    """Which states have no earlier time than another with the same code, of those up to `most` rows away."""
    found = np.zeros(len(code), dtype=bool)
    for apart in range(1, most):
        one = np.flatnonzero(code[apart:] == code[:-apart])
        if not len(one):
            break
        two = one + apart
        is_worse = (times[one] <= times[two]).all(axis=1)
        found[two[is_worse]] = True
        found[one[~is_worse & (times[one] >= times[two]).all(axis=1)]] = True
    return found


# Which few ranks have the best bound from all of their orders: one by one, then the best with one more.
#
# A rank alone, with all others as delays, shows what its own memory costs in the warm-up, in the drain and in
# each microbatch between. Two or three ranks show what they cost each other. Each set of ranks gets half of the
# effort that is left at most, so that a set with too many states does not use all of it.


_WIDTHS = (4, 32)
"""States with the same counts, in a first and in a second pass."""
_SHARE = 0.5
"""Of the effort that is left, for the next set of ranks."""


@dataclass(eq=False)
class RankBounds:
    """Bounds from all orders of a few ranks, with a memory limit."""

    work: Workload
    limit: float | None
    objective: str
    states: int = field(default=0, init=False)
    """How many states of orders there were so far."""

    @property
    def applies(self) -> bool:
        """Whether there is a memory limit, and a chain of stages without pairs and memory policies."""
        work = self.work
        policies = work.may_recompute or work.may_offload or any(work.recomputed) or any(work.offloaded)
        plain = work.trains and not work.paired and not policies
        return self.limit is not None and plain and work.stage_graph.is_chain

    @cached_property
    def own_span(self) -> bool:
        """Whether each rank's own span counts: a period is at least a span and the optimizer step."""
        return self.objective != "makespan"

    def bounds(self, best: float, used: Callable[[int], float]) -> Iterator[Bound]:
        """A bound per set of ranks, none above `best`, the value of an order that is known.

        `used` tells the share of the effort that is used, for a number of states.
        """
        besides = self.work.costs.optimizer_step if self.objective == "period" else 0.0
        for width in _WIDTHS if self.applies else ():
            chosen: tuple[int, ...] = ()
            while len(chosen) < (1 if self.own_span else self.work.placement.num_ranks):
                found = []
                for ranks in self._larger(chosen):
                    if used(self.states) >= 1:
                        return
                    seconds = self._least(ranks, width, best - besides, used)
                    found.append((seconds, ranks))
                    yield Bound(seconds + besides, "few ranks", f"no order of {_names(ranks)} takes less")
                    if seconds >= best - besides:
                        return
                chosen = max(found)[1]

    def _larger(self, chosen: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The chosen ranks and another one; the one with most work and idle time first."""
        others = [rank for rank in self._ranks if rank not in chosen]
        return [tuple(sorted((*chosen, rank))) for rank in others]

    @cached_property
    def _ranks(self) -> list[int]:
        assert self.limit is not None
        seconds = [
            busy_and_idle(self.work, rank, self.limit, own_span=self.own_span)
            for rank in range(self.work.placement.num_ranks)
        ]
        return sorted(range(len(seconds)), key=lambda rank: -seconds[rank])

    def _least(self, ranks: tuple[int, ...], width: int, best: float, used: Callable[[int], float]) -> float:
        assert self.limit is not None
        before = used(self.states)
        until = before + _SHARE * (1 - before)

        def is_over(states: int) -> bool:
            self.states += states
            return used(self.states) >= until

        return RankOrders(RankChain(self.work, self.limit, ranks, self.own_span), width).least(best, is_over)


def _names(ranks: tuple[int, ...]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
