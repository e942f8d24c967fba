"""Bounds from a memory limit per rank: residency, and warm-up and drain.

Residency. An activation of stage s is held for at least L = F + (all between) + I, and what I keeps of it
during W. A rank that may hold K bytes needs at least m * (byte-seconds of one microbatch) / K seconds.

Warm-up and drain. A rank has the stages s1 < s2 < ... < sv. Cut them behind sj:

    warm-up    until its first gradient is back at s1..sj, at the earliest after the head of I of sj, a rank can
               only do F of s1..sj, whose activations it all holds until then, and all the work of deeper stages
               for the same microbatches
    drain      after its last F of s1..sj, and for at least the tail of that F, it can only do I and W of the
               activations that it holds then, and all the work of deeper stages for the same microbatches

What it can do is limited by the bytes it may hold, so it idles the rest of both times. They do not coincide if
the activations of all microbatches on s1..sj do not fit. The greatest sum over all cuts counts, one for each
time. For p ranks with two stages each in a V, room for k activations and F = I = W = 1, the rank with the two
middle stages, cut behind both, gives

    head of its first F + idle in the warm-up + work + idle in the drain and after it
    (p - 1)             + (2p - k)            + 6m   + (3p - 2k)                      = 6m + 6p - 1 - 3k
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import NamedTuple

import numpy as np

from penstock.bounds.bound import Bound, worst
from penstock.bounds.workload import Jobs, Window, Workload
from penstock.cost.effects import held_bytes
from penstock.cost.memory import activation_bytes, fixed_bytes_of
from penstock.ir.kinds import Kind
from penstock.ir.table import Floats

__all__ = ["busy_and_idle", "drains", "least_needed", "residency", "warm_up_and_drain"]

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
