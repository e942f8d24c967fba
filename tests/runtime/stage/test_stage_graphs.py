"""Promise: over any stage graph, a pipeline computes the losses, gradients and outputs of one process."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.lowering import Offload, Pass, Policy, Recompute, lower
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.reference import problems_of, run_cases
from tests.support.stage_graphs import (
    GRAPHS,
    GraphCase,
    graph_schedule,
    random_graph,
    train_graph,
    train_replicas,
)

SPLIT = {"fused": False, "split": True, "mixed": None}


def named_cases(p: int, backward: str) -> list[GraphCase]:
    rng = random.Random(p)
    return [
        GraphCase(f"{name}, {backward}", graph_schedule(graph, p, rng, split=SPLIT[backward]))
        for name, graph in GRAPHS.items()
        if graph.num_stages >= p
    ]


@pytest.mark.parametrize("backward", SPLIT)
def test_named_graphs_on_one_rank(backward: str) -> None:
    cases = named_cases(1, backward)
    assert not problems_of(cases, [run_cases(cases, train_graph)])


@pytest.mark.parametrize("backward", SPLIT)
@pytest.mark.parametrize("p", [3, 4])
@pytest.mark.full
def test_named_graphs_between_ranks(pools: Pools, p: int, backward: str) -> None:
    cases = named_cases(p, backward)
    assert not problems_of(cases, pools(p).run(run_cases, cases, train_graph))


def random_cases(p: int, first: int, count: int) -> list[GraphCase]:
    cases = []
    for seed in range(first, first + count):
        rng = random.Random(seed)
        graph = random_graph(rng)
        split = rng.choice((False, True, None))
        cases.append(
            GraphCase(f"seed {seed}", graph_schedule(graph, min(p, graph.num_stages), rng, split=split))
        )
    return cases


@pytest.mark.parametrize("first", range(0, 30, 10))
@small(lambda first: not first)
def test_random_graphs_on_one_rank(first: int) -> None:
    cases = random_cases(1, first, 10)
    assert not problems_of(cases, [run_cases(cases, train_graph)])


@pytest.mark.parametrize("first", range(0, 30, 5))
@pytest.mark.parametrize("p", [3])
@small(lambda first: not first)
def test_random_graphs_between_ranks(pools: Pools, p: int, first: int) -> None:
    cases = random_cases(p, first, 5)
    assert not problems_of(cases, pools(p).run(run_cases, cases, train_graph))


def with_memory_actions(cases: list[GraphCase]) -> list[GraphCase]:
    """Stages with several arguments change one in place, so they cannot be recomputed."""
    found = []
    for place, case in enumerate(cases):
        schedule = case.schedule
        stages = tuple(s for s in range(schedule.num_stages) if not schedule.graph.inputs(s))
        ways: list[list[Pass]] = [
            [Recompute(stages), Offload(ahead=0)],
            [Recompute(stages, Policy(every=2)), Offload()],
        ]
        found.append(replace(case, schedule=lower(schedule, ways[place % 2])))
    return found


def test_recomputed_and_offloaded_graphs_on_one_rank() -> None:
    cases = with_memory_actions(named_cases(1, "mixed"))
    assert not problems_of(cases, [run_cases(cases, train_graph)])


@small(lambda: False)
def test_recomputed_and_offloaded_graphs_between_ranks(pools: Pools) -> None:
    cases = with_memory_actions([*named_cases(3, "mixed"), *random_cases(3, 40, 5)])
    assert not problems_of(cases, pools(3).run(run_cases, cases, train_graph))


def test_replicas_of_a_graph_share_its_losses_and_gradients(pools: Pools) -> None:
    graphs = {name: GRAPHS[name] for name in ("two encoders", "second head")}
    cases = [
        GraphCase(name, graph_schedule(graph, 2, random.Random(3), split=None))
        for name, graph in graphs.items()
    ]
    assert not problems_of(cases, pools(4).run(run_cases, cases, train_replicas))
