"""Evaluation of a job's candidates: lowest bound first, until no bound is below the best ten layouts.

A candidate is simulated with messages that do not queue and with few rounds of microbatches; a longer step is
extended by the time of a round, because the middle of a schedule repeats itself. The best options are then
simulated exactly: all microbatches, queues of messages, gradients reduced where the lowered schedule does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeAlias

from penstock.cost.costs import Costs
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.families import build
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning.estimated import stage_costs
from penstock.planning.job.built_schedules import BuiltSchedules
from penstock.planning.job.candidates import Candidate, JobCandidates
from penstock.planning.job.family_traits import families_by_traits
from penstock.planning.job.layouts import JobLayout
from penstock.planning.job.options import JobOption
from penstock.planning.job.request import JobRequest
from penstock.planning.job.stages import Stages
from penstock.planning.options import frontier
from penstock.simulation.simulator import simulate

__all__ = ["JobEvaluation", "OnJobProgress", "option_schedule"]

_RANKED = 10
_STEPS = 300_000
"""Actions that are simulated with a budget of 1."""
_MAX_EXACT_STEPS, _MAX_EXACT, _EXACT_FRONTIER = 60_000, 25, 5
_ROUNDS = 3

OnJobProgress: TypeAlias = Callable[[str, float, float], None]
"""Called with the phase, the fraction done and the best seconds so far."""


class _Step(NamedTuple):
    """A simulated step without its optimizer step."""

    makespan: float
    memory: float
    busy: float
    """Seconds of the mean rank."""


class JobEvaluation:
    """The options of a request that were found so far."""

    def __init__(self, request: JobRequest, on_progress: OnJobProgress | None = None) -> None:
        self.request = request
        self._on_progress = on_progress or (lambda *_: None)
        self._estimator = Estimator(request.config, request.device)
        self.candidates = JobCandidates(request, self._estimator)
        self._schedules = BuiltSchedules()
        self.options: list[JobOption] = []
        self.counts: Counter[str] = self.candidates.counts
        """How many `layouts`; how many candidates `too large`, `evaluated`, `pruned`, `not evaluated`."""
        self.bound = inf
        """Lower bound on the makespan of any candidate that may fit."""
        self.next_bound = inf
        """That of the first candidate which was not evaluated."""
        self._steps = 0

    def run(self) -> None:
        """Evaluate the candidates, then the best options exactly."""
        self._on_progress("bounds", 0.0, inf)
        best: dict[tuple[int, ...], float] = {}
        most = _STEPS * self.request.budget
        for each in self.candidates:
            ranked, self.bound = sorted(best.values()), min(self.bound, each.bound)
            if len(ranked) >= _RANKED and each.bound >= ranked[_RANKED - 1]:
                self.counts["pruned"] += 1 + self.candidates.left
                break
            if self._steps > most:
                self.counts["not evaluated"] += 1 + self.candidates.left
                self.next_bound = each.bound
                break
            if best.get(each.layout.sizes, inf) <= each.bound:
                self.counts["pruned"] += 1
                continue
            self._on_progress("simulating", min(1.0, self._steps / most), min(ranked, default=inf))
            for option in self._evaluate(each):
                self.options.append(option)
                best[option.layout.sizes] = min(option.seconds, best.get(option.layout.sizes, inf))
        self._make_exact()

    def ranked(self) -> list[JobOption]:
        """The best option of each layout, fastest first."""
        best: dict[tuple[int, ...], JobOption] = {}
        for option in sorted(self.options, key=lambda each: each.sort_key):
            best.setdefault(option.layout.sizes, option)
        return list(best.values())

    # --- candidates ----------------------------------------------------------------------------------

    def _evaluate(self, each: Candidate) -> Iterator[JobOption]:
        placement, found = each.placement, each.stages.estimate
        costs = stage_costs(found, placement, each.counts)
        working = each.stages.working(each.counts, placement).tolist()
        for family in families_by_traits()[each.traits]:
            step = self._extended(family, each, costs, working)
            if step is None:
                continue
            if step.memory > self.request.memory_limit:
                self.candidates.set_aside(each.layout)
                continue
            self.counts["evaluated"] += 1
            rest = costs.optimizer_step + _last_reduction(costs, placement)
            yield self._option(found, each, family, step, step.makespan + rest)

    def _extended(self, family: str, each: Candidate, costs: Costs, working: list[float]) -> _Step | None:
        """A step, extended from fewer microbatches; None if the family cannot be built."""
        ranks, m = each.layout.pipeline, each.layout.microbatches
        short = min(m, (_ROUNDS - 1) * ranks + m % ranks + ranks)
        runs = []
        for number in (short,) if short == m else (short, short - ranks):
            built = self._schedules.get(family, ranks, number, each.traits.stages_per_rank)
            if built is None:
                return None
            memory = built.memory(costs, working)
            if memory > self.request.memory_limit:  # more microbatches do not need less
                return _Step(0.0, memory, 0.0)
            self._steps += built.schedule.num_steps
            timeline = built.simulated(costs)
            runs.append(_Step(timeline.makespan, memory, sum(timeline.busy) / ranks))
        if len(runs) == 1:
            return runs[0]
        rounds = (m - short) / ranks
        step = _Step(*(x + rounds * (x - y) for x, y in zip(*runs)))
        return step._replace(makespan=max(step.makespan, each.bound))

    def _option(self, found: Estimate, each: Candidate, family: str, step: _Step, seconds: float) -> JobOption:
        option = JobOption(
            *(each.layout, family, each.placement, each.counts, each.bound, step.memory),
            bubble=1 - step.busy / step.makespan,
        )
        return _timed(option, self.request, found, step.makespan, seconds)

    # --- the best options ----------------------------------------------------------------------------

    def _make_exact(self) -> None:
        """Simulate the frontier with all that is known, and the best options until they stay the best."""
        done = 0
        waiting = [*frontier(self.options)[:_EXACT_FRONTIER], *self.ranked()[:_RANKED]]
        while waiting and done < _MAX_EXACT:
            for option in dict.fromkeys(waiting):
                self._on_progress(f"exactly {option.layout}", done / _MAX_EXACT, option.seconds)
                self.options[self.options.index(option)] = self.exact(option)
                done += 1
            self.options = [each for each in self.options if each.memory <= self.request.memory_limit]
            waiting = [each for each in self.ranked()[:_RANKED] if not each.is_exact and _is_short(each)]
        self.options.sort(key=lambda each: each.sort_key)

    def exact(self, option: JobOption, request: JobRequest | None = None) -> JobOption:
        """The option simulated with all microbatches, queues of messages and collectives, if it is not long."""
        if not _is_short(option):
            return option
        request = request or self.request
        estimator = self._estimator if request is self.request else Estimator(request.config, request.device)
        found = estimator(option.layout.setting(request))
        costs = stage_costs(found, option.placement, option.counts)
        schedule = option_schedule(option)
        timeline = simulate(lower(schedule) if _has_replicas(option.layout) else schedule, costs)
        working = Stages(found).working(option.counts, option.placement).tolist()
        memory = max(map(sum, zip(timeline.peak_memory, working)))
        option = replace(option, memory=memory, bubble=timeline.bubble("makespan"), is_exact=True)
        return _timed(option, request, found, timeline.makespan, timeline.makespan + costs.optimizer_step)


def option_schedule(option: JobOption) -> Schedule:
    """The compute schedule of an option."""
    return build(
        option.family,
        ranks=option.layout.pipeline,
        microbatches=option.layout.microbatches,
        stages_per_rank=option.stages_per_rank,
    )


def _timed(
    option: JobOption, request: JobRequest, found: Estimate, makespan: float, seconds: float
) -> JobOption:
    return replace(
        option,
        makespan=makespan,
        seconds=seconds,
        mfu=found.mfu(seconds, option.layout.microbatches, option.layout.pipeline),
        tokens_per_second=request.batch * request.sequence / seconds / request.devices,
    )


def _is_short(option: JobOption) -> bool:
    return 2 * option.layout.microbatches * option.placement.num_stages <= _MAX_EXACT_STEPS


def _has_replicas(layout: JobLayout) -> bool:
    return layout.data * layout.context > 1


def _last_reduction(costs: Costs, placement: Placement) -> float:
    """Seconds of the reductions that nothing hides: that of the stage which each rank finishes last."""
    seconds = costs.per_stage("reduce_grad", placement.num_stages)
    return max(seconds[own[0]] for own in placement.stages_of_rank)
