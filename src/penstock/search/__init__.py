"""Search for the schedule that minimizes an objective at given costs and within a memory limit.

`penstock.search` is this package and can be called: `penstock.search(ranks=4, microbatches=8)` calls
`penstock.search.search`.
"""

from __future__ import annotations

from penstock.callable_package import make_callable
from penstock.cost.costs import Costs
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement, StagesPerRank
from penstock.search.passes import FitMemory, PlaceSharding
from penstock.search.request import (
    Budget,
    Jitter,
    OnProgress,
    Progress,
    SearchRequest,
    SearchResult,
    require_bytes,
    require_memory,
)

__all__ = ["FitMemory", "OnProgress", "PlaceSharding", "Progress", "SearchResult", "search"]


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
    `moves`            instead of it, a number of moves, with which `seed` fixes the result
    `seed`             random seed
    `jitter`           rank the best schedules by the `quantile` of their makespan when steps vary by this share
    `on_progress`      is called with a `Progress` from time to time
    `graph`            a `StageGraph` of the stages; without a `Placement` they are on ranks in its order
    `recompute`        also choose which microbatches of which stages are recomputed, so that the schedule fits
                       `memory_limit`; `offload`: which wait on the host. The bound holds for every such choice

    Returns a `SearchResult` with the schedule, its timeline and the bound. Ctrl-C ends the search early: the
    result then has the best schedule so far, and is `interrupted`.

    Raises `SearchError` with all errors of the arguments, or if no schedule fits the memory limit, and
    `CostsError` if the costs are for another number of stages.
    """
    request = SearchRequest(
        *(ranks, microbatches, costs, stages_per_rank, placement, memory_limit, live_limit, objective),
        *(seconds, moves, seed, jitter, quantile, graph),
    )
    request.check()
    placements = request.placements()
    counted, limit = request.limit()
    if recompute or offload:
        require_bytes(memory_limit)
    else:
        require_memory(placements, counted, limit)

    from penstock.search.driver import run  # noqa: PLC0415
    from penstock.search.problem import Problem  # noqa: PLC0415 -- compiled code takes a second to load

    problems = [
        Problem(each, int(microbatches), counted, limit, objective, split, graph) for each in placements
    ]
    budget = Budget(float(seconds), None if moves is None else int(moves), int(seed))
    ranking = None if jitter is None else Jitter(jitter, quantile)
    fit = None
    if limit is not None and (recompute or offload):
        fit = FitMemory(limit, counted, recompute, offload, objective=objective)
    return run(problems, costs or Costs(), budget, ranking, on_progress or (lambda _: None), fit)


make_callable(__name__, search)
