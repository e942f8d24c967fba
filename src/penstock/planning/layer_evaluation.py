"""Evaluation of a plan for layers: families, memory policies, other partitions and searched orders.

An option is pruned without simulation if a simulated one needs no more memory and is no slower than the pruned
option's lower bound: it can neither win nor be on the frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import inf
from statistics import fmean
from time import monotonic
from typing import Any

from penstock.arguments import plural
from penstock.bounds import Bound
from penstock.cost.costs import Costs
from penstock.cost.memory import LiveActivations, live_activations
from penstock.cost.prices import pairs_can_pay
from penstock.errors import SearchError
from penstock.families import build, families
from penstock.families.registry import offloading_schedules
from penstock.ir.kinds import Kind
from penstock.ir.placement import StagesPerRank, most_stages
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import POLICY_KINDS, Evaluation, Option, by_rank, frontier
from penstock.planning.layer_space import (
    Configuration,
    PlanRequest,
    configurations,
    configure,
    partition_within_memory,
    stages_text,
)
from penstock.planning.partition import LayerCounts, move_layer
from penstock.search import Progress, SearchResult
from penstock.search.passes import simple_policies
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline

_ORDERS_WITH_POLICIES = 24
_REPARTITIONED_OPTIONS, _SEARCHED_CONFIGURATIONS = 3, 2
_REPARTITION_SHARE, _SEARCH_SHARE = 0.15, 0.4
"""Shares of the time for searching that all of these get together."""
_ASSUMED_EXCESS = 1.1
"""The objective over the bound that is assumed for a configuration without families."""
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class LayerOption(Option):
    """A configuration with an order of work, simulated."""

    configuration: Configuration
    timeline: Timeline
    """The simulated order, with messages where these take time."""
    bound: Bound
    """Lower bound for any order in this configuration, without jitter."""
    found_by: str = ""

    @property
    def gap(self) -> float:
        """The excess over the bound, as a share of the bound."""
        return self.bound.gap(self.seconds_without_jitter)

    @property
    def samples_per_second(self) -> float:
        """Samples per second of this pipeline."""
        samples = self.configuration.samples * self.configuration.microbatches
        return samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return f"{self.full_name} ({self.configuration})"

    def to_keys(self) -> dict[str, Any]:
        """Return the option as values for JSON."""
        return {
            **super().to_keys(),
            "placement": self.configuration.style,
            "samples_per_microbatch": self.configuration.samples,
            "samples_per_second": self.samples_per_second,
            "peak_memory_by_rank": list(self.timeline.peak_memory),
            "bound": self.bound.seconds,
            "bound_name": self.bound.name,
            "gap": self.gap,
            "found_by": self.found_by,
        }


@dataclass(frozen=True)
class Rejected:
    """An order that was not simulated, with its peak memory and its lower bound in this configuration."""

    name: str
    configuration: Configuration
    memory: float
    bound: float

    def __str__(self) -> str:
        return f"{self.name} ({self.configuration})"

    def to_keys(self) -> dict[str, Any]:
        """Return the order as values for JSON."""
        return {
            "schedule": self.name,
            "stages_per_rank": self.configuration.stages_per_rank,
            "placement": self.configuration.style,
            "microbatches": self.configuration.microbatches,
            "peak_memory": self.memory,
            "bound": self.bound,
        }


class LayerEvaluation(Evaluation[PlanRequest, LayerOption]):
    """The options of a plan for layers."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 -- those of Evaluation
        super().__init__(*arguments)
        self._too_large: list[Rejected] = []
        self.pruned: list[Rejected] = []
        """Orders whose bounds show that they can neither win nor be on the frontier; they are not simulated."""
        self.missing: set[str] = set()
        """Optional parts of the search that are not installed."""
        self._tried: list[tuple[Schedule, Configuration]] = []
        self._limit = self.request.memory_limit or inf

    @property
    def too_large(self) -> list[Rejected]:
        """Orders that exceed the memory limit with every partition tried, smallest first."""
        return sorted(self._too_large, key=lambda each: each.memory)

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

    def to_keys(self) -> dict[str, Any]:
        """Return what was left out as values for JSON."""
        return {
            "missing": sorted(self.missing),
            "too_large": [each.to_keys() for each in self.too_large],
            "pruned": [each.to_keys() for each in self.pruned],
            "not_evaluated": self.not_evaluated,
        }

    def why_no_option(self) -> str:
        """Return why there is no option, and what to change."""
        request = self.request
        if request.memory_limit is None or not self._too_large:
            return (
                f"no configuration of {self.not_evaluated} has few enough stages and microbatches to be "
                "evaluated: use fewer"
            )
        least, units = self.too_large[0], request.units
        more = " or ".join(name for name in POLICY_KINDS if not getattr(request, name))
        return (
            f"nothing fits the memory limit of {units.memory(request.memory_limit)} per rank: the smallest of "
            f"{plural(len(self._too_large), 'order')}, {least}, needs {units.memory(least.memory)}, of which "
            f"{units.memory(least.configuration.most_fixed)} for parameters, gradients and optimizer state: "
            f"use more ranks or memory, smaller microbatches{f', or a memory policy: {more}' if more else ''}"
        )

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
        live, is_split = live_activations(schedule.table), schedule.table.has(Kind.I)
        fitting = [each for each in own if max(each.peaks(live)) <= self._limit]
        if own[0] not in fitting and (smaller := self._made_to_fit(own[0], live)) is not None:
            fitting.append(smaller)
        if not fitting:
            memory = min(max(each.peaks(live)) for each in own)
            bound = own[0].bound(self.request, split=is_split)
            self._too_large.append(Rejected(schedule.name, own[0], memory, bound.seconds))
        for each in dict.fromkeys(fitting):
            memory = max(each.peaks(live))
            bound = each.bound(self.request, split=is_split, paired=schedule.table.has_pairs)
            if self._is_dominated(memory, bound):
                self.pruned.append(Rejected(schedule.name, each, memory, bound.seconds))
            else:
                self.options.append(self._option(schedule.name, each, schedule))
        self._tried += [(schedule, each) for each in dict.fromkeys((*fitting, *own[:1]))]

    def _made_to_fit(
        self, configuration: Configuration, live: Sequence[LiveActivations]
    ) -> Configuration | None:
        """Return it with a partition that fits, if one is found; not if the mean rank exceeds the limit."""
        if configuration.stages_per_rank != 1 and fmean(configuration.peaks(live)) > self._limit:
            return None
        counts = partition_within_memory(self.request, configuration, live)
        if counts is None:
            return None
        return configure(self.request, configuration.placement, counts, configuration.microbatches)

    def _is_dominated(self, memory: float, bound: Bound) -> bool:
        """Whether an option needs no more memory and is no slower than the bound, even with jitter."""
        jitter = self.request.jitter or 0.0
        return any(
            option.memory <= memory and option.seconds_without_jitter * (1 + jitter) <= bound.seconds
            for option in self.options
        )

    def _option(
        self, name: str, configuration: Configuration, schedule: Schedule, found_by: str = ""
    ) -> LayerOption:
        objective = self.request.objective
        timeline = simulate(schedule, configuration.costs, with_period=objective == "period")
        seconds = self.request.seconds_of(timeline)
        return LayerOption(
            *(name, configuration, schedule, max(timeline.peak_memory), seconds, seconds),
            *(timeline.makespan, timeline.bubble(objective)),
            timeline=timeline,
            bound=configuration.bound(self.request),
            found_by=found_by,
        )

    def seconds_of(self, schedule: Schedule, option: LayerOption) -> float:
        """Return the seconds of an order in the configuration of an option, without jitter."""
        return simulated_seconds(self.request, schedule, option.configuration.costs)

    # --- memory policies ---------------------------------------------------------------------------

    def evaluate_memory_policies(self) -> None:
        """Recompute and offload, in the orders with the lowest bounds; more of them if none of these fits.

        What a recomputed order holds follows from the order, so most are left out by their bounds. Copies have
        to be simulated.
        """
        request, seen = self.request, set[tuple[str, Configuration]]()
        if not (request.recompute or request.offload):
            return

        def key(each: tuple[Schedule, Configuration]) -> tuple[float, int]:
            bound = each[1].bound(request, split=each[0].table.has(Kind.I))
            return bound.seconds, each[1].placement.num_stages

        for done, (schedule, configuration) in enumerate(sorted(self._tried, key=key)):
            if done >= _ORDERS_WITH_POLICIES and self.options:
                break
            self.report("memory policies", min(done / _ORDERS_WITH_POLICIES, 1.0))
            for changed in simple_policies(
                *(schedule, configuration.costs, self._limit),
                configuration.peaks(live_activations(schedule.table)),
                recompute=request.recompute,
                offload=request.offload,
            ):
                self._evaluate_policy(changed, configuration)
            if request.offload and isinstance(configuration.stages_per_rank, int):
                for each in offloading_schedules(configuration.placement, configuration.microbatches):
                    if (each.name, configuration) not in seen:
                        seen.add((each.name, configuration))
                        self._evaluate_policy(each, configuration)

    def _evaluate_policy(self, schedule: Schedule, configuration: Configuration) -> None:
        table = schedule.table
        if not table.has(Kind.OFFLOAD):
            live = live_activations(table)
            if max(configuration.peaks(live)) > self._limit:
                smaller = self._made_to_fit(configuration, live)
                if smaller is None:
                    return
                configuration = smaller
            recomputed = tuple(table.count_by_stage(Kind.RECOMPUTE).tolist())
            kinds = {"split": table.has(Kind.I), "paired": table.has_pairs}
            bound = configuration.bound(self.request, **kinds, recomputed=recomputed)
            if self._is_dominated(max(configuration.peaks(live)), bound):
                return
        option = self._option(schedule.name, configuration, schedule)
        same = (other for other in self.options if other.memory <= option.memory)
        if option.memory <= self._limit and all(other.seconds > option.seconds for other in same):
            self.options.append(option)

    # --- other partitions and searched orders ------------------------------------------------------

    def search_orders(self) -> None:
        """Repartition the best options, search the best configurations, then both for the best option."""
        seconds, seed = self.request.seconds, self.request.seed
        until = monotonic() + seconds
        if not seconds:
            return
        for option in by_rank(self.options)[:_REPARTITIONED_OPTIONS]:
            self._repartition(option, seconds * _REPARTITION_SHARE / _REPARTITIONED_OPTIONS)
        chosen = self._most_promising()[:_SEARCHED_CONFIGURATIONS]
        for configuration in chosen:
            if self._can_win(self._search_bound(configuration)):
                self._search(configuration, seconds * _SEARCH_SHARE / len(chosen), seed)
        if self.options:
            self._repartition(by_rank(self.options)[0], (until - monotonic()) / 5)
            configuration = by_rank(self.options)[0].configuration
            if self._can_win(self._search_bound(configuration)):
                self._search(configuration, until - monotonic(), seed + 1)

    def _search_bound(self, configuration: Configuration) -> float:
        """Return a lower bound for searched orders, which have pairs only where these hide something."""
        return configuration.bound(self.request, paired=pairs_can_pay(configuration.costs)).seconds

    def _can_win(self, bound: float) -> bool:
        return all(bound < option.seconds_without_jitter * (1 - _ROUNDING) for option in self.options)

    def _repartition(self, option: LayerOption, seconds: float) -> None:
        """Move layers between the stages of an option, one at a time, as long as that makes it faster."""
        if option.memory_policy:  # its stages were chosen for this partition
            return
        until, best, improved = monotonic() + seconds, option, True
        tried = {other.configuration.counts for other in self.options if other.schedule == option.schedule}
        live = live_activations(option.schedule.table)
        while improved:
            improved = False
            for source, target in permutations(range(option.schedule.num_stages), 2):
                counts = move_layer(best.configuration.counts, source, target)
                if counts in tried or not counts[source]:
                    continue
                if monotonic() > until:
                    break
                tried.add(counts)
                other = self._with_partition(best, counts, live)
                if other is not None:
                    if best is not option or other.memory <= best.memory:
                        self.options.remove(best)
                    self.options.append(other)
                    best, improved = other, True

    def _with_partition(
        self, option: LayerOption, counts: LayerCounts, live: Sequence[LiveActivations]
    ) -> LayerOption | None:
        """Return the order of an option with another partition, if that fits and is faster."""
        own, seconds = option.configuration, option.seconds_without_jitter
        configuration = configure(self.request, own.placement, counts, own.microbatches)
        if max(configuration.peaks(live)) > self._limit or configuration.bound(self.request).seconds >= seconds:
            return None
        self.report(f"moving layers of {option}")
        other = self._option(option.name, configuration, option.schedule, option.found_by)
        return other if other.seconds_without_jitter < seconds * (1 - _ROUNDING) else None

    def _most_promising(self) -> list[Configuration]:
        """Return configurations that can win, by the mean of their bound and their best known order."""
        every = [*(option.configuration for option in self.options), *(each for _, each in self.configurations)]
        fitting = dict.fromkeys(each for each in every if each.most_fixed < self._limit)
        bound = {each: self._search_bound(each) for each in fitting}
        best: dict[Configuration, float] = {}
        for option in self.options:
            known = best.get(option.configuration, inf)
            best[option.configuration] = min(option.seconds_without_jitter, known)

        def promise(each: Configuration) -> tuple[float, int]:
            return bound[each] + best.get(each, bound[each] * _ASSUMED_EXCESS), each.placement.num_stages

        return sorted((each for each in bound if self._can_win(bound[each])), key=promise)

    def _search(self, configuration: Configuration, seconds: float, seed: int) -> None:
        """Search an order; add it unless another of this configuration is as fast with as little memory."""
        try:
            result = self._searched(configuration, seconds, seed)
        except SearchError:  # no order fits this configuration: its families are too large
            return
        self.missing |= set(result.missing)
        found = self._option("searched", configuration, result.schedule, result.found_by)
        if not any(
            option.configuration == configuration
            and option.seconds_without_jitter <= found.seconds_without_jitter
            and option.memory <= found.memory
            for option in self.options
        ):
            self.options.append(found)
        if result.interrupted:  # Ctrl-C ends the plan too
            raise KeyboardInterrupt

    def _searched(self, configuration: Configuration, seconds: float, seed: int) -> SearchResult:
        request = self.request
        optimizer_step = 0.0 if request.objective == "period" else configuration.costs.optimizer_step
        more: dict[str, Any] = {}
        if request.jitter is not None:
            more = {"jitter": request.jitter, "quantile": request.quantile}
        if request.memory_limit is not None and (request.recompute or request.offload):
            more |= {"recompute": request.recompute, "offload": request.offload}

        def on_progress(now: Progress) -> None:
            self.report(f"searching {configuration}", now.fraction, now.best + optimizer_step)

        return self.searcher(
            ranks=request.ranks,
            microbatches=configuration.microbatches,
            costs=configuration.costs,
            placement=configuration.placement,
            stages_per_rank=configuration.stages_per_rank,
            memory_limit=request.memory_limit,
            objective=request.objective,
            seconds=max(seconds, 0.1),
            seed=seed,
            on_progress=on_progress,
            **more,
        )

    # --- jitter ------------------------------------------------------------------------------------

    def options_for_jitter(self) -> tuple[list[LayerOption], list[LayerOption]]:
        """Return the frontier, and every other option."""
        front = frontier(self.options)
        return front, by_rank(option for option in self.options if option not in front)

    def set_aside(self, options: Sequence[LayerOption]) -> None:
        """Record options that cannot win under jitter as pruned."""
        self.pruned += [
            Rejected(each.name, each.configuration, each.memory, each.seconds_without_jitter)
            for each in options
        ]

    def quantile(self, option: LayerOption) -> float:
        """Return the quantile of an option's seconds under jitter."""
        return quantile_seconds(self.request, option.schedule, option.configuration.costs)


def simulated_seconds(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    """Return the objective of an order, optimizer step included, without jitter."""
    return request.seconds_of(simulate(schedule, costs, with_period=request.objective == "period"))


def quantile_seconds(request: PlanRequest, schedule: Schedule, costs: Costs) -> float:
    """Return the quantile of the makespan under jitter, plus the optimizer step."""
    assert request.jitter is not None
    spread = simulate_with_jitter(schedule, costs, jitter=request.jitter, seed=request.seed)
    return spread.quantile(request.quantile) + costs.optimizer_step


def training_schedules(ranks: int, microbatches: int, stages_per_rank: StagesPerRank) -> Iterator[Schedule]:
    """Yield schedules of all training families, with a few groups; of equal ones that of the most specific."""
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
