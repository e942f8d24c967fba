"""The space of a plan for layers with known costs: the request, configurations, and partitions to try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import isqrt
from os import PathLike
from statistics import fmean
from typing import Any

from penstock.arguments import plural, printable, whole_number
from penstock.bounds import OBJECTIVES, Bound, Workload, bounds
from penstock.cost.costs import Costs
from penstock.cost.memory import LayerBytes, LiveActivations, fixed_bytes_of
from penstock.cost.prices import pairs_can_pay
from penstock.cost.units import Units
from penstock.errors import Message, Parameter, PlanError
from penstock.ir.placement import Placement, StagesPerRank, most_stages, problems_of_counts
from penstock.planning.evaluation import Request
from penstock.planning.layout import PipelineLayout
from penstock.planning.model import Model, read_model
from penstock.planning.partition import LayerCounts, balanced_partition, even_partition, improve_partition
from penstock.search.request import jitter_needs_makespan
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
        problems = [*self._problems_of_counts(), *self.common_problems()]
        if self.memory_limit is not None and not self.memory_limit > 0:
            must = f" must be a number of bytes above 0 (given {self.memory_limit})"
            problems.append(Message(Parameter("memory_limit"), must))
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
            Message(Parameter(name), f" must be an integer above 0 (given {printable(repr(value))})")
            for name, value in given.items()
            if (whole_number(value) or 0) < 1
        ]
        problems += problems_of_counts(self.ranks, stages_per_rank)
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
    def time_name(self) -> str:
        """The objective."""
        return self.objective

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

    def seconds_of(self, timeline: Timeline) -> float:
        """Return the objective, optimizer step included, without jitter."""
        seconds = timeline.length(self.objective)
        return seconds if self.objective == "period" else seconds + timeline.costs.optimizer_step


@dataclass(frozen=True)
class Configuration:
    """Everything of a plan except the order of work, with the costs of its stages."""

    placement: Placement
    counts: LayerCounts
    """Number of layers of each stage."""
    microbatches: int
    samples: int
    """Per microbatch."""
    costs: Costs

    @cached_property
    def stages_per_rank(self) -> int | tuple[int, ...]:
        """Number of stages of each rank; a list if they differ."""
        counts = tuple(map(len, self.placement.stages_of_rank))
        return counts if len(set(counts)) > 1 else counts[0]

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
    return (
        ",".join(map(str, stages_per_rank)) if isinstance(stages_per_rank, Sequence) else str(stages_per_rank)
    )


def configure(
    request: PlanRequest, placement: Placement, counts: LayerCounts, microbatches: int
) -> Configuration:
    """Return the configuration with the costs of its stages."""
    samples = request.samples // microbatches
    return Configuration(placement, counts, microbatches, samples, request.model.costs(counts, samples))


def configurations(request: PlanRequest) -> Iterator[Configuration]:
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
                    yield configure(request, placement, counts, m)


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
    request: PlanRequest, configuration: Configuration, live: Sequence[LiveActivations]
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
