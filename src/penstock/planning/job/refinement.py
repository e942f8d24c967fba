"""Refinement of a job's plan: orders with techniques, searched orders, and quantiles under jitter.

All of it is for the few best layouts, because it needs whole schedules. What it costs follows from the budget
in moves and simulated actions, not in seconds, so that a plan does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import NormalDist

from penstock.cost.costs import Costs
from penstock.errors import SearchError
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Configuration
from penstock.planning.estimated_model import stage_costs
from penstock.planning.job.evaluation import JobEvaluation, Over, is_short
from penstock.planning.job.layouts import JobOption
from penstock.planning.memory_policies import offloading_schedules
from penstock.planning.options import frontier, technique_of
from penstock.search import Progress, search
from penstock.search.passes import FitMemory
from penstock.simulation.jitter import Spread, simulate_with_jitter

_SEARCHED, _WITH_JITTER = 2, 10
_TECHNIQUES, _MORE_IF_NONE_FITS, _MAX_MEMORY_FACTOR = 8, 5, 4.0
"""Orders with techniques, with a budget of 1, and how many times the memory limit they may need without."""
_MOVES, _MAX_SEARCHED_STEPS = 3e6, 6_000
"""Moves of a search with a budget of 1, over the number of its steps; the most steps that are searched."""
_JITTER_STEPS, _MIN_RUNS, _MAX_RUNS = 2e5, 20, 200
"""Actions simulated for the jitter of one option with a budget of 1, and how many runs that may be."""


# --- techniques -------------------------------------------------------------------------------------


def try_techniques(evaluation: JobEvaluation) -> None:
    """Recompute stages or offload activations in orders that exceed the memory limit but have low bounds."""
    request = evaluation.request
    if not request.techniques:
        return
    waiting = _promising(evaluation.over, request.memory_limit)
    for tried, over in enumerate(waiting):
        best = min((each.seconds for each in evaluation.options), default=inf)
        most = _TECHNIQUES * max(1.0, request.budget) * (1 if evaluation.options else _MORE_IF_NONE_FITS)
        if over.candidate.bound >= best or tried >= most:
            return
        plain = _option_of(over)
        evaluation.on_progress(f"techniques in {plain.layout}", min(1.0, tried / most), best)
        for schedule in _with_techniques(evaluation, over, plain):
            _add(evaluation, plain, schedule, schedule.name)


def _promising(every: Sequence[Over], limit: float) -> list[Over]:
    """Lowest bound first; of each layout and placement the order that exceeds the limit the least."""
    least: dict[object, Over] = {}
    for over in sorted(every, key=lambda each: each.memory):
        if over.memory <= _MAX_MEMORY_FACTOR * limit and is_short(_option_of(over)):
            least.setdefault((over.candidate.layout, over.candidate.placement), over)
    return sorted(least.values(), key=lambda each: each.candidate.bound)


def _with_techniques(evaluation: JobEvaluation, over: Over, plain: JobOption) -> Iterator[Schedule]:
    """The order with what it needs to fit, and the families that offload by themselves."""
    chosen, found = evaluation.request.techniques, over.candidate.stages.estimate
    costs = stage_costs(found, plain.placement, plain.counts)
    limit = evaluation.request.memory_limit - evaluation.most_working(found, plain)
    fit = FitMemory(limit, costs, recompute="recompute" in chosen, offload="offload" in chosen)
    fitted = fit.fitted_simply(plain.schedule)
    if fitted is not None:
        yield fitted.schedule
    if "offload" in chosen and not evaluation.request.families:
        m = plain.layout.microbatches
        yield from offloading_schedules(Configuration(plain.placement, plain.counts, m, 1, costs))


def _option_of(over: Over) -> JobOption:
    each = over.candidate
    return JobOption(each.layout, over.family, each.placement, each.counts, each.bound, memory=0.0)


# --- searched orders --------------------------------------------------------------------------------


def refine_orders(evaluation: JobEvaluation) -> None:
    """Search orders for the best layouts, as far as these are not too large."""
    if not evaluation.request.search or evaluation.request.families:
        return
    chosen = [each for each in evaluation.ranked() if _can_search(each)][:_SEARCHED]
    for option in chosen:
        best = min(each.seconds for each in evaluation.options)
        if option.bound < best and option.seconds < 1.05 * best:
            _search(evaluation, option)


def _can_search(option: JobOption) -> bool:
    steps = 3 * option.placement.num_stages * option.layout.microbatches
    return option.is_exact and option.layout.pipeline > 1 and steps <= _MAX_SEARCHED_STEPS


def _search(evaluation: JobEvaluation, option: JobOption) -> None:
    request, layout = evaluation.request, option.layout
    found = evaluation.estimator(layout.parallel_config(request))
    costs = stage_costs(found, option.placement, option.counts)
    steps = 3 * option.placement.num_stages * layout.microbatches

    def on_progress(now: Progress) -> None:
        evaluation.on_progress(f"searching {layout}", now.fraction, now.best)

    try:
        result = search(
            ranks=layout.pipeline,
            microbatches=layout.microbatches,
            costs=replace(costs, optimizer_step=0.0),
            placement=option.placement,
            stages_per_rank=option.stages_per_rank,
            memory_limit=request.memory_limit - evaluation.most_working(found, option),
            moves=int(_MOVES * request.budget / steps),
            seed=request.seed,
            on_progress=on_progress,
        )
    except SearchError:  # no order fits without techniques
        return
    _add(evaluation, option, result.schedule, "searched")
    if result.interrupted:
        raise KeyboardInterrupt


def _add(evaluation: JobEvaluation, option: JobOption, schedule: Schedule, family: str) -> None:
    """Add the option with this order if it fits and is not dominated by another of its layout."""
    changed = replace(option, family=family, found=schedule, technique=technique_of(schedule))
    made = evaluation.exact(changed)
    same = [each for each in evaluation.options if each.layout.sizes == made.layout.sizes]
    dominated = any(each.seconds <= made.seconds and each.memory <= made.memory for each in same)
    if made.memory <= evaluation.request.memory_limit and not dominated:
        evaluation.options.append(made)


# --- jitter -----------------------------------------------------------------------------------------


def rank_by_quantile(evaluation: JobEvaluation) -> None:
    """Simulate jitter for the frontier and the best options; only these are kept."""
    jitter = evaluation.request.jitter
    if jitter is None:
        return
    front = [each for each in frontier(evaluation.options) if each.is_exact]
    best = [each for each in evaluation.ranked() if each.is_exact][:_WITH_JITTER]
    options, ranked = list(dict.fromkeys((*best, *front))), list[JobOption]()
    try:
        for done, option in enumerate(options):
            least = min((each.seconds for each in ranked), default=option.seconds)
            evaluation.on_progress(f"jitter of {option.layout}", done / len(options), least)
            ranked.append(_with_jitter(evaluation, option, jitter))
    finally:  # after Ctrl-C, only options with a quantile can be compared
        if ranked:
            evaluation.options = sorted(ranked, key=lambda each: each.sort_key)


def _with_jitter(evaluation: JobEvaluation, option: JobOption, jitter: float) -> JobOption:
    request, schedule = evaluation.request, option.lowered
    found = evaluation.estimator(option.layout.parallel_config(request))
    costs: Costs = stage_costs(found, option.placement, option.counts)
    runs = int(min(_MAX_RUNS, max(_MIN_RUNS, _JITTER_STEPS * request.budget / schedule.num_steps)))
    spread = simulate_with_jitter(schedule, costs, jitter=jitter, runs=runs, seed=request.seed)
    replicas = option.layout.data * option.layout.context
    seconds = slowest(spread, replicas, request.quantile) + costs.optimizer_step
    return evaluation.timed(option, seconds)


def slowest(spread: Spread, replicas: int, quantile: float) -> float:
    """The quantile of the slowest of so many pipelines that vary independently: a step waits for it.

    One pipeline stays below it in a share q of steps, all of them in q to the power of their number. What is
    beyond the simulated runs is the tail of a normal distribution with their mean and deviation.
    """
    one = quantile ** (1 / replicas)
    runs = len(spread.makespans)
    if one <= 1 - 1 / runs:
        return spread.quantile(one)
    deviation = float(spread.makespans.std(ddof=1))
    tail = NormalDist(spread.mean, deviation).inv_cdf(min(one, 1 - 1e-12)) if deviation else spread.mean
    return max(tail, float(spread.makespans[-1]))
