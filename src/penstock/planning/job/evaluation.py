"""Evaluation of a job's candidates: lowest bound first, until no bound is below the best ten.

A candidate is simulated at most once, with messages that take their time but do not queue, and with at most four
rounds of microbatches; a longer step is extended by the time of a round, because the middle of a schedule
repeats itself. The best options are then simulated exactly: all microbatches, queues of messages, and gradients
reduced where the lowered schedule does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import TypeAlias

from penstock.cost.costs import Costs
from penstock.cost.estimate.estimate import Estimator
from penstock.cost.live_activations import LiveActivations, live_activations
from penstock.cost.prices import edge_prices
from penstock.errors import BuildError
from penstock.families import build
from penstock.ir.placement import Placement
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.planning.estimated import stage_costs
from penstock.planning.job.family_traits import Traits, families_by_traits
from penstock.planning.job.layouts import JobLayout, job_layouts
from penstock.planning.job.options import JobOption, job_frontier
from penstock.planning.job.request import JobRequest
from penstock.planning.job.stages import Stages
from penstock.simulation.simulator import Simulator, simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel

__all__ = ["Candidate", "JobEvaluation"]

_RANKED = 10
_STEPS = 400_000
"""Actions that are simulated with a budget of 1."""
_MAX_EXACT_STEPS = 60_000
_MAX_EXACT = 30
_ROUNDS = 4

OnJobProgress: TypeAlias = Callable[[str, float, float], None]
"""Called with the phase, the fraction done and the best seconds so far."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout with families that have the same bound."""

    layout: JobLayout
    traits: Traits
    stages: Stages
    counts: tuple[int, ...]
    bound: float


class JobEvaluation:
    """The candidates of a request, and the options found so far."""

    def __init__(self, request: JobRequest, on_progress: OnJobProgress | None = None) -> None:
        self.request = request
        self._on_progress = on_progress or (lambda *_: None)
        self._estimator = Estimator(request.config, request.device)
        self._schedules: dict[tuple[str, int, int, int], _Built | None] = {}
        self.options: list[JobOption] = []
        self.too_large: list[tuple[float, JobLayout]] = []
        """Layouts of candidates over the memory limit, with a lower bound on what they need."""
        self._left = 0
        self.counts: Counter[str] = Counter()
        """How many `layouts`, and how many candidates `evaluated`, `pruned`, `too large` and `not evaluated`."""
        self._steps = 0

    # --- candidates ----------------------------------------------------------------------------------

    def _layouts(self) -> list[tuple[float, JobLayout, Stages]]:
        """Every layout whose state fits, with a bound that holds for all of its candidates."""
        found = []
        for layout in job_layouts(self.request):
            self.counts["layouts"] += 1
            stages = Stages(self._estimator(layout.setting(self.request)))
            if (state := stages.mean_state(layout.pipeline)) > self.request.memory_limit:
                self._set_aside(state, layout)
            else:
                hides = layout.expert > 1 and layout.pipeline > 1
                bound = stages.layout_bound(layout.pipeline, layout.microbatches, paired=hides)
                found.append((bound, layout, stages))
        return found

    def candidates(self) -> Iterator[Candidate]:
        """Every layout with every kind of family, lowest bound first; those that cannot fit are set aside."""
        order = count()
        heap: list[tuple[float, int, tuple[JobLayout, Stages] | Candidate]] = [
            (bound, next(order), (layout, stages)) for bound, layout, stages in self._layouts()
        ]
        heapify(heap)
        while heap:
            _, _, each = heappop(heap)
            if isinstance(each, Candidate):
                self._left = len(heap)
                yield each
                continue
            for candidate in self._of_layout(*each):
                heappush(heap, (candidate.bound, next(order), candidate))

    def _of_layout(self, layout: JobLayout, stages: Stages) -> Iterator[Candidate]:
        for traits in self._traits(layout):
            counts = stages.counts(layout.pipeline * traits.stages_per_rank)
            least = stages.least_memory(counts, traits, layout.pipeline)
            if least > self.request.memory_limit:
                self._set_aside(least, layout)
            else:
                bound = stages.bound(counts, traits, layout.pipeline, layout.microbatches)
                yield Candidate(layout, traits, stages, counts, bound)

    def _traits(self, layout: JobLayout) -> Iterator[Traits]:
        blocks, exchanges = self.request.config.layers, layout.expert > 1
        for traits in families_by_traits():
            alone = layout.pipeline == 1
            if alone and (traits.stages_per_rank > 1 or traits.split or traits.paired):
                continue  # one rank has no bubble
            if traits.paired and not exchanges:
                continue  # a pair hides nothing
            if layout.pipeline * traits.stages_per_rank <= blocks:
                yield traits

    def _set_aside(self, least: float, layout: JobLayout) -> None:
        self.counts["too large"] += 1
        self.too_large.append((least, layout))

    # --- simulation ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Evaluate the candidates, then the best options exactly."""
        self._on_progress("bounds", 0.0, inf)
        best: dict[tuple[int, ...], float] = {}
        most = _STEPS * self.request.budget
        for each in self.candidates():
            ranked = sorted(best.values())
            if len(ranked) >= _RANKED and each.bound >= ranked[_RANKED - 1]:
                self.counts["pruned"] += 1 + self._left
                break
            if self._steps > most:
                self.counts["not evaluated"] += 1 + self._left
                break
            if best.get(each.layout.sizes, inf) <= each.bound:
                self.counts["pruned"] += 1
                continue
            self._on_progress("simulating", min(1.0, self._steps / most), min(ranked, default=inf))
            for option in self._evaluate(each):
                self.options.append(option)
                best[option.layout.sizes] = min(option.seconds, best.get(option.layout.sizes, inf))
        self._make_exact()

    def _evaluate(self, each: Candidate) -> Iterator[JobOption]:
        layout = each.layout
        placement = _placement(each.traits, layout)
        costs = stage_costs(each.stages.estimate, placement, each.counts)
        working = each.stages.working(each.counts, placement)
        for family in families_by_traits()[each.traits]:
            measured = self._measured(family, layout, each.traits, costs, working.tolist())
            if measured is None:
                continue
            makespan, memory, bubble = measured
            if memory > self.request.memory_limit:
                self._set_aside(memory, layout)
                continue
            self.counts["evaluated"] += 1
            seconds = makespan + costs.optimizer_step + _last_reduction(costs, placement)
            yield self._option(each, family, placement, seconds, memory, bubble)

    def _measured(
        self, family: str, layout: JobLayout, traits: Traits, costs: Costs, working: list[float]
    ) -> tuple[float, float, float] | None:
        """Makespan, memory and bubble; extended from fewer microbatches. None if the family cannot be built."""
        ranks, m = layout.pipeline, layout.microbatches
        short = min(m, (_ROUNDS - 1) * ranks + m % ranks)
        runs = []
        for number in (short,) if short == m else (short, short - ranks):
            built = self._built(family, ranks, number, traits.stages_per_rank)
            if built is None:
                return None
            memory = built.memory(costs, working)
            if memory > self.request.memory_limit:  # more microbatches do not need less
                return 0.0, memory, 0.0
            self._steps += built.schedule.num_steps
            timeline = built.simulated(costs)
            busy = sum(timeline.busy) / ranks
            runs.append((timeline.makespan, memory, busy))
        first = runs[0]
        if len(runs) > 1:
            rounds = (m - short) / ranks
            first = tuple(x + rounds * (x - y) for x, y in zip(*runs))  # type: ignore[assignment]
        makespan, memory, busy = first
        return makespan, memory, 1 - busy / makespan

    def _built(self, family: str, ranks: int, microbatches: int, stages_per_rank: int) -> _Built | None:
        key = (family, ranks, microbatches, stages_per_rank)
        if key not in self._schedules:
            try:
                schedule = build(
                    family, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
                )
                self._schedules[key] = _Built(schedule, live_activations(schedule.table))
            except BuildError:  # not for these numbers
                self._schedules[key] = None
        return self._schedules[key]

    def _option(
        self,
        each: Candidate,
        family: str,
        placement: Placement,
        seconds: float,
        memory: float,
        bubble: float,
    ) -> JobOption:
        layout, request = each.layout, self.request
        mfu = each.stages.estimate.mfu(seconds, layout.microbatches, layout.pipeline)
        tokens = request.batch * request.sequence / seconds / request.devices
        return JobOption(
            *(layout, family, placement, each.counts, seconds, memory, mfu, tokens, bubble, each.bound)
        )

    # --- the best options ----------------------------------------------------------------------------

    def ranked(self) -> list[JobOption]:
        """The best option of each layout, fastest first."""
        best: dict[tuple[int, ...], JobOption] = {}
        for option in sorted(self.options, key=lambda each: each.sort_key):
            best.setdefault(option.layout.sizes, option)
        return list(best.values())

    def _make_exact(self) -> None:
        """Simulate with everything that is known: the frontier, and the best options until they stay the best."""
        done = 0
        waiting = [*job_frontier(self.options)[:_RANKED], *self.ranked()[:_RANKED]]
        while waiting and done < _MAX_EXACT:
            for option in dict.fromkeys(waiting):
                self._on_progress(f"exactly {option.layout}", done / _MAX_EXACT, option.seconds)
                self.options[self.options.index(option)] = self.exact(option)
                done += 1
            self.options = [each for each in self.options if each.memory <= self.request.memory_limit]
            waiting = [each for each in self.ranked()[:_RANKED] if not each.is_exact and self._is_short(each)]
        self.options.sort(key=lambda each: each.sort_key)

    @staticmethod
    def _is_short(option: JobOption) -> bool:
        return 2 * option.layout.microbatches * option.placement.num_stages <= _MAX_EXACT_STEPS

    def exact(self, option: JobOption, request: JobRequest | None = None) -> JobOption:
        """The option simulated with all microbatches, queues of messages and collectives."""
        request = request or self.request
        layout, placement = option.layout, option.placement
        if not self._is_short(option):
            return option
        estimator = self._estimator if request is self.request else Estimator(request.config, request.device)
        found = estimator(layout.setting(request))
        costs = stage_costs(found, placement, option.counts)
        timeline = _timeline(option, costs)
        working = Stages(found).working(option.counts, placement).tolist()
        memory = max(map(sum, zip(timeline.peak_memory, working)))
        seconds = timeline.makespan + costs.optimizer_step
        tokens = request.batch * request.sequence / seconds / request.devices
        return replace(
            option,
            seconds=seconds,
            memory=memory,
            mfu=found.mfu(seconds, layout.microbatches, layout.pipeline),
            tokens_per_second=tokens,
            bubble=timeline.bubble("makespan"),
            is_exact=True,
        )


@dataclass(frozen=True, eq=False)
class _Built:
    """A schedule with what its ranks hold."""

    schedule: Schedule
    live: list[LiveActivations]

    def memory(self, costs: Costs, working: list[float]) -> float:
        """The most bytes of a rank, receive buffers left out."""
        stages = self.schedule.num_stages
        return max(each.peak(costs, stages) + more for each, more in zip(self.live, working))

    def simulated(self, costs: Costs) -> Timeline:
        """With messages that take their time but do not queue."""
        total = edge_prices(costs, self.schedule.graph, "activation").total
        latency = tuple(total.tolist()) or 0.0
        simulator = Simulator(
            self.schedule, replace(costs, bandwidth=None, latency=latency), SendModel.BUFFERED
        )
        return Timeline(self.schedule, simulator.costs, *simulator.times(simulator.finished_run()))


def option_schedule(option: JobOption) -> Schedule:
    """The compute schedule of an option."""
    return build(
        option.family,
        ranks=option.layout.pipeline,
        microbatches=option.layout.microbatches,
        stages_per_rank=option.stages_per_rank,
    )


def _timeline(option: JobOption, costs: Costs) -> Timeline:
    schedule = option_schedule(option)
    return simulate(lower(schedule) if option.layout.data * option.layout.context > 1 else schedule, costs)


def _placement(traits: Traits, layout: JobLayout) -> Placement:
    make = Placement.v if traits.is_v else Placement.loop
    return make(layout.pipeline, traits.stages_per_rank)


def _last_reduction(costs: Costs, placement: Placement) -> float:
    """Seconds of the reductions that nothing hides: that of the stage which each rank finishes last."""
    seconds = costs.per_stage("reduce_grad", placement.num_stages)
    return max(seconds[own[0]] for own in placement.stages_of_rank)
