"""Workload: what has to be done whatever the order; Bound: seconds that no order can beat, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.memory import fixed_bytes_of
from penstock.cost.prices import StreamSeconds, edge_prices, pair_seconds, stream_seconds
from penstock.ir.encoding import Floats
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement

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
        hosts = np.array(self.placement.stage_to_rank)
        source, target = self.stage_graph.ends
        apart = hosts[source] != hosts[target]
        prices = {v: edge_prices(self.costs, self.stage_graph, v).total for v in ("activation", "gradient")}
        prices["activation"] = prices["activation"][self.stage_graph.carriers(hosts)]
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
        return self._heads_from([host == rank for host in self.placement.stage_to_rank])

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
        here = [rank is None or host == rank for host in self.placement.stage_to_rank]
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


# Bound: a number of seconds that no order of the work can beat, and why.


_ROUNDING = 1e-9


@dataclass(frozen=True, order=True)
class Bound:
    """No order of the work can take less than `seconds`."""

    seconds: float
    name: str
    because: str

    def gap(self, seconds: float) -> float:
        """How much longer than the bound this is, as a share of the bound; 0 is a proof of optimality."""
        gap = seconds / self.seconds - 1 if self.seconds else 0.0
        return 0.0 if abs(gap) < _ROUNDING else gap

    def verdict(self, seconds: float) -> str:
        """Return what the bound says about an order that takes `seconds`, and why."""
        gap = self.gap(seconds)
        return f"{f'gap <= {gap:.1%}' if gap else 'proved optimal'}: {self.because}"


def worst(work: Workload, of: Callable[[int], float]) -> tuple[float, int]:
    """The greatest over ranks, and the rank."""
    seconds, rank = max((of(rank), -rank) for rank in range(work.placement.num_ranks))
    return seconds, -rank
