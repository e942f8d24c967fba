"""Orders that techniques are added to: families, the serial order, and problems for the compiled kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.bounds import Workload, least_needed
from penstock.cost.effects import held_bytes
from penstock.cost.memory import exceeds
from penstock.cost.recomputed import recomputed_costs
from penstock.errors import SearchError
from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.schedule import Schedule
from penstock.search.fit_memory import FitMemory, without_memory_actions
from penstock.search.problem import Problem
from penstock.search.seeds import serial


def relaxed_workload(problem: Problem, fit: FitMemory) -> Workload:
    """The work of which every choice of techniques is one case, for lower bounds."""
    return replace(problem.work, may_recompute=fit.recompute, may_offload=fit.offload)


def require_feasible(problems: Sequence[Problem], fit: FitMemory) -> None:
    """Raise if no placement has a schedule that fits, whatever is recomputed or offloaded."""
    works = (relaxed_workload(problem, fit) for problem in problems)
    needs = [max((need, -rank) for rank, need in enumerate(least_needed(work))) for work in works]
    if all(exceeds(need, fit.memory_limit) for need, _ in needs):
        (need, rank), units = min(needs), fit.costs.units
        raise SearchError(
            f"no schedule fits the memory limit of {units.memory(fit.memory_limit)} per rank: rank {-rank} "
            f"needs {units.memory(need)} "
            "for parameters, gradients, optimizer state and one backward, whatever is recomputed or offloaded"
        )


def serial_order(problem: Problem) -> Schedule:
    """One microbatch after the other, which holds the least."""
    return problem.fused_schedule(serial(problem).order, "serial order")


def plain_order(problem: Problem, schedule: Schedule) -> Schedule:
    """The order of a family; if it offloads, without its copies."""
    if not schedule.table.has(Kind.OFFLOAD):
        return _same_work(problem, schedule)
    return _same_work(problem, without_memory_actions(schedule)).renamed(f"order of {schedule.name}")


def name_with_techniques(schedule: Schedule) -> str:
    """The name of an order, and how often it has each technique."""
    counts = {kind: int(schedule.table.of_kind(kind).sum()) for kind in MEMORY_KINDS[:2]}
    texts = [f"{count} {kind.value}" for kind, count in counts.items() if count]
    return f"{schedule.name} with {' and '.join(texts)}" if texts else schedule.name


def problems_to_order(problems: Sequence[Problem], *, recompute: bool) -> dict[str, list[Problem]]:
    """Problems without techniques: within the limit, without a limit, and with everything recomputed."""
    again = [made for each in problems if (made := _recomputed(each)) and _can_fit(made)]
    return {
        "within the limit": [each for each in problems if _can_fit(each)],
        "without a limit": [replace(each, memory_limit=None) for each in problems],
        "with all recomputed": again if recompute else [],
    }


def _same_work(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule; fused backwards if they may not be split, and no pairs that save only a launch."""
    if problem.split and (problem.can_pair or not schedule.table.has_pairs):
        return schedule
    return problem.fused_schedule(problem.order_of(schedule), schedule.name)


def _can_fit(problem: Problem) -> bool:
    """Whether the serial order fits."""
    return problem.fits(serial(problem).order)


def _recomputed(problem: Problem) -> Problem | None:
    """The problem with every microbatch recomputed: its backward is longer, and it holds the checkpoint.

    The rest of one activation at a time is left free. None if no memory remains.
    """
    costs, n = problem.costs, problem.placement.num_stages
    full, kept = held_bytes(costs, n), held_bytes(costs, n, (Kind.RECOMPUTE,))
    limit = float(problem.memory_limit or 0) - float((full - kept).max())
    return replace(problem, costs=recomputed_costs(costs, n), memory_limit=limit) if limit > 0 else None
