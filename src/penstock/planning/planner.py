"""From the costs of layers to a ranked list of plans: `plan` asks, weighs, and answers with a `Plan`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.cost.costs import Costs, size_text
from penstock.errors import PlanError
from penstock.formats import write_text
from penstock.planning.evaluation import Told, Weighing
from penstock.planning.model import Model
from penstock.planning.model_files import read_model
from penstock.planning.options import Left, Option, frontier
from penstock.planning.refinement import Searcher, better
from penstock.planning.request import Question
from penstock.planning.robustness import shake
from penstock.search import search

__all__ = ["Plan", "answer", "plan"]


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer: options that fit, ranked, and what was left out."""

    question: Question
    options: tuple[Option, ...]
    """Fastest first; of equals the one that holds less."""
    too_large: tuple[Left, ...]
    """What no partition that was tried makes fit, smallest first."""
    cut: tuple[Left, ...]
    """What was not simulated because its bound says that it can neither win nor be on the frontier."""
    too_long: int
    """How many frames had too many stages and microbatches to be weighed."""
    bound: float
    """No order of the partitions, placements and microbatches that were weighed takes fewer seconds."""
    interrupted: bool = False
    missing: tuple[str, ...] = ()
    """What could not be used for searching because it is not installed."""
    searcher: Searcher | None = field(default=None, repr=False)

    @property
    def best(self) -> Option:
        """The winner."""
        return self.options[0]

    @property
    def gap(self) -> float:
        """How much longer than the bound the winner takes, as a share of it."""
        return self.best.plain_seconds / self.bound - 1 if self.bound else 0.0

    @cached_property
    def frontier(self) -> list[Option]:
        """The options that no other beats in both time and memory, fastest first."""
        return frontier(self.options)

    def to_keys(self, option: Option) -> dict[str, Any]:
        """An option in plain values."""
        frame, timeline = option.frame, option.timeline
        layout = self.question.model.layout(frame.counts)
        return {
            "schedule": option.name,
            "stages_per_rank": frame.stages_per_rank,
            "placement": frame.placement.style,
            "stage_to_rank": list(frame.placement.stage_to_rank),
            "layers_per_stage": list(frame.counts),
            "layout": None if layout is None else str(layout),
            "microbatches": frame.microbatches,
            "samples_per_microbatch": frame.samples,
            "seconds": option.seconds,
            "seconds_without_jitter": option.plain_seconds,
            "samples_per_second": option.samples_per_second,
            "makespan": timeline.makespan,
            "bubble": timeline.bubble(self.question.objective),
            "peak_memory": option.memory,
            "peak_memory_by_rank": list(timeline.peak_memory),
            "bound": option.bound.seconds,
            "binding": option.bound.name,
            "gap": option.gap,
            "found_by": option.found_by,
            "on_frontier": option in self.frontier,
        }

    def write(self, folder: str | PathLike[str]) -> list[Path]:
        """The winner: `schedule.json`, its `costs.toml`, and `plan.json` with its layout and numbers."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in ("schedule.json", "costs.toml", "plan.json")]
        self.best.schedule.write(paths[0])
        self.best.frame.costs.write(paths[1])
        keys = {"model": self.question.model.name, **self.to_keys(self.best)}
        write_text(json.dumps(keys, indent=2) + "\n", paths[2])
        return paths


def plan(
    model: Model | Costs | str | PathLike[str],
    *,
    ranks: int | None = None,
    memory_limit: float | None = None,
    samples: int | None = None,
    stages_per_rank: int | None = None,
    objective: str = "makespan",
    seconds: float = 10.0,
    seed: int = 0,
    jitter: float | None = None,
    quantile: float = 0.95,
    told: Told | None = None,
    searcher: Searcher | None = None,
) -> Plan:
    """Choose partition, placement, stages per rank, microbatches and schedule for a model.

    `model`         a file (see `penstock.planning.model_files`), a `Model`, or the costs of stages
    `ranks`, `memory_limit` (bytes of a rank), `samples` (of a step of this pipeline): instead of the model's
    `stages_per_rank`  any number unless said
    `objective`     what is made short: `makespan`, `span` or `period`, optimizer step included
    `seconds`       for searching orders; 0 takes families only, which come in addition
    `jitter`        rank by the `quantile` of the makespan when every step varies by this share
    `told`          is called with a `Progress` now and then

    Ctrl-C ends it with the best so far: the plan is then `interrupted`.
    """
    if isinstance(model, Costs):
        model = Model.of_stages(model)
    elif not isinstance(model, Model):
        model = read_model(model)
    ranks = model.ranks if ranks is None else ranks
    samples = model.samples if samples is None else samples
    if ranks is None or samples is None:
        known = {"ranks": ranks, "samples (of a batch)": samples}
        missing = " and ".join(name for name, value in known.items() if value is None)
        raise PlanError(f"the model {model.name!r} does not say how many {missing}: say so in the file or here")
    limit = model.memory if memory_limit is None else memory_limit
    question = Question(
        model, ranks, samples, limit, stages_per_rank, objective, seconds, seed, jitter, quantile
    )
    return answer(question, told, searcher)


def answer(question: Question, told: Told | None = None, searcher: Searcher | None = None) -> Plan:
    """Weigh everything, and rank it."""
    weighing = Weighing(question, told)
    interrupted = False
    try:
        weighing.weigh_families()
        better(weighing, searcher or search)
        shake(weighing)
    except KeyboardInterrupt:
        if not weighing.options:
            raise
        interrupted = True
        if not weighing.is_shaken:
            question = replace(question, jitter=None)
    if not weighing.options:
        raise PlanError(_nothing_fits(weighing))
    return Plan(
        question,
        tuple(sorted(weighing.options, key=lambda option: option.order)),
        tuple(sorted(weighing.too_large, key=lambda each: each.memory)),
        tuple(weighing.cut),
        weighing.too_long,
        weighing.bound,
        interrupted,
        tuple(sorted(weighing.missing)),
        searcher,
    )


def _nothing_fits(weighing: Weighing) -> str:
    limit = weighing.question.memory_limit
    if limit is None or not weighing.too_large:
        return (
            f"there are more stages and microbatches than are weighed ({weighing.too_long} frames): use fewer"
        )
    least = min(weighing.too_large, key=lambda each: each.memory)
    return (
        f"nothing fits: a rank may hold {size_text(limit)}; of {len(weighing.too_large)} ways the smallest, "
        f"{least}, holds {size_text(least.memory)}, with {size_text(max(least.frame.fixed))} for weights and "
        "optimizer: use more ranks or memory, smaller microbatches, or recompute activations"
    )
