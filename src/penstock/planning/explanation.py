"""Explanation of a plan: why the best option wins, and which changes would help; every figure is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from penstock.arguments import plural
from penstock.cost.costs import Costs
from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.estimate import estimate, operation_seconds
from penstock.cost.memory import live_activations
from penstock.cost.prices import ALL_TO_ALL
from penstock.cost.units import bytes_text, seconds_text
from penstock.errors import PlanError
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import Option
from penstock.planning.jobs import EstimatedStages, JobOption, JobRequest, data_sizes, exact
from penstock.planning.layers import (
    PlanRequest,
    quantile_seconds,
    training_schedules,
)
from penstock.planning.partition import even_partition
from penstock.planning.planner import JobPlan, LayerPlan, plan
from penstock.search import OnProgress
from penstock.simulation.gaps import REASONS, gaps

_MORE_MEMORY = 1.25
_SHARE_OF_TIME = 0.25
"""Of the time for searching, for each change to a plan for layers."""
_SHARE_OF_BUDGET = 0.3
"""Of the budget, for each change to a job's plan."""


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


def explain(made: LayerPlan | JobPlan, on_progress: OnProgress | None = None) -> Explanation:
    """Explain the best option, and plan again for each change with a part of the time or budget."""
    if isinstance(made.request, JobRequest):
        why, what_ifs = _why_job(made), _job_what_ifs(made, on_progress)
    else:
        why, what_ifs = _why_layers(made), _layer_what_ifs(made, on_progress)
    return Explanation(tuple(why), tuple(sorted(what_ifs, key=lambda each: -each.gain)))


def _longer(other: Option, best: Option) -> float:
    return other.seconds / best.seconds - 1 if best.seconds else 0.0


def _what_if(change: str, seconds: float, best: float, name: object) -> WhatIf:
    return WhatIf(change, seconds, 1 - seconds / best if best else 0.0, str(name))


# --- layers: why it wins ---------------------------------------------------------------------------


def _why_layers(made: LayerPlan) -> Iterator[str]:
    best, units = made.best, made.units
    yield (
        f"{best} takes {units.time(best.seconds, 4)}: its busiest rank computes for "
        f"{units.time(max(best.timeline.busy), 4)}, and the mean rank idles {best.bubble:.1%} of the "
        f"{made.request.objective}"
    )
    yield (
        f"no order in this configuration takes less than {units.time(best.bound.seconds, 4)} "
        f"({best.bound.name}: {best.bound.because}), so the gap is at most {best.gap:.1%}"
    )
    if len(made.options) > 1:
        other = made.options[1]
        ours, theirs = max(best.timeline.busy), max(other.timeline.busy)
        if abs(theirs - ours) <= 1e-3 * ours:
            reason = "its busiest rank computes as long, so it idles more"
        elif theirs > ours:
            reason = f"its busiest rank computes for {units.time(theirs, 4)} instead of {units.time(ours, 4)}"
        else:
            reason = f"its busiest rank computes for {units.time(theirs, 4)} only, but it idles more"
        yield f"the next, {other}, takes {_longer(other, best):.2%} longer: {reason}"
    yield from _memory_of_layers(made)
    waits = dict(zip(REASONS, gaps(best.timeline).seconds_by_rank.sum(axis=0).tolist()))
    total, longest = sum(waits.values()), sorted(waits.items(), key=lambda pair: -pair[1])[:4]
    if parts := [f"{name} {seconds / total:.0%}" for name, seconds in longest if seconds > 0]:
        yield f"its ranks wait for: {', '.join(parts)}"
    configuration = best.configuration
    counts = even_partition(len(made.request.model.layers), configuration.placement.num_stages)
    if counts != configuration.counts:
        seconds, name = _best_at(made, made.request.model.costs(counts, configuration.samples))
        more = seconds / best.seconds - 1 if best.seconds else 0.0
        yield f"with an even partition, {name} takes {units.time(seconds, 4)}, {more:+.1%}"


def _memory_of_layers(made: LayerPlan) -> Iterator[str]:
    best, limit, units = made.best, made.request.memory_limit, made.units
    text = f"it needs {units.memory(best.memory)}" + ("" if limit is None else f" of {units.memory(limit)}")
    if len(made.frontier) > 1:
        other = made.frontier[1]
        text += f"; the fastest option with less memory, {other}, "
        text += f"needs {units.memory(other.memory)} and takes {_longer(other, best):.2%} longer"
    yield text
    too_large = made.evaluation.too_large
    if faster := [each for each in too_large if each.bound < best.seconds_without_jitter]:
        count = f"{len(faster)} of {plural(len(too_large), 'order')} over the memory limit might be faster"
        yield f"{count}; the smallest of them, {faster[0]}, needs {units.memory(faster[0].memory)}"


# --- layers: what would help -----------------------------------------------------------------------


def _layer_what_ifs(made: LayerPlan, on_progress: OnProgress | None) -> Iterator[WhatIf]:
    request, best, configuration = made.request, made.best, made.best.configuration
    for change, changed in _changes(made):
        try:
            again = plan(changed, on_progress=on_progress, searcher=made.evaluation.searcher)
        except PlanError:
            continue  # nothing fits
        costs = changed.model.costs(configuration.counts, configuration.samples)
        kept = changed.stages_per_rank == request.stages_per_rank
        unchanged = _seconds(changed, best.schedule, costs) if kept else inf
        chosen = again.best if again.best.seconds < unchanged else best
        yield _what_if(change, min(again.best.seconds, unchanged), best.seconds, chosen)
        if again.interrupted:
            return
    balanced = _balanced(configuration.costs, configuration.placement.num_stages)
    if balanced != configuration.costs:
        seconds, name = _best_at(made, balanced)
        yield _what_if("perfectly balanced stages", seconds, best.seconds, name)


def _changes(made: LayerPlan) -> Iterator[tuple[str, PlanRequest]]:
    request, stages_per_rank = made.request, made.best.configuration.stages_per_rank
    shorter = replace(request, seconds=request.seconds * _SHARE_OF_TIME)
    model, common = request.model, request.model.common

    def with_common(**changed: Any) -> PlanRequest:  # noqa: ANN401 -- fields of Costs
        return replace(shorter, model=replace(model, common=replace(common, **changed)))

    if request.memory_limit is not None:
        more = request.memory_limit * _MORE_MEMORY
        name = f"25 % more memory, {request.units.memory(more)} per rank"
        yield name, replace(shorter, memory_limit=more)
    if common.latency and not isinstance(common.latency, tuple):
        yield "half the latency", with_common(latency=common.latency / 2)
    if common.bandwidth is not None and not isinstance(common.bandwidth, tuple):
        yield "twice the bandwidth", with_common(bandwidth=common.bandwidth * 2)
    if common.launch_overhead:
        yield "half the launch overhead", with_common(launch_overhead=common.launch_overhead / 2)
    if any(getattr(layer.costs, name) for layer in model.layers for name in ALL_TO_ALL):
        halves = [{name: getattr(each.costs, name) / 2 for name in ALL_TO_ALL} for each in model.layers]
        layers = [replace(each, costs=replace(each.costs, **half)) for each, half in zip(model.layers, halves)]
        yield "half the all-to-all", replace(shorter, model=replace(model, layers=tuple(layers)))
    if request.stages_per_rank is None and request.ranks > 1 and isinstance(stages_per_rank, int):
        for other in (stages_per_rank - 1, stages_per_rank + 1):
            if other >= 1 and request.ranks * other <= len(model.layers):
                name = f"{plural(other, 'stage')} per rank instead of {stages_per_rank}"
                yield name, replace(shorter, stages_per_rank=other)


def _best_at(made: LayerPlan, costs: Costs) -> tuple[float, str]:
    """Return the best order at other costs in the configuration of the best option: its own, or a family."""
    configuration, request = made.best.configuration, made.request
    stages, limit = made.best.schedule.num_stages, request.memory_limit or inf
    known = {str(made.best): made.best.schedule}
    for schedule in training_schedules(
        request.ranks, configuration.microbatches, configuration.stages_per_rank
    ):
        peak = max(each.peak(costs, stages) for each in live_activations(schedule.table))
        if schedule.placement == configuration.placement and peak <= limit:
            known[f"{schedule.name} ({configuration})"] = schedule
    best = min(known, key=lambda name: request.seconds_of(request.timeline(known[name], costs)))
    return _seconds(request, known[best], costs), best


def _seconds(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    if request.jitter is None:
        return request.seconds_of(request.timeline(schedule, costs))
    return quantile_seconds(request, schedule, costs)


def _balanced(costs: Costs, stages: int) -> Costs:
    """Return the same total work, divided equally among the stages."""
    names = ("forward", "backward_input", "backward_weight", "backward", *ALL_TO_ALL)
    means: dict[str, Any] = {
        name: tuple([fmean(costs.per_stage(name, stages))] * stages)
        for name in names
        if getattr(costs, name) is not None
    }
    return replace(costs, **means)


# --- jobs: where the time goes ---------------------------------------------------------------------


def time_shares(option: JobOption) -> dict[str, float]:
    """Return the shares of the step that the mean rank spends on what."""
    found, seconds = option.configuration.stages.estimate, option.seconds
    totals = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    compute = recomputed = 0.0
    for kind, layer in found.by_kind.items():
        count = found.config.kinds.count(kind)
        for each in layer.operations.operations:
            taken = operation_seconds(each, found.device, found.parallel.precision).total
            totals[each.resource] += count * taken
        compute += count * layer.seconds.compute.total
        recomputed += count * layer.seconds.recomputed
    of_microbatch = {
        "matrix products": totals["matmul"],
        "attention": totals["attention"],
        "memory-bound operations": totals["memory"],
        "recomputation": recomputed,
        "tensor and context parallel communication": compute - recomputed - sum(totals.values()),
    }
    factor = option.layout.microbatches / option.layout.pipeline / seconds
    shares = {name: each * factor for name, each in of_microbatch.items()}
    busy = (1 - option.bubble) * option.makespan / seconds
    shares["all-to-all that nothing hides"] = max(0.0, busy - sum(shares.values()))
    shares["idle"] = option.bubble * option.makespan / seconds
    shares["optimizer step and rest"] = 1 - option.makespan / seconds
    return shares


def _why_job(made: JobPlan) -> Iterator[str]:
    best = made.best
    parts = ", ".join(f"{name} {share:.0%}" for name, share in time_shares(best).items() if share >= 0.005)
    bound = seconds_text(best.configuration.bound)
    yield f"{best} takes {seconds_text(best.seconds)}; its lower bound is {bound}"
    yield f"where its time goes: {parts}"
    yield f"it needs {bytes_text(best.memory)} of {bytes_text(made.request.memory_limit)}"
    if other := next((each for each in made.options if each.layout.sizes != best.layout.sizes), None):
        yield f"the next, {other}, takes {_longer(other, best):.1%} longer: {_main_difference(best, other)}"
    if small := next((each for each in made.frontier if each.memory < best.memory * 0.9), None):
        yield (
            f"the fastest with 10 % less memory, {small}, needs {bytes_text(small.memory)} and takes "
            f"{_longer(small, best):.1%} longer"
        )
    if excluded := str(data_sizes(made.request)):
        yield excluded


def _main_difference(best: JobOption, other: JobOption) -> str:
    """Return what takes the other option longer, most of all."""
    mine, theirs = time_shares(best), time_shares(other)
    longer = {name: theirs[name] * other.seconds - mine[name] * best.seconds for name in mine}
    name = max(longer, key=lambda each: longer[each])
    return f"{seconds_text(longer[name], 3)} more of {name}" if longer[name] > 0 else "everything a little"


# --- jobs: what would help -------------------------------------------------------------------------


def _job_what_ifs(made: JobPlan, on_progress: OnProgress | None) -> Iterator[WhatIf]:
    """Compare changes without jitter and without searched orders."""
    request, best = made.request, made.best
    before = best.seconds_without_jitter
    for change, device in _faster_devices(request.device).items():
        found = estimate(request.config, best.layout.parallel, device)
        configuration = replace(best.configuration, stages=EstimatedStages(found))
        option = exact(replace(best, configuration=configuration))
        yield _what_if(change, option.seconds, before, option)
    shorter = replace(request, jitter=None, search=False, budget=_SHARE_OF_BUDGET * request.budget)
    memory, batch = _MORE_MEMORY * request.memory_limit, 2 * request.batch
    for change, changed in {
        f"25 % more memory, {bytes_text(memory)}": replace(shorter, memory_limit=memory),
        f"twice the batch, {batch}, per sample": replace(shorter, batch=batch),
    }.items():
        try:
            again = plan(changed, on_progress=on_progress).best
        except PlanError:
            continue
        samples = request.batch / changed.batch
        if again.seconds < before or samples != 1:
            yield _what_if(change, again.seconds * samples, before, again)


def _faster_devices(device: Device) -> dict[str, Device]:
    share = device.attainable
    return {
        "twice the bandwidth between nodes": replace(device, network_link=2 * device.network_link),
        "twice the bandwidth within a node": replace(device, node_link=2 * device.node_link),
        "twice the memory bandwidth": replace(device, memory_bandwidth=2 * device.memory_bandwidth),
        "no overhead of kernels": replace(device, attainable=replace(share, kernel_seconds=1e-12)),
    }
