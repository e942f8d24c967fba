"""Bounds from all orders of a few ranks, with all other ranks as delays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from penstock.bounds.lower_bounds import busy_and_idle, drains
from penstock.bounds.workload import Bound, Window, Workload
from penstock.cost.memory import stage_bytes
from penstock.ir.encoding import Bools, Floats, Ints
from penstock.ir.kinds import Kind, MemoryLine

# The steps of one microbatch on a few ranks as a chain, with all other ranks as delays.
#
# F of their stages come in ascending order, then I in descending order; W follows the I of its stage. Between
# two steps of the chain other ranks take at least the seconds between the heads of the two. A token is a step
# of the chain, or a W that takes time.


_ROUNDING = 1e-9


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
        """Per token: a number; their products with counts tell apart those of equal sum. None if too many."""
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


# Which few ranks give the best bound from all of their orders: one by one, then the best with one more.
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
        """Whether there is a memory limit, and a chain of stages without pairs and memory techniques."""
        work = self.work
        techniques = work.may_recompute or work.may_offload or any(work.recomputed) or any(work.offloaded)
        plain = work.trains and not work.paired and not techniques
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
