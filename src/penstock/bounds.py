"""Lower bounds: how short an iteration can be, for every order of the same work, and within a memory limit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.effects import held_bytes
from penstock.cost.memory import activation_bytes, fixed_bytes_of, stage_bytes
from penstock.cost.prices import StreamSeconds, edge_prices, pair_seconds, stream_seconds
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule

OBJECTIVES = ("makespan", "span", "period")
"""What to minimize (defined in `penstock.simulation.timeline`)."""
_ROUNDING = 1e-9

# Workload: what has to be done whatever the order, and the longest chains of it before and after each action.
#
# head     of an action: the longest chain of work that has to end before it can start
# tail     of an action: the longest chain of work that can only start once it has ended
# machine  what does one thing at a time: a rank that runs step after step; where it may run overlapped
#          pairs, its compute stream, its all-to-all stream, its forwards and its backwards each by themselves


_NEVER = float("-inf")

Chains = dict[str, list[float]]
"""Heads or tails: for F, I (or B) and W, per stage."""
Window = tuple[Chains, Chains]
"""Heads and tails."""
Jobs = list[tuple[float, float, float]]
"""Head, seconds and tail of all microbatches of each kind and stage of a rank."""


@dataclass(frozen=True)
class Workload:
    """What has to be done, whatever the order."""

    placement: Placement
    microbatches: int
    costs: Costs
    trains: bool = True
    split: bool = True
    """Whether a backward may be done as I and W."""
    paired: bool = False
    """Whether a forward and a backward may run as an overlapped pair."""
    graph: StageGraph | None = None
    """Which stage feeds which; a chain unless given."""
    recomputed: tuple[int, ...] = ()
    """Per stage: how many microbatches have a RECOMPUTE; none unless given."""
    offloaded: tuple[int, ...] = ()
    """Per stage: how many microbatches have an OFFLOAD; none unless given."""
    may_recompute: bool = False
    """Whether an order may recompute any microbatch: that relieves memory, and its time is no required work."""
    may_offload: bool = False

    @cached_property
    def stage_graph(self) -> StageGraph:
        """Which stage feeds which."""
        return self.graph or StageGraph.chain(self.placement.num_stages)

    @cached_property
    def _streams(self) -> StreamSeconds:
        return stream_seconds(self.costs, self.placement.num_stages)

    @cached_property
    def _steps(self) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: seconds of the shortest step that does it."""
        seconds = self._streams.alone
        if self.paired:  # a pair takes as long as one beside nothing, or as its fixed cost
            nothing = StreamSeconds(*(np.zeros(seconds.shape[1]),) * 3)
            for kind in (Kind.F, Kind.I, Kind.B):
                together = pair_seconds(self.costs, self._streams.of(kind.number, slice(None)), nothing)
                seconds[kind.number] = np.minimum(seconds[kind.number], together)
        return self._least(seconds)

    def _least(self, seconds: Floats) -> dict[str, list[float]]:
        """For F, I (or B) and W: the least seconds, of those per kind and stage, in which all of it is done.

        I is the shortest action that computes the input gradient, W what must be done besides it.
        """
        forward, i, w, b = (seconds[kind.number] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))
        first = np.minimum(i, b) if self.split else b
        rest = np.maximum(np.minimum(i + w, b) - first, 0.0) if self.split else np.zeros_like(b)
        return {"F": forward.tolist(), "I": first.tolist(), "W": rest.tolist()}

    @property
    def forward(self) -> list[float]:
        """F per stage."""
        return self._steps["F"]

    @property
    def input_gradient(self) -> list[float]:
        """Per stage: the shortest action that computes the input gradient, I or B."""
        return self._steps["I"]

    @property
    def weight_gradient(self) -> list[float]:
        """Per stage: what must be done of a backward besides the input gradient."""
        return self._steps["W"]

    @cached_property
    def recompute(self) -> list[float]:
        """Per stage: RECOMPUTE with its launch, where any microbatch has one."""
        seconds = self._streams.alone[Kind.RECOMPUTE.number] + self.costs.launch_overhead
        counts = self.recomputed or (0,) * self.placement.num_stages
        return [float(each) if count else 0.0 for each, count in zip(seconds, counts)]

    @cached_property
    def _always_recomputed(self) -> list[float]:
        """Per stage: RECOMPUTE with its launch, where every microbatch has one."""
        counts = self.recomputed or (0,) * self.placement.num_stages
        return [each if count == self.microbatches else 0.0 for each, count in zip(self.recompute, counts)]

    @cached_property
    def _hops(self) -> dict[str, list[float]]:
        """Per value and edge: seconds of a message on a free channel; 0 between stages of one rank."""
        rank_of_stage = np.array(self.placement.stage_to_rank)
        source, target = self.stage_graph.ends
        apart = rank_of_stage[source] != rank_of_stage[target]
        prices = {v: edge_prices(self.costs, self.stage_graph, v).total for v in ("activation", "gradient")}
        prices["activation"] = prices["activation"][self.stage_graph.carriers(rank_of_stage)]
        return {value: np.where(apart, seconds, 0.0).tolist() for value, seconds in prices.items()}

    def _hop(self, value: str, source: int, target: int) -> float:
        return self._hops[value][self.stage_graph.number[source, target]]

    def _pair_factor(self, rank: int, stream: Floats) -> float:
        """The least ratio of an overlapped pair on a rank to the seconds of its parts on one stream."""
        own = list(self.placement.stages_of_rank[rank])
        forward, back = (np.repeat(own, 2 * len(own)), np.tile(own, 2 * len(own)))
        kinds = np.tile(np.repeat([Kind.B.number, Kind.I.number], len(own)), len(own))
        together = pair_seconds(
            self.costs, self._streams.of(Kind.F.number, forward), self._streams.of(kinds, back)
        )
        apart = stream[Kind.F.number, forward] + stream[kinds, back]
        return float(min(1.0, (together[apart > 0] / apart[apart > 0]).min(initial=1.0)))

    @cached_property
    def heads(self) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: from the first start on any rank."""
        return self._heads_from([True] * self.placement.num_stages)

    def heads_on(self, rank: int) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: chains that begin on this rank."""
        if self.stage_graph.is_chain:  # the chains from its first stage are the longest
            first, own = self.first_head(rank), self.placement.stages_of_rank[rank][0]
            found = {kind: [head - first for head in heads] for kind, heads in self.heads.items()}
            return found | {"F": [_NEVER] * own + found["F"][own:]}
        return self._heads_from([own == rank for own in self.placement.stage_to_rank])

    def _heads_from(self, begins: list[bool]) -> dict[str, list[float]]:
        """The longest chains that begin with F of one of these stages."""
        graph, launch = self.stage_graph, self.costs.launch_overhead
        forward = [0.0] * self.placement.num_stages
        for s in graph.forward_order:
            arrivals = (
                forward[u] + self.forward[u] + launch + self._hop("activation", u, s) for u in graph.inputs(s)
            )
            forward[s] = max([0.0 if begins[s] else _NEVER, *arrivals])
        back = [0.0] * self.placement.num_stages
        for s in reversed(graph.forward_order):
            arrivals = (
                back[t] + self.input_gradient[t] + launch + self._hop("gradient", s, t)
                for t in graph.outputs(s)
            )
            back[s] = max([forward[s] + self.forward[s] + launch + self._always_recomputed[s], *arrivals])
        return {"F": forward, "I": back, "W": [b + i for b, i in zip(back, self.input_gradient)]}

    @cached_property
    def tails(self) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: up to the last end on any rank."""
        return self.tails_on(None)

    def tails_on(self, rank: int | None) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: up to the last end on one rank, or on any."""
        graph, launch = self.stage_graph, self.costs.launch_overhead
        here = [rank is None or own == rank for own in self.placement.stage_to_rank]
        back = [_NEVER] * self.placement.num_stages
        for s in graph.forward_order if self.trains else ():
            after = (
                self._hop("gradient", u, s) + self.input_gradient[u] + launch + back[u] for u in graph.inputs(s)
            )
            back[s] = max([max(0.0, self.weight_gradient[s]) if here[s] else _NEVER, *after])
        forward = [_NEVER] * self.placement.num_stages
        for s in reversed(graph.forward_order):
            after = (
                self._hop("activation", s, t) + self.forward[t] + launch + forward[t] for t in graph.outputs(s)
            )
            last = self._always_recomputed[s] + self.input_gradient[s] + launch
            own = last + back[s] if self.trains else _NEVER
            forward[s] = max([0.0 if here[s] else _NEVER, own, *after])
        return {"F": forward, "I": back, "W": [0.0 if each else _NEVER for each in here]}

    def first_head(self, rank: int) -> float:
        """The least head of a rank's work."""
        return min(self.heads["F"][s] for s in self.placement.stages_of_rank[rank])

    def window(self, rank: int | None) -> Window:
        """Heads and tails: all of them, or those from the first start to the last end of one rank."""
        return (self.heads, self.tails) if rank is None else (self.heads_on(rank), self.tails_on(rank))

    def machines(self, rank: int, window: Window | None = None) -> list[Jobs]:
        """The jobs of each machine of a rank, those that have to be done in a window."""
        heads, tails = window or self.window(None)
        launch = self.costs.launch_overhead

        def jobs(seconds: dict[str, list[float]], kinds: str, factor: float, extra: float) -> Jobs:
            return [
                (
                    heads[kind][s],
                    self.microbatches * (seconds[kind][s] * factor + (extra if kind != "W" else 0.0)),
                    tails[kind][s],
                )
                for kind in kinds
                for s in self.placement.stages_of_rank[rank]
                if heads[kind][s] > _NEVER and tails[kind][s] > _NEVER
            ]

        kinds = "FIW" if self.trains else "F"
        again = self._recomputations(rank, heads, tails)
        if not self.paired:
            return [jobs(self._steps, kinds, 1.0, launch) + again]
        streams = (self._streams.compute, self._streams.all_to_all)
        found = [
            jobs(self._least(each), kinds, self._pair_factor(rank, each), launch / 2) + again
            for each in streams
        ]
        # RECOMPUTE is counted with its all-to-all, so what is exposed may be counted already
        if self.trains and not any(self.recompute[s] for s in self.placement.stages_of_rank[rank]):
            found[0] += self._exposed(rank, heads, tails, sum(job[1] for job in found[0]))
        return [*found, *(jobs(self._steps, each, 1.0, launch) + again for each in ("F", kinds[1:]) if each)]

    def _recomputations(self, rank: int, heads: Chains, tails: Chains) -> Jobs:
        """RECOMPUTE of a rank's stages as jobs of every machine: no pair contains it, so it runs by itself."""
        launch = self.costs.launch_overhead
        return [
            (
                heads["F"][s] + self.forward[s] + launch,
                self.recomputed[s] * self.recompute[s],
                self.input_gradient[s] + launch + tails["I"][s],
            )
            for s in self.placement.stages_of_rank[rank]
            if self.recompute[s] and min(heads["F"][s], tails["I"][s]) > _NEVER
        ]

    def _exposed(self, rank: int, heads: Chains, tails: Chains, work: float) -> Jobs:
        """Seconds without compute before a rank's first backward and after its last forward, as jobs.

        There are no pairs then: the rank idles, or runs steps by themselves, which expose their all-to-all.
        `work` is the compute of the rank.
        """
        own = self.placement.stages_of_rank[rank]
        first, back = (min(heads[kind][s] for s in own) for kind in "FI")
        last = min(tails["F"][s] for s in own)
        ends = {kind: min(tails[kind][s] for s in own) for kind in ("IW" if self.split else "I")}
        end = min(ends.values())
        before = self._least_exposed((Kind.F,), own) * (back - first)
        after = self._least_exposed((Kind.I, Kind.W, Kind.B) if self.split else (Kind.B,), own) * (last - end)
        found = [(first, before, min(last, ends["I"])), (first, after, end)]
        if first + work + end - last >= back:  # the two times do not coincide
            return found
        return [max(found, key=lambda job: job[1])]

    def _least_exposed(self, kinds: tuple[Kind, ...], stages: tuple[int, ...]) -> float:
        """The least share of all-to-all in steps of these kinds by themselves."""
        numbers = np.ix_([kind.number for kind in kinds], stages)
        whole = self._streams.alone[numbers] + self.costs.launch_overhead
        takes_time = whole > 0
        return float((self._streams.all_to_all[numbers][takes_time] / whole[takes_time]).min(initial=1.0))

    def seconds_of(self, rank: int) -> float:
        """All the work of a rank."""
        return max(sum(job[1] for job in jobs) for jobs in self.machines(rank))

    def round_trip(self, stage: int) -> float:
        """From the start of F to the earliest start of I (or B) of the same microbatch."""
        if self.stage_graph.is_chain:
            return self.heads["I"][stage] - self.heads["F"][stage]
        # without what only other sources wait for: F may start later than its head
        return self._heads_from([s == stage for s in range(self.placement.num_stages)])["I"][stage]

    def activation_limit(self, rank: int, limit: float) -> float:
        """Bytes that a memory limit leaves for activations."""
        own = self.placement.stages_of_rank[rank]
        return max(limit - fixed_bytes_of(self.costs, own, self.placement.num_stages), 0.0)


def gap_of(value: float, bound: float) -> float:
    """The excess of a value over its lower bound, as a share of the bound; 0 proves it optimal."""
    if not bound:
        return math.inf if value else 0.0
    gap = value / bound - 1
    return 0.0 if gap < _ROUNDING else gap


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can take less than `seconds`."""

    seconds: float
    name: str
    because: str

    def gap(self, seconds: float) -> float:
        """How much longer than the bound this is, as a share of the bound; 0 is a proof of optimality."""
        return gap_of(seconds, self.seconds)

    def verdict(self, seconds: float) -> str:
        """Return what the bound says about an order that takes `seconds`, and why."""
        gap = self.gap(seconds)
        known = f"gap <= {gap:.1%}" if math.isfinite(gap) else "the gap is unknown"
        return f"{known if gap else 'proved optimal'}: {self.because}"


def _worst(work: Workload, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank


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


def _residency(work: Workload, limit: float, *, own_span: bool) -> Bound:
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

    seconds, rank = _worst(work, of)
    because = (
        f"rank {rank} may hold {work.costs.units.memory(limit)}, and each activation is held until its backward"
    )
    return Bound(seconds, "residency", because)


def _warm_up_and_drain(work: Workload, limit: float, *, own_span: bool) -> Bound:
    """A rank idles while its first and its last gradients are computed elsewhere."""
    seconds, rank = _worst(work, lambda rank: _Rank(work, rank, limit, own_span).seconds)
    because = f"rank {rank} lacks work while its first and its last gradients are computed elsewhere"
    return Bound(seconds, "warm-up and drain", because)


class _Item(NamedTuple):
    """Seconds of work that a rank can do for the bytes it holds."""

    size: float
    seconds: float


_NOTHING = _Item(0.0, 0.0)


class _Rank:
    """One rank; seconds of work are those that `Workload.machines` counts.

    With `own_span`, they count from the rank's own first start to its own last end.
    """

    def __init__(self, work: Workload, rank: int, limit: float, own_span: bool) -> None:  # noqa: FBT001
        self.work, self.rank, self.limit = work, rank, limit
        self.window = work.window(rank if own_span else None)
        self.own = own = work.placement.stages_of_rank[rank]
        # how many stages are ahead of a cut; on another graph than a chain only all of them
        self.cuts = range(1 if work.stage_graph.is_chain else len(own), len(own) + 1)
        # F and the backward, each with the RECOMPUTE that may come after or before it
        extra = [work.recompute[s] + work.costs.launch_overhead for s in own]
        self.forward = [work.forward[s] + more for s, more in zip(own, extra)]
        back = [work.input_gradient[s] + work.weight_gradient[s] for s in own]
        self.backward = [seconds + more for seconds, more in zip(back, extra)]
        least = _least_held(work)
        self.sizes = [float(least[s]) for s in own]
        kept = activation_bytes(work.costs, work.placement.num_stages).after_input_gradient
        deferred = [s for s in own if work.split and work.weight_gradient[s]]
        self.weights = [_Item(float(kept[s]), work.weight_gradient[s]) for s in deferred]

    @property
    def seconds(self) -> float:
        """All its work, and what it idles at least before, between and after."""
        return max(self._seconds_of(jobs) for jobs in self.work.machines(self.rank, self.window))

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

    def deeper(self, cut: int) -> float:
        """All work of the stages behind the cut for one microbatch."""
        again = sum(self.work.recompute[s] for s in self.own[cut:])
        return sum(self.forward[cut:]) + sum(self.backward[cut:]) - again

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
        return self._idle(cut, self.window[0]["I"], self.forward, [])

    def drain(self, cut: int) -> float:
        """Seconds without work after the last F ahead of the cut ends."""
        return self._idle(cut, self.window[1]["F"], self.backward, self.weights)

    def _idle(self, cut: int, ends: list[float], seconds: list[float], weights: list[_Item]) -> float:
        # a microbatch on the first 1, 2, ... stages
        ahead = list(map(_Item, accumulate(self.sizes[:cut]), accumulate(seconds[:cut])))
        begun = [*ahead[:-1], _Item(ahead[-1].size, ahead[-1].seconds + self.deeper(cut))]
        return min(ends[s] for s in self.own[:cut]) - self._most_work(cut, begun, ahead, weights)

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


# Closed forms.
#
# F, I, W are the seconds of a stage's forward, input gradient (I, or B where the backward is not split) and
# weight gradient (0 where it is not split); a message between stages of one rank takes no time.
#
#     load          a rank starts after its least head, does all its work, and then a least tail follows
#     one-machine   the same with the heads and tails of every action: the best preemptive order of one rank
#                   (Jackson, Carlier); never less than `load`
#     critical path one microbatch forward and backward through all stages
#     residency     each activation is held until its backward, in limited memory
#     warm-up       a rank idles while its first and its last gradients are computed elsewhere, because it has
#     and drain     memory for few activations
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
# of its machines counts by itself, and chains have the least that a pair takes.
# Before its first backward and after its last forward it has no pairs, so there its all-to-all counts too.


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
        found += [bound(work, memory_limit, own_span=own_span) for bound in (_residency, _warm_up_and_drain)]
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

    seconds, rank = _worst(work, of)
    waits = "" if own_span else " after its first input"
    time = work.costs.units.time(seconds)
    return Bound(seconds, "load", f"rank {rank}'s own work{waits} already takes {time}")


def _one_machine(work: Workload, *, own_span: bool) -> Bound:
    if own_span:
        return _one_machine_in_spans(work)
    seconds, rank = _worst(work, lambda rank: max(map(preemptive, work.machines(rank))))
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
#
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


class RankOrders:
    """All orders of the steps of some ranks, in a chain of stages and without overlapped pairs.

    With `own_span`, time counts from the first start to the last end of the rank, which is then the only one.
    """

    def __init__(self, work: Workload, limit: float, ranks: tuple[int, ...], own_span: bool = False) -> None:  # noqa: FBT001, FBT002
        """Tabulate the tokens: steps of the chain, then the W that take time."""
        self.work, self.ranks = work, ranks
        self.stages = sorted(s for rank in ranks for s in work.placement.stages_of_rank[rank])
        self.deferred = [s for s in self.stages if work.weight_gradient[s] > 0]
        self.length = 2 * len(self.stages)  # steps of the chain
        chain = [*(("F", s) for s in self.stages), *(("I", s) for s in reversed(self.stages))]
        self.tokens = [*chain, *(("W", s) for s in self.deferred)]
        # per token: which of the ranks; the token that the same microbatch needs, -1 for the first
        self.rank = np.array([ranks.index(work.placement.stage_to_rank[s]) for _, s in self.tokens])
        self.needed = [*range(-1, self.length - 1), *(self.tokens.index(("I", s)) for s in self.deferred)]
        # per token: seconds, also by rank; its tail
        self.window = work.window(ranks[0] if own_span else None)
        of = {"F": work.forward, "I": work.input_gradient, "W": work.weight_gradient}
        launch, by_rank = work.costs.launch_overhead, (np.arange(len(self.tokens)), self.rank)
        self.seconds = np.array([of[kind][s] + (launch if kind != "W" else 0.0) for kind, s in self.tokens])
        self.spent = np.zeros((len(self.tokens), len(ranks)))
        self.spent[by_rank] = self.seconds
        self.tails = np.array([self.window[1][kind][s] for kind, s in self.tokens])
        # per step of the chain: what other ranks take at least between it and the next one
        heads = np.array([self.window[0][kind][s] for kind, s in chain])
        self.delays = np.append(np.diff(heads) - self.seconds[: self.length - 1], 0.0)
        # per token: bytes that its rank takes or frees, and that have to be free before it starts
        sizes = stage_bytes(work.costs, work.placement.num_stages, MemoryLine.ACTIVATIONS)
        self.changes = np.zeros_like(self.spent)
        for token, (kind, s) in enumerate(self.tokens):
            # a W that takes no time is a part of I
            kinds = (Kind.I, Kind.W) if kind == "I" and s not in self.deferred else (Kind(kind),)
            self.changes[token, self.rank[token]] = sum(float(sizes[each.number, s]) for each in kinds)
        own = self.changes[by_rank]
        self.taken = np.where([kind == "F" for kind, _ in self.tokens], own, -np.inf)
        self.activation_limits = np.array([work.activation_limit(r, limit) * (1 + _ROUNDING) for r in ranks])
        # the most microbatches between the first and the last step of the chain
        room = self.activation_limits[self.rank[0]] / own[0] if own[0] else math.inf
        self.in_flight = int(min(work.microbatches, room))
        self.idle = [self._idle(q, _Rank(work, rank, limit, own_span)) for q, rank in enumerate(ranks)]

    def _idle(self, q: int, rank: _Rank) -> list[tuple[int, float]]:
        """A token and the least seconds without work while not all have done it; -1 for always."""
        least = float(self.tails[self.of_rank(q)].min())
        drains = zip(self.of_rank(q, "F"), map(rank.drain, rank.cuts))
        return [(-1, least), *((token, drain) for token, drain in drains if drain > least)]

    def of_rank(self, q: int, kinds: str = "FIW") -> list[int]:
        """The tokens of a rank."""
        return [token for token, (kind, _) in enumerate(self.tokens) if self.rank[token] == q and kind in kinds]

    @property
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

    # --- orders ------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """The column of times of the first microbatch in flight."""
        return _FREE + len(self.ranks)

    def least(self, width: int, best: float, is_over: Callable[[int], bool]) -> float:
        """A bound on the end, up to `best`, the end of a known order; with at most `width` states per counts.

        `is_over` is asked with the number of states of each layer.
        """
        bound = 0.0
        if (code := self.code) is None:
            return bound
        columns = self.slots + self.in_flight + 1
        states = _States(np.zeros((1, len(self.tokens)), np.int64), np.zeros((1, columns)))
        states.times[:, _FREE : self.slots] = self.window[0]["F"][self.stages[0]]
        for _ in range(self.work.microbatches * len(self.tokens)):
            if is_over(len(states.counts)):
                break
            states = self._after(states)
            states.times[:, _END] = self._ends(states)
            states = states.only(states.times[:, _END] < best * (1 - _ROUNDING))
            if not len(states.counts):
                return best
            states = _merged(states, states.counts @ code, width)
            bound = max(bound, float(states.times[:, _END].min()))
        return bound

    def _ends(self, states: _States) -> Floats:
        """A lower limit of the end: the work that each rank has left, and what it idles."""
        m = self.work.microbatches
        left = (m - states.counts) @ self.spent
        ends: Floats = states.times[:, _END]
        for q, idle in enumerate(self.idle):
            end = states.times[:, _FREE + q] + left[:, q]
            for token, seconds in idle:
                after = seconds if token < 0 else np.where(states.counts[:, token] < m, seconds, 0.0)
                ends = np.maximum(ends, end + after)
        return ends

    def _after(self, states: _States) -> _States:
        """The states one step later."""
        starts = self._starts(states)
        allowed = starts < np.inf
        for q in range(len(self.ranks)):
            backward = [token for token in self.of_rank(q, "IW") if self.seconds[token] > 0]
            ends = (starts[:, backward] + self.seconds[backward]).min(axis=1, initial=np.inf)
            allowed[:, self.of_rank(q)] &= starts[:, self.of_rank(q)] < ends[:, None]
        rows, tokens = np.nonzero(allowed)
        following = states.only(rows)
        self._run(following, tokens, starts[rows, tokens])
        return following

    def _starts(self, states: _States) -> Floats:
        """Per state and token: when its next microbatch can start; infinite where none is left or fits."""
        counts, times = states.counts, states.times
        before = counts[:, self.needed]
        before[:, 0] = self.work.microbatches
        held = (counts @ self.changes)[:, self.rank]
        allowed = (counts < before) & (held + self.taken <= self.activation_limits[self.rank])
        starts = np.maximum(times[:, _FREE : self.slots][:, self.rank], times[:, [_CLOCK]])
        last = counts[:, [self.length - 1]]
        column = np.minimum(self.slots + counts[:, 1 : self.length] - last, times.shape[1] - 1)
        ready = np.take_along_axis(times, column, axis=1)
        starts[:, 1 : self.length] = np.maximum(starts[:, 1 : self.length], ready)
        return np.where(allowed, starts, np.inf)

    def _run(self, states: _States, tokens: Ints, starts: Floats) -> None:
        """Change the states: each does a step of its next microbatch."""
        counts, times = states.counts, states.times
        row, end = np.arange(len(tokens)), starts + self.seconds[tokens]
        times[:, _CLOCK], times[row, _FREE + self.rank[tokens]] = starts, end
        times[:, _END] = np.maximum(times[:, _END], end + self.tails[tokens])
        column = self.slots + counts[row, tokens] - counts[:, self.length - 1]
        flies, lands = tokens < self.length - 1, tokens == self.length - 1
        times[row[flies], column[flies]] = (end + self.delays[np.minimum(tokens, self.length - 1)])[flies]
        times[lands, self.slots : -1] = times[lands, self.slots + 1 :]
        counts[row, tokens] += 1
        # nothing starts before the last start, or before a rank is free
        now = np.maximum(starts, times[:, _FREE : self.slots].min(axis=1))[:, None]
        flying = (counts[:, 0] - counts[:, self.length - 1])[:, None]
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


def rank_bounds(
    work: Workload, limit: float | None, objective: str, best: float, used: Callable[[int], float]
) -> Iterator[Bound]:
    """Yield a bound per set of ranks, none above `best`, the value of an order that is known.

    `used` tells the share of the effort that is used, for a number of states. Bounds need a memory limit, and a
    chain of stages without overlapped pairs and memory policies.
    """
    policies = work.may_recompute or work.may_offload or any(work.recomputed) or any(work.offloaded)
    if limit is None or not work.trains or work.paired or policies or not work.stage_graph.is_chain:
        return
    own_span = objective != "makespan"  # a period is at least a span and the optimizer step
    besides = work.costs.optimizer_step if objective == "period" else 0.0
    seconds_of = [_Rank(work, rank, limit, own_span).seconds for rank in range(work.placement.num_ranks)]
    by_seconds = sorted(range(len(seconds_of)), key=lambda rank: -seconds_of[rank])
    states = 0
    until = 0.0

    def is_over(more: int) -> bool:
        nonlocal states
        states += more
        return used(states) >= until

    for width in _WIDTHS:
        chosen: tuple[int, ...] = ()
        while len(chosen) < (1 if own_span else len(by_seconds)):
            found = []
            for another in (rank for rank in by_seconds if rank not in chosen):
                if (before := used(states)) >= 1:
                    return
                until = before + _SHARE * (1 - before)
                ranks = tuple(sorted((*chosen, another)))
                seconds = RankOrders(work, limit, ranks, own_span).least(width, best - besides, is_over)
                found.append((seconds, ranks))
                yield Bound(seconds + besides, "few ranks", f"no order of {_names(ranks)} takes less")
                if seconds >= best - besides:
                    return
            chosen = max(found)[1]


def _names(ranks: tuple[int, ...]) -> str:
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
