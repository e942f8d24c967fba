"""The arguments of a search, checked: all errors are reported at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import cast

from penstock.arguments import plural, printable, whole_number
from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import counting_activations
from penstock.errors import PenstockError, SearchError
from penstock.families.depth_order import topological_placement
from penstock.families.registry import MAX_WORK
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement, StagesPerRank, problems_of_counts

_PLACEMENTS = ("any", "loop", "v")
_MAX_NUMBER = 1e18  # seconds or bytes
_MAX_SEARCHED = 1 << 20
"""Stages times microbatches; a single order of a larger problem takes longer than most time limits."""


@dataclass(frozen=True)
class SearchRequest:
    """What to search for, and how long; the fields are the arguments of `search`."""

    ranks: int
    microbatches: int
    costs: Costs | None
    stages_per_rank: StagesPerRank
    placement: Placement | str
    memory_limit: float | None
    live_limit: int | None
    objective: str
    seconds: float
    moves: int | None
    seed: int
    jitter: float | None
    quantile: float
    graph: StageGraph | None = None

    def check(self) -> None:
        """Raise `SearchError` with every error of the arguments."""
        errors = [*self._errors_in_counts(), *self._errors_in_limits(), *self._errors_in_choices()]
        if self.jitter is not None:
            errors += self._errors_in_jitter(self.jitter)
        if errors:
            raise SearchError("; ".join(errors))

    def _errors_in_counts(self) -> Iterator[str]:
        minima = {"ranks": 1, "microbatches": 1, "live_limit": 1, "moves": 0, "seed": 0}
        if isinstance(self.stages_per_rank, Sequence):
            yield from problems_of_counts(self.ranks, self.stages_per_rank)
        else:
            minima["stages_per_rank"] = 1
        for name, least in minima.items():
            value = getattr(self, name)
            if value is None and name in ("live_limit", "moves"):
                continue
            if (number := whole_number(value)) is None or number < least:
                yield f"{name} must be an integer of at least {least} (given {value!r})"

    def _errors_in_limits(self) -> Iterator[str]:
        if not _is_within(_MAX_NUMBER, self.seconds):
            yield f"seconds must be from 0 to {_MAX_NUMBER:g} (given {printable(repr(self.seconds))})"
        if self.memory_limit is not None and self.live_limit is not None:
            yield "give memory_limit, in bytes, or live_limit, in activations, not both"
        if self.memory_limit is not None and not _is_within(_MAX_NUMBER, self.memory_limit):
            given = printable(repr(self.memory_limit))
            yield f"memory_limit must be from 0 to {_MAX_NUMBER:g} bytes (given {given})"

    def _errors_in_choices(self) -> Iterator[str]:
        if self.objective not in OBJECTIVES:
            given = printable(repr(self.objective))
            yield f"objective must be one of {', '.join(OBJECTIVES)} (given {given})"
        if not isinstance(self.placement, Placement):
            if self.placement not in _PLACEMENTS:
                given = printable(repr(self.placement))
                yield f"placement must be a Placement, or one of {', '.join(_PLACEMENTS)} (given {given})"
        elif self.placement.num_ranks != self.ranks:
            yield f"the placement has {plural(self.placement.num_ranks, 'rank')} (given ranks={self.ranks!r})"
        if self.graph is not None:
            yield from self._errors_in_graph(self.graph)
        if not isinstance(self.costs, Costs | None):
            yield f"costs must be Costs (given {printable(repr(self.costs))})"

    def _errors_in_graph(self, graph: StageGraph) -> Iterator[str]:
        if not isinstance(graph, StageGraph):
            yield f"graph must be a StageGraph (given {printable(repr(graph))})"
            return
        if isinstance(self.placement, Placement):
            if self.placement.num_stages != graph.num_stages:
                given = f"{plural(self.placement.num_stages, 'stage')}, the graph {graph.num_stages}"
                yield f"the placement has {given}"
        elif self.placement != "any":
            yield f"with a graph, placement must be a Placement or any (given {self.placement!r})"
        elif (whole_number(self.ranks) or 0) > graph.num_stages:
            yield f"the graph has {plural(graph.num_stages, 'stage')}, too few for {plural(self.ranks, 'rank')}"
        if self.stages_per_rank != 1:
            yield f"give graph=, which has its stages, or stages_per_rank={self.stages_per_rank!r}, not both"

    def _errors_in_jitter(self, jitter: float) -> Iterator[str]:
        if not _is_within(1, jitter):
            yield f"jitter must be a share from 0 to 1 (given {jitter!r})"
        if not (_is_within(1, self.quantile) and 0 < self.quantile < 1):
            yield f"quantile must be between 0 and 1 (given {self.quantile!r})"
        if self.objective != "makespan":
            yield f"jitter is supported for the makespan only (given objective={self.objective!r})"

    def placements(self) -> list[Placement]:
        """The placements to search, each small enough and with costs for its stages."""
        found = self._named_placements()
        for each in found:
            if each.num_stages * int(self.microbatches) > _MAX_SEARCHED:
                given = f"{plural(each.num_stages, 'stage')}, {plural(self.microbatches, 'microbatch')}"
                raise SearchError(f"stages times microbatches can be at most {_MAX_SEARCHED} (given {given})")
            graph = self.graph or StageGraph.chain(each.num_stages)
            (self.costs or Costs()).check_lengths(graph, each.num_ranks)
        return found

    def _named_placements(self) -> list[Placement]:
        if isinstance(self.placement, Placement):
            return [self.placement]
        ranks, stages = int(self.ranks), self.stages_per_rank
        if self.graph is not None:
            return [topological_placement(self.graph, ranks)]
        try:
            named = {"loop": Placement.loop(ranks, stages), "v": Placement.v(ranks, stages)}
        except PenstockError as error:
            raise SearchError(str(error)) from None
        return list(dict.fromkeys(named.values())) if self.placement == "any" else [named[self.placement]]

    def limit(self) -> tuple[Costs, float | None]:
        """The memory limit, and the costs that it applies to: with `live_limit` an activation counts 1."""
        costs = self.costs or Costs()
        if self.live_limit is not None:
            return counting_activations(costs), min(int(self.live_limit), MAX_WORK)
        return costs, None if self.memory_limit is None else float(self.memory_limit)


def check_memory_limit(limit: object) -> None:
    """Raise `SearchError` unless this is a number of bytes."""
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        given = printable(repr(limit))
        raise SearchError(f"memory_limit must be a number of bytes, at least 0 (given {given})")


def _is_within(most: float, value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= cast("float", value) <= most
