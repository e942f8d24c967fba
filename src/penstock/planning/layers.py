"""The plan for layers with known costs: families, memory policies, other partitions and searched orders.

An option is pruned without simulation if a simulated one needs no more memory and is no slower than the pruned
option's lower bound: it can neither win nor be on the frontier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, permutations
from math import inf, isfinite, isqrt
from os import PathLike
from statistics import fmean
from time import monotonic
from typing import Any

from penstock.arguments import plural
from penstock.bounds import OBJECTIVES, Bound, Workload, bounds
from penstock.cost.costs import Costs
from penstock.cost.estimate.parallel_config import size_problems
from penstock.cost.memory import LayerBytes, LiveActivations, fixed_bytes_of, live_activations
from penstock.cost.prices import pairs_can_pay
from penstock.cost.units import Units
from penstock.errors import Message, Parameter, PlanError
from penstock.families import build, families
from penstock.families.registry import offloading_schedules
from penstock.ir.kinds import Kind
from penstock.ir.placement import Placement, StagesPerRank, most_stages, problems_of_counts
from penstock.ir.schedule import Schedule
from penstock.planning.evaluation import (
    POLICY_KINDS,
    Configuration,
    Evaluation,
    Option,
    Request,
    by_rank,
    frontier,
)
from penstock.planning.layout import PipelineLayout
from penstock.planning.model import Model, read_model
from penstock.planning.partition import (
    LayerCounts,
    balanced_partition,
    even_partition,
    improve_partition,
    move_layer,
)
from penstock.search.passes import simple_policies
from penstock.search.request import jitter_needs_makespan
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.timeline import Timeline

_MAX_WORK = 1 << 15
"""Stages times microbatches of the largest schedule that is evaluated."""
_MAX_STAGES_PER_RANK = 8


@dataclass(frozen=True)
class PlanRequest(Request):
    """A model with the costs of its layers, to be planned for one pipeline."""

    model: Model
    ranks: int
    samples: int
    """Per step of this pipeline."""
    stages_per_rank: StagesPerRank | None = None
    """One number for all ranks or a list of one for each; None for any number."""
    objective: str = "makespan"
    """What is minimized: `makespan`, `span` or `period`, optimizer step included."""
    seconds: float = 10.0
    """Time for searching orders, in addition to evaluating families; 0 for families only."""

    @classmethod
    def of(
        cls,
        model: Model | Costs | str | PathLike[str],
        *,
        ranks: int | None = None,
        samples: int | None = None,
        memory_limit: float | None = None,
        **options: Any,  # noqa: ANN401 -- the other fields
    ) -> PlanRequest:
        """Return the request for a model, a file, or the costs of stages; what is not given is the model's."""
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
        return cls(model, ranks, samples, memory_limit=limit, **options)

    def __post_init__(self) -> None:
        problems = [*self._problems_of_counts(), *self.broken_rules()]
        if self.objective not in OBJECTIVES:
            must = f" must be one of {', '.join(OBJECTIVES)} (given {self.objective!r})"
            problems.append(Message(Parameter("objective"), must))
        if not self.seconds >= 0:
            problems.append(Message(Parameter("seconds"), f" must be 0 or more (given {self.seconds})"))
        if self.jitter is not None and self.objective != "makespan":
            problems.append(jitter_needs_makespan(self.objective))
        if self.offload and self.model.common.host_bandwidth is None:
            problems.append(
                "offload needs the speed of the host link: host_bandwidth_bytes_per_second of the devices"
            )
        if problems:
            raise PlanError(Message.join("; ", problems))

    def _problems_of_counts(self) -> list[str | Message]:
        stages_per_rank = 1 if self.stages_per_rank is None else self.stages_per_rank
        given: dict[str, object] = {"ranks": self.ranks, "samples": self.samples}
        if not isinstance(stages_per_rank, Sequence):
            given["stages_per_rank"] = stages_per_rank
        problems: list[str | Message] = [
            *size_problems(given),
            *problems_of_counts(self.ranks, stages_per_rank),
        ]
        counts = stages_per_rank if isinstance(stages_per_rank, Sequence) else [stages_per_rank]
        needed = 0 if problems else sum(counts) * self.ranks // len(counts)
        if needed > len(self.model.layers):
            stages = plural(self.ranks, "rank")
            if stages_per_rank != 1:
                stages += f" with {', '.join(map(str, counts))} stages{' each' * (len(counts) == 1)}"
            have = f"the model has {len(self.model.layers)} {'stages' if self.model.are_stages else 'layers'}"
            problems.append(
                f"{stages} need at least one layer per stage, but {have}: use fewer ranks or stages per rank"
            )
        return problems

    @property
    def title(self) -> str:
        """The title of a picture."""
        return f"{self.model.name}: {plural(self.ranks, 'rank')}, {plural(self.samples, 'sample')}"

    @property
    def units(self) -> Units:
        """The units of the model's costs."""
        return self.model.units

    def layout(self, counts: Sequence[int]) -> PipelineLayout | None:
        """Return the layout of stages with these numbers of layers; None if the layers are stages."""
        return self.model.layout(counts)

    def to_keys(self) -> dict[str, Any]:
        """Return what is planned as values for JSON."""
        names = ("ranks", "samples", "objective")
        return {"model": self.model.name, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class LayerConfiguration(Configuration):
    """Everything of a plan for layers except the order of work."""

    samples: int
    """Per microbatch."""
    model: Model = field(compare=False)

    @cached_property
    def costs(self) -> Costs:
        """Costs of the stages."""
        return self.model.costs(self.counts, self.samples)

    @cached_property
    def style(self) -> str:
        """`loop`, `v` or `custom`, also with unequal numbers of stages per rank."""
        ranks, counts = self.placement.num_ranks, self.stages_per_rank
        if self.placement == Placement.loop(ranks, counts):
            return "loop"
        return "v" if self.placement == Placement.v(ranks, counts) else "custom"

    @property
    def is_too_large_to_evaluate(self) -> bool:
        """Whether it has too many stages and microbatches to build and simulate every family."""
        return self.placement.num_stages * self.microbatches > _MAX_WORK

    def __str__(self) -> str:
        stages = stages_text(self.stages_per_rank)
        return f"v={stages}{' V' if self.style == 'v' else ''}, m={self.microbatches}"

    @cached_property
    def most_fixed(self) -> float:
        """The most bytes of parameters, gradients and optimizer state of a rank."""
        stages = self.placement.num_stages
        return max(fixed_bytes_of(self.costs, own, stages) for own in self.placement.stages_of_rank)

    def peaks(self, live: Sequence[LiveActivations]) -> list[float]:
        """Return the peak of each rank in an order, given its live activations."""
        return [each.peak(self.costs, self.placement.num_stages) for each in live]

    def bound(
        self,
        request: PlanRequest,
        *,
        split: bool = True,
        paired: bool | None = None,
        recomputed: tuple[int, ...] | None = None,
    ) -> Bound:
        """Return a lower bound on the objective of any order, optimizer step included.

        Overlapped pairs of a forward and a backward are allowed where they save time, unless `paired` says
        otherwise. The bound holds for every memory policy that the request allows, or for the given numbers of
        recomputed microbatches per stage.
        """
        if paired is None:
            paired = pairs_can_pay(self.costs) or self.costs.launch_overhead > 0
        work = Workload(
            self.placement,
            self.microbatches,
            self.costs,
            split=split,
            paired=paired,
            recomputed=recomputed or (),
            may_recompute=request.recompute and recomputed is None,
            may_offload=request.offload and recomputed is None,
        )
        found = bounds(work, request.memory_limit, request.objective)[0]
        if request.objective == "period":  # which includes the optimizer step
            return found
        return replace(found, seconds=found.seconds + self.costs.optimizer_step)


def stages_text(stages_per_rank: StagesPerRank) -> str:
    """Return the number as the command line takes it: 2, or 1,2,2,1."""
    counts = stages_per_rank if isinstance(stages_per_rank, Sequence) else [stages_per_rank]
    return ",".join(map(str, counts))


def configurations(request: PlanRequest) -> Iterator[LayerConfiguration]:
    """Yield candidates: stages per rank as far as layers allow, loop and V, every divisor of the batch."""
    model, ranks = request.model, request.ranks
    most = min(_MAX_STAGES_PER_RANK, len(model.layers) // ranks) if ranks > 1 else 1
    fixed = request.stages_per_rank
    choices: Sequence[StagesPerRank] = range(1, most + 1) if fixed is None else [fixed]
    small = [n for n in range(1, isqrt(request.samples) + 1) if request.samples % n == 0]
    divisors = sorted({*small, *(request.samples // n for n in small)})
    for stages_per_rank in choices:
        placements = Placement.loop(ranks, stages_per_rank), Placement.v(ranks, stages_per_rank)
        for placement in dict.fromkeys(placements):
            partitions = candidate_partitions(model, placement)
            for m in divisors:
                exact = (
                    balanced_partition(model.loads(), ranks, m) if most_stages(stages_per_rank) == 1 else None
                )
                for counts in dict.fromkeys((*([exact] if exact else []), *partitions)):
                    yield LayerConfiguration(placement, counts, m, request.samples // m, model)


def candidate_partitions(model: Model, placement: Placement) -> list[LayerCounts]:
    """Return partitions for any number of microbatches: by the busiest rank, and by the longest stage."""
    loads, stages = model.loads(), placement.num_stages
    by_stage = balanced_partition(loads, stages)
    assert by_stage is not None, "there is a layer for each stage"
    if stages == placement.num_ranks:
        return [by_stage]

    def cost(counts: LayerCounts) -> tuple[float, ...]:
        return _imbalance(loads, counts, placement)

    starts = dict.fromkeys((by_stage, even_partition(len(loads), stages)))
    by_rank = min((improve_partition(start, cost) for start in starts), key=cost)
    return list(dict.fromkeys((by_rank, by_stage)))


def partition_within_memory(
    request: PlanRequest, configuration: LayerConfiguration, live: Sequence[LiveActivations]
) -> LayerCounts | None:
    """Return the best partition found that fits the memory limit; exact for one stage per rank."""
    limit = request.memory_limit
    assert limit is not None
    placement, loads = configuration.placement, request.model.loads()
    layers = len(loads)
    sizes = LayerBytes(request.model.costs([1] * layers, configuration.samples), layers)
    if placement.num_stages == placement.num_ranks:
        rank_of_stage, m = placement.stage_to_rank, configuration.microbatches

        def fits(stage: int, i: int, j: int) -> bool:
            return sizes.peak(live[rank_of_stage[stage]], [(i, j)]) <= limit

        return balanced_partition(loads, placement.num_stages, m, fits)

    def cost(counts: LayerCounts) -> tuple[float, ...]:
        ends = list(pairwise([0, *accumulate(counts)]))
        owned = zip(live, placement.stages_of_rank)
        peaks = [sizes.peak(on_rank, [ends[s] for s in own]) for on_rank, own in owned]
        excess = sum(max(each - limit, 0.0) for each in peaks)
        return excess, *_imbalance(loads, counts, placement)

    # moves of single layers reach a local optimum only: they start from this partition, and from a small one
    mean_live = fmean(float(each.counts.max(initial=0)) for each in live)
    small = balanced_partition(sizes.with_live(mean_live), placement.num_stages)
    starts = [configuration.counts, *([small] if small else [])]
    found = min((improve_partition(start, cost) for start in starts), key=cost)
    return found if cost(found)[0] == 0 else None


def _imbalance(loads: Sequence[float], counts: LayerCounts, placement: Placement) -> tuple[float, ...]:
    """Return the busiest rank, the sum of squares over ranks, and both over stages."""
    until = [0.0, *accumulate(loads)]
    stages = [until[j] - until[i] for i, j in pairwise([0, *accumulate(counts)])]
    ranks = [sum(stages[s] for s in own) for own in placement.stages_of_rank]
    return max(ranks), sum(x * x for x in ranks), max(stages), sum(x * x for x in stages)


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

    configuration: LayerConfiguration
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
            "gap": self.gap if isfinite(self.gap) else None,
            "found_by": self.found_by,
        }


@dataclass(frozen=True)
class Rejected:
    """An order that was not simulated, with its peak memory and its lower bound in this configuration."""

    name: str
    configuration: LayerConfiguration
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
        self._tried: list[tuple[Schedule, LayerConfiguration]] = []
        self._limit = self.request.memory_limit or inf

    @property
    def too_large(self) -> list[Rejected]:
        """Orders that exceed the memory limit with every partition tried, smallest first."""
        return sorted(self._too_large, key=lambda each: each.memory)

    @cached_property
    def _candidates(self) -> list[LayerConfiguration]:
        return list(configurations(self.request))

    @cached_property
    def configurations(self) -> list[tuple[Bound, LayerConfiguration]]:
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
        groups: dict[tuple[int | tuple[int, ...], int], list[LayerConfiguration]] = {}
        for _, each in self.configurations:
            groups.setdefault((each.stages_per_rank, each.microbatches), []).append(each)
        for done, ((stages_per_rank, m), group) in enumerate(groups.items()):
            self.report(f"families with v={stages_text(stages_per_rank)}, m={m}", done / len(groups))
            for schedule in training_schedules(self.request.ranks, m, stages_per_rank):
                own = [each for each in group if each.placement == schedule.placement]
                if own:
                    self._evaluate_schedule(schedule, own)

    def _evaluate_schedule(self, schedule: Schedule, own: list[LayerConfiguration]) -> None:
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
        self, configuration: LayerConfiguration, live: Sequence[LiveActivations]
    ) -> LayerConfiguration | None:
        """Return it with a partition that fits, if one is found; not if the mean rank exceeds the limit."""
        if configuration.stages_per_rank != 1 and fmean(configuration.peaks(live)) > self._limit:
            return None
        counts = partition_within_memory(self.request, configuration, live)
        if counts is None:
            return None
        return replace(configuration, counts=counts)

    def _is_dominated(self, memory: float, bound: Bound) -> bool:
        """Whether an option needs no more memory and is no slower than the bound, even with jitter."""
        jitter = self.request.jitter or 0.0
        return any(
            option.memory <= memory and option.seconds_without_jitter * (1 + jitter) <= bound.seconds
            for option in self.options
        )

    def _option(
        self, name: str, configuration: LayerConfiguration, schedule: Schedule, found_by: str = ""
    ) -> LayerOption:
        timeline = self.request.timeline(schedule, configuration.costs)
        seconds = self.request.seconds_of(timeline)
        return LayerOption(
            *(name, configuration, schedule, max(timeline.peak_memory), seconds, seconds),
            *(timeline.makespan, timeline.bubble(self.request.objective)),
            timeline=timeline,
            bound=configuration.bound(self.request),
            found_by=found_by,
        )

    # --- memory policies ---------------------------------------------------------------------------

    def evaluate_memory_policies(self) -> None:
        """Recompute and offload, in the orders with the lowest bounds; more of them if none of these fits.

        What a recomputed order holds follows from the order, so most are left out by their bounds. Copies have
        to be simulated.
        """
        request, seen = self.request, set[tuple[str, LayerConfiguration]]()
        if not (request.recompute or request.offload):
            return

        def key(each: tuple[Schedule, LayerConfiguration]) -> tuple[float, int]:
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

    def _evaluate_policy(self, schedule: Schedule, configuration: LayerConfiguration) -> None:
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

    def _search_bound(self, configuration: LayerConfiguration) -> float:
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
        seconds = option.seconds_without_jitter
        configuration = replace(option.configuration, counts=counts)
        if max(configuration.peaks(live)) > self._limit or configuration.bound(self.request).seconds >= seconds:
            return None
        self.report(f"moving layers of {option}")
        other = self._option(option.name, configuration, option.schedule, option.found_by)
        return other if other.seconds_without_jitter < seconds * (1 - _ROUNDING) else None

    def _most_promising(self) -> list[LayerConfiguration]:
        """Return configurations that can win, by the mean of their bound and their best known order."""
        every = [*(option.configuration for option in self.options), *(each for _, each in self.configurations)]
        fitting = dict.fromkeys(each for each in every if each.most_fixed < self._limit)
        bound = {each: self._search_bound(each) for each in fitting}
        best: dict[LayerConfiguration, float] = {}
        for option in self.options:
            known = best.get(option.configuration, inf)
            best[option.configuration] = min(option.seconds_without_jitter, known)

        def promise(each: LayerConfiguration) -> tuple[float, int]:
            return bound[each] + best.get(each, bound[each] * _ASSUMED_EXCESS), each.placement.num_stages

        return sorted((each for each in bound if self._can_win(bound[each])), key=promise)

    def _search(self, configuration: LayerConfiguration, seconds: float, seed: int) -> None:
        """Search an order; add it unless another of this configuration is as fast with as little memory."""
        request, more = self.request, dict[str, Any]()
        if request.jitter is not None:
            more = {"jitter": request.jitter, "quantile": request.quantile}
        if request.memory_limit is not None and (request.recompute or request.offload):
            more |= {"recompute": request.recompute, "offload": request.offload}
        result = self.searched(
            configuration,
            memory_limit=request.memory_limit,
            objective=request.objective,
            seconds=max(seconds, 0.1),
            seed=seed,
            **more,
        )
        if result is None:  # its families are too large
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
