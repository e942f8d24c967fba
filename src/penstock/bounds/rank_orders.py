"""The least time of any order of a few ranks, with all other ranks as delays: dynamic programming over orders.

Orders are built step by step, sorted by the start of their steps. Microbatches are alike, so each kind of a
stage runs them in ascending order. A state has

    counts   how many microbatches have done each token: which steps can be next, and what a rank holds, follow
    times    the last start, a lower limit of the end, when each rank is free, and when each microbatch in
             flight can do its next step of the chain

Four rules keep the states few, and leave in every layer (all states after the same number of steps) one from
which an end is reached that is no later than the least:

    dominance  of two states with the same counts, one with no later time is at least as good
    merging    of too many states with the same counts, similar ones become one with the earliest of each time
    gaps       no step starts so late that an I or W of its rank could be done before it: done there, it delays
               nothing, frees memory, and the sum of all starts is less
    best       a state that cannot end before the best order known is dropped

So the lowest limit of a layer is a bound. Without merging, and with all ranks, it is the optimum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.bounds.rank_chain import RankChain
from penstock.ir.table import Bools, Floats, Ints

__all__ = ["RankOrders"]

_CLOCK, _END, _FREE = 0, 1, 2
"""Columns of times: the last start, the lower limit of the end, when the first rank is free."""
_ROUNDING = 1e-9


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
        """A bound on the end, up to `best`, that of an order that is known.

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
