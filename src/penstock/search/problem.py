"""What is searched for: work to be ordered, its costs and limits; orders are rows of tokens (see `kernel`)."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import fixed_bytes, stage_bytes
from penstock.cost.prices import action_seconds, edge_prices
from penstock.ir.encoding import code_of
from penstock.ir.graph import StageGraph
from penstock.ir.kinds import Kind, MemoryLine
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.ir.table import Floats, Ints
from penstock.search import kernel
from penstock.simulation.simulator import simulate

__all__ = ["Problem"]
_KIND = {Kind.F: kernel.F, Kind.I: kernel.G, Kind.B: kernel.G, Kind.W: kernel.W}


@dataclass(frozen=True)
class Problem:
    """Work and limits.

    Microbatches are alike, so an order of kinds and stages is enough: within one of each they go by number.
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: float | None = None
    """Bytes that a rank may hold, all told; None for as many as it likes."""
    objective: str = "makespan"
    split: bool = True

    @cached_property
    def tables(self) -> kernel.Tables:
        """All of it as arrays."""
        hosts, kinds = self.placement.stage_to_rank, 3 if self.split else 2
        sizes = [len(own) * kinds * self.microbatches for own in self.placement.stages_of_rank]
        lag, taken, channel = self._messages()
        return kernel.Tables(
            bounds=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
            hosts=np.array(hosts, dtype=np.int64),
            microbatches=self.microbatches,
            kinds=kinds,
            seconds=self._seconds(),
            whole=self.whole,
            joins=bool((self.whole >= 0).any()),
            lag=lag,
            taken=taken,
            channel=channel,
            channels=self.placement.num_ranks**2,
            queues=bool(taken.any()),
            held=self._held(),
            limits=self._limits(),
            pause=float(self.costs.optimizer_step),
        )

    def with_few_microbatches(self) -> Problem | None:
        """The same with as many as it takes to have a steady state, if that is much fewer."""
        few = 3 * self.placement.num_ranks
        return replace(self, microbatches=few) if self.microbatches >= 2 * few else None

    def _seconds(self) -> Floats:
        seconds = action_seconds(self.costs, self.placement.num_stages) + float(self.costs.launch_overhead)
        return self._by_token(seconds)

    def _by_token(self, by_kind: Floats) -> Floats:
        """Per token, from an array per kind and stage."""
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W)
        return np.ascontiguousarray(by_kind[[kind.number for kind in kinds]].T.reshape(-1))

    @cached_property
    def whole(self) -> Floats:
        """Per stage: seconds of B where I and W take longer, -1 elsewhere."""
        seconds = action_seconds(self.costs, self.placement.num_stages)
        i, w, b = (seconds[kind.number] for kind in (Kind.I, Kind.W, Kind.B))
        whole, halves = b + self.costs.launch_overhead, i + w + 2 * self.costs.launch_overhead
        pays = (whole < halves * (1 - 1e-12)) & self.split
        return np.where(pays, whole, -1.0)

    @property
    def faster_whole(self) -> frozenset[int]:
        """The stages whose backwards are faster in one."""
        return frozenset(np.flatnonzero(self.whole >= 0).tolist())

    def _messages(self) -> tuple[Floats, Floats, Ints]:
        """Per token: the lag, how long the channel is taken, and the channel."""
        graph = StageGraph.chain(self.placement.num_stages)
        hosts = np.array(self.placement.stage_to_rank)
        size = 3 * self.placement.num_stages
        lag, taken, channel = np.zeros(size), np.zeros(size), np.zeros(size, dtype=np.int64)
        feeds, fed = graph.ends
        for value, kind, maker, user in (
            ("activation", kernel.F, feeds, fed),
            ("gradient", kernel.G, fed, feeds),
        ):
            prices = edge_prices(self.costs, graph, value)
            apart = hosts[maker] != hosts[user]
            token = (3 * maker + kind)[apart]
            taken[token], lag[token] = prices.transfer[apart], prices.total[apart]
            channel[token] = (hosts[maker] * self.placement.num_ranks + hosts[user])[apart]
        return lag, taken, channel

    def _held(self) -> Floats:
        held = stage_bytes(self.costs, self.placement.num_stages, MemoryLine.ACTIVATIONS)
        if not self.split:
            held[Kind.W.number] = 0.0
        return self._by_token(held)

    def _limits(self) -> Floats:
        """What is left for activations, with room for rounding."""
        ranks = self.placement.num_ranks
        if self.memory_limit is None:
            return np.full(ranks, np.inf)
        # a share of what is left, not of the limit: beside large parameters that could be many activations
        return (self.memory_limit - self.fixed) * (1 + 1e-9)

    @cached_property
    def fixed(self) -> Floats:
        """Per rank: the bytes that are there all the time."""
        return fixed_bytes(self.costs, self.placement)

    # --- orders ------------------------------------------------------------------------------------

    def order_of(self, schedule: Schedule) -> Ints:
        """A schedule as tokens: overlapped pairs are taken apart, and backwards split or joined as wanted."""
        rows: list[int] = []
        for row in schedule.ranks:
            for part in (part for step in row for part in step.parts):
                if part.kind not in _KIND or (part.kind is Kind.W and not self.split):
                    continue
                rows.append(3 * part.stage + _KIND[part.kind])
                if part.kind is Kind.B and self.split:
                    rows.append(3 * part.stage + kernel.W)
        return np.array(rows, dtype=np.int64)

    def schedule_of(self, order: Ints, name: str) -> Schedule:
        """Tokens with their microbatches; I and W are one B wherever that is faster, or costs nothing."""
        stages = self.faster_whole
        schedule = self.written(order, name, stages)
        if self.split:
            value = self._simulated(schedule)
            # no rank waits for the gradient of stage 0
            for more in (range(1), range(self.placement.num_stages)):
                joined = self.written(order, name, stages.union(more))
                if (again := self._simulated(joined)) <= value * (1 + 1e-12):
                    schedule, value = joined, again
        return schedule

    def _simulated(self, schedule: Schedule) -> float:
        timeline = simulate(schedule, self.costs, with_period=self.objective == "period")
        value: float = getattr(timeline, self.objective)
        return value

    def written(self, order: Ints, name: str, whole: AbstractSet[int]) -> Schedule:
        """Tokens with their microbatches, I and W that follow each other as one B on the stages of `whole`."""
        kinds = (Kind.F, Kind.I if self.split else Kind.B, Kind.W)
        rows = []
        for first, last in pairwise(self.tables.bounds.tolist()):
            done: dict[int, int] = {}
            row: list[int] = []
            before = (-1, -1)
            for token in order[first:last].tolist():
                stage, number = token // 3, done.get(token, 0)
                done[token] = number + 1
                if stage in whole and token % 3 == kernel.W and before == (token - 1, number):
                    row[-1] = code_of(Kind.B, stage, number)
                else:
                    row.append(code_of(kinds[token % 3], stage, number))
                before = (token, number)
            rows.append(row)
        return Schedule.from_codes(rows, self.placement, self.microbatches, name)

    @property
    def goal(self) -> int:
        """The number of the objective."""
        return OBJECTIVES.index(self.objective)

    def value(self, order: Ints) -> float:
        """The objective; infinite if the order cannot be run."""
        return float(kernel.measure(self.tables, order, kernel.blank(self.tables), self.goal)[0])

    def begins(self, order: Ints) -> Floats:
        """When each step of an order begins."""
        state = kernel.blank(self.tables)
        kernel.measure(self.tables, order, state, kernel.MAKESPAN)
        return state.begins

    def fits(self, order: Ints) -> bool:
        """Whether no rank ever holds more than it may."""
        return all(kernel.fits(self.tables, order, rank) for rank in range(self.placement.num_ranks))
