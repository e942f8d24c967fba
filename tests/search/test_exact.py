"""The exact solver alone proves the known optima, and no closed bound exceeds them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock import Costs, Placement
from penstock.bounds import OBJECTIVES, Workload, bounds
from penstock.search.exact import Effort, Unit, solve, unit_of
from penstock.search.problem import Problem
from penstock.search.seeds import serial
from tests.bounds.test_lower_bounds import OPTIMA
from tests.support.grids import examples, small
from tests.support.search_instances import (
    UNITS,
    best_of,
    random_problem,
    tiny_expert_problem,
    tiny_graph_problem,
    tiny_problem,
)

pytest.importorskip("ortools", reason="the exact solver is an extra")
EFFORT = Effort(seconds=60, deterministic=True, workers=2, seed=0)


@pytest.mark.parametrize(("p", "m", "limit"), OPTIMA)
@small(lambda p, m: (p, m) != (4, 8))
def test_known_optima_are_found_and_proved_from_a_serial_start(p: int, m: int, limit: int) -> None:
    problem = Problem(Placement.loop(p), m, UNITS, limit)
    found = solve(problem, serial(problem), 0.0, EFFORT)
    assert found.order is not None
    assert problem.fits(found.order)
    assert problem.value(found.order) == found.bound == OPTIMA[p, m, limit]


def test_an_optimum_of_steps_shorter_than_a_nanosecond_is_proved() -> None:
    problem = Problem(Placement.loop(2), 4, UNITS.scaled(1e-11), 4)
    found = solve(problem, serial(problem), 0.0, EFFORT)
    assert found.order is not None
    assert problem.value(found.order) == pytest.approx(OPTIMA[2, 4, 4] * 1e-11)
    assert found.bound == pytest.approx(OPTIMA[2, 4, 4] * 1e-11, rel=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_bound_exceeds_an_optimum_of_unequal_stages(objective: str) -> None:
    rng = random.Random(objective)
    for _ in range(examples(60)):
        problem = random_problem(rng, objective, most_ranks=3, most_microbatches=4)
        work = Workload(problem.placement, problem.microbatches, problem.costs, split=problem.split)
        greatest = bounds(work, problem.memory_limit, objective)[0].seconds
        effort = Effort(seconds=0.1, deterministic=True, workers=1, seed=0)
        found = solve(problem, serial(problem), 0.0, effort)
        assert found.order is not None
        value = problem.value(found.order)
        assert greatest <= value * (1 + 1e-9), problem
        assert found.bound <= value * (1 + 1e-9), problem


@pytest.mark.parametrize("what", ["queues", "pairs", "graphs"])
def test_the_best_of_all_orders_is_found_and_proved(what: str) -> None:
    rng = random.Random(what)
    effort = Effort(seconds=20, deterministic=True, workers=1, seed=0)
    for _ in range(examples(100)):
        problem = {"pairs": tiny_expert_problem, "graphs": tiny_graph_problem}.get(what, tiny_problem)(rng)
        if what == "queues":
            problem = replace(problem, costs=replace(problem.costs, bandwidth=rng.choice((1, 2))))
        best = best_of(problem, pairs=what == "pairs")
        found = solve(problem, serial(problem), 0.0, effort)
        assert found.order is not None
        assert problem.fits(found.order)
        assert problem.value(found.order) == pytest.approx(best, rel=1e-9), problem
        assert found.bound == pytest.approx(best, rel=1e-9), problem


def test_seconds_that_are_fractions_have_a_common_unit() -> None:
    costs = Costs(forward=0.1, backward_input=0.25, backward_weight=0.05, latency=0.125)
    assert unit_of(Problem(Placement.loop(2), 2, costs)) == Unit(0.025, is_exact=True)
    odd = replace(costs, latency=2**0.5)
    assert not unit_of(Problem(Placement.loop(2), 2, odd)).is_exact


def test_the_same_seed_and_count_give_the_same_order() -> None:
    problem = Problem(Placement.v(2), 4, UNITS, 10)
    effort = Effort(seconds=0.1, deterministic=True, workers=1, seed=3)
    first, second = (solve(problem, serial(problem), 0.0, effort) for _ in range(2))
    assert first.bound == second.bound
    assert first.order is not None
    assert second.order is not None
    assert (first.order == second.order).all()
