"""Candidates of a plan: the configurations and the partitions that are evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

from penstock.cost.memory import LayerBytes, LiveActivations
from penstock.ir.placement import Placement, StagesPerRank, most_stages
from penstock.planning.configuration import Configuration, configure
from penstock.planning.model import Model
from penstock.planning.partition import LayerCounts, balanced_partition, even_partition, improve_partition
from penstock.planning.request import PlanRequest

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
