"""A configuration: everything of a plan except the order of work; and the candidates that are evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import fmean

from penstock.bounds import Bound, Workload, bounds
from penstock.cost.costs import Costs
from penstock.cost.memory import LayerBytes, LiveActivations, fixed_bytes_of
from penstock.cost.prices import pairs_can_pay
from penstock.ir.placement import Placement, StagesPerRank, most_stages
from penstock.planning.model import Model
from penstock.planning.partition import LayerCounts, balanced_partition, even_partition, improve_partition
from penstock.planning.request import PlanRequest

# A configuration: everything of a plan except the order of work (partition, placement, microbatches).


_MAX_WORK = 1 << 15
"""Stages times microbatches of the largest schedule that is evaluated."""


@dataclass(frozen=True)
class Configuration:
    """What an order of work is chosen for, with the costs of its stages."""

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
        return (
            f"v={stages_text(self.stages_per_rank)}{' V' if self.style == 'v' else ''}, m={self.microbatches}"
        )

    @cached_property
    def fixed(self) -> tuple[float, ...]:
        """Per rank: bytes of parameters, gradients and optimizer state."""
        stages = self.placement.num_stages
        return tuple(fixed_bytes_of(self.costs, own, stages) for own in self.placement.stages_of_rank)

    def bound(
        self,
        request: PlanRequest,
        *,
        split: bool = True,
        paired: bool | None = None,
        recomputed: tuple[int, ...] | None = None,
    ) -> Bound:
        """Lower bound on the objective of any order, optimizer step included.

        Overlapped pairs of a forward and a backward are allowed where they save time, unless `paired` says
        otherwise. With techniques it holds for every choice of them, or for the given numbers of recomputed
        microbatches per stage.
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
    """As the command line takes it: 2, or 1,2,2,1."""
    return (
        ",".join(map(str, stages_per_rank)) if isinstance(stages_per_rank, Sequence) else str(stages_per_rank)
    )


def configure(
    request: PlanRequest, placement: Placement, counts: LayerCounts, microbatches: int
) -> Configuration:
    """The configuration with the costs of its stages."""
    samples = request.samples // microbatches
    return Configuration(placement, counts, microbatches, samples, request.model.costs(counts, samples))


# Candidates of a plan: the configurations and the partitions that are evaluated.


_MAX_STAGES_PER_RANK = 8


def configurations(request: PlanRequest) -> Iterator[Configuration]:
    """All candidates: stages per rank as far as the layers allow, loop and V, every divisor of the batch."""
    model, ranks = request.model, request.ranks
    most = min(_MAX_STAGES_PER_RANK, len(model.layers) // ranks) if ranks > 1 else 1
    fixed = request.stages_per_rank
    choices: Sequence[StagesPerRank] = range(1, most + 1) if fixed is None else [fixed]
    for stages_per_rank in choices:
        placements = Placement.loop(ranks, stages_per_rank), Placement.v(ranks, stages_per_rank)
        for placement in dict.fromkeys(placements):
            partitions = candidate_partitions(model, placement)
            for m in _divisors(request.samples):
                exact = (
                    [balanced_partition(model.loads(), ranks, m)] if most_stages(stages_per_rank) == 1 else []
                )
                for counts in dict.fromkeys(each for each in (*exact, *partitions) if each is not None):
                    yield configure(request, placement, counts, m)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def candidate_partitions(model: Model, placement: Placement) -> list[LayerCounts]:
    """Partitions for any number of microbatches: by the busiest rank, and by the longest stage."""
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
    """The best partition found with which an order fits the memory limit; exact for one stage per rank."""
    limit = request.memory_limit
    assert limit is not None
    placement, loads = configuration.placement, request.model.loads()
    layers = len(loads)
    sizes = LayerBytes(request.model.costs([1] * layers, configuration.samples), layers)
    if placement.num_stages == placement.num_ranks:
        hosts, m = placement.stage_to_rank, configuration.microbatches

        def fits(stage: int, i: int, j: int) -> bool:
            return sizes.peak(live[hosts[stage]], [(i, j)]) <= limit

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
    """The busiest rank, the sum of squares over ranks, the longest stage, the sum of squares over stages."""
    until = [0.0, *accumulate(loads)]
    stages = [until[j] - until[i] for i, j in pairwise([0, *accumulate(counts)])]
    ranks = [sum(stages[s] for s in own) for own in placement.stages_of_rank]
    return max(ranks), sum(x * x for x in ranks), max(stages), sum(x * x for x in stages)
