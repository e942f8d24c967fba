"""The arguments of a search: all errors are reported at once, and the search is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import cast

from penstock.arguments import plural, printable, some, whole_number
from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import activation_bytes, activation_limits, counting_activations, fixed_bytes
from penstock.errors import PenstockError, SearchError
from penstock.families.depth_order import topological_placement
from penstock.families.registry import MAX_WORK
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement, StagesPerRank, problems_of_counts
from penstock.search.memory_policies import FitMemory
from penstock.search.result import Budget, Jitter, OnProgress, SearchResult

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


def _is_within(most: float, value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= cast("float", value) <= most


# `penstock.search`.


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: StagesPerRank = 1,
    placement: Placement | str = "any",
    memory_limit: float | None = None,
    live_limit: int | None = None,
    objective: str = "makespan",
    split: bool = True,
    seconds: float = 10.0,
    moves: int | None = None,
    seed: int = 0,
    jitter: float | None = None,
    quantile: float = 0.95,
    on_progress: OnProgress | None = None,
    graph: StageGraph | None = None,
    recompute: bool = False,
    offload: bool = False,
) -> SearchResult:
    """Find the best schedule for these costs within a memory limit, with a bound on its optimality gap.

    `ranks`            number of pipeline ranks; `microbatches`: of one step
    `costs`            of the stages; unit costs unless given
    `stages_per_rank`  one number for all ranks, or a list of one for each
    `placement`        a `Placement`, or `loop`, `v`, or `any` for the better of the two
    `memory_limit`     bytes per rank, parameters and optimizer state included
    `live_limit`       instead of it, activations per rank, each of one stage and microbatch
    `objective`        the objective to minimize: `makespan`, `span` or `period`
    `split`            whether backwards may be split into I and W
    `seconds`          time limit; the search ends earlier if it proves the result optimal
    `moves`            instead of it, a number of moves, with which the same `seed` gives the same result
    `seed`             random seed
    `jitter`           rank the best schedules by the `quantile` of their makespan when steps vary by this share
    `on_progress`      is called with a `Progress` from time to time
    `graph`            a `StageGraph` of the stages; without a `Placement` they are on ranks in its order
    `recompute`        also choose which microbatches of which stages are recomputed, so that the schedule fits
                       `memory_limit`; `offload`: which wait on the host. The bound holds for every such choice

    Returns a `SearchResult` with the schedule, its timeline and the bound. Ctrl-C ends the search early: the
    result then has the best schedule so far, and is `interrupted`.

    Raises `SearchError` with all errors of the arguments, or if no schedule fits the memory limit, and
    `CostsError` if the costs are those of another number of stages.
    """
    request = SearchRequest(
        *(ranks, microbatches, costs, stages_per_rank, placement, memory_limit, live_limit, objective),
        *(seconds, moves, seed, jitter, quantile, graph),
    )
    request.check()
    placements = request.placements()
    counted, limit = request.limit()
    if recompute or offload:
        _require_bytes(memory_limit)
    else:
        _require_memory(placements, counted, limit)

    from penstock.search.driver import run  # noqa: PLC0415
    from penstock.search.problem import Problem  # noqa: PLC0415 -- compiled code takes a second to load

    problems = [
        Problem(each, int(microbatches), counted, limit, objective, split, graph) for each in placements
    ]
    budget = Budget(float(seconds), None if moves is None else int(moves), int(seed))
    ranking = None if jitter is None else Jitter(jitter, quantile)
    if limit is not None and (recompute or offload):
        from penstock.search.policy_search import run_with_policies  # noqa: PLC0415

        fit = FitMemory(limit, counted, recompute, offload, objective=objective)
        return run_with_policies(problems, fit, budget, ranking, on_progress or (lambda _: None))
    return run(problems, costs or Costs(), budget, ranking, on_progress or (lambda _: None))


def _require_bytes(memory_limit: float | None) -> None:
    """Memory policies change bytes, not the number of live activations."""
    if memory_limit is None:
        raise SearchError(
            "recompute and offload need memory_limit, in bytes per rank: without it nothing needs them"
        )


def _require_memory(placements: list[Placement], costs: Costs, limit: float | None) -> None:
    """One microbatch at a time needs the least memory; if a rank has less, no schedule fits."""
    if limit is None:
        return
    errors = []
    for placement in placements:
        activation = activation_bytes(costs, placement.num_stages).full
        fixed, limits = fixed_bytes(costs, placement), activation_limits(costs, placement, limit)
        for rank, own in enumerate(placement.stages_of_rank):
            held = sum(activation[stage] for stage in own)
            if held > limits[rank]:
                errors.append(f"rank {rank} needs {costs.units.memory(fixed[rank] + held)}")
    if errors:
        what = "for parameters, gradients, optimizer state and one microbatch of each of its stages"
        raise SearchError(
            f"no schedule fits the memory limit of {costs.units.memory(limit)} per rank: "
            f"{some(errors, 4, '; ')}, {what}"
        )
