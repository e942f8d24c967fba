"""Ranking under jitter: by the quantile of the makespan when no step takes quite as long as it should."""

from __future__ import annotations

from dataclasses import replace

from penstock.cost.costs import Costs
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import Weighing
from penstock.planning.options import Left, Option, frontier
from penstock.planning.request import Question
from penstock.simulation.jitter import jitter

__all__ = ["shake", "shaken_seconds"]


def shake(weighing: Weighing) -> None:
    """Keep the quantiles of the frontier, and of all that could be faster than the best of these."""
    if weighing.question.jitter is None:
        return
    kept = frontier(weighing.options)
    rest = sorted((o for o in weighing.options if o not in kept), key=lambda each: each.order)
    everything, shaken = [*kept, *rest], list[Option]()
    try:
        for done, option in enumerate(everything):
            if done >= len(kept) and option.plain_seconds > min(each.seconds for each in shaken):
                weighing.cut += [Left(o.name, o.frame, o.memory, o.plain_seconds) for o in everything[done:]]
                break
            weighing.tell(f"shaking {option}", done / len(everything))
            seconds = shaken_seconds(weighing.question, option.schedule, option.frame.costs)
            shaken.append(replace(option, seconds=seconds))
    finally:  # stopped early, those that were shaken are what can be compared
        weighing.options, weighing.is_shaken = shaken or weighing.options, bool(shaken)


def shaken_seconds(question: Question, schedule: Schedule, costs: Costs) -> float:
    """The quantile, optimizer step included."""
    assert question.jitter is not None
    spread = jitter(schedule, costs, noise=question.jitter, seed=question.seed)
    return spread.quantile(question.quantile) + costs.optimizer_step
