"""`plan_job`: from a model config and devices to a `JobPlan`, a ranked list of options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil, lcm
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.arguments import plural, some
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.cost.units import Units, bytes_text, seconds_text
from penstock.display import Displayed
from penstock.errors import Message, Parameter, PlanError
from penstock.planning.estimated_model import estimated_model, stage_costs
from penstock.planning.job.evaluation import JobEvaluation, OnJobProgress, Stages
from penstock.planning.job.layouts import JobOption, divides_batch, job_layouts, parallel_sizes
from penstock.planning.job.refinement import rank_by_quantile, refine_orders, try_techniques
from penstock.planning.job.request import JobRequest
from penstock.planning.options import TECHNIQUES, frontier
from penstock.planning.planner import write_best

# Data parallel sizes of a job: those that its batch allows and excludes, and batches that allow more.


@dataclass(frozen=True)
class DataSizes:
    """The data parallel sizes of all divisions of the devices, by whether they divide the batch."""

    request: JobRequest
    allowed: tuple[int, ...]
    excluded: tuple[int, ...]

    @property
    def nearest_batches(self) -> dict[int, tuple[int, ...]]:
        """The next smaller and the next larger batch that keep every allowed size, with the sizes they add."""
        batch, least = self.request.batch, self.request.microbatch_size or 1
        common = lcm(*self.allowed) * least
        steps = {lcm(common, size * least) for size in self.excluded}
        smaller = max((step * ((batch - 1) // step) for step in steps), default=0)
        larger = min((step * (batch // step + 1) for step in steps), default=0)
        return {
            near: tuple(size for size in self.excluded if divides_batch(near, size, least))
            for near in (smaller, larger)
            if near > 0
        }

    def __str__(self) -> str:
        """The rule that excludes sizes, and what to try; empty if none is excluded."""
        if not self.excluded:
            return ""
        fixed, verb = self.request.microbatch_size, "are" if len(self.excluded) > 1 else "is"
        size = "microbatch size" if fixed is None else f"microbatch size {fixed}"
        nearest = (
            f"a batch of {near} also allows DP {some(added)}" for near, added in self.nearest_batches.items()
        )
        return (
            f"DP {some(self.excluded)} {verb} left out: the batch of {self.request.batch} must be divisible by "
            f"DP x {size}; {', '.join(nearest)}"
        )


def data_sizes(request: JobRequest) -> DataSizes:
    """The data parallel sizes of a request."""
    every = sorted({data for _, _, _, data in parallel_sizes(request)})
    least = request.microbatch_size or 1
    allowed = tuple(size for size in every if divides_batch(request.batch, size, least))
    return DataSizes(request, allowed, tuple(size for size in every if size not in allowed))


_MAX_ZERO_STAGE = 3
"""The ZeRO stage that shards everything."""


@dataclass(frozen=True, eq=False)
class JobPlan(Displayed):
    """The options that fit, ranked."""

    request: JobRequest
    evaluation: JobEvaluation
    interrupted: bool = False

    @cached_property
    def ranking(self) -> list[JobOption]:
        """The best option of each layout, fastest first."""
        return self.evaluation.ranked()

    @cached_property
    def options(self) -> tuple[JobOption, ...]:
        """The ranking and the frontier, fastest first."""
        both = dict.fromkeys((*self.ranking, *self.frontier))
        return tuple(sorted(both, key=lambda each: each.sort_key))

    @property
    def best(self) -> JobOption:
        """The fastest option."""
        return self.options[0]

    @cached_property
    def frontier(self) -> list[JobOption]:
        """The Pareto frontier of time and memory over all that was simulated, fastest first."""
        return frontier(self.evaluation.options)

    @property
    def bound(self) -> float:
        """Lower bound on the makespan of any candidate that may fit."""
        return self.evaluation.bound

    @cached_property
    def data_sizes(self) -> DataSizes:
        """The data parallel sizes that the batch allows, and those that it excludes."""
        return data_sizes(self.request)

    @property
    def memory_limit(self) -> float | None:
        """Bytes per device."""
        return self.request.memory_limit

    @property
    def time_name(self) -> str:
        """What the seconds of an option are."""
        return "makespan + gradient reductions + optimizer step"

    @property
    def units(self) -> Units:
        """Estimated costs are in seconds and bytes."""
        return Units()

    @property
    def title(self) -> str:
        """Of a picture."""
        request = self.request
        return (
            f"{request.config.name}: {request.devices} {request.device.name}, {plural(request.batch, 'sample')}"
        )

    def to_keys(self, option: JobOption) -> dict[str, Any]:
        """An option as values for JSON."""
        layout = option.layout
        return {
            "tp": layout.tensor,
            "cp": layout.context,
            "ep": layout.expert,
            "pp": layout.pipeline,
            "dp": layout.data,
            "microbatch_size": layout.microbatch_size,
            "microbatches": layout.microbatches,
            "recompute": layout.recompute,
            "schedule": option.family,
            "technique": option.technique,
            "stages_per_rank": option.stages_per_rank,
            "stage_to_rank": list(option.placement.stage_to_rank),
            "layers_per_stage": list(option.counts),
            "seconds": option.seconds,
            "seconds_without_jitter": option.seconds_without_jitter,
            "makespan": option.makespan,
            "tokens_per_second_per_device": option.tokens_per_second,
            "mfu": option.mfu,
            "bubble": option.bubble,
            "peak_memory": option.memory,
            "bound": option.bound,
            "exact": option.is_exact,
            "on_frontier": option in self.frontier,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per option, fastest first."""
        return [self.to_keys(option) for option in self.options]

    @cached_property
    def _estimate(self) -> Estimate:
        """For the best option."""
        return Estimator(self.request.config, self.request.device)(
            self.best.layout.parallel_config(self.request)
        )

    @property
    def layout(self) -> str:
        """The layers of each stage of the best option, as `split`, `penstock export` and Megatron take it."""
        model = estimated_model(self._estimate, self.best.layout.pipeline)
        return str(model.layout(self.best.counts))

    def write(self, folder: str | PathLike[str]) -> list[Path]:
        """Write the best option: `schedule.json`, `costs.toml`, and `plan.json` with its layout and numbers."""
        best, found = self.best, self._estimate
        keys = {"model": self.request.config.name, **self.to_keys(best), "layout": self.layout}
        costs = stage_costs(found, best.placement, best.counts)
        return write_best(folder, best.schedule, costs, keys)


def plan_job(request: JobRequest, on_progress: OnJobProgress | None = None) -> JobPlan:
    """Choose parallel sizes, microbatches, recomputation, stages and schedule for a model and its devices."""
    evaluation = JobEvaluation(request, on_progress)
    interrupted = False
    try:
        evaluation.run()
        try_techniques(evaluation)
        refine_orders(evaluation)
        rank_by_quantile(evaluation)
    except KeyboardInterrupt:  # keeps the best so far
        if not evaluation.options:
            raise
        interrupted = True
    if not evaluation.options:
        raise PlanError(_no_option(evaluation))
    evaluation.options.sort(key=lambda each: each.sort_key)
    return JobPlan(request, evaluation, interrupted)


# --- nothing fits -----------------------------------------------------------------------------------


def _no_option(evaluation: JobEvaluation) -> Message:
    """Why there is no option, and the smallest change that would fit."""
    request = evaluation.request
    if not evaluation.counts["layouts"]:
        return _no_layout(request)
    estimator = Estimator(request.config, request.device)
    needs = []
    for layout in evaluation.candidates.too_large:
        stages = Stages(estimator(layout.parallel_config(request)))
        counts = stages.counts(layout.pipeline)
        needs.append((stages.memory_of_1f1b(counts, layout.microbatches), stages.state_of(counts), layout))
    least, state, layout = min(needs, key=lambda each: each[0])
    fitting = [*_fitting_techniques(evaluation), *_fitting_changes(request, least)]
    advice = Message("give devices with more memory")
    if fitting:
        advice = Message("what would fit: ", Message.join(", or ", fitting[:3]))
    limit = f"{bytes_text(request.memory_limit)} each ({request.limit_share})"
    devices = f"{request.devices} {request.device.name} with {limit}"
    return Message(
        f"{request.config.name} fits no layout of {devices}: the smallest, {layout} with 1F1B and "
        f"{layout.recompute} recomputation, needs {bytes_text(least)}, of which up to {bytes_text(state)} for "
        "weights, gradients and optimizer state; ",
        advice,
    )


def _fitting_techniques(evaluation: JobEvaluation) -> list[Message]:
    """Techniques of schedules with which something fits, as an option; none if they were tried already."""
    request = evaluation.request
    found = []
    for name in TECHNIQUES if not request.techniques else ():
        evaluation.request = replace(request, techniques=(name,))
        try_techniques(evaluation)
        if evaluation.options:
            best = min(evaluation.options, key=lambda each: each.sort_key)
            each = Parameter("techniques", name), f" ({seconds_text(best.seconds)} per step)"
            found.append(Message(*each))
            evaluation.options = []
    evaluation.request = request
    return found


def _fitting_changes(request: JobRequest, least: float) -> Iterator[Message]:
    """Parameters with which 1F1B fits, the smallest number of devices last."""
    changes: dict[str, object] = {}
    if (request.microbatch_size or 1) > 1:
        changes["microbatch_size"] = 1
    if request.recompute not in {None, "full"}:
        changes["recompute"] = "full"
    if request.zero < _MAX_ZERO_STAGE:
        changes["zero"] = _MAX_ZERO_STAGE
    for name, value in changes.items():
        if _fits(request, {name: value}):
            instead = f" instead of {request.zero}" if name == "zero" else ""
            yield Message(Parameter(name, value), instead)
    if request.memory_limit < least <= request.device.memory_bytes:
        yield Message(Parameter("memory_limit", f"{ceil(least / 1e8) / 10:g}GB"))
    more = (n * request.devices for n in (2, 4, 8, 16, 32))
    fitting = (n for n in more if _fits(request, {"devices": n}))
    yield from (Message(Parameter("devices", n)) for n in islice(fitting, 1))


def _fits(request: JobRequest, change: dict[str, Any]) -> bool:
    """Whether 1F1B fits some layout after a change."""
    changed: JobRequest = replace(request, **change)
    estimator = Estimator(changed.config, changed.device)
    for layout in job_layouts(changed):
        stages = Stages(estimator(layout.parallel_config(changed)))
        counts = stages.counts(layout.pipeline)
        if stages.memory_of_1f1b(counts, layout.microbatches) <= changed.memory_limit:
            return True
    return False


def _no_layout(request: JobRequest) -> Message:
    """No division of the devices divides everything else."""
    if larger := max(data_sizes(request).nearest_batches, default=0):
        return Message(
            *(
                Parameter("batch", request.batch),
                f" cannot be divided over {plural(request.devices, 'device')}",
            ),
            ": no data parallel size divides both with the given sizes; the next that works is ",
            Parameter("batch", larger),
        )
    return Message(
        *(Parameter("devices", request.devices), f" cannot be divided for {request.config.name}, "),
        *(Parameter("batch", request.batch), ": "),
        f"tensor parallel sizes divide {plural(request.config.attention.heads, 'head')}, pipeline sizes are "
        f"up to {plural(request.config.layers, 'block')}, data parallel sizes divide the batch; try a power "
        "of two",
    )
