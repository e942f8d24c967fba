"""Explanation of a plan: why the best option wins, and which changes would help; every figure is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from penstock.arguments import plural
from penstock.cost.costs import Costs
from penstock.cost.memory import live_activations
from penstock.cost.prices import ALL_TO_ALL
from penstock.cost.units import Units
from penstock.errors import PlanError
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import training_schedules
from penstock.planning.model import Model
from penstock.planning.options import Option
from penstock.planning.partition import even_partition
from penstock.planning.planner import Plan, run_plan
from penstock.planning.refinement import quantile_seconds
from penstock.planning.request import PlanRequest
from penstock.search import OnProgress
from penstock.simulation.gaps import REASONS, gaps
from penstock.simulation.simulator import simulate

_MORE_MEMORY = 1.25
_SHARE_OF_TIME = 0.25  # of the time for searching, for each change


@dataclass(frozen=True)
class WhatIf:
    """A change, and the best option with it."""

    change: str
    seconds: float
    """Of the best option with that change."""
    gain: float
    """The share of the best option's time that it saves; negative if it is slower."""
    best: str


@dataclass(frozen=True)
class Explanation:
    """Sentences on why the best option wins, and changes, the most helpful first."""

    why: tuple[str, ...]
    what_ifs: tuple[WhatIf, ...]


def explain(plan: Plan, on_progress: OnProgress | None = None) -> Explanation:
    """Explain the best option, and plan again for each change with a quarter of the time for searching."""
    found = sorted(_what_ifs(plan, on_progress), key=lambda each: each.seconds)
    return Explanation(tuple(_why(plan)), tuple(found))


# --- why it wins -----------------------------------------------------------------------------------


def _why(plan: Plan) -> Iterator[str]:
    best, request, units = plan.best, plan.request, plan.units
    idle = best.timeline.bubble(request.objective)
    busiest = max(best.timeline.busy)
    yield (
        f"{best} takes {units.time(best.seconds, 4)}: its busiest rank computes for {units.time(busiest, 4)}, "
        f"and the mean rank idles {idle:.1%} of the {request.objective}"
    )
    yield (
        f"no order in this configuration takes less than {units.time(best.bound.seconds, 4)} "
        f"({best.bound.name}: {best.bound.because}), so the gap is at most {best.gap:.1%}"
    )
    if len(plan.options) > 1:
        yield _against(best, plan.options[1], units)
    yield from _memory(plan)
    if reasons := _reasons(best):
        yield f"its ranks wait for: {reasons}"
    yield from _against_even(plan)


def _against(best: Option, other: Option, units: Units) -> str:
    more = other.seconds / best.seconds - 1 if best.seconds else 0.0
    ours, theirs = max(best.timeline.busy), max(other.timeline.busy)
    if abs(theirs - ours) <= 1e-3 * ours:
        why = "its busiest rank computes as long, so it idles more"
    elif theirs > ours:
        why = f"its busiest rank computes for {units.time(theirs, 4)} instead of {units.time(ours, 4)}"
    else:
        why = f"its busiest rank computes for {units.time(theirs, 4)} only, but it idles more"
    return f"the next, {other}, takes {more:.2%} longer: {why}"


def _memory(plan: Plan) -> Iterator[str]:
    best, limit, units = plan.best, plan.request.memory_limit, plan.units
    text = f"it needs {units.memory(best.memory)}" + ("" if limit is None else f" of {units.memory(limit)}")
    if len(plan.frontier) > 1:
        other = plan.frontier[1]
        more = other.seconds / best.seconds - 1 if best.seconds else 0.0
        text += f"; the fastest option with less memory, {other}, "
        text += f"needs {units.memory(other.memory)} and takes {more:.2%} longer"
    yield text
    if faster := [each for each in plan.too_large if each.bound < best.seconds_without_jitter]:
        count = f"{len(faster)} of {plural(len(plan.too_large), 'order')} over the memory limit might be faster"
        yield f"{count}; the smallest of them, {faster[0]}, needs {units.memory(faster[0].memory)}"


def _reasons(best: Option) -> str:
    waits = dict(zip(REASONS, gaps(best.timeline).seconds_by_rank.sum(axis=0).tolist()))
    total = sum(waits.values())
    ordered = sorted(waits.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ordered[:4] if seconds > 0)


def _against_even(plan: Plan) -> Iterator[str]:
    """The gain of the partition: the same configuration with an even one."""
    configuration, request = plan.best.configuration, plan.request
    counts = even_partition(len(request.model.layers), configuration.placement.num_stages)
    if counts != configuration.counts:
        seconds, name = _best_at(plan, request.model.costs(counts, configuration.samples))
        more = seconds / plan.best.seconds - 1 if plan.best.seconds else 0.0
        yield f"with an even partition, {name} takes {plan.units.time(seconds, 4)}, {more:+.1%}"


# --- what would help -------------------------------------------------------------------------------


def _what_ifs(plan: Plan, on_progress: OnProgress | None) -> Iterator[WhatIf]:
    request, best = plan.request, plan.best
    for change, changed in _changes(plan):
        kept = changed.stages_per_rank == request.stages_per_rank
        try:
            again = run_plan(changed, on_progress, plan.searcher)
        except PlanError:
            continue  # nothing fits
        configuration = best.configuration
        costs = changed.model.costs(configuration.counts, configuration.samples)
        unchanged = _seconds(changed, best.schedule, costs) if kept else float("inf")
        seconds = min(again.best.seconds, unchanged)
        name = str(again.best) if again.best.seconds < unchanged else str(best)
        yield _what_if(best, change, seconds, name)
        if again.interrupted:
            return
    balanced = _balanced(best.configuration.costs, best.configuration.placement.num_stages)
    if balanced != best.configuration.costs:
        yield _what_if(best, "perfectly balanced stages", *_best_at(plan, balanced))


def _changes(plan: Plan) -> Iterator[tuple[str, PlanRequest]]:
    request, stages_per_rank = plan.request, plan.best.configuration.stages_per_rank
    shorter = replace(request, seconds=request.seconds * _SHARE_OF_TIME)
    common = request.model.common
    if request.memory_limit is not None:
        more = request.memory_limit * _MORE_MEMORY
        yield (
            f"25 % more memory, {request.model.units.memory(more)} per rank",
            replace(shorter, memory_limit=more),
        )
    if common.latency and not isinstance(common.latency, tuple):
        yield "half the latency", _with_common(shorter, latency=common.latency / 2)
    if common.bandwidth is not None and not isinstance(common.bandwidth, tuple):
        yield "twice the bandwidth", _with_common(shorter, bandwidth=common.bandwidth * 2)
    if common.launch_overhead:
        yield "half the launch overhead", _with_common(shorter, launch_overhead=common.launch_overhead / 2)
    if any(getattr(layer.costs, name) for layer in request.model.layers for name in ALL_TO_ALL):
        yield "half the all-to-all", replace(shorter, model=_with_half_the_all_to_all(request.model))
    if request.stages_per_rank is None and request.ranks > 1 and isinstance(stages_per_rank, int):
        for other in (stages_per_rank - 1, stages_per_rank + 1):
            if other >= 1 and request.ranks * other <= len(request.model.layers):
                yield (
                    f"{plural(other, 'stage')} per rank instead of {stages_per_rank}",
                    replace(shorter, stages_per_rank=other),
                )


def _with_half_the_all_to_all(model: Model) -> Model:
    layers = []
    for layer in model.layers:
        half: dict[str, Any] = {name: getattr(layer.costs, name) / 2 for name in ALL_TO_ALL}
        layers.append(replace(layer, costs=replace(layer.costs, **half)))
    return replace(model, layers=tuple(layers))


def _with_common(request: PlanRequest, **changed: float) -> PlanRequest:
    values: dict[str, Any] = changed
    return replace(request, model=replace(request.model, common=replace(request.model.common, **values)))


def _what_if(best: Option, change: str, seconds: float, name: str) -> WhatIf:
    return WhatIf(change, seconds, 1 - seconds / best.seconds if best.seconds else 0.0, name)


def _best_at(plan: Plan, costs: Costs) -> tuple[float, str]:
    """The best order at other costs in the configuration of the best option: its own, or a family."""
    configuration, request, stages = plan.best.configuration, plan.request, plan.best.schedule.num_stages
    known = {str(plan.best): plan.best.schedule}
    for schedule in training_schedules(
        request.ranks, configuration.microbatches, configuration.stages_per_rank
    ):
        peak = max(each.peak(costs, stages) for each in live_activations(schedule.table))
        if schedule.placement == configuration.placement and peak <= (request.memory_limit or inf):
            known[f"{schedule.name} ({configuration})"] = schedule
    plain = {name: _simulated(request, schedule, costs) for name, schedule in known.items()}
    best = min(plain, key=lambda name: plain[name])
    return _seconds(request, known[best], costs), best


def _seconds(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    """The seconds of an order at other costs."""
    if request.jitter is not None:
        return quantile_seconds(request, schedule, costs)
    return _simulated(request, schedule, costs)


def _simulated(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    return request.seconds_of(simulate(schedule, costs, with_period=request.objective == "period"))


def _balanced(costs: Costs, stages: int) -> Costs:
    """The same total work, divided equally among the stages."""
    names = ("forward", "backward_input", "backward_weight", "backward", *ALL_TO_ALL)
    means: dict[str, Any] = {
        name: tuple([fmean(costs.per_stage(name, stages))] * stages)
        for name in names
        if getattr(costs, name) is not None
    }
    return replace(costs, **means)
