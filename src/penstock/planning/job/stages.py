"""Stages of a layout as sums over arrays: partition, lower bound on the step, lower bound on the memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise

import numpy as np

from penstock.cost.estimate.estimate import Estimate
from penstock.cost.memory import LiveActivations
from penstock.ir.encoding import Floats, Ints
from penstock.ir.placement import Placement
from penstock.planning.estimated import even_blocks
from penstock.planning.job.family_traits import Traits
from penstock.planning.partition import LayerCounts, move_layer

_HALVINGS, _MOVES = 16, 8
_BALANCED = 1.01
"""The busiest rank over the mean one from which on layers are moved."""
_ROUNDING = 1e-9


class Stages:
    """The layers of an estimate, to be divided into stages in many ways."""

    def __init__(self, found: Estimate) -> None:
        self.estimate = found
        kinds = found.config.kinds
        rows = {kind: _row(found, kind) for kind in found.by_kind}
        table = np.array([rows[kind] for kind in kinds]).T
        self._compute, self._exchanged = table[0:2], table[2:4]
        """Seconds of the forward and the whole backward, per layer."""
        self._state, self._activation, self._working, self._freed = table[4:8]
        self._counts: dict[int, LayerCounts] = {}

    @cached_property
    def _until(self) -> list[float]:
        """Seconds of the layers before each."""
        loads = self._compute.sum(axis=0) + self._exchanged.sum(axis=0)
        return [0.0, *np.cumsum(loads).tolist()]

    def counts(self, stages: int) -> LayerCounts:
        """Blocks evenly, or layers in order with the longest stage as short as found, if that is shorter."""
        if stages not in self._counts:
            even, packed = even_blocks(self.estimate, stages), self._packed(stages)
            is_even = packed is None or self._longest(even) <= self._longest(packed) * (1 + _ROUNDING)
            self._counts[stages] = even if packed is None or is_even else packed
        return self._counts[stages]

    def partition(self, traits: Traits, ranks: int, microbatches: int) -> tuple[float, LayerCounts]:
        """The partition with the least bound that was found, and that bound.

        With several stages per rank the longest stage may be on the busiest rank. Its layers are moved to the
        rank with the least to do, as long as that lowers the bounds.
        """
        counts = self.counts(ranks * traits.stages_per_rank)
        best = self._rank_bounds(counts, traits, ranks, microbatches)
        own = _own_stages(ranks, traits.stages_per_rank, is_v=traits.is_v)
        for _ in range(_MOVES if traits.stages_per_rank > 1 else 0):
            if best.max() < best.mean() * _BALANCED:
                break
            sources, targets = own[best.argmax()][[0, -1]], own[best.argmin()][[0, -1]]
            moves = [move_layer(counts, s, t) for s in sources for t in targets if counts[s] > 1 and s != t]
            tried = [(self._rank_bounds(each, traits, ranks, microbatches), each) for each in moves]
            found = min(tried, key=lambda each: _key(each[0]), default=None)
            if found is None or _key(found[0]) >= _key(best):
                break
            best, counts = found
        return float(best.max()), counts

    def _longest(self, counts: LayerCounts) -> float:
        ends = [self._until[end] for end in (0, *accumulate(counts))]
        return max(b - a for a, b in pairwise(ends))

    def _packed(self, stages: int) -> LayerCounts | None:
        """Stages filled one after the other up to a limit, which is halved towards the least that suffices."""
        until, best = self._until, None
        largest = max(b - a for a, b in pairwise(until))
        low = max(largest, until[-1] / stages) * (1 - _ROUNDING)
        high = low + largest
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            counts = _fill(until, stages, middle)
            if counts is None:
                low = middle
            else:
                best, high = counts, middle
        return best

    def layout_bound(self, ranks: int, microbatches: int, *, paired: bool) -> float:
        """Lower bound on the makespan in any stages: the mean rank's work, with all-to-all hidden or not."""
        streams = self._compute.sum(), self._exchanged.sum()
        return microbatches * float(max(streams) if paired else sum(streams)) / ranks

    def bound(self, counts: LayerCounts, traits: Traits, ranks: int, microbatches: int) -> float:
        """Lower bound on the makespan."""
        return float(self._rank_bounds(counts, traits, ranks, microbatches).max())

    def _rank_bounds(self, counts: LayerCounts, traits: Traits, ranks: int, microbatches: int) -> Floats:
        """By each rank: it waits for its first input, works, and its last gradient goes on.

        An overlapped pair hides the shorter of its two streams. With a split backward, weight gradients may be
        all that is left to do at the end, and a pair may hide a part of its backward: nothing is added there.
        """
        starts = np.cumsum([0, *counts[:-1]])
        compute = np.add.reduceat(self._compute, starts, axis=1)
        exchanged = np.add.reduceat(self._exchanged, starts, axis=1)
        forward, backward = compute + exchanged
        before = np.cumsum(forward) - forward
        ends_early = traits.split or traits.paired
        after = np.zeros_like(backward) if ends_early else np.cumsum(backward) - backward
        work = np.array((compute.sum(axis=0), exchanged.sum(axis=0)))
        own = _own_stages(ranks, traits.stages_per_rank, is_v=traits.is_v)
        streams = work[:, own].sum(axis=2)
        busy = streams.max(axis=0) if traits.paired else streams.sum(axis=0)
        bounds: Floats = before[own].min(axis=1) + microbatches * busy + after[own].min(axis=1)
        return bounds

    def mean_state(self, ranks: int) -> float:
        """Bytes of weights, gradients and optimizer state of the mean rank: no partition needs less."""
        return float(self._state.sum()) / ranks

    def least_memory(self, counts: LayerCounts, traits: Traits, ranks: int) -> float:
        """Lower bound on the memory of a rank: its state, and one activation of one of its stages."""
        state, activation, working = self._stage_bytes(counts)
        own = _own_stages(ranks, traits.stages_per_rank, is_v=traits.is_v)
        held: Floats = state[own].sum(axis=1) + (activation + working)[own].max(axis=1)
        return float(held.max())

    def memory_of_1f1b(self, counts: LayerCounts, microbatches: int) -> float:
        """Of the rank with the most, with one stage per rank."""
        state, activation, working = self._stage_bytes(counts)
        live = np.minimum(microbatches, np.arange(len(counts), 0, -1))
        return float((state + live * activation + working).max())

    def state_of(self, counts: LayerCounts) -> float:
        """The most bytes of weights, gradients and optimizer state of a stage."""
        return float(self._stage_bytes(counts)[0].max())

    def working(self, counts: LayerCounts, placement: Placement) -> Floats:
        """Per rank: bytes that a backward needs besides."""
        working = self._stage_bytes(counts)[2]
        most: Floats = working[np.array(placement.stages_of_rank)].max(axis=1)
        return most

    def memory(self, counts: LayerCounts, live: Sequence[LiveActivations]) -> float:
        """The most bytes of a rank with its working memory, given what orders hold, without receive buffers."""
        state, activation, working = self._stage_bytes(counts)
        freed = np.add.reduceat(self._freed, np.cumsum([0, *counts[:-1]]))
        peaks = []
        for each in live:
            own = list(each.stages)
            held = each.most_held([*activation[own], *freed[own]])
            peaks.append(float(state[own].sum() + working[own].max()) + held)
        return max(peaks)

    def _stage_bytes(self, counts: LayerCounts) -> tuple[Floats, Floats, Floats]:
        starts = np.cumsum([0, *counts[:-1]])
        state, activation = (np.add.reduceat(each, starts) for each in (self._state, self._activation))
        return state, activation, np.maximum.reduceat(self._working, starts)


def _key(bounds: Floats) -> tuple[float, float]:
    """The largest first, then all of them; rounded, so that moves end."""
    return round(float(bounds.max()), 9), round(float((bounds**2).sum()), 9)


@cache
def _own_stages(ranks: int, stages_per_rank: int, *, is_v: bool) -> Ints:
    """The stages of each rank."""
    make = Placement.v if is_v else Placement.loop
    return np.array(make(ranks, stages_per_rank).stages_of_rank)


def _row(found: Estimate, kind: str) -> list[float]:
    layer = found.by_kind[kind]
    compute, exchanged = layer.seconds.compute, layer.seconds.all_to_all
    weights = layer.weights
    return [
        compute.forward,
        compute.input_gradient + compute.weight_gradient,
        exchanged.forward,
        exchanged.input_gradient + exchanged.weight_gradient,
        weights.parameters + weights.gradients + weights.optimizer_state,
        layer.operations.activation,
        layer.operations.working,
        layer.operations.freed_by_input,
    ]


def _fill(until: list[float], stages: int, limit: float) -> LayerCounts | None:
    """Layers from the first stage on, none above the limit, one at least for each; None if that leaves some."""
    layers, counts, first = len(until) - 1, [], 0
    for stage in range(stages):
        most = layers - (stages - stage - 1)
        end = min(bisect_right(until, until[first] + limit, first + 1, most + 1) - 1, most)
        if end == first:
            return None
        counts.append(end - first)
        first = end
    return tuple(counts) if first == layers else None
