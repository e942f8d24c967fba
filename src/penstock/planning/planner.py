"""`penstock.plan`: from the costs of layers to a `Plan`, a ranked list of options."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.arguments import plural
from penstock.cost.costs import Costs
from penstock.cost.units import Units
from penstock.display import Displayed
from penstock.errors import Message, Parameter, PlanError
from penstock.formats import write_text
from penstock.ir.placement import StagesPerRank
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import Evaluation
from penstock.planning.model import Model, read_model
from penstock.planning.options import TECHNIQUES, Option, Rejected, class_of, frontier
from penstock.planning.refinement import Searcher, rank_by_quantile, refine
from penstock.planning.request import PlanRequest
from penstock.search import OnProgress, search
from penstock.search.passes import without_memory_actions
from penstock.simulation.simulator import simulate

_CLASSES = ("none", "recompute", "offload", "both")


@dataclass(frozen=True, eq=False)
class Plan(Displayed):
    """The options that fit, ranked, and those that were rejected."""

    request: PlanRequest
    options: tuple[Option, ...]
    """Fastest first; among equals the one with the least memory."""
    too_large: tuple[Rejected, ...]
    """Orders that exceed the memory limit with every partition tried, smallest first."""
    pruned: tuple[Rejected, ...]
    """Orders that were not simulated: their bounds show that they can neither win nor be on the frontier."""
    not_evaluated: int
    """Number of configurations with too many stages and microbatches to be evaluated."""
    bound: float
    """Lower bound for any order in any configuration that was evaluated, in seconds."""
    interrupted: bool = False
    missing: tuple[str, ...] = ()
    """Optional parts of the search that are not installed."""
    searcher: Searcher | None = field(default=None, repr=False)

    @property
    def best(self) -> Option:
        """The fastest option."""
        return self.options[0]

    @property
    def title(self) -> str:
        """Of a picture."""
        ranks, samples = plural(self.request.ranks, "rank"), plural(self.request.samples, "sample")
        return f"{self.request.model.name}: {ranks}, {samples}"

    @property
    def memory_limit(self) -> float | None:
        """Bytes per rank."""
        return self.request.memory_limit

    @property
    def time_name(self) -> str:
        """What the seconds of an option are."""
        return self.request.objective

    @property
    def units(self) -> Units:
        """Of times and sizes."""
        return self.request.model.units

    @property
    def gap(self) -> float:
        """The excess of the best option over the bound, as a share of the bound."""
        return self.best.seconds_without_jitter / self.bound - 1 if self.bound else 0.0

    @cached_property
    def frontier(self) -> list[Option]:
        """The Pareto frontier of time and memory, fastest first."""
        return frontier(self.options)

    @cached_property
    def by_technique(self) -> dict[str, list[Option]]:
        """For `none`, `recompute`, `offload` and `both`: the frontier of the options with that technique."""
        classes = {name: [o for o in self.options if class_of(o.schedule) == name] for name in _CLASSES}
        return {name: frontier(options) for name, options in classes.items() if options}

    def price(self, option: Option) -> float:
        """How much longer it takes than the same order without techniques, as a share of that."""
        plain = simulate(
            without_memory_actions(option.schedule),
            option.configuration.costs,
            with_period=self.request.objective == "period",
        )
        seconds = self.request.seconds_of(plain)
        return option.seconds_without_jitter / seconds - 1 if seconds else 0.0

    def to_keys(self, option: Option) -> dict[str, Any]:
        """An option as values for JSON."""
        configuration, timeline = option.configuration, option.timeline
        layout = self.request.model.layout(configuration.counts)
        return {
            "schedule": option.name,
            "technique": option.technique,
            "stages_per_rank": configuration.stages_per_rank,
            "placement": configuration.style,
            "stage_to_rank": list(configuration.placement.stage_to_rank),
            "layers_per_stage": list(configuration.counts),
            "layout": None if layout is None else str(layout),
            "microbatches": configuration.microbatches,
            "samples_per_microbatch": configuration.samples,
            "seconds": option.seconds,
            "seconds_without_jitter": option.seconds_without_jitter,
            "samples_per_second": option.samples_per_second,
            "makespan": timeline.makespan,
            "bubble": timeline.bubble(self.request.objective),
            "peak_memory": option.memory,
            "peak_memory_by_rank": list(timeline.peak_memory),
            "bound": option.bound.seconds,
            "binding": option.bound.name,
            "gap": option.gap,
            "found_by": option.found_by,
            "on_frontier": option in self.frontier,
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One row per option, fastest first."""
        return [self.to_keys(option) for option in self.options]

    def write(self, folder: str | PathLike[str]) -> list[Path]:
        """Write the best option: `schedule.json`, `costs.toml`, and `plan.json` with its layout and numbers."""
        keys = {"model": self.request.model.name, **self.to_keys(self.best)}
        return write_best(folder, self.best.schedule, self.best.configuration.costs, keys)


def write_best(
    folder: str | PathLike[str], schedule: Schedule, costs: Costs, keys: dict[str, Any]
) -> list[Path]:
    """Write the files of the best option of a plan; gives their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("schedule.json", "costs.toml", "plan.json")]
    schedule.write(paths[0])
    costs.write(paths[1])
    write_text(json.dumps(keys, indent=2) + "\n", paths[2])
    return paths


def plan(
    model: Model | Costs | str | PathLike[str],
    *,
    ranks: int | None = None,
    memory_limit: float | None = None,
    samples: int | None = None,
    stages_per_rank: StagesPerRank | None = None,
    objective: str = "makespan",
    seconds: float = 10.0,
    seed: int = 0,
    jitter: float | None = None,
    quantile: float = 0.95,
    recompute: bool = False,
    offload: bool = False,
    on_progress: OnProgress | None = None,
    searcher: Searcher | None = None,
) -> Plan:
    """Choose partition, placement, stages per rank, microbatches and schedule for a model.

    `model`            a file (see `penstock.planning.model`), a `Model`, or the costs of stages
    `ranks`            instead of the model's; also `memory_limit` (bytes per rank) and `samples` (per step)
    `stages_per_rank`  one number for all ranks, or a list of one for each; any number unless given
    `objective`        the objective to minimize: `makespan`, `span` or `period`, optimizer step included
    `seconds`          time for searching orders, in addition to evaluating families; 0 for families only
    `jitter`           rank by the `quantile` of the makespan when steps vary by this share
    `recompute`        also offer plans with recomputed stages; `offload`: with activations on the host
    `on_progress`      is called with a `Progress` from time to time

    Ctrl-C ends it with the best so far: the plan is then `interrupted`.
    """
    if isinstance(model, Costs):
        model = Model.of_stages(model)
    elif not isinstance(model, Model):
        model = read_model(model)
    ranks = model.ranks if ranks is None else ranks
    samples = model.samples if samples is None else samples
    if ranks is None or samples is None:
        known = {"ranks": ranks, "samples": samples}
        missing = [Message(Parameter(name)) for name, value in known.items() if value is None]
        lacks = f": the model {model.name!r} does not have it"
        raise PlanError("give ", Message.join(" and ", missing), lacks)
    limit = model.memory if memory_limit is None else memory_limit
    request = PlanRequest(
        *(model, ranks, samples, limit, stages_per_rank, objective, seconds, seed, jitter, quantile),
        recompute=recompute,
        offload=offload,
    )
    return run_plan(request, on_progress, searcher)


def run_plan(
    request: PlanRequest, on_progress: OnProgress | None = None, searcher: Searcher | None = None
) -> Plan:
    """Evaluate, refine and rank all options."""
    evaluation = Evaluation(request, on_progress)
    interrupted = False
    try:
        evaluation.evaluate_families()
        evaluation.evaluate_techniques()
        refine(evaluation, searcher or search)
        rank_by_quantile(evaluation)
    except KeyboardInterrupt:
        if not evaluation.options:
            raise
        interrupted = True
        if not evaluation.has_quantiles:
            request = replace(request, jitter=None)
    if not evaluation.options:
        raise PlanError(_no_option(evaluation))
    return Plan(
        request,
        tuple(sorted(evaluation.options, key=lambda option: option.sort_key)),
        tuple(sorted(evaluation.too_large, key=lambda each: each.memory)),
        tuple(evaluation.pruned),
        evaluation.not_evaluated,
        evaluation.bound,
        interrupted,
        tuple(sorted(evaluation.missing)),
        searcher,
    )


def _more_techniques(request: PlanRequest) -> str:
    more = " or ".join(name for name in TECHNIQUES if not getattr(request, name))
    return f", or techniques: {more}" if more else ""


def _no_option(evaluation: Evaluation) -> str:
    """Why there is no option, and what to change."""
    limit = evaluation.request.memory_limit
    if limit is None or not evaluation.too_large:
        return (
            f"no configuration of {evaluation.not_evaluated} has few enough stages and microbatches to be "
            "evaluated: use fewer"
        )
    least = min(evaluation.too_large, key=lambda each: each.memory)
    units = evaluation.request.model.units
    return (
        f"nothing fits the memory limit of {units.memory(limit)} per rank: the smallest of "
        f"{plural(len(evaluation.too_large), 'order')}, {least}, needs {units.memory(least.memory)}, of which "
        f"{units.memory(max(least.configuration.fixed))} for parameters, gradients and optimizer state: use "
        f"more ranks or memory, smaller microbatches{_more_techniques(evaluation.request)}"
    )
