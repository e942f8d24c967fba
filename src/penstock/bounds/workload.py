"""Workload: what has to be done whatever the order, and the longest chains of it before and after each action.

head     of an action: the longest chain of work that has to end before it can start
tail     of an action: the longest chain of work that can only start once it has ended
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.memory import fixed_bytes_of
from penstock.cost.prices import action_seconds, edge_prices, pair_seconds
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement
from penstock.ir.table import Floats

__all__ = ["Workload"]

_NEVER = float("-inf")


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

    @cached_property
    def stage_graph(self) -> StageGraph:
        """Which stage feeds which."""
        return self.graph or StageGraph.chain(self.placement.num_stages)

    @cached_property
    def _seconds(self) -> Floats:
        return action_seconds(self.costs, self.placement.num_stages)

    @cached_property
    def forward(self) -> list[float]:
        """F per stage."""
        return self._least_in_pair(self._seconds[Kind.F.number])

    @cached_property
    def input_gradient(self) -> list[float]:
        """Per stage: the shortest action that computes the input gradient, I or B."""
        full = self._seconds[Kind.B.number]
        return self._least_in_pair(np.minimum(self._seconds[Kind.I.number], full) if self.split else full)

    @cached_property
    def weight_gradient(self) -> list[float]:
        """Per stage: what must be done of a backward besides the input gradient."""
        if not self.split:
            return [0.0] * self.placement.num_stages
        full = self._least_in_pair(self._seconds[Kind.B.number])
        first = self._least_in_pair(self._seconds[Kind.I.number])
        least = [min(i + w, b) for i, w, b in zip(first, self._seconds[Kind.W.number].tolist(), full)]
        return [max(total - i, 0.0) for total, i in zip(least, self.input_gradient)]

    def _least_in_pair(self, seconds: Floats) -> list[float]:
        """A part of a pair takes as long as the pair, which a fixed cost can make shorter than the part."""
        if self.paired and self.costs.overlap is not None:
            seconds = np.minimum(seconds, self.costs.overlap)
        found: list[float] = seconds.tolist()
        return found

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

    def pair_factor(self, rank: int) -> float:
        """The least factor by which overlapped pairs shorten the work of a rank."""
        if not self.paired:
            return 1.0
        own = list(self.placement.stages_of_rank[rank])
        forward = np.repeat(self._seconds[Kind.F.number, own], 2 * len(own))
        backward = np.tile(self._seconds[[Kind.B.number, Kind.I.number]][:, own].ravel(), len(own))
        apart = forward + backward
        together = pair_seconds(self.costs, forward, backward)
        return float(min(1.0, (together[apart > 0] / apart[apart > 0]).min(initial=1.0)))

    @cached_property
    def heads(self) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: from the first start on any rank."""
        return self._heads_from([True] * self.placement.num_stages)

    def heads_on(self, rank: int) -> dict[str, list[float]]:
        """For F, I (or B) and W, per stage: chains that begin on this rank."""
        if self.stage_graph.is_chain:  # those of its first stage are the longest
            first = self.first_head(rank)
            return {kind: [head - first for head in heads] for kind, heads in self.heads.items()}
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
            back[s] = max([forward[s] + self.forward[s] + launch, *arrivals])
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
            own = self.input_gradient[s] + launch + back[s] if self.trains else _NEVER
            forward[s] = max([0.0 if here[s] else _NEVER, own, *after])
        return {"F": forward, "I": back, "W": [0.0] * self.placement.num_stages}

    def first_head(self, rank: int) -> float:
        """The least head of a rank's work."""
        return min(self.heads["F"][s] for s in self.placement.stages_of_rank[rank])

    def jobs(self, rank: int, *, alone: bool = False) -> list[tuple[float, float, float]]:
        """Head, seconds and tail of all microbatches of each kind and stage of a rank.

        Alone, its heads are counted from its own first start and its tails to its own last end.
        """
        heads, tails = (self.heads_on(rank), self.tails_on(rank)) if alone else (self.heads, self.tails)
        kinds = {"F": self.forward}
        if self.trains:
            kinds |= {"I": self.input_gradient, "W": self.weight_gradient}
        extra = self.costs.launch_overhead / 2 if self.paired else self.costs.launch_overhead
        factor = self.pair_factor(rank)
        return [
            (
                heads[kind][s],
                self.microbatches * (seconds[s] * factor + (extra if kind != "W" else 0.0)),
                tails[kind][s],
            )
            for kind, seconds in kinds.items()
            for s in self.placement.stages_of_rank[rank]
        ]

    def seconds_of(self, rank: int) -> float:
        """All the work of a rank."""
        return sum(job[1] for job in self.jobs(rank))

    def round_trip(self, stage: int) -> float:
        """From the start of F to the earliest start of I (or B) of the same microbatch."""
        if self.stage_graph.is_chain:
            return self.heads["I"][stage] - self.heads["F"][stage]
        # without what only other sources wait for: F may start later than its head
        return self._heads_from([s == stage for s in range(self.placement.num_stages)])["I"][stage]

    def activation_room(self, rank: int, limit: float) -> float:
        """Bytes that a memory limit leaves for activations."""
        own = self.placement.stages_of_rank[rank]
        return max(limit - fixed_bytes_of(self.costs, own, self.placement.num_stages), 0.0)
