"""Explanation of a job's plan: where the time of the best option goes, and what would make it faster."""

from __future__ import annotations

from dataclasses import replace

from penstock.cost.estimate.devices import Device
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.cost.estimate.roofline import operation_seconds
from penstock.cost.units import bytes_text, seconds_text
from penstock.errors import PlanError
from penstock.planning.explanation import Explanation, WhatIf
from penstock.planning.job.evaluation import OnJobProgress
from penstock.planning.job.layouts import JobOption
from penstock.planning.job.planner import JobPlan, plan_job

_REPLAN_BUDGET = 0.3


def explain_job(plan: JobPlan, on_progress: OnJobProgress | None = None) -> Explanation:
    """Explain the best option; changes are compared without jitter and without searched orders."""
    found = sorted(_what_ifs(plan, on_progress), key=lambda each: -each.gain)
    return Explanation(tuple(_why(plan)), tuple(found))


def time_shares(plan: JobPlan, option: JobOption) -> dict[str, float]:
    """Shares of the step that the mean rank spends on what."""
    estimator = Estimator(plan.request.config, plan.request.device)
    found = estimator(option.layout.parallel_config(plan.request))
    factor = option.layout.microbatches / option.layout.pipeline / option.seconds
    shares = {name: seconds * factor for name, seconds in _seconds(found).items()}
    busy = (1 - option.bubble) * option.makespan / option.seconds
    shares["all-to-all that nothing hides"] = max(0.0, busy - sum(shares.values()))
    shares["idle"] = option.bubble * option.makespan / option.seconds
    shares["optimizer step and rest"] = 1 - option.makespan / option.seconds
    return shares


def _seconds(found: Estimate) -> dict[str, float]:
    """Seconds of one microbatch in all layers, by what bounds them."""
    totals = {"matmul": 0.0, "attention": 0.0, "memory": 0.0}
    compute = recomputed = 0.0
    kinds = found.config.kinds
    for kind, layer in found.by_kind.items():
        count = kinds.count(kind)
        for each in layer.operations.operations:
            seconds = operation_seconds(each, found.device, found.parallel.precision).total
            totals[each.resource] += count * seconds
        compute += count * layer.seconds.compute.total
        recomputed += count * layer.seconds.recomputed
    return {
        "matrix products": totals["matmul"],
        "attention": totals["attention"],
        "memory-bound operations": totals["memory"],
        "recomputation": recomputed,
        "tensor and context parallel communication": compute - recomputed - sum(totals.values()),
    }


def _why(plan: JobPlan) -> list[str]:
    best, limit = plan.best, plan.request.memory_limit
    shares = time_shares(plan, best)
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
    lines = [
        f"{best} takes {seconds_text(best.seconds)}; its lower bound is {seconds_text(best.bound)}",
        f"where its time goes: {parts}",
        f"it needs {bytes_text(best.memory)} of {bytes_text(limit)}",
    ]
    if len(plan.ranking) > 1:
        other = plan.ranking[1]
        lines.append(
            f"the next, {other}, takes {other.seconds / best.seconds - 1:.1%} longer: {_main(plan, other)}"
        )
    small = next((each for each in plan.frontier if each.memory < best.memory * 0.9), None)
    if small is not None:
        lines.append(
            f"the fastest with 10 % less memory, {small}, needs {bytes_text(small.memory)} and takes "
            f"{small.seconds / best.seconds - 1:.1%} longer"
        )
    if plan.data_sizes.excluded:
        lines.append(str(plan.data_sizes))
    return lines


def _main(plan: JobPlan, other: JobOption) -> str:
    """What takes the other option longer, most of all."""
    mine, theirs = (time_shares(plan, each) for each in (plan.best, other))
    names = dict.fromkeys((*mine, *theirs))
    longer = {
        name: theirs.get(name, 0.0) * other.seconds - mine.get(name, 0.0) * plan.best.seconds for name in names
    }
    name = max(longer, key=lambda each: longer[each])
    return f"{seconds_text(longer[name], 3)} more of {name}" if longer[name] > 0 else "everything a little"


def _what_ifs(plan: JobPlan, on_progress: OnJobProgress | None) -> list[WhatIf]:
    request, device, best = plan.request, plan.request.device, plan.best
    plain = replace(request, jitter=None, search=False)
    found = [
        _gain(plan, change, plan.evaluation.exact(best, replace(request, device=other)))
        for change, other in _devices(device).items()
    ]
    for change, more in {
        f"25 % more memory, {bytes_text(1.25 * request.memory_limit)}": {
            "memory_limit": 1.25 * request.memory_limit
        },
        f"twice the batch, {2 * request.batch}, per sample": {"batch": 2 * request.batch},
    }.items():
        try:
            changed = replace(plain, budget=_REPLAN_BUDGET * request.budget, **more)  # type: ignore[arg-type]
            again = plan_job(changed, on_progress)
        except PlanError:
            continue
        samples = request.batch / again.request.batch
        option = replace(again.best, seconds=again.best.seconds * samples)
        if option.seconds < best.seconds_without_jitter or samples != 1:
            found.append(_gain(plan, change, option))
    return found


def _devices(device: Device) -> dict[str, Device]:
    share = device.attainable
    return {
        "twice the bandwidth between nodes": replace(device, network_link=2 * device.network_link),
        "twice the bandwidth within a node": replace(device, node_link=2 * device.node_link),
        "twice the memory bandwidth": replace(device, memory_bandwidth=2 * device.memory_bandwidth),
        "no overhead of kernels": replace(device, attainable=replace(share, kernel_seconds=1e-12)),
    }


def _gain(plan: JobPlan, change: str, option: JobOption) -> WhatIf:
    return WhatIf(change, option.seconds, 1 - option.seconds / plan.best.seconds_without_jitter, str(option))
