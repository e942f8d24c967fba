"""Promises on random stage graphs: ranks compute the values of the graph; files, engines and bounds agree."""

from __future__ import annotations

import random

import numpy as np
import pytest

import penstock
from penstock import Costs, Schedule, SendModel, simulate, validate
from penstock.bounds import bounds_of
from penstock.formats import dumps, reads
from penstock.lowering import AddCommunication, DeferReceives
from tests.oracles.graph_execution import direct_values, executed_values
from tests.support.random_costs import random_costs
from tests.support.random_graphs import random_placed_graph

FAMILIES = ("gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2")
SEEDS = range(36)


def random_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    graph, placement = random_placed_graph(rng, most_stages=8)
    name, m = FAMILIES[seed % len(FAMILIES)], rng.randint(1, 6)
    return penstock.build(name, ranks=placement.num_ranks, microbatches=m, graph=graph, placement=placement)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ranks_compute_every_value_and_gradient_of_the_graph(seed: int) -> None:
    schedule = random_schedule(seed)
    wanted = direct_values(schedule.graph, schedule.microbatches)
    lowered = penstock.lower(schedule)
    assert validate(lowered) == []
    assert executed_values(lowered) == wanted
    deferred = DeferReceives()(lowered)
    assert validate(deferred) == []
    assert executed_values(deferred) == wanted
    assert validate(DeferReceives(past_sends=True)(lowered), SendModel.EDGE_STREAMS) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_files_keep_a_schedule_over_a_graph(seed: int) -> None:
    for schedule in (random_schedule(seed), penstock.lower(random_schedule(seed))):
        for file_format in ("csv", "json"):
            assert reads(dumps(schedule, file_format), file_format) == schedule


@pytest.mark.parametrize("seed", SEEDS)
def test_both_engines_agree_and_no_bound_exceeds_the_makespan(seed: int) -> None:
    rng, schedule = random.Random(-seed), random_schedule(seed)
    latency = tuple(rng.choice((0, 1, 3)) for _ in schedule.graph.edges) or 0
    costs = Costs(forward=2, backward_input=3, latency=latency, activation_message=1, gradient_message=1)
    fast = Costs(**{**vars(costs), "bandwidth": 1e15})
    plain = simulate(schedule, costs)
    lowered = AddCommunication()(schedule)
    for timeline in (simulate(schedule, fast), simulate(lowered, costs), simulate(lowered, fast)):
        assert np.allclose(timeline.end[timeline.is_compute], plain.end, rtol=1e-9)
    for given in (costs, random_costs(rng, schedule.num_stages)):
        timeline = simulate(schedule, given)
        assert all(b.seconds <= timeline.makespan * (1 + 1e-9) for b in bounds_of(schedule, given))
        for memory in simulate(lowered, given).memory:
            assert memory.receive_buffers.min(initial=0) >= 0
            assert not len(memory.total) or memory.activations[-1] == 0 == memory.receive_buffers[-1]


def test_a_message_that_is_missing_is_noticed_by_the_validator_and_by_the_ranks() -> None:
    lowered = penstock.lower(random_schedule(1))
    rows = [list(row) for row in lowered.ranks]
    rank, index = next((r, i) for r, row in enumerate(rows) for i, s in enumerate(row) if "SEND_F" in str(s))
    del rows[rank][index]
    broken = Schedule(rows, lowered.placement, lowered.microbatches, graph=lowered.graph)
    assert [violation.code for violation in validate(broken)] == ["unmatched-receive"]
    with pytest.raises(RuntimeError, match="all ranks wait"):
        executed_values(broken)
