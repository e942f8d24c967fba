"""Robustness to step-time jitter: ranks options by a quantile of the makespan under jitter."""

from __future__ import annotations

from dataclasses import replace

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import Evaluation
from penstock.planning.options import Option, Rejected, frontier
from penstock.planning.request import PlanRequest
from penstock.simulation.jitter import simulate_with_jitter


def rank_by_quantile(evaluation: Evaluation) -> None:
    """Simulate jitter for the frontier, and for every other option that could be faster than the best of it."""
    if evaluation.request.jitter is None:
        return
    front = frontier(evaluation.options)
    rest = sorted((o for o in evaluation.options if o not in front), key=lambda each: each.sort_key)
    options, ranked = [*front, *rest], list[Option]()
    try:
        for done, option in enumerate(options):
            if done >= len(front) and option.seconds_without_jitter > min(each.seconds for each in ranked):
                evaluation.pruned += [
                    Rejected(o.name, o.configuration, o.memory, o.seconds_without_jitter)
                    for o in options[done:]
                ]
                break
            evaluation.report(f"simulating jitter of {option}", done / len(options))
            seconds = quantile_seconds(evaluation.request, option.schedule, option.configuration.costs)
            ranked.append(replace(option, seconds=seconds))
    finally:  # after Ctrl-C, only options with a quantile can be compared
        evaluation.options, evaluation.has_quantiles = ranked or evaluation.options, bool(ranked)


def quantile_seconds(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    """The quantile of the makespan under jitter, plus the optimizer step."""
    assert request.jitter is not None
    spread = simulate_with_jitter(schedule, costs, jitter=request.jitter, seed=request.seed)
    return spread.quantile(request.quantile) + costs.optimizer_step
