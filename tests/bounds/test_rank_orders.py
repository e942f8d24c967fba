"""Bounds from all orders of a few ranks: they never exceed an optimum, and prove what no closed form proves."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import penstock
from penstock import Costs, Placement, StageGraph, search, simulate
from penstock.bounds import RankOrders, Workload, bounds, rank_bounds
from penstock.ir.kinds import Kind
from penstock.search.problem import Problem
from tests.support.grids import examples, repetitions
from tests.support.search_instances import best_of, random_costs, tiny_problem

CHUNKS = Costs(forward=4959, backward_input=5217, backward_weight=3519, latency=213, activation=1)
"""A V of unequal F, I and W, from a measurement."""


def never(_: int) -> bool:
    return False


def limited(rng: random.Random) -> Problem:
    """A problem so small that all orders can be tried, with a memory limit."""
    while (problem := tiny_problem(rng)).memory_limit is None:
        pass
    return problem


def orders(problem: Problem, ranks: tuple[int, ...]) -> RankOrders:
    assert problem.memory_limit is not None
    alone = problem.objective != "makespan"
    return RankOrders(problem.work, problem.memory_limit, ranks, alone)


def test_no_bound_exceeds_the_best_of_all_orders() -> None:
    """Any ranks, and so few states of the same counts that nearly all of them are merged."""
    rng = random.Random(16)
    for _ in range(examples(2000) // repetitions(1, 2)):
        problem = limited(rng)
        best = best_of(problem)
        most = problem.placement.num_ranks if problem.objective == "makespan" else 1
        ranks = tuple(sorted(rng.sample(range(problem.placement.num_ranks), rng.randint(1, most))))
        found = orders(problem, ranks).least(rng.choice((1, 1, 2, 8)), rng.choice((2, 1.05)) * best, never)
        assert found <= best * (1 + 1e-9), (problem, ranks)
        for bound in bounds(problem.work, problem.memory_limit, problem.objective):
            assert bound.seconds <= best * (1 + 1e-9), (problem, bound)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved-1f1b", "v-min", "v-half", "zbv"])
def test_no_family_beats_a_bound_at_its_own_peak_of_memory(name: str) -> None:
    rng = random.Random(name)
    for _ in range(examples(20)):
        p = rng.randint(2, 4)
        schedule = penstock.build(name, ranks=p, microbatches=p * rng.randint(1, 2))
        costs = replace(random_costs(rng, schedule.num_stages), backward=None)
        timeline = simulate(schedule, costs)
        split = schedule.table.has(Kind.I)
        work = Workload(schedule.placement, schedule.microbatches, costs, split=split)
        for alone, value in ((False, timeline.makespan), (True, timeline.span)):
            chain = RankOrders(work, max(timeline.peak_memory), (rng.randrange(p),), alone)
            found = chain.least(2, 1.5 * value, lambda states: states > 2000)
            assert found <= value * (1 + 1e-9), (p, costs, chain.ranks)


def test_all_ranks_without_merging_give_the_optimum() -> None:
    rng = random.Random(17)
    for _ in range(examples(100)):
        problem = limited(rng)
        costs = replace(problem.costs, backward=None, bandwidth=None, launch_overhead=0)
        problem = replace(problem, costs=costs, objective="makespan")
        best = best_of(problem)
        found = orders(problem, tuple(range(problem.placement.num_ranks))).least(10_000, 2 * best, never)
        assert found == pytest.approx(best, rel=1e-9), problem


@pytest.mark.parametrize(
    ("p", "ranks", "idle"), [(3, (2,), 121_488), (3, (0, 2), 171_078), (4, (3,), 82_173), (4, (2, 3), 96_855)]
)
def test_what_little_memory_costs_each_microbatch_is_counted(p: int, ranks: tuple[int, ...], idle: int) -> None:
    """Twelve microbatches of a V with room for p activations: ranks idle in the steady state too."""
    work = Workload(Placement.v(p), 12, CHUNKS)
    busy = 12 * 2 * (4959 + 5217 + 3519)
    found = RankOrders(work, p, ranks).least(8, 2.0 * (busy + idle), never)
    assert found == busy + idle
    assert found > bounds(work, p)[0].seconds + 15_000


@pytest.mark.parametrize("placement", [Placement.v(2), Placement.loop(2, 2)])
def test_a_search_proves_what_is_too_large_for_the_exact_solver(placement: Placement) -> None:
    """40 microbatches, 480 steps: the closed bound is far below the optimum, which one rank proves."""
    found = search(ranks=2, microbatches=40, placement=placement, costs=CHUNKS, memory_limit=2, moves=20_000)
    assert found.proved
    assert found.bound.name == "few ranks"
    assert found.bound.seconds > 1.09 * bounds(Workload(placement, 40, CHUNKS), 2)[0].seconds


def test_a_bound_is_never_above_the_order_that_is_known() -> None:
    work = Workload(Placement.v(3), 6, CHUNKS)
    known = bounds(work, 3)[0].seconds + 10
    assert RankOrders(work, 3, (2,)).least(4, known, never) == known


def test_a_bound_that_is_stopped_early_is_lower() -> None:
    work = Workload(Placement.v(3), 12, CHUNKS)
    layers: list[int] = []

    def is_over(states: int) -> bool:
        layers.append(states)
        return len(layers) > 30

    whole = RankOrders(work, 3, (2,)).least(4, 1e9, never)
    part = RankOrders(work, 3, (2,)).least(4, 1e9, is_over)
    assert 12 * 27_390 < part < whole


def test_ranks_are_added_to_the_best_until_the_effort_is_used() -> None:
    work = Workload(Placement.v(3), 6, CHUNKS)
    states: list[int] = []

    def used(count: int) -> float:
        states.append(count)
        return 0.0

    found = list(rank_bounds(work, 3, "makespan", 1e9, used))
    reasons = [bound.because for bound in found[:6]]
    assert sorted(reasons[:3]) == [f"no order of rank {rank} takes less" for rank in range(3)]
    assert sorted(reasons[3:5]) == [f"no order of ranks {first} takes less" for first in ("0 and 2", "1 and 2")]
    assert reasons[5] == "no order of ranks 0, 1 and 2 takes less"
    assert states[-1] > 0
    assert list(rank_bounds(work, 3, "makespan", 1e9, lambda _: 1.0)) == []


@pytest.mark.parametrize(
    "work",
    [
        Workload(Placement.v(2), 4, Costs(), paired=True),
        Workload(Placement.v(2), 4, Costs(), may_recompute=True),
        Workload(Placement.v(2), 4, Costs(), offloaded=(1, 0, 0, 0)),
        Workload(Placement.v(2), 4, Costs(), trains=False),
        Workload(Placement((0, 1, 1)), 4, Costs(), graph=StageGraph(3, ((0, 1), (0, 2)))),
    ],
)
def test_nothing_is_claimed_of_what_the_chain_does_not_describe(work: Workload) -> None:
    assert list(rank_bounds(work, 4, "makespan", 100.0, lambda _: 0.0)) == []
