"""Evaluation of options: every family in every configuration that can matter.

An option is pruned without simulation if a simulated one needs no more memory and is no slower than the pruned
option's lower bound: it can neither win nor be on the frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import inf
from statistics import fmean
from time import perf_counter

from penstock.bounds import Bound
from penstock.cost.memory import LiveActivations, live_activations
from penstock.families import build, families
from penstock.ir.kinds import Kind
from penstock.ir.placement import StagesPerRank, most_stages
from penstock.ir.schedule import Schedule
from penstock.planning.configuration import (
    Configuration,
    configurations,
    configure,
    partition_within_memory,
    stages_text,
)
from penstock.planning.memory_policies import (
    Candidate,
    bound_of,
    is_dominated,
    memory_of,
    offloading_schedules,
    ordered,
    variants,
)
from penstock.planning.options import Option, Rejected
from penstock.planning.partition import LayerCounts
from penstock.planning.request import PlanRequest
from penstock.search import OnProgress, Progress
from penstock.simulation.simulator import simulate

_ORDERS_WITH_TECHNIQUES = 24


class Evaluation:
    """The options evaluated so far; it can be interrupted at any time."""

    def __init__(self, request: PlanRequest, on_progress: OnProgress | None = None) -> None:
        self.request, self.on_progress = request, on_progress or (lambda _: None)
        self._started = perf_counter()
        self.options: list[Option] = []
        self.too_large: list[Rejected] = []
        """Orders that exceed the memory limit with every partition tried."""
        self.pruned: list[Rejected] = []
        """Orders whose bounds show that they cannot matter."""
        self.has_quantiles = False
        """Whether the options are ranked by a quantile under jitter."""
        self.tried: list[Candidate] = []
        """Families in their configurations, for techniques."""
        self.missing: set[str] = set()
        """Optional parts of the search that are not installed."""

    @cached_property
    def _candidates(self) -> list[Configuration]:
        return list(configurations(self.request))

    @cached_property
    def configurations(self) -> list[tuple[Bound, Configuration]]:
        """Every configuration that is evaluated, lowest bound first."""
        small = [each for each in self._candidates if not each.is_too_large_to_evaluate]
        bounded = [(each.bound(self.request), each) for each in small]
        return sorted(bounded, key=lambda pair: (pair[0].seconds, pair[1].placement.num_stages))

    @property
    def not_evaluated(self) -> int:
        """Number of configurations with too many stages and microbatches to be evaluated."""
        return len(self._candidates) - len(self.configurations)

    @property
    def bound(self) -> float:
        """Lower bound for any order in any of the configurations, including those made to fit the memory."""
        every = [*(bound for bound, _ in self.configurations), *(option.bound for option in self.options)]
        return min((bound.seconds for bound in every), default=0.0)

    # --- families ----------------------------------------------------------------------------------

    def evaluate_families(self) -> None:
        """Evaluate every family in every configuration that it can be built for."""
        groups: dict[tuple[int | tuple[int, ...], int], list[Configuration]] = {}
        for _, each in self.configurations:
            groups.setdefault((each.stages_per_rank, each.microbatches), []).append(each)
        for done, ((stages_per_rank, m), group) in enumerate(groups.items()):
            self.report(f"families with v={stages_text(stages_per_rank)}, m={m}", done / len(groups))
            for schedule in training_schedules(self.request.ranks, m, stages_per_rank):
                own = [each for each in group if each.placement == schedule.placement]
                if own:
                    self._evaluate_schedule(schedule, own)

    def _evaluate_schedule(self, schedule: Schedule, own: list[Configuration]) -> None:
        """Evaluate a schedule in its configurations, with a smaller partition if the first does not fit."""
        live, limit = live_activations(schedule.table), self.request.memory_limit or inf

        def peak(configuration: Configuration) -> float:
            return max(each.peak(configuration.costs, schedule.num_stages) for each in live)

        fitting = [each for each in own if peak(each) <= limit]
        if own[0] not in fitting:
            counts = self._fitting_partition(own[0], live)
            if counts is not None:
                fitting.append(configure(self.request, own[0].placement, counts, own[0].microbatches))
        if not fitting:
            bound = own[0].bound(self.request, split=schedule.table.has(Kind.I))
            self.too_large.append(Rejected(schedule.name, own[0], min(map(peak, own)), bound.seconds))
        for each in dict.fromkeys(fitting):
            self._evaluate(schedule, each, peak(each))
        self.tried += [Candidate(schedule, each) for each in dict.fromkeys((*fitting, *own[:1]))]

    def _fitting_partition(
        self, configuration: Configuration, live: Sequence[LiveActivations]
    ) -> LayerCounts | None:
        """A partition that fits, unless the search would be long and the mean rank exceeds the limit anyway."""
        limit = self.request.memory_limit
        peaks = [each.peak(configuration.costs, configuration.placement.num_stages) for each in live]
        if configuration.stages_per_rank != 1 and limit is not None and fmean(peaks) > limit:
            return None
        return partition_within_memory(self.request, configuration, live)

    def _evaluate(self, schedule: Schedule, configuration: Configuration, memory: float) -> None:
        table = schedule.table
        bound = configuration.bound(self.request, split=table.has(Kind.I), paired=table.has_pairs)
        if any(option.memory <= memory and self._beats(option, bound) for option in self.options):
            self.pruned.append(Rejected(schedule.name, configuration, memory, bound.seconds))
            return
        self.options.append(self.option(schedule.name, configuration, schedule))

    # --- techniques --------------------------------------------------------------------------------

    def evaluate_techniques(self) -> None:
        """Recompute and offload, in the orders with the lowest bounds; more of them if none of these fits."""
        request, seen = self.request, set[tuple[str, Configuration]]()
        if not (request.recompute or request.offload):
            return
        for done, candidate in enumerate(ordered(self.tried, request)):
            if done >= _ORDERS_WITH_TECHNIQUES and self.options:
                break
            self.report("techniques", min(done / _ORDERS_WITH_TECHNIQUES, 1.0))
            for schedule in variants(candidate, request):
                self._evaluate_technique(schedule, candidate.configuration)
            for schedule in offloading_schedules(candidate.configuration) if request.offload else ():
                if (schedule.name, candidate.configuration) not in seen:
                    seen.add((schedule.name, candidate.configuration))
                    self._evaluate_technique(schedule, candidate.configuration)

    def _evaluate_technique(self, schedule: Schedule, configuration: Configuration) -> None:
        limit, memory = self.request.memory_limit or inf, memory_of(schedule, configuration)
        if memory is not None and memory > limit:
            counts = self._fitting_partition(configuration, live_activations(schedule.table))
            if counts is None:
                return
            configuration = configure(self.request, configuration.placement, counts, configuration.microbatches)
            memory = memory_of(schedule, configuration)
        bound = bound_of(schedule, configuration, self.request)
        if is_dominated(self.options, memory, bound, self.request.jitter or 0.0):
            return
        option = self.option(schedule.name, configuration, schedule)
        same = (other for other in self.options if other.memory <= option.memory)
        if option.memory <= limit and all(other.seconds > option.seconds for other in same):
            self.options.append(option)

    def _beats(self, option: Option, bound: Bound) -> bool:
        """Whether it is no slower than the bound, even if jitter lengthens it by its full share."""
        return option.seconds_without_jitter * (1 + (self.request.jitter or 0.0)) <= bound.seconds

    def option(self, name: str, configuration: Configuration, schedule: Schedule, found_by: str = "") -> Option:
        """A schedule in a configuration, simulated."""
        timeline = simulate(schedule, configuration.costs, with_period=self.request.objective == "period")
        seconds, bound = self.request.seconds_of(timeline), configuration.bound(self.request)
        return Option(name, configuration, schedule, timeline, seconds, bound, seconds, found_by)

    def report(self, phase: str, fraction: float = 0.0, best: float = inf) -> None:
        """Report the phase, the fraction of it that is done, and the best so far."""
        best = min([best, *(option.seconds for option in self.options)])
        self.on_progress(Progress(phase, best, self.bound, perf_counter() - self._started, fraction))


def training_schedules(ranks: int, microbatches: int, stages_per_rank: StagesPerRank) -> Iterator[Schedule]:
    """The schedules of all training families, with a few groups; of equal ones that of the most specific."""
    seen: set[tuple[tuple[int, ...], bytes]] = set()
    most = most_stages(stages_per_rank)
    matching = [each for each in families().values() if each.trains and each.stages_per_rank in (None, most)]
    for family in sorted(matching, key=lambda family: family.stages_per_rank is None):
        groups = family.typical_groups(ranks, microbatches) if most > 1 else []
        for group in (None, *groups):
            schedule = build(
                family.name,
                ranks=ranks,
                microbatches=microbatches,
                stages_per_rank=stages_per_rank,
                group=group,
            )
            key = (schedule.placement.stage_to_rank, schedule.table.code.tobytes())
            trains = schedule.table.has(Kind.B, Kind.I) and not schedule.table.has(Kind.OFFLOAD)
            if trains and key not in seen:
                seen.add(key)
                yield schedule
