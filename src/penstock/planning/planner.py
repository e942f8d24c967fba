"""`penstock.plan`: from the costs of layers, or a model config and devices, to a ranked list of options."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, overload

from penstock.cost.costs import Costs
from penstock.cost.units import Units
from penstock.display import Displayed
from penstock.errors import PlanError
from penstock.formats import write_text
from penstock.planning.evaluation import POLICY_KINDS, Evaluation, O, R, Searcher, by_rank, frontier
from penstock.planning.jobs import JobEvaluation, JobOption, JobRequest
from penstock.planning.layers import LayerEvaluation, LayerOption, PlanRequest
from penstock.planning.model import Model
from penstock.search import OnProgress, search
from penstock.search.passes import without_memory_actions

E = TypeVar("E", bound=Evaluation[Any, Any])


@dataclass(frozen=True, eq=False)
class Plan(Displayed, Generic[R, O, E]):
    """The options that fit, ranked; `evaluation` has what was left out."""

    request: R
    options: tuple[O, ...]
    """Fastest first; among equals the one with the least memory. Of a job: the best option of each layout, and
    the frontier.
    """
    evaluation: E = field(repr=False)
    interrupted: bool = False
    """Whether Ctrl-C ended it with the best so far."""

    @property
    def best(self) -> O:
        """The fastest option."""
        return self.options[0]

    @cached_property
    def frontier(self) -> list[O]:
        """The Pareto frontier of time and memory, fastest first."""
        return frontier(self.options)

    @property
    def bound(self) -> float:
        """Lower bound for every option, in seconds; of a job: on the makespan."""
        return self.evaluation.bound

    @property
    def gap(self) -> float:
        """The excess of the best option over the bound, as a share of the bound."""
        return self.best.seconds_without_jitter / self.bound - 1 if self.bound else 0.0

    @property
    def units(self) -> Units:
        """The units of times and sizes."""
        return self.request.units

    @property
    def layout(self) -> str | None:
        """The layers of each stage of the best option, as `split`, `penstock export` and Megatron take it."""
        return self._layout(self.best)

    def _layout(self, option: O) -> str | None:
        layout = self.request.layout(option.configuration.counts)
        return None if layout is None else str(layout)

    @cached_property
    def by_memory_policy(self) -> dict[str, list[O]]:
        """For `none`, `recompute`, `offload` and `both`: the frontier of the options with that policy."""
        classes = {name: [o for o in self.options if o.policy_class == name] for name in _POLICY_CLASSES}
        return {name: frontier(options) for name, options in classes.items() if options}

    @property
    def policy_price(self) -> float:
        """How much longer the best option takes than its order without the memory policy, as a share."""
        seconds = self.evaluation.seconds_of(without_memory_actions(self.best.schedule), self.best)
        return self.best.seconds_without_jitter / seconds - 1 if seconds else 0.0

    def to_keys(self, option: O) -> dict[str, Any]:
        """Return an option as values for JSON."""
        own = option.to_keys()
        return {**own, "layout": self._layout(option), "on_frontier": option in self.frontier}

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row per option, fastest first."""
        return [self.to_keys(option) for option in self.options]

    def to_record(self) -> dict[str, Any]:
        """Return the whole plan as values for JSON."""
        request = self.request
        return {
            **request.to_keys(),
            "memory_limit": request.memory_limit,
            "jitter": request.jitter,
            "quantile": None if request.jitter is None else request.quantile,
            "interrupted": self.interrupted,
            "bound": self.bound,
            "gap": self.gap,
            "ranked": self.to_rows(),
            **self.evaluation.to_keys(),
        }

    def write(self, folder: str | PathLike[str]) -> list[Path]:
        """Write the best option: `schedule.json`, `costs.toml`, and `plan.json` with its layout and numbers."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        schedule, costs, keys = (folder / name for name in ("schedule.json", "costs.toml", "plan.json"))
        self.best.schedule.write(schedule)
        self.best.configuration.costs.write(costs)
        values = {"model": self.request.to_keys()["model"], **self.to_keys(self.best)}
        write_text(json.dumps(values, indent=2) + "\n", keys)
        return [schedule, costs, keys]


_POLICY_CLASSES = ("none", *POLICY_KINDS, "both")

LayerPlan: TypeAlias = Plan[PlanRequest, LayerOption, LayerEvaluation]
JobPlan: TypeAlias = Plan[JobRequest, JobOption, JobEvaluation]


@overload
def plan(
    request: JobRequest, *, on_progress: OnProgress | None = None, searcher: Searcher | None = None
) -> JobPlan: ...


@overload
def plan(
    request: PlanRequest | Model | Costs | str | PathLike[str],
    *,
    on_progress: OnProgress | None = None,
    searcher: Searcher | None = None,
    **options: Any,  # noqa: ANN401 -- the fields of PlanRequest
) -> LayerPlan: ...


def plan(
    request: PlanRequest | JobRequest | Model | Costs | str | PathLike[str],
    *,
    on_progress: OnProgress | None = None,
    searcher: Searcher | None = None,
    **options: Any,
) -> LayerPlan | JobPlan:
    """Choose partition, placement, stages per rank, microbatches and schedule for a model.

    `request`      a `PlanRequest`; or its model (a `Model`, a file, or the costs of stages) with the other
                   fields as `options`, for example `plan("model.toml", ranks=8, memory_limit=80e9)`;
                   or a `JobRequest`, for which also the parallel sizes are chosen
    `on_progress`  is called with a `Progress` from time to time
    `searcher`     is called instead of `penstock.search.search`

    Ctrl-C ends it with the best so far: the plan is then `interrupted`.
    """
    if isinstance(request, JobRequest):
        return _planned(JobEvaluation(request, on_progress, searcher or search))
    if not isinstance(request, PlanRequest):
        request = PlanRequest.of(request, **options)
    return _planned(LayerEvaluation(request, on_progress, searcher or search))


def _planned(evaluation: Evaluation[R, O]) -> Plan[R, O, Any]:
    request, interrupted = evaluation.request, False
    try:
        evaluation.evaluate_families()
        evaluation.evaluate_memory_policies()
        evaluation.search_orders()
        evaluation.rank_by_quantile()
    except KeyboardInterrupt:
        if not evaluation.options:
            raise
        interrupted = True
        if not evaluation.has_quantiles:
            request = replace(request, jitter=None)
    if not evaluation.options:
        raise PlanError(evaluation.why_no_option())
    return Plan(request, tuple(by_rank(evaluation.offered())), evaluation, interrupted)
