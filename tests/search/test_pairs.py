"""Promises of pairs in a search: they are made where they pay, and only there, and bounds stay below them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import penstock
from penstock import Costs, Placement, Schedule, StageGraph, simulate, validate
from penstock.bounds import bounds
from penstock.search.driver import PlacementSearch
from penstock.search.problem import Problem, pair_prices, pair_variants
from tests.support.grids import repetitions
from tests.support.search_instances import best_of, search_for, tiny_expert_problem

EXPERTS = Costs(forward_all_to_all=1, backward_input_all_to_all=1)


def pairs_in(schedule: Schedule) -> int:
    return len(schedule.table.slot) - schedule.num_steps


def test_prices_of_pairs_are_by_stage_and_only_where_a_pair_pays() -> None:
    placement = Placement.loop(1, 2)
    costs = Costs(forward=(1, 3), forward_all_to_all=(2, 0), launch_overhead=10)
    prices = pair_prices(costs, placement, split=True)
    assert prices is not None
    # F of a stage beside I (1 + 0) or B (2 + 0) of any: compute, all-to-all, and F by itself
    assert prices[:, 0].tolist() == [[13, 13], [14, 15]]
    # a launch less is no reason, nor a pair of stages that are on different ranks
    assert pair_prices(Costs(launch_overhead=10), placement, split=True) is None
    apart = Costs(forward=(0, 1), backward_input=(1, 0), backward_weight=0, overlap_factor=0)
    assert pair_prices(apart, Placement.loop(2), split=True) is None


def test_adjacent_forwards_and_backwards_become_pairs_unless_one_needs_the_other() -> None:
    problem = Problem(Placement.loop(1), 3, EXPERTS)
    schedule = Schedule.parse("0F0 0I0 0W0 0F1 0F2 0B1 0B2")
    variants = list(pair_variants(problem.order_of(schedule), problem.arrays.rank_bounds))
    shown = [" ".join(map(str, problem.fused_schedule(each, "").ranks[0])) for each in variants]
    assert shown == [
        "0F0 0I0 0W0 0F1 0F2 0I1 0W1 0I2 0W2",
        "0F0 0I0 0W0 0F1 (0F2;0B1)OVERLAP_F_B 0I2 0W2",
        "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0I2 0W2",
    ]


def test_families_with_pairs_survive_the_conversion_to_tokens() -> None:
    for name, placement in (("interleaved-overlap", Placement.loop(2, 2)), ("dualpipev", Placement.v(2))):
        problem = Problem(placement, 6, EXPERTS)
        schedule = penstock.build(name, ranks=2, microbatches=6)
        order = problem.order_of(schedule)
        again = problem.fused_schedule(order, "again", frozenset(range(4)))
        assert pairs_in(again) == pairs_in(schedule)
        assert problem.value(order) == simulate(schedule, EXPERTS).makespan
        assert not validate(again)


def test_the_best_order_with_pairs_is_found_and_no_bound_exceeds_it() -> None:
    rng, count, misses, paired = random.Random(7), repetitions(24, 12), 0, 0
    for _ in range(count):
        problem = tiny_expert_problem(rng)
        best, found = best_of(problem, pairs=True), search_for(problem, moves=3000)
        assert found.bound.seconds <= best * (1 + 1e-9), problem
        assert found.value >= best * (1 - 1e-9), problem
        misses += found.value != pytest.approx(best)
        paired += best < best_of(problem) * (1 - 1e-9)
    assert misses <= count / 12
    assert paired >= count / 12


def test_searched_pairs_beat_every_family_and_any_order_without_pairs() -> None:
    found = penstock.search(ranks=2, microbatches=4, costs=EXPERTS, moves=4000)
    assert pairs_in(found.schedule) >= 3
    assert not validate(penstock.lower(found.schedule))
    assert found.value == simulate(found.schedule, EXPERTS).makespan
    assert found.value < min(found.families.values())
    single = [[part for step in row for part in step.parts] for row in found.schedule.ranks]
    assert simulate(Schedule(single, found.schedule.placement), EXPERTS).makespan > found.value


def test_pairs_are_made_on_any_graph_and_within_memory() -> None:
    graph = StageGraph(4, ((0, 1), (0, 2), (1, 3), (2, 3)))
    costs = Costs(forward_all_to_all=2, backward_input_all_to_all=1)
    sizes = {"ranks": 2, "microbatches": 4, "graph": graph, "costs": costs, "moves": 4000}
    for limit in (4, 8):
        found = penstock.search(**sizes, memory_limit=limit)  # type: ignore[arg-type]
        assert max(found.timeline.peak_memory) <= limit
        assert pairs_in(found.schedule)
        assert not validate(penstock.lower(found.schedule))


@pytest.mark.parametrize("costs", [Costs(), Costs(launch_overhead=0.25), Costs(overlap=9)])
def test_pairs_that_hide_nothing_are_not_made(costs: Costs) -> None:
    problem = Problem(Placement.v(2), 4, costs)
    assert not problem.can_pair
    assert not problem.arrays.can_pair
    order = problem.order_of(penstock.build("dualpipev", ranks=2, microbatches=4))
    assert not pairs_in(problem.fused_schedule(order, "single steps"))
    assert np.isfinite(problem.value(order))


def test_pairs_that_only_save_a_launch_weaken_no_bound() -> None:
    """Calibrated costs have a launch overhead: a family of pairs must not cost the proof for single steps."""
    for launch in (0, 1):
        search = PlacementSearch(Problem(Placement.loop(2), 2, Costs(launch_overhead=launch)))
        search.add_seeds(lambda: False, lambda: False)
        assert ("interleaved-overlap" in search.families) is (launch == 0)
        assert search.bound == bounds(replace(search.problem.work, paired=False))[0]
        assert search.is_solvable


def test_few_pairs_are_given_to_the_exact_solver() -> None:
    assert PlacementSearch(Problem(Placement.loop(2), 8, EXPERTS)).is_solvable
    assert not PlacementSearch(Problem(Placement.loop(2), 24, EXPERTS)).is_solvable
