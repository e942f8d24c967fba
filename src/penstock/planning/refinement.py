"""Refinement of the best options: other partitions, searched orders, and their rank under jitter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from math import inf
from time import monotonic
from typing import Any, TypeAlias

from penstock.cost.costs import Costs
from penstock.cost.memory import LiveActivations, live_activations
from penstock.cost.prices import pairs_can_pay
from penstock.errors import SearchError
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import Configuration, configure
from penstock.planning.evaluation import Evaluation
from penstock.planning.options import Option, Rejected, frontier
from penstock.planning.partition import LayerCounts, move_layer
from penstock.planning.request import PlanRequest
from penstock.search import Progress, SearchResult
from penstock.simulation.jitter import simulate_with_jitter

# Robustness to step-time jitter: ranks options by a quantile of the makespan under jitter.


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


# Refinement of the best options: other partitions for their orders, and searched orders.


_REPARTITIONED_OPTIONS, _SEARCHED_CONFIGURATIONS = 3, 2
_REPARTITION_SHARE, _SEARCH_SHARE = 0.15, 0.4
"""Shares of the time for searching that all of these get together."""
_ASSUMED_EXCESS = 1.1
"""The objective over the bound that is assumed for a configuration without families."""
_ROUNDING = 1e-9

Searcher: TypeAlias = Callable[..., SearchResult]
"""A function with the arguments of `penstock.search.search`."""


def refine(evaluation: Evaluation, searcher: Searcher) -> None:
    """Repartition the best options, search the best configurations, then both for the best option."""
    request = evaluation.request
    seconds, until = request.seconds, monotonic() + request.seconds
    if not seconds:
        return
    for option in sorted(evaluation.options, key=lambda each: each.sort_key)[:_REPARTITIONED_OPTIONS]:
        _repartition(evaluation, option, seconds * _REPARTITION_SHARE / _REPARTITIONED_OPTIONS)
    chosen = _most_promising(evaluation)[:_SEARCHED_CONFIGURATIONS]
    for configuration in chosen:
        if _can_win(evaluation, _bound(evaluation, configuration)):
            _search(evaluation, searcher, configuration, seconds * _SEARCH_SHARE / len(chosen), request.seed)
    if evaluation.options:
        _repartition(evaluation, _best(evaluation), (until - monotonic()) / 5)
        configuration = _best(evaluation).configuration
        if _can_win(evaluation, _bound(evaluation, configuration)):
            _search(evaluation, searcher, configuration, until - monotonic(), request.seed + 1)


def _best(evaluation: Evaluation) -> Option:
    return min(evaluation.options, key=lambda option: option.sort_key)


def _bound(evaluation: Evaluation, configuration: Configuration) -> float:
    """Lower bound for searched orders, which have overlapped pairs only where these hide something."""
    return configuration.bound(evaluation.request, paired=pairs_can_pay(configuration.costs)).seconds


def _can_win(evaluation: Evaluation, bound: float) -> bool:
    return all(bound < option.seconds_without_jitter * (1 - _ROUNDING) for option in evaluation.options)


def _repartition(evaluation: Evaluation, option: Option, seconds: float) -> None:
    """Move layers between the stages of an option, one at a time, as long as that makes it faster."""
    if option.technique:  # its stages were chosen for this partition
        return
    until, best, improved = monotonic() + seconds, option, True
    tried = {other.configuration.counts for other in evaluation.options if other.schedule == option.schedule}
    live = live_activations(option.schedule.table)
    while improved:
        improved = False
        for source, target in permutations(range(option.schedule.num_stages), 2):
            counts = move_layer(best.configuration.counts, source, target)
            if counts in tried or not counts[source]:
                continue
            if monotonic() > until:
                break
            tried.add(counts)
            other = _with_partition(evaluation, best, counts, live)
            if other is not None:
                if best is not option or other.memory <= best.memory:
                    evaluation.options.remove(best)
                evaluation.options.append(other)
                best, improved = other, True


def _with_partition(
    evaluation: Evaluation, option: Option, counts: LayerCounts, live: Sequence[LiveActivations]
) -> Option | None:
    """The order of an option with another partition, if that fits and is faster."""
    request, own, seconds = evaluation.request, option.configuration, option.seconds_without_jitter
    configuration = configure(request, own.placement, counts, own.microbatches)
    peak = max(each.peak(configuration.costs, option.schedule.num_stages) for each in live)
    if peak > (request.memory_limit or inf) or configuration.bound(request).seconds >= seconds:
        return None
    evaluation.report(f"moving layers of {option}")
    other = evaluation.option(option.name, configuration, option.schedule, option.found_by)
    return other if other.seconds_without_jitter < seconds * (1 - _ROUNDING) else None


def _most_promising(evaluation: Evaluation) -> list[Configuration]:
    """Configurations that can win, by the mean of their bound and their best known order."""
    limit = evaluation.request.memory_limit or inf
    every = [
        *(option.configuration for option in evaluation.options),
        *(configuration for _, configuration in evaluation.configurations),
    ]
    fitting = dict.fromkeys(each for each in every if max(each.fixed) < limit)
    bound = {each: _bound(evaluation, each) for each in fitting}
    best: dict[Configuration, float] = {}
    for option in evaluation.options:
        known = best.get(option.configuration, inf)
        best[option.configuration] = min(option.seconds_without_jitter, known)

    def promise(each: Configuration) -> tuple[float, int]:
        return bound[each] + best.get(each, bound[each] * _ASSUMED_EXCESS), each.placement.num_stages

    return sorted((each for each in bound if _can_win(evaluation, bound[each])), key=promise)


def _search(
    evaluation: Evaluation, searcher: Searcher, configuration: Configuration, seconds: float, seed: int
) -> None:
    """Search an order for a configuration; add it unless an option there is as fast with as little memory."""
    try:
        result = _run(evaluation, searcher, configuration, seconds, seed)
    except SearchError:  # no order fits this configuration: its families are too large
        return
    evaluation.missing |= set(result.missing)
    found = evaluation.option("searched", configuration, result.schedule, result.found_by)
    own = [option for option in evaluation.options if option.configuration == configuration]
    if not any(
        option.seconds_without_jitter <= found.seconds_without_jitter and option.memory <= found.memory
        for option in own
    ):
        evaluation.options.append(found)
    if result.interrupted:  # Ctrl-C ends the plan too
        raise KeyboardInterrupt


def _run(
    evaluation: Evaluation, searcher: Searcher, configuration: Configuration, seconds: float, seed: int
) -> SearchResult:
    request = evaluation.request
    optimizer_step = 0.0 if request.objective == "period" else configuration.costs.optimizer_step
    more: dict[str, Any] = {}
    if request.jitter is not None:
        more = {"jitter": request.jitter, "quantile": request.quantile}
    if request.memory_limit is not None and (request.recompute or request.offload):
        more |= {"recompute": request.recompute, "offload": request.offload}

    def on_progress(now: Progress) -> None:
        evaluation.report(f"searching {configuration}", now.fraction, now.best + optimizer_step)

    return searcher(
        ranks=request.ranks,
        microbatches=configuration.microbatches,
        costs=configuration.costs,
        placement=configuration.placement,
        stages_per_rank=configuration.stages_per_rank,
        memory_limit=request.memory_limit,
        objective=request.objective,
        seconds=max(seconds, 0.1),
        seed=seed,
        on_progress=on_progress,
        **more,
    )
