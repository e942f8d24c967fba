"""Promises of the search on any acyclic stage graph: valid, never worse than a family, within proved bounds."""

from __future__ import annotations

import random
from itertools import islice

import pytest

import penstock
from penstock import Costs, Placement, StageGraph, encoder_decoder, simulate, validate
from penstock.bounds import OBJECTIVES, bounds
from penstock.search import exact
from penstock.search.problem import Problem
from penstock.search.seeds import family_builders, grouped_schedules, list_scheduled, serial
from tests.support.grids import examples, repetitions, small
from tests.support.search_instances import (
    best_of,
    count_misses,
    random_graph_problem,
    search_for,
    tiny_graph_problem,
)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_kernel_equals_the_simulator_on_graphs(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(repetitions(40, 12)):
        problem = random_graph_problem(rng, objective)
        for order in (serial(problem), *islice(list_scheduled(problem, lambda: False), 6)):
            schedule = problem.fused_schedule(order, "an order")
            assert not validate(schedule)
            timeline = simulate(schedule, problem.costs, with_period=True)
            assert problem.value(order) == pytest.approx(getattr(timeline, objective), rel=1e-12)


def test_results_on_random_graphs_are_valid_and_no_worse_than_the_families() -> None:
    rng = random.Random(16)
    for _ in range(repetitions(30, 12)):
        problem = random_graph_problem(rng, "makespan")
        found = search_for(problem, moves=2000)
        assert (found.schedule.graph, found.schedule.placement) == (problem.stage_graph, problem.placement)
        assert validate(penstock.lower(found.schedule)) == []
        assert found.value == pytest.approx(simulate(found.schedule, problem.costs).makespan)
        assert found.bound.seconds <= found.value * (1 + 1e-9)
        assert all(found.value <= value * (1 + 1e-9) for value in found.families.values())
        if problem.memory_limit is not None:
            assert max(found.timeline.peak_memory) <= problem.memory_limit * (1 + 1e-9)


@pytest.mark.parametrize("has_solver", [True, False])
@small(lambda has_solver: has_solver)
def test_the_best_of_all_orders_is_found_in_99_of_100_and_no_bound_exceeds_it(
    has_solver: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_solver:
        monkeypatch.setattr(exact, "available", lambda: False)
    rng, count = random.Random(has_solver), examples(150)
    assert count_misses(tiny_graph_problem(rng) for _ in range(count)) <= count / 100


def test_no_bound_exceeds_the_best_of_all_orders() -> None:
    rng = random.Random(20)
    for _ in range(examples(600)):
        problem = tiny_graph_problem(rng)
        best = best_of(problem)
        for bound in bounds(problem.work, problem.memory_limit, problem.objective):
            assert bound.seconds <= best * (1 + 1e-9), (problem, bound)


def test_only_families_over_graphs_are_starting_orders() -> None:
    loop = Problem(Placement.loop(2, 2), 8, Costs(), graph=StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3))))
    assert list(grouped_schedules(loop)) == []
    problem = Problem(Placement((0, 1, 1)), 4, Costs(), graph=StageGraph(3, ((0, 1), (0, 2))))
    names = [schedule.name for build in family_builders(problem).values() if (schedule := build())]
    assert names == ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"]


def test_a_multimodal_layout_is_searched_without_a_placement() -> None:
    graph = encoder_decoder((2, 1), 3, mtp=True)
    found = penstock.search(ranks=4, microbatches=6, graph=graph, costs=Costs(latency=0.1), moves=20_000)
    assert found.schedule.placement == Placement((0, 0, 1, 1, 2, 2, 3))
    assert set(found.families) == {"gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2"}
    assert found.value < min(found.families.values())


def test_a_chain_that_is_given_is_searched_as_a_chain() -> None:
    plain = penstock.search(ranks=3, microbatches=4, moves=2000)
    given = penstock.search(ranks=3, microbatches=4, moves=2000, graph=StageGraph.chain(3))
    assert given.schedule == plain.schedule
    assert set(given.families) == set(plain.families)
