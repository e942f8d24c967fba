"""`penstock.search`: what is asked for is checked here; the search itself is loaded only when it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Real
from typing import cast

from penstock.arguments import printable, whole_number
from penstock.bounds import OBJECTIVES
from penstock.cost.costs import Costs
from penstock.cost.memory import activation_bytes, fixed_bytes
from penstock.errors import PenstockError, SearchError
from penstock.families.registry import MAX_WORK
from penstock.ir.graph import StageGraph
from penstock.ir.placement import Placement
from penstock.search.result import Progress, SearchResult

__all__ = ["search"]

_PLACEMENTS = ("any", "loop", "v")
_MOST = 1e18  # more seconds or bytes than anybody means


def search(
    *,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: int = 1,
    placement: Placement | str = "any",
    memory_limit: float | None = None,
    live_limit: int | None = None,
    objective: str = "makespan",
    split: bool = True,
    seconds: float = 10.0,
    moves: int | None = None,
    seed: int = 0,
    noise: float | None = None,
    quantile: float = 0.95,
    told: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Find the best schedule for these costs and this memory, and say how far from the best it can be at most.

    `placement` is a `Placement`, or `loop`, `v` or `any` of the two. `memory_limit` is in bytes per rank, all
    told; `live_limit` is instead a number of activations, each of one stage and microbatch. `objective` is
    `makespan`, `span` or `period`. With `split=False` backwards are whole.

    It takes up to `seconds`, less if the best is proved. With `moves` instead, it makes so many, and the same
    seed gives the same answer. With `noise` the best schedules are ranked by what a share `quantile` of their
    runs stays within when steps vary by that share. `told` is called with a `Progress` now and then. A key
    press (Ctrl-C) ends it early, with the best found so far.
    """
    faults = _faults(
        ranks,
        microbatches,
        stages_per_rank,
        placement,
        memory_limit,
        live_limit,
        objective,
        seconds,
        moves,
        seed,
    )
    if not isinstance(costs, Costs | None):
        faults.append(f"costs must be Costs (given {printable(repr(costs))})")
    if noise is not None:
        faults += [] if _from_0_to(1, noise) else [f"noise must be from 0 to 1 (given {noise!r})"]
        inside = _from_0_to(1, quantile) and 0 < quantile < 1
        faults += [] if inside else [f"quantile must be between 0 and 1 (given {quantile!r})"]
        faults += [] if objective == "makespan" else [f"noise goes with makespan only (given {objective!r})"]
    if faults:
        raise SearchError("; ".join(faults))
    known, ranks, microbatches, seed = costs or Costs(), int(ranks), int(microbatches), int(seed)
    placements = _placements(placement, ranks, stages_per_rank)
    for each in placements:
        if each.num_stages * microbatches > MAX_WORK:
            given = f"{each.num_stages} stages, {microbatches} microbatches"
            raise SearchError(f"stages times microbatches can be at most {MAX_WORK} (given {given})")
        known.check_lengths(StageGraph.chain(each.num_stages))
    counted, limit = known, None if memory_limit is None else float(memory_limit)
    if live_limit is not None:
        counted = replace(
            known, activation=1, activation_freed_by_input=0, parameters=0, gradients=0, optimizer_state=0
        )
        limit = min(int(live_limit), MAX_WORK)
    _refuse_too_little(placements, counted, limit)

    from penstock.search.driver import Budget, Noise, run  # noqa: PLC0415
    from penstock.search.problem import Problem  # noqa: PLC0415 -- compiled code takes a second to load

    problems = [Problem(each, microbatches, counted, limit, objective, split) for each in placements]
    budget = Budget(float(seconds), None if moves is None else int(moves), seed)
    ranked = None if noise is None else Noise(noise, quantile)
    return run(problems, known, budget, ranked, told or (lambda _: None))


def _faults(
    ranks: int,
    microbatches: int,
    stages_per_rank: int,
    placement: Placement | str,
    memory_limit: float | None,
    live_limit: int | None,
    objective: str,
    seconds: float,
    moves: int | None,
    seed: int,
) -> list[str]:
    counts = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    counts |= {"live_limit": 1 if live_limit is None else live_limit}
    found = [
        f"{name} must be a whole number of at least 1 (given {value!r})"
        for name, value in counts.items()
        if (whole_number(value) or 0) < 1
    ]
    for name, value, least in (("moves", 0 if moves is None else moves, 0), ("seed", seed, 0)):
        if (number := whole_number(value)) is None or number < least:
            found.append(f"{name} must be a whole number of at least {least} (given {value!r})")
    if not _from_0_to(_MOST, seconds):
        found.append(f"seconds must be from 0 to {_MOST:g} (given {printable(repr(seconds))})")
    if objective not in OBJECTIVES:
        found.append(f"objective is one of {', '.join(OBJECTIVES)} (given {printable(repr(objective))})")
    if memory_limit is not None and live_limit is not None:
        found.append("give memory_limit, in bytes, or live_limit, in activations, not both")
    if memory_limit is not None and not _from_0_to(_MOST, memory_limit):
        found.append(f"memory_limit must be from 0 to {_MOST:g} bytes (given {printable(repr(memory_limit))})")
    if not isinstance(placement, Placement):
        if placement not in _PLACEMENTS:
            given = printable(repr(placement))
            found.append(f"placement is a Placement, or one of {', '.join(_PLACEMENTS)} (given {given})")
    elif placement.num_ranks != ranks:
        found.append(f"the placement has {placement.num_ranks} ranks (given ranks={ranks!r})")
    return found


def _from_0_to(most: float, value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= cast("float", value) <= most


def _placements(placement: Placement | str, ranks: int, stages_per_rank: int) -> list[Placement]:
    if isinstance(placement, Placement):
        return [placement]
    try:
        ways = {"loop": Placement.loop(ranks, stages_per_rank), "v": Placement.v(ranks, stages_per_rank)}
    except PenstockError as error:
        raise SearchError(str(error)) from None
    return list(dict.fromkeys(ways.values())) if placement == "any" else [ways[placement]]


def _refuse_too_little(placements: list[Placement], costs: Costs, limit: float | None) -> None:
    """One microbatch at a time needs the least; if even that is too much for a rank, nothing fits."""
    if limit is None:
        return
    faults = []
    for placement in placements:
        activation = activation_bytes(costs, placement.num_stages).full
        for rank, (own, fixed) in enumerate(zip(placement.stages_of_rank, fixed_bytes(costs, placement))):
            held = sum(activation[s] for s in own)
            if held > (limit - fixed) * (1 + 1e-9):
                faults.append(f"rank {rank} needs {fixed + held:g}")
    if faults:
        what = "for what it always holds and one microbatch of each of its stages"
        more = f", and {len(faults) - 4} more" if len(faults) > 4 else ""
        raise SearchError(f"nothing fits into {limit:g} a rank: {'; '.join(faults[:4])}{more}, {what}")
