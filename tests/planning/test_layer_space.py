"""Candidate partitions and configurations of a plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Placement, build
from penstock.cost.memory import live_activations
from penstock.planning import Model
from penstock.planning.layers import (
    LayerConfiguration,
    PlanRequest,
    candidate_partitions,
    configurations,
    partition_within_memory,
)
from penstock.planning.partition import balanced_partition, even_partition
from tests.support.planning_models import decoder, layer


@given(st.lists(st.floats(0, 10), min_size=4, max_size=14), st.integers(2, 3), st.sampled_from(["v", "loop"]))
def test_no_rank_is_busier_than_with_an_even_partition(
    seconds: list[float], stages_per_rank: int, shape: str
) -> None:
    ranks = len(seconds) // stages_per_rank
    stages = ranks * stages_per_rank
    placement = Placement.v(ranks, stages_per_rank) if shape == "v" else Placement.loop(ranks, stages_per_rank)
    model = Model(tuple(layer(each) for each in seconds))

    def busiest(counts: tuple[int, ...]) -> float:
        loads = [sum(model.loads()[i:j]) for i, j in pairwise((0, *accumulate(counts)))]
        return max(sum(loads[s] for s in own) for own in placement.stages_of_rank)

    found = candidate_partitions(model, placement)
    assert all(len(each) == stages and sum(each) == len(seconds) and min(each) >= 1 for each in found)
    assert busiest(found[0]) <= busiest(even_partition(len(seconds), stages)) * (1 + 1e-9)


def test_the_stage_of_a_heavy_head_has_fewer_blocks() -> None:
    assert candidate_partitions(decoder(10), Placement.loop(4))[0] == (4, 3, 3, 2)


def test_the_busiest_rank_is_the_first() -> None:
    model = Model(tuple(layer(1.0) for _ in range(13)))
    found = configurations(PlanRequest(model, 4, 16, stages_per_rank=1))
    assert (4, 3, 3, 3) in {each.counts for each in found}
    assert balanced_partition(model.loads(), 4, 16) == (4, 3, 3, 3)


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv", "interleaved-1f1b"])
def test_a_partition_that_fits_is_found_where_the_balanced_one_does_not(family: str) -> None:
    model = Model(tuple(layer(1.0, parameters=100 if i < 4 else 1) for i in range(16)), ranks=4, samples=8)
    schedule = build(family, ranks=4, microbatches=8)
    live, stages = live_activations(schedule.table), schedule.num_stages
    first = candidate_partitions(model, schedule.placement)[0]

    def peak(counts: tuple[int, ...]) -> float:
        return max(each.peak(model.costs(counts, 1), stages) for each in live)

    limit = peak(first) - 50
    request = PlanRequest(model, 4, 8, memory_limit=limit)
    configuration = LayerConfiguration(schedule.placement, first, 8, 1, model)
    found = partition_within_memory(request, configuration, live)
    assert found is not None
    assert peak(found) <= limit < peak(first)
    assert partition_within_memory(replace(request, memory_limit=100), configuration, live) is None
