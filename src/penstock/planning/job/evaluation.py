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

import numpy as np

from penstock.cost.costs import Costs
from penstock.cost.estimate.estimate import Estimate, Estimator
from penstock.ir.placement import Placement
from penstock.planning.estimated import stage_costs
from penstock.planning.job.built_schedules import BuiltSchedules
from penstock.planning.job.candidates import Candidate, JobCandidates
from penstock.planning.job.family_traits import families_by_traits
from penstock.planning.job.options import JobOption
from penstock.planning.job.request import JobRequest
from penstock.planning.job.stages import Stages
from penstock.planning.options import frontier
from penstock.simulation.simulator import simulate

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


class Over(NamedTuple):
    """A family that exceeds the memory limit in the stages of a candidate."""

    candidate: Candidate
    family: str
    memory: float


class JobEvaluation:
    """The options of a request that were found so far."""

    def __init__(self, request: JobRequest, on_progress: OnJobProgress | None = None) -> None:
        self.request = request
        self.on_progress = on_progress or (lambda *_: None)
        self.estimator = Estimator(request.config, request.device)
        self.candidates = JobCandidates(request, self.estimator)
        self._schedules = BuiltSchedules()
        self.options: list[JobOption] = []
        self.over: list[Over] = []
        """What might fit with techniques, lowest bound first."""
        self.counts: Counter[str] = self.candidates.counts
        """How many `layouts`; how many candidates `too large`, `evaluated`, `pruned`, `not evaluated`."""
        self.bound = inf
        """Lower bound on the makespan of any candidate that may fit."""
        self.next_bound = inf
        """That of the first candidate which was not evaluated."""
        self._steps = 0

    def run(self) -> None:
        """Evaluate the candidates, then the best options exactly."""
        self.on_progress("bounds", 0.0, inf)
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
            self.on_progress("simulating", min(1.0, self._steps / most), min(ranked, default=inf))
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
        known = families_by_traits(self.request.families)[each.traits]
        fitting = [family for family in known if self._fits(family, each)]
        costs = stage_costs(found, placement, each.counts) if fitting else Costs()
        for family in fitting:
            step = self._extended(family, each, costs)
            self.counts["evaluated"] += 1
            rest = costs.optimizer_step + _last_reduction(costs, placement)
            yield self._option(found, each, family, step, step.makespan + rest)

    def _fits(self, family: str, each: Candidate) -> bool:
        """Whether the family can be built, and its activations are within the memory limit."""
        built = self._schedules.get(family, *self._lengths(each)[-1], each.traits.stages_per_rank)
        if built is None:
            return False
        memory = each.stages.memory(each.counts, built.live)
        if memory > self.request.memory_limit:  # more microbatches do not need less
            self.candidates.set_aside(each.layout)
            self.over.append(Over(each, family, memory))
            return False
        return True

    def _lengths(self, each: Candidate) -> list[tuple[int, int]]:
        """Ranks and microbatches of the steps that are simulated: all, or of a step and one a round shorter."""
        ranks, m = each.layout.pipeline, each.layout.microbatches
        short = min(m, (_ROUNDS - 1) * ranks + m % ranks + ranks)
        return [(ranks, short)] if short == m else [(ranks, short - ranks), (ranks, short)]

    def _extended(self, family: str, each: Candidate, costs: Costs) -> _Step:
        """A step, extended from fewer microbatches."""
        runs, lengths = [], self._lengths(each)
        for ranks, number in lengths:
            built = self._schedules.get(family, ranks, number, each.traits.stages_per_rank)
            assert built is not None, "a family that has a longer step has a shorter one"
            self._steps += built.schedule.num_steps
            timeline, memory = built.simulated(costs), each.stages.memory(each.counts, built.live)
            runs.append(_Step(timeline.makespan, memory, sum(timeline.busy) / ranks))
        if len(runs) == 1:
            return runs[0]
        ranks, short = lengths[-1]
        rounds = (each.layout.microbatches - short) / ranks
        step = _Step(*(y + rounds * (y - x) for x, y in zip(*runs)))
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
                self.on_progress(f"exactly {option.layout}", done / _MAX_EXACT, option.seconds)
                self.options[self.options.index(option)] = self.exact(option)
                done += 1
            self.options = [each for each in self.options if each.memory <= self.request.memory_limit]
            waiting = [each for each in self.ranked()[:_RANKED] if not each.is_exact and is_short(each)]
        self.options.sort(key=lambda each: each.sort_key)

    def exact(self, option: JobOption, request: JobRequest | None = None) -> JobOption:
        """The option simulated with all microbatches, queues of messages and collectives, if it is not long."""
        if not is_short(option):
            return option
        request = request or self.request
        estimator = self.estimator if request is self.request else Estimator(request.config, request.device)
        found = estimator(option.layout.setting(request))
        costs = stage_costs(found, option.placement, option.counts)
        timeline = simulate(option.lowered, costs)
        working = Stages(found).working(option.counts, option.placement)
        memory = float((np.array(timeline.peak_memory) + working).max())
        option = replace(option, memory=memory, bubble=timeline.bubble("makespan"), is_exact=True)
        return _timed(option, request, found, timeline.makespan, timeline.makespan + costs.optimizer_step)

    def most_working(self, found: Estimate, option: JobOption) -> float:
        """The most working memory of a rank, in bytes."""
        return float(Stages(found).working(option.counts, option.placement).max())

    def timed(self, option: JobOption, seconds: float) -> JobOption:
        """The option with another step time under jitter."""
        found = self.estimator(option.layout.setting(self.request))
        changed = _timed(option, self.request, found, option.makespan, seconds)
        return replace(changed, seconds_without_jitter=option.seconds)


def _timed(
    option: JobOption, request: JobRequest, found: Estimate, makespan: float, seconds: float
) -> JobOption:
    return replace(
        option,
        makespan=makespan,
        seconds=seconds,
        seconds_without_jitter=seconds,
        mfu=found.mfu(seconds, option.layout.microbatches, option.layout.pipeline),
        tokens_per_second=request.batch * request.sequence / seconds / request.devices,
    )


def is_short(option: JobOption) -> bool:
    """Whether its whole step is simulated."""
    return 2 * option.layout.microbatches * option.placement.num_stages <= _MAX_EXACT_STEPS


def _last_reduction(costs: Costs, placement: Placement) -> float:
    """Seconds of the reductions that nothing hides: that of the stage which each rank finishes last."""
    seconds = costs.per_stage("reduce_grad", placement.num_stages)
    return max(seconds[own[0]] for own in placement.stages_of_rank)
